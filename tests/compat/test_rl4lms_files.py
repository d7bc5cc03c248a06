"""RL4LMs' YAML files: each key is taken over or named, counts of tokens become counts of answers, and they train."""

import copy
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, MinLengthLogitsProcessor

from lmgym.algorithms.actor_critic import PPO
from lmgym.cli.main import main as cli_main
from lmgym.compat.rl4lms.__main__ import main
from lmgym.compat.rl4lms.convert import convert, text
from lmgym.compat.rl4lms.convert_algorithm import Counts, counts
from lmgym.compat.rl4lms.data_pool import Sample, TextGenPool
from lmgym.compat.rl4lms.metric import BaseMetric
from lmgym.compat.rl4lms.registries import (
    AlgorithmRegistry,
    DataPoolRegistry,
    MetricRegistry,
    PolicyRegistry,
    RewardFunctionRegistry,
)
from lmgym.compat.rl4lms.reward import BatchedRewardFunction
from lmgym.compat.rl4lms.schema import is_rl4lms
from lmgym.config.build import build_config, load_config
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from tests.compat.rl4lms_configurations import ALGORITHMS, TASKS, Tree, on_policy, supervised
from tests.runs import complaint, records

ALL = [on_policy(task, "ppo", "builtin:tiny_t5") for task in TASKS]
ALL += [on_policy("dummy", algorithm) for algorithm in ALGORITHMS]
ALL += [supervised(task) for task in TASKS if task != "dummy"] + [supervised("imdb", "causal")]


def written(folder: Path, tree: Tree, name: str = "rl4lms.yml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(tree))
    return path


def at(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value in one place."""
    tree = copy.deepcopy(tree)
    node = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return tree


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        yield path, tree
    for key, value in items or ():
        yield from leaves(value, (*path, key))


def others(value: Any) -> list[Any]:
    """Values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(value - 1, 1)]
    if isinstance(value, float):
        return [value * 1.5 + 0.01, value / 2]
    return ["right" if value == "left" else "left" if value == "right" else f"x{value[1:]}"]


def outcome(tree: Tree) -> Any:
    try:
        conversion = convert(tree)
    except LmgymError as error:
        return str(error)
    return conversion.recipe, conversion.notes, conversion.warnings


# ---------------------------------------------------------------- every key


@pytest.mark.slow
@pytest.mark.parametrize("tree", ALL, ids=lambda tree: f"{tree['datapool']['id']}-{tree['alg']['id']}")
def test_a_file_becomes_a_recipe_that_loads_and_no_key_of_it_is_lost(tree: Tree) -> None:
    conversion = convert(tree)
    config = build_config(yaml.safe_load(text(conversion, "some.yml")))
    assert len(config.stages) == 1
    unknown = ("neither RL4LMs nor lmgym has", "lmgym has no such")
    assert not [warning for warning in conversion.warnings if any(words in warning for words in unknown)]
    before = outcome(tree)
    for path, value in leaves(tree):
        key = ".".join(map(str, path))
        named = key in conversion.idle or any(line.startswith(key) for line in conversion.warnings)
        if value is None or named:
            continue
        assert any(outcome(at(tree, path, other)) != before for other in others(value)), f"{key} changes nothing"


@pytest.mark.parametrize(
    "path",
    [
        ("surplus",),
        ("env", "args", "surplus"),
        ("env", "surplus"),
        ("alg", "surplus"),
        ("alg", "args", "surplus"),
        ("alg", "kl_div", "surplus"),
        ("alg", "policy", "args", "surplus"),
        ("alg", "policy", "args", "generation_kwargs", "surplus"),
        ("tokenizer", "surplus"),
        ("reward_fn", "args", "surplus"),
        ("datapool", "args", "surplus"),
        ("train_evaluation", "surplus"),
        ("train_evaluation", "metrics", 0, "args", "surplus"),
        ("train_evaluation", "generation_kwargs", "surplus"),
    ],
)
def test_an_unknown_key_is_named_in_a_warning(path: tuple[Any, ...]) -> None:
    key = ".".join(map(str, path))
    assert [warning for warning in convert(at(on_policy(), path, 1)).warnings if warning.startswith(key)], key


def test_what_changes_nothing_is_said_beside_the_recipe() -> None:
    conversion = convert(on_policy())
    assert {"alg.args.verbose", "tokenizer.padding_side", "tokenizer.pad_token_as_eos_token"} <= {*conversion.idle}
    said = text(conversion, "mine.yml")
    for line in (*conversion.notes, *conversion.warnings, *conversion.idle):
        assert line in said.split("\n\n")[0]


# ---------------------------------------------------------------- tokens and answers


@pytest.mark.parametrize(
    ("given_", "answers", "minibatches"),
    [
        # by hand, of its recipes: n_steps * n_envs / length, and n_steps * n_envs / batch_size but no more than that
        ((128, 10, 64, 48), 27, 20),  # IMDB: 1280 tokens / 48 = 26.7
        ((512, 10, 64, 100), 52, 52),  # CNN/DailyMail: 5120 / 100 = 51.2, and 80 minibatches would split answers
        ((512, 10, 64, 128), 40, 40),  # IWSLT
        ((256, 10, 64, 20), 128, 40),  # CommonGen
        ((128, 10, 128, 20), 64, 10),
        ((48, 2, None, 48), 2, 1),  # A2C: one step
        ((20, 1, 128, 20), 1, 1),  # TRPO: a batch smaller than a minibatch
        ((100, 1, 30, 10), 10, 4),  # 3.3 minibatches: stable-baselines3 takes a smaller fourth one
    ],
)
def test_counts_of_tokens_by_hand(given_: tuple[int, int, int | None, int], answers: int, minibatches: int) -> None:
    assert counts(*given_) == Counts(answers, minibatches, given_[0] * given_[1])


@given(st.integers(1, 4096), st.integers(1, 64), st.integers(1, 512), st.integers(1, 512))
def test_answers_of_full_length_make_the_tokens_and_one_fewer_does_not(
    n_steps: int, n_envs: int, batch_size: int, longest: int
) -> None:
    found = counts(n_steps, n_envs, batch_size, longest)
    assert (found.answers - 1) * longest < n_steps * n_envs <= found.answers * longest
    assert 1 <= found.minibatches <= found.answers
    assert found.minibatches in (found.answers, math.ceil(n_steps * n_envs / batch_size))


def test_iterations_epochs_and_minibatches_stand_in_the_recipe() -> None:
    recipe = convert(on_policy()).recipe
    # 12 steps of 2 environments are 24 tokens: 4 answers of 6, and 4 minibatches of 6 tokens
    assert recipe["steps"] == 2
    assert (recipe["prompts_per_step"], recipe["algorithm"]["minibatches"], recipe["algorithm"]["epochs"]) == (4, 4, 2)
    tree = at(on_policy(), ("alg", "args", "batch_size"), 3)
    assert convert(tree).recipe["algorithm"]["minibatches"] == 4
    assert any("8 minibatches would split answers" in warning for warning in convert(tree).warnings)


@pytest.mark.parametrize(("model", "least"), [("builtin:tiny_t5", 3), ("builtin:tiny_gpt2", 4)])
def test_min_length_counts_as_transformers_counts_it(model: str, least: int) -> None:
    """How many first new tokens may not be the end, asked of transformers' own rule. An encoder-decoder's start token
    counts there; RL4LMs adds a causal model's prompt, of 7 tokens here."""
    before, minimum = (1, 4) if "t5" in model else (7, 7 + 4)
    rule = MinLengthLogitsProcessor(minimum, eos_token_id=2)
    barred = [
        n for n in range(10) if torch.isinf(rule(torch.ones(1, before + n, dtype=torch.long), torch.zeros(1, 5))[0, 2])
    ]
    assert barred == list(range(least))
    tree = at(on_policy(model=model), ("alg", "policy", "args", "generation_kwargs", "min_length"), 4)
    assert convert(tree).recipe["sampling"]["min_new_tokens"] == least


# ---------------------------------------------------------------- defaults and sections


def test_defaults_are_rl4lms_where_a_key_is_left_out() -> None:
    """Those of its PPO and policy classes: seed_systems.md 1.1 of the design notes has them from its code."""
    tree = on_policy()
    tree["alg"]["args"], tree["alg"]["kl_div"] = {}, {"coeff": 0.1}
    del tree["train_evaluation"]["save_every"]
    conversion = convert(tree)
    recipe = conversion.recipe
    algorithm = recipe["algorithm"]
    wanted = {"epochs": 10, "gamma": 0.99, "gae_lambda": 0.95, "clip_low": 0.2, "clip_high": 0.2, "whiten": "minibatch"}
    assert {key: algorithm[key] for key in wanted} == wanted
    assert "kl_target" not in algorithm and algorithm["kl_coefficient"] == 0.1
    assert recipe["prompts_per_step"] == math.ceil(2048 * 2 / 6) and algorithm["minibatches"] == 64  # 4096 / 64
    optimizer = build_config(recipe).stages[0].optimizer
    assert (optimizer.name, optimizer.learning_rate, optimizer.weight_decay) == ("adamw", 3e-4, 1e-6)
    assert (optimizer.max_gradient_norm, optimizer.schedule, optimizer.warmup) == (0.5, "constant", 0)
    assert recipe["checkpoint"]["every"] == 20
    built = build_config(recipe).stages[0].algorithm
    assert (built.value_coefficient, built.value_clip_form, built.entropy_coefficient) == (0.5, "clipped", 0.0)


def test_a2c_is_rmsprop_and_trpo_moves_the_critic_alone() -> None:
    a2c = convert(on_policy(algorithm="a2c")).recipe
    optimizer = a2c["optimizer"]
    assert (optimizer["name"], optimizer["epsilon"], a2c["algorithm"]["gae_lambda"]) == ("rmsprop", 1e-6, 0.9)
    trpo = convert(on_policy(algorithm="trpo")).recipe
    wanted = {"delta": 0.02, "iterations": 4, "critic_epochs": 3, "critic_minibatches": 4, "whiten": "batch"}
    assert {key: trpo["algorithm"][key] for key in wanted} == wanted
    assert trpo["optimizer"]["max_gradient_norm"] == 0.0


def test_tensorboard_is_a_sink() -> None:
    recipe = convert(at(on_policy(), ("alg", "args", "tensorboard_log"), "logs")).recipe
    assert build_config(recipe).logs.sinks == ["tensorboard"]
    assert build_config(convert(on_policy()).recipe).logs.sinks == []


def test_schedules_of_clip_range_and_rate_fall_to_zero() -> None:
    tree = on_policy()
    tree["alg"]["args"] |= {"clip_range": "lin_0.3", "learning_rate": "lin_1e-4", "clip_range_vf": 0.2}
    config = build_config(convert(tree).recipe)
    stage = config.stages[0]
    assert (stage.algorithm.clip_low, stage.algorithm.clip_high, stage.algorithm.clip_final_fraction) == (0.3, 0.3, 0)
    assert stage.algorithm.value_clip == 0.2
    assert (stage.optimizer.schedule, stage.optimizer.learning_rate, stage.optimizer.final_fraction) == (
        "linear",
        1e-4,
        0,
    )


@pytest.mark.parametrize(
    ("mask_type", "top_mask", "name"),
    [("learned_top_p", 0.9, "learned_top_p"), ("learned_top_k", 5, "learned_top_k"), ("topk", 5, "top_k")],
)
def test_masks_of_nlpo(mask_type: str, top_mask: float, name: str) -> None:
    tree = on_policy(algorithm="nlpo")
    tree["alg"]["policy"]["args"] |= {"mask_type": mask_type, "top_mask": top_mask}
    tree["alg"]["policy"]["args"]["generation_kwargs"]["top_k"] = 50
    conversion = convert(tree)
    stage = build_config(conversion.recipe).stages[0]
    assert (stage.algorithm.mask_type, stage.algorithm.top_mask, stage.algorithm.refresh_every) == (name, top_mask, 2)
    assert stage.sampling.top_k is None and any("the mask decides" in warning for warning in conversion.warnings)


def test_what_generate_does_without_a_word_is_said() -> None:
    """Hugging Face draws from the 50 likeliest unless told otherwise; RL4LMs' eval takes the rollouts' keywords."""
    tree = on_policy()
    del tree["train_evaluation"]["generation_kwargs"], tree["alg"]["policy"]["args"]["generation_kwargs"]["top_k"]
    for asked in (tree, at(tree, ("train_evaluation", "generation_kwargs"), None)):
        recipe = convert(asked).recipe
        assert recipe["sampling"]["top_k"] == recipe["evaluation"]["top_k"] == 50
        assert recipe["evaluation"]["temperature"] == 1.0
    assert convert(at(tree, ("train_evaluation", "generation_kwargs"), {})).recipe["evaluation"]["temperature"] == 0.0


def test_beams_and_length_penalty_of_evaluations() -> None:
    evaluation = build_config(convert(on_policy()).recipe).evaluation
    assert evaluation.generation == {"num_beams": 2, "length_penalty": 0.6} and evaluation.temperature == 0.0
    tree = at(on_policy(), ("train_evaluation", "generation_kwargs", "num_beams"), 1)
    conversion = convert(tree)
    assert "generation" not in conversion.recipe["evaluation"]
    assert "train_evaluation.generation_kwargs.length_penalty" in conversion.idle


def test_prompts_are_cut_on_the_side_of_the_environment() -> None:
    tree = on_policy()
    policy = convert(tree).recipe["policy"]
    assert (policy["max_prompt_tokens"], policy["truncation_side"]) == (12, "right")
    conversion = convert(at(tree, ("alg", "policy", "args", "prompt_truncation_side"), "left"))
    assert conversion.recipe["policy"]["truncation_side"] == "right"
    assert any("on the left in evaluations" in warning for warning in conversion.warnings)


def test_answers_without_a_longest_length_end_with_the_episode() -> None:
    tree = on_policy()
    del tree["alg"]["policy"]["args"]["generation_kwargs"]["max_new_tokens"]
    conversion = convert(tree)
    assert conversion.recipe["sampling"]["max_new_tokens"] == 6  # max_episode_length
    assert any("max_new_tokens is left out" in warning for warning in conversion.warnings)


def test_supervised_files() -> None:
    conversion = convert(supervised())
    recipe = conversion.recipe
    # 287,113 articles make 17,945 batches of 16 (17,944.6), twice
    assert (recipe["prompts_per_step"], recipe["steps"]) == (16, 35_890)
    assert recipe["optimizer"] | {"schedule": "cosine", "weight_decay": 0.1, "warmup": 0} == recipe["optimizer"]
    assert (recipe["evaluation"]["every"], recipe["checkpoint"]["keep"]) == (200, 1)
    assert (recipe["policy"]["max_prompt_tokens"], recipe["policy"]["truncation_side"]) == (64, "right")
    assert recipe["sampling"] == {"max_new_tokens": 20, "min_new_tokens": 4}
    assert convert(supervised(max_steps=7)).recipe["steps"] == 7
    assert convert(supervised(lr_scheduler_type="linear", warmup_ratio=0.1)).recipe["optimizer"]["warmup"] == 3_589


def test_epochs_are_counted_where_the_data_lies(tmp_path: Path) -> None:
    rows = [{"article": f"Article {n} says.", "highlights": f"Says {n}.", "id": n} for n in range(21)]
    for split, own in (("train", rows[:17]), ("validation", rows[17:19]), ("test", rows[19:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    tree = supervised(per_device_train_batch_size=4, num_train_epochs=3)
    tree["datapool"]["args"]["path"] = str(tmp_path)
    conversion = convert(tree)
    assert conversion.recipe["steps"] == 15  # 17 examples are 5 batches of 4
    assert conversion.recipe["task"]["path"] == str(tmp_path)


def test_a_post_processor_stands_at_each_metric() -> None:
    tree = supervised()
    tree["alg"]["generation_kwargs"]["post_processing_fn"] = {"id": "three_sentence_summary"}
    recipe = convert(tree).recipe
    assert {own["post_process"] for own in recipe["evaluation"]["metrics"].values()} == {"three_sentence_summary"}
    build_config(recipe)


# ---------------------------------------------------------------- rewards and metrics


@pytest.mark.parametrize(
    ("reward", "wanted"),
    [
        ({"id": "sentences_with_dates", "args": {}}, {"dates": 1.0}),
        ({"id": "bleu"}, {"bleu": 1.0}),
        (
            {"id": "meteor", "args": {"shaping_fn": "common_gen_repeat_penalty"}},
            {"meteor": 1.0, "common_gen_repeat_penalty": 1.0},
        ),
        ({"id": "rouge", "args": {"rouge_type": "rougeL"}}, {"rougeL": {"weight": 1.0, "references": "first"}}),
        ({"id": "rouge_combined"}, {"rouge_combined": {"weight": 1.0, "references": "first"}}),
        (
            {"id": "sacre_bleu", "args": {"tokenize": "intl"}},
            {"sacre_bleu": {"weight": 1.0, "effective_order": False, "tokenize": "intl"}},
        ),
        (
            {"id": "bert_score", "args": {"language": "de"}},
            {"bert_score": {"weight": 1.0, "model": "bert-base-multilingual-cased", "layer": 9, "truncation": "right"}},
        ),
        ({"id": "chrf", "args": {"word_order": 2}}, {"chrf": {"weight": 1.0, "word_order": 2}}),
        ({"id": "ter"}, {"ter": 1.0}),
        ({"id": "parent"}, {"parent": 1.0}),
        ({"id": "spider", "args": {"spice_coeff": 0, "cider_coeff": 0.5}}, {"cider": 0.5}),
        (
            {"id": "spider", "args": {"spice_coeff": 0.5, "cider_coeff": 1, "jar": "spice.jar"}},
            {"spider": {"weight": 1.0, "jar": "spice.jar", "spice_coeff": 0.5, "cider_coeff": 1.0}},
        ),
        (
            {"id": "common_gen_preference_model", "args": {"meteor_coeff": 0.2}},
            {
                "common_gen_preference": {
                    "weight": 1.0,
                    "preference": "concept_coverage",
                    "meteor_coefficient": 0.2,
                    "concept_penalty": 0.5,
                }
            },
        ),
    ],
)
def test_rewards(reward: Tree, wanted: Tree) -> None:
    recipe = convert(on_policy(reward_fn=reward)).recipe
    assert recipe["rewards"] == wanted
    build_config(recipe)


def test_metrics_that_the_rewards_report_are_not_doubled_and_others_get_a_name() -> None:
    recipe = convert(on_policy("commongen", model="builtin:tiny_t5")).recipe
    assert "meteor" not in recipe["evaluation"]["metrics"]
    metrics = convert(on_policy("dummy")).recipe["evaluation"]["metrics"]
    assert metrics == {"increasing_numbers_metric": {"reward": "increasing_numbers", "weight": 0.0, "min_tokens": 6}}
    tree = on_policy()
    tree["train_evaluation"]["metrics"] = [{"id": "bleu", "args": {}}, {"id": "rouge"}, {"id": "bleu"}]
    assert list(convert(tree).recipe["evaluation"]["metrics"]) == ["bleu", "rouge1", "rouge2", "rougeL", "rougeLsum"]


def test_spice_needs_its_jar() -> None:
    tree = on_policy()
    tree["train_evaluation"]["metrics"] = [{"id": "spice"}]
    conversion = convert(tree)
    assert conversion.recipe["evaluation"]["metrics"] == {}
    assert any("train_evaluation.metrics.0.args.jar gives its path" in warning for warning in conversion.warnings)
    tree["train_evaluation"]["metrics"] = [{"id": "spice", "args": {"jar": "spice.jar"}}]
    assert convert(tree).recipe["evaluation"]["metrics"] == {"spice": {"weight": 0.0, "jar": "spice.jar"}}
    with pytest.raises(LmgymError, match=r"lacks the key 'reward_fn\.args\.jar'"):
        convert(on_policy(reward_fn={"id": "spider", "args": {"spice_coeff": 1, "cider_coeff": 1}}))


def test_perplexity_of_the_references_is_reported_where_it_was_asked_for() -> None:
    tree = on_policy()
    tree["train_evaluation"]["metrics"].append({"id": "causal_perplexity", "args": {"stride": 4, "tokenizer_id": "x"}})
    assert convert(tree).recipe["evaluation"]["reference_nll"] is True
    assert "reference_nll" not in convert(on_policy("imdb")).recipe["evaluation"]


# ---------------------------------------------------------------- what the user has added


@pytest.fixture
def registered() -> Iterator[None]:
    """What a test adds, under names that begin with files_, is gone after it."""
    yield
    for own in registry._registered.values():
        for name in [name for name in own if name.startswith("files_")]:
            del own[name]


class Shouts(BatchedRewardFunction):
    def __call__(self, prompt_texts: Any, gen_texts: Any, ref_texts: Any, dones: Any, meta_infos: Any = None) -> Any:
        return [float(text.isupper()) for text in gen_texts]


class Capitals(BaseMetric):
    def compute(self, prompt_texts: Any, generated_texts: Any, *more: Any, **others: Any) -> Any:
        shares = [float(text.isupper()) for text in generated_texts]
        return {"form/capitals": (shares, sum(shares) / len(shares))}


class Letters(TextGenPool):
    @classmethod
    def prepare(cls, split: str, first: str = "a") -> "Letters":
        return cls(
            [Sample(id=f"{split}_{n}", prompt_or_input_text=f"{first} {split} {n}", references=["b"]) for n in range(4)]
        )


@dataclass(kw_only=True)
class Sharper(PPO):
    sharpness: float = 1.0


@pytest.mark.usefixtures("registered")
def test_names_that_the_user_has_added_go_through_as_they_are() -> None:
    DataPoolRegistry.add("files_letters", Letters)
    RewardFunctionRegistry.add("files_shouts", Shouts)
    MetricRegistry.add("files_shouts", Capitals)
    AlgorithmRegistry.add("files_sharper", Sharper)
    PolicyRegistry.add("files_head", {"critic": "head"})
    tree = on_policy(reward_fn={"id": "files_shouts"}, datapool={"id": "files_letters", "args": {"first": "z"}})
    tree["alg"]["id"], tree["alg"]["policy"]["id"] = "files_sharper", "files_head"
    tree["alg"]["args"]["sharpness"] = 3.0
    tree["train_evaluation"]["metrics"] = [{"id": "files_shouts", "args": {}}]
    recipe = convert(tree).recipe
    assert recipe["task"] == {"name": "files_letters", "first": "z"}
    assert recipe["rewards"] == {"files_shouts": 1.0}
    assert recipe["evaluation"]["metrics"] == {"files_shouts_metric": 0.0}
    assert recipe["policy"]["critic"] == "head"
    built = build_config(recipe).stages[0].algorithm
    assert isinstance(built, Sharper)
    assert (built.sharpness, built.clip_high, built.entropy_coefficient, built.gae_lambda) == (3.0, 0.1, 0.001, 0.95)


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_a_file_with_a_class_of_ones_own_trains(tmp_path: Path) -> None:
    (tmp_path / "files_twos.py").write_text(
        "from lmgym.compat.rl4lms.registries import RewardFunctionRegistry\n"
        "from lmgym.compat.rl4lms.reward import BatchedRewardFunction\n\n\n"
        "class Twos(BatchedRewardFunction):\n"
        "    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):\n"
        "        return [float('2' in text) for text in gen_texts]\n\n\n"
        "RewardFunctionRegistry.add('files_twos', Twos)\n"
    )
    tree = on_policy(reward_fn={"id": "files_twos"})
    tree["train_evaluation"] |= {"metrics": [], "n_iters": 1}
    plugin = f"plugins=[{tmp_path / 'files_twos.py'}]"
    assert cli_main(["train", str(written(tmp_path, tree)), "threads=1", plugin, f"out={tmp_path / 'run'}"]) == 0
    evaluated = [record for record in records(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "evaluation"]
    assert evaluated and all("files_twos" in record for record in evaluated)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("datapool", "id"), "comongen", "datapool.id is 'comongen'; did you mean 'common"),
        (("reward_fn", "id"), "metor", "reward_fn.id is 'metor'; did you mean 'meteor'"),
        (("alg", "id"), "pp0", "alg.id is 'pp0'; did you mean 'ppo'"),
        (("alg", "policy", "id"), "causal_policy", "alg.policy.id is 'causal_policy'"),
        (("alg", "policy", "id"), "maskable_causal_lm_actor_critic_policy", "NLPO needs a maskable policy"),
        (("train_evaluation", "metrics", 0, "id"), "ruge", "train_evaluation.metrics.0.id is 'ruge'; did you mean"),
        (("train_evaluation", "n_iters"), None, "lacks the key 'train_evaluation.n_iters'"),
        (("alg", "args", "learning_rate"), "fast", "key 'alg.args.learning_rate'"),
        (("env", "n_envs"), 0, "n_envs is 0; it must be at least 1"),
        (("env", "args"), [1], "'env.args' must be a section of keys and values"),
        (("reward_fn",), {"id": "bleu", "arg": {}}, "unknown key 'reward_fn.arg'"),
    ],
)
def test_mistakes_name_the_key(path: tuple[Any, ...], value: Any, said: str) -> None:
    with pytest.raises(LmgymError) as caught:
        convert(at(on_policy(), path, value))
    assert said in str(caught.value)


def test_recipes_of_lmgym_are_not_taken_for_rl4lms() -> None:
    assert is_rl4lms(on_policy()) and is_rl4lms(supervised())
    for recipe in sorted((Path(__file__).parents[2] / "lmgym" / "recipes").glob("*.yaml")):
        assert not is_rl4lms(yaml.safe_load(recipe.read_text())), recipe


# ---------------------------------------------------------------- commands


def test_convert_prints_a_recipe_that_trains_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, on_policy())
    assert cli_main(["convert", "rl4lms", str(file)]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text(printed)
    assert load_config(tmp_path / "mine.yaml") == build_config(convert(on_policy()).recipe)
    assert "# Not as in RL4LMs:" in printed


def test_a_sweep_is_a_recipe_for_each_combination(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = at(on_policy(), ("alg", "args", "learning_rate"), {"expand": True, "values": [0.1, 0.2]})
    tree["reward_fn"] = {"expand": True, "values": [{"id": "bleu"}, {"id": "ter"}]}
    assert cli_main(["convert", "rl4lms", str(written(tmp_path, tree))]) == 0
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    pairs = [(recipe["optimizer"]["learning_rate"], *recipe["rewards"]) for recipe in found]
    assert sorted(pairs) == [(0.1, "bleu"), (0.1, "ter"), (0.2, "bleu"), (0.2, "ter")]


def test_convert_names_the_file_of_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, at(on_policy(), ("alg", "id"), "pp0"))
    assert complaint(capsys, "convert", "rl4lms", file).startswith(f"{file}: alg.id is 'pp0'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        ("ppo", "builtin:tiny_gpt2"),
        pytest.param("nlpo", "builtin:tiny_t5", marks=pytest.mark.slow),
        pytest.param("a2c", "builtin:tiny_t5", marks=pytest.mark.slow),
    ],
)
def test_its_own_command_trains_resumes_and_writes_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str, model: str
) -> None:
    file = written(tmp_path, on_policy(algorithm=algorithm, model=model))
    flags = ["--config_path", str(file), "--base_path_to_store_results", str(tmp_path / "store")]
    flags += ["--project_name", "numbers", "--experiment_name", algorithm, "threads=1"]
    assert main(flags) == 0
    folder = tmp_path / "store" / "numbers" / algorithm
    said = capsys.readouterr()
    assert "is a configuration of RL4LMs" in said.err and "apply_model_parallel" in said.err
    trained = [record for record in records(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in trained] == [0, 1]
    # 12 steps of 2 environments: 4 answers of at most 6 tokens
    assert all(record["length/max"] <= 6 for record in trained)
    splits = {"val": (0, 1, 2), "test": (0, 2)}  # before and after; val at every eval_every besides
    names = {f"epoch_{n}_{split}_split_predictions.json" for split, steps in splits.items() for n in steps}
    assert {path.name for path in folder.glob("epoch_*")} == names
    rows = json.loads((folder / "epoch_2_val_split_predictions.json").read_text())
    assert len(rows) == 8
    assert rows[0] | {"split_name": "val", "prompt_text": "Count: 1 2", "ref_text": ""} == rows[0]
    assert {"sample_id", "generated_text", "increasing_numbers", "increasing_numbers_metric"} <= rows[0].keys()
    evaluated = [r for r in records(folder / "metrics.jsonl") if r["kind"] == "evaluation" and r["step"] == 2]
    mean = sum(row["increasing_numbers"] for row in rows) / len(rows)
    assert evaluated[0]["increasing_numbers"] == pytest.approx(mean)
    assert main(flags) == 0  # a second time: nothing left to do
    assert "is finished" in capsys.readouterr().out
    if algorithm == "ppo":
        AutoModelForCausalLM.from_pretrained(folder / "final")
        assert main([*flags, "steps=3"]) == 1
        assert "holds a run of another recipe" in capsys.readouterr().err


@pytest.mark.slow
def test_train_takes_the_file_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = on_policy(algorithm="trpo")
    tree["train_evaluation"]["metrics"] = []
    written(tmp_path, tree, "gpt2_trpo.yml")
    assert cli_main(["train", "gpt2_trpo.yml", "threads=1", "steps=1"]) == 0
    assert "gpt2_trpo.yml is a configuration of RL4LMs; converted to a recipe" in capsys.readouterr().err
    config = load_config(tmp_path / "runs" / "gpt2_trpo" / "recipe.yaml")
    assert config.stages[0].steps == 1 and config.seed == 3
    assert cli_main(["check", "--memory", "gpt2_trpo.yml"]) == 0


@pytest.mark.slow
def test_train_runs_a_sweep_one_after_another(tmp_path: Path) -> None:
    tree = at(on_policy(), ("alg", "args", "learning_rate"), {"expand": True, "values": [0.001, 0.002]})
    tree["train_evaluation"] |= {"metrics": [], "n_iters": 1}
    assert cli_main(["train", str(written(tmp_path, tree, "sweep.yml")), "threads=1", f"out={tmp_path / 'out'}"]) == 0
    rates = [
        load_config(recipe).stages[0].optimizer.learning_rate for recipe in (tmp_path / "out").glob("*/recipe.yaml")
    ]
    assert sorted(rates) == [0.001, 0.002]


@pytest.mark.slow
def test_references_of_a_supervised_run_stand_in_its_predictions(tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        rows = [{"article": f"{split} {n} is long.", "highlights": f"{n} is.", "id": n} for n in range(4)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = supervised(max_steps=1, per_device_train_batch_size=2)
    tree["alg"]["model_name"] = tree["tokenizer"]["model_name"] = "builtin:tiny_t5"
    tree["datapool"]["args"]["path"] = str(tmp_path)
    tree["train_evaluation"]["metrics"] = [{"id": "chrf"}]
    folder = tmp_path / "run"
    assert cli_main(["train", str(written(tmp_path, tree)), "threads=1", "policy.device=cpu", f"out={folder}"]) == 0
    row = json.loads((folder / "epoch_1_test_split_predictions.json").read_text())[0]
    assert row["ref_text"] == "<START-1>0 is.<END-1>" and row["split_name"] == "test" and "chrf" in row


def test_the_flags_of_weights_and_biases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink is asked for, under the names of the flags; that it is not installed shows so before any training."""
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # how Python itself marks a module as absent
    for name in ("WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.setenv(name, "")
    flags = ["--config_path", str(written(tmp_path, on_policy())), "--base_path_to_store_results", str(tmp_path)]
    assert main([*flags, "--log_to_wandb", "--project_name", "mine", "--entity_name", "us", "threads=1"]) == 1
    assert "sink 'wandb' is not installed" in capsys.readouterr().err
    assert (os.environ["WANDB_PROJECT"], os.environ["WANDB_ENTITY"]) == ("mine", "us")
    assert not (tmp_path / "mine" / "rl4lm_experiment" / "metrics.jsonl").read_text()


def test_its_command_refuses_a_recipe_of_lmgym(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text("task: arithmetic\n")
    assert main(["--config_path", str(tmp_path / "recipe.yaml")]) == 1
    assert "is no configuration of RL4LMs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("policy.device=tpu", "key 'policy.device'"),
        ("steps=0", "steps is 0; it must be at least 1"),
        ("polcy.device=cpu", "did you mean 'policy'"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "check", "eval"])
def test_errors_name_the_users_file(
    verb: str, change: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the recipe that is made of it for a moment."""
    file = written(tmp_path, on_policy())
    assert cli_main([verb, str(file), change, "threads=1"] + ["out=" + str(tmp_path / "run")] * (verb == "train")) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("lmgym: ") and words in said, said
    assert said.startswith(f"lmgym: {file}: ")
    assert ".yaml" not in said, said


def test_results_and_next_steps_name_the_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, on_policy(), "mine.yml")
    assert cli_main(["eval", "mine.yml", "--json", "evaluation.examples=2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == found["recipe"] == "mine.yml"
    assert cli_main(["check", "--memory", "mine.yml", "threads=1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "next: lmgym check mine.yml threads=1"
    swept = at(on_policy(), ("alg", "args", "learning_rate"), {"expand": True, "values": [0.1, -1.0]})
    written(tmp_path, swept, "swept.yml")
    assert cli_main(["check", "swept.yml", "--memory"]) == 1
    assert re.search(r"^lmgym: swept\.yml \(\S+\): ", capsys.readouterr().err, re.MULTILINE)
