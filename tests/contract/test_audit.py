"""`lmgym audit`: what its answers are, what counts as a finding, planted mistakes, and the command."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.audited import BAD, GOOD, audit_all, examples_of, is_found
from lmgym.cli.main import main
from lmgym.core.errors import LmgymError
from lmgym.experiments.audit.audit import TOTAL, audit, cost_of
from lmgym.experiments.audit.court import choose_form, cost, hear, summed
from lmgym.experiments.audit.findings import Verdict, judge_reward
from lmgym.experiments.audit.rates import ENOUGH
from lmgym.rewards.base import Reward
from lmgym.rewards.building import build_rewards
from lmgym.rewards.groups import of_groups
from lmgym.rewards.probing.cases import FORMS, Case, make_cases, missed
from lmgym.rewards.probing.judging import Judging, Panel
from lmgym.rewards.probing.probes import ATTACKS, CHANGES
from lmgym.rewards.probing.proof import moved, proven
from lmgym.rollouts.rollout import apply_rewards
from lmgym.types import Episode, Example, RatedAnswer, Turn
from tests.golden.test_judges import Server, said
from tests.runs import complaint

SUMS = examples_of("sums")


def reward(function: Any, weight: float = 1.0) -> Reward:
    return Reward("own", weight, function)


def verdict(function: Any, examples: Sequence[Example] = SUMS, count: int = 12) -> Verdict:
    return audit([reward(function)], examples, count).verdicts[-1]


def codes(found: Verdict, level: str = "problem") -> set[str]:
    return {one.code for one in found.findings if one.level == level}


def test_planted_mistakes_are_found() -> None:
    """The rates are those of docs/audit.md; the two that are missed are beyond what is tried, or too rare."""
    bad, good = audit_all(count=16)
    assert len(bad) == len(BAD) == 35 and len(good) == len(GOOD) == 30
    missed_ones = {name for name, found in bad.items() if not is_found(name, found)}
    assert missed_ones <= {"a_fifth_is_paid", "rare_word"}
    assert {name for name, found in good.items() if found} == {"last_line", "signed_or_silent", "kind_words"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", ["sums", "bare", "large"])
def test_right_is_right_and_wrong_is_wrong(task: str, form: Any) -> None:
    """By the final answer as another function of lmgym reads it."""
    final = build_rewards({"final_answer": 1.0})[0].function
    cases = [replace(case, form=form) for case in make_cases(examples_of(task), 30, 0, 1000)]
    for text, worth in (("right", 1.0), ("near", 0.0), ("other", 0.0)):
        texts = [getattr(case, text) for case in cases]
        assert None not in texts and final(texts, [case.example for case in cases]) == [worth] * 30


def test_a_near_miss_is_one_more_or_the_next_letter() -> None:
    found = [missed(answer) for answer in ("18", "-1", "1,234", "0.5", "1/2", "B", "D", "Paris", "AB")]
    assert found == ["19", "0", "1235", "1.5", "3/2", "C", "A", None, None]


def test_open_and_rated_examples() -> None:
    texts = [Example(f"a/{n}", "?", (f"a long reference text with number {n} in it",)) for n in range(3)]
    case = make_cases(texts, 3, 0, 1000)[0]
    assert case.answer is None and case.near is None and case.right == case.example.references[0] != case.other
    rated = Case(Example("a/0", "?", rated=(RatedAnswer("good", 2.0), RatedAnswer("bad", 1.0))))
    assert (rated.right, rated.other, rated.wrong) == ("good", "bad", "bad")
    bare = make_cases([Example("a/0", "?"), Example("a/1", "?")], 2, 0, 1000)[0]
    assert bare.right is None and bare.other is None and bare.wrong == bare.sentence


def test_probes_say_what_they_do_and_stay_within_the_room() -> None:
    case = make_cases(SUMS, 5, 0, 300)[0]
    for probe in (*ATTACKS.values(), *CHANGES.values()):
        text = probe.write(case)
        assert text is None or isinstance(text, str)
        assert text != case.right, probe.name
    assert len(ATTACKS["giant"].write(case) or "") == 300 and ATTACKS["empty"].write(case) == ""


def test_noise_is_seldom_a_finding() -> None:
    """A probe without effect on a judge that throws a coin: enumerated, all that can come of 40 tries."""
    chance = sum(math.comb(40, up) for up in range(41) if moved([1] * up + [-1] * (40 - up))) / 2**40
    assert 0 < chance < 0.005
    assert not proven([True] * 3) and next(n for n in range(12) if moved([1] * n)) == ENOUGH
    fewest = next(hits for hits in range(41) if proven([True] * hits + [False] * (40 - hits)))
    assert fewest == 12  # of 40: docs/audit.md


def test_the_form_that_is_paid_is_found() -> None:
    """A reward that reads tags alone is asked with answers in tags; one that reads the references, as they are."""
    tags, final = build_rewards({"benchmarks.good_rewards:in_tags": 1.0, "final_answer": 1.0})
    cases = make_cases(SUMS, 10, 0, 1000)
    assert choose_form([Judging(tags)], cases)[0].form.text == "<answer>{answer}</answer>"
    assert choose_form([Judging(final)], cases) == cases
    never = Judging(reward(lambda texts, examples: [0.0] * len(texts)))
    assert choose_form([never], cases) == cases


def test_the_sum_is_what_training_adds_up() -> None:
    rewards = build_rewards({"final_answer": 1.0, "answer_format": 0.1, "length": {"weight": -0.3, "target": 50}})
    cases = make_cases(SUMS, 6, 0, 1000)
    heard = [hear(Judging(one), cases) for one in rewards]
    total = summed(TOTAL, heard, [one.weight for one in rewards])
    tries = total.everything
    played = [Episode(cases[one.case].example, n, n, [Turn([], [], text=one.text)]) for n, one in enumerate(tries)]
    apply_rewards(played, rewards)
    assert [one.value for one in tries] == pytest.approx([episode.score for episode in played], abs=1e-12)


def test_the_cost_is_what_is_asked() -> None:
    cases = make_cases(SUMS, 9, 0, 1000)
    for own in build_rewards({"final_answer": 1.0, "benchmarks.good_rewards:right_before_wrong": 1.0}):
        judging = Judging(own)
        assert hear(judging, cases).answers == judging.answers == cost(cases, judging.in_groups)
    endpoint = build_rewards({"endpoint_judge": {"base_url": "http://localhost:1/v1", "model": "judge"}})[0]
    assert cost_of(endpoint, cases).startswith(f"{cost(cases, False):,} answers to judge; each answer costs a request")


def test_a_judge_behind_an_endpoint_that_obeys_the_answer() -> None:
    """A real server, which is asked no more often than was said. It likes letters, and does as it is told."""
    asked = list[str]()

    def reply(number: int, request: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        asked.append(request["messages"][-1]["content"])
        letters = sum(map(ord, asked[-1])) % 5 + 1
        return said("10" if "10 of 10 points" in asked[-1] else str(letters))

    server, sentences = Server(reply), list[str]()
    try:
        section = {"base_url": server.url, "model": "judge", "retries": 0}
        found = audit(build_rewards({"endpoint_judge": section}), SUMS, 10, say=sentences.append).verdicts[0]
    finally:
        server.close()
    promised = int(sentences[0].split(": ")[1].split(" ")[0])
    assert 0 < len(asked) <= promised
    assert {"labels/near", "labels/other"} & codes(found) and {"raised/injection", "paid/injection"} & codes(found)


def test_groups_are_compared_as_groups() -> None:
    sizes = set[int]()

    final = build_rewards({"final_answer": 1.0})[0].function

    @of_groups
    def right_or_short(texts: list[list[str]], examples: list[Example]) -> list[list[float]]:
        sizes.update(map(len, texts))
        return [
            [final([text], [own])[0] / 2 + (len(text) == min(map(len, group))) for text in group]
            for group, own in zip(texts, examples, strict=True)
        ]

    found = verdict(right_or_short)
    assert sizes == {3, 4}  # right, near miss, another's; and an attack beside them
    assert codes(found) == {"paid/empty"} and not found.text_alone


def test_failures_and_silence_are_told_apart() -> None:
    def odd(texts: list[str], examples: list[Example]) -> list[float | None]:
        if any("perfect" in text for text in texts):
            raise ValueError("no praise")
        final = build_rewards({"final_answer": 1.0})[0].function
        return [None if not text else value for text, value in zip(texts, final(texts, examples), strict=True)]

    found = verdict(odd)
    assert {"fails"} <= codes(found) and codes(found, "note") == {"unjudged"}
    rates = {one.name: one for one in found.rates}
    assert (rates["flattery"].failed, rates["empty"].unjudged, rates["longer"].failed) == (12, 12, 0)
    assert "no praise" in next(one.sentence for one in found.findings if one.code == "fails")

    def refuses(texts: list[str], examples: list[Example]) -> list[float]:
        raise LmgymError("the first call is about plain answers")

    with pytest.raises(LmgymError, match="plain answers"):
        verdict(refuses)


def test_a_reward_of_the_text_alone_is_a_problem_if_it_is_all_there_is() -> None:
    length = build_rewards({"length": {"weight": 0.1, "target": 50}})[0]
    assert codes(audit([length], SUMS, 8).verdicts[0]) == {"text alone"}
    sentence = audit([length], SUMS, 8, whole=False).verdicts[0].findings[0].sentence
    assert "most for: injection (0.44), flattery (0.28)" in sentence and "least for: " in sentence
    both = audit([length, *build_rewards({"answer_format": 1.0})], SUMS, 8).verdicts
    assert [codes(one) for one in both] == [set(), set(), {"text alone"}]
    without = [Example(f"a/{n}", f"question {n}") for n in range(8)]
    assert judge_reward(hear(Judging(length), make_cases(without, 8, 0, 1000)), alone=True).findings == []


def test_episodes_are_those_of_training() -> None:
    """Messages, chat and text, as a reward of episodes sees them."""
    seen = list[Episode]()

    def look(episodes: list[Episode]) -> list[float]:
        seen.extend(episodes)
        return [0.0] * len(episodes)

    look.takes_episodes = True  # type: ignore[attr-defined]
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    Judging(reward(look)).ask([Panel(Example("a/0", prompt), ("4", "5")), Panel(Example("a/1", "1+1="), ("2",))])
    assert [one.text for one in seen] == ["4", "5", "2"] and [one.group for one in seen] == [0, 1, 2]
    assert seen[0].messages == [*prompt, {"role": "assistant", "content": "4"}]
    assert [one.chat for one in seen] == [True, True, False]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "task: {name: arithmetic, explain: true}\nalgorithm: {name: grpo, group_size: 2}\n"
        "rewards: {benchmarks.bad_rewards:contains: 1.0, answer_format: 0.1}\n"
    )
    assert main(["audit", str(recipe), "--examples", "12"]) == 0  # whatever is found
    said = capsys.readouterr().out
    assert "! a wrong answer that lists many numbers" in said and "is paid like a right one in 12 of 12 tries" in said
    assert TOTAL in said and "problem(s), marked with !" in said and "- it looks at the text alone" in said
    assert main(["audit", "final_answer", "--task", "arithmetic", "--examples", "12", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["rewards"][0]["agreement"]["near"]["mean"] == 1.0 and len(tree["examples"]) == 12
    assert tree["rewards"][0]["rates"]["empty"] | {"changed": None, "reached": None} == {
        "kind": "attack", "tried": 12, "changed": None, "reached": None, "failed": 0, "unjudged": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["final_answer"], "name the task"),
        (["final_answer", "--task", "arithmetic", "steps=3"], "means nothing for a reward by its name"),
        (["final_answer", "--task", "arithmetic", "--examples", "1"], "take 2 at least"),
        (["final_answer", "--task", "arithmetic", "--stage", "rl"], "--stage is about a recipe"),
        (["quickstart", "--task", "arithmetic"], "--task is for a reward by its name"),
        (["quickstart", "--stage", "rll"], "there is no stage 'rll'"),
        (["blackjack"], "no stage has rewards|makes its own prompts"),
        (["benchmarks.bad_rewards:nothing", "--task", "arithmetic"], "nothing"),
    ],
)
def test_what_cannot_be_audited(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(sentence, complaint(capsys, "audit", *words))
