"""The players of an episode: what each one has read and said, as token ids. Imports no torch.

Most environments have one player. In a game of several, each player has a conversation of its own, and an observation
goes to the player whose turn is next."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmgym.core import seeds
from lmgym.core.errors import LmgymError, represent
from lmgym.envs.base import Branch, Heard, Step
from lmgym.envs.past import WHOLE, Past
from lmgym.envs.step_checks import plain
from lmgym.envs.vector import EnvFailure, Opening
from lmgym.inference.base import Completion, Request
from lmgym.rollouts.actor import Actor, PromptCache
from lmgym.text.answer_ends import end_id
from lmgym.text.chat import answer_ids, appended_ids, continued_ids, decoder_answer_ids, messages_of, unwritten
from lmgym.text.tokens import token_texts
from lmgym.types import BarePrompt, Episode, Message, Prompt, Turn


@dataclass
class PlayerState:
    """One player's conversation so far.
    Example: a player that has read "2+2=" and not answered yet has ids == new_ids, an empty message and no turn."""

    episode: Episode
    actor: Actor
    key: int  # of its random numbers
    stop: tuple[str, ...]
    template: Mapping[str, Any]
    history: list[Message] = field(default_factory=list)  # the messages before the one that the policy is writing
    ids: list[int] = field(default_factory=list)  # all tokens so far, the next turn's prompt included
    new_ids: list[int] = field(default_factory=list)  # the tokens at the end of `ids` that no turn holds yet
    message: str = ""  # the beginning of the message that the policy is writing
    restarted: bool = False  # the next turn begins a new row
    bare: bool = False  # the conversation has begun with a BarePrompt, so nothing of it goes through the template
    sampling_seed: tuple[int, ...] = ()  # that the environment gives the next turn
    past: Past = WHOLE
    first: int = 0  # messages of the first prompt
    told: list[Message] = field(default_factory=list)  # as `history`, with what the past has lost

    def begin(self, prompt: Prompt, encode: PromptCache) -> None:
        """Start the conversation, or start it again, with a prompt. Raises LmgymError if the prompt has no token, or if
        an environment has put a rendered prompt into a message."""
        if getattr(self.episode.example.prompt, "form", "text") == "rendered" and not isinstance(prompt, str):
            raise LmgymError(
                f"example {self.episode.example.id}: task.prompts is rendered, and the environment puts it into "
                "a message, which would be rendered again; write prompts: chat, or env: single_turn"
            )
        ids = encode(prompt, self.template)
        if not ids:
            raise LmgymError(f"the prompt of example {self.episode.example.id} has no token at all; give it some text")
        self.history, self.ids, self.new_ids, self.message = messages_of(prompt), ids, ids, self.actor.answer_start
        self.bare, self.episode.chat = isinstance(prompt, BarePrompt), not isinstance(prompt, str)
        self.first, self.told, self.restarted = len(self.history), list(self.history), bool(self.episode.turns)

    def request(self, one_turn: bool = False) -> Request:
        """The engine's request for the next turn. It names the conversation, so that the engine can reuse its cache."""
        key = seeds.key(self.key, len(self.episode.turns))
        if self.sampling_seed:
            key = seeds.key("seed", *self.sampling_seed, parent=self.key)
        if self.actor.decoder_start:
            return Request(self.actor.decoder_ids, key, source_ids=tuple(self.ids), stop=self.stop)
        return Request(tuple(self.ids), key, stop=self.stop, conversation=None if one_turn else self.key)

    def tokenize_demonstration(self, text: str) -> Completion:
        """A demonstrator's turn as ids, with the end of sequence, or the stop string, that ends it. Raises LmgymError
        for a turn of which nothing is left behind what is written already."""
        tokenizer = self.actor.tokenizer
        if self.actor.decoder_start:
            ids = decoder_answer_ids(tokenizer, text, bool(self.actor.answer_start))
        elif self.message or (self.episode.turns and not self.restarted):
            new = text if self._goes_on() else unwritten(tokenizer, self._asked(), text, self.template, self.message)
            ids = [*continued_ids(tokenizer, new), tokenizer.eos_token_id if self.bare else end_id(tokenizer)]
        else:
            ids = answer_ids(tokenizer, self._asked(), text, self.template)
        stopped = any(text.endswith(stop) for stop in self.stop)
        if stopped and len(ids) == 1:
            raise LmgymError(
                f"example {self.episode.example.id}: the turn {represent(text)} is no action, as the chat template or "
                "policy.answer_start has written it already; leave it out of the reference"
            )
        return Completion(ids[:-1], [], "stop") if stopped else Completion(ids, [], "eos")

    def _goes_on(self) -> bool:
        """Whether the next turn goes on in the message of the last one."""
        turns = self.episode.turns
        return bool(turns) and turns[-1].continuation is not None and not self.restarted

    def _asked(self) -> Prompt:
        """What the message that is being written answers; in a conversation without chat template the first prompt
        alone can have begun it."""
        if not self.bare:
            return self.history
        return self.history[0]["content"] if len(self.history) == 1 else BarePrompt("")

    def add_turn(self, completion: Completion, text: str, min_new_tokens: int = 0) -> None:
        """Add what the policy has answered to the episode."""
        turn = Turn(self.new_ids, completion.ids, completion.logprobs, text, completion.stop, min_new_tokens)
        turn.kept, turn.restart = completion.kept, self.restarted
        turn.given = "" if self._goes_on() else self.actor.answer_start
        if self.actor.decoder_start:  # the encoder reads the whole conversation again
            turn.prompt_ids, turn.source_ids = list(self.actor.decoder_ids), self.ids
            turn.restart = bool(self.episode.turns)
        self.episode.turns.append(turn)
        self.message, self.restarted = self.message + text, False
        self.episode.messages = [*self.told, {"role": "assistant", "content": self.message}]

    def heard(self) -> Heard:
        """What the environment may know of the newest turn's tokens."""
        return Heard(len(self.ids), len(self.episode.turns[-1].action_ids), self.tokens)

    def tokens(self) -> list[tuple[str, float]]:
        """The newest turn's tokens as texts, without its end of sequence, with their log-probabilities."""
        turn = self.episode.turns[-1]
        count = len(turn.action_ids) - (turn.stop == "eos")
        return list(zip(token_texts(self.actor.tokenizer, turn.action_ids)[:count], turn.logprobs, strict=False))

    def observe(self, step: Step, encode: PromptCache) -> bool:
        """Append what the environment answers; False if the model has no room for another turn."""
        turns = self.episode.turns
        if step.branch is not None:
            self._branch(step.messages, step.branch, encode)
        elif step.restart or not turns:
            self.begin(step.messages, encode)
        elif step.continuation is not None:
            self._continue_message(step.continuation)
        elif (past := self.past.cut(whole := self._with_answer(step.messages), self.first)) != whole:
            first, told = self.first, [*self.told, *whole[len(self.history) :]]
            self.begin(past, encode)  # a changed past is a new row
            self.first, self.told = first, told
        else:
            said, ended = turns[-1].action_ids, turns[-1].stop == "eos"
            self.new_ids = appended_ids(
                self.actor.tokenizer, self.history, step.messages, said[-1], self.template, ended, self.bare
            )
            self.told, self.history = [*self.told, *whole[len(self.history) :]], whole
            start = self.actor.start_ids
            if self.actor.decoder_start:  # the encoder reads the answer with its start, the decoder the next start
                said = [*start, *said]
            else:
                self.new_ids = [*self.new_ids, *start]
            self.ids, self.message = self.ids + said + self.new_ids, self.actor.answer_start
        if not self.too_long():
            return True
        if turns:
            turns[-1].stop = "context"
        return False

    def _branch(self, messages: Sequence[Message], branch: Branch, encode: PromptCache) -> None:
        """Go on from an earlier turn, or from none. Raises LmgymError where a past cannot be kept."""
        if self.actor.decoder_start or self.past != WHOLE:
            raise LmgymError(
                "this environment goes back to earlier turns, which needs a causal model, and the whole past: leave "
                "env.window and env.thoughts out"
            )
        self.stop, self.template = branch.stop, {**self.actor.template, **branch.template}
        self.bare, self.sampling_seed = branch.bare, branch.sampling_seed
        if branch.turn is None:
            self.begin(BarePrompt(messages[0]["content"]) if branch.bare else messages, encode)
            return
        # 1. The tokens up to the answer: those of its row.
        turns, turn = self.episode.turns, self.episode.turns[branch.turn]
        begin = next(n for n in range(branch.turn, -1, -1) if n == 0 or turns[n].restart)
        kept = [id for one in turns[begin : branch.turn + 1] for id in (*one.prompt_ids, *one.action_ids)]
        # 2. What follows it.
        history, new = list(messages[: branch.covered - 1]), messages[branch.covered :]
        added = appended_ids(
            self.actor.tokenizer, history, new, turn.action_ids[-1], self.template, turn.stop == "eos", self.bare
        )
        added += self.actor.start_ids
        # 3. The same row goes on, or another begins.
        self.restarted = branch.turn != len(turns) - 1
        self.ids, self.history, self.told = [*kept, *added], list(messages), list(messages)
        self.new_ids, self.message = self.ids if self.restarted else added, self.actor.answer_start

    def _with_answer(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation with the policy's message and what answers it."""
        return [*self.history, {"role": "assistant", "content": self.message}, *messages]

    def too_long(self) -> str:
        """A sentence if the model has no room for another turn, else empty."""
        context = self.actor.engine.context
        if context is None or len(self.ids) < context:
            return ""
        return f"a prompt of the environment has {len(self.ids)} tokens, and the model reads {context} at most"

    def _continue_message(self, text: str) -> None:
        """Put a text of the environment behind the policy's own, in the same message."""
        if self.actor.decoder_start:
            raise LmgymError(
                "this environment lets the policy go on in the same message, which an encoder-decoder cannot do "
                "here; take a causal model"
            )
        self.new_ids = continued_ids(self.actor.tokenizer, text)
        self.ids = self.ids + self.episode.turns[-1].action_ids + self.new_ids
        self.message += text


@dataclass
class EpisodeState:
    """One environment of a rollout with its players; players[current] takes the next turn."""

    index: int  # in the rollout
    players: list[PlayerState]
    current: int = 0

    @property
    def player(self) -> PlayerState:
        """The player that takes the next turn."""
        return self.players[self.current]

    def observe(self, step: Step | EnvFailure, encode: PromptCache) -> bool:
        """Record what the environment answers to the last turn; True if the episode goes on."""
        turn = self.player.episode.turns[-1] if self.player.episode.turns else None
        if isinstance(step, EnvFailure) or turn is None:
            return self._fail(step.message if isinstance(step, EnvFailure) else "nothing was said")

        # Rewards: to the player that has just moved, then to the others, if the step pays them.
        turn.reward, turn.unfinished, turn.continuation = float(step.reward), step.unfinished, step.continuation
        turn.info = {name: _number_or_text(note) for name, note in step.info.items()}
        for number, reward in step.others.items():
            if not (0 <= number < len(self.players) and self.players[number].episode.turns):
                return self._fail(f"step() pays player {number}, who has not played; there are {len(self.players)}")
            self.players[number].episode.turns[-1].reward += float(reward)
        for player in self.players:
            player.episode.terminated = step.terminated
        if step.over or turn.stop == "context":
            return False

        # The next player reads the observation.
        if step.player is not None and not 0 <= step.player < len(self.players):
            return self._fail(f"step() names player {step.player} as the next, and there are {len(self.players)}")
        self.current = self.current if step.player is None else step.player
        try:
            return self.player.observe(step, encode)
        except LmgymError as error:
            if step.branch is None:
                raise
            return self._fail(str(error))  # a program's request that the chat template refuses, not the recipe

    def _fail(self, reason: str) -> bool:
        for player in self.players:
            player.episode.error, player.episode.terminated, player.episode.selected = reason, False, False
        return False


def _number_or_text(note: Any) -> str | float:
    """A note of an environment as a number or a text, which can be written to a file."""
    note = plain(note)
    if isinstance(note, str | int | float):
        return note
    return float(note) if isinstance(note, numbers.Real) else str(note)


def begin_episode(
    index: int,
    episode: Episode,
    opening: Opening,
    actor: Actor,
    parent_key: int,
    encode: PromptCache,
    past: Past = WHOLE,
) -> EpisodeState:
    """An environment with its players, before the first turn. Player 0 has the given episode, the others get episodes
    of their own. The opponent plays those that do not learn."""
    players = []
    for number in range(opening.players):
        plays = actor if number in opening.learners or actor.opponent is None else actor.opponent
        own = Episode(episode.example, episode.group, index, version=actor.version) if number else episode
        key = seeds.key(index, number, parent=parent_key) if number else seeds.key(index, parent=parent_key)
        template = {**actor.template, **opening.template}
        players.append(
            PlayerState(own, plays, key, opening.stop, template, sampling_seed=opening.sampling_seed, past=past)
        )
    state = EpisodeState(index, players, opening.player)
    state.player.begin(opening.prompt, encode)
    return state
