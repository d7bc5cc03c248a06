"""Record what TRL's GKD loss and its loss over some tokens make of random logits, for test_gkd.py, which does not need
them.

A developer runs it with an environment of its own, from the root of the repository:

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0
    PYTHONPATH=. trl/bin/python tests/golden/record_gkd.py

It writes gkd.json: of TRL's own `generalized_jsd_loss`, the loss and its gradient by the student's logits; and the same
of SDPO's `compute_topk_self_distillation_loss`, over the student's TOP_K most likely tokens and a bucket for the rest.
"""

import importlib.metadata
import json
from pathlib import Path

import torch
from torch import Tensor

RECORD = Path(__file__).with_name("gkd.json")
ROWS, LENGTH, VOCABULARY, TOP_K = 2, 3, 6, 2
CASES = [(beta, temperature) for beta in (0.0, 0.1, 0.5, 0.9, 1.0) for temperature in (1.0, 0.7)]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Logits [ROWS LENGTH VOCABULARY] of student and teacher in fp64, and which tokens are of the answer [ROWS LENGTH].
    Of the second row the last token is padding."""
    generator = torch.Generator().manual_seed(11)
    size = (ROWS, LENGTH, VOCABULARY)
    student, teacher = (2 * torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    return student, teacher, torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()


def rounded(numbers: Tensor) -> list[float]:
    """With 12 digits."""
    return [float(f"{value:.12g}") for value in numbers.flatten().tolist()]


def main() -> None:
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss

    student, teacher, actions = inputs()
    labels = torch.where(actions, 1, -100)
    cases = []
    for beta, temperature in CASES:
        leaf = student.clone().requires_grad_()
        loss = GKDTrainer.generalized_jsd_loss(leaf, teacher, labels, beta=beta, temperature=temperature)
        (gradient,) = torch.autograd.grad(loss, leaf)
        cases.append({"beta": beta, "temperature": temperature, "loss": loss.item(), "gradient": rounded(gradient)})
    some = []
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0):
        leaf = student.clone().requires_grad_()
        each = compute_topk_self_distillation_loss(
            leaf, teacher, distillation_topk=TOP_K, distillation_alpha=beta, distillation_add_tail=True
        )
        (gradient,) = torch.autograd.grad(each.sum(), leaf)
        some.append({"beta": beta, "each": rounded(each.detach()), "gradient": rounded(gradient)})
    versions = {"trl": importlib.metadata.version("trl"), "torch": torch.__version__.split("+")[0]}
    RECORD.write_text(json.dumps(versions | {"cases": cases, "some": some}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
