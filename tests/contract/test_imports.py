"""What loads torch and what does not; the table of built-ins against the decorators."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from lmgym.core import registry

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "datasets", "vllm")
TEXT_WORLD = ("types", "rollouts.rollout", "config.yaml", "experiments.grid")
TEXT_PACKAGES = ("core", "envs", "logs", "rewards", "stats", "tasks", "text")
BUILTINS = [(kind, name) for kind, table in registry.BUILTIN.items() for name in table]

# Imports the modules one after the other and stops at the first that brings in something heavy.
PROBE = """
import importlib, sys
for module in sys.argv[2].split(","):
    importlib.import_module(module)
    loaded = [heavy for heavy in sys.argv[1].split(",") if heavy in sys.modules]
    if loaded:
        sys.exit(f"import {module} loads {', '.join(loaded)}")
"""


def modules_in(package: str) -> list[str]:
    """Dotted names of a package and of all modules below it."""
    files = sorted((ROOT / package.replace(".", "/")).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def probe(modules: list[str]) -> str:
    """What a fresh interpreter says when it imports these modules; nothing if it loads nothing heavy."""
    command = [sys.executable, "-c", PROBE, ",".join(HEAVY), ",".join(modules)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stderr


@pytest.mark.slow
def test_the_probe_notices_torch() -> None:
    assert "import torch loads torch" in probe(["json", "torch"])


def test_the_root_holds_the_public_names_and_the_two_nouns_only() -> None:
    assert sorted(file.name for file in (ROOT / "lmgym").glob("*.py")) == [
        "__init__.py",
        "__main__.py",
        "batch.py",
        "types.py",
    ]


def test_what_an_algorithm_may_ask_of_a_policy_and_a_run_is_typed() -> None:
    """In these folders no parameter or field that holds a policy, a run or an algorithm is `Any`."""
    nouns, untyped = {"policy", "run", "algorithm", "context", "stage", "engine", "reference", "teacher", "mask"}, []
    for folder in ("algorithms", "updates", "inference", "functional", "training", "rollouts"):
        for file in (ROOT / "lmgym" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                name = node.arg if isinstance(node, ast.arg) else None
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    name = node.target.id
                annotation = getattr(node, "annotation", None)
                if name in nouns and annotation is not None and "Any" in ast.unparse(annotation).split(" | "):
                    untyped.append(f"{file.name}:{node.lineno} {name}")
    assert untyped == []


def test_importing_lmgym_and_its_command_line_loads_nothing_heavy() -> None:
    assert probe(["lmgym", "lmgym.cli.main"]) == ""


@pytest.mark.slow
def test_the_text_world_loads_nothing_heavy() -> None:
    modules = [f"lmgym.{name}" for name in TEXT_WORLD]
    for package in TEXT_PACKAGES:
        modules += modules_in(f"lmgym.{package}")
    assert len(modules) > 15
    modules += ["tests.quiz", "tests.failing_games"]  # as they promise
    assert probe(modules) == ""


@pytest.mark.parametrize(("kind", "name"), BUILTINS)
def test_each_builtin_is_registered_by_the_module_that_the_table_names(kind: str, name: str) -> None:
    module, attribute = registry.BUILTIN[kind][name].target.split(":")
    target = getattr(importlib.import_module(module), attribute)
    assert registry._registered[kind].get(name) is target, f"{module} lacks @register({kind!r}, {name!r})"
    assert registry.get(kind, name) is target


def test_everything_that_lmgym_registers_is_in_the_table() -> None:
    for module in modules_in("lmgym"):
        if not module.endswith("__main__"):
            importlib.import_module(module)
    missing = [
        f"{kind} {name}"
        for kind, things in registry._registered.items()
        for name, thing in things.items()
        if thing.__module__.startswith("lmgym.") and name not in registry.BUILTIN[kind]
    ]
    assert missing == []


def test_files_of_the_current_folder_replace_no_installed_module(tmp_path: Path) -> None:
    """A user's html.py stays a user's file; a module of theirs is found all the same."""
    (tmp_path / "html.py").write_text("raise SystemExit('html of the folder')")
    (tmp_path / "own_module.py").write_text("value = 7")
    code = (
        "import sys; sys.path.remove(''); from lmgym.core.registry import load_attribute; "
        "print(load_attribute('own_module:value', 'x'), load_attribute('html.entities:html5', 'x')['amp;'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "7 &\n", done.stderr
