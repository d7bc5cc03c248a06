"""Every causal and encoder-decoder class of transformers against its own forward pass: the table of docs/models.md.

python -m benchmarks.model_families                              all, about a minute; the table goes to docs/models.md
python -m benchmarks.model_families --only minimax roberta       these, on standard output

A small random model of each class (small_configs.py) is saved, loaded as a recipe would load it, and proves itself
(lmgym/inference/proof.py), in fp32 and with bf16 forward passes. A class that fails anywhere on this way is listed with
the sentence that it fails with; anything but a sentence is a mistake of lmgym's, and the command ends with status 1.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.auto import modeling_auto

from benchmarks.small_configs import small_config
from lmgym.config.schema import Config, Stage
from lmgym.core.errors import LmgymError
from lmgym.inference.proof import Proof, prove
from lmgym.inference.sampler import Sampler
from lmgym.models.builtin import byte_tokenizer
from lmgym.models.load import PolicySection, load_policy
from lmgym.models.shapes import shapes_of
from lmgym.training.preflight import check_model

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
ENCODER_DECODER = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
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


def families(only: Sequence[str] = ()) -> Iterator[Family]:
    """Try all classes, or those with one of these model_types, in alphabetical order."""
    for kind, names in (("causal", CAUSAL), ("encoder-decoder", ENCODER_DECODER)):
        for name in sorted(names):
            if not only or name in only:
                yield tried(kind, name)


def tried(kind: str, name: str) -> Family:
    """A small model of this class, from its folder to its proof in each precision."""
    try:
        model = small_model(kind, name)
    except Exception as error:  # of transformers; lmgym has had no part in it yet
        return Family(kind, name, missing=one_line(error))
    results: list[Proof | str] = []
    path, crashed = "", False
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        for compute in PRECISIONS:
            if results and isinstance(results[0], str):  # the second precision would say no more
                results.append("")
                continue
            try:
                path, proof = proven(folder, compute, bool(getattr(model.config, "is_encoder_decoder", False)))
                results.append(proof if proof.holds else proof.sentence)
            except LmgymError as error:
                results.append(str(error).replace(folder, "FOLDER"))
            except Exception as error:
                crashed = True
                results.append(one_line(error))
    return Family(kind, name, path, tuple(results), crashed)


def small_model(kind: str, name: str) -> PreTrainedModel:
    """A random model whose attention and next-token distributions are far from uniform, so that a mistake shows."""
    auto: Any = AutoModelForCausalLM if kind == "causal" else AutoModelForSeq2SeqLM
    model = auto.from_config(small_config(name))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            centre = 1.0 if parameter.dim() < 2 and bool((parameter == 1).all()) else 0.0  # norms
            parameter.data = centre + 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()  # type: ignore[no-any-return]


def proven(folder: str, compute: Any, encoder_decoder: bool) -> tuple[str, Proof]:
    """The path and the proof of a model's folder. Raises LmgymError if it is refused."""
    section = PolicySection(
        model=folder, device="cpu", compute=compute, context_start_token=START if encoder_decoder else None
    )
    check_model(Config(policy=section, stages=[Stage(task={"name": "arithmetic"}, rewards={"length": 1.0})]), [[]])
    shapes = shapes_of(section)  # what `lmgym check` estimates memory from
    policy = load_policy(section)
    return "fast" if shapes.fast else "plain", prove(policy, Sampler(policy))


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def row(family: Family) -> str:
    """A line of the table."""
    if family.missing:
        return f"| {family.name} | {family.kind} | - | - | transformers: {family.missing.replace('|', '/')} |"
    sentence = " ".join(said for said in family.results if isinstance(said, str)).strip().replace("|", "/")
    cells = [f"{gap(result):.0e}" if isinstance(result, Proof) else "refused" for result in family.results]
    return f"| {family.name} | {family.kind}{family.path and ', '}{family.path} | {' | '.join(cells)} | {sentence} |"


def gap(proof: Proof) -> float:
    """The larger of a proof's two mean gaps."""
    return max(proof.sampled.mean, proof.scored.mean)


def table(found: Sequence[Family]) -> str:
    """Markdown: how many there are of each kind, then a line for each family."""
    proven = [family for family in found if family.results and isinstance(family.results[0], Proof)]
    missing = sum(bool(family.missing) for family in found)
    worst = {}
    for place, precision in enumerate(PRECISIONS):
        proofs = [family.results[place] for family in proven]
        shares = [gap(proof) / proof.bound.mean for proof in proofs if isinstance(proof, Proof)]
        worst[precision] = f"{max(shares, default=0.0):.2f}"
    return "\n".join(
        [
            f"transformers {transformers.__version__}: of {len(found)} classes {len(proven)} agree with their own "
            f"forward pass in fp32, {len(found) - len(proven) - missing} are refused, and of {missing} transformers "
            f"makes no model from its own defaults. The largest gap is {worst['float32']} of its bound in fp32, and "
            f"{worst['bfloat16']} in bf16.",
            "",
            "| model_type | kind, path | gap in fp32 | gap in bf16 | refused with |",
            "|---|---|---|---|---|",
            *map(row, found),
            "",
        ]
    )


def write(text: str) -> None:
    """Put the table into its place in docs/models.md."""
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
