"""Data order: a pure function of (seed, draw, step) in which every epoch holds every example once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.tasks import stream as module
from lmgym.tasks.base import load_task
from lmgym.tasks.stream import Stream, priorities
from lmgym.types import Example

sizes = st.integers(1, 23)


def stream(size: int, seed: int, prompts_per_step: int) -> Stream:
    return Stream([Example(str(index), f"prompt {index}") for index in range(size)], seed, prompts_per_step)


@given(sizes, sizes, st.integers(0, 2**40), st.integers(0, 3))
def test_each_epoch_holds_each_example_once(size, prompts_per_step, seed, draw) -> None:
    data = stream(size, seed, prompts_per_step)
    steps = [data.at(step, draw) for step in range(2 * size)]
    assert all(len(examples) == prompts_per_step for examples in steps)
    flat = [example.id for examples in steps for example in examples]
    for start in range(0, len(flat) - size + 1, size):
        assert set(flat[start : start + size]) == {str(index) for index in range(size)}


@given(sizes, sizes, st.integers(0, 2**40), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=12))
def test_the_order_of_asking_does_not_matter(size, prompts_per_step, seed, asked) -> None:
    used = stream(size, seed, prompts_per_step)
    answers = {place: used.at(*place) for place in asked}
    for place in reversed(asked):
        assert used.at(*place) == answers[place] == stream(size, seed, prompts_per_step).at(*place)


def test_seeds_draws_and_epochs_have_orders_of_their_own() -> None:
    orders = {
        tuple(example.id for example in stream(50, seed, 50).at(step, draw))
        for seed in range(3)
        for draw in range(3)
        for step in range(3)
    }
    assert len(orders) == 27


def test_an_order_is_made_once_however_many_draws_a_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of millions of examples each takes seconds."""
    made, permutation = list[tuple[int | str, ...]](), seeds.permutation
    monkeypatch.setattr(seeds, "permutation", lambda size, *path: made.append(path) or permutation(size, *path))
    data = stream(20, 0, 3)
    for step in range(10):  # of which one straddles two epochs
        for draw in range(6):
            data.at(step, draw)
    assert len(made) == len(set(made)) == 6 * 2


def test_priorities_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture and a curriculum ask for one example at a time."""
    asked = list[float]()
    monkeypatch.setattr(module, "priorities", lambda *given: asked.append(given[1]) or priorities(*given))
    meta = {"mixture": {"a": 1.0, "b": 1.0}}
    examples = [Example(f"{task}/{n}", "?", meta={**meta, "task": task}) for task in "ab" for n in range(5)]
    data = Stream(examples, 0, 8, priority_scale=0.5)
    assert len({example.id for step in range(5) for example in data.at(step)}) == 10 and len(asked) == 3


def test_what_can_be_asked_of_a_stream() -> None:
    with pytest.raises(LmgymError, match="at least one example"):
        stream(0, 0, 4)
    with pytest.raises(LmgymError, match="prompts_per_step must be at least 1, not 0"):
        stream(4, 0, 0)


@given(st.integers(0, 2**40), st.integers(1, 6))
def test_random_shots_are_a_function_of_seed_and_id(seed, n) -> None:
    few_shot = {"n": n, "draw": "random"}
    arguments = {"size": 12, "validation_size": 4, "test_size": 4, "few_shot": few_shot, "seed": seed}
    everything = load_task("arithmetic", "train", **arguments)
    assert load_task("arithmetic", "train", limit=5, **arguments) == everything[:5]
    for example in everything:
        shown = [message["content"] for message in example.prompt if message["role"] == "user"]
        assert len(shown) == len(set(shown)) == n + 1  # distinct, and never the example itself


@pytest.mark.slow
@given(st.integers(2, 12), st.integers(0, 2**20))
def test_random_shots_favour_no_example(n, seed) -> None:
    arguments = {"size": 20, "few_shot": {"n": n, "draw": "random"}, "seed": seed}
    chosen = Counter(
        message["content"]
        for example in load_task("arithmetic", "test", test_size=400, **arguments)
        for message in example.prompt[:-1]
        if message["role"] == "user"
    )
    assert sum(chosen.values()) == 400 * n
    spread = (400 * n / 20 * (1 - n / 20)) ** 0.5  # of a count, when n of 20 are drawn without replacement
    assert all(abs(count - 400 * n / 20) < 6 * spread for count in chosen.values())


@pytest.mark.parametrize(
    ("scale", "chances"),
    [(0.0, [1 / 3, 1 / 3, 1 / 3]), (0.5, [0.2265, 0.3204, 0.4531]), (1.0, [0.1429, 0.2857, 0.5714])],
)
def test_priorities_of_rl4lms(scale: float, chances: list[float]) -> None:
    """Case 9 of shared/reference/seed_systems.md: weights 1, 2 and 4."""
    assert priorities([1, 2, 4], scale).tolist() == pytest.approx(chances, abs=5e-5)


def test_prompts_are_drawn_as_often_as_their_priorities_say() -> None:
    examples = [Example(str(weight), "?", meta={"weight": weight}) for weight in (1, 2, 4)]
    drawn = Counter(e.id for e in Stream(examples, 3, 10_000, priority_scale=1.0).at(2))
    # Four standard deviations of a binomial count of 10,000.
    for weight, chance in ((1, 1 / 7), (2, 2 / 7), (4, 4 / 7)):
        assert abs(drawn[str(weight)] - 10_000 * chance) < 4 * (10_000 * chance * (1 - chance)) ** 0.5
    data = Stream(examples, 3, 8, priority_scale=1.0)
    assert data.at(5) == Stream(examples, 3, 8, priority_scale=1.0).at(5) and data.at(5) != data.at(6)


def test_a_weight_that_is_no_number_above_0_is_named() -> None:
    with pytest.raises(LmgymError, match=r"example 'b' has the weight 0; priorities need a number above 0"):
        Stream([Example("a", "?"), Example("b", "?", meta={"weight": 0})], 0, 1, priority_scale=1.0)
