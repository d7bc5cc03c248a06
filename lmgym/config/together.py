"""Which sections of a recipe do not go together: each is checked by itself (core/validation.py), and all here."""

from collections import Counter
from collections.abc import Mapping

from lmgym.config.schema import Config, Stage
from lmgym.config.yaml import DEFAULT
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.functional.distribution_sums import SUMS
from lmgym.models.policy_section import PolicySection


def check_together(config: Config) -> None:
    """Raise LmgymError for sections that do not go together."""
    sharded, kind = config.distributed.sharding != "none", config.engine.kind
    for name, count in Counter(stage.name for stage in config.stages).items():
        if count > 1:
            raise LmgymError(f"two stages are called '{name}'; give each its own 'name'")
    if sharded and config.policy.quantise is not None:
        raise LmgymError("distributed.sharding: packed weights cannot be cut; remove it, or policy.quantise")
    if sharded and config.policy.products == "onednn":
        raise LmgymError("distributed.sharding: oneDNN multiplies whole weights; remove it, or policy.products")
    if config.policy.parity == "exact":
        _check_exact(config)
    if sharded and not kind.parts:
        raise LmgymError(
            f"distributed.sharding: with engine {config.engine.name} each rank holds the whole model; remove it"
        )
    if not kind.shares_weights and config.policy.quantise is not None:
        raise LmgymError("engine.name: packed weights stay in the training process; write sampler")
    for stage in config.stages:
        _check_stage(stage, f"stage '{stage.name}': " if len(config.stages) > 1 else "")
        driver = registry.get("driver", stage.algorithm.driver)  # raises where there is none of this name
        if sharded and getattr(driver, "whole_weights", False):
            raise LmgymError(
                f"distributed.sharding: stage '{stage.name}' multiplies with the Fisher matrix, which needs all "
                "weights on each rank; remove it, or take a first-order algorithm such as ppo"
            )
        _check_engine(config, stage)
    for name in config.logs.sinks:
        registry.get("sink", name)
    if isinstance(config.logs.predictions, str):
        registry.load_attribute(config.logs.predictions, "logs.predictions")
    for stage in config.stages:
        if stage.early_stop is not None and not config.evaluation.examples:
            raise LmgymError("early_stop judges by evaluations, and evaluation is null; remove one of them")
        if config.reward_watch.every and stage.is_played and stage.rewards:
            raise LmgymError(
                f"reward_watch adds tricks to answers of one turn, and stage '{stage.name}' has environment "
                f"'{stage.env.get('name')}'; remove reward_watch"
            )
        config.evaluation.decoding(stage.sampling)  # raises where the two do not go together
        if not stage.algorithm.requirements.makes_policy:
            _check_reward_model(config, stage)
        if stage.algorithm.requirements.values and config.policy.critic == "none":
            name = registry.name_of("algorithm", type(stage.algorithm))
            raise LmgymError(f"{name} needs a value function, and policy.critic is none; write head or separate")


def _check_stage(stage: Stage, where: str) -> None:
    """Raise LmgymError for what is missing, and for sections that do not go together; `where` begins the
    sentence."""
    if not stage.task:
        raise LmgymError(f"{where}the recipe names no task; write, for example, 'task: arithmetic'")
    source, name = stage.source, registry.name_of("algorithm", type(stage.algorithm))
    if stage.algorithm.requirements.hint is not None and stage.is_played:
        raise LmgymError(
            f"{where}algorithm.hint is for tasks of one prompt and one answer, and the stage has environment "
            f"'{stage.env.get('name')}'; remove one of them"
        )
    if source.of_examples and stage.is_played:
        raise LmgymError(
            f"{where}{name} learns from the {source.many} of a task, and environment '{stage.env.get('name')}' has "
            "none; remove env"
        )
    if source.of_examples and stage.algorithm.group_size > 1:
        raise LmgymError(f"{where}algorithm.group_size is for sampled answers; here the task gives them, so remove it")
    if stage.priority_scale and not stage.shuffle:
        raise LmgymError(f"{where}shuffle is false, and priority_scale draws prompts by chance; remove one of them")
    if not source.samples:
        if stage.curriculum is not None:
            raise LmgymError(f"{where}curriculum: nothing is sampled here that could be right or wrong; remove it")
        return
    if stage.curriculum is not None and stage.algorithm.group_size < 2:
        raise LmgymError(
            f"{where}curriculum: a solve rate needs several answers to a prompt, and algorithm.group_size is "
            f"{stage.algorithm.group_size}; raise it to 4 or more"
        )
    if stage.curriculum is not None:
        _check_curriculum(stage, where)
    if stage.algorithm.requirements.given_share and (
        stage.sampling.truncates or stage.env.get("name") != DEFAULT["env"]
    ):
        raise LmgymError(
            f"{where}algorithm.student_share takes references beside sampled answers, so neither an environment "
            "nor sampling.top_k, top_p and min_p go with it; leave them out, or write student_share: 1.0"
        )
    if stage.algorithm.requirements.served_teacher is not None:
        _check_served_teacher(stage, where)
    if stage.algorithm.restriction is not None:
        stage.sampling.check_untruncated(where + name)
    for wanted in stage.algorithm.requirements.distribution_sums:
        if SUMS[wanted].whole and stage.sampling.truncates:
            raise LmgymError(
                f"{where}{name} reads the policy's whole distributions ({wanted}), and sampling.top_k, top_p and "
                "min_p cut tokens off; leave them out"
            )
    if stage.sampling.temperature == 0:
        raise LmgymError(f"{where}sampling.temperature is 0; training needs answers that differ, so write 1.0 or so")
    if stage.algorithm.requirements.reward is True and not stage.rewards and not stage.is_played:
        raise LmgymError(f"{where}the recipe names no reward; write, for example, 'rewards: {{final_answer: 1.0}}'")
    if "overlong" in stage.rewards and getattr(stage.algorithm, "overlong", False):
        raise LmgymError(
            f"{where}rewards.overlong and algorithm.overlong punish the same answers twice; remove the reward, or "
            "set algorithm.overlong to 0"
        )


def _check_curriculum(stage: Stage, where: str) -> None:
    """Raise LmgymError where nothing says whether an answer is right as the curriculum reads it."""
    assert stage.curriculum is not None
    name = stage.curriculum.reward
    if name is not None and name not in stage.rewards:
        raise LmgymError(
            f"{where}curriculum.reward: there is no reward '{name}'; {registry.suggest(name, stage.rewards)}"
        )
    if name is None:
        for reward, section in stage.rewards.items():
            if isinstance(section, Mapping) and section.get("normalise") and section.get("weight", 1.0):
                raise LmgymError(
                    f"{where}curriculum: the score says whether an answer is right, and rewards.{reward}.normalise "
                    "moves it from step to step; name the reward that says it in curriculum.reward"
                )


def _check_served_teacher(stage: Stage, where: str) -> None:
    """Raise LmgymError where answers come from another distribution than the model's own: a server says what its
    model finds likely at temperature 1, with all tokens."""
    if stage.sampling.temperature not in (0.0, 1.0):  # 0 is refused elsewhere
        raise LmgymError(
            f"{where}sampling.temperature is {stage.sampling.temperature}, and a teacher behind an address says its "
            "log-probabilities at 1; write 1.0, or name a model for this process"
        )
    if stage.sampling.truncates or stage.sampling.min_new_tokens:
        raise LmgymError(
            f"{where}sampling.top_k, top_p, min_p and min_new_tokens exclude tokens, and a teacher behind an "
            "address does not say how likely it finds the others among themselves; leave them out, or name a model "
            "for this process"
        )


def _check_exact(config: Config) -> None:
    """Raise LmgymError for sections that do not go with exact parity."""
    if config.distributed.sharding != "none":
        raise LmgymError("policy.parity: exact needs whole weights on each rank; remove it, or distributed.sharding")
    if not config.engine.kind.shares_weights:
        raise LmgymError(
            f"policy.parity: exact is for answers that the training process samples, and {config.engine.name}"
            " samples elsewhere; write engine.name: sampler, or remove it"
        )
    if config.engine.captured:
        raise LmgymError("policy.parity: exact is for a CPU, and engine.captured for a GPU; remove one of them")
    for stage in config.stages:
        name, required = registry.name_of("algorithm", type(stage.algorithm)), stage.algorithm.requirements
        if stage.algorithm.restriction is not None or required.divergence is not None:
            what = "samples within a restriction" if required.divergence is None else "compares whole distributions"
            raise LmgymError(
                f"policy.parity: exact does not serve stage '{stage.name}', whose {name} {what}; remove it"
            )
        if getattr(registry.get("driver", stage.algorithm.driver), "whole_weights", False):
            raise LmgymError(
                f"policy.parity: exact does not serve stage '{stage.name}', whose {name} differentiates twice, as only "
                "torch's own products can be; remove it"
            )


def _check_engine(config: Config, stage: Stage) -> None:
    """Raise LmgymError for a stage that needs what the engine does not support."""
    engine = config.engine.kind
    if not engine.shares_weights and stage.algorithm.restriction is not None:
        raise LmgymError(
            f"engine.name: stage '{stage.name}' samples within a restriction by a frozen policy, which only "
            "the training process holds; write sampler"
        )
    rival = stage.algorithm.requirements.rival
    if rival is not None and rival.share < 1 and (config.engine.unit is not None or not engine.shares_weights):
        key = "engine.unit" if config.engine.unit is not None else f"engine.name: {config.engine.name}"
        raise LmgymError(
            f"{key} cannot sample from a mixture of two models, which algorithm.mixture asks for in stage "
            f"'{stage.name}'; write sampler without engine.unit, or mixture: 1.0"
        )
    if not engine.any_kept_set and stage.sampling.has_unbounded_sets:
        raise LmgymError(
            f"engine.name: {config.engine.name} tells which tokens were left of top_k at most, and stage "
            f"'{stage.name}' has top_p or min_p alone; write sampling.top_k beside them, or engine.name: sampler"
        )
    if config.engine.ahead and stage.source.samples and not stage.algorithm.weighs_old:
        name = registry.name_of("algorithm", type(stage.algorithm))
        raise LmgymError(
            f"engine.ahead: the answers of stage '{stage.name}' come from older weights, which {name} does not "
            "correct for as it is; take grpo or a preset of it, with algorithm.correction: truncated"
        )
    if config.engine.chunk and stage.is_played:
        raise LmgymError(
            f"engine.chunk: stage '{stage.name}' has environment '{stage.env.get('name')}', and only an answer to "
            "a task's prompt goes on with newer weights; remove chunk, or env"
        )
    if config.engine.ahead and stage.curriculum is not None:
        raise LmgymError(
            f"engine.ahead: the curriculum of stage '{stage.name}' chooses a step's prompts by the answers of "
            "the one before, and ahead samples them earlier; remove one of them"
        )


def _check_reward_model(config: Config, stage: Stage) -> None:
    """Raise LmgymError for what a reward model could not be used with later: it scores whole texts."""
    if stage is not config.stages[-1]:
        raise LmgymError(f"stage '{stage.name}' makes a reward model of the policy, so it must be the last stage")
    section, usual = config.policy, PolicySection()
    for key in ("quantise", "max_prompt_tokens", "max_reference_tokens", "answer_start"):
        if getattr(section, key) != getattr(usual, key):
            raise LmgymError(
                f"policy.{key}: stage '{stage.name}' makes a reward model, which reads whole prompts and answers "
                "in full precision; remove it"
            )
