"""lmgym trains language models by reinforcement learning.

The public names, nothing else; each is imported when it is first used, so `import lmgym` loads no torch. The two
verbs live in modules of their own name: `lmgym.training.loop.train` and `lmgym.rollouts.evaluate.evaluate`.

Example:
    >>> import lmgym
    >>> from lmgym.training.loop import train
    >>> train(lmgym.load_config("lmgym/recipes/quickstart.yaml", ["stages.rl.steps=20"]))
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Example": "episode",
    "Turn": "episode",
    "Episode": "episode",
    "Batch": "batch",
    "PolicyOutputs": "batch",
    "collate": "batch",
    "Config": "config.schema",
    "Stage": "config.schema",
    "load_config": "config.build",
    "Algorithm": "algorithms.base",
    "Reinforce": "algorithms.reinforce",
    "RLOO": "algorithms.reinforce",
    "GRPO": "algorithms.grpo",
    "PPO": "algorithms.actor_critic",
    "A2C": "algorithms.actor_critic",
    "TRPO": "algorithms.trpo",
    "NLPO": "algorithms.nlpo",
    "RAFT": "algorithms.raft",
    "Distill": "algorithms.distill",
    "Replay": "algorithms.replay",
    "Supervised": "algorithms.supervised",
    "Policy": "policies.policy",
    "load_policy": "policies.load",
    "Sampling": "engines.base",
    "Sampler": "engines.sampler",
    "Env": "envs.base",
    "Step": "envs.base",
    "Agent": "envs.agent",
    "LmgymError": "errors",
    "register": "registry",
    "check_env": "envs.check",
    "check_task": "tasks.base",
    "check_reward": "rewards.check",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lmgym' has no attribute '{name}'")
    return getattr(importlib.import_module(f"lmgym.{_HOMES[name]}"), name)
