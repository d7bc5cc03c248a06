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
    """The table of the names that `import lmgym` offers."""
    package = griffe.load("lmgym", search_paths=[PACKAGE.parent])
    rows = []
    for name, home in _HOMES.items():
        page = next(page for page, (_, _, names) in SECTIONS.items() if home.split(".")[0] in names)
        docstring = package[f"{home}.{name}"].docstring
        text = docstring.value.split("\n\n")[0].replace("\n", " ").replace("|", r"\|") if docstring else ""
        rows.append(f"| [`{name}`]({page}.md#lmgym.{home}.{name}) | {text} |")
    table = "\n".join(["| name | |", "|---|---|", *rows])
    return f"# lmgym\n\nThe names that `import lmgym` offers. Each is loaded when it is first used.\n\n{table}\n"
