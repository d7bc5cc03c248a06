"""What a recipe names and a run reads, by contents: files, folders, models and code. Where they lie does not count.

    {"plugins": {"code of mine.py": "code:..."},
     "policy": {"model": {"config.json": "...", ...}},
     "evaluation": {"env.levels": "folder:..."},
     "stages": [{"env.words.0": "file:...", "code of my_rewards": "code:..."}]}

Data of tasks is not here: its examples count (fingerprint.py), nor are weights, which count as they are loaded."""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from huggingface_hub import try_to_load_from_cache

from lmgym.config.build import resolved
from lmgym.config.schema import Config
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.models.gguf import folder_of
from lmgym.training.checkpoints import manifest

CODE = "code of "
MODEL_FILES = (  # what `from_pretrained` reads besides weights
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json",
    "vocab.txt", "merges.txt", "*.model", "*.tiktoken",
)  # fmt: skip
LONGEST_PATH = 4096  # bytes, of Linux
MOST_FILES, MOST_BYTES = 10_000, 2**34  # of a folder whose contents are compared
Contents = dict[str, Any]


def read_by(config: Config) -> Contents:
    """Everything that the recipe names and a run reads, by part and key, except models (`with_models`)."""
    tree = resolved(config)
    evaluation = tree["evaluation"]
    return {
        "plugins": code_of(map(_plugin_module, tree["plugins"])),
        "evaluation": files_of(evaluation["env"] or {}, "env.") | files_of(evaluation["metrics"], "metrics.")
        | code_of(_modules(evaluation["env"], evaluation["metrics"])),
        "stages": [
            files_of(stage["env"], "env.") | files_of(stage["rewards"], "rewards.")
            | code_of([*_modules(stage["env"], stage["rewards"]), _module_of(type(section.algorithm))])
            for stage, section in zip(tree["stages"], config.stages, strict=True)
        ],
        "policy": {},
    }  # fmt: skip


def with_models(found: Contents, config: Config) -> Contents:
    """`found` with the models of policy and teachers. Those of the Hub are known when they have been loaded once."""
    section = config.policy
    named = {"model": section.model, "tokenizer": section.tokenizer or ""}
    policy = {key: model_files(name, section.revision if key == "model" else None) for key, name in named.items()}
    stages = [dict(one) for one in found["stages"]]
    for one, stage in zip(stages, config.stages, strict=True):
        if files := model_files(stage.algorithm.requirements.teacher or "", None):
            one["algorithm.teacher"] = files
    return {**found, "policy": {key: files for key, files in policy.items() if files}, "stages": stages}


def model_files(name: str, revision: str | None) -> dict[str, str]:
    """The SHA-256 of the files of a model, except weights: of a folder, or of the Hub's cache. Empty if there are none.
    Example: model_files("models/base", None)["config.json"]"""
    try:
        folder = _path(folder_of(name))
        if folder is None and name.count("/") == 1:
            cached = try_to_load_from_cache(name, "config.json", revision=revision)
            folder = Path(cached).parent if isinstance(cached, str) else None
        if folder is None or not folder.is_dir():
            return {}
        files = sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern) if path.is_file()})
        return {path.name: manifest.digest(path) for path in files}
    except (LmgymError, OSError, ValueError):  # loading it says what is wrong
        return {}


def files_of(section: Mapping[str, Any], where: str) -> dict[str, str]:
    """The contents of all files and folders that the texts of a section name, however deep, by dotted keys."""
    named = {key: path for key, text in texts_of(section, where) if (path := _path(text)) and key != where + "name"}
    return {key: digest for key, path in named.items() if (digest := _digest(path))}


def texts_of(tree: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """All texts of a tree by dotted keys; items of lists by their number.
    Example: dict(texts_of({"a": ["x", {"b": "y"}]})) -> {"a.0": "x", "a.1.b": "y"}"""
    if isinstance(tree, str):
        yield where.removesuffix("."), tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from texts_of(value, f"{where}{key}.")
    elif isinstance(tree, Sequence):
        for number, value in enumerate(tree):
            yield from texts_of(value, f"{where}{number}.")


def code_of(modules: Iterable[ModuleType | None]) -> dict[str, str]:
    """The source files of modules, and of the user's own modules whose functions, classes or modules they name. Those
    of lmgym, Python and installed packages are left out, unless they are among `modules` themselves. Raises LmgymError
    for a file that has changed since this process loaded it."""
    found: dict[str, str] = {}
    waiting = [(module, True) for module in modules if module is not None]
    while waiting:
        module, named = waiting.pop()
        file, label = getattr(module, "__file__", None), CODE + _label(module)
        if not file or label in found or module.__name__.split(".")[0] == "lmgym" or not (named or _is_own(file)):
            continue
        source = Path(file)
        if not source.is_file():
            continue
        registry.check_unchanged(module)
        found[label] = f"code:{manifest.digest(source)}"
        if not hasattr(module, "__path__"):  # of a package, what else happens to be loaded is no part of it
            waiting += [(other, False) for value in vars(module).values() if (other := _module_of(value)) is not None]
    return found


def _modules(env: Any, rewards: Mapping[str, Any]) -> list[ModuleType | None]:
    """The modules of what sections name, by registered name or as "module:attribute"."""
    named = [("env", env["name"])] if env else []
    named += [
        ("reward", section.get("reward", name) if isinstance(section, Mapping) else name)
        for name, section in rewards.items()
    ]
    texts = [text for _, text in texts_of([env or {}, rewards])]
    mentioned = [sys.modules.get(text.partition(":")[0]) for text in texts if ":" in text]
    return [_module_of(registry.get(kind, name)) for kind, name in named] + mentioned


def _module_of(value: Any) -> ModuleType | None:
    """The module that a function or a class is of; a module is its own."""
    if isinstance(value, ModuleType):
        return value
    return sys.modules.get(value.__module__) if isinstance(value, (FunctionType, type)) else None


def _plugin_module(plugin: str) -> ModuleType | None:
    return sys.modules.get(f"{registry.PLUGIN_FILE}{Path(plugin).stem}" if plugin.endswith(".py") else plugin)


def _label(module: ModuleType) -> str:
    """A module's name; of a plug-in file, the file's."""
    is_file = module.__name__.startswith(registry.PLUGIN_FILE)
    return f"{module.__name__.removeprefix(registry.PLUGIN_FILE)}.py" if is_file else module.__name__


def _is_own(file: str) -> bool:
    """True for a file that is neither Python's nor of an installed package."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    places = {Path(file), Path(file).resolve()}  # Python's own folder may be behind links, as Homebrew's is
    folders = installed | {os.path.realpath(folder) for folder in installed}
    return "site-packages" not in file and not any(place.is_relative_to(one) for place in places for one in folders)


def _path(text: str) -> Path | None:
    """The file or folder that a text names, or None: most texts of a recipe name none."""
    if not text or len(text) > LONGEST_PATH or "\0" in text:
        return None
    try:
        path = Path(text).expanduser()
        return path if path.is_file() or path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # a long word, a ~word that is no user, half of a surrogate pair
        return None


def _digest(path: Path) -> str | None:
    """The contents of a file or a folder, with their kind; None if they cannot be read, for a folder that is too large,
    and for one that holds the working directory, where the run itself may write."""
    try:
        if path.is_file():
            runs = path.suffix in (".py", ".sh") or os.access(path, os.X_OK)
            return f"{'code' if runs else 'file'}:{manifest.digest(path)}"
        if Path.cwd().is_relative_to(path.resolve()):
            return None
        paths = list(islice(path.rglob("*"), MOST_FILES + 1))
        files = [file for file in sorted(paths) if file.is_file() and not _is_hidden(file.relative_to(path))]
        if len(paths) > MOST_FILES or sum(file.stat().st_size for file in files) > MOST_BYTES:
            return None
        each = "".join(f"{file.relative_to(path).as_posix()}\n{manifest.digest(file)}\n" for file in files)
        return f"folder:{hashlib.sha256(each.encode(errors='surrogateescape')).hexdigest()}"
    except OSError:
        return None


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)
