"""The gold text gets the top mark: of every task with references, by every reward that compares with them.

The top mark is 1, but for METEOR, which takes (1 / 2) (1 / n)^3 off a text of n words in one piece (Banerjee and Lavie
2005, section 2.1), CIDEr-D, whose 10 is for a text like all of its references, PARENT, which wants the table in it too,
and BLEU without smoothing, which has none for fewer than four words: there no other text may get more.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmgym.core import registry
from lmgym.rewards.text.references import tokenise
from lmgym.tasks.base import MissingSplit, check_task, load_task
from lmgym.types import Example
from tests.contract.test_rl4lms_tasks import HUB, task_arguments

ONES = ("exact_match", "sacre_bleu", "ter", "chrf", "chrf_plus_plus", "token_f1", "squad_exact_match")
ROUGE = ("rouge1", "rougeL", "rougeLsum", "rouge_l_max", "rouge_combined")  # of letters a-z and digits
AT_MOST = ("bleu", "cider", "rouge2")
FEW = 12  # examples of a split

REAL: dict[str, tuple[str, dict[str, Any]]] = {  # by task: the folder below ../shared/data, other arguments
    "imdb": ("imdb/aclImdb", {}),
    "imdb_seq2seq": ("imdb/aclImdb", {}),
    "common_gen": ("commongen", {}),
    "cnn_daily_mail": ("cnn_dailymail", {}),
    "totto": ("totto", {}),
    "dart": ("dart/dart-v1.1.1-full-dev.json", {}),
    "narrative_qa": ("narrativeqa", {}),
    "multi30k": ("multi30k_ende", {}),
    "parallel": ("wmt_ende_demo/src-{split}.txt", {"skip_blank": True}),
    "daily_dialog": ("dailydialog", {}),
}


def marks(name: str, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
    values: list[float] = registry.get("reward", name)(list(texts), list(examples))
    return values


def check_gold(examples: list[Example]) -> None:
    texts = [example.references[-1] for example in examples]
    for name in ONES:
        assert marks(name, texts, examples) == pytest.approx([1.0] * len(texts)), name
    spoken = [place for place, text in enumerate(texts) if len(text.encode("ascii", "ignore").split()) > 2]
    some, own = [texts[place] for place in spoken], [examples[place] for place in spoken]
    for name in ROUGE:
        assert marks(name, some, own) == pytest.approx([1.0] * len(some)), name
    counts = [len(tokenise(text)) for text in texts]
    expected = [1 - 0.5 / count**3 for count in counts]
    lone = [place for place, example in enumerate(examples) if len(example.references) == 1]
    found = marks("meteor_stem", texts, examples)
    assert [found[place] for place in lone] == pytest.approx([expected[place] for place in lone])
    assert all(value >= least - 1e-9 for value, least in zip(found, expected, strict=True))
    shorter = [text.rsplit(maxsplit=1)[0] for text in texts]
    for others in (shorter, [*texts[1:], texts[0]], ["of the and"] * len(texts)):
        for name in (*AT_MOST, "meteor_stem"):
            gold, other = (marks(name, said, examples) for said in (texts, others))
            for best, value, example in zip(gold, other, examples, strict=True):
                assert best >= value - 1e-9 or len(example.references) > 1, (name, example.id)


@pytest.fixture(autouse=True)
def _libraries() -> None:
    pytest.importorskip("sacrebleu")
    pytest.importorskip("nltk")


@pytest.mark.parametrize("name", [*HUB, "crd3"])
def test_in_the_original_schema(name: str, tmp_path: Path) -> None:
    arguments = task_arguments(name, tmp_path)
    for split in ("train", "validation", "test"):
        examples = [example for example in load_task(name, split, **arguments) if example.references][:FEW]
        if examples:
            check_gold(examples)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_rows(name: str, shared: Path) -> None:
    place, arguments = REAL[name]
    path = shared / "data" / place
    if not path.parent.is_dir():
        pytest.skip(f"needs {path}")
    arguments = {**arguments, "path": str(path)}
    if name == "parallel":
        arguments["target_path"] = str(path).replace("src-", "tgt-")
    seen = 0
    for split in ("train", "validation", "test"):
        try:
            examples = load_task(name, split, **arguments)
        except MissingSplit:
            continue
        if name in ("totto", "dart", "cnn_daily_mail"):
            check_task(name, split, **arguments)
        examples = [example for example in examples if example.references][:FEW]
        if examples:
            check_gold(examples)
            seen += len(examples)
    assert seen >= 8  # the eight rows of ToTTo's sample


@pytest.mark.parametrize("name", ["totto", "dart"])
def test_parent_likes_nothing_better_than_a_reference(name: str, shared: Path) -> None:
    place, _ = REAL[name]
    if not (shared / "data" / place).exists():
        pytest.skip(f"needs {place}")
    examples = load_task(name, "validation", path=str(shared / "data" / place))[:FEW]
    gold = marks("parent", [example.references[0] for example in examples], examples)
    others = marks("parent", [examples[place - 1].references[0] for place in range(len(examples))], examples)
    cut = marks("parent", [example.references[0].split()[0] for example in examples], examples)
    assert all(value > 0.1 for value in gold)
    assert all(value >= one for value, one in zip(gold, cut, strict=True))
    better = [place for place, value in enumerate(others) if value > gold[place]]
    assert [example for example in better if examples[example].prompt != examples[example - 1].prompt] == []
