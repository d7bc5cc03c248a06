"""The chat template that a recipe gives a model: a file, a text, or none."""

from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from lmgym.core.errors import LmgymError, reason
from lmgym.core.files import read_text

LONGEST = 2**20  # bytes


def use_template(tokenizer: Any, given: str) -> None:
    """Put `policy.template` in place of the tokenizer's own: "none" for no template, a text of Jinja (one with {{ or
    {%), or a file of it. Raises LmgymError for a file that cannot be read, and for what is no template.

    Example: use_template(tokenizer, "{{ messages[0]['content'] }}")"""
    if given == "none":
        tokenizer.chat_template = None
        return
    tokenizer.chat_template = given if _is_jinja(given) else _read(Path(given).expanduser())
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False, add_generation_prompt=True)
    except TemplateSyntaxError as error:
        raise LmgymError(f"policy.template is no chat template: {reason(error)} (line {error.lineno})") from error
    except Exception:  # it may refuse these messages, and is asked again with those of the data
        return


def _is_jinja(text: str) -> bool:
    return "{{" in text or "{%" in text


def _read(path: Path) -> str:
    try:
        text = read_text(path, LONGEST)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a null character
        raise LmgymError(
            f"policy.template: cannot read {path} as UTF-8 text ({error}); give a file, a text of Jinja, or none"
        ) from error
    if not _is_jinja(text):
        raise LmgymError(f"policy.template: {path} is no chat template; it holds neither {{{{ nor {{%")
    return text
