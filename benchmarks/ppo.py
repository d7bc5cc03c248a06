"""PPO on W1: lmgym against TRL 1.12, the last release with a PPOTrainer.

python -m benchmarks.ppo                      both tables: 4 epochs (TRL's default) and 1
python -m benchmarks.ppo --epochs 1 --rounds 2 --only trl-fp32 lmgym-head
python -m benchmarks.ppo --tune --rounds 1    TRL alone, one setting after another
python -m benchmarks.ppo --count              forwarded tokens per update, on paper
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import environments, reports, workloads
from benchmarks.interleave import Contender, measure

TRL_RELEASE = "1.12.0"
# What `--tune` tries. The first three, one for each precision, run in the tables, with four batches of 16: less than
# half the memory of one of 64 in fp32 and in autocast.
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "trl-fp32": {"precision": "fp32", "batch": 16},
    "trl-autocast": {"precision": "autocast", "batch": 16},
    "trl-bf16": {"precision": "bf16", "batch": 16},
    "trl-fp32-batch8": {"precision": "fp32", "batch": 8},
    "trl-fp32-batch64": {"precision": "fp32", "batch": 64},
    "trl-fp32-rollout16": {"precision": "fp32", "batch": 16, "rollout_batch": 16},
    "trl-bf16-batch64": {"precision": "bf16", "batch": 64},
    "trl-autocast-batch64": {"precision": "autocast", "batch": 64},
}
LMGYM_SETTINGS: dict[str, dict[str, Any]] = {
    "lmgym-head": {"critic": "head"},
    "lmgym-separate": {"critic": "separate"},
    "lmgym-head-fp32": {"critic": "head", "compute": "float32"},
    "lmgym-separate-fp32": {"critic": "separate", "compute": "float32"},
}
IN_TABLES = ("trl-fp32", "trl-autocast", "trl-bf16", *LMGYM_SETTINGS)


def main() -> None:
    arguments = parsed()
    workload = reports.sized(workloads.w1(arguments.seed), arguments)
    if arguments.count:
        print(counted(workload))
        return
    trl = environments.trl(arguments.venvs, TRL_RELEASE)
    with tempfile.TemporaryDirectory() as folder:
        workloads.write(workload, Path(folder))
        for epochs in arguments.epochs:
            chosen = [contender(name, trl, epochs) for name in arguments.only]
            together = [[each] for each in chosen] if arguments.tune else [chosen]
            results = [
                result
                for group in together
                for result in measure(group, Path(folder), arguments.rounds, arguments.warmup, arguments.threads)
            ]
            reports.report(f"PPO, {workload.name}, {epochs} epochs", results, arguments)


def parsed() -> argparse.Namespace:
    parser = reports.options(__doc__, [*TRL_SETTINGS, *LMGYM_SETTINGS])
    parser.add_argument("--epochs", type=int, nargs="+", default=[4, 1], help="PPO epochs; one table for each")
    parser.add_argument("--tune", action="store_true", help="each alone, by default TRL's settings")
    parser.add_argument("--count", action="store_true", help="count forwarded tokens and measure nothing")
    arguments = parser.parse_args()
    arguments.only = arguments.only or list(TRL_SETTINGS if arguments.tune else IN_TABLES)
    return arguments


def contender(name: str, trl: Path, epochs: int) -> Contender:
    if name in TRL_SETTINGS:
        return Contender(name, "trl_ppo", trl, {**TRL_SETTINGS[name], "epochs": epochs})
    return Contender(name, "lmgym_step", settings={**LMGYM_SETTINGS[name], "algorithm": "ppo", "epochs": epochs})


def forwarded_tokens(workload: workloads.Workload) -> dict[str, int]:
    """Tokens that go forward through a transformer (and back again) in one epoch of updates, from the shapes alone.

    rl4lms: each sampled token is a sample of its own: the whole sequence, padded to the longest prompt plus the longest
    answer, through the policy and through a value model. The padding counted here is the tightest that it allows.
    trl: each answer once, behind its left-padded prompt, through the policy and through a value model.
    lmgym: each distinct prompt once, and each answer but for its last token, which predicts nothing; twice with a
    separate critic.
    """
    answers = len(workload.prompts) * workload.completions
    width = max(map(len, workload.prompts)) + workload.new_tokens
    packed = sum(map(len, workload.prompts)) + answers * (workload.new_tokens - 1)
    return {
        "rl4lms": answers * workload.new_tokens * width * 2,
        "trl": answers * width * 2,
        "lmgym-separate": packed * 2,
        "lmgym-head": packed,
    }


def counted(workload: workloads.Workload) -> str:
    tokens = forwarded_tokens(workload)
    lines = [
        "| per epoch of updates | forwarded tokens | times lmgym-head | times lmgym-separate |",
        "|---|---|---|---|",
    ]
    for name, count in tokens.items():
        shares = (count / tokens[other] for other in ("lmgym-head", "lmgym-separate"))
        lines.append(f"| {name} | {count:,} | {' | '.join(f'{share:.1f}' for share in shares)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
