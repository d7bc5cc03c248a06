"""Docstrings as Markdown, an extension of griffe: they are plain text, in which * and [ mean only themselves."""

import ast
import re
from inspect import cleandoc
from textwrap import dedent, indent
from typing import Any

import griffe

CODE = re.compile(r"(`[^`]*`)")
FORMULA = re.compile(r" |[^.]{1,24} = ")  # a line of a formula: it is indented, or names what it is about


def as_markdown(docstring: str) -> str:
    """The docstring with its examples as sections, its code as code, and all else as text.

    Example: as_markdown("x[0][1]") gives the same with a backslash before each bracket.
    """
    paragraphs = docstring.split("\n\n")
    return "\n\n".join(section(text[8:]) if text.startswith("Example:") else prose(text) for text in paragraphs)


def section(text: str) -> str:
    """An example: prose, code, or prose and a session of Python."""
    lines = cleandoc(text).split("\n")
    place = next((place for place, line in enumerate(lines) if line.strip().startswith(">>>")), len(lines))
    said, session = " ".join(line.strip() for line in lines[:place]), dedent("\n".join(lines[place:]))
    if is_code(said.partition(" -> ")[0]):
        said = fenced(said, "python")
    parts = [said if "```" in said else escaped(said), fenced(session, "pycon") if session else ""]
    return "Example:\n" + indent("\n\n".join(part for part in parts if part), "    ")


def fenced(code: str, language: str) -> str:
    """A block of code."""
    return f"```{language}\n{code}\n```"


def is_code(text: str) -> bool:
    """Whether a text is a section of a recipe, or a call."""
    if text.startswith("{") and text.endswith("}"):
        return True
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    return len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Call | ast.Subscript)


def prose(text: str) -> str:
    """Text in which only `code` and the bullets of a list mean something; indented lines are code."""
    lines = text.split("\n")
    if lines[0].startswith(">>>"):
        return fenced(text, "pycon")
    if len(lines) > 1 and all(FORMULA.match(line) for line in lines):
        return fenced(text, "text")
    return "\n".join(line if line.startswith("    ") else escaped(line) for line in lines)


def escaped(line: str) -> str:
    """One line without what Markdown would read as a link, emphasis or HTML."""
    bullet, text = (line[:2], line[2:]) if line.startswith("* ") else ("", line)
    parts = CODE.split(text)
    return bullet + "".join(
        part if place % 2 else re.sub(r"([\[\]*<])", r"\\\1", part) for place, part in enumerate(parts)
    )


class PlainDocstrings(griffe.Extension):
    """What mkdocstrings loads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of each object as it is loaded."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
