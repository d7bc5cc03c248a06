"""TRL's configurations, and those of programs made with it: open-r1's recipes and unsloth's notebooks."""

import re
from collections.abc import Mapping
from math import ceil
from typing import Any

from lmgym.compat.settings.recipe import Draft
from lmgym.compat.settings.settings import Code

OTHERS = r"(?i)async_?grpo|bco|nash|xpo|sdft|sdpo|\bssd|tpo\b|prm|minillm|\bcpo|gold|distillation"
REWARDS = "reward_funcs reward_function reward_model reward_model_path reward_model_name_or_path"
PAIRS = ("dpo", "orpo", "kto", "reward")
COLUMNS = {"sft": ("prompt", "completion"), "gkd": ("messages.:-1", "messages.-1.content")}  # of prompt and reference
SAMPLED = ("grpo", "rloo", "onlinedpo", "ppo", "gkd")


def fill(draft: Draft) -> None:
    """Fill in a recipe."""
    settings = draft.settings
    name = trainer(f"{settings.program} {draft.path.name}", settings.given)
    if name is None:
        draft.obstacles.append(f"{settings.program}: lmgym has no algorithm of this trainer")
        name = "sft"
    sampled = name in SAMPLED
    _data(draft, "preferences" if name in PAIRS else "data", *COLUMNS.get(name, ("prompt", None)))
    arguments = settings.given.get("lr_scheduler_kwargs")
    if arguments and isinstance(arguments.value, dict):  # of a script or a command; those of YAML have keys with dots
        del settings.given["lr_scheduler_kwargs"]
        settings.given |= {
            f"lr_scheduler_kwargs.{key}": arguments._replace(value=value) for key, value in arguments.value.items()
        }
    draft.fill("training", *(["sampling"] if sampled else []), name)  # the trainer's own defaults of sampling come last
    if draft.get("optimizer.schedule") == "polynomial":
        draft.end("lr_scheduler_kwargs.lr_end", 1e-7)  # transformers'
    elif settings.key("lr_scheduler_kwargs.min_lr"):
        draft.end("lr_scheduler_kwargs.min_lr")
    in_script = "LoraConfig" in str(settings.take("peft_config")) or "lora_r" in settings.given
    if settings.take("use_peft", in_script):
        _lora(draft)
    updates = _batches(draft, sampled)
    if sampled and name != "gkd":
        _rewards(draft)
    steps = draft.value("eval_steps") if settings.take("eval_strategy evaluation_strategy") == "steps" else None
    draft.put("evaluation.every", steps if isinstance(steps, int) else 0, draft.where("eval_steps"))
    for ours in ("optimizer.warmup", "evaluation.every", "checkpoint.every"):
        _in_steps(draft, ours, updates)
    if re.search("(?i)image|vlm", f"{draft.path.name} {[str(one.value)[:200] for one in settings.given.values()]}"):
        draft.obstacles.append("the prompts have pictures, for which no recipe is written here; docs/vision.md has one")
    if name in draft.table["differs"]:
        draft.differs.append(f"{name}: {draft.table['differs'][name]}")


def trainer(program: str, given: Mapping[str, Any]) -> str | None:
    """Which trainer a file is for: by the names of class, program and file, or by its keys; None for one that lmgym has
    no algorithm of.

    Example: trainer("GRPOTrainer gspo.py", {}) -> "grpo"
    """
    for name in ("onlinedpo", "grpo", "rloo", "orpo", "kto", "gkd", "reward", "dpo", "ppo", "sft"):
        if re.search(OTHERS, program):
            return None
        if re.search(rf"(?i){name}", re.sub("(?i)gspo|dapo", "grpo", program.replace("_", ""))):
            return name
    return "grpo" if {"num_generations", "reward_funcs", "max_completion_length"} & given.keys() else "sft"


def _lora(draft: Draft) -> None:
    """Rank, scale and layers of the adapters."""
    draft.fill("lora")
    rank, alpha = draft.get("policy.lora_rank"), draft.get("policy.lora_alpha")
    known = isinstance(rank, int) and 0 < rank < 1e9 and isinstance(alpha, int | float)
    if draft.settings.take("use_rslora") is True and known:
        # There the scale is alpha / the root of the rank, here alpha / rank.
        source = f"{draft.where('lora_alpha')}, x the root of {rank}: use_rslora"
        draft.put("policy.lora_alpha", alpha * rank**0.5, source)
    if not draft.get("policy.lora_targets"):
        draft.differs.append(
            "no lora_target_modules: peft adapts q_proj and v_proj of most models, lmgym all linear layers "
            "(policy.lora_targets)"
        )


def _in_steps(draft: Draft, ours: str, updates: float) -> None:
    """Count in steps, of which each makes several updates, what TRL counts in updates."""
    value = draft.get(ours)
    if updates > 1 and isinstance(value, int | float) and 0 < value < 1e15:
        source = draft.sources[ours.replace(".", "/")]
        draft.put(ours, ceil(value / updates), f"{source}, / {updates:g} updates a step")


def _batches(draft: Draft, sampled: bool) -> float:
    """Prompts of a step, minibatches, length and warm-up, from what TRL counts. Returns the updates of a step."""
    settings = draft.settings
    asked = settings.key("num_processes nproc_per_node")
    devices = draft.devices or draft.number("num_processes nproc_per_node", 1)
    if not draft.devices and not asked:
        draft.differs.append("the file does not say on how many devices it runs; read as 1 (--devices N)")
    each, accumulated = draft.number("per_device_train_batch_size", 8), draft.number("gradient_accumulation_steps", 1)
    update, updates = each * devices * accumulated, 1.0
    count = f"per_device_train_batch_size {each} x {devices} devices x gradient_accumulation_steps {accumulated}"
    rows = update
    if sampled:
        size = draft.get("algorithm.group_size")
        size = size if isinstance(size, int) and size > 0 else {"online_dpo": 2}.get(draft.get("algorithm.name"), 1)
        kept = draft.number("steps_per_generation", accumulated)
        answers = draft.number("generation_batch_size", each * devices * kept)
        updates = draft.minibatches(answers / update, "steps_per_generation / gradient_accumulation_steps")
        epochs = draft.get("algorithm.epochs")
        updates *= epochs if isinstance(epochs, int) and epochs > 0 else 1
        rows, count = (
            answers / size,
            f"{answers:g} answers ({each} x {devices} devices x {kept:g}) / {size} of a prompt",
        )
    if rows != ceil(rows):
        draft.differs.append(f"{rows:g} prompts a step, rounded up; per_device_train_batch_size and devices say more")
    draft.put("prompts_per_step", ceil(rows), count)
    draft.length("max_steps", "num_train_epochs", 3, updates)
    warmup, ratio, place = draft.value("warmup_steps", 0), draft.value("warmup_ratio"), "warmup_steps"
    if ratio and not (isinstance(warmup, int | float) and warmup > 0):  # transformers takes steps before the ratio
        warmup, place = ratio, "warmup_ratio"
    share = place == "warmup_ratio" or (isinstance(warmup, float) and warmup < 1)
    draft.put(f"optimizer.warmup{'_ratio' if share else ''}", warmup, draft.where(place))
    betas = draft.value("adam_beta1", 0.9), draft.value("adam_beta2", 0.999)
    if betas != (0.9, 0.999):
        draft.put("optimizer.betas", list(betas), "adam_beta1, adam_beta2")
    return updates


def _data(draft: Draft, task: str, prompt: str, reference: str | None) -> None:
    """The `task:` section: a data set, its splits and columns."""
    settings, name = draft.settings, "data_files dataset_name dataset_id_or_path"
    mixed = settings.take("dataset_mixture.datasets")
    if isinstance(mixed, list) and mixed and all(isinstance(one, dict) for one in mixed):
        draft.put("task.name", "mixture", draft.where("dataset_mixture.datasets"))
        members = _members(draft, mixed, task, prompt, reference)
        draft.put("task.tasks", members, draft.where("dataset_mixture.datasets"))
        return
    draft.data(name, task=task)
    if "hub_id" in draft.recipe["task"] and (config := draft.value("dataset_config")):
        draft.put("task.config", config, draft.where("dataset_config"))
    for ours, names in (("train", "dataset_train_split dataset_split"), ("test", "dataset_test_split")):
        split = draft.value(names)
        split = split[0] if isinstance(split, list) and split else split
        if split and split != ours:
            draft.put(f"task.splits.{ours}", split, draft.where(names))
    if task == "data":
        if settings.key("dataset_prompt_column system_prompt"):
            draft.put("task.prompts", "chat", "the question is a message")
        column = "dataset_prompt_column dataset_text_field"
        draft.put("task.prompt", draft.value(column, prompt), draft.where(column))
        draft.put("task.references", reference, "TRL's name" if reference else "functions read columns")
    made = [f"{key[4:]} ({one.where})" for key, one in settings.given.items() if key[:4] == "def " and not one.value]
    if made and any(isinstance(one.value, Code) and ".map(" in one.value for one in settings.given.values()):
        draft.differs.append(f"the script prepares its rows by functions of its own: {', '.join(made)}")


def _members(
    draft: Draft, mixed: list[dict[str, Any]], task: str, prompt: str, reference: str | None
) -> list[dict[str, Any]]:
    """The members of a mixture. There a weight is the part of a data set that is kept, and all that is kept is joined:
    `share` here, and `weight: rows`, with which an epoch has each row once."""
    usual: dict[str, Any] = {"name": task, "weight": "rows"}
    if task == "data":
        if draft.settings.key("dataset_prompt_column system_prompt"):
            usual["prompts"] = "chat"
        usual |= {"prompt": draft.value("dataset_prompt_column dataset_text_field", prompt), "references": reference}
    held_out = draft.value("dataset_mixture.test_split_size")
    if isinstance(held_out, float):
        usual["test"] = held_out
    else:
        draft.differs.append("a tenth of data without a test split is held out for evaluations (test of a member)")
    if any(one.get("columns") for one in mixed):
        draft.differs.append("dataset_mixture: all columns of a row reach the rewards, not those of `columns` alone")
    members = []
    for number, one in enumerate(mixed, 1):
        if one.get("weight") == 0:  # nothing is kept of it
            continue
        member = {**usual, "label": str(one.get("id")).rpartition("/")[2] + f" {number}"}
        for theirs, ours in (("id", "hub_id"), ("config", "config"), ("weight", "share")):
            if one.get(theirs) is not None:
                member[ours] = one[theirs]
        if one.get("split", "train") != "train":
            member["splits"] = {"train": one["split"]}
        members.append(member)
    return members


def _rewards(draft: Draft) -> None:
    """The `rewards:` section; a function is named as module:function."""
    settings, places = draft.settings, draft.table["rewards"]
    found: Any = settings.take(REWARDS) or []
    where, weights = draft.where(REWARDS), settings.take("reward_weights")
    for place, one in enumerate(found if isinstance(found, list) else [found]):
        weight = weights[place] if isinstance(weights, list) and place < len(weights) else 1.0
        name, code = str(one), isinstance(one, Code)
        if name in places:
            name = places[name]
        elif f"def {name}" in settings.given and settings.given[f"def {name}"].value:
            name = settings.given[f"def {name}"].value  # imported
        elif f"def {name}" in settings.given:
            name = f"{re.sub('[^a-zA-Z0-9]', '_', draft.path.stem)}_rewards:{name}"
            line = settings.given[f"def {one}"].where
            draft.obstacles.append(
                f"{one}: copy it ({line}) into {name.partition(':')[0]}.py; the script itself would train"
            )
        elif re.fullmatch(r"\w+_reward" if not code else r"(?!reward_model)\w+", name):
            name = f"trl.rewards:{name}"
        elif not code and re.fullmatch(r"\w+(\.\w+)+", name):
            name = ":".join(name.rsplit(".", 1))
        elif code:
            draft.obstacles.append(f"{where}: {name} is made by the script; name a function of yours under rewards:")
            continue
        else:
            draft.put("rewards/reward_model", {"model": name, "weight": weight}, where)
            continue
        made = draft.table["arguments"].get(str(one), {})
        rows = {key: row if isinstance(row, list) else [row, None] for key, row in made.items()}
        given = {ours: value for key, (ours, usual) in rows.items() if (value := draft.value(key, usual)) is not None}
        draft.put(f"rewards/{name}", {"weight": weight, **given} if given else weight, where)
    if not draft.recipe.get("rewards"):
        draft.obstacles.append("the file names no reward that can be read; write rewards:")
