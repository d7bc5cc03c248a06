"""Tiny random models of each architecture that reads pictures, built from configs into a folder with their processor;
and small drawn pictures."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from lmgym.models.builtin import byte_tokenizer
from tests import models

TEXT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
MARKS = {
    "idefics3": [
        "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
        *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    ],
    "llava_onevision": ["<image>", "<video>"],
    "smolvlm": [
        "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
        *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    ],
    "qwen2_5_vl": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
    "qwen3_vl": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
    "gemma3": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
}  # fmt: skip
FAMILIES = ("idefics3", "llava_onevision", "qwen2_5_vl", "gemma3")  # qwen3_vl is near qwen2_5_vl
COLOURS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
PINPOINTS = [[16, 16], [16, 32], [32, 16], [32, 32]]
IMAGES: dict[str, dict[str, Any]] = {  # preprocessor_config.json
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16},
        **COLOURS,
    },
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16},
        **COLOURS,
    },
    "llava_onevision": {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": 16, "width": 16},
        "image_grid_pinpoints": PINPOINTS,
        **COLOURS,
    },
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 64, "longest_edge": 1024},
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 64, "longest_edge": 1024},
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}, **COLOURS},
}
PROCESSORS: dict[str, dict[str, Any]] = {  # processor_config.json
    "idefics3": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    "smolvlm": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    "llava_onevision": {
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": 16,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_9",
    },
    "qwen2_5_vl": {"processor_class": "Qwen2_5_VLProcessor"},
    "qwen3_vl": {"processor_class": "Qwen3VLProcessor"},
    "gemma3": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
}


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Single bytes and the marks of a family."""
    words = byte_tokenizer()
    marks = [AddedToken(mark, special=True, normalized=False) for mark in MARKS[family]]
    if family != "gemma3":
        words.add_special_tokens({"additional_special_tokens": marks})
        return words
    names = dict(zip(("image_token", "boi_token", "eoi_token"), MARKS[family], strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=words.backend_tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=names,
    )


def model(family: str, seed: int = 0, width: int = 16) -> Any:
    """A random model of a family, with weights so large that a mistake shows; its language model has two heads of half
    its `width`."""
    words = tokenizer(family)
    ids = words.convert_tokens_to_ids(MARKS[family])
    text = {**TEXT, "vocab_size": len(words), "hidden_size": width}
    sections = [width // 8, width // 16, width // 16]  # of a head of M-RoPE: time, row, column
    made: Any
    if family in ("idefics3", "smolvlm"):
        smol = family == "smolvlm"
        config = (SmolVLMConfig if smol else Idefics3Config)(
            vision_config=TOWER, text_config={"model_type": "llama", **text}, scale_factor=2, image_token_id=ids[0]
        )
        made = (SmolVLMForConditionalGeneration if smol else Idefics3ForConditionalGeneration)(config)
    elif family == "llava_onevision":
        tower = {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER}
        made = LlavaOnevisionForConditionalGeneration(
            LlavaOnevisionConfig(
                vision_config=tower,
                text_config={"model_type": "qwen2", **text},
                image_token_index=ids[0],
                video_token_index=ids[1],
                image_grid_pinpoints=PINPOINTS,
            )
        )
    elif family == "qwen2_5_vl":
        tower = {
            "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "out_hidden_size": width,
            "fullatt_block_indexes": [1],
        }  # fmt: skip
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
        made = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(
                vision_config=tower,
                text_config={**text, "rope_parameters": rope},
                image_token_id=ids[0],
                video_token_id=ids[1],
                vision_start_token_id=ids[2],
                vision_end_token_id=ids[3],
            )
        )
    elif family == "qwen3_vl":
        tower = {
            "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": width, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        }  # fmt: skip
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, "mrope_interleaved": True}
        made = Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(
                vision_config=tower,
                text_config={**text, "head_dim": width // 2, "rope_parameters": rope},
                image_token_id=ids[0],
                video_token_id=ids[1],
                vision_start_token_id=ids[2],
                vision_end_token_id=ids[3],
            )
        )
    else:
        window = {"head_dim": width // 2, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
        made = Gemma3ForConditionalGeneration(
            Gemma3Config(
                vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
                text_config={**text, **window},
                mm_tokens_per_image=4,
                image_token_index=ids[0],
                boi_token_index=ids[1],
                eoi_token_index=ids[2],
            )
        )
    return models.sharpen(made.eval(), seed=seed)


def write(family: str, folder: Path, seed: int = 0, width: int = 16) -> Path:
    """A model folder as one of the Hub: weights, tokenizer, processor."""
    model(family, seed, width).save_pretrained(folder)
    tokenizer(family).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES[family]))
    (folder / "processor_config.json").write_text(json.dumps(PROCESSORS[family]))
    return folder


class Drawn(dict[str, Image.Image]):
    """Pictures by the first ten digits of their sha256, with the interface of a store."""

    def open(self, prefix: str) -> Image.Image:
        return self[prefix[:10]]

    def draw(self, seed: int, width: int, height: int) -> str:
        """A picture of random squares of colour; returns its digest."""
        generator = torch.Generator().manual_seed(seed)
        squares = torch.randint(0, 256, (4, 4, 3), generator=generator, dtype=torch.uint8).numpy()
        image = Image.fromarray(squares).resize((width, height), Image.Resampling.NEAREST)
        digest = hashlib.sha256(image.tobytes() + bytes([seed])).hexdigest()
        self[digest[:10]] = image
        return digest
