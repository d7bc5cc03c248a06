"""Prompts to scored episodes: `collect` runs environments against an engine, `demonstrate` takes references or
demonstrators instead, `score` applies the rewards. The text world: no torch.

All live environments share one engine call per turn, and finished ones are replaced by waiting ones. What comes back
depends on counts and episode order, never on arrival time.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lmgym import seeds
from lmgym.engines.base import Completion, Engine, Request, Sampling
from lmgym.envs.base import Env, Step
from lmgym.envs.side_by_side import Broken, Envs, InProcess
from lmgym.envs.single_turn import SingleTurn
from lmgym.episode import Episode, Example, Message, Restriction, Turn
from lmgym.errors import LmgymError
from lmgym.rendering import (
    answer_ids,
    appended_ids,
    continued_ids,
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
    key: int
    stop: tuple[str, ...]
    template: Mapping[str, Any]
    history: list[Message]  # before the message that the policy is writing
    ids: list[int]  # all tokens so far, the next turn's prompt included
    fresh: list[int]  # the part of them that no turn holds yet
    said: str = ""  # what stands already in the message that the policy is writing
    restarted: bool = False


class _Reader:
    """First prompts to ids, each distinct one rendered once: a group shares its prompt."""

    def __init__(self, speaker: Speaker) -> None:
        self.tokenizer, self.read = speaker.tokenizer, source_ids if speaker.decoder_start else prompt_ids
        self.known: dict[Any, list[int]] = {}

    def __call__(self, prompt: str | Sequence[Message], template: Mapping[str, Any]) -> list[int]:
        said = prompt if isinstance(prompt, str) else json.dumps([dict(message) for message in prompt])
        key = (said, json.dumps(dict(template), sort_keys=True, default=repr) if template else "")
        if key not in self.known:
            self.known[key] = self.read(self.tokenizer, prompt, template)
        return list(self.known[key])


def collect(
    prompts: Sequence[tuple[int, Example]],
    speaker: Speaker,
    sampling: Sampling,
    path: Sequence[int | str],
    envs: Envs | Callable[[], Env] = SingleTurn,
) -> list[Episode]:
    """One episode per (group, example), in order; their random numbers are a function of `path` and their place.

    `path` is (seed, ..., step, draw). Environments of one group get the same seed; `envs` are many behind one call, or
    a function that builds one. Where they have more than one turn, as many as the engine has rows are alive at a time.
    An environment that fails ends its own episode (`Episode.broken`). Raises LmgymError where a prompt does not fit the
    model, or all environments fail.

    Example: collect(list(enumerate(examples)), speaker, Sampling(), (0, "step", 3, 0), InProcess(HigherOrLower))
    """
    with _environments(envs, speaker) as (envs, width):
        keys = seeds.key(*path, "environment"), seeds.key(*path, "episode")
        episodes, reader = _unplayed(prompts, speaker), _Reader(speaker)
        waiting, live = deque(episodes), list[_Live]()
        while waiting or live:
            count = min(len(waiting), width - len(live)) if width else len(waiting)
            live += _begin([waiting.popleft() for _ in range(count)], speaker, keys, envs, reader)
            requests = [_request(one, speaker, one_turn=width is None) for one in live]
            completions = speaker.engine.generate(requests, sampling, speaker.restriction)
            for one, completion in zip(live, completions, strict=True):
                _say(one, completion, decode(speaker.tokenizer, completion.ids), speaker, sampling.min_new_tokens)
            turns = [one.episode.turns[-1] for one in live]
            steps = envs.step([(one.episode.index, t.text, t.stop) for one, t in zip(live, turns, strict=True)])
            goes_on = [_hear(one, step, speaker, reader) for one, step in zip(live, steps, strict=True)]
            over = [one.episode.index for one, more in zip(live, goes_on, strict=True) if not more]
            envs.end(over)
            speaker.engine.forget([one.key for one, more in zip(live, goes_on, strict=True) if not more])
            live = [one for one, more in zip(live, goes_on, strict=True) if more]
    return _finished(episodes)


def demonstrate(
    prompts: Sequence[tuple[int, Example]],
    speaker: Speaker,
    path: Sequence[int | str],
    envs: Envs | Callable[[], Env] = SingleTurn,
) -> list[Episode]:
    """Episodes that nobody sampled, end of sequence included: with one turn, reference answers (one drawn for each
    example, where there are several); else what the environments' own `demonstrate` says, turn by turn."""
    with _environments(envs, speaker) as (envs, width):
        if width is not None:
            return _played(prompts, speaker, path, envs)
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
            if episode.turns:  # else its environment failed at once
                episode.turns[-1].reward += reward.weight * value
    for episode in episodes:
        episode.score = sum(turn.reward for turn in episode.turns)


def groups_of(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Episodes by group, in order."""
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode)
    return list(groups.values())


def _finished(episodes: list[Episode]) -> list[Episode]:
    """The episodes with their scores. Raises LmgymError where none of them came about."""
    if episodes and all(episode.broken for episode in episodes):
        raise LmgymError(f"every environment of this rollout failed; the first one: {episodes[0].broken}")
    for episode in episodes:
        episode.score = sum(turn.reward for turn in episode.turns)
    return episodes


@contextmanager
def _environments(envs: Envs | Callable[[], Env], speaker: Speaker) -> Iterator[tuple[Envs, int | None]]:
    """The environments side by side, and how many may be alive at a time: all, where each has one turn."""
    one_turn = envs is SingleTurn or getattr(envs, "make_env", None) is SingleTurn
    together: Any = envs if hasattr(envs, "begin") else InProcess(envs)  # type: ignore[arg-type]
    yield together, None if one_turn else speaker.engine.rows


def _unplayed(prompts: Sequence[tuple[int, Example]], speaker: Speaker) -> list[Episode]:
    return [Episode(example, group, place, version=speaker.version) for place, (group, example) in enumerate(prompts)]


def _begin(
    episodes: list[Episode], speaker: Speaker, keys: tuple[int, int], envs: Envs, reader: _Reader
) -> list[_Live]:
    """Reset an environment for each episode; those that fail are broken and not alive."""
    items = [(e.index, e.example, seeds.key(e.group, e.example.id, parent=keys[0])) for e in episodes]
    live = []
    for episode, found in zip(episodes, envs.begin(items) if items else [], strict=True):
        if isinstance(found, Broken):
            episode.broken, episode.terminated, episode.trains = found.message, False, False
            envs.end([episode.index])
            continue
        template = {**speaker.template, **found.template}
        ids = reader(found.prompt, template)
        if not ids:
            raise LmgymError(f"the prompt of example {episode.example.id} has no token at all; give it some text")
        key = seeds.key(episode.index, parent=keys[1])
        live.append(_Live(episode, key, found.stop, template, messages_of(found.prompt), ids, ids))
    return live


def _played(
    prompts: Sequence[tuple[int, Example]], speaker: Speaker, path: Sequence[int | str], envs: Envs
) -> list[Episode]:
    """Episodes in which the environments' own demonstrators speak."""
    keys = seeds.key(*path, "environment"), seeds.key(*path, "episode")
    episodes, reader = _unplayed(prompts, speaker), _Reader(speaker)
    live = _begin(episodes, speaker, keys, envs, reader)
    while live:
        said = envs.demonstrate([one.episode.index for one in live])
        spoken = [(one, text) for one, text in zip(live, said, strict=True) if isinstance(text, str)]
        for one, text in spoken:
            _say(one, _spoken(one, text, speaker), text, speaker)
        turns = [(one.episode.index, text, one.episode.turns[-1].stop) for one, text in spoken]
        answers = iter(envs.step(turns))
        steps = [next(answers) if isinstance(text, str) else text for text in said]
        goes_on = [_hear(one, step, speaker, reader) for one, step in zip(live, steps, strict=True)]
        envs.end([one.episode.index for one, more in zip(live, goes_on, strict=True) if not more])
        live = [one for one, more in zip(live, goes_on, strict=True) if more]
    return _finished(episodes)


def _spoken(one: _Live, text: str, speaker: Speaker) -> Completion:
    """A demonstrator's turn as ids, its end included: the end of sequence, or the string that ends it."""
    ends = [stop for stop in one.stop if text.endswith(stop)]
    tokenizer = speaker.tokenizer
    if speaker.decoder_start:
        ids = decoder_answer_ids(tokenizer, text)
    elif one.said or (one.episode.turns and not one.restarted):
        ids = [*continued_ids(tokenizer, text), tokenizer.eos_token_id]
    else:
        ids = answer_ids(tokenizer, one.history, text, one.template)
    return Completion(ids[:-1], [], "stop") if ends else Completion(ids, [], "eos")


def _request(one: _Live, speaker: Speaker, one_turn: bool) -> Request:
    key = seeds.key(one.key, len(one.episode.turns))
    if speaker.decoder_start:
        return Request(speaker.decoder_start, key, source_ids=tuple(one.ids), stop=one.stop)
    return Request(tuple(one.ids), key, stop=one.stop, conversation=None if one_turn else one.key)


def _say(one: _Live, completion: Completion, text: str, speaker: Speaker, minimum: int = 0) -> None:
    """Add a turn."""
    turn = Turn(one.fresh, completion.ids, completion.logprobs, text, completion.stop, minimum)
    turn.kept, turn.restart = completion.kept, one.restarted
    if speaker.decoder_start:  # the encoder reads the whole conversation anew
        turn.prompt_ids, turn.source_ids, turn.restart = list(speaker.decoder_start), one.ids, bool(one.episode.turns)
    one.episode.turns.append(turn)


def _hear(one: _Live, step: Step | Broken, speaker: Speaker, reader: _Reader) -> bool:
    """Take what the environment answers; True if the episode goes on."""
    episode, turn = one.episode, one.episode.turns[-1]
    if isinstance(step, Broken):
        episode.broken, episode.terminated, episode.trains = step.message, False, False
        return False
    turn.reward, turn.unfinished, turn.continuation = float(step.reward), step.unfinished, step.continuation
    episode.terminated = step.terminated
    if step.over or turn.stop == "context":
        return False
    one.said += turn.text
    one.restarted = step.restart
    if step.restart:
        one.ids = reader(step.messages, one.template)
        one.history, one.fresh, one.said = messages_of(step.messages), one.ids, ""
    elif step.continuation is not None:
        if speaker.decoder_start:
            _refuse_continuation()
        one.fresh, one.said = continued_ids(speaker.tokenizer, step.continuation), one.said + step.continuation
        one.ids = one.ids + turn.action_ids + one.fresh
    else:
        last = turn.action_ids[-1]
        one.fresh = appended_ids(speaker.tokenizer, one.history, step.messages, last, one.template)
        one.history = [*one.history, {"role": "assistant", "content": one.said}, *step.messages]
        one.ids, one.said = one.ids + turn.action_ids + one.fresh, ""
    if speaker.engine.context is not None and len(one.ids) >= speaker.engine.context:
        turn.stop = "context"  # no room for another turn
        return False
    return True


def _refuse_continuation() -> NoReturn:
    raise LmgymError(
        "this environment lets the policy go on in the same message, which an encoder-decoder cannot do here; take a "
        "causal model"
    )
