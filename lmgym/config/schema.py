"""The sections of a recipe: dataclasses whose fields carry their types, bounds and meaning.

One definition of each knob: the dataclass that uses it is its section. Those that lower layers use stand there (an
algorithm's own fields, `Sampling`, `OptimizerSection`, `PolicySection`, `EvaluationSection`), the rest is here.
config/build.py builds them from a recipe, core/validation.py checks each, and config/together.py what goes together."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from lmgym.algorithms.base import Algorithm
from lmgym.config.yaml import DEFAULT
from lmgym.core import registry
from lmgym.core.constraints import FINITE, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Rule, Share
from lmgym.core.errors import LmgymError
from lmgym.core.validation import FREE, RECORDED, Section
from lmgym.inference.base import Sampling
from lmgym.inference.kinds import EngineSection
from lmgym.models.policy_section import PolicySection
from lmgym.rollouts.evaluate import EvaluationSection
from lmgym.rollouts.sources import Source, source_of
from lmgym.tasks.curriculum import CurriculumSection
from lmgym.updates.optimizer import OptimizerSection


@dataclass(kw_only=True)
class EarlyStop(Section):
    """Ends a stage before its last step, judged at its evaluations.

    Example: EarlyStop(metric="final_answer", patience=3) or EarlyStop(metric="reference_nll", mode="min", patience=2)
    """

    section = "early_stop"

    metric: str
    mode: Literal["max", "min"] = "max"
    patience: PositiveInt | None = None
    """Stop after this many evaluations without a new best."""
    target: float | None = None
    """Stop at the first evaluation that reaches this value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience is None and self.target is None:
            raise LmgymError("early_stop never stops anything; give it a 'patience' or a 'target'")


def is_played(env: Mapping[str, Any]) -> bool:
    """True if an environment makes the episodes; else the task's prompts tell what they are."""
    return not getattr(registry.get("env", env["name"]), "asks_once", False)


@dataclass(kw_only=True)
class Stage(Section):
    """One training phase. A recipe without `stages:` has one; in a recipe with them, top-level keys are their
    defaults."""

    name: str = "train"
    task: dict[str, Any] = field(default_factory=dict)
    """name, the task's own arguments, and limit, system_prompt, few_shot, prompt_prefix, prompt_suffix, prompts,
    split."""
    env: dict[str, Any] = field(
        default_factory=lambda: {"name": DEFAULT["env"]}, metadata={"keys": {"workers": FREE, "seconds": FREE}}
    )
    """name, the environment's own arguments, workers (processes that it runs in) and seconds (limit of a call)."""
    rewards: dict[str, Any] = field(default_factory=dict, metadata=RECORDED)
    """reward name: weight, or reward name: {weight, its arguments}. Weight 0 makes it a metric."""
    algorithm: Algorithm = field(default_factory=lambda: registry.get("algorithm", DEFAULT["algorithm"])())
    """Its name, or name, preset and fields."""
    sampling: Sampling = field(default_factory=Sampling, metadata=RECORDED)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection, metadata=RECORDED)
    prompts_per_step: PositiveInt = 32
    """Distinct prompts in a step; each gets algorithm.group_size answers."""
    priority_scale: NonNegativeFloat = 0.0
    """Above 0, prompts are drawn with chances proportional to their examples' meta["weight"] to this power, and not
    epoch by epoch."""
    shuffle: bool = True
    """false: prompts come in the order of the task, epoch by epoch."""
    curriculum: CurriculumSection | None = None
    """Leaves out prompts that are always or never solved, for a while (docs/tasks.md)."""
    steps: PositiveInt = field(default=100, metadata=FREE)  # recorded with a learning rate that depends on it
    epochs: Annotated[float, Gt(0), FINITE, Rule("it must be above 0")] | None = None
    """In place of steps: how often each of the task's rows comes. The run writes down the steps that it makes."""
    max_draws: PositiveInt = field(default=4, metadata=RECORDED)
    """Most times that a step draws prompts, for an algorithm that rejects groups."""
    early_stop: EarlyStop | None = field(default=None, metadata=FREE)

    @property
    def source(self) -> Source:
        """Where the stage's answers come from."""
        return source_of(self.algorithm.requirements)

    @property
    def is_played(self) -> bool:
        """True if an environment makes the episodes."""
        return is_played(self.env)


STAGE_KEYS = {f.name for f in fields(Stage)} - {"name"}


@dataclass(kw_only=True)
class CheckpointSection(Section):
    """The `checkpoint:` section."""

    section = "checkpoint"

    every: NonNegativeInt = 50
    """Steps between checkpoints; one is always written at the end of a stage and on Ctrl-C. 0: only those."""
    keep: PositiveInt = 2
    """How many of the newest to keep."""


@dataclass(kw_only=True)
class DistributedSection(Section):
    """The `distributed:` section, for runs of several processes (docs/scale.md)."""

    section = "distributed"

    sharding: Literal["none", "fsdp"] = "none"
    """none: each rank holds the whole model, with gradients and moments; fsdp: a part of each, by FSDP2. One process
    holds everything either way."""
    seconds: Annotated[float, Gt(0), FINITE, Rule("it must be above 0 seconds")] = 1800.0
    """Longest wait for another rank: more than one rank may need for its answers longer than another. Then the run
    ends, with a sentence that names the ranks that do not answer."""


@dataclass(kw_only=True)
class LogsSection(Section):
    """The `logs:` section. metrics.jsonl and rollouts.jsonl are always written, traces/ unless it says otherwise."""

    section = "logs"

    sinks: list[str] = field(default_factory=list)
    """Trackers that get the run too: tensorboard, wandb, trackio, or one that a plug-in registers."""
    samples: NonNegativeInt = 4
    """Sample answers shown at the end."""
    rollouts: Literal["tracked", "all"] = "tracked"
    """What rollouts.jsonl keeps of a step: the first prompt's answers, or everything."""
    traces: Literal["some", "all", "none"] = "some"
    """What traces/ keeps of a step besides a table of its answers: every number of the answers of three groups (the
    first, the one with the largest advantages, a random one), or of all answers. Of the others the texts, while a step
    has at most 262,144 characters of them. none: no traces/."""
    traces_gib: PositiveFloat = 1.0
    """Most GiB of traces/: the oldest steps lose their answers first and keep their table; where tables alone are more,
    the oldest go by hundreds, but never the newest hundred. With three groups of 8 answers of 500 tokens a step, GRPO
    fills one GiB in some 4,000 steps."""
    predictions: bool | str = False
    """true: rollouts.jsonl has every answer of each evaluation, not only the first ones. "module:function": this
    function writes them in its own way; it gets the run folder, the number of updates, the split and the episodes."""


@dataclass(kw_only=True)
class RewardWatchSection(Section):
    """The `reward_watch:` section: the tricks of `lmgym audit` on the policy's own best answers, while it trains
    (docs/audit.md)."""

    section = "reward_watch"

    every: NonNegativeInt = 0
    """Steps between two looks; 0: none. Each look asks every reward 12 times about one answer of each group."""
    groups: Annotated[int, Ge(9), Rule("with fewer than 9 groups a look can prove nothing")] = 16
    """Groups of the step that are looked at, the first ones."""


@dataclass(kw_only=True)
class Config(Section):
    """A whole run.

    Example: Config(stages=[Stage(task={"name": "arithmetic"}, rewards={"final_answer": 1.0}, steps=50)])"""

    seed: int = 0
    """What all random numbers of the run come from."""
    out: str | None = None
    """Run folder; without it runs/<recipe's name>, numbered where that exists."""
    threads: Annotated[int, Ge(1), Le(4096)] | None = field(default=None, metadata=FREE)  # machine.json has what counts
    """CPU threads; without it torch's own choice. Written to the run folder, and kept when resuming."""
    plugins: list[str] = field(default_factory=list, metadata=RECORDED)
    """Modules or .py files that register the user's own algorithms, rewards, tasks."""
    callbacks: dict[str, Any] = field(default_factory=dict, metadata=FREE)
    """module:class of the user's own: its arguments. Called at each step, evaluation and checkpoint."""
    policy: PolicySection = field(default_factory=PolicySection)
    engine: EngineSection = field(default_factory=EngineSection, metadata=RECORDED)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection, metadata=FREE)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection, metadata=FREE)
    logs: LogsSection = field(default_factory=LogsSection, metadata=FREE)
    reward_watch: RewardWatchSection = field(default_factory=RewardWatchSection, metadata=FREE)
    distributed: DistributedSection = field(default_factory=DistributedSection, metadata=FREE)
    reward_timeout: Annotated[float, Gt(0), Rule("it must be above 0 seconds")] = field(default=60.0, metadata=FREE)
    """Seconds that a call of a reward function may take (docs/rewards.md says for which rewards this can be
    enforced)."""
    rewards_failed: Share = field(default=0.2, metadata=FREE)
    """The run ends if a reward raises, or is too slow, for more than this share of a step's answers; up to it, these
    answers are not judged. 0: the first one ends it."""
    stages: list[Stage] = field(default_factory=lambda: [Stage()])

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is not None:  # ~/runs/a: no shell has put the home folder in
            self.out = os.path.expanduser(self.out)
