"""`lmgym check RECIPE`: a dry run that finds what would spoil a training run, before it starts.

First it estimates the memory, from the configuration and the lengths of a few prompts (planning/memory.py). Then, if
the weights fit here, it samples once and reports lengths, stops, rewards, and about how long a step will take
(planning/step_time.py).

Findings that would spoil the run are marked with "!". It runs in one process, also for a run of several ranks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lmgym.config.schema import Config, Stage
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.envs.placement import make_envs, unguarded_sentence
from lmgym.inference.in_process import make_engine
from lmgym.models.model_info import read_model_info
from lmgym.models.policy import Policy
from lmgym.models.rounding import share_seen_by_nearest
from lmgym.models.sentences import path_sentence
from lmgym.pictures.store import current_store
from lmgym.rewards.building import build_rewards
from lmgym.rollouts.play import Draw, who_moved
from lmgym.tasks.streamed import first_of
from lmgym.text.answer_ends import template_notes
from lmgym.text.template import NO_TOOLS
from lmgym.training.callbacks import make_callbacks
from lmgym.training.checkpoints import checkpoint
from lmgym.training.machine import check_ranks, choose_machine
from lmgym.training.opening import progress_of
from lmgym.training.planning.ahead_plan import report_ahead
from lmgym.training.planning.answer_report import report_answers, report_rewards
from lmgym.training.planning.lengths import without_long
from lmgym.training.planning.memory_plan import plan_sentence, within_memory
from lmgym.training.planning.memory_report import Memory, teacher_shapes
from lmgym.training.planning.picture_disk import Stored, of_data, of_environment, stored_in, too_much
from lmgym.training.planning.preflight import check_fit, check_model, cut_prompts
from lmgym.training.planning.prompt_report import about_prompts, lost_tools, report_prompts
from lmgym.training.planning.report import Report
from lmgym.training.planning.step_time import (
    Measured,
    Sampled,
    TimedEngine,
    as_in_a_step,
    crowding,
    measure_passes,
    moving_share,
    step_seconds,
    threads_of_a_rank,
    time_sentence,
    weights_seconds,
)
from lmgym.training.resuming import fingerprint
from lmgym.training.resuming.resume import check_resumable, listed
from lmgym.training.run import Data
from lmgym.training.setup import engine_sentence, load_data, make_actor, prove_policy, trained_policy
from lmgym.types import Episode, Example

EXAMPLES = 8
GIVEN = 64  # examples that are read at most where nothing is sampled or played: as many as a step has
GROUP = 4  # answers per prompt where the algorithm itself asks for fewer


def check(config: Config, folder: Path | None = None, load: bool = True, ranks: int = 1) -> int:
    """Print the report of a recipe (or of a run folder's newest model), to be trained by so many `ranks`; returns 1 if
    anything would spoil the run, else 0. Without `load` it ends with the estimate of memory. Raises LmgymError where
    the run would not even start."""
    report = Report()
    config.engine.kind.check_installed(config.engine)
    make_callbacks(config.callbacks)
    report.doing("reading the data")
    data = load_data(config)
    if sentence := of_data(kept := stored_in(current_store().folder)):
        report.note(sentence)
    _resumes(report, config, data, folder)
    model = read_model_info(config.policy)
    check_model(config, data.training, model)
    if config.policy.memory_gib is not None:
        planned = within_memory(config, data.training, model.tokenizer, choose_machine(config, folder))
        report.note(plan_sentence(planned))
        policy_section, engine_section = planned.policy_section(config.policy), planned.engine_section(config.engine)
        config = replace(config, policy=policy_section, engine=engine_section)
    memory = Memory(config, report, model.tokenizer, ranks)
    fits = _memory(memory, config, data, load)
    report.show()
    if load and fits:
        _tried(report, config, folder, data, memory, ranks, kept)
    ready = "looks ready to train" if load and fits else "no model was loaded"
    print(ready if not report.problems else f"{report.problems} thing(s) to look at, marked with !")
    return 1 if report.problems else 0


def _tried(
    report: Report, config: Config, folder: Path | None, data: Data, memory: Memory, ranks: int, kept: Stored
) -> None:
    """Load the model, let each stage sample a few answers, and report what comes of it."""
    report.doing("loading the model")
    check_ranks(config.policy, ranks)
    policy = trained_policy(config, folder)
    if ranks > 1 and folder is None and policy.device.type == "cpu":
        torch.set_num_threads(threads_of_a_rank(config, ranks))
    memory.fast = policy.fast
    _model(report, policy)
    report.note(engine_sentence(config.engine, choose_machine(config, folder)))
    report.doing("comparing what is sampled and what is scored with the model's own pass")
    for proof in prove_policy(config.engine, policy, make_engine(config.engine, policy)):
        (report.note if proof.holds else report.warn)(proof.sentence)
    data = without_long(config, data, policy)
    report.note(*data.told)
    check_fit(config, data, policy, lambda cut: None)  # it is said for each stage
    held_out = data.held_out.get(config.evaluation.split, [])
    report.note(f"evaluation: {len(held_out)} prompts of split '{config.evaluation.split}'" if held_out else
                "evaluation: none (evaluation: null)")  # fmt: skip
    report.note(*filter(None, [cut_prompts(held_out, config.policy, policy)]))
    for index, stage in enumerate(config.stages):
        report.lines.append(f"stage {stage.name}: {type(stage.algorithm).__name__} on {stage.task['name']}")
        report.doing("sampling and scoring a few answers" if stage.source.samples else "reading a few answers")
        _rounding(report, policy, stage.optimizer.learning_rate)
        verdict = index == 0 or folder is not None
        tried = _stage(report, config, stage, data.training[index], policy, verdict)
        kept = _pictures(report, config, stage, tried.episodes, kept)
        if stage.is_played:
            memory.of_episodes(index, tried.episodes)
        elif memory.waits(stage):
            memory.of_examples(index, data.training[index][:EXAMPLES])
        if memory.backward_fits[index]:
            report.doing("measuring how long a step takes")
            seconds = _time(report, config, stage, policy, as_in_a_step(stage, tried), ranks)
            if config.engine.ahead and stage.source.samples and seconds is not None:
                report_ahead(report, config, index, seconds, folder)
        else:
            report.note("seconds of a step: not measured, since one process has no memory here for a backward pass")
    if any(map(memory.waits, config.stages)):
        memory.fit()
    report.show()


def _resumes(report: Report, config: Config, data: Data, folder: Path | None) -> None:
    """Report what is not as it was at the newest checkpoint of a run folder. Raises LmgymError if the run could not go
    on from it, as `train` does; for a recipe, if what it reads cannot be read."""
    stands_on = fingerprint.of_recipe(config, data)
    saved = checkpoint.newest(folder / "checkpoints", resumes=True)[0] if folder is not None else None
    found = check_resumable(saved, stands_on, progress_of(saved, len(config.stages)))
    for verdict, sentences in (("free", found.free), ("no longer bit for bit", found.recorded)):
        if sentences:
            report.note(f"since the checkpoint ({verdict}): {listed(sentences)}")


def _memory(memory: Memory, config: Config, data: Data, load: bool) -> bool:
    """Report the memory of each stage, but for those of which more is known once the model is loaded: it then shows
    whether a model takes the fast path, and how long episodes are. Returns whether the weights fit."""
    fits = memory.weights_fit()
    for index, stage in enumerate(config.stages):
        if load and fits and memory.waits(stage):
            continue
        if stage.is_played:
            memory.at_worst(index)
        else:
            memory.of_examples(index, data.training[index][:EXAMPLES])
    if not (load and fits and any(map(memory.waits, config.stages))):
        memory.fit()
    return fits


def _model(report: Report, policy: Policy) -> None:
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters())
    compute = str(policy.compute).removeprefix("torch.")
    report.lines.append(f"model: {parameters:,} parameters, {trained:,} trained, {policy.device}, {compute} compute")
    report.note(path_sentence(policy))
    names = [policy.tokenizer.convert_ids_to_tokens(stop) for stop in policy.stop_ids]
    report.note(
        f"answers end at: {', '.join(f'{name} ({stop})' for name, stop in zip(names, policy.stop_ids, strict=True))}"
    )
    about_end, spoils = ("", "") if policy.encoder_decoder else template_notes(policy.tokenizer)
    report.note(*filter(None, [about_end]))
    report.warn(*filter(None, [spoils]))
    if policy.tokenizer.pad_token_id is not None and policy.tokenizer.pad_token_id in policy.stop_ids:
        report.note(
            "pad and end-of-sequence share an id; harmless here: masks come from lengths, and the end is trained"
        )
    if len(policy.tokenizer) > policy.vocabulary:
        report.warn(f"the tokenizer has {len(policy.tokenizer)} tokens, the model's head only {policy.vocabulary}")


def _rounding(report: Report, policy: Policy, rate: float) -> None:
    """Report how much of the updates passes in bf16 will see, where weights are rounded to nearest."""
    if policy.compute == torch.bfloat16 and policy.rounded is None and policy.parameters() and rate:
        seen = share_seen_by_nearest(policy.parameters(), rate)
        report.note(f"rounding to nearest: passes in bf16 see {seen:.0%} of ten updates of {rate:g} in one direction")


def _stage(
    report: Report, config: Config, stage: Stage, examples: Sequence[Example], policy: Policy, verdict: bool
) -> Sampled:
    """Report a stage's data and a few of its answers, and return these."""
    given = not stage.source.samples and not stage.is_played
    few = examples[: max(EXAMPLES, min(stage.prompts_per_step, GIVEN)) if given else EXAMPLES]
    report.note(f"{len(examples)} training examples, {stage.prompts_per_step} prompts a step, {stage.steps} steps "
                f"({stage.prompts_per_step * stage.steps / len(examples):.2f} epochs)")  # fmt: skip
    if getattr(registry.get("env", stage.env["name"]), "needs_data", True):  # else prompts come from the environment
        report.note(*filter(None, [cut_prompts(first_of(examples), config.policy, policy)]))
        notes, warnings = about_prompts(first_of(examples), policy.tokenizer, stage.env["name"])
        report.note(*notes)
        report.warn(*warnings)
    if sentence := unguarded_sentence(stage.env):
        report.note(sentence)
    engine, source = TimedEngine(make_engine(config.engine, policy)), stage.source
    group = max(stage.algorithm.group_size, GROUP) if source.samples else 1
    prompts = [(number, example) for number, example in enumerate(few) for _ in range(group)]
    actor, envs = make_actor(config.policy, policy, engine), make_envs(stage.env, config.plugins)
    if hasattr(registry.get("env", stage.env["name"]), "template") and lost_tools(envs, few[0], policy.tokenizer):
        report.warn(NO_TOOLS)
    rewards = build_rewards(stage.rewards)
    limits = config.reward_timeout, config.rewards_failed
    draw = Draw(prompts, (config.seed, "check"), actor, stage.sampling, envs, rewards, *limits)
    if not (episodes := who_moved(source.episodes(draw))):
        raise LmgymError(f"each of the {len(prompts)} games tried was over before the side that trains had a move")
    report_prompts(report, config, stage, policy, few, episodes)
    if source.samples:
        report_answers(report, stage, episodes, verdict=verdict)
        report_rewards(report, rewards, episodes, config.reward_timeout, policy.tokenizer)
    return Sampled(episodes, draw, engine.seconds)


def _pictures(report: Report, config: Config, stage: Stage, episodes: Sequence[Episode], before: Stored) -> Stored:
    """Report the disk that an environment's pictures will take; returns what is stored now."""
    sentence, needed = of_environment(before, now := stored_in(current_store().folder), episodes, stage)
    for say, text in ((report.note, sentence), (report.warn, too_much(config, needed))):
        if text:
            say(text)
    return now


def _time(
    report: Report, config: Config, stage: Stage, policy: Policy, tried: Sampled, ranks: int
) -> tuple[float, float] | None:
    """Report about how long a step will take, from a few answers: returns the seconds of sampling and of the rest."""
    try:
        passes, moving = measure_passes(stage, policy, tried.episodes), moving_share(stage, policy, tried.episodes)
    except LmgymError as error:
        report.note(f"seconds of a step: not measured ({error})")
        return None
    slower, teacher = crowding(policy.device, ranks), teacher_shapes(config, stage)
    size_of_teacher = 0.0
    if stage.algorithm.requirements.teacher == "self":
        size_of_teacher = 1.0
    elif teacher is not None:
        size_of_teacher = teacher.parameters / sum(parameter.numel() for parameter in policy.model.parameters())
    parts = tried.seconds, *passes, weights_seconds(stage, policy)
    sampling, scoring, gradient, weights = (slower * seconds for seconds in parts)
    measured = Measured(tried.answers, sampling, scoring, gradient, moving, weights)
    expected = step_seconds(config, stage, measured, ranks, size_of_teacher)
    longest = sum(step_seconds(config, stage, replace(measured, moving=1.0), ranks, size_of_teacher))
    report.note(time_sentence(stage, measured, *expected, ranks, longest))
    return expected
