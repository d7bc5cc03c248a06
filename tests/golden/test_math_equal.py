"""What `math_equal` must say: pairs worked by hand, a golden case, and the MATH data set.

"Case" numbers those of a study of the systems whose behaviour is matched.
"""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.processes.pool import shared
from lmgym.rewards.base import call_reward, check_examples
from lmgym.rewards.building import build_rewards
from lmgym.rewards.check import check_reward
from lmgym.rewards.maths import math_equal as module
from lmgym.rewards.maths.math_equal import math_equal
from lmgym.text.latex import last_answer, last_boxed, spelling, tidied
from lmgym.types import Episode, Example, Turn

pytestmark = pytest.mark.processes

needs_library = pytest.mark.usefixtures("library")


@pytest.fixture
def library() -> None:
    pytest.importorskip("math_verify")


def asked(*references: str, **meta: Any) -> Example:
    return Example("a/0", "?", references=references, meta=meta)


# Case 23, computed by running LLM_RL: nested braces are kept, \fbox is a box, and a last box that is never closed, or
# has no braces, is no answer.
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $\boxed{\frac{1}{\sqrt{2}}}$.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{3}, no, \boxed{4}", "4"),
        (r"\boxed{4}, no, \boxed{5", None),
        (r"\fbox{7}", "7"),
        (r"\boxed 5", None),
        (r"\boxed{4} or \boxed 5", None),
        ("no box", None),
        (r"\boxed{}", ""),
        (r"\boxed {8}", "8"),
        (r"{{ \boxed{9}", "9"),
        (r"\boxedx{9}", None),
    ],
)
def test_the_last_box(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("latex", "same"),
    [
        (r"$\dfrac12$.", r"\frac{1}{2}"),
        (r"\tfrac \pi 4", r"\frac{\pi}{4}"),
        (r"\frac{\frac12}{3}", r"\frac{\frac{1}{2}}{3}"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"12,\!345{,}678", "12345678"),
        (r"(1,\!2)", "(1,2)"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"1 2/3", "1 2/3"),  # a mixed number is not 12/3
        (r"\approx 8.2", "8.2"),
        (r"\leftarrow", r"\leftarrow"),
        (r"\[x\]", "x"),
        ("$", "$"),
        (".25", ".25"),  # a point at the beginning is part of the number
        (r"x^3\,", "x^3"),
        (r"x^3\;.", "x^3"),
        ("7\\", "7"),
        (r"\begin{pmatrix} 1 \\ 2 \\", r"\begin{pmatrix}1\\2\\"),
        (r"$ 72 $", "72"),
        ("3 $ and $4", "3 and 4"),
        (r"21,\! 345", "21345"),
        (r"21\,345\,678.5", "21345678.5"),
        (r"21~345", "21345"),
        ("21 345", "21345"),
        ("21 345/678", "21 345/678"),  # a mixed number
        ("2134 567", "2134 567"),
        (r"9 \text { apples}", r"9\text{apples}"),
        (r"\sqrt7", r"\sqrt{7}"),
        (r"\sqrt [3] x", r"\sqrt[3]{x}"),
        ("x**12 + sqrt(2x)", "x^{12}+\\sqrt{2x}"),
        ("x^(1/3)", "x^{1/3}"),
        ("3\u03c0 \u2212 \u221a5", "3\\pi-\\sqrt{5}"),
        (r"\angle ABC = 25^\circ", r"25^\circ"),
    ],
)
def test_one_spelling(latex: str, same: str) -> None:
    assert spelling(tidied(latex)) == same
    assert tidied(tidied(latex)) == tidied(latex)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{2} and \boxed{7}", "2, 7"),
        (r"$x = \boxed{2}$ or $x = \boxed{7}$.", "2, 7"),
        (r"\[\boxed{2}, \quad \boxed{7}, \text{ and } \boxed{9}\]", "2, 7, 9"),
        (r"\boxed{2} red ones and \boxed{7} green ones", "2, 7"),
        (r"\boxed{7}, and again \boxed{7}", "7"),
        (r"\boxed{7} and \boxed{7}", "7"),
        (r"\boxed{2}, no, \boxed{7}", "7"),
        (r"\boxed{2} and then \boxed{7}", "7"),
        (r"First \boxed{2}. It follows that there are \boxed{7}.", "7"),
        (r"\boxed{2} and not \boxed{7}", "7"),
        (r"\boxed{2} and \boxed{7", None),
        (r"\boxed{\boxed{2} and \boxed{7}}", "2, 7"),
    ],
)
def test_linked_boxes_are_one_answer(text: str, answer: str | None) -> None:
    assert last_answer(text) == answer


# Worked by hand.
EQUAL = [
    ("0.5", r"\frac12"),
    (r"\frac{3}{6}", r"\frac{1}{2}"),
    ("1 + x", "x+1"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}"),
    (r"(\frac32, -1)", r"\left( 1.5,-1 \right)"),
    (r"\{2, 1\}", r"\{1,2\}"),
    (r"(-\infty, 2) \cup (2, \infty)", r"(-\infty,2)\cup(2,\infty)"),
    (r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 0.5 \\ 3 \end{pmatrix}"),
    ("18 dollars", "18"),
    (r"\$18.00", "18"),
    (r"30^\circ", "30"),
    (r"50\%", "50"),
    (r"50\%", "0.5"),
    ("x=3", "3"),
    (r"\text{Friday}", "Friday"),
    (r"10\;\text{edges}", "10"),
    ("1,234", "1234"),
    (r"\frac{2469}{20,\!000}", "0.12345"),
    ("a + b + c", "c+a+b"),  # a letter may look like a unit
    (r"\sin^2 t", r"\sin^2(t)"),
    (".25", r"\frac14"),
    (".7, 3.0", "0.7, 3"),
    ("2^3", "8"),
    (r"5\,", "5"),
    (r"21,\! 345", "21345"),
    (r"21\,345", "21345"),
    ("21 345", "21345"),
    ("B,D", r"\text{B,D}"),
    ("D, B", r"\text{B, D}"),
    (r"25^\circ, 65^\circ", "25, 65"),
    (r"65^\circ \text{ and } 25^\circ", r"25^\circ, 65^\circ"),
    ("4, 9, and 16", r"4, 9 \text{ and } 16"),
    (r"6 \text { units}", "6"),
    (r"6\text{ cm}^2", "6"),
    (r"\frac{3}{4}\%", "0.0075"),
    ("12 percent", r"12\%"),
    ("3 2/5", r"\frac{17}{5}"),
    ("5*y**2 - 1", "5y^2-1"),
    ("sqrt(12)", r"2\sqrt3"),
    ("2\u03c0", r"2\pi"),
    ("(2, 5)", "2, 5"),
    ("y=5, x=2", "(2, 5)"),
    (r"\frac{1}{1+i}", r"\frac{1-i}{2}"),
    ("7 = x", "7"),
    ("B. a square", "B"),
    (r"1.25 \times 10^{-2}", r"\frac{1}{80}"),
    (r"-1 \le x \le 4", r"x \in [-1,4]"),
    (r"x \in [-1,4]", r"-1 \le x \le 4"),
    ("odd", r"\text{odd}"),
    ("1e3", "10^3"),
    ("5e-7", r"5\times10^{-7}"),
    (r"6.02\times10^{23}", "6.02e23"),
    ("2.5 million", r"2.5\times 10^6"),
    ("18 thousand", r"1.8\times 10^4"),
    ("1e3, 7", "7, 10^3"),
    (r"0.\overline{3}", r"\frac13"),
    (r"-0.1\overline{6}", r"-\frac{1}{6}"),
    (r"\log_2 8", "3"),
    (r"5\text{ ft }10\text{ in}", r"5\,\text{ft}\,10\,\text{in}"),
    ("5 ft 10 in", r"5\text{ft }10\text{in}"),
    (r"3\text{ red, }4\text{ blue}", "3 red, 4 blue"),
    ("4210_7", "4210_{7}"),
    ("4210_7", "4210"),
    ("3,5,3", "3,3,5"),
    (r"\{3,3,5\}", r"\{3,5\}"),
    (r"\pm 2, 3", "2, -2, 3"),
    (r"\pm 1, \pm 2", "1, -1, 2, -2"),
]
DIFFERENT = [
    ("0.33", r"\frac13"),
    ("x+2", "x+1"),
    (r"\sqrt{2}", "1.414"),
    ("(1,2)", "(2,1)"),
    (r"\{1,2,3\}", r"\{1,2\}"),
    ("[1,2]", "(1,2)"),
    (r"\text{Monday}", r"\text{Friday}"),
    ("18", "81"),
    ("-18", "18"),
    ("y=3", "x=4"),
    ("1 2/3", "12/3"),
    ("1  2/3", "12/3"),
    ("", "0"),
    ("nan", "0"),
    (r"\frac{1}{0}", "0"),
    ("5", ".5"),
    ("4", ".4"),
    (".5", "5"),
    ("2^3", "2"),
    ("4!", "4"),
    ("1 7/5", "2.4"),  # no mixed number
    ("2 3", "6"),
    ("2 3", "23"),
    ("3 or 4", "4"),
    ("3, 4", "4"),
    ("5, 2", "(2, 5)"),
    ("x=5, y=2", "(2, 5)"),
    ("(1, 3)", r"\{1, 3\}"),
    ("0.0000001", "0.0000002"),
    ("0.0000001", "0"),
    (r"3^{-99}", r"3^{-98}"),
    (r"x = 3^{-99}", r"3^{-98}"),
    (r"\{3^{-99}, 1\}", r"\{3^{-98}, 1\}"),
    (r"7\% \sqrt{2}", "0.1"),
    ("listen", "silent"),
    ("B. a square or C. a circle", "B"),
    ("1000000001", "1000000002"),
    ("3.1416", r"\pi"),
    ("1e3", "10^4"),
    (r"6.02\times10^{23}", "6.03e23"),
    (r"0.\overline{3}", "0.3"),
    (r"0.\overline{3}", r"0.\overline{6}"),
    (r"\log_2 8", "4"),
    (r"5\text{ ft }10\text{ in}", r"5\text{ ft }11\text{ in}"),
    (r"5\text{ ft }10\text{ in}", "5"),
    (r"3\text{ red, }4\text{ blue}", r"4\text{ red, }3\text{ blue}"),
    (r"3\text{ hours }20\text{ minutes}", "3"),
    ("4210_7", "4210_5"),
    ("11_2", "11_{3}"),
    ("3,3,5", "3,5,5"),
    ("3,3,5", "3,5"),
    ("3,5", "3,3,5"),
    ("9" * 2_000, "9"),
    ("(" * 500 + "1" + ")" * 500, "1"),
]


@needs_library
def test_equal_and_different_answers() -> None:
    pairs = [(*pair, 1.0) for pair in EQUAL] + [(*pair, 0.0) for pair in DIFFERENT]
    texts = [rf"so $\boxed{{{answer}}}$." for answer, _, _ in pairs]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing fails or takes too long
        found = math_equal(texts, [asked(answer=right) for _, right, _ in pairs])
    assert [(a, r, f) for (a, r, _), f in zip(pairs, found, strict=True)] == pairs
    boxed = [asked(rf"Thus it is $\boxed{{{right}}}$.") for _, right, _ in pairs]
    assert math_equal(texts[::-1], boxed[::-1]) == found[::-1]  # a box in the reference does as well, in any order


@needs_library
@pytest.mark.parametrize(
    ("text", "strict", "value"),
    [
        (r"\boxed{\frac12}, that is half", True, 1.0),
        (r"\boxed{3}. Wait, \boxed{0.5}", True, 1.0),
        (r"\boxed{0.5}. Wait, \boxed{3}", True, 0.0),
        (r"\boxed{0.5}. Wait, \boxed{0.5", True, 0.0),
        (r"The answer is $\frac{1}{2}$ of it.", True, 1.0),
        (r"The answer is \(x = 0.5\).", True, 1.0),
        (r"#### \frac{1}{2}", True, 1.0),
        ("#### 1/2", True, 1.0),
        ("The answer is 0.5 litres.", True, 1.0),
        ("Answer: 3. No: the answer is 1/2<|eot_id|>", True, 1.0),
        (r"The answer is $18 and not $\frac12$.", True, 1.0),  # a sign of currency opens no formula
        (r"Final Answer: The smallest $k$ is 0.5.", True, 1.0),
        (r"The answer is that the slope of $f$ equals $\frac{1}{2}$. It is less than $1$.", True, 1.0),
        (r"Answer: $ \frac{1}{2} $", True, 1.0),
        (r"The answer is $$ \frac12 $$", True, 1.0),
        ("Answer: 3, 4 or 0.5", True, 0.0),
        (r"The answer is $3$ or $\frac12$.", True, 0.0),
        (r"\boxed{3} or \boxed{\frac12}", True, 1.0),  # the last box alone counts as well
        (r"It is $\frac12$", True, 0.0),
        (r"So we get $ \frac12 $ of it", False, 1.0),
        (r"With $n=3$ there are $6$ cases. Three of them fit. The probability is 0.5.", False, 1.0),
        ("It is 3 or 0.5", False, 0.0),
        ("It costs $ 5 and $ 0.5", False, 1.0),
        ("50 percent", False, 1.0),
        ("It grew by 50%.", False, 1.0),
        ("a7b0x", False, 0.0),
        (r"It is $\frac12$", False, 1.0),
        ("Half of 3 is 1.5, and a third of that is 0.5", False, 1.0),
        ("1/2", False, 1.0),
        ("The answer is 0.5\u03c0.", True, 0.0),
        ("The answer is 0.5 + sqrt(3).", True, 0.0),
        ("The answer is 1 / 2.", True, 1.0),
        ("The answer is 5 \u00d7 10^-1.", True, 1.0),
        (r"\frac{1}{2}", False, 1.0),
        (r"\frac{1}{0.5^{0.5}}", False, 0.0),  # a bare formula is the answer, not the last number in it
        ("", False, 0.0),
        ("I do not know", False, 0.0),
    ],
)
def test_what_counts_as_the_answer(text: str, strict: bool, value: float) -> None:
    assert math_equal([text], [asked(answer=r"\frac{1}{2}")], strict=strict) == [value]


@needs_library
def test_what_counts_as_the_reference() -> None:
    for example in (
        asked("9 + 9 = 18\n#### 18"),
        asked(r"So it is $\boxed{18}$."),
        asked("17", "18"),
        asked("$18$"),
        asked("The answer is 3.", answer="18"),  # the column wins
        asked(answer=18),
        asked(answer=18.0),
    ):
        assert math_equal([r"\boxed{18}", r"\boxed{19}"], [example] * 2) == [1.0, 0.0]
    assert math_equal([r"\boxed{\text{New York}}"], [asked("New York")]) == [1.0]


@needs_library
@pytest.mark.parametrize(
    "solution",
    [
        "The answer is 18",
        "9 + 9 = <<9+9=18>>18\n#### 18",
        r"Since $x=9$, it is $\boxed{18}$.",
        "He has 18.",
        "It is 9 + 9 = 18.",
    ],
)
def test_the_column_of_answers_may_be_the_reference_too(solution: str) -> None:
    """`references: answer` in a recipe: the worked solutions are read as under any other name."""
    for example in (asked(solution), asked(solution, answer=solution)):
        assert math_equal([r"\boxed{18}", r"\boxed{9}"], [example] * 2) == [1.0, 0.0]
    check_examples(build_rewards({"math_equal": 1.0}), [asked(solution, answer=solution)])
    for whole in ("June 20", "No solution for n > 3", "x >= 5 or x <= 2"):  # no sentences, so compared as a whole
        one = asked(whole, answer=whole)
        assert math_equal([rf"\boxed{{\text{{{whole}}}}}", r"\boxed{20}"], [one] * 2) == [1.0, 0.0]
    bare = asked(r"50%", answer="50%")
    assert math_equal([r"\boxed{0.5}", r"\boxed{5}"], [bare] * 2) == [1.0, 0.0]


@needs_library
@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        ("x = 5 or x = -5", "5, -5", "-5"),
        ("2 and 3", "3, 2", "3"),
        ("1, 2, and 3", "1, 2, 3", "3"),
        ("y=2, x=1", "(1, 2)", "(2, 1)"),
        ("3 pi", r"3\pi", "3"),
        ("3 or 4", "3 or 4", "4"),
    ],
)
def test_a_bare_reference_of_several_parts_is_read_whole(reference: str, right: str, wrong: str) -> None:
    for example in (asked(reference), asked(reference, answer=reference), asked(answer=reference)):
        texts = [rf"\boxed{{{right}}}", rf"\boxed{{{wrong}}}"]
        assert math_equal(texts, [example] * 2) == [1.0, 0.0]


@needs_library
@pytest.mark.parametrize(
    "reference",
    ["$3$ and $8$", "$3$, $8$", r"\boxed{3} and \boxed{8}", r"#### $3$ and $8$", r"$3, 8$", "Answer: 3 and 8"],
)
def test_a_reference_in_two_parts(reference: str) -> None:
    texts = [
        r"\boxed{8} and \boxed{3}",
        r"\boxed{3, 8}",
        "The answer is $8$ and $3$.",
        r"\boxed{8}",
        r"\boxed{3, 8, 9}",
    ]
    assert math_equal(texts, [asked(reference)] * 5) == [1.0, 1.0, 1.0, 0.0, 0.0]


@needs_library
def test_a_text_that_repeats_the_reference_is_right() -> None:
    right = r"all even $n$, where $n > 2$"
    assert math_equal([right, r"all odd $n$, where $n > 2$"], [asked(answer=right)] * 2, unreadable="compare") == [
        1.0,
        0.0,
    ]


@needs_library
@pytest.mark.parametrize(
    "right", [r"\frac{1}{", r"\begin{pmatrix} 1", r"\sqrt[", "as we normally do, as that would be odd"]
)
def test_a_reference_that_cannot_be_read_is_refused_by_name(right: str) -> None:
    examples = [
        Example("math/train/0", "?", meta={"answer": "3"}),
        Example("math/train/7", "?", meta={"answer": right}),
    ]
    sentence = "math-verify cannot read the reference answer .* of example 'math/train/7'; mend it"
    with pytest.raises(LmgymError, match=sentence):
        math_equal([r"\boxed{3}", ""], examples)
    with pytest.raises(LmgymError, match=sentence):
        check_examples(build_rewards({"math_equal": {"strict": True}}), examples)
    check_examples(build_rewards({"math_equal": {"unreadable": "compare"}}), examples)
    assert math_equal([r"\boxed{3}", rf"\boxed{{3}} #### {right}"], examples, unreadable="compare") == [1.0, 0.0]
    assert math_equal(["", f"#### {right}"], examples, unreadable="compare") == [0.0, 1.0]


@needs_library
def test_a_missing_reference_is_refused_by_name() -> None:
    for example in (asked(), asked(""), asked(answer=" "), asked(r"It is \boxed{4", "5")):
        with pytest.raises(
            LmgymError, match=r"'math_equal' needs a reference, and that of example 'a/0' is (missing|empty)"
        ):
            math_equal(["4"], [example])


def test_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LmgymError, match=r"needs the library math-verify: pip install 'lmgym\[maths\]'"):
        math_equal([r"\boxed{x+1}"], [asked(answer="2x")])
    assert math_equal([r"\boxed{3}"], [asked(answer="3")]) == [1.0]  # what needs no algebra needs no library


@pytest.mark.slow
@needs_library
def test_what_takes_too_long_counts_as_wrong_with_a_warning() -> None:
    examples = [asked(answer=r"\sqrt{2}")] * 3
    texts = [r"\boxed{\sqrt{2}}", r"\boxed{10000000!}", r"\boxed{2^{1/2}}"]
    episodes = [Episode(e, 0, n, [Turn([], [], text=t)]) for n, (e, t) in enumerate(zip(examples, texts, strict=True))]
    reward = build_rewards({"math_equal": {"seconds": 0.3, "workers": 1}})[0]
    with pytest.warns(UserWarning, match=r"of 2 comparisons 1 took longer than 0.3 s; they count as wrong"):
        assert call_reward(reward, episodes, timeout=0.05) == [
            1.0,
            0.0,
            1.0,
        ]  # the guard leaves the limit to the workers
    shared("lmgym.rewards.maths.math_equal:read_or_compare", 1, module.MEMORY).close()


@pytest.mark.slow
@needs_library
def test_the_contract_with_mathematics() -> None:
    texts = [rf"\boxed{{{answer}}}" for answer, _ in [*EQUAL[:6], *DIFFERENT[:6]]]
    examples = [asked(right) for _, right in [*EQUAL[:6], *DIFFERENT[:6]]]
    check_reward("math_equal", texts, examples, workers=1)
    shared("lmgym.rewards.maths.math_equal:read_or_compare", 1, module.MEMORY).close()


def real(shared_folder: Path) -> tuple[list[str], list[Example]]:
    """MATH's test: solutions of one file, and the answers that another file has for the same problems."""
    folder = shared_folder / "data" / "math"
    rows, answers = (
        [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        for name in ("test.jsonl", "test_answers_only.jsonl")
    )
    by_problem = {row["problem"]: row["answer"] for row in answers}
    examples = [
        Example(f"math/test/{index}", row["problem"], meta={"answer": by_problem[row["problem"]]})
        for index, row in enumerate(rows)
    ]
    return [row["solution"] for row in rows], examples


@needs_library
@pytest.mark.slow
def test_real_math_solutions_are_right(shared: Path) -> None:
    """4,999 of 5,000; the answer of the last one is damaged in the file: half a sentence in place of 12."""
    texts, examples = real(shared)
    found = math_equal(texts, examples, unreadable="compare")
    assert [example.id for example, value in zip(examples, found, strict=True) if not value] == ["math/test/4060"]
    with pytest.raises(LmgymError, match=r"cannot read .* of example 'math/test/4060'"):
        math_equal(texts[4060:4061], examples[4060:4061])


@needs_library
@pytest.mark.slow
def test_real_math_solutions_are_right_by_algebra_alone(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third one, none settled by comparing texts."""
    texts, examples = (some[::3] for some in real(shared))
    monkeypatch.setattr(module, "easily_equal", lambda answer, right: None)
    assert math_equal(texts, examples) == [1.0] * len(texts)


@needs_library
@pytest.mark.slow
def test_shuffled_math_solutions_are_wrong_but_for_coincidences(shared: Path) -> None:
    """Of all 5,000, shuffled by this seed, 51 are right: 48 in the same letters, and 4 for b=4, 10 edges for 10, 40 for
    40 degrees. Here the first 1,000 of them."""
    texts, examples = real(shared)
    order = list(range(5_000))
    random.Random(0).shuffle(order)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing takes too long
        found = math_equal([texts[place] for place in order[:1_000]], examples[:1_000])
    right = [
        (examples[place].meta["answer"], example.meta["answer"])
        for place, example, value in zip(order, examples, found, strict=False)
        if value
    ]
    coincidences = {("4", "b=4"), (r"10\;\text{edges}", "10"), ("40", r"40^\circ")}
    assert 5 < len(right) < 20
    assert all(one == other or (one, other) in coincidences for one, other in right)


def test_a_reference_longer_than_any_answer_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its length alone: 1,000 characters may be read, 1,001 are not, whatever `unreadable` says."""
    read: list[str] = []
    monkeypatch.setattr(module, "tidied", lambda text: read.append(text) or tidied(text))
    monkeypatch.setattr(module, "normalise_number", lambda text: read.append(text))
    for example, length in (
        (asked(answer="1+" * 50_000), "100,000"),
        (asked("so $\\boxed{" + "1" * 1001 + "}$"), "1,001"),
    ):
        for unreadable in ("refuse", "compare"):
            with pytest.raises(LmgymError, match=rf"'a/0' has {length} characters, and answers of more than 1,000 are"):
                check_examples(build_rewards({"math_equal": {"unreadable": unreadable}}), [example])
    assert not read
    check_examples(build_rewards({"math_equal": {"unreadable": "compare"}}), [asked(answer="1" * 1000)])
    assert read == ["1" * 1000]
