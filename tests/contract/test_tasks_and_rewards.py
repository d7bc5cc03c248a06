"""What every task and reward must keep, what their users are told when something is wrong, and real data."""

import json
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.rewards.base import Reward, call_reward, episodes
from lmgym.rewards.building import build_rewards
from lmgym.rewards.check import check_reward
from lmgym.rewards.maths.final_answer import answer_format, final_answer
from lmgym.tasks.base import FewShot, MissingSplit, check_task, load_task
from lmgym.types import Episode, Example, Turn

REWARD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "regex": {"pattern": "#### .*"},
    "lexical_richness": {"brevity_scale": 0.5},
    "length": {"target": 50},
    "overlong": {"max_tokens": 100, "buffer": 20},
}
# Rewards that need examples of their own kind, or WordNet; tests/property/test_metrics.py holds them to the contract.
PARTICULAR = {"common_gen_preference", "common_gen_repeat_penalty", "concept_coverage", "meteor", "parent", "vader"}
PARTICULAR |= {"parent_overlap", "parent_non_overlap", "totto_bleu_overlap", "totto_bleu_non_overlap"}
PARTICULAR |= {"remote_reward"}  # a server: tests/contract/test_rewards_of_others.py
PARTICULAR |= {"spice", "spider"}  # a Java program that is not here: tests/golden/test_spice.py
# Those that need a model are held to it where one is made for them: tests/property/test_learned_rewards.py.
LEARNED = "lmgym.rewards.learned"
# RL4LMs' tasks read files that tests/contract/test_rl4lms_tasks.py writes; it holds them to the contract.
RL4LMS = {"imdb", "imdb_seq2seq", "common_gen", "cnn_daily_mail", "xsum", "totto", "dart", "web_nlg", "narrative_qa"}
RL4LMS |= {"parallel", "wmt14", "wmt16", "iwslt2017", "multi30k", "daily_dialog", "crd3", "dummy"}
PARTICULAR |= {name for name, entry in registry.BUILTIN["reward"].items() if entry.target.startswith(LEARNED)}
GOLD = [
    {
        "question": f"Tom has {n} apples and buys 4. How many?",
        "answer": f"{n}+4=<<{n}+4={n + 4}>>{n + 4}\n#### {n + 4}",
    }
    for n in range(20)
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def answered(texts: list[str], references: tuple[str, ...] = ("18",)) -> list[Episode]:
    return [
        Episode(Example(f"a/{index}", "?", references), group=0, index=index, turns=[Turn([], [], text=text)])
        for index, text in enumerate(texts)
    ]


def task_arguments(name: str, folder: Path) -> dict[str, Any]:
    """Small arguments for each built-in task, with files where it reads files."""
    if name == "gsm8k":
        write(folder / "train.jsonl", GOLD[:15])
        write(folder / "test.jsonl", GOLD[15:])
        return {"path": str(folder), "validation": 0.2}
    if name in ("data", "jsonl"):
        rows = [{"prompt": f"{n}+1=", "references": str(n + 1), "level": n % 3} for n in range(200)]
        return {"path": str(write(folder / "rows.jsonl", rows)), "validation": 0.1}
    if name == "math":
        rows = [
            {"problem": f"${n}+1$?", "solution": rf"$\boxed{{{n + 1}}}$", "level": 1, "type": "Algebra"}
            for n in range(60)
        ]
        write(folder / "train.jsonl", rows[:40])
        write(folder / "test.jsonl", rows[40:])
        return {"path": str(folder), "validation": 0.3}
    if name == "svamp":
        rows = [
            {
                "Body": f"{n} pens",
                "Question": "Now?",
                "Equation": f"( {n}.0 )",
                "Answer": n,
                "Type": "Sum",
                "ID": f"i{n}",
            }
            for n in range(60)
        ]
        return {"path": str(write(folder / "rows.jsonl", rows)), "validation": 0.3}
    if name == "mixture":
        return {"tasks": [{"name": "topics"}, {"name": "arithmetic", "weight": 2, "size": 90, "validation_size": 9}]}
    if name == "preferences":
        rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(200)]
        return {"path": str(write(folder / "pairs.jsonl", rows)), "validation": 0.1}
    if name == "step_labels":
        rows = [{"prompt": f"{n}+1=", "completions": [f"{n}+1", str(n)], "labels": [True, False]} for n in range(200)]
        return {"path": str(write(folder / "steps.jsonl", rows)), "validation": 0.1}
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
        return {"dataset": "chain_sum", "size": 30, "validation_size": 10, "test_size": 10}
    return {"arithmetic": {"size": 300, "validation_size": 50, "test_size": 50}}.get(name, {})


# ---------------------------------------------------------------- the contracts


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("name", sorted({*registry.BUILTIN["task"]} - RL4LMS))
def test_every_task_keeps_the_contract(name: str, split: str, tmp_path: Path) -> None:
    arguments = task_arguments(name, tmp_path)
    check_task(name, split, **arguments)
    with pytest.raises(MissingSplit, match=r"has no split 'tset'; did you mean 'test'\?"):
        load_task(name, "tset", **arguments)


@pytest.mark.parametrize("name", sorted({*registry.BUILTIN["reward"]} - PARTICULAR))
def test_every_reward_keeps_the_contract(name: str) -> None:
    needs = {"math_equal": "math_verify", "reasoning_gym": "reasoning_gym"}.get(name)
    if needs:
        pytest.importorskip(needs)
    if name == "reasoning_gym":  # judges examples of its own task only
        examples = load_task(name, "test", dataset="chain_sum", size=3, validation_size=3, test_size=3)
        check_reward(name, [example.references[0] for example in examples], examples)
        return
    check_reward(name, **REWARD_ARGUMENTS.get(name, {}))


def offer(monkeypatch: pytest.MonkeyPatch, kind: str, thing: Callable[..., Any], name: str = "offered") -> str:
    monkeypatch.setitem(registry._registered[kind], name, thing)
    return name


@pytest.mark.parametrize(
    ("examples", "sentence"),
    [
        ([], "has no examples in split 'train'"),
        (["text"], "item 0 is no Example"),
        ([Example("a", "?"), Example("a", "!")], "the id 'a' comes twice"),
        ([Example("a", "")], "the prompt of 'a' is empty"),
        ([Example("a", "?", "18")], "references of 'a' must be a tuple of texts"),  # type: ignore[arg-type]
        ([Example("a", "?", (18,))], "references of 'a' must be a tuple of texts"),  # type: ignore[arg-type]
        (18, "returned int for split 'train'"),
    ],
)
def test_a_broken_task_is_named(examples: Any, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "task", lambda split: examples)
    for call in (load_task, check_task):
        with pytest.raises(LmgymError, match=sentence):
            call("offered", "train")


def test_check_task_finds_overlapping_splits_and_changing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "task", lambda split: [Example("a", f"{split}?")])
    with pytest.raises(LmgymError, match="id 'a' is in both train and validation"):
        check_task("offered")
    offer(monkeypatch, "task", lambda split: [Example(split, "?")])
    with pytest.raises(LmgymError, match="validation example 'validation' has the prompt of train example 'train'"):
        check_task("offered")
    offer(monkeypatch, "task", lambda split: [Example(f"{split}{time.perf_counter_ns()}", "?")])
    with pytest.raises(LmgymError, match="two loads of split 'train' differ"):
        check_task("offered")


def test_check_reward_finds_batch_dependence(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "reward", lambda texts, examples: [len(text) / len(texts) for text in texts])
    with pytest.raises(LmgymError, match=r"'offered' gives .* in a batch but .* alone"):
        check_reward("offered")
    offer(monkeypatch, "reward", lambda texts, examples: [float(ord(text[0])) for text in texts])
    with pytest.raises(LmgymError, match="'offered' raised IndexError"):
        check_reward("offered", texts=["a"], examples=[Example("a", "?")])


# ---------------------------------------------------------------- loading


def test_unknown_and_wrong_arguments_are_named() -> None:
    with pytest.raises(LmgymError, match=r"unknown key 'task.larges'; did you mean 'largest'\?"):
        load_task("arithmetic", "train", larges=3)
    with pytest.raises(LmgymError, match=r"unknown key 'task.limt'; did you mean 'limit'\?"):
        load_task("arithmetic", "train", limt=3)
    with pytest.raises(LmgymError, match=r"key 'task.size': .*valid integer.*got 'many'"):
        load_task("arithmetic", "train", size="many")
    with pytest.raises(LmgymError, match=r"key 'task.size' must be a number, got True"):
        load_task("arithmetic", "train", size=True)
    with pytest.raises(LmgymError, match=r"key 'task.style': .*'short', 'story' or 'sum', got 'long'"):
        load_task("arithmetic", "train", style="long")
    with pytest.raises(LmgymError, match=r"key 'task.path' is missing"):
        load_task("jsonl", "train")
    with pytest.raises(LmgymError, match=r"key 'task.limit' must be a whole number of at least 1, not 0"):
        load_task("topics", "train", limit=0)
    with pytest.raises(LmgymError, match=r"unknown task 'gsm8'; did you mean 'gsm8k'\?"):
        load_task("gsm8", "train")


def test_limit_keeps_the_first_and_prompts_are_wrapped() -> None:
    everything = load_task("topics", "train")
    assert len(everything) == 30
    assert load_task("topics", "train", limit=3) == everything[:3]
    wrapped = load_task("topics", "train", limit=1, prompt_prefix="<", prompt_suffix=">")
    assert wrapped[0].prompt == f"<{everything[0].prompt}>"


def test_a_system_prompt_makes_messages(tmp_path: Path) -> None:
    plain = load_task("topics", "test")[0]
    system = {"role": "system", "content": "Be brief."}
    assert load_task("topics", "test", system_prompt="Be brief.")[0].prompt == [
        system,
        {"role": "user", "content": plain.prompt},
    ]
    file = tmp_path / "system.txt"
    file.write_text("Be brief.\n", encoding="utf-8")
    assert load_task("topics", "test", system_prompt=f"file:{file}")[0].prompt[0] == system
    with pytest.raises(LmgymError, match=f"task.system_prompt: cannot read {tmp_path / 'none.txt'}"):
        load_task("topics", "test", system_prompt=f"file:{tmp_path / 'none.txt'}")


def test_fixed_shots_are_the_first_of_their_split(tmp_path: Path) -> None:
    arguments = task_arguments("gsm8k", tmp_path)
    train = load_task("gsm8k", "train", **arguments)
    options: dict[str, Any] = {"few_shot": {"n": 2}, "system_prompt": "S", "prompt_prefix": "Q: ", **arguments}

    def shot(example: Example) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": f"Q: {example.prompt}"},
            {"role": "assistant", "content": example.references[0]},
        ]

    last = load_task("gsm8k", "test", **options)[-1]
    question = {"role": "user", "content": f"Q: {GOLD[-1]['question']}"}
    assert last.prompt == [{"role": "system", "content": "S"}, *shot(train[0]), *shot(train[1]), question]
    assert last.references == (GOLD[-1]["answer"],)
    own = load_task("gsm8k", "train", **options)[0]  # never its own shot: the next ones stand in
    assert own.prompt[1:5] == [*shot(train[1]), *shot(train[2])]
    assert load_task("gsm8k", "test", **{**options, "few_shot": FewShot(n=2)}) == load_task("gsm8k", "test", **options)


def test_impossible_shots_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match="example 'topics/train/0' has no reference"):
        load_task("topics", "test", few_shot={"n": 1})
    with pytest.raises(LmgymError, match=r"task.few_shot.n is 15, but split 'train' has 11 other examples"):
        load_task("gsm8k", "train", few_shot={"n": 15}, **task_arguments("gsm8k", tmp_path))
    with pytest.raises(LmgymError, match=r"key 'task.few_shot.draw': .*got 'any'"):
        load_task("topics", "test", few_shot={"draw": "any"})
    with pytest.raises(LmgymError, match=r"unknown key 'task.few_shot.N'"):
        load_task("topics", "test", few_shot={"N": 1})
    chat = write(
        tmp_path / "chat.jsonl", [{"prompt": [{"role": "system", "content": "A"}, {"role": "user", "content": "Q"}]}]
    )
    with pytest.raises(
        LmgymError, match=r"task.system_prompt is given, but the prompt of 'chat/1' has a system message"
    ):
        load_task("jsonl", "train", path=str(chat), test=0.0, system_prompt="B")


# ---------------------------------------------------------------- the tasks


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"steps": 3, "operations": ["add", "subtract", "multiply", "divide"], "explain": True, "style": "story"},
        {"operations": ["divide"], "largest": 12, "explain": True},
    ],
)
def test_arithmetic_answers_are_right(arguments: dict[str, Any]) -> None:
    signs = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
    for example in load_task("arithmetic", "train", size=500, **arguments):
        total, *operands = (int(number) for number in re.findall("[0-9]+", str(example.prompt).replace("for one", "")))
        assert 2 <= total <= 20 and all(1 <= operand <= 20 for operand in operands)
        for operation, operand in zip(example.meta["operation"].split(", "), operands, strict=True):
            before, total = total, {
                "add": total + operand,
                "subtract": total - operand,
                "multiply": total * operand,
                "divide": total // operand,
            }[operation]  # fmt: skip
            assert total >= 0 and (operation != "divide" or before % operand == 0)
            if arguments.get("explain"):
                assert (
                    f"{before}{signs[operation]}{operand}=<<{before}{signs[operation]}{operand}={total}>>{total}"
                    in example.references[0]
                )
        assert example.meta["answer"] == str(total)
        assert example.references[0].endswith(f"\n#### {total}" if arguments.get("explain") else f" {total}")
        assert final_answer([example.references[0]], [example]) == [1.0]


@pytest.mark.slow
def test_arithmetic_prompts_are_short_varied_and_held_out() -> None:
    train, test = load_task("arithmetic", "train"), load_task("arithmetic", "test")
    assert (len(train), len(test)) == (20_000, 1_000)
    assert not {example.prompt for example in train} & {example.prompt for example in test}
    assert len({example.prompt for example in train}) == 20_000
    assert max(len(example.prompt) for example in train) <= 60
    assert load_task("arithmetic", "train", size=50) == train[:50]
    answers = [example.meta["answer"] for example in test]
    assert max(answers.count(answer) for answer in set(answers)) < 100  # a constant answer earns less than a tenth


@pytest.mark.slow
def test_arithmetic_says_when_it_runs_out_of_problems() -> None:
    with pytest.raises(
        LmgymError, match=r"task.test_size is 9000, .* has only [0-9]+ different problems; lower it, or"
    ):
        load_task("arithmetic", "test", test_size=9_000, operations=["multiply"], largest=2)
    with pytest.raises(LmgymError, match="largest of at least 2, steps from 1 to 3"):
        load_task("arithmetic", "test", steps=4)


def test_topics_take_a_template() -> None:
    assert load_task("topics", "test", template="{topic}?")[0].prompt == "a storm at sea?"
    assert load_task("topics", "test", opening=True)[0].prompt == "The boat was far out when the sky turned dark."
    for template, sentence in (
        ("{topc}", r"unknown field '{topc}'; did you mean 'topic'\?"),
        ("{topic", "task.template: .*'{topic'"),
        ("Write!", "must hold {topic} or {opening}"),
    ):
        with pytest.raises(LmgymError, match=sentence):
            load_task("topics", "test", template=template)


def test_jsonl_columns_splits_and_meta(tmp_path: Path) -> None:
    rows = [{"q": f"{n}+1=", "a": [str(n + 1), n + 1.5], "key": n, "level": 2} for n in range(400)]
    path = str(write(tmp_path / "rows.jsonl", rows))
    columns = {"prompt": "q", "references": "a", "id": "key"}
    parts = {
        part: load_task("jsonl", part, path=path, validation=0.2, **columns) for part in ("train", "validation", "test")
    }
    assert sum(len(examples) for examples in parts.values()) == 400
    assert 50 < len(parts["validation"]) < 110 and 20 < len(parts["test"]) < 60  # expected: 80 and 40
    assert {example.id for examples in parts.values() for example in examples} == {str(n) for n in range(400)}
    first = parts["train"][0]
    n = int(first.id)
    assert first == Example(str(n), f"{n}+1=", (str(n + 1), str(n + 1.5)), {"a": [str(n + 1), n + 1.5], "level": 2})
    write(tmp_path / "rows.jsonl", [{"q": "new", "a": "x", "key": 999}, *rows[::-1]])  # reordered, one more
    again = load_task("jsonl", "test", path=path, validation=0.2, **columns)
    assert {example.id for example in parts["test"]} == {example.id for example in again} - {"999"}
    with pytest.raises(MissingSplit, match=r"set task.validation_path, or task.validation above 0"):
        load_task("jsonl", "validation", path=path, **columns)


def test_jsonl_takes_a_file_per_split(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write(tmp_path / f"{part}.jsonl", [{"prompt": f"{part} {n}"} for n in range(5)])
    pattern = str(tmp_path / "{split}.jsonl")
    assert [example.prompt for example in load_task("jsonl", "test", path=pattern)] == [f"test {n}" for n in range(5)]
    assert load_task("jsonl", "test", path=pattern)[0].references == ()
    check_task("jsonl", "test", path=pattern)
    with pytest.raises(MissingSplit, match=r"there is no file .*validation.jsonl"):
        load_task("jsonl", "validation", path=pattern)
    train, test = (str(tmp_path / f"{part}.jsonl") for part in ("train", "test"))
    assert len(load_task("jsonl", "train", path=train, test_path=test)) == 5  # nothing needs carving
    check_task("jsonl", "test", path=train, test_path=test)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', r":2: not valid JSON: .* at column"),
        (b'\n\n["a"]\n', ":3: expected an object like {...}, got list"),
        (b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n', ":2: not UTF-8 \\(byte 16 of the line\\)"),
        (b'{"prompt": "\\ud800"}', ":1: holds half of a surrogate pair"),
        (b"[" * 100_000, ":1: not "),
        (b'{"prompt": ' + b"9" * 5000 + b"}", ":1: not readable as JSON"),
        (b'{"promt": "a"}', r":1: there is no column 'prompt'; did you mean 'promt'\?"),
        (b'{"prompt": ""}', ":1: column 'prompt' must hold a text or a list of chat messages, got ''"),
        (b'{"prompt": [{"role": "robot", "content": "a"}]}', ":1: a message in column 'prompt' must have a role"),
        (b'{"prompt": [{"role": "assistant", "content": "a"}]}', ":1: the last message .* must be the user's"),
        (b'{"prompt": "a", "references": {"a": 1}}', ":1: column 'references' must hold a text, a number or a list"),
        (b'{"prompt": "a", "references": true}', r'got True; as a text: task.references: "\{references\}"$'),
        (b'{"prompt": "a", "reference": "b"}', ":1: there is no column 'references' but 'reference'"),
        (b"", "has no examples in split 'train'"),
    ],
)
def test_jsonl_names_the_line_at_fault(content: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(LmgymError, match=sentence) as error:
        load_task("jsonl", "train", path=str(path), test=0.0)
    assert str(path) in str(error.value) or not content


def test_jsonl_other_errors(tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=r"task.path: there is no file or folder .*none.jsonl"):
        load_task("jsonl", "train", path=str(tmp_path / "none.jsonl"))
    path = str(write(tmp_path / "rows.jsonl", [{"prompt": "a", "key": "x"}, {"prompt": "b", "key": "x"}]))
    with pytest.raises(LmgymError, match=":2: the id 'x' is that of line 1 already"):
        load_task("jsonl", "train", path=path, id="key", test=0.0)
    with pytest.raises(LmgymError, match="must be shares that leave some to train on"):
        load_task("jsonl", "train", path=path, test=1.0)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"question": "?"}, ":1: there is no column 'answer'"),
        ({"question": "?", "answer": 18}, ":1: column 'answer' must hold a text, got 18"),
        ({"question": "?", "answer": "18"}, ":1: the answer does not end in '#### NUMBER'"),
    ],
)
def test_gsm8k_names_the_line_at_fault(row: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=f"train.jsonl{sentence}"):
        load_task("gsm8k", "train", path=str(write(tmp_path / "train.jsonl", [row])))


def test_gsm8k_splits_and_options(tmp_path: Path) -> None:
    arguments = task_arguments("gsm8k", tmp_path)
    train, validation = (load_task("gsm8k", part, **arguments) for part in ("train", "validation"))
    assert [example.id for example in train + validation] == [f"gsm8k/train/{n}" for n in range(15)]
    assert len(validation) == 3
    assert load_task("gsm8k", "train", path=str(tmp_path), strip_calculator=True)[2].references == ("2+4=6\n#### 6",)
    assert [example.meta["answer"] for example in load_task("gsm8k", "test", path=str(tmp_path / "test.jsonl"))][
        :2
    ] == [
        "19",
        "20",
    ]
    with pytest.raises(MissingSplit, match=r"test.jsonl holds test; give the folder"):
        load_task("gsm8k", "train", path=str(tmp_path / "test.jsonl"))
    with pytest.raises(MissingSplit, match=f"in {tmp_path / 'set'} there is no file whose name holds test"):
        (tmp_path / "set").mkdir()
        load_task("gsm8k", "test", path=str(tmp_path / "set"))
    with pytest.raises(MissingSplit, match=r"set task.validation above 0"):
        load_task("gsm8k", "validation", path=str(tmp_path))
    with pytest.raises(LmgymError, match=r"task.path: there is no file or folder .*none"):
        load_task("gsm8k", "train", path=str(tmp_path / "none"))


def test_gsm8k_reads_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    expected = load_task("gsm8k", "test", **task_arguments("gsm8k", folder))
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - {split: train, path: train.jsonl}\n  - {split: test, path: test.jsonl}\n---\n"
    )
    assert load_task("gsm8k", "test", hub_id=str(folder)) == expected
    with pytest.raises(LmgymError, match=f"task.hub_id: cannot load '{tmp_path / 'none'}'"):
        load_task("gsm8k", "test", hub_id=str(tmp_path / "none"))


@pytest.mark.slow
def test_real_gsm8k(shared: Path) -> None:
    """Official counts; a gold answer is right for its problem, and for another only where the numbers are equal."""
    folder = str(shared / "data" / "gsm8k")
    check_task("gsm8k", path=folder)
    for split, count in (("train", 7_473), ("test", 1_319)):
        examples = load_task("gsm8k", split, path=folder)
        assert len(examples) == count
        texts = [example.references[0] for example in examples]
        assert final_answer(texts, examples) == final_answer(texts, examples, strict=True) == [1.0] * count
        assert answer_format(texts, examples) == [1.0] * count
        assert final_answer([example.meta["answer"] for example in examples], examples) == [1.0] * count
        shuffled = random.Random(0).sample(texts, count)
        numbers, others = (
            [text.split("####")[1].strip().replace(",", "") for text in some] for some in (texts, shuffled)
        )
        expected = [float(number == other) for number, other in zip(numbers, others, strict=True)]
        assert final_answer(shuffled, examples) == expected
        assert 0 < sum(expected) < 0.05 * count


# ---------------------------------------------------------------- the guard around rewards


def test_build_reads_weights_and_arguments() -> None:
    rewards = build_rewards(
        {"final_answer": 1, "length": {"weight": 0.1, "target": 4}, "lmgym.rewards.text.form:words": 0.0}
    )
    assert [(reward.name, reward.weight) for reward in rewards] == [
        ("final_answer", 1.0),
        ("length", 0.1),
        ("lmgym.rewards.text.form:words", 0.0),
    ]
    assert [call_reward(reward, answered(["a 18 b", ""])) for reward in rewards] == [[1.0, 0.0], [0.5, 0.0], [2.0, 0.0]]
    assert build_rewards({"regex": {"pattern": "a"}})[0].weight == 1.0
    assert call_reward(rewards[0], []) == []


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"final_anser": 1.0}, r"unknown reward 'final_anser'; did you mean 'final_answer'\?"),
        ({"length": {"targt": 5}}, r"unknown key 'rewards.length.targt'; did you mean 'target'\?"),
        ({"length": {"target": "long"}}, "key 'rewards.length.target': .*got 'long'"),
        ({"length": {"texts": []}}, "unknown key 'rewards.length.texts'"),
        ({"length": {"wight": 1}}, "did you mean 'weight'"),
        ({"length": {"unit": "pages"}}, "key 'rewards.length.unit': .*got 'pages'"),
        ({"regex": 1.0}, "key 'rewards.regex.pattern' is missing"),
        ({"length": None}, "key 'rewards.length.weight': .*got None"),
        ({"length": "much"}, "key 'rewards.length.weight': .*got 'much'"),
        ({"length": True}, "key 'rewards.length.weight' must be a number, got True"),
        ({"length": float("nan")}, "key 'rewards.length.weight' must be finite, not nan"),
    ],
)
def test_build_names_the_key_at_fault(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        build_rewards(section)


def test_wrong_values_are_named_when_the_reward_is_called() -> None:
    for section, sentence in (
        ({"regex": {"pattern": "a("}}, "key 'rewards.regex.pattern': .* at position 1 of 'a\\('"),
        ({"length": {"target": 0}}, "key 'rewards.length.target' must be above 0, not 0"),
    ):
        with pytest.raises(LmgymError, match=sentence):
            call_reward(build_rewards(section)[0], answered(["a"]))
    for name in ("final_answer", "exact_match"):
        with pytest.raises(LmgymError, match=f"reward '{name}' needs a reference, and example 'a/0' has none"):
            call_reward(build_rewards({name: 1.0})[0], answered(["a"], references=()))


def fails(texts: list[str], examples: list[Example]) -> list[float]:
    return [deeper(text) for text in texts]


def deeper(text: str) -> float:
    return float(json.loads(text)["score"])


def test_a_reward_that_raises_is_named_with_its_line() -> None:
    line = deeper.__code__.co_firstlineno + 1
    with pytest.raises(
        LmgymError, match=f"reward 'mine' raised JSONDecodeError: Expecting value.* at {__file__}:{line}$"
    ):
        call_reward(Reward("mine", 1.0, fails), answered(["no json"]))
    with pytest.raises(LmgymError, match="reward 'mine' raised SystemExit"):
        call_reward(Reward("mine", 1.0, lambda texts, examples: exit(0)), answered(["a"]))
    with pytest.raises(LmgymError, match=r"reward 'mine' raised TypeError: .*positional argument"):
        call_reward(Reward("mine", 1.0, lambda texts: [1.0]), answered(["a"]))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([1.0], "'mine' returned 1 values for 2 episodes"),
        ([1.0, float("nan")], r"'mine' returned nan for example 'a/1' \(index 1 of 2\)"),
        ([float("-inf"), 0.0], r"'mine' returned -inf for example 'a/0' \(index 0 of 2\)"),
        ([10**400, 0.0], "'mine' returned inf for example 'a/0'"),
        ([1.0, "1"], "'mine' returned '1' for example 'a/1' .*; it must be a number"),
        (1.0, "'mine' returned float; it must return a list"),
        (None, "'mine' returned NoneType; it must return a list"),
        ("ab", "'mine' returned str; it must return a list"),
        ({0: 1.0, 1: 2.0}, "'mine' returned dict; it must return a list"),
        ((value for value in [1.0, 2.0]), "'mine' returned generator; it must return a list"),
        (np.zeros((2, 2)), "it must be a number"),
    ],
)
def test_what_a_reward_may_not_return(values: Any, sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        call_reward(Reward("mine", 1.0, lambda texts, examples: values), answered(["a", "b"]))


@pytest.mark.parametrize(
    "values", [[1, 0], (1.0, 0.0), [True, False], np.array([1.0, 0.0], np.float32), np.array([True, False])]
)
def test_what_a_reward_may_return(values: Any) -> None:
    result = call_reward(Reward("mine", 1.0, lambda texts, examples: values), answered(["a", "b"]))
    assert result == [1.0, 0.0] and all(type(value) is float for value in result)


def loops(texts: list[str], examples: list[Example]) -> list[float]:
    while True:
        time.sleep(0.001)


def backtracks(texts: list[str], examples: list[Example]) -> list[float]:
    return [float(bool(re.fullmatch("(a+)+b", "a" * 60))) for _ in texts]


def swallows(texts: list[str], examples: list[Example]) -> list[float]:
    try:
        loops(texts, examples)
    except BaseException:
        return loops(texts, examples)
    return []


@pytest.mark.parametrize("function", [loops, backtracks, swallows])
def test_a_reward_that_never_returns_is_stopped(function: Callable[..., list[float]]) -> None:
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    with pytest.raises(
        LmgymError, match=rf"reward 'mine' did not return within 0.1 s for 2 episodes at {__file__}:[0-9]+$"
    ):
        call_reward(Reward("mine", 1.0, function), answered(["a", "b"]), timeout=0.1)
    assert signal.getsignal(signal.SIGALRM) is handler
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (timer[0] > 0)  # a timer that ran before still runs


def test_a_limit_that_is_over_at_once_leaves_no_alarm() -> None:
    """A microsecond is over before the reward begins; the alarm must not ring on, in whatever comes next."""
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    for _ in range(20):
        with pytest.raises(LmgymError, match="reward 'mine' did not return within 1e-06 s for 1 episodes"):
            call_reward(Reward("mine", 1.0, loops), answered(["a"]), timeout=1e-6)
        assert signal.getsignal(signal.SIGALRM) is handler
        assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (timer[0] > 0)


def test_a_reward_in_time_is_left_alone_and_other_threads_have_no_limit() -> None:
    reward = build_rewards({"final_answer": 1.0})[0]
    assert call_reward(reward, answered(["18"]), timeout=None) == [1.0]
    found: list[list[float]] = []
    thread = threading.Thread(target=lambda: found.append(call_reward(reward, answered(["18"]), timeout=1.0)))
    thread.start()
    thread.join()
    assert found == [[1.0]]


def test_a_reward_may_ask_for_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    @episodes
    def turns(episodes: list[Episode], *, scale: float = 1.0) -> list[float]:
        return [scale * len(episode.turns) for episode in episodes]

    offer(monkeypatch, "reward", turns)
    assert call_reward(build_rewards({"offered": 1.0})[0], answered(["a", "b"])) == [1.0, 1.0]
    assert call_reward(build_rewards({"offered": {"scale": 3}})[0], answered(["a"])) == [3.0]
    check_reward("offered", scale=2.0)
    with pytest.raises(LmgymError, match=r"unknown key 'rewards.offered.episodes'"):
        build_rewards({"offered": {"episodes": 1}})


def test_a_reward_cannot_change_the_episodes_through_its_lists() -> None:
    def greedy(texts: list[str], examples: list[Example]) -> list[float]:
        texts.clear()
        examples.clear()
        return [0.0, 0.0]

    scored = answered(["a", "b"])
    assert call_reward(Reward("greedy", 1.0, greedy), scored) == [0.0, 0.0]
    assert [episode.text for episode in scored] == ["a", "b"]


@pytest.mark.parametrize("name", [":", "module:", ":attribute"])
def test_half_a_path_to_an_object_is_one_sentence(name: str) -> None:
    with pytest.raises(LmgymError, match=f"task '{name}': write module:attribute, such as my_module:my_function"):
        registry.get("task", name)


def test_a_file_name_with_a_nul_byte_names_its_line(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "aligned data"
    folder.mkdir(parents=True)
    for part in ("train_files", "val_files", "test_files"):
        (folder / part).write_bytes(b"\nC1E0\x0001\n")
    with pytest.raises(LmgymError, match="_files:2: the name of an episode holds a NUL byte"):
        load_task("crd3", "test", path=str(tmp_path))
