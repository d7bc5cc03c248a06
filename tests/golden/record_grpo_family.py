"""Record what TRL makes of random numbers, for test_grpo_family.py, which does not need it.

A developer runs it with an environment of its own, from the root of the repository:

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0
    PYTHONPATH=. trl/bin/python tests/golden/record_grpo_family.py

It writes grpo_family.json. No formula of TRL is written down here: its own methods run whole, on a stand-in for the
trainer that has just the attributes which they read. Scores go through `_generate_and_score_completions` (advantages,
masks, importance weights) and then `_compute_loss`, with prescribed log-probabilities in place of a model's, in fp64.
Recorded are each loss, its gradient at the log-probabilities, and the advantages; the inputs are functions of a seed.
"""

import importlib.metadata
import json
from collections import defaultdict
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

RECORD = Path(__file__).with_name("grpo_family.json")
SIZE, LIMIT = 4, 16  # answers per prompt, tokens that an answer may have
SEEDS = (1, 2)
EOS, LETTER, PROMPT = 2, 5, 9

# Settings of GRPOConfig (and of its trainer); what they do not name is in `stand_in_for`.
GRPO: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon_high": 0.2},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "sapo": {"loss_type": "sapo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
}
GRPO |= {f"{name}, beta": {**settings, "beta": 0.05} for name, settings in GRPO.items()}
GRPO |= {
    "plain k3": {"loss_type": "grpo", "beta": 0.05, "use_bias_correction_kl": False},
    "scaled by the batch": {"loss_type": "dapo", "scale_rewards": "batch"},
    "dual clip": {"loss_type": "dapo", "delta": 1.4},
    "truncated tokens": {"loss_type": "dapo", "importance": "token_truncate"},
    "truncated sequences": {"loss_type": "dapo", "importance": "sequence_truncate"},
    "masked, tokens": {"loss_type": "dapo", "mask_truncated_completions": True},
    "masked, sequences": {"loss_type": "grpo", "mask_truncated_completions": True},
    "masked, constant": {"loss_type": "dr_grpo", "mask_truncated_completions": True},
    "parts": {"loss_type": "dapo", "multi_objective_aggregation": "normalize_then_sum"},
    "left out: tokens": {"loss_type": "dapo", "importance": "token_mask"},
    "left out: sequences": {"loss_type": "dapo", "importance": "sequence_mask"},
    "bounded on both sides": {
        "loss_type": "dapo", "importance": "token_truncate", "vllm_importance_sampling_clip_min": 0.9
    },
    "left out on both sides": {
        "loss_type": "grpo", "importance": "token_mask", "vllm_importance_sampling_clip_min": 0.9
    },
    "off policy": {"loss_type": "dapo", "off_policy_mask_threshold": 0.05},
    "off policy of the sampler": {
        "loss_type": "dapo", "importance": "token_truncate", "off_policy_mask_threshold": 0.05
    },
    "luspo": {
        "loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04
    },
    "vespo": {"loss_type": "vespo"},
    "top entropy": {"loss_type": "dapo", "top_entropy_quantile": 0.3},
    "top entropy, sequences": {"loss_type": "grpo", "top_entropy_quantile": 0.3},
}  # fmt: skip
GMPO: dict[str, dict[str, Any]] = {"gmpo": {"epsilon_low": 0.4, "epsilon_high": 0.4}, "gmpo, narrow": {}}
IMPORTANCE_CAP = 1.2
WEIGHTS = (1.0, 0.5)  # of the two rewards
OVERLONG = {"max_tokens": 100, "buffer": 20, "lengths": [1, 79, 80, 81, 90, 99, 100, 101, 500]}


class Inputs:
    """Random answers of several lengths: fp64 log-probabilities now, before, of a reference and of the sampler; two
    rewards each. The first prompt's answers all earn the same; some answers do not end.

    Example: Inputs(seed=1).lengths
    """

    def __init__(self, seed: int, prompts: int = 3, longest: int = 6, drift: float = 0.4) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = prompts * SIZE
        self.lengths: list[int] = torch.randint(1, longest + 1, (rows,), generator=generator).tolist()
        self.prompt_lengths = [1 + row // SIZE for row in range(rows)]
        self.ended: list[bool] = (torch.rand(rows, generator=generator) < 0.7).tolist()
        self.width = max(self.lengths)

        def noise() -> Tensor:
            return torch.randn(rows, self.width, generator=generator, dtype=torch.float64)

        self.new = -2 + 0.5 * noise()
        self.old = self.new + drift * noise()
        self.reference = self.new + 0.7 * noise()
        self.sampler = self.old + 0.3 * noise()
        self.rewards = torch.rand(rows, 2, generator=generator, dtype=torch.float64).round(decimals=2)
        self.rewards[:SIZE] = torch.tensor([0.3, 0.7], dtype=torch.float64)
        self.entropy = noise().abs()

    def answers(self) -> list[list[int]]:
        return [[LETTER] * (n - 1) + [EOS if end else LETTER] for n, end in zip(self.lengths, self.ended, strict=True)]


def stand_in_for(inputs: Inputs, leaf: Tensor, settings: dict[str, Any]) -> SimpleNamespace:
    """The trainer's attributes: one process, one optimizer step per generation, the inputs as what its model says."""
    settings = dict(settings)
    importance = settings.pop("importance", None)
    rewards = 2 if settings.get("multi_objective_aggregation") else 1
    ids = inputs.answers()
    prompts = [[PROMPT] * length for length in inputs.prompt_lengths]
    sampled = [row[:n].tolist() for row, n in zip(inputs.sampler, inputs.lengths, strict=True)]
    answers: dict[Any, Tensor] = {None: leaf, "model": inputs.old, "reference": inputs.reference}

    class Model(str):
        training = True
        is_gradient_checkpointing = False

    arguments = SimpleNamespace(
        per_device_train_batch_size=len(ids),
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing_kwargs=None,
        use_bias_correction_kl=settings.pop("use_bias_correction_kl", True),
        delta=settings.pop("delta", None),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    )
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        sync_gradients=True,
        gather=lambda tensor: tensor,
        gather_for_metrics=lambda tensor: tensor,
        pad_across_processes=lambda tensor, **_: tensor,
        reduce=lambda tensor, reduction: tensor,
    )
    fields: dict[str, Any] = {
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "scale_rewards": "group",
        "importance_sampling_level": "token",
        "max_completion_length": LIMIT,
        "mask_truncated_completions": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "multi_objective_aggregation": "sum_then_normalize",
        "use_vllm": importance is not None,
        "vllm_importance_sampling_correction": importance is not None,
        "vllm_importance_sampling_mode": importance,
        "vllm_importance_sampling_clip_max": IMPORTANCE_CAP,
        "vllm_importance_sampling_clip_min": None,
        "_generate": lambda _: (prompts, ids, None, ids, sampled if importance else None, {}, None, None),
        "normalize_advantages": False,
        "reward_weights": torch.tensor(WEIGHTS[:rewards], dtype=torch.float64),
        "_calculate_rewards": lambda *_: inputs.rewards[:, :rewards].clone(),
    }
    return SimpleNamespace(
        model=Model("model"),
        ref_model="reference",
        accelerator=accelerator,
        args=arguments,
        _get_per_token_logps_and_entropies=lambda model, *rest, **more: (
            answers[model],
            inputs.entropy,
            None,
        ),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        eos_token_ids=[EOS],
        _metrics={"train": defaultdict(list)},
        _logs={name: [] for name in ("prompt", "completion", "advantages")}
        | {name: defaultdict(list) for name in ("rewards", "extra")},
        _pending_extra_logs={},
        _pending_metrics={},
        num_generations=SIZE,
        num_iterations=1,
        current_gradient_accumulation_steps=1,
        environment_factories=None,
        environments=None,
        tools=None,
        pad_to_multiple_of=None,
        reward_funcs=[None] * rewards,
        reward_func_names=["first", "second"][:rewards],
        reward_clip_range=None,
        log_multimodal=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        **{**fields, **settings},
    )


def losses_of(trainer: Any, seed: int, settings: dict[str, Any], **given: Any) -> dict[str, Any]:
    """TRL's loss, its gradient at the log-probabilities, and its advantages."""
    inputs = Inputs(seed, **given)
    leaf = inputs.new.clone().requires_grad_()
    stand_in = stand_in_for(inputs, leaf, settings)
    for method in ("get_off_policy_mask", "get_gamma_weights"):  # static
        setattr(stand_in, method, getattr(trainer, method, None))
    if hasattr(trainer, "get_high_entropy_mask"):
        stand_in.get_high_entropy_mask = MethodType(trainer.get_high_entropy_mask, stand_in)
    torch.set_default_dtype(torch.float64)  # the sampler's log-probabilities become a tensor in there
    columns = trainer._generate_and_score_completions(stand_in, [{"prompt": "?"} for _ in inputs.lengths])
    torch.set_default_dtype(torch.float32)
    if "old_logps" not in columns:
        columns["old_per_token_logps"] = inputs.old
    loss = trainer._compute_loss(stand_in, None, columns)
    gradient = torch.autograd.grad(loss, leaf)[0]
    return {
        "seed": seed,
        "loss": float(loss.detach()),
        "gradient": [row[:n].tolist() for row, n in zip(gradient, inputs.lengths, strict=True)],
        "advantages": columns["advantages"].tolist(),
    }


def rounded(value: Any) -> Any:
    """Floats to twelve digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


def main() -> None:
    from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
    from trl.rewards import get_soft_overlong_punishment
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    punish = get_soft_overlong_punishment(OVERLONG["max_tokens"], OVERLONG["buffer"])
    record = {
        "trl": importlib.metadata.version("trl"),
        "torch": torch.__version__.split("+")[0],
        "grpo": {name: [losses_of(GRPOTrainer, seed, settings) for seed in SEEDS] for name, settings in GRPO.items()},
        "gmpo": {name: [losses_of(GMPOTrainer, seed, settings) for seed in SEEDS] for name, settings in GMPO.items()},
        "rloo": [losses_of(RLOOTrainer, seed, rloo_settings(seed), drift=0.0) for seed in SEEDS],
        "overlong": punish([[LETTER] * length for length in OVERLONG["lengths"]]),
    }
    RECORD.write_text(json.dumps(rounded(record), separators=(",", ":")) + "\n")


def rloo_settings(seed: int) -> dict[str, Any]:
    """RLOO with its default penalty; its `_generate` returns three things. With old = new, as on the first step."""
    inputs = Inputs(seed)
    generated = ([[PROMPT] * length for length in inputs.prompt_lengths], inputs.answers(), inputs.answers())
    return {"beta": 0.05, "epsilon_high": 0.2, "_generate": lambda _: generated}


if __name__ == "__main__":
    main()
