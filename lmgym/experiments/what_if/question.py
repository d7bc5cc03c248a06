"""What is asked of a run: its recipe, the changed one, and whether its recorded answers say anything about it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmgym.config.build import load_config, plain
from lmgym.config.schema import Config, Stage
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest

JUDGED = ("algorithm", "rewards", "optimizer")  # sections of a stage that come after the answers
SAMPLED = ("sampling", "prompts_per_step", "max_draws")  # sections that decide which answers there are
BOUND = ("answers", "makes", "rival", "given_share", "greedy", "mask", "teacher", "served_teacher", "hint")
"""Requirements of an algorithm that decide which answers there are, or which other models stood beside the policy."""


@dataclass(frozen=True)
class Question:
    """A run, one of its stages, its recipe as it was and as it is asked about, and each `change` in words.

    Example: ask(Path("runs/a"), ["optimizer.warmup=20"]).changes -> ["optimizer.warmup: 5 -> 20"]"""

    folder: Path
    stage: int
    real: Config
    changed: Config
    changes: list[str]

    @property
    def name(self) -> str:
        """The stage's."""
        return self.real.stages[self.stage].name


def ask(folder: Path, overrides: Sequence[str], stage: str | None = None, samples: bool = False) -> Question:
    """The question that `key=value` overrides make of a run's recipe, about its last stage or the one of this name.
    With `samples` new answers will be sampled, so that more keys may change.

    Raises LmgymError for a key that the recorded answers say nothing about."""
    if not (folder / "recipe.yaml").is_file():
        raise LmgymError(f"{folder} has no recipe.yaml, so it is no run; name the folder of a run")
    real = load_config(folder / "recipe.yaml")
    names = [one.name for one in real.stages]
    if stage is not None and stage not in names:
        raise LmgymError(f"{folder} has no stage '{stage}'; {suggest(stage, names)}")
    index = len(names) - 1 if stage is None else names.index(stage)
    size = real.stages[index].algorithm.group_size
    changed = load_config(folder / "recipe.yaml", [_with_group_size(one, size) for one in overrides])
    if [one.name for one in changed.stages] != names:
        raise LmgymError("a stage keeps its name in a question about it; leave stages.NAME.name as it is")
    check_elsewhere(real, changed, index)
    one, other = real.stages[index], changed.stages[index]
    check_stage(one, other, samples)
    trees = [plain(one), plain(other)]
    if trees[0]["algorithm"]["name"] != trees[1]["algorithm"]["name"]:  # what only one of the two has is no change
        shared = trees[0]["algorithm"].keys() & trees[1]["algorithm"].keys()
        for tree in trees:
            tree["algorithm"] = {key: value for key, value in tree["algorithm"].items() if key in shared}
    changes = list(_differences(*trees))
    return Question(folder, index, real, changed, changes)


def check_elsewhere(real: Config, changed: Config, index: int) -> None:
    """Raise LmgymError for a change outside of the stage with this number."""
    trees = [plain(replace(one, stages=[])) for one in (real, changed)]
    for number, (one, other) in enumerate(zip(real.stages, changed.stages, strict=True)):
        if number != index:
            trees[0][one.name], trees[1][one.name] = plain(one), plain(other)
    for change in _differences(*trees):
        raise LmgymError(
            f"{change}: a question is about the algorithm, the rewards or the optimizer of stage "
            f"'{real.stages[index].name}' (--stage names another stage); for other keys train anew: "
            "lmgym train RUN/recipe.yaml out=ANOTHER KEY=VALUE"
        )


def check_stage(one: Stage, other: Stage, samples: bool) -> None:
    """Raise LmgymError for a change of a stage that the answers of its steps, or the models beside them, say nothing
    about."""
    trees = [{key: value for key, value in plain(stage).items() if key not in JUDGED} for stage in (one, other)]
    for change in _differences(trees[0], trees[1]):
        key = change.split(":")[0].split(".")[0]
        if key in SAMPLED and samples:
            continue
        remedy = "; --try N samples new ones" if key in SAMPLED else ""
        raise LmgymError(
            f"{change}: this decides which answers there are, and the recorded ones are of the recipe as it was, so "
            f"they say nothing about it{remedy}"
        )
    before, now = one.algorithm, other.algorithm
    name = registry.name_of("algorithm", type(now))
    if now.group_size != before.group_size and not samples:
        raise LmgymError(
            f"algorithm.group_size: {before.group_size} -> {now.group_size}: a group has {before.group_size} recorded "
            "answers, and they say nothing about another number of them; --try N samples new ones"
        )
    for requirement in BOUND:
        was, wants = getattr(before.requirements, requirement), getattr(now.requirements, requirement)
        if was != wants:
            raise LmgymError(
                f"algorithm: {name} as it is asked about needs {requirement} = {wants!r}, and the run had {was!r}; the "
                "record says nothing about it, so train anew"
            )
    if now.restriction != before.restriction:
        raise LmgymError(f"algorithm: {name} samples from other tokens than the run did; train anew")


def _with_group_size(override: str, size: int) -> str:
    """An override that names an algorithm alone, with the number of answers that the run's groups have.

    Example: _with_group_size("algorithm=dr_grpo", 8) -> "algorithm={name: dr_grpo, group_size: 8}"""
    found = re.fullmatch(r"((?:stages\.[^.=]+\.)?algorithm)=(\w+)", override)
    return f"{found[1]}={{name: {found[2]}, group_size: {size}}}" if found and size > 1 else override


def _differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """What differs between two plain trees, each as "key: before -> now"."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            yield from _differences(one.get(key), other.get(key), f"{where}.{key}".lstrip("."))
    elif one != other:
        before, now = ("not set" if value is None else str(value) for value in (one, other))
        yield f"{where}: {before} -> {now}"
