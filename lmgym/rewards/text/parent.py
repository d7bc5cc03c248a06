"""PARENT: compares a text about a table with its references and with the table itself."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmgym.core.constraints import Share
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.text.bleu import split_13a
from lmgym.rewards.text.references import grams, reference_check, references_of
from lmgym.rewards.text.rouge import common_length
from lmgym.types import Example

Part = Literal["precision", "recall", "f"]
Words = list[str]
ORDER = 4
SMALL = 1e-5  # replaces a precision or recall of 0, as in the original


@dataclass(frozen=True)
class Table:
    """The words of a table's values. `words`: all that a text may mention. `entries`: the values that it should
    mention, each as a list of words.

    Example: Table(words=frozenset({"michael", "dahlquist", "drummer"}), entries=(["michael", "dahlquist"],))"""

    words: frozenset[str]
    entries: tuple[Words, ...]


@register("reward", "parent")
def parent(
    texts: list[str], examples: list[Example], *, part: Part = "f", table_weight: Share | None = None
) -> list[float]:
    """PARENT, from 0 to 1: F1 (or precision or recall) of n-grams, n = 1..4, that also accepts words from the table.

    Precision: an n-gram of the text that is in the reference counts 1; any other counts the fraction of its words that
    are in the table. Recall: R_reference^(1 - w) * R_table^w. R_reference is the recall of the reference's n-grams,
    each weighted by the fraction of its words that are in the table. R_table is the mean over the table's entries of
    their longest common subsequence with the text, as a fraction of the entry. w is `table_weight`. By default it is 1
    minus the same mean for the reference: the more of the table the reference covers, the more the reference counts,
    as in the paper and ToTTo's script (Google's first script: 0.5). The reference with the best F1 counts; the corpus
    value is the mean.

    The table is the example's meta["table"]: pairs (attribute, value) or triples (head, relation, tail). Or it is
    meta["raw_table"], in the format of ToTTo's files: then precision accepts all cells, the titles and the section's
    text; recall expects the highlighted cells and the titles. Texts are split as for BLEU (13a), in lower case.
    Sources: Dhingra et al. 2019; RL4LMs' `parent`, which first runs a Perl script that joins marks to words.

    Extra `metrics`. Raises LmgymError for an example without references or without a table.

    Example:
        >>> table = [("name", "Michael Dahlquist"), ("occupation", "drummer")]
        >>> example = Example("a/0", "?", ("michael dahlquist was an american drummer",), {"table": table})
        >>> parent(["michael dahlquist was a drummer"], [example], table_weight=0.5)
        [0.31225200802825065]
    """
    if table_weight is not None and not 0 <= table_weight <= 1:
        raise LmgymError(f"table_weight of PARENT must be from 0 to 1, not {table_weight}")
    tables: dict[int, Table] = {}  # by id: the answers of a group share one example object
    values = []
    for text, example, references in zip(texts, examples, references_of("parent", examples), strict=True):
        if id(example) not in tables:
            tables[id(example)] = _table(example)
        answer = _split(text)
        scores = [_parent(answer, _split(reference), tables[id(example)], table_weight) for reference in references]
        values.append(max(scores, key=lambda score: score["f"])[part])
    return values


def _check(examples: Sequence[Example], **arguments: Any) -> None:
    reference_check("parent", "sacrebleu")(examples)
    for example in examples:
        _table(example)


parent.check = _check  # type: ignore[attr-defined]


def totto_tables(raw: Mapping[str, Any]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Two lists of pairs (attribute, value) from a ToTTo table: everything, which precision accepts; and the
    highlighted cells and the titles, which recall expects.

    Example: raw has the keys table (rows of cells), highlighted_cells ([[row, column], ...]), table_page_title,
    table_section_title and table_section_text:
        >>> totto_tables(raw)
        ([('header', 'Year'), ('cell', '1998'), ('page_title', 'Films')], [('cell', '1998'), ('page_title', 'Films')])
    """
    rows = raw["table"]
    highlighted = [rows[row][column] for row, column in raw["highlighted_cells"]]
    titles = [(name.removeprefix("table_"), raw[name]) for name in ("table_page_title", "table_section_title")]
    section = [("section_text", raw["table_section_text"])]

    def pairs(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        return [("header" if cell["is_header"] else "cell", cell["value"].strip()) for cell in cells]

    accepted = [*pairs([cell for row in rows for cell in row]), *titles, *section]
    expected = [*pairs(highlighted), *titles]
    return [pair for pair in accepted if pair[1]], [pair for pair in expected if pair[1]]


def _parent(text: Words, reference: Words, table: Table, table_weight: float | None) -> dict[Part, float]:
    """Precision, recall and F1 of a text with one reference."""
    # 1. Precision and recall of the n-grams of each order.
    both = [(grams(text, n), grams(reference, n)) for n in range(1, ORDER + 1)]
    precisions, recalls = ([measure(*pair, table) for pair in both] for measure in (_gram_precision, _gram_recall))
    # 2. Geometric means. Order 1 keeps its 0: a text without any right word has precision 0.
    precision = _geometric([precisions[0], *(value or SMALL for value in precisions[1:])])
    of_reference = _geometric([recalls[0], *(value or SMALL for value in recalls[1:])]) or SMALL
    # 3. Recall of the table, and its weight.
    of_table = _entry_recall(table.entries, text) or SMALL
    weight = 1.0 - _entry_recall(table.entries, reference) if table_weight is None else table_weight
    recall = of_reference ** (1 - weight) * of_table**weight
    return {
        "precision": precision,
        "recall": recall,
        "f": 2 * precision * recall / (precision + recall + 1e-8),  # 1e-8 avoids 0 / 0, as in the original
    }


def _gram_precision(text: Counter[tuple[str, ...]], reference: Counter[tuple[str, ...]], table: Table) -> float:
    right = 0.0
    for gram, count in text.items():
        common = min(count, reference[gram])
        right += common + (count - common) * _in_table(gram, table)
    return right / text.total() if text else 0.0


def _gram_recall(text: Counter[tuple[str, ...]], reference: Counter[tuple[str, ...]], table: Table) -> float:
    total = matched = 0.0
    for gram, count in reference.items():
        weight = _in_table(gram, table)
        total += count * weight
        matched += min(count, text[gram]) * weight
    return matched / total if total else 1.0  # no word of the reference is in the table


def _in_table(gram: Sequence[str], table: Table) -> float:
    """Fraction of the words that are in the table."""
    return sum(word in table.words for word in gram) / len(gram)


def _entry_recall(entries: Sequence[Words], text: Words) -> float:
    """Mean over the entries of the fraction of its words that the text has in the same order."""
    return sum(common_length(entry, text) / len(entry) for entry in entries) / len(entries)


def _geometric(values: Sequence[float]) -> float:
    return math.prod(values) ** (1 / len(values))


def _split(text: str) -> Words:
    return split_13a(text.strip().lower(), "parent")


def _table(example: Example) -> Table:
    """The table of an example. Raises LmgymError if it has none that can be read, or one without words."""
    try:
        if "raw_table" in example.meta:
            accepted, expected = totto_tables(example.meta["raw_table"])
        else:
            accepted = expected = [tuple(entry) for entry in example.meta["table"]]
        words = [_entry(entry) for entry in accepted]
        entries = [entry for entry in map(_entry, expected) if entry]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise LmgymError(
            "reward 'parent' needs meta['table'] (pairs of attribute and value, or triples of head, relation and "
            f"tail) or meta['raw_table'] (as in ToTTo), and example '{example.id}' has none that can be read: {error!r}"
        ) from error
    if not entries:
        raise LmgymError(f"reward 'parent': the table of example '{example.id}' has no words")
    return Table(frozenset(word for entry in words for word in entry), tuple(entries))


def _entry(entry: Sequence[str]) -> Words:
    """The words of a pair's value, or of a triple's head and tail."""
    if len(entry) not in (2, 3):
        raise ValueError(f"an entry of {len(entry)}")
    return _split(entry[1]) if len(entry) == 2 else [*_split(entry[0]), *_split(entry[2])]
