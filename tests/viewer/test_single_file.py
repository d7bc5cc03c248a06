"""The page as one file: its script, its limit, and a data block that cannot end early. (test_page.py opens it.)"""

import json
import os
import re
from pathlib import Path

import pytest

from lmgym.cli.main import main
from lmgym.core.errors import LmgymError
from lmgym.logs.formatting import json_bytes
from lmgym.viewer.addresses import tree_at
from lmgym.viewer.runs import RunRecords, open_runs
from lmgym.viewer.server import page_files
from lmgym.viewer.single_file import bundle, by_halves, write_file
from tests.viewer.sample_runs import HOSTILE, add_step, byte_tokenizer, sample_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecords]:
    return open_runs(
        [sample_run(tmp_path_factory.mktemp("runs") / "sample", steps=6, groups=2, texts=[HOSTILE, "</script>42<!--"])]
    )


def data_of(path: Path) -> dict[str, object]:
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(block)


def test_the_modules_make_one_script_of_different_names() -> None:
    files = page_files()
    script = bundle(files)
    names = re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names)) > 100
    assert "import " not in re.sub(r"//.*", "", script) and "\nexport " not in script and "</script" not in script
    imported = {*re.findall(r'"\./([\w-]+\.js)"', str(files)), "main.js"}
    assert {name for name in files if name.endswith(".js")} == imported


def test_the_page_makes_no_html_of_texts_and_names_no_other_site() -> None:
    for name, content in page_files().items():
        text = re.sub(r"http://www\.w3\.org/(2000/svg|1998/Math/MathML)", "", content.decode())
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), name
        assert not re.search(r"https?://|@import|url\(", text), name


def test_the_file_holds_what_lies_at_each_address(runs: list[RunRecords], tmp_path: Path) -> None:
    said = write_file(runs, tmp_path / "a.html", megabytes=5)
    held = data_of(tmp_path / "a.html")["data"]
    assert said[1].startswith("All 6 steps are in it") and "prompts, answers and data" in said[2]
    assert "paths" in said[2] and "your notes" in said[2]
    assert {"runs", "runs/0/curves", "runs/0/evaluations", "runs/0/prompts/validation/sums/validation/0"} < set(held)
    assert held.pop("runs")[0]["folder"] == "" and held.pop("runs/0/overview")["recipe"] == ""
    for address, tree in held.items():
        assert tree == json.loads(json_bytes(tree_at(runs, address)))


def test_a_limit_leaves_groups_and_then_steps_out_and_says_so(runs: list[RunRecords], tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    write_file(runs, path, megabytes=5)
    whole, least = path.stat().st_size, sum(map(len, page_files().values()))
    for share, few in ((0.95, False), (0.4, True)):
        most = (least + share * (whole - least)) / 1e6
        said = write_file(runs, path, megabytes=most)
        held = data_of(path)
        steps, complete = map(
            int, re.match(r"Of 6 steps (\d) are in it, (\d) of them with all groups", said[1]).groups()
        )
        assert path.stat().st_size <= most * 1e6 and said[1] in held["left_out"] and complete <= steps
        found = {int(address.split("/")[-1]) for address in held["data"] if "/steps/" in address}
        assert len(found) == steps and {0, 5} <= found and (steps < 6) == few and complete < 6
        assert {5, 0} <= {int(address.split("/")[5]) for address in held["data"] if "/answers/train/" in address}
    with pytest.raises(LmgymError, match="raise --limit"):
        write_file(runs, path, megabytes=0.01)


def test_a_step_that_is_too_large_keeps_no_other_out(tmp_path: Path) -> None:
    folder = sample_run(tmp_path / "run", steps=4, groups=1)
    add_step(folder, byte_tokenizer(), 4, groups=1, texts=["42" * 4000, "41"])  # the newest one is asked for first
    said = write_file(open_runs([folder]), tmp_path / "a.html", megabytes=0.4)
    assert said[1].startswith("Of 5 steps 4 are in it, 4 of them with all groups that were kept, so that it stays")


@pytest.mark.slow
def test_pairs_of_many_runs_are_there_once_and_within_a_share(tmp_path: Path) -> None:
    folders = [sample_run(tmp_path / f"run-{number}", steps=1, groups=1, seed=number) for number in range(12)]
    said = write_file(open_runs(folders), tmp_path / "a.html", megabytes=5)
    pairs = [address for address in data_of(tmp_path / "a.html")["data"] if address.startswith("pairs/")]
    assert len(pairs) == 66 and all(int(one.split("/")[1]) < int(one.split("/")[2]) for one in pairs)
    assert "pairs" not in said[1]
    said = write_file(open_runs(folders), tmp_path / "a.html", megabytes=0.5)
    pairs = [address for address in data_of(tmp_path / "a.html")["data"] if address.startswith("pairs/")]
    assert said[1].endswith(f"Of 66 pairs of runs {len(pairs)} are in it.") and 0 < len(pairs) < 66


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("metrics.jsonl", '{"kind": "train", "stage": 0, "step": Infinity, "reward": 1}'),
        ("metrics.jsonl", '{"kind": "train", "stage": 0, "step": ' + "9" * 5000 + "}"),
        ("metrics.jsonl", '{"kind": "resume", "stage": 0, "step": 1, "changed": 3}'),
        ("rollouts.jsonl", '{"kind": "train", "stage": 0, "stage_name": "rl", "step": ' + "9" * 5000 + "}"),
        ("rollouts.jsonl", '{"kind": "evaluation", "stage": 0, "stage_name": "rl", "step": 0, "turns": 3}'),
        ("rollouts.jsonl", '{"kind": "evaluation", "stage": 0, "stage_name": "rl", "step": 0, "index": 0, "group": 0, '
                           '"turns": [{"prompt_ids": [99999999999], "action_ids": [1]}]}'),
        ("rollouts.jsonl", "[[1]]"),
        ("timings.jsonl", '{"kind": "train", "stage": 0, "stage_name": "rl", "step": 3, "sampling": ["a", {}]}'),
        ("timings.jsonl", '{"kind": "train", "stage": 0, "stage_name": "rl", "step": 3, "rewards": [1]}'),
    ],
)  # fmt: skip
def test_a_damaged_record_is_left_out_and_named_and_the_rest_is_there(tmp_path: Path, name: str, line: str) -> None:
    folder = sample_run(tmp_path / "run", steps=5, groups=1)
    with (folder / name).open("a") as file:
        file.write(line + "\n")
    runs = open_runs([folder])
    said = write_file(runs, tmp_path / "a.html", megabytes=5)
    assert said[1].startswith("All 5 steps are in it")
    for step in range(5):
        assert tree_at(runs, f"runs/0/steps/0/{step}")["columns"]["score"]
    tree_at(runs, "runs/0/evaluations")
    tree_at(runs, "runs/0/curves")  # reads nothing of rollouts.jsonl; above it was read
    assert [one for one in tree_at(runs, "runs/0/curves")["problems"] if one.startswith(name)]


@pytest.mark.parametrize("name", ["recipe.yaml", "timings.jsonl", "rollouts.jsonl", "traces/stage-0-step-000003.zip"])
@pytest.mark.parametrize("kind", ["loop", "pipe", "outside"])
def test_a_file_that_is_none_is_left_out(tmp_path: Path, name: str, kind: str) -> None:
    folder = sample_run(tmp_path / "run", steps=5, groups=1)
    path = folder / name
    path.unlink(missing_ok=True)
    (tmp_path / "secret").write_text('{"policy": {"model": "secret"}}')
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if kind == "loop" else tmp_path / "secret")
    if name in ("timings.jsonl", "rollouts.jsonl") and kind != "pipe":  # refused as a whole
        with pytest.raises(LmgymError, match="is a link that leads"):
            open_runs([folder])
        return
    said = write_file(open_runs([folder]), tmp_path / "a.html", megabytes=5)
    assert "secret" not in (tmp_path / "a.html").read_text()
    assert said[1].startswith("All 5 steps are in it")  # of a step without a trace, what rollouts.jsonl has


def test_steps_between_come_in_ever_finer_distances() -> None:
    assert by_halves(9) == [8, 0, 4, 2, 6, 1, 3, 5, 7] and by_halves(1) == [0] and by_halves(0) == []
    assert all(sorted(by_halves(count)) == list(range(count)) for count in range(70))


def test_the_command_writes_the_file_and_says_what_it_holds(
    runs: list[RunRecords], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.html"
    assert main(["view", str(runs[0].folder), "--html", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(f"{path}: ") and path.is_file()
