"""Every command, in a terminal of its own (a pty), with words of runs, recipes, plug-ins, models and environments that
try to steer it. Nothing reaches the terminal but words, and the colours and movements that lmgym itself writes."""

import base64
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmgym.cli.main import COMMANDS
from lmgym.config.yaml import write_yaml
from lmgym.core.errors import LmgymError, warn
from lmgym.core.visible import CONTROL, escaped, harmless, is_hidden, visible, visible_lines
from lmgym.logs.formatting import json_text
from lmgym.models.builtin import builtin_model, byte_tokenizer
from tests import runs
from tests.compat.rl4lms_configurations import on_policy
from tests.viewer.sample_runs import sample_run

# The clipboard, the title, a colour, the screen, C1's CSI, text turned around, a zero-width space, a tag.
HOSTILE = "\x1b]52;c;aGFja2Vk\x07\x1b]0;hacked\x1b\\\x1b[35;46m\x1b[2J\x9b2J\u202egnp\u2066\u200b\U000e0041\rfine"
SIGNS = "␛]52;c;aGFja2Vk␇"
OWN = re.compile(r"\x1b\[(?:[0-9;]*m|[0-9]*[AHK]|2K|\?25[hl]|\?1049[hl])")  # what rich and the viewer write
COLOURS = "\x1b[35;46m", "\x1b[2J"  # of HOSTILE alone
NAME = "\x1b]0;hacked\x07\u202e"  # in a file's name
PLUGIN = """
import logging, sys, warnings
from lmgym import Example, register
from lmgym.envs.base import Step
HOSTILE = {hostile!r}

@register("task", "hostile")
def hostile(split):
    return [Example(id=f"{{HOSTILE}}/{{n}}", prompt=[{{"role": "system", "content": HOSTILE}},
            {{"role": "user", "content": f"{{HOSTILE}} {{n}}"}}], references=(HOSTILE,)) for n in range(8)]

@register("reward", "loud")
def loud(texts, examples):
    print(HOSTILE)
    print(HOSTILE, file=sys.stderr)
    warnings.warn(HOSTILE)
    logging.getLogger("plugin").warning(HOSTILE)
    return [float(len(text) % 2) for text in texts]

@register("env", "hostile_game")
class Game:
    def reset(self, example, seed):
        self.fails = seed % 5 == 0
        return example.prompt

    def step(self, text, stop):
        if self.fails:
            raise RuntimeError(HOSTILE)
        return Step(reward=float(len(text) % 2), terminated=True, info={{"note": 1.0}})

for thing in (hostile, loud, Game):
    thing.__doc__ = HOSTILE
"""
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception(" + json.dumps(HOSTILE) + ") }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)
DRIVER = """
import base64, fcntl, json, os, pty, select, struct, sys, termios, time
import lmgym.experiments.compare, lmgym.training.dry_run, lmgym.training.loop
from lmgym.cli.main import main
for line in sys.stdin:
    arguments, keys = json.loads(line)
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm-256color"
        try:
            status = main(arguments)
        except SystemExit as error:
            status = error.code
        sys.stdout.flush()
        os._exit(status)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    said, end, heard = b"", time.monotonic() + 60, 0
    while time.monotonic() < end:
        if keys and keys[0][0].encode() in said[heard:]:
            heard = len(said)
            os.write(terminal, keys.pop(0)[1].encode())
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                piece = os.read(terminal, 65536)
            except OSError:
                piece = b""
            if not piece:
                break
            said += piece
    else:
        os.kill(child, 9)
    os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([status, base64.b64encode(said).decode()]), flush=True)
"""


class Terminals:
    """Runs commands, each in a terminal of its own, forked from a process that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-c", DRIVER]
        self.driver = subprocess.Popen(command, cwd=runs.ROOT, stdin=-1, stdout=-1, text=True)

    def run(self, *arguments: object, keys: list[tuple[str, str]] | None = None) -> tuple[int, str]:
        """The exit status, and all that reached the terminal. Each of `keys` is a text to wait for, and what to type
        then."""
        assert self.driver.stdin is not None and self.driver.stdout is not None
        print(json.dumps([[str(one) for one in arguments], keys or []]), file=self.driver.stdin, flush=True)
        status, said = json.loads(self.driver.stdout.readline())
        return status, base64.b64decode(said).decode()


@pytest.fixture(scope="module")
def terminals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminals]:
    made = Terminals(tmp_path_factory.mktemp("hostile"))
    yield made
    assert made.driver.stdin is not None
    made.driver.stdin.close()
    made.driver.wait()


@pytest.fixture(scope="module")
def places(terminals: Terminals) -> dict[str, Path]:
    """A recipe of hostile parts, its run, a run whose records are hostile, and a configuration of RL4LMs."""
    folder = terminals.folder
    (folder / "hostile.py").write_text(PLUGIN.format(hostile=HOSTILE))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    architecture = {**runs.ARCHITECTURE, "max_position_embeddings": 512}
    builtin_model("builtin:tiny", byte_tokenizer(), architecture, 0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    stage = {"name": HOSTILE, "steps": 2, "env": {"name": "hostile_game"}}
    recipe = folder / f"recipe{NAME}.yaml"
    tree = runs.tiny(
        plugins=[str(folder / "hostile.py")], policy={"model": str(folder / "model"), "device": "cpu"},
        task={"name": "hostile"}, rewards={"loud": 1.0, "exact_match": 0}, stages=[stage], steps=None,
        evaluation={"every": 1, "examples": 4},
        checkpoint={"every": 2}, prompts_per_step=4, out=str(folder / f"run{NAME}"),
    )  # fmt: skip
    recipe.write_text(yaml.safe_dump(tree))
    sample = sample_run(folder / f"sample{NAME}", steps=3, texts=[HOSTILE, "42"])
    lines = [json.loads(line) for line in (sample / "metrics.jsonl").read_text().splitlines()]
    lines = [line | {"stage_name": HOSTILE, HOSTILE: 1.0, f"reward/{HOSTILE}": 0.0} for line in lines]
    (sample / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    converted = folder / f"ppo{NAME}.yml"
    foreign = on_policy()
    foreign["datapool"]["args"]["prompt"] = HOSTILE
    converted.write_text(yaml.safe_dump(foreign))
    return {"recipe": recipe, "run": folder / f"run{NAME}", "sample": sample, "rl4lms": converted, "folder": folder}


@pytest.fixture(scope="module")
def trained(terminals: Terminals, places: dict[str, Path]) -> tuple[int, str]:
    """What training has said; the other commands are about its run."""
    found = terminals.run("train", places["recipe"])
    shutil.copy(places["run"] / "recipe.yaml", places["sample"])  # the doctor wants one that is complete
    return found


def raw(said: str) -> list[str]:
    """What steers a terminal in an output, apart from what lmgym writes itself."""
    found = [colour for colour in COLOURS if colour in said]
    return found + [one for one in OWN.sub("", said) if is_hidden(one) and one not in "\n\r\t"]


COMMAND_LINES: dict[str, list[tuple[int, str]]] = {  # the exit status, and the words, separated by a bar
    "train": [(0, "{run}|stages.0.steps=3"), (1, "{recipe}|seed=x{hostile}")],
    "eval": [(0, "{run}"), (0, "{run}|--json")],
    "compare": [(0, "{run}|{run}|--metric|exact_match"), (1, "{run}|{folder}/none{name}")],
    "generate": [(0, "{run}|--prompt|{hostile}|--verbose"), (0, "{run}|--prompt|{hostile}|--json")],
    "doctor": [(0, "{sample}"), (0, "{sample}|--json"), (0, "{run}")],
    "what-if": [(0, "{run}"), (1, "{run}|--stage|no{hostile}"), (1, "{run}|{hostile}=1")],
    "serve": [(1, "{run}|--ignored|{hostile}"), (1, "{run}|--port|-1")],
    "why": [(0, "{run}"), (1, "{sample}"), (1, "{run}|--stage|no{hostile}"), (1, "{run}|--example|no{hostile}")],
    "bisect": [(1, "{sample}"), (0, "{sample}|{run}"), (1, "{sample}|--metric|no{hostile}")],
    "plot": [(0, "{sample}|--metric|{hostile}|--out|{folder}/plot{name}.png"), (1, "{sample}|--metric|no{hostile}")],
    "view": [(0, "{sample}|--html|{folder}/page{name}.html")],
    "check": [(1, "{recipe}"), (0, "{run}|--memory")],
    "audit": [(0, "{recipe}|--examples|4"), (1, "{run}|--stage|no{hostile}"), (1, "no{hostile}|--task|hostile")],
    "export": [(0, "{run}|--to|{folder}/exported{name}")],
    "convert": [(0, "rl4lms|{rl4lms}")],
    "list": [(0, "--plugin|{folder}/hostile.py"), (0, "task|--json|--plugin|{folder}/hostile.py")],
    "init": [(0, "{folder}/project{name}")],
    "new": [(1, "{folder}/new{name}.yaml|--yes|data={folder}/none{name}"), (1, "{folder}/new.yaml|{hostile}=1")],
    "completion": [(2, "{hostile}")],
    "recipes": [(0, ""), (1, "{hostile}")],
    "schema": [(0, "--plugin|{folder}/hostile.py"), (1, "--plugin|{hostile}")],
}


def test_every_command_is_driven() -> None:
    assert COMMAND_LINES.keys() == COMMANDS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_no_words_steer_the_terminal(
    command: str, terminals: Terminals, places: dict[str, Path], trained: tuple[int, str]
) -> None:
    texts = {name: str(path) for name, path in places.items()} | {"hostile": HOSTILE, "name": NAME}
    outputs = [(0, *trained)] if command == "train" else []
    for expected, line in COMMAND_LINES[command]:
        words = [word.format(**texts) for word in line.split("|") if word]
        outputs.append((expected, *terminals.run(command, *words)))
    for expected, status, said in outputs:
        assert status == expected and "Traceback" not in said, said
        assert raw(said) == [], said
    everything = "".join(said for *_, said in outputs)
    assert any(sign in everything for sign in ("␛]52", "␛]0;", "\\u001b]52", "\\x1b]52")), (
        everything
    )  # they came so far


@pytest.mark.slow
def test_the_viewer_in_a_terminal_shows_hostile_words(terminals: Terminals, places: dict[str, Path]) -> None:
    """Screen after screen: curves, a metric, a step, a group, an answer with its tokens, and a complaint."""
    keys = [("q: end", "/reward\r"), ("reward", "Gl"), ("step 2", "l"), ("answers", "l"), ("group 0", "l"),
            ("colour:", "c"), ("colour:", "jj"), ("q: end", "h"), ("group 0", "/\x1bq"), ("q: end", "q")]  # fmt: skip
    status, said = terminals.run("view", places["sample"], "--text", keys=keys)
    assert status == 0, said
    assert raw(said) == [] and SIGNS in said and "colour: " in said


@pytest.mark.slow
def test_the_pages_server_says_its_address_and_ends_by_ctrl_c(terminals: Terminals, places: dict[str, Path]) -> None:
    """The first line of `lmgym view` in a terminal: its address with the token, and nothing else steers it."""
    status, said = terminals.run("view", places["sample"], "--port", 0, keys=[("read the runs\r\n", "\x03")])
    assert status == 0, said
    assert re.match(
        r"http://127\.0\.0\.1:\d+/\S+\r\nCtrl-C ends it; whoever has this address can read the runs\r\n", said
    )
    assert raw(said) == [] and "Traceback" not in said


@pytest.mark.slow
def test_what_training_says_is_harmless(trained: tuple[int, str]) -> None:
    """The stage's name, prompts and answers, the template's complaint, what a plug-in prints, warns and logs."""
    status, said = trained
    assert status == 0, said
    assert "the chat template refuses the messages as they are" in said and f"stage 1/1: {SIGNS}" in said
    assert said.count(SIGNS) > 6 and "sample answers" in said


@pytest.mark.slow
def test_an_exception_that_nobody_foresaw_is_printed_harmlessly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmgym.cli import main

    def fail(given: Any) -> int:
        raise RuntimeError(HOSTILE)

    monkeypatch.setattr(main, "_run", fail)
    with pytest.raises(SystemExit) as ended:
        main.main(["list"])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and raw(said) == [] and f"RuntimeError: {SIGNS}" in said


def test_errors_and_warnings_are_harmless_in_python_too() -> None:
    assert raw(str(LmgymError(f"{HOSTILE}\nsecond line"))) == []
    assert str(LmgymError("one\ntwo")) == "one\ntwo"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn(HOSTILE)
    assert raw(str(caught[0].message)) == [] and caught[0].filename == __file__


def test_all_warnings_go_through_one_function() -> None:
    sources = {path: path.read_text() for path in (Path(runs.ROOT) / "lmgym").rglob("*.py")}
    assert [path.name for path, text in sources.items() if "warnings.warn(" in text] == ["errors.py"]


def test_every_character_is_a_sign_or_itself() -> None:
    every = "".join(filter(is_hidden, map(chr, range(0x110000))))
    assert len(every) > 2000 and all(visible(one) != one for one in every)
    for shown in (visible(every), visible_lines(every).replace("\n", ""), escaped(every).replace("\n", "")):
        assert not [one for one in shown if is_hidden(one)]
    assert not [one for one in harmless(f"a{every}b") if is_hidden(one) and one not in "\n\t"]
    assert visible("é🙂 中 \u200d") == "é🙂 中 \u200d" and len(CONTROL) == 5
    assert harmless("\r 50 %|##\r") == "\r 50 %|##\r" and harmless("a\rb\n\tc") == "a␍b\n\tc"


def test_data_comes_back_equal() -> None:
    every = "".join(chr(code) for code in range(0x3100) if code) + "\ufeff\U000e0041é🙂"
    tree = {"text": every, HOSTILE: [every[::-1], "plain é", 1.5]}
    assert raw(json_text(tree)) == [] and json.loads(json_text(tree)) == tree
    assert json.loads(json_text({"half": "\ud800"})) == {"half": "\ud800"}
    assert raw(write_yaml(tree)) == [] and yaml.safe_load(write_yaml(tree)) == tree
