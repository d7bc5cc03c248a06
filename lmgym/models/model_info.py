"""What is known of a recipe's model before its weights are loaded: configuration, tokenizer, processor of pictures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)
from transformers.utils import logging as transformers_logging

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.core.hub import prepare_hub
from lmgym.core.model_folder import cannot_load, check_no_adapters, check_regular
from lmgym.models import lora, quantization
from lmgym.models.builtin import builtin_config, builtin_model, builtin_tokenizer, is_builtin
from lmgym.models.builtin_vision import PICTURE_MODELS, picture_files, picture_tokenizer, tiny_idefics3
from lmgym.models.chat_template import use_template
from lmgym.models.device import choose_device
from lmgym.models.gguf import folder_of
from lmgym.models.kernels import onednn_products
from lmgym.models.policy_section import PolicySection
from lmgym.models.vision import (
    family_of,
    ids_between,
    make_processor,
    picture_tokens,
    processor_files,
)
from lmgym.pictures.store import current_store
from lmgym.text.pictures import read_pictures

transformers_logging.disable_progress_bar()

BYTES = "builtin:bytes"


@dataclass(frozen=True)
class ModelInfo:
    """Facts from a model's configuration, and its tokenizer: known before any weights are loaded.
    `processor` is that of pictures, if the model reads them (models/vision.py); `architecture` is its model_type.
    Example: ModelInfo(encoder_decoder=True, vocabulary=32128, tokenizer=tokenizer)"""

    encoder_decoder: bool
    vocabulary: int
    tokenizer: Any
    processor: Any = None
    architecture: str = ""


def read_model_info(section: PolicySection, folder: Path | None = None) -> ModelInfo:
    """Read only the configuration of a recipe's model, and the tokenizer (of the model in `folder`, if it is there).
    Raises LmgymError if one cannot be loaded."""
    check_section(section)
    if is_builtin(section.model):
        words = load_tokenizer(section, folder)
        config = _builtin_config(section.model, load_tokenizer(section))
    else:
        config = config_of(section.model, section.revision)
        words = load_tokenizer(section, folder)
    vocabulary = getattr(config.get_text_config(decoder=True), "vocab_size", None) or 0
    processor = processor_of(section, config, words, folder)
    encodes = bool(getattr(config, "is_encoder_decoder", False))
    return ModelInfo(encodes, int(vocabulary), words, processor, str(config.model_type))


def skeleton(section: PolicySection) -> Any:
    """The base model of a recipe without weights (on torch's meta device), without adapters and quantization.

    Example:
        >>> sum(p.numel() for p in skeleton(PolicySection(model="Qwen/Qwen2.5-0.5B-Instruct")).parameters())
        494032768
    """
    if is_builtin(section.model):
        with torch.device("meta"):
            return builtin_of(section, load_tokenizer(section), 0)
    config = config_of(section.model, section.revision)
    with torch.device("meta"):
        return auto_class(config, section.model).from_config(config, dtype=torch.float32)


def stored_precision(section: PolicySection) -> torch.dtype:
    """The precision in which the files of a recipe's model hold its weights, by its configuration."""
    found = None if is_builtin(section.model) else getattr(config_of(section.model, section.revision), "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def load_tokenizer(section: PolicySection, folder: Path | None = None) -> Any:
    """The tokenizer of a recipe, with its chat template; of a run's checkpoint that holds a whole model, the one in its
    `folder`."""
    if folder is not None and (folder / lora.CONFIG).is_file():
        folder = None  # adapters are read beside the recipe's own model
    if folder is None and is_builtin(section.model):
        reads_pictures = section.model in PICTURE_MODELS and section.tokenizer in (None, "builtin:pictures")
        tokenizer: Any = picture_tokenizer() if reads_pictures else builtin_tokenizer(section.tokenizer or BYTES)
    else:
        tokenizer = _tokenizer(section, str(folder or section.tokenizer or section.model))
    if isinstance(section.template, str):  # else the tokenizer's own
        use_template(tokenizer, section.template)
    return tokenizer


def _tokenizer(section: PolicySection, name: str) -> Any:
    """A tokenizer from a folder or the Hub."""
    revision = section.revision if name == section.model else None
    name = folder_of(name)
    prepare_hub(name)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
        tokenizer("")  # a value of a wrong type in its configuration shows no earlier
    except Exception as error:  # transformers, the Hub client and tokenizers have no common exception
        key = "policy.tokenizer" if section.tokenizer else "policy.model"
        raise cannot_load(key, name, error, tokenizer=True) from error
    for key in ("is_local", "local_files_only"):  # transformers would save these with the tokenizer
        tokenizer.init_kwargs.pop(key, None)
    return tokenizer


def check_section(section: PolicySection) -> None:
    """Raise LmgymError if keys of the section do not fit each other or this machine."""
    builtin = is_builtin(section.model)
    if section.products == "onednn":
        onednn_products.check_possible(choose_device(section.device))
    if section.critic_from is not None and (section.critic != "separate" or section.lora_rank or section.quantise):
        raise LmgymError(
            "policy.critic_from gives a separate value function all its weights; write critic: separate, without "
            "lora_rank and quantise, or remove it"
        )
    if section.quantise is not None:
        if builtin:
            raise LmgymError(
                f"policy.quantise: {section.model} is a few megabytes of random numbers, nothing to pack; remove it, "
                "or name a model folder or a Hub id"
            )
        quantization.check_possible(choose_device(section.device))
    if section.architecture and not builtin:
        raise LmgymError("policy.architecture changes built-in models only; remove it, or change the model's folder")
    if builtin and section.tokenizer is not None and not is_builtin(section.tokenizer):
        raise LmgymError(
            f"policy.tokenizer: {section.model} speaks builtin:bytes or builtin:numbers, not {section.tokenizer}"
        )


def check_start_token(section: PolicySection, encoder_decoder: bool, tokenizer: Any, vocabulary: int) -> None:
    """Raise LmgymError if `context_start_token` does not fit the model."""
    token = section.context_start_token
    if token is None:
        return
    if not encoder_decoder:
        raise LmgymError(
            f"policy.context_start_token is for encoder-decoder models, and {section.model} is a causal one; remove it"
        )
    known = token in tokenizer.get_vocab() if isinstance(token, str) else 0 <= token < vocabulary
    if not known:
        raise LmgymError(f"policy.context_start_token: {token!r} is not in the vocabulary of {section.model}")


def processor_of(section: PolicySection, config: Any, tokenizer: Any, folder: Path | None) -> Any:
    """The processor of pictures of a recipe's model (of a checkpoint that holds a whole one, the one in its folder);
    None if it reads texts only."""
    family = family_of(config)
    if family is None:
        return None
    own = folder is not None and not (folder / lora.CONFIG).is_file()
    if not own and is_builtin(section.model):
        files = picture_files()
    else:
        model = str(folder) if own else folder_of(section.model)
        files = processor_files(model, section.revision if model == section.model else None)
    if not files:
        return None
    processor, store = make_processor(section.model, files, config, tokenizer), current_store()

    def ids_of(digest: str) -> list[int]:
        return ids_between(processor, picture_tokens(processor, digest, store.open(digest)), family.around)

    read_pictures(tokenizer, ids_of, family.around)
    return processor


def builtin_of(section: PolicySection, tokenizer: Any, seed: int) -> Any:
    """The built-in model of a recipe."""
    if section.model in PICTURE_MODELS:
        return tiny_idefics3(tokenizer, section.architecture, seeds.key(seed, "initial weights"))
    return builtin_model(section.model, tokenizer, section.architecture, seed)


def _builtin_config(name: str, tokenizer: Any) -> Any:
    """The configuration of a built-in model as it is without `policy.architecture`."""
    return tiny_idefics3(tokenizer, {}, 0).config if name in PICTURE_MODELS else builtin_config(name, tokenizer, {})


def config_of(model: str, revision: str | None) -> Any:
    """transformers' configuration of a model by name. Raises LmgymError if it cannot be read, and for weights that are
    stored packed."""
    model = folder_of(model)
    prepare_hub(model)
    check_no_adapters("policy.model", model)
    check_regular("policy.model", model)
    try:
        config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    except Exception as error:  # transformers and the Hub client have no common exception
        raise cannot_load("policy.model", model, error) from error
    if getattr(config, "quantization_config", None) is not None:
        raise LmgymError(
            f"policy.model: the weights of {model} are stored packed, and lmgym trains beside its own packing only; "
            "name the model that it was made from, with policy.quantise: 4bit or 8bit"
        )
    return config


def auto_class(config: Any, model: str) -> Any:
    """transformers' class of causal or of encoder-decoder LMs that has a model for this configuration, or of those that
    read pictures. (Some causal models, those that also hear, are listed with the encoder-decoders.) Raises LmgymError
    if none has."""
    if family_of(config) is not None:
        return AutoModelForImageTextToText
    kinds = (AutoModelForCausalLM, AutoModelForSeq2SeqLM)
    preferred = kinds[::-1] if getattr(config, "is_encoder_decoder", False) else kinds
    for kind in preferred:
        if type(config) in kind._model_mapping:
            return kind
    raise LmgymError(
        f"policy.model: {model} is a {config.model_type}, of which transformers has no causal and no encoder-decoder "
        "language model; take another model"
    )
