"""Answers that the data gives, as turns: references to imitate, and rated answers to learn preferences from. Imports no
torch."""

from collections.abc import Sequence
from itertools import pairwise

from lmgym.core.errors import LmgymError
from lmgym.rollouts.players import Actor
from lmgym.text.chat import answer_ids, decoder_answer_ids
from lmgym.types import Episode, Example, Turn


def given_turn(example: Example, answer: str, actor: Actor) -> Turn:
    """An answer to the example's prompt as a turn, which nobody sampled: with the end of sequence, cut after
    `actor.reference_tokens` tokens.

    Example: given_turn(Example("a/0", "2+2="), "4", actor).action_ids -> [53, 2]
    """
    prompt, tokenizer, begun = actor.encode_prompt(example.prompt), actor.tokenizer, bool(actor.answer_start)
    if actor.decoder_start:
        ids = decoder_answer_ids(tokenizer, answer, begun)
        turn = Turn(list(actor.decoder_ids), ids, text=answer, source_ids=prompt, given=actor.answer_start)
    else:
        ids = answer_ids(tokenizer, example.prompt, answer, actor.template, begun)
        turn = Turn(prompt, ids, text=answer, given=actor.answer_start)
    turn.action_ids = turn.action_ids[: actor.reference_tokens]
    return turn


def rated_answers(prompts: Sequence[tuple[int, Example]], actor: Actor) -> list[Episode]:
    """An episode for each rated answer of each (group, example), its rating as its score. Raises LmgymError for an
    example without rated answers, and for two that differ in their ratings but not in their tokens.

    Example: a pair is a group of two
        >>> pair = Example("a/0", "2+2=", rated=(RatedAnswer("4", 1.0), RatedAnswer("5", 0.0)))
        >>> [(episode.text, episode.score) for episode in rated_answers([(0, pair)], actor)]
        [('4', 1.0), ('5', 0.0)]
    """
    episodes: list[Episode] = []
    for group, example in prompts:
        if not example.rated:
            raise LmgymError(
                f"example {example.id} has no rated answers to learn from; the task preferences reads pairs and marks "
                "from files (docs/tasks.md), and online_dpo makes pairs of sampled answers"
            )
        own = []
        for index, answer in enumerate(example.rated, start=len(episodes)):
            turn = given_turn(example, answer.text, actor)
            turn.reward = answer.rating
            own.append(Episode(example, group, index, [turn], version=actor.version, score=answer.rating))
        _check_different(own, actor)
        episodes += own
    return episodes


def _check_different(answers: Sequence[Episode], actor: Actor) -> None:
    """Raise LmgymError for equal tokens with different ratings."""
    ordered = sorted(answers, key=lambda episode: episode.turns[0].action_ids)
    for one, other in pairwise(ordered):
        if one.turns[0].action_ids == other.turns[0].action_ids and one.score != other.score:
            cut = actor.reference_tokens is not None and len(one.turns[0].action_ids) == actor.reference_tokens
            why = "; they differ behind policy.max_reference_tokens, so raise it" if cut else ""
            raise LmgymError(
                f"example {one.example.id}: two rated answers have the same tokens and the ratings {one.score:g} and "
                f"{other.score:g}{why}"
            )
