"""NLPO and the kept sets below it: worked numbers, the sampler against the policy, PPO as the case without a mask.

The worked numbers were made with RL4LMs' own code (its logits processor and its masked distribution).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lmgym.algorithms.actor_critic import PPO
from lmgym.algorithms.nlpo import NLPO
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, SamplingMask, collate
from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.core.seeds import key
from lmgym.functional import truncation
from lmgym.functional.sampling import draw
from lmgym.inference.base import Completion, Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.builtin import builtin_model
from lmgym.models.critic import with_critic
from lmgym.models.distributions import logprobs_of_logits
from lmgym.models.policy import Policy
from lmgym.types import Episode, Example, Restriction, Turn
from lmgym.updates.prepare import prepare
from tests import models, rounding, runs

SEED_CASE = [0.05, 0.4, 0.3, 0.15, 0.07, 0.03]
VOCABULARY = models.VOCABULARY
WIDTH = -(-VOCABULARY // 8)


def said(mask: Tensor) -> list[set[int]]:
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]


# Sets


@pytest.mark.parametrize(
    ("amount", "least", "expected"),
    [(0.6, 1, {1, 2}), (0.9, 1, {1, 2, 3, 4}), (0.6, 2, {1, 2}), (0.6, 3, {1, 2, 3}), (0.3, 1, {1}), (0.41, 1, {1, 2})],
)
def test_top_p_of_rl4lms(amount: float, least: int, expected: set[int]) -> None:
    """Its causal logits processor; its encoder-decoder one keeps least + 1 (.6 and 2 give {.4, .3, .15})."""
    logits = torch.tensor([SEED_CASE]).log() + 3.0
    assert said(truncation.top_p(logits, amount, least)) == [expected]
    assert said(truncation.top_p(torch.cat([logits, logits.flip(1)]), amount, least)) == [
        expected,
        {5 - i for i in expected},
    ]


def test_top_k() -> None:
    logits = torch.tensor([SEED_CASE]).log()
    for amount, least, expected in (
        (1, 1, {1}),
        (3, 1, {1, 2, 3}),
        (1, 4, {0, 1, 2, 3, 4} - {0}),
        (9, 1, set(range(6))),
    ):
        assert said(truncation.top_k(logits, amount, least)) == [expected]


def test_all_of_the_mass_is_all_of_the_tokens() -> None:
    """Also those whose probability rounding would lose."""
    assert bool(truncation.top_p(torch.linspace(0, -200, 5000)[None], 1.0).all())


def test_equally_likely_tokens_stay_or_go_together() -> None:
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]]).log()
    assert said(truncation.top_p(logits, 0.5)) == said(truncation.top_k(logits, 2)) == [{0, 1, 2}]
    assert said(truncation.top_p(logits[:, 1:], 0.1)) == [{0, 1}]


def test_a_large_vocabulary_is_sorted_as_far_as_needed() -> None:
    """Rows that need 1 token, about 3,000 and almost all of 20,000; each alone gives the same."""
    spread = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[20.0], [2.0], [0.1]])
    sets = truncation.top_p(spread, 0.9)
    loose = rounding.typical(2 * 20_000)  # of the sum that divides, and of the sum that reaches 0.9
    for row, mask in zip(spread, sets, strict=True):
        mass = row.double().softmax(-1).sort(descending=True).values.cumsum(0)
        least, most = (int((mass < 0.9 + side * loose).sum()) + 1 for side in (-1, 1))
        assert least <= int(mask.sum()) <= most <= least + 2
        assert torch.equal(truncation.top_p(row[None], 0.9)[0], mask)
    counts = sets.sum(1).tolist()
    assert counts[0] < truncation.FEW and 8 * truncation.FEW < counts[1] < 64 * truncation.FEW < counts[2]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 70), amount=st.floats(0.01, 0.99), least=st.integers(1, 70))
def test_top_p_is_the_smallest_set_of_that_mass(seed: int, size: int, amount: float, least: int) -> None:
    logits = 4 * torch.randn(3, size, generator=torch.Generator().manual_seed(seed))
    p = logits.double().softmax(-1)
    loose = rounding.rounding(2 * size)  # of the sum that divides, and of the sum that reaches `amount`
    for row, chosen in zip(p, said(truncation.top_p(logits, amount, least)), strict=True):
        mass = float(row[list(chosen)].sum())
        smallest = min(chosen, key=lambda token: float(row[token]))
        assert mass >= amount - loose and len(chosen) >= min(least, size)
        assert len(chosen) <= least or mass - float(row[smallest]) < amount + loose
        assert all(row[smallest] >= row[other] for other in set(range(size)) - chosen)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 5), size=st.integers(1, 70))
def test_packing(seed: int, rows: int, size: int) -> None:
    mask = torch.rand(rows, size, generator=torch.Generator().manual_seed(seed)) < 0.4
    bits = models.bits_of(mask)
    assert (
        bits.shape == (rows, math.ceil(size / 8)) == (rows, truncation.packed_bytes(size)) and bits.dtype == torch.uint8
    )
    assert torch.equal(truncation.unpack(bits, size), mask)
    assert torch.equal(truncation.sizes(bits), mask.sum(1))


# Distributions


def row_of(probabilities: list[float], among: Sequence[bool], token: int = 0) -> tuple[Tensor, Batch]:
    """Logits, up to a constant, and the batch of one action that was drawn from a kept set."""
    bits = models.bits_of(torch.tensor([among])).numpy()
    turn = Turn([0], [token], [0.0], kept=bits)
    return torch.tensor([probabilities], dtype=torch.float64).log() + 1.7, collate(
        [Episode(Example("x", "?"), 0, 0, [turn])]
    )


def say(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    row, column = batch.actions.nonzero(as_tuple=True)
    logprob, entropy = logprobs_of_logits(logits, batch, row, column, True)
    return logprob[0], entropy[0]


def unnormalised(batch: Batch) -> Batch:
    return NLPO(compat="rl4lms").before_scoring(batch)


@pytest.mark.parametrize(("token", "original", "right"), [(0, -0.693147, -0.470004), (1, -1.203973, -0.980829)])
def test_the_masked_distribution(token: int, original: float, right: float) -> None:
    """p = .5 .3 .15 .05, the first two kept: renormalised by default, RL4LMs' numbers under `compat`."""
    logits, batch = row_of([0.5, 0.3, 0.15, 0.05], [True, True, False, False], token)
    logprob, entropy = say(logits, NLPO().before_scoring(batch))
    assert (float(logprob), float(entropy)) == pytest.approx((right, 0.661563), abs=1e-6)
    logprob, entropy = say(logits, unnormalised(batch))
    assert (float(logprob), float(entropy)) == pytest.approx((original, 0.884707), abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(2, 30))
def test_excluded_tokens_have_no_gradient(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(size, generator=generator, dtype=torch.float64) + 0.01
    among = torch.rand(size, generator=generator) < 0.5
    among[0] = True
    logits, batch = row_of(p.tolist(), among.tolist())
    logits.requires_grad_()
    for part in say(logits, batch):
        (gradient,) = torch.autograd.grad(part, logits, retain_graph=True)
        assert bool((gradient[0, ~among] == 0).all()) and bool(gradient.isfinite().all())
    inside = (p * among / (p * among).sum())[among]
    logprob, entropy = say(logits, batch)
    assert float(logprob.detach()) == pytest.approx(float(inside[0].log()))
    assert float(entropy.detach()) == pytest.approx(-float((inside * inside.log()).sum()), abs=1e-9)
    (gradient,) = torch.autograd.grad(say(logits, unnormalised(batch))[0], logits)
    assert bool((gradient != 0).all())  # RL4LMs: the excluded ones are pushed down all the same


@pytest.mark.parametrize("uniform", [1 - 2.0**-53, 1.0], ids=["fp64", "as a GPU without fp64 rounds it"])
def test_the_last_number_below_one_draws_a_kept_token(uniform: float) -> None:
    """Rounding of u * mass must not reach into the blocks of the vocabulary where nothing is kept."""
    logits = torch.full((64, 1000), float("-inf"))
    logits[:, 3:9] = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = draw(logits, 1.0, torch.full((64,), uniform, dtype=torch.float64))
    assert set(tokens.tolist()) == {8} and bool(logprobs.isfinite().all())


# Sampler

ARCHITECTURE = {
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2},
    "bart": {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 64,
    },
}
MAKE: dict[str, Callable[[int], Any]] = {
    "llama": models.llama,
    "gpt2": models.gpt2,
    "t5": lambda seed: builtin_model("builtin:tiny_t5", models.tokenizer(), ARCHITECTURE["t5"], seed),
    "bart": lambda seed: builtin_model("builtin:tiny_bart", models.tokenizer(), ARCHITECTURE["bart"], seed),
}
PATHS = [("llama", True), ("llama", False), ("gpt2", True), ("t5", True), ("t5", False), ("bart", True)]
every_path = pytest.mark.parametrize(("kind", "fast"), PATHS, ids=[f"{k}{'' if f else ' plain'}" for k, f in PATHS])
PROMPTS = [(1, 40, 41), (1, 60), (1, *range(70, 90)), (1, 40, 41), (9,)]


def policy_of(kind: str, fast: bool = True, seed: int = 0, scale: float = 0.2) -> Policy:
    return Policy(models.sharpen(MAKE[kind](seed), scale, seed), models.tokenizer(), fast=fast)


def requests_of(policy: Policy, count: int) -> list[Request]:
    prompts = [PROMPTS[n % len(PROMPTS)] for n in range(count)]
    if policy.encoder_decoder:
        return [Request(policy.decoder_start, key(0, n), source_ids=prompt) for n, prompt in enumerate(prompts)]
    return [Request(prompt, key(0, n)) for n, prompt in enumerate(prompts)]


def batch_of(asked: list[Request], answers: list[Completion], policy: Policy, sampling: Sampling) -> Batch:
    turns = [
        Turn(
            [*request.prompt_ids],
            answer.ids,
            answer.logprobs,
            min_new_tokens=sampling.min_new_tokens,
            source_ids=[*request.source_ids],
            kept=answer.kept,
        )
        for request, answer in zip(asked, answers, strict=True)
    ]
    episodes = [Episode(Example("x", "?"), n % 5, n, [turn]) for n, turn in enumerate(turns)]
    return collate(episodes, temperature=sampling.temperature, stop_ids=policy.stop_ids)


@torch.no_grad()
def sets_by_hand(
    guide: Policy, request: Request, answer: Completion, rule: Restriction, sampling: Sampling
) -> list[tuple[set[int], set[int]]]:
    """From Hugging Face's forward over the whole answer, in fp64, token by token: the tokens that must be in the set,
    and those that may be, where rounding decides at the edge."""
    loose = rounding.typical_tolerance(guide.model)
    ids = torch.tensor([[*request.prompt_ids, *answer.ids]])
    inputs = {"input_ids": ids}
    if request.source_ids:
        inputs = {"input_ids": torch.tensor([request.source_ids]), "decoder_input_ids": ids}
    logits = guide.model(**inputs).logits[0, len(request.prompt_ids) - 1 : -1].double() / sampling.temperature
    result = []
    for place, line in enumerate(logits):
        if place < sampling.min_new_tokens:
            line[list(guide.stop_ids)] = -math.inf
        ordered = line.sort(descending=True).values
        mass = ordered.softmax(0).cumsum(0)
        few, many = (
            max(rule.least, int(rule.amount if rule.rule == "top_k" else (mass < rule.amount + side * loose).sum() + 1))
            for side in (-1, 1)
        )
        inner, outer = line >= ordered[few] + loose, line >= ordered[many - 1] - loose
        result.append((*said(inner[None]), *said(outer[None])))
    return [(inner | {0, 1, 2}, outer | {0, 1, 2}) for inner, outer in result]


@pytest.mark.slow
@every_path
@pytest.mark.parametrize(
    ("rule", "own", "changes"),
    [
        (Restriction("top_p", 0.5), False, {}),
        (Restriction("top_k", 4, least=6), True, {"temperature": 0.7, "min_new_tokens": 4}),
        (Restriction("top_p", 0.8, least=3), False, {"temperature": 1.5, "min_new_tokens": 2}),
    ],
    ids=["top p", "own top k", "top p, warm"],
)
def test_what_is_sampled_is_what_is_scored(
    kind: str, fast: bool, own: bool, rule: Restriction, changes: dict[str, Any]
) -> None:
    policy, mask = policy_of(kind, fast), policy_of(kind, fast, seed=1)
    asked, sampling = requests_of(policy, 16), Sampling(max_new_tokens=12, **changes)
    answers = Sampler(policy, 6).restricted(rule, None if own else mask).generate(asked, sampling)
    batch = batch_of(asked, answers, policy, sampling)
    row, column = batch.actions.nonzero(as_tuple=True)
    assert batch.sampling_mask is not None and batch.kept is not None and batch.logprobs_sampler is not None
    assert batch.sampling_mask.bits.nbytes == len(row) * WIDTH  # and nothing for prompts and padding
    allowed = truncation.unpack(batch.sampling_mask.bits[batch.kept[row, column]], VOCABULARY)
    assert bool(allowed.gather(1, batch.tokens[row, column][:, None]).all())
    assert bool(allowed[:, list(policy.special_ids)].all())
    sampled, scored = batch.logprobs_sampler[row, column], policy.compute_logprobs_no_grad(batch).logprobs[row, column]
    assert rounding.near(policy.model, scored, sampled)
    plain = policy.compute_logprobs_no_grad(batch.replace(sampling_mask=None, kept=None)).logprobs
    loose = rounding.tolerance(policy.model, sampled.tolist())
    assert float((plain[row, column] - sampled).max()) < loose  # the set takes mass away, never adds
    assert float((plain[row, column] - sampled).mean()) < -0.05
    undecided = []
    for request, answer in zip(asked, answers, strict=True):
        expected = sets_by_hand(policy if own else mask, request, answer, rule, sampling)
        found = said(truncation.unpack(torch.from_numpy(answer.kept), VOCABULARY))
        assert all(inner <= one <= outer for one, (inner, outer) in zip(found, expected, strict=True))
        undecided += [len(outer - inner) for inner, outer in expected]
    assert np.mean(undecided) < 0.1
    assert len({len(one) for one in said(allowed)}) > 1 or rule.rule == "top_k"


@pytest.mark.slow
@every_path
def test_neighbours_do_not_matter(kind: str, fast: bool) -> None:
    policy, mask = (models.exact(policy_of(kind, fast, seed)) for seed in (0, 1))
    sampling = Sampling(max_new_tokens=10)
    asked, how = requests_of(policy, 10), (Restriction("top_p", 0.6), mask)
    together = Sampler(policy, 10).restricted(*how).generate(asked, sampling)
    for rows, order in ((3, range(10)), (10, range(9, -1, -1)), (1, (7, 2))):
        again = Sampler(policy, rows).restricted(*how).generate([asked[n] for n in order], sampling)
        for n, answer in zip(order, again, strict=True):
            assert answer.ids == together[n].ids
            assert rounding.near(policy.model, answer.logprobs, together[n].logprobs)
            assert np.array_equal(answer.kept, together[n].kept)


def test_a_set_of_all_tokens_changes_nothing() -> None:
    policy, sampling = policy_of("llama"), Sampling(max_new_tokens=10)
    asked = requests_of(policy, 8)
    free = Sampler(policy).generate(asked, sampling)
    for rule, mask in (
        (Restriction("top_p", 1.0), policy_of("llama", seed=1)),
        (Restriction("top_k", VOCABULARY), None),
    ):
        kept_all = Sampler(policy).restricted(rule, mask).generate(asked, sampling)
        assert [replace(answer, kept=None) for answer in kept_all] == free


# Gradient


def conversations(seed: int) -> list[Episode]:
    """Random conversations of several turns whose actions were drawn from random sets."""
    random = np.random.default_rng(seed)
    episodes = models.episodes(seed, restarts=True)
    for turn in (turn for episode in episodes for turn in episode.turns):
        mask = torch.from_numpy(random.random((len(turn.action_ids), VOCABULARY)) < 0.3)
        mask[torch.arange(len(turn.action_ids)), torch.tensor(turn.action_ids)] = True
        turn.kept = models.bits_of(mask).numpy()
    return episodes


def in_double(seed: int) -> Policy:
    policy = Policy(models.in_double(models.gpt2(seed)), models.tokenizer(), compute=torch.float64)
    return with_critic(policy, separate=False)


def ready(algorithm: PPO, seed: int, **changes: Any) -> Batch:
    """A batch with its columns filled in, old log-probabilities away from the policy's."""
    batch = models.batch_of(conversations(seed)).replace(**changes)
    batch = prepare(batch, in_double(0), {"reference": in_double(1)}, algorithm)
    assert batch.logprobs_old is not None
    return batch.replace(logprobs_old=batch.logprobs_old + 0.3 * torch.sin(1000 * batch.logprobs_old))


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 60), compat=st.sampled_from(["none", "rl4lms"]))
def test_groups_micro_batches_and_padding_do_not_matter(seed: int, tokens: int, compat: Any) -> None:
    algorithm = NLPO(entropy_coefficient=0.1, kl_coefficient=0.1, compat=compat)
    policy, batch = in_double(0), ready(algorithm, seed)
    whole, metrics = models.gradient(algorithm, policy, batch)
    policy.tokens_per_forward = tokens
    parts, _ = models.gradient(algorithm, policy, batch)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    shuffled, _ = models.gradient(algorithm, policy, batch[order])
    alone, _ = models.gradient(algorithm, policy, batch.replace(group=torch.arange(len(batch))))
    wide = {
        name: torch.nn.functional.pad(column, (0, 3), value=0 if column.dtype == torch.bool else 1)
        for name, column in vars(batch).items()
        if isinstance(column, Tensor) and column.dim() == 2
    }
    padded, _ = models.gradient(algorithm, policy, replace(batch, **wide))
    assert float(whole.norm()) > 0 and all(math.isfinite(value) for value in metrics.values())
    for other in (parts, shuffled, alone, padded):
        assert models.relative(whole, other) < 1e-6


def test_under_compat_the_update_is_that_of_ppo() -> None:
    """RL4LMs: on the same answers, ratio, KL penalty and gradient are PPO's on the whole vocabulary."""
    plain = ready(PPO(kl_coefficient=0.1), 3, sampling_mask=None, kept=None)
    expected, _ = models.gradient(PPO(kl_coefficient=0.1), in_double(0), plain)
    compat = NLPO(kl_coefficient=0.1, compat="rl4lms")
    assert models.relative(models.gradient(compat, in_double(0), ready(compat, 3))[0], expected) < 1e-12
    ours = NLPO(kl_coefficient=0.1)
    assert models.relative(models.gradient(ours, in_double(0), ready(ours, 3))[0], expected) > 0.1


# Whole runs


def nlpo(**fields: Any) -> dict[str, Any]:
    return {"name": "nlpo", "epochs": 2, "minibatches": 2, "min_tokens_to_keep": 5, "top_mask": 0.3, **fields}


def trained(folder: Path, algorithm: dict[str, Any], **changes: Any) -> Path:
    return runs.run(folder, algorithm=algorithm, evaluation={"every": 0, "examples": 4}, **changes)


def records(folder: Path) -> list[dict[str, Any]]:
    return [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("compat", ["none", "rl4lms"])
def test_nlpo_that_masks_nothing_is_ppo(compat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Under compat the fused head does not serve NLPO, and RL4LMs' entropy is another sum. Their orders of adding differ
    # on some processors, so PPO goes without both.
    if compat == "rl4lms":
        monkeypatch.setattr("lmgym.models.distributions.nn", SimpleNamespace(Linear=None))
    shared = {"kl_coefficient": 0.05, "entropy_coefficient": 0.01 if compat == "none" else 0.0}
    ppo = trained(tmp_path / "ppo", {"name": "ppo", "epochs": 2, "minibatches": 2, **shared}, steps=4)
    everything = {
        "p": nlpo(top_mask=1.0, refresh_every=2, compat=compat, **shared),
        "k": nlpo(mask_type="top_k", top_mask=VOCABULARY, compat=compat, **shared),
    }
    for name, algorithm in everything.items():
        same = trained(tmp_path / name, algorithm, steps=4)
        for file in ("final/model.safetensors", "rollouts.jsonl"):
            assert (same / file).read_bytes() == (ppo / file).read_bytes(), (name, file)
        for ours, theirs in zip(records(same), records(ppo), strict=True):
            share, tokens = ours.pop("kept/share"), ours.pop("kept/tokens")
            assert (share, tokens) == (1.0, VOCABULARY) and ours == theirs
    masked = trained(tmp_path / "masked", nlpo(compat=compat, **shared), steps=4)
    assert (masked / "rollouts.jsonl").read_bytes() != (ppo / "rollouts.jsonl").read_bytes()


@pytest.mark.slow
def test_a_refresh_changes_what_may_be_sampled(tmp_path: Path) -> None:
    """Steps 0 and 1 are the same with and without; from step 2 on the mask is the policy that step 1 made."""
    changes = {"steps": 5, "checkpoint": {"every": 1, "keep": 9}, "optimizer": {"learning_rate": 0.03, "warmup": 0}}
    fresh, stale, compat = (
        trained(tmp_path / name, nlpo(**fields), **changes)
        for name, fields in (
            ("fresh", {"refresh_every": 2}),
            ("stale", {"refresh_every": 1000}),
            ("compat", {"refresh_every": 2, "compat": "rl4lms"}),
        )
    )
    taken = [runs.state(folder)["copies"]["mask"] for folder in (fresh, stale, compat)]
    assert taken == [4, 0, 0]
    for step in (2, 4):
        mask = load_file(fresh / f"copies/stage-0-mask-step-{step:06d}/model.safetensors")
        policy = load_file(fresh / f"checkpoints/stage-0-step-{step:06d}/model.safetensors")
        assert all(torch.equal(mask[name], policy[name]) for name in policy)
    answers = [runs.records(folder / "rollouts.jsonl") for folder in (fresh, stale)]
    steps = [[[r for r in lines if r["step"] == step] for step in range(5)] for lines in answers]
    assert steps[0][:2] == steps[1][:2] and steps[0][2:] != steps[1][2:]
    kept_tokens = [[record["kept/tokens"] for record in records(folder)] for folder in (fresh, stale)]
    assert kept_tokens[0][:2] == kept_tokens[1][:2] and kept_tokens[0][2] != kept_tokens[1][2]


@pytest.mark.slow
def test_what_is_logged(tmp_path: Path) -> None:
    fields = {"mask_type": "learned_top_k", "top_mask": 20}
    ours = records(trained(tmp_path / "ours", nlpo(**fields), steps=2))
    theirs = records(trained(tmp_path / "theirs", nlpo(**fields, compat="rl4lms"), steps=2))
    for record in [*ours, *theirs]:
        assert 20 <= record["kept/tokens"] <= 23  # and three special ones
        assert record["kept/share"] == pytest.approx(record["kept/tokens"] / VOCABULARY)
    loose = rounding.typical_tolerance(AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "final"))
    assert all(record["sampler_logprob_gap"] < loose and record["entropy"] < math.log(23) for record in ours)
    # Minus the log of the mass that was kept: 20 to 23 of 259 almost equally likely tokens.
    assert theirs[0]["sampler_logprob_gap"] == pytest.approx(math.log(VOCABULARY / 22), abs=0.3)
    assert theirs[0]["reward"] == ours[0]["reward"]  # the same answers; only the update differs


# Bad input


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"top_mask": 0.0}, "top_mask is 0.0; with mask_type learned_top_p it is a share"),
        ({"top_mask": 50}, "above 0 and at most 1"),
        ({"top_mask": math.nan}, "above 0 and at most 1"),
        ({"mask_type": "top_k"}, "top_mask is 0.9; with mask_type top_k it is a number of tokens"),
        ({"mask_type": "learned_top_k", "top_mask": 2.5}, "it is a number of tokens"),
        ({"mask_type": "top_k", "top_mask": math.inf}, "it is a number of tokens"),
        ({"min_tokens_to_keep": 0}, "min_tokens_to_keep is 0; it must be at least 1"),
        ({"refresh_every": 0}, "refresh_every is 0; it must be at least 1"),
    ],
)
def test_bad_fields(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(LmgymError, match=match):
        NLPO(**fields)


def test_more_tokens_than_the_vocabulary(tmp_path: Path) -> None:
    """Said before anything is loaded or made."""
    with pytest.raises(
        LmgymError, match=r"algorithm\.min_tokens_to_keep is 300, and the model's vocabulary has 259 tokens"
    ):
        trained(tmp_path / "run", {"name": "nlpo", "min_tokens_to_keep": 300})
    assert not (tmp_path / "run").exists()
    NLPO(min_tokens_to_keep=259).check_vocabulary(259)


def test_presets_and_needs() -> None:
    recipe = runs.tiny(algorithm={"name": "nlpo", "preset": "rl4lms", "kl_coefficient": 0.1})
    (stage,) = build_config(recipe).stages
    algorithm = stage.algorithm
    assert isinstance(algorithm, NLPO)
    assert algorithm.requirements == Requirements(values=True, mask=True, reference=True, old_logprobs=True)
    assert (algorithm.top_mask, algorithm.min_tokens_to_keep, algorithm.refresh_every) == (0.9, 100, 1000)
    assert (algorithm.epochs, algorithm.gamma, algorithm.compat) == (10, 0.99, "none")
    assert NLPO(mask_type="top_k", top_mask=5).requirements == Requirements(values=True)
    assert SamplingMask(torch.zeros(1, 1, dtype=torch.uint8)).renormalised
