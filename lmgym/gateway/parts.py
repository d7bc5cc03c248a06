"""What a message holds, in parts: texts, and pictures in OpenAI's form (`image_url`) or Anthropic's (`image`).

Pictures come with the request, in base64. They go into the run's folder, and each is one character of the text
(types.picture_text); nothing is fetched from the network."""

from collections.abc import Collection, Mapping
from typing import Any

from lmgym.core.errors import LmgymError, represent
from lmgym.gateway.wire import Refused, check, list_of
from lmgym.pictures.addresses import bytes_of_address, unpacked
from lmgym.pictures.store import current_store
from lmgym.types import RecipeText, picture_text

MOST_PARTS = 1000  # of a message
SEND = "send the picture itself, as data:image/png;base64,..."
DETAILS = (None, "auto", "low", "high")  # how large OpenAI's models see it; here the model's own processor decides


def read_content(content: Any, pictures: bool = False) -> str:
    """A message's content, which may come in parts, as one text. Raises Refused for parts that are neither text nor,
    where a message may hold `pictures`, a picture.

    Example: read_content([{"type": "text", "text": "2+"}, {"type": "text", "text": "2="}]) -> '2+2='"""
    if content is None:
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list_of(content, "content", MOST_PARTS)
    text = RecipeText.join(*(_text_of(part, pictures) for part in parts))
    check(text, "a message")
    return text


def _text_of(part: Any, pictures: bool) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        refuse_unknown(part, ("type", "text", "cache_control"), "a part of type text")
        return str(part["text"])
    if kind in ("image_url", "image"):
        if not pictures:
            raise Refused("only messages of the user, and results of tools, may hold pictures")
        try:
            data = _of_openai(part) if kind == "image_url" else _of_anthropic(part)
            return picture_text(current_store().put(data))
        except LmgymError as error:
            raise Refused(str(error)) from None
    raise Refused('\'content\' must be a text, or a list of parts such as {"type": "text", "text": ...}')


def refuse_unknown(part: Mapping[str, Any], known: Collection[str], what: str) -> None:
    """Raise Refused for an unknown field that is set, so that nothing is left out in silence.

    Example: refuse_unknown({"name": "add", "strict": True}, ("name",), "a tool") raises "a tool holds 'strict', ..."
    """
    if unknown := [key for key, value in part.items() if key not in known and value not in (None, False)]:
        raise Refused(f"{what} holds '{unknown[0][:100]}', which is not supported; leave it out")


def _of_openai(part: dict[str, Any]) -> bytes:
    given = _only(part, "image_url", ("url", "detail"))
    if not isinstance(given.get("url"), str) or given.get("detail") not in DETAILS:
        raise Refused('a part of type image_url must be {"type": "image_url", "image_url": {"url": "data:..."}}')
    return bytes_of_address(given["url"], SEND)


def _of_anthropic(part: dict[str, Any]) -> bytes:
    given = _only(part, "source", ("type", "media_type", "data", "url"))
    if given.get("type") == "url" and isinstance(given.get("url"), str):
        return bytes_of_address(given["url"], SEND)
    if given.get("type") != "base64" or not isinstance(given.get("data"), str):
        raise Refused(
            'a block of type image needs "source": {"type": "base64", "media_type": "image/png", "data": ...}'
        )
    return unpacked(given["data"])


def _only(part: dict[str, Any], name: str, known: Collection[str]) -> dict[str, Any]:
    """What a part of this name holds. Raises Refused for other fields, in it or beside it."""
    given = part.get(name)
    if not isinstance(given, dict):
        raise Refused(f"a part of type {part['type']} needs '{name}', an object, not {represent(given)}")
    if unknown := [key for key in (*part, *given) if key not in ("type", name, *known)]:
        raise Refused(f"a part of type {part['type']} holds '{unknown[0][:100]}', which is not supported; leave it out")
    return given
