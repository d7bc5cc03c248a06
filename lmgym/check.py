"""`lmgym check RECIPE`: a dry run that finds what would spoil a training run, before it does.

Loads the model, tokenizer and a few examples of each stage, samples once, scores once, and reports lengths, stops,
rewards and an estimate of memory. Findings that would spoil the run are marked with "!".
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from lmgym.batch import collate
from lmgym.config import Config, Stage
from lmgym.episode import Episode, Example
from lmgym.maths.kept import packed_bytes
from lmgym.policies.policy import Policy
from lmgym.rendering import answer_ids, decoder_answer_ids, prompt_ids, source_ids
from lmgym.rewards.base import build
from lmgym.rollout import collect, demonstrate, groups_of, score
from lmgym.run import held_out_examples, make_engine, make_env, make_speaker, trained_policy, training_examples

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


def check(config: Config, folder: Path | None = None) -> int:
    """Print the report of a recipe (or of a run folder's newest model); returns 1 if anything would spoil the run,
    else 0.

    Raises LmgymError where the run would not even start.
    """
    policy = trained_policy(config, folder)
    report = Report()
    _model(report, policy)
    held_out = held_out_examples(config)
    report.note(f"evaluation: {len(held_out)} prompts of split '{config.evaluation.split}'")
    for stage in config.stages:
        report.lines.append(f"stage {stage.name}: {type(stage.algorithm).__name__} on {stage.task['name']}")
        _stage(report, config, stage, policy, verdict=stage is config.stages[0] or folder is not None)
    print("\n".join(report.lines))
    print("looks ready to train" if not report.problems else f"{report.problems} thing(s) to look at, marked with !")
    return 1 if report.problems else 0


def _model(report: Report, policy: Policy) -> None:
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters())
    compute = str(policy.compute).removeprefix("torch.")
    report.lines.append(f"model: {parameters:,} parameters, {trained:,} trained, {policy.device}, {compute} compute")
    report.note(f"path: {'fast (packed rows, own KV cache)' if policy.fast else 'plain (padded, slower)'}")
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


def _stage(report: Report, config: Config, stage: Stage, policy: Policy, verdict: bool) -> None:
    examples = training_examples(config, stage)
    few = examples[:EXAMPLES]
    report.note(f"{len(examples)} training examples, {stage.prompts_per_step} prompts a step, {stage.steps} steps "
                f"({stage.prompts_per_step * stage.steps / len(examples):.2f} epochs)")  # fmt: skip
    _lengths(report, config, stage, policy, few)
    speaker = make_speaker(config, policy, make_engine(config, policy))
    path = (config.seed, "check")
    if "demonstrations" in stage.algorithm.needs:
        episodes = demonstrate(list(enumerate(few)), speaker, path)
    else:
        group = max(stage.algorithm.group_size, GROUP)
        prompts = [(number, example) for number, example in enumerate(few) for _ in range(group)]
        episodes = collect(prompts, speaker, stage.sampling, path, make_env(stage))
        score(episodes, build(stage.rewards), config.reward_timeout)
        _answers(report, stage, episodes, verdict=verdict)
    _memory(report, config, stage, policy, episodes)


def _lengths(report: Report, config: Config, stage: Stage, policy: Policy, examples: list[Example]) -> None:
    read = source_ids if policy.encoder_decoder else prompt_ids
    lengths = [len(read(policy.tokenizer, example.prompt, config.policy.template)) for example in examples]
    report.note(f"prompt tokens: {min(lengths)} to {max(lengths)}; context {policy.context or 'without limit'}")
    before = (
        len(policy.decoder_start) if policy.encoder_decoder else max(lengths)
    )  # what an answer shares its context with
    room = None if policy.context is None else policy.context - before
    if room is not None and room < stage.sampling.max_new_tokens:
        report.warn(f"the longest of {len(examples)} prompts leaves room for {max(room, 0)} new tokens, fewer than "
                    f"sampling.max_new_tokens ({stage.sampling.max_new_tokens})")  # fmt: skip
    references = [
        len(decoder_answer_ids(policy.tokenizer, text))
        if policy.encoder_decoder
        else len(answer_ids(policy.tokenizer, example.prompt, text, config.policy.template))
        for example in examples
        for text in example.references
    ]
    if references:
        report.note(f"reference tokens: {min(references)} to {max(references)}")
        if max(references) > stage.sampling.max_new_tokens:
            report.warn(f"a reference has {max(references)} tokens, more than sampling.max_new_tokens "
                        f"({stage.sampling.max_new_tokens}): right answers would be cut off")  # fmt: skip


def _answers(report: Report, stage: Stage, episodes: list[Episode], verdict: bool) -> None:
    """How the answers end and what they earn: a verdict, unless stages before this one have yet to train the model."""
    complain = report.warn if verdict else report.note
    if not verdict:
        report.note("(what follows is of the model before the stages ahead of this one have trained it)")
    count = len(episodes)
    cut = sum(episode.truncated for episode in episodes) / count
    fixed = stage.sampling.min_new_tokens == stage.sampling.max_new_tokens  # then they are meant to be
    (complain if cut > 0.5 and not fixed else report.note)(f"answers cut off at max_new_tokens: {cut:.0%} of {count}")
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


@torch.no_grad()
def _memory(report: Report, config: Config, stage: Stage, policy: Policy, episodes: list[Episode]) -> None:
    """Weights, gradients and AdamW moments in fp32, the activations of one forward pass, the cache of the decoder, and
    the kept sets of restricted sampling."""
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters())
    needs = stage.algorithm.needs
    adapted = trained < parameters  # then the first stage's reference is the model with its adapters off
    copies = 1 + ("reference" in needs and not adapted) + len({"mask", "teacher"} & needs)
    critics = 1 if "values" in needs and config.policy.critic == "separate" else 0
    states = 4 * ((copies + critics) * parameters + 3 * (1 + critics) * trained)
    batch = collate(episodes, policy.pad_id)
    model = policy.model.config
    width, layers = model.hidden_size, model.num_hidden_layers
    size = 4 if policy.compute == torch.float32 else 2
    tokens = min(policy.tokens_per_forward, stage.prompts_per_step * stage.algorithm.group_size * batch.mask.shape[1])
    activations = tokens * layers * width * 24 * size  # about 24 values a token, layer and unit of width are kept
    rows = min(config.engine.rows, stage.prompts_per_step * stage.algorithm.group_size)
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head_size = getattr(model, "head_dim", None) or width // model.num_attention_heads
    capacity = batch.mask.shape[1] + stage.sampling.max_new_tokens
    cache = 2 * rows * capacity * layers * heads * head_size * size
    answers = stage.prompts_per_step * stage.algorithm.group_size * stage.sampling.max_new_tokens
    sets = answers * packed_bytes(policy.vocabulary) if stage.algorithm.restriction(None) is not None else 0
    total = states + activations + cache + sets
    parts = f"weights and optimizer {_gib(states)}, activations about {_gib(activations)}, cache {_gib(cache)}"
    parts += f", kept sets {_gib(sets)}" if sets else ""
    report.note(f"memory, estimated: {_gib(total)} ({parts})")
    if policy.device.type == "cuda" and total > torch.cuda.get_device_properties(policy.device).total_memory:
        report.warn(
            "that is more than this GPU has; lower policy.tokens_per_forward or engine.rows, or take a smaller model"
        )


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.0f} MiB"
