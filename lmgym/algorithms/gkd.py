"""Distillation on whole distributions: at each token the student's from the teacher's (GKD, arXiv 2306.13649)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Le, Lt
from jaxtyping import Bool
from torch import Tensor

from lmgym.algorithms.base import Algorithm, Terms
from lmgym.algorithms.requirements import Requirements, ServedTeacher
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import FINITE, Coefficient, NonNegativeFloat, PositiveInt, Rule, Share
from lmgym.core.endpoint import check_address
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional import advantages as credit
from lmgym.functional.divergences import Divergence, DivergenceName
from lmgym.functional.losses import policy_gradient

Between = Annotated[
    float, Gt(0), Lt(1), Rule("it must lie between 0 and 1; at its ends write forward_kl or reverse_kl")
]
Seconds = Annotated[float, Gt(0), FINITE, Rule("it must be above 0 seconds")]
Concurrency = Annotated[int, Gt(0), Le(1024)]


@register("algorithm", "gkd")
@dataclass(kw_only=True)
class GKD(Algorithm):
    """loss = mean over tokens of divergence_coefficient * D(p_t, q_t) - supervised_coefficient * log pi(y_t)
                                 - reward_coefficient * A log pi(y_t), A = R - mean R of the group.

    p_t and q_t are the next-token distributions of student and teacher behind the text before token t, which the
    student has sampled (source: student; it is not differentiated through) or a reference holds (source: references).
    The divergence D is a sum over the whole vocabulary, where `distill` has its estimate by the one sampled token. With
    a teacher behind an address it is a sum over its `top_k` most likely tokens and one bucket for all others.

    With a teacher that has another tokenizer, D is compared by spans, the shortest pieces of text that both begin and
    end at once (models/cross_teaching.py): where it is one token on both sides, over the tokens that both vocabularies
    have, a lower bound; else by log p(span) and log q(span), the sums of their tokens' log-probabilities, with the
    gradient of a score function. Such a teacher needs source: student and one optimizer step a batch.

    Example: the policy learns from itself, with the solution in the prompt:
        >>> GKD(teacher="self", hint="{prompt}\\n\\nA correct solution: {reference}\\n\\nSolve it in your own words.")
    """

    teacher: str | None = None
    """Hub id, local folder or built-in name of a model, with the policy's tokenizer or another; or the address of a
    server that has the policy's, such as http://localhost:8000/v1; or, with a hint, the policy itself: "self" as it is
    at each step, "initial" as it was when the stage began."""
    top_k: PositiveInt = 20
    """How many of its most likely tokens a server is asked for at each place; all others are one bucket."""
    teacher_model: str | None = None
    """The model's name on the server. Default: the only one that it has."""
    key_variable: str | None = None
    """The environment variable that holds the server's key."""
    seconds: Seconds = 600.0
    """Longest time of one request to the server."""
    concurrency: Concurrency = 8
    """Requests to the server at a time, of each rank."""
    source: Literal["student", "references"] = "student"
    """Whose texts are trained on: the student's own answers, or the task's references."""
    student_share: Share = 1.0
    """source: student: the share of the prompts whose texts are the student's own; the others' are references. Drawn
    for each prompt (lambda in arXiv 2306.13649, algorithm 1; TRL's lmbda draws for a whole batch)."""
    divergence: DivergenceName = "reverse_kl"
    """reverse_kl: KL(student || teacher); forward_kl: KL(teacher || student); jsd: between them."""
    beta: Between = 0.5
    """Where jsd lies between forward_kl (towards 0) and reverse_kl (towards 1); for jsd alone."""
    divergence_coefficient: NonNegativeFloat = 1.0
    """Weight of the divergence (OpenRLHF's kd_coef)."""
    supervised_coefficient: NonNegativeFloat = 0.0
    """source: references: weight of the cross-entropy beside it (OpenRLHF: 1 - kd_coef)."""
    hint: str | None = None
    """The prompt that the teacher reads: {prompt} is the policy's own, {reference} the example's first reference, and
    another name in braces an entry of the example's meta. None: the same prompt."""
    reward_coefficient: Coefficient = 0.0
    """Weight of the score, centred in its group, beside the divergence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_teacher_and_hint("gkd", self.teacher, self.hint)
        if self.teacher and is_address(self.teacher):
            check_address(self.teacher, "algorithm.teacher")
        else:
            usual = {"top_k": 20, "teacher_model": None, "key_variable": None, "seconds": 600.0, "concurrency": 8}
            for key in (key for key, value in usual.items() if getattr(self, key) != value):
                raise LmgymError(
                    f"algorithm.{key} is for a teacher behind an address (http://...), and algorithm.teacher is "
                    f"{self.teacher}; remove it"
                )
        if not self.teacher:
            raise LmgymError("algorithm.teacher is missing; name the model whose distributions gkd learns from")
        if self.divergence != "jsd" and self.beta != 0.5:
            raise LmgymError(f"algorithm.beta is for divergence jsd, and it is {self.divergence}; remove beta")
        self._check_source()
        if not self.reward_coefficient:
            return
        if self.source == "references":
            raise LmgymError("algorithm.reward_coefficient is for sampled answers; remove it, or write source: student")
        check_group_compared("gkd", self.group_size)
        if self.optimizer_steps > 1:
            raise LmgymError(
                "gkd has no ratio to correct the score's term for a second step; set epochs and minibatches to 1"
            )

    def _check_source(self) -> None:
        """Raise LmgymError for fields that do not go with whose texts are trained on."""
        if self.student_share < 1 and (self.source == "references" or self.reward_coefficient):
            what = (
                "source is references" if self.source == "references" else "reward_coefficient is for sampled answers"
            )
            raise LmgymError(f"algorithm.student_share is {self.student_share}, and {what}; remove one of them")
        if self.supervised_coefficient and self.source == "student":
            raise LmgymError(
                "algorithm.supervised_coefficient imitates the texts that are trained on, and source: student would "
                "imitate itself; write source: references"
            )

    @property
    def requirements(self) -> Requirements:
        answers = "policy" if self.source == "student" else "references"
        compared = Divergence(self.divergence, self.beta)
        served = None
        if self.teacher and is_address(self.teacher):
            served = ServedTeacher(
                self.teacher, self.top_k, self.teacher_model, self.key_variable, self.seconds, self.concurrency
            )
        return Requirements(
            answers=answers,
            teacher=None if served else self.teacher,
            served_teacher=served,
            divergence=compared,
            hint=self.hint,
            given_share=1 - self.student_share,
            reward=self.reward_coefficient > 0,
        )

    def advantages(self, batch: Batch) -> Batch:
        advantages = torch.zeros_like(batch.actions, dtype=batch.score.dtype)
        if self.reward_coefficient:
            centred = credit.group_centred(batch.score, batch.episode, batch.group)
            advantages = self.reward_coefficient * batch.per_token(centred)
        return batch.replace(advantages=advantages)

    def active(self, batch: Batch) -> Bool[Tensor, " N"]:
        return batch.actions.any(1)

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        terms: Terms = {"divergence": (self.divergence_coefficient * new.require("divergence"), "token")}
        if self.supervised_coefficient:
            terms["supervised"] = (-self.supervised_coefficient * new.logprobs, "token")
        if self.reward_coefficient:
            terms["policy"] = (policy_gradient(new.logprobs, batch.require("advantages")), "token")
        return terms, {}


def is_address(teacher: str | None) -> bool:
    """True for a teacher behind an endpoint. Example: is_address("http://localhost:8000/v1")"""
    return teacher is not None and teacher.startswith(("http://", "https://"))


def check_group_compared(name: str, group_size: int) -> None:
    """Raise LmgymError for a reward_coefficient with groups of one answer."""
    if group_size < 2:
        raise LmgymError(
            f"algorithm.group_size is {group_size}; reward_coefficient compares the answers of a group, so {name} "
            "needs at least 2"
        )


def check_teacher_and_hint(name: str, teacher: str | None, hint: str | None) -> None:
    """Raise LmgymError for a hint without the prompt, and for a policy that would learn from itself without a hint."""
    if hint is not None and "{prompt}" not in hint:
        raise LmgymError(
            "algorithm.hint has no {prompt} in it, so the teacher would not see the problem; write, for example, "
            '"{prompt} (The answer is {reference}.)"'
        )
    if teacher == "self" and hint is None:
        raise LmgymError(
            f"algorithm.teacher is self, and without a hint {name} has nothing to learn there: the teacher says what "
            "the policy says; write algorithm.hint, or name another teacher"
        )
