"""Values that no computation survives: one sentence from the place that knows the reward, tensor, token or limit."""

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lmgym.algorithms.supervised import Supervised
from lmgym.batch import collate
from lmgym.cli.main import main
from lmgym.core.constraints import LARGEST_REWARD
from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.envs.step_checks import check_step
from lmgym.inference.base import Decoding, Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.rewards.base import Reward
from lmgym.rollouts.rollout import apply_rewards
from lmgym.stats.intervals import mean_interval
from lmgym.stats.paired import compare_paired
from lmgym.training.planning.preflight import check_new_tokens
from lmgym.types import Episode, Example, Turn
from lmgym.updates.prepare import prepare
from tests import runs


def section(**changes: Any) -> PolicySection:
    return PolicySection(**{"model": "builtin:tiny", "device": "cpu", "architecture": runs.ARCHITECTURE, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its tokenizer as files."""
    folder = tmp_path_factory.mktemp("model")
    policy = load_policy(section())
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def of_folder(folder: Path) -> Policy:
    return load_policy(section(model=str(folder), architecture={}))


# ---------------------------------------------------------------- rewards


def episode() -> Episode:
    return Episode(Example("task/7", "?"), 0, 0, [Turn([1], [2], text="x")])


@pytest.mark.parametrize(
    ("value", "weight", "said"),
    [
        (1e300, 1.0, r"reward 'judge' gave 1e\+300 \(weight 1\) for example 'task/7'.*within 1e\+15"),
        (-3e38, 0.5, r"reward 'judge' gave -3e\+38 \(weight 0.5\)"),
        (1e300, 1e-290, r"reward 'judge' gave 1e\+300"),  # the weighted one would do, but it is scaled as it is too
        (0.5, 1e300, r"reward 'judge' gave 0.5 \(weight 1e\+300\)"),
    ],
)
def test_a_reward_that_fp32_does_not_hold_is_named(value: float, weight: float, said: str) -> None:
    with pytest.raises(LmgymError, match=said):
        apply_rewards([episode()], [Reward("judge", weight, function=lambda texts, examples: [value] * len(texts))])


def test_a_metric_may_be_huge_and_a_reward_large() -> None:
    own = episode()
    rewards = [
        Reward("perplexity", 0.0, function=lambda texts, examples: [1e300]),
        Reward("large", 1.0, function=lambda texts, examples: [LARGEST_REWARD]),
    ]
    apply_rewards([own], rewards)
    assert (own.score, own.reward_components["perplexity"]) == (LARGEST_REWARD, 1e300)
    interval = mean_interval([[1e308], [1.7e308], [1.5e308, 1.6e308]])
    assert interval.mean == pytest.approx(1.4166e308, rel=1e-3) and not interval.low > interval.high
    assert math.isfinite(compare_paired([[1e308], [1.0]], [[1.0], [1e308]]).difference.mean)


def test_a_run_with_such_a_reward_ends_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", rewards={"length": {"weight": 1e30}}, steps=1)
    assert main(["train", str(recipe), f"out={tmp_path / 'run'}"]) == 1
    assert "lmgym: reward 'length' gave" in (said := capsys.readouterr().err) and "Traceback" not in said


@pytest.mark.parametrize("reward", [1e300, -1e16, math.inf, math.nan, True, "1"])
def test_an_environment_that_pays_such_a_reward_is_told(reward: Any) -> None:
    with pytest.raises(ValueError, match=r"it must be a finite number within 1e\+15"):
        check_step(Step(reward=reward))


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_a_weight_that_is_no_number_is_named_with_its_file(folder: Path, tmp_path: Path, wrong: float) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "mlp" in name)
    weights[name][1, 2:4] = wrong
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    said = rf"the tensor '{name}' in model.safetensors of {tmp_path} holds {wrong} \(2 of "
    with pytest.raises(LmgymError, match=said):
        of_folder(tmp_path)


def test_a_model_with_fewer_tokens_than_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    policy = of_folder(folder)
    policy.model.resize_token_embeddings(100)
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(LmgymError, match=r"ids up to 258, and the model .* has 0 to 99 only; it lacks 159 of them"):
        of_folder(tmp_path)
    last = policy.tokenizer.convert_ids_to_tokens(258)
    with pytest.raises(LmgymError, match=r"end-of-sequence token '.*' is id 258, and the model .* has 0 to 99 only"):
        load_policy(section(model=str(tmp_path), architecture={}, eos_token=last))


def test_a_token_that_only_the_tokenizer_has_is_refused_where_a_text_holds_it(folder: Path, tmp_path: Path) -> None:
    """As Gemma 3's for images, or a pad token that was added without an embedding: the model works without it."""
    policy = of_folder(folder)
    policy.tokenizer.add_special_tokens({"pad_token": "<added>"})
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    policy = of_folder(tmp_path)
    added = policy.tokenizer.pad_token_id
    assert added >= policy.vocabulary > policy.pad_id
    request = Request((5, 6), key=1)
    engine = Sampler(policy)
    assert engine.generate([request, Request((5,), key=2)], Sampling(max_new_tokens=2))[0].ids
    with pytest.raises(LmgymError, match=rf"a prompt holds '<added>' \(id {added}\), and the model has the ids 0 to"):
        engine.generate([Request((5, added), key=1)], Sampling(max_new_tokens=2))


def test_a_reference_with_a_token_that_the_model_lacks() -> None:
    policy = load_policy(section())
    batch = collate([Episode(Example("x", "?"), 0, 0, [Turn([1], [policy.vocabulary + 3])])])
    said = rf"holds the token id {policy.vocabulary + 3}, and the model has the ids 0 to {policy.vocabulary - 1} only"
    with pytest.raises(LmgymError, match=said):
        prepare(batch, policy, {}, Supervised())


# ---------------------------------------------------------------- max_new_tokens


def test_more_new_tokens_than_the_context_or_the_memory_holds() -> None:
    causal, halves = load_policy(section()), load_policy(section(model="builtin:tiny_t5", architecture={}))
    assert (causal.context, halves.context) == (128, None)
    with pytest.raises(
        LmgymError, match=r"^sampling.max_new_tokens is 1,000,000,000, and the model reads 128 tokens at"
    ):
        check_new_tokens(Sampling(max_new_tokens=1_000_000_000), causal)
    with pytest.raises(LmgymError, match=r"^evaluation.max_new_tokens is 129, and"):
        check_new_tokens(Decoding(max_new_tokens=129), causal)
    check_new_tokens(Sampling(max_new_tokens=128), causal)
    with pytest.raises(
        LmgymError, match=r"is 1,000,000,000,000,000, and the memory here holds the keys and values of [\d,]+ tokens at"
    ):
        check_new_tokens(Sampling(max_new_tokens=10**15), halves)
    with pytest.raises(LmgymError, match="and the memory here holds the keys and values of"):
        Sampler(halves).generate([Request((0,), key=1, source_ids=(5,))], Sampling(max_new_tokens=10**15))
    check_new_tokens(Sampling(max_new_tokens=10_000), halves)


def test_a_limit_beyond_the_context_costs_nothing() -> None:
    """Random numbers are drawn for the tokens that the context leaves room for; a billion would not fit the memory."""
    engine = Sampler(load_policy(section()))
    requests = [Request((5, 6, 7), key=1), Request((5, 6), key=2)]
    few = engine.generate(requests, Sampling(max_new_tokens=125))
    many = engine.generate(requests, Sampling(max_new_tokens=1_000_000_000))
    assert few[0].ids == many[0].ids and few[1].ids == many[1].ids[: len(few[1].ids)]


def test_such_a_recipe_is_refused_before_its_folder_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", sampling={"max_new_tokens": 1_000_000_000})
    assert main(["train", str(recipe), f"out={tmp_path / 'run'}"]) == 1
    assert "lmgym: sampling.max_new_tokens is 1,000,000,000" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
