"""What makes a loaded model useless, found before it computes anything: weights that its files lack or that are none,
tokens that it lacks."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lmgym.core.errors import LmgymError
from lmgym.core.model_folder import COMPUTED


def check_complete(source: str, found: Mapping[str, Any], new: Sequence[str], unused: Sequence[str]) -> None:
    """Raise LmgymError, with number and names, if the files of a model and the model that its configuration describes
    have not the same tensors, except for those of the lists `new` and `unused` (`policy.new_weights` and
    `policy.unused_weights`). `found` is what `from_pretrained` says of its loading."""
    lacking = _others(found.get("missing_keys", ()), new)
    reshaped = _others((key[0] for key in found.get("mismatched_keys", ())), new)
    beyond = [name for name in _others(found.get("unexpected_keys", ()), unused) if not COMPUTED.search(name)]
    complaints = [f"lack {_some(lacking)}"] * bool(lacking)
    complaints += [f"hold {_some(reshaped)} in another shape"] * bool(reshaped)
    complaints += [f"hold {_some(beyond)} that the model lacks"] * bool(beyond)
    if complaints:
        ways = ["in policy.new_weights what is to begin as random numbers"] * bool(lacking or reshaped)
        ways += ["in policy.unused_weights what is to be left out"] * bool(beyond)
        raise LmgymError(
            f"policy.model: the files of {source} {', and '.join(complaints)}, so they are not of the model that its "
            f"config.json describes; take the right one, or name {' and '.join(ways)}"
        )
    drawn = {*found.get("missing_keys", ()), *(key[0] for key in found.get("mismatched_keys", ()))}
    for name in new:
        if not any(tensor.startswith(name) for tensor in drawn):
            raise LmgymError(
                f"policy.new_weights: no tensor whose name begins with '{name}' is missing from the files of {source}; "
                "remove it"
            )


def _others(names: Iterable[str], listed: Sequence[str]) -> list[str]:
    """The names that begin with none of those that are listed."""
    return sorted(name for name in names if not name.startswith(tuple(listed)))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names):,} tensor{'s' * (len(names) > 1)} ({', '.join(names[:3])}{more})"


def check_finite(model: Any, source: str) -> None:
    """Raise LmgymError, naming the tensor and its file, if a weight is NaN or infinite: so would be every answer and
    gradient. `source` is the folder or Hub id that the weights came from."""
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or not weight.numel():
            continue
        ends = torch.stack(torch.aminmax(weight.detach()))  # NaN if any is; a tenth of the time of isfinite().all()
        if bool(ends.isfinite().all()):
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
