"""What `lmgym view RUN --text` shows: curves, a metric, a step, a group, an answer, each as rows that open the next."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lmgym.core.errors import LmgymError
from lmgym.core.visible import visible
from lmgym.viewer.addresses import tree_at
from lmgym.viewer.runs import RunRecords
from lmgym.viewer.search import matching

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
CURVE = 32  # characters of a curve
WORD = re.compile(r"(-?)([A-Za-z_][\w./-]*?)(?:(<=|>=|!=|<|>|=)(-?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?))?")
COLOURS = ("probability", "advantages", "push", "ratio/mean", "entropy", "token_rewards")


def words(text: object, style: str = "") -> "Text":
    """Words of a run as one harmless line; all that a screen shows is made here."""
    from rich.text import Text

    return Text(visible(text), style)


def number(value: Any) -> str:
    """A number with four significant digits; "-" for none."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


@dataclass
class Row:
    """A line of a screen; `opens` makes the screen behind it."""

    text: "Text"
    opens: "Callable[[], Screen] | None" = None
    place: int = -1  # in the columns of a step, for its filter


@dataclass
class Screen:
    """Rows, one of them selected. `build` makes the screen anew, from what the run has written since."""

    title: str
    build: "Callable[[], Screen]"
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)  # of a step
    colours: "list[tuple[str, list[Row]]]" = field(default_factory=list)  # of an answer: its rows by colour
    selected: int = 0
    wrapped: bool = False

    def __post_init__(self) -> None:
        self.all = list(self.rows)

    def move(self, by: int) -> None:
        """Select another row."""
        self.selected = max(0, min(len(self.rows) - 1, self.selected + by))

    def again(self) -> "Screen":
        """The same screen with what is new."""
        made = self.build()
        made.selected = min(self.selected, max(0, len(made.rows) - 1))
        return made

    def next_colour(self) -> None:
        """Colour by the next number."""
        if self.colours:
            self.colours = [*self.colours[1:], self.colours[0]]
            self.notes, self.rows = [f"colour: {self.colours[0][0]} (c: next)"], self.colours[0][1]

    def filter(self, words: str) -> None:
        """Show only rows that meet all words; all rows for none. Raises LmgymError for a number that is not there."""
        if self.columns:
            fits = matching(self.columns, parse_filters(words))
            self.rows = [row for row in self.all if fits[row.place]]
        else:
            self.rows = [row for row in self.all if all(word in row.text.plain for word in words.split())]
        self.selected = 0

    def lines(self, console: "Console", width: int, height: int) -> "list[Text]":
        """As many lines as fit, with the selected row among them."""
        if not self.rows:
            return []
        first = self.selected if self.wrapped else max(0, min(self.selected - height // 2, len(self.rows) - height))
        lines: list[Text] = []
        for place, row in enumerate(self.rows[first:], first):
            if len(lines) >= height:
                break
            if self.wrapped:
                lines += row.text.wrap(console, max(10, width - 1)) if row.text.plain else [row.text.copy()]
                continue
            line = row.text.copy()
            if place == self.selected:
                line.stylize("reverse")
            lines.append(line)
        return lines


def parse_filters(words: str) -> list[tuple[str, str, float]]:
    """The filters of a text, as on the page.

    Example:
        >>> parse_filters("truncated score<0.5 -selected")
        [('truncated', '=', 1.0), ('score', '<', 0.5), ('selected', '=', 0.0)]
    """
    filters = []
    for word in words.split():
        found = WORD.fullmatch(word)
        if found is None or (found[1] and found[3]):
            raise LmgymError(f"'{word}' is no filter; write for example score<0.5 truncated -selected")
        filters.append((found[2], found[3] or "=", float(found[4]) if found[3] else float(not found[1])))
    return filters


def curves_screen(runs: Sequence[RunRecords]) -> Screen:
    """All numbers of all runs, each with its newest value, its interval and its curve."""
    rows = []
    for run in range(len(runs)):
        tables = tree_at(runs, f"runs/{run}/curves")["tables"]
        names = [(table, name) for table in tables for name in tables[table]["values"]]
        for table, name in sorted(names, key=lambda own: (own[0] == "train", own[1] not in ("reward", "loss"))):
            values = tables[table]["values"][name]
            known = [value for value in values if value is not None]
            if not known:
                continue
            label = name if table == "train" else f"held out {table.partition('/')[2]}: {name}"
            newest = f"{number(known[-1]):>9} {_interval(tables[table], name, -1):<18}"
            prefix = f"{runs[run].name}  " if len(runs) > 1 else ""
            opens = partial(metric_screen, runs, run, table, name)
            rows.append(Row(words(f"{prefix}{label:<34.34} {newest} {curve(known)}"), opens))
    names_of_runs = ", ".join(run.name for run in runs)
    return Screen(f"curves of {names_of_runs}", lambda: curves_screen(runs), rows)


def curve(values: Sequence[float]) -> str:
    """Numbers as a line of blocks.

    Example:
        >>> curve([0, 1, 2, 7])
        '▁▂▃█'
    """
    count = min(CURVE, len(values))
    cuts = [len(values) * place // count for place in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, reach = min(means), (max(means) - min(means)) or 1.0
    return "".join(BLOCKS[round((value - low) / reach * (len(BLOCKS) - 1))] for value in means)


def _interval(table: dict[str, Any], name: str, place: int) -> str:
    low, high = (table[end].get(name) for end in ("low", "high"))
    return (
        f"[{number(low[place])}, {number(high[place])}]"
        if low and high and None not in (low[place], high[place])
        else ""
    )


def metric_screen(runs: Sequence[RunRecords], run: int, table: str, name: str) -> Screen:
    """One number over the steps, the newest first; a step of the training opens."""
    tree = tree_at(runs, f"runs/{run}/curves")["tables"][table]
    values = tree["values"][name]
    known = [value for value in values if value is not None] or [0.0]
    low, reach = min(known), (max(known) - min(known)) or 1.0
    rows = []
    for place in range(len(values) - 1, -1, -1):
        stage, step = tree["places"][place]
        bar = "" if values[place] is None else "█" * round(24 * (values[place] - low) / reach)
        after = step + 1 if table == "train" else step  # an evaluation's number is that of the steps before it
        text = f"stage {stage + 1} step {after:<7} {number(values[place]):>9} {_interval(tree, name, place):<18} {bar}"
        opens = partial(step_screen, runs, run, stage, step) if table == "train" else None
        rows.append(Row(words(text), opens))
    return Screen(f"{name} of {runs[run].name}", lambda: metric_screen(runs, run, table, name), rows)


def step_screen(runs: Sequence[RunRecords], run: int, stage: int, step: int) -> Screen:
    """The answers of a step, by group; ● marks those that were kept whole."""
    columns = tree_at(runs, f"runs/{run}/steps/{stage}/{step}")["columns"]
    rows = []
    for place, index in enumerate(columns["index"]):
        own = {name: column[place] for name, column in columns.items() if isinstance(column, list)}
        flags = [name for name in ("truncated", "error") if own.get(name)]
        flags += [own.get("reason") or "not trained on"] if own.get("selected") is False else []
        seconds = own.get("seconds/environment")
        flags += [f"environment {number(seconds)} s"] if seconds else []
        numbers = [number(own.get(name)) for name in ("score", "length", "surprise")]
        text = f"{'●' if own.get('kept') else ' '} {own['group']:>5} {index:>6} {numbers[0]:>8} {numbers[1]:>6} "
        text += f"{numbers[2]:>8}  {', '.join(flags)}"
        rows.append(Row(words(text), partial(group_screen, runs, run, stage, step, own["group"]), place))
    title = f"step {step + 1} of stage {stage + 1}: {len(rows)} answers"
    heads = "  group answer    score length surprise"
    return Screen(title, lambda: step_screen(runs, run, stage, step), rows, [heads], columns)


def group_screen(runs: Sequence[RunRecords], run: int, stage: int, step: int, group: int) -> Screen:
    """The answers to one prompt, the best first, with their advantages as bars. Equal ones are one row."""
    tree = tree_at(runs, f"runs/{run}/groups/{stage}/{step}/{group}")
    answers = sorted(tree["answers"], key=lambda one: (-(one["score"] or 0.0), one["index"]))
    most = max([abs(one.get("advantage") or 0.0) for one in answers] + [1e-12])
    alike: dict[str, list[dict[str, Any]]] = {}
    for one in answers:
        key = str([one.get(name) for name in ("texts", "score", "selected")] if "texts" in one else one["index"])
        alike.setdefault(key, []).append(one)
    rows = []
    for one, *others in alike.values():
        advantage = one.get("advantage")
        size = round(6 * (advantage or 0.0) / most)
        bar = "".join(("-" * -size).rjust(6) if size < 0 else " " * 6) + "|" + ("+" * max(size, 0)).ljust(6)
        said = " ".join(one.get("texts") or ["(its text was not kept)"])
        text = words(f"{one['index']:>4} score {number(one['score']):>6} {bar} {number(advantage):>8}  ")
        text.append(f"{len(others) + 1} times: " if others else "")
        text.append_text(words(said, "dim" if one.get("selected") is False else ""))
        rows.append(Row(text, partial(answer_screen, runs, run, stage, step, one["index"])))
    prompt = tree["example"].get("prompt", "")
    prompt = prompt if isinstance(prompt, str) else " ".join(f"{one['role']}: {one['content']}" for one in prompt)
    notes = [f"prompt: {prompt}"]
    return Screen(f"group {group} of step {step + 1}", lambda: group_screen(runs, run, stage, step, group), rows, notes)


def answer_screen(runs: Sequence[RunRecords], run: int, stage: int, step: int, index: int) -> Screen:
    """An answer: its tokens coloured by a number, what the loss does not see dimmed, then the numbers of each token."""
    tree = tree_at(runs, f"runs/{run}/answers/train/{stage}/{step}/{index}")
    found = {name for row in tree["rows"] for name in _columns(row, {})}
    found |= {name for row in (tree.get("explanation") or {}).get("rows", []) for name in row}
    colours = [(name, _token_rows(tree, name)) for name in COLOURS if name in found] or [
        ("none", _token_rows(tree, ""))
    ]
    facts = f"answer {index} of step {step + 1}: score {number(tree['score'])}"
    facts += "".join(f", {name} {number(value)}" for name, value in tree["reward_components"].items())
    screen = Screen(facts, lambda: answer_screen(runs, run, stage, step, index), colours[0][1], wrapped=True)
    screen.colours, screen.notes = colours, [f"colour: {colours[0][0]} (c: next)"]
    return screen


def _columns(row: dict[str, Any], derived: dict[str, Any]) -> dict[str, list[float | None]]:
    from math import exp

    columns = {**row["columns"], **({"push": derived["push"]} if "push" in derived else {})}
    if "logprobs_sampler" in columns:
        columns["probability"] = [None if one is None else exp(one) for one in columns["logprobs_sampler"]]
    return columns


def _token_rows(tree: dict[str, Any], name: str) -> list[Row]:
    """The text with its colours, then a line for each sampled token with all its numbers."""
    derived = (tree.get("explanation") or {}).get("rows") or [{}] * len(tree["rows"])
    rows, table = [], []
    for row, own in zip(tree["rows"], derived, strict=True):
        columns, special = _columns(row, own), set(row["special"])
        action_of = {place: action for action, place in enumerate(row["actions"])}
        values = columns.get(name, [])
        reach = max([abs(value) for value in values if value is not None] + [1e-12])
        text = words("")
        for place, piece in enumerate(row["pieces"]):
            action = action_of.get(place)
            style = "dim" if action is None else _style(name, values[action] if values else None, reach)
            text.append_text(words(piece or "▯", f"{style} bold" if place in special else style))
            if action is not None:
                numbers = "  ".join(f"{key} {number(column[action])}" for key, column in columns.items())
                table.append(Row(words(f"{piece!r:<14} {numbers}")))
        rows.append(Row(text))
    return [*rows, Row(words("")), *table]


def _style(name: str, value: float | None, reach: float) -> str:
    """Yellow to red for an unlikely token; else green above 0 and red below, the stronger the larger."""
    if value is None:
        return ""
    if name == "probability":
        return "" if value > 0.9 else "yellow" if value > 0.5 else "red" if value > 0.1 else "black on red"
    share = (value - (1.0 if name.startswith("ratio/") else 0.0)) / reach
    if abs(share) < 1e-3:
        return ""
    return (
        ("green" if share > 0 else "red") if abs(share) < 0.6 else ("black on green" if share > 0 else "black on red")
    )
