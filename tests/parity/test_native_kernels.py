"""Sampling in bf16 by kernels of lmgym's own (models/kernels/decoding.cpp): each against its formula, whole answers
against torch's layers, and the choice, which a run makes once."""

import ctypes
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lmgym.config.build import build_config
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.functional import sampling
from lmgym.inference.base import Decoding, Request, Sampling
from lmgym.inference.proof import prove
from lmgym.inference.sampler import Sampler
from lmgym.models import native_trial
from lmgym.models.families import LIKE_GEMMA, LIKE_LLAMA
from lmgym.models.fast_path import route_of
from lmgym.models.kernels import native, onednn_linear
from lmgym.models.policy import Policy
from lmgym.models.sentences import kernels_sentence
from lmgym.training import setup
from lmgym.training.machine import Machine, choose_machine
from tests import models, rounding, runs

# Where there is a compiler that fails, these tests run and fail: decoding.cpp is wrong then.
HERE = shutil.which(os.environ.get("CXX") or "g++") is not None and onednn_linear.available()
pytestmark = pytest.mark.skipif(not HERE, reason="no C++ compiler, or no bf16 products on this processor")
EPS, EPS32 = torch.finfo(torch.bfloat16).eps, torch.finfo(torch.float32).eps
ASKED = [Request((1, *range(40, 40 + n % 3 * 9)), seeds.key(0, n), conversation=None) for n in range(11)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def policy_of(family: str, used: bool = True) -> Policy:
    """Two layers with heads of 32, two queries a key head, biases where the family may have them; of Gemma 3 the first
    one has a window."""
    fields: dict[str, object] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    fields |= {"head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 128}
    fields |= {"attention_bias": True, "mlp_bias": True} if family == "llama" else {"sliding_window": None}
    if family == "gemma3_text":
        fields |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    config = AutoConfig.for_model(family, vocab_size=320, eos_token_id=models.EOS, pad_token_id=0, **fields)
    model = models.sharpen(AutoModelForCausalLM.from_config(config), 0.12)
    route = route_of(Policy(model, models.tokenizer()))
    return Policy(model, models.tokenizer(), torch.bfloat16, prepacked=True, native=used, route=route)


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 33, 150])
def test_products_are_onednns_bit_for_bit(rows: int) -> None:
    for outputs, inputs, bias in ((96, 64, True), (64, 96, False), (80, 48, False)):  # the last has no whole tiles
        layer = nn.Linear(inputs, outputs, bias).bfloat16().requires_grad_(False)
        hidden, total = random(rows, inputs), random(rows, outputs, seed=1)
        expected = onednn_linear.product(hidden, onednn_linear.pack(layer.weight), layer.bias)
        product = native.Product(layer)
        assert torch.equal(product(hidden), expected)
        both = total + expected
        product.add_to(total, hidden)
        assert torch.equal(total, both)


def test_norms_and_gates_round_where_transformers_does() -> None:
    hidden, weight = random(9, 96), random(96, seed=1)
    wide = hidden.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    found = native.norm(hidden, weight, 1e-5).double()
    # Two roundings to bf16, by half an eps each, and those of a sum of 96 squares.
    assert bool(((found - normed * weight.double()).abs() <= (EPS + 96 * EPS32) * found.abs() + 1e-30).all())
    gate, up = hidden.double().chunk(2, -1)
    found = native.gated(hidden).double()
    assert bool(((found - gate * gate.sigmoid() * up).abs() <= (EPS + 8 * EPS32) * found.abs() + 1e-30).all())
    # Gemma's norm rounds once; its gate's exponent has three roundings more, each of at most 2 u.
    found = native.norm(hidden, weight, 1e-5, from_one=True).double()
    assert bool(((found - normed * (1 + weight.double())).abs() <= (EPS / 2 + 99 * EPS32) * found.abs() + 1e-30).all())
    found, gelu = native.gated(hidden, gelu=True).double(), nn.functional.gelu(gate, approximate="tanh")
    exponent = 8 + 3 * float((1.6 * (gate + 0.045 * gate**3)).abs().max())
    assert bool(((found - gelu * up).abs() <= (EPS + exponent * EPS32) * found.abs() + 1e-30).all())


@pytest.mark.parametrize("size", native.SIZES)
@pytest.mark.parametrize(
    "group, shared, window", [(1, True, 0), (3, True, 0), (3, False, 0), (5, True, 0), (3, True, 24), (4, False, 7)]
)
def test_attention_is_softmax_over_prompt_and_slot(size: int, group: int, shared: bool, window: int) -> None:
    """Against fp64, with prompts and slots of any length; the new token is in its slot's cache afterwards."""
    slots, key_heads, capacity, longest = 13, 2, 40, 19
    heads, draw = group * key_heads, torch.Generator().manual_seed(size + group)
    lengths = torch.randint(0, capacity, (slots,), generator=draw)
    prompt_of_slot, before = torch.randint(0, 3, (slots,), generator=draw), torch.tensor([0, 6, longest])
    keys, values = random(slots, key_heads, capacity, size), random(slots, key_heads, capacity, size, seed=1)
    prompts = [random(3, key_heads, longest, size, seed=seed) for seed in (2, 3)]
    stride = (heads + 2 * key_heads) * size
    joined, out = random(slots, stride, seed=4), torch.empty(slots, heads, size, dtype=torch.bfloat16)
    angles = torch.rand(slots, size // 2, generator=draw).repeat(1, 2)
    cosines, sines, order = angles.cos().bfloat16(), angles.sin().bfloat16(), prompt_of_slot.argsort()
    places = {name: joined.data_ptr() + 2 * start * size for name, start in
              (("query", 0), ("key", heads), ("value", heads + key_heads))}  # fmt: skip
    tensors = {"cosines": cosines, "sines": sines, "keys": keys, "values": values, "out": out, "lengths": lengths}
    if shared:
        tensors |= {"prompt_keys": prompts[0], "prompt_values": prompts[1], "order": order}
        tensors |= {"prompt_of_slot": prompt_of_slot, "prompt_lengths": before}
    given = stride, slots, heads, key_heads, size, capacity, longest, window, 0
    numbers = dict(zip(native.NUMBERS.split(), given, strict=True))
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    asked = native.Attention(**places, **pointers, **numbers, scale=size**-0.5)
    assert native.library().attend(ctypes.byref(asked)) == 0

    def rotated(part: Tensor) -> Tensor:  # as transformers' Llama, in bf16
        first, second = part.chunk(2, -1)
        return part * cosines[:, None] + torch.cat([-second, first], -1) * sines[:, None]

    query, key, value = joined.unflatten(-1, (-1, size)).split([heads, key_heads, key_heads], 1)
    query, key = rotated(query).double(), rotated(key)
    for slot, length in enumerate(lengths.tolist()):
        assert torch.equal(keys[slot, :, length], key[slot]) and torch.equal(values[slot, :, length], value[slot])
        cut = int(before[prompt_of_slot[slot]]) if shared else 0
        seen = [torch.cat([prompt[prompt_of_slot[slot], :, :cut], own[slot, :, : length + 1]], 1).double()
                for prompt, own in zip(prompts, (keys, values), strict=True)]  # fmt: skip
        seen = [one[:, -window:].repeat_interleave(group, 0) for one in seen]  # all of it without a window
        scores = (seen[0] @ query[slot, :, :, None])[..., 0] * size**-0.5
        expected = (scores.softmax(-1)[:, None] @ seen[1])[:, 0]
        # A score is off by the roundings of its sum, and so is the logarithm of each share.
        terms = size + cut + length + 8
        reach = float(seen[1].abs().max()) * EPS32 * terms * (1 + float(scores.abs().max()))
        assert bool(((out[slot].double() - expected).abs() <= EPS / 2 * expected.abs() + reach).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [259, 768, 5003])
def test_draws_are_those_of_the_function(dtype: torch.dtype, vocabulary: int) -> None:
    """The same tokens, but where a uniform number lies on an edge, and the same log-probabilities but for rounding."""
    logits = (3 * random(400, vocabulary).float()).to(dtype)
    logits[:, ::7] = -math.inf
    uniform = torch.rand(400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniform[:2] = torch.tensor([0.0, 1.0 - 2**-53])
    for temperature in (1.0, 0.7):
        tokens, logprobs = native.draw(logits, temperature, uniform)
        expected, _ = sampling.draw(logits, temperature, uniform)
        assert int((tokens != expected).sum()) <= 2 and bool((tokens % 7 != 0).all())
        exact = (logits.double() / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        size = float(exact.abs().max()) + float(logits.max()) / temperature
        assert bool(((logprobs - exact).abs() <= 8 * rounding.rounding(16, size)).all())


@pytest.mark.parametrize("family", [*LIKE_LLAMA, *LIKE_GEMMA])
def test_what_is_sampled_is_what_is_scored(family: str) -> None:
    """As far as bf16 explains, also with slots that are freed and filled again, and in conversations."""
    policy = policy_of(family)
    native_trial.try_out(policy)
    sampler = Sampler(policy)
    proof = prove(policy, sampler)
    assert proof.holds and proof.sampled.mean > 0
    usual = prove(policy, Sampler(policy.but(native=False)))
    assert proof.sampled.mean < 3 * usual.sampled.mean  # no worse than torch's layers
    few, many = Sampler(policy, rows=3), Sampler(policy, rows=11)
    settings = Sampling(max_new_tokens=12, stop_ids=tuple(range(100, 120)))
    ended = [[answer.ids for answer in one.generate(ASKED, settings)] for one in (few, many)]
    assert sum(map(list.__eq__, *ended)) >= 6  # answers may part where rounding decides; not all do
    turns = [Request(request.prompt_ids, request.key, conversation=n) for n, request in enumerate(ASKED[:4])]
    first = few.generate(turns, settings)
    further = [replace(turn, prompt_ids=(*turn.prompt_ids, *answer.ids, 7, 8)) for turn, answer in
               zip(turns, first, strict=True)]  # fmt: skip
    fresh = [replace(turn, conversation=None) for turn in further]
    cached, computed = (few.generate(asked, settings) for asked in (further, fresh))
    gaps = [abs(one.logprobs[0] - other.logprobs[0]) for one, other in zip(cached, computed, strict=True)
            if one.ids[0] == other.ids[0]]  # fmt: skip
    assert gaps and max(gaps) < 5 * proof.bound.mean


def test_the_copy_still_runs_as_hugging_face_calls_it() -> None:
    """Beam search goes through Hugging Face's own attention and cache."""
    beams = Decoding(max_new_tokens=5, generation={"num_beams": 2})
    found = [Sampler(policy_of("llama", used)).generate(ASKED[:2], beams) for used in (True, False)]
    assert [answer.ids for answer in found[0]] == [answer.ids for answer in found[1]]


def test_new_weights_are_laid_out_anew() -> None:
    policy = policy_of("llama")
    sampler, greedy = Sampler(policy), Sampling(max_new_tokens=8, temperature=0.0)
    before = sampler.generate(ASKED, greedy)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.25)
    sampler.load(policy, 1)
    after = sampler.generate(ASKED, greedy)
    assert after != before and after == Sampler(policy).generate(ASKED, greedy)


def test_without_a_compiler_torchs_layers_serve_and_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of("llama")
    assert native_trial.native_where(policy, "auto") == (True, "")
    assert native_trial.native_where(policy, "torch") == (False, "")
    assert native_trial.native_where(policy.but(compute=torch.float32), "auto") == (False, "")
    with pytest.raises(LmgymError, match="layers like Llama's or Gemma's that sample in bf16 on a CPU"):
        native_trial.native_where(policy.but(compute=torch.float32), "native")
    native.library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    used, why = native_trial.native_where(policy, "auto")
    assert not used and why == "there is no C++ compiler (g++)"
    assert kernels_sentence(policy.but(native=used, native_unused=why)) == f"kernels: torch, because {why}"
    with pytest.raises(LmgymError, match=r"policy.kernels: native .* no C\+\+ compiler .*; write kernels: torch"):
        native_trial.native_where(policy, "native")


def test_kernels_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "gated", lambda both, gelu: both.chunk(2, -1)[0].contiguous())
    used, why = native_trial.native_where(policy_of("qwen2"), "auto")
    assert not used and "their log-probabilities differ from torch's by" in why


def test_a_run_chooses_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run takes what machine.json says without a trial, and one from before it torch's."""
    tried: list[Policy] = []
    monkeypatch.setattr(native_trial, "try_out", tried.append)
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    policy = {"model": "builtin:tiny", "device": "cpu", "compute": "bfloat16", "architecture": shape}
    config = build_config({**runs.TINY, "policy": policy})
    monkeypatch.setattr("lmgym.models.device.onednn_linear.pays", lambda: True)
    assert setup.load_weights(config.policy, config.seed, Machine(threads=1), None).native and len(tried) == 1
    for kernels, expected in (("native", True), ("torch", False), (None, False)):
        Machine(threads=1, compute="bfloat16", path="fast", prepacked=True, kernels=kernels).write(tmp_path)
        machine = choose_machine(config, tmp_path)
        assert setup.load_weights(config.policy, config.seed, machine, None).native is expected and len(tried) == 1
    machine = Machine(threads=1, compute="bfloat16", path="fast", prepacked=True, kernels="native")
    wider = replace(config.policy, compute="float32")  # what was chosen for bf16 is nothing to insist on
    assert machine.policy_section(config.policy).kernels == "native"
    assert machine.policy_section(wider).kernels == "torch"
    (tmp_path / "machine.json").write_text(json.dumps({"threads": 1, "compute": "bfloat16", "kernels": "fast"}))
    with pytest.raises(LmgymError, match="kernels is 'fast'"):
        choose_machine(config, tmp_path)
