"""What sits on a trunk's hidden states: the description of an action's distribution, and the value head."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lmgym.batch import Batch
from lmgym.maths import kept

if TYPE_CHECKING:
    from lmgym.policies.policy import Policy


def action_logits(
    logits: Float[Tensor, "R V"], batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]
) -> Float[Tensor, "R V"]:
    """The logits of the distributions that the actions at (row, column) were sampled from.

    Temperature, excluded stop ids and kept sets applied: what could not be sampled stands at -inf (kept sets that are
    not to be renormalised on are left out).
    """
    if batch.temperature not in (0.0, 1.0):  # 0: greedy answers are described at temperature 1
        logits = logits / batch.temperature
    if batch.stop_excluded is not None and batch.stop_ids:
        stop = torch.tensor(batch.stop_ids, device=logits.device)
        excluded = logits[:, stop].masked_fill(batch.stop_excluded[row, column][:, None], float("-inf"))
        logits = logits.index_copy(1, stop, excluded)  # a few columns; a mask of [R V] would be ten times the work
    if batch.kept_sets is not None and batch.kept_sets.renormalised:
        logits = logits.masked_fill(~kept_tokens(batch, row, column, logits), float("-inf"))
    return logits


def kept_tokens(
    batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"], like: Float[Tensor, "R V"]
) -> Bool[Tensor, "R V"]:
    """The tokens that each action at (row, column) was drawn from, on the device of `like`."""
    assert batch.kept_sets is not None and batch.kept is not None
    bits = batch.kept_sets.bits[batch.kept[row, column].to(batch.kept_sets.bits.device)]
    return kept.unpack(bits.to(like.device), like.shape[1])


def describe(
    logits: Float[Tensor, "R V"], batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"], entropy: bool
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Log-probability of each action, given the model's own logits for it, and the entropy of each distribution (empty
    unless asked for).

    Where kept sets are not renormalised on, the entropy is RL4LMs': the expectation on the set, renormalised, of minus
    the log-probability over the whole vocabulary.
    """
    logits = action_logits(logits, batch, row, column)
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(1, batch.tokens[row, column][:, None])[:, 0] - normaliser
    if not entropy:
        return logprobs, logprobs[:0]
    drawn, mass = logits, normaliser
    if batch.kept_sets is not None and not batch.kept_sets.renormalised:
        drawn = logits.masked_fill(~kept_tokens(batch, row, column, logits), float("-inf"))
        mass = drawn.logsumexp(-1)
    probabilities = (drawn - mass[:, None]).exp()
    # Excluded tokens stand at -inf; 0 * -inf would be NaN, here or in the gradient.
    expected = (probabilities * logits.masked_fill(probabilities == 0, 0.0)).sum(-1)
    return logprobs, normaliser - expected


def value_head(size: int, like: Tensor) -> nn.Linear:
    """A bias-free linear map from a hidden state to its value (RL4LMs' form); zero, so that it predicts 0 at first."""
    head = nn.Linear(size, 1, bias=False, device=like.device, dtype=like.dtype)
    nn.init.zeros_(head.weight)
    return head


def add_critic(policy: "Policy", separate: bool) -> None:
    """Give a policy without a value function one: a head on its own trunk, or a copy of its model with a head.

    Does nothing where there is one already (an earlier stage's, or a checkpoint's).
    """
    if policy.has_critic:
        return
    if not separate:
        policy.value_head = value_head(policy.hidden_size, next(policy.model.parameters()))
        return
    policy.critic = policy.trainable_copy()
    add_critic(policy.critic, separate=False)
