"""A recipe: YAML and `key=value` overrides to a strict, typed tree, and back.

One definition of each knob: the dataclass that uses it is its section (the algorithm's own fields, `Sampling`,
`OptimizerSection`, `PolicySection` ...). An unknown key is an error that names the section, the valid keys and the
nearest match. No interpolation, no inheritance between files. The resolved tree, with every default written out,
is a recipe again.
"""

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lmgym.algorithms.base import Algorithm
from lmgym.config.build import DEFAULT, build, check_least, plain
from lmgym.config.yaml import apply_override, check_heard, merge, read_yaml, write_yaml
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.inference.base import Sampling
from lmgym.models.load import PolicySection
from lmgym.rollouts.evaluate import EvaluationSection
from lmgym.training.checkpoint import CheckpointSection
from lmgym.updates.optimizer import OptimizerSection

LEAST = {  # the smallest value that makes sense
    "threads": 1,
    "engine.rows": 1,
    "policy.tokens_per_forward": 1,
    "policy.max_prompt_tokens": 1,
    "policy.max_reference_tokens": 1,
    "policy.lora_rank": 1,
    "policy.lora_alpha": 0,
    "evaluation.every": 0,
    "evaluation.examples": 1,
    "evaluation.samples": 1,
    "evaluation.temperature": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "logs.samples": 0,
}
LEAST_OF_STAGE = {
    "prompts_per_step": 1,
    "priority_scale": 0,
    "steps": 1,
    "max_draws": 1,
    "optimizer.learning_rate": 0,
    "optimizer.critic_learning_rate": 0,
    "optimizer.epsilon": 0,
    "optimizer.weight_decay": 0,
    "optimizer.max_gradient_norm": 0,
    "optimizer.warmup": 0,
    "optimizer.final_fraction": 0,
    "early_stop.patience": 1,
}


@dataclass(kw_only=True)
class EarlyStop:
    """Ends a stage before its last step, judged at its evaluations.

    Example: EarlyStop(metric="final_answer", patience=3) or EarlyStop(metric="reference_nll", mode="min", patience=2)
    """

    metric: str
    mode: typing.Literal["max", "min"] = "max"
    patience: int | None = None
    """Stop after this many evaluations without a new best."""
    target: float | None = None
    """Stop at the first evaluation that reaches this value."""


@dataclass(kw_only=True)
class Stage:
    """One training phase. A recipe without `stages:` has one; in a recipe with them, top-level keys are their
    defaults."""

    name: str = "train"
    task: dict[str, Any] = field(default_factory=dict)
    """name, the task's own arguments, and limit, system_prompt, few_shot, prompt_prefix, prompt_suffix, split."""
    env: dict[str, Any] = field(default_factory=lambda: {"name": DEFAULT["env"]})
    rewards: dict[str, Any] = field(default_factory=dict)
    """reward name: weight, or reward name: {weight, its arguments}. Weight 0 makes it a metric."""
    algorithm: Algorithm = field(default_factory=lambda: registry.get("algorithm", DEFAULT["algorithm"])())
    sampling: Sampling = field(default_factory=Sampling)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    prompts_per_step: int = 32
    """Distinct prompts in a step; each gets algorithm.group_size answers."""
    priority_scale: float = 0.0
    """Above 0, prompts are drawn with chances proportional to their examples' meta["weight"] to this power, and not
    epoch by epoch."""
    steps: int = 100
    max_draws: int = 4
    """Most times that a step draws prompts, for an algorithm that rejects groups."""
    early_stop: EarlyStop | None = None


STAGE_KEYS = {f.name for f in fields(Stage)} - {"name"}


@dataclass(kw_only=True)
class Engine:
    """The `engine:` section."""

    rows: int = 256
    """Answers that are decoded side by side."""
    captured: bool = False
    """Decoding steps of fixed shapes, which CUDA graphs replay; not measured on a GPU yet."""


@dataclass(kw_only=True)
class Logs:
    """The `logs:` section. metrics.jsonl and rollouts.jsonl are always written."""

    sinks: list[typing.Literal["tensorboard", "wandb", "trackio"]] = field(default_factory=list)
    samples: int = 4
    """Sample answers shown at the end."""
    rollouts: typing.Literal["tracked", "all"] = "tracked"
    """What rollouts.jsonl keeps of a step: the first prompt's answers, or everything."""
    predictions: bool = False
    """Also write every answer of each evaluation, with its metrics, to epoch_N_SPLIT_split_predictions.json, as RL4LMs
    does; N counts the policy's updates."""


@dataclass(kw_only=True)
class Config:
    """A whole run.

    Example: Config(stages=[Stage(task={"name": "arithmetic"}, rewards={"final_answer": 1.0}, steps=50)])
    """

    seed: int = 0
    out: str | None = None
    """Run folder; without it runs/<recipe's name>, numbered where that exists."""
    threads: int | None = None
    """CPU threads; without it torch's own choice. Written to the run folder, and kept when resuming."""
    plugins: list[str] = field(default_factory=list)
    """Modules or .py files that register the user's own algorithms, rewards, tasks."""
    policy: PolicySection = field(default_factory=PolicySection)
    engine: Engine = field(default_factory=Engine)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    logs: Logs = field(default_factory=Logs)
    reward_timeout: float = 60.0
    """Seconds after which a reward function that has not returned ends the run."""
    stages: list[Stage] = field(default_factory=lambda: [Stage()])


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a recipe, apply `key=value` overrides, and build it strictly.

    Raises LmgymError naming the file and the line or key at fault.

    Example: load_config("lmgym/recipes/quickstart.yaml", ["seed=1", "stages.rl.steps=20"])
    """
    tree = read_yaml(Path(path))
    for override in overrides or []:
        apply_override(tree, override, STAGE_KEYS)
    try:
        config = build_config(tree)
    except LmgymError as error:
        raise LmgymError(f"{path}: {error}") from error
    check_heard(tree, overrides or [], STAGE_KEYS)
    return config


def build_config(tree: Mapping[str, Any]) -> Config:
    """The typed tree of a recipe's plain one."""
    tree = dict(tree)
    for plugin in registry.converted(list[str], tree.get("plugins") or [], "plugins"):
        registry.load_plugin(plugin)
    base = {key: tree.pop(key) for key in list(tree) if key in STAGE_KEYS}
    given = tree.pop("stages", None)
    if given is not None and (not isinstance(given, list) or not given):
        raise LmgymError("'stages' must be a list of at least one stage; without stages, leave the key out")
    if tree.pop("runs", None) is not None:
        where = "add runs=null, or name one of their folders"
        raise LmgymError(f"'runs' makes it several runs, which `lmgym train` alone takes; {where}")
    valid = {f.name for f in fields(Config)} | STAGE_KEYS | {"runs"}
    for key in tree:
        if key not in valid:
            raise LmgymError(f"unknown key '{key}'; {registry.suggest(str(key), valid)}")
    stages = []
    for number, stage in enumerate(given or [{}]):
        if not isinstance(stage, dict):
            raise LmgymError(f"stages.{number} must be a mapping of keys to values")
        where = f"stages.{stage.get('name', number)}." if given else ""
        stages.append(build(Stage, merge(base, stage), where))
    _check_stages(stages)
    config = build(Config, {key: value for key, value in tree.items()}, "")
    config.stages = stages
    check_least(config, LEAST, "")
    for stage in stages:
        config.evaluation.decoding(stage.sampling)  # raises where the two do not go together
        if stage.algorithm.requirements.values and config.policy.critic == "none":
            name = registry.name_of("algorithm", type(stage.algorithm))
            raise LmgymError(f"{name} needs a value function, and policy.critic is none; write head or separate")
    if not config.reward_timeout > 0:
        raise LmgymError(f"reward_timeout is {config.reward_timeout}; it must be above 0 seconds")
    if "split" in (config.evaluation.task or {}):
        raise LmgymError("unknown key 'evaluation.task.split'; the split is evaluation.split")
    return config


def resolved(config: Config) -> dict[str, Any]:
    """The plain tree of a config with every default written out; itself a recipe."""
    return plain(config)


def dump(config: Config) -> str:
    """The resolved tree as YAML."""
    return write_yaml(resolved(config))


def check_same_recipe(config: Config, recipe: str) -> None:
    """Raise LmgymError where `out` holds a run of another recipe; the same one resumes. `recipe` is its name."""
    there = Path(config.out or "") / "recipe.yaml"
    if there.is_file() and there.read_text(encoding="utf-8") != dump(config):
        raise LmgymError(
            f"{config.out} holds a run of another recipe than {recipe}; go on with it by `lmgym train {config.out} "
            "key=value`, or choose another out="
        )


def _check_stages(stages: list[Stage]) -> None:
    names = [stage.name for stage in stages]
    for stage in stages:
        where = f"stage '{stage.name}': " if len(stages) > 1 else ""
        if names.count(stage.name) > 1:
            raise LmgymError(f"two stages are called '{stage.name}'; give each its own 'name'")
        if not stage.task and not getattr(registry.get("env", stage.env["name"]), "needs_data", True):
            stage.task = {"name": "episodes"}
        if not stage.task:
            raise LmgymError(f"{where}the recipe names no task; write, for example, 'task: arithmetic'")
        check_least(stage, LEAST_OF_STAGE, where)
        if not 0 <= stage.optimizer.alpha < 1:
            raise LmgymError(f"{where}optimizer.alpha is {stage.optimizer.alpha}; it must be at least 0 and below 1")
        if not all(0 <= beta < 1 for beta in stage.optimizer.betas):
            raise LmgymError(f"{where}optimizer.betas are {stage.optimizer.betas}; each must be at least 0 and below 1")
        if stage.early_stop and stage.early_stop.patience is None and stage.early_stop.target is None:
            raise LmgymError(f"{where}early_stop never stops anything; give it a 'patience' or a 'target'")
        if stage.algorithm.requirements.answers == "references":
            continue
        if stage.sampling.truncates and stage.algorithm.restriction is not None:
            name = registry.name_of("algorithm", type(stage.algorithm))
            raise LmgymError(
                f"{where}{name} decides itself which tokens may be sampled, so sampling.top_k, top_p and min_p do not "
                "go with it; leave them out"
            )
        if stage.sampling.temperature == 0:
            raise LmgymError(
                f"{where}sampling.temperature is 0; training needs answers that differ, so write 1.0 or so"
            )
        if stage.algorithm.requirements.reward and not stage.rewards and stage.env.get("name") == "single_turn":
            raise LmgymError(f"{where}the recipe names no reward; write, for example, 'rewards: {{final_answer: 1.0}}'")
