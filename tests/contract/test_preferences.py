"""The task `preferences`: the forms of datasets, their splits, and one sentence for what does not fit. Also what a
recipe that learns from rated answers may say."""

import json
from pathlib import Path
from typing import Any

import pytest

from lmgym.cli.main import main
from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.logs.records import rollout_record
from lmgym.tasks.base import MissingSplit, check_task, load_task
from lmgym.types import BarePrompt, Episode, Example, RatedAnswer, RecipeText, Turn, recipe_spans
from tests import runs


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def only(path: Path, **arguments: Any) -> Example:
    [example] = load_task("preferences", "train", path=str(path), test=0.0, **arguments)
    return example


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "texts": ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, {}, "2+2="),
    "messages beside a prompt": (
        {"prompt": [user("2+2=")], "chosen": [assistant("4")], "rejected": [assistant("5")]},
        {},
        [user("2+2=")],
    ),
    "whole conversations": (
        {"chosen": [user("2+2="), assistant("4")], "rejected": [user("2+2="), assistant("5")]},
        {},
        [user("2+2=")],
    ),
    "conversations that repeat a prompt of text": (
        {"prompt": "2+2=", "chosen": [user("2+2="), assistant("4")], "rejected": [user("2+2="), assistant("5")]},
        {},
        [user("2+2=")],
    ),
    "texts that begin with the prompt": (
        {"chosen": "\n\nHuman: 2+2\n\nAssistant:4", "rejected": "\n\nHuman: 2+2\n\nAssistant:5"},
        {"prompt_end": "\n\nAssistant:"},
        "\n\nHuman: 2+2\n\nAssistant:",
    ),
    "other names": (
        {"question": "2+2=", "good": "4", "bad": "5"},
        {"prompt": "question", "chosen": "good", "rejected": "bad"},
        "2+2=",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_pairs(form: str, tmp_path: Path) -> None:
    row, arguments, prompt = FORMS[form]
    example = only(written(tmp_path / "pairs.jsonl", {**row, "source": "web"}), **arguments)
    assert example.prompt == prompt and example.references == ("4",) and example.meta == {"source": "web"}
    assert example.rated == (RatedAnswer("4", 1.0), RatedAnswer("5", 0.0))


def test_ratings_of_a_pair_and_marks(tmp_path: Path) -> None:
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "5", "score_chosen": 8.5, "score_rejected": 2}
    columns = {"chosen_rating": "score_chosen", "rejected_rating": "score_rejected"}
    assert only(written(tmp_path / "a.jsonl", row), **columns).rated == (RatedAnswer("4", 8.5), RatedAnswer("5", 2.0))
    for label, rating, references in ((True, 1.0, ("4",)), (False, 0.0, ()), (-2, -2.0, ())):
        example = only(written(tmp_path / "b.jsonl", {"prompt": "2+2=", "completion": "4", "label": label}))
        assert example.rated == (RatedAnswer("4", rating),) and example.references == references


def test_an_answer_in_a_conversation_that_repeats_the_prompt(tmp_path: Path) -> None:
    """As TRL reads pairs: the messages are the prompt, and not the text beside them, which has no system message."""
    before = [{"role": "system", "content": "Add."}, user("2+2=")]
    row = {"prompt": "2+2=", "completion": [*before, assistant("4")], "label": True}
    assert only(written(tmp_path / "a.jsonl", row)).prompt == before
    row = {"prompt": "2+2=", "chosen": [*before, assistant("4")], "rejected": [assistant("5")]}
    assert only(written(tmp_path / "b.jsonl", row)).prompt == before


CALLS = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]

WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"prompt": "2+2=", "chosen": "4"}, {}, "there is no column 'rejected'"),
    ({"prompt": "2+2=", "answer": "4"}, {}, "there is no column 'completion'|there is no column 'chosen'"),
    ({"prompt": "2+2=", "chosen": "4", "rejected": "4"}, {}, "are equal, '4'; a pair must differ"),
    ({"prompt": "2+2=", "chosen": "4", "rejected": " "}, {}, "the answer in column 'rejected' is empty"),
    ({"prompt": "", "chosen": "4", "rejected": "5"}, {}, "column 'prompt' must hold a text or a list of chat messages"),
    ({"prompt": "2+2=", "chosen": 4, "rejected": "5"}, {}, "column 'chosen' must hold a text or a list of chat mess"),
    (
        {"prompt": "2+2=", "chosen": [assistant("4")], "rejected": [user("5")]},
        {},
        "last message in column 'rejected' must be the assistant's, not the user's",
    ),
    (
        {"prompt": "2+2=", "chosen": [user("3+3="), assistant("4")], "rejected": [assistant("5")]},
        {},
        "column 'chosen' holds messages before the answer that are not those of the prompt",
    ),
    (
        {"prompt": "2+2=", "chosen": [user("2+2="), assistant("4")], "rejected": [user("3+3="), assistant("5")]},
        {},
        "column 'rejected' holds messages before the answer that are not those of the prompt",
    ),
    (
        {"prompt": "2+2=", "chosen": "4", "rejected": [{**assistant(""), "tool_calls": CALLS}]},
        {},
        r"the answer in column 'rejected' calls tools \(tool_calls\), and only a text can be learned",
    ),
    (
        {"prompt": "2+2=", "completion": [{**assistant("I add."), "tool_calls": CALLS}], "label": True},
        {},
        r"the answer in column 'completion' calls tools",
    ),
    (
        {"chosen": [user("2+2="), assistant("4")], "rejected": [user("3+3="), assistant("5")]},
        {},
        "must be conversations that are equal but for their last message",
    ),
    ({"chosen": "Q 4", "rejected": "Q 5"}, {}, "there is no column 'prompt'; name it"),
    ({"chosen": "Q: 4", "rejected": "R: 5"}, {"prompt_end": ":"}, "do not begin with the same prompt"),
    (
        {"prompt": "2+2=", "chosen": "4", "rejected": "5", "a": 1, "b": 1},
        {"chosen_rating": "a", "rejected_rating": "b"},
        "the chosen answer is rated 1, and the rejected one 1",
    ),
    ({"prompt": "2+2=", "completion": "4", "label": "yes"}, {}, "column 'label' must hold true, false or a number"),
    ({"prompt": "2+2=", "completion": "4", "label": float("nan")}, {}, "must hold true, false or a number, got nan"),
]


@pytest.mark.parametrize(("row", "arguments", "said"), WRONG, ids=[said[:40] for *_, said in WRONG])
def test_rows_that_do_not_fit_name_their_line(
    row: dict[str, Any], arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "pairs.jsonl", row)
    with pytest.raises(LmgymError, match=said) as caught:
        only(path, **arguments)
    assert f"{path}:1" in str(caught.value)


def test_splits(tmp_path: Path) -> None:
    """One file is cut by a hash; a folder has its own splits, whose prompts are not trained on."""
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(200)]
    path = str(written(tmp_path / "pairs.jsonl", *rows))
    check_task("preferences", path=path, validation=0.2)
    sizes = {
        part: len(load_task("preferences", part, path=path, validation=0.2)) for part in ("train", "validation", "test")
    }
    assert sum(sizes.values()) == 200 and 20 <= sizes["validation"] <= 60 and 8 <= sizes["test"] <= 35
    with pytest.raises(MissingSplit, match=r"set task\.validation above 0"):
        load_task("preferences", "validation", path=path)
    folder = tmp_path / "folder"
    folder.mkdir()
    written(folder / "train.jsonl", *rows[:100])
    written(folder / "test.jsonl", *rows[90:120])
    assert len(load_task("preferences", "test", path=str(folder))) == 30
    assert len(load_task("preferences", "train", path=str(folder))) == 90
    with pytest.raises(LmgymError, match=r"needs task\.path"):
        load_task("preferences", "train")


def test_a_split_that_the_recipe_names_must_be_there(tmp_path: Path) -> None:
    """And of a path with {split}, which says where each is, none is taken out of train."""
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(50)]
    (tmp_path / "a").mkdir()
    written(tmp_path / "a" / "train_prefs.jsonl", *rows)
    named = {"path": str(tmp_path / "a"), "splits": {"train": "train_prefs", "test": "held_out"}}
    for split in ("train", "test"):
        with pytest.raises(LmgymError, match=r"task\.splits\.test: .* no file whose name holds held_out"):
            load_task("preferences", split, **named)
    with pytest.raises(LmgymError, match=r"task\.splits names 'tset'; did you mean 'test'\?"):
        load_task("preferences", "train", path=str(tmp_path / "a"), splits={"tset": "held_out"})
    written(tmp_path / "train.jsonl", *rows)
    pattern = str(tmp_path / "{split}.jsonl")
    with pytest.raises(MissingSplit, match=r"has no split 'test': there is no file .*test\.jsonl"):
        load_task("preferences", "test", path=pattern)
    assert len(load_task("preferences", "train", path=pattern)) == 50
    written(tmp_path / "dev.jsonl", *rows[:20])
    written(tmp_path / "test.jsonl", *rows[10:30])
    check_task("preferences", path=pattern)
    sizes = [len(load_task("preferences", part, path=pattern)) for part in ("train", "validation", "test")]
    assert sizes == [20, 10, 20]


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("2+2=", [user("2+2=")]),
        (BarePrompt("2+2="), BarePrompt("2+2=")),
        (BarePrompt("[user]2+2=", form="rendered"), BarePrompt("[user]2+2=", form="rendered")),
        (RecipeText.join(RecipeText("Q: "), "2+2="), [user(RecipeText.join(RecipeText("Q: "), "2+2="))]),
        ([user("2+2=")], [user("2+2=")]),
    ],
)
def test_a_prompt_of_a_run_keeps_its_form(prompt: Any, asked: Any, tmp_path: Path) -> None:
    """What went through the chat template goes through it again, and what did not does not."""
    records = []
    for text, score in (("4", 1.0), ("5", 0.0)):
        episode = Episode(Example("a", prompt), 0, 0, [Turn([1], [2], text=text)], score=score)
        records.append({"kind": "train", "stage": 0, "step": 0, **rollout_record(episode)})
    written(tmp_path / "rollouts.jsonl", *records)
    [example] = load_task("preferences", "train", path=str(tmp_path), test=0.0)
    assert example.prompt == asked and recipe_spans(example.prompt) == recipe_spans(asked)
    records[0]["recipe_spans"] = [[7, 1]]
    written(tmp_path / "rollouts.jsonl", *records)
    with pytest.raises(LmgymError, match=r"rollouts\.jsonl:1: no record of a run's rollouts"):
        load_task("preferences", "train", path=str(tmp_path), test=0.0)


def test_the_answers_of_a_run(tmp_path: Path) -> None:
    """Groups with their scores; without answers that were cut, failed, or are all alike; equal texts once."""

    def record(group: int, text: str, score: float, **more: Any) -> dict[str, Any]:
        turn = {"text": text, "stop": more.pop("stop", "eos")}
        place = {"kind": more.pop("kind", "train"), "stage": 0, "step": 3, "group": group}
        return {**place, "prompt": f"{group}+1=", "turns": [turn], "score": score, **more}

    rows = [record(1, "2", 1.0), record(1, "3", 0.0), record(1, "3", 0.0), record(1, "2222", 2.0, stop="length")]
    rows += [record(2, "3", 1.0), record(2, " 3", 1.0), record(3, "4", 1.0), record(3, "", 0.0, error="out of order")]
    rows += [record(4, "5", 1.0, kind="evaluation"), record(4, "6", 0.0, kind="evaluation")]
    written(tmp_path / "rollouts.jsonl", *rows)
    [example] = load_task("preferences", "train", path=str(tmp_path), test=0.0)
    assert example.id == "preferences/train/0/3/1" and example.prompt == "1+1=" and example.references == ("2",)
    assert example.rated == (RatedAnswer("2", 1.0), RatedAnswer("3", 0.0))
    del rows[0]["turns"]
    written(tmp_path / "rollouts.jsonl", *rows)
    with pytest.raises(
        LmgymError, match=r"rollouts\.jsonl:1: no record of a run's rollouts.jsonl \(KeyError: 'turns'\)"
    ):
        load_task("preferences", "train", path=str(tmp_path))


@pytest.mark.slow
def test_a_run_can_learn_from_the_answers_of_another(tmp_path: Path) -> None:
    sampling = {"max_new_tokens": 12, "stop": [*"aeiou0123"]}
    run = runs.run(tmp_path / "first", logs={"rollouts": "all", "samples": 2}, sampling=sampling)
    task = {"name": "preferences", "path": str(run), "test": 0.3}
    second = runs.run(tmp_path / "second", task=task, algorithm="dpo", rewards=None, prompts_per_step=2)
    assert runs.records(second / "metrics.jsonl")[-1]["kind"] == "evaluation"


def test_an_example_keeps_its_rated_answers_on_disk() -> None:
    example = Example("a", "2+2=", rated=(RatedAnswer("4", 1.0), RatedAnswer("5", 0.0)))
    assert Episode.from_json(json.loads(json.dumps(Episode(example, 0, 0).to_json()))).example == example


# Recipes


def pairs(folder: Path, count: int = 40, **more: Any) -> dict[str, Any]:
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": f"{n}!", **more} for n in range(count)]
    return {"name": "preferences", "path": str(written(folder / "pairs.jsonl", *rows))}


@pytest.mark.slow
def test_check_train_and_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe without a reward; a supervised stage imitates the chosen answers of the same file."""
    changes = {
        "task": pairs(tmp_path),
        "rewards": None,
        "stages": [{"name": "imitate", "algorithm": "supervised", "steps": 2}, {"name": "prefer", "algorithm": "dpo"}],
        "algorithm": None,
        "evaluation": {"every": 3, "examples": 8, "keep_best": "reference_nll", "keep_best_mode": "min"},
    }
    recipe = runs.write(tmp_path / "recipe.yaml", **changes)
    assert main(["check", str(recipe)]) == 0
    assert "examples; a step has" in capsys.readouterr().out
    folder = runs.run(tmp_path / "run", **changes)
    records = runs.records(folder / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "train" and record["stage_name"] == "prefer"]
    assert all("preference/margin" in record and "reward" not in record for record in steps)
    evaluated = [record for record in records if record["kind"] == "evaluation" and record["stage_name"] == "prefer"]
    assert evaluated[0]["preference/accuracy"] == 0.5  # the policy is its own reference
    assert all({"reference_nll", "preference/margin/low"} <= record.keys() for record in evaluated)
    rollouts = [record for record in runs.records(folder / "rollouts.jsonl") if record["kind"] == "train"]
    assert [record["score"] for record in rollouts if record["stage_name"] == "prefer"][:2] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": {"name": "dpo", "group_size": 4}}, "here the task gives them, so remove it"),
        ({"algorithm": "kto", "env": "guess_number"}, "kto learns from the rated answers of a task"),
        ({"algorithm": {"name": "simpo", "objective": "ipo"}}, "belong to objective: sigmoid"),
        ({"algorithm": "cpo"}, "learns from pairs of answers: dpo, ipo, simpo and orpo from given ones"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LmgymError, match=said):
        build_config(runs.tiny(task=runs.JUDGED, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": "dpo"}, "has no rated answers to learn from; the task preferences reads pairs"),
        (
            {"algorithm": "kto", "task": runs.JUDGED, "prompts_per_step": 1},
            "kto measures the KL with answers to other prompts; prompts_per_step must be at least 2",
        ),
    ],
)
def test_what_comes_out_when_a_run_begins(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=said):
        runs.run(tmp_path / "run", **changes)


def test_texts_that_are_too_long_name_the_example(tmp_path: Path) -> None:
    task = pairs(tmp_path, count=4)
    long = [{"prompt": "1+1=", "chosen": "2" * 200, "rejected": "3"}]
    task["path"] = str(written(tmp_path / "long.jsonl", *long))
    with pytest.raises(LmgymError, match="the prompt and rated answer of example 'preferences/train/0' have 2"):
        runs.run(tmp_path / "run", algorithm="dpo", task={**task, "test": 0.0}, evaluation={"task": pairs(tmp_path)})
    policy = {**runs.TINY["policy"], "max_reference_tokens": 3}
    same = [{"prompt": "1+1=", "chosen": "2221", "rejected": "2229"}]
    task["path"] = str(written(tmp_path / "same.jsonl", *same))
    changes: dict[str, Any] = {"task": {**task, "test": 0.0}, "evaluation": {"task": pairs(tmp_path)}}
    with pytest.raises(LmgymError, match=r"they differ behind policy\.max_reference_tokens, so raise it"):
        runs.run(tmp_path / "other", algorithm="dpo", policy=policy, prompts_per_step=1, **changes)
