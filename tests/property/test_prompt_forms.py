"""`task.prompts`: a prompt through the chat template, as a text, or as it was rendered before."""

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgym.core.errors import LmgymError
from lmgym.envs.conversation import Conversation
from lmgym.envs.env_worker import from_json, to_json
from lmgym.envs.single_turn import SingleTurn
from lmgym.envs.stepwise import StepwiseEnv
from lmgym.envs.vector import InProcess, Opening
from lmgym.inference.base import Sampling
from lmgym.models.model_info import load_tokenizer
from lmgym.models.policy_section import PolicySection
from lmgym.rollouts.hints import hinted_prompt
from lmgym.rollouts.rollout import Actor, collect
from lmgym.tasks.base import examples_from_prompts, load_task
from lmgym.tasks.prompt_forms import in_form
from lmgym.text.chat import answer_ids, prompt_ids, written_already
from lmgym.training.planning.prompt_report import about_prompts, lost_tools, prompt_as_read
from lmgym.types import BarePrompt, Example, RecipeText
from tests import runs
from tests.property.test_rendering import CHATML, Script, chat, chat_tokenizer, ids_of, plain, texts

SMOLLM = Path.home() / "models" / "smollm2-135m-instruct"  # a really pretrained model, where there is one
THINKS = CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def rendered(text: str, tokenizer: Any = chat) -> str:
    return tokenizer.apply_chat_template(user(text), tokenize=False, add_generation_prompt=True)


# Ids


@given(st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=30))
def test_a_rendered_prompt_has_the_ids_of_its_messages(text: str) -> None:
    prompt = BarePrompt(rendered(text), form="rendered")
    assert prompt_ids(chat, prompt) == prompt_ids(chat, user(text)) == prompt_ids(chat, text)


@given(texts.filter(bool))
def test_a_text_is_tokenized_as_without_a_template(text: str) -> None:
    assert prompt_ids(chat, BarePrompt(text)) == prompt_ids(plain, text)
    assert chat.convert_tokens_to_ids("<|im_end|>") not in prompt_ids(chat, BarePrompt(text + "<|im_end|>"))


@pytest.mark.skipif(
    not SMOLLM.is_dir(), reason="needs SmolLM2-135M-Instruct in ~/models (../shared/models/real makes it)"
)
def test_a_text_has_the_ids_that_trl_gives_it() -> None:
    """TRL 1.16, GRPOTrainer._tokenize_prompts: the tokenizer's own call for texts, the chat template for messages."""
    tokenizer = load_tokenizer(PolicySection(model=str(SMOLLM)))
    for text in ("Ben has 4 cups.", "  two\nlines ", "été 你好"):
        assert prompt_ids(tokenizer, BarePrompt(text)) == tokenizer(text)["input_ids"]
        ids = tokenizer.apply_chat_template(user(text), add_generation_prompt=True)
        assert prompt_ids(tokenizer, user(text)) == (ids if isinstance(ids, list) else ids["input_ids"])
        again = BarePrompt(rendered(text, tokenizer), form="rendered")
        assert prompt_ids(tokenizer, again) == prompt_ids(tokenizer, user(text))


# What the recipe says


def test_auto_is_the_data_s_own_form(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2="}, {"prompt": user("3+3=")}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"path": str(tmp_path / "a.jsonl"), "references": None, "test": 0}
    text, messages = (example.prompt for example in load_task("jsonl", "train", **own))
    assert isinstance(text, BarePrompt) and text.form == "text" and messages == user("3+3=")
    problem = load_task("arithmetic", "train", limit=1)[0].prompt  # lmgym's own problems are put into the template
    assert isinstance(problem, str) and not isinstance(problem, BarePrompt)
    wrapped = load_task("jsonl", "train", **own, system_prompt="Add.")[0].prompt
    assert wrapped == [{"role": "system", "content": "Add."}, *user("2+2=")]
    asked = examples_from_prompts(["1+1="], {"name": "jsonl", **own})[0].prompt  # as lmgym generate asks
    assert isinstance(asked, BarePrompt)
    mixed = load_task("mixture", "train", tasks=[{"name": "jsonl", **own}], prompts="chat")
    assert [example.prompt for example in mixed] == [user("2+2="), user("3+3=")]
    assert type(mixed[0].prompt[0]["content"]) is RecipeText  # no form is left inside of a message


def test_what_stands_around_a_mixture_keeps_the_form_of_its_prompts(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<|im_start|>2+2="}) + "\n")
    member = {"name": "data", "path": str(tmp_path / "rows.jsonl"), "test": 0.0}

    def prompt(**options: Any) -> Any:
        around = {name: options.pop(name) for name in ("prompt_suffix", "system_prompt") if name in options}
        [example] = load_task("mixture", "train", tasks=[{**member, **options}], **around)
        return example.prompt

    for form, own in (("text", {}), ("rendered", {"prompts": "rendered"})):
        found = prompt(prompt_suffix="?", **own)
        assert isinstance(found, BarePrompt) and found == "<|im_start|>2+2=?" and found.form == form
        assert found.spans == (((0, 17),) if form == "rendered" else ((16, 17),))
    assert prompt(system_prompt="Add.")[1]["content"] == "<|im_start|>2+2="
    with pytest.raises(
        LmgymError, match=r"'data/rows/1' is rendered, so task\.system_prompt and task\.few_shot can put"
    ):
        prompt(system_prompt="Add.", prompts="rendered")


def test_each_form_can_be_asked_for() -> None:
    text, messages = Example("a/0", "2+2="), Example("a/1", [{"role": "system", "content": "Add."}, *user("1+1=")])
    assert [one.prompt for one in in_form([text, messages], "arithmetic", "chat")] == [user("2+2="), messages.prompt]
    bare = in_form([text, messages], "arithmetic", "text")
    assert [(one.prompt, one.prompt.form) for one in bare] == [("2+2=", "text"), ("Add.\n\n1+1=", "text")]
    assert in_form([text], "arithmetic", "rendered")[0].prompt.form == "rendered"
    with pytest.raises(LmgymError, match="rendered, and the prompt of 'a/1' is a list of messages"):
        in_form([messages], "arithmetic", "rendered")
    with pytest.raises(LmgymError, match="must be one of auto, chat, text, rendered"):
        load_task("arithmetic", "train", prompts="plain")


@pytest.mark.parametrize("prompt", [BarePrompt("a<eos>", [(0, 1)]), BarePrompt("a<eos>", form="rendered")])
def test_the_form_survives_files_processes_and_hints(prompt: BarePrompt) -> None:
    example = Example("a/0", prompt)
    sent = json.loads(json.dumps(to_json(Opening(prompt))))
    hint = hinted_prompt("{prompt}", example)
    for found in (
        Example.from_json(json.loads(json.dumps(example.to_json()))).prompt,
        from_json(sent).prompt,
        copy.deepcopy(prompt),
        asdict(example)["prompt"],
        hint,
    ):
        assert (found, found.form) == (prompt, prompt.form)
        assert prompt_ids(chat, found) == prompt_ids(chat, prompt)


# Conversations


def test_a_text_goes_on_as_a_text() -> None:
    """Nothing of the template stands between the turns of a conversation that began without it."""

    class Quiz(SingleTurn):
        def step(self, text: str, stop: str) -> Any:
            from lmgym.envs.base import Step

            return Step(user("And 2?")) if not text.startswith("b") else Step(terminated=True)

    answers = [[[*ids_of("a"), chat.eos_token_id], [*ids_of("b"), chat.eos_token_id]]]
    for prompt, between in ((BarePrompt("1?"), "\n\nAnd 2?"), (user("1?"), "\n<|im_start|>user\nAnd 2?<|im_end|>\n")):
        engine = Script(answers, [chat.eos_token_id])
        [episode] = collect([(0, Example("a/0", prompt))], Actor(engine, chat), Sampling(), (0, "test"), Quiz)
        assert chat.decode(episode.turns[1].prompt_ids, skip_special_tokens=False).startswith(between)


def test_a_rendered_prompt_is_not_rendered_again() -> None:
    example = Example("a/0", BarePrompt(rendered("?"), form="rendered"))
    engine = Script([[[chat.eos_token_id]]], [chat.eos_token_id])
    with pytest.raises(LmgymError, match="the environment puts it into a message"):
        collect([(0, example)], Actor(engine, chat), Sampling(), (0, "test"), Conversation)
    [episode] = collect([(0, example)], Actor(engine, chat), Sampling(), (0, "test"), StepwiseEnv)
    assert episode.turns[0].prompt_ids == prompt_ids(chat, user("?"))


# Supervised targets


@pytest.mark.parametrize(
    ("before", "answer", "rest"),
    [
        ("assistant\n<think>\n", "<think>\n4</think>4", "4</think>4"),
        ("assistant\n<think>\n", "<think>4</think>4", "4</think>4"),  # the line break is there already
        ("<start_working_out>", "<start_working_out>\n4", "\n4"),
        ("<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n4", "4"),
        ("<think>\n\n</think>\n\n", "</think>4", "4"),
        ("<think>\n", "4 <think>", "4 <think>"),
        ("<|im_start|>assistant\n", "<b>4</b>", "<b>4</b>"),
        ("", "<think>4", "<think>4"),
    ],
)
def test_a_start_is_not_written_twice(before: str, answer: str, rest: str) -> None:
    assert answer[written_already(before, answer) :] == rest


def test_targets_begin_where_the_prompt_ends() -> None:
    thinks, end = chat_tokenizer(THINKS), [chat.eos_token_id]
    doubled, once = "<think>\n4</think>4", "4</think>4"
    assert answer_ids(thinks, "2+2=", doubled) == answer_ids(thinks, "2+2=", once) == ids_of(once, thinks) + end
    assert answer_ids(chat, "2+2=", doubled) == ids_of(doubled, chat) + end  # this template begins no answer
    assert answer_ids(chat, "2+2=", doubled, start="<think>\n") == ids_of(once, chat) + end
    begun = BarePrompt(rendered("2+2=") + "<think>\n", form="rendered")
    assert answer_ids(chat, begun, doubled) == ids_of(once, chat) + end
    for tokenizer in (chat, thinks, plain):  # a begun message of the assistant
        begun = [*user("2+2="), {"role": "assistant", "content": "Let me see.\n<think>"}]
        assert answer_ids(tokenizer, begun, "<think>4</think>4")[:-1] == ids_of(once, tokenizer)
    begun = [*user("2+2="), {"role": "assistant", "content": "Let me see. "}]
    assert answer_ids(thinks, begun, "<think>\nLet me see. 4")[:-1] == ids_of("4", thinks)
    for prompt in ("Copy [1]: [1]", BarePrompt("Copy [1]: [1]"), user("[1]")):  # the user's text is no start
        assert answer_ids(plain, prompt, "[1]")[:-1] == ids_of("[1]")


# The template


def test_a_recipe_gives_a_template_or_none(tmp_path: Path) -> None:
    file, text = tmp_path / "chat.jinja", "<user>{{ messages[0].content }}<model>"
    file.write_text(text)
    for form in (text, str(file), {"chat_template": text}):
        section = PolicySection(template=form)
        tokenizer = load_tokenizer(section)
        assert tokenizer.decode(prompt_ids(tokenizer, "?", section.chat_template_kwargs)) == "<user>?<model>"
    assert load_tokenizer(PolicySection(template="none")).chat_template is None
    if SMOLLM.is_dir():
        assert load_tokenizer(PolicySection(model=str(SMOLLM), template="none")).chat_template is None
    old = PolicySection(template={"enable_thinking": False})
    assert (old.template, old.chat_template_kwargs) == (None, {"enable_thinking": False})
    for wrong, told in (("nowhere.jinja", "cannot read nowhere.jinja"), ("{% if %}", "is no chat template: .*line 1")):
        with pytest.raises(LmgymError, match=told):
            load_tokenizer(PolicySection(template=wrong))
    file.write_text("not one")
    with pytest.raises(LmgymError, match="it holds neither"):
        load_tokenizer(PolicySection(template=str(file)))


def test_a_template_that_leaves_tools_out_is_told() -> None:
    with_tools = chat_tokenizer("{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML)
    envs = InProcess(lambda: Conversation(tools=["calculator"], tool_prompt="template"))
    assert lost_tools(envs, Example("a/0", "?"), chat)
    assert not lost_tools(envs, Example("a/0", "?"), with_tools) and not lost_tools(envs, Example("a/0", "?"), plain)
    assert not lost_tools(InProcess(lambda: Conversation(tools=["calculator"])), Example("a/0", "?"), chat)
    with pytest.warns(UserWarning, match="leaves out `tools`"):
        prompt_ids(chat, "?", {"tools": [{"type": "function"}]})


ADD = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}}
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"


def rows_with_tools(path: Path, *tools: Any, prompt: Any = None, **section: Any) -> list[Example]:
    rows = [{"prompt": prompt or user(f"{n}?"), "references": str(n), "tools": own} for n, own in enumerate(tools)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*load_task("data", "train", path=str(path), test=0, **section)]


def test_the_tools_of_a_row_reach_the_template_and_are_counted(tmp_path: Path) -> None:
    """As TRL hands them over: what its own call of the template writes. Nothing of a row's text is a control token."""
    writes, path, more = chat_tokenizer(TOOLS + CHATML), tmp_path / "rows.jsonl", {"unused": None}
    for tools in ([ADD], json.dumps([ADD]), [ADD | more]):
        for prompt in (None, "What is 2+2?"):
            [example] = rows_with_tools(path, tools, prompt=prompt)
            plain = [{key: own for key, own in one.items() if key != "tools"} for one in example.prompt]
            theirs = writes.apply_chat_template(plain, tools=[ADD], add_generation_prompt=True, tokenize=False)
            assert writes.decode(prompt_ids(writes, example.prompt)) == theirs and "add" in theirs
            assert example.meta["tools"] == tools
    [shot, _] = rows_with_tools(path, [ADD], [], system_prompt="Be brief.", few_shot={"n": 1})
    assert "tools" not in shot.prompt[0] and '"add"' in writes.decode(prompt_ids(writes, shot.prompt))
    marked = {"name": "add", "description": "<|im_end|>"}
    [example] = rows_with_tools(path, [marked])
    ids = prompt_ids(writes, example.prompt)
    assert ids.count(writes.convert_tokens_to_ids("<|im_end|>")) == 1 and "<|im_end|>" in writes.decode(ids)
    bare, *others = (rows_with_tools(path, tools)[0].prompt for tools in (None, [], "", "[]", "null"))
    assert all(other == bare == user("0?") for other in others)
    assert rows_with_tools(path, "a hammer", **{"tools": None})[0].prompt == user("0?")
    with pytest.raises(LmgymError, match=r"rows.jsonl:1: column 'tools' must hold a list of JSON schemas of tools"):
        rows_with_tools(path, "a hammer")


def test_a_template_that_leaves_out_the_tools_of_rows_is_told(tmp_path: Path) -> None:
    examples = rows_with_tools(tmp_path / "rows.jsonl", [], [ADD])
    for tokenizer in (chat, plain):
        [told] = about_prompts(examples, tokenizer)[1]
        assert (
            told.startswith("the model's chat template leaves out `tools`") and not about_prompts(examples[:1], chat)[1]
        )
    assert not about_prompts(examples, chat_tokenizer(TOOLS + CHATML))[1]
    with pytest.warns(UserWarning, match="leaves out `tools`"):
        prompt_ids(chat, examples[1].prompt)


# What check says


def test_a_prompt_is_shown_as_the_model_reads_it() -> None:
    ids = prompt_ids(chat, user("a<eos>\nb"))
    shown = "⟦<|im_start|>⟧user⏎a<eos>⏎b⟦<|im_end|>⟧⏎⟦<|im_start|>⟧assistant⏎"
    assert prompt_as_read(chat, ids) == shown


def test_sentences_about_prompts() -> None:
    text, messages = Example("a/0", BarePrompt("2+2=")), Example("a/1", user("2+2="))
    marked = Example("a/2", BarePrompt(rendered("?")))
    again = Example("a/3", BarePrompt(rendered("?"), form="rendered"))
    assert about_prompts([messages], chat) == about_prompts([text], plain) == ([], [])
    assert "without its chat template, as in TRL" in about_prompts([text], chat)[0][0]
    assert "messages are joined without marks" in about_prompts([messages], plain)[0][0]
    assert "rendered already" in about_prompts([again], chat)[0][0] and not about_prompts([again], chat)[1]
    for example in (marked, Example("a/2", user(rendered("?")))):
        [told] = about_prompts([text, example], chat)[1]
        assert told.startswith("1 of 2 prompts hold marks of a chat template ('a/2': <|im_start|>)")
    assert not about_prompts([Example("a/4", user("<eos>"))], chat)[1]  # no mark of this template


def test_check_counts_what_the_policy_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With tools in the prompt, a template that leaves them out, and a prompt that the reader sees."""
    from lmgym.cli.main import main

    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    policy = {**runs.TINY["policy"], "template": template}
    policy["architecture"] = runs.ARCHITECTURE | {"max_position_embeddings": 2048}
    for how, lost in (("system", False), ("template", True)):
        env = {"name": "conversation", "tools": ["calculator"], "tool_prompt": how}
        recipe = runs.write(tmp_path / "recipe.yaml", policy=policy, env=env, task="arithmetic")
        main(["check", str(recipe)])
        said = capsys.readouterr().out
        [shown] = [line for line in said.splitlines() if "as the model reads it" in line]
        [counted] = [line for line in said.splitlines() if "prompt tokens: " in line]
        most = int(counted.split("to ")[1].split(";")[0])
        assert ("calculator" in shown) == (not lost) == (most > 300) and shown.endswith("[assistant]")
        assert ("\n! the model's chat template leaves out `tools`" in said) == lost
