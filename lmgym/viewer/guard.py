"""Who may read the page: the browser of the user who started it, and nobody else who reaches this machine's ports.

Another user of the machine, or a web page open in the same browser, can send requests to a server on loopback. So
every request needs a secret that only the user's terminal has shown, and must come from the page itself.
"""

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
POLICY = (  # what the page may load and do: only what this server sends, and no script that is written into it
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """An ASGI application around another one, which sees only requests that may be answered.

    The address that is opened first has `?token=`; the answer is a cookie and the same address without it. All other
    requests need the cookie. The `Host` must be a name of this machine (a page of another site, whose name leads here,
    keeps its own), and `Origin`, where a browser sends it, the page's own.

    Example:
        >>> guard = Guard(application, port=8642)
        >>> guard.address
        'http://127.0.0.1:8642/?token=...'
    """

    def __init__(self, application: Any, port: int) -> None:
        self.application, self.port = application, port
        self.token = secrets.token_urlsafe(32)
        self.cookie = f"lmgym-view-{port}"  # cookies of all ports of a machine are in one jar

    @property
    def address(self) -> str:
        """What to open in a browser; it holds the token."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.application(scope, receive, send)
            return
        if scope["type"] != "http":  # no websocket is served
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if problem := self.refusal(scope["method"], headers):
            await _answer(send, 403, problem)
        elif self._is_known(headers):
            await self.application(scope, receive, _with_headers(send))
        elif scope["path"] == "/" and self._is_token(scope["query_string"].decode("latin-1")):
            cookie = f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            await _answer(send, 303, "", {"location": "/", "set-cookie": cookie})
        else:
            await _answer(send, 403, "open the address that `lmgym view` has printed; it holds the token of this page")

    def refusal(self, method: str, headers: dict[str, str]) -> str:
        """Why a request is not answered, whoever sends it; empty if nothing speaks against it."""
        host = headers.get("host", "")
        if host.rpartition(":")[0] not in LOOPBACK and host not in LOOPBACK:
            return f"the Host of this request must be one of {', '.join(LOOPBACK)}"
        origin = headers.get("origin")
        if origin is not None and (urlsplit(origin).scheme, urlsplit(origin).netloc) != ("http", host):
            return "the Origin of this request is another page"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "this request comes from another site"
        if method not in ("GET", "HEAD") and origin is None:
            return "a request that changes something needs an Origin"
        return ""

    def _is_known(self, headers: dict[str, str]) -> bool:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return False
        return cookie is not None and self._is_secret(cookie.value)

    def _is_token(self, query: str) -> bool:
        return any(self._is_secret(given) for given in parse_qs(query).get("token", []))

    def _is_secret(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


def _with_headers(send: Any) -> Any:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *own]}
        await send(message)

    return sending


async def _answer(send: Any, status: int, text: str, headers: dict[str, str] | None = None) -> None:
    whole = {"content-type": "text/plain; charset=utf-8", **(headers or {}), **HEADERS}
    encoded = [(name.encode(), value.encode()) for name, value in whole.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": text.encode()})
