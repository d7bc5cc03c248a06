"""Why a token moved: the terms of its loss, how hard each pushes it, and what the algorithm says that it computes."""

from statistics import fmean, stdev
from typing import Any

import numpy as np

from lmgym.logs.traces.trace import TraceEpisode, TraceStep
from lmgym.viewer.episodes import shortest

NOT_RECORDED = (
    "This run was recorded by an earlier lmgym, which kept the terms of a loss but not how they push a token."
)


def explanation(trace: TraceStep, episode: TraceEpisode) -> dict[str, Any]:
    """How the algorithm made a loss of this answer, as JSON.

    `terms`: the names of the terms, which have columns loss/NAME, weight/NAME and push/NAME, or some of them. `rows`:
    of each row the `push` of all terms together, positive for upwards. `formulas`: what the algorithm says that it
    computes, by name. `scores`: the numbers of which an advantage can be made.

    Example: explanation(trace, episode)["formulas"]["A"] -> "R less the mean of the group's scores (...)."
    """
    names = dict.fromkeys(name for row in episode.rows for name in row.columns)
    terms = dict.fromkeys(name.split("/", 1)[1] for name in names if name.startswith(("loss/", "push/")))
    pushes = [[row.columns[f"push/{term}"] for term in terms if f"push/{term}" in row.columns] for row in episode.rows]
    return {
        "terms": list(terms),
        "rows": [{"push": shortest(np.stack(own).sum(0))} if own else {} for own in pushes],
        "formulas": {name: str(text) for name, text in trace.formulas.items()},
        "scores": _scores(trace, episode),
        "note": NOT_RECORDED if terms and not any(pushes) and not trace.formulas else "",
    }


def _scores(trace: TraceStep, episode: TraceEpisode) -> dict[str, float | None]:
    """The score of an answer, and those of the others that trained in its step."""
    columns = trace.episodes
    rows = zip(columns["group"], columns["score"], columns["selected"], columns["index"], strict=True)
    trained = [(group, score, index) for group, score, selected, index in rows if selected and score is not None]
    group = [score for number, score, _ in trained if number == episode.group]
    others = [score for number, score, index in trained if number == episode.group and index != episode.index]
    step = [score for _, score, _ in trained]
    return {
        "R, the score of this answer": episode.score,
        "mean score of its group": fmean(group) if group else None,
        "standard deviation of the group's scores": stdev(group) if len(group) > 1 else None,
        "mean score of the other answers of its group": fmean(others) if others else None,
        "mean score of the step": fmean(step) if step else None,
        "standard deviation of all scores of the step": stdev(step) if len(step) > 1 else None,
        "score of the greedy answer to the same prompt": episode.baseline,
    }
