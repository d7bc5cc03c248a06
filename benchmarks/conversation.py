"""What a conversation costs as it grows: lmgym's whole GRPO step at 1 to 32 turns.

python -m benchmarks.conversation
python -m benchmarks.conversation --turns 1 2 4 --rounds 2

8 prompts of 32 tokens, 4 conversations each. In every turn the policy says 16 tokens and hears 16. If each token is
read once, a conversation of k turns costs what its tokens cost: seconds per token stay as they are, but for attention,
whose share grows with the length. If every turn read the conversation anew, tokens read would grow with k squared.
"""

import argparse
import math
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import reports, workloads
from benchmarks.interleave import Contender, Result, measure
from benchmarks.reports import row, rule

PROMPT, SAID, HEARD = 32, 16, 16
COMPUTE = {"lmgym-fp32": "float32", "lmgym-bf16": "bfloat16"}


def main() -> None:
    arguments = parsed()
    workload = reports.sized(conversations(arguments.seed, max(arguments.turns)), arguments)
    for name in arguments.only:
        chosen = [contender(name, turns) for turns in arguments.turns]
        with tempfile.TemporaryDirectory() as folder:
            workloads.write(workload, Path(folder))
            results = measure(chosen, Path(folder), arguments.rounds, arguments.warmup, arguments.threads)
        title = f"Conversations, {name}, {len(workload.rows)} side by side"
        print(f"\n{title}, {arguments.rounds} rounds\n\n{table(workload, results, arguments.turns)}")
        print(f"\n{reports.footer(results, arguments.threads)}", flush=True)
        reports.save(title, results, arguments.out, tokens=[tokens(workload, turns) for turns in arguments.turns])


def parsed() -> argparse.Namespace:
    parser = reports.options(__doc__, list(COMPUTE))
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    arguments = parser.parse_args()
    arguments.only = arguments.only or ["lmgym-fp32"]
    return arguments


def conversations(seed: int, turns: int) -> workloads.Workload:
    """The first prompts, and a model whose context takes so many turns."""
    prompts = workloads.random_prompts(random.Random(seed), [PROMPT] * 8)
    context = max(1024, PROMPT + turns * (SAID + HEARD))
    shape = {**workloads.LLAMA_15M, "max_position_embeddings": context}
    return workloads.Workload("conversations", prompts, 4, SAID, seed, shape=shape)


def contender(name: str, turns: int) -> Contender:
    settings = {"compute": COMPUTE[name], "turns": turns, "heard": HEARD}
    return Contender(f"{turns} turns", "lmgym_step", settings=settings)


def tokens(workload: workloads.Workload, turns: int) -> int:
    """Tokens of all conversations of a step, said and heard; a group's first prompt is counted for each."""
    first = sum(map(len, workload.rows))
    return first + len(workload.rows) * (turns * workload.new_tokens + (turns - 1) * HEARD)


def table(workload: workloads.Workload, results: Sequence[Result], turns: Sequence[int]) -> str:
    """Seconds and microseconds per token of each part, and by what power of its tokens a conversation's cost grows."""
    parts = ("rollout", "update")
    head = ["turns", "tokens", *(f"{part}, s" for part in parts), *(f"{part}, us/token" for part in parts), "peak GiB"]
    lines = [row(head), rule(len(head))]
    counts = [tokens(workload, count) for count in turns]
    for result, number, count in zip(results, turns, counts, strict=True):
        cells = [str(number), f"{count:,}", *(f"{result.part(part):.2f}" for part in parts)]
        cells += [f"{1e6 * result.part(part) / count:.0f}" for part in parts]
        lines.append(row([*cells, f"{result.peak_bytes / reports.GIB:.2f}"]))
    powers = [power(counts, [result.part(part) for result in results]) for part in parts]
    lines.append(f"\nseconds grow as tokens to the power of {powers[0]:.2f} (rollout) and {powers[1]:.2f} (update)")
    return "\n".join(lines)


def power(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent of the power law through these points: the least-squares slope of their logarithms.

    Example:
        >>> round(power([1, 2, 4], [3, 12, 48]), 3)
        2.0
    """
    x, y = ([math.log(value) for value in values_] for values_ in (sizes, values))
    middle = sum(x) / len(x)
    spread = sum((one - middle) ** 2 for one in x)
    return sum((one - middle) * other for one, other in zip(x, y, strict=True)) / spread if spread else math.nan


if __name__ == "__main__":
    main()
