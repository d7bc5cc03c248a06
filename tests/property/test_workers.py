"""Worker processes: whatever a call does, every item gets its own answer, and no process is left."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmgym.config.build import build_config
from lmgym.core.cores import cores
from lmgym.core.errors import LmgymError
from lmgym.experiments import parallel_runs
from lmgym.processes import supervisor
from lmgym.processes.pool import MAX_LOSSES, Failure, ProcessPool, close_shared, default_count, shared
from lmgym.training.planning.step_time import crowding
from tests import runs

pytestmark = pytest.mark.processes

ODD = "tests.property.odd_functions:odd"
FAILING = {
    "loop": (["loop"], "time"),
    "power": (["power"], "time"),
    "segfault": (["signal", "SIGSEGV"], "crash"),
    "exit": (["exit"], "crash"),
    "killed": (["signal", "SIGKILL"], "crash"),
    "exception": (["raise"], "error"),
    "memory": (["memory"], "error"),
    "value": (["no json"], "error"),
}
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=50)
trees = st.recursive(values, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner))


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPool]:
    with ProcessPool(ODD, count=2, memory_gib=1.0) as workers:
        yield workers


def alive(number: int) -> bool:
    try:
        with open(f"/proc/{number}/stat") as file:  # a zombie is as good as gone
            return file.read().split(")")[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # before it was opened, or before it was read
        return False


def gone(*numbers: int) -> bool:
    for _ in range(100):
        if not any(alive(number) for number in numbers):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists processes, with their names, in /proc")
def test_a_name_that_is_cut_within_a_letter_hides_no_process() -> None:
    """Linux keeps 15 bytes of a process's name."""
    rename = "ctypes.CDLL(None).prctl(15, 'Prüfung 试abü'.encode(), 0, 0, 0)"
    code = f"import ctypes, time; {rename}; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as named:
        try:
            assert named.stdout is not None and named.stdout.readline()
            with pytest.raises(UnicodeDecodeError):
                Path(f"/proc/{named.pid}/stat").read_text(encoding="utf-8")
            assert named.pid in supervisor._children()
        finally:
            named.kill()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="macOS cannot bind a process to processors")
def test_only_processors_that_may_be_used_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For workers, for the threads of runs side by side, and for how much ranks are in each other's way."""
    echo = tmp_path / "echo"
    echo.write_text("#!/bin/sh\necho $OMP_NUM_THREADS\n")
    echo.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(echo))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usual)})
    try:
        assert cores() == default_count() == 1
        assert crowding(torch.device("cpu"), 2) == 2 * torch.get_num_threads()
        process, log = parallel_runs._start(build_config(runs.tiny(out=str(tmp_path / "run"))), jobs=1)
        assert process.wait() == 0 and log.read_text() == "1\n"
    finally:
        os.sched_setaffinity(0, usual)


@pytest.mark.slow
@settings(max_examples=10)
@given(items=st.lists(trees, max_size=12))
def test_every_value_comes_back_in_its_place(workers: ProcessPool, items: list[Any]) -> None:
    assert workers.map([["echo", item] for item in items], seconds=5.0) == items


def test_a_long_line_and_half_a_surrogate_pair_come_back(workers: ProcessPool) -> None:
    items = ["x\n" * 500_000, "\ud800", ""]
    assert workers.map([["echo", item] for item in items], seconds=10.0) == items


@settings(max_examples=4)
@given(kinds=st.lists(st.sampled_from([*FAILING, "fine"]), min_size=1, max_size=7))
def test_a_failing_call_costs_its_own_answer_alone(workers: ProcessPool, kinds: list[str]) -> None:
    items = [FAILING[kind][0] if kind in FAILING else ["echo", place] for place, kind in enumerate(kinds)]
    for place, (kind, value) in enumerate(zip(kinds, workers.map(items, seconds=0.3), strict=True)):
        if kind == "fine":
            assert value == place
        else:
            assert isinstance(value, Failure) and value.kind == FAILING[kind][1]


def test_messages_say_what_happened(workers: ProcessPool) -> None:
    found = workers.map([["raise"], ["signal", "SIGSEGV"], ["exit"], ["sleep", 60], ["loop"]], seconds=0.1)
    assert [failure.message for failure in found] == [
        "ValueError: no",
        "its process was killed by SIGSEGV",
        "its process ended with status 3",
        "did not return within 1 s",
        "took too much processor time",
    ]
    assert workers.failures["time"] >= 2 and workers.failures["crash"] >= 2


def test_after_a_failure_another_process_calls_and_the_module_is_prepared_once() -> None:
    with ProcessPool(ODD, count=1) as workers:
        first, again, failure, fresh = workers.map([["who"], ["who"], ["raise"], ["who"]], seconds=5.0)
        assert first == again and isinstance(failure, Failure)
        assert fresh[0] != first[0] and fresh[1:] == first[1:] and first[2] == 1


def test_a_worker_loads_neither_torch_nor_the_test_runner(workers: ProcessPool) -> None:
    assert workers.map([["loaded"]], seconds=5.0) == [[False, False, False]]


@pytest.mark.slow
def test_a_killed_supervisor_is_replaced(workers: ProcessPool) -> None:
    _, supervisor, _ = workers.map([["who"]], seconds=5.0)[0]
    os.kill(supervisor, signal.SIGKILL)
    assert workers.map([["echo", 1], ["echo", 2], ["echo", 3]], seconds=5.0) == [1, 2, 3]
    found = workers.map([["kill supervisor"], ["echo", 1]], seconds=5.0)
    assert isinstance(found[0], Failure) and found[0].kind == "crash" and found[1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("more", [0, 1])
def test_an_item_may_lose_some_workers(more: int, workers: ProcessPool, tmp_path: Path) -> None:
    """Somebody kills worker after worker, as a system without memory does; the item is innocent."""
    counter = tmp_path / "count"
    [found] = workers.map([["kill supervisor at first", str(counter), MAX_LOSSES + more]], seconds=5.0)
    assert (isinstance(found, Failure) and found.kind == "crash") if more else not isinstance(found, Failure)
    assert len(counter.read_text()) == MAX_LOSSES + more


@pytest.mark.slow
def test_an_interrupted_call_leaves_nothing_behind_for_the_next(workers: ProcessPool) -> None:
    def interrupt(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(TimeoutError):
            workers.map([["sleep", 1], ["echo", "old"]], seconds=30.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
    assert workers.map([["echo", "new"]] * 3, seconds=5.0) == ["new"] * 3


def test_no_process_is_left() -> None:
    with ProcessPool(ODD, count=2) as workers:
        found = workers.map([["who"]] * 4, seconds=5.0)
        numbers = {number for one in found for number in one[:2]}
        assert all(map(alive, numbers))
    assert gone(*numbers)
    workers.close()  # twice does no harm


OWNER = """
import os, sys
from lmgym.processes.pool import MAX_LOSSES, shared
found = shared("tests.property.odd_functions:odd", 1).map([["who"]], 5.0)[0]
print(*found[:2], flush=True)
sys.stdin.readline() if sys.argv[1] == "wait" else None
"""


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_workers_end_with_their_owner(end: str) -> None:
    """Also when it is killed, and also those that nobody closed."""
    command = [sys.executable, "-c", OWNER, "wait" if end == "kill" else "go"]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdin is not None
    numbers = [int(number) for number in owner.stdout.readline().split()]
    if end == "kill":
        assert all(map(alive, numbers))
        owner.kill()
    assert owner.wait() == (-signal.SIGKILL if end == "kill" else 0)
    assert gone(*numbers)
    owner.stdin.close()
    owner.stdout.close()


def test_a_process_ends_although_a_thread_of_it_waits_for_a_worker() -> None:
    script = """
import threading, time
from lmgym.processes.pool import ProcessPool
pool = ProcessPool("time:sleep", 1)
threading.Thread(target=lambda: pool.map([900], 1000.0, by_clock=True), daemon=True).start()
while not (pool._processes and pool._processes[0].began):
    time.sleep(0.02)
print(pool._processes[0].process.pid)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and gone(int(done.stdout)), done.stderr


def test_a_worker_that_is_still_starting_ends_with_its_killed_owner(tmp_path: Path) -> None:
    note = tmp_path / "note"
    script = f"""
from lmgym.processes.pool import MAX_LOSSES, ProcessPool
ProcessPool("tests.property.odd_functions:unready", 1, setup=({str(note)!r},)).map([1], 5.0)
"""
    owner = subprocess.Popen([sys.executable, "-c", script])
    for _ in range(600):
        if note.exists() and note.read_text():
            break
        time.sleep(0.1)
    assert alive(number := int(note.read_text()))
    owner.kill()
    owner.wait()
    assert gone(number)


@pytest.mark.slow
def test_limits_by_the_clock_hold_for_calls_that_use_no_processor_time(workers: ProcessPool) -> None:
    found = workers.map([["sleep", 60], ["echo", 1]], seconds=0.5, by_clock=True)
    assert found == [Failure("time", "did not return within 0.5 s"), 1]


def test_a_fork_of_the_owner_starts_workers_of_its_own() -> None:
    with ProcessPool(ODD, count=1) as workers:
        mine = workers.map([["who"]], seconds=5.0)[0]
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            own = workers.map([["who"]], seconds=5.0)[0]
            os.write(write, f"{own[1]}".encode())
            workers.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert int(os.read(read, 100)) != mine[1]
        assert workers.map([["who"]], seconds=5.0)[0] == mine  # the child let go of these and closed its own
        os.close(read)
        os.close(write)


def test_threads_may_share_workers() -> None:
    found: dict[int, list[Any]] = {}
    with ProcessPool(ODD, count=2) as workers:

        def ask(number: int) -> None:
            found[number] = workers.map([["echo", [number, place]] for place in range(20)], seconds=5.0)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {number: [[number, place] for place in range(20)] for number in range(4)}


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (
            "no_such_module:f",
            "worker processes for 'no_such_module:f' cannot start: ModuleNotFoundError: No module named",
        ),
        ("tests.property.odd_functions:missing", "cannot start: AttributeError: .*no attribute 'missing'"),
        ("tests.property.odd_functions:unprepared", "cannot start: RuntimeError: no model here"),
    ],
)
def test_a_function_that_cannot_start_is_named(function: str, sentence: str) -> None:
    with ProcessPool(function, count=1) as workers, pytest.raises(LmgymError, match=sentence):
        workers.map([1], seconds=1.0)


def test_limits_that_are_none_are_refused(workers: ProcessPool) -> None:
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(LmgymError, match=r"needs a limit above 0 seconds, not"):
            workers.map([["echo", 1]], seconds=seconds)
    with pytest.raises(LmgymError, match=r"there must be at least 1, not 0"):
        ProcessPool(ODD, count=0)


def test_any_number_of_workers_may_start_before_the_first_reply() -> None:
    with ProcessPool("math:factorial", count=5) as workers:
        assert workers.map([5] * 6, seconds=5.0) == [120] * 6


def test_workers_that_die_at_once_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmgym.processes.pool.BOOT", "raise SystemExit(1)")
    with ProcessPool(ODD, count=1) as workers, pytest.raises(LmgymError, match="die as soon as they start"):
        workers.map([1, 2, 3], seconds=1.0)


def test_shared_workers_are_the_same_and_start_again_after_they_are_closed() -> None:
    workers = shared("math:factorial", 1)
    assert workers is shared("math:factorial", 1) is not shared("math:factorial", 2)
    assert workers.map([5], seconds=5.0) == [math.factorial(5)]
    close_shared()
    assert workers.map([6], seconds=5.0) == [math.factorial(6)]
    workers.close()


@pytest.mark.slow
def test_hostile_answers_neither_hang_nor_crash_math_equal() -> None:
    """The first of the 10,000 that `python -m tests.property.hostile_answers` scores. How many are judged in time
    depends on the processor; that some never are, and that others beside them are judged right, does not."""
    pytest.importorskip("math_verify")
    from tests.property.hostile_answers import hostile, scores

    pairs = hostile(101, 301)
    found, workers = scores(pairs, seconds=0.2)
    assert set(found) <= {0.0, 1.0} and len(found) == 200
    assert workers.failures["time"] > 0
    # Nothing depends on what came before. The limit is wide: the plain ones take some hundredths of a second.
    endless = [(r"\boxed{9^{9^{9^{9}}}!}", "x+1"), (r"\boxed{\prod_{k=1}^{10^{12}} (x-k)}", "x+2")]
    plain = [(rf"\boxed{{{n}+x}}", f"x+{right}") for n in (1, 2, 3) for right in (1, 2, 3)]
    before = workers.failures.total()
    found, _ = scores([*plain[:4], *endless, *plain[4:]], seconds=3.0)
    assert found == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert workers.failures.total() == before + 2
    workers.close()
