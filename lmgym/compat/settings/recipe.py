"""A recipe that is filled in from a table: every line says where it came from, and nothing of the file is lost.

A table (tables/SYSTEM.yaml) has sections of rows, their key: our key. A row may be a list: our key, what they have where
the key is left out (if lmgym has something else), and the name of a conversion. Or it is a choice: what each of their
values sets. Blanks in a key part its names in other versions.
"""

import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from math import ceil
from pathlib import Path
from typing import Any

from lmgym.algorithms.reinforce import PolicyGradient
from lmgym.compat.settings.read import Code, Settings
from lmgym.config.build import build_config
from lmgym.config.yaml import write_yaml
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.visible import visible

ORDER = (
    "plugins seed out policy task env rewards algorithm sampling engine optimizer prompts_per_step epochs steps shuffle "
    "max_draws evaluation checkpoint logs"
).split()
COLUMN = 56  # where comments begin
UNKNOWN = re.compile(r"\$(\w+|\{[^{}]*\}|\((?:[^()]|\([^()]*\))*\))")  # what only a shell knows
SINKS = ("wandb", "tensorboard", "trackio")
HOW: Mapping[str, Callable[[Any], Any]] = {  # of their value; None leaves our key out
    "below 1": lambda value: value if value < 1 else None,
    "above 0": lambda value: value if value > 0 else None,
    "0 if below": lambda value: max(value, 0),
    "if true": lambda value: value or None,
    "if false": lambda value: value if not value else None,
    "boolean": bool,
    "schedule": lambda name: str(name).replace("_with_warmup", "").replace("_with_min_lr", "").lower(),
    "sinks": lambda names: [one for one in ([names] if isinstance(names, str) else names) if one in SINKS] or None,
    "not main": lambda name: None if name == "main" else name,
    "whole": lambda value: value if value >= 1 else None,
    "share": lambda value: {"name": "top_entropy", "share": value} if value < 1 else None,
}


@dataclass
class Draft:
    """A recipe that grows, and what has to be said about it.

    `sources`: of each key of the recipe where it is from; `obstacles`: what has to be filled in or cannot be had;
    `differs`: what trains otherwise than there.
    """

    system: str
    settings: Settings
    path: Path
    devices: int | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    obstacles: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)

    def put(self, ours: str, value: Any, source: str) -> None:
        """Set a key of the recipe, written as algorithm.group_size; "rewards/a.b:c" where a name has points."""
        *parents, last = ours.split("/" if "/" in ours else ".")
        node = self.recipe
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
        self.sources["/".join([*parents, last])] = source

    def get(self, ours: str) -> Any:
        """A key of the recipe as it stands; None if it is not set."""
        node: Any = self.recipe
        for key in ours.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        return node

    def copy(self, ours: str, names: str, default: Any = None) -> None:
        """Set a key to the value of theirs, if there is one."""
        if (value := self.value(names, default)) is not None:
            self.put(ours, value, self.where(names))

    def where(self, names: str) -> str:
        """Name and place of a key of theirs."""
        known = self.settings.key(names)
        return self.settings.where(names) if known else f"{self.system}'s default of {names.split()[0]}"

    def value(self, names: str, default: Any = None) -> Any:
        """The value of a key; the default too where the file does not say the value itself."""
        value = self.settings.take(names)
        if "$" in str(value) and "/" in str(value) and not isinstance(value, Code):  # a path from elsewhere
            known = [UNKNOWN.sub("", str(one)).lstrip("/") for one in (value if isinstance(value, list) else [value])]
            if all(known) and "$" not in "".join(known):
                self.differs.append(f"{self.where(names)}: {value} read as {', '.join(known)}")
                return known if isinstance(value, list) else known[0]
        if isinstance(value, Code) or (isinstance(value, str) and ("$" in value or value == "...")):
            self.obstacles.append(f"{self.where(names)}: `{value}` is not known from the file alone; write the value")
            return default
        return default if value is None else value

    def number(self, names: str, default: float) -> float:
        """The same of a number above 0."""
        value = self.value(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
            self.obstacles.append(f"{self.where(names)}: {value!r} is no number above 0; read as {default}")
            return default
        return value

    def fill(self, table: Mapping[str, Any]) -> None:
        """Set all keys of a section of the table that the file has, or that have another default than lmgym's."""
        for names, row in table.items():
            if isinstance(row, Mapping):
                self._choose(names, row)
                continue
            ours, default, how = [*([row] if isinstance(row, str) else row), None, None][:3]
            value = self.value(names, default)
            try:
                value = HOW[how](value) if how and value is not None else value
            except (TypeError, ValueError, AttributeError):
                self.obstacles.append(f"{self.where(names)}: {value!r} cannot be read; write {ours} yourself")
                continue
            if value is not None:
                self.put(ours, value, self.where(names))

    def _choose(self, names: str, row: Mapping[str, Any]) -> None:
        given = self.value(names, row.get("default"))
        first = given[0] if isinstance(given, list) and len(given) == 1 else given
        chosen = next((keys for values, keys in row.items() if str(first).lower() in str(values).lower().split()), None)
        if chosen is None and given is not None:
            known = " ".join(str(values) for values in row if values != "default").replace(" ", ", ")
            self.obstacles.append(f"{self.where(names)}: lmgym has no {given}; it has {known}")
        for ours, value in (chosen or {}).items():
            self.put(ours, value, self.where(names))

    def length(self, steps: str, epochs: str, default: float, updates: float = 1) -> None:
        """How long it trains: `steps` if they are above 0, of which a step of lmgym makes several; else `epochs`."""
        given = self.settings.take(steps)
        if isinstance(given, int | float) and 0 < given < 1e6:
            several = f", / {updates:g} updates a step" if updates > 1 else ""
            self.put("steps", ceil(given / updates), self.where(steps) + several)
            self.settings.key(epochs)
        else:
            self.put("epochs", self.number(epochs, default), self.where(epochs))

    def minibatches(self, count: float, source: str) -> int:
        """Optimizer steps of a batch."""
        if (count := max(round(count), 1)) > 1:
            self.put("algorithm.minibatches", count, source)
        return count

    def kl(self, weight: float, names: str, in_loss: bool, kind: str) -> None:
        """The KL to the reference, in the loss or in the reward."""
        if not weight:
            return
        self.put("algorithm.kl_coefficient", weight, self.where(names))
        self.put("algorithm.kl_in", "loss" if in_loss else "reward", "where the penalty is")
        if in_loss and kind == "k2":
            self.put("algorithm.kl_estimator", "k2", f"its estimator, {kind}")
        elif (in_loss and kind != "k3") or (not in_loss and kind != "k1"):
            self.differs.append(
                f"KL {kind} {'in the loss' if in_loss else 'in the reward'}: here {'k3' if in_loss else 'k1'}"
            )
        if in_loss and kind != "k2":
            self.differs.append("KL in the loss: k3 is multiplied by the ratio, so that its gradient is the KL's")

    def data(self, given: Any, names: str, task: str = "data") -> None:
        """The `task:` section of a file or of a data set on the Hub."""
        self.put("task.name", task, "the data of the file")
        paths = [str(one) for one in (given if isinstance(given, list) else [given]) if one is not None]
        local = [one for one in paths if one[:1] in "/.~" or one.endswith((".json", ".jsonl", ".csv", ".parquet"))]
        if not paths or "$" in paths[0]:
            self.put("task.path", "data.jsonl", "yours")
            self.obstacles.append("the file does not say where the data is; write task.path or task.hub_id")
        elif local:
            self.put("task.path", paths if len(paths) > 1 else paths[0], self.where(names))
        else:
            self.put("task.hub_id", paths[0], self.where(names))

    def function(self, file: Any, name: str, weight: float, source: str) -> None:
        """A reward function of a file of the user's."""
        self.put(f"rewards/{Path(str(file)).stem}:{name}", weight, f"{source}; found in the current folder")

    def overlong(self, weight: float, limit: Any, buffer: Any, source: str) -> None:
        self.put("rewards/overlong", {"weight": weight, "max_tokens": limit, "buffer": buffer}, source)

    def fit(self) -> None:
        """Leave the algorithm and its surrogate only the keys that they have; the others are told."""
        own = self.recipe.get("algorithm", {})
        kind = registry.get("algorithm", own.get("name", "grpo"))
        known = {"name", "preset", *(f.name for f in fields(kind))}
        surrogate = own.get("surrogate", {})
        if "surrogate" not in known:
            for bound in ("low", "high"):
                if bound in surrogate and f"clip_{bound}" in known:
                    self.put(f"algorithm.clip_{bound}", surrogate[bound], self.sources[f"algorithm/surrogate/{bound}"])
        else:
            part = registry.get("surrogate", surrogate.get("name", "clip"))
            self._drop(surrogate, {"name", *(f.name for f in fields(part))}, "algorithm/surrogate/")
        if issubclass(kind, PolicyGradient):
            self._drop(own, set(own) - {"epochs", "minibatches"}, "algorithm/")
        if surrogate.get("ratio") == "sequence" and "dual" in surrogate:
            self._drop(surrogate, set(surrogate) - {"dual"}, "algorithm/surrogate/")
        self._drop(own, known, "algorithm/")

    def _drop(self, section: dict[str, Any], known: set[str], where: str) -> None:
        for key in [key for key in section if key not in known or section[key] == {}]:
            source = self.sources.pop(f"{where}{key}", "")
            if "default of" not in source and section[key] != {} and key != "surrogate":
                self.differs.append(f"{source}: {where.replace('/', '.')}{key} is no key of this algorithm; left out")
            del section[key]

    def leftovers(self, table: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Keys without counterpart, with what happens instead; and keys that do not change the results here."""
        lost, idle, patterns = [], [], str(table.get("idle", "")).split()
        for key, (value, where) in self.settings.left.items():
            note = next((text for pattern, text in table.get("notes", {}).items() if fnmatch(key, pattern)), "")
            if not note and (key.startswith("def ") or any(fnmatch(key, pattern) for pattern in patterns)):
                idle += [key] if " of " not in where and not key.startswith("def ") else []
            elif value in (None, False, 0, "", {}, []) or str(value) in (
                "none",
                "disabled",
                note.partition(" is usual")[0],
            ):
                idle += [key] if " of " not in where else []
            else:
                lost.append(f"{key} = {textwrap.shorten(str(value), 60)} ({where}){note and ': ' + note}")
        return lost, idle

    def check(self) -> None:
        """Build the recipe once, and add what would be refused to the obstacles."""
        try:
            build_config(self.recipe)
        except LmgymError as error:
            sentence = str(error)
            own = [key for key in self.sources if key.replace("/", ".") in sentence]
            self.obstacles.append(sentence + (f" ({self.sources[max(own, key=len)]})" if own else ""))


def text(draft: Draft, lost: list[str], idle: list[str]) -> str:
    """The recipe as YAML, a comment at each line, under a list of what has been said about it."""
    head = [f"Converted from {draft.path.name}, a configuration of {draft.system} ({draft.settings.program})."]
    for title, found in (
        ("To be filled in, or in the way", draft.obstacles),
        ("No counterpart here", lost),
        ("Differs", [*draft.settings.notes, *draft.differs]),
        ("Without effect on the results here", [", ".join(_grouped(idle))] if idle else []),
    ):
        head += [f"{title}:"] * bool(found)
        for line in dict.fromkeys(found):
            head += textwrap.wrap(visible(line), 112, initial_indent="  - ", subsequent_indent="    ") or [""]
    ordered = {key: draft.recipe[key] for key in ORDER if draft.recipe.get(key) not in (None, {})}
    return (
        "".join(f"# {visible(line)}\n" for line in head) + "\n" + "\n".join(_lines(ordered, draft.sources, "")) + "\n"
    )


def _grouped(keys: list[str]) -> list[str]:
    """Keys of one section as one. Example: _grouped(["a.b.c", "a.b.d", "a.b.e", "f"]) -> ["a.b.* (3)", "f"]"""
    sections = Counter(".".join(key.split(".")[:2]) for key in keys)
    groups = {key: ".".join(key.split(".")[:2]) for key in keys}
    return [
        *dict.fromkeys(
            f"{groups[key]}.* ({sections[groups[key]]})" if sections[groups[key]] > 2 else key for key in keys
        )
    ]


def _lines(tree: Mapping[str, Any], sources: Mapping[str, str], prefix: str) -> Iterator[str]:
    indent = "  " * prefix.count("/")
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and any(source.startswith(f"{path}/") for source in sources):
            yield f"{indent}{write_yaml({key: 0})[:-3]}"
            yield from _lines(value, sources, f"{path}/")
            continue
        source = visible(sources.get(path, ""))
        flow = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else ""
        if flow.isascii() and 0 < len(flow) < COLUMN:
            yield f"{indent}{write_yaml({key: 0})[:-2]}{flow}".ljust(COLUMN) + f"  # {source}"
            continue
        first, *rest = textwrap.indent(write_yaml({key: value}).rstrip("\n"), indent).split("\n")
        if rest:
            yield from (f"{indent}# {source}", first, *rest)
        else:
            yield f"{first:<{COLUMN}}  # {source}" if source else first
