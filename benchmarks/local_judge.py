"""How often a local judge is right, on sums whose answers are known: `rubric` (yes or no) and `judge_pairs` (A or B).

    python -m benchmarks.local_judge --model FOLDER

Half of the answers are right; the wrong ones are too large by 1 to 9. Prints, each with a 95 % interval: how often the
rubric says of an answer what it is (yes at one half or more), its probability of a yes to right and to wrong answers,
how often a right answer has the larger one; how often the right one of two wins, asked in both orders, and how often
the first of two wins, whichever that is. With `--swap` the criterion is that the answer is wrong: a no counts.
"""

import argparse

from lmgym.core import seeds
from lmgym.rewards.learned.choices import LocalJudge, Question
from lmgym.rewards.learned.judge_prompts import Item
from lmgym.rewards.learned.local_pairs import TEMPLATE
from lmgym.rewards.learned.ranking import SYSTEM, lettered
from lmgym.rewards.learned.rubric import rubric
from lmgym.rewards.learned.scorers import load_scorer
from lmgym.stats.intervals import mean_interval, share_interval
from lmgym.types import Example


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--largest", type=int, default=20, help="of the two numbers of a sum")
    parser.add_argument("--swap", action="store_true")
    given = parser.parse_args()
    sums = [sum_of(number, given.largest) for number in range(given.questions)]
    examples = [Example(f"sum/{n}", f"What is {a} + {b}?") for n, (a, b, _) in enumerate(sums)]
    pairs = [(str(a + b), str(a + b + off)) for a, b, off in sums]
    yes_or_no(given.model, examples, pairs, given.swap)
    which_of_two(given.model, examples, pairs)


def yes_or_no(model: str, examples: list[Example], pairs: list[tuple[str, str]], swap: bool) -> None:
    """Every second question is shown with the right answer."""
    right = [n % 2 == 0 for n in range(len(pairs))]
    texts = [pair[0] if known else pair[1] for pair, known in zip(pairs, right, strict=True)]
    said = rubric(texts, examples, model=model, criteria=[f"The answer is {'wrong' if swap else 'right'}."])
    p = [1 - value if swap else value for value in said]
    agree = [float((value >= 0.5) == known) for value, known in zip(p, right, strict=True)]
    print(f"rubric: says of an answer what it is    {share_interval(agree)}")
    of_right, of_wrong = (
        [one for one, known in zip(p, right, strict=True) if known == truth] for truth in (True, False)
    )
    print(f"rubric: P(right) of right answers       {mean_interval([[one] for one in of_right])}")
    print(f"rubric: P(right) of wrong answers       {mean_interval([[one] for one in of_wrong])}")
    larger = [sum((one > other) + 0.5 * (one == other) for other in of_wrong) / len(of_wrong) for one in of_right]
    print(f"rubric: a right answer has the larger   {mean_interval([[one] for one in larger])}")


def which_of_two(model: str, examples: list[Example], pairs: list[tuple[str, str]]) -> None:
    """Each right answer beside a wrong one, in both orders, as `judge_pairs` asks."""
    judge, first = LocalJudge(load_scorer("judge_pairs", "causal", model)), []
    for order in ((0, 1), (1, 0)):
        asked = [
            Question(SYSTEM, TEMPLATE, Item(0, example, "", lettered([pair[place] for place in order])))
            for example, pair in zip(examples, pairs, strict=True)
        ]
        first.append([one[0] for one in judge.probabilities(asked, (("A",), ("B",)))])
    both = list(zip(*first, strict=True))  # P(the first wins), where the right one is first, and where it is second
    print(f"pairs: the right one wins, both orders  {share_interval([float(one > other) for one, other in both])}")
    print(f"pairs: the first one wins               {mean_interval([[float(p > 0.5) for p in pair] for pair in both])}")
    print(f"pairs: the right one wins, shown first  {share_interval([float(one > 0.5) for one, _ in both])}")
    print(f"pairs: the right one wins, shown second {share_interval([float(other < 0.5) for _, other in both])}")


def sum_of(number: int, largest: int) -> tuple[int, int, int]:
    """Two numbers, and how far the wrong answer is off."""
    random = seeds.generator("local judge", number)
    return int(random.integers(1, largest + 1)), int(random.integers(1, largest + 1)), int(random.integers(1, 10))


if __name__ == "__main__":
    main()
