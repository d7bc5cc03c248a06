"""Engines against one process: seconds of a rollout with the push of the weights before it, interleaved.

python -m benchmarks.pool                                  W1 in fp32: one process, its units, a pool of 1 and of 2
python -m benchmarks.pool --vllm venv/bin/python           and a vLLM server; the Python is one that has vLLM
python -m benchmarks.pool --workload w2 --rounds 3 --unit 16
"""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import ray
import torch

from benchmarks import workloads
from benchmarks.vllm_server import served
from lmgym.core import seeds
from lmgym.inference.base import Engine, Request, Sampling
from lmgym.inference.pool.pool import Here, InUnits
from lmgym.inference.pool.ray_generators import RayGenerators
from lmgym.inference.sampler import Sampler
from lmgym.inference.vllm.engine import VLLM
from lmgym.inference.vllm.servers import Servers
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection


def main() -> None:
    given = parsed()
    torch.set_num_threads(1)  # of each process
    workload = workloads.BY_NAME[given.workload](given.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workloads.write(workload, folder)
        policy = load_policy(PolicySection(model=f"{folder}/model", compute="float32", device="cpu"))
        servers: dict[str, Engine] = {}
        if given.vllm:
            more = ("--max-num-seqs", len(workload.rows), "--skip-tokenizer-init")
            address, _ = stack.enter_context(served(given.vllm, folder / "model", folder / "log.txt", *more))
            servers = {"vLLM server": VLLM(policy, Servers([address], folder / "served"))}
        compare(given, workload, policy, servers)


def compare(
    given: argparse.Namespace, workload: workloads.Workload, policy: Policy, servers: dict[str, Engine]
) -> None:
    """Time all engines by turns, and print a line of each."""
    unit = given.unit or -(-len(workload.rows) // 4)
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    engines = {
        "one process": Sampler(policy),
        f"one process, units of {unit}": InUnits(policy, Here(Sampler(policy)), unit),
        "pool of 1": InUnits(policy, RayGenerators(policy, workers=1), unit),
        "pool of 2": InUnits(policy, RayGenerators(policy, workers=2), unit),
        **servers,
    }
    sampling = Sampling(max_new_tokens=workload.new_tokens, min_new_tokens=workload.new_tokens)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(given.rounds + 1):
        requests = [Request(tuple(row), seeds.key(turn, place)) for place, row in enumerate(workload.rows)]
        answers = {}
        for name, engine in engines.items():
            elapsed, answers[name] = timed(engine, policy, turn, requests, sampling)
            seconds[name] += [elapsed] if turn else []  # the first round starts the processes
        _, own, *pools = (answers[name] for name in engines if name not in servers)
        assert all(pool == own for pool in pools), "the bits of a pool are those of one process with the same units"
    print(f"{workload.name}, fp32, {given.rounds} rounds, a thread for each process; median (least to most)")
    base = list(seconds.values())[1]
    for name, own in seconds.items():
        ratios = statistics.median(one / other for one, other in zip(own, base, strict=True))
        spread = f"{statistics.median(own):6.2f} s ({min(own):.2f} to {max(own):.2f})"
        print(f"{name:30} {spread}, {ratios:.2f} of the units")
    for engine in engines.values():
        engine.close()


def timed(
    engine: Engine, policy: Policy, version: int, requests: list[Request], sampling: Sampling
) -> tuple[float, list]:
    """Seconds of a push of weights and a rollout, and the answers."""
    began = time.perf_counter()
    engine.load(policy, version)
    answers = engine.generate(requests, sampling)
    return time.perf_counter() - began, answers


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workload", choices=["w1", "w2", "w3"], default="w1")
    parser.add_argument("--vllm", type=Path, help="a Python that has vLLM; without it there is no server")
    parser.add_argument("--unit", type=int, help="answers of a unit (default: a quarter of the rollout)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
