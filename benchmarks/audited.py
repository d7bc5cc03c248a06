"""How many of 35 rewards that were made bad `lmgym audit` finds, and how many of 30 good ones it complains about.

    python -m benchmarks.audited [--examples 40] [--seeds 0 1 2]

A bad reward is found if there is a problem of the kind that was planted, written here before the first audit; another
finding does not count. A good one with any problem is a false alarm."""

import argparse
from collections.abc import Sequence
from functools import cache
from typing import Any

from lmgym.experiments.audit.audit import audit
from lmgym.rewards.building import build_rewards
from lmgym.tasks.base import load_task
from lmgym.types import Example

SUMS: dict[str, Any] = {"name": "arithmetic", "explain": True}
TASKS: dict[str, dict[str, Any]] = {
    "sums": SUMS,
    "bare": {"name": "arithmetic"},
    "large": {**SUMS, "largest": 5000, "operations": ["add"]},
}

# reward: (task, kinds of findings of which one must be there)
BAD: dict[str, tuple[str, tuple[str, ...]]] = {
    "contains": ("sums", ("paid/many numbers", "paid/many answers")),
    "substring": ("sums", ("paid/more digits",)),
    "any_box": ("sums", ("paid/many boxes",)),
    "first_mark": ("sums", ("paid/hidden comment", "paid/in a thought")),
    "reads_thoughts": ("sums", ("paid/in a thought",)),
    "reads_comments": ("sums", ("paid/hidden comment",)),
    "deletes_words": ("sums", ("paid/wrong unit",)),
    "format_only": ("sums", ("text alone",)),
    "always_one": ("sums", ("constant",)),
    "never_paid": ("sums", ("constant",)),
    "reversed_sign": ("sums", ("labels",)),
    "length_bonus": ("sums", ("paid/longer", "raised/longer")),
    "small_length_bonus": ("sums", ("paid/longer", "raised/longer")),
    "empty_is_equal": ("sums", ("paid/empty",)),
    "invisible": ("sums", ("paid/invisible",)),
    "likes_praise": ("sums", ("paid/flattery",)),
    "obeys": ("sums", ("paid/injection",)),
    "likes_question": ("bare", ("paid/echo", "paid/question", "raised/echo", "raised/question")),
    "at_random": ("sums", ("unstable",)),
    "with_noise": ("sums", ("unstable",)),
    "raises_without_number": ("sums", ("fails",)),
    "too_long": ("sums", ("fails",)),
    "no_white_space": ("sums", ("lost/white space",)),
    "no_full_stop": ("sums", ("lost/full stop",)),
    "next_is_right": ("sums", ("labels/near",)),
    "no_commas": ("large", ("lost/thousands",)),
    "ranks_in_batch": ("sums", ("depends on others",)),
    "seen_before": ("sums", ("unstable",)),
    "first_is_better": ("sums", ("depends on others",)),
    "in_tens": ("sums", ("labels/near",)),
    "likes_german": ("sums", ("paid/another language",)),
    "bag_of_words": ("texts", ("paid/shuffled words",)),
    "no_bold": ("sums", ("lost/bold",)),
    "a_fifth_is_paid": ("sums", ("labels",)),
    "rare_word": ("sums", ("paid", "raised")),
}
BESIDE = {"right": 1.0}  # a reward of texts alone stands beside one that knows what is right
GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("sums", {}) for name in (
        "right", "in_box", "in_tags", "behind_hashes", "behind_words", "last_line", "thought_and_answer", "near",
        "format_and_right", "signed", "signed_or_silent", "abstains", "sure_judge", "judge_with_noise", "noisy_judge",
        "brief_and_right", "right_before_wrong",
    )},
    "right of large numbers": ("large", {"right": 1.0}),
    "right of bare numbers": ("bare", {"right": 1.0}),
    **{name: ("sums", {**BESIDE, name: 0.1}) for name in (
        "target_length", "pattern", "no_repetition", "plain_letters", "sentences", "kind_words",
    )},
    **{name: ("texts", {}) for name in ("two_words", "longest_common", "like", "the_same")},
    "letter": ("letters", {}),
}  # fmt: skip


@cache
def examples_of(task: str) -> Sequence[Example]:
    """The examples of a task: arithmetic, sentences about a day (open texts), or questions with a letter."""
    if task == "texts":
        who, what, where = ("Ann", "Ben", "Cal", "Dan", "Eva"), ("sold", "found", "lost", "mended"), (
            "at the market by the river", "in the old school behind the hill", "on a boat with two red sails",
        )  # fmt: skip
        return [
            Example(f"texts/{n}", f"What did {who[n % 5]} do on day {n}?",
                    (f"{who[n % 5]} {what[n % 4]} {n + 2} small boxes {where[n % 3]} before day {n} was over",))
            for n in range(60)
        ]  # fmt: skip
    if task == "letters":
        return [Example(f"letters/{n}", f"Which is number {n % 4 + 1}? A one, B two ...", ("ABCD"[n % 4],),
                        {"answer": "ABCD"[n % 4]}) for n in range(60)]  # fmt: skip
    section = dict(TASKS[task])
    return load_task(section.pop("name"), "train", limit=400, **section)


def found(section: dict[str, Any], module: str, task: str, count: int, seed: int) -> list[str]:
    """The kinds of problems that an audit of these rewards finds."""
    rewards = build_rewards({
        name: {"reward": f"benchmarks.{module}:{name}", "weight": weight} for name, weight in section.items()
    })  # fmt: skip
    verdicts = audit(rewards, examples_of(task), count, seed).verdicts
    return [one.code for verdict in verdicts for one in verdict.findings if one.level == "problem"]


def audit_all(count: int = 40, seed: int = 0) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """What was found in the bad rewards, and in the good ones."""
    bad = {name: found({name: 1.0}, "bad_rewards", task, count, seed) for name, (task, _) in BAD.items()}
    good = {
        name: found(section or {name: 1.0}, "good_rewards", task, count, seed) for name, (task, section) in GOOD.items()
    }
    return bad, good


def is_found(name: str, codes: Sequence[str]) -> bool:
    """Whether what was planted is among the findings."""
    return any(code.startswith(BAD[name][1]) for code in codes)


def main() -> None:
    """Print a line for each reward, and the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    for seed in given.seeds:
        bad, good = audit_all(given.examples, seed)
        for name, codes in bad.items():
            print(f"bad   {'found ' if is_found(name, codes) else 'MISSED'}  {name}: {', '.join(codes) or 'nothing'}")
        for name, codes in good.items():
            print(f"good  {'ALARM ' if codes else 'quiet '}  {name}: {', '.join(codes) or 'nothing'}")
        hits, alarms = sum(is_found(*one) for one in bad.items()), sum(map(bool, good.values()))
        print(f"seed {seed}, {given.examples} examples: {hits} of {len(bad)} bad ones found, "
              f"{alarms} of {len(good)} good ones complained about")  # fmt: skip


if __name__ == "__main__":
    main()
