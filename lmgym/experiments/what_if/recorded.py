"""The answers of a step as a run has recorded them: Episodes made of traces/, in place of sampling."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmgym.core.errors import LmgymError, describe
from lmgym.logs.traces.files import TRACES
from lmgym.logs.traces.trace import TraceEpisode, read_episode, read_step, shards
from lmgym.rollouts.play import share_of
from lmgym.rollouts.rollout import apply_rewards, groups_of
from lmgym.training.loop import mark_selected, selection
from lmgym.training.stage import StageRun
from lmgym.training.unjudged import usable_groups
from lmgym.types import Episode, Example, Turn


def are_recorded(folder: Path, stage: StageRun, steps: Sequence[int]) -> bool:
    """True if traces/ holds all that the answers of these steps were (`logs.traces: all`): of one question and one
    answer each, from the whole vocabulary, each paid at its end. Else they have to be sampled again."""
    config, algorithm = stage.config, stage.algorithm
    required = algorithm.requirements
    if not stage.source.samples or stage.source.lag or config.is_played or config.sampling.truncates:
        return False
    if required.rival is not None or required.given_share or algorithm.restriction is not None:
        return False
    if any(reward.normalise or reward.by_token for reward in stage.rewards):
        return False
    there = {step for index, step in shards(folder) if index == stage.index}
    for step in steps:
        if step not in there:
            return False
        with as_written(folder, step):
            table = read_step(folder, stage.index, step).episodes
            if not all(table["kept"]) or len({*table["version"]}) != 1 or any(table["error"]):
                return False
    return True


@contextmanager
def as_written(folder: Path, step: int) -> Iterator[None]:
    """Turns what the body finds wrong with a record into one sentence."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise LmgymError(
            f"{folder / TRACES}: step {step + 1} is not as lmgym writes it ({describe(error, 100)}); delete its file, "
            "and the answers are sampled again"
        ) from error


def recorded_episodes(folder: Path, stage: StageRun, step: int, judge: bool) -> list[Episode]:
    """The answers of a step as they were recorded, selected by the stage's algorithm. `judge`: its rewards are asked
    about them again; else they have the scores that they had.

    Raises LmgymError if the data are no longer those of the run, and for a damaged record."""
    with as_written(folder, step):
        indices = read_step(folder, stage.index, step).episodes["index"]
        kept = [read_episode(folder, stage.index, step, index) for index in indices]
        examples = _examples(stage, step, kept)
        episodes = [_episode(one, examples[one.group], judge) for one in kept]
    if judge:
        config = stage.run.config
        most = share_of(config.rewards_failed, len(episodes))
        apply_rewards(episodes, stage.rewards, config.reward_timeout, stage.run.policy.tokenizer, most)
    groups = groups_of(episodes)
    usable = usable_groups(groups, stage.algorithm.requirements)
    selected, _ = selection(stage.algorithm, usable, stage.config.prompts_per_step)
    stage.stream.observe(episodes)
    if not any(selected):
        raise LmgymError(f"step {step + 1}: the changed recipe rejects every group of the recorded answers")
    return mark_selected(groups, selected)


def _examples(stage: StageRun, step: int, kept: Sequence[TraceEpisode]) -> dict[int, Example]:
    """The example of each group, from the data: what a record says of `meta` is not all of it."""
    wanted = {one.group: one.example["id"] for one in kept}
    found: dict[int, Example] = {}
    for number in range(stage.config.max_draws):
        if len(found) < len(wanted):
            prompts = stage.draw(step, number, first_group=len(found)).prompts
            found |= {group: example for group, example in prompts if group in wanted}
    for group, name in wanted.items():
        if group not in found or found[group].id != name:
            raise LmgymError(
                f"step {step + 1} had the example '{name}', and the data as they are now give another one in its "
                "place; put back the data that the run has trained on"
            )
    return found


def _episode(kept: TraceEpisode, example: Example, judge: bool) -> Episode:
    (row,), (turn,) = kept.rows, kept.turns
    first = int(row.actions[0])
    if row.tokens.min() < 0 or row.actions.tolist() != list(range(first, len(row.tokens))):
        raise ValueError("tokens or actions are out of their bounds")
    own = Turn(
        prompt_ids=row.tokens[:first].tolist(),
        action_ids=row.tokens[row.actions].tolist(),
        logprobs=row.columns["logprobs_sampler"].tolist(),
        source_ids=[] if row.source is None else row.source.tolist(),
        text=turn.text,
        stop=turn.stop,
        given=turn.given,
        min_new_tokens=turn.min_new_tokens,
        reward=0.0 if judge else turn.reward,
    )
    return Episode(
        example,
        kept.group,
        kept.index,
        [own],
        terminated=kept.terminated,
        version=kept.version,
        reward_components={} if judge else dict(kept.reward_components),
        score=kept.score or 0.0,
        judged=kept.score is not None,
        messages=list(kept.messages),
        baseline=kept.baseline,
    )
