"""Encoder-decoders against Hugging Face's own teacher-forced forward pass and `generate`: tiny random models, saved to
a folder and loaded from it as a user's would be. Not imitated of `generate`: `forced_eos_token_id`, which puts an end
where nothing was sampled, and n-gram bans such as BlenderBot's `encoder_no_repeat_ngram_size`."""

import copy
import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from lmgym.algorithms.actor_critic import PPO
from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.supervised import Supervised
from lmgym.batch import Batch
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.inference.base import Completion, Request, Sampling
from lmgym.inference.hf_cache import EncoderDecoderReader
from lmgym.inference.sampler import Sampler
from lmgym.models.critic import with_critic
from lmgym.models.families import FAST_ENCODER_DECODERS
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.rollouts.rollout import Actor, collect
from lmgym.text.chat import source_ids
from lmgym.types import Episode, Example, Turn
from lmgym.updates.prepare import prepare
from tests import models, rounding

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": T5,  # embeddings tied and the decoder's output scaled
    "t5, flan": {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": {**T5, "feed_forward_proj": "gated-gelu"},
    "bart": BART,
    "mbart": {**BART, "scale_embedding": True},  # and a forced BOS
    "pegasus": {**BART, "decoder_start_token_id": 0},
    "blenderbot": {**BART, "decoder_start_token_id": 1},
    "marian": {**BART, "decoder_start_token_id": 0, "scale_embedding": True},
}
EOS, NEW = models.EOS, 12
SOURCES = [
    (1, 10, 11, 2),
    (1, 20, 2),
    (1, 10, 11, 12, 13, 14, 15, 16, 17, 2),
    (1, 10, 11, 2),
    (7,),
    (1, 0, 30, 0),  # the padding's own id, as a token that the encoder reads
]

QUICK = ("t5", "bart", "mbart")  # the other families' tests are marked slow
every_family = pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in QUICK else pytest.mark.slow) for family in FAMILIES]
)


@functools.cache
def folder_of(family: str) -> Path:
    config = AutoConfig.for_model(
        family.split(",")[0],
        **{"vocab_size": 300, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0},
        **FAMILIES[family],
    )
    model = models.sharpen(AutoModelForSeq2SeqLM.from_config(config), 0.2 if family in ("t5, flan", "mt5") else 0.3)
    if getattr(config, "scale_decoder_outputs", False):  # by 1 / sqrt(d_model), before the head
        model.shared.weight.data *= 6
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(1))
    if family == "mbart":
        model.generation_config.forced_bos_token_id = 11
    KEPT.append(tempfile.TemporaryDirectory(prefix="lmgym-"))
    model.save_pretrained(KEPT[-1].name)
    models.tokenizer().save_pretrained(KEPT[-1].name)
    return Path(KEPT[-1].name)


KEPT: list[tempfile.TemporaryDirectory[str]] = []  # deleted when the process ends


@functools.cache
def theirs(family: str) -> Any:
    """Hugging Face's model, read from the folder without lmgym."""
    return AutoModelForSeq2SeqLM.from_pretrained(folder_of(family)).eval()


def policy_of(family: str, fast: bool = True, **section: Any) -> Policy:
    path: Any = "auto" if fast else "plain"
    return load_policy(PolicySection(model=str(folder_of(family)), device="cpu", path=path, **section))


def batch_of_rows(policy: Policy, count: int = 9, minimum: int = 0, **settings: Any) -> Batch:
    """Rows of different lengths; some read the same source."""
    random = torch.Generator().manual_seed(count)
    episodes = []
    for place in range(count):
        source = SOURCES[place % len(SOURCES)]
        length = int(torch.randint(1, 9, (1,), generator=random)) + minimum
        ids = torch.randint(3, 259, (length,), generator=random).tolist()
        if place % 3:
            ids[-1] = EOS
        turn = Turn([*policy.decoder_start], ids, [-1.0] * length, min_new_tokens=minimum, source_ids=[*source])
        group = place % len(SOURCES)
        score = float(torch.rand(1, generator=random))
        episodes.append(Episode(Example(f"x/{group}", "?"), group, place, [turn], score=score))
    return models.batch_of(episodes, **settings)


def of_hugging_face(model: Any, batch: Batch) -> Tensor:
    """Log-probabilities of each row alone, teacher-forced, from a softmax over what could be sampled."""
    result = torch.zeros(batch.tokens.shape)
    assert batch.source is not None and batch.source_mask is not None
    for row, tokens in enumerate(batch.tokens):
        length, source = int(batch.mask[row].sum()), batch.source[row, batch.source_mask[row]][None]
        mask = torch.ones_like(source)
        logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=tokens[None, :length]).logits[0]
        logits = logits[:-1] / batch.temperature
        if batch.stop_excluded is not None:
            for column in batch.stop_excluded[row, 1:length].nonzero()[:, 0].tolist():
                logits[column, list(batch.stop_ids)] = -torch.inf
        taken = logits.log_softmax(-1).gather(1, tokens[1:length, None])[:, 0]
        result = result.index_put((torch.full((length - 1,), row), torch.arange(1, length)), taken)
    return torch.where(batch.actions, result, 0.0)


def gradients(model: Any, logprobs: Tensor) -> list[Tensor | None]:
    """Of the log-probabilities weighted by place, so that a mix-up of rows or columns shows."""
    weight = torch.sin(torch.arange(logprobs.numel(), dtype=torch.float32)).reshape(logprobs.shape)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad((logprobs * weight).sum(), trained, allow_unused=True))


# Scoring


@pytest.mark.slow
def test_every_family_on_the_fast_path_is_tried() -> None:
    assert {family.split(",")[0] for family in FAMILIES} == set(FAST_ENCODER_DECODERS)
    assert all(policy_of(family).fast and not policy_of(family, fast=False).fast for family in FAMILIES)


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "minimum": 2, "stop_ids": (EOS, 7)}])
def test_scores_and_gradients_are_the_teacher_forced_ones(family: str, settings: dict[str, Any]) -> None:
    model = theirs(family)
    for fast in (True, False):
        policy = policy_of(family, fast)
        batch = batch_of_rows(policy, **settings)
        expected = of_hugging_face(model, batch)
        assert float(expected.detach()[batch.actions].std()) > 0.5
        scored = policy.compute_logprobs(batch).logprobs
        assert rounding.near(model, scored, expected)
        for ours, their in zip(gradients(policy.model, scored), gradients(model, expected), strict=True):
            assert (ours is None) == (their is None)
            if ours is not None and their is not None:
                assert rounding.near_gradient(model, ours, their, outputs=int(batch.actions.sum()))
        alone = torch.cat(
            [policy.compute_logprobs_no_grad(batch[torch.tensor([row])]).logprobs.sum(1) for row in range(len(batch))]
        )
        assert rounding.near(model, alone, expected.sum(1))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mbart"])  # which turns labels around
def test_scores_are_the_loss_of_labels(family: str) -> None:
    """Hugging Face shifts the labels itself, behind its own start token."""
    policy = policy_of(family)
    batch = batch_of_rows(policy)
    assert batch.source is not None and batch.source_mask is not None
    labels = torch.where(batch.actions, batch.tokens, -100)[:, 1:].contiguous()
    output = theirs(family)(input_ids=batch.source, attention_mask=batch.source_mask.long(), labels=labels)
    mean = policy.compute_logprobs_no_grad(batch).logprobs[batch.actions].mean()
    assert rounding.near(policy.model, mean, -output.loss)


@every_family
def test_entropies_are_those_of_the_whole_distribution(family: str) -> None:
    policy = policy_of(family)
    batch = batch_of_rows(policy)
    one, other = (
        policy.compute_logprobs(batch, entropy=True).entropy,
        policy_of(family, fast=False).compute_logprobs(batch, entropy=True),
    )
    assert one is not None and other.entropy is not None
    assert rounding.near(policy.model, one, other.entropy) and float(one.detach().max()) > 0.5


# Gradients do not depend on the cut (fp64)


def in_double(family: str) -> Policy:
    return Policy(
        models.in_double(AutoModelForSeq2SeqLM.from_pretrained(folder_of(family))), models.tokenizer(), torch.float64
    )


def wider(batch: Batch, columns: int) -> Batch:
    """More padding on the right of decoder and encoder tokens, full of ids and numbers that mean nothing."""
    wide = {}
    for name, column in vars(batch).items():
        if isinstance(column, Tensor) and column.dim() == 2:
            fill = {"tokens": 77, "source": 78, "logprobs_old": 3.5}.get(name, 0)
            wide[name] = torch.nn.functional.pad(column, (0, columns), value=fill)
    return replace(batch, **wide)


DOUBLE = functools.cache(in_double)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("make", [lambda: GRPO(group_size=2), Supervised], ids=["grpo", "supervised"])
@settings(max_examples=4)
@given(tokens=st.integers(1, 60), columns=st.integers(1, 6), order=st.permutations(range(9)))
def test_gradients_do_not_depend_on_micro_batches_padding_and_order(
    family: str, make: Any, tokens: int, columns: int, order: list[int]
) -> None:
    policy = DOUBLE(family)
    algorithm: Algorithm = make()
    batch = models.prepared(batch_of_rows(policy), algorithm, policy)
    policy.tokens_per_forward = 16384
    whole, metrics = models.gradient(algorithm, policy, batch)
    wide, _ = models.gradient(algorithm, policy, wider(batch, columns))
    shuffled, _ = models.gradient(algorithm, policy, batch[torch.tensor(order)])
    policy.tokens_per_forward = tokens
    assert len(policy.micro_batches(batch)) > 1
    parts, part_metrics = models.gradient(algorithm, policy, batch)
    assert float(whole.norm()) > 0
    outputs, double = int(batch.actions.sum()), torch.float64
    for other in (wide, shuffled, parts):
        assert rounding.near_gradient(policy.model, other, whole, outputs, precision=double)
    terms, size = rounding.terms_of(policy.model) + outputs, rounding.size_of(policy.model)
    assert part_metrics == pytest.approx(metrics, abs=rounding.rounding(terms, size, double))


# Greedy answers


def generated(model: Any, source: tuple[int, ...], skip: int, **settings: Any) -> list[int]:
    """Hugging Face's greedy answer to one source behind its first `skip` tokens."""
    ids = torch.tensor([source])
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        max_new_tokens=NEW + skip - 1,
        encoder_no_repeat_ngram_size=0,
        **settings,
    )
    return found[0, skip:].tolist()


def requests(policy: Policy, count: int = len(SOURCES)) -> list[Request]:
    sources = [SOURCES[place % len(SOURCES)] for place in range(count)]
    return [Request(policy.decoder_start, seeds.key(0, place), source) for place, source in enumerate(sources)]


def rescored(policy: Policy, asked: list[Request], answers: list[Completion], sampling: Sampling) -> list[float]:
    """What `Policy.compute_logprobs` says of sampled ids, in their order."""
    turns = [
        Turn(
            [*request.prompt_ids], answer.ids, min_new_tokens=sampling.min_new_tokens, source_ids=[*request.source_ids]
        )
        for request, answer in zip(asked, answers, strict=True)
    ]
    batch = models.batch_of(
        [Episode(Example("x", "?"), place, place, [turn]) for place, turn in enumerate(turns)],
        temperature=sampling.temperature,
        stop_ids=sorted({*policy.stop_ids, *sampling.stop_ids}),
    )
    return policy.compute_logprobs_no_grad(batch).logprobs[batch.actions].tolist()


def reported(answers: list[Completion]) -> list[float]:
    return [logprob for answer in answers for logprob in answer.logprobs]


@pytest.mark.slow
@every_family
def test_greedy_answers_equal_generate(family: str) -> None:
    """Sources of different lengths side by side, one of them twice; then again with an end that does occur."""
    policy = models.exact(policy_of(family))
    model = copy.deepcopy(theirs(family)).double()
    asked, skip = requests(policy), len(policy.decoder_start)
    assert skip == (2 if family == "mbart" else 1)
    free = [generated(model, source, skip) for source in SOURCES]
    assert len({tuple(ids) for ids in free}) >= 3
    longest = max(free, key=lambda ids: len(set(ids)))
    ending = longest[len(longest) // 2]
    stopped = [generated(model, source, skip, eos_token_id=[EOS, ending]) for source in SOURCES]
    assert stopped != free
    for expected, stop_ids in ((free, ()), (stopped, (ending,))):
        sampling = Sampling(temperature=0, max_new_tokens=NEW, stop_ids=stop_ids)
        for rows in (64, 2):
            for fast in (True, False):
                policy.fast = fast
                answers = Sampler(policy, rows).generate(asked, sampling)
                assert [answer.ids for answer in answers] == expected
                assert rounding.near(model, reported(answers), rescored(policy, asked, answers, sampling))
        for answer in answers:
            assert answer.stop == {EOS: "eos", **dict.fromkeys(stop_ids, "stop")}.get(answer.ids[-1], "length")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_the_context_start_token_is_the_decoders_first(family: str) -> None:
    """As id and as string; it stands in place of decoder_start_token_id and of any forced_bos_token_id."""
    token = models.tokenizer().convert_ids_to_tokens(80)
    usual = [generated(theirs(family), source, 1) for source in SOURCES]
    expected = [generated(theirs(family), source, 1, decoder_start_token_id=80) for source in SOURCES]
    assert expected != usual
    for given_as in (80, token):
        policy = policy_of(family, context_start_token=given_as)
        assert policy.decoder_start == (80,)
        answers = Sampler(policy).generate(requests(policy), Sampling(temperature=0, max_new_tokens=NEW))
        assert [answer.ids for answer in answers] == expected


@pytest.mark.parametrize("token", ["<no such token>", 300, -1])
def test_a_context_start_token_that_the_model_does_not_know_is_refused(token: int | str) -> None:
    with pytest.raises(LmgymError, match=f"policy.context_start_token: '?{token}'? is not in the vocabulary of"):
        policy_of("bart", context_start_token=token)


def test_a_forced_end_is_not_imitated() -> None:
    """`generate` overwrites the last token of an answer that is cut off; nobody sampled that one."""
    policy = policy_of("bart")
    answers = Sampler(policy).generate(requests(policy), Sampling(temperature=0, max_new_tokens=NEW))
    for source, answer in zip(SOURCES, answers, strict=True):
        forced = generated(theirs("bart"), source, 1, forced_eos_token_id=EOS)
        assert len(answer.ids) == NEW and answer.stop == "length"
        assert forced == [*answer.ids[:-1], EOS]


# Sampled answers


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("settings", [{}, {"min_new_tokens": 3, "temperature": 1.3}], ids=["plain", "minimum"])
def test_a_completion_depends_on_its_request_only(family: str, settings: dict[str, Any]) -> None:
    """Alone, beside longer sources, in another order, with few or many rows, with a small encoder batch: the same."""
    policy = models.exact(policy_of(family))
    sampling = Sampling(max_new_tokens=NEW, stop_ids=tuple(range(100, 140)), **settings)
    asked = requests(policy, 18)
    answers = Sampler(policy, 64).generate(asked, sampling)
    assert len({tuple(answer.ids) for answer in answers}) > 12
    assert len({len(answer.ids) for answer in answers}) > 3  # some leave early
    assert {answer.stop for answer in answers} >= {"stop"}
    stops = {*policy.stop_ids, *sampling.stop_ids}
    assert not any(stops & set(answer.ids[: sampling.min_new_tokens]) for answer in answers)
    assert rounding.near(policy.model, reported(answers), rescored(policy, asked, answers, sampling))
    long = Request(policy.decoder_start, 5, (9,) * 40)
    others = [Sampler(policy, rows).generate(asked, sampling) for rows in (1, 3, 7)]
    others.append(Sampler(policy, 7).generate(asked[::-1], sampling)[::-1])
    others.append(Sampler(policy, 64).generate([*asked, long], sampling)[:-1])
    policy.tokens_per_forward = 8
    others.append(Sampler(policy, 64).generate(asked, sampling))
    for other in others:
        assert [answer.ids for answer in other] == [answer.ids for answer in answers]
        assert rounding.near(policy.model, reported(other), reported(answers))


def test_ended_answers_leave_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above has tried it."""
    kept: list[int] = []
    usual = EncoderDecoderReader.keep

    def keep(self: EncoderDecoderReader, places: Tensor) -> None:
        kept.append(len(places))
        usual(self, places)

    monkeypatch.setattr(EncoderDecoderReader, "keep", keep)
    policy = policy_of("bart")
    Sampler(policy).generate(requests(policy, 18), Sampling(max_new_tokens=NEW, stop_ids=tuple(range(100, 140))))
    assert kept[0] == 18 and len(kept) > 2 and kept == sorted(kept, reverse=True)


def test_sources_and_prompts_that_do_not_fit_are_refused() -> None:
    policy = policy_of("bart")
    assert policy.context == 64
    with pytest.raises(LmgymError, match="65 tokens, and the encoder reads 64 at most"):
        Sampler(policy).generate([Request(policy.decoder_start, 0, (5,) * 65)], Sampling())
    with pytest.raises(LmgymError, match="no token at all"):
        Sampler(policy).generate([Request(policy.decoder_start, 0)], Sampling())
    (answer,) = Sampler(policy).generate([Request(policy.decoder_start, 0, (5,) * 64)], Sampling(max_new_tokens=100))
    assert (len(answer.ids), answer.stop) == (63, "context") or answer.stop == "eos"
    assert policy_of("t5").context is None


# Conversations


class Quiz:
    """Two questions, one after the other; an answer earns its length."""

    def reset(self, example: Example, seed: int) -> str:
        self.asked = 1
        return f"{example.prompt} 1?"

    def step(self, text: str, stop: str) -> Step:
        self.asked += 1
        over = self.asked > 2
        return Step([] if over else [{"role": "user", "content": "And 2?"}], float(len(text)), terminated=over)


def conversations(policy: Policy, count: int = 6) -> list[Episode]:
    prompts = [(place // 2, Example(f"x/{place // 2}", "Q" * (1 + place // 2))) for place in range(count)]
    actor = Actor(Sampler(policy, 4), policy.tokenizer, decoder_start=policy.decoder_start)
    sampling = Sampling(max_new_tokens=6, min_new_tokens=1, stop_ids=tuple(range(100, 140)))
    return collect(prompts, actor, sampling, (0, "test"), Quiz)


@pytest.mark.parametrize("family", ["t5", "mbart"])
def test_each_turn_of_a_conversation_is_a_row_that_reads_all_before_it(family: str) -> None:
    policy = policy_of(family)
    episodes, start = conversations(policy), [*policy.decoder_start]
    words = policy.tokenizer
    for episode in episodes:
        first, second = episode.turns
        assert [turn.prompt_ids for turn in episode.turns] == [start, start]
        assert first.source_ids == source_ids(words, f"{episode.example.prompt} 1?")
        appended = words("\n\nAnd 2?", add_special_tokens=False)["input_ids"]
        assert second.source_ids == first.source_ids + first.action_ids + appended
        assert episode.rows() == [[first], [second]] and episode.terminated
        assert [turn.reward for turn in episode.turns] == [float(len(turn.text)) for turn in episode.turns]
    assert len({len(turn.action_ids) for episode in episodes for turn in episode.turns}) > 1
    batch = models.batch_of(episodes, stop_ids=sorted({*policy.stop_ids, *range(100, 140)}))
    assert len(batch) == 12 and batch.episode.tolist() == [place // 2 for place in range(12)]
    assert batch.source is not None and batch.source_mask is not None and batch.logprobs_sampler is not None
    turns = [turn for episode in episodes for turn in episode.turns]
    for row, turn in enumerate(turns):
        assert batch.source[row, batch.source_mask[row]].tolist() == turn.source_ids
        assert batch.tokens[row, batch.mask[row]].tolist() == start + turn.action_ids
        assert batch.tokens[row, batch.actions[row]].tolist() == turn.action_ids
    assert rounding.near(policy.model, policy.compute_logprobs_no_grad(batch).logprobs, batch.logprobs_sampler)
    assert rounding.near(policy.model, of_hugging_face(theirs(family), batch), batch.logprobs_sampler)


def test_the_credit_of_a_conversation_runs_through_its_rows() -> None:
    """GAE by hand over the tokens of both turns, one after the other: A_t = delta_t + gamma lambda A_(t+1)."""
    policy, gamma, lam = policy_of("bart"), 0.9, 0.8
    policy = with_critic(policy, separate=False)
    assert policy.value_head is not None
    policy.value_head.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    batch = models.batch_of(conversations(policy))
    prepared = prepare(batch, policy, {}, PPO(gamma=gamma, gae_lambda=lam, whiten="none"))
    assert prepared.values is not None and prepared.advantages is not None and prepared.returns is not None
    assert float(prepared.values[batch.actions].std()) > 0.1
    for episode in range(6):
        rows = (batch.episode == episode).nonzero()[:, 0].tolist()
        places = [(row, column) for row in rows for column in batch.actions[row].nonzero()[:, 0].tolist()]
        largest = sum(abs(float(prepared.values[place])) + abs(float(batch.rewards[place])) for place in places)
        loose = rounding.rounding(5 * len(places), largest)  # two products and three sums for each token
        advantage, behind = 0.0, 0.0
        for place in reversed(places):
            value = float(prepared.values[place])
            advantage = float(batch.rewards[place]) + gamma * behind - value + gamma * lam * advantage
            behind = value
            assert float(prepared.advantages[place]) == pytest.approx(advantage, rel=0, abs=loose)
            assert float(prepared.returns[place]) == pytest.approx(advantage + value, rel=0, abs=loose)
    assert not bool(prepared.advantages[~batch.actions].any())


# The encoder runs once


@contextmanager
def rows_seen(module: Any) -> Iterator[list[int]]:
    """How many rows each call of a module gets."""
    rows: list[int] = []

    def look(_: Any, __: Any, output: Any) -> None:
        rows.append(output.last_hidden_state.shape[0])

    handle = module.register_forward_hook(look)
    try:
        yield rows
    finally:
        handle.remove()


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_source_is_encoded_once_and_so_is_the_first_step_of_its_answers(family: str) -> None:
    policy, distinct = policy_of(family), len(set(SOURCES))
    asked = requests(policy, 18)
    with rows_seen(policy.model.get_encoder()) as encoded, rows_seen(policy.model.get_decoder()) as decoded:
        Sampler(policy).generate(asked, Sampling(max_new_tokens=3, min_new_tokens=3))
    assert (encoded, decoded) == ([distinct], [distinct, 18, 18])
    batch = batch_of_rows(policy, 18)
    with rows_seen(policy.model.get_encoder()) as encoded:
        policy.compute_logprobs(batch)
    assert encoded == [distinct]


# bf16


@pytest.mark.parametrize("family", ["t5", "bart", "pegasus"])
def test_bf16_compute(family: str) -> None:
    """The sampler's bf16 copy, and scores and gradients in bf16 from fp32 masters."""
    policy, exact = policy_of(family, compute="bfloat16"), policy_of(family)
    sampling, asked = Sampling(max_new_tokens=NEW), requests(policy, 12)
    sampler = Sampler(policy)
    assert {parameter.dtype for parameter in sampler._copy.model.parameters()} == {torch.bfloat16}
    answers = sampler.generate(asked, sampling)
    ours, rough = reported(answers), rescored(policy, asked, answers, sampling)
    assert rounding.near_in_bf16(policy.model, ours, rough) and float(torch.tensor(ours).std()) > 0.5
    batch = batch_of_rows(policy)
    scored = policy.compute_logprobs(batch).logprobs
    expected = exact.compute_logprobs(batch).logprobs
    assert scored.dtype == torch.float32 and not torch.equal(scored, expected)
    assert rounding.near_in_bf16(policy.model, scored[batch.actions], expected[batch.actions])
    scored.sum().backward()
    assert all(parameter.grad is None or parameter.grad.dtype == torch.float32 for parameter in policy.parameters())
