"""TRL's GRPOTrainer on the task of benchmarks/learning.py, one step per line of stdin (its loop is held as in
trl_grpo.py).

python -m benchmarks.contenders.learning_trl FOLDER
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.contenders.learning_task import REWARDS, Settings, read, saved
from benchmarks.contenders.turns import Turns


class Held(TrainerCallback):
    """Stops TRL's loop before each optimizer step until the driver asks for one; models are saved while it waits."""

    def __init__(self, turns: Turns, folder: Path, settings: Settings) -> None:
        self.turns, self.folder, self.settings = turns, folder, settings

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step:
            self.answer(state.global_step, named["model"])
        if not self.turns.wait():
            raise SystemExit  # the driver has hung up

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.answer(state.global_step, named["model"])

    def answer(self, step: int, model: Any) -> None:
        self.turns.mark("step")
        if step % self.settings.every == 0:
            model.save_pretrained(saved(self.folder, "trl", step))
            AutoTokenizer.from_pretrained(self.folder / "model").save_pretrained(saved(self.folder, "trl", step))
        self.turns.answer()


def trainer_of(folder: Path, out: str, turns: Turns) -> GRPOTrainer:
    """The trainer with lmgym's loss (averaged over the tokens of the whole batch, advantages not divided by the group's
    deviation, clipped at 0.8 and 1.28, no reference model), optimizer and prompts. Loop, sampling and scoring are its
    own."""
    prompts, given = read(folder)
    rows = given.prompts * given.group
    config = GRPOConfig(
        output_dir=out,
        use_cpu=True,
        bf16=given.compute == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_generations=given.group,
        max_completion_length=given.new_tokens,
        loss_type="dapo",
        scale_rewards="none",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        max_steps=given.steps,
        learning_rate=given.learning_rate,
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        warmup_steps=0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        seed=given.seed,
    )

    def correct(completions: list[str], answer: list[str], **others: Any) -> list[float]:
        return [REWARDS[given.reward](text, right) for text, right in zip(completions, answer, strict=True)]

    return GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=correct,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        callbacks=[Held(turns, folder, given)],
    )


def main() -> None:
    turns, folder = Turns(), Path(sys.argv[1])
    torch.set_num_threads(read(folder)[1].threads)
    with tempfile.TemporaryDirectory() as out:
        trainer = trainer_of(folder, out, turns)
        turns.ready(trl=trl.__version__, torch=torch.__version__, transformers=transformers.__version__)
        trainer.train()


if __name__ == "__main__":
    main()
