"""Pictures in a row: files beside it, data: addresses, base64, or bytes; in a column of their own, or in messages.

Where they stand in a prompt, by what the data says: at the parts {"type": "image"} of messages; at the marks <image> in
texts (LLaVA, geometry3k); at the column's name in braces in task.prompt; else before the user's first words."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError, represent
from lmgym.core.files import nearby, read_bytes
from lmgym.pictures.addresses import ADDRESS, bytes_of_address, unpacked
from lmgym.pictures.store import MOST_BYTES, PictureStore, current_store
from lmgym.tasks.rows.formats import place_of
from lmgym.types import RecipeText, part_of, picture_text, pictures_of

MARK = "<image>"  # how LLaVA's data, and others after it, write the place of a picture
COLUMNS = ("images", "image")  # where data sets have them
BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")
BEGINNINGS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM")  # of files of pictures
DOWNLOAD = "download the pictures and name their files, or leave the column out (task.images: null)"
KINDS = ("image", "image_url", "input_image")  # of a message's part
HOLDERS = (
    "image",
    "image_url",
    "source",
    "url",
    "path",
    "base64",
    "data",
    "bytes",
)  # where such a part has its picture


@dataclass(frozen=True)
class RowPictures:
    """How the pictures of rows are found and kept. `columns` are names, of which a row has one or none; paths are below
    `folder`, or below the folder of the rows' file.

    Example: RowPictures().shown({"image": "a.png"}, "rows/train.jsonl:1") -> ['\ufffc'], the picture rows/a.png"""

    columns: tuple[str, ...] = COLUMNS
    folder: Path | None = None
    store: PictureStore = field(default_factory=current_store)

    @classmethod
    def of(cls, images: str | None, folder: str | Path | None) -> "RowPictures":
        """As the keys `task.images` and `task.image_folder` say: the usual columns, another one, or none. Raises
        LmgymError if there is no such folder."""
        path = None if folder is None else Path(folder).expanduser()
        if path is not None and not path.is_dir():
            raise LmgymError(f"task.image_folder: there is no folder {path}{nearby(path)}")
        return cls(() if images is None else COLUMNS if images in COLUMNS else (images,), path)

    def column(self, row: Mapping[str, Any]) -> str | None:
        """The column of a row that holds its pictures."""
        return next((name for name in self.columns if row.get(name) is not None), None)

    def shown(self, row: Mapping[str, Any], where: str) -> list[RecipeText]:
        """The pictures in a row's column, each as a text. Raises LmgymError, with `where`, for what is no picture."""
        name = self.column(row)
        value = None if name is None else row[name]
        several = value if isinstance(value, list | tuple) else [value]
        return [self._picture(one, f"{where}: column '{name}'") for one in several if one is not None]

    def put_into(self, value: Any, shown: Sequence[RecipeText], name: str, where: str) -> Any:
        """A prompt as the column `name` holds it, with pictures in their places: those of its own, and all that are
        `shown` in the row's column. Raises LmgymError if it has another number of places."""
        if isinstance(value, str):
            return _placed([value], shown, 0, where)[0]
        messages = [value] if isinstance(value, dict) else value
        if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
            return value  # which is refused later
        # 1. Parts of messages: each is a text, a picture of its own, or the place of the row's next one.
        left, whose = list(shown), f"{where}: column '{name}'"
        contents = [self._joined(one.get(_key(one)), left, whose) for one in messages]
        texts = [content if isinstance(content, str) else "" for content in contents]
        own = sum(len(pictures_of(text)) for text in texts) - len(shown) + len(left)
        if shown and own:
            raise LmgymError(
                f"{whose} has pictures of its own, and so has the row's column '{self.columns[0]}'; task.images: null "
                "leaves that column out"
            )
        # 2. Else marks in texts, or the beginning of what the user says first.
        if len(left) == len(shown):
            users = [n for n, one in enumerate(messages) if one.get("role", one.get("from")) in ("user", "human")]
            placed = _placed(texts, shown, users[0] if users else 0, where)
            contents = [new or old for new, old in zip(placed, contents, strict=True)]
        elif left:
            raise LmgymError(_unequal(where, len(shown), len(shown) - len(left)))
        told = [{**one, _key(one): content} for one, content in zip(messages, contents, strict=True)]
        return told[0] if isinstance(value, dict) else told

    def _joined(self, content: Any, left: list[RecipeText], whose: str) -> Any:
        """A content of parts, some of them pictures, as one text; any other content as it is."""
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            return content
        kinds = [part.get("type") for part in content]
        if other := next((kind for kind in kinds if kind not in ("text", "input_text", None, *KINDS)), None):
            raise LmgymError(f"{whose}: a part of a message is of type {represent(other)}; text and image can be read")
        texts = list[str]()
        for part in content:
            if part.get("type") not in KINDS:
                if not isinstance(part.get("text"), str):
                    return content  # which is refused later
                texts.append(part["text"])
            elif (own := next((part[key] for key in HOLDERS if part.get(key) is not None), None)) is not None:
                texts.append(self._picture(own, whose))
            elif left:
                texts.append(left.pop(0))
            else:
                raise LmgymError(
                    f"{whose} has more places for pictures than the row has pictures; task.images names their column"
                )
        return RecipeText.join(*texts)

    def _picture(self, value: Any, whose: str) -> RecipeText:
        """A picture as a text, once it is in the store. Raises LmgymError that begins with `whose`."""
        if isinstance(value, Mapping):
            value = next((value[key] for key in ("bytes", "url", "path", "data") if value.get(key) is not None), value)
        data = value if isinstance(value, bytes) else self._read(value, whose) if isinstance(value, str) else None
        if data is None:
            raise LmgymError(
                f"{whose} must hold pictures (paths of files, data: addresses, base64 or bytes), got {represent(value)}"
                "; task.images: null leaves the column to meta"
            )
        try:
            return picture_text(self.store.put(data))
        except LmgymError as error:
            named = f" ({represent(value, 100)})" if isinstance(value, str) else ""
            raise LmgymError(f"{whose}{named}: {error}") from error

    def _read(self, text: str, whose: str) -> bytes:
        """The bytes that a text means."""
        # 1. In the text itself.
        try:
            if text[:5].lower() == "data:" or ADDRESS.match(text):
                return bytes_of_address(text, DOWNLOAD)
            if BASE64.fullmatch(text) and unpacked("".join(text[:64].split())[:16]).startswith(BEGINNINGS):
                return unpacked(text)
        except LmgymError as error:
            raise LmgymError(f"{whose}: {error}") from error
        # 2. In a file, below the folder of the rows or the one that the recipe names, wherever links lead.
        folder = self.folder or Path(place_of(whose.partition(": column ")[0])[0]).parent
        path = folder / text
        try:
            inside = path.resolve().is_relative_to(folder.resolve())
            if inside:
                return read_bytes(path, MOST_BYTES)
        except (OSError, ValueError, RuntimeError) as error:  # a null character; links in a circle
            why = getattr(error, "strerror", None) or str(error).split("\n")[0]
            raise LmgymError(f"{whose}: cannot read the picture {represent(str(path))}: {why}{nearby(path)}") from error
        raise LmgymError(
            f"{whose}: {represent(text, 200)} leads out of {folder}, and only pictures below it are read; "
            "task.image_folder names another folder"
        )


def _key(message: Mapping[str, Any]) -> str:
    return "value" if "from" in message else "content"


def _placed(texts: list[str], shown: Sequence[RecipeText], first: int, where: str) -> list[str]:
    """Texts with the pictures at their marks, or else before the text number `first`."""
    marks = sum(text.count(MARK) for text in texts) if shown else 0
    if not marks:
        return [RecipeText.join(*shown, text) if n == first else text for n, text in enumerate(texts)]
    if marks != len(shown):
        raise LmgymError(_unequal(where, len(shown), marks))
    pictures = iter(shown)
    return [_at_marks(text, pictures) for text in texts]


def _at_marks(text: str, pictures: Iterator[RecipeText]) -> str:
    """A text with the next pictures in place of its marks."""
    if MARK not in text:
        return text
    pieces, begin = list[str](), 0
    for found in re.finditer(MARK, text):
        pieces += [part_of(text, begin, found.start()), next(pictures)]
        begin = found.end()
    return RecipeText.join(*pieces, part_of(text, begin, len(text)))


def _unequal(where: str, pictures: int, places: int) -> str:
    return (
        f"{where}: the row has {pictures} pictures and its prompt {places} places for them ({MARK}, or parts of type "
        "image); give as many of the one as of the other"
    )
