"""Attention block by block against the padded layouts it stands in for, in fp64: outputs and gradients."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmgym.models.attention import cpu
from lmgym.models.attention.cpu import BlockGroups, BlockRows
from lmgym.models.attention.packed import PackedGroups, PackedRows
from lmgym.models.attention.rules import Asked
from lmgym.models.policy import Policy
from tests import models, rounding

CPU = torch.device("cpu")


def ours_and_theirs(pair: tuple[Any, Any], tokens: int, heads: tuple[int, int], scale: float | None, seed: int) -> Any:
    """Output and gradients of query, key and value, by each layout."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(1, tokens, count, 8, generator=generator, dtype=torch.float64).transpose(1, 2).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    ]
    brought = torch.randn(1, tokens, heads[0], 8, generator=generator, dtype=torch.float64)
    for layout in pair:
        out = layout.attend(0, *inputs, Asked(scale))
        yield [out, *torch.autograd.grad(out, inputs, brought)]


lengths = st.lists(st.integers(1, 70), min_size=1, max_size=7)
heads = st.sampled_from([(1, 1), (4, 4), (4, 2), (3, 1)])
scales = st.sampled_from([None, 0.3])


@pytest.mark.slow
@given(lengths, st.data(), heads, scales, st.integers(0, 9))
def test_groups(prompts, data, heads, scale, seed) -> None:
    """Prompts of any lengths, any order of rows, rows that have nothing of their own and prompts without any row."""
    own = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any))
    owner = torch.tensor(data.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=len(own), max_size=len(own))))
    pair = [layout(prompts, own, owner, CPU) for layout in (BlockGroups, PackedGroups)]
    assert torch.equal(pair[0].positions, pair[1].positions)
    found, expected = ours_and_theirs(pair, sum(prompts) + sum(own), heads, scale, seed)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-11)


@given(st.permutations(range(5)), st.integers(0, 9))
def test_the_order_of_groups_moves_no_bit(order, seed) -> None:
    """Micro-batches put groups in another order; in fp32, of odd sizes."""
    prompts, own = [6, 7, 8, 7, 33], [7, 7, 7, 5, 21]
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randn(3, 1, count, 3, 16, generator=generator) for count in (*prompts, *own)]

    def attended(order: Any) -> torch.Tensor:
        """Of the groups as they are numbered, one row each."""
        layout = BlockGroups([prompts[i] for i in order], [own[i] for i in order], torch.arange(5), CPU)
        packed = torch.cat([tokens[i] for i in order] + [tokens[5 + i] for i in order], 2)
        out = layout.attend(0, *packed.transpose(2, 3), Asked(None))[0]
        parts = out.split([prompts[i] for i in order] + [own[i] for i in order])
        return torch.cat([torch.cat([parts[order.index(i)], parts[5 + order.index(i)]]) for i in range(5)])

    assert torch.equal(attended(list(order)), attended(list(range(5))))


@given(lengths, heads, scales, st.integers(0, 9))
def test_rows(rows, heads, scale, seed) -> None:
    pair = [layout(rows, CPU) for layout in (BlockRows, PackedRows)]
    found, expected = ours_and_theirs(pair, sum(rows), heads, scale, seed)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-11)


def test_no_block_has_padding_and_like_rows_share_one() -> None:
    """The example that the docs draw: two prompts, three answers, two of one length."""
    blocks = BlockGroups([10, 7], [3, 3, 5], torch.tensor([0, 0, 1]), CPU).blocks
    assert [(block.rows, block.causal) for block in blocks.first] == [(1, True), (1, True), (1, False), (1, False)]
    assert [block.queries for block in blocks.first] == [slice(0, 10), slice(10, 17), slice(17, 23), slice(23, 28)]
    assert [block.keys for block in blocks.first[2:]] == [slice(0, 10), slice(10, 17)]
    assert [(block.queries, block.rows) for block in blocks.second] == [(slice(17, 23), 2), (slice(23, 28), 1)]
    (both,) = BlockRows([4, 4], CPU).blocks.first
    assert both.queries == slice(0, 8) and both.rows == 2


@pytest.mark.parametrize("shared", [True, False])
def test_which_layout_scores(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernel, but where second derivatives are asked for, which it does not have."""
    used: list[str] = []
    for layout in (BlockRows, BlockGroups, PackedRows, PackedGroups):

        def attend(self: Any, *arguments: Any, of: Any = layout.attend, name: str = layout.__name__) -> Any:
            used.append(name)
            return of(self, *arguments)

        monkeypatch.setattr(layout, "attend", attend)
    policy = Policy(models.llama(), models.tokenizer())
    episodes = models.episodes(3, groups=2, size=3, turns=2)
    batch = models.batch_of(episodes if shared else episodes[::3])
    policy.compute_logprobs_no_grad(batch)
    assert set(used) == {"BlockGroups" if shared else "BlockRows"}
    used.clear()
    with policy.twice_differentiable():
        policy.compute_logprobs_no_grad(batch)
    assert ("PackedGroups" if shared else "PackedRows") in used and not any(name.startswith("Block") for name in used)


def test_under_autocast_queries_in_fp32_meet_values_in_bf16() -> None:
    """As under autocast, where some models apply positions in fp32; against fp32 from the same rounded inputs on. The
    answers to one prompt are not side by side."""
    layout = BlockGroups([5, 9], [4, 6, 6], torch.tensor([1, 0, 1]), CPU)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 30, 16).bfloat16().float() for _ in range(3))
    out = layout.attend(0, query, key, value.bfloat16(), Asked(None))
    expected = layout.attend(0, query, key, value, Asked(None))
    # Shares and outputs round to bf16, of each of two blocks and of their sum.
    gap, size = (float(one.square().mean().sqrt()) for one in (out.float() - expected, expected))
    assert out.dtype == torch.bfloat16 and gap <= rounding.typical(2 * 2 + 1, size, torch.bfloat16)


@pytest.mark.parametrize("short", [-1, 192])
def test_gradients_in_bf16_are_those_of_fp64_but_for_rounding(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel's backward in bf16 and in fp32, from the same rounded inputs. In the norm, of which each rounding
    is a share: outputs and gradients of two blocks, their sums, the kernel's probabilities and their gradients."""
    monkeypatch.setattr(cpu, "SHORT", short)
    layout, torch_seed = BlockGroups([5, 9], [4, 6, 6], torch.tensor([1, 0, 0]), CPU), torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 30, 16, generator=torch_seed).bfloat16().requires_grad_() for _ in range(3)]
    brought = torch.randn(1, 30, 2, 16, generator=torch_seed).bfloat16()
    found = torch.autograd.grad(layout.attend(0, *inputs, Asked(None)), inputs, brought)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = torch.autograd.grad(layout.attend(0, *exact_inputs, Asked(None)), exact_inputs, brought.double())
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        gap, size = float((ours.double() - theirs).norm()), float(theirs.norm())
        assert gap <= rounding.typical(2 * 3 + 2, size, torch.bfloat16)
