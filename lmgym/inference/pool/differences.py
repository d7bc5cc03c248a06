"""What changes of bf16 weights in an update, as bytes: a bit for each number that changed, and the changed bits.

In bf16 most numbers stay as they are in a step, so a difference is 1 to 4 % of the whole. To make and apply one takes a
second or so for 100 million numbers: it pays where weights cross a wire, and not on one machine (docs/engines.md)."""

import zlib

import numpy as np

from lmgym.core.errors import LmgymError

LEVEL = 1  # of zlib: higher ones take much longer for a few per cent


def difference(old: np.ndarray, new: np.ndarray) -> bytes:
    """From one array of integers to another of its kind: places and exclusive or of the numbers that changed (bytes of
    equal rank together), and a checksum of the whole.

    Example:
        >>> old, new = np.array([1, 2, 3], np.int16), np.array([1, 7, 3], np.int16)
        >>> applied(old, difference(old, new)).tolist()
        [1, 7, 3]
    """
    old, new = old.reshape(-1), new.reshape(-1)
    changed = old != new
    flips = (old[changed] ^ new[changed]).view(np.uint8).reshape(-1, new.itemsize)
    places = zlib.compress(np.packbits(changed).tobytes(), LEVEL)
    head = np.array([len(places), zlib.crc32(new.tobytes())], np.int64)
    return head.tobytes() + places + zlib.compress(np.ascontiguousarray(flips.T).tobytes(), LEVEL)


def applied(old: np.ndarray, sent: bytes) -> np.ndarray:
    """The new array, in the shape of the old one. Raises LmgymError if it is not the one that was meant."""
    places, check = np.frombuffer(sent[:16], np.int64).tolist()
    bits = np.frombuffer(zlib.decompress(sent[16 : 16 + places]), np.uint8)
    changed = np.unpackbits(bits, count=old.size).astype(bool)
    flips = np.frombuffer(zlib.decompress(sent[16 + places :]), np.uint8).reshape(old.itemsize, -1)
    new = old.reshape(-1).copy()
    new[changed] ^= np.ascontiguousarray(flips.T).view(old.dtype)[:, 0]
    if zlib.crc32(new.tobytes()) != check:
        raise LmgymError("a difference of weights gives others than were meant; this is a bug")
    return new.reshape(old.shape)
