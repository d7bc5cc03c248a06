"""TRPO: Fisher products and whole steps against a Fisher matrix that is written out, and what a step must keep.

Models of about a thousand parameters in fp64. The matrix comes from Hugging Face's own forward pass, row by row, as the
expected outer product of scores: sum over y of p(y) grad log p(y) grad log p(y)^T.
"""

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmgym.algorithms.trpo import TRPO
from lmgym.batch import Batch, collate
from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.functional import truncation
from lmgym.models import lora
from lmgym.models.builtin import builtin_model
from lmgym.models.critic import with_critic
from lmgym.models.policy import Policy
from lmgym.types import Episode, Example, Turn
from lmgym.updates.fisher import FisherProduct, joined
from lmgym.updates.optimizer import Optimizer, OptimizerSection, make_optimizer
from lmgym.updates.trust_region import (
    compare,
    critic_steps,
    line_search,
    policy_step,
    subsampled,
    surrogate_gradient,
    trust_region,
)
from tests import models, runs

WORDS = 19
STOP = (2, 5)
GENERATORS = {
    "llama": lambda: models.llama(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=WORDS, tie_word_embeddings=False
    ),
    "llama, tied": lambda: models.llama(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=WORDS, tie_word_embeddings=True
    ),
    "gpt2, tied": lambda: models.gpt2(vocab_size=WORDS, n_embd=8, n_layer=1, n_positions=16),
    "t5, tied": lambda: small("builtin:tiny_t5", d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2),
    "bart, tied": lambda: small(
        "builtin:tiny_bart",
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        max_position_embeddings=16,
    ),
    "llama, adapters": lambda: adapted("all-linear"),
    "llama, an adapter on the head alone": lambda: adapted(["lm_head"]),
}


def small(name: str, **architecture: Any) -> Any:
    return models.sharpen(builtin_model(name, models.tokenizer(), {"vocab_size": WORDS, **architecture}, seed=0))


def adapted(targets: list[str] | str) -> Any:
    pytest.importorskip("peft")
    model = GENERATORS["llama"]()
    lora.add_lora(model, 2, 4.0, targets, seed=0)
    return models.sharpen(model)


@functools.cache
def model_of(name: str) -> Any:
    return models.in_double(GENERATORS[name]())


class SmallChunks(Policy):
    """The LM head on three hidden states at a time."""

    head_chunk = 3  # type: ignore[assignment]


def policy_of(name: str, kind: type[Policy] = SmallChunks, **settings: Any) -> Policy:
    """A policy whose parameters nobody else moves."""
    return kind(copy.deepcopy(model_of(name)), models.tokenizer(), compute=torch.float64, **settings)


def batch_of(policy: Policy, restricted: bool = True, temperature: float = 0.7, seed: int = 0) -> Batch:
    """Six episodes of up to two turns, whose first prompts are shared in twos, with random columns for the update."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(6, WORDS, (count,), generator=generator).tolist()

    conversations, prompts = [], [ids(2), ids(3), ids(1)]
    for index in range(6):
        turns = []
        for number in range(1 if policy.encoder_decoder else 1 + index % 2):
            action = [*ids(1 + index % 3), *([STOP[index % 2]] if index % 2 else [])]
            sets = torch.rand(len(action), WORDS, generator=generator) < 0.6
            sets[torch.arange(len(action)), action] = True
            prompt = prompts[index // 2] if number == 0 else ids(2)
            turns.append(
                Turn(
                    list(policy.decoder_start) if policy.encoder_decoder else prompt,
                    action,
                    [-1.0] * len(action),
                    min_new_tokens=min(1, len(action) - 1),
                    kept=models.bits_of(sets).numpy() if restricted else None,
                    source_ids=prompt if policy.encoder_decoder else [],
                )
            )
        conversations.append(Episode(Example(f"{index}", "?"), index // 2, index, turns))
    batch = collate(conversations, temperature=temperature, stop_ids=STOP, key=7)

    def numbers() -> Tensor:
        return torch.randn(batch.tokens.shape, generator=generator, dtype=torch.float64) * batch.actions

    return batch.replace(advantages=numbers(), values=numbers(), returns=numbers())


def written_out(policy: Policy, batch: Batch) -> list[tuple[Tensor, int, float]]:
    """Of each action: the distribution's log-probabilities [V], the token, its advantage. The model's own forward
    pass over each row; temperature, stop ids and kept sets by hand."""
    result = []
    for n in range(len(batch)):
        ids = batch.tokens[n][batch.mask[n]][None]
        inputs = {"input_ids": ids}
        if policy.encoder_decoder:
            inputs = {"input_ids": batch.source[n][batch.source_mask[n]][None], "decoder_input_ids": ids}
        logits = policy.model(**inputs, use_cache=False).logits[0]
        for t in batch.actions[n].nonzero()[:, 0].tolist():
            allowed = torch.ones(WORDS, dtype=torch.bool)
            if batch.stop_excluded is not None and bool(batch.stop_excluded[n, t]):
                allowed[list(STOP)] = False
            if batch.sampling_mask is not None:
                allowed &= truncation.unpack(batch.sampling_mask.bits[batch.kept[n, t]][None], WORDS)[0]
            scaled = torch.where(allowed, logits[t - 1] / batch.temperature, -math.inf)
            result.append((scaled.log_softmax(0), int(batch.tokens[n, t]), float(batch.advantages[n, t])))
    return result


def slope(value: Tensor, policy: Policy) -> Tensor:
    found = torch.autograd.grad(value, policy.parameters(), retain_graph=True, allow_unused=True)
    parts = zip(found, policy.parameters(), strict=True)
    return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in parts])


def dense(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """The Fisher matrix [P P] and the gradient of mean(A log p) [P]."""
    tokens = written_out(policy, batch)
    scores, gradient = [], torch.zeros(())
    for logprobs, token, advantage in tokens:
        gradient = gradient + advantage * slope(logprobs[token], policy) / len(tokens)
        for y in torch.isfinite(logprobs).nonzero()[:, 0].tolist():
            scores.append((logprobs[y].detach() / 2).exp() * slope(logprobs[y], policy))
    stacked = torch.stack(scores)
    return stacked.T @ stacked / len(tokens), gradient


def vector(policy: Policy, seed: int = 0) -> Tensor:
    size = sum(parameter.numel() for parameter in policy.parameters())
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights_of(policy: Policy) -> Tensor:
    return joined(policy.parameters()).clone()


def trained(policy: Policy, separate: bool = False, **section: Any) -> tuple[Policy, Optimizer]:
    """The policy with a critic, and its optimizer."""
    policy = with_critic(policy, separate)
    return policy, make_optimizer(TRPO(), policy, OptimizerSection(**section))


TOLERANCE = 1e-10  # of a gradient, or of a product with the matrix: fp64 rounds sums of a thousand numbers by 1e-13


# The Fisher matrix


@pytest.mark.slow
@pytest.mark.parametrize("restricted", [False, True], ids=["all tokens", "kept sets"])
@pytest.mark.parametrize("name", GENERATORS)
def test_products_with_the_matrix_and_gradient(name: str, restricted: bool) -> None:
    policy = policy_of(name)
    batch = batch_of(policy, restricted)
    assert batch.stop_excluded is not None and (batch.kept is not None) == restricted
    matrix, gradient = dense(policy, batch)
    assert models.relative(surrogate_gradient(policy, batch)[0], gradient) < TOLERANCE
    product = FisherProduct(policy, batch)
    for seed in (1, 2):  # the second one from the graph that the first one left
        v = vector(policy, seed)
        assert float((matrix @ v).norm()) > 1e-4
        assert models.relative(product(v), matrix @ v) < TOLERANCE


@pytest.mark.parametrize("name", ["llama, tied", "gpt2, tied", "bart, tied"])
def test_the_plain_path_has_the_same_matrix(name: str) -> None:
    fast, plain = policy_of(name), policy_of(name, fast=False)
    batch, v = batch_of(fast), vector(fast)
    assert fast.fast and not plain.fast
    assert models.relative(FisherProduct(fast, batch)(v), FisherProduct(plain, batch)(v)) < TOLERANCE
    assert models.relative(surrogate_gradient(fast, batch)[0], surrogate_gradient(plain, batch)[0]) < TOLERANCE


def test_the_matrix_is_the_curvature_of_the_divergence() -> None:
    """KL(old || old + e v) = e^2 / 2 v^T F v + O(e^3), through the line search's own measurement."""
    policy = policy_of("gpt2, tied")
    batch, v = batch_of(policy), vector(policy)
    v = v / v.norm()
    start, quadratic = [p.detach().clone() for p in policy.parameters()], float(v @ FisherProduct(policy, batch)(v)) / 2
    for size in (1e-2, 1e-3):
        torch.nn.utils.vector_to_parameters(joined(start) + size * v, policy.parameters())
        assert compare(policy, batch, start)[1] == pytest.approx(size**2 * quadratic, rel=20 * size)


numbers = st.integers(0, 2**31)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2, tied", "t5, tied"])
@settings(max_examples=4)
@given(seed=numbers, tokens=st.integers(1, 29), columns=st.integers(0, 5), order=st.randoms(use_true_random=False))
def test_micro_batches_padding_and_row_order_move_nothing(
    name: str, seed: int, tokens: int, columns: int, order: Any
) -> None:
    policy = policy_of(name)
    batch, v = batch_of(policy, seed=seed), vector(policy, seed)
    rows = list(range(len(batch)))
    order.shuffle(rows)
    other = batch[torch.tensor(rows)]
    wide = {
        key: torch.nn.functional.pad(column, (0, columns), value={"tokens": 11, "advantages": 3.5}.get(key, 0))
        for key, column in vars(other).items()
        if isinstance(column, Tensor) and column.dim() == 2 and column.shape[1] == batch.tokens.shape[1]
        and key not in ("source", "source_mask")
    }  # fmt: skip
    other = other.replace(**wide)
    parts = policy_of(name, Policy, tokens_per_forward=tokens)  # the six rows are 30 tokens
    assert len(policy.micro_batches(batch)) == 1 < len(parts.micro_batches(other))
    assert models.relative(surrogate_gradient(policy, batch)[0], surrogate_gradient(parts, other)[0]) < TOLERANCE
    assert models.relative(FisherProduct(policy, batch)(v), FisherProduct(parts, other)(v)) < TOLERANCE
    start = [p.detach() + 0.1 for p in policy.parameters()]
    assert compare(policy, batch, start) == pytest.approx(compare(parts, other, start), rel=100 * TOLERANCE)


# The step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2, tied", "bart, tied", "llama, adapters"])
def test_a_step_is_that_of_the_dense_system(name: str) -> None:
    policy = policy_of(name)
    batch, (policy, optimizer) = batch_of(policy), trained(policy)
    matrix, gradient = dense(policy, batch)
    damped = matrix + 0.1 * torch.eye(len(matrix), dtype=torch.float64)
    direction = torch.linalg.solve(damped, gradient)
    expected = math.sqrt(2 * 1e-4 / float(direction @ damped @ direction)) * direction
    before = weights_of(policy)
    metrics = trust_region(TRPO(delta=1e-4, iterations=300), policy, batch, optimizer)
    assert models.relative(weights_of(policy) - before, expected) < 1e-4  # the solver ends at a residual of 1e-5
    assert metrics["trpo/line_search"] == 1 and metrics["updates"] == 1 and metrics["trpo/residual"] < 1e-5
    assert metrics["trpo/step_norm"] == pytest.approx(float(expected.norm()), rel=1e-4)
    assert metrics["gradient_norm"] == pytest.approx(float(gradient.norm()))
    assert metrics["trpo/improvement"] == pytest.approx(float(gradient @ expected), rel=0.1)


@pytest.mark.parametrize("delta", [1e-5, 1.0])
def test_an_accepted_step_keeps_to_delta_and_improves(delta: float) -> None:
    policy = policy_of("gpt2, tied")
    batch, (policy, optimizer) = batch_of(policy), trained(policy)
    old = [(logprobs.detach(), token, advantage) for logprobs, token, advantage in written_out(policy, batch)]
    metrics = trust_region(TRPO(delta=delta, damping=1e-3), policy, batch, optimizer)
    new = [(logprobs.detach(), token, advantage) for logprobs, token, advantage in written_out(policy, batch)]
    pairs = list(zip(old, new, strict=True))
    divergence = sum(float((p.exp() * torch.where(p.exp() == 0, 0.0, p - q)).sum()) for (p, _, _), (q, _, _) in pairs)
    gained = sum(float(((q - p).exp()[token] - 1) * advantage) for (p, token, advantage), (q, _, _) in pairs)
    assert 0 < divergence / len(old) <= delta and gained > 0
    assert metrics["kl/old"] == pytest.approx(divergence / len(old), rel=1e-6)
    assert metrics["trpo/improvement"] == pytest.approx(gained / len(old), rel=1e-6)
    assert metrics["trpo/line_search"] == 1 if delta < 0.01 else 0 < metrics["trpo/line_search"] < 1


def test_a_step_too_long_is_refused_and_leaves_no_trace() -> None:
    policy = policy_of("gpt2, tied")
    batch, (policy, optimizer) = batch_of(policy), trained(policy)
    before = copy.deepcopy(policy.model.state_dict())
    metrics = trust_region(TRPO(delta=3.0, damping=1e-3, line_search_steps=1), policy, batch, optimizer)
    assert all(torch.equal(number, before[name]) for name, number in policy.model.state_dict().items())
    assert metrics["updates"] == metrics["trpo/line_search"] == metrics["kl/old"] == metrics["trpo/step_norm"] == 0
    assert metrics["gradient_norm"] > 0 and metrics["trpo/residual"] > 0 and metrics["gradient_norm/critic"] > 0


def test_a_step_that_makes_things_worse_is_refused_however_small() -> None:
    """The step of an accepted update, turned around: the divergence is within bounds, the improvement is negative."""
    policy = policy_of("gpt2, tied")
    batch, algorithm = batch_of(policy), TRPO(delta=1e-4)
    start, before = weights_of(policy), copy.deepcopy(policy.model.state_dict())
    assert policy_step(algorithm, policy, batch)["trpo/line_search"] == 1
    step = weights_of(policy) - start
    policy.model.load_state_dict(before)
    assert line_search(algorithm, policy, batch, 0.5 * step)["trpo/line_search"] == 1
    policy.model.load_state_dict(before)
    assert line_search(algorithm, policy, batch, -0.5 * step) == {}
    assert all(torch.equal(number, before[name]) for name, number in policy.model.state_dict().items())


def test_the_gap_to_the_sampler_is_that_of_sampled_answers() -> None:
    policy = policy_of("gpt2, tied")
    batch = batch_of(policy)
    said = policy.compute_logprobs_no_grad(batch).logprobs
    given, apart = batch.replace(logprobs_sampler=None), batch.replace(logprobs_sampler=said - 0.25 * batch.actions)
    assert surrogate_gradient(policy, given)[1] == {}
    assert surrogate_gradient(policy, apart)[1]["sampler_logprob_gap"] == pytest.approx(0.25, abs=1e-4)


def test_without_a_gradient_only_the_critic_moves() -> None:
    policy = policy_of("gpt2, tied")
    batch, (policy, optimizer) = batch_of(policy), trained(policy)
    before = weights_of(policy)
    metrics = trust_region(TRPO(), policy, batch.replace(advantages=0 * batch.advantages), optimizer)
    assert torch.equal(weights_of(policy), before) and metrics["updates"] == metrics["gradient_norm"] == 0
    assert bool(policy.value_head.weight.any())


def test_a_gradient_that_is_not_finite_is_an_error() -> None:
    policy = policy_of("gpt2, tied")
    batch, before = batch_of(policy), weights_of(policy)
    with pytest.raises(LmgymError, match="not finite"):
        trust_region(TRPO(), policy, batch.replace(advantages=batch.advantages * math.inf), trained(policy)[1])
    assert torch.equal(weights_of(policy), before)


@pytest.mark.slow
def test_subsampling_takes_whole_episodes_by_the_key() -> None:
    policy = policy_of("gpt2, tied")
    batch = batch_of(policy)
    half = subsampled(batch, 0.5)
    assert len(torch.unique(half.episode)) == 3 and len(half) < len(batch)
    shuffled = subsampled(batch[torch.arange(len(batch)).flip(0)], 0.5)
    assert sorted(shuffled.episode.tolist()) == sorted(half.episode.tolist())
    chosen = {tuple(sorted(subsampled(batch.replace(key=k), 0.5).episode.tolist())) for k in range(9)}
    assert len(chosen) > 1
    steps = []
    for share in (0.5, 1.0):
        policy = policy_of("gpt2, tied")
        before = weights_of(policy)
        policy_step(TRPO(subsample=share), policy, batch)
        steps.append(weights_of(policy) - before)
    assert models.relative(*steps) > 1e-3


# The critic


def test_regression_by_the_head_leaves_the_trunk() -> None:
    """One step of plain RMSprop from a head of zeros, against the gradient of mean (w h - R)^2 written out."""
    policy = policy_of("gpt2, tied")
    batch = batch_of(policy)
    policy, optimizer = trained(
        policy, learning_rate=0.1, max_gradient_norm=0.0, weight_decay=0.0, name="rmsprop", alpha=0.0
    )
    before = copy.deepcopy(policy.model.state_dict())
    metrics = critic_steps(TRPO(critic_epochs=1, value_coefficient=1.0), policy, batch, optimizer)
    row, column = batch.actions.nonzero(as_tuple=True)
    hidden = policy.model.transformer(batch.tokens, attention_mask=batch.mask.long()).last_hidden_state[row, column - 1]
    expected = -2 * (batch.returns[row, column][:, None] * hidden.detach()).mean(0)
    assert metrics["gradient_norm/critic"] == pytest.approx(float(expected.norm()))
    assert metrics["loss/value"] == pytest.approx(float((batch.returns[row, column] ** 2).mean()))
    step = expected / (expected.abs() + OptimizerSection().epsilon)
    assert torch.allclose(policy.value_head.weight[0], -0.1 * step, rtol=0, atol=1e-10)
    assert all(torch.equal(number, before[name]) for name, number in policy.model.state_dict().items())
    assert all(parameter.grad is None for parameter in policy.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("separate", [False, True])
def test_epochs_of_regression_fit_the_returns(separate: bool) -> None:
    policy = policy_of("gpt2, tied")
    batch, (policy, optimizer) = batch_of(policy), trained(policy, separate, learning_rate=0.01)
    assert len(optimizer.parameters) == (len(policy.parameters()) + 1 if separate else 1)
    before = weights_of(policy)
    algorithm = TRPO(critic_epochs=20, critic_minibatches=3)
    losses = [critic_steps(algorithm, policy, batch, optimizer)["loss/value"] for _ in range(3)]
    assert losses[2] < losses[1] < losses[0] and torch.equal(weights_of(policy), before)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"delta": 0.0}, "algorithm.delta is 0.0"),
        ({"damping": -0.1}, "algorithm.damping is -0.1"),
        ({"iterations": 0}, "algorithm.iterations is 0"),
        ({"critic_epochs": 0}, "algorithm.critic_epochs is 0"),
        ({"line_search_factor": 1.0}, "algorithm.line_search_factor is 1.0"),
        ({"subsample": 1.5}, "algorithm.subsample is 1.5"),
        ({"epochs": 4}, "critic_epochs"),
        ({"epochs": 2}, "critic_epochs"),
        ({"whiten": "minibatch"}, "trpo has no minibatches"),
        ({"entropy_coefficient": 0.1}, "trpo has no entropy bonus"),
    ],
)
def test_bad_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LmgymError, match=message):
        TRPO(**fields)


def test_a_copy_takes_the_names_that_a_subclass_inherits_and_no_other() -> None:
    policy = policy_of("llama")
    assert policy.but(teacher=policy, compute=torch.float32).teacher is policy and policy.teacher is None
    with pytest.raises(TypeError, match=r"^a policy has no taecher$"):
        policy.but(taecher=policy)


def test_a_run_with_products_of_onednn_takes_its_steps(tmp_path: Path) -> None:
    """Products that can be differentiated once are set aside for the Fisher matrix, the head's too."""
    changes: dict[str, Any] = {"algorithm": {"name": "trpo"}, "steps": 2, "rewards": {"length": {"target": 3}}}
    plain = runs.run(tmp_path / "plain", **changes)
    other = runs.run(tmp_path / "other", **changes, policy=runs.TINY["policy"] | {"products": "onednn"})
    [usual, own] = [
        [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]
        for folder in (plain, other)
    ]
    assert [one["gradient_norm"] for one in own] == pytest.approx([one["gradient_norm"] for one in usual], rel=1e-3)
    assert all("trpo/residual" in one for one in own)


def test_exact_parity_is_refused() -> None:
    """Its products can be differentiated once."""
    with pytest.raises(LmgymError, match=r"policy\.parity: exact does not serve stage 'train', whose trpo"):
        build_config(runs.tiny(algorithm={"name": "trpo"}, policy=runs.TINY["policy"] | {"parity": "exact"}))
