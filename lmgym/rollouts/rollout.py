"""Prompts to scored episodes: `collect` runs environments against an engine, `demonstrate` takes references or
demonstrators instead, `apply_rewards` applies the rewards. The text world: no torch.

All live environments share one engine call per turn, and finished ones are replaced by waiting ones. What comes back
depends on counts and episode order, never on arrival time.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.envs.base import Env
from lmgym.envs.single_turn import SingleTurn
from lmgym.envs.vector import EnvFailure, Envs, InProcess
from lmgym.inference.base import Sampling
from lmgym.rewards.base import Reward, evaluate
from lmgym.rewards.token_credit import paid
from lmgym.rewards.turn_credit import paid_each_turn
from lmgym.rollouts.players import Actor, EpisodeState, PlayerState, Reader, seated
from lmgym.text.chat import answer_ids, decode, decoder_answer_ids
from lmgym.types import Episode, Example, Turn


def collect(
    prompts: Sequence[tuple[int, Example]],
    actor: Actor,
    sampling: Sampling,
    path: Sequence[int | str],
    envs: Envs | Callable[[], Env] = SingleTurn,
    ended: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """One episode per (group, example), in order; their random numbers are a function of `path` and their place.

    `path` is (seed, ..., step, draw). Environments of one group get the same seed; `envs` are many behind one call, or
    a function that builds one. Where they have more than one turn, as many as the engine has rows are alive at a time.
    A game of several players gives an episode for each that learns, in groups of their own. An environment that fails
    ends its own episode (`Episode.error`). `ended` is told of episodes as soon as their text is final, while others go
    on; of the last ones it need not be. Raises LmgymError where a prompt does not fit the model, or all
    environments fail.

    Example: collect(list(enumerate(examples)), actor, Sampling(), (0, "step", 3, 0), InProcess(HigherOrLower))
    """
    envs, width = _environments(envs, actor)
    table = RolloutLoop(prompts, actor, path, envs, ended)
    while table.waiting or table.live:
        table.seat_more(width)
        table.ask(sampling, one_turn=width is None)
    return table.episodes()


def demonstrate(
    prompts: Sequence[tuple[int, Example]],
    actor: Actor,
    path: Sequence[int | str],
    envs: Envs | Callable[[], Env] = SingleTurn,
) -> list[Episode]:
    """Episodes that nobody sampled, end of sequence included: with one turn, reference answers (one drawn for each
    example, where there are several); else what the environments' own `demonstrate` says, turn by turn."""
    envs, width = _environments(envs, actor)
    if width is not None:
        table = RolloutLoop(prompts, actor, path, envs)
        table.seat_more(None)
        while table.live:
            table.demonstrate()
        return table.episodes()
    episodes = []
    for place, (group, example) in enumerate(prompts):
        if not example.references:
            raise LmgymError(
                f"example {example.id} has no reference answer to imitate; supervised training needs one for each"
            )
        answer = example.references[seeds.key(*path, place) % len(example.references)]
        read, start, tokenizer = actor.read(example.prompt), list(actor.decoder_start), actor.tokenizer
        if start:
            turn = Turn(start, decoder_answer_ids(tokenizer, answer), text=answer, source_ids=read)
        else:
            turn = Turn(read, answer_ids(tokenizer, example.prompt, answer, actor.template), text=answer)
        turn.action_ids = turn.action_ids[: actor.reference_tokens]
        episodes.append(Episode(example=example, group=group, index=place, turns=[turn], version=actor.version))
    return episodes


def apply_rewards(
    episodes: Sequence[Episode], rewards: Sequence[Reward], timeout: float = 60.0, tokenizer: Any = None
) -> None:
    """Fill in each episode's `reward_components` and `score`: environment rewards plus the weighted sum of the reward functions,
    paid on the last turn, and there on its last token, unless a reward pays each turn (rewards/turn_credit.py) or token by
    token (rewards/token_credit.py), for which the `tokenizer` is needed."""
    played = [episode for episode in episodes if episode.turns]  # the others' environments failed at once
    for reward in rewards:
        for episode in episodes:
            episode.reward_components[reward.name] = 0.0
        if reward.by_token:
            for episode, (value, tokens) in zip(played, paid(reward, played, tokenizer, timeout), strict=True):
                episode.reward_components[reward.name] = value
                _pay(episode.turns[-1], reward.weight * value, [reward.weight * earned for earned in tokens])
            continue
        if reward.each_turn:
            for episode, values in zip(played, paid_each_turn(reward, played, timeout), strict=True):
                episode.reward_components[reward.name] = math.fsum(values)
                for turn, value in zip(episode.turns, values, strict=True):
                    turn.reward += reward.weight * value
            continue
        for episode, value in zip(played, evaluate(reward, played, timeout), strict=True):
            episode.reward_components[reward.name] = value
            episode.turns[-1].reward += reward.weight * value
    for episode in episodes:
        episode.score = sum(turn.reward for turn in episode.turns)


def _pay(turn: Turn, total: float, tokens: list[float]) -> None:
    """Add to a turn's reward what its actions have earned."""
    before = turn.token_rewards or [0.0] * len(turn.action_ids)
    turn.reward += total
    turn.token_rewards = [old + new for old, new in zip(before, tokens, strict=True)]


def groups_of(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Episodes by group, in order."""
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode)
    return list(groups.values())


def _environments(envs: Envs | Callable[[], Env], actor: Actor) -> tuple[Envs, int | None]:
    """The environments side by side, and how many may be alive at a time: all, where each has one turn."""
    one_turn = envs is SingleTurn or getattr(envs, "make_env", None) is SingleTurn
    together: Any = envs if hasattr(envs, "begin") else InProcess(envs)  # type: ignore[arg-type]
    return together, None if one_turn else actor.engine.rows


class RolloutLoop:
    """The games of one rollout: those that wait, those that are alive, and what came of them all."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, Example]],
        actor: Actor,
        path: Sequence[int | str],
        envs: Envs,
        ended: Callable[[Episode], None] | None = None,
    ) -> None:
        self.actor, self.envs, self.reader, self.ended = actor, envs, Reader(actor), ended
        self.keys = seeds.key(*path, "environment"), seeds.key(*path, "episode")
        first = [Episode(example, group, n, version=actor.version) for n, (group, example) in enumerate(prompts)]
        self.waiting, self.live = deque(enumerate(first)), list[EpisodeState]()
        self.learners: dict[int, list[Episode]] = {place: [episode] for place, episode in self.waiting}
        self.players = 1

    def seat_more(self, width: int | None) -> None:
        """Begin with waiting games until `width` are alive; those whose environments fail at once are over."""
        count = len(self.waiting) if width is None else min(len(self.waiting), width - len(self.live))
        chosen = [self.waiting.popleft() for _ in range(count)]
        items = [(n, e.example, seeds.key(e.group, e.example.id, parent=self.keys[0])) for n, e in chosen]
        for (place, episode), found in zip(chosen, self.envs.begin(items) if items else [], strict=True):
            if isinstance(found, EnvFailure):
                episode.error, episode.terminated, episode.selected = found.message, False, False
                self.envs.end([place])
                continue
            game = seated(place, episode, found, self.actor, self.keys[1], self.reader)
            self.learners[place] = [game.seats[player].episode for player in found.learners]
            self.players = max(self.players, len(found.learners))
            self.live.append(game)

    def ask(self, sampling: Sampling, one_turn: bool) -> None:
        """One turn in each game, all of those that one engine speaks in one call."""
        actors = {id(game.seat.actor): game.seat.actor for game in self.live}
        for actor in actors.values():
            seats = [game.seat for game in self.live if game.seat.actor is actor]
            requests = [seat.request(one_turn) for seat in seats]
            early = {"ended": self._tell(seats)} if one_turn and self.ended is not None else {}
            completions = actor.engine.generate(requests, sampling, **early)
            for seat, completion in zip(seats, completions, strict=True):
                seat.say(completion, decode(actor.tokenizer, completion.ids), sampling.min_new_tokens)
        for game in self._go_on([None] * len(self.live)):
            for episode in self.learners[game.place]:
                if self.ended is not None and self.live and not episode.error:
                    self.ended(episode)

    def demonstrate(self) -> None:
        """One turn in each game, said by the environment's own demonstrator."""
        said = self.envs.demonstrate([game.place for game in self.live])
        for game, text in zip(self.live, said, strict=True):
            if isinstance(text, str):
                game.seat.say(game.seat.demonstrated(text), text)
        self._go_on([text if isinstance(text, EnvFailure) else None for text in said])

    def episodes(self) -> list[Episode]:
        """All episodes that learn, with their scores, in order: by game, then by player. Raises LmgymError where none
        of them came about."""
        episodes: list[Episode] = []
        for own in self.learners.values():
            for player, episode in enumerate(own):
                episode.group = episode.group * self.players + player
                episode.index = len(episodes)
                episode.score = sum(turn.reward for turn in episode.turns)
                episodes.append(episode)
        if episodes and all(episode.error for episode in episodes):
            raise LmgymError(f"every environment of this rollout failed; the first one: {episodes[0].error}")
        return episodes

    def _tell(self, seats: Sequence[PlayerState]) -> Callable[[int, list[int]], None]:
        """What an engine is to call with the ids of an answer that is its seat's only one."""

        def tell(place: int, ids: list[int]) -> None:
            seat = seats[place]
            turn = Turn(seat.fresh, ids, text=decode(seat.actor.tokenizer, ids))
            if self.ended is not None:
                self.ended(replace(seat.episode, turns=[turn]))

        return tell

    def _go_on(self, broken: list[EnvFailure | None]) -> list[EpisodeState]:
        """Let the environments answer what has been said, and keep the games that are not over; returns the others."""
        turns = {game.place: game.seat.episode.turns for game in self.live}
        asked = [game.place for game, failure in zip(self.live, broken, strict=True) if failure is None]
        answers = self.envs.step([(place, turns[place][-1].text, turns[place][-1].stop) for place in asked])
        steps = dict(zip(asked, answers, strict=True))
        live, over = list[EpisodeState](), list[EpisodeState]()
        for game, failure in zip(self.live, broken, strict=True):
            goes_on = game.hear(failure or steps[game.place], self.reader)
            (live if goes_on else over).append(game)
        self.envs.end([game.place for game in over])  # together: in other processes each call is a round trip
        for seat in (seat for game in over for seat in game.seats):
            seat.actor.engine.forget([seat.key])
        self.live = live
        return over
