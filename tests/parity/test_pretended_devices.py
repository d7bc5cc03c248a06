"""The pretended GPU itself (tests/pretend_devices.py): where tensors lie, and what a GPU refuses."""

import copy
from typing import Any

import pytest
import torch

from tests.pretend_cuda import pretended_cuda  # noqa: F401 (a fixture)
from tests.pretend_devices import labels

pytestmark = pytest.mark.usefixtures("pretended_cuda")


def test_tensors_say_where_they_are() -> None:
    tensor = torch.zeros(3, device="cuda")
    assert tensor.device == torch.device("cuda", 0) and tensor.to("cuda:0").is_cuda and tensor[1:].is_cuda
    assert not torch.zeros(3).is_cuda and torch.zeros(3).cuda().is_cuda and tensor.cpu().device.type == "cpu"
    layer = torch.nn.BatchNorm1d(2).to(torch.device("cuda"))
    for one in (layer, copy.deepcopy(layer)):
        assert {each.device.type for each in one.state_dict().values()} == {"cuda"}


def test_backward_sees_where_gradients_are() -> None:
    places = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, number: torch.Tensor) -> torch.Tensor:
            return number * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            places.append(gradient.device.type)
            return gradient * torch.ones(2, device=gradient.device)

    weight = torch.ones(2, device="cuda", requires_grad=True)
    Noted.apply(weight).sum().backward()
    (gradient,) = torch.autograd.grad(Noted.apply(weight).sum(), weight)
    assert places == ["cuda", "cuda"] and gradient.is_cuda and weight.grad is not None and weight.grad.is_cuda


REFUSED = {
    "operands of add": lambda there: there + torch.ones(2),
    "operands of add_": lambda there: torch.ones(()).add_(there[0]),
    "operands of index_select": lambda there: there.index_select(0, torch.tensor(1)),
    "operands of index ": lambda there: torch.ones(2)[there.long()],
    "operands of index_put_": lambda there: there.__setitem__(torch.tensor([0, 1]), torch.ones(2)),
    "the numpy array": lambda there: there.numpy(),
    "a generator of cpu": lambda there: there.uniform_(generator=torch.Generator()),
}
IN_CAPTURE = {
    "_local_scalar_dense": lambda there: there[0].item(),
    "nonzero": lambda there: there.nonzero(),
    "index ": lambda there: there[there > 0],
    "a copy to cuda": lambda there: torch.ones(2).to(there.device),
    "a copy to cpu": lambda there: there.cpu(),
    "copy_": lambda there: there.copy_(torch.ones(2)),
}


@pytest.mark.parametrize("what", [*REFUSED, *IN_CAPTURE])
def test_what_a_gpu_refuses_is_refused(what: str) -> None:
    there = torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match=what):
        if what in REFUSED:
            REFUSED[what](there)
        else:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                IN_CAPTURE[what](there)
    assert len(labels.refused) == 1
    labels.refused.clear()


def test_what_a_gpu_allows_is_allowed() -> None:
    there = torch.ones(2, device="cuda")
    for result in (
        there * torch.tensor(2.0),
        there[torch.tensor([0])],
        there.masked_fill(there > 0, torch.tensor(0.0)),
    ):
        assert result.is_cuda
    assert not torch.zeros(2).copy_(there).is_cuda and there.copy_(torch.zeros(2)).is_cuda


def test_a_graph_computes_again_from_what_stands_at_its_addresses() -> None:
    graph, number = torch.cuda.CUDAGraph(), torch.ones(2)
    with torch.cuda.graph(graph):
        double = number * 2
    number.fill_(5)
    graph.replay()
    assert double.tolist() == [10, 10]
