"""Whether a policy computes with kernels of lmgym's own on a CPU: if they are made for such a policy, can be had here,
and agree with torch's in a trial. native_trial.py has those for sampling, training_trial.py those for updates."""

from collections.abc import Callable
from typing import Literal

from lmgym.core.errors import LmgymError
from lmgym.models.policy import Policy

Kernels = Literal["auto", "torch", "native"]


def chosen(
    policy: Policy,
    key: str,
    wanted: Kernels,
    made_for: str,
    serves: Callable[[Policy], bool],
    compiled: Callable[[], object],
    try_out: Callable[[Policy], None],
) -> tuple[bool, str]:
    """Whether the kernels of `policy.<key>` are taken, and if not, why not where they would serve. `serves` says for
    which policies they are made (`made_for` in words); `compiled` and `try_out` raise LmgymError where they cannot be
    had, or disagree. "native" is not tried; it raises LmgymError where there are none.

    Example: chosen(policy, "kernels", "auto", ...) -> (False, "there is no C++ compiler (g++)")"""
    if wanted == "torch" or (wanted == "auto" and not serves(policy)):
        return False, ""
    try:
        if not serves(policy):
            raise LmgymError(f"they are for {made_for}")
        compiled()
        if wanted == "auto":
            try_out(policy)
    except LmgymError as error:
        if wanted == "auto":
            return False, str(error)
        raise LmgymError(f"policy.{key}: native ones cannot be used: {error}; write {key}: torch") from error
    return True, ""
