"""How hard each term of a loss pushes each token, for those who look at a run; by autograd, from the loss itself."""

from collections.abc import Mapping

import torch
from torch import Tensor


def pushes(losses: Mapping[str, Tensor], logprobs: Tensor) -> dict[str, Tensor]:
    """Minus the derivative of each loss, a number, by every log-probability [N T], as columns `push/NAME`: above 0 a
    step makes the token likelier. A loss that does not depend on them (an entropy, a value) has no column.

    The derivatives end at `logprobs`: no parameter gets a gradient, and the graph stays for the backward pass.

    Example: pushes({"policy": (-advantages * logprobs).sum() / 2}, logprobs)["push/policy"] -> advantages / 2"""
    columns = {}
    for name, loss in losses.items():
        if not loss.requires_grad:
            continue
        (slope,) = torch.autograd.grad(loss, logprobs, retain_graph=True, allow_unused=True)
        if slope is not None:
            columns[f"push/{name}"] = -slope
    return columns
