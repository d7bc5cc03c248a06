"""Whether a policy samples with the layers of kernels/fused_layers.py: if they can be had, and agree in a trial.

The families are listed, because in bf16 a small mistake could hide behind rounding. The trial is about the compiler and
the processor at hand: as with the fast path (fast_path.py) a few answers are scored step by step, as the sampler
decodes, by both kinds of layers, and must agree as far as rounding explains."""

import torch

from lmgym.core.errors import LmgymError
from lmgym.models import copies, lora
from lmgym.models.bound import bound_of, gap_of
from lmgym.models.distributions import own_logprobs
from lmgym.models.families import trunk_of
from lmgym.models.fast_path import DECODED, trial_batch
from lmgym.models.kernel_choice import Kernels, chosen
from lmgym.models.kernels import native, onednn_linear
from lmgym.models.kernels.fused_layers import FusedLayers
from lmgym.models.policy import Policy


def native_where(policy: Policy, wanted: Kernels) -> tuple[bool, str]:
    """`kernel_choice.chosen` for sampling."""
    made_for = "layers like Llama's or Gemma's that sample in bf16 on a CPU"
    return chosen(policy, "kernels", wanted, made_for, serves, native.library, try_out)


def serves(policy: Policy) -> bool:
    """True if the native kernels are made for such a policy on such a device."""
    if policy.exact or not (
        policy.fast and policy.device.type == "cpu" and policy.compute == torch.bfloat16 and policy.prepacked
    ):
        return False
    return policy.has_known_layers and onednn_linear.available()


@torch.no_grad()
def try_out(policy: Policy) -> None:
    """Raise LmgymError if decoding with fused layers differs by more than rounding explains."""
    sampling, batch = copies.sampling(policy), trial_batch(policy)
    lora.fill(sampling.model)
    _, spread = own_logprobs(sampling, batch)
    usual = [way(sampling, batch) for way in DECODED]
    fused = FusedLayers(trunk_of(sampling.model).layers, sampling.model.get_output_embeddings(), policy.rules)
    fused.lay_out()
    bound, found = bound_of(sampling, spread), [way(sampling, batch) for way in DECODED]
    fused.release()  # what refers to itself would keep its weights for a while
    for decoded, expected in zip(found, usual, strict=True):
        gap = gap_of(decoded, expected, batch.actions & (expected != 0))
        if not gap.within(bound):
            raise LmgymError(f"their log-probabilities differ from torch's by {gap}, where rounding explains {bound}")
