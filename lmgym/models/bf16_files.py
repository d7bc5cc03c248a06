"""A model's files in bf16, rounded so that what training has changed is not lost.

Training by RL moves weights by less than the distance of two bf16 numbers: SmolLM2-135M by 0.05 % of their size in 60
steps, where bf16 has steps of 0.4 to 0.8 %. Rounding to the nearest would take most of it back (docs/precision.md)."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.core.model_folder import INDEX
from lmgym.models.load import load_policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.rounding import random_table, round_stochastically


def round_files(folder: Path, section: PolicySection, seed: int) -> str:
    """Round the fp32 weights in a model folder to bf16, each up or down with a probability by its distance. Returns a
    sentence that says how much of the way from the base (`section`) is kept. Raises LmgymError if there are no weights.

    Example: round_files(Path("model"), config.policy, seed=0)"""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise LmgymError(f"--bf16: {folder.name} holds no model.safetensors, so there are no weights to round")
    base = {name: tensor.detach().cpu() for name, tensor in load_policy(section, seed).model.state_dict().items()}
    table, size, moved, kept, nearest = random_table(seeds.key(seed, "export")), 0, 0.0, 0.0, 0.0
    for path in files:
        tensors = load_file(path)
        for name, master in tensors.items():
            if master.dtype != torch.float32:
                continue
            tensors[name] = torch.empty_like(master, dtype=torch.bfloat16)
            round_stochastically(master, table, seeds.key(name), tensors[name])
            if name in base and base[name].shape == master.shape:
                way = (master - base[name]).double()
                moved += float((way * way).sum())
                kept += _along(way, tensors[name], base[name])
                nearest += _along(way, master.bfloat16(), base[name])
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        save_file(tensors, path, metadata)
        size += sum(tensor.nbytes for tensor in tensors.values())
    if (index := folder / INDEX).is_file():
        tree = json.loads(index.read_text("utf-8"))
        known = tree.get("metadata")
        tree["metadata"] = {**(known if isinstance(known, dict) else {}), "total_size": size}
        index.write_text(json.dumps(tree, indent=2), "utf-8")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"dtype": "bfloat16"}, indent=2), "utf-8")
    if not moved:
        return "weights in bf16"
    return f"weights in bf16, with {kept / moved:.0%} of what training changed (to nearest: {nearest / moved:.0%})"


def _along(way: Tensor, rounded: Tensor, base: Tensor) -> float:
    """The rounded weights' distance from the base in the direction of `way`, times its length."""
    return float((way * (rounded.double() - base)).sum())
