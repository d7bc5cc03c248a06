"""RL4LMs' seven registries: `add(id, class)` registers a class for recipes and for RL4LMs' own files.

    from lmgym.compat.rl4lms.registries import DataPoolRegistry     # in place of rl4lms.envs.text_generation.registry

A class is registered in this process only, so name the module that adds it in the recipe's `plugins:`. `get` returns
added classes only; for lmgym's own tasks, rewards and algorithms use `lmgym.core.registry`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from lmgym.compat.rl4lms import learners
from lmgym.compat.rl4lms.data_pool import TextGenPool, task_of
from lmgym.compat.rl4lms.metric import metric_of
from lmgym.compat.rl4lms.reward import reward_of
from lmgym.core import registry
from lmgym.core.builtins import BUILTIN
from lmgym.core.errors import LmgymError


class Registry(ABC):
    """What was added, by id; a registry says in `enter` what becomes of it in lmgym.

    Example: RewardFunctionRegistry.add("punctuation", Punctuation)"""

    what = ""

    def __init__(self) -> None:
        self.added: dict[str, Any] = {}

    def add(self, id: str, thing: Any) -> None:
        """Check a class (a function, settings) and make it known as `id`."""
        self.enter(id, thing)
        self.added[id] = thing

    @abstractmethod
    def enter(self, id: str, thing: Any) -> None:
        """Register with lmgym. Raises LmgymError for what it cannot use."""

    def get(self, id: str, kwargs: Mapping[str, Any]) -> Any:
        """An instance of the class, such as for rewards that are made of others."""
        return self.known(id)(**kwargs)

    def known(self, id: str) -> Any:
        """What was added. Raises LmgymError for another id."""
        if id not in self.added:
            raise LmgymError(f"no {self.what} '{id}' was added; {registry.suggest(id, self.added)}")
        return self.added[id]


class _DataPools(Registry):
    what = "datapool"

    def enter(self, id: str, thing: type) -> None:
        _register("task", id, task_of(id, thing))

    def get(self, id: str, kwargs: Mapping[str, Any]) -> TextGenPool:
        """The pool of one split: what its `prepare` returns."""
        pool: TextGenPool = self.known(id).prepare(**kwargs)
        return pool


class _Rewards(Registry):
    what = "reward"

    def enter(self, id: str, thing: type) -> None:
        if MetricRegistry.name(id) == id:
            raise LmgymError(
                f"reward '{id}': a metric was added under that id before; add the reward first, and the metric is "
                f"called '{id}_metric'"
            )
        _register("reward", id, reward_of(id, thing))


class _Metrics(Registry):
    """In a recipe a metric is a reward of weight 0, so a metric with the id of a reward is called `ID_metric` there."""

    what = "metric"

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[str, str] = {}

    def enter(self, id: str, thing: type) -> None:
        name = f"{id}_metric" if id in RewardFunctionRegistry.added else id
        _register("reward", name, metric_of(id, thing))
        self._names[id] = name

    def name(self, id: str) -> str | None:
        """The name of an added metric in a recipe; None if no metric `id` was added."""
        return self._names.get(id)


class _PostProcessors(Registry):
    """Functions from a text to the text that is judged instead: option `post_process` of any reward."""

    def enter(self, id: str, thing: Callable[[str], str]) -> None:
        if not callable(thing):
            raise LmgymError(f"post-processor '{id}' must be a function of a text, not {thing!r}")
        _register("post_processor", id, thing)

    def get(self, id: str, kwargs: Any = None) -> Callable[[str], str]:
        """The function, `three_sentence_summary` among them."""
        return registry.get("post_processor", id)


class _Algorithms(Registry):
    """Subclasses of lmgym's Algorithm, each in its wrapper, if one was added under the same id."""

    def enter(self, id: str, thing: type) -> None:
        learners.check_algorithm(id, thing)
        wrapped = WrapperRegistry.get(id)(thing)
        learners.check_algorithm(id, wrapped)
        _register("algorithm", id, wrapped)

    def get(self, id: str, kwargs: Any = None) -> type:
        """The class, of lmgym's own algorithms too."""
        return registry.get("algorithm", id)


class _Wrappers(Registry):
    """Functions from an algorithm's class to another class. RL4LMs' `wrap_onpolicy_alg` makes an algorithm collect text
    and pay the KL penalty, which lmgym's trainer does for every algorithm: it is accepted and changes nothing."""

    def enter(self, id: str, thing: Callable[[type], type]) -> None:
        learners.check_wrapper(id, thing)
        if thing is not learners.wrap_onpolicy_alg and id in registry.names("algorithm"):
            raise LmgymError(f"wrapper '{id}': there is an algorithm '{id}' already; add the wrapper before it")

    def get(self, id: str, kwargs: Any = None) -> Callable[[type], type]:
        """The wrapper of an algorithm; for lmgym's own, the one that changes nothing."""
        wrapper: Callable[[type], type] = self.added.get(id, learners.wrap_onpolicy_alg)
        return wrapper


class _Policies(Registry):
    """Settings of a recipe's `policy:` section, such as {"critic": "separate"}, or a class of transformers'."""

    what = "policy"

    def enter(self, id: str, thing: Any) -> None:
        learners.check_policy(id, thing)

    def get(self, id: str, kwargs: Any = None) -> Any:
        """The settings or the class added under this id."""
        return self.known(id)

    def section(self, id: str) -> dict[str, Any] | None:
        """The keys of a recipe's `policy:` section for an added policy; None if no policy `id` was added."""
        if id not in self.added:
            return None
        return dict(self.added[id]) if isinstance(self.added[id], Mapping) else {}


DataPoolRegistry, RewardFunctionRegistry, MetricRegistry = _DataPools(), _Rewards(), _Metrics()
PostProcessorRegistry, AlgorithmRegistry = _PostProcessors(), _Algorithms()
WrapperRegistry, PolicyRegistry = _Wrappers(), _Policies()


def _register(kind: str, id: str, thing: Any) -> None:
    """Register under a new name. Built-in names are not replaced, since recipes use them."""
    if id in BUILTIN[kind]:
        raise LmgymError(f"{kind} '{id}' is built in ({BUILTIN[kind][id].summary}); choose another id")
    registry.register(kind, id)(thing)
