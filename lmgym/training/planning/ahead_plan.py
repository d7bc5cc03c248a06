"""Who samples what when with `engine.ahead`, as a chart in text, and how far ahead is worth while.

The schedule is that of training/ahead.py, with seconds that were measured: the draws of the steps are sampled one after
the other; that of step s is begun when the answers of step s - K are there, and the update of step s when its own are.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmgym.config.schema import Config
from lmgym.core.errors import LmgymError
from lmgym.inference.kinds import MOST_AHEAD
from lmgym.logs.timings import timing_columns
from lmgym.training.planning.report import Report

COLUMNS = 60  # of a chart
SHOWN = 5  # steps of a chart
GAIN = 0.03  # a step less that is worth another version of the weights

Span = tuple[float, float]


@dataclass(frozen=True)
class Schedule:
    """From when to when each step's answers are sampled, and its update runs, in seconds.

    Example: schedule([1.0, 1.0], [2.0, 2.0], ahead=1).updated -> [(1.0, 3.0), (3.0, 5.0)]"""

    sampled: list[Span]
    updated: list[Span]

    @property
    def seconds(self) -> float:
        """Until the last update is done."""
        return self.updated[-1][1]


def schedule(rollouts: Sequence[float], updates: Sequence[float], ahead: int, in_turn: bool = False) -> Schedule:
    """The schedule of steps whose draws and updates take so many seconds. `in_turn`: one process does both.

    Example: schedule([2.0, 2.0, 2.0], [1.0, 1.0, 1.0], ahead=1).seconds -> 7.0"""
    sampled: list[Span] = [(0.0, rollouts[0])]
    updated: list[Span] = []
    free = 0.0  # when the update before is done
    for step, update in enumerate(updates):
        if step == len(sampled):  # not sampled ahead
            sampled.append((free, free + rollouts[step]))
        there = max(free, sampled[step][1])
        for following in range(len(sampled), min(step + ahead, len(updates) - 1) + 1):
            begin = max(there, sampled[-1][1])
            sampled.append((begin, begin + rollouts[following]))
        begin = max(there, sampled[-1][1]) if in_turn else there
        updated.append((begin, begin + update))
        free = begin + update
    return Schedule(sampled, updated)


def chart(rollout: float, update: float, ahead: int, in_turn: bool = False) -> list[str]:
    """The first steps as lines of text: the digit of a step where it is sampled or updates, a dot where a part waits.

    Example: chart(1.0, 1.0, ahead=1)[0] -> "answers: 0000000000111111111122222222223333333333444444444.........."
    """
    plan = schedule([rollout] * SHOWN, [update] * SHOWN, ahead, in_turn)
    scale = COLUMNS / plan.seconds
    rows = []
    for name, spans in (("answers", plan.sampled), ("updates", plan.updated)):
        line = ["."] * COLUMNS
        for step, (begin, end) in enumerate(spans):
            first = min(int(begin * scale), COLUMNS - 1)
            for column in range(first, max(first + 1, int(end * scale))):
                line[column] = str(step % 10)
        rows.append(f"{name}: {''.join(line)}")
    weights = ", ".join(f"{step} by weights {max(0, step - ahead)}" for step in range(SHOWN))
    return [*rows, f"answers of step {weights}, and so on (weights s: after s updates)"]


def chunk_lines(rollout: float, update: float, ahead: int, chunk: int, most: int, in_turn: bool = False) -> list[str]:
    """The plan of answers in chunks of so many tokens, of at most `most` tokens, as lines of text: the chart, in which
    a call of the engine has the digit of the step that it completes; what each call samples; and who is held up.

    Example: chunk_lines(2.0, 2.0, ahead=2, chunk=64, most=128)[-1] -> "no answer holds its step up: 2 chunks of 64
    tokens hold sampling.max_new_tokens (128)" """
    parts = [
        f"{chunk * number} to {chunk * (number + 1) - 1} of step u + {ahead - number}" for number in range(ahead - 1)
    ]
    last = f"from {chunk * (ahead - 1)} on of step u + 1"
    calls = f"beside update u, weights u sample the tokens {', '.join(parts)}, and {last}"
    room = f"{ahead} chunks of {chunk} tokens"
    if ahead * chunk >= most:
        who = f"no answer holds its step up: {room} hold sampling.max_new_tokens ({most})"
    else:
        who = (
            f"answers of more than {ahead * chunk} tokens hold their step up: {room} are less than "
            f"sampling.max_new_tokens ({most}); with engine.chunk {-(-most // ahead)} none would"
        )
    return [*chart(rollout, update, 1, in_turn)[:2], calls, who]


def least_ahead(rollouts: Sequence[float], updates: Sequence[float]) -> tuple[int, list[float]]:
    """How many steps ahead keep the slower of generators and trainer busy: the least number that takes at most GAIN
    more than the most that is allowed. And the seconds of a step for each number, from 0.

    Example: least_ahead([1.0] * 50, [2.0] * 50)[0] -> 1"""
    seconds = [schedule(rollouts, updates, ahead).seconds / len(updates) for ahead in range(MOST_AHEAD + 1)]
    return next(ahead for ahead, own in enumerate(seconds) if own <= (1 + GAIN) * seconds[-1]), seconds


def measured_steps(folder: Path, stage: int) -> tuple[list[float], list[float]]:
    """The seconds that a run's steps took to sample and score, and to update, as its records say; empty lists where
    they do not. Raises LmgymError for records that are damaged."""
    try:
        updates = {one["step"]: float(one["seconds/update"]) for one in _records(folder / "metrics.jsonl", stage)}
        rollouts = {one["step"]: _longest(one) for one in _records(folder / "timings.jsonl", stage)}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LmgymError(
            f"{folder}: metrics.jsonl and timings.jsonl are not the records of a run ({type(error).__name__}: {error})"
        ) from error
    steps = sorted(step for step, seconds in rollouts.items() if step in updates and seconds > 0)
    return [rollouts[step] for step in steps], [updates[step] for step in steps]


def ahead_sentence(rollouts: Sequence[float], updates: Sequence[float], ahead: int) -> str:
    """Which number of steps ahead the seconds speak for.

    Example: "with engine.ahead 0, 1, 2, 4, 8 a step takes 3, 2, 2, 2, 2 s, if generators have processors of their own;
    1 keeps the slower part busy\""""
    best, seconds = least_ahead(rollouts, updates)
    shown = sorted({0, 1, 2, 4, 8, ahead})
    numbers = ", ".join(f"{seconds[one]:.3g}" for one in shown)
    return (
        f"with engine.ahead {', '.join(map(str, shown))} a step takes {numbers} s, if generators have processors of "
        f"their own; {best} keeps the slower part busy"
    )


def _records(path: Path, stage: int) -> list[dict[str, Any]]:
    """The records of a stage's steps; a kill may have torn the last line."""
    if not path.is_file():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    trees = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [tree for tree in trees if tree["kind"] == "train" and tree["stage"] == stage]


def _longest(record: dict[str, Any]) -> float:
    """The seconds until the last answer of a step was sampled and scored."""
    columns = timing_columns(record, max([1, *(len(own) for own in record.values() if isinstance(own, list))]))
    return sum(max((one for one in column if one is not None), default=0.0) for column in columns.values())


def report_ahead(
    report: Report, config: Config, index: int, expected: tuple[float, float], folder: Path | None
) -> None:
    """Report who samples what when, and which number of steps ahead is worth while: by the seconds of the steps that a
    run folder tells of, else by those that were `expected` of sampling and of the rest."""
    engine, in_turn = config.engine, config.engine.kind.shares_weights
    if engine.chunk is not None:  # a run's records have the seconds of answers, which several calls have sampled
        report.note(f"the plan of engine.ahead: {engine.ahead}, chunk: {engine.chunk}, by a few answers:")
        most = config.stages[index].sampling.max_new_tokens
        report.note(*chunk_lines(*expected, engine.ahead, engine.chunk, most, in_turn))
        return
    rollouts, updates = measured_steps(folder, index) if folder is not None else ([], [])
    source = f"the {len(rollouts)} steps that were taken"
    if not rollouts:
        rollouts, updates, source = [expected[0]] * 50, [expected[1]] * 50, "a few answers, as if all steps were equal"
    means = (sum(rollouts) / len(rollouts), sum(updates) / len(updates))
    report.note(f"the plan of engine.ahead: {engine.ahead}, by {source}:")
    report.note(*chart(*means, engine.ahead, in_turn))
    report.note(ahead_sentence(rollouts, updates, engine.ahead))
