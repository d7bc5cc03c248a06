"""Judges: what they would say next, read by hand and through transformers, and a real endpoint on localhost."""

import json
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmgym.core.errors import LmgymError
from lmgym.envs.stepwise import StepwiseEnv
from lmgym.processes.pool import Failure
from lmgym.rewards.base import Reward, call_reward, check_examples
from lmgym.rewards.building import build_rewards
from lmgym.rewards.learned.endpoint import endpoint_judge
from lmgym.rewards.learned.judge import judge_score, judge_yes_no
from lmgym.rewards.learned.judge_prompts import actions
from lmgym.rewards.learned.pairs import endpoint_pairs, in_group, verdict
from lmgym.rewards.learned.ranking import endpoint_ranking, orders
from lmgym.rollouts.rollout import apply_rewards
from lmgym.types import Episode, Example, Turn
from tests import learned_models as tiny

EXAMPLE = Example("a/0", "How much is half of 48?", ("48/2=24\n#### 24",))
SHARE = tiny.share_of(128)  # the prompts here are shorter
QUESTION = "{answer}? {question}"


def answered(*texts: str, example: Example = EXAMPLE) -> list[Episode]:
    return [Episode(example, 0, n, [Turn([], [], text=text)]) for n, text in enumerate(texts)]


def stepwise() -> Episode:
    """What rollout.collect makes of two lines in env stepwise, the first in three pieces around a calculator."""
    turns = [
        Turn([], [1], text="half: <<48/2=", stop="stop", continuation="24>>", unfinished=True),
        Turn([], [1], text="24\n", stop="stop", continuation=""),
        Turn([], [1], text="#### 24", stop="eos"),
    ]
    env = StepwiseEnv(calculator=True)
    env.reset(EXAMPLE, seed=0)
    steps = [env.step(turn.text, turn.stop) for turn in turns]
    assert [step.continuation or "" for step in steps] == [turn.continuation or "" for turn in turns]
    assert [step.unfinished for step in steps] == [turn.unfinished for turn in turns]
    return Episode(EXAMPLE, 0, 0, turns)


def scored(name: str, episodes: list[Episode], **arguments: Any) -> list[float]:
    return call_reward(build_rewards({name: arguments})[0], episodes)


# ---------------------------------------------------------------- scores


def numbers(**likely: float) -> dict[str, float]:
    """Logits of the number tokens: -100 but for the named ones ("n6": 1.0)."""
    return {**{str(n): -100.0 for n in range(1, 11)}, "\u01201": -100.0} | {
        name.replace("n", "").replace("space", "\u0120"): value for name, value in likely.items()
    }


@pytest.mark.parametrize(
    ("logits", "highest", "score"),
    [
        (numbers(n6=1.0, n10=1.0), 10, 0.8),  # (6 + 10) / 2 / 10, worked by hand like all of these
        (numbers(n7=0.0), 10, 0.7),
        (numbers(n1=math.log(3), n5=math.log(1)), 10, 0.2),  # (3 * 1 + 5) / 4 / 10
        (numbers(n1=math.log(3), n5=math.log(1)), 5, 0.4),
        (numbers(n1=math.log(2), spacen1=math.log(1), n5=math.log(1)), 10, 0.2),  # " 1" says 1 too
        (dict.fromkeys(map(str, range(1, 11)), 0.0) | {"\u01201": -100.0, "x": 9.0}, 10, 0.55),  # "x" is no number
    ],
)
def test_scores_by_hand(tmp_path: Path, logits: dict[str, float], highest: int, score: float) -> None:
    folder = tiny.constant(tmp_path, logits)
    assert scored("judge_score", answered("24", "25"), model=folder, highest=highest) == pytest.approx([score] * 2)


def test_scores_are_llm_rls(tmp_path: Path) -> None:
    """LLM_RL's way: softmax over the ten tokens' logits at the last place, expectation over ten."""
    folder = tiny.causal(tmp_path, seed=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts = ["24", "", "I do not know.", "\U0001f600"]
    wanted = []
    for text in texts:
        messages = [
            {"role": "system", "content": "Judge."},
            {"role": "user", "content": f"Problem: How much is half of 48?\nReference: 48/2=24\n#### 24\nStep: {text}"},
            {"role": "assistant", "content": "Score: "},
        ]
        prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True) + "Score: "
        with torch.no_grad():
            logits = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1]
        ten = logits[tokenizer.convert_tokens_to_ids([str(n) for n in range(1, 11)])].softmax(-1)
        wanted.append(float((ten * torch.arange(1, 11)).sum()) / 10)
    assert max(wanted) - min(wanted) > 1e-3
    template = "Problem: {prompt}\nReference: {reference}\nStep: {answer}"
    found = scored("judge_score", answered(*texts), model=folder, template=template, system="Judge.", begin="Score: ")
    assert found == pytest.approx(wanted, abs=SHARE)


def test_a_judge_without_template_reads_plain_text(tmp_path: Path) -> None:
    folder = tiny.causal(tmp_path, seed=1, template=False)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(**tokenizer("Judge.\n\n24Score: ", return_tensors="pt")).logits[0, -1]
    ten = logits[tokenizer.convert_tokens_to_ids([str(n) for n in range(1, 11)])].softmax(-1)
    wanted = float((ten * torch.arange(1, 11)).sum()) / 10
    found = scored("judge_score", answered("24"), model=folder, template="{answer}", system="Judge.", begin="Score: ")
    assert found == pytest.approx([wanted], abs=SHARE)


# ---------------------------------------------------------------- questions


def test_yes_or_no_by_hand(tmp_path: Path) -> None:
    logits = {"Yes": math.log(6), "\u0120Yes": math.log(3), "No": math.log(1), "\u0120No": math.log(2), "x": 9.0}
    folder = tiny.constant(tmp_path, logits)
    assert scored("judge_yes_no", answered("24"), model=folder) == pytest.approx([9 / 12])
    assert scored("judge_yes_no", answered("24"), model=folder, yes="No", no="Yes") == pytest.approx([3 / 12])


def test_yes_or_no_is_the_mean_over_the_questions(tmp_path: Path) -> None:
    folder = tiny.causal(tmp_path, seed=2)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    questions, shares = ["Is it right?", "Is it new?", "Is it short?"], []
    words = ["Yes", "\u0120Yes", "No", "\u0120No"]
    for question in questions:
        messages = [{"role": "user", "content": f"24? {question}"}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        with torch.no_grad():
            logits = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1]
        likely = logits[tokenizer.convert_tokens_to_ids(words)].softmax(-1)
        shares.append(float(likely[0] + likely[1]))
    assert max(shares) - min(shares) > 1e-3
    arguments = {"model": folder, "template": QUESTION, "system": "", "questions": questions}
    assert scored("judge_yes_no", answered("24"), **arguments) == pytest.approx([sum(shares) / 3], abs=SHARE)
    right = answered("so\n#### 24", "#### 25", "24")  # only the first announces the reference's answer
    found = scored("judge_yes_no", right, **arguments, correct_is_one=True)
    judged = scored("judge_yes_no", right, **arguments)
    assert found == [1.0, *judged[1:]] and judged[0] < 0.99


# ---------------------------------------------------------------- line by line


def test_actions_of_a_stepwise_episode() -> None:
    assert actions(stepwise()) == [("", "half: <<48/2=24>>24\n"), ("half: <<48/2=24>>24\n", "#### 24")]
    assert "".join(line for _, line in actions(stepwise())) == stepwise().text
    assert actions(Episode(EXAMPLE, 0, 0)) == []


def test_each_line_is_judged_in_its_context(tmp_path: Path) -> None:
    folder = tiny.causal(tmp_path, seed=3)
    template = "[{before}][{answer}]"
    arguments = {"model": folder, "system": "", "highest": 9}
    first = scored("judge_score", answered("half: <<48/2=24>>24\n"), template="[][{answer}]", **arguments)
    second = scored("judge_score", answered("#### 24"), template="[half: <<48/2=24>>24\n][{answer}]", **arguments)
    assert abs(first[0] - second[0]) > 1e-4
    found = scored("judge_score", [stepwise()], template=template, per="turn", **arguments)
    assert found == pytest.approx([(first[0] + second[0]) / 2], abs=SHARE)
    whole = scored("judge_score", [stepwise()], template=template, **arguments)
    assert whole == pytest.approx(scored("judge_score", answered(stepwise().text), template=template, **arguments))
    nothing = Episode(EXAMPLE, 0, 0)
    assert scored("judge_score", [nothing], template=template, per="turn", **arguments) == [0.0]


def test_each_line_is_paid_for_itself(tmp_path: Path) -> None:
    """LLM_RL's stepwise rewards: every line gets what the judge says of it. A line that a calculator interrupted is two
    turns, and paid on the second."""
    folder = tiny.causal(tmp_path, seed=3)
    settings = {"model": folder, "system": "", "highest": 9, "template": "[{before}][{answer}]"}
    begun = replace(stepwise(), turns=stepwise().turns[:2])
    alone = scored("judge_score", [begun, stepwise()], per="last", **settings)
    assert sum(alone) / 2 == pytest.approx(scored("judge_score", [stepwise()], per="turn", **settings)[0], abs=SHARE)
    episode = stepwise()
    apply_rewards(
        [episode], build_rewards({"judge_score": {"weight": 2.0, "per": "last", "each_turn": True, **settings}})
    )
    assert [turn.reward for turn in episode.turns] == pytest.approx([0.0, 2 * alone[0], 2 * alone[1]], abs=SHARE)
    assert episode.score == pytest.approx(2 * sum(alone), abs=SHARE)
    assert episode.reward_components["judge_score"] == pytest.approx(sum(alone), abs=SHARE)


def test_each_message_is_paid_for_itself() -> None:
    """Three messages of two, one and three words; with a second reward on the last one."""
    turns = [Turn([], [], text=text) for text in ("one two", "three", "four five six")]
    episode = Episode(EXAMPLE, 0, 0, turns)
    apply_rewards(
        [episode, Episode(EXAMPLE, 0, 1)], build_rewards({"words": {"each_turn": True}, "length": {"target": 3}})
    )
    assert [turn.reward for turn in turns] == [2.0, 1.0, 3.0 + 1.0]
    assert (episode.reward_components, episode.score) == ({"words": 6.0, "length": 1.0}, 7.0)
    with pytest.raises(LmgymError, match="'shaping' pays tokens and 'each_turn' turns"):
        build_rewards({"words": {"each_turn": True, "shaping": True}})


def test_several_messages_have_no_context_to_be_judged_in(tmp_path: Path) -> None:
    folder = tiny.constant(tmp_path, numbers(n7=0.0))
    conversation = Episode(EXAMPLE, 0, 0, [Turn([], [], text="one"), Turn([], [], text="two")])
    with pytest.raises(LmgymError, match="has several messages"):
        scored("judge_score", [conversation], model=folder, per="turn")
    assert scored("judge_score", [conversation], model=folder) == pytest.approx([0.7])
    assert scored("judge_score", [conversation], model=folder, per="last") == pytest.approx([0.7])


def test_an_answer_may_be_cut_and_what_is_around_it_stays(tmp_path: Path) -> None:
    folder = tiny.causal(tmp_path, longest=64, seed=4)
    arguments = {"model": folder, "system": "", "highest": 9, "begin": "S:"}
    template = "{answer}?"
    around = len("<|im_start|>") * 0 + len("user\n") + len("?") + len("\n") + len("assistant\n") + len("S:") + 3
    room = 64 - around  # three control tokens; every character is a token
    text = "".join(chr(97 + n % 26) for n in range(200))
    exact = scored("judge_score", answered(text[:room], text[-room:]), template=template, **arguments)
    for side, wanted in (("right", exact[0]), ("left", exact[1])):
        found = scored("judge_score", answered(text), template=template, truncation=side, **arguments)
        assert found == pytest.approx([wanted], abs=SHARE)
    with pytest.raises(LmgymError, match=f"has {200 + around} tokens, and .* reads 64; write 'truncation: left'"):
        scored("judge_score", answered(text), template=template, **arguments)
    with pytest.raises(LmgymError, match="shorten the prompt or the template"):
        scored("judge_score", answered("x"), template="y" * 70 + "{answer}", truncation="left", **arguments)


# ---------------------------------------------------------------- what users are told


def complaint(section: dict[str, Any], examples: list[Example] | None = None) -> str:
    with pytest.raises(LmgymError) as raised:
        check_examples(build_rewards(section), examples or [EXAMPLE])
    return str(raised.value)


def test_users_are_told_what_a_judge_lacks(tmp_path: Path) -> None:
    folder = tiny.constant(tmp_path / "judge", {})
    encoder = tiny.encoder(tmp_path / "encoder")
    check_examples(build_rewards({"judge_score": {"model": folder}, "judge_yes_no": {"model": folder}}), [EXAMPLE])
    assert "needs a causal language model" in complaint({"judge_score": {"model": encoder}})
    told = complaint({"judge_score": {"model": folder, "highest": 11}})
    assert "key 'rewards.judge_score.highest': '11' is no single token" in told and "smaller number" in told
    told = complaint({"judge_yes_no": {"model": folder, "yes": "Sure"}})
    assert "key 'rewards.judge_yes_no.yes': 'Sure' is no single token" in told
    told = complaint({"judge_score": {"model": folder, "template": "{anwser}"}})
    assert "no field '{anwser}'; did you mean 'answer'?" in told
    assert "must have {answer}" in complaint({"judge_score": {"model": folder, "template": "{prompt}"}})
    assert "at least one question" in complaint({"judge_yes_no": {"model": folder, "questions": []}})
    told = complaint({"judge_yes_no": {"model": folder, "correct_is_one": True}}, [Example("a/7", "?")])
    assert "'a/7' has none" in told
    with pytest.raises(LmgymError, match=r"\{reference\}, and example 'a/7' has none"):
        judge_score(answered("4", example=Example("a/7", "?")), model=folder, template="{reference}{answer}")


def test_braces_of_latex_are_left_alone(tmp_path: Path) -> None:
    folder = tiny.causal(tmp_path, seed=5)
    arguments = {"model": folder, "system": "", "highest": 9}
    one = judge_score(answered("{prompt}"), template=r"\boxed{4} {answer}", **arguments)
    other = judge_score(answered("x"), template=r"\boxed{4} {prompt}{answer}", **arguments)
    literal = answered("x", example=Example("a/0", "{prompt}"))
    assert one != other  # a field's name in an answer is no field
    assert judge_score(literal, template=r"\boxed{4} {prompt}{answer}", **arguments) != other


# ---------------------------------------------------------------- an endpoint


class Server:
    """A chat endpoint on localhost: it answers each request with what `reply` makes of it, (status, headers, body)."""

    def __init__(self, reply: Callable[[int, dict[str, Any]], tuple[int, dict[str, str], bytes]]) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.open = self.most = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # what a redirected POST becomes
                self.do_POST()

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
                with outer.lock:
                    outer.requests.append((self.path, dict(self.headers), body))
                    number = len(outer.requests)
                    outer.open += 1
                    outer.most = max(outer.most, outer.open)
                try:
                    status, headers, content = reply(number, body)
                finally:
                    with outer.lock:
                        outer.open -= 1
                with suppress(ConnectionError):  # who asked may have given up
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(content)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(reply: Callable[[int, dict[str, Any]], tuple[int, dict[str, str], bytes]]) -> Server:
        servers.append(Server(reply))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def said(text: str | None) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


def ask(server: Server, *texts: str, **arguments: Any) -> list[float | Failure]:
    quick = {"base_url": server.url, "model": "judge", "wait": 0.001, **arguments}
    return endpoint_judge(list(texts), [EXAMPLE] * len(texts), **quick)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("8", 0.8),
        ("8/10", 0.8),
        ("Score: 8 out of 10.", 0.8),
        ("Step 1 is right, step 2 is not. **7.5**", 0.75),
        ("<think>10? 9?</think>3", 0.3),
        ("10", 1.0),
    ],
)
def test_numbers_are_read(serve: Callable[..., Server], reply: str, score: float) -> None:
    assert ask(serve(lambda number, body: said(reply)), "24") == pytest.approx([score])


@pytest.mark.parametrize("reply", ["eleven", "11", "0", "-3", "", None, "<think>8", "9" * 500])
def test_what_is_no_number_is_refused_or_has_its_price(serve: Callable[..., Server], reply: str | None) -> None:
    server = serve(lambda number, body: said(reply))
    [failure] = ask(server, "24")
    assert isinstance(failure, Failure) and "the reply for example 'a/0' has no number from 1 to 10" in failure.message
    assert ask(server, "24", unreadable=0.0) == [0.0]


def test_an_answer_whose_request_fails_is_not_judged_and_the_others_are(serve: Callable[..., Server]) -> None:
    """In a step it is left out; where nothing works, the run ends without a wait for the rest."""

    def reply(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        return (400, {}, b"too long") if body["messages"][-1]["content"] == "b" else said("9")

    values = ask(serve(reply), "a", "b", "c", template="{answer}", concurrency=1)
    assert [values[0], values[2]] == [0.9, 0.9]
    assert isinstance(values[1], Failure) and "status 400 (too long)" in values[1].message
    dead = serve(lambda number, body: (401, {}, b"no"))
    with pytest.raises(LmgymError, match="status 401"):
        ask(dead, *"abcdefgh", template="{answer}", concurrency=2)
    assert len(dead.requests) < 8


def test_yes_and_no_are_read(serve: Callable[..., Server]) -> None:
    replies = {"a": "Yes.", "b": "no", "c": "Yes? I think NO", "d": "knows, yesterday: yes"}
    server = serve(lambda number, body: said(replies[body["messages"][-1]["content"]]))
    assert ask(server, *replies, read="yes_no", template="{answer}") == [1.0, 0.0, 0.0, 1.0]
    [failure] = ask(serve(lambda number, body: said("maybe")), "24", read="yes_no")
    assert isinstance(failure, Failure) and "has no yes or no: 'maybe'" in failure.message


def test_the_request_is_what_openai_documents(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret\n")
    server = serve(lambda number, body: said("5"))
    arguments = {"template": "{prompt}|{answer}|{reference}", "system": "Judge.", "key_variable": "JUDGE_KEY"}
    assert ask(server, "24", "24", "\ud800", options={"max_tokens": 8}, **arguments) == [0.5] * 3
    assert len(server.requests) == 2  # equal questions are asked once
    path, headers, body = min(server.requests, key=lambda request: request[2]["messages"][1]["content"])
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer sk-secret"
    content = "How much is half of 48?|24|48/2=24\n#### 24"
    messages = [{"role": "system", "content": "Judge."}, {"role": "user", "content": content}]
    assert body == {"model": "judge", "messages": messages, "temperature": 0, "max_tokens": 8}


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_fails_for_now_is_tried_again(serve: Callable[..., Server], status: int) -> None:
    server = serve(lambda number, body: (status, {}, b"busy") if number < 3 else said("9"))
    assert ask(server, "24", retries=2) == [0.9]
    assert len(server.requests) == 3
    with pytest.raises(LmgymError, match=f"failed 2 times; the last time: status {status} .busy."):
        ask(serve(lambda number, body: (status, {}, b"busy")), "24", retries=1)


def test_the_server_says_how_long_to_wait(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    # Its own clock: other threads of this process may sleep meanwhile, such as Ray's.
    monkeypatch.setattr("lmgym.core.endpoint.time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic))
    headers = [{"Retry-After": "7"}, {}, {"Retry-After": "1e9"}, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}]
    server = serve(lambda number, body: (429, headers[number - 1], b"") if number < 5 else said("9"))
    assert ask(server, "24", wait=0.5) == [0.9]
    assert waits == [7.0, 1.0, 60.0, 4.0]  # what it asks for, up to a minute; else .5 * 2^attempt


def test_what_is_wrong_is_told_at_once_and_without_the_key(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    server = serve(lambda number, body: (401, {}, b"invalid key sk-secret"))
    with caplog.at_level(logging.DEBUG), pytest.raises(LmgymError, match="refused the request: status 401") as raised:
        ask(server, "24", key_variable="JUDGE_KEY")
    chain: BaseException | None = raised.value
    while chain is not None:
        assert "sk-secret" not in str(chain) and "sk-secret" not in repr(chain)
        chain = chain.__cause__ or chain.__context__
    assert "sk-secret" not in caplog.text and len(server.requests) == 1
    reward = build_rewards({"endpoint_judge": {"base_url": server.url, "model": "m", "key_variable": "JUDGE_KEY"}})[0]
    assert "sk-secret" not in repr(reward)
    elsewhere = serve(lambda number, body: said("9"))
    for status in (302, 307):
        moved = serve(lambda number, body, s=status: (s, {"Location": f"{elsewhere.url}/chat/completions"}, b""))
        with pytest.raises(LmgymError, match=f"refused the request: status {status}"):
            ask(moved, "24", key_variable="JUDGE_KEY")
    assert elsewhere.requests == []  # a redirect would have carried the key away


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{"message": 3}]}'])
def test_what_is_no_chat_completion_is_told(serve: Callable[..., Server], body: bytes) -> None:
    with pytest.raises(LmgymError, match="did not send a chat completion"):
        ask(serve(lambda number, _: (200, {}, body)), "24")


def test_a_slow_server_is_given_up(serve: Callable[..., Server]) -> None:
    over = threading.Event()

    def sleep(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        over.wait(20)
        return said("9")

    try:
        with pytest.raises(LmgymError, match="failed 2 times; the last time: TimeoutError"):
            ask(serve(sleep), "24", seconds=0.2, retries=1)
    finally:
        over.set()
    with pytest.raises(LmgymError, match="failed 1 times; the last time: URLError"):
        endpoint_judge(["24"], [EXAMPLE], base_url="http://127.0.0.1:9/v1", model="judge", retries=0)


KEY = "sk-" + "".join(f"{number:02d}/" for number in range(40))


@pytest.mark.parametrize("place", [0, 60, 93, 150, 197, 930, 990])
@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("status", [200, 401, 503])
def test_an_echoed_key_is_in_no_message_wherever_it_is_cut(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, status: int, escaped: bool, place: int
) -> None:
    """The server repeats the key at a place where some bound on the length of a message cuts it."""
    echo = "." * place + (KEY.replace("/", "\\/") if escaped else KEY) + "."
    tell_nothing_of_the_key(serve(lambda number, body: (status, {}, echo.encode())).url, monkeypatch)
    tell_nothing_of_the_key(serve(lambda number, body: said(echo)).url, monkeypatch)


@pytest.mark.parametrize("line", ["HTTP/1.1 401 {}", "HTTP/1.1 503 {}", "HTTP/1.1 {}", "{}", "HTTP/1.1 200 OK\r\n{}"])
def test_a_key_in_the_servers_headers_is_in_no_message(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (0, 150):
        server = Dripping(f"{line.format('.' * place + KEY)}\r\nContent-Length: 0\r\n\r\n".encode(), b"")
        try:
            tell_nothing_of_the_key(server.url, monkeypatch, seconds=1.0)  # the last of these never ends its answer
        finally:
            server.close()


def tell_nothing_of_the_key(url: str, monkeypatch: pytest.MonkeyPatch, seconds: float = 5.0) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    arguments: dict[str, Any] = {"base_url": url, "model": "judge", "key_variable": "JUDGE_KEY", "read": "yes_no"}
    try:
        [error] = endpoint_judge(["24"], [EXAMPLE], retries=0, seconds=seconds, **arguments)
        assert isinstance(error, Failure)
    except LmgymError as raised:
        error = raised
    while error is not None:
        told = f"{error} {error!r} {vars(error)}".replace("\\", "")
        assert not [start for start in range(0, len(KEY) - 12, 3) if KEY[start : start + 12] in told], told
        error = getattr(error, "__cause__", None) or getattr(error, "__context__", None)


class Dripping:
    """A server on localhost that sends `first`, then one byte of `drip` every 20 ms."""

    def __init__(self, first: bytes, drip: bytes) -> None:
        self.listener, self.over = socket.create_server(("127.0.0.1", 0)), threading.Event()
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"
        self.thread = threading.Thread(target=self.serve, args=(first, drip), daemon=True)
        self.thread.start()

    def serve(self, first: bytes, drip: bytes) -> None:
        with suppress(OSError):
            connection, _ = self.listener.accept()
            with connection, suppress(ConnectionError):
                connection.sendall(first)
                while not self.over.wait(0.02):
                    connection.sendall(drip)

    def close(self) -> None:
        self.over.set()
        self.listener.close()
        self.thread.join()


@pytest.mark.parametrize(
    ("first", "drip"),
    [
        (b"", b"H"),  # the status line
        (b"HTTP/1.1 200 OK\r\n", b"X"),  # a header
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),  # headers
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b"{"),  # the body
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n{\r\n"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 9999\r\n\r\n", b"."),  # the body of an error
        (b"HTTP/1.1 200 OK\r\n\r\n", b" "),  # a body without a length: the end of the connection looks like its own
    ],
)
def test_a_reply_that_drips_is_given_up_at_the_limit(first: bytes, drip: bytes) -> None:
    """Each byte comes in time for a socket's own limit; without an end of its own the test would take minutes."""
    server = Dripping(first, drip)
    begun = time.monotonic()
    try:
        with pytest.raises(LmgymError, match=r"failed 1 times; the last time: (TimeoutError|status 500)"):
            endpoint_judge(["24"], [EXAMPLE], base_url=server.url, model="judge", seconds=0.5, retries=0)
    finally:
        server.close()
    assert time.monotonic() - begun < 10


def test_requests_are_on_their_way_together_and_answers_in_order(serve: Callable[..., Server]) -> None:
    together = threading.Barrier(4)

    def reply(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        together.wait(20)  # opens only when four requests are there at once
        return said(body["messages"][-1]["content"])

    server = serve(reply)
    texts = [str(number) for number in range(1, 9)]
    assert ask(server, *texts, template="{answer}", concurrency=4) == [number / 10 for number in range(1, 9)]
    assert server.most == 4


def test_users_are_told_what_an_endpoint_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    right = {"base_url": "http://localhost:1/v1", "model": "judge"}
    check_examples(build_rewards({"endpoint_judge": right}), [EXAMPLE])  # asks nothing
    told = complaint({"endpoint_judge": {**right, "key_variable": "JUDGE_KEY"}})
    assert "the environment variable JUDGE_KEY is not set, or empty" in told
    monkeypatch.setenv("JUDGE_KEY", "sk-\nsecret")
    told = complaint({"endpoint_judge": {**right, "key_variable": "JUDGE_KEY"}})
    assert "characters that no key can have" in told and "secret" not in told
    for address in ("localhost:8000", "ftp://x/v1", "http://me:word@host/v1", "http://host/v1?key=3"):
        told = complaint({"endpoint_judge": {**right, "base_url": address}})
        assert "is no plain address" in told and "word" not in told
    assert "must be at least 1" in complaint({"endpoint_judge": {**right, "concurrency": 0}})
    assert "it must be above 0 and above 12" in complaint({"endpoint_judge": {**right, "lowest": 12}})
    assert "seconds' is 0" in complaint({"endpoint_judge": {**right, "seconds": 0}})


def test_an_endpoint_limits_itself() -> None:
    reward: Reward = build_rewards({"endpoint_judge": {"base_url": "http://localhost:1/v1", "model": "judge"}})[0]
    assert reward.function.limits_itself  # no alarm, whose seconds are for all texts together
    assert not getattr(judge_yes_no, "limits_itself", False)


# A ranking


def shown_in(body: dict[str, Any]) -> list[str]:
    """The solutions of a question, in its order."""
    return re.findall(r"^Solution [A-Z]:\n(.*)$", body["messages"][-1]["content"], re.MULTILINE)


def ranked(server: Server, *groups: list[str], **arguments: Any) -> list[list[float | Failure | None]]:
    return compared(endpoint_ranking, server, *groups, **arguments)


def compared(
    reward: Callable[..., Any], server: Server, *groups: list[str], **arguments: Any
) -> list[list[float | Failure | None]]:
    """What a reward of groups says of each; the reference of every example is "champion"."""
    quick = {"base_url": server.url, "model": "judge", "wait": 0.001, **arguments}
    examples = [Example(f"a/{n}", f"question {n}", references=("champion",)) for n in range(len(groups))]
    scored = [Episode(examples[n], n, 0, [Turn([], [], text=text)]) for n, group in enumerate(groups) for text in group]
    values = iter(reward(scored, **quick))
    return [[next(values) for _ in group] for group in groups]


def test_an_order_is_read_and_equal_answers_are_shown_once(serve: Callable[..., Server]) -> None:
    def by_length(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        letters = sorted(range(len(shown_in(body))), key=lambda place: -len(shown_in(body)[place]))
        return said("<think>A or B?</think>A is short, I think.\n" + " > ".join("ABCD"[place] for place in letters))

    server = serve(by_length)
    assert ranked(server, ["aaa", "a", "aa", "a"], ["b", "bb"], ["c", "c"]) == [
        [1.0, 0.0, 0.5, 0.0], [0.0, 1.0], [None, None],
    ]  # fmt: skip
    asked = [shown_in(body) for _, _, body in server.requests]
    assert sorted(map(len, asked)) == [2, 2, 3, 3]
    first, second = (own for own in asked if len(own) == 3)
    assert first == second[::-1] and {*first} == {"a", "aa", "aaa"}


@given(st.lists(st.text("xyz", min_size=1, max_size=3), min_size=2, max_size=6), st.integers(1, 5), st.randoms())
def test_the_order_of_a_question_depends_on_the_texts_and_not_on_their_order(
    group: list[str], repeats: int, chance: Any
) -> None:
    found, mixed = orders(group, EXAMPLE, repeats), chance.sample(group, len(group))
    assert found == orders(mixed, EXAMPLE, repeats)
    assert len(found) == (repeats if len({*group}) > 1 else 0)
    assert all(sorted(one) == sorted({*group}) for one in found)
    assert all(found[place] == found[place - 1][::-1] for place in range(1, len(found), 2))


def test_a_judge_that_looks_at_the_place_alone_gives_all_the_same(serve: Callable[..., Server]) -> None:
    server = serve(lambda number, body: said(" > ".join("ABCDEF"[: len(shown_in(body))])))
    assert ranked(server, ["a", "b", "c"], ["d", "e", "f", "g"]) == [[0.5] * 3, [0.5] * 4]
    once = ranked(server, ["a", "b", "c"], repeats=1)
    assert sorted(once[0]) == [0.0, 0.5, 1.0]  # what the reversed order is for


def test_a_reply_without_an_order_judges_nothing(serve: Callable[..., Server]) -> None:
    replies = {"a": "B > A", "c": "A > A > B", "e": "the first one"}

    def reply(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        return said(replies[min(shown_in(body))])

    judged, *others = ranked(serve(reply), ["a", "b"], ["c", "d"], ["e", "f"], repeats=1)
    assert sorted(judged) == [0.0, 1.0]
    assert all("has no line with each of A, B once" in value.message for group in others for value in group)
    with pytest.raises(LmgymError, match="orders 26 answers at most, and a group has 27"):
        ranked(serve(reply), [str(number) for number in range(27)])
    for name in ("repeats", "concurrency"):
        with pytest.raises(LmgymError, match=rf"endpoint_ranking\.{name}' must be at least 1, not 0"):
            ranked(serve(reply), ["a", "b"], **{name: 0})


# Pairs


def longer(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """A judge that likes what is longer."""
    one, other = map(len, shown_in(body))
    return said("A" if one > other else "B" if other > one else "It is a TIE")


def test_pairs_are_asked_in_both_orders_and_equal_answers_once(serve: Callable[..., Server]) -> None:
    server = serve(longer)
    group, equal = compared(endpoint_pairs, server, ["aaa", "a", "aa", "a"], ["c", "c"])
    assert equal == [None, None]
    asked = sorted(tuple(shown_in(body)) for _, _, body in server.requests)
    assert asked == sorted((one, other) for one in ("a", "aa", "aaa") for other in ("a", "aa", "aaa") if one != other)
    longest, shortest, middle, again = group
    assert longest > middle > shortest == again and middle == pytest.approx(0.5)  # type: ignore[operator]
    assert longest + shortest == pytest.approx(1.0)  # type: ignore[operator]


def test_a_judge_of_pairs_that_looks_at_the_place_alone_gives_all_the_same(serve: Callable[..., Server]) -> None:
    server = serve(lambda number, body: said("A"))
    for values in compared(endpoint_pairs, server, ["a", "b", "c"], ["d", "e", "f", "g"]):
        assert values == pytest.approx([0.5] * len(values))
    assert compared(endpoint_pairs, server, ["a", "b"], against="reference") == [[0.5, 0.5]]


def test_a_champion_is_met_twice_by_each_and_the_rest_is_a_win_rate(serve: Callable[..., Server]) -> None:
    server = serve(longer)
    assert compared(endpoint_pairs, server, ["much longer", "short", "champion", "12345678"], against="reference") == [
        [1.0, 0.0, 0.5, 0.5]
    ]
    assert len(server.requests) == 6 and all("champion" in shown_in(body) for _, _, body in server.requests)
    lonely = [Episode(Example("a/0", "?"), 0, 0, [Turn([], [], text="a")])]
    with pytest.raises(LmgymError, match="example 'a/0' has none; write against: group"):
        endpoint_pairs(lonely, base_url=server.url, model="judge", against="reference")


@given(st.integers(2, 12), st.integers(1, 12))
def test_each_meets_so_many_others(count: int, opponents: int) -> None:
    group = [str(number) for number in range(count)]
    pairs = in_group(group, EXAMPLE, opponents)
    met = [sum(text in pair for pair in pairs) for text in group]
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) and all(one != other for one, other in pairs)
    wanted = min(opponents, count - 1)
    assert sorted(met)[:-1] == [wanted] * (count - 1) and max(met) <= wanted + 1
    assert pairs == in_group(group[::-1], EXAMPLE, opponents)


def test_replies_of_pairs_are_read_by_their_last_word(serve: Callable[..., Server]) -> None:
    for reply, points in (
        ("A", 1.0),
        ("**B**", 0.0),
        ("B is longer, yet A", 1.0),
        ("tie", 0.5),
        ("<think>A</think>B", 0.0),
    ):
        assert verdict(reply) == points
    unread = compared(endpoint_pairs, serve(lambda number, body: said("neither one")), ["a", "b"])
    assert all("says neither A nor B nor TIE" in value.message for value in unread[0])  # type: ignore[union-attr]
    for name in ("opponents", "concurrency"):
        with pytest.raises(LmgymError, match=rf"endpoint_pairs\.{name}' must be at least 1, not 0"):
            compared(endpoint_pairs, serve(longer), ["a", "b"], **{name: 0})


def test_one_lost_reply_leaves_the_verdict_to_the_others(serve: Callable[..., Server]) -> None:
    def reply(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        return said("?") if shown_in(body) == ["a", "aa"] else longer(number, body)

    ((short, long),) = compared(endpoint_pairs, serve(reply), ["a", "aa"])
    assert long > 0.5 > short  # type: ignore[operator]
