"""Whatever a user gets wrong gives one sentence that names file, line or key, status 1, and no traceback."""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from lmgym.cli.main import main
from lmgym.core.errors import LmgymError
from lmgym.models.builtin import builtin_model, byte_tokenizer
from lmgym.models.critic import with_critic
from lmgym.models.load import load_policy
from lmgym.models.policy_section import PolicySection
from lmgym.training.callbacks import Callback, EvaluationEnd, StepEnd
from lmgym.training.run import lock_folder
from lmgym.types import Example
from tests import runs
from tests.runs import complaint

HERE = "tests.contract.test_bad_input"
STAGES = [{"name": "warm", "algorithm": "supervised"}, {"name": "rl"}]


# ---------------------------------------------------------------- the recipe

# what the recipe says, overrides, what the sentence must say
WRONG_RECIPES: list[tuple[dict[str, Any], list[str], str]] = [
    ({"stepz": 3}, [], r"recipe\.yaml: unknown key 'stepz'; did you mean 'steps'\?"),
    ({"sampling": {"temprature": 1}}, [], r"recipe\.yaml: unknown key 'temprature' in 'sampling'; did you mean 'temp"),
    ({"policy": {"modell": "x"}}, [], r"unknown key 'modell' in 'policy'; did you mean 'model'\?"),
    ({"algorithm": {"name": "ppo", "clip_hi": 0.2}}, [], r"unknown key 'clip_hi' in 'algorithm'; did you mean 'clip_"),
    ({"algorithm": {"surrogate": {"hi": 1}}}, [], r"unknown key 'hi' in 'algorithm\.surrogate'; did you mean 'high'"),
    ({"algorithm": {"name": "rloo", "clip_low": 0.2}}, [], r"unknown key 'clip_low' in 'algorithm'"),
    ({"stages": [*STAGES, {"name": "x", "stepz": 3}]}, [], r"unknown key 'stepz' in 'stages\.x'; did you mean 'steps'"),
    ({"task": {"name": "arithmetic", "sise": 9}}, [], r"unknown key 'task\.sise'; did you mean 'size'\?"),
    ({"evaluation": {"task": {"name": "topics", "size": 9}}}, [], r"unknown key 'evaluation\.task\.size'"),
    ({"env": {"name": "single_turn", "turns": 2}}, [], r"unknown key 'env\.turns'"),
    ({"rewards": {"length": {"targt": 5}}}, [], r"unknown key 'rewards\.length\.targt'; did you mean 'target'\?"),
    ({"policy": {"architecture": {"hiden_size": 8}}}, [], r"unknown key 'policy\.architecture\.hiden_size'; did you m"),
    ({}, ["early_stop.metricc=x"], r"unknown key 'metricc' in 'early_stop'; did you mean 'metric'\?"),
    ({}, ["optimiser.learning_rate=1"], r"unknown key 'optimiser'; did you mean 'optimizer'\?"),
    # types and values
    ({"steps": "many"}, [], r"recipe\.yaml: key 'steps': .*valid integer.*, got 'many'"),
    ({"steps": True}, [], r"key 'steps' must be a number, got True"),
    ({"steps": 1.5}, [], r"key 'steps': .*integer.*, got 1\.5"),
    ({"steps": 0}, [], r"steps is 0; it must be at least 1"),
    ({"sampling": 7}, [], r"'sampling' must be a section of keys and values, not 7"),
    ({"sampling": {"stop": "x"}}, [], r"key 'sampling\.stop': .*tuple.*, got 'x'"),
    ({"sampling": {"temperature": -1}}, [], r"sampling\.temperature is -1"),
    ({"sampling": {"temperature": 5e-324}}, [], r"sampling\.temperature is 5e-324; it must be 0 \(greedy\) or at le"),
    ({"evaluation": {"temperature": 1e-9}}, [], r"evaluation\.temperature is 1e-09; it must be 0 \(greedy\) or at"),
    ({"rewards": {"length": 1e39}}, [], r"key 'rewards\.length\.weight': must be from -3\.4e38 to 3\.4e38, .* got 1e"),
    ({"algorithm": {"name": "ppo", "clip_high": -0.3}}, [], r"algorithm\.clip_high is -0\.3; it must be 0 or more"),
    ({"algorithm": {"name": "ppo", "target_kl": -1}}, [], r"algorithm\.target_kl is -1"),
    ({"algorithm": {"name": "reinforce_pp", "clip_low": -1}}, [], r"algorithm\.clip_low is -1"),
    ({"algorithm": {"name": "ppo", "clip_high": "1e300"}}, [], r"key 'algorithm\.clip_high': must be from -3\.4e38"),
    ({"optimizer": {"betas": [0.9, -1e300]}}, [], r"key 'optimizer\.betas\.1': must be from .* got -1e\+300"),
    ({"sampling": {"temperature": 0}}, [], r"sampling\.temperature is 0; training needs answers that differ"),
    ({"sampling": {"min_new_tokens": 9, "max_new_tokens": 8}}, [], r"sampling\.min_new_tokens is 9; it must lie betw"),
    ({"optimizer": {"schedule": "cosin"}}, [], r"key 'optimizer\.schedule': .*'constant', .*'linear', 'cosine'"),
    ({"optimizer": {"learning_rate": -0.1}}, [], r"optimizer\.learning_rate is -0\.1; it must be at least 0"),
    ({"optimizer": {"learning_rate": math.nan}}, [], r"optimizer\.learning_rate is nan"),
    ({"optimizer": {"betas": [0.9]}}, [], r"key 'optimizer\.betas': field required, got \[0\.9\]"),
    ({"optimizer": {"betas": [0.9, 1.0]}}, [], r"optimizer\.betas are \(0\.9, 1\.0\)"),
    ({"algorithm": {"name": "grpo", "group_size": 1}}, [], r"algorithm\.group_size is 1; grpo needs at least 2"),
    ({"algorithm": "ppo", "policy": {"critic": "none"}}, [], r"ppo needs a value function, and policy\.critic is none"),
    ({"algorithm": "ppo"}, ["policy.critic=none"], r"ppo needs a value function, and policy\.critic is none"),
    ({"algorithm": {"name": "a2c", "kl_target": 0.1}}, [], r"algorithm\.kl_target needs a reference"),
    ({"algorithm": {"name": "ppo", "preset": "trll"}}, [], r"'algorithm\.preset' is 'trll'; did you mean 'trl'\?"),
    ({"algorithm": {"name": "a2c", "epochs": 2}}, [], r"a2c has no ratio to correct a second step"),
    ({"algorithm": {"name": "rloo", "epochs": 2}}, [], r"rloo has no ratio to correct a second step"),
    ({"policy": {"lora_rank": 0}}, [], r"policy\.lora_rank is 0; it must be from 1 to 65536"),
    ({"policy": {"lora_rank": 2**31}}, [], r"policy\.lora_rank is 2147483648; it must be from 1 to 65536"),
    ({"rewards": {"length": "much"}}, [], r"key 'rewards\.length\.weight': .*number.*, got 'much'"),
    ({"rewards": {"length": {"target": "x"}}}, [], r"key 'rewards\.length\.target': .*integer"),
    ({"task": {"name": "arithmetic", "size": "big"}}, [], r"key 'task\.size': .*integer.*, got 'big'"),
    ({"task": {"name": "arithmetic", "size": 2**40}}, [], r"task\.size is 1099511627776; it must be at most 10000000"),
    ({"task": {"name": "arithmetic", "largest": 2**63}}, [], r"task\.largest is 9223372036854775808; it must be at m"),
    ({"task": {"name": "dummy", "size": 10**9}}, [], r"task\.size is 1000000000; it must be at most 10000000"),
    ({"task": {"name": "episodes", "count": 10**9}}, [], r"task\.count is 1000000000; it must be at most 10000000"),
    ({"algorithm": {"name": "grpo", "preset": ["dapo"]}}, [], r"'algorithm\.preset' is \['dapo'\]; .*Valid:"),
    ({"algorithm": "json:loads"}, [], r"'algorithm': json:loads is no algorithm; name a class that extends"),
    ({"task": {"name": "episodes", "system_prompt": {}}}, [], r"'task\.system_prompt' must be a text, or file:PATH"),
    ({"task": {"name": "arithmetic", "limit": 0}}, [], r"'task\.limit' must be a whole number of at least 1"),
    ({"evaluation": {"examples": -1}}, [], r"evaluation\.examples is -1; it must be at least 0"),
    ({"checkpoint": {"every": -1}}, [], r"checkpoint\.every is -1; it must be at least 0"),
    ({"threads": 0}, [], r"threads is 0; it must be from 1 to 4096"),
    ({"threads": 10**6}, [], r"threads is 1000000; it must be from 1 to 4096"),
    ({"threads": 4096}, [], r"threads is 4096, and this machine has \d+ processors; write \d+ at most"),
    ({"reward_timeout": 0}, [], r"reward_timeout is 0.*above 0 seconds"),
    ({"early_stop": {"metric": "reward"}}, [], r"early_stop never stops anything; give it a 'patience' or a 'target'"),
    ({"stages": {"rl": {}}}, [], r"'stages' must be a list"),
    ({"stages": []}, [], r"'stages' must be a list of at least one stage"),
    ({"stages": ["rl"]}, [], r"stages\.0 must be a mapping"),
    ({"stages": [{"name": "a"}, {"name": "a"}]}, [], r"two stages are called 'a'"),
    ({"task": None}, [], r"names no task; write, for example, 'task: arithmetic'"),
    ({"rewards": None}, [], r"names no reward; write, for example, 'rewards: \{final_answer: 1\.0\}'"),
    # names
    ({"task": "arithmetics"}, [], r"unknown task 'arithmetics'; did you mean 'arithmetic'\?"),
    ({"rewards": {"final_anser": 1}}, [], r"unknown reward 'final_anser'; did you mean 'final_answer'\?"),
    ({"evaluation": {"metrics": {"lenght": 0}}}, [], r"unknown reward 'lenght'; did you mean 'length'\?"),
    ({"algorithm": "gpro"}, [], r"unknown algorithm 'gpro'; did you mean 'grpo'\?"),
    ({"env": "singleturn"}, [], r"unknown env 'singleturn'; did you mean 'single_turn'\?"),
    ({"task": 7}, [], r"'task' must be the name of one \(.*arithmetic.*\)"),
    ({"task": {"size": 7}}, [], r"'task' must be the name of one \(.*arithmetic.*\), or a section with it"),
    ({"plugins": ["no_such_module"]}, [], r"plugins: 'no_such_module': there is no module 'no_such_module'"),
    ({"plugins": ["no/such/file.py"]}, [], r"plugins: there is no file no/such/file\.py"),
    ({"rewards": {f"{HERE}:missing": 1}}, [], r"module tests\.contract\.test_bad_input has no 'missing'"),
    ({"logs": {"sinks": ["tensorbord"]}}, [], r"unknown sink 'tensorbord'; did you mean 'tensorboard'\?"),
    ({"evaluation": {"keep_best": "acuracy"}}, [], r"evaluation\.keep_best is 'acuracy'; .*Valid: .*reward"),
    ({"early_stop": {"metric": "rewrd", "patience": 1}}, [], r"early_stop\.metric is 'rewrd'; did you mean 'reward'"),
    ({"evaluation": {"split": "train"}}, [], r"evaluation on split 'train', which stage 'train' trains on"),
    ({"evaluation": {"final_split": "train"}}, [], r"evaluation on split 'train', which stage 'train' trains on"),
    ({"evaluation": {"split": "tset"}}, [], r"has no split 'tset'; did you mean 'test'\?"),
    ({"evaluation": {"task": {"name": "topics", "split": "test"}}}, [], r"unknown key 'evaluation\.task\.split'"),
    # overrides
    ({}, ["steps"], r"'steps' is not an override; write key=value, such as steps=20"),
    ({}, ["=3"], r"'=3' is not an override"),
    ({}, ["steps=[1"], r"override steps: '\[1' is not a YAML value"),
    ({}, ["steps=!!int x_"], r"override steps: '!!int x_' is not a YAML value"),
    ({}, ["steps=!!int ''"], r"override steps: .* is not a YAML value"),
    ({}, ["steps.x=1"], r"override steps\.x: 'steps' is a value, not a section"),
    ({"stages": STAGES}, ["stages.rll.steps=3"], r"override stages\.rll\.steps: there is no stage 'rll'; did you"),
    ({"stages": STAGES}, ["stages.2.steps=3"], r"there is no stage '2'"),
    ({"stages": STAGES}, ["stages.rl=3"], r"override stages\.rl: name a key inside the stage"),
    ({"stages": STAGES}, ["stages.².steps=3"], r"there is no stage '²'"),
    ({"sampling": {"stop": ["a"]}}, ["sampling.stop.0=x"], r"'sampling\.stop' is a list; write all of it, such as sa"),
    ({}, ["early_stop.metric=reward"], r"early_stop never stops anything"),
    ({}, ["task.prompt_suffix=Write #### and \"it\""], r"begins .*'task\.prompt_suffix=\"Write #### and \\\\?\"it"),
    ({}, ["task.prompt_suffix=#x"], r"comment begins at the last ' #'; for a text, write 'task\.prompt_suffix=\"#x\"'"),
    ({}, ["task={name: arithmetic} # sums"], r"override task: in YAML a comment begins"),
    ({"stages": [{"steps": 1}, {"name": "b", "steps": 2}]}, ["steps=5"], r"override steps: every s"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "overrides", "sentence"), WRONG_RECIPES, ids=[case[2][:50] for case in WRONG_RECIPES]
)
def test_a_wrong_recipe_is_told_in_a_sentence(
    changes: dict[str, Any],
    overrides: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", **changes)
    said = complaint(capsys, "train", recipe, f"out={tmp_path / 'run'}", *overrides)
    assert re.search(sentence, said), said


# the text of the file, what the sentence must say
WRONG_FILES = {
    "a key given twice": (
        "steps: 1\nseed: 0\nsteps: 2\n",
        r"recipe\.yaml:3: not valid YAML: the key 'steps' is given tw",
    ),
    "half a surrogate pair": (
        'task: {name: arithmetic,\n  system_prompt: "\\uDFFF"}\n',
        r"recipe\.yaml:2: not valid YAML: half of a surrogate pair is no character",
    ),
    "half a surrogate pair as a key": ('"\\ud800": 1\n', r"recipe\.yaml:1: not valid YAML: half of a surrogate pair"),
    "twice in a section": ("task: {name: a,\n  size: 1, size: 2}\n", r"recipe\.yaml:2: .*'size' is given twice"),
    "malformed": ("steps: 1\ntask: [1, 2\nseed: 3\n", r"recipe\.yaml:3: not valid YAML"),
    "a tab": ("task:\n\tname: a\n", r"recipe\.yaml:2: not valid YAML: .*cannot start any token"),
    "a control character": ("task: \x00\n", r"recipe\.yaml: not valid YAML: unacceptable character"),
    "no such date": ("task: 2025-02-30\n", r"recipe\.yaml: not valid YAML: day is out of range"),
    "a key that is a list": ("[1, 2]: 3\n", r"recipe\.yaml:1: not valid YAML: found unhashable key"),
    "endless nesting": ("[" * 5000, r"recipe\.yaml:1: not valid YAML: it is more than 50 levels deep"),
    "deep nesting": ("steps: 1\nx: " + "[" * 60 + "]" * 60, r"recipe\.yaml:2: not valid YAML: it is more than 50"),
    "no whole number": ("steps: !!int ''\n", r"recipe\.yaml:1: not valid YAML: this is no int"),
    "no date": ("seed: 1\nsteps: !!timestamp x\n", r"recipe\.yaml:2: not valid YAML: this is no timestamp"),
    "no truth": ("steps: !!bool x\n", r"recipe\.yaml:1: not valid YAML: this is no bool"),
    "code": (
        "task: !!python/object/apply:os.getcwd []\n",
        r"recipe\.yaml:1: not valid YAML: could not determine a cons",
    ),
    "a list": ("- 1\n- 2\n", r"recipe\.yaml: a recipe is a mapping of keys to values; not list"),
    "nothing": ("# steps: 3\n", r"recipe\.yaml: a recipe is a mapping of keys to values; it is empty"),
    "another encoding": (b"task: caf\xe9\n", r"recipe\.yaml is not a readable YAML file: .*utf-8"),
    "a number for a key": ("1: 2\ntask: arithmetic\n", r"unknown key '1'"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_malformed_file_is_told_with_its_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, sentence = WRONG_FILES[name]
    (tmp_path / "recipe.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    said = complaint(capsys, "train", tmp_path / "recipe.yaml")
    assert re.search(sentence, said), said


def test_a_recipe_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "train", tmp_path / "a.yaml") == f"there is no recipe {tmp_path / 'a.yaml'}"
    assert "is a folder without a recipe.yaml, so it is no run" in complaint(capsys, "train", tmp_path)
    for verb in ("eval", "generate", "check"):
        assert complaint(capsys, verb, tmp_path / "a.yaml").startswith("there is no recipe")


def test_a_recipe_that_is_wrong_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", task={"name": "jsonl", "path": str(tmp_path / "no.jsonl")})
    complaint(capsys, "train", recipe, f"out={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- data


def row(prompt: str, references: list[str] | None = None) -> str:
    return json.dumps({"prompt": prompt, "references": ["1"] if references is None else references}) + "\n"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"task\.path: there is no file or folder .*data\.jsonl"),
        ("", r"task 'jsonl' has no examples in split 'train'"),
        (row("a") + "{'prompt': 1}\n", r"data\.jsonl:2: not valid JSON"),
        (row("a") + "\n" + row("b") + '{"promt": "c"}\n', r"data\.jsonl:4: there is no column 'prompt'; did you mean"),
        (row("a") + row(""), r"data\.jsonl:2: column 'prompt' must hold a text"),
    ],
)
def test_data_that_cannot_be_read(
    content: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    recipe = runs.write(tmp_path / "recipe.yaml", task={"name": "jsonl", "path": str(path)})
    said = complaint(capsys, "train", recipe, f"out={tmp_path / 'run'}")
    assert re.search(sentence, said), said


@pytest.mark.parametrize(
    ("prompt", "reference", "algorithm", "sentence"),
    [
        (
            "x" * 200,
            "1",
            "reinforce",
            r"the prompt, with one token of an answer, of example 'data/3' have 202 tokens, and",
        ),
        (
            "x" * 200,
            "1",
            "supervised",
            r"the prompt and reference of example 'data/3' have 203 tokens, and the model re",
        ),
        (
            "x",
            "1" * 200,
            "supervised",
            r"the prompt and reference of example 'data/3' have 203 tokens, and the model re",
        ),
        ("x", "1" * 200, "reinforce", ""),
        ("x" * 126, "1", "reinforce", ""),  # 127 with BOS, of 128
    ],
)
def test_a_text_longer_than_the_context_is_named_before_anything_starts(
    prompt: str, reference: str, algorithm: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text(row("a") + row("b") + row(prompt, [reference]) + row("c"))
    (tmp_path / "test.jsonl").write_text(row("t"))
    task = {"name": "jsonl", "path": str(tmp_path / "data.jsonl"), "test_path": str(tmp_path / "test.jsonl")}
    recipe = runs.write(tmp_path / "recipe.yaml", task=task, algorithm=algorithm, steps=1)
    command = ["train", recipe, f"out={tmp_path / 'run'}"]
    if not sentence:
        assert main([str(word) for word in command]) == 0
        return
    said = complaint(capsys, *command)
    assert re.search(sentence, said) and "128 at most" in said, said
    assert not (tmp_path / "run").exists()


def test_a_reference_is_needed_to_imitate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", task="topics", algorithm="supervised")
    said = complaint(capsys, "train", recipe, f"out={tmp_path / 'run'}")
    assert re.search(r"example topics/train/\d+ has no reference answer to imitate", said), said


# ---------------------------------------------------------------- rewards


def raises(texts: list[str], examples: list[Example]) -> list[float]:
    raise ValueError("the sky fell\nin two lines")


def not_a_number(texts: list[str], examples: list[Example]) -> list[float]:
    return [math.nan for _ in texts]


def too_few(texts: list[str], examples: list[Example]) -> list[float]:
    return [1.0 for _ in texts][1:]


def words_for_numbers(texts: list[str], examples: list[Example]) -> list[Any]:
    return ["good" for _ in texts]


def nothing(texts: list[str], examples: list[Example]) -> None:
    return None


def sleeps(texts: list[str], examples: list[Example]) -> list[float]:
    time.sleep(60)
    return [0.0 for _ in texts]


def loops(texts: list[str], examples: list[Example]) -> list[float]:
    while True:
        pass


def backtracks(texts: list[str], examples: list[Example]) -> list[float]:
    return [float(re.match("(a|a)*b", "a" * 60) is not None) for _ in texts]


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ("raises", r"raised ValueError: the sky fell at .*test_bad_input\.py:\d+"),
        ("not_a_number", r"returned nan for example 'arithmetic/test/0' .*; it must be finite"),
        ("too_few", r"returned 7 values for 8 episodes"),
        ("words_for_numbers", r"returned 'good' for example .*; it must be a number"),
        ("nothing", r"returned NoneType; it must return a list of one number per episode"),
        ("sleeps", r"did not return within 0\.2 s for 1 episodes at .*test_bad_input\.py:\d+"),
        ("loops", r"did not return within 0\.2 s"),
        ("backtracks", r"did not return within 0\.2 s"),
    ],
)
def test_a_reward_that_fails_is_named(
    reward: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", rewards={f"{HERE}:{reward}": 1.0}, reward_timeout=0.2)
    said = complaint(capsys, "train", recipe, f"out={tmp_path / 'run'}")
    assert re.search(f"reward '{HERE}:{reward}' {sentence}", said), said


# ---------------------------------------------------------------- models


def model_folder(folder: Path) -> Path:
    """A whole, tiny model."""
    tokenizer = byte_tokenizer()
    builtin_model("builtin:tiny", tokenizer, runs.ARCHITECTURE, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def without_eos(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def half_of_the_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 9000)


def weights_without_their_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 20)


def weights_of_another_kind(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 9000)


def pointer(folder: Path, name: str = "model.safetensors") -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 538090408\n")


def tokenizer_as_pointer(folder: Path) -> None:
    pointer(folder, "tokenizer.json")


def in_parts(folder: Path) -> None:
    """The weights in two files, and an index of them."""
    tensors, placed = load_file(folder / "model.safetensors"), {}
    for part in range(2):
        name = f"model-0000{part + 1}-of-00002.safetensors"
        own = dict(sorted(tensors.items())[part::2])
        save_file(own, folder / name, metadata={"format": "pt"})
        placed |= dict.fromkeys(own, name)
    without_weights(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def without_a_part(folder: Path) -> None:
    in_parts(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def index_of_nonsense(folder: Path) -> None:
    in_parts(folder)
    (folder / "model.safetensors.index.json").write_text("[]")


def other_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.onnx")


def adapters_alone(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def tokenizer_of_wrong_types(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", model_max_length="long")


def tokenizer_of_nonsense(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{nonsense")


def config_of_nonsense(folder: Path) -> None:
    (folder / "config.json").write_text("{nonsense")


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def of_no_type(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def sizes_that_do_not_fit(folder: Path) -> None:
    edit(folder / "config.json", num_attention_heads=3)


def encoder_decoder_without_weights(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    (folder / "model.safetensors").unlink()


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors: dict[str, Any] = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def tied_and_then_not(folder: Path) -> None:
    edit(folder / "config.json", tie_word_embeddings=False)


def larger_than_its_weights(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=48)


def smaller_than_its_weights(folder: Path) -> None:
    change_tensors(folder, **{"model.layers.1.mlp.up_proj.weight": torch.zeros(32, 16)})


CODE = r"could not load .*asks to run Python code of its own \(auto_map in %s\), and lmgym runs no code"


def code_of_its_own(folder: Path) -> None:
    edit(folder / "config.json", model_type="mine", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    (folder / "code.py").write_text(f"open({str(folder / 'it ran')!r}, 'w')")


def tokenizer_of_its_own_code(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", tokenizer_class="T", auto_map={"AutoTokenizer": ["code.T", "code.T"]})
    (folder / "code.py").write_text(f"open({str(folder / 'it ran')!r}, 'w')")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (without_eos, r"has no end-of-sequence token, .*name one of its tokens with policy\.eos_token"),
        (without_weights, r"could not load .*: it has no weights \(model\.safetensors, or parts"),
        (half_of_the_weights, r"could not load .*: model\.safetensors is cut off \(it has 9,000 of 28,120 bytes\)"),
        (weights_without_their_header, r"model\.safetensors is cut off within its header \(it has 20 bytes\)"),
        (weights_of_another_kind, r"model\.safetensors does not begin as a file of safetensors does"),
        (pointer, r"could not load .*: model\.safetensors is a pointer of Git LFS .*`git lfs pull`"),
        (tokenizer_as_pointer, r"could not load .*: tokenizer\.json is a pointer of Git LFS"),
        (without_a_part, r"could not load .*: model-00002-of-00002\.safetensors is missing, 1 of 2 parts"),
        (index_of_nonsense, r"could not load .*: model\.safetensors\.index\.json holds no JSON object"),
        (other_weights, r"could not load .*: it has no weights .*model\.onnx is for ONNX"),
        (adapters_alone, r"holds LoRA adapters \(adapter_config\.json\) and not the model that they are for; merge"),
        (without_tokenizer, r"could not load .*: it has no tokenizer \(tokenizer\.json,"),
        (tokenizer_of_nonsense, r"could not load .*: tokenizer\.json is no JSON"),
        (config_of_nonsense, r"could not load .*: config\.json is no JSON"),
        (without_config, r"could not load .*: it has no config\.json"),
        (of_no_type, r"could not load .*: its config\.json names no model_type"),
        (tokenizer_of_wrong_types, r"could not load"),
        (sizes_that_do_not_fit, r"could not load .*hidden size \(16\) is not a multiple"),
        (encoder_decoder_without_weights, r"could not load .*: it has no weights"),
        (code_of_its_own, CODE % r"config\.json"),
        (tokenizer_of_its_own_code, CODE % r"tokenizer_config\.json"),
        (tied_and_then_not, r"lack 1 tensor \(lm_head\.weight\), .*or name in policy\.new_weights what is to begin as"),
        (
            larger_than_its_weights,
            r"hold 3 tensors \(model\.layers\.0\.mlp\.down_proj\.weight, .*\) in another shape",
        ),
        (smaller_than_its_weights, r"hold 1 tensor \(.*\) that the model lacks, .* in policy\.unused_weights what"),
    ],
)
def test_a_model_folder_that_cannot_be_trained(
    spoil: Any, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))  # whoever asks on the terminal is told yes
    spoil(model_folder(tmp_path / "model"))
    recipe = runs.write(tmp_path / "recipe.yaml", policy={"model": str(tmp_path / "model"), "device": "cpu"})
    said = complaint(capsys, "train", recipe, f"out={tmp_path / 'run'}")
    assert said.startswith("policy.model: ") and str(tmp_path / "model") in said
    assert re.search(sentence, said), said
    assert not (tmp_path / "model" / "it ran").exists()


@pytest.mark.parametrize(
    ("spoil", "key", "names", "drawn"),
    [
        (tied_and_then_not, "new_weights", ["lm_head"], ["lm_head.weight"]),
        (larger_than_its_weights, "new_weights", ["model.layers.0.mlp."], ["model.layers.0.mlp.up_proj.weight"]),
        (smaller_than_its_weights, "unused_weights", ["model.layers.1"], []),
    ],
)
def test_a_recipe_may_say_which_weights_are_new_or_unused(
    spoil: Any, key: str, names: list[str], drawn: list[str], tmp_path: Path
) -> None:
    """New ones are a function of the seed, the others are the file's, and a checkpoint holds them all."""
    folder = model_folder(tmp_path / "model")
    spoil(folder)
    section = PolicySection(**{"model": str(folder), "device": "cpu", key: names})
    first, again, other = (load_policy(section, seed).model.state_dict() for seed in (0, 0, 1))
    kept = load_file(folder / "model.safetensors")
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if name in drawn:
            assert not torch.equal(tensor, other[name])
        elif name in kept and kept[name].shape == tensor.shape:
            assert torch.equal(tensor, kept[name]) and torch.equal(tensor, other[name])
    load_policy(section).save(tmp_path / "checkpoint")
    back = load_policy(section, 1, tmp_path / "checkpoint").model.state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in first.items())


def test_a_weight_that_is_there_is_not_new(tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=r"^policy.new_weights: with policy.lora_rank only adapters train"):
        PolicySection(model="some/model", lora_rank=4, new_weights=["lm_head"])
    section = PolicySection(model=str(model_folder(tmp_path)), device="cpu", new_weights=["lm_head"])
    with pytest.raises(LmgymError, match=r"^policy.new_weights: no tensor whose name begins with 'lm_head' is missing"):
        load_policy(section)


def test_what_older_files_hold_of_masks_is_left_out(tmp_path: Path) -> None:
    names = ("attn.bias", "attn.masked_bias", "rotary_emb.inv_freq")
    change_tensors(model_folder(tmp_path), **{f"model.layers.0.{name}": torch.zeros(1) for name in names})
    load_policy(PolicySection(model=str(tmp_path), device="cpu"))


@pytest.mark.parametrize("tensors", [None, {"bias": torch.zeros(1)}, {"weight": torch.zeros(1, 3)}])
def test_a_value_head_of_something_else_is_named(tensors: dict[str, torch.Tensor] | None, tmp_path: Path) -> None:
    section = PolicySection(model="builtin:tiny", device="cpu", architecture=runs.ARCHITECTURE)
    policy = load_policy(section)
    policy = with_critic(policy, separate=False)
    policy.save(tmp_path)
    load_policy(section, 0, tmp_path)
    if tensors is None:
        os.truncate(tmp_path / "value_head.safetensors", 20)
    else:
        save_file(tensors, tmp_path / "value_head.safetensors")
    with pytest.raises(LmgymError, match=rf"^{tmp_path}/value_head.safetensors is not the value head of this model \("):
        load_policy(section, 0, tmp_path)


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (
            {"model": "nobody/no-such-model"},
            r"policy\.model: could not load 'nobody/no-such-model': not a model folder",
        ),
        ({"model": "no/such/folder"}, r"policy\.model: could not load 'no/such/folder'"),
        ({"eos_token": "<end>"}, r"policy\.eos_token: '<end>' is not in the vocabulary of builtin:tiny"),
        (
            {"architecture": {"hidden_size": 18, "num_attention_heads": 4}},
            r"policy\.architecture: .*hidden size \(18\)",
        ),
        ({"model": "gpt2", "architecture": {"hidden_size": 18}}, r"policy\.architecture changes built-in models only"),
        pytest.param(
            {"device": "cuda"},
            r"policy\.device: there is no cuda device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA"),
        ),
    ],
)
def test_a_model_that_is_not_there(
    policy: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", policy={"device": "cpu", **policy})
    said = complaint(capsys, "train", recipe, f"out={tmp_path / 'run'}")
    assert re.search(sentence, said), said


def encoder_decoder_folder(folder: Path) -> Path:
    """The configuration and tokenizer of a T5, without any weight: what is said of it was said before one is loaded."""
    tokenizer = byte_tokenizer()
    builtin_model("builtin:tiny_t5", tokenizer, {"num_layers": 1}, seed=0).config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


CHAT = {**runs.TINY["task"], "system_prompt": "Add."}


@pytest.mark.parametrize(
    ("policy", "task", "sentence"),
    [
        (
            {},
            CHAT,
            r"example 'arithmetic/train/0' is a chat of several messages, .* is an encoder-decoder without a chat",
        ),
        (
            {"context_start_token": "<extra>"},
            None,
            r"policy\.context_start_token: '<extra>' is not in the vocabulary of",
        ),
        ({"context_start_token": 259}, None, r"policy\.context_start_token: 259 is not in the vocabulary of"),
        ({}, None, r"policy\.model: could not load"),
    ],
)
def test_an_encoder_decoder_that_does_not_fit_the_recipe(
    policy: dict[str, Any],
    task: dict[str, Any] | None,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = encoder_decoder_folder(tmp_path / "model")
    policy = {"model": str(folder), "device": "cpu", **policy}
    recipe = runs.write(tmp_path / "recipe.yaml", policy=policy, task=task or runs.TINY["task"])
    said = complaint(capsys, "train", recipe, f"out={tmp_path / 'run'}")
    assert re.search(sentence, said), said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (
            {"context_start_token": 5},
            r"policy\.context_start_token is for encoder-decoder models, and builtin:tiny is a ca",
        ),
        ({"lora_rank": 4, "lora_targets": ["q_prj"]}, r"policy\.lora_targets: .*q_prj"),
    ],
)
def test_a_policy_section_that_does_not_fit_the_model(
    policy: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", policy={**runs.TINY["policy"], **policy})
    said = complaint(capsys, "train", recipe, f"out={tmp_path / 'run'}")
    assert re.search(sentence, said), said
    assert not (tmp_path / "run").exists()


def test_a_kept_set_larger_than_the_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = {"model": str(encoder_decoder_folder(tmp_path / "model")), "device": "cpu"}
    algorithm = {"name": "nlpo", "min_tokens_to_keep": 260}
    recipe = runs.write(tmp_path / "recipe.yaml", policy=policy, algorithm=algorithm)
    said = complaint(capsys, "train", recipe, f"out={tmp_path / 'run'}")
    assert said.startswith("algorithm.min_tokens_to_keep is 260, and the model's vocabulary has 259 tokens"), said


# ---------------------------------------------------------------- run folders


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmgym.training.evaluation_points.training_plot", lambda metrics, plot: plot)
        return runs.run(tmp_path_factory.mktemp("bad_input") / "run", steps=3, checkpoint={"every": 1})


@pytest.fixture
def folder(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "run"))


@pytest.mark.slow
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    done: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(runs.newest(folder) / "optimizer.safetensors", 100)
    assert main(["train", str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "stage-0-step-000003 is damaged (optimizer.safetensors has 100 bytes instead of" in said
    assert "falling back to the one before" in said and f"resuming {folder} in stage 1, after step 2" in said
    runs.assert_equal_runs(done, folder)


@pytest.mark.slow
def test_where_every_checkpoint_is_damaged_nothing_is_begun_anew(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (folder / "checkpoints").iterdir():
        (path / "model.safetensors").unlink()
    before = (folder / "metrics.jsonl").read_bytes()
    said = complaint(capsys, "train", folder)
    assert re.search(r"every checkpoint in .*run/checkpoints is damaged .*put a whole one back, or delete", said), said
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_other_damage_in_a_run_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text("{broken\n" + metrics)
    assert "metrics.jsonl line 1: this is no record" in complaint(capsys, "train", folder)
    (folder / "metrics.jsonl").write_text(metrics)
    (folder / "machine.json").write_text("{")
    assert "machine.json is damaged" in complaint(capsys, "train", folder)
    (folder / "machine.json").unlink()
    shutil.rmtree(folder / "checkpoints")
    shutil.rmtree(folder / "final")
    assert "holds no model yet" in complaint(capsys, "eval", folder)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("metrics.jsonl", r'"reward": [^,]+,', '"reward": "high",'),
        ("metrics.jsonl", r'"count": [^,]+,', '"size": 8,'),
        ("metrics.jsonl", r'"reward": [^,]+,', f'"reward": 1{"0" * 400},'),  # no float can hold it
        ("summary.json", r'"newest"', '"oldest"'),
        ("summary.json", r"(?s).*", "[" * 200_000),
    ],
)
def test_records_that_no_run_writes_are_not_exported(
    name: str, before: str, after: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(folder / "checkpoints")
    changed, count = re.subn(before, after, (folder / name).read_text())
    assert count
    (folder / name).write_text(changed)
    said = complaint(capsys, "export", folder, "--to", folder.parent / "model")
    assert re.search(r"run: metrics\.jsonl or summary\.json holds something else than a run writes \(.*; p", said)
    assert not (folder.parent / "model").exists()


@pytest.mark.timeout(60)  # it hung for ever
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pipe_in_a_model_folder_is_no_endless_wait(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(folder / "checkpoints")
    (folder / "final" / name).unlink()
    os.mkfifo(folder / "final" / name)
    said = complaint(capsys, "generate", folder, "--prompt", "1+1=")
    assert f"policy.model: {folder / 'final' / name} is a pipe or a device, not a file" in said
    assert "is damaged" in complaint(capsys, "export", folder, "--to", folder.parent / "model")


class Moves(Callback):
    """Moves the run's folder away after a step or at an evaluation; `anew` puts another run's in its place."""

    def __init__(self, folder: str, at: int, where: str, anew: bool) -> None:
        self.folder, self.at, self.where, self.anew = Path(folder), at, where, anew

    def move(self) -> None:
        self.folder.rename(self.folder.with_name("moved"))
        if self.anew:
            lock_folder(self.folder, print).close()

    def on_step(self, end: StepEnd) -> None:
        if self.where == "step" and end.step == self.at:
            self.move()

    def on_evaluation(self, end: EvaluationEnd) -> None:
        if self.where == "evaluation" and end.step == self.at:
            self.move()


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize(("where", "at"), [("step", 1), ("evaluation", 3), ("evaluation", 6)])
def test_a_run_whose_folder_is_moved_ends_and_goes_on_where_it_is(
    where: str, at: int, anew: bool, tmp_path: Path
) -> None:
    """And writes nothing more: neither a second folder, nor into another run's."""
    folder = tmp_path / "run"
    moves = {f"{__name__}:Moves": {"folder": str(folder), "at": at, "where": where, "anew": anew}}
    with pytest.raises(LmgymError, match="was moved, replaced or deleted while its run trained"):
        runs.run(folder, callbacks=moves, checkpoint={"every": 1})
    assert [path.name for path in folder.rglob("*")] == ([".lock"] if anew else [])
    assert main(["train", str(tmp_path / "moved"), "callbacks={}"]) == 0
    whole = runs.run(tmp_path / "whole", checkpoint={"every": 1})
    final = "final/model.safetensors"
    assert (tmp_path / "moved" / final).read_bytes() == (whole / final).read_bytes()


@pytest.mark.slow
def test_the_home_folder_in_a_recipe(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the paths of data; in a key no shell puts it in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    shutil.copytree(done / "final", tmp_path / "home" / "model")
    recipe = runs.write(tmp_path / "recipe.yaml", policy={"model": "~/model", "device": "cpu"}, steps=1)
    assert main(["train", str(recipe), "out=~/one"]) == 0
    assert main(["train", str(recipe), "out=~/both", "runs.seeds=[0,1]"]) == 0
    assert (tmp_path / "home" / "one" / "final").is_dir() and (tmp_path / "home" / "both" / "seed-1").is_dir()
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("name", [".lock", "rollouts.jsonl"])
@pytest.mark.timeout(60)  # it hung for ever
def test_a_pipe_in_the_run_folder_is_no_endless_wait(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if main(["train", str(folder), "steps=4"]) == 1:
        assert re.search(r"run.*: cannot be written \(No such device", capsys.readouterr().err)
    else:  # the records are written anew
        assert name == "rollouts.jsonl" and (folder / name).is_file()


def test_stages_that_are_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [{"name": "one", "steps": 1}, {"name": "two", "steps": 1}]
    folder = runs.run(tmp_path / "run", stages=stages)
    tree = yaml.safe_load((folder / "recipe.yaml").read_text())
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree | {"stages": tree["stages"][:1]}))
    assert re.search(r"run is in its stage 2, and the recipe has 1", complaint(capsys, "train", folder))


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").write_text("a file")
    recipe = runs.write(tmp_path / "recipe.yaml")
    assert re.search(
        r"run: cannot be written \(File exists\)", complaint(capsys, "train", recipe, f"out={tmp_path}/run")
    )


# ---------------------------------------------------------------- the disk

FULL_DISK = """
import hashlib, subprocess, sys
import lmgym.training.evaluation_points
from lmgym.cli.main import main
lmgym.training.evaluation_points.training_plot = lambda metrics, plot: plot
disk, recipe, sizes = sys.argv[1], sys.argv[2], sys.argv[3:]
for size in sizes:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk], check=True)
    full = main(["train", recipe, f"out={disk}/run"])
    subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
    again = main(["train", recipe, f"out={disk}/run"])
    with open(f"{disk}/run/final/model.safetensors", "rb") as file:
        model = hashlib.sha256(file.read()).hexdigest()
    with open(f"{disk}/run/rollouts.jsonl", "rb") as file:
        rollouts = hashlib.sha256(file.read()).hexdigest()
    print("result", full, again, model, rollouts)
    subprocess.run(["umount", disk], check=True)
"""


def has_small_disks(folder: Path) -> bool:
    """True if a user may mount a tmpfs in a namespace of their own here."""
    command = f"mount -t tmpfs -o size=4k tmpfs {folder}"
    return bool(shutil.which("unshare")) and not subprocess.run(["unshare", "-rm", "sh", "-c", command]).returncode


@pytest.mark.processes
@pytest.mark.slow
def test_a_full_disk_is_told_and_with_more_space_the_run_goes_on(tmp_path: Path) -> None:
    """Real disks of 40 to 400 KiB, which fill up in the first checkpoint, in a later one, in a log, at the end."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not has_small_disks(disk):
        pytest.skip("needs unshare and tmpfs (Linux)")
    recipe = runs.write(tmp_path / "recipe.yaml", checkpoint={"every": 1})
    sizes = [str(size) for size in range(40, 440, 40)]
    command = ["unshare", "-rm", sys.executable, "-c", FULL_DISK, str(disk), str(recipe), *sizes, "5000"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=runs.ROOT)
    results = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("result")]
    assert len(results) == len(sizes) + 1, done.stderr
    statuses = [result[0] for result in results]
    assert statuses[0] == "1" and statuses[-1] == "0" and statuses.count("1") >= 4
    assert {tuple(result[1:]) for result in results} == {tuple(results[-1][1:])} and results[-1][1] == "0"
    sentences = [line for line in done.stderr.splitlines() if line.startswith("lmgym: ")]
    assert len(sentences) == statuses.count("1") and "Traceback" not in done.stderr
    for sentence in sentences:
        assert re.search(r"lmgym: \S+/run\S*: the disk is full \(No space left on device\); free some space", sentence)
