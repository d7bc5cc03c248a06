"""What makes a loaded model useless, found before it computes anything: numbers that are none, tokens that it lacks."""

from pathlib import Path
from typing import Any

from safetensors import safe_open

from lmgym.core.errors import LmgymError


def check_finite(model: Any, source: str) -> None:
    """Raise LmgymError, naming the tensor and its file, if a weight is NaN or infinite: so would be every answer and
    gradient. `source` is the folder or Hub id that the weights came from."""
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or bool(weight.isfinite().all()):
            continue
        wrong = weight.detach()[~weight.isfinite()]
        raise LmgymError(
            f"policy.model: the tensor '{name}'{_file_of(name, Path(source))} of {source} holds {float(wrong[0])} "
            f"({wrong.numel():,} of {weight.numel():,} numbers are not finite); take an undamaged copy of the model"
        )


def check_vocabulary(name: str, model: Any, tokenizer: Any) -> None:
    """Raise LmgymError, naming the ids, if the model lacks tokens of its tokenizer. Tokens that were added to a
    tokenizer may lie beyond the model's (Gemma 3 has one for images): they are refused where a text holds one."""
    size, end = int(model.get_output_embeddings().weight.shape[0]), tokenizer.eos_token_id
    if end >= size:
        raise LmgymError(
            f"policy.tokenizer: the end-of-sequence token {tokenizer.eos_token!r} is id {end}, and the model {name} "
            f"has 0 to {size - 1} only, so no answer could ever end; name a token that it has with policy.eos_token"
        )
    if len(tokenizer) <= size:
        return
    added = tokenizer.get_added_vocab()
    beyond = sorted((id, word) for word, id in tokenizer.get_vocab().items() if id >= size and word not in added)
    if beyond:
        (first, word), (last, _) = beyond[0], beyond[-1]
        raise LmgymError(
            f"policy.tokenizer: the tokenizer has ids up to {last}, and the model {name} has 0 to {size - 1} only; it "
            f"lacks {len(beyond):,} of them, such as {first} ({word!r}); name the tokenizer that it was trained with"
        )


def _file_of(name: str, folder: Path) -> str:
    """Which file of a model folder holds a tensor; empty if none has it under this name."""
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with safe_open(file, "pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                return f" in {file.name}"
    return ""
