"""A teacher with another tokenizer: divergences against enumeration and autograd over all logits, the path through a
whole run, and what is refused. tests/property/test_alignment.py has the spans themselves."""

import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmgym.algorithms.gkd import GKD
from lmgym.batch import Batch
from lmgym.cli.main import main
from lmgym.core.errors import LmgymError
from lmgym.functional.divergences import Divergence, class_logprobs
from lmgym.logs.console import Console
from lmgym.models.cross_teaching import TokenClasses, token_classes
from lmgym.models.policy import Policy
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.other_tokenizer import in_other_tokens
from lmgym.text.alignment import spans_of
from lmgym.text.token_pairs import token_pairs
from lmgym.types import BarePrompt, Episode, Example, Turn
from tests import models, runs
from tests.parity.test_resume import Interrupting
from tests.toy_tokenizers import byte_level

FORMS = [Divergence("forward_kl"), Divergence("reverse_kl"), Divergence("jsd", 0.3)]
RECORD = Path(__file__).with_name("spans.json")
MERGES = ["1 2", "T h", "Th e", "Ġ a", "a n", "s w"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def named(divergence: Divergence) -> str:
    return divergence.name


def algorithm(divergence: Divergence) -> GKD:
    return GKD(teacher="t", divergence=divergence.name, **({"beta": 0.3} if divergence.name == "jsd" else {}))


def in_fp64(seed: int, tokenizer: Any = None, **architecture: Any) -> Policy:
    model = models.in_double(models.llama(seed, **architecture))
    return Policy(model, tokenizer or models.tokenizer(), compute=torch.float64)


def divergence_of(divergence: Divergence, p: Tensor, q: Tensor) -> Tensor:
    """By its definition, of distributions [... V]."""
    if divergence.name == "forward_kl":
        return (q * (q / p).log()).sum(-1)
    if divergence.name == "reverse_kl":
        return (p * (p / q).log()).sum(-1)
    m = divergence.beta * q + (1 - divergence.beta) * p
    return (divergence.beta * q * (q / m).log() + (1 - divergence.beta) * p * (p / m).log()).sum(-1)


# The maths


@pytest.mark.parametrize("divergence", FORMS, ids=named)
def test_an_outcome_drawn_from_p_estimates_value_and_gradient(divergence: Divergence) -> None:
    """Summed over all outcomes with their probabilities: exactly the divergence, and its gradient by the logits."""
    logits, teacher = torch.randn(2, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits.requires_grad_()
    p, q = logits.log_softmax(-1), teacher.log_softmax(-1)
    value, factor = divergence.of_sample(p.detach(), q)
    expected = divergence_of(divergence, p.exp(), q.exp())
    assert (p.exp() * value).sum().item() == pytest.approx(expected.item(), rel=1e-12)
    [exact] = torch.autograd.grad(expected, logits, retain_graph=True)
    [estimated] = torch.autograd.grad((p.exp().detach() * factor * p).sum(), logits)
    assert torch.allclose(estimated, exact, rtol=1e-11, atol=1e-15)
    assert all(float(one.abs().max()) < 1e-15 for one in divergence.of_sample(p.detach(), p.detach()))


@pytest.mark.parametrize("divergence", FORMS, ids=named)
def test_classes_of_tokens_by_autograd(divergence: Divergence) -> None:
    """Value and gradient over the sums of each class; at most the divergence over single tokens."""
    logits, teacher = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits.requires_grad_()
    classes, p = torch.tensor([0, 1, 0, 2, 3, 3, 2, 0, 3]), logits.log_softmax(-1)
    member = torch.nn.functional.one_hot(classes, 4).double()
    expected = divergence_of(divergence, p.exp() @ member, teacher.softmax(-1) @ member)
    taught = class_logprobs(teacher.log_softmax(-1), classes, 4)
    value, by_logits = divergence.of_classes(p.detach(), classes, taught)
    assert torch.allclose(value, expected, rtol=1e-12, atol=0)
    assert torch.allclose(by_logits, torch.autograd.grad(expected.sum(), logits)[0], rtol=1e-10, atol=1e-15)
    assert bool((value <= divergence.of(p.detach(), teacher.log_softmax(-1))[0]).all())


def test_classes_without_a_likely_token_are_finite() -> None:
    """A class whose members all underflow keeps its log-probability; one without any is impossible."""
    logprobs = torch.tensor([[0.0, -200.0, -201.0]])
    found = class_logprobs(logprobs, torch.tensor([0, 1, 1]), 3)
    assert found[0].tolist() == pytest.approx([0.0, -200 + 0.31326, -torch.inf], abs=1e-4)


# In a policy


def batch_of_pairs(answers: Sequence[Sequence[int]], letters: int) -> Batch:
    """Answers of two of the policy's tokens, each of which the teacher reads as one: a span of two on one."""
    own = [Episode(Example("x", "?"), 0, n, [Turn([0], list(ids))]) for n, ids in enumerate(answers)]
    other = [Episode(Example("x", "?"), 0, n, [Turn([0, 1], [a * letters + b])]) for n, (a, b) in enumerate(answers)]
    batch = models.batch_of(own, stop_ids=(), spans=[[1, 1]] * len(own))
    return batch.replace(hinted=models.batch_of(other, stop_ids=(), spans=[[1]] * len(own)))


@pytest.mark.parametrize("divergence", FORMS, ids=named)
def test_the_expectation_over_all_answers_is_the_divergence_over_pieces_of_text(divergence: Divergence) -> None:
    """Three letters; the teacher has a token for each pair of them. Enumerated: all nine answers, each with the
    policy's probability, against the divergence of the two distributions over pairs."""
    letters = 3
    policy, teacher = in_fp64(0, vocab_size=letters), in_fp64(1, vocab_size=letters**2)
    policy.teacher = teacher
    policy.classes = TokenClasses(torch.arange(letters), torch.zeros(letters**2, dtype=torch.long), letters)
    answers = list(itertools.product(range(letters), repeat=2))
    batch = batch_of_pairs(answers, letters)
    # 1. By enumeration, from all logits.
    logits = policy.model(batch.tokens).logits.log_softmax(-1)
    p = torch.stack([logits[n, 0, a] + logits[n, 1, b] for n, (a, b) in enumerate(answers)]).exp()
    q = teacher.model(torch.tensor([[0, 1]])).logits[0, -1].softmax(-1).detach()
    expected = divergence_of(divergence, p, q)
    exact = torch.cat([one.flatten() for one in torch.autograd.grad(expected, policy.parameters())])
    # 2. The mean of the estimates.
    found = policy.compute_logprobs(batch, divergence=divergence).require("divergence").sum(1)
    mean = (p.detach() * found).sum()
    estimated = torch.cat([one.flatten() for one in torch.autograd.grad(mean, policy.parameters())])
    assert mean.item() == pytest.approx(expected.item(), rel=1e-10)
    assert models.relative(estimated, exact) < 1e-10


@pytest.mark.parametrize("divergence", FORMS, ids=named)
def test_one_tokenizer_through_spans_is_the_whole_divergence(divergence: Divergence) -> None:
    """Spans of one token each, and all tokens common: value and gradient of the form for one tokenizer."""
    policy, teacher = in_fp64(0), in_fp64(1, hidden_size=24)
    policy.teacher = teacher
    episodes = models.episodes(4, turns=1)
    usual = algorithm(divergence).advantages(models.batch_of(episodes))
    expected, metrics = models.gradient(algorithm(divergence), policy, usual)
    policy.classes = TokenClasses(torch.arange(259), torch.arange(259), 259)
    numbers = [list(range(1, len(turn.action_ids) + 1)) for one in episodes for turn in one.turns]
    spanned = usual.replace(**{"span": models.batch_of(episodes, spans=numbers).span})
    found, same = models.gradient(algorithm(divergence), policy, spanned.replace(hinted=spanned))
    assert models.relative(found, expected) < 1e-10
    assert same["loss/divergence"] == pytest.approx(metrics["loss/divergence"], rel=1e-11)


def two_models() -> tuple[Policy, Policy]:
    """Two models of different tokenizers, the first with the second as its teacher."""
    own, other = byte_level(["T h", "e Ġ"]), byte_level(MERGES, "<|end|>", TEMPLATE)
    policy, teacher = in_fp64(0, own, vocab_size=260), in_fp64(1, other, vocab_size=264, hidden_size=24)
    policy.teacher = teacher
    policy.classes = token_classes(token_pairs(own, other, "t", policy.vocabulary, teacher.vocabulary))
    return policy, teacher


def read_by(policy: Policy, teacher: Policy, episodes: list[Episode]) -> Batch:
    """The batch of these episodes with what the teacher reads."""
    pairs = token_pairs(policy.tokenizer, teacher.tokenizer, "t", policy.vocabulary, teacher.vocabulary)
    read = in_other_tokens(episodes, pairs, Actor(None, teacher.tokenizer), None)
    batch = models.batch_of(episodes, stop_ids=(1,), spans=read.policy_spans)
    return batch.replace(hinted=models.batch_of(read.episodes, stop_ids=(1,), spans=read.teacher_spans))


def answered(tokenizer: Any, texts: Sequence[str], ended: bool = True, prompt: Any = "12?") -> list[Episode]:
    """Two answers to each prompt, the text behind its end."""
    found = []
    for n, text in enumerate(texts):
        ids = [*tokenizer(text)["input_ids"], *([tokenizer.eos_token_id] if ended else [])]
        turn = Turn(tokenizer("12?" * (1 + n // 2))["input_ids"], ids, [-0.5] * len(ids), text)
        turn.stop = "eos" if ended else "length"
        found.append(Episode(Example(f"a/{n // 2}", prompt), n // 2, n, [turn], score=float(n % 2)))
    return found


TEXTS = ["The answer is 12", "an é", "121212 a swan", "\u00e9", "The 12", ""]


@pytest.mark.parametrize("divergence", FORMS, ids=named)
def test_neither_cut_nor_order_nor_path_moves_the_gradient(divergence: Divergence) -> None:
    """In fp64: all rows in one pass, row by row, in another order, with chunks of the head, on the padded path."""
    policy, teacher = two_models()
    batch = read_by(policy, teacher, answered(policy.tokenizer, TEXTS))
    chosen = algorithm(divergence)
    batch = chosen.advantages(batch)
    whole, metrics = models.gradient(chosen, policy, batch)
    assert float(whole.norm()) > 0

    class Chunked(Policy):
        head_chunk = 3

    chunked = policy.but()
    chunked.__class__ = Chunked
    others = {
        "row by row": (policy.but(tokens_per_forward=1), batch),
        "another order": (policy, batch[torch.tensor([3, 1, 5, 0, 2, 4])]),
        "chunks": (chunked, batch),
        "padded": (policy.but(fast=False, teacher=teacher.but(fast=False)), batch),
    }
    for how, (other, rows) in others.items():
        found, same = models.gradient(chosen, other, rows)
        assert models.relative(whole, found) < 1e-9, how
        assert same["loss/divergence"] == pytest.approx(metrics["loss/divergence"], rel=1e-9), how


def test_an_answer_by_hand() -> None:
    """One answer of all kinds of spans, from all logits of both models at once: reverse KL."""
    policy, teacher = two_models()
    batch = read_by(policy, teacher, answered(policy.tokenizer, ["The 1"]))
    # Th|e |1|<eos> against The| |1|<|end|>: the first two and the first two are one span.
    read = batch.hinted
    assert batch.span[0].tolist()[-4:] == [1, 1, 2, 3] and read.span[0].tolist()[-4:] == [1, 1, 2, 3]
    p = policy.model(batch.tokens).logits.log_softmax(-1)[0, -5:-1]
    q = teacher.model(read.tokens).logits.log_softmax(-1)[0, -5:-1].detach()
    own, other = batch.tokens[0, -4:], read.tokens[0, -4:]
    sampled, taught = p.gather(1, own[:, None])[:, 0], q.gather(1, other[:, None])[:, 0]
    gap = (sampled[:2].sum() - taught[:2].sum()).detach()
    longer = gap + gap * (sampled[:2] - sampled[:2].detach()).sum()
    classes = policy.classes
    members = [torch.nn.functional.one_hot(one, classes.rest + 1).double() for one in classes[:2]]
    single = divergence_of(FORMS[1], p[2:].exp() @ members[0], q[2:].exp() @ members[1]).sum()
    expected = (longer + single) / 4
    found, metrics = models.gradient(algorithm(FORMS[1]), policy, batch)
    exact = torch.cat([one.flatten() for one in torch.autograd.grad(expected, policy.parameters())])
    assert metrics["loss/divergence"] == pytest.approx(expected.item(), rel=1e-10)
    assert models.relative(found, exact) < 1e-9


# What the teacher reads


def test_the_teacher_reads_its_own_template_tokens_and_end() -> None:
    policy, teacher = two_models()
    own, other = policy.tokenizer, teacher.tokenizer
    pairs = token_pairs(own, other, "t")
    chat = [{"role": "user", "content": "The 12"}]
    read = in_other_tokens(answered(own, ["The 12"], prompt=chat), pairs, Actor(None, other), None)
    [turn] = read.episodes[0].turns
    assert other.decode(turn.prompt_ids) == "<user>The 12<|end|><assistant>"
    assert [other.decode([id]) for id in turn.action_ids] == ["The", " ", "12", "<|end|>"]
    assert read.policy_spans == [[1, 1, 2, 2, 3]] and read.teacher_spans == [[1, 1, 2, 3]]
    assert not turn.logprobs
    # Cut off: no end. With a hint, the teacher's prompt is another.
    read = in_other_tokens(answered(own, ["1"], False), pairs, Actor(None, other), None, "{prompt} Think.")
    [turn] = read.episodes[0].turns
    assert other.decode(turn.prompt_ids) == "<user>12? Think.<|end|><assistant>"
    assert read.policy_spans == [[1]] == read.teacher_spans
    # Nothing of a text: the row has an action all the same, and it counts for nothing.
    [episode] = answered(own, ["1"], False)
    episode.turns[0].action_ids = [0]
    read = in_other_tokens([episode], pairs, Actor(None, other), None)
    assert read.policy_spans == [[0]] == read.teacher_spans


def test_what_the_teacher_cannot_read_is_refused() -> None:
    policy, teacher = two_models()
    pairs = token_pairs(policy.tokenizer, teacher.tokenizer, "t")
    actor = Actor(None, teacher.tokenizer)
    several = models.episodes(0, turns=3)
    with pytest.raises(
        LmgymError, match=r"has another tokenizer, and example .* turns; such a teacher is for tasks of"
    ):
        in_other_tokens(several, pairs, actor, None)
    with pytest.raises(LmgymError, match="in its tokens example a/0 with an answer has 21 tokens, and it reads 8"):
        in_other_tokens(answered(policy.tokenizer, ["1"]), pairs, actor, 8)
    rendered = answered(policy.tokenizer, ["1"], prompt=BarePrompt("<user>1", form="rendered"))
    with pytest.raises(LmgymError, match=r"task\.prompts is rendered, in the policy's chat template"):
        in_other_tokens(rendered, pairs, actor, None)


def test_trl_finds_the_same_spans() -> None:
    """GOLD's own alignment by byte offsets of TRL 1.16 (record_spans.py)."""
    for case in json.loads(RECORD.read_text()):
        own, other, _ = spans_of(case["own"], case["other"])
        for numbers, groups in ((own, case["own_groups"]), (other, case["other_groups"])):
            assert [[n for n, number in enumerate(numbers) if number == k + 1] for k in range(len(groups))] == groups


# In a run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of builtin:tiny's kind with a tokenizer of its own."""
    path = tmp_path_factory.mktemp("teacher")
    tokenizer = byte_level(MERGES, "<|end|>", TEMPLATE)
    model = models.llama(5, vocab_size=len(tokenizer), max_position_embeddings=256)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    Policy(model, tokenizer).save_pretrained(path)
    return path


def test_a_run_says_what_it_compares_and_resumes_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    said = io.StringIO()
    section = {"algorithm": {"name": "gkd", "teacher": str(folder)}, "steps": 4, "checkpoint": {"every": 2}}
    whole = runs.run(tmp_path / "whole", Console(said), **section)
    assert "the end of an answer: <eos> is <|end|>" in said.getvalue()
    first = next(record for record in runs.records(whole / "metrics.jsonl") if record["kind"] == "train")
    assert first["gradient_norm"] > 0 and first["loss/divergence"] > 0
    assert first["spans/single"] > 0 and first["spans/none"] > 0  # an untrained model says bytes of no character
    sums = first["spans/single"] + first["spans/longer"] + first["spans/none"]  # each is counted by itself, in fp64
    assert sums == pytest.approx(1, abs=4 * 2.0**-52)
    halves = runs.run(tmp_path / "halves", Interrupting(at=2), **section)
    runs.run(halves, **section)
    runs.assert_equal_runs(whole, halves)


def test_check_works_with_such_a_teacher(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", algorithm={"name": "gkd", "teacher": str(folder)})
    main(["check", str(recipe)])
    said = capsys.readouterr().out
    assert "teacher's tokenizer" in said and "a step takes about" in said


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "distill": ({"algorithm": {"name": "distill"}}, r"compares single tokens; write algorithm\.name: gkd"),
    "references": (
        {"algorithm": {"source": "references"}, "rewards": None},
        "not by references; write source: student",
    ),
    "share": ({"algorithm": {"student_share": 0.5}}, "not by references; write source: student"),
    "epochs": ({"algorithm": {"epochs": 2}}, "no ratio .* set epochs and minibatches to 1"),
    "played": ({"env": {"name": "tests.quiz:Quiz", "workers": 1}}, "makes conversations"),
    "truncated": ({"sampling": {"max_new_tokens": 6, "top_k": 5}}, "exclude tokens of the policy's vocabulary"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_another_tokenizer_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    changes, sentence = REFUSED[name]
    section = {"name": "gkd", "teacher": str(folder), **changes.get("algorithm", {})}
    with pytest.raises(
        LmgymError, match=rf"algorithm\.teacher: .* has another tokenizer than the policy, .*{sentence}"
    ):
        runs.run(tmp_path / "run", **{**changes, "algorithm": section})
