"""Convert LlamaGym's two dictionaries: Hugging Face's generation keys to `Sampling`, TRL 0.7's PPO keys to `PPO`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lmgym.algorithms.actor_critic import PPO
from lmgym.algorithms.base import Terms
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.errors import LmgymError, warn
from lmgym.core.registry import suggest
from lmgym.inference.base import Sampling
from lmgym.updates.optimizer import OptimizerSection

GENERATION: Mapping[str, Any] = {"max_new_tokens": 32, "do_sample": True, "top_p": 0.6, "top_k": 0, "temperature": 0.9}
"""LlamaGym's defaults, which generate_config_dict overrides."""
ALSO = ("min_new_tokens", "min_p", "stop_strings", "eos_token_id", "pad_token_id", "bos_token_id")
NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("early_stopping", "output_scores", "return_dict_in_generate"), False),
    **dict.fromkeys(("length_penalty", "repetition_penalty", "typical_p"), 1.0),
    **dict.fromkeys(("num_beam_groups", "num_beams", "num_return_sequences"), 1),
    **{"min_length": 0, "no_repeat_ngram_size": 0, "use_cache": True},
}
"""Other keys, accepted with these values only, which change nothing."""

DEFAULTS: Mapping[str, Any] = {
    "batch_size": 16,
    "learning_rate": 1.41e-5,
    "ppo_epochs": 4,
    "gradient_accumulation_steps": 1,
    "init_kl_coef": 0.2,
    "kl_penalty": "kl",
    "adap_kl_ctrl": True,
    "target": 6.0,
    "horizon": 10_000.0,
    "gamma": 1.0,
    "lam": 0.95,
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
    "max_grad_norm": None,
    "early_stopping": False,
    "target_kl": 1.0,
    "seed": 0,
}
"""Defaults of TRL 0.7's PPOConfig, with LlamaGym's batch_size; mini_batch_size defaults to batch_size."""
MEANINGLESS = [
    *("compare_steps", "exp_name", "task_name", "model_name", "query_dataset", "reward_model", "world_size"),
    *("tracker_kwargs", "tracker_project_name", "accelerator_kwargs", "project_kwargs", "push_to_hub_if_best_kwargs"),
    *("backward_batch_size", "global_backward_batch_size", "global_batch_size"),
]
INSTEAD: Mapping[str, str] = dict.fromkeys(MEANINGLESS, "it has no meaning here") | {
    "ratio_threshold": "no minibatch is skipped for its mean ratio; the ratio is clipped (cliprange), and is exactly 1 "
    "on the first step of a fresh batch",
    "use_score_scaling": "rewards train as they are; scale them before assign_reward",
    "use_score_norm": "rewards train as they are; shift them before assign_reward",
    "whiten_rewards": "rewards train as they are; scale them before assign_reward",
    "score_clip": "rewards train as they are; clip them before assign_reward",
    "steps": "it trains for as long as the loop runs",
    "forward_batch_size": "forward passes are cut by their number of tokens",
    "optimize_cuda_cache": "memory is bounded by the number of tokens of a forward pass",
    "optimize_device_cache": "memory is bounded by the number of tokens of a forward pass",
    "log_with": "nothing is sent anywhere; terminate_episode returns the statistics",
    "is_encoder_decoder": "the model says so itself",
    "is_peft_model": "the model says so itself",
    "remove_unused_columns": "there is no data set",
}
"""Keys of TRL 0.7 without a counterpart, and what happens instead."""


@dataclass(kw_only=True)
class OwnLoopPPO(PPO):
    """PPO in which an episode kept from an earlier batch has its sampler's log-probabilities as old ones (of the same
    temperature and kept sets). So the ratio that PPO clips, pi_new / pi_sampled, is its importance weight."""

    version: int = field(default=0, init=False)
    """Number of updates of the weights; set before each batch."""

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, torch.Tensor]]:
        old, sampler = batch.require("logprobs_old"), batch.require("logprobs_sampler")
        kept = (batch.version < self.version)[:, None]
        return super().loss(batch.replace(logprobs_old=torch.where(kept, sampler, old)), new)


@dataclass(frozen=True)
class Settings:
    """A ppo_config_dict, converted.

    Example: settings_of({"batch_size": 8, "learning_rate": 1e-5}).batch_size -> 8"""

    ppo: OwnLoopPPO
    optimizer: OptimizerSection
    batch_size: int  # turns
    seed: int


def sampling_of(given: Mapping[str, Any], tokenizer: Any, stop_ids: tuple[int, ...]) -> Sampling:
    """The Sampling of a generate_config_dict, whose keys may begin with "generate/".

    `stop_ids` are the model's own. Raises LmgymError for a key or value that would change what is sampled in a way
    that cannot be honoured exactly.

    Example: sampling_of({"generate/top_k": 50}, tokenizer, (2,)).top_k -> 50"""
    own = {key.removeprefix("generate/"): value for key, value in given.items()}
    for key, value in own.items():
        if key in GENERATION or key in ALSO or (key in NEUTRAL and value in (NEUTRAL[key], None)):
            continue
        if key == "max_length":
            raise LmgymError("generate_config_dict: max_length counts the prompt too; write max_new_tokens")
        if key in NEUTRAL:
            raise LmgymError(
                f"generate_config_dict: {key} is {value!r}, and lmgym samples with temperature, top_k, top_p and min_p "
                f"only, so that it knows the probability of each token; remove it (or write {NEUTRAL[key]!r})"
            )
        raise LmgymError(f"generate_config_dict: lmgym cannot honour '{key}'; {suggest(key, [*GENERATION, *ALSO])}")
    merged = {**GENERATION, **{key: value for key, value in own.items() if value is not None}}
    if not merged["do_sample"] or not merged["temperature"]:
        raise LmgymError(
            "generate_config_dict: greedy answers hold nothing to learn from; write do_sample: True with a temperature "
            "above 0 (agent.evaluate takes greedy ones)"
        )
    stops = merged.get("stop_strings", ())
    for key in ("pad_token_id", "bos_token_id"):
        if merged.get(key, getattr(tokenizer, key)) != getattr(tokenizer, key):
            raise LmgymError(
                f"generate_config_dict: {key} is {merged[key]}, and the tokenizer's is {getattr(tokenizer, key)}; "
                "set it on the tokenizer, or remove it here"
            )
    return Sampling(
        temperature=float(merged["temperature"]),
        max_new_tokens=int(merged["max_new_tokens"]),
        min_new_tokens=int(merged.get("min_new_tokens", 0)),
        top_k=int(merged["top_k"]) or None,
        top_p=None if merged["top_p"] == 1 else float(merged["top_p"]),
        min_p=merged.get("min_p"),
        stop=(stops,) if isinstance(stops, str) else tuple(stops),
        stop_ids=_further_stops(merged.get("eos_token_id", stop_ids), stop_ids),
    )


def _further_stops(given: Any, own: tuple[int, ...]) -> tuple[int, ...]:
    """The ids of eos_token_id that are not the model's own; those always end an answer."""
    wanted = {int(one) for one in (given if isinstance(given, list | tuple) else [given])}
    if not wanted >= set(own):
        raise LmgymError(
            f"generate_config_dict: eos_token_id is {given}, and the ids that end an answer of this model are "
            f"{list(own)} (tokenizer.eos_token_id and model.generation_config.eos_token_id); name all of them, or "
            "change them there"
        )
    return tuple(sorted(wanted - set(own)))


def settings_of(given: Mapping[str, Any]) -> Settings:
    """The PPO and optimizer that a ppo_config_dict of TRL 0.7 describes. Keys without a counterpart are named in a
    warning, with what happens instead. Raises LmgymError for a key that TRL 0.7 does not have either, and for values
    that lmgym's PPO refuses."""
    known = [*DEFAULTS, "mini_batch_size", *INSTEAD]
    for key, value in given.items():
        if key not in known:
            raise LmgymError(f"ppo_config_dict: unknown key '{key}'; {suggest(key, known)}")
        if key in INSTEAD and value is not None and value is not False:
            warn(f"ppo_config_dict: {key} is not taken over: {INSTEAD[key]}", stacklevel=4)
    own = {**DEFAULTS, **{key: value for key, value in given.items() if key not in INSTEAD}}
    whole = int(own["batch_size"])
    part = int(own.get("mini_batch_size", whole)) * int(own["gradient_accumulation_steps"])
    if whole < 1 or part < 1:
        raise LmgymError("ppo_config_dict: batch_size, mini_batch_size and gradient_accumulation_steps are at least 1")
    if own["kl_penalty"] != "kl":
        raise LmgymError(
            f"ppo_config_dict: kl_penalty is {own['kl_penalty']!r}; lmgym has 'kl', the only one of TRL's four whose "
            "penalty in the reward has the gradient of the KL"
        )
    coefficient = float(own["init_kl_coef"])
    ppo = OwnLoopPPO(
        epochs=int(own["ppo_epochs"]),
        minibatches=max(round(whole / part), 1),
        gamma=float(own["gamma"]),
        gae_lambda=float(own["lam"]),
        clip_low=float(own["cliprange"]),
        clip_high=float(own["cliprange"]),
        value_clip=float(own["cliprange_value"]),
        value_coefficient=float(own["vf_coef"]) / 2,  # TRL's value loss has a half of its own
        kl_coefficient=coefficient,
        kl_target=float(own["target"]) if own["adap_kl_ctrl"] and coefficient else None,
        kl_controller="horizon",
        kl_horizon=float(own["horizon"]),
        target_kl=float(own["target_kl"]) if own["early_stopping"] else None,
    )
    optimizer = OptimizerSection(
        learning_rate=float(own["learning_rate"]),
        weight_decay=0.0,
        warmup=0,
        max_gradient_norm=float(own["max_grad_norm"] or 0.0),
    )
    return Settings(ppo, optimizer, whole, int(own["seed"]))
