"""One stage of a run: what `begin_stage` builds for it, and its checkpoints."""

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.requirements import ServedTeacher
from lmgym.config.build import resolved
from lmgym.config.schema import Config, Stage
from lmgym.core.errors import LmgymError
from lmgym.core.progress import doing
from lmgym.envs.placement import make_envs, unguarded_sentence
from lmgym.envs.vector import Envs
from lmgym.inference.served_teacher import EndpointTeacher
from lmgym.logs.doctor.examine import Watch
from lmgym.logs.doctor.facts import facts_of
from lmgym.models import copies, lora
from lmgym.models.critic import with_critic
from lmgym.models.cross_teaching import token_classes
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.reward_model import take_reward_model
from lmgym.models.sharding import shard_policy
from lmgym.rewards.base import Reward
from lmgym.rewards.building import build_rewards
from lmgym.rewards.champions import Champions, keeps_champion, restore, with_champions
from lmgym.rewards.normalisation import Moments
from lmgym.rewards.running import pooled
from lmgym.rollouts.play import Draw
from lmgym.rollouts.players import Actor
from lmgym.rollouts.sources import Source, answered_and_given
from lmgym.tasks.curriculum import Curriculum
from lmgym.tasks.stream import Stream
from lmgym.text.token_pairs import TokenPairs, token_pairs
from lmgym.training.ahead import Ahead
from lmgym.training.checkpoints import checkpoint
from lmgym.training.checkpoints.frozen_models import FrozenModels
from lmgym.training.chunks import AheadInChunks
from lmgym.training.planning.preflight import OWN_TEACHERS, teacher_section
from lmgym.training.resuming.fingerprint import checksum
from lmgym.training.run import Run
from lmgym.training.setup import actor_of, held_out_rewards, make_actor
from lmgym.types import Example
from lmgym.updates.optimizer import Optimizer, make_optimizer


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


def begin_stage(run: Run) -> StageRun:
    """Build what the run's next stage needs; on resume, restore the optimizer and the algorithm's own state. Raises
    LmgymError if the checkpoint's state does not fit the algorithm."""
    index, config = run.progress.stage_index, run.config
    run.settings.hold(run.console)
    section = config.stages[index]
    algorithm = copy.deepcopy(section.algorithm)  # its state belongs to this run, not to the config
    if algorithm.requirements.values:
        name = config.policy.critic_from
        start = None if name is None else partial(take_reward_model, name=name)
        run.policy = with_critic(run.policy, separate=config.policy.critic == "separate", start=start)
    envs = make_envs(section.env, config.plugins)
    if sentence := unguarded_sentence(section.env):
        run.console.say(sentence)
    frozen = _frozen_models(run, section, algorithm)
    teacher, opponent = frozen.models.get("teacher"), frozen.copies.get("opponent")
    pairs = _token_pairs(run, algorithm, teacher) if isinstance(teacher, Policy) else None
    run.policy = run.policy.but(
        teacher=teacher if isinstance(teacher, Policy) else None,
        classes=None if pairs is None else token_classes(pairs, run.policy.device),
    )
    stage = StageRun(
        run=run,
        index=index,
        config=section,
        algorithm=algorithm,
        optimizer=make_optimizer(algorithm, run.policy, section.optimizer),
        frozen_models=frozen,
        opponent=None if opponent is None else actor_of(config, opponent),
        source=_source(config, section, algorithm),
        stream=_stream(run.data.training[index], section, config.seed),
        rewards=build_rewards(section.rewards),
        envs=envs,
        held_out_envs=make_envs(config.evaluation.env, config.plugins) if config.evaluation.env else envs,
        token_pairs=pairs,
        watch=Watch(facts_of(resolved(config), index)),
    )
    stage.champions = {reward.name: Champions() for reward in stage.rewards if keeps_champion(reward)}
    if run.progress.step > 0 and run.resume_from is not None:
        _restore(stage, run.resume_from)
    if run.progress.evaluations.get("stop") != (section.early_stop and asdict(section.early_stop)):
        run.progress.evaluations["stop"] = None  # it was stopped early, and goes on under another rule
    run.console.stage(section.name, index, len(config.stages))
    if algorithm.caution:
        run.console.say(algorithm.caution)
    _begin_rewards(stage)
    return stage


def _source(config: Config, section: Stage, algorithm: Algorithm) -> Source:
    """Where the answers of a stage come from."""
    engine = config.engine
    if not (engine.ahead and section.source.samples):
        return section.source
    beside = not engine.kind.shares_weights
    if engine.chunk is not None:
        return AheadInChunks(algorithm.requirements, engine.ahead, engine.chunk, beside)
    return Ahead(algorithm.requirements, engine.ahead, beside)


def _stream(examples: Sequence[Example], section: Stage, seed: int) -> Stream | Curriculum:
    """The order in which a stage sees its examples."""
    stream = Stream(examples, seed, section.prompts_per_step, section.priority_scale, shuffle=section.shuffle)
    return stream if section.curriculum is None else Curriculum(stream, section.curriculum)


def _begin_rewards(stage: StageRun) -> None:
    """Start the process that rewards run in, while the first answers are sampled; and say whose limit of time cannot be
    enforced."""
    run = stage.run
    rewards = {reward.name: reward for reward in [*stage.rewards, *held_out_rewards(run.config, stage.config)]}
    if any(reward.pooled for reward in rewards.values()):
        pooled.start_early()
    unlimited = [f"{reward.name} ({reward.unlimited})" for reward in rewards.values() if reward.unlimited]
    if unlimited:
        run.console.say(
            f"reward_timeout ({run.config.reward_timeout:g} s) cannot be enforced for rewards that run in the training "
            f"process: {', '.join(unlimited)}"
        )


@doing("saving a checkpoint")
def save_checkpoint(stage: StageRun) -> None:
    """Write a checkpoint of the run as it is now and delete the oldest. Only the first rank writes; all take part, as
    each may hold a part of the weights."""
    run, progress = stage.run, stage.run.progress
    begun = progress.step > 0  # else the next stage begins, with its own optimizer and algorithm
    stage.source.settle()
    policy = copies.gathered(run.policy)
    moments = checkpoint.moments(stage.optimizer.torch, keep=run.ranks.first) if begun else {}
    if begun:
        stage.frozen_models.save()
    if policy is None:
        return
    state = {
        "stage": progress.stage_index,
        "step": progress.step,
        "steps": run.config.stages[progress.stage_index].steps,
        "version": progress.version,
        "progress": progress.evaluations,
        "copies": stage.frozen_models.taken if begun else {},
        "teacher": stage.frozen_models.teacher if begun else None,
        "records": dict(run.writer.counts),
    }
    if begun and stage.moments:
        state["moments"] = {name: asdict(moments) for name, moments in stage.moments.items()}
    if begun and (order := stage.stream.state_dict()):
        state["curriculum"] = order
    if states := run.callbacks.state_dict():
        state["callbacks"] = states
    run.writer.sync()  # the records are on the disk before the checkpoint that counts them
    if run.traces is not None:
        run.traces.sync()
    algorithm = stage.algorithm.state_dict() if begun else {}
    seats = {name: champions.seats for name, champions in stage.champions.items()}
    parts = {"ahead": stage.source.state_dict(), "champions": seats} if begun else {}
    saved = checkpoint.save(run.folder / "checkpoints", policy, moments, algorithm, state, run.fingerprint, parts)
    stage.frozen_models.prune(_readable_states(checkpoint.prune(saved, run.config.checkpoint.keep)))
    run.callbacks.on_save(saved)


def _readable_states(saved: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The states of checkpoints, without those of damaged ones, which no run can go on from."""
    for path in saved:
        with suppress(LmgymError):
            yield checkpoint.read_state(path)


def _restore(stage: StageRun, saved: Path) -> None:
    """Take over the optimizer's and the algorithm's state of a checkpoint."""
    checkpoint.load_optimizer(saved, stage.optimizer.torch)
    try:
        stage.algorithm.load_state_dict(checkpoint.read_algorithm(saved))
    except (KeyError, TypeError) as error:
        raise LmgymError(
            f"{saved / 'algorithm.json'} is not a state of this algorithm ({error}): another version of lmgym may have "
            "written it; start the run anew in another folder"
        ) from error
    try:
        stage.source.load_state_dict(checkpoint.read_part(saved, "ahead"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LmgymError(
            f"{saved / 'ahead.json'} holds no answers of a step ({type(error).__name__}: {error}); put it back, or "
            "delete the checkpoint to go on from the one before"
        ) from error
    try:
        restore(stage.champions, checkpoint.read_part(saved, "champions"))
    except ValueError as error:
        raise LmgymError(
            f"{saved / 'champions.json'} holds no answers by prompt ({error}); put it back, or delete the checkpoint "
            "to go on from the one before"
        ) from error
    state, config = checkpoint.read_state(saved), stage.config
    stage.moments |= {name: Moments(**known) for name, known in state.get("moments", {}).items()}
    stage.stream.load_state_dict(state.get("curriculum", {}))
    steps = state["steps"]
    if steps != config.steps and config.optimizer.depends_on_steps:
        stage.run.console.warn(
            f"stage {config.name} now has {config.steps} steps instead of {steps}, so its {config.optimizer.schedule} "
            f"learning rate jumps to where the new curve stands after step {stage.step}"
        )


def _served_teacher(run: Run, served: ServedTeacher) -> EndpointTeacher:
    """The teacher behind an endpoint, reached."""
    teacher = EndpointTeacher(served, run.policy.vocabulary, run.ranks)
    if not teacher.reach(run.policy.tokenizer).compared:
        run.console.say(
            f"algorithm.teacher: {served.address} has no /tokenize beside it, so its tokenizer was not compared with "
            "the policy's"
        )
    return teacher


def _token_pairs(run: Run, algorithm: Algorithm, teacher: Policy) -> TokenPairs | None:
    """The tokens that policy and teacher are compared by, which the run prints; None if they have one tokenizer."""
    own, other = run.policy.tokenizer, teacher.tokenizer
    if own.get_vocab() == other.get_vocab():
        return None
    pairs = token_pairs(own, other, algorithm.requirements.teacher or "", run.policy.vocabulary, teacher.vocabulary)
    for line in pairs.table(own, other):
        run.console.say(line)
    return pairs


def _frozen_models(run: Run, section: Stage, algorithm: Algorithm) -> FrozenModels:
    """The frozen models that a stage needs: copies of the policy as it is now, or those of the checkpoint."""
    progress, required = run.progress, algorithm.requirements
    sharded = run.policy.skeleton is not None
    frozen = FrozenModels(run.folder, progress.stage_index, run.section, run.config.seed, sharded)
    if required.teacher == "self":
        frozen.models["teacher"] = run.policy
    elif required.teacher and required.teacher not in OWN_TEACHERS:
        teacher = load_policy(teacher_section(run.section, required.teacher), run.config.seed).but(ranks=run.ranks)
        frozen.teacher = checksum(teacher.model.parameters())
        teacher.model.requires_grad_(False)
        if teacher.vision is not None and run.policy.vision is not None:
            teacher.vision.reader.pictures = run.policy.vision.reader.pictures
        if sharded:
            teacher = shard_policy(teacher, run.ranks)
        frozen.models["teacher"] = teacher
    elif required.served_teacher is not None:
        frozen.models["teacher"] = _served_teacher(run, required.served_teacher)
    saved = checkpoint.read_state(run.resume_from) if progress.step > 0 and run.resume_from else {}
    if saved.get("teacher") not in (None, frozen.teacher):
        raise LmgymError(
            f"{run.resume_from} cannot be gone on from: algorithm.teacher '{required.teacher}' has other weights than "
            "it had; put back what was there"
        )
    taken = saved.get("copies", {})
    opponent = "frozen" in (section.env.get("opponent"), section.env.get("user"))
    wanted = {"reference": required.reference, "mask": required.mask, "opponent": opponent}
    wanted |= {"teacher": required.teacher == "initial", "rival": required.rival is not None}
    for name in (name for name, is_wanted in wanted.items() if is_wanted):
        if name == "reference" and progress.stage_index == 0 and lora.has_adapter(run.policy.model) and not taken:
            frozen.models[name] = lora.AdapterDisabledPolicy(run.policy)  # the model before its adapters
        elif name in taken:
            frozen.restore(name, taken[name], run.ranks)
        else:
            frozen.take(name, run.policy, progress.step)
    return frozen
