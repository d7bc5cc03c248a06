"""Decoding steps of fixed shapes as CUDA graphs: one launch replays a step that Python would launch as hundreds.

A step reads only tensors that keep their addresses: the cache, the last tokens, the lengths of the slots. Attention
reads a rounded number of cached tokens, so that there are few shapes. Without CUDA the same steps run without graphs.
"""

from collections import Counter

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmgym.core.errors import warn
from lmgym.models.attention.kv_cache import CachedRows, KeyValueCache
from lmgym.models.policy import Policy

WIDTH = 256  # attention reads a multiple of this many tokens
WARM_UP = 3  # steps of a shape before it is captured: libraries initialise themselves in them


class CapturedSteps:
    """Decoding steps over the first `slots` slots of a cache. They are valid as long as the cache keeps its tensors;
    after its `keep` or `grow`, make a new object."""

    def __init__(self, policy: Policy, cache: KeyValueCache, slots: int) -> None:
        self.policy, self.cache = policy, cache
        self.last, self.lengths = (torch.zeros(slots, dtype=torch.long, device=policy.device) for _ in range(2))
        self.captures = policy.device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if self.captures else None
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by width: the step and its logits
        self.steps: Counter[int] = Counter()  # by width

    def logits(self, last: Int[Tensor, " S"], lengths: Int[Tensor, " S"]) -> Float[Tensor, "S V"]:
        """The logits [S V] of each slot's next token, given its last one. The next call overwrites them."""
        width = min(-(-(int(lengths.max()) + 1) // WIDTH) * WIDTH, self.cache.capacity)
        self.last.copy_(last)
        self.lengths.copy_(lengths)
        if self.captures and self.steps[width] == WARM_UP:
            self._capture(width)
        self.steps[width] += 1
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
        except RuntimeError as error:  # a model whose computation depends on values of tensors
            name = self.policy.model.config.model_type
            reason = str(error).partition("\n")[0]
            warn(f"decoding steps of {name} cannot be captured and run one by one: {reason}", stacklevel=2)
            self.captures = False
        else:
            self.graphs[width] = graph, logits
