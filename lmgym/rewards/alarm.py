"""A limit on how long a call may take: an alarm signal, on systems that have one."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeUp(BaseException):
    """Raised inside a reward by the alarm; not an Exception, so that `except Exception` in a reward lets it pass."""

    file = __file__  # for tracebacks, which are to begin with the reward's own lines


@contextmanager
def alarm(timeout: float | None) -> Iterator[None]:
    """Raise TimeUp in the body after `timeout` seconds; leaves handler and timer as they were."""
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if timeout is None or math.isinf(timeout) or not usable:
        yield
        return
    running = True

    def ring(number: int, frame: FrameType | None) -> None:
        if running:
            raise TimeUp

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    # It rings again every second, for a body that swallows the first one (a bare `except:`, a destructor).
    left, interval = signal.setitimer(signal.ITIMER_REAL, timeout, 1.0)
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # somebody else's timer was running; it goes on with what is left of it
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)
