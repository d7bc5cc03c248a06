"""What a layer asks of attention beyond "all tokens before this one": a window, capped scores, sinks. Pure torch.

A layer without any of it goes through the kernels of packed.py, cpu.py and cached_rows.py, and so does one whose window
is at least as long as the rows. All others come here: with the mask of their rows, and with explicit scores if these
are capped or have a sink."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """What one layer asks; a function of the model's configuration.

    Example: Rule(window=128, sinks=True) of every second layer of gpt-oss; Rule(softcap=50.0) of Gemma 2"""

    window: int | None = None
    """A token sees itself and the window - 1 tokens before it; if `chunked`, those of its own piece of so many."""
    chunked: bool = False
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118)."""
    sinks: bool = False
    """Each head has a number that takes part in the softmax like one more score, with a value of zero (gpt-oss)."""

    @property
    def is_windowed(self) -> bool:
        """True if it asks for a window at most."""
        return not self.chunked and self.softcap is None and not self.sinks

    def is_plain(self, longest: int) -> bool:
        """True if attention over rows of up to `longest` tokens is plain causal attention."""
        return (self.window is None or longest <= self.window) and self.softcap is None and not self.sinks

    def sees(self, query: Int[Tensor, "*Q"], key: Int[Tensor, "*K"]) -> Bool[Tensor, "*QK"]:
        """True where the token at position `query` sees the one at `key` of its row.

        Example:
            >>> Rule(window=2).sees(torch.tensor(5), torch.arange(7))
            tensor([False, False, False, False,  True,  True, False])
        """
        seen = key <= query
        if self.window is not None:
            near = query // self.window == key // self.window if self.chunked else query - key < self.window
            seen = seen & near
        return seen


class Asked(NamedTuple):
    """What a layer asks of attention: what scores are multiplied by (None: D^-0.5), and where it is not plain causal
    attention, its rule and its sinks [H] (parameters of the model). Example: Asked(None, Rule(window=128))"""

    scale: float | None
    rule: Rule | None = None
    sinks: Float[Tensor, " H"] | None = None

    def scale_of(self, size: int) -> float:
        """The scale for heads of this size."""
        return size**-0.5 if self.scale is None else self.scale


def shares(scores: Float[Tensor, "N H T W"], seen: Bool[Tensor, "*N T W"], asked: Asked) -> Float[Tensor, "N H T W"]:
    """What each token takes of each key: the softmax of scores that are capped first, and then masked. With sinks the
    shares of a row add up to less than one. Every token must see at least one key."""
    if asked.rule is not None and asked.rule.softcap is not None:
        scores = asked.rule.softcap * torch.tanh(scores / asked.rule.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if asked.sinks is None:
        return scores.softmax(-1)
    sinks = asked.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def attention(
    query: Float[Tensor, "N H T D"],
    keys: Float[Tensor, "N H W D"],
    values: Float[Tensor, "N H W E"],
    seen: Bool[Tensor, "*N T W"],
    asked: Asked,
) -> Float[Tensor, "N H T E"]:
    """Attention with a mask, one key head for each query head. `seen` (one for all rows, or one for each; of all heads)
    must hold the rule's window already."""
    if asked.sinks is None and (asked.rule is None or asked.rule.softcap is None):
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=asked.scale)
    scores = (query @ keys.transpose(-1, -2)) * asked.scale_of(query.shape[-1])
    return shares(scores, seen, asked).to(values.dtype) @ values
