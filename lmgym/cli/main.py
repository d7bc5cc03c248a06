"""lmgym train | eval | compare | generate | list | check | export | convert. Verbs and key=value, few flags to learn.

Importing this loads no torch; each verb imports what it needs.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmgym import __version__
from lmgym.core import registry
from lmgym.core.errors import LmgymError

EPILOG = """examples:
  lmgym train lmgym/recipes/quickstart.yaml                       a tiny model learns arithmetic in minutes
  lmgym train lmgym/recipes/gsm8k_grpo.yaml policy.device=cuda steps=200
  lmgym train lmgym/recipes/quickstart.yaml runs.seeds=[0,1,2]    three seeds and a table over them
  lmgym train runs/quickstart                               resume (add stages.rl.steps=300 for more)
  lmgym check lmgym/recipes/gsm8k_grpo.yaml                       a dry run: lengths, stops, rewards, memory
  lmgym eval runs/quickstart evaluation.samples=4 evaluation.temperature=1
  lmgym compare runs/a runs/b                               the same problems: the difference and what it is worth
  lmgym generate runs/quickstart --prompt "Mia has 3 pens and gets 4 more. How many?"
  lmgym export runs/quickstart --to model                   the model with its tokenizer and a model card
  lmgym convert rl4lms gpt2_ppo.yml > gpt2_ppo.yaml         RL4LMs' file as a recipe (train takes it as it is, too)
  lmgym list reward --json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status (0 done, 1 a mistake the user can mend, 130 stopped by Ctrl-C)."""
    parser = _parser()
    given, rest = parser.parse_known_args(arguments)
    late = [word for word in rest if "=" in word and not word.startswith("-")]  # key=value behind an option
    if rest != late or (late and not hasattr(given, "overrides")):
        parser.error(f"unrecognised: {' '.join(word for word in rest if word not in late) or ' '.join(rest)}")
    if late:
        given.overrides = [*given.overrides, *late]
    if given.verb is None:
        parser.print_help()
        return 0
    try:
        return _run(given)
    except LmgymError as error:
        print(f"lmgym: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "lmgym: stopped; what was saved is whole, and `lmgym train RUN_FOLDER` goes on from there", file=sys.stderr
        )
        return 130
    except BrokenPipeError:  # `lmgym list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(given: argparse.Namespace) -> int:
    """Run a verb; a file of RL4LMs' schema in the place of a recipe is converted first."""
    what = Path(getattr(given, "what", None) or "")
    if what.suffix not in (".yml", ".yaml") or not what.is_file():
        return int(given.run(given) or 0)
    from lmgym.compat.rl4lms.schema import is_rl4lms
    from lmgym.config.yaml import read_yaml

    if not is_rl4lms(read_yaml(what)):
        return int(given.run(given) or 0)
    from lmgym.compat.rl4lms.files import recipes

    overrides = given.overrides
    with recipes(what, overrides) as found:
        for recipe in found:
            given.what = str(recipe)
            if len(found) > 1:  # out= is then a folder of theirs
                given.overrides = [f"{o}/{recipe.stem}" if o.startswith("out=") else o for o in overrides]
            if status := int(given.run(given) or 0):
                return status
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lmgym",
        description="Train language models by reinforcement learning.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lmgym {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="{train,eval,compare,generate,list,check,export,convert}")

    def verb(name: str, run: Any, text: str, what: str | None = None) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        if what:
            sub.add_argument("what", metavar=what.upper().replace(" ", "_"), help=what)
            sub.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")
        return sub

    verb("train", _train, "train a recipe, or resume a run folder", "recipe or run")
    verb("eval", _eval, "evaluate a run's newest model, or a recipe's model as it is", "recipe or run")
    comparing = verb("compare", _compare, "compare two models on the same examples, pair by pair")
    for name in ("first", "second"):
        what = "a run, a model folder (a checkpoint, best, final), a recipe, a built-in model or a Hub id"
        comparing.add_argument(name, metavar={"first": "A", "second": "B"}[name], help=what)
    comparing.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of both recipes")
    comparing.add_argument("--split", help="the examples to compare on; the recipe's evaluation.final_split or .split")
    comparing.add_argument("--metric", help="show examples where this one differs most; the task's first")
    comparing.add_argument("--json", metavar="FILE", help="write everything, each example included, to this file")
    generate = verb(
        "generate", _generate, "answer prompts (one a line on standard input, without --prompt)", "recipe or run"
    )
    generate.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    checking = verb(
        "check", _check, "a dry run of a recipe: loads everything, samples once, reports problems", "recipe or run"
    )
    checking.add_argument("--memory", action="store_true", help="only estimate the memory, without loading the model")
    exporting = verb("export", _export, "write a trained model for others, with its tokenizer and a model card")
    exporting.add_argument("what", metavar="RUN_OR_CHECKPOINT", help="a run, or one of its checkpoints/, best or final")
    exporting.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")
    exporting.add_argument("--to", required=True, metavar="FOLDER", help="a new folder")
    exporting.add_argument("--merge", action="store_true", help="add LoRA adapters into the weights of their base")
    exporting.add_argument("--push", metavar="OWNER/NAME", help="and to the Hub, as a new private repository")
    converting = verb("convert", _convert, "print another system's configuration as a recipe")
    converting.add_argument("system", choices=["rl4lms"], help="whose configuration it is")
    converting.add_argument("file", metavar="FILE", help="the configuration, a YAML file")
    listing = verb("list", _list, "what recipes can name")
    listing.add_argument("kind", nargs="?", help=f"one of {', '.join(registry.BUILTIN)} (a plural will do)")
    listing.add_argument("--json", action="store_true", help="machine-readable")
    listing.add_argument("--plugin", action="append", default=[], help="a module or .py file to load first")
    return parser


def _train(given: argparse.Namespace) -> int:
    from lmgym.config.schema import check_same_recipe
    from lmgym.experiments.sweep import home, is_finished, plan, train_all
    from lmgym.training.loop import train

    what = Path(given.what)
    recipe = what / "recipe.yaml" if what.is_dir() else what
    several = plan(recipe, given.overrides) if recipe.is_file() else None
    if several and what.is_dir():
        _keeps_out(what, given.overrides)
        return train_all(several, what, changed=bool(given.overrides))
    if several:
        return train_all(several, home(several, recipe))
    config, folder = _config(given)
    if folder is None and config.out is None:
        config.out = str(_free(Path("runs") / Path(given.what).stem))
    elif folder is None:
        check_same_recipe(config, given.what)
    train(config)
    return 0 if is_finished(config) else 130


def _eval(given: argparse.Namespace) -> None:
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

    config, folder = _config(given)
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


def _compare(given: argparse.Namespace) -> None:
    from lmgym.experiments.compare import compare, show
    from lmgym.logs.console import Console
    from lmgym.logs.writer import disk_errors

    with Console() as console:
        result = compare(given.first, given.second, given.overrides, given.split, given.metric, console)
        if given.json:
            with disk_errors(Path(given.json)):
                Path(given.json).write_text(result.text(), encoding="utf-8")
        show(result, console)


def _generate(given: argparse.Namespace) -> None:
    from lmgym.core import seeds
    from lmgym.inference.base import Request
    from lmgym.tasks.base import ask
    from lmgym.text.chat import decode
    from lmgym.training.preflight import cut_prompts
    from lmgym.training.setup import make_actor, make_engine, trained_policy

    config, folder = _config(given)
    prompts = given.prompt or [line.rstrip("\n") for line in sys.stdin]
    if not prompts:
        raise LmgymError("there is no prompt: give --prompt TEXT, or one prompt a line on standard input")
    policy = trained_policy(config, folder)
    sampling = config.evaluation.decoding(config.stages[-1].sampling)
    posed, engine = ask(prompts, config.stages[-1].task, config.seed), make_engine(config, policy)
    if cut := cut_prompts(posed, config.policy, policy.tokenizer, policy.encoder_decoder):
        print(f"lmgym: {cut}", file=sys.stderr)
    actor = make_actor(config, policy, engine)
    ids = [tuple(actor.read(example.prompt)) for example in posed]
    keys = [seeds.key(config.seed, "generate", place) for place in range(len(ids))]
    requests = [
        Request(policy.decoder_start, key, source_ids=one) if policy.encoder_decoder else Request(one, key)
        for one, key in zip(ids, keys, strict=True)
    ]
    for prompt, completion in zip(prompts, engine.generate(requests, sampling), strict=True):
        print(f"{prompt}{'' if prompt[-1:].isspace() else ' '}{decode(policy.tokenizer, completion.ids)}")


def _check(given: argparse.Namespace) -> int:
    from lmgym.cli.check import check

    config, folder = _config(given)
    return check(config, folder, load=not given.memory)


def _export(given: argparse.Namespace) -> None:
    from lmgym.cli.export import export

    print(export(Path(given.what), Path(given.to), given.overrides, given.merge, given.push))


def _convert(given: argparse.Namespace) -> None:
    from lmgym.compat.rl4lms.files import printed

    print(printed(Path(given.file)), end="")


def _config(given: argparse.Namespace) -> tuple[Any, Path | None]:
    """The config of a recipe or a run folder, and that folder (None for a recipe)."""
    from lmgym.config.schema import load_config

    what = Path(given.what)
    if not what.is_dir():
        return load_config(what, given.overrides), None
    if not (what / "recipe.yaml").is_file():
        raise LmgymError(f"{what} is a folder without a recipe.yaml, so it is no run; name a recipe or a run folder")
    _keeps_out(what, given.overrides)
    config = load_config(what / "recipe.yaml", given.overrides)
    config.out = str(what)
    return config, what


def _keeps_out(folder: Path, overrides: Sequence[str]) -> None:
    if any(override.startswith("out=") for override in overrides):
        raise LmgymError(f"{folder} is a run folder and keeps its out=; to begin anew, name {folder / 'recipe.yaml'}")


def _free(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3 ... that does not exist."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _list(given: argparse.Namespace) -> None:
    for plugin in given.plugin:
        registry.load_plugin(plugin)
    kinds = list(registry.BUILTIN)
    if given.kind is not None:
        kind = given.kind if given.kind in kinds else given.kind.removesuffix("s")
        kind = "reward" if kind == "metric" else kind  # a metric is a reward, of weight 0
        if kind not in kinds:
            raise LmgymError(f"there is no kind '{given.kind}'; {registry.suggest(given.kind, kinds)}")
        kinds = [kind]
    table = {kind: registry.describe(kind) for kind in kinds}
    if given.json:
        print(json.dumps(table[kinds[0]] if given.kind else table, indent=1))
        return
    print("+ runs here   ~ runs here, given what is named   - does not run here yet")
    for kind, rows in table.items():
        print(f"{kind}s, which are metrics too" if kind == "reward" else f"{kind}s")
        width = max((len(row["name"]) for row in rows), default=0)
        for row in rows:
            mark = {"yes": "+", "given": "~", "no": "-"}[row["runs"]]
            how = f": {row['how']}" if row["how"] not in row["needs"] else ""
            needs = f"  (needs {row['needs']}{how})" if row["needs"] else ""
            print(f"{mark}  {row['name']:<{width}}  {row['summary']}{needs}")


if __name__ == "__main__":
    sys.exit(main())
