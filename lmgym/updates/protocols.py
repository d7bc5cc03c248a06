"""What an update may ask of a policy. `models.policy.Policy` has all of it; a test's stand-in may have less."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lmgym.batch import Batch, PolicyOutputs, States, TopLogprobs
from lmgym.distributed.ranks import Ranks
from lmgym.functional.divergences import Divergence
from lmgym.functional.shapes import PerToken, RowIds


class FrozenPolicy(Protocol):
    """A model that says how likely it finds a batch's actions, and does not train."""

    def compute_logprobs_no_grad(self, batch: Batch) -> PolicyOutputs:
        """Log-probabilities of a whole batch, micro-batch by micro-batch, without gradient, on the CPU."""


@runtime_checkable
class TopTeacher(Protocol):
    """A teacher that says its most likely tokens only, such as one behind an endpoint."""

    def top_logprobs(self, batch: Batch) -> TopLogprobs:
        """Its most likely tokens at each action of a whole batch, in the order of `batch.actions.nonzero()`."""


class TrainablePolicy(Protocol):
    """A policy whose parameters an update moves: its passes over a batch, and the parameters themselves. N rows, T
    tokens, R actions, V tokens in the vocabulary."""

    @property
    def ranks(self) -> Ranks:
        """The processes that share out the passes of `micro_batches`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def compute(self) -> torch.dtype:
        """The precision of a forward pass."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def head_chunk(self) -> int:
        """How many distributions over the vocabulary are held at a time."""

    def parameters(self) -> list[nn.Parameter]:
        """The policy's own parameters that train."""

    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters of the LM head, whether they train or not."""

    def critic_parameters(self) -> list[nn.Parameter]:
        """The value function's own parameters."""

    def micro_batches(self, batch: Batch) -> Sequence[Int[Tensor, " R"]]:
        """The rows of each forward pass of this rank; sums over them are to be added over the `ranks`."""

    def compute_logprobs(
        self,
        batch: Batch,
        entropy: bool = False,
        values: bool = False,
        last_values: bool = False,
        logprob_gradient: PerToken | None = None,
        divergence: Divergence | None = None,
    ) -> PolicyOutputs:
        """Log-probabilities of the actions of a batch that fits one forward pass, with gradient."""

    def compute_logprobs_no_grad(
        self,
        batch: Batch,
        values: bool = False,
        last_values: bool = False,
        entropy: bool = False,
        sums: Sequence[str] = (),
    ) -> PolicyOutputs:
        """The same of a whole batch, micro-batch by micro-batch, without gradient, on the CPU."""

    def compute_values(self, batch: Batch) -> Float[Tensor, " R"]:
        """The value of the text before each action; its gradient reaches the critic's parameters only."""

    def states(self, batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]) -> States:
        """Hidden states of the tokens at (row, column), with gradient."""

    def action_logits(
        self, states: States, batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]
    ) -> Float[Tensor, "R V"]:
        """Logits of the distributions that the actions at (row, column) were sampled from."""

    def twice_differentiable(self) -> AbstractContextManager[None]:
        """Within it a forward pass has second derivatives."""


class UpdateWatcher(Protocol):
    """Who is shown the numbers that an update computes for the tokens of some rows, to write them down
    (training/tracing.py). It changes none of them."""

    def wants(self, rows: RowIds) -> bool:
        """Whether one of these rows is to be shown; `rows` are numbers of `Batch.row`, on the CPU."""

    def show(self, rows: RowIds, columns: Mapping[str, PerToken]) -> None:
        """What an optimizer step has computed for these rows; the columns are on the policy's device."""
