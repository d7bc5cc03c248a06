"""A run in progress and its folder: what is built, what is chosen once, what is resumed.

runs/NAME/
    recipe.yaml         the resolved recipe; `lmgym train runs/NAME` resumes from it
    machine.json        precision, threads, versions: chosen once
    metrics.jsonl       one record a step and an evaluation
    rollouts.jsonl      a tracked prompt's answers in each step
    checkpoints/        the newest few, see checkpoint.py
    best/               the best model, where evaluation.keep_best names a metric
    final/              the trained model, for AutoModelForCausalLM.from_pretrained
    summary.json        before and after, with intervals
    plot.png
"""

import copy
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lmgym import checkpoint, registry
from lmgym.config import Config, Stage, dump
from lmgym.episode import Example
from lmgym.errors import LmgymError
from lmgym.logs.console import Console
from lmgym.logs.writer import Writer, disk_errors, rewind
from lmgym.policies.load import PolicySection, load_policy
from lmgym.policies.policy import Policy
from lmgym.rewards.base import Reward, build
from lmgym.rollout import Speaker
from lmgym.tasks.base import Stream, load
from lmgym.update import Optimizer


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
    console: Console
    stage_index: int = 0
    step: int = 0  # of the stage
    version: int = 0  # updates that the policy has seen, all stages together
    progress: dict[str, Any] = field(default_factory=dict)  # plain JSON: before, after, best, early stopping
    interrupted: bool = False
    stage: Stage = field(init=False)
    algorithm: Any = field(init=False)
    optimizer: Optimizer = field(init=False)
    reference: Policy | None = field(init=False)
    stream: Stream = field(init=False)
    rewards: list[Reward] = field(init=False)
    make_env: Callable[[], Any] = field(init=False)
    held_out: list[Example] = field(init=False)

    @property
    def speaker(self) -> Speaker:
        return Speaker(self.engine, self.policy.tokenizer, self.config.policy.template, self.version)

    @property
    def path(self) -> tuple[int | str, ...]:
        """Where the random numbers of this stage start."""
        return (self.config.seed, "stage", self.stage_index)

    @property
    def last_stage(self) -> bool:
        return self.stage_index == len(self.config.stages) - 1


def start(config: Config, console: Console) -> Run:
    """Make or find the run folder, load the policy (from the newest whole checkpoint, if there is one), open the
    logs."""
    folder = Path(config.out or "runs/run")
    machine = _machine(folder, config)
    torch.set_num_threads(machine["threads"])
    compute: Any = (
        machine["compute"] if config.policy.compute == "auto" and machine["compute"] else config.policy.compute
    )
    section = replace(config.policy, compute=compute)
    latest, complaints = checkpoint.newest(folder / "checkpoints")
    for complaint in complaints:
        console.warn(complaint)
    state: dict[str, Any] = checkpoint.read_state(latest) if latest else {"stage": 0, "step": 0}
    policy = load_policy(section, config.seed, latest)
    compute = str(policy.compute).removeprefix("torch.")
    section = replace(section, compute=compute)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.write_text(folder / "recipe.yaml", dump(config))
        checkpoint.write_text(folder / "machine.json", json.dumps({**machine, "compute": section.compute}, indent=1))
    rewind(folder, state["stage"], state["step"])
    engine = make_engine(config, policy)
    run = Run(config, folder, section, policy, engine, Writer(folder, config.logs.sinks, console), console)
    if latest:
        run.stage_index, run.step, run.version = state["stage"], state["step"], state["version"]
        run.progress = state["progress"]
        engine.load(policy, run.version)
        console.say(f"resuming {folder} at stage {run.stage_index + 1}, step {run.step}")
    return run


def begin_stage(run: Run) -> None:
    """Build the stage's parts; on resume, put back the optimizer and the algorithm's own state."""
    stage = run.stage = run.config.stages[run.stage_index]
    run.algorithm = copy.deepcopy(stage.algorithm)  # its state belongs to this run, not to the config
    run.optimizer = Optimizer(run.policy.parameters(), stage.optimizer)
    run.stream = Stream(training_examples(run.config, stage), run.config.seed, stage.prompts_per_step)
    run.held_out = held_out_examples(run.config)
    run.rewards = build(stage.rewards)
    run.make_env = make_env(stage)
    if run.step > 0:
        latest, _ = checkpoint.newest(run.folder / "checkpoints")
        assert latest is not None
        checkpoint.load_optimizer(latest, run.optimizer.torch)
        run.algorithm.load_state_dict(checkpoint.read_state(latest)["algorithm"])
    run.reference = _reference(run) if "reference" in run.algorithm.needs else None
    run.console.stage(stage.name, run.stage_index, len(run.config.stages))


def training_examples(config: Config, stage: Stage) -> list[Example]:
    """What a stage trains on: its task's `split`, "train" unless the recipe says otherwise."""
    return _examples(stage.task, stage.task.get("split", "train"), config.seed)


def held_out_examples(config: Config) -> list[Example]:
    """What every evaluation of a run asks. Raises LmgymError if a stage trains on that very split."""
    section, task = config.evaluation, config.evaluation.task or config.stages[-1].task
    for stage in config.stages:
        if task["name"] == stage.task["name"] and stage.task.get("split", "train") == section.split:
            raise LmgymError(
                f"evaluation.split is '{section.split}', which stage '{stage.name}' trains on; choose another"
            )
    return _examples(task, section.split, config.seed)[: section.examples]


def make_engine(config: Config, policy: Policy) -> Any:
    """The engine that samples from the policy."""
    return registry.get("engine", "sampler")(policy, rows=config.engine.rows)


def make_env(stage: Stage) -> Callable[[], Any]:
    """A function that builds one episode's environment."""
    return partial(registry.get("env", stage.env["name"]), **{k: v for k, v in stage.env.items() if k != "name"})


def trained_policy(config: Config, folder: Path | None) -> Policy:
    """A run's newest model (final/, else its newest checkpoint), or the recipe's own where there is no run."""
    if folder is None:
        return load_policy(config.policy, config.seed)
    latest, _ = checkpoint.newest(folder / "checkpoints")
    source = folder / "final" if (folder / "final").is_dir() else latest
    if source is None:
        raise LmgymError(f"{folder} holds no model yet: neither final/ nor a whole checkpoint")
    return load_policy(config.policy, config.seed, source)


def save(run: Run) -> None:
    """Write a checkpoint of the run as it is now and drop the oldest."""
    state = {"stage": run.stage_index, "step": run.step, "version": run.version, "progress": run.progress}
    optimizer = run.optimizer.torch if run.step else None
    state["algorithm"] = run.algorithm.state_dict()
    saved = checkpoint.save(run.folder / "checkpoints", run.policy, optimizer, state)
    checkpoint.prune(saved, run.config.checkpoint.keep)


def _examples(section: dict[str, Any], split: str, seed: int) -> list[Example]:
    arguments = {key: value for key, value in section.items() if key not in ("name", "split")}
    return load(section["name"], split, seed=seed, **arguments)


def _reference(run: Run) -> Policy:
    """A frozen copy of the policy as the stage found it, kept in the run folder so that a resumed run has the same
    one."""
    folder = run.folder / f"reference-{run.stage_index}"
    if run.step == 0:
        checkpoint.save_model(folder, run.policy)
    if not folder.is_dir():
        raise LmgymError(f"{folder} is gone, so the run cannot be resumed exactly; start it anew in another folder")
    reference = load_policy(run.section, run.config.seed, folder)
    reference.model.requires_grad_(False)
    return reference


def _machine(folder: Path, config: Config) -> dict[str, Any]:
    """What is chosen once for a run: read back when it exists, so that a resumed run computes the same."""
    if (folder / "machine.json").is_file():
        return json.loads((folder / "machine.json").read_text())
    try:
        described = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:  # no git here
        described = ""
    return {
        "threads": config.threads or torch.get_num_threads(),
        "compute": None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "platform": platform.platform(),
        "commit": described or None,
    }
