"""KTO: Kahneman-Tversky optimisation (arXiv 2402.01306), for answers that are good or bad alone, without a pair."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated

import torch
from annotated_types import Ge
from jaxtyping import Float
from torch import Tensor

from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import NonNegativeFloat
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional.preferences import episode_totals, kto_loss


@register("algorithm", "kto")
@dataclass(kw_only=True)
class KTO(Algorithm):
    """loss = mean over answers of weight * (1 - sigmoid(beta g)), where g is r - z of a good one and z - r of a bad one
    r = log pi(answer) / ref(answer), the sum over its tokens
    z = max(0, mean of such sums over mismatched rows, each prompt with the answer to another one): the KL to the
        reference, without gradient

    An answer is good if its rating is above `threshold`. Pairs are read as one good and one bad answer.

    Example: ten times as many good answers as bad ones
        >>> KTO(bad_weight=10.0)
    """

    beta: Annotated[NonNegativeFloat, Ge(1e-6)] = 0.1
    """How sharply answers are told apart; the larger, the closer the policy stays to the reference."""
    good_weight: NonNegativeFloat = 1.0
    """The paper's lambda_D. The paper keeps good_weight * good answers : bad_weight * bad answers in 1:1 to 4:3."""
    bad_weight: NonNegativeFloat = 1.0
    """The paper's lambda_U."""
    threshold: float = 0.0
    """Ratings above it are good."""

    @property
    def requirements(self) -> Requirements:
        return Requirements(answers="rated", reference=True)

    def before_scoring(self, batch: Batch) -> Batch:
        return with_prompts_of_others(batch)

    def advantages(self, batch: Batch) -> Batch:
        return batch

    def answer_scores(self, batch: Batch, new: PolicyOutputs) -> Float[Tensor, " E"]:
        return episode_totals(new.logprobs - batch.require("logprobs_ref"), batch.actions, batch.episode)

    def batch_loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        # 1. Log-ratios: of the answers to the prompts of others first, since their numbers are below 0.
        ratios, episodes = self.answer_scores(batch, new), torch.unique(batch.episode)
        others, answers = ratios[episodes < 0], ratios[episodes >= 0]
        baseline = others.detach().mean().clamp(min=0.0)
        # 2. The loss of the answers.
        first = torch.tensor([int((batch.episode == number).nonzero()[0]) for number in episodes[episodes >= 0]])
        good = batch.score[first] > self.threshold
        losses = kto_loss(answers, good, baseline, self.beta, self.good_weight, self.bad_weight)
        # 3. How the policy finds them now; there is no margin in a batch of one kind.
        metrics = {"preference/kl": float(baseline)}
        kinds = {"chosen": answers.detach().double()[good], "rejected": answers.detach().double()[~good]}
        metrics |= {f"preference/{name}": float(values.mean()) for name, values in kinds.items() if len(values)}
        if len(metrics) == 3:
            metrics["preference/margin"] = metrics["preference/chosen"] - metrics["preference/rejected"]
        return {"preference": losses.mean()}, metrics


def with_prompts_of_others(batch: Batch) -> Batch:
    """The batch, and behind it each row again with the answer of the next row that has another prompt, cut at the
    longest row's length. Such rows have episode numbers below 0: they measure, and train nothing. Raises LmgymError if
    all rows have one prompt.

    Example: rows [5, 6 | 7] and [8 | 9, 9] are followed by [5, 6 | 9] and [8 | 7]"""
    # 1. Whose answer each row gets.
    rows, groups = len(batch), batch.group.tolist()
    if len(set(groups)) < 2:
        raise LmgymError("kto measures the KL with answers to other prompts; prompts_per_step must be at least 2")
    owner = [next(one for n in range(1, rows) if groups[one := (row + n) % rows] != groups[row]) for row in range(rows)]
    # 2. Prompt and answer behind each other; an encoder-decoder's answers are rows of their own, beside the source.
    tokens, mask, actions = batch.tokens[owner], batch.mask[owner], batch.actions[owner]
    if batch.source is None:
        tokens, mask, actions = batch.tokens.clone(), torch.zeros_like(mask), torch.zeros_like(actions)
        begins, ends = batch.actions.int().argmax(1).tolist(), batch.mask.sum(1).tolist()
        for row, other in enumerate(owner):
            answer = batch.tokens[other, begins[other] : ends[other]][: tokens.shape[1] - begins[row]]
            end = begins[row] + len(answer)
            tokens[row, begins[row] : end] = answer
            mask[row, :end], actions[row, begins[row] : end] = True, True
    # 3. All other columns are those of the prompt's row.
    numbered = {"episode": -1 - batch.episode, "row": -1 - batch.require("row")}
    extra = batch.replace(tokens=tokens, mask=mask, actions=actions, **numbered)
    names = [field.name for field in fields(batch) if isinstance(getattr(batch, field.name), Tensor)]
    return batch.replace(**{name: torch.cat([getattr(batch, name), getattr(extra, name)]) for name in names})
