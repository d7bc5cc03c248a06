"""The interface of an inference engine: prompts as token ids in, completions as token ids with log-probabilities out.

An engine knows nothing of texts, environments or rewards. `Sampling` is also the `sampling:` section of a recipe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Le, MinLen

from lmgym.core.constraints import NonNegativeInt, PositiveFloat, PositiveInt, Rule
from lmgym.core.errors import LmgymError
from lmgym.core.validation import Section
from lmgym.inference.generation_options import checked, ids_of
from lmgym.types import Restriction

PAUSED = "paused"  # why an answer stops that will go on
COLDEST = 1e-6  # lowest temperature above 0; logits divided by a much lower one are no numbers of fp32
Temperature = Annotated[float, Ge(0), Rule("it must be 0 (greedy) or more")]
StopString = Annotated[str, MinLen(1), Rule("an empty string would end every answer at once; remove it")]
TopK = Annotated[int, Ge(1), Rule("it must be at least 1; to draw from the whole vocabulary, leave it out")]
TopP = Annotated[float, Gt(0), Le(1), Rule("it is a share of the probability, above 0 and at most 1")]
MinP = Annotated[float, Ge(0), Le(1), Rule("it is a share of the likeliest token's probability, from 0 to 1")]


@dataclass(kw_only=True)
class Sampling(Section):
    """How answers are sampled.

    With top_k, top_p or min_p, sampling is truncated. After the temperature and without excluded ids, it keeps the
    top_k most likely tokens; of these the likeliest that together have top_p of the probability; of these the ones with
    at least min_p times the highest probability (the order of Hugging Face). Equally likely tokens are kept or dropped
    together. The kept set of each token is stored with its answer; log-probabilities are renormalised on it.

    Example: Sampling(temperature=1.0, max_new_tokens=256, stop=("\n\n",), top_k=50)"""

    section = "sampling"
    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("generation", "beams", "num_beams", "length_penalty", "early_stopping", "no_repeat_ngram_size"),
        "training has to know with what probability each token was sampled, which beams and Hugging Face's `generate` "
        "do not tell; write it in the evaluation, such as evaluation: {generation: {num_beams: 4}}",
    )

    temperature: Temperature = 1.0
    """Logits are divided by it, in sampling and in scoring. 0 is greedy (evaluation only)."""
    max_new_tokens: PositiveInt = 256
    min_new_tokens: NonNegativeInt = 0
    """The end-of-sequence and stop ids are excluded from this many first tokens, in sampling and in scoring."""
    stop: tuple[StopString, ...] = ()
    """Strings that end an answer; the token that completes one is kept as a whole. One may name a special token."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end an answer, besides the model's own."""
    top_k: TopK | None = None
    """Only this many of the likeliest tokens are drawn from."""
    top_p: TopP | None = None
    """Only the likeliest tokens that hold this share of the probability are drawn from (arXiv 1904.09751)."""
    min_p: MinP | None = None
    """Only tokens at least this many times as likely as the likeliest are drawn from (arXiv 2407.01082)."""
    kept_gib: PositiveFloat = 4.0
    """Limit in GiB on the kept sets of a step's answers, for one turn each; a run that would need more is refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.temperature < COLDEST:
            raise LmgymError(
                f"{self.section}.temperature is {self.temperature}; it must be 0 (greedy) or at least {COLDEST}"
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise LmgymError(
                f"{self.section}.min_new_tokens is {self.min_new_tokens}; it must lie between 0 and max_new_tokens "
                f"({self.max_new_tokens})"
            )

    @property
    def truncates(self) -> bool:
        """True if tokens are sampled from a part of the vocabulary only (greedy answers are not sampled)."""
        cut = self.top_k is not None or (self.top_p is not None and self.top_p < 1) or bool(self.min_p)
        return cut and self.temperature > 0

    @property
    def has_unbounded_sets(self) -> bool:
        """True if top_p or min_p cut off tokens and no top_k does, so that the kept sets have no largest size."""
        return self.truncates and self.top_k is None

    @property
    def fixed_length(self) -> bool:
        """True if no answer can end before its limit (a move of one token, or min_new_tokens equal to max_new_tokens
        and no stop string): that it was cut off there then says nothing. Stop strings of an environment are unknown
        here."""
        return self.max_new_tokens == 1 or (self.max_new_tokens == self.min_new_tokens and not self.stop)

    def kept_bytes(self, vocabulary: int) -> int:
        """Most bytes that the kept set of one sampled token takes: one bit per token of the vocabulary, or with top_k 4
        bytes per kept token if that is less (each further token that is as likely as the last adds 4).

        Example:
            >>> [one.kept_bytes(151_936) for one in (Sampling(top_p=0.9), Sampling(top_k=50), Sampling())]
            [18992, 200, 0]
        """
        if not self.truncates:
            return 0
        bits = -(-vocabulary // 8)
        return bits if self.top_k is None else min(bits, 4 * self.top_k)

    def check_untruncated(self, owner: str) -> None:
        """Raise LmgymError if tokens are cut off, where the `owner` of a restriction says which may be sampled."""
        if self.truncates:
            raise LmgymError(
                f"{owner} decides itself which tokens may be sampled, so sampling.top_k, top_p and min_p do not "
                "go with it; leave them out"
            )

    def check_vocabulary(self, size: int) -> None:
        """Raise LmgymError if the fields do not fit a vocabulary of `size` tokens."""
        if self.top_k is not None and self.top_k > size:
            raise LmgymError(
                f"{self.section}.top_k is {self.top_k}, and the model's vocabulary has {size} tokens, so nothing would "
                "be cut off; lower it, or leave it out"
            )
        _check_ids("sampling.stop_ids", self.stop_ids, size)


@dataclass(kw_only=True)
class Decoding(Sampling):
    """How the answers of an evaluation are decoded: greedily, by sampling, or by Hugging Face's `generate`.

    Nothing is trained on them, so the sets of truncated sampling are not stored.

    Example: beam search: Decoding(temperature=0.0, generation={"num_beams": 4, "length_penalty": 0.6})"""

    section = "evaluation"
    elsewhere: ClassVar[Mapping[str, str]] = {}

    generation: Mapping[str, Any] = field(default_factory=dict)
    """Keys of Hugging Face's GenerationConfig; if there is one, its `generate` decodes (inference/hf_generate.py)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [key for key in ("top_k", "top_p", "min_p") if getattr(self, key) is not None]
        if given and self.temperature == 0:
            raise LmgymError(
                f"evaluation.{given[0]} is {getattr(self, given[0])}, and evaluation.temperature is 0, where nothing "
                "is drawn; write temperature: 1.0 or so, or leave it out"
            )

    def check_vocabulary(self, size: int) -> None:
        super().check_vocabulary(size)
        for key, ids in ids_of(checked(self.generation, self.temperature)).items():
            _check_ids(f"evaluation.generation.{key}", ids, size)


def _check_ids(key: str, ids: Sequence[int], size: int) -> None:
    """Raise LmgymError, naming the first one, if `ids` of a key are not in a vocabulary of `size` tokens."""
    if (wrong := next((id for id in ids if not 0 <= id < size), None)) is not None:
        raise LmgymError(
            f"{key} holds {wrong}, and the model has the ids 0 to {size - 1} only; write such ids, or leave it out"
        )


@dataclass(frozen=True)
class Request:
    """A request for one answer: the prompt's ids, and the 64-bit key that determines its random numbers.

    An encoder-decoder reads `source_ids`; `prompt_ids` are then the first tokens of its decoder. `stop` are further
    strings that end this answer. Requests with the same `conversation` number are turns of one conversation, where each
    prompt begins with the previous prompt and its answer; for speed the engine may cache it until `forget` is called.

    `begun` are the answer's first tokens, if there are some already: the rest is sampled, with the random numbers and
    limits that it would have had in one call. An answer that has `pause` tokens, those included, and has not ended
    stops there as "paused". Both are for answers that are no turns of a conversation (`EngineKind.continues`).

    Example: Request(prompt_ids=(5, 6), key=seeds.key(0, "sampling", 3, 0, 17))"""

    prompt_ids: tuple[int, ...]
    key: int
    source_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    conversation: int | None = None
    begun: tuple[int, ...] = ()
    pause: int | None = None


@dataclass(frozen=True)
class Completion:
    """One answer, or the rest of one that was `begun`: exactly the sampled ids, their log-probabilities (nats, at the
    sampling temperature; empty if Hugging Face's `generate` decoded), and the reason why it ended.
    Example: Completion(ids=[7, 2], logprobs=[-0.5, -0.1], stop="eos")"""

    ids: list[int]
    logprobs: list[float]
    stop: str  # "eos" | "stop" | "length" | "context" | PAUSED
    # With truncated or restricted sampling, the set that each token was drawn from (functional/truncation.py).
    kept: npt.NDArray[np.uint8] | npt.NDArray[np.int32] | None = None


PolicyT = TypeVar("PolicyT", contravariant=True)  # the class of policies from which an engine samples


class Engine(Protocol[PolicyT]):
    """Samples answers with the policy's weights.

    Contract: completions have the order of the requests; the random numbers of a completion depend on its key only;
    temperature 0 is argmax; log-probabilities are those of the distribution that was sampled, renormalised on the kept
    set if sampling is truncated or restricted. Of the model's own generation_config only the ids that end an answer are
    used. Raises LmgymError for a `Decoding` that the engine does not support.

    Example: engine.generate([Request((5, 6), key=1)], Sampling(max_new_tokens=8))"""

    @property
    def context(self) -> int | None:
        """The limit of prompt and answer together, in tokens; None without a limit."""

    @property
    def rows(self) -> int:
        """The number of answers that are decoded at once."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, ended: Callable[[int, list[int]], None] | None = None
    ) -> list[Completion]:
        """One completion per request. An engine may call `ended` with index and ids of each answer when that ends."""

    def restricted(self, restriction: Restriction, mask: PolicyT | None = None) -> "Engine[PolicyT]":
        """This engine under a restriction of the tokens that it samples; `mask` is the frozen policy that finds tokens
        likely enough (None: the policy itself). Valid until the next `load`."""

    def forget(self, conversations: Sequence[int]) -> None:
        """Free what is cached of conversations that are over."""

    def load(self, policy: PolicyT, version: int) -> None:
        """Use the policy's weights after an update; `version` is the number of updates so far."""

    def release(self) -> None:
        """Free what only sampling needs, such as weights in another layout; the next `generate` makes it again."""

    def close(self) -> None:
        """End what the engine has started; it is not used again."""
