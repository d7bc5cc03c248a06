"""Convert a configuration of RL4LMs to a recipe. Every key is converted, or reported with what happens instead."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lmgym.compat.rl4lms import convert_rewards
from lmgym.compat.rl4lms.convert_algorithm import algorithm, family
from lmgym.compat.rl4lms.convert_generation import evaluation, lengths, rollout
from lmgym.compat.rl4lms.convert_supervised import supervised
from lmgym.compat.rl4lms.convert_task import NO_TEST_REFERENCES, task
from lmgym.compat.rl4lms.registries import PolicyRegistry
from lmgym.compat.rl4lms.schema import Conversion, Section
from lmgym.config.yaml import read_yaml, write_yaml
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.visible import visible
from lmgym.experiments.grid import expand

ALL = 1_000_000  # RL4LMs evaluates on whole splits
PREDICTIONS = "lmgym.compat.rl4lms.predictions:write"
POLICIES = {
    "causal_lm_actor_critic_policy": (False, False),  # encoder-decoder, masked
    "seq2seq_lm_actor_critic_policy": (True, False),
    "maskable_causal_lm_actor_critic_policy": (False, True),
    "maskable_seq2seq_lm_actor_critic_policy": (True, True),
}
ORDER = [  # of the recipe's sections
    *("plugins", "seed", "task", "rewards", "policy", "algorithm", "prompts_per_step", "priority_scale", "steps"),
    *("optimizer", "sampling", "engine", "evaluation", "checkpoint", "logs"),
]


def convert(tree: Mapping[str, Any]) -> Conversion:
    """Convert a configuration of RL4LMs to the recipe that trains the same.

    Raises LmgymError, naming the key, for an id that neither RL4LMs nor the user has registered, a value of a wrong
    type, and a missing key that RL4LMs requires.

    Example: convert(yaml.safe_load(text)).recipe["algorithm"]["name"] -> "ppo"
    """
    root, conversion = Section(tree, ""), Conversion()
    if plugins := root.take("plugins", list[str]):
        conversion.recipe["plugins"] = plugins
        for plugin in plugins:
            registry.load_plugin(plugin)
    alg = root.section("alg")
    name = alg.need("id", str)
    conversion.recipe |= {"task": task(root.need("datapool", Any), conversion), "policy": {}, "evaluation": {}}
    (_supervised if "supervised" in name else _on_policy)(name, alg, root, conversion)
    _splits(conversion)
    for key in root.leftovers():
        conversion.warn(f"{key}: neither RL4LMs nor lmgym has such a key; it is ignored")
    for section in (conversion.recipe.get("rewards", {}), conversion.recipe["evaluation"]["metrics"]):
        section |= {key: own["weight"] for key, own in section.items() if own.keys() == {"weight"}}
    conversion.recipe = {key: conversion.recipe[key] for key in ORDER if key in conversion.recipe}
    return conversion


def conversions(path: Path) -> dict[str, Conversion]:
    """Convert a file: {"": conversion}, or for a sweep one for each combination of its values, by a short name. Values
    of a sweep are written {expand: True, values: [...]}. Raises LmgymError as `convert` does, naming the file."""
    found = {}
    for variant in expand(read_yaml(path)):
        try:
            found[variant.label if variant.settings else ""] = convert(variant.tree)
        except LmgymError as error:
            raise LmgymError(f"{path}: {error}") from error
    return found


def text(conversion: Conversion, origin: str) -> str:
    """The recipe as YAML, under a comment that says what happened to which keys."""
    head = [f"Converted from {origin}, a configuration of RL4LMs (arXiv 2210.01241)."]
    for title, lines in (("Other units", conversion.notes), ("Not as in RL4LMs", conversion.warnings)):
        head += [f"{title}:"] * bool(lines) + [f"  - {line}" for line in lines]
    if conversion.idle:
        head.append(f"Without effect on the results here: {', '.join(conversion.idle)}")
    return "".join(f"# {visible(line)}\n" for line in head) + "\n" + write_yaml(conversion.recipe)


def _on_policy(name: str, alg: Section, root: Section, conversion: Conversion) -> None:
    """PPO, NLPO, A2C, TRPO, or an algorithm of the user's own."""
    env, policy = root.section("env"), alg.section("policy")
    kind = policy.need("id", str)
    seq2seq, masked = _policy_kind(kind, name, conversion)
    own, env_arguments = policy.section("args"), env.section("args")
    if masked != (family(name) == "nlpo"):
        takes = "NLPO needs a maskable policy, and no other algorithm has one"
        raise LmgymError(f"alg.policy.id '{kind}' does not go with alg.id '{name}': {takes}")
    longest = env_arguments.take("max_episode_length", int, 512)
    generation = own.section("generation_kwargs")
    asked = root.section("train_evaluation")
    own_decoding = asked.peek().get("generation_kwargs") is not None
    decoding = asked.section("generation_kwargs") if own_decoding else Section(generation.peek(), generation.key)
    asked.take("generation_kwargs", Any)
    size = lengths(generation, longest, seq2seq, conversion)
    conversion.recipe["sampling"] = rollout(generation, size, masked, conversion)
    conversion.recipe["evaluation"] = evaluation(decoding, lengths(decoding, longest, seq2seq, conversion), conversion)
    conversion.recipe["rewards"] = convert_rewards.rewards(root.need("reward_fn", Any), conversion)
    algorithm(alg, name, env.take("n_envs", int, 1), size[0], own, conversion)
    if masked:
        conversion.warn(
            "NLPO: the mask policy is refreshed as target_update_iterations says, and evaluations are not masked; "
            "RL4LMs' code never refreshes it (algorithm.compat=rl4lms does not either) and masks evaluations too"
        )
    _policy(own, env_arguments, root.section("tokenizer"), seq2seq, conversion)
    _environment(env_arguments, conversion)
    _evaluate(asked, conversion)
    conversion.recipe["steps"] = asked.need("n_iters", int)
    conversion.recipe["evaluation"]["every"] = asked.need("eval_every", int)
    conversion.recipe["checkpoint"] = {"every": asked.take("save_every", int, 20)}


def _supervised(name: str, alg: Section, root: Section, conversion: Conversion) -> None:
    asked, tokenizer = root.section("train_evaluation"), root.section("tokenizer")
    seq2seq = alg.need("model_type", Literal["causal", "seq2seq"]) == "seq2seq"
    generation = alg.section("generation_kwargs")
    size = lengths(generation, None, seq2seq, conversion)
    conversion.recipe["sampling"] = {"max_new_tokens": size[0], "min_new_tokens": size[1]}
    conversion.recipe["evaluation"] = evaluation(generation, size, conversion)
    model = alg.need("model_name", str)
    conversion.recipe["policy"] = {"model": model, **_tokenizer(tokenizer, model, conversion)}
    if (limit := tokenizer.take("max_length", int)) is not None:
        side = tokenizer.take("truncation_side", str, "left")
        conversion.recipe["policy"] |= {"max_prompt_tokens": limit, "truncation_side": side}
        conversion.recipe["policy"]["max_reference_tokens"] = limit
        conversion.note(
            f"tokenizer.max_length {limit} -> policy.max_prompt_tokens, in training and in evaluations, and "
            "policy.max_reference_tokens; of a causal model RL4LMs cuts prompt and reference together"
        )
    else:
        conversion.warn(
            "tokenizer.max_length is left out: RL4LMs cuts prompts and references at the tokenizer's model_max_length; "
            "here nothing is cut, and what the model cannot read is refused (policy.max_prompt_tokens and "
            "max_reference_tokens cut)"
        )
        tokenizer.idle(conversion, "truncation_side")
    if not seq2seq:
        conversion.warn("alg.model_type causal: the loss is on the reference; RL4LMs trains on the prompt too")
    supervised(alg, conversion.recipe["task"], conversion)
    _evaluate(asked, conversion)


def _policy_kind(kind: str, algorithm: str, conversion: Conversion) -> tuple[bool, bool]:
    """Whether a policy is an encoder-decoder, and whether a mask restricts it; a registered one adds its settings."""
    added = PolicyRegistry.section(kind)
    if added is not None:
        conversion.recipe["policy"] |= added
        return "seq2seq" in kind, family(algorithm) == "nlpo"
    if kind not in POLICIES:
        raise LmgymError(f"alg.policy.id is '{kind}'; {registry.suggest(kind, {*POLICIES, *PolicyRegistry.added})}")
    return POLICIES[kind]


def _policy(own: Section, env_arguments: Section, tokenizer: Section, seq2seq: bool, conversion: Conversion) -> None:
    """Fill in `policy`: the model, its critic, and how prompts are cut."""
    model = own.need("model_name", str)
    section = {"model": model, **_tokenizer(tokenizer, model, conversion), "critic": "separate"}
    section |= conversion.recipe["policy"]  # the device that the algorithm's arguments name
    if own.take("apply_model_parallel", bool, True):
        conversion.warn("alg.policy.args.apply_model_parallel: one process trains on one device")
    side, other = (s.take("prompt_truncation_side", str, "left") for s in (env_arguments, own))
    if side != other:
        conversion.warn(
            f"prompts are cut on the {side} everywhere, as env.args has it; with this alg.policy.args RL4LMs cuts them "
            f"on the {other} in evaluations"
        )
    if (limit := env_arguments.take("max_prompt_length", int)) is not None:
        section |= {"max_prompt_tokens": limit, "truncation_side": side}
    tokenizer.idle(conversion, "truncation_side", "max_length")
    own.idle(conversion, "state_dict")
    if seq2seq and (start := env_arguments.take("context_start_token", int)) is not None:
        section["context_start_token"] = start
    env_arguments.idle(conversion, "context_start_token")
    conversion.recipe["policy"] = section


def _tokenizer(tokenizer: Section, model: str, conversion: Conversion) -> dict[str, Any]:
    """The key `tokenizer`, if it is not the model's. Padding options change nothing: padding is masked everywhere."""
    tokenizer.idle(conversion, "padding_side", "pad_token_as_eos_token")
    name = tokenizer.take("model_name", str, model)
    return {} if name == model else {"tokenizer": name}


def _environment(env_arguments: Section, conversion: Conversion) -> None:
    if not env_arguments.take("terminate_on_eos", bool, False):
        conversion.warn("env.args.terminate_on_eos is not true: answers end at the end-of-sequence token all the same")
    if scale := env_arguments.take("priority_scale", float, 0.0):
        conversion.recipe["priority_scale"] = scale


def _evaluate(asked: Section, conversion: Conversion) -> None:
    """Fill in metrics, splits, and how many answers are decoded at once."""
    section = conversion.recipe["evaluation"]
    post = section.pop("post_processing", None)
    given = conversion.recipe.get("rewards", {})
    metrics, likelihood = convert_rewards.metrics(asked.take("metrics", list[Any], []), given, conversion)
    if post is not None:
        metrics = {name: {**settings, "post_process": post} for name, settings in metrics.items()}
    if likelihood and conversion.recipe["task"]["name"] == "imdb":
        conversion.warn(
            "metric causal_perplexity: not reported, since the rest of a review is often longer than the model reads"
        )
    elif likelihood:
        section["reference_nll"] = True
        conversion.note(
            "metric causal_perplexity -> evaluation.reference_nll: nats per token of each reference behind its prompt; "
            "RL4LMs: exp of that, over all references joined and without prompts"
        )
    section |= {"split": "validation", "final_split": "test", "examples": ALL, "metrics": metrics}
    if (rows := asked.take("eval_batch_size", int)) is not None:
        conversion.recipe["engine"] = {"rows": rows}


def _splits(conversion: Conversion) -> None:
    name = conversion.recipe["task"]["name"]
    conversion.recipe.setdefault("logs", {})["predictions"] = PREDICTIONS
    if name in NO_TEST_REFERENCES:
        conversion.recipe["evaluation"]["final_split"] = None
        conversion.warn(f"{name} has no references for test, so the evaluations before and after are on validation")
