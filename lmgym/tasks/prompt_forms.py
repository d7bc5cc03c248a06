"""How a prompt reaches a model with a chat template: as messages, as a text, or as it was rendered before.

Why `auto` is what it is: TRL and OpenRLHF give a text to the model as it stands, and render messages; verl's prompts
are always messages. So the data decides. lmgym's own tasks hold problems, which TRL's and verl's scripts put into a
message before they train on them, and so does lmgym."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.tasks.streamed import StreamedExamples
from lmgym.text.chat import plain_text
from lmgym.types import BarePrompt, Example, RecipeText

Prompts = Literal["auto", "chat", "text", "rendered"]
Task = TypeVar("Task", bound=Callable[..., Any])


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
        if prompts == "chat":
            content = RecipeText(prompt, prompt.spans) if isinstance(prompt, BarePrompt) else prompt
            return replace(example, prompt=[{"role": "user", "content": content}])
        return replace(example, prompt=_bare(prompt, "rendered" if prompts == "rendered" else "text"))

    return examples.map(formed) if isinstance(examples, StreamedExamples) else [formed(one) for one in examples]


def _bare(text: str, form: Literal["text", "rendered"] = "text") -> BarePrompt:
    return BarePrompt(text, getattr(text, "spans", ()), form)
