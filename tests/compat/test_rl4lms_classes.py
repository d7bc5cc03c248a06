"""Classes that were written for RL4LMs' registries: they work as they are, in a recipe and one by one."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lmgym.algorithms.actor_critic import PPO
from lmgym.compat.rl4lms.classes import recipe_arguments
from lmgym.compat.rl4lms.data_pool import Sample, TextGenPool
from lmgym.compat.rl4lms.learners import wrap_onpolicy_alg
from lmgym.compat.rl4lms.metric import BaseMetric
from lmgym.compat.rl4lms.post_processors import three_sentence_summary
from lmgym.compat.rl4lms.registries import (
    AlgorithmRegistry,
    DataPoolRegistry,
    MetricRegistry,
    PolicyRegistry,
    PostProcessorRegistry,
    RewardFunctionRegistry,
    WrapperRegistry,
)
from lmgym.compat.rl4lms.reward import BatchedRewardFunction, Observation, RewardFunction, observations
from lmgym.config.build import build_config
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.rewards.base import call_reward, check_examples
from lmgym.rewards.building import build_rewards
from lmgym.rollouts.rollout import apply_rewards
from lmgym.tasks.base import MissingSplit, check_task, load_task
from lmgym.tasks.stream import Stream
from lmgym.training.setup import training_examples
from lmgym.types import Episode, Example, Turn
from tests import models, runs

BYTES = models.tokenizer()
LOG = list[Any]()  # what the rewards below were called with


@pytest.fixture(autouse=True)
def nothing_added() -> Iterator[None]:
    """Registries as they were, with the built-ins that the test has imported: no import registers them again."""
    builtin = {name for names in registry.BUILTIN.values() for name in names}
    tables: list[dict[str, Any]] = [registry._registered[kind] for kind in registry._registered]
    tables += [DataPoolRegistry.added, RewardFunctionRegistry.added, MetricRegistry.added, MetricRegistry._names]
    tables += [WrapperRegistry.added, PolicyRegistry.added]
    before = [dict(table) for table in tables]
    LOG.clear()
    yield
    for table, kept in zip(tables, before, strict=True):
        imported = {name: thing for name, thing in table.items() if name in builtin and _of_lmgym(thing)}
        table.clear()
        table.update(imported | kept)


def _of_lmgym(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("lmgym.")


def answered(*texts: str, references: tuple[str, ...] = ("ab",), meta: dict[str, Any] | None = None) -> list[Episode]:
    """One episode per text: prompt "p?" of two tokens, then a token a byte and the end."""
    episodes = []
    for place, text in enumerate(texts):
        example = Example(f"a/{place}", "p?", references, meta or {"level": place})
        ids = [*BYTES(text, add_special_tokens=False)["input_ids"], models.EOS]
        episodes.append(Episode(example, 0, place, [Turn([115, 66], ids, [-1.0] * len(ids), text)]))
    return episodes


# ---------------------------------------------------------------- data pools


class Sums(TextGenPool):
    """As RL4LMs' README writes a pool."""

    @classmethod
    def prepare(cls, split: str, largest: int = 3, letters: str = "") -> "TextGenPool":
        if split == "test":
            raise NotImplementedError
        first = {"train": 0, "val": 100}[split]
        samples = [
            Sample(id=f"{split}_{n}", prompt_or_input_text=f"{letters}{n}+{n}=", references=[str(2 * n)])
            for n in range(first, first + largest)
        ]
        samples[0].meta_data = {"level": 1}
        return cls(samples)


class Unprepared(TextGenPool):
    """A pool that never says where its samples come from."""


class Weighted(Sums):
    def __getitem__(self, ix: int) -> tuple[Sample, float]:
        return super().__getitem__(ix)[0], 1.0 + ix


def test_a_pool_is_a_task() -> None:
    DataPoolRegistry.add("sums", Sums)
    examples = load_task("sums", "validation", largest=2, letters="x")
    assert examples == [
        Example("sums/validation/val_100", "x100+100=", ("200",), {"level": 1}),  # its own name of the split is val
        Example("sums/validation/val_101", "x101+101=", ("202",), {}),
    ]
    check_task("sums")
    assert "sums" in registry.names("task")
    assert next(row for row in registry.describe("task") if row["name"] == "sums")["summary"].startswith("As RL4LMs'")
    with pytest.raises(MissingSplit, match="task 'sums' has no split 'test'"):
        load_task("sums", "test")
    DataPoolRegistry.add("unprepared", Unprepared)
    with pytest.raises(LmgymError, match=r"Unprepared has no prepare\(\)") as raised:
        load_task("unprepared", "train")
    assert not isinstance(raised.value, MissingSplit)  # it is no missing split
    with pytest.raises(LmgymError, match=r"unknown key 'task.larges'; did you mean 'largest'\?"):
        load_task("sums", "train", larges=2)
    config = build_config(runs.tiny(task={"name": "sums", "largest": 8}))
    assert config.stages[0].task == {"name": "sums", "largest": 8}


def test_what_a_pool_can_do_by_itself() -> None:
    pool = Sums.prepare("train", largest=10)
    assert len(pool) == 10 and pool[3] == (Sample("train_3", "3+3=", ["6"]), 1.0)
    assert [sample.id for sample, _ in pool] == [f"train_{n}" for n in range(10)]  # ends by itself
    assert pool.sample() in [sample for sample, _ in pool]
    parts = pool.split([0.5, 0.25, 0.25])
    assert [len(part) for part in parts] == [5, 2, 2]  # each rounded down, as in RL4LMs
    assert parts[1][0][0].id == "train_5" and isinstance(parts[1], Sums)
    DataPoolRegistry.add("sums", Sums)
    assert len(DataPoolRegistry.get("sums", {"split": "train", "largest": 4})) == 4


def test_a_pools_weights_are_priorities() -> None:
    DataPoolRegistry.add("weighted", Weighted)
    examples = load_task("weighted", "train")
    assert [example.meta.get("weight", 1.0) for example in examples] == [1.0, 2.0, 3.0]
    stream = Stream(examples, seed=0, prompts_per_step=600, priority_scale=1.0)
    drawn = [int(example.id[-1]) for example in stream.at(0)]
    assert [drawn.count(n) / 600 for n in range(3)] == pytest.approx([1 / 6, 2 / 6, 3 / 6], abs=0.06)  # 3 s.e.


@pytest.mark.parametrize(
    ("samples", "complaint"),
    [
        ([Sample("1", "a", "b")], "the references of sample '1' are one text; they must be a list"),  # type: ignore[arg-type]
        ([Sample("1", 7, ["b"])], "bad/train: sample '1' has 7 where a text must be"),  # type: ignore[arg-type]
        ([Sample("1", "a", [None])], "sample '1' has None where a text must be"),  # type: ignore[list-item]
        ([Sample("1", "a", []), Sample("1", "b", [])], "the id 'bad/train/1' comes twice"),
        ([], "task 'bad' has no examples in split 'train'"),
    ],
)
def test_what_is_wrong_with_a_pool_is_said(samples: list[Sample], complaint: str) -> None:
    class Bad(TextGenPool):
        @classmethod
        def prepare(cls, split: str) -> "TextGenPool":
            return cls(samples)

    DataPoolRegistry.add("bad", Bad)
    with pytest.raises(LmgymError, match=complaint):
        load_task("bad", "train")


def test_a_pool_that_fails_says_where() -> None:
    class EnvFailure(TextGenPool):
        @classmethod
        def prepare(cls, split: str, path: str) -> "TextGenPool":
            raise KeyError(path)

    DataPoolRegistry.add("broken", EnvFailure)
    with pytest.raises(LmgymError, match=r"task 'broken': prepare\(split='train'\) raised KeyError: 'x.json'"):
        load_task("broken", "train", path="x.json")
    with pytest.raises(LmgymError, match=r"key 'task.path' is missing"):
        load_task("broken", "train")
    with pytest.raises(LmgymError, match="takes a subclass of TextGenPool, not <class 'dict'>"):
        DataPoolRegistry.add("no_pool", dict)


class Shuffled(TextGenPool):
    """As RL4LMs' IMDB, which has a seed, and its summaries, which have a prefix: names that a recipe has too."""

    @classmethod
    def prepare(cls, split: str, seed: int, prompt_prefix: str = "Sum up: ", limit: int = 2) -> "TextGenPool":
        return cls([Sample(str(n), f"{prompt_prefix}{split} {seed + n}", []) for n in range(limit)])


def test_arguments_that_are_called_like_a_recipes_own() -> None:
    DataPoolRegistry.add("shuffled", Shuffled)
    own = {"own_seed": 4, "own_prompt_prefix": "In short: "}
    assert [example.prompt for example in load_task("shuffled", "train", **own)] == [
        "In short: train 4",
        "In short: train 5",
    ]
    (example,) = load_task("shuffled", "train", own_seed=7, limit=1, prompt_prefix="> ", seed=1)  # those of any task
    assert example.prompt == "> Sum up: train 7"
    section = {"name": "shuffled", **recipe_arguments("task", "shuffled", {"seed": 4, "limit": 9})}
    assert section == {"name": "shuffled", "own_seed": 4, "own_limit": 9}
    config = build_config(runs.tiny(task=section, seed=1))
    assert [example.prompt for example in training_examples(config, config.stages[0])][-1] == "Sum up: train 12"
    with pytest.raises(LmgymError, match=r"unknown key 'task.seed'.*own_seed"):
        build_config(runs.tiny(task={"name": "shuffled", "seed": 4}))

    class Weighs(Commas):
        def __init__(self, weight: float, part: str = "x") -> None:
            super().__init__(bonus=weight)

    RewardFunctionRegistry.add("weighs", Weighs)
    (episode,) = answered("ab")
    apply_rewards(
        [episode], build_rewards({"weighs": {"weight": 2.0, "own_weight": 3.0, "own_part": "y"}}), tokenizer=BYTES
    )
    assert episode.reward_components == {"weighs": 3.0} and episode.score == 6.0


# ---------------------------------------------------------------- rewards


class Commas(RewardFunction):
    """A point for each comma at its token, and `bonus` at the end where a reference is in the text."""

    def __init__(self, bonus: float = 0.5) -> None:
        super().__init__()
        self.bonus = bonus

    def __call__(
        self,
        prev_observation: Observation,
        action: int,
        current_observation: Observation,
        done: bool,
        meta_info: dict[str, Any] | None = None,
    ) -> float:
        LOG.append((prev_observation, action, current_observation, done, meta_info))
        new = current_observation.context_text.count(",") - prev_observation.context_text.count(",")
        found = any(text in current_observation.context_text for text in current_observation.target_or_reference_texts)
        return new + (self.bonus if done and found else 0)


class AtTheEnd:
    """As RL4LMs' own reward of dates: no base class, called like one."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):  # type: ignore[no-untyped-def]
        return len(current_observation.context_text) if done else 0


class Batched(BatchedRewardFunction):
    """As RL4LMs' learned one: numbers for whole answers, zero for beginnings."""

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):  # type: ignore[no-untyped-def]
        LOG.append((prompt_texts, gen_texts, ref_texts, dones, meta_infos))
        rewards = torch.zeros(len(prompt_texts))
        for ix, (text, done) in enumerate(zip(gen_texts, dones, strict=True)):
            if done:
                rewards[ix] = len(text)
        return rewards


class WholeAnswersOnly(BatchedRewardFunction):
    """As RL4LMs' batched penalty of CommonGen: a list that has no entry for beginnings."""

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):  # type: ignore[no-untyped-def]
        return [len(text) for text, done in zip(gen_texts, dones, strict=True) if done]


def test_a_step_reward_sees_what_rl4lms_shows_it() -> None:
    (episode,) = answered("a,", references=("a,", "x"), meta={"level": 3})
    RewardFunctionRegistry.add("commas", Commas)
    apply_rewards([episode], build_rewards({"commas": 1.0}), tokenizer=BYTES)
    assert [action for _, action, *_ in LOG] == episode.turns[0].action_ids
    assert [(before.context_text, after.context_text) for before, _, after, *_ in LOG] == [
        ("", "a"),
        ("a", "a,"),
        ("a,", "a,"),  # the end of sequence is no text
    ]
    assert [done for *_, done, _ in LOG] == [False, False, True]
    for before, _, after, _, meta in LOG:
        assert before.prompt_or_input_text == after.prompt_or_input_text == "p?"
        assert after.target_or_reference_texts == ["a,", "x"] and meta == after.meta_info == {"level": 3}
    last = LOG[-1][2]
    assert last.action_history == BYTES.convert_ids_to_tokens(episode.turns[0].action_ids)
    assert last.prompt_or_input_encoded_pt.tolist() == [[115, 66]]
    assert last.context_encoded_pt.tolist() == [episode.turns[0].action_ids]
    assert last.input_encoded_pt.tolist() == [[115, 66, *episode.turns[0].action_ids]]
    masks = (
        last.prompt_or_input_attention_mask_pt, last.context_attention_mask_pt, last.input_attention_mask_pt,
    )  # fmt: skip
    assert [mask.tolist() for mask in masks] == [[[1] * 2], [[1] * 3], [[1] * 5]]
    assert BYTES.decode(last.context_encoded_pt[0], skip_special_tokens=True) == "a,"


def test_a_step_reward_is_paid_at_its_tokens() -> None:
    episodes = answered(",ab,", "b")
    RewardFunctionRegistry.add("commas", Commas)
    apply_rewards(episodes, build_rewards({"commas": {"weight": 2.0, "bonus": 0.25}}), tokenizer=BYTES)
    assert episodes[0].turns[0].token_rewards == [2.0, 0.0, 0.0, 2.0, 0.5]
    assert [episode.reward_components["commas"] for episode in episodes] == [2.25, 0.0]
    assert [episode.score for episode in episodes] == [4.5, 0.0]


def test_a_class_without_rl4lms_base_is_called_step_by_step() -> None:
    episodes = answered("abc", "")
    RewardFunctionRegistry.add("at_the_end", AtTheEnd)
    apply_rewards(episodes, build_rewards({"at_the_end": 1.0}), tokenizer=BYTES)
    assert [episode.turns[0].token_rewards for episode in episodes] == [[0, 0, 0, 3.0], [0]]


def test_observations_of_a_conversation_are_of_its_last_turn() -> None:
    first, second = (episode.turns[0] for episode in answered("x", "ab"))
    shown = observations(Episode(Example("a", [{"role": "user", "content": "p?"}]), 0, 0, [first, second]), BYTES)
    assert [one.context_text for one in shown] == ["", "a", "ab", "ab"]
    assert shown[0].prompt_or_input_text == "p?" and shown[0].action_history == []


def test_a_batched_reward_gets_every_beginning_of_every_answer() -> None:
    episodes = answered("ab", "c")
    RewardFunctionRegistry.add("batched", Batched)
    apply_rewards(episodes, build_rewards({"batched": 1.0}), tokenizer=BYTES)
    ((prompts, texts, references, dones, metas),) = LOG  # one call
    assert prompts == ["p?"] * 5 and references == [["ab"]] * 5
    assert texts == ["a", "ab", "ab", "c", "c"] and dones == [False, False, True, False, True]
    assert metas == [{"level": 0}] * 3 + [{"level": 1}] * 2
    assert [episode.turns[0].token_rewards for episode in episodes] == [[0, 0, 2.0], [0, 1.0]]


@pytest.mark.parametrize("made", [lambda v: v, np.array, torch.tensor])
def test_a_batched_reward_may_answer_for_whole_answers_alone(made: Any) -> None:
    class Made(WholeAnswersOnly):
        def __call__(self, *given: Any) -> Any:
            return made(super().__call__(*given))

    episodes = answered("ab", "c")
    RewardFunctionRegistry.add("short", Made)
    apply_rewards(episodes, build_rewards({"short": 1.0}), tokenizer=BYTES)
    assert [episode.turns[0].token_rewards for episode in episodes] == [[0, 0, 2.0], [0, 1.0]]


def test_what_is_wrong_with_a_reward_is_said() -> None:
    class Short(BatchedRewardFunction):
        def __call__(self, *given: Any) -> list[float]:
            return [1.0, 2.0, 3.0]

    class Raises(Commas):
        def __call__(self, *given: Any) -> float:
            raise ValueError("no comma")

    class NoNumber(Commas):
        def __call__(self, *given: Any) -> Any:
            return "n/a"

    for cls in (Short, Raises, NoNumber, Commas):
        RewardFunctionRegistry.add(cls.__name__, cls)
    for name, complaint in (
        ("Short", "Short returned 3 rewards for 5 texts, 2 of them whole answers"),
        ("Raises", "reward 'Raises' raised ValueError: no comma"),
        ("NoNumber", "reward 'NoNumber' returned 'n/a' for example 'a/0'"),
    ):
        with pytest.raises(LmgymError, match=complaint):
            apply_rewards(answered("ab", "c"), build_rewards({name: 1.0}), tokenizer=BYTES)
    with pytest.raises(LmgymError, match=r"unknown key 'rewards.Commas.bonsu'; did you mean 'bonus'\?"):
        build_rewards({"Commas": {"bonsu": 1.0}})
    with pytest.raises(LmgymError, match="takes a class whose instances are called, not 7"):
        RewardFunctionRegistry.add("seven", 7)  # type: ignore[arg-type]


def test_a_constructor_that_fails_shows_before_anything_is_trained() -> None:
    class Picky(Commas):
        def __init__(self, model_name: str) -> None:
            raise OSError(f"there is no {model_name}")

    RewardFunctionRegistry.add("picky", Picky)
    with pytest.raises(LmgymError, match=r"reward 'picky': Picky\(model_name='x'\) raised OSError: there is no x"):
        check_examples(build_rewards({"picky": {"model_name": "x"}}), [Example("a", "?")])
    with pytest.raises(LmgymError, match=r"key 'rewards.picky.model_name' is missing"):
        build_rewards({"picky": 1.0})


def test_an_instance_is_made_once_for_its_arguments() -> None:
    made = []

    class Counted(Commas):
        def __init__(self, **settings: Any) -> None:
            super().__init__()
            made.append(settings)

    RewardFunctionRegistry.add("counted", Counted)
    for bonus in (1.0, 1.0, 2.0):
        apply_rewards(answered("a", "b"), build_rewards({"counted": {"bonus": bonus}}), tokenizer=BYTES)
    assert made == [{"bonus": 1.0}, {"bonus": 2.0}]
    assert isinstance(RewardFunctionRegistry.get("counted", {"bonus": 3.0}), Counted) and len(made) == 3
    with pytest.raises(LmgymError, match="no reward 'count' was added; did you mean 'counted'"):
        RewardFunctionRegistry.get("count", {})


# ---------------------------------------------------------------- metrics


class Letters(BaseMetric):
    """Two values, as many metrics of RL4LMs have: lengths, and something that only all texts together have."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def compute(  # type: ignore[no-untyped-def]
        self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None
    ):
        LOG.append((prompt_texts, generated_texts, reference_texts, meta_infos, model, split_name))
        lengths = [self.scale * len(text) for text in generated_texts]
        different = len(set("".join(generated_texts)))
        return {"form/length": (lengths, np.mean(lengths)), "form/letters": (None, different)}


class Single(Letters):
    def compute(self, *given: Any) -> Any:  # type: ignore[no-untyped-def]
        return {"form/letters": super().compute(*given)["form/letters"]}


def test_a_metric_gives_numbers_for_each_text_and_for_all() -> None:
    MetricRegistry.add("letters", Letters)
    (metric,) = build_rewards({"letters": {"weight": 0, "part": "form/length", "scale": 2.0}})
    assert call_reward(metric, answered("aab", "b")) == [6.0, 2.0]
    prompts, texts, references, metas, model, split = LOG[0]
    assert (prompts, texts, references) == (["p?", "p?"], ["aab", "b"], [["ab"], ["ab"]])
    assert metas == [{"level": 0}, {"level": 1}] and model is split is None
    corpus = metric.function.corpus  # type: ignore[attr-defined]
    examples = [episode.example for episode in answered("aab", "b")]
    assert corpus(["aab", "b"], examples, **metric.function.keywords) == 4.0  # type: ignore[attr-defined]


def test_a_value_of_all_texts_together_is_that_of_each_text_alone() -> None:
    MetricRegistry.add("single", Single)
    (metric,) = build_rewards({"single": 0})
    assert call_reward(metric, answered("aab", "b")) == [2.0, 1.0]
    examples = [episode.example for episode in answered("aab", "b")]
    assert metric.function.corpus(["aab", "b"], examples) == 2.0  # type: ignore[attr-defined]


def test_of_several_values_the_first_is_reported_and_the_others_are_named() -> None:
    MetricRegistry.add("letters", Letters)
    with pytest.warns(UserWarning, match="'form/length' is reported. For form/letters, add an entry each"):
        assert call_reward(build_rewards({"letters": 0})[0], answered("aab")) == [3.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = build_rewards(
            {"letters": {"part": "form/length"}, "other": {"reward": "letters", "part": "form/letters"}}
        )
        assert [call_reward(metric, answered("aab")) for metric in both] == [[3.0], [2.0]]
    with pytest.raises(LmgymError, match="metric 'letters' has no value 'form/leters'; did you mean 'form/letters'"):
        call_reward(build_rewards({"letters": {"part": "form/leters"}})[0], answered("aab"))


def test_a_metric_may_share_the_id_of_a_reward() -> None:
    """As RL4LMs' intent_accuracy does."""
    RewardFunctionRegistry.add("haiku", Commas)
    MetricRegistry.add("haiku", Single)
    assert MetricRegistry.name("haiku") == "haiku_metric" and MetricRegistry.name("other") is None
    assert call_reward(build_rewards({"haiku_metric": 0})[0], answered("aab")) == [2.0]
    assert isinstance(MetricRegistry.get("haiku", {}), Single)
    MetricRegistry.add("first", Single)
    with pytest.raises(
        LmgymError, match="reward 'first': a metric was added under that id before; add the reward first"
    ):
        RewardFunctionRegistry.add("first", Commas)


def test_what_is_wrong_with_a_metric_is_said() -> None:
    class Empty(BaseMetric):
        def compute(self, *given: Any) -> Any:  # type: ignore[override]
            return {}

    MetricRegistry.add("empty", Empty)
    with pytest.raises(LmgymError, match=r"metric 'empty': compute\(\) returned {}"):
        call_reward(build_rewards({"empty": 0})[0], answered("a"))
    with pytest.raises(LmgymError, match=r"takes a class whose instances are called.compute"):
        MetricRegistry.add("commas", Commas)


# ---------------------------------------------------------------- post-processors, algorithms, wrappers, policies


def test_a_post_processor_is_an_option_of_any_reward() -> None:
    PostProcessorRegistry.add("first_line", lambda text: text.split("\n")[0])
    assert call_reward(build_rewards({"words": {"post_process": "first_line"}})[0], answered("a b\nc")) == [2.0]
    assert PostProcessorRegistry.get("three_sentence_summary") is three_sentence_summary
    assert PostProcessorRegistry.get("first_line")("x\ny") == "x"
    with pytest.raises(LmgymError, match="must be a function of a text, not 3"):
        PostProcessorRegistry.add("three", 3)  # type: ignore[arg-type]


@dataclass(kw_only=True)
class HalfPPO(PPO):
    """PPO with half the advantage."""

    share: float = 0.5

    def advantages(self, batch: Any) -> Any:
        batch = super().advantages(batch)
        return batch.replace(advantages=self.share * batch.advantages)


def test_an_algorithm_of_ones_own() -> None:
    WrapperRegistry.add("half_ppo", wrap_onpolicy_alg)
    AlgorithmRegistry.add("half_ppo", HalfPPO)
    WrapperRegistry.add("half_ppo", wrap_onpolicy_alg)  # RL4LMs does not mind the order; it changes nothing
    assert AlgorithmRegistry.get("half_ppo") is HalfPPO and AlgorithmRegistry.get("ppo") is PPO
    config = build_config(runs.tiny(algorithm={"name": "half_ppo", "share": 0.25}))
    assert config.stages[0].algorithm == HalfPPO(share=0.25)


def test_a_wrapper_makes_a_class_of_a_class() -> None:
    def narrow(cls: type) -> type:
        return dataclass(kw_only=True)(
            type("Narrow", (cls,), {"__annotations__": {"clip_low": float}, "clip_low": 0.01})
        )

    WrapperRegistry.add("narrow_ppo", narrow)
    AlgorithmRegistry.add("narrow_ppo", HalfPPO)
    made = AlgorithmRegistry.get("narrow_ppo")()
    assert isinstance(made, HalfPPO) and made.clip_low == 0.01 and WrapperRegistry.get("narrow_ppo") is narrow
    with pytest.raises(LmgymError, match="there is an algorithm 'narrow_ppo' already; add the wrapper before it"):
        WrapperRegistry.add("narrow_ppo", narrow)


def test_what_is_built_on_stable_baselines3_is_refused_in_one_sentence() -> None:
    class OnPolicyAlgorithm:  # of that library, by name
        pass

    class TheirPPO(OnPolicyAlgorithm):
        pass

    def their_wrapper(alg_class, alg_kwargs, kl_coeff, tracker, target_kl=None, norm_reward=False):  # type: ignore[no-untyped-def]
        pass

    with pytest.raises(LmgymError, match=r"an algorithm of stable-baselines3's interface, and lmgym takes a dataclass"):
        AlgorithmRegistry.add("theirs", TheirPPO)
    with pytest.raises(LmgymError, match=r"algorithm 'function' is .*, and lmgym takes a dataclass"):
        AlgorithmRegistry.add("function", their_wrapper)  # type: ignore[arg-type]
    with pytest.raises(LmgymError, match="wrapper 'theirs' must be a function of one argument"):
        WrapperRegistry.add("theirs", their_wrapper)
    with pytest.raises(LmgymError, match=r"policy 'theirs': .* there is no actor-critic class to write"):
        PolicyRegistry.add("theirs", TheirPPO)


def test_a_policy_is_settings_or_a_model() -> None:
    PolicyRegistry.add("two_trunks", {"critic": "separate"})
    assert PolicyRegistry.section("two_trunks") == {"critic": "separate"} == PolicyRegistry.get("two_trunks")
    assert PolicyRegistry.section("causal_lm_actor_critic_policy") is None
    with pytest.raises(LmgymError, match="unknown key 'critics' in 'policy'; did you mean 'critic'"):
        PolicyRegistry.add("wrong", {"critics": "separate"})


class OwnConfig(GPT2Config):
    model_type = "gpt2_of_my_own"


class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig


def test_a_model_of_ones_own_architecture_trains(tmp_path: Path) -> None:
    PolicyRegistry.add("own", OwnModel)
    assert PolicyRegistry.section("own") == {}
    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": models.VOCABULARY}
    OwnModel(OwnConfig(**size, eos_token_id=models.EOS, pad_token_id=0)).save_pretrained(tmp_path / "model")
    BYTES.save_pretrained(tmp_path / "model")
    policy = {"model": str(tmp_path / "model"), "device": "cpu"}
    folder = runs.run(tmp_path / "run", policy=policy, steps=1)
    assert '"gpt2_of_my_own"' in (folder / "final" / "config.json").read_text()
    with pytest.raises(LmgymError, match="transformers knows the model_type 'gpt2' already"):
        PolicyRegistry.add("known", GPT2LMHeadModel)


# ---------------------------------------------------------------- names, and all of it in a recipe


def test_a_built_in_name_is_not_replaced() -> None:
    for registry_, name, cls in (
        (DataPoolRegistry, "imdb", Sums),
        (RewardFunctionRegistry, "meteor", Commas),
        (MetricRegistry, "bleu", Letters),
        (AlgorithmRegistry, "ppo", HalfPPO),
        (PostProcessorRegistry, "three_sentence_summary", str),
    ):
        with pytest.raises(LmgymError, match=f"'{name}' is built in .*; choose another id"):
            registry_.add(name, cls)  # type: ignore[attr-defined]


def test_adding_the_same_class_again_is_no_mistake_and_another_one_is() -> None:
    """A notebook's cell may run twice."""
    for cls in (Commas, Commas):
        RewardFunctionRegistry.add("commas", cls)
    with pytest.raises(LmgymError, match=r"reward 'commas' is already registered by .*:Commas"):
        RewardFunctionRegistry.add("commas", AtTheEnd)


PLUGIN = """
from lmgym.compat.rl4lms.data_pool import Sample, TextGenPool
from lmgym.compat.rl4lms.metric import BaseMetric
from lmgym.compat.rl4lms.registries import DataPoolRegistry, MetricRegistry, RewardFunctionRegistry
from lmgym.compat.rl4lms.reward import RewardFunction


class Vowels(TextGenPool):
    @classmethod
    def prepare(cls, split: str, count: int):
        offset = {"train": 0, "val": 100, "test": 200}[split]
        return cls([Sample(f"{split}_{n}", f"{offset + n}: ", ["aeiou"]) for n in range(count)])


class EachVowel(RewardFunction):
    def __init__(self, worth: float) -> None:
        super().__init__()
        self.worth = worth

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        new = current_observation.context_text[len(prev_observation.context_text):]
        return self.worth * (new in tuple("aeiou"))


class Share(BaseMetric):
    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        shares = [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in generated_texts]
        return {"form/vowels": (shares, sum(shares) / len(shares))}


DataPoolRegistry.add("vowels", Vowels)
RewardFunctionRegistry.add("vowels", EachVowel)
MetricRegistry.add("vowels", Share)
"""


def test_a_recipe_trains_on_classes_of_rl4lms_alone(tmp_path: Path) -> None:
    """Pool, step reward and metric under one id each, from a file that `plugins:` names; PPO, two steps."""
    plugin = tmp_path / "vowels_plugin.py"
    plugin.write_text(PLUGIN)
    folder = runs.run(
        tmp_path / "run",
        plugins=[str(plugin)],
        task={"name": "vowels", "count": 16},
        rewards={"vowels": {"worth": 2.0}},
        evaluation={"every": 1, "examples": 4, "metrics": {"vowels_metric": 0}},
        algorithm={"name": "ppo", "group_size": 2},
        steps=2,
    )
    answers = [record for record in runs.records(folder / "rollouts.jsonl") if record["kind"] == "evaluation"]
    assert answers
    for record in answers:
        text = record["turns"][0]["text"]
        assert record["reward_components"]["vowels_metric"] == sum(letter in "aeiou" for letter in text) / max(
            len(text), 1
        )
        assert record["score"] == 2.0 * sum(letter in "aeiou" for letter in text)
    rollouts = [record for record in runs.records(folder / "rollouts.jsonl") if record["kind"] == "train"]
    assert all(record["example"].startswith("vowels/train/train_") for record in rollouts)
    for record in rollouts:
        (turn,) = record["turns"]
        text = turn["text"]
        assert record["score"] == pytest.approx(2.0 * sum(letter in "aeiou" for letter in text))
        assert sum(turn["token_rewards"]) == pytest.approx(turn["reward"])
