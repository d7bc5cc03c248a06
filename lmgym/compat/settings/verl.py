"""verl's configurations: Hydra overrides and YAML files of its PPO and supervised trainers."""

import re
from pathlib import Path

from lmgym.compat.settings.recipe import Draft

MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
FUNCTION = "custom_reward_function.path reward.custom_reward_function.path"
HELD_OUT = "data.val_files"


def fill(draft: Draft) -> None:
    """Fill in a recipe."""
    settings, supervised = draft.settings, "sft" in f"{draft.settings.program} {draft.path.name}"
    draft.data("data.train_files", "~/data/rlhf/gsm8k/train.parquet")
    draft.fill("model", "supervised" if supervised else "sampled")
    if held_out := draft.value(HELD_OUT):
        draft.put("task.test_path", held_out, draft.where(HELD_OUT))
    if draft.get("policy.lora_rank"):
        draft.fill("lora")
    if not draft.get("evaluation.temperature"):
        for cut in ("top_p", "top_k"):  # without effect at temperature 0, and refused here
            draft.recipe["evaluation"].pop(cut, None)
    if draft.get("optimizer.warmup_ratio"):
        del draft.recipe["optimizer"]["warmup"]
    batch = draft.number("data.train_batch_size", 256 if supervised else 1024)
    draft.put("prompts_per_step", batch, draft.where("data.train_batch_size"))
    draft.length("trainer.total_training_steps", "trainer.total_epochs", 4 if supervised else 30)
    if supervised:
        for ours, theirs in (("prompt", "prompt"), ("references", "response")):
            inner = settings.take(f"data.{theirs}_dict_keys")
            if isinstance(inner, list) and inner:  # a column inside of the column
                draft.put(f"task.{ours}", f"{draft.get(f'task.{ours}')}.{inner[0]}", draft.where(f"data.{theirs}_key"))
    else:
        mini = batch / draft.number(MINI, min(256, batch))
        draft.minibatches(mini, f"data.train_batch_size / {draft.where(MINI)}")
        _rewards(draft)
    if settings.take("data.image_key data.processor") or re.search(r"[-_]vl[-_.]|glm41v|minicpmo", draft.path.name):
        draft.obstacles.append("the prompts have pictures, for which no recipe is written here; docs/vision.md has one")


def _rewards(draft: Draft) -> None:
    """Functions and models that score answers."""
    function = draft.value("custom_reward_function.name reward.custom_reward_function.name", "compute_score")
    if file := draft.value(FUNCTION):
        draft.put(f"rewards/{Path(str(file)).stem}:{function}", 1.0, f"{draft.where(FUNCTION)}; in the current folder")
    elif not draft.get("rewards.reward_model"):
        draft.put("rewards/verl.utils.reward_score:default_compute_score", 1.0, "verl's default, by data_source")
        draft.differs.append(
            "where verl is not installed, rewards: {final_answer: 1.0} reads answers of GSM8K and MATH"
        )
    if (overlong := draft.get("rewards.overlong")) and "max_tokens" not in overlong:
        draft.put("rewards.overlong.max_tokens", draft.get("sampling.max_new_tokens"), "sampling.max_new_tokens")
