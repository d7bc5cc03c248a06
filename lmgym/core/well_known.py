"""Well-known names that lmgym has under another name, or has not: what an error sentence says about them."""

import re
from collections.abc import Iterable

PAIRS = "learns from pairs of answers: dpo, ipo, simpo and orpo from given ones, online_dpo from sampled ones"
REWARD_MODEL = (
    "is ppo or grpo with a reward model: algorithm: ppo with rewards: {reward_model: {model: ...}} "
    "(docs/learned_rewards.md)"
)
ABOUT = {  # what to say: the names, written as `plainly` writes them
    PAIRS: ("cpo", "rpo"),
    "is dpo with objective: hinge": ("slic", "slic_hf"),
    "is dpo with label_smoothing": ("cdpo", "conservative_dpo"),
    "is online_dpo with preset: ipo here": ("online_ipo",),
    "learns from answers that are good or bad alone, as kto does": ("bco",),
    REWARD_MODEL: ("rlhf", "rlaif"),
    "is called reward_model here": ("rm", "bradley_terry", "reward_modeling", "reward_modelling", "reward"),
    "is called process_reward_model here": ("prm", "process_reward", "stepwise_reward", "prm_train"),
    "is grpo with a reward that checks the answer: rewards: {final_answer: 1.0}": ("rlvr",),
    "is called supervised here": (
        "sft",
        "imitation",
        "behavior_cloning",
        "behaviour_cloning",
        "finetune",
        "fine_tuning",
    ),
    "is called raft here: it imitates the best answers of each group": (
        *("best_of_n", "bon", "rejection_sampling", "rft", "expert_iteration", "rest", "star"),
    ),
    "is called reinforce_pp here": ("reinforce++", "reinforce_plus_plus", "reinforcepp"),
    "is reinforce with baseline: scst": ("scst", "self_critical"),
    "is called distill here": ("on_policy_distillation", "distillation", "knowledge_distillation"),
    "is called reinforce here": ("policy_gradient", "vpg"),
}
ALGORITHMS = {name: sentence for sentence, names in ABOUT.items() for name in names}


def about(kind: str, name: str, valid: Iterable[str]) -> str | None:
    """What to write instead of a well-known name, as the rest of a sentence that begins with it; None for other names.

    Example:
        >>> about("algorithm", "SFTTrainer", ["supervised"]), about("algorithm", "grpo_trainer", ["grpo"])
        ('is called supervised here', 'is called grpo here')
    """
    if kind != "algorithm":
        return None
    plain = plainly(name)
    if plain != name and plain in valid:
        return f"is called {plain} here"
    return ALGORITHMS.get(plain)


def plainly(name: str) -> str:
    """A name in lower case with underscores, without what other libraries put behind it.

    Example: plainly("Best-of-N"), plainly("GRPOTrainer"), plainly("dpo_config") -> ('best_of_n', 'grpo', 'dpo')"""
    plain = re.sub(r"[\s-]+", "_", name.strip().lower())
    return re.sub(r"_?(trainer|config|loss|algorithm)$", "", plain)
