"""About how many seconds a step will take, measured on a few answers: nothing is trained, and no random number moves.

What is measured for each answer is multiplied by the answers of a step, of several ranks by those of the rank that has
most of them, and the update by the share of rows that move the policy. Not counted: rewards and environments, what
ranks exchange, and that more answers at a time are often faster."""

import copy
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.supervised import Supervised
from lmgym.batch import Batch, collate
from lmgym.config.schema import Config, Stage
from lmgym.core.cores import cores
from lmgym.core.errors import LmgymError
from lmgym.core.progress import counted, doing
from lmgym.inference.base import Completion, Engine, Request, Sampling
from lmgym.models.policy import Policy
from lmgym.rollouts.play import Draw
from lmgym.training.planning.memory import share
from lmgym.types import Episode
from lmgym.updates.optimizer import Optimizer
from lmgym.updates.prepare import prepare

PART = 2**24  # weights whose move is timed


class TimedEngine:
    """An engine that counts the `seconds` it samples.
    Example: timed = TimedEngine(engine); timed.generate(requests, Sampling()); timed.seconds"""

    def __init__(self, engine: Engine[Policy]) -> None:
        self.engine, self.seconds = engine, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, ended: Callable[[int, list[int]], None] | None = None
    ) -> list[Completion]:
        began = time.perf_counter()
        completions = self.engine.generate(requests, sampling, ended)
        self.seconds += time.perf_counter() - began
        return completions


@dataclass(frozen=True)
class Sampled:
    """What was tried: the episodes of a draw (a game of two has two to a prompt), and the seconds that its engine, a
    TimedEngine, sampled. Example: Sampled(episodes, draw, seconds=0.3)"""

    episodes: list[Episode]
    draw: Draw
    seconds: float = 0.0

    @property
    def answers(self) -> int:
        return len(self.draw.prompts)


def as_in_a_step(stage: Stage, tried: Sampled) -> Sampled:
    """The same with no more answers than a step has: eight at a time take nearly as long as 32, so they are sampled
    once more, for their seconds alone. Rewards are not asked again, nor is played again what an environment plays: both
    may be slow or cost money.

    Example: as_in_a_step(stage, tried).answers is 8 if a step has 8 and 32 were tried"""
    size = stage.prompts_per_step * stage.algorithm.group_size
    if stage.is_played or not stage.source.samples or size >= tried.answers:
        return tried
    engine = TimedEngine(tried.draw.actor.engine)
    actor = replace(tried.draw.actor, engine=engine)
    draw = replace(tried.draw, prompts=tried.draw.prompts[:size], actor=actor, rewards=())
    stage.source.episodes(draw)
    return Sampled(tried.episodes[:size], draw, engine.seconds)


@dataclass(frozen=True)
class Measured:
    """The seconds that some answers took: to sample, to score without gradient, and to score with a backward pass;
    the share of them that an update computes, since groups of equal scores move nothing; and the seconds in which an
    optimizer step moves the weights.
    Example: Measured(answers=64, sampling=0.3, scoring=0.1, gradient=0.3, moving=0.5, weights=0.2)"""

    answers: int
    sampling: float
    scoring: float
    gradient: float
    moving: float = 1.0
    weights: float = 0.0


@doing("measuring how long a step takes")
def measure_passes(stage: Stage, policy: Policy, episodes: Sequence[Episode]) -> tuple[float, float]:
    """The seconds of a pass over these answers without gradient, and of one with a backward pass. The policy is left as
    it was. Raises LmgymError if the model cannot read them: training on them would fail too."""
    batch = prepare(_collated(stage, policy, episodes), policy, {}, Supervised())  # it wants no pass of its own
    _check_lengths(policy, batch)
    try:
        began = _now(policy)
        policy.compute_logprobs_no_grad(batch)
        scored = _now(policy)
        for rows in counted(policy.micro_batches(batch), "measuring a backward pass", "passes"):
            logprobs = policy.compute_logprobs(batch[rows]).logprobs
            (-logprobs.sum()).backward()  # type: ignore[no-untyped-call]
        return scored - began, _now(policy) - scored
    finally:
        for parameter in policy.parameters():
            parameter.grad = None


def weights_seconds(stage: Stage, policy: Policy) -> float:
    """The seconds in which an optimizer step moves the weights that train, and rounds them where passes in bf16 want
    it: of a part of them, twice, since moments of all might find no room. No weight of the policy moves."""
    numbers = sum(parameter.numel() for parameter in policy.parameters())
    part = torch.nn.Parameter(torch.zeros(1, min(numbers, PART), device=policy.device))
    optimizer, seconds = Optimizer([part], stage.optimizer), 0.0
    for _ in range(2):  # the first makes the moments
        part.grad = torch.ones_like(part)
        began = _now(policy)
        optimizer.step()
        if policy.rounded is not None:
            policy.rounded.rounded({"part": part.detach()})
        seconds = _now(policy) - began
    return seconds * numbers / part.numel()


def moving_share(stage: Stage, policy: Policy, episodes: Sequence[Episode]) -> float:
    """The share of these answers' rows that an update would compute. 1 where only columns that a dry run does not fill
    in would tell (such as a value, or the greedy answer's score), and where the loss compares rows.

    Example: moving_share(stage, policy, episodes) is 0.25 if one group of four has scores that differ"""
    algorithm = copy.deepcopy(stage.algorithm)  # a baseline that moves stays where it is
    required = algorithm.requirements
    columns = required.values, required.reference, required.teacher, required.served_teacher, required.greedy
    if any((*columns, required.distribution_sums, required.reward_components, algorithm.whole_batch)):
        return 1.0
    if not stage.source.samples:
        return 1.0
    batch = _collated(stage, policy, episodes).replace(vocabulary=policy.vocabulary)
    batch = algorithm.before_scoring(batch.replace(logprobs_old=batch.logprobs_sampler))
    return float(algorithm.active(algorithm.advantages(batch)).float().mean())


def _collated(stage: Stage, policy: Policy, episodes: Sequence[Episode]) -> Batch:
    played = [episode for episode in episodes if episode.turns and not episode.error]
    temperature = stage.sampling.temperature if stage.source.samples else 1.0
    stop_ids = sorted({*policy.stop_ids, *stage.sampling.stop_ids})
    return collate(played, policy.pad_id, temperature, stop_ids, limit=stage.sampling.max_new_tokens)


def step_seconds(
    config: Config, stage: Stage, measured: Measured, ranks: int = 1, teacher: float = 0.0
) -> tuple[float, float]:
    """The seconds that a step will take to sample, and to score and update. `teacher` is the size of the teacher beside
    that of the policy (0 without one).

    Example: step_seconds(config, stage, Measured(64, 0.3, 0.1, 0.3), ranks=2)"""
    algorithm, required = stage.algorithm, stage.algorithm.requirements
    prompts, group = share(stage.prompts_per_step, ranks), algorithm.group_size
    more = required.rival is not None  # one more answer to each prompt, as the greedy one is
    sampled = prompts * (group * (1 - required.given_share) + required.greedy + more)
    group += required.rival is not None and required.rival.trains
    # Fewer groups than ranks are updated with row by row.
    updated = prompts * group if stage.prompts_per_step >= ranks else share(stage.prompts_per_step * group, ranks)
    critics = 2 if required.values and config.policy.critic == "separate" else 1
    # Passes without gradient: policy and value function before the update, the frozen models, and in each epoch policy
    # and value function again if the loss is one of the whole batch.
    before = algorithm.optimizer_steps > 1 or required.old_logprobs or required.values
    own = bool(before) + algorithm.epochs * algorithm.whole_batch
    scored = critics * own + required.reference + teacher
    passes = scored * measured.scoring + critics * algorithm.epochs * measured.gradient * measured.moving
    steps = algorithm.optimizer_steps * critics if algorithm.driver == Algorithm.driver else 0
    learning = updated * passes / measured.answers + steps * measured.weights
    return sampled * measured.sampling / measured.answers, learning


def time_sentence(
    stage: Stage, measured: Measured, sampling: float, learning: float, ranks: int = 1, longest: float | None = None
) -> str:
    """What `step_seconds` has found, in words. `longest`: the seconds of a step in which the scores of all groups
    differ; of the few groups that were tried, some may have had equal scores by chance.

    Example: "a step takes about 1.9 s: 1.2 s sampling, 0.7 s scoring and update (from 64 answers; a step has 256)"
    """
    rollout = f"{rounded(sampling)} sampling, " if stage.source.samples else ""
    driver = stage.algorithm.driver
    counted = "" if driver == Algorithm.driver else f", of which {driver} makes more passes than are counted"
    beside = ", without the exchange between ranks" if ranks > 1 else ""
    moving = ""
    if measured.moving < 1:
        moving = f", {measured.moving:.0%} of them in groups whose scores differ"
        moving += "" if longest is None else f": {rounded(longest)} if all do"
    return (
        f"a step takes about {rounded(sampling + learning)}{beside}: {rollout}{rounded(learning)} scoring and update"
        f"{counted} (from {measured.answers} {stage.source.counted}{moving}; a step has "
        f"{stage.prompts_per_step * stage.algorithm.group_size})"
    )


def rounded(seconds: float) -> str:
    """Seconds with two digits. Example: rounded(0.01234) is "0.012 s", rounded(123.4) is "123 s" """
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def threads_of_a_rank(config: Config, ranks: int) -> int:
    """The CPU threads of each process that `lmgym train --ranks` starts (distributed/launch.py)."""
    if config.threads or "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return max(1, torch.get_num_threads() // ranks)


def crowding(device: torch.device, ranks: int) -> float:
    """How many times as long everything takes because the ranks' threads are more than the processors here."""
    if ranks == 1 or device.type != "cpu":
        return 1.0
    return max(1.0, ranks * torch.get_num_threads() / cores())


def _check_lengths(policy: Policy, batch: Batch) -> None:
    longest = int(batch.mask.sum(1).max())
    if batch.source_mask is not None:
        longest = max(longest, int(batch.source_mask.sum(1).max()))
    if policy.context is not None and longest > policy.context:
        raise LmgymError(f"a row has {longest} tokens, and the model reads {policy.context} at most")


def _now(policy: Policy) -> float:
    """The time when the policy's device has done all that it was asked to."""
    if policy.device.type == "cuda":
        torch.cuda.synchronize()
    elif policy.device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
