"""GRPO's family for tests, by keys of a recipe: parts, and the former keys, which are shorter."""

import warnings
from typing import Any

from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.config.build import build


def grpo(preset: str = "grpo", kind: type[GRPO] = GRPO, **keys: Any) -> Any:
    """The algorithm of a preset (or the plain one) with some keys changed.

    Example: grpo("dapo", group_size=4, clip_high=0.3).surrogate.high -> 0.3
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        changed = kind.in_present_keys("grpo", {"preset": preset, **keys}, "algorithm.")
    changed.pop("preset")
    return build(kind, {**kind.presets.get(preset, {}), **changed}, "algorithm.")
