"""intent_accuracy: what the classifier reads, whose label counts, and METEOR of each answer for itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lmgym.core.errors import LmgymError
from lmgym.core.registry import get
from lmgym.rewards.base import check_examples
from lmgym.rewards.building import build_rewards
from lmgym.rewards.check import check_reward
from lmgym.rewards.text.meteor import meteor_stem
from lmgym.tasks.base import load_task
from lmgym.types import Example
from tests import learned_models as tiny

pytest.importorskip("nltk")
CODES = {0: "1", 1: "2", 2: "3", 3: "4"}  # as examples/train_classifier.py names them
PROMPT = "Hello ! <EOU> Shall we go ? <EOU>"
TEXTS = [" Yes , let's . <EOU>", " Where to ?", "", " No .", " What a film ! <EOU>", " 1 2 3"]
INTENTS = [3, 3, 2, 1, 3, 2]
EXAMPLES = [Example(f"d/{n}", PROMPT, (" Yes , let's . <EOU>",), {"intent": code}) for n, code in enumerate(INTENTS)]


def intents(texts: list[str], examples: list[Example], **arguments: Any) -> list[float]:
    return get("reward", "intent_accuracy")(texts, examples, auto_coeff=0, **arguments)


def four(folder: Path, labels: dict[int, str] = CODES) -> str:
    """A random classifier; this seed's tells the texts apart, and by what stands before them."""
    return tiny.classifier(folder, labels, seed=17, longest=128)


def classes(folder: str, texts: list[str]) -> list[int]:
    """The likeliest class by transformers alone, one text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [int(model(**tokenizer(text, return_tensors="pt")).logits.argmax()) for text in texts]


@pytest.mark.parametrize(
    ("context", "before"), [("last", "Shall we go ? <EOU>"), ("none", ""), ("all", "Hello ! <EOU> Shall we go ? <EOU>")]
)
def test_it_is_one_where_the_classifier_finds_the_intent(tmp_path: Path, context: str, before: str) -> None:
    folder = four(tmp_path)
    found = classes(folder, [before + text for text in TEXTS])
    assert len(set(found)) > 1  # the texts are told apart
    wanted = [float(one + 1 == code) for one, code in zip(found, INTENTS, strict=True)]
    assert 0 < sum(wanted) < len(wanted)
    assert intents(TEXTS, EXAMPLES, model=folder, context=context) == wanted
    assert intents(TEXTS, EXAMPLES, model=folder, context=context, intent_coeff=0.5) == [0.5 * one for one in wanted]


def test_labels_by_code_by_name_and_by_place(tmp_path: Path) -> None:
    """One model under four namings. In the second the names stand in the order of the codes reversed."""
    plain = {n: f"LABEL_{n}" for n in range(4)}
    names = {0: "commissive", 1: "directive", 2: "Question", 3: "inform"}
    folders = {k: four(tmp_path / k, v) for k, v in {"code": CODES, "place": plain, "name": names}.items()}
    found = classes(folders["code"], ["Shall we go ? <EOU>" + text for text in TEXTS])
    straight = [float(one + 1 == code) for one, code in zip(found, INTENTS, strict=True)]
    backwards = [float(4 - one == code) for one, code in zip(found, INTENTS, strict=True)]
    assert straight != backwards
    assert (
        intents(TEXTS, EXAMPLES, model=folders["code"]) == straight == intents(TEXTS, EXAMPLES, model=folders["place"])
    )
    assert intents(TEXTS, EXAMPLES, model=folders["name"]) == backwards


def test_meteor_is_of_each_answer_for_itself(tmp_path: Path) -> None:
    """RL4LMs scores the n-th answer by the METEOR of the first n answers together; here the batch does not matter."""
    folder = four(tmp_path)
    hits = intents(TEXTS, EXAMPLES, model=folder)
    scores = meteor_stem(TEXTS, EXAMPLES)
    assert scores[0] > scores[1]
    reward = get("reward", "intent_accuracy")
    arguments = {"model": folder, "intent_coeff": 2.0, "auto_coeff": 0.5, "synonyms": False}
    wanted = [2.0 * hit + 0.5 * score for hit, score in zip(hits, scores, strict=True)]
    assert reward(TEXTS, EXAMPLES, **arguments) == pytest.approx(wanted, abs=1e-12)
    alone = [reward([text], [example], **arguments)[0] for text, example in zip(TEXTS, EXAMPLES, strict=True)]
    assert alone == reward(TEXTS, EXAMPLES, **arguments)
    check_reward("intent_accuracy", TEXTS, EXAMPLES, **arguments)


def test_what_is_wrong_shows_before_anything_is_trained(tmp_path: Path) -> None:
    folder = tiny.classifier(tmp_path / "four", CODES)
    three = tiny.classifier(tmp_path / "three")
    reward = build_rewards({"intent_accuracy": {"model": folder, "synonyms": False}})
    check_examples(reward, EXAMPLES)
    for example, complaint in (
        (
            Example("d/x", "?", ("a",)),
            r"needs meta\['intent'\], a number from 1 to 4, and that of example 'd/x' is None",
        ),
        (Example("d/x", "?", ("a",), {"intent": 5}), "is 5"),
        (Example("d/x", "?", (), {"intent": 1}), "reward 'meteor_stem' needs a reference, and example 'd/x' has none"),
    ):
        with pytest.raises(LmgymError, match=complaint):
            check_examples(reward, [EXAMPLES[0], example])
    with pytest.raises(LmgymError, match="has no label '1' or 'inform'; its labels are NEGATIVE, POSITIVE, MIXED"):
        check_examples(build_rewards({"intent_accuracy": {"model": three, "auto_coeff": 0}}), EXAMPLES[3:])
    half = tiny.classifier(tmp_path / "half", {0: "inform", 1: "question", 2: "other", 3: "none"})
    with pytest.raises(LmgymError, match="has no label '3' or 'directive'"):
        check_examples(build_rewards({"intent_accuracy": {"model": half, "auto_coeff": 0}}), EXAMPLES)


def test_its_text_is_what_a_classifier_is_trained_on(tmp_path: Path) -> None:
    """`train_classifier.py daily_dialog context_size=1 --text both`: prompt and reference of two utterances."""
    from examples.train_classifier import labelled

    rows = '{"dialog": ["Hello !", "Shall we go ?", "Yes , let\'s ."], "act": [1, 2, 4], "emotion": [0, 0, 0]}\n'
    (tmp_path / "test.jsonl").write_text(rows)
    path = str(tmp_path / "test.jsonl")
    (text, label) = labelled(load_task("daily_dialog", "test", path=path, context_size=1), "both", "intent")[-1]
    (example,) = load_task("daily_dialog", "test", path=path, context_size=2)
    folder = four(tmp_path / "model")
    assert (text, label) == ("Shall we go ? <EOU> Yes , let's . <EOU>", "4")
    hit = intents([example.references[0]], [example], model=folder)
    assert hit == [float(classes(folder, [text]) == [3])]
