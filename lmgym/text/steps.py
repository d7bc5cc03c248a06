"""Answers in steps: how a text is cut into steps, and the tokens of a step. What trains and what uses a process reward
model both come here, so they read the same tokens."""

from typing import Any

from lmgym.text.chat import start_ids
from lmgym.text.control import text_ids


def split_steps(answer: str, separator: str) -> list[str]:
    """The steps of an answer: what lies between the separators, without white space around it; blank ones are none.

    Example: split_steps("3 + 4 = 7\\n\\n7 * 2 = 14\\n", "\\n") -> ['3 + 4 = 7', '7 * 2 = 14']"""
    return [step.strip() for step in answer.split(separator) if step.strip()]


def step_ids(tokenizer: Any, step: str, separator: str) -> list[int]:
    """Token ids of a step and of the separator behind it, as they stand behind a prompt or another step. Both are
    tokenized by themselves, so a step has the same ids wherever it stands. The recipe writes the separator, so it may
    hold control tokens; the step may not.

    Example: the last id is the line break, whose state judges the step:
    step_ids(builtin_tokenizer("builtin:bytes"), "7", "\\n") -> [25, 201]"""
    return [*text_ids(tokenizer, step.strip(), continued=True), *start_ids(tokenizer, separator)]
