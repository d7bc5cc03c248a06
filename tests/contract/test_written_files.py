"""What is written into a folder of someone else's goes through no link that lies there."""

import os
import secrets
from pathlib import Path

import pytest

from lmgym.core.errors import LmgymError
from lmgym.core.files import HIDDEN, replacing
from lmgym.logs.plots.figures import figure_of
from lmgym.logs.rewind import rewind
from lmgym.training.checkpoints.checkpoint import write_text
from lmgym.training.run import lock_folder
from lmgym.viewer.notes import NOTES, write_note
from lmgym.viewer.runs import RunRecords
from lmgym.viewer.single_file import write_file
from tests.viewer.sample_runs import sample_run

ANSWER = {"kind": "train", "stage": 0, "step": 0, "split": None, "index": 0, "example": {}, "texts": ["4"], "score": 1}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file of the user's, outside of the run."""
    path = tmp_path / "mine"
    path.write_text("mine")
    return path


def picture(out: Path) -> None:
    with figure_of(out, 4, 3):
        pass


WRITERS = {
    NOTES: lambda run: write_note(run, ANSWER, "right", []),
    "page.html": lambda run: write_file([RunRecords(run, "run")], run / "page.html", 20),
    "doctor.png": lambda run: picture(run / "doctor.png"),
    "summary.json": lambda run: write_text(run / "summary.json", "{}"),
    "metrics.jsonl": lambda run: rewind(run, 0, 1),
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_writer_follows_a_link_to_a_file_of_the_users(name: str, tmp_path: Path, mine: Path) -> None:
    run = sample_run(tmp_path / "run", steps=2)
    for hidden in (f".writing-{name}", f".saving-{name}", f"{name}.tmp"):
        (run / hidden).symlink_to(mine)
    if name in ("page.html", "doctor.png", "summary.json"):
        (run / name).symlink_to(mine)
    WRITERS[name](run)
    assert mine.read_text() == "mine"
    assert (run / name).stat().st_size and not (run / name).is_symlink()
    assert not [path for path in run.glob(f"{HIDDEN}*") if not path.is_symlink()]


def test_a_guessed_name_is_refused(tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda count: "0" * count)
    (tmp_path / f"{HIDDEN}{'0' * 8}").symlink_to(mine)
    with pytest.raises(FileExistsError), replacing(tmp_path / "new") as file:
        file.write(b"theirs")
    assert mine.read_text() == "mine" and not (tmp_path / "new").exists()


def test_hidden_names_differ_and_what_fails_leaves_nothing(tmp_path: Path) -> None:
    names = set()
    (tmp_path / "file").write_text("old")
    for _ in range(3):
        with pytest.raises(ValueError, match="half"), replacing(tmp_path / "file") as file:
            names.update(os.listdir(tmp_path))
            file.write(b"ne")
            raise ValueError("half")
    assert len(names) == 4 and os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


def test_a_note_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    run = sample_run(tmp_path / "run", steps=1)
    (run / NOTES).mkdir()
    with pytest.raises(LmgymError, match=f"{NOTES}.*"):
        write_note(run, ANSWER, "right", [])


def test_a_lock_empties_no_file_that_a_link_leads_to(tmp_path: Path) -> None:
    mine, folder = tmp_path / "mine", tmp_path / "run"
    mine.write_text("kept")
    folder.mkdir()
    (folder / ".lock").symlink_to(mine)
    lock_folder(folder, print).close()
    assert mine.read_text() == "kept"
