"""Where the answers of a step come from: `Source`, an object that training asks. Imports no torch.

An algorithm names its source (`Requirements.answers`), which is registered under that name. A new kind of data is a
source, the fields of `Example` that it reads, and an algorithm that learns from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lmgym.core import registry, seeds
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rollouts.given_answers import check_labelled, labelled_steps, rated_answers
from lmgym.rollouts.play import Draw, played_by_all
from lmgym.rollouts.rollout import demonstrate
from lmgym.text.chat import answer_ids
from lmgym.text.steps import step_ids
from lmgym.types import Episode, Example


@dataclass(frozen=True)
class Own:
    """The examples of a stage, its name and its algorithm's. Example: Own(examples, "train", "dpo")"""

    examples: Sequence[Example]
    stage: str
    algorithm: str


class Source:
    """Where answers come from. A subclass says how they become episodes; what it leaves out is right for texts that the
    examples of a task hold.

    Example:
        >>> source_of(DPO().requirements).episodes(draw)        # the rated answers of the draw's examples
    """

    samples: ClassVar[bool] = False
    """The policy samples them: there are log-probabilities of the sampler, rewards, and an engine with new weights."""
    of_examples: ClassVar[bool] = True
    """Each example holds all of its answers: no environment gives others, and a group has no size of its own."""
    one: ClassVar[str] = ""
    """What one of them is called; empty for answers of the policy."""
    many: ClassVar[str] = "answers"
    counted: ClassVar[str] = "examples"
    """What is counted where a step is timed."""
    metric: ClassVar[str] = "reward"
    """What an evaluation reports of a stage that learns from them, if it has no reward."""
    judge: ClassVar[str | None] = None
    """The registered judge (training/judgements.py) that measures the policy on held-out answers of this kind."""
    lag: int = 0
    """By how many updates the weights that sampled are older than those that train."""

    def __init__(self, requirements: Any) -> None:
        self.requirements = requirements

    def episodes(self, draw: Draw) -> list[Episode]:
        """An episode for each answer to the prompts, scored. Raises LmgymError for an example that has none."""
        raise NotImplementedError(f"{type(self).__name__} has no episodes()")

    def texts(self, example: Example) -> list[str]:
        """The texts of an example that a stage trains on."""
        return []

    def lengths(self, example: Example, tokenizer: Any, template: Mapping[str, Any], start: str) -> list[int]:
        """The tokens of these texts behind the prompt of a causal model; `start`: of each answer."""
        return [len(answer_ids(tokenizer, example.prompt, text, template, start)) for text in self.texts(example)]

    def answers_to_a_prompt(self, group_size: int) -> int:
        """How many answers a prompt usually has in a step."""
        return group_size

    def check_data(self, own: Own, held_out: Mapping[str, Sequence[Example]]) -> None:
        """Raise LmgymError if a stage cannot learn from its `own` data, or cannot be measured on that of the
        evaluations (by split)."""

    def begin_ahead(self, draw: Callable[[int], Draw], step: int, steps: int) -> None:
        """The answers of a step (of so many `steps`) are there: what the next ones draw first may be begun."""

    def finish(self, following: int) -> None:
        """The update is done, and the step of this number follows: what it draws first must be there."""

    def settle(self) -> None:
        """Finish all that was begun: the engine is asked for something else, or a checkpoint is written."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned. Raises KeyError, TypeError or ValueError for anything else."""

    def close(self) -> None:
        """The stage is over."""


def source_of(requirements: Any) -> Source:
    """The source that an algorithm's requirements name."""
    source: Source = registry.get("source", requirements.answers)(requirements)
    return source


def answered_and_given(
    numbered: list[tuple[int, Example]], share: float, path: Sequence[int | str]
) -> tuple[list[tuple[int, Example]], list[tuple[int, Example]]]:
    """The prompts that the policy answers, and those (on average `share` of all) whose references are taken: drawn for
    each by the path and its number, whatever else the step holds.

    Example: answered_and_given([(0, example)], 0.0, (0, "step", 3, 0)) -> ([(0, example)], [])"""
    if not share:
        return numbered, []
    drawn = seeds.uniforms([seeds.key(*path, "given", number) for number, _ in numbered], 0, 1)[:, 0].tolist()
    answered = [one for one, uniform in zip(numbered, drawn, strict=True) if uniform >= share]
    return answered, [one for one, uniform in zip(numbered, drawn, strict=True) if uniform < share]


@register("source", "policy")
class PolicyAnswers(Source):
    """Answers that the policy samples; rewards and environments score them."""

    samples, of_examples, counted = True, False, "answers"

    def episodes(self, draw: Draw) -> list[Episode]:
        return played_by_all(draw)


@register("source", "references")
class References(Source):
    """The references of the examples, or what the environments' own demonstrators say."""

    of_examples, one, many, counted, metric = False, "reference", "references", "references", "reference_nll"

    def episodes(self, draw: Draw) -> list[Episode]:
        return demonstrate(draw.prompts, draw.actor, draw.key, draw.envs, self.requirements.every_turn)

    def texts(self, example: Example) -> list[str]:
        return list(example.references)


@register("source", "rated")
class RatedAnswers(Source):
    """The rated answers of the examples."""

    one, many, metric, judge = "rated answer", "rated answers", "preference/accuracy", "pairs"

    def episodes(self, draw: Draw) -> list[Episode]:
        return rated_answers(draw.prompts, draw.actor)

    def texts(self, example: Example) -> list[str]:
        return [answer.text for answer in example.rated]

    def answers_to_a_prompt(self, group_size: int) -> int:
        return 2

    def check_data(self, own: Own, held_out: Mapping[str, Sequence[Example]]) -> None:
        """An algorithm that learns from pairs needs one, and a reward model pairs that it is measured on."""
        if not self.requirements.pairs:
            return
        asked = {f"the data of stage '{own.stage}'": own.examples}
        if not self.requirements.makes_policy:
            asked |= {f"the evaluation's split '{split}'": examples for split, examples in held_out.items()}
        for where, examples in asked.items():
            if self.requirements.makes_policy and not any(example.rated for example in examples):
                continue  # `rated_answers` says so
            if not any(len({answer.rating for answer in example.rated}) > 1 for example in examples):
                raise LmgymError(
                    f"{where} has no example with two answers of different ratings, and {own.algorithm} learns from "
                    "such pairs; kto learns from answers that are good or bad alone"
                )


@register("source", "steps")
class LabelledSteps(Source):
    """The labelled steps of the examples' answers."""

    one, many, metric, judge = "steps", "labelled steps", "step/accuracy", "steps"

    def episodes(self, draw: Draw) -> list[Episode]:
        return labelled_steps(draw.prompts, draw.actor, self.requirements.separator)

    def texts(self, example: Example) -> list[str]:
        whole = "".join(step.text + self.requirements.separator for step in example.steps)
        return [whole] if example.steps else []

    def lengths(self, example: Example, tokenizer: Any, template: Mapping[str, Any], start: str) -> list[int]:
        separator = self.requirements.separator
        return [sum(len(step_ids(tokenizer, step.text, separator)) for step in example.steps)]

    def check_data(self, own: Own, held_out: Mapping[str, Sequence[Example]]) -> None:
        """All of its examples have steps, none of which holds the separator."""
        for examples in (own.examples, *held_out.values()):
            for example in examples:
                check_labelled(example, self.requirements.separator)
