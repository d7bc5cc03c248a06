"""Several ranks at once: processes forked from one that has imported everything, joined as torchrun would join them."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.runs import ROOT

DRIVER = """
import contextlib, importlib, json, os, sys
import lmgym.training.dry_run, lmgym.training.loop, lmgym.distributed.process_group
import matplotlib.backends.backend_agg, matplotlib.style, tests.rank_targets
for line in sys.stdin:
    target, arguments, size, port, output = json.loads(line)
    module, _, name = target.partition(":")
    if size == 0:
        with contextlib.redirect_stdout(sys.stderr):  # the other one carries the answers below
            getattr(importlib.import_module(module), name)(*arguments)
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.dup2(os.open(f"{output}.{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
            os.dup2(1, 2)
            status = getattr(importlib.import_module(module), name)(*arguments)
            sys.stdout.flush()
            os._exit(int(status or 0))
        children.append(child)
    print(json.dumps(children), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
os._exit(0)
"""


class Group:
    """Runs a function, by default the command line, in several ranks; in 0 ranks: in the process that they are forked
    from, so that all later ones find what it leaves.

    Example:
        >>> group.start(2, ["train", str(recipe)]); os.kill(group.processes[1], signal.SIGKILL); group.wait()
        [75, -9]
    """

    def __init__(self, folder: Path, prelude: str = "") -> None:
        """`prelude` is Python that runs first, for example further imports."""
        self.output = folder / "output.txt"
        self.processes: list[int] = []
        pipe, command = subprocess.PIPE, [sys.executable, "-c", f"{prelude}\n{DRIVER}"]
        self.driver = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def start(self, size: int, *arguments: object, target: str = "lmgym.cli.main:main") -> None:
        assert self.driver.stdin is not None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        print(json.dumps([target, arguments, size, port, str(self.output)]), file=self.driver.stdin, flush=True)
        self.processes = self._read()

    def wait(self) -> list[int]:
        """The exit status of each rank, or minus the signal that ended it."""
        return self._read()

    def run(self, size: int, *arguments: object, target: str = "lmgym.cli.main:main") -> list[int]:
        self.start(size, *arguments, target=target)
        return self.wait()

    def said(self, rank: int = 0) -> str:
        return Path(f"{self.output}.{rank}").read_text()

    def close(self) -> None:
        assert self.driver.stdin is not None
        self.driver.stdin.close()
        self.driver.wait()

    def _read(self) -> list[int]:
        assert self.driver.stdout is not None
        numbers: list[int] = json.loads(self.driver.stdout.readline())
        return numbers


NEAR = 40 * 2**-23  # relative: fp32 sums in another order, with terms up to so many times as large as the sum

LOGPROB = 8  # log(259), and a logit: a log-probability is the difference of numbers up to this, and metrics are of them


def written(group: Group, folder: Path, size: int, *how: object) -> Path:
    """The folder to which so many ranks have written what `rank_targets.gradients` finds."""
    statuses = group.run(size, str(folder), *how, target="tests.rank_targets:gradients")
    assert statuses == [0] * size, group.said()
    return folder


def begun(group: Group, folder: Path, *how: object) -> None:
    """Let `rank_targets.begin` make the batches that `gradients` needs."""
    assert group.run(0, str(folder), *how, target="tests.rank_targets:begin") == []


def assert_equal_updates(name: str, alone: Path, together: Path, size: int) -> None:
    """Of this setting, the gradient and the metrics that several ranks have found are those of one process; all ranks
    hold the same."""
    expected = load_file(alone / f"{name}-0.safetensors")
    first, *others = (load_file(together / f"{name}-{rank}.safetensors") for rank in range(size))
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in first)
    keys = [key for key in expected if key.startswith("gradient")] or list(expected)
    ours, theirs = (torch.cat([found[key].flatten() for key in keys]).double() for found in (first, expected))
    assert float(theirs.norm()) > 0
    assert float((ours - theirs).norm() / theirs.norm()) < NEAR
    metrics = [json.loads((folder / f"{name}-0.json").read_text()) for folder in (alone, together)]
    assert metrics[1] == pytest.approx(metrics[0], rel=NEAR, abs=NEAR * LOGPROB)
