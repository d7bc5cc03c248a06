"""What lmgym knows of model families by name: which ones the fast paths serve, and how their answers begin."""

from typing import Any

from transformers import PreTrainedModel

from lmgym.core.errors import LmgymError

# Families whose attention goes through the registered function with nothing else in it (checked by the parity tests).
# Any other causal model, or one of these with a sliding window, takes the plain padded path.
FAST_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neox")
# Encoder-decoders whose head is a linear map of what enters it (plus final_logits_bias), so that it can run on the
# actions only. Any other runs its own head on every token.
FAST_ENCODER_DECODERS = ("t5", "mt5", "bart", "mbart", "pegasus", "blenderbot", "marian")


def supports_fast_path(config: Any) -> bool:
    """True if the fast path computes exactly what this model itself would."""
    if getattr(config, "is_encoder_decoder", False):
        return config.model_type in FAST_ENCODER_DECODERS
    if config.model_type not in FAST_FAMILIES:
        return False
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return window is None and not getattr(config, "attn_logit_softcapping", None)


def default_decoder_start(model: PreTrainedModel) -> tuple[int, ...]:
    """The first tokens of an encoder-decoder's answers, as `generate` would put them: start token, then any forced BOS.

    Raises LmgymError if the model names no start token.
    """
    generation: Any = model.generation_config
    start = next(
        (
            value
            for holder in (generation, model.config)
            for name in ("decoder_start_token_id", "bos_token_id")
            if (value := getattr(holder, name, None)) is not None
        ),
        None,
    )
    if start is None:
        raise LmgymError(
            "the model names no decoder_start_token_id, so no answer could begin; write policy.context_start_token"
        )
    forced = getattr(generation, "forced_bos_token_id", None)
    return (int(start),) if forced is None else (int(start), int(forced))
