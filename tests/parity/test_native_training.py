"""Scoring and updates in bf16 by kernels of lmgym's own (models/kernels/training.cpp): each against its formula, whole
gradients against torch's layers and fp32, and the choice, which a run makes once."""

import copy
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lmgym.batch import Batch, collate
from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.models import training_trial
from lmgym.models.attention import segments
from lmgym.models.attention.cpu import BlockGroups, BlockRows
from lmgym.models.attention.tree import BlockTree
from lmgym.models.families import LIKE_GEMMA, LIKE_LLAMA
from lmgym.models.fast_path import route_of
from lmgym.models.kernels import fused_head, fused_training, onednn_linear, training
from lmgym.models.kernels.layer_form import READ, Form
from lmgym.models.policy import Policy
from lmgym.models.prefix_trees import PrefixTree
from lmgym.models.rounding import RoundedWeights, random_table, round_stochastically
from lmgym.models.sentences import update_kernels_sentence
from lmgym.training import setup
from lmgym.training.machine import Machine, choose_machine
from lmgym.types import Episode, Example, Turn
from tests import models, runs

# Where there is a compiler that fails, these tests run and fail: training.cpp is wrong then.
HERE = shutil.which(os.environ.get("CXX") or "g++") is not None and onednn_linear.available()
pytestmark = pytest.mark.skipif(not HERE, reason="no C++ compiler, or no bf16 products on this processor")
EPS, EPS32 = torch.finfo(torch.bfloat16).eps, torch.finfo(torch.float32).eps
CPU = torch.device("cpu")
TREE = PrefixTree(rows=(2, 0, 1), lengths=(50, 70, 61), shared=(0, 33, 40))
LAYOUTS = {
    "rows": lambda: BlockRows([70, 3, 41], CPU),
    "groups": lambda: BlockGroups([45, 6], [60, 1, 0, 33], torch.tensor([0, 0, 1, 1]), CPU),
    "tree": lambda: BlockTree(TREE, CPU),
}


def policy_of(family: str, used: bool = True, vocabulary: int = 320, **fields: int) -> Policy:
    """Two layers with heads of 32, two queries a key head, biases where the family may have them; of Gemma 3 the first
    one has a window, of fewer tokens than some rows have."""
    shape: dict[str, object] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    shape |= {"head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 256, **fields}
    shape |= {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    shape["sliding_window"] = None
    if family == "gemma3_text":
        window = fields.get("sliding_window", 64)
        shape |= {"sliding_window": window, "layer_types": ["sliding_attention", "full_attention"]}
    config = AutoConfig.for_model(family, vocab_size=vocabulary, eos_token_id=models.EOS, pad_token_id=0, **shape)
    model = models.sharpen(AutoModelForCausalLM.from_config(config), 0.12)
    policy = Policy(model, models.tokenizer(), torch.bfloat16, route=route_of(Policy(model, models.tokenizer())))
    return policy.but(rounded=RoundedWeights(model, 0), trains_native=used)


def batch_of(groups: int = 3, answers: int = 3, **fields: float) -> Batch:
    """Prompts of up to 60 tokens with answers of up to 50."""
    draw, episodes = random.Random(0), []
    for group in range(groups):
        prompt = [draw.randrange(3, 300) for _ in range(draw.randrange(1, 60))]
        for _ in range(answers):
            turn = Turn(prompt, [draw.randrange(3, 300) for _ in range(draw.randrange(1, 50))])
            episodes.append(Episode(Example(str(group), ""), group, len(episodes), [turn]))
    return collate(episodes, 0, **fields)  # type: ignore[arg-type]


def gradients(policy: Policy, batch: Batch, known: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities, and the gradients of a weighted sum of them, added up over the policy's passes."""
    policy.model.zero_grad()
    by_logprob = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(1)) * batch.actions
    logprobs = torch.zeros(batch.tokens.shape)
    for rows in policy.micro_batches(batch):
        part = batch[rows]
        own = by_logprob[rows, : part.tokens.shape[1]]
        found = policy.compute_logprobs(part, logprob_gradient=own if known else None).logprobs
        (found * own).sum().backward()  # type: ignore[no-untyped-call]
        logprobs[rows, : found.shape[1]] = found.detach()
    return logprobs, {name: one.grad.clone() for name, one in policy.model.named_parameters() if one.grad is not None}


def in_fp32(policy: Policy) -> Policy:
    """The weights that a pass computes with, in fp32."""
    model = copy.deepcopy(policy.model)
    for ours, theirs in zip(model.parameters(), policy.model.parameters(), strict=True):
        ours.data = policy.computed(theirs).float()
    return Policy(model, policy.tokenizer)


def random_bf16(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 31, 32, 300])
def test_products_are_onednns_and_their_gradients_sums_in_fp32(rows: int) -> None:
    weights = [random_bf16(64, 96, seed=1), random_bf16(32, 96, seed=2)]
    hidden, by_out, bias = training.empty(rows, 96), training.empty(rows, 96), random_bf16(96, seed=3)
    for matrix in (hidden, by_out):
        matrix.fill_(float("nan"))  # what is behind the rows is not read
        matrix[:rows] = random_bf16(rows, 96)
    both, ours = torch.cat(weights), training.product(hidden, weights, rows, bias)[:rows]
    assert torch.equal(ours, torch.nn.functional.linear(hidden[:rows], both, bias)) or not training.has_products()
    residual = torch.randn(rows, 96)
    assert torch.equal(training.product(hidden, weights, rows, bias, residual), residual + ours)
    exact = by_out[:rows].double() @ both.double()
    found = training.product_back(by_out, weights, rows)[:rows].double()
    reach = by_out[:rows].double().abs() @ both.double().abs()
    assert bool(((found - exact).abs() <= EPS / 2 * exact.abs() + 96 * EPS32 * reach).all())
    gradient = training.weight_gradient(by_out, hidden, rows).double()
    exact, reach = (one(by_out[:rows].double()).T @ one(hidden[:rows].double()) for one in (torch.clone, torch.abs))
    kept = EPS32 * rows if training.has_products() else EPS
    assert bool(((gradient - exact).abs() <= kept * reach).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size, group", [(32, 1), (48, 3), (64, 5), (128, 2), (256, 4)])
def test_attention_and_its_gradients_are_those_of_softmax(layout: str, size: int, group: int) -> None:
    """Against fp64, each segment alone: outputs round once, shares and gradients of scores once more."""
    spans, key_heads = LAYOUTS[layout]().segments, 2
    rows, heads = len(LAYOUTS[layout]().positions), key_heads * group
    weights = fused_training.Weights(
        [],
        [],
        {
            f"{name}_proj.weight": torch.empty(count * size, 0)
            for name, count in (("q", heads), ("k", key_heads), ("v", key_heads))
        },
    )
    ones, zeros = torch.ones(rows, size), torch.zeros(rows, size)
    form = Form(READ, None, gelu=False, from_one=False, epsilon=0.0)
    this = fused_training.Pass(weights, form, ones, zeros, *segments.packed(spans), size, size**-0.5)
    joined, attended = (
        random_bf16(-(-rows // 32) * 32, (heads + 2 * key_heads) * size),
        training.empty(rows, heads * size),
    )
    normaliser, by_attended = torch.empty(rows, heads), random_bf16(len(joined), heads * size, seed=1)
    fused_training.attend(this, joined, attended, normaliser)
    by_joined = fused_training.attend_backward(this, joined, attended, normaliser, by_attended, {})
    exact = joined[:rows].double().requires_grad_(True)
    query, key, value = exact.unflatten(1, (-1, size)).split([heads, key_heads, key_heads], 1)
    key, value = (part.repeat_interleave(group, 1) for part in (key, value))
    outputs = torch.zeros(rows, heads, size, dtype=torch.double)
    for own in spans:
        seen = torch.cat([torch.arange(start, start + count) for start, count in own])
        start, count = own[-1]
        scores = torch.einsum("qhd,khd->hqk", query[start : start + count], key[seen]) * size**-0.5
        causal = torch.ones(count, len(seen), dtype=torch.bool).tril(len(seen) - count)
        shares = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        outputs[start : start + count] = torch.einsum("hqk,khd->qhd", shares, value[seen])
    (by_exact,) = torch.autograd.grad(outputs, exact, by_attended[:rows].double().unflatten(1, (heads, size)))
    for found, expected in ((attended[:rows], outputs.detach().flatten(1)), (by_joined[:rows], by_exact)):
        gap = found.double() - expected
        assert float(gap.norm()) <= 2 * EPS * float(expected.norm())
        assert float(gap.abs().max()) <= 8 * EPS * float(expected.abs().max())


@pytest.mark.parametrize("family", [*LIKE_LLAMA, *LIKE_GEMMA])
@pytest.mark.parametrize("vocabulary, known", [(320, True), (320, False), (301, True)])
def test_gradients_are_as_near_to_fp32_as_torchs(family: str, vocabulary: int, known: bool) -> None:
    """With a head that the kernels take (its vocabulary is a multiple of 32) and one that they do not."""
    ours, batch = policy_of(family, vocabulary=vocabulary), batch_of()
    assert ours.has_known_layers
    exact = gradients(in_fp32(ours), batch)
    torchs, found = (gradients(policy, batch, known) for policy in (ours.but(trains_native=False), ours))
    assert not torch.equal(torchs[0], found[0])  # they were computed otherwise
    names = ["logprobs", *exact[1]]
    for name, *three in zip(names, *([one[0], *one[1].values()] for one in (exact, torchs, found)), strict=True):
        right, usual, native_one = (one.double() for one in three)
        assert float((native_one - right).norm()) <= 2 * float((usual - right).norm()), name


@pytest.mark.parametrize("window, layers", [(64, 1), (256, 2)])
def test_a_layer_is_torchs_where_rows_are_longer_than_its_window(
    window: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the longer window both layers are the kernels', and as near to fp32."""
    ours, batch, calls = policy_of("gemma3_text", sliding_window=window), batch_of(), list[int]()
    exact, torchs = (gradients(policy, batch) for policy in (in_fp32(ours), ours.but(trains_native=False)))
    usual = training.gated
    monkeypatch.setattr(training, "gated", lambda *given: calls.append(1) or usual(*given))
    found = gradients(ours, batch)
    assert len(calls) == layers * len(list(ours.micro_batches(batch)))
    names = ["logprobs", *exact[1]]
    for name, *three in zip(names, *([one[0], *one[1].values()] for one in (exact, torchs, found)), strict=True):
        right, expected, native_one = (one.double() for one in three)
        assert float((native_one - right).norm()) <= 2 * float((expected - right).norm()), name


@pytest.mark.parametrize("family", ["olmo2", "phi3", "gpt_neox"])
def test_the_head_of_another_family_is_as_near_to_fp32_as_torchs(family: str) -> None:
    """Its layers are torch's: the gradients that come back to them are compared as well. Without AMX torch serves."""
    policy, batch = policy_of(family), batch_of()
    ours = policy.but(**vars(route_of(policy.but(compute=torch.float32, rounded=None, trains_native=False))))
    if not training.has_products():
        assert not training_trial.trains_native_where(ours, "auto")[0]
        with pytest.raises(LmgymError, match="AMX"):
            training_trial.trains_native_where(ours, "native")
        return
    assert training.may_have_products()
    assert training_trial.trains_native_where(ours, "auto") == (True, "")
    assert update_kernels_sentence(ours).startswith("update kernels: native (LM head,")
    exact = gradients(in_fp32(ours), batch)
    torchs, found = (gradients(policy, batch) for policy in (ours.but(trains_native=False), ours))
    assert not torch.equal(torchs[0], found[0])
    names = ["logprobs", *exact[1]]
    for name, *three in zip(names, *([one[0], *one[1].values()] for one in (exact, torchs, found)), strict=True):
        right, usual, native_one = (one.double() for one in three)
        assert float((native_one - right).norm()) <= 2 * float((usual - right).norm()), name


def test_without_tiles_the_head_alone_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processor has none, nothing is compiled; where the system keeps them back, a sentence says so."""
    policy = policy_of("gpt_neox")
    ours = policy.but(**vars(route_of(policy.but(compute=torch.float32, rounded=None, trains_native=False))))
    monkeypatch.setattr(training, "has_products", lambda: False)
    monkeypatch.setattr(training, "may_have_products", lambda: True)
    used, why = training_trial.trains_native_where(ours, "auto")
    assert not used and "the system keeps AMX from this process" in why
    monkeypatch.setattr(training, "may_have_products", lambda: False)
    monkeypatch.setattr(training, "library", lambda: pytest.fail("compiled for nothing"))
    assert training_trial.trains_native_where(ours, "auto") == (False, "")


def test_what_cannot_be_sampled_has_no_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temperature, stop ids that were excluded, and ids that are never sampled, as in the usual head."""
    batch = batch_of()
    excluded = torch.zeros_like(batch.actions)
    excluded[::2] = True
    batch = batch.replace(temperature=0.7, stop_ids=(5, 310), stop_excluded=excluded & batch.actions)
    batch = batch.replace(tokens=batch.tokens.masked_fill(batch.tokens == 5, 6))
    ours = policy_of("llama")
    monkeypatch.setattr(Policy, "never", (7,))
    batch = batch.replace(tokens=batch.tokens.masked_fill(batch.tokens == 7, 6))
    exact, torchs, found = (gradients(p, batch) for p in (in_fp32(ours), ours.but(trains_native=False), ours))
    for name in ("lm_head.weight", "model.layers.0.mlp.up_proj.weight"):
        far = [float((one[1][name] - exact[1][name]).norm()) for one in (torchs, found)]
        assert far[1] <= 2 * far[0]
    assert float((found[0] - exact[0]).norm()) <= 2 * float((torchs[0] - exact[0]).norm())
    assert not bool(found[1]["lm_head.weight"][7].any())


def test_neither_passes_nor_threads_nor_recomputation_matter(threads: None) -> None:
    """Log-probabilities keep their bits, and so do gradients unless sums over passes are cut otherwise."""
    ours, batch = policy_of("llama"), batch_of(groups=5)
    logprobs, whole = gradients(ours, batch, known=True)
    again = gradients(ours.but(activation_checkpointing=True), batch, known=True)
    torch.set_num_threads(2)
    both = gradients(ours, batch, known=True)
    for name, one in whole.items():
        assert torch.equal(again[1][name], one) and torch.equal(both[1][name], one), name
    cut = gradients(ours.but(tokens_per_forward=64), batch)
    if training.has_products():
        assert torch.equal(cut[0], logprobs)
        for name, one in whole.items():  # rounded to bf16 on the way, each sum over tokens in fp32
            gap = cut[1][name] - one
            assert float(gap.norm()) <= EPS * float(one.norm()), name


def test_weights_are_rounded_as_by_torch() -> None:
    numbers, found = torch.randn(2**18 + 77, generator=torch.Generator().manual_seed(0)), []
    for used in (False, True):
        out = torch.empty_like(numbers, dtype=torch.bfloat16)
        round_stochastically(numbers, random_table(3), 5, out, used)
        found.append(out)
    assert torch.equal(*found)


def test_segments_of_layouts() -> None:
    assert LAYOUTS["rows"]().segments == [[(0, 70)], [(70, 3)], [(73, 41)]]
    groups = [[(0, 45)], [(45, 6)], [(0, 45), (51, 60)], [(0, 45), (111, 1)], [(45, 6), (112, 33)]]
    assert LAYOUTS["groups"]().segments == groups
    tree = [[(0, 50)], [(0, 33), (50, 37)], [(0, 33), (50, 7), (87, 21)]]
    assert LAYOUTS["tree"]().segments == tree


def test_with_second_derivatives_and_in_fp32_torch_computes() -> None:
    ours, batch = policy_of("llama"), batch_of()
    precise = ours.but(compute=torch.float32, rounded=None)
    expected = precise.but(trains_native=False).compute_logprobs(batch).logprobs
    assert torch.equal(precise.compute_logprobs(batch).logprobs, expected)
    with ours.twice_differentiable():
        weight = ours.model.model.layers[0].mlp.up_proj.weight
        (first,) = torch.autograd.grad(ours.compute_logprobs(batch).logprobs.sum(), weight, create_graph=True)
        assert first.grad_fn is not None


def test_kernels_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of("qwen3")
    assert training_trial.trains_native_where(policy, "auto") == (True, "")
    assert training_trial.trains_native_where(policy, "torch") == (False, "")
    right = training.gated_backward
    monkeypatch.setattr(training, "gated_backward", lambda *given: (right(*given)[0] * 1.1, right(*given)[1]))
    used, why = training_trial.trains_native_where(policy, "auto")
    assert not used and "of a layer are" in why and "from those in fp32" in why
    assert update_kernels_sentence(policy.but(trains_native=used, trains_native_unused=why)).endswith(why)
    monkeypatch.setattr(training, "gated_backward", right)
    nothing = torch.zeros(40), torch.zeros(40, 64), torch.zeros(320, 64)
    monkeypatch.setattr(fused_head.Chunks, "run", lambda *given: nothing)
    used, why = training_trial.trains_native_where(policy, "auto")
    assert used is not training.has_products() and ("of a LM head are" in why) is training.has_products()


def test_without_a_compiler_torch_serves_and_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of("llama")
    for other in (policy.but(compute=torch.float32), policy.but(exact=True), policy.but(flex=True)):
        assert training_trial.trains_native_where(other, "auto") == (False, "")
        with pytest.raises(
            LmgymError, match="layers like Llama's or Gemma's, or with AMX a plain LM head, that train in bf16 on a CPU"
        ):
            training_trial.trains_native_where(other, "native")
    training.library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    used, why = training_trial.trains_native_where(policy, "auto")
    assert not used and why == "there is no C++ compiler (g++)"
    with pytest.raises(
        LmgymError, match=r"policy.update_kernels: native .* no C\+\+ compiler .*; write update_kernels: torch"
    ):
        training_trial.trains_native_where(policy, "native")


def test_a_run_chooses_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run takes what machine.json says without a trial, and one from before it torch's."""
    tried: list[Policy] = []
    monkeypatch.setattr(training_trial, "try_out", tried.append)
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    policy = {"model": "builtin:tiny", "device": "cpu", "compute": "bfloat16", "kernels": "torch"}
    config = build_config({**runs.TINY, "policy": {**policy, "architecture": shape}})

    def loaded(machine: Machine) -> Policy:
        return setup.load_weights(config.policy, config.seed, machine, None)

    assert loaded(Machine(threads=1)).trains_native and len(tried) == 1
    for kernels, expected in (("native", True), ("torch", False), (None, False)):
        Machine(threads=1, compute="bfloat16", path="fast", update_kernels=kernels).write(tmp_path)
        assert loaded(choose_machine(config, tmp_path)).trains_native is expected and len(tried) == 1
    machine = Machine(threads=1, compute="bfloat16", path="fast", update_kernels="native")
    assert machine.policy_section(config.policy).update_kernels == "native"
    wider = replace(config.policy, compute="float32")  # what was chosen for bf16 is nothing to insist on
    assert machine.policy_section(wider).update_kernels == "torch"
    (tmp_path / "machine.json").write_text(json.dumps({"threads": 1, "compute": "bfloat16", "update_kernels": "fast"}))
    with pytest.raises(LmgymError, match="update_kernels is 'fast'"):
        choose_machine(config, tmp_path)
