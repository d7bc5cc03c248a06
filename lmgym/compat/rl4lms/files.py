"""An RL4LMs file in the place of a recipe: `lmgym train`, `check`, `eval` and `generate` take either."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmgym.compat.rl4lms.convert import conversions, text
from lmgym.config.build import build_config
from lmgym.config.yaml import apply_override
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.validation import converted


@contextmanager
def recipes(path: Path, overrides: Sequence[str] = ()) -> Iterator[list[Path]]:
    """The recipes that a file of RL4LMs' stands for, as files that are there within the `with`; says on standard error
    that it was recognised, and what is not done as RL4LMs does it.

    A file without sweep is one recipe, named as the file is; the others have a folder's name each, for their values.
    `overrides` are looked at for `plugins=`, whose names the conversion must know.

    Example:
        >>> with recipes(Path("gpt2_ppo.yml")) as found:
        ...     config = load_config(found[0])
    """
    tree: dict[str, list[str]] = {}
    for override in overrides:
        if override.startswith("plugins="):
            apply_override(tree, override, ())
    for plugin in converted(list[str], tree.get("plugins") or [], "plugins"):
        registry.load_plugin(plugin)
    found = conversions(path)
    several = f", a sweep of {len(found)}" if len(found) > 1 else ""
    print(f"lmgym: {path} is a configuration of RL4LMs{several}; converted to a recipe", file=sys.stderr)
    for warning in dict.fromkeys(warning for conversion in found.values() for warning in conversion.warnings):
        print(f"lmgym: not as in RL4LMs: {warning}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for label, conversion in found.items():
            name = f"{path.stem}-{label}" if label else path.stem
            files.append(Path(folder) / f"{name}.yaml")
            files[-1].write_text(text(conversion, path.name), encoding="utf-8")
        yield files


def printed(path: Path) -> str:
    """The recipe of a file as YAML, or several as documents of one; each is built once, so that it is known to load.

    Raises LmgymError as `conversions` does.
    """
    texts = []
    for label, conversion in conversions(path).items():
        try:
            build_config(conversion.recipe)
        except LmgymError as error:
            raise LmgymError(f"{path}: {error}") from error
        origin = f"{path.name} ({label})" if label else path.name
        texts.append(text(conversion, origin))
    return "\n---\n".join(texts)
