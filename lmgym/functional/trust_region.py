"""The mathematics of a natural gradient step (TRPO, arXiv 1502.05477, appendix C): no model, no line search.

The caller has a gradient g and a function v -> F v + damping v, where F is the Fisher matrix. The step is
step_size * x, with x from `conjugate_gradient`; a line search of the caller shortens it until divergence and surrogate
are acceptable."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def conjugate_gradient(
    product: Callable[[Float[Tensor, " P"]], Float[Tensor, " P"]],
    target: Float[Tensor, " P"],
    iterations: int,
    tolerance: float = 1e-10,
) -> tuple[Float[Tensor, " P"], Float[Tensor, ""]]:
    """Solve product(x) = target for a symmetric positive definite product; returns x and the norm of the residual.

    Hestenes and Stiefel 1952. It ends after `iterations` products, or when the squared norm of the residual is below
    `tolerance` (the rule of RL4LMs and sb3-contrib), or if a direction has no positive curvature. It starts at zero
    and so is exact for a zero target (RL4LMs and sb3-contrib start from noise of 1e-4, so their step is random).

    Example: conjugate_gradient(lambda v: torch.tensor([4., 2.]) * v, torch.ones(2), 10)[0] -> tensor([0.2500, 0.5000])
    """
    solution = torch.zeros_like(target)
    residual, direction = target.clone(), target.clone()
    squared = residual @ residual
    for _ in range(iterations):
        if squared < tolerance:
            break
        image = product(direction)
        curvature = direction @ image
        if curvature <= 0:
            break
        length = squared / curvature
        solution += length * direction
        residual -= length * image
        previous, squared = squared, residual @ residual
        direction = residual + (squared / previous) * direction
    return solution, squared.sqrt()


def step_size(delta: float, curvature: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """sqrt(2 delta / x^T F x): the step along x at which the quadratic model of the divergence is delta (nats).

    Zero where the curvature is zero, as it is for a zero gradient.

    Example: step_size(0.01, torch.tensor(1.3852814)) -> tensor(0.1202)"""
    return torch.where(curvature == 0, torch.zeros_like(curvature), (2 * delta / curvature).sqrt())


def fisher_of_softmax(logits: Float[Tensor, "R V"], tangent: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
    """(diag(p) - p p^T) tangent = p (tangent - sum p tangent): the Fisher matrix of a categorical distribution, in its
    logits, times a change of the logits.

    It is also the second derivative of the divergence at p = q, so J^T fisher_of_softmax(J v), summed over tokens, is
    F v without double backward. Excluded tokens (logits of -inf) get zero, and their tangent is not read.

    Example: fisher_of_softmax(torch.zeros(1, 2), torch.tensor([[1., 0.]])) -> tensor([[ 0.2500, -0.2500]])"""
    probabilities = logits.softmax(-1)
    tangent = tangent.masked_fill(probabilities == 0, 0.0)
    return probabilities * (tangent - (probabilities * tangent).sum(-1, keepdim=True))


def categorical_kl(logits_p: Float[Tensor, "R V"], logits_q: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """KL(p || q) = sum p (log p - log q) in nats, exact, for each row.

    Tokens that p excludes (logits of -inf) add zero, also to the gradient; a token that only q excludes makes it
    infinite. TRPO's paper has p = old and q = new (RL4LMs and sb3-contrib the other way round).

    Example: categorical_kl(torch.tensor([[.5, .5]]).log(), torch.tensor([[.25, .75]]).log()) -> tensor([0.1438])"""
    log_p, log_q = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    p = log_p.exp()
    return (p * torch.where(p == 0, 0.0, log_p - log_q)).sum(-1)
