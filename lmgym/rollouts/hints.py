"""Prompts with a hint, for a teacher that knows more than the policy that it teaches. Imports no torch."""

import re
from collections.abc import Sequence
from dataclasses import replace

from lmgym.core.errors import LmgymError
from lmgym.rollouts.actor import Actor, PromptCache
from lmgym.types import BarePrompt, Episode, Example, Prompt, RecipeText, pictures_of

PLACE = re.compile(r"\{(\w+)\}")


def hinted_prompt(hint: str, example: Example) -> Prompt:
    """The prompt that the teacher gets: the hint, with each name in braces replaced by the example's own text.

    {prompt} is the example's prompt; in a chat, the last message of the user, which is replaced. {reference} is the
    first reference. Any other name is an entry of `meta`.

    Raises LmgymError for a name that the example does not have.

    Example: hinted_prompt("It is {reference}. {prompt}", Example("a/0", "2+2=", references=("4",)))
    -> 'It is 4. 2+2='"""
    if isinstance(example.prompt, str):
        filled, given = _filled(hint, example, example.prompt), example.prompt
        if not isinstance(given, BarePrompt):
            return filled
        return BarePrompt(filled, getattr(filled, "spans", ()), given.form, pictures_of(filled))
    messages = list(example.prompt)
    last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise LmgymError(f"algorithm.hint: example {example.id} has no message of a user to put it into")
    messages[last] = {**messages[last], "content": _filled(hint, example, messages[last]["content"])}
    return messages


def hinted_episodes(episodes: Sequence[Episode], hint: str, actor: Actor, context: int | None) -> list[Episode]:
    """The episodes as a teacher reads them: the same actions behind the prompts with the hint. Nothing is cut.

    Raises LmgymError for an episode of several turns, and if prompt and answer do not fit into the teacher's `context`.
    """
    encode, hinted = PromptCache(replace(actor, cut=None)), []
    for episode in episodes:
        if len(episode.turns) != 1:
            raise LmgymError(
                f"algorithm.hint: example {episode.example.id} was answered in {len(episode.turns)} turns; a hint is "
                "for tasks of one prompt and one answer"
            )
        [turn] = episode.turns
        ids = encode(hinted_prompt(hint, episode.example), actor.template)
        length = len(ids) if turn.source_ids else len(ids) + len(turn.action_ids)
        if context is not None and length > context:
            raise LmgymError(
                f"algorithm.hint: with it example {episode.example.id} has {length} tokens, and the teacher reads "
                f"{context}; shorten the hint, or lower sampling.max_new_tokens"
            )
        told = replace(turn, source_ids=ids) if turn.source_ids else replace(turn, prompt_ids=ids)
        hinted.append(replace(episode, turns=[told]))
    return hinted


def _filled(hint: str, example: Example, prompt: str) -> str:
    pieces = enumerate(PLACE.split(hint))  # texts of the recipe, and between them names
    return RecipeText.join(*(_known(piece, example, prompt) if n % 2 else RecipeText(piece) for n, piece in pieces))


def _known(name: str, example: Example, prompt: str) -> str:
    if name == "prompt":
        return prompt
    if name == "reference" and example.references:
        return str(example.references[0])
    if name in example.meta:
        return str(example.meta[name])
    known = ["prompt", *["reference"][: len(example.references)], *sorted(example.meta)]
    raise LmgymError(f"algorithm.hint: example {example.id} has no '{name}'; it has {', '.join(known)}")
