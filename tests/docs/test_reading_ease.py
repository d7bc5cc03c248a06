"""How easy each page is to read: Flesch's reading ease, 1948, of its prose (no tables, code, links or formulas).

206.835 - 1.015 words per sentence - 84.6 syllables per word: 60 to 70 is plain English, below 30 is hard. Syllables are
groups of vowels. Names of keys and papers, which plain words cannot replace, cost a technical page some 15 points.

python tests/docs/test_reading_ease.py    prints the figure of each page, the hardest first
"""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS.parent / "README.md", *sorted(page for page in DOCS.rglob("*.md") if "log" not in page.parts)]
PAGES = [page for page in PAGES if page.name != "log.md"]
LEAST = 65.0  # of any page with enough prose to judge
ENOUGH = 100  # words


def prose(text: str) -> str:
    """The sentences of a page: no front matter, headings, tables, blocks of code or formulas, HTML.

    Example: prose("# A\\n\\nSee [this](x.md) `key`.\\n\\n    code") -> "See this key."
    """
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:\||#| {4}|<).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|\$`[^`]*`\$|\(?arXiv [\d.]+\)?", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`\n]*`", "key", text)  # a name in code is one short word, however long it is
    items = re.sub(r"\n+(?=\* |- |\d+\. )", ". ", text)  # an item of a list ends a sentence
    return " ".join(re.sub(r"\n\s*\n", ". ", items).split()).strip(" .*") + "."


def syllables(word: str) -> int:
    """Groups of vowels, less a silent e.

    Example: [syllables(word) for word in ("table", "score", "policy")] -> [2, 1, 3]
    """
    word = word.lower()
    count = len(re.findall(r"[aeiouy]+", word))
    if word.endswith("e") and not word.endswith(("le", "ee")) and count > 1:
        count -= 1
    return max(count, 1)


def reading_ease(text: str) -> tuple[float, int]:
    """Flesch's figure of a page, and its number of words."""
    said = prose(text)
    words = re.findall(r"[A-Za-z][A-Za-z'\u2019]*", said)
    sentences = [one for one in re.split(r"[.!?](?:\s|$)", said) if re.search("[A-Za-z]{2}", one)]
    if not words:
        return 100.0, 0
    ease = 206.835 - 1.015 * len(words) / len(sentences) - 84.6 * sum(map(syllables, words)) / len(words)
    return ease, len(words)


def test_the_figure_is_flesch_s() -> None:
    """Worked by hand: 6 words, 1 sentence, 6 syllables; 4 words, 1 sentence, 19 syllables."""
    assert reading_ease("The cat sat on the mat.")[0] == pytest.approx(206.835 - 1.015 * 6 - 84.6)
    hard = reading_ease("Intermediate representations facilitate generalisation.")[0]
    assert hard == pytest.approx(206.835 - 1.015 * 4 - 84.6 * (4 + 5 + 4 + 6) / 4)
    assert prose("# A\n\nSee [this](x.md) `key`.\n\n    code") == "See this key."


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS.parent).as_posix())
def test_a_page_can_be_read(page: Path) -> None:
    ease, words = reading_ease(page.read_text(encoding="utf-8"))
    assert words < ENOUGH or ease >= LEAST, f"{ease:.0f}: shorter sentences and shorter words, please"


if __name__ == "__main__":
    for (figure, count), name in sorted((reading_ease(page.read_text(encoding="utf-8")), page.name) for page in PAGES):
        print(f"{figure:5.1f} {count:5} {name}")
