"""`policy.memory_gib`: the fastest way to run a recipe within a budget, by the estimate of planning/memory.py.

Three things can give way, and none of them changes what is computed but by rounding: tokens of a forward pass, whether
a layer is computed again in backward, and answers decoded side by side. What is chosen stands in machine.json, so that
a resumed run computes the same."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lmgym.config.schema import Config, Stage
from lmgym.core.errors import LmgymError
from lmgym.models.device import choose_tokens_per_forward, expected_device
from lmgym.models.shapes import Shapes, shapes_of
from lmgym.text.chat import prompt_ids, source_ids
from lmgym.training.machine import Machine
from lmgym.training.planning.memory import estimate, resident_bytes
from lmgym.training.planning.memory_report import longest_given, teacher_shapes
from lmgym.training.planning.memory_table import Estimate, size
from lmgym.types import Example

EXAMPLES = 64  # prompts of a stage whose lengths are read
FEWEST = 256  # tokens of a forward pass; with fewer the products of a small model take most of a step's time


def within_memory(config: Config, data: Sequence[Sequence[Example]], tokenizer: object, machine: Machine) -> Machine:
    """The machine with what keeps the stages below `policy.memory_gib`; as it is, if that was chosen before. `data` are
    the examples by stage. Raises LmgymError, with what the least would take, if nothing does.

    Example: within_memory(config, [examples], tokenizer, machine).tokens_per_forward -> 1024"""
    budget = config.policy.memory_gib
    if budget == machine.memory_gib:
        return machine
    if budget is None:
        return replace(machine, memory_gib=None, tokens_per_forward=None, activation_checkpointing=None, rows=None)
    shapes = shapes_of(config.policy)
    device, compute = expected_device(
        config.policy.device, machine.compute or config.policy.precision, shapes.parameters
    )
    process = resident_bytes() if device == "cpu" else 0.0
    lengths = [
        (longest_prompt(config, stage, own, tokenizer, shapes),
         longest_given(config, stage, own[:EXAMPLES], tokenizer, shapes))
        for stage, own in zip(config.stages, data, strict=True)
    ]  # fmt: skip

    def largest(chosen: Machine) -> Estimate:
        """The estimate of the stage that takes most."""
        section, engine = chosen.policy_section(config.policy), chosen.engine_section(config.engine)
        own = replace(config, policy=section, engine=engine)
        stages = [
            estimate(
                own, stage, shapes, prompt, answer=answer, first=not index, compute=compute, on_cpu=device == "cpu",
                teacher=teacher_shapes(own, stage), process=process,
            )
            for index, (stage, (prompt, answer)) in enumerate(zip(config.stages, lengths, strict=True))
        ]  # fmt: skip
        return max(stages, key=lambda one: one.peak)

    chosen, found = machine, largest(machine)
    for chosen in choices(config, replace(machine, memory_gib=budget), device):
        found = largest(chosen)
        if found.peak <= budget * 2**30:
            return chosen
    raise LmgymError(
        f"policy.memory_gib is {budget:g}: the least that this recipe takes here is {size(found.peak)}, with "
        f"{chosen.tokens_per_forward} tokens in a forward pass and one answer at a time; {size(found.held)} of it are "
        "held all the time. Raise it, or take policy.lora_rank, policy.quantise, optimizer.name: adamw_8bit or a "
        "smaller model"
    )


def choices(config: Config, machine: Machine, device: str) -> Iterator[Machine]:
    """What to try, the fastest first: fewer tokens in a pass, then layers computed again, then fewer answers decoded
    side by side. What the recipe asks for is never exceeded."""
    most = choose_tokens_per_forward(config.policy.tokens_per_forward, device)
    tokens = [most, *(count for count in (8192, 4096, 2048, 1024, 512, FEWEST) if count < most)]
    again = (True,) if config.policy.activation_checkpointing else (False, True)
    rows = config.engine.rows
    while rows:
        for checkpointing in again:
            for count in tokens:
                yield replace(machine, tokens_per_forward=count, activation_checkpointing=checkpointing, rows=rows)
        rows //= 2


def longest_prompt(config: Config, stage: Stage, examples: Sequence[Example], tokenizer: object, shapes: Shapes) -> int:
    """Tokens of the longest of a stage's first prompts. Of an environment, whose episodes nobody knows yet: a row as
    long as the model's context or a default forward pass, whichever is less."""
    section = config.policy
    if stage.is_played:
        usual = choose_tokens_per_forward(None, "cpu")
        return max(min(shapes.context or usual, usual) - stage.sampling.max_new_tokens, 1)
    read = source_ids if shapes.encoder_decoder else prompt_ids
    return max(
        len(read(tokenizer, one.prompt, section.chat_template_kwargs, section.cut)) for one in examples[:EXAMPLES]
    )


def plan_sentence(machine: Machine) -> str:
    """What was chosen. Example: "memory: at most 4 GiB by estimate, with 1024 tokens in a forward pass, ..." """
    again = "layers computed again in backward, " if machine.activation_checkpointing else ""
    return (
        f"memory: at most {machine.memory_gib:g} GiB, by estimate, with {machine.tokens_per_forward} tokens in a "
        f"forward pass, {again}{machine.rows} answers side by side"
    )
