"""Recognise a configuration of RL4LMs, and read it so that no key is lost.

RL4LMs is the library of Ramamurthy et al., arXiv 2210.01241 (github.com/allenai/RL4LMs, version 0.2.2)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmgym.core import registry
from lmgym.core.builtins import BUILTIN
from lmgym.core.errors import LmgymError
from lmgym.core.validation import converted


def is_rl4lms(tree: Mapping[str, Any]) -> bool:
    """Whether a file's tree follows RL4LMs' schema, whose roots no recipe has.

    Example: is_rl4lms({"datapool": {"id": "imdb"}, "alg": {}}), is_rl4lms({"task": "gsm8k"}) -> (True, False)"""
    return "alg" in tree and "datapool" in tree and not {"task", "algorithm", "policy", "stages"} & set(tree)


@dataclass
class Conversion:
    """An lmgym recipe, and what happened to the keys of the configuration.

    `notes`: keys converted to other units; `warnings`: what differs from RL4LMs; `idle`: keys that do not change the
    results here.

    Example: Conversion({"steps": 50, ...}, notes=["alg.args.n_steps ..."], idle=["tokenizer.padding_side"])"""

    recipe: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


class Section:
    """A mapping of the file that is read key by key; `leftovers` reports the keys that were not read.

    Example:
        >>> section = Section({"n_steps": "128", "gama": 0.9}, "alg.args")
        >>> section.take("n_steps", int, 2048), section.take("verbose", int, 0), section.leftovers()
        (128, 0, ['alg.args.gama'])
    """

    def __init__(self, tree: Any, key: str) -> None:
        if not isinstance(tree, Mapping):
            raise LmgymError(f"'{key}' must be a section of keys and values, not {tree!r}")
        self.key = key
        self._left = dict(tree)
        self._inner: list[Section] = []

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, hint: Any, default: Any = None) -> Any:
        """Remove a key and return its value, converted to the type; the default if it is left out or null."""
        value = self._left.pop(name, None)
        return default if value is None else converted(hint, value, f"{self.key}.{name}")

    def renamed(self, **keys: tuple[str, Any, Any]) -> dict[str, Any]:
        """Take several keys, {RL4LMs' name: (lmgym's name, type, default)}; None is left out."""
        taken = {ours: self.take(theirs, hint, default) for theirs, (ours, hint, default) in keys.items()}
        return {name: value for name, value in taken.items() if value is not None}

    def need(self, name: str, hint: Any) -> Any:
        """As `take`, for a key that RL4LMs requires: LmgymError if it is left out."""
        value = self.take(name, hint)
        if value is None:
            raise LmgymError(f"the configuration lacks the key '{self.key}.{name}'")
        return value

    def section(self, name: str) -> "Section":
        """A section inside this one; empty if it is left out."""
        value = self._left.pop(name, None)
        self._inner.append(Section({} if value is None else value, f"{self.key}.{name}" if self.key else name))
        return self._inner[-1]

    def rest(self) -> dict[str, Any]:
        """Remove and return all keys that have not been read."""
        left, self._left = self._left, {}
        return left

    def peek(self) -> dict[str, Any]:
        """The keys that have not been read, without removing them."""
        return dict(self._left)

    def idle(self, conversion: Conversion, *names: str) -> None:
        """Remove keys that do not change the results here, and report them as idle."""
        for name in names:
            if name in self._left:
                del self._left[name]
                conversion.idle.append(f"{self.key}.{name}")

    def leave_out(self, conversion: Conversion) -> None:
        """Remove all keys that have not been read, each with a warning."""
        for name in self.rest():
            conversion.warn(f"{self.key}.{name}: lmgym has no such argument, so it is left out")

    def leftovers(self) -> list[str]:
        """Dotted keys that have not been read, also of the sections inside."""
        own = [f"{self.key}.{name}" if self.key else str(name) for name in self._left]
        return own + [key for inner in self._inner for key in inner.leftovers()]


def identified(value: Any, key: str) -> tuple[str, Section]:
    """Name and arguments of {id: NAME, args: {...}}."""
    section = Section(value, key)
    name = section.need("id", str)
    arguments = section.section("args")
    if section.peek():
        raise LmgymError(f"unknown key '{section.leftovers()[0]}'; '{key}' has the keys id and args")
    return name, arguments


def is_added(kind: str, name: str) -> bool:
    """Whether the user has registered this name, with RL4LMs' `add` or lmgym's `register`; it then
    replaces RL4LMs' own."""
    return name not in BUILTIN[kind] and name in registry.names(kind)
