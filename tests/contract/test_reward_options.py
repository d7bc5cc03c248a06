"""What a recipe may say of any reward: what it sees of a model's thoughts, and that it is written as TRL's are."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmgym.config.build import build_config
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.inference.base import Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.load import load_policy
from lmgym.models.policy_section import PolicySection
from lmgym.processes.pool import Failure, ProcessPool
from lmgym.rewards.base import call_reward, check_examples, episodes
from lmgym.rewards.building import build_rewards
from lmgym.rewards.check import check_reward
from lmgym.rewards.running import parallel
from lmgym.rewards.views import strip_thoughts, without_thinking
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.play import background_scoring
from lmgym.rollouts.rollout import apply_rewards, collect
from lmgym.training.setup import held_out_rewards
from lmgym.types import Episode, Example, Turn
from tests import runs

HERE = "tests.contract.test_reward_options"
ODD = "tests.contract.odd_rewards"
MINE = {"reward": "length", "target": 4}


def answered(*texts: str, prompt: Any = "2+2=", **meta: Any) -> list[Episode]:
    return [
        Episode(Example(f"a/{n}", prompt, ("4",), {"level": n, **meta}), 0, n, [Turn([1, 2], [3, n], text=text)])
        for n, text in enumerate(texts)
    ]


# ---------------------------------------------------------------- names


def test_a_reward_may_judge_twice_under_a_name_of_its_own() -> None:
    section = {
        "words": {"letters": "ascii"},
        "short": {"reward": "length", "target": 2, "weight": 0.5, "strip_thinking": True},
        "long": {"reward": "length", "target": 4},
        "elsewhere": {"reward": f"{HERE}:twice"},
    }
    built = build_rewards(section)
    assert [(reward.name, reward.weight) for reward in built] == [
        ("words", 1.0), ("short", 0.5), ("long", 1.0), ("elsewhere", 1.0)
    ]  # fmt: skip
    scored = answered("one two", "<think>one</think>one two three")
    # the target is met, then missed by one word of two without the thought; by two of four: 2 words, and 6 with tags
    assert [call_reward(reward, scored) for reward in built[1:]] == [[1.0, 0.5], [0.5, 0.5], [2.0, 2.0]]


def test_a_name_that_evaluations_use_themselves_is_refused() -> None:
    with pytest.raises(LmgymError, match="evaluations report something else as 'truncated'"):
        build_rewards({"truncated": {"reward": "length", "target": 4}})
    for name in ("length/mean", "step", "kind", "split", "count", "reward/low", "unjudged/mine", "environment/mine"):
        with pytest.raises(LmgymError, match=rf"^key 'rewards\.{name}': evaluations report something else as"):
            build_rewards({name: {"reward": "length", "target": 4}})


@pytest.mark.parametrize("algorithm", ["grpo", "supervised", "reward_model", "process_reward_model"])
def test_all_that_the_record_of_an_evaluation_holds_is_refused(algorithm: str, tmp_path: Path) -> None:
    """A number that is reported from some day on, and not refused here, would be replaced by a reward of its name."""
    given = {"task": runs.GIVEN[algorithm], "rewards": None} if algorithm in runs.GIVEN else {"rewards": {"mine": MINE}}
    evaluation = {"every": 1, "examples": 4, "reference_nll": algorithm == "grpo"}
    folder = runs.run(tmp_path / "run", algorithm=algorithm, steps=1, evaluation=evaluation, **given)
    every = [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "evaluation"]
    names = {name for record in every for name in record if name.split("/")[0] != "mine"}
    assert len(names) > 5
    for name in names:
        with pytest.raises(LmgymError, match="evaluations report something else as"):
            build_rewards({name: MINE})


def test_a_reward_is_paid_once() -> None:
    [episode] = scored = [Episode(Example("a/0", "?"), 0, 0, [Turn([1], [2], text="one two")])]
    apply_rewards(scored, build_rewards({"words": 1.0}))
    with pytest.raises(LmgymError, match="reward 'words' has judged some of these episodes before, and would be paid"):
        apply_rewards(scored, build_rewards({"regex": {"pattern": "[0-9]"}, "words": 1.0}))
    assert episode.score == 2.0 and "regex" not in episode.reward_components
    apply_rewards(scored, build_rewards({"short": {"reward": "words", "weight": 0.5}}))  # another one is added
    assert episode.score == 3.0


def test_a_metric_does_not_take_the_place_of_a_reward() -> None:
    tree = {"task": "arithmetic", "policy": {"model": "builtin:tiny"}, "rewards": {"length": {"target": 2}}}
    both = build_config({**tree, "evaluation": {"metrics": {"length": {"target": 2, "weight": 0.5}}}})
    assert [(reward.name, reward.weight) for reward in held_out_rewards(both, both.stages[0])] == [("length", 1.0)]
    other = build_config({**tree, "evaluation": {"metrics": {"length": {"target": 3}}}})
    with pytest.raises(LmgymError, match=r"'evaluation\.metrics\.length' is a reward too, with other arguments"):
        held_out_rewards(other, other.stages[0])


def twice(texts: list[str], examples: list[Example]) -> list[float]:
    return [2.0 for _ in texts]


def test_a_name_of_ones_own_must_stand_for_a_reward() -> None:
    for section, sentence in (
        ({"judge": 1.0}, r"unknown reward 'judge'"),
        ({"judge": {"reward": "lenght"}}, r"did you mean 'length'"),
        ({"judge": {"reward": "length", "goal": 3}}, r"unknown key 'rewards.judge.goal'"),
        ({"judge": {"reward": 3}}, r"key 'rewards.judge.reward'"),
    ):
        with pytest.raises(LmgymError, match=sentence):
            build_rewards(section)


# ---------------------------------------------------------------- thoughts


@pytest.mark.parametrize(
    ("text", "seen", "opened"),
    [
        ("4", "4", ""),
        ("<think>3?</think>4", "4", "4"),
        ("3?</think>\n\n4", "\n\n4", "\n\n4"),  # the chat template wrote the first tag
        ("<think>3? 4?", "", ""),
        ("<think>3?</think>4<think>or 5", "", ""),
        ("<think>a</think>b<think>c</think>4", "4", "4"),
        ("</think>", "", ""),
        ("", "", ""),
        ("<thinking>4", "<thinking>4", ""),
    ],
)
def test_what_is_left_without_thoughts(text: str, seen: str, opened: str) -> None:
    assert without_thinking(text) == seen
    assert without_thinking(text, opened=True) == opened


def test_a_reward_may_see_the_text_behind_the_thoughts_alone() -> None:
    texts = ["<think>#### 4</think>#### 5", "<think>#### 5</think>#### 4", "<think>#### 4", "#### 4"]
    scored = answered(*texts)
    before = [asdict(episode) for episode in scored]
    for stripping, values in ((False, [0.0, 1.0, 1.0, 1.0]), (True, [0, 1, 0, 1]), ("opened", [0, 1, 0, 0])):
        reward = build_rewards({"final_answer": {"strip_thinking": stripping}})[0]
        assert call_reward(reward, scored) == values
    assert call_reward(build_rewards({"final_answer": 1.0})[0], scored) == [0.0, 1.0, 1.0, 1.0]  # off, unless asked for
    assert [asdict(episode) for episode in scored] == before  # what is trained on is what was sampled


@pytest.mark.parametrize(
    ("pieces", "stripping", "left"),
    [
        (["<think>#### 7. Check 3+4=", " hmm"], True, ""),  # no end
        (["<think>maybe 9 </think>3+4=", "\n#### 7"], True, "3+4=7\n#### 7"),
        (["<think>3+4=", " so</think>\n#### 7"], True, "\n#### 7"),
        (["thought: 3+4=", " ok</think>\nIt is 3+4=", "\n#### 7"], "opened", "\nIt is 3+4=7\n#### 7"),
        (["3+4=", "\n#### 7"], "opened", ""),
        (["3+4=", "\n#### 7"], True, "3+4=7\n#### 7"),
    ],
)
def test_thoughts_are_left_out_of_all_turns_of_a_message(pieces: list[str], stripping: Any, left: str) -> None:
    """A calculator goes on in the model's message; an earlier message stays as it is."""
    turns = [Turn([1], [2], text=piece, continuation="7", unfinished=True) for piece in pieces]
    turns[-1].continuation, turns[-1].unfinished = None, False
    earlier = Turn([1], [2], text="<think>old</think>#### 8")
    episode = Episode(Example("a/0", "3+4?", ("7",)), 0, 0, [earlier, *turns])
    shown = strip_thoughts(episode, stripping)
    assert shown.text == left and shown.turns[0] == earlier
    assert [turn.action_ids for turn in shown.turns] == [turn.action_ids for turn in episode.turns]
    assert strip_thoughts(replace(episode, turns=[]), stripping).turns == []
    reward = build_rewards({"final_answer": {"strip_thinking": stripping}})[0]
    assert call_reward(reward, [episode]) == [float("#### 7" in left)]


def test_a_reward_of_episodes_sees_copies() -> None:
    scored = answered("<think>a b c</think>d")
    scored[0].turns.insert(0, Turn([1], [2], text="<think>first</think>x"))

    @episodes
    def looks(given: list[Episode]) -> list[float]:
        assert [turn.text for turn in given[0].turns] == ["<think>first</think>x", "d"]
        assert given[0].turns[1].action_ids == scored[0].turns[1].action_ids
        return [1.0]

    assert call_reward(replace(build_rewards({"words": 1.0})[0], function=looks, strip_thinking=True), scored) == [1.0]
    assert scored[0].text == "<think>a b c</think>d"


def test_wrong_options_are_named() -> None:
    for section, sentence in (
        ({"strip_thinkin": True}, r"unknown key 'rewards.words.strip_thinkin'; did you mean 'strip_thinking'"),
        ({"strip_thinking": "closed"}, r"key 'rewards.words.strip_thinking.*got 'closed'"),
        ({"style": "nemo"}, r"key 'rewards.words.style': .*'lmgym', 'trl', 'verl', .* or 'reasoning_gym', got"),
    ):
        with pytest.raises(LmgymError, match=sentence):
            build_rewards({"words": section})


# ---------------------------------------------------------------- rewards written for TRL

seen: list[dict[str, Any]] = []


def notes(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
    seen.append({"prompts": prompts, "completions": completions, **columns})
    columns["log_metric"]("mean", 1.0)
    return [None if "none" in str(text) else float(len(str(text))) for text in completions]


def brief(completions: list[str], level: list[int]) -> np.ndarray:
    return np.array([len(text) + place for text, place in zip(completions, level, strict=True)])


def hungry(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
    return [0.0] * len(completions)


async def later(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [0.0]


def own(texts: list[str], examples: list[Example]) -> list[float]:
    return [0.0] * len(texts)


def broken(completions: list[str], **columns: Any) -> list[float]:
    return [1.0]


def raises(completions: list[str], **columns: Any) -> list[float]:
    raise ValueError("no")


def rewarded(function: Callable[..., Any], **options: Any) -> Any:
    return build_rewards({f"{HERE}:{function.__name__}": {"style": "trl", **options}})[0]


def test_a_function_of_trl_gets_what_trl_gives() -> None:
    seen.clear()
    scored = answered("four", "none", color="red")
    scored[1] = replace(scored[1], example=replace(scored[1].example, meta={"level": 7}))
    assert call_reward(rewarded(notes), scored) == [4.0, None]  # not judged
    given = dict(seen[0])
    assert callable(given.pop("log_metric"))  # log_extra it does not name
    assert given == {
        "prompts": ["2+2=", "2+2="],
        "completions": ["four", "none"],
        "completion_ids": [[3, 0], [3, 1]],
        "references": [["4"], ["4"]],
        "level": [0, 7],
        "color": ["red", None],
    }


def test_chats_are_lists_of_messages_as_in_trl() -> None:
    seen.clear()
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    call_reward(rewarded(notes, strip_thinking=True), answered("<think>x</think>4", prompt=chat))
    assert seen[0]["prompts"] == [chat]
    assert seen[0]["completions"] == [[{"role": "assistant", "content": "4"}]]


def test_a_function_of_trl_is_a_reward_like_others() -> None:
    reward = rewarded(brief, weight=0.5)
    assert (reward.name, reward.weight) == (f"{HERE}:brief", 0.5)
    assert call_reward(reward, answered("ab", "abc")) == [2.0, 4.0]
    check_reward(f"{HERE}:notes", style="trl")
    with pytest.raises(LmgymError, match="needs 'trainer_state', which only TRL's trainer has"):
        rewarded(hungry)
    line = raises.__code__.co_firstlineno + 1
    with pytest.raises(LmgymError, match=rf"raised ValueError: no at {__file__}:{line}$"):
        call_reward(rewarded(raises), answered("a"))
    with pytest.raises(LmgymError, match="returned 1 values for 2 episodes"):
        call_reward(rewarded(broken), answered("a", "b"))
    with pytest.raises(
        LmgymError, match=r"reward '.*:notes' of style trl: the examples have a column 'prompts'; call it"
    ):
        call_reward(rewarded(notes), answered("a", prompts=1))
    assert call_reward(rewarded(later), answered("a")) == [0.0]
    with pytest.raises(
        LmgymError, match=r"reward '.*:own' takes examples, texts; one of style trl is called with prompts"
    ):
        rewarded(own)
    with pytest.raises(LmgymError, match=r"unknown key 'rewards.*:notes.alpha'"):
        rewarded(notes, alpha=1)


@pytest.mark.slow
def test_rewards_of_trl_itself() -> None:
    """think_format_reward, the library's own, on chats and its own documented cases."""
    pytest.importorskip("trl")
    chat = [{"role": "user", "content": "?"}]
    scored = answered("<think>\nThis is my reasoning.\n</think>\nThis is my answer.", "<think>\nno end", prompt=chat)
    assert call_reward(build_rewards({"trl.rewards:think_format_reward": {"style": "trl"}})[0], scored) == [1.0, 0.0]


# Option `parallel`


class Uneven:
    """Ends after one, two or three turns."""

    def reset(self, example: Example, seed: int) -> str:
        self.left = 1 + int(example.id.removeprefix("x/")) % 3
        return str(example.prompt)

    def step(self, text: str, stop: str) -> Step:
        self.left -= 1
        return Step(messages=[{"role": "user", "content": "and?"}], terminated=self.left == 0)


@pytest.mark.processes
def test_texts_are_scored_in_processes_and_a_bad_one_costs_itself() -> None:
    how = {"processes": 2, "seconds": 0.5, "failed": -1.0}
    section = {f"{ODD}:slow_or_worse": {"worth": 2.0, "parallel": how}}
    texts = [*(["a b", "c"] * 10), "for ever", "d e f", "crash", "raise", ""]
    episodes = [
        Episode(Example(f"x/{n}", "?", ("one", "two"), {"n": [n]}), n, n, [Turn([], [1], text=text)])
        for n, text in enumerate(texts)
    ]
    reward = build_rewards(section)[0]
    with pytest.warns(UserWarning, match=r"slow_or_worse: 3 of 25 texts could not be scored and count as -1"):
        values = call_reward(reward, episodes, timeout=1e-9)
    assert values == [8.0, 4.0] * 10 + [-1.0, 12.0, -1.0, -1.0, 0.0]


@pytest.mark.processes
def test_without_a_price_a_bad_text_is_not_judged() -> None:
    section = {f"{ODD}:slow_or_worse": {"parallel": {"processes": 2, "seconds": 0.5}}}
    values = call_reward(build_rewards(section)[0], answered("a b", "raise", "c", "for ever"))
    assert [values[0], values[2]] == [2.0, 1.0]
    assert [value.kind for value in values[1::2] if isinstance(value, Failure)] == ["error", "time"]


@pytest.mark.processes
def test_a_reward_that_can_score_nothing_in_processes_is_an_error() -> None:
    section = {f"{ODD}:slow_or_worse": {"parallel": {"processes": 1, "failed": 0}}}
    expected = "no text could be scored in a process of its own; the first: RuntimeError: no"
    with pytest.raises(LmgymError, match=expected):
        call_reward(build_rewards(section)[0], answered("raise", "raise"))


@pytest.mark.processes
def test_a_metric_in_processes_is_the_metric() -> None:
    """chrF of twenty pairs, whole-corpus figure and check before training included."""
    texts = [f"the cat sat on mat {n}" for n in range(20)]
    examples = [Example(f"x/{n}", "?", (f"the cat sat on the mat {n % 3}",)) for n in range(20)]
    episodes = [Episode(e, n, n, [Turn([], [1], text=t)]) for n, (e, t) in enumerate(zip(examples, texts, strict=True))]
    plain, processes = build_rewards({"chrf": {}})[0], build_rewards({"chrf": {"parallel": {"processes": 2}}})[0]
    assert call_reward(processes, episodes) == call_reward(plain, episodes)
    assert processes.function.corpus is plain.function.corpus
    with pytest.raises(LmgymError, match="reference"):
        check_examples([processes], [Example("x/0", "?")])


@pytest.mark.slow
def test_answers_are_scored_while_others_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler tells of each answer once, with others still open; what has been scored by then is not asked again,
    and the rewards are what they are without processes."""
    policy = load_policy(PolicySection(model="builtin:tiny"))
    actor = Actor(Sampler(policy, 4), policy.tokenizer)
    prompts = [(n // 4, Example(f"x/{n // 4}", f"{n // 4} cats: ", ("the cat sat",))) for n in range(24)]
    sampling = Sampling(max_new_tokens=24, stop_ids=tuple(range(60, 90)))
    asked: list[list[Any]] = []
    real = ProcessPool.map

    def counted(pool: ProcessPool, items: list[Any], seconds: float, by_clock: bool = False) -> list[Any]:
        asked.extend(row for item in items for row in item["rows"])
        return real(pool, items, seconds, by_clock)

    monkeypatch.setattr(ProcessPool, "map", counted)
    told: list[tuple[str, int]] = []
    rewards = build_rewards({"chrf": {"strip_thinking": True, "parallel": {"processes": 2}}, "length": {"target": 3}})
    begin = background_scoring(rewards)

    def ended(episode: Episode) -> None:
        told.append((episode.text, len(asked)))
        begin(episode)

    played = collect(prompts, actor, sampling, (0, "test"), ended=ended)
    assert sorted(text for text, _ in told) == sorted(episode.text for episode in played)
    begun = len(asked)
    assert begun  # before the rewards are asked
    apply_rewards(played, rewards)
    assert sorted(row[0] for row in asked) == sorted(episode.text for episode in played)  # once each
    again = collect(prompts, actor, sampling, (0, "test"))
    plain = build_rewards({"chrf": {"strip_thinking": True}, "length": {"target": 3}})
    apply_rewards(again, plain)
    assert [episode.reward_components for episode in played] == [episode.reward_components for episode in again]
    assert background_scoring(plain) is None
    assert background_scoring(build_rewards({"chrf": {"shaping": True, "parallel": {}}})) is None


@pytest.mark.processes
def test_what_is_wrong_beside_the_rollout_is_said_when_the_rewards_are_asked() -> None:
    reward = build_rewards({f"{ODD}:slow_or_worse": {"parallel": {"processes": 1, "failed": 0}}})[0]
    begin, failing = background_scoring([reward]), answered("raise", "raise")
    for episode in failing:
        begin(episode)
    with pytest.raises(LmgymError, match="no text could be scored in a process of its own"):
        call_reward(reward, failing)
    begin(replace(failing[0], example=Example("x", "?", meta={"no": {1}})))  # a set is no JSON
    assert call_reward(reward, answered("a b")) == [2.0]


def test_rows_that_could_not_be_asked_early_are_left_and_others_go_on() -> None:
    def ask(rows: list[list[Any]]) -> list[int]:
        if ["bad"] in rows:
            raise OSError("no pipe")
        return [len(row[0]) for row in rows]

    early = parallel.BackgroundScorer(ask)
    early.begin(["bad"])
    assert early.finish() == {}
    early.begin(["abc"])
    assert early.finish() == {'["abc"]': 3}
    assert early.finish() == {}


def test_a_game_that_is_over_is_told_of_while_others_go_on() -> None:
    policy = load_policy(PolicySection(model="builtin:tiny"))
    actor, told = Actor(Sampler(policy, 8), policy.tokenizer), list[Episode]()
    prompts = [(n, Example(f"x/{n}", f"{n}: ")) for n in range(12)]
    played = collect(prompts, actor, Sampling(max_new_tokens=2), (0, "test"), Uneven, told.append)
    assert {len(episode.turns) for episode in played} == {1, 2, 3}
    assert 4 <= len(told) < 12 and all(any(one is episode for episode in played) for one in told)


def test_parallel_says_what_it_cannot_do() -> None:
    with pytest.raises(LmgymError, match=r"unknown key 'rewards\.chrf\.parallel\.process'; did you mean 'processes'"):
        build_rewards({"chrf": {"parallel": {"process": 2}}})
    with pytest.raises(LmgymError, match="must be at least 1"):
        build_rewards({"chrf": {"parallel": {"processes": 0}}})
    with pytest.raises(LmgymError, match="this one takes whole episodes"):
        build_rewards({"judge_score": {"model": "none", "parallel": {}}})

    @registry.register("reward", "local_for_parallel")
    def local(texts, examples):
        return [0.0] * len(texts)

    with pytest.raises(LmgymError, match="cannot import"):
        build_rewards({"local_for_parallel": {"parallel": {}}})


# Option `correct_is_one`


def judged(texts: list[str], examples: list[Example]) -> list[float]:
    seen.append({"texts": texts})
    return [len(text) / 100 for text in texts]


def test_a_right_answer_is_worth_one_and_is_not_judged() -> None:
    seen.clear()
    section: dict[str, Any] = {f"{HERE}:judged": {"correct_is_one": True, "pool": False}}
    scored = answered("#### 4", "4", "the answer is: 5", "#### 4.0")
    assert call_reward(build_rewards(section)[0], scored) == [1.0, 0.01, 0.16, 1.0]
    assert seen == [{"texts": ["4", "the answer is: 5"]}]  # 4 alone is announced by nothing
    section[f"{HERE}:judged"]["correct_is_one"] = "math_equal"
    [reward] = build_rewards(section)
    assert reward.correct(["#### 8/2", "#### 5"], [scored[0].example] * 2) == [True, False]
    with pytest.raises(LmgymError, match="needs a reference, and that of example"):
        check_examples([reward], [Example("x/0", "?")])
    with pytest.raises(LmgymError, match=r"key 'rewards.*judged.correct_is_one': .*got 'bleu'"):
        build_rewards({f"{HERE}:judged": {"correct_is_one": "bleu"}})


def test_a_line_that_is_right_is_worth_one() -> None:
    reward = build_rewards({f"{HERE}:judged": {"correct_is_one": True, "each_turn": True, "pool": False}})[0]
    turns = [Turn([1], [2], text="2+2=4\n", continuation=""), Turn([], [3], text="#### 4")]
    episode = Episode(Example("x/0", "?", ("4",)), 0, 0, turns)
    apply_rewards([episode], [reward])
    assert [turn.reward for turn in episode.turns] == [0.06, 1.0]
