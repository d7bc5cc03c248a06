"""What newcomers copy works: the example, the code blocks of the README and the docs, the links between the pages.

A block is tested where a comment names its file, and overrides for a tiny recipe: <!-- snippet: my.py key=value -->
"""

import inspect
import json
import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lmgym import check_reward, check_task, load_config
from lmgym.cli.main import main
from lmgym.core import registry
from lmgym.core.parts import Part, part_name
from lmgym.logs.console import Console
from lmgym.training.loop import train, train_stage
from tests import rounding, runs

PAGES = [
    runs.ROOT / "README.md",
    runs.ROOT / "CONTRIBUTING.md",
    runs.ROOT / "SECURITY.md",
    *sorted((runs.ROOT / "docs").rglob("*.md")),
]
SNIPPET = re.compile(r"<!-- snippet: (\S+) ?([^>]*?) ?-->\n```\w+\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


class Snippet(NamedTuple):
    file: str
    override: str
    text: str


SNIPPETS = {found[0]: Snippet(*found) for page in PAGES for found in SNIPPET.findall(page.read_text(encoding="utf-8"))}
PLUGINS = [name for name in SNIPPETS if name.endswith(".py") and name != "my_loop.py"]


@pytest.fixture(autouse=True)
def forget_plugins() -> Iterator[None]:
    """What a snippet registers lives for one test."""
    yield
    for things in registry._registered.values():
        for name in [n for n, thing in things.items() if thing.__module__.startswith("lmgym_plugin_")]:
            del things[name]
    for module in [name for name in sys.modules if name.startswith("lmgym_plugin_")]:
        del sys.modules[module]


def write(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text(SNIPPETS[name].text, encoding="utf-8")
    return path


def test_the_docs_show_an_algorithm_a_reward_a_task_and_the_loop() -> None:
    assert {"my_recipe.yaml", "my_reward.py", "my_task.py", "my_algorithm.py", "my_loop.py"} <= SNIPPETS.keys()
    for name in ("my_reward.py", "my_task.py", "my_algorithm.py"):
        assert len(SNIPPETS[name].text.splitlines()) < 20


@pytest.mark.parametrize("name", PLUGINS)
def test_a_snippet_trains_two_steps_as_a_plugin(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = write(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)  # a callback is named by its module
    recipe = runs.write(tmp_path / "recipe.yaml", steps=2)
    overrides = [f"plugins=[{plugin}]", f"out={tmp_path / 'run'}", SNIPPETS[name].override]
    train(load_config(recipe, overrides), Console(quiet=True))
    steps = [record["step"] for record in runs.records(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert steps == [0, 1]


@pytest.mark.slow
def test_the_replay_snippet_resumes_with_its_buffer(tmp_path: Path) -> None:
    """The longest state that a snippet has: episodes, to JSON and back."""
    plugin = write(tmp_path, "paper_replay.py")
    override = SNIPPETS["paper_replay.py"].override
    for folder, parts in (("whole", [2]), ("halves", [1, 2])):
        for steps in parts:
            recipe = runs.write(tmp_path / "recipe.yaml", steps=steps, out=str(tmp_path / folder))
            train(load_config(recipe, [f"plugins=[{plugin}]", override]), Console(quiet=True))
    assert len(runs.algorithm_state(tmp_path / "whole")["buffer"]) == 2
    newest = [runs.newest(tmp_path / folder) for folder in ("whole", "halves")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (newest[0] / file).read_bytes() == (newest[1] / file).read_bytes()
    assert runs.algorithm_state(tmp_path / "whole") == runs.algorithm_state(tmp_path / "halves")


def test_the_reward_and_the_task_of_the_docs_keep_their_contracts(tmp_path: Path) -> None:
    for name in ("my_reward.py", "my_task.py"):
        registry.load_plugin(str(write(tmp_path, name)))
    check_reward("mentions")
    check_task("backwards")


def test_the_recipe_of_the_docs_and_its_overrides_are_valid(tmp_path: Path) -> None:
    recipe = write(tmp_path, "my_recipe.yaml")
    overrides = ["seed=1", "stages.rl.steps=50", "policy.device=cpu", "rewards={final_answer: 1.0}"]
    config = load_config(recipe, overrides)
    assert [(stage.name, stage.steps) for stage in config.stages] == [("warm_start", 100), ("rl", 50)]


def test_the_short_recipe_of_the_readme_is_valid(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "short_recipe.yaml"))
    assert (config.stages[0].task["name"], config.stages[0].steps) == ("gsm8k", 200)


@pytest.mark.slow
def test_the_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, with a tiny recipe under the name that the README uses."""
    lines = re.findall(r"^    lmgym ([^#\n]*)", PAGES[0].read_text(encoding="utf-8"), re.M)
    assert [line.split()[0] for line in lines] == ["check", "train", "eval", "train", "doctor", "plot"]
    runs.write(tmp_path / "my_recipe.yaml", steps=2)
    monkeypatch.chdir(tmp_path)
    for line in lines:
        status = main(re.sub(r"steps=\d+", "steps=3", line).split())
        assert status == (1 if line.startswith("check") else 0)  # check complains that answers of 6 tokens are cut off
    assert runs.newest(tmp_path / "runs" / "my_recipe").name == "stage-0-step-000003"
    assert len(list((tmp_path / "runs" / "my_recipe" / "evaluations").iterdir())) == 1


def test_the_loop_of_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It leaves the folder that `train` leaves; a second start says that the run is finished, and changes nothing."""
    recipe = runs.write(tmp_path / "gsm8k_grpo", steps=2)  # in place of the packaged recipe of this name
    train(load_config(recipe, [f"out={tmp_path / 'trained'}"]), Console(quiet=True))
    monkeypatch.chdir(tmp_path)
    for sentence in (
        "step 2/2",
        "runs/mine is finished: all 2 steps of its last stage are done. For more, raise steps",
    ):
        runpy.run_path(str(write(tmp_path, "my_loop.py")))
        assert sentence in capsys.readouterr().out
        runs.assert_equal_runs(tmp_path / "runs" / "mine", tmp_path / "trained")


def test_the_loop_of_the_docs_has_the_lines_of_the_loop() -> None:
    shown = [line.split("#")[0].strip() for line in SNIPPETS["my_loop.py"].text.splitlines()]
    for line in inspect.getsource(train_stage).split('"""')[2].splitlines():
        assert line.strip() in [*shown, "run = stage.run"]
    for line in inspect.getsource(train).split('"""')[2].splitlines():
        known = [*shown, "with start(config, console, ranks) as run:", "train_stage(stage)", "return run.folder"]
        assert line.strip() in known


@pytest.mark.slow
def test_the_minimal_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["minimal.py", "--steps", "2", "--warm-start", "2"])
    runpy.run_path(str(runs.ROOT / "examples" / "minimal.py"), run_name="__main__")
    assert re.search(r"^step +2  reward 0\.\d\d  held-out 0\.\d\d  entropy \d", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_the_example_of_a_loop_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The third step wins no game, so its update computes no row and has no clipped share."""
    monkeypatch.setattr(sys, "argv", ["own_loop.py", "--steps", "3"])
    runpy.run_path(str(runs.ROOT / "examples" / "own_loop.py"), run_name="__main__")
    assert re.fullmatch(r"step +3  found 0\.00 .* clipped 0\.0%", capsys.readouterr().out.strip())


def test_the_minimal_example_and_lmgym_agree_on_the_loss() -> None:
    """The same numbers through both: advantages, loss, clipped share."""
    import torch

    from lmgym.functional import advantages as credit
    from lmgym.functional.losses import clipped_surrogate

    minimal = runpy.run_path(str(runs.ROOT / "examples" / "minimal.py"))
    generator = torch.Generator().manual_seed(0)
    count, group = 4 * minimal["GROUP"], minimal["GROUP"]
    score = torch.rand(count, generator=generator)
    old = -torch.rand(count, 5, generator=generator)
    new = old + 0.4 * torch.randn(count, 5, generator=generator)
    mask = torch.rand(count, 5, generator=generator) < 0.7
    ours = credit.group_centred(score, torch.arange(count), torch.arange(count) // group)
    loose = rounding.rounding(2 * group)  # a mean of a group's scores, which are below 1
    assert torch.allclose(minimal["group_advantages"](score), ours, rtol=0, atol=loose)
    loss, clipped = minimal["policy_loss"](new, old, ours, mask)
    terms = clipped_surrogate((new - old).exp(), ours[:, None].expand(count, 5), 0.2, 0.28)
    loose = rounding.rounding(int(mask.sum()), float(terms.abs().max()))
    assert torch.allclose(loss, terms[mask].mean(), rtol=0, atol=loose)
    assert 0.1 < clipped < 0.9


@pytest.mark.parametrize("baseline", ["none", "ema", "scst"])  # test_recipes.py trains it with its own
def test_the_nanorl_recipe_trains_with_each_baseline(baseline: str, tmp_path: Path) -> None:
    architecture = runs.ARCHITECTURE | {"max_position_embeddings": 512}
    small = [
        f"out={tmp_path / 'run'}",
        f"policy={{model: 'builtin:tiny', architecture: {architecture}}}",
        "sampling.max_new_tokens=4",
        "evaluation.samples=1",
        "prompts_per_step=2",
        "steps=2",
        "threads=1",
        f"algorithm.baseline={baseline}",
    ]
    assert main(["train", str(runs.ROOT / "lmgym" / "recipes" / "nanorl_reinforce.yaml"), *small]) == 0
    assert runs.state(tmp_path / "run")["step"] == 2


def test_the_nanorl_recipes_show_the_bare_prompt_to_a_model_with_a_chat_template() -> None:
    from lmgym.models.builtin import byte_tokenizer
    from lmgym.text.chat import prompt_ids

    tokenizer = byte_tokenizer()
    bare = prompt_ids(tokenizer, "Write.\n\n")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    assert prompt_ids(tokenizer, "Write.\n\n") != bare
    for name in ("nanorl_reinforce", "nanorl_rloo", "nanorl_actorcritic"):
        tokenizer.chat_template = load_config(runs.ROOT / "lmgym" / "recipes" / f"{name}.yaml").policy.template
        assert prompt_ids(tokenizer, "Write.\n\n") == bare


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(runs.ROOT).as_posix())
def test_links_between_the_pages_lead_somewhere(page: Path) -> None:
    gone = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert not gone


@pytest.mark.slow
def test_the_glossary_has_every_metric_and_no_other(tmp_path: Path) -> None:
    algorithms = [
        {"name": "supervised"},
        {"name": "grpo", "group_size": 4, "epochs": 2, "kl_coefficient": 0.1},
        {"name": "ppo", "kl_coefficient": 0.1, "entropy_coefficient": 0.1},
        {"name": "trpo"},
        {"name": "nlpo", "min_tokens_to_keep": 5},
        {"name": "distill", "teacher": "builtin:tiny"},
        {"name": "gkd", "teacher": "builtin:tiny"},
        {"name": "reinforce_stable"},
        {"name": "sapo", "correction": {"name": "truncated", "mismatch_bound": 2.0}},
        {"name": "top_entropy", "group_size": 4, "minibatches": 1},
        {"name": "replay", "group_size": 4},
    ]
    steps = {"replay": 3}  # in the first there is nothing to replay
    stages: list[dict[str, Any]] = [
        {"name": str(algorithm["name"]), "algorithm": algorithm, "steps": steps.get(str(algorithm["name"]), 1)}
        for algorithm in algorithms
    ]
    stages[1]["curriculum"] = {}
    env = {"name": "tests.quiz:Unreliable", "workers": 1}
    stages.append({"name": "turns", "algorithm": "rloo", "env": env, "prompts_per_step": 8, "steps": 1})
    given = ("dpo", "kto", "process_reward_model")  # the last makes a reward model of the policy
    stages += [{"name": name, "algorithm": name, "task": runs.GIVEN[name], "steps": 1} for name in given]
    evaluation: dict[str, Any] = {"every": 0, "examples": 4, "samples": 2, "temperature": 1.0}
    evaluation |= {"metrics": {"distinct_1": {"pool": False}, "final_answer": {}}, "best_of": "length"}
    policy = {**runs.TINY["policy"], "memory_gib": 64}
    folder = runs.run(tmp_path / "run", stages=stages, steps=None, algorithm=None, evaluation=evaluation, policy=policy)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seen = {key.removesuffix("/low").removesuffix("/high") for line in lines for key in line}
    seen |= {"truncated/context"}  # of environments that fill the context: tests/property/test_environments.py
    seen |= {"changed", "missing"}  # of a run that is resumed elsewhere: tests/contract/test_resume_differences.py
    seen |= {"spans/single", "spans/longer", "spans/none"}  # of such a teacher: tests/golden/test_other_tokenizer.py
    seen |= {"unjudged", "unjudged/NAME"}  # of rewards that give None: tests/contract/test_unjudged_answers.py
    seen |= {
        "watch/REWARD/answers",
        "watch/REWARD/trick/NAME",
        "watch/REWARD/feature/NAME",
        "seconds/watch",
    }  # audit.md
    seen |= {"weights/seen"}  # of passes in bf16: tests/parity/test_rounding.py
    seen |= {"self_certainty"}  # of that credit: tests/golden/test_self_certainty.py
    seen |= {"continued", "version_lag/least", "version_lag/most"}  # of answers in chunks: tests/parity/test_chunks.py
    page = (runs.ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \|", page, re.MULTILINE)
    assert {key for row in rows for key in re.findall(r"`([^`]+)`", row)} == {general(key) for key in seen}


def general(key: str) -> str:
    """A key as the glossary writes it; the run's rewards are length and regex, and a metric is distinct_1."""
    key = re.sub(r"^loss/(?!value$|entropy$|divergence$).*", "loss/NAME", key)
    return re.sub(
        r"^(reward/|environment/)?(?:length|regex|distinct_1|final_answer)(?:(/(?:pass|maj|best)@)\d)?(/corpus)?$",
        lambda m: f"{m[1] or ''}NAME{m[2] + 'K' if m[2] else ''}{m[3] or ''}",
        key,
    )


FAMILIES = {  # pages that hold several algorithms
    "importance": ("icepop",),
    "trust_regions": ("gspo_token", "gmpo", "luspo", "vespo", "ce_gppo", "ipo_mask"),
    "group_advantages": ("maxrl", "gpg", "opo", "otb", "pass_at_k", "gfpo", "gigpo", "hgpo"),
    "token_selection": ("top_entropy", "clip_cov", "kl_cov"),
    "reinforce": ("remax",),
}
PAGE_OF = {name: page for page, names in FAMILIES.items() for name in names}


def documented_defaults(name: str) -> dict[str, str]:
    """The defaults in the tables of an algorithm's page; one that says so has those of its base's page too."""
    page = (runs.ROOT / "docs" / "algorithms" / f"{name}.md").read_text(encoding="utf-8")
    base = re.search(r"All others are \[.+\]\((\w+)\.md\), with its defaults", page)
    found = documented_defaults(base[1]) if base else {}
    for keys, default in re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", page, re.MULTILINE):
        defaults = default.replace("`", "").split(",")
        names = re.findall(r"`(\w+)`", keys)
        for place, key in enumerate(names):
            found[key] = defaults[place if len(defaults) == len(names) else 0].strip().removesuffix(".0")
    return found


@pytest.mark.parametrize("name", registry.BUILTIN["algorithm"])
def test_the_page_of_an_algorithm_has_every_hyperparameter(name: str) -> None:
    page = PAGE_OF.get(name, name)
    defaults = documented_defaults(page)
    if page != name:
        assert f"`{name}`" in (runs.ROOT / "docs" / "algorithms" / f"{page}.md").read_text(encoding="utf-8")
    for field in fields(registry.get("algorithm", name)):
        if field.init:
            default = str(field.default).lower().removesuffix(".0")
            default = part_name(field.default) if isinstance(field.default, Part) else default
            assert defaults[field.name] == (default if default.strip() else json.dumps(default)), field.name  # a "\n"
