"""Prompts to scored episodes: `collect` runs environments against an engine, `demonstrate` takes the references
instead, `score` applies the rewards. The text world: no torch.

All live environments share one engine call per turn. What comes back depends on counts and episode order, never on
arrival time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmgym import seeds
from lmgym.engines.base import Completion, Engine, Request, Sampling
from lmgym.envs.base import Env
from lmgym.episode import Episode, Example, Message, Restriction, Turn
from lmgym.errors import LmgymError
from lmgym.rendering import (
    answer_ids,
    appended_ids,
    decode,
    decoder_answer_ids,
    messages_of,
    prompt_ids,
    source_ids,
)
from lmgym.rewards.base import Reward, evaluate


@dataclass(frozen=True)
class Speaker:
    """Who answers: an engine with the tokenizer of its policy and the keyword arguments of its chat template.

    An encoder-decoder's answers begin with `decoder_start`; a causal model has none. Under a `restriction` only some
    tokens are sampled.
    """

    engine: Engine
    tokenizer: Any
    template: Mapping[str, Any] = field(default_factory=dict)
    version: int = 0
    decoder_start: tuple[int, ...] = ()
    restriction: Restriction | None = None


@dataclass
class _Live:
    """One episode on its way."""

    episode: Episode
    env: Env
    key: int
    history: list[Message]
    ids: list[int]  # all tokens so far, the next turn's prompt included
    fresh: list[int]  # the part of them that no turn holds yet


def collect(
    prompts: Sequence[tuple[int, Example]],
    speaker: Speaker,
    sampling: Sampling,
    path: Sequence[int | str],
    make_env: Callable[[], Env],
) -> list[Episode]:
    """One episode per (group, example), in order; their random numbers are a function of `path` and their place.

    `path` is (seed, ..., step, draw). Environments of one group get the same seed. Raises LmgymError where a prompt
    does not fit the model or an environment fails.
    """
    keys = seeds.key(*path, "environment"), seeds.key(*path, "episode")
    live = [_begin(place, group, example, speaker, keys, make_env) for place, (group, example) in enumerate(prompts)]
    episodes = [one.episode for one in live]
    while live:
        completions = speaker.engine.generate([_request(one, speaker) for one in live], sampling, speaker.restriction)
        live = [
            one
            for one, completion in zip(live, completions, strict=True)
            if _advance(one, completion, speaker, sampling)
        ]
    for episode in episodes:
        episode.score = sum(turn.reward for turn in episode.turns)
    return episodes


def demonstrate(prompts: Sequence[tuple[int, Example]], speaker: Speaker, path: Sequence[int | str]) -> list[Episode]:
    """Episodes whose actions are reference answers (one drawn for each, where there are several), end of sequence
    included."""
    episodes = []
    for place, (group, example) in enumerate(prompts):
        if not example.references:
            raise LmgymError(
                f"example {example.id} has no reference answer to imitate; supervised training needs one for each"
            )
        answer = example.references[seeds.key(*path, place) % len(example.references)]
        turn = Turn(
            prompt_ids=prompt_ids(speaker.tokenizer, example.prompt, speaker.template),
            action_ids=answer_ids(speaker.tokenizer, example.prompt, answer, speaker.template),
            text=answer,
        )
        if speaker.decoder_start:
            turn = Turn(
                prompt_ids=list(speaker.decoder_start),
                action_ids=decoder_answer_ids(speaker.tokenizer, answer),
                text=answer,
                source_ids=source_ids(speaker.tokenizer, example.prompt, speaker.template),
            )
        episodes.append(Episode(example=example, group=group, index=place, turns=[turn], version=speaker.version))
    return episodes


def score(episodes: Sequence[Episode], rewards: Sequence[Reward], timeout: float = 60.0) -> None:
    """Fill in each episode's `parts` and `score`: environment rewards plus the weighted sum of the reward functions,
    paid on the last turn."""
    for reward in rewards:
        for episode, value in zip(episodes, evaluate(reward, list(episodes), timeout), strict=True):
            episode.parts[reward.name] = value
            episode.turns[-1].reward += reward.weight * value
    for episode in episodes:
        episode.score = sum(turn.reward for turn in episode.turns)


def groups_of(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Episodes by group, in order."""
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode)
    return list(groups.values())


def _begin(
    place: int, group: int, example: Example, speaker: Speaker, keys: tuple[int, int], make_env: Callable[[], Env]
) -> _Live:
    env = make_env()
    prompt = env.reset(example, seeds.key(group, parent=keys[0]))
    ids = (source_ids if speaker.decoder_start else prompt_ids)(speaker.tokenizer, prompt, speaker.template)
    if not ids:
        raise LmgymError(f"the prompt of example {example.id} has no token at all; give it some text")
    episode = Episode(example=example, group=group, index=place, version=speaker.version)
    return _Live(episode, env, seeds.key(place, parent=keys[1]), messages_of(prompt), ids, ids)


def _request(one: _Live, speaker: Speaker) -> Request:
    key = seeds.key(one.key, len(one.episode.turns))
    if speaker.decoder_start:
        return Request(speaker.decoder_start, key, source_ids=tuple(one.ids))
    return Request(tuple(one.ids), key)


def _advance(one: _Live, completion: Completion, speaker: Speaker, sampling: Sampling) -> bool:
    """Add the sampled turn, let the environment answer; True if the episode goes on."""
    text = decode(speaker.tokenizer, completion.ids)
    turn = Turn(one.fresh, completion.ids, completion.logprobs, text, completion.stop, sampling.min_new_tokens)
    turn.kept = completion.kept
    if speaker.decoder_start:  # the encoder reads the whole conversation anew
        turn.prompt_ids, turn.source_ids, turn.restart = list(speaker.decoder_start), one.ids, bool(one.episode.turns)
    one.episode.turns.append(turn)
    step = one.env.step(text)
    turn.reward = step.reward
    cut = completion.stop in ("length", "context")
    one.episode.terminated = step.terminated and not cut
    if step.terminated or step.truncated or completion.stop == "context":
        return False
    one.fresh = appended_ids(speaker.tokenizer, one.history, step.messages, completion.ids[-1], speaker.template)
    one.history = [*one.history, {"role": "assistant", "content": text}, *step.messages]
    one.ids = one.ids + completion.ids + one.fresh
    if speaker.engine.context is not None and len(one.ids) >= speaker.engine.context:
        turn.stop = "context"  # no room for another turn
        return False
    return True
