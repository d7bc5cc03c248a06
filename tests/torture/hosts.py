"""Ranks on two or three hosts, which are network namespaces of this machine; the link between them fails.

    python -m tests.torture.hosts            # needs Linux, root and the command ip

Each host runs torchrun with one rank. The link is left alone, goes down for 5 seconds, or stays down: the run must end
like the run of as many ranks without hosts, or every rank must end within the limit (`distributed.seconds` and some
more), with one sentence about who is missing.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests import runs
from tests.runs import ROOT, assert_equal_runs
from tests.torture.ranks import RECIPE, newest_step, ranks_of

SECONDS = 20  # the limit of a wait for another rank
GRACE = 10  # seconds on top of it
NET = "10.77.0"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Namespaces behind a bridge, each with the address 10.77.0.NUMBER; removed at the end."""
    names = [f"lmgym{number}" for number in range(1, count + 1)]
    try:
        ip("link", "add", "lmgym-bridge", "type", "bridge")
        ip("link", "set", "lmgym-bridge", "up")
        for number, name in enumerate(names, 1):
            ip("netns", "add", name)
            ip("link", "add", f"{name}-out", "type", "veth", "peer", "name", "lmgym0", "netns", name)
            ip("link", "set", f"{name}-out", "master", "lmgym-bridge", "up")
            ip("-n", name, "addr", "add", f"{NET}.{number}/24", "dev", "lmgym0")
            ip("-n", name, "link", "set", "lmgym0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            subprocess.run(["ip", "link", "del", f"{name}-out"], capture_output=True)
        subprocess.run(["ip", "link", "del", "lmgym-bridge"], capture_output=True)


def start(names: Sequence[str], recipe: Path, folder: Path) -> list[subprocess.Popen[bytes]]:
    """torchrun on each host, with one rank."""
    started = []
    for number, name in enumerate(names, 1):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(names)), "--nproc-per-node", "1"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{NET}.1:29400", "--rdzv-id", folder.name]
        torchrun += ["--rdzv-conf", f"is_host={int(number == 1)}"]  # its name does not tell: all are this machine
        torchrun += ["--local-addr", f"{NET}.{number}", "-m", "lmgym", "train", str(recipe), f"out={folder}"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lmgym0", "OMP_NUM_THREADS": "1"}
        with (folder.parent / f"{folder.name}-{name}.txt").open("wb") as output:
            command = ["ip", "netns", "exec", name, *torchrun]
            started.append(subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=environment))
    return started


def wait_for(folder: Path, step: int, started: Sequence[subprocess.Popen[bytes]]) -> None:
    while newest_step(folder) < step:
        if any(process.poll() is not None for process in started):
            raise SystemExit(f"a host ended before step {step}; see {folder.parent}")
        time.sleep(0.1)


def sentences(folder: Path, names: Sequence[str]) -> list[str]:
    """What each rank said in the end."""
    texts = [(folder.parent / f"{folder.name}-{name}.txt").read_text() for name in names]
    return [next((line for line in text.splitlines() if line.startswith("lmgym: ")), "nothing") for text in texts]


def trial(count: int, down: float, place: Path) -> bool:
    """Train on so many hosts and take the last one's link down for some seconds (infinity: for good)."""
    recipe, whole = place / f"{count}.yaml", place / f"whole-{count}"
    folder = place / f"{count}-hosts-down-{down:g}"
    with hosts(count) as names:
        started = start(names, recipe, folder)
        wait_for(folder, 2, started)
        began = time.monotonic()
        if down:
            ip("link", "set", f"{names[-1]}-out", "down")
        if 0 < down < float("inf"):
            time.sleep(down)
            ip("link", "set", f"{names[-1]}-out", "up")
        if down == float("inf"):
            limit = time.monotonic() + SECONDS + GRACE
            while ranks_of(folder) and time.monotonic() < limit:
                time.sleep(0.1)
            took, left, said = time.monotonic() - began, ranks_of(folder), sentences(folder, names)
            for process in started:  # torchrun itself waits longer for a host that is cut off
                process.kill()
            print(f"{count} hosts, link down for good: {len(left)} ranks left after {took:.0f} s; {said}")
            return not left and all("no answer within" in one for one in said)
        statuses = [process.wait(timeout=300) for process in started]
        took = time.monotonic() - began
    assert not any(statuses), (statuses, folder.parent)
    assert_equal_runs(whole, folder)
    print(f"{count} hosts, link down {down:g} s: finished after {took:.0f} s, equal bit for bit")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.hosts", description=__doc__.split("\n")[0])
    parser.parse_args(arguments)
    if os.geteuid() or shutil.which("ip") is None:
        print("hosts: not run; network namespaces need root and the command ip (iproute2)")
        return 0
    place = Path(tempfile.mkdtemp(prefix="lmgym-hosts-"))
    good = True
    for count in (2, 3):
        recipe = runs.write(place / f"{count}.yaml", **RECIPE, steps=40, distributed={"seconds": SECONDS})
        command = [sys.executable, "-m", "lmgym", "train", str(recipe), f"out={place}/whole-{count}"]
        subprocess.run([*command, "--ranks", str(count)], check=True, capture_output=True, cwd=ROOT)
        for down in (0.0, 5.0, float("inf")):
            good = trial(count, down, place) and good
    if good:
        shutil.rmtree(place)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
