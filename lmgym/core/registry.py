"""From names in a recipe to objects: algorithms, tasks, rewards, environments and engines.

Built-ins are in the table of builtins.py, so that `lmgym list` needs no torch. A plug-in is found by `@register` in a
module that the recipe's `plugins:` lists, by an entry point of the group `lmgym.KIND`, or directly as
"module:attribute"."""

import contextlib
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from lmgym.core import errors
from lmgym.core.availability import availability_of
from lmgym.core.builtins import BUILTIN, Entry
from lmgym.core.errors import LmgymError
from lmgym.core.files import nearby
from lmgym.core.well_known import about

T = TypeVar("T")

PLUGIN_FILE = "lmgym_plugin_"
"""How the name of a module begins that is the file of a plug-in."""

_registered: dict[str, dict[str, Any]] = {kind: {} for kind in BUILTIN}
_loaded: dict[str, tuple[Any, str]] = {}  # of users' modules: the spec that a reload replaces, and the source's digest


def register(kind: str, name: str) -> Callable[[T], T]:
    """Class or function decorator: make the object available to recipes as `name`.

    Example:
        >>> @register("reward", "shout")
        ... def shout(texts, examples):
        ...     return [float(text.isupper()) for text in texts]
    """
    _check_kind(kind)

    def keep(thing: T) -> T:
        earlier = _registered[kind].get(name)
        if earlier is not None and _source(earlier) != _source(thing):
            raise LmgymError(f"{kind} '{name}' is already registered by {_identity(earlier)}; choose another name")
        _registered[kind][name] = thing
        return thing

    return keep


def get(kind: str, name: str) -> Any:
    """The object with this name, or the attribute if `name` is "module:attribute".

    Raises LmgymError, with the nearest valid name, if there is none.

    Example: get("algorithm", "grpo") -> <class 'lmgym.algorithms.grpo.algorithm.GRPO'>"""
    _check_kind(kind)
    if ":" in name:
        return load_attribute(name, f"{kind} '{name}'")
    if name in _registered[kind]:
        return _registered[kind][name]
    if name in BUILTIN[kind]:
        return load_attribute(BUILTIN[kind][name].target, f"{kind} '{name}'")
    for point in importlib.metadata.entry_points(group=f"lmgym.{kind}"):
        if point.name == name:
            with _importing(f"{kind} '{name}' (entry point {point.value})", point.module):
                return point.load()
    if known := about(kind, name, names(kind)):
        raise LmgymError(f"unknown {kind} '{name}': it {known}")
    raise LmgymError(f"unknown {kind} '{name}'; {suggest(name, names(kind))}")


def name_of(kind: str, thing: Any) -> str:
    """The name under which this object is registered; "module:attribute" if it is not."""
    _check_kind(kind)
    return next((name for name, other in _registered[kind].items() if other is thing), _identity(thing))


def names(kind: str) -> list[str]:
    """All names of this kind, sorted: built-in, registered, or of an entry point."""
    _check_kind(kind)
    points = [point.name for point in importlib.metadata.entry_points(group=f"lmgym.{kind}")]
    return sorted({*BUILTIN[kind], *_registered[kind], *points})


def describe(kind: str) -> list[dict[str, str]]:
    """One row per name for `lmgym list`: name, summary, needs, target, and availability (`runs` and `how`)."""
    rows = []
    for name in names(kind):
        entry = BUILTIN[kind].get(name)
        if entry is None:
            thing = _registered[kind].get(name)
            summary = (getattr(thing, "__doc__", None) or "").strip().split("\n")[0]
            entry = Entry(_identity(thing) if thing else f"entry point lmgym.{kind}", summary)
        available = availability_of(entry.needs)
        row = {"name": name, "summary": entry.summary, "needs": entry.needs, "target": entry.target}
        rows.append(row | {"runs": available.runs, "how": available.how})
    return rows


def suggest(word: str, valid: Iterable[str]) -> str:
    """The end of an error sentence: "did you mean 'x'?" and the valid words.

    Example: suggest("stepz", ["steps", "seed"]) -> "did you mean 'steps'? Valid: seed, steps."
    """
    valid = sorted(valid)
    near = difflib.get_close_matches(word, valid, n=3)
    near.sort(key=lambda other: sorted(other) != sorted(word))  # gpro: grpo, before the equally near gspo
    return (f"did you mean '{near[0]}'? " if near else "") + f"Valid: {', '.join(valid) or '(none)'}."


def load_plugin(plugin: str) -> None:
    """Import a module (by dotted name) or a file (by path), so that its `@register` decorators run. A file finds the
    modules next to it. Raises LmgymError if there is no such module or file, for a second file of the same name, and if
    the source has changed since this process loaded it."""
    if plugin.endswith(".py"):
        path = Path(plugin)
        if not path.is_file():
            raise LmgymError(f"plugins: there is no file {plugin}{nearby(path)}")
        name = PLUGIN_FILE + path.stem
        if name in sys.modules:
            loaded = Path(sys.modules[name].__file__ or "").resolve()
            if loaded != path.resolve():
                both = f"{plugin} and {loaded}, which this process has loaded, have the same file name"
                raise LmgymError(f"plugins: {both}; rename one of them")
            check_unchanged(sys.modules[name])
            return
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        _remember(module)
        folder = path.resolve().parent
        try:
            with _importing(f"plugins: {plugin}", name, folder):
                spec.loader.exec_module(module)
        except BaseException:  # the next attempt shall not find half of a module
            del sys.modules[name], _loaded[name]
            raise
        return
    check_unchanged(_import(plugin, f"plugins: '{plugin}'"))


def check_unchanged(module: ModuleType) -> None:
    """Raise LmgymError if the source of a user's module is not what it was when this process loaded it here (or, if it
    was loaded elsewhere, first asked): the old code would run, and records would name the new one."""
    _remember(module)
    kept = _loaded.get(module.__name__)
    if kept is not None and (now := _source_digest(module)) and now != kept[1]:
        raise LmgymError(
            f"{module.__file__} has changed since this process loaded it, and would run as it was; start the process "
            "(in a notebook, the kernel) again"
        )


def _remember(module: ModuleType) -> None:
    """Keep the digest of a user's module as it is loaded. A script of one's own, which is no import, is left out."""
    name, spec = module.__name__, getattr(module, "__spec__", None)
    if name == "__main__" or name.split(".")[0] == "lmgym" or _loaded.get(name, (None,))[0] is spec:
        return
    _loaded[name] = (spec, _source_digest(module))


def _source_digest(module: ModuleType) -> str:
    """The SHA-256 of the .py file that a module is of; empty if there is none to read."""
    file = str(getattr(module, "__file__", None) or "")
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file.endswith(".py") else ""
    except OSError:
        return ""


def load_attribute(target: str, wanted_as: str) -> Any:
    """The attribute that "module:attribute" names; else LmgymError, whose text begins with `wanted_as`."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise LmgymError(f"{wanted_as}: write module:attribute, such as my_module:my_function")
    module = _import(module_name, wanted_as)
    if not hasattr(module, attribute):
        valid = [word for word in dir(module) if not word.startswith("_")]
        raise LmgymError(f"{wanted_as}: module {module_name} has no '{attribute}'; {suggest(attribute, valid)}")
    return getattr(module, attribute)


def _import(module_name: str, wanted_as: str) -> ModuleType:
    with _importing(wanted_as, module_name):
        module = importlib.import_module(module_name)
    _remember(module)
    return module


@contextmanager
def _importing(wanted_as: str, module_name: str, *folders: Path) -> Iterator[None]:
    """Find a user's modules in the current folder and in `folders`, and turn an error of an import into a sentence; one
    in lmgym's own modules is a bug, which keeps its traceback. The process stays in its directory."""
    for folder in (*folders, Path.cwd()):  # last, because html.py there must not replace Python's own
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    try:
        with chdir("."):
            yield
    except (LmgymError, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        where = "".join(f"{folder} and " for folder in folders if folder != Path.cwd())
        near = nearby(Path(f"{error.name}.py").absolute())  # a file of a like name, here
        raise LmgymError(
            f"{wanted_as}: there is no module '{error.name}' (looked in {where}the current folder too){near}"
        ) from error
    except BaseException as error:  # SystemExit, too
        if module_name.startswith("lmgym."):
            raise
        calling = (__file__, contextlib.__file__, importlib.__file__)
        raise LmgymError(
            f"{wanted_as}: its import raised {errors.describe(error)}{errors.place(error, *calling)}"
        ) from error


def _check_kind(kind: str) -> None:
    if kind not in BUILTIN:
        raise LmgymError(f"unknown kind '{kind}'; {suggest(kind, BUILTIN)}")


def _source(thing: Any) -> tuple[str, str]:
    """File and name of a thing: a file may be a plug-in, and a module that "module:function" names."""
    module, name = getattr(thing, "__module__", "?"), getattr(thing, "__qualname__", repr(thing))
    file = getattr(sys.modules.get(module), "__file__", None)
    return (str(Path(file).resolve()) if file else str(module)), name


def _identity(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}:{getattr(thing, '__qualname__', repr(thing))}"
