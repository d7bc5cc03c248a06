"""A session with an MCP server (Model Context Protocol, modelcontextprotocol.io) that is a program: JSON-RPC 2.0, one
message a line, over its standard input and output.

Only what tools need is spoken here: initialize, tools/list, tools/call, and the answer to the server's ping. So no
library is needed; each answer has a time limit; and a server ends with its episode."""

import atexit
import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.envs.tools.schema import ToolLost
from lmgym.pictures.addresses import unpacked
from lmgym.pictures.store import shown
from lmgym.processes.coroutines import result_of
from lmgym.processes.supervisor import die_with
from lmgym.types import RecipeText

PROTOCOL = "2025-06-18"  # the version of the protocol that is offered; the server answers with the one it speaks
KNOWN = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")  # in all of these, tools are listed and called alike
PASSED_ON = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
MOST_PAGES = 100  # of a server's list of tools
PAGES_PER_LIMIT = 5  # the whole list may take so many times the limit of one answer
LONGEST_ERRORS, KEPT_ERRORS = 2**20, 4096  # bytes of its error output on the disk, and its end that is kept
LONGEST_MESSAGE = 2**24  # bytes in a line of the server
NO_SUCH_METHOD = {"code": -32601, "message": "lmgym answers ping only"}


class ToolError(Exception):
    """The server says that a call failed; its text is for the model."""


_running: set["Session"] = set()


@dataclass(eq=False)
class Session:
    """One run of a server. It starts with the first request. Each answer may take `seconds`, and the server gets these
    environment `variables` beside those of `PASSED_ON`.

    With `pictures` those in results are shown to the model, in place of being named.

    Raises ToolLost if the server has ended, does not answer in time, or does not speak the protocol.

    Example: Session(["mcp-server-calculator"], seconds=20.0).list_tools()[0]["name"]"""

    command: Sequence[str]
    seconds: float
    variables: Sequence[str] = ()
    pictures: bool = False
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _sent: int = field(default=0, init=False, repr=False)
    _unread: bytes = field(default=b"", init=False, repr=False)

    def list_tools(self) -> list[dict[str, Any]]:
        """All tools, as the server describes them: name, description, inputSchema."""
        tools: list[dict[str, Any]] = []
        page: dict[str, Any] = {}
        until = time.monotonic() + PAGES_PER_LIMIT * self.seconds
        for _ in range(MOST_PAGES):
            result = self.request("tools/list", page)
            if not isinstance(result.get("tools"), list):
                raise ToolLost("answers tools/list without a list of tools")
            tools += result["tools"]
            if not result.get("nextCursor"):
                break
            if time.monotonic() > until:
                raise ToolLost(f"did not end its list of tools within {PAGES_PER_LIMIT * self.seconds:g} s")
            page = {"cursor": result["nextCursor"]}
        for tool in tools:
            _check_described(tool)
        return tools

    def call(self, name: str, **arguments: Any) -> str:
        """The result of a tool as text. Raises ToolError with the server's text if the call failed, or if a picture is
        none."""
        result = self.request("tools/call", {"name": name, "arguments": arguments})
        content = result.get("content")
        if not isinstance(content, list | None) or not all(isinstance(part, Mapping) for part in content or ()):
            raise ToolLost("answered a call with a content that is no list of parts")
        texts = [_shown(part) if self.pictures and _is_picture(part) else _text_of(part) for part in content or []]
        text = RecipeText.join(*[piece for one in texts for piece in ("\n", one)][1:])
        if not text and result.get("structuredContent") is not None:
            text = json.dumps(result["structuredContent"], ensure_ascii=False)
        if result.get("isError"):
            raise ToolError(text)
        return text

    def request(self, method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a request. Raises ToolError for a JSON-RPC error."""
        deadline = time.monotonic() + self.seconds
        try:
            if self._process is None:
                self._start(deadline)
            return self._ask(method, parameters, deadline)
        except ToolLost:
            self.close()
            raise

    def close(self) -> None:
        """Kill the server and the processes of its group."""
        process, self._process, self._unread = self._process, None, b""
        _running.discard(self)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        self._errors.close()

    def _start(self, deadline: float) -> None:
        passed_on = (*PASSED_ON, *self.variables)
        variables = {name: os.environ[name] for name in passed_on if name in os.environ}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # what it writes to stderr, for the reason of its end
        fcntl.fcntl(self._errors, fcntl.F_SETFL, fcntl.fcntl(self._errors, fcntl.F_GETFL) | os.O_APPEND)
        try:
            self._process = _in_lasting_thread(
                partial(
                    subprocess.Popen,
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    env=variables,
                    start_new_session=True,
                    preexec_fn=partial(die_with, os.getpid()),
                )
            )
        except OSError as error:
            self._errors.close()
            raise ToolLost(f"cannot be started: {error.strerror}") from None
        _running.add(self)
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)  # type: ignore[union-attr]
        client = {"name": "lmgym", "version": "1"}
        offer = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client}
        try:
            spoken = self._ask("initialize", offer, deadline).get("protocolVersion")
        except ToolError as error:
            raise ToolLost(f"refuses to begin: {error}") from None
        if spoken not in KNOWN:
            raise ToolLost(f"speaks version {spoken!r} of the protocol; lmgym speaks {', '.join(KNOWN)}")
        self._send({"method": "notifications/initialized"}, deadline)

    def _ask(self, method: str, parameters: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        self._sent += 1
        self._send({"id": self._sent, "method": method, "params": dict(parameters)}, deadline)
        while True:
            message = self._receive(deadline)
            if "method" in message:  # a request of the server, or a notification, which has no id
                if "id" in message:
                    answer = {"result": {}} if message["method"] == "ping" else {"error": NO_SUCH_METHOD}
                    self._send({"id": message["id"], **answer}, deadline)
            elif message.get("id") == self._sent:
                break
        if "error" in message:
            error = message["error"]
            raise ToolError(str(error.get("message", error) if isinstance(error, dict) else error))
        if not isinstance(message.get("result"), dict):
            raise ToolLost(f"answered {method} with neither a result nor an error")
        return message["result"]

    def _send(self, message: Mapping[str, Any], deadline: float) -> None:
        rest = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        pipe = self._process.stdin.fileno()  # type: ignore[union-attr]
        # The pipe may be full if the server does not read: wait for room, until the deadline.
        while rest:
            self._wait([], [pipe], deadline)
            try:
                rest = rest[os.write(pipe, rest) :]
            except BlockingIOError:
                continue
            except OSError:
                raise ToolLost(self._end()) from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        """The next message; lines that are no JSON object are not the protocol's, and an error."""
        pipe = self._process.stdout.fileno()  # type: ignore[union-attr]
        while b"\n" not in self._unread:
            if len(self._unread) > LONGEST_MESSAGE:
                raise ToolLost(f"sent a message of more than {LONGEST_MESSAGE} bytes")
            self._wait([pipe], [], deadline)
            piece = os.read(pipe, 2**16)
            if not piece:
                raise ToolLost(self._end())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ToolLost(f"wrote to its output what is no message of the protocol: {line[:80]!r}")
        return message

    def _keep_errors_short(self) -> None:
        """Empty the file of the server's error output if it is large, but for its end. The server appends to it."""
        if os.fstat(self._errors.fileno()).st_size > LONGEST_ERRORS:
            self._errors.seek(-KEPT_ERRORS, os.SEEK_END)
            last = self._errors.read(KEPT_ERRORS)
            self._errors.truncate(0)
            self._errors.write(last)
            self._errors.flush()

    def _wait(self, reads: list[int], writes: list[int], deadline: float) -> None:
        while (left := deadline - time.monotonic()) > 0:
            self._keep_errors_short()
            if any(select.select(reads, writes, [], min(left, 0.5))):
                return
        raise ToolLost(f"did not answer within {self.seconds:g} s")

    def _end(self) -> str:
        """Why the server has ended, with the last line that it wrote to its error output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)  # type: ignore[union-attr]
        self._errors.seek(max(self._errors.seek(0, os.SEEK_END) - KEPT_ERRORS, 0))
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        code = self._process.poll()  # type: ignore[union-attr]
        return f"ended with exit status {code}" + (f": {last[:300]}" if last else "")


def _in_lasting_thread(start: Callable[[], Any]) -> Any:
    """Call `start` in a thread that ends with the process: a server is killed with the thread that has started it."""

    async def started() -> Any:
        return start()

    return start() if threading.current_thread() is threading.main_thread() else result_of(started())


def _check_described(tool: Any) -> None:
    """Raise ToolLost for a description of a tool that a call could not be checked against."""
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise ToolLost("lists a tool without a name")
    name, parameters = tool["name"], tool.get("inputSchema")
    if not isinstance(tool.get("description"), str | None):
        raise ToolLost(f"describes its tool '{name[:50]}' by what is no text")
    if not isinstance(parameters, dict | None):
        raise ToolLost(f"gives its tool '{name[:50]}' an inputSchema that is no object")
    required = (parameters or {}).get("required")
    if not isinstance((parameters or {}).get("properties"), dict | None):
        raise ToolLost(f"gives its tool '{name[:50]}' properties that are no object")
    if not isinstance(required, list | None) or not all(isinstance(key, str) for key in required or ()):
        raise ToolLost(f"gives its tool '{name[:50]}' a 'required' that is no list of names")


def _is_picture(part: Mapping[str, Any]) -> bool:
    """True for a picture, also one that is a file."""
    resource = part.get("resource")
    if isinstance(resource, Mapping) and "blob" in resource:
        return str(resource.get("mimeType")).startswith("image/")
    return part.get("type") == "image"


def _shown(part: Mapping[str, Any]) -> str:
    """A part of a result that is a picture, as a text. Raises ToolError for what is none."""
    data = part.get("data") if part.get("type") == "image" else part["resource"]["blob"]
    try:
        if not isinstance(data, str):
            raise LmgymError("the picture is no base64")
        return shown(unpacked(data))
    except LmgymError as error:
        raise ToolError(str(error)) from None


def _text_of(part: Mapping[str, Any]) -> str:
    """A part of a result as text. Pictures and sounds are named."""
    if part.get("type") == "text":
        return str(part.get("text", ""))
    resource = part.get("resource")
    if isinstance(resource, Mapping) and "text" in resource:
        return str(resource["text"])
    return f"[{part.get('type')} {part.get('mimeType') or part.get('uri') or ''}]".replace(" ]", "]")


@atexit.register
def _close_all() -> None:
    for session in list(_running):
        session.close()
