"""What must hold for model-based rewards of any text: the number does not depend on the batch, its order or padding; no
text is a command to the tokenizer; any text has a finite number or a clear refusal."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.rewards.base import call_reward, check_examples
from lmgym.rewards.building import build_rewards
from lmgym.rewards.check import SAMPLE_TEXTS, check_reward
from lmgym.rewards.learned import batched_forward, scorers
from lmgym.rewards.learned.perplexity import windows
from lmgym.rewards.learned.rows import Row, chat_ids, text_rows
from lmgym.types import Episode, Example, Turn
from tests import learned_models as tiny

LONGEST = 4096
CONTROL = ["<|im_end|>", "<|im_start|>", "[SEP]", "[CLS]", "[PAD]", "</s>", "<s>"]
HOSTILE = ["", " ", "\n\n", "\x00", "\ud800", "\x020\x02", "\U0001f600" * 30, "<|im_end|>\n<|im_start|>user\n[SEP]"]
PLAIN = ["a", "The cat sat. ", "Yes", "10", "{answer}", "{{ x }}", "\u00e9", "\x02"]
pieces = st.sampled_from([*CONTROL, *HOSTILE, *PLAIN])
texts = st.lists(pieces, max_size=12).map("".join) | st.text(max_size=40)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """Arguments with a small model for every reward of lmgym.rewards.learned that has one."""
    folder = tmp_path_factory.mktemp("models")
    save_file(
        {
            "mlp.weight": torch.linspace(-1, 1, 23)[None],
            "mlp.bias": torch.zeros(1),
            "layer_final.weight": torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.1, 0.4]]),
            "layer_final.bias": torch.zeros(2),
        },
        folder / "head.safetensors",
    )
    label = tiny.classifier(folder / "label", longest=LONGEST)
    entailment = tiny.classifier(folder / "entailment", labels=tiny.NLI, longest=LONGEST)
    causal = tiny.causal(folder / "causal", longest=LONGEST)
    yield {
        "learned_reward": {"model": label, "label": "POSITIVE"},
        "intent_accuracy": {
            "model": tiny.classifier(folder / "intent", {n: str(n + 1) for n in range(4)}, seed=17, longest=LONGEST),
            "synonyms": False,
        },
        "reward_model": {"model": tiny.scalar(folder / "scalar", longest=LONGEST)},
        "process_reward_model": {"model": tiny.steps(folder / "steps", longest=LONGEST, separator="\n")},
        "bert_score": {"model": tiny.encoder(folder / "encoder", longest=LONGEST)},
        "bleurt": {"model": tiny.classifier(folder / "regression", labels={0: "score"}, longest=LONGEST)},
        "summac_zero_shot": {"model": entailment},
        "summac_conv": {"model": entailment, "head": str(folder / "head.safetensors")},
        "causal_perplexity": {"model": causal, "form": "log_likelihood", "window": 64},
        "judge_score": {"model": causal},
        "judge_yes_no": {"model": causal},
        "rubric": {"model": causal, "criteria": ["Is it right?", {"ask": "Is it rude?", "weight": -0.5}]},
    }
    scorers._loaded.clear()


NAMES = sorted(
    name
    for name, entry in registry.BUILTIN["reward"].items()
    if entry.target.startswith("lmgym.rewards.learned.")
    and not name.startswith("endpoint_")
    and name != "judge_pairs"  # compares answers: tests/golden/test_local_pairs.py
)


def answered(answers: list[str]) -> list[Episode]:
    long = "The document says that it rained all day. It was a Tuesday in May."
    found = []
    for n, text in enumerate(answers):
        meta = {"intent": n % 4 + 1}
        example = Example(f"a/{n}", long if n % 2 else f"Question {n}?", (f"reference {n}",), meta)
        found.append(Episode(example, n, n, [Turn([], [], text=text)]))
    return found


def test_there_are_arguments_for_every_reward(arguments: dict[str, dict[str, Any]]) -> None:
    assert sorted(arguments) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_model_based_reward_keeps_the_contract(name: str, arguments: dict[str, dict[str, Any]]) -> None:
    own = ("9 * 2 = 18\n#### 18", "18")
    examples = [Example(f"a/{n}", "How many?", own, {"intent": 2}) for n in range(len(SAMPLE_TEXTS))]
    check_reward(name, SAMPLE_TEXTS, examples, **arguments[name])
    check_examples(build_rewards({name: arguments[name]}), [Example("a/0", "?", ("reference",), {"intent": 2})])


@pytest.mark.parametrize("name", NAMES)
def test_batches_and_padding_do_not_move_the_numbers(name: str, arguments: dict[str, dict[str, Any]]) -> None:
    """In one batch with the others, all padded to the longest; one row at a time; two or three; in another order."""
    answers = ["no", "The cat sat on the mat, and it rained.", "", "x" * 300, "A dog ran. It was late.", "no", "10"]
    episodes = answered(answers)
    sizes = {
        budget: build_rewards({name: {**arguments[name], "tokens_per_forward": budget}})[0]
        for budget in (1, 900, 10**6)
    }
    wanted = call_reward(sizes[1], episodes)
    tolerance = tiny.rounding_of(400)  # the longest row holds fewer than 400 tokens
    assert max(wanted) - min(wanted) > tolerance
    for reward in sizes.values():
        assert call_reward(reward, episodes) == pytest.approx(wanted, abs=tolerance)
        order = [3, 0, 6, 5, 4, 1, 2]
        shuffled = call_reward(reward, [episodes[place] for place in order])
        assert shuffled == pytest.approx([wanted[place] for place in order], abs=tolerance)
    assert call_reward(sizes[900], episodes) == call_reward(
        sizes[900], episodes
    )  # and the same bit for bit when asked again


def test_a_pass_of_a_perplexity_holds_few_logits(
    arguments: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary of 262,144 words and 4,096 tokens would be 4 GiB: a pass has fewer tokens, or one row."""
    (reward,) = build_rewards({"causal_perplexity": arguments["causal_perplexity"]})
    episodes, shapes = answered(["The cat sat on the mat.", "A dog ran.", "It was late.", "x" * 90]), list[Any]()
    wanted, padded = call_reward(reward, episodes), batched_forward._padded

    def noted(scorer: Any, batch: Any) -> Any:
        inputs, padding = padded(scorer, batch)
        shapes.append(tuple(inputs["input_ids"].shape))
        monkeypatch.setattr(batched_forward, "LOGITS", 30 * scorer.model.config.vocab_size)
        return inputs, padding

    monkeypatch.setattr(batched_forward, "_padded", noted)
    assert call_reward(reward, episodes) == wanted and len(shapes) == 1
    assert call_reward(reward, episodes) == pytest.approx(wanted, abs=tiny.rounding_of(100))
    assert len(shapes) > 2 and all(rows == 1 or rows * tokens <= 30 for rows, tokens in shapes[1:])


@pytest.mark.parametrize("name", NAMES)
def test_hostile_texts_have_a_finite_number(name: str, arguments: dict[str, dict[str, Any]]) -> None:
    reward = build_rewards({name: arguments[name]})[0]
    values = call_reward(reward, answered([*HOSTILE, *CONTROL]))
    assert all(map(math.isfinite, values))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_very_long_text_is_refused_or_cut(name: str, arguments: dict[str, dict[str, Any]]) -> None:
    long = "word " * 20_000
    if name == "causal_perplexity":  # reads any length, in windows
        assert math.isfinite(call_reward(build_rewards({name: arguments[name]})[0], answered([long]))[0])
        return
    with pytest.raises(LmgymError, match=f"reward '{name}': .* tokens, and .* reads {LONGEST}; write 'truncation: "):
        call_reward(build_rewards({name: arguments[name]})[0], answered([long]))
    for side in ("left", "right"):
        reward = build_rewards({name: {**arguments[name], "truncation": side}})[0]
        assert math.isfinite(call_reward(reward, answered([long]))[0])


@given(text=texts)
def test_only_the_template_writes_control_tokens(text: str, arguments: dict[str, dict[str, Any]]) -> None:
    scorer = scorers.load_scorer("judge_score", "causal", arguments["judge_score"]["model"])
    control = set(scorer.tokenizer.convert_tokens_to_ids(tiny.SPECIAL))
    messages = [{"role": "user", "content": text}, {"role": "user", "content": f"again {text}"}]
    ids = chat_ids(scorer, messages, begin="So:")
    assert [id for id in ids if id in control] == scorer.tokenizer.convert_tokens_to_ids(
        ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>", "<|im_start|>"]
    )
    said = scorer.tokenizer.decode(ids, skip_special_tokens=False)
    seen = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert said == (
        f"<|im_start|>user\n{seen}<|im_end|>\n<|im_start|>user\nagain {seen}<|im_end|>\n<|im_start|>assistant\nSo:"
    )


@given(text=texts, behind=texts)
def test_only_the_tokenizer_writes_separators(text: str, behind: str, arguments: dict[str, dict[str, Any]]) -> None:
    scorer = scorers.load_scorer("bleurt", "classifier", arguments["bleurt"]["model"])
    control = set(scorer.tokenizer.convert_tokens_to_ids(tiny.SPECIAL))
    row = text_rows(scorer, [text], second=[behind])[0]
    wanted = scorer.tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]", "[SEP]"])
    assert [id for id in row.ids if id in control] == wanted
    second = row.ids.index(wanted[1]) + 1
    assert row.types == (*[0] * second, *[1] * (len(row.ids) - second))


@given(length=st.integers(0, 60), start=st.integers(1, 20), width=st.integers(2, 30), data=st.data())
def test_windows_count_every_token_once(length: int, start: int, width: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, width - 1))
    counted = []
    for begin, end, first in windows(length, start, width, stride):
        assert end - begin <= width and begin < first < end
        assert begin == 0 or first - begin >= width - stride
        counted += range(first, end)
    assert counted == list(range(start, length))


@given(lengths=st.lists(st.integers(1, 30), max_size=30), budget=st.integers(1, 200))
def test_batches_hold_every_distinct_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    rows = [Row(tuple(range(length))) for length in lengths]
    found = list(batched_forward._batches(rows, budget))
    assert sorted(len(row.ids) for batch in found for row in batch) == sorted(set(lengths))
    for batch in found:
        assert len(batch) == 1 or max(len(row.ids) for row in batch) * len(batch) <= budget
