"""What `lmgym audit` is asked about; here a reward by its name, on a task (recipe.py: the rewards of a recipe)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmgym.config.packaged import packaged_recipes
from lmgym.config.yaml import apply_override
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.core.validation import converted
from lmgym.rewards.base import Reward
from lmgym.rewards.building import build_rewards
from lmgym.tasks.base import load_task
from lmgym.tasks.streamed import first_of
from lmgym.types import Example

ROOM = 20_000  # characters of the longest answer, if it is not known
KEYS = ("task", "rewards", "plugins", "seed", "reward_timeout")  # of a recipe, that count for a reward by its name


@dataclass(frozen=True)
class Asked:
    """Rewards and the examples to audit them on; `tokenizer` is None where no reward reads tokens. `room`: characters
    of the longest answer that training would sample. `notes`: what to say first. `whole`: a run has no other rewards.

    Example: of_reward("final_answer", "arithmetic", []).rewards[0].name -> "final_answer\""""

    rewards: list[Reward]
    examples: Sequence[Example]
    timeout: float
    tokenizer: Any = None
    room: int = ROOM
    notes: tuple[str, ...] = ()
    whole: bool = True


def is_reward(word: str, task: str | None) -> bool:
    """Whether a word names a reward, and not a recipe or a file; with a task it is that of a plug-in, too."""
    if Path(word).exists() or word in packaged_recipes():
        return False
    return task is not None or word in registry.names("reward") or (":" in word and not word.endswith(".yaml"))


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
    return Asked(
        rewards, first_of(examples), converted(float, tree.get("reward_timeout", 60.0), "reward_timeout"), whole=False
    )
