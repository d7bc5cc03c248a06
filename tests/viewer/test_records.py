"""What the page reads of a run: curves, steps, groups and answers; of old folders, damaged ones and growing ones."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmgym.core.errors import LmgymError
from lmgym.logs.formatting import json_bytes
from lmgym.logs.rewind import rewind
from lmgym.viewer.addresses import UnknownAddress, tree_at
from lmgym.viewer.curves import Table, _cuts, _each
from lmgym.viewer.runs import RunRecords, open_runs
from lmgym.viewer.views import pair_of
from tests.viewer.sample_runs import add_evaluation, add_step, append, byte_tokenizer, sample_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_run(tmp_path_factory.mktemp("runs") / "sample")


@pytest.fixture
def run(folder: Path) -> RunRecords:
    return RunRecords(folder, "sample")


def at(run: RunRecords, address: str) -> Any:
    return json.loads(json_bytes(tree_at([run], address)))


def test_curves_have_intervals_and_lead_to_their_steps(run: RunRecords) -> None:
    tables = at(run, "runs/0/curves")["tables"]
    assert tables["train"]["places"] == [[0, step] for step in range(12)]
    held = tables["evaluation/validation"]
    assert held["x"] == [0, 4, 8] and set(held["values"]) == {"count", "final_answer"}
    assert np.allclose(held["low"]["final_answer"], np.array(held["values"]["final_answer"]) - 0.1)


def test_long_curves_are_grouped_without_mixing_stages() -> None:
    table = Table()
    for step in range(1000):
        table.add(step, int(step >= 400), step, {"reward": float(step)} if step % 2 else {})
    cuts = _cuts([stage for _, stage, _ in table.places], most=100)
    assert len(cuts) <= 101 and [0, *(end for _, end in cuts)] == [*(begin for begin, _ in cuts), 1000]
    assert any(end == 400 for _, end in cuts)
    column = table.column("reward")
    assert np.isnan(column[0]) and column[999] == 999.0
    starts = [begin for begin, _ in cuts]
    for reduce, function in (("mean", np.nanmean), ("low", np.nanmin), ("high", np.nanmax)):
        assert _each(column, starts, reduce) == [function(column[begin:end]) for begin, end in cuts]
    assert _each(np.array([np.nan, np.nan, 1.0]), [0, 2]) == [None, 1.0]


def test_a_step_is_its_table_and_a_group_is_sorted_out_of_it(run: RunRecords) -> None:
    step = at(run, "runs/0/steps/0/5")
    assert step["neighbours"] == [[0, 4], [0, 6]] and len(step["columns"]["index"]) == 15 and step["note"] == ""
    group = at(run, "runs/0/groups/0/5/1")
    assert [answer["index"] for answer in group["answers"]] == [5, 6, 7, 8, 9]
    assert all(answer["reason"].endswith("all scores are equal") for answer in group["answers"])
    assert group["example"]["prompt"].endswith("for the 2. time?")


def test_an_answer_has_its_tokens_their_numbers_and_the_formula_of_its_loss(run: RunRecords) -> None:
    answer = at(run, "runs/0/answers/train/0/5/0")
    (row,) = answer["rows"]
    assert "".join(row["pieces"]).endswith("The answer is 42.<eos>") and row["special"] == [0, len(row["ids"]) - 1]
    assert row["columns"]["advantages"] == [0.4] * len(row["actions"])  # as short as float32 can be written
    assert answer["explanation"]["rows"][0]["push"] == pytest.approx([0.4 / 500] * len(row["actions"]))
    assert answer["explanation"]["formulas"]["A"] == "R less the mean of the group's scores"
    assert answer["explanation"]["scores"]["mean score of its group"] == pytest.approx(0.6)
    assert answer["mates"] == [0, 1, 2, 3, 4]


def test_a_folder_without_traces_shows_what_rollouts_has(folder: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for name in ("metrics.jsonl", "rollouts.jsonl", "recipe.yaml"):
        (old / name).write_bytes((folder / name).read_bytes())
    run = RunRecords(old, "old")
    assert "no traces" in at(run, "runs/0/steps/0/5")["note"]
    assert len(at(run, "runs/0/groups/0/5/0")["answers"]) == 5
    answer = at(run, "runs/0/answers/train/0/5/1")
    assert set(answer["rows"][0]["columns"]) == {"logprobs_sampler"} and not answer["tokenizer"]
    assert answer["rows"][0]["pieces"][0] == "[1]"
    with pytest.raises(LmgymError, match="no group 1 in stage 1, step 6"):
        tree_at([run], "runs/0/groups/0/5/1")


def test_a_damaged_step_falls_back_and_damaged_lines_are_named(tmp_path: Path) -> None:
    folder = sample_run(tmp_path / "damaged", steps=2)
    (folder / "traces" / "stage-0-step-000001.zip").write_bytes(b"no zip")
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"kind": 3}\nnonsense\n{"kind": "train", "stage": 0, "st')
    run = RunRecords(folder, "damaged")
    assert "is damaged" in at(run, "runs/0/steps/0/1")["note"]
    problems = at(run, "runs/0/curves")["problems"]
    assert [problem.split(" is no record")[0] for problem in problems] == [
        "metrics.jsonl line 4",
        "metrics.jsonl line 5",
        "rollouts.jsonl line 13",
        "rollouts.jsonl line 14",
    ]


def test_what_is_written_later_is_seen_and_a_rewind_too(tmp_path: Path) -> None:
    folder = sample_run(tmp_path / "growing", steps=2)
    run = RunRecords(folder, "growing")
    assert len(at(run, "runs/0/curves")["tables"]["train"]["x"]) == 2 and at(run, "runs/0/steps/0/1")
    before = at(run, "changes")[0]["sizes"]
    for step in (2, 3, 4):
        add_step(folder, byte_tokenizer(), step)
    add_evaluation(folder, 5)
    assert at(run, "changes")[0]["sizes"] != before
    assert at(run, "runs/0/steps/0/3")["neighbours"] == [[0, 2], [0, 4]]
    assert len(at(run, "runs/0/evaluations")["moments"]) == 2
    rewind(folder, stage=0, step=3)
    assert len(at(run, "runs/0/curves")["tables"]["train"]["x"]) == 3
    assert len(at(run, "runs/0/evaluations")["moments"]) == 1


def test_held_out_prompts_through_training_and_of_two_runs(run: RunRecords, tmp_path: Path) -> None:
    through = at(run, "runs/0/prompts/validation/sums/validation/0")
    assert [one["texts"] for one in through["answers"]] == [[f"It is {40 + step} and no more."] for step in (0, 4, 8)]
    other = RunRecords(sample_run(tmp_path / "other", seed=1), "other")
    pair = tree_at([run, other], "pairs/0/1")
    assert pair["recipe"] == [{"key": "seed", "first": "0", "second": "1"}]
    assert pair["metrics"][0]["difference"] == 0 and len(pair["prompts"]) == 2
    assert [row["first"]["texts"] == row["second"]["texts"] for row in pair["prompts"]] == [True, False]


def test_a_folder_of_runs_is_all_of_them_and_another_folder_is_refused(folder: Path) -> None:
    assert [run.name for run in open_runs([folder.parent, folder])] == [f"{folder.parent.name}/sample", "sample"]
    with pytest.raises(LmgymError, match="so it is no run folder"):
        open_runs([folder / "traces"])
    with pytest.raises(LmgymError, match="there is no run folder"):
        open_runs([folder / "nothing"])


@pytest.mark.parametrize(
    "address",
    ["", "runs/1/curves", "runs/-1/curves", "runs/0/steps/0", "runs/0/steps/0/x", "runs/0/steps/0/٣", "runs/0/../../x",
     "runs/0/answers/other/0/0/0", "pairs/0", "runs/0/steps/0/" + "9" * 13],
)  # fmt: skip
def test_an_unknown_address_is_refused(run: RunRecords, address: str) -> None:
    with pytest.raises(UnknownAddress):
        tree_at([run], address)


def test_a_link_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder, secret = sample_run(tmp_path / "linked", steps=1), tmp_path / "secret.jsonl"
    append(secret, {"kind": "train", "stage": 0, "stage_name": "rl", "step": 0})
    for name in ("rollouts.jsonl", "notes.jsonl"):
        (folder / name).unlink(missing_ok=True)
        os.symlink(secret, folder / name)
    with pytest.raises(LmgymError, match="leads out of the run folder"):
        RunRecords(folder, "linked")


def test_a_pair_has_a_chosen_and_a_rejected_side_and_a_margin() -> None:
    def episode(logprobs: list[float], reference: list[float] | None) -> Any:
        columns = {"logprobs": np.float32(logprobs)} | (
            {} if reference is None else {"logprobs_ref": np.float32(reference)}
        )
        return SimpleNamespace(rows=[SimpleNamespace(columns=columns)])

    columns = {"score": [0.0, 1.0, None, 1.0], "index": [7, 8, 9, 10]}
    episodes = {7: episode([-2, -1], [-1, -1]), 8: episode([-1, -1, -1], [-2, -1, -1.5])}
    found = pair_of(columns, range(4), episodes, length_norm=False)
    assert found == {"chosen": 8, "rejected": 7, "scores": {8: 1.5, 7: -1.0}, "margin": 2.5}
    assert pair_of(columns, range(4), episodes, length_norm=True)["margin"] == 0.5 + 0.5
    assert pair_of(columns, range(4), {8: episode([-1], None)}, length_norm=False) == {
        "chosen": 8, "rejected": 7, "scores": {8: -1.0}, "margin": None,
    }  # fmt: skip
    assert pair_of({"score": [1.0, 1.0], "index": [0, 1]}, range(2), {}, length_norm=False) is None


def test_runs_of_a_folder_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (1, 10, 2):
        sample_run(tmp_path / "sweep" / f"seed-{number}", steps=1)
    assert [run.name for run in open_runs([tmp_path / "sweep"])] == ["sweep/seed-1", "sweep/seed-2", "sweep/seed-10"]


def test_the_overview_has_the_first_and_the_newest_evaluation(tmp_path: Path) -> None:
    run = RunRecords(sample_run(tmp_path / "run", steps=9), "run")
    tree = at(run, "runs/0/overview")
    assert tree["stages"] == [{"name": "rl", "steps": 9, "planned": None}] and tree["recipe"].startswith("seed: 0")
    (metric,) = tree["evaluations"]["validation"]["metrics"]
    assert metric["name"] == "final_answer" and metric["first"] == pytest.approx([0.2, 0.1, 0.3])
    assert metric["newest"] == pytest.approx([0.3, 0.2, 0.4])
    assert tree["evaluations"]["validation"]["places"] == {"first": [0, 0], "newest": [0, 8]}
    assert at(run, "runs/0/findings")["state"] == "unfinished"
