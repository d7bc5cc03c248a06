"""Policy: a Hugging Face causal or encoder-decoder LM, and the log-probabilities it gives to the actions of a batch."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from lmgym.batch import Batch, PolicyOutputs, States
from lmgym.core.errors import LmgymError, represent
from lmgym.core.files import usual_modes
from lmgym.core.progress import counted
from lmgym.distributed.parts import whole
from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.functional.divergences import Divergence
from lmgym.models import frozen_base, hooks, lora, quantization, scoring
from lmgym.models.attention import packed
from lmgym.models.attention.rules import Rule
from lmgym.models.cross_teaching import TokenClasses, compare_spans
from lmgym.models.device import choose_tokens_per_forward, enough_tokens
from lmgym.models.distributions import action_logits, distribution_sums, logprobs_of_states
from lmgym.models.families import (
    cap_scores,
    context_length,
    default_decoder_start,
    first_position,
    supports_fast_path,
    trunk_of,
)
from lmgym.models.kernels import fused_training, onednn_products
from lmgym.models.kernels.layer_form import Form, forms_of
from lmgym.models.micro_batches import micro_batches
from lmgym.models.parity import modules as parity
from lmgym.models.picture_features import Vision, any_piece
from lmgym.models.rounding import RoundedWeights, UpdateSample
from lmgym.models.skeleton import Skeleton
from lmgym.models.teaching import compare
from lmgym.models.vision import save_processor
from lmgym.pictures.ids import FIRST
from lmgym.text.answer_ends import end_id

VALUE_HEAD = "value_head.safetensors"


def save_value_head(head: nn.Linear, folder: Path) -> None:
    """Write a value head to a folder, as `load_policy` reads it. Example: save_value_head(policy.value_head, folder)"""
    save_file({"weight": head.weight.detach().contiguous()}, folder / VALUE_HEAD)
    usual_modes(folder)


@dataclass(frozen=True)
class Route:
    """Which forward passes a policy uses (fast_path.py chooses): `fast` for packed scoring and lmgym's own sampling
    cache, and `plain_because` says why a model that was tried does not take them. `rules` are those of the layers, if
    one has a window, capped scores or sinks; `own_head` is the class of the trunk's output, if the logits are more than
    the LM head's.

    Example: Route(fast=False, plain_because="policy.path: plain")"""

    fast: bool
    rules: tuple[Rule, ...] = ()
    own_head: type | None = None
    plain_because: str = ""


class Policy:
    """A language model with its tokenizer, on its device and in its precision; with a value function if one is needed.

    The parameters are the fp32 master weights that the optimizer updates; `compute` is the precision of the forward
    pass. Dropout is off. `tokens_per_forward` limits the tokens of one forward pass, and so its memory (None: a limit
    for this kind of device). `activation_checkpointing` stores less for backward and computes it again. The
    two change results by rounding alone. `route` (or `fast` alone) chooses the forward passes (None: packed ones, if
    the model family is known to support them). The answers of an encoder-decoder begin with `decoder_start`.

    Example:
        >>> policy = load_policy(PolicySection(model="builtin:tiny"))
        >>> policy.compute_logprobs(batch).logprobs        # [N T]
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
        *,
        route: Route | None = None,
        flex: bool = False,
        onednn: bool = False,
        exact: bool = False,
        prepacked: bool | None = None,
        native: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model = model.eval()
        cap_scores(self.model)
        self.tokenizer = tokenizer
        self.compute = compute
        self.activation_checkpointing = activation_checkpointing
        self.flex = flex  # packed rows through flex attention (attention/flex.py)
        self.onednn = onednn  # fp32 products through oneDNN (onednn_products.py)
        if onednn:
            onednn_products.use_in(model)
        self.exact = exact  # what is sampled and what is scored are the same bits (parity/)
        if exact:
            parity.use_in(model)
        # Weights laid out for sampling on a CPU (device.py chooses).
        self.prepacked = compute == torch.float32 if prepacked is None else prepacked
        self.native = native  # sampling with kernels of its own on a CPU (native_trial.py chooses)
        self.native_unused = ""  # why not, where they would serve
        self.trains_native = False  # scoring and training with kernels of its own on a CPU (training_trial.py chooses)
        self.trains_native_unused = ""
        route = route or Route(supports_fast_path(model.config) if fast is None else fast)
        self.fast, self.rules, self.own_head = route.fast, route.rules, route.own_head
        self.plain_because = route.plain_because
        self.device = next(model.parameters()).device
        self.tokens_per_forward = choose_tokens_per_forward(tokens_per_forward, self.device.type)
        adapters = lora.has_adapter(model) and not quantization.is_quantised(model)
        self.enough_tokens = enough_tokens(tokens_per_forward, self.device.type, adapters)
        self.vocabulary, self.hidden_size = map(int, model.get_output_embeddings().weight.shape)
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)  # one that only the tokenizer has cannot be read
        self.pad_id = next(i for i in pads if i is not None and i < self.vocabulary)
        self.encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        self.decoder_start = decoder_start or (default_decoder_start(model) if self.encoder_decoder else ())
        self.value_head: nn.Linear | None = None  # on this model's own hidden states
        self.critic: Policy | None = None  # a separate model, whose value head is used instead
        self.teacher: Policy | None = None  # whose distributions this one's are compared with; may be itself
        self.classes: TokenClasses | None = None  # beside a teacher with another tokenizer
        self.ranks = ranks  # the processes that share out its passes over a batch
        self.rounded: RoundedWeights | None = None  # the copy that bf16 passes compute with, if rounded stochastically
        self.seen: float | None = None  # the share of the last update that passes in bf16 see (`weights/seen`)
        self.sample: UpdateSample | None = None  # that tells it
        self.skeleton: Skeleton | None = None  # if each rank holds a part of the weights: to make whole copies
        self.vision: Vision | None = None  # of a model that reads pictures

    @property
    def master(self) -> torch.dtype:
        """The precision of the parameters that train, or if none does or the base is quantized, of the first ones."""
        may_train = not quantization.is_quantised(self.model)
        trained = (parameter for parameter in self.model.parameters() if may_train and parameter.requires_grad)
        return next(chain(trained, self.model.parameters())).dtype

    @cached_property
    def context(self) -> int | None:
        """Context length in tokens (of an encoder-decoder, of each half); None if the configuration has none."""
        return context_length(self.model)

    @cached_property
    def first_position(self) -> int | None:
        """The position of a row's first token; None if the model takes no positions."""
        return first_position(self.model)

    def positions(self, index: Int[Tensor, "... N T"]) -> dict[str, Tensor]:
        """The argument `position_ids` for tokens with these places in their rows; empty if the model takes none."""
        return {} if self.first_position is None else {"position_ids": index + self.first_position}

    def places(self, ids: Int[Tensor, "N T"]) -> Int[Tensor, "3 N T"] | None:
        """The places of the tokens of whole rows, where pictures make them differ from the tokens' indices."""
        return None if self.vision is None else self.vision.places(ids)

    def packed_places(
        self, rows: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> tuple[Int[Tensor, "3 1 L"] | None, Int[Tensor, " R"]]:
        """The places of the last `counts` tokens of each of these whole rows, packed, where pictures make them differ
        from the indices (else None); and how far the place of what follows a row is ahead of its index."""
        found = [self.places(torch.tensor([row])) if max(row) >= FIRST else None for row in rows]
        if all(places is None for places in found):
            return None, torch.zeros(len(rows), dtype=torch.long)
        whole = [
            torch.arange(len(row)).expand(3, 1, -1) if places is None else places
            for row, places in zip(rows, found, strict=True)
        ]
        ahead = torch.tensor([int(places.max()) + 1 - places.shape[-1] for places in whole])
        last = [places[..., places.shape[-1] - count :] for places, count in zip(whole, counts, strict=True)]
        return torch.cat(last, -1).to(self.device), ahead

    def read(self, ids: Int[Tensor, "N T"]) -> dict[str, Any]:
        """The arguments of the model's forward pass that say what it reads: the ids, or with pictures among them the
        inputs of its language model."""
        if self.vision is None or not any_piece(ids):
            return {"input_ids": ids}
        return self.vision.read(self.model, ids)

    def reads_plainly(self, ids: Int[Tensor, "N T"]) -> bool:
        """True if rows of these ids take the plain path."""
        return not self.fast or (self.vision is not None and bool(self.vision.family.plain_because) and any_piece(ids))

    @property
    def never(self) -> tuple[int, ...]:
        """The ids that are never sampled, and have no probability in scoring either: the placeholder of pictures."""
        never = () if self.vision is None else (self.vision.placeholder,)
        return tuple(id for id in never if id < self.vocabulary)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a sequence: the tokenizer's EOS, those of the model's generation config, and what the chat
        template ends an answer with."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        ids = configured if isinstance(configured, list) else [configured]
        template = () if self.encoder_decoder else (end_id(self.tokenizer),)
        ids = [i for i in [*ids, self.tokenizer.eos_token_id, *template] if i is not None]
        if wrong := [i for i in ids if type(i) is not int]:
            raise LmgymError(f"eos_token_id in generation_config.json must be token numbers, not {represent(wrong[0])}")
        return tuple(sorted(set(ids)))

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The stop ids and the tokenizer's special tokens. A sampling restriction never removes them."""
        special = {*self.stop_ids, *self.tokenizer.all_special_ids}
        return tuple(sorted(i for i in special if i < self.vocabulary))

    @cached_property
    def layer_forms(self) -> tuple[Form, ...]:
        """What lmgym's own kernels for a CPU know of the layers; empty if they do not know all of them."""
        return forms_of(self.model)

    @property
    def has_known_layers(self) -> bool:
        """Whether lmgym's own kernels for a CPU are made for all layers."""
        return len(self.layer_forms) > 0 and all(rule.is_windowed for rule in self.rules)

    @property
    def has_critic(self) -> bool:
        return self.value_head is not None or self.critic is not None

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of the language model."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters of the LM head, trainable or frozen."""
        return list(self.model.get_output_embeddings().parameters())

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

    def states(self, batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]) -> States:
        """The inputs of the LM head [R H] for the tokens at (row, column), in that order, with gradient."""
        plain = self.reads_plainly(batch.tokens)
        if self.vision is None and any_piece(batch.tokens):
            raise LmgymError(
                f"a batch holds a picture, and this {self.model.config.model_type} reads texts only; take a model that "
                "reads pictures, with its processor beside it (docs/vision.md)"
            )
        path = scoring.padded if plain else scoring.encoder_decoder if self.encoder_decoder else scoring.packed
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        # An idle pass asks for no state, and runs the model all the same.
        asked = (row, column) if len(row) else (row.new_zeros(1), column.new_zeros(1))
        with ExitStack() as entered:
            native = self.trains_native and self.compute == torch.bfloat16 and self.skeleton is None and not plain
            if native and self.has_known_layers:
                copies = {} if self.rounded is None else self.rounded.copies
                entered.enter_context(
                    fused_training.fused(trunk_of(self.model).layers, self.layer_forms, copies, self.rules)
                )
            if recompute:
                entered.enter_context(hooks.activation_checkpointing(self.model, self.rounded_weights))
            found = path(self, batch, *asked)
        if len(row):
            return found
        return States(found.hidden[:0], None if found.logits is None else found.logits[:0])

    def action_logits(
        self, states: States, batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]
    ) -> Float[Tensor, "R V"]:
        """Logits [R V] of the distributions from which the actions at (row, column) were sampled, from their states."""
        logits = self.head(states.hidden) if states.logits is None else states.logits
        return action_logits(logits, batch.replace(never=self.never), row, column)

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

    def forward_hidden(
        self, ids: Int[Tensor, "B L"], positions: Int[Tensor, "... B L"], layout: packed.Layout
    ) -> Tensor:
        """Last hidden states [B L H] of a causal model, with one of lmgym's own attention layouts (attention/). With
        M-RoPE `positions` may be [3 B L]."""
        read = self.read(ids)  # before attention changes: a vision tower has its own
        with hooks.attention_through(self.model, packed.NAME):
            trunk = trunk_of(self.model)
            positions = positions + self.first_position if self.first_position else positions
            rules = {"lmgym_rules": self.rules} if self.rules else {}
            output = trunk(**read, position_ids=positions, use_cache=False, lmgym_layout=layout, **rules)
            return output.last_hidden_state

    def encode(self, source: Int[Tensor, "P S"], mask: Tensor) -> ModelOutput:
        """The encoder's output for padded sources, with `last_hidden_state` [P S H]; encoder-decoders only. It has the
        class that the decoder expects: one with experts looks for the routers' logits in it, even if they are None."""
        encoder: Any = self.model.get_encoder()  # type: ignore[no-untyped-call]
        output = encoder(input_ids=source, attention_mask=mask.long())
        return type(output)(last_hidden_state=output.last_hidden_state)  # type: ignore[no-any-return]

    def head_inputs(self, shorten: bool = False, **inputs: Any) -> tuple[Tensor, Any]:
        """Run the model: the input of its LM head [B L H], and its output (with `shorten`, of the last token only)."""
        captured: list[Tensor] = []

        def capture(module: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            captured.append(arguments[0])
            return (arguments[0][:, -1:],) if shorten else None

        handle = self.model.get_output_embeddings().register_forward_pre_hook(capture)
        try:
            output = self.model(**inputs)
        finally:
            handle.remove()
        hidden = captured[0]  # ProphetNet's [B K L H] predicts K tokens ahead; the first stream is the next token's
        return hidden[:, 0] if hidden.dim() == 4 else hidden, output

    def head(self, hidden: Float[Tensor, "R H"], narrow: bool = False) -> Float[Tensor, "R V"]:
        """The logits of hidden states, in fp32 (fp64 for an fp64 model): the LM head's outputs, or what the model's own
        code makes of these. With `narrow` they may have the precision of the LM head, which saves a copy."""
        if self.own_head is not None:
            with hooks.trunk_says(self.model, self.own_head(last_hidden_state=hidden[None])):
                ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
                logits = self.model(input_ids=ids, use_cache=False).logits[0]
            return logits if logits.dtype == torch.float64 else logits.float()
        logits = self.model.get_output_embeddings()(hidden)
        bias = getattr(self.model, "final_logits_bias", None)  # BART's family; zeros in most checkpoints
        if narrow and bias is None:
            return logits
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits if bias is None else logits + bias.to(logits.dtype)

    @property
    def head_chunk(self) -> int:
        """Hidden states per LM-head call: about 2^24 logits, whatever the vocabulary."""
        return min(max(2**24 // self.vocabulary, 64), 8192)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """The precision of a forward pass, this model's and a separate critic's: autocast, over weights that are
        rounded stochastically or that it rounds to nearest. Nothing, if `compute` is the parameters' own precision."""
        if self.compute == self.master:
            yield
            return
        with ExitStack() as entered:
            # Copies in the lower precision would stay for the whole pass; they must go with the weights they are of.
            cached = self.skeleton is None
            entered.enter_context(torch.autocast(self.device.type, dtype=self.compute, cache_enabled=cached))
            for policy in (self, self.critic):
                if policy is not None:
                    entered.enter_context(policy.rounded_weights())
            yield

    def rounded_weights(self) -> AbstractContextManager[None]:
        """Within this context the model computes with its stochastically rounded copy, if it has one."""
        return nullcontext() if self.rounded is None else self.rounded.shown_in(self.model)

    def had_updates(self, updates: int) -> None:
        """Say how many updates the policy has had, in all: the random numbers of its rounding depend on it."""
        for policy in (self, self.critic):
            if policy is not None and policy.rounded is not None:
                policy.rounded.updates = updates
        if self.skeleton is None and self.compute == torch.bfloat16 != next(iter(self.parameters())).dtype:
            self.sample = self.sample or UpdateSample(self.parameters())
            self.seen = self.sample.share_seen(self.computed)

    def computed(self, parameter: nn.Parameter) -> Tensor:
        """What a forward pass takes for a parameter: its rounded copy, or itself in the precision of the pass."""
        if self.rounded is not None and parameter in self.rounded.names:
            return self.rounded.copies[parameter]
        return parameter.detach().to(self.compute)

    @property
    def head_weights(self) -> tuple[Float[Tensor, "V H"], Float[Tensor, "V H"] | None]:
        """Of a plain LM head: the weights that train, and a copy to compute with if they are rounded stochastically."""
        parameters = self.model.get_output_embeddings()._parameters  # whatever `rounded` shows in their place
        weight: Any = parameters["weight"]
        if self.rounded is None or self.compute == weight.dtype:
            return whole(weight), None
        return weight, self.rounded.copies.get(weight)

    @contextmanager
    def twice_differentiable(self) -> Iterator[None]:
        """Within this context `compute_logprobs` and `states` have second derivatives. They run in the parameters'
        precision (of all in fp32, if frozen ones are bf16), with torch's plain attention and products and without
        activation checkpointing."""
        usual = self.compute, self.activation_checkpointing, self.flex, self.exact
        self.compute, self.activation_checkpointing = self.master, False
        self.flex = self.exact = False
        try:
            with ExitStack() as entered:
                entered.enter_context(sdpa_kernel(SDPBackend.MATH))
                for change in (onednn_products.set_aside, parity.set_aside, frozen_base.widened):
                    entered.enter_context(change(self.model))
                yield
        finally:
            self.compute, self.activation_checkpointing, self.flex, self.exact = usual

    def convert(self, precision: torch.dtype) -> None:
        """Turn the parameters into this precision; not the rotary frequencies, which are buffers."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(precision)

    def but(self, **changes: Any) -> "Policy":
        """A copy that shares the model and differs in these attributes. Example: policy.but(compute=torch.float32)"""
        other = copy.copy(self)
        if unknown := changes.keys() - vars(self).keys():
            raise TypeError(f"a policy has no {', '.join(sorted(unknown))}")
        vars(other).update(changes)
        return other

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

    def _check_inexact(self) -> None:
        """Raise LmgymError where a policy beside its teacher would have to be exact."""
        if self.exact:
            raise LmgymError(
                "policy.parity: exact does not serve log-probabilities beside a teacher's distributions; remove it"
            )

    def save_words(self, folder: Path) -> None:
        """Write the tokenizer, and the processor of a model that reads pictures."""
        self.tokenizer.save_pretrained(folder)
        if self.vision is not None:
            save_processor(self.vision.processor, folder)

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
