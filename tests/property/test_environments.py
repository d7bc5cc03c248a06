"""Rollouts of environments: what is sampled is what trains, each environment has its own fate, and how many run side by
side, and where, changes nothing."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmgym.batch import Batch, collate
from lmgym.core import registry
from lmgym.core.constraints import LARGEST_REWARD
from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.envs.env_processes import EnvProcesses
from lmgym.envs.placement import unguarded_sentence
from lmgym.envs.step_checks import LONGEST_OBSERVATION, check_step
from lmgym.envs.vector import EnvFailure, InProcess, Opening, opening_of
from lmgym.inference.base import Sampling
from lmgym.inference.sampler import Sampler
from lmgym.logs.records import episode_metrics, read_records, rollout_record
from lmgym.logs.writer import Writer
from lmgym.models.policy import Policy
from lmgym.rollouts.evaluate import measured, noted
from lmgym.rollouts.rollout import Actor, collect, demonstrate
from lmgym.types import Episode, Example, Message
from tests import models, rounding
from tests.property.failing_environments import Arrays, Failing, Moody

pytestmark = pytest.mark.processes

PLUGIN = "tests.property.failing_environments"


def policy() -> Policy:
    model = models.sharpen(models.llama(max_position_embeddings=512), 0.12)
    return models.exact(Policy(model, models.byte_tokenizer()))


def played(rows: int, envs: Any, count: int = 16, **sampling: Any) -> list[Episode]:
    one = policy()
    prompts = [(place // 2, Example(f"x/{place // 2}", f"Question {place // 2}:")) for place in range(count)]
    actor = Actor(Sampler(one, rows), one.tokenizer)
    return collect(prompts, actor, Sampling(max_new_tokens=5, **sampling), (0, "moods"), envs)


def essence(episodes: Sequence[Episode]) -> list[Any]:
    """Everything but the log-probabilities, whose last digits depend on who sits beside whom."""
    return [
        [(t.prompt_ids, t.action_ids, t.reward, t.restart, t.unfinished, t.continuation, t.stop) for t in e.turns]
        + [e.terminated, e.score, e.error]
        for e in episodes
    ]


@pytest.fixture(scope="module")
def workers() -> Iterator[EnvProcesses]:
    envs = EnvProcesses("moody", plugins=[PLUGIN], count=2)
    yield envs
    envs.close()


@pytest.mark.slow
def test_neither_the_number_side_by_side_nor_the_process_matters(workers: EnvProcesses) -> None:
    wanted = essence(played(64, Moody))
    assert len({len(one) for one in wanted}) > 2
    assert essence(played(2, InProcess(Moody))) == wanted
    assert essence(played(4, workers)) == wanted


class Noting:
    """Notes a number, a text and a value that is neither; no number in the second turn."""

    def reset(self, example: Example, seed: int) -> str:
        self.turns = 0
        return str(example.prompt)

    def step(self, text: str, stop: str) -> Step:
        self.turns += 1
        first = self.turns == 1
        info = {"place": np.float32(3.5), "why": "so", "list": [1], "kind": np.float32} if first else {"why": "so"}
        return Step([{"role": "user", "content": "go on"}], info=info) if first else Step(info=info, terminated=True)


def test_what_an_environment_notes_is_in_the_records_and_its_numbers_are_metrics() -> None:
    episodes = played(8, Noting, count=4)
    first = {"place": 3.5, "why": "so", "list": "[1]", "kind": str(np.float32)}
    assert [turn.info for turn in episodes[0].turns] == [first, {"why": "so"}]
    assert Episode.from_json(episodes[0].to_json()) == episodes[0]
    record = rollout_record(episodes[0])
    assert record["turns"][1]["info"] == {"why": "so"}
    assert episode_metrics(episodes)["environment/place"] == 3.5
    assert noted([episodes[:2], episodes[2:]]) == {"environment/place": [[3.5, 3.5], [3.5, 3.5]]}


@pytest.mark.slow
def test_what_was_sampled_trains_and_nothing_else() -> None:
    episodes = played(8, Moody, count=24)
    batch = collate(episodes)
    rows = [(episode, row) for episode in episodes for row in episode.rows()]
    assert len(rows) == len(batch) > len(episodes)
    for (_, row), tokens, actions, mask in zip(rows, batch.tokens, batch.actions, batch.mask, strict=True):
        assert tokens[actions].tolist() == [token for turn in row for token in turn.action_ids]
        said = [token for turn in row for token in turn.prompt_ids + turn.action_ids]
        assert tokens[mask].tolist() == said
    assert any(turn.continuation for episode in episodes for turn in episode.turns)
    one = policy()
    scored = one.compute_logprobs_no_grad(batch).logprobs
    assert batch.logprobs_sampler is not None
    assert rounding.near(one.model, scored[batch.actions], batch.logprobs_sampler[batch.actions], batch.tokens.shape[1])


def test_pieces_of_one_action_are_one_turn() -> None:
    episodes = played(8, Moody, count=24)
    batch: Batch = collate(episodes)
    assert batch.turn is not None
    for episode in episodes:
        own = batch.episode == episode.index
        numbers = batch.turn[own][batch.actions[own]].tolist()
        wanted, number = [], 0
        for turn in episode.turns:
            wanted += [number] * len(turn.action_ids)
            number += not turn.unfinished
        assert numbers == wanted


def test_a_message_in_pieces_is_one_text() -> None:
    pieces = [episode for episode in played(8, Moody, count=24) if len(episode.turns) > 1]
    for episode in pieces:
        *_, before, last = episode.turns
        text = episode.text
        assert text.endswith(last.text)
        if before.continuation is None:
            assert text == last.text
        else:
            assert text.endswith(before.text + before.continuation + last.text)


def test_demonstrations_end_as_turns_do(workers: EnvProcesses) -> None:
    one = policy()
    actor = Actor(Sampler(one, 4), one.tokenizer)
    prompts = [(place, Example(f"x/{place}", "Question:")) for place in range(6)]
    for envs in (Moody, workers):
        for episode in demonstrate(prompts, actor, (0, "test"), envs):
            for number, turn in enumerate(episode.turns):
                assert turn.text == f"demo {number}" + ("\n" if number % 2 else "")
                assert not turn.logprobs
                assert one.tokenizer.decode(turn.action_ids, skip_special_tokens=True) == turn.text
                assert (turn.action_ids[-1] == one.tokenizer.eos_token_id) == (number % 2 == 0)
                assert turn.stop == ("stop" if number % 2 else "eos")


KINDS = {
    "fine": "",
    "raise": "KeyError: 'lost' (at ",
    "nan": "reward nan; it must be a finite number",
    "nothing": "step() returned NoneType; it must return a Step",
    "silent": "neither messages nor a continuation",
    "reset": "ValueError: no board (at ",
}


def failing(envs: Any, kinds: Sequence[str]) -> list[Episode]:
    one = policy()
    prompts = [(place, Example(kind, "go")) for place, kind in enumerate(kinds)]
    return collect(prompts, Actor(Sampler(one, 16), one.tokenizer), Sampling(max_new_tokens=2), (0, "test"), envs)


@pytest.mark.parametrize("where", ["here", "in processes"])
def test_an_environment_that_fails_costs_its_own_episode(where: str) -> None:
    envs: Any = Failing if where == "here" else EnvProcesses("failing", plugins=[PLUGIN], count=2)
    for kind, episode in zip(KINDS, failing(envs, list(KINDS)), strict=True):
        assert KINDS[kind] in episode.error and bool(episode.error) == (kind != "fine")
        assert len(episode.turns) == {"fine": 3, "reset": 0}.get(kind, 2)
        assert episode.selected == episode.terminated == (kind == "fine")
    if where != "here":
        envs.close()


@pytest.mark.slow
def test_one_that_hangs_or_crashes_costs_its_own_episode() -> None:
    """All in one process: the others are played again in a fresh one, and go on as if nothing had been."""
    envs = EnvProcesses("failing", plugins=[PLUGIN], count=1, seconds=2.0)
    kinds = ["fine", "hang", "fine", "crash", "raise", "fine"]
    try:
        for kind, episode in zip(kinds, failing(envs, kinds), strict=True):
            wanted = {"hang": "did not answer within 2 s", "crash": "killed by SIGSEGV", "raise": "KeyError"}
            assert wanted.get(kind, "") in episode.error and bool(episode.error) == (kind != "fine")
            assert episode.score == (1.0 if kind == "fine" else 0.0)
    finally:
        envs.close()


def test_where_all_fail_the_run_ends_with_the_reason() -> None:
    with pytest.raises(LmgymError, match=r"every environment of this rollout failed.*ValueError: no board"):
        failing(Failing, ["reset", "reset"])


@pytest.mark.slow
def test_one_that_cannot_be_played_again_is_broken_and_not_falsified() -> None:
    envs = EnvProcesses("forgetful", plugins=[PLUGIN], count=1)
    first, second, third = failing(envs, ["crash", "other", "steady"])
    envs.close()
    assert "ended with status 3" in first.error
    assert "did not answer its seed and actions as it had before" in second.error
    assert not third.error


def test_an_example_that_cannot_be_sent_is_refused() -> None:
    envs = EnvProcesses("moody", plugins=[PLUGIN], count=1)
    with pytest.raises(LmgymError, match=r"example x/0 cannot be sent.*env\.workers: 0"):
        envs.begin([(0, Example("x/0", "?", meta={"board": {1, 2}}), 0)])
    envs.close()


messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": st.text()}))


@given(messages, st.floats(-LARGEST_REWARD, LARGEST_REWARD), st.none() | st.text(max_size=9), st.booleans())
def test_a_step_goes_on_in_one_way(said: list[Message], reward: float, continuation: str | None, over: bool) -> None:
    step = Step(said, reward, terminated=over, continuation=continuation)
    if over or (continuation is not None) != bool(said):
        assert check_step(step) is step
    else:
        with pytest.raises(ValueError, match=r"step\(\) returned"):
            check_step(step)


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (Step([{"role": "user"}]), "a message is"),
        (Step([{"role": "narrator", "content": "x"}]), "the role 'narrator'; valid: system, user"),
        (Step("text"), "must be a list of"),
        (Step(reward=True, terminated=True), "the reward True"),
        (Step(reward=torch.ones(2), terminated=True), "the reward tensor"),  # type: ignore[arg-type]
    ],
)
def test_a_step_of_another_kind_is_refused(step: Step, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        check_step(step)


def test_broken_and_opening_cross_the_pipe() -> None:
    envs = EnvProcesses("failing", plugins=[PLUGIN], count=1)
    answers = envs.begin([(0, Example("reset", "go"), 0), (1, Example("fine", "go"), 0)])
    envs.close()
    assert isinstance(answers[0], EnvFailure) and "no board" in answers[0].message
    assert answers[1] == Opening("go")


def test_ended_environments_are_closed_together() -> None:
    """In other processes each call is a round trip: one a turn, however many games end in it."""
    calls = []

    class Counting(InProcess):
        def end(self, places: Sequence[int]) -> None:
            calls.append(list(places))
            super().end(places)

    envs = Counting(Moody)
    episodes = played(64, envs)
    assert sorted(place for places in calls for place in places) == list(range(16)) and not envs.envs
    assert len(calls) <= max(len(episode.turns) for episode in episodes)


@pytest.mark.slow
def test_a_reward_does_not_see_an_episode_that_never_began() -> None:
    from lmgym.rewards.base import Reward, episodes
    from lmgym.rollouts.rollout import apply_rewards

    last = Reward("last", 1.0, episodes(lambda seen: [float(len(episode.turns[-1].text)) for episode in seen]))
    found = failing(Failing, ["reset", "fine"])
    apply_rewards(found, [last])
    assert found[0].reward_components == {"last": 0.0} and found[1].reward_components["last"] == len(
        found[1].turns[-1].text
    )


class TooLong:
    """Its first prompt does not fit the model for some examples; for others its messages fill the context."""

    def reset(self, example: Example, seed: int) -> str:
        return "a" * 1000 if example.id == "long" else "go"

    def step(self, text: str, stop: str) -> Step:
        return Step([{"role": "user", "content": "b" * 30}], 1.0)


def test_a_first_prompt_that_does_not_fit_costs_its_own_episode() -> None:
    fine, long = failing(TooLong, ["fine", "long"])
    assert not fine.error and fine.turns
    assert re.match(r"a prompt of the environment has 10\d\d tokens, and the model reads \d+ at most", long.error)
    assert not long.turns and not long.selected
    with pytest.raises(LmgymError, match=r"every environment of this rollout failed.*a prompt of the environment has"):
        failing(TooLong, ["long"])


def test_a_full_context_is_counted_for_itself() -> None:
    episodes = failing(TooLong, ["fine", "fine"])
    assert all(episode.turns[-1].stop == "context" and episode.overflowed for episode in episodes)
    assert episode_metrics(episodes)["truncated/context"] == 1.0
    assert "truncated/context" not in episode_metrics(failing(Failing, ["fine"]))
    assert measured([episodes], [])["truncated/context"] == [[1.0, 1.0]]


def test_where_more_than_nine_in_ten_fail_the_run_ends() -> None:
    assert sum(bool(episode.error) for episode in failing(Failing, ["reset"] * 9 + ["fine"])) == 9
    with pytest.raises(LmgymError, match=r"10 of 11 environments of this rollout failed; the first one: ValueError"):
        failing(Failing, ["fine"] + ["reset"] * 10)


class Forks:
    def reset(self, example: Example, seed: int) -> str:
        return "go"

    def step(self, text: str, stop: str) -> Step:
        os.fork()
        return Step(terminated=True, reward=1.0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_fork_of_the_training_process_does_not_go_on(tmp_path: Path) -> None:
    envs = InProcess(Forks)
    envs.begin([(0, Example("a", "b"), 0)])
    assert envs.step([(0, "", "eos")]) == [Step(terminated=True, reward=1.0)]
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0  # the child has left by itself
    with Writer(tmp_path) as writer:
        if os.fork() == 0:
            try:
                writer.metrics({"kind": "train", "stage": 0, "step": 0, "reward": 9.0})
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
        writer.metrics({"kind": "train", "stage": 0, "step": 0, "reward": 1.0})
    assert [record["reward"] for record in read_records(tmp_path / "metrics.jsonl")] == [1.0]


@pytest.mark.parametrize("reward", [np.array([0.5]), np.array([[0.5]]), np.float32(0.5), np.array(0.5)])
def test_a_reward_may_be_an_array_of_one_number(reward: Any) -> None:
    step = check_step(Step(reward=reward, terminated=True))
    assert step.reward == 0.5 and not hasattr(step.reward, "__len__")


@pytest.mark.parametrize("flag", ["terminated", "truncated", "unfinished", "restart"])
def test_values_of_numpy_are_the_same_in_processes(flag: str) -> None:
    """numpy's False is false there too, and its numbers stay numbers."""
    envs = EnvProcesses("arrays", plugins=[PLUGIN], count=1)
    here, there = failing(Arrays, [flag]), failing(envs, [flag])
    envs.close()
    assert [episode.to_json() for episode in here] == [episode.to_json() for episode in there]
    first, second = here
    assert not first.error and [len(first.turns), len(second.turns)] == [1, 2]  # the second player begins
    assert first.terminated == (flag != "truncated") and [first.score, second.score] == [1.5, 2.0]
    assert not any(turn.unfinished or turn.restart for turn in (*first.turns, *second.turns))
    last = {"right": True, "turn": 3, "share": 1.0, "board": "[True, True, True]"}
    assert first.turns[-1].info == last and type(first.turns[-1].info["turn"]) is int
    assert episode_metrics(here)["environment/turn"] == 2.0


def test_a_player_is_a_whole_number() -> None:
    with pytest.raises(TypeError, match=r"step\(\) names player 1\.0; it must be a whole number"):
        check_step(Step([{"role": "user", "content": "on"}], player=1.0))  # type: ignore[arg-type]


def test_what_a_rollout_cannot_use_is_named() -> None:
    with pytest.raises(ValueError, match=r"the environment paid the reward array\(\[1, 2\]\); it must be one number"):
        check_step(Step(reward=np.array([1, 2]), terminated=True))  # type: ignore[arg-type]
    long = "a" * (LONGEST_OBSERVATION // 2 + 1)
    for step in (Step([{"role": "user", "content": long}] * 2), Step(continuation=long * 2)):
        with pytest.raises(ValueError, match="wrote 1,000,002 characters at once; the limit is 1,000,000"):
            check_step(step)
    with pytest.raises(ValueError, match="wrote 1,000,002 characters"):
        opening_of(Forks(), long * 2)


@pytest.mark.parametrize("stop", ["END", [3], 3, ("",)])
def test_a_stop_is_a_collection_of_texts(stop: Any) -> None:
    """The letters of one text would each end a turn."""
    env = Forks()
    env.stop = stop  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"the environment's stop is .*; make it a tuple of texts"):
        opening_of(env, "Guess.")
    env.stop = None  # type: ignore[attr-defined]
    assert opening_of(env, "Guess.").stop == ()
    for texts in (["END"], iter(["END"])):
        env.stop = texts  # type: ignore[attr-defined]
        assert opening_of(env, "Guess.").stop == ("END",)


def test_a_file_may_be_a_plugin_and_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from lmgym.core.registry import register\n@register('env', 'twice_named')\nclass Game: ...\n"
    (tmp_path / "twice_named_game.py").write_text(text)
    (tmp_path / "another_game.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.load_plugin(str(tmp_path / "twice_named_game.py"))
    assert registry.get("env", "twice_named_game:Game").__name__ == "Game"
    with pytest.raises(LmgymError, match="env 'twice_named' is already registered by"):
        registry.load_plugin(str(tmp_path / "another_game.py"))
    registry._registered["env"].pop("twice_named")


def test_an_environment_of_ones_own_is_said_to_run_unguarded() -> None:
    own = f"{__name__}:Forks"
    assert "since its module imports a library of models, one after" in unguarded_sentence({"name": own})
    assert not unguarded_sentence({"name": own, "workers": 2})
    assert not unguarded_sentence({"name": "conversation"}) and not unguarded_sentence({"name": "single_turn"})
