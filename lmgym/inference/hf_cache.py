"""Decoding with Hugging Face's own caches: encoder-decoders, and causal models without a fast path.

A reader runs the model for one block of answers that begin together: `step(None)` returns the logits [S V] of their
first tokens, `step(tokens)` the logits of the tokens after these."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.utils import ModelOutput

from lmgym.inference.base import Request
from lmgym.models.families import WITHOUT_CACHE, cache_argument
from lmgym.models.policy import Policy


class PlainReader:
    """Any causal LM.

    All prompts of a block have one length, because padding would be wrong for recurrent models and some position
    encodings. A model without a usable cache computes all tokens again at each step. Each token's position is given,
    because caches with recurrent layers do not always know how much they have read. Finished answers stay in the block
    and get padding tokens, because rows cannot be removed from every kind of recurrent state."""

    def __init__(self, policy: Policy, requests: Sequence[Request]) -> None:
        self.policy, self.model, self.cache = policy, policy.model, None
        self.argument = cache_argument(policy.model)
        self.use_cache = policy.model.config.model_type not in WITHOUT_CACHE
        self.ids = torch.tensor([request.prompt_ids for request in requests], device=policy.device)

    def step(self, tokens: Int[Tensor, " S"] | None) -> Float[Tensor, "S V"]:
        if tokens is not None:
            self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        fresh = self.ids if self.cache is None else self.ids[:, -1:]
        places = self.policy.places(self.ids)
        if places is None:
            places = torch.arange(self.ids.shape[1], device=self.ids.device).expand(self.ids.shape)
        positions = self.policy.positions(places[..., -fresh.shape[1] :])
        inputs: dict[str, Any] = {**self.policy.read(fresh), **positions, "use_cache": self.use_cache}
        output = self.model(**inputs, **({} if self.cache is None else {self.argument: self.cache}))
        self.cache = getattr(output, self.argument, None)
        return output.logits[:, -1].float()


class EncoderDecoderReader:
    """An encoder-decoder LM. A distinct source is encoded once, and its first decoder step, which fills the
    cross-attention cache, runs once; its answers then get copies. `keep` removes finished answers."""

    def __init__(self, policy: Policy, requests: Sequence[Request]) -> None:
        self.policy, self.model = policy, policy.model
        index_of: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}  # of distinct (source, decoder prefix)
        source_of_row = [index_of.setdefault((r.source_ids, r.prompt_ids), len(index_of)) for r in requests]
        self.source_of_row = torch.tensor(source_of_row, device=policy.device)
        self.prefix = torch.tensor([prefix for _, prefix in index_of], device=policy.device)
        self.encoded, self.mask = self._encode([source for source, _ in index_of])
        self.cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def step(self, tokens: Int[Tensor, " S"] | None) -> Float[Tensor, "S V"]:
        if tokens is not None:
            return self._forward(tokens[:, None])
        logits = self._forward(self.prefix)
        self.keep(self.source_of_row)
        return logits[self.source_of_row]

    def keep(self, rows: Int[Tensor, " S"]) -> None:
        """Continue with these rows of the block, in this order; a row may occur more than once."""
        self.cache.batch_select_indices(rows)
        self.encoded["last_hidden_state"] = self.encoded["last_hidden_state"][rows]
        self.mask = self.mask[rows]

    def _forward(self, tokens: Int[Tensor, "S L"]) -> Float[Tensor, "S V"]:
        output = self.model(
            encoder_outputs=self.encoded,
            attention_mask=self.mask.long(),
            decoder_input_ids=tokens,
            use_cache=True,
            **{cache_argument(self.model): self.cache},
        )
        return output.logits[:, -1].float()

    def _encode(self, sources: list[tuple[int, ...]]) -> tuple[ModelOutput, Tensor]:
        longest = max(map(len, sources))
        ids = torch.tensor([[*source, *[self.policy.pad_id] * (longest - len(source))] for source in sources])
        mask = torch.arange(longest) < torch.tensor(list(map(len, sources)))[:, None]
        ids, mask = ids.to(self.policy.device), mask.to(self.policy.device)
        rows = max(self.policy.tokens_per_forward // longest, 1)
        chunks = zip(ids.split(rows), mask.split(rows), strict=True)
        encoded = [self.policy.encode(*chunk) for chunk in chunks]
        encoded[0]["last_hidden_state"] = torch.cat([chunk["last_hidden_state"] for chunk in encoded])
        return encoded[0], mask
