"""The bytes that each token of a vocabulary writes, so that texts of two tokenizers can be laid side by side."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from lmgym.core.errors import LmgymError
from lmgym.text.control import bare_ids, control_tokens

TRIED = "Ärger: 3+14=17, naïve 東京 🙂\n\tdef f(x): return x**2"  # its tokens' bytes must be its own
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece names the token of a byte
SPACE = "\u2581"  # and how it writes a space


class TokenBytes(NamedTuple):
    """What the tokens of a vocabulary write: `table[id]` is None for control tokens and for ids without a token. `ids`
    is the other direction; of several tokens with the same bytes it has the one that a text becomes.

    Example: of builtin:bytes, whose ids begin behind three control tokens:
        table  [None, None, None, b"!", b'"', ...]
        ids    {b"!": 3, b'"': 4, ...}"""

    table: list[bytes | None]
    ids: dict[bytes, int]

    def ends(self, ids: list[int]) -> list[int]:
        """Where the bytes of each token end, counted from the first one's beginning. Control tokens write none.

        Example: with the table of builtin:bytes, ends([3, 2, 4]) -> [1, 1, 2]"""
        ends, end = [], 0
        for id in ids:
            end += len(self.of(id))
            ends.append(end)
        return ends

    def of(self, id: int) -> bytes:
        """The bytes of a token; none for a control token and an id that the tokenizer does not have."""
        return (self.table[id] if id < len(self.table) else None) or b""


def token_bytes(tokenizer: Any, name: str) -> TokenBytes:
    """The bytes of each token of a byte-level tokenizer (GPT-2's kind, Radford et al. 2019) or of SentencePiece's kind
    (Kudo and Richardson, arXiv 1808.06226).

    Raises LmgymError, with the model's `name`, for another kind, and where the tokens of a short text do not write that
    text: a tokenizer that makes letters small, for example.

    Example: token_bytes(builtin_tokenizer("builtin:bytes"), "builtin:tiny").table[3] -> b"!" """
    spell = _speller(tokenizer)
    if spell is None:
        raise LmgymError(
            f"{name}: its tokenizer is neither byte-level nor of SentencePiece's kind, so the bytes of its tokens are "
            "not known, and texts of two tokenizers cannot be laid side by side; take another model"
        )
    vocabulary, control = tokenizer.get_vocab(), control_tokens(tokenizer).ids
    table: list[bytes | None] = [None] * (max(vocabulary.values()) + 1)
    ids: dict[bytes, int] = {}
    # The tokens of single bytes come last: a text becomes them only where it has no other token.
    for piece, id in sorted(vocabulary.items(), key=lambda pair: (BYTE.fullmatch(pair[0]) is not None, pair[1])):
        if id not in control:
            table[id] = written = spell(piece)
            if written:
                ids.setdefault(written, id)
    found = TokenBytes(table, ids)
    if b"".join(map(found.of, bare_ids(tokenizer, TRIED))).removeprefix(b" ") != TRIED.encode():
        raise LmgymError(
            f"{name}: its tokenizer changes a text before it cuts it into tokens (letters made small, accents or "
            "spaces lost), so it cannot be laid beside another tokenizer's; take another model"
        )
    return found


def _speller(tokenizer: Any) -> Callable[[str], bytes] | None:
    """From a token's name in the vocabulary to its bytes; None for a kind of tokenizer that is not known here."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return None
    tree = json.loads(decoder.__getstate__())
    parts = {part["type"]: part for part in tree.get("decoders", [tree])}
    if "ByteLevel" in parts:
        return _byte_level
    replaced = parts.get("Replace", {}).get("pattern", {}).get("String")
    return _sentence_piece if "Metaspace" in parts or replaced == SPACE else None


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's letter for each byte: itself where it can be printed, else the next of the letters from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + n): byte for n, byte in enumerate(others)}


ALPHABET = _byte_level_alphabet()


def _byte_level(piece: str) -> bytes:
    if all(letter in ALPHABET for letter in piece):
        return bytes(ALPHABET[letter] for letter in piece)
    return piece.encode()  # an added token stands for its own text


def _sentence_piece(piece: str) -> bytes:
    if byte := BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace(SPACE, " ").encode()
