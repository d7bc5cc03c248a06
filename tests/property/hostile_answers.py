"""Texts that are meant to break a reader of mathematics, from a seeded generator; and a command that scores them.

    python -m tests.property.hostile_answers 0 10000

scores texts 0 to 10,000, which takes many minutes, and prints what they earned, how long it took, and how the workers
failed. The test suite scores the first few hundred (test_workers.py).
"""

import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable

from lmgym.processes.pool import ProcessPool, shared
from lmgym.rewards.maths.math_equal import math_equal
from lmgym.types import Example

SECONDS = 1.0
REFERENCES = (
    r"\frac{1}{2}", "x+1", r"\left(\frac{\pi}{2}, 3\right)", "18", r"\sqrt{2}", r"\text{Friday}", r"x \in [1,2]",
)  # fmt: skip
SIGNS = "0123456789xyzabeipn+-*/^_=<>!|&%$#@~'\"\\{}{}[]().,;: \n\t"
SIGNS += "\u0663\uff18\u00bd\u2212\u221e\x00\x7f\ud800\u202e\U0001f600\u0301"
WORDS = r"""\frac \sqrt \left \right \boxed \fbox \text \begin \end \pi \infty \sum \int \prod \lim \log \sin \cdot
\binom \overline \mathbb pmatrix \cup \in \le \ge \ne \pm \times \div \circ \angle \det \input \def nan NaN inf
Infinity 1e999 0x1F __import__('os').system('false') lambda:0 1;1 ``` </think> \\"""
ATOMS = [*SIGNS, *WORDS.split()]
BRACKETS = (
    ("(", ")"), ("{", "}"), (r"\sqrt{", "}"), (r"\frac{1}{1+", "}"), ("[", "]"), (r"\left(", r"\right)"), ("|", "|"),
    (r"\{", r"\}"), ("-(", ")"), (r"\lfloor ", r"\rfloor "),
)  # fmt: skip
LINKS = (
    r"\frac", r"\frac12", "1+", "x-", "2*", "!", "=x", "<1", ",1", r"\pm 1", r"\cup(1,2)", "a_", "x^2+", r"\\ 1 &",
    r"\sin ", "\u00bd", "0.1", "1/", r"\int ", r"\sum_{n=1}^{10^9} ",
)  # fmt: skip
SLOW = ("1,111", " ", "((", "\\", "$", "a ", "answer ", "0", r"\text{", "-", "$x", "1 ", "and ", "[", "= ")
LONG = ("9", "x+", r"\frac{1}{2}", "{", "$1$ ", r"\boxed{", "answer: ", "\u0663", " ", r"\boxed{1} ")
EMPTY = ("", " ", "\n", "\x00", "$$", "$ $", r"\boxed{}", r"\boxed{ }", "{}", "\ud800", r"\(\)", ".", "\u200b")
FRAMES = (
    r"\boxed{%s}", r"so \boxed{%s}.", r"$\boxed{%s}$", "#### %s", "The answer is $%s$.", "Answer: %s", "$%s$", "%s",
    r"\boxed{%s",
)  # fmt: skip


def powers(source: random.Random) -> str:
    """9^{9^{9^9}} and its like."""
    base = source.choice(["9", "99", "x", "-2", "0.5", "(1+i)", r"\pi", "10"])
    height = source.randint(2, 9)
    tower = source.choice(["^".join([base] * height), "^{".join([base] * height) + "}" * (height - 1)])
    return source.choice([tower, tower + "!", rf"\frac{{1}}{{{tower}}}", rf"\sqrt{{{tower}}}", rf"{tower} \mod 7"])


def nested(source: random.Random) -> str:
    """Brackets, fractions and roots in each other, closed or not."""
    left, right = source.choice(BRACKETS)
    deep = source.choice([3, 10, 29, 31, 100, 1_000, 20_000])
    return left * deep + source.choice(["1", "x", ""]) + right * source.choice([deep, deep, deep - 1, 0])


def chains(source: random.Random) -> str:
    """Long sums, products, fractions without braces, factorials, equations."""
    links = source.choice(LINKS) * source.choice([2, 7, 40, 150, 700])
    return source.choice(["", "1", "x"]) + links + source.choice(["", "1", "x"])


def costly(source: random.Random) -> str:
    """Small to read, endless to compute."""
    n = source.choice([20, 10**3, 10**6, 10**12])
    row = " & ".join(["x^{x}"] * 9)
    return source.choice(
        [
            rf"\sum_{{k=1}}^{{{n}}} \frac{{1}}{{k^2}}",
            rf"\int_0^{{{n}}} \frac{{\sin(x^x)}}{{x^{{x}}+1}} dx",
            rf"{n}!",
            rf"{n}!!!",
            rf"\binom{{{n}}}{{{n // 2}}}",
            rf"\prod_{{k=1}}^{{{n}}} (x-k)",
            rf"\sqrt[{n}]{{2}}",
            rf"(x+y+z)^{{{n}}}",
            rf"\lim_{{x \to 0}} \frac{{\sin x^{{{n}}}}}{{x}}",
            rf"x^{{{n}}} + x + 1 = 0",
            rf"\cos({n}) + \sin^{{{n}}}(x)",
            rf"{n}^{{{n}}} < x < {n}^{{{n + 1}}}",
            r"\begin{pmatrix}" + r" \\ ".join([row] * 9) + r"\end{pmatrix}^{-1}",
        ]
    )


def noise(source: random.Random) -> str:
    """Any tokens in any order."""
    return "".join(source.choices(ATOMS, k=source.choice([1, 3, 10, 40, 200])))


def backtracking(source: random.Random) -> str:
    """What regular expressions are slow on."""
    return source.choice(SLOW) * source.choice([50, 400, 5_000]) + source.choice(["", "!", "$", "x", "1"])


def nothing(source: random.Random) -> str:
    """Empty, or as good as empty."""
    return source.choice(EMPTY)


KINDS: dict[Callable[[random.Random], str], int] = {
    powers: 12, nested: 15, chains: 15, costly: 12, noise: 30, backtracking: 10, nothing: 6,
}  # fmt: skip


def hostile(start: int, stop: int) -> list[tuple[str, str]]:
    """Pairs of a text and the reference that it is held against; every 500th text is a line of a megabyte."""
    pairs = []
    for number in range(start, stop):
        source = random.Random(number)
        if number % 500 == 250:
            piece = source.choice(LONG)
            inside = piece * (1_000_000 // len(piece))
        else:
            inside = source.choices([*KINDS], [*KINDS.values()])[0](source)
        pairs.append((source.choice(FRAMES) % (inside,), source.choice(REFERENCES)))
    return pairs


def scores(pairs: list[tuple[str, str]], seconds: float = SECONDS) -> tuple[list[float], ProcessPool]:
    """What the texts earn, and the workers that judged them."""
    examples = [Example(f"hostile/{place}", "?", meta={"answer": right}) for place, (_, right) in enumerate(pairs)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = math_equal([text for text, _ in pairs], examples, seconds=seconds)
    return values, shared("lmgym.rewards.maths.math_equal:read_or_compare", None, 2.0)


def main(start: int, stop: int) -> None:
    """Score them and report."""
    began = time.perf_counter()
    pairs = hostile(start, stop)
    values, workers = scores(pairs)
    print(f"texts {start} to {stop} in {time.perf_counter() - began:.0f} s: {Counter(values)}, {workers.failures}")
    right = Counter((text[:80], answer) for (text, answer), value in zip(pairs, values, strict=True) if value)
    for (text, answer), times in sorted(right.items()):
        print(f"  scored 1, {times} times: {text!r} against {answer!r}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
