"""Does `lmgym why` find the groups that moved an answer? Each group of a step is really left out, and the order of what
that changes is held against the order of the influences.

    python -m benchmarks.influence --cases 50
    python -m benchmarks.influence --model SmolLM2-135M-Instruct --cases 8

Trains a run with checkpoints. A case is a step behind a checkpoint and a held-out answer: Spearman's correlation over
the step's groups that teach something. Prints its mean, with an interval over the cases (those of one step share its
batch).
"""

import argparse
import copy
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.training import train
from lmgym.batch import Batch
from lmgym.experiments.what_if.question import Question, ask
from lmgym.experiments.what_if.standing import find_start, step_records
from lmgym.experiments.why.asked import asked_batch
from lmgym.experiments.why.influence import active_where, influences
from lmgym.experiments.why.why import answer_logprob, before_update
from lmgym.stats.intervals import student_t
from lmgym.stats.rank_correlation import spearman
from lmgym.training.checkpoints import checkpoint
from lmgym.training.setup import load_data
from lmgym.training.stage import StageRun
from lmgym.types import Example
from lmgym.updates.first_order import optimizer_step

TINY: dict[str, Any] = {
    "policy": {"model": "builtin:tiny", "compute": "float32"},
    "sampling": {"max_new_tokens": 4},
    "stages": [
        {
            "name": "warm",
            "algorithm": "supervised",
            "steps": 60,
            "prompts_per_step": 32,
            "optimizer": {"learning_rate": 3e-3},
        },
        {
            "name": "rl",
            "algorithm": {"name": "grpo", "group_size": 8},
            "prompts_per_step": 16,
            "optimizer": {"learning_rate": 3e-4},
        },
    ],
}
REAL: dict[str, Any] = {
    "task": {"name": "arithmetic", "style": "short", "system_prompt": "Answer with the number alone."},
    "sampling": {"max_new_tokens": 24},
    "algorithm": {"name": "grpo", "group_size": 8},
    "prompts_per_step": 8,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name on the Hub; default: a tiny model")
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--steps", type=int, default=55)
    parser.add_argument("--answers", type=int, default=5, help="held-out answers to a step (%(default)s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, path = Path(temporary) / "run", Path(temporary) / "recipe.yaml"
        path.write_text(json.dumps(recipe(given)), encoding="utf-8")  # JSON is YAML
        train(path, [f"out={folder}"])
        found = []
        for step, name, correlation, groups, signs in cases(ask(folder, []), given.answers):
            found.append((correlation, signs))
            print(f"step {step + 1}, {name}: {correlation:.3f} over {groups} groups, {signs:.0%} of signs", flush=True)
            if len(found) == given.cases:
                break
    print(
        f"Spearman {student_t([one for one, _ in found])} over {len(found)} cases; the sign of "
        f"{statistics.mean(share for _, share in found):.0%} of the influences is right"
    )


def recipe(given: argparse.Namespace) -> dict[str, Any]:
    every = max(given.steps * given.answers // max(given.cases, 1), 1)
    tree: dict[str, Any] = {
        "task": "arithmetic", "rewards": {"final_answer": 1.0}, "seed": 0, "logs": {"traces": "all"},
        "evaluation": {"every": 0, "examples": 200}, "checkpoint": {"every": every, "keep": 1000},
    }  # fmt: skip
    if given.model:
        return {
            **tree, **REAL, "policy": {"model": given.model}, "steps": given.steps,
            "optimizer": {"learning_rate": 1e-5},
        }  # fmt: skip
    warm, learns = TINY["stages"]
    return {**tree, **TINY, "stages": [warm, {**learns, "steps": given.steps}]}


def cases(question: Question, answers: int) -> Iterator[tuple[int, str, float, int, float]]:
    """Step, example, Spearman's correlation, groups, and the share of right signs, of one case after the other."""
    records = step_records(question.folder, question.stage)
    held_out = next(iter(load_data(question.real).held_out.values()))
    saved = map(checkpoint.stage_and_step, checkpoint.all_checkpoints(question.folder / "checkpoints"))
    places = [step for stage, step in saved if stage == question.stage]
    for number, step in enumerate(step for step in places if step in records and step > 0):
        with before_update(question, find_start(question, step, records)) as (stage, _, batch):
            for place in range(answers):
                example = held_out[number * answers + place]
                if (case := one_case(stage, batch, example, question)) is not None:
                    yield (step, example.id, *case)


def one_case(stage: StageRun, batch: Batch, example: Example, question: Question) -> tuple[float, int, float] | None:
    """None if fewer than three groups teach anything."""
    policy, algorithm, optimizer = stage.run.policy, stage.algorithm, stage.optimizer
    asked = asked_batch(question.real, policy, example)
    found = {k: v for k, v in influences(algorithm, policy, batch, optimizer, asked).groups.items() if v != 0}
    if len(found) < 3:
        return None
    weights, moments = copy.deepcopy(policy.model.state_dict()), copy.deepcopy(optimizer.torch.state_dict())

    def after(left_out: int) -> float:
        part = active_where(algorithm, lambda group: group != left_out)
        optimizer_step(part, policy, algorithm.before_minibatch(batch), optimizer, first=True)
        logprob = answer_logprob(policy, asked)
        policy.model.load_state_dict(weights)
        optimizer.torch.load_state_dict(copy.deepcopy(moments))
        return logprob

    whole = after(-1)
    real = [whole - after(group) for group in found]
    expected = list(found.values())
    signs = sum((one > 0) == (other > 0) for one, other in zip(real, expected, strict=True)) / len(real)
    return spearman(expected, real), len(real), signs


if __name__ == "__main__":
    main()
