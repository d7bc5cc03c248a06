"""Virtual environments of contenders that are not installed beside lmgym."""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ASK = "from importlib.metadata import version; import sys; print(*[version(name) for name in sys.argv[1:]])"


def ensure(folder: Path, package: str, release: str) -> Path:
    """The Python of a virtual environment with this release in it; makes and fills the environment where needed.

    torch comes first, in a call of its own, so that your pip settings choose between a CPU and a CUDA wheel.
    Everything else is pinned by constraints.txt, as for lmgym itself.
    """
    python = folder / "bin" / "python"
    if installed(python, package) == release:
        return python
    print(f"installing {package} {release} into {folder}", file=sys.stderr)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pin for pin in pins if not pin.startswith(f"{package}==")))
        constraints.flush()
        install = [str(python), "-m", "pip", "install", "-q", "-c", constraints.name]
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [*install, torch],
            [*install, f"{package}=={release}"],
        ):
            subprocess.run(command, check=True)
    return python


def installed(python: Path, package: str) -> str | None:
    """The release of `package` that this Python has, or None."""
    if not python.exists():
        return None
    asked = subprocess.run([str(python), "-c", ASK, package], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None
