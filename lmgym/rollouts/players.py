"""Who speaks in an episode, and what each has read and said, as ids. The text world: no torch.

A game has one seat for each player, most games one. What an environment says goes to the seat that speaks next.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.envs.vector import EnvFailure, Opening
from lmgym.inference.base import Completion, Engine, Request
from lmgym.text.chat import (
    Cut,
    answer_ids,
    appended_ids,
    continued_ids,
    decoder_answer_ids,
    messages_of,
    prompt_ids,
    source_ids,
)
from lmgym.types import Episode, Message, Turn


@dataclass(frozen=True)
class Actor:
    """Who answers: an engine with the tokenizer of its policy and the keyword arguments of its chat template.

    An encoder-decoder's answers begin with `decoder_start`; a causal model has none. An `opponent` plays the seats that do not learn, in the words of the same tokenizer; without one
    the actor itself does. A first prompt that is longer than `cut` allows is cut, and a reference that is imitated
    behind so many `reference_tokens`.
    """

    engine: Engine
    tokenizer: Any
    template: Mapping[str, Any] = field(default_factory=dict)
    version: int = 0
    decoder_start: tuple[int, ...] = ()
    opponent: "Actor | None" = None
    cut: Cut | None = None
    reference_tokens: int | None = None

    def read(self, prompt: str | Sequence[Message], template: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a first prompt: what the encoder reads, or a causal model; `template` in place of its own."""
        own = self.template if template is None else template
        return (source_ids if self.decoder_start else prompt_ids)(self.tokenizer, prompt, own, self.cut)


class Reader:
    """First prompts to ids, each distinct one rendered once: a group shares its prompt."""

    def __init__(self, actor: Actor) -> None:
        self.read = actor.read
        self.known: dict[Any, list[int]] = {}

    def __call__(self, prompt: str | Sequence[Message], template: Mapping[str, Any]) -> list[int]:
        said = prompt if isinstance(prompt, str) else json.dumps([dict(message) for message in prompt])
        key = (said, json.dumps(dict(template), sort_keys=True, default=repr) if template else "")
        if key not in self.known:
            self.known[key] = self.read(prompt, template)
        return list(self.known[key])


@dataclass
class PlayerState:
    """One player's conversation on its way."""

    episode: Episode
    actor: Actor
    key: int
    stop: tuple[str, ...]
    template: Mapping[str, Any]
    history: list[Message] = field(default_factory=list)  # before the message that the policy is writing
    ids: list[int] = field(default_factory=list)  # all tokens so far, the next turn's prompt included
    fresh: list[int] = field(default_factory=list)  # the part of them that no turn holds yet
    said: str = ""  # what stands already in the message that the policy is writing
    restarted: bool = False

    def open(self, prompt: str | Sequence[Message], reader: Reader) -> None:
        """Begin with a prompt, or begin anew with another. Raises LmgymError where it has no token."""
        ids = reader(prompt, self.template)
        if not ids:
            raise LmgymError(f"the prompt of example {self.episode.example.id} has no token at all; give it some text")
        self.history, self.ids, self.fresh, self.said = messages_of(prompt), ids, ids, ""
        self.restarted = bool(self.episode.turns)

    def request(self, one_turn: bool = False) -> Request:
        """The next turn, asked of the engine; what has been read before is named, so that it need not be read again."""
        key = seeds.key(self.key, len(self.episode.turns))
        if self.actor.decoder_start:
            return Request(self.actor.decoder_start, key, source_ids=tuple(self.ids), stop=self.stop)
        return Request(tuple(self.ids), key, stop=self.stop, conversation=None if one_turn else self.key)

    def demonstrated(self, text: str) -> Completion:
        """A demonstrator's turn as ids, its end included: the end of sequence, or the string that ends it."""
        tokenizer = self.actor.tokenizer
        if self.actor.decoder_start:
            ids = decoder_answer_ids(tokenizer, text)
        elif self.said or (self.episode.turns and not self.restarted):
            ids = [*continued_ids(tokenizer, text), tokenizer.eos_token_id]
        else:
            ids = answer_ids(tokenizer, self.history, text, self.template)
        ends = any(text.endswith(stop) for stop in self.stop)
        return Completion(ids[:-1], [], "stop") if ends else Completion(ids, [], "eos")

    def say(self, completion: Completion, text: str, minimum: int = 0) -> Turn:
        """Add a turn."""
        turn = Turn(self.fresh, completion.ids, completion.logprobs, text, completion.stop, minimum)
        turn.kept, turn.restart = completion.kept, self.restarted
        if start := self.actor.decoder_start:  # the encoder reads the whole conversation anew
            turn.prompt_ids, turn.source_ids, turn.restart = list(start), self.ids, bool(self.episode.turns)
        self.episode.turns.append(turn)
        self.said, self.restarted = self.said + text, False
        return turn

    def hear(self, step: Step, reader: Reader) -> bool:
        """What stands before the next turn; False where the model has no room for one."""
        turns = self.episode.turns
        if step.restart or not turns:
            self.open(step.messages, reader)
        elif step.continuation is not None:
            if self.actor.decoder_start:
                raise LmgymError(
                    "this environment lets the policy go on in the same message, which an encoder-decoder cannot do "
                    "here; take a causal model"
                )
            self.fresh = continued_ids(self.actor.tokenizer, step.continuation)
            self.ids, self.said = self.ids + turns[-1].action_ids + self.fresh, self.said + step.continuation
        else:
            last = turns[-1].action_ids[-1]
            self.fresh = appended_ids(self.actor.tokenizer, self.history, step.messages, last, self.template)
            self.history = [*self.history, {"role": "assistant", "content": self.said}, *step.messages]
            self.ids, self.said = self.ids + turns[-1].action_ids + self.fresh, ""
        context = self.actor.engine.context
        if context is None or len(self.ids) < context:
            return True
        if turns:
            turns[-1].stop = "context"
        return False


@dataclass
class EpisodeState:
    """One environment with its players. `place` is its own in the rollout, `next` the seat that speaks next."""

    place: int
    seats: list[PlayerState]
    next: int = 0

    @property
    def seat(self) -> PlayerState:
        return self.seats[self.next]

    def hear(self, step: Step | EnvFailure, reader: Reader) -> bool:
        """Take what the environment answers to the turn just said; True if the game goes on."""
        turn = self.seat.episode.turns[-1] if self.seat.episode.turns else None
        if isinstance(step, EnvFailure) or turn is None:
            return self._break(step.message if isinstance(step, EnvFailure) else "nothing was said")
        turn.reward, turn.unfinished, turn.continuation = float(step.reward), step.unfinished, step.continuation
        for player, reward in step.others.items():
            if not (0 <= player < len(self.seats) and self.seats[player].episode.turns):
                return self._break(f"step() pays player {player}, who has not played; there are {len(self.seats)}")
            self.seats[player].episode.turns[-1].reward += float(reward)
        for seat in self.seats:
            seat.episode.terminated = step.terminated
        if step.over or turn.stop == "context":
            return False
        self.next = self.next if step.player is None else step.player
        if not 0 <= self.next < len(self.seats):
            self.next = 0
            return self._break(f"step() names player {step.player} as the next, and there are {len(self.seats)}")
        return self.seat.hear(step, reader)

    def _break(self, reason: str) -> bool:
        for seat in self.seats:
            seat.episode.error, seat.episode.terminated, seat.episode.selected = reason, False, False
        return False


def seated(place: int, episode: Episode, found: Opening, actor: Actor, parent: int, reader: Reader) -> EpisodeState:
    """A game before its first turn. Player 0 has the given episode, the others get some of their own; those that do not
    learn are the opponent's."""
    seats = []
    for player in range(found.players):
        own = actor if player in found.learners or actor.opponent is None else actor.opponent
        mine = Episode(episode.example, episode.group, place, version=actor.version) if player else episode
        key = seeds.key(place, player, parent=parent) if player else seeds.key(place, parent=parent)
        seats.append(PlayerState(mine, own, key, found.stop, {**actor.template, **found.template}))
    game = EpisodeState(place, seats, found.player)
    game.seat.open(found.prompt, reader)
    return game
