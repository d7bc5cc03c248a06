"""What of the weights changes in a step, and whether a difference is worth sending instead of the whole.

    python -m benchmarks.weight_differences --model models/smollm2-135m-instruct

Takes steps of AdamW on a few texts from fp32 masters. What generators get is the masters (policy.compute: float32), or
their copies in bf16, rounded to nearest or stochastically (policy.rounding). The difference is a bit for each number
that changed and the exclusive or of its old and new bits, byte by byte, through zlib, with a CRC of the new whole;
it is applied and compared bit for bit. Beside it stands what a push through Ray's object store on one machine does: two
copies of the whole in memory. Looked at is every third tensor. Prints a Markdown table, on one thread.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmgym.inference.pool.differences import applied, difference
from lmgym.models.rounding import RoundedWeights

Whole = np.ndarray  # all weights as unsigned integers
EVERY = 3  # tensors; all of them and their differences would take 5 GiB for a model of 135M
TEXTS = (
    "The train leaves at nine in the morning and arrives in the harbour town a little before noon.",
    "A farmer has 17 sheep and buys 25 more at the market; how many sheep does he have now? He has 42.",
    "Write a function that returns the largest number of a list, or nothing if the list is empty.",
    "Water boils at a lower temperature on a mountain, because the pressure of the air is lower there.",
)


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and the seconds that this thread had a processor."""
    began = time.thread_time()
    found = act()
    return found, time.thread_time() - began


def forms(model: torch.nn.Module, rounded: RoundedWeights) -> dict[str, Whole]:
    """The weights as integers of their bits, by what is pushed."""
    some = list(model.parameters())[::EVERY]
    masters, copies = [one.detach() for one in some], [rounded.copies[one] for one in some]

    def bits(tensors: list[torch.Tensor], kind: torch.dtype, unsigned: type) -> Whole:
        return np.concatenate([one.reshape(-1).view(kind).numpy().view(unsigned) for one in tensors])

    return {
        "bf16, to nearest": bits([one.bfloat16() for one in masters], torch.int16, np.uint16),
        "bf16, stochastic": bits(copies, torch.int16, np.uint16),
        "fp32": bits(masters, torch.int32, np.uint32),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10], help="steps after which to look (%(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| rate | step | pushed | MB | numbers changed | bytes | sent, MB | make, s | apply, s | two copies, s |"
        "\n|---|---|---|---|---|---|---|---|---|---|"
    )
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    for rate in given.rates:
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
        rounded = RoundedWeights(model, seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, foreach=False)
        for step in range(1, max(given.steps) + 1):
            before = forms(model, rounded) if step in given.steps else {}
            ids = torch.tensor([tokenizer(TEXTS[step % len(TEXTS)]).input_ids])
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rounded.updates += 1
            if not before:
                continue
            for name, new in forms(model, rounded).items():
                old = before.pop(name)
                numbers = float((old != new).mean())
                octets = float((old.view(np.uint8) != new.view(np.uint8)).mean())
                sent, make = timed(lambda old=old, new=new: difference(old, new))
                again, apply = timed(lambda old=old, sent=sent: applied(old, sent))
                assert np.array_equal(again, new)
                _, whole = timed(lambda new=new: new.copy().copy())
                print(
                    f"| {rate:g} | {step} | {name} | {new.nbytes / 1e6:.0f} | {numbers:.4f} | {octets:.4f} | "
                    f"{len(sent) / 1e6:.1f} | {make:.2f} | {apply:.2f} | {whole:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
