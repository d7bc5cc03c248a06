"""Pages of source files and folders, which the documentation links to: HTML with coloured code, without the frame of
the site, whose generator would take longer for these hundreds of pages than for all others."""

import ast
from html import escape
from pathlib import Path, PurePosixPath

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound

FOLDER = "source"
SHOWN = (".py", ".yaml", ".toml", ".json")  # of a folder
COLOURS = {"light": "default", "dark": "github-dark"}  # the reader's choice: a style of pygments
PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title} - lmgym</title>
<link rel="stylesheet" href="{top}source.css"></head>
<body><p><a href="{top}index.html">lmgym</a></p>
<h1>{title}</h1>
{body}
</body>
</html>
"""
STYLE = """:root { color-scheme: light dark; }
body { font-family: sans-serif; margin: 1rem auto; max-width: 75rem; padding: 0 1rem; line-height: 1.5; }
pre { font-size: 0.85rem; padding: 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def place(path: str, folder: bool) -> str:
    """Where a source file or a folder is shown on the site.

    Example: place("lmgym/batch.py", folder=False) -> "source/lmgym/batch.py.html"
    """
    return f"{FOLDER}/{path}/index.html" if folder else f"{FOLDER}/{path}.html"


def page(root: Path, path: str) -> str:
    """The HTML of a source file, or of a folder: a list of its files with the first line of each docstring."""
    if (root / path).is_dir():
        rows = [f'<li><a href="{file.name}.html">{file.name}</a>: {summary(file)}</li>' for file in files(root / path)]
        body = "<ul>\n" + "\n".join(rows) + "\n</ul>"
    else:
        body = coloured((root / path).read_text(encoding="utf-8"), path)
    depth = len(PurePosixPath(place(path, (root / path).is_dir())).parents) - 1
    return PAGE.format(title=escape(path), top="../" * depth, body=body)


def files(folder: Path) -> list[Path]:
    """The files of a folder that its page names, in order."""
    return sorted(file for file in folder.iterdir() if file.suffix in SHOWN)


def coloured(text: str, path: str) -> str:
    """Code as HTML, in the colours of the language that the file's name says; without colours if it says none."""
    try:
        lexer = get_lexer_for_filename(path)
    except ClassNotFound:
        lexer = TextLexer()
    return str(highlight(text, lexer, HtmlFormatter(cssclass="code", wrapcode=True)))


def style() -> str:
    """The style sheet of these pages."""
    parts = [
        f"@media (prefers-color-scheme: {scheme}) {{\n{HtmlFormatter(style=name, cssclass='code').get_style_defs()}\n}}"
        for scheme, name in COLOURS.items()
    ]
    return STYLE + "\n".join(parts) + "\n"


def summary(file: Path) -> str:
    """The first line of a Python file's docstring as HTML; of another file its kind."""
    if file.suffix != ".py":
        return file.suffix.removeprefix(".").upper()
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "no docstring"
    return escape(docstring.split("\n")[0])
