"""What can be known of a recipe in a blink, before torch is imported: missing files and modules, YAML, unknown names.

Everything else, and all of this again, is checked when the recipe is built (build.py)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmgym.config.packaged import find_recipe
from lmgym.config.schema_keys import recipe_schema, stage_keys, top_level_keys
from lmgym.config.unknown_keys import check_keys
from lmgym.config.yaml import apply_override, read_yaml
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.files import nearby


def check_early(what: str, overrides: Sequence[str]) -> None:
    """Raise LmgymError for what is wrong with a recipe, or with that of a run folder, at the first sight.

    Example: check_early("quickstart", ["stepz=3"]) raises "quickstart: unknown key 'stepz'; did you mean 'steps'? ..."
    """
    folder = Path(what)
    path = folder / "recipe.yaml" if folder.is_dir() else find_recipe(what)
    if folder.is_dir() and not path.is_file():
        return  # the command says what it needs instead
    tree, keys = read_yaml(path), top_level_keys()
    for override in overrides:
        apply_override(tree, override, stage_keys())
    try:
        _check_plugins(tree.get("plugins"))
        for key in tree:
            if key not in keys:
                raise LmgymError(f"unknown key '{key}'; {registry.suggest(str(key), keys)}")
        if not tree.get("plugins"):
            check_keys(recipe_schema(), tree)
        stages = tree.get("stages")
        for section in (tree, *(stages if isinstance(stages, list) else ())):
            if isinstance(section, Mapping) and not tree.get("plugins"):  # which may register any name
                _check_names(section)
    except LmgymError as error:
        raise LmgymError(f"{path if folder.is_dir() else what}: {error}") from error


def _check_plugins(plugins: Any) -> None:
    """Raise LmgymError for a file that is not there."""
    for plugin in plugins if isinstance(plugins, list) else ():
        if isinstance(plugin, str) and plugin.endswith(".py") and not Path(plugin).is_file():
            raise LmgymError(f"plugins: there is no file {plugin}{nearby(Path(plugin))}")


def _check_names(section: Mapping[str, Any]) -> None:
    """Raise LmgymError for an algorithm, task, environment or reward that nobody has registered."""
    named = [(kind, section.get(kind)) for kind in ("algorithm", "task", "env")]
    named = [(kind, value.get("name") if isinstance(value, Mapping) else value) for kind, value in named]
    rewards = section.get("rewards")
    swept = isinstance(rewards, Mapping) and "expand" in rewards  # several sections in place of one
    for name, value in rewards.items() if isinstance(rewards, Mapping) and not swept else ():
        named.append(("reward", value.get("reward", name) if isinstance(value, Mapping) else name))
    for kind, name in named:
        if isinstance(name, str) and ":" not in name and name not in registry.names(kind):
            registry.get(kind, name)  # raises, and says which names there are
