"""Pictures that stand in a text: data: addresses and base64. Nothing is fetched from the network."""

import base64
import binascii
import io
import re
from typing import TYPE_CHECKING

from lmgym.core.errors import LmgymError, represent
from lmgym.pictures.store import MOST_BYTES

if TYPE_CHECKING:
    from PIL.Image import Image

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]{0,20}://", re.IGNORECASE)


def bytes_of_address(address: str, instead: str) -> bytes:
    """The file in a data: address. Raises LmgymError for one without base64, and for any other address, with what to
    do `instead`.

    Example: bytes_of_address("data:image/png;base64,iVBORw0KGgo=", "send the picture itself")[:4] -> b'\\x89PNG'"""
    if address[:5].lower() != "data:":
        raise LmgymError(f"{represent(address, 100)} is an address, and nothing is fetched from the network; {instead}")
    head, _, body = address.partition(",")
    if head[-7:].lower() != ";base64":
        raise LmgymError("a data: address must hold base64 (data:image/png;base64,...)")
    return unpacked(body)


def unpacked(text: str) -> bytes:
    """The bytes of base64. Raises LmgymError for what is none, or is too long for a picture.

    Example: unpacked("iVBO Rw0K")[:4] -> b'\\x89PNG'"""
    if len(text) > 2 * MOST_BYTES:
        raise LmgymError(f"the picture has about {len(text) * 3 // 4:,} bytes; the limit is {MOST_BYTES:,}")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise LmgymError(f"{represent(text, 60)} is no base64 ({error})") from error


def address_of(image: "Image") -> str:
    """A picture as a data: address. Example: address_of(store.open(digest)) -> 'data:image/png;base64,iVBORw0K...'"""
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
