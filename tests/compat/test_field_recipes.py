"""The field's recipes in examples/field: on data in the originals' schemas each trains two steps, and pays what the
originals pay. docs/field_recipes.md is the table of them."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lmgym.config.build import build_config
from lmgym.config.yaml import read_yaml
from lmgym.logs.console import Console
from lmgym.rewards.base import call_reward
from lmgym.rewards.building import build_rewards
from lmgym.tasks.base import load_task
from lmgym.training.loop import train
from lmgym.types import Episode, Turn
from tests import runs
from tests.compat import field_rewards as originals
from tests.property.test_rendering import chat, ids_of

FIELD = runs.ROOT / "examples" / "field"
RECIPES = sorted(FIELD.glob("*.yaml"))
PAGE = runs.ROOT / "docs" / "field_recipes.md"
NUMBERS = range(40)
ANSWERS = (
    "#### 7", "#### 7.", "#### 1,007", "7", "", "<think>a</think>7", "<think>a<think></think>7",
    "<reasoning>\n7\n</reasoning>\n<answer>\n7\n</answer>", "<answer>3 + 4 = 7</answer>", "<answer>3 + 5 = 7</answer>",
)  # fmt: skip


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def write_data(folder: Path) -> None:
    """Rows in the schemas of the data sets that the recipes name; the answer of each is 7."""
    asked = [f"{n}: 3 + 4?" for n in NUMBERS]
    good, bad = [{"role": "assistant", "content": "7"}], [{"role": "assistant", "content": "8"}]
    begin = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>"
    tables: dict[str, list[dict[str, Any]]] = {
        "numina": [{"problem": q, "solution": "7", "messages": [*user(q), *good]} for q in asked],
        "deepmath": [{"question": q, "final_answer": "7", "difficulty": 5.0, "topic": "Sums"} for q in asked],
        "dapo_math": [{"prompt": q, "solution": "7", "data_source": "math_dapo", "ability": "MATH"} for q in asked],
        "tldr": [{"prompt": f"POST: {q}\n\nTL;DR:", "completion": " seven"} for q in asked],
        "pairs": [
            {"prompt": q, "chosen": [*user(q), *good], "rejected": [*user(q), *bad], "score_chosen": 8.0} for q in asked
        ],
        "marked": [
            {"prompt": user(q), "completion": good if n % 2 else bad, "label": n % 2 == 1} for n, q in enumerate(asked)
        ],
        "gsm8k": [{"question": q, "answer": "3 + 4 = <<3+4=7>>7\n#### 7"} for q in asked],
        "rendered": [
            {"prompt": begin.format(q), "nums": [3, 4], "target": 7, "data_source": "countdown", "ground_truth": "7"}
            for q in asked
        ],
        "verl": [
            {
                "data_source": "openai/gsm8k",
                "prompt": user(q),
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "7"},
                "extra_info": {"split": "train", "index": n},
            }
            for n, q in enumerate(asked)
        ],
    }
    tables["verl_math"] = [{**row, "data_source": "DigitalLearningGmbH/MATH-lighteval"} for row in tables["verl"]]
    for name, rows in tables.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    lines: dict[str, list[Any]] = {
        "capybara.jsonl": [{"messages": [*user(q), *good, *user("Sure?"), *good], "source": "x"} for q in asked],
        "openrlhf_pairs.jsonl": [{"chosen": [*user(q), *good], "rejected": [*user(q), *bad]} for q in asked],
        "unpaired.jsonl": [{"instruction": q, "response": " 7", "score": n % 2} for n, q in enumerate(asked)],
        "openrlhf.jsonl": [{"context_messages": user(q), "label": "7"} for q in asked],
        "hh.jsonl.gz": [
            {name: f"\n\nHuman: {q}\n\nAssistant: {own}" for name, own in (("chosen", "7"), ("rejected", "8"))}
            for q in asked
        ],
    }
    for name, rows in lines.items():
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    zero = [[{"from": "human", "value": q}, {"from": "assistant", "ground_truth": {"value": "7"}}] for q in asked]
    (folder / "orz.json").write_text(json.dumps(zero))
    (folder / "deepscaler.json").write_text(json.dumps([{"problem": q, "answer": "7", "solution": ""} for q in asked]))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("field")
    write_data(folder)
    (folder / "field_rewards.py").write_text(Path(originals.__file__).read_text())
    return folder


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_two_steps(path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe unchanged, but on a tiny model, with short answers and few prompts."""
    monkeypatch.chdir(data)
    monkeypatch.syspath_prepend(data)
    tree = read_yaml(path)
    policy = {**runs.TINY["policy"], "architecture": runs.ARCHITECTURE | {"max_position_embeddings": 512}}
    tree["policy"] = policy | tree.get("policy", {})
    tree["rewards"] = {
        name: {**(own if isinstance(own, dict) else {"weight": own}), **({"pool": False} if ":" in name else {})}
        for name, own in tree.get("rewards", {}).items()
    }
    tree |= {"steps": 2, "prompts_per_step": 2, "threads": 1, "out": str(tmp_path / "run"), "checkpoint": {"every": 0}}
    tree |= {"sampling": {"max_new_tokens": 4}, "evaluation": None}
    folder = train(build_config(tree), Console(quiet=True))
    steps = [record["step"] for record in runs.records(folder / "metrics.jsonl") if "step" in record]
    assert sorted({*steps}) == [0, 1]


def rewards_of(path: Path) -> list[str]:
    return [name.partition(":")[2] for name in read_yaml(path).get("rewards", {}) if name.startswith("field_rewards:")]


def theirs(name: str, row: dict[str, Any], prompt: Any) -> list[float]:
    """What the original pays ten answers, called as its own system calls it."""
    function = getattr(originals, name)
    if name == "verl_score":
        truth = row.get("ground_truth") or row["reward_model"]["ground_truth"]
        return [function(row["data_source"], text, truth, row.get("extra_info")) for text in ANSWERS]
    asked = (
        prompt
        if isinstance(prompt, str)
        else chat.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    )
    if name == "reward_func":
        queries = [f"{asked}{text}<|im_end|>" for text in ANSWERS]
        return list(function(queries, [asked] * 10, [row["label"]] * 10))
    texts = ANSWERS if isinstance(prompt, str) else [[{"role": "assistant", "content": text}] for text in ANSWERS]
    return list(function(prompts=[prompt] * 10, completions=texts, **{key: [own] * 10 for key, own in row.items()}))


@pytest.mark.parametrize("path", [path for path in RECIPES if rewards_of(path)], ids=lambda path: path.stem)
def test_rewards_pay_what_the_originals_pay(path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    monkeypatch.syspath_prepend(data)
    tree = read_yaml(path)
    example = load_task(tree["task"].pop("name"), "train", **tree["task"])[0]
    asked = chat.apply_chat_template(user("?"), tokenize=False, add_generation_prompt=True)
    if not isinstance(example.prompt, str):
        asked = chat.apply_chat_template(example.prompt, tokenize=False, add_generation_prompt=True)
    episodes = [
        Episode(example, 0, n, [Turn(ids_of(asked, chat), [*ids_of(text, chat), chat.eos_token_id], text=text)])
        for n, text in enumerate(ANSWERS)
    ]
    row = dict(example.meta) | ({"label": example.references[0]} if example.references else {})
    for name in rewards_of(path):
        section = tree["rewards"][f"field_rewards:{name}"]
        options = {key: own for key, own in (section if isinstance(section, dict) else {}).items() if key == "style"}
        [reward] = build_rewards({f"field_rewards:{name}": {"pool": False, **options}})
        expected = theirs(name, row, example.prompt)
        assert call_reward(reward, episodes, tokenizer=chat) == expected
        assert len(set(expected)) > 1  # not ten zeros


def test_the_page_is_the_table_of_the_recipes() -> None:
    """Each recipe's first line says its name, its source and what differs; lines count without comments."""
    rows = []
    for path in RECIPES:
        first, *others = path.read_text(encoding="utf-8").splitlines()
        name, source, differs = first.removeprefix("# ").split(" | ")
        lines, own = len([line for line in others if line.strip()]), "rewards" if rewards_of(path) else "none"
        rows.append(f"| [{name}](../examples/field/{path.name}) | {source} | {lines} | {differs} | {own} |")
    found = re.findall(r"^\| \[.*$", PAGE.read_text(encoding="utf-8"), re.M)
    assert found == rows
