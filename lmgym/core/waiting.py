"""How torch's threads wait for one another. No torch, and nothing else of lmgym."""

import os
import sys

TORCH_CAME_FIRST = (
    "torch was imported before lmgym, so its threads stay busy while they wait, which is slow beside other programs; "
    "import lmgym first, or set the environment variable GOMP_SPINCOUNT=3000"
)


def wait_asleep() -> bool:
    """Let a thread of torch's that waits for another one go to sleep after some microseconds, unless the user has set
    how (OMP_WAIT_POLICY, GOMP_SPINCOUNT). False if it is too late, since torch has read its settings already.

    The default of GNU OpenMP is to spin for milliseconds, again and again. If another program has the core that the
    other thread needs, one training step was seen to take 6 s instead of 0.1; alone, nothing changes (docs/log.md)."""
    if os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        return True
    if "torch" in sys.modules:
        return sys.platform != "linux"  # elsewhere torch has other threads
    os.environ["GOMP_SPINCOUNT"] = "3000"
    return True


IN_TIME = wait_asleep()
"""What the first import of lmgym found."""
