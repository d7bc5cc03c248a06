"""Adapters in bf16 on a CPU: their products against the formula in fp64, with gradients and as they sample; and a base
that is held in bf16 where that loses nothing."""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lmgym.inference.proof import proofs_of, prove
from lmgym.inference.sampler import Sampler
from lmgym.models import copies, frozen_base, lora, native_trial, training_trial
from lmgym.models.families import LIKE_LLAMA
from lmgym.models.kernels import adapted_linear, native, onednn_linear
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.training.machine import Machine
from lmgym.training.resuming import fingerprint
from tests import models, rounding
from tests.parity.test_resume_models import assert_resumes

BF16 = onednn_linear.available()
pytestmark = pytest.mark.skipif(not BF16, reason="no products in bf16 on this processor")
COMPILES = shutil.which(os.environ.get("CXX") or "g++") is not None
compiled = pytest.mark.skipif(not COMPILES, reason="no C++ compiler")
EPS, EPS32 = torch.finfo(torch.bfloat16).eps, torch.finfo(torch.float32).eps


def model_of(family: str = "llama", rank: int = 6, targets: Any = "all-linear") -> Any:
    """Two layers on bf16's grid, with adapters that say something."""
    fields = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    fields |= {"head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 128}
    fields |= {"attention_bias": True, "mlp_bias": True} if family == "llama" else {"sliding_window": None}
    config = AutoConfig.for_model(family, vocab_size=320, eos_token_id=models.EOS, pad_token_id=0, **fields)
    model = models.sharpen(AutoModelForCausalLM.from_config(config), 0.12)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    lora.add_lora(model, rank, 2 * rank, targets, seed=0)
    lora.fill(model)
    return model


def policy_of(family: str = "llama", narrow: bool = True, **more: Any) -> Policy:
    model = model_of(family)
    if narrow:
        frozen_base.hold_narrow(model)
    adapted_linear.use_in(model)
    return Policy(model, models.tokenizer(), torch.bfloat16, prepacked=True, **more)


def folder_with_model(folder: Path) -> Path:
    """A model on bf16's grid, as it is published."""
    model = models.llama(hidden_size=64, intermediate_size=64, max_position_embeddings=128)
    for parameter in model.parameters():
        parameter.data = (parameter.data / 3).bfloat16().float()
    model.save_pretrained(folder / "model")
    models.tokenizer().save_pretrained(folder / "model")
    return folder / "model"


def section_of(folder: Path, **more: Any) -> PolicySection:
    return PolicySection(model=str(folder), device="cpu", compute="bfloat16", lora_rank=3, **more)


def sizes(*factors: Tensor) -> Tensor:
    """The product of the numbers' sizes."""
    left, *rest = (factor.double().abs() for factor in factors)
    for factor in rest:
        left = left @ factor
    return left


@compiled
@pytest.mark.parametrize("rows", [1, 16, 33, 150])
@pytest.mark.parametrize("targets", ["all-linear", ["v_proj", "up_proj"]])
def test_sampled_products_are_the_formula(rows: int, targets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without tiles; layers without an adapter beside others with one."""
    layer = model_of(targets=targets).bfloat16().model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    together = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]
    for tiles in {native.has_products(), False}:
        monkeypatch.setattr(native, "has_products", lambda tiles=tiles: tiles)
        for layers in together:
            base = [lora.base_of(one) for one in layers]
            hidden = torch.randn(rows, base[0].in_features, generator=torch.Generator().manual_seed(rows)).bfloat16()
            product, expected, reach = native.Product(*layers), [], []
            assert product.own is tiles
            for one, below in zip(layers, base, strict=True):
                adapter, wide = lora.adapter_of(one), hidden.double()
                found, size = wide @ below.weight.double().T, sizes(hidden, below.weight.T)
                found = found if below.bias is None else found + below.bias.double()
                if adapter is not None:
                    found = found + adapter.scale * wide @ adapter.down.double().T @ adapter.up.double().T
                    size = size + adapter.scale * sizes(hidden, adapter.down.T, adapter.up.T)
                expected.append(found)
                # A x rounds to bf16, sums round in fp32, and without tiles W x rounds before the sum.
                reach.append(EPS * size + (hidden.shape[1] + 8) * EPS32 * size)
            wanted, loose = torch.cat(expected, 1), torch.cat(reach, 1)
            found = product(hidden)
            assert bool(((found.double() - wanted).abs() <= loose + EPS * wanted.abs()).all())
            total = torch.ones_like(found)
            product.add_to(total, hidden)
            assert torch.equal(total, torch.ones_like(found) + found)


def test_trained_products_and_gradients_are_the_formula() -> None:
    """Of two layers with one input, the second one without a bias."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    hidden, scales = random(2, 25, 64), (2.0, 0.5)
    frozen = [(random(96, 64), random(96)), (random(32, 64), None)]
    adapters, by_outputs = (
        [random(6, 64), random(4, 64), random(96, 6), random(32, 4)],
        (random(2, 25, 96), random(2, 25, 32)),
    )
    given = [one.clone().requires_grad_() for one in (hidden, *adapters)]
    outputs = adapted_linear.AdaptedLinear.apply(given[0], frozen, scales, *given[1:])
    torch.autograd.backward(outputs, by_outputs)
    exact = [one.double().requires_grad_() for one in (hidden, *adapters)]
    # What rounds to bf16 on the way: A x, its gradient, and what is added up; each by half an eps of its size.
    rows, pairs, reach = hidden.flatten(0, 1), [], {0: torch.zeros(50, 64).double()}
    for place, ((weight, bias), scale) in enumerate(zip(frozen, scales, strict=True)):
        down, up = exact[1 + place], exact[3 + place]
        wanted = exact[0] @ weight.double().T + scale * exact[0] @ down.T @ up.T + (0.0 if bias is None else bias)
        wanted.backward(by_outputs[place].double(), retain_graph=True)
        by_rows = by_outputs[place].flatten(0, 1)
        pairs.append((outputs[place], wanted, sizes(rows, weight.T) + scale * sizes(rows, down.T, up.T) + 8))
        reach[0] += sizes(by_rows, weight) + scale * sizes(by_rows, up, down)
        reach[1 + place] = scale * sizes(up.T, by_rows.T, rows)
        reach[3 + place] = scale * sizes(by_rows.T, rows, down.T)
    pairs += [(one.grad, other.grad, reach[place]) for place, (one, other) in enumerate(zip(given, exact, strict=True))]
    for found, expected, size in pairs:
        assert found is not None and expected is not None
        gap = (found.double() - expected).abs().reshape(size.shape)
        assert bool((gap <= 1.5 * EPS * size).all())


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize(
    "family, kernels", [("llama", False), *(pytest.param(one, True, marks=compiled) for one in LIKE_LLAMA)]
)
def test_gradients_of_a_policy_are_those_of_its_formula(family: str, kernels: bool, narrow: bool) -> None:
    """In bf16 and in micro-batches, against fp64; layers that are computed again give the same bits. With kernels of
    its own for whole layers, and without."""
    policy, precise = policy_of(family, narrow), models.exact(policy_of(family, narrow=False))
    if kernels:
        assert training_trial.serves(policy)
        training_trial.try_out(policy)
        policy = policy.but(trains_native=True)
    batch = models.batch_of(models.episodes(3, groups=2, turns=2))

    def gradient(one: Policy) -> Tensor:
        one.model.zero_grad()
        for rows in one.micro_batches(batch):
            one.compute_logprobs(batch[rows]).logprobs.sum().backward()
        return torch.cat([p.grad.double().flatten() for p in one.parameters() if p.grad is not None])

    found, wanted = gradient(policy), gradient(precise)
    # Backward rounds as often as forward. fp64 does not: one computation rounds, by half of what two differ by.
    roundings = 2 * rounding.bf16_roundings_of(policy.model)
    assert float((found - wanted).norm() / wanted.norm()) < rounding.typical(roundings, 1.0, torch.bfloat16) / 2
    assert all(p.grad is None for p in policy.model.parameters() if not p.requires_grad)
    assert torch.equal(gradient(policy.but(activation_checkpointing=True)), found)
    parts = gradient(policy.but(tokens_per_forward=40))
    assert len(policy.but(tokens_per_forward=40).micro_batches(batch)) > 1
    # A row rounds alike in every pass, but for the share of roundings of which a sum in another order crosses the edge:
    # up to 128 inputs move it by 128 EPS32, and edges lie EPS apart. The sums over rows round in each pass anew.
    differing = 1 + math.ceil(roundings * 128 * EPS32 / EPS)
    assert float((parts - found).norm() / found.norm()) < rounding.typical(differing, 1.0, torch.bfloat16)


@compiled
@pytest.mark.parametrize("family", LIKE_LLAMA)
def test_what_is_sampled_is_what_is_scored(family: str) -> None:
    policy = policy_of(family, native=True)
    assert native_trial.serves(policy)
    native_trial.try_out(policy)
    proof = prove(policy, Sampler(policy))
    assert proof.holds and proof.sampled.mean > 0
    usual = prove(policy.but(native=False), Sampler(policy.but(native=False)))
    assert usual.holds and proof.sampled.mean < 3 * usual.sampled.mean
    both = policy.but(trains_native=True)
    proof = prove(both, Sampler(both))
    assert proof.holds and proof.scored.mean < 3 * usual.scored.mean
    silent = prove(policy, Sampler(policy.but(native=True).with_model(_without_adapters(policy))))
    assert not silent.holds  # adapters that are not computed would show


def _without_adapters(policy: Policy) -> Any:
    model = copies.trainable(policy).model
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.zero_()
    return model


def test_adapters_that_are_more_than_two_products_are_left_alone() -> None:
    model = model_of()
    layer = model.model.layers[0].self_attn.q_proj
    assert lora.is_plain(layer) and lora.is_plain(lora.base_of(layer))
    layer.lora_variant[lora.NAME] = object()
    assert not lora.is_plain(layer)
    adapted_linear.use_in(model)
    assert "forward" not in vars(layer) and "forward" in vars(model.model.layers[0].self_attn.k_proj)


def test_where_adapters_alone_train_a_pass_takes_no_second_group_beyond_what_is_enough() -> None:
    policy, batch = policy_of(), models.batch_of(models.episodes(3, groups=3, turns=1))
    assert policy.enough_tokens == 1024 and Policy(models.llama(), models.tokenizer()).enough_tokens is None
    assert policy_of(tokens_per_forward=4096).enough_tokens is None
    assert len(policy.micro_batches(batch)) == 1
    one = policy.but(enough_tokens=1)
    assert sorted(batch.group[rows].unique().tolist() for rows in one.micro_batches(batch)) == [[0], [1], [2]]
    split = [policy.but(tokens_per_forward=12, enough_tokens=enough).micro_batches(batch) for enough in (1024, None)]
    assert len(split[0]) > 3 and all(map(torch.equal, *split))


# The base


def test_a_base_on_bf16s_grid_is_held_in_bf16_once(tmp_path: Path) -> None:
    policy = load_policy(section_of(folder_with_model(tmp_path)))
    frozen = [p for p in policy.model.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == {torch.bfloat16} and policy.master == torch.float32
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    sampler = Sampler(policy)
    assert sampler._copy is not None
    assert {p.data_ptr() for p in frozen} <= {p.data_ptr() for p in sampler._copy.model.parameters()}
    assert all(proof.holds for proof in proofs_of(policy, sampler, Sampler))
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    wide = load_policy(PolicySection(model=str(tmp_path / "model"), device="cpu", compute="float32", lora_rank=3))
    assert {p.dtype for p in wide.model.parameters()} == {torch.float32}
    with frozen_base.widened(policy.model):
        pairs = zip(policy.model.parameters(), wide.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    assert (
        fingerprint.of_machine(Machine(threads=1), policy)["model"]
        == fingerprint.of_machine(Machine(threads=1), wide)["model"]
    )


def test_a_base_between_bf16s_numbers_stays_as_it_is() -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 1}
    section = PolicySection(model="builtin:tiny", device="cpu", compute="bfloat16", lora_rank=2, architecture=shape)
    policy = load_policy(section)
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}


def test_merged_weights_keep_what_a_narrow_base_would_lose(tmp_path: Path) -> None:
    policy = load_policy(section_of(folder_with_model(tmp_path)))
    for parameter in policy.parameters():
        parameter.data += 1e-3
    merged = lora.merged(policy.model)
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    for name, module in policy.model.named_modules():
        if lora.is_plain(module) and (adapter := lora.adapter_of(module)) is not None:
            weight = merged.get_submodule(name).weight
            expected = (
                lora.base_of(module).weight.double() + adapter.scale * adapter.up.double() @ adapter.down.double()
            )
            assert float((weight - expected).abs().max()) <= rounding.rounding(8, float(expected.abs().max()))
            assert not torch.equal(weight, weight.bfloat16().float())


def test_the_base_alone_and_second_derivatives(tmp_path: Path) -> None:
    """Without its adapters a policy says what its base says; asked for second derivatives it computes in fp32."""
    folder = folder_with_model(tmp_path)
    policy = load_policy(section_of(folder))
    lora.fill(policy.model)
    for parameter in policy.parameters():
        parameter.data *= 4
    batch = models.batch_of(models.episodes(2, groups=1))
    own = Policy(AutoModelForCausalLM.from_pretrained(folder), policy.tokenizer).compute_logprobs(batch).logprobs
    reference = lora.AdapterDisabledPolicy(policy).compute_logprobs_no_grad(batch).logprobs
    assert rounding.near_in_bf16(policy.model, reference, own)
    adapted = policy.compute_logprobs_no_grad(batch).logprobs
    assert float((adapted - own).detach().norm()) > 4 * float((reference - own).detach().norm())
    wide = Policy(lora.merged(policy.model), policy.tokenizer).compute_logprobs(batch).logprobs
    with policy.twice_differentiable():
        found = policy.compute_logprobs(batch).logprobs
    assert rounding.near(policy.model, found, wide)


@pytest.mark.slow
def test_a_run_with_a_narrow_base_resumes(tmp_path: Path) -> None:
    policy = {"model": str(folder_with_model(tmp_path)), "device": "cpu", "compute": "bfloat16", "lora_rank": 3}
    algorithm = {"name": "grpo", "group_size": 4, "kl_coefficient": 0.1}
    assert_resumes(tmp_path, 3, policy=policy, algorithm=algorithm)
