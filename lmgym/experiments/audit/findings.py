"""What is wrong with a reward, by what it has said: rates with intervals, and findings.

A finding needs proof: the lower bound of the 99% interval of its rate must lie above RATE, one in ten. So a few odd
answers are no finding, nor is a judge's noise, which raises as many answers as it lowers. Of attacks and changes
nothing can be proven with fewer than ENOUGH examples."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lmgym.experiments.audit.court import Heard, Tries, Try
from lmgym.experiments.audit.rates import Rates, is_lost, is_reached, judged_beside, rates_of, told_apart
from lmgym.rewards.probing.probes import ATTACKS, CHANGES
from lmgym.rewards.probing.proof import direction_of, equal, moved, proven
from lmgym.stats.intervals import Interval, share_interval
from lmgym.stats.rank_correlation import spearman

WORST = 3  # examples that are shown of a finding
Level = Literal["problem", "note"]


@dataclass(frozen=True)
class Finding:
    """Something that was found. `code` is its kind and what was tried; a "note" may be meant so, a "problem" hardly.

    Example: Finding("paid/many answers", "problem", "a wrong answer that ... is paid like a right one in 40 of 40")"""

    code: str
    level: Level
    sentence: str
    worst: tuple[Try, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What is said of a reward. `agreement`: of pairs of a right answer and a wrong one, by the role of the wrong one,
    the share in which the right one earns more (ties half). `unlike`: how many numbers changed when the same answers
    were judged again, of how many. `length`: rank correlation of the numbers and the lengths of the texts.

    Example: judge_reward(heard).findings[0].code -> "paid/many answers\""""

    heard: Heard
    text_alone: bool
    agreement: dict[str, Interval]
    rates: list[Rates]
    unlike: dict[str, tuple[int, int]]
    span: tuple[float, float] | None
    length: float
    findings: list[Finding] = field(default_factory=list)


def judge_reward(heard: Heard, alone: bool = False) -> Verdict:
    """The verdict on a reward; `alone` if a run would have nothing else to learn from (it is the sum of all rewards),
    so that it ought to tell right answers from wrong ones."""
    values = [one.value for one in heard.everything if one.value is not None]
    lengths = [float(len(one.text)) for one in heard.everything if one.value is not None]
    compared = [pair for pair in heard.swapped if pair != (None, None)]
    text_alone = bool(compared) and all(equal(one, other) for one, other in compared)
    gap = _gap(heard)
    verdict = Verdict(
        heard, text_alone, {} if text_alone else _agreement(heard),
        [rates_of(name, tries, gap) for name, tries in heard.tried.items()],
        {key: _unlike(getattr(heard, key)) for key in ("again", "backwards", "alone")},
        (min(values), max(values)) if values else None, spearman(values, lengths) if values else math.nan,
    )  # fmt: skip
    found = verdict.findings
    found += _failures(heard)
    if not values:
        found.append(Finding("unjudged", "problem", "it has judged none of the answers"))
        return verdict
    beside = [value for one in heard.everything for value in (one.right, one.wrong) if value is not None]
    if all(equal(value, values[0]) for value in (*values, *beside)):
        found.append(Finding("constant", "problem", f"it gives {values[0]:g} to each of {len(values)} answers, right, "
                             "wrong or odd: there is nothing to learn from it"))  # fmt: skip
        return verdict
    found += _unstable(verdict)
    if text_alone:
        level: Level = "problem" if alone and "right" in heard.plain else "note"
        sentence = (
            "it looks at the text alone: an answer earns the same for another question, so right and wrong were not"
        )
        found.append(Finding("text alone", level, f"{sentence} asked about; {_most_and_least(heard)}"))
        return verdict
    found += _labels(heard, verdict)
    for name, tries in heard.tried.items():
        found += _of_attack(name, tries, gap) if name in ATTACKS else _of_change(name, tries, gap)
    found.sort(key=lambda one: one.level == "note")
    return verdict


def _most_and_least(heard: Heard) -> str:
    """Which kinds of answers a reward likes most and least, by their mean numbers."""
    means = dict[str, float]()
    for name, tries in {**heard.plain, **heard.tried}.items():
        if known := [one.value for one in tries if one.value is not None]:
            means[{"near": "a near miss", "other": "another's answer"}.get(name, name)] = math.fsum(known) / len(known)
    ranked = [f"{name} ({means[name]:.3g})" for name in sorted(means, key=lambda name: -means[name])]
    return f"it pays most for: {', '.join(ranked[:3])}; least for: {', '.join(ranked[-3:])}"


def _gap(heard: Heard) -> float:
    """What lies between a right and a wrong answer: the mean difference, or all that lies between the numbers, if right
    ones do not earn more."""
    pairs = [(one.right, one.value) for role in ("near", "other") for one in heard.plain.get(role, ())]
    apart = [right - wrong for right, wrong in pairs if right is not None and wrong is not None]
    mean = math.fsum(apart) / len(apart) if apart else 0.0
    values = [one.value for one in heard.everything if one.value is not None]
    return mean if mean > 0 else max(values, default=0.0) - min(values, default=0.0)


def _agreement(heard: Heard) -> dict[str, Interval]:
    return {
        role: share_interval(won)
        for role in ("near", "other")
        if (won := [1 - lost for lost in _misranked(heard.plain.get(role, ()))])
    }


def _misranked(tries: Tries, tie: float = 0.5) -> list[float]:
    """Of each wrong answer: 1 if it earns more than the right one, `tie` if as much."""
    return [
        tie if equal(one.value, one.right) else float(one.value > one.right)
        for one in tries
        if one.value is not None and one.right is not None
    ]


def _labels(heard: Heard, verdict: Verdict) -> list[Finding]:
    found = list[Finding]()
    for role, what in (("near", "a near miss"), ("other", "the answer of another example")):
        tries = heard.plain.get(role, ())
        missed = _misranked(tries, tie=1.0)
        if not proven(missed):
            continue
        interval = verdict.agreement[role]
        if interval.high < 0.5:
            how = "is paid more than a right one, more often than not"
        elif interval.low <= 0.5:
            how = "cannot be told from a right one, as far as these answers show"
        else:
            how = f"is paid as much as a right one, or more, in {sum(missed):g} of {len(missed)} tries"
        sentence = f"{what} {how}: the right one earns more in {interval} of pairs (one half by chance)"
        found.append(
            Finding(f"labels/{role}", "problem", sentence, _worst(tries, lambda one: _over(one.value, one.right)))
        )
    return found


def _of_attack(name: str, tries: Tries, gap: float) -> list[Finding]:
    known = judged_beside(tries, "wrong")
    signs = [direction_of(value, other, gap) for _, value, other in known]
    if not moved(signs):
        return []
    apart, says = told_apart(tries), ATTACKS[name].says
    hits = [is_reached(one) for one in apart]
    worst = _worst([one for one, *_ in known], lambda one: _over(one.value, one.wrong))
    if proven(hits):
        sentence = f"a wrong answer {says} is paid like a right one in {sum(hits)} of {len(hits)} tries"
        return [Finding(f"paid/{name}", "problem", sentence, worst)]
    if ATTACKS[name].holds:
        return []
    sentence = f"a wrong answer {says} earns more than without that in {signs.count(1)} of {len(signs)} tries"
    return [Finding(f"raised/{name}", "problem", sentence, worst)]


def _of_change(name: str, tries: Tries, gap: float) -> list[Finding]:
    known = judged_beside(tries, "right")
    hits = [is_lost(one) for one in told_apart(tries)]
    if not (moved([-direction_of(value, other, gap) for _, value, other in known]) and proven(hits)):
        return []
    sentence = f"a right answer {CHANGES[name].says} is not paid as one in {sum(hits)} of {len(hits)} tries"
    return [Finding(f"lost/{name}", "problem", sentence, _worst(tries, lambda one: _over(one.right, one.value)))]


def _failures(heard: Heard) -> list[Finding]:
    """Kinds of answers that the reward fails for, or does not judge."""
    several = {**heard.plain, **heard.tried}
    failed = {name: [bool(one.error) for one in tries] for name, tries in several.items()}
    silent = {name: [one.value is None and not one.error for one in tries] for name, tries in several.items()}
    found = list[Finding]()
    if named := [name for name, hits in failed.items() if proven(hits)]:
        first = next(one for one in several[named[0]] if one.error)
        sentence = f"it fails for answers {'; '.join(map(_what, named))}: {first.error}"
        found.append(Finding("fails", "problem", sentence, (first,)))
    if named := [name for name, hits in silent.items() if proven(hits)]:
        first = next(one for one, hit in zip(several[named[0]], silent[named[0]], strict=True) if hit)
        found.append(Finding("unjudged", "note", f"it does not judge answers {'; '.join(map(_what, named))}", (first,)))
    return found


def _what(name: str) -> str:
    probe = ATTACKS.get(name) or CHANGES.get(name)
    words = {
        "right": "that are right",
        "near": "that are near misses",
        "other": "to another example",
        "sentence": "that are any sentence",
    }
    return probe.says if probe else words[name]


def _unlike(pairs: Sequence[tuple[float | None, float | None]]) -> tuple[int, int]:
    return sum(not equal(one, other) for one, other in pairs), len(pairs)


def _unstable(verdict: Verdict) -> list[Finding]:
    """Numbers that change when the same answers are judged again, or with others, or in another order."""
    heard, say = verdict.heard, "it gives {} of {} answers another number when {}"
    if proven([not equal(one, other) for one, other in heard.again]):
        return [Finding("unstable", "problem", say.format(*verdict.unlike["again"], "they are judged again"))]
    for key, when in (("alone", "they are judged alone"), ("backwards", "their order is reversed")):
        if proven([not equal(one, other) for one, other in getattr(heard, key)]):
            return [Finding("depends on others", "problem", say.format(*verdict.unlike[key], when))]
    return []


def _over(one: float | None, other: float | None) -> float:
    return -math.inf if one is None or other is None else one - other


def _worst(tries: Tries, size: Callable[[Try], float]) -> tuple[Try, ...]:
    return tuple(sorted(tries, key=size, reverse=True)[:WORST])
