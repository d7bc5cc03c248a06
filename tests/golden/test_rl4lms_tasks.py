"""Prompts and references of RL4LMs' tasks, worked by hand from its formulas; real data, where it lies beside the
repository, has the counts that its manifest gives. Case 13 of the seed study is what the original code gave.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lmgym.rewards.text.form import exact_match
from lmgym.tasks.base import MissingSplit, check_task, load_task
from lmgym.tasks.summarisation import first_words
from lmgym.tasks.tables import linearised


def cell(value: str, header: bool = False, columns: int = 1) -> dict[str, Any]:
    return {"value": value, "is_header": header, "column_span": columns, "row_span": 1}


def table_row(table: list[list[dict[str, Any]]], highlighted: list[list[int]], **changes: Any) -> dict[str, Any]:
    row = {"table": table, "highlighted_cells": highlighted, "table_page_title": "", "table_section_title": ""}
    return {**row, **changes}


REDS = [[cell("Team", header=True)], [cell("Reds")]]
PLAIN = "<table> <cell> Reds <col_header> Team </col_header> </cell> </table>"


def test_totto_subtable_is_case_13() -> None:
    titles = {"table_page_title": "Baseball", "table_section_title": "Clubs"}
    assert linearised(table_row(REDS, [[1, 0]])) == PLAIN + PLAIN
    assert linearised(table_row(REDS, [[1, 0]], **titles)) == (
        f"{PLAIN}<page_title> Baseball </page_title> <section_title> Clubs </section_title> {PLAIN}"
    )


def test_totto_full_table_marks_the_highlighted_cells() -> None:
    body = (
        "<table> <row> <cell> Team </cell> </row> <row> <highlighted_cell> Reds <col_header> Team </col_header> "
        "</highlighted_cell> </row> </table>"
    )
    row = table_row(REDS, [[1, 0]], table_page_title="Baseball")
    assert linearised(row, full=True) == f"{body}<page_title> Baseball </page_title> {body}"


def test_totto_headers_of_wide_cells_and_of_rows() -> None:
    """By hand. Year and 1998, 1999 are headers, as is Goals, which is two columns wide; so is the 5."""
    table = [
        [cell("Year", header=True), cell("Goals", header=True, columns=2)],
        [cell("1998", header=True), cell("3"), cell("4")],
        [cell("1999", header=True), cell("5", columns=2)],
    ]
    prompt = linearised(table_row(table, [[1, 2], [2, 1], [2, 0]]))
    body = (
        "<table> <cell> 4 <col_header> Goals </col_header> <row_header> 1998 </row_header> </cell> "
        "<cell> 5 <col_header> Goals </col_header> <row_header> 1999 </row_header> </cell> "
        "<cell> 1999 <col_header> Year </col_header> <col_header> 1998 </col_header> </cell> </table>"
    )
    assert prompt == body + body


def write(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_imdb_half_is_case_13(tmp_path: Path) -> None:
    text = "This movie was really good and fun"
    path = write(tmp_path / "reviews.jsonl", [{"text": text, "label": 1}])
    (example,) = load_task("imdb", "train", path=path, validation=0.0)
    assert (example.prompt, example.references) == ("This movie was", (" really good and fun",))
    assert example.prompt + example.references[0] == example.meta["review"] == text
    assert load_task("imdb", "train", path=path, validation=0.0, reference="review")[0].references == (text,)
    (example,) = load_task("imdb_seq2seq", "train", path=path, validation=0.0)
    assert (example.prompt, example.references) == ("This movie was", ("really good and fun",))


def test_common_gen_prompts(tmp_path: Path) -> None:
    row = {"concept_set": "dog_N#run_V", "scene": ["A dog runs.", "Run, dog!"]}
    path = write(tmp_path / "commongen.train.jsonl", [row])
    (example,) = load_task("common_gen", "train", path=path)
    assert (example.prompt, example.references) == ("summarize: dog run ", ("A dog runs.", "Run, dog!"))
    recipe = load_task("common_gen", "train", path=path, prefix="generate a sentence with: ", end=".")
    assert recipe[0].prompt == "generate a sentence with: dog run."
    assert load_task("common_gen", "train", path=path, separator=", ")[0].prompt == "summarize: dog, run "


def test_daily_dialog_window(tmp_path: Path) -> None:
    row = {"dialog": ["Hi . ", " Yes ? ", " Tea , please . ", " Here . "], "act": [1, 2, 3, 4], "emotion": [4, 0, 0, 6]}
    found = load_task("daily_dialog", "train", path=write(tmp_path / "train.jsonl", [row]), context_size=2)
    assert [(example.prompt, example.references, example.meta) for example in found] == [
        ("Hi . <EOU> Yes ? <EOU>", (" Tea , please . <EOU>",), {"intent": 3, "emotion": 0}),
        ("Yes ? <EOU> Tea , please . <EOU>", (" Here . <EOU>",), {"intent": 4, "emotion": 6}),
    ]


def test_crd3_window(tmp_path: Path) -> None:
    turns = [("MATT", ["Hello.", "Sit."]), ("SAM", ["Hi."]), ("LIAM", ["A door?"]), ("MATT", ["Yes."])]
    (tmp_path / "aligned data").mkdir()
    (tmp_path / "aligned data" / "train_files").write_text("C1E001\n", encoding="utf-8")
    (tmp_path / "cleaned data").mkdir()
    episode = {"TURNS": [{"NAMES": [name], "UTTERANCES": said, "NUMBER": 1} for name, said in turns]}
    (tmp_path / "cleaned data" / "C1E001.json").write_text(json.dumps(episode), encoding="utf-8")
    found = load_task("crd3", "train", path=str(tmp_path), max_context_size=2)
    assert [(example.prompt, example.references) for example in found] == [
        ("MATT: Hello. Sit.\nSAM: Hi.\nLIAM: ", ("A door?",)),
        ("SAM: Hi.\nLIAM: A door?\nMATT: ", ("Yes.",)),
    ]


def test_narrative_qa_groups_the_answers_of_unified_qa(tmp_path: Path) -> None:
    lines = ['Who sings? \\n Ann "A" sings.\tAnn ', 'Who sings? \\n Ann "A" sings.\tShe', '"Why? \\n No.\tNo']
    (tmp_path / "train.tsv").write_text("\n".join(lines), encoding="utf-8")
    found = load_task("narrative_qa", "train", path=str(tmp_path))
    assert [(example.prompt, example.references) for example in found] == [
        ('who sings? \\n ann "a" sings.', ("ann", "she")),
        ('"why? \\n no.', ("no",)),
    ]


def test_articles_are_cut_behind_a_word() -> None:
    text = " Two  women\nmeet again. "
    assert [first_words(text, count) for count in (1, 3, 4, 5)] == [" Two", " Two  women\nmeet", text, text]


# ---------------------------------------------------------------- real data


def real(shared: Path, name: str) -> str:
    folder = shared / "data" / name
    if not folder.exists():
        pytest.skip(f"needs {folder}")
    return str(folder)


def gold(name: str, split: str, **arguments: Any) -> int:
    """The number of examples of a split, whose first and last references get the top mark; the contract holds."""
    check_task(name, split, **arguments)
    examples = load_task(name, split, **arguments)
    for place in (0, -1):
        assert set(exact_match([example.references[place] for example in examples], examples)) == {1.0}
    return len(examples)


def references(name: str, split: str, **arguments: Any) -> int:
    return sum(len(example.references) for example in load_task(name, split, **arguments))


@pytest.mark.slow
def test_real_imdb(shared: Path) -> None:
    folder = real(shared, "imdb")
    files = Counter(file.parts[-3] for file in Path(folder).glob("aclImdb/*/*/*.txt"))
    arguments: dict[str, Any] = {"path": f"{folder}/aclImdb"}
    assert gold("imdb", "train", **arguments) + gold("imdb", "validation", **arguments) == files["train"]
    assert gold("imdb", "test", **arguments) == files["test"]
    sample: dict[str, Any] = {"path": f"{folder}/imdb_sample.jsonl"}
    parts = {part: load_task("imdb", part, **sample) for part in ("train", "validation", "test")}
    assert len(parts["train"]) + len(parts["validation"]) == 4_000 and len(parts["test"]) == 1_000
    assert all(0.47 < sum(e.meta["label"] for e in part) / len(part) < 0.53 for part in parts.values())
    assert 0.45 < sum(example.meta["label"] for example in parts["test"][:200]) / 200 < 0.55  # not sorted by label
    assert len(load_task("imdb", "test", test_size=300, **sample)) == 300
    positive = [example.prompt for example in parts["train"] if example.meta["label"] == 1]
    assert [example.prompt for example in load_task("imdb_seq2seq", "train", **sample)] == positive
    half = load_task("imdb_seq2seq", "train", positive_ratio=0.5, **sample)
    assert [example.prompt for example in half] == positive[: len(positive) // 2]
    validation = [example.prompt for example in load_task("imdb_seq2seq", "validation", **sample)]
    assert validation == [example.prompt for example in parts["validation"]]


@pytest.mark.slow
def test_real_common_gen(shared: Path) -> None:
    folder = real(shared, "commongen")
    # 27,069 sets in the manifest: 58 of them differ from another in parts of speech alone, and are one question
    assert (gold("common_gen", "train", path=folder), references("common_gen", "train", path=folder)) == (
        27_069 - 58,
        39_069,
    )
    assert (gold("common_gen", "validation", path=folder), references("common_gen", "validation", path=folder)) == (
        993,
        4_018,
    )
    test = load_task("common_gen", "test", path=folder)
    assert len(test) == 1_497 and {example.references for example in test} == {()}
    lines = load_task("common_gen", "validation", path=folder)
    objects = load_task("common_gen", "validation", path=f"{folder}/commongen.dev.jsonl")
    by_concepts = {frozenset(example.meta["concepts"]): set(example.references) for example in lines}
    same = [by_concepts[frozenset(e.meta["concepts"])] == set(e.references) for e in objects]
    # the two files put the concepts in different orders, in which two sets become one
    assert len(objects) == 992 and sum(same) >= 990


def test_real_cnn_daily_mail(shared: Path) -> None:
    folder = real(shared, "cnn_dailymail")
    assert gold("cnn_daily_mail", "validation", path=folder) == 1_000
    examples = load_task("cnn_daily_mail", "validation", path=folder, truncate_article=100, max_size=50)
    whole = load_task("cnn_daily_mail", "validation", path=folder, limit=50)
    assert [str(e.prompt).split() for e in examples] == [str(e.prompt).split()[:100] for e in whole]
    assert all(str(long.prompt).startswith(str(short.prompt)) for short, long in zip(examples, whole, strict=True))
    with pytest.raises(MissingSplit, match="no file whose name holds test and ends in"):
        load_task("cnn_daily_mail", "test", path=folder)


def test_real_totto(shared: Path) -> None:
    folder = real(shared, "totto")
    for representation in ("subtable", "fulltable"):
        arguments = {"path": folder, "representation": representation}
        assert gold("totto", "train", **arguments) == 3
        assert gold("totto", "validation", **arguments) == 5
        assert references("totto", "validation", **arguments) == 15
    examples = load_task("totto", "validation", path=folder)
    assert [example.meta["overlap_subset"] for example in examples] == [True, False, True, True, False]
    assert examples[0].prompt.startswith("<table> <cell> 2015 <col_header> Year </col_header> </cell> <cell> The 12 ")
    assert "<page_title> Colin Hanlon </page_title> <section_title> Theatre credits </section_title> <table> " in (
        examples[0].prompt
    )


@pytest.mark.slow
def test_real_dart(shared: Path) -> None:
    """The prompts are those of a file that others made, with the same marks, from the same triples."""
    folder = real(shared, "dart")
    path = f"{folder}/dart-v1.1.1-full-dev.json"
    assert (gold("dart", "validation", path=path), references("dart", "validation", path=path)) == (2_768, 6_980)
    lines = Path(folder, "dev_linearized.jsonl").read_text(encoding="utf-8").splitlines()
    expected = [(row["source"], tuple(row["references"])) for row in map(json.loads, lines)]
    assert [(e.prompt, e.references) for e in load_task("dart", "validation", path=path)] == expected


@pytest.mark.slow
def test_real_narrative_qa(shared: Path) -> None:
    folder = real(shared, "narrativeqa")
    gold("narrative_qa", "validation", path=folder)
    gold("narrative_qa", "test", path=folder)
    # each row of the manifest's 3,461 and 10,557 brings two answers; questions asked twice are one example
    assert references("narrative_qa", "validation", path=folder) == 2 * 3_461
    assert references("narrative_qa", "test", path=folder) == 2 * 10_557
    cased = load_task("narrative_qa", "validation", path=folder, lowercase=False, separator=" ")
    assert cased[0].references == ("THE ACTOR WEARING THE BLACK CLOAK", "The actor in the black cloak")


@pytest.mark.slow
def test_real_translation(shared: Path) -> None:
    folder = real(shared, "multi30k_ende")
    raw = load_task("parallel", "train", path=f"{folder}/train.{{language}}.gz")  # alone: nothing to give way to
    assert len(raw) == 29_000
    assert gold("multi30k", "train", path=folder) == 29_000 - 1  # one caption of validation is in train
    assert (gold("multi30k", "validation", path=folder), gold("multi30k", "test", path=folder)) == (1_014, 1_000)
    assert len(load_task("multi30k", "test", path=folder, test_set="test_2017_mscoco")) == 461
    back = load_task("multi30k", "test", path=folder, source_language="de", target_language="en")
    forth = load_task("multi30k", "test", path=folder)
    assert [(example.references[0], example.prompt) for example in back] == [(e.prompt, e.references[0]) for e in forth]
    demo = Path(real(shared, "wmt_ende_demo"))
    pair = {"path": str(demo / "src-{split}.txt"), "target_path": str(demo / "tgt-{split}.txt"), "skip_blank": True}
    assert gold("parallel", "train", **pair) == 10_000 - 1  # one line is blank
    assert gold("parallel", "validation", **pair) == 50


@pytest.mark.slow
def test_real_daily_dialog(shared: Path) -> None:
    folder = real(shared, "dailydialog")
    for split, utterances in (("validation", 8_069), ("test", 7_740)):
        file = f"{folder}/{split}.json"
        assert gold("daily_dialog", split, path=file, context_size=1) == utterances - 1_000  # of 1,000 dialogues
        text = f"{folder}/derived_txt/{split}/dialogues_{split}.txt"  # the same in the original's layout
        if split == "test":
            assert load_task("daily_dialog", split, path=file) == load_task("daily_dialog", split, path=text)
        pattern = f"{folder}/{{split}}.json"
        given_way = {"validation": 22, "test": 0}[split]  # contexts of validation that are in test too
        assert (
            len(load_task("daily_dialog", split, path=pattern))
            == len(load_task("daily_dialog", split, path=file)) - given_way
        )
    check_task("daily_dialog", "validation", path=folder)
    raw = Path(folder, "raw_eou", "dialogues_subset.txt")
    utterances = raw.read_text(encoding="utf-8").count("__eou__")
    found = load_task("daily_dialog", "train", path=str(raw), context_size=1)
    assert len(found) == utterances - 2_624 and found[0].meta == {}
