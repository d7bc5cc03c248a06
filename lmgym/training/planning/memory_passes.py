"""The memory that comes and goes: caches and logits while answers are sampled, activations of the largest pass.

For backward a layer keeps, per token, 4 inner + 6 width + 4 attention numbers (a Llama) or 2 inner + 4 width + 4
attention (a GPT-2): for two norms, the inputs of linear layers, queries, keys, values and output of attention, and the
MLP. The kernels for updates (models/kernels/fused_training.py) keep less: two hidden states in fp32, and in bf16
queries, keys, values, the output of attention, gate and up. With activation checkpointing it is the width once, and one
layer of the rest at a time."""

from dataclasses import dataclass

from lmgym.config.schema import Config, Stage
from lmgym.models.device import choose_tokens_per_forward, enough_tokens, head_rows
from lmgym.models.kernel_choice import Kernels
from lmgym.models.kernels import onednn_linear
from lmgym.models.kernels.fused_head import LEAST_ROWS
from lmgym.models.kernels.fused_logprobs import TILE
from lmgym.models.kernels.native import compiler_here
from lmgym.models.shapes import Shapes
from lmgym.training.planning.memory_table import MASTER, PHASES, Estimate, Phase

EXPLICIT = 3  # explicit scores that a layer holds at a time: before and after a cap or a mask, and their softmax


@dataclass(frozen=True)
class Pass:
    """The largest forward pass of an update: `tokens` run through the layers of the decoder, `sources` through those of
    the encoder. Attention keeps `attended` vectors of its width: queries, keys, values and outputs of each token; on a
    GPU also the queries and, for each row that shares its prompt, keys and values in the kernel's own layout. `pairs`
    are the scores of a head that attention computes where they are explicit."""

    rows: int
    tokens: int
    sources: int
    attended: int
    actions: int
    pairs: int


def add_rollout(
    found: Estimate, config: Config, shapes: Shapes, prompt: int, answer: int, rows: int, compute: int, on_cpu: bool
) -> None:
    """Add the cache of the answers that are decoded side by side, the pass over prompts, and the logits of one step."""
    native = is_native(config.policy.kernels, config, shapes, compute, 1, on_cpu)
    number = MASTER if on_cpu and shapes.fast and not shapes.encoder_decoder and not native else compute
    length = answer if shapes.encoder_decoder else prompt + answer
    layer = 2 * rows * length * shapes.keys * number
    across = 2 * rows * prompt * shapes.keys * number if shapes.encoder_decoder else 0
    found.add("cache of keys and values", shapes.layers * (layer + across) + layer, "rollout")
    read = min(rows * prompt, max(_budget(config, on_cpu), prompt))
    found.add("reading prompts", _one_layer(shapes, read, compute) + _scores(shapes, read * prompt), "rollout")
    if on_cpu and compute == MASTER and not shapes.adapter:
        prepared = shapes.linear + shapes.vocabulary * shapes.width
        found.add("weights laid out for decoding", MASTER * prepared, "rollout")
    found.add("logits of a step", 3 * rows * shapes.vocabulary * MASTER, "rollout")


def largest_pass(
    config: Config, stage: Stage, shapes: Shapes, prompt: int, answer: int, on_cpu: bool, ranks: int = 1
) -> Pass:
    """The largest pass as `Policy.micro_batches` shares it out and cuts it, and models/scoring.py runs it."""
    group, prompts, budget = stage.algorithm.group_size, stage.prompts_per_step, _budget(config, on_cpu)
    padded = shapes.encoder_decoder or not shapes.fast or not (on_cpu or config.policy.attention == "flex")
    # Whole groups: a rank's share of them, as many as fit.
    whole = prompt + group * answer
    if padded:
        fit = max(budget // (prompt + answer), 1)
        fit = fit // group * group or fit
    elif whole <= budget:
        adapters = config.policy.lora_rank is not None and config.policy.quantise is None
        enough = enough_tokens(config.policy.tokens_per_forward, kind_of(on_cpu), adapters) or budget
        fit = max(min(enough, budget) // whole, 1) * group
    else:
        fit = max((budget - prompt) // answer, 1)
    rows = min(-(-prompts // ranks) * group, fit)
    groups = _pass(shapes, rows, -(-rows // group), prompt, answer, group, on_cpu)
    if ranks == 1:
        return groups
    # Single rows, if there are fewer groups than ranks. (Groups that cannot teach anything are left out, so this may
    # happen in any step.) Those of a rank may then have as many prompts as there are groups.
    few = min(prompts, ranks - 1)
    rows = -(-few * group // ranks)
    while rows > 1 and (rows if padded else min(few, rows)) * prompt + rows * answer > budget:
        rows -= 1
    single = _pass(shapes, rows, min(few, rows), prompt, answer, group, on_cpu)
    return single if prompts < ranks else max(groups, single, key=lambda one: one.tokens + one.sources)


def add_update(
    found: Estimate,
    config: Config,
    shapes: Shapes,
    largest: Pass,
    compute: int,
    parts: int = 1,
    native: bool = False,
    on_cpu: bool = True,
) -> None:
    """Add one forward pass with its backward pass; without gradients it computes log-probabilities. `parts`: each rank
    holds one of so many parts of the weights. `native`: with the kernels for updates."""
    rows, tokens, sources = largest.rows, largest.tokens, largest.sources
    if native:
        decoder = _kernel_values(shapes, tokens)
    else:
        decoder = _layer_values(shapes, tokens, largest.attended, largest.pairs, compute)
    if shapes.encoder_decoder:  # a layer of the decoder also looks across, at the encoded source of each row
        decoder += compute * (2 * shapes.attention * (tokens + sources) + shapes.width * tokens)
        decoder += MASTER * (shapes.norm_values - 1) * shapes.width * tokens
    encoder = _layer_values(shapes, sources, 4 * sources, sources * (sources // max(rows, 1)), compute)
    kept = shapes.layers * decoder + shapes.encoder_layers * encoder
    if config.policy.activation_checkpointing:
        inputs = shapes.layers * tokens + shapes.encoder_layers * sources
        kept = MASTER * shapes.width * inputs + max(decoder, encoder)
    found.add("activations", kept, "update")
    one_layer = _one_layer(shapes, max(tokens, sources), compute) + _scores(shapes, largest.pairs)
    found.add("one layer at a time", one_layer, "score", "update")
    if compute < MASTER and config.policy.quantise is None and not shapes.narrow:
        _add_lower_precision(found, config, shapes, compute, parts)
    if shapes.fast:
        chunk = head_rows(shapes.vocabulary, kind_of(on_cpu))
        if compute < MASTER and on_cpu:  # perhaps by the kernels for updates
            chunk = max(2 * chunk, LEAST_ROWS)
        logits = min(chunk, largest.actions) * shapes.vocabulary
        head = logits * compute + 4 * (TILE if on_cpu else logits) * MASTER
        found.add("LM head", head + 2 * largest.actions * shapes.width * compute, "score", "update")
    else:  # the model's own logits of every token, and those of the actions
        head = (compute * tokens + 2 * MASTER * largest.actions) * shapes.vocabulary
        found.add("logits", head, "score", "update")
    if not shapes.adapter:
        found.add("gradient of the LM head", MASTER * shapes.vocabulary * shapes.width, "update")


def is_rounded(config: Config, compute: int, parts: int) -> bool:
    """Whether what trains has a copy in bf16 that is rounded stochastically (models/rounding.py)."""
    return compute < MASTER and parts == 1 and config.policy.rounding == "stochastic"


def is_narrow(shapes: Shapes, compute: int, parts: int, on_cpu: bool) -> bool:
    """Whether the base of adapters is held in bf16 (models/frozen_base.py)."""
    return shapes.narrow and shapes.fast and not shapes.encoder_decoder and compute < MASTER and on_cpu and parts == 1


def is_native(wanted: Kernels, config: Config, shapes: Shapes, compute: int, parts: int, on_cpu: bool) -> bool:
    """Whether lmgym's own kernels are used where a recipe says `wanted` of them (`policy.kernels` for sampling,
    `policy.update_kernels`), as far as it can be known before they are compiled and tried (models/kernel_choice.py)."""
    policy = config.policy
    serves = shapes.known and shapes.fast and on_cpu and compute < MASTER and parts == 1 and wanted != "torch"
    serves = serves and policy.parity != "exact" and policy.attention != "flex" and policy.quantise is None
    return serves and onednn_linear.available() and compiler_here() is not None


def add_put_together(found: Estimate, shapes: Shapes) -> None:
    """Add the weights that are whole for a moment, where each rank holds a part of them (models/sharding.py): the layer
    that runs and its gradient, and the LM head or the embeddings. Layers count twice, because FSDP2 gathers the next
    one early, and adds up gradients in a buffer of its own."""
    head = MASTER * shapes.vocabulary * shapes.width
    found.add("layers put together", 2 * layer_bytes(shapes), "score", "update")
    found.add("gradients of a layer", 2 * layer_bytes(shapes, trained=True), "update")
    found.add("LM head or embeddings put together", head, "score", "update")


def layer_bytes(shapes: Shapes, trained: bool = False) -> float:
    """The weights of a layer, on average; or those of them that train. An embedding that is not the LM head is counted
    among the layers."""
    inside = shapes.parameters - shapes.vocabulary * shapes.width + shapes.adapter
    numbers = shapes.adapter if trained and shapes.adapter else inside
    return MASTER * numbers / (shapes.layers + shapes.encoder_layers)


def _add_lower_precision(found: Estimate, config: Config, shapes: Shapes, compute: int, parts: int) -> None:
    """Add the copies of weights in bf16. Autocast keeps them for the whole pass. Of weights in parts it keeps none, but
    backward needs those of all layers, unless it runs each layer again."""
    if is_rounded(config, compute, parts) and not shapes.adapter:
        return  # passes compute with the copy that is counted already
    every = compute * shapes.linear
    if parts == 1:
        phases: tuple[Phase, ...] = ("score", "update") if shapes.fast else PHASES
        found.add("weights in bf16", every, *phases)
        return
    one = compute / MASTER * layer_bytes(shapes)
    found.add("weights in bf16", one if config.policy.activation_checkpointing else every, "update")
    found.add("weights of a layer in bf16", one, "score")
    if not shapes.fast:  # the copy that samples is whole
        found.add("the sampler's weights in bf16", every, "rollout")


def kind_of(on_cpu: bool) -> str:
    """The kind of device whose limits are used."""
    return "cpu" if on_cpu else "cuda"


def _budget(config: Config, on_cpu: bool) -> int:
    return choose_tokens_per_forward(config.policy.tokens_per_forward, kind_of(on_cpu))


def _pass(shapes: Shapes, rows: int, prompts: int, prompt: int, answer: int, group: int, on_cpu: bool) -> Pass:
    """The pass over so many rows, with so many prompts among them."""
    if shapes.encoder_decoder:
        sources = (prompts if shapes.fast else rows) * prompt
        return Pass(rows, rows * answer, sources, 4 * rows * answer, rows * answer, rows * answer * answer)
    if shapes.fast and group > 1:
        tokens = prompts * prompt + rows * answer
        again = 0 if on_cpu else tokens + 2 * rows * (prompt + answer)
        pairs = prompts * prompt**2 + rows * answer * (prompt + answer)
        return Pass(rows, tokens, 0, 4 * tokens + again, rows * answer, pairs)
    tokens = rows * (prompt + answer)
    return Pass(rows, tokens, 0, 4 * tokens, rows * answer, tokens * (prompt + answer))


def _layer_values(shapes: Shapes, tokens: int, attended: int, pairs: int, compute: int) -> float:
    """Bytes that a layer keeps for backward. Norms are fp32; in bf16 each linear layer has a copy of its input, but on
    a narrow base, where layers with one input share it and frozen norms keep theirs alone."""
    inputs = 2 if compute == MASTER else 4 + shapes.gated
    norms = 1 if shapes.narrow else shapes.norm_values - 1
    inputs = 2 if shapes.narrow else inputs
    kept = MASTER * 2 * norms * shapes.width * tokens + compute * inputs * shapes.width * tokens
    kept += compute * ((4 if shapes.gated else 2) * shapes.inner * tokens + shapes.attention * attended)
    return kept + compute * shapes.pair_values * shapes.heads * pairs


def _kernel_values(shapes: Shapes, tokens: int) -> float:
    """Bytes that a layer keeps for backward where it is one function: two hidden states, their norms' factors and
    attention's normalisers in fp32, the rest in bf16."""
    wide = 2 * shapes.width + 2 + shapes.heads
    return tokens * (MASTER * wide + 2 * (2 * shapes.attention + 2 * shapes.keys + 2 * shapes.inner))


def _one_layer(shapes: Shapes, tokens: int, compute: int) -> float:
    """Bytes that one layer holds for a moment: the residual stream twice, its widest activation three times."""
    return tokens * (2 * MASTER * shapes.width + 3 * compute * max(shapes.inner, shapes.attention))


def _scores(shapes: Shapes, pairs: int) -> float:
    """Bytes of the explicit scores that one layer holds for a moment."""
    return EXPLICIT * MASTER * shapes.heads * pairs if shapes.pair_values else 0.0
