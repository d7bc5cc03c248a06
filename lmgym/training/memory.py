"""How much memory a stage will take, from shapes and precisions alone: no model is loaded and nothing is run.

Memory that is held for the whole stage is exact: parameters times their bytes. Temporary memory (activations, caches,
logits) is that of the largest pass that the recipe allows, with answers of full length. Not counted: saving a
checkpoint, replayed episodes, TRPO's conjugate gradients, other engines than lmgym's own, several processes.

For backward a layer keeps, per token, 4 inner + 6 width + 4 attention numbers (a Llama) or 2 inner + 4 width + 4
attention (a GPT-2): for two norms, the inputs of linear layers, queries, keys, values and output of attention, and the
MLP. With activation checkpointing it is the width once, and one layer of the rest at a time.
"""

import resource
from dataclasses import dataclass, field
from typing import Literal

from lmgym.config.schema import Config, Stage
from lmgym.models.device import choose_tokens_per_forward
from lmgym.models.fused_logprobs import TILE
from lmgym.models.shapes import Shapes
from lmgym.training.preflight import kept_bytes

Phase = Literal["rollout", "score", "update"]
PHASES: tuple[Phase, ...] = ("rollout", "score", "update")
MASTER = 4  # bytes of a parameter that trains, of its gradient, and of each of its moments
COLUMNS = 60  # bytes of a batch per token: ids and masks, rewards, four kinds of log-probabilities, advantages
PROCESS = 400 * 2**20  # Python, torch and transformers before any model, where nobody has measured
UNRETURNED = 0.2  # of what comes and goes, what the C library's allocator keeps of it (0.05 to 0.6 were seen)


@dataclass(frozen=True)
class Part:
    """One thing that takes memory, and the phases in which it does. Example: Part("gradients", 60_000_000)"""

    name: str
    bytes: float
    phases: tuple[Phase, ...] = PHASES


@dataclass
class Estimate:
    """The parts of a stage, and their sums.

    Example:
        >>> Estimate([Part("weights", 8.0), Part("cache", 4.0, ("rollout",))]).peak
        12.0
    """

    parts: list[Part] = field(default_factory=list)

    def add(self, name: str, count: float, *phases: Phase) -> None:
        if count > 0:
            self.parts.append(Part(name, count, phases or PHASES))

    def total(self, phase: Phase) -> float:
        """Bytes held at once in a phase."""
        return sum(part.bytes for part in self.parts if phase in part.phases)

    @property
    def peak(self) -> float:
        return max(self.total(phase) for phase in PHASES)

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each part, with a cell for each phase of PHASES, and one for the sums."""
        rows = [
            (part.name, *(size(part.bytes) if phase in part.phases else "-" for phase in PHASES)) for part in self.parts
        ]
        return [*rows, ("total", *(size(self.total(phase)) for phase in PHASES))]


@dataclass(frozen=True)
class Pass:
    """The largest forward pass of an update: `tokens` run through the layers of the decoder, `sources` through those of
    the encoder. Attention keeps `attended` vectors of its width: queries, keys, values and outputs of each token; on a
    GPU also the queries and, for each row that shares its prompt, keys and values in the kernel's own layout."""

    rows: int
    tokens: int
    sources: int
    attended: int
    actions: int


def estimate(
    config: Config,
    stage: Stage,
    shapes: Shapes,
    prompt: int,
    *,
    first: bool = True,
    compute: int = 4,
    on_cpu: bool = True,
    teacher: Shapes | None = None,
    process: float = PROCESS,
) -> Estimate:
    """The memory of a stage in bytes, with prompts of `prompt` tokens. `compute` is the bytes of a number in the
    forward pass; `first` says that the adapters have not been trained by an earlier stage, so that the reference is the
    model without them."""
    found = Estimate()
    found.add("Python and its libraries", process)
    _held(found, config, stage, shapes, first, compute, teacher)
    answers = stage.prompts_per_step * stage.algorithm.group_size
    answer = stage.sampling.max_new_tokens
    if shapes.context is not None and not shapes.encoder_decoder:
        answer = max(min(answer, shapes.context - prompt), 1)
    found.add("batch", answers * (prompt + answer) * COLUMNS)
    found.add("kept sets", kept_bytes(stage, shapes.vocabulary))
    if stage.algorithm.requirements.answers == "policy":
        asked = max(answers, (config.evaluation.examples or 0) * config.evaluation.samples)
        _rollout(found, config, shapes, prompt, answer, min(config.engine.rows, asked), compute, on_cpu)
    _update(found, config, shapes, _largest_pass(config, stage, shapes, prompt, answer, on_cpu), compute)
    if on_cpu:
        held = sum(part.bytes for part in found.parts if part.phases == PHASES)
        found.add("freed, but not returned", UNRETURNED * (found.peak - held))
    return found


def weights_bytes(config: Config, shapes: Shapes, compute: int) -> float:
    """The model with its adapters, as it is loaded."""
    adapter = MASTER * shapes.adapter
    if config.policy.quantise is None:
        return MASTER * shapes.parameters + adapter
    # Blocks of 64 weights with a scale of one byte, whose own blocks of 256 have one of four; or a scale for each row.
    codes = shapes.linear * (0.5 + 1 / 64 + 4 / (64 * 256))
    if config.policy.quantise == "8bit":
        codes = shapes.linear + MASTER * shapes.linear_rows
    return codes + compute * (shapes.parameters - shapes.linear) + adapter


def size(count: float) -> str:
    """Bytes for people.

    Example:
        >>> size(3 * 2**30), size(2**20)
        ('3.00 GiB', '1 MiB')
    """
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.0f} MiB"


def resident_bytes() -> float:
    """Bytes that this process holds now: Python and the libraries, if it has loaded no model yet."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return PROCESS


def _held(
    found: Estimate, config: Config, stage: Stage, shapes: Shapes, first: bool, compute: int, teacher: Shapes | None
) -> None:
    """Add what is held for the whole stage, and the gradients, which are held during an update."""
    required, packed = stage.algorithm.requirements, config.policy.quantise is not None
    weights = weights_bytes(config, shapes, compute)
    found.add("weights", weights)
    moments = {"adamw": 2, "rmsprop": 1}[stage.optimizer.name] * MASTER
    if "policy" in stage.algorithm.optimized:
        found.add("gradients", MASTER * shapes.trained, "update")
        found.add("moments of the optimizer", moments * shapes.trained)
    if compute < MASTER and not packed and shapes.fast:
        found.add("the sampler's copy", compute * (shapes.parameters + shapes.adapter))
    copied = MASTER * shapes.adapter if packed else MASTER * shapes.parameters
    if required.reference and not (shapes.adapter and first):
        found.add("reference", copied)
    if required.mask:
        found.add("mask", copied if packed else compute * shapes.parameters)
    if teacher is not None:
        found.add("teacher", MASTER * teacher.parameters)
    if required.values:
        shared = weights - MASTER * shapes.adapter if packed else 0.0
        apart = config.policy.critic == "separate"
        trained = shapes.width + (shapes.trained if apart else 0)
        found.add("critic", (weights - shared if apart else 0.0) + (MASTER + moments) * trained)


def _rollout(
    found: Estimate, config: Config, shapes: Shapes, prompt: int, answer: int, rows: int, compute: int, on_cpu: bool
) -> None:
    """Add the cache of the answers that are decoded side by side, the pass over prompts, and the logits of one step."""
    number = MASTER if on_cpu and shapes.fast and not shapes.encoder_decoder else compute
    length = answer if shapes.encoder_decoder else prompt + answer
    layer = 2 * rows * length * shapes.keys * number
    across = 2 * rows * prompt * shapes.keys * number if shapes.encoder_decoder else 0
    found.add("cache of keys and values", shapes.layers * (layer + across) + layer, "rollout")
    read = min(rows * prompt, max(_budget(config, on_cpu), prompt))
    found.add("reading prompts", _one_layer(shapes, read, compute), "rollout")
    if on_cpu and compute == MASTER and not shapes.adapter:
        prepared = shapes.linear + shapes.vocabulary * shapes.width
        found.add("weights laid out for decoding", MASTER * prepared, "rollout")
    found.add("logits of a step", 3 * rows * shapes.vocabulary * MASTER, "rollout")


def _budget(config: Config, on_cpu: bool) -> int:
    return choose_tokens_per_forward(config.policy.tokens_per_forward, "cpu" if on_cpu else "cuda")


def _largest_pass(config: Config, stage: Stage, shapes: Shapes, prompt: int, answer: int, on_cpu: bool) -> Pass:
    """The largest pass as `Policy.micro_batches` cuts it and models/scoring.py runs it."""
    group, budget = stage.algorithm.group_size, _budget(config, on_cpu)
    whole = prompt + group * answer
    if shapes.encoder_decoder or not shapes.fast or not (on_cpu or config.policy.attention == "flex"):
        fit = max(budget // (prompt + answer), 1)  # padded
        fit = fit // group * group or fit
    elif whole <= budget:
        fit = budget // whole * group
    else:
        fit = max((budget - prompt) // answer, 1)
    rows = min(stage.prompts_per_step * group, fit)
    prompts = -(-rows // group)
    if shapes.encoder_decoder:
        sources = (prompts if shapes.fast else rows) * prompt
        return Pass(rows, rows * answer, sources, 4 * rows * answer, rows * answer)
    if shapes.fast and group > 1:
        tokens = prompts * prompt + rows * answer
        again = 0 if on_cpu else tokens + 2 * rows * (prompt + answer)
        return Pass(rows, tokens, 0, 4 * tokens + again, rows * answer)
    tokens = rows * (prompt + answer)
    return Pass(rows, tokens, 0, 4 * tokens, rows * answer)


def _update(found: Estimate, config: Config, shapes: Shapes, largest: Pass, compute: int) -> None:
    """Add one forward pass with its backward pass; without gradients it computes log-probabilities."""
    rows, tokens, sources = largest.rows, largest.tokens, largest.sources
    decoder = _layer_values(shapes, tokens, largest.attended, rows, compute)
    if shapes.encoder_decoder:  # a layer of the decoder also looks across, at the encoded source of each row
        decoder += compute * (2 * shapes.attention * (tokens + sources) + shapes.width * tokens)
        decoder += MASTER * (shapes.norm_values - 1) * shapes.width * tokens
    encoder = _layer_values(shapes, sources, 4 * sources, rows, compute)
    kept = shapes.layers * decoder + shapes.encoder_layers * encoder
    if config.policy.activation_checkpointing:
        inputs = shapes.layers * tokens + shapes.encoder_layers * sources
        kept = MASTER * shapes.width * inputs + max(decoder, encoder)
    found.add("activations", kept, "update")
    found.add("one layer at a time", _one_layer(shapes, max(tokens, sources), compute), "score", "update")
    if compute < MASTER and config.policy.quantise is None:
        phases: tuple[Phase, ...] = ("score", "update") if shapes.fast else PHASES
        found.add("weights in bf16", compute * shapes.linear, *phases)
    if shapes.fast:
        chunk = min(max(2**24 // shapes.vocabulary, 64), 8192, largest.actions)
        head = chunk * shapes.vocabulary * compute + 4 * TILE * MASTER
        found.add("LM head", head + 2 * largest.actions * shapes.width * compute, "score", "update")
    else:  # the model's own logits of every token, and those of the actions
        head = (compute * tokens + 2 * MASTER * largest.actions) * shapes.vocabulary
        found.add("logits", head, "score", "update")
    if not shapes.adapter:
        found.add("gradient of the LM head", MASTER * shapes.vocabulary * shapes.width, "update")


def _layer_values(shapes: Shapes, tokens: int, attended: int, rows: int, compute: int) -> float:
    """Bytes that a layer keeps for backward. Norms are fp32; in bf16 each linear layer has a copy of its input."""
    inputs = 2 if compute == MASTER else 4 + shapes.gated
    kept = MASTER * 2 * (shapes.norm_values - 1) * shapes.width * tokens + compute * inputs * shapes.width * tokens
    kept += compute * ((4 if shapes.gated else 2) * shapes.inner * tokens + shapes.attention * attended)
    if shapes.quadratic:
        kept += compute * shapes.heads * tokens * (tokens // max(rows, 1))
    return kept


def _one_layer(shapes: Shapes, tokens: int, compute: int) -> float:
    """Bytes that one layer holds for a moment: the residual stream twice, its widest activation three times."""
    return tokens * (2 * MASTER * shapes.width + 3 * compute * max(shapes.inner, shapes.attention))
