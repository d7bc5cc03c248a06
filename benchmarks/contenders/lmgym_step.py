"""Whole training steps of lmgym on a workload, one per line of stdin: the lines of `lmgym.train`, log included.

python -m benchmarks.contenders.lmgym_step FOLDER '{"algorithm": "ppo", "epochs": 4, "critic": "head"}'
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import lmgym
from benchmarks import workloads
from benchmarks.contenders.lengths import limit_lmgym
from benchmarks.contenders.turns import Turns
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.requirements import Requirements
from lmgym.config.build import build_config
from lmgym.config.schema import Config
from lmgym.core.registry import register
from lmgym.envs.base import Step
from lmgym.logs.console import Console
from lmgym.rewards.base import episodes
from lmgym.training.loop import advance, begin_step, collate_step, gather, log_step
from lmgym.training.setup import start
from lmgym.training.stage import StageRun, begin_stage
from lmgym.types import Episode, Example
from lmgym.updates.prepare import prepare
from lmgym.updates.update import update

DEFAULTS = {
    "algorithm": "grpo",  # ppo; scored_grpo: grpo with a scoring pass that it does not need, to measure one
    "critic": "head",  # of ppo: a value head on the shared trunk, or separate: a model of its own, as in TRL
    "compute": "auto",  # float32, bfloat16; the parameters are fp32 in any case
    "device": "cpu",  # cuda
    "products": "torch",  # onednn
    "update_kernels": "auto",  # torch
    "lora_rank": None,  # all weights learn
    "attention": "padded",  # flex
    "captured": False,  # decoding steps as CUDA graphs
    "epochs": 1,
    "tokens_per_forward": None,  # lmgym's default
    "activation_checkpointing": False,
    "turns": 1,  # of each conversation; each has `new_tokens` new ones
    "heard": 0,  # tokens of what the environment answers to a turn
    "threads": 2,
}
POLICY = (  # of these, what the recipe's policy section takes
    "compute", "device", "products", "update_kernels", "attention", "tokens_per_forward", "activation_checkpointing",
    "lora_rank",
)  # fmt: skip


@register("task", "benchmark_prompts")
def benchmark_prompts(split: str, folder: str) -> Iterator[Example]:
    """The workload's prompts, as words that stand for exactly its ids."""
    for number, prompt in enumerate(workloads.read(Path(folder)).prompts):
        yield Example(id=f"{split}/{number}", prompt=workloads.text(prompt))


@register("reward", "benchmark_reward")
@episodes
def benchmark_reward(answers: list[Episode]) -> list[float]:
    """The workload's reward of the ids sampled last."""
    return [workloads.reward(answer.turns[-1].action_ids) for answer in answers]


@register("env", "benchmark_talk")
class Talk:
    """Answers each turn but the last with random words."""

    def __init__(self, turns: int, heard: int, vocabulary: int) -> None:
        self.turns, self.heard, self.vocabulary = turns, heard, vocabulary

    def reset(self, example: Example, seed: int) -> str:
        self.draw = random.Random(seed)
        return str(example.prompt)

    def step(self, text: str, stop: str) -> Step:
        self.turns -= 1
        if self.turns == 0:
            return Step(terminated=True)
        (said,) = workloads.random_prompts(self.draw, [self.heard], self.vocabulary)
        return Step(messages=[{"role": "user", "content": workloads.text(said)}])


@register("algorithm", "scored_grpo")
@dataclass(kw_only=True)
class ScoredGRPO(GRPO):
    """GRPO with a scoring pass before its one optimizer step."""

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, old_logprobs=True)


def config_of(folder: Path, workload: workloads.Workload, settings: dict[str, Any], out: str) -> Config:
    """The recipe: one optimizer step an epoch, exactly `new_tokens` new tokens a turn, a constant rate; for ppo, TRL's
    hyperparameters and reference model."""
    algorithm = {"name": settings["algorithm"], "group_size": workload.completions}
    policy = {"model": str(folder / "model")}
    policy |= {key: settings[key] for key in POLICY}
    if settings["algorithm"] == "ppo":
        algorithm["preset"] = "trl"  # kl_coefficient 0.05
        policy["critic"] = settings["critic"]
    tree: dict[str, Any] = {
        "seed": workload.seed,
        "out": out,
        "threads": settings["threads"],
        "task": {"name": "benchmark_prompts", "folder": str(folder)},
        "rewards": {"benchmark_reward": 1.0},
        "algorithm": algorithm | {"epochs": settings["epochs"], "minibatches": 1},
        "policy": policy,
        "engine": {"captured": settings["captured"]},
        "sampling": {
            "temperature": 1.0,
            "max_new_tokens": workload.new_tokens,
            "min_new_tokens": workload.new_tokens,
        },
        "optimizer": {"learning_rate": 1e-5, "warmup": 0},
        "prompts_per_step": len(workload.prompts),
        "steps": 1_000_000,
    }
    if settings["turns"] > 1:
        vocabulary = workload.shape["vocab_size"]
        talk = {"turns": settings["turns"], "heard": settings["heard"], "vocabulary": vocabulary}
        tree["env"] = {"name": "benchmark_talk", **talk}
    return build_config(tree)


def one_step(stage: StageRun, workload: workloads.Workload, settings: dict[str, Any], turns: Turns) -> None:
    """What `train` does in a step; evaluation and checkpoints are never due."""
    run, algorithm = stage.run, stage.algorithm
    step = stage.step
    begin_step(stage, step)
    answers = gather(stage, step)
    turns.mark("rollout")
    for number in range(settings["turns"]):
        workloads.check_lengths(workload, [answer.turns[number].action_ids for answer in answers])
    batch = prepare(collate_step(stage, answers, step), run.policy, stage.frozen_models.models, algorithm)
    turns.mark("score")
    metrics = update(algorithm, run.policy, batch, stage.optimizer)
    advance(stage)
    log_step(stage, answers, batch, metrics)
    turns.mark("update")


def main() -> None:
    turns, folder = Turns(), Path(sys.argv[1])
    settings = {**DEFAULTS, **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")}
    workload = workloads.read(folder)
    if workload.lengths:
        limit_lmgym(workload.lengths)
    with tempfile.TemporaryDirectory() as out, Console() as console:
        run = start(config_of(folder, workload, settings, out), console)
        with run, begin_stage(run) as stage:
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            turns.ready(lmgym=lmgym.__version__, **versions, settings={**settings, "compute": run.section.compute})
            while turns.wait():
                one_step(stage, workload, settings, turns)
                turns.answer()


if __name__ == "__main__":
    main()
