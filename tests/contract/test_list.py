"""What `lmgym list` says of needs is so: what is marked as running here runs, and what is not says how to mend it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmgym.cli.main import main
from lmgym.core import availability, registry
from lmgym.core.availability import NEEDS, Availability, availability_of
from lmgym.core.errors import LmgymError
from lmgym.types import Example

ROWS = {kind: {row["name"]: row for row in registry.describe(kind)} for kind in registry.BUILTIN}
EXAMPLE = Example(
    "a/0", "?", ("1",), {"answer": "1", "concepts": ["dog"], "table": [["a", "b", "c"]], "overlap_subset": True}
)


@pytest.fixture(autouse=True)
def _look_anew() -> Any:
    availability._installed.cache_clear()
    yield
    availability._installed.cache_clear()


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, rows in registry.BUILTIN.items() for name in rows])
def test_every_need_is_known(kind: str, name: str) -> None:
    for need in filter(None, registry.BUILTIN[kind][name].needs.split(", ")):
        assert need in NEEDS


@pytest.mark.parametrize("name", [name for name, row in ROWS["reward"].items() if row["runs"] == "yes"])
def test_a_reward_that_runs_here_finds_its_libraries(name: str) -> None:
    """Those with arguments of their own, or for episodes, have their libraries looked for all the same."""
    function = registry.get("reward", name)
    try:
        getattr(function, "check", lambda examples: None)([EXAMPLE])
        if not getattr(function, "takes_episodes", False) and not getattr(function, "pays_tokens", False):
            function(["1"], [EXAMPLE])
    except LmgymError as error:
        assert not re.search("pip install|needs the library|downloader", str(error)), error
    except TypeError as error:
        assert "required" in str(error)


def test_metrics_are_rewards(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("metrics", "metric", "rewards"):
        assert main(["list", word, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == registry.describe("reward")
    assert main(["list", "metrics"]) == 0
    said = capsys.readouterr().out
    assert "rewards, which are metrics too" in said and said.startswith("+ runs here")
    assert re.search(r"^\+  chrf +F-score", said, re.MULTILINE)
    assert re.search(r"^~  bleurt .*\(needs a model: model=\)$", said, re.MULTILINE)


def test_a_missing_package_is_named_and_its_reward_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sacrebleu")
    assert availability_of("lmgym[metrics]") == Availability("yes")
    monkeypatch.setitem(sys.modules, "sacrebleu", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    availability._installed.cache_clear()
    assert availability_of("lmgym[metrics]") == Availability("no", "pip install 'lmgym[metrics]'")
    with pytest.raises(LmgymError, match=re.escape("pip install 'lmgym[metrics]'")):
        registry.get("reward", "sacre_bleu").check([EXAMPLE])


@pytest.mark.slow
@pytest.mark.processes
def test_wordnet_is_looked_for_where_nltk_does(tmp_path: Path) -> None:
    pytest.importorskip("nltk")
    both = "[nltk.data.path, list(map(str, n.nltk_folders()))]"
    code = f"import json, nltk.data, lmgym.core.availability as n; print(json.dumps({both}))"
    environment = {**os.environ, "NLTK_DATA": f"{tmp_path / 'a'}{os.pathsep}{tmp_path / 'b'}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    theirs, ours = json.loads(done.stdout)
    assert [folder for folder in theirs if folder not in ours] == []


def test_data_of_nltk_and_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "nltk_folders", lambda: [tmp_path / "data"])
    assert availability_of("WordNet for NLTK") == Availability("no", "python -m nltk.downloader wordnet")
    (tmp_path / "data" / "corpora").mkdir(parents=True)
    (tmp_path / "data" / "corpora" / "wordnet.zip").touch()
    assert availability_of("WordNet for NLTK") == Availability("yes")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert availability_of("Java, a model") == Availability("no", "install a Java runtime")
    (tmp_path / "java").write_text("#!/bin/sh\n")
    (tmp_path / "java").chmod(0o755)
    assert availability_of("Java, a model") == Availability("given", "model=")


def test_a_task_of_the_hub_says_whether_it_can_ask_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert availability_of("path= or lmgym[data]").how == "path=; for the Hub: pip install 'lmgym[data]'"
    assert availability_of("") == Availability("yes")
    assert availability_of("a friend").runs == "given"  # a plug-in's own words


@pytest.mark.parametrize(
    ("kind", "name", "key", "default"),
    [
        ("task", "jsonl", "prompt", "prompt"),
        ("task", "jsonl", "validation", 0.0),
        ("algorithm", "grpo", "group_size", 8),
        ("algorithm", "dapo", "group_size", 16),  # a preset shows its own values
        ("credit", "leave_one_out", "scale", "none"),
        ("env", "gymnasium", "agent", "plain"),
        ("env", "gymnasium", "seconds", 60.0),  # what any environment may have
        ("reward", "length", "target", 100),
    ],
)
def test_a_name_shows_its_keys(
    kind: str, name: str, key: str, default: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", kind, name, "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)
    assert keys[key].get("default") == default
    assert main(["list", kind + "s", name]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{kind} {name}: ")
    assert re.findall(r"^  (\w+)  ", said, re.MULTILINE) == list(keys), "each key begins a line"
    texts = [schema["description"] for schema in keys.values() if "description" in schema]
    assert texts and all(text in said for text in texts)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in registry.BUILTIN for name in registry.BUILTIN[kind]]
)
def test_every_name_can_be_shown(kind: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if availability_of(registry.BUILTIN[kind][name].needs).runs != "no":
        assert main(["list", kind, name]) == 0
        assert capsys.readouterr().out.startswith(f"{kind} {name}: ")


def test_an_unknown_name_of_a_kind_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "task", "jsonll"]) == 1
    assert "did you mean 'jsonl'?" in capsys.readouterr().err
