"""Decoding steps of fixed shapes, which a CUDA graph replays: one launch where Python would make some hundred.

A step depends on nothing but tensors that stay where they are: the cache, the tokens sampled last, the lengths of the
slots. How far attention looks is rounded up, so that few shapes occur. Without CUDA the same steps run as they are.
"""

import warnings
from collections import Counter

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmgym.models.attention.kv_cache import CachedRows, KeyValueCache
from lmgym.models.policy import Policy

WIDTH = 256  # attention looks at multiples of so many tokens
BEFORE = 3  # steps of a shape before it is captured: they also set up what libraries do once


class CapturedSteps:
    """Steps over the first slots of a cache, with keys and values of what stands before each already in it. Where the
    cache changes its tensors (`keep`, `grow`), others have to be made.

    Example: CapturedSteps(policy, cache, 64).logits(last, lengths)
    """

    def __init__(self, policy: Policy, cache: KeyValueCache, slots: int) -> None:
        self.policy, self.cache = policy, cache
        self.last, self.lengths = (torch.zeros(slots, dtype=torch.long, device=policy.device) for _ in range(2))
        self.captures = policy.device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if self.captures else None
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by width: the step, and where its logits are
        self.taken: Counter[int] = Counter()

    def logits(self, last: Int[Tensor, " S"], lengths: Int[Tensor, " S"]) -> Float[Tensor, "S V"]:
        """Read each slot's last token, and return the logits of its next; the next step overwrites them."""
        width = min(-(-(int(lengths.max()) + 1) // WIDTH) * WIDTH, self.cache.capacity)
        self.last.copy_(last)
        self.lengths.copy_(lengths)
        if self.captures and self.taken[width] == BEFORE:
            self._capture(width)
        self.taken[width] += 1
        if width not in self.graphs:
            return self._step(width)
        graph, logits = self.graphs[width]
        graph.replay()
        return logits

    def _step(self, width: int) -> Float[Tensor, "S V"]:
        layout = CachedRows(self.cache, self.lengths, width)
        hidden = self.policy.forward_hidden(self.last[:, None], layout.positions[:, None], layout)
        return self.policy.head(hidden[:, 0])

    def _capture(self, width: int) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                logits = self._step(width)
        except RuntimeError as error:  # a model that looks at its numbers while it computes
            name = self.policy.model.config.model_type
            reason = str(error).partition("\n")[0]
            warnings.warn(f"decoding steps of {name} cannot be captured and run one by one: {reason}", stacklevel=2)
            self.captures = False
        else:
            self.graphs[width] = graph, logits
