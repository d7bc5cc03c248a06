"""The pictures that an answer's tokens stand for, small enough to lie in the page and in the single file."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

from lmgym.core.errors import LmgymError
from lmgym.pictures.ids import is_piece, picture_of
from lmgym.pictures.store import FOLDER, PictureStore

MOST = 8  # pictures of an answer
PIXELS = 256  # of their longer side
LARGEST = 200_000  # bytes of one


def shown_pictures(folder: Path, ids: Sequence[int]) -> dict[int, str]:
    """By the place where it begins, each picture among some tokens as a data: address; only the first `MOST` different
    ones, and none that the run folder no longer has, or that cannot be read.

    Example: shown_pictures(run, [5, *piece_ids(digest, 4), 6]) -> {1: "data:image/png;base64,..."}"""
    begins = {place: picture_of(id) for place, id in enumerate(ids) if is_piece(id)}
    places = {place: name for place, (name, piece) in begins.items() if piece == 0}
    names = list(dict.fromkeys(places.values()))[:MOST]
    known = {name: _address(PictureStore(folder / FOLDER), name) for name in names}
    return {place: known[name] for place, name in places.items() if known.get(name)}


def _address(store: PictureStore, name: str) -> str:
    """A picture as a data: address; empty if it cannot be shown."""
    try:
        image = store.open(name)
    except LmgymError:
        return ""
    image.thumbnail((PIXELS, PIXELS))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    data = file.getvalue()
    return f"data:image/png;base64,{base64.b64encode(data).decode()}" if len(data) <= LARGEST else ""
