"""What `lmgym what-if` prints: in plain words what a changed recipe would have made of a step."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from lmgym.experiments.what_if.difference import AnswerChange, Direction, StepDifference, cautions
from lmgym.experiments.what_if.what_if import WhatIf
from lmgym.logs.console import Console
from lmgym.logs.formatting import decimal, shorten

SHOWN = 6  # answers that change most
TEXT = 48  # characters of each


def print_what_if(result: WhatIf, console: Console) -> None:
    """Print where the step stands, the proof, and what would have been different."""
    for sentence in introduction(result):
        console.say(sentence)
    if result.difference is None:
        return
    difference = result.difference
    console.table("the step", ("", "as it was", "what if"), list(_numbers(difference)))
    changed = sorted(difference.answers, key=_size, reverse=True)
    changed = [one for one in changed if _size(one) > 0][:SHOWN]
    if changed:
        rows = [_row(one) for one in changed]
        console.table("the answers that change most", ("answer", "text", "score", "mean advantage"), rows)
    for sentence in conclusion(difference):
        console.say(sentence)


def as_json(result: WhatIf) -> dict[str, Any]:
    """Everything, for programs; stages and steps count from 0, as in metrics.jsonl."""
    tree: dict[str, Any] = {"stage": result.question.stage, "step": result.begin.step, "said": [*introduction(result)]}
    tree |= {"changes": result.question.changes, "unlike": result.unlike, "compared": result.compared}
    if (difference := result.difference) is None:
        return tree
    tree["said"] += conclusion(difference)
    names = ("gradient", "moved", "effective", "losses")
    tree |= {name: value for name, value in asdict(difference).items() if name in names}
    tree["numbers"] = [list(row) for row in _numbers(difference)]
    changed = sorted(difference.answers, key=_size, reverse=True)
    return tree | {"answers": [asdict(one) | {"flips": one.flips} for one in changed]}


def introduction(result: WhatIf) -> Iterator[str]:
    """Which step it is, and whether it came out as the run has recorded it."""
    question, begin = result.question, result.begin
    count, groups = len(result.real.answers), len({one.group for one in result.real.answers.values()})
    samples = question.real.stages[question.stage].source.samples
    how = "as recorded" if result.real.recorded else "sampled again" if samples else "of the data"
    yield f"{question.folder}, stage {question.name}, step {begin.step + 1}: {count} answers in {groups} groups, {how}"
    if not result.unlike:
        yield (
            f"as it was, the step gives again what the run has recorded: {result.compared} numbers and columns, "
            "bit for bit"
        )
    yield from cautions(result.unlike, result.reason)
    for change in question.changes:
        yield f"what if {change}"
    if not question.changes:
        yield "nothing was changed; add key=value, such as algorithm.kl_coefficient=0.1 or optimizer.learning_rate=1e-5"


def conclusion(difference: StepDifference) -> Iterator[str]:
    """What the changed recipe would have done to the update, in words."""
    flips = sum(one.flips for one in difference.answers)
    muted = sum(one.advantage[0] != 0 == one.advantage[1] for one in difference.answers)
    woken = sum(one.advantage[0] == 0 != one.advantage[1] for one in difference.answers)
    yield (
        f"of {len(difference.answers)} answers {flips} would be pushed the other way, {muted} no more, and {woken} "
        "that were not pushed would be"
    )
    if difference.gradient is not None:
        yield f"the gradient {_direction(difference.gradient)}"
    yield f"the weights' step {_direction(difference.moved)}"
    if difference.effective is not None:
        size, count = difference.effective
        yield (
            f"behind the changed step the next step's {count} recorded answers would still be worth {size:.1f} answers "
            "of the policy's own (effective sample size)"
        )


def _numbers(difference: StepDifference) -> Iterator[tuple[str, str, str]]:
    one, other = difference.groups
    yield "groups with a signal", f"{one} of {difference.group_count}", f"{other} of {difference.group_count}"
    yield "tokens that are pushed", str(difference.tokens[0]), str(difference.tokens[1])
    for place, name in enumerate(("answers above their baseline", "answers below it")):
        sign = 1 - 2 * place
        counts = [sum(sign * answer.advantage[side] > 0 for answer in difference.answers) for side in (0, 1)]
        yield name, str(counts[0]), str(counts[1])
    for name, (real, changed) in difference.losses.items():
        yield name, decimal(real), decimal(changed)


def _direction(direction: Direction) -> str:
    if direction.equal:
        return "is the same, bit for bit"
    if math.isnan(direction.cosine):
        return "is zero on one of the two sides"
    return f"has cosine {direction.cosine:.4f} to the real one, and {direction.ratio:.3g} times its length"


def _size(one: AnswerChange) -> float:
    return abs(one.advantage[1] - one.advantage[0])


def _row(one: AnswerChange) -> tuple[str, str, str, str]:
    scores = ["-" if score is None else decimal(score) for score in one.score]
    score = scores[0] if scores[0] == scores[1] else " -> ".join(scores)
    advantages = " -> ".join(f"{advantage:+.3f}" for advantage in one.advantage)
    return str(one.index), shorten(one.text, TEXT), score, advantages + " (other way)" * one.flips
