"""Policy: a Hugging Face causal or encoder-decoder LM that can say how likely it finds the actions of a batch."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from lmgym.batch import Batch, PolicyOutputs, States
from lmgym.core.errors import LmgymError
from lmgym.models import forward, lora, quantization, scoring
from lmgym.models.attention import packed
from lmgym.models.device import choose_tokens_per_forward
from lmgym.models.distributions import action_logits, describe_actions
from lmgym.models.families import default_decoder_start, supports_fast_path

VALUE_HEAD = "value_head.safetensors"


class Policy:
    """A language model with its tokenizer, on its device, in its precision; with a value function where one is needed.

    The parameters are the fp32 masters that the optimizer moves; `compute` is the precision of the forward pass.
    Dropout is off. `tokens_per_forward` bounds the tokens that one forward pass holds, and so its memory (left out: a
    bound that suits the device); no result depends on it, nor on `activation_checkpointing`, which keeps less for
    backward and computes it again. An encoder-decoder's answers begin with `decoder_start`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        compute: torch.dtype = torch.float32,
        tokens_per_forward: int | None = None,
        fast: bool | None = None,
        decoder_start: tuple[int, ...] = (),
        activation_checkpointing: bool = False,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.compute = compute
        self.activation_checkpointing = activation_checkpointing
        self.flex = False  # attention over packed rows through flex.py
        self.fast = supports_fast_path(model.config) if fast is None else fast
        self.device = next(model.parameters()).device
        self.tokens_per_forward = choose_tokens_per_forward(tokens_per_forward, self.device.type)
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self.hidden_size = int(model.get_output_embeddings().weight.shape[1])
        self.pad_id = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
        self.encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        self.decoder_start = decoder_start or (default_decoder_start(model) if self.encoder_decoder else ())
        self.value_head: nn.Linear | None = None  # on this model's own hidden states
        self.critic: Policy | None = None  # a separate model, whose value head is used instead

    @cached_property
    def context(self) -> int | None:
        """Most tokens that the model can read, or None if it does not say; an encoder-decoder's, for each half."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a sequence: the tokenizer's EOS and those of the model's generation config."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        ids = configured if isinstance(configured, list) else [configured]
        return tuple(sorted({int(i) for i in [*ids, self.tokenizer.eos_token_id] if i is not None}))

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The stop ids and the tokenizer's special tokens, which no restriction of sampling removes."""
        special = {*self.stop_ids, *self.tokenizer.all_special_ids}
        return tuple(sorted(i for i in special if i < self.vocabulary))

    @property
    def has_critic(self) -> bool:
        return self.value_head is not None or self.critic is not None

    def parameters(self) -> list[nn.Parameter]:
        """The language model's parameters that train."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def head_parameters(self) -> list[nn.Parameter]:
        """The LM head's parameters, whether they train or not."""
        return list(self.model.get_output_embeddings().parameters())

    def critic_parameters(self) -> list[nn.Parameter]:
        """The value function's own parameters: its head, and its model where that is separate."""
        own = [] if self.value_head is None else list(self.value_head.parameters())
        return own if self.critic is None else [*self.critic.parameters(), *self.critic.critic_parameters()]

    def compute_logprobs(
        self,
        batch: Batch,
        entropy: bool = False,
        values: bool = False,
        last_values: bool = False,
        logprob_gradient: Float[Tensor, "N T"] | None = None,
    ) -> PolicyOutputs:
        """What this policy says of the batch's actions, under the distribution that they were sampled from.

        With `values`, also what its value function says of what stands before each action, and with `last_values` of
        what stands behind each row's last one. Gradients flow unless the caller switched them off. The fast path runs
        the trunk on real tokens only, and the LM head on the hidden states that predict an action only, in chunks, so
        that [N T V] never exists. A caller who knows what the gradient by the log-probabilities will be says so by
        `logprob_gradient`, which saves work and changes nothing (fused.py).
        """
        batch = batch.to(self.device)
        row, column = batch.actions.nonzero(as_tuple=True)
        if bool((column == 0).any()):
            raise LmgymError("an action has no token before it, so it cannot be scored; give each prompt at least one")
        count, before = len(row), (row, column - 1)
        if last_values:
            ends = (batch.actions * torch.arange(batch.actions.shape[1], device=self.device)).max(1).values
            before = (torch.cat([row, torch.arange(len(batch), device=self.device)]), torch.cat([column - 1, ends]))
        with self.precision():
            states = self.states(batch, *before)
            logprobs, entropies = describe_actions(
                self,
                batch,
                states,
                row,
                column,
                entropy,
                None if logprob_gradient is None else logprob_gradient[row, column],
            )
            said = self._values(batch, states, *before) if values else None

        def column_of(numbers: Tensor) -> Tensor:
            return numbers.new_zeros(batch.tokens.shape).index_put((row, column), numbers)

        return PolicyOutputs(
            logprobs=column_of(logprobs),
            entropy=column_of(entropies) if entropy else None,
            values=column_of(said[:count]) if said is not None else None,
            last_values=said[count:] if said is not None and last_values else None,
        )

    def states(self, batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]) -> States:
        """What the LM head reads of the tokens at (row, column), with gradient, in that order."""
        path = scoring.plain if not self.fast else scoring.encoder_decoder if self.encoder_decoder else scoring.packed
        again = self.activation_checkpointing and torch.is_grad_enabled()
        with forward.activation_checkpointing(self.model) if again else nullcontext():
            return path(self, batch, row, column)

    def action_logits(
        self, states: States, batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]
    ) -> Float[Tensor, "R V"]:
        """The logits of the distributions that the actions at (row, column) were sampled from, given their states."""
        logits = self.head(states.hidden) if states.logits is None else states.logits
        return action_logits(logits, batch, row, column)

    def micro_batches(self, batch: Batch) -> list[Int[Tensor, " R"]]:
        """Rows that fit one forward pass each; groups stay together, longest first, so that rows of like length and
        rows that share a prompt are computed side by side. A group that fits a pass is not cut: its prompt is computed
        once."""
        lengths = batch.mask.sum(1).cpu()
        if batch.source_mask is not None:
            lengths = lengths + batch.source_mask.sum(1).cpu()
        groups, place = torch.unique(batch.group.cpu(), return_inverse=True)
        longest = torch.zeros(len(groups), dtype=torch.long).scatter_reduce(0, place, lengths, "amax")
        order = np.lexsort((place.numpy(), -longest[place].numpy()))  # stable: rows of a group stay in order
        batches: list[list[int]] = [[]]
        held = scoring.tokens_of_pass(self, batch, lengths)

        def fit(rows: list[int]) -> bool:
            return held(rows) <= self.tokens_per_forward

        for _, group in groupby(order.tolist(), key=place.tolist().__getitem__):
            rows = list(group)
            for part in [rows] if fit(rows) else [[row] for row in rows]:
                if batches[-1] and not fit(batches[-1] + part):
                    batches.append([])
                batches[-1] += part
        return [torch.tensor(rows) for rows in batches if rows]

    @torch.no_grad()
    def compute_logprobs_no_grad(self, batch: Batch, values: bool = False, last_values: bool = False) -> PolicyOutputs:
        """`compute_logprobs` of a whole batch, micro-batch by micro-batch, without gradient; columns in fp32 on the CPU.

        Example: policy.compute_logprobs_no_grad(batch).logprobs  # [N T]
        """
        columns = {"logprobs": torch.zeros(batch.tokens.shape)}
        if values:
            columns |= {"values": torch.zeros(batch.tokens.shape), "last_values": torch.zeros(len(batch))}
        for rows in self.micro_batches(batch):
            scored = self.compute_logprobs(batch[rows], values=values, last_values=last_values)
            columns["logprobs"][rows, : scored.logprobs.shape[1]] = scored.logprobs.float().cpu()
            if scored.values is not None:
                columns["values"][rows, : scored.values.shape[1]] = scored.values.float().cpu()
            if scored.last_values is not None:
                columns["last_values"][rows] = scored.last_values.float().cpu()
        return PolicyOutputs(**columns)

    def compute_values(self, batch: Batch) -> Float[Tensor, " R"]:
        """The value of the text before each action, in the order of `batch.actions.nonzero()`.

        The gradient reaches the value function's own parameters only: a head on this model leaves the model as it is.
        """
        row, column = batch.actions.nonzero(as_tuple=True)
        critic = self.critic or self
        with self.precision(), torch.set_grad_enabled(self.critic is not None):
            hidden = critic.states(batch, row, column - 1).hidden
        return critic._apply_value_head(hidden)

    def forward_hidden(self, ids: Int[Tensor, "B L"], positions: Int[Tensor, "B L"], layout: packed.Layout) -> Tensor:
        """Last hidden states [B L H] of a causal trunk over one of lmgym's own attention layouts."""
        with forward.attention_through(self.model, packed.NAME):
            trunk = self.model.base_model
            return trunk(input_ids=ids, position_ids=positions, use_cache=False, lmgym_layout=layout).last_hidden_state

    def encode(self, source: Int[Tensor, "P S"], mask: Tensor) -> Float[Tensor, "P S H"]:
        """What the encoder makes of padded sources; an encoder-decoder only."""
        encoder: Any = self.model.get_encoder()  # type: ignore[no-untyped-call]
        return encoder(input_ids=source, attention_mask=mask.long()).last_hidden_state

    def head_inputs(self, shorten: bool = False, **inputs: Any) -> tuple[Tensor, Any]:
        """Run the model; returns what enters its LM head, whatever the family does before that, and its output.

        With `shorten` the model's own head is run on the last token only.
        """
        seen: list[Tensor] = []

        def look(module: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            seen.append(arguments[0])
            return (arguments[0][:, -1:],) if shorten else None

        handle = self.model.get_output_embeddings().register_forward_pre_hook(look)
        try:
            output = self.model(**inputs)
        finally:
            handle.remove()
        return seen[0], output

    def head(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R V"]:
        """The LM head's logits in at least fp32."""
        logits = self.model.get_output_embeddings()(hidden)
        bias = getattr(self.model, "final_logits_bias", None)  # BART's family; zeros in most checkpoints
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits if bias is None else logits + bias.to(logits.dtype)

    @property
    def head_chunk(self) -> int:
        """Hidden states per LM-head call: about 2^24 logits, whatever the vocabulary."""
        return min(max(2**24 // self.vocabulary, 64), 8192)

    def precision(self) -> Any:
        """The autocast context of the forward pass (none where compute is the masters' own precision)."""
        if self.compute == next(self.model.parameters()).dtype:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute)

    @contextmanager
    def twice_differentiable(self) -> Iterator[None]:
        """Within it `compute_logprobs` and `states` run in the masters' precision, with attention that has second derivatives, and
        without activation checkpointing, which has only first ones."""
        usual = self.compute, self.activation_checkpointing, self.flex
        self.compute, self.activation_checkpointing = next(self.model.parameters()).dtype, False
        self.flex = False
        try:
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            self.compute, self.activation_checkpointing, self.flex = usual

    def trainable_copy(self) -> "Policy":
        """A copy that trains on its own, without a value function; a packed base, which does not train, is shared."""
        other = copy.copy(self)
        is_packed = quantization.is_quantised(self.model)
        other.model = quantization.copy_beside(self.model) if is_packed else copy.deepcopy(self.model)
        other.value_head, other.critic = None, None
        return other

    def frozen_copy(self, precision: torch.dtype | None = None) -> "Policy":
        """A copy that does not train, without a value function: any adapter merged, parameters in `precision`. Over a
        packed base it is a copy of the adapters only."""
        if quantization.is_quantised(self.model):
            other = self.trainable_copy()
            other.model.requires_grad_(False)
            return other
        other = copy.copy(self)
        other.model, other.value_head, other.critic = lora.merged(self.model), None, None
        other.model.requires_grad_(False)
        if precision is not None:
            for parameter in other.model.parameters():  # not the rotary frequencies, which are buffers
                parameter.data = parameter.data.to(precision)
        return other

    def save_pretrained(self, folder: Path) -> None:
        """A folder that `from_pretrained` reads: the language model, any adapter merged, and its tokenizer. Beside a
        packed base, the adapter alone: merged, it would be four to eight times what was loaded."""
        merges = lora.has_adapter(self.model) and not quantization.is_quantised(self.model)
        (lora.merged(self.model) if merges else self.model).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def save(self, folder: Path) -> None:
        """Everything that trains, as `load_policy` reads it: model or adapter, tokenizer, value head, critic/."""
        self.model.save_pretrained(folder)  # of a model with an adapter, this is the adapter
        self.tokenizer.save_pretrained(folder)
        if self.value_head is not None:
            save_file({"weight": self.value_head.weight.detach().contiguous()}, folder / VALUE_HEAD)
        if self.critic is not None:
            self.critic.save(folder / "critic")

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
