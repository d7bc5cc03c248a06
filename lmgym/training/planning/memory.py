"""How much memory a stage will take, from shapes and precisions alone: no model is loaded and nothing is run.

Memory that is held for the whole stage is exact: parameters times their bytes. Temporary memory (activations, caches,
logits: memory_passes.py) is that of the largest pass that the recipe allows, with answers of full length. Not counted:
saving a checkpoint, replayed episodes, TRPO's conjugate gradients, other engines than lmgym's own.

Of several ranks (docs/scale.md) each holds the whole batch, but samples only its share of the prompts, and runs only
its share of the groups through the model. Where weights are cut into parts (distributed.sharding), a rank holds one
part of the weights, gradients, moments, reference, teacher and critic. Whole are then the layer that runs, the copy
that samples, and each model that is being copied."""

import resource
from dataclasses import replace

from lmgym.config.schema import Config, Stage
from lmgym.distributed.process_group import BUCKET
from lmgym.models.device import head_rows
from lmgym.models.kernels.fused_logprobs import TILE
from lmgym.models.shapes import Shapes
from lmgym.training.planning.memory_passes import (
    add_put_together,
    add_rollout,
    add_update,
    is_narrow,
    is_native,
    is_rounded,
    kind_of,
    largest_pass,
)
from lmgym.training.planning.memory_table import MASTER, Estimate
from lmgym.training.planning.preflight import kept_bytes

COLUMNS = 60  # bytes of a batch per token: ids and masks, rewards, four kinds of log-probabilities, advantages
PROCESS = 400 * 2**20  # Python, torch and transformers before any model, where nobody has measured
TOKEN = 1500  # bytes that a tokenizer and the tables of its pairs take for each token: Gemma 3's, measured
UNRETURNED = 0.2  # of what comes and goes, what the C library's allocator keeps of it (0.05 to 0.6 were seen)


def estimate(
    config: Config,
    stage: Stage,
    shapes: Shapes,
    prompt: int,
    *,
    answer: int | None = None,
    first: bool = True,
    compute: int = 4,
    on_cpu: bool = True,
    teacher: Shapes | None = None,
    process: float = PROCESS,
    ranks: int = 1,
) -> Estimate:
    """The memory of a stage in bytes, on each of the `ranks` (on the one that has most to do), with prompts of `prompt`
    tokens and answers of `answer` (default: full length; of several turns, all after the first prompt). `compute` is
    the bytes of a number in the forward pass; `first` says that the adapters have not been trained by an earlier stage,
    so that the reference is the model without them.

    Example: estimate(config, config.stages[0], shapes_of(config.policy), prompt=200, ranks=8).peak"""
    parts = parts_of(config, ranks)
    found = Estimate()
    found.add("Python and its libraries", process)
    _held(found, config, stage, shapes, first, compute, teacher, parts, on_cpu)
    source = stage.source
    answers = stage.prompts_per_step * source.answers_to_a_prompt(stage.algorithm.group_size)
    answer = stage.sampling.max_new_tokens if answer is None else answer
    if shapes.context is not None and not shapes.encoder_decoder:
        answer = max(min(answer, shapes.context - prompt), 1)
    found.add("batch", answers * (prompt + answer) * COLUMNS)
    found.add("kept sets", kept_bytes(stage, shapes.vocabulary))
    if source.samples:
        own = share(stage.prompts_per_step, ranks) * stage.algorithm.group_size
        asked = max(own, share(config.evaluation.examples or 0, ranks) * config.evaluation.samples)
        add_rollout(found, config, shapes, prompt, answer, min(config.engine.rows, asked), compute, on_cpu)
    largest = largest_pass(config, stage, shapes, prompt, answer, on_cpu, ranks)
    narrow = is_narrow(shapes, compute, parts, on_cpu)
    native = is_native(config.policy.update_kernels, config, shapes, compute, parts, on_cpu)
    add_update(found, config, replace(shapes, narrow=narrow), largest, compute, parts, native, on_cpu)
    if teacher is not None and stage.algorithm.requirements.divergence is not None:
        rows = min(head_rows(teacher.vocabulary, kind_of(on_cpu)), largest.actions)
        # Four tiles, each of as many rows as in one of the policy's logits.
        tiles = 4 * (TILE / shapes.vocabulary if on_cpu else rows) * teacher.vocabulary
        found.add("teacher's LM head", MASTER * (rows * teacher.vocabulary + tiles), "update")
    if parts > 1:
        add_put_together(found, shapes)
        _copying(found, config, stage, shapes, first, compute, teacher)
    elif ranks > 1:
        added = min(trained_parameters(config, stage, shapes), BUCKET)  # as many at a time as ranks add up
        found.add("exchange of gradients", MASTER * added, "update")
    if on_cpu:
        found.add("freed, but not returned", UNRETURNED * (found.peak - found.held))
    return found


def parts_of(config: Config, ranks: int) -> int:
    """Into how many parts the weights are cut, of which each rank holds one."""
    return ranks if config.distributed.sharding == "fsdp" else 1


def share(prompts: int, ranks: int) -> int:
    """The prompts of the rank that has most of them. Example: share(5, ranks=2) is 3"""
    return -(-prompts // ranks)


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


def trained_parameters(config: Config, stage: Stage, shapes: Shapes) -> int:
    """The parameters that the optimizer moves: the policy's and the value function's."""
    own = shapes.trained if "policy" in stage.algorithm.optimized else 0
    if not stage.algorithm.requirements.values:
        return own
    return own + shapes.width + (shapes.trained if config.policy.critic == "separate" else 0)


def resident_bytes() -> float:
    """Bytes that this process holds now: Python and the libraries, if it has loaded no model yet."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return PROCESS


def _held(
    found: Estimate,
    config: Config,
    stage: Stage,
    shapes: Shapes,
    first: bool,
    compute: int,
    teacher: Shapes | None,
    parts: int,
    on_cpu: bool,
) -> None:
    """Add what is held for the whole stage, and the gradients, which are held during an update."""
    required, packed = stage.algorithm.requirements, config.policy.quantise is not None
    narrow = is_narrow(shapes, compute, parts, on_cpu)
    weights = weights_bytes(config, shapes, compute) - (MASTER - compute) * shapes.parameters * narrow
    found.add("weights", weights / parts)
    moments = {"adamw": 2 * MASTER, "adamw_8bit": 2, "rmsprop": MASTER}[stage.optimizer.name]
    if "policy" in stage.algorithm.optimized:
        found.add("gradients", MASTER * shapes.trained / parts, "update")
        found.add("moments of the optimizer", moments * shapes.trained / parts)
    lower = compute < MASTER and not packed and (shapes.fast or shapes.tried)
    rounded, copied = is_rounded(config, compute, parts), shapes.parameters + shapes.adapter
    if rounded:  # one copy of what trains, for sampler and passes
        found.add("the copy in bf16", compute * shapes.trained)
        copied -= shapes.trained + narrow * shapes.parameters  # the sampler shares a narrow base
    if lower or parts > 1:
        found.add("the sampler's copy", (compute if lower else MASTER) * copied)
    if lower and on_cpu:  # if the machine's probe finds that it pays (models/device.py)
        head = shapes.width * shapes.vocabulary
        found.add("the sampler's weights, laid out", compute * (shapes.linear + head + shapes.adapter), "rollout")
    whole = MASTER * shapes.adapter if packed else MASTER * shapes.parameters
    if _copies_reference(stage, shapes, first):
        found.add("reference", whole / parts)
    for name in (name for name in ("mask", "rival") if getattr(required, name)):  # they sample, so they are whole
        found.add(name, whole if packed else compute * shapes.parameters)
    if teacher is not None:
        found.add("teacher", MASTER * teacher.parameters / parts)
        if teacher.vocabulary != shapes.vocabulary:  # most likely another tokenizer (rollouts/other_tokenizer.py)
            found.add("teacher's tokenizer", TOKEN * teacher.vocabulary)
    if required.values:
        shared = weights - MASTER * shapes.adapter if packed else 0.0
        apart = config.policy.critic == "separate"
        trained = shapes.width + (shapes.trained if apart else 0)
        copy = compute * shapes.trained if rounded and apart else 0
        found.add("critic", ((weights - shared if apart else 0.0) + (MASTER + moments) * trained) / parts + copy)


def _copies_reference(stage: Stage, shapes: Shapes, first: bool) -> bool:
    """Whether the reference is a model of its own, not the policy without its adapters."""
    return stage.algorithm.requirements.reference and not (shapes.adapter and first)


def _copying(
    found: Estimate, config: Config, stage: Stage, shapes: Shapes, first: bool, compute: int, teacher: Shapes | None
) -> None:
    """Add the whole models that a rank needs for a moment, the largest of them, before it keeps its part of them."""
    required, whole = stage.algorithm.requirements, MASTER * (shapes.parameters + shapes.adapter)
    moments = [0.0]
    if compute < MASTER and (shapes.fast or shapes.tried):
        moments.append(whole)  # the model proves itself in fp32 too (inference/proof.py)
    if required.values and config.policy.critic == "separate":
        moments.append(whole)
    if _copies_reference(stage, shapes, first) or required.mask:
        moments.append(whole)
    if teacher is not None:
        moments.append(MASTER * teacher.parameters)
    found.add("whole models, being copied", max(moments), "copying")
