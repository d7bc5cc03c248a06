"""Truncated sampling: the kept sets are those of Hugging Face's logits warpers, worked numbers, the draws follow them,
what a set costs in bytes, and what is refused.

Source of the rules: transformers' TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper, run
here; worked numbers by hand.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lmgym.batch import collate
from lmgym.config.build import build_config
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.functional import truncation
from lmgym.functional.sampling import draw, draw_among
from lmgym.inference.base import Decoding, Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.policy import Policy
from lmgym.types import Episode, Example, Restriction, Turn
from tests import models, rounding, runs

BY_HAND = torch.tensor([[0.4, 0.05, 0.3, 0.15, 0.1]], dtype=torch.float64).log()
NOTHING: dict[str, Any] = {"top_k": None, "top_p": None, "min_p": None}


def said(candidates: truncation.Candidates) -> list[set[int]]:
    return [set(ids[inside].tolist()) for ids, inside in zip(*candidates, strict=True)]


def of_hugging_face(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> list[set[int]]:
    """The tokens that its warpers leave, in the order in which its `generate` applies them."""
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k is not None else []
    warpers += [TopPLogitsWarper(top_p)] if top_p is not None else []
    warpers += [MinPLogitsWarper(min_p)] if min_p is not None else []
    for warp in warpers:
        logits = warp(torch.zeros(len(logits), 1, dtype=torch.long), logits)
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in logits]


# Sets


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"top_k": 2}, {0, 2}),
        ({"top_k": 5}, {0, 1, 2, 3, 4}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 2}),
        ({"top_p": 0.86}, {0, 2, 3, 4}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.3}, {0, 2, 3}),  # .12 of .4, so .1 goes
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.0}, {0, 1, 2, 3, 4}),
        # Top-p is of the mass that top-k left: .4 of .7 is .571, so .56 needs one token and .6 two.
        ({"top_k": 2, "top_p": 0.56}, {0}),
        ({"top_k": 2, "top_p": 0.6}, {0, 2}),
        ({"top_k": 3, "top_p": 0.8}, {0, 2}),  # .7 of .85 is .824; of the whole it would have taken a third
        ({"top_p": 0.8}, {0, 2, 3}),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.5}, {0, 2}),
    ],
)
def test_sets_by_hand(rules: dict[str, Any], expected: set[int]) -> None:
    assert said(truncation.truncated(BY_HAND, **rules)) == [expected]
    assert of_hugging_face(BY_HAND, 1.0, **{**NOTHING, **rules}) == [expected]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 900),
    spread=st.sampled_from([0.3, 2.0, 8.0]),
    temperature=st.sampled_from([0.7, 1.0, 1.9]),
    top_k=st.none() | st.integers(1, 300),
    # A sum of up to 900 probabilities rounds by up to 900 * 2^-52 = 2e-13: nearer to 1 the order of adding decides.
    top_p=st.none() | st.just(1.0) | st.floats(0.01, 1.0 - 1e-12),
    min_p=st.none() | st.floats(0.0, 1.0),
    barred=st.booleans(),
)
def test_sets_are_hugging_faces(
    seed: int,
    size: int,
    spread: float,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    barred: bool,
) -> None:
    """In fp64, so that rounding at the edges, which no two implementations share, stays out of it."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(3, size, generator=generator, dtype=torch.float64)
    if barred:  # min_new_tokens: excluded before anything else, never kept
        logits[:, 1::3] = -math.inf
    found = said(truncation.truncated(logits / temperature, top_k, top_p, min_p))
    assert found == of_hugging_face(logits, temperature, top_k, top_p, min_p)
    for row, own in zip(logits, found, strict=True):
        assert int(row.argmax()) in own and bool(row[list(own)].isfinite().all())
        alone = truncation.truncated(row[None] / temperature, top_k, top_p, min_p)
        assert said(alone) == [own]  # whatever its neighbours need


def test_equally_likely_tokens() -> None:
    """As in Hugging Face, ties at the edge of top-k and min-p all stay. In top-p its sort picks some of a tie, and ours
    keeps the whole of it."""
    logits = torch.tensor([[0.3, 0.2, 0.2, 0.2, 0.1]], dtype=torch.float64).log()
    assert said(truncation.truncated(logits, top_k=2)) == of_hugging_face(logits, 1.0, 2, None, None) == [{0, 1, 2, 3}]
    assert (
        said(truncation.truncated(logits, min_p=0.5)) == of_hugging_face(logits, 1.0, None, None, 0.5) == [{0, 1, 2, 3}]
    )
    assert said(truncation.truncated(logits, top_k=2, top_p=0.99)) == [{0, 1, 2, 3}]
    assert said(truncation.truncated(logits, top_p=0.4)) == [{0, 1, 2, 3}]
    (theirs,) = of_hugging_face(logits, 1.0, None, 0.4, None)
    assert len(theirs) == 2 and theirs < {0, 1, 2, 3}
    even = torch.zeros(2, 7)
    assert said(truncation.truncated(even, top_k=1, top_p=0.1, min_p=1.0)) == [set(range(7))] * 2


def test_rows_without_numbers_are_left_to_whoever_complains() -> None:
    assert said(truncation.truncated(torch.full((1, 4), math.nan), top_k=2, top_p=0.5, min_p=0.1)) == [{0, 1, 2, 3}]


# Draws


@pytest.mark.slow
def test_draws_follow_the_truncated_distribution() -> None:
    """40,000 draws with fixed keys against the softmax of what Hugging Face's warpers leave: chi-square."""
    logits = 2 * torch.randn(1, 700, generator=torch.Generator().manual_seed(3))
    temperature, top_k, top_p, min_p = 1.3, 60, 0.9, 0.05
    (inside,) = of_hugging_face(logits, temperature, top_k, top_p, min_p)
    assert 5 < len(inside) < 60
    exact = torch.full((700,), -math.inf, dtype=torch.float64)
    exact[list(inside)] = logits[0, list(inside)].double() / temperature
    exact = exact.softmax(0)
    count = 40_000
    uniform = torch.from_numpy(seeds.uniforms([seeds.key(1, n) for n in range(count)], 0, 1)[:, 0])
    candidates = truncation.truncated(logits / temperature, top_k, top_p, min_p)
    many = truncation.Candidates(candidates.ids.expand(count, -1), candidates.inside.expand(count, -1))
    tokens, logprobs = draw_among(logits.expand(count, -1), many, temperature, uniform)
    assert torch.allclose(logprobs.double(), exact[tokens].log(), rtol=0, atol=rounding.rounding(700))
    seen, expected = torch.bincount(tokens, minlength=700), exact * count
    assert int(seen[expected == 0].sum()) == 0 and float(expected[expected > 0].min()) > 5
    statistic = float(((seen - expected)[expected > 0] ** 2 / expected[expected > 0]).sum())
    freedom = len(inside) - 1
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), uniform=st.floats(0, 1, exclude_max=True), top_k=st.integers(1, 300))
def test_a_draw_among_candidates_is_the_draw_with_the_rest_at_minus_infinity(
    seed: int, uniform: float, top_k: int
) -> None:
    logits = 3 * torch.randn(1, 600, generator=torch.Generator().manual_seed(seed))
    candidates = truncation.truncated(logits, top_k, 0.95)
    among = torch.zeros_like(logits, dtype=torch.bool)
    among[0, candidates.ids[candidates.inside]] = True
    number = torch.tensor([uniform], dtype=torch.float64)
    token, logprob = draw_among(logits, candidates, 1.0, number)
    full, full_logprob = draw(logits.masked_fill(~among, -math.inf), 1.0, number)
    loose = rounding.rounding(600)  # probabilities are sums over up to 600 tokens, and so is what they are divided by
    assert float(logprob) == pytest.approx(float(full_logprob), abs=loose) or token != full
    upper = logits.masked_fill(~among, -math.inf).double().softmax(-1)[0].cumsum(0)
    for one in (int(token), int(full)):  # at most a rounding apart
        assert float(upper[one - 1] if one else 0) - loose <= uniform <= float(upper[one]) + loose


# Bytes


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 400), top_k=st.integers(1, 30))
def test_a_set_takes_its_ids_or_its_bits_whichever_is_less(seed: int, size: int, top_k: int) -> None:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(seed))
    logits[1] = 0.0  # all equally likely, so all stay
    candidates = truncation.truncated(logits, top_k)
    width = math.ceil(size / 8)
    for own, inside in zip(truncation.to_arrays(candidates, size), said(candidates), strict=True):
        assert own.nbytes == min(4 * len(inside), width)
        assert own.dtype == (np.int32 if 4 * len(inside) < width else np.uint8)
        sets = torch.from_numpy(own)
        assert set(truncation.unpack(sets, size)[0].nonzero()[:, 0].tolist()) == inside
        assert truncation.sizes(sets).tolist() == [len(inside)]
    together = torch.from_numpy(truncation.concatenate(truncation.to_arrays(candidates, size)))
    assert together.nbytes <= 4 * width
    assert (
        truncation.unpack(together, size).sum(1).tolist()
        == truncation.sizes(together).tolist()
        == [len(s) for s in said(candidates)]
    )
    rows = [set(row.nonzero()[:, 0].tolist()) for row in truncation.unpack(together, size)]
    assert rows == said(candidates)


def test_the_stated_bound() -> None:
    """Bytes of one token: ceil(V / 8), with top-k 4 k where that is less."""
    assert [Sampling(**rules).kept_bytes(150_000) for rules in ({}, {"top_p": 1.0}, {"min_p": 0.0})] == [0, 0, 0]
    assert [Sampling(**rules).kept_bytes(150_000) for rules in ({"top_p": 0.9}, {"min_p": 0.1})] == [18_750] * 2
    assert Sampling(top_k=50, min_p=0.1).kept_bytes(150_000) == 200
    assert Sampling(top_k=9).kept_bytes(259) == 33 and Sampling(top_k=8).kept_bytes(259) == 32
    assert Sampling(top_k=50, temperature=0.0).kept_bytes(150_000) == 0  # nothing is drawn


def sampled(count: int = 12, **rules: Any) -> tuple[Policy, list[Any]]:
    policy = Policy(models.sharpen(models.llama(), 0.2), models.tokenizer())
    asked = [Request((1, 40 + n), seeds.key(0, n)) for n in range(count)]
    return policy, Sampler(policy).generate(asked, Sampling(max_new_tokens=9, **rules))


@pytest.mark.parametrize("rules", [{"top_k": 5}, {"top_k": 40}, {"top_p": 0.6}, {"min_p": 0.2}])
def test_what_a_batch_takes(rules: dict[str, Any]) -> None:
    policy, answers = sampled(**rules)
    bound, actions = Sampling(**rules).kept_bytes(policy.vocabulary), sum(len(answer.ids) for answer in answers)
    assert sum(answer.kept.nbytes for answer in answers) <= bound * actions
    turns = [Turn([1], answer.ids, answer.logprobs, kept=answer.kept) for answer in answers]
    batch = collate([Episode(Example("x", "?"), 0, n, [turn]) for n, turn in enumerate(turns)])
    assert batch.sampling_mask is not None and batch.sampling_mask.bits.nbytes <= bound * actions
    assert (batch.sampling_mask.bits.dtype == torch.int32) == (rules == {"top_k": 5})
    read = truncation.unpack(batch.sampling_mask.bits, policy.vocabulary)
    row, column = batch.actions.nonzero(as_tuple=True)
    assert bool(read[batch.kept[row, column]].gather(1, batch.tokens[row, column][:, None]).all())


def test_sets_of_both_forms_in_one_batch() -> None:
    few, many = [{3, 200}, {7}, {0, 1, 258}], [set(range(60)), {5}]

    def turn(sets: list[set[int]]) -> Turn:
        mask = torch.zeros(len(sets), models.VOCABULARY, dtype=torch.bool)
        for row, own in zip(mask, sets, strict=True):
            row[list(own)] = True
        form = truncation.concatenate(truncation.to_arrays(truncation.from_mask(mask), models.VOCABULARY))
        return Turn([9], [min(own) for own in sets], [-1.0] * len(sets), kept=form)

    def read(turns: list[Turn]) -> tuple[Any, list[set[int]]]:
        bits = collate([Episode(Example("x", "?"), 0, n, [one]) for n, one in enumerate(turns)]).sampling_mask.bits
        return bits.dtype, [set(row.nonzero()[:, 0].tolist()) for row in truncation.unpack(bits, models.VOCABULARY)]

    assert turn(few).kept.dtype == np.int32 and turn(many).kept.dtype == np.uint8
    assert read([turn(few), turn(few[:1])]) == (torch.int32, few + few[:1])
    assert read([turn(few), turn(many)]) == (torch.uint8, few + many)
    for sets in (few, many):  # through a checkpoint, as replay's buffer goes
        back = Episode.from_json(Episode(Example("x", "?"), 0, 0, [turn(sets)]).to_json()).turns[0].kept
        assert back.dtype == turn(sets).kept.dtype and np.array_equal(back, turn(sets).kept)


# Bad input


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sampling": {"top_k": 0}}, r"sampling\.top_k is 0; it must be at least 1; to draw from the whole vocabula"),
        ({"sampling": {"top_k": 2.5}}, r"key 'sampling\.top_k': .*integer"),
        ({"sampling": {"top_p": 0}}, r"sampling\.top_p is 0\.0; it is a share of the probability, above 0 and at mo"),
        ({"sampling": {"top_p": 1.01}}, r"sampling\.top_p is 1\.01; it is a share"),
        ({"sampling": {"top_p": math.nan}}, r"sampling\.top_p is nan; it is a share"),
        ({"sampling": {"min_p": -0.1}}, r"sampling\.min_p is -0\.1; it is a share of the likeliest token's probabil"),
        ({"sampling": {"min_p": 1.5}}, r"sampling\.min_p is 1\.5; it is a share"),
        ({"sampling": {"kept_gib": 0}}, r"sampling\.kept_gib is 0\.0; it must be above 0"),
        ({"sampling": {"topk": 5}}, r"unknown key 'topk' in 'sampling'; did you mean 'top_k'\?"),
        ({"sampling": {"num_beams": 4}}, r"'sampling\.num_beams' is no key of this section: training has to know wi"),
        ({"sampling": {"generation": {"num_beams": 4}}}, r"'sampling\.generation' is no key .*evaluation: \{generat"),
        ({"sampling": {"top_k": 5}, "algorithm": "nlpo"}, r"nlpo decides itself which tokens may be sampled"),
        ({"evaluation": {"top_k": 0, "temperature": 1}}, r"evaluation\.top_k is 0; it must be at least 1"),
        ({"evaluation": {"top_p": 0.9}}, r"evaluation\.top_p is 0\.9, and evaluation\.temperature is 0, where nothi"),
        ({"evaluation": {"max_new_tokens": 0}}, r"evaluation\.max_new_tokens is 0; it must be at least 1"),
        ({"evaluation": {"min_new_tokens": 7}}, r"evaluation\.min_new_tokens is 7; it must lie between 0 and max_ne"),
        ({"evaluation": {"generation": {"num_beam": 2}}}, r"unknown key 'evaluation\.generation\.num_beam'; did you"),
        ({"evaluation": {"generation": {"num_beams": 0}}}, r"evaluation\.generation\.num_beams is 0; it must be at"),
        ({"evaluation": {"generation": {"num_beams": "four"}}}, r"key 'evaluation\.generation\.num_beams': .*integer"),
        ({"evaluation": {"generation": {"do_sample": True}}}, r"has a place of its own; write evaluation\.temperatu"),
        ({"evaluation": {"generation": {"max_length": 9}}}, r"has a place of its own; write evaluation\.max_new_tok"),
        ({"evaluation": {"generation": {"length_penalty": 2}}}, r"length_penalty is about beams; give num_beams abo"),
        ({"evaluation": {"generation": {"typical_p": 0.9}}}, r"typical_p is about sampling, and evaluation\.tempera"),
        ({"evaluation": {"generation": {"num_beams": 2, "early_stopping": "soon"}}}, r"early_stopping.*'never'"),
    ],
)  # fmt: skip
def test_a_wrong_recipe_is_told_in_a_sentence(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(LmgymError, match=match):
        build_config(runs.tiny(**changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sampling": {"top_k": 300}}, r"sampling\.top_k is 300, and the model's vocabulary has 259 tokens, so noth"),
        ({"evaluation": {"top_k": 300, "temperature": 1}}, r"evaluation\.top_k is 300, and the model's vocabulary has"),
        ({"sampling": {"stop_ids": [2, 259]}}, r"sampling\.stop_ids holds 259, and the model has the ids 0 to 258"),
        ({"sampling": {"stop_ids": [-1]}}, r"sampling\.stop_ids holds -1, and the model has the ids 0 to 258"),
        ({"evaluation": {"generation": {"forced_eos_token_id": 5000}}}, r"generation\.forced_eos_token_id holds 5000"),
        ({"evaluation": {"generation": {"suppress_tokens": [5, -2]}}}, r"generation\.suppress_tokens holds -2, and th"),
        ({"evaluation": {"generation": {"bad_words_ids": [[7], [8, 300]]}}}, r"generation\.bad_words_ids holds 300"),
        # 4 prompts, 4 answers, 6 tokens, 33 bytes
        ({"sampling": {"max_new_tokens": 6, "top_p": 0.5, "kept_gib": 3167 / 2**30}}, r"may take 0\.00 GiB \(4 prom"),
        (
            {"sampling": {"max_new_tokens": 6, "top_k": 2, "kept_gib": 767 / 2**30}},
            r"more than sampling\.kept_gib \(.*\); give a smaller sampling\.top_k, lower prompts_per_step or max_new",
        ),
        (
            {"sampling": {"max_new_tokens": 6, "kept_gib": 2.9e-6}, "algorithm": {"name": "nlpo", "group_size": 4}},
            r"the kept sets of a step may take",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model_is_refused_before_it_is_loaded(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(LmgymError, match=match):
        runs.run(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_the_sampler_keeps_to_the_bound_and_to_one_rule() -> None:
    """For those who call it without a recipe."""
    with pytest.raises(LmgymError, match=r"kept sets of 12 answers take more than sampling\.kept_gib"):
        sampled(top_p=0.5, kept_gib=500 / 2**30)
    with pytest.raises(LmgymError, match=r"sampling\.top_k is 260, and the model's vocabulary has 259"):
        sampled(top_k=260)
    policy = Policy(models.llama(), models.tokenizer())
    with pytest.raises(LmgymError, match="the algorithm decides itself which tokens may be sampled"):
        Sampler(policy).restricted(Restriction("top_k", 5)).generate([Request((1,), 0)], Sampling(top_k=3))
    assert Decoding(temperature=1.0, top_k=3).truncates
