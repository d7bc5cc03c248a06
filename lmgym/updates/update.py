"""One update of the policy, whatever the algorithm: the driver that it names takes the optimizer steps."""

import inspect
from collections.abc import Callable

from lmgym.algorithms.base import Algorithm
from lmgym.batch import Batch
from lmgym.core import registry
from lmgym.core.progress import doing
from lmgym.updates.checks import checked_numbers, refuse_taken
from lmgym.updates.optimizer import Optimizer
from lmgym.updates.protocols import TrainablePolicy, UpdateWatcher

Driver = Callable[..., dict[str, float]]  # of an algorithm, a policy, a batch, an optimizer; perhaps of a `watcher` too


@doing("updating")
def update(
    algorithm: Algorithm,
    policy: TrainablePolicy,
    batch: Batch,
    optimizer: Optimizer,
    watcher: UpdateWatcher | None = None,
) -> dict[str, float]:
    """Change the policy by one prepared batch; returns the metrics of the driver and of the algorithm.

    `batch` is what `prepare` returned. The `watcher` is shown numbers per token, if the driver has a parameter of this
    name. Raises LmgymError if there is no driver of the name `algorithm.driver`, if a method of the algorithm returns
    what it should not (checks.py), or if the gradient is not finite (the policy is then as it was).

    Example: a driver of your own, for every algorithm with `driver = "mine"`:
        >>> @register("driver", "mine")
        ... def mine(algorithm, policy, batch, optimizer):
        ...     return first_order(algorithm, policy, batch, optimizer) | {"mine/rows": float(len(batch))}
    """
    driver: Driver = registry.get("driver", algorithm.driver)
    watched = watcher is not None and "watcher" in inspect.signature(driver).parameters
    metrics = driver(algorithm, policy, batch, optimizer, **({"watcher": watcher} if watched else {}))
    own = checked_numbers(algorithm, "metrics", algorithm.metrics(batch))
    refuse_taken(algorithm, own, metrics, "its driver")
    return {**metrics, **own}
