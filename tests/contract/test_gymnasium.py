"""Gymnasium's environments in words: any of them by id, unmodified; what is said reaches them, and what they pay comes
back; recipes train on them."""

import json
import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from lmgym.algorithms.actor_critic import PPO
from lmgym.batch import collate
from lmgym.config.build import build_config
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.envs.agent import Agent, Blackjack, read_answer, to_text
from lmgym.envs.check import check_env
from lmgym.envs.gymnasium import Gymnasium
from lmgym.types import Episode, Example, Turn
from tests import runs

GAME = Example("game/0", "a game")
PLAYABLE = ["Blackjack-v1", "FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", "Taxi-v4", "CartPole-v1"]
PLAYABLE += ["MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1", "Pendulum-v1"]


@pytest.mark.parametrize("name", PLAYABLE)
def test_an_environment_plays_by_its_id_alone(name: str) -> None:
    """What the plain agent says and hears is what gymnasium does: the same seed and actions, side by side."""
    env, theirs = Gymnasium(id=name), gymnasium.make(name)
    messages = env.reset(GAME, seed=7)
    observation, info = theirs.reset(seed=7)
    assert messages[-1]["content"].strip() == to_text(observation)
    theirs.action_space.seed(3)
    for _ in range(30):
        action = theirs.action_space.sample(mask=info.get("action_mask"))
        step = env.step(to_text(action), "length")
        said = np.array(to_text(action).split(), dtype=float)
        taken = np.asarray(said, dtype=theirs.action_space.dtype) if np.ndim(action) else int(said[0])
        observation, reward, terminated, truncated, info = theirs.step(taken)
        assert step.reward == pytest.approx(float(reward)) and step.info == {"invalid": 0.0}
        assert (step.terminated, step.truncated) == (terminated, truncated and not terminated)
        if step.over:
            break
        assert step.messages[-1]["content"].strip() == to_text(observation)
    said = check_env("gymnasium", id=name)
    assert said.startswith("environment 'gymnasium' keeps its contract in 8 episodes of ")


@pytest.mark.parametrize("name", PLAYABLE)
def test_demonstrations_are_legal_play(name: str) -> None:
    env = Gymnasium(id=name, max_turns=20)
    env.reset(GAME, seed=1)
    said = []
    for _ in range(20):
        said.append(env.demonstrate())
        step = env.step(said[-1], "eos")
        assert step.info == {"invalid": 0.0}
        if step.over:
            break
    assert step.over


def play(answers: list[str], **arguments: Any) -> list[Any]:
    env = Gymnasium(id="FrozenLake-v1", agent="grid", arguments={"is_slippery": False}, **arguments)
    env.reset(GAME, seed=0)
    steps = []
    for answer in answers:
        steps.append(env.step(answer, "eos"))
        if steps[-1].over:
            break
    return steps


def test_answers_that_are_no_action() -> None:
    asked = play(["jump", "right"], on_invalid="retry")
    assert [step.reward for step in asked] == [0.0, 0.0]
    assert asked[0].messages[-1]["content"] == (
        "That is no legal action: it could not be read. You stand in row 0, column 0."
    )
    assert asked[1].messages[-1]["content"] == "You stand in row 0, column 1."
    assert [step.reward for step in play(["jump", "right"], invalid_penalty=0.5)] == [-0.5, 0.0]
    (over,) = play(["jump", "right"], on_invalid="end", invalid_penalty=2.0)
    assert over.terminated and over.reward == -2.0
    moved = play(["jump"] * 40, on_invalid="random", max_invalid=1000, max_turns=40)
    assert len({step.messages[-1]["content"] for step in moved if step.messages}) > 1
    assert moved[0].info == {"invalid": 1.0, "reason": "it could not be read"}
    for mode in ("retry", "penalty", "random"):
        steps = play(["jump", "left", "jump", "jump", "jump"], on_invalid=mode)
        assert steps[-1].over and len(steps) <= 5  # three in a row
    assert play(["jump", "left"] * 9, on_invalid="penalty", max_turns=8)[-1].truncated


def test_a_policy_may_see_the_present_observation_only() -> None:
    for step in play(["right", "jump", "right"], memory="observation"):
        assert step.restart and step.messages[0] == {
            "role": "system",
            "content": "You walk on a grid. Answer up, right, down or left.",
        }
        assert len(step.messages) == 2
    assert not any(step.restart for step in play(["right", "right"]))


class Mine(Agent):
    """An agent of a user's own."""

    def get_system_prompt(self) -> str:
        return "Play."

    def initial_messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": "12 5 0"}, {"role": "assistant", "content": "hit"}]

    def format_observation(self, observation: Any) -> str:
        return f"hand {observation[0]}"

    def extract_action(self, text: str) -> int:
        return int("hit" in text)


class NoWords(Agent):
    """Forgets to say anything."""

    def format_observation(self, observation: Any) -> Any:
        return None


def test_an_agent_of_ones_own() -> None:
    env = Gymnasium(id="Blackjack-v1", agent=f"{__name__}:Mine")
    messages = env.reset(GAME, seed=0)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"] == "Play." and messages[-1]["content"].startswith("hand ")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"id": "Blackjak-v1"}, r"gymnasium has no 'Blackjak-v1'; did you mean 'Blackjack-v1'\?"),
        ({"id": "CliffWalking-v0"}, "gymnasium has no 'CliffWalking-v0'; did you mean 'CliffWalking-v1'"),
        ({"id": "Blackjack-v1", "agent": "blakjack"}, "unknown agent 'blakjack'; did you mean 'blackjack'"),
        ({"id": "Blackjack-v1", "agent": "math:sqrt"}, "math:sqrt has no method format_observation"),
        ({"id": "Blackjack-v1", "max_turns": 0}, "env.max_turns is 0; it must be at least 1"),
        ({"id": "Blackjack-v1", "arguments": {"natral": True}}, "natral' of 'Blackjack-v1'; did you mean 'natural'"),
        # Only making it can tell.
        ({"id": "FrozenLake-v1", "arguments": {"map_name": "5x5"}}, "cannot make 'FrozenLake-v1': KeyError: '5x5'"),
        ({"id": "FrozenLake-v1", "arguments": {"max_episode_steps": -2}}, "gymnasium cannot make 'FrozenLake-v1'"),
    ],
)
def test_bad_input_in_one_sentence(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(LmgymError, match=problem):
        Gymnasium(**arguments).reset(GAME, seed=0)


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({"name": "gymnasium"}, "'env.id' is missing"),
        ({"name": "gymnasium", "id": "Blackjack-v1", "on_invalid": "cry"}, "env.on_invalid"),
        ({"name": "gymnasium", "id": "Blackjack-v1", "turns": 3}, "unknown key 'env.turns'"),
        ({"name": "gymnasium", "id": "Blackjack-v1", "arguments": {"cards": 3}}, "unknown key 'env.arguments.cards'"),
        ({"name": "gymnasium", "id": "Blackjack-v1", "workers": "many"}, "env.workers"),
    ],
)
def test_bad_sections_in_one_sentence(env: dict[str, Any], problem: str) -> None:
    with pytest.raises(LmgymError, match=problem):
        build_config({"env": env, "algorithm": "reinforce"})


def test_an_observation_without_words_costs_the_run_one_sentence(tmp_path: Path) -> None:
    env = {"name": "gymnasium", "id": "Blackjack-v1", "agent": f"{__name__}:NoWords", "workers": 0}
    with pytest.raises(LmgymError, match=r"every environment.*format_observation returned None; it must return a text"):
        runs.run(tmp_path / "run", task=None, rewards={}, env=env, algorithm={"name": "reinforce", "group_size": 2})


@given(st.recursive(st.integers(-99, 99) | st.booleans() | st.floats(-9, 9), lambda inner: st.lists(inner, max_size=3)))
def test_numbers_have_words(value: Any) -> None:
    assert to_text(value) == to_text(np.array(value).tolist()) if not isinstance(value, list) else True
    assert all(float(word) is not None for word in to_text(value).split())


def test_what_has_no_words_is_refused() -> None:
    with pytest.raises(TypeError, match="which has no default text; write format_observation"):
        to_text(object())


def test_blackjack_in_words() -> None:
    agent = Blackjack()
    assert agent.format_observation((17, 6, 1)) == "You hold 17 with a usable ace; the dealer shows 6."
    assert [agent.extract_action(text) for text in ("hit", " Stick.\n")] == [1, 0]
    for text in ("I hit on 1", "Action: 7", "1", ""):  # LlamaGym's parser found an action in each
        with pytest.raises(ValueError):
            agent.extract_action(text)


@pytest.mark.parametrize("restart", [False, True], ids=["conversation", "observation"])
def test_rewards_stay_on_their_turns_and_cut_episodes_bootstrap(restart: bool) -> None:
    """GAE by hand, a turn a step: V is .5 everywhere, gamma .9, lambda .5. delta_1 = 1 + .45 - .5, delta_2 = 0 - .5, or
    0 + .9 * .5 - .5 where the episode was cut off; A_1 = delta_1 + .45 delta_2."""
    turns = [Turn([5], [6, 7], [-1.0, -1.0], reward=1.0), Turn([8], [9], [-1.0], reward=0.0, restart=restart)]
    for terminated, last in ((True, -0.5), (False, -0.05)):
        batch = collate([Episode(GAME, 0, 0, turns, terminated=terminated, score=1.0)])
        half = batch.rewards.new_full(batch.rewards.shape, 0.5)
        batch = batch.replace(logprobs_old=half, values=half, last_values=batch.score.new_full((len(batch),), 0.5))
        ppo = PPO(gamma=0.9, gae_lambda=0.5, discount_per="turn", whiten="none", bootstrap=True)
        advantages = ppo.advantages(batch).advantages
        assert advantages is not None
        wanted = [0.95 + 0.45 * last, 0.95 + 0.45 * last, last]
        # Inside a turn nothing fades and nothing is paid: both tokens of the first have its credit.
        assert advantages[batch.actions].tolist() == pytest.approx(wanted)


def test_the_value_after_a_cut_episode_is_discounted_whatever_the_lengths_of_the_others() -> None:
    episodes = [Episode(GAME, n, n, [Turn([5], [6] * k, [-1.0] * k)], terminated=False) for n, k in enumerate((2, 4))]
    batch = collate(episodes)
    zeros = batch.rewards.new_zeros(batch.rewards.shape)
    batch = batch.replace(logprobs_old=zeros, values=zeros, last_values=batch.score.new_ones((len(batch),)))
    ppo = PPO(gamma=0.5, gae_lambda=1.0, discount_per="turn", whiten="none", bootstrap=True)
    assert ppo.advantages(batch).returns[batch.actions].tolist() == [0.5] * 6


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_recipe_trains_on_an_environment(workers: int, tmp_path: Path) -> None:
    """Supervised on legal play, then PPO; two runs of one seed are equal, in this process or in others."""
    stages = [
        {"name": "play", "algorithm": "supervised", "steps": 1, "prompts_per_step": 4},
        {"name": "rl", "algorithm": {"name": "ppo", "epochs": 2, "minibatches": 2}, "steps": 2, "prompts_per_step": 6},
    ]
    env = {"name": "gymnasium", "id": "Blackjack-v1", "memory": "observation", "workers": workers}
    settings: dict[str, Any] = {
        "env": env,
        "task": None,
        "rewards": {},
        "policy": {"model": "builtin:tiny_gpt2", "tokenizer": "builtin:numbers", "device": "cpu"},
        "sampling": {"max_new_tokens": 1},
        "evaluation": {"examples": 4, "split": "validation", "final_split": "test"},
    }
    folder = runs.run(tmp_path / "run", stages=stages, **settings)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "train"][-1]
    assert last["stage_name"] == "rl" and last["gradient_norm"] > 0
    again = runs.run(tmp_path / "again", stages=stages, **{**settings, "env": {**env, "workers": 2 - workers}})
    for name in ("model.safetensors",):
        assert (folder / "final" / name).read_bytes() == (again / "final" / name).read_bytes()


def test_agents_are_listed() -> None:
    assert {"plain", "blackjack", "grid"} <= set(registry.names("agent"))


# ---------------------------------------------------------------- actions of every space

BOX = spaces.Box(-2.0, 2.0, (3,))
SPACES = {
    "box": BOX,
    "narrow box": spaces.Box(-0.0004, 0.0004, (2,)),  # three decimals lie outside of it
    "square box": spaces.Box(-1.0, 1.0, (2, 2)),
    "number": spaces.Box(-1.0, 1.0, ()),
    "discrete": spaces.Discrete(3, start=5),
    "bits": spaces.MultiBinary(4),
    "grid": spaces.MultiDiscrete([3, 4]),
    "text": spaces.Text(8),
    "tuple": spaces.Tuple((spaces.Discrete(2), BOX, spaces.Text(3))),
    "dict": spaces.Dict(
        {"joint 1": BOX, "grip": spaces.Discrete(2), "rest": spaces.Dict({"a": spaces.MultiBinary(2)})}
    ),
    "one of": spaces.OneOf((spaces.Discrete(2), BOX)),
    "sequence": spaces.Sequence(spaces.Discrete(3)),
}


class AnyActions(gymnasium.Env[Any, Any]):
    """Notes the actions that it is given."""

    observation_space = spaces.Discrete(1)

    def __init__(self, space: str, mask: Any = None) -> None:
        self.action_space, self.taken, self.mask = SPACES[space], [], mask

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return 0, self._note()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken.append(action)
        return 0, 0.0, False, False, self._note()

    def _note(self) -> dict[str, Any]:
        return {} if self.mask is None else {"action_mask": self.mask}


gymnasium.register("tests/AnyActions-v0", f"{__name__}:AnyActions", disable_env_checker=True)


def with_space(space: str, **arguments: Any) -> Gymnasium:
    mask = arguments.pop("mask", None)
    env = Gymnasium(id="tests/AnyActions-v0", arguments={"space": space, "mask": mask}, **arguments)
    env.reset(GAME, seed=3)
    return env


@pytest.mark.parametrize("space", SPACES)
def test_demonstrations_of_the_plain_agent_are_valid_in_every_space(space: str) -> None:
    env = with_space(space)
    for _ in range(5):
        said = env.demonstrate()
        assert env.step(said, "eos").info == {"invalid": 0.0}, said
    assert all(SPACES[space].contains(action) for action in env._env.unwrapped.taken)
    assert env.step("no", "eos").info["invalid"] == (space not in ("text",))


def returns(answer: Any) -> type[Agent]:
    class Fixed(Agent):
        def extract_action(self, text: str) -> Any:
            return answer() if callable(answer) else answer

    return Fixed


@pytest.mark.parametrize(
    ("space", "action"),
    [
        ("box", np.array([0.5, 0.1, -2.0])),  # float64
        ("tuple", [1, (0.5, 0.1, 1), "abc"]),
        ("dict", {"joint 1": np.zeros(3), "grip": 1, "rest": {"a": [0, 1]}}),
        ("number", 0.5),
    ],
)
def test_numbers_of_another_type_are_the_same_action(space: str, action: Any) -> None:
    env = with_space(space)
    env._agent = returns(action)()
    env._agent.action_space = SPACES[space]
    assert env.step("", "eos").info == {"invalid": 0.0}


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (spaces.Discrete(4), "2", 2),
        (spaces.Discrete(4), "I take 2.", 2),
        (spaces.Discrete(4), "No.3", 3),
        (spaces.Discrete(4), "2.0", 2),
        (spaces.Discrete(4), "2.9", None),
        (spaces.Discrete(4), "-0.5", None),
        (spaces.Discrete(4), "1e999", None),
        (spaces.Box(0, 10, (1,)), ".5", [0.5]),
        (spaces.Box(-1, 1, (2,)), "-.5 +.25", [-0.5, 0.25]),
        (spaces.Box(-1, 1, (2,)), "5e-1 and 1E-2.", [0.5, 0.01]),
        (spaces.Box(-np.inf, np.inf, (1,)), "1e39", None),  # more than fp32 holds
        (spaces.Box(-np.inf, np.inf, (1,), np.float64), "1e999", None),
        (spaces.Box(0, 255, (2,), np.uint8), "255 0", [255, 0]),
        (spaces.Box(0, 255, (1,), np.uint8), "300", None),
        (spaces.MultiBinary(2), "1 0", [1, 0]),
        (spaces.MultiBinary(2), "0.9 1.9", None),
        (spaces.MultiDiscrete([3, 3]), "-0.5 2", None),
        (spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(1)]), "[1, [256]]", None),
    ],
)
def test_a_number_is_read_as_it_is_written(space: Any, text: str, action: Any) -> None:
    agent = Agent()
    agent.action_space = space
    found, reason = read_answer(agent, text)
    if action is None:
        assert (found, reason) == (None, "it could not be read")
    else:
        assert space.contains(found) and np.array_equal(np.asarray(found), np.asarray(action, np.asarray(found).dtype))


MASKS = [
    ("discrete", np.array([0, 1, 1], np.int8), "5", "6"),
    ("grid", (np.array([1, 0, 1], np.int8), np.ones(4, np.int8)), "1 3", "2 3"),
    ("bits", np.array([2, 2, 0, 1], np.int8), "1 0 1 1", "1 0 0 1"),
]


@pytest.mark.parametrize(("space", "mask", "forbidden", "allowed"), MASKS)
def test_an_action_that_the_mask_forbids_is_invalid(space: str, mask: Any, forbidden: str, allowed: str) -> None:
    env = with_space(space, mask=mask)
    assert env.step(forbidden, "eos").info == {"invalid": 1.0, "reason": "it is not possible now"}
    assert env.step(allowed, "eos").info == {"invalid": 0.0}


def misspelled() -> Any:
    return "text".lowr()  # type: ignore[attr-defined]


def no_match() -> Any:
    return re.match("x", "y").group()  # type: ignore[union-attr]


def not_there() -> Any:
    return undefined  # type: ignore[name-defined]  # noqa: F821


class Later:
    """What a coroutine function returns, without the warning of a coroutine that nobody awaits."""

    def __await__(self) -> Any:
        yield


@pytest.mark.parametrize(("code", "error"), [(misspelled, "AttributeError"), (not_there, "NameError"),
                                             (Later, "TypeError"), (no_match, "")])  # fmt: skip
def test_a_mistake_in_extract_action_is_an_error_and_not_an_invalid_answer(code: Any, error: str) -> None:
    env = with_space("discrete")
    env._agent = returns(code)()
    if error:
        with pytest.raises((AttributeError, NameError, TypeError)) as raised:
            env.step("1", "eos")
        assert type(raised.value).__name__ == error
    else:  # the usual way to read an answer
        assert env.step("1", "eos").info == {"invalid": 1.0, "reason": "it could not be read"}


def test_a_demonstration_that_the_agent_itself_cannot_read_is_named() -> None:
    env = Gymnasium(id="Blackjack-v1", agent=f"{__name__}:Unreadable")
    env.reset(GAME, seed=0)
    with pytest.raises(ValueError, match=r"demonstrates '[01]', which its own extract_action does not take"):
        env.demonstrate()


class Unreadable(Agent):
    """Reads words, and demonstrates numbers."""

    def extract_action(self, text: str) -> int:
        return ["stick", "hit"].index(text)


class Corridor(gymnasium.Env[Any, Any]):
    """Walk from `start` to `goal`; its info lists what is possible."""

    observation_space, action_space = spaces.Discrete(10), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.given = options
        self.place, self.goal = (options or {}).get("start", 1), (options or {}).get("goal", 3)
        return self.place, self.info()

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.place += 1 if action else -1
        return self.place, float(self.place == self.goal), self.place == self.goal, False, self.info()

    def info(self) -> dict[str, Any]:
        mask = np.array([self.place > 0, True], np.int8)
        return {"action_mask": mask, "goal": self.goal, "words": ["left", "right"] if self.place else ["right"]}


gymnasium.register("Corridor-v0", entry_point=Corridor)


def test_info_and_possible_actions_are_shown() -> None:
    env = Gymnasium(id="Corridor-v0", show="You are at {observation}of {goal}. Possible: {actions} ({words}).")
    assert env.reset(GAME, seed=0)[-1]["content"] == "You are at 1\nof 3. Possible: 0, 1 (left right)."
    assert env.step("0", "eos").messages[-1]["content"] == "You are at 0\nof 3. Possible: 1 (right)."
    assert "Possible: 1 (right)." in env.step("0", "eos").messages[-1]["content"]  # said again after an invalid answer
    with pytest.raises(LmgymError, match=r"env.show: there is no 'goals'; did you mean 'goal'\?"):
        Gymnasium(id="Corridor-v0", show="{goals}").reset(GAME, seed=0)


@pytest.mark.parametrize("name", ["Pendulum-v1", "MountainCarContinuous-v0"])
def test_actions_that_cannot_be_listed_are_not_shown_as_none(name: str) -> None:
    with pytest.raises(
        LmgymError, match=r"env.show: the actions of Box\(.*\) cannot be listed, only those of a Discrete"
    ):
        Gymnasium(id=name, show="{observation}Possible: {actions}").reset(GAME, seed=0)


def test_a_row_says_how_an_episode_begins() -> None:
    env = Gymnasium(id="Corridor-v0", options={"start": "{place}", "goal": 9})
    assert env.reset(Example("a/0", "?", meta={"place": 5}), seed=0)[-1]["content"].strip() == "5"
    assert env._env.unwrapped.given == {"start": 5, "goal": 9}
    env.reset(Example("a/1", "?", meta={"place": 5, "options": {"goal": 7}}), seed=0)
    assert env._env.unwrapped.given == {"start": 5, "goal": 7}
    with pytest.raises(LmgymError, match=r"env.options.start: example 'a/2': there is no 'place'"):
        env.reset(Example("a/2", "?"), seed=0)
    plain = Gymnasium(id="Corridor-v0")
    plain.reset(GAME, seed=0)
    assert plain._env.unwrapped.given is None
