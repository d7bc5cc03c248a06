"""Nobody asks for a built-in by its name, or for a class that is one of several: what a thing is, it says itself."""

import ast
from collections.abc import Iterator

from lmgym.core.builtins import BUILTIN
from tests import runs

PACKAGE = runs.ROOT / "lmgym"
KINDS = ("algorithm", "surrogate", "correction", "tokens", "env", "driver", "source", "judge", "engine", "sink")
COMMON = {"none", "all", "sampler", "masked", "clip", "truncated"}  # names that are words of other lists too
NAMES = {name for kind in KINDS for name in BUILTIN[kind]} - COMMON

COMPARED = {  # who may compare with such a word, and what it means there
    ("algorithms/distill.py", "references"): "a value of its own key `source`",
    ("algorithms/gkd.py", "references"): "a value of its own key `source`",
    ("algorithms/requirements.py", "policy"): "what a stage makes",
    ("compat/rl4lms/convert.py", "nlpo"): "a name in RL4LMs' files",
    ("compat/rl4lms/convert.py", "supervised"): "a name in RL4LMs' files",
    ("compat/rl4lms/convert_algorithm.py", "a2c"): "a name in RL4LMs' files",
    ("compat/rl4lms/convert_algorithm.py", "nlpo"): "a name in RL4LMs' files",
    ("compat/rl4lms/convert_algorithm.py", "trpo"): "a name in RL4LMs' files",
    ("config/build.py", "steps"): "a key of a recipe",
    ("envs/pettingzoo.py", "conversation"): "a key of an environment's notes",
    ("functional/preferences.py", "ipo"): "a loss of pairs, by the paper's name",
    ("rewards/adapters.py", "verifiers"): "the library",
    ("tasks/data.py", "references"): "a column",
    ("tasks/rows/cells.py", "references"): "a column",
    ("training/planning/prompt_report.py", "single_turn"): "a prompt of the task alone is shown",
    ("training/planning/memory.py", "policy"): "a group of parameters",
    ("training/resuming/differences.py", "steps"): "a key of a recipe",
    ("updates/optimizer.py", "policy"): "a group of parameters",
    ("viewer/addresses.py", "pairs"): "a part of an address",
    ("viewer/addresses.py", "steps"): "a part of an address",
}
ASKED = {  # who may ask for a class that extends another of lmgym's
    ("distributed/process_group.py", "Lost"): "an error that is raised, and caught",
    ("distributed/ranks.py", "Lost"): "an error that is raised, and caught",
    ("inference/completions.py", "Decoding"): "a section with keys that its base does not have",
    ("inference/sampler.py", "Decoding"): "a section with keys that its base does not have",
    ("inference/vllm/engine.py", "Decoding"): "a section with keys that its base does not have",
    ("compat/settings/recipe.py", "PolicyGradient"): "which defaults a foreign recipe differs from",
    ("rollouts/hints.py", "BarePrompt"): "a text that a template does not touch",
    ("rollouts/players.py", "BarePrompt"): "a text that a template does not touch",
    ("tasks/prompt_forms.py", "BarePrompt"): "a text that a template does not touch",
    ("text/chat.py", "BarePrompt"): "a text that a template does not touch",
    ("training/planning/prompt_report.py", "BarePrompt"): "a text that a template does not touch",
    ("training/begin_stage.py", "Policy"): "a teacher here, not one behind a server",
    ("training/stage.py", "Policy"): "a teacher here, not one behind a server",
    ("types.py", "BarePrompt"): "a text that a template does not touch",
}
FOREIGN = "compat/settings/"  # files of other libraries, whose names for things these are
BASES = {"Algorithm"}  # that others extend, and which builds them from a recipe


def modules() -> dict[str, ast.Module]:
    return {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}


def names_compared(tree: ast.AST) -> Iterator[str]:
    """The constant texts that something is compared with, alone or in a tuple, list or set."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                sides = [left, *others]
            case ast.MatchValue(value=value):
                sides = [value]
            case _:
                continue
        for part in (part for side in sides for part in getattr(side, "elts", [side])):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value


def classes_asked_for(tree: ast.AST) -> Iterator[str]:
    """The names behind the comma of isinstance and issubclass."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                yield from (part.id for part in ast.walk(kinds) if isinstance(part, ast.Name))


def siblings() -> set[str]:
    """The classes that a recipe can name, and those that extend another class of lmgym's."""
    bases: dict[str, list[str]] = {}
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    named = {entry.target.rpartition(":")[2] for rows in BUILTIN.values() for entry in rows.values()}
    return named | {name for name, own in bases.items() if any(base in bases for base in own)}


def test_no_built_in_is_asked_for_by_its_name() -> None:
    found = {(file, name) for file, tree in modules().items() for name in names_compared(tree) if name in NAMES}
    assert not sorted(one for one in found - COMPARED.keys() if not one[0].startswith(FOREIGN))


def test_no_class_is_asked_for_that_has_siblings() -> None:
    known = (siblings() | {"Curriculum"}) - BASES
    assert {"Pairs", "TRPO", "RatedAnswers", "PoolKind"} <= known
    found = {(file, name) for file, tree in modules().items() for name in classes_asked_for(tree) if name in known}
    assert not sorted(found - ASKED.keys())


def test_both_are_found() -> None:
    tree = ast.parse(
        'if kind in ("dpo", "kto") and isinstance(one, Pairs | int): pass\nmatch name:\n case "pool": pass'
    )
    assert {*names_compared(tree)} == {"dpo", "kto", "pool"} and "Pairs" in {*classes_asked_for(tree)}
