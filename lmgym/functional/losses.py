"""Per-token loss terms [N T], to be minimised. functional/reductions.py reduces them."""

from typing import Literal

import torch

from lmgym.functional.shapes import Mask, PerToken

ValueClip = Literal["clipped", "max"]
Level = Literal["token", "sequence"]


def policy_gradient(logprobs: PerToken, advantages: PerToken) -> PerToken:
    """-A log pi: its gradient is the score-function estimator (REINFORCE, Williams 1992, eq. 4)."""
    return -advantages * logprobs


def log_ratio(new: PerToken, old: PerToken, bound: float = 20.0) -> PerToken:
    """log pi_new - log pi_old (nats), clamped to +-bound, so that one extreme token cannot overflow its exponential."""
    return (new - old).clamp(-bound, bound)


def sequence_log_ratio(new: PerToken, old: PerToken, actions: Mask) -> PerToken:
    """The mean of a row's log-ratios, written to each of its actions; zero elsewhere.

    Its exponential is GSPO's ratio (arXiv 2507.18071, section 4.1): the ratio of the whole row's probabilities, to the
    power of 1 / actions.

    Example:
        >>> actions = torch.tensor([[0, 1, 1]]).bool()
        >>> sequence_log_ratio(torch.tensor([[0., -1., -2.]]), torch.tensor([[0., -1.5, -2.1]]), actions)
        tensor([[0.0000, 0.3000, 0.3000]])
    """
    total = (log_ratio(new, old) * actions).sum(1, keepdim=True)
    return total / actions.sum(1, keepdim=True).clamp(min=1) * actions


def importance_ratio(old: PerToken, sampler: PerToken, actions: Mask, level: Level) -> PerToken:
    """pi_old / mu: the mismatch between the trainer's and the sampler's distribution (mu) for the same weights.

    level="token": of each action. "sequence": of the whole row, the product over its actions, written to each of them.
    It has no gradient, and is 1 for tokens that are no actions. The caller truncates it (IMPALA, arXiv 1802.01561,
    section 4.1).

    Example:
        >>> old, sampler = torch.tensor([[-1., -2.]]), torch.tensor([[-1.2, -1.9]])
        >>> importance_ratio(old, sampler, torch.ones(1, 2).bool(), "sequence")
        tensor([[1.1052, 1.1052]])
    """
    difference = log_ratio(old.detach(), sampler) * actions
    if level == "sequence":
        difference = difference.sum(1, keepdim=True).clamp(-20.0, 20.0) * actions
    return difference.exp()


def clipped_surrogate(
    ratio: PerToken, advantages: PerToken, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PerToken:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347, eq. 7; unequal bounds: DAPO, arXiv
    2503.14476, eq. 10); with `dual_clip` c never above -c A where A < 0 (arXiv 1912.09729).

    Example: clipped_surrogate(torch.tensor([[1.5, 0.5]]), torch.ones(1, 2), 0.2, 0.28) -> tensor([[-1.2800, -0.5000]])
    """
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)
    return -surrogate


def clipped(
    ratio: PerToken, advantages: PerToken, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PerToken:
    """1 for tokens at which `clipped_surrogate` takes a bound, so that they have no gradient; else 0."""
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    if dual_clip is not None:
        too_low = too_low | ((ratio > dual_clip) & (advantages < 0))
    return (too_high | too_low).to(ratio.dtype)


def clipped_weight(ratio: PerToken, clip_low: float, clip_high: float) -> PerToken:
    """clip(r, 1 - clip_low, 1 + clip_high) without gradient: CISPO's weight of a token's policy gradient (MiniMax-M1,
    arXiv 2506.13585, eq. 4 and 5). The paper has no lower bound: clip_low 1.

    Example: clipped_weight(torch.tensor([[7., 0.5]]), 1.0, 4.0) -> tensor([[5.0000, 0.5000]])"""
    return ratio.detach().clamp(1 - clip_low, 1 + clip_high)


def soft_gate(ratio: PerToken, advantages: PerToken, positive: float, negative: float) -> tuple[PerToken, PerToken]:
    """g = (4 / tau) sigmoid(tau (r - 1)), tau = positive where A > 0, else negative; and its slope dg/dr.

    -g A replaces the clipped surrogate in SAPO (arXiv 2511.20347, section 3). The slope is 1 at r = 1, like that of the
    unclipped surrogate, and falls to 0 on both sides, faster for higher tau.

    Example:
        >>> gate, slope = soft_gate(torch.tensor([[1., 3.]]), torch.tensor([[1., 1.]]), 1.0, 1.05)
        >>> gate, slope
        (tensor([[2.0000, 3.5232]]), tensor([[1.0000, 0.4200]]))
    """
    tau = torch.where(advantages > 0, ratio.new_tensor(positive), ratio.new_tensor(negative))
    opened = torch.sigmoid(tau * (ratio - 1))
    return 4 / tau * opened, (4 * opened * (1 - opened)).detach()


def dppo_mask(new: PerToken, old: PerToken, advantages: PerToken, low: float, high: float) -> Mask:
    """True for tokens whose probability has already risen by more than `high` (if A > 0) or fallen by more than `low`
    (if A < 0). |pi_new - pi_old| is the total variation between the two choices "this token" and "any other token".

    DPPO's Binary-TV mask (arXiv 2602.04879), and prime-rl's with both bounds at 0.2. `old` is the sampler there.

    Example:
        >>> new, old = torch.tensor([[.9, .9, .02]]).log(), torch.tensor([[.6, .8, .001]]).log()
        >>> dppo_mask(new, old, torch.ones(1, 3), 0.2, 0.2)
        tensor([[ True, False, False]])
    """
    change = new.detach().exp() - old.exp()
    return ((advantages > 0) & (change > high)) | ((advantages < 0) & (change < -low))


def value_loss(
    new: PerToken, old: PerToken, returns: PerToken, clip: float | None = None, form: ValueClip = "clipped"
) -> PerToken:
    """(V - return)^2, not halved; with `clip`, V is kept within +-`clip` of V_old, the value at sampling time.

    form="clipped": the error of V_old + clamp(V - V_old, -clip, clip) alone, so a value outside has no gradient
    (stable-baselines3, RL4LMs). "max": the larger of the errors of V and of the clipped V, so only a value that moved
    too far towards the return has no gradient (OpenAI's PPO2, TRL). TRL halves it: multiply its coefficient by 0.5.
    Without `clip`, `old` and `form` are not read. Raises ValueError for another form.

    Example:
        >>> value_loss(torch.tensor([[1., .5]]), torch.tensor([[.5, .6]]), torch.tensor([[1.2, .4]]), clip=0.2)
        tensor([[0.2500, 0.0100]])
    """
    if form not in ("clipped", "max"):
        raise ValueError(f"form '{form}' is not one of clipped, max")
    error = (new - returns) ** 2
    if clip is None:
        return error
    clipped_error = (old + (new - old).clamp(-clip, clip) - returns) ** 2
    return clipped_error if form == "clipped" else torch.maximum(error, clipped_error)
