"""Texts beside the policy's sampled answers: the greedy answer to a prompt, a rival's, and references of the data."""

from collections.abc import Sequence
from dataclasses import replace

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.inference.base import Sampling
from lmgym.rollouts.play import play
from lmgym.rollouts.players import Actor
from lmgym.rollouts.rollout import demonstrate, groups_of
from lmgym.training.setup import make_actor
from lmgym.training.stage import StageRun
from lmgym.types import Episode, Example

Numbered = list[tuple[int, Example]]  # the group's number and its example


def repeated(numbered: Numbered, times: int) -> Numbered:
    """Each prompt so many times, the answers of a group together. Example: repeated([(0, example)], 2)"""
    return [one for one in numbered for _ in range(times)]


def answered_and_given(numbered: Numbered, share: float, path: Sequence[int | str]) -> tuple[Numbered, Numbered]:
    """The prompts that the policy answers, and those (on average `share` of all) whose references are taken: drawn for
    each by the path and its number, whatever else the step holds.

    Example: answered_and_given([(0, example)], 0.0, (0, "step", 3, 0)) -> ([(0, example)], [])
    """
    if not share:
        return numbered, []
    drawn = seeds.uniforms([seeds.key(*path, "given", number) for number, _ in numbered], 0, 1)[:, 0]
    given = [one for one, uniform in zip(numbered, drawn.tolist(), strict=True) if uniform < share]
    return [one for one, uniform in zip(numbered, drawn.tolist(), strict=True) if uniform >= share], given


def with_given(
    stage: StageRun, episodes: Sequence[Episode], given: Numbered, path: tuple[int | str, ...]
) -> list[Episode]:
    """The sampled episodes and those of references, in the order of their groups. Log-probabilities at sampling time
    are taken off: a batch has them for all its tokens or for none."""
    references = demonstrate(repeated(given, stage.algorithm.group_size), stage.actor, path, stage.envs)
    whole = [*map(without_logprobs, episodes), *(replace(one, by="data") for one in references)]
    return sorted(whole, key=lambda episode: episode.group)


def with_rival(stage: StageRun, episodes: Sequence[Episode], path: tuple[int | str, ...]) -> list[Episode]:
    """The episodes, and after each group the rival's answer to its prompt, if that trains; else with its score as their
    `baseline`."""
    rival = stage.algorithm.requirements.rival
    assert rival is not None
    answers = one_answer(stage, episodes, rival_actor(stage, rival.share), stage.config.sampling, (*path, "rival"))
    if not rival.trains:
        return list(episodes)
    found = list[Episode]()
    for group, answer in zip(groups_of(episodes), answers, strict=True):
        found += map(without_logprobs, (*group, replace(answer, by="rival")))
    return found


def rival_actor(stage: StageRun, share: float) -> Actor:
    """Who samples from the mixture of the policy and its frozen copy. Raises LmgymError for an engine that cannot."""
    copied = stage.frozen_models.copies["rival"]
    if share == 1:
        return make_actor(stage.run.config, copied)
    engine = stage.run.engine
    if not hasattr(engine, "mixed"):
        raise LmgymError(
            f"engine.name: {stage.run.config.engine.name} cannot sample from a mixture of two models, which "
            "algorithm.mixture asks for; write sampler, or mixture: 1.0"
        )
    return replace(stage.actor, engine=engine.mixed(copied, share))


def add_greedy_baseline(stage: StageRun, episodes: Sequence[Episode], path: tuple[int | str, ...]) -> None:
    """Score the greedy answer to each group's prompt and write it to the group's episodes as their `baseline`."""
    one_answer(stage, episodes, stage.actor, replace(stage.config.sampling, temperature=0.0), (*path, "greedy"))


def one_answer(
    stage: StageRun, episodes: Sequence[Episode], actor: Actor, sampling: Sampling, path: tuple[int | str, ...]
) -> list[Episode]:
    """An answer of the actor to each group's prompt, scored; its score is the `baseline` of the group's episodes."""
    groups = groups_of(episodes)
    prompts = [(group[0].group, group[0].example) for group in groups]
    answers = play(prompts, actor, sampling, path, stage.envs, stage.rewards, stage.run.config.reward_timeout)
    if len(answers) != len(groups):
        raise LmgymError(
            "the baseline is one more answer to the group's prompt, and a game of several players has none of its own; "
            "take another algorithm or baseline"
        )
    for group, answer in zip(groups, answers, strict=True):
        for episode in group:
            episode.baseline = answer.score
    return answers


def without_logprobs(episode: Episode) -> Episode:
    """The episode as one that nobody has sampled."""
    return replace(episode, turns=[replace(turn, logprobs=[]) for turn in episode.turns])
