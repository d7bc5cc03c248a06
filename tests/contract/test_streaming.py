"""A jsonl task whose rows stay in their file: the same examples in the same order, in little memory."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.tasks.base import load_task
from lmgym.tasks.stream import Stream
from lmgym.tasks.streamed import FIRST, StreamedExamples
from lmgym.training.resuming.fingerprint import data_digest
from tests import runs
from tests.parity.test_resume import Interrupting, assert_equal_runs


def written(path: Path, count: int, text: str = "") -> Path:
    """Rows with a blank line here and there, behind a byte order mark."""
    rows = ({"prompt": f"{n} + 1 = ", "references": [str(n + 1)], "of": text + str(n)} for n in range(count))
    lines = [json.dumps(row) for row in rows]
    blank = ["" if n % 7 == 3 else None for n in range(count)]
    both = [one for pair in zip(lines, blank, strict=True) for one in pair if one is not None]
    path.write_text("\ufeff" + "\n".join(both) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "options",
    [
        {"test": 0.0},
        {"test": 0.3, "validation": 0.2},
        {"test": 0.0, "system_prompt": "Add.", "prompt_prefix": "Q: ", "prompt_suffix": "?"},
        {"test": 0.0, "limit": 7},
    ],
)
def test_they_are_the_same_examples_in_the_same_order(options: dict[str, Any], tmp_path: Path) -> None:
    arguments = {"path": str(written(tmp_path / "rows.jsonl", 60)), **options}
    for split in ("train", "test") if options["test"] else ("train",):
        plain = load_task("jsonl", split, **arguments)
        streamed = load_task("jsonl", split, streaming=True, **arguments)
        assert isinstance(streamed, StreamedExamples) == ("limit" not in options)
        assert [*streamed] == plain and streamed[-1] == plain[-1] and [*streamed[2:5]] == plain[2:5]
        for shuffle in (True, False):
            one, other = (Stream(examples, 3, 8, shuffle=shuffle) for examples in (plain, streamed))
            assert [one.at(step, draw) for step in range(12) for draw in (0, 1)] == [
                other.at(step, draw) for step in range(12) for draw in (0, 1)
            ]


def test_memory_holds_places_and_not_rows(tmp_path: Path) -> None:
    """40,000 rows of 500 bytes, 20 MB. In memory are 16 bytes a row for its place, twice that while the arrays grow;
    8 bytes for each of four orders, and four such columns while one is made; and the first examples, of less than 4 KiB
    each."""
    count = 40_000
    path = written(tmp_path / "rows.jsonl", count, text="x" * 430)
    assert path.stat().st_size > 480 * count
    tracemalloc.start()
    try:
        stream = Stream(load_task("jsonl", "train", path=str(path), test=0.0, streaming=True), 0, 16)
        seen = [len(stream.at(step)) for step in range(0, count, 1000)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert set(seen) == {16}
    assert peak < count * (2 * 16 + 4 * 8 + 4 * 8) + FIRST * 4096 + 2**20


def test_a_broken_row_is_named_when_its_turn_comes(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", FIRST + 10)
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[-1] = '{"prompt": '
    path.write_text("\n".join(lines), encoding="utf-8")
    examples = load_task("jsonl", "train", path=str(path), test=0.0, streaming=True)
    assert examples[FIRST].meta["of"] == str(FIRST)
    with pytest.raises(LmgymError, match=rf"rows.jsonl:{len(lines)}: not valid JSON"):
        examples[-1]
    with pytest.raises(LmgymError, match=rf"rows.jsonl:{len(lines)}: not valid JSON"):
        load_task("jsonl", "train", path=str(path), test=0.1, streaming=True)  # whose splits need all rows
    lines[1] = '{"prompt": 1}'
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(LmgymError, match=r"was changed after its lines were found"):
        examples[0]
    with pytest.raises(LmgymError, match=r"rows.jsonl:2: column 'prompt' must hold a text"):
        load_task("jsonl", "train", path=str(path), test=0.0, streaming=True)


def test_another_file_of_equal_size_and_time_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", 50)
    examples = load_task("jsonl", "train", path=str(path), test=0.0, streaming=True)
    other = written(tmp_path / "other.jsonl", 50)
    other.write_bytes(other.read_bytes().replace(b"1", b"2"))
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    assert other.stat().st_size == path.stat().st_size and examples[0]
    os.replace(other, path)
    with pytest.raises(LmgymError, match=r"was changed after its lines were found"):
        examples[0]


def test_the_fingerprint_knows_every_byte(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", 50)
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)

    def digest() -> dict[str, Any]:
        return data_digest(load_task("jsonl", "train", path=str(path), test=0.0, streaming=True))

    before = digest()
    assert before["examples"] == 50 and digest() == before
    path.write_bytes(path.read_bytes().replace(b"25 + 1", b"25 - 1"))
    os.utime(path, ns=times)  # size and time of change are as before
    assert digest() != before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"id": "of"}, "task.id cannot be checked"),
        ({"few_shot": {"n": 1}}, "task.few_shot looks for shots in all examples"),
    ],
)
def test_what_needs_all_rows_is_refused(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = str(written(tmp_path / "rows.jsonl", 5))
    with pytest.raises(LmgymError, match=sentence):
        load_task("jsonl", "train", path=path, test=0.0, streaming=True, **options)
    with pytest.raises(LmgymError, match="a mixture has its examples in memory"):
        load_task("mixture", "train", tasks=[{"name": "jsonl", "path": path, "test": 0.0, "streaming": True}])
    with pytest.raises(LmgymError, match="priority_scale needs the weights of all examples"):
        Stream(load_task("jsonl", "train", path=path, test=0.0, streaming=True), 0, 2, priority_scale=1.0)


def test_a_streamed_run_is_the_plain_one_and_resumes(tmp_path: Path) -> None:
    task = {"name": "jsonl", "path": str(written(tmp_path / "rows.jsonl", 40)), "test": 0.3, "validation": 0.2}
    plain = runs.run(tmp_path / "plain", task=task)
    whole = runs.run(tmp_path / "whole", task=task | {"streaming": True})
    parts = runs.run(tmp_path / "parts", Interrupting(at=3), task=task | {"streaming": True})
    runs.run(parts, task=task | {"streaming": True})
    assert_equal_runs(whole, parts)
    assert (plain / "final/model.safetensors").read_bytes() == (whole / "final/model.safetensors").read_bytes()
