"""Distillation on whole distributions: memory over tokens and vocabulary, and what it learns beside the sampled form.

    python -m benchmarks.distillation memory      about two minutes on one core
    python -m benchmarks.distillation learning    about fifteen minutes on one core

`memory`: a process of its own for each line computes the reverse KL of T tokens from a teacher over a vocabulary of V,
with its gradient, in chunks (gkd; or the same with the teacher's 20 most likely tokens, as a server sends them) or
from all logits at once, and reports its peak memory above what it held before.
Hidden sizes are small, so that the vocabulary stands out.

`learning`: the recipe distill_miniature. One teacher; for each seed one careless student, which then learns from the
teacher with the same prompts, steps and learning rate by `distill` and by gkd's divergences. Runs that are complete are
not repeated. Prints Markdown tables.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
from pathlib import Path

import torch

from benchmarks.training import ROOT, train
from lmgym.functional.divergences import Divergence, with_rest
from lmgym.models.fused_divergence import FusedDivergence, with_logits, with_top
from lmgym.stats.intervals import student_t

STUDENT, TEACHER = 64, 128  # hidden sizes
TOKENS, VOCABULARIES = (1024, 4096, 16384), (32_000, 128_000)
TOP_K = 20
LARGEST = 6 * 2**30  # bytes of logits above which the plain form is not tried
ARMS = {
    "distill (sampled token)": "{name: distill, teacher: TEACHER}",
    "gkd reverse_kl": "{name: gkd, teacher: TEACHER}",
    "gkd forward_kl": "{name: gkd, teacher: TEACHER, divergence: forward_kl}",
    "gkd jsd": "{name: gkd, teacher: TEACHER, divergence: jsd}",
}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def once(form: str, tokens: int, vocabulary: int, answer: "multiprocessing.Queue[int]") -> None:
    """Put the bytes that the divergence and its gradient have needed beyond weights and hidden states."""
    torch.set_num_threads(1)
    hidden = torch.randn(tokens, STUDENT, requires_grad=True)
    head = torch.randn(vocabulary, STUDENT, requires_grad=True)
    taught, taught_head = torch.randn(tokens, TEACHER), torch.randn(vocabulary, TEACHER)
    targets = torch.zeros(tokens, dtype=torch.long)
    before = peak_bytes()
    if form != "plain":

        def same(logits: torch.Tensor, rows: slice) -> torch.Tensor:
            return logits

        chunk, reverse = min(max(2**24 // vocabulary, 64), 8192), Divergence("reverse_kl")
        comparison = with_logits(reverse, lambda rows: taught[rows] @ taught_head.T, same)
        if form == "top":
            ids = torch.randint(vocabulary // TOP_K, (tokens, TOP_K)) * TOP_K + torch.arange(TOP_K)  # all different
            comparison = with_top(reverse, ids, with_rest(torch.full((tokens, TOP_K), -4.0)))
        _, found = FusedDivergence.apply(  # type: ignore[no-untyped-call]
            hidden, head, None, targets, same, 1.0, chunk, comparison
        )
    else:
        p, q = (hidden @ head.T).log_softmax(-1), (taught @ taught_head.T).log_softmax(-1)
        found = (p.exp() * (p - q)).sum(-1)
    found.mean().backward()
    answer.put(peak_bytes() - before)


def memory() -> None:
    print("| V | T | all logits at once, GiB | in chunks, GiB | with 20 tokens, GiB |\n|---|---|---|---|---|")
    context = multiprocessing.get_context("spawn")
    for vocabulary in VOCABULARIES:
        for tokens in TOKENS:
            cells = []
            for form in ("plain", "chunks", "top"):
                if form == "plain" and 4 * tokens * vocabulary > LARGEST / 4:
                    cells.append("not tried")
                    continue
                answer: multiprocessing.Queue[int] = context.Queue()
                child = context.Process(target=once, args=(form, tokens, vocabulary, answer))
                child.start()
                cells.append(f"{answer.get() / 2**30:.2f}")
                child.join()
            print(f"| {vocabulary:,} | {tokens:,} | {' | '.join(cells)} |", flush=True)


def learning(out: Path, seeds: list[int]) -> None:
    recipe = ROOT / "lmgym" / "recipes" / "distill_miniature.yaml"
    teacher = trained(recipe, out / "teacher", ["stages=[{name: teacher}]"])
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ["before", *ARMS]}
    for seed in seeds:
        warm_start = "stages=[{name: warm_start, task: {mistakes: 0.8}, steps: 300}]"
        student = trained(recipe, out / f"student-{seed}", [f"seed={seed}", warm_start])
        found["before"].append(accuracy(student))
        for number, (arm, algorithm) in enumerate(ARMS.items()):
            section = algorithm.replace("TEACHER", str(teacher / "final"))
            optimizer = "optimizer: {learning_rate: 3.0e-4, schedule: linear}"
            stage = f"stages=[{{name: distil, algorithm: {section}, {optimizer}, prompts_per_step: 64, steps: 80}}]"
            start = [f"policy.model={student / 'final'}", "policy.architecture={}"]
            found[arm].append(accuracy(trained(recipe, out / f"arm-{number}-{seed}", [f"seed={seed}", *start, stage])))
            print(f"seed {seed}: {arm} {found[arm][-1]}", flush=True)
    print("| | right, each seed | mean [95 % interval] | cut off, mean | seconds of a step |\n|---|---|---|---|---|")
    for arm, results in found.items():
        right = [one["right"] for one in results]
        each = ", ".join(f"{value:.3f}" for value in right)
        cut, seconds = (statistics.mean(one[key] for one in results) for key in ("truncated", "seconds"))
        print(f"| {arm} | {each} | {student_t(right, share=True)} | {cut:.3f} | {seconds:.2f} |")


def trained(recipe: Path, run: Path, settings: list[str]) -> Path:
    if not (run / "summary.json").exists():
        train(recipe, [f"out={run}", *settings])
    return run


def accuracy(run: Path) -> dict[str, float]:
    """Share of right sampled answers to the test problems at the end of a run, of those cut off, seconds of a step."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [one for one in records if one["kind"] == "evaluation" and one["split"] == "test"][-1]
    seconds = statistics.median(one["seconds"] for one in records if one["kind"] == "train")
    return {"right": last["final_answer"], "truncated": last["truncated"], "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["memory", "learning"])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "distillation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    memory() if options.part == "memory" else learning(options.out.resolve(), options.seeds)


if __name__ == "__main__":
    main()
