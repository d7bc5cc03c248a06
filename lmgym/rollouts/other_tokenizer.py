"""Answers as a teacher with another tokenizer reads them. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lmgym.core.errors import LmgymError
from lmgym.rollouts.hints import hinted_prompt
from lmgym.rollouts.players import Actor, PromptCache
from lmgym.text.alignment import aligned
from lmgym.text.chat import end_id, has_template
from lmgym.text.token_bytes import TokenBytes, token_bytes
from lmgym.types import Episode, Prompt


@dataclass(frozen=True)
class TokenPairs:
    """The tokens of a policy and of its teacher that are taken for each other: `common` are pairs of ids that write the
    same bytes, `ends` those that end an answer.

    Example: token_pairs(policy.tokenizer, teacher.tokenizer, "Qwen/Qwen3-8B", 49152, 151936).ends -> [(2, 151645)]"""

    policy: TokenBytes
    teacher: TokenBytes
    common: list[tuple[int, int]]
    ends: list[tuple[int, int]]

    @property
    def counted(self) -> list[tuple[int, int]]:
        """All pairs: the outcomes over which next-token distributions are compared."""
        return [*self.common, *self.ends]

    def table(self, policy: Any, teacher: Any) -> list[str]:
        """What the run prints of the two tokenizers, line by line."""
        own, other, both = len(self.policy.ids), len(self.teacher.ids), len(self.common)
        ends = ", ".join(f"{policy.decode([one])} is {teacher.decode([two])}" for one, two in self.ends)
        templates = ["its chat template" if has_template(one, []) else "no chat template" for one in (policy, teacher)]
        return [
            "algorithm.teacher has another tokenizer; its tokens and the policy's are laid side by side by bytes:",
            f"  policy   {own:>9,} texts of a token, {both / own:4.0%} of them the teacher's too; {templates[0]}",
            f"  teacher  {other:>9,} texts of a token, {both / other:4.0%} of them the policy's too; {templates[1]}",
            f"  the end of an answer: {ends}",
        ]


def token_pairs(
    policy: Any, teacher: Any, name: str, policy_size: int | None = None, teacher_size: int | None = None
) -> TokenPairs:
    """Find which tokens of two tokenizers are taken for each other. The sizes are those of the models' heads, beyond
    which no token counts; `name` is the teacher's.

    Raises LmgymError for tokenizers whose tokens have no known bytes, and for one without an end of sequence."""
    own, other = token_bytes(policy, "policy.model"), token_bytes(teacher, f"algorithm.teacher: {name}")
    common = [(id, other.ids[text]) for text, id in own.ids.items() if text in other.ids]
    if teacher.eos_token_id is None or policy.eos_token_id is None:
        raise LmgymError(
            f"algorithm.teacher: {name} has another tokenizer than the policy, and one of the two has no "
            "end-of-sequence token, so their ends of an answer cannot be compared; set tokenizer.eos_token"
        )
    ends = [(end_id(policy), end_id(teacher))]
    if policy.eos_token_id != ends[0][0] and teacher.eos_token_id != ends[0][1]:
        ends.append((policy.eos_token_id, teacher.eos_token_id))
    most, largest = policy_size or len(own.table), teacher_size or len(other.table)
    within = [[(one, two) for one, two in pairs if one < most and two < largest] for pairs in (common, ends)]
    return TokenPairs(own, other, *within)


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
