"""Mutants of recipes: of each recipe that comes with lmgym, made small, and of a tiny one of the tests."""

import copy
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lmgym.config.build import build_config, resolved
from lmgym.core import registry
from tests import runs
from tests.torture.damage import at_path, change_bytes, change_tree, near_value, odd_value, paths, typo

SMALL = {"prompts_per_step": 2, "steps": 2}
TASK = {"name": "arithmetic", "size": 16, "test_size": 4, "validation_size": 4, "largest": 3}
KEPT = {"mistakes", "explain", "style", "operations", "system_prompt", "prompt_prefix", "prompt_suffix"}
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
KINDS = ("algorithm", "task", "env", "reward")
YAML_DAMAGE = ("&a [*a]", "&a", "*a", "*nothing", "!!python/object:os.system x", "!!binary x", "!!set {a}", "!x y")
YAML_DAMAGE += ("<<: {a: 1}", "<<: *a", "? [a]", "--- ", "%YAML 9.9", "|", ">", "@", "`", "- -", "!!float x")
YAML_DAMAGE += ("!!int ''", "!!bool x", "!!timestamp x")
YAML_DAMAGE += ("!!timestamp 2025-02-30", "0o9", "1:60", "? ", "{}: {}", "!!omap [a]", "\u2028", "#", "!!null x")
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)  # 9 to the power of 9 items


@dataclass(frozen=True)
class RecipeMutant:
    """A recipe's file and overrides. `unknown` is a key that lmgym must refuse, if that is the only change; `changed`
    the path of the only value that was changed."""

    what: str
    content: bytes
    overrides: tuple[str, ...] = ()
    unknown: str | None = None
    changed: tuple[Any, ...] | None = None


@cache
def bases() -> list[dict[str, Any]]:
    """Trees of small recipes that all are right: as they are written, and with every default written out."""
    written = [runs.tiny(), runs.tiny(policy={**runs.TINY["policy"], "critic": "head"}, algorithm="ppo")]
    for path in sorted((runs.ROOT / "lmgym" / "recipes").glob("*.yaml")):
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        tree["policy"] = runs.TINY["policy"] | {"architecture": runs.ARCHITECTURE | {"max_position_embeddings": 1024}}
        tree |= {"evaluation": {**(tree.get("evaluation") or {}), "examples": 2}, "threads": 1}
        tree.get("evaluation", {}).pop("metrics", None)
        for stage in [tree, *tree.get("stages", [])]:
            stage.update({key: value for key, value in SMALL.items() if key in stage or stage is tree})
            if "sampling" in stage:
                stage["sampling"] = {**stage["sampling"], "max_new_tokens": 4}
                stage["sampling"].pop("min_new_tokens", None)
            if "task" in stage:
                own = stage["task"] if isinstance(stage["task"], dict) else {}
                stage["task"] = {key: own[key] for key in own.keys() & KEPT} | TASK
            stage.pop("early_stop", None)
            if "rewards" in stage:
                stage["rewards"] = {"length": {"target": 6, "unit": "characters"}}
        written.append(tree)
    return written + [resolved(build_config(copy.deepcopy(tree))) for tree in written]


def recipe_mutant(chance: random.Random) -> RecipeMutant:
    """A mutant of one of the recipes."""
    tree = copy.deepcopy(chance.choice(bases()))
    way = chance.random()
    if way < 0.35:
        return _plausible(chance, tree)
    way = (way - 0.35) / 0.65
    if way < 0.15:
        return _text_damage(chance, tree)
    if way < 0.30:
        overrides = [_override(chance, tree) for _ in range(chance.choice([1, 1, 2, 3]))]
        return RecipeMutant("overrides " + " ".join(overrides)[:200], _written(tree), tuple(overrides))
    if way < 0.45:
        words = [_other_name(chance, tree) for _ in range(chance.choice([1, 2]))]
        return RecipeMutant("; ".join(words), _written(tree))
    changes = [change_tree(chance, tree, yaml=True) for _ in range(chance.choice([1, 1, 2, 4]))]
    what = "; ".join(f"{name} {'.'.join(map(str, path))}" for name, path in changes)
    if len(changes) > 1:
        return RecipeMutant(what, _written(tree))
    (name, path), unknown = changes[0], None
    if name == "typo" and path[-2:-1] not in (("rewards",), ("metrics",)):
        unknown = str(path[-1])
    return RecipeMutant(what, _written(tree), unknown=unknown, changed=path if name == "replace" else None)


def _written(tree: Any) -> bytes:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # for deep trees
    try:
        return yaml.dump(tree, sort_keys=False, width=110).encode()
    finally:
        sys.setrecursionlimit(before)


def _text_damage(chance: random.Random, tree: Any) -> RecipeMutant:
    """Damage to the text of the file."""
    content = _written(tree)
    if chance.random() < 0.02:
        return RecipeMutant("alias bomb", BOMB.encode() + content)
    if chance.random() < 0.5:
        lines = content.decode().split("\n")
        place, damage = chance.randrange(len(lines)), chance.choice(YAML_DAMAGE)
        line = lines[place]
        lines[place] = chance.choice([f"{line.partition(':')[0]}: {damage}", damage, f"{line} {damage}", damage + line])
        return RecipeMutant(f"line {place + 1}: {damage}", "\n".join(lines).encode())
    names = []
    for _ in range(chance.choice([1, 1, 2, 5])):
        name, content = change_bytes(chance, content)
        names.append(name)
    return RecipeMutant(", ".join(names), content)


def _plausible(chance: random.Random, tree: Any) -> RecipeMutant:
    """Values of the right type, which may not go together; most are accepted, so what follows is tried too."""
    words = [_other_name(chance, tree, odd=False)] if chance.random() < 0.5 else []
    for _ in range(chance.choice([1, 2, 3, 5])):
        path = chance.choice(list(paths(tree)))
        parent, value = at_path(tree, path[:-1]), at_path(tree, path)
        if not isinstance(value, dict | list):
            parent[path[-1]] = _plausible_value(chance, path[-1], value)
            words.append(f"{'.'.join(map(str, path))} = {parent[path[-1]]}")
    return RecipeMutant("; ".join(words), _written(tree))


def _plausible_value(chance: random.Random, key: Any, value: Any) -> Any:
    """A value of a key's type, by the schema of recipes and by what it is now."""
    pool: list[Any] = [*_choices().get(str(key), ())]
    if isinstance(value, bool) or "boolean" in pool:
        pool += [True, False]
    if isinstance(value, int) or "integer" in pool:
        pool += [0, 1, 2, 3, 5, 8, 50]
    if isinstance(value, float) or "number" in pool:
        pool += [0.0, 0.1, 0.5, 1.0, 1.5, 10.0, -0.1, 1e-8, 100.0]
    if value is None or "null" in pool:
        pool += [None]
    if "array" in pool:
        pool += [[], ["x"], [1, 2], [0.5]]
    pool = [item for item in pool if item not in TYPES] or ["x", "train", "file:none", {}, "{split}"]
    return copy.deepcopy(chance.choice(pool))


@cache
def _choices() -> dict[str, tuple[str, ...]]:
    """What the schema of a recipe says of each key, wherever the key stands: the words to choose from, and types."""
    found: dict[str, set[str]] = {}

    def words(schema: Any) -> Iterator[str]:
        if isinstance(schema, dict):
            own = [*schema.get("enum", ()), *([schema["type"]] if "type" in schema else [])]
            yield from (word for word in own if isinstance(word, str))
            yield from (word for name in ("anyOf", "items") for word in words(schema.get(name)))
        elif isinstance(schema, list):
            yield from (word for part in schema for word in words(part))

    def walk(schema: Any) -> None:
        if isinstance(schema, dict):
            for name, part in (schema.get("properties") or {}).items():
                found.setdefault(name, set()).update(words(part))
        for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
            walk(part)

    walk(json.loads((runs.ROOT / "lmgym" / "recipes" / "recipe.schema.json").read_text(encoding="utf-8")))
    return {name: tuple(sorted(one)) for name, one in found.items()}


def _override(chance: random.Random, tree: Any) -> str:
    """One `key=value`, of a key that is there, that is nearly there, or of no key at all."""
    found = [path for path in paths(tree) if all(isinstance(key, str | int) for key in path)]
    path = list(chance.choice(found))
    if chance.random() < 0.2:
        path[-1] = typo(chance, str(path[-1]))
    key = ".".join(map(str, path))
    value = near_value(chance, None)
    text = chance.choice([json.dumps(value, default=str), str(value)[:5000], chance.choice(YAML_DAMAGE)])
    odd = ["=", "x", f"{key}", f".{key}={text}", f"{key}.={text}", f"{key}={text}={text}", f"{key}..x={text}", "-=1"]
    return chance.choice([f"{key}={text}"] * 6 + odd).replace("\x00", "?")  # no command line has a zero byte


def _other_name(chance: random.Random, tree: Any, odd: bool = True) -> str:
    """Another algorithm, task, environment or reward, with arguments that may be its own."""
    kind = chance.choice(KINDS)
    name = chance.choice(registry.names(kind))
    section: dict[str, Any] = {"name": name}
    own = _own_keys(kind, name)
    for key in chance.sample(own, min(len(own), chance.choice([0, 1, 1, 2]))):
        section[key] = odd_value(chance, yaml=True) if odd else _plausible_value(chance, key, "")
    stages = tree.get("stages") or [tree]
    stage = chance.choice(stages) if isinstance(stages, list) else tree
    if kind == "reward":
        stage["rewards"] = {section.pop("name"): section or 1.0}
    else:
        stage[kind] = section
    return f"{kind} {section}"[:300]


@cache
def _own_keys(kind: str, name: str) -> list[str]:
    """The arguments of a registered thing, and the options that any of its kind takes."""
    from lmgym.config.build import ENV_OPTIONS
    from lmgym.core.validation import parameters_of
    from lmgym.rewards.building import OPTIONS as REWARD_OPTIONS
    from lmgym.tasks.base import OPTIONS as TASK_OPTIONS

    given = {"task": 1, "reward": 2}.get(kind, 0)
    options = {"task": TASK_OPTIONS, "env": ENV_OPTIONS, "reward": REWARD_OPTIONS, "algorithm": ("preset",)}[kind]
    try:
        return sorted({*parameters_of(registry.get(kind, name), given)[0], *options})
    except ImportError:  # an optional library that is not here
        return sorted(options)


def write(mutant: RecipeMutant, folder: Path) -> Path:
    """The mutant's file."""
    path = folder / "recipe.yaml"
    path.write_bytes(mutant.content)
    return path
