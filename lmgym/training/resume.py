"""Whether a run may go on from a checkpoint: all differences between its fingerprint and what is there now.

What may change when a run is resumed is in one table, `MAY_CHANGE`; docs/run_folder.md explains it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lmgym.config.build import build_config
from lmgym.config.schema import Config
from lmgym.core.errors import LmgymError
from lmgym.logs.console import Console
from lmgym.logs.writer import Writer
from lmgym.training.checkpoint import read_fingerprint
from lmgym.training.fingerprint import Fingerprint, plain_recipe
from lmgym.training.run import Progress

FREE, RECORDED, REFUSED = "free", "recorded", "refused"
MAY_CHANGE = {  # a key of a recipe, or a section: those of a stage without the stage's name; the longest match counts
    "threads": FREE,  # what comes of it is in "machine"
    "checkpoint": FREE,
    "logs": FREE,
    "distributed": FREE,
    "evaluation": FREE,
    "reward_timeout": FREE,
    "policy.device": FREE,  # as threads
    "policy.compute": FREE,  # as threads
    "steps": FREE,  # RECORDED with a learning rate that depends on it
    "early_stop": FREE,
    "env.seconds": FREE,
    "env.workers": FREE,
    "plugins": RECORDED,
    "callbacks": FREE,
    "engine": RECORDED,
    "engine.name": FREE,  # the units in "machine" make the bits
    "engine.unit": FREE,  # as threads
    "engine.threads": FREE,  # as threads
    "engine.workers": FREE,
    "engine.address": FREE,
    "engine.seconds": FREE,
    "engine.cache_gib": FREE,
    "engine.gap_at_load": FREE,
    "engine.gap_warning": FREE,
    "engine.gap_error": FREE,
    "policy.tokens_per_forward": RECORDED,
    "policy.activation_checkpointing": RECORDED,
    "policy.path": RECORDED,
    "policy.attention": RECORDED,
    "policy.products": RECORDED,
    "optimizer": RECORDED,
    "optimizer.name": REFUSED,
    "rewards": RECORDED,
    "sampling": RECORDED,
    "max_draws": RECORDED,
}
SHOWN = 4  # differences of which a sentence says more than the name
LONGEST = 700  # characters of a list of differences
DATA_KEYS = ("task", "split", "final_split", "examples")  # of `evaluation:`, which say what its data is


@dataclass
class Differences:
    """Sentences about what is not as it was, by what follows of it."""

    refused: list[str] = field(default_factory=list)
    """The checkpoint cannot be gone on from."""
    recorded: list[str] = field(default_factory=list)
    """The run goes on, but not bit for bit as if it had not been interrupted."""
    free: list[str] = field(default_factory=list)
    """Nothing that was computed would be another."""
    unknown: bool = False
    """The checkpoint has no fingerprint."""

    def add(self, verdict: str, what: str, before: Any, now: Any) -> None:
        """Note a difference between two plain values."""
        sentence = f"{what} was {_short(before)} and is {_short(now)}"
        {REFUSED: self.refused, RECORDED: self.recorded, FREE: self.free}[verdict].append(sentence)


def differences(before: Fingerprint, now: Fingerprint, progress: Progress) -> Differences:
    """What of `now` is not as it was before, for a run that has come as far as `progress`. Parts that `now` lacks are
    not compared."""
    found = Differences()
    if "recipe" in now:
        then = before["recipe"] if before["recipe"] == now["recipe"] else _in_todays_words(before["recipe"])
        same = [one == other for one, other in zip(before["data"]["training"], now["data"]["training"], strict=False)]
        _compare_recipes(then, now["recipe"], same, progress, found)
        _compare_data(before["data"], now["data"], then, now["recipe"], progress, found)
    for part, verdict in (("model", REFUSED), ("versions", RECORDED), ("machine", RECORDED)):
        if part in now:
            for name in sorted(before[part].keys() | now[part].keys()):
                if before[part].get(name) != now[part].get(name):
                    found.add(verdict, name, before[part].get(name), now[part].get(name))
    return found


def check_resumable(saved: Path | None, now: Fingerprint, progress: Progress) -> Differences:
    """Raise LmgymError if a run cannot go on from its checkpoint as things are now; else what is not as it was. `saved`
    is None for a new run."""
    if saved is None:
        return Differences()
    before = read_fingerprint(saved)
    if before is None:
        return Differences(unknown=True)
    try:
        found = differences(before, now, progress)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise LmgymError(f"{saved / 'fingerprint.json'} is no fingerprint of a run ({error!r:.100})") from error
    if found.refused:
        folder = saved.parent.parent
        raise LmgymError(
            f"{folder} cannot go on from {saved.name}: {listed(found.refused)}; put back what was there, or train "
            f"anew in another folder: lmgym train {folder / 'recipe.yaml'} out=ANOTHER"
        )
    return found


def report(
    found: Differences, missing: list[str], progress: Progress, config: Config, writer: Writer, console: Console
) -> None:
    """Say what is not as it was when the checkpoint was written, and record it if it may change results, or if records
    are `missing`."""
    if found.unknown:
        console.warn("the checkpoint is of an older version, which did not note data, recipe and machine; see for "
                     "yourself that they are the same")  # fmt: skip
    if found.free:
        console.say(f"since the checkpoint {listed(found.free)}")
    if found.recorded:
        console.warn(f"from here on the run is no longer bit for bit what it would have been: {listed(found.recorded)}")
    for sentence in missing:
        console.warn(sentence)
    if found.recorded or missing:
        stage = config.stages[progress.stage_index].name
        place = {"stage": progress.stage_index, "stage_name": stage, "step": progress.step}
        writer.metrics({"kind": "resume", **place, "changed": found.recorded, "missing": missing})


def listed(sentences: list[str]) -> str:
    """Several sentences as one: the first few as they are, of the others what they are about."""
    names = [sentence.split(" was ")[0] for sentence in sentences[SHOWN:]]
    text = "; ".join(sentences[:SHOWN]) + (f"; also {', '.join(names)}" if names else "")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(sentences)} in all)"


def _compare_recipes(
    then: Mapping[str, Any], now: Mapping[str, Any], same_data: list[bool], progress: Progress, found: Differences
) -> None:
    """Compare the keys of two recipes. A stage that is over must be the same; one that has not begun may be another;
    where the data is the same, its task may say so in another way (another path)."""
    _compare_keys({**then, "stages": None}, {**now, "stages": None}, "", found)
    stages: Iterable[tuple[dict[str, Any], dict[str, Any]]] = zip_longest(then["stages"], now["stages"], fillvalue={})
    for index, (one, other) in enumerate(stages):
        if one and other and same_data[index]:
            one = {**one, "task": other["task"]}
        if one == other:
            continue
        name = (other or one)["name"]
        where = f"stages.{name}." if len(now["stages"]) > 1 else ""
        if not _begun(progress, index):  # it trains as the recipe says now
            found.free.append(f"stage '{name}', which has not begun, is another")
        elif index < progress.stage_index:
            changed = Differences()
            _compare_keys(one, other, where, changed)
            every = changed.refused + changed.recorded + changed.free
            found.refused += [f"{sentence}, but this stage is over" for sentence in every]
        else:
            _compare_keys(one, other, where, found, ahead=bool((now.get("engine") or {}).get("ahead")))
            if other["steps"] < progress.step:
                found.refused.append(f"{where}steps is {other['steps']}, and {progress.step} are taken already")


def _compare_keys(
    then: Mapping[str, Any], now: Mapping[str, Any], where: str, found: Differences, ahead: bool = False
) -> None:
    """Compare the keys of one section and those below, each by its verdict; `where` is the stage. `ahead`: answers are
    sampled one step ahead."""
    one, other = dict(_leaves(then)), dict(_leaves(now))
    keys = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
    # Of another algorithm or environment the name is enough: its fields are others anyway.
    renamed = tuple(key.removesuffix("name") for key in keys if key.endswith(".name"))
    curved = (now.get("optimizer") or {}).get("schedule", "constant") != "constant"
    for key in keys:
        if not key.startswith(renamed) or key.endswith(".name"):
            # A longer curve has other learning rates from here on; a last step has sampled nothing ahead.
            verdict = RECORDED if key == "steps" and (curved or ahead) else _verdict(key)
            found.add(verdict, where + key, one.get(key), other.get(key))


def _compare_data(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    recipe: Mapping[str, Any],
    new_recipe: Mapping[str, Any],
    progress: Progress,
    found: Differences,
) -> None:
    """Compare the data of the stages that have begun, and of the evaluations if the recipe names the same."""
    stages = new_recipe["stages"]
    for index, (one, other) in enumerate(zip(then["training"], now["training"], strict=False)):
        if _begun(progress, index) and one != other:
            found.refused.append(_data_sentence(f"the data of stage '{stages[index]['name']}'", one, other))
    asked = [[tree["evaluation"].get(key) for key in DATA_KEYS] for tree in (recipe, new_recipe)]
    if asked[0] != asked[1] or not _begun(progress, len(stages) - 1):
        return  # the recipe evaluates on something else, and that is allowed
    for split, other in now["held_out"].items():
        one = then["held_out"].get(split, other)
        if one != other:
            found.refused.append(_data_sentence(f"the data of the evaluation on '{split}'", one, other))


def _data_sentence(what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if one.get("env files") != other.get("env files"):
        return f"{what} is another (a file that its environment reads)"
    if one["examples"] != other["examples"]:
        return f"{what} had {one['examples']:,} examples and has {other['examples']:,}"
    order = one["in any order"] == other["in any order"]
    count = f"{other['examples']:,} examples"
    return f"{what} has its {count} in another order" if order else f"{what} has other contents in its {count}"


def _begun(progress: Progress, index: int) -> bool:
    return index < progress.stage_index or (index == progress.stage_index and progress.begun)


def _verdict(key: str) -> str:
    """What a changed key leads to: what the table says of it, or of the section that it is in."""
    parts = key.split(".")
    known = (MAY_CHANGE.get(".".join(parts[:end])) for end in range(len(parts), 0, -1))
    return next((verdict for verdict in known if verdict is not None), REFUSED)


def _in_todays_words(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe with the keys and the defaults of this version of lmgym; as it is, if this version cannot read it."""
    try:
        return plain_recipe(build_config(recipe))
    except LmgymError:
        return recipe


def _leaves(tree: Any, where: str = "") -> Iterable[tuple[str, Any]]:
    """The values of a tree by dotted keys; a list is one value, and so is an empty section."""
    if not isinstance(tree, Mapping) or not tree:
        yield where, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, f"{where}.{key}" if where else str(key))


def _short(value: Any) -> str:
    """A value as a sentence names it."""
    text = "not there" if value is None else value if isinstance(value, str) else json.dumps(value)
    text = text[:12] if len(text) == 64 and not text.strip("0123456789abcdef") else text  # a checksum
    return text if len(text) <= 60 else text[:57] + "..."
