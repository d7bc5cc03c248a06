"""What test_reward_options.py has worker processes score with: they import this file, and no torch."""

import os
import signal
import sys
import time
import zlib

from lmgym.types import Episode, Example


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


def ends(texts: list[str], examples: list[Example], *, how: str) -> list[float]:
    """Ends its process at the text "bad"."""
    for text in texts:
        if text == "bad" and how == "exit":
            os._exit(0)
        if text == "bad":
            os.kill(os.getpid(), getattr(signal, how))
    return [1.0 for _ in texts]


def swallows(texts: list[str], examples: list[Example]) -> list[float]:
    """Does not let itself be stopped."""
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            continue


def imports_torch(texts: list[str], examples: list[Example]) -> list[float]:
    try:
        import torch
    except ImportError:
        return [-1.0 for _ in texts]
    return [float(torch.tensor(len(text))) for text in texts]


def checksum(episodes: list[Episode]) -> list[float]:
    """A number of everything that an episode holds."""
    return [float(zlib.crc32(repr(episode).encode())) for episode in episodes]


def calls(texts: list[str], examples: list[Example]) -> list[float]:
    """How often it was called, in which process, and whether that has torch."""
    _calls.append(1)
    return [float(number) for number in (len(_calls), os.getpid(), "torch" in sys.modules)][: len(texts)]


def counts(texts: list[str], examples: list[Example]) -> list[float]:
    """How often it was called."""
    _calls.append(1)
    return [float(len(_calls)) for _ in texts]


_calls: list[int] = []
checksum.takes_episodes = True  # type: ignore[attr-defined]
