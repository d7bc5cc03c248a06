"""`lmgym generate`: a model answers a user's own prompts, which read as the training's prompts did."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.files import nearby, read_bytes, read_text
from lmgym.envs.placement import make_envs
from lmgym.experiments.evaluations import with_samples
from lmgym.experiments.named_models import NamedModel
from lmgym.pictures.store import MOST_BYTES, current_store
from lmgym.rollouts.rollout import collect, groups_of
from lmgym.tasks.base import Prompt, examples_from_prompts
from lmgym.tasks.mixture import member_section
from lmgym.tasks.rows.formats import SUFFIXES, rows_of
from lmgym.tasks.rows.pictures import RowPictures
from lmgym.tasks.rows.reader import Reader
from lmgym.tasks.rows.unpacked import kind_of
from lmgym.text.pictures import decoded
from lmgym.training.planning.preflight import check_cut, cut_prompts
from lmgym.training.setup import actor_of
from lmgym.types import Episode, Message, RecipeText, picture_text


@dataclass(frozen=True)
class Answered:
    """A prompt as the user gave it, the full prompt as the model read it (control tokens spelled out), and the answers
    with the reason why each ended: "eos", "stop", "length" or "context". In an environment of several turns an answer
    is the model's last message, and `conversations` have all messages.

    Example: Answered("2+2=", "<s>2+2=", answers=["4"], stops=["eos"], conversations=[])"""

    prompt: Prompt
    full_prompt: str
    answers: list[str]
    stops: list[str]
    conversations: list[list[Message]]  # of answers of several turns; else empty


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: one a line, blank lines skipped; of rows (.jsonl, .parquet ...), each row's `prompt` (a
    text, or a list of chat messages), with the pictures of its column `images` or `image`. Raises LmgymError for a file
    that cannot be read or holds no prompt."""
    if kind_of(path) in SUFFIXES:
        reader = Reader.of("prompt", None, None, {})
        prompts: list[Prompt] = [reader.prompt_of(row) for row in rows_of(path)]
    else:
        prompts = list(lines_of_prompts(_text_of(path)))
    if not prompts:
        raise LmgymError(f"{path} holds no prompt; it should have one a line")
    return prompts


def with_pictures(prompts: Sequence[Prompt], files: Sequence[Path]) -> list[Prompt]:
    """The prompts, each behind the pictures in these files; of messages, in the user's first one. Raises LmgymError,
    naming the file, for one that is no picture.

    Example: with_pictures(["How many circles are there?"], [Path("shapes.png")])"""
    shown = list[RecipeText]()
    for path in files:
        try:
            shown.append(picture_text(current_store().put(read_bytes(path, MOST_BYTES))))
        except (OSError, LmgymError) as error:
            raise LmgymError(f"--picture {path}: {getattr(error, 'strerror', None) or error}{nearby(path)}") from error
    return [RowPictures().put_into(prompt, shown, "prompt", f"prompt {n}") for n, prompt in enumerate(prompts, 1)]


def _text_of(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        raise LmgymError(f"cannot read {path} as UTF-8 text ({getattr(error, 'strerror', None) or error})") from error


def lines_of_prompts(text: str) -> list[str]:
    """The lines of a text that are not blank."""
    return [line for line in text.split("\n") if line.strip()]


def answer_prompts(
    named: NamedModel,
    prompts: Sequence[Prompt],
    samples: int | None = None,
    label: str | None = None,
    overrides: Sequence[str] = (),
) -> tuple[list[Answered], list[str]]:
    """Answer prompts as the recipe's evaluation decodes, in the environment of its last stage; and notes for the user.

    Each prompt is the text of a problem; what the task and its options put around it in training is put around it here
    (`examples_from_prompts`). `label` names a task of a mixture. Several `samples` are drawn at random, unless
    `overrides` exclude that (see `with_samples`).

    Raises LmgymError for an environment that writes its own prompts, and for prompts that do not fit the model.

    Example: answer_prompts(find_model("runs/quickstart"), ["Ben has 4 cups and finds 3 more. How many?"])"""
    # 1. The prompts, before the model is loaded.
    config = named.config
    stage, section = config.stages[-1], config.evaluation
    if not getattr(registry.get("env", stage.env["name"]), "needs_data", True):
        raise LmgymError(
            f"environment '{stage.env['name']}' writes its own prompts, so there is nothing to answer here; "
            "`lmgym eval` plays it"
        )
    task = stage.task
    if label is not None:
        if task["name"] != "mixture":
            raise LmgymError(
                f"--task names a task of a mixture, and the recipe's task is '{task['name']}'; leave it out"
            )
        task = member_section(task, label)
    examples = examples_from_prompts(prompts, task, config.seed)
    section = section if samples is None else with_samples(section, samples, stage.sampling.temperature, overrides)
    check_cut(config)
    # 2. The model, and its answers in the stage's environment.
    policy = named.load()
    notes = [cut] if (cut := cut_prompts(examples, config.policy, policy)) else []
    asked = [
        (group, example) for group, example in enumerate(examples) for _ in range(section.samples if samples else 1)
    ]
    envs = make_envs(stage.env, config.plugins)
    try:
        decoding = section.decoding(stage.sampling)
        episodes = collect(asked, actor_of(config, policy), decoding, (config.seed, "generate"), envs)
    finally:
        envs.close()
    return [
        _answered(prompt, group, policy.tokenizer) for prompt, group in zip(prompts, groups_of(episodes), strict=True)
    ], notes


def _answered(prompt: Prompt, episodes: Sequence[Episode], tokenizer: Any) -> Answered:
    for episode in episodes:
        if episode.error or not episode.turns:
            raise LmgymError(
                f"the environment failed on prompt {episode.group + 1}: {episode.error or 'nothing was said'}"
            )
    turn = episodes[0].turns[0]
    ids = turn.source_ids or turn.prompt_ids
    full = decoded(tokenizer, ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    several = any(len(episode.turns) > 1 for episode in episodes)
    answers, stops = [episode.text for episode in episodes], [episode.turns[-1].stop for episode in episodes]
    return Answered(prompt, full, answers, stops, [list(one.messages) for one in episodes] if several else [])
