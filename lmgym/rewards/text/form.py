"""Rewards for the form of a text: words, length, pattern. Only `exact_match` needs references."""

import re
from functools import lru_cache
from typing import Literal

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.base import episodes as of_episodes
from lmgym.rewards.base import linear_time
from lmgym.rewards.text.references import answers_of, reference_check
from lmgym.types import Episode, Example

Letters = Literal["ascii", "unicode"]
WORD = {"ascii": re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)?"), "unicode": re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")}


def split_words(text: str, letters: Letters = "ascii") -> list[str]:
    """The words of a text in lower case: letters, with at most one apostrophe inside.

    "ascii" splits a word at every letter other than A-Z (as NanoRL does); "unicode" accepts all alphabets.

    Example: split_words("Don't stop, 7 caf\\u00e9s"), split_words("caf\\u00e9s", "unicode")
    -> (["don't", 'stop', 'caf', 's'], ['caf\\u00e9s'])"""
    return [word.lower() for word in WORD[letters].findall(text)]


@register("reward", "lexical_richness")
@linear_time
def lexical_richness(
    texts: list[str],
    examples: list[Example],
    *,
    brevity_scale: float = 0.0,
    target: int = 80,
    letters: Letters = "ascii",
) -> list[float]:
    """Type-token ratio minus a penalty: distinct / max(n, 1) - brevity_scale * max(0, (target - n) / target).

    n is the number of words. Source: NanoRL, whose `--brevity-penalty-scale` is `brevity_scale` and whose
    target is 80.

    Example: lexical_richness(["The cat sat on the mat."], [example], brevity_scale=0.5)  # 5/6 - 0.5 * 74/80
    -> [0.37083333333333335]"""
    _check_positive("lexical_richness", "target", target)
    values = []
    for text in texts:
        own = split_words(text, letters)
        penalty = max(0.0, (target - len(own)) / target)
        values.append(len(set(own)) / max(len(own), 1) - brevity_scale * penalty)
    return values


@register("reward", "type_token_ratio")
@linear_time
def type_token_ratio(texts: list[str], examples: list[Example], *, letters: Letters = "ascii") -> list[float]:
    """Number of distinct words / number of words; 0 for a text without words.

    Example: type_token_ratio(["Don't stop, don't STOP!"], [example]) -> [0.5]"""
    return lexical_richness(texts, examples, letters=letters)


@register("reward", "words")
@linear_time
def words(texts: list[str], examples: list[Example], *, letters: Letters = "ascii") -> list[float]:
    """Number of words; meant as a metric (weight 0).

    Example: words(["The cat sat."], [example]) -> [3.0]"""
    return [float(len(split_words(text, letters))) for text in texts]


@register("reward", "length")
@linear_time
def length(
    texts: list[str],
    examples: list[Example],
    *,
    target: int = 100,
    unit: Literal["words", "characters"] = "words",
    letters: Letters = "ascii",
) -> list[float]:
    """1 at the target length, falling linearly to 0 at length 0 and at twice the target:
    max(0, 1 - |n - target| / target).

    Example: length(["a b c"], [example], target=4) -> [0.75]"""
    _check_positive("length", "target", target)
    counts = [len(text) if unit == "characters" else len(split_words(text, letters)) for text in texts]
    return [max(0.0, 1.0 - abs(count - target) / target) for count in counts]


@register("reward", "regex")
def regex(texts: list[str], examples: list[Example], *, pattern: str, full: bool = False) -> list[float]:
    """1 if the regular expression (Python's `re`) occurs in the text; with `full`, if it matches the whole text.

    Example: regex(["#### 18", "18"], examples, pattern="^#### -?[0-9]+$") -> [1.0, 0.0]"""
    compiled = _compiled(pattern)
    match = compiled.fullmatch if full else compiled.search
    return [float(match(text) is not None) for text in texts]


@register("reward", "exact_match")
@linear_time
def exact_match(texts: list[str], examples: list[Example]) -> list[float]:
    """1 if the text equals one of the references; white space around both is ignored.

    Raises LmgymError for an example without references, and for an empty reference.

    Example: exact_match([" 12\\n"], [Example("a/0", "7+5=", references=(" 12",))]) -> [1.0]"""
    answers = [{one.strip() for one in references} for references in answers_of("exact_match", examples)]
    return [float(text.strip() in valid) for text, valid in zip(texts, answers, strict=True)]


exact_match.check = reference_check("exact_match", read=answers_of)  # type: ignore[attr-defined]


@register("reward", "overlong")
@linear_time
@of_episodes
def overlong(episodes: list[Episode], *, max_tokens: int, buffer: int) -> list[float]:
    """0 up to max_tokens - buffer sampled tokens, then falling linearly to -1 at max_tokens and beyond.

    This is DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13, with 20,480 and 4,096). All turns of an episode
    count, and so do end-of-sequence tokens. If max_tokens equals sampling.max_new_tokens, a truncated answer gets -1.

    Example: answers of 70, 90 and 100 tokens: overlong(episodes, max_tokens=100, buffer=20) -> [0.0, -0.5, -1.0]"""
    _check_positive("overlong", "buffer", buffer)
    if buffer > max_tokens:
        raise LmgymError(f"key 'rewards.overlong.buffer' is {buffer}, more than max_tokens ({max_tokens})")
    lengths = [sum(len(turn.action_ids) for turn in episode.turns) for episode in episodes]
    return [min(0.0, max(-1.0, (max_tokens - buffer - length) / buffer)) for length in lengths]


@register("reward", "missing_eos")
@linear_time
@of_episodes
def missing_eos(episodes: list[Episode]) -> list[float]:
    """1 if the last turn has no end of sequence: it was cut off, or a stop string has ended it. With a weight of -1 it
    is TRL's `missing_eos_penalty: 1`.

    Example: an answer that ended, and one that was cut off: missing_eos(episodes) -> [0.0, 1.0]"""
    return [float(not episode.turns or episode.turns[-1].stop != "eos") for episode in episodes]


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise LmgymError(f"key 'rewards.regex.pattern': {error.msg} at position {error.pos} of {pattern!r}") from error


def _check_positive(reward: str, name: str, value: float) -> None:
    if value <= 0:
        raise LmgymError(f"key 'rewards.{reward}.{name}' must be above 0, not {value}")
