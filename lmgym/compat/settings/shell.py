"""The commands of a shell script, read as text: words with their lines, variables and sums put in. Nothing is run."""

import ast
import operator
import re
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lmgym.core.errors import LmgymError

LONGEST = 2**17  # characters of a value; variables may stand in each other
SUMS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
KEYWORDS = {"then", "do", "else", "export", "readonly", "local", "declare", "{", "!", "exec"}
DEPTH = {"if": 1, "case": 1, "for": 1, "while": 1, "until": 1, "fi": -1, "esac": -1, "done": -1}
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
PLAIN = r"[^()\#]|(?<=\s)\#[^\n]*|(?<!\s)\#"  # inside of parentheses, comments too
PARENTHESES = rf"\((?:{PLAIN}|\((?:{PLAIN}|\((?:{PLAIN}|\((?:{PLAIN})*+\))*+\))*+\))*+\)"  # *+: never retried
BRACES = r"\{(?:[^{}]|\{[^{}]*+\})*+\}"
TOKEN = re.compile(
    rf"""(?P<blank>[ \t\r]|\\\n|(?<!\S)\#[^\n]*)|(?P<heredoc><<-?[ ]*['"]?(?P<mark>\w+)['"]?)|(?P<end>[\n;&|])
    |(?P<word>(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$?{PARENTHESES}|\${BRACES}|[^\s;&|])++)|.""",
    re.X | re.S,
)
PIECE = re.compile(  # of a word: what is quoted, and what stands for something else
    rf"""\\(?P<plain>.)|'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|\$\((?P<sum>{PARENTHESES})\)
    |\$\((?P<command>(?!\()[^()]*(?:\([^()]*\)[^()]*)*)\)|\${{(?P<name>\w+)(?:\[[@*]\])?(?::?[-=](?P<default>(?:[^{{}}]|\{{[^{{}}]*\}})*))?}}
    |\$(?P<short>\w+|[@*])""",
    re.X | re.S,
)


class Word(NamedTuple):
    """A word of a command. Example: Word("--num_generations", 12)"""

    text: str
    line: int


class Script:
    """The commands of a script. `notes` says what depends on more than the text.

    Example:
        >>> Script("N=2\\npython a.py --n $((N * 4))").commands[0][-1]
        Word(text='8', line=2)
    """

    def __init__(self, text: str, variables: dict[str, str] | None = None, first: int = 1) -> None:
        self.variables = {"HOME": "~", "@": "", "*": "", **(variables or {})}
        self.lists: dict[str, list[Word]] = {}
        self.commands: list[list[Word]] = []
        self.notes: list[str] = []
        self._depth = 0
        for raw in raw_commands(text, first):
            self._read(raw)

    def _read(self, raw: list[Word]) -> None:
        """One command: set the variables that it assigns, or keep it."""
        while raw and raw[0].text in KEYWORDS:
            raw = raw[1:]
        self._depth += DEPTH.get(raw[0].text, 0) if raw else 0
        if len(raw) > 2 and raw[0].text == "read" and raw[-1].text[0] == "\n":  # read -r -d '' name <<EOF
            self.lists[raw[-2].text] = self._all(raw_commands(raw[-1].text, raw[-1].line - 1))
            return
        while raw and (found := ASSIGNED.match(raw[0].text)):
            self._assign(found[1], found[2], raw[0].text[found.end() :], raw[0].line)
            raw = raw[1:]
        words = self._all([raw])
        self.commands += [words] if words else []
        for word in words[1:]:
            if " -m " in word.text:  # bash -c "... python -m ..."
                inner = Script(word.text, self.variables, word.line)
                self.commands, self.notes = self.commands + inner.commands, self.notes + inner.notes

    def _assign(self, name: str, added: str, raw: str, line: int) -> None:
        words = self._words(Word(raw, line))
        if raw.startswith("("):
            self.lists[name] = (self.lists.get(name, []) if added else []) + words
        value = " ".join(word.text for word in words)
        if self._depth > 0:
            self.notes.append(f"line {line}: {name} depends on a condition of the script; read as {value[:60]!r}")
        self.variables[name] = f"{self.variables.get(name, '')} {value}" if added else value

    def _all(self, commands: Iterator[list[Word]] | list[list[Word]]) -> list[Word]:
        return [new for words in commands for word in words if word.text[0] != "\n" for new in self._words(word)]

    def _words(self, word: Word) -> list[Word]:
        """What one word of the script becomes: a list or a variable may hold several."""
        raw, line = word
        if raw.startswith("(") and raw.endswith(")"):
            return self._all(raw_commands(raw[1:-1], line))
        found = re.fullmatch(r"\$\{?([\w@*]+)(\[[@*]\])?\}?", raw.strip('"'))
        if found and found[1] in self.lists:
            return self.lists[found[1]]
        known = self.variables.get(found[1]) if found else None
        if known is not None and raw[0] != '"' and "$(" not in known:
            return [Word(text, line) for text in known.split()]
        return [Word(self.value(raw), line)]

    def value(self, raw: str, quoted: bool = False) -> str:
        """A word without its quotes, variables and sums put in. What only a shell knows stays as it is written."""

        def put_in(found: re.Match[str]) -> str:
            part = found.groupdict()
            if part["plain"] is not None:
                return part["plain"].strip("\n") if not quoted or part["plain"] in '"\\$`\n' else found[0]
            if part["single"] is not None:
                return f"'{self.value(part['single'], True)}'" if quoted else part["single"]
            if part["double"] is not None:
                return self.value(part["double"], True)
            if part["sum"] is not None:
                return self._sum(part["sum"]) or found[0]
            known = self.variables.get(part["name"] or part["short"] or "")
            return (self.value(part["default"]) if part["default"] and not known else known) or (
                found[0] if known is None else ""
            )

        text = PIECE.sub(put_in, raw)
        if len(text) > LONGEST:
            raise LmgymError(f"a value of the script has more than {LONGEST:,} characters")
        return text

    def _sum(self, text: str) -> str | None:
        """`(1024 * 8)` as a number; None for anything but a sum of numbers."""
        known = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", lambda found: self.variables.get(found[1], found[0]), text)
        try:
            return str(number(ast.parse(known.replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None


def number(node: ast.expr) -> int | float:
    """The value of a sum. Raises ValueError for anything else. Example: number(ast.parse("2*4").body[0].value) -> 8"""
    value: object = None
    if isinstance(node, ast.BinOp) and type(node.op) in SUMS:
        value = SUMS[type(node.op)](number(node.left), number(node.right))
    elif isinstance(node, ast.Constant):
        value = node.value
    if type(value) not in (int, float) or not abs(value) < 1e15:  # type: ignore[arg-type]
        raise ValueError("this is no sum of numbers")
    return value  # type: ignore[return-value]


def raw_commands(text: str, first: int = 1) -> Iterator[list[Word]]:
    """The commands of a script as their words stand there, quotes included. The text of a <<EOF is a word that begins
    with a line end."""
    ends, at, waiting, words = [found.start() for found in re.finditer("\n", text)], 0, "", list[Word]()
    while found := TOKEN.match(text, at):
        line, at = first + bisect(ends, at - 1), found.end()
        if found["mark"]:
            waiting = found["mark"]
        elif found["word"]:
            words.append(Word(found["word"], line))
        elif found["end"] and waiting and found["end"] == "\n":
            close = re.compile(rf"^\t*{waiting}$", re.M).search(text, at)
            words.append(Word("\n" + text[at : close.start() if close else len(text)], line + 1))
            at, waiting = close.end() if close else len(text), ""
        elif found["end"] and words and not waiting:
            yield words
            words = []
    if words:
        yield words
