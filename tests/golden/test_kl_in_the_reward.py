"""Which estimator of the KL may stand in the reward: expected gradients, by enumerating every answer of a small policy.

The policy is categorical: an answer is two tokens of a vocabulary of three, and the second one's distribution depends
on the first. Each of the nine answers is a row, weighted by its probability, so nothing is sampled.
"""

from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, tensor

from lmgym.algorithms.actor_critic import A2C, PPO
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.regularised import Regularised
from lmgym.algorithms.reinforce import RLOO, Reinforce
from lmgym.algorithms.reinforce_pp import ReinforcePlusPlus
from lmgym.algorithms.reinforce_stable import ReinforceStable
from lmgym.batch import PolicyOutputs, collate
from lmgym.cli.main import main
from lmgym.config.build import build_config, resolved
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.types import Episode, Example, Turn
from tests import runs
from tests.family import grpo
from tests.rounding import rounding

# With a sentence.
REFUSED = {("trpo", "loss"), *((name, "reward") for name in ("gigpo", "hgpo", "maxrl", "remax"))}
REGULARISED = [name for name in registry.names("algorithm") if issubclass(registry.get("algorithm", name), Regularised)]
ANSWERS = [(a, b) for a in range(3) for b in range(3)]


def logprobs_of(parameters: Tensor) -> Tensor:
    """Log-probabilities [answers 2] of a policy with logits [4 3]: of the first token, of the second after each."""
    logs = parameters.log_softmax(-1)
    return torch.stack([torch.stack([logs[0, a], logs[1 + a, b]]) for a, b in ANSWERS])


def random_policies() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    return policy.requires_grad_(), reference


def penalty_gradient(algorithm: Regularised, policy: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    """The gradient [P] of the algorithm's expected policy term, where no answer earns anything but its penalty. The
    log-probabilities of the policy (a function of `policy`) and of the reference are [answers tokens]."""
    count, length = old.shape
    batch = collate([Episode(Example("x", "?"), 0, n, [Turn([9], [5] * length)]) for n in range(count)])

    def place(rows: Tensor) -> Tensor:
        return torch.cat([torch.zeros(count, 1, dtype=rows.dtype), rows], 1)

    nothing = torch.zeros(count, dtype=torch.float64)
    batch = batch.replace(score=nothing, rewards=place(0 * reference), values=place(0 * reference), last_values=nothing)
    batch = algorithm.advantages(batch.replace(logprobs_old=place(old.detach()), logprobs_ref=place(reference)))
    terms, _ = algorithm.loss(batch, PolicyOutputs(place(old), values=place(0 * reference)))
    expected = (old.detach().sum(1).exp()[:, None] * terms["policy"][0]).sum()
    return torch.autograd.grad(expected, policy, retain_graph=True)[0].flatten()


def divergence_gradient(policy: Tensor, logprobs: Tensor, reference: Tensor) -> Tensor:
    """The gradient of KL(policy || reference) over whole answers."""
    answers = logprobs.sum(1)
    divergence = (answers.exp() * (answers - reference.sum(1))).sum()
    return torch.autograd.grad(divergence, policy, retain_graph=True)[0].flatten()


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize(
    "algorithm",
    [
        Reinforce(baseline="none", kl_coefficient=0.5),
        Reinforce(baseline="mean", kl_coefficient=0.5),
        RLOO(group_size=9, kl_coefficient=0.5),
        GRPO(group_size=9, kl_coefficient=0.5, kl_in="reward"),
        grpo(group_size=9, kl_coefficient=0.5, kl_in="reward", scale_rewards="group", objective="cispo"),
        ReinforcePlusPlus(kl_coefficient=0.5),
        ReinforceStable(gamma=1.0, kl_coefficient=0.5, kl_in="reward"),
        PPO(gae_lambda=1.0, kl_coefficient=0.5),
        A2C(kl_coefficient=0.5),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_with_the_estimator_left_out_the_penalty_has_the_gradient_of_the_divergence(algorithm: Regularised) -> None:
    policy, reference = random_policies()
    logprobs, beside = logprobs_of(policy), logprobs_of(reference)
    found = penalty_gradient(algorithm, policy, logprobs, beside)
    wanted = divergence_gradient(policy, logprobs, beside)
    # 18 tokens' terms, each through a softmax of 3, returns of 2 and a mean and a deviation over 18.
    assert 1 - cosine(found, wanted) <= rounding(18 * 3 * 2 * 18, precision=torch.float64)


def test_k2_and_k3_in_the_reward_drive_the_policy_away() -> None:
    """p = (.7, .2, .1), reference (.5, .3, .2): the figures of functional/kl.py's docstring and of grpo.md. What k3
    penalises is KL(p || q) - KL(q || p)."""
    policy = tensor([0.7, 0.2, 0.1], dtype=torch.float64).log().requires_grad_()
    reference = tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    logprobs = policy.log_softmax(0)
    wanted = divergence_gradient(policy, logprobs[:, None], reference[:, None])
    found = {}
    for name in ("k1", "k2", "k3"):
        algorithm = Reinforce(baseline="none", kl_coefficient=1.0)
        algorithm.kl_estimator = name  # k2 and k3 cannot be written
        found[name] = penalty_gradient(algorithm, policy, logprobs[:, None], reference[:, None])
    assert torch.allclose(found["k1"], wanted, rtol=0, atol=rounding(9, precision=torch.float64))
    assert [round(cosine(found[name], wanted), 2) for name in ("k2", "k3")] == [-0.84, -0.87]
    reverse = (reference.exp() * (reference - logprobs)).sum()
    turned = wanted - torch.autograd.grad(reverse, policy)[0]
    assert torch.allclose(found["k3"], turned, rtol=0, atol=rounding(9, precision=torch.float64))


@pytest.mark.parametrize("name", REGULARISED)
def test_every_algorithm_refuses_k2_and_k3_in_the_reward(name: str) -> None:
    make = registry.get("algorithm", name)
    for estimator in ("k2", "k3"):
        with pytest.raises(LmgymError, match=rf"kl_estimator is {estimator}, and in the reward only k1 has"):
            make(kl_in="reward", kl_coefficient=0.1, kl_estimator=estimator)
        make(kl_in="reward", kl_coefficient=0.0, kl_estimator=estimator)  # there is no penalty


@pytest.mark.parametrize("name", REGULARISED)
def test_an_estimator_that_is_left_out_follows_from_the_place(name: str) -> None:
    """k1 in the reward; in the loss what each algorithm had before (grpo's k3), and for reinforce_stable k2."""
    for place, estimator in (("reward", "k1"), ("loss", "k2" if name == "reinforce_stable" else "k3")):
        section = {"name": name, "kl_in": place, "kl_coefficient": 0.1}
        if (name, place) in REFUSED:
            with pytest.raises(LmgymError, match=r"kl_in|KL penalty"):
                build_config(runs.tiny(algorithm=section))
            continue
        config = build_config(runs.tiny(algorithm=section))
        assert config.stages[0].algorithm.kl_estimator == estimator  # type: ignore[attr-defined]
        assert resolved(config)["stages"][0]["algorithm"]["kl_estimator"] == estimator


def test_llm_rls_own_form_stays_under_its_name() -> None:
    algorithm = ReinforceStable(compat="llm_rl")
    assert (algorithm.kl_in, algorithm.kl_estimator) == ("loss", "k2")


def test_a_run_folder_of_before_gets_the_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What grpo with `kl_in: reward` wrote to recipe.yaml, whose default estimator was k3 wherever it stood."""
    old = {"name": "grpo", "group_size": 4, "kl_in": "reward", "kl_estimator": "k3", "kl_coefficient": 0.1}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(runs.tiny(algorithm=old)))
    assert main(["train", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "algorithm.kl_estimator is k3, and in the reward only k1 has the gradient of the KL" in said
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"]
