"""Products of a vector with the Fisher matrix of a policy's tokens, without the matrix and without [N T V]."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lmgym.batch import Batch, States
from lmgym.functional.trust_region import fisher_of_softmax
from lmgym.updates.protocols import TrainablePolicy

Vector = Float[Tensor, " P"]  # all parameters of the policy that train, end to end


class FisherProduct:
    """v -> F v, where F is the mean over a batch's tokens of the Fisher matrix of their distributions.

    F v = J^T (diag(p) - p p^T) J v with J the derivative of a token's logits. The logits are cut at the hidden states
    h that enter the LM head: J v goes through the trunk and then, for `head_chunk` tokens at a time, through the head,
    and back the same way, so [N T V] never exists. Exact; temperature, excluded stop ids and kept sets included.
    A batch of a single micro-batch keeps its trunk's graph from one product to the next. Each rank computes its part.
    """

    def __init__(self, policy: TrainablePolicy, batch: Batch) -> None:
        self.policy, self.parameters = policy, policy.parameters()
        self.tokens = int(batch.actions.sum())
        self.parts = [batch[rows].to(policy.device) for rows in policy.micro_batches(batch)]
        indices = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.head_indices = [indices[id(one)] for one in policy.head_parameters() if id(one) in indices]
        self.kept = self._linearised(self.parts[0]) if len(self.parts) == 1 else None

    def __call__(self, vector: Vector) -> Vector:
        total, tangents = torch.zeros_like(vector), split(vector, self.parameters)
        for part in self.parts:
            total += joined(self._product(part, tangents))
        self.policy.ranks.add(total)
        return total / self.tokens

    def _linearised(self, part: Batch) -> tuple["Linearised", States]:
        """From the parameters to what enters the head (on the plain path, to the logits), and those states."""
        row, column = part.actions.nonzero(as_tuple=True)
        with torch.enable_grad(), self.policy.twice_differentiable():
            states = self.policy.states(part, row, column - 1)
            plain = states.logits is not None
            output = self.policy.action_logits(states, part, row, column) if plain else states.hidden
            return Linearised(output, self.parameters), states

    def _product(self, part: Batch, tangents: Sequence[Tensor]) -> list[Tensor]:
        trunk, states = self.kept or self._linearised(part)
        if states.logits is not None:
            return trunk.pull(fisher_of_softmax(trunk.output.detach(), trunk.push(tangents)))
        row, column = part.actions.nonzero(as_tuple=True)
        own = [self.parameters[index] for index in self.head_indices]
        own_tangents, own_products = [tangents[index] for index in self.head_indices], filled([None] * len(own), own)
        moved, pulled = trunk.push(tangents), torch.zeros_like(trunk.output)
        with torch.enable_grad(), self.policy.twice_differentiable():
            for chunk in torch.split(torch.arange(len(row), device=pulled.device), self.policy.head_chunk):
                hidden = trunk.output[chunk].detach().requires_grad_()
                logits = self.policy.action_logits(states._replace(hidden=hidden), part, row[chunk], column[chunk])
                head = Linearised(logits, [hidden, *own])
                changes = fisher_of_softmax(logits.detach(), head.push([moved[chunk], *own_tangents]))
                pulled[chunk], *products = head.pull(changes)
                own_products = [total + product for total, product in zip(own_products, products, strict=True)]
        result = trunk.pull(pulled)
        for index, product in zip(self.head_indices, own_products, strict=True):  # tied to an embedding: both count
            result[index] = result[index] + product
        return result


class Linearised:
    """The derivative J of a differentiable output in its inputs: `push` is J v, `pull` is J^T u.

    J^T u is linear in u, so its derivative in u, applied to v, is J v: two backward passes, and no forward mode, which
    attention does not have everywhere."""

    def __init__(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        self.output, self.inputs = output, inputs
        self.cotangent = torch.zeros_like(output).requires_grad_()
        self.pulled: Sequence[Tensor | None] = [None] * len(inputs)
        if output.requires_grad:  # not so where only the head has adapters
            self.pulled = torch.autograd.grad(output, inputs, self.cotangent, create_graph=True, allow_unused=True)

    def push(self, tangents: Sequence[Tensor]) -> Tensor:
        terms = [(g * v).sum() for g, v in zip(self.pulled, tangents, strict=True) if g is not None and g.requires_grad]
        if not terms:
            return torch.zeros_like(self.output)
        return torch.autograd.grad(torch.stack(terms).sum(), self.cotangent, retain_graph=True)[0]

    def pull(self, cotangent: Tensor) -> list[Tensor]:
        if not self.output.requires_grad:
            return filled([None] * len(self.inputs), self.inputs)
        found = torch.autograd.grad(self.output, self.inputs, cotangent, retain_graph=True, allow_unused=True)
        return filled(found, self.inputs)


def joined(parts: Sequence[Tensor]) -> Vector:
    """Tensors end to end as one vector, without gradient."""
    return torch.cat([part.detach().flatten() for part in parts])


def split(vector: Vector, like: Sequence[Tensor]) -> list[Tensor]:
    """The vector cut into the shapes of `like`."""
    pieces = torch.split(vector, [each.numel() for each in like])
    return [piece.view_as(each) for piece, each in zip(pieces, like, strict=True)]


def filled(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, zeros in place of None."""
    return [torch.zeros_like(b) if a is None else a for a, b in zip(gradients, like, strict=True)]
