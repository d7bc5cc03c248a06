"""Rewards that pay token by token: those that are written so, and, with `shaping`, any other.

What a token earns stands in `Turn.token_rewards` of the episode's last turn, and in `Batch.rewards` at that token. It
adds up to the reward of the whole answer, so what looks at whole answers (GRPO, RLOO) sees no difference; what looks
at tokens (PPO, A2C, TRPO, NLPO) does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from lmgym.core.errors import LmgymError
from lmgym.rewards.base import Reward, call_guarded, call_reward, finite_number
from lmgym.text.chat import decode
from lmgym.types import Episode

Function = TypeVar("Function", bound=Callable[..., Any])


def each_token(function: Function) -> Function:
    """Decorator: this reward takes episodes and the policy's tokenizer, and returns a list of numbers for each episode,
    one for each action of its last turn. The reward of the answer is their sum.

    Example:
        >>> @register("reward", "commas")
        ... @each_token
        ... def commas(episodes, tokenizer):
        ...     return [[float("," in tokenizer.decode([id])) for id in e.turns[-1].action_ids] for e in episodes]
    """
    function.pays_tokens = True  # type: ignore[attr-defined]
    return function


def rewards_by_token(
    reward: Reward, episodes: Sequence[Episode], tokenizer: Any, timeout: float | None = 60.0
) -> list[tuple[float, list[float]]]:
    """For each episode its reward, before the weight, and what of it each action of the last turn has earned.

    With `shaping` an action earns what it changes: r_t = v(y_1 .. y_t) - v(y_1 .. y_t-1), v being the reward of an
    answer that is over there, and v of no action 0. So the sum is the reward itself, v of the whole answer: it is
    potential-based shaping (Ng, Harada and Russell 1999), which at gamma 1 leaves the best policy as it is. It costs a
    call of the reward for each token.

    Raises LmgymError where there is no tokenizer, a reward does not return a number for each action, and as `evaluate`.

    Example: `words`, of an answer of three tokens, the last one its end
        >>> rewards_by_token(build_rewards({"words": {"shaping": True}})[0], [episode], tokenizer)
        [(2.0, [1.0, 1.0, 0.0])]
    """
    if tokenizer is None:
        raise LmgymError(
            f"reward '{reward.name}' pays token by token, for which it needs the tokenizer: "
            "apply_rewards(episodes, rewards, tokenizer=...)"
        )
    return (_shaped if reward.shaping else _by_token)(reward, episodes, tokenizer, timeout)


def token_prefixes(episode: Episode, tokenizer: Any) -> list[Episode]:
    """The episode as it would be had it ended behind each action of its last turn; the last one is the episode itself.

    Example: of the answer "4 apples" in two tokens and its end
        >>> [part.text for part in beginnings(episode, tokenizer)]
        ['4', '4 apples', '4 apples']
    """
    *before, last = episode.turns
    cut = [
        replace(last, action_ids=ids, logprobs=last.logprobs[: len(ids)], text=decode(tokenizer, ids), kept=None)
        for ids in (last.action_ids[:count] for count in range(1, len(last.action_ids)))
    ]
    return [*(replace(episode, turns=[*before, turn]) for turn in cut), episode]


def _shaped(
    reward: Reward, episodes: Sequence[Episode], tokenizer: Any, timeout: float | None
) -> list[tuple[float, list[float]]]:
    judged = [token_prefixes(episode, tokenizer) for episode in episodes]
    values = iter(call_reward(reward, [part for parts in judged for part in parts], timeout))
    found = []
    for episode, parts in zip(episodes, judged, strict=True):
        scores = [next(values) for _ in parts]
        changes = [after - before for before, after in zip([0.0, *scores], scores, strict=False)]
        found.append((scores[-1], changes[: len(episode.turns[-1].action_ids)]))
    return found


def _by_token(
    reward: Reward, episodes: Sequence[Episode], tokenizer: Any, timeout: float | None
) -> list[tuple[float, list[float]]]:
    judged = [episode for episode in episodes if reward.applies(episode.example)]
    rows = iter(call_guarded(reward, (judged, tokenizer), timeout, judged) if judged else [])
    found = []
    for index, episode in enumerate(episodes):
        count = len(episode.turns[-1].action_ids)
        row = list(next(rows)) if reward.applies(episode.example) else [0.0] * count
        if len(row) != count:
            raise LmgymError(
                f"reward '{reward.name}' returned {len(row)} values for the {count} actions of example "
                f"'{episode.example.id}'"
            )
        numbers = [finite_number(reward.name, value, index, episodes) for value in row]
        found.append((math.fsum(numbers), numbers))
    return found
