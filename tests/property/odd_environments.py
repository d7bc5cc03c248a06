"""What test_env_processes.py has environments do. This module imports little, so that their processes start fast."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lmgym.core.registry import register
from lmgym.envs.base import Step
from lmgym.types import Example


def fail(how: str) -> None:
    """Hang, crash or end this process."""
    if how == "hang":
        time.sleep(1000)
    if how in ("hang together", "hang detached"):  # with what it has started
        time.sleep(1000)
    if how == "hang elsewhere":  # it has left its group of processes
        os.setpgid(0, os.getpgid(os.getppid()))
        time.sleep(1000)
    if how == "loop":
        while True:
            pass
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exit":
        os._exit(0)
    if how == "sys.exit":
        raise SystemExit(3)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "supervisor stopped":
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(1000)
    if how == "fork" and os.fork() == 0:  # a second process goes on, and answers later
        time.sleep(0.2)
    if how == "supervisor killed":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)


@register("env", "odd")
class Odd:
    """Fails as the example's prompt says, in the call that its id says. It notes the numbers of its processes."""

    def reset(self, example: Example, seed: int) -> str:
        self.example = example
        own = [os.getpid(), os.getppid()]
        if example.prompt == "hang together":
            own.append(subprocess.Popen(["sleep", "1000"]).pid)
        if example.prompt == "hang detached":  # a session of its own, and a parent that is gone
            script = "import subprocess; print(subprocess.Popen(['sleep', '1000'], stdout=2).pid)"
            command = [sys.executable, "-c", script]
            own.append(int(subprocess.check_output(command, start_new_session=True, text=True)))
        if note := example.meta.get("note"):
            Path(note).write_text(" ".join(map(str, own)))
        if example.id == "reset":
            fail(str(example.prompt))
        return "go"

    def step(self, text: str, stop: str) -> Step:
        if self.example.id == "step":
            fail(str(self.example.prompt))
        return Step(terminated=True, reward=1.0)
