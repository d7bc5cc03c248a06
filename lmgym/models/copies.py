"""Copies of a policy: one that trains, one that is frozen, one that samples, one with all weights of all ranks, and one
without its weights, as it is sent to another process."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmgym.core.errors import LmgymError
from lmgym.distributed.parts import whole
from lmgym.distributed.ranks import ALONE
from lmgym.models import lora, quantization
from lmgym.models.policy import Policy
from lmgym.models.skeleton import Skeleton


def trainable(policy: Policy) -> Policy:
    """A trainable copy without a value function. A quantized base, which does not train, is shared."""
    is_packed = quantization.is_quantised(policy.model)
    return policy.with_model(quantization.copy_beside(policy.model) if is_packed else _whole_model(policy))


def frozen(policy: Policy, precision: torch.dtype | None = None) -> Policy:
    """A copy that does not train, without a value function: adapters merged, parameters in `precision` if the model is
    on the fast path (others do not all run with such parameters). Of a policy with a quantized base, only the adapters
    are copied, and they are not merged."""
    is_packed = quantization.is_quantised(policy.model)
    if policy.skeleton is not None:
        other = policy.with_model(lora.merged(_whole_model(policy), copied=True))
    else:
        other = policy.with_model(quantization.copy_beside(policy.model) if is_packed else lora.merged(policy.model))
    other.model.requires_grad_(False)
    if precision is not None and policy.fast and not is_packed:
        other.convert(precision)
    return other


def sampling(policy: Policy) -> Policy:
    """A copy that samples: parameters in the precision of the forward pass if the model is on the fast path. Weights
    that are rounded stochastically are not copied again: it shares them, and sees each update at once."""
    precision = policy.compute if policy.fast else None
    if policy.skeleton is not None:
        return policy.with_model(policy.skeleton.filled(policy.model, precision).requires_grad_(False))
    if precision is not None and policy.rounded is not None and not quantization.is_quantised(policy.model):
        shared = [policy.computed(parameter) for parameter in policy.model.parameters()]
        return policy.with_model(Skeleton(policy.model).with_parameters(shared).requires_grad_(False))
    other = policy.with_model(copy.deepcopy(policy.model).requires_grad_(False))
    if precision is not None:
        other.convert(precision)
    return other


def gathered(policy: Policy) -> Policy | None:
    """The policy with all of its weights, to be written; None on all ranks but the first. Where each rank holds a part,
    they come together in memory of the CPU, and all ranks must ask at once."""
    if policy.skeleton is None:
        return policy if policy.ranks.first else None
    model = policy.skeleton.gathered(policy.model, keep=policy.ranks.first)
    head = None if policy.value_head is None else whole(policy.value_head.weight).detach()
    critic = None if policy.critic is None else gathered(policy.critic)
    if model is None:
        return None
    whole_head = None
    if head is not None:
        whole_head = nn.Linear(head.shape[1], 1, bias=False)
        whole_head.weight.data = head.cpu()
    return policy.with_model(model, critic=critic, value_head=whole_head)


def _whole_model(policy: Policy) -> PreTrainedModel:
    return copy.deepcopy(policy.model) if policy.skeleton is None else policy.skeleton.filled(policy.model)


def without_weights(policy: Policy) -> Policy:
    """A copy whose parameters are empty, without a value function. Its buffers, tokenizer and settings are the
    policy's. Raises LmgymError for quantized weights, which are more than parameters."""
    if quantization.is_quantised(policy.model):
        raise LmgymError("policy.quantise: packed weights stay in the training process; write engine: sampler")
    skeleton = policy.skeleton or Skeleton(policy.model)
    return _seeing_itself(policy.with_model(skeleton.model, ranks=ALONE))


def with_weights(empty: Policy, weights: Sequence[Tensor]) -> Policy:
    """The policy with these parameters, in the order of `model.parameters()`, on its device."""
    model = Skeleton(empty.model).with_parameters([tensor.to(empty.device) for tensor in weights])
    return _seeing_itself(empty.with_model(model))


def _seeing_itself(policy: Policy) -> Policy:
    """The policy with the vision tower of its own model, where other copies share that of the model that trains."""
    vision = policy.vision
    return policy if vision is None else policy.but(vision=vision.of_model(policy.model))
