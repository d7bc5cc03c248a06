"""Solving line by line: what the calculator must answer, how an episode goes and ends, and GSM8K's own solutions.

"Case" numbers those of a study of the systems whose behaviour is matched. Lines and results are worked by hand.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.envs.stepwise import MAX_PIECES, StepwiseEnv
from lmgym.envs.tools.calculator import calculate, format_number
from lmgym.rewards.maths.final_answer import final_answer
from lmgym.tasks.base import load_task
from lmgym.types import Example

SOLUTION = "He buys 48/2=<<48/2=24>>24 clips.\nThat is 24+6 = <<24+6=30>>30 in all.\n#### 30"
CLIPS = Example("clips/0", "How many clips?", references=(SOLUTION,), meta={"answer": "30"})


def started(example: Example = CLIPS, **arguments: Any) -> StepwiseEnv:
    env = StepwiseEnv(**arguments)
    env.reset(example, seed=0)
    return env


def message(env: StepwiseEnv, texts: Sequence[str]) -> tuple[str, list[Step]]:
    """What stands in the model's message behind its pieces, each ended by a stop string, and the answers to them."""
    steps = [env.step(text, "stop") for text in texts]
    return "".join(text + (step.continuation or "") for text, step in zip(texts, steps, strict=True)), steps


def demonstrated(env: StepwiseEnv, example: Example) -> tuple[list[str], str, list[Step]]:
    """The reference played to the end: its pieces, the message, the steps."""
    env.reset(example, seed=0)
    pieces, text, steps = [], "", []
    while not (steps and steps[-1].over):
        piece = env.demonstrate()
        steps.append(env.step(piece, "stop" if piece.endswith(env.stop) else "eos"))
        pieces.append(piece)
        text += piece + (steps[-1].continuation or "")
    return pieces, text, steps


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48/2", 24),
        ("16-3-4", 9),
        ("100-50-30-15", 5),
        (".5*(3+4)", Fraction(7, 2)),
        ("80/100*10", 8),
        ("1/3+1/6", Fraction(1, 2)),
        ("0.1+0.2", Fraction(3, 10)),  # not 0.30000000000000004
        ("2+3*4^2", 50),
        ("2^3^2", 512),  # powers from the right
        ("-2^2", -4),
        ("2**-2", Fraction(1, 4)),
        ("0**0", 1),
        ("--3", 3),
        ("2*-3", -6),
        ("8/4/2", 1),
        ("560//10", 56),
        ("-7//2", -4),
        ("20%", Fraction(1, 5)),
        ("20%*50", 10),
        ("1,000*2", 2000),
        ("$5*3", 15),
        ("$1,234.50", Fraction(2469, 2)),
        ("12 x 2", 24),
        ("3\u00d74\u00f72\u22121", 5),
        (" 3 ", 3),
        ("5.", 5),
        ("(10.5)", Fraction(21, 2)),
    ],
)
def test_values(expression: str, value: int | Fraction) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("", " ", "()", "(1", "1)", "1+", "*2", "5 5", "2(3)", "1.5.2", "12,34", "1,0000", "20%5", "1/0", "0**-1"),
        *("1//0", "2^0.5", "9**9**9", "1e5", "0x1F", "nan", "inf", "3 apples", "2==2", "\u0663+1", "\uff13", "x", "2x"),
        *("__import__('os')", "1\n2", "-" * 21 + "1", "(" * 20 + "1" + ")" * 20, "9" * 78, "0" * 201, "$", "1;1"),
    ],
)
def test_what_is_not_computed(expression: str) -> None:
    assert calculate(expression) is None


@pytest.mark.parametrize(
    ("value", "text", "as_llm_rl"),
    [
        (24, "24", "24"),
        (Fraction(24), "24", "24.0"),
        (Fraction(5, 3), "1.67", "1.67"),
        (Fraction(-5, 3), "-1.67", "-1.67"),
        (Fraction(21, 2), "10.5", "10.5"),
        (Fraction(1, 20), "0.05", "0.05"),
        (Fraction(-1, 1000), "0", "-0.0"),
        (Fraction(1, 8), "0.12", "0.12"),  # the middle: to the even one
        (Fraction(3, 8), "0.38", "0.38"),
        (Fraction(100), "100", "100.0"),
        (Fraction(1999, 1000), "2", "2.0"),
        (10**20, "100000000000000000000", "100000000000000000000"),
    ],
)
def test_how_numbers_are_written(value: int | Fraction, text: str, as_llm_rl: str) -> None:
    assert format_number(value) == text
    assert format_number(value, style="llm_rl") == as_llm_rl


def test_decimals() -> None:
    assert [format_number(Fraction(5, 3), decimals) for decimals in (0, 1, 4)] == ["2", "1.7", "1.6667"]


# Case 22, computed by running LLM_RL: "2/2=<<2/2=1>>1 bolt" becomes "2/2=<<2/2=1.0>>1.0" there, and
# "<<16-3-4=8>>8" "<<16-3-4=9>>9"; what the model wrote from the equals sign on is gone.
def test_case_22_as_it_should_be() -> None:
    text, steps = message(started(calculator=True), ["2/2=", "<<2/2=", "1 bolt\n"])
    assert text == "2/2=<<2/2=1>>1 bolt\n"
    assert [step.continuation for step in steps] == ["", "1>>", ""]
    assert [step.unfinished for step in steps] == [True, True, False]
    assert message(started(calculator=True), ["<<16-3-4=", "9\n"])[0] == "<<16-3-4=9>>9\n"


def test_case_22_as_llm_rl_has_it() -> None:
    env = started(calculator=True, style="llm_rl")
    assert message(env, ["2/2=", "<<2/2="])[0] == "2/2=<<2/2=1.0>>1.0"
    assert message(started(calculator=True, style="llm_rl"), ["<<16-3-4="])[0] == "<<16-3-4=9>>9"


def test_equals_signs_that_the_calculator_leaves_alone() -> None:
    env = started(calculator=True)
    pieces = [
        "x =",
        " <<x+1=",
        "4>>4 =",
        "= <<3 + 4 =",
        "<<7=8=",
        "<<",
        "1+1=",
        "<<1/0=",
        "<<2*2= ",
        "<<2*2=5",
        "=<<12",
    ]
    assert message(env, pieces)[0] == "x = <<x+1=4>>4 == <<3 + 4 =7>><<7=8=<<1+1=2>><<1/0=<<2*2= 4>><<2*2=5=<<12"


def test_a_line_is_given_so_many_results_and_the_next_one_too() -> None:
    text, steps = message(started(calculator=True), [*["<<1+1="] * 5, "\n", "<<1+1="])
    assert text == "<<1+1=2>>" * 4 + "<<1+1=" + "\n" + "<<1+1=2>>"
    assert steps[-1].info == {"lines": 1, "calculations": 5}
    assert message(started(calculator=True, max_calculations=1), ["<<1+1="] * 2)[0] == "<<1+1=2>><<1+1="


def test_without_a_calculator_nothing_is_computed() -> None:
    env = started()
    assert env.stop == ("\n",)
    text, steps = message(env, ["2/2=<<2/2=3>>3 bolts\n"])
    assert text == "2/2=<<2/2=3>>3 bolts\n"
    assert steps == [Step(continuation="", info={"lines": 1, "calculations": 0})]


def test_a_line_without_end_ends() -> None:
    env = started(calculator=True, max_steps=3)
    _, steps = message(env, ["="] * (MAX_PIECES + 3))
    assert [step.unfinished for step in steps] == [True] * MAX_PIECES + [False] * 3
    assert [step.over for step in steps] == [False] * (MAX_PIECES + 2) + [True]
    assert steps[-1].truncated


@pytest.mark.parametrize(
    "line",
    [
        "#### 18\n",
        "So #### $18",
        "The answer is: 18\n",
        "THE ANSWER IS: 18\n",
        "**The answer is:** 18\n",
        "So $x = \\boxed{18}$.\n",
        "####18\n\n",
    ],
)
def test_the_line_with_the_answer_ends_the_episode(line: str) -> None:
    step = started().step(line, "stop")
    assert (step.terminated, step.truncated, step.continuation) == (True, False, None)


@pytest.mark.parametrize(
    "line",
    [
        "18\n",
        "\n",
        "####\n",
        "#### $\n",
        "The answer is:\n",
        "\\boxed{\n",
        "\\boxed{18\n",
        "The answer is not yet known.\n",
    ],
)
def test_other_lines_do_not(line: str) -> None:
    step = started().step(line, "stop")
    assert (step.over, step.continuation, step.unfinished) == (False, "", False)


def test_markers_of_ones_own() -> None:
    assert started(markers=["Result ="]).step("result = 18\n", "stop").terminated
    assert not started(markers=["Result ="]).step("#### 18\n", "stop").over
    assert not started(markers=[]).step("#### 18\n", "stop").over


@pytest.mark.parametrize(
    ("text", "stop", "terminated", "truncated"),
    [
        ("I do not know.", "eos", True, False),
        ("", "eos", True, False),
        ("x =\n", "stop", False, False),  # one token
        ("x\n =", "stop", False, False),
        ("3 apples<end>", "stop", True, False),  # a stop string or id of the recipe's own
        ("#### 1", "length", False, False),  # perhaps 18
        ("#### 1", "context", False, True),
        ("3 apples\n", "context", False, True),
    ],
)
def test_how_a_piece_ends(text: str, stop: str, terminated: bool, truncated: bool) -> None:
    for calculator in (False, True):
        step = started(calculator=calculator).step(text, stop)
        assert (step.terminated, step.truncated) == (terminated, truncated)
        assert step.continuation == (None if step.over else "")
        assert not step.unfinished


def test_a_line_that_was_cut_off_goes_on() -> None:
    env = started(calculator=True)
    first, second = env.step("so <<4", "length"), env.step("8/2=", "stop")
    assert (first.continuation, first.unfinished, first.info["lines"]) == ("", False, 1)
    assert (second.continuation, second.unfinished) == ("24>>", True)
    env = started()
    assert not env.step("#### 1", "length").over
    assert env.step("8\n", "stop").terminated


def test_what_stands_behind_the_newline_begins_the_next_line() -> None:
    env = started(calculator=True)  # one token may be a newline and more
    assert message(env, ["one.\n\n<<", "1+1=", "2\n####", " 2"])[0] == "one.\n\n<<1+1=2>>2\n#### 2"
    env = started()
    assert [env.step(text, "stop").terminated for text in ("one\n####", " 2\n")] == [False, True]


def test_the_episode_is_cut_off_after_so_many_lines() -> None:
    env = started(max_steps=3)
    steps = [env.step(line, "stop") for line in ("one\n", "\n", "three\n")]  # an empty line is a line
    assert [(step.terminated, step.truncated) for step in steps] == [(False, False), (False, False), (False, True)]
    assert [step.info["lines"] for step in steps] == [1, 2, 3]
    env = started(max_steps=1)
    step = env.step("#### 18\n", "stop")
    assert (step.terminated, step.truncated) == (True, False)


def test_what_lines_earn() -> None:
    env = started(line_reward=-0.25)
    lines = [("one\n", "stop"), (" \n", "stop"), ("tw", "length"), ("o\n", "stop"), ("#### 3", "eos")]
    assert [env.step(*line).reward for line in lines] == [-0.25, 0.0, 0.0, -0.25, -0.25]
    assert [step.reward for step in message(started(calculator=True, line_reward=1.0), ["a=", "b\n"])[1]] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("48/2=<<48/2=24>>24\n", True),
        ("<<10/3=3.33>> and <<1+1=2.00>>\n", True),
        ("<<10/3=3.3>>\n", False),
        ("<<1+1=2>> and <<1+1=3>>\n", False),
        ("<<1+1=2>> and <<1+1\n", False),
        ("<<1+1=2 apples>>\n", False),
        ("1+1=2\n", False),
        ("<<1+1=2>>" * 20 + "\n", True),
        ("<<1+1=2>>" * 21 + "\n", False),
    ],
)
def test_a_reward_for_right_calculations(line: str, right: bool) -> None:
    assert started(calculation_reward=0.5, line_reward=0.25).step(line, "stop").reward == (0.75 if right else 0.25)


def test_demonstration_by_hand() -> None:
    pieces, text, _ = demonstrated(StepwiseEnv(calculator=True), CLIPS)
    first, second = ["He buys 48/2=", "<<48/2=", "24 clips.\n"], ["That is 24+6 =", " <<24+6=", "30 in all.\n"]
    assert pieces == [*first, *second, "#### 30"]
    assert text == SOLUTION
    pieces, text, _ = demonstrated(StepwiseEnv(calculator=True, style="llm_rl"), CLIPS)
    assert pieces == [*first[:2], " clips.\n", *second[:2], " in all.\n", "#### 30"]
    assert text == SOLUTION.replace("24>>24", "24.0>>24.0")
    pieces, text, _ = demonstrated(StepwiseEnv(), CLIPS)
    assert pieces == SOLUTION.splitlines(keepends=True)
    assert text == SOLUTION


def test_where_the_calculator_cannot_help_the_reference_goes_on_itself() -> None:
    example = Example("b/0", "?", references=("<<3 apples=3>>3, <<1/3=.333>>.333 =\n<<1+1=\n>>\n#### 3\n",))
    pieces, text, _ = demonstrated(StepwiseEnv(calculator=True), example)
    assert pieces == ["<<3 apples=", "3>>3, <<1/3=", ".333 =", "\n", "<<1+1=", "\n", ">>\n", "#### 3"]
    assert text == "<<3 apples=3>>3, <<1/3=0.33>>.333 =\n<<1+1=2>>\n>>\n#### 3"


def test_one_of_several_references_by_the_seed() -> None:
    example = replace(CLIPS, references=("#### 30", "30 clips.\n#### 30"))
    env = StepwiseEnv()
    for seed, piece in ((0, "#### 30"), (1, "30 clips.\n"), (2, "#### 30")):
        env.reset(example, seed)
        assert env.demonstrate() == piece


def test_a_demonstration_needs_the_reference_and_its_beginning() -> None:
    with pytest.raises(LmgymError, match=r"example c/0 cannot be demonstrated: it has no reference"):
        started(Example("c/0", "?")).demonstrate()
    env = started()
    env.step("Something else.\n", "stop")
    with pytest.raises(LmgymError, match=r"the lines so far are not those of its reference"):
        env.demonstrate()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_steps": 0}, "env.max_steps is 0; it must be from 1 to 10000"),
        ({"max_calculations": -1}, "env.max_calculations is -1; it must be from 0 to 1000"),
        ({"decimals": 21}, "env.decimals is 21; it must be from 0 to 20"),
        ({"markers": "####"}, "env.markers must be a list of texts, none of them blank, not '####'"),
        ({"markers": [" "]}, r"env.markers must be a list of texts, none of them blank, not \[' '\]"),
        ({"calculator": True, "calculation_reward": 1.0}, "leave it out with env.calculator: true"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        StepwiseEnv(**arguments)


def test_what_it_returns_is_nobodys_state() -> None:
    """LLM_RL's reset returned its live state, so the first state of a stored episode held the whole solution."""
    messages = [{"role": "user", "content": "How many?"}]
    env = StepwiseEnv()
    prompt = env.reset(replace(CLIPS, prompt=messages), seed=0)
    step = env.step("one\n", "stop")
    before = repr((prompt, step))
    env.step("two\n", "stop")
    assert repr((prompt, step)) == before
    prompt[0]["content"] = "changed"  # type: ignore[index]
    assert messages == [{"role": "user", "content": "How many?"}]


def test_reset_forgets_the_episode_before() -> None:
    env = started(calculator=True, max_steps=2)
    message(env, ["<<1+1=", "<<1+1=", "\n", "= <<"])
    assert demonstrated(env, replace(CLIPS, references=("1+1=2\n#### 2",)))[1] == "1+1=2\n#### 2"


def test_it_is_registered() -> None:
    assert registry.get("env", "stepwise") is StepwiseEnv


@pytest.mark.slow
def test_every_calculation_of_gsm8k(shared: Path) -> None:
    calculations = 0
    for example in load_task("gsm8k", "train", path=shared / "data" / "gsm8k"):
        for expression, claimed in re.findall(r"<<(.*?)=(.*?)>>", example.references[0]):
            value = calculate(expression)
            assert value is not None, expression
            assert abs(value - Fraction(claimed)) <= Fraction(5, 1000), (expression, claimed)
            assert abs(Fraction(format_number(value)) - Fraction(claimed)) <= Fraction(5, 1000), (expression, claimed)
            calculations += 1
    assert calculations == 23_716  # so many "<<" there are


@pytest.mark.slow
@pytest.mark.parametrize("calculator", [False, True])
def test_the_solutions_of_gsm8k_line_by_line(shared: Path, calculator: bool) -> None:
    examples = load_task("gsm8k", "train", path=shared / "data" / "gsm8k")
    assert len(examples) == 7473
    results = 0
    for example in examples:
        pieces, text, steps = demonstrated(StepwiseEnv(calculator=calculator), example)
        lines = example.references[0].split("\n")
        assert steps[-1].terminated
        assert steps[-1].info["lines"] == len(lines)
        assert pieces[-1] == text.split("\n")[-1] == lines[-1]
        assert final_answer([text, pieces[-1]], [example] * 2, strict=True) == [1.0, 1.0]
        results += steps[-1].info["calculations"]
    assert results == (23_716 if calculator else 0)
