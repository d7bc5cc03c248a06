"""Three programs of docs/agents_that_learn.md, trained as they stand on the page: a game in a shell, and a tool by two
clients.

    python -m benchmarks.agents --model models/smollm2-135m-instruct --out runs/agents

Needs curl, jq, openai, langgraph and langchain-openai. Prints the reward of each evaluation with its interval, and
of the steps in fives; draws docs/pictures/agents.png.
"""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from benchmarks.training import ROOT, train

PAGE, PICTURE = ROOT / "docs" / "agents_that_learn.md", ROOT / "docs" / "pictures" / "agents.png"
# The files of each program, the recipe of the page, and what takes the place of its env's program.
PROGRAMS: dict[str, tuple[str, list[str], str, dict[str, Any]]] = {
    "next": ("curl in a shell", ["next.sh"], "next.yaml", {"command": ["bash", "FOLDER/next.sh"]}),
    "shop": ("the openai client", ["shop.py"], "shop.yaml", {}),
    "graph": ("LangGraph", ["shop.py", "graph.py"], "shop.yaml", {"function": "graph:play"}),
}


def trained(name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Train the page's recipe with a program of it; returns the records of the run."""
    folder, run = given.out / "programs", given.out / name
    folder.mkdir(parents=True, exist_ok=True)
    page = PAGE.read_text(encoding="utf-8")
    _, files, recipe_name, changed = PROGRAMS[name]
    for file in files:
        [text] = re.findall(rf"<!-- file: {re.escape(file)} -->\n```\w+\n(.*?\n)```\n", page, re.DOTALL)
        (folder / file).write_text(text, encoding="utf-8")
    [text] = re.findall(rf"```yaml\n(# {re.escape(recipe_name)}\n.*?)```", page, re.DOTALL)
    recipe = yaml.safe_load(text)
    recipe["env"] |= json.loads(json.dumps(changed).replace("FOLDER", str(folder)))
    recipe["policy"]["model"] = str(given.model.absolute())
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    if not (run / "summary.json").exists():
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        train(folder / f"{name}.yaml", [f"out={run}", f"seed={given.seed}", f"threads={given.threads}"])
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    parser.add_argument("--out", type=Path, default=Path("runs/agents"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    given.out = given.out.absolute()

    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for name, (client, *_) in PROGRAMS.items():
        records = trained(name, given)
        steps = [record for record in records if record["kind"] == "train"]
        held_out = [record for record in records if record["kind"] == "evaluation"]
        for record in held_out:
            print(f"{client}, after {record['step']} steps: {interval(record)}")
        rewards = [record["reward"] for record in steps]
        fives = [sum(rewards[at : at + 5]) / len(rewards[at : at + 5]) for at in range(0, len(rewards), 5)]
        print(f"{client}, mean reward of five steps each: {', '.join(f'{mean:.2f}' for mean in fives)}")
        axes.plot([record["step"] + 1 for record in steps], rewards, label=client)
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(PICTURE, dpi=120)


def interval(record: dict[str, Any]) -> str:
    """A held-out mean of rewards from 0 to 1, with its interval.

    Example: interval({"reward": 0.9, "reward/low": 0.8, "reward/high": 1.01}) -> '0.90 [0.80, 1.00]'"""
    return f"{record['reward']:.2f} [{max(record['reward/low'], 0):.2f}, {min(record['reward/high'], 1):.2f}]"


if __name__ == "__main__":
    main()
