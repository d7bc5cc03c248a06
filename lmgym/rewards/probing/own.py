"""The tricks of an audit on a policy's own answers, and what can be counted in these: is there more pay to be had
without a better answer, and which way does the pay lead now?"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmgym.rewards.probing.cases import Case
from lmgym.rewards.probing.features import FEATURES
from lmgym.rewards.probing.judging import Judging, Panel
from lmgym.rewards.probing.probes import ATTACKS, Probe
from lmgym.rewards.probing.proof import direction_of, moved
from lmgym.text.chat import messages_of
from lmgym.types import Episode

TRICKS = {name: probe for name, probe in ATTACKS.items() if not probe.holds}  # the others hold the right answer


@dataclass(frozen=True)
class Tried:
    """What a trick has done to the pay of the best answers of some groups: for each 1 if it earned notably more with
    it, -1 if less, else 0.

    Example: Tried("longer", (1, 1, 0, 1)).gain -> 0.75"""

    trick: str
    signs: tuple[int, ...]

    @property
    def gain(self) -> float:
        """The share of answers that earned more, less the share that earned less."""
        return sum(self.signs) / len(self.signs)

    @property
    def raises(self) -> bool:
        """Whether it is proven that it raises more answers than it lowers (proof.py)."""
        return moved(self.signs)


def try_tricks(judging: Judging, groups: Sequence[Sequence[Episode]], room: int) -> list[Tried]:
    """What each trick does to the best answer of each group, by the pay that its reward has given in training. A change
    is notable above a tenth of what lies between the group's best and worst answer. A reward of groups is shown the
    group with the changed answer behind it. Answers that could not be judged are left out.

    Costs a call for the answers as they are, and one for each trick."""
    name, grouped = judging.reward.name, judging.in_groups
    chosen = list[tuple[Case, tuple[str, ...], float]]()
    for group in groups:
        paid = {place: value for place, one in enumerate(group) if (value := raw_value(one, name)) is not None}
        if not paid:
            continue
        best = max(paid, key=lambda place: paid[place])  # of equally good ones the first
        texts = [group[place].text for place in paid]
        own = group[best].text
        others = tuple(text for text in texts if text != own) if grouped else ()
        gap = max(paid.values()) - min(paid.values())
        chosen.append((Case(group[best].example, room=room, said=own), (*others, own), gap))
    plain = [] if grouped else judging.try_to_ask([Panel(case.example, texts) for case, texts, _ in chosen])
    found = []
    for trick in TRICKS.values():
        signs = _signs(judging, trick, chosen, [row[-1].value for row in plain])
        if signs:
            found.append(Tried(trick.name, tuple(signs)))
    return found


def _signs(
    judging: Judging, trick: Probe, chosen: Sequence[tuple[Case, tuple[str, ...], float]], plain: Sequence[float | None]
) -> list[int]:
    beside = [texts if judging.in_groups else () for _, texts, _ in chosen]
    changed = [trick.write(case) or "" for case, _, _ in chosen]
    panels = [Panel(chosen[n][0].example, (*beside[n], changed[n])) for n in range(len(chosen))]
    rows = judging.try_to_ask(panels)
    # A reward of groups may judge the plain answer otherwise beside the changed one.
    before = [row[-2].value for row in rows] if judging.in_groups else plain
    return [
        direction_of(row[-1].value, own, gap)
        for row, own, (_, _, gap) in zip(rows, before, chosen, strict=True)
        if row[-1].value is not None and own is not None
    ]


def raw_value(episode: Episode, name: str) -> float | None:
    """What a reward has given an answer, before `normalise` and the weight; None for what it has not judged."""
    components = episode.reward_components
    return components.get(f"{name}/raw", components.get(name))


def correlations(groups: Sequence[Sequence[Episode]], name: str) -> dict[str, float]:
    """The correlation of a reward's pay with what can be counted in an answer (features.py), within groups, where
    prompt and policy are the same. Left out is what does not differ within any group."""
    paid = [[(one, value) for one in group if (value := raw_value(one, name)) is not None] for group in groups]
    pay = _centred([[value for _, value in own] for own in paid])
    found = {}
    for feature, count in FEATURES.items():
        counts = _centred([[count(_question(one), one.text) for one, _ in own] for own in paid])
        size = float(np.sqrt((counts @ counts) * (pay @ pay)))
        if np.isfinite(size) and size > 0:
            found[feature] = float(counts @ pay) / size
    return found


def _question(episode: Episode) -> str:
    return str(messages_of(episode.example.prompt)[-1].get("content", ""))


def _centred(groups: Sequence[Sequence[float]]) -> np.ndarray:
    """All numbers less the mean of their group."""
    return np.concatenate([np.zeros(0), *(np.array(own) - np.mean(own) for own in groups if own)])
