"""`lmgym what-if`: a step taken again is the step that was taken, bit for bit, and a changed one is what a run with the
changed recipe would have done."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lmgym.cli.main import main
from lmgym.config.build import build_config, load_config
from lmgym.core.errors import LmgymError
from lmgym.experiments.what_if.difference import compare_steps, effective_sample_size
from lmgym.experiments.what_if.question import ask
from lmgym.experiments.what_if.retake import flat
from lmgym.experiments.what_if.trial import try_steps
from lmgym.experiments.what_if.what_if import WhatIf, what_if
from lmgym.experiments.why.why import why
from lmgym.logs.console import Console
from lmgym.training.loop import train
from lmgym.updates.optimizer import Optimizer
from tests import runs
from tests.parity.test_resume import ALGORITHMS
from tests.runs import GIVEN, complaint

KEPT = {
    "steps": 4,
    "evaluation": {"every": 0, "examples": 2},
    "checkpoint": {"every": 2, "keep": 9},
    "logs": {"samples": 0, "traces": "all"},
}
BIT_FOR_BIT = (
    "grpo",
    "grpo, 4 optimizer steps a batch",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce ema",
    "reinforce scst",
    "ppo",
    "a2c, rmsprop",
    "trpo",
    "replay",
    "dpo",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of GRPO, of which everything is kept."""
    return runs.run(tmp_path_factory.mktemp("what-if") / "run", **KEPT)


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The gradient of each optimizer step that is taken, before it is clipped."""
    seen, step = list[Tensor](), Optimizer.step

    def watched(optimizer: Optimizer) -> float:
        seen.append(flat([torch.zeros_like(p) if p.grad is None else p.grad for p in optimizer.parameters]))
        return step(optimizer)

    monkeypatch.setattr(Optimizer, "step", watched)
    yield seen


def asked(folder: Path, *overrides: str, step: int | None = None) -> WhatIf:
    return what_if(ask(folder, overrides), step)


def weights(folder: Path, step: int) -> dict[str, Tensor]:
    return load_file(folder / "checkpoints" / f"stage-0-step-{step:06d}" / "model.safetensors")


def norm_of_change(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[float, int]:
    """How often the weights changed by each amount: the same for any order of the parameters."""
    changes = torch.cat([(other[name] - one[name]).reshape(-1) for name in one])
    values, counts = changes.unique(return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def amounts(moved: Tensor) -> dict[float, int]:
    values, counts = moved.unique(return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize("name", BIT_FOR_BIT)
def test_with_nothing_changed_the_step_is_the_runs_own(name: str, tmp_path: Path, gradients: list[Tensor]) -> None:
    given = GIVEN.get(ALGORITHMS[name]["name"])
    data: dict[str, Any] = {"task": given, "rewards": None} if given else {}
    section = {"algorithm": ALGORITHMS[name]}
    some = {"logs": {"samples": 0}} if name == "cispo" else {}  # three groups of four: they are sampled again
    folder = runs.run(tmp_path / "run", **KEPT | section | data | some)
    real = list(gradients)
    steps = len(real) // 4
    for step, rolled in ((2, 0), (3, 1)):  # behind a checkpoint, and one step later
        gradients.clear()
        result = asked(folder, step=step)
        assert result.unlike == [] and result.begin.step - result.begin.at == rolled
        assert result.compared > 10 + 4 * len(result.real.answers) * (not given) * (not some)
        assert result.real.recorded == (not given and not some and name != "replay")
        if result.real.gradient is not None and steps:
            assert torch.equal(gradients[-steps], real[step * steps])
            assert torch.equal(result.real.gradient, real[step * steps][: len(result.real.gradient)])
    assert gradients == [] or torch.equal(gradients[-1], real[-1])


def test_a_changed_optimizer_and_reward_are_what_a_resumed_run_does(folder: Path, tmp_path: Path) -> None:
    """These two may change on a resume, so the real thing can be had."""
    rewards = "rewards={length: {unit: characters, target: 2, weight: 1.0}, regex: {pattern: '[a-z]', weight: -0.5}}"
    for number, change in enumerate(("optimizer.learning_rate=0.03", rewards, "optimizer.max_gradient_norm=0.01")):
        result = asked(folder, change, step=2)
        assert result.changed is not None and result.unlike == []
        other = Path(shutil.copytree(folder, tmp_path / str(number)))
        for path in (other / "checkpoints").glob("stage-0-step-000004"):
            shutil.rmtree(path)
        config = load_config(other / "recipe.yaml", [change, f"out={other}", "steps=3", "checkpoint.every=1"])
        train(config, Console(quiet=True))
        moved = norm_of_change(weights(other, 2), weights(other, 3))
        assert amounts(result.changed.moved) == moved
        assert amounts(result.real.moved) != moved


def test_a_changed_algorithm_is_what_a_run_of_it_does(folder: Path, tmp_path: Path) -> None:
    """Of the first step, where both recipes stand at the same place."""
    result = asked(folder, "algorithm={name: ppo, group_size: 4, epochs: 2}", step=0)
    changes: dict[str, Any] = KEPT | {"algorithm": {"name": "ppo", "group_size": 4, "epochs": 2}, "steps": 1}
    other = runs.run(tmp_path / "ppo", **changes)
    own = runs.records(other / "metrics.jsonl")
    record = next(one for one in own if one["kind"] == "train")
    assert result.changed is not None
    assert {name: result.changed.record[name] for name in record} == record


def test_a_reference_that_the_run_did_not_have_is_its_beginning(folder: Path, tmp_path: Path) -> None:
    """With a coefficient of 0 a reference changes nothing but what is logged."""
    section = {"name": "grpo", "group_size": 4, "kl_coefficient": 1e-9}
    other = runs.run(tmp_path / "run", **KEPT | {"algorithm": section})
    record = next(one for one in runs.records(other / "metrics.jsonl") if one["kind"] == "train" and one["step"] == 2)
    result = asked(folder, "algorithm.kl_coefficient=1e-9", step=2)
    assert result.changed is not None and record["kl/reference"] != 0
    assert result.changed.record["kl/reference"] == pytest.approx(record["kl/reference"], rel=1e-3)
    assert result.changed.record["kl/coefficient"] == 1e-9


def test_a_coefficient_of_the_question_is_not_the_checkpoints(folder: Path) -> None:
    """Behind a checkpoint of a run without a penalty; one that a target moves begins with the question's, too."""
    constant = asked(folder, "algorithm.kl_coefficient=10.0", step=2)
    assert constant.changed is not None and constant.difference is not None and constant.difference.gradient is not None
    assert constant.changed.record["kl/coefficient"] == 10.0 and not constant.difference.gradient.equal
    moved = asked(folder, "algorithm.kl_coefficient=10.0", "algorithm.kl_target=1.0", step=2).changed
    assert moved is not None and moved.gradient is not None and constant.changed.gradient is not None
    assert torch.equal(moved.gradient, constant.changed.gradient)
    assert 8.0 <= moved.record["kl/coefficient"] < 10.0  # the controller moves it by a fifth at most
    other = asked(folder, "algorithm=reinforce_stable", step=2).changed
    assert other is not None and other.record["kl/coefficient"] == 0.25


def test_what_differs_is_said_in_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip = asked(folder, "rewards.length.weight=-1", "rewards.regex.weight=-0.5", step=2).difference
    assert flip is not None and flip.gradient is not None
    assert flip.gradient.cosine == pytest.approx(-1) and flip.gradient.ratio == pytest.approx(1)
    assert sum(one.flips for one in flip.answers) == sum(one.advantage[0] != 0 for one in flip.answers) > 0
    assert flip.groups[0] == flip.groups[1] and flip.tokens[0] == flip.tokens[1] > 0
    assert flip.effective is not None and 0 < flip.effective[0] <= flip.effective[1] == 16
    assert main(["what-if", str(folder), "rewards.length.weight=-1", "rewards.regex.weight=-0.5", "--step", "3"]) == 0
    said = capsys.readouterr().out
    assert "bit for bit" in said and "cosine -1.0000" in said and "effective sample size" in said
    assert f"of 16 answers {sum(one.flips for one in flip.answers)} would be pushed the other way" in said
    assert main(["what-if", str(folder)]) == 0
    assert "nothing was changed" in capsys.readouterr().out


def test_a_step_compared_with_itself(folder: Path) -> None:
    real = asked(folder).real
    same = compare_steps(real, real)
    assert same.gradient is not None and same.gradient.equal and same.moved.equal
    assert not any(one.flips for one in same.answers)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["sampling.temperature=0.7"], "recorded ones are of the recipe as it was"),
        (["sampling.top_p=0.9"], "--try N samples new ones"),
        (["algorithm.group_size=8"], "they say nothing about another number of them"),
        (["task.largest=9"], "this decides which answers there are"),
        (["seed=1"], "a question is about the algorithm"),
        (["algorithm=ppo"], "the one trains a value function"),
        (["algorithm={name: reinforce, group_size: 4, baseline: ema}"], "keeps a state from step to step"),
        (["algorithm={name: reinforce, group_size: 4, baseline: scst}"], "needs greedy"),
        (["algorithm=supervised"], "needs answers = 'references'"),
        (["optimizer.name=rmsprop"], "other moments"),
        (["--step", "9"], "--step is 1 to 4"),
        (["--step", "0"], "--step is 1 to 4"),
        (["--stage", "rl"], "no stage 'rl'"),
        (["algorithm.nothing=1"], "unknown key 'nothing'"),
        (["runs/b"], "takes one run"),
    ],
)
def test_what_the_record_cannot_answer(
    arguments: list[str], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in complaint(capsys, "what-if", folder, *arguments)


def test_other_answers_than_the_record_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that cannot be repeated: its recipe has another seed now, which its record has not."""
    folder = runs.run(tmp_path / "run", **KEPT | {"logs": {"samples": 0}})
    shutil.rmtree(folder / "checkpoints")
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(
        recipe.replace("\nseed: 0\n", "\nseed: 1\n").replace("seed: 0\n", "seed: 1\n", 1)
    )
    assert "has other answers than the run recorded" in complaint(capsys, "what-if", folder, "--step", "1")


def gone_on(folder: Path, *changes: str, **first: Any) -> Path:
    """A run of two steps, and then of two more with something changed."""
    runs.run(folder, **KEPT | {"steps": 2} | first)
    train(load_config(folder / "recipe.yaml", [*changes, "steps=4", f"out={folder}"]), Console(quiet=True))
    return folder


def test_steps_before_a_resume_with_another_learning_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are taken with the later one, and that is said: at a checkpoint, behind it, and of several steps."""
    folder = gone_on(tmp_path / "run", "optimizer.learning_rate=3.0")
    cause = "the run was resumed at step 3, and optimizer.learning_rate was 0.003 and is 3.0"
    result = asked(folder, "optimizer.max_gradient_norm=0.01", step=0)
    assert result.unlike == ["learning_rate"] and result.reason == f" ({cause})"
    refused = rf"step 2 cannot be taken again, since it is taken with what was changed behind it \({cause}\)"
    with pytest.raises(LmgymError, match=refused):
        asked(folder, step=1)
    arguments = ["what-if", str(folder), "optimizer.max_gradient_norm=0.01", "--step", "1", "--try", "1"]
    assert main(arguments) == 0
    said = "A (as it was) is not what the run took: from step 1 on it gives other numbers than the run has recorded"
    assert f"{said} ({cause}): learning_rate" in capsys.readouterr().out
    with pytest.raises(LmgymError, match=rf"had the learning rate 0.0015, and now it has 1.5 \({cause}\)"):
        why(ask(folder, []), step=0)
    # From the resume on, nothing is.
    behind = asked(folder, step=2)
    assert behind.unlike == [] and behind.reason == ""
    trial = try_steps(ask(folder, ["optimizer.max_gradient_norm=0.01"]), 2, 2, Console(quiet=True))
    assert trial.unlike == {} and trial.reason == ""


@pytest.mark.parametrize("logs", [{"samples": 0}, {"samples": 0, "traces": "none"}])
def test_steps_before_a_resume_with_other_rewards(logs: dict[str, Any], tmp_path: Path) -> None:
    """Sampled again they are the same answers, with other scores: with a trace of every answer's score and without."""
    folder = gone_on(tmp_path / "run", "rewards.regex.weight=3.0", logs=logs)
    cause = r"\(the run was resumed at step 3, and rewards.regex.weight was 0.5 and is 3.0\)"
    for question in (what_if, why):
        with pytest.raises(LmgymError, match=f"taken again, step 1 has other scores than the run recorded {cause}"):
            question(ask(folder, []), step=0)
    assert asked(folder, step=2).unlike == []


def test_what_the_steps_own_numbers_cannot_show_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gradient is clipped behind what is recorded of it."""
    folder = gone_on(tmp_path / "run", "optimizer.max_gradient_norm=0.01")
    caution = (
        "the step is taken with what has changed (the run was resumed at step 3, and optimizer.max_gradient_norm was "
        "1.0 and is 0.01), which its own numbers need not show"
    )
    for command in ("what-if", "why"):
        assert main([command, str(folder), "--step", "1"]) == 0
        assert caution in capsys.readouterr().out
        assert main([command, str(folder), "--step", "3"]) == 0
        assert "has changed" not in capsys.readouterr().out


def test_a_step_without_a_checkpoint_before_it(tmp_path: Path) -> None:
    stages = [{"name": "one", "steps": 1}, {"name": "two", "steps": 3}]
    folder = runs.run(tmp_path / "run", **KEPT | {"steps": None, "stages": stages})
    assert what_if(ask(folder, [], "two"), 2).unlike == []
    assert what_if(ask(folder, [], "one"), 0).unlike == []
    for path in (folder / "checkpoints").glob("stage-1-step-00000[0-2]"):
        shutil.rmtree(path)
    with pytest.raises(LmgymError, match="no whole checkpoint of stage 'two' before step 3"):
        what_if(ask(folder, [], "two"), 2)


def test_the_run_is_only_read(folder: Path) -> None:
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    asked(folder, "optimizer.learning_rate=0.1", step=3)
    assert before == {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_effective_sample_size_by_hand() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0]).log()
    assert effective_sample_size(weights) == pytest.approx(36 / 14)


def test_a_stranger_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no run folder" in complaint(capsys, "what-if", tmp_path / "none")
    build_config(runs.tiny(out=str(tmp_path)))
    assert "it is no run" in complaint(capsys, "what-if", tmp_path)


def test_steps_that_are_tried_are_those_of_two_real_runs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = "optimizer.learning_rate=0.3"
    trial = try_steps(ask(folder, [change]), 1, 3, Console(quiet=True))  # from one step behind the beginning
    other = Path(shutil.copytree(folder, tmp_path / "run"))
    shutil.rmtree(other / "checkpoints")
    train(load_config(folder / "recipe.yaml", [f"out={other}", "steps=1"]), Console(quiet=True))
    train(load_config(other / "recipe.yaml", [change, f"out={other}", "steps=4"]), Console(quiet=True))
    for side, place in enumerate((folder, other)):
        trained = [one for one in runs.records(place / "metrics.jsonl") if one["kind"] == "train"]
        for name, both in trial.curves.items():
            assert both[side] == pytest.approx({one["step"]: one[name] for one in trained[1:]}, abs=1e-12)
    assert trial.curves["reward"][0] != trial.curves["reward"][1]
    assert trial.paired["reward"].difference.count == 8 and trial.held_out["reward"].difference.count == 2
    arguments = [
        "what-if",
        str(folder),
        "sampling.temperature=0.5",
        "algorithm.group_size=2",
        "--try",
        "2",
        "--step",
        "3",
    ]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "steps 3 to 4 taken twice" in said and "held-out prompts after step 4" in said
    assert "1 to 2 steps" in complaint(capsys, "what-if", folder, change, "--step", "3", "--try", "3")
    assert "with something changed" in complaint(capsys, "what-if", folder, "--try", "1")


def test_held_out_answers_are_paired_by_the_prompts_that_were_judged(tmp_path: Path) -> None:
    """Of eight prompts the metric judges one; the best of several answers is compared as an evaluation reports it."""
    name = "tests.contract.unjudged_rewards:first_only"
    evaluation = {"every": 0, "examples": 8, "samples": 2, "temperature": 1.0, "best_of": "length"}
    run = runs.run(tmp_path / "run", **KEPT | {"steps": 1, "evaluation": {**evaluation, "metrics": {name: {}}}})
    trial = try_steps(ask(run, ["optimizer.learning_rate=0.3"]), 0, 1, Console(quiet=True))
    assert trial.held_out[name].difference.count == 1
    assert trial.held_out[f"unjudged/{name}"].difference.count == trial.held_out["length/best@2"].difference.count == 8
    assert trial.notes == []
