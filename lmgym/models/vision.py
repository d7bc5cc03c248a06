"""Models that read pictures: which ones, their processors, and the ids that stand for a picture in a prompt.

A picture enters the language model as features, one vector a piece (models/picture_features.py). Which marks stand
around the pieces, and how many there are, is said by the model's own processor of transformers."""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedModel
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import cached_file

from lmgym.core.errors import LmgymError, reason
from lmgym.pictures.ids import piece_ids


@dataclass(frozen=True)
class Family:
    """What an architecture does with pictures beyond putting features in place of words. With `grid`, a piece has a
    row and a column in the picture as its position (M-RoPE, arXiv 2409.12191); `types` is the argument of the model's
    own forward pass that says which tokens are pieces; with `deep`, features are also added behind the first layers
    (DeepStack, arXiv 2406.04334); `plain_because` says why prompts with pictures cannot take the fast path; `around` is
    text that the processor writes on both sides of a picture.
    Example: Family(types="token_type_ids", plain_because="pieces of a picture see each other")"""

    grid: bool = False
    deep: bool = False
    types: str = ""
    plain_because: str = ""
    around: str = ""


QWEN = Family(grid=True, types="mm_token_type_ids")
FAMILIES = {
    "idefics3": Family(),
    "smolvlm": Family(),
    "llava_onevision": Family(),
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": replace(QWEN, deep=True),
    "gemma3": Family(
        types="token_type_ids",
        plain_because="the pieces of a picture see each other, also those behind them, and packed rows do not do that",
        around="\n\n",
    ),
}
FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json")
IDS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")  # of a processor's outputs, not of pixels
FEATURES, NEWER = "mm_encoder_outputs", "5.18"  # an argument of models with DeepStack, and who has it first
PAD, START, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"  # of Qwen's templates, which write all three


def family_of(config: Any) -> Family | None:
    """What is known of the architecture of this configuration; None if lmgym gives it no pictures."""
    return FAMILIES.get(config.model_type) if getattr(config, "vision_config", None) is not None else None


def check_version(model: PreTrainedModel) -> None:
    """Raise LmgymError for a model whose class, in this version of transformers, takes no features of pictures where
    lmgym gives it some."""
    family = family_of(model.config)
    if family is not None and family.deep and FEATURES not in inspect.signature(model.forward).parameters:
        raise LmgymError(
            f"policy.model: transformers {transformers.__version__} takes no features of pictures for "
            f"{model.config.model_type}; {NEWER} does (pip install -U transformers)"
        )


def language_of(model: PreTrainedModel) -> Any:
    """The language model within a model that reads pictures, without its LM head."""
    base: Any = model.base_model
    return base.language_model if hasattr(base, "language_model") else base.text_model


def vision_names(model: PreTrainedModel) -> list[str]:
    """The names of the parameters that make features of pictures: those of the vision tower and of what projects its
    output into the language model. Example: vision_names(model)[0] -> "model.vision_model.embeddings.patch..." """
    other = {*map(id, language_of(model).parameters()), *map(id, model.get_output_embeddings().parameters())}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in other]


def vision_pattern(model: PreTrainedModel) -> str:
    """A regular expression of the names of the modules that make features of pictures: peft spares these."""
    language = next(name for name, module in model.named_modules() if module is language_of(model))
    return rf"(?!{re.escape(language)}\.|lm_head).*"


def freeze_vision(model: PreTrainedModel) -> None:
    """Let the parameters that make features of pictures not train."""
    names = set(vision_names(model))
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def make_processor(model: str, files: Mapping[str, bytes], config: Any, tokenizer: Any) -> Any:
    """transformers' processor of pictures and texts, made of its `files` (`processor_files`) around this tokenizer,
    which gets the processor's chat template if it has none. It reads no videos, and so needs no torchvision. Raises
    LmgymError if a file is damaged or a library is missing.

    Example: make_processor(model, processor_files(model, None), config, tokenizer).image_token -> "<image>" """
    kind: Any = PROCESSOR_MAPPING[type(config)]
    try:
        with TemporaryDirectory() as folder:
            for name, data in files.items():
                (Path(folder) / name).write_bytes(data)
            images = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
            settings, _ = kind.get_processor_dict(folder)
        known = {*inspect.signature(kind.__init__).parameters} - {*kind.get_attributes(), "self", "kwargs"}
        settings = {key: value for key, value in settings.items() if key in known}
        with _without_words(kind):
            processor = _without_videos(kind)(images, tokenizer, **settings)
        processor.lmgym_files = dict(files)
    except Exception as error:  # transformers, Pillow and the Hub client have no common exception
        raise LmgymError(
            f"policy.model: could not load the processor of pictures of {model} ({reason(error)})"
        ) from error
    if getattr(tokenizer, "chat_template", None) is None:
        tokenizer.chat_template = getattr(processor, "chat_template", None)
    placeholder = placeholder_of(processor)
    if placeholder != config.image_token_id:
        raise LmgymError(
            f"policy.model: in {model} a picture's place is the token {config.image_token_id} for the model "
            f"(config.json) and {placeholder} for its processor; take the processor and the tokenizer of this model"
        )
    return processor


def processor_files(model: str, revision: str | None) -> dict[str, bytes]:
    """The files of the processor of a model in a folder or on the Hub, by name; none if it has no processor, so that it
    reads texts only. Example: processor_files("HuggingFaceTB/SmolVLM-256M-Instruct", None).keys()"""
    quiet = dict.fromkeys(("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors"), False)
    paths = {name: cached_file(model, name, revision=revision, **quiet) for name in FILES}
    return {name: Path(path).read_bytes() for name, path in paths.items() if path is not None}


def save_processor(processor: Any, folder: Path) -> None:
    """Write a processor to a folder, as the files that it was loaded from, videos included."""
    for name, data in processor.lmgym_files.items():
        if name != "chat_template.json":  # the tokenizer has it now, and saves it
            (folder / name).write_bytes(data)


def _without_videos(kind: Any) -> Any:
    """The class of a processor, which may be made without a processor of videos: those of transformers need
    torchvision, and are not used here."""
    attributes = [name for name in kind.get_attributes() if name != "video_processor"]
    signature = inspect.signature(kind.__init__).parameters
    given = {"video_processor": None} if "video_processor" in signature else {}

    class Pictures(kind):  # type: ignore[misc]
        """Pictures and texts."""

        def __init__(self, images: Any, tokenizer: Any, **settings: Any) -> None:
            super().__init__(image_processor=images, tokenizer=tokenizer, **given, **settings)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return attributes

    Pictures.__name__ = kind.__name__
    return Pictures


@contextmanager
def _without_words(kind: Any) -> Iterator[None]:
    """Let a processor be made without num2words, with which SmolVLM's writes how many frames a video has."""
    module = sys.modules[kind.__module__]
    missing = getattr(module, "num2words", module) is None
    if missing:
        module.num2words = str  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if missing:
            module.num2words = None  # type: ignore[attr-defined]


def placeholder_of(processor: Any) -> int:
    """The id that a processor writes for each piece of a picture."""
    ids = getattr(processor, "image_token_ids", None)  # Gemma 3: not the token that a template writes for a picture
    return int(ids[0] if ids else getattr(processor.tokenizer, "image_token_id", None) or processor.image_token_id)


def placeholder_text(processor: Any) -> str:
    """The mark that the model's chat template writes for a picture. `picture_tokens` replace it.
    Example: placeholder_text(processor) -> "<image>", or of Qwen "<|vision_start|><|image_pad|><|vision_end|>" """
    text = str(processor.image_token)
    return f"{START}{text}{END}" if text == PAD else text


def processed(processor: Any, image: Any) -> tuple[list[int], dict[str, Tensor]]:
    """What a processor makes of one picture (RGB) alone: the ids that stand for it, and the pixel inputs of the model.

    A picture is always processed as if it were the only one of its prompt, so that it is the same wherever it stands.
    (LLaVA-OneVision's own processor does not cut the pictures of a prompt with several into parts; here it does.)"""
    found = dict(
        processor(images=image, text=placeholder_text(processor), add_special_tokens=False, return_tensors="pt")
    )
    pixels = {name: value for name, value in found.items() if name not in IDS}
    if "image_sizes" in pixels:  # LLaVA-OneVision: the parts [1 P 3 H W], of which another picture has another number
        pixels["pixel_values"] = pixels["pixel_values"][0]
    return found["input_ids"][0].tolist(), pixels


def joined(pictures: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The pixel inputs of several pictures of one row, for the model's own forward pass."""
    pixels = pictures[0]["pixel_values"]
    axis = 1 if pixels.dim() == 5 else 0  # Idefics3 and SmolVLM: [rows, parts of all pictures, 3, H, W]
    return {name: torch.cat([one[name] for one in pictures], axis) for name in pictures[0]}


def picture_tokens(processor: Any, digest: str, image: Any) -> list[int]:
    """All ids that stand for one picture in this model, in order: ordinary ids for the marks around and between its
    pieces, ids of pieces (pictures/ids.py) for the places of its features. `digest` is the picture's sha256. They
    stand where the chat template writes `placeholder_text`.

    Example: picture_tokens(policy.vision.processor, digest, image)"""
    found = ids, _ = processed(processor, image)
    if (keep := getattr(processor, "lmgym_keep", None)) is not None:  # a pass will want the pixels
        keep(digest, found)
    placeholder = placeholder_of(processor)
    pieces = iter(piece_ids(digest, ids.count(placeholder)))
    return [next(pieces) if id == placeholder else id for id in ids]


def ids_between(processor: Any, ids: list[int], around: str) -> list[int]:
    """The ids of `picture_tokens` without those of the text `around` the picture, which belongs to the words beside it.
    Raises LmgymError for a processor that writes other text there."""
    edge = processor.tokenizer(around, add_special_tokens=False)["input_ids"] if around else []
    count = len(edge)
    if ids[:count] != edge or ids[len(ids) - count :] != edge:
        raise LmgymError(
            f"the processor of this model writes other text than {around!r} around a picture: it cuts pictures into "
            "parts (do_pan_and_scan in preprocessor_config.json, which must be false), or transformers has changed"
        )
    return ids[count : len(ids) - count]
