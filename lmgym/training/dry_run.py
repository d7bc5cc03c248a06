"""`lmgym check RECIPE`: a dry run that finds what would spoil a training run, before it starts.

First it estimates the memory, from the configuration and the lengths of a few prompts (memory.py). Then, if the weights
fit here, it samples once and reports lengths, stops, rewards, and about how long a step will take (step_time.py).
Findings that would spoil the run are marked with "!". It runs in one process, also for a run of several ranks.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from lmgym.config.schema import Config, Stage
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.output import columns_of
from lmgym.logs.formatting import table_lines
from lmgym.logs.records import environment_numbers
from lmgym.models.device import expected_device, memory_here
from lmgym.models.load import load_tokenizer
from lmgym.models.policy import Policy
from lmgym.models.shapes import Shapes, shapes_of
from lmgym.rewards.base import build_rewards
from lmgym.rollouts.given_answers import labelled_steps, rated_answers
from lmgym.rollouts.play import play
from lmgym.rollouts.rollout import demonstrate, groups_of
from lmgym.tasks.streamed import first_of
from lmgym.text.chat import answer_ids, decoder_answer_ids, prompt_ids, source_ids, start_ids
from lmgym.training.engines import check_engine, engine_sentence, make_engine
from lmgym.training.machine import choose_machine
from lmgym.training.memory import estimate, resident_bytes, weights_bytes
from lmgym.training.memory_fit import LESS, Needs, exchange_sentence, fit_sentence, other_form
from lmgym.training.memory_table import size
from lmgym.training.preflight import check_model, cut_prompts, teacher_section
from lmgym.training.run import Data
from lmgym.training.setup import (
    load_data,
    make_actor,
    make_envs,
    prove_policy,
    trained_policy,
    unguarded_sentence,
)
from lmgym.training.step_time import (
    Measured,
    Sampled,
    TimedEngine,
    crowding,
    measure_passes,
    step_seconds,
    threads_of_a_rank,
    time_sentence,
)
from lmgym.types import Episode, Example

EXAMPLES = 8
GROUP = 4  # answers per prompt where the algorithm itself asks for fewer


@dataclass
class Report:
    """Lines to print; `problems` counts those that would spoil the run.

    Example:
        >>> report = Report(); report.note("prompts: 20 tokens"); report.warn("no answer ended"); report.problems
        1
    """

    lines: list[str] = field(default_factory=list)
    problems: int = 0

    def note(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def warn(self, text: str) -> None:
        self.lines.append(f"! {text}")
        self.problems += 1


def check(config: Config, folder: Path | None = None, load: bool = True, ranks: int = 1) -> int:
    """Print the report of a recipe (or of a run folder's newest model), to be trained by so many `ranks`; returns 1 if
    anything would spoil the run, else 0. Without `load` it ends with the estimate of memory. Raises LmgymError where
    the run would not even start."""
    report = Report()
    check_engine(config)
    data = load_data(config)
    check_model(config, data.training)
    fits, backward_fits = _memory(report, config, data, ranks)
    print("\n".join(report.lines), flush=True)
    report.lines.clear()
    if load and fits:
        policy = trained_policy(config, folder)
        if ranks > 1 and folder is None and policy.device.type == "cpu":
            torch.set_num_threads(threads_of_a_rank(config, ranks))
        _model(report, policy)
        report.note(engine_sentence(config, choose_machine(config, folder)))
        for proof in prove_policy(config, policy, make_engine(config, policy)):
            (report.note if proof.holds else report.warn)(proof.sentence)
        held_out = data.held_out[config.evaluation.split]
        report.note(f"evaluation: {len(held_out)} prompts of split '{config.evaluation.split}'")
        _cut(report, config, policy, held_out)
        for index, stage in enumerate(config.stages):
            report.lines.append(f"stage {stage.name}: {type(stage.algorithm).__name__} on {stage.task['name']}")
            verdict = index == 0 or folder is not None
            tried = _stage(report, config, stage, data.training[index], policy, verdict)
            if backward_fits[index]:
                _time(report, config, stage, policy, tried, ranks)
            else:
                report.note("seconds of a step: not measured, since one process has no memory here for a backward pass")
        print("\n".join(report.lines))
    ready = "looks ready to train" if load and fits else "no model was loaded"
    print(ready if not report.problems else f"{report.problems} thing(s) to look at, marked with !")
    return 1 if report.problems else 0


def _memory(report: Report, config: Config, data: Data, ranks: int) -> tuple[bool, list[bool]]:
    """Report the memory of each stage, and warn if there is less here. Returns whether the weights fit here, and
    whether a backward pass of one process does, for each stage."""
    shapes = shapes_of(config.policy)
    device, compute = expected_device(config.policy.device, config.policy.precision, shapes.parameters)
    here, on_cpu = memory_here(device), device == "cpu"
    process = resident_bytes() if on_cpu else 0
    other = other_form(config) if ranks > 1 else None
    peaks, other_peaks, backward_fits = list[float](), list[float](), list[bool]()
    for index, stage in enumerate(config.stages):
        prompt = _longest_prompt(config, stage, shapes, data.training[index][:EXAMPLES])
        estimated = partial(
            estimate, stage=stage, shapes=shapes, prompt=prompt, first=index == 0, compute=compute, on_cpu=on_cpu,
            teacher=_teacher(config, stage), process=process,
        )  # fmt: skip
        found = estimated(config, ranks=ranks)
        peaks.append(found.peak)
        other_peaks += [] if other is None else [estimated(other, ranks=ranks).peak]
        backward_fits.append(here is None or estimated(config).total("update") <= here)
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        report.lines.append(
            f"memory, estimated for stage {stage.name}: {size(found.peak)} at most{each}, on {device}, with prompts of "
            f"{prompt} tokens and {shapes.parameters:,} parameters"
        )
        head, rows = table_lines(("part", *found.phases), found.rows(), columns_of(sys.stdout))
        report.lines += [*head[:1], *(line for row in rows for line in row)]
        if ranks > 1:
            report.note(exchange_sentence(config, stage, shapes, ranks))
        elif here is not None and found.peak > here:
            report.warn(f"that is more than the {size(here)} here; {LESS}")
    if ranks > 1:
        sharded = config.distributed.sharding == "fsdp"
        _fit(report, Needs(ranks, device, here, sharded, max(peaks), max(other_peaks, default=None)))
    weights = weights_bytes(config, shapes, compute)
    if here is None or weights <= here:
        return True, backward_fits
    report.warn(f"the weights alone take {size(weights)}, and there are {size(here)} here: nothing more can be tried")
    return False, backward_fits


def _longest_prompt(config: Config, stage: Stage, shapes: Shapes, examples: Sequence[Example]) -> int:
    """Tokens of the longest of these prompts."""
    if not getattr(registry.get("env", stage.env["name"]), "needs_data", True):
        # The environment writes the prompts while it plays: assume that they fill the context.
        return max((shapes.context or 1024) - stage.sampling.max_new_tokens, 1)
    tokenizer, section = load_tokenizer(config.policy), config.policy
    read = source_ids if shapes.encoder_decoder else prompt_ids
    return max(len(read(tokenizer, example.prompt, section.template, section.cut)) for example in examples)


def _fit(report: Report, needs: Needs) -> None:
    """Report whether several ranks fit here."""
    sentence = fit_sentence(needs)
    if needs.fits(needs.own):
        report.lines.append(sentence)
    else:
        report.warn(sentence)
    gpus = torch.cuda.device_count() if needs.device == "cuda" else 0
    if 0 < gpus < needs.ranks:
        report.warn(f"{needs.ranks} ranks and {gpus} GPU(s) here: on this machine alone, ranks would share a GPU; on "
                    f"several machines each needs one of its own")  # fmt: skip


def _teacher(config: Config, stage: Stage) -> Shapes | None:
    """The model that is held beside the policy as its teacher."""
    teacher = stage.algorithm.requirements.teacher
    if not teacher or teacher == "self":
        return None
    return shapes_of(config.policy if teacher == "initial" else teacher_section(config.policy, teacher))


def _model(report: Report, policy: Policy) -> None:
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters())
    compute = str(policy.compute).removeprefix("torch.")
    report.lines.append(f"model: {parameters:,} parameters, {trained:,} trained, {policy.device}, {compute} compute")
    report.note(policy.path_sentence)
    names = [policy.tokenizer.convert_ids_to_tokens(stop) for stop in policy.stop_ids]
    report.note(
        f"answers end at: {', '.join(f'{name} ({stop})' for name, stop in zip(names, policy.stop_ids, strict=True))}"
    )
    if policy.tokenizer.pad_token_id is not None and policy.tokenizer.pad_token_id in policy.stop_ids:
        report.note(
            "pad and end-of-sequence share an id; harmless here: masks come from lengths, and the end is trained"
        )
    if len(policy.tokenizer) > policy.vocabulary:
        report.warn(f"the tokenizer has {len(policy.tokenizer)} tokens, the model's head only {policy.vocabulary}")


def _stage(
    report: Report, config: Config, stage: Stage, examples: Sequence[Example], policy: Policy, verdict: bool
) -> Sampled:
    """Report a stage's data and a few of its answers, and return these."""
    few = examples[:EXAMPLES]
    report.note(f"{len(examples)} training examples, {stage.prompts_per_step} prompts a step, {stage.steps} steps "
                f"({stage.prompts_per_step * stage.steps / len(examples):.2f} epochs)")  # fmt: skip
    if getattr(registry.get("env", stage.env["name"]), "needs_data", True):  # else prompts come from the environment
        _cut(report, config, policy, first_of(examples))
        _lengths(report, config, stage, policy, few)
    if sentence := unguarded_sentence(stage.env):
        report.note(sentence)
    engine = TimedEngine(make_engine(config, policy))
    actor, path = make_actor(config, policy, engine), (config.seed, "check")
    if stage.algorithm.requirements.answers == "rated":
        return Sampled(rated_answers(list(enumerate(few)), actor), len(few))
    if stage.algorithm.requirements.answers == "steps":
        return Sampled(labelled_steps(list(enumerate(few)), actor, stage.algorithm.requirements.separator), len(few))
    if stage.algorithm.requirements.answers == "references":
        return Sampled(demonstrate(list(enumerate(few)), actor, path, make_envs(config, stage.env)), len(few))
    group = max(stage.algorithm.group_size, GROUP)
    prompts = [(number, example) for number, example in enumerate(few) for _ in range(group)]
    envs, rewards = make_envs(config, stage.env), build_rewards(stage.rewards)
    episodes = play(prompts, actor, stage.sampling, path, envs, rewards, config.reward_timeout)
    _answers(report, stage, episodes, verdict=verdict)
    return Sampled(episodes, len(prompts), engine.seconds)


def _time(report: Report, config: Config, stage: Stage, policy: Policy, tried: Sampled, ranks: int) -> None:
    """Report about how long a step will take, from a few answers."""
    try:
        passes = measure_passes(stage, policy, tried.episodes)
    except LmgymError as error:
        report.note(f"seconds of a step: not measured ({error})")
        return
    slower, teacher = crowding(policy, ranks), _teacher(config, stage)
    size_of_teacher = 0.0
    if stage.algorithm.requirements.teacher == "self":
        size_of_teacher = 1.0
    elif teacher is not None:
        size_of_teacher = teacher.parameters / sum(parameter.numel() for parameter in policy.model.parameters())
    measured = Measured(tried.answers, *(slower * seconds for seconds in (tried.seconds, *passes)))
    expected = step_seconds(config, stage, measured, ranks, size_of_teacher)
    report.note(time_sentence(stage, measured, *expected, ranks))


def _cut(report: Report, config: Config, policy: Policy, examples: Sequence[Example]) -> None:
    if sentence := cut_prompts(examples, config.policy, policy):
        report.note(sentence)


def _lengths(report: Report, config: Config, stage: Stage, policy: Policy, examples: Sequence[Example]) -> None:
    read = source_ids if policy.encoder_decoder else prompt_ids
    template, cut = config.policy.template, config.policy.cut
    given = len(start_ids(policy.tokenizer, config.policy.answer_start, policy.encoder_decoder))
    own = 0 if policy.encoder_decoder else given
    lengths = [own + len(read(policy.tokenizer, example.prompt, template, cut)) for example in examples]
    report.note(f"prompt tokens: {min(lengths)} to {max(lengths)}; context {policy.context or 'without limit'}")
    # What an answer shares its context with.
    before = len(policy.decoder_start) + given if policy.encoder_decoder else max(lengths)
    room = None if policy.context is None else policy.context - before
    if room is not None and room < stage.sampling.max_new_tokens:
        report.warn(f"the longest of {len(examples)} prompts leaves room for {max(room, 0)} new tokens, fewer than "
                    f"sampling.max_new_tokens ({stage.sampling.max_new_tokens})")  # fmt: skip
    references = [
        len(decoder_answer_ids(policy.tokenizer, text, given > 0))
        if policy.encoder_decoder
        else len(answer_ids(policy.tokenizer, example.prompt, text, config.policy.template, given > 0))
        for example in examples
        for text in example.references
    ]
    if references:
        report.note(f"reference tokens: {min(references)} to {max(references)}")
        if max(references) > stage.sampling.max_new_tokens:
            report.warn(f"a reference has {max(references)} tokens, more than sampling.max_new_tokens "
                        f"({stage.sampling.max_new_tokens}): right answers would be cut off")  # fmt: skip


def _answers(report: Report, stage: Stage, episodes: list[Episode], verdict: bool) -> None:
    """Report how the answers end and what they earn; as a warning only if no earlier stage trains the model first."""
    complain = report.warn if verdict else report.note
    if not verdict:
        report.note("(what follows is of the model before the stages ahead of this one have trained it)")
    count = len(episodes)
    ended_by_length = [e for e in episodes if any(turn.stop == "length" for turn in e.turns)]
    cut = sum(not episode.terminated for episode in ended_by_length) / count  # others are moves
    fixed = stage.sampling.min_new_tokens == stage.sampling.max_new_tokens  # then they are meant to be
    (complain if cut > 0.5 and not fixed else report.note)(f"answers cut off at max_new_tokens: {cut:.0%} of {count}")
    if full := sum(episode.overflowed for episode in episodes):
        say = complain if full > 0.1 * count else report.note
        say(f"episodes that filled the model's context: {full} of {count}; fewer turns (env.max_turns), shorter texts "
            "of the environment or a longer context would help")  # fmt: skip
    if invalid := environment_numbers(episodes).get("invalid"):
        valid = sum(number == 0 for number in invalid)
        notes = [str(turn.info.get("reason")) for e in episodes for turn in e.turns if turn.info.get("invalid")]
        why = f"; the first that was not: {notes[0]}" if notes else ""
        (report.note if valid else complain)(f"valid actions: {valid} of {len(invalid)} sampled{why}")
    mean = sum(episode.score for episode in episodes) / count
    values = sorted({round(episode.score, 4) for episode in episodes})
    report.note(f"reward: mean {mean:.3f}, from {values[0]} to {values[-1]}")
    groups = groups_of(episodes)
    equal = sum(len({episode.score for episode in group}) == 1 for group in groups) / len(groups)
    if stage.algorithm.group_size > 1 and equal == 1.0:
        complain(f"in all {len(groups)} groups every answer earned the same: a group baseline would learn nothing; "
                    "warm-start the model, or make the reward finer")  # fmt: skip
    else:
        report.note(f"groups whose answers all earned the same: {equal:.0%} of {len(groups)}")
    shown = episodes[0].text.strip().replace("\n", "⏎")[:100]
    report.note(f"an answer: {shown!r} (reward {episodes[0].score:.3f}, stopped by {episodes[0].turns[-1].stop})")
