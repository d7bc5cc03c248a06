"""A run in progress and its folder.

runs/NAME/
    recipe.yaml         the resolved recipe; `lmgym train runs/NAME` resumes from it
    machine.json        precision, threads, versions: chosen once, see machine.py
    metrics.jsonl       one record a step and an evaluation
    timings.jsonl       the seconds of each step's parts
    rollouts.jsonl      a tracked prompt's answers in each step
    traces/             a table of each step's answers, and every number of some of them, see logs/traces/trace.py
    tokenizer/          what the ids in traces/ are read with
    pictures/           those of the prompts, if there are any, see pictures/store.py
    copies/             frozen models that checkpoints refer to, see checkpoints/frozen_models.py
    checkpoints/        the newest few, see checkpoints/checkpoint.py
    best/               the best model, if evaluation.keep_best names a metric
    final/              the trained model, for AutoModelForCausalLM.from_pretrained
    summary.json        before and after, with intervals
    plot.png"""

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from lmgym.config.schema import Config, Stage
from lmgym.core.errors import LmgymError
from lmgym.distributed.ranks import Ranks
from lmgym.inference.base import Engine
from lmgym.logs.console import Console
from lmgym.logs.records import at_once
from lmgym.logs.traces.folder import TraceFolder
from lmgym.logs.writer import Writer, disk_errors, make_folder
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.rewards.running.pooled import fresh_worker
from lmgym.training.callbacks import Callbacks
from lmgym.training.process_settings import ProcessSettings
from lmgym.training.sampler_gap import GapLimits
from lmgym.types import Example

DEFAULT_FOLDER = "runs/run"
AS_ONE = 0.25  # seconds between signals that count as one
GLANCE = 0.5  # seconds for which a look at the lock (logs/run_state.py) may hold it


@dataclass(frozen=True)
class Data:
    """All examples of a run: those that each stage trains on, and those of the evaluations by split.
    Example: data.training[0][0].prompt, len(data.held_out["test"])"""

    training: list[Sequence[Example]]
    held_out: dict[str, Sequence[Example]]
    told: list[str] = field(default_factory=list)
    """Sentences about rows that do not fit and are left out."""


@dataclass
class Progress:
    """How far a run has come. A checkpoint keeps it, with the policy, the optimizer and the algorithm."""

    stage_index: int = 0
    step: int = 0
    """Steps taken in this stage."""
    version: int = 0
    """Updates that the policy has had in all stages together."""
    evaluations: dict[str, Any] = field(default_factory=dict)
    """Plain JSON: the evaluations "newest", "before", "after" and "best", and the state of early stopping."""

    @property
    def begun(self) -> bool:
        """True if this stage has begun. It begins with an evaluation; one that stopped early there has no step."""
        return self.step > 0 or "newest" in self.evaluations

    def advance(self) -> None:
        """Count a step, after the policy's update."""
        self.step, self.version = self.step + 1, self.version + 1

    def ended(self, stage: Stage) -> bool:
        """True if this stage has no step left: it took them all, or stopped early under the rule that it has."""
        rule = stage.early_stop and asdict(stage.early_stop)
        return self.step >= stage.steps or (rule is not None and self.evaluations.get("stop") == rule)


@dataclass
class Run:
    """Everything that all stages of a run share; `begin_stage` adds what one stage needs. As a context manager it lets
    Ctrl-C stop the run after the step in flight, and closes its files and unlocks its folder at the end.

    Example:
        >>> with start(config) as run:
        ...     for stage in stages_left(run):
        ...         train_stage(stage)
        ...     finish(run)
    """

    config: Config
    folder: Path
    section: PolicySection  # config.policy with the precision that this run has chosen
    data: Data
    policy: Policy
    engine: Engine[Policy]
    console: Console
    writer: Writer
    lock: IO[str] | None  # until it is closed, no other process may train in this folder; of the first rank
    progress: Progress
    resume_from: Path | None  # the checkpoint whose optimizer and algorithm the first stage takes over
    fingerprint: dict[str, Any]  # what each checkpoint says of data, recipe and machine, see resuming/fingerprint.py
    gap_limits: GapLimits  # of the sampler's gap, while it trains
    traces: TraceFolder | None = None  # of the first rank, unless the recipe keeps none
    callbacks: Callbacks = field(default_factory=Callbacks)  # of the first rank
    asked_to_stop: bool = False  # by a signal to this process
    interrupted: bool = False  # all ranks know of it, see `agree_to_stop`
    settings: ProcessSettings = field(default_factory=ProcessSettings.now)  # of torch, which user code may change
    engine_version: int = field(init=False)  # the updates that the engine's weights have had
    _opened: ExitStack = field(default_factory=ExitStack, repr=False)

    def __post_init__(self) -> None:
        self.engine_version = self.progress.version  # it was opened with the policy as it is now

    def __enter__(self) -> "Run":
        for opened in (self.console, self.lock, self.writer, stop_signals(self), fresh_worker()):
            if opened is not None:
                self._opened.enter_context(opened)
        self._opened.callback(self.engine.close)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._opened.__exit__(*raised)

    @property
    def shown(self) -> Path:
        """The folder as the user has named it; `folder` is absolute, as user code may change the current folder."""
        return Path(self.config.out or DEFAULT_FOLDER)

    @property
    def ranks(self) -> Ranks:
        """The processes that train this run together."""
        return self.policy.ranks

    def check_in_place(self) -> None:
        """Raise LmgymError if the run folder was moved, replaced or deleted since the run has begun: what is written
        next would begin a second folder, without recipe and records, or go into another run's."""
        if self.lock is None:
            return
        try:
            same = os.path.samestat(os.fstat(self.lock.fileno()), os.stat(self.folder / ".lock"))
        except (FileNotFoundError, NotADirectoryError):
            same = False
        except OSError:  # a network file system that is away for a moment: who writes there says so
            return
        if not same:
            raise LmgymError(
                f"{self.shown} was moved, replaced or deleted while its run trained, so the run ends here; "
                "`lmgym train` with the folder where it is now goes on from its newest checkpoint"
            )

    def renew_engine(self) -> None:
        """Give the engine the newest weights, if it has older ones. All ranks call this together, before answers are
        asked for and not after each update: a stage that learns from given answers would send weights in vain."""
        if self.engine_version != self.progress.version:
            self.engine.load(self.policy, self.progress.version)
            self.engine_version = self.progress.version

    def agree_to_stop(self) -> bool:
        """True if a signal has asked any rank to stop. Between two calls all ranks believe the same, so that all leave
        the loop after the same step."""
        self.interrupted = self.interrupted or self.ranks.agree(self.asked_to_stop)
        return self.interrupted

    @property
    def last_stage(self) -> bool:
        return self.progress.stage_index == len(self.config.stages) - 1

    @property
    def stopped(self) -> bool:
        """True if the user has stopped the run, or an early stop has ended the stage."""
        return self.interrupted or bool(self.progress.evaluations.get("stop"))


def lock_folder(folder: Path, warn: Callable[[str], None]) -> IO[str]:
    """Make a run folder and lock it until the file is closed or the process ends. LmgymError if it is locked; `warn` is
    told of a file system that cannot lock."""
    with disk_errors(folder):
        make_folder(folder)
        file = open(folder / ".lock", "a", opener=at_once)  # noqa: SIM115 (train closes it)
    end = time.monotonic() + GLANCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError as error:
            if time.monotonic() < end:
                time.sleep(0.02)
                continue
            file.close()
            raise LmgymError(f"another process is training in {folder}; wait for it, or choose another out=") from error
        except OSError as error:  # some network file systems
            warn(f"the file system of {folder} cannot lock a file ({error.strerror}); see to it that no other process "
                 "trains there")  # fmt: skip
            return file


class Stoppable(Protocol):
    """What `stop_signals` asks of a run."""

    asked_to_stop: bool
    console: Console


@contextmanager
def stop_signals(run: Stoppable) -> Iterator[None]:
    """Ctrl-C, SIGTERM and a lost terminal (SIGHUP) ask the loop to stop after the step in flight; a second Ctrl-C or
    SIGTERM stops at once and loses it, unless it comes within `AS_ONE` seconds. Under nohup, which ignores SIGHUP, it
    stays ignored."""
    first = 0.0

    def ask(number: int, frame: Any) -> None:
        nonlocal first
        if run.asked_to_stop:
            # The kernel and the shell may both send SIGHUP; and whoever signals all processes of a job signals us and
            # torchrun or a sweep, which passes its signal on to us.
            if number == signal.SIGHUP or time.monotonic() - first < AS_ONE:
                return
            raise KeyboardInterrupt
        run.asked_to_stop, first = True, time.monotonic()
        run.console.say("stopping after this step; once more to stop at once, without it")

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, ask)
    except ValueError:  # not in the main thread: whoever called us has the signals
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
