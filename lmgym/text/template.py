"""Messages rendered by a chat template, in pieces: what must stay text is set apart from what may be control tokens.

A message may hold the name of a control token. It is put between two marks before the template sees it, and found by
them in what the template has written. The marks are made from a hash of all texts, so none of the texts can hold them.

A picture is a mark, too. A template that knows pictures gets it as a part of the message, in the form that it asks for,
and writes the model's own mark there, which is then found: a control token, so that no text can spell it."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from lmgym.core.errors import LmgymError, warn
from lmgym.text.control import ControlTokens, control_tokens, split_text
from lmgym.types import Message, picture_text, pictures_of

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
    return marks.split(_rendered(marks, marks.put_messages(messages), marks.put(template or {}), generate, merge))


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
    before = marks.put_messages(history)
    shown = len(marks.pictures)
    answered = [*before, answer, *marks.put_messages(new)]
    text = _rendered(marks, answered, marks.put(template or {}))
    if text.count(marks.answer) != 1:
        raise LmgymError(
            "the chat template drops or repeats an earlier answer, so a conversation cannot be appended to"
        )
    return marks.split(text.split(marks.answer)[1], shown)


def around_answer(tokenizer: Any) -> tuple[str, str, str] | None:
    """What the template writes of a short conversation: the prompt of an answer, all that stands before the answer in
    the end, and what stands behind it. None if the template refuses or drops the answer.

    Example: with a template of ChatML: around_answer(tokenizer)[2] -> '<|im_end|>\\n'"""
    marks = Marks(tokenizer, "")
    asked = {"role": "user", "content": "?"}
    try:
        prompt = _rendered(marks, [asked], {}, merge=False)
        whole = [asked, {"role": "assistant", "content": marks.answer}]
        text = _rendered(marks, whole, {}, generate=False, merge=False)
    except LmgymError:
        return None
    before, found, behind = text.partition(marks.answer)
    return (prompt, before, behind) if found and marks.answer not in behind else None


@dataclass
class Marks:
    """Marks around the names of control tokens in texts, in place of an answer, and in place of each picture.

    `texts` is all that the template will see. The characters are ones that no template changes (private use of Unicode,
    digits): not by trimming, changing case or writing JSON."""

    tokenizer: Any
    texts: str
    control: ControlTokens = field(init=False)
    marked: set[str] = field(default_factory=set)
    pictures: list[str] = field(default_factory=list)
    """The digests of the pictures, in the order of the messages."""

    def __post_init__(self) -> None:
        self.control = control_tokens(self.tokenizer)
        digest = hashlib.sha256(self.texts.encode("utf-8", "surrogatepass")).hexdigest()
        number = int(digest, 16)
        self.begin, self.end, self.answer, self.picture = (f"\ue000{number}{kind}\ue001" for kind in range(4))

    def put_messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages with marks around what would become control tokens. Roles are checked instead, since templates
        compare them. Raises LmgymError for a role of more than one word."""
        for message in messages:
            if not ROLE.fullmatch(message["role"]):
                raise LmgymError(f"a message has the role {message['role'][:100]!r}; a role is one word, such as user")
        return [{key: own if key == "role" else self.put(own) for key, own in m.items()} for m in messages]

    def put(self, value: Any) -> Any:
        """A text, or all texts in a dictionary or list, with marks around what would become control tokens and in place
        of pictures."""
        if isinstance(value, str):
            pieces = split_text(self.tokenizer, value, self.control)
            self.marked.update(piece for piece in pieces[1::2] if not pictures_of(piece))
            self.pictures += [digest for piece in pieces[1::2] for _, digest in pictures_of(piece)]
            return "".join(self._mark(piece) if n % 2 else piece for n, piece in enumerate(pieces))
        if isinstance(value, Mapping):
            keys = [self.put(key) if self.control.names.search(str(key)) else key for key in value]
            return dict(zip(keys, map(self.put, value.values()), strict=True))
        if isinstance(value, list | tuple):
            return [self.put(own) for own in value]
        return value

    def _mark(self, piece: str) -> str:
        return self.picture if pictures_of(piece) else f"{self.begin}{piece}{self.end}"

    def parts(self, content: str) -> list[dict[str, str]]:
        """A marked text as the parts of a message: texts and pictures."""
        texts = [{"type": "text", "text": text} if text else {} for text in content.split(self.picture)]
        parts = [part for text in texts for part in ({"type": "image"}, text) if part][1:]
        return parts or [{"type": "text", "text": ""}]

    def split(self, text: str, first: int = 0) -> list[str]:
        """A rendered text in pieces, without marks; its pictures are those from number `first` on. Where the template
        has separated a pair of marks, by splitting a message at a name, say, the text is cut and nothing set apart.
        Templates may write a text as JSON. Raises LmgymError if the template drops or repeats a picture."""
        shown = iter(self.pictures[first:])
        if not self.marked and not self.pictures:
            return [text]
        # 1. Where the marks are, and where the template has written its own for a picture.
        spelled = self.marked | {json.dumps(name, ensure_ascii=False)[1:-1] for name in self.marked}
        names = "|".join(map(re.escape, sorted(spelled, key=len, reverse=True))) or "(?!)"
        own = mark_of_pictures(self.tokenizer) if self.pictures else ""
        places = "|".join(map(re.escape, filter(None, (self.picture, own))))
        found = re.split(f"{self.begin}({names}){self.end}|{self.begin}|{self.end}|({places})", text)
        # 2. One piece for each: a name, a picture, or nothing.
        pieces, count = found[:1], 0
        for name, place, behind in zip(found[1::3], found[2::3], found[3::3], strict=True):
            count += place is not None
            digest = next(shown, None) if place is not None else None
            pieces += [name or "" if digest is None else picture_text(digest), behind]
        if count != len(self.pictures) - first:
            raise LmgymError(
                f"the chat template writes {count} pictures where the messages hold {len(self.pictures) - first}; give "
                "a template that writes each one once (policy.template)"
            )
        return pieces


@dataclass(frozen=True)
class Form:
    """How a chat template takes messages. Example: of SmolVLM's template Form(parts=True, mark="<image>")"""

    parts: bool = False
    """A content must be a list of parts: of a text the template would write nothing."""
    mark: str = ""
    """What it writes for a part that is a picture; empty if it knows none."""


_forms: WeakKeyDictionary[Any, tuple[str, Form]] = WeakKeyDictionary()


def form_of(tokenizer: Any) -> Form:
    """How the tokenizer's chat template takes messages, found by a few of them."""
    template = str(tokenizer.chat_template)
    if tokenizer not in _forms or _forms[tokenizer][0] != template:
        _forms[tokenizer] = (template, _found_form(tokenizer))
    return _forms[tokenizer][1]


def mark_of_pictures(tokenizer: Any) -> str:
    """What the chat template writes for a picture; empty if it knows none. Raises LmgymError for a mark that a text may
    hold: then pictures could be forged."""
    mark = form_of(tokenizer).mark
    if mark and not control_tokens(tokenizer).names.search(mark):
        raise LmgymError(
            f"the chat template writes {mark!r} for a picture, which is no control token of the tokenizer; give one "
            "that writes the model's own mark (policy.template)"
        )
    return mark


def _found_form(tokenizer: Any) -> Form:
    asked, more = "\ue000asked\ue001", "\ue000more\ue001"  # characters that no template changes
    first, second = ({"type": "text", "text": own} for own in (asked, more))

    def written(content: Any) -> str:
        try:
            messages = [{"role": "user", "content": content}]
            found = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        except Exception:  # jinja raises whatever the template's author chose
            return ""
        return found if asked in found else ""

    as_text, without = written(asked), written([first, second])
    within = written([first, {"type": "image"}, second])
    # A list that is written as code of Python, or as JSON, is not understood.
    if not within or more not in without or "'text'" in within or '"text"' in within:
        return Form()
    same = next((n for n, (one, two) in enumerate(zip(without, within, strict=False)) if one != two), len(without))
    rest = without[same:]
    return Form(not as_text, within[same : len(within) - len(rest)].strip() if within.endswith(rest) else "")


def _rendered(
    marks: Marks, messages: Sequence[Message], template: Mapping[str, Any], generate: bool = True, merge: bool = True
) -> str:
    """The messages rendered by the chat template; if it refuses them, merged by `merge_roles`, with a warning. Tools
    beside a message, those of a row of the data, are an argument of the template; of several the last ones count."""
    form = form_of(marks.tokenizer)

    def render(messages: Sequence[Message]) -> str:
        plain: list[dict[str, Any]] = [dict(message) for message in messages]
        tools = [own for message in plain if (own := message.pop("tools", None))]
        arguments = {**({"tools": tools[-1]} if tools else {}), **template}
        for message in plain:
            content = message.get("content", "")
            if form.parts or (form.mark and marks.picture in content):
                message["content"] = marks.parts(content)
        return marks.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generate, **arguments)

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
