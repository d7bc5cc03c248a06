"""The reference of the public names, from their docstrings (mkdocstrings reads the code and imports none of it)."""

from pathlib import Path

import griffe

from lmgym import _HOMES

PACKAGE = Path(__file__).parents[2] / "lmgym"
# page: title, what it is, modules (a package: all of its modules)
SECTIONS = {
    "data": ("Data", "What tasks, environments and algorithms exchange.", ["types", "batch"]),
    "algorithms": ("Algorithms", "One class each; its fields are the keys of `algorithm` in a recipe.", ["algorithms"]),
    "functional": ("Functions of tensors", "The mathematics of the algorithms.", ["functional"]),
    "rewards": ("Rewards", "A reward and a metric are the same function.", ["rewards"]),
    "tasks": ("Tasks", "Functions that return examples.", ["tasks"]),
    "envs": ("Environments", "What answers the model: games, tools, conversations.", ["envs"]),
    "rollouts": ("Rollouts", "From prompts to scored episodes; evaluation.", ["rollouts"]),
    "inference": ("Inference", "Engines that sample answers.", ["inference"]),
    "models": ("Models", "Loading, scoring, critics, LoRA, quantisation.", ["models"]),
    "distributed": ("Ranks", "Several processes that train one run.", ["distributed"]),
    "updates": ("Updates", "From a batch to a step of the optimizer.", ["updates"]),
    "training": ("Training", "A whole run, and its lines for a loop of your own.", ["training"]),
    "logs": ("Logs", "Records, plots, and sinks for trackers.", ["logs"]),
    "config": ("Recipes", "Each section of a recipe is a dataclass.", ["config"]),
    "core": ("Plugins and errors", "The registry, errors, seeds.", ["core"]),
}  # fmt: skip

# What one wants to do: a sentence, and the names for it. A test compares them with what lmgym offers.
TASKS = {
    "Train from Python": (
        "A recipe in, a run folder out. [Recipes](../recipes.md).",
        ["load_config", "train", "Config", "Stage", "PolicySection", "Sampling", "OptimizerSection",
         "LmgymError"],
    ),
    "Use my own reward function": (
        "Register a function of texts and examples, and test it. [Your own parts](../extending.md#a-reward).",
        ["register", "check_reward", "apply_rewards"],
    ),
    "Use my own data": (
        "A task is a function that returns examples. [Tasks](../tasks.md#your-own-data).",
        ["Example", "RatedAnswer", "LabelledStep", "check_task"],
    ),
    "Use my own environment": (
        "A class with `reset` and `step`. [Environments](../environments.md#your-own-environment).",
        ["Env", "Step", "check_env", "Agent"],
    ),
    "Write an algorithm": (
        "A dataclass of its hyperparameters with a loss. [The contract](../contract.md).",
        ["Algorithm", "GroupRelative", "Credit", "Surrogate", "Correction", "Tokens", "check_algorithm",
         "Batch", "PolicyOutputs"],
    ),
    "Write the training loop": (
        "The lines of lmgym's own loop. [Your own loop](../extending.md#your-own-loop).",
        ["start", "stages_left", "begin_stage", "evaluate_before", "begin_step", "gather", "collate_step",
         "prepare", "begin_trace", "update", "advance", "log_step", "evaluate_and_save_when_due",
         "save_checkpoint", "end_stage", "finish"],
    ),
    "Sample, score and evaluate": (
        "Models and answers without a run. [Models](../models.md).",
        ["load_policy", "Policy", "Sampler", "Request", "collect", "demonstrate", "evaluate", "Episode",
         "Turn", "collate", "make_optimizer"],
    ),
    "Follow a run": (
        "Your own code at each step, and your own tracker. [Trackers](../trackers.md).",
        ["Callback", "Sink"],
    ),
    "Take a built-in algorithm": (
        "In a recipe they go by their names. [Choosing](../choosing.md).",
        ["GRPO", "PPO", "A2C", "Reinforce", "RLOO", "TRPO", "NLPO", "RAFT", "Replay", "Supervised",
         "Distill", "GKD", "DPO", "OnlineDPO", "XPO", "NashMD", "ORPO", "KTO", "RewardModel",
         "ProcessRewardModel"],
    ),
}  # fmt: skip


def modules(name: str) -> list[str]:
    """The module, or those of the package of this name, `base` first, without those that define nothing public."""
    if (PACKAGE / f"{name}.py").exists():
        return [f"lmgym.{name}"]
    files = sorted((PACKAGE / name).rglob("*.py"), key=lambda file: (file.stem != "base", file))
    parts = [file.relative_to(PACKAGE.parent).with_suffix("").parts for file in files if has_public(file)]
    return [".".join(part for part in module if part != "__init__") for module in parts]


def has_public(file: Path) -> bool:
    """Whether a file defines a public class or function."""
    text = file.read_text(encoding="utf-8")
    return any(
        line.startswith(("def ", "class ")) and not line.split()[1].startswith("_") for line in text.splitlines()
    )


def pages() -> dict[str, str]:
    """The Markdown of each page, as if it lay in docs/api."""
    found = {"docs/api/index.md": index()}
    for page, (title, sentence, names) in SECTIONS.items():
        blocks = [block(module) for name in names for module in modules(name)]
        found[f"docs/api/{page}.md"] = f"# {title}\n\n{sentence}\n\n" + "\n\n".join(blocks) + "\n"
    return found


def block(module: str) -> str:
    """One module: a heading, a link to its file, and its public classes and functions."""
    file = module.replace(".", "/")
    file = f"{file}.py" if (PACKAGE.parent / f"{file}.py").exists() else f"{file}/__init__.py"
    options = "    options: {show_root_heading: false, show_root_toc_entry: false, heading_level: 3}"
    return f"## {module} {{#{module}}}\n\n[{file}](../../{file})\n\n::: {module}\n{options}"


def index() -> str:
    """The names that `import lmgym` offers, by what one wants to do."""
    package = griffe.load("lmgym", search_paths=[PACKAGE.parent])
    parts = [f"## {task}\n\n{sentence}\n\n{table(names, package)}" for task, (sentence, names) in TASKS.items()]
    parts.append(
        "## By folder\n\n" + "\n".join(f"* [{title}]({page}.md): {s}" for page, (title, s, _) in SECTIONS.items())
    )
    head = "# API\n\nWhat `import lmgym` offers, by what you want to do. Each name is loaded when it is first used."
    return "\n\n".join([head, *parts]) + "\n"


def table(names: list[str], package: griffe.Object) -> str:
    """One row for each name: where it is described, and the first paragraph of its docstring."""
    rows = []
    for name in names:
        home = _HOMES[name]
        page = next(page for page, (_, _, names) in SECTIONS.items() if home.split(".")[0] in names)
        docstring = package[f"{home}.{name}"].docstring
        text = docstring.value.split("\n\n")[0].replace("\n", " ").replace("|", r"\|") if docstring else ""
        rows.append(f"| [`{name}`]({page}.md#lmgym.{home}.{name}) | {text} |")
    return "\n".join(["| name | |", "|---|---|", *rows])
