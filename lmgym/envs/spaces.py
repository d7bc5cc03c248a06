"""Actions as the spaces of gymnasium hold them: numpy arrays of the space's dtype, tuples, dictionaries."""

import json
import math
from collections.abc import Mapping
from typing import Any

from lmgym.core.errors import LmgymError


def fitted(space: Any, action: Any) -> Any:
    """The action in the form that the space contains, where that is clear: numbers as an array of the space's dtype,
    a list as a tuple. Whether it is in the space is for the caller. Raises ValueError or TypeError for numbers
    that no such array can hold.

    Example: fitted(Box(-1, 1, (2,)), np.array([0.5, 0.1])) -> array([0.5, 0.1], dtype=float32)"""
    import numpy as np
    from gymnasium import spaces

    if isinstance(space, spaces.Dict) and isinstance(action, Mapping) and set(action) == set(space.spaces):
        return {name: fitted(part, action[name]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple) and isinstance(action, list | tuple) and len(action) == len(space.spaces):
        return tuple(fitted(part, value) for part, value in zip(space.spaces, action, strict=True))
    if isinstance(space, spaces.Sequence) and isinstance(action, list | tuple) and not space.stack:
        return tuple(fitted(space.feature_space, value) for value in action)
    if isinstance(space, spaces.OneOf) and isinstance(action, list | tuple) and len(action) == 2:
        chosen = action[0]
        if isinstance(chosen, int) and 0 <= chosen < len(space.spaces):
            return np.int64(chosen), fitted(space.spaces[chosen], action[1])
    if isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
        if isinstance(action, list | tuple | np.ndarray):
            return _array(space, action)
        if space.shape == () and isinstance(action, int | float) and not isinstance(action, bool):
            return _array(space, action)
    return action


def _array(space: Any, numbers: Any) -> Any:
    """The numbers as an array of the space's dtype. Raises ValueError for one that it cannot hold: 0.5 in an
    integer dtype, 300 in uint8, 1e39 in fp32."""
    import numpy as np

    given = np.asarray(numbers)
    with np.errstate(all="ignore"):
        found = given.astype(space.dtype)
    if found.dtype.kind == "f":  # rounding is no matter, an infinity is
        held = np.isfinite(found).all() or not np.isfinite(given.astype(float)).all()
    else:
        held = (found == given).all()
    if not held:
        raise ValueError(f"{space.dtype} cannot hold {numbers}")
    return found


def check_listed(show: str, space: Any) -> None:
    """Raise LmgymError where the text of `env.show` asks for a list of {actions} that a space has no list of."""
    from gymnasium import spaces

    if "{actions}" in show and not isinstance(space, spaces.Discrete):
        raise LmgymError(
            f"env.show: the actions of {space} cannot be listed, only those of a Discrete space can; leave {{actions}} "
            "out, and say in the agent's words what an action is"
        )


def possible(space: Any, mask: Any) -> list[int]:
    """The actions of a space of numbers that the mask leaves; empty for another space.

    Example: possible(Discrete(3), np.array([1, 0, 1], np.int8)) -> [0, 2]"""
    from gymnasium import spaces

    if not isinstance(space, spaces.Discrete):
        return []
    every = range(int(space.start), int(space.start + space.n))
    return [action for action in every if allowed(space, action, mask)]


def allowed(space: Any, action: Any, mask: Any) -> bool:
    """False if the mask, in the form that the space's `sample` takes, forbids this action of the space.

    Example: allowed(Discrete(3), 1, np.array([1, 0, 1], np.int8)) -> False"""
    from gymnasium import spaces

    if mask is None:
        return True
    if isinstance(space, spaces.Discrete):
        return bool(mask[int(action) - int(space.start)])
    if isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
        numbers = zip(action, space.start, mask, strict=True)
        return all(bool(own[int(number) - int(start)]) for number, start, own in numbers)
    if isinstance(space, spaces.MultiBinary):  # 0 and 1 are the only value there, 2 leaves both
        return bool(((mask == 2) | (mask == action)).all())
    if isinstance(space, spaces.Tuple):
        return all(allowed(*parts) for parts in zip(space.spaces, action, mask, strict=True))
    if isinstance(space, spaces.Dict):
        return all(allowed(part, action[name], mask.get(name)) for name, part in space.spaces.items())
    return True


def read_action(space: Any, text: str, numbers: list[float]) -> Any:
    """The action that a text means. A space of several parts is read as JSON; a space of texts takes the text; any
    other takes the numbers in the text. Raises ValueError for one that is not whole where actions are numbered, and for
    one that is too large."""
    from gymnasium import spaces

    if _is_composite(space):
        return json.loads(text)
    if isinstance(space, spaces.Text):
        return text if space.contains(text) else text.strip()
    if isinstance(space, spaces.Discrete):
        if not numbers[0].is_integer():
            raise ValueError(f"{numbers[0]} is no number of an action")
        return int(numbers[0])
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a number is too large")
    if space.shape is not None and len(space.shape) != 1 and len(numbers) == math.prod(space.shape):
        return fitted(space, numbers).reshape(space.shape)
    return numbers


def written_action(space: Any, action: Any) -> str:
    """A text that `read_action` reads as this action: with three decimals, or exactly where these leave the space."""
    exact = _tree(action)
    rounded = _rounded(exact)
    tree = rounded if space.contains(fitted(space, rounded)) else exact
    if _is_composite(space):
        return json.dumps(tree, ensure_ascii=False)
    return tree if isinstance(tree, str) else " ".join(_numbers(tree))


def _is_composite(space: Any) -> bool:
    from gymnasium import spaces

    return isinstance(space, spaces.Tuple | spaces.Dict | spaces.OneOf | spaces.Sequence)


def _tree(action: Any) -> Any:
    """Plain values of Python in place of numpy's."""
    if isinstance(action, Mapping):
        return {name: _tree(value) for name, value in action.items()}
    if isinstance(action, list | tuple):
        return [_tree(value) for value in action]
    return action.tolist() if hasattr(action, "tolist") else action


def _rounded(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _rounded(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_rounded(value) for value in tree]
    return round(tree, 3) if isinstance(tree, float) else tree


def _numbers(tree: Any) -> list[str]:
    if isinstance(tree, list):
        return [text for part in tree for text in _numbers(part)]
    if isinstance(tree, float) and tree == round(tree, 3):
        return [f"{tree:.3f}".rstrip("0").rstrip(".")]
    return [f"{tree:.17f}".rstrip("0") if isinstance(tree, float) else str(int(tree))]
