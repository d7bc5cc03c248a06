"""Sampler: lmgym's own engine, in the training process, over the policy's own forward pass (inference/decoder.py).

Encoder-decoders, and causal models that the fast path does not serve, read everything anew each turn, through Hugging
Face's caches (inference/hf_cache.py); beams in evaluations are Hugging Face's own (inference/hf_generate.py).
"""

import copy
from collections.abc import Callable, Sequence

import torch

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.inference.base import Completion, Decoding, Request, Sampling
from lmgym.inference.completions import check_request
from lmgym.inference.conversation_cache import HeldConversations
from lmgym.inference.decoder import Decoder
from lmgym.inference.hf_generate import generate
from lmgym.models.policy import Policy
from lmgym.types import Restriction


@register("engine", "sampler")
class Sampler:
    """Decodes up to `rows` answers side by side.

    Greedy answers equal Hugging Face's `generate`; log-probabilities equal `Policy.compute_logprobs` (to 1e-4 in fp32). With bf16
    compute it samples from a bf16 copy of the weights, renewed at each `load`. With `captured`, decoding steps have
    fixed shapes and become CUDA graphs (inference/cuda_graphs.py); causal models on the fast path only.
    """

    def __init__(self, policy: Policy, rows: int = 256, captured: bool = False) -> None:
        self.policy, self.rows, self.captured, self.version = policy, rows, captured, 0
        if captured and (policy.encoder_decoder or not policy.fast):
            raise LmgymError(
                f"engine.captured: decoding steps of {policy.model.config.model_type} run through Hugging Face's "
                "caches, whose shapes are not fixed; remove it"
            )
        self._copy: Policy | None = None
        self._restriction: Restriction | None = None
        self._mask: Policy | None = None
        self._held = HeldConversations()
        self.load(policy, 0)

    @property
    def context(self) -> int | None:
        return self.policy.context

    def load(self, policy: Policy, version: int) -> None:
        """Take over the policy's weights; without bf16 they are shared, and nothing is copied."""
        self.policy, self.version = policy, version
        self._held.clear()
        if policy.compute == next(policy.model.parameters()).dtype:
            return
        if self._copy is None:
            self._copy = copy.copy(policy)
            self._copy.model = copy.deepcopy(policy.model).requires_grad_(False)
            # Parameters only: rotary frequencies are buffers, and positions need their full precision.
            for parameter in self._copy.model.parameters():
                parameter.data = parameter.data.to(policy.compute)
        with torch.no_grad():
            for ours, theirs in zip(self._copy.model.parameters(), policy.model.parameters(), strict=True):
                ours.copy_(theirs)

    def restricted(self, restriction: Restriction, mask: Policy | None = None) -> "Sampler":
        """This engine, but only those tokens are sampled that `mask` (the policy itself, if None) finds likely enough.

        What it holds of conversations is shared. Take it anew after each `load`.
        """
        other = copy.copy(self)
        other._restriction, other._mask = restriction, mask
        return other

    def forget(self, conversations: Sequence[int]) -> None:
        """These conversations are over; what is held of them goes."""
        self._held.forget(conversations)

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        ended: Callable[[int, list[int]], None] | None = None,
    ) -> list[Completion]:
        """One completion per request, in order. Raises LmgymError for a prompt that leaves no room to answer, and for
        sampling that does not fit the vocabulary or the restriction."""
        for request in requests:
            check_request(self.policy, request)
        sampling.check_vocabulary(self.policy.vocabulary)
        if self._restriction is not None:
            sampling.check_untruncated("the algorithm")
        if not requests:
            return []
        policy = self._copy or self.policy
        if isinstance(sampling, Decoding) and sampling.generation:
            return generate(policy, requests, sampling, self.rows)
        how = (self.rows, self._restriction, self._mask, self._held, self.captured, ended)
        return Decoder(policy, list(requests), sampling, *how).finish()
