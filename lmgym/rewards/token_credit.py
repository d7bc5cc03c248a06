"""Rewards per token: functions marked with `@each_token`, and any other reward with the option `shaping`. Rewards per
turn (option `each_turn`): for a judge of single steps, or a format that each message must keep.

A token's reward is stored in `Turn.token_rewards` of the episode's last turn, and in `Batch.rewards` at that token. The
tokens' rewards add up to the reward of the whole answer. So algorithms that use whole answers (GRPO, RLOO) see no
difference; algorithms that use tokens (PPO, A2C, TRPO, NLPO) do."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

from lmgym.core.errors import LmgymError
from lmgym.processes.pool import Failure
from lmgym.rewards.base import Judgement, Reward, call_guarded, call_reward, finite_number
from lmgym.text.chat import decode
from lmgym.types import Episode

Function = TypeVar("Function", bound=Callable[..., Any])


def each_token(function: Function) -> Function:
    """Decorator: this reward takes episodes and the policy's tokenizer. For each episode it returns a list of numbers,
    one per action of the last turn. The reward of the answer is their sum."""
    function.pays_tokens = True  # type: ignore[attr-defined]
    return function


def rewards_by_token(
    reward: Reward, episodes: Sequence[Episode], tokenizer: Any, timeout: float | None = 60.0
) -> list[tuple[float, list[float]] | Failure | None]:
    """For each episode its reward (not yet weighted), and the part of it that each action of the last turn earns; None
    or a Failure where the reward cannot judge it.

    With `shaping` action t earns r_t = v(y_1 .. y_t) - v(y_1 .. y_t-1). v is the reward of an answer that ends there,
    and v of an answer without actions is 0. So the sum is v of the whole answer, the reward itself. This is
    potential-based shaping (Ng, Harada and Russell 1999): with gamma 1 the best policy stays the same. It costs one
    call of the reward per token. A beginning that cannot be judged is worth as much as the one before it.

    Raises LmgymError without a tokenizer, if a reward does not return one number per action, and as `call_reward` does.
    """
    if tokenizer is None:
        raise LmgymError(
            f"reward '{reward.name}' pays token by token, for which it needs the tokenizer: "
            "apply_rewards(episodes, rewards, tokenizer=...)"
        )
    if not reward.shaping:
        return _by_token(reward, episodes, tokenizer, timeout)
    # Score all prefixes of all episodes in one call, then hand the values back to their episodes.
    prefixes = [token_prefixes(episode, tokenizer) for episode in episodes]
    values = iter(call_reward(reward, [prefix for several in prefixes for prefix in several], timeout, tokenizer))
    results = list[tuple[float, list[float]] | Failure | None]()
    for episode, several in zip(episodes, prefixes, strict=True):
        scores = [0.0]
        judgements = [next(values) for _ in several]
        for judgement in judgements:
            scores.append(judgement if isinstance(judgement, float) else scores[-1])
        changes = [after - before for before, after in pairwise(scores)]
        failed = _failure(judgements)
        if failed is not None or judgements[-1] is None:
            results.append(failed)
        else:
            results.append((scores[-1], changes[: len(episode.turns[-1].action_ids)]))  # a turn may have no action
    return results


def _failure(judgements: Sequence[Judgement]) -> Failure | None:
    """The first failure of several calls about one answer."""
    return next((one for one in judgements if isinstance(one, Failure)), None)


def token_prefixes(episode: Episode, tokenizer: Any) -> list[Episode]:
    """For each action of the last turn, the episode as if it ended after that action; the last item is the episode
    itself."""
    *before, last = episode.turns
    shortened = [
        replace(last, action_ids=ids, logprobs=last.logprobs[: len(ids)], text=decode(tokenizer, ids), kept=None)
        for ids in (last.action_ids[:count] for count in range(1, len(last.action_ids)))
    ]
    return [*(replace(episode, turns=[*before, turn]) for turn in shortened), episode]


def _by_token(
    reward: Reward, episodes: Sequence[Episode], tokenizer: Any, timeout: float | None
) -> list[tuple[float, list[float]] | Failure | None]:
    shown = [episode for episode in episodes if reward.applies(episode.example)]
    rows = iter(call_guarded(reward, (shown, tokenizer), timeout, shown) if shown else [])
    results = list[tuple[float, list[float]] | Failure | None]()
    for index, episode in enumerate(episodes):
        count = len(episode.turns[-1].action_ids)
        row = next(rows) if reward.applies(episode.example) else [0.0] * count
        if row is None or isinstance(row, Failure):
            results.append(row)
            continue
        row = list(row)
        if len(row) != count:
            raise LmgymError(
                f"reward '{reward.name}' returned {len(row)} values for the {count} actions of example "
                f"'{episode.example.id}'"
            )
        numbers = [finite_number(reward.name, value, index, episodes) for value in row]
        results.append((math.fsum(numbers), numbers))
    return results


def rewards_by_turn(
    reward: Reward, episodes: Sequence[Episode], timeout: float | None = 60.0, tokenizer: Any = None
) -> list[list[float] | Failure | None]:
    """For each episode the rewards of its turns, not yet weighted. A turn's reward is that of the episode as if it
    ended after this turn. A turn whose action continues in the next one (`Turn.unfinished`) gets 0, and so does one
    that the reward cannot judge; None or a Failure if it can judge none of them, or fails for one.

    The reward of the episode is their sum. It costs one call of the reward per turn. Raises as `call_reward` does."""
    # Score the episodes as if they ended with each action, in one call.
    ends = [[n for n, turn in enumerate(e.turns) if turn is e.turns[-1] or not turn.unfinished] for e in episodes]
    prefixes = [_until(episode, end) for episode, own in zip(episodes, ends, strict=True) for end in own]
    values = iter(call_reward(reward, prefixes, timeout, tokenizer))
    results = list[list[float] | Failure | None]()
    for episode, own in zip(episodes, ends, strict=True):
        judgements = {index: next(values) for index in own}
        failed = _failure(list(judgements.values()))
        if failed is not None or all(one is None for one in judgements.values()):
            results.append(failed)
        else:
            paid = {index: one for index, one in judgements.items() if isinstance(one, float)}
            results.append([paid.get(index, 0.0) for index in range(len(episode.turns))])
    return results


def _until(episode: Episode, end: int) -> Episode:
    """The episode as if it ended with the turn of this index: its turns and its messages up to there."""
    turns, later = episode.turns[: end + 1], episode.turns[end + 1 :]
    if not later:
        return episode
    # The later turns have written so many messages of an assistant, behind the one that this turn is a part of.
    newer = sum(turn.continuation is None for turn in episode.turns[end:-1])
    own = [n for n, message in enumerate(episode.messages) if message["role"] == "assistant"]
    shown = replace(episode, turns=turns, messages=[])
    # Of a conversation that began anew since then, the messages are not known any more.
    if newer < len(own) and not any(turn.restart and not turn.source_ids for turn in later):
        shown.messages = [*episode.messages[: own[-1 - newer]], {"role": "assistant", "content": shown.text}]
    return shown
