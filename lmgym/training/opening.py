"""The folder of a run: where its run stands before anything is loaded, and how it is opened once all is loaded."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from lmgym.config.build import dump, resolved
from lmgym.config.schema import Config, LogsSection
from lmgym.core.errors import LmgymError
from lmgym.core.redacted import redacted
from lmgym.inference.base import Engine
from lmgym.logs.console import Console
from lmgym.logs.records import rename_evaluations
from lmgym.logs.rewind import rewind
from lmgym.logs.traces.folder import TraceFolder, rewind_traces
from lmgym.logs.writer import NullWriter, Writer
from lmgym.models.policy import Policy
from lmgym.training.callbacks import Callbacks
from lmgym.training.checkpoints import checkpoint
from lmgym.training.machine import Machine
from lmgym.training.resuming.fingerprint import Fingerprint
from lmgym.training.resuming.resume import check_resumable, report, set_aside
from lmgym.training.run import DEFAULT_FOLDER, Data, Progress, Run, lock_folder
from lmgym.training.sampler_gap import GapLimits


@dataclass(frozen=True)
class Begun:
    """Where a run stands: its folder (locked if a run has begun there), the newest whole checkpoint (None for a new
    run), and how far it has come. Example: Begun(Path("runs/a"), lock, Path("runs/a/checkpoints/..."), progress)"""

    folder: Path
    lock: IO[str] | None
    weights: Path | None
    progress: Progress


@dataclass(frozen=True)
class Loaded:
    """What a run trains with, checked against each other; `stands_on` is its fingerprint.
    Example: Loaded(machine, data, policy, stands_on)"""

    machine: Machine
    data: Data
    policy: Policy
    stands_on: Fingerprint


def lock_begun(folder: Path, warn: Callable[[str], None]) -> IO[str] | None:
    """Lock a folder in which a run has begun, and finish what a kill has left there; None for any other folder."""
    if not ((folder / ".lock").is_file() or (folder / "checkpoints").is_dir()):
        return None
    lock = lock_folder(folder, warn)
    checkpoint.put_back(folder)
    return lock


def find_progress(folder: Path, stages: int, warn: Callable[[str], None]) -> tuple[Path | None, Progress]:
    """The newest whole checkpoint of a run folder (None for a new run), and how far the run has come. `warn` is told of
    newer checkpoints that are damaged. Raises LmgymError if all are, or if the recipe has fewer stages than the run has
    begun."""
    newest, complaints = checkpoint.newest(folder / "checkpoints", resumes=True)
    for complaint in complaints:
        warn(complaint)
    return newest, progress_of(newest, stages)


def progress_of(saved: Path | None, stages: int) -> Progress:
    """How far the run of a checkpoint has come. Raises LmgymError if the recipe has fewer stages than it has begun."""
    if saved is None:
        return Progress()
    state = checkpoint.read_state(saved)
    if state["stage"] >= stages:
        raise LmgymError(f"{saved.parent.parent} is in its stage {state['stage'] + 1}, and the recipe has {stages}")
    return Progress(state["stage"], state["step"], state["version"], rename_evaluations(state["progress"]))


def open_run(
    config: Config,
    begun: Begun,
    loaded: Loaded,
    engine: Engine[Policy],
    limits: GapLimits,
    callbacks: Callbacks,
    console: Console,
) -> Run:
    """The run, in its folder. Raises LmgymError if the checkpoint stands on something else than what is loaded, and if
    another process has begun a run there."""
    ranks = loaded.policy.ranks
    written: tuple[IO[str] | None, Writer, TraceFolder | None] = (None, NullWriter(), None)
    if ranks.first:
        written = open_folder(config, begun, loaded, console)
    else:
        set_aside(check_resumable(begun.weights, loaded.stands_on, begun.progress), begun.progress, config)
        ranks.wait()  # until the first one has written
    lock, writer, traces = written
    section = replace(config.policy, compute=loaded.machine.compute)
    parts, logs = (loaded.data, loaded.policy, engine), (console, writer, lock)
    stands = (begun.progress, begun.weights, loaded.stands_on)
    return Run(config, begun.folder, section, *parts, *logs, *stands, limits, traces, callbacks)


def open_folder(
    config: Config, begun: Begun, loaded: Loaded, console: Console
) -> tuple[IO[str], Writer, TraceFolder | None]:
    """Lock the run folder (unless it was locked before), write what was chosen, and take its logs back to the
    checkpoint. What has changed since then is said and recorded."""
    folder, progress, ranks = begun.folder, begun.progress, loaded.policy.ranks
    lock = begun.lock or lock_folder(folder, console.warn)
    try:
        if begun.lock is None and (folder / "checkpoints").is_dir():
            raise LmgymError(
                f"another process has begun a run in {folder} while this one was loading; start again to go on from "
                "its newest checkpoint, or choose another out="
            )
        changed = check_resumable(begun.weights, loaded.stands_on, progress)
        checkpoint.write_text(folder / "recipe.yaml", dump(config))
        loaded.machine.write(folder)
        counted = checkpoint.read_state(begun.weights).get("records") if begun.weights else {}
        missing = rewind(folder, progress.stage_index, progress.step, counted, begun=progress.begun)
        writer = Writer(folder, config.logs.sinks, console, redacted(resolved(config)))
        report(changed, missing, progress, config, writer, console)
        if loaded.data.told and not begun.weights:
            writer.metrics({"kind": "data", "stage": 0, "step": 0, "left_out": loaded.data.told})
        for sentence in set_aside(changed, progress, config):
            console.say(sentence)
        traces = open_traces(config.logs, folder, loaded.policy, progress, console)
        ranks.wait()
    except BaseException:
        lock.close()
        raise
    if begun.weights:
        console.say(where_it_stands(config, Path(config.out or DEFAULT_FOLDER), progress))
    return lock, writer, traces


def where_it_stands(config: Config, folder: Path, progress: Progress) -> str:
    """What a run that is resumed says first: where it goes on, or that it has no step left and how it gets some."""
    stage, number = config.stages[progress.stage_index], progress.stage_index + 1
    last, step = number == len(config.stages), progress.step
    if not last or not progress.ended(stage):
        return f"resuming {folder} in stage {number}, after step {step}"
    why = (
        f"all {step} steps of its last stage are done" if step >= stage.steps else f"it stopped early after step {step}"
    )
    more = f"stages.{stage.name}.steps" if len(config.stages) > 1 else "steps"
    return f"{folder} is finished: {why}. For more, raise {more}; for a new run, choose another out="


def open_traces(
    section: LogsSection, folder: Path, policy: Policy, progress: Progress, console: Console
) -> TraceFolder | None:
    """The traces/ of a run, without the steps that the run will repeat, and beside it the tokenizer; None if the recipe
    keeps none."""
    for sentence in rewind_traces(folder, progress.stage_index, progress.step):
        console.warn(sentence)
    if section.traces == "none":
        return None
    if not (folder / "tokenizer").exists():
        checkpoint.write_folder(folder / "tokenizer", policy.tokenizer.save_pretrained)
    return TraceFolder(folder, section.traces_gib * 2**30, console.warn)
