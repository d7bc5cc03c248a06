"""The protocol of environments: text in, text out, one object per episode. Imports no torch."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmgym.core.errors import LmgymError
from lmgym.types import Example, Message


@dataclass(frozen=True)
class Branch:
    """Where the next turn goes on, for an environment that may come back to an earlier place (`Step.branch`).

    The messages of its step are then the whole conversation. The first `covered` of them end with the answer of turn
    number `turn` (0 is the first): their tokens stay as they are, and only the others are new. Without a turn, all are.
    Where the newest turn goes on, so does its row; else a row begins, in which all earlier tokens are prompt. `stop`
    and `template` replace those of the opening. `bare`: the one message is a prompt without chat template.
    `sampling_seed`: the turn's random numbers are a function of it and the episode; without it, of the turn's number
    and the episode.

    Example: Branch(turn=0, covered=2)"""

    turn: int | None = None
    covered: int = 0
    stop: tuple[str, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    bare: bool = False
    sampling_seed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Heard:
    """What an environment may know of a turn's tokens: how many were there to read, and how many were sampled (the end
    of sequence counts). `tokens` gives the sampled ones, without that end, as texts with their log-probabilities.

    Example: Heard(12, 2, lambda: [("4", -0.1)])"""

    prompt: int
    sampled: int
    tokens: Callable[[], list[tuple[str, float]]]


@dataclass(frozen=True)
class Step:
    """The answer of an environment to an action.

    Usually `messages` follow, and the policy takes its next turn. With `continuation` the policy goes on in the same
    message instead: that text (it may be empty) is appended to its own, and gets no gradient. `unfinished` says that
    the next turn continues the action that this one began, for example after the result of a calculator in the middle
    of a line; discounts and returns per turn count both as one turn.

    Example: a wrong guess, with one more try: Step(messages=[{"role": "user", "content": "higher"}], reward=0.0)
    A line of reasoning, with more to come: Step(continuation="")
    A calculator's result: Step(continuation="24>>", unfinished=True)"""

    messages: Sequence[Message] = ()  # the policy reads them before its next turn; empty at the end of the episode
    reward: float = 0.0  # earned by the action just taken
    terminated: bool = False  # the episode is complete
    truncated: bool = False  # it was cut off (time limit), so its value is not zero
    continuation: str | None = None  # in place of messages
    unfinished: bool = False
    restart: bool = False  # `messages` are a whole new prompt: the policy no longer sees what came before
    branch: Branch | None = None  # `messages` are the whole conversation, which may go on from an earlier turn
    player: int | None = None  # reads the messages and moves next; None: the same player again
    others: Mapping[int, float] = field(default_factory=dict)  # reward of this step for each of the other players
    info: dict[str, Any] = field(default_factory=dict)  # numbers and short texts about this step, for logs

    @property
    def over(self) -> bool:
        """True if the episode has ended with this step."""
        return self.terminated or self.truncated


class Env(Protocol):
    """The environment of one episode. A new one is built for each episode. It must be a pure function of (example,
    seed, actions). A method may be a coroutine function: those of many environments wait side by side.

    Besides the two methods it may have
    - `stop: tuple[str, ...]`, strings that end each turn of the policy, in addition to those of the recipe;
    - `sampling_seed: tuple[int, ...]`, that of the first turn after `reset` (see `Branch.sampling_seed`);
    - `demonstrate() -> str`, the answer that a supervised stage imitates now;
    - `close()`, called at the end of the episode;
    - `hear(turn)`, called before each step (in the training process only) with what is `Heard` of the turn's tokens;
    - `program: bool`, True where a program asks: a first prompt that the chat template refuses costs its episode only;
    - `players: int`, the number of players; `first: int`, the player who begins; `learners`, the players whose turns
      train (default: all). Each player has a separate conversation and a separate episode."""

    def reset(self, example: Example, seed: int) -> str | Sequence[Message]:
        """Begin the episode. Returns the first prompt, as text or chat messages."""
        ...

    def step(self, text: str, stop: str) -> Step:
        """Take one action: the text of the policy's turn, special tokens removed. `stop` says why the turn ended, as
        `Turn.stop` does: "eos", "stop" (a stop string or id), "length" (cut off at max_new_tokens) or "context" (cut
        off at the end of the model's context)."""
        ...


def library(module: str, env: str, package: str, install: str) -> Any:
    """A module that only this environment needs. Raises LmgymError, with what to install, if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LmgymError(
            f"env {env} needs the package {package}, which is not completely installed ({error}); run pip install "
            f"{install}"
        ) from error
