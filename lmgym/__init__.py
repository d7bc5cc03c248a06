"""lmgym trains language models by reinforcement learning.

The public names, nothing else; each is imported when it is first used, so `import lmgym` loads no torch.

Example:
    >>> import lmgym
    >>> lmgym.train(lmgym.load_config("quickstart", ["stages.rl.steps=20"]))

A loop of one's own has the lines of lmgym/training/loop.py: `start`, `stages_left`, and then for each step
`begin_step`, `gather`, `collate_step`, `prepare`, `begin_trace`, `update`, `advance`, `log_step`,
`evaluate_and_save_when_due`."""

import importlib
from typing import Any

import lmgym.core.waiting  # noqa: F401 (sets how torch's threads wait, before torch is imported)

__version__ = "0.1.0"

_HOMES = {
    # data
    "Example": "types",
    "RatedAnswer": "types",
    "LabelledStep": "types",
    "Turn": "types",
    "Episode": "types",
    "Batch": "batch",
    "PolicyOutputs": "batch",
    # recipes
    "Config": "config.schema",
    "Stage": "config.schema",
    "load_config": "config.build",
    # algorithms
    "Algorithm": "algorithms.base",
    "Reinforce": "algorithms.reinforce",
    "RLOO": "algorithms.reinforce",
    "GRPO": "algorithms.grpo.algorithm",
    "GroupRelative": "algorithms.grpo.group_relative",
    "Credit": "algorithms.grpo.credit",
    "Surrogate": "algorithms.grpo.surrogate",
    "Correction": "algorithms.grpo.correction",
    "Tokens": "algorithms.grpo.tokens",
    "PPO": "algorithms.actor_critic",
    "A2C": "algorithms.actor_critic",
    "TRPO": "algorithms.trpo",
    "NLPO": "algorithms.nlpo",
    "RAFT": "algorithms.raft",
    "DPO": "algorithms.dpo",
    "ORPO": "algorithms.orpo",
    "KTO": "algorithms.kto",
    "RewardModel": "algorithms.reward_model",
    "ProcessRewardModel": "algorithms.process_reward_model",
    "OnlineDPO": "algorithms.online_dpo",
    "XPO": "algorithms.xpo",
    "NashMD": "algorithms.nash_md",
    "Distill": "algorithms.distill",
    "GKD": "algorithms.gkd",
    "Replay": "algorithms.replay",
    "Supervised": "algorithms.supervised",
    # models, engines, environments
    "Policy": "models.policy",
    "PolicySection": "models.policy_section",
    "load_policy": "models.load",
    "Sampling": "inference.base",
    "Request": "inference.base",
    "Sampler": "inference.sampler",
    "Env": "envs.base",
    "Step": "envs.base",
    "Agent": "envs.agent",
    # a whole run
    "train": "training.loop",
    "evaluate": "rollouts.evaluate",
    # the loop, line by line
    "start": "training.setup",
    "stages_left": "training.loop",
    "begin_stage": "training.begin_stage",
    "evaluate_before": "training.loop",
    "Callback": "training.callbacks",
    "begin_step": "training.loop",
    "gather": "training.loop",
    "collect": "rollouts.rollout",
    "demonstrate": "rollouts.rollout",
    "apply_rewards": "rollouts.rollout",
    "collate_step": "training.loop",
    "collate": "batch",
    "OptimizerSection": "updates.optimizer",
    "make_optimizer": "updates.optimizer",
    "prepare": "updates.prepare",
    "begin_trace": "training.tracing",
    "update": "updates.update",
    "advance": "training.loop",
    "log_step": "training.loop",
    "evaluate_and_save_when_due": "training.loop",
    "save_checkpoint": "training.stage_checkpoint",
    "end_stage": "training.loop",
    "finish": "training.evaluation_points",
    # plugins
    "Sink": "logs.sinks",
    "LmgymError": "core.errors",
    "register": "core.registry",
    "check_env": "envs.check",
    "check_task": "tasks.base",
    "check_reward": "rewards.check",
    "check_algorithm": "training.algorithm_check",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lmgym' has no attribute '{name}'")
    return getattr(importlib.import_module(f"lmgym.{_HOMES[name]}"), name)
