"""Models that read pictures against transformers' own forward pass and `generate`, one tiny random model of each
architecture; nothing is downloaded."""

import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmgym.batch import Batch, collate
from lmgym.core.errors import LmgymError
from lmgym.inference.base import Completion, Decoding, Request, Sampling
from lmgym.inference.proof import prove
from lmgym.inference.sampler import Sampler
from lmgym.models import copies, scoring, vision
from lmgym.models.critic import with_critic
from lmgym.models.distributions import own_logprobs
from lmgym.models.export import merge_model
from lmgym.models.load import load_policy
from lmgym.models.lora import AdapterDisabledPolicy
from lmgym.models.model_info import read_model_info
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.sentences import path_sentence
from lmgym.models.shapes import shapes_of
from lmgym.models.vision import (
    FAMILIES,
    ids_between,
    make_processor,
    picture_tokens,
    placeholder_of,
    processed,
    vision_names,
)
from lmgym.pictures.ids import is_piece, picture_of, piece_ids
from lmgym.text.chat import prompt_ids
from lmgym.text.pictures import read_pictures
from lmgym.types import Episode, Example, RecipeText, Turn, picture_text
from tests import models, rounding, vision_models
from tests.vision_models import Drawn

NEW = 6
with_qwen3 = pytest.mark.parametrize("family", [*vision_models.FAMILIES, "qwen3_vl"])
every_family = pytest.mark.parametrize("family", vision_models.FAMILIES)


@functools.cache
def pictures() -> tuple[Drawn, list[str]]:
    """Two pictures of one size, and one of another."""
    drawn = Drawn()
    return drawn, [drawn.draw(1, 20, 12), drawn.draw(2, 20, 12), drawn.draw(3, 14, 30)]


@functools.cache
def folder_of(family: str) -> Path:
    return vision_models.write(family, Path(tempfile.mkdtemp()) / family)


def load(family: str, folder: Path | None = None, **section: Any) -> Policy:
    given = PolicySection(model=str(folder_of(family)), device="cpu", compute="float32", **section)
    policy = load_policy(given, 0, folder)
    assert policy.vision is not None
    policy.vision.reader.pictures = pictures()[0]
    return policy


@functools.cache
def policy_of(family: str) -> Policy:
    return load(family)


def shown(policy: Policy, number: int) -> list[int]:
    """The ids that stand for a picture."""
    drawn, digests = pictures()
    assert policy.vision is not None
    return picture_tokens(policy.vision.processor, digests[number], drawn.open(digests[number]))


def text(words: str) -> list[int]:
    return [byte + 3 for byte in words.encode()]


def prompts(policy: Policy) -> list[tuple[int, ...]]:
    """The same text with two pictures, a picture of another size, two pictures in one prompt, and a text alone."""
    one, two, three = (shown(policy, number) for number in range(3))
    return [
        (1, *text("See "), *one, *text("?")),
        (1, *text("See "), *two, *text("?")),
        (1, *three, *text("Why?")),
        (1, *text("a"), *three, *text("b"), *one, *text("c")),
        (1, *text("2+2=")),
    ]


def sampled(policy: Policy, answers: int = 2, sampler: Sampler | None = None, **settings: Any) -> Batch:
    """Answers to all prompts as a batch."""
    requests = [Request(prompt, key) for key, prompt in enumerate(prompts(policy)) for _ in range(answers)]
    requests = [Request(request.prompt_ids, key) for key, request in enumerate(requests)]
    said = (sampler or Sampler(policy)).generate(requests, Sampling(max_new_tokens=NEW, **settings))
    return batch_of(requests, said, answers)


def batch_of(requests: Sequence[Request], said: Sequence[Completion], answers: int = 2) -> Batch:
    turns = [
        Turn(list(request.prompt_ids), answer.ids, answer.logprobs)
        for request, answer in zip(requests, said, strict=True)
    ]
    return collate([Episode(Example("x", "?"), n // answers, n, [turn]) for n, turn in enumerate(turns)])


def near(policy: Policy, ours: Tensor, theirs: Tensor) -> bool:
    return rounding.near(policy.model, ours, theirs, tokens=128)


@with_qwen3
def test_sampled_scored_and_transformers_own_agree(family: str) -> None:
    policy = policy_of(family)
    assert policy.fast
    batch = sampled(policy)
    own, _ = own_logprobs(policy, batch)
    scored = policy.compute_logprobs_no_grad(batch).logprobs
    drawn = batch.require("logprobs_sampler")
    assert near(policy, scored[batch.actions], own[batch.actions])
    assert near(policy, drawn[batch.actions], own[batch.actions])
    # The same text and another picture is another prompt.
    one, two = shown(policy, 0), shown(policy, 1)
    assert [is_piece(id) for id in one] == [is_piece(id) for id in two]
    swap = {a: b for a, b in zip(one, two, strict=True) if is_piece(a)}
    swapped = batch.tokens.clone().apply_(lambda id: swap.get(id, id))
    other = policy.compute_logprobs_no_grad(batch.replace(tokens=swapped)).logprobs
    first = batch.actions & (batch.group == 0)[:, None]
    assert float((other - scored)[first].abs().mean()) > 0.01


@with_qwen3
def test_the_plain_path_agrees(family: str) -> None:
    policy = load(family, path="plain")
    assert not policy.fast
    batch = sampled(policy)
    scored = policy.compute_logprobs_no_grad(batch).logprobs
    own, _ = own_logprobs(policy, batch)
    assert near(policy, scored[batch.actions], own[batch.actions])
    assert near(policy, batch.require("logprobs_sampler")[batch.actions], own[batch.actions])


@with_qwen3
def test_greedy_answers_equal_generate(family: str) -> None:
    policy = policy_of(family)
    assert policy.vision is not None
    requests = [Request(prompt, key) for key, prompt in enumerate(prompts(policy))]
    greedy = Sampling(temperature=0, max_new_tokens=NEW)
    for request, answer in zip(requests, Sampler(policy).generate(requests, greedy), strict=True):
        inputs = policy.vision.own_inputs(torch.tensor([request.prompt_ids]))
        length = inputs["input_ids"].shape[1]
        output = policy.model.generate(
            **inputs,
            attention_mask=torch.ones(1, length, dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=list(policy.stop_ids),
            pad_token_id=0,
            suppress_tokens=list(policy.never),
        )
        assert answer.ids == output[0, length:].tolist()


def gradient(policy: Policy, passes: Sequence[Sequence[int]], batch: Batch) -> Tensor:
    """The gradient of a sum of weighted log-probabilities, pass by pass."""
    policy.model.zero_grad()
    weights = torch.sin(torch.arange(batch.tokens.numel()).view(batch.tokens.shape) + 1.0)
    for rows in passes:
        index = torch.tensor(rows)
        part = batch[index]
        logprobs = policy.compute_logprobs(part).logprobs
        (logprobs * weights[index][:, : logprobs.shape[1]] * part.actions).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("family", "train_vision"),
    [("idefics3", False), *((family, True) for family in (*vision_models.FAMILIES, "qwen3_vl"))],
)
def test_gradients_do_not_depend_on_cuts_and_order(family: str, train_vision: bool) -> None:
    policy = load(family, train_vision=train_vision)
    batch = sampled(policy)
    rows = list(range(len(batch)))
    whole = gradient(policy, [rows], batch)
    cuts = gradient(policy, [[row] for row in rows], batch)
    order = gradient(policy, [rows[::-1][:3], rows[::-1][3:]], batch)
    actions = int(batch.actions.sum())
    assert rounding.near_gradient(policy.model, whole, cuts, actions, tokens=128)
    assert rounding.near_gradient(policy.model, whole, order, actions, tokens=128)
    # And is that of transformers' own pass, of the vision tower too if it trains.
    names = set(vision_names(policy.model))
    tower = [p for name, p in policy.model.named_parameters() if name in names]
    assert all(p.requires_grad == train_vision for p in tower)
    policy.model.zero_grad()
    own = gradient_of_own(policy, batch)
    assert rounding.near_gradient(policy.model, whole, own, actions, tokens=128)
    if train_vision:
        assert any(p.grad is not None and float(p.grad.norm()) > 0 for p in tower)


def gradient_of_own(policy: Policy, batch: Batch) -> Tensor:
    assert policy.vision is not None
    weights = torch.sin(torch.arange(batch.tokens.numel()).view(batch.tokens.shape) + 1.0)
    for row in range(len(batch)):
        tokens = batch.tokens[row, batch.mask[row]][None]
        logits = policy.model(**policy.vision.own_inputs(tokens), use_cache=False).logits[0]
        logits = logits.index_fill(1, torch.tensor(policy.never), -torch.inf).log_softmax(-1)
        columns = batch.actions[row].nonzero()[:, 0]
        (logits[columns - 1, batch.tokens[row, columns]] * weights[row, columns]).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@every_family
def test_a_picture_in_a_later_turn(family: str) -> None:
    """As a conversation, whose first turn is cached."""
    policy = policy_of(family)
    sampler, episodes = Sampler(policy), []
    sampling = Sampling(max_new_tokens=NEW)
    firsts = [[1, *text("Hi "), *shown(policy, 2), *text("!")], [1, *text("Hello")]]
    seconds = [[*text(" And "), *shown(policy, number), *text("?")] for number in (0, 1)]
    one = sampler.generate([Request(tuple(ids), n, conversation=n) for n, ids in enumerate(firsts)], sampling)
    whole = [(*first, *said.ids, *second) for first, said, second in zip(firsts, one, seconds, strict=True)]
    two = sampler.generate([Request(ids, n + 7, conversation=n) for n, ids in enumerate(whole)], sampling)
    for n in range(2):
        turns = [Turn(firsts[n], one[n].ids, one[n].logprobs), Turn(seconds[n], two[n].ids, two[n].logprobs)]
        episodes.append(Episode(Example("x", "?"), n, n, turns))
    batch = collate(episodes)
    own, _ = own_logprobs(policy, batch)
    assert near(policy, batch.require("logprobs_sampler")[batch.actions], own[batch.actions])
    assert near(policy, policy.compute_logprobs_no_grad(batch).logprobs[batch.actions], own[batch.actions])


@every_family
def test_the_placeholder_is_never_sampled(family: str) -> None:
    """Not even by a model that finds it the likeliest token of all."""
    policy = load(family)
    head = policy.model.get_output_embeddings().weight
    [never] = policy.never
    with torch.no_grad():
        head[never] *= 20
    batch = sampled(policy, answers=4)
    assert not bool((batch.tokens[batch.actions] == never).any())
    for generation in ({"num_beams": 1}, {"suppress_tokens": [5]}):
        decoding = Decoding(temperature=0, max_new_tokens=4, generation=generation)
        answers = Sampler(policy).generate([Request((7, n, 9), 0) for n in range(10, 18)], decoding)
        assert not any(never in answer.ids for answer in answers)
    own, _ = own_logprobs(policy, batch)
    scored = policy.compute_logprobs_no_grad(batch, entropy=True)
    assert near(policy, batch.require("logprobs_sampler")[batch.actions], own[batch.actions])
    assert near(policy, scored.logprobs[batch.actions], own[batch.actions])
    assert bool(scored.require("entropy").isfinite().all())


@pytest.mark.parametrize(
    ("family", "train_vision"),
    [*((family, False) for family in vision_models.FAMILIES), ("idefics3", True), ("gemma3", True)],
)
def test_the_tower_computes_each_picture_once(family: str, train_vision: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pictures: one by one for what is kept, and if the tower trains, once more, all in one pass of it."""
    policy, calls = load(family, train_vision=train_vision), []
    usual = policy.model.get_image_features
    monkeypatch.setattr(policy.model, "get_image_features", lambda **inputs: calls.append(1) or usual(**inputs))
    batch = sampled(policy)
    policy.compute_logprobs(batch)
    policy.compute_logprobs_no_grad(batch)
    assert len(calls) == 3 + train_vision


@every_family
def test_a_tower_that_trains_is_seen_by_the_sampler(family: str) -> None:
    policy = load(family, train_vision=True)
    sampler = Sampler(policy)
    sampled(policy, sampler=sampler)
    names = set(vision_names(policy.model))
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name in names:
                parameter.mul_(1.3)
    batch = sampled(policy, sampler=sampler)
    own, _ = own_logprobs(policy, batch)
    assert near(policy, batch.require("logprobs_sampler")[batch.actions], own[batch.actions])
    assert near(policy, policy.compute_logprobs_no_grad(batch).logprobs[batch.actions], own[batch.actions])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "train_vision"),
    [("idefics3", False), ("llava_onevision", True), ("qwen2_5_vl", False), ("gemma3", True)],
)
def test_adapters(family: str, train_vision: bool, tmp_path: Path) -> None:
    policy = load(family, lora_rank=2, train_vision=train_vision)
    before = load(family)
    adapted = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    within = {name for name in vision_names(policy.model) if "lora_" in name}
    assert adapted and bool(within) == train_vision
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    batch = sampled(policy)
    own, _ = own_logprobs(policy, batch)
    scored = policy.compute_logprobs_no_grad(batch).logprobs
    assert near(policy, scored[batch.actions], own[batch.actions])
    # The reference is the model with its adapters off, of the vision tower too.
    reference = AdapterDisabledPolicy(policy).compute_logprobs_no_grad(batch).logprobs
    base = before.compute_logprobs_no_grad(batch).logprobs
    assert near(policy, reference[batch.actions], base[batch.actions])
    assert torch.equal(policy.compute_logprobs_no_grad(batch).logprobs, scored)
    # A checkpoint holds the adapters, and a saved model the sum.
    policy.save(tmp_path / "adapters")
    again = load(family, tmp_path / "adapters", lora_rank=2, train_vision=train_vision)
    assert torch.equal(again.compute_logprobs_no_grad(batch).logprobs, scored)
    given = PolicySection(model=str(folder_of(family)), device="cpu", train_vision=train_vision)
    (tmp_path / "merged").mkdir()
    merge_model(tmp_path / "adapters", tmp_path / "merged", given, 0)
    merged = load(family, tmp_path / "merged")
    assert near(policy, merged.compute_logprobs_no_grad(batch).logprobs[batch.actions], scored[batch.actions])


GEMMA = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}{% endfor %}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def test_line_breaks_around_a_picture_are_tokens_with_those_of_the_words() -> None:
    """Of Gemma 3, as transformers' own processor has them: three line breaks in a row are one token there."""
    words = vision_models.tokenizer("gemma3")
    words.add_tokens(["\n" * count for count in (2, 3, 4)])
    words.chat_template = GEMMA
    drawn, digests = pictures()
    parts = {"preprocessor_config.json": vision_models.IMAGES, "processor_config.json": vision_models.PROCESSORS}
    files = {name: json.dumps(settings["gemma3"]).encode() for name, settings in parts.items()}
    processor = make_processor("gemma3", files, vision_models.model("gemma3").config, words)
    around = FAMILIES["gemma3"].around

    def between(digest: str) -> list[int]:
        return ids_between(processor, picture_tokens(processor, digest, drawn.open(digest)), around)

    read_pictures(words, between, around)
    placeholder = words.convert_tokens_to_ids("<image_soft_token>")
    for text in ("¤What?", "What?¤", "A\n¤\nB", "A\n\n¤¤ <>\n¤", "¤"):
        first, *others = text.split("¤")
        shown = [part for digest, other in zip(digests, others, strict=False) for part in (picture_text(digest), other)]
        ours = prompt_ids(words, [{"role": "user", "content": RecipeText.join(first, *shown)}])
        written = text.replace("¤", "<start_of_image>")
        whole = f"<bos><start_of_turn>user\n{written}<end_of_turn>\n<start_of_turn>model\n"
        images = [[drawn.open(digest) for digest in digests[: len(others)]]]
        theirs = processor(text=whole, images=images, add_special_tokens=False)["input_ids"][0]
        assert [placeholder if is_piece(id) else id for id in ours] == list(theirs)


def test_an_older_transformers_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the argument that it lacks; only DeepStack needs it."""
    monkeypatch.setattr(vision, "FEATURES", "no_such_argument")
    with pytest.raises(LmgymError, match=r"takes no features of pictures for qwen3_vl; 5\.18 does \(pip install -U"):
        vision.check_version(policy_of("qwen3_vl").model)
    vision.check_version(policy_of("qwen2_5_vl").model)


def test_smolvlm_needs_no_library_of_its_own() -> None:
    """Without num2words, which its processor needs for videos only. Pictures are read as Idefics3 reads them."""
    policy = policy_of("smolvlm")
    other = policy_of("idefics3")
    assert [shown(policy, number) for number in range(3)] == [shown(other, number) for number in range(3)]
    batch = sampled(policy)
    own, _ = own_logprobs(policy, batch)
    assert near(policy, batch.require("logprobs_sampler")[batch.actions], own[batch.actions])
    assert near(policy, policy.compute_logprobs_no_grad(batch).logprobs[batch.actions], own[batch.actions])


@every_family
def test_a_saved_policy_is_the_same(family: str, tmp_path: Path) -> None:
    policy = policy_of(family)
    batch = sampled(policy)
    policy.save(tmp_path / "saved")
    again = load_policy(PolicySection(model=str(tmp_path / "saved"), device="cpu", compute="float32"))
    assert again.vision is not None
    again.vision.reader.pictures = pictures()[0]
    assert prompts(again) == prompts(policy)
    assert torch.equal(again.compute_logprobs_no_grad(batch).logprobs, policy.compute_logprobs_no_grad(batch).logprobs)


@every_family
def test_the_proof_at_load_has_pictures(family: str) -> None:
    policy = load(family)
    proof = prove(policy, Sampler(policy))
    assert proof.holds
    assert policy.vision is not None and len(policy.vision.reader._own) == 2
    if family == "gemma3":
        assert path_sentence(policy).startswith(
            "path: fast for texts; plain (padded, slower) with pictures: the pieces"
        )


@every_family
def test_ids_of_pictures(family: str) -> None:
    policy = policy_of(family)
    drawn, digests = pictures()
    assert policy.vision is not None
    for number, digest in enumerate(digests):
        ids = shown(policy, number)
        pieces = [id for id in ids if is_piece(id)]
        assert pieces == piece_ids(digest, len(pieces))
        processor = policy.vision.processor
        assert processed(processor, drawn.open(digest))[0].count(placeholder_of(processor)) == len(pieces)
        assert picture_of(pieces[-1]) == (digest[:10], len(pieces) - 1)
        assert not set(policy.never) & set(ids)


def test_the_estimate_of_memory_knows_the_tower() -> None:
    policy = load("idefics3")
    frozen, trained = (
        shapes_of(PolicySection(model=str(folder_of("idefics3")), train_vision=trains)) for trains in (False, True)
    )
    assert frozen.layers == trained.layers == 2
    assert frozen.parameters == trained.parameters == trained.trained == policy.model.num_parameters()
    assert frozen.trained == sum(parameter.numel() for parameter in policy.parameters())
    assert frozen.linear < trained.linear


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_transformers(family: str) -> None:
    """M-RoPE: those of whole rows, and how a row goes on."""
    policy = policy_of(family)
    vision, model = policy.vision, policy.model
    assert vision is not None
    for prompt in prompts(policy)[:-1]:
        ids = torch.tensor([prompt])
        inputs = vision.own_inputs(ids)
        places, deltas = model.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
        )
        packed, ahead = policy.packed_places([prompt], [len(prompt)])
        assert torch.equal(policy.places(ids), places)
        assert torch.equal(packed, places)
        assert ahead.tolist() == deltas[0].tolist()


def test_what_does_not_fit_is_refused() -> None:
    policy = load("idefics3")
    assert policy.vision is not None
    batch = sampled(policy)
    reader = policy.but(vision=None)
    with pytest.raises(LmgymError, match="holds a picture, and this idefics3 reads texts only"):
        reader.compute_logprobs(batch)
    with pytest.raises(LmgymError, match="holds a picture, and the policy"):
        Sampler(reader).generate([Request(prompts(policy)[0], 0)], Sampling())
    beyond = piece_ids(pictures()[1][0], 1000)[-1]
    with pytest.raises(LmgymError, match=r"piece 1000 of the picture f923f72047, which has 20 in this model"):
        Sampler(policy).generate([Request((1, beyond), 0)], Sampling())
    policy.vision.reader.pictures = None
    with pytest.raises(LmgymError, match="no folder of pictures"):
        Sampler(policy).generate([Request((1, *piece_ids("ab" * 32, 2)), 0)], Sampling())
    with pytest.raises(LmgymError, match=r"policy.train_vision: builtin:tiny reads no pictures"):
        load_policy(PolicySection(train_vision=True))


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
def test_rows_that_fork_behind_a_picture_share_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, trees = policy_of(family), []
    usual = scoring._on_tree
    monkeypatch.setattr(scoring, "_on_tree", lambda *given: trees.append(1) or usual(*given))
    begin = [1, *text("Look: "), *shown(policy, 2), *text(" at ")]
    turns = [
        Turn([*begin, *text("this")], text("one")),
        Turn([*begin, *text("that, and "), *shown(policy, 0)], text("two"), restart=True),
        Turn([*begin, *text("that")], text("three"), restart=True),
    ]
    batch = collate([Episode(Example("x", "?"), 0, 0, turns)])
    scored = policy.compute_logprobs_no_grad(batch).logprobs
    own, _ = own_logprobs(policy, batch)
    assert trees and near(policy, scored[batch.actions], own[batch.actions])


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl"])
def test_values_of_both_paths_agree(family: str) -> None:
    policy = models.with_value_head(policy_of(family))
    batch = sampled(policy)
    fast, plain = (
        one.compute_logprobs_no_grad(batch, values=True, last_values=True) for one in (policy, policy.but(fast=False))
    )
    assert near(policy, fast.require("values")[batch.actions], plain.require("values")[batch.actions])
    assert near(policy, fast.require("last_values"), plain.require("last_values"))
    apart = with_critic(policy_of(family), separate=True)
    assert apart.critic is not None and apart.critic.vision is policy_of(family).vision
    assert not bool(apart.compute_logprobs_no_grad(batch, values=True).require("values").any())


@pytest.mark.parametrize("train_vision", [False, True])
def test_frozen_copies_stay_what_they_were(train_vision: bool) -> None:
    policy = load("idefics3", train_vision=train_vision)
    batch = sampled(policy)
    before = policy.compute_logprobs_no_grad(batch).logprobs
    reference = copies.frozen(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    assert not torch.equal(policy.compute_logprobs_no_grad(batch).logprobs, before)
    assert torch.equal(reference.compute_logprobs_no_grad(batch).logprobs, before)
    own, _ = own_logprobs(policy, batch)
    assert near(policy, policy.compute_logprobs_no_grad(batch).logprobs[batch.actions], own[batch.actions])


@pytest.mark.slow
@pytest.mark.parametrize("train_vision", [False, True])
def test_in_bf16(train_vision: bool) -> None:
    section = PolicySection(
        model=str(folder_of("idefics3")), device="cpu", compute="bfloat16", train_vision=train_vision
    )
    policy = load_policy(section)
    assert policy.vision is not None
    policy.vision.reader.pictures = pictures()[0]
    batch = sampled(policy)
    scored = policy.compute_logprobs_no_grad(batch).logprobs
    own, _ = own_logprobs(policy, batch)
    drawn = batch.require("logprobs_sampler")
    assert rounding.near_in_bf16(policy.model, drawn[batch.actions], scored[batch.actions])
    assert rounding.near_in_bf16(policy.model, scored[batch.actions], own[batch.actions])
    policy.compute_logprobs(batch).logprobs.sum().backward()
    tower = [dict(policy.model.named_parameters())[name] for name in vision_names(policy.model)]
    assert any(p.grad is not None for p in tower) == train_vision


@pytest.mark.slow
def test_layers_that_are_computed_again_give_the_same_gradient() -> None:
    usual = load("idefics3", train_vision=True)
    again = load("idefics3", train_vision=True, activation_checkpointing=True)
    batch = sampled(usual)
    rows = [list(range(len(batch)))]
    one, two = (gradient(policy, rows, batch) for policy in (usual, again))
    assert torch.equal(one, two)


def test_beams_of_an_evaluation_see_pictures() -> None:
    policy = policy_of("llava_onevision")
    assert policy.vision is not None
    requests = [Request(prompt, key) for key, prompt in enumerate(prompts(policy)[1:4])]
    decoding = Decoding(temperature=0, max_new_tokens=NEW, generation={"num_beams": 2})
    for request, answer in zip(requests, Sampler(policy).generate(requests, decoding), strict=True):
        inputs = policy.vision.own_inputs(torch.tensor([request.prompt_ids]))
        output = policy.model.generate(
            **inputs, num_beams=2, do_sample=False, max_new_tokens=NEW, eos_token_id=list(policy.stop_ids),
            pad_token_id=0, suppress_tokens=list(policy.never),
        )  # fmt: skip
        own = output[0, len(request.prompt_ids) :].tolist()
        assert answer.ids == own[: len(answer.ids)] and set(own[len(answer.ids) :]) <= {0}


@pytest.mark.slow
def test_the_built_in_model(tmp_path: Path) -> None:
    section = PolicySection(model="builtin:tiny_idefics3", device="cpu", compute="float32", train_vision=True)
    policy, other = load_policy(section, 3), load_policy(section, 4)
    assert policy.vision is not None and policy.fast
    assert policy.model.num_parameters() < 1_000_000
    policy.vision.reader.pictures = pictures()[0]
    assert sum(map(is_piece, shown(policy, 2))) == 16
    batch = sampled(policy)
    scored, (own, _) = policy.compute_logprobs_no_grad(batch).logprobs, own_logprobs(policy, batch)
    assert near(policy, scored[batch.actions], own[batch.actions])
    assert near(policy, batch.require("logprobs_sampler")[batch.actions], own[batch.actions])
    weights = [dict(one.model.named_parameters()) for one in (policy, load_policy(section, 3), other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    facts = read_model_info(section)
    assert facts.vocabulary == policy.vocabulary and facts.processor is not None
    policy.save(tmp_path)
    again = load_policy(section, 3, tmp_path)
    assert again.vision is not None
    again.vision.reader.pictures = pictures()[0]
    assert torch.equal(again.compute_logprobs_no_grad(batch).logprobs, scored)
    with pytest.raises(LmgymError, match="builtin:tiny_idefics3 reads pictures, for which it needs builtin:pictures"):
        load_policy(replace(section, tokenizer="builtin:bytes"))
    with pytest.raises(LmgymError, match=r"unknown key 'policy\.architecture\.hiden_size'; did you mean 'hidden_size'"):
        load_policy(replace(section, architecture={"hiden_size": 64}))
