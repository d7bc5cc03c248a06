"""Weights in bf16 that are rounded stochastically: right on average, seen by every pass, and a function of the seed."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmgym.batch import Batch
from lmgym.core import seeds
from lmgym.inference.base import Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.inference.vllm.engine import weights_of
from lmgym.models.critic import with_critic
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.rounding import CHUNK, UpdateSample, random_table, round_stochastically, share_seen_by_nearest
from lmgym.types import Episode, Example, Turn
from lmgym.updates.optimizer import Optimizer, OptimizerSection
from tests import models, runs
from tests.rounding import near_in_bf16

MODELS = ("builtin:tiny", "builtin:tiny_gpt2", "builtin:tiny_t5", "builtin:tiny_bart")


def rounded(numbers: torch.Tensor, updates: int = 0, name: str = "weight") -> torch.Tensor:
    out = torch.empty_like(numbers, dtype=torch.bfloat16)
    round_stochastically(numbers, random_table(seeds.key(0, "rounding", updates)), seeds.key(name), out)
    return out


def policy_of(model: str = "builtin:tiny", **fields: Any) -> Policy:
    """A policy in bf16 with masters off bf16's grid."""
    policy = load_policy(PolicySection(model=model, device="cpu", compute="bfloat16", **fields))
    models.sharpen(policy.model, scale=0.05)
    policy.had_updates(1)
    return policy


def batch_of(policy: Policy) -> Batch:
    episodes = models.episodes(7, groups=2, size=3, turns=1 if policy.encoder_decoder else 2)
    for episode in episodes if policy.encoder_decoder else ():
        turn = episode.turns[0]
        turn.source_ids, turn.prompt_ids = turn.prompt_ids, [*policy.decoder_start]
    return models.batch_of(episodes)


@given(st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: abs(x) > 2.0**-100), st.integers(0, 100))
def test_a_number_becomes_one_of_its_two_neighbours(number: float, updates: int) -> None:
    exact = torch.tensor([number])
    bits = exact.view(torch.int32) & -(2**16)  # towards zero
    low, high = bits.view(torch.float32), (bits + 2**16).view(torch.float32)
    assert float(rounded(exact, updates)) in (float(low), float(high))
    grid = exact.bfloat16().float()
    assert torch.equal(rounded(grid, updates).float(), grid)


@pytest.mark.parametrize("share", [0.0, 2.0**-16, 0.1, 0.5, 0.9])
def test_rounding_up_is_as_likely_as_the_number_is_far_up(share: float) -> None:
    count, sixteenth = 3 * CHUNK, int(share * 2**16)
    bits = torch.full((count,), 1.0).view(torch.int32) + sixteenth
    up = float((rounded(bits.view(torch.float32)) > 1).float().mean())
    probability = sixteenth / 2**16
    assert abs(up - probability) <= 5 * math.sqrt(probability * (1 - probability) / count)


def test_random_numbers_depend_on_updates_and_name_alone() -> None:
    numbers = torch.full((1000,), 1 + 2.0**-8)
    same, later, other = rounded(numbers), rounded(numbers, updates=1), rounded(numbers, name="other")
    assert torch.equal(same, rounded(numbers))
    for one in (later, other):  # 1,000 fair coins that agree in half of all cases
        assert abs(float((one == same).float().mean()) - 0.5) < 5 * 0.5 / math.sqrt(1000)


def test_how_much_of_an_update_is_seen() -> None:
    """An update of 1e-5 to weights of 0.05: to nearest hardly any is seen, stochastically all of it on average."""
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter((0.05 * torch.randn(2**20, generator=generator)).bfloat16().float())
    nearest, stochastic = UpdateSample([parameter]), UpdateSample([parameter])
    assert nearest.share_seen(lambda p: p.bfloat16()) is None
    assert stochastic.share_seen(lambda p: rounded(p.detach())) is None
    with torch.no_grad():
        parameter += 1e-5 * torch.randn(2**20, generator=generator).sign()
    seen = nearest.share_seen(lambda p: p.bfloat16())
    assert seen is not None and seen < 0.3
    seen = stochastic.share_seen(lambda p: rounded(p.detach(), updates=1))
    # The variance of a rounded weight is below (spacing / 2)^2, spacing below 2^-8 of the weight.
    sigma = 0.5 * 2.0**-8 * 0.05 / 1e-5 / math.sqrt(2**19)
    assert seen is not None and abs(seen - 1) < 5 * sigma


def test_what_nearest_will_show_is_predicted() -> None:
    """A weight w = 0.0625 has its upper neighbour at w (1 + 2^-7), so rounding flips past w 2^-8 = 2^-12."""
    half = 2.0**-12
    weights = [torch.nn.Parameter(torch.full((8,), 0.0625))]
    assert share_seen_by_nearest(weights, 0.09 * half) == 0.0
    assert share_seen_by_nearest(weights, 0.125 * half) == 2 / 1.25  # up by 2 halves, not 1.25; all are exact
    drifting = torch.nn.Parameter(torch.rand(2**19, generator=torch.Generator().manual_seed(0)) + 1)  # any phase
    flips = 10 * 1e-5 / 2**-7  # of a weight from 1 to 2: the share that flips, by 2^-7 each
    sigma = math.sqrt(flips / 2**19) / flips
    assert abs(share_seen_by_nearest([drifting], 1e-5) - 1) < 5 * sigma


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_equals_autocast_over_the_copy_and_its_gradient_is_the_masters(model: str, checkpointing: bool) -> None:
    """The oracle's masters are the copy's numbers, which autocast rounds to themselves: the same bits."""
    policy = policy_of(model, activation_checkpointing=checkpointing)
    batch = batch_of(policy)
    oracle = policy_of(model, rounding="nearest")
    with torch.no_grad():
        for ours, theirs in zip(oracle.model.parameters(), policy.model.parameters(), strict=True):
            ours.copy_(policy.computed(theirs))
            assert not torch.equal(ours, theirs)
    found = []
    for one in (policy, oracle):
        outputs = one.compute_logprobs(batch, entropy=True)
        assert outputs.entropy is not None
        (outputs.logprobs.sum() + outputs.entropy.sum()).backward()
        found.append([outputs.logprobs, outputs.entropy, *(parameter.grad for parameter in one.parameters())])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    assert all(parameter.grad.dtype == torch.float32 for parameter in policy.parameters())
    assert all(not {"weight", "bias", "forward"} & set(module.__dict__) for module in policy.model.modules())


def test_sampler_and_scorer_have_the_same_weights() -> None:
    policy = policy_of()
    engine = Sampler(policy)
    for updates in (1, 2):
        policy.had_updates(updates)
        engine.load(policy, updates)
        assert engine._copy is not None
        copies = zip(engine._copy.model.parameters(), policy.model.parameters(), strict=True)
        for ours, theirs in copies:
            assert torch.equal(ours, policy.computed(theirs))
            assert ours.data_ptr() == policy.computed(theirs).data_ptr()  # one copy, not two
        answers = engine.generate([Request((5, 6, 7), key=key) for key in range(8)], Sampling(max_new_tokens=8))
        turns = [Turn([5, 6, 7], answer.ids, answer.logprobs) for answer in answers]
        batch = models.batch_of([Episode(Example("x", ""), 0, place, [turn]) for place, turn in enumerate(turns)])
        scored = policy.compute_logprobs_no_grad(batch).logprobs
        assert batch.logprobs_sampler is not None
        assert near_in_bf16(policy.model, scored[batch.actions], batch.logprobs_sampler[batch.actions])


def test_what_goes_to_vllm_is_the_copy_a_tied_head_included() -> None:
    policy = policy_of(architecture={"tie_word_embeddings": True})
    sent, parameters = weights_of(policy), dict(policy.model.named_parameters())
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= sent.keys()
    for name, parameter in parameters.items():
        assert torch.equal(sent[name], policy.computed(parameter))
    assert torch.equal(sent["lm_head.weight"], sent["model.embed_tokens.weight"])


def test_an_optimizer_step_renews_the_copy() -> None:
    policy = with_critic(policy_of(), separate=True)
    optimizer = Optimizer(policy.parameters(), OptimizerSection(learning_rate=1e-2), policy.critic_parameters())
    batch = batch_of(policy)
    before = policy.compute_logprobs(batch, values=True)
    assert policy.critic is not None and policy.critic.rounded is not None and before.values is not None
    (before.logprobs.sum() + (before.values - 1).square().sum()).backward()
    copies = {parameter: copy.clone() for parameter, copy in policy.critic.rounded.copies.items()}
    optimizer.step()
    after = policy.compute_logprobs(batch)
    assert not torch.equal(after.logprobs, before.logprobs)
    renewed = policy.critic.rounded.copies
    assert any(not torch.equal(renewed[parameter], copy) for parameter, copy in copies.items())


def test_in_fp32_and_with_adapters_only_what_trains_is_rounded() -> None:
    assert load_policy(PolicySection(model="builtin:tiny", device="cpu", compute="float32")).rounded is None
    policy = load_policy(PolicySection(model="builtin:tiny", device="cpu", compute="bfloat16", lora_rank=2))
    assert policy.rounded is not None
    assert all("lora_" in name for name in policy.rounded.names.values())
    nearest = PolicySection(model="builtin:tiny", device="cpu", compute="bfloat16", rounding="nearest")
    assert load_policy(nearest).rounded is None


def test_a_run_logs_how_much_of_its_updates_was_seen(tmp_path: Any) -> None:
    shares = {}
    for rounding in ("stochastic", "nearest"):
        section = {**runs.TINY["policy"], "compute": "bfloat16", "rounding": rounding}
        folder = runs.run(tmp_path / rounding, policy=section, steps=3)
        records = [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]
        shares[rounding] = [record["weights/seen"] for record in records]
    assert all(math.isfinite(share) for found in shares.values() for share in found)
