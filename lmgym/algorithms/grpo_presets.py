"""GRPO's family by name: what each paper sets."""

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # arXiv 2402.03300, section 4.2; it does not state its clip
    "paper": {"group_size": 64, "clip_high": 0.2, "scale_rewards": "group", "reduction": "sequence",
              "kl_coefficient": 0.04},
    # arXiv 2503.20783, section 3.2 and listing 1
    "dr_grpo": {"group_size": 8, "clip_high": 0.2, "scale_rewards": "none", "reduction": "constant",
                "length_norm": True},
    # arXiv 2503.14476, section 4.1: 512 prompts of 16 answers, 512 answers an optimizer step; 4,096 of 20,480 tokens
    "dapo": {"group_size": 16, "minibatches": 16, "clip_low": 0.2, "clip_high": 0.28, "scale_rewards": "group",
             "reduction": "token", "dynamic_sampling": True, "overlong": 0.2},
    # arXiv 2507.18071, section 5.1
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "scale_rewards": "group",
             "reduction": "sequence", "minibatches": 4},
    # arXiv 2506.13585, section 3.1, without the upper bound's value: 5, from arXiv 2510.13786
    "cispo": {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0, "scale_rewards": "group",
              "reduction": "token"},
    # arXiv 2511.20347
    "sapo": {"objective": "sapo", "sapo_positive": 1.0, "sapo_negative": 1.05, "scale_rewards": "group",
             "reduction": "sequence", "minibatches": 4},
    # prime-rl's default loss: arXiv 2602.04879 with a bound of 0.2, and arXiv 2602.02276's square
    "dppo": {"objective": "dppo", "ratio_to": "sampler", "clip_low": 0.2, "clip_high": 0.2,
             "squared_log_ratio_coefficient": 1e-3, "scale_rewards": "none", "reduction": "token"},
    # Importance correction (docs/algorithms/importance.md). arXiv 2510.18855; it does not state its clip
    "icepop": {"importance_floor": 0.5, "importance_cap": 5.0, "importance_outside": "mask", "scale_rewards": "group",
               "reduction": "sequence"},
    # Trust regions (docs/algorithms/trust_regions.md). arXiv 2507.18071, section 4.3
    "gspo_token": {"ratio": "sequence_token", "clip_low": 3e-4, "clip_high": 4e-4, "scale_rewards": "group",
                   "reduction": "sequence", "minibatches": 4},
    # arXiv 2507.20673: log-ratios within 0.4
    "gmpo": {"objective": "gmpo", "clip_low": 0.4, "clip_high": 0.4, "scale_rewards": "group", "reduction": "sequence",
             "minibatches": 4},
    # arXiv 2602.05261, with GSPO's clip
    "luspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "scale_rewards": "group",
              "reduction": "constant", "minibatches": 4},
    # arXiv 2602.10693; the numbers are TRL's
    "vespo": {"objective": "vespo", "scale_rewards": "group", "reduction": "token", "minibatches": 4},
    # arXiv 2509.20712, with the numbers of the authors' code
    "ce_gppo": {"objective": "ce_gppo", "clip_low": 0.2, "clip_high": 0.28, "keep_below": 0.75, "keep_above": 1.0,
                "scale_rewards": "group", "reduction": "token", "minibatches": 4},
    # prime-rl's `ipo` loss
    "ipo_mask": {"objective": "ipo", "ratio_to": "sampler", "clip_high": 0.1, "squared_log_ratio_coefficient": 1e-3,
                 "scale_rewards": "none", "reduction": "token"},
    # arXiv 2505.22617, with the numbers of the authors' code and verl's
    "clip_cov": {"covariance": "clip", "covariance_share": 2e-4, "clip_high": 0.2, "scale_rewards": "group",
                 "reduction": "token", "minibatches": 4},
    "kl_cov": {"objective": "none", "covariance": "penalise", "covariance_share": 2e-3, "covariance_coefficient": 1.0,
               "scale_rewards": "group", "reduction": "token", "minibatches": 4},
    # Advantages (docs/algorithms/group_advantages.md). arXiv 2602.02710
    "maxrl": {"scale_rewards": "mean", "reduction": "token"},
    # arXiv 2504.02546, with F_norm 1
    "gpg": {"objective": "none", "scale_rewards": "none", "scale_by_mixed": True, "reduction": "token"},
    # arXiv 2505.23585: one step on a batch, no clip
    "opo": {"objective": "none", "baseline": "length", "scale_rewards": "none", "reduction": "token"},
    # arXiv 2602.07078, with the loss of the authors' example in verl
    "otb": {"baseline": "token", "clip_high": 0.2, "scale_rewards": "none", "reduction": "token"},
    # arXiv 2505.15201
    "pass_at_k": {"pass_at": 4, "scale_rewards": "none", "reduction": "constant"},
    # arXiv 2508.09726: 8 of 16, the shortest
    "gfpo": {"group_size": 16, "keep": 8, "keep_by": "length", "clip_high": 0.2, "scale_rewards": "group",
             "reduction": "token"},
    # arXiv 2505.10978: omega 1, gamma 0.95
    "gigpo": {"turn_coefficient": 1.0, "turn_gamma": 0.95, "clip_high": 0.2, "scale_rewards": "group",
              "reduction": "token"},
    # arXiv 2602.22817, with the settings of the authors' code: K 2, alpha 1
    "hgpo": {"turn_coefficient": 1.0, "turn_gamma": 0.95, "turn_history": 2, "turn_history_power": 1.0,
             "episode_coefficient": 0.0, "clip_high": 0.2, "scale_rewards": "group", "reduction": "token"},
    # Token selection (docs/algorithms/token_selection.md). arXiv 2506.01939: 20% of the tokens, on DAPO
    "top_entropy": {"top_entropy": 0.2, "group_size": 16, "minibatches": 16, "clip_low": 0.2, "clip_high": 0.28,
                    "scale_rewards": "group", "reduction": "token", "dynamic_sampling": True},
}  # fmt: skip
