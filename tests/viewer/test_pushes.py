"""What the page says of a token is what the algorithm computes: each push against finite differences of its loss, and
the texts and pushes of a run that was trained, a user's own algorithm included."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core import registry
from lmgym.functional.reductions import tokens_of_episode, totals, weights
from lmgym.logs.traces.trace import TraceEpisode, TraceRow, TraceStep, TraceTurn, read_episode, read_step
from lmgym.updates.pushes import pushes
from lmgym.viewer.episodes import explanation
from lmgym.viewer.rollouts import Moment
from lmgym.viewer.runs import open_runs
from lmgym.viewer.screens import answer_screen
from lmgym.viewer.views import answer_tree
from tests import runs
from tests.contract.test_examples import SNIPPETS, forget_plugins  # noqa: F401 (a fixture)
from tests.family import grpo

KL = {"kl_coefficient": 0.3, "kl_in": "loss"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"dual_clip": 1.2, "scale_rewards": "batch"}),
    ("grpo", {**KL, "entropy_coefficient": 0.01, "squared_log_ratio_coefficient": 0.2}),
    ("grpo", {**KL, "kl_estimator": "k2", "importance_cap": 1.1}),
    *(("grpo", {"preset": name}) for name in ("paper", "dr_grpo", "dapo", "cispo", "sapo", "dppo")),
    *(("grpo", {"preset": name}) for name in ("icepop", "gspo_token", "vespo", "ce_gppo", "ipo_mask", "gpg", "opo")),
    ("grpo", {"importance_floor": 0.95, "mismatch_bound": 1.1, "off_policy_threshold": 0.05}),
    ("grpo", {"objective": "dppo", "ratio_to": "sampler", **KL}),
    ("replay", {}),
    ("replay", {"truncate": 1.1, **KL}),
    ("ppo", {"entropy_coefficient": 0.01}),
    ("nlpo", {}),
    ("a2c", {"whiten": "batch", **KL}),
    ("reinforce", {"baseline": "scst"}),
    ("reinforce", {"baseline": "mean", **KL}),
    ("rloo", {}),
    ("reinforce_pp", {"baseline": "group", "group_size": 3, **KL}),
    ("reinforce_stable", {}),
    ("raft", {"group_size": 3}),
    ("distill", {"teacher": "a", "gamma": 0.5}),
    ("gkd", {"teacher": "a", "reward_coefficient": 0.5, "group_size": 3}),
    *(("grpo", {"preset": name, "clip_high": 10.0, "clip_low": 0.9}) for name in ("gspo", "gmpo", "luspo")),
    *(("grpo", {"preset": name}) for name in ("top_entropy", "clip_cov", "kl_cov", "maxrl", "otb")),
    ("grpo", {"preset": "pass_at_k", "pass_at": 2}),
    ("dpo", {}),
    ("orpo", {}),
    ("kto", {"threshold": 0.5}),
]


def made(name: str, fields: dict[str, Any]) -> Algorithm:
    kind = registry.get("algorithm", name)
    return grpo(kind=kind, **fields) if issubclass(kind, GRPO) else kind(**fields)


def random_batch(seed: int = 0) -> tuple[Batch, PolicyOutputs]:
    """Two groups of three answers of up to four tokens in one or two turns, and what the policy says after a step."""
    generator = torch.Generator().manual_seed(seed)

    def numbers() -> Tensor:
        return torch.rand(6, 6, generator=generator, dtype=torch.float64)

    actions = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0]] * 3).bool()
    turn = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]] * 3)
    old = -2 * numbers()
    batch = Batch(
        tokens=torch.ones(6, 6).long(), mask=torch.ones(6, 6).bool(), actions=actions, rewards=numbers() * actions,
        score=torch.rand(6, generator=generator, dtype=torch.float64), episode=torch.arange(6),
        group=torch.tensor([0, 0, 0, 1, 1, 1]), version=torch.zeros(6).long(), terminated=torch.ones(6).bool(),
        limit=5, turn=turn, row=torch.arange(6),
        logprobs_sampler=old + 0.2 * numbers(), logprobs_old=old, logprobs_ref=old - numbers(),
        logprobs_teacher=old + numbers(), values=numbers(), last_values=torch.zeros(6).double(),
        baseline=torch.rand(6, generator=generator, dtype=torch.float64),
        distribution_sums=numbers()[:, :, None], sum_names=("squared_probabilities",),
    )  # fmt: skip
    now = (old + 1.2 * (numbers() - 0.5)).requires_grad_()
    return batch, PolicyOutputs(logprobs=now, entropy=numbers(), values=batch.values, divergence=numbers())


def losses_of(algorithm: Algorithm, batch: Batch, new: PolicyOutputs) -> Mapping[str, Tensor]:
    """What a driver minimises of each term: the weighted sum, by totals of the whole batch."""
    if algorithm.whole_batch:
        return algorithm.batch_loss(batch, new)[0]
    total, tokens = totals(batch.actions, batch.episode), tokens_of_episode(batch.actions, batch.episode)
    terms = algorithm.loss(batch, new)[0]
    return {name: (weights(how, batch.actions, tokens, total) * term).sum() for name, (term, how) in terms.items()}


@contextmanager
def constants(kept: list[Tensor], replay: bool) -> Iterator[None]:
    """Keep what a loss takes as a constant (`detach`), or give it what was kept: then the loss at other numbers differs
    only by what its gradient is of."""
    plain, left = Tensor.detach, iter(kept)

    def detach(tensor: Tensor) -> Tensor:
        if replay:
            return next(left)
        kept.append(plain(tensor).clone())
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "detach", detach)
        yield


@pytest.mark.parametrize(("name", "fields"), CASES)
def test_a_push_is_minus_the_slope_of_the_loss(name: str, fields: dict[str, Any]) -> None:
    """By central differences at every token, whatever the algorithm takes for a constant."""
    algorithm = made(name, fields)
    batch, new = random_batch()
    batch = algorithm.advantages(batch)
    if name == "kto":  # the second group stands for answers to the prompts of others
        batch = batch.replace(episode=torch.tensor([0, 1, 2, -1, -2, -3]))
    kept: list[Tensor] = []
    with constants(kept, replay=False):
        losses = losses_of(algorithm, batch, new)
    found = pushes(losses, new.logprobs)
    assert any(bool(column.any()) for column in found.values()) and new.logprobs.grad is None
    width, now = 1e-6, new.logprobs.detach().clone()

    def at(place: tuple[int, int], change: float) -> Mapping[str, Tensor]:
        moved = now.clone()
        moved[place] += change
        with constants(kept, replay=True), torch.no_grad():
            return losses_of(algorithm, batch, PolicyOutputs(**{**vars(new), "logprobs": moved}))

    for place in map(tuple, batch.actions.nonzero().tolist()):
        above, below = at(place, width), at(place, -width)
        for term in losses:
            slope = float(above[term] - below[term]) / (2 * width)
            push = float(found[f"push/{term}"][place]) if f"push/{term}" in found else 0.0
            assert -push == pytest.approx(slope, rel=1e-5, abs=1e-8), (term, place)


def test_scores_that_an_advantage_is_made_of() -> None:
    """Of the answers that trained: 0.5 is the best of its group of three, and one of another group did not train."""
    index, group, score = [0, 1, 2, 3], [0, 0, 0, 1], [0.5, 0.0, 0.25, 9.0]
    columns = {"index": index, "group": group, "score": score, "selected": [True] * 3 + [False]}
    trace = TraceStep(stage=0, stage_name="rl", step=0, algorithm="mine", fields={}, episodes=columns)
    row = TraceRow(tokens=np.ones(2, np.int32), actions=np.int32([1]), turn=np.int32([0]), columns={})
    episode = TraceEpisode(
        index=0, group=0, example={}, messages=[], score=0.5, reward_components={}, baseline=0.125, terminated=True,
        error="", version=0, selected=True, turns=[TraceTurn(text="a")], rows=[row],
    )  # fmt: skip
    scores = explanation(trace, episode)["scores"]
    assert scores["R, the score of this answer"] == 0.5 and scores["mean score of its group"] == 0.25
    assert scores["standard deviation of the group's scores"] == 0.25
    assert scores["mean score of the other answers of its group"] == fmean(score[1:3]) == 0.125
    assert scores["mean score of the step"] == 0.25 and scores["score of the greedy answer to the same prompt"] == 0.125


TEXTS: list[tuple[str, dict[str, Any], dict[str, str]]] = [  # what the page says, word by word from beside the code
    ("grpo", {}, {"policy": "-min(r A, clip(r, 1 - low, 1 + high) A)", "A": "R less the mean of the group's scores"}),
    ("grpo", {"preset": "cispo", **KL}, {"policy": "-clip(sg(r), 1 - low, 1 + high) A log pi", "kl": "beta r k3: exp"}),
    ("grpo", {"preset": "gfpo"}, {"A": "Some answers of each group train"}),
    ("grpo", {"preset": "icepop"}, {"correction": "A ratio outside of the bounds weighs 0"}),
    ("grpo", {"preset": "top_entropy"}, {"tokens": "Those of the largest entropy train"}),
    ("replay", {}, {"loss": "GRPO's loss with r_t", "policy": "-min(r A", "correction": "The ratio compares with"}),
    ("ppo", {"entropy_coefficient": 0.01}, {"loss": "Proximal policy", "entropy": "-entropy_coefficient H"}),
    ("a2c", {"kl_coefficient": 0.1}, {"loss": "Advantage actor-critic", "rewards and R": "less beta k1: log p"}),
    ("reinforce_stable", KL, {"loss": "REINFORCE with clamped returns"}),
    ("online_dpo", {}, {"loss": "DPO whose pairs", "preference": "loss = mean over pairs of l(h)"}),
]


@pytest.mark.parametrize(("name", "fields", "texts"), TEXTS)
def test_the_formulas_are_those_beside_the_code(name: str, fields: dict[str, Any], texts: dict[str, str]) -> None:
    formulas = made(name, fields).formulas
    for key, text in texts.items():
        assert formulas[key].startswith(text)
    assert formulas.keys() == texts.keys() | ({"policy", "A"} if name in ("grpo", "replay") else set())
    assert not any("Example" in text for text in formulas.values())


def test_every_algorithm_that_is_built_in_says_what_it_computes() -> None:
    for name in registry.BUILTIN["algorithm"]:
        kind = registry.get("algorithm", name)
        assert kind.formulas.fget(kind(**({"teacher": "a"} if "teacher" in kind.__dataclass_fields__ else {})))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_users_own_algorithm_has_its_formula_and_its_pushes(tmp_path: Path) -> None:
    """The one of docs/extending.md. At a ratio of 1 its gate has the slope 4 / 4, so a token's push is weight * A."""
    plugin = tmp_path / "my_algorithm.py"
    plugin.write_text(SNIPPETS["my_algorithm.py"][2])
    changes: dict[str, Any] = {"plugins": [str(plugin)], "rewards": {"regex": {"pattern": "[0-9]"}}}
    algorithm = {"name": "soft_grpo", "group_size": 4, "sharpness": 2.0}
    folder = runs.run(tmp_path / "run", algorithm=algorithm, steps=1, logs={"traces": "all"}, **changes)
    table = read_step(folder, 0, 0)
    trained = [n for n in table.episodes["index"] if "logprobs" in read_episode(folder, 0, 0, n).rows[0].columns]
    assert trained
    (run,) = open_runs([folder])
    for index in trained:
        answer = answer_tree(run, Moment("train", 0, 0), index)
        explained, columns = answer["explanation"], answer["rows"][0]["columns"]
        assert explained["formulas"]["loss"] == "A sigmoid gate in place of the clip (after SAPO, arXiv 2511.20347)."
        assert explained["formulas"]["A"].startswith("R less the mean of the group's scores")
        assert explained["terms"] == ["policy"] and explained["note"] == ""
        expected = np.array(columns["weight/policy"]) * np.array(columns["advantages"])
        assert columns["push/policy"] == pytest.approx(expected, rel=1e-6) and expected.any()
        assert explained["rows"][0]["push"] == columns["push/policy"]
        assert "push" in [name for name, _ in answer_screen([run], 0, 0, 0, index).colours]


def test_a_run_of_an_earlier_version_says_what_it_lacks() -> None:
    columns = {"index": [0], "group": [0], "score": [1.0], "selected": [True]}
    trace = TraceStep(stage=0, stage_name="rl", step=0, algorithm="grpo", fields={}, episodes=columns)
    numbers = {name: np.ones(1, np.float32) for name in ("advantages", "loss/policy", "weight/policy")}
    row = TraceRow(tokens=np.ones(2, np.int32), actions=np.int32([1]), turn=np.int32([0]), columns=numbers)
    episode = TraceEpisode(
        index=0, group=0, example={}, messages=[], score=1.0, reward_components={}, baseline=None, terminated=True,
        error="", version=0, selected=True, turns=[TraceTurn(text="a")], rows=[row],
    )  # fmt: skip
    explained = explanation(trace, episode)
    assert explained["note"].startswith("This run was recorded by an earlier lmgym") and explained["rows"] == [{}]
