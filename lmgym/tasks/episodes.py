"""Numbered episodes, for environments that bring their own problems and need no data."""

from lmgym.core.registry import register
from lmgym.tasks.base import check_split
from lmgym.types import Example


@register("task", "episodes")
def episodes(split: str, count: int = 16_384) -> list[Example]:
    """`count` examples that say nothing but their number. What an episode is like, its environment draws from its
    seed, which is new in each step of training and the same in all evaluations.

    Example:
        >>> load_task("episodes", "test", count=2)[1].id
        'episodes/test/1'
    """
    check_split("episodes", split)
    return [Example(id=f"episodes/{split}/{number}", prompt=f"{split} episode {number}") for number in range(count)]
