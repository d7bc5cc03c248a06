"""Answers that the data gives, as turns: references to imitate, rated answers to learn preferences from, and answers in
labelled steps. Imports no torch."""

from collections.abc import Sequence
from itertools import pairwise

from lmgym.core.errors import LmgymError, represent
from lmgym.envs.base import Step
from lmgym.rollouts.actor import Actor, PromptCache
from lmgym.rollouts.players import PlayerState
from lmgym.text.chat import answer_ids, decoder_answer_ids, messages_of
from lmgym.text.steps import step_ids
from lmgym.types import Episode, Example, Turn


def given_turn(example: Example, answer: str, actor: Actor) -> Turn:
    """An answer to the example's prompt as a turn, which nobody sampled: with the end of sequence, cut after
    `actor.reference_tokens` tokens.

    Example: given_turn(Example("a/0", "2+2="), "4", actor).action_ids -> [53, 2]"""
    prompt, tokenizer, start = actor.encode_prompt(example.prompt), actor.tokenizer, actor.answer_start
    if actor.decoder_start:
        ids = decoder_answer_ids(tokenizer, answer, bool(start))
        turn = Turn(list(actor.decoder_ids), ids, text=answer, source_ids=prompt, given=start)
    else:
        ids = answer_ids(tokenizer, example.prompt, answer, actor.template, start)
        turn = Turn(prompt, ids, text=answer, given=start)
    turn.action_ids = turn.action_ids[: actor.reference_tokens]
    return turn


def given_turns(example: Example, answer: str, actor: Actor) -> list[Turn]:
    """A conversation that the data gives as turns, one for each message of the assistant in the prompt and the answer
    as the last: tokenized as a rollout's are, so that each row is what the policy would have read and written. Raises
    LmgymError for two messages of the assistant with nothing between, and for a turn but the last that is longer than
    `actor.reference_tokens`.

    Example: two turns, which are one row
        >>> asked = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"},
        ...          {"role": "user", "content": "and 1 more?"}]
        >>> [turn.text for turn in given_turns(Example("a/0", asked), "5", actor)]
        ['4', '5']
    """
    messages = messages_of(example.prompt)
    ends = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    begins = [0, *(end + 1 for end in ends)]
    parts = [messages[begin:end] for begin, end in zip(begins, [*ends, len(messages)], strict=True)]
    if not ends:
        return [given_turn(example, answer, actor)]
    if not all(parts):
        raise LmgymError(
            f"example {example.id}: with algorithm.turns: all something must stand before each message of the "
            "assistant; join two that follow each other"
        )
    # Play the conversation, as a rollout would.
    player, encode = PlayerState(Episode(example, 0, 0), actor, 0, (), actor.template), PromptCache(actor)
    player.begin(parts[0], encode)
    for text, part in zip([*(messages[end]["content"] for end in ends), answer], [*parts[1:], []], strict=True):
        player.add_turn(player.tokenize_demonstration(text), text)
        if part:
            player.observe(Step(part), encode)
    # Cut the last answer.
    turns, most = player.episode.turns, actor.reference_tokens
    if most is not None and any(len(turn.action_ids) > most for turn in turns[:-1]):
        raise LmgymError(
            f"example {example.id}: an earlier turn is longer than policy.max_reference_tokens ({most}), and only the "
            "last one can be cut; raise it, or write algorithm.turns: last"
        )
    turns[-1].action_ids = turns[-1].action_ids[:most]
    return turns


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


def labelled_steps(prompts: Sequence[tuple[int, Example]], actor: Actor, separator: str) -> list[Episode]:
    """An episode for each (group, example): a turn for each step, which ends with the separator and earns 1 if the step
    is right, else 0. There is no end of sequence: a model that judges a step does not know whether it is the last.

    Raises LmgymError as `check_labelled` does.

    Example: two steps of an answer
        >>> one = Example("a/0", "2+2+1=", steps=(LabelledStep("2+2=4", True), LabelledStep("4+1=6", False)))
        >>> [turn.reward for turn in labelled_steps([(0, one)], actor, "\\n")[0].turns]
        [1.0, 0.0]
    """
    episodes: list[Episode] = []
    for group, example in prompts:
        check_labelled(example, separator)
        turns, given = list[Turn](), actor.encode_prompt(example.prompt)
        for step in example.steps:
            ids = step_ids(actor.tokenizer, step.text, separator)
            turns.append(Turn(given, ids, text=step.text, reward=float(step.right), continuation=separator))
            given = []
        turns[-1].continuation = None
        score = sum(turn.reward for turn in turns)
        episodes.append(Episode(example, group, len(episodes), turns, version=actor.version, score=score))
    return episodes


def check_labelled(example: Example, separator: str) -> None:
    """Raise LmgymError for an example without steps, and for a step that is blank or holds the separator: an answer
    would be cut there.

    Example: check_labelled(Example("a/0", "2+2=", steps=(LabelledStep("2+2\\n=4", True),)), "\\n") raises"""
    if not example.steps:
        raise LmgymError(
            f"example {example.id} has no labelled steps to learn from; the task step_labels reads them from files "
            "(docs/tasks.md)"
        )
    for step in example.steps:
        if not step.text.strip():
            raise LmgymError(f"example {example.id} has an empty step; remove it, or give it a text")
        if separator in step.text.strip():
            raise LmgymError(
                f"example {example.id}: the step {represent(step.text)} holds the separator {represent(separator)}; "
                'choose another one, such as algorithm.separator: "\\n\\n"'
            )


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
