"""Rollouts cut into units: every request is computed once, conversations stay in their unit, units have one size."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lmgym.inference.base import Request
from lmgym.inference.pool.units import Units


def requests(conversations: list[int | None]) -> list[Request]:
    return [Request((5,), key=place, conversation=own) for place, own in enumerate(conversations)]


@given(st.integers(1, 50), st.integers(1, 9))
def test_answers_of_one_turn_are_cut_in_order(count: int, size: int) -> None:
    parts = Units(size).cut(requests([None] * count))
    assert [place for part in parts for place in part.places] == [*range(count)]
    assert all(len(part.places) == size for part in parts[:-1]) and 1 <= len(parts[-1].places) <= size
    assert all(part.unit is None for part in parts)


# A life of conversations: in each turn some begin, and of those that are alive some end.
lives = st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 30), max_size=4)), min_size=1, max_size=12)


@given(lives, st.integers(1, 5))
def test_a_conversation_stays_in_its_unit_and_units_are_never_larger(
    life: list[tuple[int, list[int]]], size: int
) -> None:
    units, alive, home, members = Units(size), list[int](), dict[int, int](), Counter[int]()
    kept: set[int] = set()  # units that someone may go on with
    for begin, ending in life:
        for _ in range(begin):
            alive.append(len(home) + len([one for one in alive if one not in home]))
        if alive:
            parts = units.cut(requests([*alive]))
            assert sorted(place for part in parts for place in part.places) == [*range(len(alive))]
            for part in parts:
                assert part.unit is not None
                kept.add(part.unit)
                for conversation in (alive[place] for place in part.places):
                    if conversation not in home:
                        home[conversation] = part.unit
                        members[part.unit] += 1
                    assert home[conversation] == part.unit
            assert max(members.values()) <= size
        over = sorted({alive[number % len(alive)] for number in ending}) if alive else []
        assert units.forget(over) == {
            unit: [one for one in over if home[one] == unit] for unit in dict.fromkeys(home[one] for one in over)
        }
        alive = [one for one in alive if one not in over]
        dropped = units.over(sorted(kept))
        assert not {home[one] for one in alive} & {*dropped}
        kept -= {*dropped}
    units.clear()
    assert {*units.over(sorted(kept))} == kept


@given(st.integers(1, 20), st.integers(1, 7), st.integers(1, 20))
def test_a_rollout_does_not_depend_on_those_before_it(before: int, size: int, count: int) -> None:
    """A resumed run has not seen the rollouts of the first half."""
    used, fresh = Units(size), Units(size)
    used.cut(requests([*range(before)]))
    used.forget([*range(before)])
    now = requests([*range(100, 100 + count)])
    assert [part.places for part in used.cut(now)] == [part.places for part in fresh.cut(now)]
