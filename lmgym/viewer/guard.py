"""Who may read the page: the browser of the user who started it, and nobody else who reaches this machine's ports.

Another user of the machine, or a web page open in the same browser, can send requests to a server on loopback. So
every request for data needs a secret that only the user's terminal has shown, and must come from the page itself."""

import hmac
import secrets
from typing import Any

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
TOKEN = "x-lmgym-token"  # the header that brings the secret
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

    The address that is opened has `#token=`, which a browser sends to no server: the page keeps it in the storage of
    its own origin and sends it as a header with each request. A cookie would go to all ports of this machine, so to
    servers of other users too. The page's own files hold no data and are sent without it. The `Host` must be a name of
    this machine (a page of another site, whose name leads here, keeps its own), and `Origin`, where a browser sends it,
    the page's own.

    Example:
        >>> guard = Guard(application, port=8642)
        >>> guard.address
        'http://127.0.0.1:8642/#token=...'
    """

    def __init__(self, application: Any, port: int) -> None:
        self.application, self.port = application, port
        self.token = secrets.token_urlsafe(32)

    @property
    def address(self) -> str:
        """What to open in a browser; it holds the token."""
        return f"http://127.0.0.1:{self.port}/#token={self.token}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.application(scope, receive, send)
            return
        if scope["type"] != "http":  # no websocket is served
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if problem := self.refusal(scope["method"], scope["path"], headers):
            from starlette.responses import PlainTextResponse

            await PlainTextResponse(problem, 403, HEADERS)(scope, receive, send)
        else:
            await self.application(scope, receive, _with_headers(send))

    def refusal(self, method: str, path: str, headers: dict[str, str]) -> str:
        """Why a request is not answered; empty if nothing speaks against it."""
        host = headers.get("host", "")
        if host.rpartition(":")[0] not in LOOPBACK and host not in LOOPBACK:
            return f"the Host of this request must be one of {', '.join(LOOPBACK)}"
        origin = headers.get("origin")
        if origin not in (None, f"http://{host}"):
            return "the Origin of this request is another page"
        if method in ("GET", "HEAD") and (path == "/" or path.startswith("/page/")):
            return ""
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "this request comes from another site"
        if method not in ("GET", "HEAD") and origin is None:
            return "a request that changes something needs an Origin"
        if not hmac.compare_digest(headers.get(TOKEN, "").encode(), self.token.encode()):
            return "open the address that `lmgym view` has printed; it holds the token of this page"
        return ""


def _with_headers(send: Any) -> Any:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *own]}
        await send(message)

    return sending
