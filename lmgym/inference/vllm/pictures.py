"""Pictures in what vLLM is asked for. lmgym's ids have a picture as its pieces, with marks around them
(pictures/ids.py). vLLM gets the picture itself, and one mark where it stands, which its own processor of the model
makes such pieces of. What it has made comes back with the answer, and must be lmgym's ids: so both sides read the same
prompt."""

import base64
import importlib.util
import io
from collections.abc import Sequence
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.models.picture_features import PictureReader
from lmgym.models.vision import FAMILIES, placeholder_of, placeholder_text
from lmgym.pictures.ids import is_piece, picture_of

NEEDS = {  # packages of vLLM's processors, for videos
    "smolvlm": ("torchvision", "num2words"),
    **dict.fromkeys(("llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ("torchvision",)),
}


def check_pictures(architecture: str, here: bool) -> None:
    """Raise LmgymError if vLLM, in this process or elsewhere, cannot be sent pictures of this architecture."""
    if FAMILIES[architecture].around:
        raise LmgymError(
            f"engine.name: vLLM itself writes the line breaks around a picture of a {architecture}, which lmgym has "
            "made tokens of already; write name: sampler, or name: pool"
        )
    needed = NEEDS.get(architecture, ()) if here else ()
    package = next((name for name in needed if importlib.util.find_spec(name) is None), None)
    if package is not None:
        built = " as it was built for your torch" if package == "torchvision" else ""
        raise LmgymError(
            f"engine.name: vLLM reads no {architecture} without {package}, which is not installed here; install "
            f"it{built}, or write name: sampler"
        )


def as_sent(reader: PictureReader, ids: Sequence[int]) -> tuple[list[int], list[str]]:
    """A prompt's ids as vLLM gets them, with the mark of the chat template in place of each picture; and the names of
    the pictures, in their order. Raises LmgymError for ids in which a picture is not whole.

    Example: as_sent(reader, [5, *picture_tokens(processor, digest, image), 6]) -> ([5, 259, 6], [digest[:10]])"""
    processor = reader.processor
    mark = processor.tokenizer(placeholder_text(processor), add_special_tokens=False)["input_ids"]
    read, sent, names, place = as_read(reader, ids), list[int](), list[str](), 0
    while (first := next((at for at in range(place, len(ids)) if is_piece(ids[at])), None)) is not None:
        name = picture_of(ids[first])[0]
        own = reader.tokens(name)
        start = first - own.index(placeholder_of(processor))  # some of its marks stand before its pieces
        if start < place or read[start : start + len(own)] != own:
            raise LmgymError(f"a prompt holds a part of the picture {name}, and vLLM gets whole ones; do not cut it")
        sent += [*ids[place:start], *mark]
        names.append(name)
        place = start + len(own)
    return [*sent, *ids[place:]], names


def as_read(reader: PictureReader, ids: Sequence[int]) -> list[int]:
    """A prompt's ids as vLLM must make them: its placeholder is each piece's id."""
    placeholder = placeholder_of(reader.processor)
    return [placeholder if is_piece(id) else id for id in ids]


def check_read(reader: PictureReader, ids: Sequence[int], read: Sequence[int]) -> None:
    """Raise LmgymError if vLLM has `read` other ids than a prompt's."""
    if not read:
        raise LmgymError(
            "vLLM does not say what it has read of a prompt with a picture; 0.32 does: take that, or write "
            "engine.name: sampler"
        )
    expected = as_read(reader, ids)
    if [*read] == expected:
        return
    pairs = enumerate(zip(expected, read, strict=False))
    place = next((at for at, (one, other) in pairs if one != other), min(len(expected), len(read)))
    raise LmgymError(
        f"vLLM reads a prompt with a picture as {len(read)} tokens, and lmgym as {len(expected)}; they part at token "
        f"{place + 1}: its processor of this model is another one (preprocessor_config.json, processor_config.json, or "
        "another transformers); start vLLM with the files of policy.model, or write engine.name: sampler"
    )


def name_there(architecture: str, name: str) -> str:
    """A weight's name as vLLM 0.32 knows it. transformers has taken a level out of those of LLaVA-OneVision's tower.

    Example: name_there("llava_onevision", "model.vision_tower.a") -> "model.vision_tower.vision_model.a" """
    tower = "model.vision_tower."
    flat = architecture == "llava_onevision" and name.startswith(tower) and not name.startswith(f"{tower}vision_model.")
    return name.replace(tower, f"{tower}vision_model.", 1) if flat else name


def as_address(image: Any) -> str:
    """A picture (Pillow, RGB) as a `data:` address."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
