"""prime-rl's reverse-text as a plug-in: a task from the lines of a text file, and its reward (docs/published.md).

    lmgym train examples/reverse_text.yaml policy.model=MODEL 'task.path="FOLDER/{split}.txt"'

Source: the environment `reverse-text` of PrimeIntellect, on verifiers: its prompt, its tags and its reward."""

import re
from difflib import SequenceMatcher
from pathlib import Path

from lmgym import Example, register
from lmgym.tasks.rows.unpacked import lines_of

ASKED = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
ANSWER = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


@register("task", "reverse_text")
def reverse_text(split: str, path: str, longest: int = 80) -> list[Example]:
    """A text file's lines, each to be written backwards. `path`: the file of a split, with {split} for its name; it may
    be packed (.gz). Empty lines, and those of more than `longest` characters, are left out.

    Example: reverse_text("train", "texts/{split}.txt.gz")"""
    return [
        Example(
            id=f"reverse_text/{place}",
            prompt=[{"role": "system", "content": ASKED}, {"role": "user", "content": line}],
            references=(f"<reversed_text>\n{line[::-1]}\n</reversed_text>",),
        )
        for place, line in lines_of(Path(path.replace("{split}", split)))
        if 0 < len(line) <= longest
    ]


@register("reward", "reversed_ratio")
def reversed_ratio(texts: list[str], examples: list[Example]) -> list[float]:
    """How alike the answer and the reversed text are, from 0 to 1: twice the number of matching characters, divided by
    the characters of both (difflib's ratio). Only what stands between the tags counts; without tags it is 0."""
    return [SequenceMatcher(None, _inside(text), _inside(example.references[0])).ratio()
            for text, example in zip(texts, examples, strict=True)]  # fmt: skip


def _inside(text: str) -> str:
    found = ANSWER.search(text)
    return found[1].strip() if found else ""
