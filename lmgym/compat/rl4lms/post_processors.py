"""RL4LMs' post-processors, under the names that its code imports.

from lmgym.compat.rl4lms.post_processors import three_sentence_summary"""

from lmgym.rewards.text.sentences import three_sentence_summary

__all__ = ["three_sentence_summary"]
