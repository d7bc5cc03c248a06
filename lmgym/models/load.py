"""Load a Policy by name: a Hugging Face Hub id, a local folder or a built-in model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.core.model_folder import cannot_load
from lmgym.core.progress import doing
from lmgym.models import lora, quantization
from lmgym.models.builtin import is_builtin
from lmgym.models.critic import with_critic
from lmgym.models.device import choose_compute, choose_device, choose_prepacked
from lmgym.models.fast_path import route_of
from lmgym.models.frozen_base import hold_narrow
from lmgym.models.gguf import folder_of
from lmgym.models.hooks import layers_of
from lmgym.models.integrity import check_complete, check_finite, check_vocabulary
from lmgym.models.kernels import adapted_linear
from lmgym.models.language_model import Route
from lmgym.models.model_info import (
    auto_class,
    builtin_of,
    check_section,
    check_start_token,
    config_of,
    load_tokenizer,
    processor_of,
    skeleton,
)
from lmgym.models.native_trial import native_where
from lmgym.models.parity import modules as parity
from lmgym.models.picture_features import Vision
from lmgym.models.policy import VALUE_HEAD, Policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.rounding import RoundedWeights
from lmgym.models.served_exactly import check_served
from lmgym.models.training_trial import trains_native_where
from lmgym.models.vision import (
    check_version,
    family_of,
    freeze_vision,
    vision_pattern,
)
from lmgym.pictures.store import current_store


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
        check_section(section)
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
        model = builtin_of(section, tokenizer, seed)
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


def _with_vision(policy: Policy, section: PolicySection, folder: Path | None) -> Policy:
    """The policy with what reads pictures, if its model does and its processor is there: the vision tower frozen,
    unless it trains. Raises LmgymError if the section asks to train what is not there."""
    processor = processor_of(section, policy.model.config, policy.tokenizer, folder)
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


def _from_files(
    section: PolicySection, seed: int, folder: Path | None, tokenizer: Any, packing: dict[str, Any] | None = None
) -> tuple[Any, Any]:
    """A model and its tokenizer (loaded after it, unless it is given), from a folder, or from where the section says:
    parameters in fp32, unless `packing` quantizes them."""
    model = str(folder or folder_of(section.model))
    revision = section.revision if model == section.model else None
    kind = auto_class(config_of(model, revision), model)
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


def _decoder_start(section: PolicySection, model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The first token of an encoder-decoder's answers, if the recipe gives one."""
    token = section.context_start_token
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    check_start_token(section, model.config.is_encoder_decoder, tokenizer, vocabulary)
    if token is None:
        return ()
    return (token if isinstance(token, int) else int(tokenizer.convert_tokens_to_ids(token)),)
