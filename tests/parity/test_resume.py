"""A resumed run is the run that was not interrupted: 6 steps equal 3 + resume + 3, bit for bit, for every algorithm.

Compared are the bytes of the last checkpoint (parameters, moments, algorithm, early stopping), of final/,
rollouts.jsonl and summary.json, and metrics.jsonl but for what a clock wrote.
"""

import json
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lmgym.core import registry
from lmgym.logs.console import Console
from lmgym.training.callbacks import Callback, EvaluationEnd
from tests import runs
from tests.runs import GIVEN, assert_equal_runs

ALGORITHMS: dict[str, dict[str, Any]] = {
    "reinforce none": {"name": "reinforce", "baseline": "none"},
    "reinforce mean": {"name": "reinforce", "baseline": "mean"},
    "reinforce ema": {"name": "reinforce", "baseline": "ema"},
    "reinforce scst": {"name": "reinforce", "baseline": "scst"},
    "rloo": {"name": "rloo"},
    "reinforce_pp": {"name": "reinforce_pp", "preset": "baseline", "group_size": 4, "kl_coefficient": 0.1, "epochs": 2},
    "reinforce_stable": {"name": "reinforce_stable", "baseline": "batch"},
    "grpo": {"name": "grpo", "group_size": 4},
    "grpo, reference": {"name": "grpo", "group_size": 4, "kl_coefficient": 0.1},
    "grpo, 4 optimizer steps a batch": {"name": "grpo", "group_size": 4, "epochs": 2, "minibatches": 2},
    **{name: {"name": name, "group_size": 4} for name in ("dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo")},
    "top_entropy": {"name": "top_entropy", "group_size": 4, "minibatches": 2},
    **{name: {"name": name, "group_size": 4, "minibatches": 2} for name in ("clip_cov", "kl_cov", "otb")},
    "self_certainty": {"name": "grpo", "group_size": 4, "credit": {"name": "self_certainty"}},
    "hgpo": {"name": "hgpo", "group_size": 4},
    "supervised": {"name": "supervised"},
    "ppo": {"name": "ppo", "epochs": 2, "minibatches": 2, "kl_coefficient": 0.1, "kl_target": 0.01},
    "ppo, separate critic": {"name": "ppo", "epochs": 2, "kl_coefficient": 0.1, "kl_target": 0.01},
    "a2c, rmsprop": {"name": "a2c"},
    "grpo, 8-bit AdamW": {"name": "grpo", "group_size": 4},
    "dpo": {"name": "dpo", "supervised_coefficient": 0.1},
    "ipo": {"name": "ipo", "epochs": 2, "minibatches": 2},
    **{name: {"name": name} for name in ("simpo", "orpo", "kto")},
    "reward_model": {"name": "reward_model", "margin": 0.5, "centring": 0.01},
    "process_reward_model": {"name": "process_reward_model", "epochs": 2, "minibatches": 2},
    "online_dpo": {"name": "online_dpo", "group_size": 4, "supervised_coefficient": 0.1, "epochs": 2},
    "raft": {"name": "raft", "group_size": 4, "epochs": 2, "minibatches": 2},
    "distill": {"name": "distill", "teacher": "builtin:tiny"},
    "distill, references": {"name": "distill", "source": "references"},
    "gkd": {"name": "gkd", "teacher": "builtin:tiny", "divergence": "jsd", "beta": 0.3, "epochs": 2, "minibatches": 2},
    "gkd, references": {"name": "gkd", "source": "references", "teacher": "builtin:tiny", "divergence": "forward_kl"},
    "gkd, half of the data": {"name": "gkd", "teacher": "builtin:tiny", "student_share": 0.5},
    "gkd, cross-entropy": {
        "name": "gkd",
        "source": "references",
        "teacher": "builtin:tiny",
        "divergence": "forward_kl",
        "divergence_coefficient": 0.4,
        "supervised_coefficient": 0.6,
    },
    "xpo": {"name": "xpo", "alpha": 0.01},
    "nash_md": {"name": "nash_md", "group_size": 2},
    "gkd, itself with a hint": {"name": "gkd", "teacher": "self", "hint": "It is {reference}. {prompt}"},
    "gkd, its beginning": {"name": "gkd", "teacher": "initial", "group_size": 2, "reward_coefficient": 1.0},
    "replay": {"name": "replay", "group_size": 4, "replayed": 3, "capacity": 9, "max_age": 4},
    "nlpo": {"name": "nlpo", "epochs": 2, "min_tokens_to_keep": 5, "top_mask": 0.3, "kl_coefficient": 0.1},
    "trpo": {"name": "trpo", "kl_coefficient": 0.1},
    "nlpo, own top k": {"name": "nlpo", "min_tokens_to_keep": 1, "mask_type": "top_k", "top_mask": 9},
}
FAMILY: dict[str, dict[str, Any]] = {  # presets that differ in formulas of a token or an answer only
    "remax": {"name": "remax"},
    **{
        name: {"name": name, "group_size": 4, "minibatches": 2}
        for name in ("gspo_token", "gmpo", "luspo", "vespo", "ce_gppo", "ipo_mask", "maxrl", "gpg", "opo")
    },
    "icepop": {"name": "icepop", "group_size": 4, "correction": {"floor": 0.999, "cap": 1.001}},
    "gigpo": {"name": "gigpo", "group_size": 4},
    "pass_at_k": {"name": "pass_at_k", "group_size": 4, "pass_at": 2},
    "gfpo": {"name": "gfpo", "group_size": 4, "keep": 2},
}
SETTINGS: dict[str, dict[str, Any]] = {  # what else the recipe of one of them says
    "ppo, separate critic": {"policy": {**runs.TINY["policy"], "critic": "separate"}},
    "a2c, rmsprop": {"optimizer": {"name": "rmsprop", "learning_rate": 0.003, "epsilon": 1e-5}},
    "grpo, 8-bit AdamW": {"optimizer": {"name": "adamw_8bit", "learning_rate": 0.003}},
    "distill": {"rewards": None},
    "replay": {"logs": {"rollouts": "all"}},
    **{name: {"task": task} for name, task in GIVEN.items()},
}
WARM, RL = {"name": "warm", "algorithm": "supervised", "steps": 3}, {"name": "rl", "steps": 4}


class InterruptingEvaluation(Console):
    """Asks the loop to stop during its n-th evaluation."""

    def __init__(self, at: int) -> None:
        super().__init__(quiet=True)
        self.left = at

    def evaluation(self, *arguments: Any, **named: Any) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


class Evaluations(Callback):
    """Counts them, and keeps the number in the checkpoints."""

    def __init__(self) -> None:
        self.count = 0

    def on_evaluation(self, end: EvaluationEnd) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


class Interrupting(Console):
    """Asks the loop to stop during its n-th step (counted through all stages), as Ctrl-C does."""

    def __init__(self, at: int) -> None:
        super().__init__(quiet=True)
        self.left = at

    def step(self, *arguments: Any, **named: Any) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALGORITHMS, *FAMILY])
def test_three_steps_and_three_more_equal_six(name: str, tmp_path: Path) -> None:
    algorithm = {**ALGORITHMS, **FAMILY}[name]
    changes = {"algorithm": algorithm, **SETTINGS.get(name, {})}
    whole = runs.run(tmp_path / "whole", **changes)
    halves = runs.run(tmp_path / "halves", Interrupting(at=3), **changes)
    assert runs.newest(halves).name == "stage-0-step-000003" and not (halves / "final").exists()
    runs.run(halves, **changes)
    assert_equal_runs(whole, halves)
    trained = [record for record in runs.records(whole / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in trained] == list(range(6))
    assert all(record["gradient_norm"] > 0 for record in trained)  # equality proves little where nothing moves
    if "kl_target" in algorithm:
        assert runs.algorithm_state(whole)["beta"] != algorithm["kl_coefficient"]


def test_every_algorithm_is_tried() -> None:
    tried = {**ALGORITHMS, **FAMILY}.values()
    assert {algorithm["name"] for algorithm in tried} == set(registry.BUILTIN["algorithm"])


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3, 5], ids=["in stage 1", "at the boundary", "in stage 2"])
def test_a_run_of_two_stages_resumes_anywhere(step: int, tmp_path: Path) -> None:
    changes = {
        "stages": [WARM, RL],
        "algorithm": {"name": "grpo", "group_size": 4, "kl_coefficient": 0.1},
        "evaluation": {"every": 2, "examples": 8, "keep_best": "reward", "final_split": "validation"},
    }
    whole = runs.run(tmp_path / "whole", **changes)
    parts = runs.run(tmp_path / "parts", Interrupting(at=step), **changes)
    runs.run(parts, **changes)
    assert_equal_runs(whole, parts)
    assert (whole / "best/model.safetensors").read_bytes() == (parts / "best/model.safetensors").read_bytes()


@pytest.mark.parametrize("weight, metric", [(1.0, "reward"), (0.001, "reward"), (0.001, "words")])
def test_the_best_model_of_a_stage_with_other_rewards_begins_anew(
    weight: float, metric: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rewards of another size cannot be compared: with a thousandth of the weight no later model could be the best. A
    reward's own metric is the one before its weight."""
    stages = [
        {"name": "one", "rewards": {"words": {"weight": 1.0}}, "steps": 1},
        {"name": "two", "rewards": {"words": {"weight": weight}}, "steps": 1},
    ]
    folder = runs.run(
        tmp_path / "run",
        Console(),
        stages=stages,
        rewards=None,
        steps=None,
        evaluation={"every": 1, "examples": 4, "keep_best": metric},
    )
    best = json.loads((folder / "summary.json").read_text())["best"]
    said = "in another way, so its first evaluation begins best/ anew" in " ".join("".join(capsys.readouterr()).split())
    if weight == 1.0 or metric == "words":
        assert not said
    else:
        assert said and best["stage"] == "two" and (folder / "best/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("final_split", [None, "validation"])
@pytest.mark.parametrize("at", [1, 3, 4, 6])
def test_a_stop_in_any_evaluation_changes_nothing(at: int, final_split: str | None, tmp_path: Path) -> None:
    """Before a stage's first step and after its last one, too. With `patience: 1` an evaluation that counts twice ends
    the stage."""
    changes = {
        "stages": [{**WARM, "steps": 1}, {**RL, "steps": 2, "early_stop": {"metric": "length/mean", "patience": 1}}],
        "evaluation": {"every": 2, "examples": 4, "keep_best": "reward", "final_split": final_split},
        "optimizer": {"learning_rate": 0.05, "warmup": 0},
        "callbacks": {"tests.parity.test_resume:Evaluations": {}},
    }
    whole = runs.run(tmp_path / "whole", **changes)
    parts = runs.run(tmp_path / "parts", InterruptingEvaluation(at=at), **changes)
    runs.run(parts, **changes)
    assert_equal_runs(whole, parts)
    assert "resume" not in {record["kind"] for record in runs.records(parts / "metrics.jsonl")}


@pytest.mark.slow
@pytest.mark.parametrize("final_split", [None, "validation"])
def test_a_run_that_stopped_before_its_first_step_stays_as_it_is(final_split: str | None, tmp_path: Path) -> None:
    changes = {
        "early_stop": {"metric": "reward", "target": 0.0},
        "evaluation": {"every": 3, "examples": 4, "final_split": final_split},
        "callbacks": {"tests.parity.test_resume:Evaluations": {}},
    }
    done = runs.run(tmp_path / "done", **changes)
    shutil.copytree(done, tmp_path / "copy")
    runs.run(done, **changes)
    assert_equal_runs(tmp_path / "copy", done)
    # It goes on like a run that had no such rule.
    runs.run(done, **changes | {"early_stop": None})
    whole = runs.run(tmp_path / "whole", **changes | {"early_stop": None})
    assert (whole / "final/model.safetensors").read_bytes() == (done / "final/model.safetensors").read_bytes()
    count = len([record for record in runs.records(done / "metrics.jsonl") if record["kind"] == "evaluation"])
    assert runs.state(done)["callbacks"] == {"tests.parity.test_resume:Evaluations": {"count": count}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"policy": {**runs.TINY["policy"], "path": "plain"}},
        {"policy": {**runs.TINY["policy"], "compute": "bfloat16"}},
        {"sampling": {"max_new_tokens": 6, "min_new_tokens": 2, "stop": ["a"]}, "optimizer": {"schedule": "cosine"}},
        {"checkpoint": {"every": 1, "keep": 1}, "evaluation": {"every": 4, "examples": 8, "samples": 2}},
        {"early_stop": {"metric": "reward", "patience": 1}, "evaluation": {"every": 1, "examples": 4}},
    ],
    ids=["plain path", "bf16", "stops and schedule", "a checkpoint each step", "early stop"],
)
def test_other_settings_resume_as_well(changes: dict[str, Any], tmp_path: Path) -> None:
    whole = runs.run(tmp_path / "whole", **changes)
    parts = runs.run(tmp_path / "parts", Interrupting(at=1), **changes)
    parts = runs.run(parts, Interrupting(at=1), **changes)
    runs.run(parts, **changes)
    assert_equal_runs(whole, parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [{}, *(pytest.param(other, marks=pytest.mark.slow) for other in ({"compute": "bfloat16"}, {"lora_rank": 2}))],
    ids=["fp32", "bf16", "lora"],
)
def test_a_mask_that_was_refreshed_before_and_after(policy: dict[str, Any], tmp_path: Path) -> None:
    """Taken at 0, 2 and 4, interrupted at 3 and 5: each time the mask that was in use is read back."""
    if "lora_rank" in policy:
        pytest.importorskip("peft")
    changes = {
        "algorithm": {"name": "nlpo", "min_tokens_to_keep": 5, "top_mask": 0.3, "refresh_every": 2},
        "policy": {**runs.TINY["policy"], **policy},
        "optimizer": {"learning_rate": 0.03, "warmup": 0},
        "steps": 7,
    }
    whole = runs.run(tmp_path / "whole", **changes)
    parts = runs.run(tmp_path / "parts", Interrupting(at=3), **changes)
    assert runs.state(parts)["copies"] == {"mask": 2}
    runs.run(parts, Interrupting(at=2), **changes)
    assert runs.state(parts)["copies"] == {"mask": 4}
    runs.run(parts, **changes)
    assert runs.state(parts)["copies"] == {"mask": 6}
    if "lora_rank" in policy:
        assert (whole / "rollouts.jsonl").read_bytes() == (parts / "rollouts.jsonl").read_bytes()
        assert (whole / "final/model.safetensors").read_bytes() == (parts / "final/model.safetensors").read_bytes()
    else:
        assert_equal_runs(whole, parts)
    stale = runs.run(tmp_path / "stale", **{**changes, "algorithm": {**changes["algorithm"], "refresh_every": 99}})
    assert (stale / "rollouts.jsonl").read_bytes() != (whole / "rollouts.jsonl").read_bytes()


@pytest.mark.slow
def test_more_steps_go_on_where_the_run_ended(tmp_path: Path) -> None:
    """With a constant learning rate, 3 steps and then 6 are the 6 of one run."""
    whole = runs.run(tmp_path / "whole")
    parts = runs.run(tmp_path / "parts", steps=3)
    before = (parts / "final/model.safetensors").read_bytes()
    runs.run(parts)
    assert_equal_runs(whole, parts)
    assert (parts / "final/model.safetensors").read_bytes() != before


@pytest.mark.slow
def test_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    changes = {"evaluation": {"every": 3, "examples": 8, "final_split": "validation"}}
    done = runs.run(tmp_path / "done", **changes)
    shutil.copytree(done, tmp_path / "copy")
    runs.run(done, **changes)
    assert_equal_runs(tmp_path / "copy", done)
    assert (done / "metrics.jsonl").read_bytes() == (tmp_path / "copy/metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_one_seed_gives_one_run_and_another_seed_another(tmp_path: Path) -> None:
    one, same, other = (
        runs.run(tmp_path / name, seed=seed, steps=2) for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert_equal_runs(one, same)
    for name in ("final/model.safetensors", "rollouts.jsonl"):
        assert (one / name).read_bytes() != (other / name).read_bytes()
