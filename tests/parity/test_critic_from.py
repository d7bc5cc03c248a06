"""A value function that begins as a reward model gives its scores."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lmgym.batch import collate
from lmgym.core.errors import LmgymError
from lmgym.models.critic import with_critic
from lmgym.models.load import load_policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.reward_model import save_reward_model, take_reward_model
from lmgym.types import Episode, Example, Turn
from tests import runs

SECTION = {"model": "builtin:tiny", "device": "cpu", "architecture": runs.ARCHITECTURE}


def reward_model(folder: Path) -> Path:
    judge = load_policy(PolicySection(**SECTION), seed=5)
    judge = with_critic(judge, separate=False)
    assert judge.value_head is not None
    torch.nn.init.normal_(judge.value_head.weight, generator=torch.Generator().manual_seed(3))
    save_reward_model(folder, judge, {})
    return folder


def test_values_are_the_scores(tmp_path: Path) -> None:
    folder = reward_model(tmp_path / "rm")
    policy = load_policy(PolicySection(**SECTION), seed=0)
    before = [parameter.clone() for parameter in policy.parameters()]
    policy = with_critic(policy, separate=True, start=lambda critic: take_reward_model(critic, str(folder)))
    rows = [[5, 6, 7, 8, 9], [9, 8, 7]]
    episodes = [Episode(Example(str(n), "?"), n, n, [Turn(row[:2], row[2:])]) for n, row in enumerate(rows)]
    outputs = policy.compute_logprobs_no_grad(collate(episodes), values=True, last_values=True)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        for n, row in enumerate(rows):  # the score of each beginning
            for end in range(2, len(row)):
                score = float(classifier(torch.tensor([row[:end]])).logits)
                assert float(outputs.require("values")[n, end]) == pytest.approx(score, abs=1e-4)
            score = float(classifier(torch.tensor([row])).logits)
            assert float(outputs.require("last_values")[n]) == pytest.approx(score, abs=1e-4)
    assert all(torch.equal(one, two) for one, two in zip(before, policy.parameters(), strict=True))


def test_a_run_begins_with_it(tmp_path: Path) -> None:
    folder = reward_model(tmp_path / "rm")
    means = []
    for name, more in (("zero", {}), ("rm", {"critic_from": str(folder)})):
        policy = {**SECTION, "critic": "separate", **more}
        runs.run(tmp_path / name, policy=policy, algorithm={"name": "ppo"}, steps=1)
        [record] = [one for one in runs.records(tmp_path / name / "metrics.jsonl") if one["kind"] == "train"]
        means.append(record["value/mean"])
    assert means[0] == 0 and abs(means[1]) > 1e-3


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match="write critic: separate, without lora_rank and quantise"):
        load_policy(PolicySection(**SECTION, critic_from="x"))
    policy = load_policy(PolicySection(**SECTION), seed=0)
    policy.model.save_pretrained(tmp_path / "no_head")
    with pytest.raises(LmgymError, match=r"policy.critic_from"):
        with_critic(policy, separate=True, start=lambda critic: take_reward_model(critic, str(tmp_path / "nothing")))
    with pytest.raises(LmgymError, match="needs a classifier with one output"):  # its head would be made up
        with_critic(policy, separate=True, start=lambda critic: take_reward_model(critic, str(tmp_path / "no_head")))
    other = load_policy(PolicySection(**{**SECTION, "architecture": {**runs.ARCHITECTURE, "hidden_size": 32}}), seed=0)
    with pytest.raises(LmgymError, match="has weights of other sizes than the policy's model"):
        with_critic(other, separate=True, start=lambda c: take_reward_model(c, str(reward_model(tmp_path / "rm"))))
