"""How work is cut into shares, and what travels between ranks."""

import json
import math
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.types import Episode, Example, Message, RecipeText, Turn


class OneOf(Ranks):
    """A rank that shares work out and meets nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


SIZES = st.integers(1, 6)
COSTS = st.lists(st.floats(0, 1e6), max_size=40)


@given(SIZES, COSTS)
def test_shares_are_disjoint_and_are_everything(size: int, costs: Sequence[float]) -> None:
    parts = list(range(len(costs)))
    shares = OneOf(0, size).shares(parts, costs)
    assert len(shares) == size
    assert sorted(part for share in shares for part in share) == parts
    assert all(share == sorted(share) for share in shares)  # in their order


@given(SIZES, COSTS)
def test_no_rank_has_much_more_to_do(size: int, costs: Sequence[float]) -> None:
    """The bound of Graham's list scheduling (SIAM J. Appl. Math. 17, 1969): at most one part above the mean."""
    loads = [sum(share) for share in OneOf(0, size).shares(costs, costs)]
    assert max(loads) <= sum(costs) / size + max(costs, default=0.0) + 1e-6 * sum(costs)


@given(SIZES, st.lists(st.integers(0, 5), max_size=30))
def test_groups_stay_together(size: int, sizes: Sequence[int]) -> None:
    items = [(group, number) for group, count in enumerate(sizes) for number in range(count)]
    shares = [OneOf(rank, size).share_groups(items, group=lambda item: item[0]) for rank in range(size)]
    assert sorted(item for share in shares for item in share) == items
    for group in range(len(sizes)):
        assert sum(any(item[0] == group for item in share) for share in shares) <= 1


def test_one_process_meets_itself() -> None:
    assert ALONE.shares("abc", [1, 2, 3]) == [list("abc")]
    assert ALONE.gather(b"x") == [b"x"] and ALONE.totals({"a": 0.1}) == {"a": 0.1}
    assert ALONE.agree(True) and not ALONE.agree(False)
    assert ALONE.first


def test_totals_are_sums_over_the_ranks() -> None:
    """By name; a name that a rank lacks adds nothing."""

    class Two(OneOf):
        def gather(self, own: bytes) -> list[bytes]:
            return [own, b'{"a": 0.25, "b": 1.0}']

    assert Two(0, 2).totals({"a": 0.5, "c": 2.0}) == {"a": 0.75, "b": 1.0, "c": 2.0}


def test_an_episode_travels_bit_for_bit() -> None:
    """With numbers that have no short decimal form, kept sets of both kinds, and a message that the recipe wrote."""
    kept = [np.array([[3, 255], [0, 1]], dtype=np.uint8), np.array([[7, -1, 5]], dtype=np.int32)]
    turns = [
        Turn([1, 2], [3, 4], [-1 / 3, math.nextafter(-2.0, 0.0)], "ab", "stop", reward=0.1 + 0.2, kept=kept[0]),
        Turn([5], [6], [-0.0], "c", "eos", restart=True, kept=kept[1], token_rewards=[1e-300]),
    ]
    messages: list[Message] = [
        {"role": "system", "content": RecipeText("<|x|>")},
        {"role": "user", "content": "é\ud7ff\u2028"},
    ]
    whole = Episode(Example("a", "?", ("!",), {"n": 1}), 3, 9, turns, messages=messages, score=0.3, baseline=-0.1)
    back = Episode.from_json(json.loads(json.dumps(whole.to_json())))
    for turn, other in zip(whole.turns, back.turns, strict=True):
        assert turn.kept is not None and other.kept is not None
        assert turn.kept.dtype == other.kept.dtype and np.array_equal(turn.kept, other.kept)
        turn.kept = other.kept = None
    assert back == whole
    assert [getattr(message["content"], "spans", ()) for message in back.messages] == [((0, 5),), ()]
