"""`reasoning_gym`: generated puzzles of the reasoning-gym library (Stojanovski et al. 2025, arXiv 2505.24760)."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from lmgym.core import seeds
from lmgym.core.constraints import ExampleCount
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register, suggest
from lmgym.core.validation import check_arguments
from lmgym.tasks.base import SPLITS, check_split
from lmgym.tasks.sources import check_sizes
from lmgym.types import Example

APART = 2**30  # distance between the seeds of two splits; item i of a dataset depends on its seed + i
PATIENCE = 20  # stop after so many times the requested number of items: there are no more different ones
OWN = {"seed": "task.data_seed", "size": "task.size"}  # keys of a data set's configuration, and what sets them


@register("task", "reasoning_gym")
def reasoning_gym(
    split: str,
    dataset: str,
    size: ExampleCount = 500,
    validation_size: ExampleCount = 100,
    test_size: ExampleCount = 100,
    config: dict[str, Any] | None = None,
    data_seed: int = 0,
) -> list[Example]:
    """Puzzles of one of the library's datasets: `size` for training, `validation_size` and `test_size` held out.

    `dataset` is a name such as chain_sum or countdown; `config` holds the arguments of its configuration. The prompt is
    the question, the reference the answer, if the library gives one. `meta` has answer, dataset, and entry (the
    library's whole record), for the reward `reasoning_gym`.

    The splits are generated from seeds that are far apart, and no question occurs twice: questions of test are removed
    from validation, and those of both from train. The same arguments give the same puzzles with the same version of the
    library.

    Raises LmgymError for an unknown dataset or argument, for arguments that the library refuses, and if there are fewer
    different questions than requested. Needs the extra lmgym[reasoning].

    Example:
        >>> load_task("reasoning_gym", "test", dataset="chain_sum", config={"max_terms": 3})[0].prompt
        'State the final answer to the following arithmetic problem: 16 + 57 ='
    """
    check_split("reasoning_gym", split)
    check_sizes(size=size, validation_size=validation_size, test_size=test_size)
    sizes = {"test": test_size, "validation": validation_size, "train": size}
    settings = json.dumps(_checked(dataset, config or {}), sort_keys=True)
    # Item i depends on seed + i, so neighbouring data_seeds must begin far from each other.
    first = seeds.key("reasoning_gym", data_seed) % APART if data_seed else 0
    # Generate the splits in this order; each excludes the questions of those before it.
    seen: set[str] = set()
    for part, count in sizes.items():
        entries = _entries(dataset, settings, first + SPLITS.index(part) * APART, count, frozenset(seen), part)
        if part == split:
            return [_example(json.loads(entry), f"{dataset}/{part}/{n}", dataset) for n, entry in enumerate(entries)]
        seen |= {json.loads(entry)["question"] for entry in entries}
    raise AssertionError("every split is one of the three")


def _checked(dataset: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, checked against the dataset's own."""
    known = _library().factory.DATASETS
    if dataset not in known:
        raise LmgymError(f"task.dataset: reasoning-gym has no data set '{dataset}'; {suggest(dataset, known)}")
    for name, ours in OWN.items():
        if name in config:
            raise LmgymError(f"key 'task.config.{name}' is set by lmgym; write {ours}")
    made = known[dataset][1]
    valid = [f.name for f in dataclasses.fields(made) if f.init and f.name not in OWN]
    for name in config:
        if name not in valid:
            raise LmgymError(f"unknown key 'task.config.{name}' of {dataset}; {suggest(str(name), valid)}")
    return check_arguments(made, config, "task.config", given=0)


@lru_cache(maxsize=16)
def _entries(dataset: str, settings: str, seed: int, count: int, seen: frozenset[str], part: str) -> tuple[str, ...]:
    """`count` entries of a split as JSON, without the questions in `seen`."""
    entries: list[str] = []
    questions = set(seen)
    for index, entry in enumerate(_items(dataset, json.loads(settings), seed, count)):
        if index >= PATIENCE * count + 1_000:
            key = "size" if part == "train" else f"{part}_size"
            raise LmgymError(
                f"task.{key} is {count}, but with these arguments split '{part}' of {dataset} has only {len(entries)} "
                "different questions; lower it, or widen task.config"
            )
        if entry["question"] not in questions:
            questions.add(entry["question"])
            entries.append(_packed(entry, dataset))
        if len(entries) == count:
            break
    return tuple(entries)


def _items(dataset: str, config: dict[str, Any], seed: int, size: int) -> Iterator[dict[str, Any]]:
    """An endless sequence of items: a dataset of `size` items, then one with the next `size` seeds, and so on."""
    create = _library().factory.create_dataset
    while True:
        try:
            yield from create(dataset, seed=seed, size=size, **config)
        except (AssertionError, ValueError, TypeError) as error:
            reason = str(error).split("\n")[0]
            raise LmgymError(f"task.config: {dataset} refuses it: {reason or type(error).__name__}") from error
        seed += size


def _packed(entry: dict[str, Any], dataset: str) -> str:
    """The entry as JSON that reads back as an equal entry: a tuple becomes {"tuple": [...]}."""
    try:
        return json.dumps(_plain(entry))
    except (TypeError, ValueError) as error:
        raise LmgymError(f"task.dataset: what {dataset} makes is no JSON ({error}), so it cannot be kept") from error


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _example(entry: dict[str, Any], id: str, dataset: str) -> Example:
    answer = entry["answer"]
    return Example(
        id=f"reasoning_gym/{id}",
        prompt=entry["question"],
        references=() if answer is None else (str(answer),),
        meta={"answer": answer, "dataset": dataset, "entry": entry},
    )


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise LmgymError("task 'reasoning_gym' needs the library: pip install 'lmgym[reasoning]'") from error
    return reasoning_gym
