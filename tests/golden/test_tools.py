"""Tools and conversations, worked by hand; schemas against transformers' own."""

import json
from collections.abc import Callable
from typing import Any, Literal, Optional, Union

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from lmgym.core.errors import LmgymError
from lmgym.core.validation import check_arguments
from lmgym.envs.conversation import Conversation
from lmgym.envs.tools.calculator import calculator
from lmgym.envs.tools.calls import Call, Unreadable
from lmgym.envs.tools.parsing import parse_calls
from lmgym.envs.tools.schema import Answer, begin_call, cut, prepare, schema, tool
from lmgym.types import Example

HERE = "tests.golden.test_tools"
QUESTION = Example("sum/0", "What is 12 * 34?", meta={"answer": "408"})

# In the manner of Qwen2.5 and Hermes, and one that knows of no tools.
WITH_TOOLS = """{% if tools %}<system>{% if messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}\
{% for tool in tools %}{{ tool | tojson }}{% endfor %}</system>{% endif %}\
{% for message in messages %}{% if message.role == 'tool' %}<user><tool_response>{{ message.content }}</tool_response>\
</user>{% elif message.role != 'system' or not tools %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>\
{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
WITHOUT_TOOLS = """{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant'] %}\
{{ raise_exception('no role ' + message.role) }}{% endif %}<{{ message.role }}>{{ message.content }}\
</{{ message.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, float]:
    """Forecasts the weather.

    In a few words
    over lines.

    Args:
        city: the name of the city,
            in English
        days: how many days ahead
        unit: of the temperature

    Returns:
        degrees
    """
    return {city: 20.0 + days}


def mixed(
    items: list[int],
    table: dict[str, float],
    nested: list[list[str]],
    either: Union[int, str],  # noqa: UP007
    free: Any = None,
    flag: bool = False,
    level: Literal[1, 2] = 1,
    rest: dict = {},  # noqa: B006
) -> str:
    """Takes many things.

    Args:
        items: a
        table: b
        nested: c
        either: d
        free: e
        flag: f
        level: g
        rest: h
    """
    return "taken"


def bare() -> None:
    """Does nothing."""


def optional(a: Optional[int], b: Literal["x"] | None = None, c: list[int] | str = "") -> None:  # noqa: UP045
    """Nulls are allowed."""


def lookup(key: str, example: Example) -> Any:
    """Looks something up in the problem's own data."""
    return example.meta[key]


def undocumented(a: int) -> None: ...


def untyped(a) -> None:  # type: ignore[no-untyped-def]
    """Has a parameter of no type."""


def odd(a: complex) -> None:
    """Has a parameter that JSON does not know."""


def starred(*many: int) -> None:
    """Takes any number."""


def raises(message: str) -> None:
    """Raises."""
    raise ValueError(message)


def leaves() -> None:
    """Tries to end the program."""
    raise SystemExit(3)


def returns(kind: str) -> Any:
    """Returns many things."""
    numpys = {"number": np.int64(42), "array": np.array([1, 2]), "inside": {"right": np.bool_(True), "class": complex}}
    own = {"text": "a\nb", "list": [1, "é"], "none": None, "half": "\ud800", "huge": 10**5000, "set": {1}}
    return {**own, **numpys}[kind]


def oddly_named_user(history: list[dict[str, str]]) -> str | None:
    history[-1]["content"] = "changed"  # its own copy
    return "Go on." if len(history) < 4 else None


def knowing_user(history: list[dict[str, str]], example: Example, seed: int) -> str:
    return f"{example.meta['answer']} {seed} {len(history)}"


def raising_user(history: list[dict[str, str]]) -> str:
    raise RuntimeError("gone home")


def wrong_user(history: list[dict[str, str]]) -> int:
    return 3


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def rendered(template: str, messages: Any, **more: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"x": 0}, unk_token="x")))
    tokenizer.chat_template = template
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **more)
    assert isinstance(text, str)
    return text


# --- schemas ---


@pytest.mark.parametrize("function", [weather, mixed, bare, calculator])
def test_schema_is_that_of_transformers(function: Callable[..., Any]) -> None:
    theirs = get_json_schema(function)
    theirs["function"].pop("return", None)  # told by neither OpenAI's interface nor ours
    assert schema(function) == theirs


def test_schema_of_nulls_is_json_schema() -> None:
    """transformers writes OpenAPI's `nullable`, which JSON Schema does not know."""
    parameters = schema(optional)["function"]["parameters"]
    assert parameters["properties"] == {
        "a": {"type": ["integer", "null"]},
        "b": {"type": ["string", "null"], "enum": ["x", None]},
        "c": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]},
    }
    assert parameters["required"] == ["a"]


def test_the_example_is_no_parameter_of_the_model() -> None:
    assert list(schema(lookup)["function"]["parameters"]["properties"]) == ["key"]
    assert begin_call(Call("lookup", {"key": "answer"}), {"lookup": prepare(lookup)}, QUESTION, 100).text == "408"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (undocumented, "tool 'undocumented' has no docstring"),
        (untyped, "tool 'untyped': parameter 'a' has no type; write one, such as a: str"),
        (odd, "tool 'odd': parameter 'a' has a type that JSON does not know"),
        (starred, "tool 'starred': parameter 'many' cannot be given by name"),
        (3, "a tool must be a function, not 3"),
        (dict, "a tool must be a function"),
    ],
)
def test_a_function_that_is_no_tool_is_refused(function: Any, says: str) -> None:
    with pytest.raises(LmgymError, match=says):
        prepare(function)


# --- calls in a text ---


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("No call at all.", []),
        ('So: <tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>', [Call("f", {"a": [1]})]),
        (call("f", a="</b>") + "\nand " + call("g"), [Call("f", {"a": "</b>"}), Call("g", {})]),
        ('<tool_call>{"name": "f", "arguments": {}}', [Call("f", {})]),
        ('<tool_call>{"arguments": {"a": "b"}, "name": "f"}</tool_call>', [Call("f", {"a": "b"})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [Call("f", {"a": 1})]),
        (f"<think>{call('f')}</think>{call('g')}", [Call("g", {})]),
        (f"<think>{call('f')}", []),
        ('{"name": "f", "parameters": {"a": "1"}}', [Call("f", {"a": "1"})]),
        ('\n{"type": "function", "name": "f", "parameters": {}}', [Call("f", {})]),
        ('{"type": "function", "function": {"name": "f", "arguments": {}}}', [Call("f", {})]),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [Call("f", {}), Call("g", {})]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]',
         [Call("f", {}), Call("g", {"a": 1})]),
        (' [{"name": "f", "arguments": {"a": 1}}]', [Call("f", {"a": 1})]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}', [Call("f", {"a": 1}), Call("g", {})]),
        ('{"name": "f", "parameters": {"a": "<tool_call>"}}', [Call("f", {"a": "<tool_call>"})]),
        (call("f", a="<function=g>"), [Call("f", {"a": "<function=g>"})]),
        ('{"name": "Tom", "age": 3}', []),
        ('{"answer": {"arguments": 1}}', []),
        ("[1, 2]", []),
    ],
)  # fmt: skip
def test_calls_are_read(text: str, calls: list[Call]) -> None:
    assert parse_calls(text) == calls


SCHEMAS = {
    "f": {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "many": {"type": ["array", "null"]},
            "yes": {"type": "boolean"},
            "either": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {}}, {"type": "null"}]},
            "one": {"oneOf": [{"enum": [1, 2]}, {"type": ["boolean", "null"]}]},
            "open": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "free": {"anyOf": [{"type": "integer"}, {}]},
        }
    }
}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        # Qwen3-Coder, as its chat template writes a call.
        ("Let me.\n<tool_call>\n<function=f>\n<parameter=text>\n3\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
         "</function>\n</tool_call>", [Call("f", {"text": "3", "count": 3})]),
        ("<function=f>\n<parameter=text>\na\n\n b < c\n</parameter>\n</function>\n<function=g>\n</function>",
         [Call("f", {"text": "a\n\n b < c"}), Call("g", {})]),
        ("<tool_call><function=f><parameter=many>[1, {}]</parameter><parameter=yes>True</parameter>"
         "<parameter=count>three</parameter><parameter=new>7",
         [Call("f", {"many": [1, {}], "yes": True, "count": "three", "new": "7"})]),
        ("<function=f><parameter=either>3</parameter><parameter=one>2</parameter><parameter=open>3</parameter>"
         "<parameter=free>4</parameter></function>", [Call("f", {"either": 3, "one": 2, "open": "3", "free": "4"})]),
        ("<function=f><parameter=either>[\"a\"]</parameter><parameter=one>null</parameter></function>",
         [Call("f", {"either": ["a"], "one": None})]),
        ("call:f{either:3,one:true,open:3}", [Call("f", {"either": 3, "one": True, "open": "3"})]),
        # FunctionGemma and Gemma 4, as their chat templates write a call, and without the marks.
        ("<start_function_call>call:f{count:3,text:<escape>a, {b:<escape>}<end_function_call>",
         [Call("f", {"count": 3, "text": "a, {b:"})]),
        ('<|tool_call>call:f{many:[1,<|"|>x<|"|>],yes:true}<tool_call|><|tool_call>call:g{o:{p:-1}}<tool_call|>',
         [Call("f", {"many": [1, "x"], "yes": True}), Call("g", {"o": "{p:-1}"})]),
        ("call:f{text:3, then 4,count:3}call:g{}", [Call("f", {"text": "3, then 4", "count": 3}), Call("g", {})]),
        ("I call:f{}", []),
    ],
)  # fmt: skip
def test_values_without_a_type_get_that_of_the_schema(text: str, calls: list[Call]) -> None:
    assert parse_calls(text, schemas=SCHEMAS) == calls


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<function=", "has no name"),
        ("<function=f><parameter=>1", "a tag <parameter=...> of 'f' has no name"),
        ("<function=f><parameter=a>1</parameter><parameter=a>2", "the parameter 'a' of 'f' comes twice"),
        ("<start_function_call>f(3)<end_function_call>", "a call is written as call:name{key:value}"),
        ("<|tool_call>call:f{a:1", "a call is written as call:name{key:value}"),
        ('<|tool_call>call:f{a:<|"|>b<|"|>,a:2}', "the arguments of 'f' cannot be read: the key 'a' comes twice"),
        ('<|tool_call>call:f{a:<|"|>b<|"|>,c:' + "[" * 60 + "]" * 60 + "}", "nested too deeply"),
    ],
)
def test_calls_of_other_forms_that_cannot_be_read_say_why(text: str, says: str) -> None:
    (only,) = parse_calls(text)
    assert isinstance(only, Unreadable) and says in only.reason


@pytest.mark.parametrize(
    ("inside", "says"),
    [
        ('{"name": "f", "arguments": {"a": }}', "not valid JSON: Expecting value"),
        ("", "not valid JSON"),
        ('{"name": "f", "arguments": {"a": NaN}}', "not valid JSON: NaN is no JSON"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "not valid JSON: 1e999 is too large a number"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 1001 + "}}", "is too large a number"),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "not valid JSON: the key 'a' comes twice"),
        ('{"name": "f", "arguments": ' + '{"a": ' * 60 + "1" + "}" * 60 + "}", "nested too deeply"),
        ('{"name": "f", "arguments": ' + "[" * 100_000, "not valid JSON: nested too deeply"),
        ('{"name": "f"}', "the call of 'f' has no 'arguments'"),
        ('{"name": "f", "arguments": 3}', "the arguments of 'f' must be an object"),
        ('{"name": "f", "arguments": "x"}', "the arguments are not valid JSON"),
        ('{"name": 3, "arguments": {}}', "a call is an object such as"),
        ("3", "a call is an object such as"),
    ],
)
def test_calls_that_cannot_be_read_say_why(inside: str, says: str) -> None:
    (only,) = parse_calls(f"<tool_call>{inside}</tool_call>")
    assert isinstance(only, Unreadable) and says in only.reason
    assert len(only.reason) < 300


def test_only_so_many_calls_are_made() -> None:
    found = parse_calls(call("f") * 5, most=3)
    assert found[:3] == [Call("f", {})] * 3
    assert found[3:] == [Unreadable("more than 3 calls at once; those behind the first 3 were not made")]
    assert len(parse_calls(call("f") * 3, most=3)) == 3


# --- answers ---


@pytest.mark.parametrize(
    ("one", "error"),
    [
        (Call("wether", {}), "there is no tool 'wether'; did you mean 'weather'? Valid: calculator, mixed, weather."),
        (Call("weather", {}), "weather needs the argument 'city'"),
        (Call("weather", {"city": "Rome", "dayz": 2}), "weather has no argument 'dayz'; did you mean 'days'?"
         " Valid: city, days, unit."),
        (Call("weather", {"city": 3}), "argument 'city' of weather: Input should be a valid string"),
        (Call("weather", {"city": "Rome", "days": "2"}), "argument 'days' of weather: Input should be a valid integer"),
        (Call("weather", {"city": "Rome", "days": True}),
         "argument 'days' of weather: Input should be a valid integer"),
        (Call("weather", {"city": "Rome", "unit": "K"}), "argument 'unit' of weather: Input should be 'C' or 'F'"),
        (Call("mixed", {"items": [1, "x"], "table": {}, "nested": [], "either": 1}),
         "argument 'items.1' of mixed: Input should be a valid integer"),
        (Unreadable("why"), "why"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_answered_by_json(one: Call | Unreadable, error: str) -> None:
    tools = {function.__name__: prepare(function) for function in (weather, mixed, calculator)}
    assert begin_call(one, tools, QUESTION, 1000) == Answer(json.dumps({"error": error}), invalid=True)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (Call("weather", {"city": "Rome", "days": 2}), Answer('{"Rome": 22.0}')),
        (Call("returns", {"kind": "text"}), Answer("a\nb")),
        (Call("returns", {"kind": "list"}), Answer('[1, "é"]')),
        (Call("returns", {"kind": "none"}), Answer("null")),
        (Call("returns", {"kind": "half"}), Answer("?")),
        (Call("returns", {"kind": "set"}), Answer("[1]")),
        (Call("returns", {"kind": "number"}), Answer("42")),
        (Call("returns", {"kind": "array"}), Answer("[1, 2]")),
        (Call("returns", {"kind": "inside"}), Answer('{"right": true, "class": "<class \'complex\'>"}')),
        (Call("returns", {"kind": "else"}), Answer('{"error": "KeyError: \'else\'"}', failed=True)),
        (Call("raises", {"message": 'no "b"'}), Answer('{"error": "ValueError: no \\"b\\""}', failed=True)),
        (Call("leaves", {}), Answer('{"error": "SystemExit: 3"}', failed=True)),
        (Call("calculator", {"expression": "(3 + 4.5) * 2"}), Answer("15")),
    ],
)
def test_what_a_call_comes_to(one: Call, expected: Answer) -> None:
    tools = {function.__name__: prepare(function) for function in (weather, returns, raises, leaves, calculator)}
    assert begin_call(one, tools, QUESTION, 1000) == expected


def test_a_number_with_too_many_digits_is_an_error() -> None:
    result = begin_call(Call("returns", {"kind": "huge"}), {"returns": prepare(returns)}, QUESTION, 1000)
    assert result.failed and "error" in json.loads(result.text)


def test_long_results_keep_both_ends_and_say_so() -> None:
    assert cut("x" * 60, 60) == "x" * 60
    short = cut("a" * 500 + "b" * 500, 100)
    assert short == "a" * 28 + "\n[... 944 of 1000 characters left out ...]\n" + "b" * 28  # 28 + 43 + 28 = 99
    long_result = begin_call(Call("weather", {"city": "x" * 5000}), {"weather": prepare(weather)}, QUESTION, 200)
    assert len(long_result.text) <= 200 and long_result.text.startswith('{"xxx') and "left out" in long_result.text
    long_error = begin_call(Call("raises", {"message": "x" * 5000}), {"raises": prepare(raises)}, QUESTION, 200)
    assert len(long_error.text) <= 200 and "left out" in json.loads(long_error.text)["error"]


# --- conversations ---


def test_a_conversation_with_a_tool() -> None:
    env = Conversation(tools=["calculator"])
    system, user = env.reset(QUESTION, seed=0)
    assert user == {"role": "user", "content": "What is 12 * 34?"}
    assert system["role"] == "system" and system["content"].endswith(json.dumps(schema(calculator)["function"]))
    step = env.step("I compute. " + call("calculator", expression="12 * 34"), "eos")
    assert list(step.messages) == [{"role": "tool", "name": "calculator", "content": "408"}]
    assert (step.reward, step.over) == (0.0, False)
    assert step.info == {"calls": 1, "invalid_calls": 0, "tool_errors": 0}
    last = env.step("It is 408.", "eos")
    assert last.terminated and not last.truncated and not last.messages


def test_the_example_that_the_prompt_shows_is_a_call_that_can_be_read() -> None:
    prompt = Conversation(tools=["calculator"]).reset(QUESTION, 0)[0]["content"]
    shown = prompt[: prompt.index("Its result")]
    assert parse_calls(shown) == [Call("...", {"...": "..."})]


def test_wrong_calls_cost_their_penalty() -> None:
    env = Conversation(tools=["calculator", f"{HERE}:raises"], invalid_call_penalty=0.25)
    env.reset(QUESTION, 0)
    text = call("calculator", expression="1+1") + call("calculator") + call("abacus") + call("raises", message="m")
    step = env.step(text, "eos")
    assert step.reward == -0.5
    assert step.info == {"calls": 4, "invalid_calls": 2, "tool_errors": 1}
    assert [message["name"] for message in step.messages] == ["calculator", "calculator", "unknown", "raises"]
    assert all("error" in json.loads(message["content"]) for message in step.messages[1:])


def test_max_turns_truncates_whatever_the_last_turn_says() -> None:
    env = Conversation(tools=["calculator"], max_turns=2, invalid_call_penalty=1.0)
    for text in (call("calculator", expression="1"), call("calculator")):
        env.reset(QUESTION, 0)
        assert not env.step(call("calculator", expression="1"), "eos").over
        step = env.step(text, "eos")
        assert step.truncated and not step.terminated and not step.messages
        assert step.reward == -step.info["invalid_calls"]
    env.reset(QUESTION, 0)
    env.step(call("calculator", expression="1"), "eos")
    assert env.step("An answer.", "eos").terminated


@pytest.mark.parametrize("stop", ["length", "context"])
def test_a_turn_that_was_cut_off_makes_no_call(stop: str) -> None:
    env = Conversation(tools=["calculator"])
    env.reset(QUESTION, 0)
    step = env.step(call("calculator", expression="1"), stop)
    assert step.truncated and not step.messages and step.info["calls"] == 0


def test_without_tools_nothing_is_a_call() -> None:
    env = Conversation(user="scripted", script=["And then?"])
    assert env.reset(QUESTION, 0) == [{"role": "user", "content": QUESTION.prompt}]
    assert env.step(call("python", code="1"), "eos").messages == [{"role": "user", "content": "And then?"}]
    assert env.step("End.", "eos").terminated


def test_a_script_answers_turns_without_a_call() -> None:
    example = Example("a/0", "Hello", meta={"script": ["One.", "Two."]})
    env = Conversation(tools=["calculator"], user="scripted", script=["Else."])
    env.reset(example, 0)
    assert env.step("Hi", "eos").messages[0]["content"] == "One."
    assert env.step(call("calculator", expression="1"), "eos").messages[0]["content"] == "1"
    assert env.step("So", "eos").messages[0]["content"] == "Two."
    assert env.step("Bye", "eos").terminated
    for _ in range(2):
        env.reset(example, 0)
        assert env.step("Hi", "eos").messages[0]["content"] == "One."  # from the beginning
    env.reset(QUESTION, 0)
    assert env.step("Hi", "eos").messages[0]["content"] == "Else."


def test_a_user_of_ones_own() -> None:
    env = Conversation(user=f"{HERE}:oddly_named_user")
    env.reset(QUESTION, 0)
    assert env.step("first", "eos").messages == [{"role": "user", "content": "Go on."}]
    assert env._history[1]["content"] == "first"
    assert env.step("second", "eos").terminated
    env = Conversation(user=f"{HERE}:knowing_user", max_turns=2)
    env.reset(QUESTION, seed=7)
    assert env.step("first", "eos").messages[0]["content"] == "408 7 2"
    assert env.step("second", "eos").truncated


def test_a_user_who_is_a_player_of_his_own() -> None:
    env = Conversation(user="frozen", tools=["calculator"], user_prompt="You said: {prompt}", max_turns=4)
    assert (env.players, env.learners, Conversation(user="scripted", script=["a"]).players) == (2, (0,), 1)
    env.reset(QUESTION, 0)
    assert env.step(call("calculator", expression="12 * 34"), "eos").player is None  # a tool's result
    asked = env.step("It is 408.", "eos")
    assert asked.player == 1
    assert asked.messages == [
        {"role": "system", "content": f"You said: {QUESTION.prompt}"},
        {"role": "user", "content": "It is 408."},
    ]
    said = env.step(call("calculator", expression="1"), "eos")  # the user calls no tool: it is what he says
    assert (said.player, said.messages) == (0, [{"role": "user", "content": call("calculator", expression="1")}])
    again = env.step("What?", "eos")
    assert (again.player, again.messages) == (1, [{"role": "user", "content": "What?"}])
    ended = env.step("Nothing. [END]", "eos")
    assert ended.terminated and not ended.messages

    env = Conversation(user="frozen", user_end="BYE")
    env.reset(QUESTION, 0)
    assert env.step("Hi", "eos").messages[0]["content"].endswith("give up, write BYE.")
    with pytest.raises(LmgymError, match=r"meta\['user'\] must be a text"):
        env.reset(Example("a/0", "Hi", meta={"user": 7}), 0)

    env = Conversation(user="current", max_turns=1)
    env.reset(QUESTION, 0)
    assert env.step("Hi", "eos").truncated  # nobody would read what the user says
    env = Conversation(user="current")
    env.reset(Example("a/0", "Hi", meta={"user": "Be brief."}), 0)
    assert env.step("Hello", "eos").messages[0]["content"] == "Be brief."
    silent = env.step(" ", "eos")
    assert silent.truncated and silent.info["error"] == "the model that plays the user said nothing"


@pytest.mark.parametrize(
    ("name", "says"),
    [("raising_user", "raised RuntimeError: gone home"), ("wrong_user", "returned int; it must be a text")],
)
def test_a_user_that_fails_ends_its_episode(name: str, says: str) -> None:
    env = Conversation(user=f"{HERE}:{name}")
    env.reset(QUESTION, 0)
    step = env.step("Hi", "eos")
    assert step.truncated and not step.terminated
    assert step.info["error"].startswith(f"user '{HERE}:{name}' {says}")


def test_there_is_one_system_message_at_most() -> None:
    prompt = [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"}]
    env = Conversation(system_prompt="First.", tools=["calculator"])
    messages = env.reset(Example("a", prompt), 0)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("First.\n\nOwn.\n\nYou can call tools.")
    assert prompt[0]["content"] == "Own."


def test_what_was_returned_does_not_change_and_nothing_is_shared() -> None:
    env, other = Conversation(tools=["calculator"]), Conversation(tools=["calculator"])
    prompt = env.reset(QUESTION, 0)
    first = env.step(call("calculator", expression="1"), "eos")
    before = json.dumps([prompt, list(first.messages), first.info])
    other.reset(QUESTION, 1)
    env.step(call("calculator", expression="2"), "eos")
    env.step("x", "eos")
    assert json.dumps([prompt, list(first.messages), first.info]) == before
    first.messages[0]["content"] = "changed"  # type: ignore[index]
    assert env._history[3]["content"] == "1"
    template = Conversation(tools=["calculator"], tool_prompt="template")
    template.template["tools"][0]["function"]["name"] = "changed"
    assert template.template["tools"][0]["function"]["name"] == "calculator"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tools": ["calculater"]}, "unknown tool 'calculater'; did you mean 'calculator'"),
        ({"tools": [f"{HERE}:untyped"]}, "parameter 'a' has no type"),
        ({"tools": [f"{HERE}:absent"]}, "has no 'absent'"),
        ({"tools": ["calculator", "calculator"]}, "two tools are called 'calculator'"),
        ({"tools": "calculator"}, "must be a list of names"),
        ({"python": {}}, "'python', which is not among 'env.tools'"),
        ({"tools": ["python"], "python": {"second": 1}}, "unknown key 'env.python.second'; did you mean 'seconds'"),
        ({"tools": ["python"], "python": {"seconds": 0}}, "the limit 'seconds' of python snippets must be at least"),
        ({"user": "model"}, "key 'env.user' must be none, scripted, current, frozen or 'module:function', not 'model'"),
        ({"user": f"{HERE}:nobody"}, "has no 'nobody'"),
        ({"user_prompt": "You are rude."}, "need 'env.user: current' or 'frozen'"),
        ({"user": "frozen", "user_end": ""}, "key 'env.user_end' is empty"),
        ({"script": ["a"]}, "key 'env.script' needs 'env.user: scripted'"),
        ({"max_turns": 0}, "key 'env.max_turns' must be a number from 1 on, not 0"),
        ({"invalid_call_penalty": float("nan")}, "key 'env.invalid_call_penalty'"),
        ({"tool_role": "ipython"}, "key 'env.tool_role' must be tool or user, not 'ipython'"),
    ],
)
def test_arguments_that_cannot_be_are_one_sentence(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(LmgymError, match=says):
        Conversation(**arguments)


def test_a_recipe_s_values_are_converted_and_checked() -> None:
    given = {"tools": ["calculator"], "invalid_call_penalty": "1e-1", "max_turns": 2}  # YAML reads 1e-1 as a text
    assert check_arguments(Conversation, given, "env", given=0)["invalid_call_penalty"] == 0.1
    with pytest.raises(LmgymError, match=r"env\.tool_role"):
        check_arguments(Conversation, {"tool_role": "ipython"}, "env", given=0)
    with pytest.raises(LmgymError, match=r"unknown key 'env\.tool'; did you mean 'tools'"):
        check_arguments(Conversation, {"tool": []}, "env", given=0)


def test_a_script_that_is_none_names_its_example() -> None:
    env = Conversation(user="scripted")
    with pytest.raises(LmgymError, match=r"example 'sum/0' has no meta\['script'\]"):
        env.reset(QUESTION, 0)
    with pytest.raises(LmgymError, match=r"example 'a': meta\['script'\] must be a list of texts"):
        env.reset(Example("a", "b", meta={"script": "One."}), 0)


# --- through a chat template ---


def test_a_template_that_knows_tools_is_given_them() -> None:
    env = Conversation(tools=["calculator"], tool_prompt="template", system_prompt="Be brief.")
    prompt = env.reset(QUESTION, 0)
    assert env.template == {"tools": [schema(calculator)]}
    text = rendered(WITH_TOOLS, prompt, **env.template)
    described = json.dumps(schema(calculator))
    assert text == f"<system>Be brief. {described}</system><user>What is 12 * 34?</user><assistant>"
    turn = call("calculator", expression="12 * 34")
    results = env.step(turn, "eos").messages
    longer = rendered(WITH_TOOLS, [*prompt, {"role": "assistant", "content": turn}, *results], **env.template)
    assert longer == text + turn + "</assistant><user><tool_response>408</tool_response></user><assistant>"


def test_a_template_that_knows_no_tools_is_given_text() -> None:
    env = Conversation(tools=["calculator"], tool_role="user")
    prompt = env.reset(QUESTION, 0)
    assert env.template == {}
    text = rendered(WITHOUT_TOOLS, prompt)
    assert text.startswith("<system>You can call tools.") and '"name": "calculator"' in text
    turn = call("calculator", expression="12 * 34") + call("abacus")
    results = env.step(turn, "eos").messages
    longer = rendered(WITHOUT_TOOLS, [*prompt, {"role": "assistant", "content": turn}, *results])
    added = longer.removeprefix(text + turn + "</assistant>")
    assert added.startswith('<user><tool_response>\n408\n</tool_response>\n<tool_response>\n{"error"')
    assert added.count("<user>") == 1


def test_the_built_in_tools_are_tools() -> None:
    for name in ("python", "calculator"):
        assert tool(name).name == name and tool(name).required
