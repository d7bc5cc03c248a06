"""Hugging Face's `generate` on a workload, one call per line of stdin: all answers of a step in one left-padded batch,
as TRL samples. No log-probabilities are asked for.

python -m benchmarks.contenders.hf_generate FOLDER '{"precision": "bf16"}'
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import workloads
from benchmarks.contenders.lengths import EndsAt
from benchmarks.contenders.turns import Turns

DEFAULTS = {"precision": "fp32", "device": "cpu", "threads": 2}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    turns, folder = Turns(), Path(sys.argv[1])
    settings = {**DEFAULTS, **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")}
    torch.set_num_threads(settings["threads"])
    workload, device = workloads.read(folder), settings["device"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    dtype = PRECISIONS[settings["precision"]]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype).to(device).eval()
    turns.ready(torch=torch.__version__, transformers=transformers.__version__, settings=settings)
    torch.manual_seed(workload.seed)
    while turns.wait():
        batch = tokenizer.pad({"input_ids": workload.rows}, return_tensors="pt").to(device)
        said = model.generate(
            **batch,
            max_new_tokens=workload.new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            logits_processor=[EndsAt(workload.row_lengths)],
        )
        answers = said[:, batch["input_ids"].shape[1] :].tolist()
        turns.mark("rollout")
        ended = [row[: row.index(workloads.EOS) + 1] for row in answers]
        workloads.check_lengths(workload, ended)
        turns.answer()


if __name__ == "__main__":
    main()
