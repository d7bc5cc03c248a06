"""Starts one command as several ranks on this machine, by torchrun, and again after a rank has died."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import current_thread, main_thread
from typing import Any
from uuid import uuid4

# Exit statuses of `lmgym train`.
DONE, USER_ERROR, STOPPED = 0, 1, 130  # to start again would not help
CRASHED = 70  # an exception that nobody foresaw; BSD's EX_SOFTWARE
RANK_LOST = 75  # another rank has gone; BSD's EX_TEMPFAIL


def launch(command: Sequence[str], ranks: int, restarts: int, say: Callable[[str], None]) -> int:
    """Run `python -m lmgym COMMAND` as so many ranks of one group, and return its exit status.

    torchrun starts and watches them. When a rank dies, it ends the others, and a new group is started, up to `restarts`
    times: a run then goes on from its newest whole checkpoint. A rank that ends with `USER_ERROR` ends it for good;
    one that crashed (a signal, an exception of a driver or a library) does not."""
    import torch

    # Each rank gets its share of the threads, unless the user has said otherwise.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // ranks)))
    for left in range(restarts, -1, -1):
        began = time.monotonic()
        status, why = _one_group(command, ranks)
        if status in (DONE, USER_ERROR, STOPPED) or not left:
            if why:
                say(why)
            return status
        seconds = time.monotonic() - began
        say(f"{why} after {seconds:.0f} s; starting again from the newest checkpoint ({left} restarts left)")
    raise AssertionError("the last round returns")


def _one_group(command: Sequence[str], ranks: int) -> tuple[int, str]:
    """The exit status of a group, and what happened to it if it did not end by itself. The first rank writes to the
    terminal; what another one said last is shown if it was the one that failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `launch` says it in one sentence
    with TemporaryDirectory(prefix="lmgym-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=str(uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # else the ranks meet at the machine's own name, which need not resolve
            max_restarts=0,  # torchrun's own restart often does not come back, a new group does
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects={rank: Std.ERR for rank in range(1, ranks)}),
            signals_to_handle="SIGTERM,SIGINT,SIGQUIT",  # SIGHUP is ours
        )

        def hang_up(number: int, frame: Any) -> None:
            # The kernel and the shell may both send it, and a second signal would end the ranks at once.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            raise SignalException("the terminal is gone", sigval=signal.SIGHUP)

        try:
            # Not under nohup, which ignores it, for the ranks too; nor in another thread, where torchrun takes none.
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN and current_thread() is main_thread():
                signal.signal(signal.SIGHUP, hang_up)
            elastic_launch(config, sys.executable)("-m", "lmgym", *command)
        except SignalException:
            return STOPPED, ""
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
            for status in (USER_ERROR, STOPPED):
                failed = [rank for rank, code in codes.items() if code == status]
                if failed:
                    return status, "" if failed[0] == 0 else _last_words(folder, failed[:1])
            others = _last_words(folder, [rank for rank, code in codes.items() if code == CRASHED and rank])
            return RANK_LOST, "; ".join(filter(None, [deaths(codes), others]))
    return DONE, ""


def _last_words(folder: str, ranks: Iterable[int]) -> str:
    """The last line that each of these ranks has written to its standard error."""
    said = []
    for rank in ranks:
        for path in Path(folder).rglob(f"{rank}/stderr.log"):
            lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said += [f"rank {rank}: {lines[-1]}"] if lines else []
    return "; ".join(said)


def deaths(codes: dict[int, int]) -> str:
    """Which ranks died, and how; not those that only noticed that another one had gone."""
    effects = (RANK_LOST, -signal.SIGTERM)  # torchrun ends with SIGTERM those that are left
    died = {rank: code for rank, code in codes.items() if code not in effects} or codes
    return ", ".join(
        f"rank {rank} was ended by signal {-code}" if code < 0 else f"rank {rank} ended with status {code}"
        for rank, code in died.items()
    )
