"""What a run depends on: recipe, data, what else it reads, base model, versions, machine. Each checkpoint has it, as
fingerprint.json, and a resumed run names every difference (resume.py). One rule for all that is read: its contents
count, not its place."""

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lmgym.config.build import resolved
from lmgym.config.schema import Config
from lmgym.core.redacted import redacted
from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.models import frozen_base, lora
from lmgym.models.policy import Policy
from lmgym.tasks.streamed import StreamedExamples
from lmgym.training.machine import Machine, own_source
from lmgym.training.process_settings import unusual_settings
from lmgym.training.resuming import contents
from lmgym.training.run import Data
from lmgym.types import Example, told_apart

Fingerprint = dict[str, Any]  # plain JSON, by part: "recipe", "data", "read", "model", "versions", "machine"


def of_recipe(config: Config, data: Data) -> Fingerprint:
    """The recipe (without its `out`), the data, and all else that is read: what is known before a model is loaded."""
    return {
        "recipe": plain_recipe(config),
        "data": {
            "training": [data_digest(examples) for examples in data.training],
            "held_out": {split: data_digest(examples) for split, examples in data.held_out.items()},
        },
        "read": contents.with_models(contents.read_by(config), config),
    }


def plain_recipe(config: Config) -> dict[str, Any]:
    """The resolved recipe without its `out` and its secrets, as it comes back from JSON."""
    tree = {key: value for key, value in redacted(resolved(config)).items() if key != "out"}
    readable: dict[str, Any] = json.loads(json.dumps(tree, default=str))
    return readable


def of_machine(machine: Machine, policy: Policy, ranks: Ranks = ALONE, sharding: str = "none") -> Fingerprint:
    """Versions, the kind of machine, and what the policy is made of that no checkpoint holds: the base of adapters."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    versions |= {"python": platform.python_version(), "lmgym": _own_version()}
    kind = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
    if policy.device.type == "cuda":
        kind = f"{torch.cuda.get_device_name(policy.device)}, CUDA {torch.version.cuda}"
    elif policy.device.type != "cpu":
        kind = f"{kind}, {policy.device.type}"
    base = {}
    if lora.has_adapter(policy.model):
        with frozen_base.widened(policy.model):  # the same however it is held
            weights = checksum(p for p in policy.model.parameters() if not p.requires_grad)
        words = json.dumps([sorted(policy.tokenizer.get_vocab().items()), policy.tokenizer.chat_template], default=str)
        base = {"base weights": weights, "base tokenizer": hashlib.sha256(words.encode()).hexdigest()}
    precision = str(policy.compute).removeprefix("torch.")
    return {
        "model": base,
        "versions": versions,
        "machine": {
            "device": kind,
            "threads": machine.threads,
            "precision": precision,
            **unusual_settings(),
            **({"kernels": "native"} if policy.native else {}),
            **({"update kernels": "native"} if policy.trains_native else {}),
            **({} if machine.engine is None else {"engine": machine.engine}),
            **({} if machine.unit is None else {"unit": machine.unit}),
            **({} if machine.generator_threads is None else {"generator threads": machine.generator_threads}),
            **({"ranks": ranks.size} if ranks.size > 1 else {}),
            **({"sharding": sharding} if ranks.size > 1 and sharding != "none" else {}),
        },
    }


def data_digest(examples: Iterable[Example]) -> dict[str, Any]:
    """Number and SHA-256 of examples: their ids, prompts, references, meta, rated answers and labelled steps, in their
    order and in any order. A value of `meta` that JSON cannot hold counts by its type only. About 4 seconds for a
    million short examples. "without places" leaves out what an id takes from the name of a file ("train/5": "5"). Of
    examples that stay in their file, the SHA-256 of that file and of the places of their lines."""
    if isinstance(examples, StreamedExamples):
        return dict(examples.digest)
    count, total, ordered, placeless = 0, 0, hashlib.sha256(), hashlib.sha256()
    for example in examples:
        tree: list[Any] = [example.id, example.prompt, example.references, example.meta]
        if example.rated or example.steps:
            tree.append([vars(one) for one in (*example.rated, *example.steps)])
        if (whole := told_apart(example.prompt)) != str(example.prompt):
            tree.append(whole)  # with its pictures
        rest = _json(tree[1:])
        own = hashlib.sha256(f"[{_json(tree[0])}, {rest[1:]}".encode()).digest()
        ordered.update(own)
        placeless.update(f"{example.id.rpartition('/')[2]}{rest}".encode(errors="surrogatepass"))
        total += int.from_bytes(own)
        count += 1
    sums = {"sha256": ordered.hexdigest(), "in any order": f"{total % 2**256:064x}"}
    return {"examples": count, **sums, "without places": placeless.hexdigest()}


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """A checksum of tensors' bits, computed where they lie; the order and the position of each number count. It finds
    accidents, not forgeries."""
    sums: list[int] = []
    for tensor in tensors:
        flat = tensor.detach().flatten()
        for start in range(0, flat.numel(), 2**22):
            chunk = flat[start : start + 2**22].clone().view(torch.uint8)  # a clone lies at an even address
            whole = chunk.numel() // 8 * 8
            words = [chunk[:whole].view(torch.int64), chunk[whole:].to(torch.int64)]
            bits = torch.cat(words)
            place = torch.arange(1, len(bits) + 1, device=bits.device)
            sums += [int(bits.sum()), int((bits * place).sum())]  # both modulo 2^64
        sums.append(flat.numel())
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def _json(tree: Any) -> str:
    """A tree as JSON, in one form."""
    try:
        return json.dumps(tree, sort_keys=True, default=_plain)
    except TypeError:  # keys of several types have no order
        return json.dumps(tree, default=_plain, skipkeys=True)


def _plain(value: Any) -> Any:
    """What JSON cannot hold, as it counts in a fingerprint."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    return value.tolist() if hasattr(value, "tolist") else type(value).__qualname__


def _own_version() -> str:
    try:
        version = importlib.metadata.version("lmgym")
    except importlib.metadata.PackageNotFoundError:  # run from its source, not installed
        version = "unknown"
    _, contents = own_source()
    return f"{version} ({contents[:12]})" if contents else version


def _processor() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
