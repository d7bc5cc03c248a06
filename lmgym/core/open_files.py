"""The open files of a process, of which many episodes that each hold some may need more than it starts with."""

import resource
from contextlib import suppress

from lmgym.core.errors import LmgymError

ELSE = 128  # open files of all else in a process


def make_room(env: str, episodes: int, each: int, remedy: str) -> None:
    """Let this process open the files of so many episodes at a time, `each` for one: where its own (soft) limit is too
    low, it is raised. Raises LmgymError if the system's (hard) limit is too low as well.

    Example: make_room("agent", episodes=256, each=5, remedy="lower engine.rows")"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = ELSE + episodes * each
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    with suppress(ValueError, OSError):
        return resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    most = max((hard if hard != resource.RLIM_INFINITY else soft) - ELSE, 0) // each
    raise LmgymError(
        f"env {env} can play {most} episodes at a time in a process, since each needs {each} open files; {remedy}, or "
        "raise the limit of open files (ulimit -Hn)"
    )
