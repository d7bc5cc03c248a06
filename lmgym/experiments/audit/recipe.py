"""The rewards of a recipe's stage, as `lmgym audit` asks about them."""

from collections.abc import Sequence
from typing import Any

from lmgym.config.schema import Config
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.experiments.audit.asked import Asked
from lmgym.models.model_info import load_tokenizer
from lmgym.rewards.base import Reward
from lmgym.rewards.building import build_rewards
from lmgym.tasks.streamed import first_of
from lmgym.training.setup import training_examples

CHARACTERS = 4  # of a token, about


def of_recipe(config: Config, stage: str | None = None) -> Asked:
    """The rewards of a stage: the one of this name, or the last one that has rewards. Raises LmgymError if there is
    none, and where an environment makes the prompts, since answers must be written without it."""
    names = [one.name for one in config.stages]
    if stage is not None and stage not in names:
        raise LmgymError(f"there is no stage '{stage}'; {suggest(stage, names)}")
    found = [one for one in config.stages if (one.rewards if stage is None else one.name == stage)]
    if not found or not found[-1].rewards:
        raise LmgymError(
            "no stage has rewards to audit; name a reward and a task: lmgym audit final_answer --task gsm8k"
        )
    chosen = found[-1]
    if not getattr(registry.get("env", chosen.env["name"]), "needs_data", True):
        raise LmgymError(f"environment '{chosen.env['name']}' makes its own prompts; audit takes those of a task")
    played = f"the stage plays environment '{chosen.env['name']}'; here each answer is a single message"
    rewards = build_rewards(chosen.rewards)
    return Asked(
        rewards, first_of(training_examples(config, chosen)), config.reward_timeout, _tokenizer(config, rewards),
        max(chosen.sampling.max_new_tokens * CHARACTERS, 100), (played,) if chosen.is_played else (),
    )  # fmt: skip


def _tokenizer(config: Config, rewards: Sequence[Reward]) -> Any:
    """The tokenizer of the recipe's model, if a reward may read tokens."""
    if not any(_may_read_tokens(reward) for reward in rewards if reward.weight):
        return None
    return load_tokenizer(config.policy)


def _may_read_tokens(reward: Reward) -> bool:
    function = reward.function
    judge = "model" in getattr(function, "keywords", {}) or getattr(function, "compares", False)
    of_episodes = getattr(function, "takes_episodes", False) and not judge
    return reward.by_token or of_episodes or hasattr(function, "reads_sequence")
