"""`episodes`: numbered examples without content, for environments that generate their own problems."""

from lmgym.core.constraints import ExampleCount
from lmgym.core.registry import register
from lmgym.tasks.base import check_split
from lmgym.types import Example


@register("task", "episodes")
def episodes(split: str, count: ExampleCount = 16_384) -> list[Example]:
    """`count` examples with nothing but a number. The environment draws the episode from its seed, which is new in each
    training step and the same in all evaluations.

    Example:
        >>> load_task("episodes", "test", count=2)[1].id
        'episodes/test/1'
    """
    check_split("episodes", split)
    return [Example(id=f"episodes/{split}/{number}", prompt=f"{split} episode {number}") for number in range(count)]
