"""One update of the policy, whatever the algorithm: the driver that it names takes the optimizer steps."""

from collections.abc import Callable

from lmgym.algorithms.base import Algorithm
from lmgym.batch import Batch
from lmgym.core import registry
from lmgym.updates.optimizer import Optimizer
from lmgym.updates.protocols import TrainablePolicy

Driver = Callable[[Algorithm, TrainablePolicy, Batch, Optimizer], dict[str, float]]


def update(algorithm: Algorithm, policy: TrainablePolicy, batch: Batch, optimizer: Optimizer) -> dict[str, float]:
    """Change the policy by one prepared batch; returns the metrics of the driver and of the algorithm.

    `batch` is what `prepare` returned. Raises LmgymError if there is no driver of the name `algorithm.driver`, or if
    the gradient is not finite (the policy is then as it was).

    Example: a driver of your own, for every algorithm with `driver = "mine"`:
        >>> @register("driver", "mine")
        ... def mine(algorithm, policy, batch, optimizer):
        ...     return first_order(algorithm, policy, batch, optimizer) | {"mine/rows": float(len(batch))}
    """
    driver: Driver = registry.get("driver", algorithm.driver)
    return {**driver(algorithm, policy, batch, optimizer), **algorithm.metrics(batch)}
