"""A recipe without its secrets, for what others get to see: fingerprints, model cards, trackers.

A key belongs into an environment variable, whose name the recipe has (`key_variable`, `variables`). But a recipe can
hold anything: arguments of somebody's environment, or of a program."""

import hashlib
import re
from typing import Any

NAME = re.compile(
    r"(api|access|auth|private|secret|client|bearer|hf)[ _-]?(key|token)s?$"
    r"|(secret|passw(or)?d|passphrase|credential|authori[sz]ation)s?$|^token$",
    re.IGNORECASE,
)
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*_(KEY|TOKEN|SECRET|PASSWORD)S?")  # of an environment
OPTION = re.compile(r"(--?[\w-]*(?:key|token|secret|passw(?:or)?d))(?:=(.+))?", re.IGNORECASE)  # of a program
VALUE = re.compile(
    r"\b(?:sk|pk|rk)[-_][\w-]{16,}|\bhf_\w{16,}|\bgh[a-z]_\w{16,}|\bgithub_pat_\w{16,}|\bxox[a-z]-[\w-]{10,}"
    r"|\bAKIA[0-9A-Z]{16}\b|(?<=Bearer )[^\s(]\S*|(?<=//)[^/\s@:]+:[^/\s@]+(?=@)"
)
DONE = re.compile(r"\(redacted [0-9a-f]{4}\)")


def redacted(tree: Any) -> Any:
    """The tree with each text that is a secret by its key, by the option before it or by its own form as
    "(redacted 4f2a)". The digits are of its SHA-256: enough to see a change, too few to find the secret by.

    Example:
        >>> redacted({"api_key": "abc", "tools": [{"mcp": ["search", "--token=abc"]}], "steps": 5})
        {'api_key': '(redacted ba78)', 'tools': [{'mcp': ['search', '--token=(redacted ba78)']}], 'steps': 5}
    """
    if isinstance(tree, dict):
        if "mcp" in tree and isinstance(tree.get("variables"), dict):  # of an older version: now they are names alone
            tree = {**tree, "variables": list(tree["variables"])}
        return {key: _of_key(str(key), value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_of_option(before, value) for before, value in zip(["", *tree], tree, strict=False)]
    return VALUE.sub(lambda found: _digest(found[0]), tree) if isinstance(tree, str) else tree


def _of_key(key: str, value: Any) -> Any:
    hides = isinstance(value, str) and value and (NAME.search(key) or VARIABLE.fullmatch(key))
    return _digest(value) if hides else redacted(value)


def _of_option(before: Any, value: Any) -> Any:
    """A value of a list; `before` is the one before it."""
    if not isinstance(value, str):
        return redacted(value)
    option = OPTION.fullmatch(value)
    if option:
        return f"{option[1]}={_digest(option[2])}" if option[2] else value
    after = OPTION.fullmatch(before) if isinstance(before, str) else None
    return _digest(value) if after and not after[2] else redacted(value)


def _digest(secret: str) -> str:
    known = DONE.fullmatch(secret)
    return secret if known else f"(redacted {hashlib.sha256(secret.encode()).hexdigest()[:4]})"
