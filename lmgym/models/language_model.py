"""LanguageModel: a causal or encoder-decoder LM of Hugging Face in its precision: its input, states and logits."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from lmgym.batch import Batch, States
from lmgym.core.errors import LmgymError, represent
from lmgym.distributed.parts import whole
from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.models import frozen_base, hooks, lora, quantization, scoring
from lmgym.models.attention import packed
from lmgym.models.attention.rules import Rule
from lmgym.models.device import choose_tokens_per_forward, enough_tokens, head_rows
from lmgym.models.distributions import action_logits
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
from lmgym.models.parity import modules as parity
from lmgym.models.picture_features import Vision, any_piece
from lmgym.models.rounding import RoundedWeights, UpdateSample
from lmgym.models.skeleton import Skeleton
from lmgym.pictures.ids import FIRST
from lmgym.text.answer_ends import end_id


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


class LanguageModel:
    """A language model with its tokenizer, on its device and in its precision: what `Policy` is made of.

    The parameters are the fp32 master weights that the optimizer updates; `compute` is the precision of the forward
    pass. Dropout is off. `tokens_per_forward` limits the tokens of one forward pass, and so its memory (None: a limit
    for this kind of device). `activation_checkpointing` stores less for backward and computes it again. The
    two change results by rounding alone. `route` (or `fast` alone) chooses the forward passes (None: packed ones, if
    the model family is known to support them). The answers of an encoder-decoder begin with `decoder_start`.

    Example:
        >>> model = LanguageModel(AutoModelForCausalLM.from_pretrained(folder), tokenizer)
        >>> with model.precision(), torch.no_grad():
        ...     model.head(model.states(batch, row, column).hidden)        # [R V]
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
        template ends an answer with. One that the model lacks (-1 says "none") is never sampled, and left out."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        ids: list[Any] = configured if isinstance(configured, list) else [configured]
        template = () if self.encoder_decoder else (end_id(self.tokenizer),)
        ids = [i for i in [*ids, self.tokenizer.eos_token_id, *template] if i is not None]
        if wrong := [i for i in ids if type(i) is not int]:
            raise LmgymError(f"eos_token_id in generation_config.json must be token numbers, not {represent(wrong[0])}")
        return tuple(sorted({i for i in ids if 0 <= i < self.vocabulary}))

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

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of the language model."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters of the LM head, trainable or frozen."""
        return list(self.model.get_output_embeddings().parameters())

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
        """Hidden states per LM-head call."""
        return head_rows(self.vocabulary, self.device.type)

    @property
    def head_weights(self) -> tuple[Float[Tensor, "V H"], Float[Tensor, "V H"] | None]:
        """Of a plain LM head: the weights that train, and a copy to compute with if they are rounded stochastically."""
        parameters = self.model.get_output_embeddings()._parameters  # whatever `rounded` shows in their place
        weight: Any = parameters["weight"]
        if self.rounded is None or self.compute == weight.dtype:
            return whole(weight), None
        return weight, self.rounded.copies.get(weight)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """The precision of a forward pass: autocast, over weights that are rounded stochastically or that it rounds to
        nearest. Nothing, if `compute` is the parameters' own precision."""
        if self.compute == self.master:
            yield
            return
        # Copies in the lower precision would stay for the whole pass; they must go with the weights they are of.
        cached = self.skeleton is None
        with torch.autocast(self.device.type, dtype=self.compute, cache_enabled=cached), self.rounded_weights():
            yield

    def rounded_weights(self) -> AbstractContextManager[None]:
        """Within this context the model computes with its stochastically rounded copy, if it has one."""
        return nullcontext() if self.rounded is None else self.rounded.shown_in(self.model)

    def had_updates(self, updates: int) -> None:
        """Say how many updates the weights have had, in all: the random numbers of their rounding depend on it."""
        if self.rounded is not None:
            self.rounded.updates = updates
        if self.skeleton is None and self.compute == torch.bfloat16 != next(iter(self.parameters())).dtype:
            self.sample = self.sample or UpdateSample(self.parameters())
            self.seen = self.sample.share_seen(self.computed)

    def computed(self, parameter: nn.Parameter) -> Tensor:
        """What a forward pass takes for a parameter: its rounded copy, or itself in the precision of the pass."""
        if self.rounded is not None and parameter in self.rounded.names:
            return self.rounded.copies[parameter]
        return parameter.detach().to(self.compute)

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

    def but(self, **changes: Any) -> Self:
        """A copy that shares the model and differs in these attributes. Example: policy.but(compute=torch.float32)"""
        other = copy.copy(self)
        if unknown := [name for name in changes if not hasattr(self, name)]:
            raise TypeError(f"a policy has no {', '.join(unknown)}")
        vars(other).update(changes)
        return other
