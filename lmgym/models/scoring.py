"""The ways to the hidden states that predict a batch's actions: packed rows, an encoder-decoder, and the plain one.

Each returns the states at (row, column), in that order, with gradient.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from lmgym.batch import Batch, States
from lmgym.models.attention.cpu import BlockGroups, BlockRows
from lmgym.models.attention.flex import FlexGroups, FlexRows
from lmgym.models.attention.packed import PackedGroups, PackedRows

if TYPE_CHECKING:
    from lmgym.models.policy import Policy


def packed(policy: "Policy", batch: Batch, row: Tensor, column: Tensor) -> States:
    """Hidden states of the tokens at (row, column) of a causal trunk, from packed tokens.

    What stands behind the last of them in a row is not run. Rows with the same tokens before their first action run
    them once.
    """
    rows, width = batch.actions.shape
    columns = torch.arange(width, device=policy.device)
    end = torch.zeros(rows, dtype=torch.long, device=policy.device).scatter_reduce(0, row, column + 1, "amax")
    first, owner, start = _prompts(batch)
    if len(first) == rows or not bool((end > start).any()):  # nothing stands behind a prompt that rows share
        longest = end.new_zeros(len(first)).scatter_reduce(0, owner, end, "amax")
        return States(_packed_rows(policy, batch.tokens[first], longest, owner[row], column), None)
    prompts = columns < start[first, None]
    own = (columns >= start[:, None]) & (columns < end[:, None])
    _, groups = _layouts(policy)
    layout = groups(prompts.sum(1).tolist(), own.sum(1).tolist(), owner, policy.device)
    ids = torch.cat([batch.tokens[first][prompts], batch.tokens[own]])
    hidden = policy.forward_hidden(ids[None], layout.positions[None], layout)[0]
    offset = layout.prompts.offsets.to(policy.device)[layout.prompt_of_row][row]
    own_offset = layout.prompt_tokens + layout.own.offsets.to(policy.device)[row]
    places = torch.where(column < start[row], offset + column, own_offset + column - start[row])
    return States(hidden.index_select(0, places), None)


def tokens_of_pass(policy: "Policy", batch: Batch, lengths: Int[Tensor, " N"]) -> Callable[[Sequence[int]], int]:
    """How many tokens one forward pass over some of the rows holds, given their real ones: those that are run where
    nothing is padded, each prompt once, and rows by the longest of them elsewhere."""
    if not policy.fast or policy.encoder_decoder or _layouts(policy)[0] is PackedRows:
        padded = lengths.tolist()
        return lambda rows: len(rows) * max(padded[row] for row in rows)
    _, owner, start = _prompts(batch)
    last = (torch.arange(batch.actions.shape[1], device=start.device) * batch.actions).max(1).values
    prompt_of, before, own = owner.tolist(), start.tolist(), (last - start).clamp(min=0).tolist()
    return lambda rows: sum({prompt_of[row]: before[row] for row in rows}.values()) + sum(own[row] for row in rows)


def _prompts(batch: Batch) -> tuple[Int[Tensor, " P"], Int[Tensor, " N"], Int[Tensor, " N"]]:
    """The first row of each of the different prompts, which are the ids before a row's first action; which of them is
    each row's; and the column of its first action."""
    width, device = batch.actions.shape[1], batch.actions.device
    start = torch.where(batch.actions, torch.arange(width, device=device), width).min(1).values.clamp(max=width - 1)
    seen: dict[tuple[int, ...], int] = {}
    prompts = (tuple(ids[:length]) for ids, length in zip(batch.tokens.tolist(), start.tolist(), strict=True))
    like = [seen.setdefault(prompt, row) for row, prompt in enumerate(prompts)]
    first, owner = torch.tensor(like, device=device).unique(return_inverse=True)
    return first, owner, start


def _packed_rows(
    policy: "Policy", tokens: Int[Tensor, "N T"], lengths: Int[Tensor, " N"], row: Tensor, column: Tensor
) -> Float[Tensor, "R H"]:
    used = torch.arange(tokens.shape[1], device=policy.device) < lengths[:, None]
    rows, _ = _layouts(policy)
    layout = rows(lengths.tolist(), policy.device)
    hidden = policy.forward_hidden(tokens[used][None], layout.positions[None], layout)[0]
    return hidden.index_select(0, layout.offsets.to(policy.device)[row] + column)


def _layouts(policy: "Policy") -> tuple[type[PackedRows], type[PackedGroups]]:
    """What lays out packed tokens here: the CPU's fused kernel has no second derivatives, and who wants them says that
    it must not be used (`Policy.twice_differentiable`)."""
    if policy.flex:
        return FlexRows, FlexGroups
    if policy.device.type == "cpu" and torch.backends.cuda.flash_sdp_enabled():
        return BlockRows, BlockGroups
    return PackedRows, PackedGroups


def encoder_decoder(policy: "Policy", batch: Batch, row: Tensor, column: Tensor) -> States:
    """Decoder states at (row, column); rows that read the same source run the encoder once."""
    assert batch.source is not None and batch.source_mask is not None
    sources, owner = torch.unique(
        batch.source.masked_fill(~batch.source_mask, -1), dim=0, return_inverse=True
    )  # ids without padding, so that the pad token may also be a real one
    mask = sources >= 0
    encoded = policy.encode(sources.clamp(min=0), mask).index_select(0, owner)
    hidden, _ = policy.head_inputs(
        shorten=True,
        encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
        attention_mask=batch.source_mask.long(),
        decoder_input_ids=batch.tokens,
        decoder_attention_mask=batch.mask.long(),
        use_cache=False,
    )
    return States(hidden[row, column], None)


def plain(policy: "Policy", batch: Batch, row: Tensor, column: Tensor) -> States:
    """The same through Hugging Face's own padded forward, with its logits: the oracle, and any family's way."""
    inputs: dict[str, Any] = {"attention_mask": batch.mask.long()}
    if policy.encoder_decoder:
        inputs = {f"decoder_{key}": value for key, value in inputs.items()} | {
            "input_ids": batch.source,
            "attention_mask": batch.source_mask.long(),  # type: ignore[union-attr]
            "decoder_input_ids": batch.tokens,
        }
    else:
        inputs |= {"input_ids": batch.tokens, "position_ids": (batch.mask.cumsum(1) - 1).clamp(min=0)}
    hidden, output = policy.head_inputs(**inputs, use_cache=False)
    logits = output.logits[row, column]
    return States(hidden[row, column], logits if logits.dtype == torch.float64 else logits.float())
