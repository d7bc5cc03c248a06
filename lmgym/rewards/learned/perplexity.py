"""`causal_perplexity`: the perplexity of a text under a causal language model. Long texts are read in windows."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.learned import batched_forward
from lmgym.rewards.learned.rows import Row, chat_ids, plain_ids, text_rows
from lmgym.rewards.learned.scorers import Scorer, by_model
from lmgym.rewards.text.references import reward_of_sums
from lmgym.stats.intervals import SufficientStatistics
from lmgym.text.chat import messages_of
from lmgym.types import Example

Form = Literal["perplexity", "log_likelihood"]


@register("reward", "causal_perplexity")
@reward_of_sums
@by_model("causal", budget=4096, cuts=False)
def causal_perplexity(
    texts: list[str],
    examples: list[Example],
    scorer: Scorer,
    *,
    form: Form = "perplexity",
    with_prompt: bool = False,
    stride: int | None = None,
    window: int | None = None,
) -> SufficientStatistics:
    """Perplexity: exp of the mean negative log-likelihood of the text's tokens under a causal language model. With
    `form: log_likelihood` the mean log-likelihood itself (nats per token, at most 0). That is the better reward: higher
    is better, and one absurd word does not outweigh all others.

    A text longer than `window` (default: all that the model can read) is read in windows. Each starts `stride` tokens
    (default: half a window) after the one before. Each token counts once, in the first window that contains it; so it
    has at least window - stride tokens of context, except at the beginning of the text. With `with_prompt` the prompt
    (in the chat template, if there is one) is context and is not counted. Without it, a text's first token is counted
    only if the tokenizer puts a BOS token before it. A text without any counted token gets the perplexity of a uniform
    distribution, the size of the vocabulary.

    The corpus value, `causal_perplexity.corpus`, is exp of the mean over the tokens of all texts. Source: Hugging
    Face's guide "Perplexity of fixed-length models", but here every token has weight 1 (the guide's average leaves out
    one weight per window). RL4LMs' metric of this name scores the references, which no answer can change.

    Raises LmgymError for a model that is missing or not causal, and for a window or stride out of range.

    Example: causal_perplexity(["The cat sat on the mat."], [example], model="gpt2") -> [56.1]"""
    width, step = _window(scorer, window, stride)
    rows = np.array(_sums(scorer, texts, examples, with_prompt, width, step), float).reshape(-1, 2)
    return SufficientStatistics(
        rows, lambda sums: np.array([_value(form, total, int(count), scorer) for total, count in sums])
    )


def windows(length: int, start: int, width: int, stride: int) -> list[tuple[int, int, int]]:
    """Windows over a sequence whose tokens count from index `start` on: for each window (begin, end, first), with
    `first` the index of the first token that is counted in this window."""
    spans, counted = [], max(start, 1)
    for begin in range(0, length, stride):
        end = min(begin + width, length)
        if end > counted:  # a window without a new token is not run
            spans.append((begin, end, counted))
            counted = end
        if end == length:
            break
    return spans


def _window(scorer: Scorer, window: int | None, stride: int | None) -> tuple[int, int]:
    """The window's width and the stride, with defaults filled in and checked."""
    key, longest = "key 'rewards.causal_perplexity", scorer.longest
    width = window or longest
    if width is None:
        raise LmgymError(
            f"{key}.window': {scorer.name} does not say how many tokens it reads; write a number, such as 1024"
        )
    if width < 2 or (longest is not None and width > longest):
        raise LmgymError(f"{key}.window' is {width}; it must be from 2 to {longest or 'what the model reads'}")
    step = max(1, width // 2) if stride is None else stride
    if not 1 <= step < width:
        raise LmgymError(f"{key}.stride' is {step}; it must be from 1 to {width - 1}, less than the window of {width}")
    return width, step


def _sums(
    scorer: Scorer, texts: Sequence[str], examples: Sequence[Example], with_prompt: bool, width: int, stride: int
) -> list[tuple[float, int]]:
    """For each text the sum of its counted tokens' log-likelihoods, and their number."""
    # The ids of each text, and the index of the first that counts.
    sequences = []
    for text, example in zip(texts, examples, strict=True):
        if with_prompt:
            before = chat_ids(scorer, messages_of(example.prompt))
            sequences.append(([*before, *plain_ids(scorer.tokenizer, text)], len(before)))
        else:
            sequences.append((_ids(scorer, text), 1))
    # Run all windows of all texts at once.
    cuts = [windows(len(ids), start, width, stride) for ids, start in sequences]
    both = zip(sequences, cuts, strict=True)
    rows = [Row(tuple(ids[begin:end])) for (ids, _), spans in both for begin, end, _ in spans]
    logprobs = iter(batched_forward.token_logprobs(scorer, rows))
    # Index i of a window's log-probabilities is about its token i + 1.
    sums = []
    for spans in cuts:
        counted = [value for begin, _, first in spans for value in next(logprobs)[first - 1 - begin :]]
        sums.append((math.fsum(counted), len(counted)))
    return sums


def _ids(scorer: Scorer, text: str) -> list[int]:
    """A text's ids with the special tokens that the tokenizer puts before it, without those that it puts after it: the
    text does not contain an end mark."""
    ids = list(text_rows(replace(scorer, longest=None), [text])[0].ids)
    own = plain_ids(scorer.tokenizer, text)
    starts = (index for index in range(len(ids) - len(own) + 1) if ids[index : index + len(own)] == own)
    start = next(starts, None)
    return ids if start is None else ids[: start + len(own)]


def _value(form: Form, total: float, count: int, scorer: Scorer) -> float:
    mean = total / count if count else -math.log(scorer.model.config.get_text_config().vocab_size)
    return mean if form == "log_likelihood" else math.exp(min(-mean, 700.0))  # exp(710) would overflow
