"""Answers in chunks (`engine.chunk`): which weights sample which token goes by count, and nothing else changes."""

import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.batch import PolicyOutputs, collate
from lmgym.config.build import build_config
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.inference.base import PAUSED, Completion, Request, Sampling
from lmgym.inference.in_process import make_engine
from lmgym.inference.kinds import EngineSection
from lmgym.inference.sampler import Sampler
from lmgym.logs.traces.trace import read_episode
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.training.checkpoints import manifest
from lmgym.training.loop import begin_step, gather, stages_left
from lmgym.training.setup import start
from lmgym.types import Turn
from lmgym.updates.prepare import prepare
from tests import models, rounding, runs
from tests.parity.test_ahead import CAPPED, CHANGES, UNIT, assert_stopping_changes_nothing
from tests.parity.test_pool import RECIPE, Killing
from tests.parity.test_ranks import launched
from tests.parity.test_resume import Interrupting
from tests.parity.test_sampler import PROMPTS, policy_of, requests
from tests.ranks import Group
from tests.runs import Shell, assert_equal_runs
from tests.torture.ranks import newest_step

pytestmark = [pytest.mark.slow, pytest.mark.processes]
AHEAD, CHUNK, STEPS = 3, 4, 6
CHANGES = {**CHANGES, "sampling": {"max_new_tokens": 14}, "logs": {"rollouts": "all"}}  # longer than three chunks
TWO = {"prompts_per_step": 2}
STOPS = tuple(range(50, 70))


def engine(**changes: Any) -> dict[str, Any]:
    """The engine of one process, which samples its chunks before it updates."""
    return {"name": "sampler", "unit": UNIT, "ahead": AHEAD, "chunk": CHUNK, **changes}


def answers(run: Path) -> list[tuple[int, int, dict[str, Any]]]:
    """Of each answer of the training steps: its step, the version that it began with, and its turn."""
    lines = [line for line in runs.records(run / "rollouts.jsonl") if line["kind"] == "train"]
    return [(line["step"], line["version"], turn) for line in lines for turn in line["turns"]]


def versions(version: int, turn: dict[str, Any]) -> list[int]:
    """The version of each token."""
    parts = turn.get("versions", [[version, len(turn["action_ids"])]])
    return [own for own, count in parts for _ in range(count)]


def in_parts(sampler: Any, asked: list[Request], sampling: Sampling, lengths: list[int]) -> list[Completion]:
    """Sample with a pause at each of these lengths."""
    found = [Completion([], [], PAUSED) for _ in asked]
    for pause in [*lengths, None]:
        left = [n for n, one in enumerate(found) if one.stop == PAUSED and len(one.ids) < (pause or 10**6)]
        begun = [replace(asked[n], begun=tuple(found[n].ids), pause=pause) for n in left]
        for n, more in zip(left, sampler.generate(begun, sampling), strict=True):
            assert more.stop == PAUSED or len(more.ids) + len(found[n].ids) <= sampling.max_new_tokens
            kept = [one.kept for one in (found[n], more) if one.kept is not None]
            assert all(part.shape[1] == kept[0].shape[1] for part in kept)
            found[n] = Completion(
                found[n].ids + more.ids,
                found[n].logprobs + more.logprobs,
                more.stop,
                np.concatenate(kept) if kept else None,
            )
    return found


def assert_equal_answers(policy: Policy, one: list[Completion], other: list[Completion]) -> None:
    """Equal tokens and ends, and log-probabilities but for rounding: those of a prompt are added in another order."""
    assert [(a.ids, a.stop) for a in one] == [(b.ids, b.stop) for b in other]
    for a, b in zip(one, other, strict=True):
        assert np.abs(np.subtract(a.logprobs, b.logprobs)).max() <= rounding.tolerance(policy.model, a.logprobs)
        assert (a.kept is None) == (b.kept is None) and (a.kept is None or np.array_equal(a.kept, b.kept))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=20, stop_ids=STOPS),
        Sampling(max_new_tokens=20, stop_ids=STOPS, min_new_tokens=9, temperature=1.3, top_p=0.99),
    ],
)
def test_an_answer_in_parts_is_the_answer_in_one(fast: bool, sampling: Sampling) -> None:
    """With weights that do not change. Some answers end before the last pause, others after it."""
    policy, asked = models.exact(policy_of(fast=fast)), requests(24)
    whole = Sampler(policy).generate(asked, sampling)
    lengths = [len(answer.ids) for answer in whole]
    assert min(lengths) < 11 < max(lengths)
    assert_equal_answers(policy, whole, in_parts(Sampler(policy, rows=5), asked, sampling, [1, 4, 11]))
    said: list[tuple[int, list[int]]] = []
    units = make_engine(EngineSection(unit=4), policy)
    begun = [replace(request, begun=tuple(answer.ids[:3])) for request, answer in zip(asked, whole, strict=True)]
    pause = 5 + sampling.min_new_tokens  # some of them end before it, and some do not
    begun = [replace(one, pause=pause) for one in begun if len(one.begun) == 3]
    units.generate(begun, sampling, ended=lambda n, ids: said.append((n, ids)))
    assert all(len(ids) <= pause and ids[:3] == [*begun[n].begun] for n, ids in said)
    assert 0 < len(said) < len(begun)


def test_a_stop_string_across_a_pause_ends_the_answer() -> None:
    """The token that completes it may come in another call than its beginning."""
    section = PolicySection(model="builtin:tiny", device="cpu", architecture=runs.ARCHITECTURE)
    policy = models.exact(load_policy(section))
    asked, sampling = [Request(PROMPTS[0], seeds.key(0, n)) for n in range(8)], Sampling(max_new_tokens=12)
    free = Sampler(policy).generate(asked, sampling)
    text = policy.tokenizer.decode(free[0].ids[3:5])
    sampling = replace(sampling, stop=(text,))
    whole = Sampler(policy).generate(asked, sampling)
    assert whole[0].stop == "stop" and len(whole[0].ids) <= 5
    assert_equal_answers(policy, whole, in_parts(Sampler(policy), asked, sampling, [4, 7]))


def test_an_encoder_decoder_goes_on_too() -> None:
    policy = models.exact(load_policy(PolicySection(model="builtin:tiny_t5", device="cpu")))
    start = policy.decoder_start
    asked = [Request(start, seeds.key(3, n), source_ids=tuple(range(5, 9 + n % 3))) for n in range(6)]
    sampling = Sampling(max_new_tokens=10)
    whole = Sampler(policy).generate(asked, sampling)
    assert_equal_answers(policy, whole, in_parts(Sampler(policy), asked, sampling, [2, 5]))


def test_the_plan_names_the_weights_of_each_token(tmp_path: Path) -> None:
    """Token t of an answer of step s: the weights after max(0, min(s - K + t // C, s - 1)) updates."""
    run = runs.run(tmp_path / "run", engine=engine(), **CHANGES)
    lengths, seen = set(), set()
    for step, version, turn in answers(run):
        count = len(turn["action_ids"])
        planned = [max(0, min(step - AHEAD + place // CHUNK, step - 1)) for place in range(count)]
        assert versions(version, turn) == planned
        assert len(turn["logprobs"]) == count <= 14
        lengths.add(count)
        seen.add(len(set(planned)))
    assert max(lengths) == 14 and seen == {1, 2, 3}  # the last part is longer than a chunk, since its step waits for it
    lags = [record for record in runs.records(run / "metrics.jsonl") if record["kind"] == "train"]
    own = [(version, turn, record) for record in lags for step, version, turn in answers(run) if step == record["step"]]
    for record in lags[3:]:
        here = [(version, turn) for version, turn, other in own if other is record]
        each = [np.mean([record["step"] - one for one in versions(version, turn)]) for version, turn in here]
        assert record["version_lag"] == pytest.approx(np.mean(each), rel=1e-12)
        assert (record["version_lag/least"], record["version_lag/most"]) == (1, 3)
        assert record["continued"] == np.mean(["versions" in turn for _, turn in here])
    traced = next(n for n, (step, _, turn) in enumerate(answers(run)) if step == 4 and "versions" in turn)
    step, version, turn = answers(run)[traced]
    row = read_episode(run, 0, step, traced - step * 16).rows[0]
    assert row.columns["version"].tolist() == versions(version, turn)
    assert not (runs.newest(run) / "ahead.json").exists()


def test_lengths_are_those_of_a_run_without(tmp_path: Path) -> None:
    """With weights that do not change, every step learns from the very answers that it would have had: no short one is
    preferred, and none is dropped."""
    frozen = {**CHANGES, "optimizer": {"learning_rate": 0.0}}
    one, other = (
        runs.run(tmp_path / name, engine=own, **frozen) for name, own in (("one", {"unit": UNIT}), ("other", engine()))
    )
    ids = [[(step, turn["action_ids"], turn["stop"]) for step, _, turn in answers(run)] for run in (one, other)]
    assert ids[0] == ids[1] and len({len(own) for _, own, _ in ids[0]}) > 5
    assert any("versions" in turn for *_, turn in answers(other))


def test_the_correction_reads_what_each_token_was_sampled_with(tmp_path: Path) -> None:
    """Each token's weight is its probability now over the one when it was sampled, whoever sampled the others."""
    halves = runs.run(tmp_path / "run", Interrupting(at=4), engine=engine(), **CHANGES)
    with start(build_config(runs.tiny(out=str(halves), engine=engine(), **CHANGES))) as run:
        stage = next(stages_left(run))
        begin_step(stage, 4)
        episodes = gather(stage, 4)
        chosen = next(one for one in episodes if len(one.turns[0].versions) == 3)
        [turn] = chosen.turns
        batch = collate([chosen], run.policy.pad_id, stop_ids=sorted(run.policy.stop_ids))
        # 1. The batch has the log-probabilities of the sampling moment: those of each part's own weights.
        assert batch.require("logprobs_sampler")[batch.actions].tolist() == np.float32(turn.logprobs).tolist()
        for version, begin, end in ((1, 0, 4), (2, 4, 8), (3, 8, len(turn.action_ids))):
            saved = halves / "checkpoints" / f"stage-0-step-{version:06d}"
            then = load_policy(PolicySection(model=str(saved), device="cpu"))
            scored = then.compute_logprobs_no_grad(batch).logprobs[batch.actions]
            allowed = rounding.tolerance(then.model, turn.logprobs)
            assert (
                scored[begin:end] - batch.require("logprobs_sampler")[batch.actions][begin:end]
            ).abs().max() <= allowed
        # 2. `prepare` makes the old policy's, at which the ratio is cut, of the weights now (a single optimizer step
        # would take them from its own pass).
        assert isinstance(stage.algorithm, GRPO)
        algorithm = replace(stage.algorithm, epochs=2)
        batch = prepare(batch, run.policy, {}, algorithm)
        now = run.policy.compute_logprobs_no_grad(batch).logprobs
        assert torch.equal(batch.require("logprobs_old"), now)  # the same pass
        weight = (now - batch.require("logprobs_sampler"))[batch.actions].exp()
        assert len(weight) == len(turn.action_ids) and not bool((weight == 1).all())
        # 3. That is what the correction weighs.
        weighed, _ = algorithm.correction.weight(batch, PolicyOutputs(now))
        assert isinstance(weighed, torch.Tensor)
        assert torch.equal(weighed[batch.actions], weight.clamp(max=CAPPED["correction"]["cap"]))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("workers", [1, 3])
def test_a_pool_is_the_process_that_samples_in_turn(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a generator is lost in the middle."""
    one = runs.run(tmp_path / "one", engine=engine(), **CHANGES)
    killing = Killing(monkeypatch, pushes=(3,))
    pool = engine(name="pool", workers=workers, threads=1)
    assert_equal_runs(one, runs.run(tmp_path / "pool", engine=pool, **CHANGES), but=RECIPE)
    assert killing.kills == 1


def test_a_stopped_run_goes_on_in_the_middle_of_answers(tmp_path: Path) -> None:
    """Twice, with the kept sets of top_k, and bit for bit."""
    changes = {**CHANGES, "sampling": {"max_new_tokens": 14, "top_k": 20}}
    one = runs.run(tmp_path / "one", engine=engine(), **changes)
    halves = runs.run(tmp_path / "halves", Interrupting(at=2), engine=engine(), **changes)
    kept = json.loads((runs.newest(halves) / "ahead.json").read_text())
    assert [draw["step"] for draw in kept["draws"]] == [2] and [step["step"] for step in kept["begun"]] == [3, 4]
    turns = [Turn.from_json(tree) for step in kept["begun"] for tree in step["answers"].values()]
    assert {len(turn.action_ids) for turn in turns if turn.stop == PAUSED} == {4, 8}
    runs.run(halves, Interrupting(at=4), engine=engine(), **changes)
    runs.run(halves, engine=engine(), **changes)
    assert_equal_runs(one, halves)


def test_unfinished_answers_that_are_none_are_named(tmp_path: Path) -> None:
    halves = runs.run(tmp_path / "halves", Interrupting(at=2), engine=engine(), **CHANGES, **TWO)
    kept = runs.newest(halves) / "ahead.json"
    whole = json.loads(kept.read_text())
    for begun in (5, [7], [{"step": 3, "version": 0, "answers": {"a": {}}}], [{"step": 3, "answers": {}}]):
        kept.write_text(json.dumps(whole | {"begun": begun}))
        manifest.write(kept.parent)
        with pytest.raises(
            LmgymError, match=r"ahead\.json holds no answers of a step \((Key|Type|Value|Attribute)Error"
        ):
            runs.run(halves, engine=engine(), **CHANGES, **TWO)


@pytest.mark.parametrize(
    ("before", "now"), [({}, {"chunk": 6}), ({}, {"ahead": 2}), ({"chunk": None}, {}), ({}, {"chunk": None})]
)
def test_another_plan_goes_on_with_what_is_there(before: dict[str, Any], now: dict[str, Any], tmp_path: Path) -> None:
    """Longer chunks, fewer steps ahead, or chunks where there were none: all answers go on. Without chunks from here
    on, those that are not complete are sampled again."""
    run = runs.run(tmp_path / "run", Interrupting(at=2), engine=engine(**before), **CHANGES, **TWO)
    kept = json.loads((runs.newest(run) / "ahead.json").read_text())
    runs.run(run, engine=engine(**now), **CHANGES, **TWO)
    found = [(step, turn["action_ids"]) for step, _, turn in answers(run)]
    assert len(found) == STEPS * 8
    for draw in kept["draws"]:
        then = [one["turns"][0]["action_ids"] for own in draw["episodes"].values() for one in own]
        assert [ids for step, ids in found if step == draw["step"]] == then
    for begun in kept.get("begun", []):
        own = [ids for step, ids in found if step == begun["step"]]
        then = [Turn.from_json(tree).action_ids for tree in begun["answers"].values()]
        goes_on = all(any(ids[: len(one)] == one for ids in own) for one in then)
        assert goes_on == (now != {"chunk": None})


def test_further_draws_are_whole_and_of_the_newest_weights(tmp_path: Path) -> None:
    changes = {
        **CHANGES,
        "algorithm": {**CAPPED, "name": "dapo"},
        "max_draws": 4,
        "rewards": {"regex": {"pattern": "[0-9]"}},
    }
    run = runs.run(tmp_path / "run", engine=engine(), **changes)
    newest = [turn for step, version, turn in answers(run) if version == step > 0]
    assert newest and not any("versions" in turn for turn in newest)


def test_killed_at_random_it_ends_as_if_nothing_had_happened(shell: Shell, tmp_path: Path) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", engine=engine(), **CHANGES, **TWO, steps=10)
    whole, killed, moments = tmp_path / "whole", tmp_path / "killed", random.Random(0)
    assert shell.run("train", recipe, f"out={whole}") == 0, shell.said
    for _ in range(2):
        shell.start("train", recipe, f"out={killed}")
        goal = newest_step(killed) + moments.randint(1, 4)
        while newest_step(killed) < min(goal, 8) and Path(f"/proc/{shell.process}/exe").exists():
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.1))
        os.kill(shell.process, signal.SIGKILL)
        assert shell.wait() == -signal.SIGKILL, shell.said
    assert shell.run("train", recipe, f"out={killed}") == 0, shell.said
    assert_equal_runs(whole, killed)


def test_two_ranks_stop_and_go_on(group: Group, tmp_path: Path) -> None:
    """Each has sampled its share of the chunks; all of it is in the checkpoint."""
    whole = launched(group, tmp_path / "whole", engine=engine(), **CHANGES)
    assert_stopping_changes_nothing(group, whole)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"engine": {"ahead": 1, "chunk": 4}},
            r"engine\.chunk is 4, and engine\.ahead is 1: .* write ahead: 2 or more",
        ),
        ({"engine": {"ahead": 2, "chunk": 0}}, r"engine\.chunk.* 0"),
        (
            {"engine": {"ahead": 2, "chunk": 4}, "env": {"name": "guess_number"}, "task": None, "rewards": {}},
            r"engine\.chunk: stage 'train' has environment 'guess_number', and only an answer to a task's prompt",
        ),
        (
            {"engine": {"name": "vllm", "address": "http://127.0.0.1:8000", "ahead": 1, "chunk": 4}},
            r"engine\.chunk: vllm does not go on with answers that other weights have begun",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        build_config(runs.tiny(algorithm=CAPPED, **changes))
