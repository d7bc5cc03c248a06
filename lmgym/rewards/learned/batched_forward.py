"""Forward passes of a scoring model over many rows: sorted by length, padded on the right, each distinct row once,
without gradient.

A row's result does not depend on the other rows of its batch, except for rounding (about 1e-7, relative, in float32).
"""

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from lmgym.core.errors import LmgymError
from lmgym.rewards.learned.rows import Row
from lmgym.rewards.learned.scorers import Scorer

T = TypeVar("T")
LOGITS = 2**28  # numbers that the logits of a pass may have (1 GiB in fp32), unless a row alone has more


def logits(scorer: Scorer, rows: Sequence[Row]) -> list[list[float]]:
    """A classifier's outputs for each row [labels], before any softmax."""
    return _each(scorer, rows, lambda batch, output: output.logits.float().tolist())


def token_logits(scorer: Scorer, rows: Sequence[Row]) -> list[Any]:
    """A token classifier's outputs for each token of each row, [tokens, labels], fp32, on the CPU, before any
    softmax."""

    return _each(scorer, rows, lambda batch, output: _of_tokens(batch, output.logits))


def embeddings(scorer: Scorer, rows: Sequence[Row], layer: int | None) -> list[Any]:
    """Hidden states of each row's tokens, [tokens, width], fp32, on the CPU: of the last layer, or of layer `layer`
    (0: the embeddings)."""

    def read(batch: list[Row], output: Any) -> list[Any]:
        return _of_tokens(batch, output.last_hidden_state if layer is None else output.hidden_states[layer])

    return _each(scorer, rows, read, output_hidden_states=layer is not None)


def _of_tokens(batch: list[Row], padded: Any) -> list[Any]:
    """What was computed for each row's tokens, without padding."""
    return [values[: len(row.ids)].float().cpu() for row, values in zip(batch, padded, strict=True)]


def next_logprobs(scorer: Scorer, rows: Sequence[Row], tokens: Sequence[int]) -> list[list[float]]:
    """Log-probabilities (nats) of each of the `tokens` as the next token after each row, by a causal model."""
    import torch

    # Ask the model for logits at the rows' last tokens only, if it can: [batch, tokens, vocabulary] is large.
    keeps = "logits_to_keep" in inspect.signature(scorer.model.forward).parameters

    def ends(batch: list[Row]) -> list[int]:
        return sorted({len(row.ids) - 1 for row in batch})

    def options(batch: list[Row]) -> dict[str, Any]:
        return {"logits_to_keep": torch.tensor(ends(batch), device=scorer.model.device)} if keeps else {}

    def read(batch: list[Row], output: Any) -> list[list[float]]:
        index_of = {end: index if keeps else end for index, end in enumerate(ends(batch))}
        logprobs = []
        for row, values in zip(batch, output.logits, strict=True):
            logprobs.append(values[index_of[len(row.ids) - 1]].float().log_softmax(-1)[list(tokens)].tolist())
        return logprobs

    return _each(scorer, rows, read, options)


def token_logprobs(scorer: Scorer, rows: Sequence[Row]) -> list[list[float]]:
    """Log-probabilities (nats), by a causal model, of all tokens of each row except the first: [tokens - 1]."""
    import torch

    def read(batch: list[Row], output: Any) -> list[list[float]]:
        logprobs = []
        for row, values in zip(batch, output.logits, strict=True):
            distributions = values[: len(row.ids) - 1].float().log_softmax(-1)
            ids = torch.tensor(row.ids[1:], dtype=torch.long, device=distributions.device)
            logprobs.append(distributions.gather(1, ids[:, None])[:, 0].tolist())
        return logprobs

    return _each(scorer, rows, read, most=LOGITS // scorer.model.config.get_text_config().vocab_size)


def _each(
    scorer: Scorer,
    rows: Sequence[Row],
    read: Callable[[list[Row], Any], Iterable[T]],
    options: Callable[[list[Row]], dict[str, Any]] = lambda batch: {},
    most: int | None = None,
    **fixed: Any,
) -> list[T]:
    """Run the rows through the model and return `read`'s value for each. A forward pass holds at most
    `tokens_per_forward` tokens and at most `most`, padding included, or a single row."""
    import torch

    budget = scorer.tokens_per_forward
    if budget < 1:
        raise LmgymError(f"key 'rewards.{scorer.reward}.tokens_per_forward' must be at least 1, not {budget}")
    values: dict[Hashable, T] = {}
    with torch.inference_mode():
        for batch in _batches(rows, budget if most is None else min(budget, most)):
            inputs, padding = _padded(scorer, batch)
            text_config = scorer.model.config.get_text_config()
            before = text_config.pad_token_id
            text_config.pad_token_id = padding  # a head on a causal model reads the last token that is not padding
            try:
                output = scorer.model(**inputs, **fixed, **options(batch))
            finally:
                text_config.pad_token_id = before
            values.update(zip(batch, read(batch, output), strict=True))
    return [values[row] for row in rows]


def _batches(rows: Sequence[Row], budget: int) -> Iterator[list[Row]]:
    """The distinct rows, longest first; rows of similar length share a batch, so that little is padded."""
    batch: list[Row] = []
    for row in sorted(dict.fromkeys(rows), key=lambda row: -len(row.ids)):
        if batch and len(batch[0].ids) * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _padded(scorer: Scorer, batch: list[Row]) -> tuple[dict[str, Any], int | None]:
    """The model's inputs, and the padding id to set in its configuration."""
    import torch

    # The model's own padding id; without one, an id that no row of the batch has.
    padding = scorer.model.config.get_text_config().pad_token_id
    known = padding
    width, single = len(batch[0].ids), len(batch) == 1
    if padding is None:
        used = {id for row in batch for id in row.ids}
        padding = next(id for id in range(len(used) + 1) if id not in used)
        known = None if single else padding

    def column(lists: Iterable[Sequence[int]], filler: int) -> Any:
        return torch.tensor([[*one, *[filler] * (width - len(one))] for one in lists], device=scorer.model.device)

    inputs = {
        "input_ids": column((row.ids for row in batch), padding),
        "attention_mask": column(([1] * len(row.ids) for row in batch), 0),
    }
    if batch[0].types is not None:
        inputs["token_type_ids"] = column((row.types or () for row in batch), 0)
    return inputs, known
