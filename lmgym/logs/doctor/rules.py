"""The table of the doctor's rules: docs/doctor.md has their thresholds with their reasons."""

from collections.abc import Callable
from dataclasses import dataclass

from lmgym.logs.doctor import rules_policy as policy
from lmgym.logs.doctor import rules_reward as reward
from lmgym.logs.doctor.held_out import goal_metric, held_out_change
from lmgym.logs.doctor.history import WINDOW, History, Level, Sign

LEVELS: tuple[Level, ...] = ("severe", "moderate", "minor")


@dataclass(frozen=True)
class Rule:
    """A rule and its name. It judges the stages that it is `about`, from so many `steps` on; one that compares
    evaluations, those of the metric that `held_out` names. `live`: training warns of it; of the others the loop itself
    warns.
    Example: next(rule for rule in RULES if rule.name == "entropy_collapse").check(history)"""

    name: str
    check: Callable[[History], Sign | None]
    about: Callable[[History], bool]
    steps: int = 2 * WINDOW
    held_out: Callable[[History], str | None] | None = None
    live: bool = True

    def lacks(self, history: History) -> str:
        """What the rule lacks to judge a stage; empty if it has enough, or if it is about what the stage has not."""
        if not self.about(history):
            return ""
        if len(history) < self.steps:
            return f"needs {self.steps} steps"
        if self.held_out is None:
            return ""
        metric = self.held_out(history)
        if metric is None and history.evaluations:
            return "needs a held-out metric that is no part of the reward: name one in evaluation.metrics"
        compared = metric and held_out_change(history, metric) and history.then_and_now("reward")[0]
        return "" if compared else "needs two evaluations of several prompts, some 15 steps apart"


def has(*columns: str) -> Callable[[History], bool]:
    """Whether the records of a stage have one of these metrics."""
    return lambda history: any(column in history.columns for column in columns)


def looked_at(history: History) -> bool:
    """Whether a reward watch has looked at the stage."""
    return any("/trick/" in column for column in history.columns)


RULES = (
    Rule("entropy_collapse", policy.entropy_collapse, has("entropy")),
    Rule("entropy_growth", policy.entropy_growth, has("entropy")),
    Rule("reward_collapse", reward.reward_collapse, has("reward"), WINDOW + 1),
    Rule("rarely_earned", reward.rarely_earned, has("reward"), WINDOW),
    Rule("overfitting", reward.overfitting, has("reward"), held_out=lambda _: "reward"),
    Rule("reward_hacking", reward.reward_hacking, has("reward"), held_out=goal_metric),
    Rule("reward_hole", reward.reward_hole, looked_at, 1),
    Rule("repeated_phrases", reward.repeated_phrases, has("repeated")),
    Rule("equal_groups", reward.equal_groups, has("zero_variance_groups"), WINDOW),
    Rule("truncation", reward.truncation, has("truncated"), WINDOW),
    Rule("context_overflow", reward.context_overflow, has("truncated/context"), WINDOW, live=False),
    Rule("length_drift", reward.length_drift, has("length/mean")),
    Rule("kl_blow_up", policy.kl_blow_up, has("kl/reference")),
    Rule("sampler_gap", policy.sampler_gap, has("sampler_logprob_gap"), WINDOW, live=False),
    Rule("one_component", reward.one_component, lambda history: len(history.facts.weights) > 1),
    Rule("dead_critic", policy.dead_critic, has("value/explained_variance"), policy.CRITIC_STEPS),
    Rule("learning_rate_too_high", policy.learning_rate_too_high, has(*policy.TOO_HIGH), WINDOW),
    Rule("learning_rate_too_low", policy.learning_rate_too_low, has("reward"), policy.STILL_STEPS),
    Rule("unseen_updates", policy.unseen_updates, has("weights/seen"), WINDOW),
    Rule("memory_budget", policy.memory_budget, has("memory/budget_gib"), 1),
    Rule("stale_rollouts", policy.stale_rollouts, has("version_lag"), WINDOW),
    Rule("slow_part", policy.slow_part, has("seconds"), WINDOW),
    Rule("invalid_actions", policy.invalid_actions, has("environment/invalid"), WINDOW, live=False),
    Rule("environment_errors", policy.environment_errors, has("environment_errors"), 1, live=False),
)
LIVE = frozenset(rule.name for rule in RULES if rule.live)
