"""SPICE is another's Java program, which needs half a gigabyte of parser that nobody ships: what is tested here is what
stands around it. No score of SPICE has been computed in these tests."""

import math
from pathlib import Path
from typing import Any

import pytest

from lmgym.core import registry
from lmgym.core.availability import availability_of
from lmgym.core.errors import LmgymError
from lmgym.rewards.base import check_examples
from lmgym.rewards.building import build_rewards
from lmgym.rewards.text.spice import CORENLP, read_scores, spice
from lmgym.types import Example

ASKED = [Example("a/0", "?", ("A brown dog runs.",))]


def jars(folder: Path) -> str:
    """Files of the right names, with nothing in them."""
    (folder / "lib").mkdir(parents=True)
    for name in CORENLP:
        (folder / "lib" / name).touch()
    (folder / "spice-1.0.jar").touch()
    return str(folder / "spice-1.0.jar")


def test_its_output_is_read_in_the_order_asked() -> None:
    """The form that spice-1.0.jar writes, rows in any order; a text without an object has no F-score."""
    rows = [(1, "0.5"), (0, "NaN"), (2, "0.25")]
    row = '{"image_id": "%d", "test": "", "refs": [], "scores": {"All": {"pr": 1.0, "re": 0.3, "f": %s}}}'
    text = f"[{', '.join(row % one for one in rows)}]"
    assert read_scores(text, 3) == [0.0, 0.5, 0.25]
    for wrong in (text[:-1], "[]", "{}", "[1]"):
        with pytest.raises(LmgymError, match="what SPICE wrote is no list of 3 scores"):
            read_scores(wrong, 3)
    assert not math.isnan(read_scores(text, 1)[0])


@pytest.mark.parametrize("name", ["spice", "spider"])
def test_what_is_missing_is_named_before_training(name: str, tmp_path: Path) -> None:
    def check(**arguments: Any) -> None:
        check_examples(build_rewards({name: arguments}), ASKED)

    jar = jars(tmp_path / "spice")
    check(jar=jar, java="true")
    with pytest.raises(LmgymError, match=rf"key 'rewards.{name}.jar': there is no file nowhere.jar"):
        check(jar="nowhere.jar")
    with pytest.raises(LmgymError, match=rf"key 'rewards.{name}.jar' is missing"):
        check()
    with pytest.raises(LmgymError, match=rf"reward '{name}' needs Java, and there is no program 'jawa'; install"):
        check(jar=jar, java="jawa")
    with pytest.raises(LmgymError, match=rf"reward '{name}' needs a reference, and example 'a/0' has none"):
        check_examples(build_rewards({name: {"jar": jar, "java": "true"}}), [Example("a/0", "?")])
    if name == "spider":
        with pytest.raises(LmgymError, match=r"key 'documents' of CIDEr: cannot read typo.txt"):
            check(jar=jar, java="true", documents="typo.txt")
        (tmp_path / "two.txt").write_text("a dog\na cat\n", encoding="utf-8")
        check(jar=jar, java="true", documents=str(tmp_path / "two.txt"), tokens="spaces", spice_coeff=0.0)
    (tmp_path / "spice" / "lib" / CORENLP[1]).unlink()
    with pytest.raises(LmgymError, match=r"lib holds no stanford-corenlp-3.6.0-models.jar; SPICE needs it from"):
        check(jar=jar, java="true")
    assert (
        "Java" in registry.BUILTIN["reward"][name].needs and availability_of(registry.BUILTIN["reward"][name].needs).how
    )


def test_a_program_that_fails_is_one_sentence(tmp_path: Path) -> None:
    """Programs that are on every machine, in place of Java: the command cannot tell."""
    jar = jars(tmp_path / "spice")
    with pytest.raises(LmgymError, match=r"reward 'spice': spice-1.0.jar ended with status 1 \(it wrote nothing\)"):
        spice(["A dog runs."], ASKED, jar=jar, java="false")
    with pytest.raises(LmgymError, match=r"reward 'spice': spice-1.0.jar ended with status 0 \(it wrote nothing\)"):
        spice(["A dog runs."], ASKED, jar=jar, java="true")
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(LmgymError, match=r"SPICE took longer than 0\.2 s for 1 texts; raise rewards\.spice\.seconds"):
        spice(["A dog runs."], ASKED, jar=jar, java=str(slow), seconds=0.2)
    assert spice([], [], jar=jar, java="false") == []


@pytest.mark.skipif(availability_of("Java").runs != "yes", reason="needs Java")
def test_what_java_says_of_a_broken_jar_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=r"spice-1.0.jar ended with status 1 \(.*[Jj]ar"):
        spice(["A dog runs."], ASKED, jar=jars(tmp_path / "spice"))
