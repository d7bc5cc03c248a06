"""Trackers that get a run besides the run folder's own files: TensorBoard, Weights & Biases, Trackio, or your own.

docs/trackers.md says what each of them shows."""

import importlib
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lmgym.core import registry
from lmgym.core.availability import NEEDS
from lmgym.core.errors import LmgymError, describe
from lmgym.core.files import replacing
from lmgym.core.registry import register

Row = dict[str, Any]  # an answer: prompt, answer, reference, score, and the rewards by name


class Sink:
    """A receiver of what a run logs. One of your own extends this class and overrides what it wants to have.

    Steps are counted through all stages. If a method raises, the sink gets nothing more, and the run goes on with a
    warning; if the constructor raises, there is no run. What a resumed run repeats is not sent again.

    Example:
        >>> @register("sink", "lines")
        ... class Lines(Sink):
        ...     def write(self, scalars, step):
        ...         with open(self.folder / "lines.txt", "a") as file:
        ...             file.write(f"{step} {scalars}\\n")
    """

    def __init__(self, folder: Path, recipe: Mapping[str, Any], start: int):
        """`folder` is the run folder, `recipe` the tree of its recipe.yaml, `start` the number of steps that the run
        has taken when it is opened (0 unless it is resumed)."""
        self.folder, self.recipe, self.start = folder, recipe, start

    def write(self, scalars: dict[str, float], step: int) -> None:
        """The numbers of one record of metrics.jsonl, as {"train/reward": 0.5} or {"evaluation/test/reward": 0.5}."""

    def answers(self, name: str, rows: Sequence[Row], step: int) -> None:
        """The tracked answers of a step (`name` is "train") or of an evaluation ("evaluation/test")."""

    def finish(self, results: dict[str, float], plot: Path, step: int) -> None:
        """The run has reached its end: the table before and after, as {"after/reward": 0.5}, and plot.png."""

    def close(self) -> None:
        """The run ends or stops."""


@register("sink", "tensorboard")
class Tensorboard(Sink):
    """TensorBoard files in tensorboard/ of the run folder: scalars, texts (recipe, answers, summary) and the plot."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any], start: int):
        super().__init__(folder, recipe, start)
        self._module = importlib.import_module("torch.utils.tensorboard")
        self._opened: Any = None

    @property
    def _events(self) -> Any:
        """The writer of a new file of events, which is made when there is something to write."""
        if self._opened is None:
            self._opened = self._module.SummaryWriter(str(self.folder / "tensorboard"))
            text = yaml.safe_dump(dict(self.recipe), sort_keys=False, allow_unicode=True)
            self._opened.add_text("recipe", code_block(text), self.start)
        return self._opened

    def write(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def answers(self, name: str, rows: Sequence[Row], step: int) -> None:
        blocks = [f"**{key}**\n\n{code_block(str(value))}" for row in rows for key, value in row.items()]
        self._events.add_text(f"answers/{name}", "\n\n".join(blocks), step)
        self._events.flush()

    def finish(self, results: dict[str, float], plot: Path, step: int) -> None:
        from matplotlib.image import imread

        lines = "\n".join(f"{name}: {value:.6g}" for name, value in results.items())
        self._events.add_text("summary", code_block(lines), step)
        self._events.add_image("plot", imread(plot), step, dataformats="HWC")

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


@register("sink", "wandb")
class Wandb(Sink):
    """A Weights & Biases run of project lmgym (or WANDB_PROJECT); a resumed run goes on in the same one. Answers are
    tables, the results are its summary."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any], start: int):
        super().__init__(folder, recipe, start)
        self._wandb = importlib.import_module("wandb")
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "lmgym"),
            name=folder.name,
            id=identity(folder / "wandb_id.txt", ""),
            dir=str(folder),
            config=by_stage(recipe),
            allow_val_change=True,  # a resumed run may have more steps, for example
            resume="allow",
        )
        # an x axis of ours: wandb's own counts calls, and may not go back
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, scalars: dict[str, float], step: int) -> None:
        self._run.log({**scalars, "step": step})

    def answers(self, name: str, rows: Sequence[Row], step: int) -> None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = self._wandb.Table(columns=columns, data=[[row.get(key) for key in columns] for row in rows])
        self._run.log({f"answers/{name}": table, "step": step})

    def finish(self, results: dict[str, float], plot: Path, step: int) -> None:
        self._run.log({"plot": self._wandb.Image(str(plot)), "step": step})
        self._run.summary.update(results)

    def close(self) -> None:
        self._run.finish()


@register("sink", "trackio")
class Trackio(Sink):
    """A Trackio run of project lmgym (or TRACKIO_PROJECT), on this machine unless TRACKIO_SPACE_ID names a Space; a
    resumed run goes on in the same one. Answers are tables. `trackio show` opens the pages."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any], start: int):
        super().__init__(folder, recipe, start)
        self._trackio = importlib.import_module("trackio")
        self._run = self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "lmgym"),
            name=identity(folder / "trackio_name.txt", f"{folder.name}-"),  # it knows runs by name: many are seed-0
            config=by_stage(recipe),
            resume="allow",
            embed=False,
        )

    def write(self, scalars: dict[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def answers(self, name: str, rows: Sequence[Row], step: int) -> None:
        self._run.log({f"answers/{name}": self._trackio.Table(data=list(rows))}, step=step)

    def finish(self, results: dict[str, float], plot: Path, step: int) -> None:
        self._run.log({**results, "plot": self._trackio.Image(str(plot))}, step=step)

    def close(self) -> None:
        self._run.finish()


def open_sink(name: str, folder: Path, recipe: Mapping[str, Any], start: int) -> Sink:
    """The sink of this name for a run folder. Raises LmgymError if it is unknown, not installed or does not start."""
    make = registry.get("sink", name)
    try:
        sink: Sink = make(folder, recipe, start)
    except ModuleNotFoundError as error:
        lacking = f"sink '{name}' is not installed (no module '{error.name}')"
        entry = registry.BUILTIN["sink"].get(name)
        remedy = NEEDS[entry.needs].remedy if entry else f"pip install {error.name}"
        raise LmgymError(f"{lacking}; {remedy}") from error
    except Exception as error:  # no login, no network ...: refuse before any training
        raise LmgymError(f"sink '{name}' did not start ({describe(error)}); mend it or leave it out") from error
    return sink


def identity(path: Path, prefix: str) -> str:
    """What a tracker knows this run folder by: made once and kept in a file, so that a resumed run goes on in the same
    run, and another folder of the same name is another run."""
    if not path.exists() or not path.read_text():  # an older version may have left an empty one
        with replacing(path) as file:
            file.write((prefix + uuid.uuid4().hex[: 8 if prefix else 16]).encode())
    return path.read_text()


def by_stage(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with its stages by name, as overrides name them, so that trackers can compare runs by one key.

    Example:
        >>> by_stage({"seed": 0, "stages": [{"name": "rl", "steps": 5}]})
        {'seed': 0, 'stages': {'rl': {'steps': 5}}}
    """
    stages = {stage["name"]: {k: v for k, v in stage.items() if k != "name"} for stage in recipe.get("stages") or []}
    return {**recipe, **({"stages": stages} if stages else {})}


def code_block(text: str) -> str:
    """The text as Markdown that shows it as it is: no character of it is markup.

    Example:
        >>> code_block("#### 7\\n*no*")
        '    #### 7\\n    *no*'
    """
    return "\n".join("    " + line for line in (text.splitlines() or [""]))


def answer_rows(records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Records of rollouts.jsonl as rows of a table; the turns of a conversation are joined by blank lines."""
    return [
        {
            "prompt": prompt_text(record["prompt"]),
            "answer": "\n\n".join(turn["text"] for turn in record["turns"]),
            "reference": next(iter(record["references"]), ""),
            "score": record["score"],
            **{f"reward/{name}": value for name, value in record["reward_components"].items()},
        }
        for record in records
    ]


def prompt_text(prompt: Any) -> str:
    """A prompt as one text: as it is, or its messages, each under its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
