"""Files beside the package agree with it. (`make lint` holds .github, CITATION.cff and the Dockerfile against their own
rules.)"""

import re
import tomllib

import yaml

from lmgym import __version__
from tests import runs


def read(name: str) -> str:
    return (runs.ROOT / name).read_text(encoding="utf-8")


def test_every_file_has_the_same_version_and_licence() -> None:
    project, citation = tomllib.loads(read("pyproject.toml"))["project"], yaml.safe_load(read("CITATION.cff"))
    assert project["version"] == citation["version"] == __version__
    assert project["license"] == citation["license"]


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    dockerfile, ignored = read("Dockerfile"), read(".dockerignore").splitlines()
    copied = [path for line in re.findall(r"^COPY (?!--)(.*) \S+$", dockerfile, re.MULTILINE) for path in line.split()]
    bound = re.findall(r"--mount=type=bind,source=([^,]+)", dockerfile)
    assert len(copied) >= 4 and bound
    assert "*" in ignored  # what is not named below is left out
    for path in {*copied, *bound}:
        assert (runs.ROOT / path).exists() and f"!{path}" in ignored
    assert {line[1:] for line in ignored if line.startswith("!")} == {*copied, *bound}


def test_every_build_argument_of_the_dockerfile_is_used_and_documented() -> None:
    dockerfile, page = read("Dockerfile"), read("docs/install.md")
    arguments = re.findall(r"^ARG (\w+)=", dockerfile, re.MULTILINE)
    assert arguments == ["BASE", "TORCH_INDEX", "EXTRAS"]
    for argument in arguments:
        assert f"${{{argument}" in dockerfile and f"--build-arg {argument}=" in page


def test_the_actions_of_the_workflows_are_pinned_and_may_only_read() -> None:
    for path in (runs.ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = path.read_text(encoding="utf-8")
        used = re.findall(r"uses: (\S+)(.*)", workflow)
        assert used and all(re.search(r"@[0-9a-f]{40}$", action) and "# v" in rest for action, rest in used)
        assert yaml.safe_load(workflow)["permissions"] == {"contents": "read"}


def test_continuous_integration_runs_on_every_python_that_is_promised() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    promised = {line.split(" :: ")[-1] for line in project["classifiers"] if ":: Python :: " in line}
    matrix = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]["run"]["strategy"]["matrix"]
    assert set(matrix["python"]) == promised
    assert project["requires-python"] == f">={min(matrix['python'], key=lambda text: int(text.split('.')[1]))}"


def test_the_newest_and_the_oldest_versions_are_tried_on_a_schedule() -> None:
    """YAML reads the key `on` as true."""
    workflow = yaml.safe_load(read(".github/workflows/versions.yml"))
    assert workflow[True]["schedule"]
    jobs = {one["versions"]: one["install"] for one in workflow["jobs"]["run"]["strategy"]["matrix"]["include"]}
    assert set(jobs) == {"newest", "oldest"} and "lowest-direct" in jobs["oldest"]
    assert all("-e '.[dev]'" in install and "constraints" not in install for install in jobs.values())


def test_every_extra_is_on_the_page_about_installing() -> None:
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    assert all(f"`{extra}`" in read("docs/install.md") for extra in extras)
