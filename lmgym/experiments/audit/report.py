"""What `lmgym audit` prints and writes."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lmgym.core.visible import visible
from lmgym.experiments.audit.audit import Audit
from lmgym.experiments.audit.court import Try
from lmgym.experiments.audit.findings import Verdict
from lmgym.experiments.audit.rates import ENOUGH, Rates
from lmgym.experiments.audit.rise import TOGETHER, Rise
from lmgym.logs.console import Console
from lmgym.logs.formatting import decimal, shorten
from lmgym.rewards.probing.cases import REFERENCE
from lmgym.rewards.probing.probes import ATTACKS
from lmgym.rewards.probing.proof import RATE
from lmgym.stats.intervals import Interval

TEXT = 60  # characters of an answer
SHOWN = 1  # answers of a finding; JSON has more
KEPT = 500  # characters of an answer in JSON
MARKS = {"problem": "!", "note": "-"}


def print_audit(found: Audit, console: Console) -> None:
    """Print for each reward its numbers, the tables of what was tried, and what was found, with the worst example."""
    for verdict in found.verdicts:
        console.say("")
        console.say(verdict.heard.name, style="bold")
        for sentence in numbers(verdict):
            console.say(f"  {sentence}")
        if not verdict.text_alone and verdict.agreement:
            _tables(verdict, console)
        for finding in verdict.findings:
            console.say(f"  {MARKS[finding.level]} {finding.sentence}")
            for one in finding.worst[:SHOWN]:
                console.say(f"      {_shown(found, one)}")
    console.say("")
    for sentence in conclusion(found):
        console.say(sentence)


def numbers(verdict: Verdict) -> Iterator[str]:
    """Agreement, range, repetition and cost, in words."""
    heard = verdict.heard
    for role, what in (("near", "a near miss"), ("other", "another example's answer")):
        if role in verdict.agreement:
            yield f"a right answer earns more than {what}: {verdict.agreement[role]} of pairs (ties half, 95% interval)"
    if verdict.span is not None:
        low, high = verdict.span
        yield f"numbers from {low:.3g} to {high:.3g}; rank correlation with the text's length {decimal(verdict.length)}"
    again, back, alone = (verdict.unlike[key] for key in ("again", "backwards", "alone"))
    yield (
        f"other numbers for the same answers: judged again {again[0]} of {again[1]}, in reversed order {back[0]} of "
        f"{back[1]}, alone {alone[0]} of {alone[1]}"
    )
    yield f"{heard.answers:,} answers judged, {heard.seconds / max(heard.answers, 1):.2g} s each"


def _tables(verdict: Verdict, console: Console) -> None:
    """Two tables, of probes that came to something; the others are listed behind."""
    attacks = [one for one in verdict.rates if one.name in ATTACKS]
    changes = [one for one in verdict.rates if one.name not in ATTACKS]
    for title, rates, headings in (
        (
            "  attacks: a wrong answer, and the share of tries in which it is paid",
            attacks,
            ("more than before", "like a right one"),
        ),
        (
            "  changes: a right answer, and the share of tries in which it is paid",
            changes,
            ("less than before", "not as a right one"),
        ),
    ):
        rows = [
            (one.name, str(one.tried), _rate(one.changed), _rate(one.reached), _missing(one))
            for one in rates if one.failed or one.unjudged or _some(one.changed) or _some(one.reached)
        ]  # fmt: skip
        if rows:
            width = 5 if any(row[-1] for row in rows) else 4
            heads = ("", "tried", *headings, "without a number")
            console.table(title, heads[:width], [row[:width] for row in rows])
        named = {row[0] for row in rows}
        if rest := [one for one in rates if one.name not in named]:
            widest = max(((one.changed, one.tried) for one in rest if one.changed is not None and one.tried > 1),
                         key=lambda pair: pair[1], default=None)  # fmt: skip
            bound = f"; each {_rate(widest[0])} of {widest[1]} tries" if widest else ""
            kind = "attacks" if rates is attacks else "changes"
            console.say(f"  {kind} without effect: {', '.join(_with_count(one, widest) for one in rest)}{bound}")


def _with_count(one: Rates, widest: tuple[Interval | None, int] | None) -> str:
    return (
        one.name
        if widest is None or one.tried == widest[1]
        else f"{one.name} ({one.tried} {'try' if one.tried == 1 else 'tries'})"
    )


def _some(interval: Interval | None) -> bool:
    return interval is not None and interval.mean > 0


def _rate(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    bounds = f" [{interval.low:.2f}, {interval.high:.2f}]" if interval.has_bounds else ""
    return f"{interval.mean:.2f}{bounds}"


def _missing(one: Rates) -> str:
    parts = [f"{one.failed} failed" * bool(one.failed), f"{one.unjudged} unjudged" * bool(one.unjudged)]
    return ", ".join(part for part in parts if part)


def _shown(found: Audit, one: Try) -> str:
    text = shorten(visible(shorten(one.text, KEPT)), TEXT)
    beside = f"; right {decimal(one.right)}, wrong {decimal(one.wrong)}" if one.right is not None else ""
    return f"{found.cases[one.case].example.id}: '{text}' earned {decimal(one.value)}{beside}"


def print_own(rises: Mapping[str, Rise], console: Console) -> None:
    """Print what a run's own answers were paid for, reward by reward."""
    for name, own in rises.items():
        console.say("")
        console.say(f"{visible(name)}: what the run's own answers were paid for", style="bold")
        console.say(f"  {rise_sentence(own)}")
        rows = [
            (feature, decimal(part.first), decimal(part.last), _interval(part.correlation), _interval(part.part))
            for feature, part in own.parts.items() if part.part.mean or part.correlation.mean
        ]  # fmt: skip
        heads = ("counted in an answer", "first third", "last third", "correlation in a group", "part of the rise")
        console.table("  what changed with it", heads, [
            (feature, *("" if cell == "nan" else cell for cell in cells)) for feature, *cells in rows
        ])  # fmt: skip
        for sentence in rise_notes(own):
            console.say(f"  {MARKS['note']} {sentence}")


def rise_sentence(own: Rise) -> str:
    """How far a reward rose between the first and the last third of the steps."""
    return (
        f"{own.answers:,} answers of {own.steps} steps: from the first third of the steps to the last it changed by "
        f"{_interval(own.rise)} (95%, steps drawn anew)"
    )


def rise_notes(own: Rise) -> Iterator[str]:
    """What more than half of a clear rise comes with, as far as that is proven."""
    if not own.rise.low > 0:
        return
    proven = [name for name, part in own.parts.items() if part.part.low > own.rise.mean / 2]
    for name in [one for one in proven if one != TOGETHER] or proven:
        share = own.parts[name].part.mean / own.rise.mean
        what = "what is counted here together" if name == TOGETHER else name
        yield (
            f"{share:.0%} of the rise comes with {what}: look whether the answers became better, or only their look "
            "(a part is what the rise would be if nothing else had changed)"
        )


def _interval(interval: Interval) -> str:
    if math.isnan(interval.mean):
        return "nan"
    return f"{interval.mean:+.3g} [{interval.low:+.3g}, {interval.high:+.3g}]"


def own_json(rises: Mapping[str, Rise]) -> dict[str, Any]:
    """What `print_own` prints, for programs."""
    return {
        name: {
            "answers": own.answers, "steps": own.steps, "rise": _interval_json(own.rise),
            "parts": {feature: {"first": part.first, "last": part.last,
                                "correlation": _interval_json(part.correlation), "part": _interval_json(part.part)}
                      for feature, part in own.parts.items()},
            "notes": [*rise_notes(own)],
        }
        for name, own in rises.items()
    }  # fmt: skip


def conclusion(found: Audit) -> Iterator[str]:
    """What was tried and what was found, in one or two sentences; no promise."""
    form = next((case.form for case in found.cases if case.answer is not None), REFERENCE)
    right = sum(case.right is not None for case in found.cases)
    about = f"{len(found.cases)} examples, {right} with a right answer"
    tried = len({name for verdict in found.verdicts for name in verdict.heard.tried})
    yield f"tried: {tried} attacks and changes on {about}, answers written {form.name}"
    if len(found.cases) < ENOUGH:
        yield f"with fewer than {ENOUGH} examples no attack can be proven, however often it works; read the tables"
    problems = [(verdict.heard.name, one) for verdict in found.verdicts for one in verdict.findings
                if one.level == "problem"]  # fmt: skip
    if not problems:
        yield (
            f"nothing was found that holds for more than {RATE:.0%} of answers (99% interval); a model may find what "
            "was not tried"
        )
        return
    names = list(dict.fromkeys(name for name, _ in problems))
    yield f"{len(problems)} problem(s), marked with !, in: {', '.join(names)}; what was not tried is not ruled out"


def as_json(found: Audit) -> dict[str, Any]:
    """Everything, for programs: also each answer that was tried, its beginning and end."""
    return {
        "examples": [case.example.id for case in found.cases],
        "form": next((case.form.name for case in found.cases if case.answer is not None), REFERENCE.name),
        "rewards": [_verdict_json(found, verdict) for verdict in found.verdicts],
    }


def _verdict_json(found: Audit, verdict: Verdict) -> dict[str, Any]:
    def tries(several: Any) -> dict[str, list[dict[str, Any]]]:
        return {name: [_try_json(found, one) for one in own] for name, own in several.items()}

    return {
        "name": verdict.heard.name,
        "text_alone": verdict.text_alone,
        "agreement": {role: _interval_json(one) for role, one in verdict.agreement.items()},
        "range": verdict.span,
        "length_correlation": verdict.length,
        "unlike": {key: {"changed": one, "of": of} for key, (one, of) in verdict.unlike.items()},
        "answers": verdict.heard.answers,
        "seconds": verdict.heard.seconds,
        "findings": [
            {"code": one.code, "level": one.level, "sentence": one.sentence,
             "worst": [_try_json(found, bad) for bad in one.worst]}
            for one in verdict.findings
        ],
        "rates": {
            one.name: {"kind": "attack" if one.name in ATTACKS else "change", "tried": one.tried,
                       "changed": _interval_json(one.changed), "reached": _interval_json(one.reached),
                       "failed": one.failed, "unjudged": one.unjudged}
            for one in verdict.rates
        },
        "plain": tries(verdict.heard.plain),
        "tried": tries(verdict.heard.tried),
    }  # fmt: skip


def _interval_json(interval: Interval | None) -> dict[str, float] | None:
    if interval is None:
        return None
    return {"mean": interval.mean, "low": interval.low, "high": interval.high, "count": interval.count}


def _try_json(found: Audit, one: Try) -> dict[str, Any]:
    text = {"example": found.cases[one.case].example.id, "text": shorten(one.text, KEPT), "characters": len(one.text)}
    return {**text, "value": one.value, "right": one.right, "wrong": one.wrong, "error": one.error}
