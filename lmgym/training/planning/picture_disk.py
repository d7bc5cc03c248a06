"""What `lmgym check` says of the pictures that a run will keep: how many, and how much of the disk they take.

A run folder keeps all: logs, the viewer, a replay buffer or an environment that remembers one may ask for any."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from lmgym.config.schema import Config, Stage
from lmgym.training.planning.memory_table import size
from lmgym.training.run import DEFAULT_FOLDER
from lmgym.types import Episode, pictures_of

Stored = dict[str, int]  # the bytes of each picture's file, by the picture's name


def stored_in(folder: Path) -> Stored:
    """The pictures in a store's folder. Example: len(stored_in(current_store().folder))"""
    return {path.stem: path.stat().st_size for path in folder.glob("??/*.png")}


def of_data(stored: Stored) -> str:
    """A sentence on the pictures of the data; empty without any."""
    if not stored:
        return ""
    return f"pictures of the data: {len(stored):,}, {_size(sum(stored.values()))}, which the run folder will hold"


def of_environment(before: Stored, after: Stored, episodes: Sequence[Episode], stage: Stage) -> tuple[str, float]:
    """A sentence on pictures that an environment has drawn in some episodes, empty without any; and the bytes that all
    steps add if others draw as many new ones."""
    asked = {digest for episode in episodes for text in _texts(episode) for _, digest in pictures_of(text)}
    new = {name: bytes for name, bytes in after.items() if name not in before and name not in asked}
    if not new or not episodes:
        return "", 0.0
    answers = stage.prompts_per_step * (stage.algorithm.group_size if stage.source.samples else 1)
    total = sum(new.values()) / len(episodes) * answers * stage.steps
    turns = sum(len(episode.turns) for episode in episodes)
    return (
        f"pictures of the environment: {len(new)} different ones in {turns} turns, {_size(sum(new.values()))}; if it "
        f"goes on like this, {_size(total)} in {stage.steps} steps, which stay in the run folder"
    ), total


def too_much(config: Config, needed: float) -> str:
    """A sentence if the disk of the run folder has no room for so many bytes; else empty."""
    place = Path(config.out or DEFAULT_FOLDER).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return ""
    if needed <= free:
        return ""
    return (
        f"the run's pictures may take {_size(needed)}, and the disk of {os.fspath(place)} has "
        f"{_size(free)} left; make them smaller (env.picture_pixels), or take fewer steps"
    )


def _texts(episode: Episode) -> list[str]:
    prompt = episode.example.prompt
    return [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]


def _size(count: float) -> str:
    return size(count) if count >= 2**20 else f"{count / 2**10:.0f} KiB"
