"""Who answers: a policy behind an engine, with its tokenizer and its chat template. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.inference.base import Engine
from lmgym.text.chat import Cut, prompt_ids, source_ids, start_ids
from lmgym.types import Prompt, recipe_spans


@dataclass(frozen=True)
class Actor:
    """A policy that can be asked for turns: its engine, its tokenizer, and the keyword arguments of its chat template.

    The answers of an encoder-decoder begin with `decoder_start`; a causal model has none. An `opponent` plays the
    players that do not learn, with the same tokenizer; without one the actor plays them itself. `cut` says how a first
    prompt that is too long is cut; a demonstration is cut after `reference_tokens` tokens. Each message of the policy
    begins with `answer_start`, which it does not sample. `ranks` are the processes that share out its rollouts.

    Example: Actor(engine, tokenizer)"""

    engine: Engine[Any]
    tokenizer: Any
    template: Mapping[str, Any] = field(default_factory=dict)
    version: int = 0
    decoder_start: tuple[int, ...] = ()
    opponent: "Actor | None" = None
    cut: Cut | None = None
    reference_tokens: int | None = None
    answer_start: str = ""
    ranks: Ranks = ALONE

    def encode_prompt(self, prompt: Prompt, template: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a first prompt, for the encoder, or for a causal model with the start of the answer. `template`
        replaces the actor's own."""
        arguments = self.template if template is None else template
        if self.decoder_start:
            return source_ids(self.tokenizer, prompt, arguments, self.cut)
        return [*prompt_ids(self.tokenizer, prompt, arguments, self.cut), *self.start_ids]

    @cached_property
    def start_ids(self) -> list[int]:
        """The ids of `answer_start`."""
        return start_ids(self.tokenizer, self.answer_start, target=bool(self.decoder_start))

    @property
    def decoder_ids(self) -> tuple[int, ...]:
        """What an encoder-decoder's answer begins with: its first token, and the start that it is given."""
        return (*self.decoder_start, *self.start_ids)


class PromptCache:
    """Token ids of first prompts. Each distinct prompt is tokenized once, because a group shares its prompt."""

    def __init__(self, actor: Actor) -> None:
        self.encode = actor.encode_prompt
        self.ids: dict[tuple[str, str], list[int]] = {}

    def __call__(self, prompt: Prompt, template: Mapping[str, Any]) -> list[int]:
        text = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
        arguments = json.dumps(dict(template), sort_keys=True, default=repr) if template else ""
        key = (json.dumps([text, recipe_spans(prompt)]), arguments)
        if key not in self.ids:
            self.ids[key] = self.encode(prompt, template)
        return list(self.ids[key])
