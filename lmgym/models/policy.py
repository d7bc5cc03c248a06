"""Policy: a language model that is trained, and the log-probabilities and values it gives to the actions of a batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmgym.batch import Batch, PolicyOutputs, States
from lmgym.core.errors import LmgymError
from lmgym.core.files import usual_modes
from lmgym.core.progress import counted
from lmgym.functional.divergences import Divergence
from lmgym.models import lora, quantization
from lmgym.models.cross_teaching import TokenClasses, compare_spans
from lmgym.models.distributions import distribution_sums, logprobs_of_states
from lmgym.models.language_model import LanguageModel
from lmgym.models.micro_batches import micro_batches
from lmgym.models.teaching import compare
from lmgym.models.vision import save_processor

VALUE_HEAD = "value_head.safetensors"


def save_value_head(head: nn.Linear, folder: Path) -> None:
    """Write a value head to a folder, as `load_policy` reads it. Example: save_value_head(policy.value_head, folder)"""
    save_file({"weight": head.weight.detach().contiguous()}, folder / VALUE_HEAD)
    usual_modes(folder)


class Policy(LanguageModel):
    """A language model that is trained: the log-probabilities it gives to the actions of a batch, a value function if
    one is needed, and a teacher. `LanguageModel` describes the arguments.

    Example:
        >>> policy = load_policy(PolicySection(model="builtin:tiny"))
        >>> policy.compute_logprobs(batch).logprobs        # [N T]
    """

    value_head: nn.Linear | None = None  # on this model's own hidden states
    critic: "Policy | None" = None  # a separate model, whose value head is used instead
    teacher: "Policy | None" = None  # whose distributions this one's are compared with; may be itself
    classes: TokenClasses | None = None  # beside a teacher with another tokenizer

    @property
    def has_critic(self) -> bool:
        return self.value_head is not None or self.critic is not None

    @contextmanager
    def precision(self) -> Iterator[None]:
        """The precision of a forward pass, this model's and a separate critic's (`LanguageModel.precision`)."""
        with super().precision(), nullcontext() if self.critic is None else self.critic.rounded_weights():
            yield

    def had_updates(self, updates: int) -> None:
        """Say how many updates the policy has had, in all: the random numbers of its rounding depend on it."""
        super().had_updates(updates)
        if self.critic is not None and self.critic.rounded is not None:
            self.critic.rounded.updates = updates

    def critic_parameters(self) -> list[nn.Parameter]:
        """The parameters of the value function alone: its head, and its model if that is a separate one."""
        if self.critic is not None:
            return [*self.critic.parameters(), *self.critic.critic_parameters()]
        return [] if self.value_head is None else list(self.value_head.parameters())

    def compute_logprobs(
        self,
        batch: Batch,
        entropy: bool = False,
        values: bool = False,
        last_values: bool = False,
        logprob_gradient: Float[Tensor, "N T"] | None = None,
        divergence: Divergence | None = None,
        sums: Sequence[str] = (),
    ) -> PolicyOutputs:
        """Log-probabilities [N T] (nats) of the batch's actions, under the distribution that they were sampled from.

        With `entropy`, also the entropy of each of these distributions; with `values`, the value of the state before
        each action; with `last_values`, the value of the state after each row's last action; with `divergence`, how far
        each of these distributions is from the teacher's (models/teaching.py). All have gradients, unless the caller
        turned gradients off. With `sums`, also the numbers of these names (functional/distribution_sums.py) of each
        distribution, without gradient, by one more product with the LM head. The fast path runs the model on real
        tokens only, and the LM head only on states that predict an action, in chunks, so logits [N T V] never exist.
        `logprob_gradient` is the gradient of the loss by the log-probabilities, if already known; it saves work and
        changes no result (fused_logprobs.py).
        Raises LmgymError for an action in column 0, for values without a value function, and for a divergence without
        a teacher or together with the entropy."""
        batch = batch.to(self.device).replace(never=self.never)
        row, column = batch.actions.nonzero(as_tuple=True)
        if bool((column == 0).any()):
            raise LmgymError("an action has no token before it, so it cannot be scored; give each prompt at least one")
        # The token before an action predicts it; the states after the last actions of each row come behind all others.
        count, before = len(row), (row, column - 1)
        if last_values:
            ends = (batch.actions * torch.arange(batch.actions.shape[1], device=self.device)).max(1).values
            before = (torch.cat([row, torch.arange(len(batch), device=self.device)]), torch.cat([column - 1, ends]))
        with self.precision():
            states = self.states(batch, *before)
            known = None if logprob_gradient is None else logprob_gradient[row, column]
            divergences = None
            if divergence is not None:
                self._check_inexact()
                teacher = self._teacher(batch, entropy)
                places = batch, states, row, column, divergence
                if batch.span is None or teacher is None:
                    logprobs, divergences = compare(self, teacher, *places)
                else:
                    logprobs, divergences = compare_spans(self, teacher, self.classes, *places)
            else:
                logprobs, entropies = logprobs_of_states(self, batch, states, row, column, entropy, known)
            state_values = self._values(batch, states, *before) if values else None
            found = distribution_sums(self, batch, states, row, column, sums) if sums else None

        def column_of(numbers: Tensor) -> Tensor:
            return numbers.new_zeros((*batch.tokens.shape, *numbers.shape[1:])).index_put((row, column), numbers)

        return PolicyOutputs(
            logprobs=column_of(logprobs),
            entropy=column_of(entropies) if entropy else None,
            values=column_of(state_values[:count]) if state_values is not None else None,
            last_values=state_values[count:] if state_values is not None and last_values else None,
            divergence=column_of(divergences) if divergences is not None else None,
            distribution_sums=column_of(found) if found is not None else None,
        )

    def micro_batches(self, batch: Batch) -> list[Int[Tensor, " R"]]:
        """The row numbers of each forward pass of this rank, within `tokens_per_forward` (micro_batches.py)."""
        return micro_batches(self, batch)

    @torch.no_grad()
    def compute_logprobs_no_grad(
        self,
        batch: Batch,
        values: bool = False,
        last_values: bool = False,
        entropy: bool = False,
        sums: Sequence[str] = (),
    ) -> PolicyOutputs:
        """`compute_logprobs` of a whole batch without gradient, by micro-batches; columns in fp32 on the CPU.
        Example: policy.compute_logprobs_no_grad(batch).logprobs  # [N T]"""
        asked = {"logprobs": True, "entropy": entropy, "values": values}
        columns = {name: torch.zeros(batch.tokens.shape) for name, wanted in asked.items() if wanted}
        columns |= {"last_values": torch.zeros(len(batch))} if last_values else {}
        columns |= {"distribution_sums": torch.zeros(*batch.tokens.shape, len(sums))} if sums else {}
        for rows in counted(self.micro_batches(batch), "scoring", "passes"):
            part = batch[rows] if len(rows) else batch.idle()
            scored = self.compute_logprobs(part, entropy, values, last_values, sums=sums)
            for name, column in columns.items() if len(rows) else ():
                found = scored.require(name).float().cpu()
                if found.dim() >= 2:
                    column[rows, : found.shape[1]] = found
                else:
                    column[rows] = found
        self.ranks.add(*columns.values())  # each rank has filled in its own rows
        return PolicyOutputs(**columns)

    def compute_values(self, batch: Batch) -> Float[Tensor, " R"]:
        """The value of the state before each action [R], in the order of `batch.actions.nonzero()`. Only the value
        function's own parameters get a gradient, not the language model below a value head."""
        row, column = batch.actions.nonzero(as_tuple=True)
        critic = self.critic or self
        with self.precision(), torch.set_grad_enabled(self.critic is not None):
            hidden = critic.states(batch, row, column - 1).hidden
        return critic._apply_value_head(hidden)

    def with_model(self, model: PreTrainedModel, **changes: Any) -> "Policy":
        """A copy of this policy around another model, without a value function or teacher."""
        nothing = dict.fromkeys(("value_head", "critic", "teacher", "classes", "skeleton", "rounded", "sample"))
        vision = None if self.vision is None else self.vision.beside(model)
        # What was tried with this model says nothing of another one.
        return self.but(**{**nothing, "trains_native": False, "model": model, "vision": vision, **changes})

    def save_pretrained(self, folder: Path) -> None:
        """Write a folder that `from_pretrained` reads: the language model, adapters merged, and its tokenizer. With a
        quantized base the adapters alone: merged, they would be four to eight times the size that was loaded."""
        merges = lora.has_adapter(self.model) and not quantization.is_quantised(self.model)
        lora.save(lora.merged(self.model) if merges else self.model, folder)
        self.save_words(folder)

    def save(self, folder: Path) -> None:
        """Write all that trains, as `load_policy` reads it: model or adapters, tokenizer, value head, critic/."""
        lora.save(self.model, folder)
        self.save_words(folder)
        if self.value_head is not None:
            save_value_head(self.value_head, folder)
        if self.critic is not None:
            self.critic.save(folder / "critic")

    def save_words(self, folder: Path) -> None:
        """Write the tokenizer, and the processor of a model that reads pictures."""
        self.tokenizer.save_pretrained(folder)
        if self.vision is not None:
            save_processor(self.vision.processor, folder)

    def _check_inexact(self) -> None:
        """Raise LmgymError where a policy beside its teacher would have to be exact."""
        if self.exact:
            raise LmgymError(
                "policy.parity: exact does not serve log-probabilities beside a teacher's distributions; remove it"
            )

    def _teacher(self, batch: Batch, entropy: bool) -> "Policy | None":
        """The teacher beside this policy; None if the batch holds what the teacher has said of it."""
        if batch.teacher_top is not None and not entropy:
            return None
        if self.teacher is None or entropy:
            what = "has no teacher; name one (algorithm.teacher)" if not entropy else "gives no entropies beside it"
            raise LmgymError(f"a divergence from a teacher was asked for, and the policy {what}")
        return self.teacher

    def _values(self, batch: Batch, states: States, row: Tensor, column: Tensor) -> Float[Tensor, " R"]:
        critic, hidden = self, states.hidden
        if self.critic is not None:
            critic, hidden = self.critic, self.critic.states(batch, row, column).hidden
        return critic._apply_value_head(hidden)

    def _apply_value_head(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, " R"]:
        if self.value_head is None:
            raise LmgymError("the policy has no value function; write policy.critic: head or separate")
        with torch.autocast(self.device.type, enabled=False):
            return self.value_head(hidden.to(self.value_head.weight.dtype))[:, 0]
