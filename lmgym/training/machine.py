"""machine.json: threads, precision, path and layout, chosen once so that a resumed run computes the same."""

import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from lmgym.config.schema import Config
from lmgym.core.errors import LmgymError
from lmgym.distributed.ranks import Ranks
from lmgym.inference.kinds import EngineSection
from lmgym.models.device import choose_device
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.training.checkpoints import checkpoint

NAME = "machine.json"
MOST_THREADS = 4096
BUDGET = ("memory_gib", "tokens_per_forward", "activation_checkpointing", "rows")  # chosen together, or not at all
VERSIONS = ("python", "torch", "transformers", "platform", "commit")  # of each process its own
USUAL_THREADS, THREADS_PER_PROCESSOR = 64, 4  # how many are accepted on any machine, and on large ones


@dataclass(frozen=True, kw_only=True)
class Machine:
    """CPU threads and precision of a run, and what it ran with.
    Example: Machine(threads=2, compute="float32", python="3.11.7")"""

    threads: int
    unit: int | None = None
    """Answers of a unit of a rollout (`engine.unit`); None: the whole rollout."""
    generator_threads: int | None = None
    """CPU threads of each generator of a pool; None without a pool."""
    engine: str | None = None
    """An engine whose random numbers are its own ("vllm"); None for those that repeat."""
    compute: Any = None
    """Precision of the forward pass ("float32", "bfloat16"); None until the policy has been loaded."""
    path: Any = None
    """Path of the policy ("fast", "plain"); None until it has been loaded."""
    prepacked: bool | None = None
    """Whether a CPU samples with weights laid out beforehand (models/device.py); None until the policy is loaded."""
    kernels: Any = None
    """With which kernels a CPU samples ("torch", "native"); None until the policy has been loaded."""
    update_kernels: Any = None
    """The same of scoring and updates."""
    memory_gib: Any = None
    """The budget (`policy.memory_gib`) for which the next three were chosen; they are None without one."""
    tokens_per_forward: int | None = None
    activation_checkpointing: Any = None
    rows: int | None = None
    python: str | None = None
    torch: str | None = None
    transformers: str | None = None
    platform: str | None = None
    commit: str | None = None
    """Of lmgym's own repository, if it runs from one."""

    def policy_section(self, section: PolicySection) -> PolicySection:
        """The policy section with the precision and the path of this run in place of "auto"."""
        compute = self.compute if section.compute == "auto" else None
        path = self.path if section.path == "auto" else None
        section = replace(section, compute=compute or section.compute, path=path or section.path)
        for key in ("kernels", "update_kernels"):
            if getattr(section, key) == "auto" and self.compute is not None:  # a machine.json of before it: torch
                same = section.compute == self.compute and section.path == self.path
                chosen: dict[str, Any] = {key: (getattr(self, key) if same else None) or "torch"}
                section = replace(section, **chosen)
        if self.memory_gib is None:
            return section
        tokens, again = self.tokens_per_forward, self.activation_checkpointing
        return replace(section, tokens_per_forward=tokens, activation_checkpointing=again)

    def of_policy(self, policy: Policy) -> "Machine":
        """With what has been chosen while the policy was loaded."""
        kernels, update_kernels = ("native" if used else "torch" for used in (policy.native, policy.trains_native))
        return replace(
            self,
            compute=str(policy.compute).removeprefix("torch."),
            path="fast" if policy.fast else "plain",
            prepacked=policy.prepacked,
            kernels=kernels,
            update_kernels=update_kernels,
        )

    def engine_section(self, section: EngineSection) -> EngineSection:
        """The engine section with the rows that were chosen for a budget of memory."""
        return section if self.rows is None else replace(section, rows=self.rows)

    def write(self, folder: Path) -> None:
        """Write machine.json into a run folder."""
        checkpoint.write_text(folder / NAME, json.dumps(asdict(self), indent=1))


def choose_machine(config: Config, folder: Path | None) -> Machine:
    """The machine.json of a run folder, else a new choice; a recipe's `threads` wins. Raises LmgymError if it is
    damaged, and for more threads than make sense here: where the system allows no more, OpenMP ends the process."""
    machine = _found_or_new(config, folder)
    most = max(USUAL_THREADS, THREADS_PER_PROCESSOR * (os.cpu_count() or 1))
    if machine.threads > most:
        raise LmgymError(
            f"threads is {machine.threads}, and this machine has {os.cpu_count()} processors; write {most} at most"
        )
    return machine


def as_first(machine: Machine, ranks: Ranks) -> Machine:
    """The machine with all that the first rank has chosen. Of a new run each chooses by itself, "auto" by a stopwatch,
    and ranks that computed differently would add up gradients of different precisions."""
    first = json.loads(ranks.gather(json.dumps(asdict(machine)).encode())[0])
    return replace(machine, **{key: value for key, value in first.items() if key not in VERSIONS})


def check_ranks(section: PolicySection, ranks: int) -> None:
    """Raise LmgymError if so many ranks cannot train on the section's device: they meet by gloo or NCCL, and neither
    reaches an Apple GPU."""
    if ranks > 1 and choose_device(section.device).type == "mps":
        raise LmgymError("policy.device: several ranks cannot train on mps; write device: cpu, or leave --ranks out")


def check_gpus(section: PolicySection, ranks: Ranks) -> None:
    """Raise LmgymError if two ranks would train on one GPU, which NCCL refuses. All ranks must call it."""
    if ranks.size == 1 or choose_device(section.device).type != "cuda":
        return
    own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    gpus = len({*ranks.gather(own.encode())})
    if gpus < ranks.size:
        raise LmgymError(
            f"policy.device: {ranks.size} ranks have {gpus} GPU(s) together, and each needs one of its own; start "
            f"{gpus} rank(s), or write device: cpu"
        )


def _found_or_new(config: Config, folder: Path | None) -> Machine:
    """The machine of a run folder, or a new choice."""
    path = None if folder is None else folder / NAME
    if path is None or not path.is_file():
        return _with_units(config, _this_machine(config.threads or torch.get_num_threads()))
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name: found[field.name] for field in fields(Machine) if field.name in found}
        if not (type(found["threads"]) is int and 1 <= found["threads"] <= MOST_THREADS):
            raise ValueError(f"threads is {found['threads']!r:.60}")
        if found["compute"] not in (None, "float32", "bfloat16"):
            raise ValueError(f"compute is {found['compute']!r:.60}")
        if known.get("path") not in (None, "fast", "plain"):
            raise ValueError(f"path is {known['path']!r:.60}")
        for key in ("kernels", "update_kernels"):
            if known.get(key) not in (None, "torch", "native"):
                raise ValueError(f"{key} is {known[key]!r:.60}")
        if not isinstance(known.get("prepacked"), bool | None):
            raise ValueError(f"prepacked is {known['prepacked']!r:.60}")
        if not isinstance(known.get("activation_checkpointing"), bool | None):
            raise ValueError(f"activation_checkpointing is {known['activation_checkpointing']!r:.60}")
        if not isinstance(known.get("memory_gib"), int | float | None):
            raise ValueError(f"memory_gib is {known['memory_gib']!r:.60}")
        if len({known.get(name) is None for name in BUDGET}) > 1:
            raise ValueError(f"of {', '.join(BUDGET)} some are missing")
        for name in ("unit", "generator_threads", "tokens_per_forward", "rows"):
            if not (known.get(name) is None or (type(known[name]) is int and known[name] > 0)):
                raise ValueError(f"{name} is {known[name]!r:.60}")
        return _with_units(config, Machine(**{**known, "threads": config.threads or found["threads"]}))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LmgymError(f"{path} is damaged ({error}); put it back, or delete it to choose anew") from error


def _with_units(config: Config, machine: Machine) -> Machine:
    """With what the engine needs, where neither the recipe nor the run has chosen it yet."""
    section = config.engine
    steps = [(stage.prompts_per_step, stage.algorithm.group_size) for stage in config.stages]
    unit, threads = section.kind.usual_units(section, machine.threads, steps)
    unit, threads = section.unit or machine.unit or unit, section.threads or machine.generator_threads or threads
    return replace(machine, unit=unit, generator_threads=threads, engine=None if section.kind.seeded else section.name)


def _this_machine(threads: int) -> Machine:
    return Machine(
        threads=threads,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=importlib.metadata.version("transformers"),
        platform=platform.platform(),
        commit=own_source()[0],
    )


def own_source() -> tuple[str | None, str | None]:
    """The commit of lmgym's repository, and git's name for the contents of the package there; None where it is
    installed."""
    command = ["git", "-C", str(Path(__file__).parents[1]), "rev-parse", "HEAD", "HEAD:./"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):  # no git, or a repository that does not hold the package
        return None, None
    return found[0], found[1]
