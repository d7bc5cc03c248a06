"""Where a recipe's environments run: in processes of their own, where calls wait side by side and have a limit of time,
or in the training process."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from lmgym.core import registry
from lmgym.core.importable import importable_name, imports_models
from lmgym.envs.env_processes import EnvProcesses
from lmgym.envs.past import Past
from lmgym.envs.vector import Envs, InProcess

WORKERS = 16  # of an environment that is not lmgym's own: most of them wait for something, so more than there are cores
SECONDS = 60.0


def workers_of(env: Mapping[str, Any]) -> tuple[int, str]:
    """How many processes the environments of an `env:` section run in (0: the training process), and why none, if the
    recipe does not say.

    Example: workers_of({"name": "my_games:Chess"}) -> (16, "")"""
    section = {key: value for key, value in env.items() if key not in ("seconds", "window", "thoughts")}
    make = registry.get("env", section.pop("name"))
    if (given := section.pop("workers", None)) is not None:
        return given, ""
    asked = getattr(make, "workers", None)
    if asked is not None:
        return (asked(section) if callable(asked) else asked), ""
    if str(getattr(make, "__module__", "")).startswith("lmgym."):
        return 0, ""
    if waits_side_by_side(make):
        return 0, ""
    if _target(make, env["name"]) is None:
        return 0, "another process cannot import it by name"
    if imports_models(make):
        return 0, "its module imports a library of models"
    return WORKERS, ""


def workers_for_tools(names: Iterable[str]) -> int:
    """How many processes an environment runs in whose calls go to these functions: registered tools, or
    "module:function". 0 where all of them are coroutine functions (these wait side by side), lmgym's own, or bound to
    this process.

    Example: workers_for_tools(["calculator"]) -> 0"""
    own = {name: registry.get("tool", name) for name in names if name not in registry.BUILTIN["tool"]}
    waiting = [name for name, make in own.items() if not inspect.iscoroutinefunction(make)]
    found = all(_target(make, name) == name and not imports_models(make) for name, make in own.items())
    return WORKERS if waiting and found else 0


def waits_side_by_side(make: Any) -> bool:
    """True for an environment whose `step` is a coroutine function, or which answers many at once (`step_batch`)."""
    return hasattr(make, "step_batch") or inspect.iscoroutinefunction(getattr(make, "step", None))


def limits_itself(make: Any) -> bool:
    """True for an environment that says so: its `seconds` are a key of its own, which it watches itself."""
    return bool(getattr(make, "limits_itself", False))


def unguarded_sentence(env: Mapping[str, Any]) -> str:
    """What to know of an environment of one's own that runs in the training process; empty for all others."""
    make = registry.get("env", env["name"])
    workers, reason = workers_of(env)
    if workers or str(getattr(make, "__module__", "")).startswith("lmgym.") or waits_side_by_side(make):
        return ""
    return (
        f"environment '{env['name']}' runs in the training process{f', since {reason}' if reason else ''}, one after "
        "the other and without a limit of time: if it hangs or crashes, so does the run; env.workers: 16 gives it "
        "processes of its own, where each call may take env.seconds"
    )


def make_envs(env: Mapping[str, Any], plugins: Sequence[str] = ()) -> Envs:
    """The environments of an `env:` section."""
    section, (count, _) = dict(env), workers_of(env)
    name, past = section.pop("name"), Past(section.pop("window", None), section.pop("thoughts", "keep"))
    make = registry.get("env", name)
    section.pop("workers", None)
    seconds = None if limits_itself(make) else section.pop("seconds", None)
    envs: Any
    if count:
        envs = EnvProcesses(_target(make, name) or name, section, plugins, count, seconds or SECONDS)
    else:
        limit = None if limits_itself(make) else seconds or SECONDS
        envs = InProcess(make if not section else partial(make, **section), limit)
    envs.past = past
    return envs  # type: ignore[no-any-return]


def _target(make: Any, name: str) -> str | None:
    """The name by which another process finds an environment, after it has loaded the plug-ins; None if it cannot."""
    found = importable_name(make, name)
    if ":" in name or any(name in registry.BUILTIN[kind] for kind in ("env", "tool")) or (found and ".py:" in found):
        return None if name.startswith("__main__:") else name  # a plug-in's file registers the name there, too
    return None if found is None or "." in found.partition(":")[2] else found
