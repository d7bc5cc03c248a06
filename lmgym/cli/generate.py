"""`lmgym generate`: answer prompts with a run's newest model, one of its checkpoints, or another model."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lmgym.cli.recipes import add_model, quick_imports, read_model
from lmgym.core.errors import LmgymError
from lmgym.core.visible import escaped, visible_lines

if TYPE_CHECKING:
    from lmgym.experiments.answers import Answered


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A model, prompts, how many answers, and the format."""
    add_model(parser)
    problem = "the text of a problem; may be given several times"
    parser.add_argument("--prompt", action="append", default=[], help=problem)
    prompts = "prompts, one a line; of a .jsonl file, each line's `prompt` (a text or chat messages) and `images`"
    parser.add_argument("--file", type=Path, help=prompts)
    picture = "a picture before each prompt; may be given several times"
    parser.add_argument("--picture", action="append", default=[], type=Path, metavar="FILE", help=picture)
    parser.add_argument("--task", metavar="LABEL", help="which task of a mixture the prompts belong to")
    parser.add_argument("--samples", type=int, metavar="N", help="answers to each prompt, drawn at random if several")
    parser.add_argument("--verbose", action="store_true", help="show the full prompt, as the model reads it")
    parsed = "one JSON object a line: prompt, full_prompt, answers, stops"
    parser.add_argument("--json", action="store_true", help=parsed)


def run(given: argparse.Namespace) -> None:
    """Print each prompt with its answers."""
    with quick_imports():
        from lmgym.experiments.answers import answer_prompts, lines_of_prompts, read_prompts, with_pictures

    named = read_model(given)
    prompts = [*given.prompt, *(read_prompts(given.file) if given.file else [])]
    if not (given.prompt or given.file):
        if sys.stdin.isatty():
            print("lmgym: one prompt a line; Ctrl-D ends", file=sys.stderr)
        prompts = list(lines_of_prompts(sys.stdin.read()))
    if not prompts:
        raise LmgymError("there is no prompt: give --prompt TEXT, --file FILE, or one prompt a line on standard input")
    prompts = with_pictures(prompts, given.picture)
    answered, notes = answer_prompts(named, prompts, given.samples, given.task, given.overrides)
    for note in notes:
        print(f"lmgym: {note}", file=sys.stderr)
    for one in answered:
        if given.json:
            print(escaped(json.dumps(asdict(one), ensure_ascii=False)))
        else:
            print(visible_lines(_verbose(one) if given.verbose else _short(one)))


def _short(one: "Answered") -> str:
    """The prompt and its answer; several answers each on a line of its own."""
    prompt = one.prompt if isinstance(one.prompt, str) else one.prompt[-1]["content"]
    if len(one.answers) > 1:
        return "\n".join([prompt, *(f"  {number}: {text.strip()}" for number, text in enumerate(one.answers, 1))])
    [answer] = one.answers
    return f"{prompt}{'' if prompt[-1:].isspace() or answer[:1].isspace() else ' '}{answer}"


def _verbose(one: "Answered") -> str:
    """The full prompt and the answers under headings."""
    parts = [f"--- the prompt, as the model reads it\n{one.full_prompt}"]
    for number, (text, stop) in enumerate(zip(one.answers, one.stops, strict=True), 1):
        which = f"answer {number}" if len(one.answers) > 1 else "the answer"
        if one.conversations:
            messages = one.conversations[number - 1]
            text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
            which = which.replace("answer", "conversation")
        parts.append(f"--- {which}, ended by {stop}\n{text}")
    return "\n".join(parts) + "\n"
