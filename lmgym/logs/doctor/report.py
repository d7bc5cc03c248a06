"""What the doctor prints."""

import textwrap
from collections.abc import Iterator

from lmgym.logs.doctor.examine import Diagnosis, Finding

WIDTH = 100  # columns of a sentence, where the terminal is not narrower
INDENT = "   "


def report(diagnosis: Diagnosis, columns: int | None = None) -> Iterator[str]:
    """The lines about a run, worst finding first. `columns` is the width of the terminal.

    Example:
        >>> for line in report(examine(Path("runs/a"), recipe)):
        ...     print(line)
    """
    count, several = len(diagnosis.findings), len(diagnosis.seconds) > 1
    nothing = "the rules find nothing wrong" if diagnosis.steps else "there is nothing to judge yet"
    found = "1 finding" if count == 1 else f"{count} findings, worst first" if count else nothing
    yield f"{diagnosis.folder}: {diagnosis.state}, {diagnosis.steps} steps; {found}"
    for stage, seconds in diagnosis.seconds.items():
        yield _time(seconds, f" of stage {stage}" if several else "")
    # Words are kept whole, so that a key can be copied.
    indented = textwrap.TextWrapper(min(columns or WIDTH, WIDTH), initial_indent=INDENT, subsequent_indent=INDENT)
    indented.break_long_words = indented.break_on_hyphens = False
    yield from _unjudged(diagnosis, several, indented)
    for number, finding in enumerate(diagnosis.findings, 1):
        yield ""
        yield f"{number}. {finding.level}: {finding.title} ({_when(finding, several)})"
        what = finding.sign.what
        for sentence in (f"{what[0].upper()}{what[1:]}.", _number(finding), *_end(finding)):
            yield from indented.wrap(sentence)
        yield from indented.wrap(f"Remedy: {finding.sign.remedy}.")
    if count and several:
        name = diagnosis.findings[0].stage_name
        yield ""
        yield f"A stage has keys of its own, such as stages.{name}.optimizer.learning_rate."


def _time(seconds: dict[str, float], stage: str) -> str:
    """Where the seconds of a step go."""
    whole = seconds.get("seconds", 0.0)
    parts = [f"{name.split('/')[1]} {value / whole:.0%}" for name, value in seconds.items() if "/" in name and whole]
    return f"a step{stage} takes {whole:.3g} s: {', '.join(parts)}" if parts else f"a step{stage}: no times recorded"


def _when(finding: Finding, several: bool) -> str:
    stage = f"stage {finding.stage_name}, " * several
    first, last = finding.step + 1, finding.last_step + 1  # people count from 1
    until = "to the end" if finding.held else f"to step {last}"
    return f"{stage}step {first}" if last == first else f"{stage}step {first} {until}"


def _number(finding: Finding) -> str:
    sign = finding.sign
    where = "Held-out " * sign.held_out
    limit = "" if sign.limit is None else f", the limit is {sign.limit:.3g}"
    return f"{where}{sign.metric} is {sign.value:.3g} at step {finding.sign_step + 1}{limit}."


def _end(finding: Finding) -> Iterator[str]:
    """That a finding no longer holds at the end of its stage, or by now."""
    if not finding.held:
        sign = finding.sign
        value = "" if finding.end_value is None else f": {sign.metric} is {finding.end_value:.3g}"
        yield f"{'Refuted by the newest evaluation' if sign.held_out else 'No longer so in the newest steps'}{value}."


def _unjudged(diagnosis: Diagnosis, several: bool, indented: textwrap.TextWrapper) -> Iterator[str]:
    """Which rules had too little to judge, and what they lack."""
    for stage, lacking in diagnosis.unjudged.items():
        if lacking:
            yield f"not judged{f' in stage {stage}' * several}, for want of data:"
        for lacks, names in lacking.items():
            yield from indented.wrap(f"{', '.join(name.replace('_', ' ') for name in names)} ({lacks})")
