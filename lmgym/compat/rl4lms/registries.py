"""RL4LMs' seven registries: `add(id, class)` registers a class for recipes and for RL4LMs' own files.

    from lmgym.compat.rl4lms.registries import DataPoolRegistry     # in place of rl4lms.envs.text_generation.registry

A class is registered in this process only, so name the module that adds it in the recipe's `plugins:`. `get` returns
added classes only; for lmgym's own tasks, rewards and algorithms use `lmgym.core.registry`.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from lmgym.compat.rl4lms import learners
from lmgym.compat.rl4lms.data_pool import TextGenPool, task_of
from lmgym.compat.rl4lms.metric import metric_of
from lmgym.compat.rl4lms.reward import reward_of
from lmgym.core import registry
from lmgym.core.builtins import BUILTIN
from lmgym.core.errors import LmgymError


class DataPoolRegistry:
    """Subclasses of TextGenPool, as tasks.

    Example:
        >>> DataPoolRegistry.add("sums", Sums)
        >>> lmgym.tasks.base.load_task("sums", "train", largest=3)
    """

    added: ClassVar[dict[str, type]] = {}

    @classmethod
    def add(cls, id: str, datapool_cls: type) -> None:
        """Make the pool the task `id`."""
        _register("task", id, task_of(id, datapool_cls))
        cls.added[id] = datapool_cls

    @classmethod
    def get(cls, datapool_id: str, kwargs: Mapping[str, Any]) -> TextGenPool:
        """The pool of one split: what its `prepare` returns."""
        pool: Any = _known("datapool", datapool_id, cls.added)
        return pool.prepare(**kwargs)


class RewardFunctionRegistry:
    """Classes of rewards, step by step or batched.

    Example: RewardFunctionRegistry.add("punctuation", Punctuation)
    """

    added: ClassVar[dict[str, type]] = {}

    @classmethod
    def add(cls, id: str, reward_fn_cls: type) -> None:
        """Make the class the reward `id`."""
        if MetricRegistry.name(id) == id:
            raise LmgymError(
                f"reward '{id}': a metric was added under that id before; add the reward first, and the metric is "
                f"called '{id}_metric'"
            )
        _register("reward", id, reward_of(id, reward_fn_cls))
        cls.added[id] = reward_fn_cls

    @classmethod
    def get(cls, reward_fn_id: str, kwargs: Mapping[str, Any]) -> Any:
        """An instance of the class, for rewards that are made of others."""
        return _known("reward", reward_fn_id, cls.added)(**kwargs)


class MetricRegistry:
    """Classes of metrics. In a recipe a metric is a reward of weight 0, so a metric with the id of a reward is called
    `ID_metric` there.

    Example: MetricRegistry.add("ended", Ended)
    """

    added: ClassVar[dict[str, type]] = {}
    _names: ClassVar[dict[str, str]] = {}

    @classmethod
    def add(cls, id: str, metric_cls: type) -> None:
        """Register the class as the metric `id`, or `ID_metric` if there is a reward `id`."""
        name = f"{id}_metric" if id in RewardFunctionRegistry.added else id
        _register("reward", name, metric_of(id, metric_cls))
        cls.added[id], cls._names[id] = metric_cls, name

    @classmethod
    def get(cls, metric_id: str, kwargs: Mapping[str, Any]) -> Any:
        """An instance of the class."""
        return _known("metric", metric_id, cls.added)(**kwargs)

    @classmethod
    def name(cls, id: str) -> str | None:
        """The name of an added metric in a recipe; None if no metric `id` was added."""
        return cls._names.get(id)


class PostProcessorRegistry:
    """Functions from a text to the text that is judged instead: option `post_process` of any reward.

    Example: PostProcessorRegistry.add("first_line", lambda text: text.split("\\n")[0])
    """

    @classmethod
    def add(cls, id: str, post_processor_fn: Callable[[str], str]) -> None:
        """Make the function the post-processor `id`."""
        if not callable(post_processor_fn):
            raise LmgymError(f"post-processor '{id}' must be a function of a text, not {post_processor_fn!r}")
        _register("post_processor", id, post_processor_fn)

    @classmethod
    def get(cls, post_processor_id: str) -> Callable[[str], str]:
        """The function, `three_sentence_summary` among them."""
        return registry.get("post_processor", post_processor_id)


class AlgorithmRegistry:
    """Subclasses of lmgym's Algorithm, as algorithms.

    Example: AlgorithmRegistry.add("my_ppo", MyPPO)     # class MyPPO(lmgym.algorithms.actor_critic.PPO)
    """

    @classmethod
    def add(cls, id: str, alg_cls: type) -> None:
        """Register the class, wrapped if a wrapper `id` was added, as the algorithm `id`."""
        learners.check_algorithm(id, alg_cls)
        _register("algorithm", id, WrapperRegistry.wrapped(id, alg_cls))

    @classmethod
    def get(cls, alg_id: str) -> type:
        """The class, of lmgym's own algorithms too."""
        return registry.get("algorithm", alg_id)


class WrapperRegistry:
    """Wrappers: functions from an algorithm's class to another class. RL4LMs' `wrap_onpolicy_alg` makes an algorithm
    collect text and pay the KL penalty, which lmgym's trainer does for every algorithm: it is accepted and changes
    nothing.

    Example: WrapperRegistry.add("my_ppo", wrap_onpolicy_alg)     # before or behind AlgorithmRegistry.add
    """

    added: ClassVar[dict[str, Callable[[type], type]]] = {}

    @classmethod
    def add(cls, id: str, wrapper_def: Callable[[type], type]) -> None:
        """Apply the wrapper to the algorithm that is added under this id."""
        learners.check_wrapper(id, wrapper_def)
        if wrapper_def is not learners.wrap_onpolicy_alg and id in registry.names("algorithm"):
            raise LmgymError(f"wrapper '{id}': there is an algorithm '{id}' already; add the wrapper before it")
        cls.added[id] = wrapper_def

    @classmethod
    def get(cls, alg_id: str) -> Callable[[type], type]:
        """The wrapper of an algorithm; for lmgym's own, the one that changes nothing."""
        return cls.added.get(alg_id, learners.wrap_onpolicy_alg)

    @classmethod
    def wrapped(cls, id: str, alg_cls: type) -> type:
        """The algorithm, wrapped."""
        found = cls.get(id)(alg_cls)
        learners.check_algorithm(id, found)
        return found


class PolicyRegistry:
    """Policies: settings of a recipe's `policy:` section under a name, or a class of transformers' for models of its
    own architecture.

    Example: PolicyRegistry.add("two_trunks", {"critic": "separate"})
    """

    added: ClassVar[dict[str, Any]] = {}

    @classmethod
    def add(cls, id: str, policy_cls: Any) -> None:
        """Make the settings the policy `id` of RL4LMs' files, or the class known to transformers."""
        learners.check_policy(id, policy_cls)
        cls.added[id] = policy_cls

    @classmethod
    def get(cls, policy_id: str) -> Any:
        """The settings or the class added under this id."""
        return _known("policy", policy_id, cls.added)

    @classmethod
    def section(cls, id: str) -> dict[str, Any] | None:
        """The keys of a recipe's `policy:` section for an added policy; None if no policy `id` was added."""
        if id not in cls.added:
            return None
        return dict(cls.added[id]) if isinstance(cls.added[id], Mapping) else {}


def _register(kind: str, id: str, thing: Any) -> None:
    """Register under a new name. Built-in names are not replaced, since recipes use them."""
    if id in BUILTIN[kind]:
        raise LmgymError(f"{kind} '{id}' is built in ({BUILTIN[kind][id].summary}); choose another id")
    registry.register(kind, id)(thing)


def _known(what: str, id: str, added: Mapping[str, Any]) -> Any:
    if id not in added:
        raise LmgymError(f"no {what} '{id}' was added; {registry.suggest(id, added)}")
    return added[id]
