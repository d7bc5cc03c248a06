"""Workloads with a picture before each prompt: a small Idefics3 with random weights, its processor, and PNG files.

The words are the same in each step, the pictures are new ones, as in the first epoch of a run."""

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.workloads import LLAMA_15M, SPECIAL_IDS, Workload, random_prompts, save, text, word_tokenizer

IMAGE = "<image>"
MARKS = (IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")  # the last ids of the vocabulary
# A message's pictures and texts, one behind the other, without any name of a role.
TEMPLATE = """\
{%- for message in messages %}{% for part in message.content -%}
{{ '<image>' if part.type == 'image' else part.text }}
{%- endfor %}{% endfor %}"""
STEPS = 25  # for which there are pictures, which then come again
MERGED = 2  # rows, and columns, of patches that become one piece
TINY: dict[str, Any] = {  # lmgym's builtin:tiny_idefics3, with words
    "model_type": "idefics3",
    "vocab_size": 1_000,
    "text": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
    },
    "tower": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 8,
    },
}
SMALL: dict[str, Any] = {  # W1's language model behind a tower of 2.9M parameters
    "model_type": "idefics3",
    "vocab_size": LLAMA_15M["vocab_size"],
    "text": {key: value for key, value in LLAMA_15M.items() if key not in ("model_type", "vocab_size")},
    "tower": {
        "hidden_size": 192,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "image_size": 224,
        "patch_size": 16,
    },
}


def v1(seed: int = 0) -> Workload:
    """V1, as the recipe `shapes`: a model of 1M parameters; 16 prompts of a picture (16 pieces) and 36 random tokens,
    8 answers each, exactly 4 new tokens."""
    return _workload("V1", TINY, 16, 36, 4, seed)


def v2(seed: int = 0) -> Workload:
    """V2, W1 with pictures: 8 prompts of a picture (49 pieces) and 50 random tokens, 8 answers each, exactly 64 new
    tokens."""
    return _workload("V2", SMALL, 8, 50, 64, seed)


BY_NAME = {"v1": v1, "v2": v2}


def _workload(name: str, shape: dict[str, Any], count: int, words: int, new_tokens: int, seed: int) -> Workload:
    prompts = random_prompts(random.Random(seed), [words] * count, shape["vocab_size"] - len(MARKS))
    return Workload(name, prompts, 8, new_tokens, seed, shape=shape)


def pieces(workload: Workload) -> int:
    """How many pieces a picture has for the model of this workload."""
    tower = workload.shape["tower"]
    return (tower["image_size"] // tower["patch_size"] // MERGED) ** 2


def write(workload: Workload, folder: Path) -> None:
    """Save what `workloads.write` saves, the processor, and pictures under pictures/."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(workload.seed)
    vocabulary, side = workload.shape["vocab_size"], workload.shape["tower"]["image_size"]
    tokenizer = word_tokenizer(vocabulary, MARKS)
    tokenizer.chat_template = TEMPLATE
    for prompt in workload.prompts:
        assert tokenizer(text(prompt))["input_ids"] == prompt
    config = Idefics3Config(
        text_config={"model_type": "llama", "vocab_size": vocabulary, **SPECIAL_IDS, **workload.shape["text"]},
        vision_config=workload.shape["tower"],
        scale_factor=MERGED,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        tie_word_embeddings=True,
        **SPECIAL_IDS,
    )
    Idefics3ForConditionalGeneration(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    files = {
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor",
            "do_image_splitting": False,
            "size": {"longest_edge": side},
            "max_image_size": {"longest_edge": side},
        },
        "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": pieces(workload)},
    }
    for name, content in files.items():
        (folder / "model" / name).write_text(json.dumps(content), encoding="utf-8")
    _draw(workload, side, folder / "pictures")
    save(workload, folder)


def _draw(workload: Workload, side: int, folder: Path) -> None:
    """Pictures of 8 x 8 squares of random colours, one for each prompt of many steps."""
    from PIL import Image

    folder.mkdir()
    draw = random.Random(workload.seed)
    for number in range(STEPS * len(workload.prompts)):
        squares = Image.frombytes("RGB", (8, 8), draw.randbytes(8 * 8 * 3))
        squares.resize((side, side), Image.Resampling.NEAREST).save(folder / f"{number:03d}.png")
