"""OpenRLHF's scripts: flags of its Ray PPO trainer, and of its trainers on data."""

from collections.abc import Mapping
from typing import Any

from lmgym.compat.settings.recipe import Draft

ALGORITHMS = {"dpo": "dpo", "kto": "kto", "sft": "supervised", "rm": "reward_model", "kd": "gkd"}
CORRECTED = "algo.advantage.is_correction_enable enable_vllm_is_correction"
CHAT = "data.apply_chat_template apply_chat_template"


def fill(draft: Draft, table: Mapping[str, Any]) -> None:
    """Fill in a recipe."""
    settings, program = draft.settings, f"{draft.settings.program} {draft.path}"
    kind = next((kind for kind in ("ppo", *ALGORITHMS) if f"train_{kind}" in program), "ppo")
    draft.fill(table["common"])
    if "lora_rank" in draft.recipe["policy"]:
        draft.fill(table["lora"])
    if kind == "ppo":
        draft.fill(table["ppo"])
        _algorithm(draft, table)
        _rewards(draft)
    else:
        draft.put("algorithm.name", ALGORITHMS[kind], settings.program)
        draft.fill({**table["others"], **table.get(kind, {})})
        if settings.take("model.ipo_enable ipo"):
            draft.put("algorithm.name", "ipo", draft.where("model.ipo_enable ipo"))
    _data(draft, kind)
    if settings.take("data.max_images_per_prompt"):
        draft.obstacles.append("the prompts have pictures, which lmgym does not read")


def _algorithm(draft: Draft, table: Mapping[str, Any]) -> None:
    """Clip, correction, KL and minibatches."""
    settings = draft.settings
    if "name" not in draft.recipe["algorithm"]:
        draft.put("algorithm.name", "grpo", "in place of what is not known")
    name = draft.get("algorithm.name")
    both, one = "actor.eps_clip_low_high eps_clip_low_high", "actor.eps_clip eps_clip"
    bounds, single = draft.value(both), draft.value(one, 0.2)
    bounds = bounds if isinstance(bounds, list) and len(bounds) == 2 else [single, single]
    for bound, value in zip(("low", "high"), bounds, strict=True):
        draft.put(f"algorithm.surrogate.{bound}", value, draft.where(f"{both} {one}"))
    if name == "ppo":
        draft.fill(table["critic"])
    if name == "grpo" and settings.take(CORRECTED):
        draft.fill(table["correction"])
        limits = draft.value("algo.advantage.is_correction_threshold vllm_is_truncated_threshold", [0.5, 5.0])
        for bound, value in zip(("floor", "cap"), limits if isinstance(limits, list) else [], strict=False):
            draft.put(f"algorithm.correction.{bound}", value, draft.where(CORRECTED))
    if name == "grpo" and draft.get("algorithm.dynamic_sampling"):
        draft.differs.append("groups whose scores are all equal are drawn again; OpenRLHF goes by bounds of the mean")
    size, answers = draft.number("rollout.batch_size rollout_batch_size", 1024), draft.get("algorithm.group_size")
    batch, names = draft.number("train.batch_size train_batch_size", 128), "train.batch_size train_batch_size"
    answers = answers if isinstance(answers, int) else 1
    draft.minibatches(size * answers / batch, f"{size} prompts x {answers} answers / {draft.where(names)}")
    weight, kind = (
        draft.value("algo.kl.init_coef init_kl_coef", 0.01),
        draft.value("algo.kl.estimator kl_estimator", "k1"),
    )
    draft.kl(weight, "algo.kl.init_coef init_kl_coef", bool(settings.take("algo.kl.use_loss use_kl_loss")), kind)


def _rewards(draft: Draft) -> None:
    """A function of a file, a reward model, a penalty of length."""
    model, remote = "reward.model_name_or_path reward_pretrain", "reward.remote_url remote_rm_url"
    url, name = draft.value(remote), draft.value(model)
    if str(url).endswith(".py"):
        draft.function(url, "reward_func", 1.0, draft.where(remote))
    elif url is not None:
        draft.obstacles.append(f"{draft.where(remote)}: name the server {url} under rewards: (docs/rewards.md)")
    if name is not None:
        draft.put("rewards/reward_model", {"model": name, "weight": 1.0}, draft.where(model))
    if not draft.recipe.get("rewards"):
        draft.obstacles.append("the file names no reward that can be read; write rewards:")
    buffer = "reward.overlong_buffer_len overlong_buffer_len"
    if (length := draft.value(buffer)) is not None:
        weight = draft.value("reward.overlong_penalty_factor overlong_penalty_factor", 1.0)
        draft.overlong(weight, draft.get("sampling.max_new_tokens"), length, draft.where(buffer))


def _data(draft: Draft, kind: str) -> None:
    """The `task:` section."""
    names = "data.prompt_dataset data.dataset prompt_data dataset"
    given = str(draft.value(names, "data.jsonl")).split(",")
    draft.data(given[0].partition("@")[0], names, "preferences" if kind in ("dpo", "rm", "kto") else "data")
    if len(given) > 1:
        draft.obstacles.append(f"{draft.where(names)}: several sets; write a mixture (docs/tasks.md)")
    if kind in ("dpo", "rm"):
        for ours in ("prompt", "chosen", "rejected"):
            draft.copy(f"task.{ours}", f"data.{ours}_key {ours}_key")
    elif kind != "kto":
        draft.put(
            "task.prompt", draft.value("data.input_key input_key", "input"), draft.where("data.input_key input_key")
        )
        label = "data.output_key output_key data.label_key label_key"
        draft.put("task.references", draft.value(label), draft.where(label))
    chat = draft.value(CHAT, False)
    if chat or kind == "ppo":
        draft.put("task.prompts", "chat" if chat else "text", draft.where(CHAT))
    split = "data.prompt_split data.dataset_split prompt_split dataset_split"
    if draft.value(split, "train") != "train":
        draft.copy("task.splits.train", split)
