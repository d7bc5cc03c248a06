"""The same training by lmgym and by TRL: accuracy over answers and over seconds, from the same start, by seeds.

    python -m benchmarks.learning --seeds 0 1 2 3 --steps 100 --out runs/learning
    python -m benchmarks.learning --model models/smollm2-135m-instruct --task words --steps 60 --every 15
    python -m benchmarks.learning --model models/smollm2-135m-instruct --task topics --steps 40 --every 10

Both get the same start (the quickstart's warm start, or --model in bf16), the same prompts in the same order, the same
loss, optimizer and reward. They take turns, a step each, so that the noise of the machine falls on both. Every few
steps each saves its model, off the clock; in the end lmgym lets all of them answer the same held-out problems (the
quickstart's sampled at temperature 1, the others greedily). Prints a table and a test of equivalence, and writes
results.json and picture.png.

Two one-sided tests (TOST; Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987): both learn alike per answer, within
+-0.05 of accuracy, if the 90 % interval of the difference by seeds lies within it. What is compared is the mean of a
curve's points after the first.
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
from lmgym.config.schema import Config
from lmgym.stats.intervals import student_t

TRL = "1.16.0"
NAMES = ("lmgym", "trl")
COLOURS = {"lmgym": "#0072b2", "trl": "#d55e00"}  # blue and vermilion of Okabe and Ito: also for the colour-blind
LABELS = {"lmgym": "lmgym", "trl": f"TRL {TRL}"}
EVALUATION = ("evaluation.split=test", "evaluation.temperature=1", "evaluation.samples=4")
MARGIN = 0.05  # of accuracy: less than this is called alike

REAL = {"prompts": 8, "new_tokens": 24, "learning_rate": 1e-5, "compute": "bfloat16"}
GREEDY = {"examples": 200, "temperature": 0.0}
TASKS: dict[str, dict[str, Any]] = {  # of a model of your own
    "words": {
        "task": {
            **{"name": "arithmetic", "style": "short", "largest": 50, "held_out": "numbers"},
            "system_prompt": "Answer with the number alone.",
        },
        "rewards": {"final_answer": 1.0},
        "evaluation": {"split": "test", **GREEDY},
        "settings": REAL,
    },
    "topics": {
        "task": {"name": "topics", "template": "Write about {topic}"},
        "rewards": {"lexical_richness": {"brevity_scale": 0.5, "target": 24}},
        "evaluation": {"split": "test", "examples": 6, "temperature": 1.0, "samples": 16},
        "settings": REAL | {"new_tokens": 48, "reward": "richness"},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between two points of a curve (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, help="a model folder; without it the quickstart's, after its warm start")
    parser.add_argument("--task", choices=TASKS, default="words", help="with --model (%(default)s)")
    parser.add_argument("--rounding", choices=["nearest", "stochastic"], default="nearest", help="lmgym's, in bf16")
    parser.add_argument("--venvs", type=Path, default=environments.VENVS)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    given = parser.parse_args()
    given.out = given.out.absolute()
    given.out.mkdir(parents=True, exist_ok=True)
    curves: list[dict[str, Any]] = []
    for seed in given.seeds:
        curves += one_seed(seed, given)
        (given.out / "results.json").write_text(json.dumps(curves, indent=1), encoding="utf-8")
        print(table(curves[-2:]), flush=True)
    print(table(curves))
    print(equivalence(curves))
    draw(curves, given.out / "picture.png")


def one_seed(seed: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Train both from the seed's start; a curve for each."""
    folder = given.out / f"seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    more = TASKS[given.task]["settings"] | {"rounding": given.rounding} if given.model else {}
    settings = learning_task.Settings(seed, given.steps, given.every, threads=given.threads, **more)
    config = config_of(given)
    learning_task.write(folder, start_of(seed, folder, given), prompts_of(config, seed, settings), settings)
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
        curve["answers"] = [step * settings.prompts * settings.group for step in steps]
        curve["seconds"] = [sum(seconds[name][:step]) for step in steps]
        metric = next(iter(TASKS[given.task]["rewards"])) if given.model else "final_answer"
        curve["accuracy"] = [accuracy(config, model, metric) for model in models]
        curves.append(curve)
    shutil.rmtree(folder)  # models of some hundred MB each
    return curves


def config_of(given: argparse.Namespace) -> Config:
    """The recipe that prompts and evaluations come from."""
    from lmgym.config.build import build_config, load_config

    if given.model is None:
        return load_config(RECIPE, EVALUATION)
    tree = {key: value for key, value in TASKS[given.task].items() if key != "settings"}
    tree |= {"sampling": {"max_new_tokens": TASKS[given.task]["settings"]["new_tokens"]}, "threads": given.threads}
    policy = {"model": str(given.model.absolute()), "device": "cpu"}
    return build_config(tree | {"policy": policy, "algorithm": "grpo"})


def start_of(seed: int, folder: Path, given: argparse.Namespace) -> Path:
    """The folder of the model that both start from."""
    if given.model is not None:
        return given.model.absolute()
    train(RECIPE, [f"seed={seed}", f"out={folder / 'start'}", "stages.rl.steps=1", "checkpoint.keep=1000"])
    return end_of_warm_start(folder / "start")


def prompts_of(config: Config, seed: int, settings: learning_task.Settings) -> list[tuple[str, str]]:
    """Training problems, as many as both need, in an order of the seed: as the chat template writes them."""
    from transformers import AutoTokenizer

    from lmgym.training.setup import training_examples

    examples = training_examples(config, config.stages[-1])
    count = settings.steps * settings.prompts
    chosen = [examples[(seed * count + number) % len(examples)] for number in range(count)]
    answers = [str(example.meta.get("answer", "")) for example in chosen]
    if all(isinstance(example.prompt, str) for example in chosen):
        return [(str(example.prompt), answer) for example, answer in zip(chosen, answers, strict=True)]
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
    written = [
        tokenizer.apply_chat_template(example.prompt, tokenize=False, add_generation_prompt=True) for example in chosen
    ]
    return list(zip(written, answers, strict=True))


def accuracy(config: Config, model: Path, metric: str) -> float:
    """The mean of a metric on held-out problems."""
    from lmgym.training.machine import choose_machine
    from lmgym.training.setup import actor_of, evaluate_actor, held_out_examples, held_out_rewards, load_weights

    policy = load_weights(config.policy, config.seed, choose_machine(config, None), model)
    rewards = held_out_rewards(config, config.stages[-1])
    result = evaluate_actor(config, actor_of(config, policy), held_out_examples(config), rewards)
    return result.results[metric].mean


def equivalence(curves: Sequence[dict[str, Any]]) -> str:
    """The test in a sentence."""
    means = {(curve["library"], curve["seed"]): statistics.mean(curve["accuracy"][1:]) for curve in curves}
    differences = [means["lmgym", seed] - means["trl", seed] for name, seed in means if name == "lmgym"]
    if len(differences) < 2:
        return "one seed says nothing about equivalence"
    found = student_t(differences, confidence=0.9)
    alike = max(-found.low, found.high) < MARGIN
    return (
        f"lmgym less TRL, mean of a curve: {found} (90 %, {len(differences)} seeds): "
        f"{'alike' if alike else 'not shown to be alike'} within {MARGIN}"
    )


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
        answers = own[0]["answers"]
        for curve in own:
            by_answers.plot(answers, curve["accuracy"], color=COLOURS[name], alpha=0.3, linewidth=1)
            by_seconds.plot(curve["seconds"], curve["accuracy"], color=COLOURS[name], alpha=0.3, linewidth=1)
        style = {"color": COLOURS[name], "linewidth": 2.5, "label": LABELS[name]}
        by_answers.plot(answers, means, **style)
        by_seconds.plot(clock, means, **style)
    by_answers.set(xlabel="sampled answers", ylabel="on held-out problems")
    by_seconds.set(xlabel="seconds of training")
    for axes in (by_answers, by_seconds):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    by_seconds.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
