"""Token ids of pictures. In a prompt, a picture is a sequence of pieces. For a piece the model reads one feature vector
of the picture, where it reads an embedding for a word. The id of a piece names its picture. So two prompts with
different pictures have different ids."""

FIRST = 1 << 56  # ids from here on are pieces, far above any vocabulary
PREFIX = 10  # hexadecimal digits of a picture's sha256 in the ids of its pieces


def piece_ids(digest: str, count: int) -> list[int]:
    """The ids of the `count` pieces of the picture whose file has this sha256 (ten or more of its hexadecimal digits).
    Example: piece_ids("00000000ab", 2) -> [FIRST | 0xAB << 16, FIRST | 0xAB << 16 | 1]"""
    if not 0 <= count <= 1 << 16:
        raise ValueError(f"a picture has 0 to {1 << 16} pieces, not {count}")
    first = FIRST | (int(digest[:PREFIX], 16) << 16)
    return list(range(first, first + count))


def is_piece(id: int) -> bool:
    """True if the id is a piece of a picture, and not a token of the vocabulary."""
    return id >= FIRST


def picture_of(id: int) -> tuple[str, int]:
    """The first ten hexadecimal digits of the picture's sha256, and the number of the piece in it.
    Example: picture_of(piece_ids(digest, 5)[3]) -> (digest[:10], 3)"""
    return f"{(id - FIRST) >> 16:0{PREFIX}x}", id & 0xFFFF
