"""W4: tokens per second and peak memory of rollout, score and update as a workload grows along one axis at a time.

python -m benchmarks.growth                                        all four axes; a table and a plot each
python -m benchmarks.growth --only vocabulary --rounds 3
python -m benchmarks.growth --only length --values 128 256 --pictures /tmp

The base is one prompt of 64 tokens, 8 answers of 128 new tokens, the 15M Llama. Each point is a process of its own, so
that its memory is. `scored_grpo` takes a scoring pass that plain GRPO does not need, to measure one. Tokens are new
tokens in all three parts.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import reports, workloads
from benchmarks.interleave import ROOT, Contender, Result, measure
from benchmarks.reports import GIB, row, rule

PARTS = ("rollout", "score", "update")
# (hidden, MLP, layers, heads) by millions of parameters, with a vocabulary of 4,096 and tied ends.
MODELS = {
    1: (128, 352, 3, 4),
    5: (256, 704, 5, 4),
    15: (384, 1024, 8, 6),
    45: (576, 1536, 11, 9),
    135: (768, 2048, 19, 12),
}
VALUES: dict[str, list[int]] = {
    "length": [128, 256, 512, 1024, 2048, 4096],
    "group": [2, 4, 8, 16, 32, 64],
    "vocabulary": [4_000, 8_000, 16_000, 32_000, 64_000, 150_000],
    "model": list(MODELS),
}
LABELS = {
    "length": "new tokens of an answer",
    "group": "answers to the prompt",
    "vocabulary": "tokens in the vocabulary",
    "model": "million parameters",
}


def main() -> None:
    arguments = parsed()
    for axis in arguments.only:
        values, results = arguments.values or VALUES[axis], []
        for value in values:
            workload = reports.sized(point(axis, value, arguments.seed), arguments)
            results.append((workload, one_point(workload, arguments)))
            reports.save(f"W4, {axis}", [results[-1][1]], arguments.out, axis=axis, value=value)
        print(f"\nW4, {axis}, {arguments.rounds} rounds, {arguments.compute}\n\n{table(axis, values, results)}")
        print(f"\n{reports.footer([result for _, result in results], arguments.threads)}", flush=True)
        plot(axis, values, results, arguments.pictures / f"growth_{axis}.png")


def parsed() -> argparse.Namespace:
    parser = reports.options(__doc__, list(VALUES))
    parser.add_argument("--values", type=int, nargs="+", help="points, in place of the axis's own")
    parser.add_argument("--compute", choices=("float32", "bfloat16", "auto"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "pictures")
    arguments = parser.parse_args()
    arguments.only = arguments.only or list(VALUES)
    return arguments


def point(axis: str, value: int, seed: int) -> workloads.Workload:
    """The base workload with one thing changed."""
    vocabulary = {"vocabulary": value, "model": 4096}.get(axis, workloads.LLAMA_15M["vocab_size"])
    shape = {**workloads.LLAMA_15M, "vocab_size": vocabulary, "max_position_embeddings": 8192}
    if axis == "model":
        hidden, inner, layers, heads = MODELS[value]
        shape |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
        shape |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    prompts = workloads.random_prompts(random.Random(seed), [64], vocabulary)
    base = workloads.Workload(f"W4, {axis} {value}", prompts, 8, 128, seed, shape=shape)
    changed = {"length": {"new_tokens": value}, "group": {"completions": value}}
    return replace(base, **changed.get(axis, {}))


def one_point(workload: workloads.Workload, arguments: argparse.Namespace) -> Result:
    settings: Mapping[str, Any] = {
        "algorithm": "scored_grpo",
        "compute": arguments.compute,
        "device": arguments.device,
    }
    with tempfile.TemporaryDirectory() as folder:
        workloads.write(workload, Path(folder))
        contender = Contender(workload.name, "lmgym_step", settings=dict(settings))
        (result,) = measure([contender], Path(folder), arguments.rounds, arguments.warmup, arguments.threads)
    return result


Points = Sequence[tuple[workloads.Workload, Result]]


def table(axis: str, values: Sequence[int], points: Points) -> str:
    head = [axis, *(f"{part}, tokens/s (min to max)" for part in PARTS), *(f"{part}, peak GiB" for part in PARTS)]
    lines = [row(head), rule(len(head))]
    for value, (workload, result) in zip(values, points, strict=True):
        speeds = [rates(workload, result, part) for part in PARTS]
        cells = [f"{statistics.median(own):,.0f} ({min(own):,.0f} to {max(own):,.0f})" for own in speeds]
        lines.append(row([f"{value:,}", *cells, *(f"{result.peaks[part] / GIB:.3f}" for part in PARTS)]))
    return "\n".join(lines)


def rates(workload: workloads.Workload, result: Result, part: str) -> list[float]:
    """New tokens per second of a part, a number each round."""
    return [workload.sampled / parts[part] for parts in result.parts]


def plot(axis: str, values: Sequence[int], points: Points, path: Path) -> None:
    """Two log-log panels: tokens per second, and peak memory. A line with the spread of the rounds for each part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for part in PARTS:
        each = [rates(workload, result, part) for workload, result in points]
        middle = [statistics.median(own) for own in each]
        below, above = ([abs(f(own) - m) for own, m in zip(each, middle, strict=True)] for f in (min, max))
        speed.errorbar(values, middle, yerr=[below, above], marker="o", capsize=2, label=part)
        memory.plot(values, [result.peaks[part] / GIB for _, result in points], marker="o", label=part)
    for panel, label in ((speed, "new tokens per second"), (memory, "peak memory, GiB")):
        panel.set(xscale="log", yscale="log", xlabel=LABELS[axis], ylabel=label)
        panel.set_xticks(values, [f"{value:,}" for value in values])
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,g}"))
        panel.minorticks_off()
        panel.grid(True, alpha=0.3)
    speed.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"\n{path}")


if __name__ == "__main__":
    main()
