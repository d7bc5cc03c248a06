"""Rows that begin alike: each row alone, with shared prompts, and as a prefix tree (docs/models.md).

    python -m benchmarks.prefix_trees                                      the model of W1, 15 million parameters
    python -m benchmarks.prefix_trees --model FOLDER --length 0.3          a model of your own, shorter texts

One forward and backward pass over all answers of a few made-up sessions, in one process and in turn (A B C, A B C).
Prints, for each kind of session, tokens that go through the layers, FLOPs (also of the LM head, which reads each answer
in any case), median CPU seconds, and how far log-probabilities and gradients are from those of rows alone: the largest
difference as a share of the largest number, and the norm of the difference as a share of the norm.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lmgym.batch import Batch, collate
from lmgym.models import scoring
from lmgym.models.builtin import byte_tokenizer
from lmgym.models.fast_path import route_of
from lmgym.models.policy import Policy
from lmgym.types import Episode, Example, Turn

W1 = {"hidden_size": 288, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 768}
Path = list[int]


class Session:
    """Turns as the gateway makes them: a request that goes on from the newest answer stays in its row."""

    def __init__(self, random: np.random.Generator, length: float, vocabulary: int) -> None:
        self.random, self.length, self.vocabulary = random, length, vocabulary
        self.turns: list[Turn] = []
        self.row: Path = []

    def text(self, least: int, most: int) -> Path:
        """Random ids: between two numbers of tokens, times `length`."""
        count = max(1, int(self.length * self.random.integers(least, most + 1)))
        return [int(id) for id in self.random.integers(3, self.vocabulary, count)]

    def ask(self, prompt: Path) -> Path:
        """An answer to this prompt; returns both."""
        goes_on = bool(self.row) and prompt[: len(self.row)] == self.row
        answer = self.text(20, 60)
        self.turns.append(Turn(prompt[len(self.row) :] if goes_on else prompt, answer, restart=not goes_on))
        self.row = [*prompt, *answer]
        return self.row

    def said(self) -> Path:
        return self.text(40, 60)


def goes_on(session: Session, first: Path) -> None:
    for _ in range(6):
        first = [*session.ask(first), *session.said()]


def asks_again(session: Session, first: Path) -> None:
    """Four answers at each of three places; the third one is gone on with."""
    for _ in range(3):
        first = [*[session.ask(first) for _ in range(4)][2], *session.said()]


def two_agents(session: Session, first: Path) -> None:
    """A second conversation, asked once between two turns of the first."""
    second = session.said()
    for _ in range(5):
        first, second = [*session.ask(first), *session.said()], [*session.ask(second), *session.text(10, 15)]


def searches(session: Session, first: Path) -> None:
    """Two answers behind each of the first four places."""
    places = [first]
    for turn in range(8):
        places.append([*session.ask(places[turn // 2]), *session.said()])


def wanders(session: Session, first: Path) -> None:
    """Each turn goes on from any earlier place."""
    places = [first]
    for _ in range(8):
        places.append([*session.ask(places[session.random.integers(len(places))]), *session.said()])


def solved_examples(session: Session, first: Path) -> None:
    """Four answers to a question behind examples that all questions have."""
    question = [*first, *session.said()]
    for _ in range(4):
        session.ask(question)


def system_prompt(session: Session, first: Path) -> None:
    """The same behind a quarter of those tokens."""
    solved_examples(session, first[: len(first) // 4])


def plays(session: Session, first: Path) -> None:
    """Eight situations of a game behind its rules, an answer to each."""
    for _ in range(8):
        session.ask([*first, *session.text(8, 12)])


KINDS = {
    kind.__name__: kind
    for kind in (goes_on, asks_again, two_agents, searches, wanders, solved_examples, system_prompt, plays)
}
WAYS = ("rows alone", "shared prompts", "tree")


def batch_of(kind: Callable[[Session, Path], None], sessions: int, seed: int, length: float, vocabulary: int) -> Batch:
    random, episodes = np.random.default_rng(seed), []
    first = Session(random, length, vocabulary).text(120, 130)
    for index in range(sessions):
        session = Session(random, length, vocabulary)
        kind(session, first)
        episodes.append(Episode(Example("x", ""), 0, index, session.turns))
    return collate(episodes)


@contextmanager
def way_of(batch: Batch, way: str) -> Iterator[None]:
    """What the batch is computed by: prompts that are shared or not, trees or not."""
    prompts, trees = scoring._prompts, scoring._trees
    if way == "rows alone":
        rows = torch.arange(len(batch))
        scoring._prompts = lambda one: (rows, rows, prompts(one)[2])
    if way != "tree":
        scoring._trees = lambda *_: lambda *_: None
    try:
        yield
    finally:
        scoring._prompts, scoring._trees = prompts, trees


def one_pass(policy: Policy, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities, and the gradient of their weighted sum."""
    policy.model.zero_grad()
    logprobs = policy.compute_logprobs(batch).logprobs
    weight = torch.sin(torch.arange(logprobs.numel(), dtype=torch.float32)).reshape(logprobs.shape)
    (logprobs * weight).sum().backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]
    return logprobs.detach(), gradients


def measured(policy: Policy, batch: Batch, rounds: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {way: {"seconds": []} for way in WAYS}
    tokens: list[int] = []
    embeddings = policy.model.get_input_embeddings()
    counting = embeddings.register_forward_hook(lambda _, ids, out: tokens.append(ids[0].numel()))
    for way in WAYS:  # which warms up, too
        with way_of(batch, way), FlopCounterMode(display=False) as flops:
            found[way]["outputs"] = one_pass(policy, batch)
        found[way] |= {"tokens": tokens.pop(), "flops": flops.get_total_flops()}
    counting.remove()
    for _ in range(rounds):
        for way in WAYS:
            with way_of(batch, way):
                began = time.process_time()
                one_pass(policy, batch)
                found[way]["seconds"].append(time.process_time() - began)
    logprobs, gradients = found["rows alone"]["outputs"]
    size = float(torch.stack([one.square().sum() for one in gradients]).sum().sqrt())
    for way in WAYS:
        other, others = found[way].pop("outputs")
        gaps = torch.stack([(one - two).square().sum() for one, two in zip(gradients, others, strict=True)])
        found[way]["logprobs"] = float((other - logprobs).abs().max() / logprobs.abs().max())
        found[way]["gradient"] = float(gaps.sum().sqrt()) / size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder of a causal model (default: that of W1)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--sessions", type=int, default=4, help="with one first prompt (%(default)s)")
    parser.add_argument("--length", type=float, default=1.0, help="of all texts (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    if given.model is None:
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=32_000, tie_word_embeddings=True, **W1))
        policy = Policy(model, byte_tokenizer())
    else:
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
        policy = Policy(model, AutoTokenizer.from_pretrained(given.model))
        policy = policy.but(**vars(route_of(policy)))
    print("| session | way | rows | tokens | GFLOPs | CPU seconds | of rows alone: tokens | FLOPs | seconds | gaps |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in given.kinds:
        batch = batch_of(KINDS[name], given.sessions, given.seed, given.length, policy.vocabulary)
        found = measured(policy, batch, given.rounds)
        alone = found["rows alone"]
        for way, one in found.items():
            ratios = [mine / theirs for mine, theirs in zip(one["seconds"], alone["seconds"], strict=True)]
            print(
                f"| {name} | {way} | {len(batch)} | {one['tokens']} | {one['flops'] / 1e9:.1f} | "
                f"{statistics.median(one['seconds']):.2f} | {one['tokens'] / alone['tokens']:.2f} | "
                f"{one['flops'] / alone['flops']:.2f} | {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}) | {one['logprobs']:.0e}, {one['gradient']:.0e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
