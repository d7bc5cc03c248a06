"""A recipe as a plain tree: reading YAML strictly, `key=value` overrides, merging a stage over the defaults, writing.

Of the keys it knows only which sections may be a name alone, and the default names; build.py makes the typed tree."""

import json
import shlex
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lmgym.core.errors import LONGEST_MESSAGE, LmgymError, reason, shortened
from lmgym.core.files import nearby, read_text
from lmgym.core.registry import suggest
from lmgym.core.visible import NOT_PLAIN, is_hidden

LONGEST_RECIPE = 2**17  # bytes; reading takes about a second for so many
MOST_EXPANDED = 10**6
MOST_BITS = 1024  # of a whole number
DEEPEST = 50  # levels of sections and lists; whatever walks a recipe may then do so by recursion
NAMED = ("algorithm", "env", "task")  # sections that may be written as a name alone
DEFAULT = {"algorithm": "grpo", "env": "single_turn"}  # for a section without a name, such as {group_size: 4}
PARTS = ("credit", "surrogate", "correction", "tokens", "episode")  # so may these, inside of `algorithm`


def read_yaml(path: Path) -> dict[str, Any]:
    """The file's tree. Raises LmgymError for a missing or malformed file, or one that gives a key twice."""
    try:
        text = read_text(path, LONGEST_RECIPE)
    except FileNotFoundError as error:
        raise LmgymError(f"there is no recipe {path}{nearby(path)}") from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a null character
        why = getattr(error, "strerror", None) or error
        raise LmgymError(f"{path} is not a readable YAML file: {why}") from error
    try:
        tree = load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 2025-02-30 is no date
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        why = getattr(error, "problem", None) or reason(error)
        raise LmgymError(f"{where}: not valid YAML: {why}") from error
    if not isinstance(tree, dict):
        holds = "it is empty" if tree is None else f"not {type(tree).__name__}"
        raise LmgymError(f"{path}: a recipe is a mapping of keys to values; {holds}")
    return tree


def load_yaml(text: str) -> Any:
    """The value of a YAML text. Raises YAMLError, ValueError or RecursionError for one that is not valid, gives a key
    twice, or is more than MOST_EXPANDED characters once every alias is replaced by what it stands for."""
    loader = _StrictLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded(node, {}) > MOST_EXPANDED:
            raise ValueError(f"with its aliases written out it has more than {MOST_EXPANDED:,} characters")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def apply_override(tree: dict[str, Any], override: str, stage_keys: Collection[str]) -> None:
    """Set one dotted key in place. A stage is named by its name or its number; where there is only one, its keys stand
    for themselves too.

    Example: apply_override(tree, "stages.rl.optimizer.learning_rate=1e-4", STAGE_KEYS)"""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise LmgymError(f"'{override}' is not an override; write key=value, such as steps=20")
    try:
        value = load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        shown = shortened(text, LONGEST_MESSAGE // 2)
        raise LmgymError(f"override {key}: '{shown}' is not a YAML value") from error
    if _ends_in_comment(text):
        quoted = shlex.quote(f"{key}={json.dumps(text.strip(), ensure_ascii=False)}")
        raise LmgymError(f"override {key}: in YAML a comment begins at the last ' #'; for a text, write {quoted}")
    set_key(tree, key, value, stage_keys)


def set_key(tree: dict[str, Any], key: str, value: Any, stage_keys: Collection[str]) -> None:
    """Set one dotted key in place to a value, as an override does."""
    *parents, last = key.split(".")
    stages: Any = tree.get("stages")
    alone = isinstance(stages, list) and len(stages) == 1 and isinstance(stages[0], dict)
    node: Any = stages[0] if alone and key.split(".")[0] in stage_keys else tree
    for depth, part in enumerate(parents):
        if isinstance(node, list):
            node = node[_stage_index(node, part, key)]
        else:
            if isinstance(node.get(part), str) and part in (*NAMED, *PARTS):
                node[part] = {"name": node[part]}  # `task: gsm8k` grows into a section
            if node.get(part) is None:  # so does `early_stop: null`, which the recipe of a run says
                node[part] = {}
            node = node[part]
        if not isinstance(node, (dict, list)):
            raise LmgymError(f"override {key}: '{'.'.join(parents[: depth + 1])}' is a value, not a section")
    if isinstance(node, list) and parents != ["stages"]:
        whole = ".".join(parents)
        raise LmgymError(f"override {key}: '{whole}' is a list; write all of it, such as {whole}=[a, b]")
    if isinstance(node, list):
        raise LmgymError(f"override {key}: name a key inside the stage, such as stages.{last}.steps")
    node[last] = value


def own_key(tree: Mapping[str, Any], key: str) -> str:
    """A dotted key in its canonical form: stages by number, and without `stages.N` if there is only one stage.

    Example: own_key({"stages": [{"name": "rl"}]}, "stages.rl.steps") -> "steps" """
    stages, parts = tree.get("stages"), key.split(".")
    if parts[0] != "stages" or len(parts) < 3 or not isinstance(stages, list):
        return key
    try:
        number = str(_stage_index(stages, parts[1], key))
    except LmgymError:
        return key
    return ".".join(parts[2:] if len(stages) == 1 else ["stages", number, *parts[2:]])


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Sections merge key by key; a section with another `name`, and `rewards`, replace the base's. The base's
    algorithm or environment without a name has the name in `DEFAULT`; its optimizer, or a part of its algorithm,
    without a name merges with any name."""
    merged = dict(base)
    for key, value in over.items():
        named = key in NAMED or key in PARTS
        old = {"name": merged[key]} if named and isinstance(merged.get(key), str) else merged.get(key)
        new = {"name": value} if named and isinstance(value, str) else value
        merged[key] = new
        if isinstance(old, dict) and isinstance(new, dict) and key != "rewards":
            name = old.get("name") or DEFAULT.get(key)
            goes_over = new.get("name") in (None, name) or (name is None and key in ("optimizer", *PARTS))
            merged[key] = merge(old, new) if goes_over else new
    return merged


def check_heard(tree: Mapping[str, Any], overrides: list[str], stage_keys: Collection[str]) -> None:
    """Refuse a top-level override that every stage answers with a value of its own, rather than ignore it."""
    stages = tree.get("stages") or []
    for key in dict.fromkeys(override.partition("=")[0] for override in overrides):
        # Where there is only one stage, `set_key` has set the key there.
        if len(stages) > 1 and is_unheard(tree, key, stage_keys):
            names = [stage.get("name", number) for number, stage in enumerate(stages)]
            keys = " or ".join(f"stages.{name}.{key}" for name in names)
            raise LmgymError(f"override {key}: every stage sets its own; write {keys}")


def is_unheard(tree: Mapping[str, Any], key: str, stage_keys: Collection[str]) -> bool:
    """True if every stage has a value of its own in place of that at the top of the recipe, which then changes nothing.

    Example: is_unheard({"steps": 9, "stages": [{"steps": 2}]}, "steps", STAGE_KEYS) -> True"""
    stages, path = tree.get("stages"), key.split(".")
    if path[0] not in stage_keys or not isinstance(stages, list) or not stages:
        return False
    base = {key: value for key, value in tree.items() if key in stage_keys}
    rest = _without(base, path)
    return all(
        isinstance(own, dict)
        and _at(merge(base, own), path) != _at(base, path)
        and merge(base, own) == merge(rest, own)
        for own in stages
    )


def write_yaml(tree: Mapping[str, Any]) -> str:
    """The tree as YAML that reads back equal; characters that cannot be seen are escapes, so it can be printed."""
    text = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return NOT_PLAIN.sub(lambda found: f"\\U{ord(found[0]):08X}" if _is_escaped(found[0]) else found[0], text)


def _is_escaped(character: str) -> bool:
    return character != "\n" and is_hidden(character)


def _without(tree: Any, path: list[str]) -> Any:
    """A copy of the tree without the value at this path."""
    if not isinstance(tree, Mapping) or path[0] not in tree:
        return tree
    rest = {key: value for key, value in tree.items() if key != path[0]}
    return rest if len(path) == 1 else {**tree, path[0]: _without(tree[path[0]], path[1:])}


def _at(tree: Any, path: list[str]) -> Any:
    for part in path:
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _ends_in_comment(text: str) -> bool:
    """True if the end of a YAML text is a comment. Whoever writes `#### and the number` means a text."""
    tokens = list(yaml.scan(text))
    ends = [token.end_mark.index for token in tokens if token.end_mark.index > token.start_mark.index]
    return text[max(ends, default=0) :].lstrip().startswith("#")


def _stage_index(stages: list[Any], part: str, key: str) -> int:
    names = [str(stage.get("name", n)) if isinstance(stage, dict) else str(n) for n, stage in enumerate(stages)]
    if part in names:
        return names.index(part)
    if part.isdecimal() and int(part) < len(stages):
        return int(part)
    raise LmgymError(f"override {key}: there is no stage '{part}'; {suggest(part, names)}")


def _expanded(node: yaml.Node, known: dict[int, int | None]) -> int:
    """About how many characters a node has with all aliases in it written out."""
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if id(node) not in known:
        known[id(node)] = None  # it is not finished: an alias to it, from inside of it, would never end
        pairs = isinstance(node, yaml.MappingNode)
        parts = [part for pair in node.value for part in pair] if pairs else node.value
        known[id(node)] = 1 + sum(_expanded(part, known) for part in parts)
    if (size := known[id(node)]) is None:
        raise ValueError("an alias stands for something that contains the alias itself")
    return size


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, which YAML would silently let win, numbers too long to be printed, and halves
    of surrogate pairs, which no file and no tokenizer can hold."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value: int = super().construct_yaml_int(node)
        if value.bit_length() > MOST_BITS:
            raise yaml.constructor.ConstructorError(None, None, "a whole number is too large", node.start_mark)
        return value

    def construct_yaml_str(self, node: yaml.ScalarNode) -> str:
        value: str = self.construct_scalar(node)
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            problem = "half of a surrogate pair is no character; write the character itself"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if key_node.tag.endswith(":merge") else self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuses a node that is too deep, before it has been read."""
        self.depth = getattr(self, "depth", 0) + 1
        if self.depth > DEEPEST:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"it is more than {DEEPEST} levels deep", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Refuses what its tag does not allow, such as `!!int x`, for which the library raises just anything."""
        try:
            return super().construct_object(node, deep)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(None, None, f"this is no {kind}", node.start_mark) from error


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)
_StrictLoader.add_constructor("tag:yaml.org,2002:str", _StrictLoader.construct_yaml_str)


class _Dumper(yaml.SafeDumper):
    """Quotes texts with characters that cannot be seen, Unicode's own line ends among them, which the library would
    write bare: an escape needs quotes."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = '"' if any(map(_is_escaped, text)) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)
