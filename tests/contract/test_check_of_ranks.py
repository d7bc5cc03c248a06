"""`lmgym check`: memory on each of several ranks, whether it fits, and about how long a step takes."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from lmgym.algorithms.base import Algorithm
from lmgym.batch import collate
from lmgym.cli.main import main
from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.distributed.ranks import Ranks
from lmgym.inference.in_process import make_engine
from lmgym.models import scoring
from lmgym.models.builtin import byte_tokenizer
from lmgym.models.load import load_policy
from lmgym.models.model_info import skeleton
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.shapes import Shapes, shapes_of
from lmgym.rewards.base import Reward
from lmgym.rollouts.play import Draw
from lmgym.training.planning.memory import estimate
from lmgym.training.planning.memory_fit import Needs, exchange_sentence, fit_sentence, other_form
from lmgym.training.planning.memory_passes import largest_pass
from lmgym.training.planning.memory_table import Estimate, Part
from lmgym.training.planning.step_time import (
    Measured,
    Sampled,
    as_in_a_step,
    measure_passes,
    moving_share,
    rounded,
    step_seconds,
    time_sentence,
    weights_seconds,
)
from lmgym.training.setup import make_actor
from lmgym.types import Episode, Example, Turn
from tests import runs
from tests.contract.test_every_algorithm import SAMPLING, algorithm_section
from tests.runs import complaint

FSDP = {"distributed": {"sharding": "fsdp"}}
GIB = 2**30
# Llama-2-7B: 6,738,415,616 parameters, of which 6,476,005,376 in linear layers.
SEVEN = Shapes(6_738_415_616, 6_476_005_376, 32 * (5 * 4096 + 2 * 11008), 0, 32, 0, 4096, 11008, True, 32, 4096, 4096,
               3, 32000, False, True, 4096)  # fmt: skip
GRPO = {"name": "grpo", "group_size": 8, "kl_coefficient": 0.1}


class OneOf(Ranks):
    """A rank that takes its share of the passes and meets nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@dataclass(kw_only=True)
class WholeBatch(Algorithm):
    def batch_loss(self, batch: Any, new: Any) -> Any:
        return {"policy": new.logprobs.sum()}, {}


def bytes_of(found: Estimate) -> dict[str, float]:
    return {part.name: part.bytes for part in found.parts}


def estimated(shapes: Shapes | None = None, ranks: int = 1, compute: int = 4, **changes: Any) -> dict[str, float]:
    config = build_config(runs.tiny(**changes))
    shapes = shapes or shapes_of(config.policy)
    return bytes_of(estimate(config, config.stages[0], shapes, 100, compute=compute, on_cpu=False, ranks=ranks))


# ---------------------------------------------------------------- memory on each rank


def test_one_rank_holds_everything_whatever_the_key_says() -> None:
    for changes in ({"algorithm": GRPO}, {"algorithm": {"name": "ppo"}}):
        assert estimated(SEVEN, compute=2, **changes, **FSDP) == estimated(SEVEN, compute=2, **changes)


def test_replicas_share_out_prompts_and_passes_only() -> None:
    """By hand: of 5 prompts the busiest of 2 ranks has 3, with 8 answers of 100 + 50 tokens each."""
    changes = {"algorithm": GRPO, "prompts_per_step": 5, "sampling": {"max_new_tokens": 50}}
    alone, ours = (estimated(SEVEN, ranks, 2, **changes) for ranks in (1, 2))
    for name in ("weights", "gradients", "moments of the optimizer", "reference", "the copy in bf16", "batch"):
        assert ours[name] == alone[name], name
    assert ours["weights"] == 4 * SEVEN.parameters and ours["batch"] == 5 * 8 * 150 * 60
    layer = 2 * 150 * 4096 * 2
    assert alone["cache of keys and values"] == 40 * layer * 33 and ours["cache of keys and values"] == 24 * layer * 33
    assert ours["exchange of gradients"] == 4 * 2**24 and "exchange of gradients" not in alone


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["builtin:tiny", "builtin:tiny_t5"])
def test_parts_are_those_that_a_rank_holds(name: str, ranks: int) -> None:
    """The first rank holds the first of equal numbers of rows of each tensor (tests/parity/test_sharding.py): at most
    one row of a tensor more than its share."""
    policy = {"model": name, "device": "cpu", "critic": "separate"}
    changes = {"policy": policy, "algorithm": {"name": "ppo", "kl_coefficient": 0.1}, **FSDP}
    found = estimated(None, ranks, **changes)
    tensors = [tensor.shape for tensor in skeleton(PolicySection(**policy)).parameters()]
    held = sum(-(-shape[0] // ranks) * shape[1:].numel() for shape in tensors)
    spare = sum(shape[1:].numel() for shape in tensors if shape[0] % ranks)
    assert 0 <= held - found["weights"] / 4 <= spare
    assert found["reference"] == found["gradients"] == found["weights"]
    assert found["moments of the optimizer"] == 2 * found["weights"]
    numbers, width = sum(shape.numel() for shape in tensors), shapes_of(PolicySection(**policy)).width
    assert found["critic"] * ranks == 16 * numbers + 12 * width  # a model, and the gradient and moments of its head too
    assert found["the sampler's copy"] == 4 * numbers  # in fp32 too: it is whole


def test_what_is_whole_for_a_moment() -> None:
    """Llama-2-7B in 4 parts: 32 layers, an LM head and embeddings of 32,000 times 4,096."""
    found = estimated(SEVEN, 4, 2, algorithm=GRPO, **FSDP)
    head, layers = 32000 * 4096, SEVEN.parameters - 32000 * 4096
    assert found["layers put together"] == found["gradients of a layer"] == 2 * 4 * layers / 32
    assert found["LM head or embeddings put together"] == found["gradient of the LM head"] == 4 * head
    assert found["the sampler's copy"] == 2 * SEVEN.parameters
    assert found["weights in bf16"] == 2 * SEVEN.linear and found["weights of a layer in bf16"] == 2 * layers / 32
    assert found["whole models, being copied"] == 4 * SEVEN.parameters  # for the reference
    assert "exchange of gradients" not in found
    recomputed = estimated(SEVEN, 4, 2, algorithm=GRPO, policy={"activation_checkpointing": True}, **FSDP)
    assert recomputed["weights in bf16"] == 2 * layers / 32
    adapters = replace(SEVEN, adapter=10**7)
    found = estimated(adapters, 4, 2, algorithm=GRPO, **FSDP)
    assert found["gradients of a layer"] == 2 * 4 * 10**7 / 32 and found["gradients"] == 10**7
    assert "reference" not in found and "gradient of the LM head" not in found


def test_a_mask_samples_so_it_is_whole() -> None:
    nlpo = {"name": "nlpo", "kl_coefficient": 0.1}
    found = estimated(SEVEN, 4, 2, algorithm=nlpo, **FSDP)
    assert found["mask"] == 2 * SEVEN.parameters and found["reference"] == SEVEN.parameters


def test_backward_keeps_bf16_weights_of_all_layers_unless_it_runs_them_again() -> None:
    """What `weights in bf16` counts for weights in parts, whose bf16 copies autocast does not keep."""
    turns = [Turn([3, 5, 6], [7] * 6, [-1.0] * 6) for _ in range(2)]
    batch = collate([Episode(Example("x", "?"), 0, place, [turn]) for place, turn in enumerate(turns)])
    for again in (False, True):
        policy = load_policy(PolicySection(device="cpu", compute="bfloat16", activation_checkpointing=again))
        policy.skeleton = object()  # type: ignore[assignment]  # says that each rank holds a part
        shapes, kept = shapes_of(PolicySection()), {}
        matrices = [module.weight for module in policy.model.modules() if isinstance(module, torch.nn.Linear)]
        sizes = {tuple(sorted(weight.shape)) for weight in matrices}

        def note(tensor: torch.Tensor, kept: Any = kept, sizes: Any = sizes) -> torch.Tensor:
            if tensor.dtype == torch.bfloat16 and tuple(sorted(tensor.shape)) in sizes:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            policy.compute_logprobs(batch)
        assert sum(tensor.numel() for tensor in kept.values()) == (0 if again else shapes.linear)


@pytest.mark.parametrize(
    ("prompts", "group", "ranks"),
    [(4, 4, 2), (4, 4, 4), (5, 4, 2), (2, 4, 3), (1, 4, 2), (8, 2, 8), (5, 1, 2)],
)
def test_the_largest_pass_is_that_of_the_rank_with_most_to_do(prompts: int, group: int, ranks: int) -> None:
    """Of any number of groups that can teach something, answers of 45 tokens to prompts of 20 (the last token of a row
    is not run)."""
    policy = load_policy(PolicySection(**runs.TINY["policy"]))
    config = build_config(runs.tiny(algorithm={"name": "reinforce", "group_size": group}, prompts_per_step=prompts))
    found = largest_pass(config, config.stages[0], shapes_of(config.policy), 20, 44, True, ranks)
    real = 0
    for count in range(1, prompts + 1):
        turns = [
            Turn([3 + one, *[5] * 19], [7 + place] * 45, [-1.0] * 45) for one in range(count) for place in range(group)
        ]
        episodes = [Episode(Example("x", "?"), place // group, place, [turn]) for place, turn in enumerate(turns)]
        batch = collate(episodes)
        tokens_of = scoring.tokens_of_pass(policy, batch, batch.mask.sum(1))
        for rank in range(ranks):
            policy.ranks = OneOf(rank, ranks)
            real = max([real, *(tokens_of(rows.tolist()) for rows in policy.micro_batches(batch))])
    assert found.tokens == real


# ---------------------------------------------------------------- what fits


def test_the_table_shows_when_whole_models_are_copied() -> None:
    parts = [Part("weights", 2.0**30), Part("copies", 2.0**31, ("copying",)), Part("cache", 2.0**30, ("rollout",))]
    assert Estimate(parts).peak == 3 * 2**30 and Estimate(parts).rows()[1][1:] == ("2.00 GiB", "-", "-", "-")
    assert len(Estimate(parts[::2]).phases) == 3 and Estimate(parts[::2]).peak == 2**31


EACH, LIMIT = "each of 2 ranks takes 3.00 GiB", "of the 8.00 GiB of a GPU here"
WITH, WITHOUT = (f"{word} distributed.sharding: fsdp it would be" for word in ("with", "without"))


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (("cpu", 8, False, 3, 2), "2 ranks take 6.00 GiB together, of the 8.00 GiB here"),
        (
            ("cpu", 5, False, 3, 2),
            f"2 ranks take 6.00 GiB together, more than the 5.00 GiB here; {WITH} 4.00 GiB, which fits",
        ),
        (("cuda", 8, True, 3, 7), f"{EACH}, {LIMIT}; {WITHOUT} 7.00 GiB, which fits too, and is simpler"),
        (("cuda", 8, True, 3, 9), f"{EACH}, {LIMIT}; {WITHOUT} 9.00 GiB, which does not fit"),
        (("cuda", None, False, 3, 2), f"{EACH}; {WITH} 2.00 GiB"),
        (("cuda", None, False, 3, None), EACH),
    ],
)
def test_what_fits(needs: tuple[str, int | None, bool, int, int | None], said: str) -> None:
    device, here, sharded, own, other = needs
    found = Needs(2, device, here and here * GIB, sharded, own * GIB, other and other * GIB)
    assert fit_sentence(found) == said and found.fits(found.own) == ("more than" not in said)


def test_what_fits_in_no_form() -> None:
    said = fit_sentence(Needs(2, "cuda", GIB, False, 9 * GIB, 3 * GIB))
    assert "it would be 3.00 GiB, which does not fit either; lower policy.tokens_per_forward" in said
    assert fit_sentence(Needs(2, "cpu", GIB, False, GIB, None)).endswith("or a smaller model, or take fewer ranks")


def test_the_other_form_is_offered_only_if_it_would_start() -> None:
    for changes, possible in (({}, True), (FSDP, True), ({"algorithm": {"name": "trpo"}}, False)):
        config = build_config(runs.tiny(**changes))
        other = other_form(config)
        assert (other is not None) == possible
        assert other is None or {config.distributed.sharding, other.distributed.sharding} == {"none", "fsdp"}


def test_what_the_ranks_exchange() -> None:
    def said(**changes: Any) -> str:
        config = build_config(runs.tiny(**changes))
        return exchange_sentence(config, config.stages[0], SEVEN, 2)

    assert said(algorithm=GRPO) == "each step the ranks exchange 25.10 GiB of gradients"
    ppo = {"name": "ppo", "epochs": 2, "minibatches": 2}
    assert said(algorithm=ppo) == (
        "each step the ranks exchange 100.41 GiB of gradients (4 optimizer steps of 25.10 GiB)"
    )
    assert said(algorithm={"name": "trpo"}).startswith("each time that the ranks add up gradients")
    assert said(algorithm=GRPO, **FSDP).startswith("each forward and each backward pass gathers 25.10 GiB of weights")


@pytest.mark.slow
def test_check_says_what_would_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Llama 7B on 4 GPUs of 80 GiB each, of which one is here: whole it does not fit, in parts it does."""
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "seven")  # its defaults are Llama 7B
    byte_tokenizer().save_pretrained(tmp_path / "seven")
    policy = {"model": str(tmp_path / "seven"), "device": "cuda", "tokens_per_forward": 2048}
    recipe = runs.write(tmp_path / "recipe.yaml", policy=policy)
    monkeypatch.setattr("lmgym.training.planning.memory_report.memory_here", lambda kind: 80 * GIB)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(["check", str(recipe), "--memory", "--ranks", "4"]) == 1
    said = capsys.readouterr().out
    assert "GiB at most on each of 4 ranks, on cuda" in said
    assert "GiB, more than the 80.00 GiB of a GPU here; with distributed.sharding: fsdp it would be " in said
    assert "! 4 ranks and 1 GPU(s) here: each rank needs a GPU of its own, here or on another machine" in said
    assert said.splitlines()[-1].endswith("recipe.yaml --ranks 4")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert main(["check", str(recipe), "--memory", "--ranks", "4", "distributed.sharding=fsdp"]) == 0
    said = capsys.readouterr().out
    assert "GiB, of the 80.00 GiB of a GPU here; without distributed.sharding: fsdp it would be " in said
    assert [line.split()[1] for line in said.splitlines() if line.strip().startswith("weights  ")] == ["6.28"]


def test_ranks_are_a_positive_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml")
    assert complaint(capsys, "check", recipe, "--ranks", 0) == "--ranks is 0; it must be at least 1"


def test_given_answers_are_counted_as_long_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is sampled, so sampling.max_new_tokens changes nothing; an answer is a number and the end."""
    said = {}
    for length in (8, 64):
        changes = {"algorithm": "supervised", "rewards": None, "sampling": {"max_new_tokens": length}}
        main(["check", str(runs.write(tmp_path / "recipe.yaml", **changes)), "--memory"])
        out = capsys.readouterr().out
        assert "parameters, given answers of at most " in out
        said[length] = [line for line in out.splitlines() if line.split()[0] in ("batch", "activations", "LM")]
    assert said[8] == said[64] and len(said[8]) == 3


# ---------------------------------------------------------------- seconds of a step


def test_seconds_by_hand() -> None:
    """64 answers took 2 s to sample, 1 s to score, 3 s with gradient. A step has 32 prompts with 4 answers each."""
    measured = Measured(64, 2.0, 1.0, 3.0)

    def seconds(ranks: int = 1, teacher: float = 0.0, **changes: Any) -> tuple[float, float]:
        config = build_config(runs.tiny(**{"prompts_per_step": 32, **changes}))
        return step_seconds(config, config.stages[0], measured, ranks, teacher)

    assert seconds() == (4.0, 6.0)
    assert seconds(ranks=2) == (2.0, 3.0)
    assert seconds(ranks=2, prompts_per_step=3) == (2 * 8 / 64, 3 * 8 / 64)  # two prompts of three
    assert seconds(ranks=4, prompts_per_step=1) == (2 * 4 / 64, 3 * 1 / 64)  # updated with row by row
    assert seconds(algorithm={**GRPO, "group_size": 4}) == (4.0, 8.0)  # the reference
    assert seconds(algorithm={**GRPO, "group_size": 4, "epochs": 2}) == (4.0, 16.0)  # and the policy before
    assert seconds(teacher=3.0) == (4.0, 12.0)
    # One answer to each prompt, and a greedy one; a critic of its own runs as often as the policy.
    assert seconds(algorithm={"name": "reinforce", "baseline": "scst"}) == (2.0, 1.5)
    ppo = {"name": "ppo", "epochs": 1, "minibatches": 1, "kl_coefficient": 0.0}
    policy = {**runs.TINY["policy"], "critic": "separate"}
    assert seconds(algorithm=ppo, policy=policy)[1] == 32 / 64 * (2 * 1.0 + 2 * 3.0)
    # Groups of equal scores are sampled and scored, and not updated.
    config, half = build_config(runs.tiny(prompts_per_step=32)), replace(measured, moving=0.5)
    assert step_seconds(config, config.stages[0], half) == (4.0, 3.0)
    # Two optimizer steps of half a second each, whatever the number of answers; TRPO takes none.
    moved = replace(measured, weights=0.5)
    config = build_config(runs.tiny(prompts_per_step=32, algorithm={**ppo, "minibatches": 2}))
    both = [step_seconds(config, config.stages[0], one, ranks=2)[1] for one in (measured, moved)]
    assert both[1] - both[0] == 1.0
    config = build_config(runs.tiny(prompts_per_step=32, algorithm="trpo"))
    assert step_seconds(config, config.stages[0], moved) == step_seconds(config, config.stages[0], measured)
    # A loss of the whole batch: one pass more in each epoch, before the one with gradient.
    config = build_config(runs.tiny(prompts_per_step=64))
    stage = replace(config.stages[0], algorithm=WholeBatch(epochs=2))
    assert step_seconds(config, stage, measured) == (2.0, 1.0 + 2 * (1.0 + 3.0))


def test_seconds_in_words() -> None:
    config = build_config(runs.tiny(stages=[{"algorithm": "supervised", "name": "a"}, {"name": "b"}]))
    imitates, samples = config.stages
    measured = Measured(64, 2.0, 1.0, 3.0)
    assert time_sentence(samples, measured, 0.1234, 12.34) == (
        "a step takes about 12 s: 0.12 s sampling, 12 s scoring and update (from 64 answers; a step has 16)"
    )
    assert time_sentence(imitates, replace(measured, answers=8), 0.0, 2.0, ranks=2) == (
        "a step takes about 2 s, without the exchange between ranks: 2 s scoring and update (from 8 references; a step"
        " has 4)"
    )
    half = replace(measured, moving=0.5)
    assert "from 64 answers, 50% of them in groups whose scores differ: 25 s if all do; a step" in time_sentence(
        samples, half, 0.1234, 12.34, longest=24.8
    )
    assert [rounded(seconds) for seconds in (0.01234, 9.99, 123.4)] == ["0.012 s", "10 s", "123 s"]


@pytest.mark.parametrize("group_size, prompts, timed", [(1, 6, 6), (2, 2, 4), (4, 100, 12)])
def test_a_small_step_is_timed_with_as_many_answers_as_it_has(
    group_size: int, prompts: int, timed: int, tiny_policy: Policy
) -> None:
    """12 were tried. The first of them come again; the policy is the one that sampled them."""
    config = build_config(
        runs.tiny(algorithm={"name": "grpo", "group_size": group_size}, prompts_per_step=prompts)
        if group_size > 1
        else runs.tiny(algorithm="reinforce", prompts_per_step=prompts)
    )
    stage, engine = config.stages[0], make_engine(config.engine, tiny_policy)
    examples = [Example(str(number), prompt=f"1+{number}=", references=[str(1 + number)]) for number in range(3)]
    asked = [(number, example) for number, example in enumerate(examples) for _ in range(4)]
    judged = list[int]()

    def noted(texts: list[str], examples: list[Example]) -> list[float]:
        judged.append(len(texts))
        return [0.0] * len(texts)

    draw = Draw(asked, (0, "check"), make_actor(config.policy, tiny_policy, engine), stage.sampling)
    draw = replace(draw, rewards=[Reward("noted", 1.0, noted)])
    tried = Sampled(stage.source.episodes(draw), draw, 1.0)
    again = as_in_a_step(stage, tried)
    assert again.answers == timed and (again is tried) == (timed == 12)
    texts = [[turn.text for turn in episode.turns] for episode in tried.episodes]
    assert [[turn.text for turn in episode.turns] for episode in again.episodes] == texts[:timed]
    assert again.seconds > 0 and len(judged) == 1  # nobody judges them again


def test_timing_an_optimizer_step_moves_nothing() -> None:
    """Rounding, too: the copy that passes compute with is made with the same random numbers as before."""
    config = build_config(runs.tiny(policy=runs.TINY["policy"] | {"compute": "bfloat16"}))
    policy = load_policy(config.policy)
    assert policy.rounded is not None
    before = [*policy.model.state_dict().values(), *policy.rounded.copies.values()]
    kept = [one.clone() for one in before]
    assert weights_seconds(config.stages[0], policy) > 0
    after = [*policy.model.state_dict().values(), *policy.rounded.copies.values()]
    assert all(torch.equal(one, other) for one, other in zip(kept, after, strict=True))
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_the_share_of_answers_that_an_update_computes() -> None:
    """Two groups of two answers; in one of them the scores differ. A value function learns from all of them."""
    config = build_config(runs.tiny(algorithm={"name": "rloo", "group_size": 2}))
    policy, stage = load_policy(config.policy), config.stages[0]
    answers = [replace(episode, group=group) for group in range(2) for episode in few(policy, 3)]
    for episode, score in zip(answers, (1.0, 1.0, 0.0, 1.0), strict=True):
        episode.turns[-1].reward = episode.score = score
    assert moving_share(stage, policy, answers) == 0.5
    ppo = build_config(runs.tiny(algorithm={"name": "ppo", "epochs": 1, "minibatches": 1}))
    assert moving_share(ppo.stages[0], policy, answers) == 1.0


@pytest.mark.parametrize("name", SAMPLING)
def test_every_algorithm_has_a_share(name: str, tiny_policy: Policy) -> None:
    """Whatever columns its advantages want: a dry run fills in few of them."""
    config = build_config(runs.tiny(algorithm=algorithm_section(name, "builtin:tiny")))
    stage, group = config.stages[0], max(config.stages[0].algorithm.group_size, 2)
    answers = [replace(few(tiny_policy, 3)[0], group=n // group, index=n) for n in range(2 * group)]
    for number, episode in enumerate(answers):
        episode.turns[-1].reward = episode.score = float(number % 3 == 0)
    assert 0 < moving_share(stage, tiny_policy, answers) <= 1


@pytest.fixture(scope="module")
def tiny_policy() -> Policy:
    return load_policy(build_config(runs.tiny()).policy)


@pytest.mark.parametrize("name", ["builtin:tiny", "builtin:tiny_t5"])
def test_a_measurement_changes_nothing(name: str) -> None:
    config = build_config(runs.tiny(policy={"model": name, "device": "cpu"}))
    policy = load_policy(config.policy)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    assert all(seconds > 0 for seconds in measure_passes(config.stages[0], policy, few(policy, 3)))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[2]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert all(map(torch.equal, before, policy.parameters()))


def few(policy: Policy, length: int) -> list[Episode]:
    """Two episodes with prompts of this length."""
    turns = [Turn([5] * length, [7] * 4, [-1.0] * 4) for _ in range(2)]
    for turn in turns:
        if policy.encoder_decoder:
            turn.source_ids, turn.prompt_ids = turn.prompt_ids, [*policy.decoder_start]
    return [Episode(Example("x", "?"), 0, place, [turn]) for place, turn in enumerate(turns)]


def test_what_the_model_cannot_read_is_not_measured() -> None:
    config = build_config(runs.tiny())
    policy = load_policy(config.policy)
    with pytest.raises(LmgymError, match="a row has 129 tokens, and the model reads 128 at most"):
        measure_passes(config.stages[0], policy, few(policy, 125))
    [one, _] = few(policy, 3)
    one.turns[0].action_ids[0] = policy.vocabulary
    with pytest.raises(LmgymError, match=f"holds the token id {policy.vocabulary}"):
        measure_passes(config.stages[0], policy, [one])
    with pytest.raises(LmgymError, match="no episode"):
        measure_passes(config.stages[0], policy, [])


@pytest.mark.slow
def test_check_says_how_long_a_step_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Also of two ranks; not where one process has no room for a backward pass."""
    stages = [{"name": "warm", "algorithm": "supervised"}, {"name": "rl"}]
    recipe = runs.write(tmp_path / "recipe.yaml", stages=stages)
    main(["check", str(recipe), "--ranks", "2"])
    said = capsys.readouterr().out
    assert said.count("a step takes about ") == 2 and "(from 8 references; a step has 4)" in said
    assert "2 ranks take " in said and said.count("each step the ranks exchange 0 MiB of gradients") == 2
    monkeypatch.setattr("lmgym.training.planning.memory_report.memory_here", lambda kind: 2**27)
    main(["check", str(recipe)])
    assert "seconds of a step: not measured, since one process has no memory here" in capsys.readouterr().out
