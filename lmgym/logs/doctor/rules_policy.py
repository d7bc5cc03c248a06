"""The doctor's rules about the policy, its updates and the time that they take (see examine.py)."""

import math
from statistics import fmean as mean
from statistics import median_high as median  # a single odd step does not move it

from lmgym.logs.doctor.held_out import held_out_change
from lmgym.logs.doctor.history import History, Level, Sign, errors_apart, rose
from lmgym.logs.doctor.rules_reward import EQUAL_GROUPS

ENTROPY_LEFT, ENTROPY_GONE = 0.1, 1e-3
"""Share of the first entropy; a fall is normal if it is paid for with reward (arXiv 2505.22617). Nats per token, at
which a policy gives the same answer again and again."""
ENTROPY_GROWTH, MORE_ENTROPY = 2.0, 0.5
"""Factor by which the entropy grows, and nats per token: a low entropy may double by chance."""
KL_FAR = 0.5
"""Nats per token from the reference: 50 in an answer of 100 tokens, where arXiv 1909.08593 and TRL aim at 6 or so."""
KL_STEP = 0.1
"""Nats per token within one batch: PPO is usually stopped at 0.01 to 0.015 (OpenAI's Spinning Up: 1.5 times 0.01)."""
CLIPPED = 0.5
"""Share of tokens without a gradient. docs/metrics.md calls some per cent healthy."""
LEFT_OUT = 0.5
"""Share of the planned optimizer steps that target_kl leaves."""
GRADIENT_GROWTH = 30.0
"""Factor by which the median gradient norm grows: one and a half orders of magnitude."""
CRITIC_STEPS, EXPLAINED, HARMFUL = 50, 0.02, -0.5
"""A critic explains something within some tens of steps (docs/metrics.md); an A2C that learned needed more than 40."""
STILL_STEPS, STILL, AWAY = 100, 0.05, 1e-3
"""Steps after the warm-up, the relative change in entropy and length, and the nats per token from another policy, below
which a policy stands still."""
TOO_HIGH = ("kl/old", "ratio/clipped", "updates", "gradient_norm")
"""The metrics that show a learning rate that is too high."""
SEEN = 0.3
"""Share of an update that passes in bf16 see: SmolLM2 at 1e-5 went from 0.01 to 0.30 in 60 steps, and learned half as
fast as with all of it (docs/precision.md)."""
STALE, APART = 8.0, 0.1
"""Updates: prime-rl drops older answers. Nats per token between the two policies, below which age does no harm."""
SLOW_SHARE, SLOW_STEP = 0.9, 1.0
"""Share of a step that one part takes, and seconds of a step from which on that matters."""
MANY_ERRORS, SOME_ERRORS = 0.5, 0.1
"""Shares of episodes whose environment failed; a single one is named too."""


def entropy_collapse(history: History) -> Sign | None:
    """The entropy has fallen to a tenth, and either the reward has not risen with it, or answers are all alike."""
    first, recent = history.first("entropy"), history.recent("entropy")
    if not (history.two_windows and first and recent) or history.solved:
        return None
    if max(first) < ENTROPY_GONE or mean(recent) > ENTROPY_LEFT * max(first):
        return None
    alike = mean(recent) < ENTROPY_GONE or mean(history.recent("zero_variance_groups") or [0.0]) >= EQUAL_GROUPS
    if history.gained and not alike:
        return None
    also = "nearly all answers to a prompt are alike" if history.gained else "the reward has not risen with it"
    what = f"the entropy has fallen from {max(first):.3g} to {mean(recent):.3g} nats per token, and {also}"
    remedy = "lower optimizer.learning_rate, raise algorithm.group_size, or set algorithm.entropy_coefficient to 0.001 "
    remedy += "to 0.01"
    return Sign("severe", what, remedy, "entropy", mean(recent), ENTROPY_LEFT * max(first))


def entropy_growth(history: History) -> Sign | None:
    """The entropy has doubled, and that has not brought the reward up: the policy forgets what it knew."""
    first, recent = history.first("entropy"), history.recent("entropy")
    if not (history.two_windows and first and recent) or history.gained:
        return None
    limit = max(ENTROPY_GROWTH * mean(first), mean(first) + MORE_ENTROPY)
    if mean(recent) < limit:
        return None
    what = (
        f"the entropy has grown from {mean(first):.3g} to {mean(recent):.3g} nats per token, and the reward has not "
        "risen with it"
    )
    remedy = "lower algorithm.entropy_coefficient or optimizer.learning_rate"
    return Sign("moderate", what, remedy, "entropy", mean(recent), limit)


def kl_blow_up(history: History) -> Sign | None:
    """The policy is far from its reference, and the way there (or its second half) has not brought the reward up."""
    middle, recent = history.middle("kl/reference"), history.recent("kl/reference")
    if not (history.two_windows and recent) or mean(recent) < KL_FAR:
        return None
    doubled = bool(middle) and mean(recent) >= 2 * mean(middle)
    paid = rose(history.middle("reward"), history.recent("reward")) if doubled else True
    if history.gained and paid:
        return None
    what = (
        f"the policy is {mean(recent):.3g} nats per token away from its reference, and the reward has not risen with it"
    )
    remedy = "raise algorithm.kl_coefficient (or set an algorithm.kl_target), or lower optimizer.learning_rate"
    return Sign("severe", what, remedy, "kl/reference", mean(recent), KL_FAR)


def sampler_gap(history: History) -> Sign | None:
    """Sampler and trainer disagree on the probabilities of the sampled tokens by more than rounding."""
    recent, limit = history.recent("sampler_logprob_gap"), history.facts.gap_limit
    if not recent or limit is None or mean(recent) <= limit:
        return None
    what = (
        f"sampled and trained log-probabilities differ by {mean(recent):.3g} nats per token, and ratios are off by as "
        "much"
    )
    remedy = "set policy.compute: float32 or policy.path: plain, or algorithm.correction: truncated"
    level: Level = "severe" if mean(recent) > 10 * limit else "moderate"
    return Sign(level, what, remedy, "sampler_logprob_gap", mean(recent), limit)


def dead_critic(history: History) -> Sign | None:
    """After some tens of steps the value function is no better than a constant."""
    recent = history.recent("value/explained_variance")
    if not recent or len(history) < CRITIC_STEPS or median(recent) > EXPLAINED or history.solved:
        return None
    worse = "less than a constant would" if median(recent) < -EXPLAINED else "as much as a constant does"
    unmoved = not any(recent)  # a value function that learns anything is never exactly as good as a constant
    what = (
        f"after {len(history)} steps the value function explains {median(recent):.3g} of the returns' variance, {worse}"
    )
    remedy = "raise optimizer.critic_learning_rate or algorithm.value_coefficient, or set policy.critic: separate"
    level: Level = "moderate" if median(recent) < HARMFUL or unmoved else "minor"
    return Sign(level, what, remedy, "value/explained_variance", median(recent), EXPLAINED)


def learning_rate_too_high(history: History) -> Sign | None:
    """The policy moves too far in a step: by its KL, by the share of clipped tokens, by what target_kl leaves out, or
    by a gradient that grows without any gain."""
    kl, clipped, updates, norm = (history.recent(name) for name in TOO_HIGH)
    planned, first = history.facts.updates, history.first("gradient_norm")
    remedy = "lower optimizer.learning_rate, or take fewer algorithm.epochs or algorithm.minibatches"
    # trpo steps as far as its delta says; of replayed answers both numbers tell the age as well.
    other_cause = history.facts.replays or history.recent("trpo/step_norm")
    if kl and mean(kl) > KL_STEP and not other_cause:
        what = f"each step moves the policy by {mean(kl):.3g} nats per token"
        return Sign("moderate", what, remedy, "kl/old", mean(kl), KL_STEP)
    if clipped and mean(clipped) > CLIPPED and history.facts.clips_tokens and not other_cause:
        what = f"{mean(clipped):.0%} of the tokens are clipped, and have no gradient"
        remedy += "; or widen the clip (grpo: algorithm.surrogate; others: algorithm.clip_low and algorithm.clip_high)"
        return Sign("moderate", what, remedy, "ratio/clipped", mean(clipped), CLIPPED)
    if updates and planned and mean(updates) < LEFT_OUT * planned:
        what = f"target_kl leaves {mean(updates):.2g} of the {planned} optimizer steps that are planned for a batch"
        return Sign("moderate", what, remedy, "updates", mean(updates), LEFT_OUT * planned)
    if history.two_windows and norm and first and median(norm) > GRADIENT_GROWTH * median(first) > 0:
        if history.gained:
            return None
        what = f"the gradient norm has grown from {median(first):.3g} to {median(norm):.3g}, without any gain in reward"
        remedy = "lower optimizer.learning_rate, or bound the reward (its function in rewards)"
        return Sign("moderate", what, remedy, "gradient_norm", median(norm), GRADIENT_GROWTH * median(first))
    return None


def learning_rate_too_low(history: History) -> Sign | None:
    """There is a signal, and nothing moves: neither reward, entropy and length, nor the distance to another policy."""
    windows = [(history.first(name), history.recent(name)) for name in ("reward", "entropy", "length/mean")]
    norms, equal = history.recent("gradient_norm"), history.recent("zero_variance_groups")
    if history.warm < STILL_STEPS or not all(first and recent for first, recent in windows) or history.solved:
        return None
    signal = norms and median(norms) > 0 and mean(equal or [0.0]) < EQUAL_GROUPS
    away = max(abs(mean(history.recent(name) or [0.0])) for name in ("kl/old", "kl/reference"))
    apart = [abs(errors_apart(*pair)) for pair in windows]
    changes = [abs(mean(recent) - mean(first)) / (abs(mean(first)) or 1.0) for first, recent in windows[1:]]
    # A policy that stands still answers the same prompts with the same words; of a few answers a step, chance moves
    # entropy and length.
    held_out = [held_out_change(history, name) for name in ("reward", "length/mean")]
    frozen = apart[0] < 2 and all(pair is not None and pair[0] == pair[1] for pair in held_out)
    if not (signal and away < AWAY and (frozen or (max(apart) < 2 and max(changes) < STILL))):
        return None
    (reward, newest), (entropy, present), _ = ((mean(first), mean(recent)) for first, recent in windows)
    what = (
        f"after {len(history)} steps nothing has moved: the reward went from {reward:.3g} to {newest:.3g}, the entropy "
        f"from {entropy:.3g} to {present:.3g}"
    )
    remedy = "raise optimizer.learning_rate 3 to 10 times (with LoRA it is usually higher than without)"
    return Sign("moderate", what, remedy, "reward", newest)


def unseen_updates(history: History) -> Sign | None:
    """Weights rounded to bf16 hide most of what the optimizer does from every forward pass."""
    seen = history.recent("weights/seen")
    if not seen or mean(seen) >= SEEN or history.solved:
        return None
    what = f"{mean(seen):.0%} of the last updates was visible to a forward pass: bf16 rounds the rest of it away"
    remedy = "policy.rounding: stochastic, policy.compute: float32, or a higher optimizer.learning_rate"
    return Sign("moderate", what, remedy, "weights/seen", mean(seen), SEEN)


def memory_budget(history: History) -> Sign | None:
    """The run has taken more memory than `policy.memory_gib` allows: the estimate that chose its passes was too low."""
    budget, peak = (history.columns.get(f"memory/{name}_gib", [math.nan])[-1] for name in ("budget", "peak"))
    if not peak > budget > 0:
        return None
    what = f"a step has taken {peak:.3g} GiB, and policy.memory_gib is {budget:g}"
    remedy = f"policy.memory_gib: {budget * budget / peak:.3g}, by which the resumed run chooses anew"
    return Sign("moderate", what, remedy, "memory/peak_gib", peak, budget)


def stale_rollouts(history: History) -> Sign | None:
    """What is trained on was sampled by much older weights, which say something else by now."""
    lag, gap = history.recent("version_lag"), history.recent("sampler_logprob_gap")
    if not (lag and gap) or mean(lag) <= STALE or mean(gap) < APART:
        return None
    what = (
        f"the answers of a batch are {mean(lag):.2g} updates old on average, and the policy has moved {mean(gap):.2g} "
        "nats per token since"
    )
    remedy = "lower engine.ahead, or algorithm.max_age or algorithm.replayed, or optimizer.learning_rate"
    return Sign("moderate", what, remedy, "version_lag", mean(lag), STALE)


def slow_part(history: History) -> Sign | None:
    """Nearly all of a long step goes to one of its parts. A stage that samples no answers is its updates."""
    whole = history.recent("seconds")
    if not whole or mean(whole) < SLOW_STEP:
        return None
    advice = {
        "seconds/rollout": "raise engine.rows, lower sampling.max_new_tokens, or give a slow reward the option "
        "parallel",
        "seconds/update": "take fewer algorithm.epochs, raise policy.tokens_per_forward, or set "
        "policy.activation_checkpointing: false",
    }
    for name, remedy in advice.items():
        part = mean(history.recent(name) or [0.0])
        if name == "seconds/update" and not history.recent("sampler_logprob_gap"):
            continue
        if part >= SLOW_SHARE * mean(whole):
            what = f"{part / mean(whole):.0%} of a step of {mean(whole):.3g} s go to the {name.split('/')[1]}"
            return Sign("minor", what, remedy, name, part, SLOW_SHARE * mean(whole))
    return None


def environment_errors(history: History) -> Sign | None:
    """Environments fail; their episodes do not train. Of the newest step, since one failure is one too many."""
    column = history.columns.get("environment_errors")
    if not column or len(column) < len(history):  # the newest step has none
        return None
    share = column[-1]
    what = f"{share:.0%} of a step's episodes ended because their environment failed, and do not train"
    remedy = "read the warning of that step, try `lmgym.check_env`, or raise env.seconds"
    level: Level = "severe" if share >= MANY_ERRORS else "moderate" if share >= SOME_ERRORS else "minor"
    return Sign(level, what, remedy, "environment_errors", share, steps=1)


def invalid_actions(history: History) -> Sign | None:
    """Not one answer was an action of the environment for a whole window, so that nothing can be learned but by
    chance."""
    recent = history.recent("environment/invalid")
    if not recent or min(recent) < 1:
        return None
    what = f"not one answer of {len(recent)} steps was a valid action of the environment"
    remedy = (
        "`lmgym check` shows an answer and why it is no action; say the form of an action in the prompt or the system "
        "prompt, begin with a supervised stage, or mend the agent's extract_action"
    )
    return Sign("severe", what, remedy, "environment/invalid", 1.0)
