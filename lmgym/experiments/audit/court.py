"""The court: a reward is asked about right answers, wrong ones and attacks, and about the same ones again."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lmgym.rewards.check import TOLERANCE
from lmgym.rewards.probing.cases import FORMS, Case
from lmgym.rewards.probing.judging import Judging, Panel, Said
from lmgym.rewards.probing.probes import ATTACKS, CHANGES, Probe

TRIED_FORMS = 8  # cases that the forms of an answer are tried with
ALONE = 8  # cases whose answers are judged one by one
ROLES = ("right", "near", "other")


@dataclass(frozen=True)
class Try:
    """An answer, what it earned, and what the right and the wrong answer earned that it is compared with, in the same
    panel. None: not judged, or there is none.

    Example: Try(0, "#### 17 or 18 or 19", value=1.0, right=1.0, wrong=0.0)"""

    case: int
    text: str
    value: float | None
    right: float | None
    wrong: float | None
    error: str = ""


Tries = Sequence[Try]


@dataclass(frozen=True)
class Heard:
    """All that a reward has said. `plain` are the right and wrong answers by role (ROLES, or "sentence"), `tried` the
    probes by name. `again`, `backwards` and `alone` are pairs of numbers: of the first call, and of a second one, of
    one with everything in reversed order, and of single answers (or groups). `swapped`: numbers with the own example,
    and with another one in its place.

    Example: hear(Judging(reward), cases).tried["empty"][0].value -> 0.0"""

    name: str
    plain: Mapping[str, Tries]
    tried: Mapping[str, Tries]
    again: Sequence[tuple[float | None, float | None]]
    backwards: Sequence[tuple[float | None, float | None]]
    alone: Sequence[tuple[float | None, float | None]]
    swapped: Sequence[tuple[float | None, float | None]]
    answers: int  # that were judged
    seconds: float

    @property
    def everything(self) -> list[Try]:
        """All answers, in the order in which they were judged first."""
        return [one for tries in (*self.plain.values(), *self.tried.values()) for one in tries]


def choose_form(judges: Sequence[Judging], cases: Sequence[Case]) -> list[Case]:
    """The cases, in the form of answer for which these rewards pay a right answer most above a wrong one. The form of
    the references stays if it is paid for at all, or if no form is. Costs 2 answers for each form and some cases."""
    some = [case for case in cases[:TRIED_FORMS] if case.answer is not None]
    if not some or not judges:
        return list(cases)
    gaps = list[float]()
    for form in FORMS:
        panels = list[Panel]()
        for case in (replace(case, form=form) for case in some):
            if case.right is not None and (wrong := case.near or case.other) is not None:
                panels.append(Panel(case.example, (case.right, wrong)))
        gap = 0.0
        for judging in judges:
            values = [[one.value or 0.0 for one in row] for row in judging.ask(panels)]
            gap += judging.reward.weight * sum(right - wrong for right, wrong in values)
        gaps.append(gap)
        if not gaps[1:] and gap > TOLERANCE:
            break
    form = FORMS[max(range(len(gaps)), key=lambda place: gaps[place])] if max(gaps) > TOLERANCE else FORMS[0]
    return [replace(case, form=form) if case.answer is not None else case for case in cases]


def panels_of(cases: Sequence[Case]) -> tuple[list[Panel], list[tuple[str, ...]]]:
    """The plain answers of each case, and the role of each text."""
    panels, roles = list[Panel](), list[tuple[str, ...]]()
    for case in cases:
        texts = {role: text for role in ROLES if (text := getattr(case, role)) is not None}
        texts = texts or {"sentence": case.sentence}
        panels.append(Panel(case.example, tuple(texts.values())))
        roles.append(tuple(texts))
    return panels, roles


def probed(probe: Probe, cases: Sequence[Case], plain: Sequence[Panel], grouped: bool) -> dict[int, Panel]:
    """The panels of a probe by the number of their case: the text alone, or behind the plain answers of the case."""
    texts = {number: probe.write(case) for number, case in enumerate(cases)}
    return {
        number: Panel(cases[number].example, (*plain[number].texts, text) if grouped else (text,))
        for number, text in texts.items()
        if text is not None
    }


def cost(cases: Sequence[Case], grouped: bool) -> int:
    """How many answers of these cases a reward will be asked about."""
    plain, _ = panels_of(cases)
    count = sum(len(panel.texts) for panel in plain)
    tries = [probed(probe, cases, plain, grouped) for probe in (*ATTACKS.values(), *CHANGES.values())]
    swapped = sum(len(panel.texts) for case, panel in zip(cases, plain, strict=True) if case.stranger is not None)
    alone = sum(len(panel.texts) for panel in plain[:ALONE])
    return 3 * count + swapped + alone + sum(len(panel.texts) for own in tries for panel in own.values())


def hear(judging: Judging, cases: Sequence[Case], doing: Callable[[str], None] = lambda what: None) -> Heard:
    """Ask a reward about the plain answers, all probes, and the plain answers again. Raises LmgymError if it cannot be
    asked about the plain answers at all."""
    name, grouped = judging.reward.name, judging.in_groups
    # 1. Right and wrong answers, in one call.
    doing(f"{name}: right and wrong answers")
    panels, roles = panels_of(cases)
    first = judging.ask(panels)
    values = [dict(zip(own, row, strict=True)) for own, row in zip(roles, first, strict=True)]
    plain: dict[str, list[Try]] = {}
    for number, (panel, own) in enumerate(zip(panels, values, strict=True)):
        for (role, said), text in zip(own.items(), panel.texts, strict=True):
            right, wrong = _beside(own, role)
            plain.setdefault(role, []).append(Try(number, text, said.value, right, wrong, said.error))
    # 2. Each probe in a call of its own; a reward of groups compares it with the plain answers of its case.
    tried: dict[str, list[Try]] = {}
    for probe in (*ATTACKS.values(), *CHANGES.values()):
        doing(f"{name}: {probe.name}")
        own_panels = probed(probe, cases, panels, grouped)
        rows = judging.try_to_ask([*own_panels.values()])
        for (number, panel), row in zip(own_panels.items(), rows, strict=True):
            beside = dict(zip(roles[number], row, strict=False)) if grouped else values[number]
            right, wrong = _beside(beside)
            if probe.name in CHANGES:  # half of the way to a near miss may be next to nothing
                wrong = min((said.value for role, said in beside.items() if role != "right" and said.value is not None),
                            default=None)  # fmt: skip
            tries = tried.setdefault(probe.name, [])
            tries.append(Try(number, panel.texts[-1], row[-1].value, right, wrong, row[-1].error))
    # 3. The same answers again: all, all backwards, some alone, and as answers to another example.
    doing(f"{name}: the same answers again")
    again = judging.try_to_ask(panels)
    back = judging.try_to_ask([replace(one, texts=one.texts[::-1]) for one in panels[::-1]])
    backwards = [row[::-1] for row in back[::-1]]
    single = [
        one for panel in panels[:ALONE] for one in
        ([panel] if grouped else [replace(panel, texts=(text,)) for text in panel.texts])
    ]  # fmt: skip
    alone = [said for panel in single for said in judging.try_to_ask([panel])[0]]
    foreign = [place for place, case in enumerate(cases) if case.stranger is not None]
    strangers = [replace(panels[place], example=cases[place].stranger or cases[place].example) for place in foreign]
    swapped = judging.try_to_ask(strangers)
    return Heard(
        name, plain, tried, _pairs(first, again), _pairs(first, backwards),
        _pairs([[said for row in first[:ALONE] for said in row]], [alone]),
        _pairs([first[place] for place in foreign], swapped), judging.answers, judging.seconds,
    )  # fmt: skip


def _beside(values: Mapping[str, Said], role: str = "") -> tuple[float | None, float | None]:
    """The values of the right answer and of the wrong one that an answer is compared with: a plain wrong one is itself,
    and attacks begin with the near miss, if there is one."""
    right = values["right"].value if "right" in values else None
    wrong = next((values[one].value for one in (role, "near", "other", "sentence") if one in values and one != "right"),
                 None)  # fmt: skip
    return right, wrong


def _pairs(
    first: Sequence[Sequence[Said]], second: Sequence[Sequence[Said]]
) -> list[tuple[float | None, float | None]]:
    return [
        (one.value, other.value)
        for row, others in zip(first, second, strict=True)
        for one, other in zip(row, others, strict=True)
    ]


def summed(name: str, heard: Sequence[Heard], weights: Sequence[float]) -> Heard:
    """What the answers earn in all: the weighted sum of the rewards that judge them."""

    def total(values: Sequence[float | None]) -> float | None:
        known = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
        return math.fsum(known) if known else None

    def tries(several: Sequence[Tries]) -> list[Try]:
        return [
            Try(
                own[0].case, own[0].text, total([one.value for one in own]), total([one.right for one in own]),
                total([one.wrong for one in own]),
            )
            for own in zip(*several, strict=True)
        ]  # fmt: skip

    def pairs(key: str) -> list[tuple[float | None, float | None]]:
        several = zip(*(getattr(one, key) for one in heard), strict=True)
        return [(total([one for one, _ in own]), total([two for _, two in own])) for own in several]

    return Heard(
        name, {role: tries([one.plain[role] for one in heard]) for role in heard[0].plain},
        {probe: tries([one.tried[probe] for one in heard]) for probe in heard[0].tried},
        pairs("again"), pairs("backwards"), pairs("alone"), pairs("swapped"),
        sum(one.answers for one in heard), sum(one.seconds for one in heard),
    )  # fmt: skip
