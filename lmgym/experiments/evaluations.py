"""`lmgym eval`: one model answers held-out examples; the result as a table, and as a file beside its run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmgym import __version__
from lmgym.core.errors import LmgymError
from lmgym.experiments.named_models import NamedModel
from lmgym.logs.console import Console
from lmgym.logs.formatting import json_text
from lmgym.logs.writer import disk_errors, make_folder
from lmgym.rollouts.evaluate import EvaluationSection
from lmgym.rollouts.rollout import groups_of
from lmgym.stats.intervals import Interval
from lmgym.training.planning.lengths import check_lengths, fitting_lengths
from lmgym.training.planning.preflight import check_cut, cut_prompts
from lmgym.training.setup import actor_of, evaluate_actor, held_out_examples, held_out_rewards
from lmgym.types import Episode

FOLDER = "evaluations"  # in a run folder


@dataclass(frozen=True)
class EvaluationRecord:
    """What was evaluated, how, and each metric with its 95% interval.

    Example: evaluate_model(find_model("runs/a"), Console()).metrics["final_answer"] -> Interval(mean=0.61, ...)"""

    model: str  # as the user named it
    recipe: str  # the recipe or run that says how it is asked, as the user named it
    weights: str | None  # their folder; None: the model of the recipe, untrained
    base: str  # the recipe's policy.model
    task: str
    split: str
    prompts: int
    samples: int  # answers to each prompt
    decoding: dict[str, Any]
    overrides: list[str]
    seed: int
    compute: str
    date: str  # UTC, ISO 8601
    lmgym: str  # its version
    metrics: dict[str, Interval]
    notes: list[str]

    def text(self) -> str:
        """The record as JSON; NaN and infinity are null."""
        return json_text(asdict(self))

    def write(self, run: Path) -> Path:
        """Write the record into the run's folder evaluations/, to a file of its own; returns its path."""
        place = Path(self.weights).name if self.weights else "untrained"
        stem = f"{place}-{self.split}-{self.date.replace(':', '').replace('-', '')[:15]}"
        folder, number = run / FOLDER, 1
        with disk_errors(folder):
            make_folder(folder)
            while True:
                path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
                try:
                    with path.open("x", encoding="utf-8") as file:
                        file.write(self.text())
                    return path
                except FileExistsError:  # of the same second
                    number += 1


def evaluate_model(
    named: NamedModel, console: Console, samples: int | None = None, recipe: str = "", overrides: Sequence[str] = ()
) -> EvaluationRecord:
    """Evaluate a model as its recipe's `evaluation:` section says; `samples` is the number of answers to each prompt.

    With `samples` above 1 and a greedy evaluation section, answers are sampled at the temperature of the training,
    since greedy ones would all be equal. `recipe` and `overrides` are only recorded. Raises LmgymError if the data, the
    model or the decoding do not fit each other.

    Example: evaluate_model(find_model("runs/quickstart"), Console(), samples=8).metrics["final_answer/pass@8"]"""
    # 1. Data and decoding, before the model is loaded.
    config = named.config
    stage, section = config.stages[-1], config.evaluation
    section = section if samples is None else with_samples(section, samples, stage.sampling.temperature, overrides)
    config = replace(config, evaluation=section)
    check_cut(config)
    examples, rewards = held_out_examples(config), held_out_rewards(config, stage)
    # 2. The model and its answers.
    policy = named.load()
    notes = list[str]()
    examples = fitting_lengths(examples, section.task or stage.task, config, stage, policy, notes)
    notes += [cut] if (cut := cut_prompts(examples, config.policy, policy)) else []
    check_lengths(examples, config, stage, policy)
    decoding = section.decoding(stage.sampling)
    answers = (
        "greedy" if not decoding.temperature and not decoding.generation else f"temperature {decoding.temperature:g}"
    )
    several = f"{section.samples} answers" if section.samples > 1 else "one answer"
    console.say(f"{named.name}: {len(examples)} prompts of {section.split}, {several} each ({answers})")
    for note in notes:
        console.say(note)
    result = evaluate_actor(config, actor_of(config, policy), examples, rewards)
    if equal := equal_answers(section, groups_of(result.episodes)):
        console.say(*equal)
        notes += equal
    weights = None if named.weights is None else str(named.weights)
    asked = (section.task or stage.task)["name"], section.split, len(examples), section.samples, asdict(decoding)
    compute, date = str(policy.compute).removeprefix("torch."), datetime.now(UTC).isoformat(timespec="seconds")
    return EvaluationRecord(
        named.name, recipe or named.name, weights, config.policy.model, *asked, list(overrides), config.seed, compute,
        date, __version__, result.results, notes,
    )  # fmt: skip


def with_samples(
    section: EvaluationSection, samples: int, temperature: float, overrides: Sequence[str] = ()
) -> EvaluationSection:
    """The section with so many answers to each prompt. Several are sampled, at `temperature` if the section is greedy;
    raises LmgymError if `overrides` ask for several greedy ones, which would be equal."""
    if samples < 1:
        raise LmgymError(f"--samples is {samples}; it must be 1 or more")
    if samples == 1 or section.temperature:
        return replace(section, samples=samples)
    if any(override.startswith("evaluation.temperature=") for override in overrides) or not temperature:
        raise LmgymError(
            f"--samples {samples} at temperature 0 would give {samples} equal answers; give evaluation.temperature=1"
        )
    return replace(section, samples=samples, temperature=temperature)


def equal_answers(section: EvaluationSection, *evaluations: Sequence[Sequence[Episode]]) -> list[str]:
    """A sentence if several answers to each prompt are always the same one, since none was sampled: pass@k and the like
    then say nothing. In a game of chance greedy answers may differ, and there is no sentence.

    Example: equal_answers(EvaluationSection(samples=4), groups) -> ["the 4 answers to each prompt are equal: ..."]"""
    every = [group for groups in evaluations for group in groups]
    answers = [{tuple(tuple(turn.action_ids) for turn in episode.turns) for episode in group} for group in every]
    if section.samples == 1 or section.temperature or any(len(own) > 1 for own in answers):
        return []
    return [
        f"the {section.samples} answers to each prompt are equal: evaluation.temperature is 0; "
        "evaluation.temperature=1 samples them"
    ]
