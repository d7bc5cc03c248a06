"""Damage that every kind of mutant shares: odd values, changed trees, and changed bytes."""

import copy
import datetime
import math
import random
from collections.abc import Iterator
from typing import Any

Path = tuple[Any, ...]  # keys and indices from the root of a tree of dictionaries and lists


def nested(depth: int) -> list[Any]:
    """A list in a list in a list ..."""
    tree: list[Any] = []
    for _ in range(depth):
        tree = [tree]
    return tree


NUMBERS: list[Any] = [0, -1, 1, 2, 3, 7, 1000, 0.5, -0.5, 1.5, -0.0, 5e-324, 1e300, -1e300, math.inf, -math.inf]
NUMBERS += [math.nan, 2**31, 2**31 - 1, 2**63, -(2**63) - 1, 10**18, 10**400, 1e-9]
TEXTS = ["", " ", "\n", "x", "nan", "1e-3", "1e9999", "0x10", "1_000", "-1", "yes", "null", "~", "..", "a/b", "file:"]
TEXTS += ["file:/dev/zero", "file:no/such", "/dev/null/x", "no_such:thing", "a:b:c", ":", "json:loads", "{", "{0}"]
TEXTS += ["1e9999999", "1/0"]
TEXTS += ["%s", "${x}", "{split}", "{language}", "\x00", "\x1b[31m", "a\tb", "\u202e", "\u2028", "\ufeff", "\ud800"]
TEXTS += ["\udfff", "é", "e\u0301", "𐍈", "👩‍👩‍👧", "[", "(?", "(a+)+$", "x" * 5000, "x" * 100_000, "9" * 5000, "1,2"]
TEXTS += [
    "a.b",
    "\\",
    "<eos>",
    "builtin:tiny",
    "builtin:none",
    "train",
    "test",
    "auto",
    "none",
    "cpu",
    "cuda",
    "cuda:99",
    "meta",
]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [None], [1], ["a"], [1, "a", None], {"name": None}, {"name": "x"}]
OTHERS += [{"": 1}, {"a": {"b": {}}}, [0] * 5000, nested(40), nested(400), {"weight": math.nan}, {"reward": 3}]
YAML_ONLY: list[Any] = [{1: 2}, {None: None}, {True: 0}, datetime.date(2025, 1, 1), b"\xff\x00", {1.5: 1}, {"a", "b"}]


def odd_value(chance: random.Random, yaml: bool = False) -> Any:
    """Any value that does not belong where it is put."""
    pool = chance.choice([NUMBERS, NUMBERS, TEXTS, TEXTS, OTHERS] + [YAML_ONLY] * yaml)
    return copy.deepcopy(chance.choice(pool))


def near_value(chance: random.Random, value: Any, yaml: bool = False) -> Any:
    """A value of the same type at its limits, or any odd one."""
    if isinstance(value, bool) or chance.random() < 0.4:
        return odd_value(chance, yaml)
    if isinstance(value, int | float):
        if isinstance(value, int) and abs(value) > 2**1000:  # an earlier damage: too large for a float
            return chance.choice([*NUMBERS, -value, value + 1, not value])
        return chance.choice([*NUMBERS, -value, value * 10, value + 1, float(value), str(value), not value])
    if isinstance(value, str):
        return chance.choice([*TEXTS, value + " ", value.upper(), value[:-1], value * 2, [value], value + "\x00"])
    if isinstance(value, list):
        return chance.choice([value[:-1], value + value, [value], value[::-1], dict(enumerate(value)), [None, *value]])
    return odd_value(chance, yaml)


def paths(tree: Any, at: Path = ()) -> Iterator[Path]:
    """The paths of all nodes but the root, parents first."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from paths(value, (*at, key))


def at_path(tree: Any, path: Path) -> Any:
    """The node at a path. Raises KeyError, IndexError or TypeError if there is none."""
    for key in path:
        tree = tree[key]
    return tree


def typo(chance: random.Random, word: str) -> str:
    """The word with one letter doubled, lost, changed or added."""
    place = chance.randrange(len(word)) if word else 0
    letter = chance.choice("abcxyzäß_ -.0")
    return chance.choice([word + "z", word[:place] + letter + word[place:], word[:place] + word[place + 1 :] + "q"])


def change_tree(chance: random.Random, tree: Any, yaml: bool = False) -> tuple[str, Path]:
    """Change one node of a tree in place. Returns the name of the change, and the path of what was changed."""
    found = list(paths(tree))
    if not found:
        return "nothing", ()
    path = chance.choice(found)
    parent, key, value = at_path(tree, path[:-1]), path[-1], at_path(tree, path)
    change = chance.choice(["replace"] * 8 + ["drop", "typo", "typo", "wrap", "unwrap", "copy", "swap", "add"])
    if change == "replace":
        parent[key] = near_value(chance, value, yaml)
    elif change == "drop":
        del parent[key]
    elif change == "typo" and isinstance(parent, dict) and isinstance(key, str):
        wrong = typo(chance, key)
        parent[wrong] = parent.pop(key)
        path = (*path[:-1], wrong)
    elif change == "wrap":
        parent[key] = chance.choice([[value], {"name": value}, {key: value}, [[value]], {"value": value}])
    elif change == "unwrap" and isinstance(value, list | dict) and value:
        parent[key] = next(iter(value.values() if isinstance(value, dict) else value))
    elif change == "add" and isinstance(value, list | dict):
        if isinstance(value, dict):
            value[chance.choice(["", "namee", "x", "name", "weight", "é", "a.b"])] = odd_value(chance, yaml)
        else:
            value.append(odd_value(chance, yaml))
    else:  # another node's value, as it is: what is right there is wrong here
        change = "copy"
        parent[key] = copy.deepcopy(at_path(tree, chance.choice(found)))
    return change, path


def change_bytes(chance: random.Random, content: bytes) -> tuple[str, bytes]:
    """Damage a file's bytes. Returns the name of the damage and the new content."""
    place = chance.randrange(len(content)) if content else 0
    before, after = content[:place], content[place:]
    lines = content.splitlines(keepends=True) or [b""]
    line = chance.randrange(len(lines))
    odd: list[bytes] = [b"\x00", b"\xff", b"\xed\xa0\x80", b"\t", b"\r", b'"', b"'", b"{", b"}", b"[", b",", b":"]
    odd += [b"\n", b"\\", b"\\ud800", b"\\u0000", b"\xe2\x80\xae", b"\xef\xbb\xbf", b"\x85", b"NaN"]
    odd += [b"-", b"1e999", b"9" * 5000]
    kinds = {
        "truncated": lambda: before,
        "emptied": lambda: b"",
        "flipped": lambda: before + bytes([after[0] ^ (1 << chance.randrange(8))]) + after[1:] if after else b"\x01",
        "inserted": lambda: before + chance.choice(odd) + after,
        "cut out": lambda: before + after[chance.randrange(1, 20) :],
        "repeated": lambda: before + after[: chance.randrange(1, 200)] + after,
        "line twice": lambda: b"".join([*lines[: line + 1], *lines[line:]]),
        "line lost": lambda: b"".join([*lines[:line], *lines[line + 1 :]]),
        "lines shuffled": lambda: b"".join(chance.sample(lines, len(lines))),
        "random bytes": lambda: chance.randbytes(chance.randrange(1, 300)),
        "zeros": lambda: before + b"\x00" * len(after),
        "byte order mark": lambda: b"\xef\xbb\xbf" + content,
        "UTF-16": lambda: content.decode("utf-8", "replace").encode("utf-16"),
        "Latin-1": lambda: before + "né".encode("latin-1") + after,
        "CRLF": lambda: content.replace(b"\n", b"\r\n"),
        "no line end": lambda: content.rstrip(b"\n"),
        "deep": lambda: before + b"[" * 20_000 + after,
        "long": lambda: before + b"y" * 300_000 + after,
        "twice": lambda: content + content,
    }
    name = chance.choice(list(kinds))
    return name, kinds[name]()
