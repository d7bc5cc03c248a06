"""The gateway: a server of HTTP on loopback, at which the programs of many sessions ask for the policy's answers.

Each session has an address and a key of its own. A request is read, put into its session's mailbox, and waits there
until the rollout has sampled its answer. A web page cannot ask (Origin and Host are checked), nor can other users."""

import hmac
import json
import secrets
import socket
import threading
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.gateway.chat import CHAT
from lmgym.gateway.completions import COMPLETIONS
from lmgym.gateway.messages import MESSAGES
from lmgym.gateway.session import Mailbox, Waiting
from lmgym.gateway.wire import Refused, read_json

LARGEST = 2**25  # bytes of a request's body, pictures included
IDLE = 600.0  # seconds that a connection may be silent: clients keep theirs open between requests
LINGERING = 2.0  # seconds that a refused client may stay silent before its connection is closed
MOST_CONNECTIONS = 1024
MODEL = "policy"
FORMS = {"chat/completions": CHAT, "completions": COMPLETIONS, "messages": MESSAGES}
ERRORS = {  # by status; both kinds of clients look at the status, and read `message`
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class Gateway:
    """The server of this process. `open` begins a session, `close` ends it.

    Example:
        >>> address, key = gateway_of(os.getpid()).open(mailbox, ignored=())
    """

    def __init__(self, port: int = 0) -> None:
        """On any free port, or on this one. Raises LmgymError if it is taken."""
        self._sessions: dict[str, tuple[str, Mailbox[Any], tuple[str, ...]]] = {}
        try:
            self._server = _Server(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise LmgymError(f"port {port} of this machine cannot be used: {why}; take another") from None
        self._server.gateway = self
        threading.Thread(target=self._server.serve_forever, name="gateway", daemon=True).start()

    def open(self, mailbox: Mailbox[Any], ignored: tuple[str, ...]) -> tuple[str, str]:
        """A new session's address, as an OpenAI client takes it, and its key."""
        name, key = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._sessions[name] = (key, mailbox, ignored)
        return f"http://127.0.0.1:{self._server.server_address[1]}/{name}/v1", key

    @property
    def sessions(self) -> int:
        """The number of sessions that are open."""
        return len(self._sessions)

    def close(self, address: str) -> None:
        """End a session; its address is not served any more."""
        self._sessions.pop(address.split("/")[3], None)

    def session(self, name: str, key: str) -> tuple[Mailbox[Any], tuple[str, ...]]:
        """A session's mailbox, and what it ignores. Raises Refused without the right key."""
        expected, mailbox, ignored = self._sessions.get(name, (secrets.token_urlsafe(32), None, ()))
        if not hmac.compare_digest(expected.encode(), key.encode()) or mailbox is None:
            raise Refused("there is no such session, or this is not its key (OPENAI_API_KEY, ANTHROPIC_API_KEY)", 401)
        return mailbox, ignored


@cache
def gateway_of(process: int) -> Gateway:
    """The gateway of this process (its number: a fork needs another one); it starts with the first session."""
    return Gateway()


def addresses(address: str, key: str) -> dict[str, str]:
    """The variables in which the official clients look for a server and its key.

    Example: addresses("http://127.0.0.1:8643/5f/v1", "secret")["OPENAI_API_KEY"] -> "secret" """
    places = {"OPENAI_BASE_URL": address, "ANTHROPIC_BASE_URL": address.removesuffix("/v1")}
    return {**places, "OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key}


class _Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 256
    gateway: Gateway

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            return self.shutdown_request(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version, server_version, sys_version = "HTTP/1.1", "lmgym", ""
    timeout = IDLE

    def do_POST(self) -> None:
        try:
            mailbox, ignored, action = self._session(*FORMS)
            form = FORMS[action]
            request = form.read(read_json(self._body()), ignored)
            waiting = Waiting(request)
            mailbox.put(waiting)
            try:
                answer = waiting.answered.result()
            except CancelledError:
                raise Refused("the session is over", 410) from None
        except Refused as refused:
            return self._refuse(refused)
        if request.stream:
            self._send(200, b"".join(form.events(answer, request, MODEL)), "text/event-stream")
        else:
            self._send(200, json.dumps(form.body(answer, MODEL)).encode())

    def do_GET(self) -> None:
        try:
            self._session("models")
        except Refused as refused:
            return self._refuse(refused)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "lmgym"}  # as OpenAI's clients read it
        model |= {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}  # as Anthropic's
        models = {"object": "list", "data": [model], "has_more": False, "first_id": MODEL, "last_id": MODEL}
        self._send(200, json.dumps(models).encode())

    def log_message(self, *given: Any) -> None:
        """Nothing is printed: a request is no event of the run."""

    def _session(self, *actions: str) -> tuple[Mailbox[Any], tuple[str, ...], str]:
        """The session's mailbox, what it ignores, and which of the actions is asked for. Raises Refused."""
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            raise Refused("the Host of this request is not this server's", 403)
        if self.headers.get("Origin") is not None or self.headers.get("Sec-Fetch-Site") is not None:
            raise Refused("a web page may not ask", 403)
        parts = self.path.partition("?")[0].split("/", 3)
        key = self.headers.get("X-Api-Key") or f"{self.headers.get('Authorization') or ''} ".split(" ", 1)[1]
        mailbox, ignored = self.server.gateway.session(parts[1] if len(parts) > 1 else "", key.strip())
        if parts[2:3] != ["v1"] or parts[3:] not in [[action] for action in actions]:
            raise Refused(f"the gateway serves POST {', '.join(FORMS)} and GET models, nothing else", 404)
        return mailbox, ignored, parts[3]

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length") or ""
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit() and len(length) < 20):
            raise Refused("a request needs a Content-Length", 411)
        if int(length) > LARGEST:
            raise Refused(f"the body has more than {LARGEST} bytes", 413)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise Refused("the body is shorter than its Content-Length")
        return body

    def _refuse(self, refused: Refused) -> None:
        self.close_connection = True
        kind = ERRORS.get(refused.status, "invalid_request_error")
        error = {"message": str(refused), "type": kind, "param": None, "code": None}
        self._send(refused.status, json.dumps({"type": "error", "error": error}).encode())
        # What is left of the request is read, or the client would see a lost connection in place of the answer.
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(LINGERING)
        left = 2 * LARGEST
        with suppress(OSError):
            while left > 0 and (piece := self.rfile.read1(2**16)):
                left -= len(piece)

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
