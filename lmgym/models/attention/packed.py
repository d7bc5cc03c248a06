"""Attention over rows without padding. Pure torch, no model code.

Hugging Face models call a registered attention function with queries, keys and values (positions already applied).
Ours, `attend`, passes them to a layout, which knows where each row lies among the packed tokens:

    scoring    PackedRows and PackedGroups; faster versions in cpu.py (CPU) and flex.py (flex attention, for GPUs)
    sampling   in cached_rows.py: PrefilledRows (new prompts), ExtendedRows (next turns), CachedRows (one token each)

All else in a model works token by token (embeddings, norms, MLPs, projections: most of the work), so with packed rows
it is computed for real tokens only."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lmgym.models.attention import rules
from lmgym.models.attention.rules import Asked

NAME = "lmgym"  # of `attend` in transformers' registry (models/hooks.py)


class Layout(Protocol):
    """How the tokens of one forward pass attend to each other."""

    @property
    def reach(self) -> int:
        """The tokens of the longest row, those before this pass included (an upper bound is enough)."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        """query [B H L D], key and value [B K L D] (K key-value heads) -> [B L H D]."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer. The layout comes as `lmgym_layout`, which transformers
    passes on from the arguments of the model's forward; so do the rules of its layers, if any has one."""
    layout: Layout = kwargs["lmgym_layout"]
    layer, of_layer = module.layer_idx, kwargs.get("lmgym_rules")
    asked = Asked(scaling)
    if of_layer and not of_layer[layer].is_plain(layout.reach):
        asked = Asked(scaling, of_layer[layer], kwargs["s_aux"] if of_layer[layer].sinks else None)
    return layout.attend(layer, query, key, value, asked), None


class PackedRows:
    """N rows of different lengths, joined end to end to one row of L tokens; each row attends causally to itself.

    For the attention kernel alone, rows are padded on the right to the longest of them. With causal attention this
    needs no mask: the padding comes after every real query.

    Example: rows of 3 and 2 tokens: PackedRows([3, 2], torch.device("cpu")).positions -> tensor([0, 1, 2, 0, 1])"""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.rows, self.longest, total = list(lengths), len(lengths), max(lengths), sum(lengths)
        counts = torch.tensor(lengths)
        self.offsets = torch.cumsum(counts, 0) - counts  # packed index of each row's first token, [N]
        row = torch.repeat_interleave(torch.arange(self.rows), counts)
        self.positions = (torch.arange(total) - self.offsets[row]).to(device)  # [L]
        self.dense = total == self.rows * self.longest  # no padding needed
        self.padded_index = (row.to(device) * self.longest) + self.positions  # [L] into the flat padded rows

    @property
    def row(self) -> Int[Tensor, " L"]:
        """The row of each packed token."""
        return self.padded_index // self.longest

    @property
    def ends(self) -> Int[Tensor, " N"]:
        """Where each row's last token is."""
        return self.offsets + torch.tensor(self.lengths) - 1

    @property
    def reach(self) -> int:
        return self.longest

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        return self.attend_padded(query, self.pad(key), self.pad(value), asked)

    def attend_padded(self, query: Tensor, keys: Tensor, values: Tensor, asked: Asked) -> Tensor:
        """Attention of packed queries to keys and values that are padded already."""
        keys, values = per_query_head(query, keys, values)
        if asked.rule is None:
            out = F.scaled_dot_product_attention(self.pad(query), keys, values, is_causal=True, scale=asked.scale)
        else:
            places = torch.arange(self.longest, device=query.device)
            seen = asked.rule.sees(places[:, None], places)[None, None]
            out = rules.attention(self.pad(query), keys, values, seen, asked)
        return self.unpad(out)

    def pad(self, packed: Float[Tensor, "1 H L D"]) -> Float[Tensor, "N H longest D"]:
        """Packed tokens to right-padded rows."""
        tokens = packed[0].transpose(0, 1)
        if not self.dense:
            padded = tokens.new_zeros(self.rows * self.longest, *tokens.shape[1:])
            tokens = padded.index_copy(0, self.padded_index, tokens)
        return tokens.reshape(self.rows, self.longest, *tokens.shape[1:]).transpose(1, 2)

    def unpad(self, padded: Float[Tensor, "N H longest D"]) -> Float[Tensor, "1 L H D"]:
        """The real tokens of padded rows, packed again."""
        flat = padded.transpose(1, 2).reshape(self.rows * self.longest, padded.shape[1], padded.shape[3])
        return (flat if self.dense else flat.index_select(0, self.padded_index))[None]


class PackedGroups:
    """Rows that share prompts: each distinct prompt once, then the answer tokens of each row, packed as one row.

    The order is prompt 0, prompt 1, ..., then the answer of row 0, of row 1, ... (an answer is all that follows a row's
    prompt). A prompt attends to itself; an answer attends to its prompt, whose keys and values are copied for it, and
    to itself. No layer computes a prompt twice, and the gradients of all its answers are summed in it.

    Example: a prompt of 4 tokens with answers of 2 and 3 tokens
        >>> PackedGroups([4], [2, 3], torch.tensor([0, 0]), torch.device("cpu")).positions
        tensor([0, 1, 2, 3, 4, 5, 4, 5, 6])
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        answer_lengths: Sequence[int],
        prompt_of_row: Int[Tensor, " N"],
        device: torch.device,
    ) -> None:
        self.prompts, self.prompt_tokens = PackedRows(prompt_lengths, device), sum(prompt_lengths)
        self.answers = PackedRows(answer_lengths, device)
        self.prompt_of_row = prompt_of_row.to(device)
        self.before = torch.tensor(prompt_lengths, device=device)[self.prompt_of_row]  # prompt tokens of each row [N]
        answer_positions = self.before[self.answers.row] + self.answers.positions
        self.positions = torch.cat([self.prompts.positions, answer_positions])

    @cached_property
    def mask(self) -> Bool[Tensor, "N 1 T P+T"]:
        """True where an answer token may see a token of its prompt (first P columns) or of its row (last T)."""
        longest, device = self.answers.longest, self.before.device
        prompt = torch.arange(self.prompts.longest, device=device) < self.before[:, None]  # [N P]
        causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        both = [prompt[:, None].expand(-1, longest, -1), causal.expand(len(self.before), -1, -1)]
        return torch.cat(both, 2)[:, None]

    @property
    def reach(self) -> int:
        return self.prompts.longest + self.answers.longest

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        cut, seen = self.prompt_tokens, self.mask
        prompt_out = self.prompts.attend(layer, query[:, :, :cut], key[:, :, :cut], value[:, :, :cut], asked)
        if asked.rule is not None:
            # The columns of `mask` are the prompt's places, then the answer's, which begin where the row's prompt ends.
            places = torch.arange(self.reach, device=query.device)
            answers = self.before[:, None] + places[: self.answers.longest]
            columns = torch.cat([places[: self.prompts.longest].expand(len(answers), -1), answers], 1)
            seen = seen & asked.rule.sees(answers[:, :, None], columns[:, None])[:, None]
        keys, values = per_query_head(query, self._per_answer(key), self._per_answer(value))
        answer_out = rules.attention(self.answers.pad(query[:, :, cut:]), keys, values, seen, asked)
        return torch.cat([prompt_out, self.answers.unpad(answer_out)], 1)

    def _per_answer(self, packed: Float[Tensor, "1 K L D"]) -> Float[Tensor, "N K P+T D"]:
        """Padded rows with the prompt's tokens in front of each answer's."""
        prompts = self.prompts.pad(packed[:, :, : self.prompt_tokens]).index_select(0, self.prompt_of_row)
        return torch.cat([prompts, self.answers.pad(packed[:, :, self.prompt_tokens :])], 2)


def per_query_head(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key-value heads until there is one for each query head (grouped-query attention, arXiv 2305.13245)."""
    heads = query.shape[1] // keys.shape[1]
    return (keys, values) if heads == 1 else (keys.repeat_interleave(heads, 1), values.repeat_interleave(heads, 1))
