"""Texts beside the policy's sampled answers: the greedy answer to a prompt, a rival's, and references of the data."""

from collections.abc import Sequence
from dataclasses import replace

from lmgym.core.errors import LmgymError
from lmgym.rewards.normalisation import Moments, normalise
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.play import Draw, played_by_all
from lmgym.rollouts.rollout import demonstrate, groups_of
from lmgym.training.setup import actor_of
from lmgym.training.stage import StageRun
from lmgym.types import Episode


def with_given(episodes: Sequence[Episode], draw: Draw) -> list[Episode]:
    """The sampled episodes and the references of a draw's prompts, in the order of their groups. Log-probabilities at
    sampling time are taken off: a batch has them for all its tokens or for none."""
    references = demonstrate(draw.prompts, draw.actor, draw.key, draw.envs)
    whole = [*map(without_logprobs, episodes), *(replace(one, by="data") for one in references)]
    return sorted(whole, key=lambda episode: episode.group)


def with_rival(stage: StageRun, episodes: Sequence[Episode], draw: Draw) -> list[Episode]:
    """The episodes, and after each group the rival's answer to its prompt, if that trains; else with its score as their
    `baseline`."""
    rival = stage.algorithm.requirements.rival
    assert rival is not None
    beside = replace(draw, actor=rival_actor(stage, rival.share), key=(*draw.key, "rival"))
    answers = one_answer(episodes, beside, stage.moments)
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
        return actor_of(stage.run.config, copied)
    engine = stage.run.engine
    if not hasattr(engine, "mixed"):
        raise LmgymError(
            f"engine.name: {stage.run.config.engine.name} cannot sample from a mixture of two models, which "
            "algorithm.mixture asks for; write sampler without engine.unit, or mixture: 1.0"
        )
    return replace(stage.actor, engine=engine.mixed(copied, share))


def add_greedy_baseline(episodes: Sequence[Episode], draw: Draw, moments: dict[str, Moments]) -> None:
    """Score the greedy answer to each group's prompt and write it to the group's episodes as their `baseline`."""
    greedy = replace(draw, sampling=replace(draw.sampling, temperature=0.0), key=(*draw.key, "greedy"))
    one_answer(episodes, greedy, moments)


def one_answer(episodes: Sequence[Episode], draw: Draw, moments: dict[str, Moments]) -> list[Episode]:
    """An answer to each group's prompt, scored; its score is the `baseline` of the group's episodes, which have none if
    it failed or was not judged, or if its game was over before it had a turn. The running estimates of rewards that are
    normalised do not learn from it."""
    groups = groups_of(episodes)
    prompts = [(group[0].group, group[0].example) for group in groups]
    answers = played_by_all(replace(draw, prompts=prompts))
    normalise(answers, draw.rewards, moments, learn=False)
    if len(answers) != len(groups):
        raise LmgymError(
            "the baseline is one more answer to the group's prompt, and a game of several players has none of its own; "
            "take another algorithm or baseline"
        )
    for group, answer in zip(groups, answers, strict=True):
        for episode in group:
            episode.baseline = answer.score if answer.turns and answer.judged and not answer.error else None
    return answers


def without_logprobs(episode: Episode) -> Episode:
    """The episode as one that nobody has sampled."""
    return replace(episode, turns=[replace(turn, logprobs=[]) for turn in episode.turns])
