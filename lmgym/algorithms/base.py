"""The contract of an algorithm: a dataclass of its hyperparameters and a few short methods.

The trainer knows only what is here. `advantages` and `loss` (or `batch_loss`) are the algorithm; the rest has defaults.
An algorithm never sees a string, a model or a tokenizer: columns of a `Batch` come in, per-token terms go out. A driver
(updates/) calls it and moves the parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from jaxtyping import Bool, Float
from torch import Tensor

from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.parts import documentation
from lmgym.core.validation import Section
from lmgym.functional.reductions import Reduction
from lmgym.types import Episode, Restriction

Terms = dict[str, tuple[Tensor, Reduction]]  # name -> (per-token term [N T], how it is averaged)
ParameterGroup = Literal["policy", "critic"]


class UpdateContext(Protocol):
    """What `Algorithm.after_update` may ask of the run."""

    @property
    def step(self) -> int:
        """Steps of this stage that are done."""

    @property
    def path(self) -> tuple[int | str, ...]:
        """Where the random numbers of this stage start (core/seeds.py)."""

    @property
    def writes_files(self) -> bool:
        """True if this process writes the run's files: of several ranks, the first."""

    def refresh(self, name: str) -> None:
        """Replace the frozen copy "reference" or "mask" by a copy of the policy as it is now."""


@dataclass(kw_only=True)
class Algorithm(Section):
    """What every algorithm has. Fields are its section of a recipe.

    Example: the whole of REINFORCE without a baseline:
        >>> @dataclass(kw_only=True)
        ... class Plain(Algorithm):
        ...     def advantages(self, batch):
        ...         return batch.replace(advantages=batch.per_token(batch.score))
        ...     def loss(self, batch, new):
        ...         return {"policy": (-batch.advantages * new.logprobs, "constant")}, {}
    """

    section = "algorithm"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Values of the fields under a name: `algorithm: {name: ppo, preset: trl}`."""
    driver: ClassVar[str] = "first_order"
    """Who takes the optimizer steps, by its registered name: first_order, trust_region, or one of your own."""
    optimized: ClassVar[tuple[ParameterGroup, ...]] = ("policy", "critic")
    """Whose parameters the recipe's `optimizer` moves; a driver may move others by itself."""
    compares_pairs: ClassVar[bool] = False
    """True if the best and the worst answer of each group train against each other."""

    group_size: PositiveInt = 1
    """Answers per prompt."""
    epochs: PositiveInt = 1
    """Passes over each batch."""
    minibatches: PositiveInt = 1
    """Optimizer steps per pass (at most one per group)."""
    progress: float = field(default=0.0, init=False, repr=False)
    """Fraction of the stage completed; the trainer sets it before each step, for schedules."""

    @classmethod
    def in_present_keys(cls, name: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The keys of a recipe's section, those of earlier versions as they are written today, with a warning. `name`
        is the section's, `where` its place in the recipe, for messages."""
        return dict(given)

    @property
    def formulas(self) -> Mapping[str, str]:
        """What is computed, as texts by the name of a term or of a symbol. They are kept with a run's traces, and shown
        beside its tokens (`lmgym view`). Default: the class's docstring up to its first example, as "loss". A class
        attribute `formulas = {"policy": "-A log pi"}` does as well."""
        text = documentation(type(self))
        return {"loss": text} if text else {}

    @property
    def caution(self) -> str:
        """A sentence that the run says as the stage begins, about what one should know of this choice; "" for none."""
        return ""

    @property
    def requirements(self) -> Requirements:
        """What to collect and fill in besides the answers; a subclass extends it by `dataclasses.replace`."""
        return Requirements()

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps that one batch serves."""
        return self.epochs * self.minibatches

    @property
    def weighs_old(self) -> bool:
        """True if the loss corrects for answers that older weights have sampled, by the sampler's probabilities."""
        return False

    @property
    def restriction(self) -> Restriction | None:
        """Which tokens may be sampled in training: those likely under the copy that `requirements.mask` asks for, or
        else under the policy itself. None: all."""
        return None

    def check_one_step(self, name: str, on: str, instead: str = "") -> None:
        """Raise LmgymError for several optimizer steps on one batch, in an algorithm whose loss has no ratio."""
        if self.optimizer_steps > 1:
            raise LmgymError(
                f"{name} has no ratio to correct a second step on {on}; set epochs and minibatches to 1{instead}"
            )

    def check_vocabulary(self, size: int) -> None:
        """Raise LmgymError where the fields do not go with a vocabulary of `size`; called before a model is loaded."""

    def select(self, groups: list[list[Episode]], wanted: int) -> tuple[list[list[Episode]], bool]:
        """The groups that train, and whether to draw more prompts for this step (up to the stage's `max_draws`).

        `groups` are all those drawn in this step so far, `wanted` is the recipe's `prompts_per_step`. A group may be
        cut to some of its episodes, and groups of earlier steps may be added (replay). Default: all, no. Rewards and
        lengths are logged of all drawn episodes, whatever is selected."""
        return groups, False

    def before_scoring(self, batch: Batch) -> Batch:
        """The batch as its log-probabilities are to be taken, all of them; called before any column is filled in."""
        return batch

    def advantages(self, batch: Batch) -> Batch:
        """The batch with `advantages` [N T] (and `returns`, for a critic) filled in: the credit of each token."""
        raise NotImplementedError(f"{type(self).__name__} has no advantages()")

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        """Named per-token terms to minimise, each with its reduction, and per-token metrics. `new` is what the policy
        says now. The driver weights the terms of all tokens and sums them; do not average here. It must have no effects
        of its own, since it may be called more than once for the same rows."""
        raise NotImplementedError(f"{type(self).__name__} has no loss()")

    def batch_loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        """In place of `loss`, for what compares rows or tokens with each other, such as pairs or quantiles: named
        numbers to minimise, and metrics, of all rows of an optimizer step at once. `new` is what the policy says of
        them, entropies too if required. It is a leaf of the graph: the driver takes the gradient by each number in it,
        and applies that in a second pass. So the cut into micro-batches does not matter here either.

        Example: half of the tokens train, those of the largest entropy (arXiv 2506.01939):
            >>> def batch_loss(self, batch, new):
            ...     entropies = new.require("entropy").detach()
            ...     chosen = batch.actions & (entropies >= entropies[batch.actions].median())
            ...     return {"policy": masked_mean(-batch.advantages * new.logprobs, chosen)}, {}
        """
        # Drivers ask `whole_batch` first, so only a caller of one's own comes here.
        raise NotImplementedError(f"{type(self).__name__} has no batch_loss()")

    def answer_scores(self, batch: Batch, new: PolicyOutputs) -> Float[Tensor, " E"]:
        """How good the policy itself finds each answer, by ascending number of the episode. For algorithms that learn
        from rated answers: evaluations report how often these scores order held-out pairs as the ratings do."""
        raise NotImplementedError(f"{type(self).__name__} has no answer_scores()")

    @property
    def whole_batch(self) -> bool:
        """True if the loss is `batch_loss`: if a subclass has written one."""
        return type(self).batch_loss is not Algorithm.batch_loss

    def active(self, batch: Batch) -> Bool[Tensor, " N"]:
        """Rows that can move the policy; the others count in the totals but cost no compute."""
        return (batch.require("advantages") != 0).any(1)

    def before_minibatch(self, batch: Batch) -> Batch:
        """A minibatch as its optimizer step is to see it; what compares the rows of a minibatch belongs here."""
        return batch

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """What to log of a prepared batch besides the driver's metrics; called once per step, after the update."""
        return {}

    def scheduled(self, final_fraction: float) -> float:
        """A linear schedule's factor at this step: 1 at first, `final_fraction` at the end of the stage."""
        return 1 + (final_fraction - 1) * self.progress

    def should_stop_early(self, metrics: Mapping[str, float]) -> bool:
        """Whether an optimizer step with these metrics is left out, and all after it on the same batch."""
        return False

    def after_update(self, context: UpdateContext) -> None:
        """Called once per step, when the policy has changed: moving baselines, refreshed copies, controllers."""

    def state_dict(self) -> dict[str, Any]:
        """Everything besides the fields that a resumed run needs, as plain JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
