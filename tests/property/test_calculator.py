"""The calculator against Python's own arithmetic, and against text that is meant to break it."""

import itertools
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgym.envs.base import Step
from lmgym.envs.stepwise import MAX_PIECES, StepwiseEnv
from lmgym.envs.tools.calculator import BITS, LONGEST, calculate, format_number
from lmgym.types import Example

PROBLEM = Example("a/0", "?")
WRITTEN = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)>>")
MOST_CALLS = 20_000  # of functions, Python's and C's, by one call; a few thousand are usual for 200 characters

numbers = st.one_of(
    st.integers(0, 10**6).map(str),
    st.decimals(0, 10**4, places=2, allow_nan=False).map(str),
    st.integers(0, 99).map(lambda digits: f".{digits}"),
)
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", " + ", "\t/ "]), inner).map("".join),
        st.tuples(st.sampled_from(["(", "-(", "+("]), inner, st.just(")")).map("".join),
        st.tuples(numbers, st.just("**"), st.sampled_from(["0", "2", "3", "-1"])).map("".join),
    ),
    max_leaves=12,
)


def python_says(expression: str) -> Fraction | None:
    """The same by Python's own rules of precedence, each number a Fraction. Only for texts made above."""
    exact = re.sub(r"[0-9]*\.?[0-9]+", lambda match: f"Fraction('{match[0]}')", expression)
    try:
        return Fraction(eval(exact, {"Fraction": Fraction}))
    except ZeroDivisionError:
        return None


@given(expressions)
def test_it_computes_what_python_does(expression: str) -> None:
    value, expected = calculate(expression), python_says(expression)
    if value is not None:
        assert value == expected
    elif expected is not None:  # then it went beyond a bound
        reach = sum(3 * _bits(Fraction(number)) + 2 for number in re.findall(r"[0-9]*\.?[0-9]+", expression))
        assert reach > BITS or len(expression) > LONGEST or expression.count("(") > 6


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4), st.integers(0, 6))
def test_a_written_number_is_the_nearest(top: int, bottom: int, decimals: int) -> None:
    value = Fraction(top, bottom)
    text = format_number(value, decimals)
    assert abs(Fraction(text) - value) <= Fraction(1, 2 * 10**decimals)
    assert re.fullmatch(r"0|-?(?:[1-9][0-9]*|0(?=\.))(?:\.[0-9]*[1-9])?", text)
    assert calculate(text) == Fraction(text)


def _bits(value: int | Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def powers(source: random.Random) -> str:
    base, sign = source.choice(["9", "99", "0", "1", ".5", "(1+1)", "-2"]), source.choice(["**", "^", "**-"])
    return source.choice(["", "1/", "-"]) + sign.join([base] * source.randint(2, 60))


def nested(source: random.Random) -> str:
    deep, (left, right) = source.choice([3, 19, 20, 66, 100, 100_000]), source.choice(["()", "-+", "[]", "<>"])
    return left * deep + "1" + right * source.choice([deep, deep - 1, 0])


def chains(source: random.Random) -> str:
    link = source.choice(["9*", "1/3+", "7/", "-", "1.0000001*", "99999999999999999999*", "%", "2^2^", "$", "1,000+"])
    return link * source.choice([2, 20, 49, 99, 1_000]) + source.choice(["1", "", "0"])


def code(source: random.Random) -> str:
    return source.choice(
        [
            "__import__('os').system('exit 3')",
            "exec('raise SystemExit')",
            "().__class__.__base__.__subclasses__()",
            "[x for x in range(10**12)]",
            "(lambda f: f(f))(lambda f: f(f))",
            "open('/etc/passwd').read()",
            "1 if exit() else 2",
            "9**9**9**9",
            "f'{1+1}'",
            "\\input{x}",
            "while True: pass",
            "0x1F+0b1+1_000",
            "1;2",
            "nan+inf-Infinity",
            "1e999999999",
        ]
    )


def digits(source: random.Random) -> str:
    signs = "0123456789\u0663\u0967\uff11\u00b2\u00bd\u2167\U0001d7d8+-*/()\u00d7\u00f7\u2212\u2215.,%$x^ "
    return "".join(source.choices(signs, k=source.choice([1, 5, 30, 199, 200, 201, 5_000])))


def noise(source: random.Random) -> str:
    signs = "0123456789.+-*/()=<>\n\r\t #\\{}$%,:\x00\x7f\u2028\u202e\ud800\U0001f600\u0301abcxyz"
    return "".join(source.choices(signs, k=source.choice([1, 10, 100, 1_000])))


def marks(source: random.Random) -> str:
    pieces = ["<<", ">>", "=", "1+1", "<", "\n", "####", "18", "the answer is:", "\\boxed{", "}", " ", "9**9**9", "("]
    return "".join(source.choices(pieces, k=source.choice([2, 10, 60, 600])))


def endless(source: random.Random) -> str:
    piece = source.choice(
        ["9", "(", "<<", "<<1=", "=", "1+", " ", "####", "\\boxed{", "{", "the answer is:", "1,111", "\n", "<<1=1>>"]
    )
    return piece * (1_000_000 // len(piece))


KINDS: dict[Callable[[random.Random], str], int] = {
    powers: 15, nested: 15, chains: 15, code: 10, digits: 15, noise: 15, marks: 15,
}  # fmt: skip


def hostile(number: int) -> str:
    source = random.Random(number)
    return (endless if number % 500 == 250 else source.choices([*KINDS], [*KINDS.values()])[0])(source)


events: list[str] | None = None


def _audit(event: str, _: Any) -> None:
    if events is not None and event.partition(".")[0] in ("exec", "compile", "import", "open", "os", "subprocess"):
        events.append(event)


@contextmanager
def nothing_is_executed() -> Iterator[None]:
    """Fails where Python compiles, executes, imports or opens anything."""
    global events
    if _audit not in hooks:
        sys.addaudithook(_audit)
        hooks.append(_audit)
    events = []
    try:
        yield
        seen = events
    finally:
        events = None
    assert seen == []


hooks: list[Callable[[str, Any], None]] = []


def calls_of(function: Callable[..., Any], *arguments: Any) -> int:
    """How many functions it calls."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return count


def check_value(value: int | Fraction | None) -> None:
    assert value is None or (type(value) in (int, Fraction) and _bits(value) <= BITS)


def check_step(env: StepwiseEnv, step: Step) -> None:
    assert (step.continuation is None) == step.over
    assert not (step.unfinished and step.over) and not (step.terminated and step.truncated)
    if step.continuation:
        number = WRITTEN.match(step.continuation)
        assert step.unfinished and env.calculator and number
        assert step.continuation[number.end() :] == ("" if env.style == "lmgym" else number[1])


def play(env: StepwiseEnv, pieces: list[tuple[str, str]]) -> list[Step]:
    """The same pieces over and over until the episode ends."""
    env.reset(PROBLEM, seed=0)
    steps: list[Step] = []
    for text, stop in itertools.cycle(pieces):
        steps.append(env.step(text, stop))
        check_step(env, steps[-1])
        assert len(steps) <= env.max_steps * (MAX_PIECES + 1)
        if steps[-1].over:
            return steps
    raise AssertionError


def test_the_guard_itself_sees_what_is_executed() -> None:
    with pytest.raises(AssertionError), nothing_is_executed():
        eval("1+1")


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 10_000, 2_500))
def test_hostile_texts(start: int) -> None:
    """10,000 in all, as expressions, as calculations in a line and as lines."""
    env = StepwiseEnv(calculator=True, max_steps=3)
    with nothing_is_executed():
        for number in range(start, start + 2_500):
            text = hostile(number)
            check_value(calculate(text))
            env.reset(PROBLEM, seed=0)
            for piece, stop in ((f"<<{text}=", "stop"), (text, "length"), (text + "\n", "stop"), (text, "eos")):
                step = env.step(piece, stop)
                check_step(env, step)
                if step.over:
                    break


@pytest.mark.parametrize("number", [*range(0, 200, 5), *range(250, 10_000, 500)])
def test_hostile_texts_cost_a_bounded_number_of_calls(number: int) -> None:
    text = hostile(number)
    assert calls_of(calculate, text) < MOST_CALLS
    for env in (StepwiseEnv(calculator=True), StepwiseEnv(calculation_reward=1.0)):
        env.reset(PROBLEM, seed=0)
        assert calls_of(env.step, f"<<{text}=", "stop") < MOST_CALLS
        assert calls_of(env.step, text.replace("\n", " ") + "\n", "stop") < MOST_CALLS


pieces = st.one_of(
    st.text(st.sampled_from("0123456789+-*/()=<>.% #\n$x"), max_size=30),
    st.lists(st.sampled_from(["<<", ">>", "=", "1+1", "\n", "####", " 5", "1/3", "#### 7"]), max_size=8).map("".join),
    st.text(max_size=20),
)


@given(
    st.lists(st.tuples(pieces, st.sampled_from(["stop", "length"])), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from(["lmgym", "llm_rl"]),
    st.integers(1, 5),
)
def test_every_episode_ends_and_is_a_function_of_the_actions(
    lines: list[tuple[str, str]], calculator: bool, style: Any, max_steps: int
) -> None:
    first, second = (StepwiseEnv(calculator=calculator, style=style, max_steps=max_steps) for _ in range(2))
    assert play(first, lines) == play(second, lines) == play(first, lines)


@given(st.lists(st.text(st.characters(exclude_characters="\n"), max_size=40), min_size=1, max_size=12), st.booleans())
def test_any_reference_can_be_demonstrated(lines: list[str], calculator: bool) -> None:
    example = Example("a/0", "?", references=("\n".join(lines),))
    env = StepwiseEnv(calculator=calculator, max_steps=10_000)
    env.reset(example, seed=0)
    text, step = "", Step()
    while not step.over:
        piece = env.demonstrate()
        step = env.step(piece, "stop" if piece.endswith(env.stop) else "eos")
        text += piece + (step.continuation or "")
    if not calculator:  # all of it, or up to a line that announces an answer
        whole = example.references[0].rstrip()
        assert text == whole or (text.endswith("\n") and whole.startswith(text))
    assert step.terminated
