"""A client for OpenAI-compatible chat endpoints, with Python's standard library only: retries, a time limit for each
request (timed_connections.py), and the key appears in no message."""

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lmgym.core.errors import LmgymError
from lmgym.rewards.learned.timed_connections import timed_handlers

RETRIED = (408, 409, 425, 429)  # status codes, and all 5xx, after which the same request may succeed later
LONGEST_WAIT = 60.0  # seconds between two tries, even if the server asks for more
LARGEST = 4 * 2**20  # bytes of a reply
LONGEST_REASON = 200  # characters of a server's words in a message


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

    def redacted(self, text: str) -> str:
        """A server's words without the key, which some servers repeat, as it is or written as JSON, a Python text or
        part of an address. To be called before they are cut: a cut key is not found."""
        if self.key:
            as_json, as_text = json.dumps(self.key)[1:-1], repr(self.key)[1:-1]
            forms = {self.key, as_json, as_json.replace("/", "\\/"), as_text, urllib.parse.quote(self.key, safe="")}
            for form in sorted(forms, key=len, reverse=True):
                text = text.replace(form, "***")
        return text


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
    reason = ""
    for attempt in range(endpoint.retries + 1):
        try:
            return _content(endpoint, _exchange(endpoint, request))
        except _Temporary as error:
            reason = f"failed {attempt + 1} times; the last time: {error}"
            wait = endpoint.wait * 2**attempt if error.wait is None else error.wait
        if attempt < endpoint.retries:  # wait as long as the server asks for, else twice as long as before
            time.sleep(min(wait, LONGEST_WAIT))
    _give_up(endpoint, reason)


def _exchange(endpoint: Endpoint, request: urllib.request.Request) -> bytes:
    """Send the request and return the reply's bytes. Raises _Temporary for failures that are worth a retry."""
    deadline = time.monotonic() + endpoint.seconds
    opener = urllib.request.build_opener(_NoRedirect, *timed_handlers(deadline))
    wait, refused = None, False
    try:
        with opener.open(request, timeout=endpoint.seconds) as response:
            return _read(response)
    except urllib.error.HTTPError as error:
        with error:
            reason = f"status {error.code} ({_start_of(endpoint, error)})"
        refused = error.code not in RETRIED and error.code < 500
        wait = _seconds(error.headers.get("Retry-After"))
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError and time-outs are OSErrors
        reason = endpoint.redacted(f"{type(error).__name__}: {error}")[:LONGEST_REASON]
        if time.monotonic() >= deadline:
            reason = f"TimeoutError: no complete reply within {endpoint.seconds:g} s"
    # Raised here and not above, so that the server's own words, which may hold the key, are no part of the error.
    if refused:
        _give_up(endpoint, f"refused the request: {reason}")
    raise _Temporary(reason, wait)


def _read(response: Any) -> bytes:
    """The whole reply, with a bound on its size."""
    reply: bytes = response.read(LARGEST + 1)
    if len(reply) > LARGEST:
        raise OSError(f"a reply of more than {LARGEST} bytes")
    return reply


def _content(endpoint: Endpoint, reply: bytes) -> str:
    """The message's text in the JSON of a chat completion."""
    try:
        content = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        content = reply
    if isinstance(content, bytes):
        start = endpoint.redacted(content.decode(errors="replace"))[:LONGEST_REASON]
        _give_up(endpoint, f"did not send a chat completion but {start!r}")
    return content if isinstance(content, str) else ""


def _start_of(endpoint: Endpoint, error: urllib.error.HTTPError) -> str:
    """The beginning of what the server says about an error."""
    try:
        said = _read(error).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        said = ""
    words = " ".join(endpoint.redacted(said).split()) or " ".join(endpoint.redacted(str(error.reason)).split())
    return words[:LONGEST_REASON]


def _seconds(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header else None
    except ValueError:  # a date
        return None


def _give_up(endpoint: Endpoint, reason: str) -> NoReturn:
    """Raise the error for the user."""
    raise LmgymError(f"reward 'endpoint_judge': {endpoint.base_url} {endpoint.redacted(reason)}")
