"""`imdb`, `imdb_seq2seq`: continue a film review with positive sentiment (IMDB, Maas et al. 2011): 25,000 train, 25,000
test."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.core.files import read_text
from lmgym.core.registry import register
from lmgym.tasks.base import MissingSplit, hash_fraction
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.cells import column, text_of
from lmgym.tasks.rows.find import split_named
from lmgym.tasks.rows.formats import rows_of
from lmgym.tasks.rows.load import load_rows
from lmgym.tasks.rows.unfit import fitting
from lmgym.tasks.sources import check_sizes, split_to_read
from lmgym.types import Example

HUB_ID = "stanfordnlp/imdb"
FOLDERS = {"neg": 0, "pos": 1}
REVIEW = re.compile(r"([0-9]+)_([0-9]+)\.txt")  # aclImdb's NUMBER_RATING.txt


@register("task", "imdb")
def imdb(
    split: str,
    path: str | Path | None = None,
    hub_id: str = HUB_ID,
    validation: float = 0.2,
    test_size: int | None = 5000,
    reference: Literal["rest", "review"] = "rest",
) -> list[Example]:
    """The prompt is the first half of a review, the reference the rest, for a causal model.

    The prompt has half of the words, rounded down; words are separated by spaces. The reference begins with the space,
    so prompt + reference is the review. With `reference: review` the reference is the whole review (RL4LMs). `meta` has
    label (0: negative, 1: positive), review, and rating (1 to 10) if the data has it.

    The reviews are ordered by a hash of their text, since both sources list all negative ones first. The fraction
    `validation` of train is held out, by a hash of the prompt. Test is the first `test_size` of its 25,000 reviews
    (None: all). No prompt of test is in train or validation.

    `path` is the original's folder aclImdb with train/pos, train/neg, test/pos and test/neg; or a folder, a pattern
    with {split} or a file of rows {"text", "label"} (.parquet, .jsonl, .json, .csv). If the file's name names no split,
    the rows may have a column `split`. Without `path` the data comes from the Hugging Face Hub. Source: RL4LMs, `imdb`.

    Example:
        >>> load_task("imdb", "train", path="aclImdb")[0].prompt      # "This movie was really good and fun"
        'This movie was'
    """
    examples = _split("imdb", split, path, hub_id, validation, test_size)
    texts = [example.meta["review"][0 if reference == "review" else len(example.prompt) :] for example in examples]
    return [_with_reference(example, text) for example, text in zip(examples, texts, strict=True)]


@register("task", "imdb_seq2seq")
def imdb_seq2seq(
    split: str,
    path: str | Path | None = None,
    hub_id: str = HUB_ID,
    validation: float = 0.2,
    test_size: int | None = 5000,
    positive_ratio: float = 1.0,
) -> list[Example]:
    """`imdb` for supervised training of an encoder-decoder model: train has positive reviews only, and the reference
    has no space at its beginning.

    `positive_ratio` keeps only the first fraction of them. The splits are those of `imdb`, so the training data of one
    task is in neither validation nor test of the other (RL4LMs' `imdb_seq2seq` shuffles again for each split, and
    trains on most of its validation data).

    Example:
        >>> load_task("imdb_seq2seq", "train", path="aclImdb")[0].references
        ('really good and fun',)
    """
    if not 0 < positive_ratio <= 1:
        raise LmgymError(f"task.positive_ratio must be above 0 and at most 1, not {positive_ratio}")
    examples = [
        _with_reference(example, example.meta["review"][len(example.prompt) + 1 :])
        for example in _split("imdb_seq2seq", split, path, hub_id, validation, test_size)
        if split != "train" or example.meta["label"] == 1
    ]
    return examples[: int(len(examples) * positive_ratio)] if split == "train" else examples


def _with_reference(example: Example, text: str) -> Example:
    return Example(example.id, example.prompt, (text,), example.meta)


def _split(
    task: str, split: str, path: str | Path | None, hub_id: str, validation: float, test_size: int | None
) -> list[Example]:
    """The reviews of a split in their final order, without references."""
    check_sizes(test_size=test_size)
    reviews = _ordered(task, split_to_read(task, split, validation), path, hub_id)
    if split == "test":
        return reviews[:test_size]
    try:
        held_out = {review.prompt for review in _ordered(task, "test", path, hub_id)}
    except MissingSplit:
        held_out = set()
    return [
        review
        for review in reviews
        if review.prompt not in held_out and (hash_fraction(str(review.prompt)) < validation) == (split == "validation")
    ]


def _ordered(task: str, part: str, path: str | Path | None, hub_id: str) -> list[Example]:
    """The reviews of the original's train or test, ordered by a hash of their text."""
    rows = _rows(task, part, None if path is None else Path(path).expanduser(), hub_id)
    reviews = fitting(rows, lambda index, row: _review(row, f"{task}/{part}/{index}"))
    return sorted(reviews, key=lambda review: hash_fraction(review.meta["review"]))


def _rows(task: str, part: str, path: Path | None, hub_id: str) -> Iterator[Row]:
    if path is not None and (path / "train" / "pos").is_dir():
        yield from _original(task, path / part)
    elif path is not None and path.is_file() and split_named(path) is None:  # one file for all splits
        rows = [row for row in rows_of(path) if row[1].get("split", "train") == part]
        if not rows:
            raise MissingSplit(f"task '{task}' has no split '{part}': no row of {path} has it in a column 'split'")
        yield from rows
    else:
        yield from load_rows(task, part, path, hub_id)


def _original(task: str, folder: Path) -> Iterator[Row]:
    """The reviews in the original's folder, one file each, in the order of their numbers."""
    if not folder.is_dir():
        raise MissingSplit(f"task '{task}' has no split '{folder.name}': there is no folder {folder}")
    for name, label in FOLDERS.items():
        files = [(REVIEW.fullmatch(file.name), file) for file in (folder / name).glob("*.txt")]
        named = [(int(match[1]), int(match[2]), file) for match, file in files if match]
        if not named:
            raise LmgymError(f"task.path: in {folder / name} there is no review named NUMBER_RATING.txt, as 200_8.txt")
        for _, rating, file in sorted(named):
            try:
                text = read_text(file)
            except UnicodeDecodeError as error:
                raise LmgymError(f"{file}: not UTF-8 (byte {error.start + 1})") from error
            except OSError as error:
                raise LmgymError(f"cannot read {file}: {error.strerror}") from error
            yield str(file), {"text": text, "label": label, "rating": rating}


def _review(row: Row, id: str) -> Example:
    where, values = row
    text = text_of(row, ["text"])
    words = text.split(" ")
    prompt = " ".join(words[: len(words) // 2])
    if not prompt:
        raise LmgymError(f"{where}: column 'text' must hold a review of two words or more, got {text!r}")
    label = column(values, "label", where)
    if label in ("0", "1"):  # a .csv holds texts only
        label = int(label)
    if isinstance(label, bool) or label not in (0, 1):
        raise LmgymError(f"{where}: column 'label' must hold 0 (negative) or 1 (positive), got {label!r}")
    meta: dict[str, Any] = {"label": label, "review": text}
    return Example(id, prompt, (), meta | {"rating": values["rating"]} if "rating" in values else meta)
