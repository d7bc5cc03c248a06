"""What `policy.parity: exact` serves: causal language models on the fast path, on a CPU, whose attention is plain or
windowed and whose logits are the LM head's."""

from typing import Any

import torch
from torch import nn

from lmgym.core.errors import LmgymError
from lmgym.models.kernels import onednn_linear
from lmgym.models.parity.modules import is_rotary
from lmgym.models.policy import Policy

MOVING = ("dynamic", "longrope")  # whose frequencies depend on the longest row of a forward pass


def check_served(policy: Policy) -> None:
    """Raise LmgymError, with one reason, if exact parity does not serve a policy."""
    if reason := _reason(policy):
        raise LmgymError(f"policy.parity: exact does not serve this {policy.model.config.model_type}, because {reason}")


def _reason(policy: Policy) -> str:
    """Why a policy is not served; empty if it is."""
    if policy.device.type != "cpu":
        return f"it is on {policy.device.type}, and exact products are known on a CPU alone; write device: cpu"
    if not onednn_linear.can_pack():
        return "this torch has no products through oneDNN; remove parity"
    if policy.compute == torch.bfloat16 and not onednn_linear.available():
        return "this processor has no products in bf16 through oneDNN; write compute: float32"
    if policy.encoder_decoder or not policy.fast:
        return "it is not on the fast path for causal models; remove parity"
    if policy.vision is not None:
        return "it reads pictures, with which it was not tried; remove parity"
    if any(rule.softcap is not None or rule.sinks for rule in policy.rules):
        return "its layers cap attention scores or have sinks; remove parity"
    head = policy.model.get_output_embeddings()
    if policy.own_head is not None or type(head) is not nn.Linear or head.bias is not None:
        return "its logits are more than a product with its LM head; remove parity"
    if any(kind in MOVING for module in policy.model.modules() if is_rotary(module) for kind in _kinds(module)):
        return "the frequencies of its positions depend on the longest row; remove parity"
    return ""


def _kinds(rotary: Any) -> tuple[str, ...]:
    """The kinds of rotary embeddings that a module computes: one, or one for each type of layer."""
    kind = getattr(rotary, "rope_type", "default")
    return tuple(kind.values()) if isinstance(kind, dict) else (kind,)
