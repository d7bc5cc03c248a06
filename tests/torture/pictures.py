"""Damaged and hostile pictures in rows of data: each is read as a plain picture in RGB, or refused in one sentence that
names file, line and column, within five seconds of a processor.

    python -m tests.torture.pictures --mutants 5000 --seed 0

A mutant is a function of (seed, number). A file that is no picture, a link, a pipe or a device may be in its place, and
the row may name it in any of the ways that data sets do.
"""

import argparse
import base64
import io
import os
import random
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lmgym.core.errors import LmgymError
from lmgym.pictures.store import MOST_PIXELS, PictureStore
from lmgym.tasks.rows.pictures import RowPictures
from lmgym.types import pictures_of
from tests.torture.damage import change_bytes
from tests.torture.trials import complaint_about

SECONDS = 5.0
NONE = {
    "nothing": b"", "page": b"<!DOCTYPE html><html>404</html>", "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "text": b"a cat", "program": b"%!PS-Adobe-3.0 EPSF-3.0\n", "pointer": b"version https://git-lfs.github.com/spec/v1",
    "packed": zlib.compress(bytes(100_000)),
}  # fmt: skip
NAMES: list[Any] = ["../x.png", "/dev/zero", "http://a/b.png", "", "a\0", "x/" * 2000, "~", 3, [[]], {"bytes": None}]


@cache
def whole() -> dict[str, bytes]:
    """Files that all is right with: of every format that is read, in every mode that it has."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 4), np.uint8)
    image = Image.fromarray(pixels, "RGBA").resize((24, 16))
    note = Image.Exif()
    note[0x0112] = 6  # the camera was held upright
    frames = [image.convert("RGB"), image.convert("RGB").rotate(90)]
    key = image.convert("RGB").quantize(8)
    found: dict[str, tuple[Image.Image, str, dict[str, Any]]] = {
        **{f"png {mode}": (image.convert(mode), "PNG", {}) for mode in ("1", "L", "LA", "RGB", "RGBA")},
        "png of 16 bits": (Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257), "PNG", {}),
        "png with a palette": (key, "PNG", {}),
        "png with a clear colour": (key, "PNG", {"transparency": bytes([0, 128, 255])}),
        "png, animated": (frames[0], "PNG", {"save_all": True, "append_images": frames[1:]}),
        **{f"jpeg {mode}": (image.convert(mode), "JPEG", {}) for mode in ("L", "RGB", "CMYK")},
        "jpeg, progressive, turned": (frames[0], "JPEG", {"progressive": True, "exif": note}),
        "gif, animated": (frames[0], "GIF", {"save_all": True, "append_images": frames[1:]}),
        "webp, animated": (image, "WEBP", {"save_all": True, "append_images": frames[1:], "lossless": True}),
        "webp": (frames[0], "WEBP", {"exif": note}),
        "bmp": (frames[0], "BMP", {}),
    }
    files = {}
    for name, (picture, kind, options) in found.items():
        out = io.BytesIO()
        picture.save(out, kind, **options)
        files[name] = out.getvalue()
    return files


def mutant(chance: random.Random) -> tuple[str, bytes]:
    """A file, and what was done to it."""
    if chance.random() < 0.08:
        what = chance.choice([*NONE])
        return what, NONE[what]
    name = chance.choice([*whole()])
    content, words = whole()[name], [name]
    for _ in range(chance.choice([0, 1, 1, 1, 2, 5])):
        what, content = chance.choice([change_bytes, _head])(chance, content)
        words.append(what)
    return ", ".join(words), content


def _head(chance: random.Random, content: bytes) -> tuple[str, bytes]:
    """A number in the head changed, where formats say how large they are; the sum of a PNG's head is right again."""
    place = chance.randrange(min(len(content), 64)) if content else 0
    number = chance.choice([0, 1, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**32 - 1]).to_bytes(4, "big")
    content = content[:place] + number[-chance.choice([1, 2, 4]) :] + content[place + 4 :]
    if content.startswith(b"\x89PNG") and len(content) > 33:
        content = content[:29] + zlib.crc32(content[12:29]).to_bytes(4, "big") + content[33:]
    return f"head at {place}", content


def row_of(chance: random.Random, folder: Path, content: bytes) -> Any:
    """The file written, or not, and what a row says of it."""
    path, text = folder / "a picture.png", base64.b64encode(content).decode()
    for old in folder.iterdir():
        old.unlink()
    ways: dict[str, Callable[[], Any]] = {
        "file": lambda: [path.write_bytes(content), path.name][-1],
        "bytes": lambda: {"bytes": content, "path": None},
        "address": lambda: f"data:image/png;base64,{text}",
        "base64": lambda: text,
        "link": lambda: [(folder / "b").write_bytes(content), path.symlink_to("b"), path.name][-1],
        "out": lambda: [path.symlink_to(chance.choice(["/etc/passwd", "/dev/zero", "..", path.name])), path.name][-1],
        "pipe": lambda: [os.mkfifo(path), path.name][-1],
        "name": lambda: chance.choice(NAMES),
    }
    way = chance.choice([*["file", "bytes", "address", "base64"] * 4, *ways])
    return ways[way]()


def judged(store: PictureStore, folder: Path, number: int, seed: int) -> tuple[str, str, str]:
    """What became of a mutant ("read" or "refused"), what it was, and what is wrong with that; empty if nothing is."""
    chance = random.Random(f"{seed}/{number}")
    what, content = mutant(chance)
    value, where = row_of(chance, folder, content), f"{folder}/rows.jsonl:{number}"
    began = time.process_time()
    try:
        shown = RowPictures(folder=folder, store=store).shown({"image": value}, where)
    except LmgymError as error:
        said, verdict = str(error), "refused"
        finding = complaint_about(said) or ("" if said.startswith(f"{where}: column 'image'") else "no place")
    except Exception as error:
        return "raised", what, f"{type(error).__name__}: {error}"
    else:
        verdict, finding = "read", ""
        for text in shown:
            image = store.open(pictures_of(text)[0][1])
            if image.mode != "RGB" or not 0 < image.width * image.height <= MOST_PIXELS:
                finding = f"kept in mode {image.mode} with {image.size}"
    return verdict, what, finding or ("slow" if time.process_time() - began > SECONDS else "")


def campaign(mutants: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Try so many; how many were read and refused, and the findings."""
    (folder / "rows").mkdir()
    store, verdicts, findings = PictureStore(folder / "pictures"), Counter[str](), list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of animations
        for number in range(mutants):
            verdict, what, finding = judged(store, folder / "rows", number, seed)
            verdicts[verdict] += 1
            if finding:
                findings.append(f"{number} ({what}): {finding}")
    return verdicts, findings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign. The exit status is 1 if there was a finding."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mutants", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        verdicts, findings = campaign(given.mutants, given.seed, Path(folder))
    print(*findings, sep="\n")
    seconds = time.process_time() - began
    print(f"{given.mutants} mutants, seed {given.seed}: {dict(verdicts)}; {seconds:.0f} s of a processor")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
