"""How a workload's lengths are forced on a library. The sampled tokens are then nobody's choice, but the work is the
same for all."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from benchmarks.workloads import EOS


class EndsAt(LogitsProcessor):
    """For Hugging Face's `generate`: the end of sequence is forbidden before a row's last token, and is that token.

    One column is written at each step, and a whole row once. `generate` goes on with the other rows, and feeds a row
    that has ended padding, as it always does.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = torch.tensor(lengths)
        self.prompt: int | None = None  # padded, so all prompts are of one length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.prompt is None:
            self.prompt = input_ids.shape[1]
        scores[:, EOS] = float("-inf")
        last = (self.lengths == input_ids.shape[1] - self.prompt + 1).nonzero()[:, 0].to(scores.device)
        scores[last] = float("-inf")
        scores[last, EOS] = 0.0
        return scores


def limit_lmgym(lengths: Sequence[int]) -> None:
    """For lmgym's sampler: an answer is cut off at its own length, as the end of the context would cut it off.

    Nothing is planned by it: rows are decoded in the order of the requests and leave when they have ended. The end of
    sequence is excluded up to `max_new_tokens` (`min_new_tokens`), as usual.
    """
    from lmgym.inference import completions, decoder

    class Limited(completions.Answers):
        def __init__(self, policy: Any, requests: Sequence[Any], sampling: Any) -> None:
            super().__init__(policy, requests, sampling)
            if len(requests) == len(lengths):  # the proof at load samples a few short rows of its own
                self.limits = [min(pair) for pair in zip(self.limits, lengths, strict=True)]

    decoder.Answers = Limited  # type: ignore[misc]
