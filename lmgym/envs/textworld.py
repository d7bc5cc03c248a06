"""TextWorld's text adventures: typed commands explore rooms (package `textworld`)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmgym.core.constraints import PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.core.validation import Section
from lmgym.envs.base import Step, library
from lmgym.envs.dialogue import validity
from lmgym.types import Example, Message

INTERPRETER_COMMANDS = {  # commands for the interpreter, not for the game; some of them write files
    *("quit", "q", "restart", "restore", "save", "script", "noscript", "transcript", "notranscript", "recording"),
    *("unscript", "replay", "undo", "verify", "version", "tw-print", "tw-trace-actions", "tw-extra-infos"),
}


@register("env", "textworld")
@dataclass(kw_only=True)
class TextWorld(Section):
    """A game of TextWorld (arXiv 1806.11532), made by its `tw-make` or its Python functions: the first line of the
    policy's text is a command; the game's answer is the next message. The reward of a step is the increase of the
    game's score divided by its highest possible score, so a whole game earns at most 1. A lost game just ends.

    The Z-machine reads ASCII; other characters become spaces. Commands to the interpreter (save, quit ...) are not
    passed on. Raises LmgymError if the package or a file is missing.

    Example: TextWorld(game="games/level1.z8", commands=True)"""

    section = "env"

    game: str
    """The file, .z8, with the .json that TextWorld writes beside it."""
    commands: bool = False
    """True: each message lists the commands that are possible now."""
    max_turns: PositiveInt | None = 50

    needs_data = False
    workers = 2  # a crash of the interpreter then costs one episode

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
        return [self._message(text[text.rfind("$$") + 2 :] if "$$" in text else text, state)]  # skip the title picture

    def step(self, text: str, stop: str) -> Step:
        self._turns += 1
        command = _command(text)
        if not command:
            note = validity(f"{text[:20]!r} is no command")
            return self._go_on(Step([{"role": "user", "content": "That is no command.\n"}], info=note))
        state, score, done = self._env.step(command)
        gained, self._score = (int(score) - self._score) / self._highest, int(score)
        if done:
            return Step(reward=gained, terminated=True, info=validity(""))
        return self._go_on(Step([self._message(state.feedback, state)], reward=gained, info=validity("")))

    def demonstrate(self) -> str:
        """The first possible command in alphabetical order."""
        return str(self._commands[0]) if self._commands else "look"

    def close(self) -> None:
        self._env.close()

    def _go_on(self, step: Step) -> Step:
        return Step(reward=step.reward, truncated=True, info=step.info) if self._turns == self.max_turns else step

    def _message(self, text: str, state: Any) -> Message:
        """The text of the game as a message, without the prompt line of its interpreter."""
        self._commands = sorted(state["admissible_commands"] or ())
        # The interpreter ends its output with a line ">  -= Room =-0/1".
        content = re.sub(r"\n+>[^\n]*-=[^\n]*$", "", text.strip()).strip()
        if self.commands:
            content += f"\n\nYou can: {', '.join(self._commands)}."
        return {"role": "user", "content": f"{content}\n"}


def _command(text: str) -> str:
    """The first line that is not blank, in ASCII, at most 100 characters; empty for a command to the interpreter."""
    lines = (" ".join(re.sub(r"[^ -~]", " ", line).strip(" >").split())[:100] for line in text.splitlines())
    line = next((line for line in lines if line), "")
    return "" if line.lower().split()[:1] and line.lower().split()[0] in INTERPRETER_COMMANDS else line


def _library() -> Any:
    return library("textworld", "textworld", "textworld", "textworld (Linux or macOS, with a C compiler)")
