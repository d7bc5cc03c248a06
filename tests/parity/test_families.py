"""Every family against Hugging Face's own forward pass and `generate`: the fast path where a family has it, the plain
one for the rest. Tiny random models from their configs; nothing is downloaded."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lmgym.batch import Batch
from lmgym.config.schema import Config, Stage
from lmgym.core.errors import LmgymError
from lmgym.functional.divergences import Divergence
from lmgym.inference.base import Completion, Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models import attention_probe, copies, fast_path, scoring
from lmgym.models.attention import packed, rules
from lmgym.models.attention.cpu import BlockGroups, BlockRows
from lmgym.models.attention.flex import FlexGroups, FlexRows
from lmgym.models.attention.packed import PackedGroups, PackedRows
from lmgym.models.attention.rules import Rule
from lmgym.models.bound import bound_of, gap_of
from lmgym.models.distributions import own_logprobs
from lmgym.models.families import FAST_FAMILIES, context_length, trunk_of
from lmgym.models.fast_path import route_of
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.sentences import path_sentence
from lmgym.models.teaching import compare
from lmgym.training.machine import choose_machine
from lmgym.training.setup import load_weights
from lmgym.types import Episode, Example, Turn
from tests import models, rounding

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GROUPED = {**SMALL, "num_key_value_heads": 2}
FAST: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_key_value_heads": 4},
    "llama, grouped queries": {**GROUPED, "attention_bias": True, "tie_word_embeddings": True},
    "llama, scaled positions": {
        **GROUPED,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    },
    "mistral": {**GROUPED, "sliding_window": None},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "gemma": {**GROUPED, "head_dim": 16},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": SMALL,
    "gpt_neox, serial": {**SMALL, "use_parallel_residual": False, "rotary_pct": 0.5},
}
# Families that no list names: they take the fast path because a trial at load says so (models/fast_path.py).
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
MIXTURE = {**GROUPED, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
TRIED: dict[str, dict[str, Any]] = {
    "mistral, window of 4": {**GROUPED, "sliding_window": 4},
    "qwen2, window of 4": {**GROUPED, "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {**GROUPED, **ALTERNATING, "head_dim": 8},  # capped scores and logits
    "gemma3_text": {**GROUPED, **ALTERNATING, "head_dim": 8},
    "gpt_oss": {**GROUPED, **ALTERNATING, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
    "llama4_text": {  # pieces of 4 tokens, and every second layer without positions
        **GROUPED,
        "head_dim": 8,
        "attention_chunk_size": 4,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "moe_layers": [],
        "intermediate_size_mlp": 64,
    },
    "cohere2": {**GROUPED, **ALTERNATING, "logit_scale": 0.3},  # scaled logits
    "granite": {**GROUPED, "logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "olmo3": {**GROUPED, **ALTERNATING},
    "smollm3": {**GROUPED, "no_rope_layers": [1, 0]},
    "phi": SMALL,  # a bias in the LM head
    "phi3": GROUPED,
    "glm4": {**GROUPED, "head_dim": 8},
    "starcoder2": {**GROUPED, "sliding_window": 4},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {**MIXTURE, "head_dim": 8},
    "minicpm3": {  # keys longer than values
        **SMALL,
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
}
PLAIN: dict[str, dict[str, Any]] = {
    "opt": {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
    },
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4},  # no cache at all
}
FAMILIES = FAST | TRIED | PLAIN
PROMPTS = [(1, 10, 11), (1, 20), (1, 10, 11, 12, 13, 14, 15, 16, 17), (1, 10, 11), (7,)]
NEW = 16

every_family = pytest.mark.parametrize("family", FAMILIES)
every_fast_family = pytest.mark.parametrize("family", FAST | TRIED)


@functools.cache
def model_of(family: str) -> Any:
    fields = {"max_position_embeddings": 64} | FAMILIES[family]
    config = AutoConfig.for_model(
        family.split(",")[0], vocab_size=300, bos_token_id=1, eos_token_id=models.EOS, pad_token_id=0, **fields
    )
    return models.sharpen(AutoModelForCausalLM.from_config(config)).eval()


def policy_of(family: str, **settings: Any) -> Policy:
    """On the path that a recipe would give it, or on that of `fast`."""
    policy = Policy(model_of(family), models.tokenizer(), **settings)
    return policy if "fast" in settings else policy.but(**vars(route_of(policy)))


def batch_of_rows() -> Batch:
    """Six rows of 5 to 20 tokens, two turns each."""
    episodes = models.episodes(3, groups=2, size=3, turns=2)
    return models.batch_of([*episodes, Episode(Example("x", "?"), 9, 9, [Turn([*range(3, 15)], [*range(20, 28)])])])


def of_hugging_face(model: Any, batch: Batch) -> Tensor:
    """log_softmax of the model's forward pass over each row alone, at the actions."""
    result = torch.zeros(batch.tokens.shape)
    for row, tokens in enumerate(batch.tokens):
        length = int(batch.mask[row].sum())
        logprobs = model(input_ids=tokens[None, :length]).logits[0].log_softmax(-1)
        taken = logprobs[:-1].gather(1, tokens[1:length, None])[:, 0]
        result = result.index_put((torch.full((length - 1,), row), torch.arange(1, length)), taken)
    return result * batch.actions


def gradients(model: Any, logprobs: Tensor) -> list[Tensor]:
    """Of the log-probabilities weighted by place, so that a mix-up of rows or columns shows."""
    weight = torch.sin(torch.arange(logprobs.numel(), dtype=torch.float32)).reshape(logprobs.shape)
    return torch.autograd.grad((logprobs * weight).sum(), list(model.parameters()), allow_unused=True)


def flat(found: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([one.flatten() for one in found if one is not None])


def test_the_named_families_take_the_fast_path_and_the_others_do_not() -> None:
    assert {family.split(",")[0] for family in FAST} == set(FAST_FAMILIES)
    paths = {family: policy_of(family) for family in FAMILIES}
    assert {family: policy.fast for family, policy in paths.items()} == {f: f not in PLAIN for f in FAMILIES}
    assert all(bool(policy.plain_because) == (family in PLAIN) for family, policy in paths.items())


@every_family
def test_scores_and_gradients_equal_hugging_faces(family: str) -> None:
    model, batch = model_of(family), batch_of_rows()
    expected = of_hugging_face(model, batch)
    theirs = gradients(model, expected)
    assert float(expected.detach().std()) > 0.5
    for policy in [policy_of(family), policy_of(family, fast=False)][: 1 + (family not in PLAIN)]:
        scored = policy.compute_logprobs(batch).logprobs
        assert rounding.near(model, scored, expected)
        for ours, their in zip(gradients(model, scored), theirs, strict=True):
            assert (ours is None) == (their is None)
            if ours is not None:
                assert rounding.near_gradient(model, ours, their, outputs=int(batch.actions.sum()))
        parts = torch.cat(
            [policy.compute_logprobs_no_grad(batch[torch.tensor([row])]).logprobs.sum(1) for row in range(len(batch))]
        )
        assert rounding.near(model, parts, expected.sum(1))


@every_family
def test_small_mistakes_are_far_beyond_rounding(family: str) -> None:
    """That `rounding` can say no: to a temperature of 0.98, to another first token of each row, to bf16."""
    model, batch, policy = model_of(family), batch_of_rows(), policy_of(family)
    changed = batch.tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 250 + 3
    expected = policy.compute_logprobs(batch).logprobs
    theirs = flat(gradients(model, expected))
    for other, wrong in (
        (policy, batch.replace(temperature=0.98)),
        (policy, batch.replace(tokens=changed)),
        (policy_of(family, compute=torch.bfloat16), batch),
    ):
        said = other.compute_logprobs(wrong).logprobs
        gaps = (said - expected).detach()[batch.actions]
        assert float(gaps.square().mean().sqrt()) > 50 * rounding.typical_tolerance(model)
        assert not rounding.near(model, gaps, torch.zeros_like(gaps))
        tenth = theirs + (flat(gradients(model, said)) - theirs) / 10
        assert not rounding.near_gradient(model, tenth, theirs, outputs=len(gaps))


def generated(model: Any, prompt: tuple[int, ...], eos: list[int]) -> list[int]:
    """Hugging Face's greedy answer to one prompt, up to and with the first EOS."""
    return model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=eos,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()


def greedy(policy: Policy, rows: int, **settings: Any) -> list[Completion]:
    requests = [Request(prompt, place) for place, prompt in enumerate(PROMPTS)]
    return Sampler(policy, rows).generate(requests, Sampling(temperature=0, max_new_tokens=NEW, **settings))


@pytest.mark.slow
@every_family
def test_greedy_answers_equal_generate(family: str) -> None:
    """Prompts of different lengths, one of them twice; then again with an EOS that does occur, at different places."""
    paths = [policy_of(family), policy_of(family, fast=False)][: 1 + (family not in PLAIN)]
    if family != "gemma2":  # its own forward pass gives NaN for padded rows in fp64
        paths = [models.exact(policy) for policy in paths]
    model = paths[0].model
    free = [generated(model, prompt, [models.EOS]) for prompt in PROMPTS]
    assert len({tuple(ids) for ids in free}) >= 4
    for policy in paths:
        for rows in (64, 2):
            answers = greedy(policy, rows)
            assert [answer.ids for answer in answers] == free
            reported = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
            turns = [Turn([*prompt], ids) for prompt, ids in zip(PROMPTS, free, strict=True)]
            batch = models.batch_of([Episode(Example("x", "?"), n, n, [turn]) for n, turn in enumerate(turns)])
            assert rounding.near(model, reported, policy.compute_logprobs_no_grad(batch).logprobs[batch.actions])
    longest = max(free, key=lambda ids: len(set(ids)))
    ending = next(token for token in longest[3:] if token not in longest[:3])
    stopped = [generated(model, prompt, [models.EOS, ending]) for prompt in PROMPTS]
    assert stopped != free
    for policy in paths:
        answers = greedy(policy, 64, stop_ids=(ending,))
        assert [answer.ids for answer in answers] == stopped
        for answer in answers:
            expected = {models.EOS: "eos", ending: "stop"}.get(answer.ids[-1], "length")
            assert answer.stop == expected


@pytest.mark.parametrize("family", ["llama", "granite", "cohere2", "gemma2"])
def test_a_divergence_is_that_of_the_models_own_logits(family: str) -> None:
    """Scaled and capped ones too, of a student and of a teacher; both are models that agree with `of_hugging_face`."""
    policy, other, batch = policy_of(family), policy_of("qwen2"), batch_of_rows()
    row, column = batch.actions.nonzero(as_tuple=True)
    with torch.no_grad():
        for student, teacher in ((policy, other), (other, policy)):
            states = student.states(batch, row, column - 1)
            found = compare(student, teacher, batch, states, row, column, Divergence("reverse_kl"))
            p, q = (of_rows(one.model, batch)[row, column - 1] for one in (student, teacher))
            own = p.gather(1, batch.tokens[row, column][:, None])[:, 0]
            assert rounding.near(student.model, found.logprobs, own)
            assert rounding.near(student.model, found.divergences, (p.exp() * (p - q)).sum(-1))


def of_rows(model: Any, batch: Batch) -> Tensor:
    """log_softmax of the model's forward pass over each row alone, [rows, tokens, vocabulary]."""
    result = torch.zeros(*batch.tokens.shape, model.config.vocab_size)
    for row, tokens in enumerate(batch.tokens):
        length = int(batch.mask[row].sum())
        result[row, :length] = model(input_ids=tokens[None, :length]).logits[0].log_softmax(-1)
    return result


@every_fast_family
def test_the_model_is_left_as_it_was(family: str) -> None:
    """A forward pass of ours must not change what the model's own forward pass does afterwards."""
    model, ids = model_of(family), torch.tensor([PROMPTS[2]])
    before = model(input_ids=ids).logits
    policy = policy_of(family)
    policy.compute_logprobs(batch_of_rows())
    greedy(policy, 64)
    assert torch.equal(model(input_ids=ids).logits, before)


@every_fast_family
def test_rules_are_read_without_random_numbers_and_leave_listed_families_alone(family: str) -> None:
    """What a listed family computes has not changed: it has no rules, and its logits are its LM head's."""
    model_of(family)  # its random weights are drawn once, by whichever test comes first
    state = torch.get_rng_state()
    policy = policy_of(family)
    assert torch.equal(torch.get_rng_state(), state)
    if family in FAST:
        assert (policy.rules, policy.own_head) == ((), None)
        assert trunk_of(policy.model) is policy.model.base_model


def test_rules_are_what_the_configuration_says() -> None:
    expected = {
        "mistral, window of 4": (Rule(4), Rule(4)),
        "qwen2, window of 4": (Rule(), Rule(4)),
        "gemma2": (Rule(4, softcap=50.0), Rule(softcap=50.0)),
        "gemma3_text": (Rule(4), Rule()),
        "gpt_oss": (Rule(4, sinks=True), Rule(sinks=True)),
        "llama4_text": (Rule(4, chunked=True), Rule()),
        "granite": (),
    }
    assert {family: policy_of(family).rules for family in expected} == expected


def _with_rules(family: str, change: Callable[[Rule], Rule]) -> Policy:
    policy = policy_of(family)
    policy.rules = tuple(map(change, policy.rules))
    return policy


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral, window of 4", lambda rule: replace(rule, window=5)),
        ("llama4_text", lambda rule: replace(rule, chunked=False)),
        ("gemma2", lambda rule: replace(rule, softcap=None)),
        ("gemma2", lambda rule: replace(rule, window=None)),
        ("gpt_oss", lambda rule: replace(rule, sinks=False)),
    ],
)
def test_a_wrong_rule_is_found_by_the_trial(family: str, change: Callable[[Rule], Rule]) -> None:
    """In packed rows and in decoding, each by itself."""
    policy, changed = policy_of(family), _with_rules(family, change)
    batch = fast_path.trial_batch(policy)
    own, spread = own_logprobs(policy, batch)
    bound = bound_of(policy, spread)
    for way in fast_path.WAYS.values():
        right, wrong = way(policy, batch), way(changed, batch)
        known = batch.actions & (right != 0)
        assert gap_of(right, own, known).within(bound)
        assert not gap_of(wrong, own, known).within(bound)


def test_a_model_that_fails_its_trial_takes_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "attention_rules", lambda _: (Rule(5), Rule(5)))
    policy = policy_of("mistral, window of 4")
    assert not policy.fast and policy.rules == ()
    assert policy.plain_because.startswith("packed rows on the fast path differ from its own pass by ")
    assert rounding.near(
        policy.model, policy.compute_logprobs(batch_of_rows()).logprobs, of_hugging_face(policy.model, batch_of_rows())
    )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "layouts",
    [(PackedRows, PackedGroups, None), (BlockRows, BlockGroups, None), (FlexRows, FlexGroups, None)],
)
def test_every_layout_follows_the_rules(
    layouts: tuple[Any, Any, None], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, pieces, caps and sinks, with a shared prompt and without."""
    monkeypatch.setattr(scoring, "_layouts", lambda _: layouts)
    batch = batch_of_rows() if shared else batch_of_rows()[torch.tensor([0, 3, 6])]
    for family in ("gemma2", "gpt_oss", "llama4_text"):
        scored = policy_of(family).compute_logprobs(batch).logprobs
        assert rounding.near(model_of(family), scored, of_hugging_face(model_of(family), batch))


def test_listed_families_reach_no_code_of_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they compute in fp32 is what it was: their layers go through `Layout.attend`, as before there were rules."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a listed family came to the code of the rules")

    for name in ("attention", "shares"):
        monkeypatch.setattr(rules, name, refuse)
    for family in FAST:
        policy = policy_of(family)
        gradients(policy.model, policy.compute_logprobs(batch_of_rows()).logprobs)
        greedy(policy, 64)
    assert "came to the code" in policy_of("mistral, window of 4").plain_because


def saved(family: str, folder: Path) -> PolicySection:
    model_of(family).save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return PolicySection(model=str(folder), device="cpu", compute="float32")


def test_a_recipe_chooses_among_paths(tmp_path: Path) -> None:
    section = saved("cohere2", tmp_path / "tried")
    assert path_sentence(load_policy(section)) == "path: fast (packed rows, own KV cache)"
    plain = load_policy(replace(section, path="plain"))
    assert path_sentence(plain) == "path: plain (padded, slower): policy.path: plain"
    assert not plain.fast and plain.rules == () and plain.own_head is None
    section = saved("gpt_neo", tmp_path / "plain")
    reason = "2 of its 2 layers have no attention through transformers' attention interface"
    assert path_sentence(load_policy(section)) == f"path: plain (padded, slower): {reason}"
    with pytest.raises(LmgymError, match=f"does not serve gpt_neo, because {reason}"):
        load_policy(replace(section, path="fast"))


def test_a_copy_that_samples_in_bf16_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of("gpt_oss", compute=torch.bfloat16)
    assert policy.fast
    batch = batch_of_rows()
    copied = copies.sampling(policy)
    with copied.precision():
        sampled = copied.compute_logprobs_no_grad(batch).logprobs
    assert gap_of(sampled, of_hugging_face(policy.model, batch).detach(), batch.actions).within(bound_of(policy, 1.0))

    def fails(_: Policy) -> Policy:
        raise RuntimeError("index_add_(): self and source\nmust have the same type")

    monkeypatch.setattr(copies, "sampling", fails)
    policy = policy_of("gpt_oss", compute=torch.bfloat16)
    assert not policy.fast
    expected = "the fast path fails (RuntimeError: index_add_(): self and source must have the same type)"
    assert policy.plain_because == expected


@pytest.mark.parametrize(("rule", "numbers"), [(Rule(softcap=5.0), 2), (Rule(sinks=True), 1)])
def test_numbers_that_explicit_scores_keep_for_a_pair(rule: Rule, numbers: int) -> None:
    """What the estimate of memory counts for backward (`Shapes.pair_values`)."""
    query, keys, values = (torch.randn(2, 4, 64, 4, requires_grad=True) for _ in range(3))
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    seen = torch.ones(64, 64, dtype=torch.bool).tril()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        asked = rules.Asked(None, rule, torch.zeros(4) if rule.sinks else None)
        out = rules.attention(query, keys, values, seen, asked)
    pairs = 2 * 4 * 64 * 64
    assert sum(number for number in kept.values() if number >= pairs) // pairs == numbers
    assert out.requires_grad


def test_longrope_ends_where_its_frequencies_change() -> None:
    """A row keeps its logits beside a longer one: rows end where the frequencies of all rows would change."""
    axes = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    axes |= {"original_max_position_embeddings": 16}
    fields = {**GROUPED, "max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_parameters": axes}
    config = AutoConfig.for_model("phi3", vocab_size=300, pad_token_id=0, eos_token_id=2, **fields)
    model = models.sharpen(AutoModelForCausalLM.from_config(config)).eval()
    rows = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))

    def first(longest: int) -> Tensor:
        """The logits of a row of 8 tokens in a padded pass beside a row of `longest` tokens."""
        mask = torch.arange(longest) < torch.tensor([[8], [longest]])
        return model(input_ids=rows[:, :longest], attention_mask=mask.long()).logits[0, :8].detach()

    context = context_length(model)
    assert context == 16
    torch.testing.assert_close(first(context), first(8), rtol=1e-4, atol=1e-5)
    assert (first(context + 1) - first(8)).abs().max() > 0.01


def test_a_mistake_of_lmgym_is_not_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong name in lmgym's own code, which the model calls, is raised; what the model's code raises is a reason."""
    monkeypatch.delattr(packed, "per_query_head")
    with pytest.raises(NameError, match="per_query_head"):
        policy_of("gpt_oss")
    monkeypatch.undo()
    monkeypatch.delattr(fast_path, "collate")
    with pytest.raises(NameError, match="collate"):
        policy_of("gpt_oss")
    monkeypatch.undo()
    monkeypatch.setattr(fast_path, "trunk_of", lambda model: torch.nn.Linear(2, 2))  # it takes no input_ids
    monkeypatch.setattr(attention_probe, "trunk_of", lambda model: torch.nn.Linear(2, 2))
    assert policy_of("gpt_oss").plain_because.startswith("its layers could not be read (TypeError: ")


def test_the_value_of_a_path_in_machine_json(tmp_path: Path) -> None:
    """A resumed run takes the path that it began with; a file with another word is refused."""
    config = Config(policy=PolicySection(), stages=[Stage(task={"name": "arithmetic"}, rewards={"length": 1.0})])
    replace(choose_machine(config, None), path="plain").write(tmp_path)
    found = choose_machine(config, tmp_path)
    assert found.policy_section(config.policy).path == "plain"
    assert found.policy_section(replace(config.policy, path="fast")).path == "fast"
    replace(found, path="quick").write(tmp_path)
    with pytest.raises(LmgymError, match="path is 'quick'"):
        choose_machine(config, tmp_path)


def test_an_old_run_folder_stays_on_its_path(tmp_path: Path) -> None:
    """A machine.json of before it named a path: a family that is not listed was sampled on the plain path."""
    stage = Stage(task={"name": "arithmetic"}, rewards={"length": 1.0})
    config = Config(policy=saved("cohere2", tmp_path / "tried"), stages=[stage])
    machine = replace(choose_machine(config, None), compute="float32")
    assert not load_weights(config.policy, config.seed, machine, None).fast
    assert load_weights(config.policy, config.seed, replace(machine, path="fast"), None).fast
    listed = replace(config, policy=saved("llama", tmp_path / "listed"))
    assert load_weights(listed.policy, listed.seed, machine, None).fast
