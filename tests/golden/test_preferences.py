"""Losses of pairs against TRL 1.16's own code, by hand, and what the pairs are."""

import importlib.metadata
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmgym.algorithms.online_dpo import OnlineDPO
from lmgym.batch import PolicyOutputs, collate
from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.functional.preferences import best_and_worst, episode_totals, pair_loss
from lmgym.types import Episode, Example, Turn
from tests import runs


def test_worked_values() -> None:
    """h = 0 costs log 2 under DPO, 1 under the hinge, and (1 / 2 tau)^2 = 25 under IPO with tau 0.1."""
    zero = torch.zeros(1, dtype=torch.float64)
    assert float(pair_loss(zero, "sigmoid", 0.1)) == pytest.approx(math.log(2))
    assert float(pair_loss(zero, "hinge", 0.1)) == 1.0
    assert float(pair_loss(zero, "ipo", 0.1)) == pytest.approx(25.0)


@given(st.floats(-30, 30), st.floats(0.01, 5), st.floats(0, 0.49))
def test_a_smoothed_label_is_the_mean_over_right_and_wrong_labels(h: float, beta: float, wrong: float) -> None:
    own, exchanged = (pair_loss(torch.tensor([x], dtype=torch.float64), "sigmoid", beta) for x in (h, -h))
    smoothed = pair_loss(torch.tensor([h], dtype=torch.float64), "sigmoid", beta, smoothing=wrong)
    assert float(smoothed) == pytest.approx((1 - wrong) * float(own) + wrong * float(exchanged), rel=1e-12, abs=1e-12)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12))
def test_pairs_are_the_extremes_of_each_group(episodes: list[tuple[int, int]]) -> None:
    group, score = torch.tensor([g for g, _ in episodes]), torch.tensor([float(s) for _, s in episodes])
    chosen, rejected = best_and_worst(score, group)
    differing = [g for g in sorted({*group.tolist()}) if len({*score[group == g].tolist()}) > 1]
    assert group[chosen].tolist() == group[rejected].tolist() == differing
    for best, worst, own in zip(chosen, rejected, differing, strict=True):
        assert score[best] == score[group == own].max() and score[worst] == score[group == own].min()


def test_an_episode_of_several_rows_is_one_answer() -> None:
    values = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]])
    actions = torch.tensor([[1, 1], [0, 1], [1, 1]]).bool()
    episode = torch.tensor([5, 5, 9])
    assert episode_totals(values, actions, episode).tolist() == [11.0, 48.0]
    assert episode_totals(values, actions, episode, mean=True).tolist() == [pytest.approx(11 / 3), 24.0]


# Against TRL's own code: its method runs on a stand-in for the trainer, with prescribed log-probabilities


class Case:
    """Pairs of random answers: fp64 log-probabilities now (a leaf) and of the reference, [chosen, rejected] as TRL
    has them."""

    def __init__(self, seed: int, pairs: int, longest: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.pairs, rows = pairs, 2 * pairs
        self.lengths = torch.randint(1, longest + 1, (rows,), generator=generator)
        self.mask = torch.arange(longest) < self.lengths[:, None]
        size = (rows, longest)
        self.new = (-2 + 0.5 * torch.randn(size, generator=generator, dtype=torch.float64)).requires_grad_()
        self.reference = self.new.detach() + 0.7 * torch.randn(size, generator=generator, dtype=torch.float64)

    def ours(self, algorithm: OnlineDPO) -> tuple[torch.Tensor, torch.Tensor]:
        episodes = []
        for row, length in enumerate(self.lengths.tolist()):
            turn = Turn([9], [5] * length)
            better = row < self.pairs
            episodes.append(Episode(Example("x", "?"), row % self.pairs, row, [turn], score=float(better)))
        batch = collate(episodes)
        width = batch.tokens.shape[1] - 1

        def placed(values: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(values * self.mask, (1, 0))[:, : width + 1]

        batch = batch.replace(logprobs_ref=placed(self.reference))
        losses, _ = algorithm.batch_loss(batch, PolicyOutputs(placed(self.new)))
        loss = torch.stack(list(losses.values())).sum()
        [gradient] = torch.autograd.grad(loss, self.new)
        return loss, gradient

    def theirs(self, kind: str, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
        from trl.trainer.dpo_trainer import DPOTrainer

        rows, longest = self.mask.shape
        statistics = ("entropy", "mean_logits", "log_sum_sq_probs")  # logged only, as is_top1
        said = {name: torch.zeros(rows, longest) for name in statistics} | {"is_top1": self.mask}

        def model_of(logprobs: torch.Tensor) -> Any:
            masked = logprobs * self.mask
            return lambda **_: SimpleNamespace(log_probs=masked, **said)

        policy, reference, network = model_of(self.new), model_of(self.reference), torch.nn.Identity()
        network.is_gradient_checkpointing = False  # asked of the network around the pass of the reference

        def same(x: Any) -> Any:
            return x

        trainer = SimpleNamespace(
            accelerator=SimpleNamespace(gather_for_metrics=same, gather=same, unwrap_model=same, device="cpu"),
            model=network,
            ref_model=reference,
            args=SimpleNamespace(gradient_checkpointing_kwargs=None, gradient_checkpointing=False),
            aux_loss_enabled=False, precompute_ref_logps=False, ld_alpha=None, f_divergence_type="reverse_kl",
            beta=beta, loss_types=[kind], loss_weights=[1.0], use_weighting=False, label_smoothing=0.0,
            _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1,
        )  # fmt: skip
        whole = torch.nn.functional.pad(self.mask.long(), (1, 0))
        inputs = {
            "input_ids": torch.ones_like(whole),
            "attention_mask": torch.ones_like(whole),
            "completion_mask": whole,
        }
        loss = DPOTrainer._compute_loss(trainer, policy, inputs, False)
        [gradient] = torch.autograd.grad(loss, self.new)
        return loss, gradient


@pytest.mark.slow  # importing TRL takes seconds
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("sigmoid", {}),
        ("hinge", {"objective": "hinge"}),
        ("ipo", {"objective": "ipo", "length_norm": True}),
        ("sigmoid_norm", {"length_norm": True}),
    ],
)
def test_losses_and_gradients_are_trls(kind: str, settings: dict[str, Any], seed: int) -> None:
    """In fp64 on both sides: the same sums in another order, some tens of terms of size 10."""
    pytest.importorskip("trl")
    if importlib.metadata.version("trl") != "1.16.0":
        pytest.skip("written against TRL 1.16.0")
    case = Case(seed, pairs=1 + seed, longest=2 + seed)
    loss, gradient = case.ours(OnlineDPO(beta=0.3, **settings))
    expected, by_trl = case.theirs(kind, beta=0.3)
    assert float(loss) == pytest.approx(float(expected), rel=1e-12)
    assert torch.allclose(gradient, by_trl, rtol=1e-12, atol=1e-14)
    assert float(gradient.norm()) > 0 or kind == "hinge"


# The algorithm


def group(*scores: float, number: int = 0) -> list[Episode]:
    return [Episode(Example("x", "?"), number, place, [Turn([1], [2])], score=s) for place, s in enumerate(scores)]


def test_groups_of_equal_scores_make_no_pair() -> None:
    algorithm = OnlineDPO(group_size=3)
    equal, mixed = group(1.0, 1.0, 1.0), group(0.5, 0.0, 1.0, number=1)
    assert algorithm.select([equal, mixed], 2) == ([[mixed[2], mixed[1]]], False)
    assert algorithm.select([equal], 1) == ([equal], True)  # a step that moves nothing, if no draw has a pair
    batch = collate(equal).replace(logprobs_ref=torch.zeros(3, 2))
    losses, metrics = algorithm.batch_loss(batch, PolicyOutputs(torch.zeros(3, 2, requires_grad=True)))
    assert float(losses["preference"].detach()) == 0.0 and metrics["preference/accuracy"] == 0.0


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"group_size": 1}, "a pair needs at least 2 answers"),
        ({"objective": "ipo", "margin": 1.0}, "belong to objective: sigmoid"),
        ({"label_smoothing": 0.5}, "algorithm.label_smoothing"),
    ],
)
def test_fields_that_do_not_go_together(section: dict[str, Any], said: str) -> None:
    with pytest.raises(LmgymError, match=said):
        build_config(runs.tiny(algorithm={"name": "online_dpo", **section}))


def test_simpo_needs_no_reference() -> None:
    algorithm = build_config(runs.tiny(algorithm={"name": "online_dpo", "preset": "simpo"})).stages[0].algorithm
    assert not algorithm.requirements.reference and algorithm.margin == 0.5 and algorithm.beta == 2.0
