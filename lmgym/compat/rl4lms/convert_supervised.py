"""Convert RL4LMs' supervised configurations; `alg.training_args` are keywords of Hugging Face's TrainingArguments."""

import math
from typing import Any, get_args

from lmgym.compat.rl4lms.convert_task import EXAMPLES
from lmgym.compat.rl4lms.schema import Conversion, Section
from lmgym.core.errors import LmgymError
from lmgym.tasks.base import load_task
from lmgym.updates.schedules import Schedule

SCHEDULES = {*get_args(Schedule)} - {"cosine_with_min_lr", "warmup_stable_decay"}  # whose own arguments are elsewhere
IDLE = [
    *("output_dir", "overwrite_output_dir", "logging_dir", "logging_strategy", "save_strategy", "disable_tqdm"),
    *("evaluation_strategy", "eval_strategy", "per_device_eval_batch_size", "report_to", "group_by_length"),
    *("dataloader_num_workers", "dataloader_drop_last", "remove_unused_columns", "ddp_find_unused_parameters"),
]


def supervised(alg: Section, task: dict[str, Any], conversion: Conversion) -> None:
    """Fill in `algorithm`, `optimizer`, `steps` and how often the run evaluates and saves. RL4LMs trains on each
    reference as an example of its own, epoch by epoch; lmgym counts steps, and takes one of the references of each
    example in turn."""
    arguments = alg.section("training_args")
    batch = arguments.take("per_device_train_batch_size", int, 8)
    batch *= arguments.take("gradient_accumulation_steps", int, 1)
    steps = _steps(arguments, batch, task, conversion)
    kind = arguments.take("lr_scheduler_type", str, "linear")
    if kind not in SCHEDULES:
        conversion.warn(f"{arguments.key}.lr_scheduler_type {kind}: lmgym has no such schedule; the rate is constant")
    share, warmup = arguments.take("warmup_ratio", float, 0.0), arguments.take("warmup_steps", int, 0)
    optimizer: dict[str, Any] = {
        "name": "adamw",
        "learning_rate": arguments.take("learning_rate", float, 5e-5),
        "weight_decay": arguments.take("weight_decay", float, 0.0),
        "betas": [arguments.take("adam_beta1", float, 0.9), arguments.take("adam_beta2", float, 0.999)],
        "epsilon": arguments.take("adam_epsilon", float, 1e-8),
        "max_gradient_norm": arguments.take("max_grad_norm", float, 1.0),
        "schedule": kind if kind in SCHEDULES else "constant",
        "warmup": warmup or math.ceil(share * steps),
    }
    conversion.recipe |= {"prompts_per_step": batch, "algorithm": {"name": "supervised"}, "steps": steps}
    conversion.recipe["optimizer"] = optimizer
    every = arguments.take("logging_steps", int, 500)
    conversion.recipe["evaluation"]["every"] = every
    conversion.note(f"{arguments.key}.logging_steps {every} -> evaluation.every: RL4LMs evaluates whenever it logs")
    conversion.recipe["checkpoint"] = {"every": arguments.take("save_steps", int, 500)}
    if (keep := arguments.take("save_total_limit", int)) is not None:
        conversion.recipe["checkpoint"]["keep"] = max(keep, 1)
    _machine(arguments, conversion)
    if (seed := arguments.take("seed", int)) is not None:
        conversion.recipe["seed"] = seed
    arguments.idle(conversion, *IDLE)
    arguments.leave_out(conversion)


def _machine(arguments: Section, conversion: Conversion) -> None:
    """Fill in the policy's precision and activation checkpointing."""
    policy = conversion.recipe["policy"]
    if arguments.take("bf16", bool, False) or arguments.take("fp16", bool, False):
        policy["compute"] = "bfloat16"
    if arguments.take("gradient_checkpointing", bool, False):
        policy["activation_checkpointing"] = True


def _steps(arguments: Section, batch: int, task: dict[str, Any], conversion: Conversion) -> int:
    """Number of optimizer steps: max_steps, or the epochs over all references."""
    epochs, most = arguments.take("num_train_epochs", float, 3.0), arguments.take("max_steps", int, -1)
    if most > 0:
        return most
    count, whose = _references(task)
    steps = math.ceil(math.ceil(count / batch) * epochs)
    conversion.note(
        f"{arguments.key}.num_train_epochs {epochs:g} -> steps {steps}: {count:,} references ({whose}), {batch} a step"
    )
    return steps


def _references(task: dict[str, Any]) -> tuple[int, str]:
    """Number of references to train on, and its origin: counted in local data, else the number its authors give."""
    name = task["name"]
    if "path" not in task and "hub_id" not in task and name in EXAMPLES and task.get("news_only") is None:
        most = [task[key] for key in ("max_size", "limit") if key in task]
        share = task.get("positive_ratio", 1.0)
        return min([max(int(EXAMPLES[name] * share), 1), *most]), "the number that the data's authors give"
    arguments = {key: value for key, value in task.items() if key != "name"}
    try:
        examples = load_task(name, "train", **arguments)
    except LmgymError as error:
        raise LmgymError(
            f"alg.training_args.num_train_epochs: to count steps the training data must be read, and {error}; or write "
            "alg.training_args.max_steps"
        ) from error
    return sum(max(len(example.references), 1) for example in examples), "counted"
