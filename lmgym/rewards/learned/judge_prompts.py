"""Prompts for an LLM judge: an answer, or one action of it, put into a template."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.rewards.maths.final_answer import final_answer
from lmgym.text.chat import plain_text
from lmgym.types import Episode, Example, Message

Per = Literal["answer", "turn", "last"]
FIELDS = ("prompt", "before", "answer", "reference", "question")
FIELD = re.compile(r"\{([A-Za-z_]+)\}")
SYSTEM = "You judge solutions of problems. You are strict and brief."
SCORE_TEMPLATE = (
    "Problem:\n{prompt}\n\nSolution so far:\n{before}\n\nProposed continuation:\n{answer}\n\nHow good is the proposed "
    "continuation, from 1 (wrong or useless) to 10 (right and helpful)? Give the number only."
)
QUESTION_TEMPLATE = (
    "Problem:\n{prompt}\n\nSolution so far:\n{before}\n\nProposed continuation:\n{answer}\n\n{question} Answer "
    "Yes or No."
)
QUESTIONS = (
    "Does the proposed continuation add something of value that is not in the solution so far?",
    "Does the proposed continuation bring the solution nearer to the answer of the problem?",
    "Is all the mathematics in the proposed continuation sound?",
)


@dataclass(frozen=True)
class Item:
    """One text to judge: an answer, or one action and the text before it in the same message.

    Example: Item(index=3, example=example, before="48/2=24\\n", answer="#### 24")"""

    index: int  # of its episode
    example: Example
    before: str
    answer: str

    @property
    def correct(self) -> bool:
        """True if the text announces the reference's final answer."""
        return final_answer([self.answer], [self.example], strict=True) == [1.0]


def items_of(episodes: Sequence[Episode], per: Per) -> list[Item]:
    """The items to judge of each episode: its last message (`answer`), each of its actions (`turn`), or its last action
    only (`last`). An episode without turns has one empty item with `answer`, and none with the others."""
    split = {"answer": lambda episode: [("", episode.text)], "turn": actions, "last": _last_action}[per]
    return [
        Item(index, episode.example, before, answer)
        for index, episode in enumerate(episodes)
        for before, answer in split(episode)
    ]


def actions(episode: Episode) -> list[tuple[str, str]]:
    """The policy's actions in one message: for each the text before it, and its own text, with results that a
    calculator inserted.

    Raises LmgymError for an episode of several messages: the texts between them are not in the episode's turns.

    Example: an episode of the environment `stepwise`: actions(episode)
    -> [('', '48/2=24\\n'), ('48/2=24\\n', '#### 24')]"""
    pairs, before, line = list[tuple[str, str]](), "", ""
    for index, turn in enumerate(episode.turns):
        last = index == len(episode.turns) - 1
        if turn.continuation is None and not last:
            raise LmgymError(
                "'per: turn' is for environments in which the policy goes on in the same message, such as stepwise; "
                f"the episode of example '{episode.example.id}' has several messages"
            )
        # An action may span several turns: the environment interrupts it to insert a result.
        line += turn.text + (turn.continuation or "")
        if last or not turn.unfinished:
            pairs.append((before, line))
            before, line = before + line, ""
    return pairs


def _last_action(episode: Episode) -> list[tuple[str, str]]:
    """The last action and the text before it in the same message; earlier messages are ignored."""
    begin = max((index + 1 for index, turn in enumerate(episode.turns[:-1]) if turn.continuation is None), default=0)
    return actions(replace(episode, turns=episode.turns[begin:]))[-1:]


def judge_messages(system: str, template: str, item: Item, answer: str, question: str = "") -> list[Message]:
    """The conversation sent to the judge, with this text as the answer.

    Example: judge_messages("", "{answer}? {question}", item, "4", "Even?") -> [{'role': 'user', 'content': '4? Even?'}]
    """
    fields = {"prompt": plain_text(item.example.prompt), "before": item.before, "answer": answer, "question": question}
    if item.example.references:
        fields["reference"] = item.example.references[0]
    elif "{reference}" in template:
        raise LmgymError(f"the template of a judge has {{reference}}, and example '{item.example.id}' has none")
    content = FIELD.sub(lambda match: fields.get(match[1], match[0]), template)
    system_message: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*system_message, {"role": "user", "content": content}]


def check_template(reward: str, template: str, needs: Sequence[str] = ("answer",)) -> None:
    """Raise LmgymError if a template has an unknown field or lacks one of the fields in `needs`. A field is one word of
    letters in braces; other braces are plain text."""
    key = f"key 'rewards.{reward}.template'"
    for field in FIELD.findall(template):
        if field not in FIELDS:
            raise LmgymError(f"{key}: there is no field '{{{field}}}'; {suggest(field, FIELDS)}")
    for field in needs:
        if f"{{{field}}}" not in template:
            raise LmgymError(f"{key} must have {{{field}}} in it: the {field} is put there")
