"""Seeds and sweeps: one recipe becomes several, all checked before the first trains; what is done stays; the tables."""

import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some

from lmgym.cli.main import main
from lmgym.config.schema import STAGE_KEYS
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.experiments.grid import expand, expands, text_of
from lmgym.experiments.parallel_runs import _last_words, _signals_to
from lmgym.experiments.results import Member, report, seeds_table, settings_table
from lmgym.experiments.sweep import is_finished, plan, plan_tree, sweep_folder, train_all
from lmgym.logs.console import Console
from lmgym.logs.plots.curves import curves_plot, mean_and_band
from lmgym.logs.writer import Writer
from lmgym.stats.intervals import student_t
from tests import runs
from tests.parity.test_resume import Interrupting
from tests.runs import Shell, assert_equal_runs, complaint

pytestmark = pytest.mark.processes

SMALL: dict[str, Any] = {"steps": 2, "evaluation": {"every": 2, "examples": 4}, "logs": {"samples": 1}}
ONCE = {"expand": True, "values": [7]}


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take longer than tiny runs; the last tests of this file draw one."""
    monkeypatch.setattr("lmgym.experiments.results.curves_plot", lambda curves, plot, metric, share: plot)


# ---------------------------------------------------------------- one tree that stands for several

values = some.lists(some.integers(0, 99) | some.booleans() | some.text("abc/ ", max_size=4), min_size=1, max_size=3)


@given(
    some.dictionaries(some.sampled_from(["a", "b.c", "b.d", "e.f.g"]), values, max_size=3),
    some.sets(some.integers(0, 9)),
)
def test_every_combination_comes_once_and_holds_its_values(sweep: dict[str, list[Any]], seeds: set[int]) -> None:
    if any(len({json.dumps(value) for value in found}) < len(found) for found in sweep.values()):
        with pytest.raises(LmgymError, match="comes twice"):
            expand({"kept": 1}, sweep)
        return
    variants = expand({"kept": 1, "b": {"kept": 2}}, sweep, sorted(seeds))
    count = math.prod(map(len, sweep.values())) * max(len(seeds), 1)
    assert len(variants) == len({variant.label for variant in variants}) == count
    for variant in variants:
        assert variant.tree["kept"] == 1 and variant.tree["b"]["kept"] == 2
        for key, value in variant.settings.items():
            node: Any = variant.tree
            for part in key.split("."):
                node = node[part]
            assert node == value and (key == "seed" or value in sweep[key])


def test_rl4lms_notation_is_the_same_thing() -> None:
    """The example at the end of RL4LMs' core_components/sweep.py, and what a sweep of the same key gives."""
    config = {
        "param_1": {"expand": True, "values": [1, 2]},
        "param_3": {"param_3_2": {"expand": False, "values": [3, 4]}, "param_3_3": 5},
    }
    rest = {"param_3": config["param_3"]}
    assert [variant.tree for variant in expand(config)] == [{"param_1": 1, **rest}, {"param_1": 2, **rest}]
    swept = expand(rest, {"param_1": [1, 2]})
    assert [variant.label for variant in swept] == [variant.label for variant in expand(config)]
    assert [variant.tree for variant in swept] == [variant.tree for variant in expand(config)]
    assert expands(config) and not expands(rest)
    assert [variant.tree for variant in expand({"a": [ONCE, 1]})] == [{"a": [7, 1]}]


def test_values_that_hold_values() -> None:
    tree = {"algorithm": {"expand": True, "values": [{"name": "a", "size": {"expand": True, "values": [1, 2]}}, "b"]}}
    found = [variant.tree["algorithm"] for variant in expand(tree, seeds=[3])]
    assert found == [{"name": "a", "size": 1}, {"name": "a", "size": 2}, "b"]


def test_labels_are_short_stable_and_fit_for_a_folder() -> None:
    sweep = {"optimizer.learning_rate": [1e-5, "1e-4"], "stages.warm.steps": [20], "stages.rl.steps": [40]}
    tree = {"stages": [{"name": "warm"}, {"name": "rl"}]}
    labels = [variant.label for variant in expand(tree, sweep, [0, 1], STAGE_KEYS)]
    assert labels[0] == "learning_rate-1e-05,warm.steps-20,rl.steps-40,seed-0"
    more = {**sweep, "optimizer.learning_rate": ["1e-4", 0.5, 1e-5]}
    assert set(labels) < {variant.label for variant in expand(tree, more, [1, 0, 5], STAGE_KEYS)}
    assert [text_of(value) for value in (True, None, 0.1, 3, "grpo", "1e-5")] == [
        "true", "null", "0.1", "3", "grpo", "1e-05"
    ]  # fmt: skip
    odd = [
        "a b",
        "a/b",
        "a-b",
        "../..",
        "",
        "x" * 90,
        {"name": "grpo", "k": 1},
        {"name": "grpo", "k": 2},
        [1, 2],
        "[1, 2]",
    ]
    texts = [text_of(value) for value in odd]
    assert text_of({"name": "rloo", "group_size": 4}).startswith("rloo-group_size-4-")
    assert len(set(texts)) == len(odd) and all(len(text) <= 31 and "/" not in text and text != ".." for text in texts)


@pytest.mark.parametrize(
    ("tree", "sweep", "seeds", "sentence"),
    [
        ({}, {"a": []}, [], r"runs\.sweep: a: the values must be a list of at least one, not \[\]"),
        ({}, {"a": 3}, [], r"runs\.sweep: a: the values must be a list of at least one, not 3"),
        ({"a": {"expand": True, "values": 3}}, {}, [], r"a: the values must be a list of at least one, not 3"),
        ({"a": {"expand": True, "values": [1], "valeus": 2}}, {}, [], r"a: a section that says expand .* not 'valeus'"),
        ({}, {"a": [1, 1]}, [], r"runs: a-1 comes twice; give each value once"),
        ({}, {}, [0, 0], r"runs: seed-0 comes twice"),
        ({}, {"seed": [1]}, [0], r"the values of seed are given in two places"),
        ({"a": ONCE}, {"a": [1]}, [], r"the values of a are given in two places"),
        ({"a": 3}, {"a.b": [1]}, [], r"runs\.sweep: a\.b: 'a' is a value, not a section"),
        (
            {"stages": [{"name": "rl"}]},
            {"stages.rll.steps": [1]},
            [],
            r"runs\.sweep: .*there is no stage 'rll'; did you me",
        ),
        ({"stages": [{"steps": 1}, {"steps": 2}]}, {"steps": [3]}, [], r"runs\.sweep: steps: every stage sets its own"),
        ({"stages": [{"steps": 1}], "steps": ONCE}, {}, [], r"runs: every stage sets steps itself"),
        (
            {},
            {"algorithm.group_size": [2], "algorithm": ["rloo"]},
            [],
            r"runs: algorithm\.group_size and algorithm both have values, .*as values of algorithm$",
        ),
        (
            {"algorithm": {"expand": True, "values": [{"name": "grpo", "group_size": 4}]}},
            {"algorithm.group_size": [2]},
            [],
            r"runs: algorithm and algorithm\.group_size both have values, .*as values of algorithm$",
        ),
        (
            {"stages": [{"name": "rl"}]},
            {"steps": [3], "stages.rl.steps": [7]},
            [],
            r"runs: steps and stages\.rl\.steps",
        ),
        (
            {"stages": [{}, {"name": "b"}]},
            {"stages.b.steps": [3], "stages.1": [7]},
            [],
            r"runs: stages\.b\.steps and stages\.1 both .*as values of stages\.1",
        ),
        (
            {"stages": [{}, {"name": "b"}]},
            {"stages.b.steps": [3], "stages.1.steps": [7]},
            [],
            r"runs: stages\.b\.steps",
        ),
    ],
)
def test_values_that_make_no_sense(tree: Any, sweep: Any, seeds: Any, sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        expand(tree, sweep, seeds, STAGE_KEYS)


def test_a_section_and_then_a_key_of_it_are_a_grid() -> None:
    axes = {"algorithm.group_size": [2, 4]}
    for tree, sweep in (
        ({}, {"algorithm": ["grpo", "rloo"], **axes}),
        ({"algorithm": {"expand": True, "values": ["grpo", "rloo"]}}, axes),
    ):
        found = [variant.tree["algorithm"] for variant in expand(tree, sweep, [], STAGE_KEYS)]
        assert found == [{"name": name, "group_size": size} for name in ("grpo", "rloo") for size in (2, 4)]


def test_a_section_that_every_stage_adds_to_is_heard() -> None:
    rates = [{"learning_rate": 1.0e-5}, {"learning_rate": 1.0e-4}]
    tree = {"optimizer": {"expand": True, "values": rates}, "stages": [{"optimizer": {"weight_decay": 0.1}}]}
    assert [variant.tree["optimizer"] for variant in expand(tree, {}, [], STAGE_KEYS)] == rates


def test_keys_of_two_stages_and_of_two_names_stand_side_by_side() -> None:
    tree = {"stages": [{"name": "a"}, {"name": "b"}], "algorithm": "grpo"}
    found = expand(tree, {"steps": [3, 5], "stages.a.steps": [7], "algorithm.group": [1], "algorithm.group_size": [2]})
    assert [variant.tree["stages"][0]["steps"] for variant in found] == [7, 7]


# ---------------------------------------------------------------- the recipe

WRONG: list[tuple[dict[str, Any], list[str], str]] = [
    ({"seedz": [0]}, [], r"recipe\.yaml: unknown key 'runs\.seedz'; did you mean 'seeds'"),
    ({"seeds": 3}, [], r"key 'runs\.seeds': .*list"),
    ({"seeds": ["x"]}, [], r"key 'runs\.seeds\.0': .*integer"),
    ({"jobs": 0}, [], r"runs\.jobs is 0; it must be at least 1"),
    ({"mode": "highest"}, [], r"key 'runs\.mode': .*'max' or 'min'"),
    ({"metric": "lenght"}, [], r"runs\.metric is 'lenght'; did you mean 'length'"),
    ({"sweep": {"optimizer.learning_rat": [1]}}, [], r"run learning_rat-1,seed-0: unknown key 'learning_rat' in"),
    ({"sweep": {"algorithm": ["grpo", "gpro"]}}, [], r"run algorithm-gpro,seed-0: unknown algorithm 'gpro'"),
    ({"sweep": {"steps": [1, 0]}}, [], r"run steps-0,seed-0: steps is 0; it must be at least 1"),
    ({"sweep": {"steps": [1, 2], "algorithm.group_size": [4, 1]}}, [], r"run group_size-1,.*: algorithm\.group_s"),
    ({"sweep": {"stages.warm.steps": [1]}}, [], r"run steps-1,seed-0: 'stages' must be a list"),
    ({"sweep": {"steps": [1, 2]}}, ["evaluation.split=test"], r"runs\.sweep chooses by evaluation\.split, and"),
    ({"sweep": {"steps": [1, 2]}}, ["steps=5"], r"override steps: the recipe's 'runs' gives it values of its own"),
    ({"seeds": [1, 2]}, ["seed=5"], r"override seed: the recipe's 'runs' gives it values of its own"),
    ({"sweep": {"algorithm": ["grpo", "rloo"]}}, ["algorithm.group_size=2"], r"'runs' gives algorithm values of"),
    ({"sweep": {"algorithm.group_size": [2, 4]}}, ["algorithm={name: rloo, group_size: 3}"], r"algorithm\.group_s"),
    ({"metric": "preference/accuracy"}, [], r"runs\.metric is 'preference/accuracy'; Valid: length, length/mean, re"),
    ({"seeds": [1, 2]}, ["stepz=5"], r"unknown key 'stepz'; did you mean 'steps'"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "overrides", "sentence"), WRONG, ids=[case[2][:45] for case in WRONG])
def test_what_any_run_has_wrong_is_told_before_one_trains(
    section: dict[str, Any], overrides: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lmgym.experiments.sweep.train", lambda *_: pytest.fail("it trained"))
    said = complaint(capsys, "train", runs.write(tmp_path / "recipe.yaml", runs=section), *overrides)
    assert re.search(sentence, said), said
    assert os.listdir(tmp_path) == ["recipe.yaml"]


def test_an_override_of_the_one_stage_does_not_undo_a_sweep(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", stages=[{"name": "rl"}], runs={"sweep": {"steps": [3, 5]}})
    with pytest.raises(
        LmgymError, match=r"override stages\.rl\.steps: the recipe's 'runs' gives steps values of its own"
    ):
        plan(recipe, ["stages.rl.steps=9"])
    assert plan(recipe, ["stages.rl.prompts_per_step=2", "algorithm=rloo"]) is not None
    planned = plan(
        runs.write(tmp_path / "single.yaml"), ["algorithm={name: rloo, group_size: {expand: true, values: [2, 4]}}"]
    )
    assert planned is not None and len(planned.members) == 2


def test_several_runs_do_not_overwrite_one_and_one_not_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("experiments.sweep.train", "training.loop.train"):
        monkeypatch.setattr(f"lmgym.{name}", lambda *_, **__: pytest.fail("it trained"))
    for name, other, override, changes in (
        ("one", "several", "runs.seeds=[0,1]", {}),
        ("several", "one", "runs=null", {"runs": {"seeds": [0, 1]}}),
    ):
        (tmp_path / name).mkdir()
        recipe = runs.write(tmp_path / name / "recipe.yaml", **changes)
        (tmp_path / name / "metrics.jsonl").touch()
        before = recipe.read_text()
        said = complaint(capsys, "train", tmp_path / name, override)
        assert said.endswith(f"for {other}, name {recipe}, with another out=")
        assert recipe.read_text() == before and len(os.listdir(tmp_path / name)) == 2


def test_only_train_takes_a_recipe_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", runs={"seeds": [0, 1]})
    for verb in ("eval", "check", "generate"):
        assert "'runs' makes it several runs, which `lmgym train` alone takes" in complaint(capsys, verb, recipe)
    assert plan(recipe, ["runs=null"]) is None and plan(runs.write(tmp_path / "single.yaml")) is None
    assert "did you mean 'runs'?" in complaint(capsys, "train", runs.write(tmp_path / "typo.yaml", run={"seeds": [0]}))


def test_a_sweep_keeps_the_test_split_apart() -> None:
    """It chooses on validation and reports test; seeds alone choose nothing and change nothing."""
    swept = plan_tree(runs.tiny(runs={"sweep": {"steps": [1, 2]}, "seeds": [4]}))
    assert [member.label for member in swept.members] == ["steps-1,seed-4", "steps-2,seed-4"]
    for member in swept.members:
        assert (member.config.evaluation.split, member.config.evaluation.final_split) == ("validation", "test")
        assert member.config.seed == 4
    seeds = plan_tree(runs.tiny(runs={"seeds": [4, 5]}))
    assert {member.config.evaluation.split for member in seeds.members} == {"test"}
    own = plan_tree(runs.tiny(runs={"sweep": {"steps": [1, 2]}}, evaluation={"split": "validation", "examples": 4}))
    assert own.members[0].config.evaluation.final_split is None and own.members[0].config.seed == 0


def test_expand_in_a_recipe_without_runs() -> None:
    tree = runs.tiny(seed={"expand": True, "values": [3, 5]}, algorithm={"name": "grpo", "group_size": ONCE})
    found = plan_tree(tree).members
    assert [member.label for member in found] == ["group_size-7,seed-3", "group_size-7,seed-5"]
    assert [member.config.seed for member in found] == [3, 5]


def test_the_metric_that_sorts_is_the_first_reward() -> None:
    assert plan_tree(runs.tiny(runs={"seeds": [0]})).metric == "length"
    imitating = plan_tree(runs.tiny(runs={}, algorithm="supervised", rewards=None))
    assert (imitating.metric, imitating.section.mode) == ("reference_nll", "min")
    assert plan_tree(runs.tiny(runs={"metric": "regex/pass@2"})).metric == "regex/pass@2"
    with_bleu = {"examples": 4, "metrics": {"bleu": {}}}
    assert plan_tree(runs.tiny(runs={"metric": "bleu/corpus"}, evaluation=with_bleu)).metric == "bleu/corpus"
    for name, metric in (("dpo", "preference/accuracy"), ("process_reward_model", "step/accuracy")):
        given = {"algorithm": name, "task": runs.GIVEN[name], "rewards": None, "evaluation": {"examples": 4}}
        assert plan_tree(runs.tiny(**given, runs={"seeds": [0]})).metric == metric
    with pytest.raises(LmgymError, match=r"runs\.metric is 'reward'; Valid: step/accuracy"):  # it answers nothing
        plan_tree(runs.tiny(**given, runs={"metric": "reward"}))


# ---------------------------------------------------------------- training


def several(folder: Path, console: Console | None = None, changed: bool = False, **changes: Any) -> int:
    tree = runs.tiny(**SMALL, **changes)
    return train_all(plan_tree(tree), folder, changed, console or Console(quiet=True))


def final(folder: Path) -> bytes:
    return (folder / "final" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_each_seed_is_the_run_that_it_would_be_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = runs.write(tmp_path / "recipe.yaml", **SMALL), tmp_path / "all"
    assert main(["train", str(recipe), f"out={out}", "runs.seeds=[1,2]"]) == 0
    said = capsys.readouterr().out
    for seed in (1, 2):
        assert_equal_runs(runs.run(tmp_path / f"alone-{seed}", **SMALL, seed=seed), out / f"seed-{seed}")
    assert sorted(path.name for path in out.iterdir()) == [
        "recipe.yaml",
        "results.json",
        "seed-1",
        "seed-2",
        "table.md",
    ]
    afters = [json.loads((out / f"seed-{seed}" / "summary.json").read_text())["after"] for seed in (1, 2)]
    results = json.loads((out / "results.json").read_text())
    assert [run["label"] for run in results["runs"]] == ["seed-1", "seed-2"]
    for name, found in results["settings"][0]["after"]["results"].items():
        share = all(after["results"][name]["share"] for after in afters)
        interval = student_t([after["results"][name]["mean"] for after in afters], share=share)
        assert found == pytest.approx(runs.as_json(interval))
        row = f"| {name} | "
        assert row in (out / "table.md").read_text() and str(interval) in said
    assert "2 seeds, 4 prompts of test: mean over seeds [95% interval, Student's t, shares within 0 and 1]" in said


def test_an_interval_that_cannot_be_had_is_null_in_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several answers to one single prompt have a mean and no interval; JSON has no NaN, and jq would refuse it."""
    evaluation = {**SMALL["evaluation"], "examples": 1, "samples": 2, "temperature": 1.0}
    recipe = runs.write(tmp_path / "recipe.yaml", **{**SMALL, "evaluation": evaluation}, runs={"seeds": [1]})
    assert main(["train", str(recipe), f"out={tmp_path / 'all'}"]) == 0
    for name in ("seed-1/summary.json", "results.json"):
        tree = json.loads((tmp_path / "all" / name).read_text(), parse_constant=pytest.fail)
        length = (tree["runs"][0] if "runs" in tree else tree)["after"]["results"]["length/mean"]
        assert length["mean"] > 0 and length["low"] is None and length["high"] is None
    assert "[no interval]" in capsys.readouterr().out


@pytest.mark.slow
def test_what_is_finished_stays_and_more_can_be_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "all"
    recipe = runs.write(tmp_path / "recipe.yaml", **SMALL, runs={"seeds": [0]})
    command = ["train", str(recipe), f"out={out}"]
    assert main(command) == 0
    before = (out / "seed-0" / "machine.json").stat().st_mtime_ns
    capsys.readouterr()
    assert main(command) == 0
    assert "1 runs, 1 of them finished before" in capsys.readouterr().out
    assert main(["train", str(out), "runs.seeds=[0,1]"]) == 0  # the folder itself names its recipe
    assert main([*command, "runs.seeds=[0,1,2]"]) == 0
    assert "3 runs, 2 of them finished before" in capsys.readouterr().out
    assert (out / "seed-0" / "machine.json").stat().st_mtime_ns == before
    assert yaml.safe_load((out / "recipe.yaml").read_text())["runs"] == {"seeds": [0, 1, 2]}
    assert "holds runs of another recipe" in complaint(capsys, *command, "optimizer.learning_rate=0.5")
    assert "unknown key 'stepz'" in complaint(capsys, "train", out, "stepz=3")
    assert "keeps its out=" in complaint(capsys, "train", out, "out=elsewhere")
    assert main(["train", str(out), "steps=3", "runs.seeds=[0,1]"]) == 0  # all of them go on
    assert runs.newest(out / "seed-1").name == "stage-0-step-000003"


def test_epochs_are_the_same_recipe_once_a_run_has_counted_them(tmp_path: Path) -> None:
    changes = {**SMALL, "steps": None, "epochs": 0.0625, "evaluation": None}
    planned = [plan_tree(runs.tiny(**changes, runs={"seeds": [0]})) for _ in range(3)]
    assert train_all(planned[0], tmp_path, console=Console(quiet=True)) == 0
    assert yaml.safe_load((tmp_path / "seed-0" / "recipe.yaml").read_text())["stages"][0]["steps"] == 1
    assert train_all(planned[1], tmp_path, console=Console(quiet=True)) == 0  # and not "a run of another recipe"
    config = planned[2].members[0].config
    config.out = str(tmp_path / "seed-0")
    assert is_finished(config)  # as the parent of parallel runs asks
    longer = plan_tree(runs.tiny(**{**changes, "epochs": 0.125}, runs={"seeds": [0]})).members[0].config
    longer.out = str(tmp_path / "seed-0")
    assert not is_finished(longer)


def test_what_has_no_reward_has_a_table_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"algorithm": "reward_model", "task": runs.JUDGED, "rewards": None, "steps": 1, "prompts_per_step": 2}
    for name, evaluation, counts in (
        ("given", {"examples": 4}, "4 prompts of test"),
        ("none", {"examples": 0}, "no evaluation"),
    ):
        planned = plan_tree(runs.tiny(**{**given, "evaluation": evaluation}, runs={"seeds": [0, 1]}))
        assert train_all(planned, tmp_path / name, console=Console()) == 0
        assert f"2 seeds, {counts}" in (tmp_path / name / "table.md").read_text()
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "given"), str(tmp_path / "given")]) == 0
    assert "2 seeds, 4 prompts of test" in capsys.readouterr().out
    said = complaint(capsys, "compare", tmp_path / "none", tmp_path / "none")
    assert "have no metric in common on split 'test'" in said


@pytest.mark.slow
def test_a_run_that_was_trained_further_by_itself_is_not_mixed_in(tmp_path: Path) -> None:
    assert several(tmp_path, runs={"seeds": [0]}) == 0
    assert main(["train", str(tmp_path / "seed-0"), "steps=3"]) == 0
    with pytest.raises(LmgymError, match="seed-0 holds a run of another recipe"):
        several(tmp_path, runs={"seeds": [0, 1]})
    assert not (tmp_path / "seed-1").exists()


def test_without_out_the_same_recipe_goes_on_and_another_is_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = runs.tiny(runs={"seeds": [0]})
    recipe = tmp_path / "mine.yaml"
    assert sweep_folder(plan_tree(tree), recipe) == Path("runs/mine")
    (tmp_path / "runs" / "mine").mkdir(parents=True)  # a single run, or anything else
    assert sweep_folder(plan_tree(tree), recipe) == Path("runs/mine-2")
    (tmp_path / "runs" / "mine-2").mkdir()
    (tmp_path / "runs" / "mine-2" / "recipe.yaml").write_text(yaml.safe_dump(plan_tree(tree).tree))
    assert sweep_folder(plan_tree({**tree, "runs": {"seeds": [0, 1]}}), recipe) == Path("runs/mine-2")
    assert sweep_folder(plan_tree({**tree, "steps": 7}), recipe) == Path("runs/mine-3")
    assert sweep_folder(plan_tree({**tree, "out": "elsewhere"}), recipe) == Path("elsewhere")


@pytest.mark.slow
def test_one_that_fails_does_not_lose_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "all"
    out.mkdir()
    (out / "seed-1").write_text("in the way")
    recipe = runs.write(tmp_path / "recipe.yaml", **SMALL, runs={"seeds": [0, 1, 2]})
    assert main(["train", str(recipe), f"out={out}"]) == 1
    said = capsys.readouterr().out
    assert "seed-1 failed: " in said and "cannot be written" in said and "2 seeds, 4 prompts" in said
    entries = {run["label"]: run for run in json.loads((out / "results.json").read_text())["runs"]}
    assert "cannot be written" in entries["seed-1"]["failed"] and "after" in entries["seed-2"]
    (out / "seed-1").unlink()
    assert main(["train", str(recipe), f"out={out}"]) == 0
    assert "3 runs, 2 of them finished before" in capsys.readouterr().out


def test_a_crash_is_one_failure_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("lmgym.experiments.sweep.train", crash)
    assert several(tmp_path, Console(), runs={"seeds": [0, 1]}) == 1
    said = capsys.readouterr()
    assert "seed-1 failed: RuntimeError: out of memory" in said.out and said.err.count("Traceback") == 2
    assert not (tmp_path / "table.md").exists()


@pytest.mark.slow
def test_ctrl_c_stops_all_and_the_rest_is_what_it_would_have_been(tmp_path: Path) -> None:
    section = {"seeds": [0, 1, 2]}
    assert several(tmp_path / "whole", runs=section) == 0
    assert several(tmp_path / "parts", Interrupting(at=3), runs=section) == 130  # in the first step of seed 1
    assert not (tmp_path / "parts" / "seed-2").exists() and not (tmp_path / "parts" / "table.md").exists()
    assert runs.newest(tmp_path / "parts" / "seed-1").name == "stage-0-step-000001"
    assert several(tmp_path / "parts", runs=section) == 0
    for seed in (0, 1, 2):
        assert_equal_runs(tmp_path / "whole" / f"seed-{seed}", tmp_path / "parts" / f"seed-{seed}")
    assert (tmp_path / "whole" / "table.md").read_text() == (tmp_path / "parts" / "table.md").read_text()


@pytest.mark.slow
def test_a_single_run_that_was_stopped_says_so_in_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, out = runs.write(tmp_path / "recipe.yaml", **SMALL), f"out={tmp_path / 'run'}"
    with monkeypatch.context() as patch:
        patch.setattr("lmgym.training.setup.Console", lambda: Interrupting(at=1))
        assert main(["train", str(recipe), out]) == 130
    assert main(["train", str(recipe), out]) == 0
    assert main(["train", str(tmp_path / "run")]) == 0  # it is finished, and stays so


@pytest.mark.parametrize("damage", ["summary.json", "final", "recipe.yaml", "checkpoints"])
def test_what_lacks_something_is_not_finished(damage: str, tmp_path: Path) -> None:
    folder = runs.run(tmp_path / "run", **SMALL)
    config = plan_tree(runs.tiny(**SMALL, runs={})).members[0].config
    config.out = str(folder)
    assert is_finished(config)
    path = folder / damage
    path.unlink() if path.is_file() else shutil.rmtree(path)
    assert not is_finished(config)


# ---------------------------------------------------------------- side by side


def wait_for(moment: Callable[[], bool], seconds: float = 250.0) -> None:
    end = time.monotonic() + seconds
    while not moment():
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.02)


FAILS = """
from lmgym.core.registry import register


@register("reward", "test_sweep_fails")
def fails(texts, examples):
    raise ValueError("on purpose")
"""


@pytest.mark.slow
def test_processes_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two at a time, one of which fails in its own process; the other is the run that it would be alone."""
    (tmp_path / "fails.py").write_text(FAILS)
    section = {"seeds": [1], "sweep": {"rewards": [{"length": 1.0}, {"test_sweep_fails": 1.0}]}, "metric": "reward"}
    changes = {**SMALL, "threads": 1, "plugins": [str(tmp_path / "fails.py")]}
    recipe = runs.write(tmp_path / "recipe.yaml", **changes, runs={**section, "jobs": 2})
    try:
        assert main(["train", str(recipe), f"out={tmp_path / 'all'}"]) == 1
    finally:
        registry._registered["reward"].pop("test_sweep_fails", None)
    said = capsys.readouterr().out
    assert said.count(": started") == 2 and said.count(": finished in") == 1
    assert "failed: reward 'test_sweep_fails' raised ValueError: on purpose" in said, said
    assert "(exit status 1; " in said and "log.txt" in said
    (folder,) = (path for path in (tmp_path / "all").iterdir() if (path / "final").is_dir())
    evaluation = {**SMALL["evaluation"], "split": "validation", "final_split": "test"}
    alone = {**changes, "evaluation": evaluation, "rewards": {"length": 1.0}, "seed": 1}
    assert_equal_runs(runs.run(tmp_path / "alone", **alone), folder)


@pytest.mark.slow
def test_ctrl_c_reaches_every_process(shell: Shell, tmp_path: Path) -> None:
    """The signal goes to the first process alone; both of its children finish their step and save."""
    out = tmp_path / "all"
    changes = {**SMALL, "steps": 5000, "evaluation": {"every": 0, "examples": 2}}
    recipe = runs.write(tmp_path / "recipe.yaml", **changes, runs={"seeds": [0, 1, 2], "jobs": 2})
    shell.start("train", recipe, f"out={out}")
    logs = [out / f"seed-{seed}" / "metrics.jsonl" for seed in (0, 1)]
    wait_for(lambda: all(log.is_file() and log.stat().st_size > 3000 for log in logs))
    os.kill(shell.process, signal.SIGINT)
    assert shell.wait() == 130, shell.said
    assert f"stopped with 0 of 3 runs finished; go on with: lmgym train {out}" in shell.said
    for log in logs:
        trained = [record for record in runs.records(log) if record["kind"] == "train"]
        assert runs.state(log.parent)["step"] == len(trained) > 0
    assert not (out / "seed-2").exists()


COUNTING = """
import signal, sys
received = []
signal.signal(signal.SIGINT, lambda *_: (received.append(1), print("one", flush=True)))
print("ready", flush=True)
sys.stdin.read()
print(len(received), flush=True)
"""


def test_a_lost_terminal_is_one_signal_and_under_nohup_none() -> None:
    """The kernel and the shell may both send SIGHUP; a second Ctrl-C would end the processes at once."""
    pipe, usual = subprocess.PIPE, signal.getsignal(signal.SIGHUP)
    command = [sys.executable, "-c", COUNTING]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, process_group=0) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        with _signals_to({"a": (process, 0.0)}) as received:
            signal.raise_signal(signal.SIGHUP)
            assert process.stdout.readline() == "one\n"
            signal.raise_signal(signal.SIGHUP)
            process.stdin.close()
            assert process.stdout.read() == "1\n" and received == [signal.SIGHUP]
            process.wait()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _signals_to({}) as received:
            signal.raise_signal(signal.SIGHUP)
        assert received == [] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, usual)


def test_the_last_words_are_the_reason(tmp_path: Path) -> None:
    log, raised = tmp_path / "log.txt", "Traceback (most recent call last):\n  File x\nValueError: on purpose\n"
    for text, said in (
        ("lmgym: loading PyTorch\n" + raised, "ValueError: on purpose (exit status 70; "),
        (raised + "lmgym: out is wrong\n  0%|\n", "out is wrong (exit status 70; "),
        ("Segmentation fault\n", "Segmentation fault (exit status 70; "),
        ("", "no word (exit status 70; "),
    ):
        log.write_text(text)
        assert _last_words(log, 70).startswith(said)


# ---------------------------------------------------------------- tables and the picture


def made_up(label: str, settings: dict[str, Any], seed: int, validation: float, test: float) -> tuple[Member, dict]:
    config = plan_tree(runs.tiny(runs={"seeds": [seed]})).members[0].config

    def moment(split: str, mean: float) -> dict[str, Any]:
        one = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "count": 64}
        return {"split": split, "step": 2, "results": {"reward": one, "m": one}}

    summary = {"newest": moment("validation", validation), "after": moment("test", test), "before": moment("test", 0.1)}
    return Member(label, settings, config), summary


def test_a_sweep_is_sorted_by_validation_whatever_test_says() -> None:
    made = [
        made_up(f"size-{size},seed-{seed}", {"task.size": size}, seed, *numbers)
        for size, seed, numbers in [
            (4, 0, (0.5, 0.9)), (4, 1, (0.6, 0.9)), (8, 0, (0.7, 0.1)), (8, 1, (0.8, 0.2)), (16, 0, (0.1, 1.0)),
        ]
    ]  # fmt: skip
    summaries = {member.label: summary for member, summary in made}
    groups: dict[str, list[Member]] = {}
    for member, _ in made:
        groups.setdefault(member.group, []).append(member)
    from lmgym.experiments.results import _order

    assert _order(groups, summaries, "m", "max") == ["size-8", "size-4", "size-16"]
    assert _order(groups, summaries, "m", "min") == ["size-16", "size-4", "size-8"]
    table = settings_table({name: groups[name] for name in ("size-8", "size-4", "size-16")}, summaries, "m", "max")
    assert table.headings == ("size", "seeds", "validation", "test")
    # two seeds at .7 and .8: .75 -+ 12.706 * .0707 / sqrt(2); one alone: its own interval over prompts
    assert table.rows[0] == ("8", "2", "0.750 [0.115, 1.385]", str(student_t([0.1, 0.2])))
    assert table.rows[2] == ("16", "1", "0.100 [0.000, 0.200]", "1.000 [0.900, 1.100]")
    assert "test is for information only" in table.title and "| 8 | 2 | 0.750 [0.115, 1.385] |" in table.markdown()


@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_table_over_seeds_shows_each(count: int) -> None:
    made = [made_up(f"seed-{seed}", {}, seed, 0.5, 0.1 * seed) for seed in range(count)]
    table = seeds_table([member for member, _ in made], {member.label: summary for member, summary in made})
    name, before, after, *each = table.rows[1]
    assert (name, before) == ("m", "0.100") and after == str(student_t([0.1 * seed for seed in range(count)]))
    assert " ".join(each).split() == [f"{0.1 * seed:.3f}" for seed in range(count)]
    assert len(each) == len(table.headings) - 3 == (1 if count == 9 else count)


def test_a_table_over_seeds_leaves_out_no_metric() -> None:
    """One seed left answers unjudged, and has a metric that the others lack."""
    made = [made_up(f"seed-{seed}", {}, seed, 0.5, 0.1 * seed) for seed in range(3)]
    after = made[1][1]["after"]["results"]
    after["reward"]["count"] = 48
    after["unjudged"], after["odd"] = ({"mean": mean, "low": 0.1, "high": 0.6, "count": 64} for mean in (0.25, 2.0))
    table = seeds_table([member for member, _ in made], {member.label: summary for member, summary in made})
    rows = {name: cells for name, *cells in table.rows}
    assert rows["unjudged"] == ["0.000", str(student_t([0.0, 0.25, 0.0])), "0.000", "0.250", "0.000"]
    assert rows["odd"] == ["-", "-", "-", "2.000", "-"] and list(rows) == ["reward", "m", "unjudged", "odd"]
    assert "3 seeds, 64 prompts of test" in table.title


def test_the_picture_is_told_whether_the_metric_is_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[bool]()
    monkeypatch.setattr("lmgym.experiments.results.curves_plot", lambda *given: seen.append(given[-1]) or given[1])
    made = [made_up(f"seed-{seed}", {}, seed, 0.5, 0.1) for seed in range(2)]
    for share in (True, False):
        for member, summary in made:
            summary["newest"]["results"]["m"]["share"] = share
            member.config.out = str(tmp_path / member.label)
            member.folder.mkdir(exist_ok=True)
            (member.folder / "summary.json").write_text(json.dumps(summary))
        report([member for member, _ in made], "m", "max", tmp_path, {}, Console(quiet=True))
    assert seen == [True, False]


def test_a_wide_table_breaks_its_headings_and_keeps_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    Console().table("a title", ("metric of a name", "two words", "more of them"), [("a" * 30, "b" * 20, "c c" * 7)])
    said = capsys.readouterr().out
    assert "b" * 20 in said and "c c" * 7 in said and max(map(len, said.splitlines())) <= 80


def test_mean_and_band_are_of_the_steps_that_all_have() -> None:
    curves = [(np.array([0, 2, 4]), np.array([0.1, 0.5, 0.6])), (np.array([0, 2]), np.array([0.3, 0.9]))]
    steps, (mean, low, high) = mean_and_band(curves)
    assert steps.tolist() == [0, 2] and mean.tolist() == [0.2, 0.7]
    interval = student_t([0.5, 0.9])
    assert (low[1], high[1]) == (interval.low, interval.high)
    assert mean_and_band(curves, share=True)[1][1:, 1].tolist() == [0.0, 1.0]  # of a share


@pytest.mark.slow
def test_a_picture_of_several_runs(tmp_path: Path) -> None:
    groups: dict[str, list[Path]] = {}
    for number, name in enumerate(("a", "a", "$b_{", "c")):
        with Writer(tmp_path / str(number)) as writer:
            writer.metrics({"kind": "train", "stage": 0, "step": 0, "loss/policy": 1.0})
            for step in range(30):
                writer.metrics({"kind": "train", "stage": 1, "step": step, "reward": number + step / 30})
                if step % 10 == 0:
                    held_out = {"m": number + step / 40, "split": "validation"}
                    writer.metrics({"kind": "evaluation", "stage": 1, "step": step, **held_out})
        groups.setdefault(name, []).append(tmp_path / str(number) / "metrics.jsonl")
    pictures = []
    for drawn in (groups, groups, {"": groups["a"][:1]}):
        path = curves_plot(drawn, tmp_path / "plots" / "plot.png", "m")
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]
    assert curves_plot(groups, tmp_path / "share.png", "m", share=True).read_bytes() != pictures[0]
    assert pictures[0].startswith(b"\x89PNG") and struct.unpack(">II", pictures[0][16:24]) == (1200, 440)
    with pytest.raises(LmgymError, match="nothing to draw, neither a reward, a loss nor x"):
        with Writer(tmp_path / "none") as writer:
            writer.metrics({"kind": "train", "stage": 0, "step": 0, "entropy": 1.0})
        curves_plot({"": [tmp_path / "none" / "metrics.jsonl"]}, tmp_path / "x.png", "x")
    with Writer(tmp_path / "short") as writer:
        for step in range(29):
            writer.metrics({"kind": "train", "stage": 0, "step": step, "reward": 1.0})
    for paths, unit in (
        (groups["c"], "mean of the step, smoothed"),
        ([tmp_path / "short" / "metrics.jsonl"], "mean of the step"),
    ):
        drawn = curves_plot({"": paths}, tmp_path / "x.svg", "m").read_text()
        assert f"<!-- {unit} -->" in drawn
