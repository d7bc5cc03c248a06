"""Finds the model that a command names: with the recipe that says how it is asked, and the folder of its weights.

A name is a run folder (its newest weights), a model folder (one of a run's checkpoints/, best/ or final/, or any
other), a recipe (its model before training), a built-in model or a Hub id. The last two kinds, and model folders
outside of a run, have no recipe of their own."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lmgym.config.build import load_config
from lmgym.config.packaged import packaged_recipes
from lmgym.config.schema import Config
from lmgym.core.errors import LmgymError
from lmgym.models import lora
from lmgym.models.builtin import is_builtin
from lmgym.models.device import prepare_process
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.training.checkpoints import checkpoint
from lmgym.training.machine import choose_machine
from lmgym.training.setup import newest_model


@dataclass
class NamedModel:
    """A model: the name that the user gave, its recipe, and the folder of its weights (None: the model of the recipe,
    untrained). `compute`, `threads` and `run` (the folder) are those of its run, if it belongs to one.

    Example: NamedModel("runs/a/best", config, Path("runs/a/best"), "float32", threads=2, run=Path("runs/a"))"""

    name: str
    config: Config
    weights: Path | None = None
    compute: str | None = None
    threads: int | None = None
    run: Path | None = None

    def load(self, compute: str | None = None) -> Policy:
        """The policy, with the threads and the precision of its run. `compute` is another precision."""
        prepare_process(self.threads or self.config.threads or torch.get_num_threads())
        section = self.config.policy
        known: Any = compute or self.compute or section.compute
        products = "torch" if known == "bfloat16" else section.products
        return load_policy(replace(section, compute=known, products=products), self.config.seed, self.weights)


def find_model(name: str, overrides: Sequence[str] = ()) -> NamedModel | None:
    """A run, a model in a run's folder, or a recipe; None for a model that has no recipe. `overrides` are `key=value`
    for the recipe. Raises LmgymError for a path where there is neither, and for a damaged checkpoint."""
    path = Path(name)
    packaged = name in packaged_recipes() and not path.exists()
    if packaged or path.is_file() or path.suffix in (".yaml", ".yml"):
        config = load_config(path, list(overrides))
        return NamedModel(name, config, compute=None if config.policy.compute == "auto" else config.policy.compute)
    if not path.is_dir():
        hub = len(path.parts) <= 2 and not name.startswith((".", "~", "/"))  # the form of a Hub id
        if is_builtin(name) or path.parent == Path(".") or (hub and not path.parent.is_dir()):
            return None
        raise LmgymError(f"there is no run, model folder or recipe {name}")
    # A folder: a run itself, or a model folder (one or two levels) inside of a run.
    model = any((path / file).is_file() for file in ("config.json", lora.CONFIG))
    run = next((at for at in (path, *path.absolute().parents[:2]) if (at / "recipe.yaml").is_file()), None)
    if run != path and not model:
        raise LmgymError(f"{name} is a folder without a recipe.yaml or a config.json: neither a run nor a model")
    if run is None:
        return None
    if (path / "manifest.json").is_file() and (problem := checkpoint.damage(path)):
        raise LmgymError(f"checkpoint {name} is damaged ({problem}); name another one")
    config = load_config(run / "recipe.yaml", list(overrides))
    if not (required := config.stages[-1].algorithm.requirements).makes_policy:
        raise LmgymError(
            f"{name} is a reward model's run, which writes no answers; use it as a reward: "
            f"rewards: {{{required.makes}: {{model: {run}}}}}"
        )
    machine = choose_machine(config, run)
    compute = machine.compute if config.policy.compute == "auto" else config.policy.compute
    weights = newest_model(run) if run == path else path
    return NamedModel(name, config, weights, compute, machine.threads, run)


def model_of_command(command: str, what: str, model: str | None, overrides: Sequence[str]) -> NamedModel:
    """The model of `lmgym COMMAND WHAT [--model MODEL]`: with `model`, that one is asked as the recipe of `what` says.

    Raises LmgymError if `what` has no recipe, and as `find_model` does.

    Example: model_of_command("eval", "recipe.yaml", "Qwen/Qwen2.5-0.5B-Instruct", ["evaluation.examples=100"])"""
    named = find_model(what, overrides)
    if named is None:
        near = difflib.get_close_matches(what, packaged_recipes(), n=1)
        hint = f"; did you mean '{near[0]}'? If" if near else ", so it is not known what to ask it; if"
        raise LmgymError(
            f"{what} is no run and no recipe{hint} it is a model folder or a Hub id, "
            f"name the recipe of its task too: lmgym {command} RECIPE.yaml --model {what}"
        )
    return named if model is None else model_in_recipe(named.config, model, overrides)


def model_in_recipe(config: Config, name: str, overrides: Sequence[str] = ()) -> NamedModel:
    """The model called `name`, asked as `config` says. Adapters (a folder with adapter_config.json) belong to the base
    model of their run; outside of a run, to the recipe's model. Of `overrides` those of the policy are for its run."""
    own = find_model(name, [override for override in overrides if override.startswith("policy.")])
    if own is not None:  # its weights, with its run's or its recipe's own policy section
        return replace(own, config=replace(config, policy=own.config.policy))
    if (Path(name) / lora.CONFIG).is_file():
        return NamedModel(name, config, Path(name))
    return NamedModel(name, replace(config, policy=_base_section(config.policy, name)))


def _base_section(section: PolicySection, model: str) -> PolicySection:
    """The policy section for a model without a recipe, made from the `section` of a recipe. The same model name means
    that model before training."""
    section = replace(section, lora_rank=None, lora_alpha=None, quantise=None)
    if model == section.model:
        return section
    alike = is_builtin(model) and is_builtin(section.model)  # then both can use the same built-in tokenizer
    other = replace(section, model=model, revision=None, architecture={}, context_start_token=None, eos_token=None)
    return replace(other, tokenizer=section.tokenizer if alike else None)
