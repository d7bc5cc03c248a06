"""A text cut into its sentences."""

import re

# Behind a mark that ends a sentence, with quotes and brackets that it closes; or at the end of a line.
BOUNDARY = re.compile(r"(?<=[.!?])[\"'\u2019\u201d)\]]{0,3}\s+(?=[\"'\u2018\u201c(\[]{0,3}[A-Z0-9])|\s*\n\s*")
ABBREVIATED = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|No|Gen|Col|Lt|Sen|Rep|Gov)|\b[A-Z])\.$")


def sentences(text: str) -> list[str]:
    """The sentences of a text: ended by . ! or ? before a capital or a digit (not "Dr." and initials), or by a line.

    Example:
        >>> sentences('He met Dr. Lee. "Why?" she asked.\\nThen 3 came.')
        ['He met Dr. Lee.', '"Why?" she asked.', 'Then 3 came.']
    """
    found, begin = [], 0
    for boundary in BOUNDARY.finditer(text):
        inside = boundary[0].rstrip()  # quotes and brackets that close the sentence
        sentence = text[begin : boundary.start() + len(inside)]
        if "\n" not in boundary[0] and not inside and ABBREVIATED.search(sentence[-8:]):
            continue
        found.append(sentence.strip())
        begin = boundary.end()
    return [sentence for sentence in [*found, text[begin:].strip()] if sentence]
