"""RL4LMs' prediction files: one for each evaluation, with every answer and its metrics.

A converted recipe has `logs: {predictions: "lmgym.compat.rl4lms.predictions:write"}`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmgym.compat.rl4lms.data_pool import SPLITS
from lmgym.logs.formatting import json_text
from lmgym.training.checkpoints.checkpoint import write_text
from lmgym.types import Episode


def write(folder: Path, version: int, split: str, episodes: Sequence[Episode]) -> None:
    """Write an evaluation's answers to epoch_VERSION_SPLIT_split_predictions.json in the run folder, a list of records.

    A repeated evaluation replaces the file. `version` counts the policy's updates.

    Example: write(Path("runs/imdb"), 20, "validation", episodes)     # epoch_20_val_split_predictions.json"""
    name = SPLITS.get(split, split)
    records = [_record(episode, name) for episode in episodes]
    write_text(folder / f"epoch_{version}_{name}_split_predictions.json", json_text(records))


def _record(episode: Episode, split: str) -> dict[str, Any]:
    """An answer with one key for each metric.

    Example: {"split_name": "val", "sample_id": "imdb/validation/7", "prompt_text": "A film", "generated_text": " to
    see", "ref_text": "<START-1> of note<END-1>", "meteor": 0.1, "reward": 0.1}"""
    prompt = episode.example.prompt
    references = enumerate(episode.example.references, start=1)
    return {
        "split_name": split,
        "sample_id": episode.example.id,
        "prompt_text": prompt if isinstance(prompt, str) else prompt[-1]["content"],
        "generated_text": episode.text,
        "ref_text": "".join(f"<START-{number}>{text}<END-{number}>" for number, text in references),
        **episode.reward_components,
        "reward": episode.score if episode.judged else None,
    }
