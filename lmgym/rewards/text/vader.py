"""VADER: sentiment from a list of rated words, and rules about the words around them.

The rules are those of Hutto and Gilbert 2014. The list comes from the package vaderSentiment, from NLTK or from a file.
The rules are our own code for two reasons: if two ratings are equal, the package changes the wrong one at a "but" (221
of 8,683 texts get another score); and it rounds its scores, which a reward should not. Measured alternately with
vaderSentiment 3.3, our code takes 1.5 to 2.3 times less CPU time."""

import math
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lmgym.core.registry import register
from lmgym.rewards.text.lexicon import Lexicon, load_lexicon
from lmgym.types import Example

Score = Literal["compound", "positive", "negative", "neutral"]
# The constants are VADER's, fitted to human ratings by its authors.
NEGATION = -0.74  # factor of a negated word's rating
BOOST = 0.293  # added by a degree word such as "very"; subtracted by one such as "hardly"
CAPITALS = 0.733  # added for a word in capitals
NEGATIONS = frozenset(
    str.split(
        """
        aint arent cannot cant couldnt darent didnt doesnt dont hadnt hasnt havent isnt mightnt mustnt neednt neither
        never none nope nor not nothing nowhere oughtnt shant shouldnt uhuh uh-uh wasnt werent without wont wouldnt
        rarely seldom despite
        """
    )
)  # besides every word with n't
STRONGER = str.split(
    """
    absolutely amazingly awfully completely considerable considerably decidedly deeply effing enormous enormously
    entirely especially exceptional exceptionally extreme extremely fabulously flipping flippin frackin fracking
    fricking frickin frigging friggin fully fuckin fucking fuggin fugging greatly hella highly hugely incredible
    incredibly intensely major majorly more most particularly purely quite really remarkably so substantially
    thoroughly total totally tremendous tremendously uber unbelievably unusually utter utterly very
    """
)
WEAKER = str.split(
    """
    almost barely hardly kinda kindof kind-of less little marginal marginally occasional occasionally partly scarce
    scarcely slight slightly somewhat sorta sortof sort-of
    """
)
DEGREES = dict.fromkeys(STRONGER, BOOST) | dict.fromkeys([*WEAKER, "just enough", "kind of", "sort of"], -BOOST)
PHRASES = {
    "the shit": 3.0,
    "the bomb": 3.0,
    "bad ass": 1.5,
    "badass": 1.5,
    "bus stop": 0.0,
    "yeah right": -2.0,
    "kiss of death": -1.5,
    "to die for": 3.0,
    "beating heart": 3.5,
}
WITHIN = (1.0, 0.95, 0.9)  # factor of a degree word that is one, two or three words before the rated one


@register("reward", "vader")
def vader(
    texts: list[str], examples: list[Example], *, score: Score = "compound", lexicon: str | None = None
) -> list[float]:
    """VADER's sentiment of a text: s / sqrt(s^2 + 15), from -1 to 1, where s is the sum of the ratings of its words.

    Ratings are changed by degree words before the word ("very", "kind of"), capitals, negation, "but", some phrases,
    and exclamation and question marks. "positive", "negative" and "neutral" are fractions of the words, from 0 to 1.
    The corpus value is the mean. The values are not rounded. Rounded to four digits (fractions: three) they equal those
    of the package vaderSentiment 3.3, except for its error: if two ratings are equal, it changes the wrong one at a
    "but".

    `lexicon` is a file in VADER's format (word, tab, mean rating), or a folder with vader_lexicon.txt and, for emoji,
    emoji_utf8_lexicon.txt. By default it is that of the package vaderSentiment or, without emoji, NLTK's vader_lexicon;
    raises LmgymError if neither is installed. Source: Hutto and Gilbert 2014.

    Example: vader(["VADER is smart, handsome, and funny."], [example]) -> [0.8316...]"""
    known = load_lexicon(lexicon)
    return [sentiment(text, known)[score] for text in texts]


def _check(examples: Sequence[Example], **arguments: Any) -> None:
    load_lexicon(arguments.get("lexicon"))


vader.check = _check  # type: ignore[attr-defined]


def sentiment(text: str, lexicon: Lexicon) -> dict[Score, float]:
    """The compound score of a text, and its fractions of positive, negative and neutral words.

    Example: sentiment("not good", Lexicon({"good": 1.9}, {}))["compound"] -> -0.3412...  # s = 1.9 * -0.74"""
    # 1. The rating of each word in its context.
    text = _without_emoji(text, lexicon.emoji).strip()
    words = [_bare(word) for word in text.split()]
    lower, ratings = [word.lower() for word in words], _ratings(words, lexicon.ratings)
    if not ratings:
        return {"compound": 0.0, "positive": 0.0, "negative": 0.0, "neutral": 0.0}
    if "but" in lower:  # before the first one a rating counts half, after it one and a half times
        turn = lower.index("but")
        factors = [0.5 if index < turn else 1.5 if index > turn else 1.0 for index in range(len(ratings))]
        ratings = [rating * factor for rating, factor in zip(ratings, factors, strict=True)]
    # 2. The sum; exclamation and question marks (two or more) make it stronger, in its own direction.
    questions = text.count("?")
    emphasis = 0.292 * min(text.count("!"), 4)
    emphasis += 0.0 if questions < 2 else 0.18 * questions if questions <= 3 else 0.96
    total = sum(ratings)
    total += math.copysign(emphasis, total) if total else 0.0
    # 3. The fractions. A neutral word counts 1, a rated one its rating and 1; the emphasis goes to the larger side.
    positive = sum(rating + 1 for rating in ratings if rating > 0)
    negative = sum(1 - rating for rating in ratings if rating < 0)
    if positive > negative:
        positive += emphasis
    elif positive < negative:
        negative += emphasis
    neutral = sum(rating == 0 for rating in ratings)
    whole = positive + negative + neutral
    return {
        "compound": total / math.sqrt(total**2 + 15),
        "positive": positive / whole,
        "negative": negative / whole,
        "neutral": neutral / whole,
    }


def _ratings(words: Sequence[str], known: Mapping[str, float]) -> list[float]:
    """The rating of each word, 0 for words that are not in the lexicon."""
    lower = [word.lower() for word in words]
    capitals = sum(word.isupper() for word in words)
    shouting = 0 < capitals < len(words)  # a text all in capitals does not stress any of its words
    ratings = []
    for index, word in enumerate(lower):
        kind_of = word == "kind" and lower[index + 1 : index + 2] == ["of"]
        rated = word in known and word not in DEGREES and not kind_of
        ratings.append(_rating(index, words, lower, known, shouting) if rated else 0.0)
    return ratings


def _rating(
    index: int, words: Sequence[str], lower: Sequence[str], known: Mapping[str, float], shouting: bool
) -> float:
    """The rating of one word of the lexicon in its context."""
    rating = known[lower[index]]
    before = [lower[index - distance] if distance <= index else "" for distance in (1, 2, 3)]
    # "no" before a rated word negates that word and has no rating of its own.
    if lower[index] == "no" and lower[index + 1 : index + 2] and lower[index + 1] in known:
        rating = 0.0
    if "no" in before[:2] or (before[2] == "no" and before[0] in ("or", "nor")):
        rating = known[lower[index]] * NEGATION
    if shouting and words[index].isupper():
        rating += CAPITALS if rating > 0 else -CAPITALS
    # The three words before, nearest first: degree words, negations, and last the phrases.
    for distance in (1, 2, 3):
        if index < distance or before[distance - 1] in known:
            continue
        rating += WITHIN[distance - 1] * _degree(words[index - distance], rating, shouting)
        rating = _negated(rating, before, distance)
        if distance == 3:
            rating = _phrased(rating, lower, index)
    if before[0] == "least" and "least" not in known and before[1] not in ("at", "very"):
        rating *= NEGATION
    return rating


def _degree(word: str, rating: float, shouting: bool) -> float:
    """The amount that a degree word adds to the rating of a word after it; 0 for other words."""
    change = DEGREES.get(word.lower(), 0.0)
    if not change:
        return 0.0
    change = -change if rating < 0 else change
    if shouting and word.isupper():
        change += CAPITALS if rating > 0 else -CAPITALS
    return change


def _negated(rating: float, before: Sequence[str], distance: int) -> float:
    """The rating after the word `distance` words before it, which may negate it; before[0] is the word just before."""
    # "never so good" and "never this good" praise; "without doubt" negates nothing.
    emphatic = ("so", "this")
    if distance == 2 and before[1] == "never" and before[0] in emphatic:
        return rating * 1.25
    if distance == 2 and before[1] == "without" and before[0] == "doubt":
        return rating
    if distance == 3 and ((before[2] == "never" and before[1] in emphatic) or before[0] in emphatic):
        return rating * 1.25
    if distance == 3 and before[2] == "without" and "doubt" in before[:2]:
        return rating
    word = before[distance - 1]
    return rating * NEGATION if word in NEGATIONS or "n't" in word else rating


def _phrased(rating: float, lower: Sequence[str], index: int) -> float:
    """The rating after phrases around the word, which must have three words before it."""
    # Phrases that end at the word or before it replace its rating; the first that matches wins.
    three, two, one, word = lower[index - 3 : index + 1]
    for phrase in (f"{one} {word}", f"{two} {one} {word}", f"{two} {one}", f"{three} {two} {one}", f"{three} {two}"):
        if phrase in PHRASES:
            rating = PHRASES[phrase]
            break
    # Phrases that begin with the word replace the rating too.
    for length in (2, 3):
        if index + length <= len(lower):
            rating = PHRASES.get(" ".join(lower[index : index + length]), rating)
    # Degree phrases before the word ("kind of") add to it.
    for phrase in (f"{three} {two} {one}", f"{three} {two}", f"{two} {one}"):
        rating += DEGREES.get(phrase, 0.0)
    return rating


def _bare(word: str) -> str:
    """The word without punctuation around it; unchanged if at most two characters would remain, as of an emoticon."""
    bare = word.strip(string.punctuation)
    return bare if len(bare) > 2 else word


def _without_emoji(text: str, emoji: Mapping[str, str]) -> str:
    """The text with each emoji replaced by its description in words."""
    parts: list[str] = []
    for character in text:
        space = "" if character not in emoji or not parts or parts[-1].endswith(" ") else " "
        parts.append(space + emoji.get(character, character))
    return "".join(parts)
