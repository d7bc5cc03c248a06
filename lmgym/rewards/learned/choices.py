"""A judge that chooses between words, such as Yes and No: how likely is each? Nothing is sampled by a local model
(`LocalJudge`); a chat endpoint is asked for the probabilities of what it has said (endpoint_choices.py)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmgym.core.errors import LmgymError
from lmgym.processes.pool import Failure
from lmgym.rewards.learned import batched_forward
from lmgym.rewards.learned.judge_prompts import Item, judge_messages
from lmgym.rewards.learned.rows import Row, chat_ids, fitted, plain_ids
from lmgym.rewards.learned.scorers import Scorer
from lmgym.types import Message

Choices = Sequence[Sequence[str]]  # the spellings of each choice
YES_NO = (("Yes", "yes", "YES"), ("No", "no", "NO"))


@dataclass(frozen=True)
class Question:
    """What a judge is asked: a template with an answer and a question in it.

    Example: Question("", "{answer}? {question}", item, "Is it even?").messages("4")
    -> [{'role': 'user', 'content': '4? Is it even?'}]"""

    system: str
    template: str
    item: Item
    ask: str = ""

    def messages(self, answer: str) -> list[Message]:
        """The conversation, with this text in place of the item's answer, of which a long one may have lost a part."""
        return judge_messages(self.system, self.template, self.item, answer, self.ask)


class Judge(Protocol):
    """Who answers questions by choosing between words."""

    def probabilities(self, questions: Sequence[Question], choices: Choices) -> Sequence[list[float] | Failure]:
        """For each question the probability of each choice, all together 1; or a Failure, if it has no answer."""


@dataclass(frozen=True)
class LocalJudge:
    """A causal model in this process. Its reply starts with `begin`, and the choice is its next token. A text that is
    too long is refused; or cut, as the recipe says, if this judge `cuts`.

    Example: LocalJudge(scorer).probabilities([question], YES_NO) -> [[0.93, 0.07]]"""

    scorer: Scorer
    begin: str = ""
    cuts: bool = True

    def probabilities(self, questions: Sequence[Question], choices: Choices) -> list[list[float]]:
        """The same, within rounding, whatever questions are asked together."""
        tokens = [self._tokens(spellings) for spellings in choices]
        return word_probabilities(self.scorer, [self.row(question) for question in questions], tokens)

    def row(self, question: Question) -> Row:
        """The ids of a question."""

        def rendered(answer: str) -> list[int]:
            return chat_ids(self.scorer, question.messages(answer), begin=self.begin)

        if self.cuts:
            return fitted(self.scorer, question.item.answer, rendered)
        ids, longest = rendered(question.item.answer), self.scorer.longest
        if longest is not None and len(ids) > longest:
            raise LmgymError(
                f"reward '{self.scorer.reward}': two answers with what is put around them have {len(ids)} tokens, and "
                f"{self.scorer.name} reads {longest}; lower sampling.max_new_tokens, or take a model that reads more"
            )
        return Row(tuple(ids))

    def _tokens(self, spellings: Sequence[str]) -> list[int]:
        found = dict.fromkeys(id for word in spellings for id in single_tokens(self.scorer, self.begin, word))
        if not found:
            raise LmgymError(
                f"key 'rewards.{self.scorer.reward}.model': '{spellings[0]}' is no single token of {self.scorer.name} "
                f"after {self.begin or chr(10)!r}; take another model"
            )
        return list(found)


def single_tokens(scorer: Scorer, begin: str, word: str) -> list[int]:
    """The single tokens that continue `begin` with this word; with a leading space too, unless `begin` ends in one.
    Empty if there is none."""
    # Tokenize `begin` and the word together: a word's token depends on the text before it.
    anchor = begin or "\n"
    before = plain_ids(scorer.tokenizer, anchor)
    tokens = []
    for spelling in (word,) if begin[-1:].isspace() else (word, f" {word}"):
        ids = plain_ids(scorer.tokenizer, anchor + spelling)
        if ids[:-1] == before and ids[-1] not in tokens:
            tokens.append(ids[-1])
    # "Score: " and "1" together would end in the token " 1", so `before` does not match; take the word's own token.
    alone = plain_ids(scorer.tokenizer, word)
    return tokens or (alone if len(alone) == 1 else [])


def word_probabilities(scorer: Scorer, rows: Sequence[Row], words: Sequence[Sequence[int]]) -> list[list[float]]:
    """For each row the probability of each word as the next one, renormalised over these words: they add up to 1. A
    word's probability is the sum over its tokens."""
    flat = [token for tokens in words for token in tokens]
    results = []
    for logprobs in batched_forward.next_logprobs(scorer, rows, flat):
        highest = max(logprobs)  # subtracted so that exp does not underflow for all words
        relative = iter([math.exp(value - highest) for value in logprobs])
        by_word = [math.fsum(next(relative) for _ in tokens) for tokens in words]
        results.append([value / math.fsum(by_word) for value in by_word])
    return results
