"""What is made for GPUs, held against what runs everywhere: flex attention against padded rows and Hugging Face,
decoding steps of fixed shapes against the sampler's own; and, where there is a GPU, the graphs that replay them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.inference import decoder
from lmgym.inference.base import Request, Sampling
from lmgym.inference.in_process import make_engine
from lmgym.inference.kernels import cuda_graphs
from lmgym.inference.sampler import Sampler
from lmgym.models.attention.flex import FlexGroups, FlexRows
from lmgym.models.attention.packed import PackedGroups
from lmgym.models.attention.rules import Asked
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from tests import models, rounding, runs
from tests.parity.test_families import FAST, gradients, model_of, of_hugging_face, policy_of
from tests.parity.test_sampler import requests

every_fast_family = pytest.mark.parametrize("family", FAST)


@every_fast_family
@pytest.mark.parametrize("shared", [True, False])
def test_flex_attention_scores_and_trains_as_hugging_face_does(
    family: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[type] = []

    def counted(layout: type) -> Callable[..., Any]:
        attend = layout.attend  # type: ignore[attr-defined]

        def run(self: Any, *arguments: Any) -> Any:
            used.append(layout)
            return attend(self, *arguments)

        return run

    for layout in (FlexRows, FlexGroups):
        monkeypatch.setattr(layout, "attend", counted(layout))
    model, policy = model_of(family), policy_of(family)
    episodes = models.episodes(3, groups=2, size=3, turns=2)
    batch = models.batch_of(episodes if shared else episodes[::3])
    expected = of_hugging_face(model, batch)
    policy.flex = True
    scored = policy.compute_logprobs(batch).logprobs
    assert set(used) == {FlexGroups if shared else FlexRows}
    assert rounding.near(model, scored, expected)
    for ours, theirs in zip(gradients(model, scored), gradients(model, expected), strict=True):
        if ours is not None:
            assert rounding.near_gradient(model, ours, theirs, outputs=int(batch.actions.sum()))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, 0.2])
def test_the_kernel_itself_with_its_blocks_gives_the_same(scale: float | None) -> None:
    """Without gradient, uncompiled; several blocks of 128, prompts and rows of different lengths, two queries a key."""
    torch.manual_seed(0)
    layout = FlexGroups([150, 90], [40, 60, 7], torch.tensor([0, 1, 1]), torch.device("cpu"))
    query, key, value = (torch.randn(1, heads, 347, 16) for heads in (4, 2, 2))
    allowed = layout.allowed[0, 0]
    blocks = create_block_mask(lambda b, h, q, k: allowed[q, k], None, None, 347, 347, device="cpu")
    out = flex_attention(query, key, value, block_mask=blocks, scale=scale, enable_gqa=True).transpose(1, 2)
    ours, padded = (cls.attend(layout, 0, query, key, value, Asked(scale)) for cls in (FlexGroups, PackedGroups))
    # 16 products in each score, a softmax over up to 347 keys, and as many values, of which none is larger than 5.
    tolerance = rounding.rounding(16 + 2 * 347, float(value.abs().max()))
    assert torch.allclose(ours, out, atol=tolerance) and torch.allclose(ours, padded, atol=tolerance)


def generated(policy: Policy, asked: list[Request], rows: int, **settings: Any) -> list[Any]:
    sampling = Sampling(max_new_tokens=20, stop_ids=tuple(range(50, 70)))
    return Sampler(policy, rows, **settings).generate(asked, sampling)


@pytest.mark.slow
@every_fast_family
@pytest.mark.parametrize("conversations", [False, True])
@pytest.mark.parametrize("rows", [3, 6, 64])
def test_steps_of_fixed_shapes_sample_the_same_answers(
    family: str, conversations: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers leave and come, slots are compacted, and attention looks at several widths."""
    widths = set[int]()
    step = cuda_graphs.CapturedSteps._step
    monkeypatch.setattr(cuda_graphs, "WIDTH", 8)
    monkeypatch.setattr(decoder, "FIRST_TOKENS", 4)  # fewer than an answer has
    monkeypatch.setattr(cuda_graphs.CapturedSteps, "_step", lambda self, width: widths.add(width) or step(self, width))
    asked, policy = requests(16), models.exact(policy_of(family))
    if conversations:
        asked = [replace(request, conversation=number) for number, request in enumerate(asked)]
    usual, fixed = generated(policy, asked, rows), generated(policy, asked, rows, captured=True)
    assert len(widths) > 1
    assert [answer.ids for answer in fixed] == [answer.ids for answer in usual]
    for one, other in zip(fixed, usual, strict=True):
        assert rounding.near(policy.model, one.logprobs, other.logprobs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@every_fast_family
def test_a_replayed_graph_gives_what_the_step_gives(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "WIDTH", 16)
    replayed: list[int] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: replayed.append(1) or replay(self))
    policy = Policy(model_of(family).to("cuda"), models.tokenizer())
    try:
        asked = requests(16)
        usual, graphs = generated(policy, asked, 64), generated(policy, asked, 64, captured=True)
    finally:
        model_of(family).to("cpu")
    assert len(replayed) > 5
    for one, other in zip(graphs, usual, strict=True):
        assert one.ids == other.ids and rounding.near(policy.model, one.logprobs, other.logprobs)


def test_a_recipe_asks_for_them() -> None:
    config = build_config(runs.tiny(engine={"captured": True}, policy={"model": "builtin:tiny", "attention": "flex"}))
    policy = load_policy(config.policy)
    assert policy.flex and make_engine(config.engine, policy).captured


def test_what_they_do_not_serve_is_refused() -> None:
    with pytest.raises(LmgymError, match=r"policy.attention: flex attention is for packed rows, .* t5 here has none"):
        load_policy(PolicySection(model="builtin:tiny_t5", attention="flex"))
    with pytest.raises(LmgymError, match=r"policy.attention: flex"):
        load_policy(PolicySection(model="builtin:tiny", attention="flex", path="plain"))
    with pytest.raises(LmgymError, match=r"engine.captured: decoding steps of llama run through Hugging Face's caches"):
        Sampler(load_policy(PolicySection(model="builtin:tiny", path="plain")), captured=True)
