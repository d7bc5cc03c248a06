"""A session: the tree of turns that a program has asked for, and the requests that wait for an answer.

Of a request's messages, the longest beginning that ends with an answer of this session is what the model has read and
written already; its tokens are kept as they are. The rest is new. So a request that goes on continues a path, and one
that changes the past begins a branch where the change is. Every turn is a node of its own and is trained once, with all
that stood before it as its prompt."""

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from lmgym.gateway.wire import Answer, ChatRequest, Refused, Said
from lmgym.types import pictures_of

MOST_WAITING = 256  # requests of one session at the same time

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a request goes on: behind the answer of this turn, which the first `covered` messages end with. Without a
    turn, nothing of the request is known.

    Example: Place(turn=0, covered=2)"""

    turn: int | None = None
    covered: int = 0


class Tree:
    """The turns of a session, found by the messages before them and the answer.

    Example:
        >>> tree, asked = Tree(), ChatRequest((Said("user", "2+2="),))
        >>> tree.record(asked, Said("assistant", "4"), "4")
        >>> tree.place(ChatRequest((*asked.messages, Said("assistant", "4"), Said("user", "sure?"))))
        Place(turn=0, covered=2)
    """

    def __init__(self) -> None:
        self._turns: dict[bytes, int] = {}  # by the messages up to the answer
        self._texts: dict[bytes, str] = {}  # what the model wrote where the program got calls of tools, by that message
        self._names: dict[str, str] = {}  # of tools, by the ids of their calls
        self.count = 0

    def place(self, request: ChatRequest) -> Place:
        """The longest beginning that is known, and that something follows; of equal ones the newest turn."""
        digests = _digests(request.tools, request.messages)
        for covered in range(len(request.messages) - 1, 0, -1):
            if (turn := self._turns.get(digests[covered])) is not None:
                return Place(turn, covered)
        return Place()

    def record(self, request: ChatRequest, said: Said, text: str) -> None:
        """Note the next turn: the program reads `said`, and the model has written `text`. No request goes on from the
        answer to a bare one."""
        if not request.bare:
            self._turns[_digests(request.tools, [*request.messages, said])[-1]] = self.count
            if said.calls:  # ids of calls are the session's own; a text may be the program's as well as the model's
                self._texts[_digest(said)] = text
            self._names |= {id: name for id, name, _ in said.calls}
        self.count += 1

    def messages(self, request: ChatRequest, write: Callable[[Said], str] | None = None) -> list[dict[str, str]]:
        """The messages as a chat template gets them: calls as the model wrote them, results with the tool's name.
        Calls of tools that the model has not made, such as those of examples, `write` writes as the model would; raises
        Refused for them without it."""
        found, names = [], dict(self._names)
        for said in request.messages:
            text = self._texts.get(_digest(said)) if said.role == "assistant" else said.text
            if text is None and said.calls:
                if write is None:
                    raise Refused(
                        "a message holds calls of tools that are not this session's; write env.tool_prompt: system, "
                        "which says how the model writes calls, or leave them out"
                    )
                text = write(said)
                names |= {id: name for id, name, _ in said.calls}
            message = {"role": said.role, "content": said.text if text is None else text}
            if name := said.name or names.get(said.call, ""):
                message["name"] = name
            found.append(message)
        return found


@dataclass(eq=False)
class Waiting:
    """A request, and where its reply is awaited."""

    request: ChatRequest
    answered: "Future[Answer]" = field(default_factory=Future)


class Mailbox(Generic[T]):
    """Events of one episode in the order of their arrival, handed over between threads: `take` gives a future of the
    next one. The last one, that of `end`, comes before all that wait, and again and again."""

    def __init__(self) -> None:
        self._lock, self._events = threading.Lock(), deque[Any]()
        self._taker: Future[Any] | None = None
        self._last: tuple[T] | None = None

    def put(self, event: Waiting) -> None:
        """Add a request. Raises Refused if the episode is over or too many wait."""
        with self._lock:
            if self._last is not None:
                raise Refused("the session is over", 410)
            if len(self._events) >= MOST_WAITING:
                raise Refused(f"more than {MOST_WAITING} requests of this session wait for an answer", 429)
            self._events.append(event)
            self._hand_over()

    def end(self, last: T) -> None:
        """Add the last event; requests that wait are given up."""
        with self._lock:
            if self._last is None:
                self._last = (last,)
                for event in self._events:
                    event.answered.cancel()
                self._events.clear()
                self._hand_over()

    def take(self) -> "Future[Waiting | T]":
        """A future of the next event."""
        with self._lock:
            self._taker = taker = Future[Any]()
            self._hand_over()
        return taker

    def rest(self) -> list[Waiting]:
        """All events that wait, taken."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def _hand_over(self) -> None:
        if self._taker is None or not (self._events or self._last):
            return
        taker, self._taker = self._taker, None
        event = self._last[0] if self._last else self._events.popleft()
        if taker.set_running_or_notify_cancel():
            taker.set_result(event)
        elif self._last is None:  # nobody waits any more
            self._events.appendleft(event)


def _digests(tools: Sequence[Any], messages: Sequence[Said]) -> list[bytes]:
    """A digest of each beginning, the empty one first."""
    digests = [hashlib.sha256(json.dumps(list(tools), sort_keys=True).encode()).digest()]
    for said in messages:
        digests.append(hashlib.sha256(digests[-1] + _digest(said)).digest())
    return digests


def _digest(said: Said) -> bytes:
    """Equal for messages that a program would call equal: clients write the arguments of calls anew."""
    calls = [(id, name, _plain(arguments)) for id, name, arguments in said.calls]
    name = "" if said.role == "assistant" else said.name
    shown = pictures_of(said.text)
    return hashlib.sha256(json.dumps([said.role, said.text, shown, calls, said.call, name]).encode()).digest()


def _plain(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
