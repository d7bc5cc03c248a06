"""The sampler's gap while a run trains: how far what was sampled and what is trained on lie apart, and when to stop.

Both come from the same weights, so rounding alone should part them. The model has proved this before the first step
(inference/proof.py); here each step is compared with the same bound."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lmgym.batch import Batch
from lmgym.core.errors import LmgymError
from lmgym.inference.kinds import EngineSection
from lmgym.inference.proof import Proof

METRIC = "sampler_logprob_gap"
LEAST, MOST = 1e-3, 1e-1  # nats a token: 0.1 % and 10 % of a token's probability
FAR = 10.0  # an error is this many times a warning


@dataclass(frozen=True)
class GapLimits:
    """Nats per token above which a step's gap is worth a warning, and above which the run ends.
    Example: GapLimits(warning=0.001, error=0.01)"""

    warning: float
    error: float


def gap_limits(section: EngineSection, proof: Proof) -> GapLimits:
    """The recipe's limits. Without them a warning begins at what rounding explains (the proof's bound on the mean), but
    not below 0.001 nor above 0.1 nats, and an error at ten times a warning. An exact policy has no gap, unless its
    answers come from older weights."""
    if proof.parity is not None and not section.ahead and section.gap_warning is None and section.gap_error is None:
        return GapLimits(0.0, 0.0)
    explained = min(max(proof.bound.mean, LEAST), MOST)
    warning = explained if section.gap_warning is None else section.gap_warning
    if section.gap_error is None:
        return GapLimits(warning, FAR * warning)
    if section.gap_warning is None:
        return GapLimits(min(warning, section.gap_error), section.gap_error)
    return GapLimits(warning, section.gap_error)


def watch_gap(
    limits: GapLimits, metrics: Mapping[str, float], batch: Batch, step: int, warn: Callable[[str], None]
) -> None:
    """Hold a step's gap against the limits: `warn` is called above the first, LmgymError is raised above the second. (A
    NaN is above both.) Not judged are steps with answers of older weights (replay) and log-probabilities that are not
    renormalised on the set that was drawn from (nlpo's compat): their gap has other causes."""
    if METRIC not in metrics or bool((batch.version != batch.version.max()).any()):
        return
    if batch.sampling_mask is not None and not batch.sampling_mask.renormalised:
        return
    gap = metrics[METRIC]
    advice = "try policy.compute: float32 or policy.path: plain"
    advice = advice if limits.error else "remove policy.parity, which does not hold here"
    if not gap <= limits.error:
        raise LmgymError(
            f"step {step + 1}: sampled and trained log-probabilities differ by {gap:.3g} nats a token, more than "
            f"engine.gap_error ({limits.error:.3g}), so the run would learn from wrong ratios; {advice}, or raise it"
        )
    if not gap <= limits.warning:
        warn(
            f"sampled and trained log-probabilities differ by more than engine.gap_warning ({limits.warning:.3g} nats "
            f"a token; metrics.jsonl has {METRIC} of each step): ratios are off by as much; {advice}"
        )
