"""Whether a run may go on from a checkpoint: all differences between its fingerprint and what is there now."""

from pathlib import Path

from lmgym.config.schema import Config
from lmgym.core.errors import LmgymError
from lmgym.logs.console import Console
from lmgym.logs.writer import Writer
from lmgym.training.checkpoints.checkpoint import read_fingerprint
from lmgym.training.resuming.differences import differences
from lmgym.training.resuming.fingerprint import Fingerprint
from lmgym.training.resuming.verdicts import Differences
from lmgym.training.run import Progress

SHOWN = 4  # differences of which a sentence says more than the name
LONGEST = 700  # characters of a list of differences


def check_resumable(saved: Path | None, now: Fingerprint, progress: Progress) -> Differences:
    """Raise LmgymError if a run cannot go on from its checkpoint as things are now; else what is not as it was. `saved`
    is None for a new run."""
    if saved is None:
        return Differences()
    before = read_fingerprint(saved)
    if before is None:
        return Differences(unknown=True)
    try:
        found = differences(before, now, progress)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise LmgymError(f"{saved / 'fingerprint.json'} is no fingerprint of a run ({error!r:.100})") from error
    if found.refused:
        folder = saved.parent.parent
        raise LmgymError(
            f"{folder} cannot go on from {saved.name}: {listed(found.refused)}; put back what was there, or train "
            f"anew in another folder: lmgym train {folder / 'recipe.yaml'} out=ANOTHER"
        )
    return found


def set_aside(found: Differences, progress: Progress, config: Config) -> list[str]:
    """Forget what later evaluations cannot be compared with; a sentence for each. Of a best model the next evaluation
    makes another one."""
    evaluations, said = progress.evaluations, []
    rule = config.stages[progress.stage_index].early_stop
    if (best := evaluations.get("best")) and (found.other_best or best["metric"] != config.evaluation.keep_best):
        if config.evaluation.keep_best is not None and best.get("comparable", True):
            said.append(
                f"best/ was chosen by {best['metric']} as it was measured then; the next evaluation begins anew"
            )
        evaluations["best"] = {**best, "comparable": False}
    if found.other_early and evaluations.get("early_best") is not None:
        del evaluations["early_best"]
        if rule is not None:
            said.append(f"early_stop judges by {rule.metric} anew, as it is measured now")
    return said


def report(
    found: Differences, missing: list[str], progress: Progress, config: Config, writer: Writer, console: Console
) -> None:
    """Say what is not as it was when the checkpoint was written, and record it if it may change results, or if records
    are `missing`."""
    if found.unknown:
        console.warn("the checkpoint is of an older version, which did not note data, recipe and machine; see for "
                     "yourself that they are the same")  # fmt: skip
    if found.free:
        console.say(f"since the checkpoint {listed(found.free)}")
    if found.recorded:
        console.warn(f"from here on the run is no longer bit for bit what it would have been: {listed(found.recorded)}")
    for sentence in missing:
        console.warn(sentence)
    if found.recorded or missing:
        stage = config.stages[progress.stage_index].name
        place = {"stage": progress.stage_index, "stage_name": stage, "step": progress.step}
        writer.metrics({"kind": "resume", **place, "changed": found.recorded, "missing": missing})


def listed(sentences: list[str]) -> str:
    """Several sentences as one: the first few as they are, of the others what they are about."""
    names = [sentence.split(" was ")[0] for sentence in sentences[SHOWN:]]
    text = "; ".join(sentences[:SHOWN]) + (f"; also {', '.join(names)}" if names else "")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(sentences)} in all)"
