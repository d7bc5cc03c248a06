"""Does a first order foresee what a changed recipe would do? For each pair of a step and a changed recipe, the change
of held-out answers that the changed gradient foretells is held against the one that the step really makes.

    python -m benchmarks.directions --pairs 100

Trains a tiny run with checkpoints. Of each step behind one, every changed recipe is taken from the same weights and
moments: the answers' log-probabilities are foretold as `lmgym why` splits a step (gradient times the optimizer's step,
momentum and weight decay), and then the step is taken. Prints the share of answers whose direction was right, and,
which is harder, the share of right directions of what the change of the recipe makes of it.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from benchmarks.influence import recipe
from benchmarks.training import train
from lmgym.experiments.what_if.question import Question, ask
from lmgym.experiments.what_if.retake import Steps
from lmgym.experiments.what_if.standing import check_learned, find_start, opened, standing, step_records
from lmgym.experiments.why.asked import asked_batch
from lmgym.experiments.why.influence import influences
from lmgym.experiments.why.why import answer_logprob
from lmgym.stats.intervals import student_t
from lmgym.training.checkpoints import checkpoint
from lmgym.training.setup import load_data
from lmgym.types import Example
from lmgym.updates.update import update

CHANGES = (
    "optimizer.learning_rate=1e-3",
    "optimizer.learning_rate=3e-5",
    "optimizer.max_gradient_norm=0.05",
    "optimizer.weight_decay=0.3",
    "algorithm=rloo",
    "algorithm=dr_grpo",
    "algorithm=gspo",
    "rewards={final_answer: -1.0}",
    "rewards={final_answer: 1.0, words: 0.5}",
    "rewards={length: {unit: characters, target: 12}}",
)  # of the stage that learns
Moves = list[tuple[float, float]]  # of each answer, in nats: foretold and real


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=55)
    parser.add_argument("--answers", type=int, default=5, help="held-out answers to a pair (%(default)s)")
    given = parser.parse_args()
    given.model, given.cases = None, given.answers * max(1, given.pairs // len(CHANGES))
    by_step = list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as temporary:
        folder, path = Path(temporary) / "run", Path(temporary) / "recipe.yaml"
        path.write_text(json.dumps(recipe(given)), encoding="utf-8")  # JSON is YAML
        train(path, [f"out={folder}"])
        for step, examples in places(folder, given):
            unchanged = moves(ask(folder, []), step, examples)
            right = list[tuple[float, float]]()
            for change in CHANGES:
                found = moves(ask(folder, [f"stages.rl.{change}"]), step, examples)
                apart = [(a - c, b - d) for (a, b), (c, d) in zip(found, unchanged, strict=True)]
                right.append((agreeing(found), agreeing(apart)))
                print(f"step {step + 1}, {change}: {right[-1][0]:.0%}, less unchanged {right[-1][1]:.0%}", flush=True)
            by_step.append((mean(one for one, _ in right), mean(other for _, other in right)))
    one, other = (student_t([share[side] for share in by_step], share=True) for side in (0, 1))
    pairs = len(by_step) * len(CHANGES)
    print(f"right directions over {pairs} pairs: {one}; of changed less unchanged: {other} (intervals over the steps)")


def places(folder: Path, given: argparse.Namespace) -> Iterator[tuple[int, list[Example]]]:
    """The steps that begin at a checkpoint, each with its held-out examples."""
    question = ask(folder, [])
    records = step_records(folder, question.stage)
    held_out = next(iter(load_data(question.real).held_out.values()))
    saved = map(checkpoint.stage_and_step, checkpoint.all_checkpoints(folder / "checkpoints"))
    steps = [step for stage, step in saved if stage == question.stage and step in records and step > 0]
    for number, step in enumerate(steps[: given.pairs // len(CHANGES)]):
        yield step, [held_out[number * given.answers + place] for place in range(given.answers)]


def moves(question: Question, step: int, examples: list[Example]) -> Moves:
    """What the step of the changed recipe does to the examples' references, foretold and real."""
    begin = find_start(question, step, step_records(question.folder, question.stage))
    check_learned(question, step)
    one, other = (config.stages[question.stage] for config in (question.real, question.changed))
    with standing(question, begin) as place, opened(place, question.real, question.changed) as stage:
        _, batch = Steps(stage, question.folder, [step], judge=one.rewards != other.rewards).prepared(step)
        policy, algorithm, optimizer = stage.run.policy, stage.algorithm, stage.optimizer
        rows = [asked_batch(question.real, policy, example) for example in examples]
        foretold = [influences(algorithm, policy, batch, optimizer, row).total for row in rows]
        before = [answer_logprob(policy, row) for row in rows]
        update(algorithm, policy, batch, optimizer)
        after = [answer_logprob(policy, row) for row in rows]
    return [(told, now - then) for told, then, now in zip(foretold, before, after, strict=True)]


def agreeing(found: Moves) -> float:
    """The share of answers whose direction was foretold."""
    return mean((told > 0) == (real > 0) for told, real in found)


if __name__ == "__main__":
    main()
