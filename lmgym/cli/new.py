"""`lmgym new`: five questions, and a recipe of your own data with your own model."""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from lmgym.cli.recipes import quick_imports
from lmgym.core.errors import LmgymError, reason
from lmgym.core.registry import suggest
from lmgym.core.visible import visible

EPILOG = """Each question has a key, and key=value answers it: model, data, columns, reward, minutes. With --yes
nothing is asked, and what has no answer gets the default; data= is needed.

  lmgym new my.yaml
  lmgym new my.yaml --yes data=problems.jsonl columns=question,answer reward=final_answer minutes=20"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, answers, and whether to ask."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", metavar="FILE", nargs="?", default="my_recipe.yaml", help="default: my_recipe.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="answers, which are then not asked for")
    parser.add_argument("--yes", action="store_true", help="ask nothing: defaults where there is no key=value")


def run(given: argparse.Namespace) -> int:
    """Ask, write the recipe and say what comes next. The exit status is 130 after Ctrl-C; then nothing is written."""
    if "=" in given.file:  # the first answer, in the place of the file
        given.file, given.overrides = "my_recipe.yaml", [given.file, *given.overrides]
    path = Path(given.file)
    if path.suffix not in (".yaml", ".yml"):
        raise LmgymError(f"{path} is no name of a recipe; write one that ends in .yaml, such as {path}.yaml")
    if path.exists():
        raise LmgymError(f"{path} is there already; name another file")
    from lmgym.config.new_recipe import QUESTIONS, Draft

    answers = _given_answers(given.overrides, list(QUESTIONS))
    draft = Draft()
    try:
        for key, question in QUESTIONS.items():
            default = question.default(draft)
            if key in answers or given.yes:
                _answer(question.take, draft, key, answers.get(key, default))
                continue
            print(question.text(draft))
            _ask(question.take, draft, default)
    except KeyboardInterrupt:
        print("\nlmgym: stopped; nothing was written", file=sys.stderr)
        return 130
    with quick_imports():
        from lmgym.config.build import build_config
        from lmgym.training.setup import load_data

    config = build_config(draft.tree())
    load_data(config)  # refuses what no prompt can be made of
    draft.write(path)
    print(f"{path} trains {visible(draft.model)} on {visible(draft.data)}. Next:\n")
    print(f"  lmgym check {shlex.quote(str(path))}     what is wrong with it, and how long a step takes")
    print(f"  lmgym train {shlex.quote(str(path))}")
    return 0


def _given_answers(words: list[str], keys: list[str]) -> dict[str, str]:
    """The answers on the command line, by key."""
    answers = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in keys:
            raise LmgymError(f"'{word}' answers no question; write key=value. {suggest(key, keys)}")
        answers[key] = value
    return answers


def _answer(take: Callable[..., None], draft: object, key: str, answer: str | None) -> None:
    """Take an answer that nobody can be asked for again."""
    if answer is None:
        raise LmgymError(f"{key}= is needed, since it has no default: lmgym new --yes {key}=...")
    try:
        _take(take, draft, answer)
    except LmgymError as error:
        raise LmgymError(f"{key}={answer}: {error}") from error


def _take(take: Callable[..., None], draft: object, answer: str) -> None:
    """Take an answer. Raises LmgymError for what it cannot be, such as a path too long for any file."""
    try:
        take(draft, answer)
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise LmgymError(f"it cannot be read: {getattr(error, 'strerror', None) or reason(error)}") from error


def _ask(take: Callable[..., None], draft: object, default: str | None) -> None:
    """Ask until there is an answer that can be taken; an empty one is the default."""
    while True:
        print(f"  [{visible(default)}] " if default is not None else "  ", end="", flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise LmgymError("an answer is not UTF-8; nothing was written") from error
        if not line:
            raise LmgymError("the input ended before the last question; nothing was written")
        answer = line.strip() or default
        try:
            if answer is None:
                raise LmgymError("this one has no default")
            return _take(take, draft, answer)
        except LmgymError as error:
            print(f"  {visible(str(error))}")
