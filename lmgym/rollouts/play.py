"""A whole rollout, scored: every rank plays its share of the groups, and gets all episodes. No torch here."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lmgym.distributed.ranks import Ranks
from lmgym.envs.base import Env
from lmgym.envs.single_turn import SingleTurn
from lmgym.envs.vector import Envs
from lmgym.inference.base import Sampling
from lmgym.rewards.base import Reward
from lmgym.rewards.streaming import background_scoring
from lmgym.rollouts.players import Actor
from lmgym.rollouts.rollout import apply_rewards, collect_numbered, finished_episodes
from lmgym.types import Episode, Example

NO_EXAMPLE = Example("", "")  # in the place of an example that every rank has


def play(
    prompts: Sequence[tuple[int, Example]],
    actor: Actor,
    sampling: Sampling,
    path: Sequence[int | str],
    envs: Envs | Callable[[], Env] = SingleTurn,
    rewards: Sequence[Reward] = (),
    timeout: float = 60.0,
) -> list[Episode]:
    """Scored episodes for (group, example) pairs, in order: `collect`, then `apply_rewards` (rollout.py), shared out
    over `actor.ranks` by group. A reward sees the answers of this rank only, whole groups of them. Raises LmgymError as
    these two do.

    Example: play(list(enumerate(examples)), actor, Sampling(), (0, "step", 3, 0), rewards=[reward])"""
    played = play_share(prompts, actor, sampling, path, envs, rewards, timeout)
    return finished_episodes(exchanged(actor.ranks, played, prompts))


def play_share(
    prompts: Sequence[tuple[int, Example]],
    actor: Actor,
    sampling: Sampling,
    path: Sequence[int | str],
    envs: Envs | Callable[[], Env] = SingleTurn,
    rewards: Sequence[Reward] = (),
    timeout: float = 60.0,
) -> dict[int, list[Episode]]:
    """The first half of `play`: this rank's scored episodes by the number of their environment. It asks no other rank,
    so it may run beside other work."""
    own = actor.ranks.share_groups(enumerate(prompts), group=lambda numbered: numbered[1][0])
    played = collect_numbered(own, actor, sampling, path, envs, background_scoring(rewards))
    apply_rewards([one for episodes in played.values() for one in episodes], rewards, timeout, actor.tokenizer)
    return played


def exchanged(
    ranks: Ranks, own: Mapping[int, Sequence[Episode]], prompts: Sequence[tuple[int, Example]]
) -> dict[int, list[Episode]]:
    """The episodes of all ranks by the number of their environment; `prompts` has the example of each number.

    Example: exchanged(ranks, {0: [episode]}, [(0, example), (1, other)])  # with another rank's {1: [episode]}"""
    if ranks.size == 1:
        return {number: list(episodes) for number, episodes in own.items()}
    sent = {
        n: [replace(one, example=NO_EXAMPLE).to_json(seconds=True) for one in episodes] for n, episodes in own.items()
    }
    every = {number: list(episodes) for number, episodes in own.items()}
    for rank, part in enumerate(ranks.gather(json.dumps(sent).encode())):
        if rank != ranks.rank:  # what travels comes back bit for bit, so its own need not be read again
            trees = json.loads(part).items()
            every |= {int(number): [Episode.from_json(tree) for tree in each] for number, each in trees}
    for number, episodes in every.items():
        every[number] = [replace(episode, example=prompts[number][1]) for episode in episodes]
    return every
