"""Simulated, not measured: what a synchronous GRPO step of the replicated form costs on 8 to 1,000 GPUs.

    python -m benchmarks.simulated_scale --gpus 8 64 256 1000

Two kinds of numbers go in. Measured here, when it starts: the processor time of turning episodes to bytes and back and
of collating them, by token, and the memory of a batch's cell. Assumed, and printed: how fast a GPU decodes and trains,
the network, and the lengths of answers (drawn from a log-normal distribution with a limit). Each GPU gets the same
number of answers whatever the number of GPUs. Nothing of it has run on a GPU.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np

from lmgym.batch import collate
from lmgym.types import Episode, Example, Turn

T = TypeVar("T")
SAMPLE = (32, 1000)  # episodes and tokens of each, on which text work is timed
COLUMNS = 2  # float32 columns of a prepared batch besides collate's own: logprobs_old, advantages


@dataclass(frozen=True)
class Assumed:
    """What no machine here can measure."""

    answers: int = 64  # of a GPU in each step, decoded side by side
    median: float = 2000.0  # tokens of an answer
    spread: float = 1.0  # standard deviation of the logarithm of the length
    longest: int = 16_000  # max_new_tokens
    decoding: float = 45.0  # tokens a second of one answer among its neighbours
    training: float = 20_000.0  # tokens a second of a GPU, forward and backward
    parameters: float = 1.5e9
    network: float = 25e9  # bytes a second of a GPU


@dataclass(frozen=True)
class Measured:
    """Seconds of this processor by token, and bytes."""

    to_bytes: float
    from_bytes: float
    collating: float
    bytes_of_token: float
    bytes_of_cell: float


def measure() -> Measured:
    """Time the text work on made-up episodes."""
    count, length = SAMPLE
    draw = np.random.default_rng(0)
    episodes = [
        Episode(
            Example(str(index), "?"),
            index,
            index,
            [Turn([5], draw.integers(0, 150_000, length).tolist(), (-draw.random(length)).tolist(), "word " * length)],
        )
        for index in range(count)
    ]
    tokens = count * length
    sent, to_bytes = timed(lambda: json.dumps([episode.to_json() for episode in episodes]).encode())
    back, from_bytes = timed(lambda: [Episode.from_json(tree) for tree in json.loads(sent)])
    batch, collating = timed(lambda: collate(back))
    held = [getattr(batch, field.name) for field in fields(batch)]
    cells = sum(each.element_size() for each in held if getattr(each, "shape", None) == batch.tokens.shape)
    each = (seconds / tokens for seconds in (to_bytes, from_bytes, collating))
    return Measured(*each, bytes_of_token=len(sent) / tokens, bytes_of_cell=cells + 4 * COLUMNS)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result, and the best of three times in seconds."""
    seconds = []
    for _ in range(3):
        began = time.process_time()
        result = work()
        seconds.append(time.process_time() - began)
    return result, min(seconds)


def step(gpus: int, assumed: Assumed, measured: Measured, seed: int = 0) -> dict[str, float]:
    """Seconds of a step by part, the share of decoding that is waiting, and GiB of the batch on each rank."""
    draw = np.random.default_rng(seed)
    lengths = draw.lognormal(np.log(assumed.median), assumed.spread, (gpus, assumed.answers))
    lengths = np.minimum(lengths, assumed.longest)
    tokens = float(lengths.sum())
    decoding = float(lengths.max()) / assumed.decoding  # all wait for the longest answer of any rank
    own = lengths.max(1) / assumed.decoding
    exchange = measured.to_bytes * tokens / gpus + measured.from_bytes * tokens
    exchange += measured.bytes_of_token * tokens / assumed.network
    collating = measured.collating * tokens
    training = tokens / gpus / assumed.training + 2 * 4 * assumed.parameters / assumed.network
    whole = decoding + exchange + collating + training
    return {
        "longest answer": decoding,
        "exchange of episodes": exchange,
        "collate": collating,
        "training": training,
        "step": whole,
        "step, decoding one step ahead": max(decoding, exchange + collating + training),
        "waiting": 1 - float(own.mean()) / decoding,
        "batch, GiB": gpus * assumed.answers * float(lengths.max()) * measured.bytes_of_cell / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 256, 1000])
    for field in fields(Assumed):
        parser.add_argument(f"--{field.name}", type=float, default=field.default, help="assumed (%(default)s)")
    given = vars(parser.parse_args())
    assumed = Assumed(**{field.name: type(field.default)(given[field.name]) for field in fields(Assumed)})
    measured = measure()
    print(f"assumed: {assumed}\nmeasured: {measured}\n")
    columns = [step(gpus, assumed, measured) for gpus in given["gpus"]]
    print("| simulated, seconds | " + " | ".join(f"{gpus:,} GPUs" for gpus in given["gpus"]) + " |")
    print("|---|" + "---|" * len(columns))
    for name in columns[0]:
        form = "{:.0%}" if name == "waiting" else "{:.1f}"
        print(f"| {name} | " + " | ".join(form.format(column[name]) for column in columns) + " |")


if __name__ == "__main__":
    main()
