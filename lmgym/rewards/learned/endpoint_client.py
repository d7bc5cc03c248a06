"""A client for OpenAI-compatible chat endpoints, with Python's standard library only: time limits, retries, and the key
appears in no message."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lmgym.core.errors import LmgymError

RETRIED = (408, 409, 425, 429)  # status codes, and all 5xx, after which the same request may succeed later
LONGEST_WAIT = 60.0  # seconds between two tries, even if the server asks for more
LARGEST = 4 * 2**20  # bytes of a reply
BLOCK = 2**16  # bytes read at a time


@dataclass(frozen=True)
class Endpoint:
    """Address and model of an endpoint, time limit of a request, number of retries, and the first wait before a retry
    (both times in seconds).

    Example: Endpoint("http://localhost:8000/v1", "judge", key=None, options={"temperature": 0})
    """

    base_url: str
    model: str
    key: str | None = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 60.0
    retries: int = 4
    wait: float = 1.0


class _Temporary(Exception):
    """The request failed but may succeed later. `wait`: the seconds that the server asks to wait, if it does."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which would send the key to another address. The user must give the final address."""

    def redirect_request(self, *arguments: Any, **keywords: Any) -> None:
        return None


def ask_endpoint(endpoint: Endpoint, conversation: Sequence[tuple[str, str]]) -> str:
    """The text of the model's reply to (role, content) messages.

    Raises LmgymError if the endpoint refuses the request, or still fails after all retries.

    Example:
        >>> ask_endpoint(endpoint, [("user", "Is 4 even? Answer Yes or No.")])
        'Yes'
    """
    body = {
        "model": endpoint.model,
        "messages": [{"role": role, "content": content} for role, content in conversation],
        **endpoint.options,
    }
    headers = {"Content-Type": "application/json"}
    if endpoint.key is not None:
        headers["Authorization"] = f"Bearer {endpoint.key}"
    request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", json.dumps(body).encode(), headers)
    for attempt in range(endpoint.retries + 1):
        try:
            return _content(endpoint, _exchange(endpoint, request))
        except _Temporary as error:
            # Wait as long as the server asks for, else twice as long as before.
            if attempt == endpoint.retries:
                _give_up(endpoint, f"failed {attempt + 1} times; the last time: {error}")
            wait = endpoint.wait * 2**attempt if error.wait is None else error.wait
            time.sleep(min(wait, LONGEST_WAIT))
    raise AssertionError("unreachable")


def _exchange(endpoint: Endpoint, request: urllib.request.Request) -> bytes:
    """Send the request and return the reply's bytes. Raises _Temporary for failures that are worth a retry."""
    deadline = time.monotonic() + endpoint.seconds
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=endpoint.seconds) as response:
            return _read(response, deadline, endpoint.seconds)
    except urllib.error.HTTPError as error:
        with error:
            reason = f"status {error.code} ({_start_of(error)})"
        if error.code in RETRIED or error.code >= 500:
            raise _Temporary(reason, _seconds(error.headers.get("Retry-After"))) from None
        _give_up(endpoint, f"refused the request: {reason}")
    except (OSError, http.client.HTTPException) as error:  # URLError and time-outs are OSErrors
        raise _Temporary(f"{type(error).__name__}: {error}") from None


def _read(response: Any, deadline: float, seconds: float) -> bytes:
    """The whole reply. The socket's own time limit is for one read only, so the deadline is checked after each block: a
    server that sends a byte now and then must not hold the run."""
    blocks, size = [], 0
    while block := response.read1(BLOCK):
        blocks.append(block)
        size += len(block)
        if size > LARGEST:
            raise _Temporary(f"a reply of more than {LARGEST} bytes")
        if time.monotonic() > deadline:
            raise _Temporary(f"no complete reply within {seconds:g} s")
    return b"".join(blocks)


def _content(endpoint: Endpoint, reply: bytes) -> str:
    """The message's text in the JSON of a chat completion."""
    try:
        content = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        _give_up(endpoint, f"did not send a chat completion but {reply[:100]!r}")
    return content if isinstance(content, str) else ""


def _start_of(error: urllib.error.HTTPError) -> str:
    try:
        return " ".join(error.read(1000).decode(errors="replace").split())[:200] or error.reason
    except (OSError, http.client.HTTPException):
        return str(error.reason)


def _seconds(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header else None
    except ValueError:  # a date
        return None


def _give_up(endpoint: Endpoint, reason: str) -> NoReturn:
    """Raise the error for the user, without the key, which some servers repeat in their replies."""
    if endpoint.key:
        reason = reason.replace(endpoint.key, "***")
    raise LmgymError(f"reward 'endpoint_judge': {endpoint.base_url} {reason}")
