"""Weights laid out for bf16 sampling: the same bits as torch's linear layer, chosen once for a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.inference.base import Request, Sampling
from lmgym.inference.pool.pool import Here, InUnits
from lmgym.inference.sampler import Sampler
from lmgym.models import device, load
from lmgym.models.kernels import onednn_linear
from lmgym.models.policy import Policy
from lmgym.training import setup
from lmgym.training.machine import Machine, choose_machine
from tests import rounding, runs
from tests.parity import test_encoder_decoder as encoder_decoder
from tests.parity import test_families as families
from tests.parity.test_sampler import requests

needs_bf16 = pytest.mark.skipif(not onednn_linear.available(), reason="oneDNN has no bf16 products on this processor")
# Where oneDNN adds in another order than torch's layer, `pays` says no and nothing is laid out: there is nothing to
# compare. The product itself is tried above wherever there is one, and the tests of the choice run everywhere.
needs_equal = pytest.mark.skipif(
    not (onednn_linear.available() and onednn_linear.same_bits()), reason="oneDNN adds in another order here"
)
SAMPLING = Sampling(max_new_tokens=12, stop_ids=tuple(range(100, 130)))


@needs_bf16
@pytest.mark.parametrize("outputs, inputs", [(96, 48), (7, 1), (95, 47), (288, 768), (4000, 288)])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 17, 64, 200])
def test_one_layout_gives_the_product_for_any_number_of_rows(rows: int, outputs: int, inputs: int) -> None:
    """Against fp64 within what bf16 rounds: a sum in fp32, and one rounding of it to bf16."""
    generator = torch.Generator().manual_seed(rows * outputs)
    weight, hidden, bias = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((outputs, inputs), (rows, 1, inputs), (outputs,))
    )
    exact = torch.nn.functional.linear(hidden.double(), weight.double(), bias.double())
    size = float(exact.abs().max()) if rows else 0.0
    terms = float((hidden.double().abs() @ weight.double().abs().T + bias.double().abs()).max()) if rows else 0.0
    tolerance = torch.finfo(torch.bfloat16).eps / 2 * size + rounding.rounding(inputs + 1, terms)
    found = onednn_linear.product(hidden, onednn_linear.pack(weight), bias)
    assert found.dtype == torch.bfloat16 and torch.allclose(found.double(), exact, rtol=0, atol=tolerance)


@needs_equal
@pytest.mark.parametrize("outputs, inputs", [(96, 48), (95, 47), (17, 241), (288, 768), (4000, 288)])
def test_the_bits_are_those_of_torchs_layers(outputs: int, inputs: int) -> None:
    """Torch's linear layer with and without a bias, and GPT-2's, which keeps its weights transposed."""
    usual, bare = torch.nn.Linear(inputs, outputs), torch.nn.Linear(inputs, outputs, bias=False)
    theirs = Conv1D(outputs, inputs)
    theirs.bias.data.normal_()
    model = torch.nn.ModuleList([usual, bare, theirs]).bfloat16().requires_grad_(False)
    for rows in (0, 1, 2, 5, 8, 17, 33, 64, 130):
        hidden = torch.randn(rows, 1, inputs).bfloat16()
        before = [layer(hidden) for layer in (usual, bare)]
        onednn_linear.lay_out(model)
        assert all("forward" in layer.__dict__ for layer in model)
        after = [layer(hidden) for layer in (usual, bare)]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        size = float((hidden.float().abs() @ theirs.weight.float().abs()).max()) if rows else 0.0
        exact = hidden.double() @ theirs.weight.double() + theirs.bias.double()
        # The product is rounded, and so is its sum with the bias.
        tolerance = torch.finfo(torch.bfloat16).eps * (size + float(theirs.bias.abs().max()))
        assert torch.allclose(theirs(hidden).double(), exact, rtol=0, atol=tolerance)
        for layer in model:
            del layer.forward


def policy_in_bf16(family: str) -> Policy:
    one = encoder_decoder.policy_of(family) if family in ("t5", "bart") else families.policy_of(family)
    one.compute = torch.bfloat16
    return one


def laid_out(policy: Policy) -> list[nn.Module]:
    return [layer for layer in policy.model.modules() if "forward" in vars(layer)]


@needs_equal
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "bart"])
def test_answers_are_bit_for_bit_those_of_weights_that_are_not_laid_out(family: str) -> None:
    """Also after the weights have changed, and from a pool's units."""
    one = policy_in_bf16(family)
    asked = requests(9)
    if one.encoder_decoder:
        sources = encoder_decoder.SOURCES
        asked = [Request(one.decoder_start, place, source_ids=sources[place % len(sources)]) for place in range(9)]
    one.prepacked = False
    plain = Sampler(one)
    one.prepacked = True
    packed = Sampler(one)
    for version in range(2):
        expected = plain.generate(asked, SAMPLING)
        assert packed.generate(asked, SAMPLING) == expected and packed._copy is not None and plain._copy is not None
        assert laid_out(packed._copy) and packed._copy.model.get_output_embeddings() in laid_out(packed._copy)
        assert not laid_out(plain._copy) and not laid_out(one)  # which trains
        packed.release()
        assert not laid_out(packed._copy)
        assert packed.generate(asked, SAMPLING) == expected
        units = [InUnits(one, Here(sampler), size=4) for sampler in (packed, plain)]
        assert units[0].generate(asked, SAMPLING) == units[1].generate(asked, SAMPLING)
        with torch.no_grad():
            for parameter in one.model.parameters():
                parameter.mul_(1.25)
        one.prepacked = False
        plain.load(one, version + 1)
        one.prepacked = True
        packed.load(one, version + 1)
    assert [answer.ids for answer in expected] != [answer.ids for answer in packed.generate(asked, SAMPLING)]


def test_fp32_is_always_laid_out_and_bf16_if_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 the answer would move bits, so nothing is measured."""
    cpu = torch.device("cpu")
    for answer in (True, False):
        monkeypatch.setattr(onednn_linear, "pays", lambda answer=answer: answer)
        assert device.choose_prepacked(torch.float32, cpu)
        assert device.choose_prepacked(torch.bfloat16, cpu) is answer
    assert not device.choose_prepacked(torch.bfloat16, torch.device("cuda"))


def test_a_processor_without_the_products_lays_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_linear, "available", lambda: False)
    assert not onednn_linear.pays()
    one = policy_in_bf16("llama")
    one.prepacked = True  # chosen by a machine that has them
    sampler = Sampler(one)
    sampler.generate(requests(2), SAMPLING)
    assert sampler._copy is not None and not laid_out(sampler._copy)


def test_a_run_chooses_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run takes what machine.json says, without a measurement; for another precision it measures anew."""
    asked: list[torch.dtype] = []
    monkeypatch.setattr(load, "choose_prepacked", lambda compute, _: asked.append(compute) or True)
    tree = {**runs.TINY, "policy": {**runs.TINY["policy"], "compute": "bfloat16"}}
    config = build_config(tree)
    assert setup.load_weights(config.policy, config.seed, Machine(threads=1), None).prepacked and asked == [
        torch.bfloat16
    ]
    Machine(threads=1, compute="bfloat16", prepacked=False).write(tmp_path)
    machine = choose_machine(config, tmp_path)
    assert not setup.load_weights(config.policy, config.seed, machine, None).prepacked and len(asked) == 1
    assert (
        setup.load_weights(config.policy, config.seed, replace(machine, compute="float32"), None).prepacked
        and len(asked) == 2
    )


def test_a_damaged_choice_is_named(tmp_path: Path) -> None:
    config = build_config(runs.TINY)
    tree = {"threads": 1, "compute": "bfloat16", "prepacked": "perhaps"}
    (tmp_path / "machine.json").write_text(json.dumps(tree))
    with pytest.raises(LmgymError, match="prepacked is 'perhaps'"):
        choose_machine(config, tmp_path)
