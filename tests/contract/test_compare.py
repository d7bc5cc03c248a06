"""`lmgym compare`: what two models are asked, when that is refused, and its numbers against the runs' evaluations."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmgym.cli.main import main
from lmgym.config.build import build_config, dump
from lmgym.core.errors import LmgymError
from lmgym.experiments.compare import Comparison, compare_models
from lmgym.experiments.compared_models import check_same_question, common_rewards
from lmgym.experiments.evaluations import evaluate_model
from lmgym.experiments.named_models import NamedModel, find_model
from lmgym.experiments.paired_metrics import completed, pair_metrics, zeros
from lmgym.experiments.seed_groups import seed_group
from lmgym.logs.console import Console
from lmgym.stats.paired import compare_paired, compare_seeds
from lmgym.training.setup import held_out_rewards
from tests import runs
from tests.runs import complaint


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two finished runs of one recipe; the second one's rate is high, so that its answers are others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmgym.training.evaluation_points.training_plot", lambda metrics, plot: plot)
        folder = tmp_path_factory.mktemp("compare")
        one = runs.run(folder / "one", steps=5)
        return one, runs.run(folder / "two", steps=5, seed=1, optimizer={"learning_rate": 0.03, "warmup": 0})


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("lmgym.experiments.named_models.load_policy", load)


def last_evaluation(folder: Path) -> dict[str, Any]:
    return [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "evaluation"][-1]


# ---------------------------------------------------------------- what comes out


@pytest.mark.slow
def test_two_runs(two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mean is that of the run's own last evaluation; the difference is of what the file says of each example."""
    path = tmp_path / "result.json"
    assert main(["compare", *map(str, two), "--json", str(path)]) == 0
    said, result = capsys.readouterr().out, json.loads(path.read_text())
    assert list(result["metrics"]) == ["reward", "length", "regex", "length/mean", "truncated"]
    for name, metric in result["metrics"].items():
        for side, folder in (("first", two[0]), ("second", two[1])):
            expected = [last_evaluation(folder)[name + end] for end in ("", "/low", "/high")]
            if side == "first":  # the second was evaluated with the first one's seed; greedy, so with the same answers
                assert [metric[side][key] for key in ("mean", "low", "high")] == pytest.approx(expected)
            assert metric[side]["mean"] == pytest.approx(expected[0])
        values = [[row[side]["values"][name] for row in result["examples"]] for side in ("first", "second")]
        assert metric["difference"] == pytest.approx(runs.as_json(compare_paired(*values).difference))
        assert metric["higher_first"] + metric["equal"] + metric["higher_second"] == 8 == len(result["examples"])
        shown = re.search(
            rf"^  {name} +(-?[\d.]+) \[(no interval|-?[\d.]+, -?[\d.]+)\] +(\S+) +([\d.]+) +(\d+), (\d+), (\d+)$",
            said,
            re.M,
        )
        assert shown, said
        mean, bounds, word, p, *counts = shown.groups()
        low, high = (metric["difference"][key] for key in ("low", "high"))
        rises, parts = metric["difference"]["mean"] > 0, ("reward", "length", "regex")  # of weight above 0
        words = ("gain", "loss") if name in parts else ("loss", "gain") if name == "truncated" else ("higher", "lower")
        found = "-" if low is None else "unclear" if low <= 0 <= high else words[0 if rises else 1]
        assert word == found, name
        assert [float(mean), float(p)] == pytest.approx([metric["difference"]["mean"], metric["p"]], abs=0.0006)
        assert bounds == ("no interval" if low is None else f"{low:.3f}, {high:.3f}")
        assert [int(text) for text in counts] == [metric[key] for key in ("higher_first", "equal", "higher_second")]
    assert result["metrics"]["reward"]["equal"] < 8  # equality would prove little
    assert f"A: {two[0]}, weights of {runs.newest(two[0])}" in said and "8 prompts of test" in said


@pytest.mark.slow
def test_a_model_and_itself(two: tuple[Path, Path]) -> None:
    """The newest checkpoint, final/ and the run folder are one model."""
    for other in (runs.newest(two[1]), two[1] / "final"):
        result = compare_models(str(two[1]), str(other))
        assert all(metric.equal == 8 and metric.p == 1.0 for metric in result.metrics.values())
        assert result.most_different() == []


def test_before_and_after(two: tuple[Path, Path]) -> None:
    """The recipe, and the built-in model by its name, are the model before training."""
    summary = json.loads((two[1] / "summary.json").read_text())
    for base in (str(two[1] / "recipe.yaml"), "builtin:tiny"):
        result = compare_models(base, str(two[1]))
        for name, metric in result.metrics.items():
            assert metric.first.mean == pytest.approx(summary["before"]["results"][name]["mean"])
            assert metric.second.mean == pytest.approx(summary["after"]["results"][name]["mean"])
    sampled = ["evaluation.samples=4", "evaluation.temperature=1"]  # greedy answers are equal after four steps and five
    earlier = compare_models(str(two[1] / "checkpoints" / "stage-0-step-000004"), str(two[1]), sampled)
    assert earlier.first != earlier.second and len(earlier.examples) == 8
    assert any(row["first"]["texts"] != row["second"]["texts"] for row in earlier.examples)


def test_another_model_is_asked_as_the_run_is(two: tuple[Path, Path], tmp_path: Path) -> None:
    """A built-in model of another family, and a folder that is no run's: without the run's architecture."""
    shutil.copytree(two[0] / "final", tmp_path / "model")
    copied = compare_models(str(tmp_path / "model"), str(two[0]), ["evaluation.examples=3"])
    assert all(metric.equal == 3 for metric in copied.metrics.values())
    other = compare_models("builtin:tiny_gpt2", str(two[0]), ["evaluation.examples=3"])
    assert [row["id"] for row in other.examples] == [row["id"] for row in copied.examples]


def test_several_sampled_answers(two: tuple[Path, Path]) -> None:
    overrides = ["evaluation.samples=4", "evaluation.temperature=1", "evaluation.metrics={words: 0}"]
    result = compare_models(*map(str, two), overrides, split="validation", metric="words")
    assert {"regex/pass@1", "regex/pass@2", "regex/pass@4", "words"} <= set(result.metrics)
    assert (result.split, result.samples, result.metric) == ("validation", 4, "words")
    row = result.examples[0]
    assert len(row["first"]["texts"]) == len(row["first"]["values"]["regex"]) == 4
    assert len(set(row["first"]["texts"])) > 1 and len(row["first"]["values"]["regex/pass@2"]) == 1
    again = compare_models(*map(str, two), overrides, split="validation")
    assert again.examples == result.examples  # random numbers are a function of the place
    assert result.metrics["regex"].test == "sign flip"


def test_a_comparison_has_the_numbers_of_the_evaluations(tmp_path: Path) -> None:
    """Of a reward for one task of a mixture too, and of the best of several answers."""
    sums = {key: value for key, value in runs.TINY["task"].items() if key != "largest"}
    tasks = [{**sums, "largest": largest, "label": f"to{largest}"} for largest in (3, 9)]
    regex = {"regex": {"pattern": "[0-9]", "tasks": ["to3"]}, "length": {"target": 6}}
    evaluation = {"examples": 8, "samples": 2, "temperature": 1.0, "best_of": "length"}
    recipe = str(runs.write(tmp_path / "a.yaml", task={"name": "mixture", "tasks": tasks}, rewards=regex,
                            evaluation=evaluation))  # fmt: skip
    plain = str(runs.write(tmp_path / "b.yaml", task={"name": "mixture", "tasks": tasks}, rewards=regex,
                           evaluation={**evaluation, "best_of": None}))  # fmt: skip
    named = find_model(recipe)
    assert named is not None
    alone = {
        name: interval
        for name, interval in evaluate_model(named, Console(quiet=True)).metrics.items()
        if not name.startswith("reward/")
    }
    result = compare_models(recipe, recipe)
    assert {name: metric.first for name, metric in result.metrics.items()} == alone
    assert {"regex/pass@2", "regex/best@2", "length/best@2"} < alone.keys()
    assert result.metrics["regex"].difference.count == result.metrics["regex/best@2"].difference.count == 4
    assert sum(not row["first"]["values"]["regex"] for row in result.examples) == 4
    assert compare_models(plain, recipe).metrics.keys() == alone.keys()  # one of them picks
    with pytest.raises(LmgymError, match=r"evaluation\.best_of is 'length' for the one and 'regex' for the other"):
        compare_models(recipe, str(runs.write(tmp_path / "c.yaml", evaluation={**evaluation, "best_of": "regex"})))


def test_several_greedy_answers_are_equal_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(runs.write(tmp_path / "a.yaml", evaluation={"examples": 2, "samples": 3}))
    said = "the 3 answers to each prompt are equal: evaluation.temperature is 0; evaluation.temperature=1 samples them"
    assert compare_models(recipe, recipe).notes == [said]
    assert compare_models(recipe, recipe, ["evaluation.temperature=1"]).notes == []
    for command in (["compare", recipe, recipe], ["eval", recipe]):
        assert main(command) == 0 and said in capsys.readouterr().out
    named = find_model(recipe)
    assert named is not None and evaluate_model(named, Console(quiet=True)).notes == [said]
    assert compare_models(recipe, recipe, ["evaluation.samples=1"]).notes == []


def test_what_only_one_side_has_is_said_and_what_is_not_there_is_none() -> None:
    """The judge had nothing to say of two answers of B; an environment of A failed; a game of B was too long."""
    mine = [[1.0], [0.0], [1.0], []]
    one = {
        "reward": mine, "mine": mine, "mine/pass@1": mine,
        "length/mean": [[5.0], [5.0], [5.0], []], "truncated": [[0.0], [0.0], [1.0], []],
        "environment_errors": [[0.0], [0.0], [0.0], [1.0]],
    }  # fmt: skip
    other = {
        "reward": [[0.5], [], [], [0.5]], "mine": [[0.5], [], [], [0.5]], "length/mean": [[5.0]] * 4,
        "truncated": [[0.0]] * 3 + [[1.0]], "unjudged": [[0.0], [1.0], [1.0], [0.0]],
        "unjudged/mine": [[0.0], [1.0], [1.0], [0.0]], "truncated/context": [[0.0]] * 3 + [[1.0]],
        "noise/pass@1": [[]] * 4,
    }  # fmt: skip
    first, second = completed([one, other], zeros)
    assert first["unjudged/mine"] == first["truncated/context"] == [[0.0], [0.0], [0.0], []]
    assert second["environment_errors"] == [[0.0]] * 4 and "mine/pass@1" not in second
    metrics, notes = pair_metrics(first, {**second, "odd": [[1.0]] * 4})
    assert metrics["mine"].difference.count == 1 and metrics["length/mean"].difference.count == 3
    assert metrics["unjudged"] == metrics["unjudged/mine"] == compare_paired([[0]] * 3, [[0], [1], [1]])
    assert metrics["environment_errors"] == compare_paired([[0]] * 3 + [[1]], [[0]] * 4)
    assert notes == [
        "mine/pass@1 is not compared: only A has it",
        "odd is not compared: only B has it",
    ]
    nowhere = pair_metrics({"mine": [[1.0], []]}, {"mine": [[], [1.0]]})
    assert nowhere == ({}, ["mine is not compared: it has no prompt that was judged for both"])


def test_final_split_comes_first_unless_a_split_is_named(tmp_path: Path) -> None:
    recipe = str(
        runs.write(tmp_path / "a.yaml", evaluation={"examples": 2, "split": "validation", "final_split": "test"})
    )
    assert compare_models(recipe, recipe).split == "test"
    assert compare_models(recipe, recipe, ["evaluation.split=validation"]).split == "validation"
    assert compare_models(recipe, recipe, split="validation").split == "validation"


def test_rewards_of_other_weights_are_compared_part_by_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = runs.write(tmp_path / "a.yaml", rewards={"words": 1.0, "length": {"target": 6}})
    other = runs.write(tmp_path / "b.yaml", rewards={"words": 0.5, "final_answer": 1.0})
    assert main(["compare", str(one), str(other), "evaluation.examples=2"]) == 0
    said = capsys.readouterr().out
    assert "the reward is not compared" in said and "b.yaml {'final_answer': 1.0, 'words': 0.5}" in said
    assert re.search(r"^  final_answer ", said, re.M) and re.search(r"^  length ", said, re.M)
    assert not re.search(r"^  reward ", said, re.M)


@pytest.mark.usefixtures("no_model")
def test_training_in_another_environment_is_the_same_question() -> None:
    section = {**EVALUATION, "env": {"name": "single_turn"}}
    trees = [runs.tiny(evaluation=section, env={"name": "single_turn", "window": window}) for window in (1, 2)]
    check_same_question(*(NamedModel(name, build_config(tree)) for name, tree in zip("ab", trees, strict=True)))


def test_a_reward_that_is_a_metric_too_keeps_its_weight() -> None:
    rewards = {"regex": {"pattern": "[0-9]", "weight": -2.0}, "words": 0.5}
    metrics = {"regex": {"pattern": "[0-9]"}, "words": {}, "length": {"target": 6}}
    config = build_config(runs.tiny(rewards=rewards, evaluation={**EVALUATION, "metrics": metrics}))
    found, notes = common_rewards(NamedModel("a", config), NamedModel("b", config))
    expected = [("regex", -2.0), ("words", 0.5), ("length", 0.0)]
    assert [(one.name, one.weight) for one in found] == expected and not notes
    assert [(one.name, one.weight) for one in held_out_rewards(config, config.stages[-1])] == expected


def test_the_largest_differences_by_turns() -> None:
    values = [(0.0, 0.25), (1.0, 0.5), (0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.5)]
    rows = [
        {
            "id": str(place),
            **{side: {"values": {"m": [value]}} for side, value in zip(("first", "second"), pair, strict=True)},
        }
        for place, pair in enumerate(values)
    ]
    result = Comparison("a", "b", "test", 1, {}, "m", {}, rows, {}, [])
    assert [row["id"] for row in result.most_different()] == ["4", "3", "1", "5"]
    assert [row["id"] for row in result.most_different(limit=9)] == ["4", "3", "1", "5", "0"]


# ---------------------------------------------------------------- what is refused, before any model is loaded

EVALUATION = runs.TINY["evaluation"]
SAMPLING = runs.TINY["sampling"]
UNLIKE: list[tuple[dict[str, Any], list[str], str]] = [
    ({"task": "topics"}, [], r"about task arithmetic and .*b\.yaml about topics"),
    ({"task": {**runs.TINY["task"], "largest": 9}}, [], r"task\.largest is 5 for the one and 9 for the other"),
    ({"evaluation": {**EVALUATION, "split": "validation"}}, [], r"evaluation\.split is 'test' for the one and 'vali"),
    ({"evaluation": {**EVALUATION, "examples": 9}}, [], r"evaluation\.examples is 8 for the one and 9 for the other"),
    ({"evaluation": {**EVALUATION, "samples": 2}}, [], r"evaluation\.samples is 1 for the one and 2"),
    ({"evaluation": {**EVALUATION, "temperature": 1}}, [], r"evaluation\.temperature is 0\.0 for the one and 1"),
    ({"env": {"name": "single_turn", "window": 2}}, [], r"evaluation\.env is \{.*\} for the one and"),
    ({"evaluation": {**EVALUATION, "env": {"name": "single_turn", "window": 2}}}, [], r"evaluation\.env is \{.*\} for"),
    ({"sampling": {"max_new_tokens": 7}}, [], r"evaluation\.max_new_tokens is 6 for the one and 7 for the other"),
    ({"sampling": {**SAMPLING, "stop": ["x"]}}, [], r"sampling\.stop is \(\) for the one and \('x',\)"),
    ({"rewards": {"length": {"target": 9}}}, [], r"rewards\.length is \{'target': 6, .* for the other; an override"),
    ({"policy": {**runs.TINY["policy"], "compute": "bfloat16"}}, ["policy.compute=float32"], "same"),
    ({}, ["--split", "train"], r"evaluation on split 'train', which stage 'train' trains on"),
    ({}, ["--split", "tset"], r"has no split 'tset'; did you mean 'test'"),
    ({}, ["--metric", "lenght"], r"--metric is 'lenght'; did you mean 'length'"),
    ({}, ["evaluation.exmples=3"], r"unknown key 'exmples' in 'evaluation'; did you mean 'examples'"),
]  # fmt: skip


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(("changes", "arguments", "sentence"), UNLIKE, ids=[case[2][:40] for case in UNLIKE])
def test_what_is_asked_otherwise_is_refused(
    changes: dict[str, Any], arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = runs.write(tmp_path / "a.yaml"), runs.write(tmp_path / "b.yaml", **changes)
    if sentence == "same":  # an override for both mends it
        with pytest.raises(SystemExit):
            main(["compare", str(one), str(other), *arguments])
        assert "AssertionError: a model was loaded" in capsys.readouterr().err
    else:
        assert re.search(sentence, complaint(capsys, "compare", one, other, *arguments))


@pytest.mark.usefixtures("no_model")
def test_runs_in_two_precisions_are_refused(two: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = runs.write(tmp_path / "b.yaml", policy={**runs.TINY["policy"], "compute": "bfloat16"})
    with pytest.raises(LmgymError, match=r"policy\.compute is 'float32' for the one and 'bfloat16' for the other"):
        compare_models(str(two[0]), str(recipe), ["steps=5"])


@pytest.mark.usefixtures("no_model")
def test_names_that_are_nothing(two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, empty = two[0], tmp_path / "empty"
    empty.mkdir()
    said = complaint(capsys, "compare", "builtin:tiny", "builtin:tiny_gpt2")
    assert said == "neither builtin:tiny nor builtin:tiny_gpt2 names a task; at least one must be a run or a recipe"
    assert f"there is no run, model folder or recipe {tmp_path / 'nun'}" in complaint(
        capsys, "compare", run, tmp_path / "nun"
    )
    assert "neither a run nor a model" in complaint(capsys, "compare", empty, run)
    assert "there is no recipe" in complaint(capsys, "compare", run, "elsewhere.yaml")
    shutil.copy(run / "recipe.yaml", empty)
    assert "holds no model yet" in complaint(capsys, "compare", run, empty)
    shutil.copytree(run, tmp_path / "copy")
    damaged = runs.newest(tmp_path / "copy")
    (damaged / "model.safetensors").write_bytes(b"")
    assert re.search(r"checkpoint .* is damaged \(model\.safetensors has 0", complaint(capsys, "compare", run, damaged))


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path / "a.yaml")
    arguments = [
        "compare",
        str(recipe),
        str(recipe),
        "evaluation.examples=1",
        "--json",
        str(tmp_path / "no" / "a.json"),
    ]
    assert main(arguments) == 1
    assert "a.json: cannot be written" in capsys.readouterr().err


# ---------------------------------------------------------------- groups of seeds


def finished(folder: Path, seed: int, rewards: list[float], **changes: Any) -> Path:
    """What `lmgym compare` reads of a finished run: its recipe and its evaluation. No model."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(dump(build_config(runs.tiny(seed=seed, **changes))))
    (folder / "metrics.jsonl").touch()
    results = {
        name: {"mean": value, "low": None, "high": None, "count": 8, "share": name == "regex"}
        for name, value in zip(("reward", "length", "regex"), rewards, strict=True)
    }
    moment = {"stage": "train", "step": 6, "split": "test", "results": results}
    (folder / "summary.json").write_text(json.dumps({"before": moment, "after": moment, "newest": moment}))
    return folder


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two folders of three seeds, of which seeds 1 and 2 are common; the rate of the second is another."""
    monkeypatch.chdir(tmp_path)
    for seed, reward in ((0, 0.9), (1, 0.50), (2, 0.60)):
        finished(tmp_path / f"a/seed-{seed}", seed, [reward, 0.5, 0.25])
    for seed, reward in ((1, 0.54), (2, 0.66), (3, 0.0)):
        finished(tmp_path / f"b/seed-{seed}", seed, [reward, 0.5, 0.5], optimizer={"learning_rate": 0.01})
    return tmp_path


@pytest.mark.parametrize("names", [("a", "b"), ("a/*", "b/seed-[123]"), ("a", "b/seed-*")])
def test_groups_of_seeds_are_paired_by_seed(
    groups: Path, names: tuple[str, str], no_model: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *names, "--json", "all.json"]) == 0
    said, result = capsys.readouterr().out, json.loads(Path("all.json").read_text())
    assert result["seeds"] == [1, 2] and list(result["metrics"]) == ["reward", "length", "regex"]
    assert result["values"]["reward"] == {"first": [0.5, 0.6], "second": [0.54, 0.66]}
    expected = compare_seeds([0.5, 0.6], [0.54, 0.66])
    assert result["metrics"]["reward"]["difference"] == pytest.approx(runs.as_json(expected.difference))
    assert result["metrics"]["reward"]["p"] == pytest.approx(expected.p)
    assert re.search(rf"^  reward +{re.escape(str(expected.difference))} +unclear +0\.126 +0, 0, 2$", said, re.M), said
    assert re.search(r"^  regex +0\.250 \[no interval\] +- +- +0, 0, 2$", said, re.M), said
    assert re.search(r"^  1 +0\.500 +0\.540 +0\.040$", said, re.M)
    assert "2 seeds, 8 prompts of test" in said
    assert "seed 3 is left out: only B has it" in said
    assert ("seed 0 is left out: only A has it" in said) == (0 in seed_group(names[0]))


def test_groups_of_seeds_that_cannot_be_compared(
    groups: Path, no_model: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "b is several runs and a/seed-0 is one" in complaint(capsys, "compare", "a/seed-0", "b")
    assert "a is several runs and nobody/model is one" in complaint(capsys, "compare", "a", "nobody/model")
    assert "put a glob in quotes" in complaint(capsys, "compare", "a/seed-0", "a/seed-1", "b")
    assert "steps=3 would change nothing" in complaint(capsys, "compare", "a", "b", "steps=3")
    assert "x* matches no run" in complaint(capsys, "compare", "x*", "b")
    said = complaint(capsys, "compare", "[ab]/seed-*", "b")
    assert "differ in stages.train.optimizer.learning_rate" in said and "'b/seed-*'" in said
    said = complaint(capsys, "compare", "a/seed-[02]", "b/seed-[13]")
    assert "the seeds are 0, 2 and 1, 3" in said
    assert "did you mean 'regex'" in complaint(capsys, "compare", "a", "b", "--metric", "regexp")
    assert "was not evaluated on split 'validation'" in complaint(capsys, "compare", "a", "b", "--split", "validation")
    shutil.copytree("a/seed-1", "c/seed-1")
    assert "both have seed 1" in complaint(capsys, "compare", "[ac]/seed-1", "b")
    for seed in (1, 2):
        finished(groups / f"d/seed-{seed}", seed, [0.1, 0.2, 0.3], evaluation={"examples": 4})
    said = complaint(capsys, "compare", "a", "d")
    assert "evaluation.examples is 8 for the one and 4 for the other; train both with the same value" in said
    shutil.copytree("b", "f")
    fewer = Path("f/seed-1/summary.json")
    fewer.write_text(fewer.read_text().replace('"count": 8', '"count": 7'))
    said = complaint(capsys, "compare", "a", "f")
    assert "the runs were evaluated on different numbers of prompts: [7, 8]" in said
    shutil.copytree("b", "e")
    finished(groups / "e/seed-4", 4, [0.1, 0.2, 0.3], optimizer={"learning_rate": 0.01}, steps=5)
    said = complaint(capsys, "compare", "a", "e/seed-*")
    assert said.endswith("differ in stages.train.steps; train both with the same recipe, or leave one out by a glob")
    Path("e/seed-4").rename("e/long")
    Path("e/seed-2").rename("e/short")
    for names, example in (("*[gt]", "short"), ("[ls]*", "seed-*")):
        said = complaint(capsys, "compare", "a", f"e/{names}")
        assert said.endswith(f"differ in stages.train.steps; name the runs of one of them, such as 'e/{example}'")
    summary = Path("b/seed-2/summary.json")
    whole = json.loads(summary.read_text())
    earlier = {**whole, "after": {**whole["after"], "step": 4}}  # it is trained further, and was killed on its way
    summary.write_text(json.dumps(earlier))
    assert "seed-2 is not finished; go on with `lmgym train b/seed-2`" in complaint(capsys, "compare", "a", "b")
    summary.write_text(json.dumps({**earlier, "stop": {"metric": "reward", "target": 0.5}}))
    assert main(["compare", "a", "b"]) == 0  # it stopped early
    capsys.readouterr()
    summary.unlink()
    assert "seed-2 is not finished; go on with `lmgym train b/seed-2`" in complaint(capsys, "compare", "a", "b")


def test_runs_of_which_one_left_answers_unjudged(
    groups: Path, no_model: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reward is of fewer prompts than the others' are; where nothing was unjudged, there is no such metric."""
    path = Path("b/seed-2/summary.json")
    summary = json.loads(path.read_text())
    results = summary["after"]["results"]
    results["reward"]["count"] = results["regex"]["count"] = 6
    for name in ("unjudged", "unjudged/regex"):
        results[name] = {"mean": 0.25, "low": 0.05, "high": 0.6, "count": 8, "share": True}
    results["regex/pass@1"] = {"mean": 0.5, "low": 0.1, "high": 0.9, "count": 8, "share": True}
    path.write_text(json.dumps({**summary, "newest": summary["after"]}))
    assert main(["compare", "a", "b", "--json", "all.json"]) == 0
    said, result = capsys.readouterr().out, json.loads(Path("all.json").read_text())
    assert result["prompts"] == 8 and "2 seeds, 8 prompts of test" in said
    assert result["values"]["unjudged"] == result["values"]["unjudged/regex"] == {
        "first": [0.0, 0.0], "second": [0.0, 0.25],
    }  # fmt: skip
    assert result["better"]["unjudged"] == -1 and "regex/pass@1" not in result["metrics"]
    assert "regex/pass@1 is not compared: not all runs have it" in said
