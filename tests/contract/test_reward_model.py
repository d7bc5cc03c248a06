"""A reward model from pairs: what is trained, what is written and what the reward says are the same numbers, and what
cannot become one gets a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lmgym.batch import collate
from lmgym.cli.main import main
from lmgym.config.build import build_config, load_config
from lmgym.core.errors import LmgymError
from lmgym.core.registry import get
from lmgym.rollouts.given_answers import rated_answers
from lmgym.training.machine import choose_machine
from lmgym.training.setup import actor_of, load_weights, newest_model
from lmgym.types import Example
from tests import runs

RECIPE: dict[str, Any] = {"algorithm": "reward_model", "task": runs.JUDGED, "rewards": None}
LLAMA = "builtin:tiny"


def scores_of_policy(run: Path, examples: list[Example]) -> tuple[list[str], list[Example], list[float]]:
    """All rated answers of the examples, and what the value head of the run's newest checkpoint says of each."""
    config = load_config(run / "recipe.yaml")
    policy = load_weights(config.policy, config.seed, choose_machine(config, run), newest_model(run))
    episodes = rated_answers(list(enumerate(examples)), actor_of(config, policy))
    batch = collate(episodes, policy.pad_id)
    said = policy.compute_logprobs_no_grad(batch, values=True, last_values=True).require("last_values")
    return [episode.text for episode in episodes], [episode.example for episode in episodes], said.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        {"model": LLAMA, "architecture": runs.ARCHITECTURE},
        {"model": "builtin:tiny_gpt2"},
        {"model": LLAMA, "architecture": runs.ARCHITECTURE, "critic": "separate"},
        {"model": LLAMA, "architecture": runs.ARCHITECTURE, "lora_rank": 2},
    ],
    ids=["llama", "gpt2", "separate", "lora"],
)
def test_the_reward_is_what_was_trained(policy: dict[str, Any], tmp_path: Path) -> None:
    """The value head in the run, transformers' classifier of final/, and the reward `reward_model` of the run folder
    agree. fp32, sums over at most 64 numbers a layer and a few layers: 1e-5 of scores of order 1."""
    run = runs.run(tmp_path / "run", **RECIPE, policy={**policy, "device": "cpu"}, steps=8)
    examples = runs.judged("test")[:4]
    texts, asked, said = scores_of_policy(run, examples)
    assert max(map(abs, said)) > 1e-3  # it has learned something
    paid = get("reward", "reward_model")(texts, asked, model=str(run), device="cpu")
    assert paid == pytest.approx(said, rel=1e-4, abs=1e-5)
    # As any user of transformers would read it, each row alone.
    model = AutoModelForSequenceClassification.from_pretrained(run / "final")
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id
    for text, example, score in zip(texts, asked, said, strict=True):
        ids = [*tokenizer(example.prompt + text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        begin = [tokenizer.bos_token_id] if tokenizer(".")["input_ids"][0] == tokenizer.bos_token_id else []
        with torch.no_grad():
            found = float(model(torch.tensor([[*begin, *ids]])).logits[0, 0])
        assert found == pytest.approx(score, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_what_a_run_of_a_reward_model_leaves(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Evaluations of held-out pairs and no sampled answers; where it comes from in its configuration; best/ too."""
    changes = {"evaluation": {"every": 3, "examples": 16, "keep_best": "preference/accuracy"}}
    run = runs.run(tmp_path / "run", **RECIPE, **changes)
    records = runs.records(run / "metrics.jsonl")
    evaluated = [record for record in records if record["kind"] == "evaluation"]
    first = {name: evaluated[0][f"preference/{name}"] for name in ("accuracy", "accuracy/low", "margin", "margin/low")}
    assert first["accuracy"] == 0.5 and first["margin"] == 0  # a head of zeros
    assert first["accuracy/low"] < 0.5 and first["margin/low"] is None  # equal margins have no interval
    assert evaluated[0]["calibration/error"] == 0 < evaluated[-1]["calibration/error"] < 1
    summary = json.loads((run / "summary.json").read_text())
    assert sum(one["count"] for one in summary["after"]["calibration"]) == 16
    assert (run / "calibration.png").read_bytes().startswith(b"\x89PNG")
    assert "preference/margin/low" in evaluated[-1] and not {"reward", "length/mean"} & evaluated[-1].keys()
    assert all(record["kind"] == "train" for record in runs.records(run / "rollouts.jsonl"))
    config = json.loads((run / "final" / "config.json").read_text())
    facts = {"layout": "answer", "base_model": LLAMA, "revision": None, "licence": None, "template": {}}
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["lmgym"] == facts
    assert (run / "best" / "config.json").is_file()
    # Exported from its newest checkpoint it is the same; it answers nothing.
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 0
    weights = [load_file(at / "model.safetensors") for at in (run / "final", tmp_path / "out")]
    assert weights[0].keys() == weights[1].keys() and all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    assert main(["eval", str(run)]) == 1
    assert "is a reward model's run, which writes no answers" in capsys.readouterr().err
    # PPO against it, by the name of its run.
    rewards = {"reward_model": {"model": str(run)}}
    policy = runs.run(tmp_path / "ppo", algorithm="ppo", rewards=rewards, task=runs.JUDGED, steps=2)
    assert runs.records(policy / "metrics.jsonl")[-1]["kind"] == "evaluation"


def test_the_licence_of_the_base_is_recorded(tmp_path: Path) -> None:
    from lmgym.models.policy_section import PolicySection
    from lmgym.models.reward_model import licence_of

    assert licence_of(PolicySection(model=str(tmp_path))) is None
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    assert licence_of(PolicySection(model=str(tmp_path))) == "apache-2.0"
    assert licence_of(PolicySection()) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {
                "stages": [
                    {"name": "rm", "algorithm": "reward_model"},
                    {"name": "rl", "rewards": {"regex": {"pattern": "1"}}},
                ],
                "algorithm": None,
            },
            "stage 'rm' makes a reward model of the policy, so it must be the last stage",
        ),
        ({"policy": {"max_prompt_tokens": 8}}, r"policy\.max_prompt_tokens: stage 'train' makes a reward model"),
        ({"policy": {"critic": "none"}}, r"reward_model needs a value function, and policy\.critic is none"),
    ],
)
def test_recipes_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LmgymError, match=said):
        build_config(runs.tiny(**{**RECIPE, **changes}))


def marked(split: str) -> list[Example]:
    """Answers that are marked one by one."""
    return [Example(one.id, one.prompt, one.references, rated=one.rated[:1]) for one in runs.judged(split)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": {"model": "builtin:tiny_t5"}}, "made of a causal model, and t5 is an encoder-decoder"),
        ({"task": f"{__name__}:marked"}, "no example with two answers of different ratings, and reward_model learns"),
        ({"evaluation": {"task": f"{__name__}:marked"}}, "evaluation's split 'test' has no example with two answers"),
    ],
)
def test_models_and_data_that_cannot_be(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=said):
        runs.run(tmp_path / "run", **{**RECIPE, **changes})


def test_a_run_without_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("task: arithmetic\n")
    with pytest.raises(LmgymError, match=r"has written no model yet \(there is no final/\)"):
        get("reward", "reward_model")([], [], model=str(tmp_path))
