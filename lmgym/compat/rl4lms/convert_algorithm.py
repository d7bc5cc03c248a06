"""Convert RL4LMs' `alg` section to `algorithm:`, `optimizer:` and the size of a step.

Its n_steps, n_envs and batch_size count tokens, of which each is a step of its environment. A step of lmgym holds whole
answers: as many as have n_steps * n_envs tokens if each has the greatest length."""

import math
from dataclasses import dataclass, fields
from typing import Any

from lmgym.compat.rl4lms.schema import Conversion, Section, is_added
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.validation import converted

DEFAULTS: dict[str, dict[str, Any]] = {  # RL4LMs' own
    "nlpo": {"n_steps": 2048, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4},
    "ppo": {"n_steps": 2048, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4},
    "a2c": {"n_steps": 5, "batch_size": None, "n_epochs": 1, "learning_rate": 7e-4},
    "trpo": {"n_steps": 2048, "batch_size": 128, "n_epochs": 1, "learning_rate": 1e-3},
}
MASKS = {
    "learned_top_p": "learned_top_p",
    "learned_top_k": "learned_top_k",
    "learned": "learned_top_k",
    "topk": "top_k",
}
IDLE = ("verbose", "use_sde", "sde_sample_freq", "create_eval_env", "_init_setup_model", "tracker")


@dataclass(frozen=True)
class Counts:
    """The size of a step, in answers and in tokens: Counts(answers=27, minibatches=20, tokens=1280)."""

    answers: int
    minibatches: int
    tokens: int


def counts(n_steps: int, n_envs: int, batch_size: int | None, longest: int) -> Counts:
    """RL4LMs' token counts as answers and minibatches: answers = n_steps * n_envs / longest, rounded up, and
    minibatches = n_steps * n_envs / batch_size, rounded up as stable-baselines3 does, but no more than there are
    answers, since one is never split.

    Example, of the IMDB recipes: counts(128, 10, 64, 48) -> Counts(answers=27, minibatches=20, tokens=1280)"""
    tokens = n_steps * n_envs
    for name, value in (("n_steps", n_steps), ("n_envs", n_envs), ("batch_size", batch_size), ("length", longest)):
        if value is not None and value < 1:
            raise LmgymError(f"{name} is {value}; it must be at least 1")
    answers = math.ceil(tokens / longest)
    minibatches = 1 if batch_size is None else math.ceil(tokens / batch_size)
    return Counts(answers, min(minibatches, answers), tokens)


def algorithm(alg: Section, name: str, n_envs: int, longest: int, policy: Section, conversion: Conversion) -> None:
    """Fill in `algorithm`, `prompts_per_step` and `optimizer`. An algorithm of the user's that inherits from PPO, NLPO,
    A2C or TRPO takes the arguments of that one and its own fields; any other takes its fields, n_steps, batch_size and
    n_epochs."""
    arguments, penalty = alg.section("args"), alg.section("kl_div")
    kind = family(name)
    defaults = DEFAULTS[kind or "ppo"]
    n_steps = arguments.take("n_steps", int, defaults["n_steps"])
    batch_size = arguments.take("batch_size", int, defaults["batch_size"]) if kind != "a2c" else None
    size = counts(n_steps, n_envs, batch_size, longest)
    section = _section(kind, arguments, penalty, size, conversion)
    if kind == "nlpo":
        section |= _mask(policy)
    if is_added("algorithm", name):
        known = {f.name for f in fields(registry.get("algorithm", name)) if f.init}
        section = {key: value for key, value in section.items() if key in known}
        section |= {key: arguments.take(key, Any) for key in known & set(arguments.peek())}
    conversion.recipe |= {"prompts_per_step": size.answers, "algorithm": {"name": name, **section}}
    conversion.note(
        f"alg.args.n_steps {n_steps} * env.n_envs {n_envs} = {size.tokens} tokens an iteration -> prompts_per_step "
        f"{size.answers}: answers of {longest} tokens, rounded up. Shorter answers make smaller batches here"
    )
    if batch_size is not None:
        _say_minibatches("critic_minibatches" if kind == "trpo" else "minibatches", batch_size, size, conversion)
    _optimizer(kind or "ppo", arguments, policy, conversion)
    _machine(arguments, conversion)
    arguments.idle(conversion, *IDLE)


def family(name: str) -> str | None:
    """Which of RL4LMs' four algorithms this one is or inherits from; None for any other that the user has registered.
    Raises LmgymError for an unknown name."""
    if name in DEFAULTS:
        return name
    if not is_added("algorithm", name):
        raise LmgymError(f"alg.id is '{name}'; {registry.suggest(name, {*DEFAULTS, 'supervised'})}")
    own = registry.get("algorithm", name)
    return next((kind for kind in DEFAULTS if issubclass(own, registry.get("algorithm", kind))), None)


def _section(
    kind: str | None, arguments: Section, penalty: Section, size: Counts, conversion: Conversion
) -> dict[str, Any]:
    """The algorithm's fields; RL4LMs' defaults for those left out."""
    section: dict[str, Any] = dict(registry.get("algorithm", kind).presets["rl4lms"]) if kind else {}
    section |= _shared(arguments, penalty, conversion)
    if kind == "trpo":
        section |= _trpo(arguments, size.minibatches)
    if kind in ("a2c", "trpo"):
        _whitening(arguments, section, "batch", kind == "trpo")
        return section
    epochs = arguments.take("n_epochs", int, DEFAULTS[kind]["n_epochs"] if kind else 1)
    section |= {"epochs": epochs, "minibatches": size.minibatches, **_clip(arguments)}
    section |= arguments.renamed(target_kl=("target_kl", float, None))
    _whitening(arguments, section, "minibatch", True)
    return section


def _shared(arguments: Section, penalty: Section, conversion: Conversion) -> dict[str, Any]:
    """The arguments of all four: discounts, coefficients, and the KL penalty."""
    section = arguments.renamed(
        gamma=("gamma", float, None),
        gae_lambda=("gae_lambda", float, None),
        ent_coef=("entropy_coefficient", float, None),
        vf_coef=("value_coefficient", float, None),
    )
    coefficient, target = penalty.take("coeff", float, 0.0), penalty.take("target_kl", float)
    section |= {"kl_coefficient": coefficient, "norm_reward": penalty.take("norm_reward", bool, False)}
    if target is not None and coefficient:
        section |= {"kl_target": target, "kl_controller": "proportional"}
    elif target is not None:
        conversion.idle.append("alg.kl_div.target_kl (with a coeff of 0 there is nothing to adapt)")
    return section


def _clip(arguments: Section) -> dict[str, Any]:
    """The clip ranges; "lin_0.2" falls linearly to 0, as stable-baselines3's own recipes write it."""
    value, falls = _scheduled(arguments, "clip_range", 0.2)
    section = {"clip_low": value, "clip_high": value, **({"clip_final_fraction": 0.0} if falls else {})}
    return section | arguments.renamed(clip_range_vf=("value_clip", float, None))


def _scheduled(arguments: Section, name: str, default: float) -> tuple[float, bool]:
    """A number, and whether it decays linearly to 0 over the run."""
    given = arguments.take(name, Any, default)
    falls = isinstance(given, str) and given.startswith("lin_")
    return converted(float, given[4:] if falls else given, f"{arguments.key}.{name}"), falls


def _whitening(arguments: Section, section: dict[str, Any], over: str, default: bool) -> None:
    section["whiten"] = over if arguments.take("normalize_advantage", bool, default) else "none"


def _trpo(arguments: Section, minibatches: int) -> dict[str, Any]:
    section = {"critic_minibatches": minibatches} | arguments.renamed(
        target_kl=("delta", float, None),
        cg_max_steps=("iterations", int, None),
        cg_damping=("damping", float, None),
        line_search_shrinking_factor=("line_search_factor", float, None),
        line_search_max_iter=("line_search_steps", int, None),
        n_critic_updates=("critic_epochs", int, None),
    )
    every = arguments.take("sub_sampling_factor", int, 1)
    return section | ({"subsample": 1 / every} if every > 1 else {})


def _mask(policy: Section) -> dict[str, Any]:
    """NLPO's mask, which RL4LMs keeps among the policy's arguments."""
    kind = policy.take("mask_type", str, "learned_top_k")
    if kind not in MASKS:
        raise LmgymError(f"{policy.key}.mask_type is '{kind}'; {registry.suggest(kind, MASKS)}")
    return {
        "mask_type": MASKS[kind],
        "top_mask": policy.need("top_mask", float),
        "min_tokens_to_keep": policy.take("min_tokens_to_keep", int, 100),
        "refresh_every": policy.take("target_update_iterations", int, 1000),
    }


def _optimizer(name: str, arguments: Section, policy: Section, conversion: Conversion) -> None:
    """Fill in `optimizer`: AdamW, or A2C's RMSprop; weight decay on matrices only."""
    rate, falls = _scheduled(arguments, "learning_rate", DEFAULTS[name]["learning_rate"])
    asked = policy.take("optimizer_class", str)
    rms = arguments.take("use_rms_prop", bool, True) if name == "a2c" else False
    epsilon = arguments.take("rms_prop_eps", float, 1e-5) if name == "a2c" else 1e-8
    kind = (asked or ("RMSprop" if rms else "AdamW")).rsplit(".", 1)[-1].lower()
    if kind not in ("adamw", "rmsprop"):
        raise LmgymError(f"{policy.key}.optimizer_class is '{asked}'; lmgym has AdamW and RMSprop")
    own = policy.section("optimizer_kwargs")
    own.idle(conversion, "lr")  # the algorithm sets its own at every step
    section = {
        "name": kind,
        "learning_rate": rate,
        "epsilon": own.take("eps", float, epsilon if kind == "rmsprop" else 1e-8),
        "weight_decay": policy.take("weight_decay", float, 1e-6),
        "max_gradient_norm": arguments.take("max_grad_norm", float, 0.0 if name == "trpo" else 0.5),
        "schedule": "linear" if falls else "constant",
        "warmup": 0,
    }
    section |= own.renamed(betas=("betas", tuple[float, float], None), alpha=("alpha", float, None))
    conversion.recipe["optimizer"] = section


def _machine(arguments: Section, conversion: Conversion) -> None:
    """Fill in the seed, the device and the sinks, which RL4LMs has among the algorithm's arguments."""
    if (seed := arguments.take("seed", int)) is not None:
        conversion.recipe["seed"] = seed
    if (device := arguments.take("device", str)) is not None:
        conversion.recipe["policy"]["device"] = device.split(":")[0]
    if arguments.take("tensorboard_log", str) is not None:
        conversion.recipe["logs"] = {"sinks": ["tensorboard"]}
        conversion.note("alg.args.tensorboard_log -> logs.sinks: the event files lie in the run folder's tensorboard/")


def _say_minibatches(key: str, batch_size: int, size: Counts, conversion: Conversion) -> None:
    wanted = math.ceil(size.tokens / batch_size)
    text = f"alg.args.batch_size {batch_size} tokens -> algorithm.{key} {size.minibatches}"
    if wanted > size.minibatches:
        conversion.warn(f"{text}, one answer each: {wanted} minibatches would split answers")
    else:
        conversion.note(text)
