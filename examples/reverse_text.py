"""prime-rl's reverse-text as a plug-in: a task from the lines of a text file, and its reward (docs/published.md).

    lmgym train examples/reverse_text.yaml policy.model=MODEL 'task.path="FOLDER/{split}.txt"'

Source: the environment `reverse-text` of PrimeIntellect, on verifiers: its prompt, its tags and its reward."""

import gzip
import re
from difflib import SequenceMatcher
from pathlib import Path

from lmgym import Example, register

ASKED = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
ANSWER = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


@register("task", "reverse_text")
def reverse_text(split: str, path: str, longest: int = 80) -> list[Example]:
    """A prompt for each line of at most `longest` characters of {path}, in which {split} stands for the split; a .gz
    file is unpacked. Example: reverse_text("train", "texts/{split}.txt.gz")"""
    file = Path(path.replace("{split}", split))
    packed = file.read_bytes()
    lines = (gzip.decompress(packed) if file.suffix == ".gz" else packed).decode().splitlines()
    return [
        Example(
            id=f"reverse_text/{split}/{number}",
            prompt=[{"role": "system", "content": ASKED}, {"role": "user", "content": line}],
            references=(f"<reversed_text>\n{line[::-1]}\n</reversed_text>",),
        )
        for number, line in enumerate(lines)
        if 0 < len(line) <= longest
    ]


@register("reward", "reversed_ratio")
def reversed_ratio(texts: list[str], examples: list[Example]) -> list[float]:
    """difflib's ratio, 2 x matching characters / all characters, of what stands in the tags and the reversed text; 0
    without tags."""
    return [SequenceMatcher(None, _inside(text), _inside(example.references[0])).ratio()
            for text, example in zip(texts, examples, strict=True)]  # fmt: skip


def _inside(text: str) -> str:
    found = ANSWER.search(text)
    return found[1].strip() if found else ""
