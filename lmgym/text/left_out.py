"""Messages of which a chat template writes nothing, since it does not know their role."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from lmgym.core.errors import LmgymError
from lmgym.text.template import template_pieces
from lmgym.types import Message

SOUGHT = "408408408408"  # no template changes digits, nor writes these
WRITTEN = ("user", "assistant")  # roles that every template writes

_known: WeakKeyDictionary[Any, dict[tuple[str, str, bool, frozenset[str]], bool]] = WeakKeyDictionary()


def left_out(
    tokenizer: Any, messages: Sequence[Message], template: Mapping[str, Any] | None, begun: bool = False
) -> str:
    """A sentence if the chat template leaves one of the messages out; else empty. Some templates have no `tool`, some
    take `system` as the first message alone. `begun`: other messages stand before these.

    Example: left_out(tokenizer, [{"role": "tool", "content": "408"}], None, begun=True)
    -> "the model's chat template leaves out messages of the role 'tool', so the model reads nothing of them; ..."
    """
    known = _known.setdefault(tokenizer, {})
    for place, message in enumerate(messages):
        role, later = message["role"], begun or place > 0
        if role in WRITTEN:
            continue
        key = (str(tokenizer.chat_template), role, later, frozenset(template or ()))
        if key not in known:
            known[key] = _leaves_out(tokenizer, role, later, template)
        if known[key]:
            where = " behind the first one" if later and role != "tool" else ""
            remedy = "write env.tool_role: user" if role == "tool" else "put their text into the user's message"
            return (
                f"the model's chat template leaves out messages of the role '{role}'{where}, so the model reads "
                f"nothing of them; {remedy}, or give a template that writes them (policy.template)"
            )
    return ""


def _leaves_out(tokenizer: Any, role: str, later: bool, template: Mapping[str, Any] | None) -> bool:
    """Whether a conversation with a message of this role, the first one or a later one, is written without it."""
    own: Message = {"role": role, "content": SOUGHT, **({"name": "search"} if role == "tool" else {})}
    asked, answered = {"role": "user", "content": "?"}, {"role": "assistant", "content": "?"}
    messages = [asked, answered, own] if later else [own, asked]
    try:
        return SOUGHT not in "".join(template_pieces(tokenizer, messages, template, merge=False))
    except LmgymError:
        return False  # a refusal is told where the messages themselves are written
