"""Changes of one expression in updates/, inference/, rollouts/ and the loaders that quick tests did not notice: one
test for each. docs/reliability.md has their list."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.requirements import ServedTeacher
from lmgym.algorithms.trpo import TRPO
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.errors import LmgymError
from lmgym.core.seeds import key
from lmgym.distributed.ranks import Ranks
from lmgym.envs.base import Step
from lmgym.functional.reductions import masked_mean
from lmgym.inference.base import Request, Sampling
from lmgym.inference.proof import Proof
from lmgym.inference.sampler import Sampler
from lmgym.inference.served_teacher import EndpointTeacher
from lmgym.inference.vllm.engine import VLLM
from lmgym.models import lora
from lmgym.models.bound import Gap
from lmgym.models.integrity import check_finite, check_vocabulary
from lmgym.models.policy import Policy
from lmgym.rewards.base import Reward
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.evaluate import EvaluationSection, better_directions
from lmgym.rollouts.given_answers import labelled_steps
from lmgym.rollouts.hints import hinted_prompt
from lmgym.rollouts.rollout import apply_rewards, collect
from lmgym.types import Episode, Example, LabelledStep, Restriction, Turn
from lmgym.updates.first_order import first_order, optimizer_step
from lmgym.updates.optimizer import Optimizer, OptimizerSection
from lmgym.updates.prepare import batch_metrics, prepare
from lmgym.updates.trust_region import critic_steps
from tests import models
from tests.golden.test_small_mistakes import Model

RATE = OptimizerSection(learning_rate=0.01, warmup=0, weight_decay=0.0, max_gradient_norm=0.0)


def fresh(seed: int = 0) -> Policy:
    return Policy(models.llama(seed), models.tokenizer())


def prepared(policy: Policy, algorithm: Any) -> Batch:
    batch = models.batch_of(models.episodes(0, groups=4, turns=1))
    return models.prepared(batch.replace(key=7), algorithm, policy)


def weights(policy: Policy) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])


# Updates


@dataclass(kw_only=True)
class OfAllRows(Algorithm):
    """The policy gradient as a loss of the whole batch."""

    epochs: int = 2

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages=(batch.score - batch.score.mean())[:, None] * batch.actions)

    def batch_loss(self, batch: Batch, new: PolicyOutputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        ratio = (new.logprobs - batch.require("logprobs_old")).exp()
        return {"policy": masked_mean(-batch.require("advantages") * ratio, batch.actions)}, {}


@pytest.mark.parametrize("algorithm", [GRPO(group_size=4, epochs=2), OfAllRows(group_size=4)], ids=["tokens", "batch"])
def test_only_the_first_of_a_batchs_steps_has_a_ratio_of_1(algorithm: Algorithm) -> None:
    batch = prepared(fresh(), algorithm)
    ends = []
    for steps in ((True, False), (True, True), ()):
        policy = fresh()
        optimizer = Optimizer(policy.parameters(), RATE)
        for first in steps:
            optimizer_step(algorithm, policy, batch, optimizer, first)
        if not steps:
            first_order(algorithm, policy, batch, optimizer)
        ends.append(weights(policy))
    assert torch.allclose(ends[2], ends[0], atol=1e-7) and not torch.allclose(ends[2], ends[1], atol=1e-5)


def test_after_an_early_stop_no_step_follows() -> None:
    class StopsAtTheSecond(GRPO):
        asked = 0

        def should_stop_early(self, metrics: Any) -> bool:
            self.asked += 1
            return self.asked == 2

    algorithm = StopsAtTheSecond(group_size=4, epochs=4)
    policy = fresh()
    assert (
        first_order(algorithm, policy, prepared(policy, algorithm), Optimizer(policy.parameters(), RATE))["updates"]
        == 1
    )
    assert algorithm.asked == 2


def test_a_row_that_only_one_of_several_numbers_moves_is_computed() -> None:
    """Log-probabilities move the first row, entropies the second."""

    class Apart(OfAllRows):
        @property
        def requirements(self) -> Any:
            return replace(super().requirements, entropy=True)

        def batch_loss(self, batch: Batch, new: PolicyOutputs) -> tuple[dict[str, Tensor], dict[str, float]]:
            return {"policy": new.logprobs[0].sum() + new.require("entropy")[1].sum()}, {}

    policy = fresh()
    batch = prepared(policy, Apart())
    metrics = optimizer_step(Apart(), policy, batch, models.KeepGradient(policy), True)  # type: ignore[arg-type]
    assert metrics["rows/computed"] == pytest.approx(2 / len(batch))


def test_weight_decay_is_for_matrices_alone() -> None:
    policy = fresh()
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    Optimizer(policy.parameters(), replace(RATE, weight_decay=0.5)).step()
    for name, parameter in policy.model.named_parameters():
        factor = 1 - 0.01 * 0.5 if parameter.dim() >= 2 else 1.0
        assert torch.allclose(parameter, factor * before[name]) and bool(before[name].any()), name


def test_old_log_probabilities_are_there_if_an_algorithm_asks_for_them_for_one_step() -> None:
    class Asks(GRPO):
        @property
        def requirements(self) -> Any:
            return replace(super().requirements, old_logprobs=True)

    policy = fresh()
    batch = models.batch_of(models.episodes(0, turns=1))
    assert prepare(batch, policy, {}, Asks(group_size=4)).logprobs_old is not None
    assert prepare(batch, policy, {}, GRPO(group_size=4)).logprobs_old is None


def test_the_divergence_from_the_reference_is_positive_where_the_policy_likes_its_answers_more() -> None:
    batch = models.batch_of(models.episodes(0, turns=1))
    said = torch.full(batch.tokens.shape, -1.0)
    found = batch_metrics(batch.replace(logprobs_sampler=said, logprobs_ref=said - 2))
    assert found["kl/reference"] == pytest.approx(2.0)


def test_the_critics_loss_is_a_mean_over_the_tokens_of_its_own_minibatch() -> None:
    """Of 4 groups, one in each minibatch, and a critic that does not move."""
    policy = models.with_value_head(fresh())
    algorithm = TRPO(critic_minibatches=4)
    batch = prepared(policy, algorithm)
    optimizer = Optimizer([], replace(RATE, learning_rate=0.0), policy.critic_parameters())
    means = []
    for group in batch.group.unique():
        own = batch[batch.group == group]
        one = replace(algorithm, critic_minibatches=1)
        means.append(critic_steps(one, policy, own, optimizer)["loss/value"])
    assert critic_steps(algorithm, policy, batch, optimizer)["loss/value"] == pytest.approx(sum(means) / 4, rel=1e-5)


# Inference


def test_a_restriction_always_allows_special_ids() -> None:
    policy = fresh()
    engine = Sampler(policy, 4).restricted(Restriction("top_k", 1))
    [said] = engine.generate([Request((5, 6), key=1)], Sampling(max_new_tokens=6))
    assert said.kept is not None
    assert said.kept.dtype == "int32"
    for ids in said.kept.tolist():
        assert set(ids) >= set(policy.special_ids) and len({*ids}) <= len(policy.special_ids) + 1


def test_a_proof_holds_only_if_both_gaps_are_small() -> None:
    small, large, bound = Gap(1e-6, 2e-6), Gap(1.0, 2.0), Gap(1e-5, 1e-4)
    proofs = [Proof("llama", "float32", 8, *gaps, bound) for gaps in ((small, small), (small, large), (large, small))]
    assert [proof.holds for proof in proofs] == [True, False, False]


def test_a_served_teacher_is_sent_no_row_that_is_too_long() -> None:
    teacher = EndpointTeacher(ServedTeacher("http://127.0.0.1:1/v1", 4), 259)
    teacher.context = 8
    teacher._check_lengths([(5,) * 8])
    with pytest.raises(LmgymError, match=r"prompt and answer have 9 tokens, and .* reads 8"):
        teacher._check_lengths([(5,) * 8, (5,) * 9])


def test_every_rank_raises_what_vllm_said_to_another() -> None:
    class Other(Ranks):
        def gather(self, own: bytes) -> list[bytes]:
            return [own, b"the second rank cannot reach it"]

    with pytest.raises(LmgymError, match="the second rank cannot reach it"):
        VLLM(fresh(), Model(), ranks=Other())


# Rollouts


class Again:
    """Begins anew with the same prompt, twice."""

    def reset(self, example: Example, seed: int) -> str:
        self.turns = 0
        return "?"

    def step(self, text: str, stop: str) -> Step:
        self.turns += 1
        return Step([{"role": "user", "content": "?"}], terminated=self.turns == 3, restart=True)


def played(env: Callable[[], Any], policy: Policy, new: int = 4) -> list[Episode]:
    sampling = Sampling(max_new_tokens=new, min_new_tokens=new)
    return collect([(0, Example("x", "?"))], Actor(Sampler(policy, 8), policy.tokenizer), sampling, (0,), env)


def test_turns_that_begin_anew_are_rows_of_their_own_with_random_numbers_of_their_own() -> None:
    [episode] = played(Again, fresh())
    assert [turn.restart for turn in episode.turns] == [False, True, True]
    assert episode.turns[0].prompt_ids == episode.turns[1].prompt_ids == episode.turns[2].prompt_ids
    assert len({tuple(turn.action_ids) for turn in episode.turns}) == 3


@pytest.mark.parametrize(("more", "turns"), [(0, 3), (-1, 2)])
def test_a_conversation_may_fill_the_context_but_for_one_token(more: int, turns: int) -> None:
    """In a context of one token more than the prompt the next turn has room for one token; in one of exactly the
    prompt's length it has none, and the turn before says that the context has ended the episode."""

    class Chats:
        def reset(self, example: Example, seed: int) -> str:
            self.turns = 0
            return "abc"

        def step(self, text: str, stop: str) -> Step:
            self.turns += 1
            return Step(continuation="d", terminated=self.turns == 3)

    free = played(Chats, Policy(models.llama(0), models.tokenizer()), 2)[0]
    before_last = sum(len(turn.prompt_ids) + len(turn.action_ids) for turn in free.turns[:2])
    prompt = before_last + len(free.turns[2].prompt_ids)
    policy = Policy(models.llama(0, max_position_embeddings=prompt + 1 + more), models.tokenizer())
    [episode] = played(Chats, policy, 2)
    assert len(episode.turns) == turns and not episode.error
    assert episode.turns[-1].stop == ("context" if turns == 2 else episode.turns[-1].stop)
    if turns == 3:
        assert len(episode.turns[2].action_ids) == 1 and episode.turns[2].stop == "context"


def test_a_reward_of_each_turn_has_its_weight() -> None:
    def lengths(texts: list[str], examples: list[Example]) -> list[float]:
        return [float(len(text)) for text in texts]

    turns = [Turn([5], [6], text="a"), Turn([7], [8], text="bb")]
    episode = Episode(Example("x", "?"), 0, 0, turns)
    apply_rewards([episode], [Reward("own", 0.25, lengths, each_turn=True)])
    assert [turn.reward for turn in turns] == [0.25, 0.5] and episode.score == 0.75
    assert episode.reward_components == {"own": 3.0}


def test_an_evaluation_may_have_lengths_of_its_own() -> None:
    sampling = Sampling(max_new_tokens=3, min_new_tokens=1)
    own = EvaluationSection(max_new_tokens=7, min_new_tokens=2).decoding(sampling)
    assert (own.max_new_tokens, own.min_new_tokens) == (7, 2)
    stages = EvaluationSection().decoding(sampling)
    assert (stages.max_new_tokens, stages.min_new_tokens) == (3, 1)


def test_a_part_of_negative_weight_should_fall() -> None:
    rewards = [Reward("good", 1.0, len), Reward("bad", -0.5, len), Reward("metric", 0.0, len)]
    names = ["reward", "good", "bad/pass@2", "metric", "truncated"]
    assert better_directions(names, rewards) == {"reward": 1, "good": 1, "bad/pass@2": -1, "truncated": -1}


def test_behind_the_last_labelled_step_nothing_follows() -> None:
    policy = fresh()
    steps = (LabelledStep("one", True), LabelledStep("two", False))
    [episode] = labelled_steps([(0, Example("x", "?", steps=steps))], Actor(Sampler(policy), policy.tokenizer), "\n")
    assert [turn.continuation for turn in episode.turns] == ["\n", None]


def test_a_hint_goes_into_the_last_message_of_the_user() -> None:
    said = [{"role": "user", "content": "2+2="}, {"role": "tool", "content": "busy"}]
    hinted = hinted_prompt("{prompt} It is {reference}.", Example("x", said, references=("4",)))
    assert hinted == [{"role": "user", "content": "2+2= It is 4."}, said[1]]


# Loading


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_that_is_no_number_is_named(value: float) -> None:
    model = models.llama(0)
    with torch.no_grad():
        model.lm_head.weight[3, 1] = value
    with pytest.raises(LmgymError, match=rf"the tensor 'model\.embed_tokens\.weight' of here holds {value}"):
        check_finite(model, "here")


@pytest.mark.parametrize(("end", "refused"), [(258, False), (259, True)])
def test_an_end_of_sequence_just_behind_the_vocabulary_is_refused(end: int, refused: bool) -> None:
    tokenizer = copy.deepcopy(models.tokenizer())
    if refused:
        tokenizer.add_tokens(["<end>"])
        tokenizer.eos_token = "<end>"
        assert tokenizer.eos_token_id == end
        with pytest.raises(LmgymError, match="id 259, and the model here has 0 to 258 only"):
            check_vocabulary("here", models.llama(0), tokenizer)
    else:
        check_vocabulary("here", models.llama(0), tokenizer)


def test_adapters_of_which_one_is_missing_are_refused(tmp_path: Path) -> None:
    model = models.llama(0)
    lora.add_lora(model, 2, 4.0, "all-linear", seed=key(0, "lora"))
    lora.save(model, tmp_path)
    lora.load_lora(models.llama(0), tmp_path)
    tensors = load_file(tmp_path / lora.WEIGHTS)
    del tensors[next(name for name in tensors if "lora_B" in name)]
    save_file(tensors, tmp_path / lora.WEIGHTS)
    with pytest.raises(LmgymError, match=r"lora_B.* is in one of them only"):
        lora.load_lora(models.llama(0), tmp_path)
