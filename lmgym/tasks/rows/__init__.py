"""Rows of data sets: which files hold a split, and their rows, in the formats that data sets have."""

from typing import Any

from lmgym.core.errors import LmgymError

Row = tuple[str, dict[str, Any]]
"""The place of a row in its file, and its columns: ("train.jsonl:12", {"prompt": "2+2="}) or, in a table,
("train.parquet: row 12", {...})."""


class MissingSplit(LmgymError):
    """The task does not have the requested split. `check_task` skips such a split.

    Example: raise MissingSplit("riddles: there is no split 'test'; it has train")"""
