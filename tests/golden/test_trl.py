"""GRPO and RLOO against TRL 1.16 itself: the same rewards, log-probabilities and masks through its own code and ours.

TRL's methods run on a stand-in for the trainer that has just the attributes which they read: scores go through
`_generate_and_score_completions` (advantages) and then `_compute_loss`, with prescribed log-probabilities in place of a
model's. So no formula of TRL's is written down here.
"""

import importlib.metadata
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.reinforce import RLOO
from lmgym.batch import Batch, PolicyOutputs, collate
from lmgym.config.build import build
from lmgym.rewards.base import Reward
from lmgym.rollouts.rollout import apply_rewards, groups_of
from lmgym.training.unjudged import usable_groups
from lmgym.types import Episode, Example, Turn
from tests import rounding
from tests.family import grpo
from tests.models import loss_of

pytest.importorskip("trl")
if importlib.metadata.version("trl") != "1.16.0":
    pytest.skip("written against TRL 1.16.0", allow_module_level=True)
pytestmark = pytest.mark.slow  # importing TRL takes seconds

SIZE = 4  # answers per prompt
SHAPES = [(seed, prompts, longest) for seed, (prompts, longest) in enumerate([(1, 1), (1, 6), (2, 5), (3, 9), (5, 3)])]


class Case:
    """Random answers of several lengths: fp64 log-probabilities now (a leaf), before, and of a reference; scores."""

    def __init__(self, seed: int, prompts: int, longest: int, drift: float = 0.4) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = prompts * SIZE
        self.lengths = torch.randint(1, longest + 1, (rows,), generator=generator).tolist()
        self.prompt_lengths = [1 + place // SIZE for place in range(rows)]
        self.width = max(self.lengths)

        def noise() -> Tensor:
            return torch.randn(rows, self.width, generator=generator, dtype=torch.float64)

        self.new = (-2 + 0.5 * noise()).requires_grad_()
        self.old = self.new.detach() + drift * noise()
        self.reference = self.new.detach() + 0.7 * noise()
        self.score = torch.randn(rows, generator=generator).double()
        self.score[:SIZE] = torch.tensor([1.0, 0.0, 0.0, 1.0])

    def batch(self, algorithm: Algorithm) -> Batch:
        """The case as lmgym sees it: collated episodes, columns shifted behind the prompts."""
        episodes = []
        for row, (prompt, length) in enumerate(zip(self.prompt_lengths, self.lengths, strict=True)):
            turn = Turn([9] * prompt, [5] * length)
            episodes.append(Episode(Example("x", "?"), row // SIZE, row, [turn], score=float(self.score[row])))
        batch = collate(episodes)
        old, reference = self.place(batch, self.old), self.place(batch, self.reference)
        return algorithm.advantages(batch.replace(logprobs_old=old, logprobs_ref=reference, score=self.score))

    def place(self, batch: Batch, completion: Tensor) -> Tensor:
        """[N, completion] numbers to the action columns of [N, T]."""
        real = torch.arange(self.width) < torch.tensor(self.lengths)[:, None]
        empty = torch.zeros(batch.tokens.shape, dtype=completion.dtype)
        return empty.index_put(tuple(batch.actions.nonzero(as_tuple=True)), completion[real])

    def ours(self, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
        """lmgym's loss and its gradient at the log-probabilities."""
        batch = self.batch(algorithm)
        loss = loss_of(algorithm, batch, self.place(batch, self.new))
        return loss.detach(), torch.autograd.grad(loss, self.new)[0]

    def trl(self, trainer: Any, stand_in: SimpleNamespace, **columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """TRL's loss, its gradient at the log-probabilities, and its advantages."""
        inputs = trainer._generate_and_score_completions(stand_in, [{"prompt": "?"} for _ in self.lengths])
        inputs |= columns
        loss = trainer._compute_loss(stand_in, None, inputs)
        return loss.detach(), torch.autograd.grad(loss, self.new)[0], inputs["advantages"]


def stand_in_for(case: Case, **fields: Any) -> SimpleNamespace:
    """The trainer's attributes: one process, one optimizer step per generation, the case as what its model says."""
    ids = [[5] * length for length in case.lengths]
    prompts = [[9] * length for length in case.prompt_lengths]
    answers: dict[Any, Tensor] = {None: case.new, "model": case.old, "reference": case.reference}

    class Model(str):
        training = True
        is_gradient_checkpointing = False

    return SimpleNamespace(
        model=Model("model"),
        ref_model="reference",
        accelerator=SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=1,
            process_index=0,
            sync_gradients=True,
            gather=lambda tensor: tensor,
            gather_for_metrics=lambda tensor: tensor,
            reduce=lambda tensor, reduction: tensor,
        ),
        args=SimpleNamespace(
            per_device_train_batch_size=len(ids),
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
            use_bias_correction_kl=True,
            delta=None,
        ),
        _get_per_token_logps_and_entropies=lambda model, *rest, **more: (
            answers[model],
            torch.zeros_like(case.old),
            None,
        ),
        _calculate_rewards=lambda *inputs: case.score[:, None].clone(),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _metrics={"train": defaultdict(list)},
        _logs={
            "prompt": [],
            "completion": [],
            "rewards": defaultdict(list),
            "advantages": [],
            "extra": defaultdict(list),
        },
        _pending_extra_logs={},
        _pending_metrics={},
        **{"_generate": lambda _: (prompts, ids, None, ids, None, {}, None, None), **fields},
        num_generations=SIZE,
        num_iterations=1,
        current_gradient_accumulation_steps=1,
        environment_factories=None,
        environments=None,
        tools=None,
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        multi_objective_aggregation="sum_then_normalize",
        reward_weights=torch.ones(1, dtype=torch.float64),
        reward_func_names=["score"],
        reward_clip_range=None,
        log_multimodal=False,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
    )


# In fp64 throughout, but for one factor: TRL's unbiased variance has count / (count - 1) in fp32.
ROUNDING = rounding.rounding(1)


def same(ours: Tensor, theirs: Tensor, tolerance: float = ROUNDING) -> bool:
    return float((ours - theirs).norm()) <= tolerance * float(theirs.norm())


@pytest.mark.parametrize("scale", ["none", "group"])
@pytest.mark.parametrize("beta", [0.0, 0.04, 0.5])
@pytest.mark.parametrize(
    ("loss_type", "reduction"), [("grpo", "sequence"), ("dapo", "token"), ("bnpo", "token"), ("dr_grpo", "constant")]
)
@pytest.mark.parametrize(("seed", "prompts", "longest"), SHAPES)
def test_grpo(seed: int, prompts: int, longest: int, loss_type: str, reduction: Any, beta: float, scale: str) -> None:
    """Old and new log-probabilities differ by .4 on average, so both clips bind; the reference by more."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    case = Case(seed, prompts, longest)
    algorithm = grpo(group_size=SIZE, scale_rewards=scale, reduction=reduction, kl_coefficient=beta)
    limit = 16  # dr_grpo divides by the length limit, our "constant" by the episodes only
    fields = {"epsilon_low": 0.2, "epsilon_high": 0.28, "max_completion_length": limit}
    stand_in = stand_in_for(case, loss_type=loss_type, beta=beta, scale_rewards=scale, **fields)
    loss, gradient, advantages = case.trl(GRPOTrainer, stand_in, old_per_token_logps=case.old)
    if loss_type == "dr_grpo":
        loss, gradient = loss * limit, gradient * limit
    our_loss, our_gradient = case.ours(algorithm)
    batch = case.batch(algorithm)
    assert same(
        torch.stack([row[mask][0] for row, mask in zip(batch.advantages, batch.actions, strict=True)]), advantages
    )
    assert same(our_loss, loss)
    assert float(gradient.abs().max()) > 0
    assert same(our_gradient, gradient)
    clipped = stand_in._metrics["train"]["clip_ratio/region_mean"][0]
    _, metrics = algorithm.loss(batch, PolicyOutputs(case.place(batch, case.new.detach())))
    loose = rounding.rounding(2)  # two shares of a count, in fp32
    assert float(metrics["ratio/clipped"][batch.actions].mean()) == pytest.approx(clipped, rel=0, abs=loose)


def test_the_cases_do_clip() -> None:
    """Otherwise the test above would say nothing about the clip."""
    algorithm = GRPO(group_size=SIZE)
    batch = Case(3, 3, 9).batch(algorithm)
    _, metrics = algorithm.loss(batch, PolicyOutputs(Case(3, 3, 9).place(batch, Case(3, 3, 9).new.detach())))
    assert 0.1 < float(metrics["ratio/clipped"][batch.actions].mean()) < 0.9


def test_without_its_bias_correction_trl_differs() -> None:
    """Our KL term is k3 times the ratio (`use_bias_correction_kl`), not TRL's default."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    case = Case(2, 2, 5)
    fields = {"loss_type": "dapo", "beta": 0.5, "scale_rewards": "none", "epsilon_low": 0.2, "epsilon_high": 0.28}
    stand_in = stand_in_for(case, max_completion_length=16, **fields)
    stand_in.args.use_bias_correction_kl = False
    _, gradient, _ = case.trl(GRPOTrainer, stand_in, old_per_token_logps=case.old)
    assert not same(case.ours(GRPO(group_size=SIZE, kl_coefficient=0.5))[1], gradient, 1e-2)


def rloo_of_trl(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient and advantages of TRL's RLOO without a reference."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    ids = [[5] * length for length in case.lengths]
    generated = ([[9] * length for length in case.prompt_lengths], ids, ids)
    fields = {"beta": 0.0, "normalize_advantages": False, "epsilon_low": 0.2, "epsilon_high": 0.2}
    return case.trl(RLOOTrainer, stand_in_for(case, _generate=lambda _: generated, **fields))


@pytest.mark.parametrize(("seed", "prompts", "longest"), SHAPES)
def test_rloo_on_policy(seed: int, prompts: int, longest: int) -> None:
    """TRL's RLOO is PPO's clip on the ratio of whole sequences. At old = new that ratio is 1, and its gradient is A
    times the gradient of the sum of log-probabilities, as ours is. (Its value differs: minus the mean advantage.)"""
    case = Case(seed, prompts, longest, drift=0.0)
    _, gradient, advantages = rloo_of_trl(case)
    batch = case.batch(RLOO(group_size=SIZE))
    assert same(
        torch.stack([row[mask][0] for row, mask in zip(batch.advantages, batch.actions, strict=True)]), advantages
    )
    assert float(gradient.abs().max()) > 0
    assert same(case.ours(RLOO(group_size=SIZE))[1], gradient)


def test_rloo_off_policy_is_another_estimator() -> None:
    """Where old and new differ, TRL weighs by the ratio of sequences and clips it. lmgym's rloo has no ratio: it takes
    one optimizer step per batch (and refuses more), so it never is off-policy by its own doing."""
    case = Case(2, 2, 5, drift=0.4)
    assert not same(case.ours(RLOO(group_size=SIZE))[1], rloo_of_trl(case)[1], 1e-2)


# Answers that no reward has judged


def some_unjudged(seed: int, prompts: int) -> Tensor:
    """Two rewards of each answer; NaN where one of them gave None, here and there both."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(prompts * SIZE, 2, generator=generator, dtype=torch.float64)
    table[torch.rand(prompts * SIZE, 2, generator=generator) < 0.4] = torch.nan
    table[1] = torch.nan
    return table


def ours_of(table: Tensor, algorithm: Algorithm) -> Tensor:
    """The advantages of the answers whose rewards the functions gave; 0 for those that are left out of the batch."""
    rewards = [
        Reward(name, weight, lambda texts, _, own=own: [None if one != one else one for one in own.tolist()])
        for name, weight, own in zip(("first", "second"), WEIGHTS, table.unbind(1), strict=True)
    ]
    episodes = [Episode(Example("x", "?"), row // SIZE, row, [Turn([9], [5])]) for row in range(len(table))]
    apply_rewards(episodes, rewards)
    judged = [one for group in usable_groups(groups_of(episodes), algorithm.requirements) for one in group]
    weights = {reward.name: reward.weight for reward in rewards}
    batch = collate(judged, weights=weights if algorithm.requirements.reward_components else None)
    exact = {"score": torch.tensor([one.score for one in judged], dtype=torch.float64)}
    if batch.reward_components is not None:
        exact["reward_components"] = torch.cat([table[batch.episode], batch.reward_components[:, 2:].double()], 1)
    found = algorithm.advantages(batch.replace(**exact)).require("advantages")[:, -1]
    return torch.zeros(len(table), dtype=torch.float64).index_put((batch.episode,), found.double())


WEIGHTS = (1.0, 0.5)


@pytest.mark.parametrize("scale", ["none", "group", "batch", "each reward"])
@pytest.mark.parametrize(("seed", "prompts"), [(0, 2), (1, 3), (2, 6)])
def test_unjudged_answers_have_no_advantage_and_no_part_in_a_baseline(seed: int, prompts: int, scale: str) -> None:
    """Sums are of the rewards that judged (nansum). Groups of a single judged answer are among these."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    case, table = Case(seed, prompts, 1), some_unjudged(seed, prompts)
    fields = {"loss_type": "dapo", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.28, "max_completion_length": 16}
    stand_in = stand_in_for(case, scale_rewards="none" if scale == "each reward" else scale, **fields)
    stand_in._calculate_rewards = lambda *inputs: table.clone()
    stand_in.reward_weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    stand_in.reward_funcs = stand_in.reward_func_names = ["first", "second"]
    if scale == "each reward":
        stand_in.multi_objective_aggregation = "normalize_then_sum"
    _, _, advantages = case.trl(GRPOTrainer, stand_in)
    credit = {"credit": "each_reward"} if scale == "each reward" else {"credit": {"name": "group", "scale": scale}}
    found = ours_of(table, build(GRPO, {"group_size": SIZE, **credit}, "algorithm."))
    assert float(advantages.abs().max()) > 0 and float(advantages[1]) == 0
    assert same(found, advantages)


def test_the_example_of_the_docs() -> None:
    table = torch.tensor([[1.0, torch.nan], [torch.nan, torch.nan], [1.0, torch.nan], [1.0, torch.nan]]).double()
    assert ours_of(table, GRPO(group_size=SIZE)).tolist() == [0.0, 0.0, 0.0, 0.0]
