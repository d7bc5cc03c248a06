"""Mutants of data: the files of every task that reads some, in each of the formats that it reads."""

import base64
import copy
import csv
import gzip
import io
import json
import lzma
import random
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.pictures.store import FORMATS
from lmgym.tasks.base import load_task
from tests.contract.test_rl4lms_tasks import HUB, SPLITS
from tests.contract.test_rl4lms_tasks import task_arguments as rl4lms_arguments
from tests.contract.test_tasks_and_rewards import task_arguments
from tests.torture.damage import change_bytes, change_tree, odd_value

CHATS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{n}+1?"}],
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n, "numbers": [n, 1]},
    }
    for n in range(12)
]  # as verl has them
HERE = "{here}"  # in arguments: the folder of the files


@dataclass(frozen=True)
class DataMutant:
    """A task with its arguments, and the files that it reads by their names."""

    what: str
    task: str
    arguments: dict[str, Any]
    files: dict[str, bytes]


@cache
def bases() -> list[DataMutant]:
    """Data that all is right: every task that reads files, in every format that it reads here."""
    found = []
    makers: list[tuple[str, Callable[[str, Path], dict[str, Any]]]] = []
    makers += [(name, task_arguments) for name in ("gsm8k", "data", "math", "svamp")]
    makers += [(name, rl4lms_arguments) for name in [*HUB, "crd3"]]
    for name, make in makers:
        with tempfile.TemporaryDirectory() as folder:
            arguments = make(name, Path(folder))
            plain = json.loads(json.dumps(arguments, default=str).replace(folder, HERE))
            files = {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}
        found.append(DataMutant("", name, plain, files))
    found += [other for one in list(found) for other in _other_formats(one)]
    return [*found, *_originals()]


def data_mutant(chance: random.Random) -> DataMutant:
    """A mutant of one of them."""
    base = chance.choice(bases())
    files, words = dict(base.files), []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        name = chance.choice(sorted(files))
        way = chance.random()
        if way < 0.55 and (changed := _changed_rows(chance, name, files[name])) is not None:
            what, files[name] = changed
        elif way < 0.9:
            what, files[name] = change_bytes(chance, files[name])
        elif way < 0.93:
            what = "deleted"
            del files[name]
        elif way < 0.96:
            other = chance.choice(sorted(files))
            what, files[name] = f"contents of {other}", files[other]
        else:
            odd = [f"{name}.bak", "train", "x.jsonl", "train.parquet", "test.csv", ".hidden.json", "train-é.jsonl"]
            what = "a copy as " + (other := chance.choice(odd))
            files[other] = files[name]
        words.append(f"{name}: {what}")
        if not files:
            break
    return DataMutant("; ".join(words), base.task, base.arguments, files)


def write(mutant: DataMutant, folder: Path) -> dict[str, Any]:
    """Write the mutant's files; returns the arguments that read them."""
    for name, content in mutant.files.items():
        path = folder / name
        if any(parent.is_file() for parent in path.relative_to(folder).parents) or path.is_dir():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return {
        key: value.replace(HERE, str(folder)) if isinstance(value, str) else value
        for key, value in mutant.arguments.items()
    }


def _changed_rows(chance: random.Random, name: str, content: bytes) -> tuple[str, bytes] | None:
    """A value somewhere in the rows of a file changed; None for a file without rows."""
    try:
        if name.endswith(".jsonl"):
            lines = content.decode().splitlines()
            place = chance.randrange(len(lines))
            what, lines[place] = _changed(chance, lines[place])
            return f"line {place + 1} {what}", ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
        if name.endswith(".json"):
            what, text = _changed(chance, content.decode())
            return what, text.encode("utf-8", "surrogatepass")
        if name.endswith(".parquet"):
            return _changed_parquet(chance, content)
    except (ValueError, IndexError, OSError, RecursionError):  # it has been damaged before
        return None
    return None


def _changed(chance: random.Random, text: str) -> tuple[str, str]:
    """JSON with a node changed, or another value altogether."""
    tree = json.loads(text)
    if chance.random() < 0.1:
        what, tree = "another value", odd_value(chance)
    else:
        name, path = change_tree(chance, tree)
        what = f"{name} {'.'.join(map(str, path))}"
    return what, json.dumps(tree, ensure_ascii=chance.random() < 0.7)


def _changed_parquet(chance: random.Random, content: bytes) -> tuple[str, bytes] | None:
    """A column renamed, lost or of another type."""
    import pyarrow
    from pyarrow import parquet

    table = parquet.read_table(io.BytesIO(content))
    column = chance.randrange(table.num_columns)
    name, change = table.column_names[column], chance.choice(["renamed", "lost", "of numbers", "of nulls", "of bytes"])
    if change == "renamed":
        table = table.rename_columns({name: name + "z"})
    elif change == "lost":
        table = table.drop_columns([name])
    else:
        values: list[Any] = {"of numbers": [1, 2, 3], "of nulls": [None] * 3, "of bytes": [b"\xff"] * 3}[change]
        table = table.set_column(column, name, pyarrow.array(values * table.num_rows)[: table.num_rows])
    file = io.BytesIO()
    parquet.write_table(table, file)
    return f"column {name} {change}", file.getvalue()


def _other_formats(base: DataMutant) -> list[DataMutant]:
    """The same rows in every other format, where the task reads them: tables, lists, packed and in archives."""
    import pyarrow
    from pyarrow import parquet

    def as_json(rows: list[dict[str, Any]]) -> bytes:
        return json.dumps(rows).encode()

    def as_table(rows: list[dict[str, Any]], delimiter: str) -> bytes:
        file = io.StringIO()
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue().encode()

    def as_parquet(rows: list[dict[str, Any]]) -> bytes:
        file = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        return file.getvalue()

    def as_arrow(rows: list[dict[str, Any]]) -> bytes:
        file, table = io.BytesIO(), pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
        return file.getvalue()

    def as_lines(rows: list[dict[str, Any]]) -> bytes:
        return "".join(json.dumps(row) + "\n" for row in rows).encode()

    def as_zst(rows: list[dict[str, Any]]) -> bytes:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as packed:
            packed.write(as_lines(rows))
        return sink.getvalue().to_pybytes()

    writers: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
        ".json": as_json,
        ".csv": lambda rows: as_table(rows, ","),
        ".tsv": lambda rows: as_table(rows, "\t"),
        ".parquet": as_parquet,
        ".arrow": as_arrow,
        ".jsonl.gz": lambda rows: gzip.compress(as_lines(rows), mtime=0),
        ".json.xz": lambda rows: lzma.compress(as_json(rows)),
        ".jsonl.zst": as_zst,
    }
    found = []
    for suffix, to_bytes in writers.items():
        if not all(name.endswith(".jsonl") for name in base.files):
            continue
        files = {
            name.removesuffix(".jsonl") + suffix: to_bytes([json.loads(line) for line in content.splitlines()])
            for name, content in base.files.items()
        }
        arguments = copy.deepcopy(base.arguments) | {"path": base.arguments["path"].replace(".jsonl", suffix)}
        other = DataMutant("", base.task, arguments, files)
        if _loads(other):
            found.append(other)
    return found


def _loads(mutant: DataMutant) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return bool(load_task(mutant.task, "train", **write(mutant, Path(folder))))
        except LmgymError:
            return False


def _originals() -> list[DataMutant]:
    """Formats of the originals that are no rows of JSON."""
    entry = (
        '<benchmark><entries><entry category="Food" eid="1"><modifiedtripleset><mtriple>{0}_A | runs | B</mtriple>'
        '</modifiedtripleset><lex lid="Id1">{0} A runs.</lex></entry></entries></benchmark>'
    )
    parts = ("train", "dev", "test")
    xml = {f"{part}/1triples/Food.xml": entry.format(part).encode() for part in parts}
    lines = {f"commongen.{part}.src_alpha.txt": f"{part} run\n{part} sit\n".encode() for part in parts}
    lines |= {f"commongen.{part}.tgt.txt": b"It runs.\nIt sits.\n" for part in parts[:2]}
    reviews = {
        f"{part}/{kind}/{n}_{rating}.txt": f"{part} {kind} {n} is a text".encode()
        for part in ("train", "test") for kind, rating in (("neg", 2), ("pos", 9)) for n in range(4)
    }  # fmt: skip
    head = "document_id,set,question,answer1,answer2\n"
    questions = [f"d1,{part},Who is {part}?,Ann,Ann B\n" for part in ("train", "valid", "test")]
    stories = {
        "qaps.csv": (head + "".join(questions)).encode(),
        "summaries.csv": b'document_id,set,summary\nd1,train,"A story, of Ann."\n',
    }
    dialogues = {}
    for part, name in zip(SPLITS, ("train", "validation", "test"), strict=True):
        said = " __eou__ ".join(f"{part} {n} ?" for n in range(8)) + " __eou__\n"
        dialogues |= {f"{name}/dialogues_{name}.txt": said.encode() * 2}
        dialogues |= {f"{name}/dialogues_{word}_{name}.txt": b"1 2 3 4 1 2 3 4\n" * 2 for word in ("act", "emotion")}
    captions = {
        f"{part}.{name}.gz": gzip.compress(f"{part} a {name}\n{part} b {name}\n".encode(), mtime=0)
        for part in ("train", "val", "test_2016_flickr") for name in ("en", "de")
    }  # fmt: skip
    texts = {f"{part}.{name}": f"{part} {name} 1\n{part} 2\n".encode() for part in parts for name in ("en", "de")}
    unified = {f"{part}.tsv": f"Who is {part}? \\n A story\tAnn\n".encode() for part in parts}
    svamp = _as_list("svamp")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("set/rows.jsonl", "".join(json.dumps(row) + "\n" for row in CHATS))
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w:gz") as packed:
        content = "".join(json.dumps(row) + "\n" for row in CHATS).encode()
        info = tarfile.TarInfo("rows.jsonl")
        info.size = len(content)
        packed.addfile(info, io.BytesIO(content))
    chats = {"prompt": "prompt", "references": "reward_model.ground_truth", "test": 0.0}
    here = {"path": HERE}
    return [
        DataMutant("", "web_nlg", here, xml),
        DataMutant("", "common_gen", here, lines),
        DataMutant("", "imdb", {"path": HERE, "validation": 0.0}, reviews),
        DataMutant("", "narrative_qa", here, stories),
        DataMutant("", "narrative_qa", here, unified),
        DataMutant("", "daily_dialog", here, dialogues),
        DataMutant("", "multi30k", here, captions),
        DataMutant("", "parallel", {"path": f"{HERE}/{{split}}.{{language}}"}, texts),
        DataMutant("", "data", {"path": f"{HERE}/rows.zip/set/rows.jsonl", **chats}, {"rows.zip": archive.getvalue()}),
        DataMutant("", "data", {"path": f"{HERE}/rows.tgz/rows.jsonl", **chats}, {"rows.tgz": tar.getvalue()}),
        *(
            DataMutant("", "data", {"path": f"{HERE}/{name}", "streaming": streaming, **chats}, {name: content})
            for streaming in (False, True)
            for name, content in _tables(CHATS).items()
        ),
        DataMutant("", "data", {"path": HERE, "test": 0.0}, _saved()),
        DataMutant("", "svamp", {"path": f"{HERE}/SVAMP.json"}, {"SVAMP.json": svamp}),
        *_pictures(),
    ]


def _pictures() -> list[DataMutant]:
    """Rows with pictures: in files of every format, as a data: address, and in a table as bytes."""
    import pyarrow
    from PIL import Image
    from pyarrow import parquet

    files = {}
    for kind in FORMATS:
        out = io.BytesIO()
        Image.linear_gradient("L").resize((24, 16)).convert("RGB").save(out, kind)
        files[f"{kind}.bin"] = out.getvalue()
    address = "data:image/png;base64," + base64.b64encode(files["PNG.bin"]).decode()
    parts = [{"type": "image", "image": address}, {"type": "text", "text": "And here?"}]
    rows: list[dict[str, Any]] = [{"images": [name], "prompt": "<image>What?", "references": "4"} for name in files]
    rows.append({"images": [], "prompt": [{"role": "user", "content": parts}], "references": "4"})
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = pyarrow.table({
        "image": [{"bytes": data, "path": name} for name, data in files.items()],
        "prompt": ["What is it?"] * len(files),
        "references": ["4"] * len(files),
    })  # fmt: skip
    packed = io.BytesIO()
    parquet.write_table(table, packed)
    own: dict[str, Any] = {"test": 0.0}
    return [
        DataMutant("", "data", {"path": f"{HERE}/rows.jsonl", **own}, {"rows.jsonl": lines, **files}),
        DataMutant("", "data", {"path": f"{HERE}/rows.parquet", **own}, {"rows.parquet": packed.getvalue()}),
    ]


def _tables(rows: list[dict[str, Any]]) -> dict[str, bytes]:
    """Rows as tables: compressed in several row groups, and as a file and a stream of Arrow."""
    import pyarrow
    from pyarrow import parquet

    table, files = pyarrow.Table.from_pylist(rows), [io.BytesIO() for _ in range(3)]
    parquet.write_table(table, files[0], row_group_size=5, compression="zstd")
    for file, writing in zip(files[1:], (pyarrow.ipc.new_stream, pyarrow.ipc.new_file), strict=True):
        with writing(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    names = ("rows.parquet", "stream.arrow", "file.arrow")
    return {name: file.getvalue() for name, file in zip(names, files, strict=True)}


def _saved() -> dict[str, bytes]:
    """What `save_to_disk` writes."""
    from datasets import Dataset

    with tempfile.TemporaryDirectory() as folder:
        Dataset.from_list(CHATS).save_to_disk(folder, num_shards=2)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _as_list(name: str) -> bytes:
    """The rows of a task's one file as a list in JSON."""
    with tempfile.TemporaryDirectory() as folder:
        task_arguments(name, Path(folder))
        file = next(Path(folder).glob("*.jsonl"))
        return json.dumps([json.loads(line) for line in file.read_text().splitlines()]).encode()
