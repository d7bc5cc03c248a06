"""Rewards in a worker process: the same numbers as here, a limit that holds, and a word about those that stay here."""

import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgym.core import registry
from lmgym.core.builtins import BUILTIN
from lmgym.core.errors import LmgymError
from lmgym.rewards.base import Reward, call_reward
from lmgym.rewards.building import build_rewards
from lmgym.rewards.running.pooled import fresh_worker, packed, unlimited_reason, unpacked
from lmgym.types import Episode, Example, Turn
from tests import runs
from tests.contract import odd_rewards

pytestmark = pytest.mark.processes

HERE = "tests.contract.odd_rewards"
META = {"cells": ((1, 2), (3.5, None)), "rows": [{"a": [True]}], 7: "seven", "nested": {(1, "x"): [()]}}


def odd(name: str, **section: Any) -> Reward:
    return build_rewards({f"{HERE}:{name}": section})[0]


def episodes(*texts: str) -> list[Episode]:
    example = Example("a/0", [{"role": "user", "content": "2+2="}], ("4", "four"), META)
    turns = [
        Turn([1, 2], [3, 4], [-0.1, -1e-300], text="first \ud800", kept=np.arange(6, dtype=np.int32).reshape(2, 3)),
        Turn([5], [6], [float("-inf")], text="", reward=0.1, restart=True, token_rewards=[0.25]),
    ]
    return [
        Episode(example, 0, index, [*turns, Turn([8], [9], text=text)], reward_components={"x": 1 / 3}, score=0.7)
        for index, text in enumerate(texts)
    ]


def test_every_builtin_reward_has_a_limit_that_holds_or_runs_a_model() -> None:
    learned = {name for name, entry in BUILTIN["reward"].items() if ".learned." in entry.target}
    for name in BUILTIN["reward"]:
        function = registry.get("reward", name)
        bounded = hasattr(function, "linear_time") or hasattr(function, "limits_itself")
        reason = "" if bounded else unlimited_reason(function, {})
        assert reason == ("it runs a model" if name in learned and not bounded else ""), name


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)), inner)
    ),
)


@given(trees)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    import json

    assert repr(unpacked(json.loads(json.dumps(packed(value))))) == repr(value)


def test_a_worker_gets_everything_that_an_episode_holds() -> None:
    reward = odd("checksum")
    assert reward.pooled is not None and not reward.unlimited
    shown = episodes("one", "two")
    assert call_reward(reward, shown) == odd_rewards.checksum(shown)


def test_calls_go_to_one_worker_without_torch() -> None:
    first, process, torch = call_reward(odd("calls"), episodes("a", "b", "c"))
    again, same, _ = call_reward(odd("calls"), episodes("a", "b", "c"))
    assert (again, same) == (first + 1, process) and process != os.getpid() and not torch
    assert call_reward(odd("calls", pool=False), episodes("a", "b"))[1] == os.getpid()


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("exit", "its process ended with status 0"),
        ("SIGSEGV", "its process was killed by SIGSEGV"),
        ("SIGKILL", "its process was killed by SIGKILL"),
    ],
)
def test_a_reward_that_ends_its_process_is_named_with_the_answer(how: str, what: str) -> None:
    reward = odd("ends", how=how)
    with pytest.raises(LmgymError) as raised:
        call_reward(reward, episodes("a", "b", "bad", "c", "bad"))
    assert str(raised.value) == f"reward '{HERE}:ends': {what} for example 'a/0' (index 2 of 5)"
    assert call_reward(reward, episodes("a", "b")) == [1.0, 1.0]


def test_a_reward_that_cannot_be_stopped_is_killed() -> None:
    with pytest.raises(LmgymError) as raised:
        call_reward(odd("swallows"), episodes("a", "b"), timeout=0.5)
    assert str(raised.value) == f"reward '{HERE}:swallows' did not return within 0.5 s for 2 episodes, and was killed"


def test_a_reward_that_swallows_its_alarm_in_the_process_is_still_late() -> None:
    class Last:
        def __del__(self) -> None:
            while True:
                pass

    def destroys(texts: list[str], examples: list[Example]) -> list[float]:
        Last()
        return [1.0 for _ in texts]

    with warnings.catch_warnings(), pytest.raises(LmgymError, match=r"did not return within 0\.2 s"):
        warnings.simplefilter("ignore")
        call_reward(Reward("destroys", 1.0, destroys), episodes("a"), timeout=0.2)


def test_a_reward_that_imports_torch_stays_here_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"imports_torch' runs in the training process, where its limit .*it imports"):
        assert call_reward(odd("imports_torch"), episodes("abc", "")) == [3.0, 0.0]


def test_meta_that_cannot_be_sent_keeps_the_reward_here() -> None:
    example = Example("a/0", "?", meta={"array": np.zeros(2)})
    shown = [Episode(example, 0, 0, [Turn([1], [2], text="x")])]
    with pytest.warns(UserWarning, match="holds a value of type ndarray, which cannot be sent"):
        assert call_reward(odd("calls"), shown) == [len(odd_rewards._calls)]


def test_a_reward_of_a_plugin_file_goes_to_a_worker(tmp_path: Path) -> None:
    plugin = tmp_path / "pooled_plugin.py"
    plugin.write_text(
        "import os\nfrom lmgym import register\n\n@register('reward', 'pooled_plugin')\n"
        "def own(texts, examples):\n    return [float(os.getpid()) for _ in texts]\n"
    )
    registry.load_plugin(str(plugin))
    assert call_reward(build_rewards({"pooled_plugin": 1.0})[0], episodes("a")) != [os.getpid()]


def test_a_run_finds_nothing_that_an_earlier_one_has_left_in_the_worker(tmp_path: Path) -> None:
    """Two runs of one seed are equal, in one process too: this reward counts its calls."""
    changes: dict[str, Any] = {"rewards": {f"{HERE}:counts": 1.0}, "steps": 2, "prompts_per_step": 1}
    changes["evaluation"] = {"every": 0, "examples": 1}
    told = [runs.records(runs.run(tmp_path / name, **changes) / "metrics.jsonl") for name in ("one", "two")]
    assert [[record["reward"] for record in records] for records in told] == [[1.0, 2.0, 3.0, 4.0]] * 2


def test_workers_are_shared_by_runs_side_by_side() -> None:
    with fresh_worker():
        [first] = call_reward(odd("counts"), episodes("a"))
        with fresh_worker():
            assert call_reward(odd("counts"), episodes("a")) == [2.0] and first == 1.0
        assert call_reward(odd("counts"), episodes("a")) == [3.0]
    with fresh_worker():
        assert call_reward(odd("counts"), episodes("a")) == [1.0]


def test_what_must_stay_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered["reward"], "closure", lambda texts, examples: [1.0 for _ in texts])
    monkeypatch.setitem(registry._registered["reward"], "modelled", odd_rewards.calls)
    assert build_rewards({"closure": 1.0})[0].unlimited == "another process cannot import it by name"
    assert odd("calls", pool=False).unlimited == "the recipe says pool: false"
    assert build_rewards({"length": 1.0})[0].unlimited == ""
    monkeypatch.setattr(odd_rewards, "some_tensor", __import__("torch").zeros, raising=False)
    assert build_rewards({"modelled": 1.0})[0].unlimited == "it runs a model"


@pytest.mark.slow
def test_a_run_says_at_its_start_whose_limit_cannot_be_enforced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lmgym.logs.console import Console

    monkeypatch.setitem(registry._registered["reward"], "closure", lambda texts, examples: [1.0 for _ in texts])
    rewards = {"regex": {"pattern": "[0-9]"}, "closure": 0.5}
    folder = runs.run(tmp_path / "run", Console(), rewards=rewards, steps=1, evaluation={"every": 0, "examples": 2})
    said = capsys.readouterr().out
    begun = re.search(r"^reward_timeout \(60 s\) cannot be enforced .*: (.*)$", said, re.MULTILINE)
    assert begun and begun[1] == "closure (another process cannot import it by name)"
    assert said.index(begun[0]) < said.index("evaluation after 0 steps")
    assert [one["rewards_without_limit"] for one in runs.records(folder / "metrics.jsonl")] == [["closure"]] * 3


@pytest.mark.slow
def test_a_run_is_the_same_in_a_worker_and_here(tmp_path: Path) -> None:
    rewards: dict[str, Any] = {"regex": {"pattern": "[0-9]"}, "chrf": {}, f"{HERE}:checksum": {"weight": 1e-9}}
    here = {name: {"pool": False, **section} for name, section in rewards.items()}
    one = runs.run(tmp_path / "worker", rewards=rewards, steps=3)
    other = runs.run(tmp_path / "here", rewards=here, steps=3)
    assert not any("rewards_without_limit" in record for record in runs.records(one / "metrics.jsonl"))
    for name in ("final/model.safetensors", "rollouts.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
