"""Tiny models and batches that several test files build. Everything is a function of its arguments."""

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from lmgym.batch import Batch, PolicyOutputs, collate
from lmgym.functional.reductions import tokens_of_episode, totals, weights
from lmgym.models.builtin import builtin_model, byte_tokenizer
from lmgym.models.critic import with_critic
from lmgym.models.policy import Policy
from lmgym.types import Episode, Example, Turn
from lmgym.updates.first_order import optimizer_step

EOS = 2  # of the byte tokenizer
VOCABULARY = 259
SHARED = Path(__file__).parents[2] / "shared"

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the folder ../shared")


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def sharpen(model: PreTrainedModel, scale: float = 0.3, seed: int = 0) -> PreTrainedModel:
    """Large random weights: attention and next-token distributions far from uniform, so that a mistake shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        centre = 1.0 if parameter.dim() < 2 and name.endswith("weight") else 0.0  # norms
        parameter.data = centre + scale * noise.to(parameter.dtype)
    return model


def llama(seed: int = 0, **architecture: Any) -> Any:
    """The package's own tiny Llama, smaller still: two layers, hidden size 16, two query heads on one key head."""
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    fields = {**small, "num_key_value_heads": 1, "max_position_embeddings": 64, **architecture}
    return sharpen(builtin_model("builtin:tiny", tokenizer(), fields, seed), seed=seed)


def bits_of(sets: Tensor) -> Tensor:
    """Sets of tokens [R V] as the sampler keeps them: token i is bit i % 8 of byte i // 8."""
    return torch.from_numpy(np.packbits(sets.numpy(), axis=1, bitorder="little"))


def in_double(model: Any) -> Any:
    """The model in fp64 throughout. Norms of Llama and T5 go through fp32 whatever the model's precision (which would
    blur gradients by 1e-7), so torch's own take their place: the same formula, in fp64."""
    model = model.double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LlamaRMSNorm | T5LayerNorm):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


def exact(policy: Policy) -> Policy:
    """A copy of the policy in fp64, for comparisons of sampled ids. In fp32 they may differ: a uniform number lies
    within 1e-6 of the edge between two of 259 tokens once in 2,000 draws, and there the order of adding decides."""
    model = in_double(copy.deepcopy(policy.model))
    model.set_experts_implementation("eager")  # torch's grouped products have no fp64
    limit, fast, start = policy.tokens_per_forward, policy.fast, policy.decoder_start
    other = Policy(model, policy.tokenizer, torch.float64, limit, fast, start)
    other.rules, other.own_head = policy.rules, policy.own_head
    return other


def gpt2(seed: int = 0, **fields: Any) -> Any:
    config = GPT2Config(
        **{"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, **fields},
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return sharpen(GPT2LMHeadModel(config), seed=seed)


def parrot(ids: Sequence[int], positions: int = 64) -> Policy:
    """A GPT-2 whose greedy token at position p is ids[p - 1], whatever it reads: after a prompt of P tokens it says
    ids[P - 1], ids[P] and so on. Each position's embedding is a direction of its own, and the head reads it off."""
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=max(VOCABULARY, max(ids) + 1),
            n_embd=positions,
            n_layer=1,
            n_head=1,
            n_positions=positions,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=EOS,
            pad_token_id=0,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if name.endswith("ln_f.weight") else 0.0)
        model.transformer.wpe.weight.copy_(torch.eye(positions))
        for position, token in enumerate(ids[:positions]):
            model.lm_head.weight[token, position] = 10.0
    return Policy(model, tokenizer())


def episodes(
    seed: int,
    groups: int = 3,
    size: int = 4,
    turns: int = 3,
    longest: int = 5,
    minimum: int = 0,
    restarts: bool = False,
) -> list[Episode]:
    """Conversations of up to `turns` turns whose ids, lengths and scores are random; most actions end with EOS, most
    episodes of a group share their first prompt, and the scores of the last group are all equal. With `restarts` some
    turns begin a new row."""
    random = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return random.integers(3, VOCABULARY, count).tolist()

    result = []
    prompts = [ids(int(random.integers(1, longest + 1))) for _ in range(groups)]
    for place in range(groups * size):
        group = place // size
        score = 0.5 if group == groups - 1 else float(random.choice([0.0, 0.25, 1.0, -0.5]))
        episode = Episode(Example(f"x/{group}", "?"), group, place, score=score, baseline=float(random.random()))
        for number in range(int(random.integers(1, turns + 1))):
            action = ids(int(random.integers(1, longest + 1)))
            if random.random() < 0.8 and len(action) > minimum:
                action[-1] = EOS
            logprobs = (-3 * random.random(len(action))).tolist()
            restart = restarts and number > 0 and random.random() < 0.5
            shared = number == 0 and random.random() < 0.8
            prompt = list(prompts[group]) if shared else ids(int(random.integers(1, longest + 1)))
            episode.turns.append(Turn(prompt, action, logprobs, min_new_tokens=minimum, restart=restart))
        episode.turns[-1].reward = score
        result.append(episode)
    return result


def batch_of(conversations: Sequence[Episode], **settings: Any) -> Batch:
    """`collate`, with scores in fp64 so that advantages are too."""
    batch = collate(conversations, **{"stop_ids": (EOS,), **settings})
    return batch.replace(
        score=batch.score.double(),
        rewards=batch.rewards.double(),
        baseline=None if batch.baseline is None else batch.baseline.double(),
    )


def with_value_head(policy: Policy, scale: float = 0.3, seed: int = 0) -> Policy:
    """The policy, with a value head on its own trunk whose weights are not the zeros of a new one."""
    policy = with_critic(policy, separate=False)
    assert policy.value_head is not None
    weight = policy.value_head.weight
    generator = torch.Generator().manual_seed(seed)
    weight.data = scale * torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight.dtype)
    return policy


def prepared(
    batch: Batch, algorithm: Any, policy: Policy, reference: Policy | None = None, drift: float = 0.3
) -> Batch:
    """The columns that `update.prepare` fills, in the policy's own precision, with old log-probabilities and values
    that have drifted from the policy's by a hash of the token and its place (so that they do not depend on the batch).
    The reference is the teacher too."""
    critic = algorithm.requirements.values
    with torch.no_grad():
        names = algorithm.requirements.distribution_sums
        said = policy.compute_logprobs(batch, values=critic, last_values=critic, sums=names)
        now = said.logprobs
        batch = batch.replace(logprobs_old=now + drift * torch.sin(1000 * now) * batch.actions)
        batch = batch.replace(distribution_sums=said.distribution_sums, sum_names=names)
        if said.values is not None:
            drifted = said.values + drift * torch.sin(1000 * now) * batch.actions
            batch = batch.replace(values=drifted, last_values=said.last_values)
        if reference is not None and algorithm.requirements.reference:
            batch = batch.replace(logprobs_ref=reference.compute_logprobs(batch).logprobs)
        if reference is not None and algorithm.requirements.teacher:
            batch = batch.replace(logprobs_teacher=reference.compute_logprobs(batch).logprobs)
    return algorithm.advantages(batch)


class KeepGradient:
    """In place of `update.Optimizer`: the gradient is kept and nothing moves."""

    def __init__(self, policy: Policy) -> None:
        self.parameters = [*policy.parameters(), *policy.critic_parameters()]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def step(self) -> float:
        return float(self.flat().norm())

    def flat(self) -> Tensor:
        return torch.cat([parameter.grad.flatten() for parameter in self.parameters if parameter.grad is not None])


def gradient(algorithm: Any, policy: Policy, batch: Batch, first: bool = False) -> tuple[Tensor, dict[str, float]]:
    """The gradient of one optimizer step as one vector, and the step's metrics."""
    keeper = KeepGradient(policy)
    metrics = optimizer_step(algorithm, policy, batch, keeper, first)  # type: ignore[arg-type]
    return keeper.flat().clone(), metrics


def loss_of(algorithm: Any, batch: Batch, logprobs: Tensor) -> Tensor:
    """What an optimizer step minimises, as a function of the log-probabilities [N T]: the weighted sum of all terms. A
    value function says what it said at sampling time. An entropy is -logprobs, its estimate by the sample, and so is a
    divergence, as from a teacher that finds every token certain."""
    entropy = -logprobs if algorithm.requirements.entropy else None
    divergence = -logprobs if algorithm.requirements.divergence else None
    said = PolicyOutputs(logprobs, entropy=entropy, values=batch.values, divergence=divergence)
    if algorithm.whole_batch:
        losses, _ = algorithm.batch_loss(batch, said)
        return torch.stack([*losses.values()]).sum()
    terms, _ = algorithm.loss(batch, said)
    total, counts = totals(batch.actions, batch.episode), tokens_of_episode(batch.actions, batch.episode)
    sums = [(weights(reduction, batch.actions, counts, total) * term).sum() for term, reduction in terms.values()]
    return torch.stack(sums).sum()


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the larger norm (0 if both are zero)."""
    size = max(float(ours.norm()), float(theirs.norm()))
    return float((ours - theirs).norm()) / size if size else 0.0
