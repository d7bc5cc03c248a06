"""From a name to a Policy: Hugging Face Hub id, local folder, or `builtin:tiny`; device and precision chosen once."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from lmgym import seeds
from lmgym.errors import LmgymError
from lmgym.policies.policy import Policy
from lmgym.registry import suggest

transformers_logging.disable_progress_bar()

BUILTIN = "builtin:tiny"
SMALL = 10_000_000  # parameters below which bf16 costs more in conversions than it saves


@dataclass(kw_only=True)
class PolicySection:
    """The `policy:` section of a recipe.

    Example: PolicySection(model="Qwen/Qwen2.5-0.5B-Instruct", device="cuda")
    """

    model: str = BUILTIN
    """Hub id, local folder, or builtin:tiny (a small random Llama with a byte-level tokenizer)."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    tokenizer: str | None = None
    """Hub id or folder of the tokenizer, where it is not the model's."""
    eos_token: str | None = None
    """End-of-sequence token, for a tokenizer that does not name one."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of forward passes; the parameters themselves stay fp32. auto: bf16 where a short probe finds it
    fast."""
    tokens_per_forward: int = 16384
    """Bound on the padded tokens of one forward pass (memory, not results)."""
    path: Literal["auto", "fast", "plain"] = "auto"
    """fast: packed rows, own KV cache; plain: Hugging Face's padded forward."""
    template: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the tokenizer's chat template."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """LlamaConfig fields that override builtin:tiny's, such as hidden_size."""


def load_policy(section: PolicySection, seed: int = 0, folder: Path | None = None) -> Policy:
    """The policy that a recipe asks for; its weights come from `folder` where one is given (a checkpoint).

    Raises LmgymError if the model or tokenizer cannot be had, or the tokenizer has no end-of-sequence token.
    """
    device = choose_device(section.device)
    if section.architecture and section.model != BUILTIN:
        raise LmgymError(
            f"policy.architecture changes {BUILTIN} only; remove it, or take the model from its own folder"
        )
    if folder is not None:
        model, tokenizer = _load(section, str(folder), None, str(folder))
    elif section.model == BUILTIN:
        tokenizer = byte_tokenizer()
        model = tiny_model(tokenizer, section.architecture, seed)
    else:
        model, tokenizer = _load(section, section.model, section.revision, section.tokenizer or section.model)
    if section.eos_token is not None:
        if section.eos_token not in tokenizer.get_vocab():
            raise LmgymError(f"policy.eos_token: '{section.eos_token}' is not in the vocabulary of {section.model}")
        tokenizer.eos_token = section.eos_token
    if tokenizer.eos_token_id is None:
        raise LmgymError(
            f"policy.model: the tokenizer of {section.model} has no end-of-sequence token, so no answer could "
            "ever end; name one of its tokens with policy.eos_token"
        )
    compute = choose_compute(section.compute, device, sum(p.numel() for p in model.parameters()))
    policy = Policy(model.to(device), tokenizer, compute, section.tokens_per_forward)
    if section.path == "fast" and not policy.fast:
        raise LmgymError(
            f"policy.path: the fast path does not serve {model.config.model_type}; write path: auto or plain"
        )
    policy.fast = policy.fast and section.path != "plain"
    return policy


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes: ids 0 pad, 1 BOS, 2 EOS, then the 256 bytes; any text round-trips."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<pad>", "<bos>", "<eos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(special + alphabet)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=512
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast, architecture: dict[str, Any], seed: int) -> LlamaForCausalLM:
    """A random Llama of under a million parameters, a function of the seed."""
    valid = LlamaConfig().to_dict()
    for key in architecture:
        if key not in valid:
            raise LmgymError(f"unknown key 'policy.architecture.{key}'; {suggest(str(key), valid)}")
    fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **architecture,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.key(seed, "initial weights") & 0x7FFFFFFFFFFFFFFF)
        try:
            return LlamaForCausalLM(LlamaConfig(**fields))
        except Exception as error:  # the library's own kinds, for sizes that do not go together
            raise LmgymError(f"policy.architecture: {' '.join(str(error).split())[:300]}") from error


def choose_device(wanted: str) -> torch.device:
    """The device asked for, or the best one here; LmgymError if it is not there."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if wanted == "auto":
        wanted = "cuda" if cuda else "mps" if mps else "cpu"
    if (wanted == "cuda" and not cuda) or (wanted == "mps" and not mps):
        raise LmgymError(f"policy.device: there is no {wanted} device here; write device: auto or cpu")
    return torch.device(wanted)


def choose_compute(wanted: str, device: torch.device, parameters: int) -> torch.dtype:
    """The precision of forward passes. `auto` probes the machine once; the run folder keeps the answer."""
    if wanted == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
        if device.type == "cpu" and parameters >= SMALL:
            fast = bf16_speedup() > 1.5
        wanted = "bfloat16" if fast else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]


def bf16_speedup(size: int = 512, repeats: int = 5) -> float:
    """How many times faster this CPU multiplies bf16 matrices than fp32 ones (best of some repeats each)."""
    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.randn(size, size).to(dtype)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            matrix @ matrix
            times.append(time.perf_counter() - start)
        best[dtype] = min(times)
    return best[torch.float32] / best[torch.bfloat16]


def _load(section: PolicySection, model: str, revision: str | None, tokenizer: str) -> tuple[Any, Any]:
    try:
        config = AutoConfig.from_pretrained(model, revision=revision)
        if getattr(config, "is_encoder_decoder", False):
            raise LmgymError(
                f"policy.model: {model} is an encoder-decoder model, which this version does not train yet"
            )
        loaded = AutoModelForCausalLM.from_pretrained(model, revision=revision, dtype=torch.float32)
        words = AutoTokenizer.from_pretrained(tokenizer, revision=revision if tokenizer == model else None)
    except LmgymError:
        raise
    except Exception as error:  # what transformers, the Hub client, safetensors and tokenizers raise has no common name
        reason = " ".join(str(error).split())[:300]
        raise LmgymError(
            f"policy.model: could not load '{model}': not a model folder here, and the Hub did not give it ({reason})"
        ) from error
    for parameter in loaded.parameters():  # from the odd addresses of a mapped file to aligned ones: matrix products
        parameter.data = parameter.data.clone()  # round by alignment, and a resumed run must round as before
    for key in ("is_local", "local_files_only"):  # transformers would save with the tokenizer how it was loaded
        words.init_kwargs.pop(key, None)
    return loaded, words
