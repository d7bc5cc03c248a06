"""Whether another process finds a user's function or class by its name, and what its module brings along."""

import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL_LIBRARIES = ("torch", "transformers", "sentence_transformers", "vllm", "jax", "tensorflow")


def importable_name(function: Callable[..., Any], written: str = "") -> str | None:
    """Where a fresh process finds a function or a class; None if it cannot import it by name (a closure, a lambda, a
    script's). `written` is the recipe's name of it: "module:attribute" finds an object that has no name of its own,
    too.

    Example: importable_name(lmgym.rewards.text.form.words) -> "lmgym.rewards.text.form:words"
    """
    if not hasattr(function, "__qualname__") and ":" in written and not written.startswith("__main__:"):
        return written
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        return None
    if module.startswith("lmgym_plugin_"):  # a file that registry.load_plugin has loaded
        return f"{Path(str(sys.modules[module].__file__)).resolve()}:{name}"
    return f"{module}:{name}"


def imports_models(thing: Any) -> bool:
    """True for a function or class whose module has imported a library of models."""
    own = vars(sys.modules.get(getattr(thing, "__module__", "") or "", None) or types.ModuleType(""))
    known = getattr(inspect.unwrap(thing), "__globals__", own).values()
    homes = [one.__name__ if isinstance(one, types.ModuleType) else getattr(one, "__module__", None) for one in known]
    return any(isinstance(home, str) and home.split(".")[0] in MODEL_LIBRARIES for home in homes)
