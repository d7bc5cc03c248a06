"""`judge_pairs`: a local judge of pairs, against transformers and the strengths of Bradley and Terry."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmgym.core.errors import LmgymError
from lmgym.rewards.base import call_reward
from lmgym.rewards.building import build_rewards
from lmgym.stats.bradley_terry import beats, bradley_terry
from lmgym.types import Episode, Example, Turn
from tests import learned_models as tiny

SHARE = tiny.share_of(400)
TEMPLATE = "{prompt}\n{answer}"


def compared(*groups: list[str], **arguments: Any) -> list[list[Any]]:
    """What the judge says of each answer of each group; the reference of every example is "champion"."""
    examples = [Example(f"a/{n}", f"question {n}", references=("champion",)) for n in range(len(groups))]
    scored = [Episode(examples[n], n, 0, [Turn([], [], text=text)]) for n, group in enumerate(groups) for text in group]
    values = iter(call_reward(build_rewards({"judge_pairs": arguments})[0], scored))
    return [[next(values) for _ in group] for group in groups]


def test_a_judge_that_always_says_the_same_gives_all_the_same(tmp_path: Path) -> None:
    folder = tiny.constant(tmp_path, {"A": 3.0, "B": 0.0, "x": 9.0})  # it likes what stands first
    for values in compared(["a", "b", "c"], ["d", "e", "d"], model=folder):
        assert values == pytest.approx([0.5] * 3)
    assert compared(["a", "a"], model=folder) == [[None, None]]
    assert compared(["a", "champion"], model=folder, against="reference") == [pytest.approx([0.5, 0.5])]


def test_pairs_are_judged_by_the_next_token_in_both_orders(tmp_path: Path) -> None:
    folder = tiny.causal(tmp_path, seed=5, longest=2048)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    letters = tokenizer.convert_tokens_to_ids(["A", "B"])

    def first_wins(one: str, other: str) -> float:
        content = f"question 0\nSolution A:\n{one}\n\nSolution B:\n{other}"
        messages = [{"role": "user", "content": content}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        with torch.no_grad():
            return float(model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1][letters].softmax(-1)[0])

    texts = ["so it is 4", "5", "I do not know"]
    better = {(a, b): first_wins(a, b) + 1 - first_wins(b, a) for a in texts for b in texts}
    wins = [[0.0 if a == b else better[a, b] for b in texts] for a in texts]
    wanted = beats(bradley_terry(wins))
    assert max(wanted) - min(wanted) > 1e-3
    arguments = {"model": folder, "template": TEMPLATE, "system": ""}
    found = compared(texts, ["x", "yy"], **arguments)
    assert found[0] == pytest.approx(wanted, abs=10 * SHARE)
    for budget in (1, 900):  # whatever is asked together, in whatever order
        again = compared(texts[::-1], **arguments, tokens_per_forward=budget)[0]
        assert again == pytest.approx(found[0][::-1], abs=10 * SHARE)
    assert compared(texts, ["x", "yy"], **arguments) == found
    against = (first_wins("5", "champion") + 1 - first_wins("champion", "5")) / 2
    assert compared(["5"], **arguments, against="reference") == [[pytest.approx(against, abs=SHARE)]]


def test_a_champion_that_moves_is_who_the_draw_says(tmp_path: Path) -> None:
    """As against a reference with that text; where nobody is champion yet, as against the group."""
    folder = tiny.causal(tmp_path, seed=5, longest=2048)
    arguments = {"model": folder, "template": TEMPLATE, "system": ""}

    def values(against: str, *references: str, **champions: str) -> list[Any]:
        example = Example("a", "question 0", references)
        scored = [Episode(example, 0, n, [Turn([], [], text=text)]) for n, text in enumerate(("5", "so 4", "best"))]
        own = build_rewards({"judge_pairs": arguments | {"against": against}})[0]
        return call_reward(replace(own, champions=champions), scored)

    moved = values("champion", "old", a="best")
    assert moved == values("reference", "best") and moved[2] == 0.5
    assert values("champion", "best") == moved  # the first one is the reference
    assert values("champion") == values("group")
    assert values("reference", "best", a="old") == moved  # which does not move


def test_what_cannot_be_is_told(tmp_path: Path) -> None:
    folder = tiny.constant(tmp_path, {}, longest=256)
    with pytest.raises(LmgymError, match=r"two answers with what is put around them have .* and .* reads 256; lower"):
        compared(["a" * 200, "b" * 200], model=folder)
    with pytest.raises(LmgymError, match=r"judge_pairs\.opponents' must be at least 1, not 0"):
        compared(["a", "b"], model=folder, opponents=0)
    with pytest.raises(LmgymError, match=r"unknown key 'rewards\.judge_pairs\.truncation'"):
        compared(["a", "b"], model=folder, truncation="left")
    lonely = [Episode(Example("a/0", "?"), 0, 0, [Turn([], [], text="a")])]
    with pytest.raises(LmgymError, match=r"reward 'judge_pairs' compares with the reference .* 'a/0' has none"):
        call_reward(build_rewards({"judge_pairs": {"model": folder, "against": "reference"}})[0], lonely)
