"""What a run reads beside its data, at a checkpoint and now: contents count, not places (contents.py)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmgym.training.resuming.contents import CODE, texts_of
from lmgym.training.resuming.fingerprint import Fingerprint
from lmgym.training.resuming.verdicts import Differences, begun
from lmgym.training.run import Progress

SAME = "the same contents"
PLUGINS = "plugins."


@dataclass(frozen=True)
class Read:
    """What a checkpoint and the recipe of now read. Example: Read.between(before, now).unchanged("stages", 0)"""

    before: Mapping[str, Any]
    now: Mapping[str, Any]
    complete: bool
    """False for a fingerprint of an older version, which knew few of the files; no other ones are compared."""

    @classmethod
    def between(cls, before: Fingerprint, now: Fingerprint) -> "Read":
        """Of two fingerprints. Older ones have the files of environments beside the data, and no other ones."""
        if "read" in before:
            return cls(before["read"], now["read"], True)
        files = [one.get("env files", {}) for one in before["data"]["training"]]
        stages = [{f"env.{key}": f"file:{digest}" for key, digest in one.items()} for one in files]
        return cls({"plugins": {}, "policy": {}, "evaluation": {}, "stages": stages}, now["read"], False)

    def part(self, name: str, stage: int | None = None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The contents of one part, then and now."""
        one, other = (tree[name] if stage is None else (tree[name][stage : stage + 1] or [{}])[0]
                      for tree in (self.before, self.now))  # fmt: skip
        if not self.complete:
            other = {key: _of_kind(value, one[key]) for key, value in other.items() if key in one}
        return one, other

    def unchanged(self, name: str, stage: int | None = None) -> set[str]:
        """The keys of a part that name the same contents then and now."""
        one, other = self.part(name, stage)
        return {key for key in one.keys() & other.keys() if one[key] == other[key]}


def _of_kind(value: Any, like: str) -> Any:
    """A digest of today under the kind of another one."""
    return f"{like.partition(':')[0]}:{value.partition(':')[2]}" if isinstance(value, str) else value


def without_places(recipe: Mapping[str, Any], read: Read) -> dict[str, Any]:
    """A recipe in which what names the same contents then and now is no difference. Plug-ins count by their code."""
    sections = {name: _by_contents(recipe.get(name), read.unchanged(name)) for name in ("policy", "evaluation")}
    stages = [_by_contents(one, read.unchanged("stages", index)) for index, one in enumerate(recipe["stages"])]
    return {**recipe, **sections, "stages": stages} | ({"plugins": None} if read.complete else {})


def _by_contents(tree: Any, keys: set[str], where: str = "") -> Any:
    """A tree whose texts at these dotted keys only say that they name the same contents."""
    if isinstance(tree, Mapping):
        return {key: _by_contents(value, keys, f"{where}{key}.") for key, value in tree.items()}
    if isinstance(tree, list):
        return [_by_contents(value, keys, f"{where}{number}.") for number, value in enumerate(tree)]
    return SAME if where.removesuffix(".") in keys else tree


def compare_read(
    read: Read, then: Mapping[str, Any], recipe: Mapping[str, Any], progress: Progress, found: Differences
) -> None:
    """Compare what the keys name that have not changed themselves: of the policy below adapters, the evaluation, the
    plug-ins, and of the stages that have begun. Code, and folders, where an environment may write, are recorded."""
    if recipe["policy"]["lora_rank"] is not None:  # else the checkpoint holds the whole model
        _compare_contents(read.part("policy"), (then["policy"], recipe["policy"]), "policy.", found)
    _compare_contents(read.part("plugins"), ({}, {}), PLUGINS, found)
    if begun(progress, 0) and then["evaluation"] == recipe["evaluation"]:
        sections = then["evaluation"], recipe["evaluation"]
        _compare_contents(read.part("evaluation"), sections, "evaluation.", found)
    for index, (one, other) in enumerate(zip(then["stages"], recipe["stages"], strict=False)):
        if not begun(progress, index):
            continue
        parts = read.part("stages", index)
        if index < progress.stage_index:  # its code and models are not used any more
            parts = _data_of(parts[0]), _data_of(parts[1])
        _compare_contents(parts, (one, other), f"stages.{other['name']}." if len(recipe["stages"]) > 1 else "", found)


def _compare_contents(
    parts: tuple[Mapping[str, Any], Mapping[str, Any]], sections: tuple[Any, Any], where: str, found: Differences
) -> None:
    """Compare the contents of one part, of two recipes' sections. Other data and models are refused."""
    texts = [dict(texts_of(tree)) for tree in sections]
    codes = [{own for key, own in part.items() if key.startswith(CODE)} for part in parts]
    for key in sorted(parts[0].keys() | parts[1].keys()):
        one, other = (part.get(key) for part in parts)
        if one == other or texts[0].get(key) != texts[1].get(key):  # of another name the recipe says enough
            continue
        if key.startswith(CODE):
            renamed = (one or other) in codes[0] & codes[1]
            if not renamed and (where == PLUGINS or (one and other)):  # else a key of the recipe names other code
                sentence = f"the {key} {_happened(one, other)}"
                found.recorded += [] if sentence in found.recorded else [sentence]  # a stage may name a plug-in's too
                found.other_contents = True
            continue
        found.other_contents = True
        refused = isinstance(one or other, Mapping) or _is_data(key, one or other)
        sentence = f"what {where}{key} names ({texts[1].get(key)}) {_happened(one, other)}"
        (found.refused if refused else found.recorded).append(sentence)


def _data_of(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: own for key, own in part.items() if _is_data(key, own)}


def _is_data(key: str, digest: Any) -> bool:
    """True for a file that is data of an environment."""
    return isinstance(digest, str) and digest.startswith("file:") and key.startswith("env.")


def _happened(one: Any, other: Any) -> str:
    """What became of contents, as the end of a sentence."""
    if one is None or other is None:
        return "was not there" if one is None else "is gone"
    names = [] if isinstance(one, str) or isinstance(other, str) else sorted(
        name for name in one.keys() | other.keys() if one.get(name) != other.get(name)
    )  # fmt: skip
    return "has other contents" + (f" in {', '.join(names)}" if names else "")
