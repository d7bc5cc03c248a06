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
from lmgym.models.load import read_model_info
from lmgym.models.policy import Policy
from lmgym.models.rounding import share_seen_by_nearest
from lmgym.pictures.store import current_store
from lmgym.rewards.building import build_rewards
from lmgym.rollouts.play import Draw
from lmgym.tasks.streamed import first_of
from lmgym.text.chat import answer_ids, decoder_answer_ids, start_ids, template_notes
from lmgym.text.template import NO_TOOLS
from lmgym.training.callbacks import make_callbacks
from lmgym.training.checkpoints import checkpoint
from lmgym.training.machine import choose_machine
from lmgym.training.opening import progress_of
from lmgym.training.planning.ahead_plan import ahead_sentence, chart, chunk_lines, measured_steps
from lmgym.training.planning.answer_report import report_answers, report_rewards
from lmgym.training.planning.lengths import without_long
from lmgym.training.planning.memory_plan import plan_sentence, within_memory
from lmgym.training.planning.memory_report import Memory, teacher_shapes
from lmgym.training.planning.picture_disk import Stored, of_data, of_environment, stored_in, too_much
from lmgym.training.planning.preflight import check_fit, check_model, cut_prompts
from lmgym.training.planning.prompt_report import about_prompts, lost_tools, prompt_as_read
from lmgym.training.planning.report import Report
from lmgym.training.planning.step_time import (
    Measured,
    Sampled,
    TimedEngine,
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
from lmgym.training.setup import (
    engine_sentence,
    load_data,
    make_actor,
    prove_policy,
    trained_policy,
)
from lmgym.types import Episode, Example

EXAMPLES = 8
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
        report.doing("loading the model")
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
        for sentence in data.told:
            report.note(sentence)
        check_fit(config, data, policy, lambda cut: None)  # `_cut` says it for each stage
        held_out = data.held_out.get(config.evaluation.split, [])
        report.note(f"evaluation: {len(held_out)} prompts of split '{config.evaluation.split}'" if held_out else
                    "evaluation: none (evaluation: null)")  # fmt: skip
        _cut(report, config, policy, held_out)
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
                seconds = _time(report, config, stage, policy, tried, ranks)
                if config.engine.ahead and stage.source.samples and seconds is not None:
                    _ahead(report, config, index, seconds, folder)
            else:
                report.note("seconds of a step: not measured, since one process has no memory here for a backward pass")
        if any(map(memory.waits, config.stages)):
            memory.fit()
        report.show()
    ready = "looks ready to train" if load and fits else "no model was loaded"
    print(ready if not report.problems else f"{report.problems} thing(s) to look at, marked with !")
    return 1 if report.problems else 0


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
    report.note(policy.path_sentence)
    names = [policy.tokenizer.convert_ids_to_tokens(stop) for stop in policy.stop_ids]
    report.note(
        f"answers end at: {', '.join(f'{name} ({stop})' for name, stop in zip(names, policy.stop_ids, strict=True))}"
    )
    about_end, spoils = ("", "") if policy.encoder_decoder else template_notes(policy.tokenizer)
    for say, sentence in ((report.note, about_end), (report.warn, spoils)):
        if sentence:
            say(sentence)
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
    few = examples[:EXAMPLES]
    report.note(f"{len(examples)} training examples, {stage.prompts_per_step} prompts a step, {stage.steps} steps "
                f"({stage.prompts_per_step * stage.steps / len(examples):.2f} epochs)")  # fmt: skip
    if getattr(registry.get("env", stage.env["name"]), "needs_data", True):  # else prompts come from the environment
        _cut(report, config, policy, first_of(examples))
        notes, warnings = about_prompts(first_of(examples), policy.tokenizer, stage.env["name"])
        for say, sentences in ((report.note, notes), (report.warn, warnings)):
            for sentence in sentences:
                say(sentence)
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
    episodes = source.episodes(draw)
    _prompts(report, config, stage, policy, few, episodes)
    if source.samples:
        report_answers(report, stage, episodes, verdict=verdict)
        report_rewards(report, rewards, episodes, config.reward_timeout, policy.tokenizer)
    return Sampled(episodes, len(prompts), engine.seconds)


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
    slower, teacher = crowding(policy, ranks), teacher_shapes(config, stage)
    size_of_teacher = 0.0
    if stage.algorithm.requirements.teacher == "self":
        size_of_teacher = 1.0
    elif teacher is not None:
        size_of_teacher = teacher.parameters / sum(parameter.numel() for parameter in policy.model.parameters())
    parts = tried.seconds, *passes, weights_seconds(stage, policy)
    sampling, scoring, gradient, weights = (slower * seconds for seconds in parts)
    measured = Measured(tried.answers, sampling, scoring, gradient, moving, weights)
    expected = step_seconds(config, stage, measured, ranks, size_of_teacher)
    report.note(time_sentence(stage, measured, *expected, ranks))
    return expected


def _ahead(report: Report, config: Config, index: int, expected: tuple[float, float], folder: Path | None) -> None:
    """Report who samples what when, and which number of steps ahead is worth while: by the seconds of the steps that a
    run folder tells of, else by those that were expected."""
    engine, in_turn = config.engine, config.engine.kind.shares_weights
    if engine.chunk is not None:  # a run's records have the seconds of answers, which several calls have sampled
        report.note(f"the plan of engine.ahead: {engine.ahead}, chunk: {engine.chunk}, by a few answers:")
        most = config.stages[index].sampling.max_new_tokens
        for line in chunk_lines(*expected, engine.ahead, engine.chunk, most, in_turn):
            report.note(line)
        return
    rollouts, updates = measured_steps(folder, index) if folder is not None else ([], [])
    source = f"the {len(rollouts)} steps that were taken"
    if not rollouts:
        rollouts, updates, source = [expected[0]] * 50, [expected[1]] * 50, "a few answers, as if all steps were equal"
    means = (sum(rollouts) / len(rollouts), sum(updates) / len(updates))
    report.note(f"the plan of engine.ahead: {engine.ahead}, by {source}:")
    for line in chart(*means, engine.ahead, in_turn):
        report.note(line)
    report.note(ahead_sentence(rollouts, updates, engine.ahead))


def _cut(report: Report, config: Config, policy: Policy, examples: Sequence[Example]) -> None:
    if sentence := cut_prompts(examples, config.policy, policy):
        report.note(sentence)


def _prompts(
    report: Report,
    config: Config,
    stage: Stage,
    policy: Policy,
    examples: Sequence[Example],
    episodes: Sequence[Episode],
) -> None:
    """Report a prompt as the policy has read it, and the lengths of prompts and references."""
    start = config.policy.answer_start
    given = len(start_ids(policy.tokenizer, start, policy.encoder_decoder))
    read = [episode.turns[0].source_ids or episode.turns[0].prompt_ids for episode in episodes if episode.turns]
    if not read:
        return
    lengths = [len(ids) for ids in read]
    if not getattr(policy.tokenizer, "chat_template", None) and any(len(one.messages) > 2 for one in episodes):
        report.note("messages of the environment are joined without marks, since the model has no chat template")
    report.note(f"a prompt as the model reads it, control tokens in ⟦⟧: {prompt_as_read(policy.tokenizer, read[0])}")
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
        else len(answer_ids(policy.tokenizer, example.prompt, text, config.policy.chat_template_kwargs, start))
        for example in examples
        for text in example.references
    ]
    if references:
        report.note(f"reference tokens: {min(references)} to {max(references)}")
        if max(references) > stage.sampling.max_new_tokens:
            report.warn(f"a reference has {max(references)} tokens, more than sampling.max_new_tokens "
                        f"({stage.sampling.max_new_tokens}): right answers would be cut off")  # fmt: skip
