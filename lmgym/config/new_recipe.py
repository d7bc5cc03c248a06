"""The five questions of `lmgym new`, and the recipe that their answers make. No torch."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lmgym.config.yaml import write_yaml
from lmgym.core.cores import cores
from lmgym.core.errors import LmgymError, reason, shortened
from lmgym.core.files import nearby, read_text, replacing
from lmgym.core.registry import suggest
from lmgym.core.visible import visible
from lmgym.rewards.building import build_rewards
from lmgym.tasks.rows.cells import column
from lmgym.tasks.rows.find import Source
from lmgym.tasks.rows.load import rows_of_split

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
PROMPTS = ("prompt", "question", "problem", "input", "instruction", "text", "query", "messages")
ANSWERS = ("answer", "references", "reference", "solution", "target", "output", "label", "response", "completion")
SHOWN = 60  # characters of a cell
LOOKED_AT = 200  # rows, for lengths and numbers
GPU, CORE = 2e13, 1.5e10  # operations a second: a guess for a machine that nothing is known of
NUMBER = re.compile(r"(####)?\s*-?[\d.,]+\s*", re.ASCII)


@dataclass
class Draft:
    """The answers so far.

    Example: Draft(model="builtin:tiny", data="sums.jsonl", prompt="question", answer="answer").tree()["task"]["path"]
    """

    model: str = MODEL
    data: str = ""
    rows: Sequence[Mapping[str, Any]] = ()  # the first ones
    prompt: str = "prompt"
    answer: str | None = None
    reward: str = "final_answer"
    minutes: float = 30.0

    def values(self, name: str) -> list[str]:
        """A column of the first rows, as text; what is no text or number is left out."""
        found = (column(row, name, self.data) for row in self.rows)
        return [str(value) for value in found if isinstance(value, str | int | float)]

    def tree(self) -> dict[str, Any]:
        """The recipe."""
        small = self.model.startswith("builtin:")
        answer = max((len(text) for text in self.values(self.answer)), default=0) if self.answer else 0
        new_tokens = min(max(32 if small else 256, answer + 16), 1024)
        prompts = group = 8 if self.step_seconds(64, new_tokens) < 60 else 4
        steps = round(self.minutes * 60 * 0.9 / self.step_seconds(prompts * group, new_tokens))
        steps = min(max(steps, 1), 10_000)
        task = {"name": "data", "path": self.data, "prompt": self.prompt, "references": self.answer, "test": 0.2}
        return {
            "task": {**task, "prompts": "chat"} if chats(self.model) else task,
            "rewards": {self.reward: 1.0},
            "policy": {"model": self.model},
            "algorithm": {"name": "grpo", "group_size": group},
            "sampling": {"max_new_tokens": new_tokens},
            "optimizer": {"learning_rate": 1e-3 if small else 1e-5},
            "evaluation": {"examples": 64, "every": max(steps // 5, 1)},
            "prompts_per_step": prompts,
            "steps": steps,
        }

    def step_seconds(self, answers: int, new_tokens: int) -> float:
        """A guess from the model's size: sampling, scoring and training are 10 operations a parameter and token."""
        prompt = max((len(text) for text in self.values(self.prompt)), default=100) / 4
        speed = GPU if os.path.exists("/dev/nvidia0") else CORE * cores()
        return max(10 * parameters_of(self.model) * answers * (prompt + new_tokens / 2) / speed, 0.5)

    def write(self, path: Path) -> None:
        """Write the recipe, whole or not at all."""
        head = (
            f"# steps is a guess for {self.minutes:g} minutes from the model's size; `lmgym check` measures a step.\n"
            "# Every key: docs/recipes.md. `lmgym list reward` names other rewards.\n"
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write((head + write_yaml(self.tree())).encode())
        except OSError as error:
            raise LmgymError(f"{path} cannot be written: {error.strerror or reason(error)}") from error


@dataclass(frozen=True)
class Question:
    """What is asked, what an empty answer means (None: it has to be answered), and how an answer is taken.

    Example: QUESTIONS["minutes"].take(draft, "20")"""

    text: Callable[[Draft], str]
    default: Callable[[Draft], str | None]
    take: Callable[[Draft, str], None]


def parameters_of(model: str) -> float:
    """A guess of how many parameters a model has: from its files, or from its name.

    Example: parameters_of("Qwen/Qwen2.5-0.5B-Instruct") -> 5e8"""
    path = Path(model)
    if model.startswith("builtin:"):
        return 1e6
    if path.is_dir() and (files := list(path.glob("*.safetensors"))):
        return sum(file.stat().st_size for file in files) / 2
    sizes = re.findall(r"(?i)(?<![a-z\d.])(\d+(?:\.\d+)?)(b|m)(?![a-z\d])", path.name)
    return float(sizes[0][0]) * (1e9 if sizes[0][1] in "bB" else 1e6) if sizes else 5e8


def chats(model: str) -> bool:
    """Whether a model is likely to have a chat template: by its files, or by its name.

    Example: chats("Qwen/Qwen2.5-0.5B-Instruct") -> True"""
    folder = Path(model)
    if folder.is_dir():
        settings = folder / "tokenizer_config.json"
        inside = settings.is_file() and '"chat_template"' in read_text(settings)
        return inside or (folder / "chat_template.jinja").is_file()
    return model == "smollm2" or bool(re.search(r"(?i)instruct|chat|-it\b", model))


def _take_model(draft: Draft, answer: str) -> None:
    from lmgym.config.schema_keys import recipe_keys

    path = Path(answer).expanduser()
    if answer.startswith("builtin:"):
        known = [*re.findall(r"builtin:\w+", recipe_keys({})["policy.model"]["description"]), "builtin:sums"]
        if answer not in known:
            raise LmgymError(f"there is no model {answer}; {suggest(answer, known)}")
    elif path.is_dir() and not (path / "config.json").is_file():
        raise LmgymError(f"{answer} is a folder without a config.json, so it holds no model")
    elif not path.exists() and answer != "smollm2" and not re.fullmatch(r"[\w.-]+/[\w.-]+", answer):
        raise LmgymError(f"there is no model {answer}{nearby(path)}; name a folder, or a Hub id such as {MODEL}")
    draft.model = answer


def _take_data(draft: Draft, answer: str) -> None:
    rows = [row for _, row in islice(rows_of_split(Source("data", answer, named=False), "train"), LOOKED_AT)]
    if len(rows) < 2:
        raise LmgymError(f"{answer} has {len(rows)} rows; training and evaluation need at least one each")
    draft.data, draft.rows = answer, rows


def _shown_columns(draft: Draft) -> str:
    first = draft.rows[0]
    cells = [f"    {visible(str(name))}: {visible(shortened(str(value), SHOWN))}" for name, value in first.items()]
    return "\n".join(["3/5 Which column is the prompt, and which the answer: question,answer? The first row:", *cells])


def _guessed_columns(draft: Draft) -> str | None:
    found = [next((name for name in names if name in draft.rows[0]), None) for names in (PROMPTS, ANSWERS)]
    return ",".join(name for name in found if name) if found[0] else None


def _take_columns(draft: Draft, answer: str) -> None:
    names = [part.strip() for part in answer.split(",")]
    if len(names) > 2 or not all(names):
        raise LmgymError("name the prompt's column, and behind a comma the answer's: question,answer")
    for name in names:
        for row in draft.rows:
            column(row, name, draft.data)  # says which there are
    draft.prompt, draft.answer = names[0], names[1] if len(names) == 2 else None


def _guessed_reward(draft: Draft) -> str:
    if draft.answer is None:
        return "length"
    return "final_answer" if all(NUMBER.search(text) for text in draft.values(draft.answer)) else "exact_match"


def _take_reward(draft: Draft, answer: str) -> None:
    build_rewards({answer: 1.0})
    draft.reward = answer


def _take_minutes(draft: Draft, answer: str) -> None:
    try:
        draft.minutes = float(answer)
    except ValueError:
        draft.minutes = math.nan
    if not 0 < draft.minutes < math.inf:
        raise LmgymError(f"{answer} is no number of minutes; write one above 0, such as 30")


QUESTIONS = {
    "model": Question(lambda draft: "1/5 Which model? A Hub id or a folder", lambda draft: MODEL, _take_model),
    "data": Question(
        lambda draft: "2/5 Which file has the data (jsonl, json, csv, tsv, parquet)?", lambda draft: None, _take_data
    ),
    "columns": Question(_shown_columns, _guessed_columns, _take_columns),
    "reward": Question(
        lambda draft: "4/5 Which reward? A name of `lmgym list reward`, or module:function of your own",
        _guessed_reward,
        _take_reward,
    ),
    "minutes": Question(lambda draft: "5/5 How many minutes may it train?", lambda draft: "30", _take_minutes),
}
