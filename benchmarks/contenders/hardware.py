"""What a device can do, as a contender of its own, so that it is measured between the others: one copy of a large
tensor, and one product of two matrices.

python -m benchmarks.contenders.hardware FOLDER '{"device": "cuda"}'
"""

import json
import sys

import torch

from benchmarks.contenders.turns import Turns

DEFAULTS = {"device": "cpu", "dtype": "bfloat16", "copy_mib": 4096, "size": 8192, "repeats": 20, "threads": 2}


def main() -> None:
    turns = Turns()
    settings = {**DEFAULTS, **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")}
    torch.set_num_threads(settings["threads"])
    device, dtype, repeats = settings["device"], getattr(torch, settings["dtype"]), settings["repeats"]
    source = torch.zeros(settings["copy_mib"] * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size = settings["size"]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    turns.ready(
        torch=torch.__version__,
        settings=settings,
        copied_bytes=2 * repeats * source.numel(),  # each byte is read and written
        flops=2 * repeats * size**3,
        device_name=torch.cuda.get_device_name() if device == "cuda" else device,
    )
    while turns.wait():
        for _ in range(repeats):
            target.copy_(source)
        turns.mark("copy")
        for _ in range(repeats):
            torch.mm(left, right, out=product)
        turns.mark("product")
        turns.answer()


if __name__ == "__main__":
    main()
