"""What a program asks and what it gets, and how that is read from JSON, whatever the form: chat.py, completions.py and
messages.py are one form each.

What a request asks for and the gateway does not do is refused with a sentence; nothing is left out in silence."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmgym.core.errors import represent
from lmgym.core.validation import check_text

MOST_CHARACTERS = 1_000_000  # of all messages of a request
MOST_MESSAGES, MOST_TOOLS, MOST_STOPS, MOST_CHOICES = 10_000, 128, 16, 128
DEEPEST = 64  # lists and objects in each other
# What is sampled hangs on these. On all but `seed` the recipe decides; the environment may say to ignore them.
SAMPLING = (
    *("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed"),
    *("presence_penalty", "frequency_penalty"),
)


class Refused(Exception):
    """A request that is not answered: the status of HTTP, and a sentence for the program."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class Said:
    """A message of a request, or the model's answer: text, and the calls of tools as (id, name, arguments in JSON).

    Example: Said("tool", "408", call="call_0_0")"""

    role: str
    text: str
    calls: tuple[tuple[str, str, str], ...] = ()
    call: str = ""  # the id of the call that a tool answers
    name: str = ""


@dataclass(frozen=True)
class ChatRequest:
    """What a program asks. `choices` answers are wanted.

    Example: ChatRequest((Said("user", "2+2="),))"""

    messages: tuple[Said, ...]
    tools: tuple[dict[str, Any], ...] = ()
    stop: tuple[str, ...] = ()
    choices: int = 1
    stream: bool = False
    logprobs: bool = False
    usage: bool = False  # the stream ends with the count of tokens
    bare: bool = False  # the only message is a prompt that no chat template writes
    seed: int | None = None  # of its random numbers: asked again, it gets the same answer


@dataclass(frozen=True)
class Reply:
    """An answer of the model, and why it ended: "stop", "length" or "tool_calls"; if the request wants them, its tokens
    as texts with their log-probabilities.

    Example: Reply(Said("assistant", "4"), "stop", sampled=2)"""

    said: Said
    finish: str
    ended_by: str = ""  # the stop string of the request
    tokens: tuple[tuple[str, float], ...] | None = None
    sampled: int = 0  # tokens, the end of sequence included


@dataclass
class Answer:
    """All choices of one request, for its number in the session, with the number of tokens of its prompt.

    Example: Answer(3, [Reply(Said("assistant", "4"), "stop")])"""

    number: int
    replies: list[Reply] = field(default_factory=list)
    prompt: int = 0


@dataclass(frozen=True)
class Form:
    """How requests of one kind are read, with the fields that have no effect, and how their answers are written."""

    read: Callable[[Any, Collection[str]], ChatRequest]
    body: Callable[[Answer, str], dict[str, Any]]
    events: Callable[[Answer, ChatRequest, str], Iterable[bytes]]


def read_json(body: bytes) -> Any:
    """The value of a JSON text. Raises Refused for anything else, and for one that is nested too deeply."""
    try:
        tree = json.loads(body.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON in UTF-8: {str(error)[:200]}") from None
    level = [tree]
    for _ in range(DEEPEST):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return tree
    raise Refused(f"the body has more than {DEEPEST} lists and objects in each other")


def fields_of(
    tree: Any, ignored: Collection[str], known: Collection[str], usual: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """The fields of a request that have a value and an effect. `usual`: values that ask for nothing special. Raises
    Refused for a field that is not known, or that the recipe's sampling decides on."""
    if not isinstance(tree, dict):
        raise Refused('the body must be an object such as {"messages": [...]}')
    given = {key: value for key, value in tree.items() if value is not None and key not in ignored}
    for key, value in given.items():
        if key in usual and any(type(value) is type(one) and value == one for one in usual[key]):
            continue
        if key in usual:
            raise Refused(f"'{key}' may only be {' or '.join(map(json.dumps, usual[key]))}, not {represent(value)}")
        if key in SAMPLING and key not in known:
            raise Refused(
                f"the recipe's `sampling:` decides on {key}; leave it out, or let the environment ignore it "
                f"(ignored: [{key}])"
            )
        if key not in known:
            raise Refused(f"'{key[:100]}' is not supported; leave it out")
    return given


def read_stops(stop: Any, name: str) -> tuple[str, ...]:
    """The texts that end an answer. Raises Refused for what is none."""
    stops = list_of([stop] if isinstance(stop, str) else stop, name, MOST_STOPS)
    if not all(isinstance(text, str) and text for text in stops):
        raise Refused(f"'{name}' must be a text or a list of texts, none of them empty")
    for text in stops:
        check(text, f"'{name}'")
    return tuple(stops)


def read_choices(choices: Any) -> int:
    """How many answers are wanted. Raises Refused for what is no such number."""
    if type(choices) is not int or not 1 <= choices <= MOST_CHOICES:
        raise Refused(f"'n' must be a number from 1 to {MOST_CHOICES}, not {represent(choices)}")
    return choices


def read_seed(given: Mapping[str, Any]) -> int | None:
    """The request's seed, if it has one. Raises Refused for what is no whole number of 64 bits."""
    seed = given.get("seed")
    if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**63):
        raise Refused(f"'seed' must be a whole number of 64 bits, not {represent(seed)}")
    return seed


def read_switch(given: Mapping[str, Any], name: str) -> bool:
    """A field that is true, false (as without it) or refused."""
    value = given.get(name, False)
    if type(value) is not bool:
        raise Refused(f"'{name}' must be true or false")
    return value


def read_conversation(messages: Sequence[Said]) -> tuple[Said, ...]:
    """The messages themselves. Raises Refused if there is nothing to answer."""
    if not messages or not any(message.text.strip() for message in messages):
        raise Refused("'messages' hold no text")
    if messages[-1].role == "assistant":
        raise Refused("the last message is the assistant's; going on with a message is not supported")
    if sum(len(message.text) for message in messages) > MOST_CHARACTERS:
        raise Refused(f"'messages' hold more than {MOST_CHARACTERS:,} characters", 413)
    return tuple(messages)


def list_of(value: Any, name: str, most: int) -> list[Any]:
    """The list itself. Raises Refused for anything else, and for a longer one."""
    if not isinstance(value, list) or len(value) > most:
        raise Refused(f"'{name}' must be a list of at most {most}")
    return value


def check(text: str, where: str) -> None:
    """Raise Refused for a text that no tokenizer can encode."""
    try:
        check_text(text, where)
    except ValueError as error:
        raise Refused(str(error)) from None


def event(tree: Mapping[str, Any], name: str = "") -> bytes:
    """One event of a stream."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(tree).encode() + b"\n\n"


def _inside(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
