"""What a run's own answers were paid for: the records of its steps, read and counted. Nothing is judged again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lmgym.core.errors import LmgymError
from lmgym.experiments.audit.rise import Answers, Rise, explain_rise
from lmgym.logs.doctor.facts import bounded
from lmgym.logs.traces.texts import read_texts
from lmgym.logs.traces.trace import read_episode, read_step, shards
from lmgym.rewards.probing.features import FEATURES
from lmgym.text.chat import messages_of

MOST_STEPS = 90  # that are read, evenly spread
TOTAL = "the sum of all rewards"


@dataclass(frozen=True)
class Row:
    """An answer of a step: its group there, what each reward gave it, and its features.

    Example: Row(3, "2", {"final_answer": 1.0}, {"words": 9.0})"""

    step: int
    group: str
    rewards: Mapping[str, float | None]
    features: Mapping[str, float]


def explain_run(folder: Path, stage: int | None = None) -> dict[str, Rise]:
    """Of each reward of a stage (default: the last that has traces), and of their sum, how much of its rise comes with
    what can be counted in the answers. Empty where fewer than six steps have answers with texts.

    Raises LmgymError for damaged traces.

    Example: explain_run(Path("runs/a"))["final_answer"].parts["words"].part.mean"""
    places = shards(folder)
    if not places:
        return {}
    last = places[-1][0] if stage is None else stage
    steps = [step for own, step in places if own == last]
    chosen = sorted({steps[round(place * (len(steps) - 1) / (MOST_STEPS - 1))] for place in range(MOST_STEPS) if steps})
    rows = [row for step in chosen for row in _rows(folder, last, step)]
    names = dict.fromkeys(name for row in rows for name in row.rewards)
    rises = {name: _rise([row for row in rows if row.rewards.get(name) is not None], name) for name in names}
    return {name: rise for name, rise in rises.items() if rise is not None}


def _rise(rows: list[Row], name: str) -> Rise | None:
    features = {feature: [row.features[feature] for row in rows] for feature in FEATURES}
    values, numbers = [row.rewards[name] or 0.0 for row in rows], dict[tuple[int, str], int]()
    groups = [numbers.setdefault((row.step, row.group), len(numbers)) for row in rows]
    return explain_rise(Answers([row.step for row in rows], groups, values, features))


def _rows(folder: Path, stage: int, step: int) -> Iterator[Row]:
    """The answers of a step whose texts were kept."""
    columns, texts = read_step(folder, stage, step).episodes, read_texts(folder, stage, step)
    try:
        several = len(columns["reward_components"]) > 1
        for place, index in enumerate(columns["index"]):
            paid = {name: column[place] for name, column in columns["reward_components"].items()}
            paid |= {TOTAL: columns["score"][place]} if several else {}
            rewards, group = {name: bounded(value) for name, value in paid.items()}, columns["group"][place]
            if columns["kept"][place]:
                whole = read_episode(folder, stage, step, index)
                prompt, said = whole.example.get("prompt", ""), [turn.text for turn in whole.turns]
            elif index in texts.answers:
                prompt, said = texts.prompts.get(group, ""), texts.answers[index]
            else:
                continue
            question = str(messages_of(prompt)[-1].get("content", "")) if prompt else ""
            counts = {name: count(question, "\n".join(said)) for name, count in FEATURES.items()}
            yield Row(step, str(group), rewards, counts)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise LmgymError(f"{folder}: the traces of step {step + 1} are damaged ({type(error).__name__})") from error
