"""Set-up goes one way: recipe, machine, data, policy, engine, run. Each step is a function of the results before it.

`start` sets up a run; eval, generate, compare and check take the same steps, as far as they need them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from lmgym.config.build import dump, resolved
from lmgym.config.redacted import redacted
from lmgym.config.schema import Config, Stage
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.envs.env_processes import EnvProcesses
from lmgym.envs.vector import Envs, InProcess
from lmgym.inference.base import Engine
from lmgym.inference.proof import Proof, proofs_of
from lmgym.logs.console import Console
from lmgym.logs.records import rename_evaluations
from lmgym.logs.rewind import rewind
from lmgym.logs.traces.folder import TraceFolder, rewind_traces
from lmgym.logs.writer import NullWriter, Writer
from lmgym.models.device import prepare_process
from lmgym.models.fast_path import leave_untried
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.sharding import shard_policy
from lmgym.rewards.base import Reward, available_metrics, build_rewards, check_examples
from lmgym.rollouts.evaluate import Evaluation, evaluate
from lmgym.rollouts.rollout import Actor
from lmgym.tasks.base import load_task
from lmgym.tasks.rows.unfit import telling
from lmgym.tasks.streamed import first_of
from lmgym.training.callbacks import Callbacks, make_callbacks
from lmgym.training.checkpoints import checkpoint
from lmgym.training.engines import engine_sentence, make_engine, open_engine
from lmgym.training.machine import Machine, choose_machine
from lmgym.training.planning.lengths import without_long
from lmgym.training.planning.preflight import check_fit, check_model
from lmgym.training.process_settings import check_process
from lmgym.training.resuming import contents, fingerprint
from lmgym.training.resuming.resume import check_resumable, report, set_aside
from lmgym.training.run import DEFAULT_FOLDER, Data, Progress, Run, lock_folder
from lmgym.training.sampler_gap import GapLimits, gap_limits
from lmgym.types import Example


def start(config: Config, console: Console | None = None, ranks: Ranks = ALONE) -> Run:
    """Set up a run: load data and policy (from the newest whole checkpoint, if its folder has one), open the folder.
    Says so if it resumes, or if nothing is left to do. Raises LmgymError for anything that the recipe has wrong, before
    the folder is made. Of several `ranks` each loads all of it; the first one alone prints and writes.
    Example: with start(load_config("quickstart", ["out=runs/mine"])) as run: ..."""
    check_process()
    console = (console or Console()) if ranks.first else Console(quiet=True)
    folder = Path(config.out or DEFAULT_FOLDER).absolute()
    lock = lock_begun(folder, console.warn) if ranks.first else None  # before it is decided where the run stands
    try:
        ranks.wait()
        return _start(config, folder, lock, console, ranks)
    except BaseException:
        if lock is not None:
            lock.close()
        raise


def _start(config: Config, folder: Path, lock: IO[str] | None, console: Console, ranks: Ranks) -> Run:
    """The steps of `start`, in a folder that is locked already if it holds a run."""
    callbacks = make_callbacks(config) if ranks.first else Callbacks()
    weights, progress = find_progress(config, folder, console.warn)
    machine = choose_machine(config, folder)  # threads and precision, chosen once
    data = load_data(config)  # examples of all stages and splits; rewards find their references
    stands_on = fingerprint.of_recipe(config, data)
    check_resumable(weights, stands_on, progress)  # another seed, algorithm or data is refused
    check_model(config, data.training)  # what the model's configuration and tokenizer tell, before any weight is loaded
    policy = load_weights(config, machine, weights)
    data = without_long(config, data, policy)
    for sentence in data.told:
        console.say(sentence)
    check_fit(config, data, policy, console.say)  # lengths of prompts and references
    compute, path = str(policy.compute).removeprefix("torch."), "fast" if policy.fast else "plain"
    machine = replace(machine, compute=compute, path=path, prepacked=policy.prepacked)
    stands_on |= fingerprint.of_machine(machine, policy, ranks, config.distributed.sharding)
    stands_on["read"] = contents.with_models(stands_on["read"], config)  # those of the Hub are here now
    if config.distributed.sharding == "fsdp":
        shard_policy(policy, ranks)
    engine = open_engine(config, machine, policy, folder, console.warn, ranks)
    if machine.unit is not None or machine.engine is not None:
        console.say(engine_sentence(config, machine))
    try:
        proofs = prove_policy(config, policy, engine)  # what is sampled, scored and said by the model itself must agree
        for proof in proofs:
            proof.check()
        for sentence in filter(None, (proofs[-1].sentence, policy.path_sentence, policy.products_sentence)):
            console.say(sentence)
        limits = gap_limits(config.engine, proofs[-1])
        policy.ranks = ranks
        if weights is not None:
            callbacks.load_state_dict(checkpoint.read_state(weights).get("callbacks", {}))
        loaded = (machine, data, policy, engine, limits)
        run = open_run(config, folder, lock, *loaded, weights, progress, stands_on, console)
        run.callbacks = callbacks
        return run
    except BaseException:
        engine.close()
        raise


def load_data(config: Config) -> Data:
    """All examples of a run; with them the steps of stages that count epochs are known, and set. Raises LmgymError for
    a reward whose references they do not have."""
    splits = {config.evaluation.split, config.evaluation.final_split or config.evaluation.split}
    with telling() as told:
        training = [training_examples(config, stage) for stage in config.stages]
        held_out = {
            split: held_out_examples(config, split) for split in sorted(splits) if config.evaluation.examples
        }
    for stage, examples in zip(config.stages, training, strict=True):
        if stage.epochs is not None:
            stage.steps = max(math.ceil(stage.epochs * len(examples) / stage.prompts_per_step), 1)
            stage.epochs = None
    for stage, examples in zip(config.stages, training, strict=True):
        if stage.algorithm.requirements.answers == "policy":
            check_examples(build_rewards(stage.rewards), first_of(examples))
    for examples in held_out.values():
        check_examples(held_out_rewards(config, config.stages[-1]), examples)
    return Data(training, held_out, list(dict.fromkeys(told)))


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


def lock_begun(folder: Path, warn: Callable[[str], None]) -> IO[str] | None:
    """Lock a folder in which a run has begun, and finish what a kill has left there; None for any other folder."""
    if not ((folder / ".lock").is_file() or (folder / "checkpoints").is_dir()):
        return None
    lock = lock_folder(folder, warn)
    checkpoint.put_back(folder)
    return lock


def find_progress(config: Config, folder: Path, warn: Callable[[str], None]) -> tuple[Path | None, Progress]:
    """The newest whole checkpoint of a run folder (None for a new run), and how far the run has come. `warn` is told of
    newer checkpoints that are damaged. Raises LmgymError if all are, or if the recipe has fewer stages than the run has
    begun."""
    newest, complaints = checkpoint.newest(folder / "checkpoints", resumes=True)
    for complaint in complaints:
        warn(complaint)
    return newest, progress_of(newest, config)


def progress_of(saved: Path | None, config: Config) -> Progress:
    """How far the run of a checkpoint has come. Raises LmgymError if the recipe has fewer stages than it has begun."""
    if saved is None:
        return Progress()
    state = checkpoint.read_state(saved)
    if state["stage"] >= len(config.stages):
        raise LmgymError(
            f"{saved.parent.parent} is in its stage {state['stage'] + 1}, and the recipe has {len(config.stages)}"
        )
    return Progress(state["stage"], state["step"], state["version"], rename_evaluations(state["progress"]))


def load_weights(config: Config, machine: Machine, weights: Path | None) -> Policy:
    """The policy with the threads and the precision of its run; from a model folder, or as the recipe begins."""
    prepare_process(machine.threads)
    section = machine.policy_section(config.policy)
    prepacked = machine.prepacked if section.compute == machine.compute else None  # chosen for that precision
    policy = load_policy(section, config.seed, weights, prepacked)
    if machine.compute is not None and section.path == "auto":  # a machine.json of before it named a path
        leave_untried(policy)
    return policy


def trained_policy(config: Config, folder: Path | None) -> Policy:
    """The newest policy of a run folder; without one, the recipe's model as it begins."""
    machine = choose_machine(config, folder)
    return load_weights(config, machine, None if folder is None else newest_model(folder))


def newest_model(folder: Path) -> Path:
    """The folder of a run's newest weights: its newest whole checkpoint (in a resumed run newer than final/), or else
    final/."""
    source, _ = checkpoint.newest(folder / "checkpoints")
    source = source or (folder / "final" if (folder / "final").is_dir() else None)
    if source is None:
        raise LmgymError(f"{folder} holds no model yet: neither final/ nor a whole checkpoint")
    return source


def prove_policy(config: Config, policy: Policy, engine: Engine) -> list[Proof]:
    """The proofs of a policy (inference/proof.py), the run's own precision last. They use no random numbers of the run
    and change nothing. Raises LmgymError if the model cannot be sampled, scored or run; gaps are for the caller."""
    return proofs_of(policy, engine, partial(make_engine, config), config.engine.gap_at_load)


def make_actor(config: Config, policy: Policy, engine: Engine | None = None, version: int = 0) -> Actor:
    """The policy as it acts in rollouts: its engine (a new one, unless given) with its tokenizer."""
    section = config.policy
    return Actor(
        engine or make_engine(config, policy),
        policy.tokenizer,
        section.template,
        version,
        policy.decoder_start,
        cut=section.cut,
        reference_tokens=section.max_reference_tokens,
        answer_start=section.answer_start,
        ranks=policy.ranks,
    )


def unguarded_sentence(env: Mapping[str, Any]) -> str:
    """What to know of an environment of one's own that runs in the training process; empty for all others."""
    make = registry.get("env", env["name"])
    own = not str(getattr(make, "__module__", "")).startswith("lmgym.")
    if not own or env.get("workers", getattr(make, "workers", 0)):
        return ""
    return (
        f"environment '{env['name']}' runs in the training process, without a limit of time: if it hangs or crashes, "
        "so does the run; env.workers: 2 gives it processes of its own, where each call may take env.seconds"
    )


def make_envs(config: Config, env: Mapping[str, Any]) -> Envs:
    """The environments of an `env:` section; in processes of their own if the recipe or the environment says so."""
    section = dict(env)
    make = registry.get("env", section.pop("name"))
    count, seconds = section.pop("workers", getattr(make, "workers", 0)), section.pop("seconds", 60.0)
    if count:
        return EnvProcesses(env["name"], section, config.plugins, count, seconds)
    return InProcess(make if not section else partial(make, **section))


def evaluate_actor(config: Config, actor: Actor, examples: Sequence[Example], rewards: list[Reward]) -> Evaluation:
    """Evaluate outside of a run, as the recipe's last stage and `evaluation:` section say."""
    section, stage = config.evaluation, config.stages[-1]
    envs, sampling = make_envs(config, section.env or stage.env), section.decoding(stage.sampling)
    how = (config.seed, section.samples, config.reward_timeout, section.best_of)
    return evaluate(examples, actor, sampling, rewards, envs, *how)


def where_it_stands(config: Config, folder: Path, progress: Progress) -> str:
    """What a run that is resumed says first: where it goes on, or that it has no step left and how it gets some."""
    stage, number = config.stages[progress.stage_index], progress.stage_index + 1
    last, step = number == len(config.stages), progress.step
    if not last or not progress.ended(stage):
        return f"resuming {folder} in stage {number}, after step {step}"
    why = (
        f"all {step} steps of its last stage are done" if step >= stage.steps else f"it stopped early after step {step}"
    )
    more = f"stages.{stage.name}.steps" if len(config.stages) > 1 else "steps"
    return f"{folder} is finished: {why}. For more, raise {more}; for a new run, choose another out="


def open_run(
    config: Config,
    folder: Path,
    lock: IO[str] | None,
    machine: Machine,
    data: Data,
    policy: Policy,
    engine: Engine,
    limits: GapLimits,
    resume_from: Path | None,
    progress: Progress,
    stands_on: fingerprint.Fingerprint,
    console: Console,
) -> Run:
    """Lock the run folder (unless it was locked before), write what was chosen, and take its logs back to the
    checkpoint. Raises LmgymError if the checkpoint stands on something else than `stands_on`, and if another process
    has begun a run there; what else has changed is said and recorded."""
    section, ranks = replace(config.policy, compute=machine.compute), policy.ranks
    if not ranks.first:
        set_aside(check_resumable(resume_from, stands_on, progress), progress, config)
        ranks.wait()  # until the first one has written
        silent = (console, NullWriter(), None)
        return Run(config, folder, section, data, policy, engine, *silent, progress, resume_from, stands_on, limits)
    lock_is_new = lock is None
    lock = lock or lock_folder(folder, console.warn)
    try:
        if lock_is_new and (folder / "checkpoints").is_dir():
            raise LmgymError(
                f"another process has begun a run in {folder} while this one was loading; start again to go on from "
                "its newest checkpoint, or choose another out="
            )
        changed = check_resumable(resume_from, stands_on, progress)
        checkpoint.write_text(folder / "recipe.yaml", dump(config))
        machine.write(folder)
        counted = checkpoint.read_state(resume_from).get("records") if resume_from else {}
        missing = rewind(folder, progress.stage_index, progress.step, counted, begun=progress.begun)
        writer = Writer(folder, config.logs.sinks, console, redacted(resolved(config)))
        report(changed, missing, progress, config, writer, console)
        if data.told and not resume_from:
            writer.metrics({"kind": "data", "stage": 0, "step": 0, "left_out": data.told})
        for sentence in set_aside(changed, progress, config):
            console.say(sentence)
        traces = open_traces(config, folder, policy, progress, console)
        ranks.wait()
    except BaseException:
        lock.close()
        raise
    if resume_from:
        console.say(where_it_stands(config, Path(config.out or DEFAULT_FOLDER), progress))
    logs = (console, writer, lock)
    return Run(config, folder, section, data, policy, engine, *logs, progress, resume_from, stands_on, limits, traces)


def open_traces(
    config: Config, folder: Path, policy: Policy, progress: Progress, console: Console
) -> TraceFolder | None:
    """The traces/ of a run, without the steps that the run will repeat, and beside it the tokenizer; None if the recipe
    keeps none."""
    for sentence in rewind_traces(folder, progress.stage_index, progress.step):
        console.warn(sentence)
    if config.logs.traces == "none":
        return None
    if not (folder / "tokenizer").exists():
        checkpoint.write_folder(folder / "tokenizer", policy.tokenizer.save_pretrained)
    return TraceFolder(folder, config.logs.traces_gib * 2**30, console.warn)
