"""A model proves itself before it trains: families whose positions, caches or outputs are their own, models that lmgym
would call wrongly, and what becomes of them in a run."""

import copy
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import model_families, small_configs
from benchmarks.small_configs import small_config
from lmgym.cli.main import main
from lmgym.core.errors import LmgymError
from lmgym.inference.base import Decoding, Request, Sampling
from lmgym.inference.kinds import EngineSection
from lmgym.inference.proof import Gap, Proof, _attempt, _special, own_logprobs, proofs_of, prove, sample
from lmgym.inference.sampler import Sampler
from lmgym.logs.console import Console
from lmgym.models.bound import bound_of
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.shapes import shapes_of
from lmgym.training import setup
from lmgym.training.sampler_gap import GapLimits, gap_limits, watch_gap
from tests import models, runs
from tests.parity import test_families

CAUSAL, ENCODER_DECODER = "causal", "encoder-decoder"
MENDED = {
    "minimax": CAUSAL,  # a recurrent layer first: its cache knows no length, and positions began at 0 in each step
    "bamba": CAUSAL,
    "roberta": CAUSAL,  # counts from padding_idx + 1
    "xlm-roberta-xl": CAUSAL,
    "moshi": CAUSAL,  # its cache drops more than its own window does
    "nllb-moe": ENCODER_DECODER,  # the decoder reads router_logits of the encoder's output
    "switch_transformers": ENCODER_DECODER,
    "t5gemma": ENCODER_DECODER,
    "qwen2_audio": ENCODER_DECODER,  # causal, but listed with the encoder-decoders
    "gemma4_text": CAUSAL,  # sizes differ from layer to layer
    "mamba": CAUSAL,  # no attention heads
}
REFUSED = {
    ("prophetnet", CAUSAL): "reads the tokens behind",  # its predicting stream mixes the biases of positions
    ("prophetnet", ENCODER_DECODER): "reads the tokens behind",
    ("xlnet", CAUSAL): "reads the tokens behind",
    ("cpmant", CAUSAL): "reads the tokens behind",
    ("emu3", CAUSAL): "no causal and no encoder-decoder language model",
}


@pytest.mark.parametrize("name", MENDED)
def test_mended_families_agree_with_their_own_forward_pass(name: str) -> None:
    found = model_families.tried(MENDED[name], name)
    assert [getattr(proof, "holds", proof) for proof in found.results] == [True, True]


@pytest.mark.parametrize("name, kind", REFUSED)
def test_what_cannot_be_right_is_refused_with_a_sentence(name: str, kind: str) -> None:
    found = model_families.tried(kind, name)
    assert not found.crashed
    assert REFUSED[name, kind] in str(found.results[0])


@functools.cache
def windowed() -> Policy:
    """A model with a window, on the fast path, which would not see it (test_families.py)."""
    return test_families.policy_of("mistral, window of 4", fast=True)


def with_compute(policy: Policy, compute: torch.dtype) -> Policy:
    other = copy.copy(policy)
    other.compute = compute
    return other


def test_a_wrong_forward_pass_is_refused_and_the_gap_is_named() -> None:
    proof = prove(windowed(), Sampler(windowed()))
    assert proof.causal
    with pytest.raises(LmgymError, match=f"by {proof.sampled.mean:.2g} nats a token.* float32 explains") as caught:
        proof.check()
    assert "policy.path: plain" in str(caught.value)
    assert prove(windowed(), Sampler(windowed()), most=100.0).bound.mean == 100.0


def test_a_mistake_cannot_hide_behind_the_rounding_of_bf16() -> None:
    """The fast path reads up to 5 tokens too many, in the longest rows alone: rounding to bf16 would explain it."""
    fields = {**test_families.GROUPED, "sliding_window": 12, "vocab_size": 300, "max_position_embeddings": 64}
    model = models.sharpen(AutoModelForCausalLM.from_config(AutoConfig.for_model("mistral", **fields)), 0.1).eval()
    policy = with_compute(Policy(model, models.tokenizer(), fast=True), torch.bfloat16)
    precise, coarse = proofs_of(policy, Sampler(policy), Sampler)
    assert (precise.compute, coarse.compute) == ("float32", "bfloat16")
    assert not precise.holds and coarse.holds


def test_a_bidirectional_model_is_named_as_one() -> None:
    fields = {**test_families.SMALL, "vocab_size": 300, "max_position_embeddings": 64, "is_decoder": False}
    model = models.sharpen(AutoModelForCausalLM.from_config(AutoConfig.for_model("bert", **fields))).eval()
    policy = Policy(model, models.tokenizer())
    proof = prove(policy, Sampler(policy))
    assert not proof.causal
    with pytest.raises(LmgymError, match=r"is no causal language model.*is_decoder: true"):
        proof.check()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", ["tiny", "tiny_gpt2", "tiny_t5", "tiny_bart"])
def test_built_in_models_hold_on_both_paths(model: str, precision: torch.dtype) -> None:
    for path in ("fast", "plain"):
        policy = load_policy(PolicySection(model=f"builtin:{model}", device="cpu", compute="float32", path=path))
        policy = with_compute(policy, precision)
        for proof in proofs_of(policy, Sampler(policy), Sampler):
            assert proof.holds, proof.sentence
            assert proof.tokens == 48


def test_adapters_hold_when_they_are_no_longer_zero() -> None:
    pytest.importorskip("peft")
    policy = load_policy(PolicySection(model="builtin:tiny", device="cpu", compute="float32", lora_rank=4))
    before, _ = own_logprobs(policy, sample(policy, Sampler(policy)))
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    after, _ = own_logprobs(policy, sample(policy, Sampler(policy)))
    assert float((after - before).abs().max()) > 0.1
    for compute in (torch.float32, torch.bfloat16):
        adapted = with_compute(policy, compute)
        assert all(proof.holds for proof in proofs_of(adapted, Sampler(adapted), Sampler))


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_quantized_base_is_compared_with_itself(bits: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    models.llama(hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)
    models.tokenizer().save_pretrained(tmp_path)
    policy = load_policy(PolicySection(model=str(tmp_path), device="cpu", quantise=bits, lora_rank=4))
    assert all(proof.holds for proof in proofs_of(policy, Sampler(policy), Sampler))


def test_the_bound_grows_with_rounding_and_spares_experts_the_quantile() -> None:
    dense, mixture = (
        Policy(small_configs.small_model(CAUSAL, name), models.tokenizer()) for name in ("llama", "mixtral")
    )
    bound, double = bound_of(dense, spread=1.0), bound_of(dense, spread=2.0)
    assert double.mean == pytest.approx(2 * bound.mean)
    assert bound_of(dense, spread=0.1) == bound
    assert bound.high == pytest.approx(5 * bound.mean)
    assert bound_of(mixture, spread=1.0).high == float("inf")
    eps = torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps
    rounded = bound_of(with_compute(dense, torch.bfloat16), spread=1.0).mean
    assert bound.mean < rounded < bound.mean * eps


def test_no_random_number_is_consumed_and_nothing_is_changed() -> None:
    policy = load_policy(PolicySection(model="builtin:tiny", device="cpu", compute="bfloat16"))
    engine = Sampler(policy)
    states = torch.get_rng_state(), {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    first = proofs_of(policy, engine, Sampler)
    assert proofs_of(policy, engine, Sampler) == first
    assert torch.equal(torch.get_rng_state(), states[0])
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in policy.model.state_dict().items())
    assert policy.compute == torch.bfloat16


@pytest.mark.slow
def test_a_run_is_the_same_without_the_proof(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_proof = runs.run(tmp_path / "with")
    held = Proof("llama", "float32", 1, Gap(0.0, 0.0), Gap(0.0, 0.0), Gap(1.0, 1.0))
    monkeypatch.setattr(setup, "prove_policy", lambda *_: [held])
    runs.assert_equal_runs(with_proof, runs.run(tmp_path / "without"))


def test_a_short_context_leaves_room_for_the_proof() -> None:
    policy = Policy(models.gpt2(n_positions=3), models.tokenizer())
    assert prove(policy, Sampler(policy)).holds


CONTEXTS = {"gemma3": 64, "mpt": 64, "roberta": 64 - 2, "dbrx": 64, "whisper": 64, "xlnet": None, "mamba": None}


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_context_is_found_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    """RoBERTa's padding id is 1, so its first position is 2."""
    model = small_configs.small_model(CAUSAL, name)
    assert Policy(model, models.tokenizer()).context == CONTEXTS[name]
    model.save_pretrained(tmp_path)
    assert shapes_of(PolicySection(model=str(tmp_path), device="cpu")).context == CONTEXTS[name]


def test_the_last_position_of_a_roberta_can_be_read() -> None:
    policy = Policy(small_configs.small_model(CAUSAL, "roberta"), models.tokenizer())
    context = policy.context
    assert context is not None
    with torch.no_grad():
        policy.model(input_ids=torch.full((1, context), 7))
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            policy.model(input_ids=torch.full((1, context + 1), 7))


def test_damaged_weights_are_named() -> None:
    model = models.llama()
    with torch.no_grad():
        next(iter(model.parameters()))[:] = float("nan")
    policy = Policy(model, models.tokenizer())
    with pytest.raises(LmgymError, match=r"^policy.model: the tensor 'model.embed_tokens.weight' .* holds nan"):
        prove(policy, Sampler(policy))


@pytest.mark.parametrize("name", ["minimax", "bamba"])
def test_greedy_answers_equal_generate_where_a_cache_knows_no_length(name: str) -> None:
    model: Any = small_configs.small_model(CAUSAL, name)
    ours = test_families.greedy(Policy(model, models.tokenizer()), rows=64)
    theirs = [test_families.generated(model, prompt, [models.EOS]) for prompt in test_families.PROMPTS]
    assert [answer.ids for answer in ours] == theirs
    assert len({tuple(ids) for ids in theirs}) >= 3


@pytest.mark.parametrize("name", ["roberta", "moshi"])
def test_generate_reads_what_the_sampler_reads(name: str) -> None:
    """Hugging Face's `generate` for evaluations: from RoBERTa's first position on, and without Moshi's cache."""
    policy = Policy(small_configs.small_model(CAUSAL, name), models.tokenizer())
    requests = [Request(prompt, place) for place, prompt in enumerate(test_families.PROMPTS)]
    greedy = {"temperature": 0.0, "max_new_tokens": test_families.NEW}
    ours = Sampler(policy).generate(requests, Sampling(**greedy))
    theirs = Sampler(policy).generate(requests, Decoding(**greedy, generation={"repetition_penalty": 1.0}))
    assert [answer.ids for answer in theirs] == [answer.ids for answer in ours]


# ---- In a run ----


@functools.cache
def bidirectional_folder(folder: Path) -> Path:
    fields = {**test_families.SMALL, "vocab_size": 300, "max_position_embeddings": 128, "is_decoder": False}
    models.sharpen(AutoModelForCausalLM.from_config(AutoConfig.for_model("bert", **fields))).save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return folder


def test_a_run_and_a_check_show_the_figure(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = runs.write(tmp_path / "a.yaml", out=str(tmp_path / "run"), steps=1)
    main(["check", str(recipe)])
    figure = re.compile(r"proof: .* differ from the model's own forward pass by at most \S+ nats a token")
    assert figure.search(capsys.readouterr().out)
    assert main(["train", str(recipe)]) == 0
    assert figure.search(" ".join(capsys.readouterr().out.split()))


def test_a_run_of_a_model_that_fails_its_proof_never_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = bidirectional_folder(tmp_path / "bert")
    recipe = runs.write(tmp_path / "a.yaml", policy={"model": str(folder), "device": "cpu"}, out=str(tmp_path / "run"))
    assert "is no causal language model" in runs.complaint(capsys, "train", recipe)
    assert not (tmp_path / "run").exists()
    assert main(["check", str(recipe)]) == 1
    assert re.search("^! policy.model: .* is no causal language model", capsys.readouterr().out, re.M)


def test_the_gap_is_watched_while_it_trains(tmp_path: Path) -> None:
    """Rounding alone is above a limit of 1e-12."""

    class Listening(Console):
        def __init__(self) -> None:
            super().__init__(quiet=True)
            self.heard: list[str] = []

        def warn(self, sentence: str) -> None:
            self.heard.append(sentence)

    console = Listening()
    folder = runs.run(tmp_path / "warned", console, engine={"gap_warning": 1e-12, "gap_error": 1.0}, steps=2)
    assert [sentence for sentence in console.heard if "engine.gap_warning (1e-12" in sentence]
    assert (folder / "final").is_dir()
    with pytest.raises(LmgymError, match=r"step 1: .* more than engine.gap_error \(1e-12\)"):
        runs.run(tmp_path / "ended", engine={"gap_error": 1e-12}, steps=2)


def test_a_gap_says_its_quantile_if_it_has_one() -> None:
    assert str(Gap(2e-7, 6e-7)) == "2e-07 nats a token (0.95 quantile 6e-07)"
    assert str(Gap(2e-7, math.inf)) == "2e-07 nats a token"


def test_what_fails_inside_of_a_model_is_named() -> None:
    def broken() -> None:
        raise ValueError("no such  layer")

    said = r"could not be sampled with this {}; {}take another model \(ValueError: no such layer\)"
    for kind, other in (("llama in bfloat16", r"write policy\.compute: float32, or "), ("llama in float32", "")):
        with pytest.raises(LmgymError, match=said.format(kind, other)):
            _attempt(kind, "sampled", broken)


def test_the_padding_of_the_configuration_is_a_special_id() -> None:
    """Some models have another one than their tokenizer; a prompt of it would be masked."""
    policy = load_policy(PolicySection(device="cpu", architecture={"pad_token_id": 77}))
    assert policy.model.config.pad_token_id == 77 != policy.tokenizer.pad_token_id
    assert 77 in _special(policy) and 78 not in _special(policy)


def test_limits_follow_from_the_proof_unless_the_recipe_gives_them() -> None:
    def limits(explained: float, **fields: float) -> GapLimits:
        proof = Proof("llama", "float32", 1, Gap(0.0, 0.0), Gap(0.0, 0.0), Gap(explained, explained))
        return gap_limits(EngineSection(**fields), proof)

    assert limits(1e-6) == GapLimits(0.001, 0.01)
    assert limits(0.02) == GapLimits(0.02, 0.2)
    assert limits(3.0) == GapLimits(0.1, 1.0)
    assert limits(0.02, gap_warning=0.3) == GapLimits(0.3, 3.0)
    assert limits(0.02, gap_error=0.01) == GapLimits(0.01, 0.01)
    with pytest.raises(LmgymError, match=r"engine\.gap_error is 0.1, below engine\.gap_warning"):
        EngineSection(gap_warning=0.2, gap_error=0.1)


def test_what_has_other_causes_is_not_judged() -> None:
    batch, heard = models.batch_of(models.episodes(0)), list[str]()
    limits, metrics = GapLimits(1.0, 2.0), {"sampler_logprob_gap": 5.0}
    with pytest.raises(LmgymError):
        watch_gap(limits, metrics, batch, 3, heard.append)
    watch_gap(limits, {}, batch, 3, heard.append)
    replayed = batch.replace(version=torch.arange(len(batch)))
    watch_gap(limits, metrics, replayed, 3, heard.append)
    assert not heard
    watch_gap(limits, {"sampler_logprob_gap": 1.5}, batch, 3, heard.append)
    assert len(heard) == 1
    with pytest.raises(LmgymError, match="nan"):
        watch_gap(limits, {"sampler_logprob_gap": float("nan")}, batch, 3, heard.append)


# ---- The table ----


def test_the_page_has_every_class_of_transformers() -> None:
    page = model_families.PAGE.read_text()
    table = page.split(model_families.BEGIN)[1].split(model_families.END)[0]
    if f"transformers {transformers.__version__}:" not in table:
        pytest.skip("the table is of another version of transformers")
    rows = [line.strip("| ").split(" | ")[:2] for line in table.splitlines() if line.startswith("|")][2:]
    wanted = [(name, "causal") for name in sorted(model_families.CAUSAL)]
    wanted += [(name, "encoder-decoder") for name in sorted(model_families.ENCODER_DECODER)]
    assert [(name, kind.split(",")[0]) for name, kind in rows] == wanted


def test_a_small_configuration_is_small() -> None:
    config = small_config("llama")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (32, 2, 300)
    assert json.dumps(config.to_dict())
