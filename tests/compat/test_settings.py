"""Configurations of TRL, open-r1, verl, OpenRLHF and NeMo RL: read as text, every key taken over or named."""

import ast
import json
import random
import re
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lmgym.cli.main import main
from lmgym.compat.settings.files import SYSTEMS, TABLES, converted
from lmgym.compat.settings.read import read, value_of
from lmgym.compat.settings.recipe import HOW
from lmgym.compat.settings.settings import Code, scalar
from lmgym.compat.settings.shell import Script
from lmgym.config.schema import Config, Stage
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.rewards.foreign.openrlhf import lists_of
from lmgym.rewards.views import as_sequence
from lmgym.tasks.base import load_task
from lmgym.types import Episode, Turn
from tests.runs import records

TRL = """
from my_rewards import close as far
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
LENGTH = 512
SYSTEM = "Think " "first."


def close(completions, answer, **kwargs):
    return [0.0 for _ in completions]


def as_chat(row):
    return {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["problem"]}]}


data = load_dataset("org/problems", split="train[:5%]").map(as_chat)
args = GRPOConfig(
    output_dir="out", learning_rate=2e-6, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    num_generations=4, max_completion_length=LENGTH, loss_type="dr_grpo", scale_rewards=False, max_steps=40,
    steps_per_generation=4, epsilon_high=0.3, warmup_ratio=0.1, optim="adamw_8bit", sync_ref_model=True,
)
trainer = GRPOTrainer(model="org/model", args=args, train_dataset=data, reward_funcs=[close, far, accuracy_reward])
"""
OPEN_R1 = """
model_name_or_path: org/model
dataset_name: org/problems
dataset_prompt_column: problem
system_prompt: Answer briefly.
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
num_train_epochs: 2
num_generations: 8
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
reward_funcs: [accuracy, tag_count]
reward_weights: [1.0, 0.5]
"""
VERL = """#!/bin/bash
n=8
prompt=$((1024 * 2))   # tokens
FILES=(
    data.train_files="['$HOME/a/train.parquet', '$HOME/b/train.parquet']"
    # not this: data.train_files=old.parquet
    data.val_files=$HOME/a/test.parquet
)
MODEL=${MODEL:-"${HOME}/models/Qwen2.5-7B"}
if [ "$#" -gt 1 ]; then
    n=5
fi
python3 -m verl.trainer.main_ppo "${FILES[@]}" \\
    algorithm.adv_estimator=grpo \\
    data.train_batch_size=512 data.max_prompt_length=${prompt} data.max_response_length=1024 \\
    actor_rollout_ref.model.path="${MODEL}" \\
    actor_rollout_ref.rollout.n=$n \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=mse \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=256 \\
    custom_reward_function.path=scores/mine.py custom_reward_function.name=score \\
    trainer.n_gpus_per_node=8 trainer.total_epochs=15 trainer.new_key=3 $@
"""
OPENRLHF = """
read -r -d '' command <<EOF
openrlhf.cli.train_ppo_ray \\
   --pretrain org/model \\
   --remote_rm_url /here/reward_func.py \\
   --advantage_estimator group_norm \\
   --n_samples_per_prompt 8 --rollout_batch_size 128 --train_batch_size 256 \\
   --eps_clip_low_high 0.2 0.27 \\
   --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 \\
   --prompt_data org/prompts --input_key question --label_key answer --apply_chat_template \\
   --generate_max_len 512 --num_episodes 2
EOF
deepspeed --module $command
"""
NEMO_BASE = """
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  max_num_steps: 1000000
  max_num_epochs: 1
  normalize_rewards: true
  use_leave_one_out_baseline: true
policy:
  model_name: org/base
  max_total_sequence_length: 512
  train_global_batch_size: 512
  generation: {max_new_tokens: "${policy.max_total_sequence_length}", temperature: 1.0}
  scheduler:
    - name: torch.optim.lr_scheduler.LinearLR
      kwargs: {total_iters: 50}
loss_fn: {ratio_clip_min: 0.2, ratio_clip_max: 0.2, reference_policy_kl_penalty: 0.0}
data: {train: {dataset_name: DeepScaler}, default: {env_name: math}}
"""
NEMO = """
defaults: base.yaml
grpo: {num_prompts_per_step: 128, num_generations_per_prompt: 8, max_num_steps: 500}
policy: {train_global_batch_size: 256}
"""
FILES = {
    "trl": ("grpo.py", TRL),
    "open-r1": ("config.yaml", OPEN_R1),
    "verl": ("run.sh", VERL),
    "openrlhf": ("train.sh", OPENRLHF),
    "nemo-rl": ("run.yaml", NEMO),
}


def write(folder: Path, system: str, text: str | None = None) -> Path:
    (folder / "base.yaml").write_text(NEMO_BASE)
    name, usual = FILES[system]
    (folder / name).write_text(usual if text is None else text)
    return folder / name


def recipe(folder: Path, system: str, text: str | None = None, devices: int | None = None) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(converted(system, write(folder, system, text), devices)[0])
    return tree


def of_script(folder: Path, text: str) -> tuple[dict[str, Any], str]:
    """The recipe of a script whose name says nothing of its trainer, and what is said about it."""
    (folder / "script.py").write_text(text)
    printed, _ = converted("trl", folder / "script.py")
    return yaml.safe_load(printed), re.sub(r"\n#\s+", " ", printed)


def test_trl_script(tmp_path: Path) -> None:
    text, obstacles = converted("trl", write(tmp_path, "trl"), devices=8)
    tree = yaml.safe_load(text)
    assert tree["policy"] == {"model": "org/model", "activation_checkpointing": True}
    assert tree["algorithm"] == {
        "name": "grpo", "group_size": 4, "surrogate": {"high": 0.3}, "credit": {"scale": "none"}, "reduction": "limit",
        "minibatches": 2,
    }  # fmt: skip
    # 4 a device, 8 devices, 4 steps per generation are 128 answers, 4 of a prompt; 40 updates are 20 steps of 2.
    assert (tree["prompts_per_step"], tree["steps"]) == (32, 20)
    assert tree["optimizer"] == {
        "schedule": "linear", "weight_decay": 0.0, "learning_rate": 2e-6, "warmup_ratio": 0.1
    }  # fmt: skip
    assert tree["task"] == {
        "name": "data", "hub_id": "org/problems", "splits": {"train": "train[:5%]"}, "prompt": "problem",
        "prompts": "chat", "references": None, "system_prompt": "Think first.",
    }  # fmt: skip
    assert tree["rewards"] == {"grpo_rewards:close": 1.0, "my_rewards:close": 1.0, "trl.rewards:accuracy_reward": 1.0}
    assert any(one.startswith("close: copy it (line 10)") for one in obstacles)
    assert "sync_ref_model = True (line 22): the reference stays as it is" in text
    assert re.search(r"\n  max_new_tokens: 512 +# max_completion_length, line 21\n", text)


def test_open_r1_yaml(tmp_path: Path) -> None:
    tree = recipe(tmp_path, "open-r1", devices=8)
    assert (tree["prompts_per_step"], tree["epochs"]) == (16 * 8 * 4 // 8, 2)
    assert tree["rewards"] == {"open_r1.rewards:accuracy_reward": 1.0, "open_r1.rewards:tag_count_reward": 0.5}
    assert tree["optimizer"]["schedule"] == "cosine" and tree["optimizer"]["final_fraction"] == 0.1
    assert tree["algorithm"]["credit"] == {"scale": "group"} and tree["algorithm"]["surrogate"] == {"high": 0.2}
    assert tree["task"]["prompt"] == "problem" and tree["task"]["prompts"] == "chat"


def test_mixture_of_open_r1(tmp_path: Path) -> None:
    """There a weight is the part of a data set that is kept; what is kept is joined, and an epoch has each row once."""
    mixture = """
dataset_mixture:
  datasets:
    - {id: org/maths, config: default, split: extended, columns: [problem], weight: 0.5}
    - {id: org/other}
    - {id: org/none, weight: 0}
"""
    file = OPEN_R1.replace("dataset_name: org/problems\n", mixture).replace("system_prompt: Answer briefly.\n", "")
    text, obstacles = converted("open-r1", write(tmp_path, "open-r1", file))
    task = yaml.safe_load(text)["task"]
    usual = {"name": "data", "weight": "rows", "prompt": "problem", "prompts": "chat", "references": None}
    maths = {"config": "default", "share": 0.5, "splits": {"train": "extended"}}
    assert task == {"name": "mixture", "tasks": [
        {**usual, "label": "maths 1", "hub_id": "org/maths", **maths},
        {**usual, "label": "other 2", "hub_id": "org/other"},
    ]}  # fmt: skip
    assert not obstacles and "a tenth of data" in text and "not those of `columns` alone" in text
    assert "No counterpart" not in text
    file = file.replace("    - {id: org/none, weight: 0}\n", "  test_split_size: 0.25\n")
    text, _ = converted("open-r1", write(tmp_path, "open-r1", file))
    task = yaml.safe_load(text)["task"]
    assert [one["test"] for one in task["tasks"]] == [0.25, 0.25] and "a tenth of data" not in text
    for one, split in zip(task["tasks"], ("extended", "train"), strict=True):  # the Hub's data as files here
        folder = tmp_path / one.pop("hub_id")
        folder.mkdir(parents=True)
        rows = (json.dumps({"problem": f"{split} {number}?"}) for number in range(40))
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
        one.pop("config", None)
        one |= {"path": str(folder), "test": 0.0}
    examples = load_task(task.pop("name"), "train", **task)
    counts = {label: sum(one.meta["task"] == label for one in examples) for label in ("maths 1", "other 2")}
    assert counts == {"maths 1": 20, "other 2": 40} == examples[0].meta["mixture"]
    prompts = [one.prompt for one in examples if one.meta["task"] == "maths 1"]
    assert {prompt[0]["content"].split()[0] for prompt in prompts if not isinstance(prompt, str)} == {"extended"}


def test_verl_overrides(tmp_path: Path) -> None:
    text, obstacles = converted("verl", write(tmp_path, "verl"))
    tree = yaml.safe_load(text)
    assert obstacles == []
    assert tree["policy"] == {"model": "~/models/Qwen2.5-7B", "activation_checkpointing": True}
    assert tree["task"]["path"] == ["~/a/train.parquet", "~/b/train.parquet"]
    assert tree["task"]["test_path"] == "~/a/test.parquet"
    assert tree["algorithm"] == {
        "name": "grpo", "group_size": 5, "epochs": 1, "surrogate": {"low": 0.2, "high": 0.28, "dual": 3.0},
        "credit": {"scale": "group"}, "minibatches": 4, "kl_coefficient": 0.001, "kl_in": "loss", "kl_estimator": "k2",
    }  # fmt: skip
    assert tree["rewards"] == {"overlong": {"buffer": 256, "weight": 1.0, "max_tokens": 1024}, "mine:score": 1.0}
    assert (tree["prompts_per_step"], tree["epochs"], tree["checkpoint"]["every"]) == (512, 15, 0)
    assert "n depends on a condition of the script; read as '5'" in text
    assert "trainer.new_key" in text and "data.max_prompt_length = 2048" in text
    assert "data.train_files, line 5" in text


def test_verl_ppo_with_a_kl_in_the_reward(tmp_path: Path) -> None:
    script = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True \\
        algorithm.kl_penalty={} algorithm.kl_ctrl.kl_coef=0.002 data.train_files=a.parquet"""
    for form, said in (("kl", False), ("low_var_kl", True)):
        text, _ = converted("verl", write(tmp_path, "verl", script.format(form)))
        tree = yaml.safe_load(text)
        assert tree["algorithm"] | {"kl_in": "reward", "kl_coefficient": 0.002} == tree["algorithm"]
        assert ("(k1) here" in text) is said


def test_openrlhf_flags(tmp_path: Path) -> None:
    tree = recipe(tmp_path, "openrlhf")
    assert tree["algorithm"] == {
        "name": "grpo", "credit": {"scale": "group"}, "group_size": 8, "epochs": 1, "kl_coefficient": 1e-3,
        "surrogate": {"low": 0.2, "high": 0.27}, "kl_in": "loss", "minibatches": 4,
    }  # fmt: skip
    assert tree["rewards"] == {"reward_func:reward_func": 1.0}
    assert tree["task"]["prompt"] == "question" and tree["task"]["columns"] == {"label": "answer"}
    assert tree["task"]["references"] is None  # a label is given as it stands in the data, a list too
    assert tree["task"]["prompts"] == "chat" and tree["task"]["hub_id"] == "org/prompts"
    assert (tree["prompts_per_step"], tree["epochs"], tree["optimizer"]["betas"]) == (128, 2, [0.9, 0.95])


def test_nemo_rl_over_a_base_file(tmp_path: Path) -> None:
    text, _ = converted("nemo-rl", write(tmp_path, "nemo-rl"))
    tree = yaml.safe_load(text)
    assert tree["policy"] == {"model": "org/base"} and tree["optimizer"] == {"warmup": 50}
    assert tree["algorithm"]["minibatches"] == 128 * 8 // 256 and tree["steps"] == 500
    assert tree["sampling"] == {"max_new_tokens": 512, "temperature": 1.0}
    assert tree["rewards"] == {"math_equal": 1.0} and tree["task"]["references"] == "answer"
    assert "use_leave_one_out_baseline = True (line 8 of base.yaml): the mean of the whole group here" in text


def test_distillation_of_trl(tmp_path: Path) -> None:
    """TRL's divergence lies between the two KLs, which are its ends; the data are messages."""

    def of(arguments: str) -> dict[str, Any]:
        script = f"GKDTrainer(model='org/small', teacher_model='org/big', args=GKDConfig({arguments}))"
        return of_script(tmp_path, script)[0]

    usual = {"name": "gkd", "teacher": "org/big", "divergence": "jsd"}
    assert of("lmbda=0.4, beta=0.1")["algorithm"] == usual | {"student_share": 0.4, "beta": 0.1}
    tree = of("")
    assert tree["algorithm"] == usual | {"student_share": 0.5}
    assert tree["sampling"] == {"max_new_tokens": 128, "temperature": 0.9}
    assert (tree["task"]["prompt"], tree["task"]["references"]) == ("messages.:-1", "messages.-1.content")
    for end, name in ((0, "forward_kl"), (0.0, "forward_kl"), (1, "reverse_kl"), (1.0, "reverse_kl")):
        assert of(f"beta={end}, lmbda=1")["algorithm"] == usual | {"divergence": name, "student_share": 1}
    sampled, _ = of_script(tmp_path, "OnlineDPOTrainer(model='a/b', args=OnlineDPOConfig(), reward_funcs='c/d')")
    assert sampled["sampling"] == {"max_new_tokens": 64, "temperature": 0.9}
    sampled = recipe(
        tmp_path, "trl", "OnlineDPOTrainer(model='a/b', args=OnlineDPOConfig(max_new_tokens=9, top_p=0.5))"
    )
    assert sampled["sampling"] == {"max_new_tokens": 9, "temperature": 0.9, "top_p": 0.5}


def test_ppo_of_trl(tmp_path: Path) -> None:
    """One cliprange for both sides, and a value loss that TRL halves."""
    script = "PPOTrainer(args=PPOConfig({}), reward_model='c/d')"
    algorithm = of_script(tmp_path, script.format("cliprange=0.3, vf_coef=0.5"))[0]["algorithm"]
    assert (algorithm["clip_low"], algorithm["clip_high"], algorithm["value_coefficient"]) == (0.3, 0.3, 0.25)
    assert of_script(tmp_path, script.format(""))[0]["algorithm"]["value_coefficient"] == 0.05


def test_adapters_of_trl(tmp_path: Path) -> None:
    """A script has peft's defaults, the command line TRL's own."""

    def of(config: str) -> tuple[dict[str, Any], str]:
        tree, said = of_script(tmp_path, f"SFTTrainer(args=SFTConfig(), peft_config={config})")
        return tree["policy"], said

    policy, said = of("LoraConfig(use_rslora=True, r=16, lora_dropout=0.05, modules_to_save=['lm_head'], bias='all')")
    assert (policy["lora_rank"], policy["lora_alpha"]) == (16, 32)  # 32 / 16 is 8 / the root of 16
    assert "lora_targets" not in policy and "peft adapts q_proj and v_proj of most models" in said
    for lost in ("lora_dropout = 0.05", "modules_to_save = ['lm_head']", "bias = all"):
        assert lost in said.partition("No counterpart here:")[2].partition("Differs:")[0]
    policy, said = of("LoraConfig(target_modules=['q_proj'], use_rslora=False, bias='none')")
    assert (policy["lora_rank"], policy["lora_alpha"], policy["lora_targets"]) == (8, 8, ["q_proj"])
    assert "peft adapts" not in said and "No counterpart" not in said
    yamls = {
        "use_peft: true\nlora_target_modules: [all-linear]": (16, 32, "all-linear"),
        "use_peft: false\nlora_r: 4": (),
    }
    for lines, expected in yamls.items():
        policy = recipe(tmp_path, "open-r1", f"{OPEN_R1}{lines}\n")["policy"]
        assert tuple(policy[key] for key in ("lora_rank", "lora_alpha", "lora_targets") if key in policy) == expected


def test_updates_of_trl_are_counted_in_steps(tmp_path: Path) -> None:
    counts = "max_steps: 400\nwarmup_steps: 40\nsave_steps: 100\neval_steps: 50\neval_strategy: steps\n"
    for times, expected in ((4, (100, 10, 25, 13)), (1, (400, 40, 100, 50))):
        text, _ = converted("open-r1", write(tmp_path, "open-r1", f"{OPEN_R1}{counts}num_iterations: {times}\n"))
        tree = yaml.safe_load(text)
        places = (tree["steps"], tree["optimizer"]["warmup"], tree["checkpoint"]["every"], tree["evaluation"]["every"])
        assert places == expected
        assert text.count(", / 4 updates a step") == (4 if times == 4 else 0)
    ratio = recipe(tmp_path, "open-r1", f"{OPEN_R1}num_iterations: 4\nwarmup_ratio: 0.1\n")["optimizer"]
    assert ratio["warmup_ratio"] == 0.1 and "warmup" not in ratio


def test_verl_with_an_adaptive_kl_and_truncated_evaluations(tmp_path: Path) -> None:
    script = """python3 -m verl.trainer.main_ppo data.train_files=a.parquet algorithm.use_kl_in_reward=True \\
        algorithm.kl_ctrl.type={} {} actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \\
        actor_rollout_ref.rollout.val_kwargs.top_k=20 actor_rollout_ref.rollout.val_kwargs.temperature={}"""
    for kind, target, expected in (
        ("fixed", "algorithm.kl_ctrl.target_kl=0.2", None),
        ("adaptive", "algorithm.kl_ctrl.target_kl=0.2 algorithm.kl_ctrl.horizon=500", 0.2),
        ("adaptive", "", 0.1),
    ):
        text, obstacles = converted("verl", write(tmp_path, "verl", script.format(kind, target, 0.6)))
        tree = yaml.safe_load(text)
        assert obstacles == [] and tree["algorithm"].get("kl_target") == expected
        assert ("verl's by answers / horizon of it" in re.sub(r"\n#\s+", " ", text)) is (kind == "adaptive")
        assert tree["evaluation"] == {"every": 0, "temperature": 0.6, "top_p": 0.7, "top_k": 20}
    text, obstacles = converted("verl", write(tmp_path, "verl", script.format("fixed", "", 0)))
    assert obstacles == [] and yaml.safe_load(text)["evaluation"] == {"every": 0, "temperature": 0}


def test_other_keys_with_a_counterpart(tmp_path: Path) -> None:
    for flag, expected in (("--overlong_buffer_len 64", {"buffer": 64, "weight": 0.5, "max_tokens": 512}), ("", None)):
        script = OPENRLHF.replace("--num_episodes", f"{flag} --overlong_penalty_factor 0.5 --num_episodes")
        assert recipe(tmp_path, "openrlhf", script)["rewards"].get("overlong") == expected
    nemo = NEMO.replace("256}", "256, generation: {stop_token_ids: [5, 7]}}")
    assert recipe(tmp_path, "nemo-rl", nemo)["sampling"]["stop_ids"] == [5, 7]


PPO_OF_VERL = """python3 -m verl.trainer.main_ppo data.train_files=a.parquet data.val_files=b.parquet \\
    actor_rollout_ref.model.path=m custom_reward_function.path=r.py actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.rollout.n=8 data.train_batch_size=64 """
PPO_OF_OPENRLHF = """python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --reward.remote_url r.py \\
    --data.prompt_dataset p.jsonl --data.input_key q --rollout.n_samples_per_prompt 8 """


def of_verl(folder: Path, keys: str, script: str = PPO_OF_VERL) -> tuple[dict[str, Any], str]:
    """Convert a script of verl with these keys, where "A." is short for "actor_rollout_ref.actor.". Returns the recipe
    as a tree, and its whole text with the comments. Nothing may be in the way of the conversion."""
    path = write(folder, "verl", script + keys.replace(" A.", " actor_rollout_ref.actor."))
    text, obstacles = converted("verl", path)
    assert obstacles == []
    return yaml.safe_load(text), re.sub(r"\n#\s+", " ", text)


def of_openrlhf(folder: Path, flags: str, trainer: str = "ppo_ray") -> tuple[dict[str, Any], str]:
    text, _ = converted("openrlhf", write(folder, "openrlhf", PPO_OF_OPENRLHF.replace("ppo_ray", trainer) + flags))
    return yaml.safe_load(text), re.sub(r"\n#\s+", " ", text)


@pytest.mark.parametrize(
    ("mode", "surrogate", "reduction"),
    [
        ("gspo", {"low": 0.2, "high": 0.2, "ratio": "sequence"}, "sequence"),
        ("sapo", {"name": "sapo"}, "sequence"),
        ("geo_mean", {"low": 0.2, "high": 0.2, "name": "gmpo"}, "sequence"),
        ("cispo", {"low": 0.2, "high": 0.2, "name": "cispo"}, "token"),
        ("gpg", {"name": "none"}, "token"),
        ("vanilla", {"low": 0.2, "high": 0.2, "dual": 3.0}, "token"),
    ],
)
def test_losses_of_verl(tmp_path: Path, mode: str, surrogate: dict[str, Any], reduction: str) -> None:
    """Three have a mean of their own, which loss_agg_mode does not change, and all have a clip of 0.2."""
    keys = f"algorithm.adv_estimator=grpo A.policy_loss.loss_mode={mode} A.loss_agg_mode=token-mean"
    tree, said = of_verl(tmp_path, keys)
    assert tree["algorithm"]["surrogate"] == surrogate and tree["algorithm"]["reduction"] == reduction
    assert ("the policy loss is a mean over answers in verl" in said) is (reduction == "sequence")


def test_the_mean_of_gspo_and_sapo_elsewhere(tmp_path: Path) -> None:
    gspo = of_openrlhf(tmp_path, "--algo.advantage.estimator group_norm --actor.policy_loss_type gspo")[0]["algorithm"]
    assert (gspo["surrogate"]["ratio"], gspo["reduction"]) == ("sequence", "sequence")
    sapo = recipe(tmp_path, "open-r1", f"{OPEN_R1}loss_type: sapo\n")["algorithm"]
    assert (sapo["surrogate"]["name"], sapo["reduction"]) == ("sapo", "sequence")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("opo", {"name": "opo", "surrogate": {"name": "clip", "low": 0.2, "high": 0.2, "dual": 3.0}}),
        ("gpg", {"name": "gpg", "surrogate": {"name": "clip", "low": 0.2, "high": 0.2, "dual": 3.0}}),
        ("gpg A.policy_loss.loss_mode=gpg", {"name": "gpg", "surrogate": {"name": "none"}}),
        (
            "grpo A.policy_loss.loss_mode=clip_cov A.policy_loss.clip_cov_ratio=0.001",
            {"name": "grpo", "surrogate": {"low": 0.2, "high": 0.2}, "tokens": {"name": "clip_cov", "share": 0.001}},
        ),
        (
            "opo A.policy_loss.loss_mode=kl_cov A.clip_ratio_c=10",
            {"name": "opo", "surrogate": {"name": "none"}, "tokens": {"name": "kl_cov", "coefficient": 0.1}},
        ),
        ("grpo_passk", {"name": "pass_at_k", "credit": {"k": 8}, "reduction": "token"}),
        ("rloo", {"name": "rloo", "group_size": 8}),
    ],
)
def test_estimators_of_verl(tmp_path: Path, keys: str, expected: dict[str, Any]) -> None:
    """Each can be built, takes one optimizer step a batch, and says how its numbers differ."""
    tree, said = of_verl(tmp_path, f"algorithm.adv_estimator={keys}")
    assert tree["algorithm"] | expected == tree["algorithm"] and "minibatches" not in tree["algorithm"]
    assert ("divided by the group's deviation" in said) is (keys == "grpo_passk")
    assert ("one step a batch, with the sum over an answer's tokens" in said) is (keys == "rloo")
    assert tree["algorithm"] != expected or keys == "rloo"


def test_what_an_algorithm_has_no_key_for_is_said(tmp_path: Path) -> None:
    """Also the keys of a whole section that the algorithm does not have, and keys whose value is True."""

    def left_out(said: str) -> list[str]:
        return re.findall(r"- (\S+), line \d+: algorithm\.([a-z_.]+) is no key of this algorithm; left out", said)

    correction = "algorithm.rollout_correction"
    tree, said = of_verl(
        tmp_path,
        f"algorithm.adv_estimator=rloo {correction}.rollout_is=sequence {correction}.rollout_is_threshold=2.0 "
        "A.clip_ratio=0.1 algorithm.filter_groups.enable=True",
    )
    assert left_out(said) == [
        ("actor_rollout_ref.actor.clip_ratio", "surrogate.low"),
        ("actor_rollout_ref.actor.clip_ratio", "surrogate.high"),
        ("algorithm.filter_groups.enable", "dynamic_sampling"),
        (f"{correction}.rollout_is", "correction.name"),
        (f"{correction}.rollout_is", "correction.level"),
        (f"{correction}.rollout_is_threshold", "correction.cap"),
    ]
    assert tree["algorithm"] == {"name": "rloo", "group_size": 8}
    tree, said = of_verl(tmp_path, "algorithm.adv_estimator=gae A.policy_loss.loss_mode=clip_cov A.clip_ratio=0.1")
    assert left_out(said) == [("actor_rollout_ref.actor.policy_loss.loss_mode", "tokens.name")]
    assert tree["algorithm"]["name"] == "ppo" and tree["policy"]["critic"] == "separate"
    assert (tree["algorithm"]["clip_low"], tree["algorithm"]["clip_high"]) == (0.1, 0.1)
    assert "clip_ratio_c, by default 3, which bounds the vanilla loss" in said
    flags = "--algo.advantage.estimator reinforce --actor.policy_loss_type gspo --actor.dual_clip 3"
    assert left_out(of_openrlhf(tmp_path, flags)[1]) == [
        ("actor.dual_clip", "surrogate.dual"), ("actor.policy_loss_type", "surrogate.ratio")
    ]  # fmt: skip


def test_minibatches_of_a_default_are_told_where_an_algorithm_takes_one_step(tmp_path: Path) -> None:
    lost = "algorithm.minibatches is no key of this algorithm; left out"
    script = PPO_OF_VERL.replace("actor_rollout_ref.actor.ppo_mini_batch_size=64", "").replace("=64", "=1024")
    said = of_verl(tmp_path, "algorithm.adv_estimator=rloo", script)[1]
    assert f"verl's default of actor_rollout_ref.actor.ppo_mini_batch_size: {lost}" in said
    assert said.count("left out") == 1  # what else is lost by a default is told by the estimator's sentence
    tree, said = of_verl(tmp_path, "algorithm.adv_estimator=opo", script)
    assert tree["algorithm"]["minibatches"] == 4 and "left out" not in said
    said = of_openrlhf(tmp_path, "--algo.advantage.estimator rloo")[1]
    assert f"1024 prompts x 8 answers / openrlhf's default of train.batch_size: {lost}" in said


def test_two_kls_and_a_critic_of_its_own(tmp_path: Path) -> None:
    kls = "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01 algorithm.kl_ctrl.type=adaptive"
    tree, said = of_verl(tmp_path, f"algorithm.adv_estimator=grpo {kls} A.use_kl_loss=True A.kl_loss_coef=0.002")
    assert (tree["algorithm"]["kl_in"], tree["algorithm"]["kl_coefficient"]) == ("loss", 0.002)
    assert "algorithm.use_kl_in_reward, line 3: verl has a KL in the reward too" in said
    assert "kl_target" not in tree["algorithm"] and "algorithm.kl_ctrl.kl_coef" in said
    critic = "critic.optim.lr=2e-5 critic.ppo_epochs=4 critic.optim.weight_decay=0.3 critic.model.path="
    tree, said = of_verl(tmp_path, f"algorithm.adv_estimator=gae {critic}other")
    assert tree["optimizer"]["critic_learning_rate"] == 2e-5
    for key in ("critic.model.path, line 3: other", "critic.ppo_epochs, line 3: 4", "weight_decay, line 3: 0.3"):
        assert f"{key} there; the critic has the policy's here" in said
    mean = "the value loss is a mean over tokens here"  # verl's critic follows the actor where it has no key
    for keys, told in (("critic.loss_agg_mode", True), ("actor_rollout_ref.actor.loss_agg_mode", True), ("x.y", False)):
        said = of_verl(tmp_path, f"algorithm.adv_estimator=gae {keys}=seq-mean-token-mean")[1]
        assert (f"{keys}, line 3: {mean}" in said) is (mean in said) is told
    assert "critic.model.path, line 3:" not in of_verl(tmp_path, f"algorithm.adv_estimator=gae {critic}m")[1]
    said = of_openrlhf(tmp_path, "--critic.model_name_or_path other")[1]
    assert "critic.model_name_or_path, line 2: the critic starts from the policy here" in said


def test_warm_up_by_steps_or_by_a_share(tmp_path: Path) -> None:
    """verl takes steps from 0 on, transformers steps above 0; else the share counts."""
    for steps, expected in ((10, {"warmup": 10}), (0, {"warmup": 0}), (-1, {"warmup_ratio": 0.1})):
        keys = f"algorithm.adv_estimator=grpo A.optim.lr_warmup_steps={steps} A.optim.lr_warmup_steps_ratio=0.1"
        tree, said = of_verl(tmp_path, keys)
        assert tree["optimizer"] == expected and "lr_warmup_steps" in said and "lr_warmup_steps_ratio" in said
    for steps, expected in ((10, {"warmup": 10}), (0, {"warmup_ratio": 0.1}), (0.2, {"warmup_ratio": 0.2})):
        found = recipe(tmp_path, "open-r1", f"{OPEN_R1}warmup_steps: {steps}\nwarmup_ratio: 0.1\n")["optimizer"]
        assert {key: value for key, value in found.items() if "warmup" in key} == expected


def test_rates_of_trainers_on_data(tmp_path: Path) -> None:
    """Each trainer has its own, and not that of policy gradients."""
    for trainer, rate in (("sft", 5e-6), ("rm", 9e-6), ("dpo", 1e-5), ("kto", 1e-5), ("kd", 5e-6)):
        assert of_openrlhf(tmp_path, "", trainer)[0]["optimizer"]["learning_rate"] == rate
        assert of_openrlhf(tmp_path, "--adam.lr 3e-4", trainer)[0]["optimizer"]["learning_rate"] == 3e-4
    script = "torchrun -m verl.trainer.{} data.train_files=a.parquet {}"
    usual = {"learning_rate": 1e-5, "schedule": "cosine", "warmup_ratio": 0.1, "betas": [0.9, 0.95]}
    assert of_verl(tmp_path, script.format("fsdp_sft_trainer", ""), "")[0]["optimizer"] == usual
    found = of_verl(tmp_path, script.format("fsdp_sft_trainer", "optim.lr=2e-4 optim.warmup_steps_ratio=0.2"), "")[0]
    assert found["optimizer"] == usual | {"learning_rate": 2e-4, "warmup_ratio": 0.2}
    assert of_verl(tmp_path, script.format("sft_trainer", ""), "")[0]["optimizer"] == {
        "learning_rate": 1e-3, "warmup": 0
    }  # fmt: skip
    path = write(tmp_path, "verl", script.format("sft_trainer", "trainer.test_freq=after_each_epoch"))
    [obstacle] = converted("verl", path)[1]
    assert "'after_each_epoch' cannot be read; write evaluation.every yourself" in obstacle


def test_ends_of_learning_rates(tmp_path: Path) -> None:
    """OpenRLHF's min_lr_ratio is of two schedules; transformers' polynomial ends at a rate."""

    def openrlhf(flags: str, trainer: str = "ppo_ray") -> tuple[str, float | None]:
        made = of_openrlhf(tmp_path, flags, trainer)[0]["optimizer"]
        return made["schedule"], made.get("final_fraction")

    assert openrlhf("") == ("cosine", 0.1) == openrlhf("--actor.lr_scheduler cosine_warmup_with_min_lr")
    assert openrlhf("--actor.lr_scheduler cosine_with_min_lr --actor.min_lr_ratio 0.3") == ("cosine", 0.3)
    assert openrlhf("--lr_scheduler $KIND") == ("cosine", 0.1)  # unknown, so OpenRLHF's default
    assert openrlhf("--lr_scheduler linear --min_lr_ratio 0.3") == ("linear", None)
    assert openrlhf("--lr_scheduler cosine", "sft") == ("cosine", None)
    assert openrlhf("--lr_scheduler polynomial") == ("polynomial", pytest.approx(0.1))
    assert openrlhf("--lr_scheduler polynomial", "rm") == ("polynomial", pytest.approx(1e-7 / 9e-6))

    def trl(kind: str, arguments: str) -> dict[str, Any]:
        config = f"GRPOConfig(learning_rate=1e-5, lr_scheduler_type='{kind}', lr_scheduler_kwargs={arguments})"
        made: dict[str, Any] = of_script(tmp_path, f"GRPOTrainer('m', args={config}, train_dataset='d')")[0]
        return {key: value for key, value in made["optimizer"].items() if key in ("final_fraction", "power")}

    assert trl("polynomial", "None") == {"final_fraction": pytest.approx(0.01)}
    assert trl("polynomial", "{'lr_end': 1e-6, 'power': 2.0}") == {"final_fraction": pytest.approx(0.1), "power": 2.0}
    assert trl("cosine_with_min_lr", "{'min_lr_rate': 0.2}") == {"final_fraction": 0.2}
    assert trl("cosine_with_min_lr", "dict(min_lr=1e-6)") == {"final_fraction": pytest.approx(0.1)}
    assert trl("linear", "None") == {}
    file = OPEN_R1.replace("cosine_with_min_lr", "polynomial").replace("min_lr_rate: 0.1", "lr_end: 0.0")
    assert recipe(tmp_path, "open-r1", file)["optimizer"]["final_fraction"] == 0


def test_arguments_of_open_r1_s_rewards(tmp_path: Path) -> None:
    """Its script gives them, where the functions have other defaults or none."""
    names = "reward_funcs: [cosine, repetition_penalty, soft_overlong_punishment, code_format]\n"
    file = OPEN_R1.replace("reward_funcs: [accuracy, tag_count]\nreward_weights: [1.0, 0.5]\n", names)
    made = {
        "get_cosine_scaled_reward": {"weight": 1.0, "min_value_wrong": 0.0},
        "get_repetition_penalty_reward": {"weight": 1.0, "ngram_size": 3, "max_penalty": -1.0},
        "get_soft_overlong_punishment": {"weight": 1.0, "max_completion_len": 16384, "soft_punish_cache": 4096},
        "get_code_format_reward": 1.0,
    }
    assert recipe(tmp_path, "open-r1", file)["rewards"] == {f"open_r1.rewards:{name}": of for name, of in made.items()}
    given = recipe(tmp_path, "open-r1", f"{file}cosine_min_value_wrong: -0.2\nrepetition_n_grams: 4\n")["rewards"]
    assert given["open_r1.rewards:get_cosine_scaled_reward"]["min_value_wrong"] == -0.2
    assert given["open_r1.rewards:get_repetition_penalty_reward"]["ngram_size"] == 4


def test_estimators_and_losses_of_openrlhf(tmp_path: Path) -> None:
    tree, said = of_openrlhf(tmp_path, "--algo.advantage.estimator group_norm --algo.advantage.no_std_norm")
    assert tree["algorithm"]["credit"] == {"scale": "group"}
    assert "no_std_norm = True (line 2): reinforce_pp and ppo always divide by the deviation" in said
    tree, said = of_openrlhf(tmp_path, "--algo.advantage.estimator reinforce_baseline --algo.advantage.gamma 0.99")
    assert "gamma" not in tree["algorithm"] and "gamma = 0.99 (line 2): OpenRLHF sets it to 1 with this" in said
    for estimator in ("reinforce", "gae"):
        flags = f"--algo.advantage.estimator {estimator} --algo.advantage.gamma 0.99"
        assert of_openrlhf(tmp_path, flags)[0]["algorithm"]["gamma"] == 0.99
    assert "OpenRLHF clips" in of_openrlhf(tmp_path, "--algo.advantage.estimator rloo")[1]
    dpo = of_openrlhf(tmp_path, "--model.ipo_enable", "dpo")[0]["algorithm"]
    assert dpo == {"name": "dpo", "objective": "ipo"}  # sums, where the preset ipo has means
    distilled = {"name": "gkd", "source": "references", "divergence": "forward_kl"}
    for flags, weights in (("", (0.4, 0.6)), ("--kd_coef 0.9", (0.9, 0.1))):
        found = of_openrlhf(tmp_path, f"--teacher_model t {flags}", "kd")[0]["algorithm"]
        named = dict(zip(("divergence_coefficient", "supervised_coefficient"), weights, strict=True))
        assert found == distilled | named | {"teacher": "t"}
    assert of_openrlhf(tmp_path, "", "kto")[0]["algorithm"]["beta"] == 0.01


def test_keys_that_change_results_are_not_called_idle(tmp_path: Path) -> None:
    lora = "--ds.lora.rank 8 --ds.lora.target_modules {} --ds.load_in_4bit --algo.kl.estimator {}"
    for modules, targets in (("q_proj v_proj", ["q_proj", "v_proj"]), ("q_proj", ["q_proj"]), ("all-linear",) * 2):
        tree, said = of_openrlhf(tmp_path, lora.format(modules, "k3"))
        assert (tree["policy"]["lora_targets"], tree["policy"]["quantise"]) == (targets, "4bit")
        assert "algo.kl.estimator, line 2: the difference of the log-probabilities (k1) here" in said
    assert "ds.lora.dropout = 0.1" in of_openrlhf(tmp_path, "--ds.lora.dropout 0.1")[1].partition("Differs:")[0]
    assert "(k1) here" not in of_openrlhf(tmp_path, lora.format("q_proj", "k1"))[1]
    said = of_verl(tmp_path, "algorithm.adv_estimator=grpo actor_rollout_ref.ref.model.path=other")[1]
    assert "ref.model.path = other (line 3): the reference is the policy as it starts" in said
    off = "shuffle_dataset: false\nuse_bias_correction_kl: false\nref_model: other\n"
    text, _ = converted("open-r1", write(tmp_path, "open-r1", OPEN_R1 + off))
    assert yaml.safe_load(text)["shuffle"] is False
    assert "use_bias_correction_kl, line 15: k3 times the ratio here" in text
    assert "ref_model = other (line 16): the reference is the policy as it starts" in text
    sft = of_script(tmp_path, "SFTTrainer(model='m', args=SFTConfig(shuffle_dataset=False), train_dataset='d')")[0]
    assert "shuffle" not in sft  # there it is about another order, before the usual one
    assert recipe(tmp_path, "nemo-rl", NEMO + "data: {shuffle: false}\n")["shuffle"] is False


def test_switches_that_are_off_here_and_on_there(tmp_path: Path) -> None:
    """False is left out untold only where it is what they have, and the template's switch is taken over."""
    for value, told in (("False", True), ("True", False)):
        switches = ("completion_only_loss", "disable_dropout", "average_tokens_across_devices")
        config = ", ".join(f"{switch}={value}" for switch in switches)
        _, said = of_script(tmp_path, f"SFTTrainer(model='m', args=SFTConfig({config}), train_dataset='d')")
        assert all((f"{switch} = {value} (line" in said) is told and switch in said for switch in switches)
    assert "assistant_only_loss = " not in of_script(
        tmp_path, "SFTTrainer(model='m', args=SFTConfig(assistant_only_loss=False), train_dataset='d')"
    )[1]  # fmt: skip
    off = {"enable_thinking": False}
    switch = "algorithm.adv_estimator=grpo +data.apply_chat_template_kwargs.enable_thinking=False"
    assert of_verl(tmp_path, switch)[0]["policy"]["chat_template_kwargs"] == off
    for system, file in (
        ("open-r1", f"{OPEN_R1}chat_template_kwargs: {{enable_thinking: false}}\n"),
        (
            "nemo-rl",
            NEMO.replace("policy: {", "policy: {tokenizer: {chat_template_kwargs: {enable_thinking: false}}, "),
        ),
    ):
        assert recipe(tmp_path, system, file)["policy"]["chat_template_kwargs"] == off


def test_an_objective_of_online_dpo_of_trl(tmp_path: Path) -> None:
    for kind, objective in (("ipo", {"objective": "ipo"}), ("sigmoid", {})):
        config = f"OnlineDPOConfig(loss_type='{kind}')"
        tree, said = of_script(tmp_path, f"OnlineDPOTrainer('m', args={config}, train_dataset='d', reward_funcs=[f])")
        assert tree["algorithm"] == {"name": "online_dpo", "group_size": 2} | objective and "loss_type = " not in said


def test_labels_of_openrlhf_reach_the_function_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"q": "9+9?", "a": ["18", "18.0"]}\n{"q": "1+1?", "a": ["2", "2.0"]}\n')
    task = of_openrlhf(tmp_path, "--data.label_key a")[0]["task"]
    assert (task["references"], task["columns"]) == (None, {"label": "a"})
    keys = {key: value for key, value in task.items() if key not in ("name", "path", "prompts")}
    examples = registry.get("task", "data")("train", path=tmp_path / "p.jsonl", test=0.0, **keys)
    answers = [Episode(example, 0, place, [Turn([1], [2], text="18")]) for place, example in enumerate(examples)]
    seen = lists_of([as_sequence(answer, None, special=True) for answer in answers])
    assert sorted(seen["labels"]) == [["18", "18.0"], ["2", "2.0"]]


@given(st.integers(1, 32), st.integers(1, 16), st.integers(1, 8), st.sampled_from([2, 4, 8, 16]), st.integers(1, 4))
def test_batches_of_trl(each: int, devices: int, accumulated: int, size: int, times: int) -> None:
    """Answers of a generation over answers of a prompt; updates over updates of a generation."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "batches.yaml"
        path.write_text(
            f"reward_funcs: [x_reward]\ndataset_name: a/b\nnum_generations: {size}\nmax_steps: 840\n"
            f"per_device_train_batch_size: {each}\ngradient_accumulation_steps: {accumulated}\n"
            f"steps_per_generation: {accumulated * times}\n"
        )
        tree = yaml.safe_load(converted("trl", path, devices)[0])
    answers = each * devices * accumulated * times
    assert tree["prompts_per_step"] == -(-answers // size)
    assert tree["algorithm"].get("minibatches", 1) == times
    assert tree["steps"] == -(-840 // times)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A=b\nrun --x $A", ["b"]),
        ("A='b c'\nrun --x \"$A d\"", ["b c d"]),
        ("A='b c'\nrun --x $A", ["b", "c"]),
        ("A=b\nB=${C:-${A}/d}\nrun --x ${B}", ["b/d"]),
        ("run --x ${C} $(date)", ["${C}", "$(date)"]),
        ("A=(1 '2 3' # a comment (with this\n 4)\nrun --x \"${A[@]}\"", ["1", "2 3", "4"]),
        ("A=(1)\nA+=(2)\nrun --x ${A[@]}", ["1", "2"]),
        ("A=4\nrun --x $(( (A + 1) * 2 )) $((1/0))", ["10", "$((1/0))"]),
        ("run --x a\\\nb # c", ["ab"]),
        ("run --x 'a # b' c#d", ["a # b", "c#d"]),
        ('export A="it\'s"; run --x $A', ["it's"]),
        ("cat <<EOF\nrun --x no\nEOF\nrun --x yes", ["yes"]),
        ("run --x 1\nA=((" + " # a (b\n" * 60, ["1"]),  # never closed, which took a regular expression forever
        ("A='\\n'\nrun --x \"$A\"", ["\\n"]),
    ],
)
def test_words_of_a_script(script: str, words: list[str]) -> None:
    found = [command for command in Script(script).commands if command[0].text == "run"]
    assert [word.text for word in found[-1][2:]] == words


def test_lines_of_words() -> None:
    script = "A=(\n  --a 1\n)\nread -r -d '' B <<EOF\nx.y \\\n  --b 2\nEOF\nrun ${A[@]} $B\n"
    assert [(word.text, word.line) for word in Script(script).commands[-1]] == [
        ("run", 8), ("--a", 2), ("1", 2), ("x.y", 5), ("--b", 6), ("2", 6)
    ]  # fmt: skip


def test_sums_of_a_script_are_those_of_python() -> None:
    texts = ("7 // 2", "7 / 2", "7 - 2", "2 * size + 1", "'a' + 'b'", "7 // 0", "size - other", "2 ** 3")
    values = [value_of(ast.parse(text, mode="eval").body, {"size": 3}) for text in texts]
    assert values == [3, 3.5, 5, 7, "ab", "7 // 0", "size - other", "2 ** 3"]
    assert [isinstance(value, Code) for value in values] == [False] * 5 + [True] * 3


def test_scalars() -> None:
    assert [scalar(text) for text in ("1e-6", "True", "none", "[1, a]", "07", "a b", '["x"]')] == [
        1e-6, True, None, [1, "a"], 7, "a b", ["x"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", "python -m verl.trainer.main_ppo data.train_batch_size=$(touch made) a.b=`touch made`"),
        ("a.py", "import pathlib\npathlib.Path('made').touch()\nGRPOConfig(seed=pathlib.Path('made').touch())"),
        ("a.yaml", "reward_funcs: made\nseed: !!python/object/apply:os.system ['touch made']"),
        ("a.yaml", "reward_funcs: [made.it]\nnum_generations: 4"),
    ],
)
def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.py").write_text("open('made', 'w')")
    (tmp_path / name).write_text(text)
    for system in SYSTEMS:
        try:
            converted(system, tmp_path / name)
        except LmgymError as error:
            assert "\n" not in str(error)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_key_is_lost_and_every_line_says_where_it_is_from(tmp_path: Path, system: str) -> None:
    path = write(tmp_path, system)
    text, _ = converted(system, path, devices=1)
    head, _, body = text.partition("\n\n")
    said = re.sub(r"\n#\s+", " ", text)
    for key, setting in read(path).given.items():
        section = ".".join(key.split(".")[:2])
        if not key.startswith("def ") and " of " not in setting.where:
            assert key in said or f"{section}.* (" in said, key
    values = [line for line in body.splitlines() if re.search(r": \S", line) and not line.lstrip().startswith("#")]
    assert values and all("  # " in line for line in values)
    assert head.startswith("# Converted from ")


@pytest.mark.parametrize("file", sorted(path.name for path in TABLES.glob("*.yaml")))
def test_tables_name_keys_that_there_are(file: str) -> None:
    """Every key of ours in a table is a key of a recipe, and every conversion exists."""
    algorithms = {f.name for name in registry.names("algorithm") for f in fields(registry.get("algorithm", name))}
    parts = {f.name for kind in ("surrogate", "credit", "correction", "tokens") for name in registry.names(kind)
             for f in fields(registry.get(kind, name))}  # fmt: skip
    sections = {f.name: f.default_factory for f in [*fields(Config), *fields(Stage)]}
    rows = yaml.safe_load((TABLES / file).read_text())
    found: list[tuple[str, str | None]] = []
    for name, section in rows.items():
        for key, row in (
            section.items() if isinstance(section, dict) and name not in ("notes", "sets", "differs") else ()
        ):
            choices = row if isinstance(row, dict) and key != "always" else {"": row}
            for value in [row] if key != "always" and not isinstance(row, dict) else choices.values():
                if isinstance(value, dict):
                    assert value.get("also", name) in rows
                    found += [(ours, None) for ours in value if ours not in ("also", "say", "cannot")]
                elif name != "rewards" and not isinstance(row, dict):
                    found.append((value, None) if isinstance(value, str) else (value[0], [*value, None, None][2]))
    for ours, how in found:
        first, *rest = ours.split(".")
        assert how is None or how in HOW, how
        if first == "algorithm":
            assert rest[0] in {"name"} | algorithms, ours
            assert len(rest) == 1 or rest[1] in {"name"} | parts, ours
        elif first not in ("task", "rewards") and rest:
            assert rest[0] in {f.name for f in fields(sections[first])} | {"chat_template_kwargs"}, ours  # type: ignore
        else:
            assert first in sections, ours


def test_values_that_the_file_does_not_hold(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("GRPOConfig(num_generations=args.n, learning_rate=rate(3), max_steps=2 * 8)")
    given = read(tmp_path / "a.py").given
    assert isinstance(given["learning_rate"].value, Code) and given["max_steps"].value == 16
    assert "num_generations" not in given  # of the command line
    text, obstacles = converted("trl", tmp_path / "a.py")
    assert "learning_rate, line 1: `rate(3)` is not known from the file alone; write the value" in obstacles
    assert yaml.safe_load(text)["algorithm"]["group_size"] == 8


@pytest.mark.parametrize(
    ("system", "text", "sentence"),
    [
        ("verl", VERL.replace("=grpo", "=magic"), "lmgym has no magic"),
        ("verl", VERL.replace("train_batch_size=512", "train_batch_size=many"), "'many' is no number above 0"),
        ("trl", TRL.replace('"dr_grpo"', '"new"'), "loss_type, line 21: lmgym has no new; it has dapo"),
        ("trl", TRL.replace("GRPOTrainer(", "NashMDTrainer("), "NashMDTrainer: lmgym has no algorithm"),
        ("open-r1", "reward_funcs: accuracy\ndataset_name: a/b\nnum_generations: 1", "(num_generations, line 3)"),
        ("nemo-rl", NEMO.replace("base.yaml", "other.yaml"), "write task.path or task.hub_id"),
    ],
)
def test_what_stands_in_the_way_is_said(tmp_path: Path, system: str, text: str, sentence: str) -> None:
    printed, obstacles = converted(system, write(tmp_path, system, text))
    assert any(sentence in one for one in obstacles), obstacles
    assert isinstance(yaml.safe_load(printed), dict)


@pytest.mark.parametrize("text", ["", "a: [", "\x00", "- 1", "a: 1\na: 2"])
def test_files_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    for system in SYSTEMS:
        with pytest.raises(LmgymError, match=r"holds no settings|cannot be read|mapping|not a readable"):
            converted(system, write(tmp_path, system, text).rename(tmp_path / "x.yaml"))


def test_a_date_and_a_name_that_is_too_long(tmp_path: Path) -> None:
    """Found by mutants: YAML reads a date, and a file system refuses to look for a long name."""
    text = NEMO.replace("base.yaml", f"[base.yaml, {'b' * 400}.yaml]") + "  model_name: 2025-01-01\n"
    text = text.replace("256}\n  model_name: 2025-01-01", "256, model_name: 2025-01-01}")
    printed, obstacles = converted("nemo-rl", write(tmp_path, "nemo-rl", text))
    assert isinstance(yaml.safe_load(printed), dict) and any("policy.model" in one for one in obstacles)


def test_mutants(tmp_path: Path) -> None:
    """Damaged files become recipes or one sentence. (5,000 mutants of public files were tried: docs/log.)"""
    values = [
        "nan",
        "-1",
        "null",
        "[]",
        "{a: 1}",
        "'",
        "$X",
        "$((9**9**9))",
        "default",
        "<<EOF",
        "\\",
        "${a.b}",
        "(",
        "also",
    ]
    dice = random.Random(0)
    outcomes = set()
    for number in range(60):
        system = list(SYSTEMS)[number % len(SYSTEMS)]
        text = FILES[system][1]
        for _ in range(dice.choice([1, 2, 4])):
            place = dice.randrange(len(text))
            match dice.randrange(3):
                case 0:
                    text = text[:place] + text[place + dice.randrange(30) :]
                case 1:
                    text = text[:place] + dice.choice(values) + text[place:]
                case 2:
                    lines = text.split("\n")
                    row = dice.randrange(len(lines))
                    lines[row] = re.sub(r"([=:] ?)(\S+)", lambda found: found[1] + dice.choice(values), lines[row])
                    text = "\n".join(lines)
        try:
            outcomes.add(bool(converted(system, write(tmp_path, system, text))[1]))
        except LmgymError as error:
            assert "\n" not in str(error)
            outcomes.add(None)
    assert outcomes == {True, False, None}


def test_command_prints_and_a_recipe_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("scores.py").write_text("def right(completions, answer, **_):\n    return [len(c) / 9 for c in completions]\n")
    Path("trl.yaml").write_text(
        "model_name_or_path: builtin:tiny\ndataset_name: rows.jsonl\nreward_funcs: [scores.right]\nmax_steps: 2\n"
        "num_generations: 4\nper_device_train_batch_size: 8\nmax_completion_length: 4\nbeta: 0.1\nloss_type: grpo\n"
    )
    assert main(["convert", "trl", "trl.yaml", "--devices", "1"]) == 0
    Path("recipe.yaml").write_text(capsys.readouterr().out)
    assert main(["train", "recipe.yaml", "out=run", "evaluation.examples=2", "policy.device=cpu"]) == 0
    assert [record["step"] for record in records(Path("run/metrics.jsonl")) if "reward" in record] == [0, 0, 1, 2]
    Path("trl.yaml").write_text("dataset_name: rows.jsonl\nnum_generations: 4\n")
    assert main(["convert", "trl", "trl.yaml"]) == 1
    assert "lmgym: to be filled in: the file names no reward" in capsys.readouterr().err
