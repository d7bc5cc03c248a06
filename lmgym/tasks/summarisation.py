"""Summarisation of news. `cnn_daily_mail`: CNN / Daily Mail (See et al. 2017, arXiv 1704.04368). `xsum`: XSum (Narayan
et al. 2018, arXiv 1808.08745)."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lmgym.core.registry import register
from lmgym.tasks.base import prompt_writer
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.cells import text_of
from lmgym.tasks.rows.load import load_rows
from lmgym.tasks.rows.unfit import fitting
from lmgym.tasks.sources import check_sizes, disjoint
from lmgym.types import Example


def _shortened(article: str, arguments: Mapping[str, Any]) -> str:
    """The prompt of an article."""
    count = arguments["truncate_article"]
    return article if count is None else first_words(article, count)


@register("task", "cnn_daily_mail")
@prompt_writer(_shortened)
def cnn_daily_mail(
    split: str,
    path: str | Path | None = None,
    hub_id: str = "abisee/cnn_dailymail",
    truncate_article: int | None = None,
    max_size: int | None = None,
) -> list[Example]:
    """The prompt is the article, the reference its highlights, one per line. 287,113 for training, 13,368 for
    validation, 11,490 for test.

    `truncate_article` keeps only the first so many words, split at white space (RL4LMs splits with NLTK and joins the
    tokens with spaces). `max_size` reads only the first so many rows; the option `limit` reads all. Add an instruction
    ("Summarize: " or " TL;DR:") with the options prompt_prefix and prompt_suffix. `meta` has the row's id as
    article_id.

    `path` is a folder, a pattern with {split} or a file (.parquet, .jsonl, .json, .csv) of rows {"article",
    "highlights", "id"}. Without `path` the data comes from the Hugging Face Hub, version 3.0.0. Articles of test are
    removed from validation, and articles of both from train. Source: RL4LMs, `cnn_daily_mail`.

    Example:
        >>> load_task("cnn_daily_mail", "validation", path="cnn", truncate_article=400, prompt_prefix="Summarize: ")
    """
    source = ("cnn_daily_mail", path, hub_id, "3.0.0")
    return _summaries(split, source, ["article"], ["highlights"], truncate_article, max_size)


@register("task", "xsum")
@prompt_writer(_shortened)
def xsum(
    split: str,
    path: str | Path | None = None,
    hub_id: str = "EdinburghNLP/xsum@refs/convert/parquet",
    truncate_article: int | None = None,
    max_size: int | None = None,
) -> list[Example]:
    """The prompt is a BBC article, the reference its one-sentence summary (the article's original first sentence).
    204,045 for training, 11,332 for validation, 11,334 for test.

    Arguments are those of `cnn_daily_mail`. Rows are {"document", "summary", "id"}; in GEM "summary" is called
    "target". For "TL;DR:" after the article (RL4LMs) set prompt_suffix.

    Example:
        >>> load_task("xsum", "test", path="xsum/{split}.jsonl", prompt_suffix="TL;DR:")
    """
    source = ("xsum", path, hub_id, None)
    return _summaries(split, source, ["document"], ["summary", "target"], truncate_article, max_size)


def first_words(text: str, count: int) -> str:
    """The first `count` words of a text, with the white space between them unchanged.

    Example: first_words("Two  women\\nmeet again.", 3) -> 'Two  women\\nmeet'"""
    parts = text.split(maxsplit=count)
    return text if len(parts) <= count else text[: -len(parts[-1])].rstrip()


def _summaries(
    split: str,
    source: tuple[str, str | Path | None, str, str | None],
    article: Sequence[str],
    summary: Sequence[str],
    truncate_article: int | None,
    max_size: int | None,
) -> list[Example]:
    task, path, hub_id, config = source
    check_sizes(truncate_article=truncate_article, max_size=max_size)

    def examples_of(part: str) -> Iterator[Example]:
        def example(index: int, row: Row) -> Example:
            text = text_of(row, article)
            meta: dict[str, Any] = {"article_id": row[1]["id"]} if "id" in row[1] else {}
            prompt = text if truncate_article is None else first_words(text, truncate_article)
            return Example(f"{task}/{part}/{index}", prompt, (text_of(row, summary),), meta)

        rows = load_rows(task, part, path, hub_id, config)
        return fitting(islice(rows, max_size if part == split else None), example)

    return disjoint(task, split, examples_of)
