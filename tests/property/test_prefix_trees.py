"""Rows that share their beginnings, computed once, against rows computed one by one: outputs and gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmgym.batch import Batch
from lmgym.models import micro_batches, prefix_trees, scoring
from lmgym.models.attention.rules import Asked, Rule
from lmgym.models.attention.tree import BlockTree, FlexTree, TreeRows
from lmgym.models.policy import Policy
from lmgym.models.prefix_trees import OrderedRows, PrefixTree
from tests import models, rounding
from tests.parity.test_families import policy_of as policy_of_family
from tests.property.test_blocks import heads, ours_and_theirs, scales
from tests.property.test_gradient import cut, tokens_run

CPU = torch.device("cpu")
SHARING = (BlockTree, FlexTree, TreeRows)


@st.composite
def trees_of_rows(draw: Callable[..., Any], least: int = 0, longest: int = 9) -> list[list[int]]:
    """Rows that go on from any place of an earlier one, or begin anew; some are the whole of another, or its beginning.
    Few different ids, so that rows also begin alike by chance."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 12))):
        earlier = draw(st.sampled_from([[], *rows]))
        kept = earlier[: draw(st.integers(0, len(earlier)))]
        row = [*kept, *draw(st.lists(st.integers(3, 6), max_size=longest))][:60]
        rows.append([*row, *[3] * (least - len(row))])
    return rows


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The ids [N T], and which of them are no padding. The padding is an id that rows have too."""
    width = max([1, *map(len, rows)])
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    return torch.tensor([[*row, *[3] * (width - len(row))] for row in rows]), mask


def tree_of(rows: Sequence[Sequence[int]], shortest: int = 1) -> PrefixTree:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_trees, "SHORTEST", shortest)
        return OrderedRows(padded(rows)[0], list(map(len, rows))).tree(range(len(rows)))


def batch_of(rows: Sequence[Sequence[int]], seed: int = 0, episodes: int = 1, groups: int = 1) -> Batch:
    """Rows of these episodes, with random actions: of some rows all but the first token, of some none."""
    tokens, mask = padded(rows)
    drawn = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed))
    actions = mask & (drawn < torch.tensor([0.5, 2.0, 0.0, 0.3])[torch.arange(len(rows)) % 4, None])
    actions[:, 0] = False
    zeros, numbers = torch.zeros(len(rows)), torch.arange(len(rows))
    return Batch(
        tokens=tokens,
        mask=mask,
        actions=actions,
        rewards=torch.zeros(mask.shape),
        score=zeros,
        episode=numbers % episodes,
        group=numbers % episodes % groups,
        version=numbers,
        terminated=zeros.bool(),
    )


@contextmanager
def prompts_alone() -> Iterator[None]:
    """Rows share their whole prompts, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "_trees", lambda *_: lambda *_: None)
        yield


@given(trees_of_rows(), st.integers(1, 6))
def test_a_tree_holds_each_row_and_shares_only_what_is_equal(rows, shortest) -> None:
    tree = tree_of(rows, shortest)
    assert sorted(tree.rows) == list(range(len(rows))) and tree.lengths == tuple(len(rows[row]) for row in tree.rows)
    tails = [rows[row][shared:] for row, shared in zip(tree.rows, tree.shared, strict=True)]
    ids = [id for tail in tails for id in tail]
    ways = [places[: len(rows[row])] for row, places in zip(tree.rows, tree.places.tolist(), strict=True)]
    assert len(ids) == tree.tokens
    # Each row is a way through the tree, and a token has the same ones before it on all of its ways.
    before: dict[int, list[int]] = {}
    for row, way in zip(tree.rows, ways, strict=True):
        assert [ids[place] for place in way] == rows[row]
        assert all(before.setdefault(place, way[:depth]) == way[:depth] for depth, place in enumerate(way))
    # What a token is before: those whose `until` it does not reach. Readers are the same, by runs.
    seen = [[key for key in range(query) if query < tree.until[key]] for query in range(len(ids))]
    assert seen == [before[query] for query in range(len(ids))]
    offsets = [offset for offset, tail in zip(tree.offsets, tree.tails, strict=True) for _ in range(tail)]
    read: list[list[int]] = [[] for _ in ids]
    for keys, queries in tree.readers:
        assert keys.stop - keys.start >= 1 and queries.start < queries.stop
        for query in range(queries.start, queries.stop):
            read[query] += range(keys.start, keys.stop)
    for query, offset in enumerate(offsets):
        assert [*read[query], *range(offset, query)] == seen[query]


@given(trees_of_rows())
def test_with_runs_of_any_length_no_token_is_there_twice(rows) -> None:
    assert tree_of(rows).tokens == len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


@given(trees_of_rows(longest=5), st.data())
def test_a_part_of_the_rows_has_the_tree_that_it_has_alone(rows, data) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True, min_size=1))
    whole = OrderedRows(padded(rows)[0], list(map(len, rows)))
    alone = [rows[row] for row in chosen]
    part, own = whole.tree(chosen), OrderedRows(padded(alone)[0], list(map(len, alone))).tree(range(len(alone)))
    assert (part.lengths, part.shared) == (own.lengths, own.shared)
    assert [rows[row] for row in part.rows] == [alone[row] for row in own.rows]


@pytest.mark.slow
@pytest.mark.parametrize("layout", SHARING)
@pytest.mark.parametrize("rule", [None, Rule(window=3), Rule(window=3, chunked=True), Rule(softcap=0.5)])
@settings(max_examples=15)
@given(trees_of_rows(), heads, scales, st.integers(0, 9))
def test_attention_is_that_of_each_row_alone(layout, rule, rows, heads, scale, seed) -> None:
    """In fp64, with gradients; the one it is compared with is the formula, by a mask over the whole tree."""
    assume(any(rows))
    tree = tree_of(rows, 2)

    class Formula:
        def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
            key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
            scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
            scores = scores if rule is None or rule.softcap is None else 0.5 * (scores / 0.5).tanh()
            seen, positions = torch.zeros(tree.tokens, tree.tokens, dtype=torch.bool), TreeRows(tree, CPU).positions
            for places, length in zip(tree.places.tolist(), tree.lengths, strict=True):
                for depth in range(length):
                    seen[places[depth], places[: depth + 1]] = True
            near = positions[:, None] - positions < 3
            if rule is not None and rule.window:
                seen &= positions[:, None] // 3 == positions // 3 if rule.chunked else near
            return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2)

    class WithRule(layout):  # type: ignore[misc, valid-type]
        def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
            return super().attend(layer, query, key, value, Asked(scale, rule))

    found, expected = ours_and_theirs((WithRule(tree, CPU), Formula()), tree.tokens, heads, scale, seed)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-11)


def test_in_bf16_an_output_rounds_as_often_whatever_the_depth() -> None:
    """A chain of forks, ten runs deep; against fp32 from the same rounded inputs on. Shares and outputs of a block
    round to bf16, a mean over all blocks by no more, and that once more."""
    tree = tree_of([[*range(3 * depth), 1, 2] for depth in range(1, 12)])
    assert len(tree.readers) == 10
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, tree.tokens, 16).bfloat16() for _ in range(3)]
    out = BlockTree(tree, CPU).attend(0, *inputs, Asked(None))
    expected = BlockTree(tree, CPU).attend(0, *(one.float() for one in inputs), Asked(None))
    gap, size = (float(one.square().mean().sqrt()) for one in (out.float() - expected, expected))
    assert out.dtype == torch.bfloat16 and gap <= rounding.typical(2 + 1, size, torch.bfloat16)


@cache
def exact_policy(model: str) -> Policy:
    made = models.in_double({"llama": models.llama, "gpt2": models.gpt2}[model]())
    return models.with_value_head(Policy(made, models.tokenizer(), compute=torch.float64))


def of_policy(policy: Policy, batch: Batch, weight: Tensor) -> list[Tensor]:
    """Log-probabilities, entropies, values, and the gradient of a sum of all of them, by micro-batches."""
    found = []
    policy.model.zero_grad()
    for rows in policy.micro_batches(batch):
        said = policy.compute_logprobs(batch[rows], entropy=True, values=True, last_values=True)
        assert said.entropy is not None and said.values is not None and said.last_values is not None
        columns = said.logprobs.shape[1]
        part = said.logprobs + 0.3 * said.entropy + 0.2 * said.values
        (part * weight[rows, :columns]).sum().backward()  # type: ignore[no-untyped-call]
        whole = torch.zeros(3, *batch.tokens.shape, dtype=said.logprobs.dtype)
        whole[:, rows, :columns] = torch.stack([said.logprobs, said.entropy, said.values]).detach()
        found.append(whole)
    gradients = [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]
    return [sum(found[1:], found[0]), *gradients]


@pytest.mark.slow
@pytest.mark.parametrize("flex", [False, True])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
@settings(max_examples=12)
@given(trees_of_rows(least=1), st.integers(0, 9), st.integers(1, 100), st.integers(1, 3))
def test_the_tree_of_a_batch_gives_what_its_rows_give(model, flex, rows, seed, tokens, episodes) -> None:
    """In fp64, whatever a pass holds: 1e-10 of the largest number; sums of some thousand numbers round by 1e-13."""
    batch = batch_of(rows, seed, episodes, groups=2)
    assume(bool(batch.actions.any()))
    weight = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    policy = exact_policy(model)
    with prompts_alone():
        expected = of_policy(policy, batch, weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_trees, "SHORTEST", 2)
        patch.setattr(prefix_trees, "WORTH", 2.0)  # always
        patch.setattr(policy, "flex", flex)
        found = of_policy(cut(policy, tokens), batch, weight)
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-10 * max(1.0, float(theirs.abs().max()))


# A session as the gateway makes it: a question with answers, each of which is gone on with twice.
FORKS = [[*range(3, 40), *[40 + a] * 5, *range(60, 78), *[80 + a + b] * 4] for a in range(3) for b in range(2)]


@pytest.mark.parametrize(
    "family", ["llama, grouped queries", "gpt2", "gemma2", "gemma3_text", "gpt_oss", "llama4_text"]
)
def test_in_fp32_it_moves_by_rounding(family: str) -> None:
    """Families with windows, pieces, capped scores and sinks too: their places are those in the row."""
    policy, batch = policy_of_family(family), batch_of([*FORKS, FORKS[0]])
    weight = torch.ones(batch.tokens.shape)
    with prompts_alone():
        whole = tokens_run(policy, batch)
    assert tokens_run(policy, batch) < 0.6 * whole
    outputs, actions = [], batch.actions
    for form in (nullcontext, prompts_alone):
        policy.model.zero_grad()
        with form():
            logprobs = policy.compute_logprobs(batch).logprobs
            (logprobs * weight).sum().backward()  # type: ignore[no-untyped-call]
        outputs.append((logprobs, [p.grad for p in policy.parameters() if p.grad is not None]))
    (ours, own), (theirs, others) = outputs
    assert rounding.near(policy.model, ours[actions], theirs[actions])
    for found, expected in zip(own, others, strict=True):
        assert rounding.near_gradient(policy.model, found, expected, outputs=int(actions.sum()))


def test_rows_that_share_little_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose tree has hardly fewer tokens are packed as if there were no trees; those of FORKS are not, whether
    they are a session or six prompts that begin with the same examples."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a tree was built")

    policy = Policy(models.llama(), models.tokenizer())
    little = batch_of([[3, *[number] * 30] for number in range(5, 9)])
    little = little.replace(actions=little.mask & (torch.arange(31) > 5))
    monkeypatch.setattr(TreeRows, "__init__", refuse)
    logprobs = policy.compute_logprobs_no_grad(little).logprobs
    with prompts_alone():
        assert torch.equal(logprobs, policy.compute_logprobs_no_grad(little).logprobs)
    for episodes in (1, len(FORKS)):
        with pytest.raises(AssertionError, match="a tree was built"):
            policy.compute_logprobs_no_grad(batch_of(FORKS, episodes=episodes))


def test_a_pass_is_filled_by_what_it_computes() -> None:
    """A group whose tree fits in a pass is one pass, though its rows alone would not fit; the count is the trunk's."""
    rows = [row for fork in FORKS for row in (fork, [9, *fork[1:]])]
    policy, batch = Policy(models.llama(), models.tokenizer()), batch_of(rows, episodes=2, groups=2)
    batch = batch.replace(actions=batch.mask & (torch.arange(batch.tokens.shape[1]) > 59))
    count = scoring.tokens_of_pass(policy, batch, batch.mask.sum(1))
    for chosen in (range(12), range(0, 12, 2), [3], [1, 7, 8]):
        assert count(list(chosen)) == tokens_run(policy, batch[torch.tensor(chosen)])
    tight = cut(policy, 150)
    with prompts_alone():
        assert [len(rows) for rows in tight.micro_batches(batch)] != [6, 6]
    assert [len(rows) for rows in tight.micro_batches(batch)] == [6, 6]


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), max_size=30), st.integers(1, 40), st.integers(1, 40)
)
def test_passes_are_filled_as_one_row_after_the_other_would_fill_them(groups, most, enough) -> None:
    """Groups come longest first, so those that are too large for a pass come before the others."""
    groups = sorted(groups, key=lambda counts: -sum(counts))
    counts = [count for group in groups for count in group]
    numbers = iter(range(len(counts)))
    rows = [[next(numbers) for _ in group] for group in groups]
    enough = min(enough, most)

    def tokens_of(rows: Sequence[int]) -> int:
        return sum(counts[row] for row in rows)

    expected: list[list[int]] = [[]]
    for group in rows:
        whole = tokens_of(group) <= most
        for part in [group] if whole else [[row] for row in group]:
            if expected[-1] and tokens_of(expected[-1] + part) > (enough if whole else most):
                expected.append([])
            expected[-1] += part
    assert micro_batches._passes(rows, tokens_of, most, enough) == [rows for rows in expected if rows]
