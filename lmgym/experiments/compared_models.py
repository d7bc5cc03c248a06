"""Finds the two models that `lmgym compare A B` names, and checks that they can be compared.

The evaluation sections of both recipes must agree. For a model without a recipe, the recipe of the other one is used.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.experiments.named_models import NamedModel, find_model, model_in_recipe
from lmgym.rewards.base import Reward
from lmgym.rewards.building import build_rewards
from lmgym.training.setup import held_out_examples
from lmgym.types import Example


def find_models(first: str, second: str, overrides: Sequence[str]) -> tuple[NamedModel, NamedModel]:
    """The two models that the command line names. Raises LmgymError if a name is not a model, or if neither has a
    recipe."""
    sides = [find_model(name, list(overrides)) for name in (first, second)]
    known = next((side for side in sides if side), None)
    if known is None:
        raise LmgymError(f"neither {first} nor {second} names a task; at least one must be a run or a recipe")
    one, other = (
        side or model_in_recipe(known.config, name, overrides)
        for side, name in zip(sides, (first, second), strict=True)
    )
    return one, other


def choose_split(sides: Sequence[NamedModel], overrides: Sequence[str], split: str | None) -> None:
    """Set the split to compare on: `split`, or the override, or the recipe's evaluation.final_split, or its
    evaluation.split."""
    given = any(override.startswith("evaluation.split=") for override in overrides)
    for side in sides:
        section = side.config.evaluation
        wanted = split or (section.split if given else section.final_split or section.split)
        side.config = replace(side.config, evaluation=replace(section, split=wanted))


def check_same_question(one: NamedModel, other: NamedModel) -> None:
    """Raise LmgymError unless both answer the same split with the same decoding."""
    questions = []
    for side in (one, other):
        section, stage = side.config.evaluation, side.config.stages[-1]
        # Everything that the answers depend on, by the key that the user can override.
        decoding = asdict(section.decoding(stage.sampling))
        homes = {key: "sampling" if key.startswith("stop") else "evaluation" for key in decoding if key != "kept_gib"}
        question = {f"{home}.{key}": decoding[key] for key, home in homes.items()}
        question |= {f"evaluation.{key}": getattr(section, key) for key in ("split", "samples", "examples", "best_of")}
        questions.append(question | {"evaluation.env": section.env or stage.env, "policy.compute": side.compute})
    for key, value in questions[0].items():
        if key in ("policy.compute", "evaluation.best_of") and None in (value, questions[1][key]):
            continue  # it computes in the other one's precision, and its answers are picked as the other one's
        if value != questions[1][key]:
            raise _unlike(one, other, key, value, questions[1][key])


def _unlike(one: NamedModel, other: NamedModel, key: str, value: Any, others: Any) -> LmgymError:
    remedy = f"an override such as {key}={json.dumps(value)} sets it for both"
    if one.run and one.weights is None:  # a finished run whose model is not asked again
        remedy = "train both with the same value"
    return LmgymError(
        f"{one.name} and {other.name} are not asked alike: {key} is {value!r} for the one and {others!r} for the "
        f"other; {remedy}"
    )


def same_examples(one: NamedModel, other: NamedModel) -> Sequence[Example]:
    """The examples that both answer. Raises LmgymError if they differ, or if one side trained on the split."""
    tasks = [side.config.evaluation.task or side.config.stages[-1].task for side in (one, other)]
    if tasks[0]["name"] != tasks[1]["name"]:
        raise LmgymError(
            f"{one.name} is asked about task {tasks[0]['name']} and {other.name} about {tasks[1]['name']}; a "
            "comparison is of the same examples, and evaluation.task.name=NAME names one task for both"
        )
    seed = one.config.seed  # few-shot examples are drawn with it
    asked = [held_out_examples(replace(side.config, seed=seed)) for side in (one, other)]
    if asked[0] != asked[1]:
        keys = [key for key in {**tasks[0], **tasks[1]} if key != "split" and tasks[0].get(key) != tasks[1].get(key)]
        if keys:
            raise _unlike(one, other, f"task.{keys[0]}", tasks[0].get(keys[0]), tasks[1].get(keys[0]))
        raise LmgymError(f"task {tasks[0]['name']} gives {one.name} and {other.name} different examples")
    return asked[0]


def common_rewards(one: NamedModel, other: NamedModel) -> tuple[list[Reward], list[str]]:
    """All rewards and metrics of both, and a note if the weights differ: then the total reward is not compared."""
    merged: dict[str, dict[str, Any]] = {}
    weights: list[dict[str, float]] = []
    for side in (one, other):
        stage, weights_of_side = side.config.stages[-1], {}
        # A metric with the name of a reward is that reward, as while it trains: the reward's section has the weight.
        metrics = {name: own for name, own in side.config.evaluation.metrics.items() if name not in stage.rewards}
        for name, value in {**stage.rewards, **metrics}.items():
            arguments = dict(value) if isinstance(value, Mapping) else {"weight": value}
            weight = arguments.pop("weight", 1.0)
            if name in stage.rewards:
                weights_of_side[name] = float(weight)
            if merged.setdefault(name, arguments) != arguments:
                home = "rewards" if name in stage.rewards else "evaluation.metrics"
                raise _unlike(one, other, f"{home}.{name}", merged[name], arguments)
        weights.append({name: weight for name, weight in weights_of_side.items() if weight})
    same = weights[0] == weights[1]
    notes = (
        []
        if same
        else [f"the reward is not compared: {one.name} weighs its parts {weights[0]}, {other.name} {weights[1]}"]
    )
    parts = {name: {**arguments, "weight": weights[0].get(name, 0.0)} for name, arguments in merged.items()}
    return build_rewards(parts), notes
