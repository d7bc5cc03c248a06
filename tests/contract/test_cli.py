"""The command line: what its verbs print, return and leave behind. (Mistakes: test_bad_input.py; resuming: parity.)"""

import io
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmgym import __version__
from lmgym.cli.main import COMMANDS, main
from lmgym.config.build import dump, load_config
from lmgym.config.early import check_early
from lmgym.config.unknown_keys import FORMER
from lmgym.core import registry
from lmgym.core.constraints import FormerKey
from lmgym.core.errors import LmgymError, plain_warnings, warn
from lmgym.core.validation import field_hints, metadata_of
from lmgym.types import Example
from tests import rounding, runs
from tests.runs import complaint

HERE = "tests.contract.test_cli"


def command(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmgym.training.evaluation_points.training_plot", lambda metrics, plot: plot)
        return runs.run(tmp_path_factory.mktemp("cli") / "run", steps=3)


# ---------------------------------------------------------------- help and list

PROBE = """
import sys
from lmgym.cli.main import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
heavy = {"torch", "transformers", "numpy", "yaml", "pydantic", "rich"} & set(sys.modules)
assert not heavy, heavy
sys.exit(status)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["list"], ["list", "rewards", "--json"], ["recipes", "--json"], ["train", "--help"], []],
)
def test_help_and_list_import_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, cwd=runs.ROOT)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 200


def test_help_names_every_verb_and_a_first_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command("--help")
    said = capsys.readouterr().out
    assert all(f"    {verb} " in said for verb in COMMANDS)
    assert "lmgym train quickstart" in said
    with pytest.raises(SystemExit, match="0"):
        command("--version")
    assert capsys.readouterr().out == f"lmgym {__version__}\n"


def test_lmgym_alone_names_five_commands_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert command() == 0
    said = capsys.readouterr().out
    named = re.findall(r"^  lmgym (\w+)", said, re.MULTILINE)
    assert len(named) == 5 and {*named} <= {*COMMANDS}
    assert len(said.splitlines()) <= 10 and "lmgym --help" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian", "x"], "there is no command trian; did you mean 'train'? Valid: audit, bisect, check,"),
        (["quickstart"], "there is no command quickstart; to train quickstart, write: lmgym train quickstart"),
        (["train", "quickstart", "--steps", "5"], "keys of a recipe are written without dashes: steps=5"),
        (["train", "quickstart", "--learning-rate=1e-4"], "written without dashes: optimizer.learning_rate=1e-4"),
        (["check", "quickstart", "--group-size"], "written without dashes: algorithm.group_size=VALUE"),
        (["train", "quickstart", "--fast"], "unrecognised: --fast"),
        (["list", "--steps", "5"], "unrecognised: --steps"),
    ],
)
def test_what_was_meant(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(*arguments)
    told = capsys.readouterr().err
    assert told.startswith("lmgym: ") and said in told and told.count("\n") == 1


EARLY = """
import sys
from lmgym.cli.main import main
status = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["quickstrat"], "there is no recipe quickstrat, here or among those of lmgym; did you mean 'quickstart'?"),
        (["resipe.yaml"], "there is no recipe resipe.yaml; did you mean recipe.yaml?"),
        (["quickstart", "stepz=3"], "quickstart: unknown key 'stepz'; did you mean 'steps'?"),
        (
            ["quickstart", "policy.lora_rnk=3"],
            "quickstart: unknown key 'lora_rnk' in 'policy'; did you mean 'lora_rank'?",
        ),
        (["quickstart", "stages.rll.steps=3"], "there is no stage 'rll'; did you mean 'rl'?"),
        (["quickstart", "algorithm=gpro"], "quickstart: unknown algorithm 'gpro'; did you mean 'grpo'?"),
        (["recipe.yaml", "rewards={lenght: 1}"], "recipe.yaml: unknown reward 'lenght'; did you mean 'length'?"),
        (["recipe.yaml", "plugins=[my_reward.py]"], "there is no file my_reward.py; did you mean my_rewards.py?"),
        (["broken.yaml"], "broken.yaml:1: not valid YAML"),
    ],
)
def test_typos_are_told_before_torch_is_imported(arguments: list[str], said: str, tmp_path: Path) -> None:
    runs.write(tmp_path / "recipe.yaml")
    (tmp_path / "my_rewards.py").touch()
    (tmp_path / "broken.yaml").write_text("steps: [")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (runs.ROOT, *sys.path)))}
    for verb in ("train", "check"):
        words = [sys.executable, "-c", EARLY, verb, *arguments]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 1 and done.stdout == "", done.stderr
        assert said in done.stderr and done.stderr.startswith("lmgym: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "override",
    [
        "rewards={expand: true, values: [{words: 1}, {length: 1}]}",
        "algorithm={name: {expand: true, values: [grpo, rloo]}}",
        "runs={sweep: {algorithm.group_size: [2, 4]}}",
        "runs={sweep: {optimizer: [{learning_rate: 1}]}}",
        "env={name: gymnasium, id: Blackjack-v1, arguments: {natural: true}}",
        "task={name: tests.contract.test_cli:nobody, anything: 1}",
        "rewards={mine: {reward: words}, tests.contract.test_cli:nobody: 1}",
        "plugins=[a_module_that_may_register_gpro]",
    ],
)
def test_what_only_the_whole_recipe_tells_is_not_refused_early(override: str) -> None:
    check_early("gsm8k_grpo", [override] + ["algorithm=gpro"] * override.startswith("plugins"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sampling.top_n=3", "unknown key 'top_n' in 'sampling'; did you mean 'top_p'?"),
        ("optimizer.learning_rte=1", "unknown key 'learning_rte' in 'optimizer'; did you mean 'learning_rate'?"),
        ("algorithm.group_siz=4", "unknown key 'group_siz' in 'algorithm'; did you mean 'group_size'?"),
        ("algorithm.credit={name: group, scal: 1}", "unknown key 'scal' in 'algorithm.credit'; did you mean 'scale'?"),
        ("stages=[{name: rl, sampling: {top: 1}}]", "unknown key 'top' in 'stages.rl.sampling'; did you mean"),
    ],
)
def test_unknown_keys_of_sections_are_refused_early(override: str, said: str) -> None:
    """In the same words as when the recipe is built."""
    with pytest.raises(LmgymError, match=re.escape(f"gsm8k_grpo: {said}")):
        check_early("gsm8k_grpo", [override])
    with pytest.raises(LmgymError, match=re.escape(f"gsm8k_grpo: {said}")):
        load_config("gsm8k_grpo", [override])


def test_former_names_of_keys_are_not_refused_early() -> None:
    former = {
        one.name
        for algorithm in map(partial(registry.get, "algorithm"), registry.names("algorithm"))
        for hint in field_hints(algorithm).values()
        for one in metadata_of(hint)
        if isinstance(one, FormerKey)
    }
    assert former == FORMER
    check_early("gsm8k_grpo", ["algorithm.drift_coefficient=0.1"])


def test_lmgyms_own_warnings_are_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    with plain_warnings(), warnings.catch_warnings():
        warnings.simplefilter("always")
        warn("the sky is low\x1b[31m")
        assert capsys.readouterr().err == "lmgym: the sky is low␛[31m\n"
        warnings.warn("of a library", UserWarning, stacklevel=1)
        assert "lmgym" not in capsys.readouterr().err  # pytest keeps it


def test_check_says_what_it_is_doing(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("check", done)
    told = capsys.readouterr().err.splitlines()
    order = ["reading the data", "loading the model", "sampling and scoring a few answers", "measuring how long"]
    found = [next(index for index, line in enumerate(told) if part in line) for part in order]
    assert found == sorted(found) and all(line.startswith("lmgym: ") for line in told)


def test_an_unknown_verb_or_option_is_a_mistake() -> None:
    for arguments in (["trian", "x"], ["train"], ["train", "x", "--fast"]):
        with pytest.raises(SystemExit, match="2"):
            command(*arguments)


@pytest.mark.parametrize("kind", list(registry.BUILTIN))
def test_list_prints_what_is_registered(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list", kind, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} >= set(registry.BUILTIN[kind])
    for row in rows:
        assert set(row) >= {"name", "summary", "needs"} and row["summary"]
    assert command("list", kind + "s") == 0  # a plural will do
    said = capsys.readouterr().out
    assert all(f"  {row['name']}" in said and row["summary"] in said for row in rows)


def test_what_list_names_can_be_had() -> None:
    reward = registry.get("reward", "final_answer")
    assert reward(["The answer is: 18"], [Example(id="a", prompt="?", references=("#### 18",))]) == [1.0]


def test_list_everything_and_a_plugin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)) == set(registry.BUILTIN)
    (tmp_path / "shouts.py").write_text(
        "from lmgym.core.registry import register\n"
        "@register('reward', 'test_cli_shout')\n"
        "def shout(texts, examples):\n    'Capital letters.'\n    return [float(text.isupper()) for text in texts]\n"
    )
    try:
        assert command("list", "reward", "--plugin", tmp_path / "shouts.py") == 0
        assert re.search(r"test_cli_shout +Capital letters\.", capsys.readouterr().out)
    finally:
        registry._registered["reward"].pop("test_cli_shout", None)
    assert re.search(r"no kind 'rewird'; did you mean 'reward'", complaint(capsys, "list", "rewird"))


def test_ctrl_c_speaks_of_what_was_saved_where_a_run_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = tmp_path / "stopping.py"
    plugin.write_text("raise KeyboardInterrupt\n")  # not the signal: it is ignored in a job in the background
    assert command("list", "reward", "--plugin", plugin) == 130
    assert capsys.readouterr().err == "lmgym: stopped\n"
    assert command("train", "quickstart", f"plugins=[{plugin}]", f"out={tmp_path / 'run'}") == 130
    assert "stopped; what was saved is whole, and `lmgym train RUN_FOLDER` goes on" in capsys.readouterr().err


def test_the_package_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lmgym", "list", "algorithm"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("lmgym", run_name="__main__")
    assert end.value.code == 0 and "grpo" in capsys.readouterr().out


# ---------------------------------------------------------------- train


def test_a_run_folder_holds_all_that_is_promised(done: Path) -> None:
    files = {
        "recipe.yaml",
        "machine.json",
        "metrics.jsonl",
        "rollouts.jsonl",
        "timings.jsonl",
        "checkpoints",
        "final",
        "summary.json",
    }
    assert {path.name for path in done.iterdir()} == files | {"traces", "tokenizer", ".lock"}
    summary = json.loads((done / "summary.json").read_text())
    for moment, step in (("before", 0), ("after", 3)):
        assert summary[moment]["step"] == step
        assert set(summary[moment]["results"]["reward"]) == {"mean", "low", "high", "count", "share"}
    machine = json.loads((done / "machine.json").read_text())
    assert machine["threads"] == 1 and machine["compute"] == "float32" and machine["torch"] == torch.__version__
    for record in runs.records(done / "rollouts.jsonl"):
        assert {"kind", "stage", "step", "prompt", "turns", "score", "reward_components"} <= set(record)


def test_metrics_hold_what_is_promised(done: Path) -> None:
    lines = (done / "metrics.jsonl").read_text().splitlines()
    train = next(record for record in map(json.loads, lines) if record["kind"] == "train")
    expected = {
        "reward", "reward/length", "reward/regex", "length/mean", "length/max", "truncated", "entropy", "ratio/mean",
        "ratio/clipped", "kl/old", "sampler_logprob_gap", "gradient_norm", "zero_variance_groups", "learning_rate",
        "loss/policy",
        "tokens_per_second/rollout", "tokens_per_second/update", "memory/peak_gib", "seconds",
    }  # fmt: skip
    assert expected <= set(train)
    assert train["ratio/mean"] == 1.0 and train["ratio/clipped"] == 0.0
    loose = rounding.typical_tolerance(AutoModelForCausalLM.from_pretrained(done / "final"))
    assert train["sampler_logprob_gap"] < loose
    evaluation = json.loads(lines[0])
    assert evaluation["kind"] == "evaluation" and evaluation["step"] == 0 and evaluation["count"] == 8
    assert {"reward", "reward/low", "reward/high", "length", "length/mean", "regex"} <= set(evaluation)
    assert evaluation["length"] <= 1.0 <= evaluation["length/mean"]  # the reward of that name, and tokens


def test_the_recipe_in_the_folder_is_itself_one(done: Path, tmp_path: Path) -> None:
    config = load_config(done / "recipe.yaml")
    assert dump(config) == (done / "recipe.yaml").read_text()
    assert command("train", done / "recipe.yaml", f"out={tmp_path / 'again'}") == 0
    runs.assert_equal_runs(done, tmp_path / "again")


def test_the_final_model_is_a_transformers_model(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(done / "final")
    tokenizer = AutoTokenizer.from_pretrained(done / "final")
    prompts = ["Mia has 3 pens.", "2+2="]
    assert command("generate", done, "--prompt", prompts[0], "--prompt", prompts[1]) == 0
    ours = capsys.readouterr().out
    theirs = ""
    for prompt in prompts:
        ids = tokenizer(prompt + "\nAnswer:", return_tensors="pt")["input_ids"]  # as the task ends a problem
        answer = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        theirs += f"{prompt} {tokenizer.decode(answer, skip_special_tokens=True)}\n"
    assert ours == theirs


def test_generate_puts_a_prompt_as_the_task_does(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The byte tokenizer has no chat template: a system prompt and the prefix stand plainly before the prompt."""
    plain = ["--prompt", "Add the numbers.\n\nQ: 2+2="]
    assert command("generate", done, *plain) == 0
    expected = capsys.readouterr().out.removeprefix(plain[1])
    posed = ["--prompt", "2+2=", "task.system_prompt=Add the numbers.", "task.prompt_prefix='Q: '"]
    assert command("generate", done, *posed) == 0
    assert capsys.readouterr().out == "2+2=" + expected


@pytest.mark.slow
def test_a_run_folder_is_for_one_process_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    folder = runs.run(tmp_path / "run", steps=1)
    before = (folder / "metrics.jsonl").read_bytes()
    with open(folder / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another process is training in" in complaint(capsys, "train", folder, "steps=2")
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert command("train", folder, "steps=2") == 0  # it is free again


@pytest.mark.slow
def test_without_out_runs_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = runs.write(tmp_path / "my_recipe.yaml", steps=1)
    for name in ("my_recipe", "my_recipe-2", "my_recipe-3"):
        assert command("train", recipe) == 0
        assert (tmp_path / "runs" / name / "summary.json").is_file()
        assert yaml.safe_load((tmp_path / "runs" / name / "recipe.yaml").read_text())["out"] == f"runs/{name}"
    assert len(list((tmp_path / "runs").iterdir())) == 3


@pytest.mark.slow
def test_out_resumes_the_same_recipe_and_refuses_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = runs.write(tmp_path / "recipe.yaml", steps=2), f"out={tmp_path / 'run'}"
    assert command("train", recipe, out) == 0
    assert command("train", recipe, out) == 0
    assert f"{tmp_path / 'run'} is finished: all 2 steps of its last stage are done" in capsys.readouterr().out
    said = complaint(capsys, "train", recipe, out, "seed=1")
    assert f"{tmp_path / 'run'} holds a run of another recipe than {recipe}" in said
    assert command("train", tmp_path / "run", "steps=3") == 0
    assert runs.newest(tmp_path / "run").name == "stage-0-step-000003"
    assert "keeps its out=" in complaint(capsys, "train", tmp_path / "run", "out=elsewhere")


@pytest.mark.slow
def test_the_best_model_is_kept(tmp_path: Path) -> None:
    evaluation = {"every": 1, "examples": 8, "keep_best": "reward", "temperature": 1.0}
    changes = {"seed": 3, "optimizer": {"learning_rate": 0.01, "warmup": 1}, "evaluation": evaluation}
    folder = runs.run(tmp_path / "run", **changes)
    evaluations = [r for r in runs.records(folder / "metrics.jsonl") if r["kind"] == "evaluation"]
    best = max(evaluations, key=lambda record: record["reward"])  # the first of the highest
    assert json.loads((folder / "summary.json").read_text())["best"] == {
        "metric": "reward", "value": best["reward"], "stage": "train", "step": best["step"],
    }  # fmt: skip
    assert 0 < best["step"] < 6  # or the test would not tell the best from the first or the last
    reached = runs.run(tmp_path / "shorter", **changes, steps=best["step"])
    ours, theirs = (folder / "best/model.safetensors"), (reached / "final/model.safetensors")
    assert ours.read_bytes() == theirs.read_bytes()
    AutoModelForCausalLM.from_pretrained(folder / "best")


def test_the_best_model_may_be_the_lowest(tmp_path: Path) -> None:
    section = {"every": 1, "examples": 8, "keep_best": "reference_nll", "keep_best_mode": "min"}
    rate = {"learning_rate": 0.05, "warmup": 1}  # the loss goes down, and up again
    folder = runs.run(tmp_path / "run", algorithm="supervised", evaluation=section, optimizer=rate)
    evaluations = [r for r in runs.records(folder / "metrics.jsonl") if r["kind"] == "evaluation"]
    lowest = min(evaluations, key=lambda record: record["reference_nll"])
    best = json.loads((folder / "summary.json").read_text())["best"]
    assert (best["value"], best["step"]) == (lowest["reference_nll"], lowest["step"])
    assert best["value"] < evaluations[0]["reference_nll"]


@pytest.mark.parametrize(
    ("early_stop", "steps"),
    [
        ({"metric": "reward", "target": 0.0}, 0),  # there already
        ({"metric": "length/mean", "target": 1000}, 6),  # out of reach
        ({"metric": "length/mean", "mode": "min", "target": 6.0}, 0),
        ({"metric": "truncated", "mode": "min", "patience": 2}, 2),  # never improves
        ({"metric": "reward", "patience": 6}, 6),
    ],
)
def test_a_stage_ends_early(early_stop: dict[str, Any], steps: int, tmp_path: Path) -> None:
    evaluation = {"every": 1, "examples": 4}
    folder = runs.run(tmp_path / "run", early_stop=early_stop, evaluation=evaluation, optimizer={"learning_rate": 0.0})
    trained = [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert len(trained) == steps
    assert json.loads((folder / "summary.json").read_text())["after"]["step"] == steps


@pytest.mark.slow
def test_a_stage_that_was_stopped_early_goes_on_under_another_rule(tmp_path: Path) -> None:
    folder = runs.run(tmp_path / "run", early_stop={"metric": "reward", "target": 0.0})
    assert runs.newest(folder).name == "stage-0-step-000000"
    assert command("train", folder) == 0 and runs.newest(folder).name == "stage-0-step-000000"
    assert command("train", folder, "early_stop=null") == 0
    assert runs.newest(folder).name == "stage-0-step-000006"


# ---------------------------------------------------------------- eval, generate


def test_eval_repeats_the_last_evaluation_of_the_run(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("eval", done) == 0
    said = capsys.readouterr().out
    assert f"{done}: 8 prompts of test, one answer each (greedy)" in said
    last = [record for record in runs.records(done / "metrics.jsonl") if record["kind"] == "evaluation"][-1]
    for name in ("reward", "length", "regex", "length/mean", "truncated"):
        absent = last[f"{name}/low"] is None  # all answers have the same length
        bounds = r"no interval" if absent else r"(-?[\d.]+), ([\d.]+)"
        shown = re.search(rf"^  {name} +([\d.]+) \[{bounds}\]", said, re.MULTILINE)
        assert shown, said
        keys = (name,) if absent else (name, f"{name}/low", f"{name}/high")
        for text, key in zip(shown.groups(), keys, strict=True):
            assert float(text) == pytest.approx(last[key], abs=0.0006)


def test_eval_takes_overrides_and_recipes(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["evaluation.samples=4", "evaluation.temperature=1", "evaluation.split=validation"]
    assert command("eval", done, *overrides, "evaluation.metrics={words: 1}") == 0
    said = capsys.readouterr().out
    assert "8 prompts of validation, 4 answers each" in said
    assert all(f"  {name} " in said for name in ("regex/pass@1", "regex/pass@2", "regex/pass@4", "words"))
    shown = re.search(r"  reward +([\d.]+)", said)
    assert shown and float(shown[1]) <= 1.5  # length and regex alone: metrics are reported, not added
    assert command("eval", runs.write(tmp_path / "recipe.yaml")) == 0


def test_generate_reads_prompts_from_standard_input(
    done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one two\n2+2=\n"))
    assert command("generate", done) == 0
    piped = capsys.readouterr().out
    assert command("generate", done, "--prompt", "one two", "--prompt", "2+2=") == 0
    assert capsys.readouterr().out == piped and piped.startswith("one two ") and "\n2+2= " in piped
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "there is no prompt: give --prompt TEXT" in complaint(capsys, "generate", done)
    assert "the model reads 128 at most" in complaint(capsys, "generate", done, "--prompt", "x" * 128)


@pytest.mark.slow
def test_generate_uses_the_newest_weights(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was resumed with more steps and interrupted has a checkpoint newer than its final/."""
    from lmgym.training.setup import trained_policy
    from tests.parity.test_resume import Interrupting

    folder = runs.run(tmp_path / "run", steps=1)
    runs.run(folder, Interrupting(at=2), steps=6)
    newest = trained_policy(load_config(folder / "recipe.yaml"), folder).model.state_dict()
    saved = AutoModelForCausalLM.from_pretrained(runs.newest(folder)).state_dict()
    final = AutoModelForCausalLM.from_pretrained(folder / "final").state_dict()
    assert runs.newest(folder).name == "stage-0-step-000003"
    assert all(torch.equal(value, saved[name]) for name, value in newest.items())
    assert not all(torch.equal(value, final[name]) for name, value in newest.items())


# ---------------------------------------------------------------- check


def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> tuple[int, str]:
    status = command("check", runs.write(tmp_path / "recipe.yaml", **changes))
    return status, capsys.readouterr().out


def long_enough(texts: list[str], examples: list[Example]) -> list[float]:
    return [float(len(text)) for text in texts]


@pytest.mark.slow
def test_check_passes_a_good_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # an untrained model ends an answer with chance 1/259 a token: with 600 tokens nearly all of them end
    policy = {**runs.TINY["policy"], "architecture": runs.ARCHITECTURE | {"max_position_embeddings": 1024}}
    sampling, rewards = {"max_new_tokens": 800}, {f"{HERE}:long_enough": 1.0}
    status, said = check(tmp_path, capsys, policy=policy, sampling=sampling, rewards=rewards)
    assert status == 0 and "looks ready to train" in said and "\n!" not in said, said
    assert said.splitlines()[-1].startswith("next: lmgym train ")
    parts = ("parameters", "prompt tokens:", "context 1024", "reference tokens:", "answers cut off", "reward: mean",
             "earned the same: 0%", "memory, estimated", "answers end at: <eos> (2)")  # fmt: skip
    assert all(part in said for part in parts)


@pytest.mark.slow
def test_check_marks_what_would_spoil_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = check(tmp_path, capsys, sampling={"max_new_tokens": 1})
    assert status == 1 and re.search(r"^! answers cut off at max_new_tokens: \d+%", said, re.MULTILINE)
    assert re.search(r"^! a reference has \d tokens, more than sampling\.max_new_tokens \(1\)", said, re.MULTILINE)
    status, said = check(tmp_path, capsys, rewards={"exact_match": 1.0})
    assert status == 1 and re.search(r"^! in all 8 groups every answer earned the same", said, re.MULTILINE)
    status, said = check(tmp_path, capsys, sampling={"max_new_tokens": 100})
    assert status == 1 and re.search(r"^! the longest of 8 prompts leaves room for \d+ new tokens", said, re.MULTILINE)
    assert re.search(r"\d thing\(s\) to look at", said)


def test_check_leaves_nothing_behind_and_takes_stages_and_runs(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check(tmp_path, capsys, stages=[{"name": "warm", "algorithm": "supervised"}, {"name": "rl"}])
    assert os.listdir(tmp_path) == ["recipe.yaml"]
    before = sorted(path.name for path in done.rglob("*"))
    command("check", done)
    assert "stage train: GRPO on arithmetic" in capsys.readouterr().out
    assert sorted(path.name for path in done.rglob("*")) == before
