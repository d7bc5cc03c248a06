"""Prompts that are too long: cut as Hugging Face's truncation cuts them, the same everywhere, and never in silence."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from lmgym.cli.main import main
from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.models.model_info import read_model_info
from lmgym.text.chat import Cut, answer_ids, prompt_ids, source_ids
from lmgym.training.planning.preflight import check_model
from tests import models, runs

AROUND = {  # how a tokenizer ends and begins a text, by the models that are known for it
    "none (GPT-2)": ("", ""),
    "end (T5)": ("", "<eos>"),
    "beginning (Llama)": ("<bos>", ""),
    "both (BART)": ("<bos>", "<eos>"),
}
# Without "<", lest hypothesis write a special token. BOS in front of a text is found again even so: see below.
texts = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=30)


def tokenizer_of(kind: str, side: str = "left") -> Any:
    tokenizer = models.byte_tokenizer()
    begin, end = AROUND[kind]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A {end}".strip(), special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    tokenizer.truncation_side = side
    return tokenizer


@pytest.mark.parametrize("kind", AROUND)
@pytest.mark.parametrize("side", ["left", "right"])
@given(text=texts, limit=st.integers(3, 20))
def test_cut_as_hugging_face_truncates(kind: str, side: Any, text: str, limit: int) -> None:
    tokenizer = tokenizer_of(kind, side)
    theirs = tokenizer(text, truncation=True, max_length=limit)["input_ids"]
    assert source_ids(tokenizer, text, None, Cut(limit, side)) == theirs
    if not AROUND[kind][1]:  # else a prompt to go on from has no end mark, and the limit is of what is read
        assert prompt_ids(tokenizer, text, None, Cut(limit, side)) == theirs


@given(text=texts, limit=st.integers(2, 20))
def test_a_prompt_to_go_on_from_has_no_end_mark_and_as_many_tokens(text: str, limit: int) -> None:
    tokenizer = tokenizer_of("both (BART)")
    whole, found = prompt_ids(tokenizer, text), prompt_ids(tokenizer, text, None, Cut(limit, "left"))
    assert found[0] == tokenizer.bos_token_id and tokenizer.eos_token_id not in found
    assert len(found) == min(limit, len(whole)) and found[1:] == whole[1:][len(whole) - len(found) :]


def test_a_special_token_in_the_text_is_text() -> None:
    tokenizer = tokenizer_of("both (BART)")
    assert source_ids(tokenizer, "<bos>ab", None, Cut(4, "right")) == [1, *_bytes(tokenizer, "<b"), 2]
    assert source_ids(tokenizer, "ab<eos>", None, Cut(4, "left")) == [1, *_bytes(tokenizer, "s>"), 2]


def test_what_is_said_behind_a_cut_prompt_is_what_is_said_behind_a_whole_one() -> None:
    plain = models.tokenizer()
    assert answer_ids(plain, "a" * 50, "b") == [*_bytes(plain, "b"), plain.eos_token_id]


def test_what_cannot_be_cut_is_refused() -> None:
    both = tokenizer_of("both (BART)")
    with pytest.raises(LmgymError, match=r"max_prompt_tokens is 2, and .* puts 2 special tokens .* at least 3"):
        source_ids(both, "abc", None, Cut(2))
    odd = _Odd(tokenizer_of("both (BART)"))
    with pytest.raises(LmgymError, match="unclear where to cut"):
        source_ids(odd, "abcdef", None, Cut(4))
    chat = models.byte_tokenizer()
    chat.chat_template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    assert len(prompt_ids(chat, "abc", None, Cut(5))) == 5
    with pytest.raises(LmgymError, match=r"a chat prompt has 6 tokens, more than policy\.max_prompt_tokens \(5\)"):
        source_ids(chat, "abcd", None, Cut(5))


def test_an_environment_writes_its_own_prompts() -> None:
    tree = runs.tiny(task=None, env={"name": "guess_number"}, rewards=None)
    check_model(config := build_config(tree), [], read_model_info(config.policy))
    tree["policy"] = {**tree["policy"], "max_prompt_tokens": 9}
    with pytest.raises(LmgymError, match=r"max_prompt_tokens cuts the prompts of a task, .* 'guess_number'"):
        check_model(config := build_config(tree), [], read_model_info(config.policy))


@pytest.mark.parametrize("model", ["builtin:tiny", "builtin:tiny_t5"])
def test_training_evaluation_and_demonstration_read_the_same(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = {"model": model, "device": "cpu", "max_prompt_tokens": 12, "truncation_side": "left"}
    policy |= {"max_reference_tokens": 3}
    policy |= {"architecture": runs.ARCHITECTURE} if model == "builtin:tiny" else {}
    stages = [{"name": "warm", "algorithm": "supervised"}, {"name": "rl"}]
    (tmp_path / "rows.jsonl").write_text(_rows())
    task = {"name": "jsonl", "path": str(tmp_path / "rows.jsonl"), "test": 0.5}
    changes = {"task": task, "stages": stages, "steps": 1, "logs": {"rollouts": "all", "samples": 8}}
    recipe = runs.write(tmp_path / "recipe.yaml", policy=policy, **changes)
    assert main(["train", str(recipe), f"out={tmp_path / 'run'}"]) == 0
    said = capsys.readouterr().out
    for where in ("stage warm", "stage rl", "evaluation on test"):
        cut = r"\d+ of \d+ prompts are longer than policy\.max_prompt_tokens \(12\); these lose their beginning"
        assert re.search(f"{where}: {cut}", said)
    imitated = re.findall(
        r"(stage \w+): (\d+) of (\d+) references are longer than policy\.max_reference_tokens \(3\)", said
    )
    assert [where for where, *_ in imitated] == ["stage warm"] and 0 < int(imitated[0][1]) < int(imitated[0][2])
    tokenizer, kinds = models.tokenizer(), set()
    for record in runs.records(tmp_path / "run" / "rollouts.jsonl"):
        read = source_ids if model == "builtin:tiny_t5" else prompt_ids
        whole = read(tokenizer, record["prompt"])
        turn = record["turns"][0]
        found = turn["source_ids"] if model == "builtin:tiny_t5" else turn["prompt_ids"]
        assert found == (whole if len(whole) <= 12 else [whole[0], *whole[-11:]])
        if (record["kind"], record["stage_name"]) == ("train", "warm"):
            whole_answer = [*tokenizer(record["references"][0], add_special_tokens=False)["input_ids"], models.EOS]
            assert turn["action_ids"] == whole_answer[:3]
        kinds.add((record["kind"], record["stage_name"], len(whole) > 12))
    assert {(kind, name, True) for kind in ("train", "evaluation") for name in ("warm", "rl")} <= kinds


def test_every_verb_says_what_it_cuts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(_rows())
    task = {"name": "jsonl", "path": str(tmp_path / "rows.jsonl"), "test": 0.5}
    policy = {**runs.TINY["policy"], "max_prompt_tokens": 12, "truncation_side": "right"}
    recipe = runs.write(tmp_path / "recipe.yaml", policy=policy, task=task)
    expected = r"(\d+) of \d+ prompts are longer than policy\.max_prompt_tokens \(12\); these lose their end"
    main(["check", str(recipe)])
    out = capsys.readouterr().out
    assert len(re.findall(expected, out)) == 2  # what is trained on, and what is asked
    assert int(re.findall(expected, out)[0]) > 0 and "with prompts of 12 tokens" in out
    assert main(["eval", str(recipe)]) == 0
    assert re.search(expected, capsys.readouterr().out)
    assert main(["compare", str(recipe), "builtin:tiny"]) == 0
    assert len(re.findall(expected, capsys.readouterr().out)) == 2
    assert main(["generate", str(recipe), "--prompt", "abcdefghijklmnop", "--prompt", "abcdefghijkXYZ"]) == 0
    shown = capsys.readouterr()
    assert "2 of 2 prompts are longer" in shown.err
    one, other = shown.out.splitlines()[0], shown.out.splitlines()[-1]
    assert one.removeprefix("abcdefghijklmnop") == other.removeprefix("abcdefghijkXYZ")  # both read abcdefghijk
    assert main(["generate", str(recipe), "policy.truncation_side=left", "--prompt", "ab"]) == 0
    assert "0 of 1 prompts" in capsys.readouterr().err


def test_a_chat_that_is_too_long_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    tokenizer = models.byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    tokenizer.save_pretrained(folder)
    models.llama().save_pretrained(folder)
    policy = {"model": str(folder), "device": "cpu", "max_prompt_tokens": 4}
    recipe = runs.write(tmp_path / "recipe.yaml", policy=policy)
    assert main(["train", str(recipe), f"out={tmp_path / 'run'}"]) == 1
    said = capsys.readouterr().err
    assert re.search(r"example 'arithmetic/train/\d+': a chat prompt has \d+ tokens, more than policy\.max_p", said)
    assert main(["train", str(recipe), "policy.max_prompt_tokens=0", f"out={tmp_path / 'run'}"]) == 1
    assert "policy.max_prompt_tokens is 0; it must be at least 1" in capsys.readouterr().err


def _rows() -> str:
    rows = [{"prompt": f"{'long ' * (n % 4)}question {n}", "references": f"answer {n}"} for n in range(24)]
    rows += [{"prompt": f"q{n}", "references": "a"} for n in range(4)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def _bytes(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class _Odd:
    """A tokenizer that writes a text otherwise where special tokens stand around it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.eos_token_id, self.chat_template = tokenizer, tokenizer.eos_token_id, None

    def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> Any:
        text = text.upper() if add_special_tokens else text
        return self.tokenizer(text, add_special_tokens=add_special_tokens, **options)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)
