"""GRPO's parts: a key that nothing reads cannot be written, in the former form neither; a part of one's own needs no
class of an algorithm; recipes and run folders from before the parts mean what they meant."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from docs.site.family import family_table
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.grpo.former import DEFAULTS, in_former_keys
from lmgym.algorithms.grpo.group_relative import GroupRelative
from lmgym.algorithms.grpo.surrogate import Surrogate
from lmgym.batch import Batch, PolicyOutputs
from lmgym.config.build import build_config, dump, plain, resolved
from lmgym.config.yaml import load_yaml
from lmgym.core import registry
from lmgym.core.constraints import PositiveFloat
from lmgym.core.errors import LmgymError
from tests.family import grpo
from tests.runs import ROOT

BASE: dict[str, Any] = {
    "policy": {"model": "builtin:tiny"},
    "task": {"name": "arithmetic"},
    "rewards": {"final_answer": 1},
    "steps": 1,
}
# A former key that means something only together with another: alone it was accepted, and nothing read it.
IGNORED: dict[str, Any] = {
    "sapo_positive": 9.0, "sapo_negative": 9.0, "keep_below": 0.0, "keep_above": 0.5, "vespo_power_positive": 9.0,
    "vespo_rate_positive": 50.0, "vespo_power_negative": 9.0, "vespo_rate_negative": 9.0, "covariance_share": 0.9,
    "covariance_low": 0.5, "covariance_high": 9.0, "covariance_coefficient": 0.5, "keep_by": "score_per_token",
    "turn_gamma": 0.1, "turn_history": 2, "turn_history_power": 2.0, "episode_coefficient": 0.0,
    "importance_level": "sequence", "importance_outside": "mask", "length_norm": True,
}  # fmt: skip
BESIDE: list[tuple[str, dict[str, Any]]] = [  # those that a part of another name does not have
    ("sapo", {"clip_low": 0.1}),
    ("sapo", {"clip_high": 0.1}),
    ("vespo", {"clip_high": 0.1}),
    ("gpg", {"clip_low": 0.1}),
    ("cispo", {"dual_clip": 3.0}),
]


def algorithm(section: Any, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return build_config({**BASE, **more, "algorithm": section}).stages[0].algorithm


@pytest.mark.parametrize(("name", "key"), [*(("grpo", {k: v}) for k, v in IGNORED.items()), *BESIDE])
def test_a_key_that_nothing_reads_is_refused(name: str, key: dict[str, Any]) -> None:
    with pytest.raises(LmgymError, match=f"algorithm.{next(iter(key))}'"):
        algorithm({"name": name, **key})


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_part_has_no_key_of_another(kind: str) -> None:
    """Each field of each member, given to a member that does not have it."""
    members = {name: registry.get(kind, name) for name in registry.BUILTIN[kind]}
    keys = {field for member in members.values() for field in member.__dataclass_fields__}
    for name, member in members.items():
        for key in keys - set(member.__dataclass_fields__):
            with pytest.raises(LmgymError, match=f"unknown key '{key}' in 'algorithm.{kind}'"):
                algorithm({"name": "grpo", kind: {"name": name, key: 1}})


def test_the_former_keys_of_every_preset_are_its_parts() -> None:
    """There and back: a preset in the former keys, all written out as in a run folder, is the preset."""
    for name in GRPO.presets:
        built = algorithm({"name": "grpo", "preset": name})
        former = in_former_keys(plain(built))
        assert not former.keys() & DEFAULTS.keys() and former.keys() > {"objective", "scale_rewards", "covariance"}
        assert algorithm(former) == built


def test_a_warning_names_the_new_form() -> None:
    with pytest.warns(FutureWarning, match=r"'algorithm\.clip_high' became .* surrogate: {name: clip, .*high: 0\.3"):
        build_config({**BASE, "algorithm": {"name": "dapo", "clip_high": 0.3}})
    with pytest.warns(FutureWarning, match=r"'algorithm\.clip_high' and 1 more .* reduction: limit"):
        build_config(
            {**BASE, "algorithm": {"name": "grpo", "clip_high": 0.3, "reduction": "constant", "length_norm": True}}
        )
    with pytest.raises(LmgymError, match=r"'algorithm\.surrogate' and 'algorithm\.clip_high' say the same in two"):
        build_config({**BASE, "algorithm": {"name": "grpo", "clip_high": 0.3, "surrogate": "clip"}})


def test_a_part_goes_over_the_presets_key_by_key() -> None:
    changed = algorithm({"name": "gspo", "surrogate": {"high": 5e-4}})
    assert (changed.surrogate.ratio, changed.surrogate.low, changed.surrogate.high) == ("sequence", 3e-4, 5e-4)
    other = algorithm({"name": "gspo", "surrogate": {"name": "sapo"}})
    assert (other.surrogate.ratio, other.reduction) == ("token", "sequence")
    stages = [{"name": "a"}, {"name": "b", "algorithm": {"credit": {"scale": "batch"}}}]
    built = build_config({**BASE, "algorithm": {"name": "dapo", "credit": {"scale_by_mixed": True}}, "stages": stages})
    first, second = (stage.algorithm for stage in built.stages)
    assert (first.credit.scale, first.credit.scale_by_mixed) == ("group", True)  # type: ignore[attr-defined]
    assert (second.credit.scale, second.credit.scale_by_mixed) == ("batch", True)  # type: ignore[attr-defined]
    assert build_config(load_yaml(dump(built))) == built


@dataclass(frozen=True, kw_only=True)
class Tanh(Surrogate):
    """A surrogate of one's own: the ratio's change goes through tanh."""

    width: PositiveFloat = 1.0

    def term(self, batch: Batch, new: PolicyOutputs, log_ratio: torch.Tensor) -> Any:
        gate = self.width * torch.tanh(log_ratio / self.width)
        return -gate * batch.require("advantages"), {"ratio/mean": log_ratio.exp()}


def test_a_part_of_ones_own_needs_no_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered["surrogate"], "tanh", Tanh)
    built = algorithm({"name": "dapo", "surrogate": {"name": "tanh", "width": 0.5}})
    assert built.surrogate == Tanh(width=0.5) and built.overlong == 0.2
    assert resolved(build_config({**BASE, "algorithm": built}))["stages"][0]["algorithm"]["surrogate"] == {
        "name": "tanh", "width": 0.5,
    }  # fmt: skip
    with pytest.raises(LmgymError, match=r"algorithm\.surrogate\.width is 0\.0; it must be above 0"):
        algorithm({"name": "grpo", "surrogate": {"name": "tanh", "width": 0}})
    with pytest.raises(LmgymError, match=r"unknown key 'high' in 'algorithm\.surrogate'"):
        algorithm({"name": "grpo", "surrogate": {"name": "tanh", "high": 0.3}})
    with pytest.raises(LmgymError, match=r"group is no surrogate|unknown surrogate 'group'"):
        algorithm({"name": "grpo", "surrogate": "group"})


@dataclass(kw_only=True)
class OwnLoss(GRPO):
    """Writes its loss and reads none of GRPO's parts but the reduction."""

    def loss(self, batch: Batch, new: PolicyOutputs) -> Any:
        return {"policy": (-batch.require("advantages") * new.logprobs, self.reduction)}, {}


@dataclass(kw_only=True)
class Thin(GroupRelative):
    """The same on the thin base."""

    def loss(self, batch: Batch, new: PolicyOutputs) -> Any:
        return {"policy": (-batch.require("advantages") * new.logprobs, "token")}, {}


@dataclass(kw_only=True)
class Added(GRPO):
    """Adds to GRPO's loss, and so reads all of it."""

    def loss(self, batch: Batch, new: PolicyOutputs) -> Any:
        terms, metrics = super().loss(batch, new)
        return terms, metrics


def test_a_users_loss_has_no_keys_that_it_does_not_read() -> None:
    own, thin, added = (f"{__name__}:{kind.__name__}" for kind in (OwnLoss, Thin, Added))
    for part in ({"surrogate": {"high": 0.3}}, {"correction": "truncated"}, {"tokens": "top_entropy"}):
        with pytest.raises(LmgymError, match=rf"algorithm\.{next(iter(part))} is read by GRPO's loss, and OwnLoss"):
            algorithm({"name": own, **part})
        with pytest.raises(LmgymError, match=f"unknown key '{next(iter(part))}' in 'algorithm'"):
            algorithm({"name": thin, **part})
        algorithm({"name": added, **part})
    assert algorithm({"name": own, "reduction": "sequence"}).reduction == "sequence"
    assert not algorithm({"name": own}).weighs_old and not algorithm({"name": thin}).weighs_old
    assert algorithm({"name": thin, "credit": {"scale": "group"}, "overlong": 0.1}).credit.scale == "group"


def test_in_python_a_part_is_an_object() -> None:
    with pytest.raises(LmgymError, match=r"algorithm\.surrogate is 'clip'; in Python it is an object of a class"):
        GRPO(surrogate="clip")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="clip_high"):
        GRPO(clip_high=0.3)  # type: ignore[call-arg]
    assert grpo("cispo", clip_high=3.0) == GRPO(
        **{**GRPO.presets["cispo"], "surrogate": grpo("cispo", clip_high=3.0).surrogate}
    )


def test_the_page_of_the_family_is_the_table_of_its_members() -> None:
    """The page says which parts each member has; the code says it too."""
    page = (ROOT / "docs" / "algorithms" / "family.md").read_text(encoding="utf-8")
    assert family_table() in page
