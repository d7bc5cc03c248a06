"""What `lmgym why` prints and writes."""

from collections.abc import Iterator
from typing import Any

from lmgym.experiments.what_if.difference import cautions
from lmgym.experiments.why.why import Group, Why
from lmgym.logs.console import Console
from lmgym.logs.formatting import decimal, shorten

SHOWN = 10  # groups at either end
TEXT = 60  # characters


def print_why(found: Why, console: Console) -> None:
    """Print the answer over the checkpoints, and the groups of the step."""
    answer = shorten(found.example.references[0], TEXT)
    part = f"{found.tokens} tokens" if found.token is None else f"its token {shorten(found.token, TEXT)!r}"
    console.say(f"example {found.example.id}, answer '{answer}' ({part})")
    rows, before = [], None
    for point in found.points:
        change = "" if before is None else f"{point.logprob - before:+.4g}"
        rows.append((str(point.steps), decimal(point.logprob), change))
        before = point.logprob
    console.table("log-probability in nats", ("after steps", "answer", "change"), rows)
    for sentence in sentences(found):
        console.say(sentence)
    for title, groups in (
        ("groups that raised it most", [one for one in found.groups if one.influence > 0][:SHOWN]),
        ("groups that lowered it most", [one for one in found.groups[::-1] if one.influence < 0][:SHOWN]),
    ):
        if groups:
            console.table(title, ("nats", "example", "scores", "an answer"), [_row(one) for one in groups])


def sentences(found: Why) -> Iterator[str]:
    """What the step did to the answer, and by what."""
    parts = found.parts
    yield from cautions(found.unlike, found.reason)
    yield (
        f"step {found.step + 1} changed it by {found.real:+.3g}; by first order {parts.total:+.3g}: "
        f"{sum(parts.groups.values()):+.3g} by its {len(parts.groups)} groups, {parts.momentum:+.3g} by the momentum "
        f"of steps before, {parts.decay:+.3g} by weight decay"
    )
    if found.optimizer_steps > 1:
        yield (
            f"that was {found.optimizer_steps} optimizer steps, which are split as if they were one: read the order "
            "of the groups, not the numbers"
        )
    if not parts.preconditioned:
        yield "the optimizer scales gradients in a way that is not known here: read the order, not the numbers"


def _row(group: Group) -> tuple[str, ...]:
    best = max(range(len(group.answers)), key=lambda index: group.scores[index] or 0.0)
    scores = ", ".join("none" if score is None else f"{score:.3g}" for score in group.scores)
    return f"{group.influence:+.3g}", group.example, shorten(scores, TEXT), shorten(group.answers[best], TEXT)


def as_json(found: Why) -> dict[str, Any]:
    """Everything, for programs; steps count from 0, as in metrics.jsonl."""
    return {
        "example": found.example.id,
        "answer": found.example.references[0],
        "tokens": found.tokens,
        "token": found.token,
        "points": [{"steps": point.steps, "logprob": point.logprob} for point in found.points],
        "stage": found.stage,
        "step": found.step,
        "change": found.real,
        "first_order": found.parts.total,
        "momentum": found.parts.momentum,
        "decay": found.parts.decay,
        "optimizer_steps": found.optimizer_steps,
        "preconditioned": found.parts.preconditioned,
        "unlike": found.unlike,
        "said": [*sentences(found)],
        "groups": [vars(group) for group in found.groups],
    }
