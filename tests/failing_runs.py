"""Tiny whole runs that are made to fail, each in a way that rules of the doctor name (lmgym/logs/doctor/rules.py).

The task is that of tests/learn: told a side, answer with letters of that side of the alphabet. A good run learns it in
some tens of steps; in tests/learn the doctor has nothing to say. Here one thing is wrong with each run. To make one:

    python -m tests.failing_runs forgets runs/forgets
"""

import sys
from dataclasses import dataclass, field
from typing import Any

from lmgym.config.build import build_config
from lmgym.rewards.base import linear_time
from lmgym.training.loop import train
from lmgym.types import Example
from tests import runs

HERE = "tests.failing_runs"
SIDES = {"left": "abcdefghijklm", "right": "nopqrstuvwxyz"}


@dataclass(frozen=True)
class Failing:
    """A recipe's changes to BASE, what is wrong with it, and the rules that must find something."""

    wrong: str
    rules: set[str]
    changes: dict[str, Any] = field(default_factory=dict)


def sides(split: str) -> list[Example]:
    numbers = range(100, 132) if split == "test" else range(32)
    pairs = [(number, side) for number in numbers for side in SIDES]
    return [Example(f"{split}/{side}/{n}", f"{side} {n}:", (SIDES[side][:2],)) for n, side in pairs]


def left_then_right(split: str) -> list[Example]:
    """Prompts of one side to train on, of the other to test on."""
    side = "right" if split == "test" else "left"
    return [example for example in sides(split) if side in example.id]


@linear_time
def right_side(texts: list[str], examples: list[Example]) -> list[float]:
    letters = [SIDES[str(example.prompt).split()[0]] for example in examples]
    return [sum(letter in own for letter in text) / 2 for text, own in zip(texts, letters, strict=True)]


@linear_time
def never(texts: list[str], examples: list[Example]) -> list[float]:
    return [0.0 for _ in texts]


@linear_time
def told_left(texts: list[str], examples: list[Example]) -> list[float]:
    """Depends on the prompt alone: a critic can know it, and no answer can change it."""
    return [float(str(example.prompt).startswith("left")) for example in examples]


@linear_time
def chance(texts: list[str], examples: list[Example]) -> list[float]:
    """As good as random: whether the sum of the codes is odd."""
    return [float(sum(map(ord, text)) % 2) for text in texts]


@linear_time
def brief(texts: list[str], examples: list[Example]) -> list[float]:
    return [1 / (1 + len(text)) for text in texts]


@linear_time
def ended(texts: list[str], examples: list[Example]) -> list[float]:
    return [float(len(text) < 16) for text in texts]


@linear_time
def digits(texts: list[str], examples: list[Example]) -> list[float]:
    return [sum(letter.isdigit() for letter in text) / 4 for text in texts]


@linear_time
def letters_a(texts: list[str], examples: list[Example]) -> list[float]:
    return [text.count("a") / max(len(text), 1) for text in texts]


@dataclass
class Growing:
    """A reward that forgets to reset its scale: it doubles with every second call."""

    calls: int = 0
    linear_time: bool = True

    def __call__(self, texts: list[str], examples: list[Example]) -> list[float]:
        self.calls += 1
        return [(2 * value - 1) * 2 ** (self.calls / 2) for value in chance(texts, examples)]


growing = Growing()


BASE: dict[str, Any] = {
    "threads": 1,
    "policy": {"model": "builtin:tiny", "device": "cpu", "architecture": runs.ARCHITECTURE},
    "task": f"{HERE}:sides",
    "rewards": {f"{HERE}:right_side": 1.0},
    "sampling": {"max_new_tokens": 2},
    "optimizer": {"learning_rate": 0.01, "warmup": 1},
    "algorithm": {"name": "grpo", "group_size": 4},
    "evaluation": {"every": 0, "examples": 8, "temperature": 1.0},
    "checkpoint": {"every": 0},
    "logs": {"samples": 0},
    "prompts_per_step": 8,
    "steps": 12,
}
EVALUATED = {"every": 8, "examples": 32, "temperature": 1.0}


def rate(learning_rate: float, **more: Any) -> dict[str, Any]:
    return {"learning_rate": learning_rate, "warmup": 1, **more}


FAILING = {
    "far_too_high_rate": Failing(
        "a learning rate of 1",
        {"entropy_collapse", "equal_groups"},
        {"optimizer": rate(1.0), "steps": 20},
    ),
    "impossible_task": Failing(
        "a reward that no answer earns",
        {"equal_groups", "rarely_earned", "truncation"},
        {"rewards": {f"{HERE}:never": 1.0}},
    ),
    "cut_answers": Failing(
        "24 tokens for answers that mostly need more to end",
        {"truncation"},
        {
            "rewards": {f"{HERE}:ended": 1.0},
            "sampling": {"max_new_tokens": 24},
            "algorithm": {"name": "grpo", "group_size": 8},
            "prompts_per_step": 4,
            "optimizer": rate(1e-4),
        },
    ),
    "pays_short_answers": Failing(
        "the reward pays short answers, and the goal (digits) is only measured",
        {"length_drift", "reward_hacking"},
        {
            "rewards": {f"{HERE}:brief": 1.0},
            "evaluation": {**EVALUATED, "metrics": {f"{HERE}:digits": 0}},
            "sampling": {"max_new_tokens": 12},
            "optimizer": rate(0.05),
            "steps": 24,
        },
    ),
    "pays_length": Failing(
        "the reward pays for every character, which the reward watch finds",
        {"reward_hole"},
        {"rewards": {"length": {"unit": "characters", "target": 5000}}, "reward_watch": {"every": 1}, "steps": 12},
    ),
    "rewards_chance": Failing(
        "a reward as good as random, with a high learning rate",
        {"kl_blow_up"},
        {
            "rewards": {f"{HERE}:chance": 1.0},
            "algorithm": {"name": "grpo", "group_size": 4, "kl_coefficient": 1e-6},
            "optimizer": rate(0.03),
            "steps": 25,
        },
    ),
    "rounds_too_much": Failing(
        "bfloat16, where the recipe allows a gap of 0.0001 nats",
        {"sampler_gap"},
        {
            "policy": {**BASE["policy"], "compute": "bfloat16"},
            "engine": {"gap_error": 10.0, "gap_warning": 1e-4},
        },
    ),
    "easy_component": Failing(
        "digits are easy to earn, the main component never is",
        {"one_component", "rarely_earned"},
        {"rewards": {f"{HERE}:never": 1.0, f"{HERE}:digits": 0.5}, "steps": 30},
    ),
    "other_prompts": Failing(
        "trained on one side, tested on the other",
        {"overfitting"},
        {
            "task": f"{HERE}:left_then_right",
            "optimizer": rate(0.02),
            "evaluation": EVALUATED,
            "steps": 25,
        },
    ),
    "pays_one_letter": Failing(
        "the reward counts a letter",
        {"repeated_phrases"},
        {
            "rewards": {f"{HERE}:letters_a": 1.0},
            "sampling": {"max_new_tokens": 24, "min_new_tokens": 24},
            "optimizer": rate(0.1),
            "prompts_per_step": 4,
            "steps": 22,
        },
    ),
    "critic_without_loss": Failing(
        "the value function is never trained, and the reward is easy to foresee",
        {"dead_critic"},
        {
            "rewards": {f"{HERE}:told_left": 1.0},
            "algorithm": {"name": "a2c", "value_coefficient": 0.0},
            "steps": 50,
        },
    ),
    "four_epochs_at_a_high_rate": Failing(
        "four optimizer steps on a batch with a learning rate of 0.1",
        {"learning_rate_too_high"},
        {"algorithm": {"name": "ppo", "epochs": 4}, "optimizer": rate(0.1)},
    ),
    "narrow_clip": Failing(
        "bounds of the ratio of 0.001",
        {"learning_rate_too_high"},
        {"algorithm": {"name": "grpo", "group_size": 4, "epochs": 4, "surrogate": {"low": 0.001, "high": 0.001}}},
    ),
    "low_target_kl": Failing(
        "a target_kl that the first optimizer step exceeds",
        {"learning_rate_too_high"},
        {"algorithm": {"name": "ppo", "epochs": 8, "target_kl": 0.001}, "optimizer": rate(0.05)},
    ),
    "reward_without_bound": Failing(
        "a reward whose scale doubles with every second call",
        {"learning_rate_too_high"},
        {"rewards": {f"{HERE}:growing": 1.0}, "optimizer": rate(1e-3), "steps": 26},
    ),
    "far_too_low_rate": Failing(
        "a learning rate of 0.0000001",
        {"learning_rate_too_low"},
        {"optimizer": rate(1e-7), "prompts_per_step": 2, "steps": 100},
    ),
    "old_answers": Failing(
        "three groups of four come from a buffer that keeps them for 100 updates",
        {"stale_rollouts"},
        {
            "algorithm": {"name": "replay", "group_size": 4, "replayed": 24, "capacity": 500, "max_age": 100},
            "steps": 35,
        },
    ),
    "forgets": Failing(
        "after a supervised stage, an entropy bonus that outweighs the reward",
        {"reward_collapse", "entropy_growth"},
        {
            "stages": [
                {"name": "warm", "algorithm": "supervised", "steps": 30, "prompts_per_step": 16},
                {
                    "name": "rl",
                    "algorithm": {"name": "a2c", "entropy_coefficient": 0.5},
                    "optimizer": {"learning_rate": 0.002, "warmup": 20},
                    "steps": 25,
                },
            ],
            "steps": None,
            "algorithm": None,
        },
    ),
    "talkative_environment": Failing(
        "an environment that writes on and on",
        {"context_overflow"},
        {"env": {"name": "tests.failing_games:Talkative", "workers": 1}, "rewards": None, "steps": 12},
    ),
    "unreadable_answers": Failing(
        "an environment that can read no answer",
        {"invalid_actions"},
        {"env": {"name": "tests.failing_games:Strict", "workers": 1}, "rewards": None, "steps": 10},
    ),
    "failing_environment": Failing(
        "an environment that fails for some problems",
        {"environment_errors"},
        {"env": {"name": "tests.failing_games:Unreliable", "workers": 1}, "rewards": None, "steps": 4},
    ),
}


def recipe(name: str) -> dict[str, Any]:
    """The tree of a failing recipe."""
    tree = {**BASE, **FAILING[name].changes}
    return {key: value for key, value in tree.items() if value is not None}


if __name__ == "__main__":  # python -m tests.failing_runs forgets runs/forgets
    wanted, folder = sys.argv[1:]
    train(build_config({**recipe(wanted), "out": folder}))
