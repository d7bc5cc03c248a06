"""Rewards that need no right answers, or know them in part, on a task whose answers are known: what does each teach?

    python -m benchmarks.without_labels --judge models/smollm2-135m-instruct --seeds 0 1 2 --out runs/without_labels

The quickstart is trained up to the end of its warm start, once a seed. From there GRPO learns from the reward of each
arm; `final_answer` on unseen numbers is measured in all of them, and only the first arm is paid by it. All arms have
the same prompts, group size, rate and number of answers. Prints a Markdown table: accuracy before and after, its
change by seed, how much the arm's own reward rose. Writes results.json and picture.png.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from benchmarks.algorithms import draw, recipe_of, warm_start
from benchmarks.training import train
from lmgym.stats.intervals import mean_interval

GROUP, RIGHT = 4, "Is this the right answer to the problem?"
# The rewards of each arm, and the algorithm's credit where it is another one than GRPO's; JUDGE is the local model.
ARMS: dict[str, dict[str, Any]] = {
    "the right answers": {"rewards": {"final_answer": 1.0}},
    "half not judged": {"rewards": {"benchmarks.partly_judged:left_out": 1.0}},
    "half counted as wrong": {"rewards": {"benchmarks.partly_judged:counted_as_wrong": 1.0}},
    "majority": {"rewards": {"majority_answer": 1.0}},
    "self-certainty": {"rewards": {}, "credit": {"name": "self_certainty"}},
    "judge, all pairs": {"rewards": {"judge_pairs": {"model": "JUDGE", "compute": "bfloat16"}}},
    "judge, champion": {"rewards": {"judge_pairs": {"model": "JUDGE", "compute": "bfloat16", "against": "champion"}}},
    "judge, rubric": {"rewards": {"rubric": {"model": "JUDGE", "compute": "bfloat16", "criteria": [RIGHT]}}},
}
EARNED = ("reward", "self_certainty")


def recipe(arm: str, start: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The quickstart's last stage with the rewards of an arm; whether an answer is right is measured."""
    made = recipe_of("grpo", start, given.steps, given.every, given.answers)
    fields = json.loads(json.dumps(ARMS[arm]).replace("JUDGE", str(given.judge)))
    made["algorithm"] |= {"group_size": GROUP} | ({"credit": fields["credit"]} if "credit" in fields else {})
    made |= {"rewards": fields["rewards"], "prompts_per_step": given.answers // GROUP}
    if not fields["rewards"]:
        del made["rewards"]
    made |= {"reward_timeout": 1800}
    made["evaluation"] |= {"metrics": {"right": {"reward": "final_answer"}}, "examples": given.examples}
    return made


def one_run(arm: str, seed: int, start: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Train one arm with one seed: its accuracy on unseen numbers, and what it was paid at first and in the end."""
    name = f"{arm.replace(', ', '-').replace(' ', '_')}-{seed}"
    path, run = given.out / f"{name}.yaml", given.out / name
    path.write_text(yaml.safe_dump(recipe(arm, start, given)), encoding="utf-8")
    if not (run / "summary.json").exists():
        train(path, [f"seed={seed}", f"out={run}"])
    answers, curve, earned = 0, [], list[float]()
    for record in map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if record["kind"] == "train":
            answers += int(record["answers"])
            earned.append(record[EARNED["credit" in ARMS[arm]]])
        elif record.get("split") == "validation":
            curve.append({"answers": answers, "accuracy": record["right"]})
    tenth = max(1, len(earned) // 10)
    ends = [statistics.mean(earned[:tenth]), statistics.mean(earned[-tenth:])]
    print(f"{arm}, seed {seed}: {curve[0]['accuracy']:.3f} to {curve[-1]['accuracy']:.3f}", flush=True)
    return {"algorithm": arm, "seed": seed, "curve": curve, "earned": ends}


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown, a row for each arm."""
    head = "| paid for | right before | right after [95%] | change by seed | its own reward, first and last tenth |"
    rows = [head, "|---|---|---|---|---|"]
    for arm in dict.fromkeys(one["algorithm"] for one in results):
        own = [one for one in results if one["algorithm"] == arm]
        first, last = ([one["curve"][end]["accuracy"] for one in own] for end in (0, -1))
        changes = ", ".join(f"{after - before:+.3f}" for before, after in zip(first, last, strict=True))
        earned = " to ".join(f"{statistics.mean(one['earned'][end] for one in own):.3f}" for end in (0, 1))
        after = mean_interval([[value] for value in last])
        rows.append(f"| {arm} | {statistics.mean(first):.3f} | {after} | {changes} | {earned} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", type=Path, required=True, help="the folder of a model that was tuned to chat")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two points of a curve (%(default)s)")
    parser.add_argument("--examples", type=int, default=512, help="of an evaluation (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=ARMS, default=[*ARMS], metavar="ARM", help="these arms")
    parser.add_argument("--answers", type=int, default=64, help="of a step (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, one thread each (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/without_labels"))
    given = parser.parse_args()
    given.out, given.judge = given.out.absolute(), given.judge.absolute()
    given.out.mkdir(parents=True, exist_ok=True)
    starts = {seed: warm_start(seed, given.out) for seed in given.seeds}
    with ThreadPoolExecutor(given.workers) as pool:
        pending = [pool.submit(one_run, arm, seed, starts[seed], given) for arm in given.only for seed in given.seeds]
        results = [future.result() for future in pending]
    (given.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(results))
    draw(given.only, results, given.out / "picture.png")


if __name__ == "__main__":
    main()
