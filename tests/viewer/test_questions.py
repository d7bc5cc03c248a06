"""Questions asked through the page: the commands run in processes of their own, and take what the page may ask."""

import time
from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.viewer.guard import Guard
from lmgym.viewer.questions import Question, command
from lmgym.viewer.runs import RunRecords, open_runs
from lmgym.viewer.server import application
from tests import runs
from tests.viewer.sample_runs import sample_run
from tests.viewer.test_server import PORT, Client

pytestmark = pytest.mark.processes
SECONDS = 120  # that a busy machine may take to load a tiny model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    folder = runs.run(
        tmp_path_factory.mktemp("asked") / "run", algorithm={"name": "grpo", "group_size": 4}, steps=4,
        checkpoint={"every": 2, "keep": 4}, logs={"traces": "all"}, evaluation={"every": 0, "examples": 4},
    )  # fmt: skip
    return open_runs([folder])[0]


def answered(client: Client, **asked: Any) -> Any:
    status, tree = client.post("/data/questions", {"run": 0, "stage": 0, **asked})
    assert status == 200, tree
    end = time.monotonic() + SECONDS
    while not tree["done"]:
        assert time.monotonic() < end, tree
        time.sleep(0.05)
        tree = client.get(f"/data/questions/{tree['key']}")
    return tree


@pytest.mark.slow
def test_each_question_is_answered_as_its_command_answers_it(run: RunRecords) -> None:
    pytest.importorskip("starlette", reason="needs lmgym[view]")
    client = Client(Guard(application([run]), PORT))
    why = answered(client, kind="why", answer="--7")["answer"]
    assert why["answer"] == "--7" and [one["steps"] for one in why["points"]] == [0, 2, 4]
    # A group's number is the one that the page knows it by.
    shown = client.get(f"/data/runs/0/groups/0/{why['step']}/{why['groups'][0]['number']}")
    assert shown["example"]["id"] == why["groups"][0]["example"]
    assert [answer["score"] for answer in shown["answers"]] == why["groups"][0]["scores"]
    asked = answered(client, kind="what-if", step="2", changes="optimizer.learning_rate=1e-9")["answer"]
    assert asked["step"] == 1 and asked["gradient"]["equal"] and not asked["unlike"] and len(asked["said"]) > 4
    tried = answered(client, kind="what-if", step="2", **{"try": "2"}, changes="optimizer.learning_rate=1e-9")["answer"]
    assert [step for step, *_ in tried["curves"]["reward"]] == [1, 2] and tried["held_out"]
    refused = answered(client, kind="what-if", step="2", changes="seed=3")
    assert refused["answer"] is None and "seed" in refused["problem"] and "lmgym:" not in refused["problem"]


def test_a_newer_question_ends_the_one_before(run: RunRecords) -> None:
    pytest.importorskip("starlette", reason="needs lmgym[view]")
    client = Client(Guard(application([run]), PORT))
    _, first = client.post("/data/questions", {"run": 0, "kind": "why"})
    assert "a change needs 10 or more" in answered(client, kind="bisect", metric="reward")["problem"]  # steps
    assert "newer one" in client.get(f"/data/questions/{first['key']}")["error"]


def test_a_cancelled_question_leaves_no_process(run: RunRecords) -> None:
    question = Question(run, {"kind": "why", "stage": 0})
    question.cancel()
    end = time.monotonic() + SECONDS
    while not (tree := question.tree())["done"]:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert tree["answer"] is None and tree["problem"] == "the command was ended"
    question._program.wait()  # the keeper is gone, and with it all that it had started


def test_the_page_asks_what_names_no_code(tmp_path: Path) -> None:
    run = open_runs([sample_run(tmp_path / "-run")])[0]
    words = command(run, {"kind": "why", "stage": 0, "example": "--json", "answer": "-x\n--stage=b", "step": "3"})
    assert words[0] == "why" and words[1] == str(run.folder.absolute())
    assert {"--example=--json", "--answer=-x\n--stage=b", "--step=3"} < set(words)
    words = command(run, {"kind": "what-if", "changes": "algorithm=dr_grpo rewards.words.weight=-1e-3 a.b="})
    assert words[-3:] == ["algorithm=dr_grpo", "rewards.words.weight=-1e-3", "a.b="]
    for changes in ("rewards={os:system: 1}", "plugins=/tmp/a.py", "rewards=os:system", "--try=3", "seed", "a=b;c"):
        with pytest.raises(LmgymError, match="is not KEY=VALUE with a plain number or word"):
            command(run, {"kind": "what-if", "changes": changes})
    for asked, said in (
        ({"kind": "train"}, "one of why, bisect, what-if"),
        ({"kind": "why", "answer": "a\0b"}, "NUL"),
        ({"kind": "what-if", "changes": "'a=1"}, "cannot be read"),
    ):
        with pytest.raises(LmgymError, match=said):
            command(run, asked)
