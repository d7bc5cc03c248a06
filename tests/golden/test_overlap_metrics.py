"""BLEU, TER, chrF, ROUGE, METEOR, CIDEr and SQuAD's scores: numbers from the libraries that define them, live where
these are installed and recorded where not (record_metrics.py), from their documentation, and worked by hand.

"Case" numbers those of a study of the systems whose behaviour is matched.
"""

import importlib
import json
import logging
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmgym.config.build import load_config
from lmgym.core.availability import NEEDS, Need
from lmgym.core.errors import LmgymError
from lmgym.rewards.base import check_examples
from lmgym.rewards.building import _available, available_metrics, build_rewards
from lmgym.rewards.text.bleu import bleu, chrf, chrf_plus_plus, sacre_bleu, split_13a, ter
from lmgym.rewards.text.cider import cider
from lmgym.rewards.text.meteor import meteor, meteor_stem
from lmgym.rewards.text.references import needed, stem, tokenise
from lmgym.rewards.text.rouge import rouge1, rouge2, rouge_combined, rouge_l_max, rougeL, rougeLsum
from lmgym.rewards.text.squad import squad_exact_match, token_f1
from lmgym.training.setup import held_out_rewards
from lmgym.types import Example
from tests import runs

RECORD = json.loads(Path(__file__).with_name("metrics.json").read_text(encoding="utf-8"))
sacrebleu: Any = pytest.importorskip("sacrebleu.metrics")
nltk_meteor: Any = pytest.importorskip("nltk.translate.meteor_score")
rouge_scorer: Any = pytest.importorskip("rouge_score.rouge_scorer")

# The example of sacrebleu's README: three texts, two references each.
DOGS = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
DOG_REFERENCES = [
    ("The dog bit the man.", "The dog had bit the man."),
    ("It was not unexpected.", "No one was surprised."),
    ("The man bit him first.", "The man had bitten the dog."),
]
words = st.sampled_from(["the", "The", "cat", "cats", "it", "its", "on", "running", "runs", "3.5", "\u00e9t\u00e9"])
marks = st.sampled_from([*".,-?!'\"&;()[]{}<>/\\\n \t\u00a0|~`", "&quot;", "&amp;", "-\n", "<skipped>", "\U0001f600"])
texts = st.lists(words | marks, max_size=25).map(" ".join) | st.lists(words | marks, max_size=25).map("".join)
references = st.lists(texts, min_size=1, max_size=3).map(tuple)


def asked(*wanted: Sequence[str]) -> list[Example]:
    return [Example(f"a/{number}", "?", tuple(one)) for number, one in enumerate(wanted)]


def streams(wanted: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """References as sacrebleu takes them: the first of each text, the second of each text ..."""
    most = max(map(len, wanted))
    return [[one[place] if place < len(one) else None for one in wanted] for place in range(most)]


# ---------------------------------------------------------------- sacrebleu


def test_the_example_of_sacrebleus_documentation() -> None:
    examples = asked(*DOG_REFERENCES)
    assert 100 * sacre_bleu.corpus(DOGS, examples) == pytest.approx(48.53, abs=5e-3)  # type: ignore[attr-defined]
    assert 100 * chrf.corpus(DOGS, examples) == pytest.approx(59.73, abs=5e-3)  # type: ignore[attr-defined]


def test_bleu_by_hand() -> None:
    # 6 of 7 words, 4 of 6 pairs, 3 of 5 triples and 2 of 4 quadruples are right.
    expected = (6 / 7 * 4 / 6 * 3 / 5 * 2 / 4) ** 0.25
    examples = asked(["the cat sat on the rug ."])
    assert bleu(["the cat sat on the mat ."], examples) == pytest.approx([expected])
    assert sacre_bleu(["the cat sat on the mat."], examples) == pytest.approx([expected])
    # Half the length of the reference: brevity penalty exp(1 - 2).
    assert bleu(["a b c d"], asked(["a b c d e f g h"])) == pytest.approx([np.exp(-1)])
    # The nearest reference in length counts, not the longest.
    assert bleu(["a b c d"], asked(["a b c d e f g h", "x x x x x"])) == pytest.approx([np.exp(1 - 5 / 4)])
    # "the" may be used twice, as in the second reference.
    assert bleu(["the the the"], asked(["the", "the the"])) == [0.0]
    assert sacre_bleu(["the the the"], asked(["the", "the the"]))[0] == pytest.approx((2 / 3 * 1 / 2 / 2) ** (1 / 3))


@pytest.mark.parametrize("tokenize", ["13a", "intl", "zh", "char", "none"])
def test_sacrebleu_keeps_no_text(tokenize: Any) -> None:
    """Its tokenizers keep 65,536 texts each, for good: gigabytes of long answers."""
    from sacrebleu.tokenizers import tokenizer_13a, tokenizer_char, tokenizer_intl, tokenizer_re, tokenizer_ter
    from sacrebleu.tokenizers import tokenizer_zh as chinese

    examples = asked(*DOG_REFERENCES)
    sacre_bleu(DOGS, examples, tokenize=tokenize)
    bleu(DOGS, examples), ter(DOGS, examples), split_13a(DOGS[0])
    kinds = [tokenizer_13a.Tokenizer13a, tokenizer_char.TokenizerChar, tokenizer_intl.TokenizerV14International]
    kinds += [tokenizer_re.TokenizerRegexp, tokenizer_ter.TercomTokenizer, chinese.TokenizerZh]
    assert [kind.__call__.cache_info().currsize for kind in kinds] == [0] * 6


def test_bleu_of_short_texts() -> None:
    examples = asked(["good dog"])
    assert bleu(["good dog"], examples) == [0.0]  # no four words
    assert sacre_bleu(["good dog"], examples) == [1.0]
    # As one corpus of order 4, which sacrebleu computes: orders without n-grams count as precision 0.
    library = sacrebleu.BLEU().corpus_score(["good dog"], [["good dog"]]).score / 100
    assert sacre_bleu(["good dog"], examples, effective_order=False) == pytest.approx([library])
    assert sacre_bleu.corpus(["good dog"], examples) == pytest.approx(library)  # type: ignore[attr-defined]


@given(
    st.lists(st.tuples(texts, references), min_size=1, max_size=4), st.sampled_from(["exp", "floor", "add-k", "none"])
)
def test_bleu_is_that_of_sacrebleu(pairs: list[tuple[str, tuple[str, ...]]], smoothing: str) -> None:
    answers, wanted = [text for text, _ in pairs], [one for _, one in pairs]
    examples = asked(*wanted)
    for options in ({}, {"lowercase": True}, {"tokenize": "none"}, {"tokenize": "intl"}, {"tokenize": "char"}):
        single = sacrebleu.BLEU(smooth_method=smoothing, effective_order=True, **options)
        expected = [single.sentence_score(text, list(one)).score / 100 for text, one in pairs]
        assert sacre_bleu(answers, examples, smooth_method=smoothing, **options) == pytest.approx(expected)  # type: ignore[arg-type]
        whole = sacrebleu.BLEU(smooth_method=smoothing, **options).corpus_score(answers, streams(wanted)).score / 100
        found = sacre_bleu.corpus(answers, examples, smooth_method=smoothing, **options)  # type: ignore[attr-defined]
        assert found == pytest.approx(whole)


@given(st.lists(st.tuples(texts, references), min_size=1, max_size=4))
def test_plain_bleu_is_sacrebleus_without_smoothing(pairs: list[tuple[str, tuple[str, ...]]]) -> None:
    logging.getLogger("sacrebleu").setLevel(logging.ERROR)  # it would rather have effective_order
    library = sacrebleu.BLEU(smooth_method="none", tokenize="none")
    examples = asked(*[one for _, one in pairs])
    expected = [library.sentence_score(text, list(one)).score / 100 for text, one in pairs]
    assert bleu([text for text, _ in pairs], examples) == pytest.approx(expected)
    whole = library.corpus_score([text for text, _ in pairs], streams([one for _, one in pairs])).score / 100
    assert bleu.corpus([text for text, _ in pairs], examples) == pytest.approx(whole)  # type: ignore[attr-defined]


@given(texts | st.text(max_size=60))
@example(".,.,a.,1.2,3-4 5,-")
def test_words_are_split_as_by_sacrebleu(text: str) -> None:
    tokenizer = importlib.import_module("sacrebleu.tokenizers.tokenizer_13a").Tokenizer13a()
    assert split_13a(text) == tokenizer(text.rstrip()).split()


@given(st.lists(st.tuples(texts | st.text(max_size=40), references), min_size=1, max_size=4), st.booleans())
def test_chrf_is_that_of_sacrebleu(pairs: list[tuple[str, tuple[str, ...]]], lowercase: bool) -> None:
    answers, wanted = [text for text, _ in pairs], [one for _, one in pairs]
    examples = asked(*wanted)
    for function, order in ((chrf, 0), (chrf_plus_plus, 2)):
        library = sacrebleu.CHRF(word_order=order, lowercase=lowercase)
        expected = [library.sentence_score(text, list(one)).score / 100 for text, one in pairs]
        assert function(answers, examples, lowercase=lowercase) == pytest.approx(expected)  # type: ignore[operator]
        whole = library.corpus_score(answers, streams(wanted)).score / 100
        assert function.corpus(answers, examples, lowercase=lowercase) == pytest.approx(whole)  # type: ignore[attr-defined]


def test_chrf_of_an_alphabet_too_large_for_one_number() -> None:
    # 6 letters of 3,000 need more than 62 bits: the numbers of the n-grams are made small on the way.
    letters = [chr(0x4E00 + place) for place in range(3000)]
    text, wanted = "".join(letters), "".join(letters[1500:] + letters[:1500])
    expected = sacrebleu.CHRF().sentence_score(text, [wanted]).score / 100
    assert 0.9 < expected < 1
    assert chrf([text, wanted, "a"], asked([wanted], [wanted], [wanted])) == pytest.approx([expected, 1.0, 0.0])


def test_ter_by_hand() -> None:
    wanted = ["a b c d e f"]
    rows = {"a b c d e f": 0, "a b c d e": 1, "a b x d e f": 1, "d e f a b c": 1, "": 6, "x y z x y z x y": 8}
    for text, edits in rows.items():  # "d e f" is moved in one edit
        assert ter([text], asked(wanted)) == pytest.approx([1 - edits / 6])
    # Edits to the nearest reference over the mean length of both.
    assert ter(["a b"], asked(["a b c", "x y z w v"])) == pytest.approx([1 - 1 / 4])
    # One corpus, references of unequal number: 1 edit of 6 words, 2 of (2 + 4) / 2, 0 of 1.
    examples = asked(wanted, ["a b", "c d e f"], ["x", "x", "x"])
    assert ter.corpus(["a b c d e", "x y", "x"], examples) == pytest.approx(1 - 3 / 10)  # type: ignore[attr-defined]
    assert ter(["", "x"], asked([""], [""])) == [1.0, 0.0]


# ---------------------------------------------------------------- ROUGE


def test_rouge_by_hand() -> None:
    examples = asked(["the cat ran"])
    assert rouge1(["the cat sat"], examples) == pytest.approx([2 / 3])
    assert rouge2(["the cat sat"], examples) == pytest.approx([1 / 2])
    assert rougeL(["the cat sat"], examples) == pytest.approx([2 / 3])
    assert rouge_combined(["the cat sat"], examples) == pytest.approx([(2 / 3 + 1 / 2 + 2 / 3) / 3])
    assert rouge1(["runners run"], asked(["runner running"])) == [1.0]  # stems
    assert rouge1(["runners run"], asked(["runner running"]), stemmer=False) == [0.0]
    assert rouge1(["its"], asked(["it"])) == [0.0]  # words of three letters are left as they are
    # Sequences: "a ... d" is 2 of 4; as summaries, both lines of the reference are found.
    assert rougeL(["c d\na b"], asked(["a b\nc d"])) == [0.5]
    assert rougeLsum(["c d\na b"], asked(["a b\nc d"])) == [1.0]
    # The best of several references, or the first.
    several = asked(["at home", "the house"])
    assert rouge_l_max(["in a house"], several) == pytest.approx([0.4]) == rougeL(["in a house"], several)
    assert rougeL(["in a house"], several, references="first") == [0.0]


letters = st.lists(st.sampled_from("aabbccde"), max_size=14).map(" ".join)


@given(
    st.lists(st.tuples(texts | letters, references | st.tuples(letters, letters)), min_size=1, max_size=3),
    st.booleans(),
)
def test_rouge_is_that_of_rouge_score(pairs: list[tuple[str, tuple[str, ...]]], stemmer: bool) -> None:
    for function in (rouge1, rouge2, rougeL, rougeLsum):
        name = function.__name__
        library = rouge_scorer.RougeScorer([name], use_stemmer=stemmer)
        answers, examples = [text for text, _ in pairs], asked(*[one for _, one in pairs])
        best = [library.score_multi(one, text)[name].fmeasure for text, one in pairs]
        first = [library.score(one[0], text)[name].fmeasure for text, one in pairs]
        assert function(answers, examples, stemmer=stemmer) == pytest.approx(best)
        assert function(answers, examples, stemmer=stemmer, references="first") == pytest.approx(first)


lines = st.lists(letters, min_size=1, max_size=4).map("\n".join)


@given(lines, lines)
@example("a b c\n\nb b", "b a\nc b a")
def test_rouge_of_summaries_is_that_of_rouge_score(text: str, wanted: str) -> None:
    # Which of several longest common subsequences is taken matters here, since their union is.
    expected = rouge_scorer.RougeScorer(["rougeLsum"]).score(wanted, text)["rougeLsum"].fmeasure
    assert rougeLsum([text], asked([wanted]), stemmer=False) == pytest.approx([expected])


# ---------------------------------------------------------------- METEOR


class Thesaurus:
    """A WordNet of a few made-up groups, with the methods that NLTK's METEOR calls; it asks for stems."""

    groups = (("cat", "felin"), ("cat", "man_about_town"), ("sat", "perch", "pose"), ("mat", "rug", "carpet"))

    def synsets(self, word: str) -> list[Any]:
        def sense(names: Sequence[str]) -> Any:
            lemmas = [types.SimpleNamespace(name=lambda name=name: name) for name in names]
            return types.SimpleNamespace(lemmas=lambda: lemmas)

        return [sense(group) for group in self.groups if word in group]


spoken = st.lists(
    st.sampled_from(
        ["the", "cat", "cats", "feline", "sat", "sit", "perched", "poses", "rug", "carpets", "mat", "on", "a"]
    ),
    max_size=12,
)


@given(spoken, st.lists(spoken, min_size=1, max_size=3))
@example(["sat", "the"], [["perched", "the", "posed"]])  # the last synonym is taken: two pieces
@example(["feline", "rug"], [["a", "cat", "on", "mats", "carpet"]])
def test_meteor_is_that_of_nltk(answer: list[str], wanted: list[list[str]]) -> None:
    thesaurus, module = Thesaurus(), importlib.import_module("lmgym.rewards.text.meteor")
    examples = asked([" ".join(one) for one in wanted])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_wordnet", lambda: thesaurus)
        expected = nltk_meteor.meteor_score(wanted, answer, wordnet=thesaurus)
        assert meteor([" ".join(answer)], examples) == pytest.approx([expected])
    thesaurus.groups = ()
    expected = nltk_meteor.meteor_score(wanted, answer, wordnet=thesaurus)
    assert meteor_stem([" ".join(answer)], examples) == pytest.approx([expected])
    expected = nltk_meteor.meteor_score(wanted, answer, wordnet=thesaurus, alpha=0.5, beta=2.0, gamma=0.3)
    assert meteor_stem([" ".join(answer)], examples, alpha=0.5, beta=2.0, gamma=0.3) == pytest.approx([expected])


def test_meteor_by_hand() -> None:
    assert meteor_stem(["the cat sat"], asked(["the cat sat"])) == pytest.approx([1 - 0.5 / 27])
    # 2 of 2 and 2 of 3 words, side by side: P 1, R 2/3, penalty 0.5 / 8.
    assert meteor_stem(["cats sit"], asked(["a cat sits"])) == pytest.approx(
        [(1 - 0.5 / 8) * (2 / 3) / (0.9 + 0.2 / 3)]
    )
    # 3 of 5 words in 3 pieces: 0.5 * 3 / 5.
    assert meteor_stem(["dog a throw b ball"], asked(["ball c dog d throw"])) == pytest.approx([0.3])
    assert meteor_stem(["x"], asked(["y", "x"])) == [0.5]
    # From the last word to the first, each takes the last free place: (0, 0) and (2, 2), 2 of 3 words in 2 pieces.
    assert nltk_meteor.align_words(["a", "b", "a"], ["a", "c", "a"], wordnet=Thesaurus())[0] == [(0, 0), (2, 2)]
    assert meteor_stem(["a b a"], asked(["a c a"])) == pytest.approx([0.5 * 2 / 3])


def has_wordnet() -> bool:
    try:
        importlib.import_module("nltk.corpus").wordnet.ensure_loaded()
    except LookupError:
        return False
    return True


def test_meteor_with_wordnet() -> None:
    if not has_wordnet():
        pytest.skip("needs WordNet for NLTK")
    # The example of NLTK's documentation.
    text = "It is a guide to action which ensures that the military always obeys the commands of the party"
    wanted = "It is a guide to action that ensures that the military will forever heed Party commands"
    assert meteor([text], asked([wanted])) == pytest.approx([0.6944], abs=5e-5)
    assert meteor(["an auto"], asked(["a car"])) == [0.25] and meteor_stem(["an auto"], asked(["a car"])) == [0.0]


def test_meteor_with_wordnet_is_that_of_nltk(shared: Path) -> None:
    path = shared / "data" / "commongen" / "commongen.dev.jsonl"
    if not has_wordnet() or not path.is_file():
        pytest.skip(f"needs WordNet for NLTK and {path}")
    scenes = [json.loads(line)["scene"] for line in path.read_text(encoding="utf-8").splitlines()[:100]]
    expected = [nltk_meteor.meteor_score(list(map(tokenise, scene[1:])), tokenise(scene[0])) for scene in scenes]
    assert meteor([scene[0] for scene in scenes], asked(*[scene[1:] for scene in scenes])) == pytest.approx(expected)
    assert sum(expected) > sum(meteor_stem([one[0] for one in scenes], asked(*[one[1:] for one in scenes])))


def test_meteor_without_wordnet_says_what_to_do() -> None:
    if has_wordnet():
        pytest.skip("WordNet is here")
    for call in (
        lambda: meteor(["a"], asked(["a"])),
        lambda: check_examples(build_rewards({"meteor": 1}), asked(["a"])),
    ):
        with pytest.raises(LmgymError, match=r"nltk.downloader wordnet \(or use 'meteor_stem'"):
            call()


def test_a_metric_without_wordnet_is_the_other_one_in_name_and_measure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = {"bleu": {}, "meteor": {"alpha": 0.5}, "ter": {}}
    monkeypatch.setitem(NEEDS, "WordNet for NLTK", Need(lambda: False, "python -m nltk.downloader wordnet"))
    _available.cache_clear()
    with pytest.warns(UserWarning, match="reported as 'meteor_stem'") as warned:
        for _ in range(2):
            found = available_metrics(said)
    assert list(found.items()) == [("bleu", {}), ("meteor_stem", {"alpha": 0.5}), ("ter", {})] and len(warned) == 1
    assert available_metrics({"meteor_stem": {"beta": 2.0}, "meteor": {}}) == {"meteor_stem": {"beta": 2.0}}
    config = load_config(runs.write(tmp_path / "recipe.yaml", evaluation={"metrics": said}))
    reported = {reward.name for reward in held_out_rewards(config, config.stages[-1])}
    assert {"bleu", "meteor_stem", "ter"} <= reported and "meteor" not in reported
    monkeypatch.setitem(NEEDS, "WordNet for NLTK", Need(lambda: True))
    _available.cache_clear()
    assert available_metrics(said) == said
    _available.cache_clear()


def test_words_for_meteor() -> None:
    assert tokenise("\u201cDon\u2019t stop,\u201d he said: 3,500.50 km/h at 12:30 isn't well-known...") == [
        *("\u201c", "do", "n\u2019t", "stop", ",", "\u201d", "he", "said", ":", "3,500.50", "km/h", "at", "12:30"),
        *("is", "n't", "well-known", "..."),
    ]
    assert tokenise("I cannot, he'll -- 'tis", punctuation=False) == ["i", "can", "not", "he", "'ll", "tis"]
    assert tokenise("It's x.", tokens="spaces") == ["it's", "x."]


@pytest.mark.slow
def test_words_are_mostly_those_of_nltk(shared: Path) -> None:
    split = importlib.import_module("nltk.tokenize.destructive").NLTKWordTokenizer().tokenize
    path = shared / "data" / "commongen" / "commongen.dev.tgt.txt"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    sentences = path.read_text(encoding="utf-8").splitlines()
    expected = [[re.sub("^(``|'')$", '"', word.lower()) for word in split(sentence)] for sentence in sentences]
    equal = [tokenise(sentence) == one for sentence, one in zip(sentences, expected, strict=True)]
    assert len(sentences) == 4018 and sum(equal) / len(equal) > 0.99


def test_a_word_too_long_to_stem_is_its_own_stem() -> None:
    assert stem("y" * 100_000) == "y" * 100_000 and stem("fields") == "field"


# ---------------------------------------------------------------- CIDEr


def documents(folder: Path, wanted: Sequence[Sequence[str]]) -> str:
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps(list(one)) + "\n" for one in wanted), encoding="utf-8")
    return str(path)


def test_cider_is_that_of_pycocoevalcap(tmp_path: Path) -> None:
    rows = RECORD["cider"]["captions"]
    answers, wanted = [row["text"] for row in rows], [row["references"] for row in rows]
    examples = asked(*wanted)
    found = cider(answers, examples, documents=documents(tmp_path, wanted))
    assert found == pytest.approx([row["value"] for row in rows], abs=1e-9)
    assert cider.corpus(answers, examples) == pytest.approx(RECORD["cider"]["mean"], abs=1e-9)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_cider_on_common_gen_is_that_of_pycocoevalcap(shared: Path, tmp_path: Path) -> None:
    path = shared / "data" / "commongen" / "commongen.dev.jsonl"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    scenes = [json.loads(line)["scene"] for line in path.read_text(encoding="utf-8").splitlines()]
    plain = [[re.sub(r"[^\w\s]", "", text.lower()) for text in scene] for scene in scenes if len(scene) > 1]
    answers, wanted = [scene[0] for scene in plain], [scene[1:] for scene in plain]
    recorded = RECORD["common_gen"]
    assert len(plain) == recorded["examples"]
    found = cider(answers, asked(*wanted), documents=documents(tmp_path, wanted), tokens="spaces")
    assert found[::10] == pytest.approx(recorded["every_tenth"], abs=1e-6)
    whole = cider.corpus(answers, asked(*wanted), tokens="spaces")  # type: ignore[attr-defined]
    assert whole == pytest.approx(recorded["mean"], abs=1e-6)


# Case 12, computed by running RL4LMs: 10 and 4.791667 of two documents, 0 of one.
def test_cider_of_two_documents_and_of_one(tmp_path: Path) -> None:
    answers, wanted = ["a b c d", "e f g h"], [["a b c d"], ["e f g x"]]
    text = tmp_path / "documents.txt"
    text.write_text("a b c d\ne f g x\n", encoding="utf-8")
    for path in (documents(tmp_path, wanted), str(text)):
        assert cider(answers, asked(*wanted), documents=path) == pytest.approx([10.0, 4.791667], abs=1e-6)
        assert cider.corpus(answers, asked(*wanted), documents=path) == pytest.approx(7.3958335, abs=1e-6)  # type: ignore[attr-defined]
    assert cider.corpus(answers, asked(*wanted)) == pytest.approx(7.3958335, abs=1e-6)  # type: ignore[attr-defined]
    assert cider.corpus(answers[:1], asked(*wanted[:1])) == 0.0  # type: ignore[attr-defined]
    # All n-grams alike: 3 of 4 words, 2 of 3 pairs, 1 of 2 triples, 0 of 1 quadruple.
    assert cider(answers, asked(*wanted)) == pytest.approx([10.0, 10 * (3 / 4 + 2 / 3 + 1 / 2) / 4])
    # Answers to one prompt are one document.
    assert cider.corpus([*answers, answers[0]], [*asked(*wanted), asked(*wanted)[0]]) == pytest.approx(  # type: ignore[attr-defined]
        (10 + 4.791667 + 10) / 3, abs=1e-6
    )


def test_only_a_line_end_ends_a_document(tmp_path: Path) -> None:
    """A text may hold other marks that Python's splitlines takes as ends, and JSON may write them as they are."""
    answers, wanted = ["a b c d", "e f g h"], [["a\u2028b\x85c d"], ["e f g x"]]
    lines, plain = tmp_path / "a.jsonl", tmp_path / "a.txt"
    lines.write_bytes("".join(json.dumps(one, ensure_ascii=False) + "\r\n" for one in wanted).encode())
    plain.write_bytes("".join(f"{one[0]}\r\n" for one in wanted).encode())
    expected = cider(answers, asked(*wanted), documents=documents(tmp_path, wanted))
    for path in (lines, plain):
        assert cider(answers, asked(*wanted), documents=str(path)) == expected


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.csv", "x", r"a.csv must end in .txt \(a document a line\) or .jsonl"),
        ("none.txt", None, "cannot read .*none.txt"),
        ("a.jsonl", '["a"]\n{"b": 1}\n', r"line 2 of .*a.jsonl must be a text or a list of texts, in JSON"),
        ("a.jsonl", '["a"]\nb\n', r"line 2 of .*a.jsonl must be a text"),
        ("a.txt", "one\n", "a.txt has 1 documents; rarity needs at least 2"),
    ],
)
def test_what_is_no_file_of_documents(name: str, content: str | None, sentence: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    rewards = build_rewards({"cider": {"documents": str(tmp_path / name)}})
    with pytest.raises(LmgymError, match=f"key 'documents' of CIDEr: .*{sentence}"):
        check_examples(rewards, asked(["a"]))


def test_a_sigma_of_cider_is_refused_by_its_key() -> None:
    with pytest.raises(LmgymError, match=r"^rewards\.mine\.sigma is 0.0; it must be above 0"):
        build_rewards({"mine": {"reward": "cider", "sigma": 0}})
    with pytest.raises(LmgymError, match="sigma of CIDEr must be above 0, not -1"):
        cider(["a"], asked(["a"]), sigma=-1)


# ---------------------------------------------------------------- SQuAD


def test_squad_by_hand() -> None:
    examples = asked(["Eiffel tower", "the tower"])
    assert squad_exact_match(["The Eiffel Tower!", "a tower.", "Eiffel", ""], examples * 4) == [1.0, 1.0, 0.0, 0.0]
    assert token_f1(["in the year 1889"], asked(["1889", "in 1887"])) == pytest.approx([0.5])
    assert token_f1(["big big dog", "", "The", "x"], asked(["big dog dog"], ["an"], ["x"], ["the"])) == pytest.approx(
        [2 / 3, 1.0, 0.0, 0.0]
    )


# ---------------------------------------------------------------- all

SAME = "The quick brown fox jumps over the lazy dog."
SENTENCES = [SAME, "It's 3.5, you know", "caf\u00e9s open at nine today"]


@pytest.mark.parametrize(
    "reward",
    [
        *(bleu, sacre_bleu, ter, chrf, chrf_plus_plus, squad_exact_match, token_f1),
        *(rouge1, rouge2, rougeL, rougeLsum, rouge_combined, rouge_l_max),
    ],
)
def test_a_text_equal_to_its_reference_has_the_top_mark(reward: Callable[..., list[float]]) -> None:
    examples = asked(*[["something else", sentence] for sentence in SENTENCES])
    if reward is ter:  # which divides by the mean length of the references
        assert reward(SENTENCES, examples) == [1.0, 1.0, 1.0]
    assert reward(SENTENCES, asked(*[[sentence] for sentence in SENTENCES])) == pytest.approx([1.0] * 3)
    assert reward(SENTENCES, examples) == pytest.approx([1.0] * 3)
    assert all(value < 0.7 for value in reward(["Nothing of the kind was said here then"] * 3, examples))


REFERENCED = ["bleu", "sacre_bleu", "ter", "chrf", "chrf_plus_plus", "rouge1", "rouge2", "rougeL", "rougeLsum"]
REFERENCED += ["rouge_combined", "rouge_l_max", "meteor_stem", "cider", "squad_exact_match", "token_f1", "totto_bleu"]


@pytest.mark.parametrize("name", REFERENCED)
def test_an_example_without_a_reference_is_named(name: str) -> None:
    examples = [Example("a/0", "?", ("yes",)), Example("a/1", "?")]
    with pytest.raises(LmgymError, match=r"needs a reference, and example 'a/1' has none"):
        check_examples(build_rewards({name: 1.0}), examples)
    with pytest.raises(LmgymError, match=r"needs a reference, and example 'a/1' has none"):
        build_rewards({name: 1.0})[0].function(["yes", "no"], examples)


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(LmgymError, match=r"reward 'bleu' needs the library sacreblue: pip install 'lmgym\[metrics\]'"):
        needed("sacreblue.metrics", "bleu")
