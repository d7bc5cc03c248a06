"""Printing may fail, and foreign messages may be anything: neither ends a run or a command with a traceback."""

import io
import os
import select
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from lmgym.core import registry
from lmgym.core.errors import LONGEST_MESSAGE, LmgymError, describe, place, represent, shortened
from lmgym.core.output import SurvivingOutput, surviving_output
from lmgym.envs.vector import EnvFailure, InProcess
from lmgym.logs.console import Console
from lmgym.rewards.base import call_reward
from lmgym.rewards.building import build_rewards
from lmgym.tasks.base import load_task
from lmgym.training.resuming import contents
from lmgym.types import Episode, Example, Turn
from tests import runs

EXAMPLE = Example("a/0", "2+2=", ("4",))


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Shapeless:
    def __repr__(self) -> str:
        raise RuntimeError("no shape")


ODD = {
    "mute": (Mute(), "Mute"),
    "long": (ValueError("x" * 10**6), "ValueError: xxx"),
    "lines": (ValueError("first\nsecond"), "ValueError: first"),
    "half": (ValueError("half \ud800"), "ValueError: half"),
    "exit": (SystemExit(3), "SystemExit: 3"),
    "cancelled": (GeneratorExit(), "GeneratorExit"),
}


def odd(kind: str) -> None:
    raise ODD[kind][0]


@pytest.mark.parametrize("kind", ODD)
def test_what_a_users_code_raises_becomes_one_short_sentence(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a reward, a task, an environment."""
    monkeypatch.setitem(registry._registered["reward"], "odd", lambda texts, examples: odd(kind))
    monkeypatch.setitem(registry._registered["task"], "odd", lambda split: odd(kind))
    episode = Episode(EXAMPLE, group=0, index=0, turns=[Turn([1], [2], text="4")])
    with pytest.raises(LmgymError) as of_reward:
        call_reward(build_rewards({"odd": 1.0})[0], [episode])
    with pytest.raises(LmgymError) as of_task:
        load_task("odd", "train")

    class Env:
        def reset(self, example: Example, seed: int) -> str:
            odd(kind)
            return ""

        step = None

    failure = InProcess(Env).begin([(0, EXAMPLE, 0)])[0]  # type: ignore[arg-type]
    assert isinstance(failure, EnvFailure)
    for sentence in (str(of_reward.value), str(of_task.value), failure.message):
        assert ODD[kind][1] in sentence and f"{__file__}:" in sentence
        assert len(sentence) <= LONGEST_MESSAGE and "\n" not in sentence


def test_two_plugins_of_one_file_name_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test_output_twins.py").write_text("")
    registry.load_plugin(str(tmp_path / "a" / "test_output_twins.py"))
    registry.load_plugin(str(tmp_path / "b" / ".." / "a" / "test_output_twins.py"))  # the same file
    with pytest.raises(LmgymError, match=r"plugins: .*b/test_output_twins\.py and .*a/test_output_twins\.py, which"):
        registry.load_plugin(str(tmp_path / "b" / "test_output_twins.py"))


@pytest.mark.parametrize("plugin", ["file", "module"])
def test_a_plugin_that_was_edited_since_is_refused(
    plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its old code would run under the new one's digest."""
    name = f"test_output_edited_{plugin}"
    path = tmp_path / f"{name}.py"
    path.write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    named = str(path) if plugin == "file" else name
    module = registry.PLUGIN_FILE + name if plugin == "file" else name
    registry.load_plugin(named)
    registry.load_plugin(named)
    assert [*contents.code_of([sys.modules[module]])] == [f"code of {path.name if plugin == 'file' else name}"]
    path.write_text("VALUE = 1 + 1\n")  # of another length: within one second Python tells its caches apart by that
    for ask in (lambda: registry.load_plugin(named), lambda: contents.code_of([sys.modules[module]])):
        with pytest.raises(LmgymError, match=rf"{name}\.py has changed since this process loaded it, .* again"):
            ask()
    del sys.modules[module]  # as in a new process
    registry.load_plugin(named)
    assert sys.modules[module].VALUE == 2


def test_pythons_own_files_are_known_behind_links(tmp_path: Path) -> None:
    (tmp_path / "cellar").symlink_to(sysconfig.get_path("stdlib"))
    (tmp_path / "own.py").write_text("")
    assert contents._is_own(str(tmp_path / "own.py"))
    assert not contents._is_own(str(tmp_path / "cellar" / "json" / "__init__.py"))


@pytest.mark.parametrize("where", ["prompt", "message", "reference"])
def test_half_a_surrogate_pair_in_a_task_is_refused(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    half = "half \ud800"
    prompt = {"prompt": half, "message": [{"role": "user", "content": half}]}.get(where, "2+2=")
    example = Example("a/0", prompt, (half,) if where == "reference" else ())
    monkeypatch.setitem(registry._registered["task"], "odd", lambda split: [example])
    with pytest.raises(LmgymError, match=r"of 'a/0' holds half of a surrogate pair at character 6"):
        load_task("odd", "train")


@pytest.mark.parametrize("where", ["prompt", "opening", "message", "continuation", "demonstration"])
def test_half_a_surrogate_pair_in_an_environment_costs_its_episode(where: str) -> None:
    from lmgym.envs.base import Step

    half = "half \ud800"

    class Env:
        def reset(self, example: Example, seed: int) -> object:
            messages = [{"role": "user", "content": half}]
            return {"prompt": half, "opening": messages}.get(where, "go")

        def step(self, text: str, stop: str) -> Step:
            messages = [] if where == "continuation" else [{"role": "user", "content": half}]
            return Step(messages, continuation=half if where == "continuation" else None)

        def demonstrate(self) -> str:
            return half

    envs = InProcess(Env)  # type: ignore[arg-type]
    answer: object = envs.begin([(0, EXAMPLE, 0)])[0]
    if where == "demonstration":
        answer = envs.demonstrate([0])[0]
    elif where in ("message", "continuation"):
        answer = envs.step([(0, "", "eos")])[0]
    assert isinstance(answer, EnvFailure) and "half of a surrogate pair at character 6" in answer.message


def test_a_long_sentence_keeps_its_beginning_and_its_end() -> None:
    sentence = str(LmgymError("a.yaml:3: " + "x" * 10**6 + "; write 3"))
    assert len(sentence) == LONGEST_MESSAGE
    assert sentence.startswith("a.yaml:3: xxx") and sentence.endswith("xxx; write 3") and "..." in sentence
    assert shortened("0123456789", 10) == "0123456789" and shortened("0123456789x", 10) == "01234...9x"
    assert describe(Mute()) == "Mute" and represent(Shapeless()) == "a Shapeless" and len(represent("x" * 10**6)) < 300
    assert place(ValueError()) == ""


def test_a_plugin_that_raises_is_named_with_its_line(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    for text, reason in (("import json\njson.loads('{')", "JSONDecodeError"), ("\nx = (", "SyntaxError")):
        plugin.write_text(text)
        with pytest.raises(LmgymError, match=rf"plugins: .*: its import raised {reason}: .* at .*plugin\.py:2$"):
            registry.load_plugin(str(plugin))


def full() -> io.TextIOWrapper:
    return open("/dev/full", "w")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full, a disk that is always full")
def test_a_console_that_cannot_print_says_so_once_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with full() as file, Console(file) as console:
        console.stage("rl", index=0, total=1)
        console.warn("careful")
        console.step({"reward": 0.5, "seconds": 1.0}, step=0, steps=1)
    assert capsys.readouterr().err == (
        "lmgym: standard output cannot be written (No space left on device); the run goes on, and its folder has all "
        "records\n"
    )


def test_what_is_being_done_stands_in_the_live_line_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal it is shown and wiped again; a file gets it only as a line of its own."""
    monkeypatch.setenv("TERM", "xterm")
    read, write = os.openpty()
    with open(write, "w") as terminal, Console(terminal) as console:
        console.doing("loading the model")
        console.say("proof: fine")
        shown = ""
        while "fine\r\n" not in shown:  # on a busy machine a terminal hands it on piece by piece
            shown += os.read(read, 10_000).decode()
    os.close(read)
    before, wiped, after = shown.rpartition("\x1b[1A\x1b[2K")
    assert "loading the model ..." in before and wiped and after.strip() == "proof: fine"
    file = io.StringIO()
    with Console(file) as console:
        console.doing("loading the model", line=True)
        console.doing("answering 200 prompts")
    assert file.getvalue() == "loading the model ...\n"


def test_output_survives_a_closed_pipe_and_half_a_surrogate_pair() -> None:
    read, write = os.pipe()
    with open(write, "w", encoding="utf-8") as stream:
        output = SurvivingOutput(stream)
        print("fine \ud800", file=output)
        assert os.read(read, 100) == b"fine \\ud800\n"
        os.close(read)
        print("lost", file=output)
        assert isinstance(output.lost, BrokenPipeError)
    captured = io.StringIO()
    print("kept", file=SurvivingOutput(captured))
    assert captured.getvalue() == "kept\n"
    print("nowhere", file=SurvivingOutput(None))


def test_standard_streams_come_back() -> None:
    before = sys.stdout, sys.stderr
    with surviving_output() as output:
        assert sys.stdout is output
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.slow
@pytest.mark.parametrize("to", ["full", "pipe"])
def test_a_run_whose_output_cannot_be_written_ends_saved(
    to: str,
    tmp_path: Path,
    shell: runs.Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither standard output nor standard error can be."""
    recipe = runs.write(tmp_path / "recipe.yaml", steps=2, evaluation={"every": 0, "examples": 4})
    output = Path("/dev/full") if to == "full" else tmp_path / "pipe"
    monkeypatch.setattr(shell, "output", output)
    if to == "pipe":  # as in `lmgym train recipe.yaml | head -1`
        os.mkfifo(output)
        reader = os.open(output, os.O_RDONLY | os.O_NONBLOCK)
        shell.start("train", recipe, f"out={tmp_path / 'run'}")
        select.select([reader], [], [])
        os.close(reader)
    else:
        shell.start("train", recipe, f"out={tmp_path / 'run'}")
    assert shell.wait() == 0
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
    assert [record["kind"] for record in runs.records(tmp_path / "run" / "metrics.jsonl")].count("train") == 2


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("generate quickstart", "there is no prompt"),
        ("new {folder}/a.yaml", "the input ended before the last question"),
    ],
)
def test_a_closed_standard_input_is_an_empty_one(command: str, said: str, tmp_path: Path) -> None:
    line = f"{sys.executable} -m lmgym {command.format(folder=tmp_path)} <&-"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=runs.ROOT)
    assert "Traceback" not in done.stderr and said in done.stderr, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full, a disk that is always full")
def test_a_command_that_exists_to_print_fails_where_it_cannot() -> None:
    for redirect, status in (("> /dev/full", 1), ("| true", 0), (">&-", 0)):
        command = f"{sys.executable} -m lmgym list reward {redirect}; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=runs.ROOT)
        assert done.stdout.strip() == str(status)
        assert done.stderr == ("lmgym: standard output cannot be written: No space left on device\n" if status else "")
