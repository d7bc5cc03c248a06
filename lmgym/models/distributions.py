"""From hidden states to log-probabilities: action logits, log-probabilities of actions, entropies, sums."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmgym.batch import Batch, States
from lmgym.distributed.parts import shown_whole, whole
from lmgym.functional import truncation
from lmgym.functional.distribution_sums import SUMS
from lmgym.models import frozen_base
from lmgym.models.families import trunk_of
from lmgym.models.kernels import fused_head
from lmgym.models.kernels.fused_head import FusedHead
from lmgym.models.kernels.fused_logprobs import FusedLogprobs, wide_of
from lmgym.models.kernels.onednn_products import set_aside
from lmgym.models.parity import modules
from lmgym.models.parity.logprobs import ExactLogprobs
from lmgym.models.parity.products import of_layer
from lmgym.models.scoring import ScoringModel, alone


def action_logits(
    logits: Float[Tensor, "R V"], batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]
) -> Float[Tensor, "R V"]:
    """Logits of the distributions from which the actions at (row, column) were sampled. The temperature is applied.
    Tokens that could not be sampled get -inf: ids that no answer has, excluded stop ids, and tokens outside of the
    sampling mask (unless the mask says that log-probabilities are not renormalised)."""
    logits = without(logits, batch.never)
    if batch.temperature not in (0.0, 1.0):  # greedy answers (0) are scored at temperature 1
        logits = logits / batch.temperature
    if batch.stop_excluded is not None and batch.stop_ids:
        stop = torch.tensor(batch.stop_ids, device=logits.device)
        excluded = logits[:, stop].masked_fill(batch.stop_excluded[row, column][:, None], float("-inf"))
        logits = logits.index_copy(1, stop, excluded)  # a few columns; a mask of [R V] would be ten times the work
    if batch.sampling_mask is not None and batch.sampling_mask.renormalised:
        logits = logits.masked_fill(~kept_tokens(batch, row, column, logits), float("-inf"))
    return logits


def without(logits: Float[Tensor, "R V"], never: Sequence[int]) -> Float[Tensor, "R V"]:
    """The logits, -inf for the ids that are never sampled (`Policy.never`)."""
    return logits.index_fill(1, torch.tensor(never, device=logits.device), float("-inf")) if never else logits


def excluded_ids(
    batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]
) -> tuple[list[int], Bool[Tensor, "E R"]]:
    """The ids that some of the actions at (row, column) could not be, and which actions: what `action_logits` excludes
    where there is no sampling mask."""
    excluded = [*batch.never]
    masks = [torch.ones(len(row), dtype=torch.bool)] * len(batch.never)
    if batch.stop_excluded is not None:
        excluded += batch.stop_ids
        masks += [batch.stop_excluded[row, column]] * len(batch.stop_ids)
    return excluded, torch.stack(masks) if masks else torch.ones(0, len(row), dtype=torch.bool)


def kept_tokens(
    batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"], like: Float[Tensor, "R V"]
) -> Bool[Tensor, "R V"]:
    """The tokens from which each action at (row, column) was drawn, on the device of `like`."""
    assert batch.sampling_mask is not None and batch.kept is not None
    bits = batch.sampling_mask.bits[batch.kept[row, column].to(batch.sampling_mask.bits.device)]
    return truncation.unpack(bits.to(like.device), like.shape[1])


def logprobs_of_logits(
    logits: Float[Tensor, "R V"], batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"], entropy: bool
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Log-probability of each action at (row, column) and, if asked for, the entropy of its distribution (else empty).

    `logits` are the model's own, before temperature and masks; results are in nats. With a sampling mask that is not
    renormalised, the entropy is the mean of -log p, where p is over the whole vocabulary and the mean is weighted by
    the renormalised probabilities of the kept tokens (RL4LMs)."""
    logits = action_logits(logits, batch, row, column)
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(1, batch.tokens[row, column][:, None])[:, 0] - normaliser
    if not entropy:
        return logprobs, logprobs[:0]
    kept_logits, kept_normaliser = logits, normaliser
    if batch.sampling_mask is not None and not batch.sampling_mask.renormalised:
        kept_logits = logits.masked_fill(~kept_tokens(batch, row, column, logits), float("-inf"))
        kept_normaliser = kept_logits.logsumexp(-1)
    probs = (kept_logits - kept_normaliser[:, None]).exp()
    # Excluded tokens have -inf; 0 * -inf would be NaN, here or in the gradient.
    mean_logit = (probs * logits.masked_fill(probs == 0, 0.0)).sum(-1)
    return logprobs, normaliser - mean_logit


def logprobs_of_states(
    model: ScoringModel,
    batch: Batch,
    states: States,
    row: Int[Tensor, " R"],
    column: Int[Tensor, " R"],
    entropy: bool,
    logprob_gradient: Float[Tensor, " R"] | None = None,
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """`logprobs_of_logits` from the first R hidden states, `model.head_chunk` of them at a time. So the logits [R V] of
    all actions never exist at once. `logprob_gradient` is the gradient that backward will bring, if the caller knows it
    (models/kernels/fused_logprobs.py)."""
    head: Any = model.model.get_output_embeddings()
    renormalised = batch.sampling_mask is None or batch.sampling_mask.renormalised
    # The usual case, a plain linear head: the fused function.
    if states.logits is None and has_plain_head(model) and renormalised:
        hidden = states.hidden[: len(row)]
        weight, computed = model.head_weights
        hidden = hidden if model.compute == model.master else hidden.to(model.compute)

        def adjust(logits: Tensor, part: slice) -> Tensor:
            return action_logits(logits, batch, row[part], column[part])

        scale = 1.0 if batch.temperature == 0 else 1 / batch.temperature
        if model.trains_native and not entropy and fused_head.serves(hidden, weight, bias_of(model), batch):
            chunk = max(2 * model.head_chunk, fused_head.LEAST_ROWS)  # logits in bf16 take half of the room
            known = batch.tokens[row, column], *excluded_ids(batch, row, column), scale, chunk
            head_weight = weight.to(hidden.dtype) if computed is None else computed
            logprobs = FusedHead.apply(hidden, weight, head_weight.detach(), *known, logprob_gradient)  # type: ignore[no-untyped-call]
            return logprobs, logprobs[:0]
        asked = (hidden, weight, bias_of(model), batch.tokens[row, column], adjust, scale, entropy, model.head_chunk)
        if model.exact:
            product = partial(of_layer, head, weight if computed is None else computed)
            return ExactLogprobs.apply(*asked, logprob_gradient, computed, product)  # type: ignore[no-any-return, no-untyped-call]
        return FusedLogprobs.apply(*asked, logprob_gradient, model.onednn, computed)  # type: ignore[no-any-return, no-untyped-call]

    shown = whole_head(model) if states.logits is None else nullcontext

    def chunk_logprobs(hidden: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        with model.rounded_weights(), shown():  # in backward too
            return logprobs_of_logits(model.head(hidden), batch, row, column, entropy)

    # Any other head: autograd over the chunks, which are computed again in backward if there are several.
    chunks = []
    for part in torch.arange(len(row), device=model.device).split(model.head_chunk):
        if states.logits is not None:
            chunks.append(logprobs_of_logits(states.logits[part], batch, row[part], column[part], entropy))
            continue
        arguments = (states.hidden[part], row[part], column[part])
        if torch.is_grad_enabled() and len(row) > model.head_chunk:
            chunks.append(checkpoint(chunk_logprobs, *arguments, use_reentrant=False))
        else:
            chunks.append(chunk_logprobs(*arguments))
    return torch.cat([chunk[0] for chunk in chunks]), torch.cat([chunk[1] for chunk in chunks])


def has_plain_head(model: ScoringModel) -> bool:
    """Whether the LM head is a linear map without bias or adapters."""
    head: Any = model.model.get_output_embeddings()
    return model.own_head is None and type(head) is nn.Linear and head.bias is None


def whole_head(model: ScoringModel) -> Callable[[], AbstractContextManager[None]]:
    """A context for calls of `model.head`. If each rank holds a part of the weights, those of the head are put together
    here, once: ranks have different numbers of actions, so each calls the head as often as it has to."""
    called, trunk = model.model.get_output_embeddings(), set[Any]()
    if model.own_head is not None:  # all of the model's own code behind the trunk
        called, trunk = model.model, {*trunk_of(model.model).modules()}
    return shown_whole([module for module in called.modules() if module not in trunk])


def bias_of(model: ScoringModel) -> Tensor | None:
    """What BART's family adds to its logits; zeros in most checkpoints."""
    bias = getattr(model.model, "final_logits_bias", None)
    return None if bias is None else bias.flatten()


@torch.no_grad()
def distribution_sums(
    model: ScoringModel,
    batch: Batch,
    states: States,
    row: Int[Tensor, " R"],
    column: Int[Tensor, " R"],
    names: Sequence[str],
) -> Float[Tensor, "R K"]:
    """The numbers with these names (functional/distribution_sums.py) of each action's distribution, without gradient.

    From the first R hidden states, `model.head_chunk` of them at a time, so the logits [R V] of all actions never exist
    at once."""
    head: Any = model.model.get_output_embeddings()
    plain = has_plain_head(model)
    # Once for all chunks: ranks that share the head's weights may have different numbers of chunks.
    weight = whole(head.weight).to(model.compute) if plain and states.logits is None else None
    shown = nullcontext if plain or states.logits is not None else whole_head(model)
    bias, found = bias_of(model), []
    for part in torch.arange(len(row), device=model.device).split(model.head_chunk):
        if states.logits is not None:
            logits = states.logits[part]
        elif weight is None:
            with shown():
                logits = model.head(states.hidden[part])
        else:
            product = states.hidden[part].to(model.compute) @ weight.T
            logits = product.to(wide_of(product.dtype)) + (0 if bias is None else bias)
        logits = action_logits(logits, batch, row[part], column[part])
        found.append(torch.stack([SUMS[name].of(logits) for name in names], -1))
    return torch.cat(found)


@torch.no_grad()
def own_logprobs(model: ScoringModel, batch: Batch) -> tuple[Float[Tensor, "N T"], float]:
    """What the model itself says of the batch's actions [N T] (zero elsewhere), in the precision of its parameters; and
    the standard deviation of its logits over the vocabulary, averaged over the actions."""
    batch = batch.to(model.device).replace(never=model.never)
    row, column = batch.actions.nonzero(as_tuple=True)
    # Of the trial at load and of the proof: what is compared may compute otherwise.
    with set_aside(model.model), modules.set_aside(model.model), frozen_base.widened(model.model):
        logits = alone(model, batch, row, column - 1)
    logprobs, _ = logprobs_of_logits(logits, batch, row, column, entropy=False)
    result = torch.zeros(batch.tokens.shape).index_put((row.cpu(), column.cpu()), logprobs.float().cpu())
    return result, float(logits.std(-1).mean())
