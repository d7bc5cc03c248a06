"""A policy and its value head as a reward model in Hugging Face form: a sequence classifier with one output, or, of
steps, a token classifier with the labels "wrong" and "right"."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import ModelCard, hf_hub_download
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, PreTrainedModel

from lmgym.core.errors import LmgymError
from lmgym.core.model_folder import cannot_load, check_no_adapters
from lmgym.models import lora, quantization
from lmgym.models.builtin import is_builtin
from lmgym.models.critic import value_head
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection

Kind = Literal["policy", "reward_model", "process_reward_model"]  # what a stage makes; the first is none


@dataclass(frozen=True)
class Form:
    """How a kind of reward model is written: transformers' class, its outputs, and how prompt and answer become its
    input (rewards/learned)."""

    auto: Any
    noun: str
    labels: tuple[str, ...]
    layout: str


FORMS: Mapping[str, Form] = {
    "reward_model": Form(AutoModelForSequenceClassification, "sequence classifier", ("score",), "answer"),
    # Two outputs, 0 and s, since programs that read a token classifier take their softmax: sigmoid(s) is that of s.
    "process_reward_model": Form(AutoModelForTokenClassification, "token classifier", ("wrong", "right"), "steps"),
}


def as_reward_model(policy: Policy, kind: Kind = "reward_model") -> PreTrainedModel:
    """The policy's trunk (adapters merged) under its value head, or under one of zeros if it has none yet. Shares the
    trunk's memory with the policy where nothing had to be merged.

    Raises LmgymError for encoder-decoders, whose classifiers read their input otherwise; for models that read pictures,
    which no reward shows to a model; for quantized weights; and for models of which transformers has no classifier that
    is a linear map on the states."""
    # 1. An empty classifier of the same configuration.
    model, form = policy.model, FORMS[kind]
    name = model.config.model_type
    if policy.encoder_decoder:
        raise LmgymError(f"a reward model is made of a causal model, and {name} is an encoder-decoder")
    if policy.vision is not None:
        raise LmgymError(f"a reward model reads texts, and {name} reads pictures too; take a model of texts")
    if quantization.is_quantised(model):
        raise LmgymError("a reward model is written with all its weights, so policy.quantise must go")
    model = lora.merged(model) if lora.has_adapter(model) else model
    config = type(model.config).from_dict(model.config.to_dict())
    names = dict(enumerate(form.labels))
    config.update({"num_labels": len(names), "id2label": names, "label2id": {v: k for k, v in names.items()}})
    config.pad_token_id = _padding(policy)
    if type(config) not in form.auto._model_mapping:
        raise LmgymError(f"transformers has no {form.noun} of {name}, so it cannot become a {kind.replace('_', ' ')}")
    with torch.device("meta"):
        classifier = form.auto.from_config(config)
    # 2. The trunk's weights, and the head's.
    trunk, heads = classifier.base_model, _heads(classifier, len(names))
    if type(trunk) is not type(model.base_model) or len(heads) != 1:
        raise LmgymError(f"the {form.noun} of {name} is more than its trunk and a linear map")
    setattr(classifier, classifier.base_model_prefix, model.base_model)
    if any(parameter.is_meta for key, parameter in classifier.named_parameters() if not key.startswith(heads[0])):
        raise LmgymError(f"the {form.noun} of {name} has parameters that the language model lacks")
    head = policy.value_head or value_head(policy.hidden_size, next(iter(policy.parameters())))
    setattr(classifier, heads[0], _written(head, getattr(classifier, heads[0])))
    return classifier.eval()  # type: ignore[no-any-return]


@torch.no_grad()
def take_reward_model(critic: Policy, name: str) -> None:
    """Give a separate value function the trunk and the head of a reward model: the value of a text is then its score.
    Raises LmgymError for what is no sequence classifier with one output, or has another architecture.

    Example: with_critic(policy, separate=True, start=partial(take_reward_model, name="runs/rm/final"))"""
    check_no_adapters("policy.critic_from", name)
    try:
        classifier, found = AutoModelForSequenceClassification.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise cannot_load("policy.critic_from", name, error) from error
    heads = _heads(classifier, 1)
    if found["missing_keys"] or len(heads) != 1 or type(classifier.base_model) is not type(critic.model.base_model):
        raise LmgymError(
            f"policy.critic_from: {name} is a {type(classifier).__name__}, and the value function needs a classifier "
            f"with one output and the policy's trunk ({type(critic.model.base_model).__name__})"
        )
    head = getattr(classifier, heads[0])
    try:
        critic.model.base_model.load_state_dict(classifier.base_model.state_dict())
    except RuntimeError as error:
        raise LmgymError(f"policy.critic_from: {name} has weights of other sizes than the policy's model") from error
    assert critic.value_head is not None
    critic.value_head.weight.copy_(head.weight)


def _heads(classifier: nn.Module, outputs: int) -> list[str]:
    """The names of a classifier's linear maps to so many numbers, outside of its trunk."""
    return [
        name
        for name, part in classifier.named_children()
        if isinstance(part, nn.Linear) and part.out_features == outputs
    ]


@torch.no_grad()
def _written(head: nn.Linear, empty: nn.Linear) -> nn.Linear:
    """The value head in the shape of a classifier's own: its output is the last one, any other is 0, and so is a
    bias."""
    weight, bias = head.weight, empty.bias is not None
    found = nn.Linear(empty.in_features, empty.out_features, bias=bias, device=weight.device, dtype=weight.dtype)
    for parameter in found.parameters():
        parameter.zero_()
    found.weight[-1] = weight[0]
    return found


def _padding(policy: Policy) -> int:
    """The id that pads rows. transformers reads the last token that is no padding, so it must not be the end of
    sequence, which ends every row."""
    pad, end = policy.tokenizer.pad_token_id, policy.tokenizer.eos_token_id
    usual = pad is not None and pad != end and pad < policy.vocabulary
    return int(pad) if usual else next(id for id in range(policy.vocabulary) if id != end)


def save_reward_model(folder: Path, policy: Policy, facts: Mapping[str, Any], kind: Kind = "reward_model") -> None:
    """Write the reward model and its tokenizer. `facts` (base_model, licence, ...) become part of its configuration. A
    separate critic is the reward model, if there is one."""
    classifier = as_reward_model(policy.critic or policy, kind)
    classifier.config.update({"lmgym": {"layout": FORMS[kind].layout, **facts}})
    classifier.save_pretrained(folder)
    tokenizer = copy.deepcopy(policy.tokenizer)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(classifier.config.pad_token_id)
    tokenizer.save_pretrained(folder)


def facts_of_base(section: PolicySection, separator: str = "") -> dict[str, Any]:
    """What a reward model says of the model that it was made from: its name, revision, licence (as its model card says;
    None if it says none or is not here) and the keyword arguments of the chat template; and, of a process reward model,
    what separates steps."""
    base = section.model if is_builtin(section.model) or not Path(section.model).exists() else Path(section.model).name
    facts = {"base_model": base, "revision": section.revision, "licence": licence_of(section)}
    return facts | {"template": section.chat_template_kwargs} | ({"separator": separator} if separator else {})


def licence_of(section: PolicySection) -> str | None:
    """The licence that a model's card (README.md) names; None for a built-in model, or a model without a card."""
    if is_builtin(section.model):
        return None
    card = Path(section.model) / "README.md"
    try:
        if not card.parent.is_dir():
            card = Path(hf_hub_download(section.model, "README.md", revision=section.revision))
        found = ModelCard.load(card).data.to_dict().get("license")
    except Exception:  # no card, no network, a card without a header: huggingface_hub has an error for each
        return None
    return str(found) if found else None
