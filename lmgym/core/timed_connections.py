"""HTTP connections that end at a deadline, however slowly a server sends its headers or its body.

The time limit of Python's sockets (httpx's too) is for one operation only: a server that sends a byte now and then is
never too late for it. Here a timer shuts the connections down. Finding the address of a host name is not limited: the
system does it, and its own limits apply."""

import http.client
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def timed_handlers(deadline: float) -> Iterator[list[urllib.request.BaseHandler]]:
    """Handlers for `urllib.request.build_opener` whose connections end at `deadline` (of time.monotonic), or with the
    body. A reply is then cut off, which may look like its end: compare the time before it is used.

    Example:
        >>> with timed_handlers(time.monotonic() + 5) as handlers:
        ...     urllib.request.build_opener(*handlers).open("http://localhost:8000/v1/models").read()
    """
    watched: list[socket.socket] = []  # duplicates, since TLS takes the connection's own socket over

    def end() -> None:
        for own in watched:
            with suppress(OSError):  # the server was faster
                own.shutdown(socket.SHUT_RDWR)

    def reach(address: tuple[str, int], *others: Any) -> socket.socket:
        """A socket to the first address of the host that can be reached in the time left."""
        problem = OSError(f"{address[0]} has no address")
        for *_, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            left = deadline - time.monotonic()
            try:
                own = socket.create_connection((str(place[0]), address[1]), max(left, 1e-3))
            except OSError as error:
                problem = error
                continue
            watched.append(own.dup())
            if time.monotonic() >= deadline:  # the timer may have looked before
                end()
            return own
        raise problem

    def made(kind: Any) -> Any:
        def connection(*arguments: Any, **options: Any) -> Any:
            own = kind(*arguments, **options)
            own._create_connection = reach
            return own

        return connection

    class Http(urllib.request.HTTPHandler):
        def http_open(self, request: urllib.request.Request) -> Any:
            return self.do_open(made(http.client.HTTPConnection), request)

    class Https(urllib.request.HTTPSHandler):
        def https_open(self, request: urllib.request.Request) -> Any:
            return self.do_open(made(http.client.HTTPSConnection), request)

    timer = threading.Timer(max(deadline - time.monotonic(), 0.0), end)
    timer.daemon = True
    timer.start()
    try:
        yield [Http(), Https()]
    finally:
        timer.cancel()
        for own in watched:
            own.close()
