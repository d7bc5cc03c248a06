"""The tree of a session, told from tokens: parents, reasons, lanes that do not cross."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgym.logs.traces.trace import TraceRow, row_of_turns
from lmgym.types import Turn
from lmgym.viewer.session_tree import session_tree
from tests.contract.test_agent_program import played


def rows_of(parents: list[int | None]) -> list[TraceRow]:
    """The rows of a session whose turn n goes on from turn parents[n], each with words of its own."""
    turns, rows, whole = list[Turn](), list[list[Turn]](), list[list[int]]()
    for number, parent in enumerate(parents):
        asked, said = [1000 + number, 7], [2000 + number, 2]
        before = whole[parent] if parent is not None else []
        goes_on = parent is not None and parent == number - 1
        turns.append(Turn([*([] if goes_on else before), *asked], said, [-1.0, -1.0], restart=not goes_on))
        whole.append([*before, *asked, *said])
        if goes_on:
            rows[-1].append(turns[-1])
        else:
            rows.append([turns[-1]])
    starts = [sum(len(row) for row in rows[:place]) for place in range(len(rows))]
    return [row_of_turns(row, start) for row, start in zip(rows, starts, strict=True)]


trees = st.lists(st.integers(-1, 99), max_size=14).map(
    lambda drawn: [None, *((None if one < 0 else one % (n + 1)) for n, one in enumerate(drawn))]
)


@given(trees)
def test_each_turn_goes_on_from_where_it_was_asked(parents: list[int | None]) -> None:
    rows = rows_of(parents)
    tree = session_tree(rows)
    if len(rows) < 2:
        return
    assert [turn["parent"] for turn in tree] == parents
    for turn in tree:  # `new` is where its own words begin
        row = rows[turn["row"]]
        assert row.tokens[turn["new"]] == 1000 + turn["turn"]
        goes_on = turn["parent"] == turn["turn"] - 1 or turn["turn"] == 0
        assert bool(turn["reason"]) == (not goes_on)


@given(trees)
def test_lines_do_not_meet(parents: list[int | None]) -> None:
    tree = session_tree(rows_of(parents))
    taken = dict[tuple[int, int], int]()  # lane and the gap under a line, by the turn that its line leads to
    for turn in tree:
        for gap in range(turn["turn"] if turn["parent"] is None else turn["parent"], turn["turn"]):
            assert taken.setdefault((turn["lane"], gap), turn["turn"]) == turn["turn"]
        # A line passes no other turn's dot.
        between = range((turn["turn"] if turn["parent"] is None else turn["parent"]) + 1, turn["turn"])
        assert not any(tree[other]["lane"] == turn["lane"] for other in between)


@pytest.mark.processes
def test_reasons_of_a_program() -> None:
    episode = played("branches", [f"t{number}" for number in range(13)])
    starts, rows = [0], episode.rows()
    for row in rows:
        starts.append(starts[-1] + len(row))
    tree = session_tree([row_of_turns(row, start) for row, start in zip(rows, starts, strict=False)])
    anew = "begins anew: no answer so far stands in it"
    assert [(turn["parent"], turn["reason"]) for turn in tree] == [
        (None, ""),
        (0, ""),
        (0, "goes back behind turn 1"),
        (2, ""),
        (1, "goes back behind turn 2"),
        (1, "asks again what turn 5 has answered"),
        (None, "holds other words than turn 1 has said"),
        (0, "goes back behind turn 1"),
        (0, "asks again what turn 8 has answered"),
        (8, ""),
        (None, anew),
        (10, ""),
        (None, anew),
    ]


def test_one_row_is_no_tree() -> None:
    assert session_tree(rows_of([None, 0, 1])) == []
