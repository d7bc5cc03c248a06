"""One stage of a run: what it trains with."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lmgym.algorithms.base import Algorithm
from lmgym.config.schema import Stage
from lmgym.envs.vector import Envs
from lmgym.inference.served_teacher import EndpointTeacher
from lmgym.logs.doctor.examine import Watch
from lmgym.models.policy import Policy
from lmgym.rewards.base import Reward
from lmgym.rewards.champions import Champions, with_champions
from lmgym.rewards.normalisation import Moments
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.play import Draw
from lmgym.rollouts.sources import Source, answered_and_given
from lmgym.tasks.curriculum import Curriculum
from lmgym.tasks.stream import Stream
from lmgym.text.token_pairs import TokenPairs
from lmgym.training.checkpoints.frozen_models import FrozenModels
from lmgym.training.run import Run
from lmgym.training.setup import make_actor
from lmgym.types import Example
from lmgym.updates.optimizer import Optimizer


@dataclass
class StageRun:
    """What one stage of a run trains with. As a context manager it closes its environments.

    Example:
        >>> with begin_stage(run) as stage:
        ...     episodes = gather(stage, step=0)
    """

    run: Run
    index: int
    config: Stage
    algorithm: Algorithm
    optimizer: Optimizer
    frozen_models: FrozenModels
    opponent: Actor | None  # the frozen model that plays the other side of a game
    source: Source  # where the answers come from
    stream: Stream | Curriculum
    rewards: list[Reward]
    envs: Envs
    held_out_envs: Envs
    token_pairs: TokenPairs | None  # of the policy's tokens and those of a teacher with another tokenizer
    watch: Watch | None
    """Holds the doctor's rules against the steps of this stage since it began or was resumed."""
    moments: dict[str, Moments] = field(default_factory=dict)
    """Running estimates of the rewards with `normalise`."""
    champions: dict[str, Champions] = field(default_factory=dict)
    """The best answers so far, by the rewards that compare with them."""
    unjudged: set[tuple[str, bool]] = field(default_factory=set)
    """What was warned of: rewards that could not judge an answer, and whether one went wrong."""
    began: float = field(default_factory=time.perf_counter)
    """When the step in flight began, and when all its answers were there: seconds of `time.perf_counter`."""
    gathered: float = field(default_factory=time.perf_counter)

    @property
    def step(self) -> int:
        """Steps taken in this stage."""
        return self.run.progress.step

    def steps_left(self) -> Iterator[int]:
        """The numbers of the steps that are left, counted from 0. It ends early if the run is stopped."""
        for step in range(self.step, self.config.steps):
            self.run.agree_to_stop()
            if self.run.stopped:
                return
            yield step

    @property
    def path(self) -> tuple[int | str, ...]:
        """The beginning of the key of every random number of this stage."""
        return (self.run.config.seed, "stage", self.index)

    @property
    def actor(self) -> Actor:
        """The policy as it answers in evaluations."""
        run = self.run
        return replace(make_actor(run.section, run.policy, run.engine, run.progress.version), opponent=self.opponent)

    @property
    def training_actor(self) -> Actor:
        """The policy as it answers in training: under the algorithm's restriction, if it has one."""
        restriction, mask = self.algorithm.restriction, self.frozen_models.copies.get("mask")
        return replace(self.actor, engine=self.run.engine.restricted(restriction, mask)) if restriction else self.actor

    def draw(self, step: int, number: int = 0, first_group: int = 0) -> Draw:
        """A draw of a step: its prompts, in groups that are counted from `first_group`, and what answers them."""
        key, config = (*self.path, "step", step, number), self.run.config
        prompts, _ = self._numbered(key, first_group)
        rewards = with_champions(self.rewards, self.champions, [example for _, example in prompts])
        how = self.training_actor, self.config.sampling, self.envs, rewards
        return Draw(prompts, key, *how, config.reward_timeout, config.rewards_failed)

    @property
    def place(self) -> dict[str, Any]:
        """What records begin with: where the run stands."""
        return {"stage": self.index, "stage_name": self.config.name, "step": self.step}

    def given(self, step: int, number: int = 0, first_group: int = 0) -> list[tuple[int, Example]]:
        """The prompts of the same draw whose texts are references all the same (`Requirements.given_share`)."""
        return self._numbered((*self.path, "step", step, number), first_group)[1]

    def _numbered(
        self, key: tuple[int | str, ...], first_group: int
    ) -> tuple[list[tuple[int, Example]], list[tuple[int, Example]]]:
        """A draw's prompts that the policy answers, and those that are given, each as often as a group is large."""
        numbered = list(enumerate(self.stream.at(int(key[-2]), int(key[-1])), start=first_group))
        parts = answered_and_given(numbered, self.algorithm.requirements.given_share, key)
        answered, given = ([one for one in part for _ in range(self.algorithm.group_size)] for part in parts)
        return answered, given

    def position(self, step: int) -> dict[str, Any]:
        """What the records of a step begin with."""
        return {"kind": "train", **self.place, "step": step}

    @property
    def teacher_context(self) -> int | None:
        """How many tokens the teacher reads; None if it does not say, or if there is none."""
        teacher = self.frozen_models.models.get("teacher")
        return teacher.context if isinstance(teacher, Policy | EndpointTeacher) else None

    @property
    def writes_files(self) -> bool:
        """False on all ranks but the first."""
        return self.run.ranks.first

    def refresh(self, name: str) -> None:
        """Replace a frozen model by a copy of the policy as it is now; for `Algorithm.after_update`."""
        self.frozen_models.take(name, self.run.policy, self.step)

    def __enter__(self) -> "StageRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()
        self.envs.close()
        self.held_out_envs.close()
