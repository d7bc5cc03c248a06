"""What a recipe asks for, built: examples, rewards, environments, an engine, a policy. No state; train, eval, sample,
check and compare use the same ones."""

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lmgym.config.schema import Config, Stage
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.envs.env_processes import EnvProcesses
from lmgym.envs.vector import Envs, InProcess
from lmgym.models.load import PolicySection, load_policy
from lmgym.models.policy import Policy
from lmgym.rewards.base import Reward, available_metrics, build_rewards
from lmgym.rollouts.rollout import Actor
from lmgym.tasks.base import load_task
from lmgym.training import checkpoint
from lmgym.types import Example


def training_examples(config: Config, stage: Stage) -> list[Example]:
    """What a stage trains on: its task's `split`, "train" unless the recipe says otherwise."""
    return _examples(stage.task, stage.task.get("split", "train"), config.seed)


def held_out_examples(config: Config, split: str | None = None) -> list[Example]:
    """What an evaluation asks, of `evaluation.split` or another. Raises LmgymError if a stage trains on that split."""
    section, task = config.evaluation, config.evaluation.task or config.stages[-1].task
    split = split or section.split
    for stage in config.stages:
        same = all(task.get(key) == stage.task.get(key) for key in ("name", "path", "hub_id"))
        if same and stage.task.get("split", "train") == split:
            raise LmgymError(f"evaluation on split '{split}', which stage '{stage.name}' trains on; choose another")
    return _examples(task, split, config.seed)[: section.examples]


def held_out_rewards(config: Config, stage: Stage) -> list[Reward]:
    """What an evaluation reports: the stage's rewards with their weights (where it has none, the last stage's), and the
    last stage's and `evaluation.metrics` (see `available_metrics`) besides, without weight."""
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


def make_envs(config: Config, env: Mapping[str, Any]) -> Envs:
    """The environments of an `env:` section side by side: in processes of their own where the recipe or the environment
    says so."""
    section = dict(env)
    make = registry.get("env", section.pop("name"))
    count, seconds = section.pop("workers", getattr(make, "workers", 0)), section.pop("seconds", 60.0)
    if count:
        return EnvProcesses(env["name"], section, config.plugins, count, seconds)
    return InProcess(make if not section else partial(make, **section))


def make_engine(config: Config, policy: Policy) -> Any:
    """The engine that samples from the policy."""
    return registry.get("engine", "sampler")(policy, config.engine.rows, config.engine.captured)


def make_actor(config: Config, policy: Policy, engine: Any, version: int = 0) -> Actor:
    """Who answers: the engine, in the words of the policy's tokenizer."""
    section, start = config.policy, policy.decoder_start
    read, said = section.cut, section.max_reference_tokens
    return Actor(engine, policy.tokenizer, section.template, version, start, cut=read, reference_tokens=said)


def trained_policy(config: Config, folder: Path | None) -> Policy:
    """A run's newest model (its newest whole checkpoint, else final/), or the recipe's own where there is no run."""
    if folder is None:
        return load_policy(config.policy, config.seed)
    source = newest_model(folder)
    machine = read_machine(folder, config)
    torch.set_num_threads(machine["threads"])
    return load_policy(policy_section(config, machine), config.seed, source)


def newest_model(folder: Path) -> Path:
    """The folder of a run's newest weights. A run that was resumed with more steps has checkpoints newer than its
    final/."""
    source, _ = checkpoint.newest(folder / "checkpoints")
    source = source or (folder / "final" if (folder / "final").is_dir() else None)
    if source is None:
        raise LmgymError(f"{folder} holds no model yet: neither final/ nor a whole checkpoint")
    return source


def read_machine(folder: Path, config: Config) -> dict[str, Any]:
    """What is chosen once for a run: read back when it exists, so that a resumed run computes the same."""
    path = folder / "machine.json"
    if path.is_file():
        try:
            machine = json.loads(path.read_text(encoding="utf-8"))
            return {**machine, "compute": machine["compute"], "threads": config.threads or int(machine["threads"])}
        except (ValueError, KeyError, TypeError) as error:
            raise LmgymError(f"{path} is damaged ({error}); put it back, or delete it to choose anew") from error
    try:
        described = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
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


def policy_section(config: Config, machine: dict[str, Any]) -> PolicySection:
    """The policy section with the precision that this run has chosen, if it has."""
    chosen = machine["compute"] if config.policy.compute == "auto" else None
    return replace(config.policy, compute=chosen or config.policy.compute)


def _examples(section: dict[str, Any], split: str, seed: int) -> list[Example]:
    arguments = {key: value for key, value in section.items() if key not in ("name", "split")}
    return load_task(section["name"], split, seed=seed, **arguments)
