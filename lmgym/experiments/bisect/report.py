"""What `lmgym bisect` prints. Steps are counted from 1, as in the log."""

import math
from collections.abc import Iterator
from pathlib import Path

from lmgym.experiments.bisect.change import Change, Moved
from lmgym.experiments.bisect.parting import Parting

KEYS = 12  # of two recipes that are shown


def change_sentences(folder: Path, metric: str, change: Change | None) -> Iterator[str]:
    """When a metric of a run changed, and what changed with it."""
    if change is None:
        yield f"{folder}: {metric} has no change that is clearer than its noise"
        return
    place = f"{folder}, stage {change.stage}: {metric}"
    if change.point is None:
        yield f"{place} stands alone at step {change.step + 1}; before and behind it the curve is the same"
    else:
        one, other = change.point.slopes
        yield (
            f"{place} changes at step {change.step + 1}: a jump of {change.point.jump:+.3g}; a step moved it by "
            f"{one:+.3g} before, and by {other:+.3g} behind it (F {change.point.f:.3g}, p {change.point.p:.3g})"
        )
    yield from (f"  the run was resumed there, and {text}" for text in change.resumed)
    yield from (f"  {text}" for text in change.prompts)
    if change.moved:
        yield "what moved with it, the first to move first:" if change.point else "what stands out there:"
        unit = "standard errors" if change.point else "standard deviations"
        yield from (f"  step {one.step + 1}  {_moved(one, unit)}" for one in change.moved)
    else:
        yield "no other metric moved clearly there"
    if change.strongest:
        yield f"the examples with the largest mean |advantage| of that step: {', '.join(change.strongest)}"
    for finding in change.findings:
        yield f"doctor: {finding.level}: {finding.title} from step {finding.step + 1} on: {finding.sign.what}"
    yield f"to ask what another recipe would have made of it: lmgym what-if {folder} KEY=VALUE --step {change.step + 1}"


def parting_sentences(first: Path, second: Path, parting: Parting) -> Iterator[str]:
    """Where two runs part, and by which number."""
    if parting.keys:
        more = f" and {len(parting.keys) - KEYS} more" if len(parting.keys) > KEYS else ""
        yield f"their recipes differ in {len(parting.keys)} keys{more}:"
        yield from (f"  {key}" for key in parting.keys[:KEYS])
    else:
        yield "their recipes are the same, as far as training goes"
    if parting.step is None:
        yield f"{first} and {second} do not part: {parting.equal_steps} steps are equal, bit for bit"
        return
    before = f"{parting.equal_steps} steps are equal, bit for bit; then they" if parting.equal_steps else "they"
    one, other = parting.values
    where = f" of {parting.where}" if parting.where else ""
    yield f"{before} part at step {parting.step + 1} of stage {parting.stage}"
    yield f"first by {parting.part}: {parting.name}{where} is {one!r:.60} and {other!r:.60}"
    if parting.others:
        yield f"and behind it: {', '.join(parting.others)}"


def _moved(one: Moved, unit: str) -> str:
    if math.isnan(one.before) or math.isnan(one.after):
        return (
            f"{one.name}: new, {one.after:.4g}" if math.isnan(one.before) else f"{one.name}: gone, was {one.before:.4g}"
        )
    errors = "from a constant" if math.isinf(one.errors) else f"{abs(one.errors):.0f} {unit}"
    return f"{one.name}: {one.before:.4g} -> {one.after:.4g} ({errors})"
