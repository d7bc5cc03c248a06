"""`endpoint_judge`: an LLM judge behind an OpenAI-compatible chat endpoint, your own server or a service."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lmgym.core.endpoint import Endpoint, EndpointError, ask, check_address, give_up, in_threads, read_key, start_of
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.processes.pool import Failure
from lmgym.rewards.learned.judge_prompts import SYSTEM, Item, check_template, judge_messages
from lmgym.rewards.learned.rows import clean
from lmgym.rewards.learned.scorers import Values, filling_in, loads_early
from lmgym.rewards.views import without_thinking
from lmgym.types import Example

TEMPLATE = "Problem:\n{prompt}\n\nSolution:\n{answer}\n\nHow good is the solution, from 1 to 10? Give the number only."
OUT_OF = re.compile(r"(?:/|\bout of\b)\s*[0-9]+(?:\.[0-9]+)?", re.IGNORECASE)
NUMBER = re.compile(r"(?<![0-9.])-?[0-9]+(?:\.[0-9]+)?")
YES_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
Conversation = Sequence[tuple[str, str]]  # (role, content) of each message
Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Served:
    """A chat model behind an endpoint, which so many requests may ask at the same time.

    Example: Served(endpoint, 8).replies([(("user", "2+2="),)], ask_endpoint) -> ["4"]"""

    endpoint: Endpoint
    concurrency: int

    def replies(
        self, questions: Sequence[Conversation], ask: Callable[[Endpoint, Conversation], Reply]
    ) -> list[Reply | Failure]:
        """The replies in order, a Failure for a request that fails. Raises LmgymError if none of the first
        `concurrency` requests works."""
        worked = list[bool]()

        def patiently(question: Conversation) -> Reply | Failure:
            try:
                reply = ask(self.endpoint, question)
            except EndpointError as error:
                worked.append(False)
                if len(worked) >= min(self.concurrency, len(questions)) and not any(worked):
                    raise
                return Failure("error", str(error))
            worked.append(True)
            return reply

        return in_threads(patiently, questions, self.concurrency)


def by_endpoint(
    check: Callable[..., object] = lambda examples, **arguments: None,
) -> Callable[[Callable[..., Values]], Callable[..., Values]]:
    """Decorator: the last argument without a name is the judge, a `Served` model. The reward is called without it, and
    takes in its place the arguments that say where it is and how to ask it, which `endpoint_judge` explains. They are
    looked up before training, with this `check`; no request is sent then, since it may cost money.

    Example:
        >>> @register("reward", "polite")
        ... @by_endpoint()
        ... def polite(texts, examples, judge):
        ...     questions = [(("user", f"Is this polite? {text}"),) for text in texts]
        ...     return [float(reply == "Yes") for reply in judge.replies(questions, ask_endpoint)]
    """

    def decorate(function: Callable[..., Values]) -> Callable[..., Values]:
        def reward(
            *texts: Any, base_url: str, model: str, key_variable: str | None = None,
            options: dict[str, Any] | None = None, seconds: float = 60.0, retries: int = 4, wait: float = 1.0,
            concurrency: int = 8, **arguments: Any,
        ) -> Values:  # fmt: skip
            name, amounts = function.__name__, {"seconds": seconds, "wait": wait, "retries": retries}
            endpoint = judge_endpoint(name, base_url, model, key_variable, options, concurrency, **amounts)
            return function(*texts, Served(endpoint, concurrency), **arguments)

        asked = loads_early(check)(filling_in(reward, function))
        asked.limits_itself = True  # type: ignore[attr-defined]  # each request has its own time limit
        return asked

    return decorate


@register("reward", "endpoint_judge")
@by_endpoint()
def endpoint_judge(
    texts: list[str],
    examples: list[Example],
    served: Served,
    *,
    template: str = TEMPLATE,
    system: str = SYSTEM,
    read: Literal["number", "yes_no"] = "number",
    lowest: float = 1.0,
    highest: float = 10.0,
    unreadable: float | None = None,
) -> list[float | Failure]:
    """A chat model's judgement of each answer: its number over `highest`, or 1 (yes) or 0 (no) with `read: yes_no`.

    Equal questions are sent once per call. The temperature is 0; `options` are further fields of the request and may
    change it. The last number (or yes or no) in the reply counts; "8/10" and "8 out of 10" are read as 8. Thoughts
    in <think> tags do not count. A reply without a number from `lowest` to `highest` judges nothing (Failure), or gets
    the value `unreadable` if set. The key is read from the environment variable `key_variable` and is written nowhere.

    A request may take `seconds` in all, from connecting to the last byte of the reply, and `concurrency` requests run
    at the same time. After a temporary failure (no connection, time-out, status 408, 409, 425, 429 or 5xx) a request is
    repeated up to `retries` times: after `wait` seconds, then twice as long each time, or as long as the server asks
    for, at most a minute. A request that fails for good judges nothing (Failure). A served model may give another reply
    to the same question.

    Raises LmgymError if the endpoint fails for the first `concurrency` requests.

    Example: endpoint_judge(["4"], [example], base_url="http://localhost:8000/v1", model="judge") -> [1.0]"""
    check_template("endpoint_judge", template)
    if (read == "number" and not lowest < highest) or highest <= 0:
        raise LmgymError(f"key 'rewards.endpoint_judge.highest' is {highest}; it must be above 0 and above {lowest}")
    # Write one conversation per answer; send each distinct one once.
    conversations = []
    for text, example in zip(texts, examples, strict=True):
        messages = judge_messages(system, template, Item(0, example, "", text), text)
        conversations.append(tuple((message["role"], clean(message["content"])) for message in messages))
    distinct = list(dict.fromkeys(conversations))
    replies = dict(zip(distinct, served.replies(distinct, ask_endpoint), strict=True))
    # Read the value of each reply.
    values = list[float | Failure]()
    for conversation, example in zip(conversations, examples, strict=True):
        reply = replies[conversation]
        if isinstance(reply, Failure):
            values.append(reply)
            continue
        value = _read(reply, read, lowest, highest, unreadable)
        expected = "yes or no" if read == "yes_no" else f"number from {lowest:g} to {highest:g}"
        values.append(_unread(served.endpoint, example, expected, reply) if value is None else value)
    return values


def _unread(endpoint: Endpoint, example: Example, expected: str, reply: str) -> Failure:
    start = endpoint.redacted(reply)[:100]
    return Failure(
        "error",
        f"reward 'endpoint_judge': the reply for example '{example.id}' has no {expected}: {start!r}; change the "
        "template, or write what such a reply is worth as 'unreadable: 0'",
    )


def judge_endpoint(
    reward: str,
    base_url: str,
    model: str,
    key_variable: str | None,
    options: dict[str, Any] | None,
    concurrency: int,
    **amounts: Any,
) -> Endpoint:
    """The endpoint of a reward of this name. Raises LmgymError for an address, a key or an amount that cannot be."""
    prefix = f"key 'rewards.{reward}"
    check_address(base_url, f"{prefix}.base_url'")
    for name, amount in amounts.items():
        if not (amount >= 0 and math.isfinite(amount)) or (name == "seconds" and amount == 0):
            bound = "above" if name == "seconds" else "at least"
            raise LmgymError(f"{prefix}.{name}' is {amount}; it must be {bound} 0")
    if concurrency < 1:
        raise LmgymError(f"{prefix}.concurrency' must be at least 1, not {concurrency}")
    key = read_key(key_variable, f"{prefix}.key_variable'")
    asked = {"temperature": 0, **(options or {})}
    return Endpoint(f"reward '{reward}'", base_url.rstrip("/"), model, key, asked, **amounts)


def ask_endpoint(endpoint: Endpoint, conversation: Conversation) -> str:
    """The text of the model's reply to (role, content) messages."""
    return text_and_logprobs(endpoint, conversation)[0]


def text_and_logprobs(endpoint: Endpoint, conversation: Conversation) -> tuple[str, Any]:
    """The text of the model's reply, and its field `logprobs` as the server has sent it; None without one.

    Raises LmgymError if the endpoint refuses the request, or still fails after all retries."""
    messages = [{"role": role, "content": content} for role, content in conversation]
    reply = ask(endpoint, "/chat/completions", {"model": endpoint.model, "messages": messages, **endpoint.options})
    try:
        choice = json.loads(reply)["choices"][0]
        content, logprobs = choice["message"]["content"], choice.get("logprobs")
    except (ValueError, LookupError, TypeError, RecursionError):
        content, logprobs = reply, None
    if isinstance(content, bytes):
        give_up(endpoint, f"did not send a chat completion but {start_of(endpoint, content)!r}")
    return (content if isinstance(content, str) else ""), logprobs


def _read(reply: str, read: str, lowest: float, highest: float, unreadable: float | None) -> float | None:
    """The value of a reply, or `unreadable` if it has none."""
    reply = without_thinking(reply)
    if read == "yes_no":
        words = YES_NO.findall(reply)
        return float(words[-1].lower() == "yes") if words else unreadable
    numbers = NUMBER.findall(OUT_OF.sub(" ", reply))
    value = float(numbers[-1]) if numbers else math.inf
    return value / highest if lowest <= value <= highest else unreadable
