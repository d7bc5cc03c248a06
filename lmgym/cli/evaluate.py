"""`lmgym eval`: evaluate a run's newest model, or a recipe's model as it is."""

import argparse

from lmgym.cli.recipes import add_recipe, quick_imports, read_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A recipe or a run folder, and overrides."""
    add_recipe(parser)


def run(given: argparse.Namespace) -> None:
    """Print each metric with its interval."""
    with quick_imports():
        from lmgym.logs.console import Console
        from lmgym.training.preflight import check_cut, cut_prompts
        from lmgym.training.setup import evaluate_actor, held_out_examples, held_out_rewards, make_actor, trained_policy

    config, folder = read_recipe(given)
    check_cut(config)
    examples, rewards = held_out_examples(config), held_out_rewards(config, config.stages[-1])
    policy, section = trained_policy(config, folder), config.evaluation
    cut = cut_prompts(examples, config.policy, policy)
    result = evaluate_actor(config, make_actor(config, policy), examples, rewards)
    with Console() as console:
        console.say(f"{given.what}: {len(examples)} prompts of {section.split}, {section.samples} answers each")
        if cut:
            console.say(cut)
        for name, interval in result.results.items():
            console.say(f"  {name:<24} {interval}")
