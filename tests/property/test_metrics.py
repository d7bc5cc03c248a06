"""What must hold for the metrics of any text: finite, in range, the same alone as in any batch, and in little time."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgym.core import registry
from lmgym.rewards.building import build_rewards
from lmgym.rewards.check import check_reward
from lmgym.types import Example

INFINITE = math.inf
RANGES = {
    **dict.fromkeys(["bleu", "sacre_bleu", "chrf", "chrf_plus_plus", "totto_bleu"], (0.0, 1.0)),
    **dict.fromkeys(["totto_bleu_overlap", "totto_bleu_non_overlap", "token_f1", "squad_exact_match"], (0.0, 1.0)),
    **dict.fromkeys(["rouge1", "rouge2", "rougeL", "rougeLsum", "rouge_combined", "rouge_l_max"], (0.0, 1.0)),
    **dict.fromkeys(["meteor_stem", "parent", "parent_overlap", "parent_non_overlap"], (0.0, 1.0)),
    **dict.fromkeys(["concept_coverage", "msttr", "distinct_1", "distinct_2", "distinct_3"], (0.0, 1.0)),
    **dict.fromkeys(["vocabulary_1", "vocabulary_2", "vocabulary_3", "unique_1", "unique_2"], (0.0, INFINITE)),
    **dict.fromkeys(["unique_3", "entropy_1", "entropy_2", "entropy_3", "prediction_length"], (0.0, INFINITE)),
    **dict.fromkeys(["conditional_entropy_2", "conditional_entropy_3"], (-INFINITE, INFINITE)),
    "ter": (-INFINITE, 1.0),
    "cider": (0.0, 10.0),
    "vader": (-1.0, 1.0),
    "common_gen_repeat_penalty": (-1.0, 0.0),
    "common_gen_preference": (0.0, 1.5),
}
MODULES = ["bleu", "chrf", "rouge", "meteor", "cider", "parent", "totto", "common_gen", "squad", "diversity", "vader"]
pieces = st.sampled_from(
    [
        *(*"aAbB .,!?'-\n\t09", "the cat ", "but ", "not ", "good ", "n't ", "\u00e9", "\u4e2d", "\U0001f600"),
        *("\u2019s ", "\ud800", "\x00", "\u200b", "&amp;", "''", "```", "...", "very ", "GOOD ", "\u0130"),
    ]
)
texts = st.lists(pieces, max_size=40).map("".join) | st.text(max_size=80)
examples = st.builds(
    lambda references, concepts, table, overlap: Example(
        f"a/{abs(hash((references, overlap)))}",
        "?",
        references,
        {"concepts": concepts, "table": table, "overlap_subset": overlap},
    ),
    st.lists(texts, min_size=1, max_size=3).map(tuple),
    st.lists(st.sampled_from(["cat", "dogs", "run"]), min_size=1, max_size=3),
    st.lists(st.tuples(st.just("what"), texts.map(lambda text: text + " x")), min_size=1, max_size=3),
    st.booleans(),
)


def arguments(name: str, folder: Path) -> dict[str, Any]:
    if name == "vader":
        lexicon = folder / "vader_lexicon.txt"
        lexicon.write_text("good\t1.9\nbad\t-2.5\nno\t-1.2\n", encoding="utf-8")
        return {"lexicon": str(lexicon)}
    if name == "common_gen_preference":
        return {"preference": "token_f1", "synonyms": False}
    return {}


def needs(name: str) -> None:
    """Skips where the library of this metric is not there."""
    extra = registry.BUILTIN["reward"][name].needs
    libraries = ["sacrebleu", "nltk"] if extra.startswith("lmgym[metrics]") else []
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"needs {library}")


def test_every_metric_is_here() -> None:
    entries = registry.BUILTIN["reward"].items()
    ours = {
        name for name, entry in entries if entry.target.split(":")[0].removeprefix("lmgym.rewards.text.") in MODULES
    }
    assert ours == {*RANGES, "meteor"}  # meteor itself needs WordNet


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RANGES))
def test_metrics_of_any_text(name: str, tmp_path: Path) -> None:
    needs(name)
    reward = build_rewards({name: arguments(name, tmp_path)})[0]
    low, high = RANGES[name]

    @given(st.lists(st.tuples(texts, examples), min_size=1, max_size=4))
    def check(pairs: list[tuple[str, Example]]) -> None:
        answers, asked = [text for text, _ in pairs], [example for _, example in pairs]
        values = reward.function(list(answers), list(asked))
        assert len(values) == len(pairs)
        assert all(type(value) is float and math.isfinite(value) and low <= value <= high for value in values)
        assert reward.function(answers[::-1], asked[::-1]) == pytest.approx(values[::-1])
        alone = [reward.function([text], [example])[0] for text, example in pairs]
        assert alone == pytest.approx(values)

    check()


@pytest.mark.parametrize("name", sorted(RANGES))
def test_metrics_keep_the_contract_of_a_reward(name: str, tmp_path: Path) -> None:
    needs(name)
    meta = {"concepts": ["cat", "dog"], "table": [("what", "a cat and a dog")], "overlap_subset": True}
    sample = ["A cat and a dog.", "\U0001f600", "no word in common"]
    asked = [Example(f"a/{place}", "?", ("A dog and a cat.", "A cat."), meta) for place in range(len(sample))]
    check_reward(name, sample, asked, **arguments(name, tmp_path))


EVERYTHING = """
import json, sys
from lmgym.core import registry
from lmgym.types import Example

meta = {"concepts": ["cat"], "table": [("what", "the cat sat on it"), ("who", "a dog")], "overlap_subset": True}
words = "the good cat and a very bad dog sat on big mat with no other dog or cat but not so good".split()
words += [f"word{place * place % 97 % (place + 2)}" for place in range(120)]  # some rare, some not
said = [" ".join(words[start % 7 : 5 * start + 20] + words[: start % 4]) for start in range(24)]
examples = [Example(f"a/{place}", "?", (said[place], said[-place]), meta) for place in range(12)]
texts = said[5:17]
values = {}
for name, options in json.loads(sys.argv[1]).items():
    function = registry.get("reward", name)
    count = 3 if name == "ter" else 12  # sacrebleu's TER takes a third of a second for each of these texts
    asked = texts[:count], examples[:count]
    values[name] = [value.hex() for value in function(*asked, **options)]
    values[name] += [function.corpus(*asked, **options).hex()] if hasattr(function, "corpus") else []
print(json.dumps(values))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_values_do_not_depend_on_the_seed_of_hashes(tmp_path: Path) -> None:
    # A resumed run is another process: a sum of floats in the order of a set would differ in its last digits.
    for library in ("sacrebleu", "nltk"):
        pytest.importorskip(library)
    names = sorted({*RANGES} - {"totto_bleu_non_overlap", "parent_non_overlap"})  # empty subsets here
    options = json.dumps({name: arguments(name, tmp_path) for name in names})
    found = []
    for seed in ("0", "1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", EVERYTHING, options]
        found.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert found[0] == found[1] == found[2] and '"cider": ["0x1.' in found[0]


# 10,000 characters of each kind. One pass of a metric over such a text takes a tenth of a second; one that is quadratic
# in it takes minutes, which the test's time limit ends.
LONG = {
    "words": "the cat sat on the mat. " * 420,
    "different words": " ".join(f"word{place}" for place in range(1200)),
    "one word": "y" * 10_000,
    "marks": ".,!?'\"-&" * 1250,
    "apostrophes": "n't" * 3_333,
    "digits": "1,1.1-" * 1_666,
    "emoji": "\U0001f600" * 10_000,
    "lines": "a\n" * 5_000,
    "white space": " \t\n" * 3_333,
    "nothing": "",
}


@pytest.mark.parametrize("name", sorted({*RANGES} - {"ter"}))  # sacrebleu's TER takes seconds for 500 words
def test_metrics_of_long_and_odd_texts(name: str, tmp_path: Path) -> None:
    needs(name)
    reward = build_rewards({name: arguments(name, tmp_path)})[0]
    low, high = RANGES[name]
    meta = {"concepts": ["cat"], "table": [("what", "the cat sat")], "overlap_subset": True}
    for reference in ("the cat sat on a mat", LONG["words"]):
        asked = [Example(f"a/{place}", "?", (reference,), meta) for place in range(len(LONG))]
        values = reward.function(list(LONG.values()), asked)
        assert all(math.isfinite(value) and low <= value <= high for value in values)


@pytest.mark.parametrize("name", [name for name in RANGES if hasattr(registry.get("reward", name), "corpus")])
def test_corpus_values_are_numbers(name: str, tmp_path: Path) -> None:
    needs(name)
    options = arguments(name, tmp_path)
    function = registry.get("reward", name)
    meta = {"concepts": ["cat"], "table": [("what", "the cat sat")]}
    meta["overlap_subset"] = not name.endswith("non_overlap")
    asked = [Example(f"a/{place}", "?", ("the cat sat on a mat", "x")[: 1 + place], meta) for place in range(2)]
    value = function.corpus(["the cat sat down " * 30, "a dog"], asked, **options)
    low, high = RANGES[name]
    assert type(value) is float and low <= value <= high
    json.dumps(value, allow_nan=False)
