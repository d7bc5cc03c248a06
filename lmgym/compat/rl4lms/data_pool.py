"""RL4LMs' data pool: a class that prepares the samples of a split.

from lmgym.compat.rl4lms.data_pool import Sample, TextGenPool   # in place of rl4lms.data_pools.text_generation_pool"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmgym.compat.rl4lms.classes import base_names, class_arguments, imitate
from lmgym.core.errors import LmgymError, describe
from lmgym.tasks.base import MissingSplit, check_split
from lmgym.types import Example

SPLITS = {"train": "train", "validation": "val", "test": "test"}  # lmgym's names and RL4LMs'


@dataclass
class Sample:
    """One problem: Sample(id="train_0", prompt_or_input_text="2+2=", references=["4"], meta_data={"level": 1})."""

    id: str
    prompt_or_input_text: str
    references: list[str]
    meta_data: dict[str, Any] | None = None


class TextGenPool:
    """The samples of a split; a subclass makes them in `prepare`.

    Example:
        >>> class Sums(TextGenPool):
        ...     @classmethod
        ...     def prepare(cls, split: str, largest: int = 9):
        ...         return cls([Sample(f"{split}_{n}", f"{n}+{n}=", [str(2 * n)]) for n in range(largest)])
        >>> DataPoolRegistry.add("sums", Sums)
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = list(samples)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, ix: int) -> tuple[Sample, float]:
        """A sample and its weight, which `priority_scale` of a recipe reads."""
        return self._samples[ix], 1.0

    def sample(self) -> Sample:
        """Any one of the samples."""
        return random.choice(self._samples)

    @classmethod
    def prepare(cls, **args: Any) -> "TextGenPool":
        """The pool of one split, "train", "val" or "test", which is the argument `split`."""
        raise LmgymError(f"{cls.__name__} has no prepare(), which says where its samples come from")

    def split(self, split_ratios: Sequence[float]) -> list["TextGenPool"]:
        """Consecutive pools with these fractions of the samples, each rounded down."""
        pools, start = [], 0
        for ratio in split_ratios:
            count = int(len(self) * ratio)
            pools.append(type(self)(self._samples[start : start + count]))
            start += count
        return pools


def task_of(id: str, cls: type) -> Callable[..., list[Example]]:
    """Turn a user's pool into a task; its arguments are those of `prepare` without the split.

    Example: register("task", "sums")(task_of("sums", Sums))"""
    if not isinstance(cls, type) or "TextGenPool" not in base_names(cls):
        raise LmgymError(f"task '{id}': RL4LMs' DataPoolRegistry.add() takes a subclass of TextGenPool, not {cls!r}")

    def task(split: str, **arguments: Any) -> list[Example]:
        check_split(id, split, tuple(SPLITS))
        own = class_arguments(cls.prepare, "task", arguments)  # type: ignore[attr-defined]
        try:
            pool: Any = cls.prepare(split=SPLITS[split], **own)  # type: ignore[attr-defined]
        except LmgymError:
            raise
        except NotImplementedError as error:
            raise MissingSplit(
                f"task '{id}' has no split '{split}': prepare(split='{SPLITS[split]}') {error}"
            ) from error
        except Exception as error:
            raise LmgymError(f"task '{id}': prepare(split='{SPLITS[split]}') raised {describe(error)}") from error
        return [_example(f"{id}/{split}", *pool[index]) for index in range(len(pool))]

    imitate(task, cls, ("split",), cls.prepare, "task")  # type: ignore[attr-defined]
    return task


def _example(where: str, sample: Any, weight: float) -> Example:
    references = sample.references or []
    for text in (sample.prompt_or_input_text, *references):
        if not isinstance(text, str):
            raise LmgymError(f"{where}: sample '{sample.id}' has {text!r} where a text must be")
    if isinstance(references, str):
        raise LmgymError(f"{where}: the references of sample '{sample.id}' are one text; they must be a list of texts")
    meta = dict(sample.meta_data or {})
    if weight != 1.0:
        meta.setdefault("weight", weight)
    return Example(f"{where}/{sample.id}", sample.prompt_or_input_text, tuple(references), meta)
