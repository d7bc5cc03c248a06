"""Model families: which ones have a fast path, and the first tokens of an encoder-decoder's answers."""

from typing import Any

from transformers import PreTrainedModel

from lmgym.core.errors import LmgymError

# Causal families whose attention is only the registered attention function (the parity tests check it). Any other
# causal model, or one of these with a sliding window, uses the padded path.
FAST_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neox")
# Encoder-decoders whose head is a linear map of its input (plus final_logits_bias), so that it can run on the actions
# only. Any other runs its own head on every token.
FAST_ENCODER_DECODERS = ("t5", "mt5", "bart", "mbart", "pegasus", "blenderbot", "marian")


def supports_fast_path(config: Any) -> bool:
    """True if the fast path computes exactly the same as the model itself, given the model's configuration."""
    if getattr(config, "is_encoder_decoder", False):
        return config.model_type in FAST_ENCODER_DECODERS
    if config.model_type not in FAST_FAMILIES:
        return False
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return window is None and not getattr(config, "attn_logit_softcapping", None)


def default_decoder_start(model: PreTrainedModel) -> tuple[int, ...]:
    """The first tokens of an encoder-decoder's answers, as in `generate`: the start token and a forced BOS, if any.
    Raises LmgymError if the model's configuration has no start token.
    Example: default_decoder_start(t5) -> (0,)"""
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
