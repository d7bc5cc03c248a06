"""LlamaGym's Agent: the user's own loop over a gymnasium environment; lmgym samples and trains by PPO.

In a LlamaGym script only the import changes (docs/llamagym.md; examples/blackjack_agent.py):

    from lmgym.compat.llamagym import Agent, AutoModelForCausalLMWithValueHead

Importing the Agent loads no torch, so that an environment's process can use it; torch comes with a model."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from lmgym.core import seeds
from lmgym.core.constraints import LARGEST_REWARD
from lmgym.core.errors import LmgymError, warn
from lmgym.envs import agent
from lmgym.inference.base import Decoding, Request, Sampling
from lmgym.stats.intervals import Interval, mean_interval
from lmgym.text.chat import appended_ids, decode, prompt_ids
from lmgym.types import Episode, Example, Message, Turn

if TYPE_CHECKING:
    from lmgym.compat.llamagym_learner import Learner

Credit = Literal["returns", "shared", "llamagym"]
Remainder = Literal["keep", "drop"]


@dataclasses.dataclass
class _Game:
    """An episode that is being played."""

    episode: Episode
    key: int  # its random numbers
    messages: list[Message]
    ids: list[int] = dataclasses.field(default_factory=list)  # all of it, prompts and answers


class Agent(agent.Agent):
    """A language model that acts in an environment and learns from it by PPO.

    Write `get_system_prompt`, `format_observation` and `extract_action`. Without a model it only translates between an
    environment and text, so that a recipe can use the same class (`env: {name: gymnasium, agent: "module:Class"}`).

    model: an `AutoModelForCausalLMWithValueHead`, or any causal model of Hugging Face's; it trains in place.
    generate_config_dict, ppo_config_dict: Hugging Face's generation keys and TRL 0.7's PPO keys
        (llamagym_settings.py), each on top of LlamaGym's defaults. `batch_size` counts answers.
    credit: which rewards train an answer. returns: its own and, through PPO's returns, all later ones of its episode,
        which is one sequence. shared: each answer is a sample of its own; if only the last one was rewarded, all n
        have an equal part, R / n. llamagym: as LlamaGym had it, R / (n + 1/2) in half precision; for comparisons.
    remainder: a batch is the oldest whole episodes with at most batch_size answers together (one episode, if that
        alone has more). keep: the others train in the next batch, with their ratio to the weights that
        sampled them. drop: they do not train.

    Raises LmgymError for what it cannot honour.

    Example:
        >>> class Blackjack(Agent):
        ...     def get_system_prompt(self): return "You are an expert blackjack player."
        ...     def format_observation(self, observation): return f"Your current total is {observation[0]}"
        ...     def extract_action(self, response): return 0 if "stick" in response else 1
        >>> player = Blackjack(model, tokenizer, "cpu")
        >>> action = player.act(observation); player.assign_reward(1.0); statistics = player.terminate_episode()
    """

    template: Mapping[str, Any] = {}
    """Keyword arguments of the chat template, such as {"enable_thinking": False}."""
    _learner: "Learner | None" = None
    _game: _Game | None = None
    _episodes = 0  # begun since the seed was set

    def __init__(
        self,
        model: Any = None,
        tokenizer: Any = None,
        device: Any = None,
        generate_config_dict: Mapping[str, Any] | None = None,
        ppo_config_dict: Mapping[str, Any] | None = None,
        *,
        credit: Credit = "returns",
        remainder: Remainder = "keep",
    ) -> None:
        for name, value, valid in (("credit", credit, Credit), ("remainder", remainder, Remainder)):
            if value not in get_args(valid):
                raise LmgymError(f"{type(self).__name__}: {name} is {value!r}; valid: {', '.join(get_args(valid))}")
        self.model, self.tokenizer, self.device = model, tokenizer, device
        self.credit, self.remainder = credit, remainder
        self.generate_config_dict, self.ppo_config_dict = dict(generate_config_dict or {}), dict(ppo_config_dict or {})
        self._buffer: list[Episode] = []
        if model is None:
            return
        if tokenizer is None:
            raise LmgymError(f"{type(self).__name__} has a model and no tokenizer; give it the tokenizer of the model")
        from lmgym.compat.llamagym_learner import Learner

        self._learner = Learner(model, tokenizer, device, self.generate_config_dict, self.ppo_config_dict)

    @property
    def current_episode_messages(self) -> list[Message]:
        """What has been said in this episode (a copy: the model reads its own ids, not these)."""
        return list(self._game.messages) if self._game else self._opening()

    @property
    def current_episode_rewards(self) -> list[float]:
        """The rewards of this episode's answers so far, one each."""
        return [turn.reward for turn in self._game.episode.turns] if self._game else []

    def seed(self, seed: int) -> None:
        """From the next episode on, random numbers are a function of this seed and of how many episodes have begun
        since (until it is called, of ppo_config_dict["seed"], else 0). The environment has a seed of its own."""
        self._ready("seed()").seed, self._episodes = int(seed), 0

    def act(self, observation: Any) -> Any:
        """The model's action, or None if `extract_action` raises an error; the answer is kept, and the next reward is
        for it. Raises LmgymError if the conversation no longer fits the model; the episode is then unchanged."""
        learner = self._ready("act()")
        game = self._game or self._begin("episode", self._episodes)
        said = self._answer(game, observation, learner.sampling)
        if self._game is None:
            self._game, self._episodes = game, self._episodes + 1
        return self._action(said)

    def assign_reward(self, reward: float) -> None:
        """Reward the last answer. Several rewards of an answer add up; without any it has 0."""
        if self._game is None or not self._game.episode.turns:
            raise LmgymError("assign_reward() comes after act(): there is no answer yet that could have earned it")
        if not abs(reward) <= LARGEST_REWARD:  # nor nan
            raise LmgymError(
                f"assign_reward: the reward is {reward!r}; it must be a finite number within {LARGEST_REWARD:g}"
            )
        self._game.episode.turns[-1].reward += float(reward)

    def terminate_episode(self, train: bool = True) -> dict[str, float]:
        """End the episode, and train if a batch is full; returns the statistics of the training, else {}. `train=False`
        discards the episode. Statistics are lmgym's metrics (docs/llamagym.md), averaged if several batches were full;
        "updates" is a sum."""
        learner, game, self._game = self._ready("terminate_episode()"), self._game, None
        if game is not None:
            learner.engine.forget([game.key])
        if game is None or not game.episode.turns or not train:
            return {}
        game.episode.score = sum(turn.reward for turn in game.episode.turns)
        self._buffer.append(game.episode)
        records = []
        while _answers(self._buffer) >= learner.settings.batch_size:
            chosen, rest = whole_episodes(self._buffer, learner.settings.batch_size)
            dropped = _answers(rest) if self.remainder == "drop" else 0
            self._buffer = [] if self.remainder == "drop" else rest
            samples = [sample for episode in chosen for sample in samples_of(episode, self.credit)]
            records.append(learner.train(chosen, samples) | {"answers/dropped": float(dropped)})
        return _together(records)

    def evaluate(self, env: Any, episodes: int, greedy: bool = True) -> Interval:
        """The mean return of some episodes of a gymnasium environment, with its 95 % interval (`statistics`).

        Nothing is trained, and the current episode is unchanged. Answers are greedy, or sampled as in training. The
        agent seeds the environment, so that two evaluations play the same episodes. An answer that is no action of
        `env.action_space` is replaced by a random action; a warning says how many."""
        learner, returns, answers, invalid = self._ready("evaluate()"), [], 0, 0
        for number in range(episodes):
            game = self._begin("evaluation", number)
            observation, _ = env.reset(seed=game.key % 2**31)
            space, over, earned = getattr(env, "action_space", None), False, 0.0
            if space is not None:
                space.seed(game.key % 2**31)
            while not over:
                action = self._action(self._answer(game, observation, _decoding(learner.sampling, greedy)))
                answers += 1
                if space is not None and not space.contains(action):
                    action, invalid = space.sample(), invalid + 1
                observation, reward, terminated, truncated, _ = env.step(action)
                earned, over = earned + float(reward), bool(terminated or truncated)
            learner.engine.forget([game.key])
            returns.append([earned])
        if invalid:
            warn(
                f"evaluate: {invalid} of {answers} answers were no action of the environment; random actions "
                "replaced them",
                stacklevel=2,
            )
        return mean_interval(returns)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the language model (adapters merged), which `AutoModelForCausalLM.from_pretrained` reads, its
        tokenizer, and the value head. Beside a packed base, the adapters alone."""
        self._ready("save_pretrained()").save(Path(folder))

    def _ready(self, call: str) -> "Learner":
        if self._learner is None:
            name = type(self).__name__
            raise LmgymError(
                f"{call} needs a model, and this {name} has none: write {name}(model, tokenizer, device), and call "
                "super().__init__ with them where it has an __init__ of its own"
            )
        return self._learner

    def _opening(self) -> list[Message]:
        system = self.get_system_prompt()
        return [*([{"role": "system", "content": system}] if system else []), *self.initial_messages()]

    def _begin(self, kind: str, number: int) -> _Game:
        learner = self._ready("act()")
        episode = Episode(Example(f"{kind}/{number}", ""), group=number, index=number, version=learner.version)
        return _Game(episode, seeds.key(learner.seed, "llamagym", kind, number), self._opening())

    def _answer(self, game: _Game, observation: Any, sampling: Sampling) -> str:
        """Show the observation and add a turn; only the new text is tokenised."""
        learner, text, turns = self._ready("act()"), self.format_observation(observation), game.episode.turns
        if not isinstance(text, str):
            raise LmgymError(f"{type(self).__name__}.format_observation returned {text!r}; it must return a text")
        shown: Message = {"role": "user", "content": text}
        if turns:
            ended = turns[-1].stop == "eos"
            fresh = appended_ids(self.tokenizer, game.messages[:-1], [shown], game.ids[-1], self.template, ended)
        else:
            fresh = prompt_ids(self.tokenizer, [*game.messages, shown], self.template)
        request = Request((*game.ids, *fresh), seeds.key(len(turns), parent=game.key), conversation=game.key)
        completion = learner.engine.generate([request], sampling)[0]
        said = decode(self.tokenizer, completion.ids)
        turn = Turn(fresh, completion.ids, completion.logprobs, said, completion.stop, sampling.min_new_tokens)
        turn.kept = completion.kept
        turns.append(turn)
        game.ids += [*fresh, *completion.ids]
        game.messages += [shown, {"role": "assistant", "content": said}]
        return said

    def _action(self, said: str) -> Any:
        try:
            return self.extract_action(said.strip())  # as LlamaGym hands it over
        except Exception:
            return None


def whole_episodes(episodes: Sequence[Episode], batch_size: int) -> tuple[list[Episode], list[Episode]]:
    """The oldest episodes with at most `batch_size` turns together, at least one episode; and the rest."""
    count = 1
    while count < len(episodes) and _answers(episodes[: count + 1]) <= batch_size:
        count += 1
    return list(episodes[:count]), list(episodes[count:])


def credited(rewards: Sequence[float], credit: Credit) -> list[float]:
    """The reward that each answer of an episode trains with.

    Example:
        >>> credited([0, 1], "returns"), credited([0, 1], "shared"), credited([0, 1], "llamagym")
        ([0.0, 1.0], [0.5, 0.5], [0.39990234375, 0.39990234375])
    """
    own = [float(reward) for reward in rewards]
    if credit != "returns" and not any(own[:-1]):
        own = [own[-1] / (len(own) + (0.5 if credit == "llamagym" else 0))] * len(own)
    return [float(np.float16(reward)) for reward in own] if credit == "llamagym" else own


def samples_of(episode: Episode, credit: Credit) -> list[Episode]:
    """The samples of an episode: the episode itself, or for the credits "shared" and "llamagym" one episode for each
    answer, whose prompt is everything before it."""
    if credit == "returns":
        return [episode]
    samples, before = [], list[int]()
    for turn, reward in zip(episode.turns, credited([t.reward for t in episode.turns], credit), strict=True):
        before = [*before, *turn.prompt_ids]
        alone = dataclasses.replace(turn, prompt_ids=before, reward=reward)
        samples.append(dataclasses.replace(episode, turns=[alone], score=reward))
        before = [*before, *turn.action_ids]
    return samples


def _answers(episodes: Sequence[Episode]) -> int:
    return sum(len(episode.turns) for episode in episodes)


def _decoding(sampling: Sampling, greedy: bool) -> Decoding:
    """The same settings, or greedy ones, for answers that are not trained on."""
    own = {field.name: getattr(sampling, field.name) for field in dataclasses.fields(Sampling)}
    return Decoding(**own | ({"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None} if greedy else {}))


def _together(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over several batches; of "updates" and "answers/dropped" the sum."""
    names = sorted({name for record in records for name in record})
    values = {name: [record[name] for record in records if name in record] for name in names}
    sums = ("updates", "answers/dropped")
    return {name: sum(own) if name in sums else sum(own) / len(own) for name, own in values.items()}


def __getattr__(name: str) -> Any:
    if name == "AutoModelForCausalLMWithValueHead":
        from lmgym.compat.llamagym_learner import AutoModelForCausalLMWithValueHead

        return AutoModelForCausalLMWithValueHead
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
