"""Every causal and encoder-decoder class of transformers against its own forward pass: docs/model_families.md.

python -m benchmarks.model_families                              all, some minutes; the table goes to that page
python -m benchmarks.model_families --only minimax roberta       these, on standard output

A small random model of each class (small_configs.py) is saved, loaded as a recipe would load it, and proves itself
(lmgym/inference/proof.py), in fp32 and with bf16 forward passes. A class that fails anywhere on this way is listed with
the sentence that it fails with; anything but a sentence is a mistake of lmgym's, and the command ends with status 1.
A causal class says which path it takes and why, and how long a step takes on both (path_speed.py).
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from benchmarks.path_speed import milliseconds
from benchmarks.small_configs import small_model
from lmgym.config.schema import Config, Stage
from lmgym.core.errors import LmgymError
from lmgym.inference.proof import Proof, prove
from lmgym.inference.sampler import Sampler
from lmgym.models.builtin import byte_tokenizer
from lmgym.models.load import load_policy
from lmgym.models.model_info import read_model_info
from lmgym.models.policy_section import PolicySection
from lmgym.models.shapes import shapes_of
from lmgym.training.planning.preflight import check_model

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
ENCODER_DECODER = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
PAGE = Path(__file__).parents[1] / "docs" / "model_families.md"
BEGIN, END = "<!-- families: written by python -m benchmarks.model_families -->\n", "<!-- families: end -->\n"
START = 2  # the first token of an encoder-decoder's answers
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Family:
    """What came of one class: in each precision a proof, or the sentence that it was refused with."""

    kind: str  # "causal" or "encoder-decoder"
    name: str  # the model_type
    path: str = ""  # "fast" or "plain"
    results: tuple[Proof | str, ...] = ()  # by PRECISIONS
    crashed: bool = False  # a sentence is of an exception that lmgym did not foresee
    missing: str = ""  # why transformers makes no model of its own defaults
    why: str = ""  # it takes the plain path
    steps: tuple[float, float] | None = None  # milliseconds of a step: fast, plain


def families(only: Sequence[str] = ()) -> Iterator[Family]:
    """Try all classes, or those with one of these model_types, in alphabetical order."""
    for kind, names in (("causal", CAUSAL), ("encoder-decoder", ENCODER_DECODER)):
        for name in sorted(names):
            if not only or name in only:
                yield tried(kind, name, timed=True)


def tried(kind: str, name: str, timed: bool = False) -> Family:
    """A small model of this class, from its folder to its proof in each precision; if `timed`, its speed too."""
    try:
        model = small_model(kind, name)
    except Exception as error:  # of transformers; lmgym has had no part in it yet
        return Family(kind, name, missing=one_line(error))
    results: list[Proof | str] = []
    path, why, crashed = "", "", False
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        for compute in PRECISIONS:
            if results and isinstance(results[0], str):  # the second precision would say no more
                results.append("")
                continue
            try:
                path, why, proof = proven(folder, compute, bool(getattr(model.config, "is_encoder_decoder", False)))
                results.append(proof if proof.holds else proof.sentence)
            except LmgymError as error:
                results.append(str(error).replace(folder, "FOLDER"))
            except Exception as error:
                crashed = True
                results.append(one_line(error))
    steps = steps_of(name) if timed and (kind, path) == ("causal", "fast") else None
    return Family(kind, name, path, tuple(results), crashed, why=why, steps=steps)


def steps_of(name: str) -> tuple[float, float] | None:
    """The milliseconds of a causal class's step on both paths; None where no wider model can be made or run."""
    try:
        return milliseconds(small_model("causal", name, wide=True))
    except Exception:  # of a configuration whose sizes do not fit each other any more
        return None


def proven(folder: str, compute: Any, encoder_decoder: bool) -> tuple[str, str, Proof]:
    """The path, why it is the plain one, and the proof of a model's folder. Raises LmgymError if it is refused."""
    section = PolicySection(
        model=folder, device="cpu", compute=compute, context_start_token=START if encoder_decoder else None
    )
    config = Config(policy=section, stages=[Stage(task={"name": "arithmetic"}, rewards={"length": 1.0})])
    check_model(config, [[]], read_model_info(section))
    shapes_of(section)  # what `lmgym check` estimates memory from
    policy = load_policy(section)
    return "fast" if policy.fast else "plain", policy.plain_because, prove(policy, Sampler(policy))


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def row(family: Family) -> str:
    """A line of the table."""
    if family.missing:
        return f"| {family.name} | {family.kind} | - | - | | transformers: {family.missing.replace('|', '/')} |"
    sentences = [said for said in family.results if isinstance(said, str)]
    why = [f"plain, because {family.why}"] if family.why and family.kind == "causal" else []
    sentence = " ".join([*why, *sentences]).strip().replace("|", "/")
    cells = [f"{gap(result):.0e}" if isinstance(result, Proof) else "refused" for result in family.results]
    kind = f"{family.kind}{family.path and ', '}{family.path}"
    return f"| {family.name} | {kind} | {' | '.join(cells)} | {speed(family)} | {sentence} |"


def speed(family: Family) -> str:
    """Milliseconds of a step: on the fast path, on the plain one, and their ratio."""
    if family.steps is None:
        return ""
    fast, plain = family.steps
    return f"{fast:.0f} / {plain:.0f} ({plain / fast:.1f}x)"


def gap(proof: Proof) -> float:
    """The larger of a proof's two mean gaps."""
    return max(proof.sampled.mean, proof.scored.mean)


def table(found: Sequence[Family]) -> str:
    """Markdown: how many there are of each kind, then a line for each family."""
    proven = [family for family in found if family.results and isinstance(family.results[0], Proof)]
    missing = sum(bool(family.missing) for family in found)
    causal = [family for family in proven if family.kind == "causal"]
    fast = sum(family.path == "fast" for family in causal)
    ratios = [plain / quick for quick, plain in (family.steps for family in causal if family.steps)]
    worst = {}
    for place, precision in enumerate(PRECISIONS):
        proofs = [family.results[place] for family in proven]
        shares = [gap(proof) / proof.bound.mean for proof in proofs if isinstance(proof, Proof)]
        worst[precision] = f"{max(shares, default=0.0):.2f}"
    return "\n".join(
        [
            f"transformers {transformers.__version__}: of {len(found)} classes {len(proven)} agree with their own "
            f"forward pass in fp32, {len(found) - len(proven) - missing} are refused, and of {missing} transformers "
            f"makes no model from its own defaults. {fast} of {len(causal)} causal classes take the fast path, where a "
            f"step takes {1 / statistics.median(ratios or [1.0]):.2f} of the plain path's time (median of "
            f"{len(ratios)}). The largest gap is {worst['float32']} of its bound in fp32, and {worst['bfloat16']} in "
            "bf16.",
            "",
            "| model_type | kind, path | gap in fp32 | gap in bf16 | ms: fast / plain | why plain, or refused |",
            "|---|---|---|---|---|---|",
            *map(row, found),
            "",
        ]
    )


def write(text: str) -> None:
    """Put the table into its place in docs/model_families.md."""
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.split(END)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="these model_types")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = []
    for family in families(arguments.only):
        found.append(family)
        print(row(family), file=sys.stderr, flush=True)
    if arguments.only:
        print(table(found))
    else:
        write(table(found))
    sys.exit(any(family.crashed for family in found))


if __name__ == "__main__":
    main()
