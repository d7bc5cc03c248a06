"""Sampling K steps ahead (`engine.ahead`): while a step updates the policy, the answers of later ones are sampled.

The plan goes by count, never by arrival. The first draw of step s is sampled with the weights after max(0, s - K)
updates, in the order of the steps, one draw after the other. Whatever this process asks the engine itself (further
draws, greedy answers, evaluations) waits until all of them are there, and so does a checkpoint, which keeps them: a
resumed run goes on with the same answers."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from lmgym.rollouts.play import Draw, checked, exchanged, play_share
from lmgym.rollouts.rollout import finished_episodes
from lmgym.rollouts.sources import PolicyAnswers
from lmgym.types import Episode

Played = dict[int, list[Episode]]  # scored episodes by the number of their environment


class Ahead(PolicyAnswers):
    """The policy's answers, of which the first draw of each step was sampled up to `steps` steps before. With `beside`
    a thread samples them while this process updates; else they are sampled in turn, before the update: for engines
    that read the policy's own weights.

    Example: ahead.begin_ahead(stage.draw, step=3, steps=60); ahead.finish(4); ahead.episodes(stage.draw(4))"""

    def __init__(self, requirements: Any, steps: int = 1, beside: bool = True) -> None:
        super().__init__(requirements)
        self.lag = self.steps = steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead") if beside else None
        self._running: dict[int, tuple[Draw, Callable[[], Played]]] = {}  # by step, in order; not exchanged yet
        self._ready: dict[int, Played] = {}

    def episodes(self, draw: Draw) -> list[Episode]:
        """What was sampled ahead for this draw; else its answers now."""
        step, number = (int(one) for one in draw.key[-2:])
        if number == 0 and step in self._running:
            self.finish(step)
        played = self._ready.pop(step, None) if number == 0 else None
        if played is None:
            self.settle()
            return super().episodes(draw)
        episodes = checked(draw, finished_episodes(played))
        oldest = min((episode.version for episode in episodes), default=draw.actor.version)
        self.lag = max(self.steps, draw.actor.version - oldest)  # a resumed run may have had a longer plan
        return episodes

    def begin_ahead(self, draw: Callable[[int], Draw], step: int, steps: int) -> None:
        """Begin the draws of the next steps that are not begun yet, with the weights as they are now."""
        for number in range(step + 1, min(step + self.steps, steps - 1) + 1):
            if number not in self._running and number not in self._ready:
                self._running[number] = self._begun(draw(number))

    def finish(self, following: int) -> None:
        """Wait for the answers that step `following` begins with, and exchange them with the other ranks. Raises
        whatever the sampling has raised."""
        for step in [step for step in self._running if step <= following]:
            draw, played = self._running.pop(step)
            self._ready[step] = exchanged(draw.actor.ranks, played(), draw.prompts)

    def settle(self) -> None:
        """Wait for all that is in flight."""
        for step in [*self._running]:
            self.finish(step)

    def _begun(self, draw: Draw) -> tuple[Draw, Callable[[], Played]]:
        """A draw in flight, and how to get what it has sampled."""
        # Later weights must not reach it; an engine that cannot keep any is one step ahead at most.
        keep = getattr(draw.actor.engine, "kept", None)
        if keep is not None and self._thread is not None:
            draw = replace(draw, actor=replace(draw.actor, engine=keep()))
        return draw, self._beside(partial(play_share, draw))

    def _beside(self, act: Callable[[], Played]) -> Callable[[], Played]:
        """Begin to sample, in the thread if there is one; returns how to get what was sampled."""
        if self._thread is not None:
            return self._thread.submit(act).result
        played = act()
        return lambda: played

    def state_dict(self) -> dict[str, Any]:
        draws = [
            {"step": step, "episodes": {str(number): [one.to_json() for one in own] for number, own in played.items()}}
            for step, played in self._ready.items()
        ]
        return {"draws": draws} if draws else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for one in state.get("draws", [state] if state else []):  # of one step, the draw had no list around it
            episodes = {int(n): [Episode.from_json(tree) for tree in own] for n, own in one["episodes"].items()}
            self._ready[int(one["step"])] = episodes

    def close(self) -> None:
        """Wait for the thread, and drop what it has sampled."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
