"""How a policy computes, in the sentences that a run and `lmgym check` begin with."""

import torch

from lmgym.models.device import SMALL
from lmgym.models.kernels import onednn_products
from lmgym.models.policy import Policy

WORTH_SAYING = 1.3  # times as fast


def sentences(policy: Policy) -> list[str]:
    """All that there is to say.

    Example: sentences(policy) -> ["path: fast (packed rows, own KV cache)", "rounding: nearest"]"""
    every = (path_sentence, products_sentence, rounding_sentence, kernels_sentence, update_kernels_sentence)
    return [sentence for of in every if (sentence := of(policy))]


def path_sentence(policy: Policy) -> str:
    """Which path the model takes, and why. Example: "path: fast (packed rows, own KV cache)" """
    if policy.fast and policy.vision is not None and policy.vision.family.plain_because:
        return f"path: fast for texts; plain (padded, slower) with pictures: {policy.vision.family.plain_because}"
    if policy.fast:
        return "path: fast (packed rows, own KV cache)"
    return "path: plain (padded, slower)" + (f": {policy.plain_because}" if policy.plain_because else "")


def products_sentence(policy: Policy) -> str:
    """How products in fp32 on a CPU are computed; empty if there are none, or nothing is to be said of it."""
    if policy.onednn:
        return "products: fp32 through oneDNN"
    if policy.exact:
        return ""
    large = sum(parameter.numel() for parameter in policy.model.parameters()) >= SMALL
    possible = policy.device.type == "cpu" and policy.compute == torch.float32 and onednn_products.available()
    times = onednn_products.speedup() if large and possible and policy.skeleton is None else 1.0
    if times < WORTH_SAYING:
        return ""
    return f"products: torch (policy.products: onednn multiplies {times:.1f} times as fast here; other roundings)"


def kernels_sentence(policy: Policy) -> str:
    """Which kernels sampling in bf16 uses on a CPU (`policy.kernels`), and why; empty for all other policies."""
    if policy.native:
        return "kernels: native (fused layers, compiled for this processor)"
    return f"kernels: torch, because {policy.native_unused}" if policy.native_unused else ""


def update_kernels_sentence(policy: Policy) -> str:
    """The same of scoring and updates (`policy.update_kernels`)."""
    if policy.trains_native:
        parts = "layers and LM head" if policy.has_known_layers else "LM head"
        return f"update kernels: native ({parts}, compiled for this processor)"
    return f"update kernels: torch, because {policy.trains_native_unused}" if policy.trains_native_unused else ""


def rounding_sentence(policy: Policy) -> str:
    """How weights become what passes in bf16 compute with; empty if they are not rounded."""
    if policy.compute != torch.bfloat16 or not policy.parameters():
        return ""
    if policy.rounded is not None:
        return "rounding: stochastic (bf16 weights, anew after each update)"
    return "rounding: nearest" + (" (weights that ranks share out)" if policy.skeleton is not None else "")
