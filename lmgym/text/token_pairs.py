"""Which tokens of two vocabularies are taken for each other, so that their distributions can be compared.

A common token is one that both vocabularies have: it writes the same bytes, or ends an answer. Every other token counts
as the common one that its text begins with, in the other tokenizer's tokens: of "thermal", a token of one vocabulary
and "therm" + "al" in the other, the outcome is "therm". What begins with no common token is in one class, the rest."""

from dataclasses import dataclass
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.text.answer_ends import end_id
from lmgym.text.chat import has_template
from lmgym.text.control import bare_ids
from lmgym.text.token_bytes import TokenBytes, token_bytes

BATCH = 4096  # texts that are tokenized at a time
ANCHOR = "\n"  # texts are tokenized behind it, since some tokenizers put a space before a text


@dataclass(frozen=True)
class TokenPairs:
    """The tokens of a policy and of its teacher: what they write, the pairs of ids that end an answer, and the class of
    each id of the two heads. A common token has its own; `rest` is the class of the rest, and so their number.

    Example: of ["a", "b", "ab", "<eos>"] and ["<s>", "<eos>", "a", "b"], with three common tokens:
        ends [(3, 1)]    policy_classes [0, 1, 0, 2]    teacher_classes [3, 2, 0, 1]    rest 3"""

    policy: TokenBytes
    teacher: TokenBytes
    ends: list[tuple[int, int]]
    policy_classes: list[int]
    teacher_classes: list[int]
    rest: int

    def table(self, tokenizer: Any, teacher_tokenizer: Any) -> list[str]:
        """What the run prints of the two tokenizers, line by line."""
        ends = ", ".join(f"{tokenizer.decode([one])} is {teacher_tokenizer.decode([two])}" for one, two in self.ends)
        lines = ["algorithm.teacher has another tokenizer; its tokens and the policy's are laid side by side by bytes:"]
        sides = ("policy", tokenizer, self.policy, self.policy_classes), (
            "teacher", teacher_tokenizer, self.teacher, self.teacher_classes,
        )  # fmt: skip
        common = self.rest - len(self.ends)
        for side, own, table, classes in sides:
            written = [classes[id] for id in range(min(len(classes), len(table.table))) if table.of(id)]
            rest = written.count(self.rest)
            template = "its own chat template" if has_template(own, []) else "no chat template"
            lines.append(
                f"  {side:7}  {len(written):,} tokens of text: {common:,} are common, "
                f"{len(written) - common - rest:,} count as the common one they begin with, {rest:,} as the rest; "
                f"{template}"
            )
        return [*lines, f"  the end of an answer: {ends}"]


def token_pairs(
    tokenizer: Any, teacher_tokenizer: Any, name: str, size: int | None = None, teacher_size: int | None = None
) -> TokenPairs:
    """Find the common tokens of two tokenizers, and the class of every other. `size` and `teacher_size` are those of
    the models' heads, beyond which no token counts (None: the tokenizer's); `name` is the teacher's.

    Raises LmgymError for tokenizers whose tokens have no known bytes, and for one without an end of sequence."""
    own, other = token_bytes(tokenizer, "policy.model"), token_bytes(teacher_tokenizer, f"algorithm.teacher: {name}")
    sizes = size or len(own.table), teacher_size or len(other.table)
    # 1. The common tokens, each with a class: of the same bytes, and the ends of an answer.
    ends = end_pairs(tokenizer, teacher_tokenizer, name)
    pairs = [(id, other.ids[text]) for text, id in own.ids.items() if text in other.ids]
    common = [(one, two) for one, two in [*pairs, *ends] if one < sizes[0] and two < sizes[1]]
    named = tuple({pair[side]: number for number, pair in enumerate(common)} for side in (0, 1))
    # 2. What the text of each other token begins with.
    begins = _begins(own, teacher_tokenizer, other, named[0]), _begins(other, tokenizer, own, named[1])

    def class_of(side: int, id: int) -> int:
        seen = 0
        while id not in named[side]:
            id, side, seen = begins[side].get(id, -1), 1 - side, seen + 1
            if id < 0 or seen > len(common):
                return len(common)
        return named[side][id]

    own_classes, other_classes = ([class_of(side, id) for id in range(sizes[side])] for side in (0, 1))
    return TokenPairs(own, other, ends, own_classes, other_classes, rest=len(common))


def end_pairs(tokenizer: Any, teacher_tokenizer: Any, name: str) -> list[tuple[int, int]]:
    """What ends an answer, by the chat template or else the end of sequence; and the ends of sequence, if both are
    others. Raises LmgymError for a tokenizer without an end of sequence; `name` is the teacher's.

    Example: of Gemma's chat template and ChatML, end_pairs(gemma, chatml, "t") -> [(106, 2)]"""
    if teacher_tokenizer.eos_token_id is None or tokenizer.eos_token_id is None:
        raise LmgymError(
            f"algorithm.teacher: {name} has another tokenizer than the policy, and one of the two has no "
            "end-of-sequence token, so their ends of an answer cannot be compared; name it in tokenizer_config.json"
        )
    ends = [(end_id(tokenizer), end_id(teacher_tokenizer))]
    if tokenizer.eos_token_id != ends[0][0] and teacher_tokenizer.eos_token_id != ends[0][1]:
        ends.append((tokenizer.eos_token_id, teacher_tokenizer.eos_token_id))
    return ends


def _begins(table: TokenBytes, tokenizer: Any, other: TokenBytes, named: dict[int, int]) -> dict[int, int]:
    """For the tokens of a vocabulary that have no class yet: the first of the other tokenizer's tokens for its text, a
    shorter one. A token of bytes that are no text has that of its first byte."""
    texts = {id: written for id, written in enumerate(table.table) if written and id not in named}
    whole = {id: written.decode(errors="ignore") for id, written in texts.items()}
    kept = [id for id, written in texts.items() if whole[id].encode() == written]
    begins = {id: other.ids[texts[id][:1]] for id in texts.keys() - kept if texts[id][:1] in other.ids}
    anchor = bare_ids(tokenizer, ANCHOR)

    def first_of(id: int, ids: list[int]) -> int:
        first = ids[len(anchor)] if len(ids) > len(anchor) and ids[: len(anchor)] == anchor else -1
        written = other.of(first) if first >= 0 else b""
        return first if written and texts[id].startswith(written) else -1

    backend = tokenizer.backend_tokenizer
    for start in range(0, len(kept), BATCH):
        some = kept[start : start + BATCH]
        read = backend.encode_batch_fast([ANCHOR + whole[id] for id in some], add_special_tokens=False)
        begins |= {id: first for id, one in zip(some, read, strict=True) if (first := first_of(id, one.ids)) >= 0}
    return begins
