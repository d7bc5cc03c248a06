"""Drafts from a group's own answers: how many tokens they would save a rollout, and what their verification costs.

    python -m benchmarks.drafts first_model --model FOLDER --set sampling.max_new_tokens=96

A draft follows the last n tokens of an answer as they went on elsewhere: in the prompt, in the answers of the group so
far, and (`epochs`) in other answers to the prompt, of as many earlier epochs. All answers of a step advance together by
passes of 1 + k tokens each; a drafted token counts if it is the token that was sampled there, which is what an exact
sampler would keep. Earlier epochs are sampled from the same weights, so they fit better than those of a run.
`oracle` drafts the model's own likeliest token: a bound for one token, if the random numbers are not known.

Passes are timed (processor seconds) with prompts of 60 tokens, 8 answers each: layers, LM head and draw of each token.
Prints tokens an answer gets from a pass, the passes of a step as a share of its plain ones, and how many times as fast
decoding would be: with drafts of one fixed length, and (packed) if an answer without a draft cost one token alone.
"""

import argparse
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lmgym.batch import collate
from lmgym.config.build import load_config
from lmgym.core import seeds
from lmgym.functional.sampling import draw
from lmgym.inference.base import Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.attention.cached_rows import CachedRows, PrefilledRows
from lmgym.models.attention.kv_cache import KeyValueCache, SharedPrompts
from lmgym.models.attention.rules import Asked
from lmgym.models.kernels import onednn_linear
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.text.chat import prompt_ids
from lmgym.training.setup import training_examples
from lmgym.types import Episode, Example, Turn

SIZE = 8  # of a group
PROMPT = 60  # tokens of a prompt, where passes are timed
ROWS, WIDTHS = (8, 32, 64), (1, 2, 3, 5, 9)  # answers and tokens of a timed pass


@dataclass
class Group:
    """The answers to one prompt of one step, and those of earlier epochs."""

    prompt: list[int]
    answers: list[list[int]]
    earlier: list[list[int]]
    likeliest: list[list[int]] = field(default_factory=list)


def asked_of(policy: Policy, recipe: str, settings: list[str], prompts: int) -> tuple[list[list[int]], Sampling]:
    """The first prompts of a recipe, and how it samples."""
    config = load_config(recipe, settings)
    stage = config.stages[-1]
    examples = training_examples(config, stage)[:prompts]
    return [prompt_ids(policy.tokenizer, example.prompt) for example in examples], stage.sampling


@torch.no_grad()
def sampled_groups(policy: Policy, recipe: str, settings: list[str], prompts: int, epochs: int) -> list[Group]:
    """The first prompts of a recipe, each with a group of answers, and with as many more as `epochs` have seen."""
    asked, sampling = asked_of(policy, recipe, settings, prompts)
    requests = [
        Request(tuple(ids), seeds.key("drafts", epoch, at, index))
        for epoch in range(epochs + 1)
        for at, ids in enumerate(asked)
        for index in range(SIZE)
    ]
    answers = [one.ids for one in Sampler(policy).generate(requests, sampling)]
    found = []
    for at, prompt in enumerate(asked):
        of_epochs = [answers[start : start + SIZE] for start in range(at * SIZE, len(answers), len(asked) * SIZE)]
        found.append(Group(prompt, of_epochs[0], [answer for others in of_epochs[1:] for answer in others]))
    return found


class Continuations:
    """What has followed each n tokens, counted.

    Example: table = Continuations(1); table.add([5, 6, 7, 5, 6], 1); table.draft([5], 2) -> [6, 7]"""

    def __init__(self, n: int) -> None:
        self.n = n
        self.counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def add(self, tokens: Sequence[int], start: int) -> None:
        """Count the tokens from `start` on, after the n before each."""
        for at in range(max(start, self.n), len(tokens)):
            self.counts[tuple(tokens[at - self.n : at])][tokens[at]] += 1

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to so many tokens, each the most frequent one after the n before it."""
        drafted = list(tokens[-self.n :])
        while len(drafted) < self.n + most and (found := self.counts.get(tuple(drafted[-self.n :]))):
            drafted.append(found.most_common(1)[0][0])
        return drafted[self.n :]


def passes_of(group: Group, source: str, n: int, most: int) -> Iterator[list[tuple[int, int]]]:
    """(drafted tokens, new tokens) of each unfinished answer, pass after pass."""
    table = Continuations(n)
    table.add(group.prompt, 0)
    for answer in group.earlier if source == "epochs" else []:
        table.add([*group.prompt, *answer], len(group.prompt))
    done = [0] * len(group.answers)
    while unfinished := [i for i, answer in enumerate(group.answers) if done[i] < len(answer)]:
        found, before = [], list(done)
        for i in unfinished:
            answer, at = group.answers[i], done[i]
            if source == "oracle":
                drafted = group.likeliest[i][at : at + most]
            else:
                drafted = table.draft([*group.prompt, *answer[:at]], most)
            # A token is kept while all before it were right; behind the last kept one, one token is drawn anyway.
            right = next((j for j, token in enumerate(drafted) if token != [*answer, -1][at + j]), len(drafted))
            done[i] = min(at + right + 1, len(answer))
            found.append((len(drafted), done[i] - at))
        yield found
        for i in unfinished:
            table.add([*group.prompt, *group.answers[i][: done[i]]], len(group.prompt) + before[i])


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass by answers and tokens of each; between measured numbers of answers on a straight line."""

    seconds: Mapping[tuple[int, int], float]

    def of(self, answers: int, width: int) -> float:
        """With so many tokens for each answer."""
        return float(np.interp(answers, ROWS, [self._at(rows, width) for rows in ROWS]))

    def packed(self, tokens: int) -> float:
        """By tokens alone, whichever answers they belong to."""
        by_tokens: dict[int, list[float]] = defaultdict(list)
        for (rows, width), seconds in self.seconds.items():
            by_tokens[rows * width].append(seconds)
        return float(
            np.interp(tokens, sorted(by_tokens), [statistics.mean(by_tokens[one]) for one in sorted(by_tokens)])
        )

    def _at(self, rows: int, width: int) -> float:
        return float(np.interp(width, WIDTHS, [self.seconds[rows, one] for one in WIDTHS]))


def table_row(groups: Sequence[Group], source: str, n: int, most: int, costs: Costs) -> str:
    """One row of the table: a step of these groups, with drafts of up to `most` tokens."""
    rounds: list[list[tuple[int, int]]] = []
    for group in groups:
        for at, found in enumerate(passes_of(group, source, n, most)):
            rounds += [[]] * (at == len(rounds))
            rounds[at] = rounds[at] + found
    lengths = [len(answer) for group in groups for answer in group.answers]
    unfinished = [sum(length > at for length in lengths) for at in range(max(lengths))]
    plain, alone = sum(costs.of(rows, 1) for rows in unfinished), sum(map(costs.packed, unfinished))
    fixed = sum(costs.of(len(found), 1 + most) for found in rounds)
    packed = sum(costs.packed(sum(1 + drafted for drafted, _ in found)) for found in rounds)
    shares = (sum(lengths) / sum(map(len, rounds)), len(rounds) / max(lengths), plain / fixed, alone / packed)
    return f"| {source} | {n or ''} | {most} | {' | '.join(f'{share:.2f}' for share in shares)} |"


class DraftedRows(CachedRows):
    """M new tokens for each cached sequence, of which each attends to those before it: CachedRows for drafts."""

    def __init__(self, cache: KeyValueCache, lengths: Tensor, tokens: int) -> None:
        super().__init__(cache, lengths, int(lengths.max()) + tokens)
        self.places = lengths[:, None] + torch.arange(tokens)  # [S M]
        self.positions = self.places if cache.prompts is None else self.places + cache.prompts.before[:, None]
        after = torch.arange(self.width) > self.places[:, :, None]
        self.later = torch.zeros(after.shape).masked_fill_(after, float("-inf"))[:, None, None]  # [S 1 1 M W]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        self.cache.allocate(layer, key, value)
        (slots, heads, tokens, size), prompts = query.shape, self.cache.prompts
        for cached, new in ((self.cache.keys[layer], key), (self.cache.values[layer], value)):
            rows = torch.arange(slots * key.shape[1]).view(slots, -1, 1)
            index = (rows * cached.shape[2] + self.places[:, None]).flatten()
            cached.view(-1, size).index_copy_(0, index, new.reshape(-1, size).to(cached.dtype))
        rows_of_cache = slots * key.shape[1]
        keys = self.cache.keys[layer].flatten(0, 1)[:rows_of_cache, : self.width]
        values = self.cache.values[layer].flatten(0, 1)[:rows_of_cache, : self.width]
        grouped = query.reshape(rows_of_cache, -1, size).to(keys.dtype) * asked.scale_of(size)
        scores = torch.bmm(grouped, keys.transpose(1, 2))
        scores.view(slots, key.shape[1], -1, tokens, self.width).add_(self.later)
        assert prompts is not None
        shares = torch.cat([prompts.scores(layer, grouped), scores], -1).softmax(-1)
        prompt_shares, slot_shares = shares.split([prompts.width, self.width], -1)
        out = torch.baddbmm(prompts.weighted_values(layer, prompt_shares), slot_shares, values)
        return out.to(query.dtype).view(slots, heads, tokens, size).transpose(1, 2)


@torch.no_grad()
def measured_costs(policy: Policy, depth: int, repeats: int, widths: Sequence[int] = WIDTHS) -> Costs:
    """Seconds of each pass: medians, all sizes by turns."""
    onednn_linear.lay_out(policy.model)
    caches = {rows: _cache(policy, rows, depth + max(widths)) for rows in ROWS}
    times: dict[tuple[int, int], list[float]] = {(rows, width): [] for rows in ROWS for width in widths}
    for repeat in range(repeats + 1):
        for (rows, width), own in times.items():
            # Answers that drafts have carried on differ in length; plain ones are in step.
            lengths = torch.full((rows,), depth) - (torch.arange(rows) % 3 if width > 1 else 0)
            ids, uniform = torch.randint(3, policy.vocabulary, (rows, width)), torch.rand(rows * width)
            began = time.process_time()
            cached = DraftedRows(caches[rows], lengths, width) if width > 1 else None
            layout = cached or CachedRows(caches[rows], lengths, depth + 1)
            hidden = policy.forward_hidden(ids, layout.positions.view(rows, width), layout)
            draw(policy.head(hidden.flatten(0, 1), narrow=True), 1.0, uniform)
            own += [time.process_time() - began] * (repeat > 0)
    return Costs({size: statistics.median(own) for size, own in times.items()})


def _cache(policy: Policy, rows: int, capacity: int) -> KeyValueCache:
    """A cache of so many answers, to prompts of a group each."""
    prompts = SharedPrompts(rows // SIZE, rows, PROMPT, policy.device)
    ids = [tuple(torch.randint(3, policy.vocabulary, (PROMPT,)).tolist()) for _ in range(rows // SIZE)]
    source, target = prompts.assign([(one, range(SIZE * at, SIZE * at + SIZE)) for at, one in enumerate(ids)], [])
    layout = PrefilledRows([PROMPT] * len(ids), prompts.cache, source, target)
    policy.forward_hidden(torch.tensor([sum(ids, ())]), layout.positions[None], layout)
    return KeyValueCache(rows, capacity, prompts)


@torch.no_grad()
def find_likeliest(policy: Policy, groups: Sequence[Group]) -> None:
    """Fill in the model's likeliest token at each place of the answers."""
    for group in groups:
        turns = [Turn(group.prompt, answer) for answer in group.answers]
        batch = collate([Episode(Example("x", ""), 0, at, [turn]) for at, turn in enumerate(turns)])
        row, column = batch.actions.nonzero(as_tuple=True)
        with policy.precision():
            best = policy.head(policy.states(batch, row, column - 1).hidden).argmax(-1)
        group.likeliest = [best[row == at].tolist() for at in range(len(turns))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a file or a packaged recipe: its prompts and sampling")
    parser.add_argument("--model", required=True, help="as policy.model")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more of the recipe")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2, help="earlier ones (%(default)s)")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4, 8], help="of a draft (%(default)s)")
    parser.add_argument("--depth", type=int, default=24, help="tokens of the answers in a timed pass (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    policy = load_policy(PolicySection(model=given.model, compute="bfloat16", device="cpu"))
    groups = sampled_groups(policy, given.recipe, given.set, given.prompts, given.epochs)
    lengths = sorted(len(answer) for group in groups for answer in group.answers)
    print(f"{len(lengths)} answers of {lengths[0]} to {lengths[-1]} tokens, mean {statistics.mean(lengths):.1f}")
    find_likeliest(policy, groups)
    costs = measured_costs(Sampler(policy)._copy or policy, given.depth, given.repeats)
    print("\n| answers | " + " | ".join(f"{width} tokens" for width in WIDTHS) + " |\n" + "|---" * 6 + "|")
    for rows in ROWS:
        times = [1000 * costs.seconds[rows, width] for width in WIDTHS]
        cells = [f"{times[0]:.1f} ms", *(f"{one:.1f} ({one / times[0]:.2f})" for one in times[1:])]
        print(f"| {rows} | {' | '.join(cells)} |", flush=True)
    print("\n| source | n | tokens drafted | tokens a pass | passes | times as fast | packed |\n" + "|---" * 7 + "|")
    for source in ("group", "epochs", "oracle"):
        for n in given.n if source != "oracle" else [0]:
            for most in given.lengths:
                print(table_row(groups, source, n, most, costs), flush=True)


if __name__ == "__main__":
    main()
