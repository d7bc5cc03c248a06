"""Policy: a Hugging Face causal LM that can say how likely it finds the actions of a batch."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from lmgym import attention
from lmgym.batch import Batch, Scored
from lmgym.errors import LmgymError

AttentionInterface.register(attention.NAME, attention.attend)

# Families whose attention goes through the registered function with nothing else in it (checked by the parity tests).
# Any other model, or one of these with a sliding window, takes the plain padded path.
FAST_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neox")


class Policy:
    """A causal LM with its tokenizer, on its device, in its precision.

    The parameters are the fp32 masters that the optimizer moves; `compute` is the precision of the forward pass.
    Dropout is off. `tokens_per_forward` bounds the padded size of one forward pass, and so its memory; no result
    depends on it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        compute: torch.dtype = torch.float32,
        tokens_per_forward: int = 16384,
        fast: bool | None = None,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.compute = compute
        self.tokens_per_forward = tokens_per_forward
        self.fast = supports_fast_path(model.config) if fast is None else fast
        self.device = next(model.parameters()).device
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self.pad_id = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)

    @property
    def context(self) -> int | None:
        """Most tokens that the model can read, or None if it does not say."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a sequence: the tokenizer's EOS and those of the model's generation config."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        ids = configured if isinstance(configured, list) else [configured]
        return tuple(sorted({int(i) for i in [*ids, self.tokenizer.eos_token_id] if i is not None}))

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that train."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def score(self, batch: Batch, entropy: bool = False) -> Scored:
        """What this policy says of the batch's actions, under the distribution that they were sampled from.

        Gradients flow unless the caller switched them off. The fast path runs the trunk on real tokens only, and the LM
        head on the hidden states that predict an action only, in chunks, so that [N T V] never exists.
        """
        batch = batch.to(self.device)
        row, column = batch.actions.nonzero(as_tuple=True)
        if bool((column == 0).any()):
            raise LmgymError(
                "a causal policy cannot score an action that has no token before it; give each prompt at least one"
            )
        with self.precision():
            hidden = self._hidden(batch, row, column) if self.fast else None
            logits = None if self.fast else self._plain_logits(batch)[row, column - 1]
            targets = batch.tokens[row, column]
            excluded = None if batch.stop_excluded is None else batch.stop_excluded[row, column]
            pieces = []
            for part in torch.arange(len(targets), device=self.device).split(self.head_chunk):
                arguments = (targets[part], None if excluded is None else excluded[part], batch, entropy)
                if hidden is None:
                    assert logits is not None
                    pieces.append(_describe(logits[part], *arguments))
                elif torch.is_grad_enabled() and len(targets) > self.head_chunk:
                    pieces.append(checkpoint(self._describe_hidden, hidden[part], *arguments, use_reentrant=False))
                else:
                    pieces.append(self._describe_hidden(hidden[part], *arguments))
        logprobs = torch.cat([piece[0] for piece in pieces])
        empty = torch.zeros(batch.tokens.shape, dtype=logprobs.dtype, device=self.device)
        return Scored(
            logprobs=empty.index_put((row, column), logprobs),
            entropy=empty.index_put((row, column), torch.cat([piece[1] for piece in pieces])) if entropy else None,
        )

    def micro_batches(self, batch: Batch) -> list[Int[Tensor, " R"]]:
        """Rows that fit one forward pass each; groups stay together, longest first, so that rows of like length and
        rows that share a prompt are computed side by side."""
        lengths, group = batch.mask.sum(1).cpu(), batch.group.cpu()
        longest = {int(g): int(lengths[group == g].max()) for g in torch.unique(group)}
        order = sorted(range(len(batch)), key=lambda row: (-longest[int(group[row])], int(group[row]), row))
        batches: list[list[int]] = []
        width = 0
        for row in order:
            if not batches or (len(batches[-1]) + 1) * max(width, int(lengths[row])) > self.tokens_per_forward:
                batches.append([])
                width = 0
            batches[-1].append(row)
            width = max(width, int(lengths[row]))
        return [torch.tensor(rows) for rows in batches]

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Float[Tensor, "N T"]:
        """Log-probabilities of a whole batch without gradients, micro-batch by micro-batch."""
        result = torch.zeros(batch.tokens.shape)
        for rows in self.micro_batches(batch):
            scored = self.score(batch[rows]).logprobs.float().cpu()
            result[rows, : scored.shape[1]] = scored
        return result

    def forward_hidden(
        self, ids: Int[Tensor, "B L"], positions: Int[Tensor, "B L"], layout: attention.Layout
    ) -> Tensor:
        """Last hidden states [B L H] of the trunk over one of lmgym's own attention layouts."""
        with _packed_attention(self.model):
            trunk = self.model.base_model
            return trunk(input_ids=ids, position_ids=positions, use_cache=False, lmgym_layout=layout).last_hidden_state

    def head(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R V"]:
        """The LM head's logits in at least fp32."""
        logits = self.model.get_output_embeddings()(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    @property
    def head_chunk(self) -> int:
        """Hidden states per LM-head call: about 2^24 logits, whatever the vocabulary."""
        return min(max(2**24 // self.vocabulary, 64), 8192)

    def precision(self) -> Any:
        """The autocast context of the forward pass (none where compute is the masters' own precision)."""
        if self.compute == next(self.model.parameters()).dtype:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute)

    def save_pretrained(self, folder: Path) -> None:
        """A folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` read."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _hidden(self, batch: Batch, row: Tensor, column: Tensor) -> Float[Tensor, "R H"]:
        """The hidden states that predict the actions at (row, column), from packed tokens.

        What stands behind the last action predicts nothing and is not run. Rows with the same tokens before their first
        action run them once.
        """
        rows, width = batch.actions.shape
        columns = torch.arange(width, device=self.device)
        end = (batch.actions * columns).max(1).values  # the last action's column
        start = torch.where(batch.actions, columns, width).min(1).values.clamp(max=width - 1)  # the first action's
        prompts: dict[tuple[int, ...], int] = {}
        owner = [
            prompts.setdefault(tuple(ids[:length]), len(prompts))
            for ids, length in zip(batch.tokens.tolist(), start.tolist(), strict=True)
        ]
        if len(prompts) == rows or not bool((end > start).any()):
            return self._hidden_rows(batch, row, column, end)
        prompt_ids = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        own = (columns >= start[:, None]) & (columns < end[:, None])
        layout = attention.PackedGroups(list(map(len, prompts)), own.sum(1).tolist(), torch.tensor(owner), self.device)
        ids = torch.cat([prompt_ids, batch.tokens[own]])
        hidden = self.forward_hidden(ids[None], layout.positions[None], layout)[0]
        before, offset = column - 1, layout.prompts.offsets.to(self.device)[layout.prompt_of_row][row]
        own_offset = layout.prompt_tokens + layout.own.offsets.to(self.device)[row]
        return hidden.index_select(
            0, torch.where(before < start[row], offset + before, own_offset + before - start[row])
        )

    def _hidden_rows(self, batch: Batch, row: Tensor, column: Tensor, end: Tensor) -> Float[Tensor, "R H"]:
        used = torch.arange(batch.mask.shape[1], device=self.device) < end[:, None]
        layout = attention.PackedRows(used.sum(1).tolist(), self.device)
        hidden = self.forward_hidden(batch.tokens[used][None], layout.positions[None], layout)[0]
        return hidden.index_select(0, layout.offsets.to(self.device)[row] + column - 1)

    def _plain_logits(self, batch: Batch) -> Float[Tensor, "N T V"]:
        positions = (batch.mask.cumsum(1) - 1).clamp(min=0)
        output = self.model(
            input_ids=batch.tokens, attention_mask=batch.mask.long(), position_ids=positions, use_cache=False
        )
        return output.logits if output.logits.dtype == torch.float64 else output.logits.float()

    def _describe_hidden(self, hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        return _describe(self.head(hidden), *arguments)


def _describe(
    logits: Float[Tensor, "R V"],
    targets: Int[Tensor, " R"],
    excluded: Bool[Tensor, " R"] | None,
    batch: Batch,
    entropy: bool,
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Log-probability of each target, and the entropy of each distribution (empty unless asked for)."""
    if batch.temperature not in (0.0, 1.0):  # 0: greedy answers are described at temperature 1
        logits = logits / batch.temperature
    if excluded is not None and batch.stop_ids:
        stop = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        stop[list(batch.stop_ids)] = True
        logits = logits.masked_fill(excluded[:, None] & stop, float("-inf"))
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(1, targets[:, None])[:, 0] - normaliser
    if not entropy:
        return logprobs, logprobs[:0]
    probabilities = (logits - normaliser[:, None]).exp()
    # Excluded tokens stand at -inf; 0 * -inf would be NaN, here or in the gradient.
    expected = (probabilities * logits.masked_fill(probabilities == 0, 0.0)).sum(-1)
    return logprobs, normaliser - expected


@contextmanager
def _packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Route attention to `attention.attend`; afterwards the model is as it was, and its own `generate` works."""
    usual = model.config._attn_implementation
    model.config._attn_implementation = attention.NAME
    try:
        yield
    finally:
        model.config._attn_implementation = usual


def supports_fast_path(config: Any) -> bool:
    """True if the packed path computes exactly what this model's own attention would."""
    if config.model_type not in FAST_FAMILIES:
        return False
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return window is None and not getattr(config, "attn_logit_softcapping", None)
