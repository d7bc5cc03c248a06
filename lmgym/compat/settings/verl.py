"""verl's configurations: Hydra overrides and YAML files of its PPO and supervised trainers."""

from collections.abc import Mapping
from typing import Any

from lmgym.compat.settings.recipe import Draft

A = "actor_rollout_ref.actor"
K = "reward_model.reward_kwargs"


def fill(draft: Draft, table: Mapping[str, Any]) -> None:
    """Fill in a recipe."""
    settings, supervised = draft.settings, "sft" in f"{draft.settings.program} {draft.path}"
    draft.fill(table["model"])
    if "lora_rank" in draft.recipe["policy"]:
        draft.fill(table["lora"])
    if draft.get("optimizer.warmup_ratio"):
        del draft.recipe["optimizer"]["warmup"]
    batch = draft.number("data.train_batch_size", 256 if supervised else 1024)
    draft.put("prompts_per_step", batch, draft.where("data.train_batch_size"))
    draft.length("trainer.total_training_steps", "trainer.total_epochs", 4 if supervised else 30)
    if supervised:
        draft.put("algorithm.name", "supervised", settings.program)
        messages = settings.take("data.multiturn.enable") or settings.key(
            "data.messages_key data.multiturn.messages_key"
        )
        for ours, theirs, default in (("prompt", "prompt", "question"), ("references", "response", "answer")):
            inner = settings.take(f"data.{theirs}_dict_keys")
            column = draft.value(f"data.{theirs}_key", default)
            column = f"{column}.{inner[0]}" if isinstance(inner, list) and inner else column
            if messages:
                name = draft.value("data.messages_key data.multiturn.messages_key", "messages")
                column = name if ours == "prompt" else f"{name}.-1.content"
            draft.put(f"task.{ours}", column, draft.where(f"data.{theirs}_key"))
        if messages:
            draft.obstacles.append(
                "rows of messages: name the column of the question and of the answer (task.prompt, references)"
            )
    else:
        _algorithm(draft, table, batch)
        draft.put("task.prompt", draft.value("data.prompt_key", "prompt"), draft.where("data.prompt_key"))
        draft.put("task.references", None, "functions read the columns")
        _rewards(draft)
    _files(draft)
    if (
        settings.take("data.image_key")
        or settings.take("data.processor")
        or "vl" in draft.path.stem.replace("-", "_").split("_")
    ):
        draft.obstacles.append("the prompts have pictures, which lmgym does not read")


def _algorithm(draft: Draft, table: Mapping[str, Any], batch: float) -> None:
    """Estimator, loss, KL and minibatches."""
    settings = draft.settings
    draft.fill(table["sampled"])
    if "name" not in draft.recipe["algorithm"]:
        draft.put("algorithm.name", "grpo", "in place of what is not known")
    name = draft.get("algorithm.name")
    draft.fill(table["grpo"] if name == "grpo" else table["gae"] if name == "ppo" else {})
    if settings.take("algorithm.rollout_correction.rollout_is") not in (None, "null"):
        draft.put("algorithm.correction.name", "truncated", settings.where("algorithm.rollout_correction.rollout_is"))
        draft.fill(table["correction"])
    if draft.get("algorithm.dynamic_sampling"):
        most = draft.value("algorithm.filter_groups.max_num_gen_batches", 10)
        draft.put(
            "max_draws",
            most if isinstance(most, int) and most > 0 else 1000,
            draft.where("algorithm.filter_groups.max_num_gen_batches"),
        )
    size = f"{A}.ppo_mini_batch_size"
    draft.minibatches(batch / draft.number(size, min(256, batch)), f"data.train_batch_size / {draft.where(size)}")
    in_loss, in_reward = draft.value(f"{A}.use_kl_loss", False), draft.value("algorithm.use_kl_in_reward", False)
    kind = {"low_var_kl": "k3", "kl": "k1", "mse": "k2"}.get(
        str(draft.value(f"{A}.kl_loss_type", "low_var_kl")).rstrip("+"), "k1"
    )
    weights = {f"{A}.kl_loss_coef": in_loss, "algorithm.kl_ctrl.kl_coef": in_reward and not in_loss}
    for names, on in weights.items():
        weight = draft.value(names, 0.001)
        if on:
            draft.kl(weight, names, bool(in_loss), kind if in_loss else "k1")


def _files(draft: Draft) -> None:
    """Training files, and held-out files."""
    names, held_out = "data.train_files", "data.val_files"
    draft.data(draft.value(names, "~/data/rlhf/gsm8k/train.parquet"), names)
    if "path" in draft.recipe["task"]:
        draft.copy("task.test_path", held_out)


def _rewards(draft: Draft) -> None:
    """Functions and models that score answers."""
    settings = draft.settings
    file, name = (
        draft.value("custom_reward_function.path reward.custom_reward_function.path"),
        "custom_reward_function.name",
    )
    model = draft.value("reward_model.model.path reward.reward_model.model_path")
    function = draft.value(name, "compute_score")
    if settings.take("reward_model.enable reward.reward_model.enable") and model:
        draft.put("rewards/reward_model", {"model": model, "weight": 1.0}, draft.where("reward_model.model.path"))
    elif file:
        draft.function(file, function, 1.0, draft.where("custom_reward_function.path"))
    else:
        draft.put("rewards/verl.utils.reward_score:default_compute_score", 1.0, "verl's default, by data_source")
        draft.differs.append(
            "where verl is not installed, rewards: {final_answer: 1.0} reads answers of GSM8K and MATH"
        )
    if settings.take(f"{K}.overlong_buffer_cfg.enable reward_model.overlong_buffer.enable"):
        names = f"{K}.overlong_buffer_cfg.len reward_model.overlong_buffer.len"
        weight = draft.value(names.replace(".len", ".penalty_factor"), 1.0)
        draft.overlong(
            weight,
            draft.value(f"{K}.max_resp_len", draft.get("sampling.max_new_tokens")),
            draft.value(names),
            draft.where(names),
        )
