"""Rewards that pay token by token, and shaping: numbers worked by hand, and that they add up to the answer's reward."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmgym.algorithms.actor_critic import A2C, PPO
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.reinforce_stable import ReinforceStable
from lmgym.batch import collate
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.base import Reward, call_reward
from lmgym.rewards.building import build_rewards
from lmgym.rewards.token_credit import each_token, rewards_by_token, token_prefixes
from lmgym.rollouts.rollout import apply_rewards
from lmgym.types import Episode, Example, Turn
from tests import models, rounding, runs

BYTES = models.tokenizer()


@register("reward", "capitals_for_test")
@each_token
def capitals(episodes, tokenizer, *, worth: float = 1.0):
    """`worth` for each capital letter, at its token."""
    return [[worth * tokenizer.decode([id]).isupper() for id in e.turns[-1].action_ids] for e in episodes]


def answered(*texts: str, ended: bool = True) -> list[Episode]:
    """One episode per text, a token a byte, and the end of sequence."""
    episodes = []
    for place, text in enumerate(texts):
        ids = BYTES(text, add_special_tokens=False)["input_ids"] + ([models.EOS] if ended else [])
        episodes.append(Episode(Example(f"a/{place}", "?"), 0, place, [Turn([9], ids, [-1.0] * len(ids), text)]))
    return episodes


# What a turn says of its tokens, in a batch


def test_a_batch_has_each_tokens_reward_and_the_rest_on_the_last_one() -> None:
    """A reward of 2 of which .25 and .5 were earned on the way: 1.25 is left for the last token."""
    turn = Turn([5], [6, 7, 2], reward=2.0, token_rewards=[0.25, 0.5, 0.0])
    batch = collate([Episode(Example("x", "?"), 0, 0, [turn], score=2.0)])
    assert batch.rewards.tolist() == [[0, 0.25, 0.5, 1.25]]
    with pytest.raises(LmgymError, match="a turn of 3 actions has 1 token_rewards"):
        collate([Episode(Example("x", "?"), 0, 0, [replace(turn, token_rewards=[1.0])])])


def test_ppo_discounts_a_reward_from_the_token_that_earned_it() -> None:
    """gamma .5, lambda 1, no values: the return of token t is the sum of what comes, halved at each step."""
    turn = Turn([5], [6, 7, 2], [-1.0] * 3, reward=1.75, token_rewards=[1.0, 0.5, 0.25])
    batch = collate([Episode(Example("x", "?"), 0, 0, [turn], score=1.75)])
    nothing = torch.zeros_like(batch.rewards)
    batch = batch.replace(values=nothing, logprobs_old=nothing, last_values=torch.zeros(1))
    for algorithm in (PPO(gamma=0.5, gae_lambda=1.0, whiten="none"), A2C(gamma=0.5, gae_lambda=1.0)):
        returns = algorithm.advantages(batch).returns
        assert returns is not None
        assert returns.tolist() == [[0, 1 + 0.5 * (0.5 + 0.5 * 0.25), 0.5 + 0.5 * 0.25, 0.25]]
    by_turn = (
        ReinforceStable(kl_coefficient=0.0).advantages(batch).returns
    )  # a reward reaches the actions up to its own
    assert by_turn is not None and by_turn.tolist() == [[0, 1.75, 0.75, 0.25]]


# Rewards that pay token by token


def test_a_reward_of_tokens_is_paid_at_its_tokens() -> None:
    episodes = answered("aBC", "b")
    rewards = build_rewards({"capitals_for_test": {"weight": 2.0, "worth": 3.0}, "words": 0.5})
    apply_rewards(episodes, rewards, tokenizer=BYTES)
    first, second = episodes
    assert first.reward_components == {"capitals_for_test": 6.0, "words": 1.0} and first.score == 12.5
    assert first.turns[0].token_rewards == [0.0, 6.0, 6.0, 0.0]
    assert collate(episodes).rewards[0].tolist() == [0, 0, 6, 6, 0.5]  # the reward of the whole text is at its end
    assert second.reward_components["capitals_for_test"] == 0.0 and second.score == 0.5


def test_two_rewards_of_tokens_add_up() -> None:
    (episode,) = answered("Ab cd")
    again = {"reward": "capitals_for_test", "worth": 10.0}
    apply_rewards(
        [episode],
        build_rewards({"capitals_for_test": 1.0, "again": again, "words": {"shaping": True}}),
        tokenizer=BYTES,
    )
    assert episode.turns[0].token_rewards == [11.0 + 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert episode.score == episode.turns[0].reward == 13.0


def test_what_a_reward_of_tokens_must_return() -> None:
    episodes = answered("ab")
    with pytest.raises(LmgymError, match="pays token by token, for which it needs the tokenizer"):
        apply_rewards(episodes, build_rewards({"capitals_for_test": 1.0}))
    with pytest.raises(LmgymError, match=r"let lmgym\.apply_rewards apply it"):
        call_reward(build_rewards({"capitals_for_test": 1.0})[0], episodes)
    for option in ({"shaping": True}, {"strip_thinking": True}, {"post_process": "three_sentence_summary"}):
        with pytest.raises(LmgymError, match=f"'rewards.capitals_for_test.{next(iter(option))}'.*leave it out"):
            build_rewards({"capitals_for_test": option})
    for returned, complaint in (
        ([[1.0]], "returned 1 values for the 3 actions of example 'a/0'"),
        ([[1.0, float("nan"), 0.0]], "returned nan for example 'a/0'"),
        ([], "returned 0 values for 1 episodes"),
    ):
        reward = Reward("mine", 1.0, each_token(lambda episodes, tokenizer, value=returned: value))
        with pytest.raises(LmgymError, match=complaint):
            apply_rewards(answered("ab"), [reward], tokenizer=BYTES)


# Shaping


def test_beginnings_are_the_answer_up_to_each_token() -> None:
    (episode,) = answered("ab\u00e9")
    parts = token_prefixes(episode, BYTES)
    assert [part.text for part in parts] == ["a", "ab", "ab\ufffd", "ab\u00e9", "ab\u00e9"]  # half a letter, its end
    assert [len(part.turns[-1].action_ids) for part in parts] == [1, 2, 3, 4, 5]
    assert parts[-1] is episode and episode.turns[0].text == "ab\u00e9"


def test_shaping_pays_each_token_what_it_changes() -> None:
    """`words` of "ab cd": a 1, ab 1, "ab " 1, "ab c" 2, 2, its end 2. `length` to 2 letters of "abc": .5, 1, .5."""
    (episode,) = answered("ab cd")
    assert rewards_by_token(build_rewards({"words": {"shaping": True}})[0], [episode], BYTES) == [
        (2.0, [1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    ]
    (episode,) = answered("abc")
    target = {"length": {"shaping": True, "unit": "characters", "target": 2}}
    assert rewards_by_token(build_rewards(target)[0], [episode], BYTES) == [(0.5, [0.5, 0.5, -0.5, 0.0])]


def test_shaping_is_of_the_last_message_and_of_what_the_reward_is_shown() -> None:
    turns = [Turn([9], [40, models.EOS], text="x"), replace(answered("<think>x</think>ab")[0].turns[0])]
    episode = Episode(Example("x", "?"), 0, 0, turns)
    apply_rewards([episode], build_rewards({"words": {"shaping": True, "strip_thinking": True}}), tokenizer=BYTES)
    earned = episode.turns[1].token_rewards
    assert episode.turns[0].token_rewards is None and earned is not None
    # "<", "<t" ... have no tag yet and count as text; inside the thought there is none; "a" behind it is a word again.
    assert sum(earned) == episode.score == 1.0 and earned[-3:] == [1.0, 0.0, 0.0]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.lists(st.text("ab ,.\u00e91", max_size=12), min_size=2, max_size=4), st.booleans(), st.floats(-2, 2))
def test_tokens_add_up_to_the_reward_of_the_whole_text(texts: list[str], ended: bool, weight: float) -> None:
    section = {"length": {"unit": "characters", "target": 5, "weight": weight}, "type_token_ratio": {"weight": 1.0}}
    plain, shaped = (answered(*(text or "a" for text in texts), ended=ended) for _ in range(2))
    apply_rewards(plain, build_rewards(section))
    apply_rewards(
        shaped, build_rewards({name: {**own, "shaping": True} for name, own in section.items()}), tokenizer=BYTES
    )
    for one, other in zip(plain, shaped, strict=True):
        assert one.reward_components == other.reward_components and one.score == other.score  # bit for bit
        assert other.turns[-1].token_rewards is not None
        assert sum(other.turns[-1].token_rewards) == pytest.approx(one.score, abs=1e-9)
    rewards = collate(shaped).rewards
    loose = rounding.rounding(rewards.shape[1], 4.0)  # a sum over the tokens; one of weight 2 or 1 each is at most 3
    assert rewards.sum(1).tolist() == pytest.approx([episode.score for episode in plain], abs=loose)
    assert GRPO(group_size=len(texts)).advantages(collate(shaped)).advantages.tolist() == (
        GRPO(group_size=len(texts)).advantages(collate(plain)).advantages.tolist()
    )


def test_the_tasks_of_a_mixture_hold_for_tokens() -> None:
    episodes = answered("AB", "AB")
    for episode, task in zip(episodes, ("one", "other"), strict=True):
        episode.example = replace(episode.example, meta={"task": task, "mixture": {"one": 1.0, "other": 1.0}})
    section = {"capitals_for_test": {"tasks": ["one"]}, "words": {"tasks": ["other"], "shaping": True}}
    apply_rewards(episodes, build_rewards(section), tokenizer=BYTES)
    assert [episode.turns[0].token_rewards for episode in episodes] == [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


@pytest.mark.slow
def test_a_shaped_run_logs_what_its_tokens_earned(tmp_path: Path) -> None:
    """PPO of two steps: evaluations are those of the unshaped reward, and what is logged adds up."""
    reward = {"unit": "characters", "target": 6}
    common = {"algorithm": {"name": "ppo", "group_size": 2}, "steps": 2, "checkpoint": {"every": 2}}
    shaped = runs.run(tmp_path / "shaped", rewards={"length": {**reward, "shaping": True}}, **common)
    plain = runs.run(tmp_path / "plain", rewards={"length": reward}, **common)
    step = [r for r in runs.records(shaped / "rollouts.jsonl") if r["kind"] == "train"]
    assert step
    for record in step:
        (turn,) = record["turns"]
        assert len(turn["token_rewards"]) == len(turn["action_ids"])
        assert sum(turn["token_rewards"]) == pytest.approx(turn["reward"]) == pytest.approx(record["score"])
    before = [json.loads((folder / "summary.json").read_text())["before"] for folder in (shaped, plain)]
    assert before[0] == before[1]
    losses = [runs.records(folder / "metrics.jsonl")[1] for folder in (shaped, plain)]
    assert losses[0]["reward"] == losses[1]["reward"] and losses[0] != losses[1]  # another credit, another update


# Post-processing


def test_a_reward_sees_the_post_processed_text() -> None:
    (episode,) = answered("One a. Two b. Three c. Four d.")
    reward = build_rewards({"words": {"post_process": "three_sentence_summary"}})[0]
    assert call_reward(reward, [episode]) == [6.0] and call_reward(build_rewards({"words": 1.0})[0], [episode]) == [8.0]
    assert registry.get("post_processor", "three_sentence_summary")(episode.text) == "One a.\nTwo b.\nThree c."
    assert episode.text == "One a. Two b. Three c. Four d."
    with pytest.raises(
        LmgymError, match="unknown post_processor 'three_sentences'; did you mean 'three_sentence_summary'"
    ):
        build_rewards({"words": {"post_process": "three_sentences"}})


def test_post_processing_reads_a_whole_message() -> None:
    """A message of two turns, as a calculator makes them: it is one text, and is replaced as one."""
    turns = [
        Turn([9], [40], text="1+1=", continuation="2>>", unfinished=True),
        Turn([9], [41], text=". End. Two. Three."),
    ]
    episode = Episode(Example("x", "?"), 0, 0, turns)
    reward = build_rewards({"length": {"post_process": "three_sentence_summary", "unit": "characters", "target": 18}})[
        0
    ]
    assert call_reward(reward, [episode]) == [1.0]  # "1+1=2>>.\nEnd.\nTwo." has 18 characters
