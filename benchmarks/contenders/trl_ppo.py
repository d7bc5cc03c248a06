"""TRL 1.12's PPOTrainer on a workload, one step per line of stdin.

TRL's loop is its own and has no step to call, so it is held at its data loader: a batch is handed out when the driver
asks for a step, and the step is over when the loop comes back for the next batch. Nothing in the loop is left out.

The policy and the value model are the workload's model; TRL has no shared trunk. The reward model is never run: the
reward is the workload's Python function, put in at TRL's own `get_reward`.

    python -m benchmarks.contenders.trl_ppo FOLDER '{"precision": "fp32", "epochs": 4}'
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from benchmarks import workloads
from benchmarks.contenders.turns import Turns

DEFAULTS = {
    "precision": "fp32",  # fp32; autocast (bf16=True, TRL's default); bf16 (weights too: no fp32 masters)
    "batch": 64,  # answers per forward and backward pass; the rest is gradient accumulation
    "rollout_batch": 64,  # local_rollout_forward_batch_size
    "epochs": 4,
    "threads": 2,
}


class Held:
    """In the place of TRL's data loader: the same batch for every step, handed out when the driver asks."""

    def __init__(self, turns: Turns, batch: dict[str, torch.Tensor]) -> None:
        self.turns, self.batch = turns, batch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.turns.wait():
            yield self.batch
            self.turns.mark("update")
            self.turns.answer()
        raise SystemExit  # the driver has hung up; TRL's loop would go on for ever


def trainer_of(folder: Path, workload: workloads.Workload, settings: dict[str, Any], out: str) -> PPOTrainer:
    """The trainer with the models in the precision asked for, checkpointing off, fixed lengths and a constant rate."""
    dtype = torch.bfloat16 if settings["precision"] == "bf16" else torch.float32
    model = str(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = workload.rows
    batch = min(settings["batch"], len(rows))
    assert len(rows) % batch == 0, f"{len(rows)} answers do not come in batches of {batch}"

    def language_model() -> Any:
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype)

    def judge() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=dtype)

    config = PPOConfig(
        output_dir=out,
        use_cpu=True,
        bf16=settings["precision"] == "autocast",
        gradient_checkpointing=False,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=len(rows) // batch,
        num_mini_batches=1,
        num_ppo_epochs=settings["epochs"],
        total_episodes=1_000_000 * len(rows),
        response_length=workload.new_tokens,
        stop_token=None,
        local_rollout_forward_batch_size=settings["rollout_batch"],
        num_sample_generations=0,
        temperature=1.0,
        kl_coef=0.05,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=workload.seed,
    )
    data = Dataset.from_list([{"input_ids": row} for row in rows])
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=language_model(),
        ref_model=language_model(),
        reward_model=judge(),
        value_model=judge(),
        train_dataset=data,
        eval_dataset=data,
    )


def hook(trainer: PPOTrainer, turns: Turns) -> None:
    """Put the Python reward in, and note when the rollout and the scoring end."""
    usual_reward, usual_rollout, usual_forward = (
        ppo_trainer.get_reward,
        ppo_trainer.batch_generation,
        ppo_trainer.forward,
    )
    updating = False

    def get_reward(model: Any, ids: torch.Tensor, pad_id: int, context: int) -> Any:
        if model is not trainer.reward_model:
            return usual_reward(model, ids, pad_id, context)
        return None, torch.tensor([workloads.reward(row) for row in ids[:, context:].tolist()]), None

    def rollout(*arguments: Any) -> Any:
        nonlocal updating
        result, updating = usual_rollout(*arguments), False
        turns.mark("rollout")
        return result

    def forward(*arguments: Any) -> Any:
        nonlocal updating
        if torch.is_grad_enabled() and not updating:
            turns.mark("score")
            updating = True
        return usual_forward(*arguments)

    ppo_trainer.get_reward, ppo_trainer.batch_generation, ppo_trainer.forward = get_reward, rollout, forward


def main() -> None:
    turns, folder = Turns(), Path(sys.argv[1])
    settings = {**DEFAULTS, **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")}
    torch.set_num_threads(settings["threads"])
    workload = workloads.read(folder)
    with tempfile.TemporaryDirectory() as out:
        trainer = trainer_of(folder, workload, settings, out)
        hook(trainer, turns)
        batch = trainer.data_collator([{"input_ids": row} for row in workload.rows])
        trainer.dataloader = Held(turns, dict(batch))
        versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        mixed = trainer.accelerator.mixed_precision
        turns.ready(**versions, settings={**settings, "mixed_precision": mixed})
        trainer.train()


if __name__ == "__main__":
    main()
