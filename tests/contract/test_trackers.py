"""What trackers get: held against what the real libraries have stored."""

import io
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.logs.console import Console
from lmgym.logs.records import read_records
from lmgym.logs.sinks import Row, Sink, answer_rows, by_stage, code_block, identity
from lmgym.logs.writer import Writer
from tests import runs

STAGES = [{"name": "warm", "algorithm": "supervised", "steps": 1}, {"name": "rl", "steps": 4}]
SHORT: dict[str, Any] = {"stages": STAGES, "steps": None, "algorithm": {"name": "grpo", "group_size": 2}}
SHORT |= {"evaluation": {"every": 2, "examples": 4, "split": "validation", "final_split": "test"}}
SHORT |= {"checkpoint": {"every": 2, "keep": 9}, "prompts_per_step": 2}


def train(stage: int, step: int, **metrics: object) -> dict[str, Any]:
    return {"kind": "train", "stage": stage, "step": step, **metrics}


class Notebook(Sink):
    """A sink that remembers, and fails when it is told to."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any], start: int):
        super().__init__(folder, recipe, start)
        self.seen: list[tuple[Any, ...]] = []
        self.broken = self.closed = False

    def write(self, scalars: dict[str, float], step: int) -> None:
        if self.broken:
            raise ConnectionError("the tracker is away\nand more")
        self.seen.append((step, {**scalars}))
        scalars.clear()  # they are its own

    def answers(self, name: str, rows: Sequence[Row], step: int) -> None:
        self.seen.append((step, name, rows))

    def finish(self, results: dict[str, float], plot: Path, step: int) -> None:
        self.seen.append((step, results, plot.name))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> list[Notebook]:
    """All sinks called notebook that were opened."""
    opened: list[Notebook] = []

    def make(folder: Path, recipe: Mapping[str, Any], start: int) -> Notebook:
        opened.append(Notebook(folder, recipe, start))
        return opened[-1]

    monkeypatch.setitem(registry._registered["sink"], "notebook", make)
    return opened


def test_sinks_get_scalars_keyed_by_kind_over_steps_of_all_stages(tmp_path: Path, books: list[Notebook]) -> None:
    with Writer(tmp_path) as writer:  # the first two steps, before a resume
        for step in range(2):
            writer.metrics(train(0, step, reward=0.5))
    with Writer(tmp_path, sinks=["notebook"]) as writer:
        writer.metrics(train(0, 2, reward=np.float32(0.5), kl=math.nan, note="text", flag=True, seconds=1))
        writer.metrics({"kind": "evaluation", "stage": 1, "step": 0, "split": "test", "final_answer": 0.25})
        writer.metrics(train(1, 4, reward=1.0))
    assert books[0].seen == [
        (2, {"train/reward": 0.5, "train/seconds": 1}),
        (3, {"evaluation/test/final_answer": 0.25}),
        (7, {"train/reward": 1.0}),
    ]
    assert books[0].start == 2 and books[0].closed


def test_what_a_sink_does_to_its_numbers_is_its_own(
    tmp_path: Path, books: list[Notebook], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._registered["sink"], "other", registry.get("sink", "notebook"))
    with Writer(tmp_path, sinks=["notebook", "other"]) as writer:
        writer.metrics(train(0, 0, reward=0.5))
    assert [book.seen for book in books] == [[(0, {"train/reward": 0.5})]] * 2


def test_a_sink_that_fails_is_dropped_with_one_warning(tmp_path: Path, books: list[Notebook]) -> None:
    screen = io.StringIO()
    with Writer(tmp_path, sinks=["notebook"], console=Console(screen)) as writer:
        books[0].broken = True
        for step in range(3):
            writer.metrics(train(0, step, reward=0.5))
    assert screen.getvalue().count("warning: notebook failed") == 1
    assert "the tracker is away" in screen.getvalue() and "and more" not in screen.getvalue()
    assert len(list(read_records(tmp_path / "metrics.jsonl"))) == 3


def test_unknown_and_missing_sinks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LmgymError, match="unknown sink 'tensorbord'; did you mean 'tensorboard'"):
        Writer(tmp_path, sinks=["tensorbord"])
    monkeypatch.setitem(sys.modules, "wandb", None)  # how Python itself marks a module as absent
    with pytest.raises(LmgymError, match=r"sink 'wandb' is not installed .*pip install 'lmgym\[track\]'"):
        Writer(tmp_path, sinks=["wandb"])
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(LmgymError, match=r"sink 'trackio' is not installed .*pip install 'lmgym\[trackio\]'"):
        Writer(tmp_path, sinks=["trackio"])


def test_what_a_tracker_knows_a_folder_by_is_made_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "wandb_id.txt"
    path.touch()  # as a full disk or a kill leaves it
    made = identity(path, "")
    assert len(made) == 16 and identity(path, "") == made == path.read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["wandb_id.txt"]


def test_answers_are_rows_and_messages_become_text() -> None:
    turns = [{"text": "3"}, {"text": "four"}]
    prompt = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1 2"}]
    record = {"prompt": prompt, "turns": turns, "references": [], "score": 0.5, "reward_components": {"words": 2.0}}
    assert answer_rows([record]) == [
        {
            "prompt": "system: Count.\n\nuser: 1 2",
            "answer": "3\n\nfour",
            "reference": "",
            "score": 0.5,
            "reward/words": 2.0,
        }
    ]
    assert code_block("#### 7\n") == "    #### 7" and code_block("") == "    "
    assert by_stage({"stages": [{"name": "rl", "steps": 2}]}) == {"stages": {"rl": {"steps": 2}}}


def test_what_a_resumed_run_repeats_is_sent_once(tmp_path: Path, books: list[Notebook]) -> None:
    """The run is resumed from its checkpoint after 2 of 4 steps of the last stage, and goes on to 5."""
    folder = runs.run(tmp_path / "run", logs={"samples": 2, "sinks": ["notebook"]}, **SHORT)
    cut_back(folder, "stage-1-step-000002")
    longer = SHORT | {"stages": [STAGES[0], STAGES[1] | {"steps": 5}]}
    runs.run(folder, logs={"samples": 2, "sinks": ["notebook"]}, **longer)
    assert (books[0].start, books[1].start) == (0, 3)
    train_step = [(5, "train/reward"), (5, "train")]
    evaluations = [(6, f"evaluation/{split}{end}") for split in ("validation", "test") for end in ("/reward", "")]
    assert [(step, name_of(what)) for step, what, *_ in books[1].seen] == [
        *train_step,
        *evaluations,
        (6, "after/reward"),
    ]
    assert books[1].recipe == yaml.safe_load((folder / "recipe.yaml").read_text())


def name_of(what: str | dict[str, float]) -> str:
    """What a sink was told: the name of the answers, or the name of the reward among the numbers."""
    return what if isinstance(what, str) else next(name for name in reversed(what) if name.endswith("/reward"))


def cut_back(folder: Path, checkpoint: str) -> None:
    """Take a finished run back to a checkpoint, as if it had been killed before the next one."""
    for path in (folder / "checkpoints").iterdir():
        if path.name > checkpoint:
            shutil.rmtree(path)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with TensorBoard's sink that was killed after 4 steps of its last stage, and resumed after 2."""
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("tracked") / "run"
    for _ in range(2):
        runs.run(folder, logs={"samples": 2, "sinks": ["tensorboard"]}, **SHORT)
        cut_back(folder, "stage-1-step-000002")
    return folder


@pytest.mark.slow
@pytest.mark.picture
def test_tensorboard_reads_the_whole_run_without_doubles(tracked: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked / "tensorboard"), size_guidance={"tensors": 0, "images": 0}).Reload()
    records = list(read_records(tracked / "metrics.jsonl"))
    rewards = [record["reward"] for record in records if record["kind"] == "train" and record["stage"] == 1]
    scalars = events.Scalars("train/reward")
    assert [event.step for event in scalars] == [1, 2, 3, 4]
    assert np.allclose([event.value for event in scalars], rewards)  # TensorBoard stores fp32
    assert [event.step for event in events.Scalars("evaluation/test/reward")] == [1, 5]

    def text(name: str, place: int) -> str:
        proto: bytes = events.Tensors(f"{name}/text_summary")[place].tensor_proto.string_val[0]
        return proto.decode()

    recipe = "\n".join(line[4:] for line in text("recipe", 0).splitlines())
    assert yaml.safe_load(recipe) == yaml.safe_load((tracked / "recipe.yaml").read_text())
    assert [event.step for event in events.Tensors("answers/train/text_summary")] == [1, 2, 3, 4]
    rollouts = [one for one in read_records(tracked / "rollouts.jsonl") if one["kind"] == "evaluation"]
    assert code_block(rollouts[-1]["prompt"]) in text("answers/evaluation/test", -1)
    assert code_block(rollouts[-1]["turns"][0]["text"]) in text("answers/evaluation/test", -1)
    summary = json.loads((tracked / "summary.json").read_text())
    assert f"after/reward: {summary['after']['results']['reward']['mean']:.6g}" in text("summary", -1)
    image = events.Images("plot")[-1]
    assert (image.step, image.width, image.height) == (5, 1200, 600)


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run: LevelDB's log format, behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7]) if left >= 7 else (0, 0, 0)
        if kind == 0:  # the rest of a block is empty
            at += left
            continue
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the end of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


@pytest.mark.slow
@pytest.mark.picture
@pytest.mark.processes
def test_an_offline_run_of_wandb_has_recipe_answers_and_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "run"
    for _ in range(2):
        runs.run(folder, logs={"samples": 2, "sinks": ["wandb"]}, **SHORT)
        cut_back(folder, "stage-1-step-000002")
    rows: list[tuple[str, int]] = []
    summary: dict[str, Any] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                assert record.run.run_id == (folder / "wandb_id.txt").read_text()
                config = {update.key: json.loads(update.value_json) for update in record.run.config.update}
            if record.HasField("history"):
                names = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                rows += [(name, int(names["step"])) for name in ("train/reward", "plot/_type") if name in names]
                rows += [
                    (name, int(names["step"])) for name in names if name.startswith("answers/") and "_type" in name
                ]
            if record.HasField("summary"):
                summary |= {item.key: json.loads(item.value_json) for item in record.summary.update if item.key}
    assert config["stages"]["rl"]["algorithm"]["group_size"] == 2
    assert [step for name, step in rows if name == "train/reward"] == [1, 2, 3, 4]
    assert [step for name, step in rows if name == "answers/train/_type"] == [1, 2, 3, 4]
    assert [step for name, step in rows if name == "answers/evaluation/test/_type"] == [1, 5]
    assert [step for name, step in rows if name == "plot/_type"] == [5]
    results = json.loads((folder / "summary.json").read_text())["after"]["results"]
    assert summary["after/reward"] == results["reward"]["mean"]
    tables = [json.loads(path.read_text()) for path in folder.rglob("*.table.json")]
    assert all(table["columns"][:4] == ["prompt", "answer", "reference", "score"] for table in tables) and tables


TRACKED = """
import json, sys
from pathlib import Path
from tests import runs
from tests.contract.test_trackers import SHORT, cut_back
from trackio.sqlite_storage import SQLiteStorage
folder = Path(sys.argv[1])
for _ in range(2):
    runs.run(folder, logs={"samples": 2, "sinks": ["trackio"]}, **SHORT)
    cut_back(folder, "stage-1-step-000002")
(name,) = SQLiteStorage.get_runs("lmgym")
print(json.dumps([name, SQLiteStorage.get_logs("lmgym", name), SQLiteStorage.get_run_config("lmgym", name)]))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_trackio_has_the_whole_run_without_doubles(tmp_path: Path) -> None:
    """The library itself, on this machine only; in a process of its own, since its folder is fixed by its import."""
    pytest.importorskip("trackio")
    command = [sys.executable, "-c", TRACKED, str(tmp_path / "run")]
    offline = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=runs.ROOT, env=os.environ | offline)
    assert done.returncode == 0, done.stderr
    name, logs, config = json.loads([line for line in done.stdout.splitlines() if line.startswith("[")][-1])
    assert name.startswith("run-") and name == (tmp_path / "run" / "trackio_name.txt").read_text()
    assert config["stages"]["rl"]["algorithm"]["group_size"] == 2
    steps = {
        key: sorted(log["step"] for log in logs if key in log) for key in ("train/reward", "answers/train", "plot")
    }
    assert steps == {"train/reward": [1, 2, 3, 4], "answers/train": [1, 2, 3, 4], "plot": [5]}
    (table,) = [log["answers/evaluation/test"] for log in logs if "answers/evaluation/test" in log and log["step"] == 5]
    assert table["_type"] == "trackio.table" and table["_value"][0]["prompt"].endswith("Answer:")
