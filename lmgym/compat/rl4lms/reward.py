"""RL4LMs' reward classes: one is called for each token of an answer, the other for many answers at once.

from lmgym.compat.rl4lms.reward import RewardFunction          # in place of rl4lms.envs.text_generation.reward"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmgym.compat.rl4lms.classes import Maker, base_names, check_class, imitate
from lmgym.core.errors import LmgymError
from lmgym.rewards.token_credit import each_token, token_prefixes
from lmgym.text.chat import plain_text
from lmgym.types import Episode, Example


@dataclass(frozen=True)
class Observation:
    """The input of a reward: the prompt, and the answer so far.

    It has all of RL4LMs' text fields. Its tensors are made on demand: [1, tokens], int64, without the padding that
    RL4LMs' environment adds.

    Example: Observation("Count: 1 2", "3 4", ["3 4 5"], ["3", " 4"], {}, (5, 6), (7, 8))"""

    prompt_or_input_text: str
    context_text: str
    target_or_reference_texts: list[str]
    action_history: list[str]
    meta_info: dict[str, Any]
    prompt_ids: tuple[int, ...]
    context_ids: tuple[int, ...]

    prompt_or_input_encoded_pt = property(lambda self: _row(self.prompt_ids))
    prompt_or_input_attention_mask_pt = property(lambda self: _row([1] * len(self.prompt_ids)))
    context_encoded_pt = property(lambda self: _row(self.context_ids))
    context_attention_mask_pt = property(lambda self: _row([1] * len(self.context_ids)))
    input_encoded_pt = property(lambda self: _row(self.prompt_ids + self.context_ids))
    input_attention_mask_pt = property(lambda self: _row([1] * len(self.prompt_ids + self.context_ids)))


class RewardFunction(ABC):
    """A reward that is called for each token; `done` is true at the last one.

    Example: a point for each comma, and one for an answer that ends in a full stop
        >>> class Punctuation(RewardFunction):
        ...     def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        ...         before, now = prev_observation.context_text, current_observation.context_text
        ...         return now.count(",") - before.count(",") + float(done and now.endswith("."))
        >>> RewardFunctionRegistry.add("punctuation", Punctuation)
    """

    @abstractmethod
    def __call__(
        self,
        prev_observation: Observation,
        action: int,
        current_observation: Observation,
        done: bool,
        meta_info: dict[str, Any] | None = None,
    ) -> float:
        """The reward of `action`, a token id, which made the first observation the second."""


class BatchedRewardFunction(ABC):
    """A reward that is called with all prefixes of many answers at once; `dones` is true for whole answers."""

    @abstractmethod
    def __call__(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        dones: list[bool],
        meta_infos: list[dict[str, Any]] | None = None,
    ) -> list[float]:
        """One number for each text; that of a prefix is what its last token earns."""


def reward_of(id: str, cls: type) -> Callable[..., list[list[float]]]:
    """Turn a user's class into a reward that pays token by token; its arguments are those of the class's __init__.

    Example: register("reward", "punctuation")(reward_of("punctuation", Punctuation))"""
    check_class("reward", id, cls, "__call__")
    make = Maker("reward", id, cls)
    pay = _batched if "BatchedRewardFunction" in base_names(cls) else _step_by_step

    @each_token
    def reward(episodes: list[Episode], tokenizer: Any, **arguments: Any) -> list[list[float]]:
        return pay(make(arguments), episodes, tokenizer)

    def check(examples: Sequence[Example], **arguments: Any) -> None:
        make(arguments)

    imitate(reward, cls, ("episodes", "tokenizer"), cls, "reward")
    reward.check = check  # type: ignore[attr-defined]
    return reward


def observations(episode: Episode, tokenizer: Any) -> list[Observation]:
    """The observations of an answer in RL4LMs' environment: before its first token, and after each token. Of several
    turns, the last one is the answer."""
    last = episode.turns[-1]
    prompt, references, meta = _sample(episode.example)
    history = [str(token) for token in tokenizer.convert_ids_to_tokens(last.action_ids)]
    texts = ["", *(part.turns[-1].text for part in token_prefixes(episode, tokenizer))]
    asked = tuple(last.source_ids or last.prompt_ids)
    return [
        Observation(prompt, texts[n], references, history[:n], meta, asked, tuple(last.action_ids[:n]))
        for n in range(len(last.action_ids) + 1)
    ]


def _step_by_step(function: Any, episodes: Sequence[Episode], tokenizer: Any) -> list[list[float]]:
    rows = []
    for episode in episodes:
        shown, ids = observations(episode, tokenizer), episode.turns[-1].action_ids
        steps = zip(shown[:-1], ids, shown[1:], strict=True)
        rows.append([function(before, id, now, now is shown[-1], now.meta_info) for before, id, now in steps])
    return rows


def _batched(function: Any, episodes: Sequence[Episode], tokenizer: Any) -> list[list[float]]:
    prompts, texts, references, dones, metas = list[str](), list[str](), list[list[str]](), list[bool](), list[Any]()
    for episode in episodes:
        parts = token_prefixes(episode, tokenizer)
        prompt, wanted, meta = _sample(episode.example)
        prompts += [prompt] * len(parts)
        texts += [part.turns[-1].text for part in parts]
        references += [wanted] * len(parts)
        dones += [part is episode for part in parts]
        metas += [meta] * len(parts)
    found = function(prompts, texts, references, dones, metas)
    values = found.tolist() if hasattr(found, "tolist") else list(found)
    if len(values) == sum(dones):  # of the whole answers alone, as RL4LMs' own batched penalty of CommonGen
        given = iter(values)
        values = [next(given) if done else 0.0 for done in dones]
    if len(values) != len(dones):
        raise LmgymError(
            f"{type(function).__name__} returned {len(values)} rewards for {len(dones)} texts, {sum(dones)} of them "
            "whole answers; it must return one for each text, or one for each whole answer"
        )
    rest = iter(values)
    return [[next(rest) for _ in episode.turns[-1].action_ids] for episode in episodes]


def _sample(example: Example) -> tuple[str, list[str], dict[str, Any]]:
    """Prompt, references and meta_info, as RL4LMs' classes know them."""
    return plain_text(example.prompt), list(example.references), dict(example.meta)


def _row(ids: Sequence[int]) -> Any:
    import torch

    return torch.tensor([list(ids)], dtype=torch.long)
