"""traces/: what a step has computed is written down exactly, changes nothing, and survives kills, limits and damage."""

import base64
import itertools
import json
import os
import struct
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lmgym.core.errors import LmgymError
from lmgym.logs.console import Console
from lmgym.logs.traces import files as trace_files
from lmgym.logs.traces.folder import TraceFolder, join, rewind_traces
from lmgym.logs.traces.trace import (
    TraceEpisode,
    TraceRow,
    TraceStep,
    TraceTurn,
    read_episode,
    read_step,
    shards,
    write_shard,
)
from lmgym.training.tracing import kept_groups, plain_example
from lmgym.types import Episode, Example
from tests import runs
from tests.contract.test_every_algorithm import policy_section
from tests.parity.test_resume import ALGORITHMS
from tests.ranks import NEAR, Group

SHORT: dict[str, Any] = {
    "steps": 2,
    "evaluation": {"every": 0, "examples": 2},
    "checkpoint": {"every": 0},
    "logs": {"samples": 0, "rollouts": "all", "traces": "all"},
}
TEXTS = st.text(max_size=8)  # half surrogate pairs included, as models write them
FINITE = st.floats(allow_nan=False, allow_infinity=False)


# ---------------------------------------------------------------- samples


def a_step(stage: int = 0, step: int = 0, count: int = 2, **changes: Any) -> TraceStep:
    columns = {"index": list(range(count)), "kept": [True] * count}
    names = {"stage_name": "rl", "algorithm": "grpo", "fields": {"group_size": count}}
    return TraceStep(**{"stage": stage, "step": step, "episodes": columns, **names, **changes})


def an_episode(index: int = 0, tokens: int = 3, rows: int = 1) -> TraceEpisode:
    actions = np.arange(1, tokens, dtype=np.int32)
    column = np.arange(len(actions), dtype=np.float32) + index / 3
    row = TraceRow(tokens=actions, actions=actions, turn=0 * actions, columns={"advantages": column})
    return TraceEpisode(
        index=index,
        group=0,
        example={"id": "a/0", "prompt": "2+2=", "references": ["4"], "meta": {}},
        messages=[{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}],
        score=1.0,
        reward_components={"right": 1.0},
        baseline=None,
        terminated=True,
        error="",
        version=0,
        selected=True,
        turns=[TraceTurn(text="4", reward=1.0)],
        rows=[row] * rows,
    )


def assert_same(one: Any, other: Any) -> None:
    """Equal in value and type; arrays bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()
    elif isinstance(one, list):
        assert len(one) == len(other)
        for own, another in zip(one, other, strict=True):
            assert_same(own, another)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif hasattr(one, "__dataclass_fields__"):
        assert_same(vars(one), vars(other))
    else:
        assert one == other


@st.composite
def rows_of_tokens(draw: st.DrawFn) -> TraceRow:
    actions = draw(st.integers(0, 5))
    numbers = arrays(np.float32, actions, elements=st.floats(width=32))  # NaN and infinity too
    integers = arrays(np.int32, actions)
    source = draw(st.none() | arrays(np.int32, st.integers(1, 4)))
    columns = draw(st.dictionaries(TEXTS, numbers, max_size=3))
    tokens = draw(arrays(np.int32, st.integers(0, 6)))
    return TraceRow(tokens=tokens, actions=draw(integers), turn=draw(integers), columns=columns, source=source)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
TURNS = st.builds(
    TraceTurn,
    text=TEXTS,
    given=TEXTS,
    continuation=st.none() | TEXTS,
    stop=TEXTS,
    reward=FINITE,
    restart=st.booleans(),
    min_new_tokens=st.integers(0, 9),
)
EPISODES = st.builds(
    TraceEpisode,
    index=st.integers(0, 10**7),
    group=st.integers(0, 9),
    example=st.dictionaries(TEXTS, VALUES, max_size=3),
    messages=st.lists(st.dictionaries(TEXTS, TEXTS, max_size=2), max_size=2),
    score=FINITE,
    reward_components=st.dictionaries(TEXTS, FINITE, max_size=2),
    baseline=st.none() | FINITE,
    terminated=st.booleans(),
    error=TEXTS,
    version=st.integers(0, 9),
    selected=st.booleans(),
    turns=st.lists(TURNS, max_size=2),
    rows=st.lists(rows_of_tokens(), max_size=2),
)


# ---------------------------------------------------------------- the files


@given(EPISODES, st.dictionaries(TEXTS, VALUES, max_size=3))
def test_what_is_written_is_read_exactly(tmp_path_factory: Any, episode: TraceEpisode, columns: dict[str, Any]) -> None:
    folder = tmp_path_factory.getbasetemp() / "exactly"
    step = a_step(2, 1_000_000, episodes=columns)
    write_shard(folder, step, [episode])
    assert shards(folder) == [(2, 1_000_000)]
    assert_same(read_step(folder, 2, 1_000_000), step)
    assert_same(read_episode(folder, 2, 1_000_000, episode.index), episode)


def test_any_reader_of_zip_and_json_can_read_it(tmp_path: Path) -> None:
    """As docs/run_folder.md describes the files, without lmgym's own reader."""
    write_shard(tmp_path, a_step(step=12), [an_episode(7)])
    with zipfile.ZipFile(tmp_path / "traces/stage-0-step-000012.zip") as shard:
        assert shard.namelist() == ["step.json", "episodes/000007.json"] and shard.testzip() is None
        step, episode = (json.loads(shard.read(name)) for name in shard.namelist())
    assert step["format"] == 1 and step["step"] == 12 and step["episodes"]["index"] == [0, 1]
    row = episode["rows"][0]
    assert struct.unpack("<2i", base64.b64decode(row["actions"]["int32"])) == (1, 2)
    third = struct.unpack("<f", struct.pack("<f", 7 / 3))[0]
    assert struct.unpack("<2f", base64.b64decode(row["columns"]["advantages"]["float32"]))[0] == third


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    write_shard(tmp_path, a_step(episodes={"score": [float("nan"), 1.0]}), [])
    assert read_step(tmp_path, 0, 0).episodes["score"] == [None, 1.0]


def test_meta_that_json_cannot_hold_is_described() -> None:
    meta = {"set": {1}, "array": np.array([1, 2]), "nested": [{"number": np.float64(0.5)}], 3: None}
    plain = plain_example(Example("a/0", [{"role": "user", "content": "?"}], meta=meta))
    assert plain["meta"] == {"set": "{1}", "array": [1, 2], "nested": [{"number": 0.5}], "3": None}
    json.dumps(plain)


def test_what_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    assert shards(tmp_path) == []
    with pytest.raises(LmgymError, match=r"traces holds nothing of stage 1, step 4; logs.traces and logs.traces_gib"):
        read_step(tmp_path, 0, 3)
    write_shard(tmp_path, a_step(), [an_episode(0)])
    with pytest.raises(LmgymError, match=r"no whole record of answer 1 in stage 1, step 1; logs.traces and"):
        read_episode(tmp_path, 0, 0, 1)
    (tmp_path / "traces" / "notes.zip").write_text("somebody's own")
    assert shards(tmp_path) == [(0, 0)]


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path, a_step(), [])
    path.write_bytes(trace_files.zipped([("step.json", json.dumps({"format": 2}).encode())]))
    with pytest.raises(LmgymError, match="has format 2 in stage 1, step 1, and this lmgym reads format 1; update"):
        read_step(tmp_path, 0, 0)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("a file")
    with pytest.raises(LmgymError, match=r"traces.* cannot be written"):
        write_shard(tmp_path, a_step(), [])
    with pytest.raises(LmgymError, match="traces cannot be read"):
        shards(tmp_path)


def filled(folder: Path, steps: int, most: float = 2**40) -> TraceFolder:
    """A folder with so many steps of two answers."""
    made = TraceFolder(folder, most, warn=lambda sentence: pytest.fail(sentence))
    for step in range(steps):
        made.write(a_step(step=step), [an_episode(0), an_episode(1, tokens=300)])
    made.sync()
    return made


@given(data=st.data(), packed=st.booleans())
def test_damage_is_one_sentence(tmp_path_factory: Any, data: st.DataObject, packed: bool) -> None:
    """Whatever is cut off or changed: what was written comes back, or a sentence with the file's name."""
    folder = tmp_path_factory.mktemp("run")
    filled(folder, 2)
    if packed:
        join(folder / "traces", 0, 0)
    (path, *_) = sorted((folder / "traces").iterdir())
    raw = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw = raw[:place]
    else:
        raw[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    for read in (lambda: read_step(folder, 0, 0), lambda: read_episode(folder, 0, 0, 1)):
        try:
            found = read()
        except LmgymError as error:
            assert "traces" in str(error) and "\n" not in str(error)
        else:
            assert_same(found, a_step() if isinstance(found, TraceStep) else an_episode(1, tokens=300))


# ---------------------------------------------------------------- a hundred steps in one file, and a limit


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "traces").iterdir())


def test_finished_hundreds_are_joined(tmp_path: Path) -> None:
    folder = filled(tmp_path, 203)
    packs = [f"stage-0-steps-{first:06d}-{first + 99:06d}.zip" for first in (0, 100)]
    assert names(tmp_path) == sorted([*packs, *(f"stage-0-step-{step:06d}.zip" for step in (200, 201, 202))])
    assert shards(tmp_path) == [(0, step) for step in range(203)]
    assert_same(read_step(tmp_path, 0, 150), a_step(step=150))
    assert_same(read_episode(tmp_path, 0, 150, 1), an_episode(1, tokens=300))
    folder.write(a_step(stage=1), [])  # another stage: what is left of the one before is joined too
    assert names(tmp_path) == sorted([*packs, "stage-0-steps-000200-000299.zip", "stage-1-step-000000.zip"])


class Killed(BaseException):
    """The process is gone."""


STEPS = 7  # of a folder that is killed: one file of four is finished


def killed_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[int]:
    """Each call that changes a file counts; the one with this number is the last."""
    calls = itertools.count()

    def counting(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if next(calls) == number:
                raise Killed
            return function(*arguments, **named)

        return call

    monkeypatch.setattr("os.replace", counting(os.replace))
    monkeypatch.setattr("os.fsync", counting(os.fsync))
    monkeypatch.setattr(Path, "unlink", counting(Path.unlink))
    return calls


@pytest.mark.parametrize("most", [2**40, 4000], ids=["joining", "joining and shortening"])
def test_a_kill_at_any_moment_loses_no_step(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at each call in turn, then taken back to a checkpoint and gone on with, as a resumed run does."""
    monkeypatch.setattr("lmgym.logs.traces.files.TOGETHER", 4)
    monkeypatch.setattr("lmgym.logs.traces.folder.TOGETHER", 4)
    whole = tmp_path / "whole"
    filled(whole, STEPS, most)
    for number in itertools.count():
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            killed_at(patch, number)
            try:
                filled(folder, STEPS, most)
            except Killed:
                done = len(shards(folder))
            else:
                break
        for stage, step in shards(folder):
            assert_same(read_step(folder, stage, step).episodes["index"], [0, 1])
        checkpoint = max(done - 2, 0)
        assert rewind_traces(folder, 0, checkpoint) == []
        assert shards(folder) == [(0, step) for step in range(checkpoint)]
        resumed = TraceFolder(folder, most, warn=lambda sentence: pytest.fail(sentence))
        for step in range(checkpoint, STEPS):
            resumed.write(a_step(step=step), [an_episode(0), an_episode(1, tokens=300)])
        assert names(folder) == names(whole)
        for name in names(whole):
            assert (folder / "traces" / name).read_bytes() == (whole / "traces" / name).read_bytes(), name
    assert number > 12  # calls; each was the last one once


def test_the_oldest_steps_lose_their_answers_first(tmp_path: Path) -> None:
    one = write_shard(tmp_path / "one", a_step(), [an_episode(0), an_episode(1, tokens=300)]).stat().st_size
    most = 30 * one
    folder = filled(tmp_path / "run", 150, most)
    sizes = sum(path.stat().st_size for path in (tmp_path / "run/traces").iterdir())
    assert sizes <= most and len(shards(tmp_path / "run")) == 150
    kept = [any(read_step(tmp_path / "run", 0, step).episodes["kept"]) for step in range(150)]
    first = kept.index(True)
    assert all(kept[first:]) and not any(kept[:first]) and 0 < first < 149  # the newest are whole
    assert_same(read_episode(tmp_path / "run", 0, first, 1), an_episode(1, tokens=300))
    with pytest.raises(LmgymError, match="no whole record of answer 1"):
        read_episode(tmp_path / "run", 0, first - 1, 1)
    assert read_step(tmp_path / "run", 0, 0).episodes["index"] == [0, 1]
    folder.most = 1  # even where the tables alone are more: the newest step stays whole
    folder.write(a_step(step=150), [an_episode(0)])
    assert [any(read_step(tmp_path / "run", 0, step).episodes["kept"]) for step in (148, 149, 150)] == [
        False,
        False,
        True,
    ]


def test_where_tables_alone_are_too_much_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hundreds, here fours; those of the newest whole one and of the current one stay."""
    monkeypatch.setattr("lmgym.logs.traces.files.TOGETHER", 4)
    monkeypatch.setattr("lmgym.logs.traces.folder.TOGETHER", 4)
    filled(tmp_path / "alone", 18, most=1)
    assert shards(tmp_path / "alone") == [(0, step) for step in range(12, 18)]
    with pytest.raises(LmgymError, match=r"nothing of stage 1, step 1; logs.traces and logs.traces_gib say what a run"):
        read_step(tmp_path / "alone", 0, 0)
    # The folder stays below its limit; no table goes before all older answers.
    most = 40 * write_shard(tmp_path / "one", a_step(), []).stat().st_size
    filled(tmp_path / "run", 70, most)
    assert sum(path.stat().st_size for path in (tmp_path / "run/traces").iterdir()) <= most
    left = shards(tmp_path / "run")
    assert left == [(0, step) for step in range(left[0][1], 70)] and 12 <= left[0][1] <= 56


def test_going_back_to_a_checkpoint(tmp_path: Path) -> None:
    filled(tmp_path, 203).write(a_step(stage=1), [])
    (tmp_path / "traces/.writing-stage-1-step-000001.zip").write_text("half a f")
    assert rewind_traces(tmp_path, 0, 150) == []
    assert shards(tmp_path) == [(0, step) for step in range(150)]
    assert names(tmp_path) == ["stage-0-steps-000000-000099.zip", "stage-0-steps-000100-000199.zip"]
    rewind_traces(tmp_path, 0, 100)
    assert names(tmp_path) == ["stage-0-steps-000000-000099.zip"]
    assert rewind_traces(tmp_path, 0, 0) == [] and names(tmp_path) == []


def test_damaged_files_do_not_stop_a_run(tmp_path: Path) -> None:
    filled(tmp_path, 101)
    (tmp_path / "traces/stage-0-steps-000000-000099.zip").write_bytes(b"torn")
    (sentence,) = rewind_traces(tmp_path, 0, 50)
    assert "stage-0-steps-000000-000099.zip is damaged" in sentence
    said: list[str] = []
    folder = TraceFolder(tmp_path, 1000, said.append)
    for step in range(50, 102):
        folder.write(a_step(step=step), [an_episode(0)])
    assert len(said) == 1 and said[0] == sentence  # once
    assert_same(read_step(tmp_path, 0, 60).episodes["index"], [0, 1])


# ---------------------------------------------------------------- what a run records


class Dying(Console):
    """Ends the run with an exception after its n-th step, as a kill would."""

    def __init__(self, at: int) -> None:
        super().__init__(quiet=True)
        self.left = at

    def step(self, *arguments: Any, **named: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed


def trained(folder: Path, **changes: Any) -> Path:
    return runs.run(folder, **SHORT | changes)


def answers(folder: Path, step: int) -> list[dict[str, Any]]:
    """The records of a step's answers in rollouts.jsonl, by index."""
    records = runs.records(folder / "rollouts.jsonl")
    return [record for record in records if record["kind"] == "train" and record["step"] == step]


def record(folder: Path, step: int) -> dict[str, Any]:
    """The train record of a step in metrics.jsonl."""
    (found,) = (r for r in runs.records(folder / "metrics.jsonl") if r["kind"] == "train" and r["step"] == step)
    return found


def rows_of(folder: Path, step: int) -> list[TraceRow]:
    """All rows of a step whose answers are whole."""
    kept = read_step(folder, 0, step).episodes["kept"]
    return [row for index, own in enumerate(kept) if own for row in read_episode(folder, 0, step, index).rows]


def together(rows: list[TraceRow], name: str) -> Any:
    """A column over all rows that have it, end to end, in float64."""
    return np.concatenate([row.columns[name] for row in rows if name in row.columns]).astype(np.float64)


def assert_agrees_with_rollouts(folder: Path, step: int) -> None:
    """Ids, log-probabilities, texts and rewards are those of rollouts.jsonl."""
    table = read_step(folder, 0, step).episodes
    for expected in answers(folder, step):
        index = expected["index"]
        episode = read_episode(folder, 0, step, index)
        turns = expected["turns"]
        assert [vars(turn) for turn in episode.turns] == [
            {"given": "", **{name: turn[name] for name in vars(TraceTurn(text="")) if name in turn}} for turn in turns
        ]
        sampled = [token for row in episode.rows for token in row.tokens[row.actions].tolist()]
        assert sampled == [token for turn in turns for token in turn["action_ids"]]
        read = sum(len(row.tokens) - len(row.actions) for row in episode.rows)
        assert read == sum(len(turn["prompt_ids"]) for turn in turns)
        for row in episode.rows:
            said = [number for turn in dict.fromkeys(row.turn.tolist()) for number in turns[turn]["logprobs"]]
            if "logprobs_sampler" in row.columns:
                assert row.columns["logprobs_sampler"].tolist() == said
        assert episode.score == expected["score"] == table["score"][index]
        assert table["length"][index] == len(sampled)


@pytest.mark.slow
def test_one_step_of_grpo_says_all_that_moved(tmp_path: Path) -> None:
    """The terms of the loss with their weights add up to the step's metrics, and rows without advantage are absent."""
    folder = trained(tmp_path / "run", rewards={"regex": {"pattern": "[0-9]"}}, prompts_per_step=8)
    for step in (0, 1):
        assert_agrees_with_rollouts(folder, step)
        rows, logged, table = rows_of(folder, step), record(folder, step), read_step(folder, 0, step)
        computed = [row for row in rows if "logprobs" in row.columns]
        assert len(computed) / len(rows) == logged["rows/computed"] and 0 < len(computed) < len(rows)
        assert all(not row.columns["advantages"].any() for row in rows if "logprobs" not in row.columns)
        loss = (together(computed, "weight/policy") * together(computed, "loss/policy")).sum()
        assert loss == pytest.approx(logged["loss/policy"], rel=1e-5, abs=1e-8)  # fp32 numbers added up
        # At a ratio of 1 the surrogate's slope is the advantage.
        pushed = together(computed, "weight/policy") * together(computed, "advantages")
        # Both are a product of two fp32 numbers, rounded a few times: 4 * 2^-24 < 1e-6.
        assert together(computed, "push/policy") == pytest.approx(pushed, rel=1e-6)
        gap = np.abs(together(computed, "logprobs") - together(computed, "logprobs_sampler")).mean()
        assert gap == pytest.approx(logged["sampler_logprob_gap"], rel=1e-3, abs=1e-7)
        assert (together(computed, "ratio/mean") == 1).all() and (together(computed, "kl/old") == 0).all()
        spread = together(rows, "advantages").std(ddof=1)
        assert spread == pytest.approx(logged["advantage/std"], rel=1e-4)
        mean = [np.abs(row.columns["advantages"]).mean() for row in rows]
        # A sum of at most 12 positive fp32 numbers is off by 11 * 2^-24 of itself: 6.6e-7.
        assert table.episodes["surprise"] == pytest.approx(mean, rel=1e-6)
        assert (table.algorithm, table.fields["group_size"], table.stage_name) == ("grpo", 4, "train")
    assert (folder / "tokenizer/tokenizer.json").is_file()


COLUMNS: dict[str, tuple[set[str], set[str]]] = {  # of an algorithm: on all rows, and where the update has computed
    "ppo": (
        {"advantages", "returns", "values", "logprobs_old", "logprobs_ref"},
        {"loss/policy", "loss/value", "weight/policy", "weight/value", "push/policy"}
        | {"ratio/mean", "ratio/clipped", "kl/old"},
    ),
    "trpo": ({"advantages", "returns", "values", "logprobs_old", "logprobs_ref"}, {"push/policy"}),
    "supervised": ({"advantages"}, {"loss/policy", "weight/policy", "push/policy"}),
    "nlpo": (
        {"advantages", "returns", "values", "logprobs_old", "logprobs_ref"},
        {"loss/policy", "loss/value", "weight/policy", "weight/value", "push/policy"}
        | {"ratio/mean", "ratio/clipped", "kl/old"},
    ),
    "distill": ({"advantages", "logprobs_teacher"}, {"loss/policy", "weight/policy", "push/policy", "kl/teacher"}),
    "gkd": ({"advantages", "logprobs_old"}, {"loss/divergence", "weight/divergence"}),
    "reinforce mean": ({"advantages"}, {"loss/policy", "weight/policy", "push/policy"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COLUMNS)
def test_an_algorithm_records_what_it_has(name: str, tmp_path: Path) -> None:
    changes = {"rewards": None} if name in ("distill", "gkd") else {}
    folder = trained(tmp_path / "run", algorithm=ALGORITHMS[name], **changes)
    prepared, computed = COLUMNS[name]
    sampler = set() if name == "supervised" else {"logprobs_sampler"}
    for step in (0, 1):
        for row in rows_of(folder, step):
            expected = prepared | sampler | {"logprobs"} | computed
            if name == "reinforce mean" and not row.columns["advantages"].any():
                expected = prepared | sampler
            assert row.columns.keys() == expected
            if "logprobs_old" in row.columns:  # of `prepare`: before any step of this batch
                assert np.abs(row.columns["logprobs"] - row.columns["logprobs_old"]).max() < 0.5
        assert_agrees_with_rollouts(folder, step)


@pytest.mark.slow
def test_a_loss_of_the_whole_batch_records_its_pushes(tmp_path: Path) -> None:
    """Where policy and reference are equal, each token of a chosen answer is pushed up as much as each of its rejected
    one is pushed down; the term of imitation pushes the chosen ones alone."""
    changes = {"rewards": {"regex": {"pattern": "[0-9]"}}, "prompts_per_step": 8, "steps": 1}
    folder = trained(tmp_path / "run", algorithm=ALGORITHMS["online_dpo"] | {"epochs": 1}, **changes)
    table = read_step(folder, 0, 0)
    assert table.pairs and table.formulas["loss"].startswith("DPO whose pairs")
    pairs: dict[int, list[Any]] = {}
    for index, kept in enumerate(table.episodes["kept"]):
        if kept and table.episodes["selected"][index]:
            answer = read_episode(folder, 0, 0, index)
            pairs.setdefault(answer.group, []).append((answer.score, answer.rows[0].columns))
    assert pairs
    for pair in pairs.values():
        (_, rejected), (_, chosen) = sorted(pair, key=lambda one: one[0])
        assert (chosen["push/preference"] > 0).all() and (chosen["push/supervised"] > 0).all()
        assert chosen["push/preference"].max() == pytest.approx(-rejected["push/preference"].min(), rel=1e-6)
        assert (rejected["push/preference"] < 0).all() and not rejected["push/supervised"].any()


@pytest.mark.slow
def test_each_row_is_shown_by_the_first_step_that_computes_it(tmp_path: Path) -> None:
    """With two minibatches the second one's ratio is no longer 1; later epochs are absent."""
    folder = trained(tmp_path / "run", algorithm={"name": "ppo", "minibatches": 2, "epochs": 3})
    ratios = [row.columns["ratio/mean"] for row in rows_of(folder, 1)]
    first = [bool((ratio == 1).all()) for ratio in ratios]
    assert first.count(True) == first.count(False) == 2
    moved = [row for row, own in zip(rows_of(folder, 1), first, strict=True) if not own]
    ratio = np.exp(together(moved, "logprobs") - together(moved, "logprobs_old"))
    assert together(moved, "ratio/mean") == pytest.approx(ratio, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["builtin:tiny", "builtin:tiny_t5"])
def test_conversations_and_encoder_decoders(model: str, tmp_path: Path) -> None:
    """An episode of several rows: its turns and its encoder's inputs are those of rollouts.jsonl."""
    folder = trained(
        tmp_path / "run",
        policy=policy_section(model),
        env={"name": "tests.quiz:RestartingQuiz", "workers": 1},
        rewards=None,
    )
    assert_agrees_with_rollouts(folder, 1)
    counts = set()
    for expected in answers(folder, 1):
        episode = read_episode(folder, 0, 1, expected["index"])
        counts.add(len(episode.rows))
        assert [message["content"] for message in episode.messages if message["role"] == "user"][-1] == "2?"
        assert read_step(folder, 0, 1).episodes["turns"][expected["index"]] == 2
        sources = [row.source.tolist() for row in episode.rows if row.source is not None]
        assert sources == [turn["source_ids"] for turn in expected["turns"] if turn["source_ids"]]
        assert bool(sources) == (model != "builtin:tiny")
        assert [turn for row in episode.rows for turn in dict.fromkeys(row.turn.tolist())] == [0, 1]
    assert counts == ({1, 2} if model == "builtin:tiny" else {2})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo", "raft", "replay"])
def test_why_an_answer_was_not_selected(name: str, tmp_path: Path) -> None:
    """Groups that dynamic sampling leaves out, the answers that RAFT does not take, and those of earlier steps."""
    algorithm = ALGORITHMS[name] | ({"epochs": 1, "minibatches": 1} if name != "replay" else {})
    changes = {"rewards": {"regex": {"pattern": "[0-9]"}}, "prompts_per_step": 8} if name == "dapo" else {}
    folder = trained(tmp_path / "run", algorithm=algorithm, **changes)
    table = read_step(folder, 0, 1).episodes
    assert len(table["index"]) == len(answers(folder, 1))
    for index, (selected, reason) in enumerate(zip(table["selected"], table["reason"], strict=True)):
        assert selected == (reason == "") == (table["surprise"][index] is not None)
        episode = read_episode(folder, 0, 1, index)
        assert episode.selected == selected and ("advantages" in episode.rows[0].columns) == selected
    reasons = {*table["reason"]}
    if name == "raft":
        assert reasons == {"", "others of its group were chosen"}
    if name == "dapo":
        assert "its group was not chosen: all scores are equal" in reasons
        equal = [place for place, own in enumerate(table["reason"]) if "equal" in own]
        for place in equal:
            group = [s for s, g in zip(table["score"], table["group"], strict=True) if g == table["group"][place]]
            assert len({*group}) == 1
    if name == "replay":
        assert {*table["version"]} == {0, 1} and all(table["selected"])


def test_three_groups_are_kept() -> None:
    """The first, the one with the largest mean surprise, and one of the others: which, is the key's choice."""
    episodes = [Episode(Example(f"a/{n // 2}", "?"), group=n // 2, index=n) for n in range(12)]
    surprise = {n: 0.9 if n // 2 == 3 else 0.1 for n in range(10)}  # the last group is not in the batch
    chosen = [kept_groups(episodes, surprise, key) for key in range(20)]
    assert all({0, 3} < groups and len(groups) == 3 for groups in chosen)
    assert set.union(*chosen) == {0, 1, 2, 3, 4, 5}
    assert kept_groups(episodes[:2], {}, 5) == {0}


@pytest.mark.slow
def test_traces_change_nothing_and_resume_exactly(tmp_path: Path) -> None:
    """Bit for bit the run without them; a run that was killed writes the steps that it repeats as they were."""
    logs = {"samples": 2}
    changes = {"checkpoint": {"every": 2}, "algorithm": ALGORITHMS["ppo"], "steps": 6}
    without = runs.run(tmp_path / "none", logs={**logs, "traces": "none"}, **changes)
    assert not (without / "traces").exists() and not (without / "tokenizer").exists()
    whole = runs.run(tmp_path / "some", logs=logs, **changes)
    for path in runs.newest(whole).rglob("*.*"):
        if path.name not in ("fingerprint.json", "manifest.json"):  # they hold the recipe, and its checksum
            assert path.read_bytes() == (runs.newest(without) / path.relative_to(runs.newest(whole))).read_bytes()
    for name in ("final/model.safetensors", "rollouts.jsonl", "summary.json"):
        assert (whole / name).read_bytes() == (without / name).read_bytes()
    assert runs.records(whole / "metrics.jsonl") == runs.records(without / "metrics.jsonl")
    with pytest.raises(Killed):
        runs.run(tmp_path / "killed", Dying(at=4), logs=logs, **changes)
    stale = tmp_path / "killed/traces/stage-0-step-000005.zip"
    stale.write_bytes(b"left by a kill")
    killed = runs.run(tmp_path / "killed", logs=logs, **changes)
    runs.assert_equal_runs(whole, killed)  # traces/ too
    assert shards(whole) == [(0, step) for step in range(6)]
    kept = read_step(whole, 0, 3).episodes["kept"]
    assert kept[0] and kept.count(True) in (2, 3)  # of four: the first may be the most surprising one too


@pytest.mark.slow
def test_several_ranks_write_one_trace(group: Group, tmp_path: Path) -> None:
    """Each rank computes rows of its own. Of three passes of equal length the first rank has two, so the second one's
    last pass is idle, on the first row: all rows come together, and none of an idle pass."""
    changes = SHORT | {"steps": 1, "prompts_per_step": 3, "algorithm": {"name": "ppo", "epochs": 1}}
    changes |= {"env": {"name": "tests.quiz:Question", "workers": 1}, "rewards": None}
    changes |= {"sampling": {"max_new_tokens": 6, "min_new_tokens": 6}}
    changes["policy"] = runs.TINY["policy"] | {"tokens_per_forward": 1}
    alone = runs.run(tmp_path / "alone", **changes)
    recipe = runs.write(tmp_path / "two.yaml", **changes, distributed={"sharding": "fsdp"})
    assert group.run(2, ["train", str(recipe), f"out={tmp_path / 'two'}"]) == [0, 0], group.said() + group.said(1)
    ours, theirs = rows_of(tmp_path / "two", 0), rows_of(alone, 0)
    assert len(ours) == len(theirs) == 3
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.columns.keys() == other.columns.keys() and "loss/value" in one.columns
        for name, column in one.columns.items():
            assert column == pytest.approx(other.columns[name], rel=100 * NEAR, abs=1e-5), name


@pytest.mark.slow
def test_an_old_run_folder_goes_on(tmp_path: Path) -> None:
    """One without traces/ and tokenizer/ gets them from its next step on."""
    folder = trained(tmp_path / "run", steps=1, logs={"samples": 0, "traces": "none"})
    trained(folder, steps=2, logs={"samples": 0})
    assert shards(folder) == [(0, 1)] and (folder / "tokenizer").is_dir()


def bomb(path: Path, how: int, unpacked: int, claimed: int) -> Path:
    """A step whose step.json is so many zeros, and says that it has `claimed` bytes."""
    with zipfile.ZipFile(path, "w", how) as archive:
        archive.writestr("step.json", bytes(unpacked))
    data = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):  # its own header, and its entry in the list
        struct.pack_into("<I", data, data.index(mark) + place, claimed)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("how", "claimed", "complaint"),
    [
        (zipfile.ZIP_DEFLATED, 100, "Bad CRC-32"),
        (zipfile.ZIP_DEFLATED, 2**26 + 1, "longer than 67,108,864 bytes"),
        (zipfile.ZIP_BZIP2, 100, "compressed in another way"),
        (zipfile.ZIP_LZMA, 100, "compressed in another way"),
    ],
)
def test_a_member_unpacks_to_a_bounded_size(how: int, claimed: int, complaint: str, tmp_path: Path) -> None:
    """A small archive that holds 32 MiB is read without them."""
    (tmp_path / "traces").mkdir()
    path = bomb(tmp_path / "traces/stage-0-step-000012.zip", how, 2**25, claimed)
    assert path.stat().st_size < 2**16
    tracemalloc.start()
    try:
        with pytest.raises(LmgymError, match=complaint):
            read_step(tmp_path, 0, 12)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_compressed_step_in_a_file_of_several_is_damage(tmp_path: Path) -> None:
    """It would unpack to any size; joining, going back and reading refuse it alike."""
    traces = tmp_path / "traces"
    traces.mkdir()
    pack = traces / trace_files.pack_name(0, 12)
    with zipfile.ZipFile(pack, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(trace_files.shard_name(0, 12), bytes(2**20))
        archive.writestr(trace_files.shard_name(0, 14), bytes(2**20))
    with pytest.raises(LmgymError, match="is compressed"):
        read_step(tmp_path, 0, 12)
    assert "is compressed" in rewind_traces(tmp_path, 0, 13)[0]
    write_shard(tmp_path, a_step(step=13), [])
    with pytest.raises(LmgymError, match="is compressed"):
        join(traces, 0, 13)
    assert pack.exists() and read_step(tmp_path, 0, 13).step == 13
