"""Ray whose workers are forked from a process that has imported everything: each else imports for seconds.

Ray starts a worker by a script of its own that becomes the worker. Here this file takes that script's place: it hands
the command to the process that has imported everything, and waits for its child to end."""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADDRESS = "LMGYM_TESTS_WARM_RAY"  # an environment variable: the socket of `serve`


@contextmanager
def warm(folder: Path) -> Iterator[None]:
    """In the body each Ray that this process starts has such workers."""
    from ray._private import ray_constants

    address, theirs = str(folder / "warm"), ray_constants.SETUP_WORKER_FILENAME
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(address)
    listening.listen()
    command = [sys.executable, "-m", "tests.warm_ray", str(listening.fileno())]
    root = Path(__file__).parents[1]
    server = subprocess.Popen(command, cwd=root, pass_fds=[listening.fileno()], stdin=subprocess.PIPE)
    listening.close()
    os.environ[ADDRESS] = address
    ray_constants.SETUP_WORKER_FILENAME = __file__  # joined to the path of Ray's folder: an absolute one stays
    try:
        yield
    finally:
        ray_constants.SETUP_WORKER_FILENAME = theirs
        del os.environ[ADDRESS]
        server.kill()
        server.wait()


def serve(listening: socket.socket) -> None:
    """Fork a child for each command that comes, until the process that has started this one is gone."""
    # What every generator imports, but for Ray, which reads its settings and passwords of the environment with that.
    import lmgym.distributed.parts
    import lmgym.inference.pool.generator
    import lmgym.models.copies
    import lmgym.training.setup  # noqa: F401

    assert "ray" not in sys.modules

    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for the status of a child
    while True:
        caller, _ = listening.accept()
        text, files, _, _ = socket.recv_fds(caller, 2**20, 2)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            work(caller, files, **json.loads(text))
        for one in (*files, caller.fileno()):
            os.close(one)
        caller.detach()


def work(caller: socket.socket, files: list[int], words: list[str], environment: dict[str, str], folder: str) -> None:
    """Be the worker that was asked for. It ends with the process that has asked."""
    threading.Thread(target=lambda: (caller.recv(1), os._exit(1)), daemon=True).start()
    for place, one in enumerate(files, start=1):
        os.dup2(one, place)
    os.setpgid(0, 0)  # Ray kills the group of a worker that has ended
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        os._exit(0)


def ask(words: list[str]) -> None:
    """Hand a worker's command over and wait until the worker has ended."""
    theirs = ("--serialized-runtime-env-context", "--language")  # options of Ray's script, not of the worker
    words = [word for word in words if not word.startswith(theirs)]
    asked = {"words": words, "environment": {**os.environ}, "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(os.environ[ADDRESS])
        socket.send_fds(server, [json.dumps(asked).encode()], [1, 2])
        server.recv(1)


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        serve(socket.socket(fileno=int(sys.argv[1])))
    else:
        ask(sys.argv[1:])
