"""A recipe that is filled in from a table: every line says where it came from, and nothing of the file is lost.

A table (tables/SYSTEM.yaml) has sections of rows, their key: our key. Blanks part the names of a key in other versions.
A row may be a list: our key, what they have where the key is left out (if lmgym has something else), the name of a
conversion. Or it is a choice: what each of their values sets; there `say` is a sentence, `cannot` an obstacle, and
`also` another section. What stands under `always` is set in any case."""

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
from lmgym.compat.settings.settings import Code, Settings
from lmgym.config.build import build_config
from lmgym.config.yaml import write_yaml
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.visible import visible
from lmgym.updates.optimizer import OptimizerSection

FIRST = ("seed", "policy", "task", "env", "rewards", "algorithm", "sampling", "optimizer", "prompts_per_step", "epochs")
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
    "schedule": lambda name: re.sub("_with_warmup|(_warmup)?_with_min_lr", "", str(name)).lower(),
    "sinks": lambda names: [one for one in ([names] if isinstance(names, str) else names) if one in SINKS] or None,
    "not default": lambda name: None if name == "default" else name,
    "not main": lambda name: None if name == "main" else name,
    "whole": lambda value: value if value >= 1 else None,
    "share": lambda value: {"name": "top_entropy", "share": value} if value < 1 else None,
    "minus": lambda value: -value,
    "half": lambda value: value / 2,
    "rest of 1": lambda value: round(1 - value, 12),
    "less 1": lambda value: value - 1,
    "first": lambda value: value[0],
    "second": lambda value: value[1],
    "targets": lambda names: "all-linear" if names == ["all-linear"] else names,
    "layers": lambda names: names if isinstance(names, list) or names == "all-linear" else [names],
}


@dataclass
class Draft:
    """A recipe that grows, and what has to be said about it.

    `sources`: of each key of the recipe where it is from; `obstacles`: what has to be filled in or cannot be had;
    `differs`: what trains otherwise than there."""

    system: str
    settings: Settings
    path: Path
    table: Mapping[str, Any]
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

    def drop(self, ours: str) -> None:
        """Leave a key out of the recipe again, if it is there."""
        parents, _, last = ours.rpartition(".")
        (self.get(parents) or {}).pop(last, None)
        self.sources.pop(ours.replace(".", "/"), None)

    def get(self, ours: str) -> Any:
        """The value that a key of the recipe has so far; None if it has none."""
        node: Any = self.recipe
        for key in ours.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        return node

    def where(self, names: str) -> str:
        """Name and place of a key of theirs."""
        key = self.settings.key(names)
        return f"{key}, {self.settings.given[key].where}" if key else f"{self.system}'s default of {names.split()[0]}"

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

    def number(self, names: str, default: float) -> Any:
        """The same of a number above 0."""
        value = self.value(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
            self.obstacles.append(f"{self.where(names)}: {value!r} is no number above 0; read as {default}")
            return default
        return value

    def fill(self, *sections: str) -> None:
        """Set all keys of sections of the table that the file has, or that have another default than lmgym's."""
        for names, row in [pair for name in sections for pair in self.table[name].items()]:
            if names == "always":
                for ours, value in row.items():
                    self.put(ours, value, f"as {self.settings.program or self.system} does")
                continue
            if isinstance(row, Mapping):
                self._choose(names, row)
                continue
            ours, default, how = [*([row] if isinstance(row, str) else row), None, None][:3]
            value = self.value(names, default)
            try:
                value = HOW[how](value) if how and value is not None else value
            except (TypeError, ValueError, AttributeError, IndexError, KeyError):
                self.obstacles.append(f"{self.where(names)}: {value!r} cannot be read; write {ours} yourself")
                continue
            if value is not None:
                self.put(ours, value, self.where(names))

    def _choose(self, names: str, row: Mapping[str, Any]) -> None:
        given = self.value(names, row.get("default"))
        first = str(given[0] if isinstance(given, list) and len(given) == 1 else given).lower()
        choices = {str(values).lower(): keys for values, keys in row.items() if values != "default"}
        chosen = next((keys for values, keys in choices.items() if first in values.split()), choices.get("*"))
        if chosen is None and given is not None:
            known = ", ".join(" ".join(choices).split())
            self.obstacles.append(f"{self.where(names)}: lmgym has no {given}; it has {known}")
        for ours, value in (chosen or {}).items() if given is not None else ():
            if ours == "also":
                self.fill(value)
            elif ours in ("say", "cannot"):
                (self.differs if ours == "say" else self.obstacles).append(f"{self.where(names)}: {value}")
            else:
                self.put(ours, value, self.where(names))

    def length(self, steps: str, epochs: str, default: float, updates: float = 1) -> None:
        """How long it trains: `steps` if they are above 0, of which a step of lmgym makes several; else `epochs`."""
        given = self.settings.take(steps)
        if isinstance(given, int | float) and 0 < given < 1e6:
            several = f", / {updates:g} updates a step" if updates > 1 else ""
            self.put("steps", ceil(given / updates), self.where(steps) + several)
            if self.settings.key(epochs):
                self.differs.append(f"{self.where(epochs)}: the end, where it comes before the last step")
        else:
            self.put("epochs", self.number(epochs, default), self.where(epochs))

    def minibatches(self, count: float, source: str) -> int:
        """Optimizer steps of a batch."""
        if (whole := max(round(count), 1)) > 1:
            self.put("algorithm.minibatches", whole, source)
        return whole

    def end(self, names: str, default: float | None = None) -> None:
        """The last learning rate, which they give as a rate and a recipe as a share of the peak."""
        peak, last = self.get("optimizer.learning_rate") or OptimizerSection.learning_rate, self.value(names, default)
        if isinstance(peak, int | float) and isinstance(last, int | float):
            self.put("optimizer.final_fraction", last / peak, f"{self.where(names)}, / {peak:g}")

    def data(self, names: str, default: Any = None, task: str = "data") -> None:
        """The `task:` section of a file or of a data set on the Hub."""
        given = self.value(names, default)
        self.put("task.name", task, "the data of the file")
        paths = [str(one) for one in (given if isinstance(given, list) else [given]) if one is not None]
        if not paths:
            self.put("task.path", "data.jsonl", "yours")
            self.obstacles.append("the file does not say where the data is; write task.path or task.hub_id")
        elif any(one[:1] in "/.~" or one.endswith((".json", ".jsonl", ".csv", ".parquet")) for one in paths):
            self.put("task.path", paths if len(paths) > 1 else paths[0], self.where(names))
        else:
            self.put("task.hub_id", paths[0], self.where(names))

    def finish(self) -> None:
        """Leave the algorithm and its surrogate only the keys that they have; the others are told. Then build the
        recipe once, and tell what would be refused."""
        own: dict[str, Any] = self.recipe.setdefault("algorithm", {})
        kind = registry.get("algorithm", own.setdefault("name", "grpo"))
        known, surrogate = {"name", *(f.name for f in fields(kind))}, own.get("surrogate", {})
        for bound in ("low", "high") if "surrogate" not in known else ():
            if bound in surrogate and f"clip_{bound}" in known:
                source = self.sources.pop(f"algorithm/surrogate/{bound}")
                self.put(f"algorithm.clip_{bound}", surrogate.pop(bound), source)
        if "surrogate" in known:
            part = registry.get("surrogate", surrogate.get("name", "clip"))
            beside = {"dual"} if surrogate.get("ratio") == "sequence" else set()
            self._drop(surrogate, {"name", *(f.name for f in fields(part))} - beside, "algorithm/surrogate/")
        self._drop(
            own, known - ({"epochs", "minibatches"} if issubclass(kind, PolicyGradient) else set()), "algorithm/"
        )
        if self.get("task.name") == "data" and not (self.get("task.test_path") or self.get("task.splits.test")):
            self.differs.append("a tenth of data without a test split is held out for evaluations (task.test)")
        if self.get("rewards.reward_model") and not self.get("rewards.reward_model.model"):
            del self.recipe["rewards"]["reward_model"]  # normalised, and there is none
        rewards = {name: given for name, given in self.recipe.get("rewards", {}).items() if ":" not in name}
        built = {**self.recipe, "rewards": rewards or {"words": 1.0}}  # a function of a module is not imported
        try:
            build_config(built if self.recipe.get("rewards") else self.recipe)
        except LmgymError as error:
            sentence = str(error)
            from_there = [key for key in self.sources if "/" in key and key.replace("/", ".") in sentence]
            source = f" ({self.sources[max(from_there, key=len)]})" if from_there else ""
            self.obstacles.append(sentence + source)

    def _drop(self, section: dict[str, Any], known: set[str], where: str) -> None:
        for key in [key for key in section if key not in known or section[key] == {}]:
            lost = section.pop(key)
            for path in [path for path in self.sources if f"{path}/".startswith(f"{where}{key}/")]:
                source, own = self.sources.pop(path), path.rpartition("/")[2]
                value = lost.get(own) if isinstance(lost, dict) else lost
                usual = value is not True and value in (1, False)
                if not source.startswith(f"{self.system}'s default of") and not usual:
                    self.differs.append(f"{source}: {path.replace('/', '.')} is no key of this algorithm; left out")

    def leftovers(self) -> tuple[list[str], list[str]]:
        """Keys without counterpart, with what happens instead; and keys that do not change the results here."""
        lost, idle, patterns = [], [], str(self.table["idle"]).split()
        for key, (value, where) in self.settings.left.items():
            if key.startswith("def "):
                continue
            note = next((text for pattern, text in self.table["notes"].items() if fnmatch(key, pattern)), "")
            theirs = note.partition(" is usual")[0]
            off = value in (None, False, 0, "", {}, []) and not (value is False and theirs == "True")
            usual = off or str(value) in ("none", theirs)
            if usual or (not note and any(fnmatch(key, pattern) for pattern in patterns)):
                idle += [key] if " of " not in where else []
            else:
                note = f": {note.partition(' is usual; ')[2] or note}" if note else ""
                lost.append(f"{key} = {textwrap.shorten(str(value), 60)} ({where}){note}")
        return lost, idle

    def text(self) -> str:
        """The recipe as YAML, a comment at each line, under a list of what has been said about it."""
        lost, idle = self.leftovers()
        told = " ".join([*self.sources.values(), *self.obstacles, *self.differs, ""])
        counted = [key for key in self.settings.given if key in self.settings.read and f"{key}, " not in told]
        head = [f"Converted from {self.path.name}, a configuration of {self.system} ({self.settings.program})."]
        for title, found in (
            ("To be filled in, or in the way", self.obstacles),
            ("No counterpart here", lost),
            ("Differs", [*self.settings.notes, *self.differs]),
            ("Read together with others", [", ".join(counted)] if counted else []),
            ("Without effect on the results here", [", ".join(_grouped(idle))] if idle else []),
        ):
            head += [f"{title}:"] * bool(found)
            for line in dict.fromkeys(found):
                head += textwrap.wrap(visible(line), 112, initial_indent="  - ", subsequent_indent="    ")
        keys = [*(key for key in FIRST if key in self.recipe), *(key for key in self.recipe if key not in FIRST)]
        lines = _lines({key: self.recipe[key] for key in keys}, self.sources, "")
        return "".join(f"# {visible(line)}\n" for line in head) + "\n" + "\n".join(lines) + "\n"


def _grouped(keys: list[str]) -> list[str]:
    """Keys of one section as one. Example: _grouped(["a.b.c", "a.b.d", "a.b.e", "f"]) -> ["a.b.* (3)", "f"]"""
    sections = {key: ".".join(key.split(".")[:2]) for key in keys}
    count = Counter(sections.values())
    return [*dict.fromkeys(f"{s}.* ({count[s]})" if count[s] > 2 else key for key, s in sections.items())]


def _lines(tree: Mapping[str, Any], sources: Mapping[str, str], prefix: str) -> Iterator[str]:
    indent = "  " * prefix.count("/")
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and any(source.startswith(f"{path}/") for source in sources):
            yield f"{indent}{write_yaml({key: 0})[:-3]}"
            yield from _lines(value, sources, f"{path}/")
            continue
        source, flow = visible(sources.get(path, "")), json.dumps(value, ensure_ascii=False, default=str)
        short = isinstance(value, list | dict) and flow.isascii() and len(flow) < COLUMN
        text = f"{write_yaml({key: 0})[:-2]}{flow}" if short else write_yaml({key: value}).rstrip("\n")
        first, *rest = textwrap.indent(text, indent).split("\n")
        yield from (f"{indent}# {source}", first, *rest) if rest else [f"{first:<{COLUMN}}  # {source}"]
