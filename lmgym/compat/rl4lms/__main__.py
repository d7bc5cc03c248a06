"""RL4LMs' training script with its own flags: python -m lmgym.compat.rl4lms --config_path FILE.yml ..."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lmgym.core.errors import LmgymError
from lmgym.core.output import surviving_output
from lmgym.core.visible import visible


def main(arguments: Sequence[str] | None = None) -> int:
    """Train a configuration of RL4LMs in the folder BASE/PROJECT/EXPERIMENT; the same command resumes.

    Arguments key=value override keys of the recipe. Returns the exit status: 0 done, 1 a mistake that the user can fix,
    130 stopped by Ctrl-C.

    Example: main(["--config_path", "gpt2_ppo.yml", "--experiment_name", "imdb", "steps=10"])"""
    given = _parser().parse_args(arguments)
    with surviving_output():
        try:
            return _train(given)
        except LmgymError as error:
            print(f"lmgym: {visible(str(error))}", file=sys.stderr)
            return 1


def _train(given: argparse.Namespace) -> int:
    from lmgym.compat.rl4lms.files import recipes
    from lmgym.compat.rl4lms.schema import is_rl4lms
    from lmgym.config.build import load_config
    from lmgym.config.same_recipe import check_same_recipe
    from lmgym.config.yaml import read_yaml
    from lmgym.experiments.sweep import has_ended
    from lmgym.training.loop import train

    path = Path(given.config_path)
    if not is_rl4lms(read_yaml(path)):
        raise LmgymError(f"{path} is no configuration of RL4LMs; `lmgym train {path}` trains a recipe of lmgym's")
    overrides = list(given.overrides)
    if given.log_to_wandb:
        overrides.append("logs.sinks=[wandb]")
        os.environ["WANDB_PROJECT"] = given.project_name
        if given.entity_name is not None:
            os.environ["WANDB_ENTITY"] = given.entity_name
    folder = Path(given.base_path_to_store_results) / given.project_name / given.experiment_name
    with recipes(path, overrides) as found:
        for recipe in found:
            config = load_config(recipe, overrides)
            config.out = str(folder if len(found) == 1 else folder / recipe.stem)
            check_same_recipe(config, str(path))
            if not has_ended(train(config)):
                return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lmgym.compat.rl4lms",
        description="Train a configuration of RL4LMs with lmgym. docs/rl4lms.md says what becomes of each key.",
    )
    parser.add_argument("--config_path", required=True, help="the configuration, a YAML file")
    parser.add_argument("--project_name", default="rl4lm_exps", help="a folder, and the project on Weights & Biases")
    parser.add_argument("--experiment_name", default="rl4lm_experiment", help="a folder in it, and the run's name")
    parser.add_argument("--entity_name", help="user or team on Weights & Biases")
    parser.add_argument("--base_path_to_store_results", default=".", help="where the project's folder is made")
    parser.add_argument("--log_to_wandb", action="store_true", help="send the metrics to Weights & Biases too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")
    return parser


if __name__ == "__main__":
    sys.exit(main())
