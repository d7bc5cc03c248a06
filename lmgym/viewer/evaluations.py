"""The same held-out prompts through training, and of two runs: what each said, side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.stats.paired import compare_paired
from lmgym.viewer.runs import RunRecords
from lmgym.viewer.views import evaluation_tree

Tree = dict[str, Any]


def prompts_tree(run: RunRecords, split: str | None = None) -> Tree:
    """The prompts of the newest evaluation with their answers there, and the splits that it has. Raises LmgymError if
    the run has no answers of an evaluation."""
    moments = run.rollouts.moments("evaluation")
    if not moments:
        raise LmgymError(f"{run.name} has no answers of an evaluation (`logs.samples` in the recipe says how many)")
    answers = evaluation_tree(run, moments[-1])
    splits = list(dict.fromkeys(one["split"] for one in answers))
    chosen = split if split in splits else splits[0]
    shown = [one for one in answers if one["split"] == chosen]
    places = [{"stage": one.stage, "step": one.step} for one in moments]
    return {"splits": splits, "split": chosen, "moments": places, "prompts": shown}


def prompt_tree(run: RunRecords, split: str, example: str) -> Tree:
    """The first answer to one held-out prompt at each evaluation of its split."""
    answers = []
    for moment in run.rollouts.moments("evaluation"):
        said = (one for one in evaluation_tree(run, moment, example) if one["split"] == split)
        answers += [one for one in said if one["example"]["id"] == example][:1]
    if not answers:
        raise LmgymError(f"{run.name} has no answer to '{example}' of {split}")
    return {"split": split, "example": answers[0]["example"], "answers": answers}


def pair_tree(first: RunRecords, second: RunRecords) -> Tree:
    """Two runs at their newest evaluation of a split that both have: the recipes' differences, and prompt by prompt
    what each said; numbers are paired as `lmgym compare` pairs them.

    Raises LmgymError if they have no answers to the same prompts."""
    sides = [_newest(run) for run in (first, second)]
    split = next((split for split in reversed(list(sides[0])) if split in sides[1]), None)
    shared = [] if split is None else [key for key in sides[0][split] if key in sides[1][split]]
    if split is None or not shared:
        raise LmgymError(f"{first.name} and {second.name} have no answers to the same held-out prompts")
    pairs = [(sides[0][split][key], sides[1][split][key]) for key in shared]
    rows = [{"example": one["example"], "first": _said(one), "second": _said(other)} for one, other in pairs]
    return {
        "split": split,
        "places": [[one["stage"], one["step"]] for one in pairs[0]],
        "recipe": recipe_differences(first.recipe, second.recipe),
        "metrics": _paired(pairs),
        "prompts": rows,
    }


def _newest(run: RunRecords) -> dict[str, dict[str, Tree]]:
    """The answers of the newest evaluation of each split, by the example's id and its prompt."""
    splits: dict[str, dict[str, Tree]] = {}
    for moment in run.rollouts.moments("evaluation")[-4:]:  # the last evaluation of a run may be of another split
        answers = evaluation_tree(run, moment)
        for split in dict.fromkeys(one["split"] for one in answers):
            own = [one for one in answers if one["split"] == split and one["texts"]]
            splits[split] = {f"{one['example']['id']}\n{one['example']['prompt']}": one for one in reversed(own)}
    return {split: dict(reversed(answers.items())) for split, answers in splits.items()}


def _said(answer: Tree) -> Tree:
    return {key: answer[key] for key in ("texts", "score", "reward_components", "index", "stage", "step")}


def _paired(pairs: Sequence[tuple[Tree, Tree]]) -> list[Tree]:
    """Each number that all answers have: both means, and the difference with its 95% interval."""
    values = [[{"reward": one["score"], **one["reward_components"]} for one in pair] for pair in pairs]
    names = [
        name for name in values[0][0] if all(type(own.get(name)) in (int, float) for pair in values for own in pair)
    ]
    trees = []
    for name in names:
        paired = compare_paired([[pair[0][name]] for pair in values], [[pair[1][name]] for pair in values])
        low, high = (None if bound != bound else bound for bound in (paired.difference.low, paired.difference.high))
        trees.append({
            "name": name, "first": paired.first.mean, "second": paired.second.mean,
            "difference": paired.difference.mean, "low": low, "high": high,
        })  # fmt: skip
    return trees


def recipe_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Tree]:
    """The keys of two recipes that differ, with both values; "" where a recipe has no such key.

    Example:
        >>> recipe_differences({"seed": 1, "steps": 9}, {"seed": 2, "steps": 9})
        [{'key': 'seed', 'first': '1', 'second': '2'}]
    """
    one, other = dict(_leaves(first, "")), dict(_leaves(second, ""))
    keys = [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key) and key != "out"]
    return [{"key": key, "first": one.get(key, ""), "second": other.get(key, "")} for key in keys]


def _leaves(tree: Any, path: str) -> list[tuple[str, str]]:
    if isinstance(tree, Mapping) and tree:
        return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{path}.{key}" if path else str(key))]
    if isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        return [leaf for number, item in enumerate(tree) for leaf in _leaves(item, f"{path}[{number}]")]
    return [(path, str(tree))]
