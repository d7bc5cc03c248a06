"""The turns of an answer as a tree: where each one goes on, told from the tokens alone, so of old runs as well.

A row that begins with all that an earlier turn had read and written goes on from that turn (docs/agents.md). A run of
turns in one row is a branch; it is drawn in a lane of its own."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lmgym.logs.traces.trace import TraceRow


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
    """The turns in their order, each a `TreeTurn` as a dictionary. Empty for one row, which is no tree, and for an
    encoder-decoder, whose turns are rows all.

    Example: session_tree(episode.rows)[2]["reason"] -> "goes back behind turn 1" """
    if len(rows) < 2 or any(row.source is not None or not len(row.actions) for row in rows):
        return []
    found, ends = list[TreeTurn](), list[_Turn]()  # in order
    free = list[int]()  # of each lane, the first turn that may stand in it
    for number, row in enumerate(rows):
        before, own = row.tokens[: row.actions[0]].tobytes(), _turns_of(row)
        parent = _longest([turn for turn in ends if before.startswith(turn.end)], lambda turn: turn.end)
        reason = _reason(before, parent, ends) if ends else ""
        begins = own[0].number if parent is None else parent.number
        lane = next((place for place, until in enumerate(free) if until <= begins), len(free))
        free[lane : lane + 1] = [own[-1].number]  # a later branch from its last turn may go straight on
        for turn in own:
            new = len(parent.end) // row.tokens.itemsize if parent is not None else 0
            found.append(TreeTurn(turn.number, number, parent and parent.number, new, lane, reason))
            parent, reason = turn, ""
        ends += own
    return [asdict(turn) for turn in found]


@dataclass(frozen=True)
class _Turn:
    """A turn with the bytes of all tokens before its answer, and up to its end."""

    number: int
    before: bytes
    end: bytes


def _turns_of(row: TraceRow) -> list[_Turn]:
    found = []
    for number in np.unique(row.turn):
        places = row.actions[row.turn == number]
        found.append(_Turn(int(number), row.tokens[: places[0]].tobytes(), row.tokens[: places[-1] + 1].tobytes()))
    return found


def _longest(turns: Sequence[_Turn], of: Any) -> _Turn | None:
    """The turn with the longest beginning in common; of equal ones the newest."""
    return max(turns, key=lambda turn: (len(of(turn)), turn.number), default=None)


def _reason(before: bytes, parent: _Turn | None, earlier: Sequence[_Turn]) -> str:
    """Why a row begins: what stands before its first answer, beside the turns before it."""
    again = next((turn for turn in reversed(earlier) if turn.before == before), None)
    if again is not None:
        return f"asks again what turn {again.number + 1} has answered"
    # An answer that the row holds otherwise than it was: all before it is the same, and then other words follow.
    known = len(parent.end) if parent is not None else 0
    other = [turn for turn in earlier if len(turn.before) >= max(known, 1) and before.startswith(turn.before)]
    changed = _longest(other, lambda turn: turn.before)
    if changed is not None:
        return f"holds other words than turn {changed.number + 1} has said"
    if parent is None:
        return "begins anew: no answer so far stands in it"
    return f"goes back behind turn {parent.number + 1}"
