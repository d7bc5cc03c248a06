"""Convert RL4LMs' data pools to lmgym's tasks."""

from collections.abc import Callable
from typing import Any

from lmgym.compat.rl4lms.classes import recipe_arguments
from lmgym.compat.rl4lms.schema import Conversion, Section, identified, is_added
from lmgym.core import registry
from lmgym.core.errors import LmgymError

NO_TEST_REFERENCES = ("common_gen", "totto")  # whose authors keep the references of test to themselves
EXAMPLES = {  # references to train on, as the data's authors count them; each is an example of its own to RL4LMs
    "imdb": 20_000,
    "imdb_seq2seq": 10_000,
    "common_gen": 67_389,
    "totto": 120_761,
    "cnn_daily_mail": 287_113,
    "narrative_qa": 65_494,
    "wmt14": 4_508_785,
    "wmt16": 4_548_885,
    "iwslt2017": 206_112,
    "daily_dialog": 35_000,
}


def task(value: Any, conversion: Conversion) -> dict[str, Any]:
    """The `task:` section of {id: POOL, args: {...}}.

    A pool that the user has registered is a task of the same name, with the same arguments. Besides RL4LMs' own
    arguments, `path` and `hub_id` say where the data is. Raises LmgymError for an unknown pool.

    Example: {"id": "commongen", "args": {"concept_end_token": "."}} -> {"name": "common_gen", "end": ".", ...}"""
    name, arguments = identified(value, "datapool")
    if is_added("task", name):
        return {"name": name, **recipe_arguments("task", name, arguments.rest())}
    if name not in POOLS:
        raise LmgymError(f"datapool.id is '{name}'; {registry.suggest(name, {*POOLS, *registry.names('task')})}")
    section = POOLS[name](arguments, conversion)
    for key in ("path", "hub_id", "limit"):
        if (own := arguments.take(key, Any)) is not None:
            section[key] = own
    for key in arguments.leftovers():
        conversion.warn(f"{key}: the data pool has no such argument, so it is left out")
    return section


def _renamed(name: str, **keys: tuple[str, Any, Any]) -> Callable[[Section, Conversion], dict[str, Any]]:
    """A reader of a pool that only renames arguments: {RL4LMs' name: (lmgym's name, type, default)}."""

    def make(arguments: Section, conversion: Conversion) -> dict[str, Any]:
        return {"name": name, **arguments.renamed(**keys)}

    return make


AFFIXES: dict[str, tuple[str, Any, Any]] = {
    "prompt_prefix": ("prompt_prefix", str, None),
    "prompt_suffix": ("prompt_suffix", str, None),
}


def _imdb(arguments: Section, conversion: Conversion) -> dict[str, Any]:
    if arguments.take("seed", int) is not None:
        conversion.warn("datapool.args.seed: the split is made by a hash of the reviews, the same in every run")
    return {"name": "imdb"}


def _wmt(arguments: Section, conversion: Conversion) -> dict[str, Any]:
    which = arguments.take("wmt_id", str, "wmt16")
    if which not in ("wmt14", "wmt16"):
        raise LmgymError(f"datapool.args.wmt_id is '{which}'; lmgym has wmt14 and wmt16, and 'parallel' for any files")
    source, target = ("source_language", str, "en"), ("target_language", str, "de")
    return _renamed(which, source_language=source, target_language=target, **AFFIXES)(arguments, conversion)


def _wmt14_processed(arguments: Section, conversion: Conversion) -> dict[str, Any]:
    if "hub_id" not in arguments and "path" not in arguments:
        conversion.warn(
            "datapool.id wmt14_processed_en_de: WMT14 as its authors publish it; name a cleaned copy by "
            "datapool.args.hub_id, or its files by path"
        )
    return _renamed("wmt14", **AFFIXES)(arguments, conversion)


def _news_only(arguments: Section, conversion: Conversion) -> dict[str, Any]:
    return {**_renamed("wmt16", **AFFIXES)(arguments, conversion), "news_only": True}


POOLS: dict[str, Callable[[Section, Conversion], dict[str, Any]]] = {
    "dummy_pool": _renamed("dummy", n_samples=("size", int, 100), prompt=("prompt", str, None)),
    "imdb": _imdb,
    "imdb_seq2seq": _renamed("imdb_seq2seq", positive_ratio=("positive_ratio", float, 1.0)),
    "commongen": _renamed(
        "common_gen",
        prefix=("prefix", str, "summarize: "),
        concept_separator_token=("separator", str, " "),
        concept_end_token=("end", str, " "),
    ),
    "totto": _renamed("totto", representation=("representation", str, "subtable")),
    "cnn_daily_mail": _renamed(
        "cnn_daily_mail", **AFFIXES, truncate_article=("truncate_article", int, None), max_size=("max_size", int, None)
    ),
    "narrative_qa": _renamed("narrative_qa"),
    "wmt16": _wmt,
    "wmt14_processed_en_de": _wmt14_processed,
    "wmt16newsonly": _news_only,
    "iwslt2017en_de": _renamed("iwslt2017", **AFFIXES),
    "crd3": _renamed("crd3", max_context_size=("max_context_size", int, 5)),
    "daily_dialog": _renamed("daily_dialog", context_size=("context_size", int, 5)),
}
