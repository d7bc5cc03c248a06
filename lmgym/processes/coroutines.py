"""Results of coroutines of users' code (tools, environments, rewards), for callers that are none themselves."""

import inspect
import os
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any


def results_of(values: Sequence[Any]) -> list[Any]:
    """The values in order, each awaitable one replaced by its result. The awaitable ones begin in this order and run
    side by side; the first in order that raises decides the exception, after all have ended."""
    if not any(map(inspect.isawaitable, values)):
        return list(values)
    import asyncio

    loop = _event_loop(os.getpid())
    if asyncio._get_running_loop() is loop:
        raise RuntimeError("a coroutine called an ordinary function that waits for another one; await it instead")
    future = asyncio.run_coroutine_threadsafe(_together(values), loop)
    try:
        results = future.result()
    finally:
        future.cancel()  # no effect on one that has finished; a signal may have interrupted the wait
    for result in results:
        if isinstance(result, _Raised):
            raise result.error
    return results


def result_of(value: Any) -> Any:
    """The value; of an awaitable one its result."""
    return results_of([value])[0]


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _together(values: Sequence[Any]) -> list[Any]:
    import asyncio

    return list(await asyncio.gather(*map(_result, values)))


async def _result(value: Any) -> Any:
    """SystemExit and KeyboardInterrupt, too, are caught here: they would end the loop, and the next call with it."""
    try:
        return await value if inspect.isawaitable(value) else value
    except BaseException as error:
        return _Raised(error)


@cache
def _event_loop(process: int) -> Any:
    """One loop for all calls of a process, in a thread: clients that users' code keeps between its calls belong to a
    loop, and a notebook has one running already. A fork of the process needs another one."""
    import asyncio

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="coroutines", daemon=True).start()
    return loop
