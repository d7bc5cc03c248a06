"""Splits a text into sentences by rules; and a post-processor (option `post_process` of any reward), which changes the
text that a reward sees, not the one that trains."""

import re

from lmgym.core.registry import register

# After a mark that ends a sentence, and the quotes and brackets that it closes; or at the end of a line.
BOUNDARY = re.compile(r"(?<=[.!?])[\"'\u2019\u201d)\]]{0,3}\s+(?=[\"'\u2018\u201c(\[]{0,3}[A-Z0-9])|(?<!\s)\s*\n\s*")
ABBREVIATED = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|No|Gen|Col|Lt|Sen|Rep|Gov)|\b[A-Z])\.$")


def sentences(text: str) -> list[str]:
    """The sentences of a text. A sentence ends at . ! or ? before a capital letter or a digit (not after "Dr." and
    initials), and at a line end.

    Example: sentences('He met Dr. Lee. "Why?" she asked.\\nThen 3 came.')
    -> ['He met Dr. Lee.', '"Why?" she asked.', 'Then 3 came.']"""
    split, begin = [], 0
    for boundary in BOUNDARY.finditer(text):
        closing = boundary[0].rstrip()  # quotes and brackets at the end of the sentence
        sentence = text[begin : boundary.start() + len(closing)]
        if "\n" not in boundary[0] and not closing and ABBREVIATED.search(sentence[-8:]):
            continue
        split.append(sentence.strip())
        begin = boundary.end()
    return [sentence for sentence in [*split, text[begin:].strip()] if sentence]


@register("post_processor", "three_sentence_summary")
def three_sentence_summary(text: str) -> str:
    """The first three sentences of a text, one per line. Source: RL4LMs, which splits with NLTK's model; here rules do
    (`sentences`), also at line ends.

    Example: three_sentence_summary("One. Two. Three. Four.") -> 'One.\\nTwo.\\nThree.'"""
    return "\n".join(sentences(text)[:3])
