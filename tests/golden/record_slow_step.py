"""Record the times of a run whose reward is slow, for tests/contract/test_doctor.py: a test must not wait for seconds.

A developer runs it from the repository, and it replaces slow_step.json (about 20 seconds):

    python -m tests.golden.record_slow_step

The run is real: tests/failing_runs.py's task with a reward that waits for 1.2 seconds. Of its records only the
position and the seconds are kept.
"""

import json
import tempfile
import time
from pathlib import Path

from lmgym.config.build import build_config
from lmgym.core.registry import register
from lmgym.logs.console import Console
from lmgym.logs.records import read_records
from lmgym.rewards.base import linear_time
from lmgym.training.loop import train
from lmgym.types import Example
from tests import failing_runs

RECORD = Path(__file__).with_name("slow_step.json")
KEPT = ("kind", "stage", "step", "seconds", "seconds/rollout", "seconds/update")


@register("reward", "waits")
@linear_time
def waits(texts: list[str], examples: list[Example]) -> list[float]:
    time.sleep(1.2)
    return failing_runs.right_side(texts, examples)


def main() -> None:
    tree = {**failing_runs.BASE, "rewards": {"waits": 1.0}, "evaluation": {"every": 0, "examples": 1}, "steps": 12}
    with tempfile.TemporaryDirectory() as folder:
        train(build_config({**tree, "out": folder}), Console(quiet=True))
        records = [record for record in read_records(Path(folder) / "metrics.jsonl") if record["kind"] == "train"]
    kept = [{name: record[name] for name in KEPT} for record in records]
    RECORD.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
