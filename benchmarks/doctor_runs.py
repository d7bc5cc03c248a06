"""The runs of benchmarks/doctor.py: 30 that learn, and 30 that have one thing wrong, with the rules that may name it.

Most go on from the quickstart's warm start: a tiny model that is right in about a third of its word problems.
"""

import zlib
from dataclasses import dataclass
from typing import Any

from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.batch import Batch
from lmgym.envs.base import Env, Step
from lmgym.rewards.base import linear_time
from lmgym.types import Example, Message

HERE = "benchmarks.doctor_runs"
START = "WARM_START"  # the model folder of the quickstart's warm start, put in when it is there
Tree = dict[str, Any]

SUMS: Tree = {
    "task": {"name": "arithmetic", "largest": 50, "explain": "sums", "held_out": "numbers"},
    "rewards": {"final_answer": 1.0},
    "policy": {"model": START, "device": "cpu"},
    "sampling": {"max_new_tokens": 12},
    "evaluation": {"split": "validation", "examples": 64, "temperature": 1.0, "every": 15},
    "algorithm": {"name": "grpo", "group_size": 8},
    "optimizer": {"learning_rate": 3e-4},
    "checkpoint": {"every": 0},
    "logs": {"traces": "none", "samples": 0},
    "prompts_per_step": 8,
    "steps": 45,
    "threads": 1,
}
COUNT: Tree = {  # recipe increasing_numbers, smaller
    "task": "increasing_numbers",
    "rewards": {"increasing_numbers": 1.0},
    "policy": {"model": "builtin:tiny_gpt2", "tokenizer": "builtin:numbers", "device": "cpu"},
    "sampling": {"max_new_tokens": 20},
    "algorithm": {"name": "ppo", "epochs": 4, "minibatches": 2, "whiten": "none", "gae_lambda": 1.0,
                  "entropy_coefficient": 0.003},
    "optimizer": {"learning_rate": 1e-3},
    "evaluation": {"split": "validation", "every": 10, "examples": 10, "samples": 16, "temperature": 1.0},
    "checkpoint": {"every": 0},
    "logs": {"traces": "none", "samples": 0},
    "prompts_per_step": 32,
    "steps": 55,
    "threads": 1,
}  # fmt: skip
LIKE_GRPO, GROUPS = {"prompts_per_step": 8}, {"group_size": 8}
ONE_EACH = {"prompts_per_step": 64}


@dataclass(frozen=True)
class Healthy:
    """A run that learns: the name of a recipe of the package, or a tree; what is changed; how often by other seeds."""

    recipe: str | Tree
    changes: tuple[str, ...] = ()
    seeds: int = 1


def sums(**changes: Any) -> Tree:
    return {**SUMS, **changes}


def by(name: str, **fields: Any) -> Tree:
    """The word problems by another algorithm."""
    return sums(algorithm={"name": name, **fields}, **(LIKE_GRPO if "group_size" in fields else ONE_EACH))


HEALTHY: dict[str, Healthy] = {
    "quickstart": Healthy(
        "quickstart",
        (
            "threads=1",
            "stages.rl.steps=45",
            "stages.rl.prompts_per_step=16",
            "evaluation.examples=128",
            "checkpoint.every=0",
            "logs.traces=none",
        ),
        seeds=4,
    ),
    "increasing_numbers": Healthy(
        "increasing_numbers", ("steps=45", "prompts_per_step=64", "checkpoint.every=0", "logs.traces=none"), seeds=3
    ),
    "frozen_lake": Healthy("frozen_lake", ("stages.rl.steps=45", "checkpoint.every=0", "logs.traces=none"), seeds=2),
    "blackjack": Healthy(
        "blackjack",
        (
            "stages.rl.steps=40",
            "stages.rl.prompts_per_step=256",
            "evaluation.examples=512",
            "evaluation.every=20",
            "checkpoint.every=0",
            "logs.traces=none",
        ),
        seeds=2,
    ),
    "chain_pairs": Healthy(
        "chain_pairs",
        (
            "checkpoint.every=0",
            "logs.traces=none",
        ),
    ),
    "distill_teacher": Healthy("distill_miniature", ("stages=[{name: teacher, steps: 200}]",)),
    "sums_grpo": Healthy(sums(), seeds=3),
    "sums_dapo": Healthy(by("dapo", **GROUPS)),
    "sums_dr_grpo": Healthy(by("dr_grpo", **GROUPS)),
    "sums_gspo": Healthy(by("gspo", **GROUPS)),
    "sums_cispo": Healthy(by("cispo", **GROUPS)),
    "sums_rloo": Healthy(by("rloo", **GROUPS)),
    "sums_raft": Healthy(by("raft", **GROUPS)),
    "sums_replay": Healthy(by("replay", **GROUPS)),
    "sums_reinforce": Healthy(by("reinforce")),
    "sums_reinforce_pp": Healthy(by("reinforce_pp")),
    "sums_ppo": Healthy(by("ppo")),
    "sums_a2c": Healthy(by("a2c")),
    "sums_two_rewards": Healthy(sums(rewards={"final_answer": 1.0, "length": {"target": 6, "weight": 0.2}})),
    "sums_reference": Healthy(by("grpo", kl_coefficient=0.005, **GROUPS)),
    "smollm2": Healthy(
        {
            "task": {"name": "arithmetic", "largest": 20, "system_prompt": "Answer with the number alone."},
            "rewards": {"final_answer": 1.0},
            "policy": {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "device": "cpu", "compute": "bfloat16"},
            "sampling": {"max_new_tokens": 24},
            "algorithm": {"name": "grpo", "group_size": 8},
            "optimizer": {"learning_rate": 1e-5},
            "evaluation": {"every": 20, "examples": 32, "temperature": 1.0},
            "checkpoint": {"every": 0},
            "prompts_per_step": 8,
            "steps": 100,
        }
    ),
}


# ---------------------------------------------------------------- what is wrong


@linear_time
def never(texts: list[str], examples: list[Example]) -> list[float]:
    """A reward that looks for a mark that no answer has."""
    return [float("\\boxed{" in text) for text in texts]


@linear_time
def always(texts: list[str], examples: list[Example]) -> list[float]:
    return [1.0 for _ in texts]


@linear_time
def of_the_prompt(texts: list[str], examples: list[Example]) -> list[float]:
    """Depends on the prompt alone."""
    return [len(str(example.prompt)) % 7 / 7 for example in examples]


@linear_time
def noise(texts: list[str], examples: list[Example]) -> list[float]:
    """A hash of the text: no policy can foresee it."""
    return [float(zlib.crc32(text.encode()) % 2) for text in texts]


@linear_time
def long(texts: list[str], examples: list[Example]) -> list[float]:
    return [min(len(text), 40) / 40 for text in texts]


@linear_time
def short(texts: list[str], examples: list[Example]) -> list[float]:
    return [1 / (1 + len(text)) for text in texts]


@linear_time
def digits(texts: list[str], examples: list[Example]) -> list[float]:
    return [min(sum(letter.isdigit() for letter in text), 12) / 12 for text in texts]


@linear_time
def one_letter(texts: list[str], examples: list[Example]) -> list[float]:
    return [text.count("1") / max(len(text), 1) for text in texts]


@linear_time
def whole(texts: list[str], examples: list[Example]) -> list[float]:
    """The goal, under another name: the last number is right."""
    return [float(text.rstrip().endswith("=" + example.references[0].rsplit("=")[-1])) for text, example in
            zip(texts, examples, strict=True)]  # fmt: skip


@dataclass
class Growing:
    """A reward whose scale doubles with every second call."""

    calls: int = 0
    linear_time: bool = True

    def __call__(self, texts: list[str], examples: list[Example]) -> list[float]:
        self.calls += 1
        return [(2 * value - 1) * 2 ** (self.calls / 2) for value in noise(texts, examples)]


growing = Growing()


@dataclass(kw_only=True)
class Backwards(GRPO):
    """GRPO whose advantages have the wrong sign."""

    def advantages(self, batch: Batch) -> Batch:
        batch = super().advantages(batch)
        assert batch.advantages is not None
        return batch.replace(advantages=-batch.advantages)


class Unreliable(Env):
    """Fails for every fifth problem."""

    def reset(self, example: Example, key: int) -> list[Message]:
        self.example = example
        return [{"role": "user", "content": str(example.prompt)}]

    def step(self, text: str, stop: str) -> Step:
        if str(self.example.id).endswith(("0", "5")):
            raise ValueError("out of order")
        return Step([], reward=whole([text], [self.example])[0], terminated=True)


@dataclass(frozen=True)
class Planted:
    """What is wrong with a run, the rules that name it, and its tree."""

    wrong: str
    rules: frozenset[str]
    recipe: Tree


def planted(wrong: str, rules: str, base: Tree = SUMS, **changes: Any) -> Planted:
    return Planted(wrong, frozenset(rules.split()), {**base, **changes})


def rate(learning_rate: float, **more: Any) -> Tree:
    return {"learning_rate": learning_rate, **more}


GOAL = {**SUMS["evaluation"], "metrics": {f"{HERE}:whole": 0}}
TOO_HIGH = "learning_rate_too_high reward_collapse entropy_collapse entropy_growth kl_blow_up"
NO_SIGNAL = "equal_groups rarely_earned"

PLANTED: dict[str, Planted] = {
    "rate_100_times": planted("a learning rate 100 times too high", TOO_HIGH, optimizer=rate(3e-2)),
    "rate_30_times": planted("a learning rate 30 times too high", TOO_HIGH, optimizer=rate(1e-2)),
    "count_rate_100_times": planted("PPO, a learning rate 100 times too high", TOO_HIGH, COUNT, optimizer=rate(0.1)),
    "rate_zero": planted(
        "a learning rate of 0", "learning_rate_too_low", optimizer=rate(0.0), prompts_per_step=4, steps=130
    ),
    "rate_too_low": planted(
        "a learning rate 100,000 times too low",
        "learning_rate_too_low",
        COUNT,
        optimizer=rate(1e-8),
        prompts_per_step=8,
        steps=130,
    ),
    "never": planted("the reward looks for a mark that no answer has", NO_SIGNAL, rewards={f"{HERE}:never": 1.0}),
    "always": planted("the reward is 1 for every answer", NO_SIGNAL, rewards={f"{HERE}:always": 1.0}),
    "of_the_prompt": planted(
        "the reward depends on the prompt alone", NO_SIGNAL, rewards={f"{HERE}:of_the_prompt": 1.0}
    ),
    "too_hard": planted(
        "numbers to 5,000, in three steps", NO_SIGNAL, task={**SUMS["task"], "largest": 5000, "steps": 3}
    ),
    "too_hard_ppo": planted(
        "the same without groups",
        NO_SIGNAL,
        algorithm={"name": "ppo"},
        prompts_per_step=64,
        task={**SUMS["task"], "largest": 5000, "steps": 3},
    ),
    "no_warm_start": planted(
        "a random model on word problems", f"{NO_SIGNAL} truncation", policy={"model": "builtin:tiny", "device": "cpu"}
    ),
    "tiny_groups": planted(
        "groups of 2 from a model that is rarely right",
        NO_SIGNAL,
        task={**SUMS["task"], "largest": 400},
        algorithm={"name": "grpo", "group_size": 2},
    ),
    "three_tokens": planted(
        "3 new tokens, where an answer needs 8", f"{NO_SIGNAL} truncation", sampling={"max_new_tokens": 3}
    ),
    "seven_tokens": planted(
        "6 new tokens, too few for most answers", "truncation rarely_earned", sampling={"max_new_tokens": 6}
    ),
    "stops_at_plus": planted(
        "a stop text that ends answers before their result", NO_SIGNAL, sampling={"max_new_tokens": 12, "stop": ["="]}
    ),
    "pays_length": planted(
        "the reward pays length, the goal is only measured",
        "reward_hacking length_drift repeated_phrases truncation",
        rewards={f"{HERE}:long": 1.0},
        evaluation=GOAL,
        sampling={"max_new_tokens": 40},
        optimizer=rate(1e-3),
    ),
    "pays_brevity": planted(
        "the reward pays brevity, the goal is only measured",
        "reward_hacking length_drift",
        rewards={f"{HERE}:short": 1.0},
        evaluation=GOAL,
        optimizer=rate(1e-3),
    ),
    "pays_digits": planted(
        "the reward pays digits, the goal is only measured",
        "reward_hacking length_drift",
        rewards={f"{HERE}:digits": 1.0},
        evaluation=GOAL,
        optimizer=rate(1e-3),
    ),
    "pays_one_letter": planted(
        "the reward counts a letter",
        "repeated_phrases",
        rewards={f"{HERE}:one_letter": 1.0},
        sampling={"max_new_tokens": 32, "min_new_tokens": 32},
        optimizer=rate(3e-3),
        prompts_per_step=8,
    ),
    "negative_weight": planted(
        "the reward's weight has the wrong sign",
        "reward_hacking one_component",
        rewards={"final_answer": -1.0},
        evaluation=GOAL,
    ),
    "backwards": planted(
        "advantages of the wrong sign",
        "reward_collapse " + TOO_HIGH,
        algorithm={"name": f"{HERE}:Backwards", "group_size": 8},
    ),
    "easy_component": planted(
        "an easy component is earned, the goal is not",
        "one_component rarely_earned",
        rewards={f"{HERE}:never": 1.0, f"{HERE}:digits": 0.5},
        optimizer=rate(1e-3),
    ),
    "eight_problems": planted(
        "eight problems to train on",
        "overfitting",
        task={**SUMS["task"], "size": 8},
        prompts_per_step=8,
        optimizer=rate(1e-3),
        steps=80,
    ),
    "wrong_references": planted(
        "nearly all references to train on are wrong",
        "overfitting rarely_earned",
        task={**SUMS["task"], "mistakes": 1.0},
        optimizer=rate(1e-3),
        steps=100,
    ),
    "chance": planted(
        "the reward is as good as random, at a high rate",
        "kl_blow_up " + TOO_HIGH,
        rewards={f"{HERE}:noise": 1.0},
        optimizer=rate(3e-3),
        algorithm={"name": "grpo", "group_size": 8, "kl_coefficient": 1e-6},
    ),
    "entropy_bonus": planted(
        "an entropy bonus that outweighs the reward",
        "entropy_growth reward_collapse",
        algorithm={"name": "ppo", "entropy_coefficient": 1.0},
        prompts_per_step=64,
        optimizer=rate(1e-3),
    ),
    "many_epochs": planted(
        "16 epochs on each batch at three times the rate",
        TOO_HIGH,
        algorithm={"name": "ppo", "epochs": 16},
        prompts_per_step=32,
        optimizer=rate(1e-3),
    ),
    "growing_reward": planted(
        "the reward's scale doubles with every second call", TOO_HIGH, rewards={f"{HERE}:growing": 1.0}
    ),
    "dead_critic": planted(
        "a value function that never trains",
        "dead_critic",
        COUNT,
        algorithm={**COUNT["algorithm"], "value_coefficient": 0.0},
        prompts_per_step=32,
    ),
    "failing_environment": planted(
        "an environment that fails for every fifth problem",
        "environment_errors",
        env=f"{HERE}:Unreliable",
        rewards=None,
        prompts_per_step=10,
    ),
}
