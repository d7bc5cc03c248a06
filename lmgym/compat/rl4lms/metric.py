"""RL4LMs' metric class: it computes values of many answers at once, for each and for all together.

from lmgym.compat.rl4lms.metric import BaseMetric               # in place of rl4lms.envs.text_generation.metric"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmgym.compat.rl4lms.classes import Maker, check_class, imitate
from lmgym.core.errors import LmgymError, warn
from lmgym.core.registry import suggest
from lmgym.text.chat import plain_text
from lmgym.types import Example

Values = Mapping[str, tuple[Sequence[float] | None, float]]


class BaseMetric(ABC):
    """A metric, or several: `compute` returns {name: (a number for each text or None, the number of all together)}.

    Example: the share of texts that end in a full stop
        >>> class Ended(BaseMetric):
        ...     def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None,
        ...                 split_name=None):
        ...         ends = [float(text.endswith(".")) for text in generated_texts]
        ...         return {"form/ended": (ends, sum(ends) / len(ends))}
        >>> MetricRegistry.add("ended", Ended)
    """

    @abstractmethod
    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any]] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> Values:
        """All values of these texts. `model` and `split_name` are None here: a metric sees texts."""


def metric_of(id: str, cls: type) -> Callable[..., list[float]]:
    """Turn a user's class into a metric of lmgym. Its arguments are those of the class's __init__, and `part`, the name
    of one of several values (default: the first one, with a warning).

    A metric that returns no values for each text is computed of each text alone; the value of all texts together is
    the attribute `corpus`, which evaluations report as "NAME/corpus".

    Example: register("reward", "ended")(metric_of("ended", Ended))"""
    check_class("metric", id, cls, "compute")
    make = Maker("metric", id, cls)

    def metric(texts: list[str], examples: list[Example], *, part: str | None = None, **arguments: Any) -> list[float]:
        if not texts:
            return []
        own = make(arguments)
        each, _ = _value(id, own, texts, examples, part)
        if each is not None:
            return list(each)
        return [_value(id, own, [text], [example], part)[1] for text, example in zip(texts, examples, strict=True)]

    def corpus(texts: list[str], examples: list[Example], *, part: str | None = None, **arguments: Any) -> float:
        if not texts:
            return math.nan
        return float(_value(id, make(arguments), texts, examples, part)[1])

    def check(examples: Sequence[Example], *, part: str | None = None, **arguments: Any) -> None:
        make(arguments)

    imitate(metric, cls, ("texts", "examples"), cls, "reward", also=("part",))
    metric.corpus, metric.check = corpus, check  # type: ignore[attr-defined]
    return metric


def _computed(id: str, metric: Any, texts: Sequence[str], examples: Sequence[Example]) -> Values:
    prompts = [plain_text(example.prompt) for example in examples]
    references = [list(example.references) for example in examples]
    found = metric.compute(prompts, list(texts), references, [dict(example.meta) for example in examples], None, None)
    if not isinstance(found, Mapping) or not found:
        raise LmgymError(f"metric '{id}': compute() returned {found!r}; it must return names with (numbers, number)")
    return found


def _value(
    id: str, metric: Any, texts: Sequence[str], examples: Sequence[Example], part: str | None
) -> tuple[Sequence[float] | None, float]:
    """The values for each text, and the value of all, of one part."""
    found = _computed(id, metric, texts, examples)
    if part is None:
        part = next(iter(found))
        if len(found) > 1:
            others = ", ".join(name for name in found if name != part)
            warn(
                f"metric '{id}' returns several values; '{part}' is reported. For {others}, add an entry each: "
                f"{{reward: {id}, part: NAME}}",
                stacklevel=2,
            )
    if part not in found:
        raise LmgymError(f"metric '{id}' has no value '{part}'; {suggest(part, found)}")
    return found[part]
