"""timings.jsonl: what a clock says of each answer is there for every turn, and changes nothing that must be equal."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgym.logs.timings import timing_columns, timing_record
from lmgym.types import Episode, Example, Turn
from lmgym.viewer.addresses import tree_at
from lmgym.viewer.runs import open_runs
from lmgym.viewer.search import search_step
from tests import runs

SECONDS = st.floats(0, 1e4)
PLACE = {"kind": "train", "stage": 0, "step": 0}


def episodes_of(turns: list[list[dict[str, float]]], rewards: list[dict[str, float]]) -> list[Episode]:
    made = []
    for index, (own, paid) in enumerate(zip(turns, rewards, strict=True)):
        said = [Turn([1], [2], seconds=seconds) for seconds in own]
        made.append(Episode(Example("a", "?"), 0, index, said, reward_seconds=paid))
    return made


@given(
    st.lists(
        st.tuples(
            st.lists(st.dictionaries(st.sampled_from(["sampling", "environment"]), SECONDS), max_size=3),
            st.dictionaries(st.sampled_from(["judge", "bleu"]), SECONDS),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_columns_are_the_sums_of_what_was_measured(given: list[Any]) -> None:
    """Four digits are kept of each part, and four of a sum: each rounds by at most 5e-4 of it."""
    episodes = episodes_of([turns for turns, _ in given], [rewards for _, rewards in given])
    record = json.loads(json.dumps(PLACE | timing_record(episodes[::-1])))
    columns = timing_columns(record, len(episodes))
    for place, (turns, rewards) in enumerate(given):
        for part in ("sampling", "environment"):
            known = [own[part] for own in turns if part in own]
            column = columns.get(f"seconds/{part}", [None] * len(given))
            assert column[place] == (pytest.approx(sum(known), rel=1.1e-3) if known else None)
        column = columns.get("seconds/rewards", [None] * len(given))
        assert column[place] == (pytest.approx(sum(rewards.values()), rel=1.1e-3) if rewards else None)


def test_equal_answers_are_equal_whatever_the_clock_says() -> None:
    one, other = (episodes_of([[{"sampling": seconds}]], [{"judge": seconds}])[0] for seconds in (1.0, 2.0))
    assert one == other and repr(one) == repr(other) and one.to_json() == other.to_json()
    assert Episode.from_json(one.to_json(seconds=True)).turns[0].seconds == {"sampling": 1.0}
    assert Episode.from_json(one.to_json(seconds=True)).reward_seconds == {"judge": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_every_turn_of_a_run_is_timed_and_a_resumed_run_has_each_step_once(tmp_path: Path, workers: int) -> None:
    env = {"name": "tests.quiz:Rounds", "workers": workers}
    changes: dict[str, Any] = {"env": env, "steps": 4, "checkpoint": {"every": 2}, "evaluation": {"every": 0}}
    folder = runs.run(tmp_path / "run", **(changes | {"steps": 2}))
    kept = (folder / "timings.jsonl").read_bytes()
    with (folder / "timings.jsonl").open("ab") as file:  # a step after the checkpoint, as a kill leaves it
        file.write(json.dumps({"kind": "train", "stage": 0, "stage_name": "", "step": 2}).encode() + b"\n")
    runs.run(folder, **changes)
    assert (folder / "timings.jsonl").read_bytes().startswith(kept)
    timings, metrics = (
        [one for one in map(json.loads, (folder / name).read_text().splitlines()) if one["kind"] == "train"]
        for name in ("timings.jsonl", "metrics.jsonl")
    )
    assert [one["step"] for one in timings] == [0, 1, 2, 3]

    # The parts of a step come one after the other, so together they take no longer than the rollout.
    [run] = open_runs([folder])
    for timing, record in zip(timings, metrics, strict=True):
        answers = tree_at([run], f"runs/0/steps/0/{timing['step']}")["columns"]
        for turns, sampled, acted in zip(answers["turns"], timing["sampling"], timing["environment"], strict=True):
            assert len(sampled) == len(acted) == turns if turns > 1 else type(sampled) is type(acted) is float
        assert set(timing["rewards"]) == {"length", "regex"}
        if not workers:
            parts = sum(answers["seconds/environment"]) + sum(timing["rewards"].values())
            assert parts <= record["seconds/rollout"] * 1.001  # four digits are kept

    # The page has them: of an answer, and to search by.
    answer = tree_at([run], "runs/0/answers/train/0/3/0")
    assert len(answer["seconds"]["sampling"]) == len(answer["turns"]) and "length" in answer["seconds"]["rewards"]
    spans = run.timings.spans[run.timings.moments("train")[3]]
    job = {"folder": str(folder), "stage": 0, "step": 3, "traced": True, "pattern": "", "timings": spans}
    found = search_step(job | {"filters": [["seconds/sampling", ">", 0]]})
    assert len(found) == len(answers["turns"]) and not search_step(job | {"filters": [["seconds/rewards", "<", 0]]})
