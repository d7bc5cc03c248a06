"""Synthetic tasks: prompts without references, for rewards such as `increasing_numbers` and `dates`, and `episodes`
for environments that generate their own problems."""

from collections.abc import Sequence

from lmgym.core.constraints import ExampleCount
from lmgym.core.registry import register
from lmgym.tasks.base import check_split
from lmgym.tasks.sources import check_sizes
from lmgym.types import Example

LARGEST = 49  # the largest prompt number; the answer can continue with larger numbers of two digits
REMAINDERS = {"train": (0, 1, 2), "validation": (3,), "test": (4,)}  # a number modulo 5 decides its split

# Beginnings of sentences that continue with a date.
OPENINGS = {
    "train": (
        "The bridge was opened on",
        "Her passport was issued on",
        "Please send the form back by",
        "The two companies merged on",
        "The ship left the harbour on",
        "Our next meeting will be held on",
        "The first frost came on",
        "The old theatre burned down on",
        "He signed the lease on",
        "The museum will close its doors on",
        "The comet was last seen on",
        "The letter in the drawer is dated",
        "Tickets go on sale on",
        "The twins were born on",
        "The new timetable takes effect on",
    ),
    "validation": ("The treaty was signed on", "My library card expires on", "The orchestra last played here on"),
    "test": (
        "The railway line was finished on",
        "The warranty of this radio ends on",
        "They moved into the farmhouse on",
        "The election was held on",
        "The parcel arrived on",
    ),
}


@register("task", "increasing_numbers")
def increasing_numbers(split: str, size: ExampleCount = 100, prompt: str | None = None) -> list[Example]:
    """`size` prompts to continue with increasing numbers. Each prompt is a number from 0 to 49 ("7"); no references.

    There are 30 numbers for training, 10 for validation and 10 for test; none is in two splits. They come in increasing
    order and repeat until there are `size`. `prompt` replaces all of them (RL4LMs: 100 times "<|endoftext|>"). Then the
    splits differ in their ids only, which does no harm since there is no answer to leak. The reward sees the answer
    only, so the answer need not continue from the prompt's number.

    Source: Ramamurthy et al. 2022 (RL4LMs), synthetic_generate_increasing_numbers; the numbers as prompts are ours.

    Example:
        >>> [example.prompt for example in load_task("increasing_numbers", "test", size=3)]
        ['4', '9', '14']
    """
    check_split("increasing_numbers", split)
    numbers = [str(number) for number in range(LARGEST + 1) if number % 5 in REMAINDERS[split]]
    return _repeated("increasing_numbers", split, numbers, size, prompt)


@register("task", "sentences_with_dates")
def sentences_with_dates(split: str, size: ExampleCount = 100, prompt: str | None = None) -> list[Example]:
    """`size` beginnings of sentences that continue with a date; no references.

    There are 15 for training, 3 for validation and 5 for test; they repeat until there are `size`. `prompt` replaces
    all of them, in every split. Source: RL4LMs, synthetic_generate_dates; the sentences are ours.

    Example:
        >>> load_task("sentences_with_dates", "test")[0].prompt
        'The railway line was finished on'
    """
    check_split("sentences_with_dates", split)
    return _repeated("sentences_with_dates", split, OPENINGS[split], size, prompt)


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


@register("task", "dummy")
def dummy(split: str, prompt: str = "<|endoftext|>", size: ExampleCount = 100) -> list[Example]:
    """`size` times the same prompt, in every split; no references. For rewards that use the answer only.

    `check_task` fails, since the splits have the same prompt. That does no harm: there is no answer to leak.
    Source: RL4LMs, `dummy_pool`, whose recipes set the prompt and leave n_samples at 100.

    Example:
        >>> load_task("dummy", "test", size=2)[1]
        Example(id='dummy/test/1', prompt='<|endoftext|>', references=(), meta={})
    """
    check_split("dummy", split)
    return _repeated("dummy", split, [prompt], size, None)


def _repeated(name: str, split: str, prompts: Sequence[str], size: int, prompt: str | None) -> list[Example]:
    check_sizes(size=size)
    prompts = prompts if prompt is None else [prompt]
    return [Example(id=f"{name}/{split}/{index}", prompt=prompts[index % len(prompts)]) for index in range(size)]
