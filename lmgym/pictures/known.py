"""Which file shows which picture: so a run that starts again unpacks no picture that it has kept already.

The file `known` in a folder of pictures has a line for each file that was read: the SHA-256 of its bytes, and the name
of the picture. It is only ever appended to, by several processes at once; a line that is none says nothing."""

import os
import re
from contextlib import suppress
from pathlib import Path

from lmgym.core.files import read_bytes

FILE = "known"
LINE = re.compile(rb"^([0-9a-f]{64}) ([0-9a-f]{64})$", re.MULTILINE)
LONGEST = 2**26  # bytes, of half a million pictures: others are unpacked again


class Known:
    """The names of pictures by the SHA-256 of files. What cannot be read or written is not remembered.

    Example: Known(Path("runs/a/pictures")).get(hashlib.sha256(data).hexdigest()) -> '3f2a91c04b...', or None"""

    def __init__(self, folder: Path) -> None:
        self._path, self._names = folder / FILE, dict[bytes, bytes]()
        with suppress(OSError):
            lines = LINE.finditer(read_bytes(self._path, LONGEST))
            self._names = {bytes.fromhex(line[1].decode()): bytes.fromhex(line[2].decode()) for line in lines}

    def get(self, file: str) -> str | None:
        """The name of the picture that a file of this SHA-256 shows; None if no such file was read."""
        name = self._names.get(bytes.fromhex(file))
        return None if name is None else name.hex()

    def add(self, file: str, name: str) -> None:
        """Remember a file that was read."""
        self._names[bytes.fromhex(file)] = bytes.fromhex(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with suppress(OSError):
            descriptor = os.open(self._path, flags, 0o666)
            try:
                os.write(descriptor, f"{file} {name}\n".encode())  # a line at once, so that lines do not mix
            finally:
                os.close(descriptor)
