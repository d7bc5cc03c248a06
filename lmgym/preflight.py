"""What a recipe, its data and its model must have in common, looked at before anything is trained.

`check_model` and `check_teacher` read configurations and tokenizers only, so a recipe that cannot work is refused
before any weight is loaded; `check_lengths` counts tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

from lmgym.config import Config, Stage
from lmgym.episode import Example
from lmgym.errors import LmgymError
from lmgym.policies.builtin import is_builtin
from lmgym.policies.load import PolicySection, check_start_token, load_tokenizer, look
from lmgym.policies.policy import Policy
from lmgym.rendering import answer_ids, decoder_answer_ids, messages_of, plain_text, prompt_ids, source_ids


def check_model(config: Config, examples: Sequence[Sequence[Example]]) -> None:
    """Raise LmgymError where the recipe does not fit the model, as far as its configuration and tokenizer tell."""
    facts = look(config.policy)
    if config.policy.context_start_token is not None:
        words = load_tokenizer(config.policy) if facts.encoder_decoder else None
        check_start_token(config.policy, facts.encoder_decoder, words, facts.vocabulary)
    for stage in config.stages:
        stage.algorithm.check_vocabulary(facts.vocabulary)
        if "teacher" in stage.algorithm.needs:
            check_teacher(config.policy, stage.algorithm.teacher)  # type: ignore[attr-defined]
    chat = next((e for own in examples for e in own if not isinstance(e.prompt, str)), None)
    if facts.encoder_decoder and chat is not None and not load_tokenizer(config.policy).chat_template:
        raise LmgymError(
            f"example '{chat.id}' is a chat of several messages, and {config.policy.model} is an encoder-decoder "
            "without a chat template; take a task of plain prompts (prompt_prefix in place of system_prompt), or a "
            "chat model"
        )


def teacher_section(section: PolicySection, name: str) -> PolicySection:
    """The policy section of a teacher: the policy's device and precision, another model."""
    own = replace(section, model=name, revision=None, lora_rank=None, architecture={}, context_start_token=None)
    return replace(own, tokenizer=section.tokenizer if is_builtin(name) else None)


def check_teacher(section: PolicySection, name: str) -> None:
    """Raise LmgymError if the teacher cannot score the policy's tokens."""
    teacher = teacher_section(section, name)
    if look(teacher).encoder_decoder != look(section).encoder_decoder:
        raise LmgymError(f"algorithm.teacher: {name} and the policy must both be causal, or both encoder-decoders")
    if load_tokenizer(teacher).get_vocab() != load_tokenizer(section).get_vocab():
        raise LmgymError(
            f"algorithm.teacher: {name} has another tokenizer than the policy, so it cannot score the policy's tokens"
        )


def check_lengths(examples: Sequence[Example], config: Config, stage: Stage, policy: Policy) -> None:
    """Raise LmgymError, naming the example, where a prompt leaves the model no room to answer, or a demonstration does
    not fit. A token stands for at least one byte, so only texts of many bytes are tokenized."""
    if policy.context is None or stage.env["name"] != "single_turn":
        return
    tokenizer, template = policy.tokenizer, config.policy.template
    imitated = "demonstrations" in stage.algorithm.needs
    read = source_ids if policy.encoder_decoder else prompt_ids
    around = len(read(tokenizer, examples[0].prompt, template))  # at least what the chat template adds
    for example in examples:
        answers = example.references if imitated else ()
        longest = max((len(text.encode()) for text in answers), default=0)
        if around + len(plain_text(messages_of(example.prompt)).encode()) + longest < policy.context:
            continue
        length = len(read(tokenizer, example.prompt, template))
        if policy.encoder_decoder:  # each half has the whole context to itself
            spoken = [len(policy.decoder_start) + len(decoder_answer_ids(tokenizer, text)) for text in answers]
            length = max([length, *spoken])
            what = "the prompt or the reference" if imitated else "the prompt"
        else:
            length += max((len(answer_ids(tokenizer, example.prompt, text, template)) for text in answers), default=1)
            what = "the prompt and reference" if imitated else "the prompt, with one token of an answer,"
        if length > policy.context:
            raise LmgymError(
                f"{what} of example '{example.id}' have {length} tokens, and the model reads {policy.context} at most; "
                "shorten it, or take a model with a longer context"
            )
