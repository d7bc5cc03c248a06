"""Packed bases, adapters and what they are compared with, export, and the estimate of memory.

What packs weights runs where bitsandbytes is installed and is skipped elsewhere; refusals are tested everywhere.
"""

import importlib.util
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from lmgym.batch import Batch, collate
from lmgym.cli.main import main
from lmgym.config.build import build_config
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.inference.base import Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.logs.console import Console
from lmgym.models import copies, lora, quantization
from lmgym.models.builtin import builtin_model, byte_tokenizer
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.shapes import Shapes, shapes_of
from lmgym.training.begin_stage import begin_stage
from lmgym.training.model_card import _public
from lmgym.training.planning.memory import estimate
from lmgym.training.planning.memory_passes import largest_pass
from lmgym.training.planning.memory_table import Estimate, Part
from lmgym.training.setup import start
from lmgym.types import Episode, Example, Turn
from tests import models, rounding, runs
from tests.runs import complaint

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes (lmgym[quantised])"
)
KINDS: dict[str, dict[str, Any]] = {
    "builtin:tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                     "num_key_value_heads": 2, "max_position_embeddings": 128},
    "builtin:tiny_gpt2": {"n_embd": 64, "n_layer": 1, "n_positions": 128},
    "builtin:tiny_t5": {"num_layers": 1},
}  # fmt: skip
LORA = {"lora_rank": 4, "lora_alpha": 12}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model folder of each kind: only what is read from a folder can be packed."""
    found = {}
    for kind, architecture in KINDS.items():
        found[kind] = tmp_path_factory.mktemp("models") / kind.removeprefix("builtin:")
        model = models.sharpen(builtin_model(kind, byte_tokenizer(), architecture, 0), scale=0.1)
        model.save_pretrained(found[kind])
        byte_tokenizer().save_pretrained(found[kind])
    return found


def disturbed(policy: Policy, scale: float = 0.05) -> Policy:
    """Adapters that say something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return policy


def sampled(policy: Policy, count: int = 6) -> Batch:
    """A batch of the policy's own answers, with the log-probabilities that its sampler reports."""
    ids = [(1, *range(40, 45 + place % 3)) for place in range(count)]
    if policy.encoder_decoder:
        requests = [Request(policy.decoder_start, seeds.key(0, n), one) for n, one in enumerate(ids)]
    else:
        requests = [Request(one, seeds.key(0, n)) for n, one in enumerate(ids)]
    episodes = []
    for place, answer in enumerate(Sampler(policy).generate(requests, Sampling(max_new_tokens=8))):
        turn = Turn(list(requests[place].prompt_ids), answer.ids, answer.logprobs)
        turn.source_ids = list(requests[place].source_ids)
        episodes.append(Episode(Example("x", "?"), place % 3, place, [turn], score=float(place)))
    return collate(episodes)


def storages(*parts: Any) -> set[int]:
    """Where the parameters of some models lie."""
    return {p.untyped_storage().data_ptr() for model in parts for p in model.parameters()}


# ---------------------------------------------------------------- packed bases: refusals


def test_packed_weights_need_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", policy={"model": "some/model", "quantise": "4bit"})
    said = complaint(capsys, "train", recipe, f"out={tmp_path / 'run'}")
    assert "recipe.yaml: policy.quantise packs weights that then cannot train; add policy.lora_rank" in said
    recipe = runs.write(tmp_path / "recipe.yaml", policy={"model": "some/model", "quantise": "3bit", "lora_rank": 4})
    assert "key 'policy.quantise': " in complaint(capsys, "train", recipe)


@pytest.mark.parametrize("verb", ["train", "eval", "generate", "check"])
def test_without_bitsandbytes_the_extra_is_named_before_anything_is_loaded(
    verb: str,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "bitsandbytes" else find(name, *a)
    )
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("a model was loaded"))
    policy = {"model": str(folders["builtin:tiny"]), "device": "cpu", "quantise": "4bit", **LORA}
    recipe = runs.write(tmp_path / "recipe.yaml", policy=policy)
    prompt = ["--prompt", "1"] if verb == "generate" else []
    said = complaint(capsys, verb, recipe, f"out={tmp_path / 'run'}", *prompt)
    assert said == "policy.quantise needs the library bitsandbytes; pip install 'lmgym[quantised]'"
    assert not (tmp_path / "run").exists()


def fake_bitsandbytes(monkeypatch: pytest.MonkeyPatch, version: str, devices: set[str]) -> None:
    module = ModuleType("bitsandbytes")
    module.__spec__ = importlib.util.spec_from_loader("bitsandbytes", None)
    module.__dict__.update(__version__=version, supported_torch_devices=devices)
    monkeypatch.setitem(sys.modules, "bitsandbytes", module)


def test_a_bitsandbytes_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_bitsandbytes(monkeypatch, "0.47.0", {"cuda"})
    monkeypatch.setattr(quantization, "is_bitsandbytes_available", lambda: True)
    with pytest.raises(
        LmgymError, match=r"policy\.quantise: bitsandbytes 0\.47\.0 computes on cuda, not on cpu; choose"
    ):
        quantization.check_possible(torch.device("cpu"))
    quantization.check_possible(torch.device("cuda"))
    monkeypatch.setattr(quantization, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(LmgymError, match=r"this bitsandbytes is too old; pip install -U 'lmgym\[quantised\]'"):
        quantization.check_possible(torch.device("cuda"))


def test_what_cannot_be_packed_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=r"policy\.quantise: builtin:tiny is a few megabytes of random numbers"):
        load_policy(PolicySection(quantise="4bit", device="cpu", **LORA))
    odd = builtin_model("builtin:tiny", byte_tokenizer(), runs.ARCHITECTURE, 0)
    with pytest.raises(
        LmgymError, match=r"unless 64 divides the inputs of every layer, and model\.layers\.0\.\S+ has 16"
    ):
        quantization.check_layers(odd, "4bit", torch.device("cpu"))
    quantization.check_layers(odd, "8bit", torch.device("cpu"))
    quantization.check_layers(odd, "4bit", torch.device("cuda"))
    packed = tmp_path / "packed"
    shutil.copytree(folders["builtin:tiny"], packed)
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(LmgymError, match=r"policy\.model: the weights of .*packed are stored packed, and lmgym trains"):
        load_policy(PolicySection(model=str(packed), device="cpu"))


# ---------------------------------------------------------------- packed bases: what they do


@pytest.mark.slow
@needs_bitsandbytes
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_policy_samples_what_it_scores_and_keeps_its_adapters(
    kind: str, bits: Any, compute: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    section = PolicySection(model=str(folders[kind]), quantise=bits, device="cpu", compute=compute, **LORA)
    policy = disturbed(load_policy(section))
    assert all(parameter.dtype == torch.float32 for parameter in policy.parameters())
    codes = [p for p in policy.model.parameters() if p.dtype in (torch.uint8, torch.int8)]
    assert len(codes) == sum(1 for _ in quantization.packed_layers(policy.model)) >= 4
    others = {p.dtype for p in policy.model.parameters() if not p.requires_grad} - {torch.uint8, torch.int8}
    assert others == {getattr(torch, compute)}

    batch = sampled(policy)
    scored = policy.compute_logprobs(batch)
    assert batch.logprobs_sampler is not None
    near = rounding.near if compute == "float32" else rounding.near_in_bf16
    rows = [batch[torch.tensor([row])] for row in range(len(batch))]
    alone = torch.cat([policy.compute_logprobs(row).logprobs[row.actions] for row in rows])
    assert near(policy.model, scored.logprobs[batch.actions], batch.logprobs_sampler[batch.actions])
    assert near(policy.model, alone, scored.logprobs[batch.actions])  # nobody's depend on who else is in the pass
    scored.logprobs.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in policy.parameters())
    assert any(bool(p.grad.any()) for p in policy.parameters() if p.grad is not None)

    before = lora.AdapterDisabledPolicy(policy).compute_logprobs_no_grad(batch).logprobs
    assert not torch.allclose(before, scored.logprobs, atol=1e-3)
    policy.save(tmp_path)
    assert not list(tmp_path.glob("model*.safetensors")) and (tmp_path / "adapter_model.safetensors").is_file()
    again = load_policy(section, folder=tmp_path)
    assert torch.equal(again.compute_logprobs(batch).logprobs, scored.logprobs)
    frozen = copies.frozen(policy, policy.compute)
    assert (
        torch.equal(frozen.compute_logprobs_no_grad(batch).logprobs, scored.logprobs.detach())
        and frozen.parameters() == []
    )
    base = {id(p) for p in policy.model.parameters() if not p.requires_grad}
    assert base <= {id(p) for p in frozen.model.parameters()}  # only the adapters were copied
    disturbed(policy)
    assert torch.equal(frozen.compute_logprobs_no_grad(batch).logprobs, scored.logprobs.detach())


@pytest.mark.slow
@needs_bitsandbytes
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_and_merged_it_says_the_same(kind: str, bits: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """What codes stand for, plus (alpha / rank) B A, in a folder that plain transformers reads."""
    section = PolicySection(model=str(folders[kind]), quantise=bits, device="cpu", compute="float32", **LORA)
    policy = disturbed(load_policy(section))
    batch, now = sampled(policy), policy.compute_logprobs(sampled(policy)).logprobs
    lora.merged(policy.model).save_pretrained(tmp_path)
    loader: Any = AutoModelForSeq2SeqLM if policy.encoder_decoder else AutoModelForCausalLM
    plain = loader.from_pretrained(tmp_path)
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    assert not hasattr(plain.config, "quantization_config") and not lora.has_adapter(plain)
    same = Policy(plain, policy.tokenizer, decoder_start=policy.decoder_start).compute_logprobs(batch).logprobs
    assert rounding.near(plain, same, now)
    assert torch.equal(policy.compute_logprobs(batch).logprobs, now)  # and the one that trains is as it was
    # 4 bits in blocks of 64, and 8 bits in rows, are this far from the weights that were packed
    base = load_policy(PolicySection(model=str(folders[kind]), device="cpu", compute="float32"))
    weights = dict(base.model.named_parameters())
    errors = []
    for name, layer in quantization.packed_layers(load_policy(section).model):
        meant = weights[f"{name.removesuffix('.base_layer')}.weight"]
        meant = meant.T if kind == "builtin:tiny_gpt2" else meant
        errors.append(models.relative(quantization.unpacked_weight(layer), meant.detach()))
    assert max(errors) < (0.1 if bits == "4bit" else 0.012) and min(errors) > 0


@needs_bitsandbytes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bits", "changes"),
    [
        ("builtin:tiny", "4bit", {"algorithm": {"name": "grpo", "group_size": 4, "kl_coefficient": 0.1}}),
        ("builtin:tiny", "8bit", {"algorithm": {"name": "ppo", "epochs": 1}, "critic": "separate"}),
        ("builtin:tiny", "4bit", {"algorithm": {"name": "nlpo", "min_tokens_to_keep": 5}, "again": True}),
        ("builtin:tiny_t5", "4bit", {}),
    ],
    ids=["grpo", "ppo", "nlpo", "t5"],
)
def test_a_packed_run_resumes_bit_for_bit(
    kind: str, bits: str, changes: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    policy = {"model": str(folders[kind]), "device": "cpu", "quantise": bits, "compute": "float32", **LORA}
    policy |= {"critic": changes.get("critic", "head"), "activation_checkpointing": changes.get("again", False)}
    chosen = {
        "policy": policy,
        "algorithm": changes.get("algorithm", runs.TINY["algorithm"]),
        "checkpoint": {"every": 0},
        "evaluation": {"every": 2, "examples": 4},
    }
    for name, parts in (("whole", [4]), ("halves", [2, 4])):
        for steps in parts:
            runs.run(tmp_path / name, steps=steps, **chosen)
    newest = [runs.newest(tmp_path / name) for name in ("whole", "halves")]
    files = [path.relative_to(newest[0]) for path in newest[0].rglob("*.safetensors")]
    assert len(files) >= 2
    for file in files:
        assert (newest[0] / file).read_bytes() == (newest[1] / file).read_bytes(), file
    assert (tmp_path / "whole/rollouts.jsonl").read_bytes() == (tmp_path / "halves/rollouts.jsonl").read_bytes()
    steps = [r for r in runs.records(tmp_path / "whole" / "metrics.jsonl") if r["kind"] == "train"]
    loose = rounding.typical_tolerance(builtin_model(kind, byte_tokenizer(), KINDS[kind], 0))
    assert max(record.get("sampler_logprob_gap", 0.0) for record in steps) < loose
    assert max(record["gradient_norm"] for record in steps) > 0


# ---------------------------------------------------------------- what adapters are compared with


@pytest.mark.parametrize(
    ("algorithm", "policy", "trunks"),
    [
        ({"name": "grpo", "group_size": 4, "kl_coefficient": 0.1}, LORA, 1),  # its adapters switched off
        ({"name": "grpo", "group_size": 4, "kl_coefficient": 0.1}, {}, 2),  # a copy
        ({"name": "nlpo", "min_tokens_to_keep": 5}, LORA, 2),  # the mask lags behind the policy: adapters too
        ({"name": "nlpo", "min_tokens_to_keep": 5, "kl_coefficient": 0.1}, LORA, 2),
        ({"name": "distill", "teacher": "builtin:tiny"}, LORA, 2),  # another model
    ],
    ids=["reference, lora", "reference", "mask, lora", "mask and reference, lora", "teacher, lora"],
)
def test_a_reference_beside_adapters_is_no_second_trunk(
    algorithm: dict[str, Any], policy: dict[str, Any], trunks: int, tmp_path: Path
) -> None:
    """Trunks, counted as input embeddings that lie in different places, of the policy and all of its copies."""
    section = runs.TINY["policy"] | policy
    config = build_config(runs.tiny(out=str(tmp_path / "run"), policy=section, algorithm=algorithm))
    run = start(config, Console(quiet=True))
    with run:
        frozen = begin_stage(run).frozen_models
        copies = [getattr(one, "policy", one) for one in frozen.models.values()]
        held = [one.model.get_input_embeddings() for one in (run.policy, *copies)]
        assert len(storages(*held)) == trunks
        if trunks == 1:
            every = storages(run.policy.model)
            assert all(storages(one.model) == every for one in copies)


# ---------------------------------------------------------------- export


@pytest.fixture(scope="module")
def trained(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs: all of a model trained, and adapters beside one; two steps, with a value function."""
    found = {}
    for name, policy in (("full", {}), ("lora", LORA)):
        found[name] = tmp_path_factory.mktemp("runs") / name
        policy = {"model": str(folders["builtin:tiny"]), "device": "cpu", **policy}
        optimizer = {"learning_rate": 0.03, "warmup": 0}
        algorithm = {"name": "ppo", "epochs": 1}
        evaluation = {"every": 0, "examples": 8, "temperature": 1.0}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lmgym.training.evaluation_points.training_plot", lambda metrics, plot: plot)
            runs.run(
                found[name], policy=policy, algorithm=algorithm, optimizer=optimizer, evaluation=evaluation, steps=2
            )
    return found


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[1, 60, 61, 62, 70, 71]])).logits


def lmgym_logits(run: Path) -> torch.Tensor:
    section = PolicySection(**yaml.safe_load((run / "recipe.yaml").read_text())["policy"])
    return logits(load_policy(section, folder=runs.newest(run)).model)


@pytest.mark.slow
def test_export_of_a_whole_model(trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(trained["full"]), "--to", str(tmp_path / "out")]) == 0
    assert f"model: {tmp_path / 'out'}" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= names
    assert not names & {"optimizer.safetensors", "state.json", "value_head.safetensors", "manifest.json"}
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), lmgym_logits(trained["full"]))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("7")["input_ids"] == byte_tokenizer()("7")["input_ids"]
    said = complaint(capsys, "export", trained["full"], "--to", tmp_path / "b", "--merge")
    assert "holds a whole model and no adapters, so there is nothing to merge; remove --merge" in said


@pytest.mark.slow
def test_export_of_adapters_for_peft(trained: dict[str, Path], folders: dict[str, Path], tmp_path: Path) -> None:
    import peft

    assert main(["export", str(trained["lora"]), "--to", str(tmp_path / "out")]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= names
    assert "model.safetensors" not in names
    base = AutoModelForCausalLM.from_pretrained(folders["builtin:tiny"])
    untrained = logits(base)
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "out"))
    ours = lmgym_logits(trained["lora"])
    assert rounding.near(theirs, logits(theirs), ours) and not torch.allclose(untrained, ours, atol=1e-2)
    alone = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "out"))  # the base is found by its name
    assert rounding.near(alone, logits(alone), ours)


def test_export_in_bf16_rounds_to_either_neighbour(
    trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same bits each time; numbers of bf16 stay; the others become one of their two neighbours, not always the
    nearest; on average nothing is lost of what training changed."""
    for name in ("out", "again"):
        assert main(["export", str(trained["full"]), "--to", str(tmp_path / name), "--bf16"]) == 0
    kept = re.search(r"in bf16, with (\d+)% of what training changed \(to nearest: \d+%\)", capsys.readouterr().out)
    masters = load_file(runs.newest(trained["full"]) / "model.safetensors")
    rounded = load_file(tmp_path / "out" / "model.safetensors")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert rounded.keys() == masters.keys()
    farther = count = 0
    for name, master in masters.items():
        below = (master.view(torch.int32) & ~0xFFFF).view(torch.float32)  # towards zero: the upper half of the bits
        above = ((master.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
        copy = rounded[name].float()
        assert torch.equal(rounded[name], again[name]) and rounded[name].dtype == torch.bfloat16
        assert bool(((copy == below) | ((copy == above) & (below != master))).all())
        farther += int((copy != master.bfloat16().float()).sum())
        count += master.numel()
    assert 0.1 < farther / count < 0.4  # evenly spread numbers go to the farther neighbour in a quarter of all cases
    assert kept is not None and 99 <= int(kept[1]) <= 101  # steps of 0.03 are far larger than the noise
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    said = complaint(capsys, "export", trained["lora"], "--to", tmp_path / "b", "--bf16")
    assert "holds adapters, which stay in fp32; add --merge for a whole model in bf16" in said


def test_export_merges_adapters(trained: dict[str, Path], tmp_path: Path) -> None:
    assert main(["export", str(trained["lora"]), "--to", str(tmp_path / "out"), "--merge"]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= names
    assert not any("adapter" in name for name in names)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not lora.has_adapter(plain)
    assert rounding.near(plain, logits(plain), lmgym_logits(trained["lora"]))


def test_the_model_card_says_what_was_measured(trained: dict[str, Path], tmp_path: Path) -> None:
    """Numbers and intervals of exactly these weights; nothing of where things lie on this machine."""
    run = trained["lora"]
    main(["export", str(run), "--to", str(tmp_path / "out")])
    card = (tmp_path / "out" / "README.md").read_text()
    header = yaml.safe_load(card.split("---\n")[1])
    assert header == {"library_name": "peft", "tags": ["lmgym"]}  # the base is a folder, which nobody else knows
    records = [r for r in runs.records(run / "metrics.jsonl") if r["kind"] == "evaluation"]
    first, last = (next(r for r in records if r["step"] == step) for step in (0, 2))
    for name in ("reward", "length", "truncated"):
        for record in (first, last):
            assert f"{record[name]:.3g} [{record[f'{name}/low']:.3g} to {record[f'{name}/high']:.3g}]" in card
    assert "8 prompts of split 'test'" in card and "after 2 steps of stage 'train'" in card
    recipe = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert recipe["policy"]["lora_rank"] == 4 and "out" not in recipe and recipe["policy"]["model"] == "tiny"
    assert str(run.parent) not in card and str(Path.home()) not in card

    checkpoint = runs.newest(run)
    earlier = tmp_path / "run" / "checkpoints" / "stage-0-step-000001"  # a step at which nothing was evaluated
    shutil.copytree(run, tmp_path / "run")
    shutil.copytree(checkpoint, earlier)
    (earlier / "manifest.json").unlink()
    state = json.loads((earlier / "state.json").read_text()) | {"step": 1}
    (earlier / "state.json").write_text(json.dumps(state))
    main(["export", str(earlier), "--to", str(tmp_path / "earlier")])
    assert "These weights were not evaluated." in (tmp_path / "earlier" / "README.md").read_text()


def test_a_card_hides_folders_and_keeps_texts(tmp_path: Path) -> None:
    (tmp_path / "my data.jsonl").touch()
    texts = {
        "/no_think What is a/b? ": "/no_think What is a/b? ", "/no_think": "/no_think", "//": "//", "/": "/",
        "/srv/me/data.jsonl": "data.jsonl", "~/data.jsonl": "data.jsonl", "/home/me/my data.jsonl": "my data.jsonl",
        str(tmp_path / "my data.jsonl"): "my data.jsonl", "~5": "~5", "/" + "x " * 5000: "/" + "x " * 5000,
    }  # fmt: skip
    assert _public({"out": "/a", "texts": list(texts)}) == {"texts": list(texts.values())}


def test_export_keeps_a_link_and_follows_none_in_the_run(
    trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert main(["export", str(trained["full"]), "--to", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "config.json").is_file()
    (tmp_path / "key").write_text("a secret")
    shutil.copytree(trained["full"], tmp_path / "run")
    (tmp_path / "run" / "final" / "vocabulary.txt").symlink_to(tmp_path / "key")
    final = tmp_path / "run" / "final"
    assert "vocabulary.txt is a link" in complaint(capsys, "export", final, "--to", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_of_a_checkpoint_has_the_files_of_a_model_alone(trained: dict[str, Path], tmp_path: Path) -> None:
    """Nothing of the run: fingerprint.json tells the recipe with local paths, ahead.json and champions.json answers."""
    shutil.copytree(trained["full"], tmp_path / "run")
    newest = runs.newest(tmp_path / "run")
    (newest / "manifest.json").unlink()  # the two next ones are only in checkpoints of some runs
    for name in ("ahead.json", "champions.json"):
        (newest / name).write_text("{}")
    assert main(["export", str(newest), "--to", str(tmp_path / "out")]) == 0
    final = {path.name for path in (tmp_path / "run" / "final").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == final | {"README.md"}


@pytest.mark.parametrize("name", ["final", "checkpoints"])
def test_export_follows_no_link_to_a_folder(
    name: str, trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run may be named by a link, and a link may lead to another folder of the run, but none leads out of it."""
    shutil.copytree(trained["full"], tmp_path / "run")
    shutil.move(tmp_path / "run" / name, tmp_path / "elsewhere")
    if name == "final":
        shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    for what in (tmp_path / "run", tmp_path / "latest", runs.newest(tmp_path / "run") if name != "final" else
                 tmp_path / "run" / "final"):  # fmt: skip
        said = complaint(capsys, "export", what, "--to", tmp_path / "out")
        assert "leads out of" in said and "by a link; put the folder itself there" in said
    assert not (tmp_path / "out").exists()
    (tmp_path / "run" / name).unlink()
    shutil.move(tmp_path / "elsewhere", tmp_path / "run" / "moved")
    (tmp_path / "run" / name).symlink_to(tmp_path / "run" / "moved")
    assert main(["export", str(tmp_path / "latest"), "--to", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("options", [(), ("--bf16",)])
@pytest.mark.parametrize(
    ("file", "size", "said"),
    [
        ("config.json", 1, "config.json is no JSON"),
        ("tokenizer.json", 100, "tokenizer.json is no JSON"),
        ("generation_config.json", 3, "generation_config.json is no JSON"),
        ("model.safetensors", 0, "model.safetensors is cut off within its header"),
        ("model.safetensors", 3000, "model.safetensors is cut off"),
    ],
)
def test_export_of_a_damaged_model_is_refused(
    options: tuple[str, ...], file: str, size: int, said: str, trained: dict[str, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shutil.copytree(trained["full"] / "final", tmp_path / "run" / "final")
    shutil.copy(trained["full"] / "recipe.yaml", tmp_path / "run")
    os.truncate(tmp_path / "run" / "final" / file, size)
    told = complaint(capsys, "export", tmp_path / "run", "--to", tmp_path / "out", *options)
    assert f"{tmp_path / 'run' / 'final'} is damaged: {said}" in told and not (tmp_path / "out").exists()


def test_export_of_damaged_adapters_is_refused(
    trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained["lora"], tmp_path / "run")
    newest = runs.newest(tmp_path / "run")
    (newest / "manifest.json").unlink()  # which would show it
    header = b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}'
    for content, said in ((b"", "is cut off"), (len(header).to_bytes(8, "little") + header + b"1234", "no file of s")):
        (newest / "adapter_model.safetensors").write_bytes(content)
        told = complaint(capsys, "export", newest, "--to", tmp_path / "out")
        assert "is damaged: adapter_model.safetensors" in told and said in told
    (newest / "adapter_config.json").write_text("[" * 200_000)
    told = complaint(capsys, "export", newest, "--to", tmp_path / "out", "--merge")
    assert "is damaged: adapter_config.json is no JSON (it is nested too deeply)" in told


def test_export_refuses_what_it_cannot_do(
    trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, "export", tmp_path, "--to", tmp_path / "out")
    assert "is neither a run folder nor a model in one" in said
    said = complaint(capsys, "export", trained["full"], "--to", trained["full"])
    assert "exists and is not empty; name a new folder" in said
    shutil.copytree(trained["lora"], tmp_path / "run")
    newest = runs.newest(tmp_path / "run")
    (newest / "adapter_model.safetensors").write_bytes(b"nothing")
    assert "is damaged" in complaint(capsys, "export", newest, "--to", tmp_path / "out")
    shutil.copytree(trained["lora"], tmp_path / "builtin")
    tree = yaml.safe_load((tmp_path / "builtin" / "recipe.yaml").read_text())
    tree["policy"]["model"] = "builtin:tiny"
    (tmp_path / "builtin" / "recipe.yaml").write_text(yaml.safe_dump(tree))
    said = complaint(capsys, "export", tmp_path / "builtin", "--to", tmp_path / "out")
    assert "need the base builtin:tiny, which no other program has; add --merge" in said
    assert not (tmp_path / "out").exists()


class Hub:
    """What lmgym calls of the Hub, without a network."""

    def __init__(self, patch: pytest.MonkeyPatch, taken: tuple[str, ...] = (), fails: Exception | None = None) -> None:
        self.made: list[tuple[str, bool]] = []
        self.files: dict[str, list[str]] = {}
        self.taken, self.fails = taken, fails
        for name in ("whoami", "repo_exists", "create_repo", "upload_folder"):
            patch.setattr(HfApi, name, getattr(self, name))

    def whoami(self) -> dict[str, str]:
        return {"name": "me"}

    def repo_exists(self, repo_id: str) -> bool:
        return repo_id in self.taken

    def create_repo(self, repo_id: str, private: bool) -> None:
        if self.fails is not None:
            raise self.fails
        self.made.append((repo_id, private))

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> Any:
        self.files[repo_id] = sorted(path.name for path in folder_path.iterdir())
        return type("Commit", (), {"repo_url": f"https://huggingface.co/{repo_id}"})


def test_push_makes_a_private_repository(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub(monkeypatch)
    assert main(["export", str(trained["full"]), "--to", str(tmp_path / "out"), "--push", "me/mine"]) == 0
    assert hub.made == [("me/mine", True)]
    assert hub.files["me/mine"] == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert "and (private) https://huggingface.co/me/mine" in capsys.readouterr().out


def test_push_is_refused_before_anything_is_written(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
    command = ["export", trained["full"], "--to", tmp_path / "out", "--push"]
    assert "there is no token of the Hub here" in complaint(capsys, *command, "me/mine")  # the library's own error
    monkeypatch.setattr(HfApi, "whoami", lambda self: {"name": "me"})
    assert "the Hub cannot be reached for me/mine (" in complaint(capsys, *command, "me/mine")  # tests are offline
    assert "'mine' is no name on the Hub; write OWNER/NAME" in complaint(capsys, *command, "mine")
    Hub(monkeypatch, taken=("me/mine",))
    assert "me/mine is on the Hub already, and is left as it is" in complaint(capsys, *command, "me/mine")
    said = complaint(capsys, "export", trained["lora"], "--to", tmp_path / "out", "--push", "me/mine")
    assert "a folder that nobody else has; add --merge" in said
    assert not (tmp_path / "out").exists()


def test_what_the_hub_refuses_later_leaves_the_folder(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = HfHubHTTPError.__new__(HfHubHTTPError)
    Exception.__init__(refusal, "403 Forbidden: no right to write there")
    Hub(monkeypatch, fails=refusal)
    said = complaint(capsys, "export", trained["full"], "--to", tmp_path / "out", "--push", "them/mine")
    assert said == "--push: the Hub refused them/mine (403 Forbidden: no right to write there)"
    assert (tmp_path / "out" / "model.safetensors").is_file()


# ---------------------------------------------------------------- memory


def stage_of(policy: dict[str, Any], **changes: Any) -> tuple[Any, Any, Shapes]:
    config = build_config(runs.tiny(policy={"device": "cpu", **policy}, **changes))
    return config, config.stages[0], shapes_of(config.policy)


def parts_of(found: Estimate) -> dict[str, float]:
    return {part.name: part.bytes for part in found.parts}


def test_shapes_are_those_of_the_loaded_model() -> None:
    for name in KINDS:
        for adapters in ({}, LORA, {"lora_rank": 4, "lora_targets": ["q_proj", "c_attn", "q"]}):
            section = PolicySection(model=name, device="cpu", architecture=KINDS[name], **adapters)
            model, shapes = load_policy(section).model, shapes_of(section)
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            assert shapes.trained == trained
            assert shapes.parameters + shapes.adapter == sum(p.numel() for p in model.parameters())
    for name, targets in (
        ("builtin:tiny", ["self_attn.q_proj", "lm_head", "embed_tokens", "model.layers.0.mlp.up_proj"]),
        ("builtin:tiny", r".*layers\.1\..*_proj"),
        ("builtin:tiny_gpt2", ["wte", "c_attn"]),
        ("builtin:tiny_t5", ["embed_tokens", "lm_head"]),
        ("builtin:tiny_idefics3", ["q_proj", "lm_head"]),
    ):
        section = PolicySection(model=name, device="cpu", lora_rank=4, lora_targets=targets)
        trained = sum(p.numel() for p in load_policy(section).model.parameters() if p.requires_grad)
        assert shapes_of(section).adapter == shapes_of(section).trained == trained
    llama = shapes_of(PolicySection(architecture=KINDS["builtin:tiny"]))
    assert (llama.layers, llama.width, llama.inner, llama.gated) == (2, 64, 128, True)
    assert llama.linear == 2 * (4 * 64 * 64 + 3 * 64 * 128) and llama.linear_rows == 2 * (5 * 64 + 2 * 128)
    t5 = shapes_of(PolicySection(model="builtin:tiny_t5"))
    assert (t5.layers, t5.encoder_layers, t5.inner, t5.gated, t5.pair_values) == (2, 2, 256, False, 1)


def test_what_is_held_throughout_is_counted_exactly() -> None:
    """Llama-2-7B's shapes, by hand: 6,738,415,616 parameters, of which 6,476,005,376 in linear layers."""
    parameters, linear = 6_738_415_616, 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    shapes = Shapes(parameters, linear, 32 * (5 * 4096 + 2 * 11008), 0, 32, 0, 4096, 11008, True, 32, 4096, 4096, 3,
                    32000, 0, True, 4096)  # fmt: skip
    algorithm = {"name": "grpo", "group_size": 8, "kl_coefficient": 0.1}
    config, stage, _ = stage_of({}, algorithm=algorithm, sampling={"max_new_tokens": 500}, prompts_per_step=32)
    found = parts_of(estimate(config, stage, shapes, 100, compute=2, on_cpu=False))
    assert found["weights"] == found["gradients"] == found["reference"] == 4 * parameters
    assert found["moments of the optimizer"] == 8 * parameters and found["the copy in bf16"] == 2 * parameters
    assert "the sampler's copy" not in found and "weights in bf16" not in found
    # keys and values of 256 answers of 600 tokens in 32 layers, and one layer of them in passing
    assert found["cache of keys and values"] == 2 * 256 * 600 * 4096 * 2 * 33
    # 27 rows of 600 tokens fit 16,384, so three groups: 3 prompts of 100, 24 answers of 500, keys and values for each
    tokens, keys = 3 * 100 + 24 * 500, 24 * 600
    layer = 4 * 2 * 2 * 4096 * tokens + 2 * (5 * 4096 * tokens + 4 * 11008 * tokens + 4096 * (5 * tokens + 2 * keys))
    assert found["activations"] == 32 * layer
    # of 2,097 actions, 2^26 logits: the chunk in bf16 and four in fp32, and the hidden states with their gradient
    chunk = 2**26 // 32000 * 32000
    assert found["LM head"] == 2 * chunk + 4 * 4 * chunk + 2 * 12_000 * 4096 * 2
    adapters = 16 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    shapes = Shapes(**{**shapes.__dict__, "adapter": adapters})
    config.policy.activation_checkpointing = True
    found = parts_of(estimate(config, stage, shapes, 100, compute=2, on_cpu=False))
    assert "reference" not in found and found["gradients"] == 4 * adapters
    assert found["the sampler's copy"] == 2 * parameters and found["the copy in bf16"] == 2 * adapters
    assert found["activations"] == 32 * 4 * 4096 * tokens + layer
    config.policy.quantise, config.policy.lora_rank = "4bit", 16
    found = parts_of(estimate(config, stage, shapes, 100, compute=2, on_cpu=False))
    assert found["weights"] == pytest.approx(linear * 0.51587 + 2 * (parameters - linear) + 4 * adapters, rel=1e-4)
    assert found["the copy in bf16"] == 2 * adapters
    assert "the sampler's copy" not in found and "weights in bf16" not in found
    later = parts_of(estimate(config, stage, shapes, 100, first=False, compute=2, on_cpu=False))
    assert later["reference"] == 4 * adapters  # adapters that an earlier stage has trained, over the same base


@pytest.mark.parametrize(
    ("policy", "group"),
    [
        ({"model": "builtin:tiny"}, 4),
        ({"model": "builtin:tiny"}, 1),
        ({"model": "builtin:tiny", "compute": "bfloat16", "update_kernels": "torch"}, 1),
        ({"model": "builtin:tiny", "compute": "bfloat16"}, 1),
        ({"model": "builtin:tiny", "lora_rank": 8}, 1),
        ({"model": "builtin:tiny_gpt2"}, 1),
        ({"model": "builtin:tiny_t5"}, 1),
        ({"model": "builtin:tiny_bart"}, 1),
    ],
    ids=["llama, shared prompts", "llama", "bf16", "bf16, own kernels", "lora", "gpt2", "t5", "bart"],
)
def test_activations_are_what_autograd_keeps(policy: dict[str, Any], group: int) -> None:
    """Within an eighth, of one pass over 16 rows of 20 and 44 tokens (the last token of a row is not run)."""
    policy = {"compute": "float32", **policy}
    loaded = load_policy(PolicySection(device="cpu", **policy))
    generator = torch.Generator().manual_seed(0)
    episodes = []
    for place in range(16):
        prompt = [3 + place // group, *[5] * 19]
        turn = Turn(prompt, torch.randint(3, 250, (45,), generator=generator).tolist(), [-1.0] * 45)
        if loaded.encoder_decoder:
            turn.source_ids, turn.prompt_ids = turn.prompt_ids, [*loaded.decoder_start]
        episodes.append(Episode(Example("x", "?"), place // group, place, [turn]))
    own, kept = storages(loaded.model), {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no place is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loaded.compute_logprobs(collate(episodes))
    measured = sum(one.untyped_storage().nbytes() for place, one in kept.items() if place not in own)
    algorithm = {"name": "reinforce", "group_size": group}
    config, stage, shapes = stage_of(
        policy, algorithm=algorithm, sampling={"max_new_tokens": 44}, prompts_per_step=16 // group
    )
    found = parts_of(estimate(config, stage, shapes, 20, compute=2 if policy["compute"] == "bfloat16" else 4))
    estimated = found["activations"] + found.get("weights in bf16", 0.0)
    assert measured > 2**20 and measured / 1.125 < estimated < measured * 1.125


@pytest.mark.parametrize(
    ("path", "budget"),
    [("auto", None), ("auto", 10_000), ("auto", 700), ("auto", 130), ("auto", 10), ("plain", 700), ("plain", 130)],
)
def test_the_largest_pass_is_as_micro_batches_cut_it(path: str, budget: int | None) -> None:
    """Of 4 prompts of 20 tokens with 4 answers of 45 each, whose last token is not run; padded rows hold it."""
    policy = {"model": "builtin:tiny", "compute": "float32", "path": path, "tokens_per_forward": budget}
    turns = [Turn([3 + group, *[5] * 19], [7] * 45, [-1.0] * 45) for group in range(4) for _ in range(4)]
    batch = collate([Episode(Example("x", "?"), place // 4, place, [turn]) for place, turn in enumerate(turns)])
    parts = load_policy(PolicySection(device="cpu", **policy)).micro_batches(batch)
    config, stage, shapes = stage_of(
        policy, algorithm={"name": "reinforce", "group_size": 4}, prompts_per_step=4,
        sampling={"max_new_tokens": 44 if path == "auto" else 45},
    )  # fmt: skip
    shapes = replace(shapes, fast=path == "auto")
    largest = largest_pass(config, stage, shapes, 20, stage.sampling.max_new_tokens, on_cpu=True)
    assert largest.rows == max(map(len, parts))


def test_the_table_has_a_column_for_each_phase() -> None:
    found = Estimate([Part("weights", 2.0**30), Part("cache", 2.0**28, ("rollout",))])
    assert found.peak == 2**30 + 2**28 and found.total("update") == 2**30
    rows = found.rows()
    assert rows[1] == ("cache", "0.25 GiB", "-", "-") and rows[-1] == ("total", "1.25 GiB", "1.00 GiB", "1.00 GiB")


def test_check_estimates_a_large_model_from_its_configuration_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with a configuration and a tokenizer, and no weight at all."""
    from transformers import LlamaConfig

    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "seven")  # its defaults are Llama 7B
    byte_tokenizer().save_pretrained(tmp_path / "seven")
    recipe = runs.write(tmp_path / "recipe.yaml", policy={"model": str(tmp_path / "seven"), "device": "cuda"})
    assert main(["check", str(recipe), "--memory"]) == 0
    said = capsys.readouterr().out
    assert "on cuda, with prompts of" in said and "6,738,415,616 parameters" in said and "no model was loaded" in said
    assert [line.split()[1] for line in said.splitlines() if line.strip().startswith("weights  ")] == ["25.10"]


def test_check_stops_where_the_weights_alone_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lmgym.training.planning.memory_report.memory_here", lambda kind: 1000)
    monkeypatch.setattr("lmgym.training.dry_run.trained_policy", lambda *a: pytest.fail("a model was loaded"))
    assert main(["check", str(runs.write(tmp_path / "recipe.yaml"))]) == 1
    said = capsys.readouterr().out
    assert re.search(r"! does not fit: \S+ \S+ of 0 MiB here; (even .*; )?lower policy", said)
    assert "! the weights alone take" in said and "2 thing(s) to look at" in said


def test_check_of_a_hub_model_without_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", policy={"model": "nobody/no-such-model", "device": "cpu"})
    said = complaint(capsys, "check", recipe, "--memory")
    lacking = "could not load 'nobody/no-such-model': not a model folder here, and HF_HUB_OFFLINE is set"
    assert said.startswith(f"policy.model: {lacking}")
