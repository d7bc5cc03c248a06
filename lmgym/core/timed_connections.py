"""HTTP connections that end at a deadline, however slowly a server sends its headers or its body.

The time limit of Python's sockets is for one operation only: a server that sends a byte now and then is never too late
for it. Here each operation gets the time that is left. Finding the address of a host name is not limited: the system
does it, and its own limits apply.
"""

import http.client
import io
import socket
import time
import urllib.request
from typing import Any


def timed_handlers(deadline: float) -> list[urllib.request.BaseHandler]:
    """Handlers for `urllib.request.build_opener` whose requests raise TimeoutError at `deadline` (time.monotonic)."""
    plain, secure = _timed(http.client.HTTPConnection, deadline), _timed(http.client.HTTPSConnection, deadline)

    class Http(urllib.request.HTTPHandler):
        def http_open(self, request: urllib.request.Request) -> Any:
            return self.do_open(plain, request)

    class Https(urllib.request.HTTPSHandler):
        def https_open(self, request: urllib.request.Request) -> Any:
            return self.do_open(secure, request)

    return [Http(), Https()]


def _left(deadline: float) -> float:
    """The seconds that are left. Raises TimeoutError if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _timed(kind: Any, deadline: float) -> Any:
    """The class of connections `kind`, with a deadline."""

    class Timed(kind):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._create_connection = self._reach

        def _reach(self, address: tuple[str, int], timeout: Any = None, source: Any = None) -> socket.socket:
            """A socket to the first address of the host that can be reached in the time left."""
            problem: OSError = OSError(f"{address[0]} has no address")
            for *_, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
                try:
                    return socket.create_connection((str(place[0]), address[1]), _left(deadline), source)
                except OSError as error:
                    problem = error
            raise problem

        def connect(self) -> None:
            super().connect()
            self.sock: Any = _Socket(self.sock, deadline)

    return Timed


class _Socket:
    """A connected socket, each of whose operations gets the time that is left until the deadline."""

    def __init__(self, own: socket.socket, deadline: float) -> None:
        self._own, self._deadline = own, deadline

    def sendall(self, data: Any) -> None:
        self._own.settimeout(_left(self._deadline))
        self._own.sendall(data)

    def makefile(self, mode: str = "rb", *_: Any) -> io.BufferedReader:
        return io.BufferedReader(_Bytes(self._own, self._deadline))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class _Bytes(io.RawIOBase):
    """The bytes that arrive at a socket, until the deadline."""

    def __init__(self, own: socket.socket, deadline: float) -> None:
        self._own, self._deadline, self._raw = own, deadline, own.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._own.settimeout(_left(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
