"""Outside of lmgym/compat/ and the command line nothing is made for RL4LMs, LlamaGym, NanoRL or LLM_RL.

Their names may occur as values of presets, `compat` and `style`, and where a source is cited:
in a docstring behind "Source:" (to the end of the paragraph), in brackets or in `backticks`; in a comment that begins
with "Source:".
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lmgym"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in ("compat", "cli")]
SYSTEM = re.compile(r"rl4lms|llamagym|nanorl|llm_rl", re.IGNORECASE)
COMPAT = re.compile(r"lmgym(\.| import (.*, )?)compat\b")
CITATION = re.compile(
    r"Sources?( of [^.:]*)?:\s.*?(\n\s*\n|\Z)"  # to the end of the paragraph
    r"|\([^()]*\)"
    r"|`[^`]*`"
    r"|\A\w+: "  # "rl4lms: ...", the meaning of a value, below a field
    r"|>>> [^\n]*",
    re.DOTALL,
)


def offenders(code: str) -> list[str]:
    """Lines of a module that name one of the systems where nothing may, or import from compat."""
    tree = ast.parse(code)
    found = [*_identifiers_and_comments(code), *_imports(tree), *_strings(tree)]
    return [f"{line}: {text}" for line, text in sorted(found)]


def _identifiers_and_comments(code: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        cites = token.type == tokenize.COMMENT and re.match(r"#\s*Sources?:", token.string)
        if token.type in (tokenize.NAME, tokenize.COMMENT) and SYSTEM.search(token.string) and not cites:
            yield token.start[0], token.string


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and re.search(COMPAT, ast.unparse(node)):
            yield node.lineno, ast.unparse(node)


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    values = {id(constant) for node in ast.walk(tree) for constant in _values(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in values:
            continue
        text = CITATION.sub(_blank, node.value) if id(node) in docstrings else node.value
        for number, line in enumerate(text.split("\n"), start=node.lineno):
            if SYSTEM.search(line) or "lmgym.compat" in line:
                yield number, line


def _blank(citation: re.Match[str]) -> str:
    return "\n" * citation[0].count("\n")


def _values(node: ast.AST) -> Iterator[ast.AST]:
    """Values of `presets`, `compat` and `style` where they are listed, looked up or compared."""
    match node:
        case (
            ast.AnnAssign(target=ast.Name(id=name), annotation=inside)
            | ast.Assign(targets=[ast.Name(id=name)], value=inside)
            | ast.Compare(left=(ast.Name(id=name) | ast.Attribute(attr=name)), comparators=[inside])
            | ast.Subscript(value=ast.Attribute(attr=name), slice=inside)
        ) if name in ("compat", "style", "Style", "presets"):
            yield from ast.walk(inside)
    match node:
        case ast.AnnAssign(target=ast.Name(id="presets"), value=ast.Dict(keys=keys)):
            yield from (key for key in keys if key is not None)


def test_nothing_outside_of_compat_is_there_for_an_older_system() -> None:
    assert len(FILES) > 100
    found = [f"{path.relative_to(PACKAGE.parent)}:{line}" for path in FILES for line in offenders(path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import lmgym.compat.rl4lms",
        "from lmgym import compat",
        "from lmgym.compat import llamagym",
        "def split_of_rl4lms(): ...",
        "name = 'rl4lms'",
        "name = f'as in RL4LMs {1}'",
        "hook = 'lmgym.compat.other:write'",
        "x = 1  # as NanoRL does",
        "x = 1  # LLM_RL clamps here. Source: LLM_RL",
        'def f():\n    """As in RL4LMs."""',
        "presets: dict = {'mine': {'style': 'rl4lms'}}",
    ],
)
def test_an_offender_is_found(code: str) -> None:
    assert offenders(code)


@pytest.mark.parametrize(
    "code",
    [
        "presets: dict = {'rl4lms': {'gamma': 0.99}, **PPO.presets['rl4lms']}",
        "class A:\n    compat: Literal['none', 'rl4lms'] = 'none'\n    'rl4lms: without a mask.'",
        "if self.compat == 'rl4lms': ...",
        "Style = Literal['lmgym', 'llm_rl']",
        "x = 1  # Source: LLM_RL clamps there",
        'def f():\n    """The mean. Sources: Lin 2004;\n    RL4LMs, which has the first."""',
        'def f():\n    """The preset `nanorl` (of NanoRL)."""',
    ],
)
def test_a_citation_and_a_value_are_none(code: str) -> None:
    assert offenders(code) == []
