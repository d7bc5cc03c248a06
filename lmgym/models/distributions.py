"""What sits on a trunk's hidden states: the description of an action's distribution, and the value head."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmgym.batch import Batch
from lmgym.functional import truncation
from lmgym.models.fused_logprobs import FusedLogprobs

if TYPE_CHECKING:
    from lmgym.models.policy import Policy
    from lmgym.models.scoring import States


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
    if batch.sampling_mask is not None and batch.sampling_mask.renormalised:
        logits = logits.masked_fill(~kept_tokens(batch, row, column, logits), float("-inf"))
    return logits


def kept_tokens(
    batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"], like: Float[Tensor, "R V"]
) -> Bool[Tensor, "R V"]:
    """The tokens that each action at (row, column) was drawn from, on the device of `like`."""
    assert batch.sampling_mask is not None and batch.kept is not None
    bits = batch.sampling_mask.bits[batch.kept[row, column].to(batch.sampling_mask.bits.device)]
    return truncation.unpack(bits.to(like.device), like.shape[1])


def describe(
    logits: Float[Tensor, "R V"], batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"], entropy: bool
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Log-probability of each action, given the model's own logits for it, and the entropy of each distribution (empty
    unless asked for).

    Where kept sets are not renormalised on, the entropy is the expectation on the set, renormalised, of minus the
    log-probability over the whole vocabulary (RL4LMs).
    """
    logits = action_logits(logits, batch, row, column)
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(1, batch.tokens[row, column][:, None])[:, 0] - normaliser
    if not entropy:
        return logprobs, logprobs[:0]
    drawn, mass = logits, normaliser
    if batch.sampling_mask is not None and not batch.sampling_mask.renormalised:
        drawn = logits.masked_fill(~kept_tokens(batch, row, column, logits), float("-inf"))
        mass = drawn.logsumexp(-1)
    probabilities = (drawn - mass[:, None]).exp()
    # Excluded tokens stand at -inf; 0 * -inf would be NaN, here or in the gradient.
    expected = (probabilities * logits.masked_fill(probabilities == 0, 0.0)).sum(-1)
    return logprobs, normaliser - expected


def describe_actions(
    policy: "Policy",
    batch: Batch,
    states: "States",
    row: Int[Tensor, " R"],
    column: Int[Tensor, " R"],
    entropy: bool,
    logprob_gradient: Float[Tensor, " R"] | None = None,
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Log-probability and entropy (or none) of the actions at (row, column), from the first R of their states, in
    chunks of the policy's `head_chunk`. `logprob_gradient` is what backward will bring, where that is known (fused.py)."""
    head: Any = policy.model.get_output_embeddings()
    renormalised = batch.sampling_mask is None or batch.sampling_mask.renormalised
    if states.logits is None and type(head) is nn.Linear and head.bias is None and renormalised:
        hidden = states.hidden[: len(row)]
        hidden = hidden if policy.compute == head.weight.dtype else hidden.to(policy.compute)
        bias = getattr(policy.model, "final_logits_bias", None)

        def adjust(logits: Tensor, part: slice) -> Tensor:
            return action_logits(logits, batch, row[part], column[part])

        scale = 1.0 if batch.temperature == 0 else 1 / batch.temperature
        targets = batch.tokens[row, column]
        bias = None if bias is None else bias.flatten()
        return FusedLogprobs.apply(  # type: ignore[no-any-return, no-untyped-call]
            hidden, head.weight, bias, targets, adjust, scale, entropy, policy.head_chunk, logprob_gradient
        )

    def of_states(hidden: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        return describe(policy.head(hidden), batch, row, column, entropy)

    pieces = []
    for part in torch.arange(len(row), device=policy.device).split(policy.head_chunk):
        if states.logits is not None:
            pieces.append(describe(states.logits[part], batch, row[part], column[part], entropy))
            continue
        arguments = (states.hidden[part], row[part], column[part])
        if torch.is_grad_enabled() and len(row) > policy.head_chunk:
            pieces.append(checkpoint(of_states, *arguments, use_reentrant=False))
        else:
            pieces.append(of_states(*arguments))
    return torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])


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
        trained = next(iter(policy.parameters()), None)  # beside a packed base, the adapters have the right precision
        like = next(policy.model.parameters()) if trained is None else trained
        policy.value_head = value_head(policy.hidden_size, like)
        return
    policy.critic = policy.trainable_copy()
    add_critic(policy.critic, separate=False)
