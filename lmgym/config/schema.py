"""The sections of a recipe: dataclasses whose fields carry their types, bounds and meaning.

One definition of each knob: the dataclass that uses it is its section. Those that lower layers use stand there (an
algorithm's own fields, `Sampling`, `OptimizerSection`, `PolicySection`, `EvaluationSection`), the rest is here.
config/build.py builds them from a recipe, core/validation.py checks them.
"""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from lmgym.algorithms.base import Algorithm
from lmgym.core import registry
from lmgym.core.constraints import FINITE, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Rule
from lmgym.core.errors import LmgymError
from lmgym.core.validation import Section
from lmgym.inference.base import Sampling
from lmgym.models.load import PolicySection
from lmgym.rollouts.evaluate import EvaluationSection
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


@dataclass(kw_only=True)
class Stage(Section):
    """One training phase. A recipe without `stages:` has one; in a recipe with them, top-level keys are their
    defaults."""

    name: str = "train"
    task: dict[str, Any] = field(default_factory=dict)
    """name, the task's own arguments, and limit, system_prompt, few_shot, prompt_prefix, prompt_suffix, split."""
    env: dict[str, Any] = field(default_factory=lambda: {"name": DEFAULT["env"]})
    """name, the environment's own arguments, workers (processes that it runs in) and seconds (limit of a call)."""
    rewards: dict[str, Any] = field(default_factory=dict)
    """reward name: weight, or reward name: {weight, its arguments}. Weight 0 makes it a metric."""
    algorithm: Algorithm = field(default_factory=lambda: registry.get("algorithm", DEFAULT["algorithm"])())
    """Its name, or name, preset and fields."""
    sampling: Sampling = field(default_factory=Sampling)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    prompts_per_step: PositiveInt = 32
    """Distinct prompts in a step; each gets algorithm.group_size answers."""
    priority_scale: NonNegativeFloat = 0.0
    """Above 0, prompts are drawn with chances proportional to their examples' meta["weight"] to this power, and not
    epoch by epoch."""
    shuffle: bool = True
    """false: prompts come in the order of the task, epoch by epoch."""
    curriculum: CurriculumSection | None = None
    """Leaves out prompts that are always or never solved, for a while (docs/tasks.md)."""
    steps: PositiveInt = 100
    epochs: PositiveFloat | None = None
    """In place of steps: how often each of the task's rows comes. The run writes down the steps that it makes."""
    max_draws: PositiveInt = 4
    """Most times that a step draws prompts, for an algorithm that rejects groups."""
    early_stop: EarlyStop | None = None

    def check(self, where: str = "") -> None:
        """Raise LmgymError for what is missing, and for sections that do not go together; `where` begins the
        sentence."""
        if not self.task:
            raise LmgymError(f"{where}the recipe names no task; write, for example, 'task: arithmetic'")
        answers = self.algorithm.requirements.answers
        if self.algorithm.requirements.hint is not None and self.env.get("name") != DEFAULT["env"]:
            raise LmgymError(
                f"{where}algorithm.hint is for tasks of one prompt and one answer, and the stage has environment "
                f"'{self.env.get('name')}'; remove one of them"
            )
        if answers in ("rated", "steps") and self.env.get("name") != DEFAULT["env"]:
            name = registry.name_of("algorithm", type(self.algorithm))
            what = "rated answers" if answers == "rated" else "labelled steps"
            raise LmgymError(
                f"{where}{name} learns from the {what} of a task, and environment '{self.env.get('name')}' has none; "
                "remove env"
            )
        if answers in ("rated", "steps") and self.algorithm.group_size > 1:
            raise LmgymError(
                f"{where}algorithm.group_size is for sampled answers; here the task gives them, so remove it"
            )
        if self.priority_scale and not self.shuffle:
            raise LmgymError(f"{where}shuffle is false, and priority_scale draws prompts by chance; remove one of them")
        if answers != "policy":
            if self.curriculum is not None:
                raise LmgymError(f"{where}curriculum: nothing is sampled here that could be right or wrong; remove it")
            return
        if self.curriculum is not None and self.algorithm.group_size < 2:
            raise LmgymError(
                f"{where}curriculum: a solve rate needs several answers to a prompt, and algorithm.group_size is "
                f"{self.algorithm.group_size}; raise it to 4 or more"
            )
        if self.algorithm.requirements.served_teacher is not None:
            self._check_served_teacher(where)
        if self.algorithm.restriction is not None:
            self.sampling.check_untruncated(where + registry.name_of("algorithm", type(self.algorithm)))
        if self.sampling.temperature == 0:
            raise LmgymError(
                f"{where}sampling.temperature is 0; training needs answers that differ, so write 1.0 or so"
            )
        if self.algorithm.requirements.reward and not self.rewards and self.env.get("name") == DEFAULT["env"]:
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


Gap = Annotated[float, Gt(0), FINITE, Rule("it must be a number of nats above 0")]


@dataclass(kw_only=True)
class EngineSection(Section):
    """The `engine:` section."""

    section = "engine"

    name: Literal["sampler", "pool", "vllm"] = "sampler"
    """sampler: in the training process; pool: in processes of their own, which Ray places; needs lmgym[ray]; vllm: by
    vLLM, in the training process or on servers that run already (docs/engines.md)."""
    rows: PositiveInt = 256
    """Answers that are decoded side by side."""
    unit: PositiveInt | None = None
    """Answers that are computed together, as one unit of a rollout: the bits depend on it, and not on who computes it.
    Default: the whole rollout; with a pool, one unit for each generator, chosen when the run begins."""
    workers: PositiveInt | None = None
    """Generators of a pool. Default: 2."""
    threads: PositiveInt | None = None
    """CPU threads of each generator of a pool. Default: the run's threads, shared out; chosen when the run begins."""
    address: str | None = None
    """Address of a Ray cluster, as "10.0.0.1:6379" or "auto"; without it Ray is started on this machine. Of vLLM
    servers: "http://127.0.0.1:8000", several separated by commas; without it vLLM runs in the training process."""
    seconds: Annotated[float, Gt(0), FINITE, Rule("it must be above 0 seconds")] | None = None
    """Longest time that a generator of a pool may take for a unit; then another one takes its place. Of vLLM the
    longest time for one answer. Default: 600."""
    cache_gib: PositiveFloat | None = None
    """GiB for the keys and values of vLLM in the training process. Default: 1."""
    ahead: Literal[0, 1] = 0
    """1: while a step updates the policy, a pool samples the next step's answers, with the weights before that update.
    The algorithm must weigh answers of older weights (grpo: correction)."""
    captured: bool = False
    """Decoding steps of fixed shapes, which CUDA graphs replay; not measured on a GPU yet."""
    gap_at_load: Gap | None = None
    """Nats per token that sampled and scored log-probabilities may differ from the model's own forward pass, on
    average, when it proves itself before training. Default: what the precision explains (docs/models.md)."""
    gap_warning: Gap | None = None
    """Warn if sampled and trained log-probabilities differ by more nats per token, on average over a step. Default:
    what the precision explains, from 0.001 to 0.1."""
    gap_error: Gap | None = None
    """End the run if they differ by more. Default: ten times gap_warning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gap_error is not None and self.gap_error < (self.gap_warning or 0.0):
            raise LmgymError(
                f"engine.gap_error is {self.gap_error}, below engine.gap_warning ({self.gap_warning}); make it larger"
            )
        elsewhere = {"workers": "pool", "threads": "pool", "address": "pool or vllm", "seconds": "pool or vllm"}
        elsewhere["cache_gib"] = "vllm"
        for key, names in elsewhere.items():
            if getattr(self, key) is not None and self.name not in names.split(" or "):
                raise LmgymError(f"engine.{key} is for another engine; write engine.name: {names}, or remove it")
        if self.ahead and self.name == "sampler":
            raise LmgymError("engine.ahead: the sampler reads the weights that the update changes; write name: pool")
        if self.name == "vllm":
            self._check_vllm()

    def _check_vllm(self) -> None:
        """Raise LmgymError for what vLLM does not take."""
        given = (self.address or "http://").split(",")
        if not all(one.strip().startswith(("http://", "https://")) for one in given):
            raise LmgymError(
                f"engine.address is {self.address}; vllm needs the address of each server, such as "
                "http://127.0.0.1:8000, or none to run in this process"
            )
        if self.address and self.cache_gib:
            raise LmgymError("engine.cache_gib is for vLLM in this process; remove it, or engine.address")
        if not self.address and self.seconds:
            raise LmgymError("engine.seconds is a limit of servers; remove it, or give engine.address")
        if not self.address and self.ahead:
            raise LmgymError(
                "engine.ahead: vLLM in the training process computes on the processors that the update needs; give the "
                "addresses of servers (engine.address)"
            )
        for key in ("unit", "captured"):
            if getattr(self, key):
                raise LmgymError(f"engine.{key}: vllm decides itself what is computed together; remove it")


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
    first, the one with the largest advantages, a random one), or of all answers. none: no traces/."""
    traces_gib: PositiveFloat = 1.0
    """Most GiB of traces/: the oldest steps lose their answers first, and keep their table. With three groups of 8
    answers of 500 tokens a step, GRPO fills one GiB in some 5,000 steps."""
    predictions: bool | str = False
    """true: rollouts.jsonl has every answer of each evaluation, not only the first ones. "module:function": this
    function writes them in its own way; it gets the run folder, the number of updates, the split and the episodes."""


@dataclass(kw_only=True)
class Config(Section):
    """A whole run.

    Example: Config(stages=[Stage(task={"name": "arithmetic"}, rewards={"final_answer": 1.0}, steps=50)])
    """

    seed: int = 0
    """What all random numbers of the run come from."""
    out: str | None = None
    """Run folder; without it runs/<recipe's name>, numbered where that exists."""
    threads: Annotated[int, Ge(1), Le(4096)] | None = None
    """CPU threads; without it torch's own choice. Written to the run folder, and kept when resuming."""
    plugins: list[str] = field(default_factory=list)
    """Modules or .py files that register the user's own algorithms, rewards, tasks."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    """module:class of the user's own: its arguments. Called at each step, evaluation and checkpoint."""
    policy: PolicySection = field(default_factory=PolicySection)
    engine: EngineSection = field(default_factory=EngineSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    logs: LogsSection = field(default_factory=LogsSection)
    distributed: DistributedSection = field(default_factory=DistributedSection)
    reward_timeout: Annotated[float, Gt(0), Rule("it must be above 0 seconds")] = 60.0
    """Seconds after which a reward function that has not returned ends the run (docs/rewards.md says for which rewards
    this can be enforced)."""
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
        if self.engine.name == "vllm" and self.distributed.sharding != "none":
            raise LmgymError("distributed.sharding: with engine vllm each rank holds the whole model; remove it")
        if self.engine.name != "sampler" and self.policy.quantise is not None:
            raise LmgymError("engine.name: packed weights stay in the training process; write sampler")
        for stage in self.stages:
            stage.check(f"stage '{stage.name}': " if len(self.stages) > 1 else "")
            if self.distributed.sharding != "none" and stage.algorithm.driver == "trust_region":
                raise LmgymError(
                    f"distributed.sharding: stage '{stage.name}' multiplies with the Fisher matrix, which needs all "
                    "weights on each rank; remove it, or take a first-order algorithm such as ppo"
                )
            if self.engine.name != "sampler" and stage.algorithm.restriction is not None:
                raise LmgymError(
                    f"engine.name: stage '{stage.name}' samples within a restriction by a frozen policy, which only "
                    "the training process holds; write sampler"
                )
            if self.engine.name == "vllm" and stage.sampling.more_than_top_k:
                raise LmgymError(
                    "engine.name: vllm knows the sets of sampling.top_k, not those of top_p and min_p, which stage "
                    f"'{stage.name}' asks for; write top_k instead, or engine.name: sampler"
                )
            if (
                self.engine.ahead
                and stage.algorithm.requirements.answers == "policy"
                and not stage.algorithm.weighs_old
            ):
                name = registry.name_of("algorithm", type(stage.algorithm))
                raise LmgymError(
                    f"engine.ahead: the answers of stage '{stage.name}' come from older weights, which {name} does not "
                    "correct for as it is; take grpo or a preset of it, with algorithm.correction: truncated"
                )
            if self.engine.ahead and stage.curriculum is not None:
                raise LmgymError(
                    f"engine.ahead: the curriculum of stage '{stage.name}' chooses a step's prompts by the answers of "
                    "the one before, and ahead samples them earlier; remove one of them"
                )
            registry.get("driver", stage.algorithm.driver)  # raises where there is none of this name
        for name in self.logs.sinks:
            registry.get("sink", name)
        if isinstance(self.logs.predictions, str):
            registry.load_attribute(self.logs.predictions, "logs.predictions")
        for stage in self.stages:
            if stage.early_stop is not None and not self.evaluation.examples:
                raise LmgymError("early_stop judges by evaluations, and evaluation is null; remove one of them")
            self.evaluation.decoding(stage.sampling)  # raises where the two do not go together
            if stage.algorithm.requirements.makes != "policy":
                self._check_reward_model(stage)
            if stage.algorithm.requirements.values and self.policy.critic == "none":
                name = registry.name_of("algorithm", type(stage.algorithm))
                raise LmgymError(f"{name} needs a value function, and policy.critic is none; write head or separate")

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
