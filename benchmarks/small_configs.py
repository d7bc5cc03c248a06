"""A small configuration of every causal and encoder-decoder class of transformers, made from the class's own defaults.

Sizes become tiny by their names, windows shorter than the rows that are read, and layers as few as show every kind of
layer. SPECIAL says what that does not get right.
"""

import re
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PretrainedConfig, PreTrainedModel

VOCABULARY = 300
ROWS = 64  # the longest row of models with such a limit

# A pattern of a field's whole name, and its value in a small model. The first that matches counts. Selections of keys
# (index_topk, keep_window_size) keep all: where scores are equal, it depends on the row's length which ones they take.
SIZES: list[tuple[str, int]] = [
    (r".*vocab_size(_per_layer_input)?|encoder_hash_byte_group_vocab", VOCABULARY),
    (r"max_((en|de)coder_)?position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions", ROWS),
    (r"(?!keep_).*window(_size|_len)?|attention_chunk_size|(mamba_)?chunk_size", 8),
    (r"(num_hidden|num|n|((num_)?(en|de)coder))_?layers?|num_blocks|depth", 2),
    (r"(num|n)_(kv|key_value)_heads|kv_n_heads|num_query_groups|linear_num_key_heads", 2),
    (r".*(_heads?|n_heads)", 4),
    (r".*head_(dim|size)|.*_headdim|mamba_d_head|dim_head|d_kv|kv_channels|rotary_dim", 8),
    (r".*lora_rank|.*dt_rank|adapter_rank|laurel_rank|hc_lowrank|time_step_rank", 8),
    (r".*(d_state|state_size)", 8),
    (r".*intermediate_size.*|.*ffn.*(dim|size)|d_ff|dim_ff|n_inner|feed_forward_size", 64),
    (r".*hidden_size.*|d_model|n_embd|.*embed_dim|.*embedding_(dim|size)|word_embed_proj_dim|lru_width", 32),
    (r".*_?experts|zero_expert_num", 4),
    (r".*experts_per_tok(en)?|moe_top_?k|moe_k", 2),
    (r"n_groups?|topk_group|.*expert_groups?|.*n_?groups|n(um)?_shared_experts", 1),
    (r"ngram_vocab_size_base|num_position_embeddings|split_ngram_parts|mem_len|keep_window_size|index_topk", 64),
]
# Of these patterns a wide model has eight times as much.
WIDE = (
    r".*head_(dim|size)",
    r".*intermediate_size",
    r".*hidden_size",
    r"max_((en|de)coder_)?position",
    r"(?!keep_).*window",
)
TEXT = {"head_dim": 8}
AXES = {"rope_theta": 10000.0, "rope_type": "default"}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}  # heads times size: twice the width
GEMMA = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
TWICE = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": AXES, "sliding_attention": AXES}},
    "ctrl": {"dff": 64},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "topk_group": 1, "n_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {**GEMMA, "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "granite_speech_encoder": {"hidden_dim": 32},
    "encoder-decoder": {"encoder": {"is_decoder": False}, "decoder": {"add_cross_attention": True}},
    "granitemoehybrid": {**MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": TEXT,
    "hunyuan_v1_moe": {**TEXT, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": TEXT,
    "nemo_speechlm": {"text_config": {"num_key_value_heads": 2}},
    "nemotron": {"num_key_value_heads": 2},
    "qwen3_asr": {"eos_token_id": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": None},
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 1},
    "xlnet": {"d_head": 8, "d_inner": 64},
    "xlm": {"causal": True},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**TWICE, "attention_head_dim": 16, "attention_hidden_size": 64, "mamba_dt_rank": 4},
    "zamba2": {**TWICE, "attention_head_dim": 16, "attention_hidden_size": 64, "mamba_headdim": 8, "n_mamba_heads": 8},
}


def small_config(name: str, wide: bool = False) -> PretrainedConfig:
    """The small configuration of a model_type; `wide`, one whose products take longer than their calls (eight times the
    width). Raises what the class raises if it refuses it."""
    kind = CONFIG_MAPPING[name]
    try:
        usual = kind()
    except Exception:  # its own defaults do not fit each other
        usual = None
    arguments = {} if usual is None else small_fields(usual, wide)
    return kind(**merged(arguments, SPECIAL.get(name, {})))


def small_fields(usual: PretrainedConfig, wide: bool = False) -> dict[str, Any]:
    """The arguments of a small configuration of the same class."""
    fields: dict[str, Any] = {}
    ids = iter(range(VOCABULARY - 1, 0, -1))  # of special tokens beyond the small vocabulary
    for name, value in vars(usual).items():
        if isinstance(value, PretrainedConfig):
            own = merged(small_fields(value, wide), SPECIAL.get(value.model_type, {}))
            fields[name] = {**own, "model_type": value.model_type}
        elif re.fullmatch(r".*token_(id|index)", name):
            if isinstance(value, int) and value >= VOCABULARY:
                fields[name] = next(ids)
            elif isinstance(value, list | tuple):
                fields[name] = 2
        elif type(value) is int and (small := size_of(name, wide)) is not None and value > small:
            fields[name] = small
    if usual.__dict__.get("num_key_value_heads") == usual.__dict__.get("num_attention_heads") is not None:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    types = vars(usual).get("layer_types")
    if types and len(set(types)) > 1:
        # Attention to everything last: a cache whose first layers are recurrent may not know how much it has read.
        fields["layer_types"] = sorted(dict.fromkeys(types), key=lambda kind: kind == "full_attention")
        fields["num_hidden_layers"] = len(fields["layer_types"])
    if "is_decoder" in vars(usual):
        fields["is_decoder"] = True
    return fields


def size_of(name: str, wide: bool = False) -> int | None:
    """The value of a field with this name in a small model; None if it is no size."""
    pattern, value = next(((pattern, value) for pattern, value in SIZES if re.fullmatch(pattern, name)), ("", None))
    return value * 8 if value is not None and wide and pattern.startswith(WIDE) else value


def merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The fields with these changes; a None removes one."""
    for name, value in changes.items():
        nested = isinstance(value, dict) and isinstance(fields.get(name), dict)
        fields[name] = merged(fields[name], value) if nested else value
    return {name: value for name, value in fields.items() if value is not None}


def small_model(kind: str, name: str, wide: bool = False) -> PreTrainedModel:
    """A random model whose attention and next-token distributions are far from uniform, so that a mistake shows."""
    auto: Any = AutoModelForCausalLM if kind == "causal" else AutoModelForSeq2SeqLM
    model = auto.from_config(small_config(name, wide))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            centre = 1.0 if parameter.dim() < 2 and bool((parameter == 1).all()) else 0.0  # norms
            parameter.data = centre + 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()  # type: ignore[no-any-return]
