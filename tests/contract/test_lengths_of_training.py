"""How long a stage trains: epochs, warm-up as a share, transformers' schedules; runs without evaluation; and rows that
are too long."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lmgym.cli.main import main
from lmgym.config.build import build_config, dump, load_config
from lmgym.config.schema import Config
from lmgym.core.errors import LmgymError
from lmgym.logs.console import Console
from lmgym.logs.records import read_records
from lmgym.tasks.base import load_task
from lmgym.training.loop import train
from lmgym.training.setup import load_data
from lmgym.updates.optimizer import OptimizerSection
from tests import runs


@pytest.mark.parametrize(
    ("name", "own", "theirs"),
    [
        ("constant_with_warmup", {}, {}),
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("cosine_with_restarts", {"cycles": 3}, {"num_cycles": 3}),
        ("cosine_with_min_lr", {"final_fraction": 0.1}, {"min_lr_rate": 0.1}),
        ("polynomial", {"power": 2.0, "final_fraction": 0.01}, {"power": 2.0, "lr_end": 0.005}),
        ("inverse_sqrt", {}, {}),
        ("warmup_stable_decay", {"decay_fraction": 0.25, "final_fraction": 0.1},
         {"num_decay_steps": 25, "min_lr_ratio": 0.1}),
    ],
)  # fmt: skip
def test_schedules_are_those_of_transformers(name: str, own: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Behind the warm-up, which begins at 1/warmup here and at 0 there."""
    from transformers import get_scheduler

    steps, warmup = 100, 10
    section = OptimizerSection(learning_rate=0.5, warmup=warmup, schedule=name, **own)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=theirs or None)
    for step in range(steps):
        if step >= warmup:
            assert section.at(step, steps) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), step
        optimizer.step()
        scheduler.step()


def test_a_warm_up_as_a_share_of_the_steps() -> None:
    share, plain = (OptimizerSection(learning_rate=1.0, schedule="cosine", **one)  # type: ignore[arg-type]
                    for one in ({"warmup_ratio": 0.03}, {"warmup": 4}))  # fmt: skip
    assert [share.at(step, 101) for step in range(101)] == [plain.at(step, 101) for step in range(101)]
    with pytest.raises(LmgymError, match="say the same twice"):
        OptimizerSection(warmup=3, warmup_ratio=0.1)
    with pytest.raises(LmgymError, match="write it as final_fraction"):
        OptimizerSection(schedule="cosine_with_min_lr")


def load_data_of(config: Config, folder: Path) -> Config:
    """Count the epochs of a config, and of the same one as its recipe says it."""
    written = folder / "written.yaml"
    written.write_text(dump(config))
    again = load_config(written)
    load_data(config)
    load_data(again)
    return again


def test_epochs_become_steps_and_a_run_goes_on(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "references": str(n + 1)} for n in range(10)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "data", "path": str(path), "test": 0.0}
    tree = runs.tiny(task=task, out=str(tmp_path / "run"), prompts_per_step=4, steps=None)
    tree["evaluation"] = None
    config = build_config(tree | {"epochs": 1.5})
    load_data(config)
    assert (config.stages[0].steps, config.stages[0].epochs) == (math.ceil(1.5 * 10 / 4), None)
    with pytest.raises(LmgymError, match="'steps' and 'epochs' say the same twice"):
        build_config(tree | {"epochs": 1.5, "steps": 3})
    for epochs, per_step, steps in ((1.1, 1, 11), (0.7, 1, 7), (0.07, 1, 1), (2.2, 11, 2), (1e-3, 4, 1)):
        config = build_config(tree | {"epochs": epochs, "prompts_per_step": per_step})
        again = load_data_of(config, tmp_path)  # what is written before it has begun is a recipe, too
        assert config.stages[0].steps == again.stages[0].steps == steps
    for wrong in (math.inf, math.nan, 0):
        with pytest.raises(LmgymError, match="it must be above 0"):
            build_config(tree | {"epochs": wrong})
    staged = build_config(tree | {"epochs": 2, "stages": [{"name": "a"}, {"name": "b", "steps": 7}]})
    assert [(stage.steps, stage.epochs) for stage in staged.stages] == [(100, 2.0), (7, None)]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tree | {"epochs": 0.8}))
    assert main(["train", str(recipe)]) == 0
    assert load_config(tmp_path / "run" / "recipe.yaml").stages[0].steps == 2
    assert main(["train", str(recipe)]) == 0  # it is the same recipe, and finished
    assert main(["train", str(tmp_path / "run"), "steps=3"]) == 0
    resumed = tmp_path / "run" / "recipe.yaml"
    with pytest.raises(LmgymError, match=r"say the same twice; remove one of them, or set it to null"):
        load_config(resumed, ["epochs=2"])
    assert load_config(resumed, ["epochs=2", "steps=null"]).stages[0].epochs == 2
    records = list(read_records(tmp_path / "run" / "metrics.jsonl"))
    assert [record["kind"] for record in records] == ["train"] * 3  # and no evaluation
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["after"]["results"] == {}


def test_a_callers_config_keeps_its_epochs(tmp_path: Path) -> None:
    """So that it may be changed and trained again."""
    config = build_config(runs.tiny(out=str(tmp_path / "run"), prompts_per_step=32, steps=None, epochs=0.5))
    config.evaluation.examples = 0
    train(config, Console(quiet=True))
    assert config.stages[0].epochs == 0.5
    assert load_config(tmp_path / "run" / "recipe.yaml").stages[0].steps == 1


def test_a_run_of_epochs_that_has_ended_does_not_read_its_data_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmgym.experiments.sweep.training_examples", lambda *given: pytest.fail("read again"))
    changes = {"prompts_per_step": 32, "steps": None, "epochs": 0.5, "evaluation": None}
    assert main(["train", str(runs.write(tmp_path / "recipe.yaml", **changes)), f"out={tmp_path / 'run'}"]) == 0


@pytest.mark.parametrize("key", ["keep_best", "final_split"])
def test_what_needs_evaluations_is_refused_without_them(key: str) -> None:
    with pytest.raises(LmgymError, match="need evaluations, and examples is 0"):
        build_config(runs.tiny(evaluation={"examples": 0, key: "reward"}))
    with pytest.raises(LmgymError, match="early_stop judges by evaluations"):
        build_config(runs.tiny(evaluation={"examples": 0}, early_stop={"metric": "reward", "patience": 1}))


def test_prompts_that_are_too_long_are_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Longer than policy.max_prompt_tokens, texts and chats; without the key chats are refused and texts cut."""
    path = tmp_path / "rows.jsonl"
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1" * 90}]
    prompts = [f"{n}+1=" for n in range(8)] + ["2" * 90, chat]
    rows = [{"prompt": prompt, "references": "2"} for prompt in prompts] + [{"prompt": 7}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = runs.tiny(evaluation={"examples": 0}, out=str(tmp_path / "run"), steps=1)
    tree["policy"] = {**tree["policy"], "max_prompt_tokens": 40}
    tree["task"] = {"name": "data", "path": str(path), "test": 0.0, "unfit": "drop"}
    recipe = runs.write(tmp_path / "recipe.yaml", **tree)
    sentences = ("1 row does not fit and is left out: column 'prompt' must hold a text or a list of chat messages (",
                 "2 rows do not fit and are left out: 2 times too long: the prompt (rows/9, rows/10)")  # fmt: skip
    for command in ("check", "train"):
        main([command, str(recipe)])
        said = capsys.readouterr().out
        assert all(sentence in said for sentence in sentences), command
    first = next(iter(read_records(tmp_path / "run" / "metrics.jsonl")))
    assert first["kind"] == "data" and all(any(one in told for told in first["left_out"]) for one in sentences)


def test_shares_and_weights_of_a_mixture(tmp_path: Path) -> None:
    """open-r1's dataset_mixture keeps a share of each data set; weights by rows make an epoch of all of them."""
    tasks = [{"name": "topics", "weight": "rows"}, {"name": "arithmetic", "weight": "rows", "size": 90, "share": 0.5}]
    whole = load_task("mixture", "train", tasks=tasks)
    counts = {name: sum(one.meta["task"] == name for one in whole) for name in ("topics", "arithmetic")}
    assert counts["arithmetic"] == 45 and whole[0].meta["mixture"] == {name: float(n) for name, n in counts.items()}
    alone = [f"arithmetic/{one.id.removeprefix('arithmetic/')}" for one in load_task("arithmetic", "train", size=90)]
    kept = [one.id for one in whole if one.meta["task"] == "arithmetic"]
    assert [id for id in alone if id in set(kept)] == kept and kept != alone[:45]  # in their order, not the first ones
    assert len(load_task("mixture", "test", tasks=tasks)) > 45  # held-out examples are all there
    for share in (0, 1.5):
        with pytest.raises(LmgymError, match=r"key 'task\.tasks\.0\.share' is .*; it must be above 0 and at most 1"):
            load_task("mixture", "train", tasks=[{"name": "topics", "share": share}])
