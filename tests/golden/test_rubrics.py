"""Rubrics: sums by hand, gates and bounds as properties, a local judge and an endpoint, data in four forms."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmgym.core.errors import LmgymError
from lmgym.processes.pool import Failure
from lmgym.rewards.base import check_examples
from lmgym.rewards.building import build_rewards
from lmgym.rewards.learned.choices import YES_NO, LocalJudge
from lmgym.rewards.learned.criteria import Criterion, read_criteria, rubric_value
from lmgym.rewards.learned.endpoint_choices import choice_shares, last_choice
from lmgym.rewards.learned.rubric import endpoint_rubric, rubric
from lmgym.rewards.learned.scorers import load_scorer
from lmgym.types import Example
from tests import learned_models as tiny
from tests import runs
from tests.golden.test_judges import Server, serve  # noqa: F401 (a fixture)
from tests.parity.test_resume import Interrupting

EXAMPLE = Example("a/0", "How much is half of 48?", ("24",))
SHARE = tiny.share_of(256)
TEMPLATE = "{answer}? {question}"

# ---------------------------------------------------------------- the number


def by_hand(*criteria: tuple[float, float] | tuple[float, float, bool]) -> float:
    """Of (weight, probability of a yes) or (weight, probability, gate)."""
    return rubric_value([Criterion("?", one[0], len(one) > 2) for one in criteria], [one[1] for one in criteria])


@pytest.mark.parametrize(
    ("criteria", "value"),
    [
        ([(1, 0.7)], 0.7),
        ([(3, 1.0), (1, 0.0)], 0.75),
        ([(2, 0.5), (1, 0.8)], 0.6),
        ([(2, 1.0), (-1, 0.5)], 0.75),  # what takes away is not in the denominator: (2 - .5) / 2
        ([(1, 0.25), (-4, 0.5)], 0.0),  # never below 0
        ([(5, 1.0), (-8, 0.0)], 1.0),
        ([(1, 0.9), (3, 0.5, True)], 0.6),  # one half passes the gate: (.9 + 1.5) / 4
        ([(1, 0.9), (3, 0.499, True)], 0.0),
        ([(1, 0.9), (0, 0.6, True)], 0.9),  # a gate that earns nothing of itself
    ],
)
def test_values_by_hand(criteria: list[Any], value: float) -> None:
    assert by_hand(*criteria) == pytest.approx(value, abs=1e-12)


shares = st.floats(0, 1)
weights = st.floats(-100, 100)
rubrics = st.lists(st.tuples(weights, shares, st.booleans()), min_size=1, max_size=8).map(
    lambda rows: [(Criterion("?", 1.0), 0.5), *((Criterion("?", w, gate and w >= 0), p) for w, p, gate in rows)]
)


@given(rubrics, st.randoms())
def test_a_value_is_a_share_of_any_order_and_a_gate_shuts(rows: list[tuple[Criterion, float]], chance: Any) -> None:
    criteria, yes = zip(*rows, strict=True)
    value = rubric_value(criteria, yes)
    assert 0.0 <= value <= 1.0
    mixed = chance.sample(rows, len(rows))
    assert rubric_value(*zip(*mixed, strict=True)) == value  # to the last bit
    shut = any(one.gate and p < 0.5 for one, p in rows)
    assert value == 0.0 if shut else True
    assert rubric_value(criteria, [float(one.weight > 0 or one.gate) for one in criteria]) == 1.0
    better = [max(p, 0.9) if one.weight > 0 else p for one, p in rows]
    assert rubric_value(criteria, better) >= value  # more of what is wanted is never worth less


# ---------------------------------------------------------------- the schema


@pytest.mark.parametrize(
    "form",
    [
        ["Right?", {"ask": "Rude?", "weight": -2, "gate": False}],
        [{"criterion": "Right?", "points": 1, "tags": ["a"]}, {"criterion": "Rude?", "points": -2}],  # HealthBench
        [{"title": "t", "description": "Right?", "weight": 1}, {"description": "Rude?", "weight": -2}],  # RaR
        {"criteria": [{"name": "r", "text": "Right?", "choices": ["no", "yes"]}, {"text": "Rude?", "weight": -2}]},
        [{"ask": "Right?", "criterion": None, "weight": None}, {"ask": "Rude?", "weight": -2.0}],  # as parquet has it
    ],
)
def test_all_forms_are_one_rubric(form: Any) -> None:
    wanted = (Criterion("Right?", 1.0), Criterion("Rude?", -2.0))
    assert read_criteria(form, "here") == wanted == read_criteria(json.dumps(form), "here")


def refused(section: dict[str, Any], meta: dict[str, Any] | None = None, **more: Any) -> str:
    """What a recipe's author is told before training; an endpoint is asked nothing."""
    server = {"base_url": "http://localhost:1/v1", "model": "judge"}
    with pytest.raises(LmgymError) as raised:
        check_examples(
            build_rewards({"endpoint_rubric": {**server, **section}}), [Example("a/0", "?", meta=meta or {})]
        )
    return str(raised.value)


@pytest.mark.parametrize(
    ("criteria", "told"),
    [
        ([], "criteria' is empty; write a list of questions, or name the data's column of them as 'column'"),
        ([{"weight": 1}], "criteria', number 1: it has no question; write it as 'ask'"),
        (["fine", {"ask": " "}], "number 2: the question must be a text, not ' '"),
        ([{"ask": "?", "wieght": 2}], "unknown key 'wieght'; did you mean 'weight'?"),
        ([{"ask": "?", "text": "!"}], "'ask' and 'text' mean the same"),
        ([{"ask": "?", "weight": "2"}], "the weight must be a number of at most 1e+06 in size, not '2'"),
        ([{"ask": "?", "weight": True}], "not True"),
        ([{"ask": "?", "weight": math.nan}], "not nan"),
        ([{"ask": "?", "weight": 10**400}], "in size, not 1000"),
        ([{"ask": "?", "weight": -1, "gate": True}], "a gate must have a yes, so its weight cannot be negative"),
        ([{"ask": "?", "gate": "no"}], "'gate' must be true or false, not 'no'"),
        ([{"ask": "?", "weight": -1}, {"ask": "!", "weight": 0}], "has no positive weight, so no answer can earn"),
        ([f"{n}?" for n in range(257)], "has 257 criteria; 256 are the most"),
    ],
)
def test_mistakes_in_a_recipe_are_told_before_training(criteria: list[Any], told: str) -> None:
    assert (
        told in (sentence := refused({"criteria": criteria})) and "key 'rewards.endpoint_rubric.criteria'" in sentence
    )


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("Right?", "is a text that is no JSON: 'Right?'"),
        ("[" * 100_000, "is a text that is no JSON"),
        (7, "is no list of criteria but 7"),
        ({"rules": []}, "is no list of criteria but None"),
        ([3], "number 1: it must be a text or {ask: ..., weight: ...}, not 3"),
        ([{"text": "?", "choices": ["bad", "fine", "good"]}], "a criterion is answered by no or yes only"),
        ([], "the rubric of 'a/0' has no positive weight"),
    ],
)
def test_mistakes_in_the_data_name_the_example(value: Any, told: str) -> None:
    assert told in (sentence := refused({"column": "rubric"}, {"rubric": value})) and "'a/0'" in sentence


def test_a_missing_column_is_told() -> None:
    told = refused({"column": "rubrik"}, {"rubric": ["?"]})
    assert "column': 'a/0' has no column 'rubrik'; did you mean 'rubric'?" in told
    assert "must have {question}" in refused({"criteria": ["?"], "template": "{answer}"})
    assert "concurrency' must be at least 1, not 0" in refused({"criteria": ["?"], "concurrency": 0})


# ---------------------------------------------------------------- a local judge


def test_a_local_judge_by_hand(tmp_path: Path) -> None:
    """It says yes with 9/12 to everything; " Yes" and "Yes" both count, "x" does not."""
    logits = {"Yes": math.log(6), "\u0120Yes": math.log(3), "No": math.log(1), "\u0120No": math.log(2), "x": 9.0}
    arguments = {"model": tiny.constant(tmp_path, logits), "criteria": [{"ask": "a", "weight": 3}]}
    own = Example("a/1", "?", meta={"own": [{"ask": "b", "weight": -1}, {"ask": "c", "gate": True}]})
    assert rubric(["24"], [EXAMPLE], **arguments) == pytest.approx([0.75])
    assert rubric(["24"], [own], **arguments, column="own") == pytest.approx([(3 - 1 + 1) * 0.75 / 4])
    judge = LocalJudge(load_scorer("rubric", "causal", arguments["model"]))
    with pytest.raises(LmgymError, match=r"rubric.model': 'Sure' is no single token of .*; take another model"):
        judge.probabilities([], (("Sure",), ("No",)))


def test_a_local_judge_says_what_transformers_says(tmp_path: Path) -> None:
    folder = tiny.causal(tmp_path, seed=2)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    words, yes = tokenizer.convert_tokens_to_ids(["Yes", "\u0120Yes", "No", "\u0120No"]), {}
    for ask in ("Right?", "Rude?"):
        messages = [{"role": "user", "content": f"24? {ask}"}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + "So:"
        with torch.no_grad():
            likely = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1][words].softmax(-1)
        yes[ask] = float(likely[0] + likely[1])
    assert abs(yes["Right?"] - yes["Rude?"]) > 1e-3
    criteria = [{"ask": "Right?", "weight": 2}, {"ask": "Rude?", "weight": -1}]
    arguments = {"model": folder, "criteria": criteria, "template": TEMPLATE, "system": "", "begin": "So:"}
    found = rubric(["24", "5 or 6", "24"], [EXAMPLE] * 3, **arguments)
    assert found[0] == pytest.approx((2 * yes["Right?"] - yes["Rude?"]) / 2, abs=2 * SHARE) and found[2] == found[0]
    assert rubric(["24"], [EXAMPLE], **arguments) == pytest.approx(found[:1], abs=2 * SHARE)  # alone or not


# ---------------------------------------------------------------- an endpoint


def token(word: str, **others: Any) -> dict[str, Any]:
    """A reply of one word, with the log-probabilities of some tokens: token("Yes", Yes=0.6, no=0.2)."""
    top = [{"token": name.replace("_", " "), "logprob": math.log(p) if p else -9999.0} for name, p in others.items()]
    return {"content": [{"token": word, "logprob": top[0]["logprob"], "top_logprobs": top}]}


def after(word: str, reply: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"token": word, "logprob": 0.0, "top_logprobs": []}, *reply["content"]]}


def replied(text: Any, logprobs: Any = None) -> tuple[int, dict[str, str], bytes]:
    choice = {"message": {"role": "assistant", "content": text}, "logprobs": logprobs}
    return 200, {}, json.dumps({"choices": [choice]}).encode()


def judged(server: Server, *texts: str, **arguments: Any) -> list[float | Failure]:
    quick = {"base_url": server.url, "model": "judge", "wait": 0.001, "template": TEMPLATE, "system": ""}
    return endpoint_rubric(list(texts), [EXAMPLE] * len(texts), **{**quick, "criteria": ["Right?"], **arguments})


@pytest.mark.filterwarnings("ignore:.*logprobs")
@pytest.mark.parametrize(
    ("text", "logprobs", "p"),
    [
        ("Yes", token("Yes", Yes=0.5, No=0.125, _yes=0.1, NO=0.025, Maybe=0.25), 0.8),  # all spellings count
        ("No", token("No", No=0.75, Yes=0.25), 0.25),
        ("Yes", token("Yes", Yes=0.75, Sure=0.25), 1.0),  # a word that the server does not name has 0
        ("Yes", token("Yes", Yes=0.75, No=0.0), 1.0),  # -9999
        ("It is. Yes", after("It", token(" Yes", _Yes=0.6, No=0.4)), 0.6),
        ("Yes. It is", {"content": [*token("Yes", Yes=0.6, No=0.4)["content"], {"token": " It"}]}, 0.6),
        ("<think>No</think>Yes", {"content": [*token("Yes", No=0.9, Yes=0.1)["content"], {"token": "</think>"}]}, 1.0),
        ("Yes", None, 1.0),
        ("Yes? Surely not: no", None, 0.0),
        ("Yes", token("Yes", Yes=0.75), 1.0),  # without alternatives it is no distribution
    ],
)  # fmt: skip
def test_probabilities_are_those_of_the_last_yes_or_no(
    serve: Callable[..., Server],  # noqa: F811
    text: str,
    logprobs: Any,
    p: float,
) -> None:
    assert judged(serve(lambda number, body: replied(text, logprobs)), "24") == pytest.approx([p])


def test_one_request_for_each_criterion_and_equal_ones_once(serve: Callable[..., Server]) -> None:  # noqa: F811
    asked = {"24? Right?": token("Yes", Yes=0.9, No=0.1), "24? Rude?": token("No", No=0.8, Yes=0.2),
             "5? Right?": token("No", No=0.7, Yes=0.3), "5? Rude?": token("No", No=1.0, Yes=0.0)}  # fmt: skip
    server = serve(lambda number, body: replied(*_reply(asked[body["messages"][-1]["content"]])))
    criteria = [{"ask": "Right?", "weight": 2}, {"ask": "Rude?", "weight": -1}]
    found = judged(server, "24", "5", "24", criteria=criteria, options={"max_tokens": 1, "top_logprobs": 5})
    assert found == pytest.approx([(1.8 - 0.2) / 2, 0.3, (1.8 - 0.2) / 2])
    assert len(server.requests) == 4
    body = {key: value for key, value in server.requests[0][2].items() if key != "messages"}
    assert body == {"model": "judge", "temperature": 0, "logprobs": True, "top_logprobs": 5, "max_tokens": 1}
    gated = [{"ask": "Right?", "gate": True}]
    assert judged(server, "24", "5", criteria=gated) == pytest.approx([0.9, 0.0])


def _reply(logprobs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return logprobs["content"][0]["token"], logprobs


def test_a_server_that_refuses_logprobs_is_asked_without_and_that_is_said_once(
    serve: Callable[..., Server],  # noqa: F811
) -> None:
    server = serve(lambda number, body: (400, {}, b"no logprobs") if "logprobs" in body else replied("Yes"))
    with pytest.warns(UserWarning, match="gives no logprobs of 'judge', so what it answers counts as certain") as told:
        assert judged(server, "24") == [1.0]
        assert judged(server, "25", "26", concurrency=1) == [1.0, 1.0]
    assert len(told) == 1 and ["logprobs" in body for _, _, body in server.requests] == [True, False, False, False]


@pytest.mark.parametrize("tokens", [["Yes."], ["Y", "es"]])
def test_a_word_that_is_no_token_of_its_own_is_said_as_that(
    serve: Callable[..., Server],  # noqa: F811
    tokens: list[str],
) -> None:
    logprobs = {"content": [{"token": one, "logprob": -0.1, "top_logprobs": []} for one in tokens]}
    server = serve(lambda number, body: replied("".join(tokens), logprobs))
    said = (
        "the logprobs of 'judge' at .* have no usable token that is Yes or No alone, so what .*; ask for this one word"
    )
    with pytest.warns(UserWarning, match=said) as told:
        assert judged(server, "24", "25") == [1.0, 1.0]
    assert len(told) == 1


@pytest.mark.filterwarnings("ignore:.*gives no logprobs")
def test_an_answer_is_not_judged_if_one_criterion_is_not(serve: Callable[..., Server]) -> None:  # noqa: F811
    def reply(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        asked = body["messages"][-1]["content"]
        return (400, {}, b"too long") if asked == "b? Rude?" else replied("I cannot say" if "c?" in asked else "Yes")

    criteria = ["Right?", "Rude?"]
    found = judged(serve(reply), "a", "b", "c", criteria=criteria, concurrency=1)
    assert found[0] == 1.0
    assert [isinstance(one, Failure) for one in found] == [False, True, True]
    assert "too long" in found[1].message  # type: ignore[union-attr]
    assert "the reply has no Yes or No: 'I cannot say'; change the template" in found[2].message  # type: ignore[union-attr]
    dead = serve(lambda number, body: (401, {}, b"no"))
    with pytest.raises(LmgymError, match="status 401"):
        judged(dead, *"abcdefgh", concurrency=2)


junk = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-(10**400), 10**400) | st.sampled_from(["Yes", " no", "x"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["content", "token", "logprob", "top_logprobs"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("wrong", [1e3, 0.5, math.nan, math.inf, 10**400, True, "0", None])
def test_what_is_no_log_probability_counts_nothing(wrong: Any) -> None:
    top = [{"token": "No", "logprob": wrong}, {"token": "yes", "logprob": math.log(0.5)}]
    reply = {"content": [{"token": "Yes", "logprob": math.log(0.25), "top_logprobs": top}]}
    assert choice_shares(reply, YES_NO, 0) == [1.0, 0.0]


@given(junk, st.sampled_from([0, 1]))
def test_any_logprobs_give_shares_or_nothing(logprobs: Any, word: int) -> None:
    for one in (
        logprobs,
        {"content": [logprobs]},
        {"content": [{"token": "Yes", "logprob": -1, "top_logprobs": logprobs}]},
    ):
        found = choice_shares(one, YES_NO, word)
        assert found is None or (sum(found) == pytest.approx(1.0) and min(found) >= 0 and found[word] > 0)


@given(st.text() | st.lists(st.sampled_from(["Yes", "no", "<think>", "</think>", "notes", " ", "."])).map("".join))
def test_any_text_names_a_choice_or_none(text: str) -> None:
    assert last_choice(text, YES_NO) in (None, 0, 1)


# ---------------------------------------------------------------- in a run


@pytest.mark.slow
def test_a_run_with_criteria_from_the_data_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """With an evaluation that picks the best of two by the rubric, which may be a metric of its own."""
    rows = [{"prompt": f"{n}+1=", "rubric": [{"criterion": f"Says {n + 1}.", "points": 5}]} for n in range(40)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = {"model": tiny.causal(tmp_path / "judge", seed=3, longest=1024), "template": TEMPLATE, "system": ""}
    changes = {
        "task": {"name": "data", "path": str(data), "references": None},
        "rewards": {"rubric": {**judge, "column": "rubric", "weight": 10.0}},
        "evaluation": {
            "every": 2, "examples": 4, "samples": 2, "temperature": 1.0, "best_of": "strict",
            "metrics": {"strict": {"reward": "rubric", **judge, "criteria": [{"ask": "Short?", "gate": True}]}},
        },
        "checkpoint": {"every": 1},
        "steps": 2,
    }  # fmt: skip
    whole = runs.run(tmp_path / "whole", **changes)
    halves = runs.run(tmp_path / "halves", Interrupting(at=1), **changes)
    runs.run(halves, **changes)
    runs.assert_equal_runs(whole, halves)
    results = [one for one in runs.records(whole / "metrics.jsonl") if one["kind"] == "evaluation"]
    assert {"rubric", "strict", "strict/best@2"} <= {*results[-1]}
    scored = [one["score"] for one in runs.records(whole / "rollouts.jsonl")]
    assert len({*scored}) > 2 and all(0.0 <= one <= 10.0 for one in scored)
