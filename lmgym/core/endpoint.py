"""A client for OpenAI-compatible endpoints, with Python's standard library only: retries, a time limit for each request
(timed_connections.py), and the key appears in no message."""

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from lmgym.core.errors import LmgymError
from lmgym.core.timed_connections import timed_handlers

T = TypeVar("T")
R = TypeVar("R")
RETRIED = (408, 409, 425, 429)  # status codes, and all 5xx, after which the same request may succeed later
LONGEST_WAIT = 60.0  # seconds between two tries, even if the server asks for more
LARGEST = 4 * 2**20  # bytes of a reply, unless the endpoint says otherwise
ADDRESS = re.compile(r"https?://[^\s/@?#]+(?:/[^\s@?#]*)?")
LONGEST_REASON = 200  # characters of a server's words in a message


class EndpointError(LmgymError):
    """A request that has failed for good. `status`: what the endpoint answered; None if it did not."""

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class Endpoint:
    """Address and model of an endpoint, time limit of a request, number of retries, and the first wait before a retry
    (both times in seconds). `owner` begins each error: the part of the recipe that named the endpoint. A reply may have
    `largest` bytes.

    Example: Endpoint("reward 'endpoint_judge'", "http://localhost:8000/v1", "judge", key=None)"""

    owner: str
    base_url: str
    model: str
    key: str | None = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 60.0
    retries: int = 4
    wait: float = 1.0
    largest: int = LARGEST

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
    """The request failed but may succeed later. `wait`: the seconds that the server asks to wait, if it does; `status`:
    its code, if it has answered."""

    def __init__(self, reason: str, wait: float | None = None, status: int | None = None) -> None:
        super().__init__(reason)
        self.wait, self.status = wait, status


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which would send the key to another address. The user must give the final address."""

    def redirect_request(self, *arguments: Any, **keywords: Any) -> None:
        return None


def check_address(address: str, owner: str) -> None:
    """Raise LmgymError, which `owner` begins, for what is no plain address of an endpoint."""
    if not ADDRESS.fullmatch(address):
        raise LmgymError(
            f"{owner} is no plain address; write one such as http://localhost:8000/v1, without user or query"
        )


def read_key(variable: str | None, owner: str) -> str | None:
    """The key in this environment variable; None without a variable. Raises LmgymError, which `owner` begins, if there
    is none in it."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise LmgymError(f"{owner}: the environment variable {variable} is not set, or empty")
    if not key.isascii() or not key.isprintable():
        raise LmgymError(f"{owner}: the key in {variable} has characters that no key can have")
    return key


def ask(endpoint: Endpoint, path: str, body: Mapping[str, Any] | None = None) -> bytes:
    """The bytes of the reply to a JSON body, or without one to a plain question; `path` follows the endpoint's address.

    Raises EndpointError if the endpoint refuses the request, or still fails after all retries."""
    headers = {"Content-Type": "application/json"}
    if endpoint.key is not None:
        headers["Authorization"] = f"Bearer {endpoint.key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{endpoint.base_url}{path}", data, headers)
    reason, status = "", None
    for attempt in range(endpoint.retries + 1):
        try:
            return _exchange(endpoint, request)
        except _Temporary as error:
            reason, status = f"failed {attempt + 1} times; the last time: {error}", error.status
            wait = endpoint.wait * 2**attempt if error.wait is None else error.wait
        if attempt < endpoint.retries:  # wait as long as the server asks for, else twice as long as before
            time.sleep(min(wait, LONGEST_WAIT))
    give_up(endpoint, reason, status)


def in_threads(work: Callable[[T], R], items: Sequence[T], concurrency: int) -> list[R]:
    """The results of the work on each item, in order, some at a time. After one failure, those that wait are left."""
    with ThreadPoolExecutor(max_workers=min(concurrency, max(1, len(items)))) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def give_up(endpoint: Endpoint, reason: str, status: int | None = None) -> NoReturn:
    """Raise the error for the user, without the key."""
    raise EndpointError(f"{endpoint.owner}: {endpoint.base_url} {endpoint.redacted(reason)}", status)


def start_of(endpoint: Endpoint, reply: bytes) -> str:
    """The beginning of a reply, for a message."""
    return endpoint.redacted(reply.decode(errors="replace"))[:LONGEST_REASON]


def _exchange(endpoint: Endpoint, request: urllib.request.Request) -> bytes:
    """Send the request and return the reply's bytes. Raises _Temporary for failures that are worth a retry."""
    deadline = time.monotonic() + endpoint.seconds
    wait, refused, status = None, False, None
    with timed_handlers(deadline) as handlers:
        opener = urllib.request.build_opener(_NoRedirect, *handlers)
        try:
            with opener.open(request, timeout=endpoint.seconds) as response:
                reply = _read(response, endpoint.largest)
            if time.monotonic() < deadline:
                return reply
        except urllib.error.HTTPError as error:
            with error:
                status, reason = error.code, f"status {error.code} ({_words_of(endpoint, error)})"
            refused = error.code not in RETRIED and error.code < 500
            wait = _seconds(error.headers.get("Retry-After"))
        except (OSError, http.client.HTTPException, ValueError) as error:  # URLError and time-outs are OSErrors
            reason = endpoint.redacted(f"{type(error).__name__}: {error}")[:LONGEST_REASON]
    if status is None and time.monotonic() >= deadline:
        reason = f"TimeoutError: no complete reply within {endpoint.seconds:g} s"
    # Raised here and not above, so that the server's own words, which may hold the key, are no part of the error.
    if refused:
        give_up(endpoint, f"refused the request: {reason}", status)
    raise _Temporary(reason, wait, status)


def _read(response: Any, largest: int = LARGEST) -> bytes:
    """The whole reply, with a bound on its size."""
    reply: bytes = response.read(largest + 1)
    if len(reply) > largest:
        raise OSError(f"a reply of more than {largest} bytes")
    return reply


def _words_of(endpoint: Endpoint, error: urllib.error.HTTPError) -> str:
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
