"""The page as one file: its script, its limit, and a data block that cannot end early. (test_page.py opens it.)"""

import json
import re
from pathlib import Path

import pytest

from lmgym.cli.main import main
from lmgym.core.errors import LmgymError
from lmgym.viewer.addresses import json_bytes, tree_at
from lmgym.viewer.runs import RunRecords, open_runs
from lmgym.viewer.server import page_files
from lmgym.viewer.single_file import bundle, by_halves, write_file
from tests.viewer.sample_runs import HOSTILE, sample_run


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
    assert {"runs", "runs/0/curves", "runs/0/evaluations", "runs/0/prompts/validation/sums/validation/0"} < set(held)
    for address, tree in held.items():
        assert tree == json.loads(json_bytes(tree_at(runs, address)))


def test_a_limit_leaves_steps_out_and_says_so(runs: list[RunRecords], tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    write_file(runs, path, megabytes=5)
    most = 0.8 * path.stat().st_size / 1e6
    said = write_file(runs, path, megabytes=most)
    held = data_of(path)
    count = int(re.match(r"Of 6 steps (\d+) are in it, so that it stays below", said[1])[1])
    assert 2 <= count < 6 and path.stat().st_size <= most * 1e6
    steps = {int(address.split("/")[-1]) for address in held["data"] if "/steps/" in address}
    assert len(steps) == count and {0, 5} <= steps and said[1] in held["left_out"]
    with pytest.raises(LmgymError, match="raise --limit"):
        write_file(runs, path, megabytes=0.01)


def test_steps_between_come_in_ever_finer_distances() -> None:
    assert by_halves(9) == [8, 0, 4, 2, 6, 1, 3, 5, 7] and by_halves(1) == [0] and by_halves(0) == []
    assert all(sorted(by_halves(count)) == list(range(count)) for count in range(70))


def test_the_command_writes_the_file_and_says_what_it_holds(
    runs: list[RunRecords], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.html"
    assert main(["view", str(runs[0].folder), "--html", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(f"{path}: ") and path.is_file()
