"""SPICE and SPIDEr: scene graphs shared with the references, computed by the Java program of SPICE's authors."""

import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.text.cider import cider
from lmgym.rewards.text.references import Tokens, references_of
from lmgym.types import Example

CORENLP = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")  # as the jar's manifest names them


@register("reward", "spice")
def spice(
    texts: list[str],
    examples: list[Example],
    *,
    jar: str,
    java: str = "java",
    memory: str = "8G",
    seconds: float = 1800.0,
) -> list[float]:
    """SPICE, from 0 to 1: F1 of the objects, attributes and relations that the text shares with its references.

    A Java program, which is not part of lmgym, parses text and references into scene graphs. `jar` is the path of
    spice-1.0.jar; the folder lib next to it must hold the jars that it needs (the package pycocoevalcap has all of them
    except Stanford CoreNLP 3.6.0). `java` runs the program with at most `memory` of heap and for at most `seconds` per
    call. The parser alone takes many seconds to load, so one call scores all texts, and SPICE is better used as a
    metric than as a reward. Sources: Anderson et al. 2016; RL4LMs' metric `spice`.

    Raises LmgymError if the jar or Java is missing, if the program fails or takes too long, and for an example without
    references.

    The tests cover lmgym's side only (input, output, errors), since CoreNLP was not available.

    Example:
        >>> values = spice(["A dog runs."], examples, jar="SPICE-1.0/spice-1.0.jar")
    """
    return _scores("spice", texts, examples, jar, java, memory, seconds)


@register("reward", "spider")
def spider(
    texts: list[str],
    examples: list[Example],
    *,
    jar: str,
    spice_coeff: float = 0.5,
    cider_coeff: float = 0.5,
    documents: str | None = None,
    tokens: Tokens = "words",
    java: str = "java",
    memory: str = "8G",
    seconds: float = 1800.0,
) -> list[float]:
    """SPIDEr: spice_coeff * SPICE + cider_coeff * CIDEr-D, with the arguments of `spice` and `cider`. As for `cider`,
    the weights of n-grams come from the file `documents`, or are all equal; the corpus value takes them from the
    references, as published results do.

    Sources: Liu et al. 2017, with equal weights for both; RL4LMs' reward `spider`, whose CIDEr is always 0.

    Example:
        >>> values = spider(texts, examples, jar="SPICE-1.0/spice-1.0.jar", documents="references.jsonl")
    """
    graphs = _scores("spider", texts, examples, jar, java, memory, seconds)
    words = cider(texts, examples, documents=documents, tokens=tokens)
    return [spice_coeff * one + cider_coeff * other for one, other in zip(graphs, words, strict=True)]


def _spider_corpus(
    texts: list[str], examples: list[Example], *, spice_coeff: float = 0.5, cider_coeff: float = 0.5, **arguments: Any
) -> float:
    of_cider = {name: arguments.pop(name) for name in ("documents", "tokens") if name in arguments}
    graphs = _scores("spider", texts, examples, **arguments)
    words = cider.corpus(texts, examples, **of_cider)  # type: ignore[attr-defined]
    return spice_coeff * math.fsum(graphs) / len(graphs) + cider_coeff * float(words)


def _check(name: str, *parts: Any) -> Any:
    """A function for the attribute `check` of a reward, which also checks its other `parts`."""

    def check(examples: Sequence[Example], **arguments: Any) -> None:
        _found(name, arguments["jar"], arguments.get("java", "java"))
        references_of(name, examples)
        for part in parts:
            part.check(examples, **arguments)

    return check


spice.check = _check("spice")  # type: ignore[attr-defined]
spice.limits_itself = True  # type: ignore[attr-defined]  # `seconds` bounds each call
spider.check = _check("spider", cider)  # type: ignore[attr-defined]
spider.limits_itself = True  # type: ignore[attr-defined]
spider.corpus = _spider_corpus  # type: ignore[attr-defined]


def _found(name: str, jar: str, java: str) -> tuple[Path, str]:
    """The paths of the jar and of Java. Raises LmgymError if one of them, or CoreNLP, is missing."""
    path, program = Path(jar).expanduser(), shutil.which(java)
    if not path.is_file():
        raise LmgymError(
            f"key 'rewards.{name}.jar': there is no file {path}; SPICE needs spice-1.0.jar, its folder lib beside it"
        )
    library = path.parent / "lib"
    for needed in CORENLP:
        if not (library / needed).is_file():
            raise LmgymError(
                f"reward '{name}': {library} holds no {needed}; SPICE needs it from Stanford CoreNLP 3.6.0"
            )
    if program is None:
        raise LmgymError(
            f"reward '{name}' needs Java, and there is no program {java!r}; install a Java runtime, or name one with "
            f"rewards.{name}.java"
        )
    return path.absolute(), program


def _scores(
    name: str,
    texts: Sequence[str],
    examples: Sequence[Example],
    jar: str,
    java: str = "java",
    memory: str = "8G",
    seconds: float = 1800.0,
) -> list[float]:
    """Run SPICE on all texts at once, through files in a temporary folder."""
    references = references_of(name, examples)
    path, program = _found(name, jar, java)
    rows = [
        {"image_id": str(index), "test": text, "refs": list(wanted)}
        for index, (text, wanted) in enumerate(zip(texts, references, strict=True))
    ]
    if not rows:
        return []
    with tempfile.TemporaryDirectory(prefix="lmgym-spice-") as folder:
        source, target = Path(folder, "input.json"), Path(folder, "output.json")
        source.write_text(json.dumps(rows), encoding="utf-8")
        command = [program, f"-Xmx{memory}", "-jar", str(path), str(source), "-out", str(target), "-silent"]
        try:
            status, errors = _run(command, path.parent, Path(folder, "errors.txt"), seconds)
        except subprocess.TimeoutExpired as error:
            late = f"SPICE took longer than {seconds:g} s for {len(rows)} texts; raise rewards.{name}.seconds"
            raise LmgymError(f"reward '{name}': {late}") from error
        if status or not target.is_file():
            reason = next((line.strip() for line in errors.splitlines() if line.strip()), "it wrote nothing")
            raise LmgymError(f"reward '{name}': {path.name} ended with status {status} ({reason[:200]})")
        return read_scores(target.read_text(encoding="utf-8"), len(rows), name)


def _run(command: Sequence[str], folder: Path, errors: Path, seconds: float) -> tuple[int, str]:
    """Run a program. Returns its status and what it has written to standard error. Raises TimeoutExpired after so many
    seconds, when it and all that it has started are killed."""
    with errors.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file,
            start_new_session=True,
        )  # fmt: skip
    try:
        status = process.wait(seconds)
    finally:
        with suppress(ProcessLookupError, PermissionError):  # nothing is left of the group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status, errors.read_text(encoding="utf-8", errors="replace")


def read_scores(text: str, count: int, name: str = "spice") -> list[float]:
    """The F-score of each text in SPICE's output, in the order of the texts. Raises LmgymError if one is missing.

    Example: read_scores('[{"image_id": "0", "scores": {"All": {"pr": 1.0, "re": 0.5, "f": 0.667}}}]', 1) -> [0.667]"""
    try:
        found = {str(row["image_id"]): row["scores"]["All"]["f"] for row in json.loads(text)}
        values = [float(found[str(index)]) for index in range(count)]
    except (ValueError, KeyError, TypeError) as error:
        raise LmgymError(f"reward '{name}': what SPICE wrote is no list of {count} scores ({error!r})") from error
    return [0.0 if math.isnan(value) else value for value in values]  # SPICE writes NaN for a text without objects
