"""A run in progress and its folder: what is built, what is chosen once, what is resumed.

runs/NAME/
    recipe.yaml         the resolved recipe; `lmgym train runs/NAME` resumes from it
    machine.json        precision, threads, versions: chosen once
    metrics.jsonl       one record a step and an evaluation
    rollouts.jsonl      a tracked prompt's answers in each step
    copies/             frozen copies of the policy that checkpoints refer to, see copies.py
    checkpoints/        the newest few, see checkpoint.py
    best/               the best model, where evaluation.keep_best names a metric
    final/              the trained model, for AutoModelForCausalLM.from_pretrained
    summary.json        before and after, with intervals
    plot.png
"""

import copy
import fcntl
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch

from lmgym.config.schema import Config, Stage, dump
from lmgym.core.errors import LmgymError
from lmgym.envs.single_turn import SingleTurn
from lmgym.envs.vector import Envs, InProcess
from lmgym.logs.console import Console
from lmgym.logs.writer import Writer, disk_errors, rewind
from lmgym.models import lora
from lmgym.models.distributions import add_critic
from lmgym.models.load import PolicySection, load_policy
from lmgym.models.policy import Policy
from lmgym.rewards.base import Reward, build_rewards, check_examples
from lmgym.rollouts.rollout import Actor
from lmgym.tasks.stream import Stream
from lmgym.training import checkpoint
from lmgym.training.frozen_models import FrozenModels
from lmgym.training.preflight import check_lengths, check_model, cut_prompts, cut_references, teacher_section
from lmgym.training.setup import (
    held_out_examples,
    held_out_rewards,
    make_actor,
    make_engine,
    make_envs,
    policy_section,
    read_machine,
    training_examples,
)
from lmgym.types import Example
from lmgym.updates.first_order import Optimizer


@dataclass
class Run:
    """Everything that the loop works on. What must survive a kill is in `progress`, the policy, the optimizer, the
    algorithm, and three numbers: stage_index, step, version."""

    config: Config
    folder: Path
    section: PolicySection  # config.policy with the precision that this run has chosen
    policy: Policy
    engine: Any
    writer: Writer
    lock: IO[str]  # held until it is closed: no other process may train in this folder
    console: Console
    examples: list[list[Example]]  # what each stage trains on
    held_out: dict[str, list[Example]]  # by split
    resume_from: Path | None = None  # the checkpoint whose optimizer and algorithm the first stage takes over
    stage_index: int = 0
    step: int = 0  # of the stage
    version: int = 0  # updates that the policy has seen, all stages together
    progress: dict[str, Any] = field(default_factory=dict)  # plain JSON: before, after, best, early stopping
    interrupted: bool = False
    stage: Stage = field(init=False)
    algorithm: Any = field(init=False)
    optimizer: Optimizer = field(init=False)
    copies: FrozenModels = field(init=False)
    _opponent: Any = None  # the engine of a frozen opponent
    stream: Stream = field(init=False)
    rewards: list[Reward] = field(init=False)
    envs: Envs = field(default_factory=lambda: InProcess(SingleTurn))
    held_out_envs: Envs = field(default_factory=lambda: InProcess(SingleTurn))

    @property
    def actor(self) -> Actor:
        """Who answers in evaluations: the policy itself, with a frozen opponent beside it if the stage has one."""
        actor = make_actor(self.config, self.policy, self.engine, self.version)
        return replace(actor, opponent=self.opponent)

    @property
    def training_actor(self) -> Actor:
        """Who answers in training: under the algorithm's restriction, if it has one."""
        return replace(self.actor, restriction=self.algorithm.restriction(self.copies.models.get("mask")))

    @property
    def opponent(self) -> Actor | None:
        """Who plays the other side of a game against a frozen copy."""
        if "opponent" not in self.copies.models:
            return None
        if self._opponent is None:
            self._opponent = make_engine(self.config, self.copies.models["opponent"])
        return make_actor(self.config, self.copies.models["opponent"], self._opponent)

    def close_envs(self) -> None:
        """End the processes that environments run in."""
        self.envs.close()
        self.held_out_envs.close()

    def refresh(self, name: str) -> None:
        """Take a frozen copy anew, of the policy as it is now; for `Algorithm.after_update`."""
        self.copies.take(name, self.policy, self.step)

    @property
    def path(self) -> tuple[int | str, ...]:
        """Where the random numbers of this stage start."""
        return (self.config.seed, "stage", self.stage_index)

    @property
    def last_stage(self) -> bool:
        return self.stage_index == len(self.config.stages) - 1


def start(config: Config, console: Console) -> Run:
    """Load the data of all stages and the policy (from the newest whole checkpoint, if there is one), make or find the
    run folder, open the logs. What a recipe has wrong shows before the folder is made."""
    folder = Path(config.out or "runs/run")
    examples = [training_examples(config, stage) for stage in config.stages]
    splits = {config.evaluation.split, config.evaluation.final_split or config.evaluation.split}
    held_out = {split: held_out_examples(config, split) for split in sorted(splits)}
    for stage, own in zip(config.stages, examples, strict=True):
        if "demonstrations" not in stage.algorithm.needs:
            check_examples(build_rewards(stage.rewards), own)
    for asked in held_out.values():
        check_examples(held_out_rewards(config, config.stages[-1]), asked)
    machine = read_machine(folder, config)
    torch.set_num_threads(machine["threads"])
    latest, complaints = checkpoint.newest(folder / "checkpoints")
    for complaint in complaints:
        console.warn(complaint)
    state: dict[str, Any] = checkpoint.read_state(latest) if latest else {"stage": 0, "step": 0}
    if state["stage"] >= len(config.stages):
        raise LmgymError(f"{folder} is in its stage {state['stage'] + 1}, and the recipe has {len(config.stages)}")
    check_model(config, examples)
    policy = load_policy(policy_section(config, machine), config.seed, latest)
    compute: Any = str(policy.compute).removeprefix("torch.")
    section = replace(config.policy, compute=compute)
    asked_where = {f"evaluation on {split}": asked for split, asked in held_out.items()}
    read_where = {f"stage {stage.name}": own for stage, own in zip(config.stages, examples, strict=True)}
    for where, own in {**read_where, **asked_where}.items():
        if cut := cut_prompts(own, config.policy, policy.tokenizer, policy.encoder_decoder):
            console.say(f"{where}: {cut}")
    for stage, own in zip(config.stages, examples, strict=True):
        if "demonstrations" in stage.algorithm.needs and (cut := cut_references(own, config.policy, policy.tokenizer)):
            console.say(f"stage {stage.name}: {cut}")
    for stage, own in zip(config.stages, examples, strict=True):
        check_lengths(own, config, stage, policy)
        for asked in held_out.values():
            check_lengths(asked, config, stage, policy)
    engine = make_engine(config, policy)
    lock = _lock(folder)
    try:
        checkpoint.write_text(folder / "recipe.yaml", dump(config))
        checkpoint.write_text(folder / "machine.json", json.dumps({**machine, "compute": section.compute}, indent=1))
        rewind(folder, state["stage"], state["step"])
        writer = Writer(folder, config.logs.sinks, console)
    except BaseException:
        lock.close()
        raise
    run = Run(config, folder, section, policy, engine, writer, lock, console, examples, held_out)
    if latest:
        run.stage_index, run.step, run.version = state["stage"], state["step"], state["version"]
        run.progress, run.resume_from = state["progress"], latest
        engine.load(policy, run.version)
        console.say(f"resuming {folder} at stage {run.stage_index + 1}, step {run.step}")
    return run


def begin_stage(run: Run) -> None:
    """Build the stage's parts; on resume, put back the optimizer and the algorithm's own state."""
    stage = run.stage = run.config.stages[run.stage_index]
    run.algorithm = copy.deepcopy(stage.algorithm)  # its state belongs to this run, not to the config
    if "values" in run.algorithm.needs:
        add_critic(run.policy, separate=run.config.policy.critic == "separate")
    own, critic = run.algorithm.parameters(run.policy)
    run.optimizer = Optimizer(own, stage.optimizer, critic)
    run.stream = Stream(run.examples[run.stage_index], run.config.seed, stage.prompts_per_step, stage.priority_scale)
    run.rewards = build_rewards(stage.rewards)
    run.close_envs()
    run.envs = make_envs(run.config, stage.env)
    held_out = run.config.evaluation.env
    run.held_out_envs = make_envs(run.config, held_out) if held_out else run.envs
    if run.step > 0:
        assert run.resume_from is not None
        checkpoint.load_optimizer(run.resume_from, run.optimizer.torch)
        state = checkpoint.read_state(run.resume_from)
        run.algorithm.load_state_dict(checkpoint.read_algorithm(run.resume_from))
        if state["steps"] != stage.steps and stage.optimizer.schedule != "constant":
            run.console.warn(
                f"stage {stage.name} now has {stage.steps} steps instead of {state['steps']}, so its "
                f"{stage.optimizer.schedule} learning rate jumps to where the new curve stands at step {run.step}"
            )
    if run.progress.get("stop") != (stage.early_stop and asdict(stage.early_stop)):
        run.progress["stop"] = None  # it was stopped early, and goes on under another rule
    _copies(run)
    run.console.stage(stage.name, run.stage_index, len(run.config.stages))


def save(run: Run) -> None:
    """Write a checkpoint of the run as it is now and drop the oldest."""
    state = {
        "stage": run.stage_index,
        "step": run.step,
        "steps": run.config.stages[run.stage_index].steps,
        "version": run.version,
        "progress": run.progress,
        "copies": run.copies.taken if run.step else {},
    }
    run.copies.save()
    optimizer = run.optimizer.torch if run.step else None
    algorithm = run.algorithm.state_dict() if run.step else {}
    saved = checkpoint.save(run.folder / "checkpoints", run.policy, optimizer, algorithm, state)
    checkpoint.prune(saved, run.config.checkpoint.keep)
    run.copies.prune(map(checkpoint.read_state, checkpoint.all_checkpoints(saved.parent)))


def _lock(folder: Path) -> IO[str]:
    """Take the run folder for this process; the system gives it back when the file is closed or the process dies."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "w")  # noqa: SIM115 (train closes it)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise LmgymError(f"another process is training in {folder}; wait for it, or choose another out=") from error
    return file


def _copies(run: Run) -> None:
    """Take the frozen copies that the stage's algorithm needs, or read back those of the checkpoint."""
    run.copies = FrozenModels(run.folder, run.stage_index, run.section, run.config.seed)
    run._opponent = None
    frozen = "frozen" in (run.stage.env.get("opponent"), run.stage.env.get("user"))
    needs = run.algorithm.needs | ({"opponent"} if frozen else set())
    if "teacher" in needs:
        run.copies.models["teacher"] = _teacher(run)
    taken = checkpoint.read_state(run.resume_from)["copies"] if run.step > 0 and run.resume_from else {}
    for name in ("reference", "mask", "opponent"):
        if name not in needs:
            continue
        if name == "reference" and run.stage_index == 0 and lora.has_adapter(run.policy.model) and not taken:
            run.copies.models[name] = lora.AdapterDisabledPolicy(run.policy)  # what the adapters began from
        elif name in taken:
            run.copies.restore(name, taken[name])
        else:
            run.copies.take(name, run.policy, run.step)


def _teacher(run: Run) -> Policy:
    """The frozen model that the algorithm names."""
    return load_policy(teacher_section(run.section, run.algorithm.teacher), run.config.seed).frozen_copy()
