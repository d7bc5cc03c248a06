"""`lmgym train`: train a recipe, or resume a run folder."""

import argparse
import os
import sys
import traceback
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lmgym.cli.recipes import add_recipe, quick_imports, read_recipe, refuse_out
from lmgym.core.errors import LmgymError

if TYPE_CHECKING:
    from lmgym.config.schema import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A recipe or a run folder, overrides, and how many processes."""
    add_recipe(parser)
    ranks = "train with N processes of this machine (default: 1)"
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help=ranks)
    restarts = "if a process dies, start again from the newest checkpoint, K times at most (default: 0)"
    parser.add_argument("--restarts", type=int, default=0, metavar="K", help=restarts)
    parser.add_argument("--on", choices=["ray"], help="sample in processes that Ray places (engine.name: pool)")
    cluster = "of a Ray cluster, for --on ray (default: Ray is started here)"
    parser.add_argument("--address", metavar="HOST:PORT", help=cluster)


def run(given: argparse.Namespace) -> int:
    """Train. The exit status is 130 if Ctrl-C stopped it, 75 if another rank has gone, and under torchrun 70
    after an exception that nobody foresaw."""
    with quick_imports():
        from lmgym.config.packaged import find_recipe
        from lmgym.config.same_recipe import check_same_recipe
        from lmgym.config.yaml import read_yaml
        from lmgym.distributed.launch import CRASHED, RANK_LOST
        from lmgym.distributed.process_group import ranks_of_environment
        from lmgym.distributed.ranks import RankLost, ranks_started
        from lmgym.experiments.sweep import has_ended, plan, sweep_folder, train_all
        from lmgym.training.loop import train

    if given.address and not given.on:
        raise LmgymError("--address is that of a Ray cluster; write --on ray, too")
    given.overrides += ["engine.name=pool"] if given.on else []
    given.overrides += [f"engine.address={given.address}"] if given.address else []
    what = Path(given.what)
    recipe = what / "recipe.yaml" if what.is_dir() else find_recipe(given.what)
    # A recipe with `runs:` is several runs; `plan` returns None for a single one.
    several = plan(recipe, given.overrides) if recipe.is_file() else None
    together = given.ranks != 1 or given.restarts or ranks_started() > 1
    if several and together:
        raise LmgymError("runs: trains several runs, each in one process; give --ranks and --restarts to a single run")
    if what.is_dir() and recipe.is_file():
        _check_kind(what, read_yaml(recipe).get("runs") is not None, several is not None)
    if several and what.is_dir():
        refuse_out(what, given.overrides)
        return train_all(several, what, changed=bool(given.overrides))
    if several:
        return train_all(several, sweep_folder(several, recipe))
    config, folder = read_recipe(given)
    if given.ranks != 1 or given.restarts:
        return _launch(given, config, folder)
    try:
        joined = ranks_of_environment(config.distributed.seconds)
    except RankLost as error:
        _leave(error, RANK_LOST)
    with closing(joined) as ranks:
        if folder is None and config.out is None:  # the first rank chooses for all
            config.out = ranks.gather(str(_unused(Path("runs") / Path(given.what).stem)).encode())[0].decode()
        elif folder is None:
            check_same_recipe(config, given.what)
        try:
            config.out = str(train(config, ranks=ranks))  # absolute, as user code may change the current folder
        except Exception as error:
            if lost := ranks.loss_in(error):
                _leave(lost, RANK_LOST)
            if isinstance(error, LmgymError) or "TORCHELASTIC_RUN_ID" not in os.environ:
                raise
            # torchrun shall tell this from a sentence about the recipe: it may go better again.
            print(traceback.format_exc(), end="", file=sys.stderr)
            os._exit(CRASHED)
    return 0 if has_ended(Path(config.out)) else 130


def _check_kind(folder: Path, holds_several: bool, several: bool) -> None:
    """Raise LmgymError for several runs in the folder of one, or one run in the folder of several: the recipe there
    would be lost."""
    from lmgym.logs.run_folders import is_run

    here, asked = ("several runs", "one") if holds_several else ("one run", "several")
    if holds_several != several and (holds_several or is_run(folder)):
        raise LmgymError(
            f"{folder} is the folder of {here}; for {asked}, name {folder / 'recipe.yaml'}, with another out="
        )


def _leave(error: LmgymError, status: int) -> NoReturn:
    """End this process at once: a thread may still wait for a connection that is dead."""
    print(f"lmgym: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)


def _launch(given: argparse.Namespace, config: "Config", folder: Path | None) -> int:
    """Train with processes of their own, which all are told the same run folder."""
    from lmgym.distributed.launch import launch

    for option in ("ranks", "restarts"):
        least = 1 if option == "ranks" else 0
        if getattr(given, option) < least:
            raise LmgymError(f"--{option} is {getattr(given, option)}; it must be at least {least}")
    command = ["train", given.what, *given.overrides]
    if folder is None and config.out is None:
        command.append(f"out={_unused(Path('runs') / Path(given.what).stem)}")
    return launch(command, given.ranks, given.restarts, lambda sentence: print(f"lmgym: {sentence}", file=sys.stderr))


def _unused(folder: Path) -> Path:
    """The folder if it does not exist, else the first of folder-2, folder-3 ... that does not."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free
