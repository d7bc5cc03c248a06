"""The reader of rows: every format, place and form of data that recipes of other libraries bring, with task `data`."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.tasks.base import MissingSplit, check_task, load_task
from lmgym.tasks.rows.formats import rows_of
from lmgym.tasks.rows.load import load_rows, parts_of
from lmgym.tasks.rows.unfit import telling
from lmgym.tasks.streamed import StreamedExamples
from lmgym.types import RecipeText

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

SUMS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n % 3} for n in range(40)]
OTHERS = [{**row, "prompt": f"What is {row['prompt']}?"} for row in SUMS]


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / ".cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".own"))


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def as_arrow(rows: list[dict[str, Any]], kind: str = "stream") -> bytes:
    file, table = io.BytesIO(), pyarrow.Table.from_pylist(rows)
    with (pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file)(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return file.getvalue()


def as_lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_csv(rows: list[dict[str, Any]], mark: str = ",") -> bytes:
    return "".join(mark.join(map(str, line)) + "\n" for line in [rows[0], *(row.values() for row in rows)]).encode()


FORMATS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "rows.parquet": as_parquet,
    "rows.arrow": as_arrow,
    "file.arrow": lambda rows: as_arrow(rows, "file"),
    "rows.jsonl": as_lines,
    "rows.ndjson": as_lines,
    "lines.json": as_lines,
    "rows.json": lambda rows: json.dumps(rows).encode(),
    "rows.csv": as_csv,
    "rows.tsv": lambda rows: as_csv(rows, "\t"),
    "rows.jsonl.gz": lambda rows: gzip.compress(as_lines(rows)),
    "rows.json.xz": lambda rows: lzma.compress(json.dumps(rows).encode()),
    "rows.csv.gz": lambda rows: gzip.compress(as_csv(rows)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_examples(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FORMATS[name](SUMS))
    arguments: dict[str, Any] = {"path": str(tmp_path / name), "references": "answer", "validation": 0.2}
    check_task("data", **arguments)
    found = {part: load_task("data", part, **arguments) for part in ("train", "validation", "test")}
    assert sum(map(len, found.values())) == 40
    for example in found["train"]:
        n = int(example.prompt.split("+")[0])  # type: ignore[union-attr]
        assert example.references == (str(n + 1),)
        typed = n + 1 if ".csv" in name or ".tsv" in name else str(n + 1)  # a cell has no quotation marks
        assert example.meta == {"answer": typed, "level": n % 3}


def test_zstandard(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.zst"
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.CompressedOutputStream(file, "zstd") as packed:
        packed.write(as_lines(SUMS))
    assert [row for _, row in rows_of(path)] == SUMS
    assert len(load_task("data", "train", path=str(path), test=0.0)) == 40
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(LmgymError, match=r"rows\.jsonl\.zst"):
        load_task("data", "train", path=str(path), test=0.0)


def test_cells_are_typed_by_column(tmp_path: Path) -> None:
    text = 'prompt,whole,number,truth,zip,price,empty\n"a, b",1,0.5,True,007,1.50,\nc,null,2,false,12,2.25,\n'
    (tmp_path / "rows.csv").write_text(text)
    rows = [row for _, row in rows_of(tmp_path / "rows.csv")]
    assert rows == [
        {"prompt": "a, b", "whole": 1, "number": 0.5, "truth": True, "zip": "007", "price": "1.50", "empty": ""},
        {"prompt": "c", "whole": None, "number": 2, "truth": False, "zip": "12", "price": "2.25", "empty": ""},
    ]
    (tmp_path / "rows.csv").write_text("a,a\n1,2\n")
    with pytest.raises(LmgymError, match="two columns are called 'a'"):
        list(rows_of(tmp_path / "rows.csv"))


# ---------------------------------------------------------------- places


def test_a_saved_data_set_and_its_cache(tmp_path: Path) -> None:
    """`save_to_disk` of one and of several splits, and the library's cache folder, whose JSON files are no data."""
    whole = datasets.DatasetDict(
        {
            part: datasets.Dataset.from_list([{**row, "prompt": f"{part} {row['prompt']}", "of": part} for row in SUMS])
            for part in ("train", "test")
        }
    )
    whole.save_to_disk(str(tmp_path / "dict"))
    whole["train"].save_to_disk(str(tmp_path / "one"), num_shards=3)
    for part in ("train", "test"):
        found = load_task("data", part, path=str(tmp_path / "dict"))
        assert len(found) == 40 and {one.meta["of"] for one in found} == {part}
    found = [load_task("data", part, path=str(tmp_path / "one")) for part in ("train", "test")]
    assert sum(map(len, found)) == 40 and found[0][0].id == "data-00000-of-00003/train/1"
    datasets.load_dataset("json", data_files=_written(tmp_path / "x.jsonl", as_lines(SUMS)))
    [folder] = [file.parent for file in (tmp_path / ".cache").rglob("json-train.arrow")]
    assert len(load_task("data", "train", path=str(folder), test=0.0)) == 40


def test_a_clone_of_the_hub(tmp_path: Path) -> None:
    """Named subsets in folders, splits with names of their own, shards; a README beside them."""
    for name in ("main", "socratic"):
        for part in ("train", "test"):
            rows = [{"question": f"{name} {part} {n}", "answer": f"{n} #### 1,00{n}"} for n in range(4)]
            _written(tmp_path / "gsm8k" / name / f"{part}-00000-of-00001.parquet", as_parquet(rows))
    (tmp_path / "gsm8k" / "README.md").write_text("---\n---\n")
    path = str(tmp_path / "gsm8k")
    assert [one.prompt for one in load_task("gsm8k", "test", path=path)][:1] == ["main test 0"]
    assert load_task("gsm8k", "train", path=path)[2].meta["answer"] == "1,002"  # as it stands in the file
    found = load_task("data", "train", path=path, config="socratic", prompt="question", references=None)
    assert found[3].prompt == "socratic train 3" and found[3].meta["answer"] == "3 #### 1,003"
    with pytest.raises(MissingSplit, match=r"it holds main, socratic: name one as task\.config"):
        load_task("data", "train", path=path)
    for part in ("train_prefs", "test_prefs", "train_sft"):
        for shard in range(2):
            rows = [{"prompt": f"{part} {shard} {n}"} for n in range(10)]
            _written(tmp_path / "ultra" / "data" / f"{part}-0000{shard}-of-00002.parquet", as_parquet(rows))
    path = str(tmp_path / "ultra")
    with pytest.raises(LmgymError, match=r"several files for split 'train'.*task\.splits: \{train: train_prefs\}"):
        load_task("data", "train", path=path)
    splits = {"train": "train_prefs[:25%]", "test": "test_prefs[-3:]+train_sft[5:6]"}
    train, test = (load_task("data", part, path=path, splits=splits) for part in ("train", "test"))
    assert [one.prompt for one in train] == [f"train_prefs 0 {n}" for n in range(5)]
    assert [one.prompt for one in test] == [*(f"test_prefs 1 {n}" for n in (7, 8, 9)), "train_sft 0 5"]
    streamed = load_task("data", "test", path=path, splits=splits, streaming=True)
    assert isinstance(streamed, StreamedExamples) and [*streamed] == test


@pytest.mark.parametrize("text", ["train[:5%]", "train[33%:67%]", "train[-10:]", "train[7:9]", "train[:-10%]", "train"])
@pytest.mark.parametrize("count", [1, 10, 37, 7473])
def test_parts_of_splits_are_those_of_the_datasets_library(text: str, count: int) -> None:
    [part] = parts_of(text, "splits")
    [theirs] = datasets.ReadInstruction.from_spec(text).to_absolute({"train": count})
    assert [*part.range(count)] == [*range(theirs.from_ or 0, count if theirs.to is None else theirs.to)]


def test_several_files_give_all_their_rows(tmp_path: Path) -> None:
    """As verl names them: a list of files for training, one for validation. And a pattern, and a folder without names
    of splits."""
    paths = [
        str(_written(tmp_path / name / "train.parquet", as_parquet([{**row, "of": name} for row in SUMS])))
        for name in ("gsm8k", "math")
    ]
    held_out = str(_written(tmp_path / "math" / "test.parquet", as_parquet(OTHERS[:5])))
    found = load_task("data", "train", path=paths, test_path=held_out)
    assert [one.meta["of"] for one in found] == ["gsm8k"] * 40 + ["math"] * 40
    assert len({one.id for one in found}) == 80 and len(load_task("data", "test", path=paths, test_path=held_out)) == 5
    found = load_task("data", "train", path=str(tmp_path / "*" / "*.parquet"))
    assert len(found) == 80 and len(load_task("data", "test", path=str(tmp_path / "*" / "*.parquet"))) == 5
    for n in (1, 2, 10):
        _written(tmp_path / "plain" / f"part-{n}.jsonl", as_lines([{"prompt": f"part {n}"}]))
    found = load_task("data", "train", path=str(tmp_path / "plain"), test=0.0)
    assert [one.prompt for one in found] == ["part 1", "part 2", "part 10"]


def test_the_path_of_a_split_says_what_is_in_it(tmp_path: Path) -> None:
    """The files of the split's name, where some have it; else whatever is there."""
    for name in ("both/train", "both/test", "bench/test-0", "bench/test-1", "plain/a", "own"):
        _written(tmp_path / f"{name}.jsonl", as_lines([{"prompt": name}]))

    def prompts(split: str, *places: str) -> list[Any]:
        own = [str(tmp_path / place) for place in places]
        path = {f"{split}_path": own if len(own) > 1 else own[0]}
        return [one.prompt for one in load_task("data", split, path=str(tmp_path / "own.jsonl"), **path)]  # type: ignore[arg-type]

    for place in ("both", "both/*.jsonl", "both/{split}.jsonl", "both/test.jsonl"):
        assert prompts("test", place) == ["both/test"]
    assert prompts("validation", "both") == ["both/train"]
    assert (
        prompts("validation", "bench/test-*.jsonl")
        == prompts("test", "bench/*.jsonl")
        == ["bench/test-0", "bench/test-1"]
    )
    assert prompts("test", "plain", "both", "bench/test-1.jsonl") == ["plain/a", "both/test", "bench/test-1"]


def test_a_long_first_line_of_json(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 2**21}, {"prompt": "y"}]
    path = _written(tmp_path / "rows.json", as_lines(rows))
    assert [row for _, row in rows_of(Path(path))] == rows


def test_a_member_of_an_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "rows.zip", "w") as zipped:
        zipped.writestr("set/train.jsonl", as_lines(SUMS))
        zipped.writestr("set/test.parquet", as_parquet(SUMS[:3]))
    with tarfile.open(tmp_path / "rows.tar.gz", "w:gz") as tar:
        for name, content in (("./train.jsonl.gz", gzip.compress(as_lines(SUMS))), ("rows.arrow", as_arrow(SUMS))):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link.jsonl")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    for place, count in (("rows.zip/set/train.jsonl", 40), ("rows.zip/set/test.parquet", 3),
                         ("rows.tar.gz/train.jsonl.gz", 40), ("rows.tar.gz/rows.arrow", 40)):  # fmt: skip
        assert len(load_task("data", "train", path=str(tmp_path / place), test=0.0)) == count
    for place in ("rows.zip", "rows.zip/set/none.jsonl", "rows.tar.gz/link.jsonl"):
        with pytest.raises(LmgymError, match=r"there is no file or folder .*rows\.[a-z.]+ holds "):
            load_task("data", "train", path=str(tmp_path / place))


def test_the_hub_through_the_library(tmp_path: Path) -> None:
    """A folder stands for a data set of the Hub: its splits, parts of them, and files by data_files."""
    _written(tmp_path / "hub" / "train.jsonl", as_lines(SUMS))
    _written(tmp_path / "hub" / "other.jsonl", as_lines(OTHERS[:7]))
    hub = str(tmp_path / "hub")
    files = {"train": "train.jsonl", "dev": "other.jsonl"}
    found = load_task("data", "train", hub_id=hub, data_files=files, references="answer", test=0.5)
    held_out = load_task("data", "test", hub_id=hub, data_files=files, references="answer", test=0.5)
    assert len(found) + len(held_out) == 40 and len(held_out) > 5
    assert len(load_task("data", "validation", hub_id=hub, data_files=files)) == 7
    part = load_task("data", "train", hub_id=hub, data_files=files, splits={"train": "train[:10%]"}, test=0.0)
    assert [one.prompt for one in part] == [row["prompt"] for row in SUMS[:4]]
    streamed = load_task("data", "train", hub_id=hub, data_files=files, test=0.5, references="answer", streaming=True)
    assert isinstance(streamed, StreamedExamples) and [*streamed] == found


# ---------------------------------------------------------------- forms of rows, as other libraries have them

USER = {"role": "user", "content": "2+2?"}
ASKED = [USER]
ORIGINALS: dict[str, tuple[Any, dict[str, Any], Any, tuple[str, ...]]] = {
    "open-r1, OpenR1-Math": (
        {"problem": "2+2?", "solution": "It is $4$.", "messages": [USER, {"role": "assistant", "content": "4"}]},
        {"prompt": "problem", "references": "solution"}, "2+2?", ("It is $4$.",),
    ),
    "TRL, Capybara, all but the last message": (
        {"messages": [USER, {"role": "assistant", "content": "5"}, USER, {"role": "assistant", "content": "4"}]},
        {"prompt": "messages.:-1", "references": "messages.-1.content"},
        [USER, {"role": "assistant", "content": "5"}, USER], ("4",),
    ),
    "TRL, DeepMath": (
        {"prompt": ASKED, "solution": "$4$"}, {"references": "solution"}, ASKED, ("$4$",),
    ),
    "verl": (
        {"data_source": "openai/gsm8k", "prompt": ASKED, "ability": "math",
         "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"split": "train", "index": 0}},
        {"references": "reward_model.ground_truth"}, ASKED, ("4",),
    ),
    "OpenRLHF": (
        {"context_messages": json.dumps(ASKED), "label": "4"},
        {"prompt": "context_messages", "references": "label"}, ASKED, ("4",),
    ),
    "ShareGPT": (
        {"conversations": [{"from": "system", "value": "Add."}, {"from": "human", "value": "2+2?"}]},
        {"prompt": "conversations"}, [{"role": "system", "content": "Add."}, USER], (),
    ),
    "OpenAI, with all keys": (
        {"prompt": [{"role": "developer", "content": [{"type": "text", "text": "Add."}], "name": None, "tools": None},
                    {"role": "user", "content": [{"type": "text", "text": "2+2?"}], "name": None, "tools": None}]},
        {}, [{"role": "system", "content": "Add."}, USER], (),
    ),
    "one message": ({"prompt": USER, "answer": 4}, {"references": "answer"}, ASKED, ("4",)),
    "DAPO-Math": (
        {"data_source": "math_dapo", "prompt": ASKED, "reward_model": {"ground_truth": "4", "style": "rule-lighteval"}},
        {"prompt": "prompt.0.content", "references": "reward_model.ground_truth"}, "2+2?", ("4",),
    ),
    "Countdown": (
        {"target": 24, "nums": [4, 6]},
        {"prompt": "Using the numbers {nums}, make {target}.", "references": "target"},
        "Using the numbers [4, 6], make 24.", ("24",),
    ),
    "a template of messages": (
        {"Body": "I have 2 pens.", "Question": "And 2 more?", "Answer": 4.0},
        {"prompt": [{"role": "system", "content": "Add {{so}}."}, {"role": "user", "content": "{Body} {Question}"}],
         "references": "#### {Answer}"},
        [{"role": "system", "content": "Add {so}."}, {"role": "user", "content": "I have 2 pens. And 2 more?"}],
        ("#### 4.0",),
    ),
    "GSM8K by a pattern": (
        {"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 1,004"},
        {"prompt": "question", "references": {"column": "answer", "pattern": "#### (.*)"}}, "2+2?", ("1,004",),
    ),
    "mini-R1, an answer that is begun": (
        {"prompt": [*ASKED, {"role": "assistant", "content": "Let me see.\n<think>"}]},
        {}, [*ASKED, {"role": "assistant", "content": "Let me see.\n<think>"}], (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("name", ORIGINALS)
def test_rows_of_the_originals(name: str, kind: str, tmp_path: Path) -> None:
    row, columns, prompt, references = ORIGINALS[name]
    path = _written(tmp_path / f"rows.{kind}", (as_parquet if kind == "parquet" else as_lines)([row]))
    [found] = load_task("data", "train", path=path, test=0.0, **columns)
    assert (found.prompt, found.references) == (prompt, references)
    used = {"references", columns.get("prompt", "prompt") if isinstance(columns.get("prompt", ""), str) else ""}
    assert found.meta == {key: value for key, value in row.items() if key not in used}


def test_orz_is_an_array_of_conversations(tmp_path: Path) -> None:
    rows = [[{"from": "human", "value": f"{n}?"}, {"from": "assistant", "ground_truth": {"value": str(n)}}]
            for n in range(3)]  # fmt: skip
    path = _written(tmp_path / "orz_math_57k.json", json.dumps(rows).encode())
    found = load_task("data", "train", path=path, test=0.0, prompt="messages.0.value",
                      references="messages.1.ground_truth.value")  # fmt: skip
    assert [(one.prompt, one.references) for one in found] == [("0?", ("0",)), ("1?", ("1",)), ("2?", ("2",))]


def last_word(row: dict[str, Any]) -> str:
    return str(row["answer"].split()[-1])


def test_functions_of_a_row_and_new_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _written(tmp_path / "rows.jsonl", as_lines([{"prompt": "2+2?", "answer": "It is 4", "x": {"y": [1, 2.50]}}]))
    monkeypatch.setitem(registry._registered["row"], "last_word", last_word)
    for function in ("last_word", "tests.contract.test_rows:last_word"):
        [found] = load_task("data", "train", path=path, test=0.0, references={"function": function},
                            columns={"solution": "answer", "second": "x.y.-1"})  # fmt: skip
        assert found.references == ("4",)
        assert found.meta == {"answer": "It is 4", "x": {"y": [1, 2.5]}, "solution": "It is 4", "second": 2.5}
    with pytest.raises(LmgymError, match=r"column 'x\.y' holds no '7'; there is \[1, 2\.5\]"):
        load_task("data", "train", path=path, test=0.0, columns={"z": "x.y.7"})


def test_only_the_words_of_a_template_may_make_control_tokens(tmp_path: Path) -> None:
    path = _written(tmp_path / "rows.jsonl", as_lines([{"q": "<|im_end|>"}]))
    [found] = load_task("data", "train", path=path, test=0.0, prompt="<|im_start|>user\n{q}<|im_end|>")
    assert isinstance(found.prompt, RecipeText)
    assert [found.prompt[begin:end] for begin, end in found.prompt.spans] == ["<|im_start|>user\n", "<|im_end|>"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"prompt": "{q"}, r"task\.prompt: .* write \{\{ for a brace"),
        ({"prompt": "{q:5}"}, "braces hold the name of a column"),
        ({"prompt": [{"role": "user"}]}, "a message has a role and a content"),
        ({"references": {"column": "q", "pattern": "("}}, r"task\.references\.pattern: "),
        ({"references": {}}, "needs either a column"),
        ({"references": {"colum": "q"}}, r"unknown key 'task\.references\.colum'; did you mean 'column'"),
        ({"references": {"column": "prompt", "pattern": "x"}}, r"rows\.jsonl:1: column 'prompt' holds no 'x'"),
        ({"splits": {"tain": "train"}}, r"task\.splits names 'tain'; did you mean 'train'"),
        ({"splits": {"train": "train[5]"}}, r"task\.splits\.train is 'train\[5\]'; write a split"),
        ({"hub_id": "a/b"}, r"^task\.path and task\.hub_id are both given; write one of them$"),
        ({"path": None}, r"^key 'task\.path' is missing; 'task' needs it, or task\.hub_id$"),
        ({"columns": {"a": "b.c"}}, r"rows\.jsonl:1: there is no column 'b\.c'"),
        ({"prompt": "{nothing}"}, "column 'nothing' holds nothing, and a template needs it"),
    ],
)
def test_wrong_keys_are_one_sentence(arguments: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = _written(tmp_path / "rows.jsonl", as_lines([{"prompt": "2+2?", "nothing": None}]))
    with pytest.raises(LmgymError, match=sentence):
        load_task("data", "train", **{"path": path, "test": 0.0, **arguments})


# ---------------------------------------------------------------- rows that do not fit


def test_what_does_not_fit_is_told_at_once_or_left_out(tmp_path: Path) -> None:
    rows: list[Any] = [dict(row) for row in SUMS]
    for n in range(3, 21, 3):
        rows[n]["prompt"] = n
    lines = as_lines(rows).decode().splitlines()
    lines[1] = '{"prompt": '
    path = _written(tmp_path / "rows.jsonl", "\n".join(lines).encode())
    with pytest.raises(LmgymError) as caught:
        load_task("data", "train", path=path, test=0.0)
    said = str(caught.value)
    assert "rows.jsonl:2: not valid JSON" in said and "In all 7 rows do not fit (task.unfit: drop leaves" in said
    assert "6 times column 'prompt' must hold a text or a list of chat messages (" in said
    assert "rows.jsonl:4, 7, 10, 13, 16 ...)" in said
    for streaming in (False, True):
        with telling() as told:
            found = load_task("data", "train", path=path, test=0.0, unfit="drop", streaming=streaming)
        assert [one.id for one in found] == [f"rows/{n + 1}" for n in range(40) if n not in (1, *range(3, 21, 3))]
        assert len(told) == 1 and told[0].startswith("task 'data', split 'train': 7 rows do not fit and are left out: ")
    with pytest.raises(LmgymError, match=r"key 'task\.unfit' must be 'refuse' or 'drop', not 'skip'"):
        load_task("data", "train", path=path, unfit="skip")  # type: ignore[arg-type]


def test_a_fault_at_another_place_of_a_row_is_of_the_same_kind(tmp_path: Path) -> None:
    lines = as_lines(SUMS).splitlines()
    for n in range(5):
        lines[2 + n] = b'{"prompt": "' + b"x" * n + b'" "references": "1"}'
        lines[12 + n] = b'{"prompt": "' + b"x" * n + b'\xff"}'
    path = _written(tmp_path / "rows.jsonl", b"\n".join(lines))
    with telling() as told:
        load_task("data", "train", path=path, test=0.0, unfit="drop")
    assert told[0].endswith(
        f"5 times not valid JSON: Expecting ',' delimiter ({path}:3, 4, 5, 6, 7); "
        f"5 times not UTF-8 ({path}:13, 14, 15, 16, 17)"
    )
    lines = [line for n, line in enumerate(lines) if n == 2 or not 2 <= n < 17]
    with pytest.raises(LmgymError, match=r"rows\.jsonl:3: not valid JSON: Expecting ',' delimiter at column [0-9]+$"):
        load_task("data", "train", path=_written(tmp_path / "rows.jsonl", b"\n".join(lines)), test=0.0)


def test_pairs_that_do_not_fit(tmp_path: Path) -> None:
    pairs = [{"prompt": f"{n}?", "chosen": "a", "rejected": "a" if n % 4 == 0 else "" if n % 4 == 1 else "b"}
             for n in range(40)]  # fmt: skip
    path = _written(tmp_path / "train.jsonl", as_lines(pairs))
    with pytest.raises(LmgymError, match=r"In all 20 rows .*10 times chosen and rejected.*; 10 times the answer in"):
        load_task("preferences", "train", path=path)
    with telling() as told:
        found = load_task("preferences", "train", path=path, unfit="drop", test=0.0)
    assert len(found) == 20 and "20 rows do not fit and are left out" in told[0]


def test_an_empty_split_says_how_many_rows_each_has(tmp_path: Path) -> None:
    path = _written(tmp_path / "rows.jsonl", as_lines(SUMS[:3]))
    with pytest.raises(LmgymError, match=r"3 rows out \(rows: train 3, validation 0, test 0\); raise task\.test "):
        load_task("data", "test", path=path, test=0.01)


# ---------------------------------------------------------------- large data


def test_tables_stay_in_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large .parquet and .arrow files give the same examples, one by one, with or without shares of train."""
    paths = {
        name: str(_written(tmp_path / f"rows.{name}", write(SUMS)))
        for name, write in (("parquet", as_parquet), ("arrow", as_arrow), ("jsonl", as_lines))
    }
    for name, path in paths.items():
        for options in ({"test": 0.0}, {"test": 0.3, "validation": 0.2}):
            plain = load_task("data", "train", path=path, references="answer", **options)
            with monkeypatch.context() as patched:
                patched.setattr("lmgym.tasks.rows.load.LARGE", 100)
                large = load_task("data", "train", path=path, references="answer", **options)
                mixed = load_task("mixture", "train", tasks=[{"name": "data", "path": path, **options}])
            assert isinstance(large, StreamedExamples) and not large.asked, name
            assert [*large] == plain == [large[index] for index in range(len(large))] and len(mixed) == len(plain)
            assert large.digest == load_task("data", "train", path=path, streaming=True, **options).digest  # type: ignore[attr-defined]
    assert len([*(tmp_path / ".own" / "lmgym" / "rows").iterdir()]) == 1  # the copy of the .parquet file


@pytest.mark.parametrize("count", [40, 2])
def test_a_table_that_is_changed_on_disk_is_noticed(count: int, tmp_path: Path) -> None:
    """Also one that became shorter: reading behind its end would kill the process."""
    path = tmp_path / "rows.arrow"
    found = load_task("data", "train", path=_written(path, as_arrow(SUMS)), streaming=True, test=0.0)
    assert found[39].prompt == "39+1="
    _written(path, as_arrow(OTHERS[:count]))
    for read in (lambda: found[39], lambda: [*found.files[0].rows()]):  # type: ignore[attr-defined]
        with pytest.raises(LmgymError, match=r"rows\.arrow was changed after its rows were found; start again"):
            read()


def test_a_copy_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _written(tmp_path / "rows.parquet", as_parquet(SUMS))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(LmgymError, match=r"cannot write .*\.arrow, a copy of .*rows\.parquet: .*set XDG_CACHE_HOME"):
        load_task("data", "train", path=path, test=0.0, streaming=True)


# ---------------------------------------------------------------- damaged and hostile files


def test_damaged_files_are_one_sentence(tmp_path: Path) -> None:
    for name, write in FORMATS.items():
        whole = write(SUMS)
        for size in (0, 1, len(whole) // 3, len(whole) - 9):
            path = _written(tmp_path / name, whole[:size])
            for streaming in (False, True):
                try:
                    found = [*load_task("data", "train", path=path, test=0.0, streaming=streaming)]
                except LmgymError as error:
                    assert "\n" not in str(error), name
                else:
                    assert len(found) < 40, (name, size)


def test_damaged_names_in_an_archive_are_one_sentence(tmp_path: Path) -> None:
    """A name that is not UTF-8, as its mark says it is; and one that is empty once its null character is cut off."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as pack:
        pack.writestr("\u00e9.jsonl", as_lines(SUMS))
    for name in ("\u00e9.js\udcff\udcffl", "\0\u00e9.json"):
        damaged = file.getvalue().replace("\u00e9.jsonl".encode(), name.encode("utf-8", "surrogateescape"))
        assert len(damaged) == len(file.getvalue()) and damaged != file.getvalue()
        path = _written(tmp_path / "rows.zip", damaged)
        for inside in (path, f"{path}/\u00e9.jsonl"):
            with pytest.raises(LmgymError, match=r"rows\.zip"):
                load_task("data", "train", path=inside, test=0.0)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_a_number_that_is_none_is_a_missing_reference(name: str, tmp_path: Path) -> None:
    """pandas writes NaN where an answer is missing. Infinity, and NaN among others, would be the words inf and nan."""
    found = {}
    for answer in (7.5, float("nan"), float("inf")):
        rows: list[dict[str, Any]] = [{"prompt": "a", "answer": 7.5}, {"prompt": "b", "answer": answer}]
        path = _written(tmp_path / name, FORMATS[name](rows))
        try:
            examples = load_task("data", "train", path=path, references="answer", test=0.0)
        except LmgymError as error:
            found[str(answer)] = str(error)
        else:
            found[str(answer)] = examples[1].references
    assert found["7.5"] == ("7.5",) and found["nan"] == ()
    assert "column 'answer' must hold a text, a number or a list of these, got inf" in found["inf"]


def test_true_and_false_are_references_by_a_template(tmp_path: Path) -> None:
    path = _written(tmp_path / "rows.csv", b"prompt,answer\nIs 2 even?,True\nIs 3 even?,False\n")
    with pytest.raises(LmgymError, match=r'got True; as a text: task.references: "\{answer\}"\. In all 2 rows'):
        load_task("data", "train", path=path, references="answer", test=0.0)
    examples = load_task("data", "train", path=path, references="{answer}", test=0.0)
    assert [example.references for example in examples] == [("True",), ("False",)]


@pytest.mark.parametrize("answer", ["NaN", "Infinity", "1e999", "[1.5, NaN]", "null"])
def test_a_template_needs_numbers(answer: str, tmp_path: Path) -> None:
    path = _written(tmp_path / "rows.jsonl", f'{{"prompt": "a", "answer": {answer}}}'.encode())
    for keys in ({"prompt": "{answer}"}, {"references": "so {answer}"}):
        with pytest.raises(LmgymError, match=r"column 'answer' (holds nothing, and a template|must hold a text or)"):
            load_task("data", "train", path=path, test=0.0, **keys)
    if answer.startswith("["):
        with pytest.raises(LmgymError, match="a number or a list of these, got nan"):
            load_task("data", "train", path=path, test=0.0, references="answer")


def test_a_damaged_table_leads_nowhere(tmp_path: Path) -> None:
    """Offsets of texts that point outside of their buffer: refused when their row is read."""
    whole = bytearray(as_arrow([{"prompt": "x" * 100} for _ in range(64)]))
    offsets = (700).to_bytes(4, "little")  # the end of the seventh text of a batch of seven
    place = whole.find(offsets)
    assert place > 0
    whole[place : place + 4] = (2**31 - 5).to_bytes(4, "little")
    path = _written(tmp_path / "rows.arrow", bytes(whole))
    for streaming in (False, True):
        with pytest.raises(LmgymError, match=r"rows\.arrow: not readable as \.arrow: "):
            load_task("data", "train", path=path, test=0.0, streaming=streaming)


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("unpacked", "arrow"):
        monkeypatch.setattr(f"lmgym.tasks.rows.{module}.MOST_UNPACKED", 10_000)
        monkeypatch.setattr(f"lmgym.tasks.rows.{module}.RATIO", 10)
    many = [{"prompt": "x" * 1000} for _ in range(200)]
    bombs = {
        "a.jsonl.gz": gzip.compress(as_lines(many)),
        "a.json.xz": lzma.compress(json.dumps(many).encode()),
        "a.parquet": as_parquet([{"prompt": f"{n}" + "x" * 10_000} for n in range(100)]),
    }
    for name, content in bombs.items():
        with pytest.raises(LmgymError, match=r"unpacks to more than 10,000 bytes and 10 times its size"):
            load_task("data", "train", path=_written(tmp_path / name, content), test=0.0)
    monkeypatch.setattr("lmgym.tasks.rows.unpacked.LARGEST_MEMBER", 1000)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("rows.jsonl", as_lines(many))
    with pytest.raises(LmgymError, match=r"the member is longer than 1,000 bytes; unpack the archive"):
        load_task("data", "train", path=str(tmp_path / "a.zip" / "rows.jsonl"))


def test_formats_that_are_not_read_name_those_that_are(tmp_path: Path) -> None:
    path = _written(tmp_path / "rows.jsonl.bz2", bz2.compress(as_lines(SUMS)))
    with pytest.raises(LmgymError, match=r"cannot read a file that ends in '\.bz2'; .*\.jsonl"):
        load_task("data", "train", path=path)
    assert next(load_rows("t", "train", _written(tmp_path / "x.csv", as_csv(SUMS)), ""))[0].endswith("x.csv:2")


def _written(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def test_a_pattern_may_have_several_groups(tmp_path: Path) -> None:
    """The first group that took part is the value; with none, all that was found."""
    rows = [{"prompt": f"{n}?", "answer": text} for n, text in enumerate(("#### 5", r"so \boxed{7}", "none"))]
    path = _written(tmp_path / "rows.jsonl", as_lines(rows))
    cell = {"column": "answer", "pattern": r"#### (.*)|\\boxed\{(.*?)\}|none"}
    found = load_task("data", "train", path=path, references=cell, test=0.0)
    assert [one.references for one in found] == [("5",), ("7",), ("none",)]


def called(*functions: dict[str, Any]) -> list[dict[str, Any]]:
    calls = [{"id": f"c{n}", "type": "function", "function": one} for n, one in enumerate(functions)]
    return [USER, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "5"}]


def test_calls_of_tools_have_objects_as_arguments(tmp_path: Path) -> None:
    """OpenAI writes arguments as JSON text; parquet gives each call the keys of all others."""
    own, other = {"name": "weather", "arguments": {"city": "Paris"}}, {"name": "add", "arguments": {"a": 1, "b": [2]}}
    text = {"name": "weather", "arguments": '{"city": "Paris", "unit": null}'}
    rows = [{"prompt": called(one)} for one in (own, other, {"name": "x", "arguments": "no JSON"}, text)]
    path = _written(tmp_path / "rows.jsonl", as_lines(rows))
    found = [one.prompt for one in load_task("data", "train", path=path, test=0.0)]
    calls = [prompt[1]["tool_calls"][0]["function"] for prompt in found]  # type: ignore[index]
    assert calls == [own, other, rows[2]["prompt"][1]["tool_calls"][0]["function"],
                     {"name": "weather", "arguments": {"city": "Paris", "unit": None}}]  # fmt: skip
    path = _written(tmp_path / "rows.parquet", as_parquet(rows[:2]))
    assert [one.prompt for one in load_task("data", "train", path=path, test=0.0)] == found[:2]


@pytest.mark.parametrize("streaming", [False, True])
def test_tools_do_not_change_the_split_of_a_prompt(streaming: bool, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", **({"tools": [{"name": "f"}]} if own else {})} for n in range(90) for own in (0, 1)]
    path = _written(tmp_path / "rows.jsonl", as_lines(rows))
    bare = _written(tmp_path / "bare.jsonl", as_lines([{"prompt": row["prompt"]} for row in rows]))
    for options in ({}, {"unfit": "drop"}):
        found = load_task("data", "test", path=path, test=0.2, streaming=streaming, **options)  # type: ignore[arg-type]
        without = load_task("data", "test", path=bare, test=0.2)
        assert [one.id.split("/")[1] for one in found] == [one.id.split("/")[1] for one in without]
        assert 10 < len(found) < 70


def test_a_split_that_gets_no_rows_says_which_share_to_change(tmp_path: Path) -> None:
    """A hash shares three prompts out. Train has no path of its own but `path`, and `test` may be 0 already."""
    path = _written(tmp_path / "rows.jsonl", as_lines(SUMS[:3]))
    shares: dict[str, Any] = {"validation": 0.9999, "test": 0.0}
    for streaming in (False, True):
        with pytest.raises(LmgymError, match=r"validation 3, test 0\); lower task\.test or task\.validation$"):
            load_task("data", "train", path=path, streaming=streaming, **shares)
        with pytest.raises(LmgymError, match=r"\); raise task\.test \(0\.0001\), or .* its own, task\.test_path$"):
            load_task("data", "test", path=path, streaming=streaming, test=0.0001)
    pairs = [{"prompt": row["prompt"], "chosen": "a", "rejected": "b"} for row in SUMS[:3]]
    path = _written(tmp_path / "pairs.jsonl", as_lines(pairs))
    with pytest.raises(LmgymError, match=r"validation 3, test 0\); lower task\.test or task\.validation$"):
        load_task("preferences", "train", path=path, **shares)
    with pytest.raises(LmgymError, match=r"; raise task\.test, or give the split data of its own$"):
        load_task("preferences", "test", path=path, test=0.0001)


def test_prompts_of_a_held_out_file_are_not_trained_on(tmp_path: Path) -> None:
    """Nor validated with. A file that is named for both is taken at its word; in a stream nobody looks."""
    train, test = (_written(tmp_path / f"{name}.jsonl", as_lines(SUMS[begin:end]))
                   for name, begin, end in (("train", 0, 30), ("test", 20, 40)))  # fmt: skip
    both = {"path": train, "test_path": test}
    with telling() as told:
        assert [one.id for one in load_task("data", "train", **both)] == [f"train/{n + 1}" for n in range(20)]
    assert told == ["task 'data', split 'train': rows that are left out, since another split's own data holds their "
                    "prompts too: 10"]  # fmt: skip
    check_task("data", **both)
    check_task("data", **both, validation=0.3)
    check_task("data", path=train, validation_path=test, test=0.3)
    broken = _written(tmp_path / "broken.jsonl", as_lines([*SUMS[20:30], {"prompt": 5}]))
    assert len(load_task("data", "train", path=train, test_path=broken)) == 20  # told where it is read: test
    assert len(load_task("data", "train", path=train, test_path=train)) == 30
    assert len(load_task("data", "train", path=[train, broken], test_path=[train, broken], unfit="drop")) == 40
    assert len(load_task("data", "train", **both, streaming=True)) == 30
    parts = {"splits": {"train": "train[:60%]", "test": "train[40%:]"}, "path": train}
    assert len(load_task("data", "train", **parts)) == 12


@pytest.mark.parametrize("template", [True, False])
def test_an_answer_that_is_begun_goes_on(template: bool) -> None:
    """The text of a last assistant message stands behind what the template begins an answer with, in the same message;
    its names of control tokens are text."""
    from lmgym.models.builtin import byte_tokenizer
    from lmgym.text.chat import answer_ids, prompt_ids

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML if template else None
    begun = [*ASKED, {"role": "assistant", "content": "Let me<eos> see.\n<think>"}]
    before, ids = prompt_ids(tokenizer, ASKED), prompt_ids(tokenizer, begun)
    assert ids[: len(before)] == before and tokenizer.decode(ids[len(before) :]) == "Let me<eos> see.\n<think>"
    assert tokenizer.eos_token_id not in ids[len(before) :]
    assert tokenizer.decode(answer_ids(tokenizer, begun, "2+2=4")[:-1]) == "2+2=4"


CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% endif %}"
)
