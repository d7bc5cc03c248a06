"""Policy: a Hugging Face causal or encoder-decoder LM that can say how likely it finds the actions of a batch."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from lmgym import attention
from lmgym.batch import Batch, Scored
from lmgym.errors import LmgymError
from lmgym.policies import adapter, paths
from lmgym.policies.families import default_decoder_start, supports_fast_path
from lmgym.policies.fused import Described
from lmgym.policies.heads import action_logits, describe
from lmgym.policies.paths import States

AttentionInterface.register(attention.NAME, attention.attend)

VALUE_HEAD = "value_head.safetensors"


class Policy:
    """A language model with its tokenizer, on its device, in its precision; with a value function where one is needed.

    The parameters are the fp32 masters that the optimizer moves; `compute` is the precision of the forward pass.
    Dropout is off. `tokens_per_forward` bounds the padded size of one forward pass, and so its memory; no result
    depends on it. An encoder-decoder's answers begin with `decoder_start`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        compute: torch.dtype = torch.float32,
        tokens_per_forward: int = 16384,
        fast: bool | None = None,
        decoder_start: tuple[int, ...] = (),
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.compute = compute
        self.tokens_per_forward = tokens_per_forward
        self.fast = supports_fast_path(model.config) if fast is None else fast
        self.device = next(model.parameters()).device
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self.hidden_size = int(model.get_output_embeddings().weight.shape[1])
        self.pad_id = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
        self.encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        self.decoder_start = decoder_start or (default_decoder_start(model) if self.encoder_decoder else ())
        self.value_head: nn.Linear | None = None  # on this model's own hidden states
        self.critic: Policy | None = None  # a separate model, whose value head is used instead

    @property
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

    def critic_parameters(self) -> list[nn.Parameter]:
        """The value function's own parameters: its head, and its model where that is separate."""
        own = [] if self.value_head is None else list(self.value_head.parameters())
        return own if self.critic is None else [*self.critic.parameters(), *self.critic.critic_parameters()]

    def score(self, batch: Batch, entropy: bool = False, values: bool = False, last_values: bool = False) -> Scored:
        """What this policy says of the batch's actions, under the distribution that they were sampled from.

        With `values`, also what its value function says of what stands before each action, and with `last_values` of
        what stands behind each row's last one. Gradients flow unless the caller switched them off. The fast path runs
        the trunk on real tokens only, and the LM head on the hidden states that predict an action only, in chunks, so
        that [N T V] never exists.
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
            logprobs, entropies = self._described(batch, states, row, column, entropy)
            said = self._values(batch, states, *before) if values else None

        def column_of(numbers: Tensor) -> Tensor:
            return numbers.new_zeros(batch.tokens.shape).index_put((row, column), numbers)

        return Scored(
            logprobs=column_of(logprobs),
            entropy=column_of(entropies) if entropy else None,
            values=column_of(said[:count]) if said is not None else None,
            last_values=said[count:] if said is not None and last_values else None,
        )

    def states(self, batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]) -> States:
        """What the LM head reads of the tokens at (row, column), with gradient, in that order."""
        path = paths.plain if not self.fast else paths.encoder_decoder if self.encoder_decoder else paths.packed
        return path(self, batch, row, column)

    def action_logits(
        self, states: States, batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]
    ) -> Float[Tensor, "R V"]:
        """The logits of the distributions that the actions at (row, column) were sampled from, given their states."""
        logits = self.head(states.hidden) if states.logits is None else states.logits
        return action_logits(logits, batch, row, column)

    def micro_batches(self, batch: Batch) -> list[Int[Tensor, " R"]]:
        """Rows that fit one forward pass each; groups stay together, longest first, so that rows of like length and
        rows that share a prompt are computed side by side."""
        lengths = batch.mask.sum(1).cpu()
        if batch.source_mask is not None:
            lengths = lengths + batch.source_mask.sum(1).cpu()
        groups, place = torch.unique(batch.group.cpu(), return_inverse=True)
        longest = torch.zeros(len(groups), dtype=torch.long).scatter_reduce(0, place, lengths, "amax")
        order = np.lexsort((place.numpy(), -longest[place].numpy()))  # stable: rows of a group stay in order
        batches: list[list[int]] = []
        width = 0
        for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
            width = max(width, length)
            if not batches or (len(batches[-1]) + 1) * width > self.tokens_per_forward:
                batches.append([])
                width = length
            batches[-1].append(row)
        return [torch.tensor(rows) for rows in batches]

    @torch.no_grad()
    def describe(self, batch: Batch, values: bool = False, last_values: bool = False) -> Scored:
        """`score` of a whole batch without gradients, micro-batch by micro-batch, on the CPU."""
        columns = {"logprobs": torch.zeros(batch.tokens.shape)}
        if values:
            columns |= {"values": torch.zeros(batch.tokens.shape), "last_values": torch.zeros(len(batch))}
        for rows in self.micro_batches(batch):
            scored = self.score(batch[rows], values=values, last_values=last_values)
            columns["logprobs"][rows, : scored.logprobs.shape[1]] = scored.logprobs.float().cpu()
            if scored.values is not None:
                columns["values"][rows, : scored.values.shape[1]] = scored.values.float().cpu()
            if scored.last_values is not None:
                columns["last_values"][rows] = scored.last_values.float().cpu()
        return Scored(**columns)

    def logprobs(self, batch: Batch) -> Float[Tensor, "N T"]:
        """Log-probabilities of a whole batch without gradients."""
        return self.describe(batch).logprobs

    def forward_hidden(
        self, ids: Int[Tensor, "B L"], positions: Int[Tensor, "B L"], layout: attention.Layout
    ) -> Tensor:
        """Last hidden states [B L H] of a causal trunk over one of lmgym's own attention layouts."""
        with _packed_attention(self.model):
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
        """Within it `score` and `states` run in the masters' precision, with attention that has second derivatives."""
        compute, self.compute = self.compute, next(self.model.parameters()).dtype
        try:
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            self.compute = compute

    def trainable_copy(self) -> "Policy":
        """A copy that trains on its own, without a value function."""
        other = copy.copy(self)
        other.model, other.value_head, other.critic = copy.deepcopy(self.model), None, None
        return other

    def frozen_copy(self, precision: torch.dtype | None = None) -> "Policy":
        """A copy that does not train: any adapter merged, no value function, parameters in `precision`."""
        other = copy.copy(self)
        other.model, other.value_head, other.critic = adapter.merged(self.model), None, None
        other.model.requires_grad_(False)
        if precision is not None:
            for parameter in other.model.parameters():  # not the rotary frequencies, which are buffers
                parameter.data = parameter.data.to(precision)
        return other

    def save_pretrained(self, folder: Path) -> None:
        """A folder that `from_pretrained` reads: the language model, any adapter merged, and its tokenizer."""
        (adapter.merged(self.model) if adapter.has_adapter(self.model) else self.model).save_pretrained(folder)
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
        if critic.value_head is None:
            raise LmgymError("the policy has no value function; write policy.critic: head or separate")
        with torch.autocast(self.device.type, enabled=False):
            return critic.value_head(hidden.to(critic.value_head.weight.dtype))[:, 0]

    def _described(
        self, batch: Batch, states: States, row: Tensor, column: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probability [R] and entropy [R] (or none) of the actions at (row, column), from the first R states."""
        head: Any = self.model.get_output_embeddings()
        renormalised = batch.kept_sets is None or batch.kept_sets.renormalised
        if states.logits is None and type(head) is nn.Linear and head.bias is None and renormalised:
            hidden = states.hidden[: len(row)]
            hidden = hidden if self.compute == head.weight.dtype else hidden.to(self.compute)
            bias = getattr(self.model, "final_logits_bias", None)

            def adjust(logits: Tensor, part: slice) -> Tensor:
                return action_logits(logits, batch, row[part], column[part])

            scale = 1.0 if batch.temperature == 0 else 1 / batch.temperature
            targets = batch.tokens[row, column]
            bias = None if bias is None else bias.flatten()
            return Described.apply(  # type: ignore[no-any-return, no-untyped-call]
                hidden, head.weight, bias, targets, adjust, scale, entropy, self.head_chunk
            )
        pieces = []
        for part in torch.arange(len(row), device=self.device).split(self.head_chunk):
            if states.logits is not None:
                pieces.append(describe(states.logits[part], batch, row[part], column[part], entropy))
                continue
            arguments = (states.hidden[part], batch, row[part], column[part], entropy)
            if torch.is_grad_enabled() and len(row) > self.head_chunk:
                pieces.append(checkpoint(self._describe, *arguments, use_reentrant=False))
            else:
                pieces.append(self._describe(*arguments))
        return torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])

    def _describe(
        self, hidden: Tensor, batch: Batch, row: Tensor, column: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        return describe(self.head(hidden), batch, row, column, entropy)


@contextmanager
def _packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Route attention to `attention.attend`; afterwards the model is as it was, and its own `generate` works."""
    usual = model.config._attn_implementation
    model.config._attn_implementation = attention.NAME
    try:
        yield
    finally:
        model.config._attn_implementation = usual
