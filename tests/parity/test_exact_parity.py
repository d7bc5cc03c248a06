"""`policy.parity: exact`: what is sampled and what is scored are the same bits, however they are computed."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lmgym.batch import Batch, collate
from lmgym.config.build import build_config
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.functional.pieces import in_pieces
from lmgym.inference.base import Request, Sampling
from lmgym.inference.parity import parity_of, scored_in_ways
from lmgym.inference.proof import proofs_of
from lmgym.inference.sampler import Sampler
from lmgym.models import copies, lora
from lmgym.models.fast_path import route_of
from lmgym.models.kernels import onednn_linear
from lmgym.models.load import load_policy
from lmgym.models.parity import attention, modules, products
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.rounding import RoundedWeights
from lmgym.models.served_exactly import check_served
from lmgym.types import Episode, Example, Turn
from tests import models, runs
from tests.parity import test_families as families
from tests.parity.test_resume import Interrupting
from tests.runs import assert_equal_runs

pytestmark = pytest.mark.skipif(not onednn_linear.can_pack(), reason="this torch has no oneDNN")
PRECISIONS = [
    torch.float32,
    pytest.param(
        torch.bfloat16, marks=pytest.mark.skipif(not onednn_linear.available(), reason="no bf16 products here")
    ),
]
LONG = {"max_position_embeddings": 256}
EXACT = {**runs.TINY["policy"], "parity": "exact"}


def policy_of(family: str = "llama", compute: torch.dtype = torch.float32, **settings: Any) -> Policy:
    """An exact policy; in bf16 over weights that are rounded stochastically."""
    if family == "llama":
        model: Any = models.sharpen(models.llama(num_attention_heads=4, num_key_value_heads=2, **LONG), 0.2)
    elif family == "gpt2":
        model = models.sharpen(models.gpt2(n_positions=256), 0.12)
    else:
        model = copy.deepcopy(families.model_of(family))
    policy = Policy(model, models.tokenizer(), compute, exact=True, **settings)
    if family not in ("llama", "gpt2"):
        policy = policy.but(**vars(route_of(policy.but(exact=False))))
    check_served(policy)
    return policy.but(rounded=RoundedWeights(model, 0)) if compute == torch.bfloat16 else policy


def sampled(policy: Policy, rows: int, sampling: Sampling | None = None, count: int = 5, shared: int = 2) -> Batch:
    """Answers of several lengths to prompts of 1 to 90 tokens, each asked `shared` times."""
    sampling, random, requests = sampling or Sampling(max_new_tokens=20), np.random.default_rng(0), []
    longest = min(90, (policy.context or 90) - sampling.max_new_tokens)
    for _ in range(count):
        prompt = tuple(random.integers(3, 259, random.integers(1, longest + 1)).tolist())
        for _ in range(shared):
            pause = int(random.integers(1, sampling.max_new_tokens + 1))
            requests.append(
                Request(prompt, seeds.key("test", len(requests)), pause=max(pause, sampling.min_new_tokens))
            )
    answers = Sampler(policy, rows).generate(requests, sampling)
    episodes = [
        Episode(
            Example(f"x/{n // shared}", ""), n // shared, n,
            [Turn([*asked.prompt_ids], one.ids, one.logprobs, min_new_tokens=sampling.min_new_tokens, kept=one.kept)],
        )
        for n, (asked, one) in enumerate(zip(requests, answers, strict=True))
    ]  # fmt: skip
    return collate(episodes, policy.pad_id, temperature=sampling.temperature, stop_ids=(models.EOS,))


@pytest.mark.parametrize("compute", PRECISIONS)
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sampled_and_scored_are_the_same_bits(family: str, rows: int, compute: torch.dtype) -> None:
    """Slots that come and go, prompts that are shared; micro-batches, gradients, row by row."""
    policy = policy_of(family, compute)
    batch = sampled(policy, rows)
    for limit in (60, 4096):
        found = parity_of(policy.but(tokens_per_forward=limit), batch)
        assert found.differing == 0 and found.ways >= 4 and found.tokens > 50


@pytest.mark.parametrize("compute", PRECISIONS)
def test_what_is_sampled_does_not_depend_on_the_slots(compute: torch.dtype) -> None:
    """Ids and log-probabilities of the whole rollout."""
    policy = policy_of(compute=compute)
    one, other = sampled(policy, 3), sampled(policy, 64)
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.require("logprobs_sampler"), other.require("logprobs_sampler"))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"top_k": 9},
        {"top_p": 0.8, "temperature": 1.3},
        {"min_new_tokens": 4},
        {"temperature": 0.0},
    ],
)
def test_settings_of_sampling(settings: dict[str, Any]) -> None:
    policy = policy_of()
    assert parity_of(policy, sampled(policy, 8, Sampling(max_new_tokens=12, **settings), count=3)).differing == 0


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_neox"])
def test_families(family: str) -> None:
    """Norms of heads; a window of 4 and two kinds of rotary embeddings; parts of heads with positions."""
    policy = policy_of(family)
    assert parity_of(policy, sampled(policy, 8, Sampling(max_new_tokens=12), count=3)).differing == 0


def test_turns_of_conversations() -> None:
    """The next prompts of cached conversations are computed behind what is cached."""
    policy = policy_of()
    sampler, random = Sampler(policy, 4), np.random.default_rng(1)
    rows: list[list[Turn]] = [[] for _ in range(6)]
    for turn in range(3):
        requests, prompts = [], [random.integers(3, 259, random.integers(1, 40)).tolist() for _ in rows]
        for number, (turns, prompt) in enumerate(zip(rows, prompts, strict=True)):
            before = [token for one in turns for token in (*one.prompt_ids, *one.action_ids)]
            key = seeds.key("turn", turn, number)
            requests.append(Request((*before, *prompt), key, conversation=number))
        for turns, prompt, answer in zip(
            rows, prompts, sampler.generate(requests, Sampling(max_new_tokens=9)), strict=True
        ):
            turns.append(Turn(prompt, answer.ids, answer.logprobs))
    episodes = [Episode(Example(f"x/{n}", ""), n, n, turns) for n, turns in enumerate(rows)]
    assert parity_of(policy, collate(episodes, policy.pad_id, stop_ids=(models.EOS,))).differing == 0


def test_rows_that_fork() -> None:
    """A prefix tree gives the bits of its rows alone."""
    policy = policy_of()
    begin = [*range(3, 60)]
    episode = Episode(Example("x", ""), 0, 0)
    for end in ([70, 71, 72], [80, 81], [90, 91, 92, 93]):
        episode.turns.append(Turn([*begin, *end], [100, 101, 102], [0.0] * 3, restart=bool(episode.turns)))
    batch = collate([episode], policy.pad_id)
    ways = dict(scored_in_ways(policy, batch))
    assert all(torch.equal(ways["alone"], scored) for scored in ways.values())


@pytest.mark.parametrize("compute", PRECISIONS)
@pytest.mark.parametrize("told", [False, True])
def test_gradients_are_those_of_the_default_mode(compute: torch.dtype, told: bool) -> None:
    """Within rounding; with entropies, and with a gradient by the log-probabilities that is known beforehand."""
    policy = policy_of(compute=compute)
    batch = sampled(policy, 8, count=4)
    with modules.set_aside(policy.model):
        usual = gradient(policy.but(exact=False), batch, told)
    ours, usual = (
        torch.cat([one.double().flatten() for one in both]) for both in (gradient(policy, batch, told), usual)
    )
    # A share of its length: what fp32, and what rounding to bf16 explains in a model with random large weights.
    assert float((ours - usual).norm()) <= (3e-2 if compute == torch.bfloat16 else 1e-5) * float(usual.norm())


def gradient(policy: Policy, batch: Batch, told: bool) -> list[Tensor]:
    weights = (
        torch.sin(torch.arange(batch.tokens.numel(), dtype=torch.float32)).view(batch.tokens.shape) * batch.actions
    )
    outputs = policy.compute_logprobs(batch, entropy=not told, logprob_gradient=weights if told else None)
    loss = (outputs.logprobs * weights).sum() + (0.0 if told else outputs.require("entropy").sum())
    return [one for one in torch.autograd.grad(loss, list(policy.model.parameters()))]


def test_activation_checkpointing_and_adapters() -> None:
    pytest.importorskip("peft")
    policy = policy_of(activation_checkpointing=True)
    lora.add_lora(policy.model, 2, 4.0, "all-linear", 0)
    modules.use_in(policy.model)
    with torch.no_grad():  # new adapters are the product of something and 0
        for number, parameter in enumerate(policy.parameters()):
            parameter.copy_(0.2 * torch.sin(torch.arange(parameter.numel()) + number).view(parameter.shape))
    assert parity_of(policy, sampled(policy, 8, count=4)).differing == 0


@pytest.mark.parametrize("compute", PRECISIONS)
def test_updated_weights_are_seen(compute: torch.dtype) -> None:
    """In place, as an optimizer does, and in a copy; masters and rounded copies."""
    policy = policy_of(compute=compute)
    batch = sampled(policy, 4, count=3)
    before = policy.compute_logprobs_no_grad(batch).logprobs
    other = copies.frozen(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    if policy.rounded is not None:
        policy.rounded.updates += 1
    assert not torch.equal(policy.compute_logprobs_no_grad(batch).logprobs, before)
    assert parity_of(policy, sampled(policy, 4, count=3)).differing == 0
    if policy.rounded is None:
        assert torch.equal(other.compute_logprobs_no_grad(batch).logprobs, before)


def test_an_elementwise_function_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of threads the same bits as number by number, which torch's own exp has not."""
    numbers = torch.linspace(-9, 9, 7 * 10_007).view(7, -1)
    expected = torch.cat([in_pieces(torch.exp, numbers[:, start : start + 1]) for start in range(0, 10_007, 501)], 1)
    for threads in (1, 2, 3, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(in_pieces(torch.exp, numbers)[:, ::501], expected)


def test_the_proof_says_so_and_finds_what_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of()
    proof = proofs_of(policy, Sampler(policy), Sampler)[-1]
    assert proof.holds and "0 scored ones have other bits" in proof.sentence
    right = attention.attend_tile
    monkeypatch.setattr(
        attention, "attend_tile", lambda query, *others: right(query * (1 + 1e-6 * (query.shape[1] > 8)), *others)
    )
    wrong = proofs_of(policy, Sampler(policy), Sampler)[-1]
    assert not wrong.holds
    with pytest.raises(LmgymError, match=r"policy.parity: exact does not hold for this llama on this machine"):
        wrong.check()


def test_a_processor_without_such_products_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = onednn_linear.product

    def by_place(hidden: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return right(hidden, packed, bias) + torch.arange(len(hidden))[:, None]

    products.sizes_of.cache_clear()
    monkeypatch.setattr(onednn_linear, "product", by_place)
    with pytest.raises(LmgymError, match="the bits of a row depend on its place among others"):
        products.sizes_of(24, 16, torch.float32, 1)
    products.sizes_of.cache_clear()


def test_a_run_is_exact_repeats_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Every step's gap is 0, and so the weights of its first pass are 1; interrupted and resumed it is the same run."""
    one = runs.run(tmp_path / "one", policy=EXACT)
    trained = [record for record in runs.records(one / "metrics.jsonl") if record["kind"] == "train"]
    assert trained and all(record["sampler_logprob_gap"] == 0 for record in trained)
    assert all(record["gradient_norm"] > 0 for record in trained)
    parts = runs.run(tmp_path / "parts", Interrupting(at=3), policy=EXACT)
    assert not (parts / "final").exists()
    assert_equal_runs(one, runs.run(parts, policy=EXACT))


@pytest.mark.parametrize(
    "match, changes",
    [
        ("whole weights on each rank", {"distributed": {"sharding": "fsdp"}}),
        ("engine.captured for a GPU", {"engine": {"captured": True}}),
        ("pool samples elsewhere", {"engine": {"name": "pool"}}),
        ("whose nlpo samples within a restriction", {"algorithm": {"name": "nlpo"}}),
        ("policy.products, because it chooses", {"policy": {**EXACT, "products": "onednn"}}),
        ("policy.path, because Hugging Face's padded", {"policy": {**EXACT, "path": "plain"}}),
    ],
)
def test_what_it_does_not_serve_is_refused(match: str, changes: dict[str, Any]) -> None:
    with pytest.raises(LmgymError, match=match):
        build_config(runs.tiny(**{"policy": EXACT, **changes}))


def test_a_processor_without_bf16_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_linear, "available", lambda: False)  # AVX2 alone
    with pytest.raises(LmgymError, match="this processor has no products in bf16 through oneDNN; write compute: float"):
        load_policy(PolicySection(model="builtin:tiny", device="cpu", compute="bfloat16", parity="exact"))
    check_served(policy_of())


def test_models_that_it_does_not_serve_are_refused() -> None:
    for model, reason in (("builtin:tiny_t5", "not on the fast path"),):
        with pytest.raises(LmgymError, match=f"policy.parity: exact does not serve this .*{reason}"):
            load_policy(PolicySection(model=model, device="cpu", parity="exact"))
    capped = policy_of()
    capped.own_head = object
    with pytest.raises(LmgymError, match="its logits are more than a product with its LM head"):
        check_served(capped)
    capped = policy_of()
    capped.model.set_output_embeddings(nn.Linear(16, 259, bias=True))
    with pytest.raises(LmgymError, match="its logits are more than a product with its LM head"):
        check_served(capped)
