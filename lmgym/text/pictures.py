"""Pictures among the tokens of a text. A picture is several tokens of its own: which ones, the model alone knows, and
tells it here (`read_pictures`). Ids of its pieces are above the vocabulary (pictures/ids.py), so a tokenizer cannot
decode them. Imports no torch."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.pictures.ids import is_piece, picture_of
from lmgym.types import PICTURE

KEPT = 4096  # pictures whose ids are remembered: a group shares its prompt, and an epoch comes back to it
READER = "lmgym_reads_pictures"  # the names under which a tokenizer carries its reader, and the text around one
AROUND = "lmgym_around_pictures"


def read_pictures(tokenizer: Any, ids_of: Callable[[str], list[int]], around: str = "") -> None:
    """From now on the texts of this tokenizer may hold pictures: `ids_of` gives the token ids of one by its digest.
    `around` is text that the model's processor writes on both sides of one, such as line breaks, which may be one token
    with line breaks of the words beside it."""
    known: dict[str, list[int]] = {}

    def read(digest: str) -> list[int]:
        if digest not in known:
            if len(known) == KEPT:
                known.clear()
            known[digest] = ids_of(digest)
        return list(known[digest])

    vars(tokenizer)[READER], vars(tokenizer)[AROUND] = read, around  # with it, and no longer than it


def reads_pictures(tokenizer: Any) -> bool:
    """True if the model of this tokenizer sees pictures."""
    return READER in vars(tokenizer)


def around_picture(tokenizer: Any) -> str:
    """The text that belongs on both sides of a picture: not part of `picture_ids`, but of the words beside them."""
    return str(vars(tokenizer).get(AROUND, ""))


def picture_ids(tokenizer: Any, digest: str) -> list[int]:
    """The token ids of a picture, with the marks that the model's own processor puts around it. Raises LmgymError for a
    model that sees none."""
    if not reads_pictures(tokenizer):
        raise LmgymError(
            "a prompt holds a picture, and the model sees none: take a vision-language model (policy.model; "
            "docs/vision.md), or leave pictures out (task.images: null)"
        )
    ids: list[int] = vars(tokenizer)[READER](digest)
    return ids


def decoded(tokenizer: Any, ids: Sequence[int], **options: Any) -> str:
    """The text of some ids; the pieces of a picture that follow each other are one character PICTURE. `options` are
    those of the tokenizer's `decode`."""
    if not any(map(is_piece, ids)):
        return str(tokenizer.decode(list(ids), **options))
    groups = groupby(ids, lambda id: picture_of(id)[0] if is_piece(id) else "")
    return "".join(PICTURE if name else str(tokenizer.decode(list(group), **options)) for name, group in groups)
