"""Models that read their answers back one token at a time through Hugging Face's own cache.

The fast path for causal models does not come here (inference/sampler.py). A reader serves one block of answers that
begin together: `step(None)` returns the logits [S V] of their first tokens, `step(tokens)` of the next ones.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from lmgym.inference.base import Request
from lmgym.models.policy import Policy


class PlainReader:
    """Any causal LM. All prompts of the block have one length: recurrent models and odd position encodings would not
    survive padding. A model without a cache reads everything again. Ended answers stay and are fed padding: a recurrent
    state cannot be picked apart."""

    def __init__(self, policy: Policy, requests: Sequence[Request]) -> None:
        self.model, self.cache = policy.model, None
        self.ids = torch.tensor([request.prompt_ids for request in requests], device=policy.device)

    def step(self, tokens: Int[Tensor, " S"] | None) -> Float[Tensor, "S V"]:
        if tokens is not None:
            self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        fresh = self.ids if self.cache is None else self.ids[:, -1:]
        output = self.model(input_ids=fresh, past_key_values=self.cache, use_cache=True)
        self.cache = getattr(output, "past_key_values", None)
        return output.logits[:, -1].float()


class EncoderDecoderReader:
    """An encoder-decoder LM. A distinct source is encoded once, and its first decoder step, which fills the cache of
    the cross-attention, is run once; answers to it then get copies. Ended answers leave the caches (`keep`)."""

    def __init__(self, policy: Policy, requests: Sequence[Request]) -> None:
        self.policy, self.model = policy, policy.model
        places: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        owner = [places.setdefault((r.source_ids, r.prompt_ids), len(places)) for r in requests]
        self.owner = torch.tensor(owner, device=policy.device)
        self.prefix = torch.tensor([prefix for _, prefix in places], device=policy.device)
        self.encoded, self.mask = self._encode([source for source, _ in places])
        self.cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def step(self, tokens: Int[Tensor, " S"] | None) -> Float[Tensor, "S V"]:
        if tokens is not None:
            return self._forward(tokens[:, None])
        logits = self._forward(self.prefix)
        self.keep(self.owner)
        return logits[self.owner]

    def keep(self, places: Int[Tensor, " S"]) -> None:
        """Go on with these of the block's answers, in this order; one may be named more than once."""
        self.cache.batch_select_indices(places)
        self.encoded, self.mask = self.encoded[places], self.mask[places]

    def _forward(self, tokens: Int[Tensor, "S L"]) -> Float[Tensor, "S V"]:
        output = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self.encoded),
            attention_mask=self.mask.long(),
            decoder_input_ids=tokens,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1].float()

    def _encode(self, sources: list[tuple[int, ...]]) -> tuple[Float[Tensor, "P S H"], Tensor]:
        longest = max(map(len, sources))
        ids = torch.tensor([[*source, *[self.policy.pad_id] * (longest - len(source))] for source in sources])
        mask = torch.arange(longest) < torch.tensor(list(map(len, sources)))[:, None]
        ids, mask = ids.to(self.policy.device), mask.to(self.policy.device)
        rows = max(self.policy.tokens_per_forward // longest, 1)
        parts = zip(ids.split(rows), mask.split(rows), strict=True)
        return torch.cat([self.policy.encode(*part) for part in parts]), mask
