"""Sampling one step ahead (`engine.ahead: 1`): while a step updates the policy, the next one's answers are sampled with
the weights as they were before.

What is sampled ahead is fixed by count, never by arrival: always the first draw of the next step. A checkpoint keeps
it, so that a resumed run goes on with the same answers."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lmgym.rollouts.play import Draw, checked, exchanged, play_share
from lmgym.rollouts.rollout import finished_episodes
from lmgym.rollouts.sources import PolicyAnswers
from lmgym.types import Episode

Played = dict[int, list[Episode]]  # scored episodes by the number of their environment


class Ahead(PolicyAnswers):
    """The policy's answers, of which the first draw of each step was sampled while the step before it was updated.

    Example: ahead.begin_next(draw_of_step_4); ahead.finish(); ahead.episodes(draw_of_step_4())"""

    lag = 1

    def __init__(self, requirements: Any) -> None:
        super().__init__(requirements)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._step = -1
        self._running: tuple[Draw, Future[Played]] | None = None
        self._ready: Played | None = None

    def episodes(self, draw: Draw) -> list[Episode]:
        """What was sampled ahead for this draw; else its answers now."""
        step, number = draw.key[-2:]
        played = None
        if number == 0:
            played, self._ready = self._ready if step == self._step else None, None
        return super().episodes(draw) if played is None else checked(draw, finished_episodes(played))

    def begin_next(self, draw: Callable[[], Draw]) -> None:
        """Start to sample the draw, beside whatever else this process does."""
        following = draw()
        self._step, self._ready = int(following.key[-2]), None
        self._running = following, self._thread.submit(play_share, following)

    def finish(self) -> None:
        """Wait until the sampling has ended, and exchange the answers with the other ranks. Raises whatever the
        sampling has raised."""
        if self._running is not None:
            (draw, playing), self._running = self._running, None
            self._ready = exchanged(draw.actor.ranks, playing.result(), draw.prompts)

    def state_dict(self) -> dict[str, Any]:
        if self._ready is None:
            return {}
        episodes = {str(number): [one.to_json() for one in own] for number, own in self._ready.items()}
        return {"step": self._step, "episodes": episodes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._step = int(state["step"])
            self._ready = {int(n): [Episode.from_json(one) for one in own] for n, own in state["episodes"].items()}

    def close(self) -> None:
        """Wait for the thread, and drop what it has sampled."""
        self._thread.shutdown(wait=True, cancel_futures=True)
