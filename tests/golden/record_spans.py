"""Record the spans that TRL's GOLD finds in texts that are cut in two ways, for test_other_tokenizer.py, which does not
need TRL.

A developer runs it with an environment of its own, from the root of the repository:

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0
    PYTHONPATH=. trl/bin/python tests/golden/record_spans.py

It writes spans.json: of each text where the tokens of both cuts end, in bytes, and their groups by `ULDLoss`.
"""

import json
import random
from pathlib import Path

RECORD = Path(__file__).with_name("spans.json")
CASES, LONGEST = 12, 14


def main() -> None:
    from trl.experimental.gold.gold_trainer import ULDLoss

    draw, cases = random.Random(7), []
    for _ in range(CASES):
        length = draw.randint(2, LONGEST)
        own, other = (sorted({*draw.sample(range(1, length), draw.randint(0, length - 1)), length}) for _ in range(2))
        starts = ([0, *ends[:-1]] for ends in (own, other))
        offsets = [list(zip(start, ends, strict=True)) for start, ends in zip(starts, (own, other), strict=True)]
        groups = ULDLoss._align_by_byte_offsets(*offsets)
        cases.append({"own": own, "other": other, "own_groups": groups[0], "other_groups": groups[1]})
    RECORD.write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


if __name__ == "__main__":
    main()
