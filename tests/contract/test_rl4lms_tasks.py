"""The tasks of RL4LMs on small files in the formats of the originals: splits, errors, the Hub. None needs a network."""

import csv
import gzip
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.rewards.text.form import exact_match
from lmgym.tasks.base import MissingSplit, check_task, load_task
from lmgym.tasks.rows.find import Source, files_of, split_named
from lmgym.tasks.rows.formats import rows_of
from lmgym.tasks.rows.load import load_rows
from lmgym.tasks.rows.unfit import telling
from lmgym.tasks.rows.unpacked import lines_of
from lmgym.tasks.sources import disjoint
from lmgym.types import Example
from tests import runs

SPLITS = ("train", "validation", "test")
Rows = Callable[[str], list[dict[str, Any]]]


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_text(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def hub_rows(name: str) -> Rows:
    """Three rows of each split, in the columns that the data set has on the Hub."""

    def text(part: str, n: int) -> str:
        return f"{part} {n} is a text of halves"

    def totto(part: str, n: int) -> dict[str, Any]:
        head, body = (
            {"value": value, "is_header": header, "column_span": 1, "row_span": 1}
            for value, header in ((f"Team {part}", True), (f"Reds {n}", False))
        )
        final = [] if part == "test" else [f"They are reds {n}.", f"Reds number {n}."]
        stages = ("original_sentence", "sentence_after_deletion", "sentence_after_ambiguity", "final_sentence")
        return {
            "id": n,
            "table": [[head], [body]],
            "highlighted_cells": [[1, 0]],
            "table_page_title": "Clubs",
            "table_section_title": "",
            "table_section_text": "",
            "overlap_subset": {"validation": str(n == 1)}.get(part, "none"),
            "sentence_annotations": {stage: final for stage in stages},
        }

    rows: dict[str, Callable[[str, int], dict[str, Any]]] = {
        "imdb": lambda part, n: {"text": text(part, n), "label": n % 2},
        "imdb_seq2seq": lambda part, n: {"text": text(part, n), "label": n % 2},
        "common_gen": lambda part, n: {
            "concept_set_idx": n // 2,
            "concepts": [part, f"word{n // 2}"],
            "target": "" if part == "test" else f"A {part} word {n}.",
        },
        "cnn_daily_mail": lambda part, n: {"article": text(part, n), "highlights": f"A.\nB {n}.", "id": f"x{n}"},
        "xsum": lambda part, n: {"document": text(part, n), "summary": f"B {n}.", "id": f"x{n}"},
        "totto": totto,
        "dart": lambda part, n: {
            "tripleset": [[part, "HAS", str(n)], ["b", "IS", "c"]],
            "subtree_was_extended": False,
            "annotations": {"source": ["e2e"], "text": [f"{part} has {n}."]},
        },
        "web_nlg": lambda part, n: {
            "category": "Airport",
            "modified_triple_sets": {"mtriple_set": [[f"{part} | has | {n}"]]},
            "lex": {"comment": [""], "lid": ["Id1"], "text": [f"{part} has {n}."], "lang": ["en"]},
        },
        "narrative_qa": lambda part, n: {
            "document": {"id": f"d{n}", "summary": {"text": text(part, n), "tokens": []}},
            "question": {"text": f"Who is {part} {n}?", "tokens": []},
            "answers": [{"text": "Ann", "tokens": []}, {"text": f"It is {n}", "tokens": []}],
        },
        "multi30k": lambda part, n: {"en": text(part, n), "de": f"Text {n}"},
        "daily_dialog": lambda part, n: {
            "dialog": [f" {part} {place} of {n} ? " for place in range(7)],
            "act": [1, 2, 3, 4, 1, 2, 3],
            "emotion": [0, 1, 2, 3, 4, 5, 6],
        },
    }
    for pair in ("parallel", "wmt14", "wmt16", "iwslt2017"):
        rows[pair] = lambda part, n: {"translation": {"en": text(part, n), "de": f"Text {n}"}}
    return lambda part: [rows[name](part, n) for n in range(3)]


HUB = [
    "imdb",
    "imdb_seq2seq",
    "common_gen",
    "cnn_daily_mail",
    "xsum",
    "totto",
    "dart",
    "web_nlg",
    "narrative_qa",
    "multi30k",
    "daily_dialog",
    "parallel",
    "wmt14",
    "wmt16",
    "iwslt2017",
]
CONFIGS = {"cnn_daily_mail": "3.0.0", "web_nlg": "release_v3.0_en", "wmt14": "de-en", "wmt16": "de-en"}
CONFIGS["iwslt2017"] = "iwslt2017-de-en"
REVIEWS = ("imdb", "imdb_seq2seq")


def crd3_files(folder: Path) -> None:
    for part in ("train", "val", "test"):
        turns = [{"NAMES": ["MATT"], "UTTERANCES": [f"{part} {n}.", "So."], "NUMBER": n} for n in range(5)]
        write_text(folder / "aligned data" / f"{part}_files", f"{part}E1\n")
        write_text(folder / "cleaned data" / f"{part}E1.json", json.dumps({"TURNS": turns}))


def task_arguments(name: str, folder: Path) -> dict[str, Any]:
    """Small files for one of these tasks, in `folder`, and the arguments that read them."""
    if name == "crd3":
        crd3_files(folder)
        return {"path": str(folder)}
    for part in ("train", "test") if name in REVIEWS else SPLITS:
        write(folder / f"{part}.jsonl", hub_rows(name)(part))
    if name in REVIEWS:
        rows = [{"text": f"train {n} is a text of halves", "label": n % 2} for n in range(60)]
        write(folder / "train.jsonl", rows)
    return {"path": str(folder)}


# ---------------------------------------------------------------- the contract


@pytest.mark.parametrize("name", [*HUB, "crd3"])
def test_each_task_keeps_the_contract_and_gold_gets_the_top_mark(name: str, tmp_path: Path) -> None:
    arguments = task_arguments(name, tmp_path)
    for split in SPLITS:
        check_task(name, split, **arguments)
        examples = [example for example in load_task(name, split, **arguments) if example.references]
        assert examples or (name, split) in [("common_gen", "test"), ("totto", "test")]
        assert set(exact_match([example.references[-1] for example in examples], examples)) <= {1.0}
        assert all(json.loads(json.dumps(example.meta)) == example.meta for example in examples)
    with pytest.raises(MissingSplit, match=r"has no split 'tset'; did you mean 'test'\?"):
        load_task(name, "tset", **arguments)


def test_dummy_is_one_prompt_in_every_split() -> None:
    for split in SPLITS:
        found = load_task("dummy", split)
        assert [example.prompt for example in found] == ["<|endoftext|>"] * 100
        assert found == load_task("dummy", split) and len({example.id for example in found}) == 100
    assert load_task("dummy", "test", prompt="Count!", size=1) == [Example("dummy/test/0", "Count!")]
    with pytest.raises(MissingSplit, match="task 'dummy' has no split 'dev'"):
        load_task("dummy", "dev")
    with pytest.raises(LmgymError, match=r"task.size must be at least 1, not 0"):
        load_task("dummy", "test", size=0)


def test_the_page_names_every_task_and_its_arguments() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks_reference.md").read_text(encoding="utf-8")
    for name in [*HUB, "crd3", "dummy"]:
        _, found, section = page.partition(f"## `{name}`")
        assert found, name
        section = section.split("\n## ")[0]
        own = [*inspect.signature(registry.get("task", name)).parameters][1:]
        assert not [one for one in own if f"`{one}`" not in section], name


# ---------------------------------------------------------------- the Hub


def on_hub(name: str, folder: Path) -> str:
    """A folder that the datasets library reads as it reads a data set on the Hub."""
    parts = ("train", "test") if name in REVIEWS else SPLITS
    for part in parts:
        write(folder / f"{part}.jsonl", hub_rows(name)(part))
    files = "".join(f"  - {{split: {part}, path: {part}.jsonl}}\n" for part in parts)
    config = CONFIGS.get(name, "default")
    write_text(folder / "README.md", f'---\nconfigs:\n- config_name: "{config}"\n  data_files:\n{files}---\n')
    return str(folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("name", HUB)
def test_rows_through_datasets_are_those_of_files(name: str, tmp_path: Path, cache: None) -> None:
    place = on_hub(name, tmp_path / "hub")
    for split in ("train", "test"):
        expected = load_task(name, split, path=place)
        assert load_task(name, split, hub_id=place) == expected
        assert (
            load_task(name, split, hub_id=f"{place}@refs/convert/parquet") == expected
        )  # a branch is no part of the id


def test_a_split_that_the_hub_has_not_or_names_otherwise(tmp_path: Path, cache: None) -> None:
    place = on_hub("dart", tmp_path / "hub")
    card = (tmp_path / "hub" / "README.md").read_text(encoding="utf-8")
    write_text(tmp_path / "hub" / "README.md", card.replace("split: validation", "split: dev"))
    assert load_task("dart", "validation", hub_id=place) == load_task("dart", "validation", path=place)
    write_text(tmp_path / "hub" / "README.md", card.replace("  - {split: test, path: test.jsonl}\n", ""))
    with pytest.raises(MissingSplit, match=r"task 'dart' has no split 'test': '.*hub' says: Unknown split"):
        load_task("dart", "test", hub_id=place)
    with pytest.raises(LmgymError, match=r"task.hub_id: cannot load '.*none'"):
        load_task("dart", "test", hub_id=str(tmp_path / "none"))


@pytest.mark.parametrize("name", [name for name in HUB if name != "parallel"])
def test_without_a_network_the_hub_is_one_sentence(name: str, cache: None) -> None:
    with pytest.raises(LmgymError, match=r"^task.hub_id: cannot load '[^']+' \([^\n]+\); .* task\.path to"):
        load_task(name, "test")


# ---------------------------------------------------------------- other formats of the originals


def test_parquet_csv_and_json_give_what_json_lines_give(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("cnn_daily_mail", "imdb", "daily_dialog"):
        rows = hub_rows(name)("train")
        expected = load_task(name, "train", path=str(write(tmp_path / name / "lines" / "train.jsonl", rows)))
        for number, half in enumerate((rows[:2], rows[2:])):
            file = tmp_path / name / f"train-0000{number}-of-00002.parquet"
            parquet.write_table(pyarrow.Table.from_pylist(half), file)
        assert load_task(name, "train", path=str(tmp_path / name)) == expected
        (tmp_path / name / "x.json").write_text(json.dumps(rows), encoding="utf-8")
        assert load_task(name, "train", path=str(tmp_path / name / "x.json")) == expected
        if name != "daily_dialog":
            write_csv(tmp_path / name / "train.csv", rows)
            assert load_task(name, "train", path=str(tmp_path / name / "train.csv")) == expected
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(LmgymError, match=r"train.parquet: not readable as .parquet: .*after row 0"):
        load_task("xsum", "train", path=str(tmp_path / "train.parquet"))


def test_imdb_reads_the_original_folders(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for number in (2, 10):
            for label, name in enumerate(("neg", "pos")):
                write_text(tmp_path / part / name / f"{number}_{label * 9 + 1}.txt", f"{part} {name} {number} text")
    found = load_task("imdb", "train", path=str(tmp_path), validation=0.0)
    by_id = {example.id: example for example in found}
    assert by_id["imdb/train/1"].meta == {"label": 0, "review": "train neg 10 text", "rating": 1}
    assert by_id["imdb/train/2"].meta == {"label": 1, "review": "train pos 2 text", "rating": 10}
    (tmp_path / "test" / "pos" / "2_10.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(LmgymError, match=r"test/pos/2_10.txt: not UTF-8 \(byte 4\)"):
        load_task("imdb", "train", path=str(tmp_path))


def test_imdb_train_and_validation_give_way_to_all_of_test(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"text": f"it {n} was good", "label": 1} for n in range(50)])
    write(tmp_path / "test.jsonl", [{"text": f"it {n} is bad", "label": 0} for n in range(40, 60)])
    for name in REVIEWS:
        for size in (None, 1):  # what test leaves out is no more fit to train on
            arguments: dict[str, Any] = {"path": str(tmp_path), "test_size": size}
            parts = {part: {e.prompt for e in load_task(name, part, **arguments)} for part in ("train", "validation")}
            assert parts["train"] | parts["validation"] == {f"it {n}" for n in range(40)}
            assert not parts["train"] & parts["validation"] and len(parts["validation"]) > 1
            assert len(load_task(name, "test", **arguments)) == (size or 20)


def test_common_gen_reads_lines(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("dev", 2), ("test", 1)):
        concepts = [f"{part} run" if number < 2 else f"{part} sit" for number in range(count)]
        write_text(tmp_path / f"commongen.{part}.src_alpha.txt", "\n".join(concepts) + "\n")
        if part != "test":
            write_text(tmp_path / f"commongen.{part}.tgt.txt", "\n".join(f"It {n}." for n in range(count)) + "\n")
    check_task("common_gen", path=str(tmp_path))
    found = load_task("common_gen", "train", path=str(tmp_path))
    assert [(e.meta["concepts"], e.references) for e in found] == [
        (["train", "run"], ("It 0.", "It 1.")),
        (["train", "sit"], ("It 2.",)),
    ]
    assert load_task("common_gen", "test", path=str(tmp_path))[0].references == ()
    single = load_task("common_gen", "validation", path=str(tmp_path / "commongen.dev.src_alpha.txt"))
    assert single == load_task("common_gen", "validation", path=str(tmp_path))
    write_text(tmp_path / "commongen.train.tgt.txt", "It 0.\nIt 1.\n")
    with pytest.raises(LmgymError, match=r"train.src_alpha.txt:3: the line has no other in .*train.tgt.txt"):
        load_task("common_gen", "train", path=str(tmp_path))
    write_text(tmp_path / "commongen.train.tgt.txt", "It 0.\n\nIt 2.\n")
    with pytest.raises(LmgymError, match=r"train.tgt.txt:2: a reference in column 'sentence' must be a text, got ''"):
        load_task("common_gen", "train", path=str(tmp_path))


def test_web_nlg_and_dart_read_xml(tmp_path: Path) -> None:
    entry = (
        '<entry category="{0}" eid="1" size="1"><originaltripleset><otriple>x | y | z</otriple></originaltripleset>'
        "<modifiedtripleset><mtriple>{0}_A | runs | B &amp; C|D</mtriple><mtriple>B | is | 3</mtriple>"
        '</modifiedtripleset><lex lid="Id1">{0} A runs.</lex><lex lid="Id2">B and {0}.</lex></entry>'
    )
    for part, kind in (("train", "Food"), ("dev", "City"), ("test", "Film")):
        text = f"<benchmark><entries>{entry.format(kind)}</entries></benchmark>"
        write_text(tmp_path / part / "2triples" / f"{kind}.xml", text)
    check_task("web_nlg", path=str(tmp_path))
    assert load_task(
        "web_nlg", "validation", path=str(tmp_path), template="{head}|{relation}|{tail}", separator=" && "
    ) == [
        Example(
            "web_nlg/validation/0",
            "City_A|runs|B & C|D && B|is|3",
            ("City A runs.", "B and City."),
            {"table": [["City_A", "runs", "B & C|D"], ["B", "is", "3"]], "category": "City"},
        )
    ]
    write_text(tmp_path / "dart-test.xml", "<benchmark><entries>\n<entry></benchmark>")
    with pytest.raises(LmgymError, match=r"dart-test.xml:2: not valid XML: mismatched tag"):
        load_task("dart", "test", path=str(tmp_path / "dart-test.xml"))
    with pytest.raises(LmgymError, match=r"task.template must hold \{head\}, \{relation\} and \{tail\}"):
        load_task("dart", "test", path=str(tmp_path), template="{head} {tail}")


def test_narrative_qa_reads_the_original_csv(tmp_path: Path) -> None:
    qaps = [
        {"document_id": "d", "set": part, "question": f"Who is {part}?", "answer1": "Ann", "answer2": "The Ann"}
        for part in ("train", "valid", "test")
    ]
    write_csv(tmp_path / "qaps.csv", qaps)
    (tmp_path / "third_party" / "wikipedia").mkdir(parents=True)
    summary = {"document_id": "d", "set": "train", "summary": ' "Ann", she said,\nis Ann.', "summary_tokenized": "x"}
    write_csv(tmp_path / "third_party" / "wikipedia" / "summaries.csv", [summary])
    check_task("narrative_qa", path=str(tmp_path))
    (found,) = load_task("narrative_qa", "validation", path=str(tmp_path))
    assert (found.prompt, found.references) == ('who is valid? \\n  "ann", she said,\nis ann.', ("ann", "the ann"))
    write_csv(tmp_path / "qaps.csv", [{**qaps[0], "document_id": "e"}])
    with pytest.raises(LmgymError, match=r"qaps.csv:2: the document 'e' has no summary in .*summaries.csv"):
        load_task("narrative_qa", "train", path=str(tmp_path))
    with pytest.raises(MissingSplit, match=r"no row of .*qaps.csv has it in its column 'set'"):
        load_task("narrative_qa", "test", path=str(tmp_path))


def test_parallel_files_of_lines(tmp_path: Path) -> None:
    for language, word in (("en", "two"), ("de", "zwei")):
        for part in ("train", "newstest"):
            with gzip.open(tmp_path / f"{part}.{language}.gz", "wt", encoding="utf-8") as file:
                file.write(f"{part} {word}\r\n{part} {word} \u2028 more\n")
    arguments: dict[str, Any] = {"path": str(tmp_path / "{split}.{language}.gz"), "splits": {"test": "newstest"}}
    check_task("parallel", **arguments)
    assert load_task("parallel", "test", source_language="de", target_language="en", **arguments) == [
        Example(
            f"parallel/test/{n}",
            f"newstest zwei{more}",
            (f"newstest two{more}",),
            {"source_language": "de", "target_language": "en"},
        )
        for n, more in enumerate(("", " \u2028 more"))
    ]
    assert len(load_task("parallel", "train", max_size=1, **arguments)) == 1
    write_text(tmp_path / "a.txt", "one\n\n")
    for other, sentence in (
        ("1\n", r"a.txt:2: there is no such line in .*b.txt"),
        ("\n2\n", r"b.txt:1: .*'de' must be"),
    ):
        write_text(tmp_path / "b.txt", other)
        with pytest.raises(LmgymError, match=sentence):
            load_task("parallel", "train", path=str(tmp_path / "a.txt"), target_path=str(tmp_path / "b.txt"))
    write_text(tmp_path / "b.txt", "1\n2\n")
    with pytest.raises(LmgymError, match=r"a.txt:2: the sentence in 'en' must be a text, got ''; task.skip_blank"):
        load_task("parallel", "train", path=str(tmp_path / "a.txt"), target_path=str(tmp_path / "b.txt"))


def test_wrong_arguments_of_translation(tmp_path: Path) -> None:
    for name, arguments, sentence in (
        ("parallel", {}, "needs either task.path or task.hub_id"),
        ("parallel", {"path": "x", "splits": {"tset": "y"}}, r"task.splits names 'tset'; did you mean 'test'"),
        ("wmt16", {"target_language": "en"}, "task.target_language must differ from task.source_language, 'en'"),
        ("wmt16", {"path": "x", "news_only": True}, "task.news_only reads the Hub"),
        ("multi30k", {"test_set": "test_2017_flickr"}, "task.test_set: 'test_2017_flickr' is not on the Hub"),
        ("wmt14", {"max_size": 0}, "task.max_size must be at least 1, not 0"),
        ("cnn_daily_mail", {"truncate_article": 0}, "task.truncate_article must be at least 1, not 0"),
        ("totto", {"representation": "table"}, "task.representation"),
        ("daily_dialog", {"context_size": 0}, "task.context_size must be at least 1, not 0"),
        ("imdb", {"validation": 1.0}, "task.validation must be a share of train"),
        ("imdb_seq2seq", {"positive_ratio": 0.0}, "task.positive_ratio must be above 0 and at most 1, not 0.0"),
    ):
        with pytest.raises(LmgymError, match=sentence):
            load_task(name, "train", **arguments)


def test_daily_dialog_reads_the_original_zip(tmp_path: Path) -> None:
    for part in ("train", "validation", "test"):
        folder = tmp_path / part
        write_text(folder / f"dialogues_{part}.txt", f" Hi {part} . __eou__ Yes . __eou__\nNo . __eou__ So ? __eou__\n")
        write_text(folder / f"dialogues_act_{part}.txt", "1 1 \n3 2 \n")
        write_text(folder / f"dialogues_emotion_{part}.txt", "0 0 \n0 6 \n")
    found = load_task("daily_dialog", "test", path=str(tmp_path), context_size=1)
    assert [(e.prompt, e.meta) for e in found] == [
        ("Hi test . <EOU>", {"intent": 1, "emotion": 0}),
        ("No . <EOU>", {"intent": 2, "emotion": 6}),
    ]
    train = load_task("daily_dialog", "train", path=str(tmp_path), context_size=1)
    assert [example.prompt for example in train] == ["Hi train . <EOU>"]  # the other context is in test
    check_task("daily_dialog", path=str(tmp_path), context_size=1)
    for labels, sentence in (
        ("1 1\n3\n", r"dialogues_test.txt:2: 1 codes in 'act' for 2 utterances"),
        ("1 1\n3 5\n", r"dialogues_test.txt:2: 'act' must be one of 1 \(inform\), .* got '5'"),
        ("1 1\n3 2\n1 1\n", r"dialogues_act_test.txt:3: there is no such line in .*dialogues_test.txt"),
    ):
        write_text(tmp_path / "test" / "dialogues_act_test.txt", labels)
        with pytest.raises(LmgymError, match=sentence):
            load_task("daily_dialog", "test", path=str(tmp_path), context_size=1)
    (tmp_path / "test" / "dialogues_act_test.txt").unlink()
    with pytest.raises(LmgymError, match=r"dialogues_emotion_test.txt only"):
        load_task("daily_dialog", "test", path=str(tmp_path))


def test_totto_meta_is_what_the_rewards_read(tmp_path: Path) -> None:
    arguments = task_arguments("totto", tmp_path)
    examples = load_task("totto", "validation", **arguments)
    assert [example.meta["overlap_subset"] for example in examples] == [False, True, False]
    assert "overlap_subset" not in load_task("totto", "train", **arguments)[0].meta
    first = examples[0].meta["raw_table"]["sentence_annotations"][0]
    assert first["final_sentence"] == examples[0].references[0] == "They are reds 0."
    bare = load_task("totto", "validation", keep_table=False, **arguments)
    assert [(e.id, e.prompt, e.references, set(e.meta)) for e in bare] == [
        (e.id, e.prompt, e.references, {"overlap_subset"}) for e in examples
    ]


# ---------------------------------------------------------------- bad input


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("imdb", {"text": None}, "column 'text' must hold a text, got None"),
        ("imdb", {"text": "word"}, "column 'text' must hold a review of two words or more, got 'word'"),
        ("imdb", {"label": -1}, r"column 'label' must hold 0 \(negative\) or 1 \(positive\), got -1"),
        ("imdb", "label", "there is no column 'label'"),
        ("common_gen", {"concepts": []}, r"column 'concepts' must hold concepts, got \[\]"),
        ("common_gen", {"target": ""}, "the row must hold a sentence"),
        ("common_gen", "target", "there is no column 'target'"),
        ("cnn_daily_mail", "article", "there is no column 'article'"),
        ("cnn_daily_mail", {"highlights": " "}, "column 'highlights' must hold a text, got ' '"),
        ("xsum", "summary", "there is no column 'summary'"),
        ("totto", "table", "there is no column 'table'"),
        ("totto", {"table": [[{"value": 3}]]}, "column 'table' must hold rows of cells"),
        ("totto", {"highlighted_cells": [[2, 0]]}, r"column 'highlighted_cells' must hold .* got \[\[2, 0\]\]"),
        ("totto", {"sentence_annotations": []}, "column 'sentence_annotations' holds no reference"),
        ("totto", {"sentence_annotations": [{"final_sentence": ""}]}, "must be a text, got ''"),
        (
            "totto",
            {"sentence_annotations": {"original_sentence": ["a"], "final_sentence": ["b", "c"]}},
            r"column 'sentence_annotations' must hold lists of one length, got \[\['a'\], \['b', 'c'\]\]",
        ),
        ("totto", {"sentence_annotations": {"final_sentence": 3}}, r"must hold lists of one length, got \[3\]"),
        ("dart", "tripleset", "there is no column 'tripleset'"),
        ("dart", {"tripleset": [["a", "b"]]}, r"column 'tripleset' must hold triples \[head, relation, tail\], got"),
        ("dart", {"annotations": []}, "column 'annotations' holds no reference"),
        ("dart", {"annotations": {"text": "a"}}, "column 'annotations.text' must hold a list of texts, got 'a'"),
        ("web_nlg", {"lex": {"text": ["", "b"]}}, "a reference in column 'lex' must be a text, got ''"),
        ("web_nlg", {"modified_triple_sets": {"mtriple_set": 3}}, "column 'modified_triple_sets' must hold triples"),
        ("web_nlg", {"modified_triple_sets": {"mtriple_set": {"a": 3}}}, "column 'modified_triple_sets' must hold tri"),
        ("web_nlg", {"lex": {"text": None}}, "column 'lex.text' must hold a list of texts, got None"),
        ("narrative_qa", {"question": {}}, "there is no 'question.text'; the row must hold question.text"),
        ("narrative_qa", {"document": None}, "there is no 'document.summary'"),
        ("narrative_qa", {"answers": ["a"]}, r"column 'answers' must hold objects with a text, got \['a'\]"),
        ("narrative_qa", {"answers": []}, "column 'answers' holds no reference"),
        ("wmt16", {"translation": {"en": "a"}}, "there is no column 'de'"),
        ("wmt16", {"translation": {"en": "a", "de": " "}}, "the sentence in 'de' must be a text, got ' '"),
        ("iwslt2017", {"translation": "a"}, "column 'translation' must hold an object of sentences, got 'a'"),
        ("multi30k", "de", "there is no column 'de'"),
        ("daily_dialog", "act", "there is no column 'act'"),
        ("daily_dialog", {"dialog": []}, r"each utterance must be a text, got \[\]"),
        ("daily_dialog", {"act": ["9" * 5000] * 7}, "'act' must be one of 1"),
        ("daily_dialog", {"act": [1]}, "1 codes in 'act' for 7 utterances"),
        ("daily_dialog", {"emotion": [0, 1, 2, 3, 4, 5, 7]}, r"'emotion' must be one of 0 \(no_emotion\), .* got 7"),
    ],
)
def test_the_line_and_the_column_at_fault_are_named(
    name: str, change: str | dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    good, row = hub_rows(name)("train")[:2]
    row = without(row, change) if isinstance(change, str) else {**row, **change}
    path = write(tmp_path / "train.jsonl", [good, row])
    with pytest.raises(LmgymError, match=rf"^{path}:2: .*{sentence}"):
        load_task(name, "train", path=str(path))


@pytest.mark.parametrize("name", [name for name in registry.BUILTIN["reward"] if "learned" not in name])
def test_a_metric_that_needs_references_says_so_before_training(name: str, tmp_path: Path) -> None:
    """Whatever refuses a text without references refuses its row beforehand."""
    function = registry.get("reward", name)
    bare = [Example("rows/3", "?", (), {"table": [["a", "b", "c"]], "overlap_subset": True, "concepts": ["a"]})]
    try:
        function([""], bare)
    except LmgymError as error:
        if "needs a reference" in str(error):
            with pytest.raises(LmgymError, match=r"needs a reference, and .*'rows/3'"):
                function.check(bare)
    except TypeError:  # it has arguments of its own, or judges episodes
        pass


def test_a_user_is_told_which_row_has_no_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "a", "references": "b"}, {"prompt": "c", "references": []}, {"prompt": "d"}]
    path = str(write(tmp_path / "mine.jsonl", rows))
    task = {"name": "jsonl", "path": path, "test_path": path}
    recipe = runs.write(tmp_path / "recipe.yaml", task=task, rewards={"chrf": 1.0})
    said = runs.complaint(capsys, "train", recipe, f"out={tmp_path / 'run'}")
    assert said == "reward 'chrf' needs a reference, and example 'mine/2' has none"  # file and line
    said = runs.complaint(capsys, "train", recipe, f"out={tmp_path / 'run'}", "task.references=answer")
    assert f"{tmp_path / 'mine.jsonl'}:1: there is no column 'answer'" in said
    said = runs.complaint(capsys, "train", recipe, f"out={tmp_path / 'run'}", "evaluation.split=dev")
    assert "task 'data' has no split 'dev'; Valid: test, train, validation" in said


OPTIONAL = {"id", "concept_set_idx", "table_section_text", "overlap_subset", "subtree_was_extended", "category"}
ELSE = {("narrative_qa", "document"): "prompt"}  # in UnifiedQA's rows, which it may be


@pytest.mark.parametrize("name", HUB)
def test_every_column_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    good, row = hub_rows(name)("train")[:2]
    for column in row:
        path = write(tmp_path / "train.jsonl", [good, without(row, column)])
        if column in OPTIONAL:
            assert load_task(name, "train", path=str(path), **({"validation": 0.0} if name in REVIEWS else {}))
            continue
        with pytest.raises(LmgymError, match=rf"^{path}:2: there is n\w+ .*'{ELSE.get((name, column), column)}'"):
            load_task(name, "train", path=str(path))


@pytest.mark.parametrize("name", HUB)
def test_rows_that_do_not_fit_are_left_out_where_the_recipe_says_so(name: str, tmp_path: Path) -> None:
    """Of any task, and of a mixture's members."""
    good, row, other = ({**one, "label": 1} if name in REVIEWS else one for one in hub_rows(name)("train")[:3])
    needed = next(column for column in row if column not in OPTIONAL)
    path = str(write(tmp_path / "train.jsonl", [good, without(row, needed), {}, other]))
    member: dict[str, Any] = {"path": path, **({"validation": 0.0} if name in REVIEWS else {})}
    with telling() as told:
        found = load_task(name, "train", **member, unfit="drop")
        mixed = load_task("mixture", "train", tasks=[{"name": name, **member}], unfit="drop")
    whole = load_task(name, "train", **{**member, "path": str(write(tmp_path / "all.jsonl", [good, other]))})
    assert [one.prompt for one in found] == [one.prompt for one in whole] and len(mixed) == len(found)
    assert len(told) == 2 and "2 rows do not fit and are left out" in told[0]
    with pytest.raises(LmgymError, match=r"In all 2 rows do not fit \(task\.unfit: drop leaves them out\)"):
        load_task("mixture", "train", tasks=[{"name": name, **member, "unfit": "refuse"}], unfit="drop")


def test_lines_and_turns_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    write_text(tmp_path / "train.en", "one\n\nthree\n")
    write_text(tmp_path / "train.de", "eins\nzwei\ndrei\n")
    found = load_task("parallel", "train", path=str(tmp_path / "train.{language}"), unfit="drop")
    assert [one.references for one in found] == [("eins",), ("drei",)]
    write_text(tmp_path / "c" / "commongen.train.src_alpha.txt", "dog run\n\ncat sit\n")
    write_text(tmp_path / "c" / "commongen.train.tgt.txt", "A dog.\nA cow.\nA cat.\n")
    found = load_task("common_gen", "train", path=str(tmp_path / "c"), unfit="drop")
    assert [one.references for one in found] == [("A dog.",), ("A cat.",)]
    write_text(tmp_path / "d" / "train" / "dialogues_train.txt", "a __eou__ b __eou__\nc __eou__ d\n")
    found = load_task("daily_dialog", "train", path=str(tmp_path / "d"), context_size=1, unfit="drop")
    assert [one.references for one in found] == [(" b <EOU>",)]
    crd3_files(tmp_path / "e")
    file = tmp_path / "e" / "cleaned data" / "trainE1.json"
    turns = json.loads(file.read_text(encoding="utf-8"))["TURNS"]
    file.write_text(json.dumps({"TURNS": [*turns[:2], "x", {"NAMES": ["A"], "UTTERANCES": [" "]}, *turns[2:]]}))
    with telling() as told:
        assert len(load_task("crd3", "train", path=str(tmp_path / "e"), unfit="drop")) == 3
    assert "2 rows do not fit and are left out" in told[0] and "trainE1.json: turn 3" in told[0]


@pytest.mark.parametrize("name", HUB)
def test_another_encoding_is_named_by_its_line(name: str, tmp_path: Path) -> None:
    good, row = (json.dumps(row, ensure_ascii=False) for row in hub_rows(name)("train")[:2])
    path = tmp_path / "train.jsonl"
    path.write_bytes(f'{good}\n{row[:-1]}, "more": "caf\u00e9"}}\n'.encode("latin-1"))
    with pytest.raises(LmgymError, match=rf"^{path}:2: not UTF-8 \(byte \d+ of the line\)"):
        load_task(name, "train", path=str(path))
    path.write_text("", encoding="utf-8")
    with pytest.raises(LmgymError, match=rf"^task '{name}' has no examples in split 'train'; task.path is {path}"):
        load_task(name, "train", path=str(path))


@pytest.mark.parametrize(
    ("turn", "sentence"),
    [
        ({"NAMES": ["A"]}, "there is no column 'UTTERANCES'"),
        ({"NAMES": [], "UTTERANCES": ["a"]}, r"key 'NAMES' must hold a list of texts, got \[\]"),
        ({"NAMES": ["A"], "UTTERANCES": [" "]}, "key 'UTTERANCES' holds no text"),
        ("a", "expected an object"),
    ],
)
def test_crd3_names_the_turn_at_fault(turn: Any, sentence: str, tmp_path: Path) -> None:
    crd3_files(tmp_path)
    file = tmp_path / "cleaned data" / "trainE1.json"
    turns = json.loads(file.read_text(encoding="utf-8"))["TURNS"]
    file.write_text(json.dumps({"TURNS": [*turns[:3], turn, *turns[3:]]}), encoding="utf-8")
    with pytest.raises(LmgymError, match=f"trainE1.json: turn 4: {sentence}"):
        load_task("crd3", "train", path=str(tmp_path))
    if "holds no text" in sentence:
        assert len(load_task("crd3", "train", path=str(tmp_path), skip_blank=True)) == 3


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"article,highlights\na,b\ncaf\xe9,b\n", r"train.csv:3: not UTF-8 \(byte 4 of the line\)"),
        (b'article,highlights\n"a\nb",c\nd\n', "train.csv:4: 1 fields, expected 2: 'article', 'highlights'"),
        (b'article,highlights\na,"b\n', "train.csv:2: not readable as .csv: unexpected end of data"),
        (b"article,highlights\n", "task 'cnn_daily_mail' has no examples in split 'train'"),
        (b"text,highlights\na,b\n", "train.csv:2: there is no column 'article'"),
    ],
)
def test_broken_csv(content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_bytes(content)
    with pytest.raises(LmgymError, match=sentence):
        load_task("cnn_daily_mail", "train", path=str(tmp_path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.de.gz").write_bytes(gzip.compress(b"eins\n" * 5000)[:40])
    with pytest.raises(LmgymError, match=r"cannot read .*train.de.gz: "):
        list(lines_of(tmp_path / "train.de.gz"))
    (tmp_path / "train.de.gz").write_bytes(b"eins\n")
    with pytest.raises(LmgymError, match=r"cannot read .*train.de.gz: Not a gzipped file"):
        list(lines_of(tmp_path / "train.de.gz"))
    with pytest.raises(LmgymError, match=r"a.docx: cannot read a file that ends in '.docx'; .*\.jsonl"):
        rows_of(tmp_path / "a.docx")
    with pytest.raises(LmgymError, match=r"task.path: there is no file or folder .*nowhere"):
        load_task("xsum", "train", path=str(tmp_path / "nowhere"))


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.parquet").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(LmgymError, match=r"train.parquet: a .parquet file needs pyarrow: pip install 'lmgym\[data\]'"):
        load_task("xsum", "train", path=str(tmp_path / "train.parquet"))


# ---------------------------------------------------------------- which files, which splits


def test_which_files_hold_a_split(tmp_path: Path) -> None:
    for name, part in (
        ("totto_dev_data.jsonl", "validation"),
        ("unlabeled_totto_test_set.jsonl", "test"),
        ("train-00001-of-00002.parquet", "train"),
        ("dart-v1.1.1-full-dev.json", "validation"),
        ("retrained.csv", None),
        ("latest.csv", None),
    ):
        assert split_named(Path(name)) == part
    for name in ("train-00001-of-00002.parquet", "train-00000-of-00002.parquet", "train.csv", "dev.csv", "x.csv"):
        (tmp_path / name).touch()
    names = [file.name for file in files_of(Source("t", tmp_path), "train")]
    assert names == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert [file.name for file in files_of(Source("t", tmp_path), "validation")] == ["dev.csv"]
    assert files_of(Source("t", tmp_path / "{split}.csv"), "validation") == [tmp_path / "dev.csv"]
    assert files_of(Source("t", tmp_path / "x.csv"), "train") == [tmp_path / "x.csv"]
    (tmp_path / "valid.csv").touch()
    with pytest.raises(LmgymError, match=r"holds several files for split 'validation': dev.csv, valid.csv; name one"):
        files_of(Source("t", tmp_path), "validation")
    for path in (tmp_path, tmp_path / "{split}.csv", tmp_path / "dev.csv"):
        with pytest.raises(MissingSplit, match="task 't' has no split 'test'"):
            files_of(Source("t", path), "test")


def test_splits_give_way() -> None:
    parts = {
        "train": [Example("a", "1"), Example("b", "2"), Example("c", "3")],
        "validation": [Example("d", "2"), Example("e", "4")],
        "test": [Example("f", "3"), Example("g", "4")],
    }
    assert [example.id for example in disjoint("riddles", "train", parts.__getitem__)] == ["a"]
    assert [example.id for example in disjoint("riddles", "validation", parts.__getitem__)] == ["d"]
    assert disjoint("riddles", "test", parts.__getitem__) == parts["test"]


def test_rows_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [{"a": 1}])
    with path.open("a", encoding="utf-8") as file:
        file.write("not JSON\n")
    rows = load_rows("t", "train", path, "")
    assert next(rows) == (f"{path}:1", {"a": 1})
    with pytest.raises(LmgymError, match=r"train.jsonl:2: not valid JSON"):
        next(rows)
    good = {"document": "a", "summary": "b"}
    write(tmp_path / "train.jsonl", [good, good, {}])
    assert len(load_task("xsum", "train", path=str(path), max_size=2)) == 2
