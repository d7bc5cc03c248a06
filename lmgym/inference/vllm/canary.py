"""The canary: a few answers that vLLM samples right after each push, scored by the policy that was pushed.

Both sides then have the same weights, so rounding alone parts them, however large the update was. The first push, which
brings what the servers were started with, shows how much that is; every later one is held against it. A push that has
not arrived, or not whole, parts them by what the update has moved: that is noticed where it is more than rounding."""

import torch

from lmgym.batch import Batch
from lmgym.core.errors import LmgymError
from lmgym.models.bound import bound_of
from lmgym.models.distributions import own_logprobs
from lmgym.models.policy import Policy

FIRST = {True: 0.01, False: 1.0}  # nats a token on average that the first push may show, in fp32 or in less
TIMES = 4.0  # a later gap over the first one: both are means over some 48 tokens, and logits grow a little in training


class Canary:
    """Holds the answers of each server against the policy. `limit` replaces the bounds of all pushes (nats a token).

    Example: canary = Canary(); canary.check("http://127.0.0.1:8000", policy, proof.sample(policy, engine), remedy)"""

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit
        self._bounds: dict[str, float] = {}  # by server, from its first push on
        self._before: dict[str, tuple[Batch, torch.Tensor]] = {}  # its last answers, as the policy scored them then

    def check(self, name: str, policy: Policy, batch: Batch, remedy: str) -> None:
        """Raise LmgymError if the answers of this server, sampled since the newest push, are not the policy's."""
        precise = policy.compute == torch.float32
        scored = policy.compute_logprobs_no_grad(batch).logprobs
        gap = _mean_gap(batch, scored, batch.require("logprobs_sampler"))
        bound = self.limit or self._bounds.get(name, FIRST[precise])
        if not gap <= bound:
            raise LmgymError(
                f"{name} samples with other weights than the policy's, or reports other log-probabilities: they differ "
                f"by {gap:.2g} nats a token, where {bound:.2g} is allowed{self._moved(name, policy, gap)}; {remedy}"
            )
        if name not in self._bounds:
            _, spread = own_logprobs(policy, batch)
            least = bound_of(policy.but(compute=torch.float32), spread).mean  # what the rounding of fp32 explains
            self._bounds[name] = min(max(least, TIMES * gap), FIRST[precise])
        self._before[name] = (batch, scored)

    def _moved(self, name: str, policy: Policy, gap: float) -> str:
        """How far the weights that were pushed have moved since the push before: on the same tokens, by the policy."""
        if name not in self._before:
            return ""
        batch, before = self._before[name]
        moved = _mean_gap(batch, policy.compute_logprobs_no_grad(batch).logprobs, before)
        lost = ", so it seems not to have arrived" if moved / 2 <= gap <= 2 * moved else ""
        return f" (the update since the push before has moved the policy's own by {moved:.2g}{lost})"


def _mean_gap(batch: Batch, one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other)[batch.actions].abs().mean())
