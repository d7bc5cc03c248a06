"""Programs that ask an OpenAI endpoint, played as they are: exact ids, one training of each turn, repeatable runs."""

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
import yaml

from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.envs import program
from lmgym.envs.placement import make_envs
from lmgym.envs.program import AgentProgram
from lmgym.envs.vector import EnvFailure, InProcess
from lmgym.inference.base import Completion, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.policy import Policy
from lmgym.processes.keeper import Outcome, Program
from lmgym.processes.nursery import Nursery
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.rollout import BEGUN_DIFFERENTLY, collect
from lmgym.text.chat import decode
from lmgym.types import Episode, Example
from tests import models, runs
from tests.parity.test_resume import Interrupting
from tests.property.test_rendering import CHATML, Script, chat, chat_tokenizer, ids_of
from tests.torture import sessions

pytestmark = pytest.mark.processes
PROGRAM = str(Path(__file__).parent / "asking_program.py")
GAME = Example("game/0", "2+2=")


def environment(way: str, called: bool = False, **more: Any) -> AgentProgram:
    """The program in one of its ways, as a command or as a function that is called."""
    if called:
        return AgentProgram(function=f"tests.contract.asking_program:{way}", **more)
    return AgentProgram(command=[sys.executable, PROGRAM, way], **more)


def played(way: str, said: list[str], example: Example = GAME, **more: Any) -> Episode:
    [episode] = collect_one(environment(way, **more), said, example)
    return episode


class Stopped(Script):
    """Ends an answer at a stop string of the request, as an engine does."""

    def generate(self, requests: Any, sampling: Sampling, ended: Any = None) -> list[Completion]:
        return [
            Completion(own.ids[:-1], own.logprobs[:-1], "stop")
            if request.stop and decode(chat, own.ids).endswith(request.stop)
            else own
            for request, own in zip(requests, super().generate(requests, sampling, ended), strict=True)
        ]


def collect_one(env: AgentProgram, said: list[str], example: Example) -> list[Episode]:
    answers = [[*ids_of(text), chat.eos_token_id] for text in said]
    envs = InProcess(lambda: env)
    episodes = collect([(0, example)], Actor(Stopped([answers], [chat.eos_token_id]), chat), Sampling(), (0, "t"), envs)
    envs.close()
    return episodes


def written(turns: list[Any]) -> str:
    """A row as text, with its control tokens."""
    ids = [id for turn in turns for id in (*turn.prompt_ids, *turn.action_ids)]
    return str(chat.decode(ids, skip_special_tokens=False)).removeprefix("<bos>")


def said(*messages: str) -> str:
    parts = [f"<|im_start|>{role}\n{text}<|im_end|>" for role, text in (one.split(":") for one in messages)]
    return "\n".join(parts)


def test_a_conversation_is_one_row_and_pays_at_its_end() -> None:
    episode = played("talk", ["4", "22"])
    assert not episode.error and episode.terminated and episode.score == 0.75
    [row] = episode.rows()
    [seed] = [m["content"][-1] for m in episode.messages if m["content"].startswith("again")]
    assert written(row) == said("user:2+2=", "assistant:4", f"user:again {seed}", "assistant:22")
    assert [turn.reward for turn in episode.turns] == [0.0, 0.75]


def test_a_session_is_a_tree_and_each_turn_is_trained_once() -> None:
    texts = [f"t{number}" for number in range(13)]
    episode = played("branches", texts)
    assert not episode.error
    start = ("system:s<eos>", "user:a", "assistant:t0")
    paths = [
        [*start, "user:b", "assistant:t1"],
        [*start, "user:c", "assistant:t2", "user:d", "assistant:t3"],
        [*start, "user:b", "assistant:t1", "user:e", "assistant:t4"],
        [*start, "user:b", "assistant:t1", "user:e", "assistant:t5"],
        [*start[:2], "assistant:no!", "user:f", "assistant:t6"],
        [*start, "user:g", "assistant:t7"],
        [*start, "user:g", "assistant:t8", "user:h", "assistant:t9"],
        ["user:i", "assistant:t10", "user:j", "assistant:t11"],
        ["user:k", "assistant:t12"],
    ]
    assert [written(row) for row in episode.rows()] == [said(*path) for path in paths]
    # Each turn is sampled, and so trained, once; the rest of its row is prompt.
    assert [decode(chat, turn.action_ids) for turn in episode.turns] == texts
    assert chat.convert_tokens_to_ids("<eos>") not in episode.turns[0].prompt_ids
    assert sum(turn.info["forks"] for turn in episode.turns[:-1]) == 8


def test_calls_of_tools_come_as_calls_and_go_back_as_the_model_wrote_them() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"b": 1, "a": [2]}}</tool_call>'
    episode = played("tools", [f"Let me see.{call}", "<tool_call>{no</tool_call>", "5"])
    assert not episode.error and episode.score == 1.0
    [row] = episode.rows()
    written_calls = [f"assistant:Let me see.{call}", "assistant:<tool_call>{no</tool_call>"]
    told = [one.replace("assistant:", "<|im_start|>assistant\n") + "<|im_end|>" for one in written_calls]
    tool, user = "<|im_start|>tool\n3<|im_end|>", "<|im_start|>user\nwhat?<|im_end|>"
    assert written(row) == "\n".join([said("user:add"), told[0], tool, told[1], user, said("assistant:5")])


@pytest.mark.parametrize("way", ["talk", "branches"])
def test_a_function_is_played_as_the_program_that_calls_it(way: str) -> None:
    one, other = (played(way, [str(n) for n in range(13)], called=called) for called in (False, True))
    assert one.score == other.score and not other.error
    assert [replace(turn, seconds={}) for turn in one.turns] == [replace(turn, seconds={}) for turn in other.turns]
    assert played("waits_for_itself", ["4"], called=True).score == 0.5  # it is async, and returns a mapping


def test_a_function_is_imported_once_and_again_when_its_process_is_gone() -> None:
    def importer() -> int:
        envs = InProcess(lambda: environment("tells_who_imported_it", called=True))
        envs.begin([(0, GAME, 1)])
        [step] = envs.step([(0, "4", "eos")])
        envs.close()
        return int(step.reward)

    first = importer()
    assert importer() == first != os.getpid()
    os.kill(first, signal.SIGKILL)
    nursery = program._nursery(os.getpid(), "tests.contract.asking_program:tells_who_imported_it")
    assert nursery._process is not None and nursery._process[0].wait() == -signal.SIGKILL
    assert importer() != first


def test_a_function_is_forgotten_when_its_owner_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "note.json"
    code = (
        "import os, time; from lmgym.processes.nursery import Nursery; from lmgym.processes.keeper import Program\n"
        "nursery = Nursery('tests.contract.asking_program:sleeps')\n"
        f"Program(nursery.start, dict(os.environ), b'{json.dumps({'note': str(note)})}', 2**20, print)\n"
        "print(nursery._process[0].pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=runs.ROOT, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    nursery = int(owner.stdout.readline())
    until = time.monotonic() + 60
    while not note.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    owner.kill()
    owner.wait()
    assert all(gone(process) for process in (nursery, *json.loads(note.read_text())))


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(
    ("way", "more", "problem"),
    [
        ("silent", {}, "the program ended without a request to the policy"),
        ("failing", {}, "exit status 1: ValueError: no such thing"),
        ("hanging", {"seconds": 3.0}, "worked for more than 3 s"),
        ("writing", {"output_mib": 1}, "wrote more than 1 MiB"),
        ("speechless", {}, "it must be JSON such as"),
        ("nothing", {}, "KeyError"),
    ],
)
def test_a_program_that_fails_costs_its_own_episode(way: str, more: dict[str, Any], problem: str, called: bool) -> None:
    if called and way == "nothing":
        problem = "module tests.contract.asking_program has no 'nothing'; "
    envs = InProcess(lambda: environment(way, called, **more))
    [answer] = envs.begin([(0, GAME, 1)])
    if not isinstance(answer, EnvFailure):
        [answer] = envs.step([(0, "4", "eos")])
    assert isinstance(answer, EnvFailure) and problem in answer.message, answer
    envs.close()


def test_what_is_not_supported_is_refused_and_the_session_goes_on() -> None:
    assert played("misuses", ["4"]).score == 1.0


def test_an_endless_conversation_is_cut_off() -> None:
    episode = played("endless", ["4"] * 5, max_turns=4)
    assert not episode.error and len(episode.turns) == 4 and not episode.terminated and episode.score == 0.0


def test_requests_at_the_same_time_are_turns_of_their_own() -> None:
    episode = played("together", ["4", "5", "6"])
    assert episode.score == 3.0 and len(episode.rows()) == 3


def gone(process: int) -> bool:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process can leave its group unseen")
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("ended", [True, False])
def test_nothing_is_left_of_a_program(ended: bool, called: bool, tmp_path: Path) -> None:
    note = tmp_path / "note.json"
    envs = InProcess(lambda: environment("leaves_something", called))
    envs.begin([(0, Example("a", "b", meta={"note": str(note)}), 1)])
    if ended:
        [step] = envs.step([(0, "4", "eos")])
        assert step.reward == 0.5
    envs.close()
    process, folder = json.loads(note.read_text())
    assert gone(process) and not Path(folder).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can kill a process when its parent dies (prctl)")
@pytest.mark.parametrize("called", [False, True])
def test_a_program_does_not_outlive_its_keeper(called: bool, tmp_path: Path) -> None:
    task = {"note": str(tmp_path / "note.json")}
    nursery, outcomes = Nursery("tests.contract.asking_program:sleeps"), Queue[Outcome]()
    command = [sys.executable, "-m", "tests.contract.asking_program", "sleeps"]
    variables = {**os.environ, "PYTHONPATH": str(runs.ROOT)}
    start: Any = nursery.start if called else command
    Program(start, variables, json.dumps(task).encode(), 2**20, outcomes.put)
    until = time.monotonic() + 60
    while not Path(task["note"]).exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    process, keeper = json.loads(Path(task["note"]).read_text())
    os.kill(keeper, signal.SIGKILL)
    assert outcomes.get(timeout=60).status == -signal.SIGKILL and gone(process)
    nursery.close()


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"command": ["no-such-program"]}, "no program 'no-such-program'"),
        ({"command": []}, "no program ''"),
        ({"command": ["sh"], "function": "a:b"}, "a command and a function; leave one of them out"),
        ({"function": "play"}, "'env.function' is 'play'; write my_module:my_function"),
        ({"command": ["sh"], "ignored": ["messages"]}, "'env.ignored' may name temperature"),
        ({"command": ["sh"], "workers": 2}, "'env.workers' does not go with agent"),
        ({"command": ["sh"], "thoughts": "drop"}, "'env.thoughts' does not go with agent"),
    ],
)
def test_what_is_refused_in_a_recipe(env: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=sentence):
        runs.run(tmp_path / "run", env={"name": "agent", **env})


def test_the_limit_of_time_is_the_programs_own() -> None:
    envs = make_envs({"name": "agent", "command": ["sh"], "seconds": 3.0})
    assert isinstance(envs, InProcess) and envs.seconds is None
    env = envs.make_env()
    assert isinstance(env, AgentProgram) and env.seconds == 3.0


# Whole runs

GRPO = {"name": "grpo", "group_size": 2}
TRAINING = {
    "env": {"name": "agent", "command": [sys.executable, PROGRAM, "wanders"]},
    "policy": {**runs.TINY["policy"], "architecture": {**runs.ARCHITECTURE, "max_position_embeddings": 256}},
    "rewards": None,
    "algorithm": GRPO,
    "evaluation": {"every": 2, "examples": 2},
    "checkpoint": {"every": 1},
    "prompts_per_step": 2,
    "steps": 2,
}


def sampled_by_a_model(ways: list[str], parallel: int = 16) -> tuple[Any, list[Episode]]:
    policy = Policy(models.sharpen(models.llama(max_position_embeddings=512), 0.12), models.byte_tokenizer())
    actor = Actor(Sampler(models.exact(policy), 3), policy.tokenizer)  # fewer rows than episodes
    ways = list(ways)
    envs = InProcess(lambda: environment(ways.pop(0), parallel=parallel))
    prompts = [(place, Example(f"a/{place}", f"{place}")) for place in range(len(ways))]
    episodes = collect(prompts, actor, Sampling(max_new_tokens=6, temperature=0.8), (0, "test"), envs)
    envs.close()
    return policy, episodes


def test_ids_and_log_probabilities_are_those_of_a_pass_over_the_whole_row() -> None:
    policy, episodes = sampled_by_a_model(["branches", "talk"] * 3)
    assert not any(episode.error for episode in episodes)
    worst, compared = 0.0, 0
    for row in (row for episode in episodes for row in episode.rows()):
        ids = [id for turn in row for id in (*turn.prompt_ids, *turn.action_ids)]
        with torch.no_grad():
            logits = policy.model(torch.tensor([ids])).logits[0] / 0.8
        place = 0
        for turn in row:
            place += len(turn.prompt_ids)
            span = torch.arange(place, place + len(turn.action_ids))
            expected = logits.log_softmax(-1)[span - 1, torch.tensor(turn.action_ids)]
            worst = max(worst, float((expected - torch.tensor(turn.logprobs)).abs().max()))
            place, compared = place + len(span), compared + len(span)
    assert compared > 100 and worst < 2e-5


def test_a_program_may_see_the_log_probabilities(tmp_path: Path) -> None:
    policy = Policy(models.sharpen(models.llama(max_position_embeddings=512), 0.12), models.byte_tokenizer())
    envs, example = InProcess(lambda: environment("logprobs")), Example("a", "b", meta={"note": str(tmp_path / "note")})
    [episode] = collect(
        [(0, example)], Actor(Sampler(policy, 3), policy.tokenizer), Sampling(max_new_tokens=6), (0, "test"), envs
    )
    envs.close()
    assert not episode.error
    for turn, seen in zip(episode.turns[:2], json.loads((tmp_path / "note").read_text()), strict=True):
        count = len(turn.action_ids) - (turn.stop == "eos")
        assert [logprob for _, logprob in seen] == turn.logprobs[:count] and count > 0
        assert "".join(text for text, _ in seen) == decode(policy.tokenizer, turn.action_ids)


class Murderous(Stopped):
    """Kills the program, or its keeper, in the middle of these calls."""

    def __init__(self, env: AgentProgram, calls: tuple[int, ...], keeper: bool, *rest: Any) -> None:
        super().__init__(*rest)
        self.env, self.calls, self.keeper, self.count = env, calls, keeper, 0

    def generate(self, requests: Any, sampling: Sampling, ended: Any = None) -> list[Completion]:
        if self.count in self.calls:
            assert self.env._program is not None
            keeper = self.env._program._process.pid  # type: ignore[attr-defined]
            children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
            for one in [keeper] if self.keeper else map(int, children):
                os.kill(one, signal.SIGKILL)
        self.count += 1
        return super().generate(requests, sampling, ended)


def killed_at(way: str, calls: tuple[int, ...], keeper: bool = False) -> Episode:
    env, answers = environment(way), [[*ids_of(str(n)), chat.eos_token_id] for n in range(14)]
    envs, engine = InProcess(lambda: env), Murderous(env, calls, keeper, [answers], [chat.eos_token_id])
    [episode] = collect([(0, GAME)], Actor(engine, chat), Sampling(), (0, "t"), envs)
    envs.close()
    return episode


@pytest.mark.parametrize(
    ("way", "call", "keeper"), [("talk", 0, False), ("talk", 1, True), ("branches", 5, False), ("refused", 1, False)]
)
def test_a_program_that_something_else_kills_goes_on_where_it_was(way: str, call: int, keeper: bool) -> None:
    with pytest.warns(UserWarning, match="killed by something else than lmgym; it is started again"):
        killed = killed_at(way, (call,), keeper)
    assert not killed.error and killed.to_json() == killed_at(way, ()).to_json()


@pytest.mark.filterwarnings("ignore:a program was killed")
def test_a_program_is_started_again_twice_and_must_ask_the_same() -> None:
    with pytest.raises(LmgymError, match="the program ended with exit status 137"):
        killed_at("branches", (3, 4, 6))
    with pytest.raises(LmgymError, match="and then asked something else than before"):
        killed_at("tells_the_time", (0,))


@pytest.mark.parametrize("way", ["tells_the_time", "talk"])
def test_a_program_that_begins_differently_is_noticed(way: str) -> None:
    envs, answers = InProcess(lambda: environment(way)), [[[*ids_of("4"), chat.eos_token_id]] * 2] * 2
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        collect([(0, GAME)] * 2, Actor(Script(answers, [chat.eos_token_id]), chat), Sampling(), (0, "t"), envs)
    envs.close()
    assert [BEGUN_DIFFERENTLY in str(one.message) for one in said] == [True] * (way == "tells_the_time")


def test_a_request_with_a_seed_can_be_asked_again() -> None:
    """Within an episode; another episode that asks with the same seed explores on its own."""
    episodes = sampled_by_a_model(["seeds"] * 2)[1]
    assert [episode.error or episode.score for episode in episodes] == [1.0, 1.0]
    first, second = ([turn.action_ids for turn in episode.turns] for episode in episodes)
    assert first[0] != second[0]


def test_who_is_faster_changes_nothing() -> None:
    """Each program waits for random times; the answers of a session depend on its own requests only."""
    one, other = (sampled_by_a_model(["wanders"] * 4, parallel)[1] for parallel in (1, 16))
    assert [episode.to_json() for episode in one] == [episode.to_json() for episode in other]
    assert len({json.dumps(episode.to_json()) for episode in one}) == 4
    assert all(len(episode.turns) == 5 and not episode.error for episode in one)
    assert any(len(episode.rows()) > 1 for episode in one)


class Names(Script):
    """Answers with the session's tag that the prompt begins with, and a control token's name."""

    def __init__(self) -> None:
        super().__init__([], [chat.eos_token_id])

    def generate(self, requests: Any, sampling: Sampling, ended: Any = None) -> list[Completion]:
        self.asked.append(list(requests))
        tags = [re.findall(r"session \d+", decode(chat, request.prompt_ids)) for request in requests]
        assert all(len({*own}) == 1 for own in tags)
        answers = [[*ids_of(f"[{own[0]}] <|im_"), chat.eos_token_id] for own in tags]
        return [Completion(answer, [-0.5] * len(answer), "eos") for answer in answers]


@pytest.mark.slow
def test_hostile_programs_get_the_answers_of_their_own_sessions() -> None:
    envs = InProcess(lambda: environment("chaos"))
    prompts = [(place, Example(f"a/{place}", f"session {place}")) for place in range(40)]
    episodes = collect(prompts, Actor(Names(), chat), Sampling(), (0, "chaos"), envs)
    envs.close()
    assert [(episode.error, episode.score) for episode in episodes] == [("", 1.0)] * 40
    ends = [chat.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<|im_end|>")]
    for row in (row for episode in episodes for row in episode.rows()):
        ids = [id for turn in row for id in (*turn.prompt_ids, *turn.action_ids)]
        # Texts make no control tokens: as many begin as end.
        assert ids.count(ends[0]) == ids.count(ends[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model's chat template leaves out")
def test_hostile_sessions_in_all_forms() -> None:
    assert sessions.play(range(40)) == []


def test_a_request_that_the_template_refuses_costs_its_own_episode() -> None:
    strict = chat_tokenizer("{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}" + CHATML)
    answers = [[[*ids_of("4"), chat.eos_token_id]] * 4] * 2
    envs = InProcess(lambda: environment(ways.pop(0)))
    ways, actor = ["talk", "together"], Actor(Script(answers, [chat.eos_token_id]), strict)
    first, second = collect([(0, GAME), (1, GAME)], actor, Sampling(), (0, "t"), envs)
    envs.close()
    assert "too many" in first.error and not second.error


def test_so_does_a_first_request_that_the_template_refuses() -> None:
    refusal = "{% if messages[0].role == 'assistant' %}{{ raise_exception('the user comes first') }}{% endif %}"
    answers = [[[*ids_of("4"), chat.eos_token_id]] * 4]
    ways, actor = ["greets", "talk"], Actor(Script(answers, [chat.eos_token_id]), chat_tokenizer(refusal + CHATML))
    envs = InProcess(lambda: environment(ways.pop(0)))
    first, second = collect([(0, GAME), (1, GAME)], actor, Sampling(), (0, "t"), envs)
    envs.close()
    assert "the user comes first" in first.error and not first.turns and not first.selected
    assert not second.error and len(second.turns) == 2


@pytest.mark.slow
def test_a_run_repeats_itself_and_a_resumed_one_is_the_same(tmp_path: Path) -> None:
    one, other = (runs.run(tmp_path / name, **TRAINING) for name in ("one", "other"))
    runs.assert_equal_runs(one, other)
    played = runs.records(one / "rollouts.jsonl")
    assert played and not any(record.get("error") for record in played)
    norms = [record["gradient_norm"] for record in runs.records(one / "metrics.jsonl") if record["kind"] == "train"]
    assert len(norms) == 2 and all(norm > 0 for norm in norms)
    parts = runs.run(tmp_path / "parts", Interrupting(at=1), **TRAINING)
    runs.run(parts, **TRAINING)
    runs.assert_equal_runs(one, parts)


PAGES = "".join((runs.ROOT / "docs" / name).read_text("utf-8") for name in ("agents.md", "agents_that_learn.md"))


def snippet(name: str, folder: Path) -> str:
    """A program of the pages as a file."""
    found = rf"<!-- file: {name} -->\n```\w+\n(.*?\n)```\n"
    [text] = re.findall(found, PAGES, re.DOTALL)
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("curl")), reason="needs jq and curl")
def test_the_program_in_a_shell(tmp_path: Path) -> None:
    env = AgentProgram(command=["bash", snippet("next.sh", tmp_path)])
    [episode] = collect_one(env, ["It is 4."], GAME)
    assert not episode.error and episode.score == 0.0
    number = int(episode.messages[-2]["content"])
    [episode] = collect_one(env, [str(number + 1)], GAME)
    assert not episode.error and episode.score == 1.0


@pytest.mark.slow
def test_the_program_of_the_page() -> None:
    pytest.importorskip("openai")
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
    with tempfile.TemporaryDirectory() as folder:
        env = AgentProgram(command=[sys.executable, snippet("my_agent.py", Path(folder))])
        [episode] = collect_one(env, [call, "It is 4."], Example("a/0", "2+2=", meta={"answer": "4"}))
    assert not episode.error and episode.score == 1.0
    assert [message["content"] for message in episode.messages] == ["2+2=", call, "4", "It is 4."]


@pytest.mark.slow
def test_the_game_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    env = AgentProgram(command=[sys.executable, snippet("game.py", tmp_path)])
    [episode] = collect_one(env, ["0", "no", "20"], GAME)  # one guess of three is possible
    assert not episode.error and episode.score == pytest.approx(1 / 3)
    assert [message["content"] for message in episode.messages[4:7]] == [
        "0",
        "No, it is from 1 to 20. Your guess?",
        "no",
    ]


SUM = Example("code/0", "Write add.", meta={"tests": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]})
SOLUTIONS = {
    "right": ("```python\ndef add(a, b):\n    return a + b\n```", 1.0),
    "cut off": ("```python\ndef add(a, b):\n    return a + b", 1.0),
    "half": ("def add(a, b):\n    return int(a) + int(b)", 0.5),
    "leaves": ("import os\nos._exit(0)", 0.0),
    "never ends": ("while True: pass", 0.0),
    "no code": ("I add a and b.", 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLUTIONS)
def test_the_coder_of_the_page(name: str, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    text, reward = SOLUTIONS[name]
    grade = snippet("grade.py", tmp_path)
    if name == "never ends":  # here a test need not take the whole 5 s
        Path(grade).write_text(Path(grade).read_text().replace("timeout=5", "timeout=0.5"))
    command, grader = ([sys.executable, program] for program in (snippet("coder.py", tmp_path), grade))
    [episode] = collect_one(AgentProgram(command=command, grader=grader), [text], SUM)
    assert not episode.error and episode.score == reward


GRADER = """
import json, os, sys
example = json.load(sys.stdin)
process, folder = json.load(open(example["meta"]["note"]))
endpoint = [name for name in os.environ if name.endswith(("_API_KEY", "_BASE_URL"))]
there = os.path.exists(f"/proc/{process}") or os.getcwd() != folder or os.listdir() != ["left.txt"]
print(json.dumps({"reward": 0.25 if "LMGYM_SEED" in os.environ and not endpoint and not there else 0.0}))
"""


def test_a_grader_works_in_the_folder_when_the_program_is_gone_and_without_the_policy(tmp_path: Path) -> None:
    (tmp_path / "grade.py").write_text(GRADER)
    env = environment("leaves_something", grader=[sys.executable, str(tmp_path / "grade.py")])
    [episode] = collect_one(env, ["4"], Example("a", "b", meta={"note": str(tmp_path / "note")}))
    assert not episode.error and episode.score == 0.25
    assert not Path(json.loads((tmp_path / "note").read_text())[1]).exists()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('no marks today')", "exit status 1: no marks today"),
        ("print('well done')", "last line of the program's output is .well done"),
        ("import time; time.sleep(60)", "worked for more than 1.5 s"),
    ],
)
def test_a_grader_that_fails_costs_the_episode(program: str, said: str) -> None:
    env = environment("talk", grader=[sys.executable, "-c", program], seconds=1.5)
    with pytest.raises(LmgymError, match=said):
        collect_one(env, ["4", "22"], GAME)


def test_graders_that_cannot_be() -> None:
    with pytest.raises(LmgymError, match=r"'env\.grader': there is no program 'gradr'"):
        environment("talk", grader=["gradr"])
    with pytest.raises(LmgymError, match="a function returns its reward itself"):
        environment("talk", called=True, grader=["python"])


@pytest.mark.parametrize("name", ["agent.yaml", "next.yaml", "code.yaml"])
def test_the_recipes_of_the_page_are_read(name: str) -> None:
    [text] = re.findall(rf"```yaml\n# {name}.*?\n(.*?)```", PAGES, re.DOTALL)
    tree = yaml.safe_load(text)
    for key in tree["env"].keys() & {"command", "grader"}:
        tree["env"][key][0] = sys.executable
    assert build_config(tree).stages[0].env["name"] == "agent"


def counted(episode: Episode, number: int) -> list[int]:
    """The tokens before a turn in its row, and those that it has sampled."""
    row = next(row for row in episode.rows() if any(turn is episode.turns[number] for turn in row))
    place = next(place for place, turn in enumerate(row) if turn is episode.turns[number])
    before = sum(len(turn.prompt_ids) + len(turn.action_ids) for turn in row[:place]) + len(row[place].prompt_ids)
    return [before, len(row[place].action_ids)]


def official(file: str, said: list[str], note: Path, **more: Any) -> Episode:
    command = [sys.executable, str(Path(PROGRAM).with_name(file))]
    env = AgentProgram(command=command, tool_prompt="system", **more)
    [episode] = collect_one(env, said, Example("game/0", "2+2=", meta={"note": str(note)}))
    assert not episode.error and episode.score == 1.0, episode.error
    assert len(episode.turns) == len(said)
    return episode


@pytest.mark.slow
def test_the_official_client_of_openai(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    answers = [call, "3", "streamed", "one", "two", "after", "4", "b", "c"]
    episode = official("openai_program.py", answers, tmp_path / "note", ignored=["temperature"])
    rows = episode.rows()
    assert [len(row) for row in rows] == [3, 1, 2, 1, 1, 1]
    # A completion's prompt is a text, without the template and without control tokens.
    assert written(rows[3]) == "2+2=4<|im_end|>"
    assert chat.convert_tokens_to_ids("<eos>") not in rows[4][0].prompt_ids
    # Usage: of several choices the prompt counts once.
    one, two = counted(episode, 3), counted(episode, 4)
    assert json.loads((tmp_path / "note").read_text()) == [
        *(counted(episode, number) for number in (0, 2)),
        [one[0], one[1] + two[1]],
        counted(episode, 6),
        [counted(episode, 7)[0], 4],
    ]


@pytest.mark.slow
def test_the_official_client_of_anthropic(tmp_path: Path) -> None:
    pytest.importorskip("anthropic")
    calls = [f'<tool_call>{{"name": "add", "arguments": {{"a": 1, "b": {b}}}}}</tool_call>' for b in ("2", '"\u00e9"')]
    answers = [f"Let me see.{calls[0]}", "3", "streamed!", calls[1]]
    episode = official("anthropic_program.py", answers, tmp_path / "note")
    rows = episode.rows()
    assert [len(row) for row in rows] == [3, 1]
    assert written(rows[0][1:2]).startswith("\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>user\nWell?<|im_end|>")
    assert json.loads((tmp_path / "note").read_text()) == [counted(episode, number) for number in range(4)]


def test_a_program_that_is_ended_before_it_begins_counts_as_killed() -> None:
    """The owner is gone before the keeper starts anything; the watch's thread is given time to see it."""
    code = (
        "import os, threading, time; from lmgym.processes import keeper\n"
        "usual = threading.Thread.start\n"
        "threading.Thread.start = lambda thread: (usual(thread), time.sleep(1))\n"
        "near, far = os.pipe(); os.close(far)\n"
        "keeper.tend(near, [lambda folder: exit('started')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=runs.ROOT, timeout=60)
    assert done.returncode == 128 + signal.SIGKILL


MANY = """
import resource, sys
from functools import partial
from lmgym.core.errors import LmgymError
from lmgym.envs.program import AgentProgram
from lmgym.envs.vector import InProcess
from lmgym.types import Example

soft, hard, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
envs = InProcess(partial(AgentProgram, command=[sys.executable, "-S", program, "talk"], seconds=60.0))
try:
    print(*(type(one).__name__ for one in envs.begin([(i, Example(f"game/{i}", "2+2="), i) for i in range(15)])))
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except LmgymError as error:
    print(error)
finally:
    envs.close()
"""


@pytest.mark.parametrize(
    ("soft", "hard", "said"),
    [
        (60, 4096, " ".join(["Opening"] * 15) + f"\n{128 + 15 * 5}"),
        (
            140,
            140,
            "env agent can play 2 episodes at a time in a process, since each needs 5 open files; lower engine.rows, "
            "or raise the limit of open files (ulimit -Hn)",
        ),
    ],
)
def test_more_programs_than_open_files(soft: int, hard: int, said: str) -> None:
    """The process's own limit is raised; where the system's is too low, it is said, and no program waits in vain."""
    command = [sys.executable, "-c", MANY, str(soft), str(hard), PROGRAM]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.stdout.strip() == said, ended.stderr


def test_what_cannot_start_leaves_no_file_open() -> None:
    def fails(*given: Any) -> Any:
        raise OSError("no more processes")

    nursery = Nursery("tests.contract.asking_program:sleeps")
    open_before = len(os.listdir("/dev/fd"))
    for start in (fails, lambda far_end, variables, given: nursery.start(99_999, variables, given)):  # no such file
        with pytest.raises(OSError):
            Program(start, {}, b"{}", output=2**20, ended=print)
    nursery.close()
    gc.collect()  # sockets
    assert len(os.listdir("/dev/fd")) == open_before
