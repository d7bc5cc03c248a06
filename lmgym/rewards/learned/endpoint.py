"""A judge behind an OpenAI-compatible chat endpoint: a server of one's own, or a service."""

import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.learned.endpoint_client import Endpoint, ask_endpoint
from lmgym.rewards.learned.judge_prompts import SYSTEM, Item, check_template, judge_messages
from lmgym.rewards.learned.rows import clean
from lmgym.rewards.views import without_thinking
from lmgym.types import Example

TEMPLATE = "Problem:\n{prompt}\n\nSolution:\n{answer}\n\nHow good is the solution, from 1 to 10? Give the number only."
OUT_OF = re.compile(r"(?:/|\bout of\b)\s*[0-9]+(?:\.[0-9]+)?", re.IGNORECASE)
NUMBER = re.compile(r"(?<![0-9.])-?[0-9]+(?:\.[0-9]+)?")
YES_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


@register("reward", "endpoint_judge")
def endpoint_judge(
    texts: list[str],
    examples: list[Example],
    *,
    base_url: str,
    model: str,
    key_variable: str | None = None,
    template: str = TEMPLATE,
    system: str = SYSTEM,
    read: Literal["number", "yes_no"] = "number",
    lowest: float = 1.0,
    highest: float = 10.0,
    unreadable: float | None = None,
    options: dict[str, Any] | None = None,
    seconds: float = 60.0,
    retries: int = 4,
    wait: float = 1.0,
    concurrency: int = 8,
) -> list[float]:
    """What a chat model behind `base_url` says of each answer: a number from `lowest` to `highest`, over `highest`, or
    1 for yes and 0 for no. Each distinct question is asked once per call, at temperature 0 unless `options`, further
    fields of the request, say otherwise.

    A number is the last one in the reply, "8/10" and "8 out of 10" being 8; thoughts in <think> tags do not count. A
    reply without a number in that range, or without a yes or no, is refused, or gets `unreadable` where there is one.
    The key of a service is read from the environment variable `key_variable`, and appears in no message and no file.
    Requests that fail for now (no connection, time-out, status 408, 409, 425, 429, 5xx) are tried again `retries`
    times, after `wait` seconds, then twice as long, and so on, or as long as the server asks for, up to a minute; one
    may take `seconds`, and `concurrency` are on their way at once. A served model need not say the same twice.

    Raises LmgymError where the endpoint does not answer, or says that the request is wrong.

    Example:
        >>> endpoint_judge(["4"], [Example("a/0", "2+2?")], base_url="http://localhost:8000/v1", model="judge")
        [1.0]
    """
    endpoint = _endpoint(base_url, model, key_variable, options, seconds, retries, wait)
    check_template("endpoint_judge", template)
    if (read == "number" and not lowest < highest) or highest <= 0:
        raise LmgymError(f"key 'rewards.endpoint_judge.highest' is {highest}; it must be above 0 and above {lowest}")
    if concurrency < 1:
        raise LmgymError(f"key 'rewards.endpoint_judge.concurrency' must be at least 1, not {concurrency}")
    asked = []
    for text, example in zip(texts, examples, strict=True):
        said = judge_messages(system, template, Item(0, example, "", text), text)
        asked.append(tuple((one["role"], clean(one["content"])) for one in said))
    distinct = list(dict.fromkeys(asked))
    with ThreadPoolExecutor(max_workers=min(concurrency, max(1, len(distinct)))) as pool:
        waiting = [pool.submit(ask_endpoint, endpoint, conversation) for conversation in distinct]
        try:
            replies = dict(zip(distinct, [future.result() for future in waiting], strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    values = []
    for conversation, example in zip(asked, examples, strict=True):
        value = _read(replies[conversation], read, lowest, highest)
        if value is None:
            value = unreadable
        if value is None:
            wanted = "yes or no" if read == "yes_no" else f"number from {lowest:g} to {highest:g}"
            raise LmgymError(
                f"reward 'endpoint_judge': the reply for example '{example.id}' has no {wanted}: "
                f"{replies[conversation][:100]!r}; change the template, or write what such a reply is worth as "
                "'unreadable: 0'"
            )
        values.append(value)
    return values


endpoint_judge.limits_itself = True  # type: ignore[attr-defined]  # each request has its own time limit


def _check(examples: Sequence[Example], **arguments: Any) -> None:
    """The arguments are right and the key is there. Nothing is asked, which may cost money."""
    endpoint_judge([], [], **arguments)


endpoint_judge.check = _check  # type: ignore[attr-defined]  # see base.check_examples


def _endpoint(
    base_url: str,
    model: str,
    key_variable: str | None,
    options: dict[str, Any] | None,
    seconds: float,
    retries: int,
    wait: float,
) -> Endpoint:
    prefix = "key 'rewards.endpoint_judge"
    if not re.fullmatch(r"https?://[^\s/@?#]+(?:/[^\s@?#]*)?", base_url):
        raise LmgymError(
            f"{prefix}.base_url' is no plain address; write one such as http://localhost:8000/v1, without user or query"
        )
    for name, value in (("seconds", seconds), ("wait", wait), ("retries", retries)):
        if not (value >= 0 and math.isfinite(value)) or (name == "seconds" and value == 0):
            bound = "above" if name == "seconds" else "at least"
            raise LmgymError(f"{prefix}.{name}' is {value}; it must be {bound} 0")
    key = None
    if key_variable is not None:
        key = os.environ.get(key_variable, "").strip()
        if not key:
            raise LmgymError(f"{prefix}.key_variable': the environment variable {key_variable} is not set, or empty")
        if not key.isascii() or not key.isprintable():
            raise LmgymError(f"{prefix}.key_variable': the key in {key_variable} has characters that no key can have")
    return Endpoint(base_url.rstrip("/"), model, key, {"temperature": 0, **(options or {})}, seconds, retries, wait)


def _read(reply: str, read: str, lowest: float, highest: float) -> float | None:
    """The value of a reply, or None where it has none.

    Example:
        >>> _read("Score: 8/10", "number", 1, 10), _read("Yes, but ... no.", "yes_no", 1, 10)
        (0.8, 0.0)
    """
    reply = without_thinking(reply)
    if read == "yes_no":
        said = YES_NO.findall(reply)
        return float(said[-1].lower() == "yes") if said else None
    numbers = NUMBER.findall(OUT_OF.sub(" ", reply))
    value = float(numbers[-1]) if numbers else math.inf
    return value / highest if lowest <= value <= highest else None
