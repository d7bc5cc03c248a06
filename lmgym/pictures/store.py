"""A folder of pictures. Each is a PNG file, in RGB, whose name is the SHA-256 of what it shows.

A picture comes from a data set, a program or an environment, so it is hostile until it is here: only formats of pixels
are read, by Pillow, within limits of bytes and of pixels, and nothing is fetched. What is here is plain: one frame,
three bytes a pixel, upright, no transparency, no notes of a camera."""

import atexit
import hashlib
import io
import re
import secrets
import shutil
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmgym.core.errors import LmgymError, describe, represent, warn
from lmgym.core.files import read_bytes, replacing
from lmgym.pictures.ids import PREFIX
from lmgym.pictures.known import Known
from lmgym.types import picture_text

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = "pictures"  # its name in a run folder
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")  # that are read; others of Pillow's start programs or are seldom tried
MOST_BYTES = 2**25  # of a file that is read
MOST_PIXELS = 2**25  # of a picture: 100 MB once it is unpacked
MOST_SCANS = 500  # of a JPEG: each goes through all pixels again
MOST_STORED = 2**27  # bytes of a file here
QUICK, SMALL = 1, 6  # levels of zlib: photographs take 2.8 times as long with 6, and 0.9 of the bytes; drawings a third
TOO_LARGE = f"the limit is {MOST_PIXELS:,} pixels; make it smaller"
NAME = re.compile("[0-9a-f]{64}")
BEGINNING = re.compile(f"[0-9a-f]{{{PREFIX},64}}")
FIRST_FRAME = "a picture is animated, or has several pages; of such files only the first picture is read"


@dataclass(frozen=True)
class PictureStore:
    """The pictures in a folder, which is made with the first one.

    A name is the SHA-256 of "P6\\n{width} {height}\\n255\\n" and the bytes of all pixels (the picture as a PPM file),
    so it does not depend on how the file was packed. Equal pictures are one file; several processes may write at once.

    Example: PictureStore(Path("runs/a/pictures")).put(Path("cat.jpg").read_bytes()) -> '3f2a91c04b...'"""

    folder: Path

    def put(self, data: bytes) -> str:
        """Keep the picture of a file's bytes; returns its name. A file that was put before is not unpacked again.
        Raises LmgymError for what is no picture, or too large a one."""
        file = hashlib.sha256(data).hexdigest()
        name = self._known.get(file)
        if name is None or not self._path(name).is_file():
            name = self.keep(_upright(_decoded(data)), QUICK)
            self._known.add(file, name)
        return name

    @cached_property
    def _known(self) -> Known:
        return Known(self.folder)

    def keep(self, image: "Image", level: int = SMALL) -> str:
        """Keep a picture of Pillow's, as RGB, packed with this level of zlib; returns its name. Raises LmgymError if it
        cannot be written."""
        image = in_rgb(image)
        if image.width * image.height > MOST_PIXELS:
            raise LmgymError(f"the picture has {image.width:,} x {image.height:,} pixels; {TOO_LARGE}")
        name = name_of(image)
        path = self._path(name)
        if path.is_file():
            return name
        for other in self._names(name[:PREFIX]):
            raise LmgymError(
                f"the picture has the same first {PREFIX} digits as another one of this run ({other}), and ids tell "
                "pictures apart by these; change a pixel of it"
            )
        file = io.BytesIO()
        pillow().frombytes("RGB", image.size, image.tobytes()).save(file, "PNG", compress_level=level)  # no notes
        try:
            if self.folder.is_symlink() or path.parent.is_symlink():
                raise OSError("its folder is a link")
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, durable=False) as out:
                out.write(file.getvalue())
        except OSError as error:
            raise LmgymError(f"the picture cannot be written to {path}: {error.strerror or error}") from error
        return name

    def open(self, beginning: str) -> "Image":
        """The picture whose name begins so (ten digits or more), in RGB. Raises LmgymError if there is none, or if its
        file does not show what its name says."""
        names = self._names(beginning) if BEGINNING.fullmatch(beginning) else []
        if len(names) != 1:
            raise LmgymError(f"{self.folder}, which holds a run's pictures, has {len(names)} of the name {beginning!r}")
        path = self._path(names[0])
        try:
            if path.is_symlink() or path.parent.is_symlink():
                raise OSError("it is a link")
            image = in_rgb(_decoded(read_bytes(path, MOST_STORED), ("PNG",), MOST_STORED))
        except (OSError, LmgymError) as error:
            raise LmgymError(f"cannot read the picture {path}: {getattr(error, 'strerror', None) or error}") from error
        if name_of(image) != names[0]:
            raise LmgymError(f"{path} is damaged: it does not show the picture of its name; delete it and start again")
        return image

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name}.png"

    def _names(self, beginning: str) -> list[str]:
        """The names here that begin so."""
        with suppress(OSError):
            found = (path.stem for path in (self.folder / beginning[:2]).glob(f"{beginning}*.png"))
            return [name for name in found if NAME.fullmatch(name)]
        return []


def name_of(image: "Image") -> str:
    """The SHA-256 of an RGB picture as a PPM file, in hexadecimal."""
    width, height = image.size
    return hashlib.sha256(b"P6\n%d %d\n255\n" % (width, height) + image.tobytes()).hexdigest()


def in_rgb(image: "Image") -> "Image":
    """A picture with three bytes a pixel: transparent ones stand on white, of 16 bits the upper eight count. Raises
    LmgymError for numbers that are no colours."""
    library = pillow()
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise LmgymError(
            f"the picture holds numbers (Pillow's mode {image.mode}) and no colours; give 8 bits a channel"
        )
    if image.mode.startswith("I"):
        import numpy as np

        image = library.fromarray((np.asarray(image).clip(0, 2**16 - 1) >> 8).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = library.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white.convert("RGB")  # type: ignore[no-any-return]


def pillow() -> Any:
    """Pillow's module Image. Raises LmgymError if it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise LmgymError("pictures need Pillow: pip install 'lmgym[vision]'") from error
    return Image


def _decoded(data: bytes, formats: tuple[str, ...] = FORMATS, most: int = MOST_BYTES) -> "Image":
    """The first picture of a file, unpacked. Raises LmgymError for anything that is none, or is too large."""
    library = pillow()
    if len(data) > most:
        raise LmgymError(f"the picture has {len(data):,} bytes; the limit is {most:,}")
    # 1. Its head, which says how large it is.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a size that is refused here
            image = library.open(io.BytesIO(data), formats=formats)
    except library.DecompressionBombError:
        raise LmgymError(f"the picture is too large; {TOO_LARGE}") from None
    except Exception as error:  # of Pillow and its codecs: of any kind
        raise LmgymError(f"the picture cannot be read{_seems(data)}; give one of {', '.join(formats)}") from error
    width, height = image.size
    if not width or not height or width * height > MOST_PIXELS:
        raise LmgymError(f"the picture has {width:,} x {height:,} pixels; {TOO_LARGE}")
    if data.startswith(b"\xff\xd8") and (scans := data.count(b"\xff\xda")) > MOST_SCANS:
        raise LmgymError(f"the picture is sent in {scans:,} scans; the limit is {MOST_SCANS}; save it again")
    # 2. Its pixels.
    try:
        if getattr(image, "is_animated", False):
            warn(FIRST_FRAME)
        image.load()
    except Exception as error:
        raise LmgymError(f"the picture is cut off or damaged ({describe(error, 200)})") from error
    return image  # type: ignore[no-any-return]


def _seems(data: bytes) -> str:
    """What an unreadable file seems to be, for the middle of a sentence."""
    begin = data[:100].lstrip().lower()
    if not data:
        return ": it is empty"
    if begin.startswith((b"<svg", b"<?xml")):
        return ": it seems to be a drawing (SVG)"
    if begin.startswith(b"version https://git-lfs"):
        return ": it is a pointer of Git LFS, whose file was not downloaded (git lfs pull)"
    return ": it seems to be a web page" if begin.startswith(b"<") else ""


def _upright(image: "Image") -> "Image":
    """The picture as the camera's note says that it was held."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a note that cannot be read says nothing
        return image


_current: PictureStore | None = None


def keep_pictures_in(folder: Path) -> None:
    """From now on tasks and environments put their pictures into this folder: a run's."""
    global _current
    _current = PictureStore(folder.absolute())  # another process may work elsewhere


def current_store() -> PictureStore:
    """Where tasks and environments put pictures: the run's folder, or for a command without one a temporary folder that
    ends with this process."""
    global _current
    if _current is None:
        folder = Path(tempfile.gettempdir()) / f"lmgym-pictures-{secrets.token_hex(8)}"
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _current = PictureStore(folder)
    return _current


def shown(picture: Any, pixels: int | None = None) -> str:
    """A text that is this picture, for the messages of an environment: of bytes of a file, a picture of Pillow's, or an
    array of uint8 [height, width, 3], as gymnasium draws it; made smaller if a side has more than `pixels`. Raises
    LmgymError for what is none.

    Example: {"role": "user", "content": RecipeText.join(shown(env.render()), "Left or right?")}"""
    if isinstance(picture, bytes):
        picture = _upright(_decoded(picture))
    elif not isinstance(picture, pillow().Image):
        if getattr(picture, "dtype", None) != "uint8" or picture.ndim not in (2, 3) or not picture.size:
            raise LmgymError(
                f"a picture is bytes of a file, a picture of Pillow's, or an array of uint8 [height, width, 3], not "
                f"{represent(picture, 100)}"
            )
        picture = _of_array(picture)
    picture = in_rgb(picture)
    if pixels is not None and max(picture.size) > pixels:
        picture = picture.copy()
        picture.thumbnail((pixels, pixels), pillow().Resampling.BOX)
    return picture_text(current_store().keep(picture))


def is_picture(value: Any) -> bool:
    """True for a picture of Pillow's. Where nobody has imported Pillow there is none."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def _of_array(array: Any) -> "Image":
    grey = array.ndim == 3 and array.shape[2] == 1
    try:
        return pillow().fromarray(array[:, :, 0] if grey else array)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise LmgymError(f"an array of uint8 {list(array.shape)} is no picture; give [height, width, 3]") from error
