"""Tasks: loading one, few-shot examples, and `check_task`, which tests the contract of a task.

A task is a registered function `task(split, **arguments)` that returns or yields Examples. Splits are "train",
"validation" and "test"; a task raises MissingSplit for a split that it does not have."""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from lmgym.core import registry, seeds
from lmgym.core.errors import LmgymError, describe, place
from lmgym.core.files import read_text
from lmgym.core.registry import suggest
from lmgym.core.validation import check_arguments, check_text
from lmgym.tasks.prompt_forms import Prompts, in_form
from lmgym.tasks.rows import MissingSplit as MissingSplit
from lmgym.tasks.rows.unfit import Choice, collecting
from lmgym.tasks.streamed import StreamedExamples, first_of, in_memory
from lmgym.types import Example, Message, RecipeText

OPTIONS = (
    "limit",
    "system_prompt",
    "few_shot",
    "prompt_prefix",
    "prompt_suffix",
    "prompts",
    "unfit",
)  # of any task, see `load_task`
LONGEST_SYSTEM_PROMPT = 2**20  # bytes
SPLITS = ("train", "validation", "test")
Task = TypeVar("Task", bound=Callable[..., Any])
Prompt = str | Sequence[Message]


@dataclass(frozen=True)
class FewShot:
    """`n` solved examples from `split`, put before each prompt.

    draw "fixed": the first n examples, the same for every prompt. draw "random": n examples drawn for each prompt, as a
    function of the seed and the example's id. An example is never its own shot.

    Example: FewShot(n=8, draw="random")"""

    n: int = 4
    draw: Literal["fixed", "random"] = "fixed"
    split: str = "train"


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
    shots = _few_shot(few_shot)
    examples = _examples(name, split, arguments, unfit)
    source = examples if shots is None or shots.split == split else _examples(name, shots.split, arguments, unfit)
    affixes = (prompt_prefix, prompt_suffix)
    examples = examples if limit is None else examples[:limit]
    examples = _with_options(examples, affixes, _system_text(system_prompt), shots, source, seed)
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
    shots = _few_shot(section.get("few_shot"))
    arguments = {key: value for key, value in section.items() if key not in (*OPTIONS, "name", "split")}
    source = _examples(section["name"], shots.split, arguments, section.get("unfit", "refuse")) if shots else []
    examples = []
    for index, problem in enumerate(prompts):
        if not (problem if isinstance(problem, str) else problem and problem[-1]["content"]):
            raise LmgymError(f"prompt {index + 1} is empty; give it some text")
        prompt = _written(section["name"], arguments, problem)
        examples.append(Example(id=f"prompt/{index}", prompt=prompt))
        _check_texts(examples[-1], f"prompt {index + 1}")
    affixes = (section.get("prompt_prefix", ""), section.get("prompt_suffix", ""))
    written = _with_options(examples, affixes, _system_text(section.get("system_prompt")), shots, source, seed)
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
    prompts = {str(example.prompt): example.id for example in train}
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
            if str(example.prompt) in prompts:
                twin = prompts[str(example.prompt)]
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


def _examples(name: str, split: str, arguments: Mapping[str, Any], unfit: Choice = "refuse") -> Sequence[Example]:
    """Call the task and check every example that it returns; those that stay in their file, the first ones now and each
    when it is read."""
    task = registry.get("task", name)
    arguments = check_arguments(task, arguments, "task", given=1, also=OPTIONS)
    try:
        with collecting(unfit, f"task '{name}', split '{split}'"):
            produced = task(split, **arguments)
            if not isinstance(produced, Iterable):
                raise LmgymError(
                    f"task '{name}' returned {type(produced).__name__} for split '{split}', not a list of Examples"
                )
            examples = produced if isinstance(produced, StreamedExamples) else list(produced)
    except (LmgymError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, too
        raise LmgymError(f"task '{name}', split '{split}', raised {describe(error)}{place(error, __file__)}") from error
    if not examples:
        where = f"; task.path is {arguments['path']}" if arguments.get("path") else ""
        raise LmgymError(f"task '{name}' has no examples in split '{split}'{where}")
    ids = set[str]()
    for index, example in enumerate(first_of(examples)):
        if not (isinstance(example, Example) and isinstance(example.id, str)):
            raise LmgymError(f"task '{name}', split '{split}': item {index} is no Example with a text as its id")
        if example.id in ids:
            raise LmgymError(f"task '{name}', split '{split}': the id '{example.id}' comes twice; ids must be unique")
        if not example.prompt:
            raise LmgymError(f"task '{name}', split '{split}': the prompt of '{example.id}' is empty")
        if not (isinstance(example.references, tuple) and all(isinstance(text, str) for text in example.references)):
            raise LmgymError(f"task '{name}', split '{split}': references of '{example.id}' must be a tuple of texts")
        _check_texts(example, f"task '{name}', split '{split}'")
        ids.add(example.id)

    def checked(example: Example) -> Example:
        _check_texts(example, f"task '{name}', split '{split}'")
        return example

    return examples.map(checked) if isinstance(examples, StreamedExamples) else examples


def _check_texts(example: Example, where: str) -> None:
    """Raise LmgymError for a prompt that is neither a text nor messages, and for text that no tokenizer can encode."""
    messages = [] if isinstance(example.prompt, str) else list(example.prompt)
    if not all(isinstance(one, Mapping) and isinstance(one.get("content"), str) for one in messages):
        raise LmgymError(
            f"{where}: the prompt of '{example.id}' is no text, and no list of messages with role and content"
        )
    prompt = [example.prompt] if isinstance(example.prompt, str) else [one["content"] for one in messages]
    try:
        for text in (*prompt, *example.references):
            check_text(text, f"{where}: the prompt or a reference of '{example.id}'")
    except ValueError as error:
        raise LmgymError(str(error)) from error


def _few_shot(few_shot: FewShot | dict[str, Any] | None) -> FewShot | None:
    if few_shot is None:
        return None
    given = asdict(few_shot) if isinstance(few_shot, FewShot) else few_shot
    if not isinstance(given, dict):
        raise LmgymError(f"key 'task.few_shot' must be a section with n, draw and split, not {few_shot!r}")
    shots = FewShot(**check_arguments(FewShot, given, "task.few_shot", given=0))
    if shots.n < 0:
        raise LmgymError(f"task.few_shot.n must be 0 or more, not {shots.n}")
    return shots


def _system_text(system_prompt: str | None) -> str | None:
    """The system prompt, read from its file if it is "file:PATH"."""
    if not isinstance(system_prompt, str | None):
        raise LmgymError(f"key 'task.system_prompt' must be a text, or file:PATH, not {str(system_prompt)[:100]}")
    if system_prompt is None or not system_prompt.startswith("file:"):
        return system_prompt
    path = Path(system_prompt.removeprefix("file:")).expanduser()
    try:
        return read_text(path, LONGEST_SYSTEM_PROMPT).removesuffix("\n")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a null character
        raise LmgymError(f"task.system_prompt: cannot read {path} as UTF-8 text ({error})") from error


def _chooser(shots: FewShot, source: Sequence[Example], seed: int) -> Callable[[Example], list[Example]]:
    """A function from an example to its shots."""
    # An example must not see its own prompt solved, so shots with an equal prompt are skipped.
    indices: dict[str, set[int]] = {}
    for index, shot in enumerate(source):
        indices.setdefault(str(shot.prompt), set()).add(index)

    def choose(example: Example) -> list[Example]:
        own = indices.get(str(example.prompt), set())
        others = len(source) - len(own)
        if others < shots.n:
            raise LmgymError(f"task.few_shot.n is {shots.n}, but split '{shots.split}' has {others} other examples")
        enough = shots.n + len(own)  # so many candidates always hold n that may be used
        fixed = shots.draw == "fixed"
        candidates = range(enough) if fixed else _draw(len(source), enough, seed, "few_shot", example.id)
        return [source[index] for index in candidates if index not in own][: shots.n]

    return choose


def _draw(size: int, count: int, *path: int | str) -> list[int]:
    """`count` distinct indices below `size`, in random order; faster than a whole permutation for each example."""
    drawn: dict[int, None] = {}  # a dict keeps the order of drawing
    start, key = 0, seeds.key(*path)
    while len(drawn) < count:
        drawn |= dict.fromkeys((seeds.uniforms([key], start, 2 * count)[0] * size).astype(int).tolist())
        start += 2 * count
    return list(drawn)[:count]


def _with_options(
    examples: Sequence[Example],
    affixes: tuple[str, str],
    system: str | None,
    shots: FewShot | None,
    source: Sequence[Example],
    seed: int,
) -> Sequence[Example]:
    """Examples with prefix and suffix; with a system prompt or shots (from `source`) prompts become chat messages."""
    if shots is not None:
        source = in_memory(source, "task.few_shot looks for shots in all examples, and task.streaming leaves them in "
                           "their file; remove one of them")  # fmt: skip
    choose = None if shots is None else _chooser(shots, [_wrap(shot, *affixes) for shot in source], seed)

    def written(example: Example) -> Example:
        wrapped = _wrap(example, *affixes) if any(affixes) else example
        if system is None and choose is None:
            return wrapped
        return replace(wrapped, prompt=_chat(wrapped, system, [] if choose is None else choose(wrapped)))

    return examples.map(written) if isinstance(examples, StreamedExamples) else [written(one) for one in examples]


def _wrap(example: Example, prefix: str, suffix: str) -> Example:
    if isinstance(example.prompt, str):
        return replace(example, prompt=RecipeText.join(RecipeText(prefix), example.prompt, RecipeText(suffix)))
    messages = list(example.prompt)
    place = max((n for n, one in enumerate(messages) if one["role"] == "user"), default=len(messages) - 1)
    content = RecipeText.join(RecipeText(prefix), messages[place]["content"], RecipeText(suffix))
    messages[place] = {**messages[place], "content": content}
    return replace(example, prompt=messages)


def _chat(example: Example, system: str | None, shots: Sequence[Example]) -> list[Message]:
    """The example's prompt as chat messages: system message, shots, question."""
    own_system, question = _split_system(example)
    if system is not None and own_system is not None:
        raise LmgymError(
            f"task.system_prompt is given, but the prompt of '{example.id}' has a system message of its own"
        )
    system = own_system if system is None else RecipeText(system)
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for shot in shots:
        if not shot.references:
            raise LmgymError(
                f"task.few_shot: example '{shot.id}' has no reference and so cannot be shown as a solved one"
            )
        shot_system, shot_question = _split_system(shot)
        if shot_system not in (None, system):
            raise LmgymError(f"task.few_shot: the system message of '{shot.id}' is not that of '{example.id}'")
        messages += [*shot_question, {"role": "assistant", "content": shot.references[0]}]
    return [*messages, *question]


def _split_system(example: Example) -> tuple[str | None, list[Message]]:
    """The prompt's system message, if it has one, and its other messages."""
    if isinstance(example.prompt, str):
        return None, [{"role": "user", "content": example.prompt}]
    messages = list(example.prompt)
    if messages[0]["role"] == "system":
        return messages[0]["content"], messages[1:]
    return None, messages
