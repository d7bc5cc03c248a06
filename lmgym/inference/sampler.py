"""Sampler: lmgym's own engine, in the training process, over the policy's own forward pass (inference/decoder.py).

Encoder-decoders, and causal models without a fast path, use Hugging Face's caches (inference/hf_cache.py) and compute
all of a conversation again each turn. Beam search in evaluations is Hugging Face's own (inference/hf_generate.py)."""

import copy
from collections.abc import Callable, Sequence

import torch

from lmgym.core.errors import LmgymError
from lmgym.core.progress import doing
from lmgym.distributed.parts import whole
from lmgym.inference.base import Completion, Decoding, Request, Sampling
from lmgym.inference.completions import check_memory, check_request
from lmgym.inference.conversation_cache import ConversationCache
from lmgym.inference.decoder import Decoder
from lmgym.inference.hf_generate import generate
from lmgym.models import copies
from lmgym.models.families import trunk_of
from lmgym.models.kernels import onednn_linear
from lmgym.models.kernels.fused_layers import FusedLayers
from lmgym.models.policy import Policy
from lmgym.types import Restriction


class Sampler:
    """Decodes up to `rows` answers at once.

    Greedy answers equal those of Hugging Face's `generate`; log-probabilities equal those of `Policy.compute_logprobs`
    (to 1e-4 in fp32). If a policy of the fast path computes in bf16, answers are sampled from a bf16 copy of the
    weights, which `load` updates, and on a CPU they are laid out for oneDNN; other families do not all run with such
    weights, and are sampled as they are scored, and so is an exact policy (models/parity/).
    With `captured`, decoding steps have fixed shapes and become CUDA graphs (kernels/cuda_graphs.py); this needs a
    causal model on the fast path, else LmgymError.

    Example:
        >>> Sampler(policy).generate([Request((5, 6), key=1)], Sampling(max_new_tokens=8))[0].ids
    """

    def __init__(self, policy: Policy, rows: int = 256, captured: bool = False) -> None:
        self.policy, self.rows, self.captured, self.version = policy, rows, captured, 0
        if captured and (policy.encoder_decoder or not policy.fast):
            raise LmgymError(
                f"engine.captured: decoding steps of {policy.model.config.model_type} run through Hugging Face's "
                "caches, whose shapes are not fixed; remove it"
            )
        if captured and policy.vision is not None:
            raise LmgymError("engine.captured: decoding steps of models that read pictures are not captured; remove it")
        self._copy: Policy | None = None
        self._fused: FusedLayers | None = None
        self._lays_out = False
        self._restriction: Restriction | None = None
        self._mask: Policy | None = None
        self._mixture: float | None = None
        self._conversations = ConversationCache()
        self.load(policy, 0)

    @property
    def context(self) -> int | None:
        return self.policy.context

    def load(self, policy: Policy, version: int) -> None:
        """Use the policy's weights from now on. They are copied if a fast path computes in bf16, or if each rank holds
        only a part of them; else shared."""
        self.policy, self.version = policy, version
        self._conversations.clear()
        shared = policy.skeleton is None
        if shared and (policy.compute == policy.master or not policy.fast or policy.exact):
            return
        if self._copy is None:
            self._copy = copies.sampling(policy)
            if policy.native:
                model = self._copy.model
                self._fused = FusedLayers(trunk_of(model).layers, model.get_output_embeddings(), policy.rules)
        with torch.no_grad():
            for ours, theirs in zip(self._copy.model.parameters(), policy.model.parameters(), strict=True):
                newest = policy.computed(theirs) if shared else whole(theirs)
                if ours.data_ptr() != newest.data_ptr():  # the rounded weights are one copy, for passes and sampler
                    ours.copy_(newest)
        self.release()
        self._lays_out = policy.prepacked and policy.device.type == "cpu" and onednn_linear.available()

    def release(self) -> None:
        if self._copy is not None:
            onednn_linear.release(self._copy.model)
        if self._fused is not None:
            self._fused.release()

    def restricted(self, restriction: Restriction, mask: Policy | None = None) -> "Sampler":
        """A copy of this engine that samples only tokens that are likely under `mask` (None: the policy itself). It
        shares the cache of conversations. Make a new copy after each `load`."""
        other = copy.copy(self)
        other._restriction, other._mask = restriction, mask
        return other

    def mixed(self, other: Policy, share: float) -> "Sampler":
        """A copy of this engine that samples from a geometric mixture, token by token: in proportion to policy^(1 -
        share) other^share (before the temperature). Make a new copy after each `load`."""
        mixed = self.beside()
        mixed._mask, mixed._mixture = other, share
        return mixed

    def beside(self) -> "Sampler":
        """A copy of this engine with a cache of conversations of its own. Make a new copy after each `load`."""
        other = copy.copy(self)
        other._conversations = ConversationCache()
        return other

    def forget(self, conversations: Sequence[int]) -> None:
        """Free the cache of conversations that are over."""
        self._conversations.forget(conversations)

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, ended: Callable[[int, list[int]], None] | None = None
    ) -> list[Completion]:
        """One completion per request, in order. `ended` is called with index and ids of an answer when it ends. Raises
        LmgymError for a prompt that leaves no room for an answer, and for sampling settings that do not fit the
        vocabulary or the restriction."""
        for request in requests:
            check_request(self.policy, request)
        check_memory(self.policy, sampling)
        sampling.check_vocabulary(self.policy.vocabulary)
        if self._restriction is not None:
            sampling.check_untruncated("the algorithm")
        if not requests:
            return []
        policy = self._copy or self.policy
        if self._copy is not None and self._fused is not None:
            self._fused.lay_out()
        elif self._copy is not None and self._lays_out:
            onednn_linear.lay_out(self._copy.model)
        with policy.precision():
            if isinstance(sampling, Decoding) and sampling.generation:
                with doing("sampling answers"):
                    return generate(policy, requests, sampling, self.rows)
            settings = (self.rows, self._restriction, self._mask, self._conversations, self.captured, ended)
            with doing("sampling answers"):
                return Decoder(policy, list(requests), sampling, *settings, self._mixture).finish()

    def close(self) -> None:
        """Nothing to end: it lives in the training process."""
