"""GRPO's family by name: which parts each paper takes. What a row leaves out is GRPO's own default.

docs/algorithms/family.md shows this table as one page."""

from collections.abc import Mapping
from typing import Any

from lmgym.algorithms.grpo.correction import Masked, SamplerRatio
from lmgym.algorithms.grpo.credit import GroupMean, LengthWeighted, MeanScaled, PassAtK, Selected, TokenBaseline, Turns
from lmgym.algorithms.grpo.surrogate import CeGppo, Cispo, Clip, Dppo, Gmpo, IpoMask, Sapo, Unbounded, Vespo
from lmgym.algorithms.grpo.tokens import ClipCov, KlCov, TopEntropy

SCALED = GroupMean(scale="group")
EVEN_CLIP = Clip(low=0.2, high=0.2)
ROWS, ROWS_BY_TOKEN = Clip(ratio="sequence", low=3e-4, high=4e-4), Clip(ratio="sequence_token", low=3e-4, high=4e-4)
DAPO = {"group_size": 16, "minibatches": 16, "credit": SCALED, "dynamic_sampling": True}

MEMBERS: Mapping[str, Mapping[str, Any]] = {
    # arXiv 2402.03300, section 4.2; it does not state its clip
    "paper": {"group_size": 64, "credit": SCALED, "surrogate": EVEN_CLIP, "reduction": "sequence",
              "kl_coefficient": 0.04},
    # arXiv 2503.20783, section 3.2 and listing 1
    "dr_grpo": {"group_size": 8, "surrogate": EVEN_CLIP, "reduction": "limit"},
    # arXiv 2503.14476, section 4.1: 512 prompts of 16 answers, 512 answers an optimizer step; 4,096 of 20,480 tokens
    "dapo": {**DAPO, "overlong": 0.2},
    # Trust regions (docs/algorithms/trust_regions.md). arXiv 2507.18071, sections 5.1 and 4.3
    "gspo": {"credit": SCALED, "surrogate": ROWS, "reduction": "sequence", "minibatches": 4},
    "gspo_token": {"credit": SCALED, "surrogate": ROWS_BY_TOKEN, "reduction": "sequence", "minibatches": 4},
    # arXiv 2602.05261, with GSPO's clip
    "luspo": {"credit": SCALED, "surrogate": ROWS, "reduction": "constant", "minibatches": 4},
    # arXiv 2506.13585, section 3.1, without the upper bound's value: 5, from arXiv 2510.13786
    "cispo": {"credit": SCALED, "surrogate": Cispo(low=1.0, high=4.0)},
    # arXiv 2511.20347
    "sapo": {"credit": SCALED, "surrogate": Sapo(positive=1.0, negative=1.05), "reduction": "sequence",
             "minibatches": 4},
    # prime-rl's default loss: arXiv 2602.04879 with a bound of 0.2, and arXiv 2602.02276's square; and its `ipo` loss
    "dppo": {"surrogate": Dppo(low=0.2, high=0.2), "correction": SamplerRatio(),
             "squared_log_ratio_coefficient": 1e-3},
    "ipo_mask": {"surrogate": IpoMask(bound=0.1), "correction": SamplerRatio(),
                 "squared_log_ratio_coefficient": 1e-3},
    # arXiv 2507.20673: log-ratios within 0.4
    "gmpo": {"credit": SCALED, "surrogate": Gmpo(low=0.4, high=0.4), "reduction": "sequence", "minibatches": 4},
    # arXiv 2602.10693; the numbers are TRL's
    "vespo": {"credit": SCALED, "surrogate": Vespo(power_positive=2.0, rate_positive=3.0, power_negative=3.0,
                                                   rate_negative=2.0), "minibatches": 4},
    # arXiv 2509.20712, with the numbers of the authors' code
    "ce_gppo": {"credit": SCALED, "surrogate": CeGppo(low=0.2, high=0.28, keep_below=0.75, keep_above=1.0),
                "minibatches": 4},
    # Importance correction (docs/algorithms/importance.md). arXiv 2510.18855; it does not state its clip
    "icepop": {"credit": SCALED, "correction": Masked(floor=0.5, cap=5.0), "reduction": "sequence"},
    # Advantages (docs/algorithms/group_advantages.md). arXiv 2602.02710
    "maxrl": {"credit": MeanScaled()},
    # arXiv 2504.02546, with F_norm 1
    "gpg": {"credit": GroupMean(scale_by_mixed=True), "surrogate": Unbounded()},
    # arXiv 2505.23585: one step on a batch, no clip
    "opo": {"credit": LengthWeighted(), "surrogate": Unbounded()},
    # arXiv 2602.07078, with the loss of the authors' example in verl
    "otb": {"credit": TokenBaseline(), "surrogate": EVEN_CLIP},
    # arXiv 2505.15201
    "pass_at_k": {"credit": PassAtK(k=4), "reduction": "constant"},
    # arXiv 2508.09726: 8 of 16, the shortest
    "gfpo": {"group_size": 16, "credit": Selected(keep=8, keep_by="length", scale="group"), "surrogate": EVEN_CLIP},
    # arXiv 2505.10978: omega 1, gamma 0.95
    "gigpo": {"credit": Turns(episode=SCALED, coefficient=1.0, gamma=0.95, scale="group"), "surrogate": EVEN_CLIP},
    # arXiv 2602.22817, with the settings of the authors' code: K 2, alpha 1
    "hgpo": {"credit": Turns(episode=SCALED, episode_coefficient=0.0, coefficient=1.0, gamma=0.95, scale="group",
                             history=2, history_power=1.0), "surrogate": EVEN_CLIP},
    # Token selection (docs/algorithms/token_selection.md). arXiv 2506.01939: 20% of the tokens, on DAPO
    "top_entropy": {**DAPO, "tokens": TopEntropy(share=0.2)},
    # arXiv 2505.22617, with the numbers of the authors' code and verl's
    "clip_cov": {"credit": SCALED, "surrogate": EVEN_CLIP, "tokens": ClipCov(share=2e-4, low=1.0, high=5.0),
                 "minibatches": 4},
    "kl_cov": {"credit": SCALED, "surrogate": Unbounded(), "tokens": KlCov(share=2e-3, coefficient=1.0),
               "minibatches": 4},
}  # fmt: skip
