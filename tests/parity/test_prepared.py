"""Layers that are laid out for decoding give the products of layers that are not, and leave nothing behind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from lmgym.inference.base import Request, Sampling
from lmgym.inference.kernels import mkl_linear, onednn_layers
from lmgym.inference.kernels.mkl_linear import PACK_AT_STEP, MKLLinearLayers
from lmgym.inference.kernels.onednn_layers import OneDNNLinearLayers, mkl_is_slow, prepared_layers
from lmgym.inference.sampler import Sampler
from lmgym.models.policy import Policy
from lmgym.models.vision import vision_names
from tests import models, rounding
from tests.parity import test_encoder_decoder as encoder_decoder
from tests.parity import test_families as families
from tests.parity import test_vision as vision
from tests.parity.test_encoder_decoder import SOURCES
from tests.parity.test_sampler import requests

# MKL is in torch's builds for x86-64 only. Where it is, a torch without the products named here is a failure.
needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL: nothing is prepared")


def every_kind(test: Any) -> Any:
    """A test of either kind of layers; torch's builds with MKL have oneDNN, too."""
    return needs_mkl(pytest.mark.parametrize("kind", [MKLLinearLayers, OneDNNLinearLayers])(test))


def policy() -> Policy:
    return Policy(models.llama(vocab_size=1024, hidden_size=64), models.tokenizer())


@every_kind
@pytest.mark.parametrize("rows", [2, 5, 8, 17, 64, 200])
def test_a_prepared_layer_computes_the_same_for_any_number_of_rows(rows: int, kind: Any) -> None:
    """Torch's linear layer and GPT-2's, which keeps its weights transposed; with a bias."""
    holder, usual, theirs = policy(), torch.nn.Linear(48, 96), Conv1D(96, 48)
    theirs.bias.data.normal_()
    for name, layer in (("usual", usual), ("theirs", theirs)):
        holder.model.add_module(name, layer)
    layers = kind(holder)
    for _ in range(PACK_AT_STEP):
        layers.begin_step(rows)
    for count in (rows, 1, 3):
        hidden = torch.randn(count, 1, 48)
        for layer, weight in ((usual, usual.weight.T), (theirs, theirs.weight)):
            assert "forward" in layer.__dict__
            with torch.no_grad():
                size = float((hidden.abs() @ weight.abs() + layer.bias.abs()).max())
                tolerance = rounding.rounding(48 + 1, size)
                assert torch.allclose(layer(hidden), hidden @ weight + layer.bias, rtol=0, atol=tolerance)
    layers.release()
    assert "forward" not in usual.__dict__ and "forward" not in theirs.__dict__


@needs_mkl
def test_steps_of_as_many_rows_are_prepared_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    through = mkl_linear._packed_forward
    monkeypatch.setattr(mkl_linear, "_packed_forward", lambda layer, rows: asked.append(rows) or through(layer, rows))
    layers = MKLLinearLayers(policy())
    for rows in (8, 7, 7, 7, 6, 1, 1, 1):
        layers.begin_step(rows)
    assert asked == [7] * len(layers.layers) and layers.layers
    assert not any("forward" in layer.__dict__ for layer in layers.layers)  # a single row is as fast without


@needs_mkl
def test_one_order_of_onednn_serves_all_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Any] = []
    through = onednn_layers._packed_forward
    monkeypatch.setattr(onednn_layers, "_packed_forward", lambda layer: packed.append(layer) or through(layer))
    layers = OneDNNLinearLayers(policy())
    for rows in (1, 1, 1, 8):
        layers.begin_step(rows)
    assert not packed  # a single row is as fast without
    for rows in (7, 7, 3, 1, 1):
        layers.begin_step(rows)
    assert packed == layers.layers and packed
    assert all("forward" in layer.__dict__ for layer in packed)
    layers.release()


@every_kind
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neo", "t5", "bart"])
def test_answers_are_those_of_layers_that_are_not_prepared(
    family: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every path of the sampler; the rows grow fewer on the way. In fp32, where a draw at the edge between two
    tokens may fall on either side: at most two of 24 answers may part, and each has the policy's log-probabilities."""
    if family in ("t5", "bart"):
        one = encoder_decoder.policy_of(family)
        sources = [SOURCES[number % len(SOURCES)] for number in range(24)]
        asked = [Request(one.decoder_start, number, source_ids=source) for number, source in enumerate(sources)]
    else:
        one, asked = families.policy_of(family), requests(24)
    sampling = Sampling(max_new_tokens=20, stop_ids=tuple(range(100, 130)))
    monkeypatch.setattr(onednn_layers, "mkl_is_slow", lambda: kind is OneDNNLinearLayers)
    module, prepared = (mkl_linear if kind is MKLLinearLayers else onednn_layers), set[tuple[int, ...]]()
    through = module._packed_forward
    monkeypatch.setattr(module, "_packed_forward", lambda layer, *rows: prepared.add(rows) or through(layer, *rows))
    found = Sampler(one).generate(asked, sampling)
    assert len(prepared) > 1 if kind is MKLLinearLayers else prepared == {()}  # for each number of rows, or for all
    assert not any("forward" in layer.__dict__ for layer in one.model.modules())
    monkeypatch.setattr(kind, "begin_step", lambda layers, rows: None)
    expected = Sampler(one).generate(asked, sampling)
    same = [(ours, theirs) for ours, theirs in zip(found, expected, strict=True) if ours.ids == theirs.ids]
    assert len(same) >= 22
    for ours, theirs in same:
        assert rounding.near(one.model, ours.logprobs, theirs.logprobs)
    scored = encoder_decoder.rescored(one, asked, found, sampling)
    assert rounding.near(one.model, encoder_decoder.reported(found), scored)


@every_kind
def test_a_call_that_breaks_off_leaves_the_layers_as_they_were(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_layers, "mkl_is_slow", lambda: kind is OneDNNLinearLayers)
    one = policy()
    assert type(prepared_layers(one)) is kind

    def broken(place: int, ids: list[int]) -> None:
        assert any("forward" in layer.__dict__ for layer in one.model.modules())
        raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError):
        Sampler(one).generate(requests(2), Sampling(max_new_tokens=6), ended=broken)
    assert not any("forward" in layer.__dict__ for layer in one.model.modules())


@every_kind
def test_what_does_not_train_and_what_is_not_fp32_stays_as_it_is(kind: Any) -> None:
    one = policy()
    one.model.lm_head.weight.requires_grad_(False)
    assert one.model.lm_head not in kind(one).layers
    assert len(kind(one).layers) == len(kind(policy()).layers) - 1
    one.compute = torch.bfloat16
    assert kind(one).layers == []


@pytest.mark.parametrize(
    ("lines", "slow"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu", False),
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n\nprocessor\t: 1\nvendor_id\t: AuthenticAMD", True),
        ("processor\t: 0\nBogoMIPS\t: 50.00", False),  # ARM names no vendor
        (None, False),
    ],
)
@needs_mkl
def test_mkl_is_slow_on_processors_that_are_not_intels(
    lines: str | None, slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn_layers, "INFORMATION", tmp_path / "cpuinfo")
    if lines is not None:
        (tmp_path / "cpuinfo").write_text(lines)
    assert mkl_is_slow.__wrapped__() is slow


@every_kind
def test_an_encoder_which_does_not_run_in_steps_is_not_prepared(kind: Any) -> None:
    one = encoder_decoder.policy_of("t5")
    layers, encoder = kind(one).layers, set(one.model.get_encoder().modules())
    assert layers and encoder.isdisjoint(layers) and any(layer in set(one.model.decoder.modules()) for layer in layers)


@every_kind
def test_a_vision_tower_is_not_prepared(kind: Any) -> None:
    """Its features are kept: they must have the bits of those that are computed while nothing is laid out."""
    one = vision.load("gemma3", lora_rank=2, train_vision=True)
    seeing = set(vision_names(one.model))
    names = {f"{name}.weight" for name, layer in one.model.named_modules() if layer in kind(one).layers}
    assert names and names.isdisjoint(seeing)
    assert any(parameter.requires_grad for name, parameter in one.model.named_parameters() if name in seeing)
