"""`shapes`: drawn circles, squares and triangles, and questions about them; needs no download."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Le

from lmgym.core import seeds
from lmgym.core.constraints import ExampleCount
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.pictures.store import current_store, pillow
from lmgym.tasks.base import check_split, drawn_split, prompt_writer
from lmgym.tasks.sources import check_sizes
from lmgym.types import Example, RecipeText, part_of, picture_text

Question = Literal["count", "colour", "position"]
KINDS = ("circle", "square", "triangle")
COLOURS = {
    "red": (220, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 220), "black": (20, 20, 20),
    "orange": (240, 140, 20), "purple": (140, 60, 180),
}  # fmt: skip
ENDING = "\nAnswer:"  # of every prompt
PATIENCE = 3000  # so many draws in a row without a new picture mean that there is no new one


@dataclass(frozen=True)
class Shape:
    """A shape: its kind, its colour, its middle and half its width in pixels.
    Example: Shape("circle", "red", 20, 12, 6)"""

    kind: str
    colour: str
    x: int
    y: int
    radius: int

    def covers(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """True for the pixels of the shape. In whole numbers, so that every machine draws the same."""
        right, down = x - self.x, y - self.y
        if self.kind == "circle":
            return right * right + down * down <= self.radius * self.radius
        if self.kind == "square":
            return np.maximum(abs(right), abs(down)) <= self.radius
        return (2 * abs(right) <= down + self.radius) & (down <= self.radius)


def _with_ending(problem: str, _: Mapping[str, Any]) -> str:
    """The prompt of a question: of its text, or of a whole prompt that was copied."""
    return RecipeText.join(part_of(problem, 0, len(problem.removesuffix(ENDING))), ENDING)


@register("task", "shapes")
@prompt_writer(_with_ending)
def shapes(
    split: str,
    size: ExampleCount = 2_000,
    validation_size: ExampleCount = 200,
    test_size: ExampleCount = 200,
    ask: Sequence[Question] = ("count",),
    most: Annotated[int, Ge(1), Le(16)] = 4,
    kinds: Annotated[int, Ge(1), Le(len(KINDS))] = 3,
    colours: Annotated[int, Ge(1), Le(len(COLOURS))] = 3,
    pixels: Annotated[int, Ge(16), Le(1024)] = 64,
    data_seed: int = 0,
) -> list[Example]:
    """Pictures of 1 to `most` shapes that do not touch, on white, each with one question of the kinds in `ask`:

    - count: "How many circles are there?", of one of the kinds or of all shapes, one of them or none possible;
    - colour: "Which colour is the square?", of a kind of which there is one;
    - position: "Is the red circle left or right of the blue square?", of two shapes that differ.

    It is harder with more shapes, of more of the three `kinds` and six `colours`, and on fewer `pixels` (of a side).
    The reference is one word or number (" 3"); `meta` has answer, question, and shapes (how many there are). The reward
    exact_match tells whether an answer is right.

    The same arguments give the same pictures, and a larger size begins with those of a smaller one. A hash of picture
    and question decides the split, so no prompt is in two. Raises LmgymError if there are fewer different ones than
    requested. Needs the extra lmgym[vision].

    Example:
        >>> load_task("shapes", "test", ask=["colour"])[0].prompt
        '\\ufffcWhich colour is the circle?\\nAnswer:'
    """
    check_split("shapes", split)
    check_sizes(size=size, validation_size=validation_size, test_size=test_size)
    _check_pictures(ask, most, kinds * colours, pixels)
    wanted = {"train": size, "validation": validation_size, "test": test_size}[split]
    examples, fruitless, number = dict[str, Example](), 0, 0
    while len(examples) < wanted:
        if fruitless > PATIENCE:
            key = "size" if split == "train" else f"{split}_size"
            raise LmgymError(
                f"task.{key} is {wanted}, but with these arguments split '{split}' has about {len(examples)} different "
                "problems; lower it, or raise task.most or task.pixels"
            )
        # A picture with its question; it counts if it is new, and of this split.
        chance = seeds.generator("shapes", data_seed, number)
        number, fruitless = number + 1, fruitless + 1
        drawn = _drawn(chance, most, kinds, colours, pixels)
        question, answer = _asked(chance, ask[int(chance.integers(len(ask)))], drawn, kinds)
        key = f"{drawn} {question}"
        if not question or key in examples or drawn_split(key) != split:
            continue
        fruitless = 0
        picture = picture_text(current_store().keep(pillow().fromarray(picture_of(drawn, pixels))))
        examples[key] = Example(
            id=f"shapes/{split}/{len(examples)}",
            prompt=RecipeText.join(picture, f"{question}{ENDING}"),
            references=(f" {answer}",),
            meta={"answer": answer, "question": question, "shapes": len(drawn)},
        )
    return list(examples.values())


def _check_pictures(ask: Sequence[Question], most: int, different: int, pixels: int) -> None:
    """Raise LmgymError for arguments that allow no picture with a question; `different` are the different shapes."""
    if not ask:
        raise LmgymError("task.ask is empty; name some of count, colour and position")
    if most > (pixels // 12) ** 2:
        raise LmgymError(f"task.most is {most}, and {pixels} pixels have no room for so many shapes; raise task.pixels")
    if "position" in ask and (most < 2 or different < 2):
        raise LmgymError("task.ask: position needs two shapes that differ; raise task.most, task.kinds or task.colours")


def picture_of(drawn: Sequence[Shape], pixels: int) -> np.ndarray:
    """The picture of some shapes on white, uint8 [pixels, pixels, 3].

    Example: picture_of([Shape("square", "red", 8, 8, 2)], 16)[8, 8] -> array([220, 40, 40], dtype=uint8)"""
    y, x = np.mgrid[:pixels, :pixels]
    picture = np.full((pixels, pixels, 3), 255, np.uint8)
    for shape in drawn:
        picture[shape.covers(x, y)] = COLOURS[shape.colour]
    return picture


def _drawn(chance: np.random.Generator, most: int, kinds: int, colours: int, pixels: int) -> tuple[Shape, ...]:
    """1 to `most` shapes, each in a cell of its own of a square grid, so that they do not touch."""
    side = max(int(np.ceil(np.sqrt(most))), 2)
    cell = pixels // side
    places = chance.permutation(side * side)[: int(chance.integers(1, most + 1))]
    found = []
    for place in places.tolist():
        radius = int(chance.integers(max(cell // 5, 2), max((cell - 2) // 2, 3)))
        low, high = radius + 1, max(cell - radius - 1, radius + 2)
        down, right = ((place // side) * cell, (place % side) * cell)
        x, y = (start + int(chance.integers(low, high)) for start in (right, down))
        kind, colour = KINDS[int(chance.integers(kinds))], [*COLOURS][int(chance.integers(colours))]
        found.append(Shape(kind, colour, x, y, radius))
    return tuple(found)


def _asked(chance: np.random.Generator, ask: str, drawn: Sequence[Shape], kinds: int) -> tuple[str, str]:
    """A question about some shapes, and its answer; empty texts where this kind of question has none."""
    if ask == "count":
        countable = ["shape", *(KINDS[:kinds] if kinds > 1 else [])]
        kind = countable[int(chance.integers(len(countable)))]
        count = sum(kind in ("shape", one.kind) for one in drawn)
        return f"How many {kind}s are there?", str(count)
    if ask == "colour":
        single = [one for one in drawn if sum(one.kind == other.kind for other in drawn) == 1]
        if not single:
            return "", ""
        one = single[int(chance.integers(len(single)))]
        return f"Which colour is the {one.kind}?", one.colour
    named = [f"{one.colour} {one.kind}" for one in drawn]
    known = [n for n, name in enumerate(named) if named.count(name) == 1]
    if len(known) < 2:
        return "", ""
    first, second = (known[int(n)] for n in chance.permutation(len(known))[:2])
    if abs(drawn[first].x - drawn[second].x) <= 2:  # too little to see
        return "", ""
    side = "left" if drawn[first].x < drawn[second].x else "right"
    return f"Is the {named[first]} left or right of the {named[second]}?", side
