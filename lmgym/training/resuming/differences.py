"""All differences between the fingerprint of a checkpoint and what is there now."""

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lmgym.config.build import build_config
from lmgym.core.redacted import redacted
from lmgym.training.resuming.contents import texts_of
from lmgym.training.resuming.fingerprint import Fingerprint, plain_recipe
from lmgym.training.resuming.read_changes import Read, compare_read, without_places
from lmgym.training.resuming.verdicts import RECORDED, REFUSED, Differences, begun, verdict_of
from lmgym.training.run import Progress
from lmgym.updates.schedules import depends_on_steps

DATA_KEYS = ("task", "split", "final_split", "examples")  # of `evaluation:`, which say what its data is
NOT_MEASURING = {"every", "keep_best", "keep_best_mode", "metrics", "reference_nll", *DATA_KEYS}  # change no metric
DECODED = ("stop", "stop_ids", "max_new_tokens", "min_new_tokens")  # of `sampling:`, which evaluations take over


def differences(before: Fingerprint, now: Fingerprint, progress: Progress) -> Differences:
    """What of `now` is not as it was before, for a run that has come as far as `progress`. Parts that `now` lacks are
    not compared."""
    found = Differences()
    if "recipe" in now:
        read = Read.between(before, now)
        then = before["recipe"] if before["recipe"] == now["recipe"] else _in_todays_words(before["recipe"])
        then, recipe = without_places(then, read), without_places(now["recipe"], read)
        _compare_recipes(then, recipe, _same_stages(before["data"], now["data"]), progress, found)
        _compare_data(before["data"], now["data"], then, recipe, progress, found)
        compare_read(read, then, recipe, progress, found)
        _compare_measures(before, now, then, recipe, progress, found)
    for part, verdict in (("model", REFUSED), ("versions", RECORDED), ("machine", RECORDED)):
        if part in now:
            for name in sorted(before[part].keys() | now[part].keys()):
                if before[part].get(name) != now[part].get(name):
                    found.add(verdict, name, before[part].get(name), now[part].get(name))
    return found


def _compare_recipes(
    then: Mapping[str, Any], now: Mapping[str, Any], same_data: list[bool], progress: Progress, found: Differences
) -> None:
    """Compare the keys of two recipes. A stage that is over must be the same; one that has not begun may be another;
    where what is read is the same, a key may name it in another way (another path)."""
    _compare_keys({**then, "stages": None}, {**now, "stages": None}, "", found)
    stages: Iterable[tuple[dict[str, Any], dict[str, Any]]] = zip_longest(then["stages"], now["stages"], fillvalue={})
    for index, (one, other) in enumerate(stages):
        if one and other and same_data[index] and _same_ids(one, other):
            one = {**one, "task": other["task"]}
        if one == other:
            continue
        name = (other or one)["name"]
        where = f"stages.{name}." if len(now["stages"]) > 1 else ""
        if not begun(progress, index):  # it trains as the recipe says now
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


def _same_ids(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """False where a curriculum, which knows its examples by id, would no longer know them: a file's name is in ids."""
    names = [[Path(text).name for _, text in texts_of(stage["task"])] for stage in (one, other)]
    return one.get("curriculum") is None or names[0] == names[1]


def _compare_keys(
    then: Mapping[str, Any], now: Mapping[str, Any], where: str, found: Differences, ahead: bool = False
) -> None:
    """Compare the keys of one section and those below, each by its verdict; `where` is the stage. `ahead`: answers are
    sampled ahead."""
    one, other = dict(_leaves(then)), dict(_leaves(now))
    keys = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
    # Of another algorithm or environment the name is enough: its fields are others anyway.
    renamed = tuple(key.removesuffix("name") for key in keys if key.endswith(".name"))
    for key in keys:
        if not key.startswith(renamed) or key.endswith(".name"):
            # More steps stretch a schedule, so that each step gets another value of it. And with answers sampled ahead,
            # a last step has sampled none for the step after it.
            verdict = RECORDED if key == "steps" and (ahead or _depends_on_steps(now)) else verdict_of(key)
            found.add(verdict, where + key, one.get(key), other.get(key))


def _depends_on_steps(stage: Mapping[str, Any]) -> bool:
    """True if a step of a longer stage has another learning rate, clip range or entropy bonus."""
    optimizer, algorithm = stage.get("optimizer") or {}, stage.get("algorithm") or {}
    falls = [key for key in algorithm if key.endswith("_final_fraction") and algorithm[key] != 1]
    if not algorithm.get("entropy_coefficient"):
        falls = [key for key in falls if not key.startswith("entropy_")]
    return bool(falls) or depends_on_steps(optimizer.get("schedule", "constant"), optimizer.get("warmup_ratio"))


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
        if begun(progress, index) and not _same_data(one, other):
            found.refused.append(_data_sentence(f"the data of stage '{stages[index]['name']}'", one, other))
    asked = [[tree["evaluation"].get(key) for key in DATA_KEYS] for tree in (recipe, new_recipe)]
    if not begun(progress, len(stages) - 1):  # until then another last stage may bring other data to evaluate on
        for own, tree in zip(asked, (recipe, new_recipe), strict=True):
            own[0] = own[0] or tree["stages"][-1]["task"]
    if asked[0] != asked[1] or not begun(progress, 0):
        return  # the recipe evaluates on something else, and that is allowed
    for split, other in now["held_out"].items():
        one = then["held_out"].get(split, other)
        if not _same_data(one, other):
            found.refused.append(_data_sentence(f"the data of the evaluation on '{split}'", one, other))


def _same_stages(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[bool]:
    """For each stage whether it has the data that it had."""
    return [_same_data(one, other) for one, other in zip(then["training"], now["training"], strict=False)]


def _same_data(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True for equal examples, apart from the name of their file, which is a part of their ids."""
    key = "without places" if "without places" in one.keys() & other.keys() else "sha256"
    return all(one[name] == other[name] for name in ("examples", key))


def _data_sentence(what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if one["examples"] != other["examples"]:
        return f"{what} had {one['examples']:,} examples and has {other['examples']:,}"
    order = one["in any order"] == other["in any order"]
    count = f"{other['examples']:,} examples"
    return f"{what} has its {count} in another order" if order else f"{what} has other contents in its {count}"


def _compare_measures(
    before: Fingerprint,
    now: Fingerprint,
    then: Mapping[str, Any],
    recipe: Mapping[str, Any],
    progress: Progress,
    found: Differences,
) -> None:
    """Whether `keep_best` and `early_stop` of the stage can go on with the numbers that they have."""
    index = progress.stage_index
    if index >= len(then["stages"]):
        return
    rules = [(tree["evaluation"].get("keep_best"), tree["evaluation"].get("keep_best_mode")) for tree in (then, recipe)]
    early = [tree["stages"][index].get("early_stop") or {} for tree in (then, recipe)]
    stops = [(rule.get("metric"), rule.get("mode")) for rule in early]

    def measures(metric: str | None) -> bool:
        return bool(_measured(before["data"], then, index, metric) == _measured(now["data"], recipe, index, metric))

    found.other_best = found.other_contents or rules[0] != rules[1] or not measures(rules[1][0])
    found.other_early = found.other_contents or stops[0] != stops[1] or not measures(stops[1][0])


def measures_alike(standing: Fingerprint, before: int, after: int, metric: str | None) -> bool:
    """Whether two stages of one run measure a metric of the evaluations alike, so that their numbers can be compared.

    Example: measures_alike(run.fingerprint, 0, 1, "reward") -> False  # the second stage has other rewards"""
    data, recipe = standing["data"], standing["recipe"]
    return bool(_measured(data, recipe, before, metric) == _measured(data, recipe, after, metric))


def _measured(held: Mapping[str, Any], recipe: Mapping[str, Any], index: int, metric: str | None) -> Any:
    """Everything in a recipe and its data that the number of a metric depends on."""
    section, stage, last = recipe["evaluation"], recipe["stages"][index], recipe["stages"][-1]
    name = str(metric).split("/")[0]
    weighted = stage.get("rewards") or last.get("rewards") or {}  # as `held_out_rewards` takes them
    rewards, metrics = {**(last.get("rewards") or {}), **weighted}, section.get("metrics") or {}
    data = held["held_out"].get(section.get("split"), {})
    return [
        {key: value for key, value in section.items() if key not in NOT_MEASURING},
        {key: (stage.get("sampling") or {}).get(key) for key in DECODED},
        section.get("env") or stage.get("env"),
        weighted if name == "reward" else [_unweighted(sections.get(name)) for sections in (rewards, metrics)],
        [data.get(key) for key in ("examples", "sha256")],
    ]


def _unweighted(section: Any) -> Any:
    """A reward's section (or its weight alone) without the weight, which its own metric does not depend on."""
    if isinstance(section, Mapping):
        return {key: value for key, value in section.items() if key != "weight"}
    return None if section is None else {}


def _in_todays_words(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe with the keys and the defaults of this version of lmgym; as it is, if this version cannot read it."""
    recipe = redacted(recipe)
    try:
        return plain_recipe(build_config(recipe))
    except Exception:  # a user's environment may look for a file that has moved, for example
        return recipe


def _leaves(tree: Any, where: str = "") -> Iterable[tuple[str, Any]]:
    """The values of a tree by dotted keys; a list is one value, and so is an empty section."""
    if not isinstance(tree, Mapping) or not tree:
        yield where, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, f"{where}.{key}" if where else str(key))
