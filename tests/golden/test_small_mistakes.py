"""Small mistakes that would spoil a result and that larger tests did not notice: one test for each."""

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmgym.algorithms.gkd import GKD
from lmgym.algorithms.online_dpo import OnlineDPO
from lmgym.batch import Batch, PolicyOutputs, collate
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.envs.base import Step
from lmgym.functional.divergences import Divergence
from lmgym.functional.preferences import pair_loss
from lmgym.functional.truncation import unpack
from lmgym.inference.base import Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.inference.vllm.engine import VLLM, Query, Sampled, weights_of
from lmgym.models import lora
from lmgym.models.policy import Policy
from lmgym.models.rounding import RoundedWeights
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.rollout import collect, demonstrate
from lmgym.tasks.stream import mixture_slot
from lmgym.training.unjudged import usable_groups
from lmgym.types import Episode, Example, Turn
from lmgym.updates.trust_region import subsampled
from tests import models, rounding, runs
from tests.golden.record_grpo_family import Inputs
from tests.golden.test_grpo_family import ours, place, preset


def in_fp64(seed: int) -> Policy:
    return Policy(models.in_double(models.llama(seed)), models.tokenizer(), compute=torch.float64)


# Pairs


def test_simpos_margin_is_not_multiplied_by_beta() -> None:
    """arXiv 2405.14734, eq. 6: -log sigmoid(beta h - gamma), here of 2 * 1 - 0.5."""
    found = pair_loss(torch.ones(1, dtype=torch.float64), "sigmoid", beta=2.0, margin=0.5)
    assert float(found) == pytest.approx(math.log1p(math.exp(-1.5)), rel=1e-12)


def test_a_failed_answer_is_no_half_of_a_pair() -> None:
    """Its score of 0 is that of an environment that failed, not of an answer."""
    group = [Episode(Example("x", "?"), 0, n, [Turn([1], [2])], score=s) for n, s in enumerate([0.5, 0.0, 1.0, 2.0])]
    group[1].error, group[3].error = "it failed", "it failed"
    dpo = OnlineDPO(group_size=4)
    assert dpo.select(usable_groups([group], dpo.requirements), 1) == ([[group[2], group[0]]], False)
    group[0].error = "it failed"
    assert dpo.select(usable_groups([group], dpo.requirements), 1) == ([[group[2]]], True)


# A teacher reads what the policy was sampled with


def sampled(policy: Policy, **more: Any) -> Batch:
    """Answers at a temperature, from kept sets, with stop ids excluded at the beginning."""
    sampling = Sampling(max_new_tokens=6, **more)
    requests = [Request((5 + number, 6), key=number) for number in range(6)]
    episodes = []
    for number, said in enumerate(Sampler(policy, 8).generate(requests, sampling)):
        turn = Turn(list(requests[number].prompt_ids), said.ids, said.logprobs, "", said.stop, sampling.min_new_tokens)
        turn.kept = said.kept
        episodes.append(Episode(Example("x", "?"), number, number, [turn]))
    return collate(episodes, temperature=sampling.temperature, stop_ids=policy.stop_ids)


@pytest.mark.parametrize(
    "more",
    [{"temperature": 0.5}, {"top_k": 5}, {"min_new_tokens": 3}, {"temperature": 0.7, "top_k": 7, "min_new_tokens": 2}],
    ids=["temperature", "kept sets", "excluded ids", "all"],
)
@pytest.mark.parametrize("head", ["fused", "through autograd"])
def test_a_teachers_distribution_is_the_one_that_was_sampled(more: dict[str, Any], head: str) -> None:
    """Temperature, kept sets and excluded stop ids, on both sides: against the definition, in fp64."""
    policy, teacher = in_fp64(0), in_fp64(1)
    batch = sampled(policy, **more)
    if head != "fused":
        for one in (policy, teacher):
            bias = torch.nn.Parameter(0.1 * torch.arange(one.vocabulary).double().cos())
            one.model.lm_head.bias = bias
    row, column = batch.actions.nonzero(as_tuple=True)

    def said(own: Policy) -> Tensor:
        logits = own.model(batch.tokens, attention_mask=batch.mask.long()).logits[row, column - 1] / batch.temperature
        if batch.stop_excluded is not None:
            out = batch.stop_excluded[row, column]
            logits[out[:, None] & torch.isin(torch.arange(own.vocabulary), torch.tensor(batch.stop_ids))] = -math.inf
        if batch.sampling_mask is not None and batch.kept is not None:
            logits[~unpack(batch.sampling_mask.bits[batch.kept[row, column]], own.vocabulary)] = -math.inf
        return logits.log_softmax(-1)

    with torch.no_grad():
        expected = Divergence("reverse_kl").of(said(policy), said(teacher))[0].mean()
        plain = Divergence("reverse_kl").of(
            *(one.model(batch.tokens, attention_mask=batch.mask.long()).logits[row, column - 1].log_softmax(-1)
              for one in (policy, teacher))
        )[0].mean()  # fmt: skip
    policy.teacher = teacher
    _, metrics = models.gradient(GKD(teacher="t", divergence="reverse_kl"), policy, batch, first=True)
    assert metrics["loss/divergence"] == pytest.approx(float(expected), rel=1e-9)
    assert abs(float(plain - expected)) > 1e-5 * float(expected)  # else the settings would not show


# A greedy baseline


@register("reward", "test_sum_of_bytes")
def sum_of_bytes(texts: list[str], examples: list[Example]) -> list[float]:
    """Another number for nearly every text."""
    return [float(sum((place + 1) * byte for place, byte in enumerate(text.encode()))) for text in texts]


@pytest.mark.slow
def test_remaxs_baseline_is_the_score_of_the_greedy_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the stage's settings otherwise, also where answers are sampled at another temperature."""
    from lmgym.training import loop

    found, scores = list[tuple[float, float]](), set[float]()
    usual = loop.add_greedy_baseline

    def watched(episodes: list[Episode], draw: Any, moments: Any) -> None:
        usual(episodes, draw, moments)
        policy = draw.actor.engine.policy
        for episode in episodes:
            ids = [*episode.turns[0].prompt_ids]
            prompt = len(ids)
            while len(ids) - prompt < 5 and not (len(ids) > prompt and ids[-1] in policy.stop_ids):
                with torch.no_grad():
                    ids.append(int(policy.model(torch.tensor([ids])).logits[0, -1].argmax()))
            text = policy.tokenizer.decode(ids[prompt:], skip_special_tokens=True)
            assert episode.baseline is not None
            found.append((episode.baseline, sum_of_bytes([text], [])[0]))
            scores.add(episode.score)

    monkeypatch.setattr(loop, "add_greedy_baseline", watched)
    runs.run(
        tmp_path / "run", algorithm={"name": "remax", "group_size": 2}, rewards={"test_sum_of_bytes": 1.0}, steps=2,
        sampling={"max_new_tokens": 5, "temperature": 1.5},
    )  # fmt: skip
    assert found and all(ours == expected for ours, expected in found)
    assert len(scores) > 2  # a sampled answer in its place would show


# clip-cov


def test_clip_cov_chooses_among_the_tokens_that_the_clip_has_left() -> None:
    """A clipped token has no gradient to leave out: of 8 tokens in the band, those whose ratio is out of bounds are
    never drawn."""
    inputs = Inputs(5, drift=0.6)
    algorithm = preset("clip_cov", covariance_share=1.0, covariance_low=-10.0, covariance_high=10.0)
    batch = ours(algorithm, inputs)[2]
    new, old = place(batch, inputs.new), batch.require("logprobs_old")
    chosen = algorithm.tokens.chosen(batch, PolicyOutputs(new), old, algorithm.surrogate)
    ratio, credits = (new - old).exp(), batch.require("advantages")
    low, high = algorithm.surrogate.low, algorithm.surrogate.high
    clipped = ((ratio > 1 + high) & (credits > 0)) | ((ratio < 1 - low) & (credits < 0))
    assert bool((clipped & batch.actions).any()) and bool((batch.actions & ~clipped).any())
    assert torch.equal(chosen, batch.actions & ~clipped)


# vLLM's weights


Weights = dict[str, Tensor]
Arrives = Callable[[Weights], Weights]


def nothing(weights: Weights) -> Weights:
    return {}


def without_a_layer(weights: Weights) -> Weights:
    return {name: one for name, one in weights.items() if "layers.1." not in name}


def in_bf16(weights: Weights) -> Weights:
    return {name: one.bfloat16().float() for name, one in weights.items()}


class Model:
    """Where vLLM would run: a copy of the model, which samples with the weights that were pushed. `deaf` copies keep
    the ones they began with; `late` ones also say so. Of later pushes there arrives what
    `arrives` makes of them."""

    remedy = "mend it"

    def __init__(self, deaf: bool = False, late: bool = False, arrives: Arrives = dict) -> None:
        self.deaf, self.late, self.arrives, self.pushed, self.version = deaf, late, arrives, 0, ""

    def reach(self, policy: Policy) -> int:
        self.policy = copy.copy(policy)
        self.policy.model = copy.deepcopy(policy.model)
        return policy.context or 64

    def sample(self, queries: Sequence[Query], first: int) -> Iterator[Sampled]:
        wanted = queries[0].settings  # the same for all of these but the seeds
        settings = Sampling(
            temperature=wanted["temperature"],
            max_new_tokens=wanted["max_tokens"],
            min_new_tokens=wanted["min_tokens"],
            stop_ids=tuple(wanted["stop_token_ids"]),
        )
        requests = [Request(tuple(query.ids), key=query.settings["seed"]) for query in queries]
        for said in Sampler(self.policy, len(queries)).generate(requests, settings):
            yield Sampled(said.ids, said.logprobs, [[] for _ in said.ids], {self.version})

    def push(self, policy: Policy, version: int) -> None:
        self.pushed += 1
        if not (self.deaf or self.late) or self.pushed == 1:
            weights = weights_of(policy)
            first = self.pushed == 1
            self.policy.model.load_state_dict(weights if first else self.arrives(weights), strict=first)
        if not self.late or self.pushed == 1:
            self.version = str(version)

    def apart(self) -> Sequence[tuple[str, "Model"]]:
        return [("the model", self)]

    def close(self) -> None: ...


def moved(policy: Policy, by: float = 0.05) -> Policy:
    """The policy after an update."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(by * torch.sin(1000 * parameter))
    return policy


def test_vllm_samples_with_the_newest_weights() -> None:
    policy = Policy(models.llama(0), models.tokenizer())
    engine, requests = VLLM(policy, Model()), [Request((5 + n, 6), key=n) for n in range(4)]
    for version in (1, 2):
        engine.load(moved(policy), version)
        settings = Sampling(max_new_tokens=5, temperature=1.0)
        for request, said in zip(requests, engine.generate(requests, settings), strict=True):
            turn = Turn(list(request.prompt_ids), said.ids, said.logprobs, "", said.stop)
            batch = collate([Episode(Example("x", "?"), 0, 0, [turn])])
            scored = policy.compute_logprobs_no_grad(batch).logprobs[batch.actions]
            assert rounding.near(policy.model, scored, said.logprobs)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("deaf", "the model samples with other weights than the policy's"),
        ("late", "sampled with weights 1, and 2 were"),
    ],
)
def test_vllm_with_old_weights_is_found_out_before_anything_trains_on_its_answers(kind: str, sentence: str) -> None:
    policy = Policy(models.llama(0), models.tokenizer())
    engine = VLLM(policy, Model(**{kind: True}))
    with pytest.raises(LmgymError, match=sentence):
        engine.load(moved(policy), 1)


@pytest.mark.parametrize("arrives", [nothing, without_a_layer, in_bf16])
def test_a_small_update_that_does_not_arrive_whole_is_found_out(arrives: Arrives) -> None:
    """It moves log-probabilities by a hundredth of what any two policies may differ by in the first place: the bound
    is what rounding explains, whatever the update was. Updates of any size that arrive are no reason to stop."""
    policy = Policy(models.llama(0), models.tokenizer())
    engine = VLLM(policy, Model(arrives=arrives))
    with pytest.raises(LmgymError, match="samples with other weights") as found:
        engine.load(moved(policy, 2e-4), 1)
    numbers = re.search(r"differ by (\S+) nats a token, where (\S+) is .* own by ([\d.e-]+)", str(found.value))
    assert numbers is not None
    gap, allowed, update = map(float, numbers.groups())
    assert allowed < 3e-5 < gap < 0.01
    said = "so it seems not to have arrived" in str(found.value)
    assert said == (update / 2 <= gap <= 2 * update) and (said or arrives is not nothing)
    engine = VLLM(policy, Model())
    for version in range(10):
        engine.load(moved(policy, 0.02), version)


def test_vllm_gets_merged_adapters_and_no_more_tokens_than_fit() -> None:
    policy = Policy(models.llama(0), models.tokenizer())
    plain = weights_of(policy)
    lora.add_lora(policy.model, 2, 4, "all-linear", seed=0)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    found = weights_of(policy)
    assert set(found) == set(plain)
    changed = {name for name in plain if not torch.equal(plain[name], found[name])}
    assert changed and all(name.endswith("_proj.weight") for name in changed)

    class Small(Model):
        def reach(self, policy: Policy) -> int:
            return min(super().reach(policy), 40)

    engine = VLLM(Policy(models.llama(0), models.tokenizer()), Small())
    [said] = engine.generate([Request(tuple(range(5, 42)), key=3)], Sampling(max_new_tokens=9, min_new_tokens=9))
    assert len(said.ids) == 3 and said.stop == "context"


def test_merged_adapters_in_bf16_keep_their_update_on_average() -> None:
    """An update of a tenth of bf16's distance: to nearest nothing of it is left. Each pushed weight is one of its two
    neighbours, up with probability 0.1, so the projection over n weights and k pushes is 1, give or take
    sqrt(0.1 * 0.9 / (n k)) / 0.1 (one standard deviation; weights alike, four of them are allowed)."""
    policy = Policy(models.llama(0), models.tokenizer())
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.copy_((1 + 2**-7 * torch.randint(0, 64, parameter.shape)).float())  # between 1 and 1.5
    plain = weights_of(policy)
    lora.add_lora(policy.model, 1, 1, "all-linear", seed=0)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_" in name:
                parameter.fill_(1.0 if "lora_A" in name else 0.1 * 2**-7)
    nearest = weights_of(policy)
    policy.rounded = RoundedWeights(policy.model, seed=0)
    shares, numbers, pushes = [], 0, 10
    for policy.rounded.updates in range(pushes):
        pushed = weights_of(policy)
        assert all(torch.equal(tensor, weights_of(policy)[name]) for name, tensor in pushed.items())
        adapted = [name for name in plain if pushed[name].dtype == torch.bfloat16]
        assert len(adapted) == 7 * policy.model.config.num_hidden_layers
        assert all(torch.equal(nearest[name].bfloat16(), plain[name].bfloat16()) for name in adapted)
        steps = torch.cat([(pushed[name].float() - plain[name]).flatten() for name in adapted]) / (0.1 * 2**-7)
        shares.append(float(steps.double().mean()))
        numbers = len(steps)
    assert abs(sum(shares) / pushes - 1) < 4 * math.sqrt(0.09 / (numbers * pushes)) / 0.1


# Rollouts


class Paid:
    """Two players in turn; each of three moves pays the other one."""

    players = 2

    def reset(self, example: Example, seed: int) -> Any:
        self.moves = 0
        return "your move:"

    def step(self, text: str, stop: str) -> Step:
        self.moves += 1
        mover = (self.moves - 1) % 2
        others = {1 - mover: 0.25} if self.moves > 1 else {}
        return Step([{"role": "user", "content": "go"}], 1.0, self.moves == 3, player=1 - mover, others=others)


def played(env: Any, prompts: list[tuple[int, Example]]) -> list[Episode]:
    policy = Policy(models.llama(0), models.tokenizer())
    return collect(prompts, Actor(Sampler(policy, 8), policy.tokenizer), Sampling(max_new_tokens=2), (0,), env)


def test_what_a_step_pays_another_player_is_added_to_what_that_one_has_earned() -> None:
    first, second = played(Paid, [(0, Example("x", "?"))])
    assert [turn.reward for turn in first.turns] == [1.25, 1.0]
    assert [turn.reward for turn in second.turns] == [1.25]


def test_environments_of_a_group_have_one_seed_and_other_groups_others() -> None:
    seen: list[int] = []

    class Seeded:
        def reset(self, example: Example, seed: int) -> Any:
            seen.append(seed)
            return "?"

        def step(self, text: str, stop: str) -> Step:
            return Step(terminated=True)

    played(Seeded, [(0, Example("x", "?"))] * 2 + [(1, Example("y", "?"))] * 2)
    assert seen[0] == seen[1] != seen[2] == seen[3]


def test_each_of_several_references_is_imitated() -> None:
    actor = Actor(Model(), models.tokenizer())  # type: ignore[arg-type]
    example = Example("x", "?", references=("a", "b", "c"))
    first, second = (
        [episode.turns[0].text for episode in demonstrate([(0, example)] * 40, actor, (0, "step", step))]
        for step in (1, 2)
    )
    assert set(first) == {"a", "b", "c"} and first != second


# Updates


def test_the_fisher_matrix_is_of_other_episodes_in_another_step() -> None:
    batch = models.batch_of(models.episodes(0, groups=4, turns=1))
    found = [tuple(subsampled(batch.replace(key=key), 0.5).episode.tolist()) for key in (1, 1, 2, 3)]
    assert found[0] == found[1] and len({*found}) > 1


# Data


def test_a_mixture_begins_otherwise_for_another_key() -> None:
    """Else every seed, and every draw of a step, would begin with the same tasks."""
    orders = {tuple(mixture_slot(position, [2, 1], key)[0] for position in range(6)) for key in range(8)}
    assert len(orders) > 1 and all(sum(order) == 2 for order in orders)
