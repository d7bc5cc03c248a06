"""How a stage begins: everything that it trains with is built, or taken over from a checkpoint."""

import copy
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.requirements import ServedTeacher
from lmgym.config.build import resolved
from lmgym.config.schema import Config, Stage
from lmgym.core.errors import LmgymError
from lmgym.envs.placement import make_envs, unguarded_sentence
from lmgym.inference.served_teacher import EndpointTeacher
from lmgym.logs.doctor.examine import Watch
from lmgym.logs.doctor.facts import facts_of
from lmgym.models import lora
from lmgym.models.critic import with_critic
from lmgym.models.cross_teaching import token_classes
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.reward_model import take_reward_model
from lmgym.models.sharding import shard_policy
from lmgym.rewards.building import build_rewards
from lmgym.rewards.champions import Champions, keeps_champion
from lmgym.rewards.running import pooled
from lmgym.rollouts.sources import Source
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
from lmgym.training.setup import actor_of, held_out_rewards
from lmgym.training.stage import StageRun
from lmgym.training.stage_checkpoint import restore_stage
from lmgym.types import Example
from lmgym.updates.optimizer import make_optimizer


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
        restore_stage(stage, run.resume_from)
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
