"""The wheel and the source archive hold what they should, and an installed wheel trains a recipe that comes inside."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lmgym import __version__
from tests import runs
from tests.contract.test_packaged_recipes import SMALL

pytestmark = [pytest.mark.processes, pytest.mark.slow]

BUILD = """
from setuptools import build_meta
build_meta.build_wheel("../dist")
build_meta.build_sdist("../dist")
"""
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt")
PROJECT = tomllib.loads((runs.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
STEM = f"lmgym-{__version__}"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built without network from a copy (the build writes beside its sources)."""
    pytest.importorskip("setuptools", "77")
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    shutil.copytree(runs.ROOT / "lmgym", source / "lmgym", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*SOURCES, "MANIFEST.in"):
        shutil.copy(runs.ROOT / name, source)
    (source / "tests").mkdir()
    (source / "tests" / "test_nothing.py").touch()
    (folder / "dist").mkdir()
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, check=True, capture_output=True)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"{STEM}-py3-none-any.whl"


def test_the_wheel_holds_the_package_whole_and_nothing_else(wheel: Path) -> None:
    files = {path for path in (runs.ROOT / "lmgym").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    wanted = {str(path.relative_to(runs.ROOT)) for path in files}
    assert {"lmgym/py.typed", "lmgym/recipes/quickstart.yaml", "lmgym/models/sums.safetensors"} <= wanted
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.startswith(f"{STEM}.dist-info/")}
    assert held == wanted


def test_the_metadata_says_what_pyproject_says(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata: Message = Parser().parsestr(archive.read(f"{STEM}.dist-info/METADATA").decode())
        commands = archive.read(f"{STEM}.dist-info/entry_points.txt").decode()
        licence = archive.read(f"{STEM}.dist-info/licenses/LICENSE")
    assert (metadata["Name"], metadata["Version"]) == ("lmgym", __version__)
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", PROJECT["requires-python"])
    assert licence == (runs.ROOT / "LICENSE").read_bytes()
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert set(map(Requirement, needed)) == set(map(Requirement, PROJECT["dependencies"]))
    assert commands.split("\n")[:2] == ["[console_scripts]", "lmgym = lmgym.cli.main:main"]
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_source_archive_builds_without_tests(dist: Path) -> None:
    with tarfile.open(dist / f"{STEM}.tar.gz") as archive:
        held = {name.removeprefix(f"{STEM}/") for name in archive.getnames()}
    assert {*SOURCES, "lmgym/py.typed", "lmgym/recipes/quickstart.yaml"} <= held
    assert not [name for name in held if name.startswith(("tests", "docs", "benchmarks", "shared"))]


def test_an_installed_wheel_trains_a_recipe_that_comes_inside(wheel: Path, tmp_path: Path) -> None:
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(install, check=True, capture_output=True)
    environment = os.environ | {"PYTHONPATH": str(site)}  # before the repository, which may be installed as editable
    train = [sys.executable, site / "bin" / "lmgym", "train", "quickstart", *SMALL]
    done = subprocess.run(train, cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (here / "runs" / "quickstart" / "final" / "model.safetensors").is_file()
    where = subprocess.run(
        [sys.executable, "-c", "import lmgym; print(lmgym.__file__)"], cwd=here, env=environment, capture_output=True
    )
    assert where.stdout.decode().startswith(str(site))
