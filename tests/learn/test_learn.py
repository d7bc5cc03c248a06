"""Every algorithm learns a small task in seconds: a random tiny Llama, told a side, answers with letters of that side.

The prompt is "left 17:" or "right 4:"; the reward is the share of four tokens that are letters of that side of the
alphabet (a-m, n-z). Of the 259 tokens of an untrained model 13 are right: it earns 0.05. One that learns which tokens
are letters, but not to read the prompt, earns 0.5 at most; one whose gradient has the wrong sign, or that reinforces
all it samples alike, stays at 0.05 or below. The threshold is 0.7, for the policy as it samples at temperature 1.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from lmgym.episode import Example
from tests import runs

HERE = "tests.learn.test_learn"
SIDES = {"left": "abcdefghijklm", "right": "nopqrstuvwxyz"}


def sides(split: str) -> list[Example]:
    """Prompts of both sides; numbers of three digits are held out."""
    numbers = range(100, 132) if split == "test" else range(32)
    return [
        Example(f"{split}/{side}/{number}", f"{side} {number}:", (letters[number % 13] * 4,))
        for number in numbers
        for side, letters in SIDES.items()
    ]


def right_side(texts: list[str], examples: list[Example]) -> list[float]:
    letters = [SIDES[str(example.prompt).split()[0]] for example in examples]
    return [sum(letter in own for letter in text) / 4 for text, own in zip(texts, letters, strict=True)]


def learn(folder: Path, **changes: Any) -> tuple[float, float]:
    """Mean reward on held-out prompts before and after training."""
    tree: dict[str, Any] = {
        "policy": {"device": "cpu", "architecture": runs.ARCHITECTURE | {"hidden_size": 32, "intermediate_size": 64}},
        "task": f"{HERE}:sides",
        "rewards": {f"{HERE}:right_side": 1.0},
        "sampling": {"max_new_tokens": 4},
        "optimizer": {"learning_rate": 0.01, "warmup": 1},
        "evaluation": {"every": 0, "examples": 64, "temperature": 1.0},
        "checkpoint": {"every": 0},
        "prompts_per_step": 64,
        "steps": 60,
    }
    summary = json.loads((runs.run(folder, **tree | changes) / "summary.json").read_text())
    before, after = (summary[moment]["results"]["reward"]["mean"] for moment in ("before", "after"))
    return before, after


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "reinforce", "baseline": "none"},
        {"name": "reinforce", "baseline": "mean"},
        {"name": "reinforce", "baseline": "ema"},
        {"name": "reinforce", "baseline": "scst"},
        {"name": "rloo", "group_size": 4},
        {"name": "grpo", "group_size": 4},
        {"name": "grpo", "group_size": 4, "epochs": 2, "minibatches": 2, "kl_coefficient": 0.001},
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_picture")
def test_a_policy_gradient_learns_to_answer_as_the_prompt_asks(algorithm: dict[str, Any], tmp_path: Path) -> None:
    before, after = learn(tmp_path / "run", algorithm=algorithm)
    assert before < 0.15 and after > 0.7
