"""A judge behind a chat endpoint that chooses between words, by the probabilities (`logprobs`) that the server gives
for the tokens of its reply. Of a server that gives none, the word in the reply counts as certain."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmgym.core.endpoint import Endpoint, EndpointError
from lmgym.core.errors import represent, warn
from lmgym.processes.pool import Failure
from lmgym.rewards.learned.choices import Choices, Question
from lmgym.rewards.learned.endpoint import Served, text_and_logprobs
from lmgym.rewards.learned.rows import clean
from lmgym.rewards.views import without_thinking

ASKED = {"logprobs": True, "top_logprobs": 20}  # 20: the most that OpenAI allows
REFUSED = (400, 403, 422)  # what a server may answer to a field that it does not know, or does not allow
LEAST, LARGEST = -1e4, 1e-3  # of a log-probability; servers write -9999 for none, and rounding may pass 0

_without: set[tuple[str, str]] = set()  # address and model of servers that refuse `logprobs`
_told: set[tuple[str, str]] = set()  # of those that give none, which was said

Reply = tuple[str, Any]  # its text, and its field `logprobs`


@dataclass(frozen=True)
class EndpointJudge:
    """A chat model behind an endpoint. Equal questions of one call are sent once.

    Example: EndpointJudge(served).probabilities([question], YES_NO) -> [[0.93, 0.07]]"""

    served: Served

    def probabilities(self, questions: Sequence[Question], choices: Choices) -> list[list[float] | Failure]:
        """A request that fails, or a reply that names no choice, is a Failure. Raises LmgymError if the endpoint fails
        for the first `concurrency` requests."""
        asked = [
            tuple((message["role"], clean(message["content"])) for message in question.messages(question.item.answer))
            for question in questions
        ]
        distinct = list(dict.fromkeys(asked))
        replies = self.served.replies(distinct, reply_with_logprobs)
        said = {one: self._read(reply, choices) for one, reply in zip(distinct, replies, strict=True)}
        return [said[one] for one in asked]

    def _read(self, reply: Reply | Failure, choices: Choices) -> list[float] | Failure:
        if isinstance(reply, Failure):
            return reply
        text, logprobs = reply
        word = last_choice(text, choices)
        if word is None:
            wanted = " or ".join(spellings[0] for spellings in choices)
            endpoint = self.served.endpoint
            start = represent(endpoint.redacted(text)[:100])
            return Failure("error", f"{endpoint.owner}: the reply has no {wanted}: {start}; change the template")
        shares = choice_shares(logprobs, choices, word)
        if shares is None:
            self._say_once(logprobs, choices)
        return shares or [float(place == word) for place in range(len(choices))]

    def _say_once(self, logprobs: Any, choices: Choices) -> None:
        endpoint = self.served.endpoint
        server = endpoint.base_url, endpoint.model
        if server in _told:
            return
        _told.add(server)
        wanted = " or ".join(spellings[0] for spellings in choices)
        if tokens_of(logprobs):
            why = (
                f"the logprobs of '{endpoint.model}' at {endpoint.base_url} have no usable token that is {wanted} alone"
            )
            remedy = "; ask for this one word, and nothing before or behind it"
        else:
            why, remedy = f"{endpoint.base_url} gives no logprobs of '{endpoint.model}'", ""
        warn(f"{endpoint.owner}: {why}, so what it answers counts as certain (1 or 0){remedy}")


def reply_with_logprobs(endpoint: Endpoint, conversation: Sequence[tuple[str, str]]) -> Reply:
    """The reply, asked for with log-probabilities, or without them where the server refuses a request that has them."""
    server = endpoint.base_url, endpoint.model
    if server not in _without:
        try:
            return text_and_logprobs(replace(endpoint, options={**ASKED, **endpoint.options}), conversation)
        except EndpointError as error:
            if error.status not in REFUSED:
                raise
    reply = text_and_logprobs(endpoint, conversation)  # if that is refused too, the question is to blame
    _without.add(server)
    return reply


def last_choice(text: str, choices: Choices) -> int | None:
    """The place of the choice that a reply names last, outside of its thoughts.

    Example: last_choice("Not rude. No", (("Yes", "yes"), ("No", "no"))) -> 1"""
    words = "|".join(re.escape(word) for spellings in choices for word in spellings)
    named = re.findall(rf"\b(?:{words})\b", without_thinking(text))
    return next(place for place, spellings in enumerate(choices) if named[-1] in spellings) if named else None


def tokens_of(logprobs: Any) -> list[Any]:
    """The entries of a reply's field `logprobs`, one for each of its tokens; none of what has another form.

    Example: tokens_of({"content": [{"token": "Yes", "logprob": -0.1}]}) -> [{"token": "Yes", "logprob": -0.1}]"""
    entries = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    return entries if isinstance(entries, list) else []


def choice_shares(logprobs: Any, choices: Choices, word: int) -> list[float] | None:
    """The probability of each choice at the last token of a reply that says this one (place `word`), renormalised: they
    add up to 1. A choice that is not among the tokens that the server names has 0. None without usable ones."""
    for entry in reversed(tokens_of(logprobs)):
        said = entry.get("token") if isinstance(entry, Mapping) else None
        if not isinstance(said, str) or "</think>" in said:
            return None
        if said.strip() in choices[word]:
            others = entry.get("top_logprobs")
            named = {said: entry.get("logprob")}
            for one in others if isinstance(others, list) else []:
                if isinstance(one, Mapping) and isinstance(one.get("token"), str):
                    named[one["token"]] = one.get("logprob")
            mass = [math.fsum(_share(p) for token, p in named.items() if token.strip() in own) for own in choices]
            return [one / math.fsum(mass) for one in mass] if mass[word] > 0 and len(named) > 1 else None
    return None


def _share(logprob: Any) -> float:
    """A probability; 0 for what is no log-probability."""
    number = isinstance(logprob, int | float) and not isinstance(logprob, bool)
    return math.exp(logprob) if number and LEAST <= logprob <= LARGEST else 0.0
