"""Right and wrong answers to a task's own examples, as a judge of answers should tell them apart. No model writes them:
right ones are the references, wrong ones are those with the number changed, or the references of other examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.rewards.maths.final_answer import extract_answer, normalise_number, same_answer
from lmgym.text.chat import messages_of, plain_text
from lmgym.types import Example

LONGEST_ANSWER = 60  # characters of a final answer; what is longer is a text, such as a summary
SHORT = 3  # words of a reference that is an answer by itself
LETTERS = "ABCDE"
SENTENCES = (  # answers to an open prompt without references
    "Yes, I think so.", "It was a wonderful day, and everybody was happy.", "This is terrible; I hate it.", "No idea",
    "First we look at the numbers. Then we add them. The result is 12.", "They left the house early in the morning, ",
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How an answer is written: `{answer}` in a text; without a text as in the example's own reference.

    Example: Form("a box", r"\\boxed{{answer}}")"""

    name: str
    text: str = ""


REFERENCE = Form("as the references")
FORMS = (
    REFERENCE, Form("\\boxed{...}", "\\boxed{{answer}}"), Form("The answer is ...", "The answer is {answer}"),
    Form("#### ...", "#### {answer}"), Form("<answer>...</answer>", "<answer>{answer}</answer>"),
    Form("<think>...</think> <answer>...</answer>", "<think>\nStep by step.\n</think>\n<answer>\n{answer}\n</answer>"),
    Form("the answer alone", "{answer}"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An example with a right answer, and wrong ones: `near`, where the final answer is missed by one, and `other`, of
    another example. None: there is none. An open task has no final `answer`; one without references has only `wrong`,
    a sentence that is neither.

    Example: case_of(example, other_example).near -> "9 + 9 = 18\\n#### 19\""""

    example: Example
    stranger: Example | None = None  # another example, with another answer
    form: Form = REFERENCE
    sentence: str = ""
    room: int = 20_000  # characters of the longest answer
    said: str | None = None  # what a policy has answered, which then stands in the place of the wrong text

    @cached_property
    def answer(self) -> str | None:
        """The right final answer."""
        return final_of(self.example)

    @cached_property
    def question(self) -> str:
        """What is asked: the last message."""
        return str(messages_of(self.example.prompt)[-1].get("content", "")) or plain_text(self.example.prompt)

    @cached_property
    def right(self) -> str | None:
        """The right answer's whole text."""
        return best_of(self.example) if self.answer is None else self.write(self.answer)

    @cached_property
    def near_answer(self) -> str | None:
        """A wrong final answer that is near the right one."""
        return None if self.answer is None or self.said is not None else missed(self.answer)

    @cached_property
    def near(self) -> str | None:
        """The right text with the near miss in place of the final answer."""
        return None if self.near_answer is None else self.write(self.near_answer)

    @cached_property
    def other(self) -> str | None:
        """A wrong text: that of another example; of rated answers the worst."""
        if self.example.rated and not self.example.references:
            return min(self.example.rated, key=lambda one: one.rating).text
        if self.stranger is None:
            return None
        other = final_of(self.stranger)
        return best_of(self.stranger) if self.form == REFERENCE or other is None else self.write(other)

    @cached_property
    def wrong(self) -> str:
        """The wrong text that attacks begin with."""
        return self.said if self.said is not None else self.near or self.other or self.sentence

    @cached_property
    def wrong_answer(self) -> str | None:
        """The final answer of `wrong`, where that is known."""
        if self.said is not None:
            return None
        return self.near_answer or (final_of(self.stranger) if self.stranger is not None else None)

    def write(self, answer: str) -> str | None:
        """A text that ends with this final answer; None if the reference's own has no place in it that can be found."""
        if self.form.text:
            return self.form.text.replace("{answer}", answer)
        reference, right = self.example.references[0], self.answer or ""
        head, found, tail = reference.rpartition(right)
        if not found and (number := normalise_number(right)) is not None and number.denominator == 1:
            head, found, tail = reference.rpartition(f"{int(number):,}")
        return head + answer + tail if found and right else None


def final_of(example: Example) -> str | None:
    """The final answer of an example's reference: what the data names, what is announced, or all of a short one."""
    if not example.references:
        return None
    reference, named = example.references[0], example.meta.get("answer")
    if isinstance(named, str | int | float) and str(named).strip() and str(named).strip() in reference:
        found: str | None = str(named).strip()
    else:
        found = extract_answer(reference, strict=True)
    if found is None and (normalise_number(reference) is not None or 0 < len(reference.split()) <= SHORT):
        found = reference.strip()
    return found if found and len(found) <= LONGEST_ANSWER else None


def best_of(example: Example) -> str | None:
    """The text of a right answer that the data gives: the first reference, or the answer with the best rating."""
    if example.references:
        return example.references[0]
    if len({one.rating for one in example.rated}) < 2:
        return None
    return max(example.rated, key=lambda one: one.rating).text


def missed(answer: str) -> str | None:
    """A wrong answer next to the right one: the number and one more, or the next letter of a choice.

    Example: missed("18"), missed("1/2"), missed("B"), missed("Paris") -> ('19', '3/2', 'C', None)"""
    if answer in [*LETTERS]:  # a single one
        return LETTERS[(LETTERS.index(answer) + 1) % 4]
    number = normalise_number(answer)
    if number is None:
        return None
    number += 1
    if number.denominator == 1:
        return str(number.numerator)
    return f"{float(number):g}" if "." in answer else f"{number.numerator}/{number.denominator}"


def make_cases(examples: Sequence[Example], count: int, seed: int, room: int) -> list[Case]:
    """Cases of `count` examples, drawn by the seed; answers are at most about `room` characters long. Raises LmgymError
    without an example."""
    if not examples:
        raise LmgymError("the task has no examples to audit a reward with")
    drawn = [examples[int(place)] for place in seeds.permutation(len(examples), "audit", seed)[:count]]
    return [
        Case(one, _stranger(drawn, place), REFERENCE, SENTENCES[place % len(SENTENCES)], room)
        for place, one in enumerate(drawn)
    ]


def _stranger(examples: Sequence[Example], place: int) -> Example | None:
    """The next example whose answer is another one."""
    own, answer = best_of(examples[place]), final_of(examples[place])
    for other in (*examples[place + 1 :], *examples[:place]):
        text, final = best_of(other), final_of(other)
        different = text != own if answer is None or final is None else not same_answer(answer, final)
        if text is not None and different and (answer is None) == (final is None):
            return other
    return None
