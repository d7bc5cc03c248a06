"""What must hold of truncated sampling: what is sampled is what is scored, by the policy, the old policy and the
reference; the ratio starts at 1; micro-batches do not matter; who cannot be drawn gets no gradient; greedy answers and
untruncated ones stay as they are; runs resume bit for bit; a model's own generation_config changes nothing."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from lmgym.algorithms.actor_critic import PPO
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.batch import Batch, collate
from lmgym.core.seeds import key
from lmgym.functional import truncation
from lmgym.inference.base import Completion, Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.builtin import builtin_model
from lmgym.models.distributions import logprobs_of_logits
from lmgym.models.policy import Policy
from lmgym.types import Episode, Example, Turn
from lmgym.updates.prepare import prepare
from tests import models, rounding, runs
from tests.parity.test_resume import Interrupting
from tests.runs import assert_equal_runs

T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
MAKE: dict[str, Callable[[int], Any]] = {
    "llama": models.llama,
    "gpt2": models.gpt2,
    "t5": lambda seed: builtin_model("builtin:tiny_t5", models.tokenizer(), T5, seed),
}
PATHS = [("llama", True), ("llama", False), ("gpt2", True), ("t5", True), ("t5", False)]
every_path = pytest.mark.parametrize(("kind", "fast"), PATHS, ids=[f"{k}{'' if f else ' plain'}" for k, f in PATHS])
RULES: dict[str, dict[str, Any]] = {
    "top k": {"top_k": 6, "temperature": 0.7},
    "top p": {"top_p": 0.6, "temperature": 1.4},
    "min p": {"min_p": 0.5, "temperature": 0.8, "min_new_tokens": 3},
    "all": {"top_k": 30, "top_p": 0.8, "min_p": 0.05, "temperature": 1.6, "min_new_tokens": 2},
}
every_rule = pytest.mark.parametrize("name", RULES)
PROMPTS = [(1, 40, 41), (1, 60), (1, *range(70, 90)), (1, 40, 41), (9,)]


def policy_of(kind: str, fast: bool = True, seed: int = 0) -> Policy:
    return Policy(models.sharpen(MAKE[kind](seed), 0.2, seed), models.tokenizer(), fast=fast)


def requests_of(policy: Policy, count: int) -> list[Request]:
    prompts = [PROMPTS[n % len(PROMPTS)] for n in range(count)]
    if policy.encoder_decoder:
        return [Request(policy.decoder_start, key(0, n), source_ids=prompt) for n, prompt in enumerate(prompts)]
    return [Request(prompt, key(0, n)) for n, prompt in enumerate(prompts)]


def batch_of(asked: list[Request], answers: list[Completion], policy: Policy, sampling: Sampling) -> Batch:
    episodes = [
        Episode(
            Example("x", "?"),
            n % 5,
            n,
            [
                Turn(
                    [*request.prompt_ids],
                    answer.ids,
                    answer.logprobs,
                    min_new_tokens=sampling.min_new_tokens,
                    source_ids=[*request.source_ids],
                    kept=answer.kept,
                    reward=float(answer.ids[0] % 3),
                )
            ],
            score=float(answer.ids[0] % 3),
        )
        for n, (request, answer) in enumerate(zip(asked, answers, strict=True))
    ]
    return collate(episodes, temperature=sampling.temperature, stop_ids=policy.stop_ids)


@torch.no_grad()
def by_hand(policy: Policy, request: Request, answer: Completion, sampling: Sampling) -> Tensor:
    """Log-probabilities of an answer: Hugging Face's forward pass over it, then softmax over the stored sets."""
    ids = torch.tensor([[*request.prompt_ids, *answer.ids]])
    inputs = {"input_ids": ids}
    if request.source_ids:
        inputs = {"input_ids": torch.tensor([request.source_ids]), "decoder_input_ids": ids}
    logits = policy.model(**inputs).logits[0, len(request.prompt_ids) - 1 : -1].double() / sampling.temperature
    sets = truncation.unpack(torch.from_numpy(answer.kept), policy.vocabulary)
    return logits.masked_fill(~sets, float("-inf")).log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]


# What is sampled is what is scored


@pytest.mark.slow
@every_path
@every_rule
def test_what_is_sampled_is_what_is_scored(name: str, kind: str, fast: bool) -> None:
    policy, reference = policy_of(kind, fast), policy_of(kind, fast, seed=1)
    sampling = Sampling(max_new_tokens=12, **RULES[name])
    asked = requests_of(policy, 16)
    answers = Sampler(policy, 6).generate(asked, sampling)
    batch = batch_of(asked, answers, policy, sampling)
    row, column = batch.actions.nonzero(as_tuple=True)
    assert batch.sampling_mask is not None and batch.logprobs_sampler is not None
    sets = truncation.unpack(batch.sampling_mask.bits[batch.kept[row, column]], policy.vocabulary)
    assert (
        bool(sets.gather(1, batch.tokens[row, column][:, None]).all()) and 1 < float(sets.sum(1).double().mean()) < 150
    )
    early = batch.stop_excluded[row, column] if batch.stop_excluded is not None else torch.zeros(len(row), dtype=bool)
    assert not bool(sets[early][:, list(policy.stop_ids)].any())  # excluded first, then truncated
    assert rounding.near(policy.model, policy.compute_logprobs_no_grad(batch).logprobs, batch.logprobs_sampler)
    plain = policy.compute_logprobs_no_grad(batch.replace(sampling_mask=None, kept=None)).logprobs
    assert float((plain - batch.logprobs_sampler)[row, column].mean()) < -0.05  # and not those of the whole vocabulary
    prepared = prepare(batch, policy, {"reference": reference}, GRPO(group_size=4, kl_coefficient=0.1, epochs=2))
    for column_of, who in ((prepared.logprobs_old, policy), (prepared.logprobs_ref, reference)):
        assert column_of is not None
        expected = torch.cat([by_hand(who, *pair, sampling) for pair in zip(asked, answers, strict=True)])
        assert rounding.near(who.model, column_of[batch.actions], expected)


@every_path
def test_the_sets_are_those_of_the_policys_own_distribution(kind: str, fast: bool) -> None:
    """Token by token, from Hugging Face's forward pass over the whole answer."""
    policy, sampling = policy_of(kind, fast), Sampling(max_new_tokens=10, **RULES["all"])
    asked = requests_of(policy, 8)
    different = total = 0
    for request, answer in zip(asked, Sampler(policy, 3).generate(asked, sampling), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *answer.ids]])
        inputs = {"input_ids": ids}
        if request.source_ids:
            inputs = {"input_ids": torch.tensor([request.source_ids]), "decoder_input_ids": ids}
        with torch.no_grad():
            logits = policy.model(**inputs).logits[0, len(request.prompt_ids) - 1 : -1].double()
        logits[: sampling.min_new_tokens, list(policy.stop_ids)] = float("-inf")
        expected = truncation.truncated(logits / sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        found = truncation.unpack(torch.from_numpy(answer.kept), policy.vocabulary)
        for ids_of, inside, own in zip(*expected, found, strict=True):
            different += len(set(ids_of[inside].tolist()) ^ set(own.nonzero()[:, 0].tolist()))
            total += int(own.sum())
    assert total > 200 and different <= 2  # fp32 against fp64: a token at the very edge


@every_path
@pytest.mark.parametrize("name", ["top k", "all"])
def test_a_completion_depends_on_its_request_only(name: str, kind: str, fast: bool) -> None:
    policy, sampling = models.exact(policy_of(kind, fast)), Sampling(max_new_tokens=8, **RULES[name])
    asked = requests_of(policy, 10)
    together = Sampler(policy, 10).generate(asked, sampling)
    for rows, order in ((3, range(9, -1, -1)), (1, (7, 2))):
        again = Sampler(policy, rows).generate([asked[n] for n in order], sampling)
        for n, answer in zip(order, again, strict=True):
            assert answer.ids == together[n].ids
            assert rounding.near(policy.model, answer.logprobs, together[n].logprobs)
            assert answer.kept.dtype == together[n].kept.dtype and np.array_equal(answer.kept, together[n].kept)


@every_path
def test_greedy_answers_and_rules_that_cut_nothing(kind: str, fast: bool) -> None:
    policy = policy_of(kind, fast)
    asked, everything = requests_of(policy, 6), {"top_k": policy.vocabulary, "top_p": 1.0, "min_p": 0.0}
    greedy = Sampler(policy).generate(asked, Sampling(max_new_tokens=8, temperature=0.0))
    assert Sampler(policy).generate(asked, Sampling(max_new_tokens=8, temperature=0.0, top_k=2, min_p=0.5)) == greedy
    free = Sampler(policy).generate(asked, Sampling(max_new_tokens=8))
    assert Sampler(policy).generate(asked, Sampling(max_new_tokens=8, top_p=1.0, min_p=0.0)) == free
    whole = Sampler(policy).generate(asked, Sampling(max_new_tokens=8, **everything))
    assert [replace(answer, kept=None) for answer in whole] == free and whole[0].kept is not None
    one = Sampler(policy).generate(asked, Sampling(max_new_tokens=8, top_k=1))
    assert [answer.ids for answer in one] == [answer.ids for answer in greedy]
    assert {logprob for answer in one for logprob in answer.logprobs} == {0.0}


@every_path
def test_the_models_own_generation_config_changes_nothing(kind: str, fast: bool) -> None:
    """Checkpoints bring a top_k, beams, suppressed tokens and the like; only their end-of-sequence ids are obeyed."""
    policy = policy_of(kind, fast)
    asked, sampling = requests_of(policy, 6), Sampling(max_new_tokens=8)
    before = [Sampler(policy).generate(asked, one) for one in (sampling, replace(sampling, temperature=0.0))]
    first = {answer.ids[0] for answers in before for answer in answers}
    policy.model.generation_config = GenerationConfig(
        do_sample=True, top_k=1, top_p=0.1, temperature=0.2, num_beams=3, repetition_penalty=9.0, min_length=20,
        suppress_tokens=sorted(first - {258}), forced_bos_token_id=258, max_new_tokens=2, eos_token_id=models.EOS,
    )  # fmt: skip
    after = [Sampler(policy).generate(asked, one) for one in (sampling, replace(sampling, temperature=0.0))]
    assert after == before
    policy.model.generation_config.eos_token_id = [models.EOS, *first]
    (stopped, _) = (Sampler(policy).generate(asked, one) for one in (sampling, sampling))
    assert {len(answer.ids) for answer in stopped} == {1}


# Gradient


@functools.cache
def in_double(kind: str, seed: int = 0) -> Policy:
    policy = Policy(models.in_double(MAKE[kind](seed)), models.tokenizer(), compute=torch.float64)
    return models.with_value_head(policy)


def sampled_batch(kind: str, name: str, seed: int) -> Batch:
    """Answers of a blunter policy than the one whose gradient is taken, with their sets."""
    policy = policy_of(kind)
    sampling = Sampling(max_new_tokens=7, **RULES[name])
    asked = [replace(request, key=key(seed, n)) for n, request in enumerate(requests_of(policy, 15))]
    batch = batch_of(asked, Sampler(policy, 15).generate(asked, sampling), policy, sampling)
    return batch.replace(score=batch.score.double(), rewards=batch.rewards.double())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("llama", "top k"), ("t5", "top k"), ("llama", "all"), ("t5", "min p")])
@settings(max_examples=2)
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 60))
def test_micro_batches_rows_and_the_first_ratio(name: str, kind: str, seed: int, tokens: int) -> None:
    policy, reference = in_double(kind), in_double(kind, 1)
    algorithm = PPO(group_size=3, kl_coefficient=0.1, entropy_coefficient=0.05, epochs=2)
    batch = prepare(sampled_batch(kind, name, seed), policy, {"reference": reference}, algorithm)
    _, metrics = models.gradient(algorithm, policy, batch, first=True)
    assert (metrics["ratio/mean"], metrics["ratio/clipped"]) == (1.0, 0.0)
    batch = batch.replace(logprobs_old=batch.logprobs_old + 0.3 * torch.sin(1000 * batch.logprobs_old) * batch.actions)
    whole, metrics = models.gradient(algorithm, policy, batch)
    small = policy.__class__.__new__(policy.__class__)
    small.__dict__ = {**policy.__dict__, "tokens_per_forward": tokens}
    parts, part_metrics = models.gradient(algorithm, small, batch)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    shuffled, _ = models.gradient(algorithm, policy, batch[order])
    assert float(whole.norm()) > 0 and metrics == pytest.approx(part_metrics, rel=1e-5, abs=1e-9)
    assert models.relative(whole, parts) < 1e-6 and models.relative(whole, shuffled) < 1e-6
    free, _ = models.gradient(algorithm, policy, batch.replace(sampling_mask=None, kept=None))
    assert models.relative(whole, free) > 1e-3


@every_rule
def test_tokens_outside_the_set_have_no_gradient(name: str) -> None:
    batch = sampled_batch("llama", name, 0)
    row, column = batch.actions.nonzero(as_tuple=True)
    sets = truncation.unpack(batch.sampling_mask.bits[batch.kept[row, column]], models.VOCABULARY)
    logits = torch.randn(
        sets.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True
    )
    for said in logprobs_of_logits(logits, batch, row, column, True):
        (gradient,) = torch.autograd.grad(said.sum(), logits, retain_graph=True)
        assert bool((gradient[~sets] == 0).all()) and bool(gradient.isfinite().all())
        assert bool((gradient[sets & (sets.sum(1, keepdim=True) > 1)] != 0).all())


# Whole runs

TRAINED: dict[str, dict[str, Any]] = {
    "grpo, reference": {"name": "grpo", "group_size": 4, "kl_coefficient": 0.1},
    "ppo": {"name": "ppo", "epochs": 2, "minibatches": 2, "kl_coefficient": 0.1, "entropy_coefficient": 0.01},
    "trpo": {"name": "trpo", "kl_coefficient": 0.1},
    "replay": {"name": "replay", "group_size": 4, "replayed": 3, "capacity": 9, "max_age": 4},
    "distill": {"name": "distill", "teacher": "builtin:tiny"},
    "gkd": {"name": "gkd", "teacher": "builtin:tiny", "divergence": "jsd"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "grpo, reference",
        "replay",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("ppo", "trpo", "distill", "gkd")),
    ],
)
def test_runs_resume_bit_for_bit(name: str, tmp_path: Path) -> None:
    rules = {"top_k": 7} if name in ("replay", "ppo") else {"top_k": 40, "top_p": 0.9, "min_p": 0.01}
    changes = {
        "algorithm": TRAINED[name],
        "sampling": {"max_new_tokens": 6, "temperature": 1.2, **rules},
        "evaluation": {"every": 3, "examples": 4, "temperature": 1.0, "top_p": 0.8},
        "steps": 4,
    }
    whole = runs.run(tmp_path / "whole", **changes)
    halves = runs.run(tmp_path / "halves", Interrupting(at=2), **changes)
    runs.run(halves, **changes)
    assert_equal_runs(whole, halves)
    records = [record for record in runs.records(whole / "metrics.jsonl") if record["kind"] == "train"]
    loose = rounding.typical_tolerance(AutoModelForCausalLM.from_pretrained(whole / "final"))
    assert all(
        record["sampler_logprob_gap"] < loose
        for record in records
        if "sampler_logprob_gap" in record and name != "replay"
    )
    assert all(record["gradient_norm"] > 0 for record in records)
    assert all(record["entropy"] < np.log(41) for record in records)
    changes["sampling"] = {"max_new_tokens": 6, "temperature": 1.2}
    free = runs.run(tmp_path / "free", **changes)
    assert (free / "rollouts.jsonl").read_bytes() != (whole / "rollouts.jsonl").read_bytes()
