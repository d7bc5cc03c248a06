"""The code that runs in the worker of running/pooled.py: calls reward functions. JSON in, JSON out."""

import importlib
import importlib.machinery
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from lmgym.core import registry
from lmgym.core.errors import LmgymError, describe
from lmgym.processes.pool import Failure
from lmgym.rewards.adapters import Style, adapted
from lmgym.rewards.base import Reward, call_reward, episodes
from lmgym.rewards.failures import RewardFailed
from lmgym.rewards.foreign.signature import notes_of
from lmgym.rewards.running.pooled import NeedsTorch, episode_from_json, unpacked
from lmgym.types import Episode, Example, Turn


class RefuseTorch:
    """Importing torch takes seconds and much memory, and a model in a second process takes its memory again. So a
    reward that imports torch stays in the training process."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == "torch" else None  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        raise NeedsTorch


def run(item: Mapping[str, Any]) -> dict[str, Any]:
    """{"values": the reward's values}, {"failed": a sentence} where it raised or was too slow, {"refused": a sentence}
    about the recipe, or {"stays": the reason} for a function that has to be called in the training process. An item
    without rows only imports the function."""
    try:
        packed = json.dumps(item["arguments"]) if item["factory"] else ""
        function = _function(item["target"], item["style"], item["name"], packed)
    except NeedsTorch:
        return {"stays": "it imports torch"}
    except Exception as error:
        return {"stays": f"another process cannot import it ({describe(error)})"}
    try:
        # A partial has no attribute `reads_sequence`: the episodes are sent as the reward is to see them.
        function = partial(function, **({} if item["factory"] else unpacked(item["arguments"])))
        if item["takes_episodes"]:
            function = episodes(function)
        examples = [replace(Example.from_json(tree), meta=unpacked(meta)) for tree, meta in item["examples"]]
        shown = [_episode(row, examples[number], index) for index, (number, row) in enumerate(item["rows"])]
        values = call_reward(Reward(item["name"], 1.0, function), shown, item["timeout"])
        sent = [vars(value) if isinstance(value, Failure) else value for value in values]
        return {"values": sent, "notes": [notes_of(episode, item["name"]) for episode in shown]}
    except RewardFailed as error:
        return {"failed": str(error)}
    except LmgymError as error:
        return {"refused": str(error)}
    except NeedsTorch:
        return {"stays": "it imports torch"}


def prepare() -> None:
    """Runs once, before a child is forked."""
    sys.meta_path.insert(0, RefuseTorch())  # type: ignore[arg-type]


run.prepare = prepare  # type: ignore[attr-defined]


@cache
def _function(target: str, style: Style, name: str, made_of: str) -> Any:
    module, _, path = target.rpartition(":")
    if module.endswith(".py"):
        registry.load_plugin(module)
        found: Any = sys.modules["lmgym_plugin_" + Path(module).stem]
    else:
        found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return adapted(found(**unpacked(json.loads(made_of))) if made_of else found, style, name)


def _episode(row: Any, example: Example, index: int) -> Episode:
    if not isinstance(row, str):
        return episode_from_json(row, example)
    return Episode(example, group=0, index=index, turns=[Turn(prompt_ids=[], action_ids=[], text=row)])
