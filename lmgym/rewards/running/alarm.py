"""A time limit for one call, by an alarm signal (SIGALRM), on systems that have it."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeUp(BaseException):
    """Raised inside a reward by the alarm. It is no Exception, so `except Exception` in a reward does not catch it."""

    file = __file__  # lets base._place skip this file's lines in a traceback


@contextmanager
def alarm(timeout: float | None) -> Iterator[None]:
    """Raise TimeUp in the body after `timeout` seconds, or after it, if it takes longer and catches that. The earlier
    signal handler and timer are restored."""
    # Python allows signal handlers in the main thread only.
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if timeout is None or math.isinf(timeout) or not usable:
        yield
        return
    running, rang = True, False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rang
        if running:
            rang = True
            raise TimeUp

    began = time.monotonic()
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    handler = signal.signal(signal.SIGALRM, ring)
    # A short limit is over before the body begins, or while it is taken back: the outer `finally` holds then.
    try:
        try:
            # It rings again every second, for a body that swallows the first one (a bare `except:`, a destructor).
            signal.setitimer(signal.ITIMER_REAL, timeout, 1.0)
            yield
        finally:
            running = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # another timer was running before: set it again to the time that it has left
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)
    if rang:  # the body has swallowed it, and returned too late
        raise TimeUp
