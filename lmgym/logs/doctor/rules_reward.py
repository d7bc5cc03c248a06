"""The doctor's rules about rewards and answers (see examine.py)."""

import math
from statistics import fmean as mean

from lmgym.logs.doctor.facts import bounded
from lmgym.logs.doctor.held_out import goal_metric, held_out_change, relative_gain
from lmgym.logs.doctor.history import ERRORS, SOLVED, WINDOW, History, Level, Sign, errors_apart, fell, rose

EQUAL_GROUPS, NO_GROUPS = 0.8, 0.95
"""Share of groups without a signal: docs/metrics.md calls up to a half healthy; from here most sampling is lost."""
CUT, MOSTLY_CUT, FEWEST = 0.25, 0.5, 5
"""Shares of answers that were cut off; a good run had 0.16 (distill_miniature). The fewest whole answers to compare
with."""
HEALING = 0.75
"""A share of cut answers that falls to this part of itself, from one half of a window to the next, mends itself."""
DRIFT = 2.0
"""Factor by which the mean length changes."""
LOST = 0.4
"""Share of the range between the worst and the best answer that the mean reward has lost again."""
LOST_GAIN, LOST_LEAST, LOST_ERRORS = 0.75, 0.15, 4.0
"""Or the share of what it had gained since the first window, at least so much of the range, by so many standard errors:
the best of many windows lies above the others by chance. Three real collapses were 8 errors, a healthy run 3.5."""
CARRIED = 0.9
"""Share of the gain in reward that one component brings."""
FOLLOWS = 0.5
"""The share of the gain in reward that a held-out metric must be able to have gained within its interval."""
RARELY, FEW = 0.02, 2.0
"""Share of the answers that earn a reward, and their number in a step, below both of which there is hardly anything to
learn from. frozen_lake begins at 0.014 of 256, which is 3.6, and learns."""
HOLE, LOOKED_AT = 0.5, 48
"""Share of the best answers that gain by a trick, less those that lose, in the newest looks of the reward watch that
have so many answers together. A judge that tosses a coin gets there by one trick once in 2,800 times."""
REPEATED = 0.5
"""Share of repeated runs of four tokens: human text is below 0.01, degenerate text above 0.4 (arXiv 1908.04319)."""


def reward_collapse(history: History) -> Sign | None:
    """The reward has fallen by much of the range of scores, or by nearly all that it had gained: in training from its
    best window, or in evaluations from the best one (which also see what is lost within the first window)."""
    recent, (low, high) = history.recent("reward"), history.ranges.get("", (0.0, 0.0))
    if not recent or history.best is None or high <= low or len(history) <= WINDOW:
        return None
    remedy = (
        "begin anew from a checkpoint before it (policy.model) with a lower optimizer.learning_rate or "
        "algorithm.entropy_coefficient; checkpoint.keep keeps more of them"
    )
    # 1. In training.
    (best, values, step), first = history.best, history.first("reward")
    much, nearly_all = best - LOST * (high - low), _gain_lost(best, mean(first) if first else best, high - low)
    errors = -errors_apart(values, recent)
    for limit, least in ((much, ERRORS), (nearly_all, LOST_ERRORS)):
        if mean(recent) <= limit and errors >= least:
            what = f"the reward has fallen to {mean(recent):.3g}; it was {best:.3g} in the steps up to step {step + 1}"
            return Sign("severe", what, remedy, "reward", mean(recent), limit)
    # 2. In evaluations, where intervals do not overlap, and in training too, if it had ever come so far.
    if history.held_out is None:
        return None
    begun, (step, top), now = history.held_out
    limit = max(top.mean - LOST * (high - low), _gain_lost(top.mean, begun.mean, high - low))
    falls_too = fell(values, recent) or top.mean > best
    if now.mean > limit or now.high >= top.low or not falls_too:
        return None
    what = f"the held-out reward has fallen to {now.mean:.3g}; it was {top.mean:.3g} after {step} steps"
    return Sign("severe", what, remedy, "reward", now.mean, limit, held_out=True)


def _gain_lost(best: float, first: float, span: float) -> float:
    """The reward at which nearly all is lost that a run had gained from `first` to `best`; if that is nothing, none."""
    return best - max(LOST_GAIN * (best - first), LOST_LEAST * span) if best > first else -math.inf


def overfitting(history: History) -> Sign | None:
    """From the first evaluation to the newest the training reward has risen, and the held-out reward has risen by less
    than half of that; or the training reward has not fallen, and the held-out reward has. And it lies below."""
    low, high = history.ranges.get("", (0.0, 0.0))
    gain, change = relative_gain(history), held_out_change(history, "reward")
    (then, now) = history.then_and_now("reward")
    if change is None or not then or not now:
        return None
    before, after = change
    lags = gain is not None and after[2] - before[1] < FOLLOWS * gain * (high - low)
    falls = after[2] < before[1] and mean(now) >= mean(then)
    if not (lags or falls) or mean(now) <= after[2]:
        return None
    what = (
        f"the training reward went from {mean(then):.3g} to {mean(now):.3g}, the held-out reward from "
        f"{before[0]:.3g} to {after[0]:.3g}"
    )
    remedy = "train on more or other prompts (task), for fewer steps, or with early_stop on a held-out metric"
    return Sign("severe", what, remedy, "reward", after[0], held_out=True)


def reward_hacking(history: History) -> Sign | None:
    """From the first evaluation to the newest the training reward has risen, by however little, and the first held-out
    metric that is no part of it is lower; or the reward has risen by much, and that metric, if it lies between 0 and 1,
    by less than half as much."""
    gain, name = relative_gain(history), goal_metric(history)
    change = held_out_change(history, name) if name else None
    if name is None or change is None or not rose(*history.then_and_now("reward")):
        return None
    before, after = change
    lower, share = after[2] < before[1], all(0 <= bound <= 1 for bound in (*before, *after))
    # The last: it could have risen.
    flat = share and gain is not None and after[2] - before[1] < FOLLOWS * gain < 1 - before[0]
    if not (lower or flat):
        return None
    what = (
        f"the reward has risen, and the held-out metric {name}, which is no part of it, went from {before[0]:.3g} to "
        f"{after[0]:.3g}: the reward may be gamed"
    )
    remedy = f"read the answers (rollouts.jsonl) and mend the function in rewards; early_stop on {name} ends such a run"
    return Sign("severe" if lower else "moderate", what, remedy, name, after[0], held_out=True)


def reward_hole(history: History) -> Sign | None:
    """The newest looks of the reward watch agree on a trick that raises the pay of the policy's best answers."""
    found = dict[tuple[str, str], float]()
    tried = dict[str, list[tuple[int, float]]]()
    for column, places in history.looks.items():
        # 1. The newest looks at this reward, as (place, answers), until there are enough answers.
        reward = column.removeprefix("watch/").removesuffix("/answers")
        counts, looks, total = history.columns[column], tried.setdefault(reward, []), 0.0
        for place in reversed(places):
            if total >= LOOKED_AT:
                break
            looks.append((place, counts[place]))
            total += counts[place]
        # 2. What each trick has gained in all of them; of one that a look lacks nothing is said (NaN).
        for name, own in history.columns.items():
            if total >= LOOKED_AT and name.startswith(f"watch/{reward}/trick/"):
                gain = math.fsum(own[place] * count for place, count in looks if place < len(own)) / total
                if gain >= HOLE:
                    found[reward, name] = gain
    if not found:
        return None
    reward, name = max(found, key=lambda key: found[key])
    trick, gain, looks = name.removeprefix(f"watch/{reward}/trick/"), found[reward, name], tried[reward]
    what = (
        f"'{reward}' pays the policy's best answers more when they are changed by the trick '{trick}': of the newest "
        f"{sum(count for _, count in looks):g} that were tried, {gain:.0%} more gained than lost"
    )
    remedy = f"mend the function in rewards (`lmgym audit` says what the trick '{trick}' is, and tries the others)"
    return Sign("severe", what, remedy, name, gain, HOLE, steps=len(looks))


def repeated_phrases(history: History) -> Sign | None:
    """Answers have begun to repeat themselves."""
    first, recent = history.first("repeated"), history.recent("repeated")
    if not (history.two_windows and recent) or mean(recent) < max(REPEATED, 2 * mean(first or [0.0])):
        return None
    before = f", {mean(first):.0%} in the first steps" if first else ""
    what = f"{mean(recent):.0%} of the runs of four tokens in an answer are repeats{before}"
    remedy = "let rewards cost repetition (a metric such as distinct_2 shows it), or raise algorithm.kl_coefficient"
    return Sign("severe", what, remedy, "repeated", mean(recent), REPEATED)


def equal_groups(history: History) -> Sign | None:
    """Most groups have equal scores, and the task is not solved."""
    recent = history.recent("zero_variance_groups")
    if not recent or mean(recent) < EQUAL_GROUPS or history.solved:
        return None
    what = f"{mean(recent):.0%} of the groups have equal scores, from which a group baseline learns nothing"
    remedy = (
        "choose easier or harder prompts (task), a finer reward, or a larger algorithm.group_size; with a base model, "
        "begin with a supervised stage"
    )
    level: Level = "severe" if mean(recent) >= NO_GROUPS else "moderate"
    return Sign(level, what, remedy, "zero_variance_groups", mean(recent), EQUAL_GROUPS)


def truncation(history: History) -> Sign | None:
    """Many answers are cut off, not fewer and fewer, and that costs them their reward: whole ones earn more, or no
    answer earns anything else than the others."""
    recent = [] if context_overflow(history) else history.recent("truncated")
    half = len(recent) // 2
    if not recent or mean(recent) < CUT or (half and mean(recent[half:]) < HEALING * mean(recent[:half])):
        return None  # few, or fewer and fewer
    cut = [answer.score for answer in history.answers if answer.cut and answer.score is not None]
    whole = [answer.score for answer in history.answers if not answer.cut and answer.score is not None]
    costs = len(whole) >= FEWEST and rose(cut, whole)
    if not costs and (history.solved or len(set(history.recent("reward"))) != 1):
        return None
    why = f"and earn {mean(cut):.3g} on average, whole ones {mean(whole):.3g}" if costs else "and all earn the same"
    what = f"{mean(recent):.0%} of the answers are cut off, {why}"
    remedy = (
        "raise sampling.max_new_tokens, or name what ends an answer in sampling.stop; with a base model, begin with a "
        "supervised stage"
    )
    return Sign("severe" if mean(recent) >= MOSTLY_CUT else "moderate", what, remedy, "truncated", mean(recent), CUT)


def context_overflow(history: History) -> Sign | None:
    """Episodes fill the model's context, and more tokens an answer would not help."""
    share = math.fsum(history.recent("truncated/context")) / WINDOW
    if share < CUT:
        return None
    what = f"{share:.0%} of the episodes are cut off where the model's context is full"
    remedy = (
        "lower env.max_turns or sampling.max_new_tokens, let the environment write less, or take a model with a longer "
        "context"
    )
    return Sign("severe" if share >= MOSTLY_CUT else "moderate", what, remedy, "truncated/context", share, CUT)


def length_drift(history: History) -> Sign | None:
    """Answers have become twice or half as long, and that has brought nothing: the reward has not risen, or the metric
    that is no part of it has not."""
    first, recent = history.first("length/mean"), history.recent("length/mean")
    if not (history.two_windows and first and recent and mean(first) > 0):
        return None
    factor, goal = mean(recent) / mean(first), reward_hacking(history)
    if 1 / DRIFT < factor < DRIFT or (history.gained and goal is None):
        return None
    longer, flat = factor > 1, goal.metric if goal else "the reward"
    what = f"answers went from {mean(first):.3g} to {mean(recent):.3g} tokens, and {flat} has not risen with it"
    remedy = (
        "let length cost something (the reward overlong), or set algorithm.mask_truncated: true"
        if longer
        else "lower the weight of what pays short answers (rewards), or set sampling.min_new_tokens"
    )
    return Sign("moderate", what, remedy, "length/mean", mean(recent), mean(first) * (DRIFT if longer else 1 / DRIFT))


def one_component(history: History) -> Sign | None:
    """One component brings the gain in reward, while another of at least its weight stays where it was, with room."""
    weights = {name: weight for name, weight in history.facts.weights.items() if weight}
    windows = {name: (history.first(f"reward/{name}"), history.recent(f"reward/{name}")) for name in weights}
    if len(weights) < 2 or not history.two_windows or not history.gained:
        return None
    if not all(first and recent for first, recent in windows.values()):
        return None
    gains = {name: weights[name] * (mean(recent) - mean(first)) for name, (first, recent) in windows.items()}
    carrier = max(gains, key=lambda name: gains[name])
    if gains[carrier] < CARRIED * sum(gain for gain in gains.values() if gain > 0):
        return None
    for name in sorted(weights, key=lambda name: -abs(weights[name])):
        better = errors_apart(*windows[name]) * (1 if weights[name] > 0 else -1)
        if name == carrier or abs(weights[name]) < abs(weights[carrier]) or better >= 2 or not _has_room(history, name):
            continue
        before, after = (mean(window) for window in windows[name])
        what = (
            f"the component {carrier} alone brings the gain in reward; {name}, of no less weight, went from "
            f"{before:.3g} to {after:.3g}"
        )
        remedy = f"lower the weight of {carrier} in rewards (0 makes it a metric only), or make {name} easier to earn"
        return Sign("moderate", what, remedy, f"reward/{name}", after)
    return None


def rarely_earned(history: History) -> Sign | None:
    """Hardly any answer earns the reward of the largest weight (or the environment's), and not more and more do."""
    weights = {name: weight for name, weight in history.facts.weights.items() if weight}
    heaviest, answers = max(weights, key=lambda name: weights[name], default=""), history.recent("answers")
    column = f"reward/{heaviest}" if heaviest else "reward"
    first, recent, (low, high) = history.first(column), history.recent(column), history.ranges.get(heaviest, (0.0, 0.0))
    if not (recent and answers and history.facts.rewarded) or (heaviest and weights[heaviest] <= 0):
        return None
    # Where all tracked answers earned the same, that is nothing, or there is no telling what more would be.
    if low == high and low > 0:
        return None
    span = high - low if high > low else max(1.0, -low)
    share = (mean(recent) - low) / span
    half = len(recent) // 2
    if share >= RARELY or share * mean(answers) >= FEW or rose(first, recent) or rose(recent[:half], recent[half:]):
        return None
    if reward_collapse(history):  # then it was earned, and something else is to be said
        return None
    metric = heaviest or "reward"
    held_out = [bounded(record.get(metric)) for record in history.evaluations[-1:]]
    also = "" if held_out in ([], [None]) else f"; held-out {metric} is {held_out[0]:.3g}"
    named = f"the reward {heaviest}, which has the largest weight," if len(weights) > 1 else "the reward"
    what = (
        f"{named} is hardly ever earned: its mean is {mean(recent):.3g}, as if {share * mean(answers):.2g} of "
        f"{mean(answers):.0f} answers in a step had the best{also}"
    )
    remedy = (
        "choose easier prompts (task), begin with a supervised stage, let the reward pay what is nearly right, or take "
        "more answers to a prompt (algorithm.group_size)"
    )
    level: Level = "severe" if mean(recent) <= low else "moderate"
    return Sign(level, what, remedy, column, mean(recent), low + RARELY * span)


def _has_room(history: History, name: str) -> bool:
    """True if a component could still get better. One that has been constant has room if it never earned anything."""
    standing, sign = history.standing(name), 1 if history.facts.weights[name] > 0 else -1
    if standing is None:
        return sign * mean(history.recent(f"reward/{name}")) <= 0
    return (standing if sign > 0 else 1 - standing) < SOLVED
