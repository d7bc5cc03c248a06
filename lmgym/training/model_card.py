"""`lmgym export RUN_OR_CHECKPOINT --to FOLDER`: a trained model with its tokenizer and a model card, for others.

The card is written from the run folder: the resolved recipe, and the evaluations of exactly these weights, with their
intervals. It claims nothing that the run has not measured."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmgym.config.build import load_config, resolved
from lmgym.config.schema import Config
from lmgym.config.yaml import write_yaml
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.files import read_json
from lmgym.core.redacted import redacted
from lmgym.logs.records import read_records
from lmgym.models import export as files
from lmgym.models.bf16_files import round_files
from lmgym.models.builtin import is_builtin
from lmgym.models.gguf import means_gguf
from lmgym.models.load import load_policy
from lmgym.models.reward_model import facts_of_base, save_reward_model
from lmgym.training.checkpoints import checkpoint
from lmgym.training.machine import Machine, choose_machine
from lmgym.training.setup import newest_model

HOMES = ("~/", "/home/", "/Users/", "/root/")  # what is below them names a person


def export(
    what: Path,
    to: Path,
    overrides: Sequence[str] = (),
    merge: bool = False,
    push: str | None = None,
    bf16: bool = False,
) -> str:
    """Write the model of a run folder (its newest), or of one of its checkpoints/, best/ or final/, to a new folder;
    with `push` ("owner/name"), to the Hub as well. Returns a sentence that says where it is.

    Adapters are written in peft's format, or with `merge` added to the weights of their base; with `bf16` the weights
    are rounded (models/bf16_files.py). Raises LmgymError before anything is written: for a damaged model, a link in the
    run, a folder that is not empty, a repository that exists, no token. The run's recipe is built, with its plug-ins.

    Example: export(Path("runs/quickstart"), Path("model"))"""
    run, source = _find(what)
    files.check_source(source, run)
    config = load_config(run / "recipe.yaml", list(overrides))
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise LmgymError(f"--to: {to} exists and is not empty; name a new folder")
    required = config.stages[-1].algorithm.requirements
    judges = _is_reward_model(source, config)
    if bf16 and not merge and files.is_adapter(source):
        raise LmgymError(f"--bf16: {source} holds adapters, which stay in fp32; add --merge for a whole model in bf16")
    if not judges:
        files.check_mergeable(source, config.policy, merge, push is not None)
    if push is not None:
        files.check_hub(push)
    machine = choose_machine(config, run)
    section = machine.policy_section(config.policy)
    sentence = f"model: {to}"

    def write(folder: Path) -> None:
        if judges and (source / "state.json").is_file():
            policy = load_policy(section, config.seed, source)
            save_reward_model(folder, policy, facts_of_base(config.policy, required.separator), required.makes)
        elif merge and not judges:
            files.merge_model(source, folder, section, config.seed)
        else:
            files.copy_model(source, folder, section)
        if bf16:
            nonlocal sentence
            sentence += f", {round_files(folder, section, config.seed)}"
        card = model_card(config, run, source, machine, adapter=files.is_adapter(folder))
        (folder / "README.md").write_text(card, encoding="utf-8")

    checkpoint.write_folder(to.resolve(), write)  # where a link leads: it stays a link
    if push is None:
        return sentence
    return f"{sentence}, and (private) {files.push(to, push, f'lmgym export of {source.name}')}"


def model_card(config: Config, run: Path, source: Path, machine: Machine, adapter: bool) -> str:
    """The README.md of a model: its base model, how it was trained, its evaluations."""
    base = config.policy.model
    local = Path(base).exists() or means_gguf(base)
    named = "made from scratch" if is_builtin(base) else Path(base).name if local else base
    hub = not is_builtin(base) and not local
    header: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "tags": ["lmgym"]}
    if hub:
        header |= {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    try:
        stage_name, step = _stage_and_step(run, source, config)
        results = [*_results(config, run, stage_name, step)]
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise LmgymError(
            f"{run}: metrics.jsonl or summary.json holds something else than a run writes ({type(error).__name__}: "
            f"{error}); put them back"
        ) from error
    lines = [f"---\n{write_yaml(header)}---\n", f"# {Path(config.out or run).name}\n"]
    lines += [
        f"{'Adapters (LoRA) beside' if adapter else 'Trained from'} {named} by "
        f"reinforcement learning with lmgym, after {step} steps of stage '{stage_name}'.\n"
    ]
    lines += ["## Training\n", *_stages(config), ""]
    lines += ["## Results\n", *results, ""]
    lines += ["## Recipe\n", f"```yaml\n{write_yaml(_public(redacted(resolved(config))))}```\n"]
    known = {"python": machine.python, "torch": machine.torch, "transformers": machine.transformers}
    versions = ", ".join(f"{name} {version}" for name, version in known.items() if version)
    lines += [f"Trained with {versions}. Nothing beyond the table above was measured.\n"]
    return "\n".join(lines)


def _is_reward_model(source: Path, config: Config) -> bool:
    """Whether these weights are those of a stage that makes a reward model."""
    if config.stages[-1].algorithm.requirements.makes_policy:
        return False
    if not (source / "state.json").is_file():  # final/ or best/, whose form says it
        config_file = source / "config.json"
        return config_file.is_file() and "lmgym" in read_json(config_file)
    return bool(checkpoint.read_state(source)["stage"] == len(config.stages) - 1)


def _find(what: Path) -> tuple[Path, Path]:
    """The run folder and the model folder that the user means."""
    if (what / "recipe.yaml").is_file():
        return what, newest_model(what)
    model = any((what / name).is_file() for name in ("config.json", "adapter_config.json"))
    run = next((at for at in what.absolute().parents[:2] if (at / "recipe.yaml").is_file()), None)
    if run is None or not model:
        raise LmgymError(
            f"{what} is neither a run folder nor a model in one; name a run, or one of its checkpoints/..., best or "
            "final"
        )
    if (what / "manifest.json").is_file() and (problem := checkpoint.damage(what)):
        raise LmgymError(f"checkpoint {what} is damaged ({problem}); export another one")
    return run, what


def _stage_and_step(run: Path, source: Path, config: Config) -> tuple[str, int]:
    """Name of the stage in which these weights were written, and its steps until then."""
    if (source / "state.json").is_file():
        state = checkpoint.read_state(source)
        return config.stages[state["stage"]].name, state["step"]
    summary = run / "summary.json"
    progress = read_json(summary) if summary.is_file() else {}
    if source.name == "best":
        latest, _ = checkpoint.newest(run / "checkpoints")
        progress = checkpoint.read_state(latest)["progress"] if latest else progress
    found = progress["best" if source.name == "best" else "newest"]
    return found["stage"], found["step"]


def _stages(config: Config) -> Iterator[str]:
    for stage in config.stages:
        name = registry.name_of("algorithm", type(stage.algorithm))
        rewards = ", ".join(f"{reward}" for reward in stage.rewards) or "none"
        yield (
            f"- {stage.name}: {name} on task {stage.task['name']}, {stage.steps} steps of {stage.prompts_per_step} "
            f"prompts with {stage.algorithm.group_size} answers; rewards: {rewards}"
        )


def _results(config: Config, run: Path, stage: str, step: int) -> Iterator[str]:
    """The evaluations of exactly these weights, beside those before the stage on the same split."""
    metrics = run / "metrics.jsonl"
    records = list(read_records(metrics)) if metrics.is_file() else []
    records = [record for record in records if record["kind"] == "evaluation" and record["stage_name"] == stage]
    own = {record["split"]: record for record in records if record["step"] == step}
    first = {record["split"]: record for record in records if record["step"] == 0}
    if not own:
        yield "These weights were not evaluated."
        return
    section = config.evaluation
    for split, record in own.items():
        yield (
            f"{record['count']} prompts of split '{split}', {section.samples} answer(s) each at temperature "
            f"{section.temperature:g}; in brackets 95% intervals.\n"
        )
        yield "| metric | before this stage | now |"
        yield "|---|---|---|"
        for name in (key.removesuffix("/low") for key in record if key.endswith("/low")):
            before = _interval(first[split], name) if step > 0 and split in first else "-"
            yield f"| {name} | {before} | {_interval(record, name)} |"


def _interval(record: Mapping[str, Any], name: str) -> str:
    if record.get(name) is None:
        return "-"
    low, high = record.get(f"{name}/low"), record.get(f"{name}/high")
    bounds = "no interval" if low is None or high is None else f"{low:.3g} to {high:.3g}"
    return f"{record[name]:.3g} [{bounds}]"


def _public(tree: Any) -> Any:
    """A recipe without the folders of this machine: of a path from the root or the home folder only the last name."""
    if isinstance(tree, dict):
        return {key: _public(value) for key, value in tree.items() if key != "out"}
    if isinstance(tree, list):
        return [_public(value) for value in tree]
    return Path(tree).name if isinstance(tree, str) and _is_path(tree) else tree


def _is_path(text: str) -> bool:
    """Whether a text of a recipe is a path from the root or the home folder, and not `/no_think Is 3/4 more?`: it is
    there, it is below a home folder, or it has two names or more and no white space."""
    if not text.startswith(("/", "~/")) or not text.strip("/~"):
        return False
    names, spaces = len(Path(text).parts) - 1, any(map(str.isspace, text))
    return text.startswith(HOMES) or os.path.exists(text) or (names > 1 and not spaces)
