"""`mixture`: several tasks as one, each with a weight."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmgym.core import registry, seeds
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register, suggest
from lmgym.core.validation import check_arguments, converted
from lmgym.tasks.base import OPTIONS, MissingSplit, Prompt, check_split, examples_from_prompts, load_task, prompt_writer
from lmgym.tasks.rows.unfit import dropping
from lmgym.tasks.streamed import in_memory
from lmgym.types import Example

OWN = ("name", "weight", "share", "label", "split")  # of a member; other keys are its task's


@dataclass(frozen=True)
class _Member:
    """One task of a mixture, from the recipe."""

    key: str  # of its section in the recipe, for messages
    name: str
    weight: float | None  # None: as many as it has rows
    share: float
    label: str
    split: str
    arguments: dict[str, Any]


def _as_members_do(problem: str, arguments: Mapping[str, Any]) -> Prompt:
    """The prompt that all members make of a problem. Raises LmgymError if they make different ones of it."""
    prompts: dict[str, Prompt] = {}
    for number, section in enumerate(arguments["tasks"]):
        member = _member(section, f"task.tasks.{number}")
        [example] = examples_from_prompts([problem], {"name": member.name, **member.arguments})
        prompts[member.label] = example.prompt
    first, *others = prompts.values()
    if any(prompt != first for prompt in others):
        raise LmgymError(
            f"the tasks of the recipe's mixture ({', '.join(prompts)}) make different prompts of one problem; name the "
            f"one to ask as: --task {next(iter(prompts))}"
        )
    return first


def member_section(section: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The `task:` section of a mixture with the member of this label alone. Raises LmgymError if there is none.

    Example: member_section({"name": "mixture", "tasks": [{"name": "arithmetic"}, {"name": "topics"}]}, "topics")"""
    members = {one.get("label", one.get("name")): one for one in section.get("tasks", [])}
    if label not in members:
        raise LmgymError(f"--task is '{label}'; {suggest(label, members or [section['name']])}")
    return {**section, "tasks": [members[label]]}


@register("task", "mixture")
@prompt_writer(_as_members_do)
def mixture(split: str, tasks: list[dict[str, Any]]) -> list[Example]:
    """The examples of several tasks. A training step draws from each task in proportion to its `weight` (default 1).

    A member of `tasks` is a section as under `task:`: a name, the task's own arguments, and the options limit,
    system_prompt, few_shot, prompt_prefix, prompt_suffix and split (the split that it trains on). Its label is its
    name, or `label`, which is required if a task occurs twice. `weight: rows` is the number of the task's examples, so
    that an epoch has each example of all tasks once; `share` keeps so much of a task's training examples, drawn at
    random once and for all, in their order. Options next to `tasks` are applied to the examples of
    all members, after the members' own options. A member's random shots depend on the example, not on the run's seed.

    `meta["task"]` is the example's label and `meta["mixture"]` the weights by label; ids begin with the label. `Stream`
    draws the examples of a step. An evaluation takes the first examples of the list; so the list is ordered such that
    the first n examples, for any n, hold each task in proportion to its weight, until a task has no more examples. A
    reward with `tasks: [label, ...]` is only for these tasks.

    Raises LmgymError, with the member's key, for a weight that is not above 0, equal labels, a mixture inside a
    mixture, and any error of the member's task. Raises MissingSplit if a member lacks the split.

    Example:
        >>> load_task("mixture", "train", tasks=[{"name": "arithmetic", "weight": 2}, {"name": "topics"}])
    """
    check_split("mixture", split)
    members = [_member(section, f"task.tasks.{number}") for number, section in enumerate(tasks)]
    if not members:
        raise LmgymError("task.tasks is empty; name at least one task")
    labels = [member.label for member in members]
    for number, member in enumerate(members):
        if member.label in labels[:number]:
            raise LmgymError(f"key '{member.key}': two tasks are called '{member.label}'; give one another 'label'")
    loaded = [_loaded(member, split) for member in members]
    weights = {
        member.label: float(len(examples)) if member.weight is None else member.weight
        for member, examples in zip(members, loaded, strict=True)
    }
    # Place the examples of each member at equal distances 1 / weight on a line, then read the line from its start.
    placed = [
        ((index + 0.5) / weights[member.label], number, example)
        for number, (member, examples) in enumerate(zip(members, loaded, strict=True))
        for index, example in enumerate(examples)
    ]
    ordered = sorted(placed, key=lambda item: item[:2])
    return [_labelled(example, members[number].label, weights) for _, number, example in ordered]


def _member(section: Mapping[str, Any], key: str) -> _Member:
    """A member of the mixture from its section, checked."""
    name = section.get("name")
    if not isinstance(name, str):
        raise LmgymError(f"key '{key}' must be a section with the name of a task, got {dict(section)!r}")
    if name == "mixture":
        raise LmgymError(f"key '{key}' is a mixture itself; list its tasks here, with their weights")
    given = section.get("weight", 1.0)
    weight = None if given == "rows" else converted(float, given, f"{key}.weight")
    if weight is not None and not 0 < weight < math.inf:
        raise LmgymError(f"key '{key}.weight' is {weight:g}; it must be above 0 (to do without {name}, take it out)")
    share = converted(float, section.get("share", 1.0), f"{key}.share")
    if not 0 < share <= 1:
        raise LmgymError(f"key '{key}.share' is {share:g}; it must be above 0 and at most 1")
    label = section.get("label", name)
    if not isinstance(label, str) or not label or "/" in label:
        raise LmgymError(f"key '{key}.label' must be a word without '/', not {label!r}")
    # Options of any task are checked by `load_task`; check the task's own arguments now.
    arguments = {key: value for key, value in section.items() if key not in OWN}
    own = {name: value for name, value in arguments.items() if name not in OPTIONS}
    check_arguments(registry.get("task", name), own, key, given=1, also=(*OWN, *OPTIONS))
    return _Member(key, name, weight, share, label, section.get("split", "train"), arguments)


def _loaded(member: _Member, split: str) -> Sequence[Example]:
    """A member's examples; of its training examples the share that it has of them."""
    if split != "train" and split == member.split:
        raise LmgymError(f"key '{member.key}.split': {member.label} trains on '{split}', so that is not held out")
    try:
        arguments = {"unfit": "drop" if dropping() else "refuse", **member.arguments}
        examples = load_task(member.name, member.split if split == "train" else split, **arguments)
    except MissingSplit as error:
        raise MissingSplit(f"task 'mixture' has no split '{split}': {error} (key '{member.key}')") from error
    except LmgymError as error:
        raise LmgymError(f"key '{member.key}' ({member.label}): {error}") from error
    examples = in_memory(examples, f"key '{member.key}': a mixture has its examples in memory; remove streaming")
    for mark in ("task", "mixture"):
        if mark in examples[0].meta:
            raise LmgymError(f"key '{member.key}': its examples have a column '{mark}' of their own; rename that")
    if split != "train" or member.share == 1:
        return examples
    drawn = seeds.permutation(len(examples), 0, "share", member.label)[: max(round(member.share * len(examples)), 1)]
    return [examples[index] for index in sorted(drawn.tolist())]


def _labelled(example: Example, label: str, weights: Mapping[str, float]) -> Example:
    """The example with its task's label in its id, and label and weights in its meta."""
    id = f"{label}/{example.id.removeprefix(f'{label}/')}"
    return replace(example, id=id, meta={**example.meta, "task": label, "mixture": weights})
