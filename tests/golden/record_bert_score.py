"""Record what the package bert-score makes of a tiny random BERT, for tests that do not need the package.

A developer runs it in an environment of its own, and it replaces bert_score.json:

    python3 -m venv similar && similar/bin/pip install -e . bert-score==0.3.13
    similar/bin/python -m tests.golden.record_bert_score

The texts are made up for the purpose. The model's weights are those of tests/learned_models.py, drawn from a seed.
Blank texts are left out: with transformers 5 the package fails on them.
"""

import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.learned_models import encoder

RECORD = Path(__file__).with_name("bert_score.json")
PAIRS = [
    ("the cat sat on the mat", "the cat sat on the mat"),
    ("a cat is on a mat", "the cat sat on the mat"),
    ("rain", "It rained all day, and then it snowed."),
    ("Don't stop!", "do not stop"),
    ("\u00e9t\u00e9 \U0001f600 7.5", "summer 7.5"),
    ("x", "y"),
    ("zzzz zzzz zzzz", "the quick brown fox"),
    ("  spaces around ", "spaces around"),
]
SEED = 3


def main() -> None:
    from bert_score import score

    texts, references = [text for text, _ in PAIRS], [reference for _, reference in PAIRS]
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        model = encoder(Path(folder), seed=SEED)
        for layer in (0, 1, 2):
            for idf in (False, True):
                found = score(texts, references, model_type=model, num_layers=layer, idf=idf, nthreads=0, device="cpu")
                names = ("precision", "recall", "f1")
                numbers = {name: values.tolist() for name, values in zip(names, found, strict=True)}
                runs.append({"layer": layer, "idf": idf, **numbers})
    record: dict[str, Any] = {"bert-score": importlib.metadata.version("bert-score"), "seed": SEED}
    record |= {"pairs": PAIRS, "runs": runs}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
