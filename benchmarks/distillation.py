"""Distillation on whole distributions: memory over tokens and vocabulary, and what it learns beside the sampled form.

    python -m benchmarks.distillation memory      about two minutes on one core
    python -m benchmarks.distillation tokens      about four minutes on one core
    python -m benchmarks.distillation learning    about fifteen minutes on one core

`memory`: a process of its own for each line computes the reverse KL of T tokens from a teacher over a vocabulary of V,
with its gradient, in chunks (gkd; or the same with the teacher's 20 most likely tokens, as a server sends them) or
from all logits at once, and reports its peak memory above what it held before.
Hidden sizes are small, so that the vocabulary stands out.

`tokens`: how much of the divergence the teacher's K most likely tokens and a bucket for all others keep, and the cosine
between both gradients by the logits; the same of the distributions renormalised on the K tokens. The teacher and a
student of `learning`, at the student's own answers to 256 test problems.

`learning`: the recipe distill_miniature. One teacher; for each seed one careless student, which then learns from the
teacher with the same prompts, steps and learning rate by `distill` and by gkd's divergences. Runs that are complete are
not repeated. Draws their accuracy over steps (learning.png).

All print Markdown tables.
"""

import argparse
import json
import multiprocessing
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.algorithms import draw_curves
from benchmarks.training import ROOT, train
from lmgym.batch import collate
from lmgym.core import seeds
from lmgym.functional.divergences import Divergence, DivergenceName, with_rest
from lmgym.inference.base import Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.logs.records import peak_memory_gib
from lmgym.models.kernels.fused_divergence import FusedDivergence, with_logits, with_top
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.stats.intervals import student_t
from lmgym.tasks.base import load_task
from lmgym.text.chat import prompt_ids
from lmgym.types import Episode, Turn

RECIPE = ROOT / "lmgym" / "recipes" / "distill_miniature.yaml"
NAMES: tuple[DivergenceName, ...] = ("reverse_kl", "forward_kl", "jsd")
STUDENT, TEACHER = 64, 128  # hidden sizes
TOKENS, VOCABULARIES = (1024, 4096, 16384), (32_000, 128_000)
TOP_K = 20
LARGEST = 6 * 2**30  # bytes of logits above which the plain form is not tried
SAMPLED = "distill"
ARMS = {
    SAMPLED: "{name: distill, teacher: TEACHER}",
    "gkd reverse_kl": "{name: gkd, teacher: TEACHER}",
    "gkd forward_kl": "{name: gkd, teacher: TEACHER, divergence: forward_kl}",
    "gkd jsd": "{name: gkd, teacher: TEACHER, divergence: jsd}",
}


def peak_bytes() -> int:
    return int(peak_memory_gib() * 2**30)


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


def named_tokens(out: Path, seed: int) -> None:
    teacher, student = (load(run / "final") for run in (trained_teacher(out), trained_student(out, seed)))
    examples = load_task("arithmetic", "test", steps=2, largest=5, explain=True)[:256]
    prompts = [tuple(prompt_ids(student.tokenizer, one.prompt)) for one in examples]
    requests = [Request(ids, key=seeds.key(seed, "answers", n)) for n, ids in enumerate(prompts)]
    answers = Sampler(student).generate(requests, Sampling(max_new_tokens=48))
    turns = [Turn([*ids], one.ids, one.logprobs) for ids, one in zip(prompts, answers, strict=True)]
    batch = collate([Episode(examples[n], n, n, [turn]) for n, turn in enumerate(turns)])
    row, column = batch.actions.nonzero(as_tuple=True)
    with torch.no_grad():
        both = [own.model(batch.tokens, attention_mask=batch.mask.long()).logits for own in (student, teacher)]
    p, q = (logits[row, column - 1].double().log_softmax(-1) for logits in both)
    print(f"{len(row):,} tokens of the answers, {p.shape[1]} of the vocabulary\n")
    print("| | K | divergence | its gradient | renormalised | its gradient |\n|---|---|---|---|---|---|")
    for name in NAMES:
        whole, by_logits = Divergence(name).of(p, q)
        for top_k in (1, 2, 5, TOP_K):
            top = q.topk(top_k)
            forms = [Divergence(name).of_top(p, top.indices, with_rest(top.values))]
            value, by_named = Divergence(name).of(p.gather(1, top.indices).log_softmax(-1), top.values.log_softmax(-1))
            forms.append((value, torch.zeros_like(p).scatter(1, top.indices, by_named)))
            cells = [
                f"{float(own.sum() / whole.sum()):.2f} | "
                f"{float(torch.cosine_similarity(gradient.flatten(), by_logits.flatten(), dim=0)):.2f}"
                for own, gradient in forms
            ]
            print(f"| {name} | {top_k} | {' | '.join(cells)} |")


def load(folder: Path) -> Policy:
    return load_policy(PolicySection(model=str(folder), device="cpu", compute="float32"))


def trained_teacher(out: Path) -> Path:
    return trained(RECIPE, out / "teacher", ["stages=[{name: teacher}]"])


def trained_student(out: Path, seed: int) -> Path:
    warm_start = "stages=[{name: warm_start, task: {mistakes: 0.8}, steps: 300}]"
    return trained(RECIPE, out / f"student-{seed}", [f"seed={seed}", warm_start])


def learning(out: Path, numbers: list[int], arms: list[str]) -> None:
    teacher = trained_teacher(out)
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ["before", *arms]}
    curves: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for seed in numbers:
        student = trained_student(out, seed)
        found["before"].append(accuracy(student))
        for arm in arms:
            section = ARMS[arm].replace("TEACHER", str(teacher / "final"))
            optimizer = "optimizer: {learning_rate: 3.0e-4, schedule: linear}"
            stage = f"stages=[{{name: distil, algorithm: {section}, {optimizer}, prompts_per_step: 64, steps: 80}}]"
            start = [f"policy.model={student / 'final'}", "policy.architecture={}", "evaluation.every=20"]
            run = trained(RECIPE, out / f"{arm.replace(' ', '-')}-{seed}", [f"seed={seed}", *start, stage])
            found[arm].append(accuracy(run))
            curves[arm].append({"curve": validated(run)})
            print(f"seed {seed}: {arm} {found[arm][-1]}", flush=True)
    print("| | right, each seed | mean [95 % interval] | cut off, mean | seconds of a step |\n|---|---|---|---|---|")
    for arm, results in found.items():
        right = [one["right"] for one in results]
        each = ", ".join(f"{value:.3f}" for value in right)
        cut, seconds = (statistics.mean(one[key] for one in results) for key in ("truncated", "seconds"))
        print(f"| {arm} | {each} | {student_t(right, share=True)} | {cut:.3f} | {seconds:.2f} |")
    draw(curves, out / "learning.png")


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


def validated(run: Path) -> list[dict[str, float]]:
    """The share of right sampled answers to validation problems, on the way."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [one for one in records if one["kind"] == "evaluation" and one["split"] == "validation"]
    return [{"step": one["step"], "accuracy": one["final_answer"]} for one in found]


def draw(curves: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """A panel for each divergence: each seed, mean and interval. In grey the sampled form."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    arms = [arm for arm in curves if arm != SAMPLED] or [SAMPLED]
    size = (max(6, 3.2 * len(arms)), 3.2)
    figure, panels = pyplot.subplots(1, len(arms), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for arm, axes in zip(arms, panels[0], strict=True):
        if SAMPLED in curves:
            draw_curves(axes, curves[SAMPLED], over="step", colour="#777777", label="distill")
        draw_curves(axes, curves[arm], over="step", label=arm)
        axes.set(title=arm, xlabel="steps of 64 answers")
    panels[0, 0].set(ylabel="accuracy, unseen problems", ylim=(0, None))
    panels[0, 0].legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["memory", "tokens", "learning"])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "distillation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="of `learning`")
    options = parser.parse_args()
    if options.part == "memory":
        memory()
    elif options.part == "tokens":
        named_tokens(options.out.resolve(), options.seeds[0])
    else:
        learning(options.out.resolve(), options.seeds, options.only)


if __name__ == "__main__":
    main()
