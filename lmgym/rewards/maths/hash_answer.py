"""A post-processor (option `post_process` of any reward) that leaves nothing of a text but the answer behind ####."""

import re

from lmgym.core.registry import register

ANSWER = re.compile(r"#### (-?[0-9.,]+)")


@register("post_processor", "hash_answer")
def hash_answer(text: str) -> str:
    r"""The last "#### " with a number behind it; empty if there is none. So `final_answer` with `strict` does not see
    other announcements ("The answer is 18", \boxed{18}).

    Source: verl's strict score of GSM8K (verl/utils/reward_score/gsm8k.py). It compares digits and points as text, so
    that "18.0" and "18." are wrong there for 18; `final_answer` compares numbers.

    Example: hash_answer("9 + 9 = 18\n#### 18."), hash_answer("The answer is 18") -> ('#### 18.', '')"""
    found = ANSWER.findall(text)
    return f"#### {found[-1]}" if found else ""
