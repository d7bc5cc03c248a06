"""KTO, ORPO and reward models against TRL 1.16's own code, by hand, and whose prompts KTO measures its KL with."""

import importlib.metadata
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmgym.algorithms.kto import KTO, with_prompts_of_others
from lmgym.algorithms.orpo import ORPO
from lmgym.algorithms.reward_model import RewardModel
from lmgym.batch import Batch, PolicyOutputs, collate
from lmgym.core.errors import LmgymError
from lmgym.functional.preferences import kto_loss, odds_ratio_loss, ordered
from lmgym.types import Episode, Example, Turn


def trl_1_16() -> None:
    """Skip where TRL is absent or another version."""
    pytest.importorskip("trl")
    if importlib.metadata.version("trl") != "1.16.0":
        pytest.skip("written against TRL 1.16.0")


def test_worked_values() -> None:
    """Equal odds cost log 2; probabilities 1/2 and 1/3 have the odds 1 and 1/2, and so -log(1 / (1 + 1/2)). An answer
    as likely as under the reference costs KTO a half."""
    half, third = (torch.tensor([math.log(p)], dtype=torch.float64) for p in (1 / 2, 1 / 3))
    assert float(odds_ratio_loss(half, half)) == pytest.approx(math.log(2), rel=1e-12)
    assert float(odds_ratio_loss(half, third)) == pytest.approx(math.log(1.5), rel=1e-12)
    zero = torch.zeros(2, dtype=torch.float64)
    losses = kto_loss(zero, torch.tensor([True, False]), zero[0], beta=0.1, good_weight=3.0, bad_weight=5.0)
    assert losses.tolist() == [1.5, 2.5]
    tenths = kto_loss(zero, torch.tensor([True, False]), zero[0], beta=0.1, good_weight=0.1, bad_weight=0.7)
    assert tenths.tolist() == [0.1 / 2, 0.7 / 2]  # exact in fp64, which 0.1 and 0.7 in fp32 are not
    assert ordered(torch.tensor([0.3, 0.0, -0.1])).tolist() == [1.0, 0.5, 0.0]


def test_an_answer_of_probability_1_has_a_finite_loss_and_gradient() -> None:
    certain = torch.zeros(1, requires_grad=True)
    other = torch.tensor([-2.0], requires_grad=True)
    loss = odds_ratio_loss(other, certain).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(math.isfinite(float(x)) for x in (loss.detach(), certain.grad, other.grad))  # type: ignore[arg-type]


@given(st.floats(-8, -0.01), st.floats(-8, -0.01))
def test_an_exchanged_pair_has_the_exchanged_probability(one: float, other: float) -> None:
    """sigmoid(x) + sigmoid(-x) = 1, so the probabilities of a pair and of the exchanged one add up to 1."""
    first, second = (torch.tensor([x], dtype=torch.float64) for x in (one, other))
    total = math.exp(-float(odds_ratio_loss(first, second))) + math.exp(-float(odds_ratio_loss(second, first)))
    assert total == pytest.approx(1.0, rel=1e-12)


@pytest.mark.slow  # importing TRL takes seconds
@pytest.mark.parametrize("seed", range(4))
def test_orpo_is_trls(seed: int) -> None:
    """TRL computes in fp32: sums and differences of numbers up to 8, so 64 machine epsilons."""
    trl_1_16()
    from trl.experimental.orpo import ORPOTrainer

    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = (-8 * torch.rand(5, generator=generator) - 0.05 for _ in range(2))
    trainer = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    theirs = -ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]
    ours = ORPO(beta=0.3).pair_losses(chosen.double(), rejected.double(), torch.ones(5))
    assert torch.allclose(ours.float(), theirs, rtol=64 * 2**-23, atol=64 * 2**-23)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_loss_of_a_reward_model_is_trls(seed: int) -> None:
    """In fp64 on both sides; TRL's margins are ours times the difference of the ratings."""
    trl_1_16()
    from trl import RewardTrainer

    generator = torch.Generator().manual_seed(seed)
    scores = (3 * torch.randn(10, generator=generator, dtype=torch.float64)).requires_grad_()
    ratings = torch.rand(5, generator=generator, dtype=torch.float64) + 0.1
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=0.02),
        accelerator=SimpleNamespace(gather_for_metrics=lambda x: x, gather=lambda x: x),
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = {"attention_mask": torch.ones(10, 1), "margin": 0.7 * ratings}
    theirs = RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=scores[:, None]), inputs)
    ours = RewardModel(margin=0.7, centring=0.02).pair_losses(scores[:5], scores[5:], ratings).mean()
    assert float(ours) == pytest.approx(float(theirs), rel=1e-12)
    gradients = [torch.autograd.grad(loss, scores, retain_graph=True)[0] for loss in (ours, theirs)]
    assert torch.allclose(*gradients, rtol=1e-12, atol=1e-14)


class Judged:
    """Answers that are good or bad, each to a prompt of its own: fp64 log-probabilities now (a leaf) and of the
    reference, for the batch with its answers to the prompts of others."""

    def __init__(self, seed: int, answers: int, longest: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, longest + 1, (answers,), generator=generator).tolist()
        self.good = torch.rand(answers, generator=generator) < 0.5
        episodes = []
        for row, length in enumerate(lengths):
            turn = Turn([9, 10 + row], [5] * length)
            episodes.append(Episode(Example("x", "?"), row, row, [turn], score=float(self.good[row])))
        batch = with_prompts_of_others(collate(episodes))
        size = batch.tokens.shape
        self.new = (-2 + 0.5 * torch.randn(size, generator=generator, dtype=torch.float64)).requires_grad_()
        self.reference = self.new.detach() + 0.7 * torch.randn(size, generator=generator, dtype=torch.float64)
        self.batch: Batch = batch.replace(logprobs_ref=self.reference * batch.actions)

    def ours(self, algorithm: KTO) -> tuple[torch.Tensor, torch.Tensor]:
        losses, _ = algorithm.batch_loss(self.batch, PolicyOutputs(self.new * self.batch.actions))
        [gradient] = torch.autograd.grad(losses["preference"], self.new)
        return losses["preference"], gradient

    def theirs(self, beta: float, weights: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
        from trl import KTOTrainer

        count, actions = len(self.good), self.batch.actions
        statistics = ("entropy", "mean_logits")  # logged only

        def model_of(logprobs: torch.Tensor) -> Any:
            said = {name: torch.zeros(count, actions.shape[1] - 1) for name in statistics}
            network = torch.nn.Identity()
            network.forward = lambda **_: SimpleNamespace(log_probs=(logprobs * actions)[:count, 1:], **said)  # type: ignore[method-assign]
            network.kl_logps = (logprobs * actions).detach()[count:].sum(1)  # type: ignore[assignment]
            network.is_gradient_checkpointing = False  # type: ignore[assignment]
            return network

        def same(x: Any) -> Any:
            return x

        policy, reference = model_of(self.new), model_of(self.reference)
        trainer = SimpleNamespace(
            accelerator=SimpleNamespace(gather_for_metrics=same, gather=same, unwrap_model=same, device="cpu"),
            model=policy, ref_model=reference,
            args=SimpleNamespace(gradient_checkpointing_kwargs=None, gradient_checkpointing=False),
            aux_loss_enabled=False, precompute_ref_logps=False, calculate_KL=True, loss_type="kto", beta=beta,
            desirable_weight=weights[0], undesirable_weight=weights[1],
            _compute_kl_logps=lambda model, batch: model.kl_logps,
            _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1,
        )  # fmt: skip
        inputs = {
            "input_ids": self.batch.tokens[:count],
            "attention_mask": self.batch.mask[:count].long(),
            "completion_mask": actions[:count].long(),
            "label": self.good,
        }
        loss = KTOTrainer._compute_loss(trainer, policy, inputs, False)
        loss = loss[0] if isinstance(loss, tuple) else loss
        [gradient] = torch.autograd.grad(loss, self.new)
        return loss, gradient


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_kto_is_trls(seed: int) -> None:
    """In fp64 on both sides: the same sums in another order, some tens of terms of size 10."""
    trl_1_16()
    case = Judged(seed, answers=2 + seed, longest=2 + seed)
    loss, gradient = case.ours(KTO(beta=0.3, good_weight=2.0, bad_weight=0.5))
    expected, by_trl = case.theirs(0.3, (2.0, 0.5))
    assert float(loss) == pytest.approx(float(expected), rel=1e-12)
    assert torch.allclose(gradient, by_trl, rtol=1e-12, atol=1e-14)
    assert float(gradient.norm()) > 0


def row_of(batch: Batch, row: int) -> tuple[list[int], list[int]]:
    """A row's given tokens and its actions."""
    tokens, actions = batch.tokens[row], batch.actions[row]
    return tokens[batch.mask[row] & ~actions].tolist(), tokens[actions].tolist()


def test_answers_go_to_the_next_prompt_that_is_another_one() -> None:
    """Two answers to one prompt, one to the other; what is longer than the longest row is cut."""
    turns = [(0, [5, 6], [7]), (0, [5, 6], [8]), (1, [3, 3, 3], [9, 9])]
    episodes = [
        Episode(Example("x", "?"), group, index, [Turn(prompt, ids)], score=1.0)
        for index, (group, prompt, ids) in enumerate(turns)
    ]
    batch = with_prompts_of_others(collate(episodes))
    assert [row_of(batch, row) for row in range(3, 6)] == [([5, 6], [9, 9]), ([5, 6], [9, 9]), ([3, 3, 3], [7])]
    assert batch.episode.tolist() == [0, 1, 2, -1, -2, -3] and batch.group.tolist() == [0, 0, 1, 0, 0, 1]
    lengths = [(4, 1), (1, 3)]  # of prompt and answer; the longest row has 5 tokens
    long = collate([Episode(Example("x", "?"), n, n, [Turn([5] * p, [7] * a)]) for n, (p, a) in enumerate(lengths)])
    assert row_of(with_prompts_of_others(long), 2) == ([5] * 4, [7])
    assert row_of(with_prompts_of_others(long), 3) == ([5], [7])
    with pytest.raises(LmgymError, match="prompts_per_step must be at least 2"):
        with_prompts_of_others(collate(episodes[:2]))


def test_an_encoder_decoder_reads_the_other_prompt() -> None:
    episodes = [
        Episode(Example("x", "?"), n, n, [Turn([1], [7 + n] * (n + 1), source_ids=[20 + n])], score=1.0) for n in (0, 1)
    ]
    batch = with_prompts_of_others(collate(episodes))
    assert batch.source is not None and batch.source[:, 0].tolist() == [20, 21, 20, 21]
    assert [row_of(batch, row) for row in range(4)] == [([1], [7]), ([1], [8, 8]), ([1], [8, 8]), ([1], [7])]


def test_only_own_answers_train_and_the_kl_is_never_below_0() -> None:
    case = Judged(1, answers=3, longest=4)
    _, gradient = case.ours(KTO())
    assert bool((gradient[3:] == 0).all()) and bool((gradient[:3].abs().sum(1) > 0).all())
    far = case.batch.replace(logprobs_ref=torch.zeros_like(case.reference))  # a reference that is sure of everything
    _, metrics = KTO().batch_loss(far, PolicyOutputs(case.new * far.actions))
    assert metrics["preference/kl"] == 0.0
