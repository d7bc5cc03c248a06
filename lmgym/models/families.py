"""Model families: which ones have a fast path, where their positions begin and end, how a decoder's answers begin."""

import inspect
from typing import Any

from transformers import PreTrainedModel

from lmgym.core.errors import LmgymError

# Causal families whose attention is only the registered attention function (the parity tests check it). Any other
# causal model, or one of these with a sliding window, is tried when it is loaded (fast_path.py).
FAST_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neox")
# Those whose layers are Llama's, with or without biases and norms of each head.
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")
# Those with Gemma's norms and gates (kernels/layer_form.py).
LIKE_GEMMA = ("gemma", "gemma3_text")
# Encoder-decoders whose head is a linear map of its input (plus final_logits_bias), so that it can run on the actions
# only. Any other runs its own head on every token.
FAST_ENCODER_DECODERS = ("t5", "mt5", "bart", "mbart", "pegasus", "blenderbot", "marian")

# The names that a configuration may have for its longest row; the first one counts.
CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len", "max_target_positions", "max_decoder_position_embeddings")
# Causal families whose own caches do not go on where they left off (docs/model_families.md): all is computed again.
WITHOUT_CACHE = ("blt", "cpmant", "moshi")


def supports_fast_path(config: Any) -> bool:
    """True if the fast path computes exactly the same as the model itself, given the model's configuration."""
    if getattr(config, "is_encoder_decoder", False):
        return config.model_type in FAST_ENCODER_DECODERS
    if config.model_type not in FAST_FAMILIES:
        return False
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return window is None and not getattr(config, "attn_logit_softcapping", None)


def first_position(model: PreTrainedModel) -> int | None:
    """The position of a row's first token: 0, or padding_idx + 1 in families like RoBERTa, which number their tokens
    behind the padding's position. None if the model takes no position_ids."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return int(module.padding_idx) + 1  # type: ignore[arg-type]
    return 0


def trunk_of(model: PreTrainedModel) -> Any:
    """The part of a causal model that turns tokens into the hidden states of its LM head: its base model, or where
    transformers knows none (Llama 4) what is called `model`."""
    base = model.base_model
    return getattr(model, "model", base) if base is model else base


def context_length(model: PreTrainedModel) -> int | None:
    """The tokens of the longest row that the model can read (of an encoder-decoder, each half); None without a limit.

    With LongRoPE (arXiv 2402.13753; Phi-3, Phi-4) it is the context before the extension: the frequencies of all rows
    of a forward pass change when its longest row is longer, so a row's result would depend on the others."""
    config: Any = model.config.get_text_config(decoder=True)
    named = [getattr(config, name, None) for name in CONTEXT_KEYS]
    limits = [value for value in named if isinstance(value, int) and value > 0]  # XLNet's -1 means none
    if not limits:
        return None
    # The tokens up to which each kind of LongRoPE, of the whole model or of a layer's type, keeps its frequencies.
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, dict) and one.get("rope_type") == "longrope"]
    longest = min([limits[0], *(int(one["original_max_position_embeddings"]) for one in kinds)])
    return longest - (first_position(model) or 0)


def default_decoder_start(model: PreTrainedModel) -> tuple[int, ...]:
    """The first tokens of an encoder-decoder's answers, as in `generate`: the start token and a forced BOS, if any.
    Raises LmgymError if the model's configuration has no start token."""
    generation: Any = model.generation_config
    names = ("decoder_start_token_id", "bos_token_id")
    named = [getattr(holder, name, None) for holder in (generation, model.config) for name in names]
    start = next((token for token in named if token is not None), None)
    if start is None:
        raise LmgymError(
            "the model names no decoder_start_token_id, so no answer could begin; write policy.context_start_token"
        )
    forced = getattr(generation, "forced_bos_token_id", None)
    return (int(start),) if forced is None else (int(start), int(forced))


def cache_argument(model: PreTrainedModel) -> str:
    """The name that the model's forward pass, and its output, have for the cache: `cache` since transformers 5.24,
    `past_key_values` before. (Of the old names 5.24 passes some over in silence.)"""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def cap_scores(model: PreTrainedModel) -> None:
    """Let a model that caps its attention scores (Gemma 2) do so: before 5.22 transformers computed it by a kernel of
    torch that cannot, and said nothing."""
    configs = (model.config, model.config.get_text_config(decoder=True))
    capped = any(getattr(config, "attn_logit_softcapping", None) for config in configs)
    if capped and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
