"""Set-up goes one way: recipe, machine, data, policy, engine, run. Each step is a function of the results before it.

`start` sets up a run; eval, generate, compare and check take the same steps, as far as they need them."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from lmgym.config.schema import Config, Stage
from lmgym.core import waiting
from lmgym.core.errors import LmgymError
from lmgym.core.progress import doing
from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.envs.placement import make_envs
from lmgym.inference.base import Engine
from lmgym.inference.in_process import make_engine
from lmgym.inference.kinds import EngineSection, Place
from lmgym.inference.proof import Proof, proofs_of
from lmgym.logs.console import Console
from lmgym.models.device import give_memory_back, prepare_process
from lmgym.models.load import load_policy
from lmgym.models.model_info import read_model_info
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.sentences import sentences
from lmgym.models.sharding import shard_policy
from lmgym.pictures.store import FOLDER as PICTURES
from lmgym.pictures.store import keep_pictures_in
from lmgym.rewards.base import Reward, check_examples
from lmgym.rewards.building import available_metrics, build_rewards
from lmgym.rewards.champions import check_champions
from lmgym.rewards.groups import check_comparisons
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.evaluate import Evaluation, evaluate
from lmgym.tasks.base import load_task
from lmgym.tasks.rows.unfit import telling
from lmgym.tasks.streamed import first_of
from lmgym.training.callbacks import Callbacks, make_callbacks
from lmgym.training.checkpoints import checkpoint
from lmgym.training.machine import Machine, as_first, check_gpus, check_ranks, choose_machine
from lmgym.training.opening import Begun, Loaded, find_progress, lock_begun, open_run
from lmgym.training.planning.lengths import without_long
from lmgym.training.planning.memory_plan import plan_sentence, within_memory
from lmgym.training.planning.preflight import check_fit, check_model
from lmgym.training.process_settings import check_process
from lmgym.training.resuming import contents, fingerprint
from lmgym.training.resuming.resume import check_resumable
from lmgym.training.run import DEFAULT_FOLDER, Data, Run
from lmgym.training.sampler_gap import GapLimits, gap_limits
from lmgym.types import Example


def start(config: Config, console: Console | None = None, ranks: Ranks = ALONE) -> Run:
    """Set up a run: load data and policy (from the newest whole checkpoint, if its folder has one), open the folder.
    Says so if it resumes, or if nothing is left to do. Raises LmgymError for anything that the recipe has wrong, before
    the folder is made. Of several `ranks` each loads all of it; the first one alone prints and writes.
    Example: with start(load_config("quickstart", ["out=runs/mine"])) as run: ..."""
    check_process()
    config = copy.copy(config)
    config.stages = [copy.copy(stage) for stage in config.stages]  # they get their steps; the caller's do not
    console = (console or Console()) if ranks.first else Console(quiet=True)
    if not waiting.IN_TIME:
        console.say(waiting.TORCH_CAME_FIRST)
    folder = Path(config.out or DEFAULT_FOLDER).absolute()
    keep_pictures_in(folder / PICTURES)
    lock = lock_begun(folder, console.warn) if ranks.first else None  # before it is decided where the run stands
    try:
        ranks.wait()
        with chdir("."):
            callbacks = make_callbacks(config.callbacks) if ranks.first else Callbacks()
        begun = Begun(folder, lock, *find_progress(folder, len(config.stages), console.warn))
        console.doing("reading the data, and loading the model", line=True)
        loaded = load(config, begun, ranks, console.say)
        section = loaded.machine.engine_section(config.engine)
        engine = open_engine(section, config.stages, loaded, folder, console.warn, ranks)
        try:
            console.doing("comparing what is sampled and what is scored with the model's own pass", line=True)
            limits = prove(section, loaded, engine, console.say)
            loaded = replace(loaded, policy=loaded.policy.but(ranks=ranks))
            if begun.weights is not None:
                callbacks.load_state_dict(checkpoint.read_state(begun.weights).get("callbacks", {}))
            return open_run(config, begun, loaded, engine, limits, callbacks, console)
        except BaseException:
            engine.close()
            raise
    except BaseException:
        console.close()
        if lock is not None:
            lock.close()
        raise


def load(config: Config, begun: Begun, ranks: Ranks, say: Callable[[str], None]) -> Loaded:
    """Machine, data and policy. Each is checked as soon as it can be: what the configuration and the tokenizer tell is
    known before any weight is loaded."""
    check_ranks(config.policy, ranks.size)
    check_gpus(config.policy, ranks)
    machine = choose_machine(config, begun.folder)  # threads and precision, chosen once
    data = load_data(config)  # examples of all stages and splits; rewards find their references
    stands_on = fingerprint.of_recipe(config, data)
    check_resumable(begun.weights, stands_on, begun.progress)  # another seed, algorithm or data is refused
    model = read_model_info(config.policy, begun.weights)
    check_model(config, data.training, model)
    machine = within_memory(config, data.training, model.tokenizer, machine)
    if machine.memory_gib is not None:
        say(plan_sentence(machine))
    policy = load_weights(config.policy, config.seed, machine, begun.weights, model.tokenizer)
    machine = machine.of_policy(policy)
    if (first := as_first(machine, ranks)) != machine:
        del policy
        machine, policy = first, load_weights(config.policy, config.seed, first, begun.weights, model.tokenizer)
    give_memory_back()
    policy.had_updates(begun.progress.version)
    data = without_long(config, data, policy)
    for sentence in data.told:
        say(sentence)
    check_fit(config, data, policy, say)  # lengths of prompts and references
    stands_on |= fingerprint.of_machine(machine, policy, ranks, config.distributed.sharding)
    stands_on["read"] = contents.with_models(stands_on["read"], config)  # those of the Hub are here now
    if config.distributed.sharding == "fsdp":
        policy = shard_policy(policy, ranks)
    return Loaded(machine, data, policy, stands_on)


def prove(section: EngineSection, loaded: Loaded, engine: Engine[Policy], say: Callable[[str], None]) -> GapLimits:
    """What is sampled, scored and said by the model itself must agree; the limits of the gap while it trains. Raises
    LmgymError if it does not."""
    machine, policy = loaded.machine, loaded.policy
    if machine.unit is not None or machine.engine is not None:
        say(engine_sentence(section, machine))
    proofs = prove_policy(section, policy, engine)
    give_memory_back()
    for proof in proofs:
        proof.check()
    for sentence in filter(None, [proofs[-1].sentence, *sentences(policy)]):
        say(sentence)
    return gap_limits(section, proofs[-1])


@doing("reading the data")
def load_data(config: Config) -> Data:
    """All examples of a run; with them the steps of stages that count epochs are known, and set. Raises LmgymError for
    a reward whose references they do not have."""
    splits = {config.evaluation.split, config.evaluation.final_split or config.evaluation.split}
    with telling() as told:
        training = [training_examples(config, stage) for stage in config.stages]
        held_out = {split: held_out_examples(config, split) for split in sorted(splits) if config.evaluation.examples}
    for stage, examples in zip(config.stages, training, strict=True):
        count_epochs(stage, examples)
    for stage, examples in zip(config.stages, training, strict=True):
        if stage.source.samples:
            rewards, required = build_rewards(stage.rewards), stage.algorithm.requirements
            check_examples(rewards, first_of(examples))
            check_comparisons(rewards, stage.algorithm.group_size, required.greedy or required.rival is not None)
            check_champions(rewards, config.engine.ahead)
    for examples in held_out.values():
        check_examples(held_out_rewards(config, config.stages[-1]), examples)
    return Data(training, held_out, list(dict.fromkeys(told)))


def count_epochs(stage: Stage, examples: Sequence[Example]) -> None:
    """Replace the epochs of a stage, if it has any, by the steps that they make with these examples.

    Example: 2.5 epochs of 100 rows are 32 steps of 8 prompts; the last one begins the next epoch."""
    if stage.epochs is not None:
        # Exact: in floats, 1.1 times 100 is more than 110.
        prompts = Fraction(str(stage.epochs)) * len(examples)
        stage.steps, stage.epochs = max(math.ceil(prompts / stage.prompts_per_step), 1), None


def training_examples(config: Config, stage: Stage) -> Sequence[Example]:
    """What a stage trains on: its task's `split`, "train" unless the recipe says otherwise."""
    return _examples(stage.task, stage.task.get("split", "train"), config.seed)


def held_out_examples(config: Config, split: str | None = None) -> Sequence[Example]:
    """The examples of an evaluation, of `evaluation.split` or another. Raises LmgymError if a stage trains on them."""
    section, task = config.evaluation, config.evaluation.task or config.stages[-1].task
    split = split or section.split
    for stage in config.stages:
        same = all(task.get(key) == stage.task.get(key) for key in ("name", "path", "hub_id"))
        if same and stage.task.get("split", "train") == split:
            raise LmgymError(f"evaluation on split '{split}', which stage '{stage.name}' trains on; choose another")
    if not section.examples:
        raise LmgymError("the recipe evaluates on nothing (evaluation: null); add evaluation.examples=256, for example")
    return _examples(task, split, config.seed)[: section.examples]


def _examples(section: dict[str, Any], split: str, seed: int) -> Sequence[Example]:
    arguments = {key: value for key, value in section.items() if key not in ("name", "split")}
    with chdir("."):  # whose code may go elsewhere
        return load_task(section["name"], split, seed=seed, **arguments)


def held_out_rewards(config: Config, stage: Stage) -> list[Reward]:
    """The rewards that an evaluation reports: the stage's with their weights (the last stage's, if it has none), and
    with weight 0 the last stage's and `evaluation.metrics` (see `available_metrics`)."""
    weighted = stage.rewards or config.stages[-1].rewards
    sections = {**config.stages[-1].rewards, **weighted}
    metrics = available_metrics(config.evaluation.metrics)
    for name, section in metrics.items():
        if name in sections and _arguments(section) != _arguments(sections[name]):
            raise LmgymError(
                f"key 'evaluation.metrics.{name}' is a reward too, with other arguments; give the metric a name of its "
                f"own: my_{name}: {{reward: {name}, ...}}"
            )
    rewards = build_rewards(sections | {name: own for name, own in metrics.items() if name not in sections})
    return [reward if reward.name in weighted else replace(reward, weight=0.0) for reward in rewards]


def _arguments(section: Any) -> dict[str, Any]:
    """A reward's section without its weight."""
    return {key: value for key, value in section.items() if key != "weight"} if isinstance(section, Mapping) else {}


def load_weights(
    section: PolicySection, seed: int, machine: Machine, weights: Path | None, tokenizer: Any = None
) -> Policy:
    """The policy with the threads and the precision of its run; from a model folder, or as the recipe begins."""
    prepare_process(machine.threads)
    section = machine.policy_section(section)
    prepacked = machine.prepacked if section.compute == machine.compute else None  # chosen for that precision
    tries = machine.compute is None or section.path != "auto"  # else a machine.json of before it named a path
    return load_policy(section, seed, weights, prepacked, tokenizer, tries)


def trained_policy(config: Config, folder: Path | None) -> Policy:
    """The newest policy of a run folder; without one, the recipe's model as it begins."""
    weights = None if folder is None else newest_model(folder)
    return load_weights(config.policy, config.seed, choose_machine(config, folder), weights)


def newest_model(folder: Path) -> Path:
    """The folder of a run's newest weights: its newest whole checkpoint (in a resumed run newer than final/), or else
    final/."""
    source, _ = checkpoint.newest(folder / "checkpoints")
    source = source or (folder / "final" if (folder / "final").is_dir() else None)
    if source is None:
        raise LmgymError(f"{folder} holds no model yet: neither final/ nor a whole checkpoint")
    return source


def prove_policy(section: EngineSection, policy: Policy, engine: Engine[Policy]) -> list[Proof]:
    """Compare what is sampled and scored with the model's own forward pass (inference/proof.py)."""
    return proofs_of(policy, engine, partial(make_engine, section), section.gap_at_load)


def open_engine(
    section: EngineSection,
    stages: Sequence[Stage],
    loaded: Loaded,
    folder: Path,
    warn: Callable[[str], None],
    ranks: Ranks = ALONE,
) -> Engine[Policy]:
    """The engine of a run. Raises LmgymError if it cannot be had, or is too small for the `ranks`."""
    corrected = all(stage.algorithm.weighs_old for stage in stages if stage.source.samples)
    canary, machine = section.gap_error, loaded.machine
    place = Place(folder, warn, machine.unit, machine.generator_threads, ranks, canary, corrected)
    return section.kind.open(section, loaded.policy, place)


def engine_sentence(section: EngineSection, machine: Machine) -> str:
    """Where and how a run samples its answers."""
    return section.kind.sentence(section, machine.unit, machine.generator_threads)


def make_actor(section: PolicySection, policy: Policy, engine: Engine[Policy], version: int = 0) -> Actor:
    """The policy as it acts in rollouts: its engine with its tokenizer."""
    return Actor(
        engine,
        policy.tokenizer,
        section.chat_template_kwargs,
        version,
        policy.decoder_start,
        cut=section.cut,
        reference_tokens=section.max_reference_tokens,
        answer_start=section.answer_start,
        ranks=policy.ranks,
    )


def actor_of(config: Config, policy: Policy) -> Actor:
    """The policy as it answers outside of a run, with an engine of its own in this process."""
    return make_actor(config.policy, policy, make_engine(config.engine, policy))


def evaluate_actor(config: Config, actor: Actor, examples: Sequence[Example], rewards: list[Reward]) -> Evaluation:
    """Evaluate outside of a run, as the recipe's last stage and `evaluation:` section say."""
    section, stage = config.evaluation, config.stages[-1]
    envs, sampling = make_envs(section.env or stage.env, config.plugins), section.decoding(stage.sampling)
    how = (config.seed, section.samples, config.reward_timeout, section.best_of, config.rewards_failed)
    return evaluate(examples, actor, sampling, rewards, envs, *how)
