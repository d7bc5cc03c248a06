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

from lmgym.gateway.session import Mailbox, Waiting
from lmgym.gateway.wire import Refused, chat_body, chat_events, read_json, read_request

LARGEST = 2**23  # bytes of a request's body
IDLE = 600.0  # seconds that a connection may be silent: clients keep theirs open between requests
LINGERING = 2.0  # seconds that a refused client may stay silent before its connection is closed
MOST_CONNECTIONS = 1024
MODEL = "policy"
CHAT = "chat/completions"


class Gateway:
    """The server of this process. `open` begins a session, `close` ends it.

    Example:
        >>> address, key = gateway_of(os.getpid()).open(mailbox, ignored=())
    """

    def __init__(self) -> None:
        self._sessions: dict[str, tuple[str, Mailbox[Any], tuple[str, ...]]] = {}
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.gateway = self
        threading.Thread(target=self._server.serve_forever, name="gateway", daemon=True).start()

    def open(self, mailbox: Mailbox[Any], ignored: tuple[str, ...]) -> tuple[str, str]:
        """A new session's address, as an OpenAI client takes it, and its key."""
        name, key = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._sessions[name] = (key, mailbox, ignored)
        return f"http://127.0.0.1:{self._server.server_address[1]}/{name}/v1", key

    def close(self, address: str) -> None:
        """End a session; its address is not served any more."""
        self._sessions.pop(address.split("/")[3], None)

    def session(self, name: str, key: str) -> tuple[Mailbox[Any], tuple[str, ...]]:
        """A session's mailbox, and what it ignores. Raises Refused without the right key."""
        expected, mailbox, ignored = self._sessions.get(name, (secrets.token_urlsafe(32), None, ()))
        if not hmac.compare_digest(expected.encode(), key.encode()) or mailbox is None:
            raise Refused("there is no such session, or this is not its key (OPENAI_API_KEY)", 401)
        return mailbox, ignored


@cache
def gateway_of(process: int) -> Gateway:
    """The gateway of this process (its number: a fork needs another one); it starts with the first session."""
    return Gateway()


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
            mailbox, ignored = self._session(CHAT)
            request = read_request(read_json(self._body()), ignored)
            waiting = Waiting(request)
            mailbox.put(waiting)
            try:
                answer = waiting.answered.result()
            except CancelledError:
                raise Refused("the session is over", 410) from None
        except Refused as refused:
            return self._refuse(refused)
        if request.stream:
            self._send(200, b"".join(chat_events(answer, MODEL)), "text/event-stream")
        else:
            self._send(200, json.dumps(chat_body(answer, MODEL)).encode())

    def do_GET(self) -> None:
        try:
            self._session("models")
        except Refused as refused:
            return self._refuse(refused)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "lmgym"}
        self._send(200, json.dumps({"object": "list", "data": [model]}).encode())

    def log_message(self, *given: Any) -> None:
        """Nothing is printed: a request is no event of the run."""

    def _session(self, action: str) -> tuple[Mailbox[Any], tuple[str, ...]]:
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            raise Refused("the Host of this request is not this server's", 403)
        if self.headers.get("Origin") is not None or self.headers.get("Sec-Fetch-Site") is not None:
            raise Refused("a web page may not ask", 403)
        parts = self.path.partition("?")[0].split("/", 3)
        _, key = f"{self.headers.get('Authorization') or ''} ".split(" ", 1)
        session = self.server.gateway.session(parts[1] if len(parts) > 1 else "", key.strip())
        if parts[2:] != ["v1", action]:
            raise Refused(f"the gateway serves POST {CHAT} and GET models behind OPENAI_BASE_URL, nothing else", 404)
        return session

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length") or ""
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit() and len(length) < 12):
            raise Refused("a request needs a Content-Length", 411)
        if int(length) > LARGEST:
            raise Refused(f"the body has more than {LARGEST} bytes", 413)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise Refused("the body is shorter than its Content-Length")
        return body

    def _refuse(self, refused: Refused) -> None:
        self.close_connection = True
        error = {"message": str(refused), "type": "invalid_request_error", "param": None, "code": None}
        self._send(refused.status, json.dumps({"error": error}).encode())
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
