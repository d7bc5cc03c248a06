"""Forward passes that score a batch: packed (causal models), encoder-decoder, and padded (any model).

Each function returns the hidden states that predict the batch's actions, at (row, column) in that order, with gradient.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.utils import ModelOutput

from lmgym.batch import Batch, States
from lmgym.models.attention.cpu import BlockGroups, BlockRows
from lmgym.models.attention.flex import FlexGroups, FlexRows
from lmgym.models.attention.packed import Layout, PackedGroups, PackedRows
from lmgym.models.attention.tree import BlockTree, FlexTree, TreeRows
from lmgym.models.parity.attention import ExactGroups, ExactRows, ExactTree
from lmgym.models.picture_features import Vision
from lmgym.models.prefix_trees import OrderedRows, PrefixTree


class ScoringModel(Protocol):
    """What scoring needs of a policy (models/language_model.py describes each member)."""

    model: Any
    device: torch.device
    compute: torch.dtype
    fast: bool
    flex: bool
    exact: bool
    encoder_decoder: bool
    own_head: type | None
    onednn: bool
    trains_native: bool
    vision: Vision | None

    @property
    def master(self) -> torch.dtype: ...

    @property
    def never(self) -> tuple[int, ...]: ...

    @property
    def head_chunk(self) -> int: ...

    @property
    def head_weights(self) -> tuple[Float[Tensor, "V H"], Float[Tensor, "V H"] | None]: ...

    def rounded_weights(self) -> AbstractContextManager[None]: ...

    def head(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R V"]: ...

    def forward_hidden(self, ids: Int[Tensor, "B L"], positions: Int[Tensor, "... B L"], layout: Layout) -> Tensor: ...

    def positions(self, index: Int[Tensor, "... N T"]) -> dict[str, Tensor]: ...

    def places(self, ids: Int[Tensor, "N T"]) -> Int[Tensor, "3 N T"] | None: ...

    def read(self, ids: Int[Tensor, "N T"]) -> dict[str, Any]: ...

    def reads_plainly(self, ids: Int[Tensor, "N T"]) -> bool: ...

    def encode(self, source: Int[Tensor, "P S"], mask: Bool[Tensor, "P S"]) -> ModelOutput: ...

    def head_inputs(self, shorten: bool = False, **inputs: Any) -> tuple[Tensor, Any]: ...


def packed(model: ScoringModel, batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]) -> States:
    """Hidden states [R H] of the tokens at (row, column) of a causal model, computed on packed tokens. Padding is not
    computed, nor are the tokens of a row after its last requested one. Rows with the same prompt (the tokens before
    their first action) compute it once; if rows share clearly more than that, all that they share is computed once."""
    rows, width = batch.actions.shape
    columns = torch.arange(width, device=model.device)
    # 1. How far each row is computed: up to its last requested token.
    end = torch.zeros(rows, dtype=torch.long, device=model.device).scatter_reduce(0, row, column + 1, "amax")
    first, prompt_of_row, start = _prompts(batch)
    # 2. What is computed if only prompts are shared: each prompt and each answer once; of rows without shared prompts,
    # or if only tokens of prompts are requested, each distinct prompt as far as it is needed.
    longest = end.new_zeros(len(first)).scatter_reduce(0, prompt_of_row, end, "amax")
    plain = len(first) == rows or not bool((end > start).any())
    in_prompt = columns < (longest[:, None] if plain else start[first, None])
    in_answer = torch.zeros_like(batch.mask) if plain else (columns >= start[:, None]) & (columns < end[:, None])
    # 3. A system prompt, solved examples, the past of a session: prompts that differ may begin alike.
    tree = _trees(model, batch, end.tolist())(range(rows), int(in_prompt.sum() + in_answer.sum()))
    if tree is not None:
        return _on_tree(model, batch, row, column, tree)
    # 4. Plain packed rows.
    if plain:
        packed_rows = _layouts(model)[0](longest.tolist(), model.device)
        hidden = _run(model, batch, packed_rows, lambda column: column[..., first, :][..., in_prompt])
        return States(hidden.index_select(0, packed_rows.offsets.to(model.device)[prompt_of_row[row]] + column), None)
    # 5. Pack the distinct prompts, then each row's own tokens behind its prompt, and run the model on them.
    layout = _layouts(model)[1](in_prompt.sum(1).tolist(), in_answer.sum(1).tolist(), prompt_of_row, model.device)

    def taken(column: Tensor) -> Tensor:
        return torch.cat([column[..., first, :][..., in_prompt], column[..., in_answer]], -1)

    hidden = _run(model, batch, layout, taken)
    # 6. Find each requested token in the packed order: in its shared prompt, or among its row's own tokens.
    prompt_offset = layout.prompts.offsets.to(model.device)[layout.prompt_of_row][row]
    answer_offset = layout.prompt_tokens + layout.answers.offsets.to(model.device)[row]
    index = torch.where(column < start[row], prompt_offset + column, answer_offset + column - start[row])
    return States(hidden.index_select(0, index), None)


def _on_tree(
    model: ScoringModel, batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"], tree: PrefixTree
) -> States:
    """What `packed` returns, computed on the tree of the batch's rows."""
    trees = _layouts(model)[2]
    assert trees is not None
    tails = list(zip(tree.rows, tree.shared, tree.lengths, strict=True))
    layout = trees(tree, model.device)

    def taken(column: Tensor) -> Tensor:
        return torch.cat([column[..., number, begin:end] for number, begin, end in tails], -1)

    hidden = _run(model, batch, layout, taken)
    place = torch.empty_like(tree.places)
    place[list(tree.rows)] = tree.places
    return States(hidden.index_select(0, place.to(model.device)[row, column]), None)


class Packing(Layout, Protocol):
    """A layout of the tokens of a batch."""

    positions: Int[Tensor, " L"]


def _run(model: ScoringModel, batch: Batch, layout: Packing, taken: Callable[[Tensor], Tensor]) -> Float[Tensor, "L H"]:
    """The last hidden states of the tokens that a function takes from a column [... N T] of the batch, [... L]."""
    ids, places = taken(batch.tokens), model.places(batch.tokens)
    positions = layout.positions[None] if places is None else taken(places)[:, None]
    return model.forward_hidden(ids[None], positions, layout)[0]


def tokens_of_pass(model: ScoringModel, batch: Batch, lengths: Int[Tensor, " N"]) -> Callable[[Sequence[int]], int]:
    """A function from row numbers to the number of tokens that one forward pass over these rows computes. `lengths` are
    the real tokens of each row. Where nothing is padded, what rows share at their beginning counts once; where rows are
    padded, each row counts as long as the longest of them."""
    if model.reads_plainly(batch.tokens) or model.encoder_decoder or _layouts(model)[0] is PackedRows:
        padded = lengths.tolist()
        return lambda rows: len(rows) * max(padded[row] for row in rows)
    _, prompt_of_row, start = _prompts(batch)
    last = (torch.arange(batch.actions.shape[1], device=start.device) * batch.actions).max(1).values
    prompt, before, after = prompt_of_row.tolist(), start.tolist(), (last - start).clamp(min=0).tolist()
    trees, actions = _trees(model, batch, last.tolist()), batch.actions.sum(1).tolist()

    def tokens(rows: Sequence[int]) -> int:
        with_prompts = sum({prompt[row]: before[row] for row in rows}.values()) + sum(after[row] for row in rows)
        tree = trees(rows, with_prompts)
        # The head reads a state for each action, also where rows are alike.
        return with_prompts if tree is None else max(tree.tokens, sum(actions[row] for row in rows))

    return tokens


def _trees(
    model: ScoringModel, batch: Batch, lengths: Sequence[int]
) -> Callable[[Sequence[int], int], PrefixTree | None]:
    """A function from row numbers, and the tokens that a pass over these rows computes if prompts alone are shared, to
    the tree of their first `lengths` tokens. It gives None where the tree has not clearly fewer."""
    if _layouts(model)[2] is None or len(lengths) < 2:
        return lambda rows, otherwise: None
    return OrderedRows(batch.tokens, lengths).worthwhile


def _prompts(batch: Batch) -> tuple[Int[Tensor, " P"], Int[Tensor, " N"], Int[Tensor, " N"]]:
    """The distinct prompts of a batch, a row's prompt being the ids before its first action: the first row with each
    prompt [P], each row's number of its prompt [N], and the column of each row's first action [N]."""
    width, device = batch.actions.shape[1], batch.actions.device
    start = torch.where(batch.actions, torch.arange(width, device=device), width).min(1).values.clamp(max=width - 1)
    seen: dict[tuple[int, ...], int] = {}
    prompts = (tuple(ids[:length]) for ids, length in zip(batch.tokens.tolist(), start.tolist(), strict=True))
    like = [seen.setdefault(prompt, row) for row, prompt in enumerate(prompts)]
    first, prompt_of_row = torch.tensor(like, device=device).unique(return_inverse=True)
    return first, prompt_of_row, start


def _layouts(model: ScoringModel) -> tuple[type[PackedRows], type[PackedGroups], type[TreeRows] | None]:
    """The layouts of packed tokens for this model and device: rows, shared prompts, trees. The CPU's fused kernel has
    no second derivatives: `Policy.twice_differentiable` disables flash attention, and with it this kernel."""
    if model.exact:
        return ExactRows, ExactGroups, ExactTree
    if model.flex:
        return FlexRows, FlexGroups, FlexTree
    if model.device.type == "cpu" and torch.backends.cuda.flash_sdp_enabled():
        return BlockRows, BlockGroups, BlockTree
    return PackedRows, PackedGroups, None  # it pads, and a tree has no rows to pad


def encoder_decoder(model: ScoringModel, batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]) -> States:
    """Decoder states [R H] at (row, column). Rows with the same source run the encoder once."""
    assert batch.source is not None and batch.source_mask is not None
    # -1 in place of padding, because the pad id may also be a real token of a source.
    sources, source_of_row = torch.unique(batch.source.masked_fill(~batch.source_mask, -1), dim=0, return_inverse=True)
    mask = sources >= 0
    encoded = model.encode(sources.clamp(min=0), mask)
    encoded["last_hidden_state"] = encoded["last_hidden_state"].index_select(0, source_of_row)
    hidden, _ = model.head_inputs(
        shorten=True,
        encoder_outputs=encoded,
        attention_mask=batch.source_mask.long(),
        decoder_input_ids=batch.tokens,
        decoder_attention_mask=batch.mask.long(),
        use_cache=False,
    )
    return States(hidden[row, column], None)


def padded(model: ScoringModel, batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]) -> States:
    """Hidden states and logits from Hugging Face's own padded pass, for any model family; the oracle of the tests."""
    inputs: dict[str, Any]
    if model.encoder_decoder:
        inputs = {"input_ids": batch.source, "attention_mask": batch.require("source_mask").long()}
        inputs |= {"decoder_input_ids": batch.tokens, "decoder_attention_mask": batch.mask.long()}
    else:
        places = model.places(batch.tokens)
        index = (batch.mask.cumsum(1) - 1).clamp(min=0) if places is None else places
        inputs = {**model.read(batch.tokens), "attention_mask": batch.mask.long(), **model.positions(index)}
    hidden, output = model.head_inputs(**inputs, use_cache=False)
    logits = output.logits[row, column]
    return States(hidden[row, column], logits if logits.dtype == torch.float64 else logits.float())


def alone(model: ScoringModel, batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
    """Logits [R V] of the model's own forward pass at (row, column), called as plainly as Hugging Face's documentation
    does: one row at a time, without padding, mask, cache or positions, pictures as their pixels. What
    inference/proof.py compares with."""
    logits = []
    for index in range(len(batch)):
        tokens = batch.tokens[index, batch.mask[index]][None]
        inputs = {"input_ids": tokens} if model.vision is None else model.vision.own_inputs(tokens)
        if model.encoder_decoder:
            source = batch.require("source")[index, batch.require("source_mask")[index]]
            inputs = {"input_ids": source[None], "decoder_input_ids": tokens}
        output = model.model(**inputs, use_cache=False)
        logits.append(output.logits[0, column[row == index]])
    together = torch.cat(logits)  # rows ascend in `row`
    return together if together.dtype == torch.float64 else together.float()
