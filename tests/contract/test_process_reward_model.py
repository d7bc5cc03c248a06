"""A process reward model from steps: what is trained, what is written and what the reward says are the same numbers,
what its evaluations report, and one sentence for what cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from lmgym.algorithms.process_reward_model import step_logits
from lmgym.batch import collate
from lmgym.cli.main import main
from lmgym.config.build import build_config, load_config
from lmgym.core.errors import LmgymError
from lmgym.core.registry import get
from lmgym.rewards.learned import scorers
from lmgym.rewards.learned.process import aggregated
from lmgym.rollouts.given_answers import labelled_steps
from lmgym.training.machine import choose_machine
from lmgym.training.setup import actor_of, load_weights, newest_model
from lmgym.types import Example, LabelledStep
from tests import learned_models as tiny
from tests import runs

RECIPE: dict[str, Any] = {"algorithm": "process_reward_model", "task": runs.STEPS, "rewards": None}
LLAMA = {"model": "builtin:tiny", "architecture": runs.ARCHITECTURE}


def said_by_policy(run: Path, examples: list[Example], separator: str) -> list[list[float]]:
    """The probability of each step of the examples' answers, by the value head of the run's newest checkpoint."""
    config = load_config(run / "recipe.yaml")
    policy = load_weights(config.policy, config.seed, choose_machine(config, run), newest_model(run))
    batch = collate(labelled_steps(list(enumerate(examples)), actor_of(config, policy), separator), policy.pad_id)
    logits, _ = step_logits(batch, policy.compute_logprobs_no_grad(batch, values=True, last_values=True))
    values = iter(logits.double().sigmoid().tolist())
    return [[next(values) for _ in example.steps] for example in examples]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "separator"),
    [
        (LLAMA, "\n"),
        ({"model": "builtin:tiny_gpt2"}, "\n\n"),
        ({**LLAMA, "critic": "separate"}, "<eos>"),
        ({**LLAMA, "lora_rank": 2}, " |"),
    ],
    ids=["llama", "gpt2", "separate", "lora"],
)
def test_the_reward_is_what_was_trained(
    policy: dict[str, Any],
    separator: str,
    tmp_path: Path,
) -> None:
    """The value head in the run, transformers' classifier of final/, and the reward of the run folder agree. fp32, sums
    over at most 64 numbers a layer and a few layers: 1e-5 of logits of order 1."""
    algorithm = {"name": "process_reward_model", "separator": separator}
    changes = {**RECIPE, "algorithm": algorithm, "policy": {**policy, "device": "cpu"}}
    run = runs.run(tmp_path / "run", **changes, steps=8)
    examples = runs.in_steps("test")[:6]
    wanted = said_by_policy(run, examples, separator)
    assert max(abs(p - 0.5) for own in wanted for p in own) > 1e-3  # it has learned something
    texts = [separator.join(step.text for step in example.steps) for example in examples]
    for how in ("min", "product", "last", "mean"):
        paid = get("reward", "process_reward_model")(texts, examples, model=str(run), aggregate=how, device="cpu")
        assert paid == pytest.approx([aggregated(own, how) for own in wanted], rel=1e-4, abs=1e-5)
    # As any user of transformers would read it, each row alone.
    model = AutoModelForTokenClassification.from_pretrained(run / "final")
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert model.config.label2id == {"wrong": 0, "right": 1} and model.config.lmgym["separator"] == separator

    def bare(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    for example, probabilities in zip(examples, wanted, strict=True):
        begin = [tokenizer.bos_token_id] if tokenizer(".")["input_ids"][0] == tokenizer.bos_token_id else []
        ids, ends = [*begin, *bare(str(example.prompt))], []
        for step in example.steps:
            ids += [*bare(step.text.strip()), *bare(separator)]
            ends.append(len(ids) - 1)
        with torch.no_grad():
            found = model(torch.tensor([ids])).logits[0, ends].softmax(-1)[:, 1].tolist()
        assert found == pytest.approx(probabilities, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_what_a_run_of_a_process_reward_model_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Evaluations of held-out steps with intervals and no sampled answers; where it comes from; the picture."""
    changes = {"evaluation": {"every": 3, "examples": 16, "keep_best": "step/accuracy"}}
    run = runs.run(tmp_path / "run", **RECIPE, **changes)
    evaluated = [one for one in runs.records(run / "metrics.jsonl") if one["kind"] == "evaluation"]
    first = evaluated[0]
    # A head of zeros: each step is a toss-up, which counts as half, and none is found wrong.
    assert first["step/accuracy"] == 0.5 and first["step/first_wrong"] == 0 and first["step/all_right"] == 1
    assert first["calibration/error"] == 0 and first["calibration/error/low"] is None
    assert first["step/accuracy/low"] < 0.5 < first["step/accuracy/high"]
    assert not {"reward", "length/mean", "preference/accuracy"} & evaluated[-1].keys()
    summary = json.loads((run / "summary.json").read_text())["after"]
    count = sum(len(example.steps) for example in runs.in_steps("test")[:16])
    assert sum(one["count"] for one in summary["calibration"]) == count
    assert (run / "calibration.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((run / "final" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForTokenClassification"]
    base = {"base_model": "builtin:tiny", "revision": None, "licence": None, "template": {}}
    assert config["lmgym"] == {"layout": "steps", "separator": "\n", **base}
    assert (run / "best" / "config.json").is_file()
    # Exported from its newest checkpoint it is the same; it answers nothing.
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 0
    same = ["model.safetensors", "config.json"]
    assert [(run / "final" / name).read_bytes() for name in same] == [(tmp_path / "out" / n).read_bytes() for n in same]
    assert main(["eval", str(run)]) == 1
    assert f"rewards: {{process_reward_model: {{model: {run}}}}}" in capsys.readouterr().err
    # GRPO against it, by the name of its run.
    rewards = {"process_reward_model": {"model": str(run), "aggregate": "mean"}}
    policy = runs.run(tmp_path / "grpo", rewards=rewards, steps=2)
    assert 0 < runs.records(policy / "metrics.jsonl")[-1]["reward"] < 1


def test_how_probabilities_become_one_number() -> None:
    found = {how: aggregated([0.9, 0.5, 0.8], how) for how in ("min", "product", "last", "mean")}
    assert found == pytest.approx({"min": 0.5, "product": 0.36, "last": 0.8, "mean": 2.2 / 3})


def asked(folder: str, text: str, **arguments: Any) -> float:
    return float(get("reward", "process_reward_model")([text], [Example("a/0", "1?")], model=folder, **arguments)[0])


def test_answers_without_steps_and_models_of_others(tmp_path: Path) -> None:
    """No step earns nothing. A model that does not name its separator needs one; cut steps do not count."""
    ours, theirs = tiny.steps(tmp_path / "ours", separator=";"), tiny.steps(tmp_path / "theirs")
    assert asked(ours, "") == asked(ours, " ;\n; ") == 0
    assert 0 < asked(ours, "one;two") < 1 and asked(ours, " one; two;;") == asked(ours, "one;two")
    assert asked(theirs, "one;two", separator=";") == asked(ours, "one;two")
    long = ";".join(["step"] * 200)
    with pytest.raises(LmgymError, match=r"a prompt with its answer has .* tokens, and .* reads 256"):
        asked(ours, long)
    assert asked(ours, long, truncation="left") > 0 and asked(ours, long, truncation="right") > 0
    assert asked(ours, "step " * 300, truncation="right") == 0 < asked(ours, "step " * 300, truncation="left")
    for folder, arguments, said in (
        (theirs, {}, r"separator': .* does not say how its steps were separated; write it, such as"),
        (ours, {"separator": "\n"}, r"separator': .* was trained with ';', not '\\n'; remove it"),
        (
            tiny.scalar(tmp_path / "scalar"),
            {},
            "'process_reward_model' needs a model with a trained head for each token",
        ),
        (tiny.steps(tmp_path / "three", id2label={0: "a", 1: "b", 2: "c"}), {}, r"has 3 labels \(a, b, c\), and"),
    ):
        with pytest.raises(LmgymError, match=said):
            asked(folder, "one", **arguments)
    scorers._loaded.clear()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {
                "stages": [
                    {"name": "prm", "algorithm": "process_reward_model"},
                    {"name": "rl", "rewards": {"regex": {"pattern": "1"}}},
                ],
                "algorithm": None,
            },
            "stage 'prm' makes a reward model of the policy, so it must be the last stage",
        ),
        ({"policy": {"answer_start": "So"}}, r"policy\.answer_start: stage 'train' makes a reward model"),
        ({"policy": {"critic": "none"}}, r"process_reward_model needs a value function, and policy\.critic is none"),
        ({"algorithm": {"name": "process_reward_model", "separator": ""}}, r"algorithm\.separator is empty"),
        ({"algorithm": {"name": "process_reward_model", "group_size": 2}}, "here the task gives them, so remove it"),
        ({"env": "guess_number"}, "learns from the labelled steps of a task, and environment 'guess_number' has none"),
        ({"algorithm": "prm"}, "is called process_reward_model here"),
    ],
)
def test_recipes_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LmgymError, match=said):
        build_config(runs.tiny(**{**RECIPE, **changes}))


def broken(split: str) -> list[Example]:
    """One step holds a line break."""
    first, *others = runs.in_steps(split)
    return [Example("broken/0", "?", steps=(LabelledStep("1\n2", True),)), first, *others]


def long(split: str) -> list[Example]:
    first, *others = runs.in_steps(split)
    return [Example("long/0", "?" * 60, steps=(LabelledStep("1" * 60, True),) * 2), first, *others]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": {"model": "builtin:tiny_t5"}}, "made of a causal model, and t5 is an encoder-decoder"),
        ({"task": runs.JUDGED}, r"has no labelled steps to learn from; the task step_labels reads them from files"),
        ({"task": f"{__name__}:broken"}, r"example broken/0: the step '1\\n2' holds the separator '\\n'"),
        (
            {"task": f"{__name__}:long"},
            r"the prompt and steps of example 'long/0' have 183 tokens, and the model reads",
        ),
    ],
)
def test_models_and_data_that_cannot_be(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=said):
        runs.run(tmp_path / "run", **{**RECIPE, **changes})


@pytest.mark.slow
def test_lmgym_check_tries_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(runs.write(tmp_path / "recipe.yaml", **RECIPE))]) == 0
    assert "a step takes about" in capsys.readouterr().out
