"""Record what other libraries make of random numbers, for test_actor_critic_maths.py, which needs none of them.

A developer runs it twice, each time with an environment of its own:

    python3 -m venv sb3 && sb3/bin/pip install torch==2.13.0 stable-baselines3==2.9.2 sb3-contrib==2.9.2
    sb3/bin/python tests/golden/record_actor_critic.py sb3
    python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.12.0
    trl/bin/python tests/golden/record_actor_critic.py trl

Each run replaces its part of actor_critic.json. None of the libraries' formulas is written down here: their own methods
(`PPO.train`, `A2C.train`, `TRPO.train`, `PPOTrainer.train`, ...) run whole, on a stand-in for `self` that has just what
they read, with prescribed log-probabilities and values in place of a model's, in fp64.
"""

import contextlib
import importlib.metadata
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

RECORD = Path(__file__).with_name("actor_critic.json")


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(values: Tensor) -> Tensor:
    return values.clone().requires_grad_()


# stable-baselines3 and sb3-contrib


class NoOptimizer:
    """Leaves the gradients where they are; `step` is counted."""

    def __init__(self) -> None:
        self.steps = 0

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        self.steps += 1


class Log(dict):
    def record(self, name: str, value: Any, exclude: Any = None) -> None:
        self[name.removeprefix("train/")] = float(value)


def sb3_gae(seed: int, gamma: float, gae_lambda: float) -> dict[str, Any]:
    """Streams [time, environment] of several episodes; the buffer's arrays are fp64 here, and fp32 in its own class."""
    from gymnasium import spaces
    from stable_baselines3.common.buffers import RolloutBuffer

    time, environments = 9, 3
    box = spaces.Box(-1, 1, (1,))
    buffer = RolloutBuffer(time, box, spaces.Discrete(2), "cpu", gae_lambda, gamma, environments)
    buffer.rewards, buffer.values = (noise(seed + n, time, environments).numpy() for n in range(2))
    buffer.advantages = np.zeros_like(buffer.rewards)
    buffer.episode_starts = (noise(seed + 2, time, environments) > 0.5).double().numpy()
    buffer.episode_starts[0] = 1
    last, dones = noise(seed + 3, environments), np.array([True, False, False])
    buffer.compute_returns_and_advantage(last, dones)
    names = ("rewards", "values", "episode_starts", "advantages", "returns")
    columns = {name: getattr(buffer, name) for name in names}
    return {"gamma": gamma, "gae_lambda": gae_lambda, **columns, "last_values": last, "dones": dones}


def sb3_samples(seed: int, count: int = 12) -> dict[str, Tensor]:
    old, old_values = -1.5 + 0.5 * noise(seed, count), noise(seed + 1, count)
    return {
        "old_log_prob": old,
        "log_prob": old + 0.3 * noise(seed + 2, count),
        "old_values": old_values,
        "values": old_values + 0.4 * noise(seed + 3, count),
        "advantages": 0.5 + 2 * noise(seed + 4, count),
        "returns": old_values + 0.8 * noise(seed + 5, count),
    }


def sb3_losses(algorithm: type, seed: int, normalise: bool, **settings: Any) -> dict[str, Any]:
    """One optimizer step of `algorithm.train` on prescribed numbers: its log and the gradients."""
    from gymnasium import spaces
    from stable_baselines3.common.buffers import RolloutBufferSamples

    inputs = sb3_samples(seed)
    log_prob, values, entropy = leaf(inputs["log_prob"]), leaf(inputs["values"]), torch.zeros(1)
    nothing = torch.zeros(len(values), 1)
    samples = RolloutBufferSamples(
        nothing, nothing, inputs["old_values"], inputs["old_log_prob"], inputs["advantages"], inputs["returns"]
    )
    buffer = SimpleNamespace(
        get=lambda batch_size: [samples], values=inputs["old_values"].numpy(), returns=inputs["returns"].numpy()
    )
    policy = SimpleNamespace(
        set_training_mode=lambda mode: None,
        optimizer=NoOptimizer(),
        evaluate_actions=lambda observations, actions: (values, log_prob, entropy),
        parameters=lambda: [],
    )
    log, clip_value = Log(), settings.get("clip_range_vf")
    trainer = SimpleNamespace(
        policy=policy,
        rollout_buffer=buffer,
        logger=log,
        action_space=spaces.Discrete(2),
        normalize_advantage=normalise,
        clip_range=lambda progress: settings["clip_range"],
        clip_range_vf=(lambda progress: clip_value) if clip_value else None,
        ent_coef=0.0,
        vf_coef=0.5,
        target_kl=None,
        n_epochs=1,
        batch_size=None,
        max_grad_norm=0.5,
        verbose=0,
        _n_updates=0,
        _current_progress_remaining=1.0,
        _update_learning_rate=lambda optimizer: None,
    )
    algorithm.train(trainer)
    assert policy.optimizer.steps == 1
    gradients = {"log_prob_grad": log_prob.grad, "values_grad": values.grad}
    return {"normalise": normalise, "vf_coef": 0.5, **settings, **inputs, **gradients, "log": dict(log)}


def start_at_zero() -> Any:
    """sb3-contrib's solver starts at 1e-4 gaussian noise; with this, at zero."""
    return mock.patch("torch.randn_like", torch.zeros_like)


def sb3_conjugate_gradient(seed: int, size: int, iterations: int) -> dict[str, Any]:
    from sb3_contrib.common.utils import conjugate_gradient_solver

    root, target = noise(seed, size, size), noise(seed + 1, size)
    matrix = root @ root.T + 0.1 * torch.eye(size, dtype=torch.float64)
    with start_at_zero():
        solution = conjugate_gradient_solver(lambda v: matrix @ v, target, max_iter=iterations)
    return {"matrix": matrix, "target": target, "iterations": iterations, "solution": solution}


class SoftmaxPolicy(torch.nn.Module):
    """Logits linear in the observation; the parameter of the critic is told by its name, as TRPO does."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())
        self.value = torch.nn.Parameter(torch.zeros(len(weight), dtype=torch.float64))
        self.optimizer = NoOptimizer()

    def set_training_mode(self, mode: bool) -> None:
        pass

    def get_distribution(self, observations: Tensor) -> Any:
        from stable_baselines3.common.distributions import CategoricalDistribution

        return CategoricalDistribution(self.weight.shape[1]).proba_distribution(observations @ self.weight)

    def predict_values(self, observations: Tensor) -> Tensor:
        return observations @ self.value


def sb3_trpo(seed: int, delta: float, iterations: int, damping: float = 0.1) -> dict[str, Any]:
    """A whole policy step of sb3-contrib's TRPO, line search included."""
    from gymnasium import spaces
    from sb3_contrib import TRPO
    from stable_baselines3.common.buffers import RolloutBufferSamples

    count, features, actions = 14, 3, 4
    observations, weight = noise(seed, count, features), 0.7 * noise(seed + 1, features, actions)
    log_probabilities = (observations @ weight).log_softmax(-1)
    taken = noise(seed + 2, count, actions).argmax(-1)
    old = log_probabilities.gather(1, taken[:, None])[:, 0]
    advantages, values, policy, log = noise(seed + 3, count), noise(seed + 4, count), SoftmaxPolicy(weight), Log()
    samples = RolloutBufferSamples(observations, taken.double()[:, None], values, old, advantages, values)
    trainer = SimpleNamespace(
        policy=policy,
        rollout_buffer=SimpleNamespace(
            get=lambda batch_size: [samples], values=values.numpy(), returns=(values + 0.1 * advantages).numpy()
        ),
        logger=log,
        action_space=spaces.Discrete(actions),
        normalize_advantage=True,
        sub_sampling_factor=1,
        cg_max_steps=iterations,
        cg_damping=damping,
        target_kl=delta,
        line_search_max_iter=10,
        line_search_shrinking_factor=0.8,
        n_critic_updates=1,
        batch_size=count,
        _n_updates=0,
        _update_learning_rate=lambda optimizer: None,
    )
    for name in ("_compute_actor_grad", "hessian_vector_product"):
        setattr(trainer, name, types.MethodType(getattr(TRPO, name), trainer))
    with start_at_zero():
        TRPO.train(trainer)
    settings = {"delta": delta, "damping": damping, "iterations": iterations, "shrink": 0.8}
    inputs = {"observations": observations, "weight": weight, "actions": taken, "advantages": advantages}
    return {**settings, **inputs, "new_weight": policy.weight, "log": dict(log)}


def sb3() -> dict[str, Any]:
    from stable_baselines3 import A2C, PPO
    from stable_baselines3.common.utils import explained_variance

    predictions = [(noise(70, 8), noise(71, 8)), (noise(71, 8) + 0.1 * noise(70, 8), noise(71, 8))]
    return {
        "versions": versions("stable-baselines3", "sb3-contrib", "torch"),
        "gae": [sb3_gae(10 * n, *pair) for n, pair in enumerate([(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])],
        "ppo": [
            sb3_losses(PPO, 100, False, clip_range=0.2, clip_range_vf=None),
            sb3_losses(PPO, 110, True, clip_range=0.2, clip_range_vf=None),
            sb3_losses(PPO, 120, True, clip_range=0.1, clip_range_vf=0.25),
        ],
        "a2c": [sb3_losses(A2C, 130, False), sb3_losses(A2C, 140, True)],
        "explained_variance": [
            {"values": v, "returns": r, "result": explained_variance(v.numpy(), r.numpy())} for v, r in predictions
        ],
        "conjugate_gradient": [sb3_conjugate_gradient(200 + n, 6, n) for n in (1, 3, 6)],
        "trpo": [sb3_trpo(300, 0.01, 15), sb3_trpo(310, 0.05, 4), sb3_trpo(320, 1.0, 15, 1e-3)],
    }


# TRL


class Accelerator:
    """One process that does nothing but `backward`."""

    device = torch.device("cpu")
    loss: Tensor

    def print(self, *args: Any) -> None:
        pass

    def unwrap_model(self, model: Any) -> Any:
        return model

    def accumulate(self, model: Any) -> Any:
        return contextlib.nullcontext()

    def gather_for_metrics(self, values: Tensor) -> Tensor:
        return values

    def backward(self, loss: Tensor) -> None:
        self.loss = loss.detach()
        loss.backward()


class Callbacks:
    def __getattr__(self, name: str) -> Any:
        return lambda args, state, control: SimpleNamespace(should_save=False)


PAD, EOS, WORD, PROMPT = 0, 1, 2, 3


def trl_arguments(rows: int, **settings: Any) -> SimpleNamespace:
    from trl.experimental.ppo import PPOConfig

    names = ("vf_coef", "cliprange", "cliprange_value", "gamma", "lam")
    defaults = {name: PPOConfig.__dataclass_fields__[name].default for name in names}
    none = ("logging_steps", "eval_steps", "save_steps", "missing_eos_penalty")
    one = ("num_ppo_epochs", "num_mini_batches", "gradient_accumulation_steps", "num_total_batches")
    size = ("batch_size", "local_batch_size", "local_mini_batch_size", "per_device_train_batch_size")
    size += ("local_rollout_forward_batch_size", "total_episodes")
    given = {**defaults, **dict.fromkeys(none), **dict.fromkeys(one, 1), **dict.fromkeys(size, rows)}
    extra = {"response_length": 1, "temperature": 1.0, "num_sample_generations": 0, "ds3_gather_for_generation": False}
    return SimpleNamespace(**{**given, **extra, **settings})


def trl_inputs(seed: int) -> dict[str, Tensor]:
    """Answers of several lengths, one of which fills the width."""
    lengths = torch.tensor([3, 6, 1, 5])
    size = len(lengths), int(lengths.max())
    old, values = -1.5 + 0.5 * noise(seed, *size), noise(seed + 1, *size)
    return {
        "lengths": lengths,
        "scores": noise(seed + 2, len(lengths)),
        "old": old,
        "reference": old + 0.5 * noise(seed + 3, *size),
        "values": values,
        "new": leaf(old + 0.3 * noise(seed + 4, *size)),
        "new_values": leaf(values + 0.4 * noise(seed + 5, *size)),
    }


def trl_replacements(inputs: dict[str, Tensor], whitened: list[tuple[Tensor, Tensor]], own_whiten: Any) -> dict:
    """Of the functions that ask a model; `whitened` gets what goes into masked_whiten and what comes out."""
    rows, width = inputs["old"].shape
    prompts = torch.full((rows, 1), PROMPT)
    responses = torch.where(torch.arange(width) < inputs["lengths"][:, None], WORD, PAD)
    logits, log_probs = torch.zeros(rows, width + 1, 4), iter([inputs["old"], inputs["reference"], inputs["new"]])

    def of_critic(dense: Tensor) -> Tensor:
        """TRL cuts [context - 1 : -1] out of [rows, context + width, 1]."""
        return torch.cat([dense, torch.zeros(rows, 1)], 1)[..., None]

    def forward(called: Any, *args: Any) -> Any:
        output = SimpleNamespace(logits=logits.clone())
        return output if called == "reference" else (output, of_critic(inputs["new_values"]))

    def get_reward(called: Any, *args: Any) -> tuple:
        return (of_critic(inputs["values"]), None, None) if called == "critic" else (None, inputs["scores"], None)

    def masked_whiten(*args: Any, **kwargs: Any) -> Tensor:
        before = args[0].clone()
        whitened.append((before, own_whiten(*args, **kwargs)))
        return whitened[-1][1]

    return {
        "batch_generation": lambda *args: (torch.cat([prompts, responses], 1), logits[:, 1:]),
        "unwrap_model_for_generation": lambda model, *args, **kwargs: contextlib.nullcontext(model),
        "forward": forward,
        "get_reward": get_reward,
        "selective_log_softmax": lambda *args: next(log_probs),
        "masked_whiten": masked_whiten,
        # TRL shuffles the rows of a batch and looks its own tensors up by that order; the prescribed ones are in order.
        "np": SimpleNamespace(random=SimpleNamespace(permutation=np.arange)),
    }


def trl_ppo(seed: int, **settings: Any) -> dict[str, Any]:
    """One step of TRL's PPOTrainer.train."""
    from trl.experimental.ppo import ppo_trainer as module

    inputs, whitened, log, accelerator = trl_inputs(seed), [], {}, Accelerator()
    rows = len(inputs["lengths"])
    arguments = trl_arguments(rows, **settings)
    trainer = SimpleNamespace(
        args=arguments,
        accelerator=accelerator,
        optimizer=NoOptimizer(),
        model=SimpleNamespace(policy="policy", value_model="critic", train=lambda: None),
        ref_model="reference",
        reward_model="reward",
        processing_class=SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS),
        dataloader=[{"input_ids": torch.full((rows, 1), PROMPT)}],
        state=SimpleNamespace(),
        control=SimpleNamespace(),
        callback_handler=Callbacks(),
        is_deepspeed_enabled=False,
        train_dataset_len=rows,
        stop_token_id=None,
        lr_scheduler=SimpleNamespace(step=lambda: None, get_last_lr=lambda: [0.0]),
        log=log.update,
    )
    with mock.patch.multiple(module, **trl_replacements(inputs, whitened, module.masked_whiten)):
        module.PPOTrainer.train(trainer)
    names = ("kl_coef", "kl_estimator", "whiten_rewards", "gamma", "lam", "cliprange", "cliprange_value", "vf_coef")
    logged = ("loss/policy_avg", "loss/value_avg", "policy/approxkl_avg", "policy/clipfrac_avg", "val/clipfrac_avg")
    return {
        **{name: getattr(arguments, name) for name in names},
        **inputs,
        **{f"{name}_grad": inputs[name].grad for name in ("new", "new_values")},
        **{"advantages": whitened[-1][0], "whitened": whitened[-1][1]},
        "rewards_whitened": whitened[0][1] if arguments.whiten_rewards else None,
        **{"loss": accelerator.loss, "log": {name: log[name] for name in logged}},
    }


def trl() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    first = {"kl_coef": 0.05, "kl_estimator": "k1", "whiten_rewards": False, "gamma": 0.97}
    second = {"kl_coef": 0.1, "kl_estimator": "k3", "whiten_rewards": True, "cliprange_value": 0.3}
    return {
        "versions": versions("trl", "transformers", "torch"),
        "ppo": [trl_ppo(400, **first), trl_ppo(410, **second)],
    }


# The file


def versions(*packages: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


def plain(value: Any) -> Any:
    """Tensors and arrays as lists, in all their digits."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value


def lines(value: Any, depth: int = 0) -> str:
    """JSON with one line per recorded column."""
    inner = "\n" + " " * (depth + 1)
    if isinstance(value, dict) and depth < 4:
        pairs = (f"{json.dumps(name)}: {lines(value[name], depth + 1)}" for name in value)
        return "{" + inner + ("," + inner).join(pairs) + "\n" + " " * depth + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + inner + ("," + inner).join(lines(item, depth + 1) for item in value) + "\n" + " " * depth + "]"
    return json.dumps(value)


if __name__ == "__main__":
    library = sys.argv[1] if len(sys.argv) > 1 else ""
    if library not in ("sb3", "trl"):
        sys.exit("say which library to record: sb3 or trl")
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[library] = plain({"sb3": sb3, "trl": trl}[library]())
    RECORD.write_text(lines(dict(sorted(record.items()))) + "\n")
