"""An audit: the rewards of a recipe's stage, or one reward by its name, on examples of the task."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.experiments.audit.court import choose_form, cost, hear, summed
from lmgym.experiments.audit.findings import Verdict, judge_reward
from lmgym.experiments.audit.own_answers import TOTAL
from lmgym.rewards.base import Reward, check_examples
from lmgym.rewards.groups import compares
from lmgym.rewards.probing.cases import Case, make_cases
from lmgym.rewards.probing.judging import Judging
from lmgym.types import Example

EXAMPLES = 40


@dataclass(frozen=True)
class Audit:
    """The verdict on each reward, the last one on their weighted sum if there are several.

    Example: audit(build_rewards({"final_answer": 1.0}), examples).verdicts[0].findings"""

    cases: list[Case]
    verdicts: list[Verdict]


def audit(
    rewards: Sequence[Reward],
    examples: Sequence[Example],
    count: int = EXAMPLES,
    seed: int = 0,
    timeout: float = 60.0,
    tokenizer: Any = None,
    room: int = 20_000,
    whole: bool = True,
    say: Callable[[str], None] = lambda sentence: None,
    doing: Callable[[str], None] = lambda what: None,
) -> Audit:
    """Audit the rewards that count (weight other than 0) on `count` of the examples. `say` gets what is about to be
    asked and what it costs. `room`: characters of the longest answer; `tokenizer`: of the recipe's model.
    `whole`: these are all rewards of a run, which should tell right answers from wrong ones.

    Raises LmgymError without a reward or an example, and where a reward cannot judge even plain answers."""
    counted = [reward for reward in rewards if reward.weight]
    if not counted:
        raise LmgymError("there is no reward with a weight other than 0 to audit")
    if count < 2:
        raise LmgymError(f"--examples is {count}; take 2 at least, since wrong answers come from other examples")
    cases = make_cases(examples, count, seed, room)
    check_examples(counted, [case.example for case in cases])
    judges = [Judging(reward, timeout, tokenizer) for reward in counted]
    cases = choose_form([one for one in judges if not compares(one.reward) and not asks_endpoint(one.reward)], cases)
    for reward in counted:
        say(f"{reward.name}: {cost_of(reward, cases)}")
    heard = [hear(judging, cases, doing) for judging in judges]
    verdicts = [judge_reward(one, alone=whole and len(heard) == 1) for one in heard]
    if len(heard) > 1:
        verdicts.append(judge_reward(summed(TOTAL, heard, [reward.weight for reward in counted]), alone=whole))
    return Audit(cases, verdicts)


def asks_endpoint(reward: Reward) -> bool:
    """Whether the reward sends requests to a server."""
    return bool({"base_url", "url"} & {*getattr(reward.function, "keywords", {})})


def cost_of(reward: Reward, cases: Sequence[Case]) -> str:
    """What an audit asks of a reward, in words."""
    grouped = compares(reward)
    count = cost(cases, grouped)
    asked = f"{count:,} answers to judge" + " in groups" * grouped
    if asks_endpoint(reward):
        each = "group" if grouped else "answer"
        asked += f"; each {each} costs a request at least, of a rubric one for each criterion (Ctrl-C stops)"
    return asked
