"""What lmgym promises, asked on a GPU: two runs with one seed are equal, a resumed run is the uninterrupted one, and
sampled tokens are scored tokens; with decoding as graphs and with flex attention too.

python -m benchmarks.gpu_exact                    a line each; status 1 if a promise is broken
python -m benchmarks.gpu_exact --device cpu --only machine repeat
"""

import argparse
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmgym.config.build import build_config
from lmgym.logs.console import Console
from lmgym.training.loop import train

STEPS, SAVED = 6, 4
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "graphs": {"engine": {"captured": True}},
    "flex": {"policy": {"attention": "flex"}},
    "graphs and flex": {"engine": {"captured": True}, "policy": {"attention": "flex"}},
}


def recipe(out: Path, device: str, compute: str, form: str) -> Any:
    """A small model on sums: six steps of GRPO, a checkpoint after four."""
    changes = FORMS[form]
    return build_config(
        {
            "out": str(out),
            "policy": {"model": "builtin:tiny", "device": device, "compute": compute, **changes.get("policy", {})},
            "engine": changes.get("engine", {}),
            "task": {"name": "arithmetic", "size": 256, "test_size": 16, "validation_size": 16},
            "rewards": {"length": {"unit": "characters", "target": 6}},
            "sampling": {"max_new_tokens": 24},
            "optimizer": {"learning_rate": 1e-3},
            "algorithm": {"name": "grpo", "group_size": 8},
            "evaluation": None,
            "checkpoint": {"every": SAVED, "keep": 9},
            "prompts_per_step": 8,
            "steps": STEPS,
        }
    )


def trained(folder: Path, device: str, compute: str, form: str) -> Path:
    return train(recipe(folder, device, compute, form), Console(quiet=True))


def weights(run: Path) -> str:
    """The hash of a run's last weights."""
    newest = max((run / "checkpoints").iterdir(), key=lambda path: path.name)
    return hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()


def machine(folder: Path, device: str) -> list[str]:
    """What is here."""
    import torch
    import transformers

    said = [f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"]
    if device != "cuda":
        return said
    properties = torch.cuda.get_device_properties(0)
    memory = f"{properties.total_memory / 2**30:.1f} GiB, bf16 {torch.cuda.is_bf16_supported()}"
    said.append(
        f"{properties.name}, CUDA {torch.version.cuda}, capability {torch.cuda.get_device_capability()}, {memory}"
    )
    if tool := shutil.which("nvidia-smi"):
        said += subprocess.run([tool], capture_output=True, text=True, check=False).stdout.splitlines()
    return said


def repeat(folder: Path, device: str) -> list[str]:
    """Two runs, and one that stopped after four steps and went on."""
    said = []
    for compute in ("float32", "bfloat16"):
        for form in FORMS:
            here = folder / compute / form.replace(" ", "_")
            first, second = (trained(here / name, device, compute, form) for name in ("first", "second"))
            shutil.copytree(first, here / "resumed")
            for newer in (here / "resumed" / "checkpoints").iterdir():
                if not newer.name.endswith(f"{SAVED:06}"):
                    shutil.rmtree(newer)
            resumed = trained(here / "resumed", device, compute, form)
            equal = {"repeated": weights(first) == weights(second), "resumed": weights(first) == weights(resumed)}
            ends = ", ".join(f"{name} {'bit for bit' if yes else 'NOT EQUAL'}" for name, yes in equal.items())
            said.append(f"{compute}, {form}: {ends}; largest gap of a step {gap(first):.2g} nats a token")
    return said


def gap(run: Path) -> float:
    """The largest mean difference of a step between sampled and scored log-probabilities."""
    records = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return max(record.get("sampler_logprob_gap", 0.0) for record in records)


PARTS: dict[str, Callable[[Path, str], list[str]]] = {"machine": machine, "repeat": repeat}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    given = parser.parse_args()
    broken = False
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only:
            for line in PARTS[name](Path(folder), given.device):
                broken |= "NOT EQUAL" in line
                print(line, flush=True)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
