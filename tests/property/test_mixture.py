"""Mixtures: shares follow the weights, each task keeps its order, and all is a function of (seed, draw, step)."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from lmgym.tasks.stream import Stream, mixture_slot
from lmgym.types import Example

weights = st.lists(st.floats(0.01, 100) | st.integers(1, 9), min_size=1, max_size=6)
sizes = st.lists(st.integers(1, 7), min_size=2, max_size=4)


@given(weights, st.integers(0, 2**64 - 1), st.integers(0, 10**12))
def test_turns_follow_the_weights(weights, key, start) -> None:
    """Each turn has one owner, who takes them one after the other; of t turns each has its share, to within one turn
    for itself and each member before it."""
    total = sum(map(Fraction, weights))
    following: dict[int, int] = {}
    for position in range(start, start + 40):
        member, place = mixture_slot(position, weights, key)
        assert following.setdefault(member, place) == place
        following[member] += 1
        assert abs(place - Fraction(weights[member]) / total * position) <= member + 1


@given(weights, st.integers(0, 2**64 - 1))
def test_the_first_turns_begin_at_zero(weights, key) -> None:
    seen: set[int] = set()
    for position in range(40):
        member, place = mixture_slot(position, weights, key)
        if member not in seen:
            assert place == 0
            seen.add(member)


def mixed(sizes: list[int], shares: list[int]) -> list[Example]:
    marks = {f"task{number}": float(share) for number, share in enumerate(shares)}
    return [
        Example(f"task{number}/{index}", "?", meta={"task": f"task{number}", "mixture": marks, "weight": index + 1})
        for number, size in enumerate(sizes)
        for index in range(size)
    ]


@given(sizes, st.lists(st.integers(1, 5), min_size=4, max_size=4), st.integers(0, 99), st.integers(0, 2), st.booleans())
def test_each_task_keeps_the_order_that_it_has_alone(sizes, shares, seed, draw, priority) -> None:
    examples = mixed(sizes, shares[: len(sizes)])
    scale = 0.5 if priority else 0.0
    stream = Stream(examples, seed, prompts_per_step=3, priority_scale=scale)
    drawn = [example for step in range(20) for example in stream.at(step, draw)]
    for number in range(len(sizes)):
        own = [example for example in examples if example.meta["task"] == f"task{number}"]
        found = [example for example in drawn if example.meta["task"] == f"task{number}"]
        alone = Stream(own, seed, prompts_per_step=1, priority_scale=scale, interleave=False)
        assert found == [alone.at(place, draw)[0] for place in range(len(found))]


@given(sizes, st.integers(0, 99), st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2)), max_size=8))
def test_the_order_of_asking_does_not_matter(sizes, seed, asked) -> None:
    examples = mixed(sizes, [2, 1, 3, 1][: len(sizes)])
    used = Stream(examples, seed, 4)
    for step, draw in asked:
        assert used.at(step, draw) == Stream(examples, seed, 4).at(step, draw)
