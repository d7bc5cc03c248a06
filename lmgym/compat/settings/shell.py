"""The commands of a shell script, read as text: words with their lines, variables and sums put in. Nothing is run."""

import ast
import operator
import re
from bisect import bisect
from collections.abc import Iterator
from typing import NamedTuple

from lmgym.core.errors import LmgymError

LONGEST = 2**17  # characters of a value; variables may stand in each other
MOST = 10**15  # of a sum
SUMS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
KEYWORDS = {"then", "do", "else", "export", "readonly", "local", "declare", "typeset", "{", "!", "time", "exec", "nohup"}
OPENS, CLOSES = {"if", "case", "for", "while", "until"}, {"fi", "esac", "done"}
CLOSING = {"(": ")", "{": "}"}
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
NAME = re.compile(r"(\w+)(?:\[[@*]\])?(?:(:?[-=])(.*))?", re.S)


class Word(NamedTuple):
    """A word of a command. Example: Word("--num_generations", 12)"""

    text: str
    line: int


class Script:
    """The commands of a script. `notes` says what depends on more than the text.

    Example:
        >>> Script("N=2\\npython a.py --n $((N * 4))").commands
        [[Word(text='python', line=2), Word(text='a.py', line=2), Word(text='--n', line=2), Word(text='8', line=2)]]
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
        if raw and raw[0].text in OPENS | CLOSES:
            self._depth += 1 if raw[0].text in OPENS else -1
        body = next((word.text[1:] for word in raw if word.text.startswith("\n")), None)
        if raw and raw[0].text == "read" and body is not None:  # read -r -d '' name <<EOF
            inner = [word for words in raw_commands(body, raw[-1].line) for word in words]
            self.lists[raw[-2].text] = [new for word in inner for new in self._words(*word)]
            return
        while raw and (found := ASSIGNED.match(raw[0].text)):
            name, added = found.groups()
            words = self._words(raw[0].text[found.end() :], raw[0].line)
            value = " ".join(word.text for word in words)
            if raw[0].text[found.end() :].startswith("("):
                self.lists[name] = (self.lists.get(name, []) if added else []) + words
            if self._depth > 0:
                self.notes.append(f"line {raw[0].line}: {name} depends on a condition of the script; read as {value!r}")
            self.variables[name] = f"{self.variables.get(name, '')} {value}" if added else value
            raw = raw[1:]
        words = [new for word in raw if word.text[:1] != "\n" for new in self._words(*word)]
        self.commands += [words] if words else []
        for word in words:
            if " -m " in word.text and len(words) > 1:  # bash -c "... python -m ..."
                inner = Script(word.text, self.variables, word.line)
                self.commands, self.notes = self.commands + inner.commands, self.notes + inner.notes

    def _words(self, raw: str, line: int) -> list[Word]:
        """What one word of the script becomes: a variable or a list in it may hold several."""
        bare = raw.strip('"')
        if raw[:1] == "(" and raw[-1:] == ")":
            inner = [word for words in raw_commands(raw[1:-1], line) for word in words]
            return [new for word in inner for new in self._words(*word)]
        found = re.fullmatch(r"\$\{?([\w@*]+)(\[[@*]\])?\}?", bare)
        if found and found[1] in self.lists:
            return self.lists[found[1]]
        if found and raw == bare and found[1] in self.variables:
            return [Word(self._value(text), line) for words in raw_commands(self.variables[found[1]]) for text, _ in words]
        return [Word(self._value(raw), line)]

    def _value(self, raw: str, quoted: bool = False) -> str:
        """A word without its quotes, variables and sums put in. What only a shell knows stays as it is written."""
        out, at = [], 0
        while at < len(raw):
            letter = raw[at]
            end = at + 1
            if letter == "\\" and not (quoted and raw[end : end + 1] not in '"\\$`\n'):
                letter, end = raw[end : end + 1].strip("\n"), end + 1
            elif letter == "'" and not quoted:
                end = end_of(raw, at)
                letter = raw[at + 1 : end - 1]
            elif letter == '"':
                end = end_of(raw, at) if not quoted else end
                letter = self._value(raw[at + 1 : end - 1], quoted=True) if not quoted else letter
            elif letter == "$":
                letter, end = self._variable(raw, at)
            out.append(letter)
            at = end
        value = "".join(out)
        if len(value) > LONGEST:
            raise LmgymError(f"a value of the script has more than {LONGEST:,} characters")
        return value

    def _variable(self, raw: str, at: int) -> tuple[str, int]:
        """What stands for the $... at a place, and where it ends."""
        if raw.startswith("$((", at):
            end = end_of(raw, at + 1)
            return self._sum(raw[at:end]), end
        if raw.startswith(("$(", "${"), at):
            end = end_of(raw, at + 1)
            found = NAME.fullmatch(raw[at + 2 : end - 1]) if raw[at + 1] == "{" else None
            if not found:
                return raw[at:end], end
            name, sign, default = found.groups()
            value = self.variables.get(name)
            return (self._value(default) if value in (None, "") and sign else raw[at:end] if value is None else value), end
        found = re.compile(r"\$(\w+|[@*])").match(raw, at)
        return (self.variables.get(found[1], found[0]), found.end()) if found else ("$", at + 1)

    def _sum(self, raw: str) -> str:
        """`$((1024 * 8))` as a number; as it is written, if it is not a sum of numbers."""
        known = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", lambda found: self.variables.get(found[1], found[0]), raw[3:-2])
        try:
            return str(_number(ast.parse(known.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, TypeError, RecursionError, MemoryError):
            return raw


def _number(node: ast.expr) -> int:
    """The value of a sum. Raises ValueError for anything else."""
    value: object = None
    if isinstance(node, ast.BinOp) and type(node.op) in SUMS:
        value = SUMS[type(node.op)](_number(node.left), _number(node.right))
    elif isinstance(node, ast.Constant):
        value = node.value
    if type(value) is not int or abs(value) > MOST:
        raise ValueError("this is no sum of whole numbers")
    return value


def raw_commands(text: str, first: int = 1) -> Iterator[list[Word]]:
    """The commands of a script as their words stand there, quotes included. The text of a <<EOF is a word that begins
    with a line end."""
    ends = [found.start() for found in re.finditer("\n", text)]
    at, words, waiting = 0, [], ""
    while at < len(text):
        letter, line = text[at], first + bisect(ends, at - 1)
        if text.startswith("\\\n", at):
            at += 2
        elif letter in " \t\r":
            at += 1
        elif letter == "#":
            at = (text + "\n").index("\n", at)
        elif found := HEREDOC.match(text, at):
            waiting, at = found[2], found.end()
        elif letter in "\n;&|":
            at += 1
            if waiting and letter == "\n":
                found = re.compile(rf"^\t*{waiting}$", re.M).search(text, at)
                words.append(Word("\n" + text[at : found.start() if found else len(text)], line))
                waiting, at = "", found.end() if found else len(text)
            elif not waiting and words:
                yield words
                words = []
        else:
            end = end_of_word(text, at)
            words.append(Word(text[at:end], line))
            at = end
    if words:
        yield words


def end_of_word(text: str, at: int) -> int:
    """Where the word that begins at a place ends."""
    start = at
    while at < len(text) and text[at] not in " \t\r\n;&|":
        if text[at] == "\\":
            at += 2 if text[at + 1 : at + 2] != "\n" else 0
            if text[at : at + 1] == "\\":
                break
        elif text[at] in "'\"" or (text[at] == "$" and text[at + 1 : at + 2] in ("(", "{")):
            at = end_of(text, at + (text[at] == "$"))
        elif text[at] == "(" and text[at - 1 : at] == "=":
            at = end_of(text, at)
        else:
            at += 1
    return max(min(at, len(text)), start + 1)


def end_of(text: str, at: int) -> int:
    """Where what opens at a place (a quote, a bracket) has closed; the end of the text, if it does not."""
    opened = text[at]
    at += 1
    while at < len(text):
        if text[at] == "\\" and opened != "'":
            at += 2
            continue
        if text[at] == CLOSING.get(opened, opened):
            return at + 1
        if opened in CLOSING and text[at] == "#" and text[at - 1].isspace():  # a comment inside of a list
            at = (text + "\n").index("\n", at)
        elif (opened in CLOSING and text[at] in "'\"({") or (opened == '"' and text[at - 1 : at + 1] in ("$(", "${")):
            at = end_of(text, at)
        else:
            at += 1
    return len(text)

