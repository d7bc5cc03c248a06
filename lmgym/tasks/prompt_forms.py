"""What the options of any task make of its prompts: prefix, suffix, system message, solved examples, and the form in
which a prompt reaches a model with a chat template: as messages, as a text, or as it was rendered before.

Why `auto` is what it is: TRL and OpenRLHF give a text to the model as it stands, and render messages; verl's prompts
are always messages. So the data decides. lmgym's own tasks hold problems, which TRL's and verl's scripts put into a
message before they train on them, and so does lmgym."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from lmgym.core import registry, seeds
from lmgym.core.errors import LmgymError
from lmgym.core.files import read_text
from lmgym.core.validation import check_arguments
from lmgym.tasks.streamed import each, in_memory
from lmgym.text.chat import plain_text
from lmgym.types import BarePrompt, Example, Message, RecipeText, pictures_of, told_apart

LONGEST_SYSTEM_PROMPT = 2**20  # bytes
Prompts = Literal["auto", "chat", "text", "rendered"]
Task = TypeVar("Task", bound=Callable[..., Any])


@dataclass(frozen=True)
class FewShot:
    """`n` solved examples from `split`, put before each prompt.

    draw "fixed": the first n examples, the same for every prompt. draw "random": n examples drawn for each prompt, as a
    function of the seed and the example's id. An example is never its own shot.

    Example: FewShot(n=8, draw="random")"""

    n: int = 4
    draw: Literal["fixed", "random"] = "fixed"
    split: str = "train"


def own_texts(task: Task) -> Task:
    """Decorator of a task that reads the user's own prompts: with `prompts: auto` its texts stay texts.

    Example:
        >>> @register("task", "riddles")
        ... @own_texts
        ... def riddles(split, path): ...
    """
    task.__dict__["own_texts"] = True
    return task


def in_form(examples: Sequence[Example], task: str, prompts: Prompts) -> Sequence[Example]:
    """The examples of a task with prompts of the form that the recipe wants; `tasks.base.load_task` says what each is.
    Raises LmgymError for an unknown form, and for messages that are said to be rendered.

    Example:
        >>> in_form([Example("a/0", "2+2=")], "arithmetic", "chat")[0].prompt
        [{'role': 'user', 'content': '2+2='}]
    """
    if prompts not in (forms := get_args(Prompts)):
        raise LmgymError(f"key 'task.prompts' must be one of {', '.join(forms)}, not {prompts!r}")
    if prompts == "auto" and not hasattr(registry.get("task", task), "own_texts"):
        return examples

    def formed(example: Example) -> Example:
        prompt = example.prompt
        if not isinstance(prompt, str):
            if prompts == "rendered":
                raise LmgymError(
                    f"task.prompts is rendered, and the prompt of '{example.id}' is a list of messages; write chat, "
                    "and the model's template renders it"
                )
            return replace(example, prompt=_bare(plain_text(prompt))) if prompts == "text" else example
        if prompts == "auto" and isinstance(prompt, BarePrompt):  # a run's prompt, in the form that it had
            return example
        if prompts == "chat" or (prompts == "auto" and pictures_of(prompt)):
            content = RecipeText(prompt, prompt.spans, prompt.pictures) if isinstance(prompt, BarePrompt) else prompt
            return replace(example, prompt=[{"role": "user", "content": content}])
        return replace(example, prompt=_bare(prompt, "rendered" if prompts == "rendered" else "text"))

    return each(examples, formed)


def few_shot_of(few_shot: FewShot | dict[str, Any] | None) -> FewShot | None:
    """The `few_shot` section of a recipe, checked."""
    if few_shot is None:
        return None
    section = asdict(few_shot) if isinstance(few_shot, FewShot) else few_shot
    if not isinstance(section, dict):
        raise LmgymError(f"key 'task.few_shot' must be a section with n, draw and split, not {few_shot!r}")
    shots = FewShot(**check_arguments(FewShot, section, "task.few_shot", given=0))
    if shots.n < 0:
        raise LmgymError(f"task.few_shot.n must be 0 or more, not {shots.n}")
    return shots


def with_options(
    examples: Sequence[Example],
    affixes: tuple[str, str],
    system_prompt: str | None,
    shots: FewShot | None,
    source: Sequence[Example],
    seed: int,
) -> Sequence[Example]:
    """Examples with prefix and suffix; with a system prompt or shots (from `source`) prompts become chat messages."""
    if shots is not None:
        source = in_memory(source, "task.few_shot looks for shots in all examples, and task.streaming leaves them in "
                           "their file; remove one of them")  # fmt: skip
    choose = None if shots is None else _chooser(shots, [_wrap(shot, *affixes) for shot in source], seed)
    system = _system_text(system_prompt)

    def written(example: Example) -> Example:
        wrapped = _wrap(example, *affixes) if any(affixes) else example
        if system is None and choose is None:
            return wrapped
        return replace(wrapped, prompt=_chat(wrapped, system, [] if choose is None else choose(wrapped)))

    return each(examples, written)


def _bare(text: str, form: Literal["text", "rendered"] = "text") -> BarePrompt:
    return BarePrompt(text, getattr(text, "spans", ()), form, pictures_of(text))


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
        indices.setdefault(told_apart(shot.prompt), set()).add(index)

    def choose(example: Example) -> list[Example]:
        own = indices.get(told_apart(example.prompt), set())
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


def _wrap(example: Example, prefix: str, suffix: str) -> Example:
    if isinstance(example.prompt, str):
        text = RecipeText.join(RecipeText(prefix), example.prompt, RecipeText(suffix))
        if isinstance(example.prompt, BarePrompt):  # of a mixture's member, whose prompts have their form already
            text = _bare(text, example.prompt.form)
        return replace(example, prompt=text)
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
    if isinstance(example.prompt, BarePrompt) and example.prompt.form == "rendered":  # of a mixture's member
        raise LmgymError(
            f"the prompt of '{example.id}' is rendered, so task.system_prompt and task.few_shot can put no messages "
            "before it; remove them, or prompts: rendered of its task"
        )
    if isinstance(example.prompt, str):
        return None, [{"role": "user", "content": example.prompt}]
    first, *others = example.prompt
    return (first["content"], others) if first["role"] == "system" else (None, [first, *others])
