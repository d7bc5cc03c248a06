"""What a configuration says: its values by key, each with the line that it is from."""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from lmgym.config.yaml import load_yaml

PLAIN = {"true": True, "false": False, "null": None, "none": None, "": None}


class Setting(NamedTuple):
    """A value of a configuration file, and the line that it is from. Example: Setting(1e-6, "line 12")"""

    value: Any
    where: str


class Code(str):
    """An expression of a script that is no plain value. Example: Code("args.lr")"""


@dataclass
class Settings:
    """What a configuration says. `take` marks a key as read; `left` has the others.

    `program`: what it is for, such as "GRPOTrainer sft.py"; `notes`: what the reader of the recipe has to know."""

    given: dict[str, Setting] = field(default_factory=dict)
    program: str = ""
    notes: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)

    def key(self, names: str) -> str | None:
        """Which of several names of a key (in a text, with blanks between them) is given; a plain value comes first."""
        found = [name for name in names.split() if name in self.given]
        self.read |= set(found)
        return min(found, key=lambda name: isinstance(self.given[name].value, Code), default=None)

    def take(self, names: str, default: Any = None) -> Any:
        """The value of a key; the default, if it is left out or null."""
        key = self.key(names)
        value = self.given[key].value if key else None
        for _ in range(9):  # OmegaConf's ${a.b}; ${.b} is beside the key, ${..b} a level above
            found = re.fullmatch(r"\$\{(\.*)([\w.]+)\}", value) if isinstance(value, str) else None
            if not found:
                break
            above = (key or "").split(".")[: -len(found[1])] if found[1] else []
            key = ".".join([*above, found[2]])
            if key not in self.given:
                break
            value = self.given[key].value
        return default if value is None else value

    @property
    def left(self) -> dict[str, Setting]:
        return {key: setting for key, setting in self.given.items() if key not in self.read}


def scalar(text: Any) -> Any:
    """What a text of a command line or of YAML means: a number, true, null, a list; else the text.

    Example: scalar("1e-6"), scalar("True"), scalar("[a, b]"), scalar("null") -> 1e-06, True, ["a", "b"], None"""
    if isinstance(text, list):
        return [scalar(one) for one in text]
    if not isinstance(text, str) or isinstance(text, Code):
        return text
    if (word := text.strip().lower()) in PLAIN:
        return PLAIN[word]
    for kind in (int, float) if len(text) < 40 else ():
        with suppress(ValueError):
            return kind(text)
    if text[:1] in "[{(" and text[-1:] in "]})":
        with suppress(yaml.YAMLError, ValueError, RecursionError):
            return scalar(load_yaml(text if text[0] != "(" else f"[{text[1:-1]}]"))
    return text
