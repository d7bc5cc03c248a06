"""What to write into a recipe that takes more memory than there is: the keys that cost the least of a run, tried by the
estimate itself."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from lmgym.config.schema import Config
from lmgym.training.planning.memory_fit import LESS
from lmgym.training.planning.memory_table import size

FEWEST_TOKENS = 256  # of a forward pass that is worth to be tried
FEWEST_ROWS = 8


def remedy_sentence(config: Config, tokens: int, need: float, here: float, estimated: Callable[[Config], float]) -> str:
    """That a stage does not fit, and the first change by which it would. `need` and `here` are bytes, `tokens` is the
    budget of a forward pass that the run would have, `estimated` gives the bytes that another recipe needs.

    Example: "does not fit: 23.40 GiB of 16.00 GiB here; policy.tokens_per_forward: 4096 would need 9.00 GiB" """
    said = f"does not fit: {size(need)} of {size(here)} here"
    least, words = need, ""
    for keys, other in _smaller(config, tokens):
        if (needs := estimated(other)) <= here:
            return f"{said}; {keys} would need {size(needs)}"
        if needs < least:
            least, words = needs, keys
    even = f"; even {words} would need {size(least)}" if words else ""
    return f"{said}{even}; {LESS}"


def _smaller(config: Config, tokens: int) -> Iterator[tuple[str, Config]]:
    """The recipe with less memory, the cheapest changes first: smaller passes and fewer rows compute the same in more
    calls; recomputed activations cost time."""
    # 1. Smaller passes.
    while tokens > FEWEST_TOKENS:
        tokens = max(tokens // 2, FEWEST_TOKENS)
        yield f"policy.tokens_per_forward: {tokens}", _with(config, tokens)
    fewest = f"policy.tokens_per_forward: {tokens}"
    # 2. Fewer answers at a time.
    rows = config.engine.rows
    while rows > FEWEST_ROWS:
        rows = max(rows // 2, FEWEST_ROWS)
        yield f"{fewest} with engine.rows: {rows}", _with(config, tokens, rows)
    # 3. Activations computed twice.
    words = f"{fewest} with engine.rows: {rows} and policy.activation_checkpointing: true"
    yield words, _with(config, tokens, rows, again=True)


def _with(config: Config, tokens: int, rows: int | None = None, again: bool | None = None) -> Config:
    policy = replace(config.policy, tokens_per_forward=tokens)
    if again is not None:
        policy = replace(policy, activation_checkpointing=again)
    return replace(config, policy=policy, engine=replace(config.engine, rows=rows or config.engine.rows))
