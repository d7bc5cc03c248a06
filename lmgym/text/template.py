"""Messages rendered by a chat template, in pieces: what must stay text is set apart from what may be control tokens.

A message may hold the name of a control token. It is put between two marks before the template sees it, and found by
them in what the template has written. The marks are made from a hash of all texts, so none of the texts can hold them.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmgym.core.errors import LmgymError, warn
from lmgym.text.control import ControlTokens, control_tokens, split_text
from lmgym.types import Message

ROLE = re.compile(r"[A-Za-z0-9_.-]+")


def template_pieces(
    tokenizer: Any,
    messages: Sequence[Message],
    template: Mapping[str, Any] | None = None,
    generate: bool = True,
    merge: bool = True,
) -> list[str]:
    """The messages rendered by the tokenizer's chat template, with `template` as its keyword arguments, in pieces as
    `control.split_text` gives them. `generate`: with the beginning of an answer at the end.

    A last message of the assistant is an answer that is begun: its text follows what the template begins an answer
    with. If the template refuses the messages, they are merged by `merge_roles`, with a warning, unless `merge` is
    False.
    Raises LmgymError if it refuses them still, or if a role is not one word.

    Example: with a template that writes "<|user|>" and a user who writes "<eos>":
    template_pieces(tokenizer, [{"role": "user", "content": "a<eos>"}]) -> ['<|user|>a', '<eos>', '<|assistant|>']"""
    if generate and len(messages) > 1 and messages[-1]["role"] == "assistant":
        *before, last = template_pieces(tokenizer, messages[:-1], template, merge=merge)
        first, *others = split_text(tokenizer, messages[-1]["content"])
        return [*before, last + first, *others]
    marks = Marks(tokenizer, repr((messages, template)))
    return marks.split(_rendered(tokenizer, marks.put_messages(messages), marks.put(template or {}), generate, merge))


NO_TOOLS = (
    "the model's chat template leaves out `tools`, so the model reads nothing of them; write env.tool_prompt: system, "
    "or, for tools of the data, give a template that writes them (policy.template)"
)


def ignores_tools(tokenizer: Any, messages: Sequence[Message], template: Mapping[str, Any] | None) -> bool:
    """True if the template is given `tools`, by its arguments or beside a message, and writes the same without them."""
    every: list[Mapping[str, Any]] = [*messages, template or {}]
    if not any(tree.get("tools") for tree in every):
        return False
    *bare, without = ({key: value for key, value in tree.items() if key != "tools"} for tree in every)
    return template_pieces(tokenizer, messages, template) == template_pieces(tokenizer, bare, without)


def ending_pieces(
    tokenizer: Any, history: Sequence[Message], new: Sequence[Message], template: Mapping[str, Any] | None
) -> list[str]:
    """What the template writes behind the answer that stands between `history` and `new`, in pieces. Raises LmgymError
    as `template_pieces` does, and if the template drops or repeats the answer."""
    marks = Marks(tokenizer, repr((history, new, template)))
    answer = {"role": "assistant", "content": marks.answer}
    answered = [*marks.put_messages(history), answer, *marks.put_messages(new)]
    text = _rendered(tokenizer, answered, marks.put(template or {}))
    if text.count(marks.answer) != 1:
        raise LmgymError(
            "the chat template drops or repeats an earlier answer, so a conversation cannot be appended to"
        )
    return marks.split(text.split(marks.answer)[1])


def around_answer(tokenizer: Any) -> tuple[str, str, str] | None:
    """What the template writes of a short conversation: the prompt of an answer, all that stands before the answer in
    the end, and what stands behind it. None if the template refuses or drops the answer.

    Example: with a template of ChatML: around_answer(tokenizer)[2] -> '<|im_end|>\\n'"""
    marks = Marks(tokenizer, "")
    asked = {"role": "user", "content": "?"}
    try:
        prompt = _rendered(tokenizer, [asked], {}, merge=False)
        whole = [asked, {"role": "assistant", "content": marks.answer}]
        text = _rendered(tokenizer, whole, {}, generate=False, merge=False)
    except LmgymError:
        return None
    before, found, behind = text.partition(marks.answer)
    return (prompt, before, behind) if found and marks.answer not in behind else None


@dataclass
class Marks:
    """Marks around the names of control tokens in texts, and a mark in place of an answer.

    `texts` is all that the template will see. The characters are ones that no template changes (private use of Unicode,
    digits): not by trimming, changing case or writing JSON."""

    tokenizer: Any
    texts: str
    control: ControlTokens = field(init=False)
    marked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.control = control_tokens(self.tokenizer)
        digest = hashlib.sha256(self.texts.encode("utf-8", "surrogatepass")).hexdigest()
        number = int(digest, 16)
        self.begin, self.end, self.answer = (f"\ue000{number}{kind}\ue001" for kind in range(3))

    def put_messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages with marks around what would become control tokens. Roles are checked instead, since templates
        compare them. Raises LmgymError for a role of more than one word."""
        for message in messages:
            if not ROLE.fullmatch(message["role"]):
                raise LmgymError(f"a message has the role {message['role'][:100]!r}; a role is one word, such as user")
        return [{key: own if key == "role" else self.put(own) for key, own in m.items()} for m in messages]

    def put(self, value: Any) -> Any:
        """A text, or all texts in a dictionary or list, with marks around what would become control tokens."""
        if isinstance(value, str):
            pieces = split_text(self.tokenizer, value, self.control)
            self.marked.update(pieces[1::2])
            return "".join(f"{self.begin}{p}{self.end}" if n % 2 else p for n, p in enumerate(pieces))
        if isinstance(value, Mapping):
            keys = [self.put(key) if self.control.names.search(str(key)) else key for key in value]
            return dict(zip(keys, map(self.put, value.values()), strict=True))
        if isinstance(value, list | tuple):
            return [self.put(own) for own in value]
        return value

    def split(self, text: str) -> list[str]:
        """A rendered text in pieces, without marks. Where the template has separated a pair of marks, by splitting a
        message at a name, say, the text is cut and nothing set apart. Templates may write a text as JSON."""
        if not self.marked:
            return [text]
        spelled = self.marked | {json.dumps(name, ensure_ascii=False)[1:-1] for name in self.marked}
        names = "|".join(map(re.escape, sorted(spelled, key=len, reverse=True)))
        return [piece or "" for piece in re.split(f"{self.begin}({names}){self.end}|{self.begin}|{self.end}", text)]


def _rendered(
    tokenizer: Any, messages: Sequence[Message], template: Mapping[str, Any], generate: bool = True, merge: bool = True
) -> str:
    """The messages rendered by the chat template; if it refuses them, merged by `merge_roles`, with a warning. Tools
    beside a message, those of a row of the data, are an argument of the template; of several the last ones count."""

    def render(messages: Sequence[Message]) -> str:
        plain: list[dict[str, Any]] = [dict(message) for message in messages]
        tools = [own for message in plain if (own := message.pop("tools", None))]
        arguments = {**({"tools": tools[-1]} if tools else {}), **template}
        return tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generate, **arguments)

    try:
        return render(messages)
    except Exception as error:  # jinja raises whatever the template's author chose
        roles = ", ".join(message["role"] for message in messages)
        fewer = merge_roles(messages) if merge else list(messages)
        if len(fewer) == len(messages):
            raise LmgymError(f"the tokenizer's chat template refuses the messages ({roles}): {error}") from error
        try:
            text = render(fewer)
        except Exception:
            raise LmgymError(f"the tokenizer's chat template refuses the messages ({roles}): {error}") from error
        warn(
            f"the chat template refuses the messages as they are ({error}); system messages were put into the user's "
            "next ones, and messages of one role in a row joined",
            stacklevel=2,
        )
        return text


def merge_roles(messages: Sequence[Message]) -> list[Message]:
    """Messages for a chat template without a system role, or with strictly alternating roles.

    System messages become user messages; consecutive messages of one role become one, with a blank line between them.

    Example: merge_roles([{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}])
    -> [{'role': 'user', 'content': 'Add.\\n\\n1+1='}]"""
    fewer: list[Message] = []
    for message in messages:
        role = "user" if message["role"] == "system" else message["role"]
        if fewer and fewer[-1]["role"] == role:
            fewer[-1] = {**message, **fewer[-1], "content": f"{fewer[-1]['content']}\n\n{message['content']}"}
        else:
            fewer.append({**message, "role": role})
    return fewer
