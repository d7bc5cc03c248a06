"""Rows of data sets: which files hold a split, and their rows, in the formats that data sets have."""

from typing import Any

Row = tuple[str, dict[str, Any]]
"""Where a row stands and its columns: ("train.jsonl:12", {"prompt": "2+2="}), ("train.parquet: row 12", {...})."""
