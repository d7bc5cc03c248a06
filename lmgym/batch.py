"""Batch, PolicyOutputs and States: episodes as tensors. `collate` is the only way from episodes to tensors.

Shapes: N rows, T tokens, S source tokens of an encoder, V vocabulary. A row is one sequence on which the model can run,
padded on the right. Column t describes token t; `Policy.compute_logprobs` is the only place that shifts by one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int, Int32, UInt8
from torch import Tensor

from lmgym.core.errors import LmgymError
from lmgym.functional import truncation
from lmgym.types import Episode, Turn

SOURCE = ("source", "source_mask")  # columns [N S]; all others of two dimensions are [N T]


@dataclass(frozen=True)
class SamplingMask:
    """The set of tokens that each action was drawn from, K sets in all (functional/truncation.py describes their form).

    `Batch.kept` maps actions to sets. Memory per action: one bit for each token of the vocabulary, or 4 bytes for each
    token of the largest set if that is less (the sets are then ids, int32); nothing for prompts and padding.

    Example: SamplingMask(bits=torch.tensor([[0b101]], dtype=torch.uint8))"""

    bits: UInt8[Tensor, "K W"] | Int32[Tensor, "K W"]
    renormalised: bool = True  # False: log-probabilities are over the whole vocabulary all the same


@dataclass(frozen=True)
class TopLogprobs:
    """A teacher's K most likely tokens behind each of A texts, the likeliest first, and their log-probabilities in nats
    at temperature 1. The last column is that of all other tokens together (functional/divergences.py: `with_rest`).

    `Batch.taught` maps actions to texts. It stays on the CPU, and takes 8 K + 4 bytes an action; nothing for prompts
    and padding.

    Example: of two actions, K = 2. Behind the first text token 7 has probability .5, token 2 has .3, all others .2:
        ids       [[7, 2], [2, 9]]
        logprobs  [[log .5, log .3, log .2], [log .9, log .06, log .04]]"""

    ids: Int32[Tensor, "A K"]
    logprobs: Float[Tensor, "A K+1"]


@dataclass(frozen=True)
class Batch:
    """Columns of N rows of T tokens. Columns that the run does not need are None.

    Example: two answers to the prompt [5, 6]: [7, 2] (2 ends the sequence), scored 1, and [8], cut off, scored 0:
        tokens      [[5, 6, 7, 2], [5, 6, 8, 0]]
        mask        [[1, 1, 1, 1], [1, 1, 1, 0]]
        actions     [[0, 0, 1, 1], [0, 0, 1, 0]]
        rewards     [[0, 0, 0, 1], [0, 0, 0, 0]]     score [1, 0]    terminated [1, 0]
        episode     [0, 1]    group [0, 0]    version [0, 0]"""

    tokens: Int[Tensor, "N T"]
    mask: Bool[Tensor, "N T"]  # a real token
    actions: Bool[Tensor, "N T"]  # sampled by the policy (or demonstrated), end of sequence included
    rewards: Float[Tensor, "N T"]  # on the token that earned it, or on the last token of its turn
    score: Float[Tensor, " N"]  # total reward of the row's episode
    episode: Int[Tensor, " N"]  # rows of one episode share its number; episodes count once in every statistic
    group: Int[Tensor, " N"]  # episodes of one prompt share its number
    version: Int[Tensor, " N"]  # of the weights that sampled the row: the number of updates before
    terminated: Bool[Tensor, " N"]  # False: cut off, so a value function should bootstrap
    temperature: float = 1.0  # at which the actions were sampled, and so their log-probabilities are computed
    stop_ids: tuple[int, ...] = ()
    never: tuple[int, ...] = ()  # ids that cannot be sampled at all (from the policy): the placeholder of pictures
    key: int = 0  # random key of this step's update (order of minibatches)
    limit: int | None = None  # max_new_tokens of an answer
    vocabulary: int | None = None  # number of tokens of the policy's head (from `prepare`)
    reward_components: Float[Tensor, "N P"] | None = None  # each before its weight; last the environment's own reward
    component_weights: tuple[float, ...] = ()
    stop_excluded: Bool[Tensor, "N T"] | None = None  # the stop ids could not be sampled here (min_new_tokens)
    source: Int[Tensor, "N S"] | None = None  # the encoder's input; `tokens` are then the decoder's
    source_mask: Bool[Tensor, "N S"] | None = None
    sampling_mask: SamplingMask | None = None  # of truncated or restricted sampling
    kept: Int[Tensor, "N T"] | None = None  # each action's row in `sampling_mask.bits`
    turn: Int[Tensor, "N T"] | None = None  # number of each action's turn in its episode (functional/turn_discounts.py)
    turn_lengths: Float[Tensor, "N T"] | None = None  # number of actions in each action's turn, all its rows counted
    row: Int[Tensor, " N"] | None = None  # each row's number in the whole batch, for who writes down what became of it
    logprobs_sampler: Float[Tensor, "N T"] | None = None
    baseline: Float[Tensor, " N"] | None = None  # score of the greedy answer
    logprobs_old: Float[Tensor, "N T"] | None = None
    distribution_sums: Float[Tensor, "N T K"] | None = None  # functional/distribution_sums.py, with logprobs_old
    sum_names: tuple[str, ...] = ()  # of its K numbers
    logprobs_ref: Float[Tensor, "N T"] | None = None
    logprobs_teacher: Float[Tensor, "N T"] | None = None
    hinted: "Batch | None" = None  # what the teacher reads: the same actions behind other prompts, or in other tokens
    span: Int[Tensor, "N T"] | None = None  # of each action, if the teacher has another tokenizer: its number in the
    # row of the pieces of text that both begin and end at once, from 1 on; 0: in none. `hinted` has the same numbers
    teacher_top: TopLogprobs | None = None  # of a teacher behind an endpoint
    taught: Int[Tensor, "N T"] | None = None  # each action's row in `teacher_top`
    values: Float[Tensor, "N T"] | None = None  # of the state before each action
    last_values: Float[Tensor, " N"] | None = None  # of the state after the row's last action
    advantages: Float[Tensor, "N T"] | None = None
    returns: Float[Tensor, "N T"] | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, rows: Int[Tensor, " R"] | Bool[Tensor, " N"]) -> "Batch":
        """The batch of these rows, cut to the longest of them."""
        columns = self._map(lambda column: column[rows])
        longest = {name: _longest(columns[name]) for name in ("mask", "source_mask") if name in columns}
        for name, column in columns.items():
            if name != "hinted" and column.dim() >= 2 and name != "reward_components":
                columns[name] = column[:, : longest["source_mask" if name in SOURCE else "mask"]]
        return replace(self, **columns)

    def idle(self) -> "Batch":
        """Its first row, without actions: what a rank runs while others run their last rows. It adds nothing to any
        loss, but puts together the rank's part of the weights."""
        row = self[torch.tensor([0])]
        hinted = None if row.hinted is None else row.hinted.idle()
        return row.replace(actions=torch.zeros_like(row.actions), hinted=hinted)

    def replace(self, **columns: Any) -> "Batch":
        """A copy with these columns set."""
        return replace(self, **columns)

    def to(self, device: torch.device | str) -> "Batch":
        return replace(self, **self._map(lambda column: column.to(device)))

    def require(self, name: str) -> Tensor:
        """The column with this name. Raises LmgymError if it is None. Example: batch.require("advantages")"""
        return _required(self, name)

    def distribution_sum(self, name: str) -> Float[Tensor, "N T"]:
        """The column of `distribution_sums` with this name (functional/distribution_sums.py). Raises LmgymError if it
        was not asked for. Example: batch.distribution_sum("squared_probabilities")"""
        columns = self.require("distribution_sums")
        if name not in self.sum_names:
            raise LmgymError(
                f"Batch has no distribution sum '{name}'; let the algorithm's `requirements.distribution_sums` name it"
            )
        return columns[:, :, self.sum_names.index(name)]

    def per_token(self, per_row: Float[Tensor, " N"]) -> Float[Tensor, "N T"]:
        """A number per row, written to each of the row's actions; zero elsewhere."""
        return per_row[:, None] * self.actions

    def top_of(
        self, row: Int[Tensor, " R"], column: Int[Tensor, " R"]
    ) -> tuple[Int32[Tensor, "R K"], Float[Tensor, "R K+1"]]:
        """The teacher's most likely tokens at the actions (row, column), and log-probabilities: of `teacher_top`, on
        the device of the batch."""
        assert self.teacher_top is not None
        place = self.require("taught")[row, column].to(self.teacher_top.ids.device)
        device = self.tokens.device
        return self.teacher_top.ids[place].to(device), self.teacher_top.logprobs[place].to(device)

    def _map(self, function: Any) -> dict[str, Any]:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: function(column) for name, column in columns.items() if isinstance(column, Tensor | Batch)}


@dataclass(frozen=True)
class PolicyOutputs:
    """What a policy computes for a batch; zero for tokens that are no actions.

    `logprobs` are natural logs under the distribution that was sampled (with temperature, excluded stop ids and kept
    sets). `entropy` (nats), `values`, `last_values`, `divergence` (from the teacher, nats) and `distribution_sums` (K
    numbers of each distribution, in the order in which they were asked for, without gradient) are None unless asked
    for.

    Example: policy.compute_logprobs(batch, entropy=True) -> PolicyOutputs(logprobs=..., entropy=...)"""

    logprobs: Float[Tensor, "N T"]
    entropy: Float[Tensor, "N T"] | None = None
    values: Float[Tensor, "N T"] | None = None
    last_values: Float[Tensor, " N"] | None = None
    divergence: Float[Tensor, "N T"] | None = None
    distribution_sums: Float[Tensor, "N T K"] | None = None

    def require(self, name: str) -> Tensor:
        """The column with this name. Raises LmgymError if it is None."""
        return _required(self, name)


class States(NamedTuple):
    """Inputs of the LM head for R tokens; on the padded path also the model's own logits (models/scoring.py).
    Example: policy.states(batch, row, column).hidden"""

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
    spans: Sequence[Sequence[int]] | None = None,
) -> Batch:
    """Build a Batch from the token ids of episodes; nothing is tokenized here.

    Rows have the order of the episodes. `pad_id` fills up shorter rows; `temperature`, `stop_ids`, `key` and `limit`
    are stored in the batch. With `weights`, the weight of each reward, `reward_components` is filled in, and with
    `spans`, the number of each action's span by episode, `span`. Raises LmgymError if there is no episode, a turn
    without an action, or an episode without one of the rewards in `weights`.

    Example:
        >>> turn = Turn(prompt_ids=[5, 6], action_ids=[7, 2], logprobs=[-.5, -.1], reward=1.0)
        >>> collate([Episode(Example("x", "?"), group=0, index=0, turns=[turn], score=1.0)]).tokens
        tensor([[5, 6, 7, 2]])
    """
    rows = [(episode, row) for episode in episodes for row in episode.rows()]
    _check_rows(rows)
    turns = [turn for _, row in rows for turn in row]
    actions_of = np.array([len(turn.action_ids) for turn in turns])
    tokens, mask, actions = _laid_out([row for _, row in rows], pad_id)

    def column(values: npt.NDArray[Any]) -> Tensor:
        """A value for each action, zero elsewhere."""
        numbers = torch.from_numpy(values)
        return numbers.new_zeros(mask.shape).masked_scatter_(actions, numbers)

    sampled = all(turn.logprobs for turn in turns)  # else there is no such column
    owners, sources = [episode for episode, _ in rows], [row[0].source_ids for _, row in rows]
    numbers = {id(turn): number for episode in episodes for turn, number in numbered_turns(episode.turns)}
    logprobs = np.fromiter(chain.from_iterable(turn.logprobs for turn in turns), np.float32) if sampled else None
    excluded = np.array([turn.min_new_tokens for turn in turns])  # the first actions of a turn, so many
    place = np.arange(actions_of.sum()) - np.repeat(np.cumsum(actions_of) - actions_of, actions_of)
    return Batch(
        tokens=tokens,
        mask=mask,
        actions=actions,
        rewards=column(_rewards(turns, actions_of)),
        temperature=temperature,
        stop_ids=tuple(stop_ids),
        key=key,
        limit=limit,
        stop_excluded=column(place < np.repeat(excluded, actions_of)) if excluded.any() else None,
        turn=column(np.repeat(np.array([numbers[id(turn)] for turn in turns]), actions_of)),
        row=torch.arange(len(rows)),
        span=None if spans is None else column(np.fromiter(chain.from_iterable(spans), np.int64)),
        logprobs_sampler=None if logprobs is None else column(logprobs),
        **_episode_columns(owners),
        **(_source_columns(sources, pad_id) if any(sources) else {}),
        **_kept_columns(turns, actions),
        **(_component_columns(owners, weights) if weights is not None else {}),
    )


def _required(owner: Batch | PolicyOutputs, name: str) -> Tensor:
    column = getattr(owner, name)
    if not isinstance(column, Tensor):
        raise LmgymError(
            f"{type(owner).__name__} has no column '{name}'; let the algorithm's `requirements` ask for it, or fill it "
            "in before (advantages and returns: in `advantages`; logprobs_sampler: in `collate`)"
        )
    return column


def _check_rows(rows: Sequence[tuple[Episode, Sequence[Turn]]]) -> None:
    """Raise LmgymError for rows that cannot be trained on together, or at all."""
    if not rows:
        raise LmgymError("there is no episode to train on")
    for owner, row in rows:
        if not all(turn.action_ids for turn in row):
            raise LmgymError(f"episode {owner.index} (example {owner.example.id}) has a turn without an action")
    turns = [turn for _, row in rows for turn in row]
    for turn in turns if all(turn.logprobs for turn in turns) else ():
        if len(turn.logprobs) != len(turn.action_ids):
            raise LmgymError(f"a turn of {len(turn.action_ids)} actions has {len(turn.logprobs)} logprobs")
    sources = [row[0].source_ids for _, row in rows]
    if any(sources) and not (all(sources) and all(len(row) == 1 for _, row in rows)):
        raise LmgymError("some turns have source_ids; then each turn needs them, and a row of its own (restart=True)")


def _laid_out(rows: Sequence[Sequence[Turn]], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of all rows [N T], which of them are no padding, and which were sampled."""
    # 1. Each turn is a segment of given tokens, then one of actions; all of them one behind the other.
    turns = [turn for row in rows for turn in row]
    segments = np.array([[len(turn.prompt_ids), len(turn.action_ids)] for turn in turns])
    ids = np.fromiter(chain.from_iterable(chain(turn.prompt_ids, turn.action_ids) for turn in turns), np.int64)
    is_action = np.repeat(np.tile([False, True], len(turns)), segments.ravel())
    # 2. They fill the places of `mask` in order.
    ends = np.cumsum([len(row) for row in rows])
    lengths = np.diff(np.cumsum(segments.sum(1))[ends - 1], prepend=0)
    mask = torch.from_numpy(np.arange(lengths.max()) < lengths[:, None])
    tokens, actions = torch.full(mask.shape, pad_id, dtype=torch.long), torch.zeros_like(mask)
    tokens[mask], actions[mask] = torch.from_numpy(ids), torch.from_numpy(is_action)
    return tokens, mask, actions


def _rewards(turns: Sequence[Turn], actions_of: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The reward of each action of all turns: its token rewards, and the rest of `turn.reward` on the last action."""
    rewards, ends = np.zeros(int(actions_of.sum()), np.float32), np.cumsum(actions_of)
    for turn, count, end in zip(turns, actions_of, ends, strict=True):
        rest = turn.reward
        if turn.token_rewards is not None:
            if len(turn.token_rewards) != count:
                raise LmgymError(f"a turn of {count} actions has {len(turn.token_rewards)} token_rewards")
            rewards[end - count : end] = turn.token_rewards
            rest -= sum(turn.token_rewards)
        rewards[end - 1] += rest
    return rewards


def numbered_turns(turns: Sequence[Turn]) -> list[tuple[Turn, int]]:
    """Each turn with its number. A turn that continues an unfinished action has the number of that action.

    Example: with turns a (unfinished), b and c, numbered_turns([a, b, c]) -> [(a, 0), (b, 0), (c, 1)]"""
    numbered, number = [], 0
    for turn in turns:
        numbered.append((turn, number))
        number += not turn.unfinished
    return numbered


def _longest(mask: Bool[Tensor, "N T"]) -> int:
    return int(mask.sum(1).max()) if len(mask) else 0


def _episode_columns(owners: Sequence[Episode]) -> dict[str, Any]:
    """What is the same for a whole row [N]; `baseline` only if all episodes have one."""
    columns = {
        "score": torch.tensor([float(episode.score) for episode in owners]),
        "episode": torch.tensor([episode.index for episode in owners]),
        "group": torch.tensor([episode.group for episode in owners]),
        "version": torch.tensor([episode.version for episode in owners]),
        "terminated": torch.tensor([episode.terminated for episode in owners]),
    }
    if all(episode.baseline is not None for episode in owners):
        columns["baseline"] = torch.tensor([float(episode.baseline or 0.0) for episode in owners])
    return columns


def _source_columns(sources: list[list[int]], pad_id: int) -> dict[str, Any]:
    """`source` and `source_mask` [N S]."""
    size = (len(sources), max(map(len, sources)))
    source, mask = torch.full(size, pad_id, dtype=torch.long), torch.zeros(size, dtype=torch.bool)
    for n, ids in enumerate(sources):
        source[n, : len(ids)] = torch.tensor(ids)
        mask[n, : len(ids)] = True
    return {"source": source, "source_mask": mask}


def _kept_columns(turns: list[Turn], actions: Bool[Tensor, "N T"]) -> dict[str, Any]:
    """`sampling_mask` and `kept`, or nothing if sampling was not truncated. The sets have the order of the actions."""
    if all(turn.kept is None for turn in turns):
        return {}
    if any(turn.kept is None or len(turn.kept) != len(turn.action_ids) for turn in turns):
        raise LmgymError("some actions were drawn from a kept set and others were not; one batch cannot hold both")
    bits = torch.from_numpy(truncation.concatenate([turn.kept for turn in turns if turn.kept is not None]))
    kept = torch.zeros(actions.shape, dtype=torch.long)
    kept[actions] = torch.arange(len(bits))
    return {"sampling_mask": SamplingMask(bits), "kept": kept}


def _component_columns(owners: list[Episode], weights: Mapping[str, float]) -> dict[str, Any]:
    """`reward_components` and `component_weights`: rewards with a weight (NaN: could not judge the answer), then the
    environment's own at weight 1."""
    weighted = {name: weight for name, weight in weights.items() if weight}
    table = []
    for episode in owners:
        missing = [name for name in weighted if name not in episode.reward_components]
        if missing:
            raise LmgymError(f"episode {episode.index} (example {episode.example.id}) has no part '{missing[0]}'")
        parts = [episode.reward_components[name] for name in weighted]
        contributions = [weight * (part or 0.0) for part, weight in zip(parts, weighted.values(), strict=True)]
        of_environment = episode.score - sum(contributions)
        rounding = 1e-9 * (abs(episode.score) + sum(map(abs, contributions)))
        of_environment = of_environment if abs(of_environment) > rounding else 0.0  # a rounding error is no reward
        table.append([*(math.nan if part is None else part for part in parts), of_environment])
    return {"reward_components": torch.tensor(table), "component_weights": (*weighted.values(), 1.0)}
