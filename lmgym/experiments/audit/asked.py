"""What `lmgym audit` is asked about: the rewards of a recipe's stage, or a reward by its name on a task."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmgym.config.packaged import packaged_recipes
from lmgym.config.schema import Config
from lmgym.config.yaml import apply_override
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.core.validation import converted
from lmgym.rewards.base import Reward
from lmgym.rewards.building import build_rewards
from lmgym.tasks.base import load_task
from lmgym.tasks.streamed import first_of
from lmgym.training.setup import training_examples
from lmgym.types import Example

CHARACTERS = 4  # of a token, about
ROOM = 20_000  # characters of the longest answer, if it is not known
KEYS = ("task", "rewards", "plugins", "seed", "reward_timeout")  # of a recipe, that count for a reward by its name


@dataclass(frozen=True)
class Asked:
    """Rewards and the examples to audit them on; `tokenizer` is None where no reward reads tokens. `room`: characters
    of the longest answer that training would sample. `notes`: what to say first.

    Example: of_recipe(load_config("gsm8k_grpo")).rewards[0].name -> "final_answer\""""

    rewards: list[Reward]
    examples: Sequence[Example]
    timeout: float
    tokenizer: Any = None
    room: int = ROOM
    notes: tuple[str, ...] = ()


def is_reward(word: str) -> bool:
    """Whether a word names a reward, and not a recipe or a file."""
    if Path(word).exists() or word in packaged_recipes():
        return False
    return word in registry.names("reward") or (":" in word and not word.endswith((".yaml", ".yml")))


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


def of_reward(name: str, task: str | None, overrides: Sequence[str]) -> Asked:
    """A reward by its name, on the training examples of a task; `overrides` are keys of a recipe, such as
    rewards.regex.pattern=... and task.path=.... Raises LmgymError without a task, and for other keys."""
    if task is None:
        raise LmgymError(f"'{name}' is a reward; name the task to audit it on, such as --task gsm8k")
    tree: dict[str, Any] = {"task": {"name": task}, "rewards": {name: {}}}
    for override in overrides:
        key = override.partition("=")[0].split(".")[0]
        if key not in KEYS:
            raise LmgymError(f"{override} means nothing for a reward by its name; {suggest(key, KEYS)}")
        apply_override(tree, override, ())
    for plugin in converted(list[str], tree.get("plugins") or [], "plugins"):
        registry.load_plugin(plugin)
    rewards = build_rewards(tree["rewards"])
    for reward in rewards:
        if reward.by_token or getattr(reward.function, "reads_sequence", None) == "tokens":
            raise LmgymError(f"reward '{reward.name}' reads tokens; audit a recipe, whose model has a tokenizer")
    arguments = {key: value for key, value in tree["task"].items() if key not in ("name", "split")}
    seed = converted(int, tree.get("seed", 0), "seed")
    examples = load_task(tree["task"]["name"], tree["task"].get("split", "train"), seed=seed, **arguments)
    return Asked(rewards, first_of(examples), converted(float, tree.get("reward_timeout", 60.0), "reward_timeout"))


def _tokenizer(config: Config, rewards: Sequence[Reward]) -> Any:
    """The tokenizer of the recipe's model, if a reward may read tokens."""
    if not any(_may_read_tokens(reward) for reward in rewards if reward.weight):
        return None
    from lmgym.models.load import load_tokenizer

    return load_tokenizer(config.policy)


def _may_read_tokens(reward: Reward) -> bool:
    function = reward.function
    judge = "model" in getattr(function, "keywords", {}) or getattr(function, "compares", False)
    of_episodes = getattr(function, "takes_episodes", False) and not judge
    return reward.by_token or of_episodes or hasattr(function, "reads_sequence")
