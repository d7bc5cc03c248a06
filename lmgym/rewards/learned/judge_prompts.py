"""What a judge is asked: an answer, or one action of it, put into a template."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.rewards.maths.final_answer import final_answer
from lmgym.text.chat import messages_of, plain_text
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
    """One thing to be judged: an answer, or an action and what stands before it in the same message.

    Example: Item(index=3, example=example, before="48/2=24\\n", answer="#### 24")
    """

    index: int  # of its episode
    example: Example
    before: str
    answer: str

    @property
    def correct(self) -> bool:
        """Whether it announces the final answer of the reference."""
        return final_answer([self.answer], [self.example], strict=True) == [1.0]


def items_of(episodes: Sequence[Episode], per: Per) -> list[Item]:
    """What of each episode is judged: its last message (`answer`), each action of it (`turn`), or the last action of it
    alone (`last`). Of an episode without turns nothing is, but by `answer`."""
    ways = {"answer": lambda episode: [("", episode.text)], "turn": actions, "last": _last_action}
    return [
        Item(index, episode.example, before, answer)
        for index, episode in enumerate(episodes)
        for before, answer in ways[per](episode)
    ]


def actions(episode: Episode) -> list[tuple[str, str]]:
    """What the policy did in one message, action by action: the text before it, and its own text with what a calculator
    put into it. Raises LmgymError for an episode of several messages, since what was said between them is not in it.

    Example: an episode of env stepwise
        >>> actions(episode)
        [('', '48/2=24\\n'), ('48/2=24\\n', '#### 24')]
    """
    found, before, line = list[tuple[str, str]](), "", ""
    for index, turn in enumerate(episode.turns):
        last = index == len(episode.turns) - 1
        if turn.continuation is None and not last:
            raise LmgymError(
                "'per: turn' is for environments in which the policy goes on in the same message, such as stepwise; "
                f"the episode of example '{episode.example.id}' has several messages"
            )
        line += turn.text + (turn.continuation or "")
        if last or not turn.unfinished:
            found.append((before, line))
            before, line = before + line, ""
    return found


def _last_action(episode: Episode) -> list[tuple[str, str]]:
    """The last action, and what stands before it in its own message; there may be other messages before that."""
    begin = max((index + 1 for index, turn in enumerate(episode.turns[:-1]) if turn.continuation is None), default=0)
    return actions(replace(episode, turns=episode.turns[begin:]))[-1:]


def judge_messages(system: str, template: str, item: Item, answer: str, question: str = "") -> list[Message]:
    """The conversation that the judge sees, with this text as the answer.

    Example:
        >>> messages("", "{answer}? {question}", item, "4", "Even?")
        [{'role': 'user', 'content': '4? Even?'}]
    """
    fields = {
        "prompt": plain_text(messages_of(item.example.prompt)),
        "before": item.before,
        "answer": answer,
        "question": question,
    }
    if "{reference}" in template and not item.example.references:
        raise LmgymError(f"the template of a judge has {{reference}}, and example '{item.example.id}' has none")
    if item.example.references:
        fields["reference"] = item.example.references[0]
    content = FIELD.sub(lambda match: fields.get(match[1], match[0]), template)
    before: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": content}]


def check_template(reward: str, template: str, needs: Sequence[str] = ("answer",)) -> None:
    """Raise LmgymError unless a template holds what it needs and no field besides those that there are. Braces around
    anything but a lone word of letters are left alone."""
    key = f"key 'rewards.{reward}.template'"
    for field in FIELD.findall(template):
        if field not in FIELDS:
            raise LmgymError(f"{key}: there is no field '{{{field}}}'; {suggest(field, FIELDS)}")
    for field in needs:
        if f"{{{field}}}" not in template:
            raise LmgymError(f"{key} must have {{{field}}} in it, where the {field} is to stand")
