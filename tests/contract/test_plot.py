"""`lmgym plot`: the numbers behind its lines and bands, its files, and what it refuses."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from matplotlib import image
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from lmgym.cli.main import main
from lmgym.config.yaml import write_yaml
from lmgym.core.errors import LmgymError
from lmgym.experiments.plotted_runs import plotted_runs
from lmgym.logs.plots import metric as metric_plot
from lmgym.logs.plots.figures import draw_band
from lmgym.logs.plots.metric import Line, caption, spread
from lmgym.logs.writer import Writer
from lmgym.stats.intervals import student_t
from tests.runs import complaint

STEPS = 30


def made(folder: Path, offset: float = 0.0, stages: int = 1, steps: int = STEPS, **recipe: Any) -> Path:
    """A run folder whose reward is offset + step / 10, evaluated every ten steps on two splits."""
    with Writer(folder) as writer:
        for stage in range(stages):
            position: dict[str, Any] = {"stage": stage, "stage_name": f"s{stage}"}
            for step in range(steps):
                writer.metrics(
                    {"kind": "train", **position, "step": step, "reward": offset + step / 10, "entropy": None}
                )
                if step % 10 == 0:
                    held = {"goal": offset, "goal/low": offset - 1, "goal/high": offset + 1}
                    for split in ("validation", "test"):
                        writer.metrics({"kind": "evaluation", **position, "step": step, "split": split, **held})
    (folder / "recipe.yaml").write_text(write_yaml({"seed": 0, "out": str(folder), **recipe}))
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two settings of three seeds."""
    for size in (4, 8):
        for seed in range(3):
            made(tmp_path / "sweep" / f"group_size-{size},seed-{seed}", size + 0.1 * seed**2, seed=seed, size=size)
    return tmp_path / "sweep"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Line], tuple[str, ...]]]:
    """What `metric_plot` hands to its drawing: the lines, and the texts."""
    seen: list[Any] = []
    monkeypatch.setattr(metric_plot, "_draw", lambda lines, *texts: seen.append((lines, texts)))

    def draw(groups: dict[str, list[Path]], *arguments: Any, **options: Any) -> tuple[list[Line], tuple[str, ...]]:
        metric_plot.metric_plot(groups, *arguments, Path("x.png"), **options)
        return seen[-1]

    return draw


def test_of_two_records_of_one_step_the_last_one_is_drawn(tmp_path: Path, drawn: Callable[..., Any]) -> None:
    """No run writes them, but a file may have been damaged, or put together by hand."""
    run = made(tmp_path / "run")
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + metrics.read_text().replace('"goal": 0.0', '"goal": 7.0'))
    lines, _ = drawn({"run": [run]}, "goal")
    assert lines[0].steps.tolist() == [0, 10, 20] and lines[0].bounds[0].tolist() == [7.0, 7.0, 7.0]


def test_runs_that_differ_in_the_seed_are_one_line(sweep: Path, tmp_path: Path) -> None:
    assert {name: len(folders) for name, folders in plotted_runs([str(sweep)]).items()} == {
        "group_size-4": 3,
        "group_size-8": 3,
    }
    seeds = tmp_path / "seeds"
    for seed in range(2):
        made(seeds / f"seed-{seed}", seed=seed)
    named = plotted_runs([str(seeds), str(sweep), str(made(tmp_path / "alone"))])
    assert list(named) == ["seeds", "sweep: group_size-4", "sweep: group_size-8", "alone"]
    assert named["seeds"] == [seeds / "seed-0", seeds / "seed-1"]


def test_no_run_of_a_folder_is_left_out(sweep: Path, tmp_path: Path) -> None:
    """One run of a setting was trained further, so that its recipe is another one."""
    made(sweep / "group_size-4,seed-0", 4, seed=0, size=4, steps_more=True)
    found = {name: [run.name for run in folders] for name, folders in plotted_runs([str(sweep)]).items()}
    others = ["group_size-4,seed-1", "group_size-4,seed-2"]
    assert found == {
        "group_size-4,seed-0": ["group_size-4,seed-0"],
        ", ".join(others): others,
        "group_size-8": [f"group_size-8,seed-{seed}" for seed in range(3)],
    }
    for seed in range(3):
        made(tmp_path / "seeds" / f"seed-{seed}", seed=seed, more=seed == 0)
        made(tmp_path / "mixed" / f"quick-seed-{seed}", seed=seed, more=seed == 0)
    assert list(plotted_runs([str(tmp_path / "seeds")])) == ["seed-0", "seed-1, seed-2"]
    assert list(plotted_runs([str(tmp_path / "mixed")])) == ["quick-seed-0", "quick"]
    alike = [made(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    assert list(plotted_runs([str(one) for one in alike])) == ["a, b"]


def test_seeds_are_one_line_wherever_they_lie(tmp_path: Path) -> None:
    alike = [made(tmp_path / place / f"quick-seed-{seed}", seed=seed) for seed, place in enumerate("xyx")]
    other, again = made(tmp_path / "long", seed=0, size=9), made(tmp_path / "x" / "again", seed=1)
    named = plotted_runs([str(one) for one in (alike[0], other, *alike[1:])])
    assert named == {"quick": alike, "long": [other]}
    assert len(plotted_runs([str(one) for one in (*alike, again)])) == 4  # one seed twice is no two samples
    (alike[0] / "recipe.yaml").unlink()
    assert list(plotted_runs([str(one) for one in alike])) == ["quick-seed-0", "quick"]


def test_lines_are_means_with_students_interval_over_seeds(sweep: Path, drawn: Callable[..., Any]) -> None:
    lines, texts = drawn(plotted_runs([str(sweep)]), "reward", smooth=1)
    assert [(line.name, line.runs, len(line.steps)) for line in lines] == [
        ("group_size-4", 3, 30),
        ("group_size-8", 3, 30),
    ]
    expected = student_t([8 + 2.9, 8.1 + 2.9, 8.4 + 2.9])
    assert lines[1].bounds[:, 29] == pytest.approx([expected.mean, expected.low, expected.high])
    assert texts[:3] == ("reward", "step", "mean over 3 seeds, 95% interval")


def test_a_single_run_has_the_interval_of_its_evaluations(tmp_path: Path, drawn: Callable[..., Any]) -> None:
    (line,), texts = drawn({"a": [made(tmp_path / "a", offset=0.5, stages=2)]}, "goal")
    assert line.steps.tolist() == [0, 10, 20]  # of the last stage, and of the first split
    assert line.bounds[:, 0].tolist() == [0.5, -0.5, 1.5]
    assert texts[:3] == ("held-out goal", "step of stage s1", "mean over prompts, 95% interval")


def test_the_band_of_a_share_ends_at_0_and_1(tmp_path: Path, drawn: Callable[..., Any]) -> None:
    """The summary of a finished run says whether a metric is one; of two seeds the interval is 12.7 standard errors."""
    seeds = [made(tmp_path / f"seed-{seed}", offset=0.2 + 0.4 * seed, seed=seed) for seed in range(2)]
    assert drawn({"a": seeds}, "goal")[0][0].bounds[1, 0] < -1  # neither has ended
    for share in (True, False):
        moment = {"results": {"goal": {"mean": 0.5, "share": share}}}
        (seeds[1] / "summary.json").write_text(json.dumps({"newest": moment, "after": {"results": {}}}))
        low, high = drawn({"a": seeds}, "goal")[0][0].bounds[1:, 0].tolist()
        assert (low == 0.0 and high == 1.0) if share else (low < -1 and high > 1)
    for damaged in ("[]", "[" * 100_000):
        (seeds[1] / "summary.json").write_text(damaged)
        assert drawn({"a": seeds}, "goal")[0][0].bounds[1, 0] < -1


def test_an_interval_of_a_single_step_is_drawn() -> None:
    """A band needs two steps. Where the seeds agree at its neighbours, a step has a bar, as have points without a
    line."""
    low = np.array([0.1, np.nan, 0.3, np.nan, 0.5, 0.6])
    for joined, bars in ((True, [0, 2]), (False, [0, 2, 4, 5])):
        axes = Figure().add_subplot()
        draw_band(axes, np.arange(6), low, low + 1, "red", 0.2, joined)
        drawn = [one for one in axes.collections if isinstance(one, LineCollection)]
        assert len(drawn) == 1 and len(axes.collections) == 1 + joined
        segments = [segment.tolist() for segment in drawn[0].get_segments()]
        assert segments == [[[at, low[at]], [at, low[at] + 1]] for at in bars]


def test_a_reward_may_be_named_as_the_end_of_an_interval(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    records: list[dict[str, Any]] = [
        {"kind": "train", "stage": 0, "step": 0, "reward/low": 1.0},
        {"kind": "evaluation", "stage": 0, "step": 0, "low": 1.0, "low/low": 0.5},
    ]
    assert metric_plot.find_metric("reward/low", {run: records}) == ("train", "reward/low")
    assert metric_plot.find_metric("low", {run: records}) == ("evaluation", "low")
    with pytest.raises(LmgymError, match="no run has a metric 'low/low'"):
        metric_plot.find_metric("low/low", {run: records})


def test_train_metrics_are_smoothed_all_alike(tmp_path: Path, drawn: Callable[..., Any]) -> None:
    groups = {"long": [made(tmp_path / "long", steps=60)], "short": [made(tmp_path / "short", steps=20)]}
    lines, texts = drawn(groups, "train/reward")
    assert "mean of 5 steps" in texts[2]  # 60 / 15, odd
    assert lines[1].bounds[0, 0] == pytest.approx(0.1)  # of steps 0, 1, 2: a straight line keeps its middle
    assert lines[1].bounds[0, 10] == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_command_draws_and_says_where(
    suffix: str, sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "new" / f"{name}.{suffix}" for name in "ab"]
    for out in files:
        assert main(["plot", str(sweep), "--metric", "reward", "--out", str(out)]) == 0
        assert capsys.readouterr().out == f"plot: {out}\n"
    data = files[0].read_bytes()
    assert data == files[1].read_bytes()  # the same runs, the same file
    if suffix == "png":
        assert data.startswith(b"\x89PNG")
    else:
        assert ElementTree.fromstring(data).tag == "{http://www.w3.org/2000/svg}svg"


def test_no_name_of_a_line_is_cut_off(tmp_path: Path) -> None:
    """The widest letters, and the narrowest: the picture ends a few white columns behind the name."""
    for letter in "mWi":
        out = tmp_path / f"{letter}.png"
        metric_plot.metric_plot({letter * 40: [made(tmp_path / letter)]}, "reward", out)
        ink = (image.imread(out)[:, :, :3] < 0.9).any((0, 2))  # by column
        assert 0 < len(ink) - 1 - np.flatnonzero(ink)[-1] < 0.2 * 200  # of an inch, at 200 dots each


@given(some.lists(some.floats(0, 1), max_size=8), some.floats(0, 0.2))
def test_names_do_not_overlap_and_keep_their_order(heights: list[float], apart: float) -> None:
    moved = spread(heights, apart)
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    gaps = np.diff([moved[place] for place in order])
    assert all(gaps >= apart - 1e-9)
    assert sum(moved) == pytest.approx(sum(heights))  # a block stays around its middle
    if all(np.diff(sorted(heights)) > apart):
        assert moved == pytest.approx(heights)


def test_a_caption_says_what_lines_and_bands_are() -> None:
    bounds = np.array([[1.0], [np.nan], [np.nan]])
    one, two = Line("a", np.arange(1), bounds, 1), Line("b", np.arange(1), bounds, 2)
    assert caption([one], "train", 1) == "one run"
    assert caption([one, one], "train", 3) == "one run each; mean of 3 steps"
    assert caption([one, two], "train", 1) == "mean over 2 seeds; one run"
    assert caption([one], "evaluation", 1) == "mean over prompts"
    three = Line("c", np.arange(1), np.array([[1.0], [0.5], [1.5]]), 3)
    assert caption([two, three], "train", 1) == "mean over 2 or 3 seeds, 95% interval"
    assert caption([one, three], "evaluation", 1) == "mean over 3 seeds, 95% interval; of one run: mean over prompts"
    alone = Line("d", np.arange(1), three.bounds, 1)
    assert caption([two, alone], "evaluation", 1) == "mean over 2 seeds; of one run: mean over prompts, 95% interval"


def test_what_cannot_be_drawn_is_named(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: object) -> str:
        return complaint(capsys, "plot", *arguments)

    assert refused(sweep, "--metric", "rewards") == ("no run has a metric 'rewards'; the nearest names are reward")
    assert refused(sweep, "--metric", "evaluation/gaol").endswith("the nearest names are goal")
    assert refused(sweep, "--out", "a.pdf") == "--out is a.pdf; its name must end in .png or .svg"
    assert "nowhere is not there" in refused(tmp_path / "nowhere")
    assert "has no metrics.jsonl and no runs in it" in refused(tmp_path)
    one = sweep / "group_size-4,seed-0"
    assert "is named twice" in refused(one, one, one)
    with Writer(tmp_path / "empty") as writer:
        writer.metrics({"kind": "train", "stage": 0, "step": 0, "loss/policy": 1.0})
    assert "empty has no train metric 'reward'" in refused(one, tmp_path / "empty")
    many = [made(tmp_path / f"run{number}") for number in range(9)]
    assert refused(*many) == "9 lines cannot be told apart; name at most 8 runs or settings"
    with pytest.raises(SystemExit, match="2"):
        main(["plot", str(one), "--smooth", "0"])
