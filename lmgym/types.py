"""The nouns of the text world: Example, Turn, Episode, Restriction. Plain Python, no torch.

Tasks make Examples, rollouts make Episodes of Turns, rewards score them, and `batch.collate` is the only door
from here to tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": "..."}


@dataclass(frozen=True)
class Example:
    """One problem of a task.

    `prompt` is a text, or chat messages. `references` are complete answers as a model should write them (what
    supervised training imitates and reference-based rewards compare with); open tasks have none. `meta` holds
    whatever else a reward or a table of results may want.

    Example:
        >>> Example(id="gsm8k/train/0", prompt="Tom has 3 apples and buys 4. How many has he?",
        ...         references=("3 + 4 = 7\\n#### 7",), meta={"answer": "7"})
    """

    id: str
    prompt: str | Sequence[Message]
    references: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Turn:
    """Tokens that were put before the policy, then tokens that it sampled.

    `prompt_ids` are only the tokens appended since the turn before (all of the prompt in the first turn).
    `action_ids` are exactly what was sampled, the end-of-sequence or stop token included; `logprobs` are their
    log-probabilities under the distribution that was sampled from (natural log, temperature applied; empty for
    demonstrations, which nobody sampled). The first `min_new_tokens` actions were drawn with the stop ids excluded.

    For an encoder-decoder model `source_ids` are what the encoder reads (the whole conversation so far), `prompt_ids`
    are the decoder's first tokens, and each turn is a row of its own (`restart`). Where sampling was truncated or
    restricted, row t of `kept` is the set of tokens that action t was drawn from: bits, or ids where these take less
    (functional/truncation.py).

    Example: a turn of a model that was asked "2+2=" and answered "4", then stopped:
        >>> Turn(prompt_ids=[51, 44, 51, 62], action_ids=[53, 2], logprobs=[-0.1, -0.02], text="4", stop="eos",
        reward=1.0)
    """

    prompt_ids: list[int]
    action_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    text: str = ""  # the action decoded, special tokens removed
    stop: str = (
        "eos"  # "eos" | "stop" (a stop string or id) | "length" (cut off at max_new_tokens) | "context" (model full)
    )
    min_new_tokens: int = 0
    reward: float = 0.0  # earned by this turn
    restart: bool = False  # the prompt was rewritten, not appended to: this turn begins a new row
    source_ids: list[int] = field(default_factory=list)
    kept: npt.NDArray[np.uint8] | npt.NDArray[np.int32] | None = None  # [actions, width]
    continuation: str | None = None  # what the environment put behind it where the policy went on in the same message
    unfinished: bool = False  # the next turn belongs to the action that this one began (`Step.unfinished`)
    token_rewards: list[float] | None = None  # what of `reward` each action earned; what is left is the last one's


@dataclass
class Episode:
    """One complete interaction: for a question, one turn; for a conversation, several.

    `group` numbers the prompt within the step; episodes of one group answer the same prompt. `index` is the
    episode's place in the step, and with (seed, step, draw) fixes its random numbers. `terminated` is True if the
    episode came to its own end and False if it was cut off (length, time, context). `error` says why its environment
    failed; such an episode does not train, and it may have no turn at all.

    Example:
        >>> Episode(example=Example("a/0", "2+2="), group=0, index=3, turns=[...], score=1.1,
        ...         reward_components={"final_answer": 1.0, "answer_format": 1.0})     # weights 1 and 0.1
    """

    example: Example
    group: int
    index: int
    turns: list[Turn] = field(default_factory=list)
    terminated: bool = True
    version: int = 0  # of the weights that sampled it: the number of updates they had seen
    reward_components: dict[str, float] = field(default_factory=dict)  # each reward before its weight
    score: float = 0.0  # the sum of the turns' rewards
    selected: bool = True  # False: the algorithm has not selected it
    baseline: float | None = None  # score of the greedy answer to the same prompt, where the algorithm asks for it
    error: str = ""

    @property
    def text(self) -> str:
        """The model's last message: its last turn, and what stands before it in the same message."""
        text = self.turns[-1].text if self.turns else ""
        for turn in reversed(self.turns[:-1]):
            if turn.continuation is None:
                break
            text = turn.text + turn.continuation + text
        return text

    @property
    def truncated(self) -> bool:
        """True if any action was cut off by the token limit or the end of the context."""
        return any(turn.stop in ("length", "context") for turn in self.turns)

    def rows(self) -> list[list[Turn]]:
        """The turns that share one token sequence; more than one row only where a prompt was rewritten."""
        rows: list[list[Turn]] = []
        for turn in self.turns:
            if turn.restart or not rows:
                rows.append([])
            rows[-1].append(turn)
        return rows


@dataclass(frozen=True)
class Restriction:
    """Only likely tokens may be sampled: those that a mask policy, or else the sampled one itself, finds likely enough.

    The set of each token travels with the answer (`Completion.kept`), and everything that is scored later is
    renormalised on it. The policy's special ids are always in it.

    Example: Restriction(rule="top_p", amount=0.9, least=1)
    """

    rule: Literal["top_p", "top_k"]
    amount: float  # top_p: probability mass; top_k: number of tokens
    least: int = 1  # tokens that are kept whatever the rule says
