"""lmgym on the task of benchmarks/learning.py, one step per line of stdin.

python -m benchmarks.contenders.learning_lmgym FOLDER
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

import lmgym
from benchmarks.contenders.learning_task import REWARDS, read, saved
from benchmarks.contenders.turns import Turns
from lmgym.config.build import build_config
from lmgym.config.schema import Config
from lmgym.core import seeds
from lmgym.core.registry import register
from lmgym.logs.console import Console
from lmgym.training.begin_stage import begin_stage
from lmgym.training.loop import advance, begin_step, collate_step, gather, log_step
from lmgym.training.setup import start
from lmgym.training.stage import StageRun
from lmgym.types import Example
from lmgym.updates.prepare import prepare
from lmgym.updates.update import update


@register("task", "learning_prompts")
def learning_prompts(split: str, folder: str) -> list[Example]:
    """The prompts, so placed that lmgym's own order of the epoch (tasks/stream.py) is that of the file."""
    lines, given = read(Path(folder))
    places = seeds.permutation(len(lines), given.seed, "data", 0, 0).tolist()
    placed = {
        place: Example(f"{split}/{i}", line["prompt"], meta=dict(line))
        for i, (place, line) in enumerate(zip(places, lines, strict=True))
    }
    return [placed[place] for place in range(len(lines))]


@register("reward", "learning_reward")
def learning_reward(texts: Sequence[str], examples: Sequence[Example], *, form: str) -> list[float]:
    """The reward that both libraries use."""
    return [REWARDS[form](text, example.meta["answer"]) for text, example in zip(texts, examples, strict=True)]


def config_of(folder: Path, out: str) -> Config:
    """The recipe; all that it does not name is lmgym's default."""
    given = read(folder)[1]
    return build_config({
        "seed": given.seed,
        "out": out,
        "threads": given.threads,
        "task": {"name": "learning_prompts", "folder": str(folder), "prompts": "rendered"},
        "rewards": {"learning_reward": {"form": given.reward}},
        "algorithm": {"name": "grpo", "group_size": given.group},
        "policy": {"model": str(folder / "model"), "device": "cpu"}
        | {"compute": given.compute, "rounding": given.rounding},
        "sampling": {"max_new_tokens": given.new_tokens},
        "optimizer": {"learning_rate": given.learning_rate, "warmup": 0, "weight_decay": 0.0},
        "prompts_per_step": given.prompts,
        "steps": given.steps,
    })  # fmt: skip


def one_step(stage: StageRun) -> None:
    """What `train` does in a step; evaluations and checkpoints are never due."""
    run, step = stage.run, stage.step
    begin_step(stage, step)
    episodes = gather(stage, step)
    batch = prepare(collate_step(stage, episodes, step), run.policy, stage.frozen_models.models, stage.algorithm)
    metrics = update(stage.algorithm, run.policy, batch, stage.optimizer)
    advance(stage)
    log_step(stage, episodes, batch, metrics)


def main() -> None:
    turns, folder = Turns(), Path(sys.argv[1])
    given = read(folder)[1]
    with tempfile.TemporaryDirectory() as out, Console() as console:
        run = start(config_of(folder, out), console)
        with run.lock, run.writer, begin_stage(run) as stage:
            turns.ready(lmgym=lmgym.__version__, torch=torch.__version__, transformers=transformers.__version__)
            while turns.wait():
                one_step(stage)
                turns.mark("step")
                if stage.step % given.every == 0:
                    run.policy.save_pretrained(saved(folder, "lmgym", stage.step))
                turns.answer()


if __name__ == "__main__":
    main()
