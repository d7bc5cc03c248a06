"""The promises of exactness, on really pretrained models, where their folders are: ~/models, or $LMGYM_MODELS.

In fp32 against plain transformers; a run, its resume and its adapter in the precision that the machine is fastest in.

    python ../shared/models/real/make_models.py ~/models && pytest tests/parity/test_real_models.py
"""

import functools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.cli.main import main
from lmgym.core.seeds import key
from lmgym.inference.base import Completion, Decoding, Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.text.chat import prompt_ids
from lmgym.types import BarePrompt
from tests import models, rounding, runs

FOLDER = Path(os.environ.get("LMGYM_MODELS", Path.home() / "models"))
NAMES = ["smollm2-135m-instruct", "gemma3-270m"]
TEXTS = ["Ben has 4 cups and buys 3 more.", "The capital of France is", "def add(a, b):\n", "One, two,"]
TOKENS = 64  # no row is longer
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.parametrize(
        "name",
        [
            pytest.param(
                name, marks=pytest.mark.skipif(not (FOLDER / name).is_dir(), reason=f"needs {name} in {FOLDER}")
            )
            for name in NAMES
        ],
    ),
]


@functools.lru_cache(maxsize=1)
def policy_of(name: str) -> Policy:
    return load_policy(PolicySection(model=str(FOLDER / name), device="cpu", compute="float32"))


def requests_of(policy: Policy, answers: int) -> list[Request]:
    prompts = [tuple(prompt_ids(policy.tokenizer, BarePrompt(text))) for text in TEXTS]
    return [Request(prompt, key(0, group, number)) for group, prompt in enumerate(prompts) for number in range(answers)]


@torch.no_grad()
def plainly_scored(model: Any, asked: Sequence[Request], answers: Sequence[Completion]) -> list[float]:
    """Log-probabilities of the answers' tokens by a plain forward pass, row by row."""
    scores: list[float] = []
    for request, answer in zip(asked, answers, strict=True):
        logits = model(torch.tensor([[*request.prompt_ids, *answer.ids]])).logits[0].float()
        own = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
        scores += own.gather(1, torch.tensor(answer.ids)[:, None])[:, 0].tolist()
    return scores


def test_sampled_tokens_are_scored_tokens(name: str) -> None:
    policy = policy_of(name)
    asked = requests_of(policy, 2)
    answers = Sampler(policy).generate(asked, Sampling(max_new_tokens=16))
    ours = [logprob for answer in answers for logprob in answer.logprobs]
    assert len(ours) > 64
    assert rounding.near(policy.model, ours, plainly_scored(policy.model, asked, answers), TOKENS)


def test_greedy_answers_are_those_of_generate(name: str) -> None:
    policy = policy_of(name)
    asked = requests_of(policy, 1)
    answers = Sampler(policy).generate(asked, Decoding(temperature=0.0, max_new_tokens=16))
    ends = list(policy.stop_ids)
    for request, answer in zip(asked, answers, strict=True):
        prompt = torch.tensor([request.prompt_ids])
        settings = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": ends, "pad_token_id": policy.pad_id}
        output = policy.model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        assert answer.ids == output[0, len(request.prompt_ids) :].tolist()


def test_the_gradient_does_not_depend_on_the_cut(name: str) -> None:
    policy, algorithm = policy_of(name), GRPO(group_size=2)
    batch = models.prepared(models.batch_of(models.episodes(0, groups=2, size=2, turns=1)), algorithm, policy)
    rows = int(batch.actions.sum())
    whole, parts = (models.gradient(algorithm, policy.but(tokens_per_forward=tokens), batch)[0] for tokens in (4096, 8))
    assert float(whole.norm()) > 0 and rounding.near_gradient(policy.model, parts, whole, rows, TOKENS)


def recipe(name: str, **policy: Any) -> dict[str, Any]:
    """Three short steps, a checkpoint after two."""
    return {
        "threads": None,
        "policy": {"model": str(FOLDER / name), "device": "cpu", **policy},
        "prompts_per_step": 2,
        "algorithm": {"name": "grpo", "group_size": 2},
        "optimizer": {"learning_rate": 1e-4},
        "sampling": {"max_new_tokens": 8},
        "evaluation": None,
        "checkpoint": {"every": 2, "keep": 2},
        "steps": 3,
    }


def test_a_resumed_run_is_the_uninterrupted_one_and_plain_transformers_reads_it(name: str, tmp_path: Path) -> None:
    whole = runs.run(tmp_path / "whole", **recipe(name))
    newest = runs.newest(whole)
    weights = (newest / "model.safetensors").read_bytes()
    shutil.copytree(whole, tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / newest.name)
    shutil.rmtree(tmp_path / "parts" / "final")
    runs.run(tmp_path / "parts", **recipe(name))
    assert (runs.newest(tmp_path / "parts") / "model.safetensors").read_bytes() == weights
    # What was saved is a folder for everybody.
    ours = load_policy(PolicySection(model=str(whole / "final"), device="cpu", compute="float32"))
    theirs = AutoModelForCausalLM.from_pretrained(whole / "final", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(whole / "final")
    assert tokenizer(TEXTS)["input_ids"] == policy_of(name).tokenizer(TEXTS)["input_ids"]
    asked = requests_of(ours, 1)
    answers = Sampler(ours).generate(asked, Sampling(max_new_tokens=8))
    said = [logprob for answer in answers for logprob in answer.logprobs]
    assert rounding.near(theirs, said, plainly_scored(theirs, asked, answers), TOKENS)


def test_a_merged_adapter_says_what_the_adapter_says(name: str, tmp_path: Path) -> None:
    changes = recipe(name, lora_rank=4, compute="float32") | {"optimizer": {"learning_rate": 1e-2}}
    folder = runs.run(tmp_path / "run", **changes)
    section = PolicySection(model=str(FOLDER / name), device="cpu", compute="float32", lora_rank=4)
    adapted = load_policy(section, folder=folder / "final")
    assert main(["export", str(folder), "--merge", "--to", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    asked = requests_of(adapted, 1)
    answers = Sampler(adapted).generate(asked, Sampling(max_new_tokens=8))
    said = [logprob for answer in answers for logprob in answer.logprobs]
    base = plainly_scored(policy_of(name).model, asked, answers)
    assert not rounding.near(merged, said, base, TOKENS)  # it has learnt something
    assert rounding.near(merged, said, plainly_scored(merged, asked, answers), TOKENS)
