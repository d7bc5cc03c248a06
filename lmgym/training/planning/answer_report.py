"""What `lmgym check` says of a few answers: how they end, what they earn, and which rewards are never paid."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lmgym.config.schema import Stage
from lmgym.logs.records import environment_numbers
from lmgym.rewards.base import Reward
from lmgym.rewards.check import why_never_paid
from lmgym.rollouts.rollout import groups_of
from lmgym.training.planning.report import Report
from lmgym.types import Episode


def report_answers(report: Report, stage: Stage, episodes: list[Episode], verdict: bool) -> None:
    """Report how the answers end and what they earn; as a warning only if no earlier stage trains the model first."""
    complain = report.warn if verdict else report.note
    if not verdict:
        report.note("(what follows is of the model before the stages ahead of this one have trained it)")
    count = len(episodes)
    unended = sum(episode.truncated and not episode.terminated for episode in episodes) / count  # others are moves
    fixed = stage.sampling.min_new_tokens == stage.sampling.max_new_tokens  # then they are meant to be
    stops = Counter(turn.stop for episode in episodes for turn in episode.turns)
    turns, moves = stops.total(), any(episode.terminated for episode in episodes)
    spoiled = f"; {unended:.0%} of {count} episodes never came to an end" if moves or turns > count else ""
    said = f"answers cut off at max_new_tokens: {stops['length'] / max(turns, 1):.0%} of {turns}{spoiled}"
    (complain if unended > 0.5 and stops["length"] and not fixed else report.note)(said)
    if full := sum(episode.overflowed for episode in episodes):
        say = complain if full > 0.1 * count else report.note
        say(f"episodes that filled the model's context: {full} of {count}; fewer turns (env.max_turns), shorter texts "
            "of the environment or a longer context would help")  # fmt: skip
    if invalid := environment_numbers(episodes).get("invalid"):
        valid = sum(number == 0 for number in invalid)
        notes = [str(turn.info.get("reason")) for e in episodes for turn in e.turns if turn.info.get("invalid")]
        why = f"; the first that was not: {notes[0]}" if notes else ""
        (report.note if valid else complain)(f"valid actions: {valid} of {len(invalid)} sampled{why}")
    judged = [episode for episode in episodes if episode.judged]
    if not judged:
        complain(f"no reward judged any of the {count} answers; a step without one ends the run")
        return
    mean = sum(episode.score for episode in judged) / len(judged)
    values = sorted({round(episode.score, 4) for episode in judged})
    report.note(f"reward: mean {mean:.3f}, from {values[0]} to {values[-1]}")
    groups = groups_of(judged)
    equal = sum(len({episode.score for episode in group}) == 1 for group in groups) / len(groups)
    if stage.algorithm.group_size > 1 and equal == 1.0:
        complain(f"in all {len(groups)} groups every answer earned the same: a group baseline would learn nothing; "
                    "warm-start the model, or make the reward finer")  # fmt: skip
    else:
        report.note(f"groups whose answers all earned the same: {equal:.0%} of {len(groups)}")
    shown = judged[0].text.strip().replace("\n", "⏎")[:100]
    report.note(f"an answer: {shown!r} (reward {judged[0].score:.3f}, stopped by {judged[0].turns[-1].stop})")


def report_rewards(
    report: Report, rewards: Sequence[Reward], episodes: Sequence[Episode], timeout: float, tokenizer: Any
) -> None:
    """Report unjudged answers, and rewards that were 0 for all: as a warning, if a mistake explains it."""
    answered = [episode for episode in episodes if episode.turns]
    for reward in rewards:
        unjudged = [episode for episode in answered if episode.reward_components[reward.name] is None]
        if unjudged:
            errors = [one.reward_errors[reward.name] for one in unjudged if reward.name in one.reward_errors]
            why = f"; {len(errors)} went wrong, the first: {errors[0]}" if errors else ""
            say = report.warn if why else report.note
            say(f"reward '{reward.name}' did not judge {len(unjudged)} of {len(answered)} answers{why}")
    silent = [one for one in rewards if all(episode.reward_components[one.name] == 0 for episode in answered)]
    for reward in silent if answered else ():
        if why := why_never_paid(reward, answered, timeout, tokenizer):
            report.warn(f"reward '{reward.name}' was 0 for all {len(answered)} answers, and {why}")
        else:
            report.note(f"reward '{reward.name}' was 0 for all {len(answered)} answers")
