"""Each algorithm's loss as formulas: the terms of a token, and how hard each pushes the token's log-probability.

A formula is a text in symbols (arithmetic.py); `loss` in lmgym/algorithms is what really runs, and a test compares the
two. `push` is minus the derivative of a term by log_pi: the direction in which a step moves it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Fields = Mapping[str, Any]

CLIP = "min(r * A, clip(r, 1 - low, 1 + high) * A)"
GRADIENT = "A * log_pi"


@dataclass(frozen=True)
class Term:
    """One named term of a loss, before its weight. `push` is "" where the term does not depend on the token's own
    log-probability alone (an entropy, a value).

    Example: Term("policy", "-A * log_pi", push="A")
    """

    name: str
    formula: str
    push: str = ""


@dataclass(frozen=True)
class Family:
    """How algorithms of one kind compute their terms, and where an advantage comes from (a sentence or a formula).

    Example: FAMILIES["grpo"].terms({"objective": "clip", ...})[0].formula
    """

    terms: Callable[[Fields], list[Term]]
    credit: Callable[[Fields], str]


SYMBOLS = {  # symbol: what it is, and the column that holds it ("": a field or derived, see explain.py)
    "A": ("advantage", "advantages"),
    "r": ("ratio: the probability now, over the one before this batch's steps, or the sampler's", "ratio/mean"),
    "r_t": ("ratio of this token alone", ""),
    "r_s": ("ratio of this token alone, to what the sampler said of it", ""),
    "log_pi": ("log-probability under the policy that trains", "logprobs"),
    "log_ref": ("log-probability under the frozen reference", "logprobs_ref"),
    "cut": ("1 where the clip or the mask removes the gradient", "ratio/clipped"),
    "slope": ("slope of the gate; vespo: the answer's weight", "ratio/gate"),
    "bound": ("what a clipped token keeps: keep_above (1 + high) where A > 0, else keep_below (1 - low)", ""),
    "w": ("importance weight: trainer's over sampler's probability, cut or left out", "importance/mean"),
    "H": ("entropy of the token's distribution", "entropy"),
    "V": ("value that the critic predicted", "values"),
    "D": ("divergence of the token's distribution from the teacher's", "loss/divergence"),
    "G": ("return: what the critic should have predicted", "returns"),
    "L": ("tokens of the turn", ""),
    "on": ("1 where the advantage is not 0", ""),
    "tau": ("temperature of the gate: sapo_positive where A > 0, else sapo_negative", ""),
    "low": ("clip_low", ""),
    "high": ("clip_high", ""),
    "dual_clip": ("dual_clip", ""),
    "truncate": ("truncate: the largest weight", ""),
    "beta": ("kl_coefficient", ""),
    "c": ("weight of this term", ""),
    "limit": ("sampling.max_new_tokens of the stage", ""),
}


WEIGHING = ("importance_cap", "importance_floor", "mismatch_bound", "off_policy_threshold")


def _grpo(fields: Fields) -> list[Term]:
    policy = _objective(fields)
    if fields.get("truncate") is not None:
        policy = Term("policy", f"-min(r, truncate) * {GRADIENT}", "min(r, truncate) * A")
    if any(fields.get(name) is not None for name in WEIGHING):
        policy = Term("policy", f"w * ({policy.formula})", f"w * {policy.push}")
    terms = [policy, *_regularising(fields)]
    if fields.get("squared_log_ratio_coefficient"):
        terms.append(Term("drift", "c * log(r_t)**2 * on", "-2 * c * log(r_t) * on"))
    if fields.get("ratio_to") == "sampler" or "replayed" in fields:
        terms = [replace(one, formula=_to_sampler(one.formula), push=_to_sampler(one.push)) for one in terms]
    if fields.get("length_norm"):
        scaled = [replace(one, formula=f"({one.formula}) / limit", push=f"({one.push}) / limit") for one in terms]
        terms = [one if one.name == "entropy" else divided for one, divided in zip(terms, scaled, strict=True)]
    return terms


def _to_sampler(formula: str) -> str:
    return formula.replace("r_t", "r_s")


def _objective(fields: Fields) -> Term:
    objective = fields.get("objective", "clip")
    if objective == "cispo":
        return Term("policy", f"-clip(r, 1 - low, 1 + high) * {GRADIENT}", "clip(r, 1 - low, 1 + high) * A")
    if objective == "sapo":
        return Term("policy", "-4 / tau * sigmoid(tau * (r - 1)) * A", "slope * r * A")
    if objective in ("dppo", "ipo"):
        return Term("policy", "-r * A * (1 - cut)", "r * A * (1 - cut)")
    if objective == "gmpo":  # r is the row's
        return Term("policy", "-r * A", "r * A * (1 - cut)")
    if objective == "vespo":
        return Term("policy", f"-slope * {GRADIENT}", "slope * A")
    if objective == "ce_gppo":
        return Term("policy", "-(r * (1 - cut) + bound * cut) * A", "(r * (1 - cut) + bound * cut) * A")
    if objective == "none":
        return Term("policy", "-r * A", "r * A")
    if fields.get("dual_clip") is not None:
        return Term("policy", f"-max({CLIP}, dual_clip * min(A, 0))", "r * A * (1 - cut)")
    return Term("policy", f"-{CLIP}", "r * A * (1 - cut)")


def _regularising(fields: Fields) -> list[Term]:
    """The KL penalty and the entropy bonus, where they are in the loss (algorithms/regularised.py)."""
    terms = []
    if fields.get("kl_coefficient") and fields.get("kl_in") == "loss":
        estimate = "(log_pi - log_ref)**2 / 2"
        if fields.get("kl_estimator") == "k3":
            estimate = "(exp(log_ref - log_pi) - 1 - (log_ref - log_pi))"
        terms.append(Term("kl", f"beta * r_t * {estimate}", "-beta * r_t * (log_pi - log_ref)"))
    if fields.get("entropy_coefficient"):
        terms.append(Term("entropy", "-c * H"))
    return terms


def _policy_gradient(fields: Fields) -> list[Term]:
    return [Term("policy", f"-{GRADIENT}", "A"), *_regularising(fields)]


def _clipped(fields: Fields) -> list[Term]:
    return [Term("policy", f"-{CLIP}", "r * A * (1 - cut)"), *_regularising(fields)]


def _with_value(terms: Callable[[Fields], list[Term]]) -> Callable[[Fields], list[Term]]:
    """The terms with the value function's behind the policy's. On the first optimizer step the value that is clipped is
    the one at sampling time."""

    def both(fields: Fields) -> list[Term]:
        policy, *others = terms(fields)
        return [policy, Term("value", "c * (V - G)**2"), *others]

    return both


def _stable(fields: Fields) -> list[Term]:
    compat = fields.get("compat")
    if compat == "llm_rl":
        return []  # a formula of its own, in reinforce_stable.py
    terms = [Term("policy", f"-r * {GRADIENT} / L", "r * A / L")]
    for term in _regularising(fields):
        if term.name == "kl":
            formula, push = (f"{text.replace('r_t', 'r')} / L**2" for text in (term.formula, term.push))
            term = Term("kl", formula, push)
        terms.append(term)
    return terms


def _likelihood(fields: Fields) -> list[Term]:
    return [Term("policy", "-log_pi", "1")]


def _of_group(fields: Fields) -> str:
    if fields.get("normalise_parts"):
        return "each reward scaled within its group; their weighted sum, scaled over the batch"
    if fields.get("turn_coefficient") and not fields.get("episode_coefficient"):
        return "the turn's return centred among turns that answered the same texts, averaged over how many texts"
    if fields.get("turn_coefficient"):
        return "R centred in the group, and the turn's return centred among turns that answered the same text"
    if fields.get("pass_at") is not None:
        return "what the answer adds to the best of pass_at answers of its group, on average over all such sets"
    if fields.get("baseline") == "length":
        return "R less the mean of the group's scores, weighted by the answers' lengths"
    if fields.get("baseline") == "token":
        return "R less the mean of the group's scores, weighted by the answers' squared gradients up to the token"
    if fields.get("keep") is not None:
        return "R less the mean of the answers of its group that train, if it is one of them; else 0"
    if fields.get("overlong") or fields.get("scale_by_mixed"):
        return "R, less what an overlong answer loses, centred in its group and scaled"
    if fields.get("scale_rewards") == "mean":
        return "(R - mean) / mean"
    divisors = {"none": "", "group": " / (std + 0.0001)", "batch": " / (std_batch + 0.0001)"}
    divided = divisors[str(fields["scale_rewards"])]
    return f"(R - mean){divided}" if divided else "R - mean"


def _of_baseline(fields: Fields) -> str:
    names = {"none": "R", "mean": "R - mean_batch", "scst": "R - greedy"}
    return names.get(fields.get("baseline", "mean"), "R less the moving mean of the scores")


def _of_critic(fields: Fields) -> str:
    estimate = "delta_t + gamma lambda A_(t+1), where delta_t = reward_t + gamma V_(t+1) - V_t"
    over = fields.get("whiten", "none")
    return estimate if over == "none" else f"{estimate}; shifted and scaled over the {over} to mean 0 and deviation 1"


def _of_returns(fields: Fields) -> str:
    return "the discounted rewards from the token on, shifted and scaled over the step to mean 0 and deviation 1"


def _of_turns(fields: Fields) -> str:
    base = fields.get("baseline", "none")
    less = "" if base == "none" else f", less the mean of the {base}'s turns"
    return f"the discounted rewards from the turn on, cut to return_low and return_high{less}"


def _of_group_or_none(fields: Fields) -> str:
    if not fields.get("reward_coefficient"):
        return "none: the divergence from the teacher trains each token"
    return "reward_coefficient times the score, centred in its group"


def _of_teacher(fields: Fields) -> str:
    score = ", and reward_coefficient times the score, centred in its group" if fields.get("reward_coefficient") else ""
    if fields.get("source") == "references":
        return "1"
    return f"log-probability under the teacher less that under the sampled policy{score}"


def _whole_distributions(fields: Fields) -> list[Term]:
    terms = _policy_gradient(fields) if fields.get("reward_coefficient") else []
    if fields.get("supervised_coefficient"):
        terms = [*terms, Term("supervised", "-c * log_pi", "c")]
    weight = "" if fields.get("divergence_coefficient", 1.0) == 1 else "c * "
    return [Term("divergence", f"{weight}D"), *terms]


GROUP = Family(_grpo, _of_group)
CRITIC = Family(_with_value(_clipped), _of_critic)
PAIRS = Family(lambda fields: [], lambda fields: "none: the loss compares the best and the worst of a group")
FAMILIES: Mapping[str, Family] = {  # by registered name; a plug-in's terms are shown without formulas
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo", "replay"), GROUP),
    **dict.fromkeys(("icepop", "gspo_token", "gmpo", "luspo", "vespo", "ce_gppo", "ipo_mask"), GROUP),
    **dict.fromkeys(("clip_cov", "kl_cov", "top_entropy"), GROUP),
    **dict.fromkeys(("maxrl", "gpg", "opo", "otb", "pass_at_k", "gfpo", "gigpo", "hgpo"), GROUP),
    "ppo": CRITIC,
    "nlpo": CRITIC,
    "a2c": Family(_with_value(_policy_gradient), _of_critic),
    "trpo": Family(lambda fields: [], _of_critic),  # no loss per token: one step in a trust region
    **dict.fromkeys(("dpo", "ipo", "simpo", "orpo", "reward_model", "online_dpo", "xpo"), PAIRS),
    "kto": Family(lambda fields: [], lambda fields: "none: the loss compares an answer with answers to other prompts"),
    "process_reward_model": Family(lambda fields: [], lambda fields: "none: the loss is about a score of each step"),
    "remax": Family(_policy_gradient, _of_baseline),
    "reinforce": Family(_policy_gradient, _of_baseline),
    "rloo": Family(_policy_gradient, lambda fields: "R - mean_others"),
    "nash_md": Family(_policy_gradient, lambda fields: "P(better than the mixture's answer) - 1/2 - beta * log-ratio"),
    "reinforce_pp": Family(_clipped, _of_returns),
    "reinforce_stable": Family(_stable, _of_turns),
    "raft": Family(_likelihood, lambda fields: "1"),
    "supervised": Family(_likelihood, lambda fields: "1"),
    "distill": Family(_policy_gradient, _of_teacher),
    "gkd": Family(_whole_distributions, _of_group_or_none),
}
