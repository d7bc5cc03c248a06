"""Post-processors: functions that change the text that a reward sees (option `post_process` of any reward). The text
that trains does not change."""

from lmgym.core.registry import register
from lmgym.rewards.text.sentences import sentences


@register("post_processor", "three_sentence_summary")
def three_sentence_summary(text: str) -> str:
    """The first three sentences of a text, one per line. Source: RL4LMs, which splits with NLTK's model; here rules do
    (`sentences`), also at line ends.

    Example: three_sentence_summary("One. Two. Three. Four.") -> 'One.\\nTwo.\\nThree.'"""
    return "\n".join(sentences(text)[:3])
