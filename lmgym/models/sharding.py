"""FSDP2: of the weights that train, of their gradients and of the optimizer's moments, each rank holds one part.

Each layer is a unit: its weights are put together before it runs and taken apart after it. Around the layers the trunk
is another unit, or encoder and decoder are. Weights that are used outside of it (the LM head, embeddings that are tied
to it, a value head) are put together by the module that uses them. Gradients are added while they are taken apart.

So every rank must make equally many passes: `Policy.micro_batches` gives idle ones to a rank with fewer rows. What
samples is a whole copy on each rank (skeleton.py)."""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from lmgym.core.errors import LmgymError
from lmgym.distributed.parts import cut, is_part, mesh_of, whole
from lmgym.distributed.ranks import Ranks
from lmgym.models.frozen_base import hold_wide
from lmgym.models.hooks import layers_of
from lmgym.models.policy import Policy
from lmgym.models.skeleton import Skeleton

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


def shard_policy(policy: Policy, ranks: Ranks) -> Policy:
    """The policy, of whose weights (and its value function's) each rank keeps its part; itself for one rank. The model
    is cut in place."""
    if ranks.size == 1:
        return policy
    hold_wide(policy.model)  # FSDP2 cuts layers whose parameters are all of one precision
    mesh, skeleton = mesh_of(ranks, policy.device.type), Skeleton(policy.model)
    shard(policy.model, mesh)
    if policy.value_head is not None:
        shard_module(policy.value_head, mesh)
    critic = None if policy.critic is None else shard_policy(policy.critic, ranks)
    return policy.but(skeleton=skeleton, critic=critic, rounded=None)  # autocast rounds parts to nearest


def shard(model: "PreTrainedModel", mesh: "DeviceMesh") -> None:
    """Cut the model's parameters into a part for each rank, in place; ties and the order of the parameters stay.

    Raises LmgymError for a model whose layers transformers does not know."""
    from torch.distributed.fsdp import fully_shard

    # Many layers return a view, which is harmless as long as nothing changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    layers = layers_of(model)
    if not layers:
        raise LmgymError(
            f"distributed.sharding: transformers knows no layers of {model.config.model_type} that could be cut; "
            "remove it: the ranks then hold the whole model each"
        )
    before = sum(parameter.numel() for parameter in model.parameters())
    # 1. What is used outside of the units: all that is there, with what is tied to it.
    units = [model.base_model]  # what is called as a whole: the trunk below the head
    if getattr(model.config, "is_encoder_decoder", False):
        units = [model.get_encoder(), model.get_decoder()]  # type: ignore[no-untyped-call]
    inside = [{*unit.modules()} for unit in units]
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((module, name))
    outside = {p: uses for p, uses in owners.items() if not any(all(m in own for m, _ in uses) for own in inside)}
    # 2. The units, inner ones first.
    for unit in [*layers, *units]:
        part: Any = fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params={*outside})
        part.set_gradient_divide_factor(1.0)  # the losses' weights come from global totals already
        part.set_force_sum_reduction_for_comms(True)
    # 3. The others.
    _cut_alone(outside, mesh)
    after = sum(parameter.numel() for parameter in model.parameters())
    if before != after:
        raise AssertionError(f"{before} parameters became {after}: a tie was lost")


def shard_module(module: nn.Module, mesh: "DeviceMesh") -> None:
    """Cut the parameters of a single module, such as a value head; they are put together whenever it runs."""
    own = {parameter: [(module, name)] for name, parameter in module._parameters.items() if parameter is not None}
    _cut_alone(own, mesh)


def _cut_alone(owners: Mapping[nn.Parameter, Sequence[tuple[nn.Module, str]]], mesh: "DeviceMesh") -> None:
    """Cut parameters that belong to no unit. Each is used by some modules, under a name of theirs."""
    for parameter, uses in owners.items():
        part = nn.Parameter(cut(parameter, mesh), parameter.requires_grad)
        for module, name in uses:
            module._parameters[name] = part
    for module in dict.fromkeys(module for uses in owners.values() for module, _ in uses):
        module.register_forward_pre_hook(_put_together)
        module.register_forward_hook(_take_apart, always_call=True)


def _put_together(module: nn.Module, _: Any) -> None:
    """Before a module runs: whole parameters in the place of its parts."""
    parameters: dict[str, Any] = module._parameters
    parts = {name: value for name, value in parameters.items() if value is not None and is_part(value)}
    module.__dict__["_parts"] = parts
    parameters.update({name: whole(part) for name, part in parts.items()})


def _take_apart(module: nn.Module, *_: Any) -> None:
    module._parameters.update(module.__dict__.pop("_parts", {}))
