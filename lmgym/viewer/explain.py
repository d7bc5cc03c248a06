"""Why a token moved: the terms of its loss as numbers in the algorithm's own formula, and where its advantage is
from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import numpy as np

from lmgym.algorithms.grpo.former import in_former_keys
from lmgym.logs.traces.trace import TraceEpisode, TraceRow, TraceStep
from lmgym.viewer.arithmetic import compute, names_in
from lmgym.viewer.episodes import shortest
from lmgym.viewer.formulas import FAMILIES, SYMBOLS, Fields, Term

FIELDS = {"low": "clip_low", "high": "clip_high", "dual_clip": "dual_clip", "truncate": "truncate", "limit": "limit"}
COEFFICIENTS = {"drift": "squared_log_ratio_coefficient", "value": "value_coefficient"}
SHADES = {  # a symbol: a field that changes it over the stage, so that its number is not known here
    "beta": ("kl_target", None),
    "low": ("clip_final_fraction", 1.0),
    "high": ("clip_final_fraction", 1.0),
}


def explanation(trace: TraceStep, episode: TraceEpisode, limit: float | None = None) -> dict[str, Any]:
    """How the algorithm made a loss of this answer, as JSON. `limit` is the stage's sampling.max_new_tokens.

    `terms`: each recorded term with its formula, if there is one, and the formula's symbols; a symbol has a number
    (`value`), or a `column` of numbers per action. `rows`: the columns that were not recorded but follow from others,
    among them `push`: the weighted sum of what all terms push a token's log-probability, positive for upwards.
    `credit`: where the advantage is from.

    Example: explanation(trace, episode)["terms"][0]["formula"] -> "-min(r * A, clip(r, 1 - low, 1 + high) * A)"
    """
    trace = replace(trace, fields=in_former_keys(trace.fields))  # in whose words formulas.py speaks
    family = FAMILIES.get(trace.algorithm)
    recorded = dict.fromkeys(
        name.removeprefix("loss/") for row in episode.rows for name in row.columns if name.startswith("loss/")
    )
    known = {term.name: term for term in (family.terms(trace.fields) if family else [])}
    terms = [known.get(name, Term(name, "")) for name in recorded]
    fields = {**trace.fields, "limit": limit}
    lengths = _turn_lengths(episode)
    derived = [_derived(row, terms, fields, lengths) for row in episode.rows]
    return {
        "terms": [_term_tree(term, fields) for term in terms],
        "rows": [{name: shortest(column) for name, column in columns.items()} for columns in derived],
        "credit": _credit(trace, episode, family.credit(trace.fields) if family else ""),
    }


def _term_tree(term: Term, fields: Fields) -> dict[str, Any]:
    symbols = []
    for name in names_in(f"[{term.formula}, {term.push or 0}]") if term.formula else []:
        meaning, column = SYMBOLS[name]
        symbol: dict[str, Any] = {"name": name, "meaning": meaning}
        value = constant(name, term, fields)
        symbols.append(symbol | ({"column": column or name} if value is None else {"value": value}))
    return {"name": term.name, "formula": term.formula, "push": term.push, "symbols": symbols}


def constant(symbol: str, term: Term, fields: Fields) -> float | None:
    """The number of a symbol that is the same for all tokens; None if it is not, or is not known."""
    field, steady = SHADES.get(symbol, ("", None))
    if fields.get(field, steady) != steady:
        return None
    name = {"beta": "kl_coefficient", "c": COEFFICIENTS.get(term.name, ""), **FIELDS}.get(symbol, "")
    value = fields.get(name)
    return None if value is None else float(value)


def _turn_lengths(episode: TraceEpisode) -> np.ndarray:
    """The number of actions of each turn [turns]."""
    numbers = np.concatenate([np.zeros(0, np.int32), *(row.turn for row in episode.rows)])
    return np.bincount(numbers, minlength=len(episode.turns))


def symbol_values(row: TraceRow, fields: Fields, turn_lengths: np.ndarray) -> dict[str, np.ndarray]:
    """The symbols of the formulas that differ from token to token, as far as the row's columns tell: [actions] each.

    Example: symbol_values(row, trace.fields, lengths)["r"] -> array([1., 1., 1.])
    """
    columns = {name: column.astype(float) for name, column in row.columns.items()}
    values = {name: columns[column] for name, (_, column) in SYMBOLS.items() if column in columns}
    if "logprobs" in columns:
        now = columns["logprobs"]
        values["r_t"] = np.exp(np.clip(now - columns.get("logprobs_old", now), -20, 20))
        if "logprobs_sampler" in columns:
            values["r_s"] = np.exp(np.clip(now - columns["logprobs_sampler"], -20, 20))
    if "advantages" in columns:
        positive = columns["advantages"] > 0
        values["on"] = (columns["advantages"] != 0).astype(float)
        if fields.get("keep_above") is not None:
            high, low = (1 + float(fields["clip_high"])), (1 - float(fields["clip_low"]))
            values["bound"] = np.where(positive, high * float(fields["keep_above"]), low * float(fields["keep_below"]))
        if fields.get("sapo_positive") is not None:
            values["tau"] = np.where(positive, float(fields["sapo_positive"]), float(fields["sapo_negative"]))
    if "loss/entropy" in columns and "entropy" in columns:  # the coefficient may fall over the stage
        with np.errstate(divide="ignore", invalid="ignore"):
            values["c_entropy"] = -columns["loss/entropy"] / columns["entropy"]
    values["L"] = turn_lengths[row.turn].astype(float)
    return values


def _derived(row: TraceRow, terms: Sequence[Term], fields: Fields, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of a row that follow from others: symbols of the formulas, and the push."""
    values = symbol_values(row, fields, lengths)
    columns = {name: values[name] for name in _needed(terms) if name in values and not SYMBOLS[name][1]}
    if "c_entropy" in values:
        columns["c"] = values["c_entropy"]
    pushes = [
        row.columns[f"weight/{term.name}"] * pushed
        for term in terms
        if f"weight/{term.name}" in row.columns and (pushed := push_of(term, values, fields)) is not None
    ]
    if pushes:
        columns["push"] = np.sum(pushes, axis=0)
    return {name: np.broadcast_to(column, row.actions.shape) for name, column in columns.items()}


def push_of(term: Term, values: Mapping[str, np.ndarray], fields: Fields) -> np.ndarray | None:
    """What a term pushes each token, before its weight; None if it has no formula or a number of it is not known."""
    if not term.push:
        return None
    known: dict[str, Any] = dict(values)
    for name in names_in(term.push):
        if (value := constant(name, term, fields)) is not None:
            known[name] = value
    if not set(names_in(term.push)) <= set(known):
        return None
    return np.asarray(compute(term.push, known), dtype=float)


def _needed(terms: Sequence[Term]) -> list[str]:
    return list(dict.fromkeys(name for one in terms if one.formula for name in names_in(f"[{one.formula}]")))


def _credit(trace: TraceStep, episode: TraceEpisode, formula: str) -> dict[str, Any]:
    """Where the advantage is from: a formula or a sentence, and the numbers of scores that it names."""
    columns = trace.episodes
    rows = zip(columns["group"], columns["score"], columns["selected"], columns["index"], strict=True)
    trained = [(group, score, index) for group, score, selected, index in rows if selected]
    own = [score for group, score, _ in trained if group == episode.group]
    others = [score for group, score, index in trained if group == episode.group and index != episode.index]
    scores = [score for _, score, _ in trained]
    numbers = {
        "mean": ("mean score of its group", fmean(own) if own else None),
        "std": ("standard deviation of the group's scores", stdev(own) if len(own) > 1 else 0.0),
        "std_batch": ("standard deviation of all scores of the step", stdev(scores) if len(scores) > 1 else 0.0),
        "mean_others": ("mean score of the other answers of its group", fmean(others) if others else None),
        "mean_batch": ("mean score of the step", fmean(scores) if scores else None),
        "greedy": ("score of the greedy answer to the same prompt", episode.baseline),
        "R": ("score of this answer", episode.score),
    }
    words = set(formula.replace("(", " ").replace(")", " ").split())
    symbols = [
        {"name": name, "meaning": meaning, "value": value}
        for name, (meaning, value) in numbers.items()
        if name in words and value is not None and math.isfinite(value)
    ]
    fields = trace.fields
    penalised = bool(fields.get("kl_coefficient")) and fields.get("kl_in") == "reward"
    note = "Scores and rewards are those less the KL penalty." if penalised else ""
    return {"formula": formula, "symbols": symbols, "note": note}
