"""The built-in model that reads pictures: a small Idefics3 with random weights, its tokenizer and its processor."""

import json
from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, PreTrainedTokenizerFast
from transformers.models.idefics3 import Idefics3Config, Idefics3ForConditionalGeneration

from lmgym.core.errors import LmgymError
from lmgym.models.builtin import byte_tokenizer, check_architecture, ids_of
from lmgym.models.seeded import seeded

NAME = "builtin:tiny_idefics3"
PICTURE_MODELS = frozenset({NAME})
IMAGE = "<image>"
MARKS = (IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
SIDE, PIECES = 64, 16  # pixels of a picture, to which any is resized, and its pieces
TEXT = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
TOWER = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": SIDE,
    "patch_size": 8,
}  # fmt: skip
FP32 = {"dtype": "float32"}  # as a model has it that was loaded from a folder, so that both are saved alike
FILES = {  # as beside the weights of a model on the Hub
    "preprocessor_config.json": {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": SIDE},
        "max_image_size": {"longest_edge": SIDE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": PIECES},
}


def picture_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer builtin:pictures: single bytes as in builtin:bytes, then the marks of Idefics3 (ids 259 to 262)."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return tokenizer


def picture_files() -> dict[str, bytes]:
    """The files of the built-in model's processor, by name."""
    return {name: json.dumps(content, indent=2).encode() for name, content in FILES.items()}


def tiny_idefics3(tokenizer: Any, architecture: Mapping[str, Any], key: int) -> Any:
    """The model, in fp32 on the CPU; a function of its arguments. `architecture` sets fields of its Llama. Raises
    LmgymError for a tokenizer without marks of pictures, an unknown field, and values that do not fit together."""
    if IMAGE not in tokenizer.get_vocab():
        raise LmgymError(f"policy.tokenizer: {NAME} reads pictures, for which it needs builtin:pictures; remove it")
    check_architecture(architecture, set(LlamaConfig().to_dict()))
    with seeded(key):
        try:
            config = Idefics3Config(
                vision_config={**TOWER, **FP32},
                text_config={"model_type": "llama", **TEXT, **FP32, **ids_of(tokenizer), **architecture},
                scale_factor=2,
                image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
                tie_word_embeddings=True,
            )
            return Idefics3ForConditionalGeneration(config)
        except Exception as error:  # various exceptions of the library, for sizes that do not fit together
            raise LmgymError(f"policy.architecture: {' '.join(str(error).split())[:300]}") from error
