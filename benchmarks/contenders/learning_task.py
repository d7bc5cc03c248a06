"""What both contenders of benchmarks/learning.py are given, and the rewards that both use. Imports neither library.

The folder holds `model/` (the start, with its tokenizer), `prompts.jsonl` (in the order of the steps, one line per
prompt, as the chat template wrote it if there is one: {"prompt": "...", "answer": "12"}) and `settings.json`.
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

NUMBER = re.compile(r"-?[0-9]+")


@dataclass(frozen=True)
class Settings:
    """The hyperparameters that both use. `every`: steps between two models that are saved; `rounding`: of the weights
    that lmgym computes with in bf16 (TRL's autocast rounds to nearest).
    Example: Settings(seed=0, steps=100, every=10)"""

    seed: int
    steps: int
    every: int
    prompts: int = 32
    group: int = 8
    new_tokens: int = 12
    learning_rate: float = 1e-4
    threads: int = 2
    reward: str = "number"
    compute: str = "float32"
    rounding: str = "nearest"


def write(folder: Path, model: Path, prompts: Sequence[tuple[str, str]], settings: Settings) -> None:
    """Save what the contenders read; `prompts` are pairs of a prompt and its answer."""
    shutil.copytree(model, folder / "model", copy_function=os.symlink)  # some hundred MB
    lines = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in prompts]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "settings.json").write_text(json.dumps(asdict(settings)), encoding="utf-8")


def read(folder: Path) -> tuple[list[dict[str, str]], Settings]:
    """The prompts and the settings that `write` has saved."""
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], Settings(**json.loads((folder / "settings.json").read_text()))


def number(text: str, answer: str) -> float:
    """1 if the last number of the text is the answer.

    Example:
        >>> number(" 7+5=12", "12"), number(" 7+5=13", "12")
        (1.0, 0.0)
    """
    found = NUMBER.findall(text)
    return float(bool(found) and int(found[-1]) == int(answer))


def richness(text: str, answer: str) -> float:
    """The share of different words, less half of what is missing of 24 words.

    Example:
        >>> richness("a rose is a rose", "")
        0.20416666666666666
    """
    words = text.lower().split()
    return len({*words}) / max(len(words), 1) - 0.5 * max(0, (24 - len(words)) / 24)


REWARDS = {"number": number, "richness": richness}


def saved(folder: Path, name: str, step: int) -> Path:
    """Where a contender saves its model after a step."""
    return folder / name / f"step-{step:04d}"
