"""What may change when a run is resumed, cell by cell, with the right answer to each.

python -m tests.resume_cells        writes the table into docs/resuming.md
"""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import models
from tests.runs import ROOT

PAGE = ROOT / "docs" / "resuming.md"
BEGIN, END = "<!-- cells: begin -->", "<!-- cells: end -->"
Change = Callable[[Path, dict[str, Any]], None]  # of the folder with all files, and of the recipe


@dataclass(frozen=True)
class Cell:
    """One change, and what a resumed run does then: "refused", "recorded", "free" (said), "same" (nothing to say)."""

    what: str
    change: Change
    verdict: str
    said: str = ""
    """What the sentence names, where that is not the key."""
    recipe: str = "three"
    """Which recipe: "three" stages, "whole" (the same without adapters), "teacher"."""
    place: tuple[int, int] = (1, 2)
    """Stage and step of the checkpoint: the second of three stages."""
    anew: str = ""
    """What begins anew: "best", "early", both or nothing."""
    machine: dict[str, Any] = field(default_factory=dict)


PLUGIN = """
import cells_helper
from lmgym import register

@register("reward", "cells_plugin")
def own(texts, examples):
    return [cells_helper.one() for _ in texts]
"""
REWARDS = """
def listed(texts, examples, *, file: str = "", strict: bool = False):
    return [1.0 for _ in texts]
"""
ENV = """
from lmgym import Step

class Own:
    def __init__(self, words: str = "", more: list = (), deep: dict = {}, levels: str = "", script: str = "", note: str = ""):
        pass
    def reset(self, example, seed):
        return "go"
    def step(self, text, stop):
        return Step(terminated=True)

class Other(Own):
    pass
"""  # noqa: E501
LATER = """
def later(texts, examples):
    return [1.0 for _ in texts]
"""
ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(6)]
HELD_OUT_ROWS = {  # no prompt is in two splits
    split: [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(first, first + 6)]
    for split, first in (("test", 10), ("validation", 20))
}


def write_rows(folder: Path, rows: list[dict[str, str]], split: str = "train") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_world(world: Path) -> None:
    """All files that the recipes name."""
    for number, name in enumerate(("one", "two", "three")):
        write_rows(world / name, ROWS[number:])
        for split, held_out in HELD_OUT_ROWS.items():
            write_rows(world / name, held_out, split)
    for name in ("words.txt", "more.txt", "deep.txt", "levels/a.txt", "levels/.hidden", "over.txt", "after.txt",
                 "held_out.txt", "reward.txt", "script.py"):  # fmt: skip
        (world / name).parent.mkdir(exist_ok=True)
        (world / name).write_text(f"# {name}\n")
    sources = {"mine": PLUGIN, "cells_rewards": REWARDS, "cells_env": ENV, "cells_later": LATER,
               "cells_over": LATER, "cells_helper": "def one():\n    return 1.0\n"}  # fmt: skip
    for name, source in sources.items():
        (world / f"{name}.py").write_text(source)
    model = models.llama()
    for name in ("base", "teacher"):
        model.save_pretrained(world / name)
        models.tokenizer().save_pretrained(world / name)


def recipe_of(world: Path, name: str) -> dict[str, Any]:
    """One of the three recipes, no part of which is part of another."""
    return json.loads(json.dumps(_recipe(world, name)))


def _recipe(world: Path, name: str) -> dict[str, Any]:
    policy: dict[str, Any] = {"model": str(world / "base"), "device": "cpu"}
    plain: dict[str, Any] = {"threads": 1, "policy": policy, "prompts_per_step": 2}
    sampling = {"max_new_tokens": 6}
    if name == "teacher":
        algorithm = {"name": "distill", "teacher": str(world / "teacher")}
        return {**plain, "task": task(world, "two"), "algorithm": algorithm, "sampling": sampling, "steps": 4}
    rewards = {"length": {"unit": "characters", "target": 6, "weight": 0.5}}

    def stage(own: str, words: str, **more: Any) -> dict[str, Any]:
        return {
            "name": own, "task": task(world, own), "steps": 4, "sampling": sampling, "rewards": rewards,
            "algorithm": {"name": "grpo", "group_size": 2},
            "env": {"name": "cells_env:Own", "words": f"{world}/{words}"},
        } | more  # fmt: skip

    second = stage("two", "words.txt")
    second["env"] |= {
        "more": [f"{world}/more.txt", 3, "hello"], "deep": {"x": {"file": f"{world}/deep.txt"}},
        "levels": f"{world}/levels", "script": f"{world}/script.py", "note": "n",
    }  # fmt: skip
    second["rewards"] = {**rewards, "cells_plugin": 1.0, "cells_rewards:listed": {"file": f"{world}/reward.txt"}}
    second["early_stop"] = {"metric": "length", "patience": 3}
    over = stage("one", "over.txt", rewards={**rewards, "cells_over:later": 1.0})
    return {
        **plain,
        "policy": policy | ({"lora_rank": 2} if name == "three" else {}),
        "plugins": [f"{world}/mine.py"],
        "evaluation": {
            "keep_best": "length", "env": {"name": "cells_env:Own", "words": f"{world}/held_out.txt"}, "examples": 4,
        },
        "stages": [over, second, stage("three", "after.txt", rewards={**rewards, "cells_later:later": 1.0})],
    }  # fmt: skip


def task(world: Path, name: str) -> dict[str, Any]:
    return {"name": "jsonl", "path": f"{world}/{name}/{{split}}.jsonl", "references": "answer"}


# ---------------------------------------------------------------- changes


def put(key: str, value: Any) -> Change:
    """Set a key of the recipe ("stages.1.steps"); None removes it."""

    def change(world: Path, recipe: dict[str, Any]) -> None:
        *parents, last = key.split("/")
        at: Any = recipe
        for parent in parents:
            at = at[int(parent)] if isinstance(at, list) else at.setdefault(parent, {})
        if value is None:
            del at[int(last) if isinstance(at, list) else last]
        else:
            at[last] = copy.deepcopy(value)

    return change


def edit(name: str, text: str = "# changed\n") -> Change:
    """Change a file in place, or add it."""

    def change(world: Path, recipe: dict[str, Any]) -> None:
        path = world / name
        path.write_text((path.read_text() if path.exists() else "") + text)

    return change


def set_json(name: str, key: str, value: Any) -> Change:
    """Change a key of a JSON file in place."""

    def change(world: Path, recipe: dict[str, Any]) -> None:
        tree = json.loads((world / name).read_text())
        tree[key] = value
        (world / name).write_text(json.dumps(tree))

    return change


def remove(name: str) -> Change:
    return lambda world, recipe: (world / name).unlink()


def move(name: str, to: str) -> Change:
    """Move a file or folder; every text of the recipe that names it follows."""

    def change(world: Path, recipe: dict[str, Any]) -> None:
        (world / to).parent.mkdir(exist_ok=True)
        shutil.move(world / name, world / to)
        text = json.dumps(recipe).replace(f'"{world}/{name}', f'"{world}/{to}')
        recipe.update(json.loads(text))

    return change


def rows(name: str, chosen: list[dict[str, str]], split: str = "train") -> Change:
    return lambda world, recipe: write_rows(world / name, chosen, split)


def all_of(*changes: Change) -> Change:
    def change(world: Path, recipe: dict[str, Any]) -> None:
        for one in changes:
            one(world, recipe)

    return change


def nothing(world: Path, recipe: dict[str, Any]) -> None:
    return


def touched(world: Path, recipe: dict[str, Any]) -> None:
    for path in world.rglob("*"):
        path.touch()


def added_stage(world: Path, recipe: dict[str, Any]) -> None:
    recipe["stages"].append({**recipe["stages"][2], "name": "four"})


def keys(verdict: str, where: str, values: dict[str, Any], **more: Any) -> list[Cell]:
    """A cell for each key of a section."""
    named = {"stages/0/": "of a stage that is over", "stages/2/": "of a stage that has not begun"}.get(where, "")
    at = "" if where.startswith("stages/") else where.replace("/", ".")
    return [
        Cell(f"`{at}{key.replace('/', '.')}` {named}".strip(), put(where + key, value), verdict, **more)
        for key, value in values.items()
    ]


def machine(verdict: str, part: str, *names: str) -> list[Cell]:
    """A cell for each name of a part of the fingerprint that says where the run computes."""
    return [Cell(f"{part}: {name}", nothing, verdict, said=name, machine={part: {name: "another"}}) for name in names]


NEW_ROWS = [*ROWS[1:5], {"prompt": "5+1=", "answer": "7"}]
NEW_HELD_OUT = [{"prompt": "10+1=", "answer": "7"}, *HELD_OUT_ROWS["test"][1:]]
LAST, START = (2, 1), (0, 0)
BOTH, HELD_OUT, EPSILON = "best early", "evaluation on 'test'", ("rms_norm_eps", 0.1)
SECOND = "stages/1/"

CELLS: list[Cell] = [
    # Sections beside the stages.
    *keys("refused", "", {"seed": 1}),
    *keys("free", "", {"threads": 2, "reward_timeout": 9.0, "rewards_failed": 0.5}),
    *keys("free", "", {"callbacks": {"lmgym:Callback": None}}),
    *keys("free", "checkpoint/", {"every": 3, "keep": 3}),
    *keys("free", "logs/", {"samples": 1, "rollouts": "all", "traces": "none", "traces_gib": 2.0, "predictions": True}),
    *keys("free", "distributed/", {"seconds": 9.0, "sharding": "fsdp"}),
    *keys("free", "policy/", {"device": "auto", "compute": "float32", "kernels": "torch",
                              "update_kernels": "torch"}),
    *keys("recorded", "policy/", {"tokens_per_forward": 64, "activation_checkpointing": True, "path": "plain",
                                  "attention": "flex", "products": "onednn"}),
    *keys("refused", "policy/", {"model": "builtin:tiny", "lora_rank": 3, "lora_alpha": 2.0, "lora_targets": ["q_proj"],
                                 "critic": "separate", "eos_token": "x", "template": "{{ 1 }}", "answer_start": "A",
                                 "max_reference_tokens": 9, "truncation_side": "right",
                                 "chat_template_kwargs": {"a": 1}}),
    *keys("recorded", "engine/", {"rows": 8, "captured": True}),
    *keys("free", "engine/", {"name": "pool", "unit": 2, "gap_at_load": 0.1, "gap_warning": 0.1, "gap_error": 0.1}),
    # The evaluation is free, but numbers that were measured otherwise are not compared.
    *keys("free", "evaluation/", {"every": 3, "final_split": "validation", "reference_nll": True,
                                  "metrics": {"word_count": 0}} | {"metrics": {"words": 0}}),
    *keys("free", "evaluation/", {"split": "validation", "examples": 3, "samples": 2, "temperature": 0.5,
                                  "max_new_tokens": 5, "env": {"name": "single_turn"}}, anew=BOTH),
    *keys("free", "evaluation/", {"keep_best": "reward", "keep_best_mode": "min"}, anew="best"),
    Cell("`evaluation.task`: other data", put("evaluation/task", {"name": "arithmetic", "size": 9, "test_size": 4}),
         "free", anew=BOTH),
    Cell("`evaluation.env` names another file", put("evaluation/env/words", "/dev/null"), "free", anew=BOTH),
    # The stage that is trained.
    *keys("free", SECOND, {"steps": 6, "early_stop/patience": 4}),
    *keys("free", SECOND, {"early_stop/metric": "reward", "early_stop/mode": "min"}, anew="early"),
    Cell("`early_stop` removed", put(SECOND + "early_stop", None), "free", anew="early"),
    Cell("`steps` below those taken", put(SECOND + "steps", 1), "refused", said="2 are taken already"),
    *keys("refused", SECOND, {"name": "another", "prompts_per_step": 3, "priority_scale": 1.0, "shuffle": False,
                              "curriculum": {"rest": 2}, "algorithm/group_size": 3, "algorithm/name": "rloo",
                              "algorithm/kl_coefficient": 0.1, "optimizer/name": "rmsprop", "env/note": "m",
                              "env/name": "cells_env:Other", "env/more": [], "env/words": "/dev/null"}),
    *keys("recorded", SECOND, {"max_draws": 2, "optimizer/learning_rate": 0.5, "sampling/temperature": 0.5}),
    Cell("`optimizer.schedule` and `steps`", all_of(put(SECOND + "optimizer/schedule", "linear"),
         put(SECOND + "steps", 6)), "recorded", said="optimizer.schedule"),
    *keys("recorded", SECOND, {"sampling/max_new_tokens": 5, "rewards/length/target": 7}, anew=BOTH),
    Cell("`rewards.length.weight`", put(SECOND + "rewards/length/weight", 2.0), "recorded"),
    Cell("`rewards`: one more", put(SECOND + "rewards/words", 1.0), "recorded", said="rewards.words"),
    Cell("`rewards`: one fewer", put(SECOND + "rewards/cells_plugin", None), "recorded", said="rewards.cells_plugin"),
    Cell("`env.workers` and `env.seconds`", all_of(put(SECOND + "env/workers", 1), put(SECOND + "env/seconds", 9.0)),
         "free", said="env.seconds"),
    # Stages that are over, or have not begun.
    *keys("refused", "stages/0/", {"steps": 5, "early_stop": {"metric": "reward", "patience": 1}, "max_draws": 2,
                                   "optimizer/learning_rate": 0.5, "env/note": "m"}, said="but this stage is over"),
    Cell("`rewards` of a stage that is over", put("stages/0/rewards/length/weight", 2.0), "refused",
         said="but this stage is over"),
    *keys("free", "stages/2/", {"steps": 5, "name": "another", "algorithm": {"name": "rloo", "group_size": 2},
                                "rewards": {"words": 1.0}, "env/note": "m", "optimizer/name": "rmsprop",
                                "prompts_per_step": 3}, said="which has not begun"),
    Cell("a stage that has not begun is removed", put("stages/2", None), "free", said="which has not begun"),
    Cell("a stage is added", added_stage, "free", said="which has not begun"),
    Cell("a stage is added to a finished run", added_stage, "free", said="which has not begun", place=(2, 4)),
    # Data of tasks.
    Cell("data: an answer is another", rows("two", NEW_ROWS), "refused", said="other contents"),
    Cell("data: another order", rows("two", ROWS[1:][::-1]), "refused", said="data of stage 'two'"),
    Cell("data: one row fewer", rows("two", ROWS[2:]), "refused", said="had 5 examples and has 4"),
    Cell("data: touched, with new times", touched, "same"),
    Cell("data: moved to another folder", move("two/train.jsonl", "moved/train.jsonl"), "same", recipe="one file"),
    Cell("data: another name of the file", move("two/train.jsonl", "two/other.jsonl"), "same", recipe="one file"),
    Cell("data: streamed, moved", move("two/train.jsonl", "moved/train.jsonl"), "same", recipe="streamed"),
    Cell("data: moved, and an answer is another",
         all_of(move("two/train.jsonl", "moved/train.jsonl"), rows("moved", NEW_ROWS)), "refused", said="contents",
         recipe="one file"),
    Cell("data: another name, with a curriculum", move("two/train.jsonl", "two/other.jsonl"), "refused",
         said="task.path", recipe="curriculum"),
    Cell("data: moved, with a curriculum", move("two/train.jsonl", "moved/train.jsonl"), "same", recipe="curriculum"),
    Cell("data of a stage that is over: an answer is another", rows("one", NEW_ROWS), "refused", said="stage 'one'"),
    Cell("data of a stage that has not begun: an answer is another", rows("three", NEW_ROWS), "same"),
    Cell("held-out data, before the last stage", rows("three", NEW_HELD_OUT, "test"), "refused", said=HELD_OUT),
    Cell("held-out data, in the last stage", rows("three", NEW_HELD_OUT, "test"), "refused", said=HELD_OUT,
         place=LAST),
    Cell("held-out data, before the first step", rows("three", NEW_HELD_OUT, "test"), "same", place=START, anew=BOTH),
    # Files of environments.
    Cell("a file that `env` names", edit("words.txt"), "refused", said="env.words"),
    Cell("a file that `env` names in a list", edit("more.txt"), "refused", said="env.more.0"),
    Cell("a file that `env` names in a dictionary", edit("deep.txt"), "refused", said="env.deep.x.file"),
    Cell("a file that `env` names is gone", remove("words.txt"), "refused", said="is gone"),
    Cell("a file in a folder that `env` names", edit("levels/a.txt"), "recorded", said="env.levels", anew=BOTH),
    Cell("a file is added to a folder that `env` names", edit("levels/b.txt"), "recorded", said="env.levels",
         anew=BOTH),
    Cell("a file is gone from a folder that `env` names", remove("levels/a.txt"), "recorded", said="env.levels",
         anew=BOTH),
    Cell("a hidden file in a folder that `env` names", edit("levels/.hidden"), "same"),
    Cell("a program that `env` names", edit("script.py"), "recorded", said="env.script", anew=BOTH),
    Cell("a file that `env` names: moved", move("words.txt", "moved/w.txt"), "same"),
    Cell("a file that `env` names in a list: moved", move("more.txt", "moved/m.txt"), "same"),
    Cell("a file that `env` names in a dictionary: moved", move("deep.txt", "moved/d.txt"), "same"),
    Cell("a folder that `env` names: moved", move("levels", "moved/levels"), "same"),
    Cell("a file that `env` names: moved and changed",
         all_of(move("words.txt", "moved/w.txt"), edit("moved/w.txt")), "refused", said="env.words"),
    Cell("a file of an environment of a stage that is over", edit("over.txt"), "refused", said="stages.one.env.words"),
    Cell("a file of an environment of a stage that is over: moved", move("over.txt", "moved/o.txt"), "same"),
    Cell("a file of an environment of a stage that has not begun", edit("after.txt"), "same"),
    Cell("a file that `evaluation.env` names", edit("held_out.txt"), "refused", said="evaluation.env.words"),
    Cell("a file that `evaluation.env` names: moved", move("held_out.txt", "moved/h.txt"), "same"),
    Cell("`env` has a text of 5,000 letters", nothing, "same", recipe="long"),
    Cell("`env` has a text that begins with ~word", nothing, "same", recipe="tilde"),
    # Code and files of rewards.
    Cell("code of a plug-in", edit("mine.py"), "recorded", said="code of mine.py", anew=BOTH),
    Cell("code that a plug-in imports", edit("cells_helper.py"), "recorded", said="code of cells_helper",
         anew=BOTH),
    Cell("a plug-in: moved", move("mine.py", "moved/mine.py"), "same"),
    Cell("a plug-in: another name of the file", move("mine.py", "mine_too.py"), "same"),
    Cell("a plug-in: moved and changed", all_of(move("mine.py", "moved/mine.py"), edit("moved/mine.py")), "recorded",
         said="code of mine.py", anew=BOTH),
    Cell("a plug-in is added", all_of(edit("more.py", "x = 1\n"), lambda world, recipe: recipe["plugins"].append(
         f"{world}/more.py")), "recorded", said="code of more.py", anew=BOTH),
    Cell("code of a reward, module:function", edit("cells_rewards.py"), "recorded", said="code of cells_rewards",
         anew=BOTH),
    Cell("code of an environment, module:class", edit("cells_env.py"), "recorded", said="code of cells_env",
         anew=BOTH),
    Cell("code of a reward of a stage that is over", edit("cells_over.py"), "same"),
    Cell("code of a reward of a stage that has not begun", edit("cells_later.py"), "same"),
    Cell("a file that a reward names", edit("reward.txt"), "recorded", said="reward.txt", anew=BOTH),
    Cell("a file that a reward names: moved", move("reward.txt", "moved/r.txt"), "same"),
    # Models.
    *(Cell(f"a teacher's {name}", change, "refused", said=name, recipe="teacher", place=(0, 2)) for name, change in {
        "config.json": set_json("teacher/config.json", *EPSILON),
        "tokenizer.json": set_json("teacher/tokenizer.json", "normalizer", {"type": "Lowercase"}),
        "generation_config.json": set_json("teacher/generation_config.json", "eos_token_id", 7)}.items()),
    Cell("a teacher's README", edit("teacher/README.md"), "same", recipe="teacher", place=(0, 2)),
    Cell("a teacher: moved", move("teacher", "moved/teacher"), "same", recipe="teacher", place=(0, 2)),
    Cell("a teacher: moved, and its config.json is another",
         all_of(move("teacher", "moved/teacher"), set_json("moved/teacher/config.json", *EPSILON)), "refused",
         said="algorithm.teacher", recipe="teacher", place=(0, 2)),
    Cell("a teacher's config.json, before the first step", set_json("teacher/config.json", *EPSILON), "same",
         recipe="teacher", place=START),
    *(Cell(f"below adapters: {name}", change, "refused", said=name) for name, change in {
        "config.json": set_json("base/config.json", *EPSILON),
        "tokenizer.json": set_json("base/tokenizer.json", "normalizer", {"type": "Lowercase"}),
        "tokenizer_config.json": set_json("base/tokenizer_config.json", "padding_side", "left"),
        "generation_config.json": set_json("base/generation_config.json", "eos_token_id", 7)}.items()),
    Cell("below adapters: the folder moved", move("base", "moved/base"), "same"),
    *machine("refused", "model", "base weights", "base tokenizer"),
    Cell("without adapters: config.json of the first model", set_json("base/config.json", *EPSILON), "same",
         recipe="whole"),
    Cell("without adapters: the folder of the first model moved", move("base", "moved/base"), "same", recipe="whole"),
    Cell("without adapters: another first model", all_of(move("base", "moved/base"), set_json("moved/base/config.json",
         *EPSILON)), "refused", said="policy.model", recipe="whole"),
    # Versions and machine.
    *machine("recorded", "versions", "torch", "transformers", "python", "lmgym"),
    *machine("recorded", "machine", "device", "threads", "precision", "unit", "ranks", "sharding", "engine",
             "generator threads"),
]  # fmt: skip


def variant(world: Path, name: str) -> dict[str, Any]:
    """The recipe of a cell."""
    if name in ("three", "whole", "teacher"):
        return recipe_of(world, name)
    recipe = recipe_of(world, "three")
    second = recipe["stages"][1]
    if name in ("long", "tilde"):
        second["env"]["note"] = "word " * 1000 if name == "long" else "~nobody_at_all is a user"
        return recipe
    second["task"] |= {"path": f"{world}/two/train.jsonl", "test_path": f"{world}/two/test.jsonl"}
    if name == "streamed":
        second["task"]["streaming"] = True
    if name == "curriculum":
        second["curriculum"] = {}
    return recipe


def table() -> str:
    """The cells as a table of the page."""
    lines = ["| what is not as it was | a resumed run |", "|---|---|"]
    for cell in CELLS:
        anew = {"": "", "best": "; `keep_best` begins anew", "early": "; `early_stop` begins anew"}
        more = anew.get(cell.anew, "; `keep_best` and `early_stop` begin anew")
        lines.append(f"| {cell.what} | {cell.verdict}{more} |")
    return "\n".join(lines)


def page() -> str:
    """The page with the table as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
