"""Export of trained models: without lmgym's own files, adapters merged or in peft's format; and upload to the Hub."""

import json
import re
import shutil
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from safetensors import SafetensorError, safe_open

from lmgym.core.errors import LmgymError, describe
from lmgym.core.model_folder import damage_of
from lmgym.models import lora
from lmgym.models.builtin import is_builtin
from lmgym.models.gguf import means_gguf
from lmgym.models.load import load_policy
from lmgym.models.model_info import read_model_info
from lmgym.models.policy import VALUE_HEAD
from lmgym.models.policy_section import PolicySection

# Files of a checkpoint that do not belong to the model: the optimizer's moments, the run's state (its recipe with local
# paths, and answers), the value function.
NOT_EXPORTED = (
    "optimizer.safetensors", "algorithm.json", "ahead.json", "champions.json", "state.json", "fingerprint.json",
    "manifest.json", VALUE_HEAD, "critic",
)  # fmt: skip


def is_adapter(source: Path) -> bool:
    """True if a model folder holds adapters, not a whole model."""
    return (source / lora.CONFIG).is_file()


def check_source(source: Path, run: Path) -> None:
    """Raise LmgymError for a model folder of a run that is damaged, or reached by a link out of the run, or that holds
    a link: in a run of someone else's a link may lead to any file of the user's.

    Example: check_source(Path("runs/a/final"), Path("runs/a"))"""
    then = "so that it is known what is exported"
    if not source.resolve().is_relative_to(run.resolve()):
        raise LmgymError(f"{source} leads out of {run} by a link; put the folder itself there, {then}")
    for path in source.rglob("*"):
        if path.is_symlink():
            raise LmgymError(f"{path} is a link; put the file itself there, {then}")
    problem = damage_of(source)
    for path in () if problem else sorted(source.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            problem = f"{path.name} is no file of safetensors ({describe(error)})"
    if problem:
        raise LmgymError(f"{source} is damaged: {problem}; export another one")


def copy_model(source: Path, folder: Path, section: PolicySection) -> None:
    """Copy the model or adapters of `source`, with the tokenizer; adapters get the name of their base, for peft."""
    for path in source.iterdir():
        if path.name not in NOT_EXPORTED and path.is_file():
            shutil.copyfile(path, folder / path.name)
    if is_adapter(folder):
        config = json.loads((folder / lora.CONFIG).read_text(encoding="utf-8"))
        kind = "SEQ_2_SEQ_LM" if read_model_info(section).encoder_decoder else "CAUSAL_LM"
        config |= {"base_model_name_or_path": section.model, "revision": section.revision, "task_type": kind}
        (folder / lora.CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


def merge_model(source: Path, folder: Path, section: PolicySection, seed: int) -> None:
    """Write the base with the adapters of `source` merged into its weights, in fp32, with tokenizer and processor:
    transformers alone can read it. A quantized base is dequantized first, as the adapters were trained with these
    weights."""
    policy = load_policy(section, seed, source)
    lora.merged(policy.model).save_pretrained(folder)
    policy.save_words(folder)


def check_mergeable(source: Path, section: PolicySection, merge: bool, push: bool) -> None:
    """Raise LmgymError if there is nothing to merge, or if adapters alone would be useless without their base."""
    if merge and not is_adapter(source):
        raise LmgymError(f"{source} holds a whole model and no adapters, so there is nothing to merge; remove --merge")
    if merge or not is_adapter(source):
        return
    if means_gguf(section.model):
        raise LmgymError(f"the adapters in {source} are for a GGUF file, which peft cannot read; add --merge")
    builtin = is_builtin(section.model)
    if builtin or (push and Path(section.model).exists()):
        base = f"{section.model}, {'which no other program has' if builtin else 'a folder that nobody else has'}"
        raise LmgymError(f"the adapters in {source} need the base {base}; add --merge")


def check_hub(repository: str) -> None:
    """Raise LmgymError unless `repository` ("owner/name") does not exist yet and there is a token to create it.
    huggingface_hub finds the token itself, as its documentation says."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise LmgymError(f"--push: '{repository}' is no name on the Hub; write OWNER/NAME, such as me/my-model")
    try:
        HfApi().whoami()
        exists = HfApi().repo_exists(repository)
    except Exception as error:  # the Hub client and its network library have no common exception
        raise _refused(repository, error) from error
    if exists:
        raise LmgymError(
            f"--push: {repository} is on the Hub already, and is left as it is; choose another name, or delete it there"
        )


def push(folder: Path, repository: str, message: str) -> str:
    """Upload a folder to the Hub as a new private repository; returns its address. LmgymError if the Hub refuses."""
    try:
        HfApi().create_repo(repository, private=True)
        return str(HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message=message).repo_url)
    except Exception as error:  # see check_hub
        raise _refused(repository, error) from error


def _refused(repository: str, error: Exception) -> LmgymError:
    reason = " ".join(str(error).split())[:300]
    if isinstance(error, LocalTokenNotFoundError):
        return LmgymError(
            f"--push: there is no token of the Hub here, so {repository} cannot be made; run `hf auth login` first"
        )
    what = "refused" if isinstance(error, HfHubHTTPError) else "cannot be reached for"
    return LmgymError(f"--push: the Hub {what} {repository} ({reason})")
