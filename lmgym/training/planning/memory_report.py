"""What `lmgym check` says of memory. A task's prompts are read; how long an environment's episodes become shows only
when some are played, so their stages are estimated after that, with what they would take at worst as a second line. So
are those of a model that must be tried, since only then it is known whether it takes the fast path."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch

from lmgym.config.schema import Config, Stage
from lmgym.core import registry
from lmgym.core.output import columns_of
from lmgym.logs.formatting import table_lines
from lmgym.models.device import choose_tokens_per_forward, expected_device, memory_here
from lmgym.models.shapes import Shapes, shapes_of
from lmgym.text.chat import prompt_ids, source_ids
from lmgym.training.planning.memory import estimate, resident_bytes, weights_bytes
from lmgym.training.planning.memory_fit import Needs, exchange_sentence, fit_sentence, other_form
from lmgym.training.planning.memory_remedy import remedy_sentence
from lmgym.training.planning.memory_table import Estimate, size
from lmgym.training.planning.preflight import teacher_section
from lmgym.types import Episode, Example


class Lines(Protocol):
    """Where it is said: `note` for a fact, `warn` for what would spoil the run."""

    lines: list[str]

    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...


@dataclass
class Memory:
    """The memory of a recipe's stages on this machine, for a run of so many `ranks`. Make it before a model is loaded:
    it looks at what the process takes without one.

    Example: Memory(config, report, tokenizer).of_examples(0, data.training[0][:8])"""

    config: Config
    report: Lines
    tokenizer: Any
    ranks: int = 1
    backward_fits: dict[int, bool] = field(default_factory=dict)
    """By stage: whether a backward pass of one process fits here."""
    fast: bool = False
    """Whether the model takes the fast path; of one that must be tried it is known once it is loaded."""

    def __post_init__(self) -> None:
        section = self.config.policy
        self.shapes = shapes_of(section)
        self.device, self.compute = expected_device(section.device, section.precision, self.shapes.parameters)
        self.here = memory_here(self.device)
        self.process = resident_bytes() if self.device == "cpu" else 0
        self.other = other_form(self.config) if self.ranks > 1 else None
        self.peaks: list[float] = []
        self.other_peaks: list[float] = []

    def waits(self, stage: Stage) -> bool:
        """Whether a loaded model tells more of the stage: the way it goes, or how long the episodes are."""
        return stage.is_played or self.shapes.tried

    def weights_fit(self) -> bool:
        """Whether the weights alone fit here; it is said if they do not."""
        weights = weights_bytes(self.config, self.shapes, self.compute)
        if self.here is None or weights <= self.here:
            return True
        self.report.warn(
            f"the weights alone take {size(weights)}, and there are {size(self.here)} here: nothing more can be tried"
        )
        return False

    def of_examples(self, index: int, examples: Sequence[Example]) -> None:
        """Estimate a stage whose prompts are the task's, from some of them; so are answers that are not sampled."""
        section, read = self.config.policy, source_ids if self.shapes.encoder_decoder else prompt_ids
        lengths = [len(read(self.tokenizer, one.prompt, section.chat_template_kwargs, section.cut)) for one in examples]
        answer = longest_given(self.config, self.config.stages[index], examples, self.tokenizer, self.shapes)
        self._say(index, max(lengths), answer, "" if answer is None else f", given answers of at most {answer} tokens")

    def at_worst(self, index: int) -> None:
        """Estimate a stage of an environment whose episodes are not known, as if they filled the context."""
        self._say(index, self._longest(index))
        bound = _turns(self.config.stages[index])
        self.report.note(f"that is if episodes fill the context; `lmgym check` without --memory plays some{bound}")

    def of_episodes(self, index: int, episodes: Sequence[Episode]) -> None:
        """Estimate a stage from some of its episodes, and say what it would take at worst."""
        rows = [row for episode in episodes for row in episode.rows() if not episode.error]
        if not rows:
            self.at_worst(index)
            return
        stage, longest = self.config.stages[index], self._longest(index)
        prompt = max(len(row[0].source_ids or row[0].prompt_ids) for row in rows)
        rest = 0
        if not self.shapes.encoder_decoder:  # what follows the first prompt, which the answers of a group share
            rest = max(sum(len(t.prompt_ids) + len(t.action_ids) for t in row) - len(row[0].prompt_ids) for row in rows)
        found = self._say(index, prompt, max(rest, stage.sampling.max_new_tokens), f", from {len(episodes)} episodes")
        ceiling = self._estimated(self.config, index, longest, None).peak
        if ceiling > found.peak:
            self.report.note(f"if episodes filled the context, it would be {size(ceiling)}{_turns(stage)}")

    def fit(self) -> None:
        """Report whether several ranks fit here, once all stages are estimated."""
        if self.ranks == 1:
            return
        other, sharded = max(self.other_peaks, default=None), self.config.distributed.sharding == "fsdp"
        needs = Needs(self.ranks, self.device, self.here, sharded, max(self.peaks), other)
        sentence = fit_sentence(needs)
        if needs.fits(needs.own):
            self.report.lines.append(sentence)
        else:
            self.report.warn(sentence)
        gpus = torch.cuda.device_count() if self.device == "cuda" else 0
        if 0 < gpus < self.ranks:
            self.report.warn(
                f"{self.ranks} ranks and {gpus} GPU(s) here: each rank needs a GPU of its own, here or on "
                "another machine, or the run does not start"
            )

    def _longest(self, index: int) -> int:
        """The longest prompt that leaves room for an answer."""
        return max((self.shapes.context or 1024) - self.config.stages[index].sampling.max_new_tokens, 1)

    def _say(self, index: int, prompt: int, answer: int | None = None, source: str = "") -> Estimate:
        """Report the estimate of a stage as a table, and warn if there is less memory here."""
        config, stage = self.config, self.config.stages[index]
        found = self._estimated(config, index, prompt, answer, ranks=self.ranks)
        self.peaks.append(found.peak)
        self.other_peaks += [] if self.other is None else [
            self._estimated(self.other, index, prompt, answer, ranks=self.ranks).peak
        ]  # fmt: skip
        backward = self._estimated(config, index, prompt, answer).total("update")
        self.backward_fits[index] = self.here is None or backward <= self.here
        each = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        self.report.lines.append(
            f"memory, estimated for stage {stage.name}: {size(found.peak)} at most{each}, on {self.device}, with "
            f"prompts of {prompt} tokens and {self.shapes.parameters:,} parameters{source}"
        )
        head, rows = table_lines(("part", *found.phases), found.rows(), columns_of(sys.stdout))
        self.report.lines += [*head[:1], *(line for row in rows for line in row)]
        if self.ranks > 1:
            self.report.note(exchange_sentence(config, stage, self.shapes, self.ranks))
        elif self.here is not None and found.peak > self.here:
            tokens = choose_tokens_per_forward(config.policy.tokens_per_forward, self.device)
            self.report.warn(remedy_sentence(
                config, tokens, found.peak, self.here, lambda other: self._estimated(other, index, prompt, answer).peak
            ))  # fmt: skip
        return found

    def _estimated(self, config: Config, index: int, prompt: int, answer: int | None, ranks: int = 1) -> Estimate:
        stage = config.stages[index]
        shapes = replace(self.shapes, fast=self.shapes.fast or self.fast)
        return estimate(
            config, stage, shapes, prompt, answer=answer, first=index == 0, compute=self.compute,
            on_cpu=self.device == "cpu", teacher=teacher_shapes(config, stage), process=self.process, ranks=ranks,
        )  # fmt: skip


def longest_given(
    config: Config, stage: Stage, examples: Sequence[Example], tokenizer: Any, shapes: Shapes
) -> int | None:
    """Tokens of the longest answer that these examples of a stage hold; None where the policy samples, and for an
    encoder-decoder. Example: longest_given(config, stage, examples, tokenizer, shapes) -> 4"""
    if stage.source.samples or shapes.encoder_decoder:
        return None
    how = tokenizer, config.policy.chat_template_kwargs, config.policy.answer_start
    return max((length for one in examples for length in stage.source.lengths(one, *how)), default=None)


def teacher_shapes(config: Config, stage: Stage) -> Shapes | None:
    """The model that is held beside the policy as its teacher."""
    teacher = stage.algorithm.requirements.teacher
    if not teacher or teacher == "self":
        return None
    return shapes_of(config.policy if teacher == "initial" else teacher_section(config.policy, teacher))


def _turns(stage: Stage) -> str:
    """The key that bounds the turns of the stage's environment, if there is one."""
    kind: Any = registry.get("env", stage.env["name"])
    known = {one.name: one.default for one in fields(kind)} if hasattr(kind, "__dataclass_fields__") else {}
    if "max_turns" not in known:
        return ""
    now = stage.env.get("max_turns", known["max_turns"])
    return f"; env.max_turns ({'no limit' if now is None else now}) bounds the turns of an episode"
