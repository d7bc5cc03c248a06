"""Dialogues: predict the next utterance. `daily_dialog`: DailyDialog (Li et al. 2017, arXiv 1710.03957). `crd3`: CRD3
(Rameshkumar and Bailey 2020)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.tasks.base import MissingSplit, prompt_writer
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.cells import column
from lmgym.tasks.rows.find import NAMES, Source, files_of
from lmgym.tasks.rows.formats import read_json
from lmgym.tasks.rows.json_text import as_object
from lmgym.tasks.rows.load import load_rows
from lmgym.tasks.rows.unfit import fitting, unreadable
from lmgym.tasks.rows.unpacked import lines_of
from lmgym.tasks.sources import check_sizes, disjoint
from lmgym.types import Example

INTENTS = {"inform": 1, "question": 2, "directive": 3, "commissive": 4}
EMOTIONS = {"no_emotion": 0, "anger": 1, "disgust": 2, "fear": 3, "happiness": 4, "sadness": 5, "surprise": 6}
END = "__eou__"  # ends an utterance in the original's files
CRD3_FILES = {"train": "train_files", "validation": "val_files", "test": "test_files"}


@dataclass(frozen=True)
class _Dialogue:
    """Utterances, and for each its intent and emotion as written in the data; None if the data has none. `where` is
    file and line."""

    where: str
    utterances: list[str]
    intents: list[Any] | None
    emotions: list[Any] | None


def _ended(utterances: str, arguments: Mapping[str, Any]) -> str:
    """The prompt of utterances; the last one need not be ended."""
    mark = f" {arguments['end_of_utterance']}"
    return utterances.removesuffix(mark) + mark


@register("task", "daily_dialog")
@prompt_writer(_ended)
def daily_dialog(
    split: str,
    path: str | Path | None = None,
    hub_id: str = "li2017dailydialog/daily_dialog@refs/convert/parquet",
    context_size: int = 5,
    end_of_utterance: str = "<EOU>",
) -> list[Example]:
    """The prompt is `context_size` utterances of a dialogue, the reference the next one; each ends in
    `end_of_utterance`. An utterance with a shorter context makes no example.

    `meta` has the reference's intent (1 inform, 2 question, 3 directive, 4 commissive) and emotion (0 none, 1 anger,
    2 disgust, 3 fear, 4 happiness, 5 sadness, 6 surprise), if the data has them. One space is put before each
    `end_of_utterance` and between utterances; so the reference begins with a space. There are 11,118 dialogues for
    training and 1,000 each for validation and test. Some occur twice: contexts of test are removed from validation, and
    contexts of both from train. Source: RL4LMs, `daily_dialog`, which keeps the spaces of its data.

    `path` is the original's folder (train/dialogues_train.txt, dialogues_act_train.txt, dialogues_emotion_train.txt,
    and so on; each is unpacked), or one such dialogues*.txt; or a folder, a pattern with {split} or a file of rows
    {"dialog", "act", "emotion"} as on the Hub (.parquet, .jsonl) or {"dialogue": [{"text", "act", "emotion"}]} as in
    ParlAI (.json, .jsonl). Without `path` the data comes from the Hugging Face Hub.

    Example:
        >>> load_task("daily_dialog", "test", path="dailydialog", context_size=1)[0].prompt
        'Hey man , you wanna buy some weed ? <EOU>'
    """
    check_sizes(context_size=context_size)

    def examples_of(part: str) -> Iterator[Example]:
        number = 0
        for dialogue in _dialogues(part, path, hub_id):
            for index, answer in enumerate(dialogue.utterances):
                if index >= context_size:
                    context = dialogue.utterances[index - context_size : index]
                    prompt = " ".join(f"{utterance} {end_of_utterance}" for utterance in context)
                    reference = f" {answer} {end_of_utterance}"
                    labels = {"intent": dialogue.intents, "emotion": dialogue.emotions}
                    meta = {name: codes[index] for name, codes in labels.items() if codes is not None}
                    yield Example(f"daily_dialog/{part}/{number}", prompt, (reference,), meta)
                number += 1

    return disjoint("daily_dialog", split, examples_of)


@register("task", "crd3")
def crd3(split: str, path: str | Path, max_context_size: int = 5, skip_blank: bool = False) -> list[Example]:
    """Turns of a role-playing game. The prompt is the last `max_context_size` turns, one per line ("MATT: Hello."), and
    the next actor's name; the reference is the text of the next turn. The first two turns of an episode are context
    only. A turn without text raises LmgymError; with `skip_blank` it is context only.

    `path` is the original's folder (github.com/RevanthRameshkumar/CRD3, unpacked): data/aligned data/train_files,
    val_files and test_files name the episodes, which are in data/cleaned data/EPISODE.json. The data is not on the Hub.
    `meta` has episode and actor; of several actors the first is named. Prompts of test are removed from validation, and
    prompts of both from train. Source: RL4LMs, `crd3`.

    Example:
        >>> load_task("crd3", "test", path="CRD3-master", max_context_size=10)
    """
    check_sizes(max_context_size=max_context_size)
    folder = Path(path).expanduser()
    folder = folder / "data" if (folder / "data").is_dir() else folder

    def examples_of(part: str) -> Iterator[Example]:
        names = folder / "aligned data" / CRD3_FILES[part]
        if not names.is_file():
            raise MissingSplit(f"task 'crd3' has no split '{part}': there is no file {names}")
        for place, episode in lines_of(names):
            if not episode.strip():
                continue
            if "\0" in episode:
                raise LmgymError(f"{place}: the name of an episode holds a NUL byte, which no file name can have")
            file = folder / "cleaned data" / f"{episode.strip()}.json"
            turns = list(fitting(_turns(file), lambda _, row: _turn(row)))
            for index, (where, actor, text) in enumerate(turns):
                if not text.strip() and not skip_blank:
                    blank = f"{where}: key 'UTTERANCES' holds no text; task.skip_blank leaves it out"
                    unreadable(where, LmgymError(blank))
                if index > 1 and text.strip():
                    lines = [f"{name}: {words}" for _, name, words in turns[max(0, index - max_context_size) : index]]
                    prompt = "\n".join([*lines, f"{actor}: "])
                    meta = {"episode": episode.strip(), "actor": actor}
                    yield Example(f"crd3/{part}/{episode.strip()}/{index}", prompt, (text,), meta)

    return disjoint("crd3", split, examples_of)


def _turns(file: Path) -> Iterator[Row]:
    """The turns of an episode."""
    turns = column(as_object(read_json(file), str(file)), "TURNS", str(file))
    if not isinstance(turns, list):
        raise LmgymError(f"{file}: key 'TURNS' must hold a list, got {type(turns).__name__}")
    return ((f"{file}: turn {number}", turn) for number, turn in enumerate(turns, start=1))


def _turn(row: Row) -> tuple[str, str, str]:
    """Place, actor and text of a turn."""
    where, turn = row
    names, utterances = (column(as_object(turn, where), name, where) for name in ("NAMES", "UTTERANCES"))
    for name, texts in (("NAMES", names), ("UTTERANCES", utterances)):
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise LmgymError(f"{where}: key '{name}' must hold a list of texts, got {texts!r}")
    return where, names[0], " ".join(utterances)


def _dialogues(part: str, path: str | Path | None, hub_id: str) -> Iterator[_Dialogue]:
    """The checked dialogues of a split, with intents and emotions as whole numbers."""
    file = None if path is None else _original(part, Path(path).expanduser())
    if file is not None:
        return fitting(_lines(file), lambda _, row: _checked(_of_line(row)))
    return fitting(load_rows("daily_dialog", part, path, hub_id), lambda _, row: _checked(_of_row(row)))


def _checked(dialogue: _Dialogue) -> _Dialogue:
    where = dialogue.where
    if not dialogue.utterances or not all(isinstance(text, str) and text.strip() for text in dialogue.utterances):
        raise LmgymError(f"{where}: each utterance must be a text, got {dialogue.utterances!r}")
    codes = []
    for name, given, known in (("act", dialogue.intents, INTENTS), ("emotion", dialogue.emotions, EMOTIONS)):
        if given is not None and len(given) != len(dialogue.utterances):
            raise LmgymError(f"{where}: {len(given)} codes in '{name}' for {len(dialogue.utterances)} utterances")
        codes.append(given and [_code(value, known, name, where) for value in given])
    return _Dialogue(where, [text.strip() for text in dialogue.utterances], *codes)


def _original(part: str, path: Path) -> Path | None:
    """The original's file of dialogues (one per line) at this path, if there is one."""
    if path.suffix == ".txt":
        return files_of(Source("daily_dialog", path), part)[0]
    candidates = [path / name / f"dialogues_{name}.txt" for name in NAMES[part]]
    return next((file for file in candidates if file.is_file()), None)


def _lines(file: Path) -> Iterator[Row]:
    """The lines of the original's files: one dialogue per line, its intents and emotions in two files next to it."""
    beside = [file.with_name(file.name.replace("dialogues", f"dialogues_{name}", 1)) for name in ("act", "emotion")]
    labelled = [other for other in beside if other.is_file() and other != file]
    if len(labelled) == 1:
        raise LmgymError(f"task.path: beside {file} there is {labelled[0].name} only, of {beside[0].name} and its like")
    for (where, line), *labels in zip_longest(lines_of(file), *map(lines_of, labelled), fillvalue=("", "")):
        if not where:
            raise LmgymError(f"{labels[0][0] or labels[1][0]}: there is no such line in {file}")
        yield where, {"line": line, "labels": [text for _, text in labels]}


def _of_line(row: Row) -> _Dialogue:
    where, values = row
    utterances = values["line"].split(END)
    if utterances.pop().strip():
        raise LmgymError(f"{where}: the line must end in {END}")
    intents, emotions = [text.split() for text in values["labels"]] or (None, None)
    return _Dialogue(where, utterances, intents, emotions)


def _of_row(row: Row) -> _Dialogue:
    """The dialogue of a row, as ParlAI ("dialogue") or the Hub ("dialog", "act", "emotion") has it."""
    where, values = row
    turns = values.get("dialogue")
    if isinstance(turns, list):
        objects = [as_object(turn, where) for turn in turns]
        return _Dialogue(where, *([column(turn, key, where) for turn in objects] for key in ("text", "act", "emotion")))
    columns = {name: column(values, name, where) for name in ("dialog", "act", "emotion")}
    for name, given in columns.items():
        if not isinstance(given, list):
            raise LmgymError(f"{where}: column '{name}' must hold a list, got {given!r}")
    return _Dialogue(where, *columns.values())


def _code(value: Any, known: dict[str, int], name: str, where: str) -> int:
    """The code of an intent or emotion from its name, number or digits: "question", 2 and "2" give 2."""
    code = known.get(value, value) if isinstance(value, str) else value
    if isinstance(code, str) and code.isascii() and code.isdigit() and len(code) < 4:
        code = int(code)
    if isinstance(code, bool) or code not in known.values():
        raise LmgymError(
            f"{where}: '{name}' must be one of {', '.join(f'{c} ({n})' for n, c in known.items())}, got {value!r}"
        )
    return int(code)
