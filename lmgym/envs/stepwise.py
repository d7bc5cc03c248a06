"""Problems solved line by line: an action is one line of reasoning; a calculator can fill in results."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated

from annotated_types import Ge, Le

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.core.validation import Section
from lmgym.envs.base import Step
from lmgym.envs.tools.calculator import LONGEST, Style, calculate, format_number
from lmgym.text.latex import boxes
from lmgym.types import Example, Message

MARKERS = ("####", "the answer is:", "\\boxed{")
MAX_PIECES = 32  # pieces of a line, each ended by an equals sign, before they count as steps; GSM8K has up to 7
MAX_MARKS = 20  # calculations in a line; a line with more earns no calculation_reward
TOLERANCE = Fraction(5, 1000)  # results are right to the second decimal
MARK = re.compile(r"<<([^<>=\n]{1,200})=([^<>=\n]{1,200})>>")
REPEATED = re.compile(r"\$?-?[0-9.,]*[0-9]")
AROUND = " \t\r\n*_$:"  # characters that are not an answer by themselves


@register("env", "stepwise")
@dataclass(kw_only=True)
class StepwiseEnv(Section):
    r"""Reasoning line by line on problems with a final answer (GSM8K, MATH, arithmetic, your own task).

    The state is the problem and the lines so far; an action is the next line with its newline. The episode ends with
    the line that announces an answer, or when the model ends its message; after `max_steps` lines it is truncated. The
    recipe's rewards (final_answer, math_equal) judge the final answer: they read the whole message and are paid on the
    last line. An empty line is a step. So is each part of a line that is longer than `sampling.max_new_tokens`.

    With `calculator` the model also stops after an equals sign. After "<<48/2=" the environment appends "24>>". If it
    cannot compute the result, or after any other equals sign, it appends nothing. In both cases the model goes on with
    the same action.

    Raises LmgymError for arguments out of range; `demonstrate` raises it for an example without references.

    Source: LLM_RL (github.com/navidmdn/LLM_RL), envs/gsm8k.py and policy/fewshot_llm_stepwise_math_policy.py; the
    calculator of GSM8K's own authors (Cobbe et al. 2021, arXiv 2110.14168).

    Example:
        >>> env = StepwiseEnv(calculator=True)
        >>> env.reset(Example("a/0", "How much is half of 48?", references=("48/2=<<48/2=24>>24\n#### 24",)), seed=0)
        'How much is half of 48?'
        >>> [env.step(text, "stop").continuation for text in ("48/2=", "<<48/2=", "24\n")]
        ['', '24>>', '']
        >>> env.step("#### 24", "eos").terminated
        True
    """

    section = "env"

    max_steps: Annotated[int, Ge(1), Le(10_000)] = 10
    markers: Sequence[str] = MARKERS
    """Texts that announce a final answer, in any case. An answer must follow; an opened brace must close."""
    line_reward: float = 0.0
    """Earned by each line that is not blank; a negative value makes lines costly."""
    calculation_reward: float = 0.0
    """Earned by each line in which the model itself calculates ("<<48/2=24>>"), all results right to .005."""
    calculator: bool = False
    max_calculations: Annotated[int, Ge(0), Le(1_000)] = 4
    """Most results that the calculator writes in one line (4: LLM_RL's number)."""
    decimals: Annotated[int, Ge(0), Le(20)] = 2
    style: Style = "lmgym"
    """llm_rl: the environment repeats the result after the brackets, "<<2/2=1.0>>1.0", as that system does."""
    stop: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.markers, str) or not all(isinstance(text, str) and text.strip() for text in self.markers):
            raise LmgymError(f"env.markers must be a list of texts, none of them blank, not {self.markers!r}")
        if self.calculator and self.calculation_reward:
            raise LmgymError(
                "env.calculation_reward is for calculations that the model does itself; leave it out with "
                "env.calculator: true, which does them all"
            )
        self.stop = ("\n", "=") if self.calculator else ("\n",)

    def reset(self, example: Example, seed: int) -> str | Sequence[Message]:
        self._id = example.id
        self._line = ""  # the text after the last newline
        self._lines = self._calculations = 0  # in the episode
        self._pieces = self._results = 0  # in the line
        self._rest = example.references[seed % len(example.references)].rstrip() if example.references else None
        return example.prompt if isinstance(example.prompt, str) else [dict(message) for message in example.prompt]

    def step(self, text: str, stop: str) -> Step:
        # The remaining part of the reference, for `demonstrate`; None once an action differs from it.
        self._rest = self._rest[len(text) :] if self._rest is not None and self._rest.startswith(text) else None
        self._line += text
        # An equals sign: the calculator answers, and the same action goes on, unless the line has too many of them.
        if "\n" not in self._line and stop == "stop" and self.calculator and "=" in text:
            self._pieces += 1
            if self._pieces <= MAX_PIECES:
                return Step(continuation=self._result(), unfinished=True, info=self._info())
            return self._end_step("")
        # A stop string of the recipe ends the message, as the end-of-sequence token does.
        ended = stop == "eos" or (stop == "stop" and "\n" not in self._line)
        line = self._line if ended else self._take_lines()
        return self._end_step(line, terminated=ended or self._announces(line), truncated=stop == "context")

    def demonstrate(self) -> str:
        """The next piece of the reference, up to the end of the line or to the place of a calculator's result.

        Raises LmgymError if the example has no reference, or if the actions so far differ from it.

        Example: "48/2=", then "<<48/2=", then "24 clips.\\n", then "#### 24"
        """
        if self._rest is None:
            raise LmgymError(
                f"example {self._id} cannot be demonstrated: it has no reference, or the lines so far are not those of "
                "its reference"
            )
        ends = [self._rest.find(stop) + len(stop) for stop in self.stop if stop in self._rest]
        return self._rest[: min(ends, default=None)]

    def _info(self) -> dict[str, int]:
        return {"lines": self._lines, "calculations": self._calculations}

    def _take_lines(self) -> str:
        """Take the complete lines, almost always one; the text after the last newline begins the next line."""
        closed, newline, self._line = self._line.rpartition("\n")
        return closed + newline

    def _end_step(self, line: str, terminated: bool = False, truncated: bool = False) -> Step:
        """The Step after an action; `line` is empty if the line is not complete yet."""
        self._lines += 1
        if line:
            self._pieces = self._results = 0
        truncated = not terminated and (truncated or self._lines >= self.max_steps)
        over = terminated or truncated
        return Step(
            reward=self._reward(line),
            terminated=terminated,
            truncated=truncated,
            continuation=None if over else "",
            info=self._info(),
        )

    def _reward(self, line: str) -> float:
        reward = self.line_reward if line.strip() else 0.0
        return reward + self.calculation_reward if self.calculation_reward and _calculations_right(line) else reward

    def _announces(self, line: str) -> bool:
        low = line.lower()
        for marker in self.markers:
            _, match, behind = low.rpartition(marker.lower())
            if match and behind.strip(AROUND) and (not marker.endswith("{") or boxes(line)):
                return True
        return False

    def _result(self) -> str:
        """The text that the calculator appends to the present line; empty if it has no result."""
        tail = self._line[-LONGEST - 3 :].rstrip(" ")  # the longest "<<", expression and "="
        _, mark, expression = tail.rpartition("<<")
        if not mark or not tail.endswith("=") or self._results >= self.max_calculations:
            return ""
        # Compute what is between the brackets and the equals sign.
        value = calculate(expression[:-1])
        if value is None:
            return ""
        self._results += 1
        self._calculations += 1
        number = format_number(value, self.decimals, self.style)
        self._skip()
        return f"{number}>>{number}" if self.style == "llm_rl" else f"{number}>>"

    def _skip(self) -> None:
        """Skip the part of the reference that the calculator has just written."""
        claimed, closed, behind = (self._rest or "").partition(">>")
        if not closed or "\n" in claimed:
            return
        self._rest = behind
        if self.style == "llm_rl" and (repeated := REPEATED.match(behind)):
            self._rest = behind[repeated.end() :]


def _calculations_right(line: str) -> bool:
    """True if the line has calculations, at most MAX_MARKS, and all are right."""
    if not 0 < line.count("<<") <= MAX_MARKS:
        return False
    marks = MARK.findall(line)
    return len(marks) == line.count("<<") and all(_equal(*mark) for mark in marks)


def _equal(expression: str, claimed: str) -> bool:
    value, result = calculate(expression), calculate(claimed)
    return value is not None and result is not None and abs(Fraction(value) - result) <= TOLERANCE
