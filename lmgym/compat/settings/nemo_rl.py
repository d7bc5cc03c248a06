"""NeMo RL's configurations: YAML files over a base file, for GRPO, PPO, DPO, distillation and supervised training."""

from collections.abc import Mapping
from typing import Any

from lmgym.compat.settings.recipe import Draft

ALGORITHMS = {
    "grpo": "grpo",
    "ppo": "ppo",
    "dpo": "dpo",
    "sft": "supervised",
    "rm": "reward_model",
    "distillation": "gkd",
}


def fill(draft: Draft, table: Mapping[str, Any]) -> None:
    """Fill in a recipe."""
    settings = draft.settings
    kind = next((kind for kind in ALGORITHMS if any(key.startswith(f"{kind}.") for key in settings.given)), "grpo")
    sampled = kind in ("grpo", "ppo", "distillation")
    draft.put("algorithm.name", ALGORITHMS[kind], f"the section {kind}")
    draft.fill(table["common"])
    megatron = settings.take("policy.megatron_cfg.enabled")
    draft.fill(table["megatron" if megatron else "torch"])
    if not megatron:
        _schedule(draft)
    if settings.take("policy.dtensor_cfg.lora_cfg.enabled policy.megatron_cfg.peft.enabled"):
        draft.fill(table["lora"])
    own = {**table["others"], **(table["grpo"] if kind in ("grpo", "ppo") else {}), **table.get(kind, {})}
    draft.fill({" ".join(f"{kind}.{name}" for name in names.split()): row for names, row in own.items()})
    if sampled:
        draft.fill(table["sampling"])
    size = draft.get("algorithm.group_size")
    answers = draft.get("prompts_per_step") if sampled else None
    batch = draft.number("policy.train_global_batch_size", 512 if sampled else 128)
    if kind in ("grpo", "ppo") and isinstance(answers, int) and isinstance(size, int):
        draft.minibatches(
            answers * size / batch, f"{answers} x {size} answers / {draft.where('policy.train_global_batch_size')}"
        )
    elif not sampled:
        draft.put("prompts_per_step", batch, draft.where("policy.train_global_batch_size"))
    draft.length(f"{kind}.max_num_steps", f"{kind}.max_num_epochs", 1)
    if "steps" in draft.recipe:
        draft.differs.append(
            f"NeMo RL also stops after {settings.take(f'{kind}.max_num_epochs', 1)} epochs, where that is earlier"
        )
    if kind == "ppo":
        draft.fill(table["critic"])
        draft.put("policy.critic", "separate", "NeMo RL's value model is a model of its own")
    if kind in ("grpo", "ppo"):
        _loss(draft, kind)
    if kind == "distillation":
        draft.copy("algorithm.teacher", "teacher.model_name")
    _data(draft, table["sets"], kind)
    if any("vlm" in str(one.value).lower() or "audio" in str(one.value).lower() for one in settings.given.values()):
        draft.obstacles.append("the prompts have pictures or sound, which lmgym does not read")


def _schedule(draft: Draft) -> None:
    """Warm-up and decay of a list of torch's schedulers."""
    given = draft.value("policy.scheduler")
    parts = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    warmup = [one.get("kwargs", {}).get("total_iters") for one in parts if "LinearLR" in str(one.get("name"))]
    if warmup and isinstance(warmup[0], int):
        draft.put("optimizer.warmup", warmup[0], draft.where("policy.scheduler"))
    if any("Cosine" in str(one.get("name")) for one in parts):
        draft.put("optimizer.schedule", "cosine", draft.where("policy.scheduler"))


def _loss(draft: Draft, kind: str) -> None:
    """KL, correction, and penalties of length."""
    settings = draft.settings
    weight = "loss_fn.reference_policy_kl_penalty"
    in_reward = bool(settings.take("loss_fn.use_kl_in_reward"))
    form = draft.value("loss_fn.reference_policy_kl_type", "k3")
    draft.kl(draft.value(weight, 0.01), weight, not in_reward, "k1" if in_reward else form)
    cap = draft.value("loss_fn.truncated_importance_sampling_ratio")
    if settings.take("loss_fn.use_importance_sampling_correction") and kind == "grpo":
        form = str(draft.value("loss_fn.truncated_importance_sampling_type", "tis"))
        where = draft.where("loss_fn.use_importance_sampling_correction")
        draft.put("algorithm.correction.name", "truncated" if form == "tis" else "masked", where)
        draft.put("algorithm.correction.cap", cap or 10.0, where)
    shaping = f"{kind}.reward_shaping"
    if settings.take(f"{shaping}.enabled"):
        limit = draft.value(f"{shaping}.max_response_length", draft.get("sampling.max_new_tokens"))
        penalty, buffer = (
            draft.value(f"{shaping}.overlong_buffer_penalty", 1),
            draft.value(f"{shaping}.overlong_buffer_length", 128),
        )
        draft.overlong(penalty, limit, buffer, draft.where(f"{shaping}.overlong_buffer_length"))


def _data(draft: Draft, sets: Mapping[str, Any], kind: str) -> None:
    """The `task:` section, and the reward of its environment."""
    settings, name = draft.settings, "data.train.dataset_name"
    listed = settings.take("data.train")
    first = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
    if first and len(listed) > 1:
        draft.obstacles.append(f"{draft.where('data.train')}: several sets; write a mixture (docs/tasks.md)")
    given = draft.value(name) or first.get("dataset_name")
    path = draft.value("data.train.data_path data.train_data_path") or first.get("data_path")
    known = sets.get(str(given), [None, "input", "output"])
    if given and not path and known[0] is None:
        draft.obstacles.append(f"{draft.where(name)}: {given} is NeMo RL's own name; write the Hub's as task.hub_id")
    pairs = kind in ("dpo", "rm")
    draft.data(path or known[0] or given, name, "preferences" if pairs else "data")
    if not pairs:
        draft.put("task.prompts", "chat", "NeMo RL uses the chat template")
        draft.put("task.prompt", draft.value("data.train.input_key", known[1]), draft.where("data.train.input_key"))
        draft.put(
            "task.references", draft.value("data.train.output_key", known[2]), draft.where("data.train.output_key")
        )
    split = draft.value("data.train.split", "train")
    if split != "train":
        draft.copy("task.splits.train", "data.train.split")
    if kind in ("grpo", "ppo"):
        env = draft.value("data.train.env_name data.default.env_name", "math")
        if env == "math":
            draft.put("rewards/math_equal", 1.0, draft.where("data.default.env_name"))
        elif env == "reward_model":
            model = draft.value("env.reward_model.model_name")
            draft.put(
                "rewards/reward_model", {"model": model, "weight": 1.0}, draft.where("env.reward_model.model_name")
            )
        else:
            draft.obstacles.append(
                f"environment {env}: write its reward under rewards:, or env: (docs/environments.md)"
            )
