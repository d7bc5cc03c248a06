"""Built-in models and tokenizers: functions of the seed, without dropout, as good from a folder as when built."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel

from lmgym.core.errors import LmgymError
from lmgym.models.builtin import (
    MODELS,
    TOKENIZERS,
    builtin_model,
    builtin_tokenizer,
    byte_tokenizer,
    is_builtin,
    number_tokenizer,
)
from lmgym.models.load import load_policy
from lmgym.models.policy_section import PolicySection
from lmgym.tasks.base import load_task
from lmgym.text import chat

SMALLER: dict[str, dict[str, Any]] = {  # one field each, by the name that the model's own configuration gives it
    "builtin:tiny": {"num_hidden_layers": 1},
    "builtin:tiny_gpt2": {"n_layer": 1},
    "builtin:tiny_t5": {"num_layers": 1},
    "builtin:tiny_bart": {"encoder_layers": 1, "decoder_layers": 1},
}
UNTRAINED = [name for name, family in MODELS.items() if family.weights is None]
IDS = torch.tensor([[1, 10, 11, 12, 60], [1, 5, 99, 4, 3]])


def logits(model: PreTrainedModel) -> Tensor:
    """[2, 5, vocabulary], of the decoder where there are two halves."""
    given = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=IDS, **given).logits


def test_ends_that_are_no_numbers_get_a_sentence() -> None:
    policy = load_policy(PolicySection(device="cpu"))
    policy.model.generation_config.eos_token_id = [7, "5.23.0"]
    with pytest.raises(LmgymError, match=r"eos_token_id in generation_config\.json must be token numbers, not '5\.23"):
        _ = policy.stop_ids


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_model_is_a_function_of_the_seed(name: str) -> None:
    tokenizer = number_tokenizer()
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = builtin_model(name, tokenizer, SMALLER[name], seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)  # and leaves the global generator alone
    torch.manual_seed(6)
    again, other = (builtin_model(name, tokenizer, SMALLER[name], seed) for seed in (3, 4))
    weights = first.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in again.state_dict().items())
    assert any(not torch.equal(weights[key], value) for key, value in other.state_dict().items())
    assert all(value.dtype == torch.float32 for value in weights.values())


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_model_begins_near_uniform_small_and_without_dropout(name: str) -> None:
    tokenizer = number_tokenizer()
    model = builtin_model(name, tokenizer, {}, seed=0)
    assert model.num_parameters() < 1_000_000
    evaluated, trained = logits(model.eval()), logits(model.train())
    assert torch.equal(evaluated, trained)
    assert evaluated.shape == (2, 5, len(tokenizer))
    log_probs = evaluated.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    assert entropy.min() > 3.5  # of log 103 = 4.63: every number is tried
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 2)
    if model.config.is_encoder_decoder:
        assert model.config.decoder_start_token_id == {"t5": 0, "bart": 1}[model.config.model_type]


def test_the_trained_model_can_add_and_keeps_its_shape() -> None:
    tokenizer = byte_tokenizer()
    model = builtin_model("builtin:sums", tokenizer, {}, seed=0)
    for first, second in ((37, 12), (45, 8), (20, 20)):
        ids = torch.tensor([chat.prompt_ids(tokenizer, f"{first} + {second}\nAnswer:")])
        answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        assert text == f" {first}+{second}={first + second}"
    for arguments in ((tokenizer, {"num_hidden_layers": 1}), (number_tokenizer(), {})):
        with pytest.raises(LmgymError, match="builtin:sums is trained, with builtin:bytes and the architecture"):
            builtin_model("builtin:sums", *arguments, seed=0)


@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
@pytest.mark.parametrize("name", UNTRAINED)
def test_a_folder_gives_back_the_same_model_and_tokenizer(name: str, tokenizer_name: str, tmp_path: Path) -> None:
    tokenizer = builtin_tokenizer(tokenizer_name)
    model = builtin_model(name, tokenizer, SMALLER[name], seed=0).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    auto = AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModelForCausalLM
    read = auto.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(read), logits(model))
    for settings in (read.config, read.generation_config):
        assert getattr(settings, "forced_bos_token_id", None) is None
        assert getattr(settings, "forced_eos_token_id", None) is None
    words = AutoTokenizer.from_pretrained(tmp_path)
    assert words.get_vocab() == tokenizer.get_vocab() and words.eos_token_id == 2
    ids = chat.prompt_ids(tokenizer, "7 99 0")
    assert chat.prompt_ids(words, "7 99 0") == ids
    assert chat.decode(words, ids) == "7 99 0"


@pytest.mark.slow
@given(st.lists(st.integers(0, 99), max_size=20))
def test_numbers_are_one_token_each(numbers: list[int]) -> None:
    tokenizer = number_tokenizer()
    text = " ".join(map(str, numbers))
    ids = chat.prompt_ids(tokenizer, text)
    assert ids == [1, *(number + 3 for number in numbers)]
    assert chat.decode(tokenizer, [*ids, 2, 0]) == text


@given(st.text(max_size=40).filter(lambda text: "<" not in text))
def test_bytes_take_any_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = chat.prompt_ids(tokenizer, text)
    assert ids[0] == 1 and len(ids) == 1 + len(text.encode())
    assert chat.decode(tokenizer, ids) == text


@pytest.mark.parametrize("word", ["hello", "100", "07", "-1", "1."])
def test_a_word_that_is_no_number_is_refused(word: str, tmp_path: Path) -> None:
    tokenizer = number_tokenizer()
    with pytest.raises(LmgymError, match=f"knows the whole numbers 0 to 99 .* the text has '{word}'"):
        chat.prompt_ids(tokenizer, f"1 {word} 2")
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(Exception, match=r"Missing \[UNK\] token"):  # transformers' class, and tokenizers' own words
        chat.prompt_ids(AutoTokenizer.from_pretrained(tmp_path), f"1 {word} 2")


def test_the_synthetic_prompts_suit_the_tokenizers() -> None:
    numbers, byte = number_tokenizer(), byte_tokenizer()
    for split in ("train", "validation", "test"):
        for example in load_task("increasing_numbers", split):
            assert chat.prompt_ids(numbers, example.prompt) == [1, int(example.prompt) + 3]
            assert len(chat.prompt_ids(byte, example.prompt)) == 1 + len(example.prompt)


def test_builtin_tiny_is_the_llama() -> None:
    tokenizer = byte_tokenizer()
    named, again = (builtin_model("builtin:tiny", tokenizer, {}, 1) for _ in range(2))
    assert torch.equal(named.lm_head.weight, again.lm_head.weight)
    assert named.config.model_type == "llama" and named.num_parameters() == 837_120


@pytest.mark.parametrize(
    ("name", "architecture", "sentence"),
    [
        ("builtin:tiny", {"hidden_sise": 8}, r"policy.architecture.hidden_sise'; did you mean 'hidden_size'\?"),
        ("builtin:tiny", {"d_model": 8}, r"unknown key 'policy.architecture.d_model'"),
        ("builtin:tiny_gpt2", {"n_head": 5}, r"policy.architecture: .*divisible by num_heads"),
        ("builtin:tiny", {"num_key_value_heads": 3}, r"policy.architecture: the model cannot run: .* size of tensor a"),
        ("builtin:tiny_t5", {"relative_attention_num_buckets": 0}, r"policy.architecture: .* cannot run: div"),
        ("builtin:tiny", {"num_hidden_layers": 2**31}, r"num_hidden_layers is 2147483648; a built-in .* at most 1000"),
        ("builtin:tiny_gpt2", {"n_embd": 10**9}, r"policy.architecture.n_embd is 1000000000; .* at most 131072"),
        ("builtin:tiny_gpt2", {"n_emb": 8}, r"policy.architecture.n_emb'; did you mean 'n_embd'\?"),
        ("builtin:tiny_t5", {"hidden_size": 8}, r"unknown key 'policy.architecture.hidden_size'"),
        ("builtin:tiny_t5", {"d_modell": 8}, r"did you mean 'd_model'\?"),
        ("builtin:tiny_t5", {"feed_forward_proj": "a-b-c"}, r"policy.architecture: .*feed_forward_proj"),
        ("builtin:tiny_t5", {"tie_word_embeddings": False}, r"unknown key 'policy.architecture.tie_word_embeddings'"),
        ("builtin:tiny_bart", {"d_model": 30}, r"policy.architecture: .*divisible by num_heads"),
        ("builtin:tiny_gtp2", {}, r"policy.model: there is no 'builtin:tiny_gtp2'; did you mean 'builtin:tiny_gpt2'\?"),
    ],
)
def test_what_cannot_be_built_is_named(name: str, architecture: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        builtin_model(name, number_tokenizer(), architecture, seed=0)


def test_names() -> None:
    assert all(map(is_builtin, [*MODELS, *TOKENIZERS])) and not is_builtin("gpt2")
    assert builtin_tokenizer().get_vocab() == byte_tokenizer().get_vocab()
    with pytest.raises(LmgymError, match=r"policy.tokenizer: there is no 'builtin:byte'; did you mean 'builtin:bytes'"):
        builtin_tokenizer("builtin:byte")
