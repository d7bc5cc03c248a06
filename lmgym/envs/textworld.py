"""TextWorld's games of exploring rooms by typed commands (package `textworld`)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmgym.core.constraints import PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.core.validation import Section
from lmgym.envs.base import Step
from lmgym.types import Example, Message

TO_THE_MACHINE = {  # commands that speak to the interpreter, not to the game; some of them write files
    *("quit", "q", "restart", "restore", "save", "script", "noscript", "transcript", "notranscript", "recording"),
    *("unscript", "replay", "undo", "verify", "version", "tw-print", "tw-trace-actions", "tw-extra-infos"),
}


@register("env", "textworld")
@dataclass(kw_only=True)
class TextWorld(Section):
    """A game of TextWorld (arXiv 1806.11532), made by its `tw-make` or its Python functions: the first line that the
    policy writes is a command, and what the game answers comes back. A step earns what the game's score grows by,
    over the highest score there is, so that a whole game earns at most 1. A game that is lost ends as it stands.

    The Z-machine reads ASCII; other characters become spaces. Commands to the interpreter (save, quit ...) are not
    passed on. Raises LmgymError where the package or a file is missing.

    Example: TextWorld(game="games/level1.z8", commands=True)
    """

    section = "env"

    game: str
    """The file, .z8, with the .json that TextWorld writes beside it."""
    commands: bool = False
    """Whether the commands that make sense now are listed with each answer."""
    max_turns: PositiveInt | None = 50

    needs_data = False
    workers = 2  # a game that takes its process down costs its own episode

    def __post_init__(self) -> None:
        super().__post_init__()
        _library()
        path = Path(self.game).expanduser()
        for needed in (path, path.with_suffix(".json")):
            if not needed.is_file():
                raise LmgymError(
                    f"env.game: there is no file {needed}; `tw-make` writes both {path.name} and its .json"
                )

    def reset(self, example: Example, seed: int) -> Sequence[Message]:
        wanted = _library().EnvInfos(feedback=True, admissible_commands=True, max_score=True)
        self._env = _library().start(str(Path(self.game).expanduser()), request_infos=wanted)
        self._env.seed(seed % 2**31)
        state = self._env.reset()
        self._highest, self._score, self._turns = max(int(state["max_score"] or 0), 1), 0, 0
        text = state.feedback
        return [self._said(text[text.rfind("$$") + 2 :] if "$$" in text else text, state)]  # behind the picture

    def step(self, text: str, stop: str) -> Step:
        self._turns += 1
        command = _command(text)
        if not command:
            return self._go_on(
                Step([{"role": "user", "content": "That is no command.\n"}], info={"invalid": text[:20]})
            )
        state, score, done = self._env.step(command)
        gained, self._score = (int(score) - self._score) / self._highest, int(score)
        if done:
            return Step(reward=gained, terminated=True)
        return self._go_on(Step([self._said(state.feedback, state)], reward=gained))

    def demonstrate(self) -> str:
        """The first command that makes sense, in the game's own order."""
        return str(self._commands[0]) if self._commands else "look"

    def close(self) -> None:
        self._env.close()

    def _go_on(self, step: Step) -> Step:
        return Step(reward=step.reward, truncated=True, info=step.info) if self._turns == self.max_turns else step

    def _said(self, text: str, state: Any) -> Message:
        """What the game says, without the line of its interpreter's prompt."""
        self._commands = sorted(state["admissible_commands"] or ())
        content = re.sub(r"\n+>[^\n]*-=[^\n]*$", "", text.strip()).strip()
        if self.commands:
            content += f"\n\nYou can: {', '.join(self._commands)}."
        return {"role": "user", "content": f"{content}\n"}


def _command(text: str) -> str:
    """The first line that says something, in ASCII, 100 characters at most; empty where it is no command of a game."""
    lines = (" ".join(re.sub(r"[^ -~]", " ", line).strip(" >").split())[:100] for line in text.splitlines())
    line = next((line for line in lines if line), "")
    return "" if line.lower().split()[:1] and line.lower().split()[0] in TO_THE_MACHINE else line


def _library() -> Any:
    try:
        import textworld
    except ImportError as error:
        raise LmgymError(
            f"env textworld needs the package textworld, which is not installed whole ({error}); run pip install "
            "textworld (Linux or macOS, with a C compiler)"
        ) from error
    return textworld
