"""The engine of a run: in this process, a pool on Ray, or vLLM (docs/engines.md)."""

from collections.abc import Callable
from pathlib import Path

import torch

from lmgym.config.schema import Config
from lmgym.core import registry
from lmgym.core.availability import availability_of
from lmgym.core.errors import LmgymError
from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.inference.base import Engine
from lmgym.inference.pool.pool import Here, InUnits
from lmgym.inference.sampler import Sampler
from lmgym.inference.vllm.engine import Vllm
from lmgym.inference.vllm.here import Here as VllmHere
from lmgym.inference.vllm.servers import Servers
from lmgym.models import lora
from lmgym.models.policy import Policy
from lmgym.training.machine import WORKERS, Machine
from lmgym.training.sampler_gap import FAR, LEAST, MOST

WAIT = 600.0  # seconds for a unit or an answer, unless the recipe says otherwise
CACHE_GIB = 1.0  # of vLLM in this process, likewise
Warn = Callable[[str], None]


def make_engine(config: Config, policy: Policy, unit: int | None = None) -> Engine:
    """An engine in this process that samples from the policy, as any engine of the recipe would."""
    section, unit = config.engine, unit or config.engine.unit
    sampler = Sampler(policy, section.rows, section.captured)
    return sampler if unit is None else InUnits(policy, Here(sampler), unit, section.rows)


def check_engine(config: Config) -> None:
    """Raise LmgymError if a pool is asked for and Ray is not installed, or vLLM in this process without vLLM.
    (Evaluations need none.)"""
    section = config.engine
    if section.name == "pool" and (found := availability_of("lmgym[ray]")).runs == "no":
        raise LmgymError(f"engine.name: a pool needs Ray; {found.how}")
    if section.name == "vllm" and not section.address and (found := availability_of("vllm")).runs == "no":
        raise LmgymError(f"engine.name: vLLM is not installed; {found.how}")


def open_engine(
    config: Config, machine: Machine, policy: Policy, folder: Path, warn: Warn, ranks: Ranks = ALONE
) -> Engine:
    """The engine of a run. Raises LmgymError if a pool cannot be had or is too small for the `ranks`, and for vLLM
    servers that do not do what they should.

    Example: open_engine(config, machine, policy, Path("runs/a"), console.warn)
    """
    check_engine(config)
    match config.engine.name:
        case "pool":
            return _open_pool(config, machine, policy, warn, ranks)
        case "vllm":
            return _open_vllm(config, policy, folder, warn, ranks)
    return make_engine(config, policy, machine.unit)


def engine_sentence(config: Config, machine: Machine) -> str:
    """Where and how a run samples its answers.

    Example: "engine: 2 generators on this machine, 1 thread each, units of 64 answers"
    """
    section = config.engine
    unit = "a whole rollout" if machine.unit is None else f"units of {machine.unit} answers"
    ahead = ", one step ahead" if section.ahead else ""
    if section.name == "vllm":
        return f"engine: vLLM {f'at {section.address}' if section.address else 'in this process'}{ahead}"
    if section.name != "pool":
        return f"engine: sampler in this process, {unit}"
    workers, threads = section.workers or WORKERS, machine.generator_threads
    generators = "1 generator" if workers == 1 else f"{workers} generators"
    where = f"on Ray at {section.address}" if section.address else "on this machine"
    return f"engine: {generators} {where}, {threads} thread{'s' if threads != 1 else ''} each, {unit}{ahead}"


def _open_pool(config: Config, machine: Machine, policy: Policy, warn: Warn, ranks: Ranks) -> Engine:
    """Of several ranks each has its share of the generators."""
    section = config.engine
    workers = len(range(ranks.rank, section.workers or WORKERS, ranks.size))
    if not workers:
        raise LmgymError(f"engine.workers: each of the {ranks.size} ranks needs a generator of its own; write more")
    assert machine.unit is not None and machine.generator_threads is not None
    how = (section.rows, section.captured, section.seconds or WAIT, section.address, warn)
    generators = registry.get("engine", "pool")(policy, workers, machine.generator_threads, *how)
    return InUnits(policy, generators, machine.unit, section.rows)


def _open_vllm(config: Config, policy: Policy, folder: Path, warn: Warn, ranks: Ranks) -> Engine:
    """Says what vLLM cannot promise."""
    section = config.engine
    warn(
        "engine: vllm draws with random numbers of its own, so a second run with this seed differs, and a resumed run "
        "is not the uninterrupted one"
    )
    sampled = [stage.algorithm for stage in config.stages if stage.algorithm.requirements.answers == "policy"]
    if not all(algorithm.weighs_old for algorithm in sampled):
        warn("engine: no importance weight corrects for vLLM's rounding; grpo has correction: truncated")
    canary = section.gap_error or FAR * (LEAST if policy.compute == torch.float32 else MOST)
    vllm: Vllm
    if section.address:
        addresses = [one.strip() for one in section.address.split(",")]
        vllm = Servers(addresses, folder / "served", section.rows, section.seconds or WAIT, ranks)
    elif ranks.size > 1:
        raise LmgymError("engine.address: several ranks ask servers; give their addresses, or run without --ranks")
    else:
        vllm = VllmHere(section.rows, int((section.cache_gib or CACHE_GIB) * 2**30))
    engine: Engine = registry.get("engine", "vllm")(policy, vllm, section.rows, canary, ranks)
    if said := lost_updates(policy, vllm):
        warn(said)
    return engine


def lost_updates(policy: Policy, vllm: Vllm) -> str:
    """A warning where vLLM may hold merged adapters in bf16: most of what they have learned may be lost there, by less
    than the canary notices. Empty elsewhere."""
    remedy = vllm.instead_of_rounding(policy)
    if not remedy or not lora.has_adapter(policy.model):
        return ""
    return (
        "engine: vLLM gets the adapters merged into the weights; where it holds these in bf16, an update of less than "
        "0.2 % of a weight is rounded away, and it samples with less than the adapters have learned; "
        f"{remedy} (docs/engines.md)"
    )
