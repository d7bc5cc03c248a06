"""Tasks: loading one, and `check_task`, which tests the contract of a task.

A task is a registered function `task(split, **arguments)` that returns or yields Examples. Splits are "train",
"validation" and "test"; a task raises MissingSplit for a split that it does not have."""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from lmgym.core import registry
from lmgym.core.errors import LmgymError, describe, place
from lmgym.core.registry import suggest
from lmgym.core.validation import check_arguments, check_text
from lmgym.tasks.prompt_forms import FewShot as FewShot
from lmgym.tasks.prompt_forms import Prompts, few_shot_of, in_form, with_options
from lmgym.tasks.rows import MissingSplit as MissingSplit
from lmgym.tasks.rows.unfit import Choice, collecting
from lmgym.tasks.streamed import StreamedExamples, first_of
from lmgym.types import Example, Message, told_apart

# Of any task, see `load_task`.
OPTIONS = ("limit", "system_prompt", "few_shot", "prompt_prefix", "prompt_suffix", "prompts", "unfit")
SPLITS = ("train", "validation", "test")
Task = TypeVar("Task", bound=Callable[..., Any])
Prompt = str | Sequence[Message]


def load_task(
    name: str,
    split: str,
    *,
    limit: int | None = None,
    system_prompt: str | None = None,
    few_shot: FewShot | dict[str, Any] | None = None,
    prompt_prefix: str = "",
    prompt_suffix: str = "",
    prompts: Prompts = "auto",
    unfit: Choice = "refuse",
    seed: int = 0,
    **arguments: Any,
) -> Sequence[Example]:
    """Load a split of a task, with the options of any task applied to its prompts.

    `arguments` go to the task and are checked against its signature. `limit` keeps only the first examples.
    `prompt_prefix` and `prompt_suffix` are put around each prompt and each shot; of a chat prompt, around the user's
    last message. `unfit` says what is done with rows that cannot be examples: "refuse" tells of all of them, "drop"
    leaves them out and counts them (rows/unfit.py). With `system_prompt` (a text, or "file:PATH", read without its last
    newline) or `few_shot`, prompts become chat messages: the system message, question and first reference of each shot,
    the question. `seed` is for random shots.

    `prompts` says how a prompt reaches a model with a chat template. chat: as messages; a text becomes one of the user.
    text: without the template; messages are joined. rendered: a text that a template has written before; its control
    tokens count, so take only data that you trust. auto: messages are a chat; a text from a file of your own
    stays a text, as in TRL, and a problem of any other task is put into a message (tasks/prompt_forms.py).

    Raises LmgymError for unknown or wrong arguments, a missing or empty split, a repeated id, an empty prompt, or a
    shot without references.

    Example:
        >>> load_task("arithmetic", "test", limit=512, largest=50)[0].prompt
    """
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise LmgymError(f"key 'task.limit' must be a whole number of at least 1, not {limit!r}")
    texts = {"system_prompt": system_prompt or "", "prompt_prefix": prompt_prefix, "prompt_suffix": prompt_suffix}
    for option, text in texts.items():
        if not isinstance(text, str):
            raise LmgymError(f"key 'task.{option}' must be a text, not {text!r}")
    if unfit not in ("refuse", "drop"):
        raise LmgymError(f"key 'task.unfit' must be 'refuse' or 'drop', not {unfit!r}")
    shots = few_shot_of(few_shot)
    examples = _examples(name, split, arguments, unfit)
    source = examples if shots is None or shots.split == split else _examples(name, shots.split, arguments, unfit)
    examples = examples if limit is None else examples[:limit]
    examples = with_options(examples, (prompt_prefix, prompt_suffix), system_prompt, shots, source, seed)
    return in_form(examples, name, prompts)


def prompt_writer(write: Callable[[str, Mapping[str, Any]], Prompt]) -> Callable[[Task], Task]:
    """Decorator of a task that writes more into a prompt than the problem's text: `write(text, arguments)` is the
    prompt of a problem, with the task's arguments as the recipe has them. `lmgym generate` asks a user's own problems
    with it.

    Example:
        >>> @register("task", "riddles")
        ... @prompt_writer(lambda text, arguments: f"{text}\\n{arguments['ending']}")
        ... def riddles(split, ending="Answer:"):
        ...     ...
    """

    def keep(task: Task) -> Task:
        task.__dict__["write_prompt"] = write
        return task

    return keep


def examples_from_prompts(prompts: Sequence[Prompt], section: Mapping[str, Any], seed: int = 0) -> Sequence[Example]:
    """Examples from a user's own problems (texts, or lists of chat messages), with everything that a recipe's `task:`
    section does to the text of a problem: what the task itself writes (`prompt_writer`), prefix and suffix, system
    prompt, shots. The task itself is loaded only for shots.

    Raises LmgymError for an empty problem, and as `load_task` does.

    Example:
        >>> examples_from_prompts(["2+2="], {"name": "arithmetic", "system_prompt": "Add."})[0].prompt
        [{'role': 'system', 'content': 'Add.'}, {'role': 'user', 'content': '2+2=\\nAnswer:'}]
    """
    shots = few_shot_of(section.get("few_shot"))
    arguments = {key: value for key, value in section.items() if key not in (*OPTIONS, "name", "split")}
    source = _examples(section["name"], shots.split, arguments, section.get("unfit", "refuse")) if shots else []
    examples = []
    for index, problem in enumerate(prompts):
        if not (problem if isinstance(problem, str) else problem and problem[-1]["content"]):
            raise LmgymError(f"prompt {index + 1} is empty; give it some text")
        example = Example(id=f"prompt/{index}", prompt=_written(section["name"], arguments, problem))
        examples.append(_checked(f"prompt {index + 1}", example))
    affixes = (section.get("prompt_prefix", ""), section.get("prompt_suffix", ""))
    written = with_options(examples, affixes, section.get("system_prompt"), shots, source, seed)
    return in_form(written, section["name"], section.get("prompts", "auto"))


def _written(name: str, arguments: Mapping[str, Any], problem: Prompt) -> Prompt:
    """The prompt that the task makes of a problem; of chat messages, the last one is the problem."""
    task = registry.get("task", name)
    write = getattr(task, "write_prompt", None)
    if write is None:
        return problem
    bound = inspect.signature(task).bind("train", **check_arguments(task, arguments, "task", given=1, also=OPTIONS))
    bound.apply_defaults()
    if isinstance(problem, str):
        written: Prompt = write(problem, bound.arguments)
        return written
    *before, last = problem
    written = write(last["content"], bound.arguments)
    return [*before, {**last, "content": written}] if isinstance(written, str) else [*before, *written]


def check_task(name: str, split: str = "train", **arguments: Any) -> None:
    """Raise LmgymError, with one sentence, if the task breaks its contract. Use it in the tests of your own tasks.

    The contract: ids are unique, prompts are not empty, references are a tuple of texts, two loads are equal, and no
    validation or test example has the id or the prompt of a training example.

    Example:
        >>> check_task("data", path="riddles.jsonl")
    """
    if [*_examples(name, split, arguments)] != [*_examples(name, split, arguments)]:
        raise LmgymError(
            f"task '{name}': two loads of split '{split}' differ; a task must be a function of its arguments"
        )
    # Compare the held-out splits with train, as far as the task has them.
    try:
        train = _examples(name, "train", arguments)
    except MissingSplit:
        return
    ids = {example.id for example in train}
    prompts = {told_apart(example.prompt): example.id for example in train}
    for other in ("validation", "test"):
        try:
            held_out = _examples(name, other, arguments)
        except MissingSplit:
            continue
        for example in held_out:
            if example.id in ids:
                raise LmgymError(
                    f"task '{name}': id '{example.id}' is in both train and {other}; splits must be disjoint"
                )
            if (twin := prompts.get(told_apart(example.prompt))) is not None:
                raise LmgymError(
                    f"task '{name}': {other} example '{example.id}' has the prompt of train example '{twin}'"
                )


def check_split(task: str, split: str, valid: Sequence[str] = SPLITS) -> None:
    """Raise MissingSplit if `split` is not one of `valid`. Most tasks call it first."""
    if split not in valid:
        raise MissingSplit(f"task '{task}' has no split '{split}'; {suggest(split, valid)}")


def hash_fraction(text: str) -> float:
    """A number in [0, 1) from a hash of the text. Tasks use it to divide examples into splits: equal texts always land
    in the same split."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def drawn_split(text: str) -> str:
    """The split of an example that is made, not read: a function of its text. A tenth of all is for validation, and as
    much for test."""
    drawn = hash_fraction(text)
    return "test" if drawn < 0.1 else "validation" if drawn < 0.2 else "train"


def _examples(name: str, split: str, arguments: Mapping[str, Any], unfit: Choice = "refuse") -> Sequence[Example]:
    """Call the task and check every example that it returns; those that stay in their file, the first ones now and each
    when it is read."""
    task = registry.get("task", name)
    arguments = check_arguments(task, arguments, "task", given=1, also=OPTIONS)
    whose = f"task '{name}', split '{split}'"
    try:
        with collecting(unfit, whose):
            produced = task(split, **arguments)
            if not isinstance(produced, Iterable):
                raise LmgymError(
                    f"task '{name}' returned {type(produced).__name__} for split '{split}', not a list of Examples"
                )
            examples = produced if isinstance(produced, StreamedExamples) else list(produced)
    except (LmgymError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, too
        raise LmgymError(f"{whose}, raised {describe(error)}{place(error, __file__)}") from error
    if not examples:
        where = f"; task.path is {arguments['path']}" if arguments.get("path") else ""
        raise LmgymError(f"task '{name}' has no examples in split '{split}'{where}")
    ids = set[str]()
    for index, example in enumerate(first_of(examples)):
        if not (isinstance(example, Example) and isinstance(example.id, str)):
            raise LmgymError(f"{whose}: item {index} is no Example with a text as its id")
        if example.id in ids:
            raise LmgymError(f"{whose}: the id '{example.id}' comes twice; ids must be unique")
        if not example.prompt:
            raise LmgymError(f"{whose}: the prompt of '{example.id}' is empty")
        if not (isinstance(example.references, tuple) and all(isinstance(text, str) for text in example.references)):
            raise LmgymError(f"{whose}: references of '{example.id}' must be a tuple of texts")
        ids.add(_checked(whose, example).id)
    return examples.map(partial(_checked, whose)) if isinstance(examples, StreamedExamples) else examples


def _checked(whose: str, example: Example) -> Example:
    """The example. Raises LmgymError for a prompt that is neither a text nor messages, and for text that no tokenizer
    can encode."""
    messages = [{"content": example.prompt}] if isinstance(example.prompt, str) else list(example.prompt)
    if not all(isinstance(message, Mapping) and isinstance(message.get("content"), str) for message in messages):
        raise LmgymError(
            f"{whose}: the prompt of '{example.id}' is no text, and no list of messages with role and content"
        )
    try:
        for text in (*(message["content"] for message in messages), *example.references):
            check_text(text, f"{whose}: the prompt or a reference of '{example.id}'")
    except ValueError as error:
        raise LmgymError(str(error)) from error
    return example
