"""Curriculum and order: who rests, who comes back, that nothing is lost, and that a resumed run has the same order."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgym.core.errors import LmgymError
from lmgym.tasks.curriculum import Curriculum, CurriculumSection
from lmgym.tasks.stream import Stream
from lmgym.types import Episode, Example
from tests import runs
from tests.parity.test_resume import Interrupting
from tests.runs import assert_equal_runs

EXAMPLES = [Example(str(n), "?") for n in range(6)]


def curriculum_of(section: CurriculumSection | None = None, size: int = 6, step: int = 3, **order: Any) -> Curriculum:
    return Curriculum(Stream(EXAMPLES[:size], 0, step, **order), section or CurriculumSection())


def take(curriculum: Curriculum, step: int, rates: dict[str, float], answers: int = 4) -> list[str]:
    """One step whose prompts are solved at these rates (0.5, if not named)."""
    found = curriculum.at(step)
    episodes = []
    for example in found:
        right = round(rates.get(example.id, 0.5) * answers)
        episodes += [Episode(example, 0, n, score=float(n < right)) for n in range(answers)]
    curriculum.observe(episodes)
    assert curriculum.at(step) == found  # until the step is done
    curriculum.advance()
    return [example.id for example in found]


def test_the_order_of_the_task_without_shuffling() -> None:
    stream = Stream(EXAMPLES, 0, 4, shuffle=False)
    assert [[e.id for e in stream.at(step)] for step in range(3)] == [list("0123"), list("4501"), list("2345")]
    assert [e.id for e in stream.at(0, draw=1)] == list("4501")  # what comes next


def test_a_further_draw_of_a_mixture_goes_on_in_its_order() -> None:
    meta = {"mixture": {"a": 2.0, "b": 1.0}}
    examples = [Example(f"{task}/{n}", "?", meta={**meta, "task": task}) for task in "ab" for n in range(30)]
    for seed in range(20):
        stream = Stream(examples, seed, 4, shuffle=False)
        assert stream.at(0, draw=1) == stream.at(1) and not {e.id for e in stream.at(0)} & {e.id for e in stream.at(1)}


def test_solved_and_hopeless_prompts_rest_for_an_epoch() -> None:
    curriculum = curriculum_of(shuffle=False)
    rates = {"0": 1.0, "4": 0.0}
    assert [take(curriculum, step, rates) for step in range(2)] == [list("012"), list("345")]
    assert curriculum.metrics() == {"curriculum/resting": 2 / 6}
    assert [take(curriculum, step, rates) for step in (2, 3)] == [list("123"), list("501")]  # 4 rests, 0 did
    assert curriculum.resting == {"0": 4, "4": 2}


def test_a_rest_begins_in_the_epoch_that_a_prompt_was_asked_in() -> None:
    """Of a step across two epochs: 4 is of the first one, and left out of the second one alone."""
    curriculum = curriculum_of(step=4, shuffle=False)
    assert [take(curriculum, step, {"4": 1.0}) for step in range(3)] == [list("0123"), list("4501"), list("2350")]
    assert curriculum.resting == {"4": 2}
    assert take(curriculum, 3, {}) == list("1234") and curriculum.resting == {}


def test_a_prompt_that_comes_back_may_stay() -> None:
    curriculum = curriculum_of(CurriculumSection(rest=2), size=3, step=2, shuffle=False)
    seen = [take(curriculum, 0, {"0": 1.0})]
    seen += [take(curriculum, step, {}) for step in range(1, 6)]
    # Epochs 012 | 012 | 012 | 012: 0 is left out of the second and the third.
    assert seen == [list("01"), list("21"), list("21"), list("20"), list("12"), list("01")]
    assert curriculum.resting == {}


def test_if_all_rest_epochs_pass_until_they_are_back() -> None:
    curriculum = curriculum_of(CurriculumSection(rest=3), size=3, step=3, shuffle=False)
    nothing = {name: 0.0 for name in "012"}
    assert [take(curriculum, step, nothing) for step in range(3)] == [list("012")] * 3
    assert curriculum.position == 3 * (1 + 4 + 4)


def test_bounds_and_the_reward_that_counts() -> None:
    section = CurriculumSection(reward="exact", right=0.5, solved=0.75, hopeless=0.25)
    curriculum = curriculum_of(section, shuffle=False)
    examples, right = curriculum.at(0), {"0": 3, "1": 2, "2": 1}
    episodes = [
        Episode(example, 0, n, score=9.0, reward_components={"exact": 0.5 * (n < right[example.id])})
        for example in examples
        for n in range(4)
    ]
    failed = [Episode(examples[1], 0, 4, error="down")] * 9  # says nothing of the prompt
    curriculum.observe([*episodes, *failed])
    curriculum.advance()
    assert curriculum.resting.keys() == {"0", "2"}
    with pytest.raises(LmgymError, match="there is no reward 'exact'; the recipe has length"):
        curriculum.observe([Episode(examples[0], 0, 0, reward_components={"length": 1.0})])


def test_a_further_draw_goes_on_behind_the_first() -> None:
    curriculum = curriculum_of(shuffle=False)
    assert [[e.id for e in curriculum.at(0, draw)] for draw in (0, 1)] == [list("012"), list("345")]
    curriculum.advance()
    assert [e.id for e in curriculum.at(1)] == list("012")


@given(st.integers(1, 6), st.integers(1, 5), st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=6, max_size=6))
def test_nobody_is_lost_and_a_restored_state_goes_on_alike(size: int, step: int, rates: list[float]) -> None:
    """Every prompt comes again within three epochs (its own, its rest, the one that it comes back in) and two steps;
    prompts that are neither come at least as often as others."""
    section = CurriculumSection(rest=1)
    curriculum, other = curriculum_of(section, size, step), curriculum_of(section, size, step)
    by_id = {str(n): rate for n, rate in enumerate(rates)}
    seen: Counter[str] = Counter()
    late: set[str] = set()  # of the second half, which is longer than that
    steps = 8 * size // step + 8
    for number in range(steps):
        if number == steps // 2:
            other.load_state_dict(curriculum.state_dict())
        own = take(curriculum, number, by_id)
        assert number < steps // 2 or take(other, number, by_id) == own
        seen.update(own)
        if number >= steps // 2:
            late.update(own)
    assert late == {str(n) for n in range(size)}
    awake = [count for name, count in seen.items() if by_id[name] == 0.5]
    resting = [count for name, count in seen.items() if by_id[name] != 0.5]
    assert not awake or not resting or min(awake) >= max(resting) - 1


def test_a_resumed_run_has_the_same_prompts(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "curriculum": {"reward": "regex", "rest": 2},
        "task": {"name": "arithmetic", "size": 10, "test_size": 16, "validation_size": 16, "largest": 5},
    }
    whole = runs.run(tmp_path / "whole", **changes)
    halves = runs.run(tmp_path / "halves", Interrupting(at=3), **changes)
    runs.run(halves, **changes)
    assert_equal_runs(whole, halves)
    records = [record for record in runs.records(whole / "metrics.jsonl") if record["kind"] == "train"]
    assert any(record["curriculum/resting"] > 0 for record in records)
    plain = runs.run(tmp_path / "plain", task=changes["task"])
    assert (plain / "rollouts.jsonl").read_bytes() != (whole / "rollouts.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"curriculum": {"hopeless": 1.0}}, "every prompt would rest"),
        ({"curriculum": {}, "algorithm": "reinforce"}, "a solve rate needs several answers"),
        ({"curriculum": {}, "algorithm": "supervised"}, "nothing is sampled here"),
        ({"curriculum": {"reward": "regexp"}}, "there is no reward 'regexp'; did you mean 'regex'?"),
        ({"curriculum": {}, "rewards": {"regex": {"pattern": ".", "normalise": True}}},
         r"rewards\.regex\.normalise moves it from step to step; name the reward that says it in curriculum\.reward"),
        ({"shuffle": False, "priority_scale": 1.0}, "shuffle is false, and priority_scale"),
        (
            {"curriculum": {}, "engine": {"name": "pool", "ahead": 1},
             "algorithm": {"name": "grpo", "group_size": 4, "correction": {"name": "truncated", "cap": 2.0}}},
            "engine.ahead: the curriculum of stage 'train'",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=said):
        runs.run(tmp_path / "run", **changes)


def walked(curriculum: Curriculum, draw: int) -> list[str]:
    """What `at` gives by going through every epoch."""
    position, awake = curriculum._ends[draw - 1] if draw else curriculum.position, list[str]()
    while len(awake) < curriculum.stream.prompts_per_step:
        example = curriculum.stream.example(position)
        if curriculum.resting.get(example.id, 0) <= position // curriculum.size:
            awake.append(example.id)
        position += 1
    return [*awake, str(position)]


KINDS: list[dict[str, Any]] = [{}, {"shuffle": False}, {"priority_scale": 1.0}]


@given(st.data(), st.integers(1, 7), st.integers(1, 9), st.integers(1, 5), st.sampled_from(KINDS), st.booleans())
def test_epochs_in_which_all_rest_are_passed_over(
    data: st.DataObject, size: int, step: int, rest: int, kind: dict[str, Any], mixed: bool
) -> None:
    """As if each had been gone through; also where prompts share an id, and in a mixture."""
    mixture = {"mixture": {"a": 2.0, "b": 1.0}} if mixed and size > 1 else {}
    examples = [Example(str(n % 5), "?", meta={**mixture, "task": "ab"[n % 2]}) for n in range(size)]
    curriculum = Curriculum(Stream(examples, 0, step, **kind), CurriculumSection(rest=rest))
    for number in range(6):
        draws = data.draw(st.integers(1, 2))
        found = [[example.id for example in curriculum.at(number, draw)] for draw in range(draws)]
        assert [[*own, str(curriculum._ends[draw])] for draw, own in enumerate(found)] == [
            walked(curriculum, draw) for draw in range(draws)
        ]
        for name in sorted({name for own in found for name in own}):
            curriculum._rates[name] = data.draw(st.sampled_from([0.0, 0.5, 1.0, 1.0]))
        curriculum.advance()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rest_of_a_billion_epochs_is_over_at_once(kind: dict[str, Any]) -> None:
    curriculum = curriculum_of(CurriculumSection(rest=10**9), **kind)
    asked = set[str]()
    for number in range(100):
        asked.update(take(curriculum, number, {example.id: 1.0 for example in EXAMPLES}))
    assert asked == {example.id for example in EXAMPLES} and curriculum.position > 6 * 10**9
