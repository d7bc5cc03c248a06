"""Whether a recipe, its data and its model fit each other, checked before anything is trained.

`check_model` reads the model's configuration and tokenizer only, so a recipe that cannot work is refused before any
weight is loaded. `check_fit` counts the tokens of the data, with the policy loaded."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lmgym.algorithms.requirements import ServedTeacher
from lmgym.config.schema import Config, Stage, is_played
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.functional.truncation import packed_bytes
from lmgym.inference.base import Sampling
from lmgym.inference.completions import check_memory
from lmgym.inference.served_teacher import EndpointTeacher
from lmgym.models.builtin import is_builtin
from lmgym.models.load import ModelInfo, PolicySection, check_start_token, read_model_info
from lmgym.models.policy import Policy
from lmgym.models.reward_model import as_reward_model
from lmgym.rollouts.sources import Own
from lmgym.tasks.streamed import first_of
from lmgym.text.chat import decoder_answer_ids, has_template, plain_text, prompt_ids, source_ids
from lmgym.text.control import control_tokens
from lmgym.training.planning.lengths import check_lengths
from lmgym.training.planning.other_tokenizer import check_other_tokenizer
from lmgym.training.planning.prompt_report import about_prompts
from lmgym.training.run import Data
from lmgym.types import PICTURE, Example, Message


def check_model(config: Config, examples: Sequence[Sequence[Example]], facts: ModelInfo) -> None:
    """Raise LmgymError if the recipe and its examples (by stage) do not fit the model's configuration and tokenizer."""
    check_start_token(config.policy, facts.encoder_decoder, facts.tokenizer, facts.vocabulary)
    for stage in config.stages:
        stage.algorithm.check_vocabulary(facts.vocabulary)
        if facts.vocabulary:
            check_sampling(config, stage, facts.vocabulary)
        if (teacher := stage.algorithm.requirements.teacher) and teacher not in OWN_TEACHERS:
            check_teacher(config.policy, stage, facts, teacher)
        if (served := stage.algorithm.requirements.served_teacher) is not None:
            check_served_teacher(config.policy, facts, served)
    check_cut(config)
    if facts.processor is not None:
        check_reader(config, facts.architecture)
    chat = next((e for own in examples for e in first_of(own) if not isinstance(e.prompt, str)), None)
    if facts.encoder_decoder and chat is not None and not facts.tokenizer.chat_template:
        raise LmgymError(
            f"example '{chat.id}' is a chat of several messages, and {config.policy.model} is an encoder-decoder "
            "without a chat template; take a task of plain prompts (prompt_prefix in place of system_prompt), or a "
            "chat model"
        )


def check_reader(config: Config, architecture: str) -> None:
    """Raise LmgymError for what a model that reads pictures cannot be used with."""
    config.engine.kind.check_pictures(config.engine, architecture)
    if config.distributed.sharding != "none":
        raise LmgymError(
            f"distributed.sharding: {config.policy.model} reads pictures, and such models are not shared "
            "out; remove it: each rank then holds all weights"
        )


def check_fit(config: Config, data: Data, policy: Policy, say: Callable[[str], None]) -> None:
    """Raise LmgymError, naming the example, if a prompt or reference is too long. `say` is told how many are cut."""
    stages = [(stage, first_of(examples)) for stage, examples in zip(config.stages, data.training, strict=True)]
    if not (required := config.stages[-1].algorithm.requirements).makes_policy:
        as_reward_model(policy, required.makes)  # raises where there is no such model
    for stage, examples in stages:
        name = registry.name_of("algorithm", type(stage.algorithm))
        stage.source.check_data(Own(examples, stage.name, name), data.held_out)
    for stage in config.stages:
        for sampling in (stage.sampling, config.evaluation.decoding(stage.sampling)):
            check_new_tokens(sampling, policy)
    asked = {f"stage {stage.name}": examples for stage, examples in stages}
    asked |= {f"evaluation on {split}": examples for split, examples in data.held_out.items()}
    for stage, examples in stages:
        if not getattr(registry.get("env", stage.env["name"]), "needs_data", True):
            continue  # the environment writes the prompts
        for sentences in about_prompts(examples, policy.tokenizer, stage.env["name"]):
            for sentence in sentences:
                say(f"stage {stage.name}: {sentence}")
    for where, examples in asked.items():
        if cut := cut_prompts(examples, config.policy, policy):
            say(f"{where}: {cut}")
    for stage, examples in stages:
        if cut := cut_references(examples, stage, config.policy, policy):
            say(f"stage {stage.name}: {cut}")
    for stage, examples in stages:
        for own in (examples, *data.held_out.values()):
            check_lengths(own, config, stage, policy)


def check_new_tokens(sampling: Sampling, policy: Policy) -> None:
    """Raise LmgymError if no answer can have `max_new_tokens`: the model's context ends before, or the memory does."""
    most, context = sampling.max_new_tokens, policy.context
    if context is not None and most > context:
        included = "" if policy.encoder_decoder else ", prompt included"
        raise LmgymError(
            f"{sampling.section}.max_new_tokens is {most:,}, and the model reads {context:,} tokens at most{included}; "
            "lower it, or take a model with a longer context"
        )
    check_memory(policy, sampling)


def check_sampling(config: Config, stage: Stage, vocabulary: int) -> None:
    """Raise LmgymError if truncation does not fit the vocabulary, or the kept sets of a step need too much memory."""
    for sampling in (stage.sampling, config.evaluation.decoding(stage.sampling)):
        sampling.check_vocabulary(vocabulary)
    gib = kept_bytes(stage, vocabulary) / 2**30
    if gib > stage.sampling.kept_gib:
        raise LmgymError(
            f"the kept sets of a step may take {gib:.2f} GiB ({stage.prompts_per_step} prompts with "
            f"{stage.algorithm.group_size} answers of {stage.sampling.max_new_tokens} tokens), more than "
            f"sampling.kept_gib ({stage.sampling.kept_gib}); give a smaller sampling.top_k, lower prompts_per_step or "
            "max_new_tokens, or raise sampling.kept_gib"
        )


def kept_bytes(stage: Stage, vocabulary: int) -> int:
    """Most bytes that the kept sets of a step take, if each prompt is drawn once and answered in one turn."""
    if not stage.source.samples:
        return 0
    restricted = stage.algorithm.restriction is not None
    each = packed_bytes(vocabulary) if restricted else stage.sampling.kept_bytes(vocabulary)
    return stage.prompts_per_step * stage.algorithm.group_size * stage.sampling.max_new_tokens * each


OWN_TEACHERS = ("self", "initial")  # the policy itself, as it is now, or as it was when the stage began


def teacher_section(section: PolicySection, name: str) -> PolicySection:
    """The policy section of a teacher: the policy's device and precision, another model."""
    own = replace(section, model=name, revision=None, lora_rank=None, quantise=None, architecture={}, new_weights=[])
    own = replace(own, context_start_token=None, activation_checkpointing=False, train_vision=False)  # it never trains
    if is_builtin(name):
        return replace(own, tokenizer=section.tokenizer)
    return replace(own, tokenizer=None, template=None)  # its own: it may have another tokenizer


def check_teacher(section: PolicySection, stage: Stage, facts: ModelInfo, name: str) -> None:
    """Raise LmgymError if the teacher cannot score what the policy writes in this stage."""
    teacher = read_model_info(teacher_section(section, name))
    if teacher.encoder_decoder != facts.encoder_decoder:
        raise LmgymError(f"algorithm.teacher: {name} and the policy must both be causal, or both encoder-decoders")
    if teacher.tokenizer.get_vocab() != facts.tokenizer.get_vocab():
        check_other_tokenizer(stage, name, facts, teacher)


def check_served_teacher(section: PolicySection, facts: ModelInfo, served: ServedTeacher) -> None:
    """Raise LmgymError if the teacher's server cannot be asked, or cannot score the policy's tokens."""
    if facts.encoder_decoder:
        raise LmgymError(
            f"algorithm.teacher is an address, where a causal model reads prompt and answer as one, and "
            f"{section.model} is an encoder-decoder; name a model of its type"
        )
    if facts.vocabulary and served.top_k > facts.vocabulary:
        raise LmgymError(
            f"algorithm.top_k is {served.top_k}, and the policy's vocabulary has {facts.vocabulary} tokens; lower it"
        )
    EndpointTeacher(served, facts.vocabulary or sys.maxsize).reach(facts.tokenizer)


def check_cut(config: Config) -> None:
    """Raise LmgymError if `policy.max_prompt_tokens` would cut prompts that an environment writes."""
    section = config.policy
    sections = [stage.env for stage in config.stages] + [config.evaluation.env or config.stages[-1].env]
    other = next((env["name"] for env in sections if is_played(env)), None)
    if section.cut is not None and other is not None:
        raise LmgymError(
            f"policy.max_prompt_tokens cuts the prompts of a task, and those of environment '{other}' are its own; "
            "remove it"
        )


def cut_prompts(examples: Sequence[Example], section: PolicySection, policy: Policy) -> str:
    """A sentence that says how many of the prompts will be cut; empty if the recipe cuts none. Raises LmgymError,
    naming the example, if a prompt cannot be cut.

    Example: "131 of 1,000 prompts are longer than policy.max_prompt_tokens (512); these lose their beginning"
    """
    if section.cut is None:
        return ""
    tokenizer, encoder_decoder = policy.tokenizer, policy.encoder_decoder
    limit, read = section.cut.tokens, source_ids if encoder_decoder else prompt_ids
    if any(has_template(tokenizer, example.prompt) for example in first_of(examples)):
        count, tried = 0, examples  # the first that is too long is refused
    else:
        lengths = _plain_lengths(tokenizer, [example.prompt for example in examples], encoder_decoder)
        longer = [example for example, length in zip(examples, lengths, strict=True) if length > limit]
        count, tried = len(longer), longer[:1]
    for example in tried:
        try:
            read(tokenizer, example.prompt, section.chat_template_kwargs, section.cut)
        except LmgymError as error:
            raise LmgymError(f"example '{example.id}': {error}") from error
    lost = {"left": "beginning", "right": "end"}[section.cut.side]
    return (
        f"{count:,} of {len(examples):,} prompts are longer than policy.max_prompt_tokens ({limit}); these lose their "
        f"{lost}"
    )


def _plain_lengths(tokenizer: Any, prompts: Sequence[str | Sequence[Message]], encoder_decoder: bool) -> list[int]:
    """The numbers of tokens of prompts without a chat template, many at a time: fast tokenizers then use all cores."""
    lengths, names = [], control_tokens(tokenizer).names
    for start in range(0, len(prompts), 1000):
        some = prompts[start : start + 1000]
        texts = [str(plain_text(prompt)) for prompt in some]
        for prompt, text, ids in zip(some, texts, tokenizer(texts)["input_ids"], strict=True):
            # The name of a control token takes more tokens as text, and a picture more than its character.
            if names.search(text) or PICTURE in text:
                lengths.append(len((source_ids if encoder_decoder else prompt_ids)(tokenizer, prompt)))
                continue
            ended = bool(ids) and ids[-1] == tokenizer.eos_token_id and not encoder_decoder
            lengths.append(len(ids) - ended)
    return lengths


def cut_references(examples: Sequence[Example], stage: Stage, section: PolicySection, policy: Policy) -> str:
    """A sentence that says how many references (or rated answers) a stage trains on in part only; empty if the recipe
    cuts none.

    Example: "12 of 500 references are longer than policy.max_reference_tokens (64); these lose their end"
    """
    limit, source = section.max_reference_tokens, stage.source
    texts = [text for example in examples for text in source.texts(example)]
    if limit is None or not texts:
        return ""
    longer = sum(len(decoder_answer_ids(policy.tokenizer, text)) > limit for text in texts)
    return (
        f"{longer:,} of {len(texts):,} {source.many} are longer than policy.max_reference_tokens ({limit}); these lose "
        "their end"
    )
