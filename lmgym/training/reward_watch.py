"""The reward watch (`reward_watch:`): every so many steps the tricks of `lmgym audit` are tried on the policy's own
best answers, and what goes with the pay is counted. It reads answers that are there, draws no random number, and
changes nothing of the run but its log."""

import time
from collections.abc import Sequence

from lmgym.core.errors import describe
from lmgym.rewards.champions import with_champions
from lmgym.rewards.probing.judging import Judging
from lmgym.rewards.probing.own import Tried, correlations, try_tricks
from lmgym.rollouts.rollout import groups_of
from lmgym.training.stage import StageRun
from lmgym.types import Episode

CHARACTERS = 4  # of a token, about: how long the longest trick may be


def watch_rewards(stage: StageRun, episodes: Sequence[Episode], step: int) -> dict[str, float]:
    """Of a step that is due, numbers for its record: watch/REWARD/trick/NAME, the share of the best answers that a
    trick has raised less those that it has lowered; watch/REWARD/feature/NAME, the correlation of the pay with what is
    counted; and watch/REWARD/answers, how many were tried. A sentence tells the largest. Only the first rank asks; a
    reward that cannot be asked is told and left out."""
    section, run = stage.run.config.reward_watch, stage.run
    if not section.every or (step + 1) % section.every or not stage.source.samples:
        return {}
    stage.source.settle()  # no thread asks the rewards beside this one; all ranks do this together
    if not run.ranks.first:
        return {}
    began, record = time.perf_counter(), dict[str, float]()
    sampled = [one for one in episodes if one.turns and not one.error and not one.by]
    groups = groups_of(sampled)[: section.groups]
    room = CHARACTERS * stage.config.sampling.max_new_tokens
    for reward in with_champions(stage.rewards, stage.champions, [group[0].example for group in groups]):
        if not reward.weight:
            continue
        own = [group for group in groups if reward.applies(group[0].example)]
        try:
            judging = Judging(reward, run.config.reward_timeout, run.policy.tokenizer)
            tried, counted = try_tricks(judging, own, room), correlations(own, reward.name)
        except Exception as error:  # a look must not end a training
            run.console.warn(f"step {step + 1}: reward_watch could not ask '{reward.name}' ({describe(error)})")
            continue
        record[f"watch/{reward.name}/answers"] = float(max((len(one.signs) for one in tried), default=0))
        record |= {f"watch/{reward.name}/trick/{one.trick}": one.gain for one in tried}
        record |= {f"watch/{reward.name}/feature/{name}": value for name, value in counted.items()}
        run.console.say(f"step {step + 1}: {told(reward.name, tried, counted)}")
    return record | {"seconds/watch": time.perf_counter() - began}


def told(name: str, tried: Sequence[Tried], counted: dict[str, float]) -> str:
    """What was found, as a sentence.

    Example: told("brief", [Tried("empty", (1,) * 16)], {"words": -0.9}) ->
    "reward_watch: 'brief' pays the policy's best answers more with: empty (16 of 16); within groups its pay goes most
    with words (-0.90)" """
    raised = sorted((one for one in tried if one.raises), key=lambda one: -one.gain)
    if not tried:
        found = f"'{name}' judged none of the answers"
    elif not raised:
        found = f"none of {len(tried)} tricks is proven to raise the pay of '{name}'"
    else:
        what = ", ".join(f"{one.trick} ({one.signs.count(1)} of {len(one.signs)})" for one in raised)
        found = f"'{name}' pays the policy's best answers more with: {what}"
    most = max(counted, key=lambda feature: abs(counted[feature]), default=None)
    beside = "" if most is None else f"; within groups its pay goes most with {most} ({counted[most]:+.2f})"
    return f"reward_watch: {found}{beside}"
