"""Prompts and answers that are too long for the model: refused by name, or left out (task.unfit: drop)."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmgym.config.schema import Config, Stage
from lmgym.core.errors import LmgymError
from lmgym.models.policy import Policy
from lmgym.tasks.rows.unfit import Unfit
from lmgym.tasks.streamed import without
from lmgym.text.chat import decoder_answer_ids, messages_of, plain_text, prompt_ids, source_ids, start_ids
from lmgym.training.run import Data
from lmgym.types import Example, pictures_of


def check_lengths(examples: Sequence[Example], config: Config, stage: Stage, policy: Policy) -> None:
    """Raise LmgymError, naming the example, if a prompt leaves the model no room to answer, or a demonstration does not
    fit."""
    for _, sentence in _too_long(examples, config, stage, policy):
        raise LmgymError(sentence)


def without_long(config: Config, data: Data, policy: Policy) -> Data:
    """The data without what is too long, where the task says `unfit: drop`; with a sentence on it."""
    told = list(data.told)
    training = [
        fitting_lengths(examples, stage.task, config, stage, policy, told)
        for stage, examples in zip(config.stages, data.training, strict=True)
    ]
    stage, task = config.stages[-1], config.evaluation.task or config.stages[-1].task
    held_out = {
        split: fitting_lengths(examples, task, config, stage, policy, told) for split, examples in data.held_out.items()
    }
    return Data(training, held_out, told)


def fitting_lengths(
    examples: Sequence[Example], task: Mapping[str, Any], config: Config, stage: Stage, policy: Policy, told: list[str]
) -> Sequence[Example]:
    """The examples that are not too long, where the task says `unfit: drop`, and else all. With that, a prompt that is
    longer than policy.max_prompt_tokens is left out and not cut. Raises LmgymError if none is left."""
    if task.get("unfit") != "drop":
        return examples
    found, indices = Unfit("drop"), set[int]()
    for index, sentence in _too_long(examples, config, stage, policy, uncut=True):
        place = examples[index].id
        found.add(place, LmgymError(f"{place}: too long: {sentence.partition(' of example ')[0]}"))
        indices.add(index)
    if len(indices) == len(examples):
        raise LmgymError(f"task '{task['name']}' has no example that fits: {found.sentence()}")
    if indices:
        told.append(f"task '{task['name']}': {found.sentence()}")
    return without(examples, indices)


def _too_long(
    examples: Sequence[Example], config: Config, stage: Stage, policy: Policy, uncut: bool = False
) -> Iterator[tuple[int, str]]:
    """The indices of examples that are too long, each with a sentence; with `uncut` also those whose prompts would be
    cut. A token takes at least one byte, so only texts of many bytes are tokenized."""
    tokenizer, template, cut = policy.tokenizer, config.policy.chat_template_kwargs, config.policy.cut
    limit_of_prompt = cut.tokens if cut is not None and uncut else sys.maxsize
    context = sys.maxsize if policy.context is None else policy.context
    if min(context, limit_of_prompt) == sys.maxsize or stage.is_played:
        return
    source, learned = stage.source, stage.source.one
    limit = config.policy.max_reference_tokens or sys.maxsize
    start = config.policy.answer_start
    given = len(start_ids(tokenizer, start, policy.encoder_decoder))
    read = source_ids if policy.encoder_decoder else prompt_ids
    cut = None if uncut else cut
    around = len(read(tokenizer, examples[0].prompt, template, cut))  # at least what the chat template adds
    most = sys.maxsize if cut is None else cut.tokens
    for index, example in enumerate(examples):
        answers = source.texts(example)
        longest = min(max((len(text.encode()) for text in answers), default=0), limit)
        prompt_bytes = around + len(plain_text(example.prompt).encode())
        messages = messages_of(example.prompt)
        plain = all({*one} == {"role", "content"} and not pictures_of(one["content"]) for one in messages)
        if plain and min(prompt_bytes, most) + given + longest < context and prompt_bytes <= limit_of_prompt:
            continue
        length = len(read(tokenizer, example.prompt, template, cut))
        if length > limit_of_prompt:
            yield index, f"the prompt of example '{example.id}' has {length} tokens, more than policy.max_prompt_tokens"
            continue
        if policy.encoder_decoder:  # each half has the whole context to itself
            lengths = [min(len(decoder_answer_ids(tokenizer, text, given > 0)), limit) for text in answers]
            length = max([length, *(len(policy.decoder_start) + given + own for own in lengths)])
            what = f"the prompt or the {learned}" if learned else "the prompt"
        else:
            lengths = source.lengths(example, tokenizer, template, start)
            length += given + min(max(lengths, default=1), limit)
            what = f"the prompt and {learned}" if learned else "the prompt, with one token of an answer,"
        if length > context:
            yield (
                index,
                (
                    f"{what} of example '{example.id}' have {length} tokens, and the model reads {policy.context} "
                    "at most; shorten it (policy.max_prompt_tokens, max_reference_tokens), leave such rows out "
                    "(task.unfit: drop), "
                    "or take a model with a longer context"
                ),
            )
