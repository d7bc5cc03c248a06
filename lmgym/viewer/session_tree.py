"""The turns of an answer as a tree: where each one goes on, told from the tokens alone, so of old runs as well.

A row that begins with all that an earlier turn had read and written goes on from that turn (docs/agents.md). A run of
turns in one row is a branch; it is drawn in a lane of its own."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lmgym.logs.traces.trace import Integers, TraceRow

MOST_TURNS = 1000


@dataclass(frozen=True)
class TreeTurn:
    """A turn in the tree. `parent` is the turn that it goes on from, None for one that begins a conversation; the
    tokens of its row from place `new` on are what it has read since. `reason` says why it is not where the turn before
    it has ended (empty if it is), and `lane` where it is drawn.

    Example: TreeTurn(turn=2, row=1, parent=0, new=9, lane=1, reason="goes back behind turn 1")"""

    turn: int
    row: int
    parent: int | None
    new: int
    lane: int
    reason: str


def session_tree(rows: Sequence[TraceRow]) -> list[dict[str, Any]]:
    """The turns in their order, each a `TreeTurn` as a dictionary. Empty for one row, which is no tree, for an
    encoder-decoder, whose turns are rows all, and for more than MOST_TURNS, which no page can show.

    Example: session_tree(episode.rows)[2]["reason"] -> "goes back behind turn 1" """
    numbers = [int(number) for row in rows for number in np.unique(row.turn)]
    if len(rows) < 2 or len(numbers) > MOST_TURNS or numbers != list(range(len(numbers))):
        return []
    if any(row.source is not None or not len(row.actions) for row in rows):
        return []
    found, earlier = list[TreeTurn](), list[_Turn]()
    free = list[int]()  # of each lane, the first turn that may stand in it
    for number, row in enumerate(rows):
        before, own = row.tokens[: row.actions[0]], _turns_of(row)
        parent = _longest([turn for turn in earlier if _begins(before, turn.end)], lambda turn: turn.end)
        reason = _reason(before, parent, earlier) if earlier else ""
        begins = own[0].number if parent is None else parent.number
        lane = next((place for place, until in enumerate(free) if until <= begins), len(free))
        free[lane : lane + 1] = [own[-1].number]  # a later branch from its last turn may go straight on
        for turn in own:
            behind = (parent.number, len(parent.end)) if parent is not None else (None, 0)
            found.append(TreeTurn(turn.number, number, behind[0], behind[1], lane, reason))
            parent, reason = turn, ""
        earlier += own
    return [asdict(turn) for turn in found]


@dataclass(frozen=True, eq=False)
class _Turn:
    """A turn with all tokens before its answer, and all up to its end: views of its row."""

    number: int
    before: Integers
    end: Integers


def _turns_of(row: TraceRow) -> list[_Turn]:
    found = []
    for number in np.unique(row.turn):
        places = row.actions[row.turn == number]
        found.append(_Turn(int(number), row.tokens[: places[0]], row.tokens[: places[-1] + 1]))
    return found


def _begins(tokens: Integers, beginning: Integers) -> bool:
    """Whether the tokens begin with these."""
    size = len(beginning)
    return size <= len(tokens) and tokens[size - 1] == beginning[-1] and bool((tokens[:size] == beginning).all())


def _longest(turns: Sequence[_Turn], of: Callable[[_Turn], Integers]) -> _Turn | None:
    """The turn with the longest beginning in common; of equal ones the newest."""
    return max(turns, key=lambda turn: (len(of(turn)), turn.number), default=None)


def _reason(before: Integers, parent: _Turn | None, earlier: Sequence[_Turn]) -> str:
    """Why a row is a branch of its own: its prompt, compared with the earlier turns."""
    known = len(parent.end) if parent is not None else 1
    same = [turn for turn in earlier if len(turn.before) >= known and _begins(before, turn.before)]
    nearest = _longest(same, lambda turn: turn.before)
    if nearest is not None and len(nearest.before) == len(before):
        return f"asks again what turn {nearest.number + 1} has answered"
    if nearest is not None:  # all before its answer is the same, and then other words follow
        return f"holds other words than turn {nearest.number + 1} has said"
    if parent is None:
        return "begins anew: no answer so far stands in it"
    return f"goes back behind turn {parent.number + 1}"
