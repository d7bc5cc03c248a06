"""What becomes of one mutant: accepted, and then its set-up works; or refused, in one sentence and in time.

Anything else is a finding: a traceback, a message that is too long or of several lines, a command that takes too long,
a key or a value that was accepted and then ignored.
"""

import contextlib
import io
import json
import os
import re
import signal
import threading
import time
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from lmgym.cli.main import main
from lmgym.config.build import build_config, dump, load_config, resolved
from lmgym.config.schema import Config
from lmgym.core.errors import LmgymError
from lmgym.core.visible import visible
from lmgym.experiments.sweep import plan
from lmgym.logs.console import Console
from lmgym.logs.plots.training import training_plot
from lmgym.models.builtin import byte_tokenizer
from lmgym.pictures.ids import piece_ids
from lmgym.pictures.store import current_store
from lmgym.tasks.base import MissingSplit, load_task
from lmgym.text.chat import prompt_ids
from lmgym.text.pictures import read_pictures
from lmgym.training.begin_stage import begin_stage
from lmgym.training.loop import advance, begin_step, collate_step, gather
from lmgym.training.setup import start
from lmgym.training.stage import StageRun
from lmgym.types import Example
from lmgym.updates.prepare import prepare
from lmgym.updates.update import update
from tests import runs
from tests.torture import data, folders, recipes
from tests.torture.heard import Ignored, check_heard

SECONDS = 5.0  # that a mutant may take
LONGEST = 1000  # characters of a message
CHEAP = 64  # answers of a step that is tried, too
REWARDS = ("final_answer", "exact_match", "bleu", "rougeL", "chrf", "length")  # that read references
Mutant = recipes.RecipeMutant | data.DataMutant | folders.FolderMutant


@dataclass(frozen=True)
class Outcome:
    """`finding` is empty for a mutant that was accepted or refused as it should be; alike findings have one `where`."""

    verdict: str  # accepted, refused
    seconds: float
    message: str = ""
    finding: str = ""
    where: str = ""


class TooSlow(BaseException):
    """The mutant has had its time. No `except Exception` may catch it."""


def judge(
    mutant: Mutant, folder: Path, bases: Mapping[str, Path], seconds: float = SECONDS, deep: bool = True
) -> Outcome:
    """Try a mutant in this process, in an empty folder; the working directory is that folder. With `deep`, a recipe
    that was accepted takes one step, too."""
    outcome = _judge(mutant, folder, bases, 3 * seconds, deep)
    if outcome.seconds > seconds and not isinstance(mutant, folders.FolderMutant):
        outcome = _judge(mutant, folder, bases, seconds, deep)  # the first time it may have imported a library
    if outcome.seconds > seconds and not outcome.finding:
        return Outcome(outcome.verdict, outcome.seconds, outcome.message, "slow", _first_words(outcome.message))
    return outcome


def _judge(mutant: Mutant, folder: Path, bases: Mapping[str, Path], seconds: float, deep: bool) -> Outcome:
    began = time.perf_counter()
    verdict, message, finding, where = "accepted", "", "", ""
    output = io.StringIO()
    try:
        with (
            limited(seconds),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            _try(mutant, folder, bases, deep)
    except LmgymError as error:
        verdict, message = "refused", visible(str(error))
        finding = complaint_about(message)
        where = finding if finding == "long message" else _first_words(message)
    except Ignored as error:
        finding, where, message = "ignored", str(error), str(error)
    except TooSlow as error:
        finding, where = "slow", _place(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        verdict, finding = "refused", "traceback"
        message = f"{type(error).__name__}: {error}"[:2000]
        where = f"{type(error).__name__} {_place(error)}"
    finally:
        torch.set_num_threads(1)
    return Outcome(verdict, time.perf_counter() - began, message, finding, where)


def complaint_about(message: str) -> str:
    """What is wrong with an error's sentence; empty if nothing is."""
    if len(message) > LONGEST:
        return "long message"
    if "\n" in message.strip():
        return "several lines"
    if re.search(r"\braised (KeyError|TypeError|AttributeError|IndexError|AssertionError|ValueError)\b", message):
        return "wrapped traceback"
    return "" if message.strip() else "empty message"


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the main thread after so many seconds. lmgym itself uses SIGALRM, so not by that."""
    inside, main_thread = [True], threading.main_thread().ident
    assert main_thread is not None

    def end(*_: object) -> None:
        if inside:
            raise TooSlow

    before = signal.signal(signal.SIGUSR1, end)
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(main_thread, signal.SIGUSR1))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        inside.clear()
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def _try(mutant: Mutant, folder: Path, bases: Mapping[str, Path], deep: bool) -> None:
    if isinstance(mutant, recipes.RecipeMutant):
        _try_recipe(mutant, folder, deep)
    elif isinstance(mutant, data.DataMutant):
        _try_data(mutant, folder, deep)
    else:
        _try_folder(mutant, folders.write(mutant, bases, folder))


def _try_recipe(mutant: recipes.RecipeMutant, folder: Path, deep: bool) -> None:
    path = recipes.write(mutant, folder)
    if plan(path, mutant.overrides) is not None:
        return
    config = load_config(path, list(mutant.overrides))
    text = dump(config)
    (folder / "resolved.yaml").write_text(text, encoding="utf-8")
    if dump(load_config(folder / "resolved.yaml")) != text:
        raise Ignored("the resolved recipe is another one when it is read again")
    heard = resolved(config)
    if config.out is None:
        config.out = str(folder / "run")
    set_up(config, deep)
    if mutant.unknown is not None:
        raise Ignored(f"unknown key {mutant.what}")
    if mutant.changed is not None:
        check_heard(mutant, heard)


def set_up(config: Config, deep: bool) -> None:
    """Set a run up as `lmgym train` does, with its next stage; with `deep`, take one step if it is a small one."""
    run = start(config, Console(quiet=True))
    try:
        if run.progress.stage_index == len(config.stages) or any(stage.env.get("workers") for stage in config.stages):
            return  # it is done; or it would start processes
        with begin_stage(run) as stage:
            section = stage.config
            answers = section.prompts_per_step * getattr(stage.algorithm, "group_size", 1) * section.max_draws
            answers *= getattr(stage.algorithm, "epochs", 1)
            small = answers <= CHEAP and section.sampling.max_new_tokens <= CHEAP
            if deep and small and stage.step < section.steps:
                take_step(stage)
    finally:
        run.writer.close()
        run.lock.close()


def take_step(stage: StageRun) -> None:
    """The lines of a step of the loop."""
    run, algorithm, step = stage.run, stage.algorithm, stage.step
    begin_step(stage, step)
    batch = collate_step(stage, gather(stage, step), step)
    batch = prepare(batch, run.policy, stage.frozen_models.models, algorithm)
    update(algorithm, run.policy, batch, stage.optimizer)
    advance(stage)


def _try_data(mutant: data.DataMutant, folder: Path, deep: bool) -> None:
    arguments = data.write(mutant, folder)
    for split in data.SPLITS:
        try:
            examples = load_task(mutant.task, split, **arguments)
        except MissingSplit as error:
            if split == "train" or complaint_about(str(error)):
                raise
            continue
        for example in examples:
            _check_example(example)
    if deep:
        task = {"name": mutant.task, **arguments}
        changes = {"rewards": dict.fromkeys(REWARDS, 1.0), "evaluation": {"examples": 1, "split": "test"}}
        changes["policy"] = runs.TINY["policy"] | {"cut": "left", "max_prompt_tokens": 64}
        set_up(build_config(runs.tiny(task=task, out=str(folder / "run"), **changes)), deep=True)


def _check_example(example: Example) -> None:
    """An example that was accepted can be written down and encoded, and its pictures seen."""
    tokenizer = byte_tokenizer()
    read_pictures(tokenizer, lambda digest: piece_ids(digest, current_store().open(digest).width))
    prompt_ids(tokenizer, example.prompt)
    json.dumps([example.prompt, example.references, dict(example.meta)], ensure_ascii=False, default=str).encode()


def _try_folder(mutant: folders.FolderMutant, run: Path) -> None:
    if mutant.verb == "resume":
        from lmgym.cli.recipes import read_recipe

        config, _ = read_recipe(Namespace(what=str(run), overrides=["steps=5"]))
        set_up(config, deep=False)
    elif mutant.verb == "plot":
        training_plot(run / "metrics.jsonl", run.parent / "plot.png")
    else:
        complaints = io.StringIO()
        with contextlib.redirect_stderr(complaints):
            status = main(command(mutant, run))
        said = [line for line in complaints.getvalue().split("\n") if line.startswith("lmgym: ")]
        if status == 1 and said:
            raise LmgymError(complaints.getvalue().partition("lmgym: ")[2].removesuffix("\n"))


def command(mutant: Mutant, path: Path) -> list[str]:
    """The words of the command line for a mutant whose recipe or run is at `path`."""
    if isinstance(mutant, folders.FolderMutant):
        more = {
            "compare": [str(path)],
            "export": ["--to", str(path.parent / "exported")],
            "generate": ["--prompt", "2 + 2"],
            "resume": ["steps=5"],
            "serve": ["--port", "-1"],  # no port: it ends before it listens
            "view": ["--html", str(path.parent / "page.html")],
        }.get(mutant.verb, [])
        first = str(path / "recipe.yaml") if mutant.verb == "compare" else str(path)
        return [{"resume": "train"}.get(mutant.verb, mutant.verb), first, *more]
    overrides = mutant.overrides if isinstance(mutant, recipes.RecipeMutant) else ()
    return ["check", str(path), *overrides]


def command_outcome(shell: runs.Shell, mutant: Mutant, folder: Path, bases: Mapping[str, Path]) -> Outcome:
    """Try a mutant on the command line, in a process of its own."""
    if isinstance(mutant, recipes.RecipeMutant):
        path = recipes.write(mutant, folder)
    elif isinstance(mutant, data.DataMutant):
        task = {"name": mutant.task, **data.write(mutant, folder)}
        path = runs.write(folder / "recipe.yaml", task=task, evaluation={"examples": 1, "split": "test"})
    else:
        path = folders.write(mutant, bases, folder)
    shell.start(*command(mutant, path))  # returns when the process is there
    began = time.perf_counter()
    timer = threading.Timer(3 * SECONDS, lambda: os.kill(shell.process, signal.SIGKILL))
    timer.start()
    status = shell.wait()
    timer.cancel()
    seconds, said = time.perf_counter() - began, shell.output.read_text(encoding="utf-8", errors="backslashreplace")
    complaints = [line.removeprefix("lmgym: ") for line in said.split("\n") if line.startswith("lmgym: ")]
    message, finding, where = " ".join(complaints), "", ""
    verdict = "refused" if complaints else "accepted"
    if "Traceback (most recent call last)" in said:
        finding, where = "traceback", said.strip().rpartition("\n")[2][:100]
    elif seconds > SECONDS:
        finding, where = "slow", mutant.what[:40]
    elif status not in (0, 1, 2) or (status == 1 and not complaints and command(mutant, path)[0] != "check"):
        finding, where = "died", f"status {status}"
    elif len(message) > LONGEST or len(complaints) > 1:
        finding, where = "long message", "long message"
    return Outcome(verdict, seconds, message or said[-1000:], finding, where)


def _place(error: BaseException) -> str:
    """The innermost line of lmgym in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}lmgym{os.sep}" in frame.filename]
    if not own:
        return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    return f"{own[-1].filename.rpartition('lmgym' + os.sep)[2]}:{own[-1].lineno} {own[-1].name}"


def _first_words(message: str) -> str:
    """A message without what differs from mutant to mutant."""
    return re.sub(r"[0-9]+|'[^']*'|/\S+", "*", message[:200])[:70]
