"""Whether a folder holds a run of the recipe that is to train there."""

from dataclasses import replace
from pathlib import Path

from lmgym.config.build import dump, load_config
from lmgym.config.schema import Config
from lmgym.core.errors import LmgymError


def check_same_recipe(config: Config, recipe: str) -> None:
    """Raise LmgymError where `out` holds a run of another recipe; the same one resumes. `recipe` is its name.

    Example: check_same_recipe(load_config("a.yaml", ["out=runs/a"]), "a.yaml")"""
    there = Path(config.out or "") / "recipe.yaml"
    if not there.is_file():
        return
    begun = load_config(there)
    # A run that has begun has the steps of a stage written down in place of its epochs.
    steps = {stage.name: stage.steps for stage in begun.stages if stage.epochs is None}
    stages = [
        replace(stage, epochs=None, steps=steps[stage.name]) if stage.epochs and stage.name in steps else stage
        for stage in config.stages
    ]
    if dump(begun) != dump(replace(config, stages=stages)):
        raise LmgymError(
            f"{config.out} holds a run of another recipe than {recipe}; go on with it by `lmgym train {config.out} "
            "key=value`, or choose another out="
        )
