"""The tutorials and the loop of the README run, in short: their files are written, their commands run in order."""

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmgym.cli.main import main
from lmgym.core import registry
from tests import runs

TUTORIALS = runs.ROOT / "docs" / "tutorials"
FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^    ((?:lmgym|python) .*)$", re.MULTILINE)
TINY = [
    "policy.model=builtin:tiny",
    "policy.lora_targets=[q_proj,v_proj]",
    "steps=1",
    "evaluation.examples=2",
    "threads=1",
]
# What is added to `lmgym train` and `lmgym check` of a tutorial, so that it takes seconds.
SHORT = {
    "own_data": [*TINY, "policy.tokenizer=builtin:bytes", "task.prompts=text", "sampling.max_new_tokens=4"],
    "own_environment": ["stages.random_play.steps=1", "stages.rl.steps=1", "evaluation.examples=4", "threads=1"],
    "own_agent": [*TINY, "prompts_per_step=1", "algorithm.group_size=2"],
    "own_algorithm": ["steps=1", "runs.seeds=[0,1]", "evaluation.examples=4", "threads=1"],
    "from_trl": ["steps=1", "prompts_per_step=2", "evaluation.examples=2", "sampling.max_new_tokens=4", "threads=1"],
    "publish": ["stages.warm_start.steps=2", "stages.rl.steps=1", "evaluation.examples=4", "threads=1"],
}


@pytest.fixture(autouse=True)
def forget_plugins() -> Iterator[None]:
    """What a tutorial registers or imports lives for one test."""
    yield
    own = ("my_", "lmgym_plugin_")  # modules; lmgym's own stay, with what they have registered
    for things in registry._registered.values():
        for name in [name for name, thing in things.items() if thing.__module__.startswith(own)]:
            del things[name]
    for module in [name for name in sys.modules if name.startswith(own)]:
        del sys.modules[module]


def shortened(words: list[str], tutorial: str) -> list[str]:
    """A command's words with what makes it short; where a key is named twice, the last one counts."""
    return words + SHORT[tutorial] if words[0] in ("train", "check") else words


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("page", sorted(TUTORIALS.glob("*.md")), ids=lambda page: page.stem)
def test_a_tutorial_runs_in_short(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, content in FILE.findall(text):
        (tmp_path / name).write_text(content, encoding="utf-8")
    commands = [command for command in COMMAND.findall(text) if "--push" not in command]  # the Hub is not there
    assert len(commands) >= 3
    for command in commands:
        program, *words = shlex.split(command, comments=True)
        capsys.readouterr()
        if program == "python":
            runpy.run_path(words[0], run_name="__main__")
            continue
        into = words[words.index(">") + 1] if ">" in words else None
        words = words[: words.index(">")] if into else words
        status = main(shortened(words, page.stem))
        assert status == 0 or words[0] == "check", command  # check complains of a model that knows nothing
        if into:
            (tmp_path / into).write_text(capsys.readouterr().out, encoding="utf-8")


def test_a_tutorial_says_how_long_it_took() -> None:
    for page in TUTORIALS.glob("*.md"):
        said = re.search(r"\*\*Time: (\d+) minutes?\*\*", page.read_text(encoding="utf-8"))
        assert said and int(said[1]) <= 15, page.name


@pytest.mark.slow
def test_the_loop_of_the_readme_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In fourteen lines beside its imports: the share of even numbers rises."""
    text = (runs.ROOT / "README.md").read_text(encoding="utf-8")
    (loop,) = re.findall(r"<!-- run: loop.py -->\n```python\n(.*?)```", text, re.DOTALL)
    lines = [line for line in loop.splitlines() if line and not line.startswith("from ")]
    assert len(lines) <= 14
    (tmp_path / "loop.py").write_text(loop.replace("range(30)", "range(10)"), encoding="utf-8")
    runpy.run_path(str(tmp_path / "loop.py"))
    shares = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert shares[0] < 0.7 < 0.9 < shares[-1]


def test_a_snippet_that_stands_on_several_pages_is_the_same_on_each() -> None:
    snippet = re.compile(r"<!-- (?:snippet|file): (\S+\.(?:py|yaml))[^>]*-->\n```\w+\n(.*?)```", re.DOTALL)
    found: dict[str, set[str]] = {}
    for page in (runs.ROOT / "README.md", runs.ROOT / "docs" / "extending.md", TUTORIALS / "own_algorithm.md"):
        for name, text in snippet.findall(page.read_text(encoding="utf-8")):
            found.setdefault(name, set()).add(text)
    assert len(found["my_algorithm.py"]) == 1 and not [name for name, texts in found.items() if len(texts) > 1]
