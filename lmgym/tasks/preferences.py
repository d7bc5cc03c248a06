"""`preferences`: answers that people or programs have judged, as pairs (chosen, rejected) or one by one."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError, represent
from lmgym.core.registry import register
from lmgym.pictures.ids import FIRST
from lmgym.tasks.base import MissingSplit
from lmgym.tasks.prompt_forms import own_texts
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.cells import column, prompt_of
from lmgym.tasks.rows.find import Source
from lmgym.tasks.rows.formats import rows_of
from lmgym.tasks.rows.messages import Prompt, as_prompt, messages_of
from lmgym.tasks.rows.pictures import RowPictures
from lmgym.tasks.sources import of_own_data, shared_out
from lmgym.types import Example, Message, RatedAnswer, with_recipe_spans

NUMBER = re.compile(r"[+-]?[0-9]{1,30}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True)
class Columns:
    """The names of a row's columns. Example: Columns("prompt", "chosen", "rejected", "completion", "label")"""

    prompt: str
    chosen: str
    rejected: str
    completion: str
    label: str
    chosen_rating: str | None = None
    rejected_rating: str | None = None
    prompt_end: str | None = None
    pictures: RowPictures = field(default_factory=RowPictures)

    def known(self, row: Mapping[str, Any]) -> set[str | None]:
        """The names of all columns of a row that are not left to `meta`."""
        names = {value for value in vars(self).values() if isinstance(value, str)}
        return {*names, self.pictures.column(row)}


@register("task", "preferences")
@own_texts
def preferences(
    split: str,
    path: str | list[str] | Path | None = None,
    hub_id: str | None = None,
    config: str | None = None,
    prompt: str = "prompt",
    chosen: str = "chosen",
    rejected: str = "rejected",
    completion: str = "completion",
    label: str = "label",
    chosen_rating: str | None = None,
    rejected_rating: str | None = None,
    prompt_end: str | None = None,
    images: str | None = "images",
    image_folder: str | Path | None = None,
    splits: dict[str, str] | None = None,
    validation: float = 0.0,
    test: float = 0.1,
) -> list[Example]:
    """Rated answers from a file, a folder or the Hugging Face Hub, in the forms that datasets have. The rest of the
    arguments are column names.

    * Pairs: {"prompt", "chosen", "rejected"}. The chosen answer is rated 1, the rejected one 0, or as the columns
      `chosen_rating` and `rejected_rating` say. The chosen answer is also the example's reference, so that a supervised
      stage can imitate it first.
    * Marks: {"prompt", "completion", "label"}; the label is true or false, or a number as rating. One answer each.
      What is marked true (or above 0) is also a reference.

    Texts, or lists of chat messages. Answers of messages end with the assistant's; messages before it must be those of
    the prompt. Without a column `prompt`, the prompt is what the conversations of both answers begin with; of texts, it
    ends with the last `prompt_end` in them, such as "\\n\\nAssistant:". Pictures of a prompt stand in the column
    `images` (without it, in `image`), as in the task data, with files below `image_folder`. Answers have none. All
    other columns go to `meta`.

    `path` is a file, a pattern with {split}, or a folder (.parquet, .jsonl, .json, .csv). It may also be a run: an
    example is then a group of its rollouts.jsonl, the answers to one prompt in one step, with their scores as ratings
    (`logs.rollouts: all` keeps every group). Answers that were cut, conversations, and groups whose scores are all
    equal are left out. The shares `validation` and
    `test` of the training prompts, by a hash, are the splits that the data does not have itself.

    Raises LmgymError with file and line for a row without a pair, a pair of equal answers or ratings, and wrong roles.

    Example:
        >>> load_task("preferences", "train", path="pairs.jsonl")[0].rated
        (RatedAnswer(text='4', rating=1.0), RatedAnswer(text='5', rating=0.0))
    """
    if isinstance(path, str | Path) and (rollouts := Path(path).expanduser() / "rollouts.jsonl").is_file():
        return shared_out("preferences", split, partial(_sampled, rollouts), validation, test)
    pictures = RowPictures.of(images, image_folder)
    names = (prompt, chosen, rejected, completion, label, chosen_rating, rejected_rating, prompt_end)
    columns = Columns(*names, pictures)
    source = Source("preferences", path, hub_id or "", config, splits=splits or {})
    return of_own_data(source, split, partial(_example, columns), validation, test)


def _sampled(rollouts: Path, part: str) -> list[Example]:
    """The groups of a run, in the order in which they were sampled; all of them are `train`."""
    if part != "train":
        raise MissingSplit(f"a run's answers are all training answers, and '{part}' was asked for")
    groups: dict[tuple[int, int, int], dict[str, Any]] = {}
    for where, record in rows_of(rollouts):
        try:
            usable = record["kind"] == "train" and len(record["turns"]) == 1 and "error" not in record
            if not usable or record["turns"][0]["stop"] not in ("eos", "stop"):
                continue
            if max(record["turns"][0].get("prompt_ids", ()), default=0) >= FIRST:
                raise LmgymError(
                    f"{where}: this run's prompts hold pictures, which its rollouts.jsonl does not; give the pairs as "
                    "rows of their own, with a column images"
                )
            place = (int(record["stage"]), int(record["step"]), int(record["group"]))
            text = str(record["turns"][0]["text"])
            prompt = _asked(record, where)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise LmgymError(
                f"{where}: no record of a run's rollouts.jsonl ({type(error).__name__}: {error})"
            ) from error
        group = groups.setdefault(place, {"prompt": prompt, "rated": {}})
        group["rated"][text] = _rating(record, "score", where, 0.0)
    return [
        Example(
            id=f"preferences/{part}/" + "/".join(map(str, place)),
            prompt=group["prompt"],
            references=(max(group["rated"], key=group["rated"].__getitem__),),
            rated=tuple(RatedAnswer(text, score) for text, score in group["rated"].items()),
        )
        for place, group in groups.items()
        if len(set(group["rated"].values())) > 1
    ]


def _asked(record: Mapping[str, Any], where: str) -> Prompt:
    """The prompt of a run's record in the form in which the run asked it. Older runs have not noted that of a text."""
    prompt = prompt_of(record, "prompt", where)
    if "recipe_spans" not in record:
        return prompt
    spans = record["recipe_spans"]
    restored: Prompt = with_recipe_spans(prompt, spans)
    bare = bool(spans) and len(spans[0]) == 1  # [form] comes first; any other text went through the chat template
    return [{"role": "user", "content": restored}] if isinstance(restored, str) and not bare else restored


def _example(columns: Columns, row: Row, id: str) -> Example:
    where, values = row
    if columns.chosen in values or columns.rejected in values or columns.completion not in values:
        prompt, rated = _pair(values, columns, where)
    else:
        prompt, rated = _marked(values, columns, where)
    known = columns.known(values)
    meta = {key: value for key, value in values.items() if key not in known}
    good = tuple(answer.text for answer in rated[:1] if answer.rating > 0)
    return Example(id=id, prompt=prompt, references=good, meta=meta, rated=rated)


def _pair(row: Mapping[str, Any], columns: Columns, where: str) -> tuple[Prompt, tuple[RatedAnswer, ...]]:
    """The prompt and the two answers of a row."""
    names = (columns.chosen, columns.rejected)
    answers = {name: _with_pictures(column(row, name, where), row, columns, name, where) for name in names}
    if columns.prompt in row:
        prompt: Any = _prompt(row, columns, where)
    elif all(isinstance(answer, str) for answer in answers.values()):
        begun = _begun(answers, columns, where)
        answers = {name: answer[len(begun) :] for name, answer in answers.items()}
        prompt = _prompt({**row, columns.prompt: begun}, columns, where)
    else:
        prompt = _shared_messages(answers, where)
    prompt = _in_messages(prompt, answers, columns.prompt, where)
    better, worse = (_answer(answer, prompt, name, where) for name, answer in answers.items())
    ratings = [_rating(row, name, where, usual) for name, usual in (
        (columns.chosen_rating, 1.0), (columns.rejected_rating, 0.0))]  # fmt: skip
    if better == worse:
        raise LmgymError(f"{where}: chosen and rejected answer are equal, {represent(better)}; a pair must differ")
    if ratings[0] <= ratings[1]:
        raise LmgymError(
            f"{where}: the chosen answer is rated {ratings[0]:g}, and the rejected one {ratings[1]:g}; the chosen one "
            "must be the better one"
        )
    return prompt, (RatedAnswer(better, ratings[0]), RatedAnswer(worse, ratings[1]))


def _marked(row: Mapping[str, Any], columns: Columns, where: str) -> tuple[Prompt, tuple[RatedAnswer, ...]]:
    """The prompt and the one answer of a row."""
    prompt: Any = _prompt(row, columns, where)
    told = _with_pictures(row[columns.completion], row, columns, columns.completion, where)
    prompt = _in_messages(prompt, {columns.completion: told}, columns.prompt, where)
    answer = _answer(told, prompt, columns.completion, where)
    return prompt, (RatedAnswer(answer, _rating(row, columns.label, where, 1.0)),)


def _prompt(row: Mapping[str, Any], columns: Columns, where: str) -> Prompt:
    """The prompt in a row's own column, with the row's pictures."""
    name, shown = columns.prompt, columns.pictures.shown(row, where)
    put = partial(columns.pictures.put_into, shown=shown, name=name, where=where)
    return as_prompt(column(row, name, where), name, where, shown=put)


def _in_messages(prompt: Prompt, answers: Mapping[str, Any], its_column: str, where: str) -> Prompt:
    """The prompt; where it is a text that is said again in messages before an answer, these messages, as TRL reads
    such rows: then it goes through the chat template."""
    for name, answer in answers.items():
        before = messages_of(answer, name, where)[:-1] if isinstance(answer, list) else []
        if isinstance(prompt, str) and before:
            if prompt.strip() not in (message["content"].strip() for message in before):
                raise LmgymError(
                    f"{where}: column '{name}' holds messages before the answer that are not those of the prompt: none "
                    f"of them is the text in column '{its_column}'; make that one of the messages, or leave it out"
                )
            return as_prompt(before, name, where)
    return prompt


def _with_pictures(answer: Any, row: Mapping[str, Any], columns: Columns, name: str, where: str) -> Any:
    """An answer in messages, with the row's pictures in those before the answer itself."""
    if not isinstance(answer, list) or len(answer) < 2:
        return answer
    shown = columns.pictures.shown(row, where)
    return [*columns.pictures.put_into(answer[:-1], shown, name, where), answer[-1]]


def _rating(row: Mapping[str, Any], name: str | None, where: str, usual: float) -> float:
    value = usual if name is None else column(row, name, where)
    if isinstance(value, str) and NUMBER.fullmatch(value):  # as a cell of a .csv
        value = float(value)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise LmgymError(f"{where}: column '{name}' must hold true, false or a number, got {represent(value)}")
    return float(value)


def _answer(value: Any, prompt: Prompt, name: str, where: str) -> str:
    """The text of an answer: of messages, the assistant's last one, behind what the prompt holds already."""
    if isinstance(value, str):
        if not value.strip():
            raise LmgymError(f"{where}: the answer in column '{name}' is empty")
        return value
    messages = messages_of(value, name, where)
    if messages[-1]["role"] != "assistant":
        raise LmgymError(
            f"{where}: the last message in column '{name}' must be the assistant's, not the {messages[-1]['role']}'s"
        )
    if messages[-1].get("tool_calls"):
        raise LmgymError(
            f"{where}: the answer in column '{name}' calls tools (tool_calls), and only a text can be learned; write "
            "the call into the content as the model does, or leave such rows out with task.unfit: drop"
        )
    if messages[:-1] and messages[:-1] != prompt:
        raise LmgymError(
            f"{where}: column '{name}' holds messages before the answer that are not those of the prompt; a pair "
            "shares all messages but the last"
        )
    return _answer(messages[-1]["content"], prompt, name, where)


def _begun(answers: Mapping[str, str], columns: Columns, where: str) -> str:
    """The prompt that two texts begin with: all up to the last `prompt_end`."""
    end = columns.prompt_end
    if not end:
        raise LmgymError(
            f"{where}: there is no column '{columns.prompt}'; name it (task.prompt), or say how the prompt ends that "
            'both texts begin with, such as task.prompt_end: "\\n\\nAssistant:"'
        )
    prompts = {text[: text.rindex(end) + len(end)] if end in text else None for text in answers.values()}
    if len(prompts) != 1 or None in prompts:
        raise LmgymError(
            f"{where}: chosen and rejected do not begin with the same prompt up to the last {represent(end)} "
            "(task.prompt_end)"
        )
    return str(prompts.pop())


def _shared_messages(answers: Mapping[str, Any], where: str) -> list[Message]:
    """The messages that two conversations begin with, up to the last one of each."""
    one, other = (messages_of(value, name, where) for name, value in answers.items())
    shared = [pair[0] for pair in takewhile(lambda pair: pair[0] == pair[1], zip(one[:-1], other[:-1], strict=False))]
    if not shared or len(one) != len(shared) + 1 or len(other) != len(shared) + 1:
        raise LmgymError(
            f"{where}: chosen and rejected must be conversations that are equal but for their last message, the answer"
        )
    as_prompt(shared, "chosen", where)  # the last one must be the user's
    return shared
