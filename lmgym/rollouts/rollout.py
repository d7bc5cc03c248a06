"""From prompts to scored episodes. Imports no torch.

`collect` runs environments against an engine, `demonstrate` takes reference answers or demonstrators instead, and
`apply_rewards` fills in the rewards. All live environments share one engine call per turn; waiting ones take the place
of finished ones. The result depends on counts and on the order of the episodes, never on arrival time."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmgym.core import seeds
from lmgym.core.errors import LmgymError, warn
from lmgym.core.progress import doing
from lmgym.envs.base import Env
from lmgym.envs.past import WHOLE, Past
from lmgym.envs.single_turn import SingleTurn
from lmgym.envs.vector import EnvFailure, Envs, InProcess, Opening
from lmgym.inference.base import Sampling
from lmgym.rewards.base import Reward, check_size
from lmgym.rewards.payment import is_judged, pay_reward
from lmgym.rollouts.actor import Actor, PromptCache
from lmgym.rollouts.given_answers import given_turn, given_turns
from lmgym.rollouts.players import EpisodeState, PlayerState, begin_episode
from lmgym.text.chat import decode
from lmgym.types import Episode, Example, Turn

MOST_FAILURES = 0.9  # share of a rollout's environments; the few that are left would be no fair sample
BEGUN_DIFFERENTLY = (
    "an environment has begun two episodes of one example and one seed in different ways. It should be a function of "
    "the example, the seed and the answers, else no run repeats itself (a program draws with LMGYM_SEED, and puts no "
    "clock, folder or address into a message)"
)


def collect(
    prompts: Sequence[tuple[int, Example]],
    actor: Actor,
    sampling: Sampling,
    path: Sequence[int | str],
    envs: Envs | Callable[[], Env] = SingleTurn,
    ended: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """One episode per (group, example), in order. Random numbers are a function of `path` and the episode's index.

    `path` is (seed, ..., step, draw). Environments of one group get the same seed. `envs` are many environments behind
    one call, or a function that builds one; at most `engine.rows` of several turns are alive. A game of several players
    gives an episode for each player that learns, in groups of their own; that of one who has never moved has no turn
    (`who_moved` in play.py). An environment that fails ends its own episode (`Episode.error`), and so does one whose
    first prompt does not fit the model. `ended` may be called with an episode as soon as its text is final, while
    others go on. Raises LmgymError if a prompt of the data does not fit the model, or if nearly all environments fail.

    Example: collect(list(enumerate(examples)), actor, Sampling(), (0, "step", 3, 0), InProcess(HigherOrLower))"""
    return finished_episodes(collect_numbered(list(enumerate(prompts)), actor, sampling, path, envs, ended))


def collect_numbered(
    prompts: Sequence[tuple[int, tuple[int, Example]]],
    actor: Actor,
    sampling: Sampling,
    path: Sequence[int | str],
    envs: Envs | Callable[[], Env] = SingleTurn,
    ended: Callable[[Episode], None] | None = None,
) -> dict[int, list[Episode]]:
    """`collect` for a part of a rollout: the prompts have their numbers in the whole. Returns the episodes that learn
    by the number of their environment; `finished_episodes` puts those of all parts together."""
    loop = RolloutLoop(prompts, actor, path, envs, ended)
    while loop.waiting or loop.live:
        loop.begin_waiting(None if loop.one_turn else actor.engine.rows)
        loop.take_turns(sampling)
    return loop.learners


def finished_episodes(learners: Mapping[int, Sequence[Episode]]) -> list[Episode]:
    """All episodes of a rollout, ordered by environment, then by player, with the environments' rewards in the scores.
    The players of a game get groups of their own. Raises LmgymError if more than MOST_FAILURES of the environments
    have failed."""
    players = max((len(own) for own in learners.values()), default=1)
    episodes: list[Episode] = []
    for number in sorted(learners):
        for player, episode in enumerate(learners[number]):
            episode.group = episode.group * players + player
            episode.index = len(episodes)
            episode.score = sum(turn.reward for turn in episode.turns)
            episodes.append(episode)
    failed, count = [episode.error for episode in episodes if episode.error], len(episodes)
    if len(failed) > MOST_FAILURES * count:
        which = "every environment" if len(failed) == count else f"{len(failed)} of {count} environments"
        raise LmgymError(f"{which} of this rollout failed; the first one: {failed[0]}")
    return episodes


def demonstrate(
    prompts: Sequence[tuple[int, Example]],
    actor: Actor,
    path: Sequence[int | str],
    envs: Envs | Callable[[], Env] = SingleTurn,
    every_turn: bool = False,
) -> list[Episode]:
    """Episodes of demonstrations, which were not sampled; each action holds its end of sequence. Without an environment
    these are reference answers (one is drawn for each example that has several; `every_turn`: with the assistant's
    earlier messages), else the turns that each environment's own `demonstrate` returns. Raises LmgymError if an example
    has no reference."""
    loop = RolloutLoop(list(enumerate(prompts)), actor, path, envs)
    if not loop.one_turn:
        loop.begin_waiting(None)
        while loop.live:
            loop.demonstrate_turns()
        return finished_episodes(loop.learners)
    episodes = []
    for index, (group, example) in enumerate(prompts):
        if not example.references:
            raise LmgymError(
                f"example {example.id} has no reference answer to imitate; supervised training needs one for each"
            )
        answer = example.references[seeds.key(*path, index) % len(example.references)]
        turns = given_turns(example, answer, actor) if every_turn else [given_turn(example, answer, actor)]
        episodes.append(Episode(example, group, index, turns, version=actor.version))
    return episodes


@doing("judging the answers")
def apply_rewards(
    episodes: Sequence[Episode],
    rewards: Sequence[Reward],
    timeout: float = 60.0,
    tokenizer: Any = None,
    most_failures: int = 0,
) -> None:
    """Fill in `reward_components` and `score` of each episode: environment rewards plus weighted reward functions. A
    reward is paid on the last token of the last turn, unless it pays each turn or each token
    (rewards/token_credit.py; that needs the `tokenizer`). `timeout` is the limit of one reward call in seconds.

    A reward that cannot judge an answer (None) adds nothing to its score; an answer that no reward could judge is
    `judged=False`. One that raises, or is too slow, cannot judge the answer that it fails for, which `reward_errors`
    says; with more than `most_failures` of them LmgymError is raised, as for episodes that a reward has paid before: it
    would be paid twice."""
    for reward in rewards:
        if any(reward.name in episode.reward_components for episode in episodes):
            raise LmgymError(
                f"reward '{reward.name}' has judged some of these episodes before, and would be paid twice; apply it "
                "once to what `collect` returns, or to a copy.deepcopy of that"
            )
    played = [episode for episode in episodes if episode.turns]  # an environment may fail before its first turn
    paid_before = [any(turn.reward for turn in episode.turns) for episode in episodes]
    for reward in rewards:
        for episode in episodes:
            episode.reward_components[reward.name] = 0.0
        if not played:
            continue
        began = time.perf_counter()
        pay_reward(reward, played, timeout, tokenizer, most_failures)
        seconds = time.perf_counter() - began
        for episode in played:
            episode.reward_seconds[reward.name] = seconds
    # Add up what the turns have earned.
    for episode, paid in zip(episodes, paid_before, strict=True):
        episode.score = sum(turn.reward for turn in episode.turns)
        episode.judged = paid or is_judged(episode, rewards)
        for reward in (reward for reward in rewards if reward.weight):
            check_size(reward, episode)


def groups_of(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Episodes by group, in order."""
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode)
    return list(groups.values())


class RolloutLoop:
    """The environments of one rollout: those that wait, those that are alive, and the episodes that learn from each, by
    the environment's number."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, tuple[int, Example]]],
        actor: Actor,
        path: Sequence[int | str],
        envs: Envs | Callable[[], Env],
        ended: Callable[[Episode], None] | None = None,
    ) -> None:
        self.actor, self.encode, self.ended = actor, PromptCache(actor), ended
        self.envs: Any = envs if hasattr(envs, "begin") else InProcess(envs)
        self.past: Past = getattr(self.envs, "past", WHOLE)
        self.one_turn = getattr(self.envs, "make_env", None) is SingleTurn  # then the prompts are the data's
        self.env_key, self.episode_key = seeds.key(*path, "environment"), seeds.key(*path, "episode")
        first = [(n, Episode(example, group, n, version=actor.version)) for n, (group, example) in prompts]
        self.waiting, self.live = deque(first), list[EpisodeState]()
        self.learners: dict[int, list[Episode]] = {number: [episode] for number, episode in first}
        self.openings: dict[int, tuple[Example, Opening]] = {}  # of each seed, the first one
        self.opened: dict[int, float] = {}  # seconds that an environment's beginning took, until its first turn

    def begin_waiting(self, limit: int | None) -> None:
        """Start waiting environments until `limit` are alive. An environment that fails here is over."""
        # Reset the environments; those of one group get the same seed.
        count = len(self.waiting) if limit is None else min(len(self.waiting), limit - len(self.live))
        chosen = [self.waiting.popleft() for _ in range(count)]
        items = [(n, e.example, seeds.key(e.group, e.example.id, parent=self.env_key)) for n, e in chosen]
        openings = self.envs.begin(items) if items else []
        self.opened |= {index: self._seconds(index) for index, _ in chosen}

        # Give each one its players.
        for (index, episode), (_, _, seed), opening in zip(chosen, items, openings, strict=True):
            begun = opening if isinstance(opening, EnvFailure) else self._begun(index, episode, seed, opening)
            if isinstance(begun, EnvFailure):
                episode.error, episode.terminated, episode.selected = begun.message, False, False
                self.envs.end([index])
                continue
            self.learners[index] = [begun.players[number].episode for number in opening.learners]
            self.live.append(begun)

    def _begun(self, index: int, episode: Episode, seed: int, opening: Opening) -> EpisodeState | EnvFailure:
        """An environment with its players, before the first turn, or why its episode cannot begin."""
        example, other = self.openings.setdefault(seed, (episode.example, opening))
        if other != opening and example == episode.example:
            warn(BEGUN_DIFFERENTLY)
        try:
            state = begin_episode(index, episode, opening, self.actor, self.episode_key, self.encode, self.past)
        except LmgymError as error:
            if not opening.program:
                raise
            return EnvFailure(str(error))  # its own request, as a later one (EpisodeState.observe), not the recipe's
        problem = "" if self.one_turn else state.player.too_long()
        return EnvFailure(problem) if problem else state

    def take_turns(self, sampling: Sampling) -> None:
        """One sampled turn in each live environment, with one engine call for each actor."""
        actors = {id(state.player.actor): state.player.actor for state in self.live}
        for actor in actors.values():
            players = [state.player for state in self.live if state.player.actor is actor]
            requests = [player.request(self.one_turn) for player in players]
            streaming = {"ended": self._announce(players)} if self.one_turn and self.ended is not None else {}
            began = time.perf_counter()
            completions = actor.engine.generate(requests, sampling, **streaming)
            seconds = time.perf_counter() - began
            for player, completion in zip(players, completions, strict=True):
                player.add_turn(completion, decode(actor.tokenizer, completion.ids), sampling.min_new_tokens)
                player.episode.turns[-1].seconds["sampling"] = seconds
        for state in self._step([None] * len(self.live)):
            for episode in self.learners[state.index]:
                if self.ended is not None and self.live and not episode.error:
                    self.ended(episode)

    def demonstrate_turns(self) -> None:
        """One turn in each live environment, from the environment's own demonstrator."""
        answers = self.envs.demonstrate([state.index for state in self.live])
        for state, text in zip(self.live, answers, strict=True):
            if isinstance(text, str):
                state.player.add_turn(state.player.tokenize_demonstration(text), text)
        self._step([text if isinstance(text, EnvFailure) else None for text in answers])

    def _announce(self, players: Sequence[PlayerState]) -> Callable[[int, list[int]], None]:
        """A callback for the engine: it passes on a finished answer of an episode of one turn."""

        def announce(index: int, ids: list[int]) -> None:
            player = players[index]
            text, given = decode(player.actor.tokenizer, ids), player.actor.answer_start
            turn = Turn(player.new_ids, ids, text=text, given=given)
            if self.ended is not None:
                self.ended(replace(player.episode, turns=[turn]))

        return announce

    def _seconds(self, index: int) -> float:
        """What the newest call of an environment took; 0 if its `Envs` do not say."""
        return float(getattr(self.envs, "spent", {}).get(index, 0.0))

    def _step(self, failures: list[EnvFailure | None]) -> list[EpisodeState]:
        """Step the environments whose player has taken a turn; the live ones are kept, the finished ones returned."""
        # Environments that have failed already are not asked.
        turns = {state.index: state.player.episode.turns for state in self.live}
        asked = [state.index for state, failure in zip(self.live, failures, strict=True) if failure is None]
        if hasattr(self.envs, "hear"):
            players = {state.index: state.player for state in self.live}
            for index in asked:
                self.envs.hear(index, players[index].heard())
        answers = self.envs.step([(index, turns[index][-1].text, turns[index][-1].stop) for index in asked])
        steps = dict(zip(asked, answers, strict=True))
        for index in [] if self.one_turn else asked:  # a question's own environment takes no time
            turns[index][-1].seconds["environment"] = self._seconds(index) + self.opened.pop(index, 0.0)

        live, finished = list[EpisodeState](), list[EpisodeState]()
        for state, failure in zip(self.live, failures, strict=True):
            goes_on = state.observe(failure or steps[state.index], self.encode)
            (live if goes_on else finished).append(state)

        # Close the finished ones in one call: with processes each call is a round trip.
        self.envs.end([state.index for state in finished])
        for player in (player for state in finished for player in state.players):
            player.actor.engine.forget([player.key])
        self.live = live
        return finished
