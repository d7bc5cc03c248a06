"""`arithmetic`: generated small word problems, for tiny models; needs no download."""

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Le

from lmgym.core import seeds
from lmgym.core.constraints import ExampleCount
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.tasks.base import check_split, drawn_split, hash_fraction, prompt_writer
from lmgym.types import Example

T = TypeVar("T")
Problem = tuple[str, ...]  # prompt, split, working, answer, operations
Operation = Literal["add", "subtract", "multiply", "divide"]
SIGNS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
ENDING = "\nAnswer:"  # of every prompt
BLOCK = 2048  # problems drawn at once
PATIENCE = 30_000  # so many draws in a row without a new problem mean that there is no new problem

# fmt: off
NAMES = (
    "Ann", "Ben", "Cal", "Dan", "Eva", "Fay", "Gus", "Ida", "Jon", "Kim", "Leo", "Mia", "Ned", "Pam", "Ray",
    "Sue", "Tim", "Uma", "Vic", "Zoe",
)
THINGS = (
    "pens", "cups", "eggs", "hats", "bags", "jars", "keys", "nuts", "pins", "figs", "maps", "toys", "mugs",
    "bells", "coins", "books", "stars", "shells",
)
# fmt: on
FORMS = {
    "short": (
        "{name} has {start} {things} and {actions}. How many?",
        "{name} has {start} {things} and {actions}. How many now?",
        "{name} owns {start} {things} and {actions}. How many?",
        "With {start} {things}, {name} {actions}. How many?",
    ),
    "story": (
        "On Monday {name} counts {start} {things} at home. Then {name} {actions}. "
        "How many {things} has {name} in the end?",
        "There is a shelf with {start} {things} in the shop of {name}. In the morning {name} {actions}. "
        "How many {things} are left on the shelf?",
        "{name} comes to the market with {start} {things} in a basket. By noon {name} {actions}. "
        "How many {things} does {name} take home?",
    ),
}
APPLY = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.floordiv}
ACTIONS = {
    "add": ("gets {n} more", "buys {n} more", "finds {n} more", "wins {n} more", "makes {n} more"),
    "subtract": ("loses {n}", "sells {n}", "gives away {n}", "breaks {n}", "lends {n}"),
    "multiply": ("swaps each for {n}", "trades each for {n}"),
    "divide": ("swaps every {n} for one", "trades every {n} for one"),
}


def _with_ending(problem: str, _: Mapping[str, Any]) -> str:
    """The prompt of a problem: of its text, or of a whole prompt that was copied."""
    return problem.removesuffix(ENDING) + ENDING


@register("task", "arithmetic")
@prompt_writer(_with_ending)
def arithmetic(
    split: str,
    size: ExampleCount = 20_000,
    validation_size: ExampleCount = 1_000,
    test_size: ExampleCount = 1_000,
    operations: Sequence[Operation] = ("add", "subtract"),
    largest: Annotated[int, Le(1_000_000_000)] = 20,
    steps: int = 1,
    style: Literal["short", "story", "sum"] = "short",
    explain: bool | Literal["sums"] = False,
    mistakes: float = 0.0,
    held_out: Literal["prompts", "numbers"] = "prompts",
) -> list[Example]:
    """Word problems: `size` for training, `validation_size` and `test_size` held out.

    Each of the `steps` (1 to 3) is a random one of the `operations`. Operands go up to `largest`; results are whole
    numbers and never negative. Short prompts of one step have 40 to 60 characters. The reference is the number (" 12"),
    with `explain` the worked solution in GSM8K's notation (" 7+5=<<7+5=12>>12\\n#### 12"), with `explain: sums` the sum
    alone (" 7+5=12", or " 7+5=12, 12-3=9" in two steps).

    The same arguments give the same problems, and a larger size begins with the problems of a smaller one. A hash of
    the problem's text decides its split, so no prompt is in two splits, for any sizes.

    With `held_out: numbers` a hash of the numbers in the problem, in any order, decides its split. So the pair of
    numbers of a test problem is in no training problem, in neither order, with any operation and in any style.

    `mistakes` is the fraction of training references with a wrong result (one too high), as from a careless teacher;
    `meta["mistake"]` marks them. Validation and test references are always right.

    Raises LmgymError if there are fewer different problems than requested.

    Example:
        >>> arithmetic("test")[0]
        Example(id='arithmetic/test/0', prompt='...', references=('...',), meta={'answer': '...', ...})
    """
    check_split("arithmetic", split)
    if largest < 2 or not 1 <= steps <= 3 or not operations:
        raise LmgymError(
            "task 'arithmetic' needs largest of at least 2, steps from 1 to 3 and at least one of operations"
        )
    if not 0 <= mistakes <= 1:
        raise LmgymError(f"task.mistakes is {mistakes}; it is a share, from 0 to 1")
    count = {"train": size, "validation": validation_size, "test": test_size}[split]
    # One problem after the other, without end and with repetitions.
    draw = functools.partial(_block, tuple(operations), largest, steps, style, held_out)
    problems = itertools.chain.from_iterable(map(draw, itertools.count()))
    examples = list[Example]()
    for prompt, _, working, answer, applied in _different(problems, split, count):
        mistake = split == "train" and mistakes > 0 and hash_fraction("mistake" + prompt) < mistakes
        if mistake:
            right, answer = answer, str(int(answer) + 1)
            working = working.removesuffix(f"{right}>>{right}") + f"{answer}>>{answer}"
        meta = {"answer": answer, "operation": applied, "mistake": mistake}
        references = (_reference(working, answer, explain),)
        examples.append(Example(f"arithmetic/{split}/{len(examples)}", prompt, references, meta))
    return examples


def _different(problems: Iterable[Problem], split: str, count: int) -> Iterator[Problem]:
    """So many different problems of a split. Raises LmgymError if there seem to be no more."""
    found, fruitless = set[str](), 0
    for problem in problems:
        if len(found) >= count:
            return
        if fruitless > PATIENCE:
            size_key = "size" if split == "train" else f"{split}_size"
            raise LmgymError(
                f"task.{size_key} is {count}, but with these arguments split '{split}' has only {len(found)} "
                "different problems; lower it, or raise task.largest or task.steps"
            )
        # Skip problems without a text, repeated ones, and those of other splits.
        fruitless += 1
        if problem[1] == split and problem[0] not in found:
            found.add(problem[0])
            fruitless = 0
            yield problem


def _reference(working: str, answer: str, explain: bool | str) -> str:
    if explain == "sums":
        return " " + ", ".join(line.rpartition("<<")[2].partition(">>")[0] for line in working.split("\n"))
    return f" {working}\n#### {answer}" if explain else f" {answer}"


@functools.lru_cache(maxsize=64)
def _block(
    operations: tuple[str, ...], largest: int, steps: int, style: str, held_out: str, number: int
) -> list[Problem]:
    """The problems of a block. What could not be made into a problem has no text and no split. All splits and stages of
    a run draw from the same blocks, so they are kept."""
    key = seeds.key("arithmetic", ",".join(operations), largest, steps, style)
    width = 4 + 3 * steps  # uniform numbers per problem
    block = seeds.uniforms([key], number * BLOCK * width, BLOCK * width).reshape(BLOCK, width).tolist()
    return [_problem(numbers, operations, largest, style, held_out) or ("",) * 5 for numbers in block]


def _problem(
    numbers: list[float], operations: tuple[str, ...], largest: int, style: str, held_out: str
) -> Problem | None:
    """One problem from its uniform numbers; None if no operation is possible at some step."""
    # Four numbers choose the sentence, the name, the things and the first total; each step takes three more.
    name, things = _pick(NAMES, numbers[1]), _pick(THINGS, numbers[2])
    first = total = 2 + int(numbers[3] * (largest - 1))
    actions, working, applied, operands = [], [], [], [first]
    for index in range(4, len(numbers), 3):
        possible = {name: choices for name in operations if (choices := _operands(name, total, largest))}
        if not possible:
            return None
        operation = _pick(tuple(possible), numbers[index])
        operand = _pick(possible[operation], numbers[index + 1])
        actions.append(_pick(ACTIONS[operation], numbers[index + 2]).format(n=operand))
        result = APPLY[operation](total, operand)
        sum_ = f"{total}{SIGNS[operation]}{operand}"
        working.append(f"{sum_}=<<{sum_}={result}>>{result}")
        applied.append(operation)
        operands.append(operand)
        total = result
    if style == "sum":
        signs = zip(applied, operands[1:], strict=True)
        prompt = f"{first}" + "".join(f" {SIGNS[operation]} {operand}" for operation, operand in signs) + ENDING
    else:
        form, joined = _pick(FORMS[style], numbers[0]), actions[0]
        if len(actions) > 1:  # "has 7 pens, gets 5 more and loses 2": one list, one "and"
            form = form.replace("{things} and {actions}", "{things}, {actions}")
            joined = ", ".join(actions[:-1]) + " and " + actions[-1]
        prompt = form.format(name=name, things=things, start=first, actions=joined) + ENDING
    split = drawn_split(prompt if held_out == "prompts" else " ".join(map(str, sorted(operands))))
    return prompt, split, "\n".join(working), str(total), ", ".join(applied)


def _operands(operation: str, total: int, largest: int) -> Sequence[int]:
    """The operands that keep the result whole and not negative."""
    if operation == "add":
        return range(1, largest + 1)
    if operation == "subtract":
        return range(1, min(largest, total) + 1)
    if total == 0:
        return ()  # nothing left to swap
    return range(2, largest + 1) if operation == "multiply" else _divisors(total, largest)


@functools.lru_cache(maxsize=100_000)
def _divisors(total: int, largest: int) -> tuple[int, ...]:
    return tuple(number for number in range(2, min(largest, total) + 1) if total % number == 0)


def _pick(choices: Sequence[T], number: float) -> T:
    return choices[int(number * len(choices))]
