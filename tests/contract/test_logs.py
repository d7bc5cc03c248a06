"""The run folder's records survive kills, full disks and odd numbers; the console shows what it was given."""

import contextlib
import errno
import io
import json
import math
import os
import signal
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import rich.console
from hypothesis import given
from hypothesis import strategies as some
from rich.cells import cell_len

from lmgym.core.errors import LmgymError
from lmgym.core.output import rich_settings
from lmgym.core.visible import visible
from lmgym.inference.base import Sampling
from lmgym.logs.console import Console, Pace, Sample
from lmgym.logs.formatting import duration, shorten, status, table_lines
from lmgym.logs.plots.figures import LONGEST_TEXT, mean_and_interval, plot_text, running_mean
from lmgym.logs.plots.training import Records, panels, training_plot
from lmgym.logs.records import StepClock, read_records
from lmgym.logs.rewind import rewind
from lmgym.logs.writer import Writer
from lmgym.stats.intervals import Interval, share_interval
from tests import runs
from tests.failing_calls import FailingCalls

ROOT = Path(__file__).parents[2]


def train(stage: int, step: int, **metrics: object) -> dict:
    return {"kind": "train", "stage": stage, "step": step, **metrics}


def evaluation(stage: int, step: int, **metrics: object) -> dict:
    return {"kind": "evaluation", "stage": stage, "step": step, **metrics}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


# ---------------------------------------------------------------- writer


def test_numbers_come_back_exactly_and_what_json_lacks_is_null(tmp_path: Path) -> None:
    record = train(0, 0, reward=0.1 + 0.2, tiny=5e-324, kl=math.nan, ratio=-math.inf, count=2**60, ok=True)
    record |= {
        "numpy": np.float32(0.5),
        "array": np.array([1.0, np.nan]),
        "whole": np.int64(3),
        "nothing": None,
    }
    with Writer(tmp_path / "new" / "run") as writer:
        writer.metrics(record)
    (back,) = lines(tmp_path / "new" / "run" / "metrics.jsonl")
    expected = record | {"kl": None, "ratio": None, "numpy": 0.5, "array": [1.0, None], "whole": 3}
    assert back == expected and back["ok"] is True


@given(some.text(alphabet=some.characters(codec=None)))
def test_any_text_makes_one_line_and_comes_back(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("run")
    with Writer(folder) as writer:
        writer.rollouts([train(0, 0, text=text, turns=[{"text": text, "logprobs": [-0.5, math.nan]}])] * 2)
    data = (folder / "rollouts.jsonl").read_bytes()
    assert data.count(b"\n") == 2 and data.decode("utf-8")
    assert list(read_records(folder / "rollouts.jsonl"))[1]["turns"] == [{"text": text, "logprobs": [-0.5, None]}]


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"stage": 0, "step": 0}, "kind None"),
        ({"kind": "test", "stage": 0, "step": 0}, "kind 'test'"),
        ({"kind": "train", "step": 0}, "stage None"),
        ({"kind": "train", "stage": 0, "step": 1.0}, "step 1.0"),
        ({"kind": "train", "stage": 0, "step": 0, "metric": {1, 2}}, "'metric' is a set"),
        ({"kind": "train", "stage": 0, "step": 0, "a": {"b": object()}}, "'a.b' is a object"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_by_name(tmp_path: Path, record: dict, sentence: str) -> None:
    with Writer(tmp_path) as writer, pytest.raises(LmgymError, match=sentence):
        writer.metrics(record)
    assert lines(tmp_path / "metrics.jsonl") == []


CHILD = """
import sys
from pathlib import Path
from lmgym.logs.writer import Writer
with Writer(Path(sys.argv[1])) as writer:
    for step in range(10**9):
        writer.metrics({"kind": "train", "stage": 0, "step": step, "reward": step / 7})
        writer.rollouts([{"kind": "train", "stage": 0, "step": step, "text": "x" * 1000}])
        print(step, flush=True)
"""


@pytest.mark.processes
def test_a_killed_process_loses_nothing_that_it_wrote(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None
        for _ in range(200):
            step = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        steps = [record["step"] for record in read_records(tmp_path / name)]
        assert steps[: step + 1] == list(range(step + 1))


def test_a_torn_last_line_is_cut_off_when_the_folder_is_opened(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.metrics(train(0, 0))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "train", "sta')
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [0]
    with Writer(tmp_path) as writer:
        writer.metrics(train(0, 1))
    assert [record["step"] for record in lines(tmp_path / "metrics.jsonl")] == [0, 1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full, a disk that is always full")
def test_a_full_disk_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with Writer(tmp_path) as writer, pytest.raises(LmgymError) as caught:
        writer.metrics(train(0, 0))
    assert "metrics.jsonl: the disk is full" in str(caught.value)
    assert "free some space, then resume with `lmgym train RUN_FOLDER`" in str(caught.value)


LIMITED = """
import resource, signal, sys
from pathlib import Path
from lmgym.core.errors import LmgymError
from lmgym.logs.writer import Writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
with Writer(Path(sys.argv[1])) as writer:
    try:
        for step in range(100):
            writer.metrics({"kind": "train", "stage": 0, "step": step})
    except LmgymError as error:
        print(step, error)
"""


@pytest.mark.processes
def test_a_line_that_does_not_fit_leaves_no_torn_half(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout
    step, sentence = said.split(" ", 1)
    assert "metrics.jsonl: cannot be written" in sentence
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    assert [record["step"] for record in lines(tmp_path / "metrics.jsonl")] == list(range(int(step)))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(LmgymError, match=r"run: cannot be written"):
        Writer(tmp_path / "run")


# ---------------------------------------------------------------- rewind


def loop(writer: Writer, stages: list[int], begin: tuple[int, int], crash: tuple[int, int] | None) -> None:
    """What the training loop writes: step s, then the evaluation after s + 1 updates; one at the start."""
    for stage in range(begin[0], len(stages)):
        first = begin[1] if stage == begin[0] else 0
        if first == 0:
            writer.metrics(evaluation(stage, 0))
        for step in range(first, stages[stage]):
            if (stage, step) == crash:
                return
            writer.metrics(train(stage, step))
            writer.rollouts([train(stage, step, text="a"), train(stage, step, text="b")])
            if (step + 1) % 2 == 0:
                writer.metrics(evaluation(stage, step + 1))


@given(some.data())
def test_a_rewound_and_continued_run_writes_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: some.DataObject
) -> None:
    stages = data.draw(some.lists(some.integers(1, 6), min_size=1, max_size=3))
    places = [(stage, step) for stage, steps in enumerate(stages) for step in range(steps)]
    crash = data.draw(some.sampled_from(places))
    checkpoint = data.draw(some.sampled_from([place for place in places if place <= crash]))
    whole, resumed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("resumed")
    with Writer(whole) as writer:
        loop(writer, stages, (0, 0), None)
    with Writer(resumed) as writer:
        loop(writer, stages, (0, 0), crash)
    with open(resumed / "rollouts.jsonl", "ab") as file:
        file.write(b'{"torn')
    rewind(resumed, *checkpoint)
    with Writer(resumed) as writer:
        loop(writer, stages, checkpoint, None)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(path.name for path in resumed.iterdir()) == ["metrics.jsonl", "rollouts.jsonl", "timings.jsonl"]


def test_rewind_keeps_the_evaluation_of_the_checkpoint_and_drops_its_train_step(tmp_path: Path) -> None:
    records = [
        train(0, 9),
        evaluation(1, 0),
        train(1, 0),
        train(1, 1),
        evaluation(1, 2),
        train(1, 2),
        train(2, 0),
    ]
    with Writer(tmp_path) as writer:
        for record in records:
            writer.metrics(record)
    rewind(tmp_path, stage=1, step=2)
    assert lines(tmp_path / "metrics.jsonl") == records[:5]
    rewind(tmp_path, stage=1, step=0)  # a stage's first evaluation comes after its first checkpoint
    assert lines(tmp_path / "metrics.jsonl") == records[:1]
    rewind(tmp_path, stage=0, step=9)
    assert lines(tmp_path / "metrics.jsonl") == []
    rewind(tmp_path / "empty", stage=0, step=0)  # nothing there, nothing to do


def written(folder: Path, steps: int) -> dict[str, int]:
    """The records of a run of so many steps; returns their numbers after the second one."""
    counts = {}
    with Writer(folder) as writer:
        writer.metrics(evaluation(0, 0))
        for step in range(steps):
            writer.metrics(train(0, step))
            writer.rollouts([train(0, step, text="a"), train(0, step, text="b")])
            writer.timings(train(0, step, sampling=0.5))
            if step == 1:
                counts = dict(writer.counts)
    return counts


def test_what_the_checkpoint_counts_is_there_or_is_named(tmp_path: Path) -> None:
    counted = written(tmp_path, steps=4)
    assert counted == {"metrics.jsonl": 3, "rollouts.jsonl": 4, "timings.jsonl": 2}
    assert rewind(tmp_path, 0, 2, counted) == []
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"step": 1' not in line))
    (tmp_path / "rollouts.jsonl").unlink()
    assert rewind(tmp_path, 0, 2, counted) == [
        "metrics.jsonl lacks 1 of the 3 records that the checkpoint counts (train records of stage 1 step 2); the run "
        "goes on without them",
        "rollouts.jsonl lacks 4 of the 4 records that the checkpoint counts; the run goes on without them",
    ]
    # A folder of an older version does not count, but its steps are known.
    gap = "metrics.jsonl lacks train records of stage 1 step 2; the run goes on without them"
    assert rewind(tmp_path, 0, 2) == [gap]
    assert rewind(tmp_path / "nowhere", 0, 0, {}) == []


def test_a_rewind_that_cuts_nothing_writes_nothing(tmp_path: Path) -> None:
    """Files of gigabytes stay; but one that has another name is parted from it: the run would write into both."""
    counted = written(tmp_path, steps=2)
    paths = [tmp_path / name for name in counted]
    before = {path: (path.read_bytes(), path.stat().st_ino) for path in paths}
    assert rewind(tmp_path, 0, 2, counted) == [] and rewind(tmp_path, 0, 9) != []
    assert {path: (path.read_bytes(), path.stat().st_ino) for path in paths} == before
    metrics, rollouts, _ = paths
    (tmp_path / "beside").hardlink_to(metrics)
    rollouts.rename(tmp_path / "elsewhere")
    rollouts.symlink_to(tmp_path / "elsewhere")
    assert rewind(tmp_path, 0, 2, counted) == []
    assert metrics.stat().st_nlink == 1 and not rollouts.is_symlink()
    assert {path: path.read_bytes() for path in paths} == {path: text for path, (text, _) in before.items()}


def test_every_call_of_a_rewind_fails_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are as they were or as they should be; whatever fails, the reason is a sentence."""
    counted, fault = written(tmp_path, steps=4), FailingCalls(errno.EIO)
    before = {name: (tmp_path / name).read_bytes() for name in counted}

    for name in ("fsync", "replace", "unlink"):
        monkeypatch.setattr(os, name, fault.of(getattr(os, name)))
    for n in range(1, 100):
        for name, text in before.items():
            (tmp_path / name).write_bytes(text)
        fault.left, already = n, fault.failed
        try:
            rewind(tmp_path, 0, 2, counted)
        except LmgymError as error:
            assert "jsonl: cannot be written (Input/output error)" in str(error)
        for name, count in counted.items():
            text = (tmp_path / name).read_bytes()
            assert text == before[name] or text.count(b"\n") == count
        if fault.failed == already:
            break
        fault.left = 0
        assert rewind(tmp_path, 0, 2, counted) == []
    assert n > 4


@pytest.mark.parametrize("torn", [b"\x00" * 4096, b'{"kind": "tra\n', b'{"kind": "tra', b"[" * 100_000 + b"\n"])
def test_what_comes_after_the_counted_records_is_not_read(tmp_path: Path, torn: bytes) -> None:
    """A power failure may leave anything where nothing was flushed."""
    counted = written(tmp_path, steps=2)
    whole = {name: (tmp_path / name).read_bytes() for name in counted}
    for name in counted:
        with open(tmp_path / name, "ab") as file:
            file.write(torn + json.dumps(train(0, 2)).encode() + b"\n")
    assert rewind(tmp_path, 0, 2, counted) == []
    assert {name: (tmp_path / name).read_bytes() for name in counted} == whole


@pytest.mark.parametrize("damage", ["{broken", "[]", '{"kind": "train", "stage": 0}', "\x00\x00"])
def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_lost(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "metrics.jsonl"
    text = json.dumps(train(0, 0)) + "\n" + damage + "\n" + json.dumps(train(0, 1)) + "\n"
    path.write_text(text)
    with pytest.raises(LmgymError, match=r"metrics\.jsonl line 2"):
        rewind(tmp_path, stage=0, step=1)
    assert path.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_step_clock_counts_what_the_stages_ran() -> None:
    clock = StepClock()
    records = [
        train(0, 0),
        train(0, 1),
        evaluation(0, 2),
        evaluation(1, 0),
        train(1, 0),
        evaluation(1, 1),
        train(3, 5),
    ]
    assert [clock.position(record) for record in records] == [0, 1, 2, 2, 2, 3, 8]
    assert [clock.start(stage) for stage in range(5)] == [0, 2, 3, 3, 9]


# ---------------------------------------------------------------- console

RECORD = {"reward": 0.53, "reward/final_answer": 0.5, "tokens_per_second/rollout": 12345.0, "seconds": 0.9}
HOSTILE = "[red]x[/red] [/] \x1b[2J\x1b]0;title\x07 \x9b31m \u202eabc \ud800 :smile:\r\x00"


def test_the_line_says_step_reward_accuracy_speed_and_time() -> None:
    words = status(RECORD | {"truncated": 0.31}, 12, 200, 151.0, ("final_answer", 0.612))
    line = "step  13/200  reward 0.530  held-out accuracy 0.612  12.3k tokens/s  02:31 left"
    assert "  ".join(words) == f"{line}  truncated 31%" and len(line) <= 80
    assert status(RECORD, 12, 200, 151.0, ("reward", 0.6))[2] == "held-out reward 0.600"
    assert status(RECORD, 0, 9, None)[2:] == ["train accuracy 0.500", "12.3k tokens/s", "--:-- left"]
    supervised = {"loss/supervised": 1.5, "tokens_per_second/update": 2.5e6}
    assert status(supervised, 8, 9, 0.0) == ["step 9/9", "loss 1.500", "2.5M tokens/s", "00:00 left"]
    assert status({"reward": None, "seconds": math.nan}, 0, 9, math.nan) == [
        "step 1/9", "reward -", "- tokens/s", "--:-- left"
    ]  # fmt: skip


def test_time_left_forgets_the_first_step_and_forgives_a_slow_one() -> None:
    pace = Pace(recent=5)
    assert pace.left(10) is None
    pace.add(100.0)
    assert pace.left(10) is None
    for seconds in (1.0, 1.0, 50.0, 1.0, 1.0):
        pace.add(seconds)
    assert pace.left(10) == 10.0
    for _ in range(5):
        pace.add(2.0)  # the run became slower: recent steps count
    assert pace.left(10) == 20.0
    assert [duration(seconds) for seconds in (0.4, 59.6, 3599, 36000)] == [
        "00:00",
        "01:00",
        "59:59",
        "10:00:00",
    ]


def test_a_file_gets_the_first_the_last_and_a_line_every_ten_seconds() -> None:
    screen, now = io.StringIO(), [0.0]
    with Console(screen, clock=lambda: now[0]) as console:
        for stage in range(2):
            console.stage("rl", stage, 2)
            for step in range(30):
                now[0] += 1.0
                console.step(RECORD, step, 30)
    text = screen.getvalue()
    assert "\x1b" not in text and "\r" not in text
    steps = [line.split("/")[0] for line in text.splitlines() if line.startswith("step")]
    assert steps == 2 * ["step  1", "step 11", "step 21", "step 30"]
    assert "00:08 left" in text  # nine more steps of 0.9 s


def test_a_warning_is_printed_once_and_counted() -> None:
    screen = io.StringIO()
    with Console(screen) as console:
        for step in range(3):
            console.warn("31% of the completions were cut off [max_new_tokens]; raise it")
            console.step(RECORD, step, 3)
        console.warn("another")
    assert screen.getvalue().count("31% of the completions were cut off [max_new_tokens]; raise it\n") == 1
    assert screen.getvalue().count("1 warning\n") == 2 and screen.getvalue().count("another") == 1


def test_an_evaluation_prints_its_intervals_and_feeds_the_line() -> None:
    screen = io.StringIO()
    with Console(screen) as console:
        answer, words = Interval(0.609, 0.566, 0.651, 170), Interval(61.5, 60.0, 63.0, 512)
        console.evaluation(20, {"final_answer": answer, "words": words}, 512, "test")
        console.step(RECORD, 0, 1)
        console.evaluation(21, {}, 512)
        console.evaluation(22, {f"m{n}": words for n in range(9)}, 512)
    first, second, third = screen.getvalue().splitlines()
    assert "m5 61.500" in third and "m6" not in third and third.endswith("  and 3 more")
    assert first.endswith(": final_answer 0.609 [0.566, 0.651]  words 61.500 [60.000, 63.000]")
    assert "after 20 steps (512 prompts, test)" in first and "accuracy 0.609" in second


def test_an_evaluation_counts_the_prompts_that_no_reward_was_for_too(tmp_path: Path) -> None:
    screen = io.StringIO()
    adding = {"unit": "characters", "target": 6, "where": {"operation": "add"}}
    rewards = {"length": adding, "regex": {"pattern": "[0-9]"}}
    folder = runs.run(tmp_path / "run", Console(screen), rewards=rewards, steps=1)
    assert "evaluation after 0 steps (8 prompts, test): length " in screen.getvalue()
    assert json.loads((folder / "summary.json").read_text())["before"]["results"]["length"]["count"] < 8


def test_a_run_cannot_be_steered_by_a_reward_that_no_held_out_prompt_is_for(tmp_path: Path) -> None:
    metrics = {"words": {"where": {"operation": "none"}}}
    said = r"^evaluation\.keep_best is 'words', and this reward \(tasks, where\) is for none of the held-out prompts$"
    with pytest.raises(LmgymError, match=said):
        runs.run(tmp_path / "run", evaluation={"examples": 4, "keep_best": "words", "metrics": metrics}, steps=1)


def test_the_table_says_what_has_changed() -> None:
    screen = io.StringIO()
    rows = [
        ("final_answer", Interval(0.391, 0.349, 0.434, 512), Interval(0.840, 0.806, 0.869, 512)),
        ("format", Interval(0.977, 0.960, 0.987, 512), Interval(0.986, 0.972, 0.993, 512)),
        ("words", Interval(0.5, math.nan, math.nan, 512), Interval(0.9, 0.8, 1.0, 512)),
        ("truncated", Interval(0.391, 0.349, 0.434, 512), Interval(0.840, 0.806, 0.869, 512)),
        ("lexical", Interval(0.840, 0.806, 0.869, 512), Interval(0.391, 0.349, 0.434, 512)),
    ]
    Console(screen).before_after(rows, {"final_answer": 1, "format": 1, "truncated": -1})
    answer, form = (line.split() for line in screen.getvalue().splitlines()[4:6])
    assert answer == ["final_answer", "0.391", "[0.349,", "0.434]", "0.840", "[0.806,", "0.869]", "gain"]
    assert form[0] == "format" and form[-1] == "unclear"
    cut, lexical = (line.split() for line in screen.getvalue().splitlines()[7:9])
    assert (cut[0], cut[-1]) == ("truncated", "loss") and (lexical[0], lexical[-1]) == ("lexical", "lower")
    (unknown,) = (line.split() for line in screen.getvalue().splitlines() if "words" in line)
    assert unknown == ["words", "0.500", "[no", "interval]", "0.900", "[0.800,", "1.000]", "-"]
    assert "on 512 prompts" in screen.getvalue() and "95%" in screen.getvalue()


@pytest.mark.parametrize("columns", [50, 60, 80, None])
def test_no_table_loses_a_cell(columns: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name and no interval is broken over two lines, and no line is wider than the terminal. A file has no limit."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    cells = ["-0.125 [-0.142, -0.107]", "0.840 [0.806, 0.869]", "gain", "<0.001", "256, 256, 256"]
    headings = ("metric", "B - A", "before", "B", "p", "A higher, equal, B higher")
    names = ("reward", "final_answer/pass@16", "中文的名字")
    screen = io.StringIO()
    Console(screen).table("a table", headings, [(name, *cells) for name in names], bold=(1,))
    lines = screen.getvalue().splitlines()
    for cell in (*names, *cells):
        assert sum(cell in line for line in lines) == (1 if cell in names else 3), cell
    assert all(cell_len(line) <= (columns or 1000) for line in lines)
    if columns is None:
        assert all(any(heading in line for line in lines) for heading in headings)
        assert len({cell_len(line[: line.index("256,")]) for line in lines if "256," in line}) == 1


@given(
    some.lists(some.tuples(some.text(max_size=20), some.text(max_size=30)), min_size=1, max_size=4),
    some.integers(1, 90) | some.none(),
)
def test_table_lines_keep_every_cell(rows: list[tuple[str, str]], columns: int | None) -> None:
    head, lines = table_lines(("metric", "a long heading"), rows, columns)
    assert len(lines) == len(rows)
    for row, own in zip(rows, lines, strict=True):
        assert all(visible(cell).rstrip() in "\n".join(own) for cell in row)
    if head and columns:
        assert max(map(cell_len, [*head, *(line for own in lines for line in own)])) <= columns


def test_a_conversation_is_shown_whole_with_its_roles() -> None:
    screen = io.StringIO()
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5\n"}]
    later = [*talk, {"role": "user", "content": "Sure? " * 90 + "Really?"}, {"role": "assistant", "content": HOSTILE}]
    Console(screen).samples([Sample("2+2?", talk, later, "4", 1.0)])
    text = screen.getvalue()
    assert text.count("user: 2+2?") == 2 and text.count("assistant: 5⏎") == 2
    assert text.count("user: Sure?") == 1 and "Really?" in text and "assistant: " in text.split("Really?")[1]
    assert not set(text) & set("\x1b\x07\x9b\u202e\ud800\r\x00")


def test_model_text_is_shown_never_obeyed() -> None:
    screen = io.StringIO()
    console = Console(screen)
    console.samples([Sample(HOSTILE, HOSTILE, HOSTILE, HOSTILE, 1.0)])
    console.say(HOSTILE)
    console.warn(HOSTILE)
    console.stage(HOSTILE, 0, 1)
    console.before_after([(HOSTILE, share_interval([0, 1]), share_interval([0, 1]))])
    text = screen.getvalue()
    assert not set(text) & set("\x1b\x07\x9b\u202e\ud800\r\x00")
    assert text.count("[red]x[/red] [/] ␛[2J") >= 4 and ":smile:" in text


@given(some.text(alphabet=some.characters(codec=None)), some.sampled_from(["utf-8", "ascii", "latin-1"]))
def test_any_text_can_be_shown_on_any_terminal(text: str, encoding: str) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    with Console(screen) as console:
        console.samples([Sample(text, text, text, text, math.nan)])
        console.say(text)
        console.stage(text, 0, 1)
    screen.seek(0)
    controls = {chr(code) for code in range(32)} | {chr(code) for code in range(127, 160)}
    assert not set(screen.read()) & (controls - {"\n"})
    assert not set(visible(text)) & controls


def test_long_texts_keep_their_beginning_and_their_end() -> None:
    text = "First, 3 + 4 = 7. " + "And so on. " * 100 + "#### 7"
    assert len(shorten(text, 60)) == 60
    assert shorten(text, 60).startswith("First, 3 + 4 = 7.") and shorten(text, 60).endswith("#### 7")
    assert shorten("short", 60) == "short" and shorten("abc", 1) == "…"


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int, use) -> str:
    """Everything that reaches a real pseudo-terminal of this width."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    reader, terminal = os.openpty()
    with open(terminal, "w", encoding="utf-8") as file:
        use(file)
        file.flush()
        os.set_blocking(reader, False)
        data = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(reader, 4096):
                data += chunk
    os.close(reader)
    return data.decode()


def test_a_terminal_gets_one_line_that_is_drawn_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(file: io.TextIOBase) -> None:
        now = iter(range(100))
        with Console(file, clock=lambda: float(next(now))) as console:
            for step in range(10):
                console.step(RECORD, step, 10)

    text = on_a_terminal(monkeypatch, 80, use)
    assert text.count("step ") >= 10 and text.count("\n") == 1
    assert "step  1/10" in text and "step 10/10" in text and "\x1b[2K" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


def test_a_narrow_terminal_drops_whole_words_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    text = on_a_terminal(monkeypatch, 40, lambda file: Console(file).step(RECORD, 0, 1))
    assert "step 1/1  reward 0.530" in text and "train accuracy" not in text and text.count("\n") == 1


@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
def test_a_size_of_0_is_no_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As terminals within editors set it."""
    monkeypatch.setenv(name, "0")
    screen = io.StringIO()
    Console(screen).step(RECORD, 0, 1)
    drawn = on_a_terminal(monkeypatch, 80, lambda file: Console(file).step(RECORD, 0, 1))
    assert all("step 1/1  reward 0.530" in text for text in (screen.getvalue(), drawn))
    assert min(rich.console.Console(file=io.StringIO(), **rich_settings()).size) > 0


def test_warnings_stand_above_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(file: io.TextIOBase) -> None:
        with Console(file) as console:
            console.step(RECORD, 0, 10)
            console.warn("look out")

    text = on_a_terminal(monkeypatch, 80, use)
    assert text.index("look out") < text.rindex("step  1/10")
    assert text.count("\n") == 2


# ---------------------------------------------------------------- plots


def test_a_title_says_which_points_have_an_interval() -> None:
    assert mean_and_interval([True, True]) == "mean and 95% interval"
    assert mean_and_interval([True, False]) == "mean and 95% interval where there is one"
    assert mean_and_interval([False]) == mean_and_interval([]) == "mean (no interval)"


def write_run(path: Path, records: list[dict]) -> Path:
    with Writer(path) as writer:
        for record in records:
            writer.metrics(record)
    return path / "metrics.jsonl"


def made_up_run(evaluations: bool = True, nulls: bool = False, warm_start: int = 10) -> list[dict]:
    """Numbers from a generator, with the shape of a real run: a warm start, then RL."""
    random, records = np.random.default_rng(0), []
    for step in range(warm_start):
        records.append(train(0, step, stage_name="warm_start", **{"loss/supervised": 3 / (step + 1)}))
    for step in range(40):
        share = 0.4 + 0.01 * step
        if evaluations and step % 10 == 0:
            interval = share_interval([float(place < round(share * 512)) for place in range(512)])
            bounds = {
                "final_answer": interval.mean,
                "final_answer/low": interval.low,
                "final_answer/high": interval.high,
            }
            records.append(evaluation(1, step, stage_name="rl", split="test", count=512, **bounds))
        metrics = {"reward": share + 0.05 * random.normal(), "entropy": 1 - step / 50, "kl/old": 1e-4 * step}
        metrics |= {"length/mean": 20.0, "truncated": 0.1, "gradient_norm": random.random()}
        gone = dict.fromkeys(metrics) if nulls and step % 3 == 0 else {}
        records.append(train(1, step, stage_name="rl", **(metrics | gone)))
    return records


@pytest.mark.slow
@pytest.mark.parametrize(
    "records",
    [
        made_up_run(),
        made_up_run(evaluations=False, nulls=True, warm_start=0),
        [record for record in made_up_run() if record["stage"] == 0],
        [record for record in made_up_run() if record["kind"] == "evaluation"],
        [train(0, 0, reward=10**400, entropy="high"), train(0, 1, reward=2**70, entropy=None)],
        [
            train(0, 0, stage_name="$a_{b$ \x1b[0m", reward=1.0),
            evaluation(0, 1, split="_$x$", a=1.0, **{"a/low": None}),
        ],
    ],
    ids=[
        "two stages",
        "nulls and no evaluation",
        "supervised only",
        "evaluations only",
        "numbers beyond the floats",
        "one step, odd names",
    ],
)
def test_a_plot_is_drawn_of_whatever_there_is(tmp_path: Path, records: list[dict]) -> None:
    metrics = write_run(tmp_path, records)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = training_plot(metrics, tmp_path / "plots" / "training.png")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) == (1200, 600)


def test_a_very_long_name_is_shortened_in_a_picture() -> None:
    """It took 15 s to draw one of 50,000 letters."""
    assert plot_text("test/" + "x" * 50_000).startswith("test/xxx")
    assert len(plot_text("test/" + "x" * 50_000)) == LONGEST_TEXT


@pytest.mark.slow
def test_what_the_records_say_is_what_is_drawn(tmp_path: Path) -> None:
    """Taking a part away changes the picture; drawing the same twice does not."""
    full = made_up_run()
    variants = [
        full,
        full,
        [record for record in full if record["kind"] == "train"],
        [{name: value for name, value in record.items() if not name.endswith("/high")} for record in full],
        [record | {"stage_name": "other"} for record in full],
        [{name: value for name, value in record.items() if name != "entropy"} for record in full],
    ]
    pictures = []
    for number, records in enumerate(variants):
        metrics = write_run(tmp_path / str(number), records)
        pictures.append(training_plot(metrics, tmp_path / f"{number}.png").read_bytes())
    assert pictures[0] == pictures[1] and len(set(pictures)) == len(variants) - 1


@pytest.mark.slow
def test_the_tasks_own_metric_is_drawn_before_the_reward(tmp_path: Path) -> None:
    numbers = {"reward": 0.3, "reward/low": 0.2, "reward/high": 0.4, "a": 0.6, "a/low": 0.5, "a/high": 0.7}
    metrics = write_run(tmp_path, [evaluation(0, step, **numbers) for step in (0, 5)])
    names = {"default": None, "a": "a", "reward": "reward"}
    drawn = {name: training_plot(metrics, tmp_path / f"{name}.png", metric) for name, metric in names.items()}
    pictures = {name: path.read_bytes() for name, path in drawn.items()}
    assert pictures["default"] == pictures["a"] != pictures["reward"]


def two_stage_run(folder: Path) -> Records:
    """A warm start without reward, then RL whose ratio is 1; evaluated on the way, and on test before and after."""
    records = [train(0, step, stage_name="warm_start", gradient_norm=9.0 - step) for step in range(6)]
    for step in range(5):
        numbers = {"reward": 0.1 * step, "truncated": 0.0, "gradient_norm": 0.1, "kl/old": 0.0, "kl/coefficient": 0.05}
        records.append(train(1, step, stage_name="rl", **numbers))
    bounds = {"m/low": 0.1, "m/high": 0.9}
    points = [(0, 0, "validation"), (0, 3, "validation"), (1, 0, "validation"), (1, 5, "validation")]
    points += [(1, 0, "test"), (1, 5, "test")]
    records += [evaluation(stage, step, split=split, m=0.5, **bounds) for stage, step, split in points]
    return Records(write_run(folder, records), None)


def test_a_panel_shows_the_stages_that_it_has_data_of(tmp_path: Path) -> None:
    run = two_stage_run(tmp_path)
    above, below = panels(run)
    assert [(panel.title, panel.stages) for panel in above] == [
        ("Training reward", [1]),
        ("Held-out m, mean and 95% interval", [0, 1]),
    ]
    # No answer was truncated, and a ratio of 1 has no divergence: these panels would be a flat line.
    assert [(panel.title, panel.stages) for panel in below] == [("Gradient norm", [0, 1])]
    assert (run.extent([1]), run.extent([0]), run.extent([0, 1])) == ((6, 11), (0, 6), (0, 11))


def test_before_and_after_are_two_points_without_a_line(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    run = two_stage_run(tmp_path)
    axes = Figure().subplots()
    panels(run)[0][1].draw(run, axes)
    drawn = {bars.get_label(): bars.lines[0] for bars in axes.containers}
    assert {name: line.get_linestyle() for name, line in drawn.items()} == {"validation": "-", "test": "None"}
    assert drawn["test"].get_xdata().tolist() == [6.0, 11.0]
    assert all(bars.has_yerr for bars in axes.containers) and len(axes.containers) == 2


def test_a_divergence_is_drawn_and_the_coefficient_of_its_penalty_is_not(tmp_path: Path) -> None:
    numbers = {"kl/coefficient": 0.05, "kl/reference": 0.01, "kl/old": 1e-9, "truncated": 0.25}
    run = Records(write_run(tmp_path, [train(0, step, **numbers) for step in range(3)]), None)
    assert [panel.title for panel in panels(run)[1]] == ["Truncated answers", "KL from the reference"]


def test_moves_of_one_token_are_never_called_truncated(tmp_path: Path) -> None:
    screen = io.StringIO()
    one = {"steps": 1, "sampling": {"max_new_tokens": 1}, "rewards": {"length": {"target": 1}}}
    folder = runs.run(tmp_path / "run", Console(screen), **one)
    assert all("truncated" not in record for record in lines(folder / "metrics.jsonl"))
    assert "truncated" not in screen.getvalue() and "cut off" not in screen.getvalue()
    fixed = [
        Sampling(max_new_tokens=most, min_new_tokens=least).fixed_length for most, least in ((1, 0), (4, 4), (4, 3))
    ]
    assert fixed == [True, True, False]
    assert not Sampling(max_new_tokens=4, min_new_tokens=4, stop=("\n",)).fixed_length  # a stop string may end one


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match="there is no file"):
        training_plot(tmp_path / "metrics.jsonl", tmp_path / "a.png")
    with pytest.raises(LmgymError, match="nothing to draw"):
        training_plot(write_run(tmp_path, [train(0, 0, reward=None)]), tmp_path / "a.png")


def test_the_running_mean_is_centred_and_skips_gaps() -> None:
    values = np.array([0.0, 3.0, 6.0, np.nan, 1.0])
    assert running_mean(values, 3).tolist() == [1.5, 3.0, 4.5, 3.5, 1.0]
    assert running_mean(values, 1)[[0, 1, 2, 4]].tolist() == [0.0, 3.0, 6.0, 1.0]
    assert running_mean(np.array([2.0]), 5).tolist() == [2.0]


@given(
    some.lists(some.sampled_from([0.0, 1.0, 3.0, -2.5, 1e300, 1e-3, math.nan]), min_size=1, max_size=40), some.data()
)
def test_a_running_mean_is_that_of_each_window(values: list[float], data: some.DataObject) -> None:
    """To the rounding of its own sum: an outlier elsewhere moves nothing."""
    half = data.draw(some.integers(0, 12))
    for place, found in enumerate(running_mean(np.array(values), 2 * half + 1).tolist()):
        own = [one for one in values[max(0, place - half) : place + half + 1] if one == one]
        error = 2 * half * 2**-52 * math.fsum(map(abs, own))
        assert math.isnan(found) if not own else abs(found * len(own) - math.fsum(own)) <= error


def test_a_running_mean_of_a_long_run_is_there_at_once() -> None:
    """Its time does not grow with the window; two convolutions would take an hour."""
    found = running_mean(np.arange(4_000_000) % 2.0, 266_667)
    assert found[2_000_000] == pytest.approx(0.5, abs=1e-5) and len(found) == 4_000_000
