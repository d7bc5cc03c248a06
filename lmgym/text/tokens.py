"""The text of each single token, so that a page can colour and count tokens where they stand in a text."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from lmgym.text.pictures import decoded

CUT = "\ufffd"  # what a decoder writes for bytes that are no whole character
LONGEST_CHARACTER = 4  # bytes in UTF-8, and so tokens


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token; joined, they are the decoded text with its control tokens.

    A character that several tokens spell together belongs to the last of them; the others get "". Of a picture the
    first piece is the character PICTURE, and the others are "". Any object with the `decode` of a tokenizer will do, of
    the library tokenizers or of transformers; the time is linear in the length.

    Example: in bytes "é" is two tokens: token_texts(builtin_tokenizer("builtin:bytes"), [68, 130, 105, 69])
    -> ['b', '', 'é', 'c']"""
    ids = list(ids)

    def decode(part: Sequence[int]) -> str:
        return decoded(tokenizer, part, skip_special_tokens=False)

    # Short windows are decoded, since decoding every beginning of the ids would take quadratic time. Some decoders drop
    # the space before their first token, so a window begins with known tokens, whose own text is taken off again.
    text = decode(ids)
    ends: list[int] = []  # where each token's text ends
    known = start = 0  # the known tokens are ids[known:start]; the window's own ones begin at `start`
    base, place = "", 0  # the text of the known tokens, and where it ends
    for index in range(len(ids)):
        seen = decode(ids[known : index + 1])[len(base) :]
        end = place + _common(seen, text[place : place + len(seen)])
        ends.append(max(end, ends[-1] if ends else 0))
        # The next window begins here if the decoded piece equals the text at this place, and its last bytes are whole
        # characters. In some decoders a token changes the text before it; then the window grows until it fits.
        whole = not seen.endswith(CUT) or index - start >= 2 * LONGEST_CHARACTER
        if whole and end == place + len(seen):
            known, start, place = start, index + 1, end
            base = decode(ids[known:start])
    if ends:
        ends[-1] = len(text)
    return [text[begin:end] for begin, end in pairwise([0, *ends])]


def _common(one: str, other: str) -> int:
    """The length of the beginning that two texts share."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(place for place in range(shorter) if one[place] != other[place])
