"""lmgym train | eval | compare | generate | ... (`COMMANDS`): commands with key=value.

Importing this loads no torch; each command imports its modules when it runs."""

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lmgym import __version__
from lmgym.config.packaged import hides_packaged, packaged_recipes
from lmgym.config.schema_keys import recipe_keys
from lmgym.core.errors import LmgymError, plain_warnings
from lmgym.core.output import HarmlessOutput, surviving_output
from lmgym.core.progress import told
from lmgym.core.registry import suggest
from lmgym.core.visible import visible

EPILOG = """examples:
  lmgym train quickstart                                          a tiny model learns arithmetic in minutes
  lmgym recipes                                                   the recipes that come with lmgym
  lmgym recipes quickstart > my.yaml                              the beginning of your own
  lmgym new my.yaml                                               five questions, and a recipe for your own data
  lmgym init my-project                                           a task, a reward, a recipe and tests of your own
  lmgym train my.yaml policy.device=cuda steps=200
  lmgym train quickstart runs.seeds=[0,1,2]                       three seeds and a table over them
  lmgym train runs/quickstart                                     resume (add stages.rl.steps=300 to train longer)
  lmgym check gsm8k_grpo                                          a dry run: lengths, stops, rewards, memory
  lmgym audit gsm8k_grpo                                          what its rewards pay for: attacks, before a run
  lmgym eval runs/quickstart --samples 8                          pass@1, 2, 4, 8; also of a checkpoint, or with --model
  lmgym compare runs/a runs/b                                     the same problems: the difference and its interval
  lmgym compare 'runs/a-*' 'runs/b-*'                             two groups of seeds, paired by seed
  lmgym doctor runs/quickstart                                    what is wrong with a run, and what to do
  lmgym what-if runs/quickstart algorithm.kl_coefficient=0.1      a step again under another recipe: what differs
  lmgym bisect runs/quickstart --metric entropy                   when it changed, and what changed with it
  lmgym bisect runs/a runs/b                                      the first number in which two runs differ
  lmgym why runs/quickstart --step 40                             which groups of a step moved a held-out answer
  lmgym plot runs/a runs/b --metric reward --out reward.svg       one metric of several runs, for a paper
  lmgym view runs/quickstart                                      a page: curves, groups of answers, tokens
  lmgym generate runs/quickstart --prompt "Mia has 3 pens and gets 4 more. How many?"
  lmgym export runs/quickstart --to model                         the model with its tokenizer and a model card
  lmgym convert verl run.sh > my.yaml                             so for trl, open-r1, openrlhf, nemo-rl
  lmgym convert rl4lms gpt2_ppo.yml > gpt2_ppo.yaml               RL4LMs' file as a recipe (train takes it too)
  lmgym list reward --json
  lmgym schema > recipe.schema.json                               for your editor, with --plugin for names of your own
"""


FIRST_STEPS = """lmgym trains language models by reinforcement learning. What to do next:

  lmgym train quickstart     train a tiny model: three minutes on two CPU cores
  lmgym view runs/           look at its curves, answers and tokens in the browser
  lmgym new my.yaml          five questions, and a recipe for your own data
  lmgym init my-project      a task and a reward of your own, with a recipe that trains
  lmgym check my.yaml        what is wrong with a recipe, before it trains

`lmgym --help` lists all commands, with examples.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status (0 done, 1 an error that users can correct, 130 Ctrl-C)."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may stand at the cursor
        from lmgym.cli.completion import answer

        answer(_parser())
    with surviving_output() as output, plain_warnings():
        return _main(arguments, output)


def _main(arguments: Sequence[str] | None, output: HarmlessOutput) -> int:
    parser, words = _parser(), list(sys.argv[1:] if arguments is None else arguments)
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.exit(2, f"lmgym: there is no command {visible(words[0])}; {_meant(words[0])}\n")
    given, rest = parser.parse_known_args(words)
    late = [word for word in rest if "=" in word and not word.startswith("-")]  # key=value after an option
    if rest != late or (late and not hasattr(given, "overrides")):
        surplus = [word for word in rest if word not in late] or rest
        sentence = _as_override(surplus, given) or f"unrecognised: {' '.join(surplus)}"
        parser.exit(2, f"lmgym: {visible(sentence)}\n")
    # argparse leaves positional words after an option; overrides may come anywhere.
    if late:
        given.overrides = [*given.overrides, *late]
    if given.verb is None:
        print(FIRST_STEPS, end="")
        return 0
    try:
        with told():
            status = _run(given)
        # A run has its records. The other commands are there for what they print; but `lmgym list | head` is fine.
        if output.lost is not None and output.lost.errno != errno.EPIPE and given.verb != "train":
            raise LmgymError(f"standard output cannot be written: {output.lost.strerror}")
        return status
    except LmgymError as error:
        print(f"lmgym: {visible(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        saved = "; what was saved is whole, and `lmgym train RUN_FOLDER` goes on from there"
        print(f"lmgym: stopped{saved * (given.verb == 'train')}", file=sys.stderr)
        return 130


def _meant(word: str) -> str:
    """What to write instead of a command that there is not."""
    if word in packaged_recipes() or Path(word).exists():
        return f"to train {visible(word)}, write: lmgym train {visible(word)}"
    return suggest(word, COMMANDS)


def _as_override(words: Sequence[str], given: argparse.Namespace) -> str | None:
    """For an option that is a key of recipes, how that is written; None for other words."""
    name, _, value = words[0].lstrip("-").partition("=")
    name, value = name.replace("-", "_"), value or next((word for word in words[1:] if word[:1] != "-"), "VALUE")
    keys = [key for key in recipe_keys({}) if f".{key}".endswith(f".{name}")] if words[0].startswith("--") else []
    if not keys or not hasattr(given, "overrides"):
        return None
    return f"there is no option {words[0]}; keys of a recipe are written without dashes: {min(keys, key=len)}={value}"


def _run(given: argparse.Namespace) -> int:
    """Run a command: once, or for each recipe that a configuration of RL4LMs is converted to."""
    for name in (getattr(given, argument, None) for argument in ("what", "first", "second")):
        if name and hides_packaged(name):
            print(
                f"lmgym: {name} is taken from the current folder; the recipe that comes with lmgym has the same name "
                f"(`lmgym recipes {name}` prints it)",
                file=sys.stderr,
            )
    what = Path(getattr(given, "what", None) or "")
    if what.suffix in (".yml", ".yaml") and what.is_file():
        from lmgym.compat.rl4lms.schema import is_rl4lms
        from lmgym.config.yaml import read_yaml

        if is_rl4lms(read_yaml(what)):
            from lmgym.compat.rl4lms.files import run_converted

            return run_converted(given, what)
    if given.verb in ("train", "check"):
        from lmgym.config.early import check_early

        check_early(given.what, given.overrides)
    return int(given.run(given) or 0)


COMMANDS = {  # command: its module, and its help
    "train": ("train", "train a recipe, or resume a run folder"),
    "eval": ("evaluate", "evaluate a run, one of its checkpoints, or another model as a recipe says"),
    "compare": ("compare", "compare two models prompt by prompt, or two groups of runs seed by seed"),
    "generate": ("generate", "answer prompts (--prompt, --file, or one a line on standard input)"),
    "serve": ("serve", "let any client of OpenAI's or Anthropic's form talk to a model"),
    "doctor": ("doctor", "say what is wrong with a run, worst first, and what to do"),
    "what-if": ("what_if", "take a step of a run again under a changed recipe: what would have been different"),
    "bisect": ("bisect", "say when a metric of a run changed and what changed with it, or where two runs part"),
    "why": ("why", "say when an answer became more or less likely, and which groups of a step did it"),
    "plot": ("plot", "draw one metric of several runs, with intervals over seeds"),
    "view": ("view", "look at runs in the browser: curves, groups, answers, tokens"),
    "check": ("check", "a dry run of a recipe: loads everything, samples once, reports problems"),
    "audit": ("audit", "try to trick a recipe's rewards, and say what they pay for"),
    "export": ("export", "write a trained model for sharing, with its tokenizer and a model card"),
    "convert": ("convert", "print another system's configuration as a recipe"),
    "list": ("list", "list the names that recipes can use"),
    "new": ("new", "ask five questions and write a recipe for your own data"),
    "init": ("init", "write a small project with a task and a reward of its own"),
    "recipes": ("packaged", "list the recipes that come with lmgym, or print one"),
    "completion": ("completion", "print what lets the Tab key of bash, zsh or fish complete lmgym's words"),
    "schema": ("schema", "print the JSON Schema of a recipe, with which editors complete and check one"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lmgym",
        description="Train language models by reinforcement learning.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.color = False  # type: ignore[attr-defined]  # of Python 3.14; HarmlessOutput would show its codes
    parser.add_argument("--version", action="version", version=f"lmgym {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar=f"{{{','.join(COMMANDS)}}}")
    for verb, (module, text) in COMMANDS.items():
        command = importlib.import_module(f"lmgym.cli.{module}")
        subparser = verbs.add_parser(verb, help=text, description=text)
        subparser.color = False  # type: ignore[attr-defined]
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
