"""Evaluations through Hugging Face's `generate`: the ids are those that it gives each prompt alone, whatever stands
beside it; ends, limits and stop strings are lmgym's; nothing of a model's own generation_config leaks in."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from lmgym.core.errors import LmgymError
from lmgym.core.seeds import key
from lmgym.inference.base import Completion, Decoding, Request
from lmgym.inference.generation_options import KEYS, checked
from lmgym.inference.sampler import Sampler
from lmgym.models.builtin import builtin_model
from lmgym.models.policy import Policy
from tests import models, runs
from tests.runs import complaint

T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
BART = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
}


def bloom(seed: int) -> Any:
    """ALiBi: not a family of the fast path."""
    fields = {"hidden_size": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": models.EOS}
    config = AutoConfig.for_model("bloom", vocab_size=models.VOCABULARY, pad_token_id=0, **fields)
    return AutoModelForCausalLM.from_config(config)


MAKE: dict[str, Callable[[int], Any]] = {
    "llama": models.llama,
    "gpt2": models.gpt2,
    "bloom": bloom,
    "t5": lambda seed: builtin_model("builtin:tiny_t5", models.tokenizer(), T5, seed),
    "bart": lambda seed: builtin_model("builtin:tiny_bart", models.tokenizer(), BART, seed),
}
every_kind = pytest.mark.parametrize("kind", MAKE)
PENALTY_REACHES_ALL_BEAMS = Version(transformers.__version__) >= Version("5.19")
PROMPTS = [(1, 40, 41), (1, 60), (1, *range(70, 90)), (1, 40, 41), (9,), (1, 50, 51, 52, 50, 51)]
SETTINGS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 4},
    "short ones": {"num_beams": 3, "length_penalty": -1.0, "early_stopping": True},
    "long ones": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": "never"},
    "no repeats": {"num_beams": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    "greedy with a penalty": {"repetition_penalty": 1.5, "suppress_tokens": [100, 101], "bad_words_ids": [[50, 51]]},
    "of the source": {"num_beams": 2, "encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.2},
}


@functools.cache
def policy_of(kind: str) -> Policy:
    return models.exact(Policy(models.sharpen(MAKE[kind](0), 0.2), models.tokenizer()))


def requests_of(policy: Policy, prompts: list[tuple[int, ...]] = PROMPTS) -> list[Request]:
    if policy.encoder_decoder:
        return [Request(policy.decoder_start, key(0, n), source_ids=prompt) for n, prompt in enumerate(prompts)]
    return [Request(prompt, key(0, n)) for n, prompt in enumerate(prompts)]


def alone(policy: Policy, request: Request, **settings: Any) -> list[int]:
    """Hugging Face's answer to one prompt without any padding, cut behind its first end of sequence."""
    ids = torch.tensor([request.source_ids or request.prompt_ids])
    decoder = {"decoder_input_ids": torch.tensor([request.prompt_ids])} if request.source_ids else {}
    start = len(request.prompt_ids)
    settings = {"do_sample": False, "eos_token_id": [models.EOS], "pad_token_id": 0, **settings}
    output = policy.model.generate(ids, attention_mask=torch.ones_like(ids), **decoder, **settings)[0, start:].tolist()
    ends = [place for place, token in enumerate(output) if token in settings["eos_token_id"]]
    return output[: ends[0] + 1] if ends else output


def ids_of(answers: list[Completion]) -> list[list[int]]:
    return [answer.ids for answer in answers]


def decoded(policy: Policy, generation: dict[str, Any], rows: int = 64, **fields: Any) -> list[Completion]:
    decoding = Decoding(**{"temperature": 0.0, "max_new_tokens": 9, "generation": generation, **fields})
    return Sampler(policy, rows).generate(requests_of(policy), decoding)


def test_beams_count_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt is as many rows as it has beams, and no more rows are decoded side by side than the engine may."""
    policy, seen = policy_of("llama"), list[int]()
    usual = policy.model.generate
    counted = lambda **given: (seen.append(len(given["inputs"])), usual(**given))[1]  # noqa: E731
    monkeypatch.setattr(policy.model, "generate", counted, raising=False)
    decoded(policy, {"num_beams": 3}, rows=6)
    assert max(seen) == 2 and sum(seen) == len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["llama", "t5", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "bloom", "bart"))]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_ids_are_hugging_faces(kind: str, name: str) -> None:
    """With one id in four as an end, so that lengths differ and length penalties matter."""
    policy, ends = policy_of(kind), {"stop_ids": tuple(range(60, 259, 4)), "min_new_tokens": 2}
    if name == "of the source" and not PENALTY_REACHES_ALL_BEAMS:
        with pytest.raises(LmgymError, match=r"transformers before 5\.19"):
            decoded(policy, SETTINGS[name])
        return
    theirs = {"eos_token_id": [models.EOS, *ends["stop_ids"]], "min_new_tokens": 2, "max_new_tokens": 9}
    expected = [alone(policy, one, **theirs, **SETTINGS[name]) for one in requests_of(policy)]
    answers = decoded(policy, SETTINGS[name], **ends)
    assert ids_of(answers) == expected
    assert all(answer.logprobs == [] and answer.kept is None for answer in answers)
    for answer in answers:
        last = "eos" if answer.ids[-1] == models.EOS else "stop" if answer.ids[-1] in ends["stop_ids"] else "length"
        assert answer.stop == last and (last != "length" or len(answer.ids) == 9)
    for rows in (1, 5):  # side by side or not
        assert decoded(policy, SETTINGS[name], rows, **ends) == answers


@pytest.mark.slow
@every_kind
def test_the_settings_do_something(kind: str) -> None:
    policy, ends = policy_of(kind), {"stop_ids": tuple(range(60, 259, 4)), "min_new_tokens": 2}
    usable = [name for name in SETTINGS if name != "of the source" or PENALTY_REACHES_ALL_BEAMS]
    found = {name: ids_of(decoded(policy, SETTINGS[name], **ends)) for name in usable}
    found["greedy"] = ids_of(decoded(policy, {"num_beams": 1}, **ends))
    assert len({str(ids) for ids in found.values()}) > 4
    lengths = {name: sum(map(len, ids)) for name, ids in found.items()}
    assert lengths["short ones"] < lengths["long ones"] or kind == "bloom"  # which comes to no end


@every_kind
def test_one_beam_is_greedy(kind: str) -> None:
    policy = policy_of(kind)
    own = Sampler(policy).generate(requests_of(policy), Decoding(temperature=0.0, max_new_tokens=9, min_new_tokens=4))
    assert decoded(policy, {"num_beams": 1}, min_new_tokens=4) == [replace(answer, logprobs=[]) for answer in own]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_ends_and_limits(kind: str) -> None:
    """The minimum, further stop ids, and the end of the context, which is another one for each prompt."""
    policy = policy_of(kind)
    stops = tuple(range(100, 259))
    short = {"num_beams": 3, "length_penalty": -2.0}
    answers = decoded(policy, short, stop_ids=stops, min_new_tokens=3, max_new_tokens=20)
    both = {"eos_token_id": [models.EOS, *stops], "min_new_tokens": 3, "max_new_tokens": 20, **short}
    assert ids_of(answers) == [alone(policy, one, **both) for one in requests_of(policy)]
    assert {answer.stop for answer in answers} >= {"stop"} and min(len(answer.ids) for answer in answers) == 4
    if kind == "t5":  # its positions have no end
        return
    long = decoded(policy, {"num_beams": 2}, max_new_tokens=100, min_new_tokens=63)
    assert [len(answer.ids) for answer in long] == [64 - len(prompt) for prompt in PROMPTS]
    assert {answer.stop for answer in long} == {"context"}
    with pytest.raises(LmgymError, match="64 tokens, and the model reads 64 at most"):
        Sampler(policy).generate(
            requests_of(policy, [(1,) * 64]), Decoding(temperature=0.0, generation={"num_beams": 2})
        )


@pytest.mark.parametrize("beams", [1, 3])
def test_stop_strings_end_an_answer_as_in_the_sampler(beams: int) -> None:
    for script, stop in (("A: 18 Q: next", "Q:"), ("über → weiter", "→"), ("never", "\n\n")):
        ids = models.tokenizer()(script, add_special_tokens=False)["input_ids"]
        policy = models.parrot([*ids, models.EOS])
        asked = [Request((9,), 0), Request((ids[-1],), 1)]
        own = Sampler(policy).generate(asked, Decoding(temperature=0.0, max_new_tokens=40, stop=(stop,)))
        decoding = Decoding(temperature=0.0, max_new_tokens=40, stop=(stop,), generation={"num_beams": beams})
        answers = Sampler(policy).generate(asked, decoding)
        assert [(answer.ids, answer.stop) for answer in answers] == [(answer.ids, answer.stop) for answer in own]
        assert {answer.stop for answer in answers} == {"eos" if script == "never" else "stop"}


@every_kind
def test_the_models_own_generation_config_stays_out_and_stays(kind: str) -> None:
    policy = policy_of(kind)
    before = decoded(policy, {"num_beams": 3})
    usual = policy.model.generation_config
    own = GenerationConfig(
        num_beams=5, length_penalty=-4.0, early_stopping=True, repetition_penalty=3.0, no_repeat_ngram_size=1,
        min_length=30, max_length=3, forced_eos_token_id=77, suppress_tokens=sorted({a.ids[0] for a in before}),
        do_sample=True, top_k=3, eos_token_id=models.EOS,
    )  # fmt: skip
    try:
        policy.model.generation_config = own
        assert decoded(policy, {"num_beams": 3}) == before
        assert policy.model.generation_config is own
        with pytest.raises(LmgymError, match=r"evaluation\.generation: .*(penalty|penal)"):
            decoded(policy, {"repetition_penalty": -1.0})
        assert policy.model.generation_config is own  # also behind an error
    finally:
        policy.model.generation_config = usual


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_sampled_beams_repeat_and_leave_torch_alone(kind: str) -> None:
    policy, settings = policy_of(kind), {"temperature": 1.3, "max_new_tokens": 9}
    state = torch.get_rng_state()
    for generation in ({"num_beams": 3}, {"typical_p": 0.8}):
        first = decoded(policy, generation, **settings)
        torch.rand(3)
        assert decoded(policy, generation, **settings) == first
        torch.set_rng_state(state)
        assert decoded(policy, generation, **{**settings, "top_k": 2, "min_p": 0.1}) != first
        assert torch.equal(torch.get_rng_state(), state)
    few = decoded(policy, {"num_beams": 1}, temperature=1.0, top_k=1)  # and not Hugging Face's 50
    assert ids_of(few) == ids_of(decoded(policy, {"num_beams": 1}))
    wide = decoded(policy, {"num_beams": 1}, rows=64, temperature=60.0, max_new_tokens=60, min_new_tokens=40)
    assert len({token for answer in wide for token in answer.ids}) > 110


def test_every_key_is_one_of_hugging_faces() -> None:
    assert set(KEYS) <= set(vars(GenerationConfig()))
    assert checked({"num_beams": "4", "length_penalty": 1}, 0.0) == {"num_beams": 4, "length_penalty": 1.0}


# Whole runs


@pytest.mark.slow
@pytest.mark.parametrize("model", ["builtin:tiny", "builtin:tiny_t5"])
def test_a_run_evaluates_with_beams(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same training, bit for bit, whatever its evaluations do; `eval` and `generate` decode as they did."""
    small = {"policy": {"model": model, "device": "cpu"}} if model != "builtin:tiny" else {}
    if small:
        small["policy"]["architecture"] = T5
    evaluation = {"every": 2, "examples": 4, "max_new_tokens": 4}
    beams = {**evaluation, "generation": {"num_beams": 3, "length_penalty": 0.5}}
    changes = {"steps": 2, "rewards": {"length": {"unit": "characters", "target": 6}}, **small}
    plain, searched = (
        runs.run(tmp_path / name, evaluation=section, **changes)
        for name, section in (("plain", evaluation), ("searched", beams))
    )
    for file in ("model.safetensors", "config.json"):
        assert (plain / "final" / file).read_bytes() == (searched / "final" / file).read_bytes()
    answers = [
        [record["turns"][0] for record in runs.records(folder / "rollouts.jsonl") if record["kind"] == "evaluation"]
        for folder in (plain, searched)
    ]
    assert len(answers[0]) == len(answers[1]) > 0 and answers[0] != answers[1]
    assert all(len(turn["action_ids"]) <= 4 and turn["logprobs"] == [] for turn in answers[1])
    said, asked = [], ["--prompt", "2+2=", "task=dummy"]  # which adds nothing to a prompt
    for extra in ([], ["evaluation.generation={}"], ["evaluation.generation.num_beams=1"]):
        assert runs.main(["generate", str(searched), *asked, *extra]) == (1 if "num" in str(extra) else 0)
        said.append(capsys.readouterr())
    assert said[0].out.startswith("2+2=") and said[0].out != said[1].out
    assert "length_penalty is about beams" in said[2].err
    assert runs.main(["eval", str(searched)]) == 0
    last = [r for r in runs.records(searched / "metrics.jsonl") if r["kind"] == "evaluation"][-1]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("reward")]
    assert f"{last['reward']:.3f}" in line
    assert "did you mean 'num_beams'" in complaint(capsys, "eval", searched, "evaluation.generation.nun_beams=2")
