"""vLLM on a workload, one call per line of stdin, in this process. Its prefix cache lets a group share its prompt; the
cache is emptied before each step, as new weights would empty it.

python -m benchmarks.contenders.vllm_rollout FOLDER '{"precision": "bf16"}'
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; W2, the largest, needs 0.5 in fp32
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
import vllm

from benchmarks import workloads
from benchmarks.contenders.turns import Turns

DEFAULTS = {
    "precision": "bf16",
    "logprobs": True,  # of the sampled tokens: RL needs them, and lmgym gives them
    "threads": 2,
}
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}


def main() -> None:
    turns, folder = Turns(), Path(sys.argv[1])
    settings = {**DEFAULTS, **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")}
    torch.set_num_threads(settings["threads"])
    workload = workloads.read(folder)
    engine = vllm.LLM(
        model=str(folder / "model"),
        dtype=PRECISIONS[settings["precision"]],
        enforce_eager=True,
        max_model_len=max(map(len, workload.prompts)) + workload.new_tokens + 1,
        max_num_seqs=len(workload.rows),
        enable_prefix_caching=True,
        seed=workload.seed,
        disable_log_stats=True,
    )
    prompts = [{"prompt_token_ids": row} for row in workload.rows]
    wanted = [
        vllm.SamplingParams(
            temperature=1.0,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if settings["logprobs"] else None,  # 0: the sampled token's alone
        )
        for length in workload.row_lengths
    ]
    turns.ready(vllm=vllm.__version__, torch=torch.__version__, settings=settings)
    while turns.wait():
        assert engine.reset_prefix_cache()
        said = engine.generate(prompts, wanted, use_tqdm=False)
        answers = [list(one.outputs[0].token_ids) for one in said]
        turns.mark("rollout")
        workloads.check_lengths(workload, answers)
        turns.answer()


if __name__ == "__main__":
    main()
