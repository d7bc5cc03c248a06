"""A whole GRPO step with a picture in each prompt: lmgym against TRL 1.16's trainer of models that see.

python -m benchmarks.vision                                        V1 and V2, a table each
python -m benchmarks.vision --workloads v2 --only lmgym-fp32 trl-1.16-fp32
python -m benchmarks.vision --workloads v1 --tune --rounds 1       TRL's batches, each alone

The same random Idefics3, pictures, words, lengths and reward on both sides (pictured.py). With "tower" in the name the
vision tower and what maps its output into the language model learn too, as TRL lets them; without it both libraries
keep them frozen, as lmgym does unless it is told otherwise. TRL samples with Hugging Face's `generate`.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import environments, pictured, reports
from benchmarks.interleave import Contender, measure

RELEASE = "1.16.0"
TOWER = {"train_vision": True}
LMGYM: dict[str, dict[str, Any]] = {
    "lmgym-fp32": {"compute": "float32"},
    "lmgym-fp32-tower": {"compute": "float32", **TOWER},
    "lmgym-bf16": {"compute": "bfloat16"},
    "lmgym-bf16-tower": {"compute": "bfloat16", **TOWER},
}
FROZEN = {"train_vision": False}
TRL: dict[str, dict[str, Any]] = {  # four batches of 16, as in benchmarks/grpo.py
    "trl-1.16-fp32": {"precision": "fp32", **FROZEN},
    "trl-1.16-fp32-tower": {"precision": "fp32"},
    "trl-1.16-autocast": {"precision": "autocast", **FROZEN},
    "trl-1.16-autocast-tower": {"precision": "autocast"},
}
TUNED: dict[str, dict[str, Any]] = {
    f"trl-1.16-fp32-batch{batch}": {"precision": "fp32", "batch": batch, **FROZEN} for batch in (8, 32, 64)
}
IN_TABLES = ["lmgym-fp32", "lmgym-fp32-tower", "trl-1.16-fp32", "trl-1.16-fp32-tower"]


def main() -> None:
    arguments = parsed()
    for name in arguments.workloads:
        workload = reports.sized(pictured.BY_NAME[name](arguments.seed), arguments)
        chosen = [contender(each, arguments.venvs) for each in arguments.only]
        with tempfile.TemporaryDirectory() as folder:
            pictured.write(workload, Path(folder))
            for group in [[each] for each in chosen] if arguments.tune else [chosen]:
                results = measure(group, Path(folder), arguments.rounds, arguments.warmup, arguments.threads)
                reports.report(f"GRPO step with pictures, {workload.name}", results, arguments)


def parsed() -> argparse.Namespace:
    parser = reports.options(__doc__, [*LMGYM, *TRL, *TUNED])
    known = list(pictured.BY_NAME)
    parser.add_argument("--workloads", nargs="+", choices=known, default=known)
    parser.add_argument("--tune", action="store_true", help="each alone, by default TRL's batches")
    arguments = parser.parse_args()
    arguments.only = arguments.only or (["trl-1.16-fp32", *TUNED] if arguments.tune else IN_TABLES)
    return arguments


def contender(name: str, venvs: Path) -> Contender:
    if name in LMGYM:
        return Contender(name, "lmgym_step", settings=LMGYM[name])
    return Contender(name, "trl_grpo", environments.trl(venvs, RELEASE), {**TRL, **TUNED}[name])


if __name__ == "__main__":
    main()
