"""examples/reverse_text.py: prime-rl's environment as a plug-in."""

import gzip
import runpy
from pathlib import Path

import pytest

from tests import runs

PARTS = runpy.run_path(str(runs.ROOT / "examples" / "reverse_text.py"))


@pytest.mark.parametrize("name, packed", [("train.txt", False), ("train.txt.gz", True)])
def test_the_reward_of_a_published_answer(name: str, packed: bool, tmp_path: Path) -> None:
    """The answer and its reward, 0.963855421686747, stand on the page of sameersegal/Qwen3-0.6B-Reverse-Text-SFT-RLFT
    on the Hugging Face Hub. A line that is too long and an empty one are no prompts."""
    lines = f"The community in Bruck was merged into it\n\n{'a' * 81}\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(lines) if packed else lines)
    (example,) = PARTS["reverse_text"]("train", str(tmp_path / name.replace("train", "{split}")))
    assert example.references == ("<reversed_text>\nti otni degrem saw kcurB ni ytinummoc ehT\n</reversed_text>",)
    answers = [
        "<reversed_text>\n.ti otni degrem saw kcuBr ni ytinummoc ehT\n</reversed_text>",
        example.references[0],
        "ti otni degrem saw kcurB ni ytinummoc ehT",
    ]
    assert PARTS["reversed_ratio"](answers, [example] * 3) == [0.963855421686747, 1.0, 0.0]
