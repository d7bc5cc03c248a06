"""What fails on an Apple GPU, tried on one that is not there (tests/pretend_mps.py)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.distributed.ranks import Ranks
from lmgym.experiments.why import influence
from lmgym.models import bf16_files
from lmgym.models.bf16_files import round_files
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.rounding import UpdateSample, share_seen_by_nearest
from lmgym.training import setup
from lmgym.training.machine import Machine
from lmgym.training.resuming import fingerprint
from tests import models, runs
from tests.pretend_mps import OnMps, on_mps
from tests.runs import complaint


def there(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers).as_subclass(OnMps)


def test_tensors_say_that_they_are_there() -> None:
    assert there(1.0).device.type == "mps" and there(1.0).cpu().double().device.type == "cpu"
    with pytest.raises(TypeError, match="float64"):
        there(1.0).double()
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(1) - there(1.0)


def test_what_an_update_shows_is_known() -> None:
    weights = [torch.nn.Parameter(torch.full((8,), 0.0625).as_subclass(OnMps))]
    assert share_seen_by_nearest(weights, 0.125 * 2.0**-12) == 2 / 1.25  # as in test_rounding.py
    sample = UpdateSample(weights)
    assert sample.share_seen(lambda parameter: parameter.bfloat16()) is None
    with torch.no_grad():
        weights[0].mul_(2.0)
    assert sample.share_seen(lambda parameter: parameter.bfloat16()) == 1.0


def test_gradients_are_multiplied() -> None:
    assert influence._dot([there(1.0, 2.0), there(3.0)], [there(4.0, 5.0), there(6.0)]) == 32.0


def test_a_model_is_exported_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the run are read from files; those of its base lie on the device."""
    section = PolicySection(model="builtin:tiny_gpt2", tokenizer="builtin:numbers", device="cpu")

    def loaded_there(*given: object) -> Policy:
        policy = load_policy(section, 0)
        on_mps(policy.model)
        return policy

    model = load_policy(section, 0).model
    model.save_pretrained(tmp_path)
    trained = {name: weight + 0.01 for name, weight in load_file(tmp_path / "model.safetensors").items()}
    save_file(trained, tmp_path / "model.safetensors", {"format": "pt"})
    expected = round_files(tmp_path, section, 0)
    assert "of what training changed" in expected
    save_file(trained, tmp_path / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(bf16_files, "load_policy", loaded_there)
    assert round_files(tmp_path, section, 0) == expected


def test_it_is_told_apart_from_the_cpu_beside_it() -> None:
    machine, (model, other) = Machine(threads=1), (models.llama(0), models.llama(0))
    here = fingerprint.of_machine(machine, Policy(model, models.tokenizer()))["machine"]["device"]
    on_mps(other)
    assert fingerprint.of_machine(machine, Policy(other, models.tokenizer()))["machine"]["device"] == f"{here}, mps"


def test_several_ranks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Two(Ranks):
        size = 2

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = build_config(runs.tiny(policy=runs.TINY["policy"] | {"device": "auto"}))
    with pytest.raises(LmgymError, match="several ranks cannot train on mps; write device: cpu"):
        setup.load(config, None, Two(), print)  # type: ignore[arg-type]
    recipe = runs.write(tmp_path / "recipe.yaml", policy=runs.TINY["policy"] | {"device": "auto"})
    assert "several ranks cannot train on mps" in complaint(capsys, "check", recipe, "--ranks", "2")
