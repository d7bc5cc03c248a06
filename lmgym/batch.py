"""Batch, PolicyOutputs and States: a set of episodes as tensors. `collate` is the only door from the text world.

Letters: N rows, T tokens, S tokens that an encoder reads. A row is one sequence that the model can be run on, padded
on the right. Column t describes token t; `Policy.compute_logprobs` is the only place that shifts by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int32, UInt8
from torch import Tensor

from lmgym.core.errors import LmgymError
from lmgym.functional.truncation import joined
from lmgym.types import Episode, Turn

SOURCE = ("source", "source_mask")  # columns [N S]; all others of two dimensions are [N T]


@dataclass(frozen=True)
class SamplingMask:
    """The sets that actions were drawn from, one packed row each (functional/truncation.py); `Batch.kept` has each
    action's row.

    Memory for each action: one bit for each token of the vocabulary, or 4 bytes for each token of the largest set where
    that is less (the rows are then ids, int32); nothing for prompts and padding.

    Example: SamplingMask(bits=pack(kept))
    """

    bits: UInt8[Tensor, "K W"] | Int32[Tensor, "K W"]
    renormalised: bool = True  # False: log-probabilities are over the whole vocabulary all the same (RL4LMs' NLPO)


@dataclass(frozen=True)
class Batch:
    """Columns about N rows of T tokens; those that nothing needed are None.

    Example: two answers to the prompt [5, 6]: [7, 2] (2 ends the sequence), scored 1, and [8], cut off, scored 0:
        tokens      [[5, 6, 7, 2], [5, 6, 8, 0]]
        mask        [[1, 1, 1, 1], [1, 1, 1, 0]]
        actions     [[0, 0, 1, 1], [0, 0, 1, 0]]
        rewards     [[0, 0, 0, 1], [0, 0, 0, 0]]     score [1, 0]    terminated [1, 0]
        episode     [0, 1]    group [0, 0]    version [0, 0]
    """

    tokens: Int[Tensor, "N T"]
    mask: Bool[Tensor, "N T"]  # a real token
    actions: Bool[Tensor, "N T"]  # sampled by the policy (or demonstrated), end of sequence included
    rewards: Float[Tensor, "N T"]  # on the token that earned it, else on the last one of its turn
    score: Float[Tensor, " N"]  # total reward of the row's episode
    episode: Int[Tensor, " N"]  # rows of one episode share its number; episodes count once in every statistic
    group: Int[Tensor, " N"]  # episodes of one prompt share its number
    version: Int[Tensor, " N"]  # updates that the sampling weights had seen
    terminated: Bool[Tensor, " N"]  # False: cut off, so a value function should bootstrap
    temperature: float = 1.0  # of the distribution that was sampled, and so of the one that is scored
    stop_ids: tuple[int, ...] = ()
    key: int = 0  # random key of this step's update (order of minibatches)
    limit: int | None = None  # most tokens that an answer could have had (max_new_tokens)
    vocabulary: int | None = None  # how many tokens the policy's head knows (from `prepare`)
    reward_components: Float[Tensor, "N P"] | None = (
        None  # each part of the score before its weight, the environment's own last
    )
    component_weights: tuple[float, ...] = ()
    stop_excluded: Bool[Tensor, "N T"] | None = None  # the stop ids could not be sampled here (min_new_tokens)
    source: Int[Tensor, "N S"] | None = None  # what the encoder reads; `tokens` are then the decoder's
    source_mask: Bool[Tensor, "N S"] | None = None
    sampling_mask: SamplingMask | None = None  # of truncated or restricted sampling; everything is renormalised on them
    kept: Int[Tensor, "N T"] | None = None  # each action's row of them
    turn: Int[Tensor, "N T"] | None = (
        None  # number of each action's turn in its episode, 0 elsewhere (functional/turn_discounts.py)
    )
    logprobs_sampler: Float[Tensor, "N T"] | None = None
    baseline: Float[Tensor, " N"] | None = None  # score of the greedy answer
    logprobs_old: Float[Tensor, "N T"] | None = None
    logprobs_ref: Float[Tensor, "N T"] | None = None
    logprobs_teacher: Float[Tensor, "N T"] | None = None
    values: Float[Tensor, "N T"] | None = None  # of what stands before each action
    last_values: Float[Tensor, " N"] | None = None  # of what stands behind the row's last action
    advantages: Float[Tensor, "N T"] | None = None
    returns: Float[Tensor, "N T"] | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, rows: Int[Tensor, " R"] | Bool[Tensor, " N"]) -> "Batch":
        """The batch of some rows, cut to the longest of them."""
        columns = self._map(lambda column: column[rows])
        longest = {name: _longest(columns[name]) for name in ("mask", "source_mask") if name in columns}
        for name, column in columns.items():
            if column.dim() == 2 and name != "reward_components":
                columns[name] = column[:, : longest["source_mask" if name in SOURCE else "mask"]]
        return replace(self, **columns)

    def replace(self, **columns: Any) -> "Batch":
        """The batch with these columns filled in or replaced."""
        return replace(self, **columns)

    def to(self, device: torch.device | str) -> "Batch":
        return replace(self, **self._map(lambda column: column.to(device)))

    def require(self, name: str) -> Tensor:
        """The column of this name. Raises LmgymError if nothing has filled it in.

        Example: batch.require("advantages")
        """
        return _required(self, name)

    def per_token(self, per_row: Float[Tensor, " N"]) -> Float[Tensor, "N T"]:
        """One number per row, written to each of its actions (zero elsewhere)."""
        return per_row[:, None] * self.actions

    def _map(self, function: Any) -> dict[str, Any]:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: function(column) for name, column in columns.items() if isinstance(column, Tensor)}


@dataclass(frozen=True)
class PolicyOutputs:
    """What a policy says of a batch: zero where there is no action.

    `logprobs` are natural logs under the sampled distribution (temperature, excluded stop ids, kept sets); `entropy`
    (nats), `values` and `last_values` only where they were asked for.
    """

    logprobs: Float[Tensor, "N T"]
    entropy: Float[Tensor, "N T"] | None = None
    values: Float[Tensor, "N T"] | None = None
    last_values: Float[Tensor, " N"] | None = None

    def require(self, name: str) -> Tensor:
        """The column of this name. Raises LmgymError if it was not asked for."""
        return _required(self, name)


class States(NamedTuple):
    """Hidden states of R tokens as they enter the LM head, and the model's own logits on the plain path."""

    hidden: Float[Tensor, "R H"]
    logits: Float[Tensor, "R V"] | None


def collate(
    episodes: Sequence[Episode],
    pad_id: int = 0,
    temperature: float = 1.0,
    stop_ids: Sequence[int] = (),
    key: int = 0,
    limit: int | None = None,
    weights: Mapping[str, float] | None = None,
) -> Batch:
    """Episodes to a Batch, from their ids; nothing is tokenized here.

    Rows come in the order of the episodes. With the `weights` of the rewards `reward_components` is filled in. Raises
    LmgymError if there is no episode, one without an action, or one that lacks a component.

    Example:
        >>> turn = Turn(prompt_ids=[5, 6], action_ids=[7, 2], logprobs=[-.5, -.1], reward=1.0)
        >>> collate([Episode(Example("x", "?"), group=0, index=0, turns=[turn], score=1.0)]).tokens
        tensor([[5, 6, 7, 2]])
    """
    rows = [(episode, row) for episode in episodes for row in episode.rows()]
    if not rows:
        raise LmgymError("there is no episode to train on")
    length = max(sum(len(turn.prompt_ids) + len(turn.action_ids) for turn in row) for _, row in rows)
    size = (len(rows), length)
    tokens = torch.full(size, pad_id, dtype=torch.long)
    mask, actions, excluded = (torch.zeros(size, dtype=torch.bool) for _ in range(3))
    rewards, logprobs, turns = torch.zeros(size), torch.zeros(size), torch.zeros(size, dtype=torch.long)
    numbers = {id(turn): number for episode in episodes for turn, number in _numbered(episode.turns)}
    for n, (episode, row) in enumerate(rows):
        ids = [token for turn in row for token in turn.prompt_ids + turn.action_ids]
        tokens[n, : len(ids)] = torch.tensor(ids)
        mask[n, : len(ids)] = True
        for turn, start, stop in _spans(row):
            if start == stop:
                raise LmgymError(f"episode {episode.index} (example {episode.example.id}) has a turn without an action")
            actions[n, start:stop] = True
            excluded[n, start : start + min(turn.min_new_tokens, stop - start)] = True
            rewards[n, start:stop] = _token_rewards(turn)
            turns[n, start:stop] = numbers[id(turn)]
            if turn.logprobs:
                logprobs[n, start:stop] = torch.tensor(turn.logprobs)
    owners = [episode for episode, _ in rows]
    sources = [row[0].source_ids for _, row in rows]
    if any(sources) and not (all(sources) and all(len(row) == 1 for _, row in rows)):
        raise LmgymError("some turns have source_ids; then each turn needs them, and a row of its own (restart=True)")
    sampled = all(turn.logprobs for episode in episodes for turn in episode.turns)
    greedy = all(episode.baseline is not None for episode in episodes)
    return Batch(
        tokens=tokens,
        mask=mask,
        actions=actions,
        rewards=rewards,
        score=torch.tensor([episode.score for episode in owners]),
        episode=torch.tensor([episode.index for episode in owners]),
        group=torch.tensor([episode.group for episode in owners]),
        version=torch.tensor([episode.version for episode in owners]),
        terminated=torch.tensor([episode.terminated for episode in owners]),
        temperature=temperature,
        stop_ids=tuple(stop_ids),
        key=key,
        limit=limit,
        stop_excluded=excluded if bool(excluded.any()) else None,
        turn=turns,
        logprobs_sampler=logprobs if sampled else None,
        baseline=torch.tensor([float(episode.baseline or 0.0) for episode in owners]) if greedy else None,
        **(_source_columns(sources, pad_id) if any(sources) else {}),
        **_kept_columns([turn for _, row in rows for turn in row], actions),
        **(_component_columns(owners, weights) if weights is not None else {}),
    )


def _required(owner: Batch | PolicyOutputs, name: str) -> Tensor:
    column = getattr(owner, name)
    if not isinstance(column, Tensor):
        raise LmgymError(
            f"{type(owner).__name__} has no column '{name}'; let the algorithm's `requirements` ask for it, or fill it "
            "in before (advantages and returns: in `advantages`; the sampler's: in `collate`)"
        )
    return column


def _token_rewards(turn: Turn) -> Float[Tensor, " A"]:
    """A turn's reward at its actions: where each earned its share, and what is left on the last one."""
    earned = torch.zeros(len(turn.action_ids))
    if turn.token_rewards is None:
        earned[-1] = turn.reward
        return earned
    if len(turn.token_rewards) != len(turn.action_ids):
        raise LmgymError(f"a turn of {len(turn.action_ids)} actions has {len(turn.token_rewards)} token_rewards")
    earned += torch.tensor(turn.token_rewards)
    earned[-1] += turn.reward - sum(turn.token_rewards)
    return earned


def _numbered(turns: Sequence[Turn]) -> list[tuple[Turn, int]]:
    """Each turn with its number; what goes on with an unfinished action has the number of its beginning."""
    numbered, number = [], 0
    for turn in turns:
        numbered.append((turn, number))
        number += not turn.unfinished
    return numbered


def _longest(mask: Bool[Tensor, "N T"]) -> int:
    return int(mask.sum(1).max()) if len(mask) else 0


def _source_columns(sources: list[list[int]], pad_id: int) -> dict[str, Any]:
    """`source` and `source_mask` [N S]."""
    size = (len(sources), max(map(len, sources)))
    source, mask = torch.full(size, pad_id, dtype=torch.long), torch.zeros(size, dtype=torch.bool)
    for n, ids in enumerate(sources):
        source[n, : len(ids)] = torch.tensor(ids)
        mask[n, : len(ids)] = True
    return {"source": source, "source_mask": mask}


def _kept_columns(turns: list[Turn], actions: Bool[Tensor, "N T"]) -> dict[str, Any]:
    """`sampling_mask` and `kept`, where there are any: the sets stand in the order of the actions."""
    if all(turn.kept is None for turn in turns):
        return {}
    if any(turn.kept is None or len(turn.kept) != len(turn.action_ids) for turn in turns):
        raise LmgymError("some actions were drawn from a kept set and others were not; one batch cannot hold both")
    bits = torch.from_numpy(joined([turn.kept for turn in turns if turn.kept is not None]))
    kept = torch.zeros(actions.shape, dtype=torch.long)
    kept[actions] = torch.arange(len(bits))
    return {"sampling_mask": SamplingMask(bits), "kept": kept}


def _component_columns(owners: list[Episode], weights: Mapping[str, float]) -> dict[str, Any]:
    """`reward_components` and `component_weights`: the rewards that count, then the environment's own, at weight 1."""
    counting = {name: weight for name, weight in weights.items() if weight}
    table = []
    for episode in owners:
        missing = [name for name in counting if name not in episode.reward_components]
        if missing:
            raise LmgymError(f"episode {episode.index} (example {episode.example.id}) has no part '{missing[0]}'")
        paid = [weight * episode.reward_components[name] for name, weight in counting.items()]
        own = episode.score - sum(paid)
        rounding = 1e-9 * (abs(episode.score) + sum(map(abs, paid)))  # what a sum leaves over is no reward
        table.append([*(episode.reward_components[name] for name in counting), own if abs(own) > rounding else 0.0])
    return {"reward_components": torch.tensor(table), "component_weights": (*counting.values(), 1.0)}


def _spans(row: list[Turn]) -> list[tuple[Turn, int, int]]:
    """Each turn with the columns [start, stop) of its action."""
    spans, position = [], 0
    for turn in row:
        start = position + len(turn.prompt_ids)
        position = start + len(turn.action_ids)
        spans.append((turn, start, position))
    return spans
