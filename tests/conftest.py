"""Settings that every test shares: no network, one thread, repeatable property tests."""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before anything imports torch or transformers; the processes that tests start inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it; what is printed here goes to no terminal
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # sums in one order: what must be equal bit for bit can be
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["GOMP_SPINCOUNT"] = "3000"  # as `import lmgym` sets it, unless torch was imported before it
os.environ["MPLBACKEND"] = "Agg"
os.environ |= {"RAY_worker_niceness": "0"}  # 15 by default: beside another pytest worker a process of Ray hardly moves
# Temporary folders lie in memory if there is room: even a tiny run flushes 60 files, at 6 ms each on a disk.
if "TMPDIR" not in os.environ and os.access("/dev/shm", os.W_OK):
    room = os.statvfs("/dev/shm")
    if room.f_bavail * room.f_frsize >= 4 * 2**30 and not room.f_flag & os.ST_NOEXEC:  # a container's has 64 MiB
        os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())  # it leaves its logs there
        os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"
if "torch" in sys.modules:  # a pytest plug-in was faster
    sys.modules["torch"].set_num_threads(1)

import jaxtyping
import pytest
from beartype import BeartypeConf, beartype
from hypothesis import HealthCheck, settings

settings.register_profile(
    "lmgym",
    deadline=None,  # a busy machine is no failure
    max_examples=25,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("lmgym")

# Tests check the shapes and types that lmgym.functional declares; a whole number may stand for a float.
typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
jaxtyping.install_import_hook("lmgym.functional", "tests.conftest.typechecked")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes may take 15 minutes: each process imports for seconds, and on a busy machine for many
    times as long."""
    for item in items:
        if item.get_closest_marker("processes") or {"shell", "group"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.timeout(900))


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: without them in its sight, the garbage collector costs a tenth less."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and models that may lie beside the repository; skips where it is absent."""
    folder = Path(__file__).parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the folder ../shared")
    return folder


@pytest.fixture(autouse=True)
def no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plot at the end of a run takes twice as long as a tiny run; tests marked `picture` draw it."""
    if "torch" in sys.modules and not request.node.get_closest_marker("picture"):
        monkeypatch.setattr("lmgym.training.evaluation_points.training_plot", lambda metrics, plot: plot)


# One of each for all files of a pytest worker: they import for seconds, or train.


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process that has imported everything, from which command lines are forked."""
    from tests.runs import NO_PICTURE, Shell

    shell = Shell(tmp_path_factory.mktemp("shell"), NO_PICTURE)
    yield shell
    shell.close()


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The same for ranks."""
    from tests.ranks import Group
    from tests.runs import NO_PICTURE

    group = Group(tmp_path_factory.mktemp("ranks"), NO_PICTURE)
    yield group
    group.close()


@pytest.fixture(scope="session")
def alone(group: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process writes, for every algorithm; later ranks find the batches of all."""
    from tests.ranks import begun, written

    begun(group, tmp_path_factory.mktemp("begun"))
    return written(group, tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray; each run would start its own."""
    import ray

    from tests.warm_ray import warm

    size = {"num_cpus": 3, "object_store_memory": 300 * 2**20}
    with warm(tmp_path_factory.mktemp("ray")):
        ray.init(address="local", include_dashboard=False, log_to_driver=False, **size)
        yield
        ray.shutdown()
