"""What the page asks for, as JSON: runs, a step, a group of a step, an answer.

Each function reads only what it returns: a step is the list of its answers' numbers, not their texts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lmgym.core.errors import LmgymError
from lmgym.logs.timings import PARTS, timing_columns, timing_of
from lmgym.logs.traces.texts import TraceTexts
from lmgym.logs.traces.trace import TraceEpisode, TraceStep
from lmgym.viewer.episodes import episode_of_record, explanation, mean_advantage, row_tree, turn_texts
from lmgym.viewer.rollouts import Moment
from lmgym.viewer.runs import RunRecords
from lmgym.viewer.session_tree import session_tree

NO_TRACES = (
    "This step has no traces, so only its answers in rollouts.jsonl are shown, without advantages: those to the step's "
    "first prompt, or all of them with `logs.rollouts: all`."
)


def runs_tree(runs: Sequence[RunRecords]) -> list[dict[str, Any]]:
    """The runs by number, with what heads their pages."""
    trees = []
    for number, run in enumerate(runs):
        stages = run.recipe.get("stages")
        stages = stages if isinstance(stages, list) else [run.recipe]
        algorithms = dict.fromkeys(_name(stage.get("algorithm", "")) for stage in stages if isinstance(stage, Mapping))
        policy = run.recipe.get("policy")
        model = policy.get("model", "") if isinstance(policy, Mapping) else ""
        tree = {"number": number, "name": run.name, "folder": str(run.folder), "model": str(model)}
        trees.append(tree | {"algorithms": [name for name in algorithms if name]})
    return trees


def _name(section: Any) -> str:
    return str(section.get("name", "")) if isinstance(section, Mapping) else str(section)


def curves_tree(run: RunRecords) -> dict[str, Any]:
    """All numbers of a run as curves, and what is wrong with its files as far as they were read."""
    tree = run.curves.tree()
    tree["problems"] += run.problems()
    return tree


def step_tree(run: RunRecords, stage: int, step: int) -> dict[str, Any]:
    """All answers of a step as columns of numbers, and the step's own numbers. Raises LmgymError if there are none."""
    curves = run.curves
    tree: dict[str, Any] = {"stage": stage, "step": step, "neighbours": run.neighbours(stage, step)}
    tree |= {"stage_name": curves.stages.get(stage, ""), "metrics": curves.record(stage, step), "note": ""}
    trace, problem = _trace(run, stage, step)
    if trace is not None:
        seconds = timing_columns(run.timing(stage, step), len(trace.episodes["index"]))
        texts = list(run.texts(stage, step).answers)
        return tree | {"algorithm": trace.algorithm, "columns": trace.episodes | seconds, "texts": texts}
    records = run.rollouts.records(Moment("train", stage, step))
    if not records:
        why = "; ".join(filter(None, [problem, *run.rollouts.problems]))
        raise LmgymError(f"{run.name} has no answers of {Moment('train', stage, step)}{why and f': {why}'}")
    return tree | {"algorithm": "", "columns": step_columns(records), "note": problem or NO_TRACES}


def _trace(run: RunRecords, stage: int, step: int) -> tuple[TraceStep | None, str]:
    """A step's table, or why it cannot be read."""
    try:
        return run.trace(stage, step), ""
    except LmgymError as error:
        return None, str(error)


def step_columns(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The columns of a step's table, as far as records of rollouts.jsonl tell."""
    columns: dict[str, Any] = {name: [one.get(name) for one in records] for name in ("index", "group", "example")}
    columns["score"] = [one.get("score") for one in records]
    rewards = [one.get("reward_components", {}) for one in records]
    names = dict.fromkeys(name for own in rewards for name in own)
    columns["reward_components"] = {name: [own.get(name) for own in rewards] for name in names}
    turns = [one.get("turns", []) for one in records]
    columns["length"] = [sum(len(turn["action_ids"]) for turn in own) for own in turns]
    columns["turns"] = [len(own) for own in turns]
    columns["truncated"] = [any(turn.get("stop") in ("length", "context") for turn in own) for own in turns]
    columns["error"] = [one.get("error", "") for one in records]
    columns["version"] = [one.get("version") for one in records]
    columns["kept"] = [True] * len(records)
    return columns


def group_tree(run: RunRecords, stage: int, step: int, group: int) -> dict[str, Any]:
    """The answers to one prompt of a step, with texts where they were kept. Raises LmgymError for an unknown group."""
    columns = step_tree(run, stage, step)["columns"]
    rows = [row for row, own in enumerate(columns["group"]) if own == group]
    if not rows:
        raise LmgymError(f"{run.name} has no group {group} in {Moment('train', stage, step)}")
    wanted = [columns["index"][row] for row in rows]
    trace = _trace(run, stage, step)[0]
    episodes = run.answers(Moment("train", stage, step), wanted, trace)
    example = next((dict(episode.example) for episode in episodes.values()), {"id": columns["example"][rows[0]]})
    texts = run.texts(stage, step) if trace is not None else TraceTexts()
    if group in texts.prompts:
        example.setdefault("prompt", texts.prompts[group])
    answers = [_answer_of_group(columns, row, episodes.get(columns["index"][row])) for row in rows]
    for one in answers:
        if "texts" not in one and one["index"] in texts.answers:
            one["texts"] = texts.answers[one["index"]]
    tree = {"stage": stage, "step": step, "group": group, "example": example, "answers": answers, "pair": None}
    tree["main"] = main_reward(run, stage)
    if trace is not None and (trace.pairs or "supervised_coefficient" in trace.fields):  # a field of Pairs: older runs
        tree["pair"] = pair_of(columns, rows, episodes, bool(trace.fields.get("length_norm")))
    return tree


def main_reward(run: RunRecords, stage: int) -> str:
    """The name of the reward with the largest weight in the recipe of a stage; of equal ones the first, "" for none.

    Example: main_reward(run, 0) -> "final_answer" for `rewards: {final_answer: 1.0, format: 0.1}`"""
    stages = run.recipe.get("stages")
    section = stages[stage] if isinstance(stages, list) and stage < len(stages) else run.recipe
    rewards = section.get("rewards") if isinstance(section, Mapping) else None
    weights: dict[str, float] = {}
    for name, value in rewards.items() if isinstance(rewards, Mapping) else ():
        weight = value.get("weight", 1.0) if isinstance(value, Mapping) else value
        weights[str(name)] = abs(weight) if isinstance(weight, int | float) else 0.0
    return max(weights, key=lambda name: weights[name], default="")


def pair_of(
    columns: Mapping[str, Any], rows: Sequence[int], episodes: Mapping[int, TraceEpisode], length_norm: bool
) -> dict[str, Any] | None:
    """Of a group that trains as a pair: the index of the chosen and of the rejected answer, what the policy gave each
    (the log-probability of its tokens less the reference's if there is one; their mean with `length_norm`), and the
    margin; None where all scores are equal.

    Example: pair_of(...) -> {"chosen": 0, "rejected": 1, "scores": {0: 1.5, 1: 0.25}, "margin": 1.25}"""
    rated = [(columns["score"][row], columns["index"][row]) for row in rows if columns["score"][row] is not None]
    if len({score for score, _ in rated}) < 2:
        return None
    chosen, rejected = (choose(rated, key=lambda one: one[0])[1] for choose in (max, min))  # of equal ones the first
    scores = {index: _log_ratio(episodes[index], length_norm) for index in (chosen, rejected) if index in episodes}
    known = [scores.get(index) for index in (chosen, rejected)]
    margin = None if known[0] is None or known[1] is None else known[0] - known[1]
    return {"chosen": chosen, "rejected": rejected, "scores": scores, "margin": margin}


def _log_ratio(episode: TraceEpisode, mean: bool) -> float | None:
    rows = [row.columns for row in episode.rows]
    if not rows or not all("logprobs" in row for row in rows):
        return None
    each = np.concatenate([row["logprobs"] - row.get("logprobs_ref", np.float32(0)) for row in rows]).astype(float)
    return float(each.mean() if mean else each.sum()) if len(each) and np.isfinite(each).all() else None


def _answer_of_group(columns: Mapping[str, Any], row: int, episode: TraceEpisode | None) -> dict[str, Any]:
    tree = {name: column[row] for name, column in columns.items() if name != "reward_components"}
    tree["reward_components"] = {name: column[row] for name, column in columns["reward_components"].items()}
    if episode is None:
        return tree
    stops = [turn.stop for turn in episode.turns]
    return tree | {"texts": turn_texts(episode), "stops": stops, "advantage": mean_advantage(episode)}


def answer_tree(run: RunRecords, moment: Moment, index: int, split: str | None = None) -> dict[str, Any]:
    """One answer with its tokens, their numbers, and how the algorithm made a loss of them.

    Raises LmgymError if it was not kept."""
    trace = _trace(run, moment.stage, moment.step)[0] if moment.kind == "train" else None
    episode = run.answers(moment, [index], trace, split).get(index)
    if episode is None:
        raise LmgymError(
            f"answer {index} of {moment} was not kept whole; `logs.traces` in the recipe says how many are"
        )
    tokenizer = run.tokenizer
    tree = {name: value for name, value in vars(episode).items() if name != "rows"}
    tree |= {"kind": moment.kind, "stage": moment.stage, "step": moment.step, "split": split}
    tree["turns"] = [vars(turn) for turn in episode.turns]
    tree["rows"] = [row_tree(row, tokenizer, run.folder) for row in episode.rows]
    tree["session"] = session_tree(episode.rows)
    tree |= {"tokenizer": tokenizer is not None, "texts": turn_texts(episode), "reason": "", "algorithm": ""}
    if trace is not None:
        tree["seconds"] = answer_seconds(run.timing(moment.stage, moment.step), trace.episodes["index"].index(index))
        return tree | _of_step(trace, episode) | {"explanation": explanation(trace, episode)}
    records = [one for one in run.rollouts.records(moment) if split in (None, one.get("split"))]
    return tree | {"mates": [one["index"] for one in records if one.get("group") == episode.group]}


def answer_seconds(timing: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The seconds of one answer: of each part a list with a number per turn, and of each reward a number.

    Example:
        >>> answer_seconds({"sampling": 0.5, "environment": [[0.5, 0.25], 1.0], "rewards": {"judge": 2.0}}, 0)
        {'sampling': [0.5], 'environment': [0.5, 0.25], 'rewards': {'judge': 2.0}}
    """
    parts = {part: timing_of(timing.get(part), place) for part in PARTS}
    seconds: dict[str, Any] = {
        part: own if isinstance(own, list) else [own] for part, own in parts.items() if own is not None
    }
    rewards = {name: timing_of(column, place) for name, column in timing.get("rewards", {}).items()}
    return seconds | {"rewards": {name: own for name, own in rewards.items() if own is not None}}


def _of_step(trace: TraceStep, episode: TraceEpisode) -> dict[str, Any]:
    """What only the step's table knows of an answer: why it was not selected, and the others of its group."""
    columns = trace.episodes
    row = columns["index"].index(episode.index)
    mates = [index for index, group in zip(columns["index"], columns["group"], strict=True) if group == episode.group]
    return {"reason": columns["reason"][row], "algorithm": trace.algorithm, "mates": mates}


def evaluation_tree(run: RunRecords, moment: Moment, example: str | None = None) -> list[dict[str, Any]]:
    """The answers of an evaluation, without their tokens; or those to one example (others may be among them)."""
    trees = []
    for record in run.rollouts.records(moment, example):
        episode = episode_of_record(record)
        tree = {"stage": moment.stage, "step": moment.step, "split": record.get("split"), "index": episode.index}
        tree |= {"example": episode.example, "score": episode.score, "reward_components": episode.reward_components}
        trees.append(tree | {"texts": turn_texts(episode), "stops": [turn.stop for turn in episode.turns]})
    return trees
