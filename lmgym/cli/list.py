"""`lmgym list`: the names that recipes can use."""

import argparse
import json
import sys
import textwrap
from typing import Any

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.output import columns_of

ROOM = 40  # columns that a summary needs beside the names; else it goes below them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A kind of names, and the format."""
    parser.add_argument("kind", nargs="?", help=f"one of {', '.join(registry.BUILTIN)} (a plural will do)")
    parser.add_argument("name", nargs="?", help="one of that kind: shows its keys with their defaults")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--plugin", action="append", default=[], help="a module or .py file to load first")


def run(given: argparse.Namespace) -> None:
    """Print a table of each kind, or JSON."""
    for plugin in given.plugin:
        registry.load_plugin(plugin)
    kinds = list(registry.BUILTIN)
    if given.kind is not None:
        kind = given.kind if given.kind in kinds else given.kind.removesuffix("s")
        kind = "reward" if kind == "metric" else kind  # a metric is a reward, of weight 0
        if kind not in kinds:
            raise LmgymError(f"there is no kind '{given.kind}'; {registry.suggest(given.kind, kinds)}")
        kinds = [kind]
    if given.name is not None:
        return _print_name(kinds[0], given.name, given.json)
    table = {kind: registry.describe(kind) for kind in kinds}
    if given.json:
        print(json.dumps(table[kinds[0]] if given.kind else table, indent=1))
        return
    columns = columns_of(sys.stdout)
    print("+ runs here   ~ runs here, given what is named   - does not run here yet")
    for kind, rows in table.items():
        if not (rows or given.kind):  # nothing built in: what plug-ins alone register
            continue
        print(f"{kind}s, which are metrics too" if kind == "reward" else f"{kind}s")
        width = max((len(row["name"]) for row in rows), default=0)
        for row in rows:
            mark = {"yes": "+", "given": "~", "no": "-"}[row["runs"]]
            how = f": {row['how']}" if row["how"] not in row["needs"] else ""
            needs = f"  (needs {row['needs']}{how})" if row["needs"] else ""
            text = f"{row['summary']}{needs}"
            if columns is None or columns >= width + ROOM:
                print(_hanging(f"{mark}  {row['name']:<{width}}  ", text, columns))
            else:
                print(f"{mark}  {row['name']}", _hanging("     ", text, columns), sep="\n")


def _print_name(kind: str, name: str, as_json: bool) -> None:
    """Print what one name is and its keys: each with its default (or what it takes, if it has none) and a line."""
    from lmgym.config.json_schema import keys_of  # which imports what it describes

    keys = keys_of(kind, name)
    if as_json:
        print(json.dumps(keys, indent=1))
        return
    [row] = [row for row in registry.describe(kind) if row["name"] == name] or [{"summary": "", "target": name}]
    columns = columns_of(sys.stdout)
    print(_hanging(f"{kind} {name}: ", f"{row['summary'] or row['target']} ({row['target']})", columns))
    shown = {key: _default(schema) for key, schema in keys.items()}
    widths = [min(max(map(len, texts), default=0), ROOM) for texts in (shown, shown.values())]
    for key, schema in keys.items():
        beginning = f"  {key:<{widths[0]}}  {shown[key]:<{widths[1]}}  "
        told = schema.get("description", "")
        if len(shown[key]) > widths[1] or (columns is not None and columns < len(beginning) + ROOM):
            print(beginning.rstrip(), *([_hanging("      ", told, columns)] if told else []), sep="\n")
        else:
            print(_hanging(beginning, told, columns).rstrip())


def _default(schema: dict[str, Any]) -> str:
    """The default of a key as YAML has it; of a key without one what it takes, in angle brackets.

    Example: _default({"type": "integer"}) -> "<integer>"
    """
    if "default" in schema:
        default = schema["default"]
        return default if isinstance(default, str) and default.isprintable() and default else json.dumps(default)
    kinds = [part.get("type", "value") for part in schema.get("anyOf", [schema])]
    return f"<{' or '.join(map(str, dict.fromkeys(kinds)))}>"


def _hanging(beginning: str, text: str, columns: int | None) -> str:
    """The text behind its beginning; lines after the first are indented as far."""
    if columns is None:
        return beginning + text
    wrapper = textwrap.TextWrapper(columns, beginning, " " * len(beginning))
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(text)
