"""What an engine is: prompts of ids in, completions of ids with log-probabilities out. It knows no text task.

An engine never sees an environment or a reward. `Sampling` is also the `sampling:` section of a recipe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lmgym.episode import Restriction
from lmgym.errors import LmgymError


@dataclass(kw_only=True)
class Sampling:
    """How answers are drawn.

    Example: Sampling(temperature=1.0, max_new_tokens=256, stop=("\\n\\n",))
    """

    temperature: float = 1.0
    """Logits are divided by it, in sampling and in scoring. 0 is greedy (evaluation only)."""
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    """The end-of-sequence and stop ids are excluded from this many first tokens, in sampling and in scoring."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer; the whole token that completes one is kept."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end an answer, besides the model's own."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise LmgymError(f"sampling.temperature is {self.temperature}; it must be 0 (greedy) or more")
        if self.max_new_tokens < 1:
            raise LmgymError(f"sampling.max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise LmgymError(
                f"sampling.min_new_tokens is {self.min_new_tokens}; it must lie between 0 and "
                f"max_new_tokens ({self.max_new_tokens})"
            )
        if any(not text for text in self.stop):
            raise LmgymError("sampling.stop holds an empty string, which would end every answer at once; remove it")


@dataclass(frozen=True)
class Request:
    """One answer wanted: the prompt's ids, and the 64-bit key that fixes its random numbers.

    An encoder-decoder model reads `source_ids`; `prompt_ids` are then the decoder's first tokens.

    Example: Request(prompt_ids=(5, 6), key=seeds.key(0, "sampling", 3, 0, 17))
    """

    prompt_ids: tuple[int, ...]
    key: int
    source_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One answer: exactly the sampled ids, their log-probabilities (nats, temperature applied), and why it ended.

    Example: Completion(ids=[7, 2], logprobs=[-0.5, -0.1], stop="eos")
    """

    ids: list[int]
    logprobs: list[float]
    stop: str  # "eos" | "stop" | "length" | "context"
    kept: npt.NDArray[np.uint8] | None = None  # [tokens, bytes], where sampling was restricted


class Engine(Protocol):
    """Anything that samples from the policy's weights.

    Contract: completions come in the order of the requests; a completion's random numbers depend on its key only;
    temperature 0 is argmax; the reported log-probabilities are those of the distribution that was sampled, on the
    kept set where there is a restriction.
    """

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and answer together, or None if there is no limit."""
        ...

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, restriction: Restriction | None = None
    ) -> list[Completion]: ...

    def load(self, policy: Any, version: int) -> None:
        """Take over the policy's weights after an update."""
        ...
