"""One step of a run taken again, with the functions of the training loop, and what it did: every number of its answers,
the gradient, and how the weights moved."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmgym.batch import Batch
from lmgym.experiments.what_if.recorded import are_recorded, recorded_episodes
from lmgym.experiments.what_if.standing import changed_since, step_records
from lmgym.logs.traces.trace import TraceEpisode, TraceStep, read_episode, read_step
from lmgym.training.loop import advance, begin_step, collate_step, gather, log_step
from lmgym.training.stage import StageRun
from lmgym.training.tracing import begin_trace
from lmgym.types import Episode
from lmgym.updates.optimizer import Optimizer
from lmgym.updates.prepare import prepare
from lmgym.updates.update import update


@dataclass(frozen=True)
class Written:
    """What was written of a step that was taken again: its record in metrics.jsonl, and its trace. `changed`: what is
    not as it was when the checkpoint was written. Example: written(stage, 50).record["reward"] -> 0.5"""

    record: dict[str, Any]
    step: TraceStep
    answers: dict[int, TraceEpisode]
    changed: list[str]


@dataclass(frozen=True)
class Retaken(Written):
    """What a step did. `gradient` is that of its first optimizer step before it is clipped, `moved` the change of the
    weights, both of all the policy's parameters, one after the other; the gradient is None if the algorithm's driver
    does not use the optimizer."""

    gradient: Tensor | None
    moved: Tensor
    recorded: bool
    """The answers are the recorded ones; else they were sampled again."""
    following: Batch | None = None
    """The answers of the next step, and what the policy says of them after this one, where they are asked for."""
    following_logprobs: Tensor | None = None


class GradientKept(Optimizer):
    """An optimizer that keeps the gradient of its first step by the first so many of its parameters.

    Example: stage.optimizer = GradientKept(stage.optimizer, count=len(policy.parameters()))"""

    def __init__(self, optimizer: Optimizer, count: int) -> None:
        self.__dict__.update(vars(optimizer))
        self.count, self.first = count, None if count else torch.zeros(0)

    def step(self) -> float:
        if self.first is None:
            gradients = [(p, p.grad) for p in self.parameters[: self.count]]
            self.first = flat([torch.zeros_like(p) if own is None else own for p, own in gradients])
        return super().step()


class Steps:
    """Takes steps of an opened stage, each with its recorded answers if all `steps` have them in `folder`, else with
    answers that are sampled again. `judge`: recorded answers are judged by the stage's rewards again.

    Example: Steps(stage, Path("runs/a"), [50, 51], judge=False).take(50)"""

    def __init__(self, stage: StageRun, folder: Path, steps: Sequence[int], judge: bool) -> None:
        self.stage, self.folder, self.judge = stage, folder, judge
        self.recorded = are_recorded(folder, stage, steps)

    def episodes(self, step: int) -> list[Episode]:
        """The answers of a step."""
        begin_step(self.stage, step)
        if self.recorded:
            return recorded_episodes(self.folder, self.stage, step, self.judge)
        return gather(self.stage, step)

    def prepared(self, step: int) -> tuple[list[Episode], Batch]:
        """The answers of a step, and the batch that its update gets."""
        stage, episodes = self.stage, self.episodes(step)
        batch = collate_step(stage, episodes, step)
        return episodes, prepare(batch, stage.run.policy, stage.frozen_models.models, stage.algorithm)

    def take(self, step: int) -> None:
        """One step as `train_stage` takes it (training/loop.py)."""
        stage, run = self.stage, self.stage.run
        episodes, batch = self.prepared(step)
        trace = begin_trace(stage, episodes, batch, step)
        metrics = update(stage.algorithm, run.policy, batch, stage.optimizer, trace)
        advance(stage)
        log_step(stage, episodes, batch, metrics, trace)


def retake(steps: Steps, step: int, following: Batch | None = None, look_ahead: bool = False) -> Retaken:
    """Take a step and keep what it did. `following` are answers of the next step, about which the policy is asked after
    this one; with `look_ahead` they are made here."""
    stage, run = steps.stage, steps.stage.run
    parameters = run.policy.parameters()
    before = flat(parameters)
    moves_policy = any(own is parameters[0] for own in stage.optimizer.parameters)
    optimizer = stage.optimizer = GradientKept(stage.optimizer, len(parameters) if moves_policy else 0)
    steps.take(step)
    moved = flat(parameters).sub_(before)
    own = written(stage, step)
    if look_ahead and stage.source.samples and step + 1 < stage.config.steps:
        following = collate_step(stage, steps.episodes(step + 1), step + 1)
    return Retaken(
        **vars(own),
        gradient=optimizer.first if moves_policy else None,
        moved=moved,
        recorded=steps.recorded,
        following=following,
        following_logprobs=None if following is None else run.policy.compute_logprobs_no_grad(following).logprobs,
    )


def written(stage: StageRun, step: int) -> Written:
    """What a step that was just taken has written into the temporary run."""
    folder = stage.run.folder
    own = read_step(folder, stage.index, step)
    return Written(
        record=step_records(folder, stage.index)[step],
        step=own,
        answers={index: read_episode(folder, stage.index, step, index) for index in own.episodes["index"]},
        changed=changed_since(folder),
    )


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers of several tensors one after the other, as fp32 on the CPU."""
    return torch.cat([one.detach().reshape(-1).to("cpu", torch.float32) for one in tensors])
