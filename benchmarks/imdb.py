"""RL4LMs' first experiment in small: film reviews are to be continued in a good mood, judged by a classifier.

    python -m benchmarks.imdb prepare path=aclImdb          texts and two classifiers, in runs/imdb
    lmgym train lmgym/recipes/imdb_ppo.yaml                       one run
    python -m benchmarks.imdb run --seeds 20 21             both recipes by seeds, and the table
    python -m benchmarks.imdb run KEY=VALUE ... --seeds 22  with overrides, which stand before the options

Who sees which reviews, by a hash of the review (`SLICES`): classifier A, whose opinion is the reward; classifier B,
which judges what came of it; the policy, for its warm start and its prompts; validation. The test split belongs to the
table alone: its openings are the prompts, what follows them the reference texts.

Both recipes' RL stages begin from the same model of a seed, their common warm start, which is trained once. The judge's
opinion is compared prompt by prompt before and after the RL stage, with the same random numbers; so is the
policy's own likelihood of the reference texts. Perplexity is stated per token of the policy (which has 512, about 3.6 a
word) and per word.
"""

import argparse
import json
import math
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.training import ROOT, train
from lmgym.batch import collate
from lmgym.config.build import load_config
from lmgym.config.yaml import read_yaml, write_yaml
from lmgym.experiments.compare import compare_models
from lmgym.models.load import load_policy
from lmgym.rollouts.rollout import demonstrate
from lmgym.stats.intervals import Interval, student_t
from lmgym.tasks.base import hash_fraction, load_task
from lmgym.training.setup import actor_of, held_out_examples
from lmgym.types import Example

FOLDER = Path("runs/imdb")
RECIPES = {"ppo": ROOT / "lmgym" / "recipes" / "imdb_ppo.yaml", "grpo": ROOT / "lmgym" / "recipes" / "imdb_grpo.yaml"}
SLICES = {"classifier_a": (0.0, 0.3), "classifier_b": (0.3, 0.6), "train": (0.6, 0.94), "validation": (0.94, 1.0)}
OPENING = 8, 24  # words of a prompt at least and at most; it ends where a sentence does
CONTEXT, REST = 8, 32  # words of a passage's prompt; of its reference, and of an opening's
JUDGE = "judge"  # the metric's name in the recipes
WARM = "warm."  # what an override of the warm start begins with
SENTENCE_END = re.compile(r"[.!?][\"')]*$")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, dest="verb")
    preparing = verbs.add_parser("prepare", help="write the texts and train both classifiers")
    preparing.add_argument("settings", nargs="*", metavar="key=value", help="arguments of the task imdb, as path=")
    running = verbs.add_parser("run", help="train both recipes and print the table")
    running.add_argument("--seeds", type=int, nargs="+", default=[20, 21])
    running.add_argument("--only", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    running.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for the RL stage; warm.key=value for the first"
    )
    for verb in (preparing, running):
        verb.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.verb == "prepare":
        prepare(given.folder, given.settings)
    else:
        print(table([run(name, seed, given) for seed in given.seeds for name in given.only]))


def prepare(folder: Path, settings: Sequence[str]) -> None:
    """Write openings_{train,validation,test}.jsonl and passages_train.jsonl, and train the two classifiers."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {key: yaml.safe_load(value) for key, value in (one.split("=", 1) for one in settings)}
    reviews = load_task("imdb", "train", **{**known, "validation": 0.0})
    classifier = runpy.run_path(str(ROOT / "examples" / "train_classifier.py"))["main"]
    parts = {"test": load_task("imdb", "test", **{"test_size": None, **known})}
    for name in ("train", "validation"):
        low, high = SLICES[name]
        parts[name] = [review for review in reviews if low <= hash_fraction(review.meta["review"]) < high]
    for name, own in parts.items():
        rows = [row for review in own for row in [opening(review)] if row]
        write(folder / f"openings_{name}.jsonl", rows)
        print(f"{name}: {len(own)} reviews, {len(rows)} openings")
    rows = [row for review in parts["train"] for row in passages(review)]
    write(folder / "passages_train.jsonl", rows)
    print(f"train: {len(rows)} passages", flush=True)
    for place, name in enumerate(("classifier_a", "classifier_b")):
        low, high = map(str, SLICES[name])
        chosen = ["--slice", low, high, "--seed", str(place), "--out", str(folder / name)]
        classifier(["imdb", *settings, "validation=0.0", "--text", "review", *chosen])


def words_of(review: str) -> list[str]:
    """The words of a review, without the line breaks of the page that it was on."""
    return review.replace("<br />", " ").split()


def opening(review: Example) -> dict[str, Any] | None:
    """A prompt of whole sentences from the review's beginning, and the words behind it as reference; None where no
    sentence ends between OPENING's words, or too little follows."""
    words = words_of(review.meta["review"])
    least, most = OPENING
    end = next((n for n in range(least, most + 1) if n <= len(words) and SENTENCE_END.search(words[n - 1])), None)
    if end is None or len(words) < end + REST // 2:
        return None
    return _row(review, words[:end], words[end : end + REST])


def passages(review: Example) -> Iterator[dict[str, Any]]:
    """All of a review but its first words: REST words at a time, each with the CONTEXT words before it."""
    words = words_of(review.meta["review"])
    for begin in range(CONTEXT, len(words), REST):
        yield _row(review, words[begin - CONTEXT : begin], words[begin : begin + REST])


def _row(review: Example, before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
    return {"prompt": " ".join(before), "references": " " + " ".join(after), "label": review.meta["label"]}


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


@dataclass(frozen=True)
class Outcome:
    """One run, before and after its RL stage, on the test prompts.

    `sentiment`: the judge's probability; `rise`: the difference, prompt by prompt. `perplexity`: per token of the
    reference texts; `growth`, `growth_words`: of the perplexity per token and per word, as shares.
    """

    recipe: str
    seed: int
    sentiment: tuple[Interval, Interval]
    rise: Interval
    perplexity: tuple[float, float]
    growth: Interval
    growth_words: Interval
    seconds: float


def warm_start(seed: int, folder: Path, overrides: Sequence[str] = ()) -> Path:
    """The recipes' first stage, which they have in common, as a run of its own; returns its model."""
    out = folder / f"warm-{seed}"
    if not (out / "summary.json").is_file():
        train(halves("ppo", folder)[0], [f"seed={seed}", f"out={out}", *overrides])
    return out / "final"


def halves(name: str, folder: Path) -> tuple[Path, Path]:
    """The two stages of a recipe as a recipe each, reading what `prepare` has written to a folder."""
    tree = read_yaml(RECIPES[name])
    tree["task"]["path"] = f"{folder}/openings_{{split}}.jsonl"
    tree["rewards"]["learned_reward"]["model"] = str(folder / "classifier_a")
    tree["evaluation"]["metrics"][JUDGE]["model"] = str(folder / "classifier_b")
    first, second = ({key: value for key, value in stage.items() if key != "name"} for stage in tree.pop("stages"))
    passages = {**tree["task"], "path": f"{folder}/passages_{{split}}.jsonl"}
    held_out = {**tree["evaluation"], "final_split": None, "metrics": {}, "task": tree["task"]}
    paths = []
    for stage, half in (("warm", {**first, "task": passages, "rewards": {}, "evaluation": held_out}), (name, second)):
        paths.append(folder / f"{stage}.yaml")
        paths[-1].write_text(write_yaml({**tree, **half}), encoding="utf-8")
    return paths[0], paths[1]


def run(name: str, seed: int, given: Any) -> Outcome:
    """Train a recipe's RL stage from the warm model of its seed, and measure what it did."""
    folder = given.folder.absolute()
    own = [one for one in given.overrides if not one.startswith(WARM)]
    warm = [one.removeprefix(WARM) for one in given.overrides if one.startswith(WARM)]
    model, out = warm_start(seed, folder, warm), folder / f"{name}-{seed}"
    settings = [f"seed={seed}", f"out={out}", f"policy.model={model}", *own]
    outcome = measure(name, seed, out, train(halves(name, folder)[1], settings))
    print(outcome, file=sys.stderr, flush=True)
    return outcome


def measure(name: str, seed: int, folder: Path, seconds: float) -> Outcome:
    """Compare the model that a run began from with its final one."""
    judged = compare_models(str(folder / "recipe.yaml"), str(folder)).metrics[JUDGE]
    sums = [likelihoods(folder, weights) for weights in (None, folder / "final")]
    tokens, words = (sum(row[place] for row in sums[0]) for place in (1, 2))
    nats = [-sum(row[0] for row in own) for own in sums]
    return Outcome(
        recipe=name,
        seed=seed,
        sentiment=(judged.first, judged.second),
        rise=judged.difference,
        perplexity=(math.exp(nats[0] / tokens), math.exp(nats[1] / tokens)),
        growth=growth(sums, 1, tokens),
        growth_words=growth(sums, 2, words),
        seconds=seconds,
    )


@torch.no_grad()
def likelihoods(folder: Path, weights: Path | None) -> list[tuple[float, int, int]]:
    """Of each test reference under the model in `weights`, or else the one that the run began from: its log-likelihood
    behind its prompt (nats, without the end of sequence, which the texts were cut at), its tokens, its words."""
    config = load_config(folder / "recipe.yaml")
    examples = held_out_examples(config, config.evaluation.final_split)
    policy = load_policy(config.policy, config.seed, weights)
    actor = actor_of(config, policy)
    batch = collate(demonstrate(list(enumerate(examples)), actor, (0, "likelihoods")), policy.pad_id)
    last = batch.actions.long().cumsum(1) == batch.actions.sum(1, keepdim=True)
    counted = batch.actions & ~last
    sums = (policy.compute_logprobs_no_grad(batch).logprobs.double() * counted).sum(1).tolist()
    counts = counted.sum(1).tolist()
    return [(s, n, len(e.references[0].split())) for s, n, e in zip(sums, counts, examples, strict=True)]


def growth(sums: Sequence[Sequence[tuple[float, int, int]]], unit: int, total: int) -> Interval:
    """How much the perplexity per token (unit 1) or word (2) of all texts has grown, as a share; the interval is
    over texts, of the difference in nats, with the number of tokens or words held fixed."""
    lost = [(one[0] - other[0]) * len(sums[0]) / total for one, other in zip(*sums, strict=True)]
    found = student_t(lost)
    return Interval(*(math.exp(value) - 1 for value in (found.mean, found.low, found.high)), found.count)


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a row a run, and the mean over seeds of each recipe with Student's interval."""
    lines = [
        "| recipe | seed | sentiment before | after | rise | perplexity per token | growth | growth per word | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        lines.append(
            f"| {one.recipe} | {one.seed} | {one.sentiment[0]} | {one.sentiment[1]} | {one.rise} "
            f"| {one.perplexity[0]:.3f} -> {one.perplexity[1]:.3f} | {percent(one.growth)} "
            f"| {percent(one.growth_words)} | {one.seconds:.0f} |"
        )
    for name in dict.fromkeys(one.recipe for one in outcomes):
        own = [one for one in outcomes if one.recipe == name]
        rise, grown, per_word = (
            student_t([getattr(one, key).mean for one in own]) for key in ("rise", "growth", "growth_words")
        )
        lines.append(f"| {name} | mean | | | {rise} | | {percent(grown)} | {percent(per_word)} | |")
    return "\n".join(lines)


def percent(share: Interval) -> str:
    """A share with its interval, in per cent."""
    if math.isnan(share.low):  # one seed
        return f"{100 * share.mean:.1f} % [no interval]"
    return f"{100 * share.mean:.1f} % [{100 * share.low:.1f}, {100 * share.high:.1f}]"


if __name__ == "__main__":
    main()
