"""TRL's `environment_factory`: a class with methods as tools, a state, and rewards that read it."""

import json
from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.envs.check import check_env
from lmgym.envs.env_processes import EnvProcesses
from lmgym.envs.environment_factory import EnvironmentFactory
from lmgym.envs.vector import Envs, InProcess
from lmgym.inference.base import Sampling
from lmgym.rewards.building import build_rewards
from lmgym.rewards.foreign.trl import from_trl
from lmgym.rollouts.rollout import Actor, apply_rewards, collect
from lmgym.types import BarePrompt, Episode, Example
from tests import runs
from tests.property.test_rendering import Script, chat, ids_of

HERE = "tests.contract.trl_environments"
ASKED = [{"role": "user", "content": "Count to three."}]


def call(number: Any) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"number": {json.dumps(number)}}}}}</tool_call>'


def played(envs: Envs, *starts: int) -> list[Episode]:
    """Each episode adds 1, then 2, then answers; it starts where its row says."""
    said = [[[*ids_of(text), chat.eos_token_id] for text in (call(1), call(2), "Done.")] for _ in starts]
    prompts = [(n, Example(f"a/{n}", ASKED, meta={"start": start})) for n, start in enumerate(starts)]
    try:
        return collect(prompts, Actor(Script(said, [chat.eos_token_id]), chat), Sampling(), (0, "test"), envs)
    finally:
        envs.close()


@pytest.mark.parametrize("name", ["Counter", "Later"])
def test_each_episode_has_an_object_of_its_own(name: str) -> None:
    episodes = played(InProcess(lambda: EnvironmentFactory(factory=f"{HERE}:{name}")), 0, 5)
    prompts = [next(m for m in episode.messages if m["role"] == "user")["content"] for episode in episodes]
    assert prompts == ["Count to three.", "Count to three. You are at 5."]
    results = [[m["content"] for m in episode.messages if m["role"] == "tool"] for episode in episodes]
    assert results == [["now 1", "now 3"], ["now 6", "now 8"]]
    assert [[turn.info["count"] for turn in episode.turns] for episode in episodes] == [[1, 3, 3], [6, 8, 8]]
    # get_reward pays the end, and a reward function reads the state.
    assert [[turn.reward for turn in episode.turns] for episode in episodes] == [[0, 0, 1.0], [0, 0, 0.0]]
    apply_rewards(episodes, build_rewards({f"{HERE}:reached": {"pool": False}}), tokenizer=chat)
    assert [episode.score for episode in episodes] == [1.0 + 0.3, 0.8]


def test_a_text_in_a_conversation_is_a_chat_whatever_is_called() -> None:
    """TRL's rewards of an agent get messages, for an answer without any call too."""
    asked: list[Any] = []

    def reads(completions: list[Any], prompts: list[Any]) -> list[float]:
        asked.extend([prompts, completions])
        return [0.0]

    said, prompt = [[[*ids_of("Done."), chat.eos_token_id]]], BarePrompt("Count.")
    envs = InProcess(lambda: EnvironmentFactory(factory=f"{HERE}:Counter"))
    engine = Script(said, [chat.eos_token_id])
    [episode] = collect([(0, Example("a/0", prompt))], Actor(engine, chat), Sampling(), (0, "test"), envs)
    from_trl(reads)([episode])
    assert asked == [[[{"role": "user", "content": "Count."}]], [[{"role": "assistant", "content": "Done."}]]]


@pytest.mark.processes
def test_it_is_the_same_in_processes_of_its_own() -> None:
    arguments = {"factory": f"{HERE}:Counter"}
    one = played(InProcess(lambda: EnvironmentFactory(**arguments)), 0, 5)
    other = played(EnvProcesses("environment_factory", arguments, [], 1, 60.0), 0, 5)
    assert [episode.to_json() for episode in one] == [episode.to_json() for episode in other]


def test_only_what_is_noted_can_be_read() -> None:
    """TRL gives the object itself; a list of it is no note, and the error says what is."""
    episodes = played(InProcess(lambda: EnvironmentFactory(factory=f"{HERE}:Counter")), 0)
    for turn in episodes[0].turns:
        turn.info.pop("calls", None)  # the number of calls of a conversation
    with pytest.raises(LmgymError, match=r"environments` hold what the environment notes in Step\.info"):
        apply_rewards(episodes, build_rewards({f"{HERE}:looks_inside": {"pool": False}}), tokenizer=chat)


def test_what_is_no_factory_is_refused() -> None:
    for factory, told in (("", "'env.factory' is missing"), (f"{HERE}:NoReset", "has no method reset"),
                          (f"{HERE}:nothing", "has no 'nothing'")):  # fmt: skip
        with pytest.raises(LmgymError, match=told):
            EnvironmentFactory(factory=factory)
    check_env("environment_factory", factory=f"{HERE}:Counter")


@pytest.mark.slow
def test_it_trains(tmp_path: Path) -> None:
    env = {"name": "environment_factory", "factory": f"{HERE}:Counter", "max_turns": 2}
    policy = {**runs.TINY["policy"], "architecture": runs.ARCHITECTURE | {"max_position_embeddings": 2048}}
    folder = runs.run(tmp_path / "run", env=env, policy=policy, steps=2, rewards={f"{HERE}:reached": 1.0})
    assert (folder / "final").is_dir()
