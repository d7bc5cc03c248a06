"""Reward functions as TRL, verifiers and reasoning-gym have them are recognised and called as these libraries do."""

import os
import re
from dataclasses import replace
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.logs.records import episode_metrics
from lmgym.rewards.adapters import style_of
from lmgym.rewards.base import Reward, call_reward, check_examples
from lmgym.rewards.building import build_rewards
from lmgym.rewards.check import check_reward
from lmgym.rollouts.rollout import apply_rewards
from lmgym.types import Episode, Example, Turn
from tests.contract import foreign_rewards

HERE = "tests.contract.foreign_rewards"
CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]


def foreign(name: str, **section: Any) -> Reward:
    return build_rewards({f"{HERE}:{name}": section})[0]


def answered(*texts: str, prompt: Any = "2+2=") -> list[Episode]:
    return [
        Episode(Example(f"a/{n}", prompt, ("4",), {"level": n, "answer": "4"}), 0, n, [Turn([1], [3, n], text=text)])
        for n, text in enumerate(texts)
    ]


EXPECTED: dict[str, tuple[str, list[float]]] = {  # of the answers "4" and "is 5", to "2+2="
    "trl_documented": ("trl", [1.0, 4.0]),
    "trl_answer": ("trl", [1.0, 0.0]),
    "trl_all": ("trl", [540.0, 541.0]),  # prompts, completions, level, answer, references; 4 characters; the last id
    "trl_later": ("trl", [1.0, 4.0]),
    "trl_state_if_any": ("trl", [1.0, 1.0]),
    "vf_answer": ("verifiers", [1.0, 0.0]),
    "vf_later": ("verifiers", [5.0, 8.0]),
    "vf_state": ("verifiers", [1.0, 2.0]),
    "rubric": ("verifiers", [1 + 0.25 * 5, 0.25 * 8]),
    "rg_score": ("reasoning_gym", [1.004, 0.004]),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", EXPECTED)
def test_a_form_is_recognised_and_called_in_a_worker_as_here(name: str) -> None:
    style, values = EXPECTED[name]
    assert style_of(getattr(foreign_rewards, name), name) == style
    worker = foreign(name)
    assert worker.pooled and worker.pooled.style == style
    assert call_reward(worker, answered("4", "is 5")) == values
    assert call_reward(foreign(name, pool=False), answered("4", "is 5")) == values


@pytest.mark.processes
@pytest.mark.parametrize("pool", [True, False])
def test_what_the_recipe_has_made_of_columns_and_completions_is_told(pool: bool) -> None:
    """`references: answer` takes the column, few_shot and system_prompt make chats of texts; the error says so."""
    taken = "the column that became them (task.references) is called so here: take 'references', a list of texts for"
    plain = [replace(one, example=replace(one.example, meta={"level": 1})) for one in answered("4")]
    with pytest.raises(LmgymError, match=re.escape(taken)):
        check_examples([foreign("trl_answer", pool=pool)], [one.example for one in plain])
    for name, episodes, hint in (
        ("trl_reads_answer", plain, f"'answer'.*; the examples have no column 'answer'; .*{re.escape(taken)}"),
        ("trl_strips", answered("4", prompt=CHAT), "completions are lists of messages .* or task.few_shot; read"),
        ("trl_chat", answered("4"), "completions are texts here, and no lists of messages"),
    ):
        with pytest.raises(LmgymError, match=rf"{name}' raised \w+: .*foreign_rewards.py:\d+; ") as raised:
            call_reward(foreign(name, pool=pool), episodes)
        assert re.search(hint, str(raised.value)), raised.value
    without = [replace(one, example=replace(one.example, references=())) for one in plain]
    with pytest.raises(LmgymError, match=r"no column 'answer'$"):
        call_reward(foreign("trl_reads_answer", pool=pool), without)


@pytest.mark.processes
def test_it_runs_in_a_process_of_its_own() -> None:
    assert call_reward(foreign("process"), answered("4")) != [os.getpid()]


def test_own_functions_stay_what_they_are() -> None:
    for function in (
        lambda texts, examples: [1.0],
        lambda texts, _: [1.0],
        lambda _texts, _examples, *, word="a": [1.0],
    ):
        assert style_of(function, "own") == "lmgym"


def test_a_function_of_no_known_form_is_refused_with_the_forms() -> None:
    sentence = (
        f"reward '{HERE}:nobody' takes (a, b), which is no form of reward that lmgym knows: (texts, examples) as "
        "lmgym's, (completions, **columns) as TRL's, (data_source, solution_str, ground_truth) as verl's, (queries, "
        "prompts, labels) as OpenRLHF's, (completion, answer) as verifiers', (answer, entry) as reasoning-gym's, nor a "
        "function that makes one of its arguments; rename its parameters, or say with the option 'style' which form it "
        "has"
    )
    with pytest.raises(LmgymError, match=f"^{re.escape(sentence)}$"):
        foreign("nobody")
    assert call_reward(foreign("nobody", style="lmgym", pool=False), answered("4")) == [1.0]
    with pytest.raises(LmgymError, match=r"takes \(examples, texts\), which is no form"):
        style_of(lambda examples, texts: [1.0], "swapped")
    with pytest.raises(LmgymError, match=r"takes \(\*arguments\), which is no form"):
        style_of(lambda *arguments: [1.0], "open")
    with pytest.raises(LmgymError, match="is str, and not a function"):
        build_rewards({"lmgym.rewards.text.form:__doc__": 1.0})


def test_what_lmgym_cannot_give_is_refused() -> None:
    with pytest.raises(LmgymError, match="needs 'trainer_state', which only TRL's trainer has; give the parameter a"):
        foreign("trl_state")
    with pytest.raises(LmgymError, match="needs 'states', which only a reward of whole groups has"):
        foreign("vf_group", style="verifiers")
    # A column that no example has: before training, and by the user's own test.
    for name, library in (("trl_answer", "TRL"), ("vf_parsed", "verifiers")):
        with pytest.raises(LmgymError, match=rf"{name}', written for {library}, needs '\w+' of each example, and no"):
            check_examples([foreign(name)], [Example("a/0", "?", meta={"level": 1})])
    with pytest.raises(LmgymError, match=r"needs 'answer' of each example, and no example has it in its meta"):
        check_reward(f"{HERE}:trl_answer", pool=False)
    check_examples([foreign("trl_answer")], [episode.example for episode in answered("4", "5")])
    check_reward(f"{HERE}:vf_answer", pool=False)  # the answer is the first reference


def test_lmgyms_own_rewards_have_no_other_style() -> None:
    assert build_rewards({"rouge2": {"style": "lmgym"}})
    with pytest.raises(LmgymError, match=r"'rewards\.rouge2\.style' is reasoning_gym, and 'rouge2' is .* lmgym's own"):
        build_rewards({"rouge2": {"style": "reasoning_gym"}})


def test_a_column_that_some_examples_lack_is_none_there() -> None:
    scored = answered("4", "4")
    scored[1] = replace(scored[1], example=replace(scored[1].example, meta={}))
    reward = foreign("trl_answer", pool=False)
    assert call_reward(reward, scored) == [1.0, None]  # not judged
    assert call_reward(reward, scored[1:]) == [None]


@pytest.mark.processes
@pytest.mark.parametrize("pool", [True, False])
def test_what_a_function_logs_is_recorded(pool: bool) -> None:
    """Numbers become components of weight 0, which the records average; texts stand beside the answer."""
    episodes = answered("4", "is 5")
    reward = foreign("trl_logs", pool=pool)
    apply_rewards(episodes, [reward])
    name = reward.name
    assert [one.reward_components for one in episodes] == [
        {name: 1.0, f"{name}/right": 0.5, f"{name}/length": float(length)} for length in (1, 4)
    ]
    assert [one.turns[-1].info for one in episodes] == [{f"{name}/text": "4"}, {f"{name}/text": "is 5"}]
    assert episode_metrics(episodes)[f"reward/{name}/length"] == 2.5 and [one.score for one in episodes] == [1.0, 1.0]


def test_chats() -> None:
    """verifiers always has messages; TRL has them if the prompt has."""
    assert call_reward(foreign("vf_later", pool=False), answered("4", prompt=CHAT)) == [5.0]
    assert call_reward(foreign("trl_documented", pool=False), answered("4444", prompt=CHAT)) == [1.0]  # one message


def test_an_error_names_the_line() -> None:
    line = foreign_rewards.raises.__code__.co_firstlineno + 1
    with pytest.raises(LmgymError, match=rf"raised ValueError: no at {re.escape(foreign_rewards.__file__)}:{line}$"):
        call_reward(foreign("raises", pool=False), answered("4"))


def test_a_method_of_reasoning_gym_is_refused() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    method = reasoning_gym.create_dataset("chain_sum", size=1, seed=0).score_answer
    assert style_of(method, "its own") == "reasoning_gym"
    with pytest.raises(LmgymError, match="take the reward 'reasoning_gym', which"):
        from lmgym.rewards.adapters import from_reasoning_gym

        from_reasoning_gym(method, "its own")


def test_an_entry_is_the_library_s_own_record() -> None:
    entry = {"question": "1+1=", "answer": "2", "metadata": {"terms": {"tuple": [1, 1]}}}
    seen: list[Any] = []

    def score(answer: str, entry: dict[str, Any]) -> float:
        seen.append((answer, entry))
        return float(answer == entry["answer"])

    from lmgym.rewards.adapters import from_reasoning_gym

    example = Example("a/0", "1+1=", ("2",), {"entry": entry, "dataset": "chain_sum"})
    episode = Episode(example, 0, 0, [Turn([1], [2], text="well <answer> 2 </answer>")])
    assert from_reasoning_gym(score)([episode]) == [1.0]
    assert seen == [("2", {"question": "1+1=", "answer": "2", "metadata": {"terms": (1, 1)}})]
    for text, answer in {
        " 2 ": "2",
        "<answer>": "<answer>",
        "</answer> 2": "</answer> 2",
        "<answer>1 <answer>2</answer> <answer>": "1 <answer>2",
        "<answer>3</answer>" + "<answer>" * 500_000: "3",  # in linear time: not in an hour
    }.items():
        from_reasoning_gym(score)([Episode(example, 0, 0, [Turn([1], [2], text=text)])])
        assert seen[-1][0] == answer


def test_verifiers_own_rubric_gives_the_same() -> None:
    """verifiers 0.1, where it is installed: its Rubric scores the same rollouts."""
    vf = pytest.importorskip("verifiers")
    if not hasattr(vf, "Rubric"):
        pytest.skip("a later version, without Rubric")
    import asyncio

    from lmgym.rewards.adapters import from_verifiers

    functions = [foreign_rewards.vf_answer, foreign_rewards.vf_later]
    rubric = vf.Rubric(funcs=functions, weights=[1.0, 0.25])
    scored = answered("4", "is 5")
    ours = from_verifiers(rubric)(scored)
    for episode, value in zip(scored, ours, strict=True):
        state = vf.State(
            input={"prompt": [{"role": "user", "content": "2+2="}], "example_id": 0, "answer": "4", "task": ""},
            completion=[{"role": "assistant", "content": episode.text}], trajectory=[],
        )  # fmt: skip
        asyncio.run(rubric.score_rollout(state))
        assert state["reward"] == pytest.approx(value)
