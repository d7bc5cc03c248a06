"""Distillation: learn from another model, on the student's own answers (arXiv 2306.13649) or on the teacher's texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lmgym.algorithms.base import Algorithm, Terms
from lmgym.algorithms.gkd import check_group_compared, check_teacher_and_hint, is_address
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import Coefficient, Share
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional import advantages as credit
from lmgym.functional import kl
from lmgym.functional.losses import policy_gradient
from lmgym.functional.shapes import PerToken


@register("algorithm", "distill")
@dataclass(kw_only=True)
class Distill(Algorithm):
    """loss = -mean over tokens of A_t log pi(y_t).

    source: student     y is sampled, d_t = log pi_teacher(y_t) - log pi(y_t) at sampling time, a number;
                        A_t = sum_k gamma^k d_{t+k} + reward_coefficient * (R - mean R of the group)
    source: references  y is a reference of the task, a text that the teacher has written; A_t = 1

    At gamma 0 the expected gradient of the first is that of KL(pi || pi_teacher) at each token, given the text before
    it (reverse KL, as arXiv 2306.13649 and tinker have it); at gamma 1 that of the KL over whole answers.

    Example: the teacher's opinion and the task's reward together:
        >>> Distill(teacher="Qwen/Qwen2.5-1.5B-Instruct", group_size=4, reward_coefficient=1.0)
    """

    teacher: str | None = None
    """Hub id, local folder or built-in name of a model with the policy's tokenizer, or "self" or "initial" (as gkd has
    them); needed with source: student."""
    source: Literal["student", "references"] = "student"
    """Whose texts are trained on: the student's own answers, or the task's references."""
    reward_coefficient: Coefficient = 0.0
    """Weight of the score, centred in its group, beside the teacher's log-ratio."""
    hint: str | None = None
    """The prompt that the teacher reads: {prompt} is the policy's own, {reference} the example's first reference, and
    another name in braces an entry of the example's meta. None: the same prompt."""
    gamma: Share = 0.0
    """How much of the log-ratios of later tokens a token is credited with; 0: each token for itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == "references":
            for name in ("teacher", "reward_coefficient", "hint", "gamma"):
                if getattr(self, name):
                    raise LmgymError(
                        f"algorithm.{name} is set, and source is references: texts are imitated as they stand; "
                        "remove it, or write source: student"
                    )
            return
        if not self.teacher:
            raise LmgymError(
                "algorithm.teacher is missing; name the model that distill learns from, or write source: references to "
                "imitate texts that it has written"
            )
        check_teacher_and_hint("distill", self.teacher, self.hint)
        if is_address(self.teacher):
            raise LmgymError(
                "algorithm.teacher is an address, and distill needs a model in the training process; gkd learns from a "
                "teacher behind an address"
            )
        if self.reward_coefficient:
            check_group_compared("distill", self.group_size)
        self.check_one_step("distill", "the student's answers")

    @property
    def requirements(self) -> Requirements:
        if self.source == "references":
            return Requirements(answers="references", reward=self.reward_coefficient > 0)
        return Requirements(teacher=self.teacher, hint=self.hint, reward=self.reward_coefficient > 0)

    def advantages(self, batch: Batch) -> Batch:
        if self.source == "references":
            return batch.replace(advantages=batch.actions.float())
        gains = kl.k1(batch.require("logprobs_teacher"), batch.require("logprobs_sampler"))
        advantages = self._ahead(gains * batch.actions, batch)
        if self.reward_coefficient:
            centred = credit.group_centred(batch.score, batch.episode, batch.group)
            advantages = advantages + self.reward_coefficient * batch.per_token(centred)
        return batch.replace(advantages=advantages)

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        terms: Terms = {"policy": (policy_gradient(new.logprobs, batch.require("advantages")), "token")}
        if batch.logprobs_teacher is None or batch.logprobs_sampler is None:
            return terms, {}
        return terms, {"kl/teacher": kl.k1(batch.logprobs_sampler, batch.logprobs_teacher)}

    def _ahead(self, gains: PerToken, batch: Batch) -> PerToken:
        """Each token's own gain and the discounted ones of the later tokens of its episode."""
        if not self.gamma:
            return gains
        row, column, steps = credit.episode_steps(batch.actions, batch.episode)
        dense = gains[row, column]
        nothing = torch.zeros_like(dense)  # returns are advantages over values of 0
        ahead, _ = credit.gae(dense, nothing, steps, nothing[:, 0], self.gamma, 1.0)
        return credit.scatter_steps(ahead, row, column, steps, gains.shape)  # type: ignore[arg-type]
