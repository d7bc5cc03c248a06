"""How tasks make their splits from what the data has, and the references of a row."""

from collections import Counter
from collections.abc import Callable, Iterable

from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.tasks.base import SPLITS, MissingSplit, check_split, hash_fraction
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.find import Source
from lmgym.tasks.rows.load import rows_of_split
from lmgym.tasks.rows.unfit import fitting
from lmgym.types import Example, told_apart


def split_to_read(task: str, split: str, validation: float) -> str:
    """The split of the data that holds a task's split, where the share `validation` of train is held out. Raises
    MissingSplit if that share is 0 and the split validation.

    Example: split_to_read("gsm8k", "validation", 0.1) -> 'train'"""
    check_split(task, split)
    if not 0 <= validation < 1:
        raise LmgymError(f"task.validation must be a share of train, at least 0 and below 1, not {validation}")
    if split == "validation" and not validation:
        raise MissingSplit(f"task '{task}' has no split '{split}': set task.validation above 0 to take it from train")
    return "test" if split == "test" else "train"


def check_sizes(**sizes: int | None) -> None:
    """Raise LmgymError for a key of the recipe that is below 1; None is no limit."""
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise LmgymError(f"task.{name} must be at least 1, not {value}")


def disjoint(task: str, split: str, examples_of: Callable[[str], Iterable[Example]]) -> list[Example]:
    """The examples of a split, without prompts of later splits: prompts of test are removed from validation, and those
    of both from train. `examples_of` makes the examples of one split; it raises MissingSplit if there is no such split.

    Example:
        >>> disjoint("riddles", "train", {"train": [Example("a", "1?"), Example("b", "2?")], "validation": [], "test":
        ...     [Example("c", "2?")]}.__getitem__)
        [Example(id='a', prompt='1?', references=(), meta={})]
    """
    check_split(task, split)
    examples = list(examples_of(split))
    held_out: set[str] = set()
    for other in SPLITS[SPLITS.index(split) + 1 :]:
        try:
            held_out |= {told_apart(example.prompt) for example in examples_of(other)}
        except MissingSplit:
            continue
    return [example for example in examples if told_apart(example.prompt) not in held_out]


def check_shares(validation: float, test: float) -> None:
    """Raise LmgymError for shares of train that leave nothing to train on."""
    if validation < 0 or test < 0 or validation + test >= 1:
        raise LmgymError(
            f"task.validation ({validation}) and task.test ({test}) must be shares that leave some to train on"
        )


def shared_out(
    task: str, split: str, examples_of: Callable[[str], list[Example]], validation: float, test: float
) -> list[Example]:
    """The examples of a split of data that may have one split only: the shares `validation` and `test` of the training
    prompts, by a hash, are the splits that it does not have itself. Prompts of the others are removed from train.
    `examples_of` makes the examples of one split; it raises MissingSplit if there is no such split.

    Example: of data with train and test, a tenth of train
        >>> shared_out("preferences", "validation", examples_of, validation=0.1, test=0.1)
    """
    check_split(task, split)
    check_shares(validation, test)
    # The splits that the data has itself; the others are taken out of train.
    own = {part: found for part in SPLITS if part != "train" and (found := _or_none(examples_of, part)) is not None}
    if split in own:
        return own[split]
    shares = {part: 0.0 if part in own else share for part, share in (("test", test), ("validation", validation))}
    if split != "train" and not shares[split]:
        raise MissingSplit(f"task '{task}' has no split '{split}': set task.{split} above 0")
    held_out = {told_apart(example.prompt) for examples in own.values() for example in examples}

    def part_of(example: Example) -> str:
        fraction = hash_fraction(told_apart(example.prompt))
        if fraction < shares["test"]:
            return "test"
        return "validation" if fraction < shares["test"] + shares["validation"] else "train"

    train = examples_of("train")
    counts = Counter(map(part_of, train))
    if train and not counts[split]:
        rows = ", ".join(f"{part} {counts[part]:,}" for part in SPLITS)
        remedy = (
            f"raise task.{split}, or give the split data of its own"
            if split != "train"
            else "lower task.test or task.validation"
        )
        raise LmgymError(
            f"task '{task}' has no examples in split '{split}': a hash of the prompts shares {len(train):,} rows out "
            f"(rows: {rows}); {remedy}"
        )
    return [one for one in train if part_of(one) == split and told_apart(one.prompt) not in held_out]


def of_own_data(
    source: Source, split: str, make: Callable[[Row, str], Example], validation: float, test: float
) -> list[Example]:
    """`shared_out` for a user's own rows, each of which `make` makes an example of: (row, the example's id). Raises
    LmgymError if the data does not have a split that the recipe names in `splits`."""
    task = source.task
    check_split(task, split)
    check_shares(validation, test)
    if source.path is None and not source.hub_id:
        raise LmgymError(f"task '{task}' needs task.path (a file or a folder) or task.hub_id")

    def examples_of(part: str) -> list[Example]:
        try:
            rows = rows_of_split(source, part)
        except MissingSplit as error:
            if part in source.splits:  # what the recipe names must be there
                raise LmgymError(f"task.splits.{part}: {error}") from error
            raise
        return list(fitting(rows, lambda number, row: make(row, f"{task}/{part}/{number}")))

    for name in source.splits:
        if name not in SPLITS:
            raise LmgymError(f"task.splits names '{name}'; {suggest(name, SPLITS)}")
    if "{split}" in str(source.path):  # it says where each split is, so none is taken out of train
        return disjoint(task, split, examples_of)
    return shared_out(task, split, examples_of, validation, test)


def _or_none(examples_of: Callable[[str], list[Example]], part: str) -> list[Example] | None:
    """The examples of a split; None if the data has no such split."""
    try:
        return examples_of(part)
    except MissingSplit:
        return None


def texts_of(texts: Iterable[object], where: str, name: str) -> tuple[str, ...]:
    """Check texts that are to be references. Raises LmgymError if there is none, or if one is empty or not a text."""
    references = tuple(texts)
    if not references:
        raise LmgymError(f"{where}: column '{name}' holds no reference")
    for text in references:
        if not isinstance(text, str) or not text.strip():
            raise LmgymError(f"{where}: a reference in column '{name}' must be a text, got {text!r}")
    return tuple(str(text) for text in references)
