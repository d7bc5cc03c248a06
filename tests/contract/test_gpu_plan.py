"""The plan for a first GPU: what fails, hangs or is not installed takes nothing away from the rest."""

from pathlib import Path

import pytest

from benchmarks import gpu_plan
from benchmarks.gpu_plan import Part


def test_every_part_has_its_end_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = [
        Part("good", "does it run?", 60, ["-c", "print('one number')"]),
        Part("bad", "does it fail?", 60, ["-c", "raise SystemExit('no such kernel')"]),
        Part("endless", "does it hang?", 5, ["-c", "import time; print('begun', flush=True); time.sleep(600)"]),
        Part("absent", "is it there?", 60, ["-c", ""], needs=["no_such_package"]),
    ]
    monkeypatch.setattr(gpu_plan, "parts", lambda *given: planned)
    assert gpu_plan.run(tmp_path / "report", 2, "cpu", ["tiny"], []) == 1
    report = (tmp_path / "report" / "report.md").read_text()
    ends = ["passed", "failed with status 1", "cut off after 5 s", "left out: no_such_package not installed"]
    for part, end in zip(planned, ends, strict=True):
        assert f"| {part.name} | {part.question} | {end} |" in report
    assert all(f"    {word}" in report for word in ("one number", "no such kernel", "begun"))


def test_its_commands_exist() -> None:
    """Each test file that it names is there, and each option is one of the benchmark's."""
    for part in gpu_plan.parts("cuda", ["qwen2.5-0.5b", "llama3.2-1b"], ["--prompts", "2"]):
        assert all((gpu_plan.ROOT / word).exists() for word in part.arguments if word.startswith("tests/"))
    assert sum(part.seconds for part in gpu_plan.parts("cuda", ["qwen2.5-0.5b"], [])) <= 570
