"""Answers end as the chat template ends them: targets, demonstrations, pairs, what the sampler stops at, and what is
appended. For templates of the kinds that are about, with tokenizers whose end of sequence is the same token, or not."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmgym.cli.main import main
from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.inference.base import Completion, Request, Sampling
from lmgym.models.policy import Policy
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.given_answers import given_turn
from lmgym.rollouts.rollout import collect, demonstrate
from lmgym.text.answer_ends import end_id, template_notes
from lmgym.text.chat import answer_ids, appended_ids, prompt_ids
from lmgym.types import Example, Message
from tests import models, runs

GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim"
    " + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN3 = (  # thoughts of earlier answers are left out, and empty ones stand before the last answer
    "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + m.content + '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ '<bos>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}"
    "{{ m.content + '<eos>' }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<eos>' }}{% endif %}"
)
WITHOUT_MARK = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
WITHOUT_PROMPT = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
NAMES = [
    *("<start_of_turn>", "<end_of_turn>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|end|>", "<|user|>", "<|assistant|>", "[INST]", "[/INST]"),
]
TEMPLATES = {
    "gemma": (GEMMA, "<end_of_turn>"),
    "chatml": (CHATML, "<|im_end|>"),
    "llama 3": (LLAMA3, "<|eot_id|>"),
    "qwen 3": (QWEN3, "<|im_end|>"),
    "mistral": (MISTRAL, "<eos>"),
    "phi 3": (PHI3, "<|end|>"),
    "without a mark": (WITHOUT_MARK, "<eos>"),
}
every_template = pytest.mark.parametrize("name", TEMPLATES)
same_or_not = pytest.mark.parametrize("own", [True, False], ids=["its end is the tokenizer's", "another end"])
ASKED: list[Message] = [{"role": "user", "content": "1+1?"}]
AGAIN: list[Message] = [{"role": "user", "content": "2+2?"}]


def tokenizer_of(template: str, eos: str = "<eos>") -> Any:
    tokenizer = models.byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": NAMES})
    tokenizer.eos_token, tokenizer.chat_template = eos, template
    return tokenizer


def policy_of(tokenizer: Any) -> Policy:
    """A model without a generation_config: nothing but the tokenizer tells where answers end."""
    model = models.builtin_model("builtin:tiny", tokenizer, {"hidden_size": 16, "num_hidden_layers": 1}, 0)
    model.generation_config.eos_token_id = None
    return Policy(model, tokenizer)


def rendered(tokenizer: Any, messages: list[Message]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class Twice:
    """Two questions."""

    def reset(self, example: Example, seed: int) -> Any:
        self.count = 0
        return ASKED

    def step(self, text: str, stop: str) -> Step:
        self.count += 1
        return Step(messages=AGAIN, terminated=self.count == 2)


class Says:
    """An engine that always gives the same answer."""

    context: int | None = None
    rows = 8

    def __init__(self, ids: list[int], stop: Any) -> None:
        self.ids, self.stop = ids, stop

    def generate(self, requests: Sequence[Request], sampling: Sampling, ended: Any = None) -> list[Completion]:
        return [Completion(list(self.ids), [0.0] * len(self.ids), self.stop) for _ in requests]

    def forget(self, conversations: Sequence[int]) -> None: ...

    def load(self, policy: Any, version: int) -> None: ...


@every_template
@same_or_not
def test_every_target_ends_as_the_template_ends_an_answer(name: str, own: bool) -> None:
    """References, rated answers and demonstrations; and the sampler stops at what they end with."""
    template, mark = TEMPLATES[name]
    tokenizer = tokenizer_of(template, mark if own else "<eos>")
    end, example = tokenizer.convert_tokens_to_ids(mark), Example("x", "1+1?", ("2",))
    assert end_id(tokenizer) == end
    answer = [*tokenizer("2", add_special_tokens=False)["input_ids"], end]
    actor = Actor(Says([], "eos"), tokenizer)
    assert answer_ids(tokenizer, "1+1?", "2") == given_turn(example, "2", actor).action_ids == answer
    assert answer_ids(tokenizer, "1+1?", "2", start="So: ") == answer
    assert demonstrate([(0, example)], actor, (0,))[0].turns[0].action_ids == answer
    assert policy_of(tokenizer).stop_ids == tuple(sorted({end, tokenizer.eos_token_id}))


@every_template
@same_or_not
def test_a_conversation_of_given_answers_is_what_the_template_writes(name: str, own: bool) -> None:
    template, mark = TEMPLATES[name]
    tokenizer = tokenizer_of(template, mark if own else "<eos>")
    answer = answer_ids(tokenizer, ASKED, "2")
    ids = [*prompt_ids(tokenizer, ASKED), *answer, *appended_ids(tokenizer, ASKED, AGAIN, answer[-1], None, True)]
    written = rendered(tokenizer, [*ASKED, {"role": "assistant", "content": "2"}, *AGAIN])
    assert ids == written if name != "without a mark" else [id for id in ids if id != answer[-1]] == written


@every_template
@pytest.mark.parametrize("ends_with", ["mark", "eos", "nothing"])
def test_an_answer_is_ended_once(name: str, ends_with: str) -> None:
    """By the mark, by another end of sequence, or, if it was cut off, by the template."""
    template, mark = TEMPLATES[name]
    tokenizer = tokenizer_of(template)
    two, end = tokenizer("2", add_special_tokens=False)["input_ids"], tokenizer.convert_tokens_to_ids(mark)
    said = {"mark": [*two, end], "eos": [*two, tokenizer.eos_token_id], "nothing": two}[ends_with]
    engine = Says(said, "length" if ends_with == "nothing" else "eos")
    [episode] = collect([(0, Example("x", "?"))], Actor(engine, tokenizer), Sampling(), (0, "test"), Twice)
    between = tokenizer.decode([*said[len(two) :], *episode.turns[1].prompt_ids]).split("2+2?")[0]
    counts = {one: between.count(one) for one in {mark, "<eos>"}}
    assert "user" in between or name == "mistral"
    wanted = "<eos>" if ends_with == "eos" else mark
    assert counts == {mark: 0, "<eos>": 0} | {wanted: int(ends_with != "nothing" or name != "without a mark")}


def test_the_template_is_read_again_when_it_has_changed() -> None:
    tokenizer = tokenizer_of(GEMMA)
    first = end_id(tokenizer)
    tokenizer.chat_template = LLAMA3
    assert tokenizer.convert_ids_to_tokens([first, end_id(tokenizer)]) == ["<end_of_turn>", "<|eot_id|>"]
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    assert end_id(tokenizer) == tokenizer.eos_token_id and template_notes(tokenizer) == ("", "")
    tokenizer.chat_template = None
    assert end_id(tokenizer) == tokenizer.eos_token_id and template_notes(tokenizer) == ("", "")
    tokenizer.eos_token = None
    with pytest.raises(LmgymError, match="no end-of-sequence token"):
        answer_ids(tokenizer, "1+1?", "2")


@every_template
def test_what_a_template_does_is_said_where_it_is_unusual(name: str) -> None:
    about_end, spoils = template_notes(tokenizer_of(TEMPLATES[name][0]))
    expected = {
        "mistral": "",
        "without a mark": "writes no control token behind an answer, so a target ends with <eos>",
    }.get(name, f"a target ends with {TEMPLATES[name][1]}, as in the chat template, and an answer at it or <eos>")
    assert about_end.endswith(expected) and bool(about_end) == bool(expected) and not spoils


def test_check_says_how_answers_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = policy_of(tokenizer_of(WITHOUT_PROMPT))
    policy.model.config.eos_token_id = None
    policy.save_pretrained(tmp_path / "model")
    (tmp_path / "model/generation_config.json").unlink(missing_ok=True)
    section = {"model": str(tmp_path / "model"), "device": "cpu"}
    recipe = runs.write(tmp_path / "recipe.yaml", policy=section, out=str(tmp_path / "run"))
    main(["check", str(recipe)])
    said = capsys.readouterr().out
    assert "a target ends with <|im_end|>, as in the chat template, and an answer at it or <eos>" in said
    assert r"! the chat template has no generation prompt: it writes '<|im_start|>assistant\n' before an answer" in said
    assert "answers end at: <eos> (2), <|im_end|>" in said
