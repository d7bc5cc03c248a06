"""The next token of each answer: from which tokens it is drawn, and by which random number."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from lmgym.core import progress, seeds
from lmgym.functional import truncation
from lmgym.functional.sampling import draw, draw_among, fp32_or_wider
from lmgym.inference.base import PAUSED
from lmgym.inference.completions import Answers
from lmgym.models.kernels import native
from lmgym.models.policy import Policy
from lmgym.types import Restriction


class Drawing:
    """Draws tokens and appends them to the answers. Number t of a request's key decides its token t, whatever is
    drawn beside it. `ended` is told of each answer that is finished.

    Example: Drawing(policy, answers, None, None).draw([logits], requests=[0, 3]) -> [17, 2]"""

    def __init__(
        self,
        policy: Policy,
        answers: Answers,
        restriction: Restriction | None,
        ended: Callable[[int, list[int]], None] | None,
        mixture: float | None = None,
    ) -> None:
        self.policy, self.answers, self.restriction, self.ended = policy, answers, restriction, ended
        self.mixture = mixture  # share of the second model in the logits
        self.sampling, self.device = answers.sampling, policy.device
        keys = [request.key for request in answers.requests]
        self.uniforms = torch.from_numpy(seeds.uniforms(keys, 0, max(answers.most)))
        self.stops_at = torch.tensor(sorted(answers.stop_ids), device=self.device)
        self.never = torch.tensor(policy.never, dtype=torch.long, device=self.device)

    def draw(self, logits: list[Float[Tensor, "R V"]], requests: list[int]) -> list[int]:
        """Sample the next token of these unfinished answers, given each model's logits, and append it to them."""
        if self.mixture is not None:
            policy, other = (fp32_or_wider(of_model) for of_model in logits)
            logits = [torch.lerp(policy, other, self.mixture)]
        # 1. No placeholder of pictures, and no stop id among the first min_new_tokens.
        for of_model in logits if len(self.never) else ():
            of_model[:, self.never] = float("-inf")
        counts = [len(self.answers.ids[request]) for request in requests]
        early = torch.tensor([count < self.sampling.min_new_tokens for count in counts])
        if bool(early.any()):
            for of_model in logits:  # in place: a mask of [R V] would be ten times the work
                stop_logits = of_model[:, self.stops_at].masked_fill(early.to(self.device)[:, None], float("-inf"))
                of_model[:, self.stops_at] = stop_logits
        # 2. Draw, from all tokens or from a restricted set, which is stored with the answer.
        uniform = self.uniforms[requests, counts].to(self.device, torch.float32 if self.device.type == "mps" else None)
        temperature = self.sampling.temperature
        if self.restriction is None and not self.sampling.truncates:
            if self.policy.native and temperature > 0:
                tokens, logprobs = native.draw(logits[0], temperature, uniform)
            else:
                tokens, logprobs = draw(logits[0], temperature, uniform, self.policy.exact)
        else:
            logits = [fp32_or_wider(of_model) for of_model in logits]
            candidates = self._candidates(logits[-1] if temperature in (0, 1) else logits[-1] / temperature)
            self.answers.add_sets(requests, candidates)
            tokens, logprobs = draw_among(logits[0], candidates, temperature, uniform, self.policy.exact)
        # 3. Append, and tell the caller which answers are finished.
        drawn = tokens.tolist()
        for request, token, logprob in zip(requests, drawn, logprobs.tolist(), strict=True):
            self.answers.add(request, token, logprob)
            if self.ended is not None and self.answers.stops[request] not in ("", PAUSED):
                self.ended(request, self.answers.ids[request])
        progress.count(sum(map(bool, self.answers.stops)), len(self.answers.stops), "answers")
        return drawn

    def _candidates(self, logits: Float[Tensor, "R V"]) -> truncation.Candidates:
        """The tokens that each row may draw: by top-k, top-p and min-p, or by the algorithm's restriction. `logits` are
        at the sampling temperature, and of the restricting policy if there is one."""
        sampling, rule = self.sampling, self.restriction
        if rule is None:
            return truncation.truncated(logits, sampling.top_k, sampling.top_p, sampling.min_p)
        if rule.rule == "top_p":
            mask = truncation.top_p(logits, rule.amount, rule.least)
        else:
            mask = truncation.top_k(logits, int(rule.amount), rule.least)
        mask[:, list(self.policy.special_ids)] = True  # always allowed
        return truncation.from_mask(mask)
