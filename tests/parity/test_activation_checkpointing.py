"""Activation checkpointing moves no number: log-probabilities and gradients equal those of the plain forward pass, on
every path, with adapters and with a value function, and the layers really are computed again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lmgym.batch import Batch
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.inference.base import Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models import hooks, load
from lmgym.models.critic import with_critic
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from tests import models, rounding, runs

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "builtin:tiny": {**runs.ARCHITECTURE, "num_hidden_layers": 3},
    "builtin:tiny_gpt2": {"n_embd": 32, "n_layer": 2},
    "builtin:tiny_t5": {"d_model": 32, "d_kv": 8, "d_ff": 48},
    "builtin:tiny_bart": {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
}
LAYERS = {"builtin:tiny": 3, "builtin:tiny_gpt2": 2, "builtin:tiny_t5": 4, "builtin:tiny_bart": 4}


def policy_of(model: str, again: bool, **more: Any) -> Policy:
    architecture = ARCHITECTURES[model]
    section = PolicySection(
        model=model, device="cpu", architecture=architecture, activation_checkpointing=again, **more
    )
    policy = load_policy(section)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # weights larger than a fresh model's, so that a mistake shows
        for parameter in policy.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


def batch_for(policy: Policy, shared_prompts: bool = True) -> Batch:
    """Two groups of answers of different lengths; where no prompt is shared, rows are packed in another way."""
    episodes = models.episodes(7, groups=2, size=3, turns=2 if not policy.encoder_decoder else 1)
    for place, episode in enumerate(episodes):
        if not shared_prompts:
            episode.turns[0].prompt_ids.append(20 + place)
        if policy.encoder_decoder:
            turn = episode.turns[0]
            turn.source_ids, turn.prompt_ids = turn.prompt_ids, [*policy.decoder_start]
    return models.batch_of(episodes)


def measured(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the gradient of a weighted sum of them, entropies and values."""
    scored = policy.compute_logprobs(batch, entropy=True, values=policy.has_critic)
    total = (torch.sin(torch.arange(scored.logprobs.numel())).reshape(scored.logprobs.shape) * scored.logprobs).sum()
    assert scored.entropy is not None
    total = total + 0.1 * scored.entropy.sum()
    if scored.values is not None:
        total = total + scored.values.square().sum()
    parameters = [*policy.parameters(), *policy.critic_parameters()]
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    return scored.logprobs.detach(), torch.cat([g.flatten() for g in found if g is not None])


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("model", "path", "shared_prompts"),
    [
        ("builtin:tiny", "fast", True),
        ("builtin:tiny", "fast", False),
        ("builtin:tiny", "plain", True),
        ("builtin:tiny_gpt2", "fast", True),
        ("builtin:tiny_t5", "fast", True),
        ("builtin:tiny_t5", "plain", True),
        ("builtin:tiny_bart", "fast", True),
    ],
)
def test_no_number_moves(model: str, path: str, shared_prompts: bool, lora: dict[str, Any]) -> None:
    usual, again = (policy_of(model, on, path=path, **lora) for on in (False, True))
    batch = batch_for(usual, shared_prompts)
    if model == "builtin:tiny":
        usual, again = models.with_value_head(usual), models.with_value_head(again)
    (logprobs, gradient), (same, other) = measured(usual, batch), measured(again, batch)
    assert torch.equal(logprobs, same)
    assert float(gradient.norm()) > 0.1
    assert rounding.near_gradient(usual.model, other, gradient, outputs=int(batch.actions.sum()))


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_layers_are_computed_again_in_backward_and_only_there(model: str) -> None:
    for on in (False, True):
        policy, runs_of_a_layer = policy_of(model, on), [0]
        batch = batch_for(policy)

        def count(module: Any, arguments: Any, runs: list[int] = runs_of_a_layer) -> None:
            runs[0] += 1

        for layer in hooks.layers_of(policy.model):
            # Each layer holds one attention or more; its first norm runs once a pass, inside of what is run again.
            norm = next(module for name, module in layer.named_modules() if "norm" in name.lower() or "ln_1" in name)
            norm.register_forward_pre_hook(count)
        policy.compute_logprobs_no_grad(batch)
        assert runs_of_a_layer[0] == LAYERS[model]
        policy.compute_logprobs(batch).logprobs.sum().backward()
        assert runs_of_a_layer[0] == LAYERS[model] * (3 if on else 2)
        assert not any("forward" in layer.__dict__ for layer in hooks.layers_of(policy.model))


def test_less_is_kept_for_backward() -> None:
    """Bytes that autograd holds between forward and backward, by saved_tensors_hooks; recomputed ones do not count."""
    kept = {}
    for on in (False, True):
        policy = policy_of("builtin:tiny", on)
        batch, seen = batch_for(policy, shared_prompts=False), dict[int, int]()

        def note(tensor: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        own = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            scored = policy.compute_logprobs(batch)
        kept[on] = sum(size for place, size in seen.items() if place not in own)
        assert scored.logprobs.requires_grad
    assert kept[True] < kept[False] / 3


def test_a_critic_of_its_own_is_checkpointed_too() -> None:
    usual, again = (with_critic(policy_of("builtin:tiny", on), separate=True) for on in (False, True))
    batch, found = batch_for(usual), []
    for policy in (usual, again):
        assert policy.critic is not None and policy.critic.value_head is not None
        policy.critic.value_head.weight.data.fill_(0.5)
        found.append(measured(policy, batch)[1])
    assert again.critic is not None and again.critic.activation_checkpointing
    assert rounding.near_gradient(usual.model, found[1], found[0], outputs=int(batch.actions.sum()))


def test_in_bf16_the_second_run_is_in_bf16_too() -> None:
    usual, again = (policy_of("builtin:tiny", on, compute="bfloat16") for on in (False, True))
    (logprobs, gradient), (same, other) = (measured(policy, batch_for(policy)) for policy in (usual, again))
    assert torch.equal(logprobs, same)
    assert rounding.near_gradient(usual.model, other, gradient, outputs=logprobs.numel())
    _, exact = measured(policy_of("builtin:tiny", False), batch_for(usual))
    assert not rounding.near_gradient(usual.model, exact, gradient, outputs=logprobs.numel())


@pytest.mark.parametrize("model", ["builtin:tiny", "builtin:tiny_t5"])
def test_sampling_is_not_touched(model: str, caplog: pytest.LogCaptureFixture) -> None:
    """transformers' own switch would throw the cache away, with a warning."""
    answers = []
    for on in (False, True):
        policy = policy_of(model, on)
        prompt, source = (policy.decoder_start, (5, 6, 7)) if policy.encoder_decoder else ((1, 40, 41), ())
        requests = [Request(prompt, seeds.key(0, place), source) for place in range(4)]
        answers.append(Sampler(policy).generate(requests, Sampling(max_new_tokens=8)))
    assert [one.ids for one in answers[0]] == [one.ids for one in answers[1]]
    assert [one.logprobs for one in answers[0]] == [one.logprobs for one in answers[1]]
    assert "cach" not in caplog.text.lower()


def test_second_derivatives_do_without() -> None:
    """TRPO's Fisher products differentiate twice, which a layer that was run again in backward would not survive."""
    policy = policy_of("builtin:tiny", True)
    with policy.twice_differentiable():
        logprobs = policy.compute_logprobs(batch_for(policy)).logprobs
        first = torch.autograd.grad(logprobs.sum(), policy.parameters(), create_graph=True)
        second = torch.autograd.grad(sum((one.square().sum() for one in first), torch.tensor(0.0)), policy.parameters())
    assert policy.activation_checkpointing and all(bool(one.isfinite().all()) for one in second)


def test_a_model_without_such_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "layers_of", lambda model: [])
    with pytest.raises(LmgymError, match=r"policy\.activation_checkpointing: transformers knows no layers of llama"):
        policy_of("builtin:tiny", True)


@pytest.mark.slow
def test_a_run_with_it_is_the_run_without(tmp_path: Path) -> None:
    folders = []
    for on in (False, True):
        policy = runs.TINY["policy"] | {"activation_checkpointing": on}
        folders.append(runs.run(tmp_path / str(on), policy=policy, steps=3))
    usual, again = (runs.records(folder / "metrics.jsonl") for folder in folders)
    loose = rounding.tolerance(AutoModelForCausalLM.from_pretrained(folders[0] / "final"))
    assert len(usual) == len(again) > 3
    for one, other in zip(usual, again, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            same = other[name]
            assert value == (pytest.approx(same, rel=loose, abs=loose) if isinstance(same, float) else same)
