"""Tokens: which tokens of an optimizer step train, where that needs a look at all of them at once."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le

from lmgym.algorithms.grpo.surrogate import Surrogate
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core import seeds
from lmgym.core.constraints import Coefficient, Rule
from lmgym.core.errors import LmgymError
from lmgym.core.parts import Part
from lmgym.core.registry import register
from lmgym.functional import losses, token_selection
from lmgym.functional.shapes import Mask, PerToken

Chosen = Mask
SomeTokens = Annotated[float, Gt(0), Le(1), Rule("it is a share of the tokens, above 0 and up to 1")]


@dataclass(frozen=True, kw_only=True)
class Tokens(Part):
    """A choice of tokens. `chosen` names them; `trains` says which tokens keep their advantage.

    Example: TopEntropy(share=0.2).chosen(batch, new, old, Clip())"""

    kind: ClassVar[str] = "tokens"
    section: ClassVar[str] = "algorithm.tokens"

    looks_at_all: ClassVar[bool] = True
    """True if the choice needs all tokens of the optimizer step at once."""
    leaves_some_out: ClassVar[bool] = False
    """True if some tokens lose their advantage."""
    reads_entropy: ClassVar[bool] = False

    def chosen(self, batch: Batch, new: PolicyOutputs, old: PerToken, surrogate: Surrogate) -> Chosen:
        """The chosen tokens. `old` are the log-probabilities that the ratio divides by."""
        raise NotImplementedError(f"{type(self).__name__} has no chosen()")

    def trains(self, chosen: Chosen) -> Chosen:
        """The tokens that keep their advantage."""
        return chosen

    def penalty(self, chosen: Chosen, new: PolicyOutputs, old: PerToken) -> dict[str, PerToken]:
        """Further terms per token."""
        return {}

    def check(self, surrogate: Surrogate) -> None:
        """Raise LmgymError where it does not go with the surrogate."""


@register("tokens", "all")
@dataclass(frozen=True, kw_only=True)
class AllTokens(Tokens):
    """Every action trains."""

    looks_at_all: ClassVar[bool] = False


@register("tokens", "top_entropy")
@dataclass(frozen=True, kw_only=True)
class TopEntropy(Tokens):
    """Those of the largest entropy train (arXiv 2506.01939)."""

    leaves_some_out: ClassVar[bool] = True
    reads_entropy: ClassVar[bool] = True

    share: SomeTokens = 0.2

    def chosen(self, batch: Batch, new: PolicyOutputs, old: PerToken, surrogate: Surrogate) -> Chosen:
        return token_selection.top_quantile(new.require("entropy"), batch.actions, self.share)


@register("tokens", "clip_cov")
@dataclass(frozen=True, kw_only=True)
class ClipCov(Tokens):
    """Some tokens of large covariance of advantage and log-probability do not train (Clip-Cov, arXiv 2505.22617)."""

    leaves_some_out: ClassVar[bool] = True

    share: SomeTokens = 2e-4
    """This share of the tokens do not train, one at least, drawn from those that the surrogate's clip has left and
    whose covariance lies between `low` and `high`."""
    low: float = 1.0
    """Only tokens with a covariance above this are left out."""
    high: float = 5.0
    """Only tokens with a covariance below this are left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low >= self.high:
            raise LmgymError(
                f"algorithm.tokens.low is {self.low} and algorithm.tokens.high {self.high}; the first must be the "
                "smaller one"
            )

    def chosen(self, batch: Batch, new: PolicyOutputs, old: PerToken, surrogate: Surrogate) -> Chosen:
        advantages, actions = batch.require("advantages"), batch.actions
        values = token_selection.covariances(new.logprobs, advantages, actions)
        clipped = surrogate.clipped(losses.log_ratio(new.logprobs, old).exp(), advantages)
        assert clipped is not None  # see check
        between = (values > self.low) & (values < self.high) & actions & ~clipped.bool()
        return drawn(between, token_selection.share_of(int(actions.sum()), self.share), batch)

    def trains(self, chosen: Chosen) -> Chosen:
        return ~chosen

    def check(self, surrogate: Surrogate) -> None:
        one = torch.ones(1, 1)
        if surrogate.clipped(one, one) is None:
            raise LmgymError(
                "algorithm.tokens: clip_cov chooses among the tokens that the clip has left; write surrogate: {name: "
                "clip, ratio: token}"
            )


@register("tokens", "kl_cov")
@dataclass(frozen=True, kw_only=True)
class KlCov(Tokens):
    """|log r| is penalised on the tokens of the largest covariance; all train (KL-Cov, arXiv 2505.22617)."""

    share: SomeTokens = 2e-4
    """So many are penalised, one at least."""
    coefficient: Coefficient = 1.0
    """Weight of |log r|."""

    def chosen(self, batch: Batch, new: PolicyOutputs, old: PerToken, surrogate: Surrogate) -> Chosen:
        values = token_selection.covariances(new.logprobs, batch.require("advantages"), batch.actions)
        return token_selection.largest(values, batch.actions, self.share)

    def trains(self, chosen: Chosen) -> Chosen:
        return torch.ones_like(chosen)

    def penalty(self, chosen: Chosen, new: PolicyOutputs, old: PerToken) -> dict[str, PerToken]:
        return {"covariance": self.coefficient * losses.log_ratio(new.logprobs, old).abs() * chosen}


def drawn(candidates: Chosen, count: int, batch: Batch) -> Chosen:
    """`count` of the candidates, or all, drawn without replacement; a function of the batch's key and of which tokens
    these are, not of padding, the order of the rows or their number."""
    row, column = candidates.nonzero(as_tuple=True)
    order = torch.argsort(column)
    for key in (batch.require("row")[row], batch.episode[row]):  # by episode, then by row, then by column
        order = order[torch.argsort(key[order], stable=True)]
    place = (batch.key, "covariance", int(batch.episode.min()))
    picked = order[torch.from_numpy(seeds.permutation(len(row), *place)[:count])]
    chosen = torch.zeros_like(candidates)
    chosen[row[picked], column[picked]] = True
    return chosen
