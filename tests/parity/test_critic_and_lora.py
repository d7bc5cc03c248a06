"""Value functions and adapters against what they are by definition, on causal models and encoder-decoders: hidden
states of Hugging Face's own forward pass times the head, and W + (alpha / rank) B A."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from lmgym.algorithms.actor_critic import A2C, PPO
from lmgym.batch import Batch
from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.logs.console import Console
from lmgym.models import copies, lora
from lmgym.models.critic import with_critic
from lmgym.models.load import load_policy
from lmgym.models.lora import AdapterDisabledPolicy
from lmgym.models.policy import VALUE_HEAD, Policy
from lmgym.models.policy_section import PolicySection
from lmgym.training.begin_stage import begin_stage
from lmgym.training.setup import start
from lmgym.types import Episode, Example, Turn
from lmgym.updates.optimizer import Optimizer, OptimizerSection
from lmgym.updates.prepare import prepare
from lmgym.updates.update import update
from tests import models, rounding, runs

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "builtin:tiny": {**runs.ARCHITECTURE, "num_hidden_layers": 2},
    "builtin:tiny_gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "builtin:tiny_t5": T5,
    "builtin:tiny_bart": {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
}
LORA = {"lora_rank": 4, "lora_alpha": 12}

QUICK = ("builtin:tiny", "builtin:tiny_t5")  # the other models' tests are marked slow
every_model = pytest.mark.parametrize(
    "model", [pytest.param(model, marks=() if model in QUICK else pytest.mark.slow) for model in MODELS]
)
every_path = pytest.mark.parametrize("path", ["fast", "plain"])


def section_of(model: str, **more: Any) -> PolicySection:
    return PolicySection(**{"model": model, "device": "cpu", "architecture": MODELS[model], **more})


def policy_of(model: str, critic: str = "none", **more: Any) -> Policy:
    """Weights larger than a fresh model's, so that a mistake shows; adapters and value head likewise."""
    policy = load_policy(section_of(model, **more))
    if lora.has_adapter(policy.model):
        disturb(policy.parameters())
    else:
        models.sharpen(policy.model)
    if critic != "none":
        policy = with_critic(policy, separate=critic == "separate")
        owner = policy.critic or policy
        assert owner.value_head is not None
        disturb([owner.value_head.weight], seed=3)
        if policy.critic is not None:
            disturb(policy.critic.parameters(), seed=4)
    return policy


@torch.no_grad()
def disturb(parameters: list[Any], seed: int = 1, scale: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter += scale * torch.randn(parameter.shape, generator=generator)


def batch_for(policy: Policy) -> Batch:
    """Conversations with restarts for a causal model; for an encoder-decoder, a row for each turn."""
    episodes = models.episodes(5, groups=2, restarts=True)
    if not policy.encoder_decoder:
        return models.batch_of(episodes)
    for episode in episodes:
        for place, turn in enumerate(episode.turns):
            turn.source_ids, turn.prompt_ids, turn.restart = turn.prompt_ids, [*policy.decoder_start], place > 0
    return models.batch_of(episodes)


def states_by_hand(model: Any, batch: Batch) -> list[Tensor]:
    """[T H] of each row alone: the last hidden states, as Hugging Face returns them."""
    found = []
    for row, tokens in enumerate(batch.tokens):
        ids = tokens[None, : int(batch.mask[row].sum())]
        if batch.source is None or batch.source_mask is None:
            found.append(model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0])
            continue
        source = batch.source[row, batch.source_mask[row]][None]
        output = model(input_ids=source, decoder_input_ids=ids, output_hidden_states=True)
        scale = model.config.d_model**-0.5 if model.config.model_type == "t5" else 1.0  # T5's own, before its LM head
        found.append(output.decoder_hidden_states[-1][0] * scale)
    return found


# The value function


@every_model
@every_path
@pytest.mark.parametrize("critic", ["head", "separate"])
def test_values_are_the_head_on_the_state_before_each_action(model: str, path: str, critic: str) -> None:
    policy = policy_of(model, critic, path=path)
    owner = policy.critic or policy
    batch = batch_for(policy)
    scored = policy.compute_logprobs(batch, values=True, last_values=True)
    assert scored.values is not None and scored.last_values is not None and owner.value_head is not None
    expected, last = torch.zeros(batch.tokens.shape), torch.zeros(len(batch))
    for row, states in enumerate(states_by_hand(owner.model, batch)):
        values = states @ owner.value_head.weight[0]
        columns = batch.actions[row].nonzero()[:, 0]
        expected[row, columns], last[row] = values[columns - 1].detach(), values[columns[-1]].detach()
    assert float(expected[batch.actions].std()) > 0.1
    assert rounding.near(owner.model, scored.values, expected)
    assert rounding.near(owner.model, scored.last_values, last)
    assert rounding.near(policy.model, scored.logprobs, policy.compute_logprobs(batch).logprobs)
    policy.tokens_per_forward = 30
    described = policy.compute_logprobs_no_grad(batch, values=True, last_values=True)
    assert described.values is not None and described.last_values is not None
    assert rounding.near(owner.model, described.values, expected)
    assert rounding.near(owner.model, described.last_values, last)


@every_model
@pytest.mark.parametrize("separate", [False, True])
def test_a_new_value_function_says_zero(model: str, separate: bool) -> None:
    policy = with_critic(policy_of(model), separate)
    scored = policy.compute_logprobs(batch_for(policy), values=True, last_values=True)
    assert scored.values is not None and scored.last_values is not None
    assert not bool(scored.values.any()) and not bool(scored.last_values.any())
    head = (policy.critic or policy).value_head
    assert (
        head is not None
        and head.bias is None
        and sum(p.numel() for p in policy.critic_parameters()) >= head.weight.numel()
    )
    assert with_critic(policy, separate) is policy


def test_values_without_a_value_function_are_refused() -> None:
    policy = policy_of("builtin:tiny")
    with pytest.raises(LmgymError, match=r"no value function; write policy\.critic: head or separate"):
        policy.compute_logprobs(batch_for(policy), values=True)


@every_model
@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_whom_the_value_loss_moves(model: str, lora: dict[str, Any]) -> None:
    """The shared trunk where the critic is a head; nothing of the policy where it is apart."""
    for critic in ("head", "separate"):
        policy = policy_of(model, critic, **lora)
        scored = policy.compute_logprobs(batch_for(policy), values=True)
        assert scored.values is not None
        scored.values.square().sum().backward()
        reached = [float(p.grad.abs().sum()) > 0 for p in policy.parameters() if p.grad is not None]
        assert any(reached) == (critic == "head")
        owned = [p for p in policy.critic_parameters() if p.grad is not None and bool(p.grad.any())]
        assert (len(owned) == 1) == (critic == "head") and owned
        assert not {id(p) for p in policy.critic_parameters()} & {id(p) for p in policy.parameters()}


@pytest.mark.parametrize("model", ["builtin:tiny", "builtin:tiny_t5"])
@pytest.mark.parametrize("critic", ["head", "separate"])
def test_the_critic_has_a_learning_rate_of_its_own(model: str, critic: str) -> None:
    """With the policy's at 0, only the critic's own parameters move; schedule and warm-up are the same."""
    policy = policy_of(model, critic)
    rates = OptimizerSection(
        learning_rate=0.0, critic_learning_rate=0.02, warmup=2, schedule="linear", weight_decay=0.0
    )
    optimizer = Optimizer(policy.parameters(), rates, policy.critic_parameters())
    assert optimizer.set_step(0, 4) == 0.0
    assert {group["lr"] for group in optimizer.torch.param_groups} == {0.0, 0.01}
    optimizer.set_step(3, 4)
    assert {group["lr"] for group in optimizer.torch.param_groups} == {0.0, 0.01}  # half way down
    before = [[p.detach().clone() for p in owned] for owned in (policy.parameters(), policy.critic_parameters())]
    algorithm = PPO(epochs=2)
    update(algorithm, policy, prepare(batch_for(policy), policy, {}, algorithm), optimizer)
    for owned, old, moves in zip((policy.parameters(), policy.critic_parameters()), before, (False, True), strict=True):
        assert any(not torch.equal(one, other) for one, other in zip(owned, old, strict=True)) == moves
    same = Optimizer(policy.parameters(), OptimizerSection(learning_rate=0.1, warmup=0), policy.critic_parameters())
    assert same.set_step(0, 4) == 0.1 and {group["lr"] for group in same.torch.param_groups} == {0.1}


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: PPO(epochs=1), lambda: A2C()], ids=["ppo", "a2c"])
def test_a_critic_learns_the_returns(make: Callable[[], Any]) -> None:
    """Thirty steps on one batch of a shared trunk: the squared error falls to a third."""
    policy = policy_of("builtin:tiny_bart")
    policy = with_critic(policy, separate=False)
    algorithm = make()
    optimizer = Optimizer(policy.parameters(), OptimizerSection(learning_rate=3e-3), policy.critic_parameters())
    batch = prepare(batch_for(policy), policy, {}, algorithm)
    records = [update(algorithm, policy, batch, optimizer) for _ in range(30)]
    assert 0 < records[-1]["loss/value"] < records[0]["loss/value"] / 3


# Checkpoints


def assert_same(one: Policy, other: Policy) -> None:
    batch = batch_for(one)
    ask: dict[str, Any] = {"entropy": True, "values": one.has_critic, "last_values": one.has_critic}
    for ours, theirs in zip(
        vars(one.compute_logprobs(batch, **ask)).values(),
        vars(other.compute_logprobs(batch, **ask)).values(),
        strict=True,
    ):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    assert [p.shape for p in one.parameters()] == [p.shape for p in other.parameters()]
    assert [p.shape for p in one.critic_parameters()] == [p.shape for p in other.critic_parameters()]


@every_model
@pytest.mark.parametrize("critic", ["none", "head", "separate"])
@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_a_checkpoint_gives_back_the_same_policy(model: str, critic: str, lora: dict[str, Any], tmp_path: Path) -> None:
    policy = policy_of(model, critic, **lora)
    policy.save(tmp_path)
    assert (tmp_path / VALUE_HEAD).is_file() == (critic == "head")
    assert (tmp_path / "critic" / VALUE_HEAD).is_file() == (critic == "separate")
    assert (tmp_path / "adapter_model.safetensors").is_file() == bool(lora)
    assert (tmp_path / "model.safetensors").is_file() != bool(lora)
    assert_same(policy, load_policy(section_of(model, critic=critic, **lora), folder=tmp_path))


# Adapters


@every_model
def test_adapters_say_nothing_at_first_and_nothing_else_trains(model: str) -> None:
    base, policy = load_policy(section_of(model)), load_policy(section_of(model, **LORA))
    batch = batch_for(base)
    # Not bit for bit: how torch folds a product, and so rounds, depends on whether the weights want gradients.
    before, after = (one.compute_logprobs(batch).logprobs for one in (base, policy))
    assert rounding.near(base.model, after, before)
    assert not any(bool(p.any()) for name, p in policy.model.named_parameters() if ".lora_B." in name)
    assert {name.split(".")[-3] for name, p in policy.model.named_parameters() if p.requires_grad} == {
        "lora_A",
        "lora_B",
    }
    again, other = load_policy(section_of(model, **LORA)), load_policy(section_of(model, **LORA), seed=1)
    pairs = list(zip(policy.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(one, same) for one, same, _ in pairs)  # a function of the seed
    assert any(not torch.equal(one, different) for one, _, different in pairs)
    every = {id(module) for module in policy.model.modules()}
    assert id(policy.model.get_output_embeddings()) in every
    assert not hasattr(policy.model.get_output_embeddings(), "lora_A")


@every_model
@pytest.mark.parametrize("alpha", [None, 12])
def test_a_merged_model_is_a_plain_one_that_says_the_same(model: str, alpha: float | None, tmp_path: Path) -> None:
    """W + (alpha / rank) B A in each layer, in a folder that needs no peft to read."""
    policy = policy_of(model, lora_rank=4, lora_alpha=alpha)
    base = dict(load_policy(section_of(model)).model.named_parameters())
    policy.save_pretrained(tmp_path)
    assert not (tmp_path / lora.CONFIG).exists() and (tmp_path / "model.safetensors").is_file()
    kind: Any = AutoModelForSeq2SeqLM if policy.encoder_decoder else AutoModelForCausalLM
    plain = kind.from_pretrained(tmp_path)
    assert type(plain) is type(policy.model) and not lora.has_adapter(plain)
    adapted = {name: p for name, p in policy.model.named_parameters() if ".lora_" in name}
    changed = 0
    for name, weight in plain.named_parameters():
        a, b = (adapted.get(name.replace(".weight", f".lora_{side}.default.weight")) for side in "AB")
        expected, loose = base[name], 0.0
        if a is not None and b is not None:
            scale = (alpha or 8) / 4
            delta = (b @ a).T if model.endswith("gpt2") else b @ a  # GPT-2 stores its weights transposed
            expected, changed = expected + scale * delta, changed + 1
            # A sum of four products, scaled and added.
            loose = rounding.rounding(4 + 2, float(expected.abs().max() + scale * (b.abs() @ a.abs()).max()))
        assert torch.allclose(weight, expected, rtol=0, atol=loose)
    assert changed == len(adapted) // 2 > 4
    batch = batch_for(policy)
    merged = Policy(plain, policy.tokenizer).compute_logprobs(batch).logprobs
    assert rounding.near(policy.model, merged, policy.compute_logprobs(batch).logprobs)
    assert not torch.allclose(merged, load_policy(section_of(model)).compute_logprobs(batch).logprobs, atol=1e-2)
    assert lora.has_adapter(policy.model)  # saving has not merged the one that trains


@every_model
def test_before_its_adapters_a_policy_is_its_base(model: str) -> None:
    policy, base = policy_of(model, **LORA), load_policy(section_of(model))
    batch = batch_for(policy)
    trained, now = len(policy.parameters()), policy.compute_logprobs(batch).logprobs
    without, before = (one.compute_logprobs_no_grad(batch).logprobs for one in (AdapterDisabledPolicy(policy), base))
    assert rounding.near(base.model, without, before)
    assert not torch.allclose(now, before, atol=1e-2)
    assert torch.equal(policy.compute_logprobs(batch).logprobs, now)  # and then they are on again, and train
    assert len(policy.parameters()) == trained > 0


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_the_reference_of_the_first_stage(lora: dict[str, Any], tmp_path: Path) -> None:
    """The model before its adapters at no cost, or a frozen copy."""
    policy = {"model": "builtin:tiny", "device": "cpu", "architecture": runs.ARCHITECTURE, **lora}
    algorithm = {"name": "grpo", "group_size": 4, "kl_coefficient": 0.1}
    run = start(
        build_config(runs.tiny(out=str(tmp_path / "run"), policy=policy, algorithm=algorithm)), Console(quiet=True)
    )
    with run:
        frozen = begin_stage(run).frozen_models
        reference = frozen.models["reference"]
        assert isinstance(reference, AdapterDisabledPolicy) == bool(lora)
        episode = Episode(Example("x", "?"), 0, 0, [Turn([1, 5, 6], [7, 8, 2])])
        batch = models.batch_of([episode])
        before = run.policy.compute_logprobs_no_grad(batch).logprobs
        assert torch.equal(reference.compute_logprobs_no_grad(batch).logprobs, before)
        disturb(run.policy.parameters())
        assert not torch.allclose(run.policy.compute_logprobs_no_grad(batch).logprobs, before, atol=1e-2)
        assert torch.equal(reference.compute_logprobs_no_grad(batch).logprobs, before)
        assert set(frozen.taken) == (set() if lora else {"reference"})


def test_frozen_copies_and_critics_of_adapted_policies() -> None:
    policy = policy_of("builtin:tiny_t5", "separate", **LORA)
    batch = batch_for(policy)
    frozen = copies.frozen(policy)
    assert frozen.parameters() == [] and not lora.has_adapter(frozen.model) and not frozen.has_critic
    now = policy.compute_logprobs_no_grad(batch).logprobs
    assert rounding.near(policy.model, frozen.compute_logprobs_no_grad(batch).logprobs, now)
    assert policy.critic is not None and lora.has_adapter(policy.critic.model)
    shared = {id(p) for p in policy.model.parameters()} & {id(p) for p in policy.critic.model.parameters()}
    assert not shared
    disturb(policy.parameters(), seed=9)
    assert not torch.allclose(
        frozen.compute_logprobs_no_grad(batch).logprobs, policy.compute_logprobs_no_grad(batch).logprobs, atol=1e-2
    )


def test_targets_that_are_no_layers_are_refused() -> None:
    with pytest.raises(LmgymError, match=r"policy\.lora_targets: .*no_such_layer"):
        load_policy(section_of("builtin:tiny", lora_rank=4, lora_targets=["no_such_layer"]))
    with pytest.raises(LmgymError, match=r"policy\.lora_targets: '\*q_proj' is no regular expression \(.*\); write a"):
        section_of("builtin:tiny", lora_rank=4, lora_targets="*q_proj")
    for model in ("builtin:tiny_t5", "builtin:tiny_bart"):  # of which encoder and decoder read copies
        with pytest.raises(
            LmgymError, match=r"policy\.lora_targets: the model reads '(model\.)?shared' through the emb"
        ):
            load_policy(section_of(model, lora_rank=4, lora_targets=["shared", "q_proj", "q"]))
    only = load_policy(section_of("builtin:tiny", lora_rank=4, lora_targets=["q_proj"]))
    assert {name.split(".")[-4] for name, p in only.model.named_parameters() if p.requires_grad} == {"q_proj"}
