"""Mutants of run folders: a real tiny run, whose files are then damaged, and a command that reads them."""

import json
import os
import random
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lmgym.config.build import build_config
from lmgym.logs.console import Console
from lmgym.training.loop import train
from tests import runs
from tests.torture.damage import change_bytes, change_tree, odd_value

VERBS = ("resume",) * 6 + ("eval", "eval", "compare", "export", "export", "generate", "check")
VERBS += ("view", "view", "doctor", "doctor", "serve", "what-if", "what-if", "bisect", "bisect", "why", "why")
VERBS += ("audit",)
ODD_NAMES = ("{} (copy)", "{}.bak", ".saving-{}", ".old-{}", "{}-1", "é{}", "stage-x-step-y", "stage-9-step-000009")
ODD_NAMES += ("stage-0-step-99999999999", "stage-0-step--1", "stage--1-step-000001", "stage-0-step-000002-x")
SPECIAL = ("a folder", "a dangling link", "a link to itself", "a link to /dev/null", "a pipe", "no permission")


@dataclass(frozen=True)
class FolderMutant:
    """A copy of a run folder (`base`), damaged by `damage`, a list of [what, file, argument]; and what reads it."""

    what: str
    base: str
    verb: str
    damage: list[list[Any]]


def make_bases(folder: Path) -> dict[str, Path]:
    """Real runs: GRPO with a reference model and the best model kept; PPO with a critic, in two stages."""
    common = {"steps": 4, "checkpoint": {"every": 2, "keep": 2}, "logs": {"samples": 2}}
    evaluation = {"every": 2, "examples": 4}
    grpo = {"algorithm": {"name": "grpo", "group_size": 2, "kl_coefficient": 0.1}}
    grpo |= {"evaluation": {**evaluation, "keep_best": "length"}}
    ppo = {"algorithm": {"name": "ppo"}, "evaluation": evaluation, "early_stop": {"metric": "length", "patience": 9}}
    ppo["policy"] = {**runs.TINY["policy"], "critic": "head"}
    ppo["stages"] = [{"name": "one", "steps": 2}, {"name": "two"}]
    found = {}
    for name, changes in {"grpo": grpo, "ppo": ppo}.items():
        path = folder / name
        if not (path / "summary.json").is_file():
            train(build_config(runs.tiny(out=str(path), **common, **changes)), Console(quiet=True))
        found[name] = path
    return found


def folder_mutant(chance: random.Random, bases: dict[str, Path]) -> FolderMutant:
    """Damage to one of the runs."""
    base = chance.choice(sorted(bases))
    names = sorted(str(p.relative_to(bases[base])) for p in bases[base].rglob("*"))
    files = [name for name in names if (bases[base] / name).is_file()]
    damage = [_damage(chance, bases[base], names, files) for _ in range(chance.choice([1, 1, 1, 2, 3]))]
    verb = chance.choice(VERBS)
    if any(name == "metrics.jsonl" for _, name, _ in damage):  # all that a plot reads
        verb = chance.choice([verb, verb, "plot"])
    what = f"{verb}: " + "; ".join(f"{words[0]} {words[1]}" for words in damage)
    return FolderMutant(what, base, verb, damage)


def _damage(chance: random.Random, base: Path, names: list[str], files: list[str]) -> list[Any]:
    tops = [name for name in files if "/" not in name]
    name = chance.choice(tops if chance.random() < 0.4 else files)
    way = chance.random()
    if way < 0.35 and Path(name).suffix in (".json", ".jsonl", ".yaml"):
        return ["fields", name, chance.randrange(2**32)]
    if way < 0.65:
        return ["bytes", name, chance.randrange(2**32)]
    if way < 0.75:
        return [chance.choice(SPECIAL), chance.choice([name, chance.choice(names)]), 0]
    if way < 0.85:
        return ["deleted", chance.choice([name, chance.choice(names)]), 0]
    if way < 0.92:
        return ["swapped", name, chance.choice(files)]
    name = chance.choice(names)
    return ["beside", name, chance.choice(ODD_NAMES).format(Path(name).name)]


def write(mutant: FolderMutant, bases: dict[str, Path], folder: Path) -> Path:
    """A damaged copy of the run."""
    copy = Path(shutil.copytree(bases[mutant.base], folder / "run"))
    for what, name, argument in mutant.damage:
        path = copy / name
        if not os.path.lexists(path):
            continue  # deleted before
        if what in ("fields", "bytes") and path.is_file():
            chance = random.Random(argument)
            path.write_bytes(_changed(chance, path) if what == "fields" else change_bytes(chance, path.read_bytes())[1])
            if chance.random() < 0.5:
                _accept(path)
        elif what == "deleted":
            _remove(path)
        elif what == "swapped" and (copy / argument).is_file() and path.is_file():
            other = (copy / argument).read_bytes()
            (copy / argument).write_bytes(path.read_bytes())
            path.write_bytes(other)
        elif what == "beside" and not os.path.lexists(path.with_name(argument)):
            with suppress(OSError):  # what was damaged before may be nothing that can be copied
                (shutil.copytree if path.is_dir() else shutil.copyfile)(path, path.with_name(argument))
        elif what in SPECIAL:
            _replace(path, what)
    return copy


def _changed(chance: random.Random, path: Path) -> bytes:
    """A JSON or YAML file with a field changed, or with another value altogether."""
    content = path.read_bytes()
    try:
        if path.suffix == ".yaml":
            tree = yaml.safe_load(content)
            change_tree(chance, tree, yaml=True)
            return yaml.dump(tree, sort_keys=False).encode()
        if path.suffix == ".json":
            tree = json.loads(content)
            if chance.random() < 0.15:
                tree = odd_value(chance)
            else:
                change_tree(chance, tree)
            return json.dumps(tree).encode()
        lines = content.decode().splitlines()
        place = chance.randrange(len(lines))
        tree = json.loads(lines[place])
        change_tree(chance, tree)
        lines[place] = json.dumps(tree)
        return ("\n".join(lines) + "\n").encode()
    except (ValueError, IndexError, RecursionError, yaml.YAMLError):  # it has been damaged before
        return content


def _accept(path: Path) -> None:
    """Write the size and checksum of a changed file into the manifest of its folder, as who edits it by hand would."""
    import hashlib

    for folder in path.parents[:2]:
        manifest, name = folder / "manifest.json", path.relative_to(folder).as_posix()
        if not manifest.is_file() or path == manifest:
            continue
        try:
            tree = json.loads(manifest.read_bytes())
            files = tree.get("files", tree)
            content = path.read_bytes()
            files[name] = {**files[name], "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            manifest.write_text(json.dumps(tree))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return


def _replace(path: Path, what: str) -> None:
    """Put something else where a file was."""
    if what == "no permission":
        path.chmod(0)
        return
    _remove(path)
    if what == "a folder":
        path.mkdir()
    elif what == "a pipe":
        os.mkfifo(path)
    else:
        target = {"a dangling link": "nowhere", "a link to itself": path.name, "a link to /dev/null": "/dev/null"}
        path.symlink_to(target[what])


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
