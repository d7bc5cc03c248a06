"""The sections of a recipe: dataclasses whose fields carry their types, bounds and meaning.

One definition of each knob: the dataclass that uses it is its section. Those that lower layers use stand there (an
algorithm's own fields, `Sampling`, `OptimizerSection`, `PolicySection`, `EvaluationSection`), the rest is here.
config/build.py builds them from a recipe, core/validation.py checks them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from lmgym.algorithms.base import Algorithm
from lmgym.core import registry
from lmgym.core.constraints import FINITE, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Rule, Share
from lmgym.core.errors import LmgymError
from lmgym.core.validation import FREE, RECORDED, Section
from lmgym.functional.distribution_sums import SUMS
from lmgym.inference.base import Sampling
from lmgym.inference.kinds import EngineSection
from lmgym.models.load import PolicySection
from lmgym.rollouts.evaluate import EvaluationSection
from lmgym.rollouts.sources import Source, source_of
from lmgym.tasks.curriculum import CurriculumSection
from lmgym.updates.optimizer import OptimizerSection

DEFAULT = {"algorithm": "grpo", "env": "single_turn"}  # for a section without a name, such as {group_size: 4}


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
    epochs: PositiveFloat | None = None
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

    def check(self, where: str = "") -> None:
        """Raise LmgymError for what is missing, and for sections that do not go together; `where` begins the
        sentence."""
        if not self.task:
            raise LmgymError(f"{where}the recipe names no task; write, for example, 'task: arithmetic'")
        source, name = self.source, registry.name_of("algorithm", type(self.algorithm))
        if self.algorithm.requirements.hint is not None and self.is_played:
            raise LmgymError(
                f"{where}algorithm.hint is for tasks of one prompt and one answer, and the stage has environment "
                f"'{self.env.get('name')}'; remove one of them"
            )
        if source.of_examples and self.is_played:
            raise LmgymError(
                f"{where}{name} learns from the {source.many} of a task, and environment '{self.env.get('name')}' has "
                "none; remove env"
            )
        if source.of_examples and self.algorithm.group_size > 1:
            raise LmgymError(
                f"{where}algorithm.group_size is for sampled answers; here the task gives them, so remove it"
            )
        if self.priority_scale and not self.shuffle:
            raise LmgymError(f"{where}shuffle is false, and priority_scale draws prompts by chance; remove one of them")
        if not source.samples:
            if self.curriculum is not None:
                raise LmgymError(f"{where}curriculum: nothing is sampled here that could be right or wrong; remove it")
            return
        if self.curriculum is not None and self.algorithm.group_size < 2:
            raise LmgymError(
                f"{where}curriculum: a solve rate needs several answers to a prompt, and algorithm.group_size is "
                f"{self.algorithm.group_size}; raise it to 4 or more"
            )
        if self.algorithm.requirements.given_share and (
            self.sampling.truncates or self.env.get("name") != DEFAULT["env"]
        ):
            raise LmgymError(
                f"{where}algorithm.student_share takes references beside sampled answers, so neither an environment "
                "nor sampling.top_k, top_p and min_p go with it; leave them out, or write student_share: 1.0"
            )
        if self.algorithm.requirements.served_teacher is not None:
            self._check_served_teacher(where)
        if self.algorithm.restriction is not None:
            self.sampling.check_untruncated(where + name)
        for wanted in self.algorithm.requirements.distribution_sums:
            if SUMS[wanted].whole and self.sampling.truncates:
                raise LmgymError(
                    f"{where}{name} reads the policy's whole distributions ({wanted}), and sampling.top_k, top_p and "
                    "min_p cut tokens off; leave them out"
                )
        if self.sampling.temperature == 0:
            raise LmgymError(
                f"{where}sampling.temperature is 0; training needs answers that differ, so write 1.0 or so"
            )
        if self.algorithm.requirements.reward is True and not self.rewards and not self.is_played:
            raise LmgymError(f"{where}the recipe names no reward; write, for example, 'rewards: {{final_answer: 1.0}}'")
        if "overlong" in self.rewards and getattr(self.algorithm, "overlong", False):
            raise LmgymError(
                f"{where}rewards.overlong and algorithm.overlong punish the same answers twice; remove the reward, or "
                "set algorithm.overlong to 0"
            )

    def _check_served_teacher(self, where: str) -> None:
        """Raise LmgymError where answers come from another distribution than the model's own: a server says what its
        model finds likely at temperature 1, with all tokens."""
        if self.sampling.temperature not in (0.0, 1.0):  # 0 is refused elsewhere
            raise LmgymError(
                f"{where}sampling.temperature is {self.sampling.temperature}, and a teacher behind an address says its "
                "log-probabilities at 1; write 1.0, or name a model for this process"
            )
        if self.sampling.truncates or self.sampling.min_new_tokens:
            raise LmgymError(
                f"{where}sampling.top_k, top_p, min_p and min_new_tokens exclude tokens, and a teacher behind an "
                "address does not say how likely it finds the others among themselves; leave them out, or name a model "
                "for this process"
            )


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
    """Most GiB of traces/: the oldest steps lose their answers first, and keep their table. With three groups of 8
    answers of 500 tokens a step, GRPO fills one GiB in some 4,000 steps."""
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

    def check(self) -> None:
        """Raise LmgymError for sections that do not go together."""
        for name, count in Counter(stage.name for stage in self.stages).items():
            if count > 1:
                raise LmgymError(f"two stages are called '{name}'; give each its own 'name'")
        if self.distributed.sharding != "none" and self.policy.quantise is not None:
            raise LmgymError("distributed.sharding: packed weights cannot be cut; remove it, or policy.quantise")
        if self.distributed.sharding != "none" and self.policy.products == "onednn":
            raise LmgymError("distributed.sharding: oneDNN multiplies whole weights; remove it, or policy.products")
        if self.policy.parity == "exact":
            self._check_exact()
        if not self.engine.kind.parts and self.distributed.sharding != "none":
            raise LmgymError(
                f"distributed.sharding: with engine {self.engine.name} each rank holds the whole model; remove it"
            )
        if not self.engine.kind.shares_weights and self.policy.quantise is not None:
            raise LmgymError("engine.name: packed weights stay in the training process; write sampler")
        for stage in self.stages:
            stage.check(f"stage '{stage.name}': " if len(self.stages) > 1 else "")
            driver = registry.get("driver", stage.algorithm.driver)  # raises where there is none of this name
            if self.distributed.sharding != "none" and getattr(driver, "whole_weights", False):
                raise LmgymError(
                    f"distributed.sharding: stage '{stage.name}' multiplies with the Fisher matrix, which needs all "
                    "weights on each rank; remove it, or take a first-order algorithm such as ppo"
                )
            self._check_engine(stage)
        for name in self.logs.sinks:
            registry.get("sink", name)
        if isinstance(self.logs.predictions, str):
            registry.load_attribute(self.logs.predictions, "logs.predictions")
        for stage in self.stages:
            if stage.early_stop is not None and not self.evaluation.examples:
                raise LmgymError("early_stop judges by evaluations, and evaluation is null; remove one of them")
            if self.reward_watch.every and stage.is_played and stage.rewards:
                raise LmgymError(
                    f"reward_watch adds tricks to answers of one turn, and stage '{stage.name}' has environment "
                    f"'{stage.env.get('name')}'; remove reward_watch"
                )
            self.evaluation.decoding(stage.sampling)  # raises where the two do not go together
            if not stage.algorithm.requirements.makes_policy:
                self._check_reward_model(stage)
            if stage.algorithm.requirements.values and self.policy.critic == "none":
                name = registry.name_of("algorithm", type(stage.algorithm))
                raise LmgymError(f"{name} needs a value function, and policy.critic is none; write head or separate")

    def _check_exact(self) -> None:
        """Raise LmgymError for sections that do not go with exact parity."""
        if self.distributed.sharding != "none":
            raise LmgymError(
                "policy.parity: exact needs whole weights on each rank; remove it, or distributed.sharding"
            )
        if not self.engine.kind.shares_weights:
            raise LmgymError(
                f"policy.parity: exact is for answers that the training process samples, and {self.engine.name}"
                " samples elsewhere; write engine.name: sampler, or remove it"
            )
        if self.engine.captured:
            raise LmgymError("policy.parity: exact is for a CPU, and engine.captured for a GPU; remove one of them")
        for stage in self.stages:
            name, required = registry.name_of("algorithm", type(stage.algorithm)), stage.algorithm.requirements
            if stage.algorithm.restriction is not None or required.divergence is not None:
                what = "samples within a restriction" if required.divergence is None else "compares whole distributions"
                raise LmgymError(
                    f"policy.parity: exact does not serve stage '{stage.name}', whose {name} {what}; remove it"
                )

    def _check_engine(self, stage: Stage) -> None:
        """Raise LmgymError for a stage that needs what the engine does not support."""
        engine = self.engine.kind
        if not engine.shares_weights and stage.algorithm.restriction is not None:
            raise LmgymError(
                f"engine.name: stage '{stage.name}' samples within a restriction by a frozen policy, which only "
                "the training process holds; write sampler"
            )
        if not engine.any_kept_set and stage.sampling.more_than_top_k:
            raise LmgymError(
                f"engine.name: {self.engine.name} knows the sets of sampling.top_k, not those of top_p and min_p, "
                f"which stage '{stage.name}' asks for; write top_k instead, or engine.name: sampler"
            )
        if self.engine.ahead and stage.source.samples and not stage.algorithm.weighs_old:
            name = registry.name_of("algorithm", type(stage.algorithm))
            raise LmgymError(
                f"engine.ahead: the answers of stage '{stage.name}' come from older weights, which {name} does not "
                "correct for as it is; take grpo or a preset of it, with algorithm.correction: truncated"
            )
        if self.engine.chunk and stage.is_played:
            raise LmgymError(
                f"engine.chunk: stage '{stage.name}' has environment '{stage.env.get('name')}', and only an answer to "
                "a task's prompt goes on with newer weights; remove chunk, or env"
            )
        if self.engine.ahead and stage.curriculum is not None:
            raise LmgymError(
                f"engine.ahead: the curriculum of stage '{stage.name}' chooses a step's prompts by the answers of "
                "the one before, and ahead samples them earlier; remove one of them"
            )

    def _check_reward_model(self, stage: Stage) -> None:
        """Raise LmgymError for what a reward model could not be used with later: it scores whole texts."""
        if stage is not self.stages[-1]:
            raise LmgymError(f"stage '{stage.name}' makes a reward model of the policy, so it must be the last stage")
        section, usual = self.policy, PolicySection()
        for key in ("quantise", "max_prompt_tokens", "max_reference_tokens", "answer_start"):
            if getattr(section, key) != getattr(usual, key):
                raise LmgymError(
                    f"policy.{key}: stage '{stage.name}' makes a reward model, which reads whole prompts and answers "
                    "in full precision; remove it"
                )
