"""Text never becomes control tokens: only a chat template, and the recipe's own texts, can make them.

Control tokens are the tokenizer's special tokens, and those of its other added tokens that the chat template writes,
such as "<think>". A data set, an environment, a tool, a user or a model may spell one; its name then becomes the tokens
of its characters. A text that spells none gets the ids that the tokenizer always gives.

Two characters apart, "<" and "eos>" are no end mark: where a tokenizer reads a name as a control token whatever it is
told, the name is tokenized in two pieces. Ids decide, not spellings, since a tokenizer may normalise a text first."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from lmgym.text.pictures import around_picture, picture_ids
from lmgym.types import around_pictures, pictures_of

Span = tuple[int, int]  # (begin, end) in a text
SEEN = 1024  # texts whose names of control tokens are remembered: a conversation is rendered again at each turn


@dataclass(frozen=True, eq=False)
class ControlTokens:
    """The ids that a text may not become, and a pattern of their names.

    The unknown token counts only where a text holds its name: it also stands for characters that have no token."""

    ids: frozenset[int]
    names: re.Pattern[str]
    unknown: tuple[int | None, str]  # id and name of the unknown token
    seen: dict[str, tuple[Span, ...]] = field(default_factory=dict)

    def made_of(self, text: str, ids: Sequence[int]) -> bool:
        """True if control tokens are among the ids of a text."""
        if self.ids.isdisjoint(ids):
            return False
        made, (unknown, name) = self.ids.intersection(ids), self.unknown
        return made != {unknown} or name in text


def text_ids(tokenizer: Any, text: str, continued: bool = False, target: bool = False) -> list[int]:
    """Token ids of a text, none of them a control token, without special tokens around it.

    `continued`: the text goes on behind other tokens, so a tokenizer that puts a space before a text must not.
    `target`: it is an answer of an encoder-decoder, for which some tokenizers have other rules.

    Example: with a tokenizer of bytes "<eos>" becomes five tokens:
    text_ids(builtin_tokenizer("builtin:bytes"), "<eos>") -> [63, 104, 114, 118, 65]"""
    control = control_tokens(tokenizer)

    def pieces(text: str, later: bool) -> list[int]:
        # 1. As the tokenizer reads it, then as it does when told to read no special token.
        for options in ({}, {"split_special_tokens": True}):
            ids = bare_ids(tokenizer, text, later, target, **options)
            if not control.made_of(text, ids):
                return ids
        # 2. Cut each name behind its first character; where none is spelled out, cut in the middle.
        if len(text) == 1:
            return ids
        cuts = [match.start() + 1 for match in control.names.finditer(text) if len(match[0]) > 1]
        edges = [0, *(cuts or [len(text) // 2]), len(text)]
        spans = enumerate(pairwise(edges))
        return [id for number, (begin, end) in spans for id in pieces(text[begin:end], later or number > 0)]

    return pieces(text, continued) if text else []


def bare_ids(tokenizer: Any, text: str, later: bool = False, target: bool = False, **options: Any) -> list[int]:
    """Token ids of a text as the tokenizer reads it, control tokens included, without special tokens around it.
    `later`: without the space that some tokenizers add in front; an empty text has no ids."""

    def read(text: str) -> list[int]:
        given = {"text_target": text} if target else {"text": text}
        return list(tokenizer(**given, add_special_tokens=False, verbose=False, **options)["input_ids"])

    if not later:
        return read(text)
    # Tokenize behind a line break, then remove the ids of the line break.
    anchor, both = read("\n"), read("\n" + text)
    if both[: len(anchor)] == anchor and len(both) > len(anchor):
        return both[len(anchor) :]
    return read(text) if text else []


def split_text(tokenizer: Any, text: str, control: ControlTokens | None = None) -> list[str]:
    """The text in pieces: at odd places those that would become control tokens and must not, and its pictures; at even
    places the others (of a text that has none the text itself). What the recipe wrote (types.RecipeText) is always at
    even places. `control`: those of this tokenizer, if they are at hand.

    Example: split_text(builtin_tokenizer("builtin:bytes"), "a<eos>b") -> ['a', '<eos>', 'b']"""
    control = control or control_tokens(tokenizer)
    if not pictures_of(text):
        return _split_words(tokenizer, text, control)
    around = enumerate(around_pictures(text))
    return [piece for n, own in around for piece in ([own] if n % 2 else _split_words(tokenizer, own, control))]


def _split_words(tokenizer: Any, text: str, control: ControlTokens) -> list[str]:
    """`split_text` of a text without pictures."""
    written = getattr(text, "spans", ())
    text = str(text)
    # 1. The parts that the recipe did not write, and in them what would become a control token.
    edges = [0, *(edge for span in written for edge in span), len(text)]
    foreign = [span for span in list(pairwise(edges))[::2] if span[0] < span[1]]
    spelled = [
        (begin + first, begin + last)
        for begin, end in foreign
        for first, last in _spelled(tokenizer, text[begin:end], control)
    ]
    pieces = _cut(text, spelled)
    # 2. A name of which the recipe wrote a half: then all that it did not write is set apart.
    if written:
        by_recipe = [text[begin:end] for begin, end in written]
        wanted, made = (_control_in(tokenizer, texts, control) for texts in (by_recipe, pieces[::2]))
        pieces = pieces if wanted == made else _cut(text, foreign)
    return pieces


def _cut(text: str, spans: Sequence[Span]) -> list[str]:
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


def _control_in(tokenizer: Any, texts: Sequence[str], control: ControlTokens) -> list[int]:
    """The control tokens that the tokenizer reads in some texts, in order."""
    read = [(text, bare_ids(tokenizer, text)) for text in texts if text]
    return [id for text, ids in read for id in ids if id in control.ids and control.made_of(text, [id])]


def ids_of_pieces(tokenizer: Any, pieces: Sequence[str]) -> list[int]:
    """Token ids of a text in pieces, as `split_text` gives them: those at odd places become no control tokens. Raises
    LmgymError for a picture where the model sees none."""
    if len(pieces) == 1:
        return bare_ids(tokenizer, pieces[0])
    pieces = _with_breaks(pieces, around_picture(tokenizer))
    ids, later = list[int](), False
    for number, piece in enumerate(pieces):
        if shown := pictures_of(piece):
            ids, later = ids + picture_ids(tokenizer, shown[0][1]), True
        elif piece:
            own = text_ids(tokenizer, piece, later) if number % 2 else bare_ids(tokenizer, piece, later)
            ids, later = ids + own, True
    return ids


def _with_breaks(pieces: Sequence[str], around: str) -> list[str]:
    """Pieces with the text `around` each picture, which joins that of its neighbours.

    Example: with "\\n" around them: ["a", picture, "b"] -> ["a\\n", picture, "\\nb"]"""
    joined = list(pieces)
    for number, piece in enumerate(pieces):
        if around and pictures_of(piece):
            joined[number - 1], joined[number + 1] = joined[number - 1] + around, around + joined[number + 1]
    return joined


def _spelled(tokenizer: Any, text: str, control: ControlTokens) -> tuple[Span, ...]:
    """The places in a text that would become control tokens."""
    if text in control.seen:
        return control.seen[text]
    found: list[Span] = []
    if control.made_of(text, bare_ids(tokenizer, text)):
        found = [match.span() for match in control.names.finditer(text)]
        # Between the names: a spelling that only the tokenizer's normalisation turns into a name.
        edges = [0, *(edge for span in found for edge in span), len(text)]
        for begin, end in list(pairwise(edges))[::2]:
            core = text[begin:end].strip()  # a template may remove the space around it
            if core and control.made_of(core, bare_ids(tokenizer, core)):
                first = text.index(core, begin)
                found.append((first, first + len(core)))
    if len(control.seen) >= SEEN:
        control.seen.clear()
    return control.seen.setdefault(text, tuple(sorted(found)))


_known: WeakKeyDictionary[Any, tuple[Any, ControlTokens]] = WeakKeyDictionary()


def control_tokens(tokenizer: Any) -> ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and the added tokens that its chat template names, except
    white space. Found again only when its special tokens or its template have changed.

    A single character that is an ordinary token too (the end mark "." of a model of characters) is none: a text could
    not be written without it."""
    template = getattr(tokenizer, "chat_template", None) or ""
    special = tuple(getattr(tokenizer, "all_special_tokens", ()))
    state = (str(template), special, len(tokenizer))
    if tokenizer in _known and _known[tokenizer][0] == state:
        return _known[tokenizer][1]
    added = [(token.content, id, token.special) for id, token in tokenizer.added_tokens_decoder.items()]
    named = list(zip(special, tokenizer.all_special_ids, strict=True))
    named += [(name, id) for name, id, always in added if always or (name in state[0] and not name.isspace())]
    named = [(name, id) for name, id in named if name and id is not None and not _ordinary(tokenizer, name, id)]
    longest_first = sorted({name for name, _ in named}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    unknown = (getattr(tokenizer, "unk_token_id", None), str(getattr(tokenizer, "unk_token", None)))
    _known[tokenizer] = (state, ControlTokens(frozenset(id for _, id in named), pattern, unknown))
    return _known[tokenizer][1]


def _ordinary(tokenizer: Any, name: str, id: int) -> bool:
    return len(name) == 1 and id in bare_ids(tokenizer, name, split_special_tokens=True)
