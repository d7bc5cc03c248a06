"""All random numbers: each is a pure function of a path such as (seed, step, draw, episode, position).

No generator state has to be saved for a resumed run, and the order of calls does not matter: a completion gets the same
uniform numbers whether it is sampled alone or with a thousand others.

The generator is SplitMix64 used as a counter-based hash (Steele, Lea & Flood, OOPSLA 2014, section 5): the
64-bit output function applied to key + counter * golden ratio."""

from threading import RLock

import numpy as np

GLOBAL = RLock()  # held by the thread that uses a library's global random numbers, for models that are made with these
GOLDEN = 0x9E3779B97F4A7C15
MASK = 0xFFFFFFFFFFFFFFFF


def key(*path: int | str, parent: int = 0) -> int:
    """A 64-bit key for a path of integers and words; different paths give unrelated keys.

    `parent` is the key of the beginning of the path, if many keys share it: key(1, 2) is key(2, parent=key(1)).

    Example: key(0, "sampling", 3) == key(0, "sampling", 3) != key(0, "sampling", 4)"""
    state = parent
    for part in path:
        if isinstance(part, str):
            state = _mix(state + 2 * GOLDEN & MASK)  # so that a word differs from the numbers of its bytes
            for byte in part.encode():
                state = _mix((state ^ byte) + GOLDEN & MASK)
            part = len(part)
        state = _mix((state ^ (part & MASK)) + GOLDEN & MASK)
    return state


def uniforms(keys: list[int], start: int, count: int) -> np.ndarray:
    """Uniform numbers in [0, 1), float64 [len(keys), count]. Entry [i, t] depends on keys[i] and start + t only."""
    base = np.array(keys, dtype=np.uint64)[:, None]
    counter = np.arange(start + 1, start + count + 1, dtype=np.uint64)[None, :]
    with np.errstate(over="ignore"):
        bits = mixed(base + counter * np.uint64(GOLDEN))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mixed(bits: np.ndarray) -> np.ndarray:
    """The generator's output function: 64 random bits from each key plus counter times GOLDEN, uint64 [...]."""
    with np.errstate(over="ignore"):
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def permutation(size: int, *path: int | str) -> np.ndarray:
    """A permutation of 0 .. size-1, int64 [size], that depends on size and path only."""
    return np.argsort(uniforms([key(*path)], 0, size)[0], kind="stable")


def generator(*path: int | str) -> np.random.Generator:
    """A numpy generator for code that needs many kinds of random numbers (task generators, bootstrap)."""
    return np.random.Generator(np.random.Philox(key=key(*path)))


def _mix(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)
