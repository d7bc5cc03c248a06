"""The plan of `engine.ahead`, by hand and by what must hold for any seconds."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmgym.cli.main import main
from lmgym.core.errors import LmgymError
from lmgym.training.planning.ahead_plan import ahead_sentence, chart, chunk_lines, least_ahead, measured_steps, schedule
from tests import runs

SECONDS = st.lists(st.tuples(st.floats(0.01, 9.0), st.floats(0.01, 9.0)), min_size=1, max_size=12)


def test_answers_of_two_seconds_and_updates_of_one() -> None:
    """One ahead: the update of step 0 is beside the answers of step 1, and waits for nobody; that of step 1 waits."""
    plan = schedule([2.0, 2.0, 2.0], [1.0, 1.0, 1.0], ahead=1)
    assert plan.sampled == [(0.0, 2.0), (2.0, 4.0), (4.0, 6.0)]
    assert plan.updated == [(2.0, 3.0), (4.0, 5.0), (6.0, 7.0)]
    assert schedule([2.0, 2.0], [1.0, 1.0], ahead=0).seconds == 6.0
    # In turn the answers of step 1 come first: 2 + 2 + 1, then the last update.
    assert schedule([2.0, 2.0], [1.0, 1.0], ahead=1, in_turn=True).updated == [(4.0, 5.0), (5.0, 6.0)]


def test_steps_of_unequal_length_are_worth_two() -> None:
    """Answers of 1 and 5 s by turns, updates of 3: one ahead waits for every long one, two ahead for the first only."""
    rollouts, updates = [1.0, 5.0] * 50, [3.0] * 100
    best, seconds = least_ahead(rollouts, updates)
    assert best == 2 and seconds[0] == 6.0
    assert seconds[1] == pytest.approx(4.0, abs=0.05) and seconds[2] == pytest.approx(3.0, abs=0.05)
    assert "with engine.ahead 0, 1, 2, 4, 8 a step takes 6, 4.01, 3.03" in ahead_sentence(rollouts, updates, 1)
    assert least_ahead([1.0] * 50, [2.0] * 50)[0] == 1


@settings(max_examples=60, deadline=None)
@given(SECONDS)
def test_nobody_does_two_things_and_further_ahead_is_never_slower(steps: list[tuple[float, float]]) -> None:
    rollouts, updates = [one for one, _ in steps], [other for _, other in steps]
    before = float("inf")
    for ahead in range(9):
        plan = schedule(rollouts, updates, ahead)
        for spans in (plan.sampled, plan.updated):
            assert len(spans) == len(steps)
            assert all(one[1] <= other[0] for one, other in pairwise(spans))
        for step, (begin, _) in enumerate(plan.updated):
            assert plan.sampled[step][1] <= begin
            if step > ahead:  # the weights that sample have had step - ahead updates
                assert plan.updated[step - ahead - 1][1] <= plan.sampled[step][0] + 1e-9
        assert plan.seconds <= before + 1e-9 and plan.seconds >= max(sum(rollouts), sum(updates))
        before = plan.seconds


def test_a_chart_shows_who_waits() -> None:
    answers, updates, weights = chart(1.0, 2.0, ahead=1)
    assert len(answers) == len(updates) and [*dict.fromkeys(updates.removeprefix("updates: "))] == [*".01234"]
    assert answers.index("2") > updates.index("1") - 2  # begun when the answers of step 1 are taken
    assert weights.startswith("answers of step 0 by weights 0, 1 by weights 0, 2 by weights 1")


def test_the_plan_of_chunks() -> None:
    *rows, calls, who = chunk_lines(1.0, 1.0, ahead=3, chunk=64, most=500)
    assert calls == (
        "beside update u, weights u sample the tokens 0 to 63 of step u + 3, 64 to 127 of step u + 2, and from 128 on "
        "of step u + 1"
    )
    assert who.startswith("answers of more than 192 tokens hold their step up") and "engine.chunk 167 none" in who
    assert chunk_lines(1.0, 1.0, ahead=3, chunk=167, most=500)[-1].startswith("no answer holds its step up")
    assert rows == chart(1.0, 1.0, ahead=1)[:2]  # each call waits for the weights, each update for the call before


def test_check_shows_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a recipe by a few answers, of a run by the steps that it took."""
    algorithm = {"name": "grpo", "group_size": 4, "correction": {"name": "truncated"}}
    changes = {"algorithm": algorithm, "engine": {"ahead": 2}, "evaluation": None, "steps": 3}
    recipe = runs.write(tmp_path / "recipe.yaml", **changes)
    main(["check", str(recipe)])
    said = capsys.readouterr().out
    assert "the plan of engine.ahead: 2, by a few answers" in said and "keeps the slower part busy" in said
    chunks = runs.write(tmp_path / "chunks.yaml", **changes | {"engine": {"ahead": 2, "chunk": 3}})
    main(["check", str(chunks)])
    assert "the plan of engine.ahead: 2, chunk: 3, by a few answers" in " ".join(capsys.readouterr().out.split())
    run = runs.run(tmp_path / "run", **changes)
    main(["check", str(run)])
    assert "the plan of engine.ahead: 2, by the 3 steps that were taken" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["[]", '{"kind": "train", "stage": 0, "step": 0, "sampling": "long"}', "{"])
def test_records_that_are_none_are_named(line: str, tmp_path: Path) -> None:
    metrics = {"kind": "train", "stage": 0, "step": 0, "seconds/update": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    (tmp_path / "timings.jsonl").write_text(line + "\n")
    with pytest.raises(LmgymError, match="are not the records of a run"):
        measured_steps(tmp_path, 0)
    (tmp_path / "timings.jsonl").write_text("")
    assert measured_steps(tmp_path, 0) == ([], [])
