"""Products in fp32 through oneDNN: torch's within what fp32 rounds, in sampling, scoring and training alike."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.experiments.named_models import NamedModel
from lmgym.inference.base import Sampling
from lmgym.inference.kernels.onednn_layers import PACK_AT_STEP
from lmgym.inference.proof import prove
from lmgym.inference.sampler import Sampler
from lmgym.logs.console import Console
from lmgym.models import copies, lora
from lmgym.models.critic import with_critic
from lmgym.models.kernels import onednn_products
from lmgym.models.kernels.fused_logprobs import FusedLogprobs
from lmgym.models.kernels.onednn_products import OneDNNLinear, weight_of
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.sentences import products_sentence
from tests import models, rounding, runs
from tests.parity import test_encoder_decoder as encoder_decoder
from tests.parity import test_families as families
from tests.parity.test_resume import Interrupting
from tests.parity.test_sampler import reported_and_scored, requests
from tests.runs import assert_equal_runs

pytestmark = pytest.mark.skipif(not onednn_products.available(), reason="this torch has no oneDNN")
ONEDNN = {**runs.TINY["policy"], "products": "onednn"}


def policy_of(family: str) -> Policy:
    """A policy whose products are oneDNN's. (The model itself is shared between tests, and so is copied.)"""
    one = encoder_decoder.policy_of(family) if family in ("t5", "bart") else families.policy_of(family)
    one = one.with_model(copy.deepcopy(one.model))
    onednn_products.use_in(one.model)
    return one.but(onednn=True)


def by_torch(policy: Policy) -> Policy:
    """The same policy with torch's products."""
    other = policy.with_model(copy.deepcopy(policy.model))
    for layer in other.model.modules():
        if weight_of(layer) is not None:
            del layer.forward
    other.onednn = False
    return other


@pytest.mark.parametrize("outputs, inputs", [(96, 48), (7, 1), (5, 300), (768, 288)])
@pytest.mark.parametrize("rows", [1, 3, 17, 200])
@pytest.mark.parametrize("biased", [True, False])
def test_products_and_their_gradients_against_fp64(rows: int, outputs: int, inputs: int, biased: bool) -> None:
    """Each number within what rounds where its own terms are added up."""
    generator = torch.Generator().manual_seed(rows * outputs)
    shapes = [(rows, 1, inputs), (outputs, inputs), (outputs,)][: 2 + biased]
    numbers = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]
    by_output = torch.randn(rows, 1, outputs, generator=generator)
    found = OneDNNLinear.apply(*numbers, *([] if biased else [None]))
    gradients = torch.autograd.grad(found, numbers, by_output)

    def exactly(given: list[Tensor], by: Tensor) -> list[Tensor]:
        doubles = [one.detach().double().requires_grad_() for one in given]
        product = nn.functional.linear(*doubles)
        return [product.detach(), *torch.autograd.grad(product, doubles, by.double())]

    exact = exactly(numbers, by_output)
    sizes = exactly([one.abs() for one in numbers], by_output.abs())  # the sums of the terms without their signs
    terms = (inputs + 1, outputs, rows, rows)
    for ours, theirs, size, count in zip([found.detach(), *gradients], exact, sizes, terms, strict=False):
        assert ours.dtype == torch.float32 and ours.shape == theirs.shape
        assert float((ours - theirs).abs().max()) <= rounding.rounding(count, float(size.max()))


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_the_fused_head_is_that_of_torchs_products(entropy: bool, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, each in several products; what is added up is added in chunks on both sides."""
    monkeypatch.setattr(onednn_products, "PIECE", 2000)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 24, generator=generator).requires_grad_() for size in (50, 300))
    targets, by_logprob = torch.arange(50), torch.randn(50, generator=generator)
    known = by_logprob if told and not entropy else None

    def both(onednn: bool) -> list[Tensor]:
        arguments = (hidden, weight, None, targets, lambda z, part: z, 1.0, entropy, 21, known, onednn)
        logprobs, entropies = FusedLogprobs.apply(*arguments)
        outputs, by = ([logprobs, entropies], [by_logprob] * 2) if entropy else ([logprobs], [by_logprob])
        return [*(one.detach() for one in outputs), *torch.autograd.grad(outputs, [hidden, weight], by)]

    # 24 products in a logit, 300 of them in a softmax, 300 or 50 in a gradient; the numbers are below `size`.
    size = float(hidden.detach().norm(dim=1).max() * weight.detach().norm(dim=1).max()) * float(by_logprob.abs().max())
    for ours, theirs in zip(both(True), both(False), strict=True):
        assert float((ours - theirs).abs().max()) <= rounding.rounding(24 + 2 * 300 + 50, size)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "phi", "opt", "t5", "bart"])
def test_scores_gradients_and_answers(family: str) -> None:
    """Scores and gradients are torch's; greedy answers are Hugging Face's; what is sampled is what is scored, and the
    proof at load, whose own pass has torch's products, says so too."""
    policy = policy_of(family)
    plain = by_torch(policy)
    batch = encoder_decoder.batch_of_rows(policy) if policy.encoder_decoder else families.batch_of_rows()
    scored, expected = (one.compute_logprobs(batch).logprobs for one in (policy, plain))
    assert rounding.near(policy.model, scored, expected)
    parameters = [list(one.model.parameters()) for one in (policy, plain)]
    pairs = [
        torch.autograd.grad(said[batch.actions].sum(), own, allow_unused=True)
        for said, own in zip((scored, expected), parameters, strict=True)
    ]
    for ours, theirs in zip(*pairs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert rounding.near_gradient(policy.model, ours, theirs, outputs=int(batch.actions.sum()))
    if not policy.encoder_decoder:
        sampling, asked = Sampling(max_new_tokens=2 * PACK_AT_STEP), requests(9)
        answers = Sampler(policy, 4).generate(asked, sampling)
        assert rounding.near(policy.model, *reported_and_scored(policy, asked, answers, sampling))
        for answer, prompt in zip(families.greedy(policy, 4), families.PROMPTS, strict=True):
            assert answer.ids == families.generated(plain.model, prompt, [models.EOS])
    assert prove(policy, Sampler(policy)).holds


def test_a_wrong_product_does_not_pass_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    right = onednn_products.product
    monkeypatch.setattr(onednn_products, "product", lambda hidden, weight, bias: right(hidden, weight * 1.01, bias))
    policy = policy_of("llama")
    assert not prove(policy, Sampler(policy)).holds


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_do_not_depend_on_the_cut_and_on_padding(family: str) -> None:
    policy = policy_of(family)
    batch = models.prepared(models.batch_of(models.episodes(3, groups=4, size=3)), GRPO(group_size=3), policy)
    wider = batch.replace(
        **{
            name: nn.functional.pad(column, (0, 5))
            for name, column in vars(batch).items()
            if isinstance(column, Tensor) and column.shape == batch.tokens.shape
        }
    )
    found = []
    for tokens, given in ((10_000, batch), (40, batch), (10_000, wider)):
        policy.tokens_per_forward = tokens
        found.append(models.gradient(GRPO(group_size=3), policy, given)[0])
    assert float(found[0].norm()) > 0
    for other in found[1:]:
        assert rounding.near_gradient(policy.model, other, found[0], outputs=int(batch.actions.sum()))


def test_copies_have_the_products_with_their_own_weights() -> None:
    """A copy that trains, one that does not, a critic; and after an answer no weights stay laid out."""
    policy = with_critic(policy_of("llama"), separate=True)
    assert policy.critic is not None
    batch = families.batch_of_rows()
    before = policy.compute_logprobs_no_grad(batch).logprobs
    for other in (copies.trainable(policy), copies.frozen(policy), policy.critic):
        layers = [layer for layer in other.model.modules() if weight_of(layer) is not None]
        assert layers and all(layer.forward.__self__ is layer for layer in layers)  # type: ignore[attr-defined]
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter.mul_(1.25)
        assert not torch.equal(other.compute_logprobs_no_grad(batch).logprobs, before)
    Sampler(policy).generate(requests(5), Sampling(max_new_tokens=2 * PACK_AT_STEP, stop_ids=(299,)))
    assert torch.equal(policy.compute_logprobs_no_grad(batch).logprobs, before)
    kinds = (nn.Linear, Conv1D)
    assert all(weight_of(layer) is not None for layer in policy.model.modules() if type(layer) in kinds)


def test_adapters_multiply_so_too() -> None:
    """Their own layers and the frozen ones below them; merged, they are one layer with these products."""
    pytest.importorskip("peft")
    policy = policy_of("llama")
    lora.add_lora(policy.model, 2, 4.0, "all-linear", 0)
    onednn_products.use_in(policy.model)  # the adapters' layers are new
    plain, batch = by_torch(policy), families.batch_of_rows()
    with torch.no_grad():  # new adapters are the product of something and 0
        for one, other in zip(policy.parameters(), plain.parameters(), strict=True):
            other.copy_(one.add_(0.05 * torch.arange(one.numel()).view(one.shape).sin()))
    scored, expected = (one.compute_logprobs(batch).logprobs for one in (policy, plain))
    assert rounding.near(policy.model, scored, expected)
    gradients = [
        torch.autograd.grad(said.sum(), one.parameters())
        for said, one in zip((scored, expected), (policy, plain), strict=True)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        assert rounding.near_gradient(policy.model, ours, theirs, outputs=int(batch.actions.sum()))
    merged = copies.frozen(policy)
    assert any(weight_of(layer) is not None for layer in merged.model.modules())
    assert rounding.near(policy.model, merged.compute_logprobs_no_grad(batch).logprobs, scored)


def test_a_second_derivative_is_torchs() -> None:
    """A Fisher matrix (TRPO) multiplies with torch, whose products have one."""
    policy = policy_of("llama")
    weight = policy.model.get_input_embeddings().weight
    batch, found = families.batch_of_rows(), []
    for one in (policy, by_torch(policy)):
        weight = one.model.get_input_embeddings().weight
        with one.twice_differentiable():
            row, column = batch.actions.nonzero(as_tuple=True)
            hidden = one.states(batch, row, column - 1).hidden
            (first,) = torch.autograd.grad(hidden.square().sum(), weight, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), weight)
        found.append(second)
    assert torch.equal(*found)


class Heard(Console):
    """Keeps what is said."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.said: list[str] = []

    def say(self, sentence: str, style: str = "") -> None:
        self.said.append(sentence)


def test_a_run_repeats_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Twice the same; interrupted and resumed."""
    console = Heard(quiet=True)
    one = runs.run(tmp_path / "one", console, policy=ONEDNN)
    assert "products: fp32 through oneDNN" in console.said
    assert_equal_runs(one, runs.run(tmp_path / "other", policy=ONEDNN))
    parts = runs.run(tmp_path / "parts", Interrupting(at=3), policy=ONEDNN)
    assert not (parts / "final").exists()
    assert_equal_runs(one, runs.run(parts, policy=ONEDNN))
    trained = [record for record in runs.records(one / "metrics.jsonl") if record["kind"] == "train"]
    assert all(record["gradient_norm"] > 0 for record in trained)


def refused(match: str, **policy: Any) -> None:
    with pytest.raises(LmgymError, match=match):
        load_policy(PolicySection(model="builtin:tiny", **{"products": "onednn", **policy}))


def test_where_it_cannot_be_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    refused("policy.products: onednn is for products in fp32; remove it, or policy.compute", compute="bfloat16")
    refused("policy.products: onednn is for products in fp32; remove it, or policy.quant", quantise="4bit", lora_rank=2)
    with pytest.raises(LmgymError, match=r"distributed.sharding: oneDNN multiplies whole weights"):
        build_config(runs.tiny(policy=ONEDNN, distributed={"sharding": "fsdp"}))
    with pytest.raises(LmgymError, match="onednn is for a CPU, and the policy is on cuda"):
        onednn_products.check_possible(torch.device("cuda"))
    monkeypatch.setattr(onednn_products, "available", lambda: False)
    refused("this torch was built without oneDNN; write products: torch")


def test_precision_is_fp32_unless_the_recipe_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """`compute: auto` measures nothing; a model that another's bf16 is compared with has no products in fp32."""
    policy = load_policy(PolicySection(model="builtin:tiny", products="onednn"))
    assert policy.compute == torch.float32 and policy.onednn
    config = build_config(runs.tiny(policy=ONEDNN))
    assert NamedModel("x", config).load().onednn
    other = NamedModel("x", config).load("bfloat16")
    assert other.compute == torch.bfloat16 and not other.onednn


def test_a_large_model_is_told_of_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = by_torch(policy_of("llama"))
    monkeypatch.setattr(onednn_products, "speedup", lambda: 2.04)
    assert products_sentence(policy) == ""
    monkeypatch.setattr("lmgym.models.sentences.SMALL", 1000)
    assert "onednn multiplies 2.0 times as fast here" in products_sentence(policy)
    monkeypatch.setattr(onednn_products, "speedup", lambda: 1.1)
    assert products_sentence(policy) == ""
