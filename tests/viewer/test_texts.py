"""The words of answers that were not kept whole: written while they are few, read with care, lost with the answers."""

import json
from pathlib import Path
from zipfile import ZipFile

import pytest

from lmgym.logs.traces.files import STEP, TEXTS, without_episodes
from lmgym.logs.traces.texts import MOST_CHARACTERS, TraceTexts, read_texts, texts_of
from lmgym.types import Episode, Example, Turn
from lmgym.viewer.addresses import tree_at
from lmgym.viewer.runs import open_runs
from lmgym.viewer.search import search_step
from tests.viewer.sample_runs import worded_run


def an_episode(index: int, text: str) -> Episode:
    example = Example(f"a/{index // 2}", f"question {index // 2}")
    return Episode(example, group=index // 2, index=index, turns=[Turn([1], [2], given="<", text=text)])


def test_texts_are_those_of_the_answers_that_are_not_whole() -> None:
    episodes = [an_episode(index, f"answer {index}") for index in range(4)]
    texts = texts_of(episodes, {0, 1, 3})
    assert texts == TraceTexts(prompts={1: "question 1"}, answers={2: ["<answer 2"]})
    room = MOST_CHARACTERS - len("question 0") - len("<")
    assert texts_of([an_episode(0, "a" * room)], ()).answers[0] == ["<" + "a" * room]
    assert texts_of([an_episode(0, "a" * (room + 1)), episodes[1]], ()) == TraceTexts()


def test_a_group_and_a_search_show_them(tmp_path: Path) -> None:
    runs = open_runs([worded_run(tmp_path / "run")])
    assert tree_at(runs, "runs/0/steps/0/0")["texts"] == [0, 1]
    told, silent = (tree_at(runs, f"runs/0/groups/0/0/{group}") for group in (0, 1))
    assert [one["texts"] for one in told["answers"]] == [["42 it is"], ["41"]] and told["main"] == "final_answer"
    assert told["example"]["prompt"][1]["content"] == "the last question"
    assert not any("texts" in one for one in silent["answers"]) and "prompt" not in silent["example"]
    job = {"folder": str(tmp_path / "run"), "stage": 0, "step": 0, "filters": [], "pattern": "it is", "traced": True}
    assert [one["index"] for one in search_step(job)] == [0]


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ('{"prompts": {"0": "q"}, "answers": {"0": ["a"], "1": "b", "x": ["c"], "2": [3], "-1": ["d"]}}', {0: ["a"]}),
        ('{"prompts": 5, "answers": [["a"]]}', {}),
        ("[" * 100_000, {}),
        ("no JSON", {}),
    ],
)
def test_texts_of_someone_else_are_read_with_care(text: str, answers: object, tmp_path: Path) -> None:
    folder = worded_run(tmp_path / "run")
    (path,) = (folder / "traces").iterdir()
    with ZipFile(path) as old:
        step = old.read(STEP)
    with ZipFile(path, "w") as new:
        new.writestr(STEP, step)
        new.writestr(TEXTS, text)
    runs = open_runs([folder])
    assert runs[0].texts(0, 0).answers == answers
    assert len(tree_at(runs, "runs/0/groups/0/0/0")["answers"]) == 2


def test_texts_go_with_the_answers(tmp_path: Path) -> None:
    folder = worded_run(tmp_path / "run")
    (path,) = (folder / "traces").iterdir()
    with ZipFile(path) as shard:
        assert TEXTS in shard.namelist()
        data = without_episodes(shard)
    assert data is not None
    path.write_bytes(data)
    assert read_texts(folder, 0, 0) == TraceTexts()
    with ZipFile(path) as shard:
        assert without_episodes(shard) is None and "surprise" in json.loads(shard.read(STEP))["episodes"]


def test_how_far_a_run_is(tmp_path: Path) -> None:
    folder = worded_run(tmp_path / "run")
    runs = open_runs([folder])
    (line,) = tree_at(runs, "list")
    assert (line["state"], line["steps"], line["planned"], line["curve"]) == ("unfinished", 1, 1, [0.1])
    (folder / "summary.json").write_text('{"after": {"stage": "rl", "step": 1}}')
    assert tree_at(runs, "list")[0]["state"] == "finished"
    (folder / "summary.json").write_text('{"after": [1]}')
    assert tree_at(runs, "list")[0]["state"] == "unfinished"
