"""What test_reward_options.py has worker processes score with: they import this file, and no torch."""

import os

from lmgym.types import Example


def slow_or_worse(texts: list[str], examples: list[Example], *, worth: float = 1.0) -> list[float]:
    """`worth` for each word; some texts take for ever, kill their process or raise."""
    for text in texts:
        if text == "for ever":
            while True:
                pass
        if text == "crash":
            os.abort()
        if text == "raise":
            raise RuntimeError("no")
    return [worth * len(text.split()) * len(example.references) for text, example in zip(texts, examples, strict=True)]
