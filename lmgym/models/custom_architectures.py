"""Models with a user's own architecture: classes with transformers' interface, found by the model_type of a folder."""

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from lmgym.core.errors import LmgymError


def is_model_class(thing: Any) -> bool:
    """True if `thing` is a model class with transformers' interface."""
    return isinstance(thing, type) and issubclass(thing, PreTrainedModel)


def make_known(cls: type[PreTrainedModel]) -> None:
    """Register a model class, so that `policy.model` may name a folder whose config.json has the class's model_type.

    Raises LmgymError for a class without a configuration class, or with a model_type that transformers already has."""
    config: Any = getattr(cls, "config_class", None)
    model_type = getattr(config, "model_type", "")
    if not model_type:
        raise LmgymError(f"{cls.__name__} has no config_class with a model_type, by which its folders would be known")
    encoder_decoder = bool(getattr(config(), "is_encoder_decoder", False))
    auto: Any = AutoModelForSeq2SeqLM if encoder_decoder else AutoModelForCausalLM
    try:
        AutoConfig.register(model_type, config, exist_ok=False)
        auto.register(config, cls, exist_ok=False)
    except ValueError as error:
        raise LmgymError(
            f"{cls.__name__}: transformers knows the model_type '{model_type}' already ({error})"
        ) from error
