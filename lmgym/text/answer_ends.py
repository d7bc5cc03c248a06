"""What ends an answer: the mark that the chat template writes behind one, or the tokenizer's end of sequence."""

from typing import Any
from weakref import WeakKeyDictionary

from lmgym.core.errors import represent
from lmgym.text.control import bare_ids, control_tokens
from lmgym.text.template import around_answer, template_pieces


def end_id(tokenizer: Any) -> Any:
    """The id that ends a causal model's answer: the control token that the chat template writes behind one, as Gemma's
    writes <end_of_turn>, else the tokenizer's end of sequence (None if it has none)."""
    return tokenizer.eos_token_id if (mark := end_mark(tokenizer)) is None else mark


def template_notes(tokenizer: Any) -> tuple[str, str]:
    """Two sentences about a tokenizer's chat template, each empty if there is nothing to say: one on the end of an
    answer, and one that tells of a template that would spoil a run."""
    around = around_answer(tokenizer) if getattr(tokenizer, "chat_template", None) else None
    if around is None:
        return "", ""
    (prompt, before, _), mark, end, about_end = around, end_mark(tokenizer), tokenizer.eos_token, ""
    if mark is None:
        about_end = f"the chat template writes no control token behind an answer, so a target ends with {end}"
    elif mark != tokenizer.eos_token_id:
        name = tokenizer.convert_ids_to_tokens(mark)
        about_end = f"a target ends with {name}, as in the chat template, and an answer at it or {end}"
    missing = before.removeprefix(prompt)
    generates = "".join(template_pieces(tokenizer, [{"role": "user", "content": "?"}], generate=False)) != prompt
    if before == prompt + missing and missing.strip() and not generates:
        return about_end, (
            f"the chat template has no generation prompt: it writes {represent(missing)} before an answer, but not at "
            "the end of a prompt, so the policy would have to write it; add what follows `add_generation_prompt` "
            "to the template, or give that text as policy.answer_start"
        )
    return about_end, ""


_marks: WeakKeyDictionary[Any, tuple[Any, int | None]] = WeakKeyDictionary()


def end_mark(tokenizer: Any) -> int | None:
    """The control token that the chat template writes behind the last answer; None without one. Found again only when
    the template or the control tokens have changed."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    control = control_tokens(tokenizer)
    state = (str(tokenizer.chat_template), control.ids)
    if tokenizer not in _marks or _marks[tokenizer][0] != state:
        around = around_answer(tokenizer)
        _marks[tokenizer] = (state, None if around is None else _first_control(tokenizer, around[2]))
    return _marks[tokenizer][1]


def _first_control(tokenizer: Any, text: str) -> int | None:
    """The control token that a text begins with, white space aside."""
    control = control_tokens(tokenizer)
    for id in bare_ids(tokenizer, text, later=True):
        if id in control.ids and control.made_of(text, [id]):
            return id
        if tokenizer.decode([id], skip_special_tokens=False).strip():
            break
    return None
