"""`lmgym schema`: the committed JSON Schema is the one of today, every recipe fits it, and mistakes do not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmgym.config.json_schema import recipe_schema, written
from lmgym.core.builtins import BUILTIN
from lmgym.experiments.sweep import Runs

RECIPES = Path(__file__).parents[2] / "lmgym" / "recipes"
BASE: dict[str, Any] = {"task": "arithmetic", "rewards": {"final_answer": 1.0}}


class Loader(yaml.SafeLoader):
    """Reads 1e-5 as a number, as editors do (YAML 1.2)."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((RECIPES / "recipe.schema.json").read_text(encoding="utf-8"))
    return schema


def complaints(schema: dict[str, Any], tree: Any) -> list[str]:
    validator = pytest.importorskip("jsonschema").Draft7Validator
    validator.check_schema(schema)
    return [error.message for error in validator(schema).iter_errors(tree)]


def test_the_committed_schema_is_of_today() -> None:
    """After a change: lmgym schema > lmgym/recipes/recipe.schema.json"""
    today = written(recipe_schema(lambda kind: sorted(BUILTIN[kind]), Runs))
    assert today + "\n" == (RECIPES / "recipe.schema.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_names_the_schema_and_fits_it(recipe: Path, schema: dict[str, Any]) -> None:
    text = recipe.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    assert complaints(schema, yaml.load(text, Loader)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 3, "runs": {"seeds": [0, 1]}, "algorithm": {"name": "dapo", "surrogate": {"high": 0.3}}},
        {"algorithm": {"name": "grpo", "credit": "group", "tokens": {"name": "top_entropy", "share": 0.5}}},
        {"algorithm": {"name": "ppo", "preset": "trl"}, "evaluation": {"task": "topics", "metrics": {"length": 0}}},
        {"algorithm": "mine:Own", "rewards": {"mine:reward": {"weight": 1, "anything": 3}}},
        {"rewards": {"judge": {"reward": "length", "target": 3}}, "task": {"name": "gsm8k", "limit": 5}},
        {"stages": [{"name": "a", "algorithm": {"group_size": 3}, "task": {"size": 3}}]},
    ],
)
def test_what_may_be_written_fits(changes: dict[str, Any], schema: dict[str, Any]) -> None:
    assert complaints(schema, BASE | changes) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"stepz": 3},
        {"steps": 0},
        {"sampling": {"top_p": 1.5}},
        {"algorithm": "gpro"},
        {"algorithm": {"name": "grpo", "clip_hi": 0.2}},
        {"algorithm": {"name": "grpo", "surrogate": {"name": "sapo", "high": 0.2}}},
        {"algorithm": {"name": "grpo", "group_size": 1}},
        {"algorithm": {"name": "grpo", "beta": 0.2}},
        {"task": {"name": "arithmetic", "sise": 9}},
        {"rewards": {"final_anser": 1.0}},
        {"rewards": {"length": {"targt": 5}}},
        {"env": {"name": "single_turn", "turns": 2}},
        {"runs": {"jobs": 0}},
        {"stages": []},
        {"stages": [{"stepz": 1}]},
    ],
)
def test_a_mistake_does_not_fit(changes: dict[str, Any], schema: dict[str, Any]) -> None:
    assert complaints(schema, BASE | changes)
