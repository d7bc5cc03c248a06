"""Rewards for CommonGen: sentences that must use the concepts in the examples' `meta["concepts"]`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.text.meteor import meteor, meteor_stem
from lmgym.rewards.text.references import reference_check, references_of, stem
from lmgym.types import Example

WORD = re.compile(r"[^\W_]+")


@register("reward", "common_gen_repeat_penalty")
def common_gen_repeat_penalty(
    texts: list[str], examples: list[Example], *, separator: str = " ", prefix: str = "generate a sentence with: "
) -> list[float]:
    """-1 if the text repeats a part of the prompt, else 0. Parts are: all concepts joined by `separator`, the `prefix`,
    "generate" and "sentence"; case is ignored.

    Source: RL4LMs, which reads the concepts from the prompt, between the prefix and the last character. Its batched
    version has the same values (but returns too short a list if an answer is unfinished).

    Raises LmgymError for an example without concepts.

    Example: common_gen_repeat_penalty(["Dog run.", "A dog can run."], [example, example])  # concepts: dog, run
    -> [-1.0, 0.0]"""
    values = []
    for text, concepts in zip(texts, _concepts("common_gen_repeat_penalty", examples), strict=True):
        parts = (separator.join(concepts).lower(), prefix.lower(), "generate", "sentence")
        values.append(-float(any(part in text.lower() for part in parts)))
    return values


@register("reward", "concept_coverage")
def concept_coverage(texts: list[str], examples: list[Example]) -> list[float]:
    """Fraction of the concepts that occur in the text, from 0 to 1. A concept occurs if a word has its Porter stem:
    "dogs" counts for "dog", "stood" does not count for "stand" (CommonGen's own script compares lemmas, which needs a
    model). The corpus value is the mean. Source: Lin et al. 2020, coverage. Extra `metrics`.

    Raises LmgymError for an example without concepts.

    Example: concept_coverage(["Two dogs sat."], [example]) -> [0.5]  # concepts: dog, run"""
    pairs = zip(_missing("concept_coverage", texts, examples), examples, strict=True)
    return [1.0 - len(absent) / len(example.meta["concepts"]) for absent, example in pairs]


@register("reward", "common_gen_preference")
def common_gen_preference(
    texts: list[str],
    examples: list[Example],
    *,
    preference: str,
    preference_arguments: Mapping[str, Any] | None = None,
    meteor_coefficient: float = 0.5,
    concept_penalty: float = 0.5,
    synonyms: bool = True,
) -> list[float]:
    """c * METEOR + p / (1 + k * missing). p is the value of another reward, the probability (0 to 1) that people prefer
    the text; missing is the number of concepts that are not in the text; c is `meteor_coefficient` and k
    `concept_penalty`.

    `preference` names that other reward (or "module:function"), and `preference_arguments` are its arguments. Without
    `synonyms` METEOR is meteor_stem. Source: RL4LMs, common_gen_preference_model, where a T5 of 11 billion parameters
    gives p.

    Raises LmgymError for an example without references or concepts.

    Example: common_gen_preference(texts, examples, preference="my_module:liked")  # METEOR 0.3, p 0.8, none missing
    -> [0.95]"""
    preferences = registry.get("reward", preference)(texts, examples, **(preference_arguments or {}))
    missing = _missing("common_gen_preference", texts, examples)
    meteors = (meteor if synonyms else meteor_stem)(texts, examples)
    return [
        meteor_coefficient * score + float(p) / (1 + concept_penalty * len(absent))
        for score, p, absent in zip(meteors, preferences, missing, strict=True)
    ]


def _check_preference(examples: Sequence[Example], **arguments: Any) -> None:
    function = registry.get("reward", arguments["preference"])
    if hasattr(function, "check"):
        function.check(examples, **(arguments.get("preference_arguments") or {}))
    if arguments.get("synonyms", True):
        meteor.check(examples)  # type: ignore[attr-defined]
    _concepts("common_gen_preference", examples)
    references_of("common_gen_preference", examples)


def _concepts(reward: str, examples: Sequence[Example]) -> list[Sequence[str]]:
    """The concepts of each example. Raises LmgymError for an example without any."""
    for example in examples:
        concepts = example.meta.get("concepts")
        if not isinstance(concepts, list | tuple) or not concepts or not all(isinstance(c, str) for c in concepts):
            raise LmgymError(
                f"reward '{reward}' needs meta['concepts'], a list of words, and that of example '{example.id}' is "
                f"{concepts!r}"
            )
    return [example.meta["concepts"] for example in examples]


def _missing(reward: str, texts: Sequence[str], examples: Sequence[Example]) -> list[list[str]]:
    """The concepts that are not in each text."""
    present = [_stems(text) for text in texts]
    pairs = zip(present, _concepts(reward, examples), strict=True)
    return [[concept for concept in concepts if not _stems(concept) <= stems] for stems, concepts in pairs]


def _stems(text: str) -> set[str]:
    return {stem(word) for word in WORD.findall(text.lower())}


common_gen_repeat_penalty.check = reference_check("common_gen_repeat_penalty", read=_concepts)  # type: ignore[attr-defined]
concept_coverage.check = reference_check("concept_coverage", "nltk", read=_concepts)  # type: ignore[attr-defined]
common_gen_preference.check = _check_preference  # type: ignore[attr-defined]
