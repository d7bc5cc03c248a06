"""Sampling one step ahead (`engine.ahead: 1`): while a step updates the policy, the next one's answers are sampled with
the weights as they were before.

What is sampled ahead is fixed by count, never by arrival: always the first draw of the next step. A checkpoint keeps
it, so that a resumed run goes on with the same answers.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lmgym.types import Episode

Played = dict[int, list[Episode]]  # scored episodes by the number of their environment


class Ahead:
    """The answers of a step that has not begun: being sampled, or there.

    Example: ahead.begin(4, share); ahead.finish(together); ahead.take(4)
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._step = -1
        self._running: Future[Played] | None = None
        self._ready: Played | None = None

    def begin(self, step: int, play: Callable[[], Played]) -> None:
        """Start to sample for a step, beside whatever else this process does."""
        self._step, self._running, self._ready = step, self._thread.submit(play), None

    def finish(self, together: Callable[[Played], Played]) -> None:
        """Wait until the sampling has ended, before the engine gets other weights; `together` then adds what other
        ranks have sampled. Raises whatever the sampling has raised."""
        if self._running is not None:
            played, self._running = self._running.result(), None
            self._ready = together(played)

    def take(self, step: int) -> Played | None:
        """The answers for this step, once; None if nothing was sampled for it."""
        found, self._ready = self._ready if step == self._step else None, None
        return found

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain JSON; empty if nothing is there."""
        if self._ready is None:
            return {}
        episodes = {str(number): [one.to_json() for one in own] for number, own in self._ready.items()}
        return {"step": self._step, "episodes": episodes}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with what `state` has returned. Raises KeyError, TypeError or ValueError for anything else."""
        if state:
            self._step = int(state["step"])
            self._ready = {int(n): [Episode.from_json(one) for one in own] for n, own in state["episodes"].items()}

    def close(self) -> None:
        """Wait for the thread, and drop what it has sampled."""
        self._thread.shutdown(wait=True, cancel_futures=True)
