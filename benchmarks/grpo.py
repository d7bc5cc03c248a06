"""A whole GRPO step: lmgym against TRL 1.16, and against TRL 1.12, which scored completions only.

python -m benchmarks.grpo                                          W1, W2 and W3, a table each
python -m benchmarks.grpo --workloads w1 --only lmgym-fp32 trl-1.16-fp32
python -m benchmarks.grpo --workloads w6 w7 w8 w9 --only lmgym-bf16 lmgym-bf16-lora trl-1.16-autocast --rounds 2
python -m benchmarks.grpo --workloads w1 --tune --rounds 1         TRL's settings, each alone

One optimizer step on 8 groups of 8 answers; no reference model, no scoring pass: neither library needs one here. TRL
samples with Hugging Face's `generate`.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import environments, reports, workloads
from benchmarks.interleave import Contender, measure

RELEASES = {"trl-1.16": "1.16.0", "trl-1.12": "1.12.0"}
# Four batches of 16 in the tables; `--tune` tries the others.
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32", "batch": 16},
    "autocast": {"precision": "autocast", "batch": 16},
    "fp32-batch8": {"precision": "fp32", "batch": 8},
    "fp32-batch64": {"precision": "fp32", "batch": 64},
    "autocast-batch64": {"precision": "autocast", "batch": 64},
}
LMGYM_SETTINGS: dict[str, dict[str, Any]] = {
    "lmgym-bf16": {"compute": "bfloat16"},
    "lmgym-bf16-2048": {"compute": "bfloat16", "tokens_per_forward": 2048},  # less memory
    "lmgym-bf16-1024": {"compute": "bfloat16", "tokens_per_forward": 1024},
    "lmgym-bf16-recompute": {"compute": "bfloat16", "tokens_per_forward": 1024, "activation_checkpointing": True},
    "lmgym-bf16-torch": {"compute": "bfloat16", "update_kernels": "torch"},
    "lmgym-bf16-lora": {"compute": "bfloat16", "lora_rank": 32},
    "lmgym-bf16-lora-4096": {"compute": "bfloat16", "lora_rank": 32, "tokens_per_forward": 4096},
    "lmgym-bf16-lora-1024": {"compute": "bfloat16", "lora_rank": 32, "tokens_per_forward": 1024},
    "lmgym-fp32": {"compute": "float32"},
    "lmgym-fp32-onednn": {"compute": "float32", "products": "onednn"},
    "lmgym-fp32-16384": {"compute": "float32", "tokens_per_forward": 16_384},  # all at once
}
TRL = {f"{release}-{setting}": (release, setting) for release in RELEASES for setting in TRL_SETTINGS}
IN_TABLES = ["lmgym-bf16", "lmgym-fp32", *(name for name, (_, setting) in TRL.items() if "batch" not in setting)]


def main() -> None:
    arguments = parsed()
    for name in arguments.workloads:
        workload = reports.sized(workloads.BY_NAME[name](arguments.seed), arguments)
        chosen = [contender(each, arguments.venvs) for each in arguments.only]
        with tempfile.TemporaryDirectory() as folder:
            workloads.write(workload, Path(folder))
            for group in [[each] for each in chosen] if arguments.tune else [chosen]:
                results = measure(
                    group, Path(folder), arguments.rounds, arguments.warmup, arguments.threads, arguments.busy
                )
                reports.report(f"GRPO step, {workload.name}", results, arguments)


def parsed() -> argparse.Namespace:
    parser = reports.options(__doc__, [*LMGYM_SETTINGS, *TRL])
    parser.add_argument("--busy", type=int, default=0, help="other processes that keep a core busy meanwhile")
    known = list(workloads.BY_NAME)
    parser.add_argument("--workloads", nargs="+", choices=known, default=workloads.SMALL)
    parser.add_argument("--tune", action="store_true", help="each alone, by default TRL's settings")
    arguments = parser.parse_args()
    arguments.only = arguments.only or (list(TRL) if arguments.tune else IN_TABLES)
    return arguments


def contender(name: str, venvs: Path) -> Contender:
    if name in LMGYM_SETTINGS:
        return Contender(name, "lmgym_step", settings=LMGYM_SETTINGS[name])
    release, setting = TRL[name]
    return Contender(name, "trl_grpo", environments.trl(venvs, RELEASES[release]), TRL_SETTINGS[setting])


if __name__ == "__main__":
    main()
