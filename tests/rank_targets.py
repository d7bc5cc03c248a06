"""What tests run in each of several ranks (tests/ranks.py)."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.trpo import TRPO
from lmgym.batch import Batch
from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.distributed.parts import whole
from lmgym.distributed.process_group import ranks_of_environment
from lmgym.distributed.ranks import RankLost
from lmgym.envs.base import Step
from lmgym.functional.divergences import Divergence
from lmgym.logs.console import Console
from lmgym.models import device
from lmgym.models.language_model import LanguageModel
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.sharding import shard_policy
from lmgym.training.begin_stage import begin_stage
from lmgym.training.loop import begin_step, collate_step, gather
from lmgym.training.opening import Begun
from lmgym.training.run import Progress, Run
from lmgym.training.setup import load, start
from lmgym.training.stage import StageRun
from lmgym.types import Episode, Example, Turn
from lmgym.updates.fisher import FisherProduct
from lmgym.updates.optimizer import make_optimizer
from lmgym.updates.prepare import prepare
from lmgym.updates.trust_region import surrogate_gradient
from lmgym.updates.update import update
from tests import models, runs
from tests.contract.test_every_algorithm import policy_section
from tests.parity.test_resume import ALGORITHMS, SETTINGS


@dataclass(kw_only=True)
class CrashesOnce(GRPO):
    """Raises what nobody foresees, as a driver may, until the file `marker` is there; it makes that file."""

    marker: str = ""

    def advantages(self, batch: Batch) -> Batch:
        if not Path(self.marker).exists():
            Path(self.marker).touch()
            raise RuntimeError("the device went away")
        return super().advantages(batch)


class FailsOnTheSecondRank:
    """A question that the second rank cannot even ask, for a reason of its own."""

    def reset(self, example: Example, seed: int) -> str:
        if os.environ.get("RANK") == "1":
            raise LmgymError("the second rank has no questions")
        return "?"

    def step(self, text: str, stop: str) -> Step:
        return Step(reward=float(len(text)), terminated=True)


LIMIT = 600.0  # seconds; on a busy machine a rank may wait long for another
PPO = ALGORITHMS["ppo"]
TINY = runs.TINY["policy"]
# What shared-out weights must get right besides the algorithm: kinds of model, and of passes over them.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": (PPO, {"model": "builtin:tiny_gpt2", "device": "cpu", "architecture": {"n_embd": 16, "n_head": 2}}),
    "t5": (PPO, policy_section("builtin:tiny_t5")),
    "bart": (PPO, policy_section("builtin:tiny_bart")),
    "t5, separate critic": (PPO, policy_section("builtin:tiny_t5", critic="separate")),
    "head of its own": (PPO, TINY | {"architecture": runs.ARCHITECTURE | {"tie_word_embeddings": False}}),
    "three layers": (PPO, TINY | {"architecture": runs.ARCHITECTURE | {"num_hidden_layers": 3}}),
    "padded": (PPO, TINY | {"path": "plain"}),
    "adapters": (ALGORITHMS["grpo, reference"], policy_section("builtin:tiny", lora_rank=4)),
    "adapters, t5": (PPO, policy_section("builtin:tiny_t5", lora_rank=4)),
    "many passes": (ALGORITHMS["grpo, 4 optimizer steps a batch"], TINY | {"tokens_per_forward": 40}),
    "recomputed": (PPO, TINY | {"activation_checkpointing": True}),
}


ONE_PROCESS_EACH = ("trpo", "grpo, 8-bit AdamW")  # whose weights are not shared out


BEGUN: dict[str, tuple[Run, StageRun, Batch]] = {}  # what `begin` has made


def begin(folder: str, kinds: bool = False) -> None:
    """Begin a run of each algorithm (or of each of KINDS) and make its first batch, for all ranks that are forked from
    this process later: each has a copy, and none has to load and sample."""
    settings = {name: {"algorithm": section, **SETTINGS.get(name, {})} for name, section in ALGORITHMS.items()}
    if kinds:
        settings = {name: {"algorithm": algorithm, "policy": policy} for name, (algorithm, policy) in KINDS.items()}
    for name, changes in settings.items():
        config = build_config(runs.tiny(out=str(Path(folder) / name), **changes))
        with start(config, Console(quiet=True)) as run, begin_stage(run) as stage:
            begin_step(stage, 0)
            BEGUN[name] = run, stage, collate_step(stage, gather(stage, 0), 0)


def gradients(folder: str, sharded: bool = False, kinds: bool = False) -> None:
    """For each algorithm (or for each of KINDS) the gradient of its first optimizer step, and the policy after one step
    of training. All ranks have the same batch; the update is shared out, and if `sharded` the weights too."""
    ranks = ranks_of_environment(LIMIT)
    for name in KINDS if kinds else ALGORITHMS:
        if sharded and name in ONE_PROCESS_EACH:
            continue
        run, stage, batch = BEGUN[name]
        run.policy.ranks = stage.optimizer.ranks = ranks
        if sharded:
            run.policy = shard_policy(run.policy, ranks)
            stage.optimizer = make_optimizer(stage.algorithm, run.policy, stage.config.optimizer)
            stage.optimizer.set_step(0, stage.config.steps)
        for model in stage.frozen_models.models.values():
            model.ranks = ranks
        found: dict[str, torch.Tensor] = {}
        usual = stage.optimizer.torch.step

        def step(found: dict[str, torch.Tensor] = found, usual=usual, optimizer=stage.optimizer) -> None:
            if not found:
                found.update({f"gradient {n}": whole(p.grad).clone() for n, p in enumerate(optimizer.parameters)})
            usual()

        stage.optimizer.torch.step = step
        prepared = prepare(batch, run.policy, stage.frozen_models.models, stage.algorithm)
        if isinstance(stage.algorithm, TRPO):  # its optimizer moves the critic only
            own, _ = surrogate_gradient(run.policy, prepared)
            product = FisherProduct(run.policy, prepared)(own)
            found_by = Path(folder) / f"{name} policy-{ranks.rank}.safetensors"
            save_file({"gradient": own, "product": product}, found_by)
        before = {f"change {n}": whole(p).detach().clone() for n, p in enumerate(run.policy.parameters())}
        metrics = update(stage.algorithm, run.policy, prepared, stage.optimizer)
        after = {f"change {n}": whole(p).detach() for n, p in enumerate(run.policy.parameters())}
        found |= {key: after[key] - before[key] for key in after}
        save_file(found, Path(folder) / f"{name}-{ranks.rank}.safetensors")
        (Path(folder) / f"{name}-{ranks.rank}.json").write_text(json.dumps(metrics))
    ranks.close()


def parts(folder: str) -> None:
    """How many numbers of the weights this rank holds."""
    ranks = ranks_of_environment(LIMIT)
    policy = shard_policy(load_policy(PolicySection(**runs.TINY["policy"])), ranks)
    held: Any = policy.parameters()
    (Path(folder) / str(ranks.rank)).write_text(str(sum(part.to_local().numel() for part in held)))
    ranks.close()


def unequal_calls(folder: str) -> None:
    """The gradients of log-probabilities, entropies and divergences where the head is no plain linear map and is called
    for two actions at a time. The first of two ranks has twelve actions, the second one three."""
    ranks = ranks_of_environment(LIMIT)
    LanguageModel.head_chunk = property(lambda model: 2)  # type: ignore[assignment, method-assign]
    turns = [Turn([5, 6, 7], [9 + place] * count) for place, count in enumerate((12, 3))]
    batch = models.batch_of([Episode(Example("x", "?"), n, n, turns=[turn], score=0.0) for n, turn in enumerate(turns)])
    own = batch if ranks.size == 1 else batch[torch.tensor([ranks.rank])]
    found = {}
    for kind, own_head in (("biased", None), ("its own", BaseModelOutputWithPast)):
        made = []
        for seed in (0, 1):
            model = models.llama(seed, tie_word_embeddings=seed == 1)
            model.lm_head.bias = nn.Parameter(model.lm_head.weight[:, 0].detach().clone())
            made.append(shard_policy(Policy(model, models.tokenizer()).but(own_head=own_head), ranks))
        policy, teacher = made
        teacher.model.requires_grad_(False)
        said = policy.compute_logprobs(own, entropy=True, sums=["squared_probabilities"])
        beside = policy.but(teacher=teacher).compute_logprobs(own, divergence=Divergence("forward_kl"))
        (said.logprobs.sum() + said.require("entropy").sum() + beside.require("divergence").sum()).backward()
        found |= {f"{kind} {n}": whole(parameter.grad) for n, parameter in enumerate(policy.parameters())}
        found[f"{kind} sums"] = said.require("distribution_sums").sum()
        ranks.add(found[f"{kind} sums"])
    save_file(found, Path(folder) / f"head-{ranks.rank}.safetensors")
    (Path(folder) / f"head-{ranks.rank}.json").write_text("{}")
    ranks.close()


def choices(folder: str) -> None:
    """What a new run computes with, where each rank would choose another precision and other threads by itself."""
    ranks = ranks_of_environment(LIMIT)
    torch.set_num_threads(1 + ranks.rank)
    device.SMALL, device.bf16_speedup = 0, lambda: 1.0 + ranks.rank  # type: ignore[assignment]
    config = build_config(runs.tiny(threads=None, policy=TINY | {"compute": "auto"}))
    loaded = load(config, Begun(Path(folder), None, None, Progress()), ranks, lambda text: None)
    used = [str(loaded.policy.compute), torch.get_num_threads(), asdict(loaded.machine)]
    (Path(folder) / f"{ranks.rank}.json").write_text(json.dumps(used))
    ranks.close()


def left_while_joining(folder: str) -> None:
    """The second rank goes when it has said where it can be reached; the first one tries to reach it after that."""
    usual = dist.init_process_group

    def late(*arguments: Any, **named: Any) -> None:
        if os.environ["RANK"] == "1":
            Thread(target=lambda: (time.sleep(0.3), os._exit(9)), daemon=True).start()
        else:
            time.sleep(1.0)
        usual(*arguments, **named)

    dist.init_process_group = late
    began = time.monotonic()
    try:
        ranks_of_environment(2.0)
    except RankLost:
        (Path(folder) / "seconds").write_text(str(time.monotonic() - began))
        os._exit(0)


def left_alone(folder: str) -> None:
    """The second rank goes while the first asks it for its part of the weights."""
    ranks = ranks_of_environment(LIMIT)
    policy = shard_policy(load_policy(PolicySection(**runs.TINY["policy"])), ranks)
    assert ranks.loss_in(RuntimeError("shapes do not fit")) is None
    ranks.wait()
    if not ranks.first:
        os._exit(9)
    try:
        for part in policy.parameters():
            whole(part)
    except RuntimeError as error:
        sentence = LmgymError("a sentence about the model")  # as the proof of a model makes one of any error
        sentence.__cause__ = error
        (Path(folder) / "said").write_text(str(ranks.loss_in(sentence)))
        os._exit(0)  # a thread may still wait for a connection that is dead
