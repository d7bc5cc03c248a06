"""OpenRLHF's scripts: flags of its Ray PPO trainer, and of its trainers on data."""

from lmgym.compat.settings.recipe import Draft

KINDS = ("ppo", "dpo", "kto", "sft", "rm", "kd")
SIZE, BATCH = "rollout.batch_size rollout_batch_size", "train.batch_size train_batch_size"


def fill(draft: Draft) -> None:
    """Fill in a recipe."""
    program = f"{draft.settings.program} {draft.path.name}"
    kind = next((kind for kind in KINDS if f"train_{kind}" in program), "ppo")
    pairs = kind in ("dpo", "rm", "kto")
    draft.data("data.prompt_dataset data.dataset prompt_data dataset", task="preferences" if pairs else "data")
    if "," in str(given := draft.get("task.hub_id") or draft.get("task.path")):
        draft.obstacles.append(f"several sets, {given}: write a mixture (docs/tasks.md)")
    draft.fill("common", kind, *(["pairs"] if pairs else []))
    schedule = str(draft.settings.take("actor.lr_scheduler lr_scheduler", "cosine_with_min_lr"))
    if "min_lr" not in schedule and "$" not in schedule:
        draft.drop("optimizer.final_fraction")  # the others do not get it there
    if draft.get("optimizer.schedule") == "polynomial":
        draft.end("lr_end", 1e-7)  # transformers'
    if draft.get("policy.lora_rank"):
        draft.fill("lora")
    if kind != "ppo":
        return
    answers = draft.get("algorithm.group_size")
    prompts, batch = draft.number(SIZE, 1024), draft.number(BATCH, 128)
    answers = answers if isinstance(answers, int) else 1
    draft.minibatches(prompts * answers / batch, f"{prompts} prompts x {answers} answers / {draft.where(BATCH)}")
    if draft.get("rewards.overlong.buffer"):
        draft.put("rewards.overlong.max_tokens", draft.get("sampling.max_new_tokens"), "sampling.max_new_tokens")
    elif draft.get("rewards.overlong"):  # a factor without a buffer does nothing there
        del draft.recipe["rewards"]["overlong"]
    remote = draft.value("reward.remote_url remote_rm_url")
    if str(remote).endswith(".py"):
        name = str(remote).rpartition("/")[2].removesuffix(".py")
        draft.put(f"rewards/{name}:reward_func", 1.0, draft.where("reward.remote_url remote_rm_url"))
    elif remote is not None:
        draft.put("rewards/remote_reward", {"url": remote}, draft.where("reward.remote_url remote_rm_url"))
    if not draft.recipe.get("rewards"):
        draft.obstacles.append("the file names no reward that can be read; write rewards:")
