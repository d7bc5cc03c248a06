"""Hangs: whatever never returns, the limit that is set for it ends it within the limit and 10 seconds.

    python -m tests.torture.hangs                # every kind of hang against every limit
    python -m tests.torture.hangs reward env     # against some limits
    python -m tests.torture.hangs --kinds sleep loop

Every case runs in a process of its own, which must end in time, with the failure that it should have, and leave no
process behind. The short form is tests/property/test_hangs.py.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

from lmgym.core.errors import LONGEST_MESSAGE, LmgymError
from lmgym.envs.env_processes import EnvProcesses
from lmgym.envs.vector import EnvFailure
from lmgym.processes.pool import Failure, ProcessPool
from lmgym.rewards.base import call_reward
from lmgym.rewards.building import build_rewards
from lmgym.rewards.text.spice import CORENLP
from lmgym.types import Episode, Example, Turn
from tests.torture.kinds_of_hang import KINDS, drips

HERE = "tests.torture.kinds_of_hang"
ALLOWED = 10.0  # seconds beyond the limit
MARK = "LMGYM_TORTURE"  # in the environment of all processes of a case
SNIPPETS = {  # a snippet may start no process or thread, and send no signal
    "sleep": "import time; time.sleep(1e5)",
    "loop": "while True: pass",
    "swallow": "while True:\n try:\n  while True: pass\n except BaseException: pass",
    "ignore": "import signal, time\n[signal.signal(n, signal.SIG_IGN) for n in (1, 14, 15, 24)]\ntime.sleep(1e5)",
    "power": "7 ** (7 ** 11)",
    "iterate": "import itertools; sum(itertools.repeat(0))",
    "backtrack": "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')",
    "lock": "import threading; a = threading.Lock(); a.acquire(); a.acquire()",
    "pipe": "import os; os.read(os.pipe()[0], 1)",
    "poll": "import select; select.select([], [], [])",
    "destructor": "class A:\n def __del__(self):\n  while True: pass\nA()",
    "recurse": "def f(): f()\nwhile True:\n try: f()\n except RecursionError: pass",
    "print": "while True: print('x' * 1000)",
    "close": "import os, time; os.closerange(0, 1000); time.sleep(1e5)",
    "exit": "import atexit, time; atexit.register(time.sleep, 1e5)",
}


@dataclass(frozen=True)
class Limit:
    """Something with a limit: the kinds of hang that it is tried with, how long it may take at most, and a function
    that runs one kind and returns what it has become (a failure, in words)."""

    kinds: Sequence[str]
    seconds: float
    run: Callable[[str], str]


def episodes(*texts: str) -> list[Episode]:
    example = Example("a/0", "2+2=", ("4",), {"answer": "4"})
    return [Episode(example, 0, index, [Turn([1], [2], text=text)]) for index, text in enumerate(texts)]


def refused(section: dict[str, object], timeout: float = 1.0) -> str:
    """What a reward's call ends with."""
    reward = build_rewards({f"{HERE}:hangs": section})[0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return f"values {call_reward(reward, episodes('fine', 'hang', 'fine too'), timeout)}"
    except LmgymError as error:
        return str(error)


def in_process(kind: str) -> str:
    return refused({"kind": kind, "pool": False})


def of_reward(kind: str) -> str:
    return refused({"kind": kind})


def of_parallel(kind: str) -> str:
    """The texts that do not hang keep their values."""
    said = refused({"kind": kind, "parallel": {"processes": 1, "seconds": 0.2}})
    return "the text counts as 0" if said == "values [4.0, 0.0, 8.0]" else said


def of_pool(kind: str) -> str:
    with ProcessPool(f"{HERE}:hang_row", count=2) as pool:
        found = pool.map(["fine", kind, "fine too"], seconds=0.2)
    assert found[0] == "fine" and found[2] == "fine too", found
    return found[1].message if isinstance(found[1], Failure) else repr(found)


def of_env(call: str, kind: str) -> str:
    envs = EnvProcesses("hanging", plugins=[HERE], count=1, seconds=1.0)
    answer: object = envs.begin([(0, Example("fine", "x"), 0), (1, Example(call, kind), 0)])[1]
    if call == "demonstrate":
        answer = envs.demonstrate([0, 1])[1]
    elif call != "reset":
        answer = envs.step([(0, "", "eos"), (1, "", "eos")])[1]
    envs.end([0, 1])
    after = envs.begin([(2, Example("fine", "x"), 0)])[0]
    assert not isinstance(after, EnvFailure), after
    envs.close()
    return answer.message if isinstance(answer, EnvFailure) else f"answer {answer}"


def of_snippet(kind: str) -> str:
    from lmgym.envs.tools.sandbox.runner import Limits, run

    return run(SNIPPETS[kind], Limits(seconds=1.0, wall_seconds=2.0, isolation="process", max_output=400))


def of_endpoint(kind: str, reward: str = "endpoint_judge", **more: object) -> str:
    class Slow(BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                for piece in drips(kind):
                    self.request.sendall(piece)
                    time.sleep(0.1)

    with ThreadingTCPServer(("127.0.0.1", 0), Slow) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        section = {"base_url": url, "model": "judge", "seconds": 1.0, "retries": 0, **more}
        try:
            return f"values {call_reward(build_rewards({reward: section})[0], episodes('4'), 60.0)}"
        except LmgymError as error:
            return str(error)
        finally:
            server.shutdown()
            server.block_on_close = False


def of_spice(kind: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        java, jar = Path(folder) / "java", Path(folder) / "spice-1.0.jar"
        java.write_text(f"#!/bin/sh\n{PROGRAMS[kind]}\n")
        java.chmod(0o755)
        jar.touch()
        (Path(folder) / "lib").mkdir()
        for needed in CORENLP:
            (Path(folder) / "lib" / needed).touch()
        try:
            reward = build_rewards({"spice": {"jar": str(jar), "java": str(java), "seconds": 1.0}})[0]
            return f"values {call_reward(reward, episodes('a cat'), 60.0)}"
        except LmgymError as error:
            return str(error)


PROGRAMS = {
    "sleep": "exec sleep 100000",
    "loop": "while :; do :; done",
    "child": "sleep 100000 & wait",
    "ignore": "trap '' TERM INT; sleep 100000",
}
# In the training process an alarm ends what lets itself be ended; of the others the run says that nothing does.
BY_ALARM = ("sleep", "loop", "backtrack", "lock", "child", "pipe", "fifo", "connect", "poll", "pause", "power")
LIMITS = {
    "reward": Limit([*KINDS], 1.0, of_reward),
    "parallel": Limit([*KINDS], 2.0, of_parallel),  # 0.2 s of processor time, ten times as long by the clock
    "pool": Limit([*KINDS], 2.0, of_pool),  # as above
    **{
        f"env.{call}": Limit([*KINDS], 1.0, lambda kind, call=call: of_env(call, kind))
        for call in ("reset", "step", "demonstrate", "close")
    },
    "alarm": Limit(BY_ALARM, 1.0, in_process),
    "snippet": Limit([*SNIPPETS], 2.0, of_snippet),
    "endpoint": Limit(["silent", "head", "status", "body", "chunks"], 1.0, of_endpoint),
    "rubric": Limit(["silent", "body"], 1.0, lambda kind: of_endpoint(kind, "endpoint_rubric", criteria=["?"])),
    "spice": Limit([*PROGRAMS], 1.0, of_spice),
}


def case(limit: str, kind: str) -> str:
    """What is wrong with a case; empty if it ends in time, in words, and leaves nothing behind."""
    mark = f"{os.getpid()}-{limit}-{kind}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.torture.hangs", "--case", limit, kind],
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: mark},
        text=True,
        start_new_session=True,
    )
    seconds = LIMITS[limit].seconds
    try:
        said, _ = process.communicate(timeout=seconds + ALLOWED + 60)  # what it takes to import is not limited
    except subprocess.TimeoutExpired:
        said = "{}"
    left = remaining(mark, 0.0 if process.poll() is None else ALLOWED)
    for number in left:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()
    if process.returncode:
        return f"ended with status {process.returncode}"
    found = json.loads(said)
    if not found or found["seconds"] > seconds + ALLOWED:
        return f"took {found['seconds']:.1f} s" if found else "did not end"
    if found["outcome"].startswith(("values", "answer")) and not found["outcome"].startswith("answer Step"):
        return f"no failure: {found['outcome']}"
    if len(found["outcome"]) > LONGEST_MESSAGE or "Traceback" in found["outcome"]:
        return f"no sentence: {found['outcome']}"
    return f"{len(left)} processes were left" if left else ""


def remaining(mark: str, seconds: float) -> list[int]:
    """The processes of a case that are still there after so many seconds."""
    until = time.monotonic() + seconds
    while True:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


def run_case(limit: str, kind: str) -> None:
    began = time.monotonic()
    outcome = LIMITS[limit].run(kind)
    print(json.dumps({"seconds": time.monotonic() - began, "outcome": outcome}), flush=True)
    os._exit(0)  # a thread that was left behind by an endpoint shall not count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Every kind of hang against every limit.")
    parser.add_argument("limits", nargs="*", metavar="LIMIT", help=", ".join(LIMITS))
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--case", nargs=2)
    given = parser.parse_args(arguments)
    if given.case:
        run_case(*given.case)
    began, wrong, count = time.monotonic(), 0, 0
    for limit in given.limits or LIMITS:
        kinds = [kind for kind in LIMITS[limit].kinds if not given.kinds or kind in given.kinds]
        problems = {kind: problem for kind in kinds if (problem := case(limit, kind))}
        count, wrong = count + len(kinds), wrong + len(problems)
        ended = f"{len(kinds) - len(problems)} of {len(kinds)}"
        print(f"{limit}: {ended} kinds end within {LIMITS[limit].seconds:g} + {ALLOWED:g} s", flush=True)
        for kind, problem in problems.items():
            print(f"  {kind}: {problem}", flush=True)
    print(f"hangs: {count - wrong} of {count} ended in time, in {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
