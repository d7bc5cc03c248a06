"""Torture: the long form of what tests/ tries in short.

    python -m tests.torture            # every part
    python -m tests.torture hangs      # some parts

A part is a module of this folder with a function `main(arguments)` that returns 0 if all went well.
"""

import importlib
import sys
import time
from pathlib import Path


def main(wanted: list[str]) -> int:
    files = (path for path in Path(__file__).parent.glob("*.py") if "def main(arguments" in path.read_text())
    parts = sorted(path.stem for path in files)
    if unknown := [name for name in wanted if name not in parts]:
        print(f"there is no part {', '.join(unknown)}; valid: {', '.join(parts)}", file=sys.stderr)
        return 2
    failed = []
    for name in wanted or parts:
        began = time.monotonic()
        if importlib.import_module(f"tests.torture.{name}").main([]):
            failed.append(name)
        print(f"{name}: {'failed' if name in failed else 'passed'} after {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
