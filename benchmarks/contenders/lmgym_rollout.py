"""lmgym's sampler alone on a workload, one call per line of stdin: what a step's rollout is without texts and rewards.
The log-probabilities of the sampled tokens come with it.

python -m benchmarks.contenders.lmgym_rollout FOLDER '{"compute": "bfloat16"}'
"""

import json
import sys
from pathlib import Path

import torch
import transformers

import lmgym
from benchmarks import workloads
from benchmarks.contenders.lengths import limit_lmgym
from benchmarks.contenders.turns import Turns
from lmgym.core import seeds
from lmgym.inference.base import Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.device import prepare_process
from lmgym.models.load import load_policy
from lmgym.models.policy_section import PolicySection

DEFAULTS = {"compute": "auto", "device": "cpu", "products": "torch", "kernels": "auto", "threads": 2}


def main() -> None:
    turns, folder = Turns(), Path(sys.argv[1])
    settings = {**DEFAULTS, **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")}
    prepare_process(settings["threads"])  # as each run of lmgym does
    workload = workloads.read(folder)
    if workload.lengths:
        limit_lmgym(workload.lengths)
    chosen = {key: settings[key] for key in ("compute", "device", "products", "kernels")}
    section = PolicySection(model=str(folder / "model"), **chosen)
    policy = load_policy(section)
    engine = Sampler(policy)
    sampling = Sampling(max_new_tokens=workload.new_tokens, min_new_tokens=workload.new_tokens)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    turns.ready(lmgym=lmgym.__version__, **versions, settings={**settings, "compute": str(policy.compute)})
    step = 0
    while turns.wait():
        requests = [Request(tuple(row), seeds.key(step, place)) for place, row in enumerate(workload.rows)]
        answers = engine.generate(requests, sampling)
        turns.mark("rollout")
        workloads.check_lengths(workload, [answer.ids for answer in answers])
        turns.answer()
        step += 1


if __name__ == "__main__":
    main()
