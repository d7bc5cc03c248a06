"""Record what pycocoevalcap makes of CIDEr and vaderSentiment of its rules, for tests that need neither.

A developer runs it in an environment of its own, with the CommonGen data where it is at hand, and it replaces
metrics.json:

    python3 -m venv metrics && metrics/bin/pip install pycocoevalcap==1.2 vaderSentiment==3.3.2 numpy
    metrics/bin/python tests/golden/record_metrics.py ../shared/data/commongen/commongen.dev.jsonl

The texts and ratings in it are made up for the purpose. Of CommonGen it holds numbers only: sentence 1 of each example
scored against the others, in lower case and without punctuation.
"""

import importlib.metadata
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from pycocoevalcap.cider.cider import Cider
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

RECORD = Path(__file__).with_name("metrics.json")
CAPTIONS = [
    ("a dog runs over the wet grass", ["a dog runs over the grass", "the brown dog is running on wet grass"]),
    ("two men play chess", ["two old men play a game of chess in the park"]),
    ("a woman reads", ["a woman reads a book", "someone reads", "the woman is reading a long book in bed"]),
    ("the the the the the", ["the cat sleeps on the mat", "a cat on a mat"]),
    ("", ["nothing is said here"]),
    ("a boat sails on the lake at night under the stars", ["a boat sails on the lake at night under the stars"]),
    ("children throw snow", ["a boat sails on the lake", "the dog sleeps"]),
]
RATINGS = {
    "good": 1.9,
    "great": 3.1,
    "fine": 0.8,
    "bad": -2.5,
    "awful": -2.0,
    "ass": -2.5,
    "bomb": -2.2,
    "die": -2.9,
    "no": -1.2,
    "doubt": -1.5,
    "yeah": 1.2,
    "right": 0.5,
    "shit": -2.6,
    "compelling": 2.1,
    ":)": 2.0,
    "smiling": 2.0,
}
EMOJI = {"\U0001f600": "smiling face", "\U0001f480": "skull"}
SENTENCES = [
    "",
    "The chair is by the door.",
    "The food was good.",
    "The food was good!",
    "The food was good!!!!!!",
    "Was the food good??",
    "Was the food bad????",
    "The food was GOOD.",
    "THE FOOD WAS GOOD.",
    "The food was very good.",
    "The food was VERY GOOD and the wine was BAD!",
    "The food was barely good.",
    "It was really quite good.",
    "It was extremely, as they say, bad.",
    "The food was not good.",
    "The food isn't very good.",
    "It was never good there.",
    "It was never so good.",
    "We have never had this good a meal.",
    "Without doubt good food.",
    "Without a doubt, good food.",
    "Nothing was really good.",
    "The food was kind of good.",
    "The man was kind of the good sort.",
    "It was a sort of good meal.",
    "It is just enough good for us.",
    "The food was good, but the room was awful.",
    "The food was great but the wine was bad and the room fine.",
    "That meal was the bomb and the rest was fine.",
    "Well, this cook is the shit.",
    "On the whole quite a bad ass cook.",
    "Yeah right, good food.",
    "The food was to die for, they say.",
    "They had no good food.",
    "There is no food and no doubt.",
    "No.",
    "They had no wine or good food.",
    "It is one of the least compelling meals.",
    "It is at least compelling food.",
    "Least good of all.",
    "It was so good, and this good.",
    "I am :) today",
    "Good\U0001f600food \U0001f480\U0001f600",
    "  good   bad  ",
]


def plain(text: str) -> str:
    return re.sub(r"[^\w\s]", "", text.lower())


def cider(pairs: list[tuple[str, list[str]]]) -> tuple[float, list[float]]:
    texts = {number: [text] for number, (text, _) in enumerate(pairs)}
    references = {number: wanted for number, (_, wanted) in enumerate(pairs)}
    mean, values = Cider().compute_score(references, texts)
    return float(mean), [float(value) for value in values]


def sentiments() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        words, emoji = Path(folder, "words.txt"), Path(folder, "emoji.txt")
        words.write_text("".join(f"{word}\t{rating}\t0\t[]\n" for word, rating in RATINGS.items()), encoding="utf-8")
        emoji.write_text("".join(f"{one}\t{meaning}\n" for one, meaning in EMOJI.items()), encoding="utf-8")
        analyser = SentimentIntensityAnalyzer(str(words), str(emoji))
    return [{"text": text, **analyser.polarity_scores(text)} for text in SENTENCES]


def main() -> None:
    record: dict[str, Any] = {name: importlib.metadata.version(name) for name in ("pycocoevalcap", "vaderSentiment")}
    mean, values = cider(CAPTIONS)
    rows = [
        {"text": text, "references": wanted, "value": value}
        for (text, wanted), value in zip(CAPTIONS, values, strict=True)
    ]
    record["cider"] = {"mean": mean, "captions": rows}
    if len(sys.argv) > 1:
        scenes = [json.loads(line)["scene"] for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
        pairs = [(plain(scene[0]), list(map(plain, scene[1:]))) for scene in scenes if len(scene) > 1]
        mean, values = cider(pairs)
        record["common_gen"] = {"mean": mean, "examples": len(pairs), "every_tenth": values[::10]}
    record["vader"] = {"ratings": RATINGS, "emoji": EMOJI, "sentences": sentiments()}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
