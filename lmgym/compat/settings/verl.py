"""verl's configurations: Hydra overrides and YAML files of its PPO and supervised trainers."""

import re
from pathlib import Path

from lmgym.compat.settings.recipe import Draft

MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
FUNCTION = "custom_reward_function.path reward.custom_reward_function.path"
HELD_OUT = "data.val_files"
STEPS = "actor_rollout_ref.actor.optim.lr_warmup_steps optim.lr_warmup_steps"
REWARD_KL, LOSS_KL = "algorithm.use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss"
CRITIC = ("model.path", "ppo_epochs", "ppo_mini_batch_size", "grad_clip", "optim.weight_decay", "optim.betas",
          "optim.lr_scheduler_type", "optim.lr_warmup_steps", "optim.lr_warmup_steps_ratio", "optim.clip_grad",
          "optim.min_lr_ratio")  # fmt: skip


def fill(draft: Draft) -> None:
    """Fill in a recipe."""
    settings, supervised = draft.settings, "sft" in f"{draft.settings.program} {draft.path.name}"
    draft.data("data.train_files", "~/data/rlhf/gsm8k/train.parquet")
    draft.fill("model", "supervised" if supervised else "sampled")
    if supervised:
        draft.fill("sft_trainer" if "trainer.sft_trainer" in settings.program else "fsdp_sft_trainer")
    if held_out := draft.value(HELD_OUT):
        draft.put("task.test_path", held_out, draft.where(HELD_OUT))
    if draft.get("policy.lora_rank"):
        draft.fill("lora")
    if not draft.get("evaluation.temperature"):
        for cut in ("top_p", "top_k"):  # without effect at temperature 0, and refused here
            draft.drop(f"evaluation.{cut}")
    if draft.get("optimizer.warmup_ratio"):  # which verl takes where the steps are below 0
        steps = settings.take(STEPS)
        given = isinstance(steps, int | float) and steps >= 0
        draft.drop("optimizer.warmup_ratio" if given else "optimizer.warmup")
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
        _losses(draft)
        _rewards(draft)
    if settings.take("data.image_key data.processor") or re.search(r"[-_]vl[-_.]|glm41v|minicpmo", draft.path.name):
        draft.obstacles.append("the prompts have pictures, for which no recipe is written here; docs/vision.md has one")


def _losses(draft: Draft) -> None:
    """What verl has apart and a recipe together: two KLs, and a critic with a model and an optimizer of its own."""
    if draft.settings.take(REWARD_KL) and draft.settings.take(LOSS_KL):
        draft.drop("algorithm.kl_target")
        draft.differs.append(f"{draft.where(REWARD_KL)}: verl has a KL in the reward too; here that of the loss alone")
    for key in CRITIC if draft.get("policy.critic") else ():
        actor = f"actor_rollout_ref.{'' if key == 'model.path' else 'actor.'}{key}"
        own = draft.settings.take(f"critic.{key}")
        if own is not None and own != draft.settings.take(actor):
            draft.differs.append(f"{draft.where(f'critic.{key}')}: {own} there; the critic has the policy's here")


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
