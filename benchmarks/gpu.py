"""W5, where there is a GPU: a whole GRPO step at 0.5B (Qwen2.5's shape) and 1.2B (Llama 3.2's), random weights.

python -m benchmarks.gpu                                           both models; lmgym against TRL 1.16
python -m benchmarks.gpu --models qwen2.5-0.5b --only lmgym-bf16 --rounds 2
python -m benchmarks.gpu --plan report                             all that a first GPU must tell, in ten minutes
python -m benchmarks.gpu --device cpu --models tiny --prompts 2 --completions 2 --new-tokens 8       for trying

32 prompts of 512 tokens, 8 answers of exactly 512 new tokens each. Besides the table of seconds:

- decoding: new tokens per second of the whole rollout (prompts, texts and rewards included), and their share of what
  memory bandwidth allows: each step reads all weights once and each answer's cache so far, in bf16, at the rate that a
  large copy reaches between the contenders' turns
- update: MFU, the arithmetic that an update needs (below) per second, over that of a large bf16 product
- the same arithmetic counts for all: three times a forward pass in which each distinct prompt and each answer goes
  through the layers once and the head runs on the answers. What a library does beyond it, such as running a prompt 8
  times or a layer twice, lowers its MFU
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import environments, gpu_plan, reports, workloads
from benchmarks.interleave import Contender, Result, measure
from benchmarks.reports import row, rule

MODELS = {
    "qwen2.5-0.5b": workloads.QWEN25_HALF_B,
    "llama3.2-1b": workloads.LLAMA32_1B,
    "tiny": {**workloads.LLAMA_15M, "num_hidden_layers": 2},  # for trying
}
TRL_RELEASE = "1.16.0"
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "trl-1.16-autocast": {"precision": "autocast", "batch": 16},
    "trl-1.16-autocast-batch64": {"precision": "autocast", "batch": 64},
    "trl-1.16-bf16": {"precision": "bf16", "batch": 16},  # weights in bf16: no fp32 masters
    "trl-1.16-bf16-batch64": {"precision": "bf16", "batch": 64},
}
LMGYM_SETTINGS: dict[str, dict[str, Any]] = {
    "lmgym-bf16": {"compute": "bfloat16"},
    "lmgym-bf16-captured": {"compute": "bfloat16", "captured": True},
    "lmgym-bf16-captured-flex": {"compute": "bfloat16", "captured": True, "attention": "flex"},
}
IN_TABLES = [*LMGYM_SETTINGS, "trl-1.16-autocast", "trl-1.16-bf16"]
LIMITS = "hardware"


def main() -> None:
    arguments = parsed()
    if arguments.device == "cuda" and not gpu_here():
        print("benchmarks.gpu needs a CUDA GPU, and torch finds none here: nothing measured", file=sys.stderr)
        return
    if arguments.plan is not None:
        small = {"prompts": arguments.prompts, "completions": arguments.completions, "new-tokens": arguments.new_tokens}
        sizes = [word for name, size in small.items() if size is not None for word in (f"--{name}", str(size))]
        sys.exit(gpu_plan.run(arguments.plan, arguments.minutes, arguments.device, arguments.models, sizes))
    for name in arguments.models:
        workload = reports.sized(workloads.w5(arguments.seed, MODELS[name]), arguments)
        chosen = [contender(each, arguments) for each in (LIMITS, *arguments.only)]
        with tempfile.TemporaryDirectory() as folder:
            workloads.write(workload, Path(folder))
            limits, *results = measure(chosen, Path(folder), arguments.rounds, arguments.warmup, arguments.threads)
        title = f"GRPO step, W5, {name}, {arguments.device}"
        reports.report(title, results, arguments)
        print(f"\n{shares(workload, limits, results)}", flush=True)
        reports.save(title, [limits], arguments.out)


def parsed() -> argparse.Namespace:
    parser = reports.options(__doc__, [*LMGYM_SETTINGS, *TRL_SETTINGS])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS)[:2])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--plan", type=Path, metavar="FOLDER", help="run all that a first GPU must tell (gpu_plan.py)")
    parser.add_argument("--minutes", type=float, default=9.5, help="of the plan, altogether (%(default)s)")
    parser.add_argument(
        "--here", action="store_true", help="TRL as it is installed beside lmgym, not a release of ours"
    )
    arguments = parser.parse_args()
    arguments.only = arguments.only or IN_TABLES
    return arguments


def gpu_here() -> bool:
    import torch

    return torch.cuda.is_available()


def contender(name: str, arguments: argparse.Namespace) -> Contender:
    device = {"device": arguments.device}
    if name == LIMITS:
        small = {"copy_mib": 64, "size": 512, "repeats": 4} if arguments.device == "cpu" else {}
        return Contender(name, "hardware", settings={**device, **small})
    if name in LMGYM_SETTINGS:
        return Contender(name, "lmgym_step", settings={**LMGYM_SETTINGS[name], **device})
    python = Path(sys.executable) if arguments.here else environments.trl(arguments.venvs, TRL_RELEASE)
    return Contender(name, "trl_grpo", python, {**TRL_SETTINGS[name], **device})


def shares(workload: workloads.Workload, limits: Result, results: Sequence[Result]) -> str:
    """Each contender's speed as a share of what the hardware does, taken within a round."""
    read, needed = decoding_bytes(workload), update_flops(workload)
    bandwidth = [limits.about["copied_bytes"] / parts["copy"] for parts in limits.parts]
    products = [limits.about["flops"] / parts["product"] for parts in limits.parts]
    copied, multiplied = statistics.median(bandwidth) / 1e9, statistics.median(products) / 1e12
    measured = f"copy {copied:.4g} GB/s, product {multiplied:.3g} TFLOP/s"
    least = f"a rollout reads {read / 1e9:.4g} GB at least, an update needs {needed / 1e12:.3g} TFLOP"
    head = ["contender", "new tokens/s", "share of the bandwidth's limit", "update, TFLOP/s", "MFU"]
    lines = [f"{measured}; {least}\n", row(head), rule(len(head))]
    for result in results:
        rollouts, updates = ([parts[part] for parts in result.parts] for part in ("rollout", "update"))
        share = [read / (seconds * rate) for seconds, rate in zip(rollouts, bandwidth, strict=True)]
        mfu = [needed / (seconds * rate) for seconds, rate in zip(updates, products, strict=True)]
        speed = f"{workload.sampled / statistics.median(rollouts):,.0f}"
        rate = f"{needed / statistics.median(updates) / 1e12:.3g}"
        lines.append(row([result.name, speed, spread(share), rate, spread(mfu)]))
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1%} ({min(values):.1%} to {max(values):.1%})"


def layer_weights(shape: Any) -> int:
    """Weights of one layer's products; norms and biases are left out."""
    hidden, size = shape["hidden_size"], shape["hidden_size"] // shape["num_attention_heads"]
    keys = shape["num_key_value_heads"] * size
    return 2 * hidden * (hidden + keys) + 3 * hidden * shape["intermediate_size"]


def decoding_bytes(workload: workloads.Workload, width: int = 2) -> int:
    """Bytes that decoding has to read at `width` bytes a number: all weights, the head among them, at each step after
    the first (the prompt's own pass gives that token), and at each step every living answer's keys and values.

    Example: one answer of 2 tokens to a prompt of 3, one layer of width 4 (1 head, MLP of 8), vocabulary 10: the
    weights are 64 + 96 + 40, the cache 3 tokens of 2 * 4 numbers, so 224 numbers in the one step that decodes.
        >>> shape = dict(vocab_size=10, hidden_size=4, intermediate_size=8, num_hidden_layers=1)
        >>> shape |= dict(num_attention_heads=1, num_key_value_heads=1)
        >>> decoding_bytes(workloads.Workload("one", [[5, 6, 7]], 1, 2, 0, shape=shape))
        448
    """
    shape = workload.shape
    size = shape["hidden_size"] // shape["num_attention_heads"]
    a_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * size
    weights = shape["num_hidden_layers"] * layer_weights(shape) + shape["vocab_size"] * shape["hidden_size"]
    steps = max(workload.row_lengths) - 1
    cached = sum(
        len(prompt) * (length - 1) + (length - 1) * (length - 2) // 2
        for prompt, length in zip(workload.rows, workload.row_lengths, strict=True)
    )
    return width * (steps * weights + cached * a_token)


def update_flops(workload: workloads.Workload) -> int:
    """Operations of one optimizer step, forward and backward: 6 a weight and token, in the layers for each distinct
    prompt and each answer but for its last token, in the head for each new token; and 12 for each pair of tokens that
    attends and each number of a head.

    Example: the shapes of `decoding_bytes`: 4 tokens through 160 weights, 2 through the head's 40, 1 + 2 + 3 + 4 pairs.
        >>> shape = dict(vocab_size=10, hidden_size=4, intermediate_size=8, num_hidden_layers=1)
        >>> shape |= dict(num_attention_heads=1, num_key_value_heads=1)
        >>> update_flops(workloads.Workload("one", [[5, 6, 7]], 1, 2, 0, shape=shape))
        4800
    """
    shape, prompts = workload.shape, list(map(len, workload.prompts))
    own = [length - 1 for length in workload.row_lengths]
    tokens = sum(prompts) + sum(own)
    pairs = sum(prompt * (prompt + 1) // 2 for prompt in prompts)
    pairs += sum(len(row) * new + new * (new + 1) // 2 for row, new in zip(workload.rows, own, strict=True))
    layers = shape["num_hidden_layers"] * (6 * layer_weights(shape) * tokens + 12 * shape["hidden_size"] * pairs)
    return layers + 6 * shape["vocab_size"] * shape["hidden_size"] * workload.sampled


if __name__ == "__main__":
    main()
