"""What a reward may be shown in place of an answer: option `post_process` of any reward. What trains is not changed."""

from lmgym.core.registry import register
from lmgym.rewards.text.sentences import sentences


@register("post_processor", "three_sentence_summary")
def three_sentence_summary(text: str) -> str:
    """The first three sentences of a text, a line each. Source: RL4LMs, which splits by NLTK's model; here by rules
    (`sentences`), and at line ends too.

    Example:
        >>> three_sentence_summary("One. Two. Three. Four.")
        'One.\\nTwo.\\nThree.'
    """
    return "\n".join(sentences(text)[:3])
