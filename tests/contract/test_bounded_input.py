"""Files that never end, and texts that grow: each is refused at once, in one short sentence."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmgym.config.yaml import apply_override, read_yaml
from lmgym.core import files
from lmgym.core.errors import LONGEST_MESSAGE, LmgymError
from lmgym.tasks.base import load_task
from lmgym.tasks.rows.formats import read_json, rows_of
from lmgym.tasks.rows.json_text import read_json_lines
from lmgym.tasks.rows.unpacked import lines_of
from tests import runs

pytestmark = pytest.mark.timeout(30)

BOMB = "a: &a [lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {k: 1, l: 2}\n" + "".join(
    f"{new}: &{new} {{'<<': [{', '.join([f'*{old}'] * 9)}]}}\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML = {
    "bomb": (BOMB + "steps: *i", "with its aliases written out it has more than 1,000,000 characters"),
    "merges": (MERGES.replace("'<<'", "<<") + "steps: *i", "with its aliases written out it has more than"),
    "text": ("a: &a " + "x" * 1000 + "\nb: [" + "*a, " * 1100 + "]", "with its aliases written out it has more than"),
    "circle": ("a: &a [*a]\nsteps: *a", "an alias stands for something that contains the alias itself"),
    "own key": ("a: &a {b: {c: *a}}", "an alias stands for something that contains the alias itself"),
    "number": ("steps: 0x" + "f" * 5000, "a whole number is too large"),
    "sixties": ("steps: 1" + ":59" * 2000, "a whole number is too large"),
    "deep": ("[" * 30_000, "not valid YAML"),
    "large": ("# " + "x" * 2**17, "it is longer than 131,072 bytes"),
    "not UTF-8": ("\udcff", "not a readable YAML file"),
}


def fifo(folder: Path, name: str) -> Path:
    os.mkfifo(folder / name)
    return folder / name


ENDLESS: dict[str, Callable[[Path], Path]] = {
    "zero": lambda folder: Path("/dev/zero"),
    "fifo": lambda folder: fifo(folder, "pipe.jsonl"),
    "folder": lambda folder: folder,
}


@pytest.mark.parametrize("kind", YAML)
def test_a_recipe_that_grows_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, reason = YAML[kind]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_bytes(text.encode("utf-8", "surrogateescape"))
    for command in ("train", "check"):
        said = runs.complaint(capsys, command, recipe)
        assert reason in said and str(recipe) in said and len(said) <= LONGEST_MESSAGE


def test_an_override_that_grows_is_refused() -> None:
    text = "[&a [x, x, x, x, x, x, x, x], " + ", ".join(
        f"&{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    with pytest.raises(LmgymError, match=r"override steps: .* is not a YAML value"):
        apply_override({}, f"steps={text}]", ())


def test_aliases_that_stay_small_are_fine(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("a: &a {x: 1}\nb: {<<: *a, y: 0o17}\nc: [*a, *a]\nd: 340282366920938463463374607431768211456\n")
    tree = {"a": {"x": 1}, "b": {"x": 1, "y": "0o17"}, "c": [{"x": 1}] * 2, "d": 2**128}
    assert read_yaml(recipe) == tree


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_is_no_file_is_refused_as_recipe_and_as_data(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ENDLESS[kind](tmp_path)
    reason = "[Ii]s a directory|it is a pipe or a device, not a file|is a folder without a recipe"
    reason += "|in .* there is no file whose name holds train"
    with pytest.raises(LmgymError, match=reason):
        read_yaml(path)
    for read in (read_json_lines, lines_of, lambda path: iter([read_json(path)])):
        with pytest.raises(LmgymError, match=reason):
            next(iter(read(path)))  # type: ignore[operator]
    with pytest.raises(LmgymError, match=reason):
        load_task("topics", "train", system_prompt=f"file:{path}")
    with pytest.raises(LmgymError, match=reason):
        load_task("jsonl", "train", path=path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".xml", ".csv.gz"])
def test_no_format_reads_a_pipe(suffix: str, tmp_path: Path) -> None:
    if suffix in (".parquet", ".arrow"):
        pytest.importorskip("pyarrow")
    with pytest.raises(LmgymError, match="it is a pipe or a device, not a file"):
        next(iter(rows_of(fifo(tmp_path, f"data{suffix}"))))


@pytest.mark.parametrize("name", ["data.jsonl", "data.csv", "data.csv.gz", "data.json", "data.xml"])
def test_a_line_or_a_file_without_an_end_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("core.files.LONGEST_LINE", "tasks.rows.formats.LONGEST_JSON", "tasks.rows.formats.LONGEST_XML"):
        monkeypatch.setattr(f"lmgym.{limit}", 1000)
    path = tmp_path / name
    row = json.dumps({"prompt": "x" * 2000})
    (gzip.open if name.endswith(".gz") else open)(path, "wb").write(f"[{row}]\n".encode())
    reason = "line 1 is longer than 1,000 bytes|it is longer than 1,000 bytes"
    with pytest.raises(LmgymError, match=reason):
        list(rows_of(path))


def test_a_regular_file_reads_as_before(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a\r\nb\rc\n\xc3\xa9")
    assert files.read_text(path) == path.read_text(encoding="utf-8") == "a\nb\nc\n\u00e9"
    with files.open_regular(path) as file:
        assert list(files.lines_of(file, path)) == [b"a\r\n", b"b\rc\n", b"\xc3\xa9"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_pipe_on_the_command_line_is_refused() -> None:
    """As `lmgym train <(...)` gives it."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "lmgym", "train", "/dev/stdin"]
    done = subprocess.run(command, stdin=read, capture_output=True, text=True, cwd=runs.ROOT)
    assert done.returncode == 1 and "is not a readable YAML file: it is a pipe" in done.stderr
    os.close(read)
    os.close(write)
