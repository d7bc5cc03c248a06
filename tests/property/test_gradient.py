"""What must not move the gradient, and what must. Tiny models in fp64; hypothesis chooses the batches.

Tolerance: sums of some thousand numbers round by about 1e-12 in fp64, and a token or row too many or too few moves a
gradient by 1e-3 and more; 1e-6 is far from both.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmgym.algorithms.actor_critic import A2C, PPO
from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.distill import Distill
from lmgym.algorithms.gkd import GKD
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.raft import RAFT
from lmgym.algorithms.reinforce import RLOO, Reinforce
from lmgym.algorithms.reinforce_pp import ReinforcePlusPlus
from lmgym.algorithms.reinforce_stable import ReinforceStable
from lmgym.algorithms.replay import Replay
from lmgym.algorithms.supervised import Supervised
from lmgym.batch import Batch, PolicyOutputs, collate
from lmgym.core.errors import LmgymError
from lmgym.functional.distribution_sums import SUMS
from lmgym.models.kernels import fused_divergence, fused_logprobs
from lmgym.models.policy import Policy
from lmgym.models.skeleton import Skeleton
from lmgym.types import Episode, Example, Turn
from lmgym.updates.first_order import minibatches_of, optimizer_step
from lmgym.updates.optimizer import Optimizer, OptimizerSection
from lmgym.updates.prepare import prepare
from tests import models, rounding
from tests.family import grpo
from tests.property.test_ranks import OneOf

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "grpo token": lambda: GRPO(group_size=4),
    "grpo sequence, scaled": lambda: grpo(group_size=4, reduction="sequence", scale_rewards="group"),
    "grpo constant, kl": lambda: GRPO(group_size=4, reduction="constant", kl_coefficient=0.2),
    "grpo token, kl, scaled": lambda: grpo(group_size=4, kl_coefficient=0.2, scale_rewards="group"),
    "reinforce": lambda: Reinforce(),
    "reinforce scst": lambda: Reinforce(baseline="scst"),
    "rloo": lambda: RLOO(),
    "reinforce_pp": lambda: ReinforcePlusPlus(gamma=0.9),
    "reinforce_pp, kl": lambda: ReinforcePlusPlus(baseline="group", group_size=4, kl_coefficient=0.2),
    "reinforce_stable, kl": lambda: ReinforceStable(baseline="group", group_size=4, gamma=0.5),
    "reinforce_stable, kl of llm_rl": lambda: ReinforceStable(compat="llm_rl", gamma=0.5),
    "supervised": lambda: Supervised(),
    "ppo": lambda: PPO(gamma=0.9, value_clip=0.2),
    "ppo, kl, entropy": lambda: PPO(kl_coefficient=0.1, entropy_coefficient=0.05, norm_reward=True, whiten="none"),
    "a2c": lambda: A2C(reduction="constant"),
    "raft": lambda: RAFT(group_size=4),
    "distill": lambda: Distill(teacher="another"),
    "distill, discounted, rewards": lambda: Distill(teacher="another", gamma=0.9, reward_coefficient=0.5, group_size=4),
    "gkd": lambda: GKD(teacher="another"),
    "gkd, rewards": lambda: GKD(teacher="another", divergence="jsd", reward_coefficient=0.5, group_size=4),
    "replay": lambda: Replay(group_size=4),
    "replay, truncated": lambda: grpo(kind=Replay, group_size=4, truncate=2.0),
}
ALL_ROWS = ("supervised", "ppo", "a2c", "raft", "distill", "gkd")  # and penalties: rows without credit train too
MAKE: dict[str, Callable[..., Any]] = {"llama": models.llama, "gpt2": models.gpt2}
TOLERANCE = 1e-6

every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
every_model = pytest.mark.parametrize("model", MAKE)
few = settings(max_examples=3)
numbers = st.integers(0, 2**31)


@functools.cache
def policy_of(model: str, seed: int = 0, fast: bool = True) -> Policy:
    policy = Policy(models.in_double(MAKE[model](seed)), models.tokenizer(), compute=torch.float64, fast=fast)
    policy.teacher = policy_of(model, 1) if seed == 0 else None
    return models.with_value_head(policy)


def cut(policy: Policy, tokens: int) -> Policy:
    """The same policy with another bound on the tokens of a forward pass."""
    other = policy.__class__.__new__(policy.__class__)
    other.__dict__ = {**policy.__dict__, "tokens_per_forward": tokens}
    return other


def ready(name: str, model: str, seed: int, **settings: Any) -> tuple[Algorithm, Batch]:
    """An algorithm with a batch whose columns are filled in; old log-probabilities differ from the policy's."""
    algorithm = ALGORITHMS[name]()
    batch = models.batch_of(models.episodes(seed, restarts=True), **settings)
    return algorithm, models.prepared(batch, algorithm, policy_of(model), policy_of(model, 1))


def with_padding(batch: Batch, columns: int) -> Batch:
    """More columns on the right, full of ids and numbers that mean nothing."""
    wide = {}
    for name, column in vars(batch).items():
        if isinstance(column, Tensor) and column.dim() >= 2:
            fill = {"tokens": 77, "mask": 0, "actions": 0, "stop_excluded": 0}.get(name, 3.5)
            wide[name] = torch.nn.functional.pad(column, (*[0, 0] * (column.dim() - 2), 0, columns), value=fill)
    return replace(batch, **wide)


def tokens_run(policy: Policy, batch: Batch) -> int:
    """How many tokens go through the trunk of the fast path."""
    seen = []
    hook = policy.model.get_input_embeddings().register_forward_hook(lambda _, ids, out: seen.append(ids[0].numel()))
    with torch.no_grad(), hook:
        policy.compute_logprobs(batch)
    return sum(seen)


# What must not move it


@pytest.mark.slow
@every_model
@every_algorithm
@few
@given(seed=numbers, tokens=st.integers(1, 60), first=st.booleans())
def test_micro_batches(name: str, model: str, seed: int, tokens: int, first: bool) -> None:
    algorithm, batch = ready(name, model, seed)
    policy = policy_of(model)
    assume(bool(algorithm.active(batch).any()))  # 1 seed in 4096 has equal scores in every group
    assume(tokens < sum(tokens_run(policy, batch[rows]) for rows in policy.micro_batches(batch)))  # it must be cut
    assert len(policy.micro_batches(batch)) == 1 < len(cut(policy, tokens).micro_batches(batch))
    whole, metrics = models.gradient(algorithm, policy, batch, first)
    parts, part_metrics = models.gradient(algorithm, cut(policy, tokens), batch, first)
    assert float(whole.norm()) > 0
    assert models.relative(whole, parts) < TOLERANCE
    assert part_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, True])
@given(seed=numbers, tokens=st.integers(1, 100))
@example(seed=590516, tokens=1)  # two answers of one token to one prompt
def test_micro_batches_hold_every_row_once_and_keep_to_the_bound(fast: bool, seed: int, tokens: int) -> None:
    batch = models.batch_of(models.episodes(seed, restarts=True))
    policy = cut(policy_of("gpt2", fast=fast), tokens)
    parts = policy.micro_batches(batch)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(batch)))
    lengths = batch.mask.sum(1)

    def held(rows: torch.Tensor) -> int:
        return tokens_run(policy, batch[rows]) if fast else len(rows) * int(lengths[rows].max())

    for rows in parts:
        assert len(rows) == 1 or held(rows) <= tokens
    for group in batch.group.unique():
        own = (batch.group == group).nonzero()[:, 0]
        holding = [rows for rows in parts if bool(torch.isin(own, rows).any())]
        assert len(holding) == 1 or held(own) > tokens


@pytest.mark.slow
@given(seed=numbers, tokens=st.integers(1, 60), size=st.integers(2, 6))
def test_ranks_with_parts_of_the_weights_make_equally_many_passes(seed: int, tokens: int, size: int) -> None:
    batch = models.batch_of(models.episodes(seed))
    policy = cut(policy_of("gpt2"), tokens)
    policy.skeleton = Skeleton(policy.model)
    passes = []
    for rank in range(size):
        policy.ranks = OneOf(rank, size)
        passes.append(policy.micro_batches(batch))
    assert len({len(own) for own in passes}) == 1
    assert sorted(int(row) for own in passes for rows in own for row in rows) == list(range(len(batch)))
    assert any(len(own[-1]) for own in passes)  # no pass in which all are idle
    scored = policy.compute_logprobs(batch.idle())
    assert not bool(scored.logprobs.any()) and scored.logprobs.requires_grad


def test_answers_of_one_token_share_their_prompt() -> None:
    answers = [
        Episode(Example("x", "?"), group, place, [Turn([5, 6 + group, 7], [10 + place], [-1.0])])
        for group in range(2)
        for place in range(4)
    ]
    batch, policy = collate(answers), policy_of("gpt2")
    assert tokens_run(policy, batch) == 6
    assert [len(rows) for rows in cut(policy, 5).micro_batches(batch)] == [4, 4]
    scored = policy.compute_logprobs(batch).logprobs
    expected = policy_of("gpt2", fast=False).compute_logprobs(batch).logprobs
    assert torch.allclose(scored, expected, rtol=0, atol=1e-12) and bool((scored[batch.actions] < -1).all())


@pytest.mark.slow
@every_model
@every_algorithm
@few
@given(seed=numbers, columns=st.integers(1, 9), fast=st.booleans())
def test_padding(name: str, model: str, seed: int, columns: int, fast: bool) -> None:
    algorithm, batch = ready(name, model, seed)
    policy = policy_of(model, fast=fast)
    narrow, metrics = models.gradient(algorithm, policy, batch)
    wide, wide_metrics = models.gradient(algorithm, policy, algorithm.advantages(with_padding(batch, columns)))
    assert models.relative(narrow, wide) < TOLERANCE
    assert wide_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-9)


def in_order_within_episodes(rows: list[int], episode: list[int]) -> list[int]:
    """The rows with those of one episode in their own order, at the places that they have: credit that looks ahead
    goes from row to row."""
    left: dict[int, list[int]] = {}
    for row in sorted(rows):
        left.setdefault(episode[row], []).append(row)
    return [left[episode[row]].pop(0) for row in rows]


@pytest.mark.slow
@every_model
@every_algorithm
@few
@given(seed=numbers, order=st.randoms(use_true_random=False))
def test_row_order(name: str, model: str, seed: int, order: Any) -> None:
    algorithm, batch = ready(name, model, seed)
    rows = list(range(len(batch)))
    order.shuffle(rows)
    rows = in_order_within_episodes(rows, batch.episode.tolist())
    sorted_gradient, metrics = models.gradient(algorithm, policy_of(model), batch)
    shuffled = algorithm.advantages(batch[torch.tensor(rows)])
    shuffled_gradient, shuffled_metrics = models.gradient(algorithm, policy_of(model), shuffled)
    assert models.relative(sorted_gradient, shuffled_gradient) < TOLERANCE
    assert shuffled_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-9)


def apart(episode: Episode) -> Episode:
    """The same conversation, each turn a row of its own behind all that came before it."""
    turns, before = [], []
    for turn in episode.turns:
        before = before + turn.prompt_ids
        turns.append(replace(turn, prompt_ids=before, restart=True))
        before = before + turn.action_ids
    return replace(episode, turns=turns)


@pytest.mark.slow
@every_model
@every_algorithm
@few
@given(seed=numbers)
def test_splitting_a_conversation_into_rows(name: str, model: str, seed: int) -> None:
    """One row of three turns and three rows of one turn are the same episode: it counts once, and so do its tokens."""
    policy, reference = policy_of(model), policy_of(model, 1)
    gradients, metrics, rows = [], [], []
    for conversations in (models.episodes(seed), [apart(episode) for episode in models.episodes(seed)]):
        algorithm = ALGORITHMS[name]()
        batch = models.prepared(models.batch_of(conversations), algorithm, policy, reference)
        found, record = models.gradient(algorithm, policy, batch)
        record.pop("rows/computed")
        gradients.append(found), metrics.append(record), rows.append(len(batch))
    assert rows[1] > rows[0]
    assert models.relative(*gradients) < TOLERANCE
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5, abs=1e-9)


@pytest.mark.slow
@every_model
@every_algorithm
@few
@given(seed=numbers)
def test_rows_without_advantage_change_nothing_and_cost_nothing(name: str, model: str, seed: int) -> None:
    algorithm, batch = ready(name, model, seed)
    computed: list[int] = []

    class Counting(Policy):
        def compute_logprobs(self, batch: Batch, *arguments: Any, **asked: Any) -> PolicyOutputs:
            computed.append(len(batch))
            return super().compute_logprobs(batch, *arguments, **asked)

    class Everything(type(algorithm)):  # type: ignore[misc]
        def active(self, batch: Batch) -> Tensor:
            return batch.actions.any(1)

    counting = Counting(policy_of(model).model, models.tokenizer(), compute=torch.float64)
    counting.value_head, counting.teacher = policy_of(model).value_head, policy_of(model).teacher
    found, metrics = models.gradient(algorithm, counting, batch)
    everything = Everything.__new__(Everything)
    everything.__dict__.update(vars(algorithm))
    full, _ = models.gradient(everything, policy_of(model), batch)
    assert models.relative(found, full) < TOLERANCE
    live = int((batch.advantages != 0).any(1).sum())
    if "kl" in name or name.startswith(ALL_ROWS):
        assert sum(computed) == len(batch)
    else:
        assert sum(computed) == live
    assert metrics["rows/computed"] == pytest.approx(sum(computed) / len(batch))
    if name in ("grpo token", "rloo", "replay"):
        assert live < len(batch)  # the last group has equal scores


@every_model
@few
@given(seed=numbers, minimum=st.integers(0, 2), temperature=st.sampled_from([1.0, 0.7, 1.6]))
def test_the_fast_path_is_the_plain_path(model: str, seed: int, minimum: int, temperature: float) -> None:
    batch = models.batch_of(models.episodes(seed, minimum=minimum, restarts=True), temperature=temperature)
    fast, plain = policy_of(model), policy_of(model, fast=False)
    one, other = (policy.compute_logprobs(batch, entropy=True, sums=tuple(SUMS)) for policy in (fast, plain))
    assert torch.allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-6)
    assert torch.allclose(one.entropy, other.entropy, rtol=0, atol=1e-6)
    assert torch.allclose(one.distribution_sums, other.distribution_sums, rtol=0, atol=1e-6)
    algorithm = GRPO(group_size=4)
    batch = models.prepared(batch, algorithm, fast)
    assert models.relative(*(models.gradient(algorithm, policy, batch)[0] for policy in (fast, plain))) < TOLERANCE


@every_model
@few
@given(seed=numbers, size=st.integers(1, 9))
def test_chunks_of_the_head(model: str, seed: int, size: int) -> None:
    class Chunked(Policy):
        @property
        def head_chunk(self) -> int:
            return size

    batch = models.batch_of(models.episodes(seed, minimum=1), temperature=0.8)
    whole = policy_of(model)
    chunked = Chunked(whole.model, models.tokenizer(), compute=torch.float64)
    chunked.value_head = whole.value_head
    assert int(batch.actions.sum()) > size
    found = []
    for policy in (whole, chunked):
        keeper = models.KeepGradient(policy)
        keeper.zero_grad()
        scored = policy.compute_logprobs(batch, entropy=True)
        (scored.logprobs.sum() + 0.3 * scored.entropy.sum()).backward()
        sums = policy.compute_logprobs(batch, sums=tuple(SUMS)).require("distribution_sums")
        assert not sums.requires_grad
        found.append((scored.logprobs.detach(), scored.entropy.detach(), sums, keeper.flat().clone()))
    for one, other in zip(*found, strict=True):
        assert models.relative(one, other) < 1e-9


# What the first optimizer step of a batch is


@pytest.mark.slow
@every_model
@pytest.mark.parametrize("double", [False, True])
@few
@given(seed=numbers, tokens=st.integers(1, 80))
def test_the_ratio_of_the_first_step_is_exactly_one(model: str, double: bool, seed: int, tokens: int) -> None:
    """Whatever the scoring pass of `prepare` said, whose micro-batches are cut differently."""
    network = MAKE[model]().double() if double else MAKE[model]()
    policy = Policy(network, models.tokenizer(), next(network.parameters()).dtype, tokens_per_forward=tokens)
    algorithm = GRPO(group_size=4, minibatches=2, kl_coefficient=0.1)
    batch = models.batch_of(models.episodes(seed))
    batch = prepare(batch.replace(logprobs_old=batch.logprobs_sampler), policy, {"reference": policy}, algorithm)
    for minibatch in minibatches_of(batch, algorithm.epochs, algorithm.minibatches):
        _, metrics = models.gradient(algorithm, policy, minibatch, first=True)
        assert (metrics["ratio/mean"], metrics["ratio/clipped"], metrics["kl/old"]) == (1.0, 0.0, 0.0)
        _, metrics = models.gradient(algorithm, policy, minibatch.replace(logprobs_old=minibatch.logprobs_sampler))
        assert metrics["ratio/mean"] != 1.0


# Whose gradient by a log-probability depends on it: a divergence in the loss, an entropy, a ratio to the sampler's.
DEPENDING = {
    *("grpo constant, kl", "grpo token, kl, scaled", "reinforce_stable, kl", "reinforce_stable, kl of llm_rl"),
    *("ppo, kl, entropy", "replay", "replay, truncated"),
    *("gkd", "gkd, rewards"),  # not by the log-probabilities alone
}


@every_algorithm
def test_a_first_step_does_the_heads_work_once_and_what_it_promises_changes_no_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the gradient by the log-probabilities is known beforehand, forward forms the head's gradient and backward
    takes it over; elsewhere backward forms it. Never both."""
    made, given = [], []

    class Counted(fused_logprobs.HeadGradient):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(1)

    class Heard(Policy):
        def compute_logprobs(
            self, *arguments: Any, logprob_gradient: Tensor | None = None, **named: Any
        ) -> PolicyOutputs:
            given.append(logprob_gradient is not None)
            return super().compute_logprobs(*arguments, logprob_gradient=logprob_gradient, **named)

    algorithm, batch = ready(name, "llama", 5)
    policy = cut(policy_of("llama"), 10_000)
    policy.__class__ = Heard
    for module in (fused_logprobs, fused_divergence):
        monkeypatch.setattr(module, "HeadGradient", Counted)
    told, metrics = models.gradient(algorithm, policy, batch, first=True)
    assert len(given) == len(made) == 1
    assert given == [name not in DEPENDING]
    monkeypatch.setattr("lmgym.updates.first_order.constant_logprob_gradient", lambda *arguments: None)
    untold, same_metrics = models.gradient(algorithm, policy, batch, first=True)
    assert given[1:] == [False] and torch.equal(told, untold) and metrics == same_metrics


def test_a_loss_of_values_alone_promises_nothing() -> None:
    class OnlyValues(PPO):
        def loss(self, batch: Batch, new: PolicyOutputs) -> Any:
            terms, metrics = super().loss(batch, new)
            return {"value": terms["value"]}, metrics

    batch = models.batch_of(models.episodes(3))
    algorithm = OnlyValues()
    batch = models.prepared(batch, algorithm, policy_of("llama"), policy_of("llama", 1))
    gradient, _ = models.gradient(algorithm, policy_of("llama"), batch, first=True)
    assert float(gradient.norm()) > 0


@few
@given(seed=numbers)
def test_later_steps_have_the_old_policy_in_their_ratio(seed: int) -> None:
    """Two real optimizer steps on one batch: the second step's ratio is that of the moved policy to the first."""
    policy = Policy(models.gpt2(), models.tokenizer())
    algorithm = GRPO(group_size=4, epochs=2)
    batch = prepare(models.batch_of(models.episodes(seed)), policy, {}, algorithm)
    assume(bool(algorithm.active(batch).any()))  # 1 seed in 4096 has equal scores in every group
    optimizer = Optimizer(policy.parameters(), OptimizerSection(learning_rate=1e-2))
    before = policy.compute_logprobs_no_grad(batch).logprobs
    assert torch.equal(before, batch.logprobs_old)
    records = []
    for place, minibatch in enumerate(minibatches_of(batch, algorithm.epochs, algorithm.minibatches)):
        with torch.no_grad():
            active = minibatch.actions & algorithm.active(minibatch)[:, None]
            expected = float(
                (policy.compute_logprobs_no_grad(minibatch).logprobs - minibatch.logprobs_old).exp()[active].mean()
            )
        records.append((optimizer_step(algorithm, policy, minibatch, optimizer, first=place == 0), expected))
    assert records[0][0]["ratio/mean"] == 1.0
    # A ratio moves by as much of itself as its logarithm does.
    loose = rounding.tolerance(policy.model, before.flatten().tolist())
    assert records[1][0]["ratio/mean"] == pytest.approx(records[1][1], rel=loose)
    assert records[1][0]["ratio/mean"] != 1.0


# Who gets gradient


@pytest.mark.slow
@every_algorithm
@given(seed=numbers)
def test_only_actions_get_gradient_and_eos_is_one(name: str, seed: int) -> None:
    """The loss as a function of a log-probability in every column, prompts and padding included."""
    algorithm = ALGORITHMS[name]()
    batch = models.batch_of(models.episodes(seed, restarts=True))
    shape = batch.tokens.shape
    random = torch.Generator().manual_seed(seed)

    def column() -> Tensor:
        return -torch.rand(shape, generator=random, dtype=torch.float64)

    old = column()
    columns = {"logprobs_old": old, "logprobs_sampler": old, "logprobs_teacher": column(), "values": column()}
    if "kl" in name:
        columns["logprobs_ref"] = column()
    batch = algorithm.advantages(batch.replace(**columns, last_values=torch.zeros(len(batch), dtype=torch.float64)))
    leaf = (old + 0.05 * column()).requires_grad_()  # inside the clip
    models.loss_of(algorithm, batch, leaf).backward()
    assert bool((leaf.grad[~batch.actions] == 0).all())
    trained = batch.actions & algorithm.active(batch)[:, None]
    assume(bool(trained.any()))  # 1 seed in 4096 has equal scores in every group
    assert bool((leaf.grad[trained] != 0).all())
    ends = trained & (batch.tokens == models.EOS)
    assert int(ends.sum()) > 0


def by_hand(
    policy: Policy, conversations: list[Episode], advantages: list[float], count: Callable[..., bool]
) -> Tensor:
    """REINFORCE from the episodes themselves: no batch, no mask, one Hugging Face forward pass for each row. `count`
    says for (is an action?, id) which tokens belong to the loss."""
    loss = torch.zeros((), dtype=torch.float64)
    for episode, advantage in zip(conversations, advantages, strict=True):
        for row in episode.rows():
            ids = [token for turn in row for token in turn.prompt_ids + turn.action_ids]
            kinds = [kind for turn in row for kind in [False] * len(turn.prompt_ids) + [True] * len(turn.action_ids)]
            logprobs = policy.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            for place in range(1, len(ids)):
                if count(kinds[place], ids[place]):
                    loss = loss - advantage * logprobs[place - 1, ids[place]] / len(conversations)
    keeper = models.KeepGradient(policy)
    keeper.zero_grad()
    loss.backward()
    return keeper.flat().clone()


@pytest.mark.slow
@every_model
@few
@given(seed=numbers)
def test_the_whole_step_trains_the_actions_and_nothing_else(model: str, seed: int) -> None:
    policy = policy_of(model)
    conversations = models.episodes(seed, groups=2, restarts=True)
    batch = Reinforce(baseline="none").advantages(models.batch_of(conversations))
    scores = [episode.score for episode in conversations]
    found, _ = models.gradient(Reinforce(baseline="none"), policy, batch, first=True)
    assert models.relative(found, by_hand(policy, conversations, scores, lambda action, _: action)) < TOLERANCE
    # and these would be noticed:
    without_eos = by_hand(policy, conversations, scores, lambda action, token: action and token != models.EOS)
    with_prompts = by_hand(policy, conversations, scores, lambda action, _: True)
    assert models.relative(found, without_eos) > 1e-3
    assert models.relative(found, with_prompts) > 1e-3


# The distribution that is scored


def explicit(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the actions from a softmax over the whole vocabulary, row by row."""
    logprobs, entropy = [], []
    for row, column in batch.actions.nonzero().tolist():
        logits = policy.model(input_ids=batch.tokens[row : row + 1, :column]).logits[0, -1] / batch.temperature
        allowed = torch.ones(len(logits), dtype=torch.bool)
        if batch.stop_excluded is not None and batch.stop_excluded[row, column]:
            allowed[list(batch.stop_ids)] = False
        weight = torch.where(allowed, (logits - logits.max()).exp(), 0.0)
        probability = weight / weight.sum()
        logprobs.append(probability[batch.tokens[row, column]].log())
        kept = probability[allowed]
        entropy.append(-(kept * kept.log()).sum())
    return torch.stack(logprobs), torch.stack(entropy)


@every_model
@few
@given(seed=numbers, temperature=st.sampled_from([0.5, 1.0, 1.7]), minimum=st.integers(0, 3))
def test_temperature_and_excluded_stops(model: str, seed: int, temperature: float, minimum: int) -> None:
    """Values and gradients, of log-probabilities and of entropies."""
    policy = policy_of(model)
    conversations = models.episodes(seed, groups=1, size=2, minimum=minimum)
    batch = models.batch_of(conversations, temperature=temperature, stop_ids=(models.EOS, 7))
    assert (batch.stop_excluded is None) == (minimum == 0)
    allowed = ~torch.isin(batch.tokens, torch.tensor(batch.stop_ids)) | ~(
        batch.stop_excluded if batch.stop_excluded is not None else torch.zeros_like(batch.mask)
    )
    batch = batch.replace(actions=batch.actions & allowed)  # an id 7 drawn where it could not be
    scored = policy.compute_logprobs(batch, entropy=True)
    places = tuple(batch.actions.nonzero(as_tuple=True))
    found = []
    for logprobs, entropy in ((scored.logprobs[places], scored.entropy[places]), explicit(policy, batch)):
        for value in (logprobs, entropy):
            keeper = models.KeepGradient(policy)
            keeper.zero_grad()
            value.sum().backward(retain_graph=True)
            found.append((value.detach(), keeper.flat().clone()))
    for place in (0, 1):
        assert models.relative(found[place][0], found[place + 2][0]) < TOLERANCE
        assert models.relative(found[place][1], found[place + 2][1]) < TOLERANCE
    assert bool((scored.logprobs[~batch.actions] == 0).all())
    assert bool((scored.entropy[~batch.actions] == 0).all())


def test_an_action_without_a_token_before_it_is_refused() -> None:
    batch = models.batch_of(models.episodes(0))
    with pytest.raises(LmgymError, match="no token before it"):
        policy_of("gpt2").compute_logprobs(batch.replace(actions=batch.mask))


def test_prepare_fills_what_is_needed_and_no_more() -> None:
    policy, reference = policy_of("gpt2"), policy_of("gpt2", 1)
    batch = models.batch_of(models.episodes(0)).replace(logprobs_sampler=None)
    once = prepare(batch, policy, {}, GRPO(group_size=4))
    assert once.logprobs_old is None
    assert once.logprobs_ref is None
    full = prepare(batch, policy, {"reference": reference}, GRPO(group_size=4, epochs=2, kl_coefficient=0.1))
    assert full.logprobs_old is not None and full.logprobs_ref is not None
    with torch.no_grad():
        for column, who in ((full.logprobs_old, policy), (full.logprobs_ref, reference)):
            said = who.compute_logprobs(batch).logprobs
            loose = rounding.rounding(1, float(said.abs().max()))  # kept in fp32, computed in fp64
            assert torch.allclose(column.double(), said, rtol=0, atol=loose)
        assert not torch.allclose(full.logprobs_ref, full.logprobs_old, atol=1e-2)
