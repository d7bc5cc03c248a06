"""Values against the types and bounds of fields and parameters, in one place: pydantic judges, and one sentence tells.

    TypeAdapter(hint)  ->  ValidationError  ->  LmgymError("steps is 0; it must be at least 1")

A recipe's sections, a function's arguments and dataclasses built in Python are all checked here, from the same type
hints. Booleans are no numbers, at any depth; a number that YAML reads as text ("1e-3") becomes one."""

import inspect
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union

from annotated_types import Ge, Gt, Le, Lt

from lmgym.core.constraints import FINITE, Rule
from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest

FREE: Mapping[str, str] = {"resumed": "free"}
"""Metadata of a field that may change when a run is resumed, and nothing that is computed would be another."""
RECORDED: Mapping[str, str] = {"resumed": "recorded"}
"""Metadata of one that may change too; the run then is no longer bit for bit what it would have been."""
REFUSED: Mapping[str, str] = {"resumed": "refused"}
"""Metadata of one that may not, in a section of others that may; so is every field that says nothing."""
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127  # of fp32, in which models compute
COLLECTIONS = (list, tuple, set, frozenset, dict, Sequence, Mapping)


@dataclass(kw_only=True)
class Section:
    """A part of a recipe. Its fields are checked against their type hints' bounds whoever builds it; a rule on two
    fields is a few lines in `__post_init__`, after `super().__post_init__()`.

    Example:
        >>> @dataclass(kw_only=True)
        ... class Logs(Section):
        ...     section = "logs"
        ...     samples: NonNegativeInt = 4
        >>> Logs(samples=-1)
        LmgymError: logs.samples is -1; it must be at least 0
    """

    section: ClassVar[str] = ""
    """Its name in a recipe, for errors; empty for the recipe itself."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Keys that users look for here and that belong to another section, and what to say of them."""

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(section: Any) -> None:
    """Raise LmgymError for the first field (of a section or a part) whose value its hint's bounds do not allow."""
    kind: Any = type(section)
    for name, hint in _checked_hints(kind).items():
        converted(hint, getattr(section, name), f"{section.section}.{name}".lstrip("."))


def check_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], key: str, given: int, also: Iterable[str] = ()
) -> dict[str, Any]:
    """The keyword arguments for a function, checked against its signature without its first `given` parameters.

    Values are checked against the type hints, if there are any, and converted like the rest of a recipe ("1e-3", which
    YAML reads as text, becomes a number). Raises LmgymError for an unknown, missing or wrong argument; `key` is the
    section of the recipe in that sentence, `also` are further keys that the section may have."""
    named, open_ended = parameters_of(function, given)
    for name in arguments:
        if name not in named and not open_ended:
            raise LmgymError(f"unknown key '{key}.{name}'; {suggest(str(name), {*named, *also})}")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise LmgymError(f"key '{key}.{name}' is missing; '{key}' needs it")
    hints = hints_of(function)
    return {name: converted(hints.get(name, Any), value, f"{key}.{name}") for name, value in arguments.items()}


def check_text(text: str, where: str) -> None:
    """Raise ValueError for a text that no tokenizer can encode: one with half of a surrogate pair. `where` begins the
    sentence.

    Example:
        >>> check_text("\\ud800", "the prompt")
        Traceback (most recent call last):
        ValueError: the prompt holds half of a surrogate pair at character 1, which is no character
    """
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} holds half of a surrogate pair at character {error.start + 1}, which is no character"
        ) from None


def parameters_of(function: Callable[..., Any], given: int) -> tuple[dict[str, inspect.Parameter], bool]:
    """The parameters that may be given by name, the first `given` apart, and whether there are `**keywords` too."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes = [p for p in parameters if p.name not in positional[:given]]
    named = {p.name: p for p in takes if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return named, any(p.kind is p.VAR_KEYWORD for p in takes)


def hints_of(thing: Any) -> dict[str, Any]:
    """The type hints of a function or a class, bounds included; none where only their author can resolve them."""
    try:
        return typing.get_type_hints(thing, include_extras=True)
    except (NameError, TypeError):
        return {}


def converted(hint: Any, value: Any, key: str) -> Any:
    """The value as its type hint wants it ("1e-3" becomes a number); LmgymError naming `key` if it cannot be.

    Example: converted(Annotated[float, Gt(0)], "1e-3", "optimizer.learning_rate") -> 0.001"""
    from pydantic import PydanticUserError, ValidationError

    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        raise LmgymError(_sentence(hint, value, key, error.errors(include_url=False))) from None
    except PydanticUserError:  # a class that pydantic does not know
        return value


def metadata_of(hint: Any) -> list[Any]:
    """What `Annotated` says at any depth of a type hint, the outermost first.

    Example: metadata_of(list[Annotated[int, Ge(1)]]) -> [Ge(ge=1)]"""
    own = list(hint.__metadata__) if typing.get_origin(hint) is Annotated else []
    inner = typing.get_args(hint)[:1] if own else typing.get_args(hint)
    return own + [item for part in inner for item in metadata_of(part)]


@cache
def field_hints(section: Any) -> dict[str, Any]:
    """The type hints of a class's fields. A subclass that repeats a field for another default keeps its bounds."""
    found: dict[str, Any] = {}
    for kind in reversed(section.__mro__):
        for name, hint in hints_of(kind).items():
            if name not in found or hint != _without_metadata(found[name]):
                found[name] = hint
    return found


@cache
def _checked_hints(section: Any) -> dict[str, Any]:
    """The hints of a section's fields that have bounds or choices."""
    hints = field_hints(section)
    own = {f.name: hints[f.name] for f in fields(section) if f.init and f.name in hints}
    return {name: hint for name, hint in own.items() if metadata_of(hint) or _has_choices(hint)}


def _has_choices(hint: Any) -> bool:
    return typing.get_origin(hint) is Literal or any(_has_choices(part) for part in typing.get_args(hint))


def _adapter(hint: Any, bounded: bool = True) -> Any:
    try:
        return _cached_adapter(hint, bounded)
    except TypeError:  # metadata of a user's own that has no hash
        return _cached_adapter.__wrapped__(hint, bounded)


@cache
def _cached_adapter(hint: Any, bounded: bool) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(_without_booleans(hint if bounded else _without_metadata(hint)))


def _without_booleans(hint: Any) -> Any:
    """The hint with numbers that refuse booleans, at any depth, which pydantic would take for 0 and 1, and floats that
    refuse what fp32 cannot hold."""
    from pydantic import AfterValidator, BeforeValidator

    refusal = BeforeValidator(_refuse_boolean)
    kinds = {int: Annotated[int, refusal], float: Annotated[float, refusal, AfterValidator(_refuse_beyond_fp32)]}
    return _changed(hint, lambda part: kinds[part] if part in (int, float) else part)


def _without_metadata(hint: Any) -> Any:
    """The hint without what `Annotated` says, at any depth."""
    return _changed(hint, lambda part: part.__origin__ if typing.get_origin(part) is Annotated else part)


def _changed(hint: Any, change: Callable[[Any], Any]) -> Any:
    """The hint with `change` applied to each of its parts, the inner ones first."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return change(Annotated[(_changed(inner[0], change), *hint.__metadata__)])
    if origin in (Union, UnionType):
        return change(Union[tuple(_changed(part, change) for part in inner)])  # noqa: UP007 (of a list)
    if origin in COLLECTIONS:
        return change(origin[tuple(_changed(part, change) for part in inner)])
    return change(hint)


def _refuse_boolean(value: Any) -> Any:
    from pydantic_core import PydanticCustomError

    if isinstance(value, bool):
        raise PydanticCustomError("boolean", "must be a number")
    return value


def _refuse_beyond_fp32(value: float) -> float:
    from pydantic_core import PydanticCustomError

    if math.isfinite(value) and abs(value) > LARGEST_FLOAT:
        raise PydanticCustomError("too large", "must be from -3.4e38 to 3.4e38, the range of fp32")
    return value


def _sentence(hint: Any, value: Any, key: str, problems: Sequence[Mapping[str, Any]]) -> str:
    """pydantic's errors of one value as one sentence of ours."""
    from pydantic import ValidationError

    try:
        shown = _adapter(hint, bounded=False).validate_python(value)
    except ValidationError:
        return _of_another_type(value, key, problems)
    several = isinstance(shown, list | tuple | dict)
    rule = next((item.text for item in metadata_of(hint) if isinstance(item, Rule)), None) or _in_words(hint, shown)
    rule = "each " + rule.removeprefix("it ") if several and rule.startswith("it ") else rule
    if not rule:  # a bound that has no words here
        return _of_another_type(value, key, problems)
    return f"{key} {'are' if several else 'is'} {shown}; {rule}"


def _of_another_type(value: Any, key: str, problems: Sequence[Mapping[str, Any]]) -> str:
    path = _path(value, problems[0]["loc"])
    where, given = ".".join([key, *map(str, path)]), problems[0]["input"]
    if problems[0]["type"] == "boolean":
        return f"key '{where}' must be a number, got {given}"
    # Each type of a union has its own complaint.
    first, *others = dict.fromkeys(problem["msg"] for problem in problems if _path(value, problem["loc"]) == path)
    reasons = [first[0].lower() + first[1:], *(reason.removeprefix("Input should be ") for reason in others)]
    return f"key '{where}': {' or '.join(reasons)}, got {given!r}"


def _path(value: Any, location: Sequence[Any]) -> list[Any]:
    """The places of pydantic's location that lead into the value; the others name types of a union."""
    path = []
    for part in location:
        if (isinstance(value, Mapping) and part in value) or (
            isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        ):
            value = value[part]
            path.append(part)
    return path


def _in_words(hint: Any, shown: Any) -> str:
    """The bounds of a hint: "it must be at least 0 and below 1"."""
    found = {type(item): item for item in metadata_of(hint)}
    kinds = ((Ge, "ge", "at least"), (Gt, "gt", "above"), (Le, "le", "at most"), (Lt, "lt", "below"))
    words = [f"{word} {getattr(found[kind], name)}" for kind, name, word in kinds if kind in found]
    if Ge in found and Le in found:
        words = [f"from {found[Ge].ge} to {found[Le].le}"]
    if FINITE in found.values() and isinstance(shown, float) and not math.isfinite(shown):
        words.append("finite")
    return f"it must be {' and '.join(words)}" if words else ""
