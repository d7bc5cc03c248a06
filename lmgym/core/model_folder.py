"""Why a model cannot be loaded or copied: which file of its folder is damaged, and how; code of its own; the Hub."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.files import LONGEST_TEXT, open_regular, read_json
from lmgym.core.hub import unreachable

CONFIG, ADAPTER, INDEX = "config.json", "adapter_config.json", "model.safetensors.index.json"
POINTER = b"version https://git-lfs"  # the beginning of what Git LFS writes in place of a large file
LONGEST_HEADER = 100_000_000  # bytes, as safetensors allows
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
OTHER_WEIGHTS = {  # and the program that they are for
    "*.onnx": "ONNX",
    "*.h5": "TensorFlow",
    "*.msgpack": "Flax",
    "*.pth": "the model's own code",
}
# Tensors that older files hold and that models compute themselves: masks of attention, positions, frequencies.
COMPUTED = re.compile(r"(attn|attention)\.(masked_)?bias$|\b(inv_freq|position_ids|causal_mask|(en|de)coder\.version)$")
WORDS = ("tokenizer*", "vocab*", "*.model", "*.spm", "merges.txt", "tekken.json")


def check_no_adapters(key: str, name: str) -> None:
    """Raise LmgymError if a folder holds LoRA adapters, for which transformers would fetch the base that they name."""
    if (Path(name) / ADAPTER).is_file():
        raise LmgymError(
            f"{key}: {name} holds LoRA adapters ({ADAPTER}) and not the model that they are for; merge them first "
            "(a run's with `lmgym export RUN --to FOLDER --merge`), and name that folder"
        )


def check_regular(key: str, name: str) -> None:
    """Raise LmgymError if something in a folder is a pipe or a device, on which transformers would wait for ever."""
    for file in sorted(Path(name).iterdir()) if Path(name).is_dir() else ():
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise LmgymError(f"{key}: {file} is a pipe or a device, not a file; put the file itself there")


def damage_of(folder: Path) -> str:
    """What is wrong with the files of a model or of adapters, tokenizer included, by their form and their sizes; empty
    if nothing is.

    Example: damage_of(Path("runs/a/final")) -> "model.safetensors is cut off (it has 100 of 18,144 bytes)" """
    problems = (*_damage(folder), *_without_tokenizer(folder))
    others = (_object(file)[1] for file in sorted(folder.glob("*.json")))
    return next(filter(None, (*problems, *others)), "")


def cannot_load(key: str, name: str, error: Exception, tokenizer: bool = False) -> LmgymError:
    """The error to raise where transformers has not loaded the model, or the `tokenizer`, of this name."""
    said, folder = " ".join(str(error).split())[:300], Path(name)
    if "trust_remote_code" in str(error):  # as transformers says that it would have to be True
        file = "tokenizer_config.json" if tokenizer else CONFIG
        why = (
            f"it asks to run Python code of its own (auto_map in {file}), and lmgym runs no code that comes with a "
            "model; take one whose architecture transformers has, or register its class with transformers in a plug-in"
        )
    elif folder.is_dir():
        why = next((_without_tokenizer if tokenizer else _damage)(folder), said)
    else:
        why = f"not a model folder here, and {unreachable() or f'the Hub did not give it ({said})'}"
    return LmgymError(f"{key}: could not load '{name}': {why}")


def _damage(folder: Path) -> Iterator[str]:
    """What is wrong with the configuration and the weights of a folder."""
    yield from _pointers(folder)
    adapters = (folder / ADAPTER).is_file()
    if not adapters and not (folder / CONFIG).is_file():
        yield f"it has no {CONFIG}, so it is no model folder of transformers"
        return
    config, why = _object(folder / (ADAPTER if adapters else CONFIG))
    if why:
        yield why
    elif not adapters and not config.get("model_type"):
        yield f"its {CONFIG} names no model_type"
    yield from _lost_shards(folder)
    for file in sorted(folder.glob("*.safetensors")):
        if why := _cut(file):
            yield f"{why}; take an undamaged copy"
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        other = next(((f.name, reader) for one, reader in OTHER_WEIGHTS.items() for f in folder.glob(one)), None)
        what = "" if other is None else f"; {other[0]} is for {other[1]}, and cannot be trained from"
        yield f"it has no weights (model.safetensors, or parts of it with {INDEX}){what}"


def _without_tokenizer(folder: Path) -> Iterator[str]:
    """What is wrong with the tokenizer of a folder."""
    yield from _pointers(folder)
    if not any(any(folder.glob(pattern)) for pattern in WORDS):
        yield "it has no tokenizer (tokenizer.json, tokenizer.model or vocab.*); copy one into it, of the model's base"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file() and (why := _object(folder / name)[1]):
            yield why


def _pointers(folder: Path) -> Iterator[str]:
    for file in sorted(folder.iterdir()):
        if file.is_file() and _begins(file, len(POINTER)) == POINTER:
            yield f"{file.name} is a pointer of Git LFS in place of the file; run `git lfs pull` where it was cloned"


def _lost_shards(folder: Path) -> Iterator[str]:
    if not (folder / INDEX).is_file():
        return
    index, why = _object(folder / INDEX)
    if why:
        yield why
        return
    placed = index.get("weight_map")
    if not isinstance(placed, dict):
        yield f"its {INDEX} has no weight_map, which says where each tensor is"
        return
    files = sorted({str(name) for name in placed.values()})
    if lost := [name for name in files if not (folder / name).is_file()]:
        yield f"{', '.join(lost[:3])} {'is' if len(lost) == 1 else 'are'} missing, {len(lost)} of {len(files)} parts"


def _cut(file: Path) -> str:
    """What is wrong with a file of tensors, by its header and its size; empty if they agree."""
    size, length = file.stat().st_size, int.from_bytes(_begins(file, 8), "little")
    if (size < 8 + length and length <= LONGEST_HEADER) or size < 8:
        return f"{file.name} is cut off within its header (it has {size:,} bytes)"
    try:
        header = json.loads(_begins(file, 8 + min(length, LONGEST_HEADER))[8:])
        whole = 8 + length + max((one["data_offsets"][1] for key, one in header.items() if key != "__metadata__"))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return f"{file.name} does not begin as a file of safetensors does"
    return f"{file.name} is cut off (it has {size:,} of {whole:,} bytes)" if size < whole else ""


def _object(file: Path) -> tuple[dict[str, Any], str]:
    """What a JSON file holds, and what is wrong with it; empty if nothing is."""
    try:
        found = read_json(file, LONGEST_TEXT)
    except (OSError, ValueError) as error:
        return {}, f"{file.name} is no JSON ({error})"
    return (found, "") if isinstance(found, dict) else ({}, f"{file.name} holds no JSON object")


def _begins(file: Path, count: int) -> bytes:
    try:
        with open_regular(file) as opened:
            return opened.read(count)
    except OSError:
        return b""
