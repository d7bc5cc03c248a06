"""The answer that is asked about: to an example of the run's data, or to a prompt written in their form."""

from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch

from lmgym.batch import Batch, collate
from lmgym.config.schema import Config
from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.core.visible import visible
from lmgym.models.policy import Policy
from lmgym.rollouts.given_answers import given_turn
from lmgym.training.run import Data
from lmgym.training.setup import make_actor
from lmgym.types import Episode, Example

MOST = 100_000  # examples that are searched for a name
SHOWN = 20  # tokens of an answer in a message


def asked_example(data: Data, stage: int, name: str | None, prompt: str | None, answer: str | None) -> Example:
    """The example of this name (None: the first one that is held out, or else that trains), or its prompt with another
    last message; its one reference is the answer (None: its own first one). Raises LmgymError for a name that there is
    not, and without an answer.

    Example: asked_example(data, 0, None, "What is 2 + 2?", "4").references -> ("4",)"""
    example = _first(data, stage) if name is None else _named(data, stage, name)
    if prompt is not None:
        example = replace(example, id="asked", prompt=_with_last(example, prompt), references=())
    found = answer if answer is not None else next(iter(example.references), None)
    if found is None:
        raise LmgymError(f"example '{visible(example.id)}' has no reference; say which answer is meant: --answer TEXT")
    return replace(example, references=(found,), rated=(), steps=())


def asked_batch(config: Config, policy: Policy, example: Example, token: int | None = None) -> Batch:
    """The prompt and the answer as one row, as supervised training would read them, at temperature 1; its actions are
    the answer's tokens, or the one of this number, counted from 1. Raises LmgymError if the row is longer than the
    model reads, and if the answer has no such token."""
    nobody: Any = None  # nothing is sampled
    turn = given_turn(example, example.references[0], make_actor(config.policy, policy, nobody))
    length = len(turn.prompt_ids) + len(turn.action_ids)
    if policy.context is not None and length > policy.context:
        raise LmgymError(f"prompt and answer have {length} tokens, and the model reads {policy.context} at most")
    batch = collate([Episode(example, 0, 0, [turn])], policy.pad_id, 1.0, sorted(policy.stop_ids))
    if token is None:
        return batch
    if not 1 <= token <= len(turn.action_ids):
        pieces = [policy.tokenizer.decode([one]) for one in turn.action_ids[:SHOWN]]
        raise LmgymError(
            f"--token is {token}, and the answer has the tokens 1 to {len(turn.action_ids)}: "
            f"{', '.join(map(repr, pieces))}{' ...' if len(turn.action_ids) > SHOWN else ''}"
        )
    places = batch.actions.nonzero()[token - 1 : token]
    return batch.replace(actions=torch.zeros_like(batch.actions).index_put(tuple(places.T), torch.tensor(True)))


def _first(data: Data, stage: int) -> Example:
    for example in chain(*data.held_out.values(), data.training[stage]):
        return example
    raise LmgymError("the run's data hold no example")


def _named(data: Data, stage: int, name: str) -> Example:
    seen: list[str] = []
    for example in islice(chain(*data.held_out.values(), data.training[stage]), MOST):
        if example.id == name:
            return example
        seen.append(example.id)
    raise LmgymError(f"the run's data have no example '{visible(name)}'; {suggest(name, seen[:1000])}")


def _with_last(example: Example, text: str) -> str | list[dict[str, str]]:
    """The prompt with another last message; messages before it, such as a system's, stay."""
    if isinstance(example.prompt, str):
        return text
    return [*(dict(message) for message in example.prompt[:-1]), {"role": "user", "content": text}]
