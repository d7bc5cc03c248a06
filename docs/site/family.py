"""The table of docs/algorithms/family.md, made from the parts themselves: `python -m docs.site.family` prints it."""

from dataclasses import fields
from typing import Any

from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.core.parts import Part, part_name

COLUMNS = ("credit", "surrogate", "correction", "tokens")


def family_table() -> str:
    """One row a member: its four parts, each with the fields that are not the part's own defaults, and its other keys.

    Example: family_table().splitlines()[0] -> "| name | credit | surrogate | correction | tokens | other keys |"
    """
    rows = [("name", *COLUMNS, "other keys"), ("---",) * 6]
    for name, row in {"grpo": {}, **GRPO.presets}.items():
        built = GRPO(**row)
        others = ", ".join(f"{key}: {_value(value)}" for key, value in row.items() if key not in COLUMNS)
        shown = "grpo, preset paper" if name == "paper" else name
        rows.append((shown, *(_part(getattr(built, column)) for column in COLUMNS), others))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _part(part: Part) -> str:
    changed = [f for f in fields(part) if getattr(part, f.name) != f.default]
    inside = ", ".join(f"{f.name}: {_value(getattr(part, f.name))}" for f in changed)
    return f"{part_name(part)} ({inside})" if inside else part_name(part)


def _value(value: Any) -> str:
    if isinstance(value, Part):
        return _part(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(family_table(), end="")
