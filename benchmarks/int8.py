"""Sampling with int8 products: what they would save a decoding step, and how far they are from the policy.

    python -m benchmarks.int8 --model FOLDER                      seconds of products, and of a whole step
    python -m benchmarks.int8 --model FOLDER --recipe RECIPE      log-probabilities, on the prompts of a recipe

Weights are int8 with a scale for each output, activations int8 with a scale for each token (so that no answer depends
on those beside it), both symmetric and to nearest. A product counts as a decoding step has it: with all layers' weights
in turn, so that none is still in the processor's cache. Ways: bf16 laid out for oneDNN (as the sampler has it),
torch._int_mm, oneDNN's qlinear (also with activations that come as int8, a bound), quantized.linear_dynamic of fbgemm
and of oneDNN (one scale for all tokens), and int8 weights alone (_weight_int8pack_mm).

With `--recipe` answers to its first prompts are sampled with int8 products and scored as in training, in bf16.
Prints |log-ratio| a token (mean, 99 %, largest), the standard deviation of an answer's sum, and the effective sample
size of importance weights, as a share of the answers or tokens: of whole answers and of single tokens, truncated at 2.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.drafts import asked_of, measured_costs
from lmgym.batch import collate
from lmgym.core import seeds
from lmgym.inference.base import Request
from lmgym.inference.sampler import Sampler
from lmgym.models.kernels import onednn_linear
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.types import Episode, Example, Turn

Product = Callable[[Tensor], Tensor]
TRUNCATED = 2.0  # largest importance weight


def quantised(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as int8 with a scale [rows 1]."""
    scale = numbers.abs().amax(-1, keepdim=True).float().clamp_(min=1e-12) / 127
    return (numbers / scale).round_().to(torch.int8), scale


def bf16(weight: Tensor) -> Product:
    packed = onednn_linear.pack(weight)
    return lambda hidden: onednn_linear.product(hidden, packed, None)


def int_mm(weight: Tensor) -> Product:
    columns, scale = quantised(weight)
    turned, scales = columns.T.contiguous(), scale.T.contiguous()

    def product(hidden: Tensor) -> Tensor:
        rows, of_rows = quantised(hidden.flatten(0, -2))
        found = torch._int_mm(rows, turned).mul(scales).mul_(of_rows)
        return found.to(hidden.dtype).view(*hidden.shape[:-1], -1)

    return product


def qlinear(weight: Tensor) -> Product:
    multiply = _qlinear(weight)
    return lambda hidden: multiply(*quantised(hidden.flatten(0, -2))).to(hidden.dtype)


def qlinear_alone(weight: Tensor) -> Product:
    """As if the activations came as int8."""
    multiply, given = _qlinear(weight), dict[int, tuple[Tensor, Tensor]]()

    def product(hidden: Tensor) -> Tensor:
        if len(hidden) not in given:
            given[len(hidden)] = quantised(hidden)
        return multiply(*given[len(hidden)])

    return product


def _qlinear(weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    columns, scale = quantised(weight)
    packed, scales = torch.ops.onednn.qlinear_prepack(columns, None), scale.flatten()
    zeros, one, none = torch.zeros(len(scales), dtype=torch.int64), torch.ones(1), torch.zeros(1, dtype=torch.int64)
    settings = (one, none, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return lambda rows, of_rows: torch.ops.onednn.qlinear_pointwise(rows, *settings).mul_(of_rows)


def linear_dynamic(engine: str) -> Callable[[Tensor], Product]:
    def make(weight: Tensor) -> Product:
        columns, scale = quantised(weight)
        zeros = torch.zeros(len(columns), dtype=torch.int64)
        tensor = torch._make_per_channel_quantized_tensor(columns, scale.flatten().double(), zeros, 0)
        torch.backends.quantized.engine = engine
        packed = torch.ops.quantized.linear_prepack(tensor, None)
        return lambda hidden: torch.ops.quantized.linear_dynamic(hidden.float(), packed).to(hidden.dtype)

    return make


def weights_alone(weight: Tensor) -> Product:
    columns, scale = quantised(weight)
    scales = scale.flatten().bfloat16()
    return lambda hidden: torch._weight_int8pack_mm(hidden, columns, scales)


WAYS = {
    "bf16": bf16,
    "_int_mm": int_mm,
    "qlinear": qlinear,
    "qlinear, activations given": qlinear_alone,
    "linear_dynamic, fbgemm": linear_dynamic("fbgemm"),
    "linear_dynamic, onednn": linear_dynamic("onednn"),
    "int8 weights alone": weights_alone,
}


@torch.no_grad()
def times_of(policy: Policy, rows: int, repeats: int) -> dict[str, dict[tuple[int, int], float]]:
    """Milliseconds of a step's products of each shape: medians, ways by turns."""
    by_shape: dict[tuple[int, int], list[Tensor]] = {}
    for layer in policy.model.modules():
        if type(layer) is nn.Linear:
            by_shape.setdefault(tuple(layer.weight.shape), []).append(layer.weight.detach())
    found: dict[str, dict[tuple[int, int], float]] = {way: {} for way in WAYS}
    for shape, weights in by_shape.items():
        hidden = torch.randn(rows, shape[1], dtype=torch.bfloat16)
        products: dict[str, list[Product]] = {}
        for way, make in WAYS.items():
            try:
                products[way] = [make(weight) for weight in weights]
                assert all(torch.isfinite(product(hidden)).all() for product in products[way])
            except (RuntimeError, NotImplementedError) as error:  # torch lacks this way, or this processor does
                products.pop(way, None)
                print(f"{way} {shape}: {str(error).splitlines()[0]}")
        seconds: dict[str, list[float]] = {way: [] for way in products}
        for _ in range(repeats):
            for way, own in products.items():
                began = time.process_time()
                for product in own:
                    product(hidden)
                seconds[way].append(time.process_time() - began)
        for way, each in seconds.items():
            found[way][shape] = 1000 * statistics.median(each)
    return found


def print_times(policy: Policy, repeats: int) -> None:
    costs = measured_costs(policy, 24, repeats, widths=(1,))
    for rows in (32, 64):
        found = times_of(policy, rows, repeats)
        shapes, step = list(found["bf16"]), 1000 * costs.seconds[rows, 1]
        names = [f"{outputs} x {inputs}" for outputs, inputs in shapes]
        print(f"\n{rows} answers: a step takes {step:.1f} ms in bf16")
        print(f"| ms of a step's products | {' | '.join(names)} | best of both | step |")
        print("|---" * (3 + len(shapes)) + "|")
        for way, times in found.items():
            both = sum(
                min(found["bf16"][shape], times.get(shape, 1e9)) for shape in shapes
            )  # each product by the faster
            whole = step - sum(found["bf16"].values()) + both
            cells = [f"{times[shape]:.2f}" if shape in times else "-" for shape in shapes]
            print(f"| {way} | {' | '.join(cells)} | {both:.1f} | {step / whole:.2f} times as fast |", flush=True)


def use_int8(model: nn.Module, head: bool) -> None:
    """Linear layers of a sampler's copy compute with int8 products from now on."""
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and (head or "lm_head" not in name):
            layer.forward = int_mm(layer.weight.detach())  # type: ignore[method-assign]


def effective(logs: Tensor) -> float:
    """Share of samples that are left, of importance weights with these logarithms, truncated."""
    weights = logs.exp().clamp(max=TRUNCATED)
    return float(weights.sum().square() / weights.square().sum() / len(weights))


@torch.no_grad()
def gaps(policy: Policy, recipe: str, settings: list[str], way: str, prompts: int, answers: int) -> str:
    """Rows of the table of log-ratios: of the first 24 tokens of the answers, and of all."""
    sampler = Sampler(policy)
    if way != "bf16":
        assert sampler._copy is not None
        use_int8(sampler._copy.model, head="head" in way)
    asked, sampling = asked_of(policy, recipe, settings, prompts)
    groups = [(at, ids) for at, ids in enumerate(asked) for _ in range(answers)]
    requests = [Request(tuple(ids), seeds.key("int8", index)) for index, (_, ids) in enumerate(groups)]
    completions = sampler.generate(requests, sampling)
    turns = [Turn(prompt, one.ids, logprobs=one.logprobs) for (_, prompt), one in zip(groups, completions, strict=True)]
    numbered = enumerate(zip(groups, turns, strict=True))
    batch = collate([Episode(Example("x", ""), at, index, [turn]) for index, ((at, _), turn) in numbered])
    scored = policy.compute_logprobs_no_grad(batch).logprobs[batch.actions]
    sampled = torch.tensor([logprob for one in completions for logprob in one.logprobs])
    ratios = (scored - sampled).split([len(one.ids) for one in completions])
    rows = []
    for most in sorted({24, sampling.max_new_tokens}):
        parts = [one[:most] for one in ratios]
        tokens, whole = torch.cat(parts), torch.stack([one.sum() for one in parts])
        size = tokens.abs()
        cells = f"{size.mean():.4f} | {size.quantile(0.99):.3f} | {size.max():.2f} | {whole.std():.2f}"
        rows.append(
            f"| {way} | {len(tokens) / len(parts):.0f} | {cells} | {effective(whole):.2f} | {effective(tokens):.3f} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder of a causal model")
    parser.add_argument("--recipe", help="a file or a packaged recipe: prompts and sampling")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more of the recipe")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=16, help="to a prompt (%(default)s)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    policy = load_policy(PolicySection(model=given.model, compute="bfloat16", device="cpu"))
    if given.recipe is None:
        print_times(Sampler(policy)._copy or policy, given.repeats)
        return
    print(
        "| products | tokens an answer | mean | 99 % | largest | deviation, answers | sample size, answers | tokens |"
    )
    print("|---" * 8 + "|")
    for way in ("bf16", "int8", "int8, head too"):
        print(gaps(policy, given.recipe, given.set, way, given.prompts, given.answers), flush=True)


if __name__ == "__main__":
    main()
