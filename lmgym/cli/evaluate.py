"""`lmgym eval`: evaluate a run's newest model, or a recipe's model as it is."""

import argparse

from lmgym.cli.recipes import add_recipe, read_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A recipe or a run folder, and overrides."""
    add_recipe(parser)


def run(given: argparse.Namespace) -> None:
    """Print each metric with its interval."""
    from lmgym.logs.console import Console
    from lmgym.rollouts.evaluate import evaluate
    from lmgym.training.preflight import check_cut, cut_prompts
    from lmgym.training.setup import (
        held_out_examples,
        held_out_rewards,
        make_actor,
        make_engine,
        make_envs,
        trained_policy,
    )

    config, folder = read_recipe(given)
    section, stage = config.evaluation, config.stages[-1]
    check_cut(config)
    examples = held_out_examples(config)
    policy = trained_policy(config, folder)
    cut = cut_prompts(examples, config.policy, policy.tokenizer, policy.encoder_decoder)
    actor = make_actor(config, policy, make_engine(config, policy))
    rewards, sampling = held_out_rewards(config, stage), section.decoding(stage.sampling)
    envs, timeout = make_envs(config, section.env or stage.env), config.reward_timeout
    result = evaluate(examples, actor, sampling, rewards, envs, config.seed, section.samples, timeout)
    with Console() as console:
        console.say(f"{given.what}: {len(examples)} prompts of {section.split}, {section.samples} answers each")
        if cut:
            console.say(cut)
        for name, interval in result.results.items():
            console.say(f"  {name:<24} {interval}")
