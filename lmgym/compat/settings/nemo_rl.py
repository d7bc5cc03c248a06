"""NeMo RL's configurations: YAML files over a base file, for GRPO, PPO, DPO, distillation and supervised training."""

from typing import Any

from lmgym.compat.settings.recipe import Draft

KINDS = ("grpo", "ppo", "dpo", "sft", "rm", "distillation")
SETS, BATCH = "data.train.data_path data.train_data_path data.train.dataset_name", "policy.train_global_batch_size"


def fill(draft: Draft) -> None:
    """Fill in a recipe."""
    settings = draft.settings
    kind = next((kind for kind in KINDS if any(key.startswith(f"{kind}.") for key in settings.given)), "grpo")
    sampled, pairs = kind in ("grpo", "ppo", "distillation"), kind in ("dpo", "rm")
    own = {**draft.table["any"], **(draft.table["sampler"] if sampled else {}), **draft.table[kind]}
    own = {
        " ".join(f"{kind}.{n}" for n in names.split()) if names != "always" else names: row
        for names, row in own.items()
    }
    draft.table = {**draft.table, "own": own}
    _data(draft, pairs)
    megatron = settings.take("policy.megatron_cfg.enabled")
    draft.fill("common", "megatron" if megatron else "torch", "own", *(["sampling"] if sampled else []))
    if not megatron:
        _schedule(draft)
    if kind in ("grpo", "ppo"):
        draft.fill("loss", *(["value"] if kind == "ppo" else ["correction"]))
    batch, prompts, size = draft.number(BATCH, 512), draft.get("prompts_per_step"), draft.get("algorithm.group_size")
    if not sampled:
        draft.put("prompts_per_step", batch, draft.where(BATCH))
    elif kind != "distillation" and isinstance(prompts, int) and isinstance(size, int):
        draft.minibatches(prompts * size / batch, f"{prompts} x {size} answers / {draft.where(BATCH)}")
    draft.length(f"{kind}.max_num_steps", f"{kind}.max_num_epochs", 1)
    if any("vlm" in str(one.value).lower() or "audio" in str(one.value).lower() for one in settings.given.values()):
        draft.obstacles.append("the prompts have pictures or sound, for which no recipe is written here")


def _schedule(draft: Draft) -> None:
    """Warm-up and decay of a list of torch's schedulers."""
    given: Any = draft.value("policy.scheduler")
    for one in given if isinstance(given, list) else []:
        name, arguments = (str(one.get("name")), one.get("kwargs")) if isinstance(one, dict) else ("", None)
        steps = arguments.get("total_iters") if isinstance(arguments, dict) else None
        if "LinearLR" in name and isinstance(steps, int):
            draft.put("optimizer.warmup", steps, draft.where("policy.scheduler"))
        elif "Cosine" in name:
            draft.put("optimizer.schedule", "cosine", draft.where("policy.scheduler"))


def _data(draft: Draft, pairs: bool) -> None:
    """The `task:` section. Names of sets that NeMo RL knows are replaced by the Hub's."""
    several = draft.settings.take("data.train")
    if isinstance(several, list) and several and isinstance(several[0], dict):
        draft.obstacles.append(
            f"{draft.where('data.train')}: several sets; this is the first (a mixture: docs/tasks.md)"
        )
        place = draft.settings.given["data.train"].where
        given = {
            f"data.train.{key}": draft.settings.given["data.train"]._replace(value=v) for key, v in several[0].items()
        }
        draft.settings.given |= given
        draft.settings.notes.append(f"data.train, {place}: the first of {len(several)} sets")
    name = draft.settings.take(SETS)
    known = draft.table["sets"].get(str(name))
    draft.data(SETS, task="preferences" if pairs else "data")
    if known:
        draft.put("task.hub_id", known[0], draft.where(SETS))
    elif name and "/" not in str(name):
        draft.obstacles.append(f"{draft.where(SETS)}: {name} is NeMo RL's own name; write the Hub's as task.hub_id")
    if not pairs:
        draft.put("task.prompts", "chat", "NeMo RL uses the chat template")
        for ours, theirs, usual in zip(
            ("prompt", "references"), ("input", "output"), (known or [0, "input", "output"])[1:], strict=True
        ):
            key = f"data.train.{theirs}_key data.default.{theirs}_key"
            draft.put(f"task.{ours}", draft.value(key, usual), draft.where(key))
