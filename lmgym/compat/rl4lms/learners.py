"""Algorithms, wrappers and policies of the user's: check that lmgym can use them, else raise one sentence.

An algorithm of RL4LMs, built on stable-baselines3, owns its environments (one token a step), rollout buffer and policy.
lmgym hands an algorithm columns of tensors of whole answers, so such a class cannot run here. Its advantages and its
loss are a few lines of an lmgym algorithm (docs/contract.md)."""

import inspect
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from lmgym.core.errors import LmgymError

BASES_OF_SB3 = ("BaseAlgorithm", "OnPolicyAlgorithm", "OffPolicyAlgorithm")


def wrap_onpolicy_alg(alg_class: type) -> type:
    """Return the algorithm unchanged: the trainer does rollouts, KL penalty, reward normalisation and warm starts.

    Example: wrap_onpolicy_alg(PPO) is PPO -> True"""
    return alg_class


def check_algorithm(id: str, cls: Any) -> None:
    """Raise LmgymError unless `cls` is an algorithm of lmgym's interface."""
    from lmgym.algorithms.base import Algorithm

    if isinstance(cls, type) and issubclass(cls, Algorithm) and is_dataclass(cls):
        return
    names = {base.__name__ for base in getattr(cls, "__mro__", ())}
    what = "an algorithm of stable-baselines3's interface" if names & {*BASES_OF_SB3} else f"{cls!r}"
    raise LmgymError(
        f"algorithm '{id}' is {what}, and lmgym takes a dataclass that inherits from lmgym.algorithms.base.Algorithm "
        "(or PPO, A2C, NLPO, TRPO) and has advantages() and loss(); see docs/contract.md"
    )


def check_wrapper(id: str, wrapper: Any) -> None:
    """Raise LmgymError unless a wrapper is a function of an algorithm's class alone."""
    needed: list[Any] = []
    if callable(wrapper):
        empty = inspect.Parameter.empty
        needed = [p for p in inspect.signature(wrapper).parameters.values() if p.default is empty and p.kind < 2]
    if len(needed) != 1:
        raise LmgymError(
            f"wrapper '{id}' must be a function of one argument, the algorithm's class, that returns a class: lmgym "
            "collects rollouts and pays the KL penalty itself, so alg_kwargs, kl_coeff and tracker have no use "
            "(wrap_onpolicy_alg of lmgym.compat.rl4lms.learners changes nothing)"
        )


def check_policy(id: str, policy: Any) -> None:
    """Check settings, or register a class with transformers; raise LmgymError for anything else."""
    from lmgym.config.build import build
    from lmgym.models.custom_architectures import is_model_class, make_known
    from lmgym.models.policy_section import PolicySection

    if isinstance(policy, Mapping):
        build(PolicySection, policy, "policy.")
    elif is_model_class(policy):
        make_known(policy)
    else:
        raise LmgymError(
            f"policy '{id}': lmgym's policy is any model of transformers with a value head on its trunk or on a copy "
            "of it, so there is no actor-critic class to write; add settings of the recipe's policy section, such as "
            "{'critic': 'separate'}, or a PreTrainedModel with an LM head for an architecture of your own, not "
            f"{policy!r}"
        )
