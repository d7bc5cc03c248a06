"""The sampler: its log-probabilities are those of `Policy.compute_logprobs`, a completion depends on its key
only, draws follow the distribution, and answers end where they should. Real pretrained models, if
../shared has them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lmgym.batch import collate
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.functional.sampling import BLOCK, draw
from lmgym.inference import decoder
from lmgym.inference.base import Completion, Decoding, Request, Sampling
from lmgym.inference.completions import _token_bytes
from lmgym.inference.sampler import Sampler
from lmgym.models import prefix_trees
from lmgym.models.attention.kv_cache import KeyValueCache
from lmgym.models.policy import Policy
from lmgym.types import Episode, Example, Turn
from tests import models, rounding
from tests.parity.test_families import policy_of as policy_of_family

PROMPTS = [(1, 40, 41), (1, 60), (1, *range(70, 90)), (1, 40, 41), (9,)]
MINIMUM = Sampling(max_new_tokens=6, min_new_tokens=3)
RULES = tuple(range(100, 120))  # a beginning that prompts share, long enough to be read once
ALIKE = [*PROMPTS, (*RULES, 7), (*RULES, 7, *RULES), (*RULES, 8)]


def requests(count: int, step: int = 0, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> list[Request]:
    return [Request(prompts[n % len(prompts)], seeds.key(0, "sampling", step, n)) for n in range(count)]


def policy_of(kind: str = "llama", fast: bool = True, **settings: Any) -> Policy:
    """Weights small enough that answers are varied and EOS is drawn now and then."""
    model = models.sharpen(models.llama() if kind == "llama" else models.gpt2(), 0.12)
    return Policy(model, models.tokenizer(), fast=fast, **settings)


def reported_and_scored(
    policy: Policy, asked: list[Request], answers: list[Completion], sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities that answers came with, and the policy's own."""
    episodes = [
        Episode(
            Example("x", "?"), 0, n, [Turn([*request.prompt_ids], answer.ids, min_new_tokens=sampling.min_new_tokens)]
        )
        for n, (request, answer) in enumerate(zip(asked, answers, strict=True))
    ]
    stops = {*policy.stop_ids, *sampling.stop_ids}
    batch = collate(episodes, temperature=sampling.temperature, stop_ids=sorted(stops))
    scored = policy.compute_logprobs_no_grad(batch).logprobs
    reported = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
    return reported, scored[batch.actions]


def gap(policy: Policy, asked: list[Request], answers: list[Completion], sampling: Sampling) -> float:
    """The largest difference between the two."""
    reported, scored = reported_and_scored(policy, asked, answers, sampling)
    return float((reported - scored).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7, "min_new_tokens": 5},
        {"temperature": 0.0, "min_new_tokens": 3},
        {"stop_ids": tuple(range(100, 140)), "min_new_tokens": 4},
    ],
)
def test_log_probabilities_are_those_of_the_policy(kind: str, fast: bool, settings: dict[str, Any]) -> None:
    policy, sampling = policy_of(kind, fast), Sampling(max_new_tokens=20, **settings)
    asked = requests(16, prompts=ALIKE)
    answers = Sampler(policy, 6).generate(asked, sampling)
    assert rounding.near(policy.model, *reported_and_scored(policy, asked, answers, sampling))
    if sampling.temperature not in (0.0, 1.0):  # and not those of another distribution
        assert gap(policy, asked, answers, Sampling(max_new_tokens=20)) > 0.1
    stops = {*policy.stop_ids, *sampling.stop_ids}
    for answer in answers:
        assert len(answer.ids) == len(answer.logprobs) <= 20
        assert not stops & set(answer.ids[:-1])
        assert not stops & set(answer.ids[: sampling.min_new_tokens])
        assert all(logprob <= 0 for logprob in answer.logprobs)
    if sampling.stop_ids:
        assert {answer.stop for answer in answers} >= {"stop"}
        assert min(len(answer.ids) for answer in answers) == 5


@pytest.mark.parametrize("family", ["llama, grouped queries", "gpt2", "gemma2", "gemma3_text", "gpt_oss"])
def test_what_prompts_share_is_read_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is what each would have read: families with windows, sinks and capped scores too. Without random weights of a
    size that tells tokens apart, all would have one answer."""
    policy, sampling = policy_of_family(family), Sampling(max_new_tokens=6, temperature=0.0, min_new_tokens=6)
    models.sharpen(policy.model, 0.12)
    asked, read = requests(len(ALIKE), prompts=ALIKE), list[int]()
    policy.model.get_input_embeddings().register_forward_hook(lambda _, ids, out: read.append(ids[0].numel()))
    found = Sampler(policy).generate(asked, sampling)
    monkeypatch.setattr(prefix_trees, "WORTH", 0.0)
    expected = Sampler(policy).generate(asked, sampling)
    prompts = sum(map(len, dict.fromkeys(ALIKE)))
    assert (read[0], read[len(read) // 2]) == (prompts - 2 * len(RULES) - 1, prompts)
    assert [answer.ids for answer in found] == [answer.ids for answer in expected]
    assert len({tuple(answer.ids) for answer in found}) > 3
    said = (torch.tensor([answer.logprobs for answer in answers]) for answers in (found, expected))
    assert rounding.near(policy.model, *said)


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_completion_depends_on_its_request_only(fast: bool, temperature: float) -> None:
    """Alone, among others, in another order, with few or many rows, with small or large prefills: the same answer."""
    policy = models.exact(policy_of(fast=fast))
    sampling = Sampling(max_new_tokens=12, temperature=temperature, stop_ids=tuple(range(50, 70)))
    asked = requests(24, prompts=ALIKE)
    answers = Sampler(policy, 64).generate(asked, sampling)
    if temperature:
        assert len({tuple(answer.ids) for answer in answers}) == 24
    assert len({len(answer.ids) for answer in answers}) > 1  # some leave early
    ids = [answer.ids for answer in answers]
    for rows in (1, 2, 5, 16):
        assert [answer.ids for answer in Sampler(policy, rows).generate(asked, sampling)] == ids
    backwards = Sampler(policy, 7).generate(asked[::-1], sampling)
    assert [answer.ids for answer in backwards[::-1]] == ids
    alone = [Sampler(policy, 64).generate([request], sampling)[0].ids for request in asked[:6]]
    assert alone == ids[:6]
    policy.tokens_per_forward = 8
    assert [answer.ids for answer in Sampler(policy, 64).generate(asked, sampling)] == ids


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("rows", [3, 6, 64])
@pytest.mark.parametrize("worth", [-1, 60, 1024], ids=["to the end", "for a time", "hardly"])
def test_a_shared_prompt_is_read_as_ones_own_is(
    kind: str, rows: int, worth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts stored once for all their answers, of which some leave early and others come, until few are left, against
    slots that hold their prompts themselves, as those of conversations do."""
    monkeypatch.setattr("lmgym.inference.decoder.WORTH_SHARING", worth)
    policy, sampling = models.exact(policy_of(kind)), Sampling(max_new_tokens=14, stop_ids=tuple(range(50, 70)))
    shared = requests(20)
    own = [replace(request, conversation=n) for n, request in enumerate(shared)]
    together, apart = Sampler(policy, rows).generate(shared, sampling), Sampler(policy, rows).generate(own, sampling)
    assert [answer.ids for answer in together] == [answer.ids for answer in apart]
    assert len({len(answer.ids) for answer in together}) > 3
    for one, other in zip(together, apart, strict=True):
        assert rounding.near(policy.model, one.logprobs, other.logprobs)


@pytest.mark.parametrize("rows", [3, 64])
@pytest.mark.parametrize("shared", [True, False])
def test_slots_grow_with_the_answers(monkeypatch: pytest.MonkeyPatch, rows: int, shared: bool) -> None:
    """The same bits as with slots that are as long as the longest answer from the beginning."""
    policy, sampling = policy_of(), Sampling(max_new_tokens=90, min_new_tokens=60)
    asked = requests(12 if shared else 4)
    grow, grown = KeyValueCache.grow, []

    def counted(cache: KeyValueCache, slots: int, capacity: int) -> None:
        grown.append(capacity)
        grow(cache, slots, capacity)

    monkeypatch.setattr(KeyValueCache, "grow", counted)
    monkeypatch.setattr(decoder, "FIRST_TOKENS", 5)
    by_parts = Sampler(policy, rows).generate(asked, sampling)
    assert len(grown) >= 2
    monkeypatch.setattr(decoder, "FIRST_TOKENS", 90)
    assert Sampler(policy, rows).generate(asked, sampling) == by_parts


def test_the_key_decides() -> None:
    policy, sampling = models.exact(policy_of()), Sampling(max_new_tokens=12)
    prompt = PROMPTS[0]
    same, other = ([Request(prompt, key) for key in keys] for keys in ([5, 5], [5, 6]))
    first, second = Sampler(policy).generate(same, sampling)
    assert first.ids == second.ids
    assert rounding.near(policy.model, first.logprobs, second.logprobs)
    first, second = Sampler(policy).generate(other, sampling)
    assert first.ids != second.ids


# Draws


@given(st.integers(0, 2**31), st.floats(0, 1, exclude_max=True), st.sampled_from([0.3, 1.0, 2.0]))
def test_a_draw_is_the_inverse_of_the_distribution(seed: int, uniform: float, temperature: float) -> None:
    """The token is the one whose piece of [0, 1) holds the uniform number; three blocks of tokens, some barred."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(1, 700, generator=generator)
    logits[0, torch.rand(700, generator=generator) < 0.3] = -math.inf
    tokens, logprobs = draw(logits, temperature, torch.tensor([uniform], dtype=torch.float64))
    exact = (logits[0].double() / temperature).softmax(0)
    upper = exact.cumsum(0)
    token = int(tokens[0])
    assert exact[token] > 0
    loose = rounding.rounding(700)  # probabilities are sums over up to 700 tokens, and so is what they are divided by
    assert float(upper[token] - exact[token]) - loose <= uniform <= float(upper[token]) + loose
    assert float(logprobs[0]) == pytest.approx(float(exact[token].log()), abs=loose)


@pytest.mark.slow
def test_draws_follow_the_softmax() -> None:
    """50,000 draws with fixed keys against a distribution with most of its mass at the edges of blocks: chi-square over
    the tokens that are expected 5 times or more, the rest together."""
    logits = torch.full((700,), -math.inf)
    logits[:700:3] = torch.linspace(-9, 1, 234)
    for place, token in enumerate([0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 699]):
        logits[token] = 3.0 + 0.2 * place
    logits[5] = -80.0  # possible, but never seen
    count = 50_000
    uniform = torch.from_numpy(seeds.uniforms([seeds.key(0, "draws", n) for n in range(count)], 3, 1)[:, 0])
    seen = torch.zeros(700)
    for part in uniform.split(5000):
        tokens, logprobs = draw(logits.expand(len(part), -1), 1.0, part)
        seen += torch.bincount(tokens, minlength=700)
        assert torch.allclose(logprobs, logits.log_softmax(0)[tokens], rtol=0, atol=rounding.rounding(700))
    expected = logits.double().softmax(0) * count
    assert float(seen[logits == -math.inf].sum()) == 0
    assert float(seen[5]) == 0
    many = expected >= 5
    assert 100 < int(many.sum()) < 240
    pairs = [
        *zip(seen[many].tolist(), expected[many].tolist(), strict=True),
        (float(seen[~many].sum()), float(expected[~many].sum())),
    ]
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in pairs)
    freedom = len(pairs) - 1
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([3, BLOCK, 700]))
def test_narrow_logits_are_drawn_from_as_their_copies_in_fp32(seed: int, temperature: float, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(5, vocabulary, generator=generator)).bfloat16()
    logits[:, ::3] = float("-inf")
    uniform = torch.rand(5, generator=generator, dtype=torch.float64)
    drawn, expected = draw(logits, temperature, uniform), draw(logits.float(), temperature, uniform)
    for narrow, wide in zip(drawn, expected, strict=True):
        assert narrow.dtype == wide.dtype and torch.equal(narrow, wide)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("vocabulary", [1, 3, BLOCK, BLOCK + 1, 700])
def test_draws_at_the_ends(uniform: float, vocabulary: int) -> None:
    """One possible token, at any place: it is drawn whatever the uniform number; and the last number gives the last."""
    for token in {0, vocabulary // 2, vocabulary - 1}:
        logits = torch.full((1, vocabulary), -math.inf)
        logits[0, token] = -1000.0
        tokens, logprobs = draw(logits, 1.0, torch.tensor([uniform], dtype=torch.float64))
        assert (int(tokens[0]), float(logprobs[0])) == (token, 0.0)
    tokens, _ = draw(torch.zeros(1, vocabulary), 1.0, torch.tensor([uniform], dtype=torch.float64))
    assert int(tokens[0]) == int(uniform * vocabulary)


def test_temperature_zero_is_the_most_likely_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 2.0]])
    tokens, logprobs = draw(logits, 0.0, torch.tensor([0.99, 0.99], dtype=torch.float64))
    assert tokens.tolist() == [1, 0]
    loose = rounding.rounding(2 * 3, 3.0)  # sums of three exponentials, off logits of up to 3
    assert torch.allclose(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]], rtol=0, atol=loose)


# Ends. The parrot's prompt is one token, so it says its script from the first id on.


def said(script: str | list[int], fast: bool = True, **settings: Any) -> tuple[str, str, Completion]:
    """What the parrot says before it stops, and why it stopped."""
    ids = models.tokenizer()(script, add_special_tokens=False)["input_ids"] if isinstance(script, str) else script
    policy = models.parrot([*ids, models.EOS])
    policy.fast = fast
    sampling = Sampling(temperature=0, **{"max_new_tokens": 60, **settings})
    answer = Sampler(policy).generate([Request((9,), 0)], sampling)[0]
    return models.tokenizer().decode(answer.ids, skip_special_tokens=True), answer.stop, answer


@pytest.mark.parametrize("fast", [True, False])
def test_the_parrot_ends_with_eos(fast: bool) -> None:
    text, stop, answer = said("one two", fast)
    assert (text, stop, answer.ids[-1]) == ("one two", "eos", models.EOS)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("script", "stop", "kept"),
    [
        ("a b\n\nc", ("\n\n",), "a b\n\n"),
        ("A: 18 Q: next", ("Q:", "###"), "A: 18 Q:"),
        ("xxab", ("xab",), "xxab"),
        ("über → weiter", ("→",), "über →"),  # three bytes, three tokens
        ("so 🙂🙂🙂🙂🙂 go on", ("🙂🙂🙂🙂🙂",), "so 🙂🙂🙂🙂🙂"),  # five characters, twenty tokens
        ("never", ("\n\n",), "never"),
    ],
)
def test_stop_strings(script: str, stop: tuple[str, ...], kept: str, fast: bool) -> None:
    text, why, _ = said(script, fast, stop=stop)
    assert (text, why) == (kept, "eos" if kept == script == "never" else "stop")


def test_the_whole_token_that_completes_a_stop_string_is_kept() -> None:
    tokenizer = models.byte_tokenizer()
    tokenizer.add_tokens(["end.\n\nQ"])
    ids = tokenizer("so end.\n\nQ: more", add_special_tokens=False)["input_ids"]
    policy = models.parrot([*ids, models.EOS])
    policy.tokenizer = tokenizer
    answer = Sampler(policy).generate([Request((9,), 0)], Sampling(temperature=0, max_new_tokens=40, stop=("\n\n",)))[0]
    assert (answer.stop, tokenizer.decode(answer.ids)) == ("stop", "so end.\n\nQ")


@pytest.mark.parametrize("generation", [None, {"num_beams": 1}, {"num_beams": 2}])
@pytest.mark.parametrize(("stop", "count"), [("<|end|>", 3), ("b<|end|>", 3), ("<|end|>c", 4), ("ab", 2), ("bc", 4)])
def test_a_stop_string_may_name_a_special_token(stop: str, count: int, generation: dict[str, Any] | None) -> None:
    """Of the recipe or of a request. Other strings are looked for in the text without special tokens."""
    tokenizer = models.byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    ids = tokenizer("ab<|end|>c", add_special_tokens=False)["input_ids"]
    policy = models.parrot([*ids, models.EOS])
    policy.tokenizer = tokenizer
    for of_recipe, of_request in (((stop,), ()), ((), (stop,))):
        sampling = Sampling(temperature=0, max_new_tokens=40, stop=of_recipe)
        if generation is not None:
            sampling = Decoding(temperature=0, max_new_tokens=40, stop=of_recipe, generation=generation)
        answer = Sampler(policy).generate([Request((9,), 0, stop=of_request)], sampling)[0]
        assert (answer.ids, answer.stop) == (ids[:count], "stop")


def test_a_stop_string_in_the_prompt_stops_nothing() -> None:
    newline = models.tokenizer()("\n", add_special_tokens=False)["input_ids"][0]
    policy = models.parrot([9, 9, newline, 10, models.EOS])
    answer = Sampler(policy).generate([Request((newline, newline), 0)], Sampling(temperature=0, stop=("\n\n",)))[0]
    assert (answer.ids, answer.stop) == ([9, newline, 10, models.EOS], "eos")


@pytest.mark.parametrize("fast", [True, False])
def test_stop_ids_length_and_context(fast: bool) -> None:
    script = list(range(10, 100))
    _, why, answer = said(script, fast, stop_ids=(15, 18))
    assert (answer.ids, why) == ([10, 11, 12, 13, 14, 15], "stop")
    _, why, answer = said(script, fast, stop_ids=(15, 18), min_new_tokens=7)
    assert (len(answer.ids), answer.ids[-1], why) == (9, 18, "stop")  # 15 could not be said
    for wrong in (models.VOCABULARY, -1):
        with pytest.raises(LmgymError, match=rf"sampling\.stop_ids holds {wrong}, and the model has the ids 0 to 258"):
            said(script, fast, stop_ids=(15, wrong), min_new_tokens=7)
    _, why, answer = said(script, fast, max_new_tokens=4)
    assert (answer.ids, why) == ([10, 11, 12, 13], "length")
    _, why, answer = said(script, fast, max_new_tokens=200)  # the parrot reads 64 tokens
    assert (len(answer.ids), why) == (63, "context")
    _, why, answer = said(script, fast, max_new_tokens=63)
    assert (len(answer.ids), why) == (63, "length")


def test_an_end_that_the_model_lacks_is_none() -> None:
    """In a generation_config.json; -1 says there that there is none, and is no place of the logits."""
    policy = policy_of()
    usual = policy.model.generation_config.eos_token_id
    try:
        policy.model.generation_config.eos_token_id = [models.EOS, -1, 5000]
        assert policy.stop_ids == (models.EOS,)
        asked = requests(4)
        assert gap(policy, asked, Sampler(policy).generate(asked, MINIMUM), MINIMUM) < 1e-5
    finally:
        policy.model.generation_config.eos_token_id = usual


def test_prompts_that_leave_no_room_are_refused() -> None:
    sampler = Sampler(policy_of())
    assert sampler.context == 64
    with pytest.raises(LmgymError, match="64 tokens, and the model reads 64 at most"):
        sampler.generate([Request((1,) * 64, 0)], Sampling())
    with pytest.raises(LmgymError, match="no token at all"):
        sampler.generate([Request((), 0)], Sampling())
    assert len(sampler.generate([Request((1,) * 63, 0)], Sampling())[0].ids) == 1
    assert sampler.generate([], Sampling()) == []


# Weights


def test_the_copy_follows_load() -> None:
    """Sampling in bf16 from fp32 masters: the copy is renewed by `load`, and keeps the precision of its positions."""
    policy = policy_of(compute=torch.bfloat16)
    sampler, sampling, asked = Sampler(policy), Sampling(max_new_tokens=16), requests(12)
    copied = sampler._copy.model
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.bfloat16}
    for ours, theirs in zip(copied.buffers(), policy.model.buffers(), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    before = sampler.generate(asked, sampling)
    assert rounding.near_in_bf16(policy.model, *reported_and_scored(policy, asked, before, sampling))
    moved = policy_of(compute=torch.bfloat16)
    models.sharpen(moved.model, 0.12, seed=1)
    policy.model.load_state_dict(moved.model.state_dict())
    assert not rounding.near_in_bf16(policy.model, *reported_and_scored(policy, asked, before, sampling))
    assert [answer.ids for answer in sampler.generate(asked, sampling)] == [answer.ids for answer in before]
    sampler.load(policy, 1)
    after = sampler.generate(asked, sampling)
    assert sampler.version == 1
    assert rounding.near_in_bf16(policy.model, *reported_and_scored(policy, asked, after, sampling))
    assert [answer.ids for answer in after] == [answer.ids for answer in Sampler(moved).generate(asked, sampling)]
    assert next(policy.model.parameters()).dtype == torch.float32
    assert policy.parameters() and not any(parameter.requires_grad for parameter in copied.parameters())


def test_fp32_weights_are_shared() -> None:
    policy = policy_of()
    sampler = Sampler(policy)
    before = sampler.generate(requests(4), Sampling(max_new_tokens=8))
    models.sharpen(policy.model, 0.12, seed=1)
    after = sampler.generate(requests(4), Sampling(max_new_tokens=8))
    assert [answer.ids for answer in before] != [answer.ids for answer in after]


def test_sampling_follows_the_models_probabilities() -> None:
    """First tokens of 4,000 answers to one prompt, against the softmax of Hugging Face's logits."""
    policy = models.parrot([9])
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        policy.model.lm_head.weight[:, 0] = 0.1 * torch.randn(models.VOCABULARY, generator=random)
    asked = [Request((9,), seeds.key(1, n)) for n in range(4000)]
    answers = Sampler(policy, 512).generate(asked, Sampling(max_new_tokens=1))
    seen = np.bincount([answer.ids[0] for answer in answers], minlength=models.VOCABULARY)
    with torch.no_grad():
        expected = policy.model(input_ids=torch.tensor([[9]])).logits[0, -1].double().softmax(0).numpy() * 4000
    few = expected < 5
    statistic = ((seen - expected)[~few] ** 2 / expected[~few]).sum()
    freedom = int((~few).sum())
    assert freedom > 200
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


# Pretrained models


def pretrained(name: str) -> Policy:
    folder = models.SHARED / "models" / name
    return Policy(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


@pytest.mark.slow
@models.needs_shared
def test_greedy_stories_equal_generate() -> None:
    """stories260K writes 100 tokens of English to three prompts, as `generate` does."""
    policy = pretrained("stories260K-hf")
    texts = ["Once upon a time", "Lily and Ben went to", "The dog"]
    prompts = [tuple(policy.tokenizer(text)["input_ids"]) for text in texts]
    asked = [Request(prompt, 0) for prompt in prompts]
    answers = Sampler(policy).generate(asked, Sampling(temperature=0, max_new_tokens=100))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = policy.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=100,
        )
        assert answer.ids == expected[0, len(prompt) :].tolist()
    assert max(len(answer.ids) for answer in answers) == 100
    text = policy.tokenizer.decode(answers[0].ids)
    assert "was" in text.split()


@pytest.mark.slow
@models.needs_shared
def test_stories_respect_the_minimum() -> None:
    policy = pretrained("stories260K-hf")
    assert policy.stop_ids == (1, 2)
    prompt = tuple(policy.tokenizer("Once upon a time")["input_ids"])
    full_stop = policy.tokenizer.convert_tokens_to_ids(".")
    asked = [Request(prompt, seeds.key(n)) for n in range(12)]
    free = Sampler(policy).generate(asked, Sampling(max_new_tokens=60, stop_ids=(full_stop,)))
    assert min(len(answer.ids) for answer in free) < 30
    sampling = Sampling(max_new_tokens=60, min_new_tokens=40, stop_ids=(full_stop,))
    longer = Sampler(policy).generate(asked, sampling)
    assert min(len(answer.ids) for answer in longer) >= 41
    assert {answer.stop for answer in longer} >= {"stop"}
    assert rounding.near(policy.model, *reported_and_scored(policy, asked, longer, sampling), tokens=128)


@models.needs_shared
def test_gpt_nano_sorts() -> None:
    """A GPT-2 of 11 positions, trained to sort six letters: each of the 729 inputs, as far as it can read."""
    policy = pretrained("gpt-nano-sort-hf")
    inputs = np.stack(np.meshgrid(*[[0, 1, 2]] * 6), -1).reshape(-1, 6)
    asked = [Request(tuple(letters), 0) for letters in inputs.tolist()]
    answers = Sampler(policy).generate(asked, Sampling(temperature=0, max_new_tokens=6))
    assert {answer.stop for answer in answers} == {"context"}
    assert [answer.ids for answer in answers] == [sorted(letters)[:5] for letters in inputs.tolist()]


@pytest.mark.parametrize(("queries", "groups", "own_size"), [(4, 4, None), (4, 2, None), (4, 1, None), (2, 2, 16)])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_what_a_token_takes_is_what_the_models_own_cache_takes(
    kind: str, queries: int, groups: int, own_size: int | None
) -> None:
    """Also where fewer heads have keys and values than have queries, and with a head size of its own."""
    classes = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "vocab_size": models.VOCABULARY}
    heads = {"num_attention_heads": queries, "num_key_value_heads": groups}
    config = classes[kind][0](**shape, **heads, **({} if own_size is None else {"head_dim": own_size}))
    model = classes[kind][1](config)
    cache = model(torch.tensor([[5]]), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert _token_bytes(Policy(model, models.tokenizer())) == held + 8  # and a random number
