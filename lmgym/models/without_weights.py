"""A policy without its weights, as it is sent to another process; and with them again."""

from collections.abc import Sequence

from torch import Tensor

from lmgym.core.errors import LmgymError
from lmgym.distributed.ranks import ALONE
from lmgym.models import quantization
from lmgym.models.policy import Policy
from lmgym.models.skeleton import Skeleton


def without_weights(policy: Policy) -> Policy:
    """A copy whose parameters are empty, without a value function. Its buffers, tokenizer and settings are the
    policy's. Raises LmgymError for quantized weights, which are more than parameters."""
    if quantization.is_quantised(policy.model):
        raise LmgymError("policy.quantise: packed weights stay in the training process; write engine: sampler")
    skeleton = policy.skeleton or Skeleton(policy.model)
    return policy.with_model(skeleton.model, ranks=ALONE)


def with_weights(empty: Policy, weights: Sequence[Tensor]) -> Policy:
    """The policy with these parameters, in the order of `model.parameters()`, on its device."""
    model = Skeleton(empty.model).with_parameters([tensor.to(empty.device) for tensor in weights])
    return empty.with_model(model)
