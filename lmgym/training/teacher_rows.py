"""The batch of a step's answers, with what the teacher reads in place of its rows: other prompts, or other tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lmgym.batch import Batch
from lmgym.rollouts.hints import hinted_episodes
from lmgym.rollouts.other_tokenizer import in_other_tokens
from lmgym.training.stage import StageRun
from lmgym.types import Episode


def with_teacher_rows(
    stage: StageRun, episodes: Sequence[Episode], build: Callable[..., Batch], weights: Mapping[str, float] | None
) -> Batch:
    """The batch that `build` (`collate`, with the step's settings) makes of these episodes. `hinted` is what the
    teacher reads, if not the batch itself; `weights` are those of the rewards, if the algorithm wants their parts.

    Example: with_teacher_rows(stage, episodes, partial(collate, pad_id=0), None).hinted"""
    hint, context, pairs = stage.algorithm.requirements.hint, stage.teacher_context, stage.token_pairs
    if pairs is not None:
        teacher = stage.run.policy.teacher
        assert teacher is not None  # `begin_stage` makes the pairs of its tokens
        read = in_other_tokens(episodes, pairs, replace(stage.actor, tokenizer=teacher.tokenizer), context, hint)
        batch = build(episodes, weights=weights, spans=read.policy_spans)
        return batch.replace(hinted=build(read.episodes, pad_id=teacher.pad_id, spans=read.teacher_spans))
    batch = build(episodes, weights=weights)
    if hint is None:
        return batch
    return batch.replace(hinted=build(hinted_episodes(episodes, hint, stage.actor, context)))
