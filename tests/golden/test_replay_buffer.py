"""Single turns that `reinforce_stable` replays, and the file of a buffer."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import tensor

from lmgym.algorithms.reinforce_stable import ReinforceStable, count_turns, newest_groups, single_turn
from lmgym.algorithms.replay import Replay
from lmgym.algorithms.replay_buffer import read_buffer, write_buffer
from lmgym.batch import collate
from lmgym.core.errors import LmgymError
from lmgym.models.policy import Policy
from lmgym.types import Episode, Example, Turn
from tests import models, runs
from tests.models import loss_of
from tests.parity.test_resume import Interrupting
from tests.runs import assert_equal_runs


def lines(*rewards: float, group: int = 0, version: int = 0, restart: bool = False) -> Episode:
    """An episode of turns of one token each: [9, 9] -> [50], [8] -> [51], [8] -> [52] ..."""
    turns = [
        Turn([8] if n else [9, 9], [50 + n], [-1.0 - n], reward=reward, restart=restart and n > 0)
        for n, reward in enumerate(rewards)
    ]
    return Episode(Example(f"x/{group}", "?"), group, group, turns, version=version, score=sum(rewards))


def step(algorithm: Replay | ReinforceStable, version: int, *episodes: Episode) -> list[Episode]:
    """What a step with these episodes replays."""
    groups = [[replace(episode, version=version)] for episode in episodes]
    selected, more = algorithm.select(groups, len(groups))
    assert not more and selected[: len(groups)] == groups
    algorithm.after_update(SimpleNamespace(step=version + 1, path=(0, "stage", 0), refresh=lambda name: None))
    return [episode for group in selected[len(groups) :] for episode in group]


# Single turns


def test_a_turn_alone_has_its_past_as_prompt_and_its_return_as_reward() -> None:
    episode = lines(0.2, 0.4, 1.0)
    alone = [single_turn(episode, number, 0.9) for number in range(3)]  # returns of case 19 of the seed study
    assert [one.turns[0].prompt_ids for one in alone] == [[9, 9], [9, 9, 50, 8], [9, 9, 50, 8, 51, 8]]
    assert [one.turns[0].action_ids for one in alone] == [[50], [51], [52]]
    assert [one.score for one in alone] == pytest.approx([1.37, 1.3, 1.0])
    assert episode == lines(0.2, 0.4, 1.0)  # the buffer's own is as it was


def test_a_turn_that_began_a_row_has_no_past() -> None:
    alone = single_turn(lines(0.0, 1.0, restart=True), 1, 0.5)
    assert (alone.turns[0].prompt_ids, alone.turns[0].restart, len(alone.rows())) == ([8], False, 1)


def test_the_pieces_of_a_line_are_one_turn() -> None:
    """A calculator wrote [8] between [50] and [51]; the line is both, and the return of the next one is added."""
    episode = lines(0.0, 0.1, 1.0)
    episode.turns[0].unfinished = True
    assert count_turns(episode) == 2
    alone = single_turn(episode, 0, 0.5)
    assert [turn.prompt_ids for turn in alone.turns] == [[9, 9], [8]] and alone.score == pytest.approx(0.1 + 0.5)
    assert collate([alone]).turn.unique().tolist() == [0]


def test_all_turns_alone_have_the_gradient_of_the_episodes() -> None:
    """Sampled by the policy itself: the sums over turns are equal, and the means are over episodes or over turns."""
    policy = Policy(models.gpt2().double(), models.tokenizer(), torch.float64)
    episodes = models.episodes(7, restarts=True)
    for episode in episodes:
        for number, turn in enumerate(episode.turns):
            turn.reward = 0.1 * number + episode.index / 10
    with torch.no_grad():
        batch = models.batch_of(episodes)
        logprobs = policy.compute_logprobs(batch).logprobs
    sampled = iter(logprobs[batch.actions].tolist())
    for turn in (turn for episode in episodes for turn in episode.turns):
        turn.logprobs = [next(sampled) for _ in turn.action_ids]
    alone = [single_turn(episode, n, 0.9) for episode in episodes for n in range(count_turns(episode))]
    numbered = [replace(episode, index=index, group=index) for index, episode in enumerate(alone)]
    algorithm = ReinforceStable(gamma=0.9, kl_coefficient=0.0, replayed=1)
    gradients = []
    for several in (episodes, numbered):
        batch = models.batch_of(several)
        batch = batch.replace(logprobs_sampler=policy.compute_logprobs(batch).logprobs.detach())
        gradients.append(models.gradient(algorithm, policy, algorithm.advantages(batch), first=True)[0] * len(several))
    assert len(alone) > len(episodes) and float(gradients[0].norm()) > 0
    assert models.relative(*gradients) < 1e-6  # rewards are collated in fp32


def test_weights_are_the_ratio_to_the_sampler_cut_to_a_bound() -> None:
    """Ratios e and e^-1, returns 1: gradients -2 (cut from e) and -e^-1, over two episodes. The KL term alike."""
    batch = collate([lines(1.0), lines(1.0, group=1)])
    mu, now = tensor([[0, 0, -1.5], [0, 0, -0.5]]), tensor([[0, 0, -0.5], [0, 0, -1.5]]).requires_grad_()
    old = now.detach() + 5  # of the policy before the step: not read
    for beta, wanted in (
        (0.0, [-1.0, -math.exp(-1) / 2]),
        (0.5, [-1 + 0.5 * 0.2, -math.exp(-1) / 2 * (1 - 0.5 * 0.2)]),
    ):
        algorithm = ReinforceStable(kl_coefficient=beta, replayed=1, truncate=2.0)
        ready = algorithm.advantages(batch).replace(
            logprobs_sampler=mu, logprobs_old=old, logprobs_ref=now.detach() - 0.2
        )
        [gradient] = torch.autograd.grad(loss_of(algorithm, ready, now), now)
        assert gradient[:, 2].tolist() == pytest.approx(wanted)
    _, metrics = algorithm.loss(ready, models.PolicyOutputs(now))
    assert metrics["ratio/clipped"][:, 2].tolist() == [1.0, 0.0]


def test_steps_draw_turns_of_earlier_steps_none_twice_until_too_old() -> None:
    algorithm = ReinforceStable(replayed=4, capacity=8, max_age=2, gamma=0.5)
    assert step(algorithm, 0, lines(0.0, 1.0)) == []
    drawn = step(algorithm, 1, lines(0.0, 0.0, 1.0))
    assert [(one.version, one.score, len(one.turns)) for one in drawn] == [(0, 0.5, 1), (0, 1.0, 1)]
    drawn = step(algorithm, 2, lines(1.0))
    assert len(drawn) == 4 and len({(one.version, one.turns[0].action_ids[0]) for one in drawn}) == 4
    assert {one.version for one in step(algorithm, 3, lines(1.0))} == {1, 2}  # that of step 0 is 3 updates old


def test_the_oldest_groups_go_where_there_are_too_many_turns() -> None:
    groups = [[lines(*[0.0] * count, group=number)] for number, count in enumerate((3, 2, 2, 1))]
    assert [len(newest_groups(groups, capacity)) for capacity in (0, 1, 2, 3, 5, 7, 8, 99)] == [0, 1, 1, 2, 3, 3, 4, 4]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"replayed": 9, "capacity": 8}, r"capacity \(8\) turns; raise"),
        (
            {"replayed": 1, "baseline": "group", "group_size": 2},
            "algorithm.baseline is group, which needs the other answ",
        ),
        ({"replayed": 1, "kl_in": "reward"}, "algorithm.kl_in is reward, which needs the later turns of its episode"),
        ({"save_buffer": "x.jsonl"}, r"algorithm\.load_buffer and save_buffer are for replay; set algorithm\.replayed"),
        (
            {"replayed": 1, "save_buffer": "x", "load_buffer": "./x"},
            "algorithm.save_buffer is x, which load_buffer reads",
        ),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LmgymError, match=said):
        ReinforceStable(**fields)


# The file


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    kept = np.array([[255, 1]], np.uint8)
    group = [lines(0.1 + 0.2, 1 / 3), lines(1e-30)]
    group[0].turns[0].kept = kept
    write_buffer(tmp_path / "b.jsonl", [group, [lines(1.0)]])
    found = read_buffer(tmp_path / "b.jsonl", vocabulary=53)
    assert np.array_equal(found[0][0].turns[0].kept, kept)
    found[0][0].turns[0].kept = group[0].turns[0].kept = None
    assert found == [group, [lines(1.0)]]
    assert json.loads((tmp_path / "b.jsonl").read_text().splitlines()[0]) == {
        "format": "lmgym replay buffer", "version": 1, "groups": 2,
    }  # fmt: skip


HEADER = '{"format": "lmgym replay buffer", "version": 1, "groups": 1}\n'
NO_BUFFER = (
    r'b\.jsonl is no replay buffer of this version of lmgym: it must begin with the line {"format": "lmgym replay'
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"algorithm\.load_buffer: cannot read .*b\.jsonl: No such file"),
        ("", NO_BUFFER),
        ("\x80\x04", NO_BUFFER),
        ('{"prompt": "2+2="}\n', NO_BUFFER),
        (HEADER.replace("1,", "2,"), NO_BUFFER),
        (HEADER, r"b\.jsonl has 0 groups and should have 1: it is not whole"),
        (HEADER + "[]\n", r"b\.jsonl:2 is no group of episodes"),
        (HEADER + '[{"turns": []}]\n', r"b\.jsonl:2 is no group of episodes \(KeyError: 'example'\)"),
        (HEADER + "[1\n", r"b\.jsonl:2 is no group of episodes"),
    ],
)
def test_a_wrong_file_gets_one_sentence(content: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    with pytest.raises(LmgymError, match=said):
        ReinforceStable(replayed=1, load_buffer=str(path)).check_vocabulary(100)


def test_ids_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    write_buffer(path, [[lines(1.0, 1.0)]])
    Replay(group_size=2, load_buffer=str(path)).check_vocabulary(52)
    with pytest.raises(
        LmgymError, match=r"b\.jsonl:2 has the token 51, and the model's vocabulary has 51 tokens; load"
    ):
        Replay(group_size=2, load_buffer=str(path)).check_vocabulary(51)
    fresh = lines(1.0)
    fresh.turns[0].kept = np.array([[255]], np.uint8)
    with pytest.raises(
        LmgymError, match="this run's answers have kept sets, of truncated sampling, and its answers hav"
    ):
        step(ReinforceStable(replayed=1, load_buffer=str(path)), 0, fresh)


def test_loaded_groups_count_as_one_update_old(tmp_path: Path) -> None:
    path = str(tmp_path / "b.jsonl")
    algorithm = ReinforceStable(replayed=9, max_age=1, load_buffer=path)
    write_buffer(path, [[lines(1.0, version=70)]])
    assert [len(step(algorithm, version, lines(0.0))) for version in (4, 5, 6)] == [1, 1, 1]


CASES: dict[str, dict[str, Any]] = {
    "turns": {"algorithm": {"name": "reinforce_stable", "replayed": 5, "minibatches": 2, "group_size": 2}},
    "groups": {"algorithm": {"name": "replay", "replayed": 3, "group_size": 4}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_that_loads_and_saves_is_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Steps of stepwise episodes; the buffer of one run is what the next begins with, and either file is the same."""
    algorithm, seed_file = CASES[name]["algorithm"], str(tmp_path / "seed.jsonl")
    env = {"name": "stepwise", "max_steps": 3} if name == "turns" else None
    runs.run(tmp_path / "before", algorithm={**algorithm, "save_buffer": seed_file}, env=env, steps=2)
    assert read_buffer(seed_file)

    def changes(save: str) -> dict[str, Any]:
        files = {"load_buffer": seed_file, "save_buffer": str(tmp_path / save)}
        return {"algorithm": {**algorithm, **files}, "env": env, "seed": 1}

    whole = runs.run(tmp_path / "whole", **changes("buffer.jsonl"))
    wanted = (tmp_path / "buffer.jsonl").read_bytes()
    halves = runs.run(tmp_path / "halves", Interrupting(at=3), **changes("buffer.jsonl"))
    runs.run(halves, **changes("buffer.jsonl"))
    assert_equal_runs(whole, halves)
    assert (tmp_path / "buffer.jsonl").read_bytes() == wanted
    other = runs.run(tmp_path / "other", algorithm=algorithm, env=env, seed=1)
    [first, *_] = (record for record in runs.records(whole / "metrics.jsonl") if record["kind"] == "train")
    [without, *_] = (record for record in runs.records(other / "metrics.jsonl") if record["kind"] == "train")
    assert first["reward"] == without["reward"] and first["gradient_norm"] != without["gradient_norm"]
