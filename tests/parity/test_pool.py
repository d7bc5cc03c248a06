"""A pool of generators on Ray: the bits of one process, whatever their number and whoever of them is lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray._private import services
from ray.cluster_utils import Cluster

from lmgym.config.build import build_config
from lmgym.core import availability, seeds
from lmgym.core.errors import LmgymError
from lmgym.distributed.launch import RANK_LOST
from lmgym.inference.base import Request, Sampling
from lmgym.inference.in_process import make_engine
from lmgym.inference.kinds import EngineSection
from lmgym.inference.pool import ray_generators
from lmgym.inference.pool.differences import applied, difference
from lmgym.inference.pool.generator import Call
from lmgym.inference.pool.pool import Here, InUnits
from lmgym.inference.pool.ray_generators import MOST_LOSSES, RayGenerators, Worker
from lmgym.inference.pool.ray_process import Process
from lmgym.inference.sampler import Sampler
from lmgym.logs.console import Console
from lmgym.models.copies import with_weights, without_weights
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from tests import models, rounding, runs
from tests.contract.test_vision_runs import EYES
from tests.parity.test_resume import Interrupting
from tests.parity.test_resume_environments import NUMBERS
from tests.runs import ARCHITECTURE, assert_equal_runs
from tests.torture.kills import descendants
from tests.torture.ranks import newest_step

pytestmark = [pytest.mark.slow, pytest.mark.processes]
SAMPLING = Sampling(max_new_tokens=12)
UNIT = 3  # 16 answers of a step are five units and a smaller one
ONE = {"name": "sampler", "unit": UNIT}
RECIPE = ("fingerprint.json", "manifest.json")  # of a checkpoint: they tell the recipe, which names the engine


@pytest.fixture(scope="module")
def process(cluster: None) -> Any:
    """An actor that several pools use one after the other, since it takes seconds to start: each begins it anew."""
    return ray.remote(num_cpus=0)(Process).remote(1, 256, False)


@pytest.fixture
def same_process(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of one generator have this one, and leave it running."""
    monkeypatch.setattr(RayGenerators, "_actor", lambda generators: process)
    monkeypatch.setattr(ray, "kill", lambda actor: None)


def policy(model: str = "builtin:tiny", **settings: Any) -> Policy:
    return load_policy(PolicySection(model=model, device="cpu", architecture=ARCHITECTURE, **settings))


def requests(count: int = 16) -> list[Request]:
    return [Request((5 + one // 4, 6, 7), key=seeds.key(0, "answer", one)) for one in range(count)]


class Killing:
    """Lets a generator die whenever it has been sent its second call of a push of weights: in the middle of a rollout.
    `pushes`: only with these weights.

    Example: Killing(generators).kills -> 3
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pushes: Collection[int] = range(1000)) -> None:
        self.kills, self.seen = 0, dict[int, int]()
        send = RayGenerators._send

        def sent(generators: RayGenerators, worker: Worker, call: Call) -> Any:
            answer = send(generators, worker, call)
            self.seen[generators.pushed] = self.seen.get(generators.pushed, 0) + 1
            if self.seen[generators.pushed] == 2 and generators.pushed in pushes:
                self.kills += 1
                ray.kill(worker.actor)
            return answer

        monkeypatch.setattr(RayGenerators, "_send", sent)


def test_a_run_on_generators_that_die_is_the_run_of_one_process(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of GRPO with an evaluation; in each step, and in the evaluation, one of three generators is killed.
    (Of two and of one below.)"""
    changes: dict[str, Any] = {"steps": 2, "evaluation": {"every": 2, "examples": 8}}
    one = runs.run(tmp_path / "one", engine=ONE, **changes)
    killing = Killing(monkeypatch)
    pool = runs.run(tmp_path / "pool", engine={"name": "pool", "unit": UNIT, "workers": 3}, **changes)
    assert_equal_runs(one, pool, but=RECIPE)
    assert killing.kills >= 3


def test_conversations_go_on_where_a_generator_is_lost(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their caches are computed again, call by call, so that no bit moves; then one process goes on with the run."""
    changes: dict[str, Any] = {
        "env": {"name": "guess_number", "style": "numbers", "high": 9, "guesses": 3},
        "task": None,
        "rewards": {},
        "policy": NUMBERS,
        "sampling": {"max_new_tokens": 2},
        "steps": 4,
    }
    one = runs.run(tmp_path / "one", engine=ONE | {"rows": 7}, **changes)
    killing = Killing(monkeypatch)
    engine = {"name": "pool", "unit": UNIT, "workers": 2, "rows": 7}
    pool = runs.run(tmp_path / "pool", Interrupting(at=2), engine=engine, **changes)
    assert killing.kills >= 2 and not (pool / "final").exists()
    runs.run(pool, engine=ONE | {"rows": 7}, **changes)
    assert_equal_runs(one, pool, but=RECIPE)


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize(
    ("model", "settings"),
    [("builtin:tiny", {"lora_rank": 2}), ("builtin:tiny", {"compute": "bfloat16"}), ("builtin:tiny_t5", {})],
    ids=["adapters", "bf16", "T5"],
)
def test_generators_sample_as_the_training_process_does(model: str, settings: dict) -> None:
    """Also after an update, of which only the trained weights are sent."""
    architecture = {} if "t5" in model else ARCHITECTURE
    own = load_policy(PolicySection(model=model, device="cpu", architecture=architecture, **settings))
    asked = [
        Request(own.decoder_start or one.prompt_ids, one.key, one.prompt_ids if own.decoder_start else ())
        for one in requests()
    ]
    one, pool = InUnits(own, Here(Sampler(own)), UNIT), InUnits(own, RayGenerators(own, workers=1), UNIT)
    answers = []
    for version in range(2):
        for engine in (one, pool):
            engine.load(own, version)
        answers.append(one.generate(asked, SAMPLING))
        assert pool.generate(asked, SAMPLING) == answers[-1]
        with torch.no_grad():
            for parameter in own.parameters():
                parameter += 0.5
    assert answers[0] != answers[1]
    pool.close()


@pytest.mark.usefixtures("same_process")
def test_generators_on_other_machines_get_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has the weights before takes the difference; one that is new, or has missed a push, takes all of them.
    Whatever it took, it samples as the training process does."""
    monkeypatch.setattr(ray_generators, "_has_other_machines", lambda: True)
    own = policy(compute="bfloat16")
    one, generators = InUnits(own, Here(Sampler(own)), UNIT), RayGenerators(own, workers=1, address="auto")
    pool, taken = InUnits(own, generators, UNIT), []
    send = RayGenerators._send

    def sent(generators: RayGenerators, worker: Worker, call: Call) -> Any:
        taken.append((worker.version, generators.pushed, generators._changes is not None))
        return send(generators, worker, call)

    monkeypatch.setattr(RayGenerators, "_send", sent)
    assert pool.generate(requests(3), SAMPLING) == one.generate(requests(3), SAMPLING)
    for update in range(1, 4):
        with torch.no_grad():
            for parameter in own.parameters():
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(update)), alpha=1e-3
                )
        own.had_updates(update)
        one.load(own, update)
        pool.load(own, update)
        if update != 2:  # the second push is not asked for, so the third comes whole
            assert pool.generate(requests(3), SAMPLING) == one.generate(requests(3), SAMPLING)
    assert taken == [(None, 1, False), (1, 2, True), (2, 4, True)]
    sizes = sum(map(len, ray.get(generators._changes))), sum(array.nbytes for array in ray.get(generators._trained))
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("changed", [0, 1, 70, 1000])
def test_a_difference_gives_the_new_weights(changed: int) -> None:
    draw = np.random.default_rng(changed)
    old = draw.integers(-(2**15), 2**15, (8, 125)).astype(np.int16)
    new = old.copy()
    new.reshape(-1)[draw.choice(1000, changed, replace=False)] ^= draw.integers(1, 2**15, changed).astype(np.int16)
    sent = difference(old, new)
    assert np.array_equal(applied(old, sent), new)
    assert changed > 100 or len(sent) < 0.3 * old.nbytes
    other = old.copy()
    other[3, 7] += 1
    with pytest.raises(LmgymError, match="gives others than were meant"):
        applied(other, sent)


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
def test_a_run_with_pictures_on_a_generator_is_the_run_of_one_process(trains: bool, tmp_path: Path) -> None:
    """It reads the pictures from the run's folder, and those of the proof as they were sent with the policy."""
    changes = {**EYES, "policy": {**EYES["policy"], "train_vision": trains}, "steps": 2}
    one = runs.run(tmp_path / "one", engine=ONE, **changes)
    pool = runs.run(tmp_path / "pool", engine={"name": "pool", "unit": UNIT, "workers": 1}, **changes)
    assert_equal_runs(one, pool, but=RECIPE)


def test_a_generator_that_hangs_is_replaced(cluster: None) -> None:
    own, warnings = policy(), list[str]()
    pool = InUnits(own, RayGenerators(own, workers=1, seconds=5.0, warn=warnings.append), UNIT)
    expected = pool.generate(requests(), SAMPLING)
    worker = pool.generators.workers[0]
    process = ray.get(worker.actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(process, signal.SIGSTOP)
    assert pool.generate(requests(), SAMPLING) == expected
    assert warnings == ["a generator was lost, and its answers are sampled again: it did not answer within 5 seconds"]
    pool.close()


def test_answers_that_no_generator_survives_end_the_run(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    own, warnings = policy(), list[str]()
    pool = InUnits(own, RayGenerators(own, workers=1, warn=warnings.append), UNIT)
    send = RayGenerators._send

    def sent(generators: RayGenerators, worker: Worker, call: Call) -> Any:
        answer = send(generators, worker, call)
        ray.kill(worker.actor)
        return answer

    monkeypatch.setattr(RayGenerators, "_send", sent)
    with pytest.raises(LmgymError, match=f"{MOST_LOSSES} generators were lost at the same answers; the last one ended"):
        pool.generate(requests(1), SAMPLING)
    assert len(warnings) == MOST_LOSSES - 1
    pool.close()


@pytest.mark.usefixtures("same_process")
def test_what_the_sampler_refuses_is_refused_here_too() -> None:
    own = policy()
    pool = InUnits(own, RayGenerators(own, workers=1), UNIT)
    with pytest.raises(LmgymError, match="answer included; shorten the prompts"):
        pool.generate([Request((5,) * 128, key=1)], SAMPLING)
    with pytest.raises(LmgymError, match="need 99 processors together, and Ray has 3"):
        RayGenerators(own, workers=99)
    pool.close()


def test_units_change_no_token(tmp_path: Path) -> None:
    """Log-probabilities follow the shape of what is computed together, within rounding; ids do not."""
    own = models.exact(policy())
    whole, units = Sampler(own), InUnits(own, Here(Sampler(own)), UNIT)
    for one, other in zip(whole.generate(requests(), SAMPLING), units.generate(requests(), SAMPLING), strict=True):
        assert one.ids == other.ids and one.stop == other.stop
        assert rounding.near(own.model, one.logprobs, other.logprobs)


def test_a_policy_comes_back_from_its_parts() -> None:
    own = policy()
    empty = without_weights(own)
    assert {parameter.device.type for parameter in empty.model.parameters()} == {"meta"}
    back = with_weights(empty, [parameter.detach().clone() for parameter in own.model.parameters()])
    assert Sampler(back).generate(requests(), SAMPLING) == Sampler(own).generate(requests(), SAMPLING)
    assert back.model.get_output_embeddings().weight is not own.model.get_output_embeddings().weight


def test_a_recipes_unit_is_what_one_process_computes_together() -> None:
    engine = make_engine(build_config(runs.tiny(engine=ONE)).engine, policy())
    assert isinstance(engine, InUnits) and engine.units.size == UNIT
    assert isinstance(make_engine(EngineSection(), policy()), Sampler)


def test_a_pool_chooses_its_units_once(cluster: None, tmp_path: Path) -> None:
    """16 answers a step for two generators: two units of two groups each; another number of them changes nothing."""
    run = runs.run(tmp_path / "run", Interrupting(at=2), engine={"name": "pool"})
    assert '"unit": 8' in (run / "machine.json").read_text()
    lines: list[str] = []
    console = Console(quiet=True)
    console.warn = console.say = lambda text, **_: lines.append(text)  # type: ignore[method-assign]
    runs.run(run, console, engine={"name": "pool", "workers": 1})
    assert '"unit": 8' in (run / "machine.json").read_text()
    assert not [line for line in lines if "bit for bit" in line]
    assert "engine: 1 generator on this machine, 1 thread each, units of 8 answers" in lines


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"engine": {"workers": 2}}, r"engine\.workers is for another engine; write engine\.name: pool"),
        ({"engine": {"name": "pool"}, "algorithm": "nlpo"}, r"engine\.name: .* which only the training process holds"),
        (
            {"engine": {"name": "pool"}, "policy": {"quantise": "4bit", "lora_rank": 2}},
            r"engine\.name: packed weights stay in the training process",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict, sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        build_config(runs.tiny(**changes))


def test_a_pool_without_ray_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(availability.NEEDS, "lmgym[ray]", availability.Need(lambda: False, "pip install 'lmgym[ray]'"))
    with pytest.raises(LmgymError, match=r"engine\.name: a pool needs Ray; pip install 'lmgym\[ray\]'"):
        runs.run(tmp_path / "run", engine={"name": "pool"})
    assert not (tmp_path / "run").exists()


# `lmgym`, which looks for Ray sooner and more often: its waits are for networks and for busy machines.
IMPATIENT = """
import sys
from lmgym.cli.main import main
from lmgym.inference.pool import ray_generators, ray_node
ray_generators.LOOK, ray_node.PATIENCE, ray_node.PAUSE = 2.0, 3.0, 0.2
sys.exit(main())
"""


def left_alone(tmp_path: Path, lose: Callable[[subprocess.Popen[bytes]], None], **engine: Any) -> str:
    """What a run on a pool says that loses a part of Ray (`lose`) after two checkpoints. It ends with the status of a
    lost rank, which `--restarts` starts again, and can be resumed."""
    changes: dict[str, Any] = {"checkpoint": {"every": 1, "keep": 2}, "steps": 5000, "evaluation": {"every": 0}}
    pool, run = {"name": "pool", "workers": 1, "threads": 1, "unit": UNIT, **engine}, tmp_path / "run"
    recipe = runs.write(tmp_path / "recipe.yaml", engine=pool, **changes)
    with (tmp_path / "output.txt").open("wb") as output:
        line = [sys.executable, "-c", IMPATIENT, "train", str(recipe), f"out={run}"]
        training = subprocess.Popen(line, cwd=runs.ROOT, stdout=output, stderr=output)
        try:
            while newest_step(run) < 2:
                assert training.poll() is None, (tmp_path / "output.txt").read_text()
                time.sleep(0.02)
            lose(training)
            assert training.wait() == RANK_LOST, (tmp_path / "output.txt").read_text()
        finally:
            training.kill()
    steps = newest_step(run) + 2
    runs.run(run, engine=ONE, **changes | {"steps": steps})
    assert newest_step(run) == steps
    return (tmp_path / "output.txt").read_text()


def kill_of_ray(training: subprocess.Popen[bytes], program: bytes) -> None:
    """Kill the processes of Ray that run this program and were started for the run."""
    for process in descendants(training.pid):
        if program in Path(f"/proc/{process}/cmdline").read_bytes():
            os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (b"/raylet/raylet\0", "lmgym: Ray has ended on this machine"),
        (b"/gcs/gcs_server\0", "has not answered for 3 seconds, and Ray ends without it"),
    ],
)
def test_ray_that_dies_is_said_and_the_run_goes_on(tmp_path: Path, program: bytes, sentence: str) -> None:
    said = left_alone(tmp_path, partial(kill_of_ray, program=program))
    assert sentence in said and "Traceback" not in said


def test_a_cluster_that_has_become_too_small_is_named(tmp_path: Path) -> None:
    looks = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 300}  # of Ray's own, at its machines
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": looks}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        node = cluster.add_node(num_cpus=1)
        lose = lambda training: cluster.remove_node(node, allow_graceful=False)  # noqa: E731
        said = left_alone(tmp_path, lose, workers=2, address=cluster.address)
    finally:
        cluster.shutdown()
    assert "a machine of Ray's cluster has gone: 1 CPUs are left, and the generators need 2" in said


def test_an_address_where_no_ray_listens_is_named_at_once() -> None:
    with pytest.raises(LmgymError, match=r"engine\.address: no Ray at 127\.0\.0\.1:1 .*; start one there: ray start"):
        ray_generators._knock("127.0.0.1:1")


def test_ray_may_keep_more_than_2_gib_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses that unless this variable is set."""
    monkeypatch.delenv("RAY_ENABLE_MAC_LARGE_OBJECT_STORE", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")

    def checked(object_store_memory: int, **others: Any) -> None:
        services.determine_plasma_store_config(object_store_memory, "/tmp", plasma_directory="/tmp")
        raise ConnectionError("far enough")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", checked)
    with pytest.raises(LmgymError, match="far enough"):
        ray_generators._connect(None, 1, 3 * 2**30, "CPU", 1)
