"""The guides name what exists: metrics of docs/metrics.md, keys of a recipe with their defaults, recipes that load.

In a table with the columns "lmgym" and (after it) "default", both are checked. A block is written to the file that the
comment before it names: <!-- file: my.yaml -->
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import lmgym
from lmgym import load_config
from lmgym.compat.settings.files import converted
from lmgym.config.schema import Config, Stage
from lmgym.core import registry
from lmgym.core.parts import Part, part_name
from tests import runs

DOCS = runs.ROOT / "docs"
GUIDES = [
    *("from_trl", "from_verl", "from_open_r1", "from_openrlhf", "from_verifiers"),
    *("choosing", "troubleshooting", "faq", "glossary"),
]
FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
CONVERTED = re.compile(r"<!-- converted: (\S+) (\S+)(?: --devices (\d+))? -->\n```yaml\n(.*?)\n```", re.DOTALL)
CODE = re.compile(r"`([^`]+)`")


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def rows(name: str) -> Iterator[dict[str, str]]:
    """The rows of all tables of a page, as column name: cell; a later column of the same name is called "name 2"."""
    header: list[str] = []
    for line in page(name).splitlines():
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not header:
            header = [f"{cell} 2" if cell in cells[:place] else cell for place, cell in enumerate(cells)]
        elif not set(line) <= set("|-: "):
            yield dict(zip(header, cells, strict=True))


def defaults(cls: Any, prefix: str) -> dict[str, Any]:
    """Every key of a section with its default."""
    found = {}
    for field in fields(cls):
        value = field.default if field.default is not MISSING else field.default_factory()
        found[prefix + field.name] = list(value) if isinstance(value, tuple) else value
    return found


def recipe_keys() -> dict[str, Any]:
    known = defaults(Config, "") | defaults(Stage, "")
    for name in registry.BUILTIN["algorithm"]:
        for key, value in defaults(registry.get("algorithm", name), "algorithm.").items():
            if name == "grpo" or key not in known:  # the default that counts is grpo's, where it has the field
                known[key] = value
    for name in ("policy", "engine", "evaluation", "checkpoint", "logs", "sampling", "optimizer"):
        known |= defaults(type(known[name]), f"{name}.")
    return known


@pytest.fixture(scope="module")
def keys() -> dict[str, Any]:
    return recipe_keys()


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_names_keys_that_exist(name: str, keys: dict[str, Any]) -> None:
    sections = {key.split(".")[0] for key in keys if "." in key}
    text = page(name)
    if name.startswith("from_"):  # the first column is the other library's
        text = re.sub(r"^\|[^|\n]*\|", "|", text, flags=re.MULTILINE)
    named = {key for key in CODE.findall(text) if re.fullmatch(rf"({'|'.join(sections)})\.\w+", key)}
    assert named <= keys.keys()


@pytest.mark.parametrize("name", ["from_trl", "from_verl"])
def test_the_defaults_that_a_guide_states_are_those_of_the_code(name: str, keys: dict[str, Any]) -> None:
    checked = 0
    for row in rows(name):
        cell = row.get("default 2", "")
        stated = CODE.findall(row.get("lmgym", ""))
        if not cell or not all(key in keys for key in stated):
            continue
        values = [cell] if len(stated) == 1 else cell.split(", ")
        assert len(values) == len(stated), row
        for key, value in zip(stated, values, strict=True):
            assert same(value, keys[key]), f"{key} is {keys[key]}, and the page says {value}"
            checked += 1
    assert checked > 15


def test_the_page_of_trl_has_every_field_of_its_config_with_its_default() -> None:
    """TRL 1.16's source is read, not imported, which takes seconds."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "trainer", "grpo_config.py").read_text(encoding="utf-8")
    (config,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "GRPOConfig"
    )
    found = {}
    for node in config.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            given = {keyword.arg: keyword.value for keyword in node.value.keywords}
            found[node.target.id] = ast.literal_eval(given["default"])
    assert len(found) > 60
    table = [row for row in rows("from_trl") if "TRL" in row and "default" in row]
    named = {key: row["default"] for row in table for key in CODE.findall(row["TRL"])}
    assert {key for key in found if not key.startswith("vllm_")} <= named.keys()
    alone = {key: cell for key, cell in named.items() if key in found and ", " not in cell and key != "use_vllm"}
    assert len(alone) > 40
    for key, cell in alone.items():
        assert same(cell, found[key]), f"{key} is {found[key]} in TRL, and the page says {cell}"


def same(cell: str, default: Any) -> bool:
    if isinstance(default, Part):
        return cell == part_name(default)
    if isinstance(default, float):
        return float(cell) == default
    return bool(cell == str(default) or yaml.safe_load(cell) == default)


def described_metrics() -> set[str]:
    described = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \|", page("metrics"), re.MULTILINE)
    return {key for cell in described for key in CODE.findall(cell)}


def test_troubleshooting_looks_at_metrics_that_exist() -> None:
    metrics = described_metrics()
    looked_at = {key for row in rows("troubleshooting") for key in CODE.findall(row.get("metric", ""))}
    assert len(looked_at) > 15
    assert looked_at <= metrics


def test_the_glossary_uses_names_that_exist(keys: dict[str, Any]) -> None:
    names = {key.split(".")[-1] for key in keys} | keys.keys() | described_metrics() | {*registry.BUILTIN["algorithm"]}
    names |= {field.name for cls in (lmgym.Example, lmgym.Turn, lmgym.Episode, lmgym.Batch) for field in fields(cls)}
    names |= {*lmgym.__all__, "NAME/low", "NAME/high", "driver", "preset"}  # the last two are no fields
    terms = [row["term"] for row in rows("glossary")]
    used = {name for row in rows("glossary") for name in CODE.findall(row["in lmgym"])}
    assert len(used) > 40
    assert used <= names
    assert terms == sorted(terms, key=str.lower)


@pytest.mark.parametrize("name", ["from_trl", "from_verl", "from_verifiers"])
def test_the_recipe_of_a_guide_loads_with_its_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    files = dict(FILE.findall(page(name)))
    for file, text in files.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    recipes = [file for file in files if file.endswith(".yaml")]
    assert recipes
    for recipe in recipes:
        config = load_config(recipe)
        assert config.policy.model.startswith("builtin:")
        for stage in config.stages:
            for reward in stage.rewards:
                registry.load_attribute(reward, "reward") if ":" in reward else registry.get("reward", reward)


@pytest.mark.parametrize("name", ["from_trl", "from_verl", "from_open_r1", "from_openrlhf"])
def test_the_command_of_a_guide_prints_what_the_page_shows(name: str, tmp_path: Path) -> None:
    for file, text in FILE.findall(page(name)):
        (tmp_path / file).write_text(text, encoding="utf-8")
    shown = CONVERTED.findall(page(name))
    assert shown and page(name).split("\n")[2].startswith("    lmgym convert ")
    for system, file, devices, text in shown:
        assert converted(system, tmp_path / file, int(devices) if devices else None)[0] == f"{text}\n"
