"""Answers in chunks (`engine.chunk`): one that is long goes on with newer weights, and holds no step up.

The plan goes by count, as that of training/ahead.py. With K steps ahead and chunks of C tokens, token t of an answer of
step s is sampled with the weights after max(0, min(s - K + t // C, s - 1)) updates. So a step learns from all answers
to its own prompts, however long they are; none is dropped, put off or preferred. While step u updates, one call of the
engine samples the chunks of the next K steps: those of step u + 1 to their end, since the next update needs them.
(Kimi k1.5, arXiv 2501.12599, section 2.6.2, and AReaL, arXiv 2505.24298, learn from what is finished first.)"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.functional import truncation
from lmgym.inference.base import PAUSED, Completion, Engine, Request, Sampling
from lmgym.models.policy import Policy
from lmgym.rollouts.play import Draw, first_requests, play_share
from lmgym.training.ahead import Ahead, Played
from lmgym.types import Restriction, Turn

Answers = dict[int, Turn]  # by the key of their request: what is sampled of each; its stop is "paused" if more follows


@dataclass
class StepAnswers:
    """The answers of a step to come: those of this rank, and the others' as they were at the last checkpoint.
    `version` is that of the weights that began them.

    Example: StepAnswers(version=3, own={key: Turn([], [7, 9], [-0.5, -0.1], stop="paused", versions=[[3, 2]])})"""

    version: int
    own: Answers = field(default_factory=dict)
    others: Answers = field(default_factory=dict)


class AheadInChunks(Ahead):
    """The policy's answers, of which the first draw of each step was sampled in chunks, up to `steps` steps before.

    Example: ahead.begin_ahead(stage.draw, step=3, steps=60); ahead.finish(4); ahead.episodes(stage.draw(4))"""

    def __init__(self, requirements: Any, steps: int, chunk: int, beside: bool = True) -> None:
        super().__init__(requirements, steps, beside)
        self.chunk = chunk
        self._coming: dict[int, StepAnswers] = {}  # by step, in order
        self._ranks: Ranks = ALONE
        self._unsent = False  # the other ranks lack what this one has sampled

    def begin_ahead(self, draw: Callable[[int], Draw], step: int, steps: int) -> None:
        """Begin to sample the chunks that the weights as they are now have to sample."""
        coming = range(step + 1, min(step + self.steps, steps - 1) + 1)
        draws = {number: draw(number) for number in coming if number not in self._ready}
        for number, one in draws.items():
            if number not in self._coming:
                self._coming[number] = StepAnswers(one.actor.version)
            self._ranks, self._unsent = one.actor.ranks, True
        if not draws:
            return
        played = self._beside(partial(self._played, draws, step + 1))
        if step + 1 in draws:
            self._running[step + 1] = (draws[step + 1], played)
        else:  # the recipe had no chunks when that step was sampled
            played()

    def settle(self) -> None:
        """Wait for what is in flight, and let all ranks know what each has sampled of later steps."""
        super().settle()
        if self._ranks.size == 1 or not self._unsent:
            return
        self._unsent = False
        own = {step: _to_json(answers.own) for step, answers in self._coming.items()}
        for rank, part in enumerate(self._ranks.gather(json.dumps(own).encode())):
            if rank != self._ranks.rank:
                for step, answers in json.loads(part).items():
                    self._coming[int(step)].others |= _from_json(answers)

    def state_dict(self) -> dict[str, Any]:
        begun = [
            {"step": step, "version": one.version, "answers": _to_json(one.others | one.own)}
            for step, one in self._coming.items()
        ]
        return {"draws": [], **super().state_dict(), "begun": begun} if begun else super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for one in state.get("begun", []):
            self._coming[int(one["step"])] = StepAnswers(int(one["version"]), others=_from_json(one["answers"]))

    def _played(self, draws: Mapping[int, Draw], following: int) -> Played:
        """Sample the chunks of all these steps in one call of the engine; returns the episodes of step `following`, if
        it is one of them, scored."""
        # 1. Who goes on, and up to where.
        asked: list[tuple[Turn, Request]] = []
        for step, draw in draws.items():
            pause = None if step == following else (following - step + self.steps) * self.chunk
            for request in first_requests(draw).values():
                answer = self._answer(step, request.key)
                if answer.stop == PAUSED and (pause is None or len(answer.action_ids) < pause):
                    begun = tuple(answer.action_ids)
                    asked.append((answer, replace(request, conversation=None, begun=begun, pause=pause)))
        # 2. Their next tokens.
        newest = next(iter(draws.values()))
        began = time.perf_counter()
        completions = newest.actor.engine.generate([request for _, request in asked], newest.sampling)
        seconds = time.perf_counter() - began
        for (answer, _), completion in zip(asked, completions, strict=True):
            _append(answer, completion, newest.actor.version, seconds)
        # 3. The step whose answers are complete.
        if following not in draws:
            return {}
        answers, draw = self._coming.pop(following), draws[following]
        actor = replace(draw.actor, engine=Sampled(draw.actor.engine, answers.own), version=answers.version)
        played = play_share(replace(draw, actor=actor))
        for number, request in first_requests(draw).items():
            (turn,), answer = played[number][0].turns, answers.own[request.key]
            turn.versions = answer.versions if len(answer.versions) > 1 else []
            turn.seconds = answer.seconds  # of all its calls; of a resumed run those since
        return played

    def _answer(self, step: int, key: int) -> Turn:
        """What is sampled of an answer of this rank."""
        answers = self._coming[step]
        if key not in answers.own:  # from a checkpoint, or not begun
            answers.own[key] = answers.others.pop(key, Turn([], [], stop=PAUSED))
        return answers.own[key]


class Sampled:
    """An engine whose answers are there already, by the keys of their requests.

    Example: Sampled(engine, answers).generate(requests, sampling)[0].ids == answers[requests[0].key].action_ids"""

    def __init__(self, engine: Engine[Policy], answers: Answers) -> None:
        self.engine, self.answers = engine, answers

    @property
    def context(self) -> int | None:
        return self.engine.context

    @property
    def rows(self) -> int:
        return self.engine.rows

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, ended: Callable[[int, list[int]], None] | None = None
    ) -> list[Completion]:
        found = [self.answers[request.key] for request in requests]
        if ended is not None:
            for number, answer in enumerate(found):
                ended(number, answer.action_ids)
        return [Completion(one.action_ids, one.logprobs, one.stop, one.kept) for one in found]

    def restricted(self, restriction: Restriction, mask: Policy | None = None) -> "Sampled":
        return self

    def forget(self, conversations: Sequence[int]) -> None:
        """Nothing is cached."""

    def load(self, policy: Policy, version: int) -> None:
        """Nothing is sampled any more."""

    def release(self) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Nothing to end."""


def _append(answer: Turn, completion: Completion, version: int, seconds: float) -> None:
    """Add what weights of this version have sampled to an answer."""
    answer.action_ids = [*answer.action_ids, *completion.ids]
    answer.logprobs = [*answer.logprobs, *completion.logprobs]
    if completion.kept is not None:
        parts = [completion.kept] if answer.kept is None else [answer.kept, completion.kept]
        answer.kept = truncation.concatenate(parts)
    if answer.versions and answer.versions[-1][0] == version:  # a resumed run may have longer chunks
        answer.versions[-1][1] += len(completion.ids)
    else:
        answer.versions.append([version, len(completion.ids)])
    answer.stop = completion.stop
    answer.seconds["sampling"] = answer.seconds.get("sampling", 0.0) + seconds


def _to_json(answers: Answers) -> dict[str, Any]:
    return {str(key): answers[key].to_json() for key in sorted(answers)}


def _from_json(tree: Mapping[str, Any]) -> Answers:
    return {int(key): Turn.from_json(turn) for key, turn in tree.items()}
