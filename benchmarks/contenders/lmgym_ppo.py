"""lmgym's PPO on a workload, one step per line of stdin: the lines of `lmgym.train.train`, log included.

python -m benchmarks.contenders.lmgym_ppo FOLDER '{"epochs": 4, "critic": "head"}'
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import lmgym
from benchmarks import workloads
from benchmarks.contenders.turns import Turns
from lmgym.config import Config, build_config
from lmgym.episode import Episode, Example
from lmgym.logs.console import Console
from lmgym.registry import register
from lmgym.rewards.base import episodes
from lmgym.run import Run, begin_stage, start
from lmgym.train import collate_step, gather, log_step
from lmgym.update import prepare

DEFAULTS = {
    "algorithm": "ppo",  # grpo runs too, for trying the benchmark; it has no critic
    "critic": "head",  # a value head on the shared trunk, or separate: a model of its own, as in TRL
    "compute": "auto",  # float32, bfloat16; the parameters are fp32 in any case
    "epochs": 4,
    "threads": 2,
}


@register("task", "benchmark_prompts")
def benchmark_prompts(split: str, folder: str) -> Iterator[Example]:
    """The workload's prompts, as words that stand for exactly its ids."""
    for number, prompt in enumerate(workloads.read(Path(folder)).prompts):
        yield Example(id=f"{split}/{number}", prompt=workloads.text(prompt))


@register("reward", "benchmark_reward")
@episodes
def benchmark_reward(answers: list[Episode]) -> list[float]:
    """The workload's reward of the sampled ids."""
    return [workloads.reward(answer.turns[-1].action_ids) for answer in answers]


def config_of(folder: Path, workload: workloads.Workload, settings: dict[str, Any], out: str) -> Config:
    """The recipe: TRL's hyperparameters and reference model, one minibatch per epoch, exactly `new_tokens` new tokens,
    a constant rate."""
    algorithm: dict[str, Any] = {"name": settings["algorithm"], "group_size": workload.completions}
    policy: dict[str, Any] = {"model": str(folder / "model"), "compute": settings["compute"]}
    if settings["algorithm"] == "ppo":
        algorithm["preset"], policy["critic"] = "trl", settings["critic"]
    return build_config(
        {
            "seed": workload.seed,
            "out": out,
            "threads": settings["threads"],
            "task": {"name": "benchmark_prompts", "folder": str(folder)},
            "rewards": {"benchmark_reward": 1.0},
            "algorithm": algorithm | {"epochs": settings["epochs"], "minibatches": 1, "kl_coefficient": 0.05},
            "policy": policy,
            "sampling": {
                "temperature": 1.0,
                "max_new_tokens": workload.new_tokens,
                "min_new_tokens": workload.new_tokens,
            },
            "optimizer": {"learning_rate": 1e-5, "warmup": 0},
            "prompts_per_step": len(workload.prompts),
            "steps": 1_000_000,
        }
    )


def one_step(run: Run, turns: Turns) -> None:
    """What `train` does in a step; evaluation and checkpoints are never due."""
    step, began = run.step, time.perf_counter()
    answers = gather(run, step)
    gathered = time.perf_counter()
    turns.mark("rollout")
    batch = prepare(collate_step(run, answers, step), run.policy, run.copies.models, run.algorithm)
    turns.mark("score")
    rate = run.optimizer.set_step(step, run.stage.steps)
    metrics = run.algorithm.update(run.policy, batch, run.optimizer)
    run.step, run.version = step + 1, run.version + 1
    run.engine.load(run.policy, run.version)
    run.algorithm.after_update(run)
    log_step(run, answers, batch, {**metrics, "learning_rate": rate}, began, gathered)
    turns.mark("update")


def main() -> None:
    turns, folder = Turns(), Path(sys.argv[1])
    settings = {**DEFAULTS, **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")}
    with tempfile.TemporaryDirectory() as out, Console() as console:
        run = start(config_of(folder, workloads.read(folder), settings, out), console)
        with run.lock, run.writer:
            begin_stage(run)
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            turns.ready(lmgym=lmgym.__version__, **versions, settings={**settings, "compute": run.section.compute})
            while turns.wait():
                one_step(run, turns)
                turns.answer()


if __name__ == "__main__":
    main()
