"""A recipe to a typed tree and back: how stages and overrides merge, and that the resolved tree is itself a recipe."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some

from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.grpo.correction import Truncated
from lmgym.algorithms.grpo.credit import GroupMean
from lmgym.algorithms.grpo.surrogate import Sapo
from lmgym.algorithms.reinforce import Reinforce
from lmgym.algorithms.supervised import Supervised
from lmgym.config.build import build_config, dump, load_config, plain, resolved
from lmgym.config.same_recipe import check_same_recipe
from lmgym.config.schema import STAGE_KEYS, Config, EarlyStop, Stage
from lmgym.config.yaml import apply_override, read_yaml
from lmgym.core.constraints import PositiveInt, Share
from lmgym.core.errors import LmgymError
from lmgym.inference.base import Sampling
from lmgym.updates.optimizer import OptimizerSection
from tests.family import grpo

BASE: dict[str, Any] = {"task": "arithmetic", "rewards": {"final_answer": 1.0}}
STAGED = """
task: {name: arithmetic, largest: 9}
rewards: {final_answer: 1.0}
algorithm: {name: grpo, group_size: 6, clip_low: 0.1}
sampling: {max_new_tokens: 20}
optimizer: {learning_rate: 0.01, warmup: 3}
steps: 30
stages:
  - name: warm
    algorithm: supervised
    task: {size: 50}
    optimizer: {learning_rate: 0.02}
    steps: 7
  - name: rl
    rewards: {exact_match: 0.5}
    algorithm: {clip_low: 0.3}
  - task: topics
    name: other
    rewards: {words: 1}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    (tmp_path / "recipe.yaml").write_text(text)
    return load_config(tmp_path / "recipe.yaml", list(overrides))


def test_stages_take_the_top_level_for_what_they_leave_out(tmp_path: Path) -> None:
    warm, rl, other = load(tmp_path, STAGED).stages
    # sections merge key by key; a section with another name replaces the base's; rewards replace
    assert warm.task == {"name": "arithmetic", "largest": 9, "size": 50}
    assert warm.algorithm == Supervised() and warm.steps == 7
    assert (warm.optimizer.learning_rate, warm.optimizer.warmup) == (0.02, 3)
    assert rl.algorithm == grpo(group_size=6, clip_low=0.3) and rl.steps == 30
    assert rl.rewards == {"exact_match": 0.5} and warm.rewards == {"final_answer": 1.0}
    assert rl.task == {"name": "arithmetic", "largest": 9}
    assert other.task == {"name": "topics"} and other.algorithm == grpo(group_size=6, clip_low=0.1)
    assert [stage.sampling.max_new_tokens for stage in (warm, rl, other)] == [20, 20, 20]


def test_a_recipe_without_stages_has_one_called_train() -> None:
    (stage,) = build_config(BASE | {"steps": 3}).stages
    assert (stage.name, stage.steps, stage.algorithm) == ("train", 3, GRPO())


def test_a_name_alone_is_a_section() -> None:
    stage = build_config(BASE | {"algorithm": "reinforce", "env": "single_turn"}).stages[0]
    assert stage.algorithm == Reinforce() and stage.task == {"name": "arithmetic"}
    assert stage.env == {"name": "single_turn"}


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("steps=20", ["steps"], 20),
        ("optimizer.learning_rate=1e-3", ["optimizer", "learning_rate"], 0.001),
        ("optimizer.learning_rate=3", ["optimizer", "learning_rate"], 3.0),
        ("optimizer.betas=[0.5, 0.75]", ["optimizer", "betas"], (0.5, 0.75)),
        ('sampling.stop=["\\n\\n", "END"]', ["sampling", "stop"], ("\n\n", "END")),
        ("early_stop={metric: reward, patience: 2}", ["early_stop", "patience"], 2),
        ("early_stop=null", ["early_stop"], None),
        ("algorithm.group_size=16", ["algorithm", "group_size"], 16),
        ("algorithm.dynamic_sampling=true", ["algorithm", "dynamic_sampling"], True),
        ("algorithm.surrogate.high=1", ["algorithm", "surrogate", "high"], 1.0),
        ("algorithm.surrogate=sapo", ["algorithm", "surrogate"], Sapo()),
        ("algorithm.credit={scale: group}", ["algorithm", "credit"], GroupMean(scale="group")),
        ("algorithm.correction={name: truncated, cap: 3}", ["algorithm", "correction"], Truncated(cap=3.0)),
        ("task=gsm8k", ["task", "name"], "gsm8k"),
        ("task.size=50", ["task", "size"], 50),
        ("rewards.words=0", ["rewards", "words"], 0),
    ],
)
def test_overrides_have_the_type_of_their_key(tmp_path: Path, override: str, path: list[str], value: Any) -> None:
    text = yaml.safe_dump(BASE | {"early_stop": {"metric": "reward", "target": 1}})
    found: Any = load(tmp_path, text, override).stages[0]
    for part in path:
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value and type(found) is type(value)


def test_a_correction_without_a_bound_is_refused() -> None:
    assert Truncated(cap=None, floor=0.5).cap is None
    with pytest.raises(LmgymError, match="bounds the weight by cap, floor or both, and has neither"):
        Truncated(cap=None)


def test_overrides_outside_the_stages(tmp_path: Path) -> None:
    text = yaml.safe_dump(BASE)
    overrides = ["seed=7", "out=runs/b", "policy.model=gpt2", "evaluation.task=topics", "evaluation.task.opening=true"]
    config = load(tmp_path, text, *overrides, "logs.sinks=[tensorboard]", "threads=2", "policy.revision=null")
    assert (config.seed, config.out, config.policy.model, config.threads) == (7, "runs/b", "gpt2", 2)
    assert config.evaluation.task == {"name": "topics", "opening": True}
    assert config.logs.sinks == ["tensorboard"] and config.policy.revision is None


def test_a_stage_is_named_by_its_name_or_its_number(tmp_path: Path) -> None:
    config = load(tmp_path, STAGED, "stages.rl.steps=1", "stages.0.steps=2", "stages.other.algorithm.group_size=3")
    assert [stage.steps for stage in config.stages] == [2, 1, 30]
    assert config.stages[2].algorithm == grpo(group_size=3, clip_low=0.1)


def test_a_section_without_a_name_has_the_default_one(tmp_path: Path) -> None:
    text = """
algorithm: {group_size: 7}
optimizer: {learning_rate: 0.5}
env: {window: 3}
stages:
- {name: a, algorithm: {name: grpo}, env: {name: single_turn}, optimizer: {name: rmsprop}}
- {name: b, algorithm: {name: rloo}}
- {name: c, algorithm: {name: grpo, surrogate: {low: 0.3}}}
"""
    a, b, c = load(tmp_path, yaml.safe_dump(BASE) + text).stages
    rloo = build_config({**BASE, "algorithm": "rloo"}).stages[0].algorithm
    assert [one.algorithm.group_size for one in (a, b, c)] == [7, rloo.group_size, 7]  # rloo is another name
    assert rloo.group_size != 7
    assert a.env == {"name": "single_turn", "window": 3}
    assert (a.optimizer.name, a.optimizer.learning_rate) == ("rmsprop", 0.5)
    parts = {"name": "grpo", "surrogate": {"low": 0.1}}
    own = [{"algorithm": {"surrogate": {"name": "clip", "high": 0.4}}}]
    assert build_config({**BASE, "algorithm": parts, "stages": own}).stages[0].algorithm == grpo(
        clip_low=0.1, clip_high=0.4
    )


def test_a_later_override_wins_over_an_earlier_one(tmp_path: Path) -> None:
    assert load(tmp_path, yaml.safe_dump(BASE), "steps=1", "steps=2").stages[0].steps == 2


def test_an_override_that_no_stage_would_hear_is_refused(tmp_path: Path) -> None:
    assert load(tmp_path, STAGED, "steps=5").stages[2].steps == 5  # one stage has no steps of its own
    with pytest.raises(LmgymError, match=r"override task.largest: every stage .* write stages.a.task.largest or stage"):
        text = (
            "stages: [{name: a, task: {name: arithmetic, largest: 5}, algorithm: supervised}, {name: b, task: topics}]"
        )
        load(tmp_path, f"rewards: {{words: 1}}\n{text}", "task.largest=4")


@pytest.mark.parametrize(
    ("tree", "override", "expected"),
    [
        ({}, "a.b.c=1", {"a": {"b": {"c": 1}}}),
        ({"stages": [{"name": "rl"}]}, "sampling.stop=[x]", {"stages": [{"name": "rl", "sampling": {"stop": ["x"]}}]}),
        ({"stages": [{}]}, "seed=1", {"stages": [{}], "seed": 1}),
        ({"a": {"b": 1}}, "a.c=x y", {"a": {"b": 1, "c": "x y"}}),
        ({"task": "gsm8k"}, "task.limit=5", {"task": {"name": "gsm8k", "limit": 5}}),
        ({"stages": [{"name": "rl"}]}, "stages.rl.steps=1", {"stages": [{"name": "rl", "steps": 1}]}),
        ({"stages": [{}, {}]}, "stages.1.steps=1", {"stages": [{}, {"steps": 1}]}),
        ({"a": 1}, "a=k=v", {"a": "k=v"}),
        ({"a": 1}, "a=", {"a": None}),
        ({"early_stop": None}, "early_stop.patience=3", {"early_stop": {"patience": 3}}),
        ({"evaluation": {"task": None}}, "evaluation.task.path=x", {"evaluation": {"task": {"path": "x"}}}),
        ({"a": 1}, "a='Write #### and'", {"a": "Write #### and"}),
        ({"a": 1}, "a=b#c", {"a": "b#c"}),
        ({"a": 1}, "a=b: 1 # one\nc: 2", {"a": {"b": 1, "c": 2}}),
    ],
)
def test_what_an_override_does_to_the_tree(tree: dict[str, Any], override: str, expected: dict[str, Any]) -> None:
    apply_override(tree, override, STAGE_KEYS)
    assert tree == expected


def test_the_resolved_tree_writes_every_default_out() -> None:
    tree = resolved(build_config(BASE))
    assert tree["stages"][0]["algorithm"] == plain(GRPO())
    assert tree["stages"][0]["sampling"]["temperature"] == 1.0
    assert tree["evaluation"]["task"] is None and tree["policy"]["model"] == "builtin:tiny"


names = some.text("abcdefghij", min_size=1, max_size=5)
numbers = some.floats(1e-6, 1.0)
algorithms = some.one_of(
    some.fixed_dictionaries(
        {
            "name": some.just("grpo"),
            "group_size": some.integers(2, 9),
            "reduction": some.sampled_from(["token", "constant"]),
        }
    ),
    some.fixed_dictionaries({"name": some.just("reinforce"), "baseline": some.sampled_from(["none", "ema", "scst"])}),
    some.sampled_from(["rloo", "supervised"]),
)
stage_trees = some.fixed_dictionaries(
    {"name": names},
    optional={
        "algorithm": algorithms,
        "steps": some.integers(1, 10**6),
        "task": some.sampled_from(["gsm8k", {"name": "arithmetic", "operations": ["add"], "limit": 3}]),
        "rewards": some.dictionaries(some.sampled_from(["words", "final_answer"]), numbers, min_size=1),
        "optimizer": some.fixed_dictionaries({"learning_rate": numbers, "betas": some.tuples(numbers, numbers).map(
            lambda pair: [value * 0.99 for value in pair])}),
        "sampling": some.fixed_dictionaries({"stop": some.lists(some.text(min_size=1)), "temperature": numbers}),
        "early_stop": some.fixed_dictionaries({"metric": some.text(), "target": numbers}),
    },
)  # fmt: skip
trees = some.fixed_dictionaries(
    {"stages": some.lists(stage_trees, min_size=1, max_size=3, unique_by=lambda stage: stage["name"])},
    optional={
        "seed": some.integers(0, 2**40),
        "out": some.one_of(some.none(), some.text(min_size=1)),
        "evaluation": some.fixed_dictionaries(
            {"every": some.integers(0, 9), "task": some.none() | some.just("topics")}
        ),
        "policy": some.fixed_dictionaries({"template": some.dictionaries(names, some.booleans())}),
    },
)


@pytest.mark.slow
@given(trees)
def test_a_resolved_recipe_resolves_to_itself(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]) -> None:
    config = build_config(BASE | tree)
    text = dump(config)
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    again = load_config(path)
    assert again == config and dump(again) == text


def test_a_config_can_be_written_in_python(tmp_path: Path) -> None:
    config = Config(stages=[Stage(task={"name": "arithmetic"}, rewards={"final_answer": 1.0}, steps=5)])
    (tmp_path / "recipe.yaml").write_text(dump(config))
    assert load_config(tmp_path / "recipe.yaml") == config


def test_read_yaml_keeps_what_a_recipe_may_hold(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &anchor {b: 1, c: é}\nd: {<<: *anchor, c: 2}\n", encoding="utf-8")
    assert read_yaml(tmp_path / "a.yaml") == {"a": {"b": 1, "c": "é"}, "d": {"b": 1, "c": 2}}


def test_a_former_key_is_replaced_with_a_warning(tmp_path: Path) -> None:
    """Also over a preset's own value, and in the recipe.yaml of an older run folder."""
    for name, value in (("grpo", 0.25), ("dapo", "5e-1")):
        with pytest.warns(FutureWarning, match=r"'algorithm\.drift_coefficient' is now called 'algorithm\.squared_log"):
            config = build_config(BASE | {"algorithm": {"name": name, "drift_coefficient": value}})
        assert config.stages[0].algorithm.squared_log_ratio_coefficient == float(value)  # type: ignore[attr-defined]
        assert "drift_coefficient" not in dump(config).replace("squared_log_ratio_coefficient", "")
    with pytest.raises(
        LmgymError, match=r"former name of 'algorithm\.squared_log_ratio_coefficient'; remove one of them"
    ):
        both = {"drift_coefficient": 0.1, "squared_log_ratio_coefficient": 0.1}
        build_config(BASE | {"algorithm": {"name": "grpo", **both}})
    folder = tmp_path / "run"
    folder.mkdir()
    config = build_config(BASE | {"out": str(folder)})
    text = dump(config).replace("squared_log_ratio_coefficient", "drift_coefficient")
    (folder / "recipe.yaml").write_text(text)
    with pytest.warns(FutureWarning):
        check_same_recipe(config, "a.yaml")


@dataclass(kw_only=True)
class Bounded(GRPO):
    """A user's own: a field with a bound, and one of the base's with another default."""

    group_size: int = 4
    half_life: PositiveInt = 10
    shares: list[Share] = field(default_factory=list)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"half_life": 0}, "algorithm.half_life is 0; it must be at least 1"),
        ({"half_life": True}, "key 'algorithm.half_life' must be a number, got True"),
        ({"group_size": 1}, "algorithm.group_size is 1; grpo needs at least 2 answers per prompt"),
        ({"shares": [0.5, 2]}, r"algorithm.shares are \[0.5, 2.0\]; each must lie between 0 and 1"),
        ({"shares": [0.5, False]}, "key 'algorithm.shares.1' must be a number, got False"),
        ({"kl_in": "losss"}, "key 'algorithm.kl_in': input should be 'reward' or 'loss'"),
    ],
)
def test_bounds_of_a_users_algorithm_hold_in_a_recipe_and_in_python(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        Bounded(**values)
    with pytest.raises(LmgymError, match=sentence):
        build_config(BASE | {"algorithm": {"name": f"{__name__}:Bounded", **values}})
    assert Bounded(group_size=3).group_size == 3


def test_sections_built_in_python_are_checked() -> None:
    for make, sentence in (
        (
            lambda: OptimizerSection(betas=(0.9, 1.0)),
            r"optimizer.betas are \(0.9, 1.0\); each must be at least 0 and below 1",
        ),
        (lambda: Stage(steps=0), "^steps is 0; it must be at least 1"),
        (lambda: Sampling(stop=("a", "")), r"sampling.stop are \('a', ''\); an empty string would end every answer"),
        (lambda: EarlyStop(metric="reward"), "early_stop never stops anything"),
    ):
        with pytest.raises(LmgymError, match=sentence):
            make()


def test_a_wrong_value_of_one_of_several_stages_is_told_with_its_stage() -> None:
    stages = [{"name": "a"}, {"name": "b", "optimizer": {"warmup": -1}}]
    with pytest.raises(LmgymError, match=r"^stages\.b\.optimizer\.warmup is -1; it must be at least 0"):
        build_config(BASE | {"stages": stages})
