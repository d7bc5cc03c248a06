"""Whether Ray still runs: on this machine, and its head (the GCS). When one does not, Ray ends this process with status
1 and no word to it, at its next access to the object store or a minute later; so lmgym looks first, and says how to go
on."""

import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread, get_ident
from typing import Any

from lmgym.distributed.launch import RANK_LOST
from lmgym.distributed.ranks import Lost

RESUME = "start the same command again, and it goes on from the newest checkpoint (`--restarts K` does so by itself)"
GONE = f"Ray has ended on this machine (its raylet or one of its agents died), and the generators with it; {RESUME}"
HEAD_GONE = (
    f"Ray's head (its GCS) at {{}} has not answered for {{:.0f}} seconds, and Ray ends without it; if you have started "
    f"Ray yourself, start it again, then {RESUME}"
)
PATIENCE, PAUSE = 30.0, 3.0  # seconds that the head may be away (Ray itself waits for 60), and between two looks


class RayNode:
    """A connection to Ray's object store on this machine, which closes when Ray dies."""

    def __init__(self) -> None:
        from ray._private import worker

        self._closed = self._connected = False
        self._inside = set[int]()  # threads that access Ray
        self._socket = socket.socket(socket.AF_UNIX)
        with suppress(OSError, AttributeError, TypeError):  # no public name; without it nothing is noticed early
            node: Any = worker._global_node
            self._socket.connect(node.plasma_store_socket_name)
            self._connected = True
            for watch in (self._watch, partial(self._watch_head, str(node.gcs_address))):
                Thread(target=watch, daemon=True, name="ray-node").start()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In the body Ray is accessed. Raises Lost if Ray has gone before; if it goes in the body, this process ends as
        for a lost rank."""
        if self._gone(0):
            raise Lost(GONE)
        self._inside.add(get_ident())
        try:
            yield
        finally:
            self._inside.discard(get_ident())

    def close(self) -> None:
        """Ray may end now."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _gone(self, milliseconds: int | None) -> bool:
        """True if Ray has closed the connection, or does so within so many milliseconds (None: ever)."""
        if not self._connected:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLHUP)  # only that it was closed (0: macOS never tells)
        return bool(poll.poll(milliseconds))

    def _watch(self) -> None:
        if self._gone(None) and self._inside and not self._closed:
            _end(GONE)

    def _watch_head(self, address: str) -> None:
        """End this process if nobody has listened at the head's address for a while."""
        host, _, port = address.rpartition(":")
        answered = time.monotonic()
        while not self._closed:
            began = time.monotonic()
            with suppress(OSError):
                socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE / 3).close()
                answered = began
            if not self._closed and time.monotonic() - answered > PATIENCE:
                _end(HEAD_GONE.format(address, PATIENCE))
            time.sleep(PAUSE)


def _end(sentence: str) -> None:
    print(f"lmgym: {sentence}", file=sys.stderr, flush=True)
    os._exit(RANK_LOST)
