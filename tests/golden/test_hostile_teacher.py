"""A served teacher that lies: each reply is refused with one sentence, before anything is learned from it."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmgym.algorithms.requirements import ServedTeacher
from lmgym.core import endpoint as client
from lmgym.core.errors import LmgymError
from lmgym.inference.served_teacher import EndpointTeacher
from tests.golden.test_served_teacher import TOP_K, TeacherServer, in_fp64

Tables = list[Any]
HUGE = 10**30
DEEP = b"[" * 100_000


@pytest.fixture(scope="module")
def server() -> Iterator[TeacherServer]:
    """One server for all replies. Each test sets what it says."""
    server = TeacherServer(in_fp64(1))
    yield server
    server.close()


def ranked(tables: Tables, rank: int) -> list[dict[str, Any]]:
    """The entry of this rank in each table."""
    return [next(entry for entry in table.values() if entry["rank"] == rank) for table in tables]


def in_each(change: Callable[[dict[str, Any], str], object]) -> Callable[[Tables], None]:
    """A change of each table; it is also given the id of the likeliest token."""

    def change_all(tables: Tables) -> None:
        for table in tables:
            change(table, next(name for name in table if table[name]["rank"] == 1))

    return change_all


def every(key: str, value: Any) -> Callable[[Tables], None]:
    return in_each(lambda table, first: [entry.update({key: value}) for entry in table.values()])


def first(key: str, value: Any) -> Callable[[Tables], None]:
    return in_each(lambda table, first: table[first].__setitem__(key, value))


def renamed(new: Callable[[str], str]) -> Callable[[Tables], None]:
    return in_each(lambda table, first: table.__setitem__(new(first), table.pop(first)))


def swapped(tables: Tables) -> None:
    for one, other in zip(ranked(tables, 1), ranked(tables, TOP_K), strict=True):
        one["logprob"], other["logprob"] = other["logprob"], one["logprob"]


def twice(table: dict[str, Any], first: str) -> None:
    """The likeliest token stands there twice, and the second one is gone."""
    second = next(name for name in table if table[name]["rank"] == 2)
    table["0" + first] = table.pop(second)


LIES: dict[str, tuple[Callable[[Tables], None], str]] = {
    "an id twice": (in_each(twice), "no token id|has no log-probability"),
    "a space in an id": (renamed(lambda name: f" {name}"), "no token id|has no log-probability"),
    "a sign before an id": (renamed(lambda name: f"+{name}"), "no token id|has no log-probability"),
    "a low line in an id": (renamed(lambda name: f"1_{name}"), "no token id|has no log-probability"),
    "foreign digits": (renamed(lambda name: "\u0663"), "no token id|has no log-probability"),
    "a negative id": (renamed(lambda name: "-1"), "no token id|has no log-probability"),
    "an id of 30 digits": (renamed(lambda name: str(HUGE)), "no token id|has no log-probability"),
    "an id beyond the vocabulary": (renamed(lambda name: "999999999"), "999999999 likely|has no log-probability"),
    "no id": (renamed(lambda name: ""), "no token id|has no log-probability"),
    "rank 1 is not the likeliest": (swapped, "a token of a higher rank is less likely"),
    "an infinite rank": (every("rank", math.inf), "a float in place of int"),
    "a rank that is half": (first("rank", 1.5), "a float in place of int"),
    "a rank that is true": (first("rank", True), "a bool in place of int"),
    "a rank that is a text": (first("rank", "1"), "a str in place of int"),
    "a rank that is null": (first("rank", None), "a NoneType in place of int"),
    "rank 0": (first("rank", 0), "the ranks of the tokens are not 1 to"),
    "a negative rank": (first("rank", -HUGE), "the ranks of the tokens are not 1 to"),
    "a huge rank": (every("rank", 10**400), "the ranks of the tokens are not 1 to"),
    "nothing is likely": (every("logprob", -math.inf), "are no log-probabilities"),
    "vLLM's -9999 everywhere": (every("logprob", -9999.0), "are no log-probabilities"),
    "nearly nothing is likely": (every("logprob", -20.0), "are no log-probabilities"),
    "everything is certain": (every("logprob", 0.0), "are no log-probabilities"),
    "more than certain": (first("logprob", 1.0), "are no log-probabilities"),
    "infinitely likely": (first("logprob", math.inf), "are no log-probabilities"),
    "an infinity of either sign": (first("logprob", -math.inf), "a token of a higher rank is less likely"),
    "no number": (first("logprob", math.nan), "a log-probability is nan"),
    "a number of 400 digits": (every("logprob", -(10**400)), "OverflowError"),
    "a log-probability that is a text": (first("logprob", "-0.1"), "a str in place of int or float"),
    "a log-probability that is false": (first("logprob", False), "a bool in place of int or float"),
    "a log-probability that is a list": (first("logprob", [-0.1]), "a list in place of int or float"),
    "no log-probability": (in_each(lambda table, first: table[first].pop("logprob")), "KeyError|TypeError"),
    "an entry that is a number": (in_each(lambda table, first: table.__setitem__(first, -0.1)), "TypeError"),
    "one token less": (in_each(lambda table, first: table.pop(first)), "ranks of the tokens|no log-prob"),
    "a place less": (lambda tables: tables.clear(), "ValueError"),
    "a place more": (lambda tables: tables.append(tables[0]), "ValueError"),
    "a text for a table": (lambda tables: tables.__setitem__(0, "0123456789" * 9), "AttributeError|no log-prob"),
    "a list for a table": (lambda tables: tables.__setitem__(0, [*range(200)]), "no log-probability|Attribute"),
}
REPLIES: dict[str, tuple[str, Any, str]] = {
    "tables: a text": ("completions", {"choices": [{"prompt_logprobs": "  "}]}, "as vLLM does"),
    "tables: a dictionary": ("completions", {"choices": [{"prompt_logprobs": {"0": {}, "1": {}}}]}, "as vLLM does"),
    "choices: a number": ("completions", {"choices": 7}, "as vLLM does"),
    "a list": ("completions", [1], "as vLLM does"),
    "null": ("completions", None, "as vLLM does"),
    "deep": ("completions", DEEP, "did not send JSON"),
    "bytes that are no text": ("completions", b"\xff\xfe\x00", "did not send JSON"),
    "nothing": ("completions", b"", "did not send JSON"),
    "an integer of 5,000 digits": ("completions", b"9" * 5000, "did not send JSON"),
    "too long": ("completions", b" " * (2**20 + 10**5), "a reply of more than"),
    "models: an infinite length": ("models", b'{"data": [{"id": "a", "max_model_len": 1e999}]}', "list of its models"),
    "models: nan": ("models", b'{"data": [{"id": "a", "max_model_len": NaN}]}', "list of its models"),
    "models: a negative length": ("models", {"data": [{"id": "a", "max_model_len": -5}]}, "list of its models"),
    "models: a length that is true": ("models", {"data": [{"id": "a", "max_model_len": True}]}, "list of its models"),
    "models: a length as a text": ("models", {"data": [{"id": "a", "max_model_len": "128"}]}, "list of its models"),
    "models: an id that is a list": ("models", {"data": [{"id": ["a"]}]}, "list of its models"),
    "models: a dictionary": ("models", {"data": {"a": 1}}, "list of its models"),
    "models: texts": ("models", {"data": ["a", "b"]}, "list of its models"),
    "models: none": ("models", {"data": []}, "has several models|has no model"),
    "models: a thousand": ("models", {"data": [{"id": f"{n}" * 99} for n in range(999)]}, "has several models"),
    "models: escapes": ("models", {"data": [{"id": "\x1b]52;c;\x07"}, {"id": "\ud800"}]}, "has several models"),
    "models: deep": ("models", DEEP, "did not send JSON|list of its models"),
    "tokens: a number": ("tokenize", {"tokens": 3}, "did not send token ids at /tokenize"),
    "tokens: null": ("tokenize", {"tokens": None}, "did not send token ids at /tokenize"),
    "tokens: a dictionary": ("tokenize", {"tokens": {"0": 1}}, "did not send token ids at /tokenize"),
    "tokens: texts": ("tokenize", {"tokens": ["a"]}, "did not send token ids at /tokenize"),
    "tokens: true": ("tokenize", {"tokens": [True]}, "did not send token ids at /tokenize"),
    "tokens: infinite": ("tokenize", b'{"tokens": [1e999]}', "did not send token ids at /tokenize"),
    "tokens: 30 digits": ("tokenize", {"tokens": [HUGE]}, "has another tokenizer"),
}


def assert_refused(server: TeacherServer, sentence: str) -> None:
    teacher = EndpointTeacher(ServedTeacher(server.address, TOP_K), server.policy.vocabulary)
    with pytest.raises(LmgymError, match=sentence) as caught:
        teacher.reach(server.policy.tokenizer)
    said = str(caught.value)
    assert said.startswith("algorithm.teacher: http://") and len(said) < 1500 and said.isprintable()
    said.encode()  # no half of a surrogate pair


@pytest.mark.parametrize("lie", LIES)
def test_a_table_that_contradicts_itself_is_refused(lie: str, server: TeacherServer) -> None:
    change, sentence = LIES[lie]

    def lies(path: str, status: int, said: Any) -> tuple[int, Any]:
        if path.endswith("completions"):
            tables = said["choices"][0]["prompt_logprobs"]
            changed = tables[1:]
            change(changed)
            said["choices"][0]["prompt_logprobs"] = [None, *changed]
        return status, json.dumps(said).encode()

    server.change = lies
    assert_refused(server, sentence)


@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_of_another_form_is_refused(reply: str, server: TeacherServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.time, "sleep", lambda seconds: None)
    place, lie, sentence = REPLIES[reply]
    server.change = lambda path, status, said: (status, lie if path.endswith(place) else said)
    assert_refused(server, sentence)
