"""Divergences of whole distributions: against what TRL 1.16 made of the same logits (record_gkd.py), by hand, and the
gradient of a policy against autograd over all logits at once."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmgym.algorithms.distill import Distill
from lmgym.algorithms.gkd import GKD
from lmgym.batch import Batch
from lmgym.core.errors import LmgymError
from lmgym.functional.divergences import Divergence, with_rest
from lmgym.models.kernels.fused_divergence import FusedDivergence, with_logits, with_top
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.hints import hinted_episodes, hinted_prompt
from lmgym.types import Episode, Example, RecipeText, Turn
from lmgym.updates.prepare import prepare
from tests import models, rounding, runs
from tests.contract.test_every_algorithm import policy_section
from tests.golden.record_gkd import RECORD, TOP_K, VOCABULARY, inputs

TRL = json.loads(RECORD.read_text())
NAMES = {0.0: "forward_kl", 1.0: "reverse_kl"}
HINT = "The answer is {reference}. {prompt}"


@pytest.mark.parametrize("case", TRL["cases"], ids=lambda case: f"beta {case['beta']}, T {case['temperature']}")
def test_trl_makes_the_same_of_the_same_logits(case: dict[str, Any]) -> None:
    """The student's logits are hidden states here, under a head that is the identity."""
    student, teacher, actions = inputs()
    leaf, temperature = student.clone().requires_grad_(), case["temperature"]
    name = NAMES.get(case["beta"], "jsd")
    divergence = Divergence(name, case["beta"]) if name == "jsd" else Divergence(name)
    taught, identity = teacher[actions], torch.eye(VOCABULARY, dtype=torch.float64)
    targets = torch.zeros(int(actions.sum()), dtype=torch.long)

    def divide(logits: Tensor, part: slice) -> Tensor:
        return logits / temperature

    comparison = with_logits(divergence, lambda part: taught[part], divide)
    _, found = FusedDivergence.apply(leaf[actions], identity, None, targets, divide, 1 / temperature, 2, comparison)
    found.mean().backward()
    # TRL wrote 12 digits; both are sums of fp64 numbers below 10.
    assert found.mean().item() == pytest.approx(case["loss"], rel=1e-11)
    assert leaf.grad.flatten().tolist() == pytest.approx(case["gradient"], rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("case", TRL["some"], ids=lambda case: f"beta {case['beta']}")
def test_trl_makes_the_same_of_some_tokens_and_the_rest(case: dict[str, Any]) -> None:
    """TRL's SDPO names the student's most likely tokens in place of the teacher's; the formula is the same."""
    student, teacher, _ = (one.flatten(0, 1) for one in inputs())
    ids = student.topk(TOP_K).indices
    taught = with_rest(teacher.log_softmax(-1).gather(1, ids))
    name = NAMES.get(case["beta"], "jsd")
    divergence = Divergence(name, case["beta"]) if name == "jsd" else Divergence(name)
    value, gradient = divergence.of_top(student.log_softmax(-1), ids, taught)
    assert value.tolist() == pytest.approx(case["each"], rel=1e-11)
    assert gradient.flatten().tolist() == pytest.approx(case["gradient"], rel=1e-10, abs=1e-12)


def test_divergences_by_hand() -> None:
    """p = (3/4, 1/4), q = (1/4, 3/4): both KLs are log(3) / 2, and m = (1/2, 1/2)."""
    p, q = torch.tensor([[0.75, 0.25]]).double().log(), torch.tensor([[0.25, 0.75]]).double().log()
    both = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)  # KL(p || m) and KL(q || m)
    for name, expected in (("forward_kl", math.log(3) / 2), ("reverse_kl", math.log(3) / 2), ("jsd", both)):
        value, gradient = Divergence(name).of(p, q)
        assert value.item() == pytest.approx(expected, rel=1e-12)
        assert gradient.sum().item() == pytest.approx(0.0, abs=1e-15) and gradient[0, 0] > 0
    assert all(Divergence(name).of(p, p)[0].item() == 0 for name in ("forward_kl", "reverse_kl"))


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_tokens_that_cannot_be_sampled_count_for_nothing(name: Any) -> None:
    """-inf in both: the divergence is that of the other tokens, and their gradient is finite."""
    generator = torch.Generator().manual_seed(3)
    student, teacher = torch.randn(2, 4, 7, generator=generator, dtype=torch.float64)
    out = torch.zeros(4, 7).bool()
    out[:, [1, 4]] = True
    p, q = (logits.masked_fill(out, -math.inf).log_softmax(-1) for logits in (student, teacher))
    value, gradient = Divergence(name).of(p, q)
    fewer, fewer_gradient = Divergence(name).of(
        *(logits[:, [0, 2, 3, 5, 6]].log_softmax(-1) for logits in (student, teacher))
    )
    assert torch.allclose(value, fewer, rtol=1e-12) and bool((gradient[out] == 0).all())
    assert torch.allclose(gradient[~out], fewer_gradient.flatten(), rtol=1e-10)


# In a policy


def in_fp64(seed: int, **architecture: Any) -> Policy:
    return Policy(models.in_double(models.llama(seed, **architecture)), models.tokenizer(), compute=torch.float64)


def mean_divergence(policy: Policy, teacher: Policy, batch: Batch, divergence: Divergence) -> Tensor:
    """The mean over the actions, from all logits of both at once, by autograd over the definition."""
    row, column = batch.actions.nonzero(as_tuple=True)

    def said(own: Policy) -> Tensor:
        return own.model(batch.tokens, attention_mask=batch.mask.long()).logits[row, column - 1].log_softmax(-1)

    p, q = said(policy), said(teacher).detach()
    size = min(p.shape[1], q.shape[1])  # both renormalised on the tokens that they share
    p, q = (logprobs[:, :size].log_softmax(-1) for logprobs in (p, q))
    if divergence.name == "forward_kl":
        return (q.exp() * (q - p)).sum(-1).mean()
    if divergence.name == "reverse_kl":
        return (p.exp() * (p - q)).sum(-1).mean()
    beta = divergence.beta
    m = (beta * q.exp() + (1 - beta) * p.exp()).log()
    return (beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)).sum(-1).mean()


@pytest.mark.parametrize("size", [259, 270, 262], ids=["one vocabulary", "a larger head", "another head"])
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_the_gradient_of_a_policy_is_that_of_all_its_logits(name: Any, size: int) -> None:
    """Also where the teacher's head is padded to another size than the student's (266)."""
    algorithm = GKD(teacher="t", divergence=name, **({"beta": 0.3} if name == "jsd" else {}))
    own = 259 if size == 259 else 266
    policy, teacher = in_fp64(0, vocab_size=own), in_fp64(1, hidden_size=24, vocab_size=size)
    policy.teacher = teacher
    batch = models.batch_of(models.episodes(4, turns=1))
    found, metrics = models.gradient(
        algorithm, policy, prepare(batch, policy, {"teacher": teacher}, algorithm), first=True
    )
    expected = mean_divergence(policy, teacher, batch, Divergence(name, algorithm.beta))
    gradients = torch.autograd.grad(expected, policy.parameters())
    assert metrics["loss/divergence"] == pytest.approx(expected.item(), rel=1e-10)
    assert models.relative(found, torch.cat([one.flatten() for one in gradients])) < 1e-10


KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model": "builtin:tiny"},
    "t5": {"model": "builtin:tiny_t5"},
    "bart": {"model": "builtin:tiny_bart"},
    "adapters": {"model": "builtin:tiny", "lora_rank": 4},
    "adapters, t5": {"model": "builtin:tiny_t5", "lora_rank": 4},
}


@pytest.mark.parametrize("kind", KINDS)
def test_neither_cut_nor_path_nor_recomputation_moves_the_gradient(kind: str) -> None:
    """In fp64: all rows in one pass, row by row, with layers computed again, with chunks of the head, and on the plain
    padded path. The hint is that of self-distillation: other prompts for the teacher, which is the policy itself."""
    if "lora_rank" in KINDS[kind]:
        pytest.importorskip("peft")
    policy = load_policy(PolicySection(**policy_section(**KINDS[kind]), compute="float32"))
    policy.model, policy.compute = models.in_double(policy.model), torch.float64
    batch = batch_for(policy)
    policy.teacher = policy
    algorithm = GKD(teacher="self", hint="{prompt}", divergence="jsd")
    batch = algorithm.advantages(batch.replace(hinted=batch_for(policy, more=4)))

    class Chunked(Policy):
        head_chunk = 3

    def changed(**fields: Any) -> Policy:
        other = copy.copy(policy)
        other.__dict__ |= fields
        other.teacher = other
        return other

    chunked = changed()
    chunked.__class__ = Chunked
    others = [changed(tokens_per_forward=1), changed(activation_checkpointing=True), changed(fast=False), chunked]
    whole, metrics = models.gradient(algorithm, policy, batch)
    assert float(whole.norm()) > 0 and metrics["loss/divergence"] > 0
    for other in others:
        found, same = models.gradient(algorithm, other, batch)
        assert models.relative(whole, found) < 1e-9
        assert same["loss/divergence"] == pytest.approx(metrics["loss/divergence"], rel=1e-9)


def batch_for(policy: Policy, more: int = 0) -> Batch:
    """Answers behind prompts with so many more tokens."""
    episodes = models.episodes(7, groups=2, size=3, turns=1)
    for [turn] in (episode.turns for episode in episodes):
        turn.prompt_ids = [40, 41, 42, 43, 44][:more] + turn.prompt_ids
        if policy.encoder_decoder:
            turn.source_ids, turn.prompt_ids = turn.prompt_ids, [*policy.decoder_start]
    return models.batch_of(episodes)


def test_the_sampled_form_has_the_same_gradient_on_average() -> None:
    """Reverse KL: the score-function estimator, summed over each token that could have been sampled at one place with
    its probability, is the gradient over the whole distribution."""
    p = torch.randn(5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(-1)
    q = torch.randn(5, generator=torch.Generator().manual_seed(2), dtype=torch.float64).log_softmax(-1)
    expected = Divergence("reverse_kl").of(p[None], q[None])[1][0]
    each = []
    for token in range(5):
        episode = Episode(Example("x", "?"), 0, 0, [Turn([5], [token], [p[token].item()])])
        batch = models.batch_of([episode])
        filled = batch.replace(logprobs_sampler=p[token] * batch.actions, logprobs_teacher=q[token] * batch.actions)
        advantage = Distill(teacher="t").advantages(filled).advantages[0, 1]
        by_logits = torch.nn.functional.one_hot(torch.tensor(token), 5) - p.exp()
        each.append(-p[token].exp() * advantage * by_logits)
    assert torch.allclose(torch.stack(each).sum(0), expected, rtol=1e-12, atol=1e-15)


# Hints


def test_a_hint_is_put_around_the_prompt() -> None:
    example = Example("a/0", "2+2=", references=("4",), meta={"kind": "sum {prompt}"})
    assert hinted_prompt(HINT, example) == "The answer is 4. 2+2="
    found = hinted_prompt("<|a|>{prompt}{kind} \\frac{}", example)
    assert found == "<|a|>2+2=sum {prompt} \\frac{}"  # what is filled in is not read again
    assert isinstance(found, RecipeText) and found.spans == (
        (0, 5),
        (21, 29),
    )  # only the recipe may spell control tokens
    chat = Example("a/1", [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}], ("2",))
    assert [m["content"] for m in hinted_prompt(HINT, chat)] == ["Add.", "The answer is 2. 1+1="]
    with pytest.raises(LmgymError, match="example a/0 has no 'solution'; it has prompt, reference, kind"):
        hinted_prompt("{prompt} {solution}", example)


def test_the_teacher_reads_the_hint_and_scores_the_same_actions() -> None:
    """Both forms: the teacher says of the actions what it says behind the longer prompts."""
    policy, teacher = in_fp64(0), in_fp64(1)
    policy.teacher = teacher
    episodes = models.episodes(2, turns=1)
    hinted = [
        Episode(one.example, one.group, one.index, [Turn([9] * (3 + n) + t.prompt_ids, t.action_ids, t.logprobs)])
        for n, one in enumerate(episodes)
        for t in one.turns
    ]
    batch, behind = models.batch_of(episodes), models.batch_of(hinted)
    both = batch.replace(hinted=behind)
    sampled = prepare(both, policy, {"teacher": teacher}, Distill(teacher="t"))
    with torch.no_grad():
        expected = teacher.compute_logprobs(behind).logprobs
    assert torch.allclose(sampled.logprobs_teacher[batch.actions], expected[behind.actions].float())
    # Whole distributions: of one row, and of all of them, for any cut.
    policy.tokens_per_forward = 1
    algorithm = GKD(teacher="t")
    _, cut = models.gradient(algorithm, policy, algorithm.advantages(both))
    row, column = batch.actions.nonzero(as_tuple=True)
    _, place = behind.actions.nonzero(as_tuple=True)
    with torch.no_grad():
        p = policy.model(batch.tokens, attention_mask=batch.mask.long()).logits[row, column - 1].log_softmax(-1)
        q = teacher.model(behind.tokens, attention_mask=behind.mask.long()).logits[row, place - 1].log_softmax(-1)
    assert cut["loss/divergence"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-10)


@pytest.mark.parametrize("name", ["gkd", "distill"])
def test_a_policy_learns_from_itself_with_a_hint(name: str, tmp_path: Path) -> None:
    """The first loss is not zero, since teacher and student read different prompts; nothing is loaded beside."""
    folder = runs.run(
        tmp_path / "run", algorithm={"name": name, "teacher": "self", "hint": HINT}, rewards=None, steps=2
    )
    first, second = (record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train")
    key = "loss/divergence" if name == "gkd" else "kl/teacher"
    assert first[key] != 0 and second[key] != first[key] and first["gradient_norm"] > 0


def test_its_own_beginning_has_nothing_to_teach_at_first(tmp_path: Path) -> None:
    folder = runs.run(tmp_path / "run", algorithm={"name": "gkd", "teacher": "initial"}, rewards=None, steps=2)
    first = next(record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train")
    model = load_policy(PolicySection(model=str(folder / "final"), device="cpu")).model
    # A mean of differences of log-probabilities, by two passes through equal models.
    assert first["loss/divergence"] == pytest.approx(0.0, abs=rounding.tolerance(model))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({}, "algorithm.teacher is missing"),
        ({"teacher": "self"}, "without a hint gkd has nothing to learn"),
        ({"teacher": "t", "hint": "The answer is {reference}"}, "has no {prompt} in it"),
        ({"teacher": "t", "beta": 0.3}, "algorithm.beta is for divergence jsd"),
        ({"teacher": "t", "divergence": "jsd", "beta": 1.0}, "it must lie between 0 and 1"),
        ({"teacher": "t", "reward_coefficient": 1.0}, "needs at least 2"),
        ({"teacher": "t", "source": "references", "reward_coefficient": 1.0}, "is for sampled answers"),
        ({"teacher": "t", "reward_coefficient": 1.0, "group_size": 2, "epochs": 2}, "no ratio"),
    ],
)
def test_what_does_not_go_together_is_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(LmgymError, match=said):
        GKD(**section)


def test_what_a_hint_cannot_do_is_refused(tmp_path: Path) -> None:
    several = models.episodes(0, turns=3)
    with pytest.raises(LmgymError, match="a hint is for tasks of one prompt and one answer"):
        hinted_episodes(several, "{prompt}", Actor(None, models.tokenizer()), None)
    one = Episode(Example("a/0", "?"), 0, 0, [Turn([5], [6, 7])])
    with pytest.raises(LmgymError, match="with it example a/0 has 10 tokens, and the teacher reads 8"):
        hinted_episodes([one], "{prompt} 12345", Actor(None, models.tokenizer()), 8)
    env = {
        "env": {"name": "tests.quiz:Quiz", "workers": 1},
        "algorithm": {"name": "gkd", "teacher": "self", "hint": HINT},
    }
    with pytest.raises(LmgymError, match=r"algorithm\.hint is for tasks of one prompt"):
        runs.run(tmp_path / "run", **env)


@pytest.mark.parametrize("of_top", [False, True], ids=["logits", "most likely tokens"])
@pytest.mark.parametrize("tokens", [40, 400])
def test_no_logits_of_all_tokens_ever_exist(tokens: int, of_top: bool) -> None:
    """Chunks of 10 rows: whatever forward and backward make, nothing has more rows of the vocabulary than a chunk."""
    vocabulary, chunk = 1000, 10
    seen: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
            made = function(*arguments, **(named or {}))
            for one in made if isinstance(made, tuple | list) else [made]:
                if isinstance(one, Tensor) and one.dim() > 1 and one.shape[-1] == vocabulary:
                    seen.append(one.numel() // vocabulary)
            return made

    hidden, taught = torch.randn(tokens, 3, requires_grad=True), torch.randn(tokens, 4)
    head, taught_head = torch.randn(vocabulary, 3, requires_grad=True), torch.randn(vocabulary, 4)
    if of_top:
        ids = torch.stack([torch.randperm(vocabulary)[:20] for _ in range(tokens)])
        comparison = with_top(Divergence("jsd"), ids, with_rest(torch.full((tokens, 20), math.log(0.04))))
    else:
        comparison = with_logits(Divergence("jsd"), lambda part: taught[part] @ taught_head.T, lambda z, part: z)
    with Sizes():
        targets = torch.zeros(tokens, dtype=torch.long)
        _, found = FusedDivergence.apply(hidden, head, None, targets, lambda z, part: z, 1.0, chunk, comparison)
        found.mean().backward()
    assert hidden.grad is not None and head.grad is not None and max(seen) == chunk
