"""The same training by lmgym and by TRL: accuracy over answers and over seconds, from the same start, by seeds.

    python -m benchmarks.learning --seeds 0 1 2 3 --steps 100 --out runs/learning

Both get the quickstart's warm start, the same prompts in the same order, the same loss, optimizer and reward. They take
turns, a step each, so that the noise of the machine falls on both. Every few steps each saves its model, off the clock;
in the end lmgym lets all of them answer the same test problems, sampled at temperature 1. Prints a table, and writes
results.json and picture.png.
"""

import argparse
import json
import shutil
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import environments
from benchmarks.contenders import learning_task
from benchmarks.interleave import Contender, heard, started
from benchmarks.quickstart import RECIPE, end_of_warm_start
from benchmarks.training import train

TRL = "1.16.0"
NAMES = ("lmgym", "trl")
COLOURS = {"lmgym": "#0072b2", "trl": "#d55e00"}  # blue and vermilion of Okabe and Ito: also for the colour-blind
LABELS = {"lmgym": "lmgym", "trl": f"TRL {TRL}"}
EVALUATION = ("evaluation.split=test", "evaluation.temperature=1", "evaluation.samples=4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between two points of a curve (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--venvs", type=Path, default=environments.VENVS)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    given = parser.parse_args()
    given.out = given.out.absolute()
    given.out.mkdir(parents=True, exist_ok=True)
    curves = [curve for seed in given.seeds for curve in one_seed(seed, given)]
    (given.out / "results.json").write_text(json.dumps(curves, indent=1), encoding="utf-8")
    print(table(curves))
    draw(curves, given.out / "picture.png")


def one_seed(seed: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Train both from the seed's warm start; a curve for each."""
    folder = given.out / f"seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    train(RECIPE, [f"seed={seed}", f"out={folder / 'start'}", "stages.rl.steps=1", "checkpoint.keep=1000"])
    settings = learning_task.Settings(seed, given.steps, given.every, threads=given.threads)
    learning_task.write(folder, end_of_warm_start(folder / "start"), prompts_of(seed, settings), settings)
    contenders = [
        Contender("lmgym", "learning_lmgym"),
        Contender("trl", "learning_trl", environments.trl(given.venvs, TRL)),
    ]
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    with ExitStack() as stack:
        running = [stack.enter_context(started(each, folder, given.threads)) for each in contenders]
        versions = [heard(process, log)["ready"] for process, log in running]
        for _ in range(given.steps):
            for contender, (process, log) in zip(contenders, running, strict=True):
                assert process.stdin is not None
                process.stdin.write("step\n")
                process.stdin.flush()
                seconds[contender.name].append(heard(process, log)["parts"]["step"])
    steps = range(0, given.steps + 1, given.every)
    curves = []
    for name, about in zip(NAMES, versions, strict=True):
        models = [folder / "model", *(learning_task.saved(folder, name, step) for step in steps[1:])]
        curve: dict[str, Any] = {"library": name, "seed": seed, "about": about, "steps": list(steps)}
        curve["seconds"] = [sum(seconds[name][:step]) for step in steps]
        curve["accuracy"] = [accuracy(model) for model in models]
        curves.append(curve)
    return curves


def prompts_of(seed: int, settings: learning_task.Settings) -> list[tuple[str, str]]:
    """Distinct training problems of the quickstart, as many as both need, in an order of the seed."""
    from lmgym.config.build import load_config
    from lmgym.training.setup import training_examples

    config = load_config(RECIPE)
    examples = training_examples(config, config.stages[-1])
    count = settings.steps * settings.prompts
    first = seed * count % len(examples)
    chosen = [examples[(first + number) % len(examples)] for number in range(count)]
    return [(str(example.prompt), str(example.meta["answer"])) for example in chosen]


def accuracy(model: Path) -> float:
    """The share of right answers to the test problems, sampled as the model is."""
    from lmgym.config.build import load_config
    from lmgym.training.machine import choose_machine
    from lmgym.training.setup import actor_of, evaluate_actor, held_out_examples, held_out_rewards, load_weights

    config = load_config(RECIPE, EVALUATION)
    policy = load_weights(config.policy, config.seed, choose_machine(config, None), model)
    rewards = held_out_rewards(config, config.stages[-1])
    result = evaluate_actor(config, actor_of(config, policy), held_out_examples(config), rewards)
    return result.results["final_answer"].mean


def table(curves: Sequence[dict[str, Any]]) -> str:
    """Markdown: what each library reached by seed, and how long a step took."""
    lines = ["| seed | library | accuracy before | after | seconds | seconds a step |", "|---|---|---|---|---|---|"]
    for curve in curves:
        before, after, seconds = curve["accuracy"][0], curve["accuracy"][-1], curve["seconds"][-1]
        cells = (curve["seed"], LABELS[curve["library"]], f"{before:.3f}", f"{after:.3f}", f"{seconds:.0f}")
        lines.append("| " + " | ".join(map(str, cells)) + f" | {seconds / curve['steps'][-1]:.2f} |")
    return "\n".join(lines)


def draw(curves: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy over answers and over seconds: a thin line a seed, a thick one for the mean."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (by_answers, by_seconds) = pyplot.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for name in NAMES:
        own = [curve for curve in curves if curve["library"] == name]
        means = [statistics.mean(values) for values in zip(*(curve["accuracy"] for curve in own), strict=True)]
        clock = [statistics.mean(values) for values in zip(*(curve["seconds"] for curve in own), strict=True)]
        answers = [step * 256 for step in own[0]["steps"]]
        for curve in own:
            by_answers.plot(answers, curve["accuracy"], color=COLOURS[name], alpha=0.3, linewidth=1)
            by_seconds.plot(curve["seconds"], curve["accuracy"], color=COLOURS[name], alpha=0.3, linewidth=1)
        style = {"color": COLOURS[name], "linewidth": 2.5, "label": LABELS[name]}
        by_answers.plot(answers, means, **style)
        by_seconds.plot(clock, means, **style)
    by_answers.set(xlabel="sampled answers", ylabel="accuracy on unseen problems, sampled", ylim=(0, 1))
    by_seconds.set(xlabel="seconds of training")
    for axes in (by_answers, by_seconds):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    by_seconds.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
