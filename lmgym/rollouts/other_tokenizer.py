"""Answers as a teacher with another tokenizer reads them. Imports no torch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lmgym.core.errors import LmgymError
from lmgym.rollouts.actor import Actor, PromptCache
from lmgym.rollouts.hints import hinted_prompt
from lmgym.text.alignment import aligned
from lmgym.text.answer_ends import end_id
from lmgym.text.chat import has_template
from lmgym.text.token_pairs import TokenPairs
from lmgym.types import Episode, Prompt


class Read(NamedTuple):
    """The episodes in the teacher's tokens, and by episode the span of each action: of the policy, of the teacher."""

    episodes: list[Episode]
    policy_spans: list[list[int]]
    teacher_spans: list[list[int]]


def in_other_tokens(
    episodes: Sequence[Episode], pairs: TokenPairs, actor: Actor, context: int | None, hint: str | None = None
) -> Read:
    """The episodes as a teacher with another tokenizer reads them: the prompt through its own chat template, the
    answer's text in its own tokens, and its own end of an answer where the policy has ended it. Nothing is cut.

    `actor` has the teacher's tokenizer and the recipe's template arguments. An end is a span of one token on both
    sides, behind those of the text (text/alignment.py). Raises LmgymError for an episode of several turns, for a prompt
    that the policy's template has rendered, and where prompt and answer do not fit into the teacher's `context`."""
    encode, read = PromptCache(replace(actor, cut=None)), Read([], [], [])
    for episode in episodes:
        if len(episode.turns) != 1:
            raise LmgymError(
                f"algorithm.teacher has another tokenizer, and example {episode.example.id} was answered in "
                f"{len(episode.turns)} turns; such a teacher is for tasks of one prompt and one answer"
            )
        [turn] = episode.turns
        prompt = prompt_for(episode, hint)
        ended = turn.stop == "eos"
        said = turn.action_ids[:-1] if ended else turn.action_ids
        ids, own, other = aligned(said, pairs.policy, actor.tokenizer, pairs.teacher)
        if ended or not ids:  # a row needs an action, so one without a text has an end that is in no span
            last = max([0, *own, *other]) + 1
            ids, other = [*ids, _end(actor.tokenizer, prompt)], [*other, last if ended else 0]
            own = [*own, last] if ended else own
        prompt_ids = encode(prompt, actor.template)
        if context is not None and len(prompt_ids) + len(ids) > context:
            raise LmgymError(
                f"algorithm.teacher: in its tokens example {episode.example.id} with an answer has "
                f"{len(prompt_ids) + len(ids)} tokens, and it reads {context}; shorten the prompt, or lower "
                "sampling.max_new_tokens"
            )
        told = replace(turn, prompt_ids=prompt_ids, action_ids=ids, logprobs=[], token_rewards=None, kept=None)
        read.episodes.append(replace(episode, turns=[told]))
        read.policy_spans.append(own)
        read.teacher_spans.append(other)
    return read


def _end(tokenizer: Any, prompt: Prompt) -> int:
    """The teacher's end of an answer to this prompt."""
    return int(end_id(tokenizer) if has_template(tokenizer, prompt) else tokenizer.eos_token_id)


def prompt_for(episode: Episode, hint: str | None) -> Prompt:
    """The prompt that the teacher reads. Raises LmgymError for one that the policy's chat template has rendered."""
    example = episode.example
    if getattr(example.prompt, "form", "text") == "rendered":
        raise LmgymError(
            f"example {example.id}: task.prompts is rendered, in the policy's chat template, and algorithm.teacher has "
            "another tokenizer that would not know its marks; write prompts: chat"
        )
    return hinted_prompt(hint, example) if hint else example.prompt
