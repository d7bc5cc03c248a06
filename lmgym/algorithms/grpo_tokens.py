"""Which tokens of an optimizer step GRPO's `top_entropy` and `covariance` choose."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lmgym.algorithms.grpo_fields import GRPOFields
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core import seeds
from lmgym.functional import losses, token_selection


def chosen_tokens(
    fields: GRPOFields, batch: Batch, new: PolicyOutputs, old: Float[Tensor, "N T"]
) -> Bool[Tensor, "N T"]:
    """The tokens of large entropy, which train; or those of large covariance, which do not, or are penalised."""
    credits, actions = batch.require("advantages"), batch.actions
    if fields.covariance == "none":
        return token_selection.top_quantile(new.require("entropy"), actions, fields.top_entropy)
    values = token_selection.covariances(new.logprobs, credits, actions)
    if fields.covariance == "penalise":
        return token_selection.largest(values, actions, fields.covariance_share)
    ratio = losses.log_ratio(new.logprobs, old).exp()
    cut = losses.clipped(ratio, credits, fields.clip_low, fields.clip_high, fields.dual_clip).bool()
    between = (values > fields.covariance_low) & (values < fields.covariance_high) & actions & ~cut
    return drawn(between, token_selection.share_of(int(actions.sum()), fields.covariance_share), batch)


def drawn(candidates: Bool[Tensor, "N T"], count: int, batch: Batch) -> Bool[Tensor, "N T"]:
    """`count` of the candidates, or all, drawn without replacement; a function of the batch's key and of which tokens
    these are, not of padding, the order of the rows or their number."""
    row, column = candidates.nonzero(as_tuple=True)
    order = torch.argsort(column)
    for key in (batch.require("row")[row], batch.episode[row]):  # by episode, then by row, then by column
        order = order[torch.argsort(key[order], stable=True)]
    path = (batch.key, "covariance", int(batch.episode.min()))
    chosen = order[torch.from_numpy(seeds.permutation(len(row), *path)[:count])]
    found = torch.zeros_like(candidates)
    found[row[chosen], column[chosen]] = True
    return found
