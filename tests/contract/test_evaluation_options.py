"""What evaluations report besides the rewards, where a recipe asks for it."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.training.setup import held_out_examples
from lmgym.types import Episode
from tests import runs


def evaluations(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    run = runs.run(folder, steps=1, **changes)
    return [record for record in runs.records(run / "metrics.jsonl") if record["kind"] == "evaluation"]


@pytest.mark.slow
def test_the_likelihood_of_the_references_is_reported_in_any_stage_that_asks_for_it(tmp_path: Path) -> None:
    imitating = evaluations(tmp_path / "supervised", algorithm={"name": "supervised"})
    plain = evaluations(tmp_path / "plain")
    asked = evaluations(tmp_path / "asked", evaluation={"every": 3, "examples": 8, "reference_nll": True})
    keys = [f"reference_nll{end}" for end in ("", "/low", "/high")]
    assert not any(key in record for record in plain for key in keys)
    assert len(asked) == 2
    for key in keys:  # the same model, the same references
        assert asked[0][key] == imitating[0][key]
        assert asked[1][key] != asked[0][key]
    rest = [{key: value for key, value in record.items() if key not in keys} for record in asked]
    assert rest == plain  # and nothing else depends on it


def test_it_is_refused_where_an_example_has_no_reference(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1="} for n in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "jsonl", "path": str(tmp_path / "sums.jsonl"), "references": None}
    with pytest.raises(LmgymError, match=r"example sums/\d+ has no reference answer"):
        evaluations(tmp_path / "run", task=task, evaluation={"reference_nll": True})


def test_a_recipe_without_an_evaluation_holds_no_examples_out() -> None:
    with pytest.raises(LmgymError, match=r"evaluates on nothing \(evaluation: null\); add evaluation.examples=256"):
        held_out_examples(build_config(runs.tiny() | {"evaluation": None}))


def kept_rollouts(folder: Path, **logs: Any) -> list[int]:
    """Records of answers that each evaluation of a short run leaves in rollouts.jsonl."""
    run = runs.run(folder, steps=1, logs={"samples": 2, **logs})
    found = [record["step"] for record in runs.records(run / "rollouts.jsonl") if record["kind"] == "evaluation"]
    return [found.count(step) for step in sorted(set(found))]


handed: list[tuple[Path, int, str, int]] = []


def hand(folder: Path, version: int, split: str, episodes: list[Episode]) -> None:
    handed.append((folder, version, split, len(episodes)))


def test_all_answers_of_an_evaluation_are_kept_or_handed_to_a_function_where_a_recipe_asks_for_it(
    tmp_path: Path,
) -> None:
    assert kept_rollouts(tmp_path / "tracked") == [2, 2]
    assert kept_rollouts(tmp_path / "all", predictions=True) == [8, 8]
    name = "tests.contract.test_evaluation_options:hand"
    assert kept_rollouts(tmp_path / "handed", predictions=name) == [2, 2]
    module = importlib.import_module("tests.contract.test_evaluation_options")  # pytest may know it by another name
    assert module.handed == [(tmp_path / "handed", version, "test", 8) for version in (0, 1)]
    with pytest.raises(LmgymError, match=r"logs\.predictions: there is no module 'nowhere'"):
        kept_rollouts(tmp_path / "nowhere", predictions="nowhere:write")
    assert not (tmp_path / "nowhere").exists()  # before anything begins
