"""`lmgym new` with hostile answers: each gets a sentence or is taken, nothing crashes, and no half file stays.

python -m tests.torture new        # 2,000 dialogues
"""

import contextlib
import io
import os
import random
import sys
import tempfile
from pathlib import Path

from lmgym.cli.main import main as lmgym

ROWS = '{"question": "2 + 2?", "answer": "4", "n": {"a": [1, null]}}\n{"question": "1 + 1?", "answer": "2"}\n'
GOOD = ["builtin:tiny", "rows.jsonl", "question,answer", "final_answer", "5"]
ODD = ["", " ", ",", "a,b,c", "question", "question,answer", "question,", "n.a.0", "n.a.0,n", ":", "x:y", "a=b",
       "\x00", "\x1b[2J", "é" * 500, "../../etc/passwd", "/dev/zero", ".", "~", "rows.jsonl", "rows.jsonl/",
       "builtin:tiny", "builtin:", "a/b", "-1", "0", "nan", "inf", "1e999", "1_0", "5", "final_answer", "regex", "{}",
       "[", "!!python/x", "rows.jsonl:1", "*", "{split}", "'", '"', "#", "null", "true", "\udcff"]  # fmt: skip


def dialogue(number: int, folder: Path) -> str:
    """One dialogue of random answers; what went wrong, or an empty text. The file is there afterwards, and whole, only
    if `lmgym new` says that it wrote it."""
    random_ = random.Random(number)
    odd = [[random_.choice(ODD) for _ in range(random_.randrange(4))] for _ in GOOD]
    words = [word for some, good in zip(odd, GOOD, strict=True) for word in (*some, good)]
    answers = "\n".join(words[: random_.randrange(len(words) * 2) + 1])  # half of them end too early
    path = folder / "new.yaml"
    path.unlink(missing_ok=True)
    said, before, status = io.StringIO(), sys.stdin, -1
    sys.stdin = io.StringIO(answers)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = lmgym(["new", str(path)])
    except BaseException as error:
        return f"dialogue {number}: {type(error).__name__}: {error}\n{answers!r}\n{said.getvalue()[-2000:]}"
    finally:
        sys.stdin = before
    wrote = path.exists() and path.read_text(encoding="utf-8").rstrip().splitlines()[-1].startswith("steps: ")
    others = [name for name in os.listdir(folder) if name not in ("new.yaml", "rows.jsonl")]
    if (status == 0) != wrote or status not in (0, 1) or others:
        return (
            f"dialogue {number}: status {status}, wrote {wrote}, left {others}\n{answers!r}\n{said.getvalue()[-2000:]}"
        )
    return ""


def main(arguments: list[str]) -> int:
    """2,000 dialogues, or as many as the first argument says."""
    count = int(arguments[0]) if arguments else 2000
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        Path("rows.jsonl").write_text(ROWS)
        found = [problem for number in range(count) if (problem := dialogue(number, Path(name)))]
    print("\n".join(found[:5]) or f"{count} dialogues: each ended with a sentence or a whole recipe")
    return 1 if found else 0
