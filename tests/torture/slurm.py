"""The job script of docs/scale.md on a Slurm cluster of two hosts, which are network namespaces of this machine.

    python -m tests.torture.slurm            # needs Linux, root, the command ip, slurmctld, slurmd, munged

A munge daemon, a controller and a slurmd on each host are started for this, and ended. The script is taken from the
page; only its recipe, its folder and the number of ranks on a machine (one, without a GPU) are others. The job must end
like as many ranks without Slurm, bit for bit: once undisturbed, once requeued in the middle.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests import runs
from tests.runs import ROOT, assert_equal_runs
from tests.torture.hosts import NET, hosts, ip
from tests.torture.ranks import RECIPE, newest_step

PROGRAMS = ("ip", "slurmctld", "slurmd", "munged", "sbatch", "nsenter", "unshare")
HEAD = f"{NET}.254"  # the controller's address
LONGEST_WAIT = 180.0  # seconds for a job's next state
CONFIGURATION = """\
ClusterName=lmgym
SlurmctldHost=lmgym-head({head})
AuthType=auth/munge
AuthInfo=socket={place}/munge/socket
SlurmUser=root
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/%n
SlurmctldPidFile={place}/controller.pid
SlurmdPidFile={place}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=lmgym[1-2] NodeAddr={net}.[1-2] CPUs=1
PartitionName=all Nodes=ALL Default=YES
"""


@contextmanager
def cluster(place: Path) -> Iterator[None]:
    """A cluster of two hosts whose files lie in `place`; SLURM_CONF names its configuration meanwhile."""
    for folder in ("munge", "state", "lmgym1", "lmgym2"):
        (place / folder).mkdir()
    (place / "munge/key").write_bytes(os.urandom(1024))
    (place / "munge/key").chmod(0o400)
    addresses = {"lmgym-head": HEAD, "lmgym1": f"{NET}.1", "lmgym2": f"{NET}.2"}
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    (place / "addresses").write_text("\n".join(lines) + "\n")
    os.environ["SLURM_CONF"] = str(place / "slurm.conf")
    (place / "slurm.conf").write_text(CONFIGURATION.format(place=place, head=HEAD, net=NET))
    files = {name: place / "munge" / name for name in ("socket", "pid", "log", "seed")}
    munged = ["munged", "--foreground", "--force", f"--key-file={place}/munge/key", f"--socket={files['socket']}"]
    munged += [f"--pid-file={files['pid']}", f"--log-file={files['log']}", f"--seed-file={files['seed']}"]
    with hosts(2) as names:
        ip("addr", "add", f"{HEAD}/24", "dev", "lmgym-bridge")
        daemons = [daemon(munged, place / "munged.txt")]
        try:
            wait_until(files["socket"].exists, "munged's socket")
            daemons.append(daemon(named("lmgym-head", place, "slurmctld -D"), place / "controller.txt"))
            for name in names:
                inside = ["nsenter", f"--net=/run/netns/{name}", *named(name, place, "slurmd -D")]
                daemons.append(daemon(inside, place / f"{name}.txt"))
            wait_until(lambda: said("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", "two idle hosts")
            yield
        finally:
            subprocess.run(["scancel", "--full", "--user=root"], capture_output=True, timeout=30)
            for process in reversed(daemons):
                process.terminate()
                process.wait()


def named(name: str, place: Path, command: str) -> list[str]:
    """A command with a host name of its own, that finds the others by name."""
    script = f"hostname {name} && mount --bind {place}/addresses /etc/hosts && exec {command}"
    return ["unshare", "--uts", "--mount", "sh", "-c", script]


def daemon(command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()


def wait_until(done: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + LONGEST_WAIT
    while not done():
        if time.monotonic() > limit:
            raise SystemExit(f"slurm: no {what} after {LONGEST_WAIT:g} s")
        time.sleep(0.2)


def job_script(recipe: Path, folder: Path) -> str:
    """The script of the page, for this recipe and this folder, with one rank on each machine and no GPU."""
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    block = re.search(r"^    #!/bin/bash\n(?:^    .*\n)+", page, re.MULTILINE)
    assert block, "docs/scale.md has no script of a job"
    script = re.sub(r"^    ", "", block[0], flags=re.MULTILINE)
    changes = {
        " --gpus-per-node=4": "",
        "--nproc-per-node 4": "--nproc-per-node 1",
        "train gsm8k_grpo": f"train {recipe}",
        '"$HOME/runs/a"': str(folder),
    }
    for old, new in changes.items():
        assert old in script, (old, script)
        script = script.replace(old, new)
    return script


def trial(recipe: Path, whole: Path, folder: Path, requeued: bool) -> None:
    """Submit the script, requeue the job after its second checkpoint if asked for, and compare its end."""
    script = folder.with_suffix(".sh")
    script.write_text(job_script(recipe, folder))
    job = said("sbatch", "--parsable", f"--chdir={ROOT}", f"--output={folder}.txt", "--open-mode=append", str(script))
    assert job.isdigit(), f"sbatch did not take {script}"
    if requeued:
        wait_until(lambda: newest_step(folder) >= 2, f"second checkpoint in {folder}")
        assert newest_step(folder) < 38, "the job was over before it could be requeued"
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=30)
        wait_until(lambda: "Restarts=1" in said("scontrol", "show", "job", job), "restart of the job")
    wait_until(lambda: " JobState=COMPLETED " in f" {said('scontrol', 'show', 'job', job)} ", f"end of job {job}")
    assert_equal_runs(whole, folder)
    print(f"a job of two hosts, {'requeued once' if requeued else 'undisturbed'}: equal bit for bit")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.slurm", description=__doc__.split("\n")[0])
    parser.parse_args(arguments)
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid():
        print(f"slurm: not run; it needs root and {', '.join(PROGRAMS)} (missing: {', '.join(missing) or 'none'})")
        return 0
    place = Path(tempfile.mkdtemp(prefix="lmgym-slurm-"))
    place.chmod(0o755)  # munge refuses a socket that others cannot reach
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # torchrun
    os.environ["OMP_NUM_THREADS"] = "1"
    recipe = runs.write(place / "recipe.yaml", **RECIPE, steps=40)
    whole = place / "whole"
    command = [sys.executable, "-m", "lmgym", "train", str(recipe), f"out={whole}", "--ranks", "2"]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    with cluster(place):
        for requeued in (False, True):
            trial(recipe, whole, place / ("requeued" if requeued else "undisturbed"), requeued)
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
