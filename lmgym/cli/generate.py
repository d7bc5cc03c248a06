"""`lmgym generate`: answer prompts with a run's newest model, or a recipe's model as it is."""

import argparse
import sys

from lmgym.cli.recipes import add_recipe, quick_imports, read_recipe
from lmgym.core.errors import LmgymError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A recipe or a run folder, overrides, and prompts."""
    add_recipe(parser)
    parser.add_argument("--prompt", action="append", help="a prompt; may be given several times")


def run(given: argparse.Namespace) -> None:
    """Print each prompt with its answer."""
    with quick_imports():
        from lmgym.core import seeds
        from lmgym.inference.base import Request
        from lmgym.tasks.base import examples_from_prompts
        from lmgym.text.chat import decode
        from lmgym.training.preflight import cut_prompts
        from lmgym.training.setup import make_actor, trained_policy

    config, folder = read_recipe(given)
    prompts = given.prompt or [line.rstrip("\n") for line in sys.stdin]
    if not prompts:
        raise LmgymError("there is no prompt: give --prompt TEXT, or one prompt a line on standard input")
    policy = trained_policy(config, folder)
    sampling = config.evaluation.decoding(config.stages[-1].sampling)
    examples, actor = examples_from_prompts(prompts, config.stages[-1].task, config.seed), make_actor(config, policy)
    if cut := cut_prompts(examples, config.policy, policy):
        print(f"lmgym: {cut}", file=sys.stderr)
    ids = [tuple(actor.encode_prompt(example.prompt)) for example in examples]
    keys = [seeds.key(config.seed, "generate", index) for index in range(len(ids))]
    requests = [
        Request(policy.decoder_start, key, source_ids=read) if policy.encoder_decoder else Request(read, key)
        for read, key in zip(ids, keys, strict=True)
    ]
    for prompt, completion in zip(prompts, actor.engine.generate(requests, sampling), strict=True):
        print(f"{prompt}{'' if prompt[-1:].isspace() else ' '}{decode(policy.tokenizer, completion.ids)}")
