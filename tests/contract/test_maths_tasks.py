"""The tasks of mathematics and puzzles: their formats, splits and errors; mixtures, also in a recipe."""

import inspect
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmgym.config.build import build_config
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.envs.stepwise import StepwiseEnv
from lmgym.processes.pool import close_shared
from lmgym.rewards.base import call_reward
from lmgym.rewards.building import build_rewards
from lmgym.rewards.maths.final_answer import final_answer
from lmgym.rollouts.evaluate import by_task, measured
from lmgym.tasks.base import MissingSplit, check_task, load_task
from lmgym.tasks.math import sentence_lines
from lmgym.tasks.stream import Stream
from lmgym.types import Episode, Example, Turn
from tests import runs


def write(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def problem(n: int, **changes: Any) -> dict[str, Any]:
    row = {"problem": f"Half of {n}?", "solution": rf"It is $\boxed{{\frac{{{n}}}{{2}}}}$.", "level": "Level 3"}
    return {**row, "type": "Algebra", **changes}


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


@pytest.mark.parametrize("kind", ["task", "reward"])
def test_the_pages_name_every_task_and_reward_and_its_arguments(kind: str) -> None:
    page = (runs.ROOT / "docs" / f"{kind}s.md").read_text(encoding="utf-8")
    for name in registry.BUILTIN[kind]:
        function = registry.get(kind, name)
        row = re.search(rf"^\| `{name}` \| .*", page, re.MULTILINE)
        assert row, f"docs/{kind}s.md has no row of {name}"
        own = [*inspect.signature(function).parameters.values()]
        given = 1 if kind == "task" or getattr(function, "takes_episodes", False) else 2
        missing = [one.name for one in own[given:] if f"`{one.name}`" not in row[0]]
        assert not missing, f"docs/{kind}s.md, {name}"


# ---------------------------------------------------------------- math


def test_a_reference_that_cannot_be_read_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    rows = [{"problem": f"{n}?", "solution": rf"\boxed{{{n}}}", "level": 1, "type": "Algebra"} for n in range(8)]
    rows[2]["solution"] = r"\boxed{\left(}"
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", rows[3:])
    task = {"name": "math", "path": str(tmp_path), "validation": 0.2}
    with pytest.raises(LmgymError, match=r"cannot read the reference answer .* of example 'math/train/2'"):
        runs.run(tmp_path / "run", task=task, rewards={"math_equal": 1.0})
    assert not (tmp_path / "run").exists()


def test_math_reads_the_original_rows_and_those_of_math_500(tmp_path: Path) -> None:
    row = {"problem": "?", "solution": "So 4.", "answer": "4", "subject": "Geometry", "level": 5, "unique_id": "x"}
    only = {"problem": "!", "answer": r"\frac{1}{4}", "subject": "Prealgebra", "level": "Level ?"}
    rows = [problem(7), row, only, problem(8, solution=r"Now \boxed 5$ it is")]
    found = load_task("math", "test", path=write(tmp_path / "math500_test.jsonl", rows))
    assert [example.id for example in found] == [f"math/test/{n}" for n in range(4)]
    assert found[0] == Example(
        "math/test/0",
        "Half of 7?",
        (r"It is $\boxed{\frac{7}{2}}$.",),
        {"answer": r"\frac{7}{2}", "level": 3, "subject": "Algebra"},
    )
    assert [example.meta["answer"] for example in found[1:]] == ["4", r"\frac{1}{4}", "5"]
    assert [example.meta["level"] for example in found[1:]] == [5, None, 3]
    assert found[2].references == (r"$\boxed{\frac{1}{4}}$",)


def test_math_reads_the_original_folders_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for part, number in (("train", 2), ("train", 10), ("test", 1)):
        file = tmp_path / part / "algebra" / f"{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(problem(number)), encoding="utf-8")
    assert [example.prompt for example in load_task("math", "train", path=str(tmp_path))] == [
        "Half of 2?",
        "Half of 10?",
    ]
    check_task("math", path=str(tmp_path))
    (tmp_path / "train" / "algebra" / "10.json").write_text('{"problem":\n', encoding="utf-8")
    with pytest.raises(LmgymError, match=r"train/algebra/10.json:2: not valid JSON: .* at column"):
        load_task("math", "train", path=str(tmp_path))


@pytest.mark.parametrize(
    ("solution", "lines"),
    [
        (
            "We have $x=2.$ Thus $y = 1.5$ and $z=3.$ So \\[z\n= \\boxed{3}.\\]",
            ["We have $x=2.$", "Thus $y = 1.5$ and $z=3.$", r"So \[z = \boxed{3}.\]"],
        ),
        (
            r"As \begin{align*} x &= 1. \\ y &= 2. \end{align*}Hence, i.e. $3$, $\boxed{3}$. ",
            [r"As \begin{align*} x &= 1. \\ y &= 2. \end{align*}", r"Hence, i.e. $3$, $\boxed{3}$."],
        ),
        (
            "[asy]\ndraw(A. B);\n\n[/asy]\n\nby symmetry\n\n$\\boxed{1}$",
            ["[asy] draw(A. B); [/asy]", "by symmetry", r"$\boxed{1}$"],
        ),
        ("He pays \\$5. It costs\n3. no end", [r"He pays \$5.", "It costs 3. no end"]),
        ("", []),
    ],
)
def test_sentences_of_a_solution(solution: str, lines: list[str]) -> None:
    assert sentence_lines(solution).splitlines() == lines


def test_a_solution_is_played_sentence_by_sentence(tmp_path: Path) -> None:
    """The demonstrations of env stepwise are the sentences, and meta is what it is without the option."""
    solution = "Half.\nIt is half of $3.$ So $\\boxed{1}$."
    path = write(tmp_path / "math" / "train.jsonl", [problem(n, solution=solution) for n in range(4)])
    whole, split = (load_task("math", "train", path=path, split_sentences=on) for on in (False, True))
    assert [replace(one, references=()) for one in whole] == [replace(one, references=()) for one in split]
    env, said, over = StepwiseEnv(), list[str](), False
    env.reset(split[3], 0)
    while not over:
        said.append(env.demonstrate())
        over = env.step(said[-1], "stop" if said[-1].endswith("\n") else "eos").over
    assert said == ["Half.\n", "It is half of $3.$\n", r"So $\boxed{1}$."]


def test_math_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [problem(n, level=n % 5 + 1) for n in range(200)])
    write(tmp_path / "test.jsonl", [problem(3, problem="Half  of 3?\n"), problem(1000)])
    options: dict[str, Any] = {"path": str(tmp_path), "validation": 0.2}
    train, validation = (load_task("math", part, **options) for part in ("train", "validation"))
    assert 20 < len(validation) < 60 and len(train) + len(validation) == 199  # one is in test, but for white space
    check_task("math", **options)
    hard = load_task("math", "validation", levels=[4, 5], **options)
    assert hard == [example for example in validation if example.meta["level"] in (4, 5)]
    assert load_task("math", "train", subjects=["Algebra"], **options) == train
    with pytest.raises(LmgymError, match="task 'math' has no examples in split 'test'"):
        load_task("math", "test", subjects=["Geometry"], **options)
    with pytest.raises(MissingSplit, match=r"set task.validation above 0"):
        load_task("math", "validation", path=str(tmp_path))
    pattern = str(tmp_path / "{split}.jsonl")
    assert load_task("math", "train", path=pattern, validation=0.2) == train
    with pytest.raises(MissingSplit, match=r"test.jsonl holds test; give the folder"):
        load_task("math", "train", path=str(tmp_path / "test.jsonl"))


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (without(problem(1), "problem"), r":2: there is no column 'problem'"),
        (problem(1, problem=" "), ":2: column 'problem' must hold a text, got ' '"),
        (problem(1, solution=18), ":2: column 'solution' must hold a text, got 18"),
        (without(problem(1), "solution"), ":2: there is neither a column 'solution' nor 'answer'"),
        (problem(1, solution="It is 4."), r":2: the solution has no answer in a \\boxed"),
        (problem(1, solution=r"It is \boxed{4"), r":2: the solution has no answer in a \\boxed"),
        (
            problem(1, solution=r"It is \boxed{ }"),
            ":2: the answer must be a text, got ' '; task.skip_unanswered leaves",
        ),
        (problem(1, answer=[4]), r":2: the answer must be a text, got \[4\]"),
        (problem(1, level="hard"), ":2: column 'level' must hold a level from 1 to 5, such as 'Level 3', got 'hard'"),
        (problem(1, level=6), ":2: column 'level' must hold .* got 6"),
        (without(problem(1), "type"), ":2: there is no column 'subject'"),
    ],
)
def test_math_names_the_line_at_fault(row: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [problem(0), row])
    with pytest.raises(LmgymError, match=rf"train.jsonl{sentence}"):
        load_task("math", "train", path=path)
    if "skip_unanswered" in sentence:
        assert len(load_task("math", "train", path=path, skip_unanswered=True)) == 1


def test_math_names_wrong_arguments() -> None:
    for arguments, sentence in (
        ({"levels": [0]}, "task.levels names 0; MATH has the levels 1 to 5"),
        ({"subjects": ["Algebr"]}, "task.subjects names 'Algebr', which MATH has not; did you mean 'Algebra'"),
        ({"validation": 1.0}, "task.validation must be a share of train, at least 0 and below 1, not 1.0"),
    ):
        with pytest.raises(LmgymError, match=sentence):
            load_task("math", "train", **arguments)


@pytest.mark.slow
def test_math_and_svamp_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, row in (("math", problem), ("svamp", pens)):
        folder = tmp_path / name
        write(folder / "train.jsonl", [row(n) for n in range(5)])
        write(folder / "test.jsonl", [row(n) for n in range(5, 8)])
        expected = load_task(name, "train", path=str(folder))
        (folder / "README.md").write_text(
            "---\nconfigs:\n- config_name: default\n  data_files:\n"
            "  - {split: train, path: train.jsonl}\n  - {split: test, path: test.jsonl}\n---\n"
        )
        assert load_task(name, "train", hub_id=str(folder)) == expected
        with pytest.raises(LmgymError, match=f"task.hub_id: cannot load '{tmp_path / 'none'}'"):
            load_task(name, "test", hub_id=str(tmp_path / "none"))


@pytest.mark.slow
def test_real_math(shared: Path) -> None:
    """Official counts; one problem of train is in test too, and the answers of two are blank in this copy."""
    folder = shared / "data" / "math"
    pattern = str(folder / "{split}_answers_only.jsonl")
    with pytest.raises(LmgymError, match=r"train_answers_only.jsonl:7037: the answer must be a text, got ''"):
        load_task("math", "train", path=pattern)
    check_task("math", path=pattern, skip_unanswered=True, validation=0.05)
    train = load_task("math", "train", path=pattern, skip_unanswered=True)
    assert len(train) == 7_500 - 1 - 2
    test = load_task("math", "test", path=str(folder))
    assert len(test) == 5_000
    assert Counter(example.meta["subject"] for example in test)["Geometry"] == 479
    by_problem = {example.prompt: example.meta["answer"] for example in load_task("math", "test", path=pattern)}
    assert sum(by_problem[example.prompt] != example.meta["answer"] for example in test) == 1


# ---------------------------------------------------------------- svamp


def pens(n: int, **changes: Any) -> dict[str, Any]:
    row = {"Body": f"Ann has {n} pens and loses 1", "Question": "How many has she?", "Equation": f"( {n}.0 - 1.0 )"}
    return {**row, "Answer": float(n - 1), "Type": "Subtraction", "ID": f"chal-{n}", **changes}


def test_svamp_reads_the_original(tmp_path: Path) -> None:
    file = tmp_path / "SVAMP.json"
    file.write_text(json.dumps([pens(n) for n in range(1, 101)]), encoding="utf-8")
    parts = {part: load_task("svamp", part, path=str(file), validation=0.2) for part in ("train", "validation", "test")}
    assert sum(map(len, parts.values())) == 100 and all(len(part) > 5 for part in parts.values())
    check_task("svamp", path=str(file), validation=0.2)
    first = parts["train"][0]
    n = int(first.id.removeprefix("svamp/chal-"))
    assert first == Example(
        f"svamp/chal-{n}",
        f"Ann has {n} pens and loses 1. How many has she?",
        (f"{n} - 1 = {n - 1}\n#### {n - 1}",),
        {"answer": str(n - 1), "equation": f"{n} - 1", "type": "Subtraction"},
    )
    with pytest.raises(MissingSplit, match=r"set task.test above 0"):
        load_task("svamp", "test", path=str(file), test=0.0)
    assert len(load_task("svamp", "train", path=str(file), test=0.0)) == 100


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (without(pens(3), "Body"), ":2: there is no column 'Body'"),
        (pens(3, Question=""), ":2: column 'Question' must hold a text, got ''"),
        (pens(3, Answer="two"), ":2: column 'Answer' must hold a number, got 'two'"),
        (pens(3, Answer="1e9999999"), ":2: column 'Answer' must hold a number, got '1e9999999'"),
        (pens(3, Answer=True), ":2: column 'Answer' must hold a number, got True"),
    ],
)
def test_svamp_names_the_line_at_fault(row: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=f"test.jsonl{sentence}"):
        load_task("svamp", "test", path=write(tmp_path / "test.jsonl", [pens(2), row]))


def test_svamp_numbers_and_equations(tmp_path: Path) -> None:
    rows = [
        pens(1, Answer="0.5", Equation="( 1.0 / 2.0 )"),
        pens(2, Answer=7, Equation="( ( 2.0 + 1.5 ) * 2.0 )"),
        pens(3, Answer=4, Equation="( 3.0 - 1.0 ) * ( 1.0 + 1.0 )", Body="Is it 3?"),
    ]
    found = load_task("svamp", "test", path=write(tmp_path / "test.jsonl", rows))
    assert [example.references[0] for example in found] == [
        "1 / 2 = 0.5\n#### 0.5",
        "( 2 + 1.5 ) * 2 = 7\n#### 7",
        "( 3 - 1 ) * ( 1 + 1 ) = 4\n#### 4",
    ]
    assert found[2].prompt == "Is it 3? How many has she?"


def test_real_svamp(shared: Path) -> None:
    examples = load_task("svamp", "test", path=str(shared / "data" / "svamp"))
    assert len(examples) == 1_000
    texts = [example.references[0] for example in examples]
    assert final_answer(texts, examples, strict=True) == [1.0] * 1_000
    assert Counter(example.meta["type"] for example in examples)["Subtraction"] > 400
    check_task("svamp", "test", path=str(shared / "data" / "svamp"))


# ---------------------------------------------------------------- reasoning_gym


@pytest.fixture
def puzzles() -> Iterator[Callable[..., list[Example]]]:
    pytest.importorskip("reasoning_gym")
    small = {"size": 8, "validation_size": 4, "test_size": 4}
    yield lambda dataset, split="train", **more: load_task("reasoning_gym", split, dataset=dataset, **{**small, **more})
    close_shared()


@pytest.mark.slow
def test_puzzles_are_disjoint_and_repeatable(puzzles: Callable[..., list[Example]]) -> None:
    train = puzzles("chain_sum", config={"max_terms": 2, "max_digits": 1}, size=100)
    assert len({example.prompt for example in train}) == 100
    sizes = {"size": 60, "validation_size": 20, "test_size": 20}
    check_task("reasoning_gym", dataset="chain_sum", config={"max_terms": 2, "max_digits": 1}, **sizes)
    assert puzzles("chain_sum", size=12)[:8] == puzzles("chain_sum")
    long = {"min_terms": 4, "min_digits": 4}  # of which no two are equal by chance
    seeded = [{one.prompt for one in puzzles("chain_sum", data_seed=seed, size=100, config=long)} for seed in (0, 1, 2)]
    assert not seeded[0] & seeded[1] and not seeded[0] & seeded[2] and not seeded[1] & seeded[2]
    assert puzzles("chain_sum")[0].references == (puzzles("chain_sum")[0].meta["answer"],)
    assert json.loads(json.dumps(puzzles("rearc", size=1)[0].meta)) == puzzles("rearc", size=1)[0].meta


@pytest.mark.slow
def test_puzzles_name_wrong_arguments(puzzles: Callable[..., list[Example]]) -> None:
    for dataset, arguments, sentence in (
        ("chain_sums", {}, "reasoning-gym has no data set 'chain_sums'; did you mean 'chain_sum'"),
        (
            "chain_sum",
            {"config": {"max_term": 3}},
            "unknown key 'task.config.max_term' of chain_sum; did you mean 'max_t",
        ),
        ("chain_sum", {"config": {"max_terms": "x"}}, "key 'task.config.max_terms': .* got 'x'"),
        (
            "chain_sum",
            {"config": {"min_terms": 9}},
            "task.config: chain_sum refuses it: max_terms must be >= min_terms",
        ),
        ("chain_sum", {"config": {"seed": 3}}, "key 'task.config.seed' is set by lmgym; write task.data_seed"),
        ("chain_sum", {"test_size": 0}, "task.test_size must be at least 1, not 0"),
        (
            "chain_sum",
            {"config": {"max_terms": 1, "max_digits": 1, "min_terms": 1}, "size": 50},
            "task.size is 50, but with these arguments split 'train' of chain_sum has only [0-9] different questions",
        ),
    ):
        with pytest.raises(LmgymError, match=sentence):
            puzzles(dataset, **arguments)


def score_of(text: str, example: Example, **arguments: Any) -> float:
    episode = Episode(example, 0, 0, [Turn([], [], text=text)])
    return call_reward(build_rewards({"reasoning_gym": {"workers": 1, **arguments}})[0], [episode])[0]


@pytest.mark.slow
def test_puzzles_are_scored_by_their_library(puzzles: Callable[..., list[Example]]) -> None:
    example = puzzles("chain_sum")[0]
    right = example.meta["answer"]
    for text in (f"It is <answer> {right} </answer>.", right, f"So the answer is {right}.", rf"\boxed{{{right}}}"):
        assert score_of(text, example) == 1.0
    assert score_of(f"<answer>{right}</answer> or <answer>{right}1</answer>", example) < 1.0
    assert score_of(f"So the answer is {right}.", example, strict=True) == 0.0
    grid = puzzles("rearc", size=1)[0]  # its entry holds tuples, which JSON would make lists
    assert score_of(f"<answer>{grid.meta['answer']}</answer>", grid) == 1.0
    with pytest.raises(LmgymError, match="'reasoning_gym' is for the task of that name, and 'a/0' is not of it"):
        score_of("1", Example("a/0", "?"))


@pytest.mark.slow
def test_no_answer_is_run_as_a_program(puzzles: Callable[..., list[Example]], tmp_path: Path) -> None:
    """Some data sets evaluate the answer; what is more than an expression never gets there."""
    trace = tmp_path / "trace"
    attacks = [
        f"__import__('pathlib').Path({str(trace)!r}).touch()",
        f"[c for c in [__import__('os')] if c.system('touch {trace}')]",
        f"(lambda: open({str(trace)!r}, 'w'))()",
        f"open({str(trace)!r}, 'w') + 2!",  # which sympy would make valid Python
        f"[open][0]({str(trace)!r}, 'w')",
        f"exec(\"open({str(trace)!r}, 'w')\")",
    ]
    for dataset in ("countdown", "spiral_matrix", "simple_integration"):
        example = puzzles(dataset, size=1, validation_size=1, test_size=1)[0]
        assert score_of(f"<answer>{example.meta['answer']}</answer>", example) == 1.0
        for attack in attacks:
            assert score_of(f"<answer>{attack}</answer>", example) <= 0.05
    assert not trace.exists()


def test_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(LmgymError, match=r"needs the library: pip install 'lmgym\[reasoning\]'"):
        load_task("reasoning_gym", "train", dataset="chain_sum")


# ---------------------------------------------------------------- mixtures

SUMS = {"name": "arithmetic", "size": 60, "test_size": 20, "validation_size": 20}


def test_a_mixture_marks_its_examples_and_begins_evenly() -> None:
    sections = [{**SUMS, "weight": 2}, {"name": "topics"}, {"name": "topics", "label": "short", "template": "{topic}"}]
    examples = load_task("mixture", "train", tasks=sections)
    assert Counter(example.meta["task"] for example in examples) == {"arithmetic": 60, "topics": 30, "short": 30}
    assert all(example.meta["mixture"] == {"arithmetic": 2.0, "topics": 1.0, "short": 1.0} for example in examples)
    assert Counter(example.meta["task"] for example in examples[:40]) == {"arithmetic": 20, "topics": 10, "short": 10}
    alone = load_task("arithmetic", "train", size=60)
    assert [e.id for e in examples if e.meta["task"] == "arithmetic"] == [example.id for example in alone]
    assert next(e for e in examples if e.meta["task"] == "short").id == "short/topics/train/0"
    stream = Stream(examples, seed=3, prompts_per_step=8)
    for step in range(6):
        assert Counter(example.meta["task"] for example in stream.at(step)) == {
            "arithmetic": 4,
            "topics": 2,
            "short": 2,
        }
    check_task("mixture", tasks=sections)


def test_options_are_the_members_own() -> None:
    members: list[dict[str, Any]] = [
        {**SUMS, "limit": 5, "few_shot": {"n": 1}, "prompt_prefix": "Q: "},
        {"name": "topics", "system_prompt": "Be brief."},
    ]
    examples = load_task("mixture", "test", tasks=members, prompt_suffix="!")
    sums, stories = ([e for e in examples if e.meta["task"] == task] for task in ("arithmetic", "topics"))
    assert len(sums) == 5 and len(sums[0].prompt) == 3 and sums[0].prompt[-1]["content"].startswith("Q: ")
    assert stories[0].prompt[0] == {"role": "system", "content": "Be brief."}
    assert all(example.prompt[-1]["content"].endswith("!") for example in examples)
    on_test = load_task("mixture", "train", tasks=[{"name": "topics", "split": "test"}, SUMS])
    assert sum(example.id.startswith("topics/test") for example in on_test) == 6
    with pytest.raises(LmgymError, match=r"key 'task.tasks.0.split': topics trains on 'test', so that is not held out"):
        load_task("mixture", "test", tasks=[{"name": "topics", "split": "test"}, SUMS])


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ([], "task.tasks is empty; name at least one task"),
        (
            [{"name": "topics", "weight": 0}],
            r"key 'task.tasks.0.weight' is 0; it must be above 0 \(to do without topics",
        ),
        ([SUMS, {"name": "topics", "weight": -1.5}], r"key 'task.tasks.1.weight' is -1.5; it must be above 0"),
        ([{"name": "topics", "weight": "inf"}], r"key 'task.tasks.0.weight' is inf; it must be above 0"),
        ([{"name": "topics", "weight": "much"}], r"key 'task.tasks.0.weight': .*got 'much'"),
        ([{"weight": 1}], r"key 'task.tasks.0' must be a section with the name of a task, got {'weight': 1}"),
        ([{"name": "topic"}], r"unknown task 'topic'; did you mean 'topics'"),
        ([{"name": "topics", "templat": "x"}], r"unknown key 'task.tasks.0.templat'; did you mean 'template'"),
        ([{"name": "topics", "template": "x"}], r"key 'task.tasks.0' \(topics\): task.template must hold {topic}"),
        ([{"name": "topics", "limit": 0}], r"key 'task.tasks.0' \(topics\): key 'task.limit' must be"),
        ([SUMS, {"name": "mixture", "tasks": [SUMS]}], r"key 'task.tasks.1' is a mixture itself; list its tasks here"),
        ([SUMS, SUMS], r"key 'task.tasks.1': two tasks are called 'arithmetic'; give one another 'label'"),
        ([{**SUMS, "label": "a/b"}], r"key 'task.tasks.0.label' must be a word without '/', not 'a/b'"),
        ("topics", r"key 'task.tasks': .*valid list"),
    ],
)
def test_a_wrong_mixture_is_told_in_a_sentence(sections: Any, sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        load_task("mixture", "train", tasks=sections)


def test_a_mixture_lacks_the_splits_that_a_member_lacks(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"{n}?"} for n in range(50)])
    sections = [SUMS, {"name": "jsonl", "path": path}]
    assert load_task("mixture", "test", tasks=sections)
    with pytest.raises(MissingSplit, match=r"task 'mixture' has no split 'validation': task 'data' .*'task.tasks.1'"):
        load_task("mixture", "validation", tasks=sections)
    path = write(tmp_path / "marked.jsonl", [{"prompt": f"{n}?", "task": "x"} for n in range(50)])
    with pytest.raises(LmgymError, match=r"key 'task.tasks.0': its examples have a column 'task' of their own"):
        load_task("mixture", "train", tasks=[{"name": "jsonl", "path": path}])
    with pytest.raises(LmgymError, match=r"no example of the mixture's task 'topics' is left; raise task.limit"):
        Stream(load_task("mixture", "train", tasks=[{**SUMS, "weight": 9}, {"name": "topics"}], limit=2), 0, 1)
    whole = load_task("mixture", "train", tasks=[SUMS, {"name": "topics"}])
    with pytest.raises(LmgymError, match=r"'topics' is left; .* or take the task out, if task.unfit has left out all"):
        Stream([one for one in whole if one.meta["task"] != "topics"], 0, 1)  # without a limit


def answers_to_a_mixture() -> list[list[Episode]]:
    examples = load_task("mixture", "test", tasks=[{**SUMS, "test_size": 4}, {"name": "topics", "limit": 2}])
    groups = []
    for place, example in enumerate(examples):
        text = example.references[0] if example.references and place % 3 else "some words"
        groups.append([Episode(example, place, place, [Turn([], [1], text=text)])])
    return groups


def test_a_reward_may_be_for_some_tasks() -> None:
    groups = answers_to_a_mixture()
    episodes = [group[0] for group in groups]
    rewards = build_rewards({"final_answer": {"tasks": ["arithmetic"]}, "words": {"weight": 0.0, "tasks": ["topics"]}})
    for reward in rewards:
        for episode, value in zip(episodes, call_reward(reward, episodes), strict=True):
            episode.reward_components[reward.name] = value
            episode.score += reward.weight * value
            if episode.example.meta["task"] not in reward.tasks:
                assert value == 0.0
    found = measured(groups, rewards) | by_task(groups)
    kept = {name: [own for own in numbers if own] for name, numbers in found.items()}
    assert kept["words"] == [[2.0], [2.0]]  # of the topics alone
    assert [bool(own) for own in found["words"]] == [group[0].example.meta["task"] == "topics" for group in groups]
    assert len(kept["final_answer"]) == len(found["reward/arithmetic"]) == 4 and len(found["reward/topics"]) == 2
    assert found["reward/arithmetic"] == kept["final_answer"] and found["reward/topics"] == [[0.0], [0.0]]
    assert all(len(found[name]) == len(groups) for name in ("reward", "words", "final_answer"))  # prompt by prompt
    groups[0][0].reward_components["final_answer"] = None
    lacking = measured(groups, rewards)["unjudged/final_answer"]
    assert [own for own in lacking if own] == [[1.0], [0.0], [0.0], [0.0]] and len(lacking) == len(groups)
    plain = [[Episode(Example("a/0", "?", ("1",)), 0, 0, [Turn([], [1], text="1")], reward_components={"words": 1.0})]]
    assert by_task(plain) == {}
    for tasks, group, sentence in (
        (["topic"], groups[0], r"key 'rewards.words.tasks': the mixture has no task 'topic'; did you mean 'topics'"),
        (["topics"], plain[0], r"key 'rewards.words.tasks': example 'a/0' is from no mixture of tasks"),
    ):
        with pytest.raises(LmgymError, match=sentence):
            call_reward(build_rewards({"words": {"tasks": tasks}})[0], group)
    with pytest.raises(LmgymError, match=r"key 'rewards.words.tasks': .*valid list, got 'topics'"):
        build_rewards({"words": {"tasks": "topics"}})


def test_a_recipe_trains_on_a_mixture(tmp_path: Path) -> None:
    task = {"name": "mixture", "tasks": [{**SUMS, "weight": 3}, {"name": "topics", "opening": True}]}
    rewards = {"length": {"unit": "characters", "target": 6}, "regex": {"pattern": "[0-9]", "tasks": ["arithmetic"]}}
    folder = runs.run(tmp_path / "run", task=task, rewards=rewards, steps=3)
    records = runs.records(folder / "metrics.jsonl")
    held_out = [record for record in records if record["kind"] == "evaluation"]
    assert all({"reward/arithmetic", "reward/topics", "regex"} <= set(record) for record in held_out)
    drawn = Counter(record["example"].split("/")[0] for record in runs.records(folder / "rollouts.jsonl"))
    assert drawn["arithmetic"] > 0
    again = build_config(runs.tiny(task=task, rewards=rewards))
    assert again.stages[0].task == task
    with pytest.raises(LmgymError, match=r"unknown key 'task.taskz'; did you mean 'tasks'"):
        build_config(runs.tiny(task={"name": "mixture", "taskz": []}))


def test_shares_over_many_steps_follow_the_weights() -> None:
    """A weight that no step holds exactly."""
    examples = load_task("mixture", "train", tasks=[{**SUMS, "weight": 0.7}, {"name": "topics", "weight": 0.3}])
    random.Random(0).shuffle(examples)  # the list's order does not decide the shares
    stream = Stream(examples, seed=1, prompts_per_step=3)
    drawn = Counter(example.meta["task"] for step in range(1_000) for example in stream.at(step))
    assert abs(drawn["arithmetic"] - 2_100) <= 1
