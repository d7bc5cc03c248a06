"""A whole rollout, scored: every rank plays its share of the groups, and gets all episodes. No torch here."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from lmgym.core.errors import LmgymError
from lmgym.core.progress import doing
from lmgym.distributed.ranks import Ranks
from lmgym.envs.base import Env
from lmgym.envs.single_turn import SingleTurn
from lmgym.envs.vector import Envs
from lmgym.inference.base import Request, Sampling
from lmgym.rewards.base import Reward, episodes_to_judge
from lmgym.rewards.failures import too_many
from lmgym.rewards.groups import compares
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.rollout import RolloutLoop, apply_rewards, collect_numbered, finished_episodes
from lmgym.types import Episode, Example

NO_EXAMPLE = Example("", "")  # in the place of an example that every rank has


@dataclass(frozen=True)
class Draw:
    """The prompts of one draw of a step, as (group, example), and what their answers are collected with. All random
    numbers come from `key`, which ends in the number of the step and of the draw.

    Example: Draw(list(enumerate(examples)), (0, "stage", 0, "step", 3, 0), actor, Sampling())"""

    prompts: Sequence[tuple[int, Example]]
    key: tuple[int | str, ...]
    actor: Actor
    sampling: Sampling
    envs: Envs | Callable[[], Env] = SingleTurn
    rewards: Sequence[Reward] = ()
    timeout: float = 60.0
    rewards_failed: float = 0.0  # share of the answers that a reward may fail for


@doing("sampling answers")
def play(
    prompts: Sequence[tuple[int, Example]],
    actor: Actor,
    sampling: Sampling,
    path: Sequence[int | str],
    envs: Envs | Callable[[], Env] = SingleTurn,
    rewards: Sequence[Reward] = (),
    timeout: float = 60.0,
    rewards_failed: float = 0.0,
) -> list[Episode]:
    """Scored episodes for (group, example) pairs, in order: `collect`, then `apply_rewards` (rollout.py), shared out
    over `actor.ranks` by group. A reward sees the answers of this rank only, whole groups of them. Raises LmgymError as
    these two do, and if a reward fails for more than the share `rewards_failed` of the answers.

    Example: play(list(enumerate(examples)), actor, Sampling(), (0, "step", 3, 0), rewards=[reward])"""
    return played_by_all(Draw(prompts, tuple(path), actor, sampling, envs, rewards, timeout, rewards_failed))


def played_by_all(draw: Draw) -> list[Episode]:
    """`play` of a draw."""
    return checked(draw, finished_episodes(exchanged(draw.actor.ranks, play_share(draw), draw.prompts)))


def checked(draw: Draw, episodes: list[Episode]) -> list[Episode]:
    """The episodes of all ranks. Raises LmgymError if a reward has failed for more of them than it may."""
    failed: dict[str, list[str]] = {}
    for name, error in (item for episode in episodes for item in episode.reward_errors.items()):
        failed.setdefault(name, []).append(error)
    for name, errors in failed.items():
        most = share_of(draw.rewards_failed, len(episodes))
        if len(errors) > most:
            raise LmgymError(too_many(name, errors, most))
    return episodes


def who_moved(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes without those of players whose game was over before their first turn: they hold no answer, though
    nothing failed. Who compares episodes place by place needs them still.

    Example: who_moved([Episode(Example("game/0", "a game"), 0, 0)]) -> []"""
    return [episode for episode in episodes if episode.turns or episode.error]


def share_of(share: float, count: int) -> int:
    """A share of a number, rounded down. Example: share_of(0.29, 100) -> 29, where the product is 28.999..."""
    return math.floor(share * count + 1e-9)


def play_share(draw: Draw) -> dict[int, list[Episode]]:
    """The first half of `play`: this rank's scored episodes by the number of their environment. It asks no other rank,
    so it may run beside other work."""
    actor = draw.actor
    scoring = background_scoring(draw.rewards)
    played = collect_numbered(share_of_rank(draw), actor, draw.sampling, draw.key, draw.envs, scoring)
    players = max((len(each) for each in played.values()), default=1)  # of a game: each has an answer of its own
    if players > 1 and (several := [reward.name for reward in draw.rewards if compares(reward)]):
        raise LmgymError(
            f"reward '{several[0]}' compares answers to one prompt, and each player has prompts of its own"
        )
    most = share_of(draw.rewards_failed, players * len(draw.prompts))
    apply_rewards([one for each in played.values() for one in each], draw.rewards, draw.timeout, actor.tokenizer, most)
    return played


def first_requests(draw: Draw) -> dict[int, Request]:
    """What `play_share` asks the engine first, by the number of the environment: a request for each prompt of this rank
    whose environment begins. Nothing is sampled."""
    loop = RolloutLoop(share_of_rank(draw), draw.actor, draw.key, draw.envs)
    loop.begin_waiting(None)
    loop.envs.end([state.index for state in loop.live])
    return {state.index: state.player.request(loop.one_turn) for state in loop.live}


def share_of_rank(draw: Draw) -> Sequence[tuple[int, tuple[int, Example]]]:
    """The prompts of a draw that this rank plays, with their numbers in the whole."""
    return draw.actor.ranks.share_groups(enumerate(draw.prompts), group=lambda numbered: numbered[1][0])


def exchanged(
    ranks: Ranks, played: Mapping[int, Sequence[Episode]], prompts: Sequence[tuple[int, Example]]
) -> dict[int, list[Episode]]:
    """The episodes of all ranks by the number of their environment; `prompts` has the example of each number.

    Example: exchanged(ranks, {0: [episode]}, [(0, example), (1, other)])  # with another rank's {1: [episode]}"""
    every = {number: list(episodes) for number, episodes in played.items()}
    if ranks.size == 1:
        return every
    sent = {n: [replace(one, example=NO_EXAMPLE).to_json(seconds=True) for one in each] for n, each in every.items()}
    for rank, part in enumerate(ranks.gather(json.dumps(sent).encode())):
        if rank != ranks.rank:  # what travels comes back bit for bit, so its own need not be read again
            trees = json.loads(part).items()
            every |= {int(number): [Episode.from_json(tree) for tree in each] for number, each in trees}
    for number, episodes in every.items():
        every[number] = [replace(episode, example=prompts[number][1]) for episode in episodes]
    return every


def background_scoring(rewards: Sequence[Reward]) -> Callable[[Episode], None] | None:
    """A callback that starts to score an episode; call it as soon as the episode's text is final. None if no reward can
    start early. `call_reward` later picks the values up; they are the same as without the callback."""
    # Rewards by token or by turn score prefixes of the answer, not the answer alone.
    early = [r for r in rewards if hasattr(r.function, "begin") and not (r.by_token or r.each_turn)]
    if not early:
        return None

    def begin(episode: Episode) -> None:
        for reward in early:
            # An error is raised again when the rewards are computed, and is reported there.
            with suppress(Exception):
                for shown in episodes_to_judge(reward, [episode]):
                    reward.function.begin(shown.text, shown.example)  # type: ignore[attr-defined]

    return begin
