"""TRL's GRPOTrainer on a workload, one step per line of stdin; Hugging Face's `generate` samples.

TRL's loop is its own and has no step to call, so it is held at the beginning of an optimizer step, by a callback: the
step is over when the loop has come back there, logged and with the next prompts in its hands. Nothing is left out.

    python -m benchmarks.contenders.trl_grpo FOLDER '{"precision": "fp32"}'
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset, Image
from transformers import AutoProcessor, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks import workloads
from benchmarks.contenders.lengths import EndsAt
from benchmarks.contenders.turns import Turns

DEFAULTS = {
    "precision": "fp32",  # fp32; autocast (bf16=True, TRL's default); bf16 (weights too: no fp32 masters)
    "batch": 16,  # answers per forward and backward pass; the rest is gradient accumulation
    "train_vision": True,  # of a model that sees: whether its tower learns, too, as TRL lets it
    "device": "cpu",
    "threads": 2,
}
STEPS = 100_000


class Held(TrainerCallback):
    """Stops TRL's loop before each optimizer step until the driver asks for one."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.begun = turns, False

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if self.begun:
            self.turns.mark("update")
            self.turns.answer()
        self.begun = True
        if not self.turns.wait():
            raise SystemExit  # the driver has hung up


def trainer_of(
    folder: Path, workload: workloads.Workload, settings: dict[str, Any], out: str, turns: Turns
) -> GRPOTrainer:
    """The trainer with checkpointing off, no reference model, one optimizer step per batch and a constant rate."""
    rows = len(workload.rows)
    batch = min(settings["batch"], rows)
    assert rows % batch == 0, f"{rows} answers do not come in batches of {batch}"
    weights = "bfloat16" if settings["precision"] == "bf16" else "float32"
    config = GRPOConfig(
        output_dir=out,
        use_cpu=settings["device"] == "cpu",
        bf16=settings["precision"] != "fp32",
        model_init_kwargs={"dtype": weights},
        gradient_checkpointing=False,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=rows // batch,
        num_generations=workload.completions,
        max_completion_length=workload.new_tokens,
        beta=0.0,
        temperature=1.0,
        max_steps=STEPS,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        shuffle_dataset=False,  # each step the workload's prompts, in their order
        seed=workload.seed,
    )

    def reward(completion_ids: Sequence[Sequence[int]], **others: Any) -> list[float]:
        workloads.check_lengths(workload, completion_ids)
        return [workloads.reward(ids) for ids in completion_ids]

    sees = bool(workloads.pictures(folder))
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=prompts_of(folder, workload),
        processing_class=(AutoProcessor if sees else AutoTokenizer).from_pretrained(folder / "model"),
        callbacks=[Held(turns)],
    )
    if sees and not settings["train_vision"]:
        for part in (trainer.model.model.vision_model, trainer.model.model.connector):
            part.requires_grad_(False)
    return trainer


def prompts_of(folder: Path, workload: workloads.Workload) -> Dataset:
    """The workload's prompts, a hundred times: texts, or where pictures stand before them messages, as TRL wants."""
    texts = [workloads.text(prompt) for prompt in workload.prompts] * 100
    pictures = [str(path) for path in workloads.pictures(folder)]
    if not pictures:
        return Dataset.from_dict({"prompt": texts})
    messages = [[{"role": "user", "content": text}] for text in texts[: len(pictures)]]
    return Dataset.from_dict({"prompt": messages, "image": pictures}).cast_column("image", Image())


def hook(trainer: GRPOTrainer, workload: workloads.Workload, turns: Turns) -> None:
    """Force the lengths, and note when the rollout and the scoring end."""
    usual = trainer.model.generate

    def generate(*arguments: Any, **named: Any) -> Any:
        return usual(*arguments, **named, logits_processor=[EndsAt(workload.row_lengths)])

    trainer.model.generate = generate
    trainer._generate = marked(trainer._generate, turns, "rollout")
    trainer._generate_and_score_completions = marked(trainer._generate_and_score_completions, turns, "score")


def marked(function: Callable[..., Any], turns: Turns, part: str) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        turns.mark(part)
        return result

    return run


def main() -> None:
    turns, folder = Turns(), Path(sys.argv[1])
    settings = {**DEFAULTS, **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")}
    torch.set_num_threads(settings["threads"])
    workload = workloads.read(folder)
    with tempfile.TemporaryDirectory() as out:
        trainer = trainer_of(folder, workload, settings, out, turns)
        hook(trainer, workload, turns)
        versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        mixed = trainer.accelerator.mixed_precision
        turns.ready(**versions, settings={**settings, "mixed_precision": mixed, "loss_type": trainer.args.loss_type})
        trainer.train()


if __name__ == "__main__":
    main()
