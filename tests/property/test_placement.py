"""Where environments run if the recipe does not say; many answered at once; a past that is cut begins a new row."""

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from lmgym.batch import collate
from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.envs.env_processes import EnvProcesses
from lmgym.envs.past import Past
from lmgym.envs.placement import WORKERS, make_envs, unguarded_sentence, workers_of
from lmgym.envs.vector import EnvFailure, InProcess
from lmgym.inference.base import Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.load import load_policy
from lmgym.models.policy_section import PolicySection
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.rollout import collect
from lmgym.text.chat import prompt_ids
from lmgym.types import Example
from tests import runs
from tests.property.patient_environments import Batched, BatchedLater

PATIENT = "tests.property.patient_environments"


@pytest.mark.parametrize(
    ("env", "workers"),
    [
        ({"name": "single_turn"}, 0),
        ({"name": "gymnasium", "id": "Blackjack-v1"}, 2),
        ({"name": "gymnasium", "id": "Blackjack-v1", "workers": 0}, 0),
        ({"name": f"{PATIENT}:Waiting"}, WORKERS),
        ({"name": f"{PATIENT}:Waiting", "workers": 3}, 3),
        ({"name": f"{PATIENT}:WaitingTogether"}, 0),
        ({"name": f"{PATIENT}:Batched"}, 0),
        ({"name": f"{__name__}:Thinker"}, 0),  # this module imports torch
        ({"name": "conversation"}, 0),
        ({"name": "conversation", "tools": ["calculator"]}, 0),
        ({"name": "conversation", "tools": [f"{PATIENT}:lookup"]}, WORKERS),
        ({"name": "conversation", "tools": [f"{PATIENT}:lookup_later"]}, 0),
        ({"name": "conversation", "tools": ["calculator", f"{PATIENT}:lookup", f"{PATIENT}:lookup_later"]}, WORKERS),
    ],
)
def test_where_environments_run(env: dict[str, Any], workers: int) -> None:
    assert workers_of(env)[0] == workers
    made = make_envs(env)
    assert isinstance(made, EnvProcesses if workers else InProcess)
    made.close()


def test_what_is_said_of_one_that_stays() -> None:
    assert "since its module imports a library of models, one after" in unguarded_sentence(
        {"name": f"{__name__}:Thinker"}
    )
    for name in ("Waiting", "WaitingTogether", "Batched"):
        assert not unguarded_sentence({"name": f"{PATIENT}:{name}"})


def test_an_environment_of_ones_own_runs_elsewhere() -> None:
    envs = make_envs({"name": f"{PATIENT}:Waiting"})
    try:
        envs.begin([(number, Example(str(number), "?"), 0) for number in range(4)])
        steps = envs.step([(number, "a", "eos") for number in range(4)])
        processes = {step.info["process"] for step in steps if isinstance(step, Step)}
        assert len(processes) == 4 and os.getpid() not in processes
    finally:
        envs.close()


@pytest.mark.parametrize("kind", [Batched, BatchedLater])
def test_many_are_answered_at_once(kind: Any) -> None:
    envs, alone, places = InProcess(kind), InProcess(kind), range(3)
    items = [(number, Example(str(number), "?"), 0) for number in places]
    envs.begin(items)
    alone.begin(items)
    Batched.calls.clear()
    together = envs.step([(number, f"text {number}", "eos") for number in places])
    assert kind is BatchedLater or Batched.calls == [3]
    assert together == [alone.step([(number, f"text {number}", "eos")])[0] for number in places]
    assert set(envs.spent) == {0, 1, 2}


def test_a_batch_that_fails_costs_its_episodes() -> None:
    envs = InProcess(Batched)
    envs.begin([(number, Example(str(number), "?"), 0) for number in range(2)])
    answers = envs.step([(0, "a", "eos"), (1, "fail", "eos")])
    assert all(isinstance(one, EnvFailure) and "the server is gone" in one.message for one in answers)


def test_a_batch_of_another_size_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batched, "step_batch", classmethod(lambda cls, envs, texts, stops: []))
    envs = InProcess(Batched)
    envs.begin([(0, Example("0", "?"), 0)])
    with pytest.raises(LmgymError, match="step_batch returned 0 steps for 1 environments"):
        envs.step([(0, "a", "eos")])


def test_a_coroutine_has_a_limit_of_time() -> None:
    envs = make_envs({"name": f"{PATIENT}:WaitingTogether", "seconds": 0.2})
    envs.begin([(number, Example(str(number), "?"), 0) for number in range(2)])
    hung, other = envs.step([(0, "hang", "eos"), (1, "go", "eos")])
    assert hung == EnvFailure("the environment did not answer within 0.2 s") and isinstance(other, Step)


class Thinker:
    """Goes on for four turns."""

    needs_data = False

    def reset(self, example: Example, seed: int) -> str:
        self.turns = 0
        return "begin"

    def step(self, text: str, stop: str) -> Step:
        self.turns += 1
        if self.turns == 4:
            return Step(reward=1.0, terminated=True)
        return Step([{"role": "user", "content": f"turn {self.turns}"}])


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def test_what_is_cut() -> None:
    whole = said("q", "<think>a</think>A", "1", "B", "2", "<think>c", "3", "d</think>D", "4")
    assert Past().cut(whole, 1) == whole
    assert Past(window=2).cut(whole, 1) == [whole[0], *whole[5:]]
    assert Past(window=4).cut(whole, 1) == whole
    assert [one["content"] for one in Past(thoughts="drop").cut(whole, 1)] == [*"qA1B2", "", "3", "D", "4"]
    shots = said("shot", "<think>why</think>answer", "q")  # of the first prompt nothing is lost
    assert Past(window=1, thoughts="drop").cut([*shots, *whole[1:]], 3)[:3] == shots


PIECES = some.lists(some.sampled_from(["<think>", "</think>", " ", "a", "\n", "<thi", "nk>"]), max_size=12)


@given(PIECES.map("".join))
def test_thoughts_are_what_their_plain_pattern_says(text: str) -> None:
    behind = text.rpartition("</think>")[2].lstrip() if "</think>" in text.partition("<think>")[0] else text
    plain = re.sub(r"<think>.*?</think>\s*", "", behind, flags=re.DOTALL).partition("<think>")[0]
    assert Past(thoughts="drop").cut(said("q", text), 1)[1]["content"] == plain


def test_thoughts_without_an_end_are_cut_in_linear_time() -> None:
    """The plain pattern would take hours."""
    text = "<think>a</think>b" + "<think>" * 500_000
    assert Past(thoughts="drop").cut(said("q", text), 1)[1]["content"] == "b"


@pytest.mark.parametrize("past", [Past(), Past(window=1), Past(window=2), Past(thoughts="drop")])
def test_a_past_that_is_cut_begins_a_new_row(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled tokens are scored tokens, and a row's prompt is what the template makes of the messages that are left."""
    architecture = runs.ARCHITECTURE | {"max_position_embeddings": 512}
    policy = load_policy(PolicySection(model="builtin:tiny", device="cpu", architecture=architecture), seed=0)
    actor = Actor(Sampler(policy), policy.tokenizer)
    thought = "<think>x</think>y" if past.thoughts == "drop" else ""
    if thought:  # the texts that the policy is taken to have written; its tokens stay as sampled
        monkeypatch.setattr("lmgym.rollouts.rollout.decode", lambda tokenizer, ids: thought)
    envs = InProcess(Thinker)
    envs.past = past  # type: ignore[attr-defined]
    episodes = collect([(0, Example("a", "?"))] * 2, actor, Sampling(max_new_tokens=5), (0,), envs)
    for episode in episodes:
        turns, rows = episode.turns, episode.rows()
        assert (
            [len(row) for row in rows] == {None: [4], 1: [2, 1, 1], 2: [3, 1]}[past.window] if not thought else [1] * 4
        )
        texts = [thought or turn.text for turn in turns]
        whole = said("begin", texts[0], "turn 1", texts[1], "turn 2", texts[2], "turn 3")
        assert list(episode.messages) == [*whole, {"role": "assistant", "content": texts[3]}], "nothing is lost there"
        for number, row in enumerate(rows[1:], start=len(rows[0])):
            kept = past.cut(whole[: 2 * number + 1], 1)
            if past.window == 1:
                assert len(kept) == 3
            assert row[0].restart and row[0].prompt_ids == prompt_ids(policy.tokenizer, kept)
    batch = collate(episodes, policy.pad_id)
    scored = policy.compute_logprobs_no_grad(batch).logprobs
    sampled = batch.require("logprobs_sampler")
    assert torch.allclose(scored[batch.actions], sampled[batch.actions], atol=1e-4)


def test_a_run_with_a_window(tmp_path: Path) -> None:
    changes = {"env": {"name": f"{__name__}:Thinker", "window": 1}, "rewards": None, "task": "episodes", "steps": 2}
    runs.run(tmp_path / "run", **changes)
    records = [one for one in runs.records(tmp_path / "run/metrics.jsonl") if one["kind"] == "train"]
    assert all(one["turns/mean"] == 4 and math.isfinite(one["gradient_norm"]) for one in records)


@pytest.mark.parametrize(
    ("keys", "said"),
    [({"window": 0}, "env.window is 0; it is a number of turns"), ({"thoughts": "lose"}, "env.thoughts"),
     ({"workers": 0, "seconds": 5}, "env.seconds' limits calls in other processes")],
)  # fmt: skip
def test_what_is_refused(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=said):
        runs.run(tmp_path / "run", env={"name": f"{PATIENT}:Waiting", **keys}, task="episodes", rewards=None)
